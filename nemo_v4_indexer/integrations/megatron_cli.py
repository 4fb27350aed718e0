"""megatron-core 0.19.2: V4 layers from Megatron's own command line, `--spec nemo_v4_indexer.integrations.megatron
v4_layer_spec`.

Its parser refuses options that it does not know, and its TransformerConfig has no field for our settings, so they come
from a YAML file that an environment variable names.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
from nemo_v4_indexer.integrations.megatron_config import hold_settings
from nemo_v4_indexer.layer import V4Indexer

VARIABLE = "NEMO_V4_INDEXER_CONFIG"
_FILE_FORM = "the maps indexer and model.attention as `python -m nemo_v4_indexer.pretrain --cfg job` prints them"
# Options that V4 layers do not follow, and the value that changes nothing.
_FIXED = {
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "attention_dropout": 0.0,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "heterogeneous_block_specs": False,
    "window_size": None,
    "no_rope_freq": None,
    "softmax_scale": None,
    "add_qkv_bias": False,
    "attention_output_gate": False,
    "qk_l2_norm": False,
    "qk_clip": False,
    "use_mup": False,
    "fp8": None,
    "fp4": None,
    "mtp_num_layers": None,  # Megatron's own builder would give these layers ordinary attention
    "cuda_graph_impl": "none",  # the loss stage is chosen in every forward
    "hybrid_context_parallel": False,  # rows in another order
    "reset_attention_mask": False,  # documents are told apart by packed_seq_params alone
    "reset_position_ids": False,
}


def arguments():
    """The arguments of Megatron's command line, or None outside of its training stack."""
    from megatron.training.global_vars import get_args

    try:
        return get_args()
    except AssertionError:
        return None


def read_settings(path):
    """The settings of a YAML file with the maps `indexer` and `model.attention`; `attention` may stand at its root.

    Returns:
        (`IndexerConfig`, `AttentionConfig`).

    Raises:
        ValueError: the file cannot be read, lacks a map, or a setting is out of form.
    """
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{VARIABLE} names {path}, which cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{VARIABLE} names {path}, which is not YAML: {' '.join(str(error).split())}") from error
    values = values if isinstance(values, Mapping) else {}
    model = values.get("model")
    attention = model.get("attention") if isinstance(model, Mapping) else values.get("attention")
    found = []
    for name, kind, settings in (
        ("indexer", IndexerConfig, values.get("indexer")),
        ("model.attention", AttentionConfig, attention),
    ):
        if not isinstance(settings, Mapping):
            raise ValueError(f"{VARIABLE} names {path}, which must hold {_FILE_FORM}, but {name} is {settings!r}")
        try:
            found.append(kind.from_dict(settings))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{VARIABLE} names {path}, whose map {name} is refused: {error}") from error
    return tuple(found)


def take_settings(given):
    """Put the file's settings in a config that Megatron made from its own options.

    Args:
        given: TransformerConfig, or a model config that holds one as `transformer`.

    Raises:
        TypeError: no file is named.
        ValueError: one of the file, layer or head counts that differ from Megatron's, or options that V4 layers do not
            follow.
    """
    config, path = getattr(given, "transformer", given), os.environ.get(VARIABLE)
    if not path:
        raise TypeError(
            f"a V4 model needs a V4TransformerConfig, got {type(config).__name__}; with Megatron's own command line "
            f"set the environment variable {VARIABLE} to a YAML file with {_FILE_FORM}"
        )
    indexer, attention = read_settings(path)
    _refuse_other_models(given, config)
    if indexer.num_mtp_layers:
        raise ValueError(
            f"{VARIABLE} names {path}, where indexer.num_mtp_layers must be 0: Megatron's own builder gives "
            f"multi-token-prediction layers ordinary attention, got {indexer.num_mtp_layers}"
        )
    try:
        hold_settings(config, indexer, attention)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} names {path}, where {error}") from error
    config.v4_settings_file = path


def _refuse_other_models(given, config):
    """ValueError that names every option which asks for something that V4 layers would leave out without a word."""
    expected = _FIXED | {"num_query_groups": config.num_attention_heads}
    args, wrong = arguments(), []
    for name, value in expected.items():
        # Model providers of the user's own hand over a TransformerConfig, which does not know all options.
        source = given if hasattr(given, name) else args
        found = getattr(source, name, value)
        if found != value and (found or value):  # 0, None and False all turn an option off
            wrong.append(f"{name} must be {value!r}, got {found!r}")
    if wrong:
        raise ValueError(f"V4 layers do not follow these options of Megatron: {'; '.join(wrong)}")


class FollowingIndexer(V4Indexer):
    """`V4Indexer` whose loss stage follows the iteration of Megatron's training loop, the same when recomputed.

    Outside of that loop the stage is the caller's, as `V4Indexer`'s.
    """

    def forward(self, x, qr, shards=None):
        """As `V4Indexer.forward`."""
        iteration = getattr(arguments(), "curr_iteration", None)
        if iteration is not None:
            self.set_step(iteration)
        return super().forward(x, qr, shards)
