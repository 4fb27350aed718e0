"""The benchmark's arms of other packages, run as they ship; see `bench_arms`. Letters as in `bench_problem`."""

from importlib import import_module

import torch
from bench_arms import leaves, score_bytes, through_autograd
from bench_problem import OPERATIONS, Problem, Shape


class AutoModel:
    """NeMo AutoModel's DeepSeek-V4 indexer (TileLang)."""

    name, distribution = "NeMo AutoModel", "nemo-automodel"
    operations = "forward", "scores", "backward", "forward+backward"
    folder = "nemo_automodel.components.models.deepseek_v4.kernels"

    def missing(self):
        parts = [import_module(f"{self.folder}.tilelang_indexer{part}") for part in ("", "_fwd", "_bwd")]
        self._indexer, self._fwd, self._bwd = parts
        import_module("tilelang")

    def bytes(self, operation, shape):
        one = score_bytes(shape) * (1 + 1 / shape.batch)  # one more copy of a sample's scores while it is written
        return 0 if operation == "backward" else one

    def build(self, operation, problem):
        q, k, w, shape = problem.q, problem.k, problem.w, problem.shape
        if operation == "scores":
            limits = self._fwd._make_causal_cu_seqlens(shape.sequence, shape.groups, shape.ratio, q.device)
            return lambda: {"scores": self._fwd.batched_indexer_fwd(q, k, w, *limits)}, None
        if operation == "forward":

            def run():
                with torch.no_grad():
                    values, indices = self._indexer.v4_lighting_indexer(q, k, w, shape.ratio, shape.topk)
                return {"values": values, "indices": indices}

            return run, None
        if operation == "backward":
            indices, grad = problem.indices, problem.grad

            def run():
                dq, dw, dk = self._bwd.batched_indexer_bwd(q, w, k, indices, grad)
                return {"dq": dq, "dk": dk, "dw": dw}

            return run, None
        return through_autograd(problem, self._indexer.v4_lighting_indexer, problem.grad), None


class Megatron:
    """megatron-core's DSA indexer (TileLang), one call per sample, with this problem's row limits."""

    name, distribution = "megatron-core", "megatron-core"
    operations = "forward", "scores", "backward", "forward+backward"
    folder = "megatron.core.transformer.experimental_attention_variant.ops"

    def missing(self):
        self._indexer, self._fwd, self._bwd = (
            import_module(f"{self.folder}.{part}")
            for part in ("indexer", "tilelang_indexer_fwd", "tilelang_indexer_bwd")
        )
        return None if self._indexer.HAVE_TILELANG_INDEXER else "it does not find TileLang"

    def bytes(self, operation, shape):
        return 0 if operation == "backward" else score_bytes(shape) / (shape.batch if operation != "scores" else 1)

    def build(self, operation, problem):
        shape, batch = problem.shape, range(problem.shape.batch)
        samples = [tuple(x[:, b].contiguous() for x in (problem.q, problem.k, problem.w)) for b in batch]
        limits = [(problem.start[b], problem.end[b]) for b in batch]
        if operation == "scores":

            def run():
                parts = [self._fwd.indexer_fwd_interface(*samples[b], *limits[b]) for b in batch]
                return {"scores": parts[0][None] if len(parts) == 1 else torch.stack(parts)}

            return run, None
        if operation == "forward":

            def run():
                with torch.no_grad():
                    parts = [self._indexer.lighting_indexer(*samples[b], *limits[b], shape.topk) for b in batch]
                return dict(zip(("values", "indices"), _stacked(parts, 0), strict=True))

            return run, None
        if operation == "backward":
            indices, grad = problem.indices, problem.grad

            def run():
                parts = [
                    self._bwd.indexer_bwd_interface(q, w, k, indices[b], grad[b]) for b, (q, k, w) in enumerate(samples)
                ]
                return dict(zip(("dq", "dw", "dk"), _stacked(parts, 1), strict=True))

            return run, None
        inputs, grad = [leaves(*sample) for sample in samples], problem.grad

        def both():
            parts, grads = [], []
            for b in batch:
                values, indices = self._indexer.lighting_indexer(*inputs[b], *limits[b], shape.topk)
                upstream = grad[b, :, : values.shape[-1]]
                grads.append(torch.autograd.grad(values, inputs[b], upstream))
                parts.append((values.detach(), indices))
            result = dict(zip(("values", "indices"), _stacked(parts, 0), strict=True))
            result |= dict(zip(("dq", "dk", "dw"), _stacked(grads, 1), strict=True))
            return result | {"grad": grad[..., : result["values"].shape[-1]]}

        return both, None


def _stacked(parts, dim):
    """Tensors of all samples with the batch as dimension dim; views where there is one sample."""
    return [x[0].unsqueeze(dim) if len(x) == 1 else torch.stack(x, dim) for x in zip(*parts, strict=True)]


