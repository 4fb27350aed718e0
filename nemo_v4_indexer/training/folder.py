"""The run's output folder: who may write there, what is already in it, and whether a run may go on from it."""

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_v4_indexer.training import checkpoint, megatron_checkpoint
from nemo_v4_indexer.training.config import PretrainConfig
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.options import DEFAULTS, FREE

# What may differ when a run goes on: nothing that changes the numbers of the steps still to come by more than rounding,
# apart from their count, whose effect on the schedule is reported.
_FREE = (
    "output_dir", "device", "engine", "parallel.", "indexer.backend", "indexer.workspace_mib", "indexer.balance_rows",
    "train.steps", "train.resume", "train.overwrite", "train.eval_interval", "train.eval_batches",
    "train.checkpoint_interval", "train.keep", "train.log_interval", "train.threads", "train.init_from",
    "train.micro_batch_size", "data.path", *(f"megatron.{name}" for name in FREE),
)  # fmt: skip
_CHECKPOINTS = {"embedded": checkpoint, "megatron": megatron_checkpoint}


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

    def start(
        self, engine: str, config: PretrainConfig, resolved: Mapping[str, Any], data: str | None
    ) -> tuple[Path | None, list[str]]:
        """Decide where the run begins: the checkpoint to load (None for a fresh start) and notes for the user.

        engine: the one that trains; resolved: the plain configuration; data: the corpus fingerprint, if there is one.
        Raises UsageError when going on would not continue the same run, or when a fresh start would delete checkpoints
        without leave.
        """
        kinds = dict(_CHECKPOINTS)
        newest = kinds.pop(engine).newest(self.checkpoints)
        other, foreign = next((name, kind.newest(self.checkpoints)) for name, kind in kinds.items())
        if not config.train.resume:
            found = newest or foreign
            if found and not config.train.overwrite:
                raise UsageError(
                    f"output_dir={self.root} already holds checkpoints (newest: {found.name}): continue them with "
                    "train.resume=true, delete them with train.overwrite=true, or choose another output_dir"
                )
            if found:
                checkpoint.remove_all(self.checkpoints)
            for stale in (self.metrics, self.curves):
                stale.unlink(missing_ok=True)
            return None, []
        if newest is None and foreign:
            raise UsageError(
                f"cannot continue {foreign}: it was saved by engine={other}, and this run uses engine={engine}"
            )
        if newest is None:
            return None, [f"train.resume=true, but {self.checkpoints} holds no complete checkpoint: starting fresh"]
        meta = _CHECKPOINTS[engine].read_meta(newest)
        step, notes = meta["step"], []
        if step > config.train.steps:
            raise UsageError(f"train.steps={config.train.steps} is below the {step} steps that {newest} already took")
        if meta["config"] is None:
            return newest, [f"{self.config} is missing: settings were not compared", f"continuing after step {step}"]
        _same_run(newest, meta, resolved, data)
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


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values as a checkpoint spells them, with the options of the Megatron engine that a run has by default.

    There null is the same as nothing.
    """
    options = {**DEFAULTS, **(values.get("megatron") or {})}
    given = {name: value for name, value in options.items() if value is not None}
    return _flat(json.loads(json.dumps({**values, "megatron": given})))


def _same_run(path: Path, meta: Mapping[str, Any], resolved: Mapping[str, Any], data: str | None) -> None:
    old, new = _settings(meta["config"]), _settings(resolved)
    changed = [
        f"{key} ({old.get(key, 'absent')!r} before, {new.get(key, 'absent')!r} now)"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, "absent") != new.get(key, "absent") and not key.startswith(_FREE)
    ]
    if not changed and meta["data"] != data and None not in (meta["data"], data):
        changed = ["the text itself (other files, or another Python's library)"]
    if changed:
        raise UsageError(f"cannot continue {path}: it was trained with other settings: {'; '.join(changed)}")
