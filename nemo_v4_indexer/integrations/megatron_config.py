"""The indexer's settings in Megatron's TransformerConfig."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
from nemo_v4_indexer.ops.loss import set_loss_scale
from nemo_v4_indexer.sharding import CP_LAYOUTS


def settings_of(config):
    """The settings that a Megatron config holds as `v4_indexer` and `v4_attention`, objects or maps.

    Returns:
        (`IndexerConfig`, `AttentionConfig`).

    Raises:
        TypeError: the config has no such attributes.
        ValueError: one is missing or out of form, or their layer and head counts differ from Megatron's.
    """
    found = []
    for name, kind in (("v4_indexer", IndexerConfig), ("v4_attention", AttentionConfig)):
        if not hasattr(config, name):
            raise TypeError(f"a V4 model needs a V4TransformerConfig, got {type(config).__name__}")
        value = getattr(config, name)
        if value is None:
            raise ValueError(
                f"{type(config).__name__} needs {name}: a {kind.__name__} or a mapping that makes one, got None"
            )
        found.append(value if isinstance(value, kind) else kind.from_dict(value))
    indexer, attention = found
    _require_agreement(config, indexer, attention)
    return indexer, attention


def _require_agreement(config, indexer, attention):
    for ours, theirs, value in (
        ("v4_indexer.num_layers", "num_layers", indexer.num_layers),
        ("v4_attention.n_heads", "num_attention_heads", attention.n_heads),
    ):
        if value != getattr(config, theirs):
            raise ValueError(f"{ours} is {value}, but {theirs} is {getattr(config, theirs)}; they must agree")


def hold_settings(config, indexer, attention):
    """Put settings in a Megatron config, where `settings_of` finds them, and what they mean for Megatron beside them.

    Args:
        config: TransformerConfig, or one whose construction is not complete.
        indexer: `IndexerConfig`. attention: `AttentionConfig`.

    Raises:
        ValueError: layer or head counts differ from Megatron's.
    """
    _require_agreement(config, indexer, attention)
    config.v4_indexer, config.v4_attention = indexer, attention
    suit_layers(config)


def suit_layers(config):
    """Set what V4 layers need of a Megatron config: checkpoints of layers that differ, and the loss scale's way."""
    config.hetereogenous_dist_checkpoint = True  # layers differ: Megatron must not store them as one stacked tensor
    if config.experimental_attention_variant_loss_scale_func is None:
        config.experimental_attention_variant_loss_scale_func = set_loss_scale


def require_no_position_embedding(position_embedding_type):
    """ValueError for position embeddings beside the attention's own."""
    if position_embedding_type != "none":
        raise ValueError(
            "position_embedding_type must be 'none': the attention rotates its own queries and keys, got "
            f"{position_embedding_type!r}"
        )


@dataclass
class V4TransformerConfig(TransformerConfig):
    """Megatron's TransformerConfig with the indexer and the attention around it.

    Raises:
        ValueError: indexer or attention is missing, or their layer and head counts differ from Megatron's.
    """

    v4_indexer: Any = None
    """`IndexerConfig`, or the mapping that makes one."""
    v4_attention: Any = None
    """`AttentionConfig`, or the mapping that makes one."""
    cp_layout: str = "zigzag"
    """Rows of context parallel ranks: "zigzag" (Megatron's batches) or "contiguous"."""
    mlp_activation: str | None = None
    """`activation_func` by its name in torch.nn.functional, kept beside it because Megatron saves no functions."""

    def __post_init__(self):
        named = getattr(torch.nn.functional, self.mlp_activation or self.activation_func.__name__, None)
        if self.mlp_activation is None:
            self.mlp_activation = self.activation_func.__name__ if named is self.activation_func else None
        elif named is None or self.activation_func not in (named, torch.nn.functional.gelu):
            raise ValueError(
                f"mlp_activation must name the function of torch.nn.functional that is activation_func, got "
                f"{self.mlp_activation!r} and {self.activation_func.__name__}"
            )
        else:
            self.activation_func = named
        if self.cp_layout not in CP_LAYOUTS:
            raise ValueError(f"cp_layout must be one of {', '.join(CP_LAYOUTS)}, got {self.cp_layout!r}")
        hold_settings(self, *settings_of(self))
        super().__post_init__()
