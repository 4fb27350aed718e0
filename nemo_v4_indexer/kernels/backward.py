"""Gradients of the selected scores on Hopper: which kernels run, over which chunks, in which workspace.

Letters: S query, B batch, H heads, D dim, G keys, K top-k width.

Two ways. Sparse: time and memory per selected pair, dk added in L2 in an order that varies. Dense: every pair of a
query and a key tile is multiplied, no atomics, bitwise repeatable; faster where the selection is dense.
"""

import bisect
import contextlib
import functools
import math
from dataclasses import dataclass

import torch

from . import runtime
from .forward import tma_view

DENSE_KEYS_PER_SLOT = {32: (0, 0), 64: (2.5, 2), 128: (7, 5)}
"""Head dim: up to how many keys per slot of top-k the dense way is the faster one, with up to 32 heads and with more.
Measured on an H200 with causal rows, K = 512, 1024 and 2048, ratios 1 and 4. A narrow D makes the sparse adds cheap."""

KEY_TILE = 256  # keys of one tile of the dense way
SMS = 132  # multiprocessors of the device that the plan assumes where there is none
# Below these the dense way's five launches cost more than they save.
_DENSE_QUERIES = 2049
_DENSE_SLOTS = 256


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
    """Slots that a kernel is built for: a power of two and at least 128, so that few kernels are built."""
    return max(128, 1 << (topk - 1).bit_length())


def prefers_dense(queries: int, groups: int, heads: int, dim: int, topk: int, precise: bool) -> bool:
    """Whether the dense way is the faster one, by the measured table. A precise one is not: it has more products."""
    if precise or queries < _DENSE_QUERIES or topk < _DENSE_SLOTS:
        return False
    few_heads, more = DENSE_KEYS_PER_SLOT[dim]
    return groups <= (few_heads if heads <= 32 else more) * topk


