"""Rotary embedding as multiplication of complex numbers, YaRN from its definition, and the Hadamard rotation."""

import math

import pytest
import torch

from nemo_v4_indexer import rotary
from nemo_v4_indexer.config import RopeConfig

PLAIN = RopeConfig(dim=8, theta=10000.0)
V4 = RopeConfig(dim=64, theta=160000.0, factor=16.0, original_max_position=65536, beta_fast=32, beta_slow=1)


def turned(pairs, positions, frequencies):
    """Complex pairs [S, ..., R / 2] times e^(i position frequency)."""
    angle = torch.outer(positions.double(), torch.tensor(frequencies, dtype=torch.float64))
    factor = torch.polar(torch.ones_like(angle), angle)
    return pairs * factor.view(len(positions), *[1] * (pairs.dim() - 2), -1)


def frequencies(rope):
    return [rope.theta ** (-2 * i / rope.dim) for i in range(rope.dim // 2)]


def yarn(rope):
    """Frequencies by the definition: the ramp runs between the pairs that turn beta_fast and beta_slow times."""

    def pair_that_turns(times):
        low, high = -1000.0, 1000.0  # bisection over a fractional pair number; later pairs turn less
        for _ in range(200):
            middle = (low + high) / 2
            turns = rope.original_max_position * rope.theta ** (-2 * middle / rope.dim) / (2 * math.pi)
            low, high = (middle, high) if turns > times else (low, middle)
        return low

    first = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(rope.beta_slow)), rope.dim - 1)
    result = []
    for i, frequency in enumerate(frequencies(rope)):
        slowed = min(1.0, max(0.0, (i - first) / max(last - first, 0.001)))
        result.append(frequency / rope.factor * slowed + frequency * (1 - slowed))
    return result


def signed(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


POSITIONS = torch.tensor([0, 1, 7, 4 * 25, 1_048_575])


@pytest.mark.parametrize("shape", [(5, 12), (5, 2, 8), (5, 2, 3, 20)])
def test_interleaved_pairs_of_the_last_dims_turn(shape):
    x = signed(*shape)
    got = rotary.rotate_interleaved(x, rotary.rotary_table(POSITIONS, PLAIN))
    assert torch.equal(got[..., :-8], x[..., :-8])
    pairs = torch.view_as_complex(x[..., -8:].double().unflatten(-1, (4, 2)).contiguous())
    expected = torch.view_as_real(turned(pairs, POSITIONS, frequencies(PLAIN))).flatten(-2)
    torch.testing.assert_close(got[..., -8:].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(got[0], x[0]) and not torch.allclose(got[1], x[1])


@pytest.mark.parametrize("shape", [(5, 12), (5, 2, 8), (5, 2, 3, 20)])
def test_half_split_pairs_of_the_first_dims_turn(shape):
    x = signed(*shape)
    got = rotary.rotate_half_split(x, rotary.rotary_table(POSITIONS, PLAIN))
    assert torch.equal(got[..., 8:], x[..., 8:])
    expected = turned(torch.complex(x[..., :4].double(), x[..., 4:8].double()), POSITIONS, frequencies(PLAIN))
    torch.testing.assert_close(got[..., :4].double(), expected.real, rtol=0, atol=1e-6)
    torch.testing.assert_close(got[..., 4:8].double(), expected.imag, rtol=0, atol=1e-6)


def test_the_two_pairings_differ():
    x, table = signed(5, 8), rotary.rotary_table(POSITIONS, PLAIN)
    assert not torch.allclose(rotary.rotate_interleaved(x, table)[1:], rotary.rotate_half_split(x, table)[1:])


@pytest.mark.parametrize("rotate", [rotary.rotate_interleaved, rotary.rotate_half_split])
def test_the_inverse_table_undoes_the_rotation(rotate):
    x = signed(5, 2, 12)
    there = rotate(x, rotary.rotary_table(POSITIONS, PLAIN))
    back = rotate(there, rotary.rotary_table(POSITIONS, PLAIN, inverse=True))
    torch.testing.assert_close(back, x)
    assert not torch.allclose(there[1:], x[1:])


@pytest.mark.parametrize("rotate", [rotary.rotate_interleaved, rotary.rotate_half_split])
def test_products_depend_on_the_distance_alone(rotate):
    q, k = signed(1, 8).expand(6, 8), signed(1, 8, seed=1).expand(6, 8)
    positions = torch.arange(6)
    near = (
        rotate(q, rotary.rotary_table(positions + 5, PLAIN)) * rotate(k, rotary.rotary_table(positions, PLAIN))
    ).sum(-1)
    torch.testing.assert_close(near, near[:1].expand(6))
    far = (rotate(q, rotary.rotary_table(positions + 6, PLAIN)) * rotate(k, rotary.rotary_table(positions, PLAIN))).sum(
        -1
    )
    assert not torch.allclose(far, near)


@pytest.mark.parametrize(
    "rope",
    [
        V4,
        RopeConfig(dim=64, theta=10000.0, factor=40.0, original_max_position=4096),
        RopeConfig(dim=32, theta=500000.0, factor=4.0, original_max_position=8192, beta_fast=16, beta_slow=2),
        RopeConfig(dim=8, theta=100.0, factor=8.0, original_max_position=64, beta_fast=4, beta_slow=3.9),
    ],
)
def test_yarn_frequencies_match_the_definition(rope):
    positions = torch.tensor([0, 1, 2, 3])
    cos, sin = rotary.rotary_table(positions, rope)
    angle = torch.outer(positions.double(), torch.tensor(yarn(rope), dtype=torch.float64))
    torch.testing.assert_close(cos.double(), angle.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=1e-7)
    # cos^2 + sin^2 = 1: no attention scaling hides in the table.
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))


