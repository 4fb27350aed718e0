"""Exact, deterministic top-k of every row.

B batch, R rows of this launch, S rows of the outputs, G keys, K top-k.

Order: larger score first; NaN (any sign or payload) ranks above +inf; -0.0 equals +0.0; among equal scores the lowest
column wins. Slots are ascending by column, -1 and -inf fill the end. Rows with at most K visible columns are copied.
The result is a function of the scores alone: bit for bit the same in every run.

How: one block of threads a row.
1. 512 or more samples of the row give a pivot that about 1.5 K scores reach.
2. The row passes through shared memory once. Each thread tests 32 neighbouring scores into one word; a block scan of
   the word counts gives every survivor its place in a list that is ascending by construction.
3. One histogram of the survivors finds the bin of the K-th score; the few scores in that bin are ranked by (score,
   column), and a ballot scan writes the selection in order (topk_list.py).
Whatever does not fit this plan (a pivot missed by too many or too few scores, a bin crowded with unequal scores) goes
to a plain radix select of that row (topk_radix.py). Atomics only count, or place entries whose order is never used.
"""

from types import SimpleNamespace

import tilelang
import tilelang.language as T

from nemo_v4_indexer.kernels.topk_list import CNT, CROWD, PLAIN, list_selector
from nemo_v4_indexer.kernels.topk_radix import radix_selector
from nemo_v4_indexer.kernels.topk_scan import BIG, BINS, TOP, bin_of, block_scan, find_bin, ordered, unordered

_KEY = tilelang.PassConfigKey
PASS_CONFIGS = {
    _KEY.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # barriers are written out below
    _KEY.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # every access is guarded by the row's own bounds
    _KEY.TL_DISABLE_SHARED_MEMORY_REUSE: True,
}
SAMPLES = 16  # per lane and batch


def log2(x):
    return x.bit_length() - 1


