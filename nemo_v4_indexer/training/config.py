"""The pretraining application's configuration: frozen, strictly checked, made from plain dictionaries."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
from nemo_v4_indexer.training.errors import UsageError

ENGINES = ("embedded",)
DEVICES = ("auto", "cpu", "cuda")
SOURCES = ("stdlib", "text_file")


def _require(ok: bool, key: str, expected: str, value: Any) -> None:
    if not ok:
        raise UsageError(f"{key} must be {expected}, got {value!r}")


def _at_least(section: str, config: Any, minimum: int | float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or value >= minimum, f"{section}.{name}", f"at least {minimum}", value)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    source: str = "stdlib"
    """`stdlib`: the running interpreter's own library; `text_file`: a file or folder of the user's."""
    path: str | None = None
    """File or folder, for `text_file`."""
    pattern: str = "*"
    """Shell pattern that file names in the folder must match."""
    sequence_length: int = 256
    """Tokens (bytes) per sample."""
    validation_fraction: float = 0.05
    """Share of the files (of the bytes, when there is a single file) kept for validation."""

    def __post_init__(self) -> None:
        _require(self.source in SOURCES, "data.source", f"one of {', '.join(SOURCES)}", self.source)
        _at_least("data", self, 2, "sequence_length")
        _require(
            0.0 < self.validation_fraction < 1.0, "data.validation_fraction", "in (0, 1)", self.validation_fraction
        )
        if self.source == "text_file" and not self.path:
            raise UsageError("data.path must name a text file or a folder when data=text_file, got nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    steps: int
    """Optimizer steps in all, counted from the very start of the run."""
    seed: int = 1234
    resume: bool = False
    """Continue from the newest complete checkpoint in the output folder; start fresh when there is none."""
    overwrite: bool = False
    """Allow a fresh run to delete the checkpoints that the output folder already holds."""
    batch_size: int = 8
    """Sequences per optimizer step over all ranks."""
    micro_batch_size: int | None = None
    """Sequences per forward pass on one rank; None takes the whole share of the rank."""
    lr: float = 3e-3
    min_lr: float = 3e-4
    lr_warmup_steps: int = 20
    lr_decay_steps: int | None = None
    """Steps until `min_lr` is reached; None means `steps`."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    eval_interval: int = 100
    """Steps between validations; 0 validates only at the end."""
    eval_batches: int = 4
    """Batches of `batch_size` fixed validation windows; 0 turns validation off."""
    checkpoint_interval: int = 100
    """Steps between checkpoints; 0 saves only at the end or when interrupted."""
    keep: int = 2
    """Newest checkpoints kept."""
    log_interval: int | None = None
    """Steps between progress lines when the output is not a terminal; None prints about twenty lines."""
    threads: int | None = None
    """CPU threads per process; None shares the cores this process may use among the ranks."""

    def __post_init__(self) -> None:
        _at_least("train", self, 1, "steps", "batch_size", "micro_batch_size", "lr_decay_steps", "keep", "log_interval")
        _at_least("train", self, 1, "threads")
        _at_least("train", self, 0, "seed", "lr_warmup_steps", "eval_interval", "eval_batches", "checkpoint_interval")
        _at_least("train", self, 0, "lr", "min_lr", "weight_decay", "grad_clip")
        _require(self.lr > 0, "train.lr", "greater than 0", self.lr)
        _require(self.eps > 0, "train.eps", "greater than 0", self.eps)
        _require(self.min_lr <= self.lr, "train.min_lr", f"at most train.lr ({self.lr})", self.min_lr)
        _require(self.seed < 2**63, "train.seed", "below 2**63", self.seed)
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"train.{name}", "in [0, 1)", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    tensor: int = 1
    """Tensor-parallel ranks; the remaining ranks of the launch are data-parallel."""
    sequence: bool = False
    """Split the sequence over the tensor-parallel ranks (needs tensor > 1)."""
    context: int = 1
    """Context-parallel ranks: each holds and queries its share of the sequence, in Megatron's zigzag order."""

    def __post_init__(self) -> None:
        _at_least("parallel", self, 1, "tensor", "context")
        if self.sequence and self.tensor == 1:
            raise UsageError("parallel.sequence=true needs parallel.tensor greater than 1, got parallel.tensor=1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes around the attention."""

    hidden_size: int
    num_layers: int
    ffn_hidden_size: int
    num_mtp_layers: int = 0

    def __post_init__(self) -> None:
        _at_least("model", self, 1, "hidden_size", "num_layers", "ffn_hidden_size")
        _at_least("model", self, 0, "num_mtp_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """Everything one run needs."""

    model: ModelConfig
    attention: AttentionConfig
    indexer: IndexerConfig
    data: DataConfig
    train: TrainConfig
    parallel: ParallelConfig
    output_dir: str
    engine: str = "embedded"
    device: str = "auto"
    """`auto` uses the GPU when there is one per rank."""

    def __post_init__(self) -> None:
        _require(self.engine in ENGINES, "engine", f"one of {', '.join(ENGINES)}", self.engine)
        _require(self.device in DEVICES, "device", f"one of {', '.join(DEVICES)}", self.device)
        _require(bool(self.output_dir), "output_dir", "a folder name", self.output_dir)
        length, tensor = self.data.sequence_length, self.parallel.tensor
        if self.parallel.sequence and length % tensor:
            raise UsageError(f"data.sequence_length={length} must be a multiple of parallel.tensor={tensor}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PretrainConfig":
        """Build from a composed, plain mapping. Raises UsageError naming the offending key."""
        _refuse_unknown(values, [field.name for field in dataclasses.fields(cls) if field.name != "attention"], "")
        for name in ("model", "indexer", "data", "train", "parallel", "output_dir"):
            if values.get(name) is None:
                raise UsageError(f"the configuration has no {name!r}")
        model = dict(_section(values, "model"))
        if "attention" not in model:
            raise UsageError("the configuration has no 'model.attention'")
        attention = _library_section(AttentionConfig, model, "attention", "model.")
        del model["attention"]
        return cls(
            model=_dataclass(ModelConfig, model, "model"),
            attention=attention,
            indexer=_library_section(IndexerConfig, values, "indexer"),
            data=_dataclass(DataConfig, _section(values, "data"), "data"),
            train=_dataclass(TrainConfig, _section(values, "train"), "train"),
            parallel=_dataclass(ParallelConfig, _section(values, "parallel"), "parallel"),
            **{name: _typed(values[name], str, name) for name in ("output_dir", "engine", "device") if name in values},
        )

    def micro_batches(self, data_parallel: int) -> tuple[int, int]:
        """Sequences per forward pass and forward passes per step for each of `data_parallel` ranks."""
        batch = self.train.batch_size
        if batch % data_parallel:
            raise UsageError(f"train.batch_size={batch} must be a multiple of the {data_parallel} data-parallel ranks")
        share = batch // data_parallel
        micro = self.train.micro_batch_size or share
        if share % micro:
            raise UsageError(
                f"train.micro_batch_size={micro} must divide the {share} sequences of one rank "
                f"(train.batch_size={batch} over {data_parallel} data-parallel ranks)"
            )
        return micro, share // micro


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    _require(isinstance(values[name], Mapping), name, "a group of keys", values[name])
    return values[name]


def _library_section(cls: Any, values: Mapping[str, Any], name: str, parent: str = "") -> Any:
    try:
        return cls.from_dict(_section(values, name))
    except (TypeError, ValueError) as error:
        key = str(error).removeprefix(f"{name}.")  # the library names its keys from its own root
        known = key.startswith(tuple(field.name for field in dataclasses.fields(cls)))
        raise UsageError(f"{parent}{name}{'.' if known else ': '}{key}") from error


def _refuse_unknown(values: Mapping[str, Any], known: list[str], prefix: str) -> None:
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"unknown key {prefix}{key}; {hint}")


def _dataclass(cls: Any, values: Mapping[str, Any], section: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    _refuse_unknown(values, list(fields), f"{section}.")
    hints = typing.get_type_hints(cls)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise UsageError(f"{section}.{name} is missing")
    return cls(**{name: _typed(value, hints[name], f"{section}.{name}") for name, value in values.items()})


def _typed(value: Any, hint: Any, key: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = options[0]
    expected = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
    if type(None) in options:
        expected += " or null"
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 3e-3 as a text
        try:
            value = float(value)
        except ValueError:
            _require(False, key, expected, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    _require(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), key, expected, value)
    _require(kind is not float or math.isfinite(value), key, "a finite number", value)
    return value
