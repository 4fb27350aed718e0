"""What this package uses of NeMo AutoModel 0.7, resolved in one place."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.7."
_V4 = "nemo_automodel.components.models.deepseek_v4"
_SYMBOLS = {
    "DeepseekV4Config": f"{_V4}.config",
    "DeepseekV4ForCausalLM": f"{_V4}.model",
    "DeepseekV4Attention": f"{_V4}.layers",
    "DeepseekV4Indexer": f"{_V4}.layers",
    "BackendConfig": "nemo_automodel.components.models.common",
    "AdamWConfig": "nemo_automodel.components.optim.optimizer",
    "MoEAuxLossAutoScaler": "nemo_automodel.components.moe.megatron.moe_utils",
    "ModelRegistry": "nemo_automodel._transformers.registry",
}


def _installed():
    try:
        return version("nemo-automodel")
    except PackageNotFoundError:
        raise ImportError(
            "nemo_v4_indexer.integrations.automodel needs nemo-automodel 0.7, which is not installed: "
            "pip install 'nemo-v4-indexer[automodel]'"
        ) from None


def resolve(name):
    """A symbol of AutoModel.

    Raises:
        ImportError: nemo-automodel is absent, of an untested version, or has moved the symbol.
    """
    found = _installed()
    if not found.startswith(SUPPORTED):
        raise ImportError(f"nemo_v4_indexer supports nemo-automodel {SUPPORTED}x, found {found}")
    module = _SYMBOLS[name]
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"nemo-automodel {found} has no usable {module}.{name}, which 0.7.0 had: {error}") from error


def __getattr__(name):
    if name in _SYMBOLS:
        return resolve(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
