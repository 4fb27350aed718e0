"""The indexer configuration: documented meanings, one clear error per mistake, and round trips."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_v4_indexer.config import IndexerConfig, LossConfig, RopeConfig
from nemo_v4_indexer.config_parsing import FrozenMap


def build(**settings):
    return IndexerConfig.from_dict({"num_layers": 4} | settings)


def ratios(config):
    return [layer.compress_ratio for layer in config.plan()]


def topks(config):
    return [layer.topk for layer in config.plan()]


def test_one_number_serves_every_layer_mtp_included():
    config = build(num_mtp_layers=1, compress_ratio=2, topk=7)
    assert ratios(config) == [2] * 5
    assert topks(config) == [7] * 5
    assert [layer.layer_number for layer in config.plan()] == [1, 2, 3, 4, 5]
    assert [layer.is_mtp for layer in config.plan()] == [False] * 4 + [True]


def test_list_gives_one_entry_per_layer():
    config = build(num_mtp_layers=1, compress_ratio=[0, 4, 128, 1, 2], topk=[0, 5, 0, 6, 7])
    assert ratios(config) == [0, 4, 128, 1, 2]
    assert topks(config) == [0, 5, 0, 6, 7]
    assert [layer.kind for layer in config.plan()] == ["window", "sparse", "heavy", "sparse", "sparse"]
    assert [layer.overlap for layer in config.plan()] == [False, True, False, False, True]
    assert [layer.has_indexer for layer in config.plan()] == [False, True, False, True, True]


def test_pattern_fills_the_decoder_between_prefix_and_suffix():
    rule = {"prefix": [0, 0], "pattern": [4, 128], "suffix": [4], "mtp": [0]}
    config = build(num_layers=43, num_mtp_layers=1, compress_ratio=rule)
    assert ratios(config) == [0, 0] + [4, 128] * 20 + [4] + [0]
    assert config.layer(44).is_mtp and not config.layer(43).is_mtp
    assert ratios(build(num_layers=3, compress_ratio={"prefix": [0, 0], "pattern": [4, 128], "suffix": [4]})) == [
        0,
        0,
        4,
    ]


@pytest.mark.parametrize(
    ("ratio", "kind", "overlap"),
    [(0, "window", False), (1, "sparse", False), (3, "sparse", True), (127, "sparse", True), (128, "heavy", False)],
)
def test_ratio_decides_the_kind(ratio, kind, overlap):
    layer = build(compress_ratio=ratio).layer(1)
    assert (layer.kind, layer.overlap, layer.has_indexer) == (kind, overlap, kind == "sparse")
    assert layer.topk == (512 if kind == "sparse" else 0)


def test_heavy_ratio_moves_the_border():
    assert [layer.kind for layer in build(compress_ratio=[0, 4, 32, 31], heavy_ratio=32).plan()] == [
        "window",
        "sparse",
        "heavy",
        "sparse",
    ]


def test_single_layers_override_the_rule_by_global_number():
    config = build(num_mtp_layers=1, topk=9, layers={2: {"topk": 3}, "5": {"compress_ratio": 128}})
    assert topks(config) == [9, 3, 9, 9, 0]
    assert ratios(config) == [4, 4, 4, 4, 128]
    assert config.layers == {2: {"topk": 3}, 5: {"compress_ratio": 128}}
    assert ratios(build(layers={"4": {"compress_ratio": 0}})) == [4, 4, 4, 0]


def test_bare_layers_key_means_no_overrides():
    assert build(**yaml.safe_load("layers:\n")).layers == {}


def test_loss_coefficient_null_or_zero_switches_the_loss_off():
    assert build(loss={"coeff": None}).loss.coeff is None
    assert not build(loss={"coeff": None}).loss.enabled
    assert not build(loss={"coeff": 0}).loss.enabled
    assert build(loss={"warmup_steps": 5}).loss == LossConfig(coeff=0.01, warmup_steps=5)
    assert build().loss.enabled


def test_whole_numbers_serve_where_a_real_is_expected():
    theta = build(rope={"theta": 10000}).rope.theta
    assert theta == 10000.0 and isinstance(theta, float)


def test_layer_carries_the_shared_settings():
    config = build(
        n_heads=8, head_dim=32, rope={"dim": 16}, window=7, backend="reference", workspace_mib=3, deterministic=True,
        precise=True, rotate=False, loss={"coeff": 0.5},
    )  # fmt: skip
    layer = config.layer(3)
    for name in ("n_heads", "head_dim", "rope", "window", "backend", "workspace_mib", "deterministic", "precise"):
        assert getattr(layer, name) == getattr(config, name), name
    assert layer.rotate is False and layer.loss.coeff == 0.5


def test_omegaconf_containers_are_read_as_they_are():
    source = OmegaConf.create(
        {
            "model": {"num_layers": 4},
            "indexer": {
                "num_layers": "${model.num_layers}",
                "compress_ratio": [0, 4, 4, 4],
                "topk": {"pattern": [3, 5]},
                "layers": {"3": {"topk": 6}},
                "loss": {"coeff": None},
                "rope": {"dim": 16},
            },
        }
    )
    OmegaConf.set_struct(source, True)
    config = IndexerConfig.from_dict(source.indexer)
    assert topks(config) == [0, 5, 6, 5]
    assert "omegaconf" not in repr({type(value).__module__ for value in _walk(config)})
    pickle.loads(pickle.dumps(config))


def _walk(value):
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name))
    elif isinstance(value, dict | FrozenMap):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _walk(item)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_frozen_and_not_aliased():
    given_list, given_pattern, given_layers = [0, 4, 4, 4], {"pattern": [8, 9]}, {3: {"topk": 5}}
    config = build(compress_ratio=given_list, topk=given_pattern, layers=given_layers)
    before = config.to_dict()
    given_list[1] = 99
    given_pattern["pattern"].append(1)
    given_layers[3]["topk"] = 1
    given_layers[4] = {"topk": 1}
    assert config.to_dict() == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.topk = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layer(2).topk = 3
    with pytest.raises(TypeError):
        config.layers[3] = {}
    with pytest.raises(TypeError):
        config.layers[3]["topk"] = 2
    with pytest.raises((AttributeError, TypeError)):
        config.extra = 1
    before["layers"]["3"]["topk"] = 1
    assert config.layer(3).topk == 5


@st.composite
def configs(draw):
    layers, mtp = draw(st.integers(1, 9)), draw(st.integers(0, 2))
    total = layers + mtp

    def rules(entry):
        lists = st.lists(entry, min_size=total, max_size=total)
        prefix, suffix = draw(st.integers(0, layers - 1)), 0
        room = layers - prefix - suffix
        period = draw(st.sampled_from([n for n in range(1, room + 1) if room % n == 0]))
        pattern = {
            "prefix": [draw(entry) for _ in range(prefix)],
            "pattern": [draw(entry) for _ in range(period)],
            "mtp": [draw(entry) for _ in range(mtp)],
        }
        return st.one_of(entry, lists, st.just(pattern))

    ratio, topk = st.sampled_from([0, 1, 2, 3, 4, 32, 128, 200]), st.integers(1, 600)
    override = st.one_of(
        st.fixed_dictionaries({"compress_ratio": ratio}),
        st.fixed_dictionaries({"compress_ratio": st.sampled_from([1, 2, 4]), "topk": topk}),
    )
    return IndexerConfig(
        num_layers=layers,
        num_mtp_layers=mtp,
        compress_ratio=draw(rules(ratio)),
        topk=draw(rules(topk)),
        layers=draw(st.dictionaries(st.integers(1, total), override, max_size=3)),
        heavy_ratio=draw(st.sampled_from([32, 128])),
        deterministic=draw(st.sampled_from([None, True, False])),
        rope=RopeConfig(theta=draw(st.floats(1.5, 1e7)), factor=draw(st.floats(1, 64))),
        loss=LossConfig(coeff=draw(st.one_of(st.none(), st.floats(0, 10))), warmup_steps=draw(st.integers(0, 9))),
    )


@settings(max_examples=60, deadline=None)
@given(configs())
def test_config_survives_every_round_trip(config):
    mapping = config.to_dict()
    copies = [
        IndexerConfig.from_dict(mapping),
        IndexerConfig.from_dict(json.loads(json.dumps(mapping))),
        IndexerConfig.from_dict(yaml.safe_load(yaml.safe_dump(mapping))),
        IndexerConfig.from_dict(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(mapping)))),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        dataclasses.replace(config),
    ]
    for other in copies:
        assert other == config
        assert hash(other) == hash(config)
        assert other.plan() == config.plan()
    assert pickle.loads(pickle.dumps(config.plan())) == config.plan()
    assert len({*config.plan()}) == config.num_layers + config.num_mtp_layers


@settings(max_examples=60, deadline=None)
@given(configs())
def test_plan_invariants(config):
    plan = config.plan()
    assert [layer.layer_number for layer in plan] == list(range(1, config.num_layers + config.num_mtp_layers + 1))
    assert [layer.is_mtp for layer in plan] == [False] * config.num_layers + [True] * config.num_mtp_layers
    for layer in plan:
        assert (layer.topk >= 1) == layer.has_indexer == (1 <= layer.compress_ratio < config.heavy_ratio)
        assert layer.overlap == (layer.has_indexer and layer.compress_ratio > 1)
        assert config.layer(layer.layer_number) == layer
        for key, value in config.layers.get(layer.layer_number, {}).items():
            assert getattr(layer, key) == value


def test_saved_yaml_file_loads_back(tmp_path):
    config = build(compress_ratio={"pattern": [0, 4]}, layers={4: {"topk": 3}}, loss={"coeff": None})
    path = tmp_path / "resolved.yaml"
    OmegaConf.save(OmegaConf.create({"indexer": config.to_dict()}), path)
    assert IndexerConfig.from_dict(OmegaConf.load(path).indexer) == config
    assert IndexerConfig.from_dict(yaml.safe_load(path.read_text())["indexer"]) == config


def test_warns_exactly_when_the_selection_restricts_nothing():
    config = build(compress_ratio=[0, 4, 4, 128], topk=16, layers={3: {"topk": 15}})
    assert config.warnings_for(68) == [
        "layer 4: compress_ratio 128 exceeds the sequence length 68: there are no compressed keys"
    ]
    (both,) = config.warnings_for(63)[:1]
    assert "layer 2" in both and "topk 16 selects all 15 compressed keys of a 63-token sequence" in both
    assert "at least 68 tokens" in both
    assert [text.split(":")[0] for text in config.warnings_for(64)] == ["layer 2", "layer 4"]
    assert config.warnings_for(128) == []


def test_equal_warnings_are_joined():
    (text,) = build(topk=512).warnings_for(2048)
    assert text.startswith("layer 1, 2, 3, 4: topk 512")
    with pytest.raises(ValueError, match="seq_length"):
        build().warnings_for(0)


# ---- attention ------------------------------------------------------------------------------------------------------


def test_importing_the_configuration_loads_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); import nemo_v4_indexer.config;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'nemo_v4_indexer'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
