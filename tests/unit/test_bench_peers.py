"""The benchmark's arms of other packages, without a GPU: calls, layouts and results, with stand-ins for the kernels.

A stand-in has the signature, layout, dtypes and slot order of the entry point that it replaces, and takes nothing else.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_v4_indexer import reference, visibility

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.skipif(not (SCRIPTS / "bench.py").exists(), reason="not a checkout of the project")
sys.path.insert(0, str(SCRIPTS))

if (SCRIPTS / "bench.py").exists():
    import bench_gate
    import bench_peers
    from bench_problem import Problem, Shape

H, D = 8, 32


def logits_of(q, k, w, start, end):
    """[S, G] of one sample, -inf outside the limits, which are [S]."""
    scores = reference.scores(q[:, None], k[:, None], w[:, None])[0]
    return scores.masked_fill(~visibility.visible(start, end, len(k)), float("-inf"))


def sorted_topk(logits, topk):
    values, indices = torch.topk(logits, min(topk, logits.shape[-1]), dim=-1)
    return values, indices.int().masked_fill(values == float("-inf"), -1)


def causal(s, g, ratio):
    return visibility.causal_limits(s, ratio, g)


class Select(torch.autograd.Function):
    """Scores at a given selection of q [S, B, H, D], k [G, B, D], w [S, B, H]."""

    @staticmethod
    def forward(ctx, q, k, w, values, indices):
        ctx.save_for_backward(q, k, w, indices)
        ctx.mark_non_differentiable(indices)
        return values.clone(), indices.clone()

    @staticmethod
    def backward(ctx, grad, _):
        return *reference.backward(*ctx.saved_tensors, grad), None, None


def automodel(name):
    def fwd(q, k, w, ks, ke):
        assert q.dtype == k.dtype == torch.bfloat16 and w.dtype == torch.float32 and ks.shape == ke.shape == q.shape[:1]
        return torch.stack([logits_of(q[:, b], k[:, b], w[:, b], ks, ke) for b in range(q.shape[1])])

    def bwd(q, w, k, indices, grad):
        assert indices.dtype == torch.int32 and grad.dtype == torch.float32
        dq, dk, dw = reference.backward(q, k.float(), w, indices, grad)
        return dq, dw, dk

    def indexer(q, k, w, ratio, topk):
        selected = sorted_topk(fwd(q, k, w, *causal(len(q), len(k), ratio)), topk)
        return Select.apply(q, k, w, *selected)

    if name == "tilelang":
        return None
    known = {"tilelang_indexer_fwd": {"batched_indexer_fwd": fwd}, "tilelang_indexer_bwd": {"batched_indexer_bwd": bwd}}
    known["tilelang_indexer_fwd"]["_make_causal_cu_seqlens"] = lambda s, g, ratio, device: causal(s, g, ratio)
    known["tilelang_indexer"] = {"v4_lighting_indexer": indexer}
    return SimpleNamespace(**known[name.rsplit(".", 1)[1]])


def megatron(name):
    def fwd(q, k, w, ks, ke):
        assert q.is_contiguous() and k.is_contiguous() and q.shape[1:] == (H, D) and k.shape[1:] == (D,)
        return logits_of(q, k, w, ks, ke)

    def bwd(q, w, k, indices, grad):
        inputs = q[:, None], k[:, None], w[:, None], indices[None], grad[None]
        dq, dk, dw = (x[:, 0] for x in reference.backward(*inputs))
        return dq, dw, dk

    def indexer(q, k, w, ks, ke, topk):
        values, indices = (x.flip(-1)[None] for x in sorted_topk(fwd(q, k, w, ks, ke), topk))
        return tuple(x[0] for x in Select.apply(q[:, None], k[:, None], w[:, None], values, indices))

    known = {"indexer": {"lighting_indexer": indexer, "HAVE_TILELANG_INDEXER": True}}
    known |= {"tilelang_indexer_fwd": {"indexer_fwd_interface": fwd}}
    known |= {"tilelang_indexer_bwd": {"indexer_bwd_interface": bwd}}
    return SimpleNamespace(**known[name.rsplit(".", 1)[1]])


class TopK:
    def __init__(self, values, lengths, topk, deterministic):
        self.shape, self.lengths, self.topk = values.shape, lengths.shape, topk

    def check_support(self):
        return True

    def compile(self):
        self.ready = True

    def scratch_workspace_bytes(self):
        return 8 * self.shape.numel()

    def execute(self, values, lengths, *, out_indices, out_values, workspace):
        assert self.ready and values.shape == self.shape and lengths.shape == self.lengths
        assert values.is_contiguous() and workspace.numel() >= self.scratch_workspace_bytes()
        seen = visibility.visible(torch.zeros_like(lengths), lengths, values.shape[-1])
        found, indices = sorted_topk(values.masked_fill(~seen, float("-inf")), self.topk)
        out_values.fill_(float("-inf"))[:, : found.shape[1]] = found
        out_indices.fill_(-1)[:, : found.shape[1]] = indices


def cudnn(name):
    def scores(q, k, w, ratio):
        assert q.is_contiguous() and k.is_contiguous() and w.is_contiguous() and k.shape[2:] == (1, D)
        limits = causal(q.shape[1], k.shape[1], ratio)
        return {"scores": torch.stack([logits_of(q[b], k[b, :, 0], w[b], *limits) for b in range(len(q))])}

    def bwd(q, w, k, target, predicted, indices, loss, loss_coeff):
        assert w.dtype == torch.bfloat16 and k.ndim == 3 and indices.shape == target.shape == predicted.shape
        torch.testing.assert_close(target.sum(-1)[indices[..., 0] >= 0].sum(), (indices[..., 0] >= 0).sum().float())
        signal = -target * loss_coeff / (len(q) * q.shape[1])
        target.copy_(signal - predicted * signal.sum(-1, keepdim=True))
        grads = reference.backward(*(x.transpose(0, 1) for x in (q, k, w.float())), indices, target)
        dq, dk, dw = (x.transpose(0, 1) for x in grads)
        return {"d_index_q": dq, "d_weights": dw.bfloat16(), "d_index_k": dk}

    return SimpleNamespace(indexer_forward_wrapper=scores, IndexerTopK=TopK, indexer_backward_wrapper=bwd)


STANDINS = {"AutoModel": automodel, "Megatron": megatron, "Cudnn": cudnn, "CudnnDeterministic": cudnn}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", STANDINS)
def test_results_pass_the_checks_whatever_the_layout(name, batch, monkeypatch):
    monkeypatch.setattr(bench_peers, "import_module", STANDINS[name])
    monkeypatch.setattr(bench_peers.Cudnn, "rows", 64)
    arm = getattr(bench_peers, name)()
    assert arm.missing() is None
    problem = Problem(Shape(650, 4, 128, batch, "iid", H, D), "cpu", "reference")
    for operation in arm.operations:
        run, setup = arm.build(operation, problem)
        for _ in range(2):  # a run must not spoil the next one
            if setup:
                setup()
            result = run()
            errors = bench_gate.check(problem, operation, result, [1e-2] * 3, exact=False, whole=True)
            bench_gate.check(problem, operation, result, [1e-2] * 3, exact=False)
        assert all(error < 5e-3 for error in errors.values())


@pytest.mark.parametrize("name", STANDINS)
def test_fewer_keys_than_slots(name, monkeypatch):
    monkeypatch.setattr(bench_peers, "import_module", STANDINS[name])
    arm = getattr(bench_peers, name)()
    arm.missing()
    problem = Problem(Shape(300, 4, 128, 1, "iid", H, D), "cpu", "reference")
    for operation in arm.operations:
        run, setup = arm.build(operation, problem)
        if setup:
            setup()
        bench_gate.check(problem, operation, run(), [1e-2] * 3, exact=False, whole=True)


def test_needs_in_memory_grow_with_the_score_matrix():
    long = Shape(131072)
    matrix = 131072 * 32768 * 4
    assert bench_peers.AutoModel().bytes("forward", long) == 2 * matrix
    assert bench_peers.Megatron().bytes("forward", Shape(131072, batch=2)) == matrix
    assert matrix < bench_peers.Cudnn().bytes("forward", long) < 1.5 * matrix
    assert bench_peers.AutoModel().bytes("backward", long) == 0


def test_cudnn_refuses_what_its_backward_does_not_take(monkeypatch):
    monkeypatch.setattr(bench_peers, "import_module", cudnn)
    arm = bench_peers.Cudnn()
    arm.missing()
    with pytest.raises(NotImplementedError, match="multiples of 128, got 8"):
        arm.build("backward", Problem(Shape(70, 4, 8, 1, "iid", H, D), "cpu", "reference"))


def test_cudnn_compiles_every_shape_ahead(monkeypatch):
    made = []
    monkeypatch.setattr(bench_peers, "import_module", cudnn)
    arm = bench_peers.Cudnn()
    arm.missing()
    monkeypatch.setattr(arm, "plan", lambda rows, groups, topk, device: made.append((groups, topk)))
    arm.prepare([Shape(s, r, 128, heads=H, dim=D) for s, r in ((256, 4), (255, 4), (128, 1))], "cpu")
    assert made == [(64, 128), (128, 128)]
