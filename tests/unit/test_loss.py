"""The distillation loss against a plain KL in fp64 with autograd, for selected and for all visible entries."""

import math

import naive
import pytest
import torch
from largest import Largest

from nemo_v4_indexer.ops import loss as losses
from nemo_v4_indexer.ops.indexer import v4_lighting_indexer
from nemo_v4_indexer.ops.loss import attach_loss, indexer_dense_kl_loss, indexer_kl_loss, set_loss_scale

INF, NAN = math.inf, math.nan
S, B, H, D, RATIO, G = 23, 2, 4, 8, 4, 5


def problem(seed=0, topk=3):
    """Scores with gradient, indices with empty slots and rows, and a teacher's mass that is not normalised."""
    inputs = naive.random_inputs(S, B, H, D, G, seed)
    scores, indices = v4_lighting_indexer(*inputs, RATIO, topk)
    mass = torch.rand(indices.shape, generator=torch.Generator().manual_seed(seed)) * 7
    return scores.detach().requires_grad_(), indices, mass


def dense_problem(dtype=torch.float32):
    inputs = [t.requires_grad_() for t in naive.random_inputs(S, B, H, D, G, 1, dtype)]
    pairs = naive.limits(S, RATIO, G, B)
    mass = torch.rand(B, S, G, generator=torch.Generator().manual_seed(2)) * 7
    mass[:, 11] = 0  # a row without teacher mass
    valid = torch.tensor([[[s <= g < e for g in range(G)] for s, e in row] for row in pairs])
    return inputs, naive.limit_tensors(pairs), mass, valid


@pytest.mark.parametrize("coeff", [1.0, 0.01])
@pytest.mark.parametrize("rows", [None, 100, torch.tensor(57)])
def test_loss_and_gradient_match_a_plain_kl(coeff, rows):
    scores, indices, mass = problem()
    mass[0, 9, 1] = 0  # p = 0 beside p > 0
    loss, sums = indexer_kl_loss(scores, indices, mass, coeff=coeff, rows=rows)
    (got,) = torch.autograd.grad(loss, scores)
    oracle = scores.detach().double().requires_grad_()
    kl = naive.kl(oracle, indices >= 0, mass)
    count = int((indices >= 0).any(-1).sum()) if rows is None else int(rows)
    assert count == B * (S - RATIO + 1) or rows is not None
    expected = coeff / count * kl.sum()
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and expected.item() > 0
    assert sums.kl.item() == pytest.approx(kl.sum().item(), rel=1e-5)
    (oracle_grad,) = torch.autograd.grad(expected, oracle)
    naive.assert_close(got, oracle_grad, 1e-5)
    with pytest.raises(AssertionError, match="relative error"):
        naive.assert_close(torch.zeros_like(got), oracle_grad, 1e-5)


def test_gradient_is_softmax_minus_teacher():
    scores, indices, mass = problem(topk=2)
    loss, _ = indexer_kl_loss(scores, indices, mass, coeff=0.5, rows=10)
    (got,) = torch.autograd.grad(loss, scores)
    row = indices[1, S - 1].tolist()
    assert -1 not in row
    p = mass[1, S - 1] / mass[1, S - 1].sum()
    q = scores.detach()[1, S - 1].softmax(0)
    torch.testing.assert_close(got[1, S - 1], 0.05 * (q - p))


def test_kl_to_a_uniform_indexer():
    scores, indices, mass = problem()
    mass[0, 10] = 0  # a row that has entries and no mass adds nothing
    _, sums = indexer_kl_loss(scores, indices, mass)
    flat, _ = indexer_kl_loss(torch.zeros_like(scores), indices, mass, rows=1)
    assert sums.kl_uniform.item() == pytest.approx(flat.item(), rel=1e-5)
    assert sums.kl_uniform.item() != pytest.approx(sums.kl.item(), rel=1e-2)
    assert not sums.kl.requires_grad and not sums.kl_uniform.requires_grad


def test_a_teacher_equal_to_the_indexer_costs_nothing():
    scores, indices, _ = problem()
    mass = scores.detach().softmax(-1).nan_to_num(0) * 3
    loss, _ = indexer_kl_loss(scores, indices, mass)
    (got,) = torch.autograd.grad(loss, scores)
    assert abs(loss.item()) < 1e-6 and got.abs().max() < 1e-6


