"""Scores and selection on a Hopper GPU against fp64 and against the reference's selection rule."""

import pytest
import torch
from forward_data import assert_selected, causal, make_inputs, true_scores

from nemo_v4_indexer import reference, visibility
from nemo_v4_indexer.kernels import forward, tiling

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.mark.parametrize("heads", tiling.HEADS)
@pytest.mark.parametrize("dim", tiling.DIMS)
def test_every_head_count_and_dim(heads, dim):
    for rows, batch, ratio in ((1, 1, 1), (63, 3, 1), (65, 1, 4), (1000, 3, 4)):
        groups = visibility.num_groups(rows, ratio)
        q, k, w = make_inputs(rows, batch, groups, heads, dim, seed=rows)
        start, end = causal(rows, batch, ratio)
        for topk in (1, 33):
            scores, indices = forward.forward(q, k, w, start, end, topk)
            assert_selected(scores, indices, (q, k, w), start, end, topk)
            if rows > 1:  # the comparison can fail
                shifted = (indices + 1).clamp(max=groups - 1)
                with pytest.raises(AssertionError):
                    assert_selected(scores, shifted, (q, k, w), start, end, topk)


@pytest.mark.parametrize(
    ("rows", "batch", "ratio", "topk"),
    [(4097, 1, 4, 512), (4097, 3, 1, 511), (8192, 1, 4, 1024), (3001, 1, 1, 2048), (5, 2, 4, 512)],
)
def test_long_and_ragged(rows, batch, ratio, topk):
    q, k, w = make_inputs(rows, batch, visibility.num_groups(rows, ratio))
    start, end = causal(rows, batch, ratio)
    scores, indices = forward.forward(q, k, w, start, end, topk)
    assert_selected(scores, indices, (q, k, w), start, end, topk)


def test_limits_are_data():
    rows, batch, groups = 777, 2, 1501
    q, k, w = make_inputs(rows, batch, groups)
    generator = torch.Generator("cuda").manual_seed(5)
    start = torch.randint(-3, groups, (batch, rows), device="cuda", generator=generator, dtype=torch.int32)
    end = start + torch.randint(-50, 900, (batch, rows), device="cuda", generator=generator, dtype=torch.int32)
    end[:, ::7] = start[:, ::7]
    scores, indices = forward.forward(q, k, w, start, end, 100)
    assert_selected(scores, indices, (q, k, w), *visibility.batched_limits(start, end, batch, rows, groups), 100)
    lengths = torch.tensor([0, 3, 700, 701, 777], device="cuda")
    start, end = visibility.packed_limits(lengths, 4)
    start, end = visibility.batched_limits(start, end, batch, rows, groups)
    scores, indices = forward.forward(q, k, w, start, end, 100)
    assert_selected(scores, indices, (q, k, w), start, end, 100)


def test_nothing_to_see():
    q, k, w = make_inputs(9, 2, 5)
    none = torch.zeros(2, 9, dtype=torch.int32, device="cuda")
    for keys in (k, k[:0]):
        scores, indices = forward.forward(q, keys, w, none, none, 7)
        assert bool((scores == float("-inf")).all()) and bool((indices == -1).all())


