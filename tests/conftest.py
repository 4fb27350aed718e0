"""Skips, with the reason, tests marked `gpu` where there is no Hopper GPU, and those marked `slow` without --slow."""

import functools

import pytest


@functools.cache
def _no_hopper():
    """Why GPU tests cannot run here, or None."""
    import torch  # here: tests of the bare package need none

    if not torch.cuda.is_available():
        return "needs a Hopper GPU (sm_90): torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs a Hopper GPU (sm_90): this one has compute capability {capability[0]}.{capability[1]}"
    return None


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file to train on."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"line {n} of a small book: {n * n}, {n % 7}.\n" for n in range(600)))
    return path


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that compile or train for minutes")


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("takes minutes: runs with --slow")
    if item.get_closest_marker("gpu") and (reason := _no_hopper()):
        pytest.skip(reason)
