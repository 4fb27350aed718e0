"""The last step of the top-k program: the best k of a short list that is already ascending by column."""

import tilelang.language as T

from nemo_v4_indexer.kernels.topk_scan import (
    BIG,
    BINS,
    TOP,
    bin_of,
    block_range,
    block_scan,
    find_bin,
    key_of,
    lanes_below,
    ordered,
    unordered,
)

CNT, PLAIN = 0, 1  # places in a thread's state: entries listed, row left to the radix select
CROWD = 128  # most entries of one bin that are ranked one against all


def list_selector(k, threads, per_thread, resident, place):
    """Macro select_from_list(g, listed) for lists of at most threads * per_thread entries.

    g holds the kernel's scalars and buffers. listed: the list's positions are g.ent; otherwise the list is the whole
    row, read from the workspace. resident: scores are still in g.buf at place(position), else they are g.val.
    """
    warps = threads // 32
    crowd = min(CROWD, threads)

    @T.macro
    def load_list(g, x, listed, p0, words):
        """x = this thread's scores: entries p0 + 32 j; 0 past the end."""
        for j in T.unroll(per_thread):
            if j < words:
                p = p0 + j * 32
                if listed:
                    if resident:
                        x[j] = g.buf[place(T.Select(p < g.state[CNT], g.ent[p], 0))]
                    else:
                        x[j] = g.val[p]
                else:
                    x[j] = T.float32(0)
                    if p < g.state[CNT]:
                        x[j] = g.L[g.src + g.head + p]

    @T.macro
    def list_range(g, x, p0, words):
        """Smallest score of the list, and bins per unit of score."""
        smallest = T.alloc_var("float32", init=BIG)
        largest = T.alloc_var("float32", init=-BIG)
        for j in T.unroll(per_thread):
            if (j < words) & (p0 + j * 32 < g.state[CNT]):
                smallest = T.min(smallest, x[j])
                largest = T.max(largest, x[j])
        kmin, kmax = block_range(ordered(smallest), ordered(largest), g.upart, g.lane, g.warp, warps)
        lo = T.alloc_var("float32")
        lo = T.max(unordered(kmin), T.float32(-BIG))
        return lo, T.float32(TOP + 1) * T.fast_rcp(T.max(T.min(unordered(kmax), T.float32(BIG)), lo) - lo)

    @T.macro
    def rank_bin(g, x, bins, p0, inbin, need):
        """Rank the entries of the k-th score's bin by (score, place); all but the first need leave it."""
        for j in T.unroll(per_thread):
            if bins[j] == g.info[0]:
                e = T.call_extern("int32", "atomicAdd", T.address_of(g.info[3]), 1)
                g.ckey[e] = key_of(x[j])
                g.cpos[e] = p0 + j * 32
        T.sync_threads()
        if g.tx < inbin:
            rank = T.alloc_var("int32", init=0)
            for e in T.serial(inbin):
                before = (g.ckey[e] > g.ckey[g.tx]) | ((g.ckey[e] == g.ckey[g.tx]) & (g.cpos[e] < g.cpos[g.tx]))
                rank = rank + T.Select(before, 1, 0)
            if rank == need - 1:
                g.upart[0] = g.ckey[g.tx]
                g.part[0] = g.cpos[g.tx]
        T.sync_threads()
        for j in T.unroll(per_thread):
            if bins[j] == g.info[0]:
                key = key_of(x[j])
                if (key < g.upart[0]) | ((key == g.upart[0]) & (p0 + j * 32 > g.part[0])):
                    bins[j] = -1

    @T.macro
    def trim_ties(g, x, bins, need):
        """A crowded bin: all but its first need entries leave if all are equal; else the radix select has the row."""
        kmin = T.alloc_var("uint32", init=0xFFFFFFFF)
        kmax = T.alloc_var("uint32", init=0)
        for j in T.unroll(per_thread):
            if bins[j] == g.info[0]:
                key = key_of(x[j])
                kmin = T.min(kmin, key)
                kmax = T.max(kmax, key)
        bmin, bmax = block_range(kmin, kmax, g.upart, g.lane, g.warp, warps)
        if bmin < bmax:
            g.state[PLAIN] = 1
        else:
            seen = T.alloc_var("int32", init=0)
            for j in T.unroll(per_thread):
                seen = seen + T.popcount(T.cast(T.ballot(bins[j] == g.info[0]), "uint32"))
            earlier, _ = block_scan(T.Select(g.lane == 0, seen, 0), g.part, g.lane, g.warp, warps)
            seen = T.shfl_sync(earlier, 0)
            for j in T.unroll(per_thread):
                ties = T.cast(T.ballot(bins[j] == g.info[0]), "uint32")
                if (bins[j] == g.info[0]) & (seen + T.popcount(ties & lanes_below(g.lane)) >= need):
                    bins[j] = -1
                seen = seen + T.popcount(ties)

    @T.macro
    def write_selection(g, x, bins, listed, p0, words, least):
        """Entries in bin least or above go out in order."""
        kept = T.alloc_var("int32", init=0)
        for j in T.unroll(per_thread):
            if j < words:
                kept = kept + T.popcount(T.cast(T.ballot(bins[j] >= least), "uint32"))
        if g.lane == 0:
            g.part[32 + g.warp] = kept
        T.sync_threads()
        kept = T.warp_reduce_sum(T.Select(g.lane < g.warp, g.part[32 + (g.lane & (warps - 1))], 0))
        for j in T.unroll(per_thread):
            if j < words:
                votes = T.cast(T.ballot(bins[j] >= least), "uint32")
                if bins[j] >= least:
                    o = kept + T.popcount(votes & lanes_below(g.lane))
                    if listed:
                        g.Ix[g.out + o] = g.first - g.head + g.ent[p0 + j * 32]
                    else:
                        g.Ix[g.out + o] = g.first + p0 + j * 32
                    g.Sc[g.out + o] = x[j]
                kept = kept + T.popcount(votes)

    @T.macro
    def select_from_list(g, listed):
        x = T.alloc_local([per_thread], "float32")
        bins = T.alloc_local([per_thread], "int32")
        words = T.alloc_var("int32")  # of 32 entries, for each warp
        p0 = T.alloc_var("int32")
        lo = T.alloc_var("float32")
        scale = T.alloc_var("float32")
        least = T.alloc_var("int32")
        need = T.alloc_var("int32")
        inbin = T.alloc_var("int32")
        words = T.ceildiv(g.state[CNT], threads)
        p0 = g.warp * words * 32 + g.lane
        load_list(g, x, listed, p0, words)
        if listed:
            lo = g.span[0]
            scale = g.span[1]
        else:
            smallest, density = list_range(g, x, p0, words)
            lo = smallest
            scale = density
        for j in T.unroll(per_thread):
            bins[j] = -1
            if j < words:
                b = bin_of(x[j], lo, scale)
                bins[j] = T.Select(p0 + j * 32 < g.state[CNT], b, -1)
                T.atomic_add(g.hist[T.Select(p0 + j * 32 < g.state[CNT], b, BINS)], 1)
        T.sync_threads()
        if g.warp == 0:
            find_bin(k, g.hist, g.info, g.lane)
        T.sync_threads()
        least = g.info[0]
        need = k - g.info[1]
        inbin = g.info[2]
        if inbin > need:
            if inbin <= crowd:
                rank_bin(g, x, bins, p0, inbin, need)
            else:
                trim_ties(g, x, bins, need)
        if g.state[PLAIN] == 0:
            write_selection(g, x, bins, listed, p0, words, least)

    return select_from_list
