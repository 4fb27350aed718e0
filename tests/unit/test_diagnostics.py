"""Running sums of the indexer's diagnostics against counting by hand."""

import itertools

import pytest
import torch
from mocked_parallel import groups, inputs, layer_config, randomize, single_process, transformer_config

from nemo_v4_indexer import rotary, sharding
from nemo_v4_indexer.diagnostics import SAMPLED_ROWS, Statistics
from nemo_v4_indexer.ops.loss import LossSums


def test_nothing_counted():
    statistics = Statistics()
    assert statistics.take() is None
    assert Statistics.means(torch.zeros(Statistics.size())) == {}


def test_loss_is_a_mean_over_rows():
    statistics = Statistics()
    statistics.add_loss(LossSums(torch.tensor(6.0), torch.tensor(9.0)), torch.tensor(3))
    statistics.add_loss(LossSums(torch.tensor(2.0), torch.tensor(3.0)), torch.tensor(1))
    assert Statistics.means(statistics.take()) == {"indexer_loss": 2.0, "kl_uniform": 3.0}
    assert statistics.take() is None
    statistics.add_loss(LossSums(torch.tensor(1.0), torch.tensor(1.0)), torch.tensor(1))
    assert Statistics.means(statistics.take())["indexer_loss"] == 1.0


def test_sums_hold_no_graph():
    statistics = Statistics()
    kl = torch.ones((), requires_grad=True) * 2
    statistics.add_loss(LossSums(kl, kl), torch.tensor(1))
    assert not statistics.take().requires_grad


def test_recall_of_rows():
    statistics = Statistics()
    mass = torch.tensor([[[4.0, 1, 3, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 4]]])
    indices = torch.tensor([[[0, 2], [0, 1], [1, -1]]], dtype=torch.int32)
    statistics.add_recall(mass, indices, torch.tensor([3, 4, 5]))
    means = Statistics.means(statistics.take())
    # The row without any teacher mass counts nowhere; the empty slot of the last captures nothing (not key 0).
    assert means["recall"] == pytest.approx((7 / 8 + 1 / 8) / 2)
    assert means["recall_random"] == pytest.approx((2 / 3 + 1 / 5) / 2)
    assert set(means) == {"recall", "recall_random"}


def test_random_recall_is_what_random_selections_reach():
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(1, 1, 20, generator=generator).square()
    statistics = Statistics()
    for _ in range(600):
        chosen = torch.randperm(20, generator=generator)[:5].to(torch.int32).view(1, 1, 5)
        statistics.add_recall(mass, chosen, torch.tensor([20]))
    means = Statistics.means(statistics.take())
    assert means["recall_random"] == pytest.approx(0.25)
    assert means["recall"] == pytest.approx(0.25, abs=0.02)


def test_ties_at_the_edge_of_the_selection():
    # One head, one channel: scores are relu(q k) w = k where q = w = 1 and k > 0, else 0.
    keys = torch.tensor([3.0, 1.0, 2.0, 1.0, -1.0, -2.0]).view(6, 1, 1)
    q, w = torch.ones(4, 1, 1, 1), torch.ones(4, 1, 1)
    start = torch.zeros(1, 4, dtype=torch.int32)
    end = torch.tensor([[3, 4, 6, 6]], dtype=torch.int32)
    statistics = Statistics()
    for topk in (1, 2):
        statistics.add_ties(q, keys, w, start, end, topk)
    assert Statistics.means(statistics.take())["tie_rate"] == 0.0
    statistics.add_ties(q[:1], keys, w[:1], start[:, :1], end[:, 1:2], 3)  # 3, 2, 1 | 1
    assert Statistics.means(statistics.take())["tie_rate"] == 1.0
    statistics.add_ties(q, keys, w, start, torch.full_like(end, 6), 4)  # 3, 2, 1, 1 | 0
    statistics.add_ties(q, keys, w, start, torch.full_like(end, 6), 5)  # 3, 2, 1, 1, 0 | 0
    assert Statistics.means(statistics.take())["tie_rate"] == 0.5


def test_ties_of_no_rows_count_nothing():
    """The rows sampled for diagnostics may all belong to other ranks."""
    statistics, limits = Statistics(), torch.zeros(2, 0, dtype=torch.int32)
    statistics.add_ties(torch.zeros(0, 2, 4, 8), torch.ones(6, 2, 8), torch.zeros(0, 2, 4), limits, limits, 3)
    assert Statistics.means(statistics.take()) == {}


