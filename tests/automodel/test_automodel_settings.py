"""The `v4_indexer` section of an AutoModel config: what it means and how it is refused. Needs no AutoModel."""

from types import SimpleNamespace

import pytest

from nemo_v4_indexer.integrations.automodel_config import check_model_keys, indexer_config


def model_config(**changes):
    settings = dict(
        num_hidden_layers=4,
        num_nextn_predict_layers=1,
        compress_ratios=[0, 4, 128, 4, 0],
        index_topk=512,
        index_n_heads=8,
        index_head_dim=32,
        sliding_window=128,
        qk_rope_head_dim=16,
        compress_rope_theta=160000.0,
        attention_dropout=0.0,
    )
    return SimpleNamespace(**(settings | changes))


def test_defaults_come_from_the_model():
    config = indexer_config(model_config())
    assert [layer.compress_ratio for layer in config.plan()] == [0, 4, 128, 4, 0]
    assert [layer.topk for layer in config.plan()] == [0, 512, 0, 512, 0]
    layer = config.layer(2)
    assert (layer.n_heads, layer.head_dim, layer.rope.dim, layer.window, layer.rotate) == (8, 32, 16, 128, False)


def test_ratios_may_leave_out_the_mtp_layers():
    config = indexer_config(model_config(compress_ratios=[0, 4, 128, 4]))
    assert [layer.compress_ratio for layer in config.plan()] == [0, 4, 128, 4, 0]
    assert indexer_config(model_config(compress_ratios=[])).plan()[3].kind == "window"


def test_layers_can_differ():
    config = indexer_config(model_config(), {"topk": [1, 64, 1, 32, 1], "layers": {"4": {"topk": 16}}})
    assert [layer.topk for layer in config.plan()] == [0, 64, 0, 16, 0]
    config = indexer_config(model_config(), {"compress_ratio": [0, 4, 4, 0, 0], "backend": "reference"})
    assert [layer.has_indexer for layer in config.plan()] == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"topkk": 4}, r"v4_indexer has an unknown key 'topkk' \(value 4\); did you mean 'topk'\?"),
        ({"index_topk": 4}, r"v4_indexer has an unknown key 'index_topk' .*did you mean 'topk'\?"),
        ({"n_heads": 4}, r"v4_indexer has the key 'n_heads', which the model config decides: set index_n_heads there"),
        ({"rope": {}}, r"'rope', which the model config decides: set compress_rope_theta and rope_scaling there"),
        ({"topk": [512, 512]}, r"topk has 2 entries, expected 5: one per layer, 4 decoder \+ 1 multi-token"),
        ({"topk": "512"}, r"topk must be a whole number.*got '512' \(str\); this is text: write 512 without quotes"),
        ({"topk": True}, r"topk must be a whole number"),
        ({"topk": 0}, r"topk \(layer 2\) must be >= 1 where compress_ratio \(4\) calls for an indexer"),
        ({"layers": {9: {"topk": 4}}}, r"layers: the layer number must be one of 1\.\.5"),
        ({"layers": {1: {"topk": 4}}}, r"layers\.1\.topk \(layer 1\) must be absent: compress_ratio 0"),
        ({"layers": {2: {"top": 4}}}, r"layers\.2 has an unknown key 'top'"),
        ({"loss": {"coef": 1.0}}, r"loss has an unknown key 'coef' .*did you mean 'coeff'\?"),
        ({"loss": {"coeff": "1e-3"}}, r"loss\.coeff must be .* got '1e-3'"),
        ({"loss": {"warmup_steps": 1.5}}, r"loss\.warmup_steps must be a whole number >= 0, got 1\.5"),
        ({"rotate": "false"}, r"rotate must be true or false, got 'false'"),
        ({"backend": "tilelng"}, r"backend must be one of auto, tilelang, reference.*did you mean 'tilelang'\?"),
        ({"compress_ratio": [0, 2, 128, 4, 0]}, r"compress_ratio \(layer 2\) must be 0, 4 or >= 128: NeMo AutoModel"),
        ({"compress_ratio": [0, 4]}, r"compress_ratio has 2 entries, expected 5"),
        ("topk=4", r"v4_indexer must be a map with the keys topk, layers.*got 'topk=4' \(str\)"),
        ([4], r"v4_indexer must be a map"),
    ],
)
def test_mistakes_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        indexer_config(model_config(), given)


def test_mistakes_of_the_model_config_are_named():
    with pytest.raises(ValueError, match=r"compress_ratio has 3 entries, expected 5"):
        indexer_config(model_config(compress_ratios=[0, 4, 4]))
    with pytest.raises(ValueError, match=r"compress_ratio \(layer 2\) must be 0, 4 or >= 128"):
        indexer_config(model_config(compress_ratios=[0, 8, 128, 4, 0]))
    with pytest.raises(ValueError, match=r"attention_dropout must be 0 for the indexer's loss, got 0\.1"):
        indexer_config(model_config(attention_dropout=0.1))
    assert indexer_config(model_config(attention_dropout=0.1), {"loss": {"coeff": None}})


def test_keys_the_config_class_would_swallow():
    class Config:
        def __init__(self, hidden_size=1, index_topk=2, **kwargs): ...

    check_model_keys({"hidden_size": 3, "architectures": ["x"]}, Config)
    with pytest.raises(ValueError, match=r"model\.config has an unknown key 'index_topkk' .*did you mean 'index_topk'"):
        check_model_keys({"index_topkk": 3}, Config)
