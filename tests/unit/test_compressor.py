"""The compressor against a loop, whole and in shards."""

import copy

import naive_layer as naive
import pytest
import torch
from mocked_parallel import (
    HIDDEN,
    ROPE,
    assert_gradients,
    gradients,
    inputs,
    layer_config,
    randomize,
    relative_error,
    run_ranks,
    transformer_config,
)

from nemo_v4_indexer import visibility
from nemo_v4_indexer.compressor import V4Compressor

D, EPS = 16, 1e-6
SHAPES = [(2, True), (3, True), (4, True), (4, False), (16, False)]
NAMES = {"ape", "wkv.weight", "wgate.weight", "norm.weight"}


def build(ratio, overlap, rotate=False):
    return randomize(V4Compressor(transformer_config(), D, ratio, overlap, layer_config(4).rope, rotate))


def probe(out, seed=2):
    """Signed weights of a scalar function of the entries."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)


def expected(module, x, ratio, overlap, rotate=False, **changes):
    """Naive entries, with the gradients of the parameters and of x."""
    parameters, x = naive.doubled(module), x.detach().double().requires_grad_()
    out = naive.compress(x, parameters, ratio, overlap=overlap, rope=ROPE, eps=EPS, rotate=rotate, **changes)
    if len(out):
        (out * probe(out)).sum().backward()
    return out, {name: p.grad for name, p in parameters.items()} | {"x": x.grad}


@pytest.mark.parametrize(("ratio", "overlap"), SHAPES)
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("rotate", [False, True])
def test_matches_a_loop(ratio, overlap, groups, rotate):
    rows = groups * ratio + ratio - 1  # the longest tail that still makes no group
    module, x = build(ratio, overlap, rotate), inputs(rows).requires_grad_()
    out = module(x)
    (out * probe(out)).sum().backward()
    reference, wanted = expected(module, x, ratio, overlap, rotate)
    assert out.shape == (groups, 2, D) and out.dtype == x.dtype
    assert relative_error(out, reference) < 2e-6
    assert_gradients(gradients(module) | {"x": x.grad}, wanted)
    assert not x.grad[groups * ratio :].any()


@pytest.mark.parametrize(("ratio", "overlap"), SHAPES)
def test_sequence_shorter_than_a_group(ratio, overlap):
    module, x = build(ratio, overlap), inputs(ratio - 1).requires_grad_()
    out = module(x)
    assert out.shape == (0, 2, D)
    out.sum().backward()
    assert gradients(module).keys() == NAMES
    for name, gradient in (gradients(module) | {"x": x.grad}).items():
        assert gradient is not None and not gradient.any(), name


def test_reaches_exactly_the_rows_of_the_formula():
    """Group g of the overlapping compressor depends on rows (g - 1) r .. g r + r - 1, and on nothing else."""
    ratio, rows = 4, 19
    module, x = build(ratio, overlap=True), inputs(rows)
    whole = module(x)
    for row in range(rows):
        changed = x.clone()
        changed[row] += 1
        moved = (module(changed) != whole).flatten(1).any(1).nonzero().flatten().tolist()
        assert moved == [g for g in (row // ratio, row // ratio + 1) if g < len(whole)]


def test_first_group_has_no_previous_rows():
    """Channels [0, D) pool the previous group, so they cannot move group 0, and must move group 1."""
    module, x = build(4, overlap=True), inputs(8)
    before = module(x)
    with torch.no_grad():
        for weight in (module.wkv.weight, module.wgate.weight):
            weight[:D] += 1
        module.ape[:, :D] += inputs(4, D)[:, 0]
    after = module(x)
    assert torch.equal(after[0], before[0])
    assert relative_error(after[1], before[1]) > 0.1


@pytest.mark.parametrize(
    "wrong",
    [
        {"position": lambda g: g},
        {"position": lambda g: 4 * g + 3},
        {"turn": naive.rope_half_split},
        {"rope": ROPE | {"theta": 999.0}},
        {"eps": 1e-1},
        {"rotate": True},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_other_conventions_are_told_apart(wrong):
    module, x = build(4, overlap=True), inputs(20)
    rules = {"overlap": True, "rope": ROPE, "eps": EPS} | wrong
    assert relative_error(module(x), naive.compress(x.double(), naive.doubled(module), 4, **rules)) > 1e-4


@pytest.mark.parametrize("lower", ["bfloat16", "half"])
def test_pooling_stays_fp32(lower):
    module, x = build(4, overlap=True), inputs(20)
    kept = {name: p.clone() for name, p in module.named_parameters()}
    module = getattr(torch.nn.Sequential(module), lower)()[0]
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, kept[name]), name
    x = getattr(x, lower)()
    out = module(x)
    assert out.dtype == x.dtype
    # The result is rounded once; rounding only the parameters as well would already pass this limit.
    limit = 0.28 * torch.finfo(x.dtype).eps
    reference, _ = expected(module, x, 4, True)
    assert relative_error(out, reference) < limit
    rounded = {name: p.detach().to(x.dtype).double() for name, p in module.named_parameters()}
    low = naive.compress(x.double(), rounded, 4, overlap=True, rope=ROPE, eps=EPS)
    assert relative_error(low, reference) > limit


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("ratio", "overlap", "rows"), [
    (4, True, 8),
    (4, True, 6),  # not a multiple of the ratio, shorter than the 2 r - 1 rows before a group's end
    (4, True, 5),
    (4, True, 3),  # some ranks end no group
    (4, True, 1),  # a halo over several ranks
    (3, True, 7),
    (2, True, 1),
    (4, False, 6),
    (16, False, 11),
    (16, False, 9),
])  # fmt: skip
def test_shards_equal_the_whole(monkeypatch, size, ratio, overlap, rows):
    whole, x = build(ratio, overlap), inputs(size * rows).requires_grad_()
    out = whole(x)
    if len(out):
        (out * probe(out)).sum().backward()
    copies = [copy.deepcopy(whole).requires_grad_() for _ in range(size)]
    for module in copies:
        module.zero_grad()

    def rank(group):
        own = x.detach()[group.rank() * rows :][:rows].clone().requires_grad_()
        entries = copies[group.rank()](own, visibility.contiguous(size * rows, size, group.rank()), group)
        # Each rank uses the gathered entries for its own share of the result.
        (entries * probe(entries) * (group.rank() + 1)).sum().backward()
        return entries.detach(), own.grad

    results, calls = run_ranks(monkeypatch, size, rank)
    for entries, _ in results:
        assert entries.shape == out.shape
        assert not len(out) or relative_error(entries, out) < 1e-6
    assert all(shape[-1] != HIDDEN for _, shape in calls[0])
    if not len(out):
        return
    share = sum(range(1, size + 1))
    assert_gradients(
        {n: sum(gradients(m)[n] for m in copies) for n in NAMES} | {"x": torch.cat([grad for _, grad in results])},
        {n: share * g for n, g in (gradients(whole) | {"x": x.grad}).items()},
        limit=1e-5,
    )


def test_the_seam_needs_the_halo(monkeypatch):
    """Without the rows of the rank before, the entries at a seam differ: the sharded test can fail."""
    whole, x = build(4, overlap=True), inputs(16)
    monkeypatch.setattr(whole, "_halos", lambda rows, layout, group: [rows.new_zeros(7, *rows.shape[1:])])

    def rank(group):
        return whole(x[group.rank() * 8 :][:8], visibility.contiguous(16, 2, group.rank()), group).detach()

    results, _ = run_ranks(monkeypatch, 2, rank)
    monkeypatch.undo()
    assert relative_error(results[0][:2], whole(x)[:2]) < 1e-6
    assert relative_error(results[0][2:], whole(x)[2:]) > 0.01
