"""Pieces of the top-k program: float order as integers, prefix sums and ranges over a block, a histogram search."""

import tilelang.language as T

BINS = 256  # eight per lane of the warp that searches a histogram
TOP = float(BINS - 2)
BIG = 1e37  # stands for infinity where a range is divided: 1 / (BIG - -BIG) is still a normal number


@T.macro
def ordered(v):
    """uint32 in the order of the floats, -0.0 below +0.0."""
    u = T.reinterpret(v, "uint32")
    return u ^ (T.reinterpret(T.reinterpret(u, "int32") >> 31, "uint32") | T.uint32(0x80000000))


@T.macro
def unordered(m):
    """The float of `ordered`."""
    return T.reinterpret(T.Select(m >= T.uint32(0x80000000), m ^ T.uint32(0x80000000), ~m), "float32")


@T.macro
def key_of(v):
    """uint32 in the selection order: -0.0 equals +0.0, every NaN on top."""
    # Integer tests, because v == v and v + 0.0 would be simplified away.
    m = T.alloc_var("uint32")
    m = ordered(v)
    if m == T.uint32(0x7FFFFFFF):  # -0.0
        m = T.uint32(0x80000000)
    if m - T.uint32(0x007FFFFF) > T.uint32(0xFF000001):  # outside [-inf, +inf]
        m = T.uint32(0xFFFFFFFF)
    return m


@T.macro
def bin_of(v, lo, scale):
    """0 to 254, monotone in the selection order; NaN fails the first min and lands on top."""
    return T.cast(T.max(T.min((v - lo) * scale, T.float32(TOP)), T.float32(0)), "int32")


@T.macro
def lanes_below(lane):
    """Bit mask of the lanes before this one."""
    return (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)


@T.macro
def warp_scan(c, lane):
    """Inclusive prefix sum over the warp."""
    run = T.alloc_var("int32")
    run = c
    for d in [1, 2, 4, 8, 16]:
        up = T.shfl_up(run, d)
        run = run + T.Select(lane >= d, up, 0)
    return run


@T.macro
def block_scan(c, part, lane, warp, warps):
    """Exclusive prefix and total of c over the block; one barrier. part: int32 [warps]."""
    run = warp_scan(c, lane)
    if lane == 31:
        part[warp] = run
    T.sync_threads()
    mine = T.Select(lane < warps, part[lane & (warps - 1)], 0)
    before = T.warp_reduce_sum(T.Select(lane < warp, mine, 0))
    total = T.warp_reduce_sum(mine)
    return before + run - c, total


@T.macro
def block_range(kmin, kmax, upart, lane, warp, warps):
    """Smallest kmin and largest kmax of the block; one barrier. upart: uint32 [64]."""
    wmin = T.warp_reduce_min(kmin)
    wmax = T.warp_reduce_max(kmax)
    if lane == 0:
        upart[warp] = wmin
        upart[32 + warp] = wmax
    T.sync_threads()
    return T.warp_reduce_min(upart[lane & (warps - 1)]), T.warp_reduce_max(upart[32 + (lane & (warps - 1))])


@T.macro
def find_bin(need, hist, info, lane):
    """One warp: info[0:3] = bin of the need-th largest, how many lie above it, how many in it; clears hist."""
    h = T.alloc_local([8], "int32")
    for q in T.unroll(2):
        for v in T.vectorized(4):
            h[q * 4 + v] = hist[BINS - 8 - lane * 8 + q * 4 + v]
    for q in T.unroll(2):
        for v in T.vectorized(4):
            hist[BINS - 8 - lane * 8 + q * 4 + v] = 0
    c = h[0] + h[1] + h[2] + h[3] + h[4] + h[5] + h[6] + h[7]
    above = T.alloc_var("int32")
    above = warp_scan(c, lane) - c
    if (above < need) & (above + c >= need):
        for q in [7, 6, 5, 4, 3, 2, 1, 0]:
            if (above < need) & (above + h[q] >= need):
                info[0] = BINS - 8 - lane * 8 + q
                info[1] = above
                info[2] = h[q]
            above = above + h[q]
