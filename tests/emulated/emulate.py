"""Runs TileLang programs for Hopper on the CPU, from the CUDA text that TileLang emits.

`EmulatedKernel(prim_func, pass_configs, folder)` lowers without a GPU, compiles the text with g++ against the headers
in `cuda/` and is called like a compiled kernel, with CPU tensors that it reads and writes in place. What the emulator
finds wrong (a deadlock, an address outside an array, a barrier misused) raises `EmulationError`; a missing wait shows
as wrong numbers, because copies and matrix products happen as late, or as early, as the schedule says.

Not modelled: the register file, memory order between proxies (fences), and thread blocks running at the same time.
"""

import contextlib
import ctypes
import functools
import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from building import EmulatorGap, Job, Library, Program, build_program, compile_text
from host_program import Data, HostProgram, LaunchRequest, TensorMap

_MESSAGE_BYTES = 16384
_ORDERS = ("forward", "reverse", "random")
_TIMINGS = ("late", "early", "random")


class EmulationError(RuntimeError):
    """The kernel did something that would fail, hang or be undefined on the GPU."""


@dataclass(frozen=True)
class Schedule:
    """Order in which ready threads (and blocks) run, when asynchronous work happens, and the byte that fills shared
    memory before a block: 0x7F makes huge numbers that no ReLU clips, 0xFF makes NaN and -1."""

    order: str = "forward"
    timing: str = "late"
    seed: int = 0
    poison: int = 0x7F
    time_limit: int = 120


SCHEDULES = (
    Schedule("forward", "late"),
    Schedule("reverse", "early", poison=0xFF),
    Schedule("random", "random", seed=1),
)
_active = [SCHEDULES[0]]

__all__ = ["SCHEDULES", "CudaModule", "EmulatedKernel", "EmulationError", "EmulatorGap", "Schedule", "scheduled"]


@contextlib.contextmanager
def scheduled(schedule: Schedule):
    """Every launch inside runs under this schedule."""
    _active.append(schedule)
    try:
        yield schedule
    finally:
        _active.pop()


def unavailable() -> str | None:
    """Why kernels cannot be emulated here, or None."""
    if shutil.which("g++") is None:
        return "g++ was not found"
    from nemo_v4_indexer.kernels import runtime

    return runtime.tilelang_problem()


_serial = itertools.count()


class _Map(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
        ("swizzle_bytes", ctypes.c_int32),
        ("is_float32", ctypes.c_int32),
        ("size", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
        ("box", ctypes.c_int32 * 5),
    )


class _Argument(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("map", _Map),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(_Argument)),
        ("count", ctypes.c_int32),
        ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3),
        ("shared_bytes", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("timing", ctypes.c_int32),
        ("poison", ctypes.c_int32),
        ("time_limit", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    )


def _argument(name: str, value) -> _Argument:
    argument = _Argument(name=name.encode())
    if isinstance(value, TensorMap):
        m = argument.map
        m.base, m.rank = value.data.tensor.data_ptr(), len(value.sizes)
        m.element_bytes, m.swizzle_bytes, m.is_float32 = value.element_bytes, value.swizzle_bytes, value.float32
        for i, (size, stride, box) in enumerate(zip(value.sizes, value.strides, value.box, strict=True)):
            m.size[i], m.stride[i], m.box[i] = size, stride, box
        argument.data, argument.bytes = m.base, value.data.bytes  # the tensor that the map covers
    elif isinstance(value, Data):
        argument.data, argument.bytes = value.tensor.data_ptr(), value.bytes
    elif value is not None:  # None: an empty tensor
        argument.integer, argument.real = int(value), float(value)
    return argument


class _Launcher:
    """Runs kernels of a compiled library."""

    def __init__(self, library: Library):
        self._kernels = library.kernels
        self._functions = ctypes.CDLL(library.path)

    def launch(self, request: LaunchRequest, schedule: Schedule) -> None:
        parameters = self._kernels[request.kernel].parameters
        values = [v[0] if isinstance(v, list) else v for v in request.arguments]
        arguments = (_Argument * len(values))(*(_argument(p.name, v) for p, v in zip(parameters, values, strict=True)))
        launch = _Launch(
            kernel=request.kernel.encode(),
            arguments=arguments,
            count=len(values),
            grid=(ctypes.c_int32 * 3)(*request.grid),
            block=(ctypes.c_int32 * 3)(*request.block),
            shared_bytes=request.shared_bytes,
            order=_ORDERS.index(schedule.order),
            timing=_TIMINGS.index(schedule.timing),
            poison=schedule.poison,
            time_limit=schedule.time_limit,
            seed=schedule.seed,
        )
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        entry = getattr(self._functions, f"emulate_{request.kernel}")
        if entry(ctypes.byref(launch), message, ctypes.c_size_t(_MESSAGE_BYTES)):
            raise EmulationError(message.value.decode())


def _stem(folder: Path | str, name: str) -> Path:
    # A fresh name each time: the loader would hand out an older library of the same path.
    return Path(folder) / f"{name}_{next(_serial)}"


class CudaModule:
    """CUDA text in the form that TileLang emits."""

    def __init__(self, source: str, folder: Path | str, *, disjoint_arrays: bool):
        stem = _stem(folder, "text")
        work = functools.partial(compile_text, source, stem, disjoint_arrays=disjoint_arrays)
        self._job = Job(work, stem.with_suffix(".result"))

    @functools.cached_property
    def _launcher(self) -> _Launcher:
        return _Launcher(self._job.result())

    def launch(self, request: LaunchRequest, schedule: Schedule) -> None:
        """Raises EmulatorGap if the text does not compile, EmulationError if the run fails."""
        self._launcher.launch(request, schedule)


class EmulatedKernel:
    """A TileLang program, callable on CPU tensors as a compiled kernel is on CUDA tensors.

    It is built in the background; the first use waits, and raises EmulatorGap if the emulator lacks something.
    """

    def __init__(self, prim_func, pass_configs=None, folder: Path | str = "."):
        stem = _stem(folder, prim_func.attrs["global_symbol"])
        work = functools.partial(build_program, prim_func, pass_configs, stem)
        self._job = Job(work, stem.with_suffix(".result"))

    def __call__(self, *arguments) -> None:
        """Raises HostError where the host function refuses the arguments, EmulationError where the kernel fails."""
        for request in self.launches(*arguments):
            self._launcher.launch(request, _active[-1])

    def launches(self, *arguments) -> list[LaunchRequest]:
        """What a call with these arguments would launch."""
        return self._host.launches(arguments)

    @property
    def source(self) -> str:
        """The CUDA text."""
        return self._program.source

    @functools.cached_property
    def _program(self) -> Program:
        return self._job.result()

    @functools.cached_property
    def _launcher(self) -> _Launcher:
        return _Launcher(self._program.library)

    @functools.cached_property
    def _host(self) -> HostProgram:
        from tilelang import tvm

        (host,) = tvm.ir.load_json(self._program.host).functions.values()
        return HostProgram(host, self._program.launch_tags)


def poisoned(*shape, dtype=torch.float32) -> torch.Tensor:
    """A tensor whose every element is wrong: NaN, or the smallest integer."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype)
