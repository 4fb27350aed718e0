"""Sparse backward of the indexer scores: one query per CTA, dk rows added in L2 by the bulk copy engine.

Letters: S query, G key, B batch, H heads, D dim, K top-k width.
    x_jh = q_h . k_j     p_jh = 1[x_jh > 0] g_j w_h
    dq_h = sum_j p_jh k_j     dw_h = sum_j g_j relu(x_jh)     dk_j += sum_h p_jh q_h
p is the only rounded operand (bf16; hi + lo bf16 for dk when precise); dw is summed in fp32 from x.

Of 256 threads, warps 0-3 multiply; warps 4-7 gather key rows with cp.async and issue one bulk add per selected key
(four warps, because one warp issues a bulk operation only every 60 cycles). The scores of tile n + 1 are multiplied
while the dk rows of tile n are staged. The adds bound the kernel, and their order varies from run to run.
"""

import tilelang
import tilelang.language as T

from .bwd_common import BF16, F32, HELPERS, I32, I64, ROWS, TILE, Heads, QueryParts, free_strided, strided

POLICY = T.GemmWarpPolicy.FullRow


def build_sparse(slots: int, heads: int, dim: int, precise: bool):
    """Program `(Q, K, W, Index, Grad, dQ, dW, dK, step)`.

    Q: [S, B, H, D] bf16, 16-byte rows. K: [G, B, D] bf16, 16-byte rows. W: [S, B, H] fp32, any strides.
    Index: [B, S, K] int32, K <= slots; a tile of 64 slots whose first slot is empty ends the row.
    Grad: [B, S, K] fp32, any strides. dQ: [S, B, H, D] bf16 and dW: [S, B, H] fp32 are overwritten.
    dK: [G, B, D] fp32 is added to. step: coprime with S; CTA i takes query i * step mod S.
    """
    hd = Heads.of(heads)
    parts = QueryParts(hd, dim, slots)
    ntile = slots // TILE
    # Two CTAs share a multiprocessor's shared memory: long rows leave room for two key stages, the longest for one CTA.
    stages, blocks, regs = 3 if slots <= 512 else 2, 2, (32, 224)
    if slots > 2048:
        blocks, regs = 1, (64, 240)
    S, G, B, K_ = T.dynamic("S"), T.dynamic("G"), T.dynamic("B"), T.dynamic("width")
    key_stride = T.dynamic("Ks0", I64)

    @T.prim_func
    def score_bwd_sparse(
        Q: strided([S, B, heads, dim], "Q", BF16),
        K: T.StridedTensor([G, B, dim], [key_stride, T.dynamic("Ks1", I64), 1], BF16),
        W: free_strided([S, B, heads], "W", F32),
        Index: strided([B, S, K_], "I", I32),
        Grad: free_strided([B, S, K_], "G", F32),
        dQ: T.Tensor([S, B, heads, dim], BF16),
        dW: T.Tensor([S, B, heads], F32),
        dK: T.Tensor([G, B, dim], F32),
        step: T.int32,
    ):
        with T.Kernel(S, B, hd.count, threads=256) as (bx, by, bz):
            T.import_source(HELPERS)
            T.annotate_min_blocks_per_sm(blocks)
            tx = T.get_thread_binding()
            qs = T.alloc_shared([ROWS, dim], BF16)
            ks = T.alloc_shared([stages, TILE, dim], BF16)
            ps = T.alloc_shared([TILE, ROWS], BF16)
            dks = T.alloc_shared([TILE, dim + 8], F32)  # padded rows: conflict-free 8-byte stores
            ids = T.alloc_shared([slots], I32)
            gs = T.alloc_shared([slots], F32)
            ws = T.alloc_shared([ROWS], F32)
            dws = T.alloc_shared([4, ROWS], F32)
            x = T.alloc_fragment([TILE, ROWS], F32)
            x4 = T.reshape(x, (4, 2, 8, ROWS))
            p = T.alloc_fragment([TILE, ROWS], BF16)
            pl = T.alloc_fragment([TILE, ROWS], BF16)
            dq = T.alloc_fragment([ROWS, dim], F32)
            dkf = T.alloc_fragment([TILE, dim], F32)
            dwp = T.alloc_fragment([4, 8, ROWS], F32)
            gv = T.alloc_fragment([TILE], F32)
            wv = T.alloc_fragment([ROWS], F32)
            T.annotate_layout({dks: tilelang.layout.make_linear_layout(dks)})
            nt = T.alloc_var(I32)
            s = T.alloc_var(I32)
            ready = T.alloc_barrier(256)  # each helper thread arrives once by its copies and once by its stores
            kfull = T.alloc_barrier([128] * stages)
            kempty = T.alloc_barrier([128] * stages)
            sfull = T.alloc_barrier([32] * 4)  # helper warp i adds the 16 rows that warp i stages
            sempty = T.alloc_barrier([32] * 4)
            # Queries that run together are far apart: neighbours choose the same keys and would queue at one L2 row.
            s = T.cast(T.cast(bx, I64) * T.cast(step, I64) % T.cast(S, I64), I32)
            if tx >= 128:
                T.set_max_nreg(regs[0], 0)
                hx = tx - 128
                parts.load_slots(hx, s, by, K_, Index, ids)
                T.ptx_commit_group()
                parts.load_query(hx, s, by, bz, K_, Grad, W, Q, gs, ws, qs)
                T.cp_async_barrier_noinc(ready[0])
                T.ptx_commit_group()
                T.ptx_wait_group(1)
                parts.drop_strays(hx, G, ids)
                T.barrier_arrive(ready[0])
                T.sync_threads(1, 128)
                nt = 0
                for n in parts.each(ntile):
                    nt = nt + T.if_then_else(ids[n * TILE] >= 0, 1, 0)
                for n in T.serial(T.min(nt, stages)):
                    parts.gather_tile(hx, n, n, by, key_stride * 2, ids, K, ks)
                    T.cp_async_barrier_noinc(kfull[n])
                for n in T.serial(nt):
                    T.barrier_wait(sfull[hx // 32], n & 1)
                    if hx % 32 < 16:
                        if ids[n * TILE + hx // 32 * 16 + hx % 32] >= 0:
                            T.call_extern(
                                "handle", "tl::tma_store_add", T.address_of(dks[hx // 32 * 16 + hx % 32, 0]),
                                T.address_of(dK[ids[n * TILE + hx // 32 * 16 + hx % 32], by, 0]), dim * 4,
                            )  # fmt: skip
                        T.call_extern("handle", "tl::tma_store_arrive")
                    if n + stages < nt:
                        T.barrier_wait(kempty[n % stages], (n // stages) & 1)
                        parts.gather_tile(hx, n + stages, n % stages, by, key_stride * 2, ids, K, ks)
                        T.cp_async_barrier_noinc(kfull[n % stages])
                    T.call_extern("handle", "tl::tma_store_wait<0,true>")
                    T.barrier_arrive(sempty[hx // 32])
            else:
                T.set_max_nreg(regs[1], 1)
                T.clear(dq)
                T.clear(dwp)
                T.barrier_wait(ready[0], 0)
                parts.clear_empty(tx, ids, gs)
                nt = 0
                for n in parts.each(ntile):
                    nt = nt + T.if_then_else(ids[n * TILE] >= 0, 1, 0)
                if nt > 0:
                    T.barrier_wait(kfull[0], 0)
                T.fence_proxy_async()
                T.sync_threads(2, 128)
                T.wgmma_gemm(ks[0, :, :], qs, x, transpose_B=True, clear_accum=True, policy=POLICY)
                T.wait_wgmma(0)
                for n in T.serial(nt):
                    T.copy(
                        gs[n * TILE : (n + 1) * TILE], gv
                    )  # in registers: a load under `x > 0` would be one per element
                    T.copy(ws, wv)
                    parts.add_dw(n, x4, gs, dwp)
                    for i, h in T.Parallel(TILE, ROWS):  # x itself stays untouched: it is a wgmma accumulator
                        p[i, h] = T.if_then_else(x[i, h] > 0, gv[i] * wv[h], 0.0)
                    if precise:
                        for i, h in T.Parallel(TILE, ROWS):
                            pl[i, h] = T.if_then_else(x[i, h] > 0, gv[i] * wv[h] - T.cast(p[i, h], F32), 0.0)
                    T.sync_threads(2, 128)  # every warp is done with the last tile's ps
                    T.copy(p, ps)
                    if n + 1 < nt:
                        T.barrier_wait(kfull[(n + 1) % stages], ((n + 1) // stages) & 1)
                    T.fence_proxy_async()
                    T.sync_threads(2, 128)
                    T.wgmma_gemm(p, qs, dkf, clear_accum=True, policy=POLICY)
                    if precise:
                        T.wgmma_gemm(pl, qs, dkf, policy=POLICY)
                    T.wgmma_gemm(ps, ks[n % stages, :, :], dq, transpose_A=True, policy=POLICY)
                    T.wgmma_gemm(ks[(n + 1) % stages, :, :], qs, x, transpose_B=True, clear_accum=True, policy=POLICY)
                    T.barrier_wait(sempty[tx // 32], (n & 1) ^ 1)
                    T.wait_wgmma(2)
                    T.copy(dkf, dks[:, 0:dim])
                    T.fence_proxy_async()
                    T.barrier_arrive(sfull[tx // 32])
                    T.wait_wgmma(0)
                    T.barrier_arrive(kempty[n % stages])
                parts.finish(tx, s, by, bz, dwp, dws, dq, qs, dQ, dW)

    return score_bwd_sparse
