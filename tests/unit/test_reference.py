"""The reference backend against plain loops: scores, selection order, chunks, bad numbers, gradients.

Exact inputs (small integers) make every sum exact, so that indices and ties must match to the last slot.
"""

import math

import naive
import pytest
import torch

from nemo_v4_indexer import reference, visibility

INF, NAN = math.inf, math.nan


def whole_row(values, topk, start=0, end=None, dtype=torch.float32):
    """Scores and indices, as lists, of `select` on one row."""
    values = torch.tensor(values, dtype=dtype)
    limits = (torch.tensor(x, dtype=torch.int32) for x in (start, len(values) if end is None else end))
    scores, indices = reference.select(values, *limits, topk)
    assert indices.dtype == torch.int32 and scores.dtype == dtype
    return scores.tolist(), indices.tolist()


def causal(rows, ratio, groups, batch):
    pairs = naive.limits(rows, ratio, groups, batch)
    return pairs, *naive.limit_tensors(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (5, 3, 4, 8, 7), (17, 2, 8, 32, 4)])
def test_scores_keep_negative_weights_and_clip_each_head(shape, dtype):
    q, k, w = naive.exact_inputs(*shape, seed=0, dtype=dtype)
    assert torch.equal(reference.scores(q, k, w).double(), naive.scores(q, k, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_wide_inputs_are_not_rounded_lower(dtype):
    q, k, w = naive.random_inputs(17, 2, 8, 32, 9, 0, dtype)
    naive.assert_close(reference.scores(q, k, w), naive.scores(q, k, w), 1e-6 if dtype == torch.float32 else 1e-14)


def test_scores_of_one_pair_by_hand():
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]])  # three heads
    k = torch.tensor([[[2.0, -3.0]]])
    # Products 2, -3, -1: only the first head passes its ReLU, and its weight is negative.
    assert reference.scores(q, k, torch.tensor([[[-0.5, 7.0, 9.0]]])).item() == -1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("topk", [1, 3, 4, 9, 40])
def test_select_matches_sorting_with_many_ties(topk, dtype):
    generator = torch.Generator().manual_seed(topk)
    values = torch.randint(-3, 4, (2, 40, 23), generator=generator).to(dtype) / 4
    values[torch.rand(values.shape, generator=generator) < 0.1] = -0.0
    values[torch.rand(values.shape, generator=generator) < 0.05] = NAN
    values[torch.rand(values.shape, generator=generator) < 0.05] = INF
    values[torch.rand(values.shape, generator=generator) < 0.05] = -INF
    ends = torch.randint(0, 24, (2, 40), generator=generator)
    starts = (torch.rand(2, 40, generator=generator) * (ends + 1)).int()
    pairs = torch.stack([starts, ends], -1).tolist()
    scores, indices = reference.select(values, *naive.limit_tensors(pairs), topk)
    expected = naive.select(values, pairs, topk)
    assert torch.equal(indices, expected)
    assert torch.equal(scores.nan_to_num(nan=7e9), naive.at(values, expected, pairs).nan_to_num(nan=7e9))


def test_the_lowest_indices_win_among_thousands_of_equals():
    values = [0.0] * 5000
    winners = list(range(4999, 0, -50))
    for g in winners:
        values[g] = 1.0
    _, indices = whole_row(values, 128)
    chosen = sorted(winners + [g for g in range(5000) if g not in set(winners)][: 128 - len(winners)])
    assert indices == chosen
    assert whole_row([0.5] * 4097, 3, start=7)[1] == [7, 8, 9]


def test_scores_that_differ_in_the_last_bit_are_told_apart():
    values = torch.full((3000,), 1.0)
    values.view(torch.int32).add_(torch.randperm(3000, generator=torch.Generator().manual_seed(3)).int() - 1500)
    _, indices = whole_row(values.tolist(), 100)
    assert indices == sorted(values.argsort(descending=True)[:100].tolist())


def test_negative_zero_equals_zero():
    assert whole_row([-0.0, 0.0, -0.0, 0.0], 2)[1] == [0, 1]
    assert whole_row([-1.0, -0.0, 0.0, 0.0], 2)[1] == [1, 2]


