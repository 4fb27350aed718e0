"""What an indexer scores and moves on four ranks, counted while it runs, against one rank and against the plan."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_v4_indexer import costs, visibility
from nemo_v4_indexer.config import AttentionConfig, IndexerConfig

pytestmark = pytest.mark.distributed

RANKS = 4
S, B, HIDDEN, Q_LORA, HEADS, DIM, TOPK = 512, 2, 72, 40, 4, 16, 3
"""No size is another one, or a multiple of one, that a tensor's last dim could be taken for."""
CASES = [
    (4, True, False),
    (4, True, True),
    (4, False, False),
    (4, False, True),
    (1, True, False),
    (6, True, False),  # groups that cross the borders of ranks
]
"""(compress ratio, sequence parallel, balanced rows)."""


class Collectives(TorchDispatchMode):
    """Notes every collective: (name, bytes that this rank receives, shape of its larger tensor)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            widest = max(tensors, key=torch.Tensor.numel)
            received = widest.nbytes * (RANKS - 1) // RANKS
            if "alltoall" in func.name():
                output, _, _, counts, _, *_ = args
                received = output.nbytes // len(output) * (len(output) - counts[dist.get_rank()])
            self.found.append((func.name(), received, tuple(widest.shape)))
        return func(*args, **(kwargs or {}))


def _settings(ratio, balanced):
    return IndexerConfig.from_dict(
        dict(
            num_layers=1, compress_ratio=ratio, topk=TOPK, n_heads=HEADS, head_dim=DIM, rope=dict(dim=8),
            heavy_ratio=128, balance_rows=balanced, backend="reference", loss=dict(coeff=1.0),
        )
    )  # fmt: skip


def count(cases, ranks):
    """{case: pairs that this rank scores, collectives of forward and backward}."""
    from nemo_v4_indexer import layer as module
    from nemo_v4_indexer.integrations.megatron import V4TransformerConfig
    from nemo_v4_indexer.layer import V4Indexer
    from nemo_v4_indexer.ops.loss import indexer_kl_loss

    facts = {}
    for case in cases:
        ratio, sequence_parallel, balanced = case
        indexer = _settings(ratio, balanced)
        config = V4TransformerConfig(
            v4_indexer=indexer,
            v4_attention=AttentionConfig(
                n_heads=4, head_dim=24, q_lora_rank=Q_LORA, o_groups=4, o_lora_rank=12, rope_dim=8
            ),
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            tensor_model_parallel_size=ranks,
            sequence_parallel=sequence_parallel and ranks > 1,
            use_cpu_initialization=True,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        torch.manual_seed(1)
        built = V4Indexer(config, None, 1, layer=indexer.layer(1), q_lora_rank=Q_LORA, pg_collection=groups).bfloat16()
        x, qr = torch.randn(S, B, HIDDEN).bfloat16(), torch.randn(S, B, Q_LORA).bfloat16()
        if config.sequence_parallel:
            mine = slice(groups.tp.rank() * S // ranks, (groups.tp.rank() + 1) * S // ranks)
            x, qr = x[mine], qr[mine]
        scored, original = [], module.V4IndexerFunction.apply

        def apply(q, k, weights, r, topk, indices, limits, options, scored=scored, original=original):
            start, end = limits
            scored.append(((end - start).sum().item(), q.shape[0] * q.shape[1] * k.shape[0]))
            return original(q, k, weights, r, topk, indices, limits, options)

        counting = mock.patch.object(module, "V4IndexerFunction", SimpleNamespace(apply=apply))
        with counting, Collectives() as moved:
            selection = built(x, qr)
            mass = torch.rand(selection.scores.shape, generator=torch.Generator().manual_seed(2))
            indexer_kl_loss(selection.scores, selection.own_indices, mass, rows=S * B)[0].backward()
        ((visible, rectangle),) = scored
        facts[case] = {"visible": visible, "rectangle": rectangle, "moved": moved.found}
    return facts


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    return Ranks(RANKS, tmp_path_factory.mktemp("four"), count, CASES, RANKS).results()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (facts,) = Ranks(1, tmp_path_factory.mktemp("one"), count, CASES, 1).results()
    return facts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_scores_a_quarter(counted, alone, case):
    ratio, _, balanced = case
    whole = alone[case]
    assert whole["visible"] == B * costs.visible_pairs(S, ratio) > 0 and not whole["moved"]
    assert sum(facts[case]["visible"] for facts in counted) == whole["visible"]  # every pair once
    for facts in counted:
        assert facts[case]["rectangle"] == whole["rectangle"] // RANKS
        if balanced:
            assert facts[case]["visible"] == pytest.approx(whole["visible"] / RANKS, rel=0.02)
    if not balanced:  # consecutive rows of a causal sequence: 1, 3, 5 and 7 sixteenths
        shares = [16 * facts[case]["visible"] / whole["visible"] for facts in counted]
        assert shares == pytest.approx([1, 3, 5, 7], abs=0.1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_hidden_sized_moves(counted, case):
    _, sequence_parallel, balanced = case
    for facts in counted:
        moved = facts[case]["moved"]
        assert moved
        for name, _, shape in moved:
            assert HIDDEN not in shape and torch.Size(shape).numel() < S // RANKS * B * HIDDEN, (name, shape)
            # Latent queries move only where rows change places, and then only those rows.
            if shape[-1] == Q_LORA:
                assert sequence_parallel and balanced and "alltoall" in name and shape[0] <= S // RANKS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_those_of_the_plan(counted, case):
    ratio, sequence_parallel, balanced = case
    layout = (visibility.zigzag if balanced else visibility.contiguous)(S, RANKS, 0)
    planned = costs.layer_cost(
        _settings(ratio, balanced).layer(1),
        AttentionConfig(n_heads=4, head_dim=24, q_lora_rank=Q_LORA, o_groups=4, o_lora_rank=12, rope_dim=8),
        SimpleNamespace(hidden_size=HIDDEN, ffn_hidden_size=96),
        sequence=S,
        batch=B,
        tensor=RANKS,
        share=layout,
        held=visibility.contiguous(S, RANKS, 0) if sequence_parallel else layout,
    )
    counts = [sum(received for _, received, _ in facts[case]["moved"]) for facts in counted]
    assert max(counts) == planned.gathered
    # One gather of hidden states would be more than everything here but the selection of a few indices.
    assert max(counts) < 2 * S * B * HIDDEN * (RANKS - 1) // RANKS
