"""AutoModel's YAML files, its own builders and checkpoints, and the gate on its version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "nemo_automodel", reason="nemo-automodel 0.7.0 is not installed: pip install 'nemo-v4-indexer[automodel]'"
)

import torch
import yaml
from nemo_automodel._transformers.registry import ModelRegistry
from nemo_automodel.components.config import loader
from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config
from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM
from nemo_automodel.components.utils.model_utils import init_empty_weights
from nemo_automodel.recipes._dist_utils import parse_distributed_section
from nemo_automodel.recipes._typed_config import RecipeConfig
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from tiny_v4 import CONFIG, build, compressors

import nemo_v4_indexer
from nemo_v4_indexer.integrations import automodel, automodel_host
from nemo_v4_indexer.weights import export_indexer_weights, find_indexers, load_indexer_weights

PACKAGE = Path(nemo_v4_indexer.__file__).parent
RECIPES = PACKAGE / "configs" / "automodel"
EXAMPLES = PACKAGE.parent / "examples"
FLASH = dict(
    model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"], num_hidden_layers=43, hidden_size=4096,
    num_nextn_predict_layers=1, compress_ratios=[0, 0] + [4, 128] * 20 + [4, 0], index_topk=512, index_n_heads=64,
    index_head_dim=128, compress_rope_theta=160000, some_future_key=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def user_modules(monkeypatch):
    monkeypatch.setattr(loader, "ENABLE_USER_MODULES", True)  # NEMO_ENABLE_USER_MODULES=1


@pytest.fixture
def flash(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    return tmp_path


def changed(tmp_path, **sections):
    """v4_tiny.yaml with keys of its model section changed."""
    settings = yaml.safe_load((RECIPES / "v4_tiny.yaml").read_text())
    for name, value in sections.items():
        settings["model"][name] |= value
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(settings))
    return loader.load_yaml_config(path)


@pytest.mark.parametrize("name", ["v4_tiny", "v4_4layer", "v4_flash"])
def test_recipes_are_complete(name):
    """Every typed section resolves as AutoModel's recipe resolves it; the recipe object takes the config."""
    config = RecipeConfig(loader.load_yaml_config(RECIPES / f"{name}.yaml"))
    recipe = TrainFinetuneRecipeForNextTokenPrediction(config)
    assert isinstance(recipe.cfg.optimizer, automodel.AdamW)
    assert config.step_scheduler.max_steps and config.loss_fn and config.checkpoint and config.dataloader
    assert config.freeze_config is None and config.recipe == type(recipe).__name__
    assert parse_distributed_section(config.distributed.to_dict())["strategy_config"] is not None


def test_recipes_are_all_tested():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {"v4_tiny", "v4_4layer", "v4_flash"}


def test_tiny_recipe_builds_its_model():
    config = loader.load_yaml_config(RECIPES / "v4_tiny.yaml")
    model = config.model.instantiate()
    assert isinstance(model, DeepseekV4ForCausalLM)
    assert [(i.layer.layer_number, i.layer.topk) for i in find_indexers(model)] == [(2, 6), (4, 4)]
    assert model.config.v4_indexer["layers"] == {"4": {"topk": 4}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"v4_indexer": {"topkk": 3}}, "v4_indexer has an unknown key 'topkk'"),
        ({"v4_indexer": {"topk": [1, 2, 3]}}, "topk has 3 entries, expected 4"),
        ({"v4_indexer": {"rotate": "perhaps"}}, "rotate must be true or false, got 'perhaps'"),
        ({"config": {"index_topkk": 3}}, "model.config has an unknown key 'index_topkk'"),
        ({"config": {"compress_ratios": [0, 4, 4]}}, "compress_ratio has 3 entries, expected 4"),
    ],
)
def test_mistakes_stop_the_recipe_before_anything_is_built(tmp_path, sections, said):
    with pytest.raises(ValueError, match=said):
        changed(tmp_path, **sections).model.instantiate()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("indexer_only", "yes please", "optimizer.indexer_only must be true or false"),
        ("log_every", -1, "optimizer.log_every must be a whole number >= 0, got -1"),
        ("lr_", 1.0, "lr_"),
    ],
)
def test_mistakes_in_the_optimizer_are_named(key, value, said):
    config = loader.load_yaml_config(RECIPES / "v4_tiny.yaml")
    config.set_by_dotted(f"optimizer.{key}", value)
    with pytest.raises((ValueError, TypeError), match=said):
        RecipeConfig(config).optimizer  # noqa: B018 - resolved on access


