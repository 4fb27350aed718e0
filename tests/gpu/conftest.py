"""On a Hopper GPU these tests must run: a missing TileLang fails them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _runnable():
    if torch.cuda.is_available():
        from nemo_v4_indexer.kernels import runtime

        assert runtime.support(torch.device("cuda"), torch.bfloat16, 64, 128, 512) is None
