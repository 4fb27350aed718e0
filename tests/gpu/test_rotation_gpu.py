"""The fused rotary and Hadamard rotation on a GPU against PyTorch's steps, forward and gradient."""

import pytest
import torch

from nemo_v4_indexer import rotary
from nemo_v4_indexer.config import RopeConfig
from nemo_v4_indexer.ops.rotation import rotate_queries

pytestmark = pytest.mark.gpu


def both(s, b, heads, dim, dims, half_split, hadamard):
    """[(output, gradient)] of the kernel, of PyTorch, and of PyTorch in fp64 without rounding."""
    q = torch.randn(s, b, heads, dim, device="cuda").bfloat16()
    up = torch.randn(s, b, heads, dim, device="cuda").bfloat16()
    table = rotary.rotary_table(torch.arange(s, device="cuda"), RopeConfig(dim=dims, theta=160000.0))
    found = []
    for backend, dtype in (("tilelang", torch.bfloat16), ("reference", torch.bfloat16), ("reference", torch.float32)):
        x = q.to(dtype).requires_grad_()
        out = rotate_queries(x, table, half_split=half_split, hadamard=hadamard, backend=backend, topk=8)
        found.append((out.detach(), *torch.autograd.grad(out, x, up.to(dtype))))
    return found


@pytest.mark.parametrize("s", [1, 63, 1000])
@pytest.mark.parametrize(("heads", "dim", "dims"), [(64, 128, 64), (8, 64, 32), (16, 32, 8), (128, 128, 128)])
@pytest.mark.parametrize("half_split", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
def test_against_pytorch(s, heads, dim, dims, half_split, hadamard):
    if half_split and dims == 8:
        pytest.skip("half-split pairs of 8 rotary dims lie within one thread: PyTorch rotates them")
    fused, plain, exact = both(s, 3, heads, dim, dims, half_split, hadamard)
    for name, got, stepwise, whole in zip(("output", "gradient"), fused, plain, exact, strict=True):
        norm = whole.norm()
        error, accepted = (got.float() - whole).norm() / norm, (stepwise.float() - whole).norm() / norm
        assert error <= 1.1 * accepted + 1e-6, name
        assert (got == stepwise).float().mean() > 0.97, name


def test_more_than_2_to_the_31_values():
    s = 2**31 // (64 * 128) + 5
    q = torch.randn(s, 1, 64, 128, device="cuda", dtype=torch.bfloat16)
    table = rotary.rotary_table(torch.arange(s, device="cuda"), RopeConfig(dim=64, theta=160000.0))
    how = dict(half_split=False, hadamard=True, topk=8)
    out = rotate_queries(q, table, backend="tilelang", **how)
    tail = [t[-4:] for t in table]
    assert (out[-4:] == rotate_queries(q[-4:], tail, backend="reference", **how)).float().mean() > 0.97
