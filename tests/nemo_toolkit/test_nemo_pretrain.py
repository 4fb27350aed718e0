"""A NeMo application on a CPU: the command, on and off by configuration, exp_manager's folders, resuming.

Needs an environment of its own: `pip install '.[nemo,test]'`, then `pytest tests/nemo_toolkit`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Not "nemo" alone, which any folder of that name would satisfy.
pytest.importorskip("nemo.core.config", reason="nemo-toolkit 3.0.0 is not installed: pip install '.[nemo,test]'")

import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

import nemo_v4_indexer
from nemo_v4_indexer.integrations import nemo
from nemo_v4_indexer.training import cli
from nemo_v4_indexer.training.errors import UsageError

PACKAGE = Path(nemo_v4_indexer.__file__).parent
EXAMPLE = PACKAGE.parent / "examples" / "nemo_pretrain.py"
QUICK = (
    "trainer.max_steps=3", "trainer.val_check_interval=3", "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1", "model.data.sequence_length=64", "model.validation_ds.batches=1",
    "exp_manager.create_tensorboard_logger=false", "exp_manager.checkpoint_callback_params.every_n_train_steps=3",
)  # fmt: skip
SHORT = ("model.v4_indexer.loss.warmup_steps=1", "model.v4_indexer.window=8")


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {n} of a small book, {n * n}.\n" for n in range(400)))
    return ("model.data.source=text_file", f"model.data.path={path}")


def composed(*overrides, name="v4_tiny"):
    with initialize_config_dir(str(PACKAGE / "configs" / "nemo"), version_base=None):
        return compose(name, overrides=list(overrides))


@pytest.fixture
def pretrain(tmp_path, book, monkeypatch):
    def call(output, *overrides):
        monkeypatch.delenv("NEMO_EXPM_VERSION", raising=False)  # exp_manager leaves the run's version there
        return nemo.pretrain(composed(*QUICK, *book, f"exp_manager.exp_dir={tmp_path / output}", *overrides))

    return call


def records(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in rows]


def of_steps(folder):
    return [row for row in records(folder) if "lm_loss" in row]


def command(tmp_path, output, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("NEMO_EXPM_VERSION", None)
    run = [sys.executable, str(EXAMPLE), *arguments, f"exp_manager.exp_dir={tmp_path / output}"]
    result = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    return result, next((tmp_path / output).glob("**/metrics.jsonl"), None)


@pytest.mark.slow
def test_command_line_on_off_and_one_layer(tmp_path, book):
    rows = {}
    for output, change in {
        "on": [],
        "off": ["model.v4_indexer=null"],
        "layer": ["+model.v4_indexer.layers.4.compress_ratio=8", "+model.v4_indexer.layers.4.topk=2"],
    }.items():
        keep = [item for item in SHORT if output != "off"]
        result, path = command(tmp_path, output, *QUICK, *book, *keep, *change)
        assert result.returncode == 0, result.stderr
        rows[output] = of_steps(path.parent)[-1]
    assert rows["on"]["indexer_loss"] > 0 and 0 < rows["on"]["recall"] <= 1
    assert {name for name in rows["on"] if name.startswith("layer_2/")}
    assert rows["off"]["indexer_loss"] is None and rows["off"]["recall"] is None
    assert not any(name.startswith("layer_") for name in rows["off"])
    same, other = (f"layer_{n}/recall_random" for n in (2, 4))
    assert rows["layer"][same] == rows["on"][same] and rows["layer"][other] != rows["on"][other]
    assert len({row["lm_loss"] for row in rows.values()}) == 3


@pytest.mark.slow
def test_own_configuration_is_enabled_through_the_search_path(tmp_path, book):
    own = OmegaConf.to_container(composed(*QUICK, *book, "trainer.max_steps=1", name="gpt_tiny"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.yaml").write_text(yaml.safe_dump(own))
    where = ["--config-path", str(tmp_path / "mine"), "--config-name", "mine"]
    search = "hydra.searchpath=[pkg://nemo_v4_indexer.configs]"
    turned_on = [search, "+nemo_v4_indexer=tiny", "model.v4_indexer.topk=2", "+model.v4_indexer.layers.4.topk=3"]
    result, path = command(tmp_path, "on", *where, *turned_on, *SHORT)
    assert result.returncode == 0, result.stderr
    assert of_steps(path.parent)[0]["indexer_loss"] > 0
    kept = yaml.safe_load((path.parent / "checkpoints" / "config.yaml").read_text())["model"]["v4_indexer"]
    assert kept["topk"] == 2 and kept["layers"] == {"4": {"topk": 3}} and kept["num_layers"] == 4
    result, path = command(tmp_path, "bad", *where, *turned_on, "+model.v4_indexer.topkk=3")
    assert result.returncode != 0 and "unknown key 'topkk'" in result.stderr and path is None


def test_exp_managers_folder(pretrain, tmp_path):
    folder = pretrain("a", *SHORT)
    assert folder == tmp_path / "a" / "v4_tiny" / "version_0"
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert "config.yaml" in names and any(name.endswith("last.ckpt") for name in names)
    kept = OmegaConf.load(folder / "checkpoints" / "config.yaml")
    assert kept.trainer.max_steps == 3 and kept.model.v4_indexer.loss.warmup_steps == 1
    rows = records(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert rows[0]["recall"] is None and 0 < rows[2]["recall"] <= 1  # dense stage, then sparse
    assert 0 < rows[3]["val_recall"] <= 1 and rows[3]["val_lm_loss"] > 0


def test_same_numbers_as_the_embedded_engine(pretrain, tmp_path, book):
    """Same model, data and loss; the schedules differ, so the rate is constant and the same on both sides."""
    rate = ("~model.optim.sched", "model.optim.lr=1e-3", "trainer.accumulate_grad_batches=2")
    ours = of_steps(pretrain("nemo", *SHORT, *rate, "model.train_ds.batch_size=2"))
    config = [text.removeprefix("model.").replace("v4_indexer", "indexer") for text in (*SHORT, *book)]
    train = dict(steps=3, batch_size=4, micro_batch_size=2, lr=1e-3, min_lr=1e-3, lr_warmup_steps=0, eval_batches=0)
    arguments = [f"train.{name}={value}" for name, value in train.items()]
    sizes = ["data.sequence_length=64", "device=cpu", "indexer.topk=4", "indexer.loss.coeff=1.0"]
    assert cli.run([*sizes, *config, *arguments, "data=text_file", f"output_dir={tmp_path / 'embedded'}"]) == 0
    theirs = of_steps(tmp_path / "embedded")
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("lm_loss", "indexer_loss", "grad_norm", "layer_4/indexer_loss"):
            assert mine[name] == pytest.approx(other[name], rel=2e-4), (mine["step"], name)
        for name in ("recall", "recall_random"):
            dense = mine["step"] == 1  # selects nothing
            assert mine[name] == (None if dense else pytest.approx(other[name], rel=2e-2)), (mine["step"], name)


def saved(path):
    """(step, weights) of a checkpoint."""
    state = torch.load(path, weights_only=False)
    return state["global_step"], {key: value for key, value in state["state_dict"].items() if value is not None}


def test_resumed_run_is_the_unbroken_one(pretrain, tmp_path):
    steady = (*SHORT, "~model.optim.sched", "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=4")
    every = "exp_manager.checkpoint_callback_params.every_n_train_steps=2"
    whole = pretrain("whole", *steady, every, "trainer.max_steps=4")
    again = "exp_manager.resume_if_exists=true"
    first = pretrain("broken", *steady, every, again, "trainer.max_steps=2")
    broken = pretrain("broken", *steady, every, again, "trainer.max_steps=4")
    assert first == broken == tmp_path / "broken" / "v4_tiny" and (broken / "run_0" / "metrics.jsonl").is_file()
    assert [row["step"] for row in of_steps(broken)] == [1, 2, 3, 4]
    assert of_steps(whole) == of_steps(broken)
    states = [saved(next((folder / "checkpoints").glob("*last.ckpt"))) for folder in (whole, broken)]
    assert states[0][0] == states[1][0] == 4
    assert all(torch.equal(value, states[1][1][key]) for key, value in states[0][1].items())


def test_only_indexers_train_in_a_frozen_dense_stage(pretrain):
    save = ("exp_manager.checkpoint_callback_params.every_n_train_steps=1",)
    keep = ("exp_manager.checkpoint_callback_params.save_top_k=3", "model.v4_indexer.loss.warmup_steps=2")
    folder = pretrain("a", "model.freeze_main=true", *save, *keep)
    steps = dict(saved(path) for path in (folder / "checkpoints").glob("*epoch=0.ckpt"))

    def moved(before, after):
        return {key for key in steps[before] if not torch.equal(steps[before][key], steps[after][key])}

    indexers = {key for key in steps[1] if ".indexer." in key}
    assert indexers and moved(1, 2) == indexers
    assert moved(2, 3) > indexers


def test_off_has_no_indexer_and_attends_to_everything(pretrain):
    folder = pretrain("a", "model.v4_indexer=null", "trainer.max_steps=1", "+trainer.limit_val_batches=0")
    kept = OmegaConf.load(folder / "checkpoints" / "config.yaml")
    assert kept.model.v4_indexer is None
    (row,) = records(folder)
    assert row["indexer_loss"] is None and row["lm_loss"] > 0


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("+model.v4_indexer.topkk=3", UsageError, "unknown key 'topkk'"),
        ("model.v4_indexer.compress_ratio=[0,4]", UsageError, "2 entries, expected 4"),
        ("model.v4_indexer.precise='no'", UsageError, "model.v4_indexer.precise must be true or false"),
        ("+trainer.max_stepz=3", TypeError, "max_stepz"),
        ("+exp_manager.resume_if_exist=true", ConfigKeyError, "resume_if_exist"),
        ("+model.optim.lrr=1", TypeError, "lrr"),
        ("+model.optim.sched.warmup=1", TypeError, "warmup"),
    ],
)
def test_mistakes_stop_before_training(pretrain, tmp_path, override, error, said):
    with pytest.raises(error, match=said):
        pretrain("a", override)
    assert not list(tmp_path.glob("a/**/metrics.jsonl")) or "optim" in override
    assert not list(tmp_path.glob("a/**/*.ckpt"))


@pytest.mark.slow
@pytest.mark.distributed
def test_data_parallel_ranks_train_as_one(tmp_path, book, pretrain):
    parts = ("trainer.devices=2", "+trainer.strategy=ddp", "model.train_ds.batch_size=2")
    result, path = command(tmp_path, "two", *QUICK, *book, *SHORT, *parts, "+exp_manager.seconds_to_sleep=0.5")
    assert result.returncode == 0, result.stderr
    for mine, other in zip(of_steps(path.parent), of_steps(pretrain("one", *SHORT)), strict=True):
        for name in ("lm_loss", "indexer_loss", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=2e-4), (mine["step"], name)
