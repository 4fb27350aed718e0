"""The score kernel, and `forward` and `gather` around it, under the emulator against plain fp64.

S query rows, B batch, H index heads, D index head dim, G keys, K top-k.
"""

import emulate
import pytest
import torch

from nemo_v4_indexer import reference, visibility


def problem(heads, dim, *, rows=37, batch=2, groups=150, seed=0):
    """Signed data; rows that see nothing, everything, and ranges that start anywhere."""
    g = torch.Generator().manual_seed(1000 * heads + dim + seed)
    q = torch.randn(rows, batch, heads, dim, generator=g).bfloat16()
    k = torch.randn(groups, batch, dim, generator=g).bfloat16()
    w = torch.randn(rows, batch, heads, generator=g)
    start = torch.randint(0, groups, (batch, rows), generator=g)
    end = start + torch.randint(-20, groups, (batch, rows), generator=g)
    start[:, 5], end[:, 5] = 0, groups
    start[:, 6], end[:, 6] = 0, 0
    return q, k, w, *(t.to(torch.int32) for t in (start, end.clamp(max=groups)))


def exact(q, k, w):
    return reference.scores(q.double(), k.double(), w.double())


def error_bound(q, k, w):
    """fp32 rounding of the sum over heads: a few units in the last place of the sum of magnitudes."""
    return 4e-7 * reference.scores(q.double(), k.double(), w.double().abs()).abs().amax()


@pytest.fixture(scope="module")
def kernels(emulated):
    from nemo_v4_indexer.kernels import score_fwd

    return {
        (h, d): emulated(score_fwd.score_fwd(h, d), score_fwd.PASS_CONFIGS) for h, d in ((64, 128), (8, 32), (128, 64))
    }


@pytest.mark.parametrize("heads, dim", [(64, 128), (8, 32), (128, 64)])
def test_scores(kernels, schedule, heads, dim):
    q, k, w, start, end = problem(heads, dim)
    first, rows, groups, stride = 3, 29, k.shape[0], 156
    out = emulate.poisoned(2 * rows * stride)
    kernels[heads, dim](q, k, w, start, end, out, first, rows, stride, 3)
    got = out.view(2, rows, stride)[..., :groups].double()
    want = exact(q, k, w)[:, first : first + rows]
    seen = visibility.visible(start, end, groups)[:, first : first + rows]
    assert seen.sum() > 1000
    torch.testing.assert_close(got[seen], want[seen], rtol=0, atol=error_bound(q, k, w).item())


def test_scores_of_strided_views(kernels, schedule):
    """Batch, rows and heads picked out of larger tensors; the gaps hold NaN."""
    q, k, w, start, end = problem(8, 32, rows=21, batch=1, groups=70)
    wide_q = emulate.poisoned(42, 2, 8, 64, dtype=torch.bfloat16)
    wide_k = emulate.poisoned(70, 3, 64, dtype=torch.bfloat16)
    wide_w = emulate.poisoned(21, 1, 16)
    views = wide_q[::2, 1:, :, 32:], wide_k[:, 1:2, :32], wide_w[..., 8:]
    for view, values in zip(views, (q, k, w), strict=True):
        view.copy_(values)
    out = emulate.poisoned(21 * 72)
    kernels[8, 32](*views, start, end, out, 0, 21, 72, 2)
    seen = visibility.visible(start, end, 70)
    got = out.view(1, 21, 72)[..., :70].double()
    torch.testing.assert_close(got[seen], exact(q, k, w)[seen], rtol=0, atol=error_bound(q, k, w).item())


def test_relu_keeps_nan(kernels):
    q, k, w, start, end = problem(64, 128, rows=9, groups=70)
    k[11, 0] = float("nan")
    out = emulate.poisoned(2 * 9 * 72)
    kernels[64, 128](q, k, w, start.zero_(), end.fill_(70), out, 0, 9, 72, 3)
    got = out.view(2, 9, 72)[..., :70]
    assert got[0, :, 11].isnan().all()
    assert not got[1].isnan().any()


@pytest.fixture(scope="module")
def topk():
    return 24


def test_forward_against_reference(product, schedule, topk):
    """Scores and selection in chunks of a tiny workspace. Selections are compared where no rounding can decide."""
    from nemo_v4_indexer.kernels import forward

    q, k, w, start, end = problem(64, 128)
    got, indices = forward.forward(q, k, w, start, end, topk, workspace_bytes=2 * 156 * 4 * 12)
    full = exact(q, k, w)
    want, chosen = reference.select(full, start, end, topk)
    bound = error_bound(q, k, w)
    picked = full.gather(-1, indices.clamp(min=0).long()).masked_fill(indices < 0, float("-inf"))
    torch.testing.assert_close(got.double(), picked, rtol=0, atol=bound.item())
    torch.testing.assert_close(picked.sort().values, want.sort().values, rtol=0, atol=bound.item())
    assert (indices == chosen).float().mean() > 0.99

    whole, same = forward.forward(q, k, w, start, end, topk)
    assert torch.equal(whole, got)
    assert torch.equal(same, indices)


def test_gather_replays_forward(product, schedule, topk):
    """Given indices in any order, with invisible and missing ones among them."""
    from nemo_v4_indexer.kernels import forward

    q, k, w, start, end = problem(64, 128)
    scores, indices = forward.forward(q, k, w, start, end, topk)
    backwards = indices.flip(-1).contiguous()
    assert torch.equal(forward.gather(q, k, w, start, end, backwards), scores.flip(-1))

    beyond = torch.full_like(indices, 150)
    beyond[..., 0] = start - 1
    beyond[..., 1] = end
    assert (forward.gather(q, k, w, start, end, beyond) == float("-inf")).all()