def test_rows_without_entries_or_mass_add_exactly_nothing():
    scores, indices, mass = problem()
    dead = [(0, 0), (1, 2), (0, 10), (1, 20)]  # the first two see nothing, the others get no mass
    mass[0, 10], mass[1, 20] = 0, 0
    loss, sums = indexer_kl_loss(scores, indices, mass, rows=1)
    (got,) = torch.autograd.grad(loss, scores)
    assert loss.isfinite() and got.isfinite().all()
    for row in dead:
        assert not got[row].any()
    # Whatever those rows hold, even NaN, stays out.
    with torch.no_grad():
        for row in dead:
            scores[row], mass[row] = NAN, 0
        mass[1, 2] = NAN
    again, same = indexer_kl_loss(scores, indices, mass, rows=1)
    assert torch.equal(again, loss) and torch.equal(same.kl_uniform, sums.kl_uniform)
    assert torch.equal(torch.autograd.grad(again, scores)[0], got)


def test_all_rows_empty():
    scores = torch.full((1, 3, 2), -INF, requires_grad=True)
    loss, sums = indexer_kl_loss(scores, torch.full((1, 3, 2), -1), torch.zeros(1, 3, 2))
    loss.backward()
    assert loss.item() == 0 and sums.kl.item() == 0 and sums.kl_uniform.item() == 0 and not scores.grad.any()


def test_zero_probability_and_minus_infinite_scores_give_no_nan():
    scores = torch.tensor([[[2.0, -INF, 0.5]]], requires_grad=True)
    indices = torch.tensor([[[0, 1, 2]]])
    loss, _ = indexer_kl_loss(scores, indices, torch.tensor([[[3.0, 0.0, 1.0]]]))
    (got,) = torch.autograd.grad(loss, scores)
    q = torch.tensor([2.0, 0.5]).softmax(0)
    p = torch.tensor([0.75, 0.25])
    assert loss.item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)
    torch.testing.assert_close(got[0, 0], torch.tensor([q[0] - p[0], 0.0, q[1] - p[1]]))


def test_mass_in_empty_slots_is_ignored_and_mass_has_no_gradient():
    scores, indices, mass = problem()
    loss, _ = indexer_kl_loss(scores, indices, mass)
    wild = mass.masked_fill(indices < 0, NAN).requires_grad_()
    again, _ = indexer_kl_loss(scores, indices, wild)
    assert torch.equal(again, loss)
    again.backward()
    assert wild.grad is None


def test_upstream_gradient_scales_and_scores_keep_their_dtype():
    scores, indices, mass = problem()
    wide = scores.detach().double().requires_grad_()
    (one,) = torch.autograd.grad(indexer_kl_loss(scores, indices, mass)[0], scores)
    (many,) = torch.autograd.grad(indexer_kl_loss(wide, indices, mass)[0] * 1024, wide)
    assert many.dtype == torch.float64
    naive.assert_close(many / 1024, one.double(), 1e-6)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"share a shape.*\(1, 2, 3\), \(1, 2, 3\) and \(1, 2, 4\)"):
        indexer_kl_loss(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))


