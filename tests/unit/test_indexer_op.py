"""`v4_lighting_indexer` as callers see it: causality, ragged input, replay, row limits, bad numbers, backends."""

import logging
import math

import naive
import pytest
import torch

from nemo_v4_indexer import visibility
from nemo_v4_indexer.ops import dispatch
from nemo_v4_indexer.ops.indexer import (
    V4IndexerFunction,
    pytorch_extract_topk_scores,
    v4_lighting_indexer,
    v4_lighting_indexer_sample,
)

INF, NAN = math.inf, math.nan


def assert_same(actual, expected):
    """Bitwise equal scores and indices; NaN equals NaN."""
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[0].nan_to_num(nan=7e9), expected[0].nan_to_num(nan=7e9))


def means(x, ratio):
    """Group means of tokens [S, B, D]: keys that depend on their group's tokens and nothing else."""
    groups = x.shape[0] // ratio
    return x[: groups * ratio].view(groups, ratio, *x.shape[1:]).mean(1)


def oracle(q, k, w, topk, pairs):
    values = naive.scores(q, k, w)
    indices = naive.select(values, pairs, topk)
    return naive.at(values, indices, pairs), indices


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("rows", [*range(1, 18), 127, 128, 257])
def test_a_row_selects_only_groups_that_ended(rows, ratio):
    q, k, w = naive.random_inputs(rows, 2, 4, 8, rows // ratio, rows)
    _, indices = v4_lighting_indexer(q, k, w, ratio, 3)
    for t in range(rows):
        visible = (t + 1) // ratio
        count = (indices[:, t] >= 0).sum(-1)
        assert (indices[:, t] < visible).all() and (count == min(3, visible)).all()


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("rows", range(1, 18))
def test_changing_one_token_changes_nothing_before_it(rows, ratio):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2, 8, generator=generator)
    heads = torch.randn(3, generator=generator)

    def run(x):
        q = x[:, :, None] * heads[:, None]
        return v4_lighting_indexer(q, means(x, ratio), x[..., :3], ratio, 2)

    before = run(x)
    for t in range(rows):
        for value in (-9.0, NAN, INF):
            changed = x.clone()
            changed[t, 1] = value
            after = run(changed)
            assert_same([y[:, :t] for y in after], [y[:, :t] for y in before])
            assert_same([y[:1] for y in after], [y[:1] for y in before])  # the other sample of the batch
        visible = min(2, (t + 1) // ratio)
        assert not visible or not torch.equal(after[0][1, t, :visible], before[0][1, t, :visible])


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("rows", [1, 3, 5, 63, 65])
@pytest.mark.parametrize("topk", [1, 4, 100])
def test_ragged_and_short_input(rows, ratio, topk):
    groups = rows // ratio
    q, k, w = naive.exact_inputs(rows, 3, 4, 8, groups, rows)
    scores, indices = v4_lighting_indexer(q, k, w, ratio, topk)
    expected = oracle(q, k, w, topk, naive.limits(rows, ratio, groups, 3))
    assert torch.equal(indices, expected[1]) and indices.dtype == torch.int32
    assert torch.equal(scores.double(), expected[0]) and scores.dtype == torch.float32
    assert scores.shape == indices.shape == (3, rows, topk)
    assert ((indices == -1) == (scores == -INF)).all()


def test_no_keys_and_no_rows():
    scores, indices = v4_lighting_indexer(*naive.random_inputs(3, 2, 4, 8, 0, 0), 4, 5)
    assert (scores == -INF).all() and (indices == -1).all() and scores.shape == (2, 3, 5)
    scores, indices = v4_lighting_indexer(*naive.random_inputs(0, 2, 4, 8, 3, 0), 4, 5)
    assert scores.shape == indices.shape == (2, 0, 5)


def test_weights_scale_scores_once_and_may_be_negative():
    q, k, w = naive.exact_inputs(16, 1, 4, 8, 4, 0)
    scores, indices = v4_lighting_indexer(q, k, w, 4, 1)
    half, same = v4_lighting_indexer(q, k, w / 2, 4, 1)
    assert torch.equal(half, scores / 2) and torch.equal(same, indices)
    _, flipped = v4_lighting_indexer(q, k, -w, 4, 1)
    seen = indices >= 0
    assert (flipped != indices)[seen].any(), "the selection must follow the sign of the weights"
    # Head weights multiply after the ReLU: moving a negative weight into q is another function.
    assert not torch.equal(v4_lighting_indexer(q * w[..., None], k, torch.ones_like(w), 4, 1)[1], indices)


def test_bf16_inputs_are_scored_with_fp32_sums_and_weights():
    q, k, w = naive.random_inputs(64, 2, 8, 32, 16, 0, torch.bfloat16)
    scores, indices = v4_lighting_indexer(q, k, w, 4, 4)
    expected = naive.at(naive.scores(q, k, w), indices, naive.limits(64, 4, 16, 2))
    valid = indices >= 0
    naive.assert_close(scores[valid], expected[valid], 1e-6)  # bf16 weights or sums would be off by 1e-3


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["query", "weight"])
def test_a_bad_row_leaves_the_others_alone(bad, where):
    q, k, w = naive.random_inputs(32, 2, 4, 8, 8, 0)
    before = v4_lighting_indexer(q, k, w, 4, 3)
    (q if where == "query" else w)[20, 1] = bad
    scores, indices = v4_lighting_indexer(q, k, w, 4, 3)
    assert ((indices >= -1) & (indices < 8)).all()
    chosen = indices[1, 20].tolist()
    assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < 5
    others = torch.ones(2, 32, dtype=torch.bool)
    others[1, 20] = False
    assert_same((scores[others], indices[others]), [x[others] for x in before])


