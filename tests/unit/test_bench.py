"""The benchmark script, on the CPU: options, what its checks refuse, its record, its table and its plot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.skipif(not (SCRIPTS / "bench.py").exists(), reason="not a checkout of the project")
sys.path.insert(0, str(SCRIPTS))

if (SCRIPTS / "bench.py").exists():
    import bench
    import bench_arms
    import bench_build
    import bench_gate
    import bench_plot
    import bench_timing
    from bench_problem import DEFAULT, Problem, Shape

TINY = "70:4:8,48:1:16:2:ties"


class FakeClock(bench_timing.WallClock):
    """Runs everything; every time is 2 ms."""

    def start(self, run):
        run()
        return 2.0

    def peak(self, run):
        return run(), 3 * 2**20

    def ceilings(self):
        return {"matmul_tflops": 800.0, "copy_tbps": 4.0}


def options(tmp_path, *more, shapes=TINY, arms="package,torch,torch-unsorted"):
    paths = ["--results", str(tmp_path / "results"), "--plot", str(tmp_path / "bench.svg")]
    size = ["--heads", "8", "--dim", "32", "--device", "cpu", "--budget", "1"]
    return bench.parse([*paths, *size, "--shapes", shapes, "--arms", arms, *more])


def run(tmp_path, classes=None, **kwargs):
    found = bench.Run(options(tmp_path, **kwargs), FakeClock(), "reference", classes)
    return found.measure(), json.loads(found.path.read_text())


# Options


def test_shapes_are_parsed():
    assert Shape.parse("8191:1:2048:2:ar1") == Shape(8191, 1, 2048, 2, "ar1")
    assert Shape.parse("4096") == Shape(4096, 4, 512, 1, "iid")


@pytest.mark.parametrize("text", ["", "x", "64:4:8:1:normal", "64:0", "2:4", "64:4:8:1:iid:9", "64:-1"])
def test_bad_shapes_exit_with_what_was_given(text, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--shapes", f"64,{text}"])
    assert "a shape is SEQUENCE[:RATIO" in capsys.readouterr().err


def test_unknown_arms_exit_with_their_names(capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--arms", "package,flash"])
    assert "flash" in capsys.readouterr().err


def test_the_default_shapes_cover_the_targets():
    found = bench.parse([])
    assert found.shapes == DEFAULT and "cudnn-deterministic" not in found.arms
    typical = {s.sequence for s in DEFAULT if s.kind[:4] == (4, 512, 1, "iid")}
    assert {4096, 8192, 16384, 32768, 65536, 131072} <= typical and any(s % 2 for s in typical)
    assert {s.sequence for s in DEFAULT if s.ratio == 1} == {4096, 8192, 32768, 131072}
    full = bench.parse(["--full"])
    assert len(full.shapes) > len(DEFAULT) and {s.data for s in full.shapes} == {"iid", "ar1", "ties"}


def test_the_recorded_command_names_no_folders():
    given = ["--full", "--results", "/tmp/x", "--plot=/tmp/y", "--revision", "abc", "--budget", "9"]
    assert bench.spoken(given) == ["--full", "--budget", "9"]


# Floors and repeats


def test_floors_count_visible_and_selected_pairs():
    shape = Shape(64, 4, 3, batch=2, heads=8, dim=32)
    ends = [(t + 1) // 4 for t in range(64)]
    visible, selected = 2 * sum(ends), 2 * sum(min(3, end) for end in ends)
    floors = shape.floors({"matmul_tflops": 1e-9, "copy_tbps": 1e-9})
    assert floors["forward"] == floors["scores"] == pytest.approx(2 * 8 * 32 * visible)
    assert floors["top-k"] == pytest.approx(4 * visible + 8 * 2 * 64 * 3)
    assert floors["backward"] == pytest.approx(6 * 8 * 32 * selected)
    assert floors["forward+backward"] == floors["forward"] + floors["backward"]


def test_repeats_fit_the_budget_and_are_spread():
    repeats = bench_timing.repeats_within(3.0, {"fast": 0.1, "slow": 100.0, "slower": 900.0}, 100)
    assert repeats == {"fast": 100, "slow": 10, "slower": 5}
    order = list(bench_timing.interleaved({"a": 6, "b": 2, "c": 3}))
    assert [order.count(name) for name in "abc"] == [6, 2, 3]
    assert order.index("b") < len(order) // 2 < len(order) - order[::-1].index("b")


def test_correlated_queries_are_an_autoregression():
    from bench_problem import _correlated

    noise = torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, want = torch.zeros(3, dtype=torch.float64), []
    for row in noise:
        x = 0.9 * x + row
        want.append(x * (1 - 0.81) ** 0.5)
    torch.testing.assert_close(_correlated(noise, 0.9), torch.stack(want), atol=1e-3, rtol=0)


# The checks


@pytest.fixture(params=["iid", "ar1", "ties"])
def problem(request):
    return Problem(Shape(70, 4, 8, 2, request.param, 8, 32), "cpu", "reference")


def results(problem, operation):
    run, _ = bench_arms.Package().build(operation, problem)
    return {name: x.clone() if torch.is_tensor(x) else x for name, x in run().items()}


LIMITS = [1e-2] * 3


def check(problem, operation, result, exact=True, whole=False):
    return bench_gate.check(problem, operation, result, LIMITS, exact=exact, whole=whole)


@pytest.mark.parametrize("operation", ["forward", "scores", "top-k", "backward", "forward+backward"])
def test_this_package_passes(problem, operation):
    errors = check(problem, operation, results(problem, operation), whole="backward" in operation)
    assert all(error < 5e-3 for error in errors.values())
    check(problem, operation, results(problem, operation))


def wrongs(result):
    """Results that are wrong in one way each."""

    def changed(**tensors):
        return result | tensors

    indices, values = result["indices"], result["values"]
    last = indices.clone()
    last[:, -1, -1] = (last[:, -1, -1] - 1).clamp(min=0)  # a key twice, or another key
    yield "another key", changed(indices=last)
    yield "one slot empty", changed(indices=indices.index_fill(2, torch.tensor([0]), -1))
    yield "a key from the future", changed(indices=torch.where(indices >= 0, indices + 4, indices))
    yield "other scores", changed(values=values * 1.001)
    yield "out of order", changed(indices=indices.flip(-1), values=values.flip(-1))


def test_wrong_selections_are_refused():
    problem = Problem(Shape(70, 4, 8, 2, "iid", 8, 32), "cpu", "reference")
    for operation in ("forward", "top-k"):
        for name, result in wrongs(results(problem, operation)):
            with pytest.raises(bench_gate.Wrong):
                check(problem, operation, result)
                pytest.fail(f"{operation}: {name} passed")


def test_a_selection_from_other_scores_than_the_problems_is_refused():
    problem = Problem(Shape(70, 4, 8, 1, "iid", 8, 32), "cpu", "reference")
    problem.padded_logits.mul_(1.001)
    with pytest.raises(bench_gate.Wrong, match="the scores to select from"):
        check(problem, "top-k", results(problem, "top-k"))


def test_peers_may_choose_another_order():
    problem = Problem(Shape(70, 4, 8, 1, "iid", 8, 32), "cpu", "reference")
    for operation in ("forward", "top-k"):
        result = results(problem, operation)
        flipped = {name: x.flip(-1) for name, x in result.items()}
        check(problem, operation, flipped, exact=False)
        for name, wrong in list(wrongs(result))[:-1]:
            if operation == "top-k" and name in ("one slot empty", "a key from the future"):
                continue  # torch.topk gives the empty slots of a short row any index; its values are compared
            with pytest.raises(bench_gate.Wrong):
                check(problem, operation, wrong, exact=False)


def test_wrong_scores_are_refused(problem):
    scores = results(problem, "scores")["scores"]
    for wrong in (scores * 1.0001, torch.zeros_like(scores), scores.index_fill(2, torch.tensor([0]), float("nan"))):
        with pytest.raises(bench_gate.Wrong, match="relative error of scores"):
            check(problem, "scores", {"scores": wrong})


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["dq", "dk", "dw"])
def test_wrong_gradients_are_refused(problem, name, whole):
    right = results(problem, "backward")
    for wrong in (
        torch.zeros_like(right[name]),
        right[name] * 1.05,
        right[name].roll(1, 0),
        right[name] * float("nan"),
    ):
        with pytest.raises(bench_gate.Wrong, match=f"relative error of {name}"):
            check(problem, "backward", right | {name: wrong}, whole=whole)


def test_gradients_pass_where_the_arm_names_its_own_weights_and_gradient(problem):
    weights, grad = problem.w.bfloat16().float(), torch.randn_like(problem.grad)
    from nemo_v4_indexer import reference

    dq, dk, dw = reference.backward(problem.q, problem.k, weights, problem.indices, grad)
    own = {"dq": dq, "dk": dk, "dw": dw, "weights": weights, "grad": grad}
    check(problem, "backward", own)
    with pytest.raises(bench_gate.Wrong):
        check(problem, "backward", own | {"grad": problem.grad})


def test_limits_are_twice_plain_bf16(problem):
    problem.silence_ties()
    limits = bench_gate.gradient_limits(problem)
    assert all(1e-3 < limit < 3e-2 for limit in limits)
    assert bool((problem.grad != 0).any())


# Whole runs


def test_a_run_records_every_number(tmp_path, capsys):
    passed, record = run(tmp_path)
    assert passed and record["finished"] and record["ceilings"]["matmul_tflops"] == 800.0
    assert {"command", "date", "revision", "machine", "versions", "missing", "seconds"} <= record.keys()
    assert record["versions"]["torch"] == torch.__version__ and "tilelang" in record["versions"]
    assert [shape["label"] for shape in record["shapes"]] == ["S=70 r=4 K=8", "S=48 r=1 K=16 B=2 ties"]
    for shape in record["shapes"]:
        assert len(shape["arms"]) == 8
        assert shape["floors_ms"].keys() == set(bench_plot.OPERATIONS)
        for row in shape["arms"]:
            assert row["ms"] == 2.0 and row["medians_ms"] == [2.0, 2.0] and row["repeats"] >= 5
            assert row["extra_mib"] == 3.0 and isinstance(row["errors"], dict)
        own = bench_plot.row_of(shape, "backward", bench_plot.OWN)
        assert {"dq", "dk", "dw", "dq, whole", "dk, whole", "dw, whole"} == own["errors"].keys()
    text = bench_plot.report(record)
    assert "2 (1.0x)" in text and "**Extra memory**" in text and "did not finish" not in text


class WrongGradient(bench_arms.Package):
    def build(self, operation, problem):
        run, setup = super().build(operation, problem)
        if operation != "backward":
            return run, setup
        return lambda: run() | {"dk": torch.zeros_like(problem.k)}, setup


class WrongPeer(bench_arms.TorchUnsorted):
    name = "a peer"

    def build(self, operation, problem):
        run, setup = super().build(operation, problem)
        return lambda: run() | {"values": torch.zeros(2, 70, 8)[:1]}, setup


class BrokenPeer(bench_arms.Torch):
    name = "another peer"

    def build(self, operation, problem):
        raise RuntimeError("no kernel for this")


class ExhaustedPeer(bench_arms.TorchUnsorted):
    """Runs out of memory after the checks."""

    name = "a fifth peer"

    def build(self, operation, problem):
        run, calls = super().build(operation, problem)[0], []

        def limited():
            calls.append(1)
            if len(calls) > 8:
                raise torch.OutOfMemoryError("out of memory")
            return run()

        return limited, None


class MissingPeer(bench_arms.Torch):
    name = "a third peer"

    def missing(self):
        raise ImportError("no module named peer")


class HugePeer(bench_arms.TorchUnsorted):
    name = "a fourth peer"

    def bytes(self, operation, shape):
        return 64 * 2**30


def test_a_wrong_arm_of_this_package_is_named_not_timed_and_ends_in_failure(tmp_path, capsys):
    passed, record = run(tmp_path, {"package": WrongGradient}, shapes="70:4:8", arms="package")
    assert not passed
    row = bench_plot.row_of(record["shapes"][0], "backward", bench_plot.OWN)
    assert "relative error of dk 1.0e+00" in row["failed"] and "ms" not in row
    assert "this package FAILS, not timed" in capsys.readouterr().out
    assert bench_plot.row_of(record["shapes"][0], "forward", bench_plot.OWN)["ms"] == 2.0
    assert "wrong" in bench_plot.times(record, "backward")


def test_failing_peers_do_not_end_the_run(tmp_path, capsys):
    arms = {"package": bench_arms.Package, "a": WrongPeer, "b": BrokenPeer, "c": MissingPeer, "d": HugePeer}
    arms["e"] = ExhaustedPeer
    options_ = options(tmp_path, shapes="70:4:8", arms="package")
    options_.arms = list(arms)
    found = bench.Run(options_, FakeClock(), "reference", arms)
    assert found.measure()
    record = json.loads(found.path.read_text())
    shape = record["shapes"][0]
    assert bench_plot.row_of(shape, "top-k", "a peer")["failed"].startswith("Wrong:")
    assert bench_plot.row_of(shape, "scores", "another peer")["failed"] == "RuntimeError: no kernel for this"
    assert record["missing"] == {"a third peer": "ImportError: no module named peer"}
    assert bench_plot.row_of(shape, "top-k", "a fourth peer") == {
        "arm": "a fourth peer",
        "operation": "top-k",
        "skipped": "needs about 64 GiB",
    }
    exhausted = bench_plot.row_of(shape, "top-k", "a fifth peer")
    assert exhausted["failed"] == "OutOfMemoryError: out of memory" and "ms" not in exhausted
    assert bench_plot.row_of(shape, "top-k", bench_plot.OWN)["ms"] == 2.0
    text = bench_plot.report(record)
    for part in ("needs about 64 GiB", "a third peer did not run", "a peer failed: Wrong", "no kernel for this"):
        assert part in text


def test_slow_peers_are_skipped_from_the_length_that_would_take_too_long(tmp_path, capsys):
    options_ = options(tmp_path, "--slowest", "5", shapes="64:4:8,256:4:8", arms="package,torch")
    found = bench.Run(options_, FakeClock(), "reference")
    assert found.measure()
    short, long = found.record["shapes"]
    assert bench_plot.row_of(short, "top-k", "torch")["ms"] == 2.0
    assert bench_plot.row_of(long, "top-k", "torch")["skipped"] == "about 32 ms a run"
    assert bench_plot.row_of(long, "top-k", bench_plot.OWN)["ms"] == 2.0


def test_numbers_are_written_after_every_shape(tmp_path, monkeypatch, capsys):
    found, original = bench.Run(options(tmp_path), FakeClock(), "reference"), bench.Run._shape

    def interrupted(*arguments):
        if found.path:
            raise KeyboardInterrupt
        original(found, *arguments)

    monkeypatch.setattr(found, "_shape", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.measure()
    record = json.loads(found.path.read_text())
    assert not record["finished"] and len(record["shapes"]) == 1
    assert "did not finish" in bench_plot.report(record)


def test_every_kernel_to_build_ahead_is_named_once():
    jobs = bench_build.kernels_to_build(DEFAULT, ["package", "automodel", "torch"])
    assert len(jobs) == len(set(jobs))
    kinds = [job[0] for job in jobs]
    assert kinds.count("score") == 1 and kinds.count("sparse") == 2 and kinds.count("automodel") == 2
    assert kinds.count("top-k") >= 5 and "megatron" not in kinds


# Table and plot


def made_up():
    """A record with two lengths; this package is four times as fast as its peers."""
    shapes = []
    for sequence in (8192, 131072):
        floors = dict.fromkeys(bench_plot.OPERATIONS, sequence / 8192)
        rows = []
        for arm, factor in ((bench_plot.OWN, 1.25), ("NeMo AutoModel", 5.0), ("cuDNN frontend", 2.5), ("torch", 15.0)):
            for operation in bench_plot.OPERATIONS:
                ms = factor * floors[operation] / (20 if operation == "top-k" and arm == bench_plot.OWN else 1)
                row = {"arm": arm, "operation": operation, "ms": ms, "medians_ms": [ms, ms * 1.02], "repeats": 20}
                rows.append(row | {"extra_mib": 300.0 * factor, "errors": {}})
        shape = {"sequence": sequence, "ratio": 4, "topk": 512, "batch": 1, "data": "iid"} | {"heads": 64, "dim": 128}
        shapes.append(shape | {"label": f"S={sequence}", "floors_ms": floors, "arms": rows})
    return {
        "command": "python scripts/bench.py",
        "date": "2026-01-01",
        "revision": "0" * 40,
        "machine": {"device": "A GPU", "driver": "1", "cuda": "13.0"},
        "versions": {"torch": "2.11.0", "nemo-automodel": None},
        "missing": {},
        "ceilings": {"matmul_tflops": 800.0, "copy_tbps": 4.0},
        "shapes": shapes,
        "finished": True,
    }


def test_table_shows_share_of_the_floor_and_ratios():
    text = bench_plot.report(made_up())
    assert "| S=8192 | 1 | 1.25 (80%) | 5 (4.0x) | 2.5 (2.0x) | 15 (12.0x) |" in text
    assert "| S=131072 | 375 / 375 / 375 | 1500 / 1500 / 1500 |" in text
    assert "differ by at most 2.0%" in text and "nemo-automodel" not in text.split("**")[0]


def test_targets_are_judged():
    found = {sentence: met for met, sentence in bench_plot.targets(made_up())}
    assert found["S=8192 forward: 4.00x NeMo AutoModel, target 4.0x"]
    assert found["S=131072 forward: 4.00x NeMo AutoModel, target 3.0x"]
    assert not found["S=8192 backward: 4.00x NeMo AutoModel, target 4.5x"]
    assert found["S=131072 scores: 80% of the matrix rate, target 75%"]
    assert found["S=131072 top-k: 5% of forward, target at most 10%"]
    assert found["S=131072 memory: 375 MiB, target at most 1024"]
    assert not any("8192 scores" in sentence for sentence in found)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_rendering_a_record_needs_no_measurement(tmp_path, suffix, capsys):
    source, plot = tmp_path / "a.json", tmp_path / "docs" / f"bench.{suffix}"
    source.write_text(json.dumps(made_up()))
    assert bench.main(["--render", str(source), "--plot", str(plot)]) == 0
    assert "**Backward**" in capsys.readouterr().out
    content = plot.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        for word in (b"NeMo AutoModel", b"this package", b"floor", b"128k", b"H=64 D=128"):
            assert word in content
        bench.main(["--render", str(source), "--plot", str(plot)])
        assert plot.read_bytes() == content


def test_a_record_without_typical_shapes_still_draws(tmp_path):
    record = made_up() | {"shapes": []}
    bench_plot.draw(record, tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").exists()


def test_help_runs_as_a_script():
    done = subprocess.run([sys.executable, SCRIPTS / "bench.py", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--render" in done.stdout
