"""Store the indexer's selection in one pass and replay it in another, as reinforcement learning does between its
inference and training engines: python examples/replay_indices.py
"""

import torch

from nemo_v4_indexer import indexer_kl_loss, v4_lighting_indexer

S, B, H, D, RATIO, TOPK = 256, 2, 8, 64, 4, 16


def inputs(noise):
    """Queries [S, B, H, D], keys [S // RATIO, B, D] and head weights [S, B, H] of one engine."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((S, B, H, D), (S // RATIO, B, D), (S, B, H))]
    generator.manual_seed(1)
    return [t + noise * torch.randn(t.shape, generator=generator) for t in tensors]


def main():
    # Rollout: select, and keep the indices with the sample (int32, -1 in the slots of rows that see fewer keys).
    scores, stored = v4_lighting_indexer(*inputs(noise=0.0), RATIO, TOPK, backend="reference")

    # Training: the same weights through other kernels, so slightly other scores. Selecting again would differ...
    q, k, w = (t.requires_grad_() for t in inputs(noise=0.02))
    _, selected = v4_lighting_indexer(q, k, w, RATIO, TOPK, backend="reference")
    changed = (selected != stored).any(-1).float().mean().item()
    print(f"rows whose own selection differs from the stored one: {changed:.0%}")

    # ... so score the stored indices instead. An index a row may not see would come back as -1 with score -inf.
    replayed, indices = v4_lighting_indexer(q, k, w, RATIO, TOPK, stored, backend="reference")
    assert torch.equal(indices, stored)
    difference = (replayed - scores)[stored >= 0].abs().mean().item()
    print(f"mean difference of the scores at the stored indices: {difference:.3f}")

    # Gradients flow through the replayed scores, here of the distillation loss with a made-up teacher.
    teacher = torch.rand(stored.shape).masked_fill(stored < 0, 0)
    loss, _ = indexer_kl_loss(replayed, indices, teacher)
    loss.backward()
    norms = ", ".join(f"{name} {t.grad.norm().item():.4f}" for name, t in (("q", q), ("k", k), ("weights", w)))
    print(f"loss {loss.item():.4f}, gradient norms: {norms}")


if __name__ == "__main__":
    main()
