"""The pretraining command with the real model, in this process and small enough for it."""

import json

import pytest
import torch
from toy_run import SIZES

from nemo_v4_indexer.training.cli import run

TOY = (
    *SIZES, "model.num_layers=2", "indexer.compress_ratio=[0,4]", "train.steps=8", "train.lr_warmup_steps=5",
    "train.eval_interval=4", "train.checkpoint_interval=3", "device=cpu",
)  # fmt: skip


@pytest.fixture
def pretrain(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {n} of a small book, {n * n}.\n" for n in range(400)))
    return lambda output, *more: run(
        [*TOY, "data=text_file", f"data.path={text}", f"output_dir={tmp_path / output}", *more]
    )


def records(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in rows]


def test_resumes_bitwise_across_the_change_of_loss_stage(pretrain, tmp_path):
    stages = "indexer.loss.warmup_steps=4"
    assert pretrain("whole", stages) == 0
    assert pretrain("broken", stages, "train.steps=3", "train.eval_batches=0", "train.lr_decay_steps=8") == 0
    assert pretrain("broken", stages, "train.resume=true", "train.lr_decay_steps=8") == 0
    whole = records(tmp_path / "whole")
    assert whole == records(tmp_path / "broken")
    assert whole[0]["recall"] is None and 0 < whole[-1]["recall"] <= 1  # nothing is selected in the dense stage
    assert whole[0]["indexer_loss"] > 0 and whole[-1]["val_recall"] > 0
    name = "checkpoints/step_00000008/shard_0000.pt"
    shards = [torch.load(tmp_path / run / name, weights_only=True) for run in ("whole", "broken")]
    assert shards[0]["adam_steps"] == shards[1]["adam_steps"]
    assert all(
        torch.equal(mine[3], other[3]) and mine[:3] == other[:3]
        for mine, other in zip(shards[0]["pieces"], shards[1]["pieces"], strict=True)
    )


def test_micro_batches_and_the_indexer_loss(pretrain, tmp_path):
    assert pretrain("one") == pretrain("four", "train.micro_batch_size=1") == 0
    for mine, other in zip(records(tmp_path / "one"), records(tmp_path / "four"), strict=True):
        for name in ("lm_loss", "indexer_loss"):
            assert mine[name] == pytest.approx(other[name], abs=1e-4), (mine["step"], name)


@pytest.mark.parametrize("coeff", ["0", "null"])
def test_untrained_indexer_reports_no_loss(pretrain, tmp_path, coeff):
    assert pretrain("a", f"indexer.loss.coeff={coeff}", "train.steps=3") == 0
    rows = records(tmp_path / "a")
    assert all(row["indexer_loss"] is None for row in rows) and rows[-1]["val_recall"] > 0


def test_model_without_indexers(pretrain, tmp_path, capsys):
    assert pretrain("a", "indexer.compress_ratio=0", "train.steps=2") == 0
    assert all(row["recall"] is None for row in records(tmp_path / "a"))
    assert "no query sees more groups than top-k" in capsys.readouterr().out


def test_vacuous_selection_is_noted(pretrain, capsys):
    assert pretrain("a", "indexer.topk=64", "train.steps=1") == 0
    assert "selects all 16 compressed keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_mtp_layers=1", "model.num_mtp_layers"),
        ("indexer.backend=tilelang", "tilelang"),
    ],
)
def test_model_that_cannot_be_built_is_one_sentence(pretrain, capsys, override, said):
    assert pretrain("a", override, "indexer.compress_ratio=4") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0].lower()
