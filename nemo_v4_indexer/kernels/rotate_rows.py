"""Rotary embedding and Hadamard rotation of many short rows, in one pass (TileLang program, Hopper).

S positions, P rows at each, D bf16 values of a row, R rotary dims.

Eight neighbouring values are one thread's, D / 8 lanes hold a row. Everything is computed in fp32; between the two
rotations values are rounded to bf16, as they are where the two run one after the other.
"""

import tilelang
import tilelang.language as T

from .rotation import shape_problem

THREADS = 256
WIDTH = 8  # values of one thread: 16 bytes
ROWS = 2  # rows of one thread, whose loads are in flight together
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # nothing is shared
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
}
_F32, _BF16 = "float32", "bfloat16"


def rotate_rows(dim: int, rotary: int, half_split: bool, hadamard: bool, reverse: bool):
    """Program `(x, cos, sin, y)`: rows of y are those of x, rotated.

    dim: D, a power of two from 8 to 256. rotary: R; half_split turns the pairs (i, i + R / 2) of the first R values,
    else the pairs (2 i, 2 i + 1) of the last R turn. hadamard: then the Hadamard rotation. reverse: the transpose of
    all this, for gradients; the caller passes the same sin. x, y: [S, P, D]; cos, sin: fp32 [S, R / 2].
    """
    if problem := shape_problem(dim, rotary, half_split):
        raise ValueError(problem)
    lanes = dim // WIDTH
    rows = THREADS // lanes  # that a block rotates at a time
    first = 0 if half_split else dim - rotary
    half = rotary // 2
    far = half // WIDTH  # lanes between the halves of a pair
    stages = lanes.bit_length() - 1
    S, P = T.dynamic("S"), T.dynamic("P")

    @T.macro
    def turn(x, angles, column):
        """Rotary embedding of a thread's values; angles: their cosines, then their sines."""
        if half_split:
            for i in T.unroll(WIDTH):
                other = T.shfl_xor(x[i], far)
                if column < rotary:
                    x[i] = x[i] * angles[i] + other * angles[WIDTH + i]
        elif column >= first:
            for i in T.unroll(WIDTH // 2):
                a = x[2 * i]
                b = x[2 * i + 1]
                x[2 * i] = a * angles[i] - b * angles[WIDTH + i]
                x[2 * i + 1] = a * angles[WIDTH + i] + b * angles[i]

    @T.macro
    def read_angles(angles, position, column, cos, sin):
        """Of a thread's columns, with the sign that its values are multiplied by."""
        if half_split:
            if column < rotary:
                for i in T.vectorized(WIDTH):
                    angles[i] = cos[position, column % half + i]
                for i in T.vectorized(WIDTH):
                    angles[WIDTH + i] = sin[position, column % half + i]
            if (column < half) != reverse:
                for i in T.unroll(WIDTH):
                    angles[WIDTH + i] = -angles[WIDTH + i]
        else:
            if column >= first:
                for i in T.vectorized(WIDTH // 2):
                    angles[i] = cos[position, (column - first) // 2 + i]
                for i in T.vectorized(WIDTH // 2):
                    angles[WIDTH + i] = sin[position, (column - first) // 2 + i]
            if reverse:
                for i in T.unroll(WIDTH // 2):
                    angles[WIDTH + i] = -angles[WIDTH + i]

    @T.macro
    def mix(x, lane):
        """Hadamard rotation of a row: butterflies inside a thread, then between lanes."""
        for stage in T.unroll(3):
            for i in T.unroll(WIDTH):
                if i & (1 << stage) == 0:
                    a = x[i]
                    b = x[i | (1 << stage)]
                    x[i] = a + b
                    x[i | (1 << stage)] = a - b
        for stage in T.unroll(stages):
            for i in T.unroll(WIDTH):
                other = T.shfl_xor(x[i], 1 << stage)
                x[i] = T.if_then_else(lane & (1 << stage) == 0, x[i] + other, other - x[i])
        for i in T.unroll(WIDTH):
            x[i] = x[i] * T.float32(dim**-0.5)

    @T.macro
    def rounded(x):
        for i in T.unroll(WIDTH):
            x[i] = T.cast(T.cast(x[i], _BF16), _F32)

    @T.prim_func
    def rotate_rows_kernel(
        X: T.Tensor([S, P, dim], _BF16),
        Cos: T.Tensor([S, half], _F32),
        Sin: T.Tensor([S, half], _F32),
        Y: T.Tensor([S, P, dim], _BF16),
    ):
        with T.Kernel(S, T.ceildiv(P, ROWS * rows), threads=THREADS) as (position, by):
            tx = T.get_thread_binding()
            lane = tx % lanes
            raw = T.alloc_local([ROWS, WIDTH], _BF16)
            x = T.alloc_local([WIDTH], _F32)
            angles = T.alloc_local([2 * WIDTH], _F32)
            for r in T.unroll(ROWS):
                # Lanes past the last row read it again: a whole warp takes part in the exchanges.
                row = T.min((by * ROWS + r) * rows + tx // lanes, P - 1)
                for i in T.vectorized(WIDTH):
                    raw[r, i] = X[T.cast(position, "int64"), row, lane * WIDTH + i]
            read_angles(angles, position, lane * WIDTH, Cos, Sin)
            for r in T.unroll(ROWS):
                for i in T.unroll(WIDTH):
                    x[i] = T.cast(raw[r, i], _F32)
                if not reverse:
                    turn(x, angles, lane * WIDTH)
                if hadamard:
                    if not reverse:
                        rounded(x)
                    mix(x, lane)
                    if reverse:
                        rounded(x)
                if reverse:
                    turn(x, angles, lane * WIDTH)
                for i in T.unroll(WIDTH):
                    raw[r, i] = T.cast(x[i], _BF16)
                if (by * ROWS + r) * rows + tx // lanes < P:
                    for i in T.vectorized(WIDTH):
                        Y[T.cast(position, "int64"), (by * ROWS + r) * rows + tx // lanes, lane * WIDTH + i] = raw[r, i]

    return rotate_rows_kernel