@pytest.mark.parametrize("name", ["v4_4layer", "v4_flash"])
def test_large_recipes_describe_their_model(name, flash):
    config = loader.load_yaml_config(RECIPES / f"{name}.yaml")
    if name == "v4_flash":
        config.model.config.source = str(flash)
    made = config.model.config.instantiate()
    assert made.architectures == [automodel.ARCHITECTURE] and made.v4_indexer["topk"] == 512
    assert ModelRegistry.resolve_custom_model_cls(made.architectures[0], made) is automodel.V4IndexerForCausalLM
    layers = made.num_hidden_layers
    assert len(made.compress_ratios) == layers == {"v4_4layer": 4, "v4_flash": 43}[name]
    assert made.name_or_path == ("" if name == "v4_4layer" else str(flash))
    if name == "v4_4layer":
        with init_empty_weights():  # as AutoModel's entry point builds it, shards it, and only then allocates
            model = automodel.V4IndexerForCausalLM.from_config(made, backend=config.model.backend.instantiate())
        assert all(p.is_meta for p in model.parameters())
        assert [i.layer.layer_number for i in find_indexers(model)] == [2, 4]


def test_checkpoint_configs_keep_the_indexer(tmp_path):
    config = automodel.indexed_config(CONFIG, {"topk": 3, "layers": {2: {"topk": 2}}, "loss": {"coeff": 0.5}})
    config.save_pretrained(tmp_path)
    again = automodel.indexed_config(tmp_path)
    assert again.v4_indexer == config.v4_indexer
    with init_empty_weights():
        model = automodel.V4IndexerForCausalLM(again)
    assert [i.layer.topk for i in find_indexers(model)] == [2, 3]
    assert find_indexers(model)[0].layer.loss.coeff == 0.5


def test_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint config at"):
        automodel.indexed_config(tmp_path)
    with pytest.raises(TypeError, match="mapping, a path or a DeepseekV4Config, got int"):
        automodel.indexed_config(3)
    with pytest.raises(ValueError, match="dtype must be one of bfloat16, float32, got 'fp8'"):
        automodel.build_model(CONFIG, dtype="fp8")


def test_install_checks_the_ratios():
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**CONFIG))
    with pytest.raises(ValueError, match="layer 1 of the model has compress_ratio 0, the config says 4"):
        automodel.install_indexers(model, {"compress_ratio": [4, 4, 4, 0]})
    assert [i.layer.layer_number for i in automodel.install_indexers(model, {"topk": 3})] == [2, 3]
    assert find_indexers(model) == automodel.install_indexers(model, {"topk": 3})  # once is enough


def test_names_and_weights_stay_those_of_the_checkpoint():
    """AutoModel's own adapter, and this package's weights module, name the same tensors the same way."""
    model, stock = build(), DeepseekV4ForCausalLM(DeepseekV4Config(**CONFIG))
    assert list(model.state_dict()) == list(stock.state_dict())
    public = model.state_dict_adapter.to_hf(model.state_dict(), quantization=False)
    public = {name: tensor for name, tensor in public.items() if ".indexer." in name}
    exported = export_indexer_weights(model)
    assert public.keys() == exported.keys()
    assert all(torch.equal(public[name], tensor) for name, tensor in exported.items())
    other = build(seed=3)
    load_indexer_weights(other, public)
    own = [c.indexer.state_dict() for m in (model, other) for c in compressors(m).values()]
    assert all(torch.equal(own[i][name], own[i + 2][name]) for i in (0, 1) for name in own[0])


def test_another_version_or_a_moved_symbol_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(automodel_host, "version", lambda name: "0.8.1")
        with pytest.raises(ImportError, match=r"supports nemo-automodel 0\.7\.x, found 0\.8\.1"):
            automodel_host.resolve("DeepseekV4Attention")
    monkeypatch.setitem(automodel_host._SYMBOLS, "DeepseekV4Attention", "nemo_automodel.components.models.moved")
    with pytest.raises(ImportError, match=r"has no usable nemo_automodel\.components\.models\.moved\.DeepseekV4Att"):
        automodel_host.resolve("DeepseekV4Attention")


@pytest.mark.slow
def test_example_runs():
    command = [sys.executable, str(EXAMPLES / "swap_into_automodel.py"), "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "12 indexer parameters that AutoModel had frozen now train" in done.stderr
    assert "step 10: indexer_loss" in done.stderr and "step 10: lm_loss" in done.stdout
