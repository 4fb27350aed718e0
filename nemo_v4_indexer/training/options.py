"""The configuration as Megatron's options: generated from our keys, completed by the free `megatron:` map.

An option has one source. What our keys set, or the model implies, is refused in the map; what Megatron does not know is
refused with the nearest name.
"""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nemo_v4_indexer.training.config import BYTE_SOURCES, PretrainConfig
from nemo_v4_indexer.training.data import VOCAB_SIZE
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.world import Launch

# Option -> our key with the same value.
_COPIED = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "attention.n_heads",
    "kv_channels": "attention.head_dim",
    "seq_length": "data.sequence_length",
    "max_position_embeddings": "data.sequence_length",
    "train_iters": "train.steps",
    "global_batch_size": "train.batch_size",
    "seed": "train.seed",
    "lr": "train.lr",
    "min_lr": "train.min_lr",
    "lr_warmup_iters": "train.lr_warmup_steps",
    "lr_decay_iters": "train.lr_decay_steps",
    "weight_decay": "train.weight_decay",
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "adam_eps": "train.eps",
    "clip_grad": "train.grad_clip",
    "eval_iters": "train.eval_batches",
    "tensor_model_parallel_size": "parallel.tensor",
    "sequence_parallel": "parallel.sequence",
    "context_parallel_size": "parallel.context",
    "pipeline_model_parallel_size": "parallel.pipeline",
}
# Option -> our key that it is computed from.
_COMPUTED = {
    "micro_batch_size": "train.micro_batch_size",
    "eval_interval": "train.eval_interval",
    "save_interval": "train.checkpoint_interval",
    "save_retain_interval": "train.keep",
    "log_interval": "train.log_interval",
    "mtp_num_layers": "model.num_mtp_layers",
    "vocab_size": "data.vocab_size",
    "padded_vocab_size": "data.vocab_size",
    "mock_data": "data.source",
    "data_path": "data.path",
    "save": "output_dir",
    "load": "train.resume",
    "pretrained_checkpoint": "train.init_from",
    "freeze_all_layers": "train.freeze_main",
}
# What V4 layers, the byte vocabulary and the wheel without Transformer Engine and Apex leave no choice about.
_IMPLIED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "none",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "tokenizer_type": "NullTokenizer",
    "use_distributed_optimizer": True,
    "ckpt_format": "torch_dist",
    "spec": None,
}
# What the map may change.
DEFAULTS = {
    "bf16": True,
    "lr_decay_style": "cosine",
    "dist_ckpt_optim_fully_reshardable": True,  # checkpoints that other divisions over ranks can read
    "override_opt_param_scheduler": True,  # a run that goes on follows our keys, not its checkpoint's
    "exit_signal_handler": True,
    "rerun_mode": "disabled",
    "enable_one_logger": False,
    "bias_dropout_fusion": False,
}
# Beginnings of the options that a run may change when it goes on: how it is divided, what is computed again or
# overlapped, what is written down and when it stops, but not the numbers of its steps beyond rounding.
FREE = (
    "account_for_", "adlr_", "app_tag_", "async_", "barrier_", "check_for_", "check_weight_hash", "ckpt_assume_",
    "ckpt_fully_", "cp_comm_", "cpu_offloading", "data_cache_path", "dataloader_defer_", "dataloader_fast_", "ddp_",
    "decoder_first_", "decoder_last_", "dist_ckpt_", "distrib_", "distribute_saved_", "distributed_",
    "empty_unused_", "enable_ft_", "enable_one_", "eval_", "exit_", "flight_recorder_", "ft_", "high_priority_",
    "inprocess_", "log_", "logging_", "manual_gc", "memory_", "microbatch_group_", "mmap_", "nccl_",
    "non_persistent_", "num_dataset_builder_", "num_distributed_", "num_layers_per_virtual_", "num_virtual_",
    "num_workers", "nvtx_", "one_logger_", "overlap_", "perform_init", "pipeline_model_parallel_", "profile",
    "recompute_", "record_", "rerun_", "sharp_", "straggler_", "tensorboard_", "timing_", "tp_comm_", "train_sync_",
    "use_cpu_init", "use_gloo_", "use_persistent_", "use_pytorch_profiler", "use_ring_", "use_sharp",
    "use_tp_pp_dp_", "verify_", "wandb_",
)  # fmt: skip
_VOCABULARY_MULTIPLE = 128