@pytest.mark.parametrize("ratio", [1, 3, 4])
@pytest.mark.parametrize("topk", [1, 5])
def test_sampled_rows_are_restricted_ones(ratio, topk):
    first = next(t for t in range(1000) if (t + 1) // ratio > topk)

    def sampled(length):
        shards = sharding.shard(transformer_config(), groups(), length, lambda even, queries: even)
        return shards.sampled_queries(SAMPLED_ROWS, (topk + 1) * ratio - 1)

    assert sampled(first) == []
    for length in (first + 1, first + 2, first + 40, 1000, 5000):
        rows, step = sampled(length), max(1, (length - first) / SAMPLED_ROWS)
        assert len(rows) == min(SAMPLED_ROWS, length - first)
        assert first <= rows[0] < first + step and length - step <= rows[-1] + 1 <= length
        assert all(0 < b - a < 2 * step for a, b in itertools.pairwise(rows))


def test_tie_rate_of_a_layer_whose_rows_lie_elsewhere(monkeypatch):
    """Two ranks, every restricted row on the second: both get through, and report one recall."""
    from mocked_parallel import attention_config, run_ranks

    from nemo_v4_indexer.layer import V4Indexer
    from nemo_v4_indexer.ops.sparse_attention import Entries
    from nemo_v4_indexer.teacher import Teacher

    layer, settings = layer_config(4, topk=4), attention_config()
    rows = 32
    config = transformer_config(tensor_model_parallel_size=2, sequence_parallel=True)
    x, qr = inputs(rows), inputs(rows, settings.q_lora_rank, seed=7)
    q, latent = torch.randn(rows, 2, 4, 32), inputs(rows // 4, 32, seed=3)
    denominator = torch.full((2, 4, rows), 3.0)

    def rank(group):
        from nemo_v4_indexer.attention import V4SelfAttention

        collection = groups()
        collection.tp = group
        indexer = randomize(V4Indexer(config, None, 1, layer=layer, q_lora_rank=24, pg_collection=collection))
        own = slice(group.rank() * 16, group.rank() * 16 + 16)
        shards = indexer.shard(16)
        selection = indexer(x[own], qr[own], shards)
        end = ((torch.arange(rows) + 1) // 4).int().expand(2, rows)
        entries = Entries(latent, selection.indices, torch.zeros_like(end), end)
        heads = slice(group.rank() * 2, group.rank() * 2 + 2)
        teacher = Teacher(q[:, :, heads], denominator[:, :2], None, entries, 0.2, shards, group, 4)
        module = torch.nn.Module()
        module.layer, module.indexer = layer, indexer
        V4SelfAttention._diagnose(module, selection, teacher)
        return indexer.statistics.take()

    sums, _ = run_ranks(monkeypatch, 2, rank)
    first, second = (Statistics.means(part) for part in sums)
    assert first["recall"] == pytest.approx(second["recall"]) and 0 < first["recall"] < 1
    assert "tie_rate" not in first and "tie_rate" in second


def test_recall_of_a_layer_against_its_own_attention():
    """The layer's recall is the share of the attention's mass over visible entries that its selection holds."""
    from megatron.core import parallel_state
    from mocked_parallel import attention_config

    from nemo_v4_indexer.attention import V4SelfAttention

    with single_process():
        collection = groups()
        collection.tp = parallel_state.get_tensor_model_parallel_group()
        layer, settings = layer_config(4, topk=2), attention_config()
        module = randomize(
            V4SelfAttention(transformer_config(), None, 1, layer=layer, attention=settings, pg_collection=collection)
        )
        x, rows = inputs(39), 39
        module(x)
        means = Statistics.means(module.indexer.statistics.take())
        qr = module.q_norm(module.wq_a(x))
        table = rotary.rotary_table(torch.arange(rows), module.rope)
        q, latent = module._queries(qr, table).double(), module._latent(x, module.indexer.shard(rows)).double()
        entries = module.compressor(x).double()
        indices = module.indexer(x, qr).indices
    recalls, random = [], []
    for b in range(2):
        for t in range(11, rows):  # the first row that sees three groups
            seen = (t + 1) // 4
            window = latent[max(0, t - layer.window + 1) : t + 1, b]
            support = torch.cat([window, entries[indices[b, t].long(), b]])
            logits = torch.cat([q[t, b] @ support.T * 32**-0.5, module.sink.weight.double()[:, None]], 1)
            mass = (q[t, b] @ entries[:seen, b].T * 32**-0.5 - logits.logsumexp(1, keepdim=True)).exp().sum(0)
            recalls.append((mass[indices[b, t].long()].sum() / mass.sum()).item())
            random.append(2 / seen)
    assert means["recall"] == pytest.approx(sum(recalls) / len(recalls), rel=1e-4)
    assert means["recall_random"] == pytest.approx(sum(random) / len(random), rel=1e-5)
