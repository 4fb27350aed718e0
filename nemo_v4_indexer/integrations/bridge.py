"""Megatron-Bridge 0.6.2: a model provider, recipes named as Bridge names them, and a runner.

    torchrun --nproc-per-node 8 -m nemo_v4_indexer.integrations.bridge v4_4layer_pretrain_8gpu_h100_bf16_config \\
        model.v4_indexer.topk=256 +model.v4_indexer.layers.2.topk=128 train.train_iters=1000

Bridge comes with the NeMo container. Tested against its configuration classes only, with compiled packages replaced by
stand-ins; training through it is not tested.
"""

import argparse
import sys
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.utils.omegaconf_utils import create_omegaconf_dict_config, process_config_with_overrides
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from omegaconf import OmegaConf

from nemo_v4_indexer.integrations.megatron import v4_layer_spec
from nemo_v4_indexer.integrations.megatron_builder import require_v4_layers
from nemo_v4_indexer.integrations.megatron_config import require_no_position_embedding, settings_of, suit_layers

register_allowed_target_prefix("nemo_v4_indexer.")


@dataclass
class V4ModelProvider(GPTModelProvider):
    """Bridge's GPT provider with the indexer's settings as plain maps, which its YAML and its overrides can hold."""

    v4_indexer: dict[str, Any] = field(default_factory=dict)
    """Settings of `IndexerConfig`."""
    v4_attention: dict[str, Any] = field(default_factory=dict)
    """Settings of `AttentionConfig`."""
    cp_layout: str = "zigzag"
    normalization: str = "RMSNorm"
    position_embedding_type: str = "none"
    gated_linear_unit: bool = True
    add_bias_linear: bool = False
    share_embeddings_and_output_weights: bool = False

    def finalize(self):
        """Check the settings; Bridge calls it once overrides are in.

        Raises:
            ValueError: a setting out of form, or one that Bridge would pass to layers of its own.
        """
        settings_of(self)
        if self.mtp_num_layers:
            raise ValueError(
                f"mtp_num_layers must be absent: Bridge would build its own layers, got {self.mtp_num_layers}"
            )
        require_no_position_embedding(self.position_embedding_type)
        super().finalize()
        suit_layers(self)

    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        """One stage of the model. The layer spec is set here, because Bridge's overrides restore older values of it.

        Raises:
            RuntimeError: a layer that is not V4's.
        """
        self.transformer_layer_spec = v4_layer_spec
        model = super().provide(pre_process, post_process, vp_stage)
        require_v4_layers(model)
        return model


def _presets(model, indexer):
    """The YAML of configs/model and configs/indexer, resolved."""
    folder = resources.files("nemo_v4_indexer") / "configs"
    groups = {"model": model, "indexer": indexer}
    texts = {group: OmegaConf.create((folder / group / f"{name}.yaml").read_text()) for group, name in groups.items()}
    texts["model"].num_mtp_layers = 0
    return OmegaConf.to_container(OmegaConf.create(texts), resolve=True)


def _pretrain(name, *, tensor, sequence_length, layers=None, ratio=None):
    presets = _presets(name, name)
    model, indexer = presets["model"], presets["indexer"]
    layers = layers or model["num_layers"]
    indexer |= {"num_layers": layers}
    if ratio is not None:
        indexer["compress_ratio"] = ratio
    elif isinstance(indexer["compress_ratio"], dict):
        indexer["compress_ratio"]["mtp"] = []
    config = _pretrain_common()
    config.model = V4ModelProvider(
        num_layers=layers,
        hidden_size=model["hidden_size"],
        ffn_hidden_size=model["ffn_hidden_size"],
        num_attention_heads=model["attention"]["n_heads"],
        kv_channels=model["attention"]["head_dim"],
        v4_indexer=indexer,
        v4_attention=model["attention"],
        seq_length=sequence_length,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    config.model.activation_func = "silu"  # Bridge's own name for it, resolved by finalize
    config.dataset.seq_length = sequence_length
    config.tokenizer.tokenizer_type = "NullTokenizer"
    config.tokenizer.vocab_size = config.model.vocab_size = 32000
    config.train.micro_batch_size = 1
    return config


def v4_4layer_pretrain_8gpu_h100_bf16_config():
    """Four layers of DeepSeek-V4-Flash: window, sparse, heavy, sparse."""
    return _pretrain("v4_flash", tensor=1, sequence_length=4096, layers=4, ratio=[0, 4, 128, 4])


def v4_flash_pretrain_8gpu_h200_bf16_config():
    """DeepSeek-V4-Flash's shapes with dense feed-forward layers."""
    return _pretrain("v4_flash", tensor=8, sequence_length=4096)


def v32_pretrain_16gpu_h200_bf16_config():
    """DeepSeek-V3.2's shapes with dense feed-forward layers and V4's attention of ratio 1."""
    return _pretrain("v32", tensor=16, sequence_length=8192)


RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        v4_4layer_pretrain_8gpu_h100_bf16_config,
        v4_flash_pretrain_8gpu_h200_bf16_config,
        v32_pretrain_16gpu_h200_bf16_config,
    )
}


def configure(recipe, config_file=None, overrides=()):
    """A recipe with a YAML file and `key=value` overrides, checked.

    Raises:
        OmegaConfBaseException: an unknown key in the file, which Bridge alone would only warn of.
        OverridesError: an unknown key among the overrides.
        ValueError: a setting of the indexer or the attention out of form.
    """
    config = RECIPES[recipe]()
    if config_file is not None:
        known, _ = create_omegaconf_dict_config(config)
        OmegaConf.set_struct(known, True)
        for free in ("v4_indexer", "v4_attention"):  # checked below, and `layers` is a map that the user fills
            OmegaConf.set_struct(known.model[free], False)
        OmegaConf.merge(known, OmegaConf.load(config_file))
    config = process_config_with_overrides(config, config_filepath=config_file, cli_overrides=list(overrides))
    settings_of(config.model)
    return config


def main(argv=None):
    """The runner; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nemo_v4_indexer.integrations.bridge")
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config-file", help="YAML merged into the recipe")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--to-yaml", metavar="FILE", help="write the resolved configuration and stop")
    arguments = parser.parse_intermixed_args(argv)
    config = configure(arguments.recipe, arguments.config_file, arguments.overrides)
    if arguments.to_yaml:
        config.to_yaml(arguments.to_yaml)
    elif arguments.dry_run:
        config.print_yaml()
    else:
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        pretrain(config, forward_step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
