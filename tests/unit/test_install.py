"""The bare package in a fresh interpreter: light to import, and of use without a working TileLang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_v4_indexer

HEAVY = ("torch", "tilelang", "megatron", "nemo", "nemo_automodel", "hydra", "omegaconf", "numpy", "matplotlib")


def python(code, **environment):
    """What `code`, run in a new interpreter, prints as its last line of JSON."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TILELANG_", "CUDA_"))}
    root = str(Path(nemo_v4_indexer.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), root]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOGGING = """
import json, logging, sys, time, warnings

def state():
    loggers = [logging.getLogger(name) for name in (None, *logging.root.manager.loggerDict)]
    loggers = [logger for logger in loggers if logger.handlers or logger.level]
    return sorted((l.name, l.level, l.propagate, l.disabled, repr(l.handlers)) for l in loggers)

def loaded():
    return sorted(m for m in {name.split(".")[0] for name in sys.modules} if m in HEAVY)
""".replace("HEAVY", repr(HEAVY))


def test_importing_the_package_loads_and_changes_nothing():
    code = f"""{LOGGING}
before, filters, hook, began = state(), list(warnings.filters), sys.excepthook, time.process_time()
import nemo_v4_indexer
seconds = time.process_time() - began
same = state() == before and warnings.filters == filters and sys.excepthook is hook
bare = loaded()
import nemo_v4_indexer.config
nemo_v4_indexer.IndexerConfig
print(json.dumps([bare, loaded(), same, seconds]))
"""
    bare, with_config, same, seconds = python(code)
    assert bare == with_config == []
    assert same and seconds < 0.3


def test_the_operation_loads_torch_alone_and_leaves_logging_to_the_host():
    """The host imported torch and set up its logging; running the operation with backend auto changes neither."""
    code = f"""{LOGGING}
import torch
logging.basicConfig(level=logging.ERROR)
before, modules = state(), loaded()
import nemo_v4_indexer
arguments = torch.ones(8, 1, 8, 32), torch.ones(2, 1, 32), torch.ones(8, 1, 8)
scores, _ = nemo_v4_indexer.v4_lighting_indexer(*arguments, 4, 2)
more = [name for name in ("tilelang", "megatron", "nemo", "hydra") if name in sys.modules]
print(json.dumps([state() == before, loaded() == modules, more, scores[0, 7].tolist()]))
"""
    assert python(code) == [True, True, [], [256.0, 256.0]]


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tilelang":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""

# With a GPU that the kernels could use, were there a TileLang: what remains is the reason under test.
USE = """
import json
import torch
from nemo_v4_indexer import v4_lighting_indexer
from nemo_v4_indexer.kernels import runtime

arguments = torch.ones(8, 1, 8, 32).bfloat16(), torch.ones(2, 1, 32).bfloat16(), torch.ones(8, 1, 8), 4, 2
runs = v4_lighting_indexer(*arguments)[1][0, 7].tolist()
def attempt(call):
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
asked = attempt(lambda: v4_lighting_indexer(*arguments, backend="tilelang"))
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
reason = runtime.support(torch.device("cuda"), torch.bfloat16, 8, 32, 2)
loading = attempt(runtime.load_tilelang)
print(json.dumps([runs, asked, reason, loading, v4_lighting_indexer(*arguments)[1][0, 7].tolist()]))
"""

BROKEN = {
    "raises": "raise OSError('libcuda.so.1: no such file')",
    "aborts": "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nos.abort()",
}


@pytest.mark.parametrize("kind", ["absent", *BROKEN])
def test_without_a_working_tilelang_the_reference_runs_and_a_kernel_gives_one_clear_error(kind, tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    environment = {"TILELANG_CACHE_DIR": str(tmp_path / "cache"), "CUDA_HOME": str(tmp_path / "cuda")}
    if kind != "absent":
        package = tmp_path / "broken" / "tilelang"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(BROKEN[kind])
        (package / "language.py").touch()
        environment["PYTHONPATH"] = str(package.parent)
    runs, asked, reason, loading, again = python((BLOCKER if kind == "absent" else "") + USE, **environment)
    assert runs == again == [0, 1]
    assert asked.startswith("RuntimeError: backend 'tilelang' cannot run: ") and "\n" not in asked
    expected = {
        "absent": "tilelang is not installed",
        "raises": "importing tilelang fails (exit 1): OSError: libcuda.so.1: no such file",
        "aborts": "importing tilelang fails (exit -6)",
    }[kind]
    assert reason.startswith(expected)
    assert loading == f"RuntimeError: the TileLang backend is not available: {reason}"
