"""The emulator itself: products in every operand layout, and planted faults that it has to catch.

A fault counts as caught when the run raises, or when its numbers are wrong under a schedule named by the test.
"""

import dataclasses
import re

import emulate
import pytest
import torch
from emulate import CudaModule, EmulationError, EmulatorGap, Schedule, scheduled
from host_program import Data, HostError, LaunchRequest

LATE = Schedule("forward", "late")
EARLY = Schedule("reverse", "early", poison=0xFF)
RANDOM = Schedule("random", "random", seed=3)

TILES, STAGES, N, D = 5, 2, 32, 64


def pipelined_product():
    """prim_func: C[64 n + i, j] = K[64 n + i] . Q[j], a warp that copies and a warpgroup that multiplies."""
    import tilelang.language as T

    @T.prim_func
    def pipelined(
        K: T.Tensor([TILES * 64, D], "bfloat16"),
        Q: T.Tensor([N, D], "bfloat16"),
        C: T.Tensor([TILES * 64, N], "float32"),
    ):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            qs = T.alloc_shared([N, D], "bfloat16")
            ks = T.alloc_shared([STAGES, 64, D], "bfloat16")
            cs = T.alloc_shared([64, N], "float32")
            c = T.alloc_fragment([64, N], "float32")
            ready = T.alloc_barrier(128)
            full = T.alloc_barrier([128] * STAGES)
            empty = T.alloc_barrier([128] * STAGES)
            if tx >= 128:
                T.tma_copy(Q, qs, barrier=ready)
                T.barrier_arrive(ready)
                for n in T.serial(TILES):
                    T.barrier_wait(empty[n % STAGES], ((n // STAGES) & 1) ^ 1)
                    T.tma_copy(K[n * 64 : (n + 1) * 64, :], ks[n % STAGES, :, :], barrier=full[n % STAGES])
                    T.barrier_arrive(full[n % STAGES])
            else:
                T.barrier_wait(ready, 0)
                for n in T.serial(TILES):
                    T.barrier_wait(full[n % STAGES], (n // STAGES) & 1)
                    T.wgmma_gemm(
                        ks[n % STAGES, :, :], qs, c, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow
                    )
                    T.wait_wgmma(0)
                    T.barrier_arrive(empty[n % STAGES])
                    T.sync_threads(1, 128)  # the store of the last tile has left cs
                    T.copy(c, cs)
                    T.fence_proxy_async()
                    T.sync_threads(1, 128)
                    T.copy(cs, C[n * 64 : (n + 1) * 64, :])

    return pipelined


def pass_configs():
    from tilelang import PassConfigKey as Key

    off = (
        Key.TL_DISABLE_THREAD_STORAGE_SYNC,
        Key.TL_DISABLE_SAFE_MEMORY_ACCESS,
        Key.TL_DISABLE_SHARED_MEMORY_REUSE,
        Key.TL_DISABLE_WARP_SPECIALIZED,
    )
    return dict.fromkeys(off, True)


@pytest.fixture(scope="module")
def pipelined(emulated):
    return emulated(pipelined_product(), pass_configs())


def operands():
    g = torch.Generator().manual_seed(0)
    return torch.randn(TILES * 64, D, generator=g).bfloat16(), torch.randn(N, D, generator=g).bfloat16()


def is_right(run, schedule):
    """run(schedule, K, Q, C) fills C."""
    k, q = operands()
    c = emulate.poisoned(TILES * 64, N)
    run(schedule, k, q, c)
    return torch.allclose(c, k.float() @ q.float().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", [LATE, EARLY, RANDOM], ids=lambda s: s.timing)
def test_pipeline_is_right(pipelined, schedule):
    def run(schedule, *tensors):
        with scheduled(schedule):
            pipelined(*tensors)

    assert is_right(run, schedule)


def replaced(pattern, replacement, *, count=1):
    def change(source):
        changed, found = re.subn(pattern, replacement, source, count=count)
        assert found == count, f"nothing to change for {pattern}"
        return changed

    return change


FAULTS = {
    # name: (change of the emitted text, schedules that must show it, what the error says, if it must raise)
    "no wait for the copy": (replaced(r"full\[[^;]*\]\.wait\([^;]*;", ""), [LATE], None),
    "no wait for the queries": (replaced(r"ready\[0\]\.wait\(0\);", ""), [LATE], None),
    "no wait for the readers": (replaced(r"empty\[[^;]*\]\.wait\([^;]*;", ""), [EARLY, RANDOM], None),
    "no wait for the product": (replaced(r"tl::wait_wgmma<0>\(\);", ""), [LATE], None),
    "wrong phase of full": (replaced(r"(full\[[^;]*\]\.wait\()", r"\g<1>1 ^ "), [LATE], None),
    "wrong phase of empty": (replaced(r"(empty\[[^;]*\]\.wait\()", r"\g<1>1 ^ "), [LATE], "deadlock"),
    "too few bytes announced": (
        replaced(r"expect_transaction\(8192\)", "expect_transaction(8176)"),
        [LATE],
        "deadlock",
    ),
    "too many bytes announced": (
        replaced(r"expect_transaction\(8192\)", "expect_transaction(8208)"),
        [LATE],
        "deadlock",
    ),
    "barrier for one thread less": (replaced(r"empty\[0\]\.init\(128\)", "empty[0].init(127)"), [LATE, EARLY], None),
    "barrier for one thread more": (replaced(r"empty\[0\]\.init\(128\)", "empty[0].init(129)"), [LATE], "deadlock"),
    "barrier without init": (replaced(r"empty\[0\]\.init\(128\);", ""), [LATE], "before init"),
    "store not waited for": (replaced(r"tl::tma_store_wait<0, true>\(\);", ""), [LATE], "bulk store"),
    "half a named barrier": (
        replaced(r"tl::__sync_thread_partial\(1, 128\)", "if (threadIdx.x < 64) tl::__sync_thread_partial(1, 128)"),
        [LATE],
        "deadlock|twice|part",
    ),
    "no barrier before the store": (
        replaced(r"tl::__sync_thread_partial\(1, 128\);(?=\s*if \(tl::tl_shuffle_elect)", ""),
        [EARLY, Schedule("forward", "early")],
        None,
    ),
    "accumulator not fenced": (replaced(r"tl::warpgroup_arrive\(\);", ""), [LATE], "warpgroup_arrive"),
    "wrong tile of the operand": (replaced(r"tl::increase_descriptor_offset<int>\(desc_a[^;]*;", ""), [LATE], None),
    "operand beyond shared memory": (
        replaced(
            r"tl::increase_descriptor_offset<int>\(desc_a([^,]*),",
            r"tl::increase_descriptor_offset<int>(desc_a\1, 65536 +",
        ),
        [LATE],
        "wgmma reads shared byte",
    ),
}


@pytest.fixture(scope="module")
def faulty(pipelined, build_folder):
    """name -> run(schedule, K, Q, C) of the program with that fault; one compilation for all."""
    names = {name: f"fault_{i}" for i, name in enumerate(FAULTS)}
    texts = [FAULTS[name][0](pipelined.source).replace("pipelined_kernel", new) for name, new in names.items()]
    module = CudaModule("\n".join(texts), build_folder, disjoint_arrays=True)

    def make(kernel):
        def run(schedule, *tensors):
            (request,) = pipelined.launches(*tensors)
            module.launch(dataclasses.replace(request, kernel=kernel), schedule)

        return run

    return {name: make(kernel) for name, kernel in names.items()}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(faulty, name):
    _, schedules, message = FAULTS[name]
    for schedule in schedules:
        try:
            caught = not is_right(faulty[name], schedule)
            assert message is None, "an error was due"
        except EmulationError as error:
            caught = True
            assert message is None or re.search(message, str(error)), str(error)
        assert caught, f"unnoticed under {schedule}"


def test_deadlock_report_names_the_barrier(faulty):
    with pytest.raises(EmulationError) as error:
        is_right(faulty["wrong phase of empty"], LATE)
    text = str(error.value)
    assert "threads 0-127: wait for mbarrier full[0], parity 0" in text
    assert "threads 128-255: wait for mbarrier empty[0], parity 0" in text


BODIES = {
    # name: (body, what the error says; None: must succeed)
    "fine": (
        "((float*)a)[threadIdx.x] = X[threadIdx.x]; __syncthreads(); X[threadIdx.x] = ((float*)a)[63 - threadIdx.x];",
        None,
    ),
    "shared_index": ("((float*)a)[threadIdx.x + 1] = 0;", r"a\[64\] is outside its 64 elements"),
    "shared_negative": ("X[0] = ((float*)b)[-1];", r"b\[-1\] is outside"),
    "shared_vector": ("*(float4*)(((float*)a) + 61) = make_float4(0, 0, 0, 0);", "a.*outside|vector access"),
    "misaligned_vector": ("*(float2*)(((float*)a) + 1) = make_float2(0, 0);", "multiple of 8"),
    "global_index": ("X[threadIdx.x + 37] = 1;", r"X\[100\] is outside its 100 elements"),
    "local_index": ("float r[4]; int i = (int)X[0] + threadIdx.x; r[i] = 1; X[1] = r[i & 3];", "local array"),
    "shared_atomic": ("AtomicAdd((&(((int*)a)[threadIdx.x & 3])), 1); __syncthreads(); X[0] = ((int*)a)[0] > 0;", None),
    "wrong_atomic": ("AtomicOr((&(((int*)a)[0])), 1);", "global memory only"),
    "atomic_address": ("AtomicAdd((&(X[200])), 1.0f);", "in no tensor"),
    "copy_waited": (
        "tl::cp_async_gs<16>((&(((float*)a)[threadIdx.x % 16 * 4])), (&(X[threadIdx.x % 16 * 4])));"
        "tl::cp_async_commit(); tl::cp_async_wait<0>(); __syncthreads();"
        "if (((float*)a)[threadIdx.x] != X[threadIdx.x]) X[1000] = 0;",
        None,
    ),
    "copy_not_waited": (
        "tl::cp_async_gs<16>((&(((float*)a)[threadIdx.x % 16 * 4])), (&(X[threadIdx.x % 16 * 4])));"
        "tl::cp_async_commit(); tl::cp_async_wait<1>(); __syncthreads();"
        "if (((float*)a)[threadIdx.x] != X[threadIdx.x]) X[1000] = 0;",
        r"X\[1000\]",
    ),
    "copy_source": ("tl::cp_async_gs<16>((&(((float*)a)[0])), (&(X[100])));", "cp.async source"),
    "copy_not_read": ("tl::cp_async_gs_conditional<16>((&(((float*)a)[0])), (&(X[100])), false);", None),
    "copy_misaligned": ("tl::cp_async_gs<16>((&(((float*)a)[1])), (&(X[0])));", "multiple of 16"),
    "divergent_warp": (
        "if (threadIdx.x & 1) __shfl_xor_sync(~0u, 1, 1); else __ballot_sync(~0u, 1);",
        "different operations",
    ),
    "missing_lane": ("if (threadIdx.x != 5) { __syncwarp(); } else { __syncthreads(); }", "deadlock"),
    "half_block": ("if (threadIdx.x < 32) tl::__sync_thread_partial(3, 64);", "named barrier 3 .32 of 64"),
    "endless_loop": ("while (X[0] == 0) { }", "does not end|still running"),
    "endless_switching": ("while (X[0] == 0) { __syncthreads(); }", "still running"),
    "division": ("int zero = (int)X[0]; X[1] = 5 / zero;", "division by zero"),
    "shuffles": (
        "int v = threadIdx.x % 32, ok = __shfl_up_sync(~0u, v, 1) == (v ? v - 1 : 0);"
        "ok &= __shfl_down_sync(~0u, v, 2) == (v < 30 ? v + 2 : v); ok &= __shfl_xor_sync(~0u, v, 5) == (v ^ 5);"
        "ok &= __shfl_sync(~0u, v, 7) == 7; ok &= __shfl_down_sync(~0u, v, 1, 8) == (v % 8 < 7 ? v + 1 : v);"
        "ok &= tl::warp_reduce_sum(v) == 496; ok &= __ballot_sync(~0u, v < 3) == 7u;"
        "ok &= __syncthreads_count(threadIdx.x < 40) == 40;"
        "ok &= tl::AllReduce<tl::SumOp, 4, 1>::run(v) == v / 4 * 16 + 6;"
        "if (!ok) X[1000] = 0;",
        None,
    ),
}


@pytest.fixture(scope="module")
def snippets(build_folder):
    shared = "extern __shared__ __align__(1024) uchar buf_dyn_shmem[];" + "".join(
        f" void* {name} = ((void*)((char*)buf_dyn_shmem + {offset}));" for name, offset in (("a", 0), ("b", 256))
    )
    source = "\n".join(
        f'extern "C" __global__ void {name}(float* __restrict__ X, int n) {{ {shared} {body} }}'
        for name, (body, _) in BODIES.items()
    )
    return CudaModule(source, build_folder, disjoint_arrays=True)


@pytest.mark.parametrize("name", BODIES)
def test_small_kernels(snippets, name):
    _, message = BODIES[name]
    x = torch.zeros(100) if "endless" in name or name in ("division", "local_index") else torch.rand(100) + 1
    before = x.clone()
    request = LaunchRequest(name, [Data(x, "X"), 100], block=[64, 1, 1], shared_bytes=512)
    schedule = Schedule(time_limit=1)
    if message is None:
        snippets.launch(request, schedule)
        if name == "fine":
            assert torch.equal(x[:64], before[:64].flip(0))
        return
    with pytest.raises(EmulationError, match=message) as error:
        snippets.launch(request, schedule)
    assert f"{name}, block (0, 0, 0)" in str(error.value)
    snippets.launch(LaunchRequest("fine", [Data(x, "X"), 100], block=[64, 1, 1], shared_bytes=512), schedule)


def gemm(m, n, k, transpose_a, transpose_b, a_in_registers):
    """prim_func: C = A B with either operand stored transposed, A from shared memory or registers."""
    import tilelang.language as T

    a_shape, b_shape = ([k, m] if transpose_a else [m, k]), ([n, k] if transpose_b else [k, n])

    @T.prim_func
    def gemm_kernel(A: T.Tensor(a_shape, "bfloat16"), B: T.Tensor(b_shape, "bfloat16"), C: T.Tensor([m, n], "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared(a_shape, "bfloat16")
            b = T.alloc_shared(b_shape, "bfloat16")
            r = T.alloc_fragment(a_shape, "bfloat16")
            c = T.alloc_fragment([m, n], "float32")
            T.copy(A, a)
            T.copy(B, b)
            if a_in_registers:
                T.copy(a, r)
                T.gemm(r, b, c, transpose_A=transpose_a, transpose_B=transpose_b, clear_accum=True)
            else:
                T.gemm(a, b, c, transpose_A=transpose_a, transpose_B=transpose_b, clear_accum=True)
            T.copy(c, C)

    return gemm_kernel


GEMMS = {
    # Widths of 16, 32 and 64 elements give swizzles of 32, 64 and 128 bytes.
    "rows of k, 32-byte swizzle": (64, 32, 16, False, True, False),
    "rows of k, 64-byte swizzle": (64, 64, 32, False, True, False),
    "rows of k, N 256": (64, 256, 64, False, True, False),
    "columns of k, 128-byte swizzle": (64, 128, 64, True, False, False),
    "columns of k, narrow": (128, 32, 32, True, False, False),
    "A in registers": (64, 64, 64, False, False, True),
}


@pytest.fixture(scope="module")
def gemms(emulated):
    return {name: emulated(gemm(*arguments), {}) for name, arguments in GEMMS.items()}


@pytest.mark.parametrize("schedule", [LATE, EARLY], ids=lambda s: s.timing)
@pytest.mark.parametrize("name", GEMMS)
def test_operand_layouts(gemms, name, schedule):
    m, n, k, transpose_a, transpose_b, _ = GEMMS[name]
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(m, k, generator=g).bfloat16(), torch.randn(k, n, generator=g).bfloat16()
    stored = (a.T.contiguous() if transpose_a else a), (b.T.contiguous() if transpose_b else b)
    c = emulate.poisoned(m, n)
    with scheduled(schedule):
        gemms[name](*stored, c)
    assert gemms[name].source.count("wgmma_rs" if name == "A in registers" else "wgmma_ss")
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-4)


def test_host_checks_are_kept(pipelined):
    """What the compiled host function refuses, the emulated one refuses too."""
    k, q = operands()
    c = emulate.poisoned(TILES * 64, N)
    with pytest.raises(HostError, match="dtype"):
        pipelined(k.float(), q, c)
    with pytest.raises(HostError, match="shape"):
        pipelined(k[:64], q, c)
    with pytest.raises(HostError, match="strides"):
        pipelined(torch.cat([k, k], 1)[:, :D], q, c)
    storage = emulate.poisoned(N * D + 1, dtype=torch.bfloat16)
    with pytest.raises(HostError, match="multiple of 16"):
        pipelined(k, storage[1:].view(N, D), c)


def test_unknown_names_are_reported(build_folder):
    module = CudaModule(
        'extern "C" __global__ void k(float* __restrict__ X) { tl::no_such_thing(X); }',
        build_folder,
        disjoint_arrays=True,
    )
    with pytest.raises(EmulatorGap, match="no_such_thing"):
        module.launch(LaunchRequest("k", [Data(torch.zeros(1), "X")]), LATE)
