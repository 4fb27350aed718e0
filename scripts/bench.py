"""Times the indexer against its peers: `python scripts/bench.py --help`.

Every arm is checked against fp64 before it is timed, and an arm that fails is named, not timed. All arms run in one
process, interleaved, with the L2 cache flushed; a time is the median of two series. Numbers go to
scripts/results/<device>-<date>.json after every shape, the plot to docs/bench.svg.
"""

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import bench_arms
import bench_build
import bench_gate
import bench_plot
import bench_timing
import torch
from bench_problem import DEFAULT, FULL, Problem, Shape

from nemo_v4_indexer.kernels import runtime

ROOT = Path(__file__).resolve().parents[1]
MEMORY_LIMIT = 40 * 2**30  # a peer that needs more is skipped
OWN = bench_arms.Package.name
LONG = 32768  # rows from which 20 repeats are enough, instead of 100
SLOW_MS = 40.0  # a run this long needs fewer warm-ups


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", help="SEQUENCE[:RATIO[:TOPK[:BATCH[:DATA]]]], comma-separated; DATA: iid, ar1 or ties")
    p.add_argument("--full", action="store_true", help="also K=1024, two sequences, ties, and deterministic top-k")
    p.add_argument("--arms", help=f"comma-separated, of {', '.join(bench_build.ARMS)}")
    p.add_argument("--heads", type=int, default=64, help="index heads (default 64)")
    p.add_argument("--dim", type=int, default=128, help="index head dim (default 128)")
    p.add_argument("--budget", type=float, default=200, help="seconds that the whole run should take (default 200)")
    p.add_argument("--slowest", type=float, default=400, help="ms a run; a peer that takes longer is skipped")
    p.add_argument("--build-seconds", type=float, default=120, help="most seconds to build kernels ahead, 0 for none")
    p.add_argument("--workers", type=int, default=14, help="processes that build kernels ahead")
    p.add_argument("--device", help="cuda or cpu (to try the script out); default: cuda where there is one")
    p.add_argument("--results", type=Path, default=ROOT / "scripts" / "results", help="folder for the JSON")
    p.add_argument("--plot", type=Path, default=ROOT / "docs" / "bench.svg", help=".svg or .png")
    p.add_argument("--revision", help="git revision to record; default: asked of git")
    p.add_argument("--render", type=Path, metavar="JSON", help="only print the table and draw the plot of a JSON")
    return p


def parse(arguments=None):
    """Options, with `shapes` a tuple of Shape and `arms` a list of names; bad values exit with a message."""
    p = parser()
    options = p.parse_args(arguments)
    try:
        if options.shapes:
            names = options.shapes.split(",")
            options.shapes = tuple(Shape.parse(text, options.heads, options.dim) for text in names)
        else:
            every = DEFAULT + FULL * options.full
            options.shapes = tuple(Shape(s.sequence, *s.kind[:4], options.heads, options.dim) for s in every)
    except ValueError as error:
        p.error(str(error))
    quick = [name for name in bench_build.ARMS if options.full or name != "cudnn-deterministic"]
    options.arms = options.arms.split(",") if options.arms else quick
    if unknown := [name for name in options.arms if name not in bench_build.ARMS]:
        p.error(f"--arms must be of {', '.join(bench_build.ARMS)}, got {', '.join(unknown)}")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


def say(*words):
    print(f"{time.perf_counter() - BEGIN:7.1f} s ", *words, flush=True)


BEGIN = time.perf_counter()


