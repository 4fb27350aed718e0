"""Gated pooling of tokens into compressed entries, for the indexer's keys and for the main attention's latents.

S tokens of the sequence, L tokens of this rank, B batch, D entry dim, r compress ratio, G = S // r entries.

    entry_g = norm( sum_rows softmax_rows(gate + ape) * kv ),  RoPE at position r * g      (DeepSeek-V4 report)

Without overlap an entry pools the r tokens of its group. With overlap it pools 2r rows: the previous group's tokens
through channels [0, D) and its own through channels [D, 2D); group 0 has no previous rows. Softmax is per channel.
"""

import torch

from nemo_v4_indexer import rotary, sharding, visibility
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

    def forward(self, x, layout=None, group=None, documents=None):
        """Entries of the whole sequence, on every rank.

        Args:
            x: [L, B, hidden].
            layout: `Layout` of x's rows over `group`; None for the whole sequence on every rank.
            documents: `Documents` that are compressed one by one, or None.

        Returns:
            [G, B, D], dtype of x. Gradient: summed over the group's ranks.
        """
        layout = layout or visibility.contiguous(x.shape[0], 1, 0)
        rows = torch.cat([self.wkv(x), self.wgate(x)], dim=-1)
        if documents is not None:
            return self._compress_documents(rows, layout, group, documents).to(x.dtype)
        # A rank makes the groups whose last token it holds.
        groups = [
            [tuple(visibility.num_groups(row, self.ratio) for row in run) for run in runs] for runs in layout.runs
        ]
        halos = self._halos(rows, layout, group)
        entries, place = [], 0
        for halo, (start, stop), (first, last) in zip(halos, layout.own, groups[layout.rank], strict=True):
            run = torch.cat([halo, rows[place : place + stop - start]])
            entries.append(self._pool(run, start - len(halo), first, last))
            place += stop - start
        places = torch.cat([torch.arange(*span, device=x.device) for span in groups[layout.rank]])
        entries = self._finish(torch.cat(entries), self.ratio * places).to(x.dtype)
        return sharding.gather_in_order(entries, layout, group, [[b - a for a, b in spans] for spans in groups])

    def _finish(self, entries, positions):
        entries = rotary.rotate_interleaved(self.norm(entries), rotary.rotary_table(positions, self.rope))
        return rotary.hadamard_rotation(entries) if self.rotate else entries

    def _halos(self, rows, layout, group):
        """For every own run, the rows before it that its first group needs; zeros before the sequence's first row."""
        need = visibility.rows_before(self.ratio, self.overlap)
        zeros = rows.new_zeros(need, *rows.shape[1:])
        if layout.size == 1:
            return [zeros]
        tails = [[min(need, stop - start) for start, stop in runs] for runs in layout.runs]
        kept, place = [], 0
        for (start, stop), tail in zip(layout.own, tails[layout.rank], strict=True):
            place += stop - start
            kept.append(rows[place - tail : place])
        # Every rank's halo depends on the gather, so every rank takes part in its backward.
        joined = torch.cat([zeros, sharding.gather_in_order(torch.cat(kept), layout, group, tails)])
        halos, end = {}, need
        for start, tail in sorted(
            (run[0], t) for r, ts in zip(layout.runs, tails, strict=True) for run, t in zip(r, ts, strict=True)
        ):
            halos[start] = joined[end - need : end]
            end += tail
        return [halos[start] for start, _ in layout.own]

    def _pool(self, rows, first_row, first_group, last_group):
        """Entries first_group .. last_group - 1 before the norm, [n, B, D] fp32, from projected rows first_row .. ."""
        skip, count = first_group * self.ratio - first_row, last_group - first_group
        own = self._grouped(rows, skip, count)
        before = self._grouped(rows, skip - self.ratio, count) if self.overlap else None
        groups = torch.arange(first_group, last_group, device=rows.device)
        return self._weigh(own, before, groups == 0)

    def _grouped(self, rows, skip, count):
        """[count, r, B, channels] from rows skip .. skip + count * r - 1."""
        return rows.narrow(0, skip, count * self.ratio).view(count, self.ratio, *rows.shape[1:])

    def _weigh(self, own, before, alone):
        """Entries [n, B, D] from projected rows [n, r, B, channels]; alone: bool [n], groups without previous rows."""
        kv, gate = own.chunk(2, dim=-1)
        gate = gate + self.ape[:, None]
        if before is not None:
            d = kv.shape[-1] // 2
            kv_before, gate_before = before.chunk(2, dim=-1)
            gate_before = gate_before[..., :d] + self.ape[:, None, :d]
            gate_before = gate_before.masked_fill(alone[:, None, None, None], float("-inf"))
            kv = torch.cat([kv_before[..., :d], kv[..., d:]], dim=1)
            gate = torch.cat([gate_before, gate[..., d:]], dim=1)
        return (gate.softmax(1) * kv).sum(1)

    def _compress_documents(self, rows, layout, group, documents):
        rows = sharding.gather_in_order(rows, layout, group)
        first, place = documents.group_rows(self.ratio)
        index = first[:, None] + torch.arange(self.ratio, device=rows.device)
        before = rows[(index - self.ratio).clamp(min=0)] if self.overlap else None
        return self._finish(self._weigh(rows[index], before, place == 0), self.ratio * place)
