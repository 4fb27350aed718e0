"""A Megatron run's output folder: which checkpoints stay, what a run may go on from, and with which settings."""

import copy
import os
import shutil
import types

import pytest
from megatron.core import dist_checkpointing
from megatron.training import async_utils
from omegaconf import OmegaConf

from nemo_v4_indexer.training import megatron_checkpoint
from nemo_v4_indexer.training.cli import compose
from nemo_v4_indexer.training.config import PretrainConfig
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.folder import RunFolder
from nemo_v4_indexer.training.megatron_checkpoint import KeptCheckpoints, newest, step_of

COMPOSED = OmegaConf.to_container(compose("pretrain_tiny", ["train.steps=100"]), resolve=True)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(autouse=True)
def text_of_the_checkpoint(monkeypatch):
    arguments = types.SimpleNamespace(v4_data="text")
    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", lambda path: {"args": arguments})


def write(folder, step, complete=True, finished=True):
    """What a save leaves: its files, then what says that they are complete, then the file that names it."""
    path = folder / f"iter_{step:07d}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"weights")
    if complete:
        (path / "metadata.json").write_text("{}")
        if finished:
            (folder / TRACKER).write_text(str(step))
    return path


def steps(folder):
    assert all(path.name == TRACKER or path.name.startswith("iter_") for path in folder.iterdir())
    return sorted(step_of(path) for path in folder.glob("iter_*"))


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_the_newest_stay(tmp_path, keep):
    kept, done = KeptCheckpoints(tmp_path, keep), []
    kept.prune()  # before the first one
    for step in (4, 8, 12, 10_000_000):
        write(tmp_path, step)
        done.append(step)
        kept.prune()
        assert steps(tmp_path) == done[-keep:] and newest(tmp_path) == tmp_path / f"iter_{step:07d}"


