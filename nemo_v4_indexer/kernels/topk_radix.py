"""The fallback of the top-k program: a radix select that is right for any row."""

import tilelang.language as T

from nemo_v4_indexer.kernels.topk_scan import BINS, block_scan, find_bin, key_of


def radix_selector(k, threads):
    """Macro radix_select(g): selection of a row of more than k visible columns; g holds the kernel's scalars."""
    warps = threads // 32

    @T.macro
    def radix_select(g):
        """Four passes of 8 bits find the k-th key, a fifth writes in order; straight from the workspace."""
        prefix = T.alloc_var("uint32", init=0)
        left = T.alloc_var("int32", init=k)
        T.sync_threads()
        if g.tx < BINS // 4:
            for v in T.vectorized(4):
                g.hist[g.tx * 4 + v] = 0
        T.sync_threads()
        for digit in T.serial(4):
            sh = T.cast(24 - digit * 8, "uint32")
            for i in T.serial(g.tx, g.n, threads):
                key = key_of(g.L[g.src + g.head + i])
                if (key >> sh) >> T.uint32(8) == prefix:
                    T.atomic_add(g.hist[T.cast((key >> sh) & T.uint32(255), "int32")], 1)
            T.sync_threads()
            if g.warp == 0:
                find_bin(left, g.hist, g.info, g.lane)
            T.sync_threads()
            prefix = prefix << T.uint32(8) | T.cast(g.info[0], "uint32")
            left = left - g.info[1]
        done = T.alloc_var("int32", init=0)
        for c in T.serial(T.ceildiv(g.n, threads)):
            key = T.alloc_var("uint32", init=0)
            y = T.alloc_var("float32", init=0.0)
            if c * threads + g.tx < g.n:
                y = g.L[g.src + g.head + (c * threads + g.tx)]
                key = key_of(y)
            T.sync_threads()
            above = T.Select(key > prefix, 1, 0)
            equal = T.Select(key == prefix, 1, 0)
            before, total = block_scan(above + (equal << 16), g.part, g.lane, g.warp, warps)
            if (above > 0) | ((equal > 0) & ((before >> 16) < left)):
                o = done + (before & 0xFFFF) + T.min(before >> 16, left)
                g.Ix[g.out + o] = g.first + c * threads + g.tx
                g.Sc[g.out + o] = y
            done = done + (total & 0xFFFF) + T.min(total >> 16, left)
            left = left - T.min(total >> 16, left)

    return radix_select
