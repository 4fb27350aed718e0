"""Launch choices of the forward kernels: plain values, no torch, no TileLang.

S query rows, B batch, H index heads, G keys, K top-k. Every choice depends on H, K and a few classes of G alone, so
that new lengths build no new kernels.
"""

import itertools
import math
from dataclasses import dataclass

HEADS = (8, 16, 32, 64, 128)
"""Index head counts that the kernels accept; 16 and above run at full speed."""

DIMS = (32, 64, 128)
"""Index head dims that the kernels accept."""

TOPK_MAX = 4096
"""Largest top-k; the survivor list of the selection has to fit in shared memory."""

SCORE_COLUMNS = 256
"""(row, head) pairs of one item of the score kernel."""

WORKSPACE_BYTES = 256 * 2**20
"""Default bound of the scores that exist at one time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkPlan:
    """How the top-k kernel runs; see `topk.topk_select`."""

    mode: str
    threads: int
    words: int = 1
    cap: int
    blocks: int


def topk_plan(topk: int, keys: int) -> TopkPlan:
    """The plan for rows that see at most `keys` keys. H200 measurements chose the numbers."""
    if keys <= 2048 and topk <= 2048:
        return TopkPlan(mode="list", threads=256, cap=2048, blocks=4)
    room = max(512, 5 * topk // 2)  # survivors vary around 1.3 to 1.7 K
    if topk <= 1024:
        cap = -(-room // 256) * 256
        if keys <= 8192:
            return TopkPlan(mode="resident", threads=256, cap=cap, blocks=4)
        if keys <= 16384:
            return TopkPlan(mode="resident", threads=256, words=2, cap=cap, blocks=3)
        return TopkPlan(mode="stream", threads=256, cap=cap, blocks=4)
    cap = -(-room // 512) * 512
    return TopkPlan(mode="resident" if keys <= 16384 else "stream", threads=512, cap=cap, blocks=2)


def topk_plans(topk: int) -> tuple[TopkPlan, ...]:
    """Every plan that `topk_plan` can return for this K."""
    return tuple(dict.fromkeys(topk_plan(topk, keys) for keys in (2048, 8192, 16384, 1 << 20)))


def row_stride(keys: int) -> int:
    """Columns of a row in the workspace: whole 16-byte pieces."""
    return max(4, -(-keys // 4) * 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Consecutive ranges of query rows that share one workspace."""

    ranges: tuple[tuple[int, int], ...]
    stride: int
    workspace: int
    """fp32 elements."""


def plan_chunks(rows: int, batch: int, keys: int, heads: int, workspace_bytes: int, processors: int) -> Chunks:
    """Row ranges whose scores fit the workspace, at least one row each.

    All ranges but the first are whole rounds of the score kernel over the multiprocessors; the first takes the
    remainder, because under a causal rule its rows are the shortest.
    """
    stride = row_stride(keys)
    most = max(1, min(rows, workspace_bytes // (4 * batch * stride)))
    if most < rows:
        item = SCORE_COLUMNS // heads
        round_rows = item * (processors // math.gcd(processors, batch))
        for unit in (round_rows, item):
            if most >= unit:
                most -= most % unit
                break
    first = rows % most or most
    edges = [0, *range(first, rows + 1, most)]
    return Chunks(ranges=tuple(itertools.pairwise(edges)), stride=stride, workspace=batch * most * stride)
