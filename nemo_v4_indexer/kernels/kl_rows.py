"""The distillation loss of one selection per row, and its gradient, in one pass (TileLang program, Hopper).

R rows, K slots of a row.

    p = mass / sum mass,  kl = sum p (log p - log_softmax(scores)),  gradient = scale (softmax(scores) - p)

over the slots whose index is not -1; a row without mass has no loss and no gradient. See `ops.loss`.
"""

import tilelang
import tilelang.language as T

THREADS = 128
_WARPS = THREADS // 32
_F32 = "float32"
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # barriers are written out below
    tilelang.PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True,
}


@T.macro
def _over_warps(x, part, first, lane, warp):
    """Leave every warp's x in part[first + warp]; one barrier."""
    if lane == 0:
        part[first + warp] = x
    T.sync_threads()


@T.macro
def _block_sum(x, part, first, lane, warp):
    _over_warps(T.warp_reduce_sum(x), part, first, lane, warp)
    return (part[first] + part[first + 1]) + (part[first + 2] + part[first + 3])


@T.macro
def _block_max(x, part, first, lane, warp):
    _over_warps(T.warp_reduce_max(x), part, first, lane, warp)
    return T.max(T.max(part[first], part[first + 1]), T.max(part[first + 2], part[first + 3]))


def kl_rows(slots: int):
    """Program `(scores, indices, mass, scale, gradient, kl, uniform)`, one block per row.

    slots: capacity, a multiple of THREADS, at least K. scores, mass: fp32 [R, K]; indices: int32 [R, K]; scale: fp32
    [1]. gradient: fp32 [R, K], 0 in empty slots. kl, uniform: fp32 [R], of the indexer and of one with equal scores.
    """
    R, K = T.dynamic("R"), T.dynamic("K")
    per_thread = slots // THREADS

    @T.prim_func
    def indexer_kl_rows(
        Scores: T.Tensor([R, K], _F32),
        Indices: T.Tensor([R, K], "int32"),
        Mass: T.Tensor([R, K], _F32),
        Scale: T.Tensor([1], _F32),
        Gradient: T.Tensor([R, K], _F32),
        Kl: T.Tensor([R], _F32),
        Uniform: T.Tensor([R], _F32),
    ):
        with T.Kernel(R, threads=THREADS) as row:
            tx = T.get_thread_binding()
            lane, warp = tx & 31, tx >> 5
            peaks = T.alloc_shared([_WARPS], _F32)
            sums = T.alloc_shared([5 * _WARPS], _F32)  # one place per sum: no barrier between them
            score = T.alloc_local([per_thread], _F32)
            p = T.alloc_local([per_thread], _F32)
            weight = T.alloc_local([per_thread], _F32)
            best = T.alloc_var(_F32, init=-T.infinity("float32"))
            total = T.alloc_var(_F32, init=0.0)
            used = T.alloc_var(_F32, init=0.0)
            sum_weights = T.alloc_var(_F32, init=0.0)
            entropy = T.alloc_var(_F32, init=0.0)
            cross = T.alloc_var(_F32, init=0.0)
            for j in T.unroll(per_thread):
                i = j * THREADS + tx
                score[j] = -T.infinity("float32")
                p[j] = 0.0
                weight[j] = 0.0
                if i < K:  # noqa: SIM102 - the index is read only inside
                    if Indices[row, i] >= 0:
                        score[j] = Scores[row, i]
                        p[j] = Mass[row, i]
                        weight[j] = 1.0
                best = T.max(best, score[j])
                total = total + p[j]
                used = used + weight[j]
            best = _block_max(best, peaks, 0, lane, warp)
            total = _block_sum(total, sums, 0, lane, warp)
            used = _block_sum(used, sums, _WARPS, lane, warp)
            for j in T.unroll(per_thread):
                if weight[j] > 0:
                    weight[j] = T.exp(score[j] - best)
                sum_weights = sum_weights + weight[j]
            sum_weights = _block_sum(sum_weights, sums, 2 * _WARPS, lane, warp)
            for j in T.unroll(per_thread):
                if total > 0:
                    p[j] = p[j] / total
                    if p[j] > 0:
                        entropy = entropy + p[j] * T.log(p[j])
                        cross = cross + p[j] * (score[j] - best - T.log(sum_weights))
            entropy = _block_sum(entropy, sums, 3 * _WARPS, lane, warp)
            cross = _block_sum(cross, sums, 4 * _WARPS, lane, warp)
            for j in T.unroll(per_thread):
                i = j * THREADS + tx
                if i < K:
                    if total > 0:
                        Gradient[row, i] = Scale[0] * (weight[j] / sum_weights - p[j])
                    else:
                        Gradient[row, i] = 0.0
            if tx == 0:
                if total > 0:
                    Kl[row] = entropy - cross
                    Uniform[row] = entropy + T.log(used)
                else:
                    Kl[row] = 0.0
                    Uniform[row] = 0.0

    return indexer_kl_rows
