"""Checkpoint configs as published: DeepSeek-V4 (three spellings), V3.2, GLM-5, and the ones that must be refused."""

import json
import re

import pytest

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig, RopeConfig

YARN16 = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": YARN16,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
}
V32 = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GLM5 = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "head_dim": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_v4_flash():
    config = IndexerConfig.from_hf(FLASH)
    assert (config.num_layers, config.num_mtp_layers) == (43, 1)
    assert [layer.compress_ratio for layer in config.plan()] == FLASH["compress_ratios"]
    assert (config.topk, config.n_heads, config.head_dim, config.window) == (512, 64, 128, 128)
    assert config.rope == RopeConfig(
        dim=64, theta=160000, factor=16, original_max_position=65536, beta_fast=32, beta_slow=1
    )
    assert AttentionConfig.from_hf(FLASH) == AttentionConfig(
        n_heads=64, head_dim=512, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, rope_dim=64, rope_theta=10000
    )


def test_megatron_spelling_of_the_ratios():
    renamed = without(FLASH, "compress_ratios") | {"csa_compress_ratios": FLASH["compress_ratios"]}
    assert IndexerConfig.from_hf(renamed) == IndexerConfig.from_hf(FLASH)
    with pytest.raises(ValueError, match="compress_ratios and csa_compress_ratios disagree"):
        IndexerConfig.from_hf(FLASH | {"csa_compress_ratios": [4] * 44})


def test_transformers_spelling_of_v4():
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    saved = without(FLASH, "compress_ratios", "rope_scaling", "rope_theta", "compress_rope_theta", "qk_rope_head_dim")
    saved |= {
        "layer_types": [kinds[ratio] for ratio in FLASH["compress_ratios"][:43]],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000},
            "compress": without(YARN16, "type") | {"rope_type": "yarn", "rope_theta": 160000},
        },
    }
    with pytest.raises(ValueError, match=r"layer_types has 43 entries, expected 44: .*pass num_mtp_layers"):
        IndexerConfig.from_hf(saved)
    assert IndexerConfig.from_hf(saved, num_mtp_layers=0) == IndexerConfig.from_hf(FLASH, num_mtp_layers=0)
    assert AttentionConfig.from_hf(saved) == AttentionConfig.from_hf(FLASH)
    with pytest.raises(ValueError, match=r"layer_types \(layer 2\) must be sliding_attention or one of"):
        IndexerConfig.from_hf(saved | {"layer_types": ["sliding_attention", "full_attention"]}, num_mtp_layers=0)


def test_heavy_rate_of_the_checkpoint_moves_the_border():
    saved = without(FLASH, "compress_ratios") | {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    }
    assert [layer.kind for layer in IndexerConfig.from_hf(saved).plan()] == ["sparse", "heavy"]


def test_inference_spelling_of_v4():
    short = {
        "n_layers": 43,
        "n_mtp_layers": 1,
        "n_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "rope_head_dim": 64,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "window_size": 128,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_factor": 16,
        "original_seq_len": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
        "compress_ratios": FLASH["compress_ratios"],
    }
    assert IndexerConfig.from_hf(short) == IndexerConfig.from_hf(FLASH)
    assert AttentionConfig.from_hf(short) == AttentionConfig.from_hf(FLASH)


def test_v32_and_glm5_have_ratio_one_and_no_window():
    v32, glm5 = IndexerConfig.from_hf(V32), IndexerConfig.from_hf(GLM5)
    assert {layer.compress_ratio for layer in v32.plan() + glm5.plan()} == {1}
    assert v32.window == glm5.window == 0
    assert (len(v32.plan()), len(glm5.plan())) == (62, 79)
    assert (v32.n_heads, v32.topk, glm5.n_heads, glm5.topk) == (64, 2048, 32, 2048)
    assert v32.rope == RopeConfig(theta=10000, factor=40, original_max_position=4096)
    assert (glm5.rope.theta, glm5.rope.factor) == (1000000.0, 1.0)
    for config in (V32, GLM5):
        with pytest.raises(ValueError, match=r"kv_lora_rank=512 without o_groups.*multi-head latent attention"):
            AttentionConfig.from_hf(config)


def test_mtp_count_can_be_overridden():
    assert len(IndexerConfig.from_hf(FLASH, num_mtp_layers=0).plan()) == 43
    longer = FLASH | {"compress_ratios": [*FLASH["compress_ratios"], 0, 0]}
    with pytest.raises(ValueError, match="compress_ratios has 46 entries, expected 44"):
        IndexerConfig.from_hf(longer)
    assert len(IndexerConfig.from_hf(longer, num_mtp_layers=3).plan()) == 46
    assert IndexerConfig.from_hf(longer, num_mtp_layers=1) == IndexerConfig.from_hf(FLASH)
    with pytest.raises(ValueError, match="compress_ratios has 44 entries, expected 45"):
        IndexerConfig.from_hf(FLASH, num_mtp_layers=2)