@pytest.mark.parametrize("heads", [16, 64])
def test_chunks_change_nothing(heads):
    rows, batch = 2500, 2
    q, k, w = make_inputs(rows, batch, 625, heads)
    start, end = causal(rows, batch, 4)
    whole = forward.forward(q, k, w, start, end, 64)
    for workspace in (1, 3 * MIB, 7 * MIB // 2):
        part = forward.forward(q, k, w, start, end, 64, workspace_bytes=workspace)
        assert torch.equal(whole[0], part[0]) and torch.equal(whole[1], part[1])


def test_strides_are_read_in_place():
    rows, batch, groups = 515, 2, 128
    q, k, w = make_inputs(rows, batch, groups)
    start, end = causal(rows, batch, 4)
    expected = forward.forward(q, k, w, start, end, 32)

    def spread(tensor, order):
        wide = torch.zeros(*[tensor.shape[i] for i in order], device="cuda", dtype=tensor.dtype).repeat_interleave(
            2, -1
        )
        view = wide[..., : tensor.shape[order[-1]]].permute(*[order.index(i) for i in range(tensor.dim())])
        view.copy_(tensor)
        return view

    arms = {
        "batch first": (spread(q, (1, 0, 2, 3)), spread(k, (1, 0, 2)), spread(w, (1, 0, 2))),
        "heads first": (spread(q, (2, 1, 0, 3)), k, w),
        "copied": (q.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), spread(k, (2, 0, 1)), spread(w, (2, 1, 0))),
    }
    assert forward.tma_view(arms["batch first"][0]).data_ptr() == arms["batch first"][0].data_ptr()
    assert forward.tma_view(arms["copied"][0]).data_ptr() != arms["copied"][0].data_ptr()
    for name, views in arms.items():
        scores, indices = forward.forward(*views, start, end, 32)
        assert torch.equal(expected[0], scores) and torch.equal(expected[1], indices), name
    one = k[:, :1].expand(groups, batch, 128)
    shared = forward.forward(q, one, w, start, end, 32)
    again = forward.forward(q, one.contiguous(), w, start, end, 32)
    assert torch.equal(shared[0], again[0]) and torch.equal(shared[1], again[1])


def test_replay_repeats_the_scores():
    rows, batch, groups, topk = 1500, 2, 375, 77
    q, k, w = make_inputs(rows, batch, groups)
    start, end = causal(rows, batch, 4)
    scores, indices = forward.forward(q, k, w, start, end, topk)
    for workspace in (256 * MIB, MIB):
        assert torch.equal(forward.gather(q, k, w, start, end, indices, workspace_bytes=workspace), scores)
    order = torch.randperm(topk, device="cuda")
    assert torch.equal(forward.gather(q, k, w, start, end, indices[..., order]), scores[..., order])
    wild = torch.randint(-5, groups + 9, indices.shape, device="cuda", dtype=torch.int32)
    found = forward.gather(q, k, w, start, end, wild)
    valid = visibility.valid_slots(wild, start, end)
    truth = true_scores(q, k, w).gather(-1, wild.clamp(0, groups - 1).long())
    assert bool((found[~valid] == float("-inf")).all())
    assert float((found.double() - truth)[valid].abs().max()) <= 8e-6 * float(truth.abs().max())


def test_bad_numbers_stay_in_their_rows_and_keys():
    rows, groups, topk = 400, 200, 50
    q, k, w = make_inputs(rows, 1, groups)
    start = torch.zeros(1, rows, dtype=torch.int32, device="cuda")
    end = torch.full_like(start, groups)
    clean = forward.forward(q, k, w, start, end, topk)
    bad_q, bad_w = q.clone(), w.clone()
    bad_q[10, 0, 3, 5] = float("nan")
    bad_q[11, 0, :, 7] = float("inf")
    bad_q[12, 0, :, 7] = float("-inf")
    bad_w[13] = -1e30
    bad_w[14, 0, 2] = float("inf")
    scores, indices = forward.forward(bad_q, k, bad_w, start, end, topk)
    rest = torch.tensor([r for r in range(rows) if r not in range(10, 15)], device="cuda")
    assert torch.equal(scores[:, rest], clean[0][:, rest]) and torch.equal(indices[:, rest], clean[1][:, rest])
    expected = reference.scores(bad_q[10:15].float(), k.float(), bad_w[10:15])
    for r in (0, 1, 2, 4):  # classes of numbers agree, so the selection does where it is decided by them
        mine = forward.gather(
            bad_q, k, bad_w, start, end, torch.arange(groups, device="cuda", dtype=torch.int32).expand(1, rows, groups)
        )[0, 10 + r]
        assert torch.equal(mine.isnan(), expected[0, r].isnan()) and torch.equal(mine.isinf(), expected[0, r].isinf())
    assert torch.equal(indices[0, 10], torch.arange(topk, device="cuda", dtype=torch.int32)) and bool(
        scores[0, 10].isnan().all()
    )
    bad_k = k.clone()
    bad_k[17, 0, 0] = float("nan")
    scores, indices = forward.forward(q, bad_k, w, start, end, topk)
    assert bool((indices == 17).any(-1).all()) and bool((scores.isnan().sum(-1) == 1).all())
    assert int(indices.max()) < groups and int(indices.min()) >= 0


