"""The fused rotation under the emulator against the rotary module, both directions."""

import pytest
import torch

from nemo_v4_indexer import rotary
from nemo_v4_indexer.config import RopeConfig

S, HEADS = 5, 3
SIZES = [
    (128, 64, False, True),
    (128, 64, True, True),
    (32, 16, True, False),
    pytest.param(64, 32, False, False, marks=pytest.mark.slow),
    pytest.param(32, 8, False, True, marks=pytest.mark.slow),
]
"""(dim, rotary dims, half-split, Hadamard)."""


def plain(x, table, half_split, hadamard):
    x = (rotary.rotate_half_split if half_split else rotary.rotate_interleaved)(x, table)
    return rotary.hadamard_rotation(x) if hadamard else x


@pytest.mark.parametrize(("dim", "dims", "half_split", "hadamard"), SIZES)
def test_both_directions(emulated, schedule, dim, dims, half_split, hadamard):
    from nemo_v4_indexer.kernels import rotate_rows

    generator = torch.Generator().manual_seed(dim)
    table = rotary.rotary_table(torch.arange(100, 100 + S), RopeConfig(dim=dims, theta=1000.0))
    x = torch.randn(S, HEADS, dim, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(S, HEADS, dim, generator=generator).bfloat16()
    expected = plain(x, table, half_split, hadamard)
    (dx,) = torch.autograd.grad(expected, x, grad)
    for reverse, given, wanted in ((False, x.detach(), expected.detach()), (True, grad, dx)):
        kernel = emulated(rotate_rows.rotate_rows(dim, dims, half_split, hadamard, reverse), rotate_rows.PASS_CONFIGS)
        found = torch.full_like(given, 7.0)
        kernel(given, *table, found)
        # Sums in another order may round to the neighbouring bf16 number, and the Hadamard rotation spreads that.
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=2**-7)
        assert (found == wanted).float().mean() > 0.95


def test_refused_sizes():
    from nemo_v4_indexer.kernels.rotation import shape_problem

    assert shape_problem(128, 64, False) is None and shape_problem(128, 64, True) is None
    assert "power of two" in shape_problem(96, 64, False)
    assert "multiple of 8" in shape_problem(128, 12, False)
    assert "half-split" in shape_problem(128, 48, True)
