"""Every mistake in a configuration raises one ValueError naming key, layer, value and expected form."""

import copy
import dataclasses
import math
import pickle

import pytest
from omegaconf import OmegaConf

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig, LossConfig, RopeConfig


def build(**settings):
    return IndexerConfig.from_dict({"num_layers": 4} | settings)


def refusal(**settings):
    with pytest.raises(ValueError) as caught:
        build(**settings)
    return str(caught.value)


PATTERN = {"prefix": [0, 0], "pattern": [4, 128], "suffix": [4]}

MISTAKES = {
    "list too short": ({"compress_ratio": [0, 4]}, ["compress_ratio", "2 entries", "expected 4"]),
    "list too long": ({"topk": [4] * 5}, ["topk", "5 entries", "expected 4"]),
    "list without the MTP entry": (
        {"num_mtp_layers": 1, "compress_ratio": [4] * 4},
        ["4 entries", "expected 5", "1 multi-token-prediction"],
    ),
    "empty list": ({"compress_ratio": []}, ["compress_ratio", "0 entries", "expected 4"]),
    "ratio negative": ({"compress_ratio": -1}, ["compress_ratio", ">= 0", "got -1"]),
    "ratio negative in a list": ({"compress_ratio": [0, 4, -4, 4]}, ["compress_ratio[2]", "layer 3", "got -4"]),
    "topk zero": ({"topk": 0}, ["topk", "layer 1", ">= 1", "got 0"]),
    "topk zero in a list": ({"compress_ratio": [0, 4, 4, 4], "topk": [0, 4, 0, 4]}, ["topk", "layer 3", "got 0"]),
    "topk negative": ({"topk": -3}, ["topk", ">= 0", "got -3"]),
    "expression as text": (
        {"compress_ratio": "[0]*2+[4]*2"},
        ["compress_ratio", "'[0]*2+[4]*2'", "pattern", "not expanded"],
    ),
    "list as text": ({"compress_ratio": "[0, 4, 4, 4]"}, ["compress_ratio", "(str)", "without quotes"]),
    "number as text": ({"topk": "16"}, ["topk", "'16' (str)", "write 16 without quotes"]),
    "number as text in a list": ({"topk": [4, "4", 4, 4]}, ["topk[1]", "layer 2", "'4' (str)"]),
    "bool for a number": ({"topk": True}, ["topk", "whole number", "got True"]),
    "bool in a list": ({"compress_ratio": [4, 4, 4, False]}, ["compress_ratio[3]", "layer 4", "got False"]),
    "float for a whole number": ({"topk": 4.0}, ["topk", "got 4.0 (float)", "write 4"]),
    "float in a list": ({"compress_ratio": [4, 4.5, 4, 4]}, ["compress_ratio[1]", "layer 2", "got 4.5"]),
    "null for a number": ({"topk": None}, ["topk", "whole number", "got None"]),
    "null in a list": ({"compress_ratio": [4, None, 4, 4]}, ["compress_ratio[1]", "layer 2", "got None"]),
    "nested list": ({"compress_ratio": [[0], [4]]}, ["compress_ratio[0]", "layer 1", "got [0]"]),
    "set for a list": ({"compress_ratio": {0, 4}}, ["compress_ratio", "a list with one whole number per layer", "set"]),
    "unknown key": ({"top_k": 4}, ["unknown key 'top_k'", "value 4", "did you mean 'topk'", "known keys:"]),
    "key of another tool": ({"index_topk": 4}, ["unknown key 'index_topk'", "did you mean 'topk'"]),
    "key of another tool, nested here": ({"compress_rope_theta": 1e4}, ["did you mean 'rope.theta'"]),
    "unknown key without a near name": ({"zzz": 1}, ["unknown key 'zzz'", "known keys: num_layers"]),
    "unknown loss key": ({"loss": {"coef": 1}}, ["loss has an unknown key 'coef'", "'coeff'"]),
    "unknown rope key": ({"rope": {"base": 1}}, ["rope has an unknown key 'base'"]),
    "loss null": ({"loss": None}, ["loss", "a map with the keys coeff, warmup_steps", "got None"]),
    "loss a number": ({"loss": 0.1}, ["loss", "a map", "0.1"]),
    "coefficient negative": ({"loss": {"coeff": -1}}, ["loss.coeff", ">= 0", "got -1"]),
    "coefficient nan": ({"loss": {"coeff": math.nan}}, ["loss.coeff", "finite", "nan"]),
    "coefficient infinite": ({"loss": {"coeff": math.inf}}, ["loss.coeff", "finite", "inf"]),
    "coefficient bool": ({"loss": {"coeff": False}}, ["loss.coeff", "null (loss off)", "got False"]),
    "coefficient text": ({"loss": {"coeff": "1e-3"}}, ["loss.coeff", "'1e-3' (str)", "write 0.001"]),
    "coefficient 'null'": ({"loss": {"coeff": "null"}}, ["loss.coeff", "write null without quotes"]),
    "warm-up negative": ({"loss": {"warmup_steps": -1}}, ["loss.warmup_steps", ">= 0", "got -1"]),
    "text for a bool": ({"rotate": "false"}, ["rotate", "true or false", "'false' (str)", "without quotes"]),
    "number for a bool": ({"precise": 0}, ["precise", "true or false", "got 0"]),
    "null for a bool": ({"rotate": None}, ["rotate", "true or false", "got None"]),
    "text for an optional bool": ({"deterministic": "True"}, ["deterministic", "null", "'True' (str)"]),
    "backend unknown": ({"backend": "cuda"}, ["backend", "auto, tilelang, reference", "'cuda'"]),
    "backend in capitals": ({"backend": "TileLang"}, ["backend", "did you mean 'tilelang'"]),
    "backend null": ({"backend": None}, ["backend", "got None"]),
    "no layers": ({"num_layers": 0}, ["num_layers", ">= 1", "got 0"]),
    "layers as text": ({"num_layers": "4"}, ["num_layers", "'4' (str)"]),
    "MTP negative": ({"num_mtp_layers": -1}, ["num_mtp_layers", ">= 0"]),
    "pattern does not fit": (
        {"num_layers": 6, "compress_ratio": PATTERN},
        ["compress_ratio", "pattern of 2 entries", "6 decoder layers", "3 layers remain", "multiple of 2"],
    ),
    "prefix and suffix overflow": (
        {"num_layers": 2, "compress_ratio": PATTERN},
        ["2 decoder layers", "-1 layers remain"],
    ),
    "pattern without its middle": (
        {"compress_ratio": {"prefix": [0, 0, 4, 4]}},
        ["compress_ratio.pattern", "at least one"],
    ),
    "pattern with an empty middle": ({"topk": {"pattern": []}}, ["topk.pattern", "at least one"]),
    "pattern as a number": ({"topk": {"pattern": 4}}, ["topk.pattern", "a list of whole numbers", "got 4"]),
    "pattern entry": ({"topk": {"pattern": [4, "x"]}}, ["topk.pattern[1]", "'x' (str)"]),
    "pattern with an unknown part": (
        {"compress_ratio": {"patern": [4]}},
        ["compress_ratio has an unknown key 'patern'", "did you mean 'pattern'"],
    ),
    "pattern without MTP": (
        {"num_mtp_layers": 1, "compress_ratio": {"pattern": [4]}},
        ["compress_ratio.mtp has 0 entries", "expected 1"],
    ),
    "pattern with too much MTP": (
        {"compress_ratio": {"pattern": [4], "mtp": [0]}},
        ["mtp has 1 entries", "expected 0"],
    ),
    "override beyond the model": ({"layers": {5: {"topk": 3}}}, ["layer number", "1..4", "got 5"]),
    "override of layer 0": ({"layers": {0: {"topk": 3}}}, ["layers", "counted from 1", "got 0"]),
    "override by text": ({"layers": {"last": {"topk": 3}}}, ["layers", "layer number", "'last'"]),
    "override by bool": ({"layers": {True: {"topk": 3}}}, ["layers", "got True"]),
    "override twice": ({"layers": {3: {"topk": 3}, "3": {"topk": 4}}}, ["layer 3 twice"]),
    "override of nothing": ({"layers": {3: {}}}, ["layers.3", "layer 3", "compress_ratio, topk"]),
    "override by a number": ({"layers": {3: 64}}, ["layers.3", "a map of compress_ratio, topk", "got 64"]),
    "override with an unknown key": ({"layers": {3: {"top_k": 3}}}, ["layers.3", "'top_k'", "did you mean 'topk'"]),
    "override topk where there is no indexer": (
        {"compress_ratio": [0, 4, 128, 4], "layers": {3: {"topk": 5}}},
        ["layers.3.topk", "layer 3", "compress_ratio 128", "no indexer", "got 5"],
    ),
    "override topk zero": ({"layers": {3: {"topk": 0}}}, ["layers.3.topk", "layer 3", ">= 1", "got 0"]),
    "override ratio negative": ({"layers": {"3": {"compress_ratio": -1}}}, ["layers.3.compress_ratio", "layer 3"]),
    "override ratio null": ({"layers": {3: {"compress_ratio": None}}}, ["layers.3.compress_ratio", "got None"]),
    "overrides as a list": ({"layers": [{"topk": 3}]}, ["layers", "a map from layer number"]),
    "rope wider than the head": ({"head_dim": 32}, ["rope.dim", "at most head_dim (32)", "got 64"]),
    "rope odd": ({"rope": {"dim": 63}}, ["rope.dim", "even", "got 63"]),
    "theta zero": ({"rope": {"theta": 0}}, ["rope.theta", "> 1", "got 0"]),
    "factor below one": ({"rope": {"factor": 0.5}}, ["rope.factor", ">= 1", "got 0.5"]),
    "betas swapped": (
        {"rope": {"beta_fast": 1, "beta_slow": 32}},
        ["rope.beta_fast", "greater than rope.beta_slow (32)"],
    ),
    "head_dim not a power of two": ({"head_dim": 96}, ["head_dim", "power of two", "rotate: false", "got 96"]),
    "no window": ({"window": 0}, ["window", "layer 1", "compress_ratio 4", "got 0"]),
    "workspace zero": ({"workspace_mib": 0}, ["workspace_mib", ">= 1"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_names_key_value_and_expected_form(name):
    settings, fragments = MISTAKES[name]
    message = refusal(**settings)
    for fragment in fragments:
        assert fragment in message, message


def test_omegaconf_containers_are_refused_with_the_same_words():
    for settings, fragments in (MISTAKES["list too short"], MISTAKES["topk zero in a list"], MISTAKES["nested list"]):
        with pytest.raises(ValueError) as caught:
            IndexerConfig.from_dict(OmegaConf.create({"num_layers": 4} | settings))
        assert all(fragment in str(caught.value) for fragment in fragments), caught.value


def test_direct_construction_is_as_strict_as_from_dict():
    with pytest.raises(ValueError, match=r"rotate must be true or false, got 'false'"):
        IndexerConfig(num_layers=2, rotate="false")
    with pytest.raises(ValueError, match=r"loss\.coeff must be a finite number"):
        LossConfig(coeff=math.nan)
    with pytest.raises(ValueError, match=r"rope\.theta"):
        RopeConfig(theta="10000")
    with pytest.raises(ValueError, match=r"topk \(layer 2\)"):
        dataclasses.replace(IndexerConfig(num_layers=2, topk=[4, 4]), topk=[4, 0])


def test_missing_layer_count_and_wrong_container_are_named():
    with pytest.raises(ValueError, match="num_layers is missing"):
        IndexerConfig.from_dict({})
    with pytest.raises(ValueError, match=r"IndexerConfig must be a map of settings, got \[1\]"):
        IndexerConfig.from_dict([1])


def test_long_values_are_shortened_in_messages():
    assert len(refusal(compress_ratio="[4]*2+" + "[0]*1+" * 500)) < 500


def test_layer_outside_the_plan_is_refused():
    config = build(num_mtp_layers=1)
    assert config.layer(5).is_mtp
    for number in (0, 6, -1, True):
        with pytest.raises(ValueError, match="layer_number must be a whole number between 1 and 5"):
            config.layer(number)


ATTENTION = {"n_heads": 8, "head_dim": 64, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "rope_dim": 16}


def test_attention_round_trip():
    config = AttentionConfig.from_dict(ATTENTION)
    assert AttentionConfig.from_dict(config.to_dict()) == config == pickle.loads(pickle.dumps(config))
    assert config.rope_theta == 10000.0
    assert hash(copy.deepcopy(config)) == hash(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o_groups": 3}, r"attention\.o_groups must be a divisor of attention\.n_heads \(8\), got 3"),
        ({"rope_dim": 128}, r"attention\.rope_dim must be even and at most attention\.head_dim \(64\), got 128"),
        ({"rope_dim": 15}, r"attention\.rope_dim must be even"),
        ({"n_heads": "8"}, r"attention\.n_heads must be a whole number >= 1, got '8' \(str\)"),
        ({"rope_theta": True}, r"attention\.rope_theta must be a finite number > 1, got True"),
        ({"o_group": 2}, r"attention has an unknown key 'o_group' \(value 2\); did you mean 'o_groups'"),
    ],
)
def test_attention_mistakes(change, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig.from_dict(ATTENTION | change)


def test_attention_names_what_is_missing():
    with pytest.raises(ValueError, match=r"attention\.q_lora_rank is missing"):
        AttentionConfig.from_dict({key: value for key, value in ATTENTION.items() if key != "q_lora_rank"})
