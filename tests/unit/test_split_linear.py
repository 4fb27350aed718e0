"""fp32 products made of bf16 ones, against fp64."""

import pytest
import torch

from nemo_v4_indexer.ops.split_linear import split, split_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("scale", [1e-24, 1.0, 1e30])
def test_three_parts_are_the_whole(scale):
    x = scale * torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    parts = split(x, 3)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), x.double())
    two = split(x, 2)
    assert 2**-20 < error(two[0].double() + two[1].double(), x.double()) < 2**-16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [((1,), 1, 1), ((65, 2), 96, 24), ((5000,), 2500, 17)])
def test_against_fp64(device, rows, inputs, outputs):
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(*rows, inputs, generator=generator).bfloat16().to(device).requires_grad_()
    weight = torch.randn(outputs, inputs, generator=generator).to(device).requires_grad_()
    up = torch.randn(*rows, outputs, generator=generator).to(device)
    out = split_linear(x, weight)
    dx, dweight = torch.autograd.grad(out, (x, weight), up)
    assert (out.dtype, dx.dtype, dweight.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    wide, whole = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = wide @ whole.t()
    dx_expected, dweight_expected = torch.autograd.grad(expected, (wide, whole), up.double())
    assert error(out, expected.detach()) < 1e-6
    assert error(dweight, dweight_expected) < 1e-6
    assert error(dx, dx_expected.bfloat16().double()) < 2e-4  # a sum near the middle may round to the other side


@pytest.mark.gpu
def test_as_accurate_as_fp32_and_without_a_copy():
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    weight = torch.randn(512, 4096, device="cuda", requires_grad=True)
    exact = x.double() @ weight.detach().double().t()
    plain = error(torch.nn.functional.linear(x.float(), weight).detach(), exact)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = split_linear(x, weight)
    assert torch.cuda.max_memory_allocated() - before < 4 * x.numel()
    assert error(out.detach(), exact) < 3 * plain


def test_only_what_is_asked_for():
    x, weight = torch.randn(3, 4).bfloat16(), torch.randn(2, 4, requires_grad=True)
    split_linear(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None
