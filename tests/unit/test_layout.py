"""Which rows a rank holds, and what packed documents let each row see: by counting."""

import itertools

import pytest
import torch

from nemo_v4_indexer import visibility
from nemo_v4_indexer.visibility import Documents, Layout


def rows_of(layout, rank):
    return [row for run in layout.runs[rank] for row in range(*run)]


@pytest.mark.parametrize("make", [visibility.contiguous, visibility.zigzag])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_row_has_one_owner(make, size):
    rows = 24
    layout = make(rows, size, 0)
    everyone = [rows_of(layout, rank) for rank in range(size)]
    assert sorted(itertools.chain(*everyone)) == list(range(rows))
    assert len({len(own) for own in everyone}) == 1
    for rank in range(size):
        own = make(rows, size, rank)
        assert own.positions().tolist() == everyone[rank]
        assert [own.place(row) for row in everyone[rank]] == list(range(rows // size))
    assert make(rows, size, 0).place(rows) is None


def test_zigzag_is_megatrons():
    """Local row 4 of 16 rows over two ranks is row 12 of the sequence, which sees three groups."""
    layout = visibility.zigzag(16, 2, 0)
    assert layout.positions().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    _, end = visibility.row_limits(layout.positions(), 4, 4)
    assert end[4] == 3


@pytest.mark.parametrize("outer", [visibility.contiguous, visibility.zigzag])
@pytest.mark.parametrize("inner", [visibility.contiguous, visibility.zigzag])
def test_composed_layouts_divide_each_ranks_rows(outer, inner):
    whole = outer(48, 2, 0)
    for rank in range(6):
        layout = whole.compose(inner(24, 3, 0), rank)
        held = rows_of(whole, rank // 3)
        assert layout.positions().tolist() == [held[row] for row in rows_of(inner(24, 3, 0), rank % 3)]


@pytest.mark.parametrize(
    "layout", [visibility.zigzag(24, 3, 0), visibility.zigzag(24, 2, 0).compose(visibility.contiguous(12, 3, 0), 0)]
)
def test_places_put_gathered_rows_in_order(layout):
    gathered = torch.tensor([row for rank in range(layout.size) for row in rows_of(layout, rank)])
    ordered = torch.cat([gathered[first:last] for first, last in layout.places()])
    assert ordered.tolist() == list(range(24))


@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_causal_work_counts_pairs(ratio):
    layout = visibility.zigzag(24, 2, 0)
    counted = [sum((row + 1) // ratio for row in rows_of(layout, rank)) for rank in range(2)]
    assert visibility.causal_work(layout, ratio) == counted


def test_zigzag_evens_causal_work():
    even, consecutive = (
        visibility.causal_work(make(4096, 8, 0), 4) for make in (visibility.zigzag, visibility.contiguous)
    )
    assert max(even) < 1.01 * sum(even) / 8
    assert max(consecutive) > 1.8 * sum(consecutive) / 8


LENGTHS = [[8], [5, 3, 9], [1, 1, 12, 2], [0, 4, 0, 7], [3, 3]]


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("padding", [0, 6])
def test_documents_by_counting(lengths, ratio, padding):
    rows = sum(lengths) + padding
    documents = Documents(torch.tensor([0, *lengths]).cumsum(0).int(), rows)
    lengths = [*lengths, padding]
    first, start, end, position, starts, group_rows, place = 0, [], [], [], [], [], []
    groups = 0
    for length in lengths:
        for t in range(length):
            starts.append(first)
            position.append(t)
            start.append(groups)
            end.append(groups + (t + 1) // ratio)
        for g in range(length // ratio):
            group_rows.append(first + g * ratio)
            place.append(g)
        groups += length // ratio
        first += length
    assert documents.positions().tolist() == position
    assert documents.starts().tolist() == starts
    found = documents.limits(ratio)
    assert [f.tolist() for f in found] == [start, end] and all(f.dtype == torch.int32 for f in found)
    found = [f.tolist() for f in documents.group_rows(ratio)]
    assert len(found[0]) == rows // ratio
    assert [f[:groups] for f in found] == [group_rows, place]
    assert all(0 <= row <= max(0, rows - ratio) for row in found[0])


def test_window_stops_at_the_document():
    rows = torch.arange(6)
    seen = visibility.window_mask(rows, rows, 3, torch.tensor([0, 0, 2, 2, 2, 2]))
    assert [torch.nonzero(row).flatten().tolist() for row in seen] == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [3, 4, 5]]


def test_layout_of_one_rank():
    assert Layout((((0, 5),),)).positions().tolist() == [0, 1, 2, 3, 4]
