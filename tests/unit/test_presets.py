"""Presets equal the published shapes, compose with Hydra, and accept the documented overrides."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import nemo_v4_indexer.configs
from nemo_v4_indexer.config import AttentionConfig, IndexerConfig, LossConfig, RopeConfig

PRESETS = ("tiny", "v4_flash", "v4_pro", "v32", "glm5")
FOLDER = Path(nemo_v4_indexer.configs.__file__).parent

# (decoder layers, ratios with MTP, top-k, index heads, index head dim, window)
INDEXER = {
    "v4_flash": (43, [0, 0] + [4, 128] * 20 + [4] + [0], 512, 64, 128, 128),
    "v4_pro": (61, [128, 128] + [4, 128] * 29 + [4] + [0], 1024, 64, 128, 128),
    "v32": (61, [1] * 62, 2048, 64, 128, 0),
    "glm5": (78, [1] * 79, 2048, 32, 128, 0),
}
YARN = {"beta_fast": 32, "beta_slow": 1}
ROPE = {
    "v4_flash": RopeConfig(dim=64, theta=160000, factor=16, original_max_position=65536, **YARN),
    "v4_pro": RopeConfig(dim=64, theta=160000, factor=16, original_max_position=65536, **YARN),
    "v32": RopeConfig(dim=64, theta=10000, factor=40, original_max_position=4096, **YARN),
    "glm5": RopeConfig(dim=64, theta=1000000, factor=1, original_max_position=202752, **YARN),
}
# (hidden size, attention heads, query rank)
MODEL = {
    "v4_flash": (4096, 64, 1024),
    "v4_pro": (7168, 128, 1536),
    "v32": (7168, 128, 1536),
    "glm5": (6144, 64, 2048),
}


def composed(name, *overrides):
    with initialize_config_module("nemo_v4_indexer.configs", version_base=None):
        return compose(overrides=[f"+model={name}", f"+indexer={name}", *overrides])


def indexer(name, *overrides):
    return IndexerConfig.from_dict(composed(name, *overrides).indexer)


def test_every_preset_is_tested():
    for group in ("indexer", "model"):
        assert sorted(path.stem for path in (FOLDER / group).glob("*.yaml")) == sorted(PRESETS)


@pytest.mark.parametrize("name", INDEXER)
def test_indexer_equals_the_published_shape(name):
    layers, ratios, topk, heads, dim, window = INDEXER[name]
    config = indexer(name)
    assert (config.num_layers, config.num_mtp_layers) == (layers, 1)
    assert [layer.compress_ratio for layer in config.plan()] == ratios
    assert {layer.topk for layer in config.plan() if layer.has_indexer} == {topk}
    assert (config.n_heads, config.head_dim, config.window, config.heavy_ratio) == (heads, dim, window, 128)
    assert config.rope == ROPE[name]
    assert config.loss == LossConfig() and config.backend == "auto" and config.layers == {}


@pytest.mark.parametrize("name", MODEL)
def test_model_equals_the_published_shape(name):
    model = composed(name).model
    attention = AttentionConfig.from_dict(model.attention)
    assert (model.hidden_size, attention.n_heads, attention.q_lora_rank) == MODEL[name]
    assert attention.head_dim == 512 and attention.rope_dim == 64


def test_v4_output_groups_are_the_published_ones():
    groups = {name: AttentionConfig.from_dict(composed(name).model.attention) for name in ("v4_flash", "v4_pro")}
    assert [(config.o_groups, config.o_lora_rank) for config in groups.values()] == [(8, 1024), (16, 1024)]


def test_tiny_has_every_kind_and_a_real_restriction():
    config = indexer("tiny")
    assert {layer.kind for layer in config.plan()} == {"window", "sparse", "heavy"}
    assert config.warnings_for(512) == []
    for layer in config.plan():
        if layer.has_indexer:
            assert 4 * layer.topk <= 512 // layer.compress_ratio


@pytest.mark.parametrize("name", PRESETS)
def test_files_list_every_key_so_that_overrides_need_no_plus(name):
    settings = yaml.safe_load((FOLDER / "indexer" / f"{name}.yaml").read_text())
    assert set(settings) == {field.name for field in dataclasses.fields(IndexerConfig)}
    assert set(settings["rope"]) == {field.name for field in dataclasses.fields(RopeConfig)}
    assert set(settings["loss"]) == {field.name for field in dataclasses.fields(LossConfig)}
    model = yaml.safe_load((FOLDER / "model" / f"{name}.yaml").read_text())
    assert set(model) == {"hidden_size", "num_layers", "num_mtp_layers", "ffn_hidden_size", "attention"}
    assert set(model["attention"]) == {field.name for field in dataclasses.fields(AttentionConfig)}


@pytest.mark.parametrize("name", PRESETS)
def test_attention_and_indexer_rotate_the_same_channels(name):
    config = composed(name)
    assert config.model.attention.rope_dim == config.indexer.rope.dim


@pytest.mark.parametrize("name", PRESETS)
def test_resolved_preset_survives_save_and_load(name, tmp_path):
    path = tmp_path / "resolved.yaml"
    OmegaConf.save(composed(name), path, resolve=True)
    assert IndexerConfig.from_dict(yaml.safe_load(path.read_text())["indexer"]) == indexer(name)


def test_layer_count_follows_the_model():
    assert len(indexer("v4_flash", "model.num_layers=5").plan()) == 6
    with pytest.raises(ValueError, match="pattern of 2 entries cannot fill 6 decoder layers"):
        indexer("v4_flash", "model.num_layers=6")


def test_public_overrides_need_no_plus():
    config = indexer(
        "v4_flash",
        "indexer.compress_ratio=4",
        "indexer.topk=64",
        "indexer.backend=reference",
        "indexer.loss.coeff=1e-3",
        "indexer.loss.warmup_steps=20",
    )
    assert {layer.compress_ratio for layer in config.plan()} == {4}
    assert (config.topk, config.backend, config.loss) == (64, "reference", LossConfig(coeff=1e-3, warmup_steps=20))
    assert indexer("tiny", "indexer.loss.coeff=null").loss.coeff is None
    assert indexer("tiny", "indexer.topk=[1,2,3,4]").layer(4).topk == 4
    assert indexer("tiny", "indexer.topk={pattern: [5, 6]}").layer(4).topk == 6


@pytest.mark.parametrize("prefix", ["+", "++"])
def test_single_layer_overrides(prefix):
    config = indexer("v4_flash", f"{prefix}indexer.layers.3.topk=64", f"{prefix}indexer.layers.44.compress_ratio=4")
    assert (config.layer(3).topk, config.layer(5).topk) == (64, 512)
    assert config.layer(44).is_mtp and config.layer(44).compress_ratio == 4
    both = indexer("tiny", f"{prefix}indexer.layers.4.topk=8", f"{prefix}indexer.layers.4.compress_ratio=8")
    assert (both.layer(4).topk, both.layer(4).compress_ratio) == (8, 8)


def test_single_layer_override_without_plus_is_answered_by_hydra():
    with pytest.raises(ConfigCompositionException, match=r"use \+indexer\.layers\.3\.topk=64"):
        composed("v4_flash", "indexer.layers.3.topk=64")


def test_change_of_form_on_the_command_line():
    listed = indexer("v4_flash", "~indexer.compress_ratio", f"+indexer.compress_ratio={[4] * 44}")
    assert listed.compress_ratio == (4,) * 44
    patterned = indexer("tiny", "~indexer.compress_ratio", "+indexer.compress_ratio={pattern: [0, 4]}")
    assert [layer.compress_ratio for layer in patterned.plan()] == [0, 4, 0, 4]
    part = indexer("v4_flash", "indexer.compress_ratio.pattern=[4,4]")
    assert [layer.compress_ratio for layer in part.plan()] == [0, 0] + [4] * 41 + [0]


def test_saved_single_layer_override_can_be_overridden_again():
    saved = OmegaConf.create(indexer("v4_flash", "+indexer.layers.3.topk=64").to_dict())
    OmegaConf.set_struct(saved, True)
    OmegaConf.update(saved, "layers.3.topk", 32)
    assert IndexerConfig.from_dict(saved).layer(3).topk == 32


def test_unexpanded_text_on_the_command_line_is_explained():
    with pytest.raises(ValueError, match="not expanded: write the list out"):
        indexer("tiny", "indexer.compress_ratio='[0]*2+[4]*2'")
