"""The kernels' runtime on a machine without a GPU: reasons, late import, builds, launch choices, clean machine code."""

import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from nemo_v4_indexer.kernels import runtime, tiling

CUDA = torch.device("cuda", 0)


def child(code, **environment):
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )


@pytest.fixture
def hopper(monkeypatch):
    """A pretended Hopper GPU with a working TileLang."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(runtime, "find_nvcc", lambda: "/somewhere/nvcc")
    monkeypatch.setattr(runtime, "tilelang_problem", lambda: None)


def test_a_supported_problem_has_no_reason_against_it(hopper):
    assert runtime.support(CUDA, torch.bfloat16, 64, 128, 512) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "bfloat16, got torch.float32"),
        ({"heads": 1}, "heads must be one of"),
        ({"heads": 12}, "got 12"),
        ({"heads": 96}, "got 96"),
        ({"dim": 96}, "head dim must be one of"),
        ({"topk": 0}, "got 0"),
        ({"topk": tiling.TOPK_MAX + 1}, f"1 to {tiling.TOPK_MAX}"),
        ({"device": "cpu"}, "tensors are on cpu"),
    ],
)
def test_each_reason_names_what_was_given(hopper, change, words):
    problem = {"device": CUDA, "dtype": torch.bfloat16, "heads": 64, "dim": 128, "topk": 512} | change
    assert words in runtime.support(**problem)


def test_reasons_of_the_machine(hopper, monkeypatch, tmp_path):
    problem = (CUDA, torch.bfloat16, 64, 128, 512)
    monkeypatch.setattr(runtime, "tilelang_problem", lambda: "tilelang is not installed")
    assert runtime.support(*problem) == "tilelang is not installed"
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "find_nvcc", lambda: None)
    assert "nvcc was not found" in runtime.support(*problem)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "this device has 8.0" in runtime.support(*problem)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.support(*problem) == "torch sees no CUDA device"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "need Linux" in runtime.support(*problem)


def test_prebuilt_kernels_do_without_nvcc(hopper, monkeypatch, tmp_path):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "find_nvcc", lambda: None)
    (tmp_path / "nemo_v4_indexer").mkdir()
    (tmp_path / "nemo_v4_indexer" / "score_fwd_kernel-0.built").touch()
    assert runtime.support(CUDA, torch.bfloat16, 64, 128, 512) is None


def test_importing_the_package_loads_no_tilelang():
    done = child(
        """
        import sys
        import nemo_v4_indexer.kernels.forward, nemo_v4_indexer.kernels.runtime
        assert not [m for m in sys.modules if m.split(".")[0] in ("tilelang", "tvm")]
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os; os.abort()", "exit -6"),
        ("raise OSError('libfoo.so.1: cannot open shared object file')", "libfoo.so.1"),
        ("import sys; sys.exit(3)", "exit 3"),
    ],
)
def test_a_broken_tilelang_becomes_one_clear_error(tmp_path, body, words):
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text(body + "\n")
    done = child(
        """
        from nemo_v4_indexer.kernels import runtime
        for _ in range(2):
            try:
                runtime.load_tilelang()
            except RuntimeError as error:
                print(error)
        """,
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
        TILELANG_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second and words in first and "TileLang backend is not available" in first


def test_an_absent_tilelang_is_named(monkeypatch):
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "tilelang", None)
    monkeypatch.delitem(sys.modules, "tilelang")
    runtime.tilelang_problem.cache_clear()
    try:
        assert runtime.tilelang_problem() == "tilelang is not installed"
    finally:
        runtime.tilelang_problem.cache_clear()


def test_a_killed_build_frees_its_lock(monkeypatch, tmp_path):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nfrom nemo_v4_indexer.kernels import runtime\n"
            "with runtime._file_lock('k'):\n    print('held', flush=True)\n    time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    waiter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from nemo_v4_indexer.kernels import runtime\nwith runtime._file_lock('k'):\n    print('got', flush=True)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)
    assert waiter.poll() is None, "two processes hold one lock"
    holder.send_signal(signal.SIGKILL)
    assert waiter.communicate(timeout=60)[0] == "got\n"
    holder.wait()


