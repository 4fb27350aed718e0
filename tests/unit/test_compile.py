"""The operation inside torch.compile: one node per call, the same numbers."""

import pytest
import torch

from nemo_v4_indexer import V4IndexerFunction, v4_lighting_indexer, visibility
from nemo_v4_indexer.ops import dispatch

S, B, H, D, RATIO, K = 19, 2, 4, 16, 4, 2


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (S, B, H, D), (S // RATIO, B, D), (S, B, H)
    q, k, w = (torch.randn(shape, generator=generator) for shape in shapes)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), w.requires_grad_()


def model(select):
    def loss(q, k, w):
        scores, indices = select(q * 1.5, k, w.sin())
        return scores.masked_fill(indices < 0, 0).square().sum()

    return loss


SELECTIONS = {
    "function": lambda *qkw: V4IndexerFunction.apply(*qkw, RATIO, K, None),
    "public": lambda *qkw: v4_lighting_indexer(*qkw, RATIO, K),
    "replay": lambda *qkw: v4_lighting_indexer(*qkw, RATIO, K, torch.arange(3).expand(B, S, 3)),
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)
def test_whole_graph(select):
    inputs = tensors()
    eager, compiled = (
        torch.autograd.grad(run(*inputs), inputs)
        for run in (model(select), torch.compile(model(select), fullgraph=True, backend="aot_eager"))
    )
    for expected, gradient in zip(eager, compiled, strict=True):
        assert expected.norm() > 0
        assert torch.equal(expected, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_results_are_like_real_ones(dtype):
    q, k, w = (t.detach() for t in tensors(dtype))
    limits = visibility.batched_limits(*visibility.causal_limits(S, RATIO, S // RATIO), B, S, S // RATIO)
    place = ("reference", 1 << 20)
    scores, indices = dispatch.select(q, k, w, *limits, K, *place)
    for operation, arguments in (
        (dispatch._compiled_select, (q, k, w, *limits, K)),
        (dispatch._compiled_gather, (q, k, w, *limits, indices)),
        (dispatch._compiled_backward, (q, k, w, indices, torch.randn(scores.shape), True, None, False)),
    ):
        torch.library.opcheck(operation, (*arguments, *place))
