"""Scores and selection on the GPU, a bounded number of query rows at a time.

S query rows, B batch, H index heads, D index head dim, G keys, K top-k.

Inputs are read in place. q and k go through the bulk copy engine, which needs the last dim contiguous, a 16-byte
aligned start and strides that are positive multiples of 16 bytes; other tensors (an expanded batch, a transposed D) are
copied first. Nothing here synchronizes with the host, reads a tensor's values or depends on the stream: kernels run on
torch's current stream and, once built, can be captured in a CUDA graph. Lengths never cause a build.
"""

import functools

import torch

from . import runtime, tiling


@functools.cache
def score_kernel(heads: int, dim: int):
    """(q, k, w, start, end, workspace, row0, rows, stride, keys_of_threads) -> None; see score_fwd.py."""
    runtime.load_tilelang()
    from . import score_fwd

    return runtime.compile_kernel(score_fwd.score_fwd(heads, dim), score_fwd.PASS_CONFIGS)


@functools.cache
def topk_kernel(topk: int, plan: tiling.TopkPlan):
    """(workspace, start, end, indices, scores, B, R, S, G, stride, row0) -> None; see topk.py."""
    runtime.load_tilelang()
    from . import topk as program

    prim_func = program.topk_select(
        topk, mode=plan.mode, threads=plan.threads, words=plan.words, cap=plan.cap, blocks=plan.blocks
    )
    return runtime.compile_kernel(prim_func, program.PASS_CONFIGS)


def prebuild(heads: int, dim: int, topk: int) -> int:
    """Build every kernel that `forward` and `gather` can use; the number of kernels. Needs no GPU."""
    score_kernel(heads, dim)
    plans = tiling.topk_plans(topk)
    for plan in plans:
        topk_kernel(topk, plan)
    return 1 + len(plans)


@functools.cache
def _processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def tma_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy where the bulk copy engine could not read it."""
    unit = 16 // tensor.element_size()
    strides, packed = list(tensor.stride()), 1
    for i in reversed(range(tensor.dim())):
        if tensor.shape[i] == 1:  # any stride is right, and torch may report any
            strides[i] = max(packed, unit if i < tensor.dim() - 1 else 1)
        packed = strides[i] * tensor.shape[i]
    legal = strides[-1] == 1 and tensor.data_ptr() % 16 == 0
    legal = legal and all(s > 0 and s % unit == 0 and s * tensor.element_size() < 2**40 for s in strides[:-1])
    return tensor.as_strided(tensor.shape, strides) if legal else tensor.clone(memory_format=torch.contiguous_format)


class _Scores:
    """Scores of row ranges, one after another, in one workspace."""

    def __init__(self, q, k, w, start, end, workspace_bytes):
        s, b, h, d = q.shape
        self.inputs = tma_view(q), tma_view(k), tma_view(w.to(torch.float32)), start, end
        self.item = tiling.SCORE_COLUMNS // h
        self.batch = b
        self.processors = _processors(q.device.index)
        self.chunks = tiling.plan_chunks(s, b, k.shape[0], h, workspace_bytes, self.processors)
        self.workspace = torch.empty(self.chunks.workspace, dtype=torch.float32, device=q.device)
        self.kernel = score_kernel(h, d)

    def __iter__(self):
        """Yields (first row, rows) with the workspace holding [B, rows, stride]; outside the limits it is undefined."""
        for first, last in self.chunks.ranges:
            rows = last - first
            blocks = min(self.processors, -(-rows // self.item) * self.batch)
            self.kernel(*self.inputs, self.workspace, first, rows, self.chunks.stride, blocks)
            yield first, rows

    def view(self, rows):
        return self.workspace[: self.batch * rows * self.chunks.stride].view(self.batch, rows, self.chunks.stride)


def _limits(start, end):
    return start.to(torch.int32).contiguous(), end.to(torch.int32).contiguous()


def forward(q, k, w, start, end, topk, *, workspace_bytes=tiling.WORKSPACE_BYTES):
    """Scores of the K best visible keys of every row, and their indices.

    Args:
        q: [S, B, H, D], bf16. k: [G, B, D], bf16. w: [S, B, H], fp32.
        start, end: int32 [B, S]. Row limits; a row sees keys start <= g < end.
        topk: K, 1 to tiling.TOPK_MAX.
        workspace_bytes: bound of the scores that exist at one time (at least one row does). It does not change the
            result, bit for bit.

    Returns:
        scores: fp32 [B, S, K], -inf in empty slots. indices: int32 [B, S, K], ascending; -1 in empty slots. Larger
        score first, NaN above +inf, -0.0 equal to +0.0, lower index first among ties.

    Raises RuntimeError if TileLang cannot be used; `runtime.support` says so beforehand.
    """
    s, b, g = q.shape[0], q.shape[1], k.shape[0]
    scores = torch.empty(b, s, topk, dtype=torch.float32, device=q.device)
    indices = torch.empty(b, s, topk, dtype=torch.int32, device=q.device)
    if not (s and b and g):
        return scores.fill_(float("-inf")), indices.fill_(-1)
    start, end = _limits(start, end)
    with torch.cuda.device(q.device):
        select = topk_kernel(topk, tiling.topk_plan(topk, g))
        rows = _Scores(q, k, w, start, end, workspace_bytes)
        for first, count in rows:
            select(
                rows.workspace,
                start.view(-1),
                end.view(-1),
                indices.view(-1),
                scores.view(-1),
                b,
                count,
                s,
                g,
                rows.chunks.stride,
                first,
            )
    return scores, indices


def gather(q, k, w, start, end, indices, *, workspace_bytes=tiling.WORKSPACE_BYTES):
    """Scores at given indices (index replay), bit for bit those of `forward`.

    Args:
        q, k, w, start, end: as for `forward`.
        indices: int32 [B, S, K], any order.

    Returns:
        fp32 [B, S, K]; -inf where the index is -1, out of range, or not visible to its row.
    """
    s, b, g = q.shape[0], q.shape[1], k.shape[0]
    out = torch.full(indices.shape, float("-inf"), dtype=torch.float32, device=q.device)
    if not (s and b and g):
        return out
    start, end = _limits(start, end)
    with torch.cuda.device(q.device):
        rows = _Scores(q, k, w, start, end, workspace_bytes)
        for first, count in rows:
            at = slice(first, first + count)
            part, lo, hi = indices[:, at], start[:, at, None].clamp(min=0), end[:, at, None].clamp(max=g)
            visible = (part >= lo) & (part < hi)
            found = rows.view(count).gather(-1, part.masked_fill(~visible, 0).long())
            out[:, at] = found.masked_fill_(~visible, float("-inf"))
    return out
