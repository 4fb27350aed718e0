"""Which compressed keys a query row may see: the one place for causal, compressed and packed row limits.

S query rows, B batch, G compressed keys (groups), r compress ratio. Positions are 0-based and global.

Group g holds tokens r*g .. r*g + r - 1, so the query at position t sees the groups g < (t + 1) // r: a group's last
token sees its own group, and t < r - 1 sees nothing. Limits are data, not a formula in a kernel: every row carries a
half-open range [start, end) of key indices.
"""

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


def packed_limits(cu_seqlens, compress_ratio):
    """Limits of rows of documents packed one after another; each document is compressed on its own.

    Args:
        cu_seqlens: [N + 1], int. Document n holds the rows cu_seqlens[n] .. cu_seqlens[n + 1] - 1.
        compress_ratio: tokens per group, >= 1. A document's tail shorter than this yields no group.

    Returns:
        start, end: int32 [S] with S = cu_seqlens[-1], in the numbering of the documents' groups laid end to end.
    """
    lengths = cu_seqlens.diff()
    groups = torch.div(lengths, compress_ratio, rounding_mode="floor")
    first = groups.cumsum(0) - groups
    document = torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)
    local = torch.arange(len(document), device=cu_seqlens.device) - cu_seqlens[document]
    start = first[document]
    end = start + torch.div(local + 1, compress_ratio, rounding_mode="floor")
    return start.to(torch.int32), end.to(torch.int32)


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


def window_mask(query_positions, key_positions, window):
    """Boolean mask [Q, T]: token keys of the sliding window, max(0, t - window + 1) .. t."""
    distance = query_positions[:, None] - key_positions
    return (distance >= 0) & (distance < window)
