"""Indexer scores of a block of query rows.

S query rows, B batch, H index heads, D index head dim, G keys, R rows of this launch.

    scores[b, i, g] = sum_h w[t, b, h] * relu(q[t, b, h, :] . k[g, b, :])    t = row0 + i, start[b, t] <= g < end[b, t]

bf16 products accumulated in fp32, everything after them in fp32; relu keeps NaN. A score depends on its row and key
alone, bit for bit: not on the launch, the block of rows, or the limits.

How: persistent blocks, longest rows first. A block takes 256 / H query rows: their 256 (row, head) pairs are the
columns of a wgmma whose 64 rows are keys, so the sum over heads stays inside four neighbouring lanes. Two warpgroups
take the key tiles in turn: one multiplies while the other sums; a warpgroup may start its product once the other's is
a quarter done, which keeps the tensor cores fed and the two out of step. A third warpgroup copies keys, the next rows'
queries and weights, and finds the range of keys that they need.
"""

import tilelang
import tilelang.language as T

_KEY = tilelang.PassConfigKey
PASS_CONFIGS = {
    _KEY.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # every barrier is written out below
    _KEY.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    _KEY.TL_DISABLE_SHARED_MEMORY_REUSE: True,
    _KEY.TL_DISABLE_WARP_SPECIALIZED: True,
}
COLUMNS = 256  # (row, head) pairs of a block: the widest wgmma
TILE = 64  # keys of a tile: the rows of a wgmma
STAGES = 4  # key tiles in shared memory
BUFFERS = 2  # sets of query rows: the next arrives while one is in use
RELU = """
__device__ __forceinline__ float relu_keeping_nan(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
#else
  return x < 0.0f ? 0.0f : x;
#endif
}
"""


