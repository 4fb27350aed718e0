"""How one attention layer's rows are divided over ranks: who holds, queries and scores which.

S tokens of the sequence, L tokens this rank holds, Q query rows of this rank's heads, P query rows its indexer scores.

Context parallel ranks hold and query their own rows. Within them, sequence parallelism divides the held rows over the
tensor parallel ranks, whose heads query them all; the indexer's rows are divided over these ranks in any case.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nemo_v4_indexer import parallel, visibility
from nemo_v4_indexer.visibility import Documents, Layout

CP_LAYOUTS = {"zigzag": visibility.zigzag, "contiguous": visibility.contiguous}


@dataclass(frozen=True)
class Sharding:
    """Layouts of one forward.

    held: rows of hidden states, over held_group (None: a single rank).
    queries: rows of attention queries, over the context parallel ranks.
    scored: rows the indexer scores, over scored_group.
    share: row numbers 0 .. Q - 1 each tensor parallel rank scores, over share_group (None: every rank all of them).
    documents: packed documents, or None.
    """

    sequence: int
    held: Layout
    held_group: Any
    queries: Layout
    scored: Layout
    scored_group: Any
    share: Layout
    share_group: Any
    documents: Documents | None = None

    def positions(self, layout, device):
        """Position in its sequence (document) of every row this rank has in a layout: int64."""
        rows = layout.positions(device)
        return rows if self.documents is None else self.documents.positions()[rows]

    def limits(self, layout, compress_ratio, groups, batch, device):
        """Row limits int32 [B, rows] of this rank's rows in a layout."""
        rows = layout.positions(device)
        if self.documents is None:
            limits = visibility.row_limits(rows, compress_ratio, groups)
        else:
            limits = (limit[rows] for limit in self.documents.limits(compress_ratio))
        return visibility.batched_limits(*limits, batch, len(rows), groups)

    def rows_with_keys(self, compress_ratio, groups, batch, device):
        """Rows of the whole sequence and batch that see a key: int64 scalar tensor, at least 1."""
        everyone = Layout((((0, self.sequence),),))
        start, end = self.limits(everyone, compress_ratio, groups, batch, device)
        return (end > start).sum().clamp(min=1)

    def sampled_queries(self, count, first_position):
        """Up to `count` row numbers, spread over this rank's query rows from a position on; list of int."""
        runs, place = [], 0
        for start, stop in self.queries.own:
            first = max(start, first_position)
            if first < stop:
                runs.append((place + first - start, place + stop - start))
            place += stop - start
        total = sum(stop - start for start, stop in runs)
        picks, chosen, before = [round((i + 0.5) * total / count - 0.5) for i in range(min(count, total))], [], 0
        if total <= count:
            picks = range(total)
        for start, stop in runs:
            chosen += [start + pick - before for pick in picks if before <= pick < before + stop - start]
            before += stop - start
        return chosen


def shard(config, groups, rows, balance, documents=None):
    """The `Sharding` of hidden states with L rows on this rank.

    Args:
        config: TransformerConfig; its `cp_layout` ("zigzag" or "contiguous") if it has one. groups: pg_collection.
        rows: L. balance: function (share layout, Q, context ranks) -> Layout that may even the indexer's rows out.
        documents: cu_seqlens, int [N + 1], or None.
    """
    tp, cp = groups.tp, getattr(groups, "cp", None)
    tp_size, cp_size = parallel.group_size(tp), parallel.group_size(cp)
    sharded = config.sequence_parallel and tp_size > 1
    query_rows = rows * tp_size if sharded else rows
    sequence = query_rows * cp_size
    queries = CP_LAYOUTS[getattr(config, "cp_layout", "zigzag")](sequence, cp_size, parallel.group_rank(cp))
    everyone = groups.tp_cp if cp_size > 1 else tp
    inner = parallel.group_rank(cp) * tp_size + parallel.group_rank(tp)  # tensor parallel ranks are the faster ones
    held, held_group = queries, cp
    if sharded:
        held = queries.compose(visibility.contiguous(query_rows, tp_size, parallel.group_rank(tp)), inner)
        held_group = everyone
    scored, scored_group, share, share_group = queries, cp, visibility.contiguous(query_rows, 1, 0), None
    if tp_size > 1 and query_rows % tp_size == 0:  # rows that do not divide evenly are scored on every rank
        share = balance(visibility.contiguous(query_rows, tp_size, parallel.group_rank(tp)), queries)
        share_group, scored, scored_group = tp, queries.compose(share, inner), everyone
    if documents is not None:
        documents = Documents(documents, sequence)
    return Sharding(sequence, held, held_group, queries, scored, scored_group, share, share_group, documents)


def gather_in_order(x, layout, group, counts=None):
    """Rows of every rank of a layout in sequence order: [L, ...] -> [S, ...]. Gradient: summed over ranks.

    counts: what every run of every rank yields, where that is not its rows; nested as layout.runs.
    """
    if layout.size == 1:
        return x
    counts = counts or [[stop - start for start, stop in runs] for runs in layout.runs]
    gathered = parallel.gather_uneven_rows(x, [sum(c) for c in counts], group)
    places = layout.places(counts)
    if places == sorted(places):
        return gathered
    return torch.cat([gathered[first:last] for first, last in places])


def redistribute(x, held, wanted, group):
    """Rows [L, ...] of layout `held` as those of layout `wanted`, [P, ...]. Gradient: the way back."""
    if held.runs == wanted.runs:
        return x
    sent = [visibility.overlaps(held.own, runs) for runs in wanted.runs]
    received = [visibility.overlaps(runs, wanted.own) for runs in held.runs]
    counts = [[sum(b - a for a, b in spans) for spans in side] for side in (sent, received)]
    places = [(held.place(a), b - a) for spans in sent for a, b in spans]
    moved = parallel.exchange_rows(torch.cat([x[place : place + n] for place, n in places]), *counts, group)
    parts, place = [], 0
    for a, b in (span for spans in received for span in spans):
        parts.append((wanted.place(a), moved[place : place + b - a]))
        place += b - a
    return torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])


# FLOP/s of the score kernel, measured on an H200; bytes/s and seconds of an exchange between two GPUs, estimated.
SCORE_RATE, LINK_RATE, EXCHANGE_SECONDS = 5.5e14, 2e11, 4e-5


def balancing_pays(work, pair_flops, moved_bytes):
    """Whether even work is worth an exchange of rows.

    Args:
        work: pairs the busiest rank scores without and with balancing. pair_flops: per pair.
        moved_bytes: that each rank sends; 0 where ranks hold all rows and nothing moves.
    """
    exchange = moved_bytes / LINK_RATE + EXCHANGE_SECONDS if moved_bytes else 0.0
    return (work[0] - work[1]) * pair_flops / SCORE_RATE > exchange