def test_nan_of_either_sign_ranks_above_infinity():
    negative_nan = torch.tensor([0xFFC00001 - 2**32], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([INF, 1.0]), negative_nan, torch.tensor([INF, NAN, -INF])])
    indices = reference.select(values, torch.tensor(0), torch.tensor(6), 2)[1]
    assert indices.tolist() == [2, 4]
    assert whole_row([INF, NAN, 3.0, INF], 2)[1] == [0, 1]
    assert whole_row([NAN] * 5, 3)[1] == [0, 1, 2]


def test_visible_minus_infinity_is_selected_and_invisible_plus_infinity_is_not():
    scores, indices = whole_row([INF, -INF, -2.0, -INF, INF], 4, start=1, end=4)
    assert indices == [1, 2, 3, -1]
    assert scores == [-INF, -2.0, -INF, -INF]


@pytest.mark.parametrize("least", [-65504.0, -1e6, -3e38, torch.finfo(torch.float32).min])
def test_very_low_scores_beat_empty_slots(least):
    scores, indices = whole_row([least, 1.0, least], 3, end=2)
    assert indices == [0, 1, -1]
    assert scores == [torch.tensor(least).item(), 1.0, -INF]


def test_invisible_keys_never_fill_slots():
    """A zero score outside the limits must not beat a negative score inside them."""
    assert whole_row([0.0, -5.0, -4.0, 0.0], 2, start=1, end=3)[1] == [1, 2]
    assert whole_row([0.0, -5.0, -4.0, 0.0], 3, start=1, end=3)[1] == [1, 2, -1]
    assert whole_row([3.0, 2.0], 2, start=2)[1] == [-1, -1]


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("bytes_per_row", [0, 1, 10, 1000])
@pytest.mark.parametrize("workspace", [1, 10, 35, 10**6])
def test_chunks_cover_every_row_once_within_the_workspace(rows, bytes_per_row, workspace):
    chunks = reference.chunk_rows(rows, bytes_per_row, workspace)
    assert [row for lo, hi in chunks for row in range(lo, hi)] == list(range(rows))
    assert all(hi - lo == 1 or (hi - lo) * bytes_per_row <= workspace for lo, hi in chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("topk", [1, 5, 30])
@pytest.mark.parametrize(("rows", "ratio"), [(1, 4), (3, 4), (5, 4), (63, 4), (65, 2), (9, 1), (130, 128)])
def test_forward_matches_the_oracle_exactly(rows, ratio, topk, dtype):
    groups = rows // ratio
    q, k, w = naive.exact_inputs(rows, 2, 4, 8, groups, rows + topk, dtype)
    pairs, start, end = causal(rows, ratio, groups, 2)
    scores, indices = reference.forward(q, k, w, start, end, topk)
    values = naive.scores(q, k, w)
    expected = naive.select(values, pairs, topk)
    assert torch.equal(indices, expected)
    assert torch.equal(scores.double(), naive.at(values, expected, pairs))
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workspace", [1, 5000, 50_000, 200_000])
def test_chunked_equals_unchunked_bit_for_bit(workspace, dtype):
    """On exact inputs: the bits of a rounded sum are the BLAS library's, which may block another shape differently."""
    q, k, w = naive.exact_inputs(65, 2, 8, 32, 16, 0, dtype)
    _, start, end = causal(65, 4, 16, 2)
    scores, indices = reference.forward(q, k, w, start, end, 5)
    grad = torch.randint(-4, 5, indices.shape, generator=torch.Generator().manual_seed(2)).float()
    whole = scores, indices, *reference.backward(q, k, w, indices, grad)
    parts = (
        *reference.forward(q, k, w, start, end, 5, workspace_bytes=workspace),
        *reference.backward(q, k, w, indices, grad, workspace_bytes=workspace),
    )
    for name, part, expected in zip(("scores", "indices", "dq", "dk", "dw"), parts, whole, strict=True):
        assert torch.equal(part, expected), name
    assert torch.equal(reference.gather(q, k, w, start, end, indices, workspace_bytes=workspace), scores)


@pytest.mark.parametrize("workspace", [1, 3000, 50_000])
def test_chunked_equals_unchunked_on_rounded_sums(workspace):
    q, k, w = naive.random_inputs(65, 3, 5, 12, 16, 1)
    _, start, end = causal(65, 4, 16, 3)
    scores, indices = reference.forward(q, k, w, start, end, 5)
    parts = reference.forward(q, k, w, start, end, 5, workspace_bytes=workspace)
    assert torch.equal(parts[1], indices)
    torch.testing.assert_close(parts[0], scores, rtol=1e-5, atol=1e-6)
    grad = torch.randn(indices.shape, generator=torch.Generator().manual_seed(2))
    whole = reference.backward(q, k, w, indices, grad)
    for part, expected in zip(
        reference.backward(q, k, w, indices, grad, workspace_bytes=workspace), whole, strict=True
    ):
        naive.assert_close(part, expected, 1e-6)


def test_gather_agrees_with_the_whole_scores_wherever_indices_point():
    q, k, w = naive.exact_inputs(21, 3, 4, 8, 5, seed=4)
    pairs, start, end = causal(21, 4, 5, 3)
    indices = torch.randint(-3, 9, (3, 21, 7), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    got = reference.gather(q, k, w, start, end, indices)
    assert torch.equal(got.double(), naive.at(naive.scores(q, k, w), indices, pairs))
    assert (got == -INF).any() and got.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_backward_matches_the_formulas_slot_by_slot(dtype):
    q, k, w = naive.random_inputs(13, 3, 4, 8, 6, 6, dtype)
    indices = torch.randint(-2, 6, (3, 13, 5), generator=torch.Generator().manual_seed(7), dtype=torch.int32)
    grad = torch.randn(indices.shape, generator=torch.Generator().manual_seed(8))
    got = reference.backward(q, k, w, indices, grad.masked_fill(indices < 0, NAN))
    expected = naive.gradients(q, k, w, indices, grad)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-3}[dtype]
    for actual, oracle, source in zip(got, expected, (q, k, w), strict=True):
        assert actual.dtype == source.dtype
        naive.assert_close(actual, oracle, tolerance if source.dtype == dtype else 1e-6)


def test_relu_passes_nothing_at_zero():
    q, k, w = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[0.0, 5.0]]]), torch.tensor([[[2.0]]])
    for gradient in reference.backward(q, k, w, torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 1)):
        assert not gradient.any()


