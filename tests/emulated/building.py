"""Lowers TileLang programs and compiles what they emit, several at a time in forked processes."""

import multiprocessing
import os
import pickle
import subprocess
import traceback
from dataclasses import dataclass
from pathlib import Path

from cuda_source import CudaKernel, rewrite

TARGET = {"kind": "cuda", "arch": "sm_90a"}
HEADERS = Path(__file__).parent / "cuda"
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-fPIC", "-shared"),
    *("-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-U_FORTIFY_SOURCE"),
    # Uninitialised locals hold a pattern (registers hold garbage), and indices outside local arrays trap.
    *("-ftrivial-auto-var-init=pattern", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"),
)
_TIMEOUT = 900

_fork = multiprocessing.get_context("fork")  # a child needs neither imports nor a picklable program
_slots = _fork.BoundedSemaphore(os.cpu_count() or 1)


class EmulatorGap(RuntimeError):
    """The emitted text does not compile: it uses something that the emulator lacks. Says nothing about the kernel."""


@dataclass(frozen=True)
class Library:
    """Compiled text and the kernels in it."""

    path: str
    kernels: dict[str, CudaKernel]


@dataclass(frozen=True)
class Program:
    """A lowered and compiled TileLang program; `host` is the host function's module as TVM's JSON."""

    source: str
    host: str
    launch_tags: dict[str, tuple[str, ...]]
    library: Library


class Job:
    """Runs `work()` in a forked process; `result()` waits for it and gives its value, or raises what it raised."""

    def __init__(self, work, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._process = _fork.Process(target=_run, args=(work, path), daemon=True)
        self._process.start()

    def result(self):
        self._process.join(_TIMEOUT)
        if not self._path.exists():
            self._process.kill()
            raise RuntimeError(f"building {self._path.stem} ended with exit code {self._process.exitcode}")
        value = pickle.loads(self._path.read_bytes())
        if isinstance(value, Exception):
            raise value
        return value


def _run(work, path: Path) -> None:
    with _slots:
        try:
            value = work()
        except EmulatorGap as error:
            value = error
        except Exception:  # reported where the result is asked for
            value = RuntimeError(traceback.format_exc())
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def compile_text(source: str, stem: Path, *, disjoint_arrays: bool) -> Library:
    """Raises EmulatorGap with the compiler's words."""
    text, kernels = rewrite(source, disjoint_arrays=disjoint_arrays)
    stem.with_suffix(".cpp").write_text(text)
    command = ["g++", *FLAGS, "-I", str(HEADERS), "-o", f"{stem}.so", f"{stem}.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorGap(f"the emitted CUDA does not compile for the emulator:\n{done.stderr[:4000]}")
    return Library(f"{stem}.so", {kernel.name: kernel for kernel in kernels})


def build_program(prim_func, pass_configs, stem: Path) -> Program:
    """Lower for sm_90a, which needs no GPU, and compile."""
    import tilelang
    from tilelang import tvm

    config = {str(getattr(key, "value", key)): value for key, value in (pass_configs or {}).items()}
    with tvm.target.Target(TARGET), tilelang.transform.PassContext(opt_level=3, config=config):
        artifact = tilelang.lower(prim_func, target=TARGET)
    tags = {
        name.name_hint: tuple(str(tag) for tag in function.attrs["tirx.kernel_launch_params"])
        for name, function in artifact.device_mod.functions.items()
    }
    disjoint = bool(config.get("tl.disable_shared_memory_reuse"))
    library = compile_text(artifact.kernel_source, stem, disjoint_arrays=disjoint)
    return Program(artifact.kernel_source, tvm.ir.save_json(artifact.host_mod), tags, library)