class Cudnn:
    """cuDNN frontend's Hopper kernels: whole fp32 score matrices, bf16 weights in backward.

    Its backward also computes the gradient of a KL loss from the probabilities it is given; the check uses that
    gradient. Top-k runs 16384 rows at a time, because its scratch is twice the scores.
    """

    name, distribution, deterministic = "cuDNN frontend", "nvidia-cudnn-frontend", False
    operations = OPERATIONS
    rows = 16384

    def missing(self):
        dsa = import_module("cudnn.deepseek_sparse_attention")
        self._scores, self._topk, self._backward = (
            getattr(dsa, name) for name in ("indexer_forward_wrapper", "IndexerTopK", "indexer_backward_wrapper")
        )

    def bytes(self, operation, shape):
        scratch = 2 * 4 * min(self.rows, shape.sequence * shape.batch) * shape.groups
        return 0 if operation == "backward" else score_bytes(shape) + scratch * (operation != "scores")

    def build(self, operation, problem):
        q, k = (x.transpose(0, 1).contiguous() for x in (problem.q, problem.k))
        w = problem.w.transpose(0, 1).contiguous()
        ratio = problem.shape.ratio

        def scores():
            return self._scores(q, k[:, :, None], w, ratio=ratio)["scores"]

        if operation == "scores":
            return lambda: {"scores": scores()}, None
        topk = self._chunks(problem) if operation != "backward" else None
        if operation == "top-k":
            logits = problem.logits
            return lambda: topk(logits), None
        if operation == "forward":
            return lambda: topk(scores()), None
        if problem.shape.topk % 128:
            raise NotImplementedError(f"its backward needs K in multiples of 128, got {problem.shape.topk}")
        half = w.bfloat16()
        empty = problem.indices < 0
        target, predicted = (
            torch.softmax(problem.grad.masked_fill(empty, float("-inf")) * sign, -1).nan_to_num_() for sign in (1, -1)
        )
        signal = torch.empty_like(target)
        loss = torch.ones(1, device=problem.device)
        scale = float(problem.shape.topk * problem.shape.sequence * problem.shape.batch)

        def gradients(indices):
            out = self._backward(q, half, k, signal, predicted, indices, loss, loss_coeff=scale)
            found = {name: out[f"d_index_{name[1]}"].transpose(0, 1) for name in ("dq", "dk")}
            found |= {"dw": out["d_weights"].transpose(0, 1), "grad": signal}
            return found | {"weights": half.transpose(0, 1), "indices": indices}

        def setup():
            signal.copy_(target)

        if operation == "backward":
            return lambda: gradients(problem.indices), setup

        def both():
            chosen = topk(scores())
            return chosen | gradients(chosen["indices"])

        return both, setup

    def prepare(self, shapes, device):
        """Compile in this process what the shapes need: its compiler keeps nothing on disk."""
        size = {"heads": shapes[0].heads, "dim": shapes[0].dim}
        for ratio in dict.fromkeys(shape.ratio for shape in shapes):
            self._run_small("scores", Shape(256 * ratio, ratio, **size), device)
        for topk in dict.fromkeys(shape.topk for shape in shapes if shape.topk % 128 == 0):
            self._run_small("backward", Shape(4 * topk + 64, 4, topk, **size), device)
        for groups, topk in dict.fromkeys((1 << (shape.groups - 1).bit_length(), shape.topk) for shape in shapes):
            self.plan(256, groups, topk, device)

    def _run_small(self, operation, shape, device):
        run, setup = self.build(operation, Problem(shape, device, "reference"))
        if setup:
            setup()
        run()

    def _chunks(self, problem):
        s, b, g, k = problem.shape.sequence, problem.shape.batch, problem.shape.groups, problem.shape.topk
        lengths = problem.end.view(-1)
        sizes = {min(self.rows, b * s - lo) for lo in range(0, b * s, self.rows)}
        plans = {rows: self.plan(rows, g, k, problem.device) for rows in sizes}

        def run(logits):
            flat = logits.view(b * s, g)
            values = torch.empty(b * s, k, dtype=torch.float32, device=flat.device)
            indices = torch.empty(b * s, k, dtype=torch.int32, device=flat.device)
            scratch = max(plan.scratch_workspace_bytes() for plan in plans.values())
            scratch = torch.empty(scratch, dtype=torch.uint8, device=flat.device)
            for lo in range(0, b * s, self.rows):
                at = slice(lo, min(lo + self.rows, b * s))
                out = {"out_indices": indices[at], "out_values": values[at], "workspace": scratch}
                plans[at.stop - at.start].execute(flat[at], lengths[at], **out)
            return {"values": values.view(b, s, k), "indices": indices.view(b, s, k)}

        return run

    def plan(self, rows, groups, topk, device):
        samples = torch.empty(rows, groups, device=device), torch.empty(rows, dtype=torch.int32, device=device)
        plan = self._topk(*samples, topk, deterministic=self.deterministic)
        plan.check_support()
        plan.compile()
        return plan


class CudnnDeterministic(Cudnn):
    """Its deterministic top-k."""

    name, deterministic = "cuDNN frontend, deterministic", True
    operations = "top-k", "forward"
