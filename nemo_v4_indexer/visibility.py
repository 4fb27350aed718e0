"""Which compressed keys a query row may see, and which rows of a sequence each rank holds: one place for the causal,
compressed, packed and context parallel rules.

S query rows, B batch, G compressed keys (groups), r compress ratio. Positions are 0-based and global.

Group g holds tokens r*g .. r*g + r - 1, so the query at position t sees the groups g < (t + 1) // r: a group's last
token sees its own group, and t < r - 1 sees nothing. Limits are data, not a formula in a kernel: every row carries a
half-open range [start, end) of key indices.
"""

from dataclasses import dataclass

import torch


def num_groups(length, compress_ratio):
    """Compressed keys of a sequence of `length` tokens: a tail shorter than the ratio is dropped."""
    return length // compress_ratio


def row_limits(positions, compress_ratio, groups):
    """Limits of rows at the given global positions of one causal sequence.

    Args:
        positions: [S] or [B, S], int. Global position of every row (any order: context parallel rows too).
        compress_ratio: tokens per group, >= 1.
        groups: number of keys G; limits never pass it.

    Returns:
        start, end: int32, shaped as positions; row i sees the keys start[i] <= g < end[i].
    """
    end = torch.div(positions + 1, compress_ratio, rounding_mode="floor").clamp(max=groups).to(torch.int32)
    return torch.zeros_like(end), end


def causal_limits(rows, compress_ratio, groups, device=None):
    """`row_limits` of the rows 0 .. rows - 1."""
    return row_limits(torch.arange(rows, device=device), compress_ratio, groups)


@dataclass(frozen=True)
class Documents:
    """Documents packed one after another in a row sequence; each is compressed, and seen, on its own.

    A document's tail shorter than the ratio yields no group. Nothing here reads a value back from the device.
    cu_seqlens: int [N + 1]. Document n holds the rows cu_seqlens[n] .. cu_seqlens[n + 1] - 1; rows past the last one
        (padding) count as one more document.
    rows: S, rows in all.
    """

    cu_seqlens: torch.Tensor
    rows: int

    def _bounds(self):
        cu = self.cu_seqlens.long()
        return torch.cat([cu, cu.new_full((1,), self.rows)])

    def starts(self):
        """First row of every row's document: int64 [S]."""
        bounds = self._bounds()
        rows = torch.arange(self.rows, device=bounds.device)
        return bounds[torch.searchsorted(bounds[:-1], rows, right=True) - 1]

    def positions(self):
        """Position of every row in its document: int64 [S]."""
        return torch.arange(self.rows, device=self.cu_seqlens.device) - self.starts()

    def _first_groups(self, compress_ratio):
        """Number of groups before every document, and in all: int64 [N + 2]."""
        groups = torch.div(self._bounds().diff(), compress_ratio, rounding_mode="floor")
        return torch.cat([groups.new_zeros(1), groups.cumsum(0)])

    def limits(self, compress_ratio):
        """Row limits (start, end), int32 [S], in the numbering of the documents' groups laid end to end."""
        bounds = self._bounds()
        rows = torch.arange(self.rows, device=bounds.device)
        document = torch.searchsorted(bounds[:-1], rows, right=True) - 1
        start = self._first_groups(compress_ratio)[document]
        end = start + torch.div(rows - bounds[document] + 1, compress_ratio, rounding_mode="floor")
        return start.to(torch.int32), end.to(torch.int32)

    def group_rows(self, compress_ratio):
        """First row of every group, and its place in its document counted in groups: int64 [S // r] each.

        Where documents have fewer groups in all, the last ones name rows that no limit lets anyone see.
        """
        first = self._first_groups(compress_ratio)
        group = torch.arange(num_groups(self.rows, compress_ratio), device=first.device)
        document = (torch.searchsorted(first, group, right=True) - 1).clamp(max=len(first) - 2)
        place = group - first[document]
        row = self._bounds()[document] + compress_ratio * place
        return row.clamp(max=max(0, self.rows - compress_ratio)), place


def packed_limits(cu_seqlens, compress_ratio, rows=None):
    """Limits of the rows of packed documents, see `Documents`; rows: default cu_seqlens[-1], then read back."""
    return Documents(cu_seqlens, int(cu_seqlens[-1]) if rows is None else rows).limits(compress_ratio)