def topk_select(k, mode="stream", threads=256, words=1, cap=512, blocks=4):
    """prim_func for one k.

    mode: "list" for rows of at most cap keys, "resident" for at most 32 * words * threads, "stream" for any.
    threads: a power of two, 64 * words to 1024. words: 1, 2 or 4 words of 32 scores per thread and unit.
    cap: entries of the survivor list, at least k, a multiple of threads. blocks: per multiprocessor.

    The program takes scores [B, R, stride] fp32 flat (16-byte aligned, stride a multiple of 4; only columns inside the
    limits are read), starts and ends [B, S] int32, and writes rows row0 to row0 + R - 1 of indices [B, S, K] int32 and
    values [B, S, K] fp32.
    """
    if threads < 64 * words:
        raise ValueError(f"threads must be at least 64 * words ({64 * words}), got {threads}")
    warps, unit, per_thread = threads // 32, 32 * words * threads, cap // threads
    batch = 32 * SAMPLES
    many = mode == "stream" or batch * k // 32 < unit  # one batch of samples may not be enough
    fold = log2(words)
    crowd = min(CROWD, threads)
    NL, NR, NO = T.dynamic("NL", "int64"), T.dynamic("NR"), T.dynamic("NO", "int64")

    # The macros below share the kernel's scalars and buffers through g.

    @T.macro
    def swizzled(q):
        """Place of a unit's score q in the buffer: threads reading 16 bytes of their own words miss each other."""
        return q ^ ((q >> (3 + fold)) & 28)

    @T.macro
    def sample(g, i, bits):
        """The i-th of 1 << bits scores spread over the row."""
        q = g.head + T.cast(T.cast(i, "uint32") * T.cast(g.n, "uint32") >> bits, "int32")
        y = T.alloc_var("float32")
        if mode == "resident":  # noqa: SIM108 - the parser wants one statement for each
            y = g.buf[swizzled(q)]
        else:
            y = g.L[g.src + q]
        return y

    @T.macro
    def start_unit(g, u0, edge):
        """Start the copy of positions [u0, u0 + unit) of the row into the buffer; pieces not wholly valid become zeros.

        edge takes the scores of such pieces: at most 3 at either end of the row, with the threads that own the pieces.
        """
        lim = T.alloc_var("int32")
        dst = T.alloc_var("int32")
        at = T.alloc_var("int64")
        lim = g.end - 4 - u0 - g.tx * 4
        dst = swizzled(g.tx * 4)
        at = g.src + u0 + g.tx * 4
        lead = T.Select((g.head > 0) & (u0 + g.tx == 0), -1, lim)
        for j in list(range(8 * words)):
            T.ptx_cp_async(
                T.access_ptr(g.buf[dst + j * threads * 4], "w", 4),
                T.access_ptr(g.L[at + j * threads * 4], "r", 4),
                4,
                predicate=j * threads * 4 <= (lead if j == 0 else lim),
            )
        T.ptx_commit_group()
        tail = g.end & ~3
        if (tail < g.end) & (tail >= u0) & (tail < u0 + unit) & (g.tx == (tail >> 2 & (threads - 1))):
            for e in [0, 1, 2]:
                if tail + e < g.end:
                    edge[e] = g.L[g.src + tail + e]
        if (g.head > 0) & (u0 + g.tx == 0):
            for e in [1, 2, 3]:
                if e >= g.head:
                    edge[2 + e] = g.L[g.src + e]

    @T.macro
    def finish_unit(g, u0, edge):
        """Wait for the thread's share of the copy; no barrier."""
        T.ptx_wait_group(0)
        tail = g.end & ~3
        if (tail < g.end) & (tail >= u0) & (tail < u0 + unit) & (g.tx == (tail >> 2 & (threads - 1))):
            for e in [0, 1, 2]:
                if tail + e < g.end:
                    g.buf[swizzled(tail - u0) + e] = edge[e]
        if (g.head > 0) & (u0 + g.tx == 0):
            for e in [1, 2, 3]:
                if e >= g.head:
                    g.buf[e] = edge[2 + e]

    @T.macro
    def find_pivot(g):
        """Warp 0: span = (pivot that k scores reach with three sigma to spare, bins per unit of score above it)."""
        s = T.alloc_local([SAMPLES], "float32")
        batches = T.alloc_var("int32", init=1)
        bits = T.alloc_var("uint32", init=log2(batch))
        rounds = T.alloc_var("int32", init=4)
        want = T.alloc_var("int32")
        smin = T.alloc_var("float32", init=BIG)
        smax = T.alloc_var("float32", init=-BIG)
        lo = T.alloc_var("float32")
        hi = T.alloc_var("float32")
        scale = T.alloc_var("float32")
        if many:
            while (batches < 16) & (batches * (batch * k // 32) < g.n):
                batches = batches * 2
                bits = bits + T.uint32(1)
        for i in T.unroll(SAMPLES):
            s[i] = sample(g, i * 32 + g.lane, T.uint32(log2(batch)))
        for i in T.unroll(SAMPLES):
            smin = T.min(smin, s[i])
            smax = T.max(smax, s[i])
        expect = T.cast(batches * (batch * k), "float32") * T.fast_rcp(T.cast(g.n, "float32"))
        want = T.cast(expect + T.float32(3) * expect * T.rsqrt(expect), "int32") + 3
        while rounds > 0:
            lo = T.max(unordered(T.warp_reduce_min(ordered(smin))), T.float32(-BIG))
            hi = T.max(T.min(unordered(T.warp_reduce_max(ordered(smax))), T.float32(BIG)), lo)
            scale = T.float32(TOP + 1) * T.fast_rcp(hi - lo)
            for b in T.serial(batches if many else 1):
                if many:
                    for i in T.unroll(SAMPLES):
                        s[i] = sample(g, (b * SAMPLES + i) * 32 + g.lane, bits)
                for i in T.unroll(SAMPLES):
                    T.atomic_add(g.hist[bin_of(s[i], lo, scale)], 1)
            T.sync_warp()
            find_bin(want, g.hist, g.info, g.lane)
            T.sync_warp()
            rounds = T.Select(g.info[2] > 16 + batches * 16, rounds - 1, 0)
            if rounds > 0:  # a crowded bin: spread it, what lies outside is clamped
                smin = T.float32(BIG)
                smax = T.float32(-BIG)
                for i in T.unroll(SAMPLES):
                    if bin_of(s[i], lo, scale) == g.info[0]:
                        smin = T.min(smin, s[i])
                        smax = T.max(smax, s[i])
                T.sync_warp()
        lo = lo + T.cast(g.info[0], "float32") * T.fast_rcp(scale)
        lo = T.Select(lo == T.float32(0), T.float32(-1e-44), lo)  # -0.0 - 0.0 would fail the test
        g.span[0] = lo
        g.span[1] = T.float32(TOP + 1) * T.fast_rcp(T.max(hi, lo) - lo)

    @T.macro
    def list_survivors(g, u0):
        """Append the unit's scores at or above the pivot to the list; ends without a barrier."""
        lo = T.alloc_var("float32")
        lo = g.span[0]
        # words of tests per thread, first score in the top bit
        word = T.alloc_local([words], "uint32")
        hits = T.alloc_var("int32", init=0)
        w0 = u0 + g.tx * (32 * words)
        for w in list(range(words)):
            word[w] = T.uint32(0)
            if w0 + w * 32 < g.end:
                f = T.alloc_local([4], "float32")
                for c in T.unroll(8):
                    for v in T.vectorized(4):
                        f[v] = g.buf[g.tx * (32 * words) + w * 32 + ((c ^ (g.tx & 7)) * 4) + v]
                    for v in T.unroll(4):
                        word[w] = T.call_extern(
                            "uint32", "__funnelshift_l", T.reinterpret(f[v] - lo, "uint32"), word[w], 1
                        )
                word[w] = ~word[w]
                if w0 + w * 32 + 32 > g.end:
                    word[w] = word[w] & (T.uint32(0xFFFFFFFF) << T.cast(w0 + w * 32 + 32 - g.end, "uint32"))
                if w == 0:  # noqa: SIM102 - a plan-time test and a run-time one
                    if w0 < g.head:
                        word[w] = word[w] & (T.uint32(0xFFFFFFFF) >> T.cast(g.head, "uint32"))
            hits = hits + T.cast(T.popcount(word[w]), "int32")
        before, total = block_scan(hits, g.part, g.lane, g.warp, warps)
        if g.state[CNT] + total > cap:
            g.state[PLAIN] = 1
        else:
            o = T.alloc_var("int32")
            o = g.state[CNT] + before
            for w in list(range(words)):
                while word[w] != T.uint32(0):
                    top = 31 - T.clz(word[w])
                    g.ent[o] = w0 + (w * 32 + 31) - top
                    if mode == "stream":
                        g.val[o] = g.buf[swizzled(g.tx * (32 * words) + (w * 32 + 31) - top)]
                    o = o + 1
                    word[w] = word[w] ^ (T.uint32(1) << T.cast(top, "uint32"))
            g.state[CNT] = g.state[CNT] + total

    select_from_list = list_selector(k, threads, per_thread, mode == "resident", swizzled)
    radix_select = radix_selector(k, threads)

    @T.prim_func
    def topk_select_kernel(
        L: T.Tensor([NL], "float32"),
        Start: T.Tensor([NR], "int32"),
        End: T.Tensor([NR], "int32"),
        Ix: T.Tensor([NO], "int32"),
        Sc: T.Tensor([NO], "float32"),
        B: T.int32,
        R: T.int32,
        S: T.int32,
        G: T.int32,
        stride: T.int32,
        row0: T.int32,
    ):
        with T.Kernel(R, B, threads=threads) as (bx, by):
            T.annotate_min_blocks_per_sm(blocks)
            tx = T.get_thread_binding()
            lane = tx & 31
            warp = tx >> 5
            buf = T.alloc_shared([4 if mode == "list" else unit], "float32")
            ent = T.alloc_shared([4 if mode == "list" else cap], "int32")  # the list: positions in the row
            val = T.alloc_shared([cap if mode == "stream" else 4], "float32")  # and scores, if buf is overwritten
            hist = T.alloc_shared([BINS + 4], "int32")  # the last 4 count nothing of interest
            part = T.alloc_shared([64], "int32")
            upart = T.alloc_shared([64], "uint32")
            info = T.alloc_shared([4], "int32")  # 0-2 find_bin, 3 counter of rank_bin
            span = T.alloc_shared([4], "float32")
            ckey = T.alloc_shared([crowd], "uint32")
            cpos = T.alloc_shared([crowd], "int32")
            state = T.alloc_local([2], "int32")
            # variables, not bindings: bindings would be expanded into every address
            first = T.alloc_var("int32")
            n = T.alloc_var("int32")
            head = T.alloc_var("int32")
            end = T.alloc_var("int32")
            src = T.alloc_var("int64")
            out = T.alloc_var("int64")
            row = T.alloc_var("int32")
            line = T.alloc_var("int32")
            line = by * R + (R - 1 - bx)  # causal rows: longest first
            row = by * S + row0 + (R - 1 - bx)
            first = T.max(Start[row], 0)
            n = T.min(End[row], G) - first
            out = T.cast(row, "int64") * k
            # positions count from the 16-byte boundary at or before the first column
            head = first & 3
            end = head + n
            src = T.cast(line, "int64") * stride + (first - head)
            g = SimpleNamespace(
                tx=tx,
                lane=lane,
                warp=warp,
                first=first,
                n=n,
                head=head,
                end=end,
                src=src,
                out=out,
                state=state,
                L=L,
                Ix=Ix,
                Sc=Sc,
                buf=buf,
                hist=hist,
                ent=ent,
                val=val,
                part=part,
                upart=upart,
                info=info,
                span=span,
                ckey=ckey,
                cpos=cpos,
            )
            if n <= k:
                for j in T.unroll(-(-k // threads)):
                    i = j * threads + tx
                    if i < k:
                        if i < n:
                            Ix[out + i] = first + i
                            Sc[out + i] = L[src + head + i]
                        else:
                            Ix[out + i] = -1
                            Sc[out + i] = -T.infinity("float32")
            else:
                state[CNT] = 0
                state[PLAIN] = 0
                if warp == 0:
                    for q in T.unroll(2):
                        for v in T.vectorized(4):
                            hist[q * 128 + lane * 4 + v] = 0
                    info[3] = 0
                    T.sync_warp()
                if n <= cap:
                    state[CNT] = n
                    select_from_list(g, False)
                elif mode != "list":
                    edge = T.alloc_local([6], "float32")
                    if mode == "resident":
                        start_unit(g, 0, edge)
                        finish_unit(g, 0, edge)
                        T.sync_threads()
                        if warp == 0:
                            find_pivot(g)
                        T.sync_threads()
                        list_survivors(g, 0)
                    else:
                        for u in T.serial(T.ceildiv(end, unit)):
                            if state[PLAIN] == 0:
                                start_unit(g, u * unit, edge)
                                if (u == 0) & (warp == 0):
                                    find_pivot(g)
                                finish_unit(g, u * unit, edge)
                                T.sync_threads()
                                list_survivors(g, u * unit)
                                T.sync_threads()
                    if state[CNT] < k:
                        state[PLAIN] = 1
                    if state[PLAIN] == 0:
                        T.sync_threads()
                        select_from_list(g, True)
                if state[PLAIN] == 1:
                    radix_select(g)

    return topk_select_kernel
