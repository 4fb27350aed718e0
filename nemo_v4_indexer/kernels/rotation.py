"""Launch of the fused rotary and Hadamard rotation; see rotate_rows.py for the program and rotary.py for the formulas.

S positions, D dim, R rotary dims.
"""

import functools

import torch

from . import runtime


def shape_problem(dim: int, rotary: int, half_split: bool) -> str | None:
    """Why the kernel does not take these sizes, or None."""
    if dim & (dim - 1) or not 8 <= dim <= 256:
        return f"head dim must be a power of two from 8 to 256, got {dim}"
    pairs = rotary // 16  # threads that hold one half of half-split pairs
    if rotary % 8 or not 8 <= rotary <= dim or (half_split and (rotary % 16 or pairs & (pairs - 1))):
        return f"rotary dims must be a multiple of 8 up to {dim}, or 16, 32, 64 ... half-split, got {rotary}"
    return None


@functools.cache
def kernel(dim: int, rotary: int, half_split: bool, hadamard: bool, reverse: bool):
    """(x, cos, sin, y) -> None."""
    runtime.load_tilelang()
    from . import rotate_rows

    program = rotate_rows.rotate_rows(dim, rotary, half_split, hadamard, reverse)
    return runtime.compile_kernel(program, rotate_rows.PASS_CONFIGS)


def prebuild(dim: int, rotary: int) -> int:
    """Build the kernels of both pairings and directions, Hadamard rotation included; the number of kernels.

    Needs no GPU.
    """
    cases = [
        (half_split, reverse)
        for half_split in (False, True)
        for reverse in (False, True)
        if shape_problem(dim, rotary, half_split) is None
    ]
    for half_split, reverse in cases:
        kernel(dim, rotary, half_split, True, reverse)
    return len(cases)


def rotate(x, cos, sin, *, half_split, hadamard, reverse):
    """RoPE, then the Hadamard rotation if asked for; with `reverse` the transpose, for gradients.

    Args:
        x: bf16 [S, ..., D]. cos, sin: fp32 [S, R / 2].

    Returns:
        bf16, shape of x, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        dim, rotary = x.shape[-1], 2 * cos.shape[-1]
        shape = x.shape[0], -1, dim
        run = kernel(dim, rotary, half_split, hadamard, reverse)
        with torch.cuda.device(x.device):
            run(x.contiguous().view(shape), cos.contiguous(), sin.contiguous(), out.view(shape))
    return out
