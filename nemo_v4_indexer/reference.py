"""The indexer in plain PyTorch: exact, chunked over queries, on any device.

S query rows, B batch, H heads, D dim, G keys, K top-k.

    I[b, s, g] = sum_h w[s, b, h] * relu(q[s, b, h] . k[g, b])          for start <= g < end of the row

(DeepSeek-V3.2 report, equation 1.) Products and sums are fp32; fp64 inputs are computed, and returned, in fp64.
"""

import torch

from nemo_v4_indexer import visibility

_WORKSPACE_BYTES = 256 * 2**20


def accumulation_dtype(tensor):
    """fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(tensor.dtype, torch.float32)


def chunk_rows(rows, bytes_per_row, workspace_bytes):
    """Row ranges (first, last + 1) whose intermediates fit the workspace; at least one row each."""
    step = max(1, workspace_bytes // max(1, bytes_per_row))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def scores(q, k, w):
    """Scores of every key, without limits: [B, S, G] from q [S, B, H, D], k [G, B, D], w [S, B, H]."""
    dtype = accumulation_dtype(q)
    s, b, h, _ = q.shape
    rows = q.to(dtype).permute(1, 0, 2, 3).flatten(1, 2)  # [B, S*H, D]
    products = torch.bmm(rows, k.to(dtype).permute(1, 2, 0)).relu_().view(b, s, h, k.shape[0])
    return torch.einsum("bshg,sbh->bsg", products, w.to(dtype))


def select(values, start, end, topk):
    """The top-k visible keys of every row.

    Larger score first; any NaN ranks above +inf; -0.0 equals +0.0; among equal scores the lowest index wins.

    Args:
        values: [..., G], fp32 or fp64.
        start, end: int32 [...]. Row limits.
        topk: K; rows that see fewer keys leave slots empty.

    Returns:
        scores [..., K] in values' dtype, -inf in empty slots; indices int32 [..., K], ascending, -1 in empty slots.
    """
    groups = values.shape[-1]
    visible = visibility.visible(start, end, groups)
    key = _ordered(values).masked_fill(~visible, torch.iinfo(torch.int64).min)
    width = min(topk, groups)
    chosen = key.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    empty = ~visible.gather(-1, chosen)
    chosen = chosen.masked_fill(empty, groups).sort(dim=-1).values
    empty = chosen == groups
    picked = torch.cat([values, values.new_full((*values.shape[:-1], 1), float("-inf"))], dim=-1).gather(-1, chosen)
    pad = (0, topk - width)
    indices = torch.nn.functional.pad(chosen.masked_fill(empty, -1).to(torch.int32), pad, value=-1)
    return torch.nn.functional.pad(picked, pad, value=float("-inf")), indices


def _ordered(values):
    """int64 in the selection order: NaN on top, -0.0 as +0.0."""
    signed = torch.int32 if values.dtype == torch.float32 else torch.int64
    bits = (values + 0.0).view(signed).to(torch.int64)  # -0.0 + 0.0 is +0.0
    top = torch.iinfo(signed).max
    return torch.where(values.isnan(), top, torch.where(bits < 0, bits ^ top, bits))


def forward(q, k, w, start, end, topk, *, workspace_bytes=_WORKSPACE_BYTES):
    """Scores and selection, chunk by chunk: nothing of size H*S*G or S*G is ever whole.

    Args:
        q: [S, B, H, D]. k: [G, B, D]. w: [S, B, H].
        start, end: int32 [B, S]. Row limits.

    Returns:
        scores [B, S, K] fp32 (fp64 for fp64 inputs), indices int32 [B, S, K], as `select` gives them.
    """
    s, b, h, _ = q.shape
    groups = k.shape[0]
    values = torch.empty(b, s, topk, dtype=accumulation_dtype(q), device=q.device)
    indices = torch.empty(b, s, topk, dtype=torch.int32, device=q.device)
    for lo, hi in chunk_rows(s, b * groups * (4 * h + 32), workspace_bytes):
        part = scores(q[lo:hi], k, w[lo:hi])
        values[:, lo:hi], indices[:, lo:hi] = select(part, start[:, lo:hi], end[:, lo:hi], topk)
    return values, indices


def _gathered(k, indices, valid, dtype):
    """Selected keys [B, S, K, D]; zero in invalid slots, so that nothing from key 0 leaks into them."""
    keys = k.permute(1, 0, 2)
    batch = torch.arange(keys.shape[0], device=k.device)[:, None, None]
    rows = keys[batch, indices.clamp(0, k.shape[0] - 1).long()].to(dtype)
    return rows.masked_fill(~valid[..., None], 0)


def _sparse_bytes(q, topk):
    """Intermediates per query row of the two functions below."""
    _, b, h, d = q.shape
    return 4 * b * topk * (3 * h + 2 * d)


def gather(q, k, w, start, end, indices, *, workspace_bytes=_WORKSPACE_BYTES):
    """Scores [B, S, K] at given indices (index replay); -inf where an index is -1, out of range or not visible."""
    dtype = accumulation_dtype(q)
    out = torch.full(indices.shape, float("-inf"), dtype=dtype, device=q.device)
    if k.shape[0] == 0:
        return out
    for lo, hi in chunk_rows(q.shape[0], _sparse_bytes(q, indices.shape[-1]), workspace_bytes):
        part = indices[:, lo:hi]
        valid = visibility.valid_slots(part, start[:, lo:hi], end[:, lo:hi])
        products = torch.einsum("sbhd,bskd->bshk", q[lo:hi].to(dtype), _gathered(k, part, valid, dtype))
        values = torch.einsum("bshk,sbh->bsk", products.relu_(), w[lo:hi].to(dtype))
        out[:, lo:hi] = values.masked_fill(~valid, float("-inf"))
    return out


def backward(
    q, k, w, indices, grad, *, deterministic=None, precise=True, ordered=True, workspace_bytes=_WORKSPACE_BYTES
):
    """Gradients of the selected scores, accumulated in fp32 (fp64 for fp64 inputs).

    With m = grad * 1[q.k > 0] and V_h = sum_j m_hj k_j:  dq_h = w_h V_h,  dw_h = sum_j grad_j relu(q_h.k_j),
    dk_j = sum_h w_h m_hj q_h.  Whatever grad holds in slots with index -1 is ignored, NaN included.

    Args:
        indices: int32 [B, S, K]; every index is -1 or a key.
        grad: [B, S, K]. Any strides.
        deterministic, precise, ordered: accepted for the common signature. This backend is precise, takes indices in
            any order, and is deterministic where torch's index_add_ is: on the CPU always, on CUDA under
            torch.use_deterministic_algorithms.

    Returns:
        dq, dk, dw in the dtypes of q, k, w.
    """
    dtype = accumulation_dtype(q)
    b, d = q.shape[1], q.shape[3]
    groups = k.shape[0]
    dq, dw = torch.empty_like(q), torch.empty_like(w)
    dk = torch.zeros(b * groups, d, dtype=dtype, device=q.device)
    if groups == 0:
        return dq.zero_(), torch.zeros_like(k), dw.zero_()
    offset = torch.arange(b, device=q.device)[:, None, None] * groups
    for lo, hi in chunk_rows(q.shape[0], _sparse_bytes(q, indices.shape[-1]), workspace_bytes):
        part = indices[:, lo:hi]
        valid = part >= 0
        g = grad[:, lo:hi].to(dtype).masked_fill(~valid, 0)[:, :, None]
        keys = _gathered(k, part, valid, dtype)
        queries, weights = q[lo:hi].to(dtype), w[lo:hi].to(dtype).permute(1, 0, 2)[..., None]
        # 0 * NaN is NaN: a bad query or weight must not reach empty slots, which would add to key 0, nor empty rows.
        weights = weights.masked_fill(~valid.any(-1)[..., None, None], 0)
        products = torch.einsum("sbhd,bskd->bshk", queries, keys).masked_fill_(~valid[:, :, None], 0)
        m = g * (products > 0)
        dw[lo:hi] = (g * products.relu()).sum(-1).permute(1, 0, 2)
        dq[lo:hi] = (weights * torch.einsum("bshk,bskd->bshd", m, keys)).permute(1, 0, 2, 3)
        rows = torch.einsum("bshk,sbhd->bskd", m * weights, queries).masked_fill_(~valid[..., None], 0)
        dk.index_add_(0, (part.clamp(min=0) + offset).flatten(), rows.flatten(0, 2))
    return dq, dk.view(b, groups, d).permute(1, 0, 2).to(k.dtype), dw