def test_a_nan_key_is_selected_by_every_row_that_sees_it_and_by_no_other():
    q, k, w = naive.random_inputs(32, 2, 4, 8, 8, 0)
    before = v4_lighting_indexer(q, k, w, 4, 3)
    k[4, 0] = NAN
    after = v4_lighting_indexer(q, k, w, 4, 3)
    assert_same([x[:, :19] for x in after], [x[:, :19] for x in before])
    assert_same([x[1] for x in after], [x[1] for x in before])
    hit = after[1][0, 19:] == 4
    assert hit.any(-1).all() and after[0][0, 19:][hit].isnan().all()


@pytest.mark.parametrize("scale", [-1e5, -1e30])
def test_scores_far_below_half_precision_are_selected(scale):
    q, k, w = naive.random_inputs(32, 2, 4, 8, 8, 0)
    q, k = q.abs() + 1, k.abs() + 1
    scores, indices = v4_lighting_indexer(q, k, w.abs() * scale + scale, 4, 3)
    pairs = naive.limits(32, 4, 8, 2)
    assert torch.equal(indices, oracle(q, k, w.abs() * scale + scale, 3, pairs)[1])
    assert (scores[indices >= 0] < -65504).all() and scores[indices >= 0].isfinite().all()


def test_replay_keeps_the_given_order_and_drops_what_is_not_visible():
    q, k, w = naive.exact_inputs(16, 2, 4, 8, 4, 1)
    given = torch.tensor([3, 0, -1, 2, 1, 0, 4, -(2**40), 2**32]).expand(2, 16, 9)
    scores, indices = v4_lighting_indexer(q, k, w, 4, 99, given)
    pairs = naive.limits(16, 4, 4, 2)
    valid = visibility.valid_slots(given, *naive.limit_tensors(pairs))
    assert torch.equal(indices, given.masked_fill(~valid, -1).int()) and indices.dtype == torch.int32
    assert torch.equal(scores.double(), naive.at(naive.scores(q, k, w), indices, pairs))
    assert indices[0, 15].tolist() == [3, 0, -1, 2, 1, 0, -1, -1, -1]
    assert indices[0, 11].tolist() == [-1, 0, -1, 2, 1, 0, -1, -1, -1]
    narrow = v4_lighting_indexer(q, k, w, 4, 99, given[..., :6].int())
    assert_same(narrow, (scores[..., :6], indices[..., :6]))