def test_empty_slots_do_not_add_to_key_zero():
    """Rows whose slots are all empty, with NaN in the row itself: no gradient anywhere, none of it NaN."""
    q, k, w = naive.random_inputs(4, 1, 2, 4, 3, 9)
    indices = torch.tensor([[[-1, -1], [1, -1], [-1, -1], [-1, 2]]], dtype=torch.int32)
    grad = torch.tensor([[[NAN, 1.0], [1.0, -INF], [5.0, INF], [NAN, 1.0]]])
    clean = reference.backward(q, k, w, indices, grad)
    q[0], w[2] = NAN, INF
    dirty = reference.backward(q, k, w, indices, grad)
    for name, a, b in zip("qkw", clean, dirty, strict=True):
        assert torch.equal(a, b), f"d{name}"
    dq, dk, dw = dirty
    assert not dk[0].any() and dk[1:].any()
    for gradient in (dq, dw):
        assert not gradient[[0, 2]].any() and gradient[[1, 3]].any()


def test_a_bad_row_stays_with_its_own_keys():
    q, k, w = naive.random_inputs(3, 1, 2, 4, 4, 10)
    indices = torch.tensor([[[0, 1], [3, -1], [2, -1]]], dtype=torch.int32)
    q[1] = NAN
    dk = reference.backward(q, k, w, indices, torch.ones(1, 3, 2))[1]
    assert dk[:3].isfinite().all()


def test_gather_without_keys_gives_empty_slots():
    q, k, w = naive.random_inputs(3, 2, 2, 4, 0, 0)
    start, end = visibility.batched_limits(*visibility.causal_limits(3, 4, 0), 2, 3, 0)
    got = reference.gather(q, k, w, start, end, torch.zeros(2, 3, 2, dtype=torch.int32))
    assert (got == -INF).all() and got.shape == (2, 3, 2)
