"""Runs TileLang programs for Hopper on the CPU, from the CUDA text that TileLang emits.

`EmulatedKernel(prim_func, pass_configs, folder)` lowers without a GPU, compiles the text with g++ against the headers
in `cuda/` and is called like a compiled kernel, with CPU tensors that it reads and writes in place. What the emulator
finds wrong (a deadlock, an address outside an array, a barrier misused) raises `EmulationError`; a missing wait shows
as wrong numbers, because copies and matrix products happen as late, or as early, as the schedule says.

Not modelled: the register file, memory order between proxies (fences), and thread blocks running at the same time.
"""

import contextlib
import ctypes
import itertools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from cuda_source import rewrite
from host_program import Data, HostProgram, LaunchRequest, TensorMap

TARGET = {"kind": "cuda", "arch": "sm_90a"}
HEADERS = Path(__file__).parent / "cuda"
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-fPIC", "-shared"),
    *("-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-U_FORTIFY_SOURCE"),
    # Uninitialised locals hold a pattern (registers hold garbage), and indices outside local arrays trap.
    *("-ftrivial-auto-var-init=pattern", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"),
)
_MESSAGE_BYTES = 16384
_ORDERS = ("forward", "reverse", "random")
_TIMINGS = ("late", "early", "random")


class EmulationError(RuntimeError):
    """The kernel did something that would fail, hang or be undefined on the GPU."""


class EmulatorGap(RuntimeError):
    """The emitted text does not compile: it uses something that the emulator lacks. Says nothing about the kernel."""


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


def lower(prim_func, pass_configs=None):
    """TileLang's artifact (kernel_source, host_mod, device_mod) for sm_90a; needs no GPU."""
    import tilelang
    from tilelang import tvm

    config = {getattr(key, "value", key): value for key, value in (pass_configs or {}).items()}
    with tvm.target.Target(TARGET), tilelang.transform.PassContext(opt_level=3, config=config):
        return tilelang.lower(prim_func, target=TARGET)


def _reuse_disabled(pass_configs) -> bool:
    names = {str(getattr(key, "value", key)): value for key, value in (pass_configs or {}).items()}
    return bool(names.get("tl.disable_shared_memory_reuse"))


class CudaModule:
    """Emitted CUDA text, compiled for the emulator. g++ runs in the background until the first launch."""

    def __init__(self, source: str, folder: Path | str, *, disjoint_arrays: bool):
        text, kernels = rewrite(source, disjoint_arrays=disjoint_arrays)
        self._kernels = {kernel.name: kernel for kernel in kernels}
        self._library = None
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # A fresh name each time: the loader would hand out an older library of the same path.
        self._stem = folder / f"{kernels[0].name}_{next(_serial)}"
        self._stem.with_suffix(".cpp").write_text(text)
        command = ["g++", *FLAGS, "-I", str(HEADERS), "-o", f"{self._stem}.so", f"{self._stem}.cpp"]
        self._compiler = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def launch(self, request: LaunchRequest, schedule: Schedule) -> None:
        """Raises EmulatorGap if the text does not compile, EmulationError if the run fails."""
        library = self._load()
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
        entry = getattr(library, f"emulate_{request.kernel}")
        if entry(ctypes.byref(launch), message, ctypes.c_size_t(_MESSAGE_BYTES)):
            raise EmulationError(message.value.decode())

    def _load(self) -> ctypes.CDLL:
        if self._compiler.returncode is None:
            _, self._errors = self._compiler.communicate()
        if self._compiler.returncode:
            raise EmulatorGap(f"the emitted CUDA does not compile for the emulator:\n{self._errors[:4000]}")
        if self._library is None:
            self._library = ctypes.CDLL(f"{self._stem}.so")
        return self._library


class EmulatedKernel:
    """A TileLang program, callable on CPU tensors as a compiled kernel is on CUDA tensors."""

    def __init__(self, prim_func, pass_configs=None, folder: Path | str = "."):
        artifact = lower(prim_func, pass_configs)
        self.source = artifact.kernel_source
        self._module = CudaModule(self.source, folder, disjoint_arrays=_reuse_disabled(pass_configs))
        tags = {
            name.name_hint: tuple(str(tag) for tag in function.attrs["tirx.kernel_launch_params"])
            for name, function in artifact.device_mod.functions.items()
        }
        (host,) = artifact.host_mod.functions.values()
        self._host = HostProgram(host, tags)

    def __call__(self, *arguments) -> None:
        """Raises HostError where the host function refuses the arguments, EmulationError where the kernel fails."""
        for request in self.launches(*arguments):
            self._module.launch(request, _active[-1])

    def launches(self, *arguments) -> list[LaunchRequest]:
        """What a call with these arguments would launch."""
        return self._host.launches(arguments)


def poisoned(*shape, dtype=torch.float32) -> torch.Tensor:
    """A tensor whose every element is wrong: NaN, or the smallest integer."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype)
