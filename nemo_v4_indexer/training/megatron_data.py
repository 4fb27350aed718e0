"""What the Megatron engine feeds its schedules: datasets, and one micro-batch of this rank.

S tokens per sequence, B sequences of a micro-batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer

from nemo_v4_indexer.training.config import PretrainConfig
from nemo_v4_indexer.training.data import Corpus, train_batch, validation_batch

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class ByteWindows(torch.utils.data.Dataset):
    """Windows of a byte corpus in the order in which the embedded engine draws them.

    draw: function batch number -> int64 [batch size, S + 1]. samples: windows in all.
    """

    def __init__(self, draw: Callable[[int], torch.Tensor], batch_size: int, samples: int) -> None:
        self._draw, self._batch_size, self._samples = draw, batch_size, samples
        self._drawn: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch, row = divmod(index, self._batch_size)
        if self._drawn is None or self._drawn[0] != batch:
            self._drawn = batch, self._draw(batch)
        window = self._drawn[1][row]
        length = len(window) - 1
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": torch.ones(length),
            "position_ids": torch.arange(length),
        }


def byte_datasets(config: PretrainConfig, corpus: Corpus) -> Callable[..., tuple]:
    """Megatron's dataset provider over a byte corpus."""
    train, length = config.train, config.data.sequence_length

    def draw(step: int) -> torch.Tensor:
        return train_batch(corpus.train, train.seed, step, train.batch_size, length)

    def draw_validation(index: int) -> torch.Tensor:
        index %= train.eval_batches
        return validation_batch(corpus.validation, index, train.eval_batches, train.batch_size, length)

    def provide(samples: tuple, vp_stage: int | None = None) -> tuple:
        made = [
            ByteWindows(which, train.batch_size, count) if count else None
            for which, count in zip((draw, draw_validation), samples[:2], strict=True)
        ]
        return *made, None

    return provide


def megatron_datasets(samples: tuple, vp_stage: int | None = None) -> tuple:
    """Megatron's dataset provider over its mock sequences or .bin and .idx files, as its options say."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.datasets.utils import get_blend_from_list

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        blend=get_blend_from_list(args.data_path),
        tokenizer=get_tokenizer(),
        path_to_cache=args.data_cache_path,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )

    def builds_here() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if args.data_path is None else GPTDataset
    train, validation, _ = BlendedMegatronDatasetBuilder(kind, samples, builds_here, config).build()
    return train, validation, None


megatron_datasets.is_distributed = True


def next_batch(iterator: Iterator, vp_stage: int | None) -> dict[str, Any]:
    """The next micro-batch as this rank needs it: tensors [B, S of this context parallel rank], None for the others."""
    args, tensor_rank = get_args(), parallel_state.get_tensor_model_parallel_rank()
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    if not (first or last):
        return dict.fromkeys(_FIELDS)
    batch = {}
    if tensor_rank == 0:
        sample = next(iterator)
        batch = {name: sample[name].cuda(non_blocking=True) for name in _FIELDS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    if args.context_parallel_size > 1:
        group = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return {name: batch.get(name) for name in _FIELDS}
