"""Gradients of the selected scores on Hopper: which kernels run, over which chunks, in which workspace.

Letters: S query, B batch, H heads, D dim, G keys, K top-k width.

Two ways. Sparse: time and memory per selected pair, dk added in L2 in an order that varies. Dense: every pair of a
query and a key tile is multiplied, no atomics, bitwise repeatable; faster where the selection is dense.
"""

import contextlib
import functools
import math
from dataclasses import dataclass

import torch

from . import runtime
from .forward import tma_view

DENSE_KEYS_PER_SLOT = {512: 5.4, 1024: 5.4, 2048: 5.4}
"""Measured on an H200 (H=64, D=128, causal rows): the dense way is faster up to this many keys per slot of top-k."""

KEY_TILE = 256  # keys of one tile of the dense way
SMS = 132  # multiprocessors of the device that the plan assumes where there is none
_SPARSE_QUERIES = 1024  # below this the dense way's extra launches cost more than they save


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """What `backward` launches.

    way: "sparse" or "dense". slots: capacity that the kernels are built for. The rest concerns the dense way:
    queries, batches: size of one chunk. items: launched work items. workspace: bytes.
    """

    way: str
    slots: int
    queries: int = 0
    batches: int = 0
    items: int = 0
    workspace: int = 0


def slot_capacity(topk: int) -> int:
    """Slots that a kernel is built for: a power of two and at least one tile of 64, so that few kernels are built."""
    return max(64, 1 << (topk - 1).bit_length())


def prefers_dense(queries: int, groups: int, topk: int) -> bool:
    """Whether the dense way is the faster one, by the measured table (nearest top-k at or below)."""
    widths = [k for k in DENSE_KEYS_PER_SLOT if k <= topk] or [min(DENSE_KEYS_PER_SLOT)]
    return queries >= _SPARSE_QUERIES and groups <= DENSE_KEYS_PER_SLOT[max(widths)] * topk