@dataclass(frozen=True)
class Layout:
    """Which rows of a sequence every rank of a group holds.

    runs: for every rank, its runs (first, last + 1) of consecutive rows, in the order the rank stores them.
    rank: this rank.
    """

    runs: tuple[tuple[tuple[int, int], ...], ...]
    rank: int = 0

    @property
    def own(self):
        """Runs of this rank."""
        return self.runs[self.rank]

    @property
    def size(self):
        return len(self.runs)

    def positions(self, device=None):
        """Row numbers this rank holds, in its order: int64 [L]."""
        return torch.cat([torch.arange(*run, device=device) for run in self.own])

    def place(self, row):
        """Where this rank stores row number `row`; None if it does not hold it."""
        place = 0
        for start, stop in self.own:
            if start <= row < stop:
                return place + row - start
            place += stop - start
        return None

    def places(self, counts=None):
        """Runs of the gathered rows (rank after rank) in sequence order: list of (first, last + 1).

        counts: what every run of every rank yields, if not its rows; nested as `runs`.
        """
        counts = counts or [[stop - start for start, stop in runs] for runs in self.runs]
        found, place = [], 0
        for runs, lengths in zip(self.runs, counts, strict=True):
            for (start, _), length in zip(runs, lengths, strict=True):
                found.append((start, place, place + length))
                place += length
        return [(first, last) for _, first, last in sorted(found)]

    def compose(self, share, rank):
        """Layout over a larger group, in which the rows of every rank here are divided by `share`.

        share: Layout of row numbers 0 .. L - 1 over the inner group, whose rank is the faster one.
        rank: this rank's number in the larger group.
        """
        return Layout(tuple(_cut(runs, inner) for runs in self.runs for inner in share.runs), rank)


def _cut(runs, numbers):
    """Runs of positions that rows `numbers` (runs of row numbers) of a rank with `runs` have."""
    found = []
    for first, last in numbers:
        place = 0
        for start, stop in runs:
            lo, hi = max(first, place), min(last, place + stop - start)
            if lo < hi:
                found.append((start + lo - place, start + hi - place))
            place += stop - start
    return tuple(found)


def rows_before(compress_ratio, overlap):
    """Most rows before a run of rows that the first group it ends reads; overlap: groups pool the previous one too."""
    return (2 if overlap else 1) * compress_ratio - 1


def overlaps(held, wanted):
    """Spans that the runs of one rank share with those another wants, in sequence order: list of (first, last + 1)."""
    spans = [(max(a, c), min(b, d)) for a, b in held for c, d in wanted]
    return sorted(span for span in spans if span[0] < span[1])


def contiguous(rows, size, rank):
    """Layout of rows divided in rank order; `rows` must divide by size."""
    share = rows // size
    return Layout(tuple(((i * share, (i + 1) * share),) for i in range(size)), rank)


def zigzag(rows, size, rank):
    """Layout of 2 * size equal chunks, of which rank i holds the i-th and the i-th from the end: causal work is even.

    It is the layout of Megatron's context parallelism. `rows` must divide by 2 * size.
    """
    if size == 1:
        return contiguous(rows, 1, rank)
    chunk = rows // (2 * size)
    return Layout(
        tuple(((i * chunk, (i + 1) * chunk), (rows - (i + 1) * chunk, rows - i * chunk)) for i in range(size)), rank
    )


def causal_work(layout, compress_ratio):
    """Scored pairs of every rank of a layout: list of int."""

    def before(row):  # pairs of the rows 0 .. row - 1
        groups = row // compress_ratio
        return compress_ratio * groups * (groups - 1) // 2 + groups * (row - groups * compress_ratio + 1)

    return [sum(before(stop) - before(start) for start, stop in runs) for runs in layout.runs]


def batched_limits(start, end, batch, rows, groups):
    """Limits as the kernels read them: int32, contiguous [B, S], within [0, groups], never start > end."""
    start = start.expand(batch, rows).clamp(0, groups).to(torch.int32)
    end = torch.maximum(end.expand(batch, rows).clamp(max=groups).to(torch.int32), start)
    return start.contiguous(), end.contiguous()


def visible(start, end, groups):
    """Boolean mask [..., groups] of the keys inside [start, end)."""
    keys = torch.arange(groups, device=start.device, dtype=torch.int32)
    return (keys >= start[..., None]) & (keys < end[..., None])


def valid_slots(indices, start, end):
    """Boolean mask, shaped as indices [..., K]: slots whose key the row may see (so neither -1 nor out of range)."""
    return (indices >= start[..., None]) & (indices < end[..., None])


def window_mask(query_positions, key_positions, window, first_keys=None):
    """Boolean mask [..., Q, T]: token keys of the sliding window, max(first, t - window + 1) .. t.

    query_positions: int [..., Q], key_positions: int [..., T]; negative ones stand for nothing.
    first_keys: int [..., Q], the first token each query may see (its document's); default 0.
    """
    key = key_positions[..., None, :]
    distance = query_positions[..., None] - key
    first = 0 if first_keys is None else first_keys[..., None]
    return (distance >= 0) & (distance < window) & (key >= first)
