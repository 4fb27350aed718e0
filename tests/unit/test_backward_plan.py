"""The backward kernels without a GPU: what is launched, in which workspace, and that every kernel compiles cleanly.

S query, B batch, H heads, D dim, G keys, K top-k.
"""

import itertools
import subprocess

import pytest
import torch

from nemo_v4_indexer.kernels import backward, runtime, tiling

MIB = 1 << 20


def plan(s, b, g, h=64, d=128, k=512, *, mib=256):
    return backward.plan_backward(s, b, g, h, d, k, True, mib * MIB)


def test_slots_hold_every_width_in_few_sizes():
    sizes = [backward.slot_capacity(k) for k in range(1, tiling.TOPK_MAX + 1)]
    assert all(size >= k and size % 64 == 0 for k, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 6


@pytest.mark.parametrize(
    "s, g, h, d, k, dense",
    [
        (4096, 1024, 64, 128, 512, True),
        (8192, 2048, 64, 128, 512, True),
        (12288, 3072, 64, 128, 512, False),
        (12288, 3072, 32, 128, 512, True),
        (12288, 12288, 64, 128, 2048, False),
        (8192, 8192, 64, 128, 2048, True),
        (8192, 2048, 64, 64, 512, False),
        (65536, 16384, 64, 128, 512, False),
        (512, 128, 64, 128, 512, False),
    ],
)
def test_way_follows_the_measured_table(s, g, h, d, k, dense):
    assert backward.prefers_dense(s, g, h, d, k, False) == dense
    assert not backward.prefers_dense(s, g, h, d, k, True)


@pytest.mark.parametrize("s, b", [(1, 1), (63, 3), (8192, 1), (8192, 4), (131072, 1), (131071, 2)])
@pytest.mark.parametrize("ratio, k, h", [(4, 512, 64), (4, 1, 128), (1, 2048, 64)])
def test_dense_chunks_stay_within_the_workspace(s, b, ratio, k, h):
    chosen = plan(s, b, max(1, s // ratio), h, k=k)
    assert 1 <= chosen.queries <= s
    assert 1 <= chosen.batches <= b
    assert chosen.workspace <= 256 * MIB
    assert chosen.items >= chosen.batches * -(-max(1, s // ratio) // backward.KEY_TILE)


def test_a_small_workspace_means_more_chunks():
    sizes = [plan(8192, 2, 2048, mib=mib) for mib in (1024, 256, 64, 40)]
    covered = [p.queries * p.batches for p in sizes]
    assert covered == sorted(covered, reverse=True)
    assert covered[0] == 2 * 8192
    assert covered[-1] < 8192
    assert plan(8192, 1, 2048, mib=1).queries == 64  # the least there is


def test_chunks_are_even():
    """The last chunk is not a sliver: the kernels' launches would outweigh it."""
    chosen = plan(70000, 1, 17500)
    assert chosen.queries < 70000
    assert 70000 % chosen.queries == 0 or 70000 % chosen.queries > chosen.queries // 2


@pytest.mark.parametrize("n", [1, 2, 3, 64, 1000, 4097, 131072])
def test_every_query_has_its_block(n):
    step = backward.spread(n)
    assert len({i * step % n for i in range(n)}) == n


def random_selection(generator, rows, k, groups):
    indices = torch.randint(-3, groups + 5, (2, rows, k), generator=generator, dtype=torch.int32)
    indices[:, :, 1::3] = indices[:, :, ::3][..., : indices[:, :, 1::3].shape[-1]]  # duplicates
    return indices, torch.randn(2, rows, k, generator=generator)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("k", [1, 2, 9, 50])
def test_order_selection_keeps_every_gradient(k, merge):
    indices, grad = random_selection(torch.Generator().manual_seed(k), 13, k, 20)
    grad[(indices < 0) | (indices >= 20)] = float("nan")
    ordered, moved = backward.order_selection(indices, grad, 20, merge=merge, workspace_bytes=3000)
    assert ordered.dtype == torch.int32
    last = ordered.masked_fill(ordered < 0, 99)
    assert (last.diff(dim=-1) >= 0).all()
    assert (moved[ordered < 0] == 0).all()
    if merge:  # one of equal indices carries all
        equal = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        assert (moved[..., 1:][equal] == 0).all()

    def by_key(index, value):
        valid = (index >= 0) & (index < 20)
        return torch.zeros(2, 13, 20).scatter_add_(
            -1, index.masked_fill(~valid, 0).long(), value.masked_fill(~valid, 0)
        )

    want = by_key(indices, grad)
    torch.testing.assert_close(by_key(ordered, moved), want)
    assert want.abs().max() > 0


def test_order_selection_takes_an_expanded_gradient():
    indices, _ = random_selection(torch.Generator().manual_seed(1), 5, 8, 20)
    grad = torch.full((), 2.0).expand(indices.shape)
    ordered, moved = backward.order_selection(indices, grad, 20, merge=False, workspace_bytes=MIB)
    assert (moved[ordered >= 0] == 2).all()


@pytest.mark.parametrize("s, b, g, k", [(0, 2, 5, 4), (6, 0, 5, 4), (6, 2, 0, 4), (6, 2, 5, 0)])
def test_empty_problems_need_no_kernel(s, b, g, k):
    q, keys = torch.ones(s, b, 8, 32, dtype=torch.bfloat16), torch.ones(g, b, 32, dtype=torch.bfloat16)
    grads = backward.backward(
        q, keys, torch.ones(s, b, 8), torch.full((b, s, k), -1, dtype=torch.int32), torch.ones(b, s, k)
    )
    assert [tuple(x.shape) for x in grads] == [(s, b, 8, 32), (g, b, 32), (s, b, 8)]
    assert all(x.count_nonzero() == 0 for x in grads)


PRODUCTION = [
    ("sparse", 512, 64, 128, False),
    ("sparse", 2048, 64, 128, True),
    ("query_side", 512, 64, 128),
    ("key_side", 64, 128, False),
    ("key_side", 64, 128, True),
    ("plan",),
    ("reduce", 128),
]
SHAPES = list(itertools.product(tiling.HEADS, tiling.DIMS))
OTHERS = [
    *(("sparse", 512, h, d, precise) for h, d in SHAPES for precise in (False, True)),
    *(("sparse", slots, 64, 128, precise) for slots in (128, 256, 1024, 2048, 4096) for precise in (False, True)),
    *(("query_side", 512, h, d) for h, d in SHAPES),
    *(("query_side", slots, 64, 128) for slots in (128, 256, 1024, 2048, 4096)),
    *(("key_side", h, d, precise) for h, d in SHAPES for precise in (False, True)),
    *(("reduce", d) for d in (32, 64)),
]


@pytest.mark.parametrize(
    "name",
    [*PRODUCTION, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS if n not in PRODUCTION)],
    ids=lambda name: "-".join(map(str, name)),
)
def test_kernel_compiles_cleanly(name, tmp_path):
    """No register spills, and no wgmma that ptxas serialises (its C75xx remarks)."""
    if runtime.find_nvcc() is None:
        pytest.skip("nvcc was not found")
    if problem := runtime.tilelang_problem():
        pytest.skip(problem)
    from tilelang.env import env

    from nemo_v4_indexer.kernels import bwd_common

    configs = {key.value: value for key, value in bwd_common.PASS_CONFIGS.items()}
    source = tmp_path / "kernel.cu"
    source.write_text(runtime.emit_cuda(backward.program(*name), configs))
    flags = ["-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3", "-w", "-Xptxas=-v"]
    includes = [f"-I{env.TILELANG_TEMPLATE_PATH}", f"-I{env.CUTLASS_INCLUDE_DIR}"]
    command = [
        runtime.find_nvcc(),
        *flags,
        *includes,
        "-DENABLE_BF16",
        "-o",
        str(tmp_path / "kernel.cubin"),
        str(source),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    report = result.stdout + result.stderr
    assert result.returncode == 0, report
    assert "registers" in report  # the resource report is there at all
    assert "C75" not in report, report
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
