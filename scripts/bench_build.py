"""Which arms there are, their versions, and building their kernels ahead, many at a time."""

import concurrent.futures
import multiprocessing
from importlib import metadata

import torch
from bench_arms import Package, Torch, TorchUnsorted
from bench_peers import AutoModel, Cudnn, CudnnDeterministic, Megatron
from bench_problem import Problem, Shape

from nemo_v4_indexer import __version__
from nemo_v4_indexer.kernels import backward, forward, tiling

ARMS = {
    "package": Package,
    "automodel": AutoModel,
    "megatron": Megatron,
    "cudnn": Cudnn,
    "cudnn-deterministic": CudnnDeterministic,
    "torch": Torch,
    "torch-unsorted": TorchUnsorted,
}


def versions():
    """Versions of the arms' distributions and of TileLang; None where one is not installed as a distribution."""
    found = {}
    for name in dict.fromkeys(["tilelang", *(arm.distribution for arm in ARMS.values())]):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found | {Package.distribution: __version__, "torch": torch.__version__}


def kernels_to_build(shapes, arms):
    """What other processes can build ahead, as arguments of `build_ahead`; each lands in TileLang's disk cache."""
    jobs = {}
    for shape in shapes:
        heads, dim, topk, slots = shape.heads, shape.dim, shape.topk, backward.slot_capacity(shape.topk)
        if "package" in arms:
            jobs |= dict.fromkeys(
                [
                    ("sparse", slots, heads, dim, False),
                    ("query_side", slots, heads, dim),
                    ("key_side", heads, dim, False),
                    ("score", heads, dim),
                    ("top-k", topk, tiling.topk_plan(topk, shape.groups)),
                    ("plan",),
                    ("reduce", dim),
                ]
            )
        jobs |= dict.fromkeys((arm, topk, heads, dim) for arm in ("automodel", "megatron") if arm in arms)
    return list(jobs)


def build_ahead(job):
    """Build one job's kernels in a process of its own; the reason if it failed."""
    kind, *rest = job
    try:
        if kind == "score":
            forward.score_kernel(*rest)
        elif kind == "top-k":
            forward.topk_kernel(*rest)
        elif kind in ARMS:
            topk, heads, dim = rest
            problem = Problem(Shape(4 * topk + 64, 4, topk, heads=heads, dim=dim), "cuda", "reference")
            arm = ARMS[kind]()
            arm.missing()
            for operation in ("forward", "backward"):
                run, _ = arm.build(operation, problem)
                run()
            torch.cuda.synchronize()
        else:
            backward.kernel(*job)
    except Exception as error:  # whatever it is comes again, and is shown, when the arm itself runs
        return f"{kind}: {type(error).__name__}: {error}"
    return None


def build_all(arms, options, device, say):
    """Fill TileLang's disk cache from many processes; meanwhile compile here what an arm can only compile here.

    arms: {name: arm}. options: shapes, workers and build_seconds, the most seconds to wait. say: takes words.
    """
    jobs = kernels_to_build(options.shapes, arms)
    workers = max(1, min(options.workers, len(jobs)))
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    pending = [pool.submit(build_ahead, job) for job in jobs]
    for arm in [arm for arm in arms.values() if hasattr(arm, "prepare")]:
        try:
            arm.prepare(options.shapes, device)
        except Exception as error:  # comes again, and is shown, when the arm runs
            say(f"{arm.name}: {type(error).__name__}: {error}".splitlines()[0])
    done, late = concurrent.futures.wait(pending, timeout=options.build_seconds)
    for future in done:
        if reason := future.exception() or future.result():
            say("building ahead:", reason)
    pool.shutdown(wait=not late, cancel_futures=True)
    say(f"{len(done)} of {len(jobs)} kernels built ahead")