def test_a_save_under_way_changes_nothing(tmp_path, monkeypatch):
    for step in (4, 8):
        write(tmp_path, step)
    kept = KeptCheckpoints(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(async_utils, "is_empty_async_queue", lambda: False)
        kept.prune()
        assert steps(tmp_path) == [4, 8]
    write(tmp_path, 12, complete=False)
    write(tmp_path, 16, finished=False)
    kept.prune()
    assert steps(tmp_path) == [8, 12, 16] and step_of(newest(tmp_path)) == 8


def test_the_newest_complete_one_is_never_deleted(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 8, complete=False)
    (tmp_path / TRACKER).write_text("8")  # names what is not there
    KeptCheckpoints(tmp_path, 1).prune()
    assert steps(tmp_path) == [4, 8] and step_of(newest(tmp_path)) == 4


@pytest.mark.parametrize("named", ["", "8", "garbage"])
def test_a_kill_while_the_name_is_written_is_survived(tmp_path, named):
    for step in (4, 6):
        write(tmp_path, step)
    (tmp_path / TRACKER).write_text(named)
    found = newest(tmp_path)
    assert step_of(found) == 6
    megatron_checkpoint.load_from(found)
    assert (tmp_path / TRACKER).read_text() == "6\n"


def test_a_kill_while_files_are_deleted_leaves_only_whole_checkpoints(tmp_path, monkeypatch):
    for step in (4, 8, 12):
        write(tmp_path, step)
    with monkeypatch.context() as patch:

        def killed(path, **_):
            (path / "metadata.json").rename(path / "rest")
            raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            KeptCheckpoints(tmp_path, 1).prune()
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000012"]
    write(tmp_path, 16)
    KeptCheckpoints(tmp_path, 2).prune()
    assert steps(tmp_path) == [12, 16]


def test_links_stay(tmp_path):
    elsewhere = write(tmp_path / "elsewhere", 4)
    folder = tmp_path / "checkpoints"
    for step in (8, 12):
        write(folder, step)
    os.symlink(elsewhere, folder / "iter_0000004")
    KeptCheckpoints(folder, 1).prune()
    assert steps(folder) == [4, 12] and (elsewhere / "metadata.json").is_file()


def changed(*overrides):
    values = copy.deepcopy(COMPOSED)
    for key, value in overrides:
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[name] = value
    return values


def begin(root, *overrides, saved=COMPOSED, text="text", engine="megatron"):
    """Where a run that goes on begins, after one that saved step 8 with the settings `saved`."""
    if not root.joinpath("checkpoints").exists():
        write(root / "checkpoints", 8)
        if saved:
            OmegaConf.save(OmegaConf.create(saved), root / "config.yaml")
    values = changed(("train.resume", True), *overrides)
    return RunFolder(str(root)).start(engine, PretrainConfig.from_dict(values), values, text)


@pytest.mark.parametrize(
    "override",
    [
        ("parallel.tensor", 2), ("parallel.pipeline", 2), ("train.micro_batch_size", 1), ("train.keep", 9),
        ("train.log_interval", 7), ("indexer.balance_rows", True), ("megatron.recompute_granularity", "full"),
        ("megatron.tensorboard_dir", "there"), ("megatron.exit_duration_in_mins", 9), ("megatron.bf16", True),
        ("megatron.num_layers_per_virtual_pipeline_stage", 1), ("megatron.overlap_grad_reduce", True),
        ("megatron.fp8", None),
    ],
)  # fmt: skip
def test_a_run_goes_on_with_what_does_not_change_its_numbers(tmp_path, override):
    found, notes = begin(tmp_path, override)
    assert found == tmp_path / "checkpoints" / "iter_0000008" and notes == ["continuing after step 8"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (("train.seed", 2), r"train.seed \(1234 before, 2 now\)"),
        (("train.batch_size", 8), r"train.batch_size \(4 before, 8 now\)"),
        (("indexer.topk", 3), r"indexer.topk \(4 before, 3 now\)"),
        (("megatron.bf16", False), r"megatron.bf16 \(True before, False now\)"),
        (("megatron.lr_decay_style", "linear"), r"megatron.lr_decay_style \('cosine' before, 'linear' now\)"),
        (("megatron.optimizer", "sgd"), r"megatron.optimizer \('absent' before, 'sgd' now\)"),
        (("train.steps", 7), "train.steps=7 is below the 8 steps"),
    ],
)
def test_other_settings_are_refused(tmp_path, override, said):
    with pytest.raises(UsageError, match=said):
        begin(tmp_path, override)


def test_another_text_and_another_engine_are_refused(tmp_path):
    with pytest.raises(UsageError, match="the text itself"):
        begin(tmp_path, text="another")
    with pytest.raises(UsageError, match=r"iter_0000008: it was saved by engine=megatron, .* uses engine=embedded"):
        begin(tmp_path, engine="embedded")


def test_more_steps_and_missing_settings_are_noted(tmp_path):
    assert "train.steps changed from 100 to 200" in begin(tmp_path / "a", ("train.steps", 200))[1][0]
    assert "config.yaml is missing: settings were not compared" in begin(tmp_path / "b", saved=None)[1][0]
    (tmp_path / "c" / "checkpoints").mkdir(parents=True)
    found, notes = begin(tmp_path / "c")
    assert found is None and "starting fresh" in notes[0]


@pytest.mark.parametrize("engine", ["megatron", "embedded"])
def test_a_fresh_run_deletes_checkpoints_of_either_engine_only_with_leave(tmp_path, engine):
    foreign = tmp_path / "checkpoints" / "release"
    foreign.mkdir(parents=True)
    assert begin(tmp_path, ("train.resume", False), engine=engine) == (None, []) and foreign.is_dir()
    path = write(foreign.parent, 7)
    with pytest.raises(UsageError, match=r"already holds checkpoints .newest: iter_0000007.*train.overwrite=true"):
        begin(tmp_path, ("train.resume", False), engine=engine)
    assert newest(path.parent) == path
    assert begin(tmp_path, ("train.resume", False), ("train.overwrite", True), engine=engine) == (None, [])
    assert not path.exists()
