"""Deterministic backward of the indexer scores: a query-major pass and a key-major pass, no floating-point atomics.

Letters: S query, G key, B batch, H heads, D dim, K top-k width, C queries of one chunk, NT tiles of KEYS keys.
1. query_side: one query per CTA gathers its selected keys; dq_h = sum_j p_jh k_j, dw_h = sum_j g_j relu(x_jh) with
   p_jh = 1[x_jh > 0] g_j w_h. It leaves key, gradient and head mask 1[x_jh > 0] (byte h % 8, bit h // 8) of every slot,
   the first slot of every key tile, and which queries touch a tile, so that the second pass recomputes nothing.
2. key_side: one CTA owns KEYS keys and a run of queries. Helper warps scatter (g, mask) of the slots that fall into
   the tile into a dense on-chip row; two warpgroups expand it to the bf16 operand p [KEYS, H] in registers: dk += p q.
   Every pair of a tile and a query is multiplied, selected or not, so a query whose q or w is not finite makes the dk
   of all keys in the tiles of its run NaN.
The runs and the ordered sum over them are in `bwd_plan`.
"""

import tilelang.language as T

from .bwd_common import BF16, F32, HELPERS, I32, I64, ROWS, TILE, U8, Heads, QueryParts, free_strided, strided
from .bwd_plan import KEYS

POLICY = T.GemmWarpPolicy.FullRow


