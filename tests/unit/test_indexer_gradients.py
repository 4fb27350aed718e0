"""Gradients of the operation against fp64 formulas and finite differences, and what backward keeps in memory."""

import math

import naive
import pytest
import torch
from largest import Largest

from nemo_v4_indexer import reference
from nemo_v4_indexer.ops.indexer import V4IndexerFunction, v4_lighting_indexer

NAN, INF = math.nan, math.inf


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def upstream(indices, seed=0):
    """Signed gradient of the scores; NaN and inf in empty slots, where nothing may look."""
    grad = torch.randn(indices.shape, generator=torch.Generator().manual_seed(seed))
    bad = torch.tensor([NAN, INF, -INF])[torch.arange(indices.numel()).view(indices.shape) % 3]
    return torch.where(indices < 0, bad, grad), grad


@pytest.fixture(params=["selected", "replayed"])
def given(request):
    """Indices to replay, unsorted and partly invalid, or None to select."""
    if request.param == "selected":
        return None
    return torch.randint(-2, 12, (3, 37, 4), generator=torch.Generator().manual_seed(3))


TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_match_fp64_formulas(dtype, given):
    """B = 3, rows that see nothing, empty slots with NaN upstream, fp32 weights beside bf16 q and k."""
    q, k, w = leaves(*naive.random_inputs(37, 3, 4, 8, 9, 0, dtype))
    scores, indices = V4IndexerFunction.apply(q, k, w, 4, 4, given)
    assert (indices < 0).all(-1).any() and (indices >= 0).all(-1).any() and not indices.requires_grad
    grad, clean = upstream(indices)
    scores.backward(grad.to(scores.dtype))
    expected = naive.gradients(*(t.detach() for t in (q, k, w)), indices, clean)
    for leaf, oracle in zip((q, k, w), expected, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        naive.assert_close(leaf.grad, oracle, TOLERANCE[leaf.dtype])
        with pytest.raises(AssertionError, match="relative error"):
            naive.assert_close(torch.zeros_like(leaf.grad), oracle, TOLERANCE[leaf.dtype])
    assert not q.grad[:3].any() and not w.grad[:3].any()


def test_gradients_match_autograd_of_the_whole_formula(given):
    q, k, w = leaves(*naive.random_inputs(37, 3, 4, 8, 9, 1, torch.float64))
    scores, indices = v4_lighting_indexer(q, k, w, 4, 4, given)
    valid = indices >= 0
    _, clean = upstream(indices, 4)
    got = torch.autograd.grad(scores[valid], (q, k, w), clean[valid].double())
    whole = naive.at(naive.scores(q, k, w), indices, naive.limits(37, 4, 9, 3))
    expected = torch.autograd.grad(whole[valid], (q, k, w), clean[valid].double())
    for actual, oracle in zip(got, expected, strict=True):
        naive.assert_close(actual, oracle, 1e-13)


def test_gradcheck_by_finite_differences(given):
    inputs = leaves(*naive.random_inputs(10, 3, 2, 3, 2, 2, torch.float64))
    given = None if given is None else given[:, :10] // 3

    def run(q, k, w):
        scores, indices = v4_lighting_indexer(q, k, w, 4, 3, given)
        return scores.masked_fill(indices < 0, 0)

    assert torch.autograd.gradcheck(run, inputs)


def test_gradcheck_with_row_limits():
    inputs = leaves(*naive.random_inputs(6, 2, 2, 3, 5, 5, torch.float64))
    limits = {"cu_seqlen_ks": torch.tensor([0, 2, 1, 4, 0, 3]), "cu_seqlen_ke": torch.tensor([5, 4, 1, 5, 2, 5])}

    def run(q, k, w):
        scores, indices = v4_lighting_indexer(q, k, w, 4, 2, **limits)
        return scores.masked_fill(indices < 0, 0)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_one_gradient_per_forward_argument(extra):
    """apply() takes the six arguments of the public interface, or up to two more; backward answers each."""
    arguments = [*leaves(*naive.random_inputs(9, 1, 2, 4, 2, 0)), 4, 2, None, None, None][: 6 + extra]
    scores, indices = V4IndexerFunction.apply(*arguments)
    gradients = scores.grad_fn.apply(torch.ones_like(scores), torch.zeros_like(indices))
    assert len(gradients) == 6 + extra
    assert [g is None for g in gradients] == [False] * 3 + [True] * (3 + extra)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_inputs_without_gradient_get_none_and_change_no_other(wanted):
    tensors = naive.random_inputs(17, 2, 4, 8, 4, 0)
    everything = leaves(*tensors)
    some = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    for inputs in (everything, some):
        scores, indices = v4_lighting_indexer(*inputs, 4, 2)
        scores[indices >= 0].square().sum().backward()
    for i in range(3):
        assert (some[i].grad is None) if i not in wanted else torch.equal(some[i].grad, everything[i].grad)


def test_expanded_upstream_gradient():
    """sum() sends back one number with stride 0."""
    q, k, w = leaves(*naive.random_inputs(16, 2, 4, 8, 16, 0))
    scores, indices = v4_lighting_indexer(q, k, w, 1, 1)  # ratio 1, one slot: no slot is empty
    scores.sum().backward()
    dq, dk, dw = naive.gradients(*(t.detach() for t in (q, k, w)), indices, torch.ones(indices.shape))
    naive.assert_close(q.grad, dq, 1e-6)
    naive.assert_close(k.grad, dk, 1e-6)
    torch.testing.assert_close(w.grad, dw.float())  # relu(q.k), never negative


def test_non_contiguous_inputs_and_gradient():
    tensors = naive.random_inputs(16, 2, 4, 8, 4, 1)
    plain = leaves(*tensors)
    # The same values laid out in reverse order of dimensions.
    strided = [t.permute(*range(t.dim())[::-1]).contiguous().permute(*range(t.dim())[::-1]) for t in tensors]
    strided = [t.requires_grad_() for t in strided]
    for inputs in (plain, strided):
        scores, indices = v4_lighting_indexer(*inputs, 4, 3)
        grad, _ = upstream(indices)
        scores.backward(grad.transpose(0, 2).contiguous().transpose(0, 2) if inputs is strided else grad)
    for a, b in zip(plain, strided, strict=True):
        assert not b.is_contiguous()
        naive.assert_close(b.grad, a.grad, 1e-6)


def test_expanded_weights_collect_the_gradient_of_every_row():
    q, k, _ = naive.random_inputs(16, 2, 4, 8, 4, 1)
    (w,) = leaves(torch.tensor([0.5, -1.0, 2.0, -0.25]))
    scores, indices = v4_lighting_indexer(q, k, w.expand(16, 2, 4), 4, 3)
    grad, clean = upstream(indices)
    scores.backward(grad)
    naive.assert_close(w.grad, naive.gradients(q, k, w.detach().expand(16, 2, 4), indices, clean)[2].sum((0, 1)), 1e-6)


def test_a_second_derivative_is_refused():
    q, k, w = leaves(*naive.random_inputs(8, 1, 2, 4, 2, 0))
    scores, indices = v4_lighting_indexer(q, k, w, 4, 2)
    (dq,) = torch.autograd.grad(scores[indices >= 0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_deterministic_algorithms_change_nothing():
    """Under them fresh memory is filled with NaN, so an element that nothing wrote would show."""
    results = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            inputs = leaves(*naive.random_inputs(37, 3, 4, 8, 9, 0))
            scores, indices = v4_lighting_indexer(*inputs, 4, 4)
            scores.backward(upstream(indices)[0])
        finally:
            torch.use_deterministic_algorithms(False)
        results.append([scores.detach(), indices, *(t.grad for t in inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_eval_and_training_select_the_same_and_no_grad_keeps_nothing():
    inputs = leaves(*naive.random_inputs(37, 3, 4, 8, 9, 0))
    scores, indices = v4_lighting_indexer(*inputs, 4, 4)
    kept = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        eval_scores, eval_indices = v4_lighting_indexer(*inputs, 4, 4)
    assert not kept and not eval_scores.requires_grad and eval_scores.grad_fn is None
    assert torch.equal(eval_scores, scores) and torch.equal(eval_indices, indices)
    detached = v4_lighting_indexer(*(t.detach() for t in inputs), 4, 4)
    assert detached[0].grad_fn is None and torch.equal(detached[1], indices)


def test_backward_keeps_the_inputs_and_the_indices_and_nothing_else():
    inputs = leaves(*naive.random_inputs(512, 1, 4, 8, 128, 0))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, indices = v4_lighting_indexer(*inputs, 4, 4)
    expected = {t.data_ptr() for t in (*inputs, indices)}
    assert len(kept) == 4 and {t.data_ptr() for t in kept} == expected
    assert max(t.untyped_storage().nbytes() for t in kept) < 512 * 128 * 4  # S x G scores


def test_no_intermediate_passes_the_workspace():
    """S = 2048, G = 512: whole products would take 16 MiB, whole scores 4 MiB; the workspace is 1 MiB."""
    rows, heads, dim, topk, mib = 2048, 4, 8, 4, 2**20
    inputs = leaves(*naive.random_inputs(rows, 1, heads, dim, rows // 4, 0))
    with Largest() as forward:
        scores, indices = v4_lighting_indexer(*inputs, 4, topk, workspace_mib=1)
    whole = v4_lighting_indexer(*(t.detach() for t in inputs), 4, topk)
    assert torch.equal(indices, whole[1])
    naive.assert_close(scores.detach()[indices >= 0], whole[0][indices >= 0], 1e-6)
    assert 2**17 < forward.bytes <= mib
    grad = upstream(indices)[0]
    with Largest() as backward:
        scores.backward(grad)
    # One chunk of gathered keys, products or their int64 index, of the size of K; S x G would be 4 MiB.
    assert 2**17 < backward.bytes <= rows * topk * max(heads, dim, 2) * 4


def test_backward_stays_within_a_small_workspace_too():
    q, k, w = naive.random_inputs(1024, 1, 4, 8, 64, 0)
    indices = torch.randint(-1, 64, (1, 1024, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    grad = upstream(indices)[0]
    with Largest() as largest:
        reference.backward(q, k, w, indices, grad, workspace_bytes=2**17)
    assert largest.bytes <= q.numel() * 4  # dq itself, 128 KiB; whole gathered keys would take 1 MiB