def _dense_bytes(queries: int, batches: int, tiles: int, items: int, head_blocks: int, dim: int, topk: int) -> int:
    width = -(-topk // 64) * 64
    per_query = width * 8 * (1 + head_blocks) + (tiles + 1) * 4
    return batches * queries * per_query + items * (KEY_TILE * dim * 4 + 20) + batches * tiles * 12 + 4


@functools.lru_cache(maxsize=4096)
def plan_backward(
    queries: int, batch: int, groups: int, heads: int, dim: int, topk: int, dense: bool, workspace_bytes: int
) -> BackwardPlan:
    """The launches of one way, from shapes alone.

    The dense way keeps to workspace_bytes by chunks of the batch, then of the queries; it needs 64 queries' worth and
    one partial result per tile of 256 keys at least, and takes that much where the budget is smaller.
    """
    slots = slot_capacity(topk)
    if not dense:
        return BackwardPlan("sparse", slots)
    tiles = -(-groups // KEY_TILE)
    head_blocks = -(-heads // 64)

    def items(batches, length):
        runs = -(-length // 8) + 1  # a run is at least 8 queries
        return min(batches * tiles + 2 * SMS, batches * tiles * runs)

    def size(batches, length):
        return _dense_bytes(length, batches, tiles, items(batches, length), head_blocks, dim, topk)

    batches, length = batch, queries
    while batches > 1 and size(batches, min(queries, 4096)) > workspace_bytes:
        batches = -(-batches // 2)
    if size(batches, queries) > workspace_bytes:
        units = range(1, -(-queries // 64))  # chunks of whole 64 queries; how many fit grows with the budget
        fitting = bisect.bisect_right(units, workspace_bytes, key=lambda n: size(batches, 64 * n))
        chunks = -(-queries // (64 * max(1, fitting)))
        length = min(queries, -(-queries // (64 * chunks)) * 64)  # even chunks
    return BackwardPlan("dense", slots, length, batches, items(batches, length), size(batches, length))


def program(name: str, *arguments):
    """The TileLang program ("sparse", slots, H, D, precise), ("query_side", slots, H, D), ("key_side", H, D, precise),
    ("plan",) or ("reduce", D)."""
    runtime.load_tilelang()
    from . import bwd_plan, score_bwd_dense, score_bwd_sparse

    builders = {
        "sparse": score_bwd_sparse.build_sparse,
        "query_side": score_bwd_dense.build_query_side,
        "key_side": score_bwd_dense.build_key_side,
        "plan": bwd_plan.build_plan,
        "reduce": bwd_plan.build_reduce,
    }
    return builders[name](*arguments)


@functools.cache
def kernel(name: str, *arguments):
    """`program`, compiled."""
    built = program(name, *arguments)
    from . import bwd_common

    return runtime.compile_kernel(built, bwd_common.PASS_CONFIGS)


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
    dense = deterministic or prefers_dense(s, groups, h, d, topk, precise)
    plan = plan_backward(s, b, groups, h, d, topk, dense, workspace_bytes)
    if not ordered:
        indices, grad = order_selection(indices, grad, groups, merge=dense, workspace_bytes=workspace_bytes)
    q, k = tma_view(q), tma_view(k)
    indices = indices if indices.stride(-1) == 1 or topk == 1 else indices.contiguous()
    run = _dense if dense else _sparse
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        dk = run(plan, (q, k, w.float(), indices, grad.float()), dq, dw, precise)
    return dq, dk.to(dk_dtype), dw.to(w.dtype)


def _sparse(plan, inputs, dq, dw, precise):
    q, k, *_ = inputs
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    kernel("sparse", plan.slots, *q.shape[2:], precise)(*inputs, dq, dw, dk, spread(q.shape[0]))
    return dk


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SMS


def _cut(tensor, dim0, dim1):
    """tensor[dim0, dim1] for ranges (first, past); the tensor itself where they cover it, which costs no view."""
    for dim, (first, past) in enumerate((dim0, dim1)):
        if past - first != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first, past - first)
    return tensor


def _chunks(length, size):
    return [(lo, min(length, lo + size)) for lo in range(0, length, size)]


def _dense(plan, inputs, dq, dw, precise):
    q, k, w, indices, grad = inputs
    s, b, h, d = q.shape
    groups, topk = k.shape[0], indices.shape[-1]
    tiles, width, head_blocks = -(-groups // KEY_TILE), -(-topk // 64) * 64, -(-h // 64)
    most, device, i32 = plan.batches * plan.queries, q.device, torch.int32
    dk = torch.empty(k.shape, dtype=torch.float32, device=device)
    slots = torch.empty((most, width, 2), dtype=i32, device=device)
    bits = torch.empty((head_blocks * most, width, 8), dtype=torch.uint8, device=device)
    starts = torch.empty((most, tiles + 1), dtype=i32, device=device)
    items = torch.empty((plan.items, 5), dtype=i32, device=device)
    first = torch.empty((plan.batches * tiles + 1,), dtype=i32, device=device)
    part = torch.empty((plan.items, KEY_TILE, d), dtype=torch.float32, device=device)
    for batch in _chunks(b, plan.batches):
        nb = batch[1] - batch[0]
        keys, dk_part = _cut(k, (0, groups), batch), _cut(dk, (0, groups), batch)
        first_part = first[: nb * tiles + 1]
        for rows in _chunks(s, plan.queries):
            n = nb * (rows[1] - rows[0])
            q_part, w_part, dq_part, dw_part = (_cut(t, rows, batch) for t in (q, w, dq, dw))
            picked = _cut(indices, batch, rows), _cut(grad, batch, rows)
            notes = (slots, bits, starts) if n == most else (slots[:n], bits[: head_blocks * n], starts[:n])
            span = torch.zeros((2, nb, tiles), dtype=i32, device=device)
            query_side = kernel("query_side", plan.slots, h, d)
            query_side(q_part, keys, w_part, *picked, dq_part, dw_part, *notes, span)
            kernel("plan")(span, items, first_part, rows[1] - rows[0], _multiprocessors(device))
            kernel("key_side", h, d, precise)(q_part, w_part, *notes, items, part)
            kernel("reduce", d)(part, first_part, dk_part, int(rows[0] > 0))
    return dk
