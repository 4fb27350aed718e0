"""Named tensors from safetensors files, single or sharded, read one at a time; and writing them."""

import contextlib
import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FP8_BLOCK = 128
"""Rows and columns of a weight that share one scale in DeepSeek's fp8 checkpoints."""


def is_scale(name):
    """Whether a tensor is the block scale of an fp8 weight: X.scale (V4) or X.weight_scale_inv (V3.2)."""
    return name.endswith((".scale", ".weight_scale_inv"))


class Tensors:
    """Tensors by name. `shape` and `dtype` read no data from files."""

    def __init__(self, held: Mapping, files: Mapping, stack: contextlib.ExitStack):
        self._held, self._files, self._stack, self._open = held, files, stack, {}

    def names(self):
        return [*self._held, *self._files]

    def _file(self, name):
        path = self._files[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path]

    def shape(self, name):
        if name in self._held:
            return tuple(self._held[name].shape)
        return tuple(self._file(name).get_slice(name).get_shape())

    def _is_fp8(self, name):
        if name in self._held:
            return self._held[name].dtype == torch.float8_e4m3fn
        return self._file(name).get_slice(name).get_dtype() == "F8_E4M3"

    def tensor(self, name):
        return self._held[name] if name in self._held else self._file(name).get_tensor(name)

    def _scale_name(self, name):
        base = name.removesuffix(".weight")
        known = self._held.keys() | self._files.keys()
        return next((n for n in (f"{base}.scale", f"{name}_scale_inv") if n in known), None)

    def scale_problems(self, name):
        """What is wrong with the block scales of an fp8 weight, as text."""
        if not self._is_fp8(name):
            return []
        scale = self._scale_name(name)
        if scale is None:
            return [f"{name} is fp8 and its scale {name.removesuffix('.weight')}.scale is missing"]
        expected = tuple(math.ceil(n / FP8_BLOCK) for n in self.shape(name))
        given = self.shape(scale)
        return [] if given == expected else [f"{scale} has shape {given}, expected {expected}"]

    def dequantized(self, name):
        """The tensor; fp32 weight times scale where it is stored in fp8."""
        value = self.tensor(name)
        if not self._is_fp8(name):
            return value
        scale = self.tensor(self._scale_name(name)).float()
        for dim in (0, 1):
            scale = scale.repeat_interleave(FP8_BLOCK, dim)
        return value.float() * scale[: value.shape[0], : value.shape[1]]


@contextlib.contextmanager
def open_tensors(source):
    """`Tensors` of a mapping, a .safetensors file, an index.json, or a folder that holds one of the two.

    Raises:
        FileNotFoundError: none of these, or a shard that the index names is absent.
        TypeError: source is of another type.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, Mapping):
            yield Tensors(source, {}, stack)
            return
        if not isinstance(source, str | PathLike):
            raise TypeError(f"source must be a mapping or a path, got {type(source).__name__}")
        yield Tensors({}, _locate(Path(source)), stack)


def _locate(path):
    """{tensor name: file} of a checkpoint."""
    if path.is_dir():
        path = path / INDEX if (path / INDEX).is_file() else path / SINGLE
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: expected a .safetensors file, {INDEX} or a folder with one")
    if path.suffix != ".json":
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    index = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(index.get("weight_map"), dict):
        raise ValueError(f"{path} has no weight_map: expected a map of tensor names to files")
    files = {name: path.parent / file for name, file in index["weight_map"].items()}
    absent = sorted({file.name for name, file in files.items() if ".indexer." in name and not file.is_file()})
    if absent:
        raise FileNotFoundError(f"{path} names files that are absent: {', '.join(absent)}")
    return files


def save(tensors, path, max_shard_bytes=None):
    """Write named tensors to a .safetensors file, or to a folder (with an index.json when it takes several files).

    Returns:
        paths of the written files, the index last.
    """
    path, metadata = Path(path), {"format": "pt"}
    if path.suffix == ".safetensors":
        if max_shard_bytes is not None:
            raise ValueError(f"max_shard_bytes needs a folder as path, got the file {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata)
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        save_file(tensors, path / SINGLE, metadata)
        return [path / SINGLE]
    files = [path / f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map = {}
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, file, metadata)
        weight_map |= dict.fromkeys(shard, file.name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, path / INDEX]


def _shards(tensors, max_bytes):
    shards, size = [{}], 0
    for name, tensor in tensors.items():
        if max_bytes is not None and shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
