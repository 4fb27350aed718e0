"""NeMo AutoModel 0.7: its DeepSeek-V4 model with this package's indexer, trained instead of frozen.

    model:
      _target_: nemo_v4_indexer.integrations.automodel.build_model     # needs NEMO_ENABLE_USER_MODULES=1
      config: {...}                    # fields of AutoModel's DeepseekV4Config, or a folder with a config.json
      v4_indexer: {topk: 512, layers: {3: {topk: 256}}, loss: {coeff: 0.01}}
    optimizer:
      _target_: nemo_v4_indexer.integrations.automodel.AdamW

`build_model` makes the whole model on every rank, which suits models that fit there. For larger ones AutoModel's own
entry point, which shards before it allocates, takes `indexed_config` as its config:

    model:
      _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
      config:
        _target_: nemo_v4_indexer.integrations.automodel.indexed_config
        source: /checkpoints/DeepSeek-V4-Flash
        v4_indexer: {...}
      load_base_model: true

Nothing of AutoModel is patched: the indexer submodules of one model are replaced, their parameters keep their names,
and hooks attach the loss. AutoModel freezes all DeepSeek-V4 indexers after a model is built; the optimizer config
above is the next thing its recipe calls with the model, and undoes that.

Where it differs from AutoModel's own PyTorch path, with the same weights (in fp32 both select the same, ties aside):
- among equal scores the lower index wins; AutoModel takes the order of torch.topk, which is unspecified;
- the rotary table and the pooled keys stay fp32 until rotated; AutoModel rounds both to the model's dtype before;
- indices are ascending, and -1 where a row sees fewer entries; AutoModel masks them after the selection;
- scores never exist as a whole [S, S / 4] tensor, which is why its indexer is replaced rather than its kernels.
Not supported: packed sequences (THD) and context parallelism raise; pipeline parallelism is untested. AutoModel builds
indexers for ratio 4 alone. The metrics are the losses: recall would need the attention's mass on entries it leaves out.
"""

import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import torch

from nemo_v4_indexer.config import IndexerConfig
from nemo_v4_indexer.integrations.automodel_config import check_model_keys, indexer_config
from nemo_v4_indexer.integrations.automodel_host import (
    BackendConfig,
    DeepseekV4Attention,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV4Indexer,
    ModelRegistry,
)
from nemo_v4_indexer.integrations.automodel_indexer import DistilledIndexer, attach_loss, keep_entries
from nemo_v4_indexer.integrations.automodel_optimizer import (
    AdamW,
    follow_steps,
    indexer_metrics,
    set_indexer_step,
    unfreeze_indexers,
)
from nemo_v4_indexer.weights import find_indexers

__all__ = [
    "AdamW",
    "V4IndexerForCausalLM",
    "build_model",
    "follow_steps",
    "indexed_config",
    "indexer_metrics",
    "install_indexers",
    "restore_indexers",
    "set_indexer_step",
    "unfreeze_indexers",
]

logger = logging.getLogger(__name__)
ARCHITECTURE = "V4IndexerForCausalLM"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class V4IndexerForCausalLM(DeepseekV4ForCausalLM):
    """AutoModel's model, with the indexers that `config.v4_indexer` describes."""

    def __init__(self, config, moe_config=None, backend=None, **kwargs):
        plan = indexer_config(config, getattr(config, "v4_indexer", None))
        config.compress_ratios = [layer.compress_ratio for layer in plan.plan()]
        super().__init__(config, moe_config, backend, **kwargs)
        install_indexers(self, plan)


ModelRegistry.register(ARCHITECTURE, V4IndexerForCausalLM, exist_ok=True)


def indexed_config(source, v4_indexer=None, **changes):
    """A DeepseekV4Config whose models carry this package's indexers, for AutoModel's own entry points.

    Args:
        source: mapping of DeepseekV4Config's fields, an instance, or a folder with (or the path of) a config.json.
        v4_indexer: mapping, see `automodel_config.indexer_config`; None: the one that source has.
        changes: fields of the config to change, e.g. num_nextn_predict_layers=0 to drop the MTP layers.

    Raises:
        ValueError: an unknown key or a value out of form; the message names it.
        FileNotFoundError: no config.json at the given path.
        TypeError: source is of another type.
    """
    check_model_keys(changes, DeepseekV4Config)
    if isinstance(source, Mapping):
        check_model_keys(source, DeepseekV4Config)
        config = DeepseekV4Config(**(dict(source) | changes))
    elif isinstance(source, DeepseekV4Config | str | PathLike):
        config = source if isinstance(source, DeepseekV4Config) else _read_config(source)
        for name, value in changes.items():
            setattr(config, name, value)
        if "num_nextn_predict_layers" in changes and "compress_ratios" not in changes:
            layers = config.num_hidden_layers + config.num_nextn_predict_layers
            config.compress_ratios = config.compress_ratios[:layers]
    else:
        raise TypeError(f"source must be a mapping, a path or a DeepseekV4Config, got {type(source).__name__}")
    given = getattr(config, "v4_indexer", None) if v4_indexer is None else v4_indexer
    plan = indexer_config(config, given)
    config.v4_indexer = {key: value for key, value in plan.to_dict().items() if key in (given or {})}
    config.architectures = [ARCHITECTURE]
    return config


