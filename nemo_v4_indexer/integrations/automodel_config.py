"""From an AutoModel DeepSeek-V4 config and a `v4_indexer` section to an `IndexerConfig`. Standard library only."""

import inspect
from collections.abc import Mapping

from nemo_v4_indexer.config import IndexerConfig
from nemo_v4_indexer.config_parsing import reject_unknown, wrong

AUTOMODEL_RATIO = 4
"""The one ratio for which AutoModel builds an indexer."""
SETTINGS = (
    "topk",
    "layers",
    "compress_ratio",
    "rotate",
    "backend",
    "workspace_mib",
    "deterministic",
    "precise",
    "loss",
)
_MODELS_OWN = {
    "num_layers": "num_hidden_layers",
    "num_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "index_n_heads",
    "head_dim": "index_head_dim",
    "window": "sliding_window",
    "rope": "compress_rope_theta and rope_scaling",
    "heavy_ratio": "compress_ratios",
}
_HF_KEYS = ("architectures", "model_type", "dtype", "transformers_version", "name_or_path", "v4_indexer")


def indexer_config(hf_config, v4_indexer=None) -> IndexerConfig:
    """Settings of every layer.

    Args:
        hf_config: AutoModel's DeepseekV4Config, the source of shapes and the default of ratios and top-k.
        v4_indexer: mapping of `SETTINGS`, as in `IndexerConfig` (layer numbers count from 1); rotate is off by default:
            AutoModel does not rotate, and scores are the same.

    Raises:
        ValueError: a key is unknown, belongs to the model config, or has a value out of form; or a layer needs an
            indexer that AutoModel cannot build. The message names the key and the layer.
    """
    given = {} if v4_indexer is None else v4_indexer
    if not isinstance(given, Mapping):
        raise wrong("v4_indexer", given, f"a map with the keys {', '.join(SETTINGS)}")
    for key in given:
        if key in _MODELS_OWN:
            raise ValueError(
                f"v4_indexer has the key {key!r}, which the model config decides: set {_MODELS_OWN[key]} there"
            )
    reject_unknown("v4_indexer", given, SETTINGS)
    config = IndexerConfig.from_dict(_from_model(hf_config) | dict(given))
    for layer in config.plan():
        if layer.has_indexer and layer.compress_ratio != AUTOMODEL_RATIO:
            raise wrong(
                "compress_ratio",
                layer.compress_ratio,
                f"0, {AUTOMODEL_RATIO} or >= {config.heavy_ratio}: NeMo AutoModel builds an indexer for ratio "
                f"{AUTOMODEL_RATIO} alone",
                layer=layer.layer_number,
            )
    if config.loss.enabled and getattr(hf_config, "attention_dropout", 0):
        raise ValueError(
            f"attention_dropout must be 0 for the indexer's loss, got {hf_config.attention_dropout}: the teacher is "
            "the attention without dropout"
        )
    return config


def _from_model(hf):
    mtp = hf.num_nextn_predict_layers or 0
    total = hf.num_hidden_layers + mtp
    ratios = list(hf.compress_ratios or [])
    # AutoModel takes missing entries of MTP layers for 0.
    ratios += [0] * (total - len(ratios)) if len(ratios) >= hf.num_hidden_layers else []
    return {
        "num_layers": hf.num_hidden_layers,
        "num_mtp_layers": mtp,
        "compress_ratio": ratios or 0,
        "topk": hf.index_topk,
        "n_heads": hf.index_n_heads,
        "head_dim": hf.index_head_dim,
        "window": hf.sliding_window,
        "rope": {"dim": hf.qk_rope_head_dim, "theta": hf.compress_rope_theta},
        "rotate": False,
    }


def check_model_keys(settings: Mapping, config_class) -> None:
    """ValueError for a key that AutoModel's config class would swallow without effect."""
    named = [name for name in inspect.signature(config_class.__init__).parameters if name not in ("self", "kwargs")]
    reject_unknown("model.config", settings, [*named, *_HF_KEYS])
