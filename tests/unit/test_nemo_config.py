"""NeMo configurations: composed by Hydra alone (no NeMo needed), strictly checked, the same after YAML."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import nemo_v4_indexer
from nemo_v4_indexer.config import IndexerConfig
from nemo_v4_indexer.integrations.nemo_config import NemoModelConfig, check_sections
from nemo_v4_indexer.training.errors import UsageError

FOLDER = Path(nemo_v4_indexer.__file__).parent / "configs"
SEARCH = "hydra.searchpath=[pkg://nemo_v4_indexer.configs]"
OWN = "name: mine\ntrainer: {}\nexp_manager: {}\nmodel: {num_layers: 43}\n"


def composed(name="v4_tiny", *overrides, folder=FOLDER / "nemo"):
    with initialize_config_dir(str(folder), version_base=None):
        return OmegaConf.to_container(compose(name, overrides=list(overrides)), resolve=True)


def read(*overrides, name="v4_tiny"):
    return NemoModelConfig.from_dict(composed(name, *overrides)["model"])


@pytest.mark.parametrize("path", sorted((FOLDER / "nemo").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_resolves(path):
    values = composed(path.stem)
    check_sections(values)
    config = NemoModelConfig.from_dict(values["model"])
    assert config.indexer.num_layers == config.sizes.num_layers
    assert values["name"] == path.stem
    again = yaml.safe_load(OmegaConf.to_yaml(OmegaConf.create(values)))
    assert NemoModelConfig.from_dict(again["model"]) == config


@pytest.mark.parametrize("name", sorted(path.stem for path in (FOLDER / "nemo_v4_indexer").glob("*.yaml")))
def test_group_turns_any_configuration_on(tmp_path, name):
    """The host's file knows nothing of this package."""
    layers = {"tiny": 4, "v4_flash": 43, "v4_pro": 61, "v32": 61, "glm5": 78}[name]
    (tmp_path / "host.yaml").write_text(OWN)
    overrides = [SEARCH, f"+nemo_v4_indexer={name}", f"model.num_layers={layers}", "model.v4_indexer.topk=9"]
    number = 4 if name == "tiny" else 3
    values = composed("host", *overrides, f"+model.v4_indexer.layers.{number}.topk=7", folder=tmp_path)
    config = IndexerConfig.from_dict(values["model"]["v4_indexer"])
    assert (config.num_layers, config.num_mtp_layers, config.topk) == (layers, 0, 9)
    preset = yaml.safe_load((FOLDER / "indexer" / f"{name}.yaml").read_text())
    if name.startswith("v4_"):
        preset["compress_ratio"]["mtp"] = []
    preset |= {"num_layers": layers, "num_mtp_layers": 0, "topk": 9, "layers": {number: {"topk": 7}}}
    assert config == IndexerConfig.from_dict(preset)
    assert composed("host", folder=tmp_path)["model"] == {"num_layers": 43}


@pytest.mark.parametrize("name", ["v4_flash", "v4_pro"])
def test_layer_without_an_indexer_takes_no_topk(tmp_path, name):
    (tmp_path / "host.yaml").write_text(OWN)
    values = composed("host", SEARCH, f"+nemo_v4_indexer={name}", "+model.v4_indexer.layers.1.topk=7", folder=tmp_path)
    with pytest.raises(ValueError, match=r"layers\.1\.topk"):
        IndexerConfig.from_dict(values["model"]["v4_indexer"])


def test_on_off_and_single_layers():
    on, off = read(), read("model.v4_indexer=null")
    assert [layer.kind for layer in on.indexer.plan()] == ["window", "sparse", "heavy", "sparse"]
    assert read("~nemo_v4_indexer", "model.v4_indexer=null") == read(name="gpt_tiny") == off
    assert {(layer.kind, layer.window) for layer in off.indexer.plan()} == {("window", 256)}  # the whole sequence
    changed = read("+model.v4_indexer.layers.4.topk=8", "+model.v4_indexer.layers.3.compress_ratio=8").indexer
    assert (changed.layer(4).topk, changed.layer(3).kind) == (8, "sparse")
    assert changed.layer(2) == on.indexer.layer(2)
    assert read("+nemo_v4_indexer=tiny", name="gpt_tiny").indexer.layer(2).topk == 16


def test_own_section_needs_no_layer_count():
    values = composed("gpt_tiny")["model"]
    values["v4_indexer"] = {
        "compress_ratio": [0, 4, 4, 4],
        "topk": 3,
        "n_heads": 4,
        "head_dim": 32,
        "rope": {"dim": 16},
    }
    assert NemoModelConfig.from_dict(values).indexer.layer(4).topk == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+model.v4_indexer.topkk=3", ["model.v4_indexer", "'topkk'", "did you mean 'topk'"]),
        ("+model.v4_indexr.topk=3", ["model.v4_indexr", "did you mean model.v4_indexer?"]),
        ("model.v4_indexer=3", ["v4_indexer", "a group of keys", "3"]),
        ("model.v4_indexer.topk=[1,2]", ["model.v4_indexer.topk", "2 entries, expected 4"]),
        ("model.v4_indexer.topk='8'", ["model.v4_indexer.topk", "write 8 without quotes"]),
        ("model.v4_indexer.rotate='false'", ["model.v4_indexer.rotate", "true or false"]),
        ("model.v4_indexer.loss.coeff=-1", ["model.v4_indexer", "loss.coeff"]),
        ("+model.v4_indexer.layers.9.topk=2", ["model.v4_indexer.layers", "9"]),
        ("model.v4_indexer.num_layers=5", ["model.v4_indexer", "5"]),
        ("model.attention.n_heads=3", ["model.attention.o_groups", "n_heads"]),
        ("+model.heads=3", ["model.heads"]),
        ("model.hidden_size=1.5", ["model.hidden_size", "an integer"]),
        ("model.num_mtp_layers=1", ["model.num_mtp_layers must be 0"]),
        ("model.data.source=books", ["data.source", "stdlib"]),
        ("+model.data.length=3", ["model.data.length"]),
        ("model.train_ds.batch_size=0", ["model.train_ds.batch_size", "at least 1"]),
        ("~model.train_ds", ["model.train_ds"]),
        ("model.validation_ds.batches=many", ["model.validation_ds.batches", "an integer"]),
        ("model.freeze_main=1", ["model.freeze_main", "true or false"]),
        ("+models.x=1", ["models", "did you mean model?"]),
        ("~trainer", ["no trainer"]),
    ],
)
def test_mistakes_name_the_key(override, said):
    values = composed("v4_tiny", override)
    with pytest.raises(UsageError) as error:
        check_sections(values)
        NemoModelConfig.from_dict(values["model"])
    assert all(part in str(error.value) for part in said), error.value


def test_freezing_needs_a_dense_stage():
    assert read("model.freeze_main=true").freeze_main
    with pytest.raises(UsageError, match=r"model\.freeze_main=true needs"):
        read("model.freeze_main=true", "model.v4_indexer=null")


def test_example_shows_the_plan():
    command = [sys.executable, FOLDER.parent.parent / "examples" / "nemo_config.py", "model.v4_indexer.topk=64"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "layer 3: sparse, ratio 4, topk 64" in result.stdout and "layer 4: heavy, ratio 128" in result.stdout
    mistake = subprocess.run([*command, "+model.v4_indexer.topkk=1"], capture_output=True, text=True, timeout=120)
    assert mistake.returncode != 0 and "did you mean 'topk'" in mistake.stderr
