"""The fused distillation loss under the emulator against its formula in PyTorch.

R rows, K slots.
"""

import pytest
import torch

from nemo_v4_indexer.ops import loss

ROWS, SLOTS, SCALE = 7, 256, 0.37


@pytest.fixture(scope="module")
def kernel(emulated):
    from nemo_v4_indexer.kernels import kl_rows

    return emulated(kl_rows.kl_rows(SLOTS), kl_rows.PASS_CONFIGS)


def rows(topk):
    """Signed scores, sharp and flat teachers; NaN in every empty slot."""
    generator = torch.Generator().manual_seed(topk)
    scores = 3 * torch.randn(ROWS, topk, generator=generator)
    mass = torch.rand(ROWS, topk, generator=generator) ** 4
    indices = torch.arange(topk, dtype=torch.int32).repeat(ROWS, 1)
    indices[0] = -1
    indices[1, topk // 2 :] = -1
    mass[2] = 0
    mass[3, ::2] = 0
    if topk > 1:  # a visible score of -inf that the teacher ignores
        scores[4, 0], mass[4, 0] = -torch.inf, 0
    scores[indices < 0] = mass[indices < 0] = torch.nan
    return scores, indices, mass


@pytest.mark.parametrize("topk", [1, 5, 128, 200, 256])
def test_rows(kernel, topk, schedule):
    scores, indices, mass = rows(topk)
    gradient = torch.full((ROWS, topk), 7.0)
    kl, uniform = torch.full((ROWS,), 7.0), torch.full((ROWS,), 7.0)
    kernel(scores, indices, mass, torch.tensor([SCALE]), gradient, kl, uniform)
    expected = loss._row_terms(scores, indices >= 0, mass)
    torch.testing.assert_close(kl, expected[0], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(uniform, expected[1], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(gradient, SCALE * expected[2], rtol=2e-5, atol=1e-6)
    assert topk == 1 or (gradient != 0).any()
    assert not gradient[0].any() and not gradient[2].any()
