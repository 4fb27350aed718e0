"""The embedded engine with a stand-in model: resuming, interruption, output files, refusals."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_stub import SMALL, Host

import nemo_v4_indexer.integrations as integrations
from nemo_v4_indexer.training import checkpoint, curves
from nemo_v4_indexer.training.cli import run


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {n} of a small book, {n * n}.\n" for n in range(400)))
    return path


@pytest.fixture
def host(monkeypatch):
    stub = Host()
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(integrations, "megatron", stub, raising=False)
    return stub


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    if request.node.name != "test_output_folder":  # drawing takes most of such a short run
        monkeypatch.setattr(curves, "write_curves", lambda *_: None)


@pytest.fixture
def pretrain(host, text, tmp_path):
    def call(output, *overrides):
        return run([*SMALL, "data=text_file", f"data.path={text}", f"output_dir={tmp_path / output}", *overrides])

    return call


def records(folder):
    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def numbers(folder):
    return [{k: v for k, v in record.items() if k != "tokens_per_s"} for record in records(folder)]


def tensors(folder):
    shard = torch.load(checkpoint.newest(folder / "checkpoints") / "shard_0000.pt", weights_only=True)
    return {key: data for key, _, _, data in shard["pieces"]} | {"random": shard["random"]}


def assert_equal_runs(first, second):
    assert numbers(first) == numbers(second)
    one, two = tensors(first), tensors(second)
    assert one.keys() == two.keys() and len(one) > 9
    for key, value in one.items():
        assert torch.equal(value, two[key]), key


def test_output_folder(pretrain, tmp_path, capsys):
    assert pretrain("a") == 0
    folder = tmp_path / "a"
    rows = records(folder)
    assert [row["step"] for row in rows] == list(range(1, 13))
    wanted = {"lm_loss", "indexer_loss", "recall", "recall_random", "tokens_per_s", "lr", "grad_norm"}
    assert all(wanted <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "val_lm_loss" in row] == [4, 8, 12]
    assert rows[0]["recall_random"] is None  # measured as NaN
    assert rows[-1]["lm_loss"] < rows[0]["lm_loss"] - 0.01
    assert "steps: 12" in (folder / "config.yaml").read_text()
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["latest", "step_00000010", "step_00000012"]
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000012\n"
    out = capsys.readouterr().out
    assert re.search(r"unigram entropy, validation +\d\.\d+ nats", out) and re.search(r"^steps +12$", out, re.M)


def test_validation_can_be_turned_off(pretrain, tmp_path, capsys):
    assert pretrain("a", "train.eval_batches=0", "train.steps=4") == 0
    assert not any(name.startswith("val_") for row in records(tmp_path / "a") for name in row)
    assert re.search(r"validation loss +n/a", capsys.readouterr().out)


def test_runs_repeat_bitwise_and_the_seed_matters(pretrain, tmp_path):
    assert pretrain("a") == pretrain("b") == pretrain("c", "train.seed=5") == 0
    assert_equal_runs(tmp_path / "a", tmp_path / "b")
    assert numbers(tmp_path / "a") != numbers(tmp_path / "c")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_run_continues_to_the_same_numbers(pretrain, host, tmp_path, number, capsys):
    assert pretrain("whole") == 0
    host.before_step = lambda step: os.kill(os.getpid(), number) if step == 6 else None
    assert pretrain("broken") == 128 + number
    assert [row["step"] for row in records(tmp_path / "broken")] == list(range(1, 8))
    host.before_step = lambda step: None
    host.steps.clear()
    assert pretrain("broken", "train.resume=true") == 0
    assert host.steps == list(range(7, 12))
    assert "continuing after step 7" in capsys.readouterr().out
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")


def test_crashed_run_goes_back_to_the_last_checkpoint(pretrain, host, tmp_path):
    assert pretrain("whole") == 0

    def crash(step):
        if step == 8:
            raise ZeroDivisionError

    host.before_step = crash
    with pytest.raises(ZeroDivisionError):
        pretrain("broken")
    assert len(records(tmp_path / "broken")) == 8  # ran ahead of the checkpoint of step 5
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 9, "lm_lo')
    host.before_step = lambda step: None
    assert pretrain("broken", "train.resume=true") == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")


def test_unfinished_checkpoints_are_ignored(pretrain, tmp_path):
    assert pretrain("whole") == 0
    assert pretrain("broken") == 0
    folder = tmp_path / "broken" / "checkpoints"
    (folder / "step_00000012").rename(folder / ".writing_step_00000012")
    (folder / "step_00000011").mkdir()
    (folder / "step_00000011" / "shard_0000.pt").write_bytes(b"half a file")
    (folder / "latest").write_text("step_00000011\n")
    assert checkpoint.newest(folder).name == "step_00000010"
    assert pretrain("broken", "train.resume=true") == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")


def test_failed_save_keeps_the_earlier_checkpoint(pretrain, tmp_path, monkeypatch, capsys):
    save = torch.save

    def fail(payload, stream):
        save(payload, stream)
        if "step_00000010" in stream.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    assert pretrain("a") == 1
    assert "No space left" in capsys.readouterr().err
    assert checkpoint.newest(tmp_path / "a" / "checkpoints").name == "step_00000005"


def test_resume_without_checkpoint_starts_fresh(pretrain, tmp_path, capsys):
    assert pretrain("a", "train.resume=true") == 0
    assert "starting fresh" in capsys.readouterr().out
    assert len(records(tmp_path / "a")) == 12


def test_finished_run_resumes_to_nothing_and_longer_run_goes_on(pretrain, host, tmp_path, capsys):
    assert pretrain("a") == 0
    host.steps.clear()
    assert pretrain("a", "train.resume=true") == 0
    assert host.steps == [] and len(records(tmp_path / "a")) == 12
    assert pretrain("a", "train.resume=true", "train.steps=14") == 0
    assert host.steps == [12, 13] and "train.steps changed" in capsys.readouterr().out
    assert pretrain("a", "train.resume=true", "train.steps=13") == 2


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.seed=2", "train.seed"),
        ("train.lr=1e-2", "train.lr"),
        ("data.sequence_length=16", "data.sequence_length"),
        ("model.hidden_size=64", "model.hidden_size"),
        ("indexer.topk=3", "indexer.topk"),
    ],
)
def test_changed_run_is_not_resumed(pretrain, override, key, capsys):
    assert pretrain("a", "train.steps=2") == 0
    assert pretrain("a", "train.steps=2", "train.resume=true", override) == 2
    error = capsys.readouterr().err
    assert f"{key} (" in error and "before" in error and "now" in error


def test_changed_text_is_not_resumed(pretrain, text, capsys):
    assert pretrain("a", "train.steps=2") == 0
    text.write_text(text.read_text() + "one more line\n")
    assert pretrain("a", "train.steps=2", "train.resume=true") == 2
    assert "the text itself" in capsys.readouterr().err


def test_fresh_run_never_deletes_checkpoints_unasked(pretrain, tmp_path, capsys):
    assert pretrain("a", "train.steps=3") == 0
    assert pretrain("a", "train.steps=2") == 2
    error = capsys.readouterr().err
    assert "train.resume=true" in error and "train.overwrite=true" in error
    assert len(records(tmp_path / "a")) == 3
    assert pretrain("a", "train.steps=2", "train.overwrite=true") == 0
    assert len(records(tmp_path / "a")) == 2
    assert checkpoint.newest(tmp_path / "a" / "checkpoints").name == "step_00000002"


def test_micro_batches_leave_the_gradient_unchanged(pretrain, host, tmp_path, monkeypatch):
    """Without dropout, 1 and 4 micro-batches take the same steps: both losses are scaled by 1/4."""
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *_: x)
    assert pretrain("one") == pretrain("four", "train.micro_batch_size=1") == 0
    gains = [host.models[index].gain for index in (0, 1)]
    assert (gains[0] - 1).abs().min() > 1e-3
    torch.testing.assert_close(gains[0], gains[1], rtol=1e-4, atol=1e-6)
    pairs = zip(records(tmp_path / "one"), records(tmp_path / "four"), strict=True)
    assert all(abs(one["lm_loss"] - four["lm_loss"]) < 1e-5 for one, four in pairs)
    pairs = zip(records(tmp_path / "one"), records(tmp_path / "four"), strict=True)
    assert all(abs(one["grad_norm"] - four["grad_norm"]) < 1e-4 for one, four in pairs)


def test_gradient_clipping(pretrain, tmp_path):
    assert pretrain("free", "train.grad_clip=0", "train.steps=3") == 0
    assert pretrain("clipped", "train.grad_clip=1e-3", "train.steps=3") == 0
    free, clipped = records(tmp_path / "free"), records(tmp_path / "clipped")
    assert free[0]["grad_norm"] == clipped[0]["grad_norm"] > 1e-3  # the norm before clipping
    assert numbers(tmp_path / "free")[1:] != numbers(tmp_path / "clipped")[1:]


def test_divergence_is_said_and_saves_nothing(pretrain, host, tmp_path, capsys):
    def poison(step):
        if step == 6:
            host.models[-1].gain.data.fill_(float("nan"))

    host.before_step = poison
    assert pretrain("a") == 1
    assert "step 7" in capsys.readouterr().err
    assert checkpoint.newest(tmp_path / "a" / "checkpoints").name == "step_00000005"


def test_wrong_number_of_processes(pretrain, capsys):
    assert pretrain("a", "parallel.tensor=2") == 2
    error = capsys.readouterr().err
    assert "parallel.tensor=2" in error and "torchrun --nproc-per-node 2" in error


def test_folder_in_use_or_unwritable(pretrain, tmp_path, capsys):
    import fcntl

    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert pretrain("a") == 2
        assert "in use by another run" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert pretrain("file/a") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_process_state_is_put_back(pretrain):
    import torch.distributed as dist

    def state():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return torch.cuda.current_device, torch.cuda.current_stream, handlers, torch.get_num_threads()

    before = state()
    assert pretrain("a", "train.steps=1", f"train.threads={before[-1] + 1}") == 0
    assert state() == before
    assert not dist.is_initialized()


def launch(tmp_path, text, output, *extra):
    command = [sys.executable, str(Path(__file__).with_name("training_stub.py")), *SMALL, "data=text_file"]
    command += [f"data.path={text}", f"output_dir={tmp_path / output}", *extra]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process, word):
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"no {word!r}: {process.stderr.read()}")


def test_second_signal_stops_at_once(pretrain, text, tmp_path):
    import time

    assert pretrain("whole") == 0
    process = launch(tmp_path, text, "broken", "hang_at=8")
    try:
        wait_for(process, "hanging")
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert process.poll() is None  # the step in flight may finish
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert pretrain("broken", "train.resume=true") == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")