def test_file_folder_and_nested_text_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "wrapper", "text_config": FLASH}))
    expected = IndexerConfig.from_hf(FLASH)
    assert IndexerConfig.from_hf(path) == IndexerConfig.from_hf(str(tmp_path)) == expected
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "other")) + ".*expected a config.json"):
        IndexerConfig.from_hf(tmp_path / "other")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        IndexerConfig.from_hf(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="a JSON object"):
        IndexerConfig.from_hf(path)
    with pytest.raises(ValueError, match=r"source must be a mapping, the path .*got 3"):
        IndexerConfig.from_hf(3)


REQUIRED = ["num_hidden_layers", "index_topk", "index_n_heads", "index_head_dim", "qk_rope_head_dim"]


@pytest.mark.parametrize("key", [*REQUIRED, "compress_rope_theta", "sliding_window", "compress_ratios"])
def test_v4_key_without_a_safe_default_is_named(key):
    with pytest.raises(ValueError, match=rf"the checkpoint config has no {key}.*no safe default"):
        IndexerConfig.from_hf(without(FLASH, key))


@pytest.mark.parametrize("key", [*REQUIRED, "rope_theta"])
def test_v32_key_without_a_safe_default_is_named(key):
    with pytest.raises(ValueError, match=rf"the checkpoint config has no {key}.*no safe default"):
        IndexerConfig.from_hf(without(V32, key))


@pytest.mark.parametrize(
    "key", ["num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "rope_theta"]
)
def test_attention_key_without_a_default_is_named(key):
    with pytest.raises(ValueError, match=rf"the checkpoint config has no {key}"):
        AttentionConfig.from_hf(without(FLASH, key))


def test_the_main_base_never_stands_in_for_the_compressed_one():
    flat = without(FLASH, "compress_rope_theta", "rope_theta") | {
        "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}
    }
    with pytest.raises(ValueError, match="no compress_rope_theta"):
        IndexerConfig.from_hf(flat)


def test_window_only_checkpoint_needs_no_indexer_keys():
    bare = {"num_hidden_layers": 2, "compress_ratios": [0, 0], "sliding_window": 64}
    config = IndexerConfig.from_hf(bare)
    assert [layer.kind for layer in config.plan()] == ["window", "window"]
    assert config.window == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": YARN16 | {"type": "linear"}}, r"rope_scaling\.type must be yarn or default, got 'linear'"),
        ({"rope_scaling": without(YARN16, "type")}, r"rope_scaling\.type must be yarn or default, got None"),
        ({"rope_scaling": without(YARN16, "factor")}, "rope_scaling has no factor"),
        (
            {"rope_scaling": without(YARN16, "original_max_position_embeddings")},
            "rope_scaling has no original_max_position_embeddings",
        ),
        ({"rope_scaling": 16}, "rope_scaling must be a map or null, got 16"),
        ({"compress_ratios": "[0]*2+[4]*42"}, r"compress_ratios must be .*not expanded"),
        (
            {"compress_ratios": [0, -4] + [4] * 42},
            r"compress_ratios\[1\] \(layer 2\) must be a whole number >= 0, got -4",
        ),
        ({"index_topk": "512"}, r"topk must be .*got '512' \(str\)"),
        ({"index_topk": 0}, r"topk \(layer 3\) must be >= 1"),
        ({"num_hidden_layers": 43.0}, r"num_hidden_layers must be a whole number >= 1, got 43\.0"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a whole number >= 0, got -1"),
        ({"indexer_types": ["full", "full", "shared"]}, r"indexer_types \(layer 3\) must be full"),
        ({"index_topk_freq": 4}, "index_topk_freq must be 1"),
        ({"index_source_layer_ids": [2, 8]}, "index_source_layer_ids must be absent"),
        ({"index_kpool": 4}, "index_kpool must be 1"),
    ],
)
def test_what_would_compute_something_else_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        IndexerConfig.from_hf(FLASH | change)


def test_yarn_betas_default_and_no_scaling_means_plain_rope():
    short = {key: YARN16[key] for key in ("type", "factor", "original_max_position_embeddings")}
    assert IndexerConfig.from_hf(FLASH | {"rope_scaling": short}) == IndexerConfig.from_hf(FLASH)
    assert IndexerConfig.from_hf(FLASH | {"rope_scaling": None}).rope.factor == 1.0
