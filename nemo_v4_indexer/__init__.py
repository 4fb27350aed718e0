"""The DeepSeek-V4 lightning indexer for Megatron and NeMo.

Importing this package loads no TileLang, Megatron, NeMo or CUDA: public names resolve on first use.
"""

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "IndexerConfig": "config",
    "LayerConfig": "config",
    "AttentionConfig": "config",
    "v4_lighting_indexer": "ops.indexer",
    "v4_lighting_indexer_sample": "ops.indexer",
    "V4IndexerFunction": "ops.indexer",
    "pytorch_extract_topk_scores": "ops.indexer",
    "indexer_kl_loss": "ops.loss",
    "indexer_memory": "costs",
    "V4Indexer": "layer",
    "V4SelfAttention": "attention",
    "v4_layer_spec": "integrations.megatron",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name):
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_PUBLIC})
