"""AutoModel's real DeepSeek-V4 model with this package's indexer, against AutoModel's own on the same weights."""

import pytest

pytest.importorskip(
    "nemo_automodel", reason="nemo-automodel 0.7.0 is not installed: pip install 'nemo-v4-indexer[automodel]'"
)

import torch
from tiny_v4 import CONFIG, TOPK, S, build, compressors, selections, taps, tokens

from nemo_v4_indexer import reference
from nemo_v4_indexer.integrations.automodel import restore_indexers

G = S // 4


def sets(indices):
    return [[{int(i) for i in row if i >= 0} for row in sample] for sample in indices]


def both(model, **batch):
    """Selections and logits: this package's, then AutoModel's own."""
    results = []
    with torch.no_grad():
        for undo in (False, True):
            if undo:
                restore_indexers(model)
            with selections(model) as seen:
                logits = model(**batch).logits
            results.append((seen, logits))
    return results


def fp64_scores(model, number, batch):
    """Scores [B, S, G] of one layer, fp64, from the queries and keys this package's indexer used."""
    with taps(model) as seen:
        model(**batch)
    selection = seen[number][0]
    return reference.scores(*(t.detach().double() for t in (selection.q, selection.k, selection.weights)))


@pytest.mark.parametrize("rotate", [False, True])
def test_selects_what_automodel_selects(rotate):
    model, batch = build({"rotate": rotate}), {"input_ids": tokens()}
    scores = {number: fp64_scores(model, number, batch) for number in compressors(model)}
    (ours, _), (theirs, _) = both(model, **batch)
    # Layer 2 alone sees the same input in both models; what comes after depends on its selection.
    ours, theirs, scores = ours[2], theirs[2], scores[2]
    assert ours.shape == theirs.shape == (2, S, TOPK)
    clear = same = 0
    for b, (mine, other) in enumerate(zip(sets(ours), sets(theirs), strict=True)):
        for t in range(S):
            visible = (t + 1) // 4
            assert len(mine[t]) == len(other[t]) == min(TOPK, visible)
            best = scores[b, t, :visible].sort(descending=True).values
            chosen = [scores[b, t, sorted(row)].sort(descending=True).values for row in (mine[t], other[t])]
            for values in chosen:
                torch.testing.assert_close(values, best[: len(values)], rtol=1e-5, atol=1e-5)
            same += mine[t] == other[t]
            if visible > TOPK and best[TOPK - 1] - best[TOPK] > 1e-5:
                clear += 1
                assert mine[t] == other[t], (b, t)
    assert clear > 80 and same >= 2 * S - 4  # the rest are ties, of which AutoModel may take another one


def test_the_model_computes_the_same_where_everything_is_selected():
    model = build({"topk": G}, index_topk=G)
    (_, ours), (_, theirs) = both(model, input_ids=tokens())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bf16_differs_by_rounding_alone():
    """AutoModel rounds its rotary table and head weights to bf16; this package keeps the table fp32."""
    model, batch = build(dtype="bfloat16"), {"input_ids": tokens()}
    scores = fp64_scores(model, 2, batch)
    (ours, _), (theirs, _) = both(model, **batch)
    mine, other = sets(ours[2]), sets(theirs[2])
    rows = [(b, t) for b in range(2) for t in range(4 * TOPK + 3, S)]
    common = sum(len(mine[b][t] & other[b][t]) for b, t in rows) / (TOPK * len(rows))
    assert common > 0.9
    for b, t in rows:
        visible = scores[b, t, : (t + 1) // 4]
        lost = visible.sort(descending=True).values[:TOPK].sum() - scores[b, t, sorted(mine[b][t])].sum()
        assert lost.abs() < 1e-3 * visible.abs().sum()


def test_fp32_parameters_stay_fp32():
    model = build(dtype="bfloat16")
    dtypes = {name.rsplit("indexer.")[1]: p.dtype for name, p in model.named_parameters() if ".indexer." in name}
    fp32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert fp32 >= {"wkv.weight", "wgate.weight", "ape_param.weight"}
    assert dtypes["wq_b.weight"] == dtypes["weights_proj.weight"] == torch.bfloat16


def test_topk_of_each_layer_is_honoured():
    model = build({"topk": [1, 3, 7, 1]})
    with selections(model) as seen, torch.no_grad():
        model(input_ids=tokens())
    for number, topk in ((2, 3), (3, 7)):
        counts = (seen[number] >= 0).sum(-1)
        visible = (torch.arange(S) + 1) // 4
        assert torch.equal(counts, visible.clamp(max=topk).expand_as(counts))
        assert (seen[number] < visible[:, None]).all()


def test_override_of_one_layer():
    model = build({"layers": {3: {"topk": 2}}})
    assert {n: c.indexer.layer.topk for n, c in compressors(model).items()} == {2: TOPK, 3: 2}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_short_sequences(length):
    model = build()
    out = model(input_ids=tokens(length=length))
    out.logits.sum().backward()
    gradients = [p.grad for n, p in model.named_parameters() if ".indexer." in n]
    assert all(g is not None and g.isfinite().all() for g in gradients)  # an optimizer may wait for each


def test_positions_given_by_the_caller():
    model = build()
    with selections(model) as seen, torch.no_grad():
        model(input_ids=tokens())
        implicit = dict(seen)
        model(input_ids=tokens(), position_ids=torch.arange(S).expand(2, -1))
    assert all(torch.equal(seen[n], implicit[n]) for n in seen)


def test_restored_models_are_automodels_again():
    from nemo_automodel.components.models.deepseek_v4.layers import DeepseekV4Indexer

    model = build()
    names, before = list(model.state_dict()), model.state_dict()
    restore_indexers(model)
    assert all(isinstance(c.indexer, DeepseekV4Indexer) for c in compressors(model).values())
    assert list(model.state_dict()) == names
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(layer.self_attn._forward_hooks for layer in model.model.layers.values())


def test_refusals():
    model = build()
    indexer = compressors(model)[2].indexer
    x = torch.zeros(1, 8, CONFIG["hidden_size"])
    qr = torch.zeros(1, 8, CONFIG["q_lora_rank"])
    args = (x, qr, model.model.rotary_emb_compress, None, None, 1)
    with pytest.raises(NotImplementedError, match="layer 2: packed sequences"):
        indexer(*args, 0, packed_seq_ids=torch.ones(1, 8))
    with pytest.raises(NotImplementedError, match="layer 2: start_pos must be 0, got 4"):
        indexer(*args, 4)
    with pytest.raises(NotImplementedError, match="layer 2: cp_size must be 1, got 2"):
        indexer(*args, 0, cp_group=type("Group", (), {"size": lambda self: 2})())