def test_an_unwritable_cache_only_loses_the_lock(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file"))
    with runtime._file_lock("k"):
        pass
    runtime._leave_mark("k.built")


SMALL_KERNEL = """
import sys, logging
sys.path.insert(0, {folder!r})
from nemo_v4_indexer.kernels import runtime
runtime.load_tilelang()
from small_program import double
runtime.compile_kernel(double)
"""


@pytest.mark.slow
@pytest.mark.skipif(runtime.find_nvcc() is None, reason="needs nvcc to build a kernel")
def test_eight_processes_build_a_kernel_once(tmp_path):
    if problem := runtime.tilelang_problem():
        pytest.skip(problem)
    (tmp_path / "small_program.py").write_text(
        textwrap.dedent(
            """
            import tilelang.language as T

            @T.prim_func
            def double(X: T.Tensor([128], "float32")):
                with T.Kernel(1, threads=128):
                    X[T.get_thread_binding()] = X[T.get_thread_binding()] * 2
            """
        )
    )
    environment = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    code = SMALL_KERNEL.format(folder=str(tmp_path))
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(8)
    ]
    output = [process.communicate(timeout=500)[0].decode() for process in crowd]
    assert [process.returncode for process in crowd] == [0] * 8, output
    assert sum("begins to compile" in text for text in output) == 1, output


def test_prebuild_refuses_and_counts(monkeypatch, capsys):
    from nemo_v4_indexer.kernels import backward, forward, loss, prebuild, rotation

    with pytest.raises(SystemExit):
        prebuild.main(["--heads", "12"])
    assert "got 12" in capsys.readouterr().err
    monkeypatch.setattr(forward, "prebuild", lambda *problem: 4)
    monkeypatch.setattr(backward, "prebuild", lambda *problem: 3)
    monkeypatch.setattr(loss, "prebuild", lambda topk: 1)
    monkeypatch.setattr(rotation, "prebuild", lambda dim, rotary: 2)
    assert prebuild.main(["--topk", "512", "--topk", "64"]) == 0
    assert "18 kernels ready" in capsys.readouterr().out


def plan_bytes(plan):
    """Shared memory of the top-k kernel."""
    unit = 4 if plan.mode == "list" else 32 * plan.words * plan.threads
    lists = {"list": 8, "resident": plan.cap + 4, "stream": 2 * plan.cap}[plan.mode]
    return 4 * (unit + lists + 260 + 64 + 64 + 4 + 4 + 256)


def test_every_topk_has_plans_that_fit():
    for topk in range(1, tiling.TOPK_MAX + 1):
        for keys in (1, 2048, 2049, 8192, 8193, 16384, 16385, 131072):
            plan = tiling.topk_plan(topk, keys)
            assert plan in tiling.topk_plans(topk)
            assert plan.cap >= topk and plan.cap % plan.threads == 0
            assert plan.threads & (plan.threads - 1) == 0 and 64 * plan.words <= plan.threads <= 1024
            room = {"list": plan.cap, "resident": 32 * plan.words * plan.threads, "stream": keys}[plan.mode]
            assert room >= keys
            assert plan_bytes(plan) <= 227 * 1024


@pytest.mark.parametrize("heads", tiling.HEADS)
@pytest.mark.parametrize(
    ("rows", "batch", "keys"), [(1, 1, 1), (32768, 1, 8192), (131072, 1, 32768), (4097, 3, 4099), (999, 5, 131072)]
)
def test_chunks_cover_the_rows_within_the_workspace(heads, rows, batch, keys):
    for workspace in (1, 2**20, tiling.WORKSPACE_BYTES):
        chunks = tiling.plan_chunks(rows, batch, keys, heads, workspace, 132)
        assert [last for _, last in chunks.ranges[:-1]] == [first for first, _ in chunks.ranges[1:]]
        assert chunks.ranges[0][0] == 0 and chunks.ranges[-1][1] == rows
        most = max(last - first for first, last in chunks.ranges)
        assert chunks.stride >= keys and chunks.stride % 4 == 0
        assert chunks.workspace == batch * most * chunks.stride
        assert most == 1 or 4 * chunks.workspace <= workspace