def build_query_side(slots: int, heads: int, dim: int):
    """Program `(Q, K, W, Index, Grad, dQ, dW, Slots, Bits, Starts, Span)`; the first seven as in `build_sparse`.

    Index: ascending, empty slots last. Slots: [B * S, K rounded up to 64, 2] int32, key and the bits of the gradient.
    Bits: [blocks of heads * B * S, K rounded up to 64, 8] uint8. Both are written where a tile of slots is in use.
    Starts: [B * S, NT + 1] int32, first slot of every key tile. Span: [2, B, NT] int32, zero before: the largest S - s
    and s + 1 of the queries s that select in the tile.
    """
    hd = Heads.of(heads)
    parts = QueryParts(hd, dim, slots)
    ntile = slots // TILE
    steps = slots.bit_length()
    blocks = 3 if slots <= 2048 else 2  # CTAs that fit a multiprocessor
    S, G, B, K_ = T.dynamic("S"), T.dynamic("G"), T.dynamic("B"), T.dynamic("width")
    KP, NT, NT1 = T.dynamic("KP"), T.dynamic("NT"), T.dynamic("NT1")
    rows, rows_z = T.dynamic("rows"), T.dynamic("rows_z")
    key_stride = T.dynamic("Ks0", I64)

    @T.prim_func
    def score_bwd_query_side(
        Q: strided([S, B, heads, dim], "Q", BF16),
        K: T.StridedTensor([G, B, dim], [key_stride, T.dynamic("Ks1", I64), 1], BF16),
        W: free_strided([S, B, heads], "W", F32),
        Index: strided([B, S, K_], "I", I32),
        Grad: free_strided([B, S, K_], "G", F32),
        dQ: strided([S, B, heads, dim], "dQ", BF16),
        dW: strided([S, B, heads], "dW", F32),
        Slots: T.Tensor([rows, KP, 2], I32),
        Bits: T.Tensor([rows_z, KP, 8], U8),
        Starts: T.Tensor([rows, NT1], I32),
        Span: T.Tensor([2, B, NT], I32),
    ):
        with T.Kernel(S, B, hd.count, threads=128) as (bx, by, bz):
            T.import_source(HELPERS)
            T.annotate_min_blocks_per_sm(blocks)
            tx = T.get_thread_binding()
            qs = T.alloc_shared([ROWS, dim], BF16)
            ks = T.alloc_shared([2, TILE, dim], BF16)
            ps = T.alloc_shared([TILE, ROWS], BF16)
            ids = T.alloc_shared([slots], I32)
            gs = T.alloc_shared([slots], F32)
            ws = T.alloc_shared([ROWS], F32)
            dws = T.alloc_shared([4, ROWS], F32)
            x = T.alloc_fragment([TILE, ROWS], F32)
            x4 = T.reshape(x, (4, 2, 8, ROWS))
            x8 = T.reshape(x, (TILE, 8, 8))
            bits = T.alloc_fragment([TILE, 8], I32)
            bits8 = T.alloc_fragment([TILE, 8], U8)
            p = T.alloc_fragment([TILE, ROWS], BF16)
            dq = T.alloc_fragment([ROWS, dim], F32)
            dwp = T.alloc_fragment([4, 8, ROWS], F32)
            gv = T.alloc_fragment([TILE], F32)
            wv = T.alloc_fragment([ROWS], F32)
            nt = T.alloc_var(I32)
            lo = T.alloc_var(I32)
            hi = T.alloc_var(I32)
            s = S - 1 - bx  # causal rows: the longest first
            parts.load_slots(tx, s, by, K_, Index, ids)
            T.ptx_commit_group()
            parts.load_query(tx, s, by, bz, K_, Grad, W, Q, gs, ws, qs)
            T.ptx_commit_group()
            T.clear(dq)
            T.clear(dwp)
            T.ptx_wait_group(1)
            parts.drop_strays(tx, G, ids)
            T.sync_threads()
            nt = 0
            for n in parts.each(ntile):
                nt = nt + T.if_then_else(ids[n * TILE] >= 0, 1, 0)
            if nt > 0:
                parts.gather_tile(tx, 0, 0, by, key_stride * 2, ids, K, ks)
            T.ptx_commit_group()
            if bz == 0:
                for j in T.serial(T.ceildiv(NT1, 128)):  # first slot of every key tile, by bisection; -1 sorts last
                    if j * 128 + tx < NT1:
                        lo = 0
                        hi = slots
                        for _ in T.serial(steps):
                            if lo < hi:
                                mid = (lo + hi) // 2
                                if T.Cast("uint32", ids[mid]) < T.Cast("uint32", (j * 128 + tx) * KEYS):
                                    lo = mid + 1
                                else:
                                    hi = mid
                        Starts[by * S + s, j * 128 + tx] = lo
                        # The first slot at or after the tile's first key may lie in a later tile.
                        past = (j * 128 + tx + 1) * KEYS
                        if j * 128 + tx < NT and lo < slots and T.Cast("uint32", ids[lo]) < T.Cast("uint32", past):
                            T.call_extern("int32", "atomicMax", T.address_of(Span[0, by, j * 128 + tx]), S - s)
                            T.call_extern("int32", "atomicMax", T.address_of(Span[1, by, j * 128 + tx]), s + 1)
            T.ptx_wait_group(0)
            parts.clear_empty(tx, ids, gs)
            for n in T.serial(nt):
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(ks[n % 2, :, :], qs, x, transpose_B=True, clear_accum=True, policy=POLICY)
                if n + 1 < nt:
                    parts.gather_tile(tx, n + 1, (n + 1) % 2, by, key_stride * 2, ids, K, ks)
                T.ptx_commit_group()
                T.wait_wgmma(0)
                T.copy(gs[n * TILE : (n + 1) * TILE], gv)
                T.copy(ws, wv)
                for i, h in T.Parallel(TILE, ROWS):
                    p[i, h] = T.if_then_else(x[i, h] > 0, gv[i] * wv[h], 0.0)
                T.copy(p, ps)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(ps, ks[n % 2, :, :], dq, transpose_A=True, policy=POLICY)
                parts.add_dw(n, x4, gs, dwp)
                T.clear(bits)
                for o in T.unroll(8):
                    for i, c in T.Parallel(TILE, 8):
                        bits[i, c] = bits[i, c] | T.if_then_else(x8[i, o, c] > 0, 1 << o, 0)
                for i, c in T.Parallel(TILE, 8):
                    bits8[i, c] = T.cast(bits[i, c], U8)
                for i, c in T.Parallel(TILE, 8):
                    Bits[(bz * B + by) * S + s, n * TILE + i, c] = bits8[i, c]
                if bz == 0 and tx < TILE:
                    Slots[by * S + s, n * TILE + tx, 0] = ids[n * TILE + tx]
                    Slots[by * S + s, n * TILE + tx, 1] = T.reinterpret(gs[n * TILE + tx], I32)
                T.wait_wgmma(0)
            parts.finish(tx, s, by, bz, dwp, dws, dq, qs, dQ, dW)

    return score_bwd_query_side