def kinds(shape, generator):
    """Rows that are hard to select from."""
    n = shape[-1]
    place = torch.arange(n, device="cuda")

    def normal():
        return torch.randn(shape, device="cuda", generator=generator)

    def value(x):
        return torch.tensor(float(x), device="cuda")

    yield "normal", normal()
    yield "heavy ties", torch.randint(-3, 4, shape, device="cuda", generator=generator).float()
    yield "all equal", torch.full(shape, 1.5, device="cuda")
    yield "equal but 100 winners", (place % max(1, n // 100) == 0).float().expand(shape) + 2
    yield "signed zeros", torch.where(normal() > 0, value(0.0), value(-0.0))
    yield "tiny negatives", -torch.rand(shape, device="cuda", generator=generator) * 1e-42
    yield "large offset", normal() + 1e7
    yield "below -65504", normal() * 1e3 - 1e6
    yield "infinities", torch.where(normal() > 1.2, value("inf"), torch.where(normal() < -1, value("-inf"), normal()))
    yield (
        "NaN of both signs",
        torch.where(normal() > 1.8, value("nan"), torch.where(normal() > 1.5, -value("nan"), normal())),
    )
    yield "all NaN", torch.full(shape, float("nan"), device="cuda")
    yield "all -inf", torch.full(shape, float("-inf"), device="cuda")
    yield "outliers", torch.where(normal().abs() > 3, normal() * 1e38, normal())
    yield "ascending", place.float().expand(shape).contiguous()
    yield "descending", (-place.float()).expand(shape).contiguous()
    yield "hot tail", normal() + 10 * (place > n - 300)
    yield "clipped", torch.relu(normal() - 1.6)
    yield (
        "random bits",
        torch.randint(-(2**31), 2**31 - 1, shape, device="cuda", generator=generator).int().view(torch.float32),
    )
    yield (
        "last 10 bits",
        (torch.randint(0, 1024, shape, device="cuda", generator=generator).int() + 0x3F800000).view(torch.float32),
    )


@pytest.mark.parametrize(
    ("topk", "keys"),
    [
        (1, 40),
        (7, 2048),
        (512, 2047),
        (512, 8192),
        (513, 9001),
        (512, 40000),
        (1024, 8191),
        (1024, 20000),
        (2048, 2500),
        (2048, 16384),
        (2048, 131072),
        (4096, 30000),
    ],
)
def test_selection_is_exact_on_hard_rows(topk, keys):
    plan = tiling.topk_plan(topk, keys)
    select = forward.topk_kernel(topk, plan)
    stride, unit = tiling.row_stride(keys), 32 * plan.words * plan.threads
    ends = (
        0,
        1,
        topk - 1,
        topk,
        topk + 1,
        2 * topk + 3,
        plan.cap - 1,
        plan.cap,
        plan.cap + 1,
        unit - 1,
        unit,
        unit + 33,
        keys - 1,
        keys,
        keys + 9,
    )
    spans = [(0, n) for n in ends] + [
        (3, topk + 4),
        (5, keys),
        (unit - 2, unit + 700),
        (keys - topk, keys),
        (keys - topk - 2, keys),
        (9, 4),
    ]
    spans = [(max(a, 0), b) for a, b in spans if a <= keys]
    count, row0 = len(spans), 2
    limits = torch.zeros(2, 1, count + 5, dtype=torch.int32, device="cuda")
    limits[:, 0, row0 : row0 + count] = torch.tensor(spans, dtype=torch.int32, device="cuda").T
    start, end = limits[0, :, row0 : row0 + count], limits[1, :, row0 : row0 + count].clamp(max=keys)
    seen = visibility.visible(start, end, stride)
    for name, values in kinds((1, count, stride), torch.Generator("cuda").manual_seed(topk + keys)):
        expected = reference.select(values[..., :keys], start, end, topk)
        for outside in (7e37, float("nan")):  # what lies outside the limits must not matter
            poisoned = torch.where(seen, values, torch.tensor(outside, device="cuda")).contiguous()
            indices = torch.full((1, count + 5, topk), -7, dtype=torch.int32, device="cuda")
            scores = torch.full((1, count + 5, topk), 123.0, device="cuda")
            select(
                poisoned.view(-1),
                limits[0].view(-1),
                limits[1].view(-1),
                indices.view(-1),
                scores.view(-1),
                1,
                count,
                count + 5,
                keys,
                stride,
                row0,
            )
            got, at = scores[:, row0 : row0 + count], indices[:, row0 : row0 + count]
            wrong = (at != expected[1]).any(-1) | (got.view(torch.int32) != expected[0].view(torch.int32)).any(-1)
            assert not bool(wrong.any()), f"{name}: rows {[spans[int(r)] for r in wrong[0].nonzero()[:4]]}"
            assert bool((indices[:, :row0] == -7).all()) and bool((indices[:, row0 + count :] == -7).all()), (
                "other rows"
            )


def test_twenty_runs_agree():
    q, k, w = make_inputs(3000, 1, 750)
    k = k[torch.arange(750, device="cuda") % 50]  # every key 15 times: ties everywhere
    start, end = causal(3000, 1, 4)
    first = forward.forward(q, k, w, start, end, 101)
    assert_selected(*first, (q, k, w), start, end, 101)
    for _ in range(20):
        again = forward.forward(q, k, w, start, end, 101)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_captured_in_a_graph_and_on_a_side_stream():
    rows, topk = 2000, 128
    q, k, w = make_inputs(rows, 1, 500)
    start, end = causal(rows, 1, 4)
    fresh = make_inputs(rows, 1, 500, seed=9)
    expected = forward.forward(*fresh, start, end, topk, workspace_bytes=2 * MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores, indices = forward.forward(q, k, w, start, end, topk, workspace_bytes=2 * MIB)
    for into, new in zip((q, k, w), fresh, strict=True):
        into.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(scores, expected[0]) and torch.equal(indices, expected[1])
    side = torch.cuda.Stream()
    late = [torch.zeros_like(t) for t in fresh]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # inputs arrive late: a kernel on another stream would read zeros
        for into, new in zip(late, fresh, strict=True):
            into.copy_(new, non_blocking=True)
        scores, indices = forward.forward(*late, start, end, topk)
    side.synchronize()
    assert torch.equal(scores, expected[0]) and torch.equal(indices, expected[1])


def test_new_lengths_build_nothing():
    q, k, w = make_inputs(400, 1, 400)
    forward.prebuild(64, 128, 16)
    built = forward.score_kernel.cache_info().currsize, forward.topk_kernel.cache_info().currsize
    for rows in range(1, 400, 4):
        start, end = causal(rows, 1, 1)
        forward.forward(q[:rows], k[:rows], w[:rows], start, end, 16)
    assert (forward.score_kernel.cache_info().currsize, forward.topk_kernel.cache_info().currsize) == built


def test_memory_of_a_long_sequence():
    rows, topk = 131072, 512
    q, k, w = make_inputs(rows, 1, rows // 4, heads=16)
    start, end = causal(rows, 1, 4)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores, indices = forward.forward(q, k, w, start, end, topk)
    extra = torch.cuda.max_memory_allocated() - before - scores.nbytes - indices.nbytes
    assert extra <= tiling.WORKSPACE_BYTES + MIB, f"{extra / MIB:.0f} MiB"
    pick = torch.tensor([0, 2, 3, 4, 65537, 131070, 131071], device="cuda")
    assert_selected(scores[:, pick], indices[:, pick], (q[pick], k, w[pick]), start[:, pick], end[:, pick], topk)
