"""Rotary embedding and Hadamard rotation of the indexer's queries, fused where the kernels run.

S positions, B batch, H index heads, D index dim, R rotary dims.
"""

import torch

from nemo_v4_indexer import rotary
from nemo_v4_indexer.ops.dispatch import resolve_backend


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, half_split, hadamard):
        from nemo_v4_indexer.kernels.rotation import rotate

        ctx.save_for_backward(cos, sin)
        ctx.how = dict(half_split=half_split, hadamard=hadamard)
        return rotate(x, cos, sin, **ctx.how, reverse=False)

    @staticmethod
    def backward(ctx, grad):
        from nemo_v4_indexer.kernels.rotation import rotate

        return rotate(grad, *ctx.saved_tensors, **ctx.how, reverse=True), None, None, None, None


def rotate_queries(q, table, *, half_split, hadamard, backend, topk):
    """RoPE, then the Hadamard rotation.

    Args:
        q: [S, B, H, D]. table: cos and sin, fp32 [S, R / 2], of `rotary.rotary_table`.
        half_split: pairs (i, i + R / 2) of the first dims turn (ratio 1), else (2 i, 2 i + 1) of the last.
        hadamard: whether to rotate. backend, topk: as in `resolve_backend`.

    Returns:
        As q. The kernel rounds where PyTorch does; sums of the Hadamard rotation are taken in another order.
    """
    if not torch.compiler.is_compiling() and resolve_backend(backend, q, topk) == "tilelang":
        from nemo_v4_indexer.kernels.rotation import shape_problem

        if shape_problem(q.shape[-1], 2 * table[0].shape[-1], half_split) is None:
            return _Rotation.apply(q, *table, half_split, hadamard)
    turn = rotary.rotate_half_split if half_split else rotary.rotate_interleaved
    q = turn(q, table)
    return rotary.hadamard_rotation(q) if hadamard else q
