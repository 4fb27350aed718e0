"""The main attention as the teacher of the indexer.

Q query rows of this rank's heads, P query rows its indexer scores, B batch, N attention heads of this rank,
C latent dim, G compressed entries, K top-k, R sampled rows.
"""

import dataclasses

import torch

from nemo_v4_indexer import parallel
from nemo_v4_indexer.ops.sparse_attention import Entries, attention_mass


class Teacher:
    """The main attention as the indexer's teacher: its mass on compressed entries, summed over all heads. No gradient.

    Args:
        q: [Q, B, N, C], denominator: fp32 [B, N, Q] and mass: fp32 [B, Q, K], of this rank's heads, as
            `sparse_attention` used and gave them; mass may be None where `selected_mass` is not called.
        entries: `Entries` the attention used. scale: of its logits.
        shards: `Sharding` of the rows. tp_group: ranks the heads are divided over.
        compress_ratio: r.
    """

    def __init__(self, q, denominator, mass, entries, scale, shards, tp_group, compress_ratio):
        self.q, self.denominator, self.mass = q.detach(), denominator, mass
        self.entries, self.scale, self.shards, self.tp_group = entries, scale, shards, tp_group
        batch, groups = q.shape[1], entries.latent.shape[0]
        self.tokens = shards.sequence * batch
        """Tokens of the whole sequence and batch."""
        self.rows = shards.rows_with_keys(compress_ratio, groups, batch, q.device)
        """Rows of the whole sequence and batch that see a key; scalar tensor."""

    def _mass(self, rows, entries):
        """Mass [B, R, K or G] that this rank's heads put on the entries, at the given query rows."""
        indices = None if entries.indices is None else entries.indices[:, rows]
        part = Entries(entries.latent, indices, entries.start[:, rows], entries.end[:, rows])
        return attention_mass(self.q[rows], self.denominator[..., rows], part, self.scale)

    def _over_heads(self, mass):
        """Mass of the rows this rank scores, from this rank's heads' mass of the rows of every rank in turn."""
        if self.shards.share_group is None:
            return parallel.sum_over_ranks(mass, self.tp_group)
        return parallel.sum_to_owners(mass, self.shards.share_group)

    def _rows(self, lo, hi):
        """Query rows that the tensor parallel ranks score as their rows lo .. hi - 1, rank after rank."""
        share = self.shards.share
        ranks = [dataclasses.replace(share, rank=rank) for rank in range(share.size)]
        return torch.cat([rank.positions(self.q.device)[lo:hi] for rank in ranks])

    def visible_mass(self, lo, hi):
        """[B, hi - lo, G]. Of scored rows, over every visible entry; the attention must have used all of them."""
        return self._over_heads(self._mass(self._rows(lo, hi), self.entries))

    def selected_mass(self):
        """[B, P, K]. Of scored rows, at the selected entries."""
        return self._over_heads(self.mass[:, self._rows(0, None)])

    def sampled_mass(self, rows):
        """[B, R, G]. Of sampled query rows, over every visible entry; the same on every tensor parallel rank."""
        return parallel.sum_over_ranks(self._mass(rows, self.entries._replace(indices=None)), self.tp_group)
