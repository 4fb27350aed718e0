"""Gated pooling of tokens into compressed entries, for the indexer's keys and for the main attention's latents.

S tokens of the sequence, L tokens of this rank, B batch, D entry dim, r compress ratio, G = S // r entries.

    entry_g = norm( sum_rows softmax_rows(gate + ape) * kv ),  RoPE at position r * g      (DeepSeek-V4 report)

Without overlap an entry pools the r tokens of its group. With overlap it pools 2r rows: the previous group's tokens
through channels [0, D) and its own through channels [D, 2D); group 0 has no previous rows. Softmax is per channel.
"""

import itertools

import torch

from nemo_v4_indexer import parallel, rotary, visibility
from nemo_v4_indexer.modules import Float32Linear, Float32Module, RMSNorm


class V4Compressor(Float32Module):
    """Compresses this rank's tokens and gathers the entries; pooling, its weights and the norm stay fp32.

    Args:
        config: TransformerConfig.
        head_dim: D.
        compress_ratio: r > 1.
        overlap: pool the previous group's tokens too.
        rope: fields of `RopeConfig`; the last `dim` channels are rotated.
        rotate: Hadamard rotation of the entries (the indexer's keys).
    """

    def __init__(self, config, head_dim, compress_ratio, overlap, rope, rotate=False):
        super().__init__(config)
        self.ratio, self.overlap, self.rope, self.rotate = compress_ratio, overlap, rope, rotate
        width = head_dim * (2 if overlap else 1)
        self.wkv = Float32Linear(config, config.hidden_size, width)
        self.wgate = Float32Linear(config, config.hidden_size, width)
        self.ape = torch.nn.Parameter(torch.zeros(compress_ratio, width))
        if config.perform_initialization:
            config.init_method(self.ape)
        self.ape.sequence_parallel = config.sequence_parallel
        self.norm = RMSNorm(config, head_dim, config.layernorm_epsilon)

    def forward(self, x, group=None):
        """Entries of the whole sequence, on every rank.

        Args:
            x: [L, B, hidden]; rank i of `group` holds tokens i * L .. (i + 1) * L - 1, and no group holds all.

        Returns:
            [G, B, D], dtype of x. Gradient: summed over the group's ranks.
        """
        rows, size, rank = x.shape[0], parallel.group_size(group), parallel.group_rank(group)
        # A rank makes the groups whose last token it holds.
        ends = [visibility.num_groups(i * rows, self.ratio) for i in range(size + 1)]
        entries = self._pool(self.wkv(x), self.wgate(x), rank * rows, ends[rank], ends[rank + 1], group)
        positions = self.ratio * torch.arange(ends[rank], ends[rank + 1], device=x.device)
        entries = rotary.rotate_interleaved(self.norm(entries), rotary.rotary_table(positions, self.rope))
        if self.rotate:
            entries = rotary.hadamard_rotation(entries)
        counts = [after - before for before, after in itertools.pairwise(ends)]
        return parallel.gather_uneven_rows(entries.to(x.dtype), counts, group)

    def _pool(self, kv, gate, first, first_group, last_group, group):
        """Entries first_group .. last_group - 1 before the norm, [n, B, D] fp32; kv and gate begin at row `first`."""
        r = self.ratio
        # A rank's first group begins at most r - 1 rows before its first row.
        halo = 2 * r - 1 if self.overlap else r - 1
        kv = torch.cat([parallel.previous_rows(kv, halo, group), kv])
        gate = torch.cat([parallel.previous_rows(gate, halo, group), gate])
        skip = first_group * r - (first - halo)  # rows of kv before the first group's own
        own = [self._grouped(t, skip, last_group - first_group) for t in (kv, gate)]
        if not self.overlap:
            return ((own[1] + self.ape[:, None]).softmax(1) * own[0]).sum(1)
        d = kv.shape[-1] // 2
        before = [self._grouped(t, skip - r, last_group - first_group) for t in (kv, gate)]
        gates = torch.cat([before[1][..., :d] + self.ape[:, None, :d], own[1][..., d:] + self.ape[:, None, d:]], dim=1)
        if first_group == 0 and last_group > 0:
            missing = torch.zeros(gates.shape[:2], dtype=torch.bool, device=gates.device)
            missing[0, :r] = True
            gates = gates.masked_fill(missing[..., None, None], float("-inf"))
        return (gates.softmax(1) * torch.cat([before[0][..., :d], own[0][..., d:]], dim=1)).sum(1)

    def _grouped(self, rows, skip, count):
        """[count, r, B, channels] from rows skip .. skip + count * r - 1."""
        return rows.narrow(0, skip, count * self.ratio).view(count, self.ratio, *rows.shape[1:])
