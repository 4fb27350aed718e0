"""megatron-core 0.19.2: the model config and builder of `megatron.training`, for V4 models.

Importing this module lets `megatron.training.config.instantiate_utils.instantiate` build this package's classes, which
it otherwise refuses by name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.config.instantiate_utils import InstantiationMode, instantiate, target_allowlist
from megatron.training.config.utils import sanitize_dataclass_config
from megatron.training.config.yaml_utils import safe_yaml_representers
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.vocab_utils import calculate_padded_vocab_size

from nemo_v4_indexer.attention import V4SelfAttention
from nemo_v4_indexer.integrations.megatron import v4_layer_spec, v4_mtp_spec
from nemo_v4_indexer.integrations.megatron_config import V4TransformerConfig, require_no_position_embedding, settings_of

__all__ = ["V4GPTModelBuilder", "V4GPTModelConfig", "require_v4_layers"]

target_allowlist.add_prefix("nemo_v4_indexer.")


@dataclass(kw_only=True)
class V4GPTModelConfig(GPTModelConfig):
    """Megatron's GPTModelConfig around a `V4TransformerConfig`.

    Survives `as_dict` / `from_dict`, a ConfigContainer's YAML, and `to_yaml` / `from_yaml`: the layer spec follows from
    the class, and the indexer's settings are saved as plain maps, so that they are checked again when they are read.

    Raises:
        TypeError: transformer is of another class.
        ValueError: another layer spec, or position embeddings beside the attention's own.
    """

    builder: ClassVar[str] = "nemo_v4_indexer.integrations.megatron_builder.V4GPTModelBuilder"
    transformer: V4TransformerConfig
    position_embedding_type: str = "none"

    def __post_init__(self):
        if not isinstance(self.transformer, V4TransformerConfig):
            raise TypeError(f"transformer must be a V4TransformerConfig, got {type(self.transformer).__name__}")
        if self.transformer_layer_spec not in (None, v4_layer_spec):
            raise ValueError(
                f"transformer_layer_spec must be absent: it is v4_layer_spec, got {self.transformer_layer_spec!r}"
            )
        require_no_position_embedding(self.position_embedding_type)
        self.transformer_layer_spec = v4_layer_spec

    def as_dict(self):
        """Megatron's form, with the indexer's and the attention's settings as plain maps.

        Raises:
            ValueError: an activation function that no name can stand for.
        """
        transformer = self.transformer
        if transformer.mlp_activation is None:
            raise ValueError(
                f"transformer.activation_func {transformer.activation_func.__name__} is no function of "
                "torch.nn.functional, so it would be lost; name one as mlp_activation"
            )
        result = super().as_dict()
        result["transformer"] |= {
            "v4_indexer": transformer.v4_indexer.to_dict(),
            "v4_attention": transformer.v4_attention.to_dict(),
        }
        return result

    def to_yaml(self, path):
        """Write the config to a file."""
        with safe_yaml_representers():
            Path(path).write_text(yaml.safe_dump(self.as_dict(), sort_keys=False))

    @classmethod
    def from_yaml(cls, path):
        """Read what `to_yaml` wrote, or a YAML written by hand with `_target_` in both of its maps.

        Raises:
            InstantiationException: an unknown key (Megatron's own reading drops it) or a value out of form.
        """
        values = sanitize_dataclass_config(yaml.safe_load(Path(path).read_text()))
        values.pop("_builder_", None)
        config = instantiate(values, mode=InstantiationMode.STRICT)
        if not isinstance(config, cls):
            raise TypeError(f"{path} must describe a {cls.__name__}, got {type(config).__name__}")
        return config


class V4GPTModelBuilder(GPTModelBuilder):
    """Builds the stages of a V4 model. Unlike its base it gives multi-token-prediction layers their own settings."""

    def __init__(self, model_config):
        if not isinstance(model_config, V4GPTModelConfig):
            raise TypeError(f"V4GPTModelBuilder needs a V4GPTModelConfig, got {type(model_config).__name__}")
        super().__init__(model_config)

    def build_model(self, pg_collection, pre_process=None, post_process=None, vp_stage=None):
        """One stage.

        Args:
            pg_collection: Megatron's ProcessGroupCollection.
            pre_process, post_process: hold the embedding, the output layer; default by the stage's place.
            vp_stage: virtual pipeline stage, or None.

        Returns:
            GPTModel, every layer of which is a V4 layer.

        Raises:
            ValueError: vocab_size is not set.
        """
        config, transformer = self._model_config, self._model_config.transformer
        if config.vocab_size is None:
            raise ValueError("vocab_size must be a number of tokens before the model is built, got None")
        vocab_size = config.vocab_size
        if config.should_pad_vocab:
            divisor, ranks = config.make_vocab_size_divisible_by, transformer.tensor_model_parallel_size
            vocab_size = calculate_padded_vocab_size(vocab_size, divisor, ranks)
        place = {"vp_stage": vp_stage, "vp_size": transformer.virtual_pipeline_model_parallel_size}
        if pre_process is None:
            pre_process = is_vp_first_stage(**place) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(**place) and is_pp_last_stage(pg_collection.pp)
        model = GPTModel(
            config=transformer,
            transformer_layer_spec=config.transformer_layer_spec(transformer, vp_stage=vp_stage),
            mtp_block_spec=v4_mtp_spec(transformer, vp_stage=vp_stage),
            vocab_size=vocab_size,
            max_sequence_length=config.seq_length,
            fp16_lm_cross_entropy=config.fp16_lm_cross_entropy,
            parallel_output=config.parallel_output,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            scatter_embedding_sequence_parallel=config.scatter_embedding_sequence_parallel,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        require_v4_layers(model)
        return model


def require_v4_layers(model):
    """Refuse a model whose layers are not V4's: a layer spec that was lost gives an ordinary model without a word.

    Args:
        model: module, or list of model chunks, built from a `V4TransformerConfig`.

    Raises:
        RuntimeError: a layer has another attention, or the settings of another layer.
    """
    for chunk in model if isinstance(model, list | tuple) else [model]:
        layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
        for layer in layers:
            attention, plan = layer.self_attention, settings_of(layer.config)[0].plan()
            if not isinstance(attention, V4SelfAttention):
                raise RuntimeError(
                    f"layer {layer.layer_number} has {type(attention).__name__} instead of V4SelfAttention: the layer "
                    "spec was not applied (a transformer_layer_spec must be v4_layer_spec)"
                )
            if attention.layer != plan[attention.layer.layer_number - 1]:
                raise RuntimeError(f"layer {layer.layer_number} does not have the settings of v4_indexer's plan")
