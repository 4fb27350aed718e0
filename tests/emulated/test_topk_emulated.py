"""The top-k program under the emulator against a plain sort, on rows made to be awkward.

B batch, R rows of a launch, S rows of the outputs, G keys, K top-k.
"""

import emulate
import pytest
import torch

from nemo_v4_indexer import reference
from nemo_v4_indexer.kernels.tiling import TopkPlan, topk_plan

INF, NAN = float("inf"), float("nan")
K = 40
PLANS = {
    "list": TopkPlan(mode="list", threads=64, cap=256, blocks=4),
    "resident": TopkPlan(mode="resident", threads=128, words=2, cap=128, blocks=4),
    "stream": TopkPlan(mode="stream", threads=64, cap=128, blocks=4),
}
UNIT = 32 * 64  # keys that one pass of the smaller blocks takes; the resident one takes four times as many
LENGTHS = {
    "list": (0, 1, K - 1, K, K + 1, 100, 255, 256),
    "resident": (K, K + 1, 127, 128, 129, 700, 4 * UNIT - 5, 4 * UNIT - 4),
    "stream": (K + 1, 128, 130, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT + 77, 2 * UNIT + 900),
}


def scatter(values, where, value):
    return torch.where(where, torch.as_tensor(value, dtype=values.dtype), values)


def rows_of_every_kind(length, g):
    """fp32 [kinds, length]: random, tied, constant, ordered, with infinities, NaN, raw bit patterns."""
    r = torch.randn(length, generator=g)
    r2 = torch.randn(length, generator=g)
    steps = torch.arange(length, dtype=torch.float32)
    return torch.stack(
        [
            r,
            -r.abs() * 1e-42,  # denormal and negative
            torch.randint(-3, 4, (length,), generator=g).float(),
            torch.full_like(r, 1.5),
            torch.where(r > 0, 0.0, -0.0),
            scatter(scatter(r, r2 > 1.2, INF), r2 < -1, -INF),
            scatter(scatter(r, r2 > 1.8, NAN), r2 < -1.8, -torch.tensor(NAN)),
            torch.full_like(r, NAN),
            torch.full_like(r, -INF),
            scatter(r, r2.abs() > 2.5, 3e38),
            r + 1e7,
            steps,
            -steps,
            (r - 1.6).relu(),
            r + 10 * (steps > length - 30),
            torch.randint(-(2**31), 2**31, (length,), generator=g).to(torch.int32).view(torch.float32),
        ]
    )


def launch(kernel, values, start, end, k, *, row0, guard=5):
    """Rows of `values` [B, R, G] as rows row0 .. of outputs that are longer; everything unseen is poison."""
    batch, rows, keys = values.shape
    stride = -(-keys // 4) * 4
    length = row0 + rows + guard
    workspace = torch.full((batch, rows, stride), 3.3e38)
    columns = torch.arange(keys)
    seen = (columns >= start[..., None]) & (columns < end[..., None])
    workspace[..., :keys] = torch.where(seen, values, workspace[..., :keys])
    limits = []
    for limit in (start, end):
        padded = torch.zeros(batch, length, dtype=torch.int32)
        padded[:, row0 : row0 + rows] = limit
        limits.append(padded.view(-1))
    indices = emulate.poisoned(batch, length, k, dtype=torch.int32)
    scores = emulate.poisoned(batch, length, k)
    kernel(
        workspace.view(-1), *limits, indices.view(-1), scores.view(-1), batch, rows, length, keys, stride, row0
    )  # fmt: skip
    written = slice(row0, row0 + rows)
    outside = torch.ones(length, dtype=torch.bool)
    outside[written] = False
    assert scores[:, outside].isnan().all()
    return scores[:, written], indices[:, written]


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check(kernel, values, start, end, k, row0=2):
    scores, indices = launch(kernel, values, start, end, k, row0=row0)
    want, chosen = reference.select(values, start, end, k)
    wrong = (indices != chosen).any(-1).nonzero().tolist()
    assert not wrong, f"rows {wrong[:5]}"
    assert same_bits(scores, want)


@pytest.fixture(scope="module")
def kernels(emulated):
    from nemo_v4_indexer.kernels import topk

    def build(k, plan):
        program = topk.topk_select(
            k, mode=plan.mode, threads=plan.threads, words=plan.words, cap=plan.cap, blocks=plan.blocks
        )
        return emulated(program, topk.PASS_CONFIGS)

    # All are started at once, the slowest first.
    made = {name: build(K, PLANS[name]) for name in ("stream", "resident", "list")}
    return made | {"production": build(512, topk_plan(512, 8192))}


@pytest.mark.parametrize("mode", PLANS)
def test_every_kind_and_length(kernels, schedule, mode):
    """Rows start at any column, so their first score sits anywhere within 16 bytes."""
    g = torch.Generator().manual_seed(5)
    lengths = LENGTHS[mode]
    keys = max(lengths) + 4
    values, starts, ends = [], [], []
    for length in lengths:
        rows = rows_of_every_kind(keys, g)
        # A resident row and its offset within 16 bytes have to fit the buffer together.
        first = torch.arange(len(rows)) % 4 if length + 3 <= 4 * UNIT or mode == "stream" else torch.zeros(len(rows))
        values.append(rows)
        starts.append(first.int())
        ends.append(first.int() + length)
    shape = (2, -1)  # two batches
    values = torch.cat(values).view(2, -1, keys)
    check(kernels[mode], values, torch.cat(starts).view(shape), torch.cat(ends).view(shape), K)


def test_production_plan(kernels, schedule):
    """K=512 as launched for 8192 keys, on the kinds that take different ways through the program."""
    g = torch.Generator().manual_seed(6)
    values = rows_of_every_kind(7001, g)[None, [0, 2, 5, 6, 11, 15]]
    start = torch.tensor([[0, 1, 2, 3, 100, 0]], dtype=torch.int32)
    end = torch.tensor([[7001, 7000, 6999, 700, 7001, 1281]], dtype=torch.int32)
    check(kernels["production"], values, start, end, 512)


def test_limits_are_clamped(kernels):
    """Limits beyond the keys, and empty or reversed ones."""
    values = torch.randn(1, 5, 200, generator=torch.Generator().manual_seed(7))
    start = torch.tensor([[0, 150, 200, 60, -5]], dtype=torch.int32)
    end = torch.tensor([[500, 300, 200, 20, 100]], dtype=torch.int32)
    clamped = start.clamp(min=0), torch.maximum(end.clamp(max=200), start.clamp(min=0))
    scores, indices = launch(kernels["list"], values, start, end, K, row0=0)
    want, chosen = reference.select(values, *clamped, K)
    assert torch.equal(indices, chosen)
    assert same_bits(scores, want)