def build_key_side(heads: int, dim: int, precise: bool, qst: int = 4, tst: int = 6):
    """Program `(Q, W, Slots, Bits, Starts, Items, Part)`: one work item per CTA, 384 threads.

    Items: [NI, 5] int32 rows (key tile, first query, queries, batch, row of Part); no queries: nothing to do.
    Part: [NI, KEYS, D] fp32, overwritten at the item's row.
    """
    hd = Heads.of(heads)
    inner = -(-hd.size // 16) * 16  # heads are the inner extent of p q: a multiple of 16
    regs, ahead = ((56, 224), 2) if precise and dim == 128 else ((72, 216), 4)  # ahead: loads in flight of a helper
    HB = 64  # each of two warpgroups multiplies two blocks of 64 keys
    S, B, KP, NT1, NI = T.dynamic("S"), T.dynamic("B"), T.dynamic("KP"), T.dynamic("NT1"), T.dynamic("NI")
    rows, rows_z = T.dynamic("rows"), T.dynamic("rows_z")

    @T.macro
    def operand(p, lo, row, st, gt, bt, wt):
        bv = T.alloc_fragment([HB, 8], I32)
        gv = T.alloc_fragment([HB], F32)
        wv = T.alloc_fragment([inner], F32)
        for i, c in T.Parallel(HB, 8):
            bv[i, c] = T.cast(bt[st, row + i, c], I32)
        T.copy(gt[st, row : row + HB], gv)
        T.copy(wt[st, :], wv)
        for i, h in T.Parallel(HB, inner):
            p[i, h] = T.if_then_else((bv[i, h % 8] & (1 << (h // 8))) != 0, gv[i] * wv[h], 0.0)
        if precise:
            for i, h in T.Parallel(HB, inner):
                lo[i, h] = T.if_then_else(
                    (bv[i, h % 8] & (1 << (h // 8))) != 0, gv[i] * wv[h] - T.cast(p[i, h], F32), 0.0
                )

    @T.macro
    def product(p, lo, q, acc):
        T.wgmma_gemm(p, q, acc, policy=POLICY)
        if precise:
            T.wgmma_gemm(lo, q, acc, policy=POLICY)

    @T.macro
    def consume(row, nq, qs, gt, bt, wt, qfull, qempty, tfull, tempty, Part, part):
        """One warpgroup: keys row .. row + 127 of the tile, two queries per turn."""
        pa = T.alloc_fragment([HB, inner], BF16)
        pb = T.alloc_fragment([HB, inner], BF16)
        la = T.alloc_fragment([HB, inner], BF16)
        lb = T.alloc_fragment([HB, inner], BF16)
        dka = T.alloc_fragment([HB, dim], F32)
        dkb = T.alloc_fragment([HB, dim], F32)
        T.clear(dka)
        T.clear(dkb)
        for m in T.serial(nq // 2):
            T.barrier_wait(tfull[2 * m % tst], (2 * m // tst) & 1)
            operand(pa, la, row, 2 * m % tst, gt, bt, wt)
            T.barrier_wait(qfull[2 * m % qst], (2 * m // qst) & 1)
            product(pa, la, qs[2 * m % qst, :, :], dka)
            operand(pb, lb, row + HB, 2 * m % tst, gt, bt, wt)
            T.barrier_arrive(tempty[2 * m % tst])
            product(pb, lb, qs[2 * m % qst, :, :], dkb)
            T.barrier_wait(tfull[(2 * m + 1) % tst], ((2 * m + 1) // tst) & 1)
            T.wait_wgmma(2 if precise else 1)
            operand(pa, la, row, (2 * m + 1) % tst, gt, bt, wt)
            T.barrier_wait(qfull[(2 * m + 1) % qst], ((2 * m + 1) // qst) & 1)
            product(pa, la, qs[(2 * m + 1) % qst, :, :], dka)
            T.wait_wgmma(2 if precise else 1)
            T.barrier_arrive(qempty[2 * m % qst])
            operand(pb, lb, row + HB, (2 * m + 1) % tst, gt, bt, wt)
            T.barrier_arrive(tempty[(2 * m + 1) % tst])
            product(pb, lb, qs[(2 * m + 1) % qst, :, :], dkb)
            T.wait_wgmma(0)
            T.barrier_arrive(qempty[(2 * m + 1) % qst])
        T.copy(dka, Part[part, row : row + HB, :])
        T.copy(dkb, Part[part, row + HB : row + 2 * HB, :])

    @T.prim_func
    def score_bwd_key_side(
        Q: strided([S, B, heads, dim], "Q", BF16),
        W: free_strided([S, B, heads], "W", F32),
        Slots: T.Tensor([rows, KP, 2], I32),
        Bits: T.Tensor([rows_z, KP, 8], U8),
        Starts: T.Tensor([rows, NT1], I32),
        Items: T.Tensor([NI, 5], I32),
        Part: T.Tensor([NI, KEYS, dim], F32),
    ):
        with T.Kernel(NI, threads=384) as bx:
            tx = T.get_thread_binding()
            qs = T.alloc_shared([qst, inner, dim], BF16)
            gt = T.alloc_shared([tst, KEYS], F32)
            bt = T.alloc_shared([tst, KEYS, 8], U8)
            wt = T.alloc_shared([tst, inner], F32)
            qfull = T.alloc_barrier([32] * qst)
            qempty = T.alloc_barrier([256] * qst)
            tfull = T.alloc_barrier([32] * tst)
            tempty = T.alloc_barrier([256] * tst)
            kt = Items[bx, 0]
            q0 = Items[bx, 1]
            real = Items[bx, 2] * hd.count  # a query with two blocks of heads counts as two
            nq = (real + 1) // 2 * 2  # an odd run ends with an empty query
            by = Items[bx, 3]
            if tx >= 256:
                T.set_max_nreg(regs[0], 0)
                if tx < 288:
                    for n in T.serial(nq):
                        z = n % hd.count
                        T.barrier_wait(qempty[n % qst], ((n // qst) & 1) ^ 1)
                        T.tma_copy(
                            Q[q0 + n // hd.count, by, z * hd.size : z * hd.size + inner, :],  # past the heads: zeros
                            qs[n % qst, :, :],
                            barrier=qfull[n % qst],
                            leader_scope_threads=32,
                        )
                        T.barrier_arrive(qfull[n % qst])
                else:
                    lane = tx % 32
                    slot = T.alloc_local([ahead, 2], I32)
                    bl = T.alloc_local([ahead, 8], U8)
                    nxt = T.alloc_local([2], I32)  # slots of the next query, fetched a turn ahead
                    t0 = T.min(q0 + (tx - 288) // 32 // hd.count, S - 1)
                    nxt[0] = Starts[by * S + t0, kt]
                    nxt[1] = Starts[by * S + t0, kt + 1]
                    for m in T.serial(T.ceildiv(nq - (tx - 288) // 32, 3)):
                        n = m * 3 + (tx - 288) // 32
                        st = n % tst
                        z = n % hd.count
                        t = T.min(q0 + n // hd.count, S - 1)
                        a = T.alloc_var(I32)
                        e = T.alloc_var(I32)
                        a = nxt[0]
                        e = T.if_then_else(n < real, nxt[1], nxt[0])
                        t1 = T.min(q0 + (n + 3) // hd.count, S - 1)
                        nxt[0] = Starts[by * S + t1, kt]
                        nxt[1] = Starts[by * S + t1, kt + 1]
                        T.barrier_wait(tempty[st], ((n // tst) & 1) ^ 1)
                        for u in T.unroll(KEYS // 128):
                            for v in T.vectorized(4):
                                gt[st, u * 128 + lane * 4 + v] = 0.0
                        for u in T.unroll(T.ceildiv(inner, 32)):
                            if u * 32 + lane < inner:
                                if u * 32 + lane < hd.size:
                                    wt[st, u * 32 + lane] = W[t, by, z * hd.size + u * 32 + lane]
                                else:
                                    wt[st, u * 32 + lane] = 0.0
                        T.sync_warp()
                        for j in T.serial(T.ceildiv(e - a, 32 * ahead)):
                            for o in T.unroll(ahead):
                                slot[o, 1] = 0
                                if a + (j * ahead + o) * 32 + lane < e:
                                    for v in T.vectorized(2):
                                        slot[o, v] = Slots[by * S + t, a + (j * ahead + o) * 32 + lane, v]
                                    for v in T.vectorized(8):
                                        bl[o, v] = Bits[(z * B + by) * S + t, a + (j * ahead + o) * 32 + lane, v]
                            for o in T.unroll(ahead):
                                if slot[o, 1] != 0:  # of equal indices one carries the gradient of all
                                    gt[st, slot[o, 0] - kt * KEYS] = T.reinterpret(slot[o, 1], F32)
                                    for v in T.vectorized(8):
                                        bt[st, slot[o, 0] - kt * KEYS, v] = bl[o, v]
                        T.barrier_arrive(tfull[st])
            else:
                T.set_max_nreg(regs[1], 1)
                if nq > 0:
                    if tx < 128:
                        consume(0, nq, qs, gt, bt, wt, qfull, qempty, tfull, tempty, Part, Items[bx, 4])
                    else:
                        consume(2 * HB, nq, qs, gt, bt, wt, qfull, qempty, tfull, tempty, Part, Items[bx, 4])

    return score_bwd_key_side
