"""The run's output folder: who may write there, what is already in it, and whether a run may go on from it."""

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_v4_indexer.training import checkpoint
from nemo_v4_indexer.training.config import PretrainConfig
from nemo_v4_indexer.training.errors import UsageError

# What may differ when a run goes on: nothing that changes the numbers of the steps still to come, apart from their
# count, whose effect on the schedule is reported.
_FREE = (
    "output_dir", "device", "engine", "parallel.", "indexer.backend", "indexer.workspace_mib", "train.steps",
    "train.resume", "train.overwrite", "train.eval_interval", "train.eval_batches", "train.checkpoint_interval",
    "train.keep", "train.log_interval", "train.threads", "train.init_from", "data.path",
)  # fmt: skip


class RunFolder:
    """Paths under `output_dir`."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.config = self.root / "config.yaml"
        self.metrics = self.root / "metrics.jsonl"
        self.curves = self.root / "curves.png"
        self.checkpoints = self.root / "checkpoints"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out of the folder. Raises UsageError when the folder is in use or cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            stream = (self.root / ".lock").open("w")
        except OSError as error:
            raise UsageError(f"output_dir={self.root} cannot be written: {error.strerror}") from error
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"output_dir={self.root} is in use by another run") from error
            yield

    def start(self, config: PretrainConfig, resolved: Mapping[str, Any], data: str) -> tuple[Path | None, list[str]]:
        """Decide where the run begins: the checkpoint to load (None for a fresh start) and notes for the user.

        resolved: the plain configuration; data: the corpus fingerprint. Raises UsageError when going on would not
        continue the same run, or when a fresh start would delete checkpoints without leave.
        """
        newest = checkpoint.newest(self.checkpoints)
        if not config.train.resume:
            if newest and not config.train.overwrite:
                raise UsageError(
                    f"output_dir={self.root} already holds checkpoints (newest: {newest.name}): continue them with "
                    "train.resume=true, delete them with train.overwrite=true, or choose another output_dir"
                )
            checkpoint.remove_all(self.checkpoints)
            for stale in (self.metrics, self.curves):
                stale.unlink(missing_ok=True)
            return None, []
        if newest is None:
            return None, [f"train.resume=true, but {self.checkpoints} holds no complete checkpoint: starting fresh"]
        meta = checkpoint.read_meta(newest)
        _same_run(newest, meta, resolved, data)
        step, notes = meta["step"], []
        if step > config.train.steps:
            raise UsageError(f"train.steps={config.train.steps} is below the {step} steps that {newest} already took")
        before = meta["config"]["train"]["steps"]
        if before != config.train.steps and config.train.lr_decay_steps is None:
            notes.append(
                f"train.steps changed from {before} to {config.train.steps}: so does the learning rate's decay"
            )
        return newest, [*notes, f"continuing after step {step}"]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _same_run(path: Path, meta: Mapping[str, Any], resolved: Mapping[str, Any], data: str) -> None:
    old, new = _flat(meta["config"]), _flat(json.loads(json.dumps(resolved)))  # as the checkpoint spells it
    changed = [
        f"{key} ({old.get(key, 'absent')!r} before, {new.get(key, 'absent')!r} now)"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, "absent") != new.get(key, "absent") and not key.startswith(_FREE)
    ]
    if not changed and meta["data"] != data:
        changed = ["the text itself (other files, or another Python's library)"]
    if changed:
        raise UsageError(f"cannot continue {path}: it was trained with other settings: {'; '.join(changed)}")
