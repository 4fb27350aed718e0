"""What the kernels need from the machine: TileLang loaded late, a reason when they cannot run, one build per kernel.

TileLang is imported by the first call that needs it, never by importing this package. Compiled kernels live in
TileLang's own disk cache (`TILELANG_CACHE_DIR`, by default `~/.tilelang/cache`); file locks beside it let processes
that start together wait for one build instead of repeating it. A killed build releases its lock and leaves only a
staging folder that TileLang removes.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import torch

from . import tiling

logger = logging.getLogger(__name__)

TARGET = {"kind": "cuda", "arch": "sm_90a"}
PREBUILD = "python -m nemo_v4_indexer.kernels.prebuild"
_PROBE_SECONDS = 300
_build_lock = threading.RLock()


def cache_dir() -> Path:
    """Folder of TileLang's compiled kernels; shared by the processes of a node."""
    return Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")


def _own_dir() -> Path:
    return cache_dir() / "nemo_v4_indexer"


@contextlib.contextmanager
def _file_lock(name: str):
    """Exclusive among processes; yields without exclusion where the file system has no locks or is read-only."""
    import fcntl  # absent on Windows, where support() has already refused

    handle = None
    try:
        _own_dir().mkdir(parents=True, exist_ok=True)
        handle = open(_own_dir() / f"{name}.lock", "a")  # noqa: SIM115 - closed below, on every path
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        logger.debug("building without a lock under %s: %s", _own_dir(), error)
    try:
        yield
    finally:
        if handle is not None:
            handle.close()  # releases the lock


def _leave_mark(name: str) -> None:
    with contextlib.suppress(OSError):
        (_own_dir() / name).touch()


def _tilelang_file() -> str | None:
    """Where TileLang would be imported from, without importing it; None where it is not installed."""
    try:
        spec = importlib.util.find_spec("tilelang")
    except ImportError:  # an import hook of the host refuses it
        return None
    return spec and spec.origin


def _probe_import() -> str | None:
    """Import TileLang in a child process, because a broken build of it can abort the interpreter.

    The answer is remembered on disk for this pair of TileLang and torch, so it costs a child once per installation.
    """
    versions = [sys.version, torch.__version__, _tilelang_file()]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("tilelang"))
    mark = "imports-" + hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:16]
    if (_own_dir() / mark).exists():
        return None
    with _file_lock("import"):
        if (_own_dir() / mark).exists():
            return None
        code = f"import sys; sys.path[:] = {sys.path!r}; import tilelang.language"
        try:
            child = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"tilelang could not be tried in a child process: {error}"
        if child.returncode:
            last = (child.stderr.strip().splitlines() or ["no message"])[-1]
            return f"importing tilelang fails (exit {child.returncode}): {last}"
        _leave_mark(mark)
    return None


@functools.cache
def tilelang_problem() -> str | None:
    """Why TileLang cannot be used in this process, or None; imports it on the first call."""
    if sys.platform != "linux":
        return f"the TileLang kernels need Linux, this is {sys.platform}"
    if "tilelang" not in sys.modules:
        if _tilelang_file() is None:
            return "tilelang is not installed"
        if problem := _probe_import():
            return problem
    try:
        import tilelang.language  # noqa: F401 - importing is the test
    except Exception as error:  # whatever a broken installation raises becomes the reason
        return f"importing tilelang fails: {type(error).__name__}: {error}"
    return None


def load_tilelang():
    """The tilelang module. Raises RuntimeError with the reason where it cannot be used."""
    if problem := tilelang_problem():
        raise RuntimeError(f"the TileLang backend is not available: {problem}")
    import tilelang

    return tilelang


def find_nvcc() -> str | None:
    """Path of CUDA's compiler, looked for where TileLang looks for it."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and (Path(home) / "bin" / "nvcc").exists():
            return str(Path(home) / "bin" / "nvcc")
    if found := shutil.which("nvcc"):
        return found
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-nvcc") or []:
            if file.name == "nvcc":
                return str(file.locate())
    return None


def shape_problem(dtype: torch.dtype, heads: int, dim: int, topk: int) -> str | None:
    """Why the kernels do not take this problem, or None; independent of the machine."""
    if dtype != torch.bfloat16:
        return f"index_q and index_k must be torch.bfloat16, got {dtype}"
    if heads not in tiling.HEADS:
        return f"index heads must be one of {tiling.HEADS}, got {heads}"
    if dim not in tiling.DIMS:
        return f"index head dim must be one of {tiling.DIMS}, got {dim}"
    if not 1 <= topk <= tiling.TOPK_MAX:
        return f"topk must be 1 to {tiling.TOPK_MAX}, got {topk}"
    return None


def support(device: torch.device, dtype: torch.dtype, heads: int, dim: int, topk: int) -> str | None:
    """Why the TileLang kernels cannot run this problem, or None if they can.

    Cheap reasons come first; TileLang is imported only when everything else fits. Reads no tensor values.
    """
    if sys.platform != "linux":
        return f"the TileLang kernels need Linux, this is {sys.platform}"
    device = torch.device(device)
    if device.type != "cuda":
        return f"tensors are on {device.type}, the kernels need CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        return f"the kernels need compute capability 9.0 (Hopper), this device has {capability[0]}.{capability[1]}"
    if problem := shape_problem(dtype, heads, dim, topk):
        return problem
    if find_nvcc() is None and not any(_own_dir().glob("*.built")):
        return f"nvcc was not found and {cache_dir()} holds no prebuilt kernels ({PREBUILD})"
    return tilelang_problem()


def compile_kernel(prim_func, pass_configs: dict | None = None):
    """Compile a TileLang program for sm_90a; a callable on torch tensors, launched on torch's current stream.

    Needs no GPU. The first process to come builds and saves it, the others load it from disk. Keep the result (the
    builders' callers use `functools.cache`): this function keeps none.

    Raises RuntimeError if TileLang cannot be used or the build fails.
    """
    tilelang = load_tilelang()
    name = prim_func.attrs["global_symbol"]
    text = prim_func.script(show_meta=True) + repr(sorted((str(k), v) for k, v in (pass_configs or {}).items()))
    key = f"{name}-{hashlib.sha256(f'{tilelang.__version__}{text}'.encode()).hexdigest()[:16]}"
    with _build_lock, _file_lock(key):
        try:
            kernel = tilelang.compile(
                prim_func, target=TARGET, execution_backend="tvm_ffi", pass_configs=dict(pass_configs or {})
            )
        except Exception as error:
            hint = "" if find_nvcc() else f"; nvcc was not found (build where it is: {PREBUILD})"
            raise RuntimeError(f"building kernel {name} failed{hint}: {error}") from error
        _leave_mark(f"{key}.built")
    return kernel


def emit_cuda(prim_func, pass_configs: dict | None = None) -> str:
    """The CUDA text that TileLang generates for a program; needs neither a GPU nor nvcc."""
    tilelang = load_tilelang()
    from tilelang import tvm

    with tvm.target.Target(TARGET), tilelang.transform.PassContext(opt_level=3, config=dict(pass_configs or {})):
        return tilelang.lower(prim_func, target=TARGET).kernel_source