def test_replaying_a_selection_gives_its_scores_again():
    q, k, w = naive.exact_inputs(33, 2, 4, 8, 8, 2)
    chosen = v4_lighting_indexer(q, k, w, 4, 3)
    assert_same(v4_lighting_indexer(q, k, w, 4, 3, chosen[1]), chosen)
    assert_same(v4_lighting_indexer(q, k, w, 4, 3, chosen[1].long()), chosen)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_limits_replace_the_causal_rule(dtype):
    q, k, w = naive.exact_inputs(9, 2, 4, 8, 7, 3)
    pairs = [[(s, min(7, s + n)) for s, n in zip([0, 5, 2, 0, 6, 3, 1, 7, 4], lengths, strict=True)] for lengths in (
        [7, 1, 3, 0, 1, 9, 2, 5, 3], [1, 2, 0, 7, 1, 2, 6, 0, 1]
    )]  # fmt: skip
    start, end = (t.to(dtype) for t in naive.limit_tensors(pairs))
    for ratio in (1, 4):
        got = v4_lighting_indexer(q, k, w, ratio, 3, cu_seqlen_ks=start, cu_seqlen_ke=end)
        expected = oracle(q, k, w, 3, pairs)
        assert torch.equal(got[1], expected[1]) and torch.equal(got[0].double(), expected[0])
    shared = v4_lighting_indexer(q, k, w, 4, 3, cu_seqlen_ks=start[0], cu_seqlen_ke=end[0])
    assert_same([x[0] for x in shared], [x[0] for x in got])
    assert torch.equal(shared[1], oracle(q, k, w, 3, [pairs[0]] * 2)[1])


def test_replay_obeys_row_limits():
    q, k, w = naive.exact_inputs(2, 1, 4, 8, 4, 3)
    given = torch.tensor([[[0, 1, 2, 3], [3, 2, 1, 0]]], dtype=torch.int32)
    limits = {"cu_seqlen_ks": torch.tensor([1, 0]), "cu_seqlen_ke": torch.tensor([3, 1])}
    assert v4_lighting_indexer(q, k, w, 4, 4, given, **limits)[1].tolist() == [[[-1, 1, 2, -1], [-1, -1, -1, 0]]]


def test_limits_beyond_the_keys_select_no_index_out_of_range():
    q, k, w = naive.exact_inputs(3, 1, 4, 8, 4, 3)
    limits = {"cu_seqlen_ks": torch.tensor([-5, 3, 4]), "cu_seqlen_ke": torch.tensor([99, 2, 2**40])}
    _, indices = v4_lighting_indexer(q, k, w, 4, 5, **limits)
    assert indices[0].tolist() == [[0, 1, 2, 3, -1], [-1] * 5, [-1] * 5]


