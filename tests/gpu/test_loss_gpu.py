"""The fused distillation loss on a GPU against the formula in fp64."""

import pytest
import torch

from nemo_v4_indexer.ops import loss

pytestmark = pytest.mark.gpu


def inputs(b, s, topk, device="cuda"):
    generator = torch.Generator(device=device).manual_seed(topk)
    scores = 3 * torch.randn(b, s, topk, generator=generator, device=device)
    mass = torch.rand(b, s, topk, generator=generator, device=device) ** 6
    used = torch.arange(s, device=device)[:, None] % (topk + 1)
    indices = torch.arange(topk, device=device, dtype=torch.int32).expand(b, s, topk)
    indices = indices.masked_fill(indices >= used, -1)
    empty = indices < 0
    return scores.masked_fill(empty, torch.nan).requires_grad_(), indices, mass.masked_fill(empty, torch.nan)


def plain(scores, indices, mass):
    """Loss and gradient in fp64 by autograd."""
    empty = indices < 0
    x = scores.detach().double().masked_fill(empty, -1e9).requires_grad_()
    p = mass.double().masked_fill(empty, 0)
    live = p.sum(-1) > 0
    p = p[live] / p[live].sum(-1, keepdim=True)
    kl = (torch.xlogy(p, p) - p * x[live].log_softmax(-1)).sum() / live.sum()
    return kl, torch.autograd.grad(kl, x)[0]


@pytest.mark.parametrize(
    ("b", "s", "topk"), [(1, 1, 1), (2, 65, 7), (1, 1000, 512), (3, 333, 1000), (1, 300, 2048), (1, 64, 4096)]
)
def test_against_fp64(b, s, topk):
    scores, indices, mass = inputs(b, s, topk)
    found, sums = loss.indexer_kl_loss(scores, indices, mass, backend="tilelang")
    (gradient,) = torch.autograd.grad(found, scores)
    if not (indices >= 0).any():
        assert found == 0 and not gradient.any()
        return
    expected, expected_gradient = plain(scores, indices, mass)
    assert abs(found.double() - expected) <= 1e-5 * expected + 1e-7
    error = (gradient.double() - expected_gradient).norm() / expected_gradient.norm()
    assert error < 1e-5 or expected_gradient.norm() < 1e-9
    assert sums.kl_uniform > 0


def test_nothing_as_large_as_a_copy_of_the_rows_but_the_gradient():
    scores, indices, mass = inputs(1, 8192, 512)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.indexer_kl_loss(scores, indices, mass, rows=8192, backend="tilelang")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * 4 * scores.numel()