def _read_config(path):
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no checkpoint config at {file}: expected a config.json or a folder that holds one")
    config = DeepseekV4Config.from_pretrained(file)
    config.name_or_path = str(file.parent)  # where AutoModel looks for the weights
    return config


def build_model(config, v4_indexer=None, *, backend=None, dtype="bfloat16", device=None):
    """AutoModel's DeepSeek-V4 with this package's indexers and random weights, ready for AutoModel's infrastructure.

    Args:
        config, v4_indexer: see `indexed_config`.
        backend: AutoModel's BackendConfig, or a mapping of its fields; None: its defaults with attn "torch".
        dtype: "bfloat16" or "float32"; what AutoModel keeps in fp32 stays fp32.
        device: where to build; None: this process's GPU, or the CPU where there is none.

    Returns:
        `V4IndexerForCausalLM`.

    Raises:
        ValueError, TypeError, FileNotFoundError: as `indexed_config`, before anything is built.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = indexed_config(config, v4_indexer)
    config.dtype = DTYPES[dtype]
    if not isinstance(backend, BackendConfig):
        backend = BackendConfig(**({"attn": "torch"} if backend is None else dict(backend)))
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = V4IndexerForCausalLM(config, backend=backend)
    model.initialize_weights(buffer_device=torch.device(device), dtype=DTYPES[dtype])
    return model


def _attentions(model):
    return [m for m in model.modules() if isinstance(m, DeepseekV4Attention)]


def install_indexers(model, config):
    """Replace the indexers of an AutoModel DeepSeek-V4 model, keeping their weights.

    Args:
        model: DeepseekV4ForCausalLM, or a part of it. config: `IndexerConfig`, or the mapping `v4_indexer`.

    Returns:
        the new indexers, in layer order.

    Raises:
        ValueError: a layer of the model has another ratio than the config says.
    """
    if not isinstance(config, IndexerConfig):
        config = indexer_config(model.config, config)
    for attention in _attentions(model):
        layer = config.layer(attention.layer_idx + 1)
        if attention.compress_ratio != layer.compress_ratio:
            raise ValueError(
                f"layer {layer.layer_number} of the model has compress_ratio {attention.compress_ratio}, the config "
                f"says {layer.compress_ratio}; a ratio is decided before the model is built (build_model)"
            )
        if layer.has_indexer and isinstance(attention.compressor.indexer, DeepseekV4Indexer):
            _replace(attention, layer, config)
    indexers = find_indexers(model)
    if indexers:
        _say_what_was_done(indexers, config)
    return indexers


def _replace(attention, layer, config):
    compressor = attention.compressor
    original = compressor.indexer
    compressor.indexer = DistilledIndexer(original, layer, config)
    compressor.indexer.train(original.training)
    hooks = (
        compressor.register_forward_hook(keep_entries),
        attention.register_forward_hook(attach_loss, with_kwargs=True),
    )
    # In a tuple: torch would register the module as a second owner of the same parameters.
    compressor.indexer.replaced = (original, hooks)


def restore_indexers(model):
    """Undo `install_indexers`: AutoModel's own indexers again, with the weights as they now are."""
    for attention in _attentions(model):
        compressor = attention.compressor
        if compressor is not None and isinstance(compressor.indexer, DistilledIndexer):
            original, hooks = compressor.indexer.replaced
            for hook in hooks:
                hook.remove()
            compressor.indexer = original.train(compressor.indexer.training)


def _say_what_was_done(indexers, config):
    layers = ", ".join(f"{i.layer.layer_number} (top-k {i.layer.topk})" for i in indexers)
    loss = config.loss
    training = (
        f"trained by the KL loss, coefficient {loss.coeff:g}, {loss.warmup_steps} dense steps"
        if loss.enabled
        else "frozen (loss.coeff is off)"
    )
    logger.info(
        "DeepSeek-V4 indexers of layers %s now run nemo_v4_indexer (backend %s), %s", layers, config.backend, training
    )
