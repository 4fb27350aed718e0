"""Runs the pretraining command on the Megatron engine over gloo, on a machine without a GPU. For tests only.

    [torchrun ...] fake_cuda.py key=value ...

Megatron's training stack asks for CUDA devices, streams, events and random states everywhere; here all of them are the
CPU's. What a test sees of it are numbers, never speed.
"""

import contextlib
import os
import sys

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def on_cpu(device):
    """The CPU for whatever means a CUDA device; anything else unchanged."""
    number = isinstance(device, int) and not isinstance(device, bool)
    cuda = str(device).startswith("cuda") if isinstance(device, str | torch.device) else number
    return CPU if cuda else device


class OnCpu(TorchFunctionMode):
    """Calls that name a CUDA device run on the CPU; tensors say that they are CUDA's where Megatron compares names."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "to" and len(args) > 1 and isinstance(args[1], str | torch.device):
            args = (args[0], on_cpu(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if name == "type" and len(args) == 1 and isinstance(out, str):
            out = out.replace("torch.", "torch.cuda.")
        return out


class Stream:
    """A stream or an event with nothing in it: all work is done when it is asked for."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self, *_):
        return Stream()

    def elapsed_time(self, *_):
        return 0.0

    def query(self):
        return True

    def wait_stream(self, *_):
        pass

    wait_event = synchronize = record = wait = wait_stream


class Properties:
    major, minor, total_memory, multi_processor_count, name = 9, 0, 1 << 37, 1, "a CPU"


def fake_cuda():
    """Replace torch.cuda's functions for the rest of this process."""
    from megatron.core.tensor_parallel import random  # first: torch looks its own functions up while this imports

    cuda, nothing = torch.cuda, lambda *_, **__: None
    torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, *_, **__: self
    answers = {
        "is_available": True,
        "device_count": int(os.environ.get("WORLD_SIZE", "1")),
        "current_device": CPU,
        "get_device_properties": Properties,
        "get_device_capability": (9, 0),
        "get_device_name": "a CPU",
        "memory_stats": {},
        "is_current_stream_capturing": False,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all"):
        setattr(cuda, name, nothing)
    cuda._lazy_init = cuda._lazy_call = nothing
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.initial_seed = torch.initial_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name in ("FloatTensor", "DoubleTensor", "IntTensor", "LongTensor"):
        setattr(cuda, name, getattr(torch, name))
    random._get_cuda_rng_state = cuda.get_rng_state
    random._set_cuda_rng_state = cuda.set_rng_state


def main(arguments):
    fake_cuda()
    from nemo_v4_indexer.training.cli import run

    with OnCpu():
        return run(["engine=megatron", "megatron.distributed_backend=gloo", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
