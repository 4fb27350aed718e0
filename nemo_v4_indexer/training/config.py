"""The pretraining application's configuration: frozen, strictly checked, made from plain dictionaries."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.sections import (
    at_least,
    dataclass_section,
    library_section,
    refuse_unknown,
    require,
    section_of,
    typed,
)

ENGINES = ("auto", "embedded", "megatron")
DEVICES = ("auto", "cpu", "cuda")
SOURCES = ("stdlib", "text_file", "mock", "indexed")
BYTE_SOURCES = SOURCES[:2]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    source: str = "stdlib"
    """`stdlib`: the running interpreter's own library; `text_file`: a file or folder of the user's; `mock`: Megatron's
    made-up sequences; `indexed`: tokens in Megatron's .bin and .idx files. The last two are of the Megatron engine."""
    path: str | None = None
    """File or folder, for `text_file`; for `indexed` the files' common name without .bin and .idx, or several as
    Megatron reads them: "weight name weight name"."""
    vocab_size: int | None = None
    """Tokens in the vocabulary, for `mock` and `indexed`; text is read as 256 bytes."""
    pattern: str = "*"
    """Shell pattern that file names in the folder must match."""
    sequence_length: int = 256
    """Tokens (bytes) per sample."""
    validation_fraction: float = 0.05
    """Share of the files (of the bytes, when there is a single file) kept for validation."""

    def __post_init__(self) -> None:
        require(self.source in SOURCES, "data.source", f"one of {', '.join(SOURCES)}", self.source)
        at_least("data", self, 2, "sequence_length", "vocab_size")
        require(0.0 < self.validation_fraction < 1.0, "data.validation_fraction", "in (0, 1)", self.validation_fraction)
        if self.source in ("text_file", "indexed") and not self.path:
            raise UsageError(f"data.path must name what to read when data={self.source}, got nothing")
        if (self.vocab_size is None) != (self.source in BYTE_SOURCES):
            needed = "nothing: text is read as bytes" if self.source in BYTE_SOURCES else "a number"
            raise UsageError(f"data.vocab_size must be {needed} when data={self.source}, got {self.vocab_size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    steps: int
    """Optimizer steps in all, counted from the very start of the run."""
    seed: int = 1234
    resume: bool = False
    """Continue from the newest complete checkpoint in the output folder; start fresh when there is none."""
    overwrite: bool = False
    """Allow a fresh run to delete the checkpoints that the output folder already holds."""
    init_from: str | None = None
    """Checkpoint whose weights a fresh run starts from: an output folder of another run, or one of its step folders.
    Indexers that it lacks start from random weights."""
    freeze_main: bool = False
    """Train the indexers alone in the dense stage (`indexer.loss.warmup_steps`), as DeepSeek-V3.2 did."""
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
        at_least("train", self, 1, "steps", "batch_size", "micro_batch_size", "lr_decay_steps", "keep", "log_interval")
        at_least("train", self, 1, "threads")
        at_least("train", self, 0, "seed", "lr_warmup_steps", "eval_interval", "eval_batches", "checkpoint_interval")
        at_least("train", self, 0, "lr", "min_lr", "weight_decay", "grad_clip")
        require(self.lr > 0, "train.lr", "greater than 0", self.lr)
        require(self.eps > 0, "train.eps", "greater than 0", self.eps)
        require(self.min_lr <= self.lr, "train.min_lr", f"at most train.lr ({self.lr})", self.min_lr)
        require(self.seed < 2**63, "train.seed", "below 2**63", self.seed)
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"train.{name}", "in [0, 1)", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    tensor: int = 1
    """Tensor-parallel ranks; the remaining ranks of the launch are data-parallel."""
    sequence: bool = False
    """Split the sequence over the tensor-parallel ranks (needs tensor > 1)."""
    context: int = 1
    """Context-parallel ranks: each holds and queries its share of the sequence, in Megatron's zigzag order."""
    pipeline: int = 1
    """Pipeline stages; `megatron.*` takes what divides layers unevenly or interleaves stages."""

    def __post_init__(self) -> None:
        at_least("parallel", self, 1, "tensor", "context", "pipeline")
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
        at_least("model", self, 1, "hidden_size", "num_layers", "ffn_hidden_size")
        at_least("model", self, 0, "num_mtp_layers")


def check_freezing(key: str, indexer: IndexerConfig) -> None:
    """UsageError when there would be nothing to train, or no dense stage, with all but the indexers frozen."""
    loss = indexer.loss
    if not (loss.enabled and loss.warmup_steps and any(layer.has_indexer for layer in indexer.plan())):
        raise UsageError(
            f"{key}=true needs a layer with an indexer, loss.coeff above 0 and loss.warmup_steps of at least 1, "
            f"got loss.coeff={loss.coeff}, loss.warmup_steps={loss.warmup_steps}"
        )


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
    engine: str = "auto"
    """`megatron`: megatron-core's training stack, on GPUs; `embedded`: a small loop; `auto`: the first where there is a
    GPU per rank."""
    megatron: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the Megatron engine by Megatron's names; those that other keys set are refused here."""
    device: str = "auto"
    """`auto` uses the GPU when there is one per rank."""

    def __post_init__(self) -> None:
        require(self.engine in ENGINES, "engine", f"one of {', '.join(ENGINES)}", self.engine)
        require(self.device in DEVICES, "device", f"one of {', '.join(DEVICES)}", self.device)
        require(bool(self.output_dir), "output_dir", "a folder name", self.output_dir)
        length, tensor = self.data.sequence_length, self.parallel.tensor
        if self.parallel.sequence and length % tensor:
            raise UsageError(f"data.sequence_length={length} must be a multiple of parallel.tensor={tensor}")
        for name in ("num_layers", "num_mtp_layers"):
            layers, indexed = getattr(self.model, name), getattr(self.indexer, name)
            require(indexed == layers, f"indexer.{name}", f"model.{name} ({layers})", indexed)
        if self.train.freeze_main:
            check_freezing("train.freeze_main", self.indexer)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PretrainConfig":
        """Build from a composed, plain mapping. Raises UsageError naming the offending key."""
        refuse_unknown(values, [field.name for field in dataclasses.fields(cls) if field.name != "attention"], "")
        for name in ("model", "indexer", "data", "train", "parallel", "output_dir"):
            if values.get(name) is None:
                raise UsageError(f"the configuration has no {name!r}")
        model = dict(section_of(values, "model"))
        if "attention" not in model:
            raise UsageError("the configuration has no 'model.attention'")
        attention = library_section(AttentionConfig, model, "attention", "model.")
        del model["attention"]
        return cls(
            model=dataclass_section(ModelConfig, model, "model"),
            attention=attention,
            indexer=library_section(IndexerConfig, values, "indexer"),
            data=dataclass_section(DataConfig, section_of(values, "data"), "data"),
            train=dataclass_section(TrainConfig, section_of(values, "train"), "train"),
            parallel=dataclass_section(ParallelConfig, section_of(values, "parallel"), "parallel"),
            megatron=dict(section_of({"megatron": values.get("megatron") or {}}, "megatron")),
            **{name: typed(values[name], str, name) for name in ("output_dir", "engine", "device") if name in values},
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