def machine_code_report(source, folder):
    """What ptxas says about the emitted CUDA."""
    import tilelang

    templates = os.path.dirname(tilelang.__file__)
    (folder / "kernel.cu").write_text(source)
    command = [
        runtime.find_nvcc(),
        "-gencode=arch=compute_90a,code=sm_90a",
        "-cubin",
        "-std=c++17",
        "-w",
        "-Xptxas",
        "-v",
    ]
    command += ["--expt-relaxed-constexpr", f"-I{templates}/src", f"-I{templates}/3rdparty/cutlass/include"]
    command += ["-o", str(folder / "kernel.cubin"), str(folder / "kernel.cu")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def assert_clean(report, spills=0):
    """At most `spills` bytes spilled to local memory, and no wgmma that ptxas serialised (C7500 to C7599)."""
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert found and all(int(count) <= spills for line in found for count in line), report
    assert not re.search(r"\bC75\d\d\b", report), report


@pytest.fixture
def compiler():
    if runtime.find_nvcc() is None:
        pytest.skip("needs nvcc")
    if problem := runtime.tilelang_problem():
        pytest.skip(problem)


def slow_but(shapes, quick):
    """The shapes as parameters, all but the quick ones marked slow."""
    return [pytest.param(*s, marks=() if s in quick else pytest.mark.slow) for s in shapes]


@pytest.mark.parametrize(("heads", "dim"), slow_but(itertools.product(tiling.HEADS, tiling.DIMS), [(64, 128)]))
def test_score_kernels_compile_cleanly(compiler, tmp_path, heads, dim):
    from nemo_v4_indexer.kernels import score_fwd

    source = runtime.emit_cuda(score_fwd.score_fwd(heads, dim), score_fwd.PASS_CONFIGS)
    assert source.count("tl::wgmma_ss<") == dim // 16
    assert_clean(machine_code_report(source, tmp_path))


TOPK_KERNELS = [(512, plan) for plan in tiling.topk_plans(512)] + [(1024, tiling.topk_plan(1024, 16384))]
TOPK_KERNELS += [(2048, tiling.topk_plan(2048, keys)) for keys in (16384, 131072)]
STREAM_SPILLS = 128  # row constants, off the inner loops: fewer blocks of threads would cost more than they do


@pytest.mark.parametrize(
    ("topk", "plan"),
    slow_but(TOPK_KERNELS, TOPK_KERNELS[:2]),
    ids=lambda v: v if isinstance(v, int) else f"{v.mode}{v.threads}",
)
def test_topk_kernels_compile_cleanly(compiler, tmp_path, topk, plan):
    from nemo_v4_indexer.kernels import topk as program

    options = {"mode": plan.mode, "threads": plan.threads, "words": plan.words, "cap": plan.cap, "blocks": plan.blocks}
    source = runtime.emit_cuda(program.topk_select(topk, **options), program.PASS_CONFIGS)
    assert_clean(machine_code_report(source, tmp_path), STREAM_SPILLS if plan.mode == "stream" else 0)


@pytest.mark.parametrize("slots", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_loss_kernel_compiles_cleanly(compiler, tmp_path, slots):
    from nemo_v4_indexer.kernels import kl_rows

    assert_clean(machine_code_report(runtime.emit_cuda(kl_rows.kl_rows(slots), kl_rows.PASS_CONFIGS), tmp_path))


def test_the_machine_code_check_can_fail():
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert_clean(clean)
    for bad in (
        "",
        clean.replace("0 bytes spill loads", "8 bytes spill loads"),
        clean + "\nptxas info: (C7510) serialized",
    ):
        with pytest.raises(AssertionError):
            assert_clean(bad)
