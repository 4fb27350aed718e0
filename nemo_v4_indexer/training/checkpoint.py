"""Checkpoints: one folder per saved step, complete or absent, readable under any tensor-parallel size.

    checkpoints/step_00000100/   shard_0000.pt ... one per rank that owns part of the model, config.yaml, then meta.json
    checkpoints/latest           the name of the newest one

A folder is written under a temporary name and renamed when every byte is on disk, so a kill at any moment leaves the
earlier checkpoints as they were. A shard holds the pieces of the global tensors that its rank owns, so a reader takes
whatever part of them it needs.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from omegaconf import OmegaConf

from nemo_v4_indexer.training import files
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.world import World, from_rank_0

FORMAT = 1
_NAME = re.compile(r"step_(\d{8})")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, whatever else an interrupted run left there."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / "meta.json").is_file())


def read_meta(path: Path) -> dict[str, Any]:
    """Step, configuration and counters of a checkpoint. Raises UsageError when it was written by another format."""
    meta = json.loads((path / "meta.json").read_text())
    if meta["format"] != FORMAT:
        raise UsageError(f"{path} has checkpoint format {meta['format']}, this version reads format {FORMAT}")
    return meta


def initialize_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its (zero) AdamW state now, so that saved and fresh optimizers have the same parts."""
    for parameter in _parameters(optimizer):
        state = optimizer.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for moment in _MOMENTS:
            state[moment] = torch.zeros_like(parameter)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pieces(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[ShardedTensor], dict[str, Any]]:
    """This rank's part of every global tensor, as views of the live ones, and the AdamW state by parameter key."""
    tree = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    parameters = _parameters(optimizer)
    states = {}
    by_id = get_param_id_to_sharded_param_map(tree, parameters)
    for index, parameter in enumerate(parameters):
        if index not in by_id:
            raise RuntimeError("a trained parameter is missing from the model's sharded_state_dict")
        states[by_id[index].key] = state = optimizer.state[parameter]
        for moment in _MOMENTS:
            tree[f"optimizer.{moment}.{index}"] = make_sharded_optimizer_tensor(
                by_id[index], state[moment], prefix=f"optimizer.{moment}"
            )
    apply_factories(tree)
    pieces = [value for value in nested_values(tree) if isinstance(value, ShardedTensor) and value.data is not None]
    return pieces, states


def save(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    meta: Mapping[str, Any],
    world: World,
    keep: int,
) -> Path:
    """Write the checkpoint of `meta["step"]` unless it is there; every rank calls it.

    Raises OSError on every rank when any of them cannot write.
    """
    path = folder / f"step_{meta['step']:08d}"
    if from_rank_0(lambda: path in _complete(folder)):
        return path
    draft = folder / f".writing_{path.name}"
    if world.is_main:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    world.largest(0)  # the folder exists before anyone writes
    failure = None
    try:
        if world.data_rank == 0:
            _write_shard(draft / f"shard_{world.tensor_rank:04d}.pt", model, optimizer)
    except OSError as error:
        failure = error
    if world.largest(int(failure is not None)):
        raise failure or OSError(f"another rank could not write its part of {path}")
    if world.is_main:
        files.write_text(draft / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(meta["config"]))))
        files.write_text(draft / "meta.json", json.dumps({"format": FORMAT, **meta}, indent=1))
        files.sync_folder(draft)
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
        files.sync_folder(folder)
        files.write_text(folder / "latest", path.name + "\n")
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    world.largest(0)  # nobody goes on (or exits) before the checkpoint is complete
    return path


def _write_shard(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pieces, states = _pieces(model, optimizer)
    payload = {
        "pieces": [
            (p.key, tuple(p.global_shape), tuple(p.global_offset), p.data.detach().to("cpu", copy=True).contiguous())
            for p in pieces
            if is_main_replica(p.replica_id)
        ],
        "adam_steps": {key: float(state["step"]) for key, state in states.items()},
        "random": torch.get_rng_state(),
    }
    with path.open("wb") as stream:
        torch.save(payload, stream)
        files.sync(stream)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Fill the model, the AdamW state and the random state from `path`. Raises UsageError when parts are missing."""
    shards, saved = _read(path)
    pieces, states = _pieces(model, optimizer)
    with torch.no_grad():
        for piece in pieces:
            _fill(piece, saved.get(piece.key, []), path)
    for key, state in states.items():
        state["step"].fill_(next(shard["adam_steps"][key] for shard in shards if key in shard["adam_steps"]))
    torch.set_rng_state(shards[min(world.tensor_rank, len(shards) - 1)]["random"].clone())


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, list]]:
    """The shards of a checkpoint, and (global shape, offset, data) of the pieces of every tensor."""
    shards = [torch.load(file, weights_only=True, mmap=True) for file in sorted(path.glob("shard_*.pt"))]
    saved: dict[str, list] = {}
    for shard in shards:
        for key, shape, offset, data in shard["pieces"]:
            saved.setdefault(key, []).append((tuple(shape), tuple(offset), data))
    return shards, saved


def load_weights(source: Path, model: torch.nn.Module) -> tuple[Path, list[str]]:
    """Fill the model's weights alone from a checkpoint or from the newest one of an output folder.

    Indexer weights that it lacks stay as they are. Returns the checkpoint's folder and the names of those weights.
    Raises UsageError when there is no checkpoint or when it lacks anything else.
    """
    path = source if (source / "meta.json").is_file() else newest(source / "checkpoints")
    if path is None:
        raise UsageError(f"train.init_from={source} is neither a checkpoint nor an output folder that holds one")
    read_meta(path)
    _, saved = _read(path)
    tree = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    apply_factories(tree)
    fresh = []
    with torch.no_grad():
        for piece in nested_values(tree):
            if not isinstance(piece, ShardedTensor) or piece.data is None:
                continue
            if piece.key not in saved and ".indexer." in piece.key:
                fresh.append(piece.key)
            else:
                _fill(piece, saved.get(piece.key, []), path)
    return path, sorted(set(fresh))


def _fill(piece: ShardedTensor, saved: Iterable, path: Path) -> None:
    """Copy the saved parts that overlap `piece` into its live tensor."""
    start, filled = piece.global_offset, 0
    ones = (1,) * piece.prepend_axis_num
    target = piece.data.view(*ones, *piece.data.shape)
    stop = [a + n for a, n in zip(start, target.shape, strict=True)]
    for shape, offset, data in saved:
        if shape != tuple(piece.global_shape):
            raise UsageError(f"{path}: {piece.key} has shape {shape}, this model has {tuple(piece.global_shape)}")
        data = data.view(*ones, *data.shape)
        low = [max(a, b) for a, b in zip(start, offset, strict=True)]
        high = [min(a, b + n) for a, b, n in zip(stop, offset, data.shape, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            target[here].copy_(data[there])
            filled += target[here].numel()
    if filled != target.numel():
        raise UsageError(f"{path} does not hold the whole of {piece.key}: {filled} of {target.numel()} numbers")


def remove_all(folder: Path) -> None:
    """Delete every checkpoint and draft under `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
