"""How well an indexer does: running sums that a layer adds to in every forward, read once per report.

S rows, B batch, G keys, K top-k, R sampled rows.
"""

import torch

from nemo_v4_indexer import reference, visibility

SAMPLED_ROWS = 64
_SUMS = ("kl", "kl_uniform", "loss_rows", "recall", "recall_random", "recall_rows", "ties", "tie_rows")
_RATIOS = {
    "indexer_loss": ("kl", "loss_rows"),
    "kl_uniform": ("kl_uniform", "loss_rows"),
    "recall": ("recall", "recall_rows"),
    "recall_random": ("recall_random", "recall_rows"),
    "tie_rate": ("ties", "tie_rows"),
}


class Statistics:
    """Sums over rows, on the device; nothing is read back until `means`.

    indexer_loss: KL of the teacher to the indexer, nats per row, before the coefficient.
    kl_uniform: the same for an indexer that gives every entry of the support one score.
    recall: share of the teacher's mass over visible entries that the selection captures, over sampled rows that see
        more entries than they select. recall_random: its expectation for a random selection of the same size.
    tie_rate: share of sampled rows whose last selected score equals the best one left out.
    """

    def __init__(self):
        self._sums = None

    def _add(self, **values):
        device = next(iter(values.values())).device
        if self._sums is None or self._sums.device != device:
            self._sums = torch.zeros(len(_SUMS), device=device)
        zero = torch.zeros((), device=device)
        self._sums += torch.stack([values.get(name, zero).detach().float() for name in _SUMS])

    def add_loss(self, sums, rows):
        """Count a `LossSums` over `rows` rows."""
        self._add(kl=sums.kl, kl_uniform=sums.kl_uniform, loss_rows=rows)

    def add_recall(self, mass, indices, visible_keys):
        """Count sampled rows.

        Args:
            mass: [B, R, G]. Teacher mass of every visible key. indices: int32 [B, R, K]. visible_keys: int [R], > K.
        """
        total = mass.sum(-1)
        live = total > 0
        captured = mass.gather(-1, indices.clamp(min=0).long()).masked_fill(indices < 0, 0).sum(-1)
        random = (indices >= 0).sum(-1) / visible_keys
        self._add(
            recall=(captured / total.masked_fill(~live, 1)).sum(),
            recall_random=(random * live).sum(),
            recall_rows=live.sum(),
        )

    def add_ties(self, q, k, weights, start, end, topk):
        """Count ties at the edge of the selection; q [R, B, H, D], k, weights [R, B, H], start and end [B, R]."""
        values = reference.scores(q, k, weights)
        seen = visibility.visible(start, end, k.shape[0])
        best = values.nan_to_num(nan=torch.inf).masked_fill(~seen, -torch.inf).topk(topk + 1, dim=-1).values
        ties = best[..., topk - 1] == best[..., topk]
        self._add(ties=ties.sum(), tie_rows=torch.full((), ties.numel(), device=ties.device))

    def take(self):
        """The sums [8] fp32, or None if nothing was counted; counting starts anew."""
        sums, self._sums = self._sums, None
        return sums

    @staticmethod
    def size():
        return len(_SUMS)

    @staticmethod
    def means(sums):
        """Named means of sums [8]; a name whose rows were never counted is left out."""
        sums = dict(zip(_SUMS, sums.tolist(), strict=True))
        return {name: sums[top] / sums[rows] for name, (top, rows) in _RATIOS.items() if sums[rows]}