def test_yarn_leaves_fast_pairs_and_slows_slow_ones_by_the_factor():
    _, sin = rotary.rotary_table(torch.tensor([1]), V4)
    _, plain = rotary.rotary_table(torch.tensor([1]), RopeConfig(dim=64, theta=160000.0))
    turns = [65536 * f / (2 * math.pi) for f in frequencies(V4)]
    ratio = (sin / plain)[0].tolist()  # sin x is x for the slow pairs
    assert all(r == 1 for r, n in zip(ratio, turns, strict=True) if n > 2 * 32)
    slow = [r for r, n in zip(ratio, turns, strict=True) if n < 1 / 2]
    assert slow and all(r == pytest.approx(1 / 16, rel=1e-5) for r in slow)
    between = [r for r, n in zip(ratio, turns, strict=True) if 1.5 < n < 20]
    assert between == sorted(between, reverse=True) and 1 / 16 < between[-1] < between[0] < 1


def test_far_positions_keep_their_angle():
    """fp32 angles would be off by a tenth of a radian at a million tokens."""
    position = torch.tensor([1_048_573])
    cos, _ = rotary.rotary_table(position, PLAIN)
    assert cos[0, 0].item() == pytest.approx(math.cos(1_048_573), abs=1e-6)


@pytest.mark.parametrize("rotate", [rotary.rotate_interleaved, rotary.rotate_half_split])
def test_bf16_is_turned_in_fp32(rotate):
    x = signed(5, 2, 12).bfloat16()
    table = rotary.rotary_table(POSITIONS, PLAIN)
    got = rotate(x, table)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), table).bfloat16())


@pytest.mark.parametrize("rotate", [rotary.rotate_interleaved, rotary.rotate_half_split])
def test_rotation_is_differentiable(rotate):
    x = signed(5, 2, 12).requires_grad_()
    grad = signed(5, 2, 12, seed=1)
    rotate(x, rotary.rotary_table(POSITIONS, PLAIN)).backward(grad)
    torch.testing.assert_close(x.grad, rotate(grad, rotary.rotary_table(POSITIONS, PLAIN, inverse=True)))


@pytest.mark.parametrize("dim", [1, 2, 32, 128])
def test_hadamard_is_orthogonal_with_entries_of_one_size(dim):
    matrix = rotary.hadamard_rotation(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    torch.testing.assert_close(matrix.abs(), torch.full((dim, dim), dim**-0.5))
    torch.testing.assert_close(rotary.hadamard_rotation(matrix), torch.eye(dim))  # its own inverse
    # Entry (i, j) has the sign of the parity of the bits that i and j share.
    signs = [[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    assert torch.equal(matrix.sign(), torch.tensor(signs, dtype=torch.float32))


def test_hadamard_on_both_sides_keeps_products_and_on_one_side_does_not():
    q, k = signed(7, 3, 64), signed(7, 3, 64, seed=1)
    plain = (q * k).sum(-1)
    both = (rotary.hadamard_rotation(q) * rotary.hadamard_rotation(k)).sum(-1)
    torch.testing.assert_close(both, plain, rtol=1e-4, atol=1e-5)
    assert not torch.allclose((rotary.hadamard_rotation(q) * k).sum(-1), plain, rtol=0.1, atol=0.1)


def test_hadamard_spreads_an_outlier_and_keeps_the_dtype():
    x = torch.zeros(64, dtype=torch.bfloat16)
    x[5] = 8.0
    got = rotary.hadamard_rotation(x)
    assert got.dtype == torch.bfloat16 and (got.abs() == 1.0).all()


@pytest.mark.parametrize("dim", [3, 12, 96])
def test_hadamard_refuses_other_dims(dim):
    with pytest.raises(ValueError, match=f"power of two as head dim, got {dim}"):
        rotary.hadamard_rotation(torch.zeros(2, dim))
