"""megatron-core 0.19.2: layer spec, model builder, loss hook and metrics. Nothing of Megatron is patched."""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_model_config

from nemo_v4_indexer import parallel
from nemo_v4_indexer.attention import V4SelfAttention, V4SelfAttentionSubmodules
from nemo_v4_indexer.diagnostics import Statistics
from nemo_v4_indexer.integrations.megatron_cli import FollowingIndexer, take_settings
from nemo_v4_indexer.integrations.megatron_config import V4TransformerConfig, settings_of
from nemo_v4_indexer.layer import V4Indexer, collecting
from nemo_v4_indexer.modules import RMSNorm

__all__ = [
    "V4TransformerConfig",
    "build_gpt_model",
    "collecting",
    "finalize_gradients",
    "freeze_main",
    "indexer_metrics",
    "set_indexer_step",
    "v4_layer_spec",
    "v4_mtp_spec",
]


def v4_layer_spec(config, vp_stage=None):
    """Layers of this pipeline stage, each with the settings of its global number.

    Usable as a `transformer_layer_spec`, and as `--spec nemo_v4_indexer.integrations.megatron v4_layer_spec` on
    Megatron's own command line. A config made there holds no settings: they are put in it, from the YAML file that the
    environment variable NEMO_V4_INDEXER_CONFIG names, and the loss stage follows Megatron's iteration.

    Args:
        config: `V4TransformerConfig`, another with its settings, or a model config that holds one as `transformer`; or
            such a config of Megatron's own.
        vp_stage: virtual pipeline stage, or None.

    Returns:
        TransformerBlockSubmodules.

    Raises:
        TypeError: config has no settings and no file is named.
        ValueError: settings out of form or that differ from Megatron's sizes, or, with settings from a file, options
            that the layers do not follow.
    """
    given, config = config, getattr(config, "transformer", config)
    if not hasattr(config, "v4_indexer"):
        take_settings(given)
    indexer, attention = settings_of(config)
    kind = FollowingIndexer if getattr(config, "v4_settings_file", None) else V4Indexer
    offset = get_transformer_layer_offset(config, vp_stage) if config.pipeline_model_parallel_size > 1 else 0
    plan = indexer.plan()[offset : offset + get_num_layers_to_build(config, vp_stage)]
    layers = [_layer(config, attention, layer, kind) for layer in plan]
    return TransformerBlockSubmodules(layers, layer_norm=RMSNorm)


def _layer(config, attention, layer, indexer=V4Indexer):
    self_attention = ModuleSpec(
        V4SelfAttention,
        # Always causal; the mask type is here for Megatron's multi-token-prediction layer, which asks for it.
        params={"layer": layer, "attention": attention, "attn_mask_type": AttnMaskType.causal},
        submodules=V4SelfAttentionSubmodules(indexer=indexer),
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_feed_forward(config, layer),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _feed_forward(config, layer):
    """Megatron's own: dense, or a mixture of experts where num_moe_experts and moe_layer_freq say so."""
    experts = config.num_moe_experts
    if experts:
        every = config.moe_layer_freq
        pattern = every if isinstance(every, list) else [int(i % every == 0) for i in range(config.num_layers)]
        # Multi-token-prediction layers are as the last decoder layer.
        experts = experts if pattern[min(layer.layer_number, config.num_layers) - 1] else None
    return get_mlp_module_spec_for_backend(LocalSpecProvider(), experts, config.moe_grouped_gemm)


def build_gpt_model(
    model,
    attention,
    indexer,
    *,
    vocab_size,
    sequence_length,
    tensor_parallel=1,
    sequence_parallel=False,
    context_parallel=1,
    cp_layout="zigzag",
    seed=0,
):
    """Megatron's GPTModel with V4 layers, fp32; parallel state must be initialised.

    Args:
        model: mapping with hidden_size, num_layers, ffn_hidden_size.
        attention: `AttentionConfig`. indexer: `IndexerConfig`.
        vocab_size: tokens, divisible by tensor_parallel.
        sequence_length: longest sequence, tokens.
        seed: of the weights; the same weights for every division over ranks.

    Raises:
        ValueError: sizes that do not divide over the ranks.
    """
    for name, size in (("vocab_size", vocab_size), ("model.ffn_hidden_size", model["ffn_hidden_size"])):
        if size % tensor_parallel:
            raise ValueError(f"{name} {size} does not divide over parallel.tensor {tensor_parallel}")
    if sequence_parallel and sequence_length % tensor_parallel:
        raise ValueError(f"sequence length {sequence_length} does not divide over parallel.tensor {tensor_parallel}")
    config = V4TransformerConfig(
        v4_indexer=indexer,
        v4_attention=attention,
        num_layers=model["num_layers"],
        hidden_size=model["hidden_size"],
        ffn_hidden_size=model["ffn_hidden_size"],
        num_attention_heads=attention.n_heads,
        kv_channels=attention.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,  # whole weights are drawn, then divided: the same for every number of ranks
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel and tensor_parallel > 1,
        context_parallel_size=context_parallel,
        cp_layout=cp_layout,
        perform_initialization=True,
        mtp_num_layers=indexer.num_mtp_layers or None,
    )
    torch.manual_seed(seed)
    return GPTModel(
        config,
        v4_layer_spec(config),
        mtp_block_spec=v4_mtp_spec(config),
        vocab_size=vocab_size,
        max_sequence_length=sequence_length,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )


def v4_mtp_spec(config, vp_stage=None):
    """Multi-token-prediction layers of this pipeline stage, each with the settings of its global number, or None.

    Megatron's own helper would give them the settings of the last decoder layer.
    """
    config = getattr(config, "transformer", config)
    if not get_mtp_num_layers_to_build(config, vp_stage=vp_stage):
        return None
    backend = LocalSpecProvider()
    indexer, attention = settings_of(config)
    layers = [layer for layer in indexer.plan() if layer.is_mtp]
    specs = [get_mtp_layer_spec_for_backend(_layer(config, attention, layer), backend) for layer in layers]
    for spec in specs:  # the backend's norm refuses sequence parallelism
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = RMSNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=specs)