def test_packed_documents_equal_documents_on_their_own():
    lengths = [9, 2, 17, 4]
    documents = [naive.exact_inputs(n, 1, 4, 8, n // 4, seed=n) for n in lengths]
    q, k, w = (torch.cat(parts) for parts in zip(*documents, strict=True))
    start, end = visibility.packed_limits(torch.tensor([0, *lengths]).cumsum(0), 4)
    scores, indices = v4_lighting_indexer(q, k, w, 4, 3, cu_seqlen_ks=start, cu_seqlen_ke=end)
    row = first = 0
    for n, document in zip(lengths, documents, strict=True):
        expected = v4_lighting_indexer(*document, 4, 3)
        own = indices[:, row : row + n]
        assert_same((scores[:, row : row + n], torch.where(own < 0, -1, own - first)), expected)
        row, first = row + n, first + n // 4


def test_the_per_sample_interface_is_the_batch_of_one():
    q, k, w = naive.exact_inputs(13, 1, 4, 8, 3, 5)
    start, end = visibility.causal_limits(13, 4, 3)
    expected = v4_lighting_indexer(q, k, w, 4, 2)
    got = v4_lighting_indexer_sample(q[:, 0], k[:, 0], w[:, 0], start, end, 2, backend="reference")
    assert_same(got, [x[0] for x in expected])
    again = v4_lighting_indexer_sample(q[:, 0], k[:, 0], w[:, 0], start, end, 2, expected[1][0])
    assert_same(again, got)


def test_non_contiguous_inputs_change_nothing_and_are_not_written():
    q, k, w = naive.exact_inputs(16, 2, 4, 8, 4, 6)
    views = (
        torch.stack([q, -q], -1)[..., 0],
        k.transpose(0, 1).contiguous().transpose(0, 1),
        w.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    )
    copies = [t.clone() for t in views]
    assert not any(t.is_contiguous() for t in views)
    assert_same(v4_lighting_indexer(*views, 4, 2), v4_lighting_indexer(q, k, w, 4, 2))
    assert all(torch.equal(a, b) for a, b in zip(views, copies, strict=True))


def test_autocast_changes_nothing():
    q, k, w = naive.random_inputs(32, 2, 4, 16, 8, 7)
    results = []
    for enabled in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, w)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            scores, indices = v4_lighting_indexer(*leaves, 4, 3)
            replayed, _ = v4_lighting_indexer(*leaves, 4, 3, indices)
            (scores + replayed).masked_fill(indices < 0, 0).square().sum().backward()
        results.append([scores.detach(), indices, replayed.detach(), *(t.grad for t in leaves)])
    for plain, cast in zip(*results, strict=True):
        assert plain.dtype == cast.dtype and torch.equal(plain, cast)


def test_tilelang_by_name_raises_with_the_reason_on_a_cpu():
    arguments = naive.random_inputs(8, 1, 8, 32, 2, 0, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"'tilelang' cannot run: .*cpu.*'reference' runs anywhere"):
        v4_lighting_indexer(*arguments, 4, 2, backend="tilelang")


def test_auto_says_once_why_it_runs_the_reference(caplog):
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "nemo_v4_indexer"):
        for seed in range(3):
            v4_lighting_indexer(*naive.random_inputs(8, 1, 8, 32, 2, seed), 4, 2)
        v4_lighting_indexer(*naive.random_inputs(8, 1, 8, 32, 2, 0), 4, 2, backend="reference")
    (record,) = [r for r in caplog.records if r.name.startswith("nemo_v4_indexer")]
    assert "'reference'" in record.message and "cpu" in record.message


def test_auto_and_reference_agree_bit_for_bit_on_a_cpu():
    arguments = naive.random_inputs(32, 2, 4, 16, 8, 7)
    auto = v4_lighting_indexer(*arguments, 4, 3)
    assert_same(auto, v4_lighting_indexer(*arguments, 4, 3, backend="reference"))
    assert_same(auto, V4IndexerFunction.apply(*arguments, 4, 3, None))


@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_extract_scores_at_indices_along_any_dim(dim):
    logits = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    size = logits.shape[dim]
    shape = [n for i, n in enumerate(logits.shape) if i != dim % 3]
    indices = torch.arange(-2, size + 2).expand(*shape, -1).movedim(-1, dim)
    got = pytorch_extract_topk_scores(logits, indices, dim=dim)
    padded = torch.full((*shape, 2), -INF, dtype=torch.float64)
    expected = torch.cat([padded, logits.detach().movedim(dim, -1), padded], -1).movedim(-1, dim)
    assert torch.equal(got.detach(), expected)
    assert torch.equal(pytorch_extract_topk_scores(logits, indices.int(), dim=dim), got)
    torch.where(got.isfinite(), got * 3, 0).sum().backward()
    assert (logits.grad == 3).all()


def test_extract_from_no_logits():
    assert (pytorch_extract_topk_scores(torch.zeros(2, 0), torch.zeros(2, 3, dtype=torch.int32)) == -INF).all()
