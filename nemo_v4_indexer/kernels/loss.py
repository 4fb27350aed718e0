"""Launch of the fused distillation loss; see kl_rows.py for the program and ops/loss.py for the formula.

B batch, S query rows, K top-k.
"""

import functools

import torch

from . import runtime
from .backward import slot_capacity


@functools.cache
def kernel(slots: int):
    """(scores, indices, mass, scale, gradient, kl, uniform) -> None."""
    runtime.load_tilelang()
    from . import kl_rows

    return runtime.compile_kernel(kl_rows.kl_rows(slots), kl_rows.PASS_CONFIGS)


def prebuild(topk: int) -> int:
    """Build the kernel for this K; the number of kernels. Needs no GPU."""
    kernel(slot_capacity(topk))
    return 1


def selected_kl(scores, indices, mass, scale):
    """KL of every row and its gradient.

    Args:
        scores, mass: fp32 [B, S, K]. indices: int32 [B, S, K], -1 in empty slots. scale: fp32 [1], on the device.

    Returns:
        kl, uniform: fp32 [B, S]. gradient: fp32 [B, S, K], times scale.
    """
    topk = scores.shape[-1]
    gradient = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    kl, uniform = (torch.empty(scores.shape[:-1], dtype=torch.float32, device=scores.device) for _ in range(2))
    if scores.numel():
        rows = (t.contiguous().view(-1, topk) for t in (scores.float(), indices, mass.float()))
        with torch.cuda.device(scores.device):
            kernel(slot_capacity(topk))(*rows, scale, gradient.view(-1, topk), kl.view(-1), uniform.view(-1))
    return kl, uniform, gradient
