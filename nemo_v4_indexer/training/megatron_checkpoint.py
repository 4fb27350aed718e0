"""Megatron's distributed checkpoints in a run's output folder: where a run begins, and what it begins from."""

import contextlib
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.safe_globals import register_safe_globals
from omegaconf import OmegaConf

from nemo_v4_indexer.training import files
from nemo_v4_indexer.training.errors import UsageError

_LATEST = "latest_checkpointed_iteration.txt"
_LAST_WRITTEN = "metadata.json"
_NAME = re.compile(r"iter_(\d{7,})")
_DELETED = ".deleted_"


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint of a folder that Megatron saved to, or None.

    Megatron names it in a file, which a kill can leave empty; then the last folder that is complete counts.
    """
    named = _named(folder)
    if named is not None:
        return named
    complete = _complete(folder)
    return complete[-1] if complete else None


def _named(folder: Path) -> Path | None:
    try:
        path = folder / f"iter_{int((folder / _LATEST).read_text()):07d}"
    except (OSError, ValueError):
        return None
    return path if _is_complete(path) else None


def _is_complete(path: Path) -> bool:
    return (path / _LAST_WRITTEN).is_file()


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and _is_complete(path)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def read_meta(path: Path) -> dict[str, Any]:
    """Step, configuration and corpus fingerprint of a run's checkpoint; None for what is not known of it."""
    register_safe_globals()  # types in the arguments, which Megatron registers when it starts
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # rank 0 reads alone
        arguments = dist_checkpointing.load_common_state_dict(str(path)).get("args")
    config = path.parent.parent / "config.yaml"
    return {
        "step": step_of(path),
        "config": OmegaConf.to_container(OmegaConf.load(config)) if config.is_file() else None,
        "data": getattr(arguments, "v4_data", None),
    }


def load_from(path: Path) -> None:
    """Let Megatron find the checkpoint that a run goes on from."""
    if _named(path.parent) != path:
        files.write_text(path.parent / _LATEST, f"{step_of(path)}\n")


class KeptCheckpoints:
    """Deletes a run's old checkpoints while it goes on. One rank uses it.

    A checkpoint gets another name before its files are deleted, so that a kill leaves whole ones and rubbish, which the
    next call removes.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._seen: int | None = None

    def prune(self) -> None:
        """After a save: leave the `keep` newest checkpoints up to the one that Megatron finished last."""
        from megatron.training.async_utils import is_empty_async_queue

        try:
            seen = (self._folder / _LATEST).stat().st_mtime_ns  # written when a save is complete
        except OSError:
            return
        if seen == self._seen or not is_empty_async_queue():
            return
        last = _named(self._folder)
        if last is None:
            return
        self._seen = seen
        finished = [path for path in _complete(self._folder) if step_of(path) <= step_of(last)]
        self._clear()
        for path in finished[: -self._keep]:
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rename(path.with_name(f"{_DELETED}{path.name}"))
        self._clear()

    def _clear(self) -> None:
        for path in self._folder.glob(f"{_DELETED}*"):
            shutil.rmtree(path, ignore_errors=True)


def _locate(source: Path) -> Path:
    if _is_complete(source):
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