class Run:
    """One run of the benchmark; `record` is what the JSON holds."""

    def __init__(self, options, clock, backend, arms=None):
        self.options, self.clock, self.backend = options, clock, backend
        self.path, self.small = None, None
        self.limits, self.last = {}, {}
        self.broken = False
        self.record = {
            "command": f"python scripts/bench.py {' '.join(spoken(sys.argv[1:]))}".strip(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "revision": options.revision or bench_timing.revision(ROOT),
            "machine": bench_timing.machine(clock.device),
            "versions": bench_build.versions(),
            "missing": {},
            "shapes": [],
            "finished": False,
        }
        self.arms = {}
        for name in options.arms:
            arm = (arms or bench_build.ARMS)[name]()
            try:
                reason = arm.missing()
            except Exception as error:  # a broken installation may raise anything
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if reason:
                self.record["missing"][arm.name] = reason
                say(f"{arm.name} cannot run: {reason}")
            else:
                self.arms[name] = arm

    def write(self):
        """The JSON as far as it goes."""
        self.options.results.mkdir(parents=True, exist_ok=True)
        name = f"{bench_timing.slug(self.record['machine']['device'])}-{self.record['date']}.json"
        self.path = self.options.results / name
        self.path.write_text(json.dumps(self.record, indent=1) + "\n")

    def measure(self):
        """Everything; True if this package passed its checks."""
        self.record["ceilings"] = self.clock.ceilings()
        self.clock.tidy()
        say("ceilings: {matmul_tflops:.0f} TFLOP/s, copy {copy_tbps:.2f} TB/s".format(**self.record["ceilings"]))
        shapes = self.options.shapes
        for i, shape in enumerate(shapes):
            left = self.options.budget - (time.perf_counter() - BEGIN)
            entry = {**vars(shape), "label": shape.label(), "floors_ms": shape.floors(self.record["ceilings"])}
            entry["arms"] = []
            self.record["shapes"].append(entry)
            try:
                self._shape(shape, entry["arms"], max(1.0, left / (len(shapes) - i)))
            except Exception as error:
                self.broken = True
                entry["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
                say(f"{shape.label()}: {entry['failed']}")
                self.write()
                if not self._alive():
                    say("the device does not answer any more")
                    return False
            self.record["seconds"] = round(time.perf_counter() - BEGIN, 1)
            self.write()
        self.record["finished"] = True
        self.write()
        return not self.broken

    def _alive(self):
        try:
            self.clock.wait()
        except RuntimeError:
            return False
        return True

    def _shape(self, shape, rows, seconds):
        begin = time.perf_counter()
        problem = Problem(shape, self.clock.device, self.backend)
        runs = {}
        for name, arm in self.arms.items():
            for operation in arm.operations:
                row = {"arm": arm.name, "operation": operation}
                rows.append(row)
                try:
                    if reason := self._unfit(name, arm, operation, shape):
                        row["skipped"] = reason
                        continue
                    runs[name, operation] = (*self._admit(name, arm, operation, problem, row), row)
                except Exception as error:  # a peer may fail in any way; it must not end the run
                    self._fail(shape, row, error)
            self.clock.tidy()
        self._series(shape, runs, max(1.0, seconds - (time.perf_counter() - begin)))
        fast = ", ".join(f"{r['operation']} {r['ms']:.3f}" for r in rows if r["arm"] == OWN and "ms" in r)
        say(f"{shape.label()}: {len(runs)} runs timed; {OWN}, ms: {fast}")
        del problem, runs
        gc.collect()
        self.clock.tidy()

    def _fail(self, shape, row, error):
        """Name an arm that is wrong or broken; raises if the device itself does not go on."""
        row.pop("probe_ms", None)
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self.broken |= row["arm"] == OWN
        say(f"{shape.label()} {row['operation']}: {row['arm']} FAILS, not timed: {row['failed']}")
        self.clock.wait()

    def _unfit(self, name, arm, operation, shape):
        """Why an arm is not even tried at a shape, or None."""
        if (needed := arm.bytes(operation, shape)) > MEMORY_LIMIT:
            return f"needs about {needed / 2**30:.0f} GiB"
        expected = self._expected(name, operation, shape)
        return f"about {expected:.0f} ms a run" if expected > self.options.slowest and arm.name != OWN else None

    def _admit(self, name, arm, operation, problem, row):
        """(run, setup) of an arm that passed its checks, warm; raises whatever stops it."""
        shape, own = problem.shape, isinstance(arm, bench_arms.Package)
        errors = self._check_small(name, arm, operation, shape, own) if "backward" in operation else {}
        run, setup = arm.build(operation, problem)
        _prepare(setup)
        result, _ = self.clock.peak(run)
        errors |= bench_gate.check(problem, operation, result, self.limits.get(shape.kind), exact=own)
        del result
        _prepare(setup)
        _, peak = self.clock.peak(run)
        probes = []
        for _ in range(3):
            _prepare(setup)
            mark = self.clock.start(run)
            self.clock.wait()
            probes.append(self.clock.read(mark))
            if probes[-1] > SLOW_MS:
                break
        row |= {"extra_mib": None if peak is None else round(peak / 2**20, 1), "errors": errors, "probe_ms": probes[-1]}
        self.last[name, operation, shape.kind] = shape.sequence, probes[-1]
        return run, setup

    def _expected(self, name, operation, shape):
        """ms that the last shape of this kind suggests; 0 without one."""
        length, ms = self.last.get((name, operation, shape.kind), (shape.sequence, 0.0))
        return ms * (shape.sequence / length) ** (1 if operation == "backward" else 2)

    def _check_small(self, name, arm, operation, shape, own):
        """Whole gradients of a short problem of this kind against fp64, once per arm."""
        small = self._small(shape)
        if (name, operation, shape.kind) in self.last:
            return {}
        run, setup = arm.build(operation, small)
        _prepare(setup)
        errors = bench_gate.check(small, operation, run(), self.limits[shape.kind], exact=own, whole=True)
        return {f"{part}, whole": error for part, error in errors.items()}

    def _small(self, shape):
        """The short problem of a shape's kind, silenced near ties; its limits are measured with it."""
        if self.small is None or self.small.shape.kind != shape.kind:
            self.small = Problem(shape.small(), self.clock.device, self.backend, seed=1)
            self.small.silence_ties()
        if shape.kind not in self.limits:
            self.limits[shape.kind] = bench_gate.gradient_limits(self.small)
        return self.small

    def _series(self, shape, runs, seconds):
        overhead = 0.5 if self.clock.device != "cpu" else 0.0  # flush and set-up
        costs = {key: row["probe_ms"] + overhead for key, (*_, row) in runs.items()}
        repeats = bench_timing.repeats_within(seconds / 2, costs, 20 if shape.sequence >= LONG else 100)
        medians = {key: [] for key in runs}
        for _ in range(2):
            marks = {key: [] for key in runs}
            for key in bench_timing.interleaved(repeats):
                run, setup, row = runs[key]
                if "failed" in row:
                    continue
                try:
                    _prepare(setup)
                    marks[key].append(self.clock.start(run))
                except RuntimeError as error:  # out of memory beside the others
                    self._fail(shape, row, error)
            self.clock.wait()
            for key, found in marks.items():
                if "failed" not in runs[key][-1]:
                    medians[key].append(statistics.median(map(self.clock.read, found)))
        for key, (_, _, row) in runs.items():
            if "failed" in row:
                continue
            del row["probe_ms"]
            row |= {"ms": statistics.mean(medians[key]), "medians_ms": medians[key], "repeats": repeats[key]}


def _prepare(setup):
    if setup is not None:
        setup()


def spoken(arguments):
    """The arguments without those that only say where files go or come from."""
    unspoken, kept, skip = ("--results", "--plot", "--revision"), [], False
    for argument in arguments:
        if not skip and argument.split("=")[0] not in unspoken:
            kept.append(argument)
        skip = argument in unspoken
    return kept


def render(record, path):
    """Print the tables and draw the plot."""
    print(bench_plot.report(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    bench_plot.draw(record, path)


def main(arguments=None):
    options = parse(arguments)
    if options.render:
        render(json.loads(options.render.read_text()), options.plot)
        return 0
    cuda = torch.device(options.device).type == "cuda"
    if cuda and (reason := runtime.support(options.device, torch.bfloat16, options.heads, options.dim, 512)):
        print(f"{OWN} cannot run: {reason}", file=sys.stderr)
        return 1
    clock = bench_timing.CudaClock(options.device) if cuda else bench_timing.WallClock()
    run = Run(options, clock, "tilelang" if cuda else "reference")
    if cuda and options.build_seconds:
        bench_build.build_all(run.arms, options, clock.device, say)
    passed = run.measure()
    render(run.record, options.plot)
    print(f"numbers: {run.path}, plot: {options.plot}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
