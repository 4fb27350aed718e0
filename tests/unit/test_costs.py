"""The plan's arithmetic, against counting."""

import pytest

from nemo_v4_indexer import costs, plan, visibility
from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
from nemo_v4_indexer.training.config import ModelConfig

ATTENTION = AttentionConfig(n_heads=8, head_dim=32, q_lora_rank=24, o_groups=2, o_lora_rank=12, rope_dim=8)
MODEL = ModelConfig(hidden_size=64, num_layers=2, ffn_hidden_size=96)


def layer(ratio=4, topk=3, **changes):
    settings = dict(num_layers=2, compress_ratio=[0, ratio], topk=topk, n_heads=4, head_dim=16, rope={"dim": 8})
    return IndexerConfig.from_dict(settings | changes).layer(2)


@pytest.mark.parametrize("ratio", [1, 3, 4])
@pytest.mark.parametrize("sequence", [1, 7, 40])
@pytest.mark.parametrize("topk", [1, 5, 64])
def test_pairs_by_counting(sequence, ratio, topk):
    seen = [(t + 1) // ratio for t in range(sequence)]
    assert costs.visible_pairs(sequence, ratio) == sum(seen)
    assert costs.selected_pairs(sequence, ratio, topk) == sum(min(n, topk) for n in seen)


def test_ranks_divide_the_scores():
    whole = costs.layer_cost(layer(), ATTENTION, MODEL, sequence=4096, batch=2)
    split = costs.layer_cost(layer(), ATTENTION, MODEL, sequence=4096, batch=2, tensor=4)
    even = visibility.zigzag(4096, 4, 0)
    balanced = costs.layer_cost(layer(), ATTENTION, MODEL, sequence=4096, batch=2, tensor=4, share=even)
    assert whole.scored_pairs == 2 * costs.visible_pairs(4096, 4) and whole.imbalance == 1 and whole.gathered == 0
    assert 1.7 < split.imbalance < 1.8 and balanced.imbalance < 1.01
    assert balanced.scored_pairs < 0.26 * whole.scored_pairs
    keys, borders, indices = 2 * 2 * 1024 * 16 * 3 // 4, 4 * 2 * 3 * 7 * 4 * 16, 4 * 2 * 4096 * 3 * 3 // 4
    assert split.gathered == 2 * keys + 2 * borders + indices  # keys and borders have gradients
    assert balanced.indexer < split.indexer < whole.indexer < whole.layer


def test_a_layer_without_indexer_costs_none():
    window = IndexerConfig.from_dict(dict(num_layers=1, compress_ratio=0, n_heads=4)).layer(1)
    found = costs.layer_cost(window, ATTENTION, MODEL, sequence=64, batch=1)
    assert found.indexer == found.gathered == found.scored_pairs == 0 and found.memory is None and found.layer > 0


def test_memory_is_bounded_at_128k():
    found = costs.indexer_memory(131072, 4, 512)
    assert found.workspace == 256 * costs.MIB < 4 * 131072 * 32768
    assert found.peak < 1024 * costs.MIB


def test_command(capsys):
    assert (
        plan.main(["indexer.topk=128", "data.sequence_length=512", "parallel.tensor=4", "indexer.balance_rows=false"])
        == 0
    )
    said = capsys.readouterr().out
    assert "topk 128 selects all 128 compressed keys" in said
    assert "the busiest rank scores 1.75 times the mean" in said
    assert "model.attention.o_groups 2 does not divide over parallel.tensor 4" in said
    assert plan.main(["parallel.tensr=4"]) == 2
    assert "parallel.tensor" in capsys.readouterr().err
