"""Row limits against counting tokens one by one."""

import pytest
import torch
from naive import limit_tensors, limits

from nemo_v4_indexer import visibility


def test_groups_drop_the_tail():
    assert [visibility.num_groups(n, 4) for n in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert visibility.num_groups(7, 1) == 7


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 128])
@pytest.mark.parametrize("rows", [1, 3, 5, 17, 131])
def test_causal_limits_count_finished_groups(rows, ratio):
    groups = rows // ratio
    start, end = visibility.causal_limits(rows, ratio, groups)
    expected = limit_tensors(limits(rows, ratio, groups, 1))
    assert torch.equal(start[None], expected[0]) and torch.equal(end[None], expected[1])
    assert start.dtype == end.dtype == torch.int32


def test_last_token_of_a_group_sees_it_and_earlier_tokens_see_nothing():
    _, end = visibility.causal_limits(9, 4, 2)
    assert end.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_rows_in_any_order_keep_their_global_limits():
    # Rank 0 of two ranks with zigzag rows of a sequence of 16: its local row 4 is global row 12.
    positions = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    start, end = visibility.row_limits(positions, 4, 4)
    assert start.tolist() == [0] * 8
    assert end.tolist() == [0, 0, 0, 1, 3, 3, 3, 4]
    pair = torch.stack([positions, positions.flip(0)])
    assert visibility.row_limits(pair, 4, 4)[1].tolist() == [end.tolist(), end.flip(0).tolist()]


def test_limits_never_pass_the_keys():
    assert visibility.causal_limits(12, 4, 2)[1].max() == 2
    assert visibility.causal_limits(12, 4, 0)[1].max() == 0


def packed(lengths, ratio):
    """Limits token by token: (own document's first group, groups of it finished so far)."""
    rows, first = [], 0
    for length in lengths:
        done = 0
        for t in range(length):
            done += (t + 1) % ratio == 0
            rows.append((first, first + done))
        first += done
    return rows


@pytest.mark.parametrize("ratio", [1, 3, 4, 128])
@pytest.mark.parametrize("lengths", [[7], [4, 4], [5, 3, 9], [1, 0, 2, 13, 0], [3, 3, 3], [0], [129, 5, 260]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_limits_by_brute_force(lengths, ratio, dtype):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    start, end = visibility.packed_limits(cu_seqlens, ratio)
    assert list(zip(start.tolist(), end.tolist(), strict=True)) == packed(lengths, ratio)
    assert start.dtype == end.dtype == torch.int32


def test_packed_documents_share_no_group():
    start, end = visibility.packed_limits(torch.tensor([0, 9, 20, 22, 40]), 4)
    documents = [(start[a:b].min().item(), end[a:b].max().item()) for a, b in ((0, 9), (9, 20), (20, 22), (22, 40))]
    assert documents == [(0, 2), (2, 4), (4, 4), (4, 8)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_batched_limits_expand_and_clamp(dtype):
    start = torch.tensor([-3, 0, 2, 5, 9], dtype=dtype)
    end = torch.tensor([2, -1, 1, 99, 3], dtype=dtype)
    got = visibility.batched_limits(start, end, 3, 5, 6)
    for tensor in got:
        assert tensor.shape == (3, 5) and tensor.dtype == torch.int32 and tensor.is_contiguous()
    assert got[0][2].tolist() == [0, 0, 2, 5, 6]
    assert got[1][0].tolist() == [2, 0, 2, 6, 6]


def test_batched_limits_survive_values_beyond_int32():
    start, end = visibility.batched_limits(torch.tensor([0]), torch.tensor([2**33 + 1]), 1, 1, 7)
    assert (start.item(), end.item()) == (0, 7)


def test_batched_limits_keep_a_row_per_sample():
    end = torch.tensor([[1, 2], [3, 4]])
    assert visibility.batched_limits(torch.zeros_like(end), end, 2, 2, 9)[1].tolist() == end.tolist()


def test_visible_and_valid_slots_agree_with_comparisons():
    start, end = torch.tensor([[0, 1, 3]]), torch.tensor([[0, 4, 5]])
    mask = visibility.visible(start, end, 6)
    assert mask.tolist() == [[[s <= g < e for g in range(6)] for s, e in ((0, 0), (1, 4), (3, 5))]]
    indices = torch.tensor([[[-1, 0, 5], [0, 1, 4], [4, -7, 2**40]]])
    assert visibility.valid_slots(indices, start, end).tolist() == [
        [[False, False, False], [False, True, False], [True, False, False]]
    ]


@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_window_holds_the_last_tokens_and_itself(window):
    queries, keys = torch.arange(4, 11), torch.arange(2, 11)
    expected = [[max(0, t - window + 1) <= j <= t for j in keys.tolist()] for t in queries.tolist()]
    assert visibility.window_mask(queries, keys, window).tolist() == expected
