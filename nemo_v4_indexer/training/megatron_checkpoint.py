"""Megatron's distributed checkpoints in a run's output folder: where a run begins, and what it begins from."""

import shutil
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory

from nemo_v4_indexer.training.errors import UsageError

_LATEST = "latest_checkpointed_iteration.txt"


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint of a folder that Megatron saved to, or None."""
    try:
        iteration = (folder / _LATEST).read_text().strip()
    except OSError:
        return None
    return folder / f"iter_{int(iteration):07d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def prepare(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Delete what a fresh run may delete. Raises UsageError when it may not."""
    found = newest(folder)
    if found is None or resume:
        return
    if not overwrite:
        raise UsageError(
            f"{folder} already holds checkpoints (newest: {found.name}): continue them with train.resume=true, delete "
            "them with train.overwrite=true, or choose another output_dir"
        )
    shutil.rmtree(folder)


def _locate(source: Path) -> Path:
    if (source / "metadata.json").is_file():
        return source
    found = newest(source) or newest(source / "checkpoints")
    if found is None:
        raise UsageError(f"train.init_from={source} is neither a Megatron checkpoint nor a folder that holds one")
    return found


def _wanted(model: torch.nn.Module, path: Path) -> tuple[dict, list[str]]:
    """The model's entries that a checkpoint has, and the names of the weights that it lacks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tree = model.sharded_state_dict(metadata={"non_homogeneous_layers": True, "dp_cp_group": group})
    saved = dist_checkpointing.load_tensors_metadata(str(path))
    known, lacking = {}, []
    for name, entry in tree.items():
        weights = [
            part for part in nested_values({name: entry}) if isinstance(part, ShardedTensor | ShardedTensorFactory)
        ]
        if all(part.key in saved for part in weights):
            if weights or not isinstance(entry, ShardedBase):
                known[name] = entry
        else:
            lacking += [part.key for part in weights if part.key not in saved]
    return known, lacking


def check_complete(path: Path, model: torch.nn.Module) -> None:
    """UsageError when a checkpoint to go on from lacks weights of the model."""
    _, lacking = _wanted(model, path)
    if lacking:
        hint = "train.init_from starts indexers that a checkpoint lacks from random weights"
        raise UsageError(f"{path} lacks {len(lacking)} weights of this model, such as {lacking[0]}; {hint}")


def load_weights(source: Path, model: torch.nn.Module) -> tuple[Path, list[str]]:
    """Fill a bare model's weights alone. Indexer weights that the checkpoint lacks stay as they are.

    Returns the checkpoint's folder and the names of those weights. Raises UsageError when it lacks anything else.
    """
    path = _locate(source)
    known, lacking = _wanted(model, path)
    others = [name for name in lacking if ".indexer." not in name]
    if others:
        raise UsageError(f"{path} lacks {len(others)} weights of this model, such as {others[0]}")
    model.load_state_dict(dist_checkpointing.load(known, str(path)), strict=False)
    return path, lacking
