"""The backward kernels, through `backward`, under the emulator against fp64.

S query, B batch, H heads, D dim, G keys, K top-k.
"""

import emulate
import pytest
import torch

from nemo_v4_indexer import reference

NAMES = ("dq", "dk", "dw")
RANDOM = emulate.SCHEDULES[-1]


def problem(heads, dim, topk, *, rows=41, batch=2, groups=300, seed=0):
    """Signed data, ragged causal selections, NaN and inf where no slot is filled."""
    g = torch.Generator().manual_seed(1000 * heads + dim + seed)
    q = torch.randn(rows, batch, heads, dim, generator=g).bfloat16()
    k = torch.randn(groups, batch, dim, generator=g).bfloat16()
    w = torch.randn(rows, batch, heads, generator=g)
    indices = torch.full((batch, rows, topk), -1, dtype=torch.int32)
    grad = torch.full((batch, rows, topk), float("nan"))
    grad[..., topk // 2 :] = float("inf")
    for b in range(batch):
        for s in range(rows):
            seen = s * groups // (rows - 1)
            n = min(topk, seen)
            indices[b, s, :n] = torch.randperm(seen, generator=g)[:n].sort().values
            grad[b, s, :n] = torch.randn(n, generator=g)
    return q, k, w, indices, grad


def exact(q, k, w, indices, grad):
    return reference.backward(q.double(), k.double(), w.double(), indices, grad.double())


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(got, want, limits):
    """Every gradient within its limit, and far from zero: zeros in its place would fail."""
    for name, g, x, limit in zip(NAMES, got, want, limits, strict=True):
        assert torch.isfinite(g).all(), name
        assert relative_error(g, x) < limit, name
        assert relative_error(torch.zeros_like(g), x) > 0.5, name


# bf16 rounds to 2^-9 at worst; dq leaves in bf16 and its factor p is bf16 too, dw is summed in fp32.
PLAIN = (4e-3, 3e-3, 1e-6)
PRECISE = (4e-3, 2e-5, 1e-6)


@pytest.fixture(scope="module", autouse=True)
def programs(product):
    """Starts the builds of everything below, the slowest first."""
    from nemo_v4_indexer.kernels import backward

    shapes = ((64, 128), (8, 32), (128, 64))
    backward.kernel("key_side", 64, 128, True)
    for heads, dim in shapes:
        backward.kernel("key_side", heads, dim, False)
    for heads, dim in shapes:
        slots = backward.slot_capacity(100 if heads == 64 else 40)
        backward.kernel("query_side", slots, heads, dim)
        backward.kernel("sparse", slots, heads, dim, False)
        backward.kernel("reduce", dim)
    backward.kernel("sparse", backward.slot_capacity(100), 64, 128, True)
    backward.kernel("plan")


@pytest.mark.parametrize("precise", [False, True], ids=["plain", "precise"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sparse", "dense"])
def test_backward(product, schedule, deterministic, precise):
    from nemo_v4_indexer.kernels import backward

    data = problem(64, 128, 100)
    got = backward.backward(*data, deterministic=deterministic, precise=precise, dk_dtype=torch.float32)
    check(got, exact(*data), PRECISE if precise else PLAIN)


@pytest.mark.parametrize("heads, dim", [(8, 32), (128, 64)])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sparse", "dense"])
def test_other_heads_and_dims(product, schedule, deterministic, heads, dim):
    """Eight heads are padded to a whole product; 128 are two blocks."""
    from nemo_v4_indexer.kernels import backward

    data = problem(heads, dim, 40, rows=27, groups=130)
    got = backward.backward(*data, deterministic=deterministic, dk_dtype=torch.float32)
    check(got, exact(*data), PLAIN)


def test_dense_repeats_bit_for_bit(product):
    """Whatever the order of threads and blocks, and in chunks of the queries too, each chunk size for itself."""
    from nemo_v4_indexer.kernels import backward

    data = problem(64, 128, 100)
    runs = []
    for schedule in emulate.SCHEDULES:
        with emulate.scheduled(schedule):
            runs.append(backward.backward(*data, deterministic=True, dk_dtype=torch.float32))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_dense_in_chunks(product):
    """A workspace too small for the whole problem: batches one by one, queries in pieces."""
    from nemo_v4_indexer.kernels import backward

    data = problem(64, 128, 100, rows=140)
    plan = backward.plan_backward(140, 2, 300, 64, 128, 100, True, 1 << 20)
    assert (plan.way, plan.batches) == ("dense", 1)
    assert plan.queries < 140
    with emulate.scheduled(RANDOM):
        got = backward.backward(*data, deterministic=True, dk_dtype=torch.float32, workspace_bytes=1 << 20)
    check(got, exact(*data), PLAIN)


@pytest.mark.parametrize("deterministic", [False, True], ids=["sparse", "dense"])
def test_replayed_selection(product, deterministic):
    """Any order, duplicates, and indices that name no key, in the middle of a row."""
    from nemo_v4_indexer.kernels import backward

    q, k, w, indices, grad = problem(64, 128, 100)
    g = torch.Generator().manual_seed(3)
    order = torch.randperm(100, generator=g)
    indices, grad = indices[..., order].contiguous(), grad[..., order].contiguous()
    double = (indices[..., 3] >= 0) & (indices[..., 7] >= 0)
    indices[..., 3] = torch.where(double, indices[..., 7], indices[..., 3])
    want = exact(q, k, w, indices, grad)
    stray = indices < 0
    indices[stray] = torch.tensor([-1, -7, 300, 2**31 - 1], dtype=torch.int32).repeat(stray.sum())[: stray.sum()]
    with emulate.scheduled(RANDOM):
        got = backward.backward(
            q, k, w, indices, grad, deterministic=deterministic, ordered=False, dk_dtype=torch.float32
        )
    check(got, want, PLAIN)


@pytest.mark.parametrize("deterministic", [False, True], ids=["sparse", "dense"])
def test_strided_inputs(product, deterministic):
    """Views with gaps, and an upstream gradient expanded from one number (all strides zero)."""
    from nemo_v4_indexer.kernels import backward

    q, k, w, indices, _ = problem(64, 128, 100)
    wide_q = torch.full((82, 2, 64, 192), float("nan"), dtype=torch.bfloat16)
    wide_w = torch.full((64, 2, 41), float("nan"))
    wide_q[::2, :, :, 64:], wide_w[:] = q, w.permute(2, 1, 0)
    grad = torch.tensor(-0.75).expand(indices.shape)
    with emulate.scheduled(RANDOM):
        got = backward.backward(
            wide_q[::2, :, :, 64:],
            k,
            wide_w.permute(2, 1, 0),
            indices,
            grad,
            deterministic=deterministic,
            dk_dtype=torch.float32,
        )
    check(got, exact(q, k, w, indices, grad.clone()), PLAIN)
