"""The distillation loss that trains an indexer, from local tensors: KL of the teacher's attention to the indexer.

S query rows, B batch, H index heads, D index dim, G keys, K top-k, C support of a row.

With M(s) the attention mass that the main attention, over all its heads, puts on entry s, and p = M / sum_C M:

    L = coeff / N * sum_rows sum_{s in C} p (log p - log_softmax_C(I))                                          [nats]
    dL/dI = coeff / N * (softmax_C(I) - p)

(DeepSeek-V3.2 report, section 2.1.1.) C holds the selected entries in the sparse stage and every visible one in the
dense warm-up stage. 0 log 0 is 0; a row with nothing visible, or no teacher mass, adds no loss and no gradient.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from nemo_v4_indexer import reference, visibility

_CHUNK_BYTES = 64 * 2**20


class LossSums(NamedTuple):
    """Sums over rows, fp32 scalars in nats, without gradient: of the KL, and of the KL to a uniform indexer."""

    kl: torch.Tensor
    kl_uniform: torch.Tensor


def _row_terms(scores, valid, mass):
    """KL [...], KL to uniform [...] and d KL / d scores [..., C] of rows; zero on rows without mass."""
    mass = mass.float().masked_fill(~valid, 0)
    total = mass.sum(-1, keepdim=True)
    live = total > 0
    p = mass / total.masked_fill(~live, 1)
    logits = scores.float().masked_fill(~valid, float("-inf")).masked_fill(~live, 0)
    log_q = logits.log_softmax(-1)
    negative_entropy = torch.xlogy(p, p).sum(-1)
    # p * log_q where p is 0: log_q may be -inf there
    kl = negative_entropy - torch.where(p > 0, p * log_q, 0).sum(-1)
    uniform = negative_entropy + valid.sum(-1).clamp(min=1).log() * live[..., 0]
    gradient = torch.where(live, log_q.exp() - p, 0)
    return kl, uniform, gradient


def _selected_kl(scores, indices, mass, scale, backend):
    """KL [B, S], KL to uniform [B, S] and d loss / d scores [B, S, K]."""
    if backend == "tilelang":
        from nemo_v4_indexer.kernels.loss import selected_kl

        return selected_kl(scores, indices, mass, torch.as_tensor(scale, device=scores.device).float().view(1))
    b, s, topk = scores.shape
    kl, uniform = (torch.empty(b, s, device=scores.device) for _ in range(2))
    gradient = torch.empty(scores.shape, device=scores.device)
    for lo, hi in reference.chunk_rows(s, 40 * b * topk, _CHUNK_BYTES):
        rows = slice(lo, hi)
        part = _row_terms(scores[:, rows], indices[:, rows] >= 0, mass[:, rows])
        kl[:, rows], uniform[:, rows], gradient[:, rows] = part[0], part[1], part[2] * scale
    return kl, uniform, gradient


class _SelectedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, indices, mass, scale, backend):
        kl, uniform, gradient = _selected_kl(scores.detach(), indices, mass, scale, backend)
        ctx.save_for_backward(gradient)
        ctx.dtype = scores.dtype
        kl, uniform = kl.sum(), uniform.sum()
        ctx.mark_non_differentiable(kl, uniform)
        return kl * scale, kl, uniform

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        (gradient,) = ctx.saved_tensors
        return (grad * gradient).to(ctx.dtype), None, None, None, None


def indexer_kl_loss(index_score, topk_indices, teacher_mass, *, coeff=1.0, rows=None, backend="reference"):
    """Sparse stage: the loss over the selected entries.

    Args:
        index_score: [B, S, K], fp32. Scores at the selected entries, as `v4_lighting_indexer` returns them.
        topk_indices: [B, S, K], int32; -1 in empty slots.
        teacher_mass: [B, S, K], float, >= 0. M at the selected entries; need not be normalised; carries no gradient.
        coeff: weight of the loss.
        rows: N, int or scalar tensor; the rows the mean runs over. Default: rows here with a selected entry. Give the
            global number when rows are sharded.
        backend: "reference", or "tilelang" where `dispatch.resolve_backend` says that kernels run: one fused pass.

    Returns:
        loss: fp32 scalar, nats. sums: `LossSums` over the rows here.

    Raises:
        ValueError: shapes differ.
    """
    if not index_score.shape == topk_indices.shape == teacher_mass.shape:
        raise ValueError(
            "index_score, topk_indices and teacher_mass must share a shape [B, S, K], got "
            f"{tuple(index_score.shape)}, {tuple(topk_indices.shape)} and {tuple(teacher_mass.shape)}"
        )
    if rows is None:
        rows = (topk_indices >= 0).any(-1).sum().clamp(min=1)
    loss, *sums = _SelectedKL.apply(index_score, topk_indices, teacher_mass.detach(), coeff / rows, backend)
    return loss, LossSums(*sums)


class _DenseKL(torch.autograd.Function):
    """Gradients are made in forward, chunk by chunk, so that nothing [S, G]-sized outlives its chunk."""

    @staticmethod
    def forward(ctx, q, k, w, limits, teacher, scale, workspace_bytes):
        start, end = limits
        s, b, h, _ = q.shape
        groups = k.shape[0]
        dtype = reference.accumulation_dtype(q)
        dq, dw = torch.zeros_like(q), torch.zeros_like(w)
        dk = torch.zeros(k.shape, dtype=dtype, device=k.device)
        sums = torch.zeros(2, dtype=torch.float32, device=q.device)
        for lo, hi in reference.chunk_rows(s, b * groups * (8 * h + 32), workspace_bytes):
            mass = teacher(lo, hi)
            with torch.autocast(q.device.type, enabled=False):
                with torch.enable_grad():
                    leaves = [t.detach().to(dtype).requires_grad_() for t in (q[lo:hi], k, w[lo:hi])]
                    scores = reference.scores(*leaves)
                valid = visibility.visible(start[:, lo:hi], end[:, lo:hi], groups)
                kl, uniform, gradient = _row_terms(scores.detach(), valid, mass)
                part = torch.autograd.grad(scores, leaves, (gradient * scale).to(dtype))
            sums += torch.stack([kl.sum(), uniform.sum()])
            dq[lo:hi], dw[lo:hi] = part[0], part[2]
            dk += part[1]
        ctx.save_for_backward(dq, dk.to(k.dtype), dw)
        kl, uniform = sums.unbind()
        ctx.mark_non_differentiable(kl, uniform)
        return kl * scale, kl, uniform

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        return *((grad * t).to(t.dtype) for t in ctx.saved_tensors), None, None, None, None


def indexer_dense_kl_loss(index_q, index_k, weights, limits, teacher, *, coeff=1.0, rows=None, workspace_mib=256):
    """Dense warm-up stage: the loss over every visible entry, chunked over query rows.

    Args:
        index_q: [S, B, H, D]. index_k: [G, B, D]. weights: [S, B, H].
        limits: (start, end), int32 [B, S] each: the visible keys of every row.
        teacher: function (first row, last row + 1) -> M [B, rows, G], float, >= 0, no gradient. Called in row order.
        coeff, rows: as in `indexer_kl_loss`; default rows are those that see a key.
        workspace_mib: MiB that the intermediates of one chunk may take.

    Returns:
        loss: fp32 scalar, nats. sums: `LossSums` over the rows here.
    """
    start, end = limits
    if rows is None:
        rows = (end > start).sum().clamp(min=1)
    loss, *sums = _DenseKL.apply(index_q, index_k, weights, limits, teacher, coeff / rows, workspace_mib * 2**20)
    return loss, LossSums(*sums)


class _AttachLoss(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx, output, loss):
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.as_tensor(_AttachLoss.scale, dtype=ctx.dtype, device=ctx.device).reshape(())


def attach_loss(output, loss):
    """`output` unchanged; its backward also starts that of `loss`, times the scale set by `set_loss_scale`."""
    return _AttachLoss.apply(output, loss)


def set_loss_scale(scale):
    """Scale of attached losses: 1 / microbatches times the optimizer's loss scale, as Megatron's schedules give it.

    Args:
        scale: float or scalar tensor.
    """
    _AttachLoss.scale = scale
