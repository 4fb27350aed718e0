"""The main attention as the teacher of the indexer.

Q query rows of this rank's heads, P query rows its indexer scores, B batch, N attention heads of this rank,
C latent dim, G compressed entries, K top-k, R sampled rows.
"""

import dataclasses

import torch

from nemo_v4_indexer import parallel, reference
from nemo_v4_indexer.ops.sparse_attention import Entries, attention_mass


class Teacher:
    """The main attention as the indexer's teacher: its mass on compressed entries, summed over all heads. No gradient.

    Args:
        q: [Q, B, N, C] and denominator: fp32 [B, N, Q], of this rank's heads, as `sparse_attention` used and gave it.
        entries: `Entries` the attention used. scale: of its logits.
        shards: `Sharding` of the rows. tp_group: ranks the heads are divided over.
        compress_ratio: r. workspace_bytes: bound on the intermediates of one chunk of rows.
    """

    def __init__(self, q, denominator, entries, scale, shards, tp_group, compress_ratio, workspace_bytes):
        self.q, self.denominator, self.entries, self.scale = q.detach(), denominator, entries, scale
        self.shards, self.tp_group, self.workspace_bytes = shards, tp_group, workspace_bytes
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

    def _own_mass(self, lo, hi):
        """Mass of the rows lo .. hi - 1 of those this rank scores, over all heads."""
        share = self.shards.share
        ranks = [dataclasses.replace(share, rank=rank) for rank in range(share.size)]
        mass = self._mass(torch.cat([rank.positions(self.q.device)[lo:hi] for rank in ranks]), self.entries)
        if self.shards.share_group is None:
            return parallel.sum_over_ranks(mass, self.tp_group)
        return parallel.sum_to_owners(mass, self.shards.share_group)

    def visible_mass(self, lo, hi):
        """[B, hi - lo, G]. Of scored rows, over every visible entry; the attention must have used all of them."""
        return self._own_mass(lo, hi)

    def selected_mass(self):
        """[B, P, K]. Of scored rows, at the selected entries."""
        size = self.shards.share.size
        rows, b, n, c = self.q.shape
        bytes_per_row = size * b * self.entries.width * (8 * n + c * self.q.element_size())
        chunks = reference.chunk_rows(rows // size, bytes_per_row, self.workspace_bytes)
        return torch.cat([self._own_mass(lo, hi) for lo, hi in chunks], dim=1)

    def sampled_mass(self, rows):
        """[B, R, G]. Of sampled query rows, over every visible entry; the same on every tensor parallel rank."""
        return parallel.sum_over_ranks(self._mass(rows, self.entries._replace(indices=None)), self.tp_group)
