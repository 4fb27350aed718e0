"""Rotary position embedding and the Hadamard rotation of DeepSeek's indexers.

S positions, D dim of the rotated tensor, R rotary dims (even, the last or the first of D).
"""

import functools
import math

import torch


@functools.lru_cache(maxsize=64)
def _inverse_frequencies(dim, theta, factor, original_max_position, beta_fast, beta_slow, device):
    """[dim / 2] fp64: angle per position of every rotary pair.

    YaRN (arXiv:2309.00071, section 3.2) with factor > 1: pairs that turn fewer than beta_slow times within
    original_max_position are slowed by factor, those above beta_fast stay, a linear ramp between. No attention scaling.
    """
    pair = torch.arange(0, dim, 2, dtype=torch.float64)
    frequency = theta ** (-pair / dim)
    if factor == 1:
        return frequency.to(device)

    def pair_turning(turns):
        return dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(beta_fast)), 0)
    high = min(math.ceil(pair_turning(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (frequency * (1 - ramp) + frequency / factor * ramp).to(device)


def rotary_table(positions, rope, inverse=False):
    """cos and sin [S, R / 2] fp32 at integer positions [S]; `rope` has the fields of `config.RopeConfig`."""
    shape = rope.dim, rope.theta, rope.factor, rope.original_max_position, rope.beta_fast, rope.beta_slow
    angle = positions.double()[:, None] * _inverse_frequencies(*shape, positions.device)
    sin = angle.sin()
    return angle.cos().float(), (-sin if inverse else sin).float()


def rotate_interleaved(x, table):
    """Turn the pairs (2i, 2i + 1) of the LAST rotary dims; x: [S, ..., D], computed in fp32, returned in x's dtype."""
    cos, sin = (t.view(t.shape[0], *[1] * (x.dim() - 2), t.shape[1]) for t in table)
    dim = 2 * cos.shape[-1]
    plain, turned = x[..., :-dim], x[..., -dim:].float()
    a, b = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([plain, turned.to(x.dtype)], dim=-1)


def rotate_half_split(x, table):
    """Turn the pairs (i, i + R / 2) of the FIRST rotary dims (DeepSeek-V3.2's indexer); x: [S, ..., D]."""
    cos, sin = (t.view(t.shape[0], *[1] * (x.dim() - 2), t.shape[1]) for t in table)
    dim = 2 * cos.shape[-1]
    a, b = x[..., :dim].float().chunk(2, dim=-1)
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., dim:]], dim=-1)


@functools.lru_cache(maxsize=16)
def _hadamard(dim, device):
    """Sylvester's Hadamard matrix [dim, dim] / sqrt(dim), fp32: symmetric and its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return (matrix * dim**-0.5).float().to(device)


def hadamard_rotation(x):
    """x [..., D] times the normalised Hadamard matrix, in fp32, returned in x's dtype. D must be a power of two.

    Applied to queries and keys alike it leaves every dot product unchanged and spreads outliers over the channels.
    """
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ValueError(f"the Hadamard rotation needs a power of two as head dim, got {dim}")
    return (x.float() @ _hadamard(dim, x.device)).to(x.dtype)
