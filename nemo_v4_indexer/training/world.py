"""The ranks of this run: joined from the launcher or made up for a single process, and what they agree on."""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemo_v4_indexer.training.config import PretrainConfig
from nemo_v4_indexer.training.errors import UsageError

_MOST_THREADS = 16  # a small model gains nothing beyond


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place. Data-parallel ranks hold equal weights and different sequences."""

    rank: int
    size: int
    tensor_rank: int
    tensor_group: dist.ProcessGroup
    data_rank: int
    data_size: int
    data_group: dist.ProcessGroup
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def largest(self, value: int) -> int:
        """The largest `value` of any rank, known to all of them."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def average(self, values: dict[str, float]) -> dict[str, float]:
        """Mean over the data-parallel ranks; every rank passes the same keys."""
        return mean_over_ranks(values, self.data_group, self.device)

    def average_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replace the gradients by their mean over the data-parallel ranks, in one message per dtype."""
        if self.data_size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        for dtype in {gradient.dtype for gradient in gradients}:
            some = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in some])
            dist.all_reduce(flat, group=self.data_group)
            flat /= self.data_size
            for gradient, piece in zip(some, flat.split([gradient.numel() for gradient in some]), strict=True):
                gradient.copy_(piece.view_as(gradient))


def mean_over_ranks(values: dict[str, float], group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """Mean of every value over a group's ranks, all of which pass the same keys."""
    if group.size() == 1 or not values:
        return values
    keys = sorted(values)
    tensor = torch.tensor([values[key] for key in keys], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, group=group)
    return dict(zip(keys, (tensor / group.size()).tolist(), strict=True))


def from_rank_0(action: Callable[[], Any]) -> Any:
    """Among joined ranks: run `action` on rank 0; give its result to all, or raise its UsageError on all of them."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[1] = action()
        except UsageError as error:
            outcome[0] = str(error)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise UsageError(outcome[0])
    return outcome[1]


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place among those that the launcher started; alone without one."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    alone: bool


def launch() -> Launch:
    """What torchrun says about this process."""
    if not dist.is_torchelastic_launched():
        return Launch(0, 1, 0, 1, True)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Launch(*(int(os.environ[name]) for name in names), False)


def device_of(choice: str, place: Launch) -> torch.device:
    """The device that `device=choice` means here. Raises UsageError for cuda without a GPU per rank."""
    return _device(choice, place.local_rank, place.local_size)


def order_kernels() -> None:
    """Let the GPU start kernels in the order they were given: Megatron overlaps communication by it and insists."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _device(choice: str, local_rank: int, local_size: int) -> torch.device:
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cuda" and available < local_size:
        raise UsageError(f"device=cuda needs one GPU per rank: {local_size} ranks here, {available} GPUs")
    return torch.device("cuda", local_rank) if choice != "cpu" and available >= local_size else torch.device("cpu")


@contextlib.contextmanager
def joined(config: PretrainConfig) -> Iterator[World]:
    """Join the launcher's ranks, or be the only one, for the length of the block. Raises UsageError on a bad launch."""
    from megatron.core import parallel_state

    place = launch()
    device = device_of(config.device, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    arguments = {"backend": "nccl" if device.type == "cuda" else "gloo", "timeout": datetime.timedelta(minutes=10)}
    if place.alone:  # a store in memory: no address, port or environment is needed to be alone
        arguments |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**arguments)
    threads = torch.get_num_threads()
    try:
        tensor, size = config.parallel.tensor, dist.get_world_size()
        if size % tensor:
            raise UsageError(
                f"parallel.tensor={tensor} needs a multiple of {tensor} processes, got {size}; "
                f"start with: torchrun --nproc-per-node {tensor} -m nemo_v4_indexer.pretrain ..."
            )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
        _share_cores(config.train.threads, size)
        yield World(
            rank=dist.get_rank(),
            size=size,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_group=parallel_state.get_tensor_model_parallel_group(),
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=size // tensor,
            data_group=parallel_state.get_data_parallel_group(),
            device=device,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def _share_cores(threads: int | None, size: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, min(_MOST_THREADS, cores // size)))