@pytest.mark.parametrize("rows", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dense_loss_and_gradients_match_a_plain_kl(rows, dtype):
    inputs, limits, mass, valid = dense_problem(dtype)
    loss, sums = indexer_dense_kl_loss(*inputs, limits, lambda lo, hi: mass[:, lo:hi], coeff=0.3, rows=rows)
    got = torch.autograd.grad(loss * 2, inputs)
    oracles = [t.detach().double().requires_grad_() for t in inputs]
    kl = naive.kl(naive.scores(*oracles), valid, mass)
    count = rows or B * (S - RATIO + 1)
    expected = torch.autograd.grad(2 * 0.3 / count * kl.sum(), oracles)
    assert loss.item() == pytest.approx(0.3 / count * kl.sum().item(), rel=1e-5)
    assert sums.kl.item() == pytest.approx(kl.sum().item(), rel=1e-5)
    for actual, oracle, source in zip(got, expected, inputs, strict=True):
        assert actual.dtype == source.dtype
        naive.assert_close(actual, oracle, 4e-3 if source.dtype == torch.bfloat16 else 2e-6)
    assert not got[0][11].any() and not got[2][11].any() and not got[0][: RATIO - 1].any()


def test_dense_equals_sparse_when_the_selection_holds_everything():
    inputs, limits, mass, _ = dense_problem()
    dense, dense_sums = indexer_dense_kl_loss(*inputs, limits, lambda lo, hi: mass[:, lo:hi])
    scores, indices = v4_lighting_indexer(*inputs, RATIO, G)
    selected = mass.gather(-1, indices.clamp(min=0).long())
    sparse, sparse_sums = indexer_kl_loss(scores, indices, selected)
    torch.testing.assert_close(dense, sparse)
    torch.testing.assert_close(torch.stack(dense_sums), torch.stack(sparse_sums))
    pairs = zip(torch.autograd.grad(dense, inputs), torch.autograd.grad(sparse, inputs), strict=True)
    for a, b in pairs:
        naive.assert_close(a, b, 2e-6)


def test_chunked_dense_equals_unchunked_and_asks_for_rows_in_order():
    inputs = [t.requires_grad_() for t in naive.random_inputs(640, 1, 8, 4, 160, 3)]
    limits = naive.limit_tensors(naive.limits(640, 4, 160, 1))
    mass = torch.rand(1, 640, 160, generator=torch.Generator().manual_seed(4))
    results, calls = [], []
    for mib in (256, 1):

        def teacher(lo, hi, mib=mib):
            calls.append((mib, lo, hi))
            return mass[:, lo:hi]

        loss, sums = indexer_dense_kl_loss(*inputs, limits, teacher, workspace_mib=mib)
        results.append((loss, *sums, *torch.autograd.grad(loss, inputs)))
    assert calls[0] == (256, 0, 640) and len(calls) > 10
    assert [row for _, lo, hi in calls[1:] for row in range(lo, hi)] == list(range(640))
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-8)


def test_dense_loss_keeps_nothing_of_rows_times_keys():
    inputs = [t.requires_grad_() for t in naive.random_inputs(1536, 1, 4, 4, 384, 3)]
    limits = naive.limit_tensors(naive.limits(1536, 4, 384, 1))
    with Largest() as largest:
        loss, _ = indexer_dense_kl_loss(*inputs, limits, lambda lo, hi: torch.ones(1, hi - lo, 384), workspace_mib=1)
    assert 2**17 < largest.bytes <= 2**20 < 1536 * 384 * 4
    assert max(t.untyped_storage().nbytes() for t in loss.grad_fn.saved_tensors) <= inputs[0].numel() * 4


def test_dense_loss_ignores_autocast():
    inputs, limits, mass, _ = dense_problem()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, sums = indexer_dense_kl_loss(*inputs, limits, lambda lo, hi: mass[:, lo:hi])
        results.append((loss, *sums, *torch.autograd.grad(loss, inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dense_loss_without_keys():
    inputs = [t.requires_grad_() for t in naive.random_inputs(3, 1, 2, 4, 0, 3)]
    limits = naive.limit_tensors(naive.limits(3, 4, 0, 1))
    loss, _ = indexer_dense_kl_loss(*inputs, limits, lambda lo, hi: torch.zeros(1, hi - lo, 0))
    loss.backward()
    assert loss.item() == 0 and not any(t.grad.any() for t in inputs)


@pytest.fixture
def loss_scale():
    before = losses._AttachLoss.scale
    yield set_loss_scale
    set_loss_scale(before)


@pytest.mark.parametrize("scale", [1.0, 0.25, 1024.0, torch.tensor(8.0)])
def test_an_attached_loss_joins_the_backward_times_the_scale(loss_scale, scale):
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = torch.tensor(3.0, requires_grad=True)
    out = attach_loss(x * 2, y.square())
    assert torch.equal(out, x * 2)
    loss_scale(scale)  # known only when the schedule starts backward
    (out * torch.tensor([5.0, 7.0])).sum().backward()
    assert x.grad.tolist() == [10.0, 14.0]
    assert y.grad.item() == 6 * float(scale)


def test_an_attached_loss_starts_once_per_backward(loss_scale):
    x, y = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    for _ in range(4):
        loss_scale(0.25)
        attach_loss(x, y * 2).sum().backward()
    assert y.grad.item() == 2.0 and x.grad.tolist() == [4.0, 4.0]
