"""The lightning indexer as a differentiable operation: scores and top-k selection of compressed keys.

S query rows, B batch, H index heads, D index dim, G compressed keys, K top-k. Layout is Megatron's SBHD.

    I[b, s, g] = sum_h w[s, b, h] * relu(q[s, b, h] . k[g, b])          (DeepSeek-V3.2 report, equation 1)
"""

import dataclasses

import torch
from torch.autograd.function import once_differentiable

from nemo_v4_indexer import checks, visibility
from nemo_v4_indexer.ops.dispatch import operations

BACKENDS = ("auto", "tilelang", "reference")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How to compute, as opposed to what: none of these changes a selection.

    backend: "tilelang" (Hopper kernels; raises where they cannot run), "reference" (PyTorch anywhere) or "auto".
    workspace_mib: MiB that the scores of one chunk of query rows may take.
    deterministic: bitwise repeatable gradients; None follows torch.use_deterministic_algorithms.
    precise: gradients at about 1e-5 relative error instead of bf16's.
    """

    backend: str = "auto"
    workspace_mib: int = 256
    deterministic: bool | None = None
    precise: bool = False

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        checks.check_int("workspace_mib", self.workspace_mib, 1)


class V4IndexerFunction(torch.autograd.Function):
    """Scores at the top-k keys of every query row, and the keys' indices.

    `apply(index_q, index_k, weights, compress_ratio, topk, topk_indices)`; arguments and results as in
    `v4_lighting_indexer`. Saved for backward: the inputs and the indices, nothing of size S x G.
    """

    @staticmethod
    def forward(ctx, index_q, index_k, weights, compress_ratio, topk, topk_indices=None, limits=None, options=None):
        s, b = index_q.shape[:2]
        groups = index_k.shape[0]
        options = options or Options()
        if limits is None:
            limits = visibility.causal_limits(s, compress_ratio, groups, index_q.device)
        start, end = visibility.batched_limits(*limits, b, s, groups)
        select, gather, _ = operations()
        inputs, place = (index_q, index_k, weights, start, end), (options.backend, options.workspace_mib * 2**20)
        if topk_indices is None:
            scores, indices = select(*inputs, topk, *place)
        else:
            valid = visibility.valid_slots(topk_indices, start, end)
            indices = topk_indices.masked_fill(~valid, -1).to(torch.int32)
            scores = gather(*inputs, indices, *place)
        ctx.save_for_backward(index_q, index_k, weights, indices)
        ctx.options, ctx.ordered = options, topk_indices is None
        ctx.mark_non_differentiable(indices)
        return scores, indices

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_scores, grad_indices):
        options = ctx.options
        *_, backward = operations()
        grads = backward(
            *ctx.saved_tensors,
            grad_scores,
            ctx.ordered,
            options.deterministic,
            options.precise,
            options.backend,
            options.workspace_mib * 2**20,
        )
        return *grads, *[None] * (len(ctx.needs_input_grad) - 3)


def v4_lighting_indexer(
    index_q,
    index_k,
    weights,
    compress_ratio,
    topk,
    topk_indices=None,
    *,
    cu_seqlen_ks=None,
    cu_seqlen_ke=None,
    backend="auto",
    workspace_mib=256,
    deterministic=None,
    precise=False,
):
    """Score compressed keys and keep the top-k that each query row may see.

    Larger score first; NaN ranks above +inf; -0.0 equals +0.0; among equal scores the lower index wins, on every
    backend. Slots are in ascending index order, not in score order.

    Args:
        index_q: [S, B, H, D], bf16 (any float on the reference backend).
        index_k: [G, B, D], dtype of index_q.
        weights: [S, B, H], fp32, sign free.
        compress_ratio: tokens per key, >= 1. Row t sees the keys g < (t + 1) // compress_ratio.
        topk: K >= 1; may exceed G.
        topk_indices: [B, S, K], int32 or int64. Replay: nothing is selected, scores are taken at these indices in their
            order; one that is -1, out of range or not visible becomes -1 with score -inf and no gradient.
        cu_seqlen_ks, cu_seqlen_ke: int32 or int64, [S] or [B, S]. First visible key and one past the last of every row,
            in place of the causal rule (packed documents, context parallel rows); compress_ratio is then not used.
        backend, workspace_mib, deterministic, precise: see `Options`.

    Returns:
        index_score: [B, S, K], fp32 (fp64 for fp64 inputs); -inf in empty slots. Differentiable in q, k and weights.
        topk_indices: [B, S, K], int32; -1 in empty slots.

    Raises:
        TypeError, ValueError: an argument of another shape, dtype, device or range; the message names both.
        RuntimeError: backend "tilelang" where it cannot run.
    """
    checks.check_indexer_inputs(index_q, index_k, weights)
    checks.check_int("compress_ratio", compress_ratio, 1)
    checks.check_int("topk", topk, 1)
    s, b = index_q.shape[:2]
    limits = None
    if cu_seqlen_ks is not None or cu_seqlen_ke is not None:
        checks.check_limits(cu_seqlen_ks, cu_seqlen_ke, b, s, index_q.device)
        limits = cu_seqlen_ks, cu_seqlen_ke
    if topk_indices is not None:
        checks.check_indices("topk_indices", topk_indices, b, s, index_q.device)
    options = Options(backend, workspace_mib, deterministic, precise)
    return V4IndexerFunction.apply(index_q, index_k, weights, compress_ratio, topk, topk_indices, limits, options)


def v4_lighting_indexer_sample(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, topk, topk_indices=None, **options):
    """`v4_lighting_indexer` of one sample with explicit row limits.

    Args:
        q: [S, H, D]. k: [G, D]. weights: [S, H].
        cu_seqlen_ks, cu_seqlen_ke: int32 or int64 [S]. Row s sees the keys ks[s] <= g < ke[s].
        topk: K. topk_indices: [S, K] to replay, or None.
        options: as in `v4_lighting_indexer`.

    Returns:
        index_score [S, K], topk_indices int32 [S, K].
    """
    checks.check_tensor("q", q, (None, None, None), checks.FLOATS)
    checks.check_tensor("k", k, (None, q.shape[2]), checks.FLOATS)
    checks.check_tensor("weights", weights, tuple(q.shape[:2]), checks.FLOATS)
    checks.check_limits(cu_seqlen_ks, cu_seqlen_ke, 1, q.shape[0], q.device)
    if topk_indices is not None:
        checks.check_tensor("topk_indices", topk_indices, (q.shape[0], None), (torch.int32, torch.int64))
        topk_indices = topk_indices[None]
    scores, indices = v4_lighting_indexer(
        q[:, None],
        k[:, None],
        weights[:, None],
        1,
        topk,
        topk_indices,
        cu_seqlen_ks=cu_seqlen_ks,
        cu_seqlen_ke=cu_seqlen_ke,
        **options,
    )
    return scores[0], indices[0]


def pytorch_extract_topk_scores(logits, topk_indices, dim=-1):
    """Scores at given indices, -inf where an index is negative or out of range.

    Args:
        logits: [..., G, ...], float.
        topk_indices: shaped as logits but for `dim`, int32 or int64.
        dim: the dimension of G.

    Returns:
        scores shaped as topk_indices, dtype of logits; differentiable in logits.
    """
    size = logits.shape[dim]
    valid = (topk_indices >= 0) & (topk_indices < size)
    if size == 0:
        return logits.new_full(topk_indices.shape, float("-inf"))
    scores = logits.gather(dim, topk_indices.clamp(0, size - 1).long())
    return scores.masked_fill(~valid, float("-inf"))
