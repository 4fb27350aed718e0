"""Bad arguments of the operation: every error names the argument, what was given and what was expected."""

import re

import pytest
import torch

from nemo_v4_indexer import checks
from nemo_v4_indexer.ops.indexer import Options, v4_lighting_indexer, v4_lighting_indexer_sample

S, B, H, D, G, K = 8, 2, 3, 4, 2, 5


def call(**changes):
    arguments = {
        "index_q": torch.zeros(S, B, H, D),
        "index_k": torch.zeros(G, B, D),
        "weights": torch.zeros(S, B, H),
        "compress_ratio": 4,
        "topk": K,
    }
    return v4_lighting_indexer(**arguments | changes)


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


CASES = [
    ({"index_q": None}, TypeError, "index_q must be a torch.Tensor, got NoneType"),
    ({"index_k": [1.0]}, TypeError, "index_k must be a torch.Tensor, got list"),
    (
        {"index_q": torch.zeros(S, H, D)},
        ValueError,
        "index_q must be [any, any, any, any], got (8, 3, 4) torch.float32",
    ),
    ({"index_k": torch.zeros(G, B, D + 1)}, ValueError, "index_k must be [any, 2, 4], got (2, 2, 5) torch.float32"),
    ({"index_k": torch.zeros(G, B + 1, D)}, ValueError, "index_k must be [any, 2, 4], got (2, 3, 4)"),
    ({"weights": torch.zeros(S, B, H + 1)}, ValueError, "weights must be [8, 2, 3], got (8, 2, 4)"),
    ({"weights": torch.zeros(S, H, B)}, ValueError, "weights must be [8, 2, 3], got (8, 3, 2)"),
    ({"index_q": ints(S, B, H, D)}, TypeError, "index_q must be one of torch.bfloat16"),
    ({"weights": torch.zeros(S, B, H).to(torch.complex64)}, TypeError, "got torch.complex64"),
    (
        {"index_k": torch.zeros(G, B, D, dtype=torch.bfloat16)},
        TypeError,
        "index_q and index_k must share a dtype, got torch.float32 and torch.bfloat16",
    ),
    ({"index_k": torch.zeros(G, B, D, device="meta")}, ValueError, "must be on one device, got ['cpu', 'meta']"),
    ({"compress_ratio": 0}, ValueError, "compress_ratio must be at least 1, got 0"),
    ({"compress_ratio": 4.0}, TypeError, "compress_ratio must be an int, got float 4.0"),
    ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
    ({"topk": -1}, ValueError, "topk must be at least 1, got -1"),
    ({"topk": True}, TypeError, "topk must be an int, got bool True"),
    ({"topk": "5"}, TypeError, "topk must be an int, got str '5'"),
    ({"topk_indices": ints(B, S)}, ValueError, "topk_indices must be [2, 8, any], got (2, 8)"),
    ({"topk_indices": ints(S, B, K)}, ValueError, "topk_indices must be [2, 8, any], got (8, 2, 5)"),
    ({"topk_indices": torch.zeros(B, S, K)}, TypeError, "topk_indices must be one of torch.int32, torch.int64"),
    ({"cu_seqlen_ks": ints(S)}, ValueError, "cu_seqlen_ks and cu_seqlen_ke must be given together"),
    ({"cu_seqlen_ke": ints(S)}, ValueError, "cu_seqlen_ks and cu_seqlen_ke must be given together"),
    ({"cu_seqlen_ks": ints(S), "cu_seqlen_ke": ints(S + 1)}, ValueError, "cu_seqlen_ke must be [8], got (9,)"),
    ({"cu_seqlen_ks": ints(S, B), "cu_seqlen_ke": ints(S)}, ValueError, "cu_seqlen_ks must be [2, 8], got (8, 2)"),
    ({"cu_seqlen_ks": ints(S), "cu_seqlen_ke": torch.zeros(S)}, TypeError, "cu_seqlen_ke must be one of torch.int32"),
    ({"cu_seqlen_ks": 0, "cu_seqlen_ke": 1}, TypeError, "cu_seqlen_ks must be a torch.Tensor, got int"),
    ({"backend": "triton"}, ValueError, "backend must be one of auto, tilelang, reference, got 'triton'"),
    ({"workspace_mib": 0}, ValueError, "workspace_mib must be at least 1, got 0"),
    ({"workspace_mib": 1.5}, TypeError, "workspace_mib must be an int, got float 1.5"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), CASES)
def test_errors_name_what_was_given_and_expected(changes, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call(**changes)


def test_the_unchanged_call_passes():
    scores, indices = call(topk_indices=ints(B, S, K, dtype=torch.int64), cu_seqlen_ks=ints(S), cu_seqlen_ke=ints(B, S))
    assert scores.shape == indices.shape == (B, S, K)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(S, 1, H, D)}, "q must be [any, any, any], got (8, 1, 3, 4)"),
        ({"k": torch.zeros(G, D + 1)}, "k must be [any, 4], got (2, 5)"),
        ({"weights": torch.zeros(H, S)}, "weights must be [8, 3], got (3, 8)"),
        ({"topk_indices": ints(S + 1, K)}, "topk_indices must be [8, any], got (9, 5)"),
        ({"cu_seqlen_ks": ints(S - 1)}, "cu_seqlen_ks must be [8], got (7,)"),
    ],
)
def test_the_per_sample_interface_speaks_of_its_own_shapes(changes, message):
    arguments = {
        "q": torch.zeros(S, H, D),
        "k": torch.zeros(G, D),
        "weights": torch.zeros(S, H),
        "cu_seqlen_ks": ints(S),
        "cu_seqlen_ke": ints(S),
        "topk": K,
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        v4_lighting_indexer_sample(**arguments | changes)


def test_options_are_checked_and_frozen():
    with pytest.raises(AttributeError):
        Options().backend = "reference"
    with pytest.raises(TypeError, match="workspace_mib must be an int, got bool True"):
        Options(workspace_mib=True)


def test_checks_read_no_values():
    """Tensors without storage pass: a check that looked at values would synchronise with a GPU."""
    q, k, w = (torch.empty(shape, device="meta") for shape in ((S, B, H, D), (G, B, D), (S, B, H)))
    checks.check_indexer_inputs(q, k, w)
    limits = torch.empty(S, dtype=torch.int32, device="meta")
    checks.check_limits(limits, limits, B, S, limits.device)
    checks.check_indices("topk_indices", torch.empty(B, S, K, dtype=torch.int32, device="meta"), B, S, limits.device)


def test_selections_and_limits_are_on_the_device_of_q():
    q, k, w = torch.randn(4, 1, 2, 8), torch.randn(4, 1, 8), torch.randn(4, 1, 2)
    away = torch.zeros(4, dtype=torch.int32, device="meta")
    here = away.new_zeros(4, device="cpu")
    for options in (
        dict(topk_indices=away.view(1, 4, 1)),
        dict(cu_seqlen_ks=away, cu_seqlen_ke=here),
        dict(cu_seqlen_ks=here, cu_seqlen_ke=away),
    ):
        with pytest.raises(ValueError, match="on the device of index_q, cpu, got meta"):
            v4_lighting_indexer(q, k, w, 1, 1, **options)


def test_one_sample_needs_its_limits():
    with pytest.raises(ValueError, match="must be given together"):
        v4_lighting_indexer_sample(torch.randn(4, 2, 8), torch.randn(4, 8), torch.randn(4, 2), None, None, 1)