def _indexers(model):
    chunks = model if isinstance(model, list | tuple) else [model]
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, V4Indexer)]


def set_indexer_step(model, step):
    """Put every indexer of the model in the loss stage of optimizer step `step` (0-based): dense, then sparse.

    model: module, or list of the model chunks of virtual pipeline stages.
    """
    for indexer in _indexers(model):
        indexer.set_step(step)


def freeze_main(model, frozen):
    """Let the indexers alone train, or thaw what an earlier call froze.

    For optimizers that pass over parameters without a gradient, as PyTorch's do.

    Raises:
        NotImplementedError: Megatron's DistributedDataParallel waits for the gradients of all parameters it was given.
    """
    if isinstance(model, DistributedDataParallel):
        raise NotImplementedError("freeze_main needs the bare model, got one wrapped in DistributedDataParallel")
    own = {parameter for indexer in _indexers(model) for parameter in indexer.parameters()}
    for parameter in set(model.parameters()) - own:
        if frozen and parameter.requires_grad:
            parameter.frozen_main = True
            parameter.requires_grad_(False)
        elif not frozen and getattr(parameter, "frozen_main", False):
            parameter.frozen_main = False
            parameter.requires_grad_(True)


def indexer_metrics(model, pipeline_group=None):
    """Means since the last call over rows and micro-batches, the same on every rank that shares a sequence.

    Every rank of the tensor, context and pipeline parallel groups must call it, with or without indexers of its own.
    Names are those of `diagnostics.Statistics`, averaged over the layers that counted any; `layer_N/name` is the value
    of the layer with global number N. What was never counted is left out.

    Args:
        model: module, or list of model chunks, built from a `V4TransformerConfig`.
        pipeline_group: default: the stages that Megatron's parallel state knows.

    Returns:
        dict of float; empty for a model without indexers.
    """
    config = get_model_config(model[0] if isinstance(model, list | tuple) else model)
    numbers = [layer.layer_number for layer in settings_of(config)[0].plan() if layer.has_indexer]
    if not numbers:
        return {}
    if pipeline_group is None and config.pipeline_model_parallel_size > 1:
        pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    first = model[0] if isinstance(model, list | tuple) else model
    sums = torch.zeros(len(numbers), Statistics.size(), device=next(first.parameters()).device)
    ranks = None
    for indexer in _indexers(model):
        ranks = indexer.sequence_ranks
        if (taken := indexer.statistics.take()) is not None:
            sums[numbers.index(indexer.layer_number)] = taken
    sums = parallel.sum_over_ranks(sums, ranks)
    # Every stage has a row for every layer, so one without an indexer takes part with zeros.
    sums = parallel.sum_over_ranks(sums, pipeline_group)
    return _means(dict(zip(numbers, sums.cpu(), strict=True)))


def _means(sums):
    layers = {number: Statistics.means(row) for number, row in sums.items()}
    result = {}
    for name in dict.fromkeys(name for means in layers.values() for name in means):
        values = {number: means[name] for number, means in layers.items() if name in means}
        result[name] = sum(values.values()) / len(values)
        result |= {f"layer_{number}/{name}": value for number, value in values.items()}
    return result


def finalize_gradients(model):
    """Megatron's own sync of replicated parameters' gradients over the tensor parallel group, for a bare model."""
    if not hasattr(model, "ddp_config"):
        model.ddp_config = DistributedDataParallelConfig()  # its flags choose the plain path
    group = parallel_state.get_tensor_model_parallel_group()
    _allreduce_non_tensor_model_parallel_grads([model], model.config, group)
