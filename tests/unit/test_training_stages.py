"""Dense warm-up with everything but the indexers frozen, and starting from another run's weights."""

import pytest
import torch
import yaml
from test_training_model import TOY

from nemo_v4_indexer.training.cli import run

STAGES = ("train.freeze_main=true", "indexer.loss.warmup_steps=2", "train.eval_batches=0")


@pytest.fixture
def pretrain(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {n} of a small book, {n * n}.\n" for n in range(400)))
    return lambda output, *more: run(
        [*TOY, "data=text_file", f"data.path={text}", f"output_dir={tmp_path / output}", *more]
    )


def weights(folder, step):
    shard = torch.load(folder / "checkpoints" / f"step_{step:08d}" / "shard_0000.pt", weights_only=True)
    return {key: data for key, _, _, data in shard["pieces"] if not key.startswith("optimizer.")}


def changed(folder, before, after):
    old, new = weights(folder, before), weights(folder, after)
    assert old.keys() == new.keys()
    return {key for key in old if not torch.equal(old[key], new[key])}


def test_only_the_indexers_move_in_the_dense_stage(pretrain, tmp_path):
    save = ("train.checkpoint_interval=1", "train.keep=9", "train.steps=4")
    assert pretrain("a", *STAGES, *save) == 0
    indexers = {key for key in weights(tmp_path / "a", 1) if ".indexer." in key}
    assert indexers
    assert changed(tmp_path / "a", 1, 2) == indexers
    moved = changed(tmp_path / "a", 2, 3)
    assert moved > indexers and {key for key in moved if "embedding" in key}
    assert pretrain("b", "train.eval_batches=0", "indexer.loss.warmup_steps=2", *save) == 0
    assert changed(tmp_path / "b", 1, 2) > indexers  # without the key everything moves


def test_frozen_stage_is_resumed_to_the_same_weights(pretrain, tmp_path):
    assert pretrain("whole", *STAGES, "train.steps=4") == 0
    assert pretrain("broken", *STAGES, "train.steps=1", "train.lr_decay_steps=4") == 0
    assert pretrain("broken", *STAGES, "train.steps=4", "train.lr_decay_steps=4", "train.resume=true") == 0
    whole, broken = (weights(tmp_path / name, 4) for name in ("whole", "broken"))
    assert all(torch.equal(whole[key], broken[key]) for key in whole)


@pytest.mark.parametrize(
    "override", ["indexer.loss.warmup_steps=0", "indexer.loss.coeff=0", "indexer.compress_ratio=0"]
)
def test_freezing_that_leaves_nothing_to_train_is_refused(pretrain, capsys, override):
    assert pretrain("a", *STAGES, override) == 2
    assert "train.freeze_main=true needs a layer with an indexer" in capsys.readouterr().err


def test_indexers_are_added_to_a_dense_model(pretrain, tmp_path, capsys):
    """The way of V3.2: full attention first, then indexers for it."""
    dense = ("indexer.compress_ratio=1", "train.eval_batches=0", "train.steps=2")
    assert pretrain("dense", *dense, "indexer.heavy_ratio=1") == 0
    start = f"train.init_from={tmp_path / 'dense'}"
    assert pretrain("sparse", *dense, *STAGES, start, "train.checkpoint_interval=1") == 0
    assert "indexer weights are new" in capsys.readouterr().out
    before, after = weights(tmp_path / "dense", 2), weights(tmp_path / "sparse", 2)
    assert not any(".indexer." in key for key in before) and any(".indexer." in key for key in after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_other_shapes_and_absent_checkpoints_are_refused(pretrain, tmp_path, capsys):
    assert pretrain("one", "train.steps=1", "train.eval_batches=0") == 0
    assert pretrain("two", f"train.init_from={tmp_path / 'one'}", "model.ffn_hidden_size=96") == 2
    assert "has shape" in capsys.readouterr().err
    assert pretrain("three", f"train.init_from={tmp_path / 'absent'}") == 2
    assert "neither a checkpoint nor an output folder" in capsys.readouterr().err


def test_the_resolved_configuration_is_beside_every_checkpoint(pretrain, tmp_path):
    assert pretrain("a", "train.steps=2", "train.eval_batches=0", "train.checkpoint_interval=1") == 0
    settings = (tmp_path / "a" / "config.yaml").read_text()
    for step in (1, 2):
        folder = tmp_path / "a" / "checkpoints" / f"step_{step:08d}"
        assert yaml.safe_load((folder / "config.yaml").read_text()) == yaml.safe_load(settings)
    assert run(["--config-dir", str(folder), "--config-name", "config", "--cfg", "job"]) == 0
