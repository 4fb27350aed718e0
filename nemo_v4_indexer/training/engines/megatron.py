"""The Megatron engine: megatron-core's own training stack (`megatron.training.pretrain`) from the same configuration.

Parallel state, schedules, the distributed optimizer, datasets and distributed checkpoints are Megatron's; ours are the
layers, the indexer's loss stage, which follows Megatron's iteration, and the records.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_v4_indexer.ops.dispatch import resolve_backend
from nemo_v4_indexer.training import options
from nemo_v4_indexer.training.compat import repaired_megatron
from nemo_v4_indexer.training.config import BYTE_SOURCES, PretrainConfig
from nemo_v4_indexer.training.curves import write_curves
from nemo_v4_indexer.training.data import Corpus, load_corpus, unigram_entropy
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.files import write_text
from nemo_v4_indexer.training.folder import RunFolder
from nemo_v4_indexer.training.metrics import MetricsFile
from nemo_v4_indexer.training.world import Launch, from_rank_0, launch


def run(config: PretrainConfig, resolved: Mapping[str, Any], resolved_yaml: str) -> int:
    """Train as configured; returns the process's exit code.

    resolved: the plain configuration; resolved_yaml: its text for the output folder. Raises UsageError for what the
    user can fix.
    """
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.global_vars import set_global_variables

    from nemo_v4_indexer.training import megatron_checkpoint
    from nemo_v4_indexer.training.megatron_records import StepRecords

    place, folder = launch(), RunFolder(config.output_dir)
    _check(config)
    begin = megatron_checkpoint.newest(folder.checkpoints) if config.train.resume else None
    args = options.parse(options.options_of(config, place, folder.checkpoints, begin is not None), place)
    corpus = load_corpus(config.data) if config.data.source in BYTE_SOURCES else None
    datasets = _datasets(config, corpus)
    # Plain types: a checkpoint stores the arguments.
    args.v4_indexer, args.v4_attention = config.indexer.to_dict(), config.attention.to_dict()
    args.v4_data = corpus.fingerprint if corpus else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(repaired_megatron())
        _join(config, place, stack)
        begin = from_rank_0(partial(_start, config, resolved, resolved_yaml, args.v4_data))
        set_global_variables(args)
        metrics = None
        if place.rank == place.size - 1:  # the last pipeline stage knows the loss
            metrics = MetricsFile(folder.metrics, megatron_checkpoint.step_of(begin) if begin else 0)
            stack.callback(metrics.close)
        model: list[torch.nn.Module] = []
        kept = megatron_checkpoint.KeptCheckpoints(folder.checkpoints, config.train.keep)
        prune = kept.prune if place.rank == 0 else None
        stack.enter_context(StepRecords(model, metrics, prune).kept())
        code = 0
        try:
            container = pretrain_cfg_container_from_args(args)
            build = partial(_build, config, args, begin, model)
            pretrain(container, datasets, ModelType.encoder_or_decoder, _forward_step, model_provider=build)
        except SystemExit as stop:  # Megatron leaves its loop early (signals, exit_interval) through sys.exit
            code = stop.code or 0
        if prune:
            prune()
    if metrics and metrics.records and corpus:
        write_curves(folder.curves, metrics.records, unigram_entropy(corpus.validation))
    return code


def _check(config: PretrainConfig) -> None:
    loss, train = config.indexer.loss, config.train
    if train.freeze_main and train.steps > loss.warmup_steps:
        raise UsageError(
            "train.freeze_main=true freezes whole runs on the Megatron engine: train.steps must be at most "
            f"indexer.loss.warmup_steps={loss.warmup_steps}, got {train.steps}; a second run starts from it with "
            "train.init_from"
        )


def _start(config: PretrainConfig, resolved: Mapping[str, Any], resolved_yaml: str, data: str | None) -> Path | None:
    """Prepare the output folder; returns the checkpoint that the run goes on from. Rank 0 does it for all."""
    from nemo_v4_indexer.training import megatron_checkpoint

    folder = RunFolder(config.output_dir)
    begin, notes = folder.start("megatron", config, resolved, data)
    try:
        if begin:
            megatron_checkpoint.load_from(begin)
        folder.root.mkdir(parents=True, exist_ok=True)
        write_text(folder.config, resolved_yaml)
    except OSError as error:
        raise UsageError(f"output_dir={folder.root} cannot be written: {error.strerror}") from error
    for note in [*config.indexer.warnings_for(config.data.sequence_length), *notes]:
        print(f"note      {note}", flush=True)
    return begin


def _datasets(config: PretrainConfig, corpus: Corpus | None) -> Callable[..., tuple]:
    """Megatron's dataset provider."""
    from nemo_v4_indexer.training import megatron_data

    return megatron_data.byte_datasets(config, corpus) if corpus else megatron_data.megatron_datasets