def vocabulary(config: PretrainConfig) -> tuple[int, int]:
    """Tokens, and rows of the embedding: the same for every division over ranks."""
    tokens = VOCAB_SIZE if config.data.source in BYTE_SOURCES else config.data.vocab_size
    return tokens, -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def options_of(config: PretrainConfig, place: Launch, checkpoints: Path, resume: bool) -> dict[str, Any]:
    """Megatron's options by name. Raises UsageError for a map entry that another key sets, and for a bad launch."""
    for name in config.megatron:
        owner = _COPIED.get(name) or _COMPUTED.get(name)
        if owner:
            owner = f"model.{owner}" if owner.startswith("attention.") else owner
            raise UsageError(f"megatron.{name} is set by {owner}; give it there")
        if name in _IMPLIED:
            raise UsageError(f"megatron.{name} is {_IMPLIED[name]} for this model and cannot be chosen")
    parallel, train = config.parallel, config.train
    ranks = parallel.tensor * parallel.context * parallel.pipeline
    if place.size % ranks:
        raise UsageError(
            f"parallel.tensor={parallel.tensor} x parallel.context={parallel.context} x parallel.pipeline="
            f"{parallel.pipeline} needs a multiple of {ranks} processes, got {place.size}"
        )
    tokens, rows = vocabulary(config)
    if rows % parallel.tensor:
        raise UsageError(f"a vocabulary of {rows} does not divide over parallel.tensor={parallel.tensor}")
    copied = {}
    for option, key in _COPIED.items():
        section, name = key.split(".")
        copied[option] = getattr(getattr(config, section), name)
    computed = {
        "micro_batch_size": config.micro_batches(place.size // ranks)[0],
        "eval_interval": train.eval_interval or train.steps + 1,
        "save_interval": train.checkpoint_interval or train.steps,
        "log_interval": train.log_interval or max(1, train.steps // 20),
        "mtp_num_layers": config.model.num_mtp_layers or None,
        "vocab_size": tokens,
        "padded_vocab_size": rows,
        "mock_data": config.data.source != "indexed",
        "data_path": config.data.path.split() if config.data.source == "indexed" else None,
        "save": str(checkpoints),
        "load": str(checkpoints) if resume else None,
    }
    return {**_IMPLIED, **copied, **computed, **DEFAULTS, **config.megatron}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"megatron: {message}")


def parse(options: Mapping[str, Any], place: Launch) -> argparse.Namespace:
    """Megatron's parsed and validated arguments. Raises UsageError for an unknown option or a refused value."""
    from megatron.training.arguments import add_megatron_arguments, validate_args

    parser = add_megatron_arguments(_Parser(allow_abbrev=False))
    args = parser.parse_args(_command_line(parser, options))
    args.rank, args.world_size, args.local_rank = place.rank, place.size, place.local_rank
    args._is_global_batch_size_explicitly_specified = True
    try:
        validate_args(args)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(f"Megatron refuses these options: {error}") from error
    return args


def _command_line(parser: argparse.ArgumentParser, options: Mapping[str, Any]) -> list[str]:
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        if action.option_strings:
            actions.setdefault(action.dest, []).append(action)
    words = []
    for name, value in options.items():
        if name not in actions:
            close = difflib.get_close_matches(name, actions, n=1)
            hint = f"; did you mean megatron.{close[0]}?" if close else ""
            raise UsageError(f"Megatron has no option {name} (megatron.{name}){hint}")
        if value is not None:
            words += _words(name, value, actions[name], parser.get_default(name))
    return words


def _words(name: str, value: Any, actions: Sequence[argparse.Action], default: Any) -> list[str]:
    flags = [action for action in actions if action.nargs == 0]
    if isinstance(value, bool) and flags:
        setting = [action for action in flags if action.const is value]
        if not setting and bool(default) is not value:
            raise UsageError(f"megatron.{name} cannot be {str(value).lower()}: Megatron has no flag for it")
        return [setting[0].option_strings[0]] if setting else []
    if flags and len(flags) == len(actions):
        raise UsageError(f"megatron.{name} must be true or false, got {value!r}")
    taking = next(action for action in actions if action.nargs != 0)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if taking.nargs is not None:
            return [taking.option_strings[0], *map(str, value)]
        value = f"[{','.join(map(str, value))}]"  # one word, as of moe_layer_freq
    return [f"{taking.option_strings[0]}={value}"]
