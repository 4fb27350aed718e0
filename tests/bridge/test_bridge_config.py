"""Recipes, overrides and YAML of the Bridge integration, on Megatron-Bridge's real configuration classes.

Compiled packages (see conftest.py) are stand-ins: no model is trained here.
"""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron-bridge 0.6.2 is not installed", allow_module_level=True)

import yaml
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.omegaconf_utils import OverridesError
from omegaconf.errors import OmegaConfBaseException

import nemo_v4_indexer
from nemo_v4_indexer.integrations import bridge
from nemo_v4_indexer.integrations.megatron_config import settings_of

CONFIGS = Path(nemo_v4_indexer.__file__).parent / "configs" / "bridge"
SMALL = "v4_4layer_pretrain_8gpu_h100_bf16_config"


@pytest.mark.parametrize("name", sorted(bridge.RECIPES))
def test_recipes_resolve_and_are_named_as_bridge_names_them(name, capsys):
    assert bridge.main([name, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed[printed.index("_target_:") :] if not printed.startswith("_") else printed)
    assert values["model"]["v4_indexer"]["num_layers"] == values["model"]["num_layers"]
    config = bridge.configure(name)
    config.model.finalize()
    assert config.model.activation_func.__name__ == "silu"
    indexer, attention = settings_of(config.model)
    assert indexer.warnings_for(config.model.seq_length) == []
    assert attention.n_heads % config.model.tensor_model_parallel_size == 0


def test_overrides_reach_single_layers():
    overrides = ["model.v4_indexer.topk=256", "+model.v4_indexer.layers.2.topk=128", "train.train_iters=7"]
    config = bridge.configure(SMALL, overrides=overrides)
    indexer, _ = settings_of(config.model)
    assert [layer.topk for layer in indexer.plan()] == [0, 128, 0, 256] and config.train.train_iters == 7


def test_yaml_file_and_round_trip(tmp_path):
    path = tmp_path / "all.yaml"
    assert bridge.main([SMALL, "--config-file", str(CONFIGS / "dense_warmup.yaml"), "--to-yaml", str(path)]) == 0
    restored = ConfigContainer.from_yaml(str(path))
    assert type(restored.model) is bridge.V4ModelProvider and restored.train.train_iters == 10000
    first = bridge.configure(SMALL, CONFIGS / "dense_warmup.yaml")
    assert settings_of(restored.model) == settings_of(first.model)
    assert settings_of(restored.model)[0].loss.warmup_steps == 1000


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("+model.v4_indexer.topkk=3", ValueError, "unknown key 'topkk'"),
        ("model.v4_indexer.topk=[1,2]", ValueError, "2 entries, expected 4"),
        ("model.v4_indexer.rotate='false'", ValueError, "rotate must be true or false"),
        ("model.num_layers=5", ValueError, "v4_indexer.num_layers is 4, but num_layers is 5"),
        ("model.v4_indexr.topk=3", OverridesError, "v4_indexr"),
    ],
)
def test_mistakes_in_overrides_are_named(override, error, said):
    with pytest.raises(error, match=said):
        bridge.configure(SMALL, overrides=[override])


def test_mistakes_in_a_file_are_named(tmp_path):
    """Bridge alone warns of unknown keys in a file and goes on."""
    path = tmp_path / "mine.yaml"
    path.write_text("train: {train_itres: 3}\n")
    with pytest.raises(OmegaConfBaseException, match="train_itres"):
        bridge.configure(SMALL, path)
    path.write_text("model: {v4_indexer: {topkk: 3}}\n")
    with pytest.raises(ValueError, match="unknown key 'topkk'"):
        bridge.configure(SMALL, path)
    path.write_text("model: {v4_indexer: {layers: {2: {topk: 9}}}}\n")
    assert settings_of(bridge.configure(SMALL, path).model)[0].layer(2).topk == 9


@pytest.mark.parametrize(
    ("override", "said"),
    [("model.mtp_num_layers=1", "mtp_num_layers"), ("model.position_embedding_type=rope", "'none'")],
)
def test_what_bridge_would_do_itself_is_refused(override, said):
    with pytest.raises(ValueError, match=said):
        bridge.configure(SMALL, overrides=[override]).model.finalize()
