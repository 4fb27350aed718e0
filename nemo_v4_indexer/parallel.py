"""Named collectives over an explicit process group; a group of one rank (or None) moves nothing.

Rows are the leading dimension (the sequence). Where they are sharded, rank i of a group holds i * L .. (i + 1) * L - 1.
"""

import torch
import torch.distributed as dist


def group_size(group):
    return 1 if group is None else group.size()


def group_rank(group):
    return 0 if group is None else group.rank()


def _all_gather(x, group):
    x = x.contiguous()
    out = x.new_empty(group_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def _reduce_scatter(x, group):
    x = x.contiguous()
    out = x.new_empty(x.shape[0] // group_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.group), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _ExchangeRows.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def gather_rows(x, group):
    """Every rank's rows, in rank order: [L, ...] -> [size * L, ...]. Gradient: summed over ranks, own rows kept."""
    return x if group_size(group) == 1 else _GatherRows.apply(x, group)


def sum_gradient(x, group):
    """x itself, where every rank holds the same x and uses it differently. Gradient: summed over ranks."""
    return x if group_size(group) == 1 else _SumGradient.apply(x, group)


def exchange_rows(x, sent, received, group):
    """Send the first sent[0] rows to rank 0 and so on: [sum(sent), ...] -> [sum(received), ...], by source rank.

    Gradient: returns to the rank each row came from.
    """
    return _ExchangeRows.apply(x, sent, received, group)


def own_rows(x, group):
    """This rank's share of rows that every rank holds: [size * L, ...] -> [L, ...]."""
    rows = x.shape[0] // group_size(group)
    return x[group_rank(group) * rows : (group_rank(group) + 1) * rows]


def gather_uneven_rows(x, counts, group):
    """As `gather_rows` where rank i holds counts[i] rows, which every rank knows: [L, ...] -> [sum(counts), ...]."""
    if group_size(group) == 1:
        return x
    widest = max(counts)
    if min(counts) == widest:
        return gather_rows(x, group)
    padded = torch.cat([x, x.new_zeros(widest - x.shape[0], *x.shape[1:])])
    gathered = gather_rows(padded, group)
    return torch.cat([gathered[i * widest : i * widest + n] for i, n in enumerate(counts)])


def sum_to_owners(x, group):
    """Sum over ranks of values each rank has for all ranks' rows: [B, size * L, ...] -> [B, L, ...]. No gradient."""
    if group_size(group) == 1:
        return x
    return _reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def sum_over_ranks(x, group):
    """Sum over ranks, the same on each; a new tensor. No gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if group_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x
