"""Backward kernels on a Hopper GPU against fp64.

S query, B batch, H heads, D dim, G keys, K top-k.
"""

import pytest
import torch

from nemo_v4_indexer.kernels import backward as bw
from nemo_v4_indexer.kernels import runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a Hopper GPU: torch sees no CUDA device"),
]
NAMES = ("dq", "dk", "dw")
WAYS = pytest.mark.parametrize("deterministic", [False, True], ids=["sparse", "dense"])


@pytest.fixture(autouse=True)
def supported():
    if reason := runtime.support("cuda", torch.bfloat16, 64, 128, 512):
        pytest.skip(reason)


@pytest.fixture
def way(monkeypatch, deterministic):
    """Take the way that the test names, also where the shape would prefer the other."""
    monkeypatch.setattr(bw, "prefers_dense", lambda *shape: deterministic)
    return deterministic


def selections(s, b, g, k, ratio, window, generator):
    """Random causal selections; with a window, neighbouring rows share most of their keys."""
    out = torch.full((b, s, k), -1, dtype=torch.int32, device="cuda")
    seen = ((torch.arange(s, device="cuda") + 1) // ratio).clamp(max=g)
    m = min(k, g)
    for i in range(b):
        noise = torch.randn(s + window, g, device="cuda", generator=generator)
        if window:
            sums = noise.cumsum(0, dtype=torch.float64)
            noise = (sums[window:] - sums[:-window]).float()
        noise.masked_fill_(torch.arange(g, device="cuda") >= seen[:, None], -1e30)
        value, index = noise.topk(m)
        index = index.masked_fill(value < -1e29, g).sort(-1).values
        out[i, :, :m] = index.masked_fill(index == g, -1)
    return out


def problem(s, b=1, h=64, d=128, k=512, *, groups=None, ratio=4, window=0, seed=0):
    """Small fractions: every score is exact in fp32, so fp64 agrees on which are positive, and zeros occur."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    groups = max(1, s // ratio) if groups is None else groups

    def fractions(*shape):
        return (torch.randint(-8, 9, shape, device="cuda", generator=gen) / 4).bfloat16()

    q, keys = fractions(s, b, h, d), fractions(groups, b, d)
    w = torch.randn(s, b, h, device="cuda", generator=gen)
    indices = selections(s, b, groups, k, ratio, window, gen)
    grad = torch.randn(b, s, k, device="cuda", generator=gen)
    return q, keys, w, indices, grad.masked_fill_(indices < 0, float("nan"))


def by_rows(q, k, w, indices, grad, dtype, rows=32):
    """dq, dk, dw with every product in dtype; sums over queries in fp64."""
    s, b = q.shape[:2]
    g = k.shape[0]
    dq, dw = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(w, dtype=torch.float64)
    dk = torch.zeros(g, b, q.shape[3], dtype=torch.float64, device=q.device)
    for i in range(b):
        keys = k[:, i].to(dtype)
        for lo in range(0, s, rows):
            part = slice(lo, min(s, lo + rows))
            index = indices[i, part]
            valid = (index >= 0) & (index < g)
            at = index.masked_fill(~valid, 0).long()
            value = grad[i, part].masked_fill(~valid, 0).to(dtype)
            picked, qq, ww = keys[at], q[part, i].to(dtype), w[part, i].to(dtype)
            x = torch.einsum("shd,skd->shk", qq, picked)
            m = (x > 0) * value[:, None]
            dw[part, i] = (m.double() * x.double()).sum(-1)
            dq[part, i] = (torch.einsum("shk,skd->shd", m, picked) * ww[..., None]).double()
            dk[:, i].index_add_(
                0, at.flatten(), torch.einsum("shk,shd->skd", m * ww[..., None], qq).double().flatten(0, 1)
            )
    return dq, dk, dw


def error(got, want):
    assert torch.isfinite(got).all()
    return ((got.double() - want).norm() / want.norm()).item()


def check(data, *, precise=False, **options):
    """Each gradient within twice what plain bf16 torch loses; zeros in its place must be refused."""
    exact = by_rows(*data, torch.float64)
    plain = by_rows(*data, torch.bfloat16)
    got = bw.backward(*data, precise=precise, dk_dtype=torch.float32, **options)
    for name, g, x, p in zip(NAMES, got, exact, plain, strict=True):
        if x.norm() == 0:
            assert g.count_nonzero() == 0, name
            continue
        budget = {"dk": 2e-5, "dw": 1e-6}.get(name, 4e-3) if precise else 2 * error(p, x)
        assert error(g, x) <= budget, name
        assert error(torch.zeros_like(g), x) > budget, name
    return got


@WAYS
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("s", [1, 3, 63, 65, 1000, 4097])
def test_lengths(way, s, b):
    check(problem(s, b), deterministic=way)


@WAYS
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_heads_and_dims(way, heads, dim):
    check(problem(517, 2, heads, dim, 96), deterministic=way)


@WAYS
@pytest.mark.parametrize("topk", [1, 7, 64, 65, 333, 1024, 1500, 2048, 4096])
def test_widths(way, topk):
    check(problem(700, 1, k=topk, ratio=1, groups=5000 if topk > 2048 else 700), deterministic=way)


@WAYS
@pytest.mark.parametrize("window", [0, 64])
def test_precise(way, window):
    check(problem(2501, 2, window=window), deterministic=way, precise=True)


@WAYS
def test_correlated_rows(way):
    check(problem(3000, window=64), deterministic=way)


@WAYS
def test_strides(way):
    """q and k as views of wider tensors, transposed weights, an expanded gradient."""
    q, k, w, indices, grad = problem(321, 3, k=100)
    wide = torch.zeros(321, 3, 2, 64, 128, dtype=q.dtype, device="cuda")
    wide[:, :, 1] = q
    keys = torch.zeros(k.shape[0], 4, 256, dtype=q.dtype, device="cuda")
    keys[:, 1:, 128:] = k
    data = wide[:, :, 1], keys[:, 1:, 128:], w.permute(2, 1, 0).contiguous().permute(2, 1, 0), indices
    check((*data, torch.full((), -1.5, device="cuda").expand(grad.shape)), deterministic=way)
    check((*data, grad[:, :, :1].nan_to_num().expand(grad.shape)), deterministic=way)
    check((*data, grad.transpose(1, 2).contiguous().transpose(1, 2)), deterministic=way)


@WAYS
def test_rows_without_keys(way):
    """Empty rows in between, and a selection that is empty everywhere."""
    q, k, w, indices, grad = problem(300, 2, k=70)
    indices[:, ::3] = -1
    got = check((q, k, w, indices, grad), deterministic=way)
    assert got[0][::3].count_nonzero() == 0
    check((q, k, w, torch.full_like(indices, -1), grad), deterministic=way)


@WAYS
def test_documents(way):
    """Row limits that are not causal: every row selects within its own document."""
    q, k, w, indices, grad = problem(900, 2, k=100, ratio=1, groups=1200)
    start = torch.arange(900, device="cuda") // 130 * 130
    indices = torch.where(indices >= 0, indices % 100 + start[None, :, None], -1).sort(-1).values
    indices = indices.masked_fill(indices.diff(dim=-1, prepend=indices[..., :1] - 1) == 0, -1)
    check((q, k, w, indices.int(), grad.nan_to_num()), deterministic=way, ordered=False)


@WAYS
def test_replay(way):
    """Any order, duplicates, indices that name no key."""
    q, k, w, indices, grad = problem(400, 2, k=128)
    order = torch.randperm(128, device="cuda")
    indices, grad = indices[..., order].clone(), grad[..., order].nan_to_num(3.0)
    indices[..., 5] = torch.where((indices[..., 5] >= 0) & (indices[..., 9] >= 0), indices[..., 9], indices[..., 5])
    indices[..., 20] = torch.where(indices[..., 20] < 0, k.shape[0] + 5, indices[..., 20])
    check((q, k, w, indices, grad), deterministic=way, ordered=False)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("s, b, k, ratio, mib", [(5000, 1, 512, 4, 256), (3001, 2, 512, 1, 64), (3000, 1, 2048, 1, 40)])
def test_deterministic_repeats_bitwise(s, b, k, ratio, mib, precise):
    data = problem(s, b, k=k, ratio=ratio)
    options = {"deterministic": True, "precise": precise, "workspace_bytes": mib << 20}
    first = check(data, **options)
    for _ in range(3):
        again = bw.backward(*data, dk_dtype=torch.float32, **options)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@WAYS
def test_graph_and_side_stream(way):
    """Captured once, replayed on new values in the same tensors."""
    data = [t.clone() for t in problem(777, 2, k=100)]
    fresh = problem(777, 2, k=100, seed=1)
    bw.backward(*data, deterministic=way)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        bw.backward(*data, deterministic=way)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = bw.backward(*data, deterministic=way)
    torch.cuda.synchronize()
    for old, new in zip(data, fresh, strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for name, g, x, p in zip(NAMES, got, by_rows(*data, torch.float64), by_rows(*data, torch.bfloat16), strict=True):
        assert error(g, x) <= 2 * error(p, x), name


@WAYS
def test_no_host_synchronization(way):
    data = problem(1200, 1, k=100)
    bw.backward(*data, deterministic=way)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bw.backward(*data, deterministic=way)
        bw.backward(*data, deterministic=way, ordered=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lengths_do_not_build():
    bw.backward(*problem(100, 1), deterministic=False)
    bw.backward(*problem(100, 1), deterministic=True)
    built = bw.kernel.cache_info().misses
    for s in range(101, 140, 7):
        for deterministic in (False, True):
            bw.backward(*problem(s, 2, ratio=1), deterministic=deterministic)
    assert bw.kernel.cache_info().misses == built


@WAYS
def test_memory_of_a_long_sequence(way):
    """S = 131072: everything beside inputs and gradients within 1 GiB."""
    s, g, k = 131072, 32768, 512
    q = torch.randn(s, 1, 64, 128, device="cuda", dtype=torch.bfloat16)
    keys, w = torch.randn(g, 1, 128, device="cuda", dtype=torch.bfloat16), torch.randn(s, 1, 64, device="cuda")
    at = torch.arange(k, device="cuda", dtype=torch.int32) * 64
    indices = (at + torch.arange(s, device="cuda", dtype=torch.int32)[None, :, None] % 64).contiguous()
    grad = torch.randn(1, s, 1, device="cuda").expand(1, s, k)
    bw.backward(q[:64], keys, w[:64], indices[:, :64], grad[:, :64], deterministic=way)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = bw.backward(q, keys, w, indices, grad, deterministic=way)
    torch.cuda.synchronize()
    kept = sum(t.numel() * t.element_size() for t in got)
    assert torch.cuda.max_memory_allocated() - before - kept < 2**29
    rows = slice(s - 40, s)
    want = by_rows(q[rows], keys, w[rows], indices[:, rows], grad[:, rows], torch.float64)
    assert error(got[2][rows], want[2]) < 1e-5
    assert error(got[0][rows], want[0]) < 8e-3


def test_offsets_beyond_int32():
    """S x H x D passes 2^31: the last rows are right."""
    s, k = 262144 + 70, 64
    q = torch.randn(s, 1, 64, 128, device="cuda", dtype=torch.bfloat16)
    keys, w = torch.randn(5000, 1, 128, device="cuda", dtype=torch.bfloat16), torch.randn(s, 1, 64, device="cuda")
    indices = (torch.arange(k, device="cuda", dtype=torch.int32) * 70).expand(1, s, k).contiguous()
    grad = torch.randn(1, s, 1, device="cuda").expand(1, s, k)
    got = bw.backward(q, keys, w, indices, grad, deterministic=False)
    rows = slice(s - 40, s)
    want = by_rows(q[rows], keys, w[rows], indices[:, rows], grad[:, rows], torch.float64)
    assert error(got[2][rows], want[2]) < 1e-5
    assert error(got[0][rows], want[0]) < 8e-3