def _dense_bytes(queries: int, batches: int, tiles: int, items: int, head_blocks: int, dim: int, topk: int) -> int:
    width = -(-topk // 64) * 64
    per_query = width * 8 * (1 + head_blocks) + (tiles + 1) * 4
    return batches * queries * per_query + items * (KEY_TILE * dim * 4 + 20) + batches * tiles * 12 + 4


def plan_backward(
    queries: int, batch: int, groups: int, heads: int, dim: int, topk: int, deterministic: bool, workspace_bytes: int
) -> BackwardPlan:
    """Choose the way and its chunks from shapes alone.

    The dense way keeps to workspace_bytes by chunks of the batch, then of the queries; it needs 64 queries' worth and
    one partial result per tile of 256 keys at least, and takes that much where the budget is smaller.
    """
    slots = slot_capacity(topk)
    if not deterministic and not prefers_dense(queries, groups, topk):
        return BackwardPlan("sparse", slots)
    tiles = -(-groups // KEY_TILE)
    head_blocks = -(-heads // 64)

    def items(batches, length):
        runs = -(-length // 8) + 1  # a run is at least 8 queries
        return min(batches * tiles + 2 * SMS, batches * tiles * runs)

    def size(batches, length):
        return _dense_bytes(length, batches, tiles, items(batches, length), head_blocks, dim, topk)

    batches = batch
    while batches > 1 and size(batches, min(queries, 4096)) > workspace_bytes:
        batches = -(-batches // 2)
    length = queries
    while length > 64 and size(batches, length) > workspace_bytes:
        length = max(64, -(-length // 2 // 64) * 64) if length > 128 else 64
    if length < queries:  # the halving stops short: take what fits
        while length + 64 < queries and size(batches, length + 64) <= workspace_bytes:
            length += 64
        chunks = -(-queries // length)
        length = min(length, -(-queries // chunks // 64) * 64)
    return BackwardPlan("dense", slots, length, batches, items(batches, length), size(batches, length))


@functools.cache
def kernel(name: str, *arguments):
    """A compiled program: ("sparse", slots, H, D, precise), ("query_side", slots, H, D), ("key_side", H, D, precise),
    ("plan",) or ("reduce", D)."""
    runtime.load_tilelang()
    from . import bwd_common, bwd_plan, score_bwd_dense, score_bwd_sparse

    build = {
        "sparse": score_bwd_sparse.build_sparse,
        "query_side": score_bwd_dense.build_query_side,
        "key_side": score_bwd_dense.build_key_side,
        "plan": bwd_plan.build_plan,
        "reduce": bwd_plan.build_reduce,
    }[name]
    return runtime.compile_kernel(build(*arguments), bwd_common.PASS_CONFIGS)


def prebuild(heads: int, dim: int, topk: int) -> int:
    """Build every kernel that `backward` can use for this K; the number of kernels. Needs no GPU."""
    slots = slot_capacity(topk)
    names = [("query_side", slots, heads, dim), ("plan",), ("reduce", dim)]
    for precise in (False, True):
        names += [("sparse", slots, heads, dim, precise), ("key_side", heads, dim, precise)]
    for name in names:
        kernel(*name)
    return len(names)


@functools.cache
def spread(n: int) -> int:
    """A step near 0.618 n without a common divisor: consecutive multiples of it modulo n lie far apart."""
    step = max(1, int(n * 0.6180339887))
    while math.gcd(step, n) != 1:
        step += 1
    return step


def order_selection(indices, grad, groups, *, merge, workspace_bytes):
    """Put a replayed selection in the order that `backward` requires; on the device, without a host sync.

    Args:
        indices: int32 [B, S, K], any order, duplicates allowed; an index outside [0, groups) is an empty slot.
        grad: [B, S, K], any strides; ignored in empty slots.
        merge: give the gradient of equal indices to the first of them, summed in a fixed order, and zero to the rest.

    Returns:
        indices int32 [B, S, K], ascending, -1 last; grad fp32 [B, S, K] in that order, 0 in empty slots.
    """
    b, s, k = indices.shape
    out_indices = torch.empty((b, s, k), dtype=torch.int32, device=indices.device)
    out_grad = torch.empty((b, s, k), dtype=torch.float32, device=indices.device)
    rows = max(1, workspace_bytes // (b * k * 48))
    last = torch.iinfo(torch.int32).max
    for lo in range(0, s, rows):
        part = indices[:, lo : lo + rows]
        keys, order = part.masked_fill((part < 0) | (part >= groups), last).sort(dim=-1, stable=True)
        empty = keys == last
        g = grad[:, lo : lo + rows].float().gather(-1, order).masked_fill_(empty, 0)
        if merge:
            step = 1
            while step < k:  # suffix sums within runs of equal indices
                same = keys[..., step:] == keys[..., :-step]
                g[..., :-step] += g[..., step:].masked_fill(~same, 0)
                step *= 2
            g[..., 1:].masked_fill_(keys[..., 1:] == keys[..., :-1], 0)
        out_indices[:, lo : lo + rows] = keys.masked_fill_(empty, -1)
        out_grad[:, lo : lo + rows] = g
    return out_indices, out_grad


def backward(
    q,
    k,
    w,
    indices,
    grad,
    *,
    deterministic=False,
    precise=False,
    ordered=True,
    workspace_bytes=256 << 20,
    dk_dtype=None,
):
    """Gradients of the selected scores; nothing is copied from the device, so a CUDA graph can capture it.

    With m_jh = grad_j 1[q_h.k_j > 0]:  dq_h = w_h sum_j m_jh k_j,  dw_h = sum_j grad_j relu(q_h.k_j),
    dk_j = sum_h w_h m_jh q_h. dk and dw are accumulated in fp32. Sums over selected pairs round one factor,
    grad_j w_h, to bf16; precise splits it in two bf16 parts for dk.

    Args:
        q: bf16 [S, B, H, D]; k: bf16 [G, B, D]; views are read in place where rows are contiguous and strides are
            multiples of 16 bytes. w: [S, B, H] fp32, any strides.
        indices: int32 [B, S, K]. ordered: they ascend, without duplicates, and -1 fills the end of a row, as `forward`
            gives them; not ordered (a replay): any order, duplicates, -1 or keys out of range anywhere.
        grad: [B, S, K] fp32, any strides, zero included. Values in empty slots are ignored, NaN and inf included.
        deterministic: bitwise repeatable results; costs time where the selection is sparse.
        precise: dk at about 1e-5 relative error before it is rounded to dk_dtype.
        workspace_bytes: budget of the temporary tensors besides fp32 dk, see `plan_backward`.
        dk_dtype: dtype of dk, by default k's; torch.float32 gives the accumulators.

    Returns:
        dq bf16 [S, B, H, D], dk [G, B, D], dw in w's dtype [S, B, H].
    """
    s, b, h, d = q.shape
    groups, topk = k.shape[0], indices.shape[-1]
    dk_dtype = dk_dtype or k.dtype
    dq = torch.empty((s, b, h, d), dtype=q.dtype, device=q.device)
    dw = torch.empty((s, b, h), dtype=torch.float32, device=q.device)
    if min(s, b, groups, topk) == 0:
        return dq.zero_(), torch.zeros((groups, b, d), dtype=dk_dtype, device=q.device), dw.zero_().to(w.dtype)
    plan = plan_backward(s, b, groups, h, d, topk, deterministic, workspace_bytes)
    if not ordered:
        indices, grad = order_selection(
            indices, grad, groups, merge=plan.way == "dense", workspace_bytes=workspace_bytes
        )
    q, k = tma_view(q), tma_view(k)
    indices = indices if indices.stride(-1) == 1 or topk == 1 else indices.contiguous()
    run = _sparse if plan.way == "sparse" else _dense
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        dk = run(plan, (q, k, w.float(), indices, grad.float()), dq, dw, precise)
    return dq, dk.to(dk_dtype), dw.to(w.dtype)


def _sparse(plan, inputs, dq, dw, precise):
    q, k, *_ = inputs
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    kernel("sparse", plan.slots, *q.shape[2:], precise)(*inputs, dq, dw, dk, spread(q.shape[0]))
    return dk


def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SMS


def _dense(plan, inputs, dq, dw, precise):
    q, k, w, indices, grad = inputs
    s, b, h, d = q.shape
    groups, topk = k.shape[0], indices.shape[-1]
    tiles, width, head_blocks = -(-groups // KEY_TILE), -(-topk // 64) * 64, -(-h // 64)
    new = functools.partial(torch.empty, device=q.device)
    dk = new(k.shape, dtype=torch.float32)
    slots = new((plan.batches * plan.queries, width, 2), dtype=torch.int32)
    bits = new((head_blocks * plan.batches * plan.queries, width, 8), dtype=torch.uint8)
    starts = new((plan.batches * plan.queries, tiles + 1), dtype=torch.int32)
    items = new((plan.items, 5), dtype=torch.int32)
    first = new((plan.batches * tiles + 1,), dtype=torch.int32)
    part = new((plan.items, KEY_TILE, d), dtype=torch.float32)
    sms = _multiprocessors(q.device)
    for b0 in range(0, b, plan.batches):
        batch = slice(b0, min(b, b0 + plan.batches))
        nb = batch.stop - b0
        for lo in range(0, s, plan.queries):
            rows = slice(lo, min(s, lo + plan.queries))
            n = nb * (rows.stop - lo)
            qc, wc, ic, gc = q[rows, batch], w[rows, batch], indices[batch, rows], grad[batch, rows]
            kc, span = k[:, batch], torch.zeros((2, nb, tiles), dtype=torch.int32, device=q.device)
            notes = (slots[:n], bits[: head_blocks * n], starts[:n])
            kernel("query_side", plan.slots, h, d)(qc, kc, wc, ic, gc, dq[rows, batch], dw[rows, batch], *notes, span)
            kernel("plan")(span, items, first[: nb * tiles + 1], rows.stop - lo, sms)
            kernel("key_side", h, d, precise)(qc, wc, *notes, items, part)
            kernel("reduce", d)(part, first[: nb * tiles + 1], dk[:, batch], int(lo > 0))
    return dk
