"""The benchmark's arms of this package and of torch, and what all arms are.

Every arm names its `operations`; `missing()` says why it cannot run, `bytes(operation, shape)` roughly what it needs
beyond the inputs, and `build(operation, problem)` gives (run, setup). run() does the work and returns a dict of the
results as `bench_gate` reads them; setup(), if any, comes before every run and is not timed, and neither are
conversions to an arm's own layout. Letters as in `bench_problem`.
"""

import functools

import torch
from bench_problem import OPERATIONS, launch_scores

from nemo_v4_indexer import reference
from nemo_v4_indexer.kernels import forward, tiling
from nemo_v4_indexer.ops import dispatch
from nemo_v4_indexer.ops.indexer import v4_lighting_indexer

GIB = 2**30


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


def score_bytes(shape):
    """One fp32 score for every query and key of the batch."""
    return 4 * shape.batch * shape.sequence * shape.groups


class Package:
    """This package, one call per operation; scores and top-k through the kernels' own launch functions."""

    name, distribution = "this package", "nemo-v4-indexer"
    operations = OPERATIONS

    def missing(self):
        """Why it cannot run, or None."""

    def bytes(self, operation, shape):
        """Rough peak of device memory beyond the inputs."""
        return score_bytes(shape) if operation == "top-k" else 0

    def build(self, operation, problem):
        shape = problem.shape
        if operation == "scores":
            return self._scores(problem), None
        if operation == "top-k":
            return self._topk(problem), None
        if operation == "forward":
            inputs = problem.q, problem.k, problem.w, shape.ratio, shape.topk

            def run():
                values, indices = v4_lighting_indexer(*inputs, backend=problem.backend)
                return {"values": values, "indices": indices}

            return run, None
        if operation == "backward":
            inputs = problem.q, problem.k, problem.w, problem.indices, problem.grad
            place = True, False, False, problem.backend, tiling.WORKSPACE_BYTES

            def run():
                return dict(zip(("dq", "dk", "dw"), dispatch.backward(*inputs, *place), strict=True))

            return run, None
        select = functools.partial(v4_lighting_indexer, backend=problem.backend)
        return through_autograd(problem, select, problem.grad), None

    def _scores(self, problem):
        s, b, h, _ = problem.q.shape
        g = problem.shape.groups
        if problem.backend != "tilelang":
            return lambda: {"scores": reference.scores(problem.q, problem.k, problem.w)}
        processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
        chunks = tiling.plan_chunks(s, b, g, h, tiling.WORKSPACE_BYTES, processors)

        def run():
            workspace = torch.empty(chunks.workspace, dtype=torch.float32, device=problem.device)
            for first, last in chunks.ranges:
                launch_scores(problem, workspace, first, last - first)
            rows = last - first
            return {"scores": workspace[: b * rows * chunks.stride].view(b, rows, -1)[..., :g], "first": first}

        return run

    def _topk(self, problem):
        (s, b, *_), g, k = problem.q.shape, problem.shape.groups, problem.shape.topk
        if problem.backend != "tilelang":
            limits = problem.start, problem.end
            return lambda: dict(zip(("values", "indices"), reference.select(problem.logits, *limits, k), strict=True))
        kernel = forward.topk_kernel(k, tiling.topk_plan(k, g))
        scores, stride = problem.padded_logits.view(-1), problem.padded_logits.shape[-1]
        start, end = problem.start.view(-1), problem.end.view(-1)

        def run():
            values = torch.empty(b, s, k, dtype=torch.float32, device=problem.device)
            indices = torch.empty(b, s, k, dtype=torch.int32, device=problem.device)
            kernel(scores, start, end, indices.view(-1), values.view(-1), b, s, s, g, stride, 0)
            return {"values": values, "indices": indices}

        return run


def through_autograd(problem, select, grad):
    """Forward and backward of a differentiable select(q, k, w, ratio, topk)."""
    q, k, w = leaves(problem.q, problem.k, problem.w)

    def run():
        values, indices = select(q, k, w, problem.shape.ratio, problem.shape.topk)
        upstream = grad[..., : values.shape[-1]]
        dq, dk, dw = torch.autograd.grad(values, (q, k, w), upstream)
        result = {"values": values.detach(), "indices": indices, "dq": dq, "dk": dk, "dw": dw}
        return result | {"grad": upstream}

    return run


class Torch:
    """torch.topk, and scores written in plain bf16 torch, in chunks of rows."""

    name, distribution, sorted = "torch", "torch", True
    operations = "top-k", "scores"

    def missing(self):
        """Why it cannot run, or None."""

    def bytes(self, operation, shape):
        return score_bytes(shape) + GIB * (operation == "scores")

    def build(self, operation, problem):
        if operation == "top-k":
            logits, width = problem.logits, min(problem.shape.topk, problem.shape.groups)

            def run():
                values, indices = torch.topk(logits, width, dim=-1, sorted=self.sorted)
                return {"values": values, "indices": indices}

            return run, None
        return self._scores(problem), None

    def _scores(self, problem):
        q, k, w, g = problem.q, problem.k, problem.w.bfloat16(), problem.shape.groups
        rows = max(1, GIB // (2 * problem.shape.batch * problem.shape.heads * g))

        def run():
            out = torch.empty(q.shape[1], q.shape[0], g, dtype=torch.bfloat16, device=q.device)
            for lo in range(0, len(q), rows):
                at = slice(lo, lo + rows)
                products = torch.einsum("sbhd,gbd->bshg", q[at], k).relu_()
                out[:, at] = torch.einsum("bshg,sbh->bsg", products, w[at])
            return {"scores": out, "bf16": True}

        return run


class TorchUnsorted(Torch):
    """torch.topk without the sort."""

    name, sorted = "torch, unsorted", False
    operations = ("top-k",)
