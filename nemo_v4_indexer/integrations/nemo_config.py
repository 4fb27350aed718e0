"""The `model` section of a NeMo configuration: what it may hold, strictly checked before anything is built."""

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
from nemo_v4_indexer.training.config import DataConfig, ModelConfig, check_freezing
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.sections import (
    at_least,
    dataclass_section,
    library_section,
    refuse_unknown,
    section_of,
    typed,
)

SECTIONS = ("name", "trainer", "exp_manager", "model")
_NEMO_KEYS = ("target", "nemo_version")  # written into the section by NeMo's ModelPT
_SIZES = ("hidden_size", "num_layers", "num_mtp_layers", "ffn_hidden_size")
_KEYS = (*_SIZES, "attention", "v4_indexer", "data", "train_ds", "validation_ds", "optim", "seed", "freeze_main")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainLoader:
    batch_size: int
    """Sequences per forward pass on one rank; `trainer.accumulate_grad_batches` of them make a step."""

    def __post_init__(self):
        at_least("model.train_ds", self, 1, "batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationLoader:
    batch_size: int
    batches: int
    """Fixed batches, spread over the validation text."""

    def __post_init__(self):
        at_least("model.validation_ds", self, 1, "batch_size", "batches")


@dataclass(frozen=True, kw_only=True, slots=True)
class NemoModelConfig:
    """Everything of the `model` section but `optim`, which NeMo reads."""

    sizes: ModelConfig
    attention: AttentionConfig
    indexer: IndexerConfig
    """Without a `v4_indexer` section: full causal attention in every layer."""
    data: DataConfig
    train_ds: TrainLoader
    validation_ds: ValidationLoader | None
    seed: int
    freeze_main: bool
    """Train the indexers alone in the dense stage (`v4_indexer.loss.warmup_steps`)."""

    @classmethod
    def from_dict(cls, model):
        """Build from the plain `model` mapping. Raises UsageError naming the key, from the file's root."""
        refuse_unknown(model, [*_KEYS, *_NEMO_KEYS], "model.")
        for name in ("attention", "data", "train_ds", "optim"):
            if model.get(name) is None:
                raise UsageError(f"the configuration has no model.{name}")
        sizes = dataclass_section(ModelConfig, {name: model[name] for name in _SIZES if name in model}, "model")
        if sizes.num_mtp_layers:
            raise UsageError(
                "model.num_mtp_layers must be 0: multi-token-prediction layers are not trained under NeMo, got "
                f"{sizes.num_mtp_layers}"
            )
        data = dataclass_section(DataConfig, section_of(model, "data"), "model.data")
        config = cls(
            sizes=sizes,
            attention=library_section(AttentionConfig, model, "attention", "model."),
            indexer=_indexer(model, sizes, data.sequence_length),
            data=data,
            train_ds=dataclass_section(TrainLoader, section_of(model, "train_ds"), "model.train_ds"),
            validation_ds=_validation(model),
            seed=typed(model.get("seed", 1234), int, "model.seed"),
            freeze_main=typed(model.get("freeze_main", False), bool, "model.freeze_main"),
        )
        if config.freeze_main:
            check_freezing("model.freeze_main", config.indexer)
        return config


def _validation(model):
    if model.get("validation_ds") is None:
        return None
    return dataclass_section(ValidationLoader, section_of(model, "validation_ds"), "model.validation_ds")


def _indexer(model, sizes, sequence_length):
    settings = model.get("v4_indexer")
    if settings is None:
        return IndexerConfig(num_layers=sizes.num_layers, compress_ratio=0, window=sequence_length)
    if isinstance(settings, Mapping):
        settings = {"num_layers": sizes.num_layers, **settings}
    indexer = library_section(IndexerConfig, {"v4_indexer": settings}, "v4_indexer", "model.")
    for name in ("num_layers", "num_mtp_layers"):
        if getattr(indexer, name) != getattr(sizes, name):
            raise UsageError(
                f"model.v4_indexer.{name} must agree with model.{name} ({getattr(sizes, name)}), "
                f"got {getattr(indexer, name)}"
            )
    return indexer


def check_sections(values):
    """UsageError for a top-level key that NeMo configurations of this kind do not have, or that is missing."""
    refuse_unknown(values, list(SECTIONS), "")
    for name in ("trainer", "exp_manager", "model"):
        if values.get(name) is None:
            raise UsageError(f"the configuration has no {name}")
        section_of(values, name)
