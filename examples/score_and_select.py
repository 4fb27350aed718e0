"""Score compressed keys and select the top-k of every query row. Needs neither a GPU nor Megatron."""

import torch

from nemo_v4_indexer import v4_lighting_indexer

S, B, H, D = 64, 2, 8, 32  # query rows, batch, index heads, index head dim
RATIO, TOPK = 4, 5  # tokens per compressed key, keys kept per row


def main():
    torch.manual_seed(0)
    q = torch.randn(S, B, H, D, requires_grad=True)
    k = torch.randn(S // RATIO, B, D, requires_grad=True)
    weights = torch.randn(S, B, H, requires_grad=True)

    scores, indices = v4_lighting_indexer(q, k, weights, RATIO, TOPK)
    print(f"scores {tuple(scores.shape)} {scores.dtype}, indices {tuple(indices.shape)} {indices.dtype}")
    for row in (2, 10, S - 1):
        print(f"row {row} sees {(row + 1) // RATIO} keys and selects {indices[0, row].tolist()}")

    # Gradients reach exactly the selected keys, through their scores. Empty slots have score -inf.
    scores.masked_fill(indices < 0, 0).square().sum().backward()
    print("gradient norms:", {name: round(t.grad.norm().item(), 3) for name, t in dict(q=q, k=k, w=weights).items()})

    # Replay: scores at a selection made earlier, for instance by another model.
    again, same = v4_lighting_indexer(q, k, weights, RATIO, TOPK, indices)
    print("replay gives the same scores:", torch.allclose(again, scores, atol=1e-4) and torch.equal(same, indices))

    # Two documents of 32 tokens in one packed row: each query sees the keys of its own document only.
    position = torch.arange(S, dtype=torch.int32)
    first = position // 32 * 8
    last = first + (position % 32 + 1) // RATIO
    _, packed = v4_lighting_indexer(q, k, weights, RATIO, TOPK, cu_seqlen_ks=first, cu_seqlen_ke=last)
    print(f"packed: row 40 selects {packed[0, 40].tolist()} of the keys {first[40]} to {last[40] - 1}")


if __name__ == "__main__":
    main()
