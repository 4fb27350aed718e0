"""What megatron-core 0.19 needs to run without a CUDA driver: applied while a CPU run lasts, then put back.

Megatron asks `torch.cuda` for the current device and stream in code that has nothing to do with CUDA (rotary embedding,
sequence-parallel mappings), and its random-number tracker keeps CUDA states. On a GPU nothing here is used.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch


class _NoStream:
    """A CUDA stream with nothing in it: waiting for it is immediate."""

    cuda_stream = 0

    def wait_stream(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """Let Megatron modules be built and run on `device` inside the block."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(mock.patch("torch.cuda.current_device", lambda: device))
            stack.enter_context(mock.patch("torch.cuda.current_stream", lambda device=None: _NoStream()))
        # The inference tracker holds no CUDA state. Replicated weights need one seed on all ranks anyway.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        yield
