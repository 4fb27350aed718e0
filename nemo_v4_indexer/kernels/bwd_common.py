"""Parts that the backward kernels share: how one query is loaded, how its dq and dw leave.

Letters: S query, G key, B batch, H heads, D dim, K top-k width.
A kernel works on a block of at most 64 heads (`Heads`): 64 is the row count of a wgmma, so smaller blocks are padded
with zero rows in shared memory only, and 128 heads are two blocks on a grid axis.
"""

from dataclasses import dataclass
from functools import partial

import tilelang
import tilelang.language as T

BF16, F32, I32, I64, U8 = "bfloat16", "float32", "int32", "int64", "uint8"
TILE = 64  # slots of one product: the rows of a wgmma
ROWS = 64  # padded heads of a block

_KEY = tilelang.PassConfigKey
# The kernels place their own barriers, keep x in its accumulator and mask by hand: passes that would do it are off.
PASS_CONFIGS = {
    _KEY.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    _KEY.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    _KEY.TL_DISABLE_SHARED_MEMORY_REUSE: True,
    _KEY.TL_DISABLE_WARP_SPECIALIZED: True,
    _KEY.TL_DISABLE_BUFFER_INIT_CHECK: True,
}

# A missing row is filled with zeros. The row offset is 64-bit here, so that callers may compute rows in 32 bits.
HELPERS = """#include <tl_templates/cuda/copy_sm90.h>
#include <tl_templates/cuda/copy.h>
__device__ __forceinline__ void copy_row16(void* dst, const void* base, int row, int64_t stride, int valid) {
  tl::cp_async_gs_conditional<16>(dst, static_cast<const char*>(base) + static_cast<int64_t>(valid ? row : 0) * stride,
                                  valid != 0);
}
__device__ __forceinline__ void store_row16(void* dst, const void* src) {
  *static_cast<uint4*>(dst) = *static_cast<const uint4*>(src);
}
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """Blocks of heads: `count` blocks of `size` heads."""

    count: int
    size: int

    @classmethod
    def of(cls, heads: int) -> "Heads":
        count = -(-heads // ROWS)
        if heads < 1 or heads % count:
            raise ValueError(f"heads must split evenly in blocks of at most {ROWS}, got {heads}")
        return cls(count, heads // count)


def row_threads(dim: int) -> int:
    """Threads that move one row of D bf16 values in 16-byte pieces."""
    return dim // 8


def strided(shape: list, name: str, dtype: str):
    """A tensor argument whose last dimension is contiguous and whose other strides are run-time values."""
    return T.StridedTensor(shape, [T.dynamic(f"{name}s{i}", I64) for i in range(len(shape) - 1)] + [1], dtype)


def free_strided(shape: list, name: str, dtype: str):
    """A tensor argument with any strides, zero included."""
    return T.StridedTensor(shape, [T.dynamic(f"{name}s{i}", I64) for i in range(len(shape))], dtype)


def cp4(dst, src):
    return T.call_extern("handle", "tl::cp_async_gs<4>", T.address_of(dst), T.address_of(src))


class QueryParts:
    """Macros for 128 threads (`tx` 0..127) that own one query of the tensors below; `s, b, z` query, batch, head block.

    ids, gs: the query's indices and gradients [slots]; ws: head weights [ROWS]; qs: query rows [ROWS, D];
    ks: key rows [stages, TILE, D].
    """

    def __init__(self, heads: Heads, dim: int, slots: int):
        per_row = row_threads(dim)
        rows = 128 // per_row
        laps = T.ceildiv(slots, 128)
        each = partial(T.unroll, unroll_factor=4)  # fully unrolled, the addresses of long rows outgrow the registers

        @T.macro
        def load_slots(tx, s, b, width, Index, ids):
            """Start copying the indices; slots beyond the width are empty."""
            for u in each(laps):
                if u * 128 + tx < slots:
                    if u * 128 + tx < width:
                        cp4(ids[u * 128 + tx], Index[b, s, u * 128 + tx])
                    else:
                        ids[u * 128 + tx] = -1

        @T.macro
        def drop_strays(tx, groups, ids):
            """An index that names no key counts as empty: nothing outside the tensors is read or written."""
            for u in each(laps):
                if u * 128 + tx < slots and ids[u * 128 + tx] >= groups:
                    ids[u * 128 + tx] = -1

        @T.macro
        def load_query(tx, s, b, z, width, Grad, W, Q, gs, ws, qs):
            """Start copying gradients, head weights and query rows; padded heads are zero."""
            for u in each(laps):
                if u * 128 + tx < width:
                    cp4(gs[u * 128 + tx], Grad[b, s, u * 128 + tx])
            if tx < ROWS:
                if tx < heads.size:
                    cp4(ws[tx], W[s, b, z * heads.size + tx])
                else:
                    ws[tx] = 0.0
            for u in T.unroll(ROWS // rows):
                T.call_extern(
                    "handle", "copy_row16", T.address_of(qs[u * rows + tx // per_row, tx % per_row * 8]),
                    T.address_of(Q[s, b, T.min(z * heads.size + u * rows + tx // per_row, heads.count * heads.size - 1),
                                   tx % per_row * 8]),
                    0, T.cast(0, I64), T.if_then_else(u * rows + tx // per_row < heads.size, 1, 0),
                )  # fmt: skip

        @T.macro
        def clear_empty(tx, ids, gs):
            """Empty slots have gradient zero, whatever the caller left there."""
            for u in each(laps):
                if u * 128 + tx < slots and ids[u * 128 + tx] < 0:
                    gs[u * 128 + tx] = 0.0

        @T.macro
        def gather_tile(tx, n, stage, b, row_bytes, ids, K, ks):
            """Start copying the key rows of slots n * TILE ..; empty slots get zero rows."""
            for u in T.unroll(TILE // rows):
                T.call_extern(
                    "handle", "copy_row16", T.address_of(ks[stage, u * rows + tx // per_row, tx % per_row * 8]),
                    T.address_of(K[0, b, tx % per_row * 8]), ids[n * TILE + u * rows + tx // per_row], row_bytes,
                    T.if_then_else(ids[n * TILE + u * rows + tx // per_row] >= 0, 1, 0),
                )  # fmt: skip

        @T.macro
        def add_dw(n, x4, gs, dwp):
            """dwp += g relu(x) of one tile, the two row halves that a thread holds one after the other."""
            for a, r, h in T.Parallel(4, 8, ROWS):
                dwp[a, r, h] = dwp[a, r, h] + T.max(x4[a, 0, r, h], 0) * gs[n * TILE + a * 16 + r]
            for a, r, h in T.Parallel(4, 8, ROWS):
                dwp[a, r, h] = dwp[a, r, h] + T.max(x4[a, 1, r, h], 0) * gs[n * TILE + a * 16 + 8 + r]

        @T.macro
        def finish(tx, s, b, z, dwp, dws, dq, qs, dQ, dW):
            """Sum dw over the lanes and warps in a fixed order and store dq and dw; named barrier 2."""
            for o in T.unroll(3):
                for a, r, h in T.Parallel(4, 8, ROWS):
                    dwp[a, r, h] = dwp[a, r, h] + T.shfl_xor(dwp[a, r, h], 4 << o)
            for a, r, h in T.Parallel(4, 8, ROWS):
                if r == 0:
                    dws[a, h] = dwp[a, r, h]
            T.sync_threads(2, 128)
            T.copy(dq, qs)
            T.sync_threads(2, 128)
            for u in T.unroll(ROWS // rows):
                if u * rows + tx // per_row < heads.size:
                    T.call_extern(
                        "handle", "store_row16",
                        T.address_of(dQ[s, b, z * heads.size + u * rows + tx // per_row, tx % per_row * 8]),
                        T.address_of(qs[u * rows + tx // per_row, tx % per_row * 8]),
                    )  # fmt: skip
            if tx < heads.size:
                dW[s, b, z * heads.size + tx] = (dws[0, tx] + dws[1, tx]) + (dws[2, tx] + dws[3, tx])

        self.each = each
        self.load_slots, self.drop_strays, self.load_query = load_slots, drop_strays, load_query
        self.clear_empty, self.gather_tile, self.add_dw, self.finish = clear_empty, gather_tile, add_dw, finish
