"""What the emulated tests share: a build folder of this run, and a skip that says why nothing can be emulated."""

import contextlib

import emulate
import pytest
import torch


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory):
    """Folder for compiled kernels; skips, with the reason, where g++ or TileLang is missing."""
    if reason := emulate.unavailable():
        pytest.skip(f"kernels cannot be emulated here: {reason}")
    return tmp_path_factory.mktemp("emulated_kernels")


@pytest.fixture(scope="session")
def emulated(build_folder):
    """Stands in for `runtime.compile_kernel`: (prim_func, pass_configs) -> callable on CPU tensors.

    A program is built once, whoever asks for it.
    """
    known = {}

    def build(prim_func, pass_configs=None):
        key = prim_func.script(show_meta=True), repr(sorted((str(k), v) for k, v in (pass_configs or {}).items()))
        if key not in known:
            known[key] = emulate.EmulatedKernel(prim_func, pass_configs, build_folder)
        return known[key]

    return build


@pytest.fixture(params=emulate.SCHEDULES, ids=lambda s: f"{s.order}-{s.timing}")
def schedule(request):
    """Each order of threads and timing of asynchronous work in turn."""
    with emulate.scheduled(request.param):
        yield request.param


@pytest.fixture(scope="module")
def product(emulated):
    """The package's launch functions on CPU tensors: kernels are emulated, fresh memory is filled with NaN.

    Three multiprocessors, so that a persistent block of threads gets several items. Built kernels live as long as the
    test module.
    """
    from nemo_v4_indexer.kernels import backward, forward, runtime

    caches = (forward.score_kernel, forward.topk_kernel, backward.kernel, backward.plan_backward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "compile_kernel", emulated)
        patch.setattr(forward, "_processors", lambda index: 3)
        patch.setattr(backward, "SMS", 3)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        torch.use_deterministic_algorithms(True)
        for cache in caches:
            cache.cache_clear()
        yield
        for cache in caches:
            cache.cache_clear()
        torch.use_deterministic_algorithms(False)
