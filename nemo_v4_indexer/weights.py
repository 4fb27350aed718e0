"""Indexer weights between this package's indexers and Hugging Face checkpoints.

    layers.N.attn.indexer.{wq_b,weights_proj}.weight                              N counts from 0; mtp.N for MTP layers
    layers.N.attn.indexer.compressor.{wkv.weight,wgate.weight,ape,norm.weight}    ratio > 1 (DeepSeek-V4)
    model.layers.N.self_attn.indexer.{wk.weight,k_norm.weight,k_norm.bias}        ratio 1 (DeepSeek-V3.2, GLM-5)

Any prefix before `layers` and `mtp`, `attn` or `self_attn`, and NeMo AutoModel's flat names
(`self_attn.compressor.indexer.{wkv,wgate,ape_param,kv_norm}`) are read too. Indexer parameters are replicated over
tensor parallel ranks, so every rank loads all of them and one rank saves. Files are read tensor by tensor.

Rotary pairs of ratio 1: DeepSeek-V3.2 turns the channels (i, i + R/2) of the first R, GLM-5 the pairs (2i, 2i + 1)
(`indexer_rope_interleave: true` in its config.json). This package's layer turns (i, i + R/2); with
`pairing="interleaved"` the rotary channels of wq_b, wk and k_norm are reordered, which leaves every score the same.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from nemo_v4_indexer import weights_files
from nemo_v4_indexer.config import LayerConfig

logger = logging.getLogger(__name__)

PAIRINGS = ("half_split", "interleaved")
LAYOUTS = ("v4", "v32")
_NAME = re.compile(
    r"(?:^|\.)(?P<stack>layers|mtp)\.(?P<index>\d+)\.(?:attn|self_attn)\.(?P<rest>(?:compressor\.|indexer\.).+)$"
)
_FLAT = {"wkv.": "compressor.wkv.", "wgate.": "compressor.wgate.", "kv_norm.": "compressor.norm."}
_UNCOMPRESSED = {"keys.wk.weight": "wk.weight", "keys.norm.weight": "k_norm.weight", "keys.norm.bias": "k_norm.bias"}


class Key(NamedTuple):
    """Where a tensor belongs: the 1-based number of its layer, and its name below `attn.`."""

    layer_number: int
    name: str


class Slot(NamedTuple):
    """A parameter, and the settings of its layer."""

    parameter: torch.nn.Parameter
    layer: LayerConfig
    num_layers: int
    """Decoder layers of the model; MTP layers have larger numbers."""


def find_indexers(model):
    """The indexers of a model (or of an iterable of modules), in layer order."""
    roots = [model] if isinstance(model, torch.nn.Module) else list(model)
    found = [m for root in roots for m in root.modules() if _is_indexer(m)]
    return sorted(found, key=lambda m: m.layer.layer_number)


def _is_indexer(module):
    layer = getattr(module, "layer", None)
    return isinstance(layer, LayerConfig) and layer.has_indexer and hasattr(module, "weights_proj")


def parameter_slots(model, attention_compressor=False):
    """`Slot` of every checkpoint tensor of the model's indexers, by `Key`.

    attention_compressor: the main attention's compressor too, where a module holds one beside its indexer.

    Raises:
        ValueError: the model has no indexer, or two of one layer.
    """
    slots = {}
    for indexer in find_indexers(model):
        # Indexers of other hosts name their parameters differently and say how.
        names = getattr(indexer, "checkpoint_names", _UNCOMPRESSED)
        for own, parameter in indexer.named_parameters():
            key = Key(indexer.layer.layer_number, "indexer." + names.get(own, own))
            if key in slots:
                raise ValueError(f"two indexers have layer number {key.layer_number}; expected one per layer")
            slots[key] = Slot(parameter, indexer.layer, indexer.config.num_layers)
    if not slots:
        raise ValueError(f"{type(model).__name__} holds no indexer: expected at least one layer of kind 'sparse'")
    if attention_compressor:
        slots |= _attention_slots(model)
    return slots


def _attention_slots(model):
    roots = [model] if isinstance(model, torch.nn.Module) else list(model)
    slots = {}
    for module in (m for root in roots for m in root.modules()):
        layer, compressor = getattr(module, "layer", None), getattr(module, "compressor", None)
        if isinstance(layer, LayerConfig) and compressor is not None and not _is_indexer(module):
            for own, parameter in compressor.named_parameters():
                slot = Slot(parameter, layer, module.config.num_layers)
                slots[Key(layer.layer_number, f"compressor.{own}")] = slot
    return slots


def parse_name(name, num_layers, attention_compressor=False):
    """`Key` of a checkpoint tensor, or None for a tensor that is no part of an indexer."""
    match = _NAME.search(name)
    if match is None:
        return None
    number = int(match["index"]) + 1 + (num_layers if match["stack"] == "mtp" else 0)
    rest = match["rest"]
    if rest.startswith("compressor.indexer."):
        rest = rest.removeprefix("compressor.")
    owner, _, rest = rest.partition(".")
    if owner == "compressor" and not attention_compressor:
        return None
    rest = re.sub(r"(^|\.)ape_param\.weight$", r"\1ape", rest)
    if owner == "indexer":
        rest = "compressor.ape" if rest == "ape" else rest
        rest = next((new + rest.removeprefix(old) for old, new in _FLAT.items() if rest.startswith(old)), rest)
    else:
        rest = re.sub(r"^kv_norm\.", "norm.", rest)
    return Key(number, f"{owner}.{rest}")


def checkpoint_name(key, num_layers, layout):
    """Hugging Face name of a tensor; layout "v4" or "v32"."""
    index = key.layer_number - 1
    if layout == "v32":
        return f"model.layers.{index}.self_attn.{key.name}"
    stack = f"layers.{index}" if index < num_layers else f"mtp.{index - num_layers}"
    return f"{stack}.attn.{key.name}"


def load_indexer_weights(
    model, source, *, strict=True, other_layers=False, pairing="half_split", attention_compressor=False
):
    """Copy indexer weights from a checkpoint into a model. Nothing is written unless everything fits.

    Args:
        model: a model, or an iterable of indexers.
        source: a mapping of names to tensors, a .safetensors file, an index.json, or a folder with either.
        strict: refuse missing tensors, and indexer tensors without a place.
        other_layers: with strict, let indexer tensors of layers that this model lacks pass (pipeline parallelism).
        pairing: rotary pairs of the checkpoint's ratio-1 layers, "half_split" (DeepSeek-V3.2) or "interleaved" (GLM-5).
        attention_compressor: load the main attention's compressor too.

    Returns:
        names of the checkpoint tensors that were loaded, sorted. fp8 weights are multiplied by their block scales.

    Raises:
        ValueError: tensors are missing, extra or of another shape; the message names each, with what was expected.
        FileNotFoundError: no such checkpoint.
    """
    _check_choice("pairing", pairing, PAIRINGS)
    slots = parameter_slots(model, attention_compressor)
    num_layers = next(iter(slots.values())).num_layers
    with weights_files.open_tensors(source) as tensors:
        found, problems = _match(tensors, slots, num_layers, strict, other_layers, attention_compressor)
        if problems:
            raise ValueError("indexer weights do not fit the model:\n  " + "\n  ".join(problems))
        lowered = []
        with torch.no_grad():
            for key, name in found.items():
                slot = slots[key]
                value = _reordered(tensors.dequantized(name), key, slot.layer, pairing, "half_split")
                if torch.promote_types(value.dtype, slot.parameter.dtype) != slot.parameter.dtype:
                    lowered.append(name)
                slot.parameter.copy_(value)
    if lowered:
        logger.warning("%d indexer tensors were rounded to the model's dtype, among them %s", len(lowered), lowered[0])
    return sorted(found.values())


def _match(tensors, slots, num_layers, strict, other_layers, attention_compressor):
    """{Key: checkpoint name} of the tensors to load, and the problems as text."""
    found, extra, problems = {}, [], []
    layers = {key.layer_number for key in slots}
    for name in sorted(tensors.names()):
        key = parse_name(name, num_layers, attention_compressor)
        if key is None or weights_files.is_scale(name):
            continue
        if key not in slots:
            if not other_layers or key.layer_number in layers:
                extra.append(name)
        elif key in found:
            problems.append(f"{name} and {found[key]} both name {key.name} of layer {key.layer_number}")
        else:
            found[key] = name
            given, expected = tensors.shape(name), tuple(slots[key].parameter.shape)
            if given != expected:
                problems.append(f"{name} has shape {given}, expected {expected}")
            problems.extend(tensors.scale_problems(name))
    if strict:
        layout = _default_layout(slots)
        missing = [checkpoint_name(key, num_layers, layout) for key in slots if key not in found]
        problems += [f"{name} is missing" for name in missing]
        problems += [f"{name} is extra: no indexer of this model has it" for name in extra]
    return found, problems


def export_indexer_weights(model, *, layout=None, pairing="half_split", attention_compressor=False):
    """Indexer weights under their Hugging Face names.

    Args:
        model: a model, or an iterable of indexers.
        layout: "v4" or "v32" names; None: v32 where every indexer has ratio 1.
        pairing: rotary pairs the reader of ratio-1 weights expects, see `load_indexer_weights`.
        attention_compressor: export the main attention's compressor too.

    Returns:
        dict of contiguous CPU tensors in the parameters' dtypes; copies.
    """
    _check_choice("pairing", pairing, PAIRINGS)
    slots = parameter_slots(model, attention_compressor)
    layout = layout or _default_layout(slots)
    _check_choice("layout", layout, LAYOUTS)
    out = {}
    for key, slot in slots.items():
        value = slot.parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        value = _reordered(value, key, slot.layer, "half_split", pairing)
        out[checkpoint_name(key, slot.num_layers, layout)] = value.to("cpu", copy=True).contiguous()
    return out


def save_indexer_weights(model, path, *, max_shard_bytes=None, **options):
    """Write `export_indexer_weights(model, **options)` as safetensors.

    Args:
        path: a .safetensors file, or a folder: model.safetensors in it, or shards with an index.json.
        max_shard_bytes: start a new shard beyond this size; folders only.

    Returns:
        paths of the written files.
    """
    return weights_files.save(export_indexer_weights(model, **options), path, max_shard_bytes)


def _default_layout(slots: Mapping[Key, Slot]):
    return "v32" if all(slot.layer.compress_ratio == 1 for slot in slots.values()) else "v4"


def _reordered(value, key, layer, given, wanted):
    """The tensor with the rotary channels of a ratio-1 layer in the wanted pairing."""
    if given == wanted or layer.compress_ratio != 1 or key.name == "indexer.weights_proj.weight":
        return value
    heads = value.unflatten(0, (-1, layer.head_dim))
    rotary, plain = heads[:, : layer.rope.dim], heads[:, layer.rope.dim :]
    pairs = (-1, 2) if given == "interleaved" else (2, -1)
    rotary = rotary.unflatten(1, pairs).transpose(1, 2).flatten(1, 2)
    return torch.cat([rotary, plain], dim=1).flatten(0, 1)


def _check_choice(name: str, value: str, allowed: Iterable[str]):
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
