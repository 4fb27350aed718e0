"""Work items of the dense backward, laid out on the device, and the ordered sum of their results.

Letters: S query, G key, B batch, D dim, NT tiles of KEYS keys, NI work items.
An item is one key tile times one run of queries. Which queries touch a tile is known only on the device (row limits are
data), so a kernel lays out the items, and the launches that follow have a fixed size: unused items are empty.
"""

import tilelang.language as T

from .bwd_common import F32, I32, strided

KEYS = 256  # keys of a tile
MAX_WAVES = 4  # items per multiprocessor, at most, where there are more items than tiles
TURN = 8  # starting an item and summing its result take about as long as this many queries
_THREADS = 256


def build_plan():
    """Program `(Span, Items, First, queries, sms)`, one CTA.

    Span: [2, B, NT] int32 from the query pass; tiles = B * NT. Items: [NI, 5] int32 (key tile, first query, queries,
    batch, row of Part), NI >= tiles. First: [tiles + 1] int32, first row of Part of every tile; a tile's rows
    follow each other in query order. queries: S. sms: CTAs that run at the same time.

    Runs start at multiples of one length for every tile, and items are ordered by run, so that CTAs which run together
    read the same queries from L2. The length minimises waves * (length + TURN).
    """
    NI, tiles1 = T.dynamic("NI"), T.dynamic("tiles1")
    NT, B = T.dynamic("NT"), T.dynamic("B")

    @T.macro
    def total_of(values, tx, out):
        """Sum over all lanes and over the lanes below, in shared memory."""
        out[0] = 0
        out[1] = 0
        for j in T.serial(_THREADS):
            out[0] = out[0] + values[j]
            out[1] = out[1] + T.if_then_else(j < tx, values[j], 0)

    @T.prim_func
    def score_bwd_plan(
        Span: T.Tensor([2, B, NT], I32),
        Items: T.Tensor([NI, 5], I32),
        First: T.Tensor([tiles1], I32),
        queries: T.int32,
        sms: T.int32,
    ):
        with T.Kernel(1, threads=_THREADS):
            tx = T.get_thread_binding()
            lanes = T.alloc_shared([_THREADS], I32)
            best = T.alloc_shared([_THREADS], I32)
            size = T.alloc_shared([_THREADS], I32)
            sums = T.alloc_local([2], I32)
            n = T.alloc_var(I32)
            length = T.alloc_var(I32)
            count = T.alloc_var(I32)
            carry = T.alloc_var(I32)
            pos = T.alloc_var(I32)
            lo = T.alloc_var(I32)
            hi = T.alloc_var(I32)
            tiles = B * NT
            # All pairs of a tile and a query that touches it.
            n = 0
            for t in T.serial(T.ceildiv(tiles, _THREADS)):
                if t * _THREADS + tx < tiles:
                    b = (t * _THREADS + tx) // NT
                    k = (t * _THREADS + tx) % NT
                    n = n + T.max(Span[0, b, k] + Span[1, b, k] - queries, 0)
            lanes[tx] = n
            T.sync_threads()
            total_of(lanes, tx, sums)
            # Every thread tries one run length; the last tries one run per tile, which always fits.
            n = T.max(T.ceildiv(T.ceildiv(sums[0], sms * (tx // (_THREADS // MAX_WAVES) + 1)), 4) * 4, 8)
            length = n + tx % (_THREADS // MAX_WAVES) * T.max(4, n // 128 * 4)
            if tx == _THREADS - 1:
                length = T.ceildiv(queries, 4) * 4
            count = 0
            for t in T.serial(tiles):
                lo = queries - Span[0, t // NT, t % NT]
                hi = Span[1, t // NT, t % NT]
                if lo < hi:
                    count = count + T.ceildiv(hi, length) - lo // length
            size[tx] = length
            best[tx] = T.if_then_else(count <= NI, T.ceildiv(count, sms) * (length + TURN), 1 << 30)
            T.sync_threads()
            n = 1 << 30
            for j in T.serial(_THREADS):
                if best[j] < n:
                    n = best[j]
                    length = size[j]
            # Rows of Part, tile by tile.
            carry = 0
            for t in T.serial(T.ceildiv(tiles, _THREADS)):
                n = 0
                if t * _THREADS + tx < tiles:
                    lo = queries - Span[0, (t * _THREADS + tx) // NT, (t * _THREADS + tx) % NT]
                    hi = Span[1, (t * _THREADS + tx) // NT, (t * _THREADS + tx) % NT]
                    if lo < hi:
                        n = T.ceildiv(hi, length) - lo // length
                T.sync_threads()
                lanes[tx] = n
                T.sync_threads()
                total_of(lanes, tx, sums)
                if t * _THREADS + tx < tiles:
                    First[t * _THREADS + tx] = carry + sums[1]
                carry = carry + sums[0]
            if tx == 0:
                First[tiles] = carry
            # Items, run by run.
            carry = 0
            for r in T.serial(T.ceildiv(queries, length * _THREADS)):
                q0 = (r * _THREADS + tx) * length
                n = 0
                for t in T.serial(tiles):
                    lo = queries - Span[0, t // NT, t % NT]
                    hi = Span[1, t // NT, t % NT]
                    if lo < hi and T.max(lo, q0) < T.min(hi, q0 + length):
                        n = n + 1
                T.sync_threads()
                lanes[tx] = n
                T.sync_threads()
                total_of(lanes, tx, sums)
                pos = carry + sums[1]
                carry = carry + sums[0]
                for t in T.serial(tiles):
                    lo = queries - Span[0, t // NT, t % NT]
                    hi = Span[1, t // NT, t % NT]
                    if lo < hi and T.max(lo, q0) < T.min(hi, q0 + length):
                        Items[pos, 0] = t % NT
                        Items[pos, 1] = T.max(lo, q0)
                        Items[pos, 2] = T.min(hi, q0 + length) - T.max(lo, q0)
                        Items[pos, 3] = t // NT
                        Items[pos, 4] = First[t] + (r * _THREADS + tx) - lo // length
                        pos = pos + 1
            for i in T.serial(T.ceildiv(NI - carry, _THREADS)):
                if carry + i * _THREADS + tx < NI:
                    for f in T.unroll(5):
                        Items[carry + i * _THREADS + tx, f] = 0

    return score_bwd_plan


def build_reduce(dim: int):
    """Program `(Part, First, dK, add)`: dK [G, B, D] fp32 = (add ? dK : 0) + its rows of Part in query order."""
    lanes = dim // 4
    rows = 256 // lanes
    G, B, NI, tiles1 = T.dynamic("G"), T.dynamic("B"), T.dynamic("NI"), T.dynamic("tiles1")
    AHEAD = 4  # loads in flight

    @T.prim_func
    def score_bwd_reduce(
        Part: T.Tensor([NI, KEYS, dim], F32),
        First: T.Tensor([tiles1], I32),
        dK: strided([G, B, dim], "dK", F32),
        add: T.int32,
    ):
        with T.Kernel(T.ceildiv(G, rows), B, threads=256) as (bx, by):
            tx = T.get_thread_binding()
            acc = T.alloc_local([4], F32)
            got = T.alloc_local([AHEAD, 4], F32)
            row = bx * rows + tx // lanes
            if row < G:
                tile = by * T.ceildiv(G, KEYS) + row // KEYS
                for v in T.vectorized(4):
                    acc[v] = 0.0
                if add != 0:
                    for v in T.vectorized(4):
                        acc[v] = dK[row, by, tx % lanes * 4 + v]
                first = First[tile]
                past = First[tile + 1]
                for n in T.serial(T.ceildiv(past - first, AHEAD)):
                    for u in T.unroll(AHEAD):
                        for v in T.vectorized(4):
                            got[u, v] = 0.0
                        if first + n * AHEAD + u < past:
                            for v in T.vectorized(4):
                                got[u, v] = Part[first + n * AHEAD + u, row % KEYS, tx % lanes * 4 + v]
                    for u in T.unroll(AHEAD):
                        for v in T.vectorized(4):
                            acc[v] = acc[v] + got[u, v]
                for v in T.vectorized(4):
                    dK[row, by, tx % lanes * 4 + v] = acc[v]

    return score_bwd_reduce
