"""Read the indexer's settings from Hugging Face style checkpoint configs. Standard library only.

Key names follow the public config.json files of DeepSeek-V4, DeepSeek-V3.2 and GLM-5, the nested form that
transformers writes for V4 (`layer_types`, `compress_rates`, `rope_parameters`), and the short names of DeepSeek's
inference configs. Nothing that shapes the computation is defaulted silently: public tools guessed rope bases wrong.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from .config_parsing import expand, is_list, real, rule, whole, wrong


def load(source: str | PathLike | Mapping) -> Mapping:
    """The config as a mapping: given as one, or read from config.json (the file, or a folder that holds it)."""
    if not isinstance(source, Mapping):
        if not isinstance(source, str | PathLike):
            raise wrong("source", source, "a mapping, the path of a config.json, or a folder that holds one")
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(
                f"no checkpoint config at {path}: expected a config.json or a folder that holds one"
            )
        try:
            source = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(source, Mapping):
            raise wrong(str(path), source, "a JSON object")
    inner = source.get("text_config")
    return inner if isinstance(inner, Mapping) and not _has(source, "num_hidden_layers", "n_layers") else source


def indexer_settings(source: str | PathLike | Mapping, num_mtp_layers: int | None = None) -> dict[str, Any]:
    """Keyword arguments for IndexerConfig; ValueError naming the key that is missing or not understood."""
    hf = load(source)
    num_layers = whole(1)("num_hidden_layers", _need(hf, "num_hidden_layers", "n_layers"))
    listed = whole(0)("num_nextn_predict_layers", _get(hf, 0, "num_nextn_predict_layers", "n_mtp_layers"))
    mtp = listed if num_mtp_layers is None else whole(0)("num_mtp_layers", num_mtp_layers)
    _refuse_other_designs(hf)
    settings = {"num_layers": num_layers, "num_mtp_layers": mtp}
    ratios = _ratios(hf, num_layers, mtp, trim=num_mtp_layers is not None)
    if ratios is None:
        settings |= {"compress_ratio": 1, "window": 0}
        theta_key = "rope_theta"
    else:
        settings["compress_ratio"] = ratios
        settings["window"] = _need(hf, "sliding_window", "window_size")
        theta_key = "compress_rope_theta"
    rates = hf.get("compress_rates")
    if isinstance(rates, Mapping) and "heavily_compressed_attention" in rates:
        settings["heavy_ratio"] = rates["heavily_compressed_attention"]
    if ratios is None or any(expand("compress_ratios", ratios, num_layers, mtp)):
        settings["topk"] = _need(hf, "index_topk")
        settings["n_heads"] = _need(hf, "index_n_heads")
        settings["head_dim"] = _need(hf, "index_head_dim")
        settings["rope"] = _rope(hf, theta_key)
    return settings


def attention_settings(source: str | PathLike | Mapping) -> dict[str, Any]:
    """Keyword arguments for AttentionConfig; ValueError naming the key that is missing."""
    hf = load(source)
    if "kv_lora_rank" in hf and "o_groups" not in hf:
        raise ValueError(
            f"kv_lora_rank={hf['kv_lora_rank']!r} without o_groups: this checkpoint has multi-head latent attention, "
            "expected the V4 attention (head_dim, q_lora_rank, o_groups, o_lora_rank)"
        )
    return {
        "n_heads": _need(hf, "num_attention_heads", "n_heads"),
        "head_dim": _need(hf, "head_dim"),
        "q_lora_rank": _need(hf, "q_lora_rank"),
        "o_groups": _need(hf, "o_groups"),
        "o_lora_rank": _need(hf, "o_lora_rank"),
        "rope_dim": _rope_dim(hf),
        "rope_theta": _theta(hf, "rope_theta"),
    }


def _has(hf: Mapping, *names: str) -> bool:
    return any(hf.get(name) is not None for name in names)


def _get(hf: Mapping, default: Any, *names: str) -> Any:
    return next((hf[name] for name in names if hf.get(name) is not None), default)


def _need(hf: Mapping, *names: str) -> Any:
    value = _get(hf, None, *names)
    if value is None:
        other = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise ValueError(f"the checkpoint config has no {names[0]}{other}, which has no safe default: expected the key")
    return value


def _ratios(hf: Mapping, num_layers: int, mtp: int, *, trim: bool) -> Any:
    """The ratio rule, or None for a checkpoint whose keys are not compressed."""
    lists = {name: hf[name] for name in ("compress_ratios", "csa_compress_ratios") if _has(hf, name)}
    if len({json.dumps(value, default=list) for value in lists.values()}) > 1:
        raise ValueError(f"compress_ratios and csa_compress_ratios disagree, expected one of them: {lists!r}")
    if lists:
        key, value = next(iter(lists.items()))
        ratios = rule(0)(key, value)
    elif hf.get("compress_rates") is not None and is_list(hf.get("layer_types")):
        key, ratios = "layer_types", _ratios_from_types(hf["layer_types"], hf["compress_rates"])
    elif _has(hf, "compress_rope_theta") or str(hf.get("model_type", "")).startswith("deepseek_v4"):
        return _need(hf, "compress_ratios", "csa_compress_ratios", "layer_types with compress_rates")
    else:
        return None
    if isinstance(ratios, tuple):
        if trim and len(ratios) > num_layers + mtp:
            ratios = ratios[: num_layers + mtp]
        if len(ratios) != num_layers + mtp:
            raise ValueError(
                f"{key} has {len(ratios)} entries, expected {num_layers + mtp}: {num_layers} decoder + {mtp} "
                "multi-token-prediction layers; pass num_mtp_layers to say how many of the latter to keep"
            )
    return ratios


def _ratios_from_types(types: Any, rates: Mapping) -> tuple[int, ...]:
    ratios = []
    for number, name in enumerate(types, start=1):
        if name == "sliding_attention":
            ratios.append(0)
        elif isinstance(name, str) and name in rates:
            ratios.append(whole(1)(f"compress_rates.{name}", rates[name]))
        else:
            raise wrong("layer_types", name, f"sliding_attention or one of {', '.join(rates)}", layer=number)
    return tuple(ratios)


def _refuse_other_designs(hf: Mapping) -> None:
    """Checkpoints with these keys would load, and compute something else."""
    types, sources, every = hf.get("indexer_types"), hf.get("index_source_layer_ids"), hf.get("index_topk_freq")
    if is_list(types) and "shared" in types:
        number = list(types).index("shared") + 1
        raise wrong(
            "indexer_types", "shared", "full (reusing another layer's selection is not supported)", layer=number
        )
    if types is None and every not in (None, 1):
        raise wrong("index_topk_freq", every, "1 (reusing another layer's selection is not supported)")
    if hf.get("index_kpool") not in (None, 1):
        raise wrong("index_kpool", hf["index_kpool"], "1 (keys pooled this way are not supported)")
    if sources is not None:
        raise wrong("index_source_layer_ids", sources, "absent (reusing another layer's selection is not supported)")


def _rope_dim(hf: Mapping) -> int:
    dim = _get(hf, None, "qk_rope_head_dim", "rope_head_dim")
    if dim is None and _has(hf, "partial_rotary_factor") and _has(hf, "head_dim"):
        factor = real(0, above=True)("partial_rotary_factor", hf["partial_rotary_factor"])
        return round(factor * whole(1)("head_dim", hf["head_dim"]))
    return _need(hf, "qk_rope_head_dim", "rope_head_dim")


def _theta(hf: Mapping, name: str) -> Any:
    if _has(hf, name):
        return hf[name]
    nested = hf.get("rope_parameters")
    if isinstance(nested, Mapping):
        # A flat map holds the main base only; the compressed one must come under its own label.
        nested = nested.get("compress", {}) if name == "compress_rope_theta" else nested.get("main", nested)
        if isinstance(nested, Mapping) and _has(nested, "rope_theta"):
            return nested["rope_theta"]
    return _need(hf, name)


def _rope(hf: Mapping, theta_key: str) -> dict[str, Any]:
    rope = {"dim": _rope_dim(hf), "theta": _theta(hf, theta_key)}
    scaling = _get(hf, {}, "rope_scaling", "rope_parameters")
    scaling = scaling.get("compress", scaling) if isinstance(scaling, Mapping) else scaling
    if not isinstance(scaling, Mapping):
        raise wrong("rope_scaling", scaling, "a map or null")
    if not scaling and _has(hf, "rope_factor"):
        scaling = {"type": "yarn", "factor": hf["rope_factor"]}
        scaling["original_max_position_embeddings"] = _need(hf, "original_seq_len")
        scaling |= {name: hf[name] for name in ("beta_fast", "beta_slow") if _has(hf, name)}
    kind = _get(scaling, None, "rope_type", "type")
    if kind == "default" or (kind is None and not _has(scaling, "factor")):
        return rope
    if kind != "yarn":
        raise wrong("rope_scaling.type", kind, "yarn or default")
    for ours, theirs in (("factor", "factor"), ("original_max_position", "original_max_position_embeddings")):
        if not _has(scaling, theirs):
            raise ValueError(f"rope_scaling has no {theirs}, which has no safe default: expected the key")
        rope[ours] = scaling[theirs]
    return rope | {name: scaling[name] for name in ("beta_fast", "beta_slow") if _has(scaling, name)}