def _join(config: PretrainConfig, place: Launch, stack: contextlib.ExitStack) -> None:
    """Join the launcher's ranks, or be the only one."""
    torch.cuda.set_device(place.local_rank)
    # A store in memory: no address, port or environment is needed to be alone.
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if place.alone else {}
    dist.init_process_group(config.megatron.get("distributed_backend", "nccl"), **alone)
    stack.callback(dist.destroy_process_group)


def _build(
    config: PretrainConfig,
    args: Any,
    begin: Path | None,
    model: list[torch.nn.Module],
    /,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    **others: Any,
) -> torch.nn.Module:
    """Megatron's model provider: the model of one pipeline stage, which is also appended to `model`."""
    from megatron.core import parallel_state
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.utils import print_rank_0

    from nemo_v4_indexer.integrations import megatron as host
    from nemo_v4_indexer.integrations.megatron_builder import V4GPTModelBuilder, V4GPTModelConfig
    from nemo_v4_indexer.training import megatron_checkpoint

    for layer in (layer for layer in config.indexer.plan() if layer.has_indexer):
        # A backend that cannot run is refused before the first step.
        rows = torch.empty(0, 1, layer.n_heads, layer.head_dim, device="cuda", dtype=args.params_dtype)
        resolve_backend(layer.backend, rows, layer.topk)
    try:
        transformer = core_transformer_config_from_args(args, host.V4TransformerConfig)
        # The embedded engine's weights on one stage; stages that draw for other layers draw other numbers.
        stage = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(config.train.seed + 100 * stage + 10 * (vp_stage or 0))
        settings = V4GPTModelConfig(
            transformer=transformer, vocab_size=args.padded_vocab_size, seq_length=args.seq_length
        )
        chunk = V4GPTModelBuilder(settings).build_model(others["pg_collection"], pre_process, post_process, vp_stage)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"the model cannot be built from this configuration: {error}") from error
    if begin:
        megatron_checkpoint.check_complete(begin, chunk)
    elif config.train.init_from:
        source, fresh = megatron_checkpoint.load_weights(Path(config.train.init_from), chunk)
        note = f"; {len(fresh)} indexer weights are new, such as {fresh[0]}" if fresh else ""
        print_rank_0(f"weights of {source}{note}")
    if config.train.freeze_main:
        host.freeze_main(chunk, True)
    model.append(chunk)
    return chunk


def _forward_step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """One micro-batch through this stage; its loss function sums over tokens, as Megatron's schedules want it."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args

    from nemo_v4_indexer.integrations import megatron as host
    from nemo_v4_indexer.training import megatron_data

    host.set_indexer_step(model, get_args().curr_iteration)
    batch = megatron_data.next_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    from nemo_v4_indexer.training.megatron_records import LM_LOSS

    mask = mask.view(-1).float()
    loss, tokens = (output.view(-1).float() * mask).sum(), mask.sum()
    return loss, tokens.int(), {LM_LOSS: torch.stack([loss.detach(), tokens])}