def score_fwd(heads, dim):
    """prim_func for one head count and head dim; every length and outer stride is a run-time value."""
    rows = COLUMNS // heads
    panel = min(dim, 64)  # bf16 columns of one swizzled panel
    panels = dim // panel
    row_bytes = panel * 2
    k_panel, q_panel = TILE * row_bytes, COLUMNS * row_bytes
    layout = tilelang.layout
    swizzled = layout.make_full_bank_swizzled_layout if panel == 64 else layout.make_half_bank_swizzled_layout
    swizzle_mode = 1 if panel == 64 else 2
    steps = dim // 16
    early = max(1, steps // 4)  # steps of a product after which the other warpgroup may start its own
    group = min(rows, 4)  # rows whose sums are finished together
    pieces = heads // 8  # 8-column pieces of one row in the accumulator
    S, B, G, NL = T.dynamic("S"), T.dynamic("B"), T.dynamic("G"), T.dynamic("NL", "int64")
    qs, qb, qh, ks, kb, ws, wb = (T.dynamic(n, "int64") for n in ("qs", "qb", "qh", "ks", "kb", "ws", "wb"))

    @T.macro
    def product(acc, desc_k, desc_q, first, last):
        for step in list(range(first, last)):
            at, inside = step * 32 // row_bytes, step * 32 % row_bytes
            T.ptx_wgmma_ss(
                "float32",
                f"m64n{COLUMNS}k16",
                True,
                True,
                "bf16",
                "bf16",
                "fp32",
                desc_k.data,
                (at * k_panel + inside) >> 4,
                desc_q.data,
                (at * q_panel + inside) >> 4,
                acc.data,
                0,
                1 if step else 0,
                1,
                1,
            )
        T.warpgroup_commit_batch()

    @T.macro
    def add_heads(acc, w, sums, first):
        """sums[row, half of the tile's keys] over this lane's columns of rows first .. first + group - 1."""
        for e in T.unroll(2 * group):
            sums[e] = T.float32(0)
        for j in T.unroll(pieces):
            for c in T.unroll(2):
                for r in T.unroll(group):
                    for i in T.unroll(2):
                        x = acc[((first + r) * pieces + j) * 4 + i * 2 + c]
                        relu = T.call_extern("float32", "relu_keeping_nan", x)
                        sums[r * 2 + i] = sums[r * 2 + i] + relu * w[((first + r) * pieces + j) * 2 + c]

    @T.macro
    def swap(lane, bit, mine, other):
        """Of two sums over lanes that differ in one bit, the lane without it completes the first."""
        return T.Select(lane & bit == 0, mine, other) + T.shfl_xor(T.Select(lane & bit == 0, other, mine), bit)

    @T.prim_func
    def score_fwd_kernel(
        Q: T.StridedTensor([S, B, heads, dim], [qs, qb, qh, 1], "bfloat16"),
        K: T.StridedTensor([G, B, dim], [ks, kb, 1], "bfloat16"),
        W: T.StridedTensor([S, B, heads], [ws, wb, 1], "float32"),
        Start: T.Tensor([B, S], "int32"),
        End: T.Tensor([B, S], "int32"),
        L: T.Tensor([NL], "float32"),
        row0: T.int32,
        R: T.int32,
        stride: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=384) as bx:
            T.import_source(RELU)
            tx = T.get_thread_binding()
            lane = tx & 31
            wg = tx >> 7
            q_s = T.alloc_shared([BUFFERS, panels, rows, heads, panel], "bfloat16")
            k_s = T.alloc_shared([STAGES, panels, TILE, panel], "bfloat16")
            w_s = T.alloc_shared([BUFFERS, rows, heads], "float32")
            w_flat = T.reshape(w_s, (BUFFERS, COLUMNS))
            span = T.alloc_shared([BUFFERS, 2], "int32")
            q_full = T.alloc_barrier([1] * BUFFERS)
            q_empty = T.alloc_barrier([8] * BUFFERS)  # one arrival a warp
            k_full = T.alloc_barrier([1] * STAGES)
            k_empty = T.alloc_barrier([4] * STAGES)
            turn = T.alloc_barrier([4] * 2)
            T.annotate_layout({q_s: swizzled(q_s), k_s: swizzled(k_s)})
            blocks = T.alloc_var("int32")
            items = T.alloc_var("int32")
            mine = T.alloc_var("int32")  # items of this block of threads
            item = T.alloc_var("int32")
            b = T.alloc_var("int32")
            r0 = T.alloc_var("int32")
            lo = T.alloc_var("int32")
            hi = T.alloc_var("int32")
            tiles = T.alloc_var("int32")
            done = T.alloc_var("int32", init=0)  # key tiles of the items before
            blocks = T.ceildiv(R, rows)
            items = blocks * B
            mine = T.truncdiv(items, ctas)
            if T.Select(mine & 1 == 1, ctas - 1 - bx, bx) < items - mine * ctas:
                mine = mine + 1
            if wg == 2:
                T.set_max_nreg(40, 0)
                if tx < 288:
                    start = T.alloc_var("int32")
                    end = T.alloc_var("int32")
                    for it in T.serial(mine):
                        # Back and forth over the launch: every block of threads gets long and short items alike.
                        item = it * ctas + T.Select(it & 1 == 1, ctas - 1 - bx, bx)
                        r0 = T.truncdiv(item, B)
                        b = item - r0 * B
                        r0 = (blocks - 1 - r0) * rows
                        lo = 0x7FFFFFFF
                        hi = 0
                        if (lane < rows) & (r0 + lane < R):
                            start = Start[b, row0 + r0 + lane]
                            end = End[b, row0 + r0 + lane]
                            if start < end:
                                lo = T.max(start, 0)
                                hi = T.min(end, G)
                        lo = T.warp_reduce_min(lo) & ~7  # whole sectors of the output
                        hi = T.warp_reduce_max(hi)
                        tiles = T.Select(lo < hi, T.truncdiv(hi - lo + (TILE - 1), TILE), 0)
                        T.barrier_wait(q_empty[it % BUFFERS], (it // BUFFERS & 1) ^ 1)
                        T.sync_warp()  # the elected lane must not run ahead: the others would miss a phase
                        if T.shuffle_elect(32):  # one lane writes, copies and arrives: it keeps the order
                            span[it % BUFFERS, 0] = lo
                            span[it % BUFFERS, 1] = hi
                        for p in list(range(panels)):
                            T.tma_copy(
                                Q[row0 + r0 : row0 + r0 + rows, b, :, p * panel : (p + 1) * panel],
                                q_s[it % BUFFERS, p, :, :, :],
                                barrier=q_full[it % BUFFERS],
                                leader_scope_threads=32,
                            )
                        T.tma_copy(
                            W[row0 + r0 : row0 + r0 + rows, b, :],
                            w_s[it % BUFFERS, :, :],
                            barrier=q_full[it % BUFFERS],
                            leader_scope_threads=32,
                        )
                        if T.shuffle_elect(32):
                            T.barrier_arrive(q_full[it % BUFFERS])
                        for n in T.serial(tiles):
                            T.barrier_wait(k_empty[(done + n) % STAGES], ((done + n) // STAGES & 1) ^ 1)
                            T.sync_warp()
                            for p in list(range(panels)):
                                T.tma_copy(
                                    K[lo + n * TILE : lo + n * TILE + TILE, b, p * panel : (p + 1) * panel],
                                    k_s[(done + n) % STAGES, p, :, :],
                                    barrier=k_full[(done + n) % STAGES],
                                    leader_scope_threads=32,
                                )
                            if T.shuffle_elect(32):
                                T.barrier_arrive(k_full[(done + n) % STAGES])
                        done = done + tiles
            else:
                T.set_max_nreg(232, 1)
                acc = T.alloc_local([COLUMNS // 2], "float32")
                w = T.alloc_local([COLUMNS // 4], "float32")
                sums = T.alloc_local([2 * group], "float32")
                desc_k = T.alloc_wgmma_desc()
                desc_q = T.alloc_wgmma_desc()
                n = T.alloc_var("int32")
                col = T.alloc_var("int32")
                line = T.alloc_var("int64")
                for it in T.serial(mine):
                    item = it * ctas + T.Select(it & 1 == 1, ctas - 1 - bx, bx)
                    r0 = T.truncdiv(item, B)
                    b = item - r0 * B
                    r0 = (blocks - 1 - r0) * rows
                    T.barrier_wait(q_full[it % BUFFERS], it // BUFFERS & 1)
                    lo = span[it % BUFFERS, 0]
                    hi = span[it % BUFFERS, 1]
                    tiles = T.Select(lo < hi, T.truncdiv(hi - lo + (TILE - 1), TILE), 0)
                    for j in T.unroll(COLUMNS // 8):
                        for c in T.vectorized(2):
                            w[j * 2 + c] = w_flat[it % BUFFERS, j * 8 + (lane & 3) * 2 + c]
                    n = (wg ^ done) & 1
                    while n < tiles:
                        T.barrier_wait(k_full[(done + n) % STAGES], (done + n) // STAGES & 1)
                        T.barrier_wait(turn[wg], ((done + n) // 2 & 1) ^ 1 ^ wg)
                        T.initialize_wgmma_descriptor(
                            desc_k, T.address_of(k_s[0, 0, 0, 0]), swizzle_mode, 1, row_bytes // 2
                        )
                        T.initialize_wgmma_descriptor(
                            desc_q, T.address_of(q_s[0, 0, 0, 0, 0]), swizzle_mode, 1, row_bytes // 2
                        )
                        T.increase_descriptor_offset(desc_k, (done + n) % STAGES * (panels * k_panel))
                        T.increase_descriptor_offset(desc_q, it % BUFFERS * (panels * q_panel))
                        T.warpgroup_fence_operand(acc, num_regs=COLUMNS // 2)
                        T.warpgroup_arrive()
                        product(acc, desc_k, desc_q, 0, early)
                        product(acc, desc_k, desc_q, early, steps)
                        T.warpgroup_wait(1)
                        if lane == 0:
                            T.barrier_arrive(turn[wg ^ 1])
                        T.warpgroup_wait(0)
                        T.warpgroup_fence_operand(acc, num_regs=COLUMNS // 2)
                        if lane == 0:
                            T.barrier_arrive(k_empty[(done + n) % STAGES])
                        col = lo + n * TILE + (tx >> 5 & 3) * 16 + (lane >> 2)
                        line = T.cast(b * R + r0, "int64") * stride + col
                        for first in list(range(0, rows, group)):
                            add_heads(acc, w, sums, first)
                            # Four sums, each spread over four lanes, become one complete sum in each lane.
                            if group == 4:
                                for i in list(range(2)):
                                    a0 = swap(lane, 2, sums[i], sums[4 + i])
                                    a1 = swap(lane, 2, sums[2 + i], sums[6 + i])
                                    total = swap(lane, 1, a0, a1)
                                    if (r0 + first + (lane & 3) < R) & (col + i * 8 < hi):
                                        L[line + T.cast(first + (lane & 3), "int64") * stride + i * 8] = total
                            else:
                                a0 = swap(lane, 2, sums[0], sums[2])
                                a1 = swap(lane, 2, sums[1], sums[3])
                                total = swap(lane, 1, a0, a1)
                                if (r0 + (lane >> 1 & 1) < R) & (col + (lane & 1) * 8 < hi):
                                    L[line + T.cast(lane >> 1 & 1, "int64") * stride + (lane & 1) * 8] = total
                        n = n + 2
                    T.sync_warp()
                    if lane == 0:
                        T.barrier_arrive(q_empty[it % BUFFERS])
                    done = done + tiles

    return score_fwd_kernel
