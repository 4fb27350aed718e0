"""Data and oracles for the tests on a Hopper GPU."""

import torch

from nemo_v4_indexer import reference, visibility


def make_inputs(rows, batch, groups, heads=64, dim=128, seed=0, device="cuda"):
    """Signed q [S, B, H, D], k [G, B, D] in bf16 and w [S, B, H] in fp32."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    q, k = normal(rows, batch, heads, dim).bfloat16(), normal(groups, batch, dim).bfloat16()
    return q, k, normal(rows, batch, heads)


def causal(rows, batch, ratio, groups=None, device="cuda"):
    """Limits [B, S] of one causal sequence."""
    groups = visibility.num_groups(rows, ratio) if groups is None else groups
    start, end = visibility.causal_limits(rows, ratio, groups, device=device)
    return visibility.batched_limits(start, end, batch, rows, groups)


def true_scores(q, k, w):
    """fp64 scores [B, S, G] of every key."""
    return torch.cat(
        [
            reference.scores(part.double(), k.double(), v.double())
            for part, v in zip(q.split(512), w.split(512), strict=True)
        ],
        dim=1,
    )


def assert_selected(scores, indices, inputs, start, end, topk, tolerance=2e-6):
    """The slots hold the best keys by the fp64 scores of inputs (q, k, w), to within the rounding of fp32.

    A score is a sum over heads of either sign and may be close to zero, so its rounding is measured against the same
    sum of absolute values: tolerance times the largest one.
    Checked: count, ascending order, limits, scores, and that nothing left out beats what was taken.
    """
    q, k, w = inputs
    truth, magnitude = true_scores(q, k, w), true_scores(q, k, w.abs())
    groups = truth.shape[-1]
    seen = visibility.visible(start, end, groups)
    count = seen.sum(-1).clamp(max=topk)
    slot = torch.arange(topk, device=indices.device)
    taken = slot < count[..., None]
    assert torch.equal(indices >= 0, taken), "slots in use"
    assert bool((indices[~taken] == -1).all()) and bool((scores[~taken] == float("-inf")).all())
    if groups == 0:
        return
    steps = indices.diff(dim=-1)
    assert bool((steps > 0)[taken[..., 1:]].all()), "ascending without repeats"
    assert bool((indices < end[..., None])[taken].all()) and bool((indices >= start[..., None])[taken].all()), "limits"
    at = indices.clamp(min=0).long()
    budget = tolerance * magnitude[seen].max() if bool(seen.any()) else 0.0
    found = truth.gather(-1, at)
    assert float((scores.double() - found)[taken].abs().max() if bool(taken.any()) else 0.0) <= budget
    worst = found.masked_fill(~taken, float("inf")).amin(-1)
    chosen = torch.zeros(*seen.shape[:-1], groups + 1, dtype=torch.bool, device=seen.device)
    chosen.scatter_(-1, at.masked_fill(~taken, groups), True)
    left = truth.masked_fill(~seen | chosen[..., :groups], float("-inf")).amax(-1)
    assert bool((left <= worst + 2 * budget).all()), "a better key was left out"
