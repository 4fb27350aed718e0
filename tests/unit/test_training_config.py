"""The pretraining command line: composition, strict keys and values, one-sentence errors."""

import itertools
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_v4_indexer.training.cli import compose, run
from nemo_v4_indexer.training.config import PretrainConfig, TrainConfig
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.step import learning_rate


def configured(*overrides):
    return PretrainConfig.from_dict(OmegaConf.to_container(compose("pretrain_tiny", overrides), resolve=True))


def test_defaults_are_complete():
    config = configured()
    assert config.engine == "auto" and config.parallel.tensor == 1
    assert config.indexer.num_layers == config.model.num_layers


def test_tiny_selection_is_a_real_restriction():
    config = configured()
    for layer in config.indexer.plan():
        if layer.has_indexer:
            assert 4 * layer.topk <= config.data.sequence_length // layer.compress_ratio


def test_fixed_keys():
    config = configured(
        "train.steps=7", "train.seed=3", "train.resume=true", "indexer.backend=reference", "indexer.compress_ratio=8",
        "indexer.topk=2", "indexer.loss.coeff=0.5", "indexer.loss.warmup_steps=9", "parallel.tensor=2",
        "parallel.sequence=true", "output_dir=there",
    )  # fmt: skip
    assert (config.train.steps, config.train.seed, config.train.resume) == (7, 3, True)
    assert config.indexer.backend == "reference" and config.indexer.loss.coeff == 0.5
    assert config.indexer.loss.warmup_steps == 9
    assert [(layer.compress_ratio, layer.topk) for layer in config.indexer.plan()] == [(8, 2)] * 4
    assert config.parallel.tensor == 2 and config.parallel.sequence and config.output_dir == "there"


def test_single_layer_override_needs_no_plus():
    plan = configured("indexer.layers.2.topk=5").indexer.plan()
    assert plan[1].topk == 5 and plan[3].topk != 5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=3", ["train.stepz", "did you mean train.steps?"]),
        ("steps=3", ["unknown key steps", "train.steps"]),
        ("+train.foo=1", ["train.foo"]),
        ("+foo=1", ["foo"]),
        ("train.steps=abc", ["train.steps", "an integer", "'abc'"]),
        ("train.steps=1.5", ["train.steps", "an integer", "1.5"]),
        ("train.steps=true", ["train.steps", "an integer", "True"]),
        ("train.steps=0", ["train.steps", "at least 1", "0"]),
        ("train.lr=x", ["train.lr", "a number", "'x'"]),
        ("train.lr=nan", ["train.lr", "finite"]),
        ("train.lr=0", ["train.lr", "greater than 0"]),
        ("train.min_lr=1.0", ["train.min_lr", "at most train.lr"]),
        ("train.resume='false'", ["train.resume", "true or false", "'false'"]),
        ("train.resume=1", ["train.resume", "true or false"]),
        ("train.beta2=1.0", ["train.beta2", "[0, 1)"]),
        ("data=nope", ["data/nope", "stdlib", "text_file"]),
        ("data=text_file", ["data.path"]),
        ("data.validation_fraction=1", ["data.validation_fraction", "(0, 1)"]),
        ("engine=magic", ["engine", "embedded", "'magic'"]),
        ("device=tpu", ["device", "auto, cpu, cuda"]),
        ("parallel.tensor=0", ["parallel.tensor", "at least 1"]),
        ("parallel.sequence=true", ["parallel.sequence", "parallel.tensor"]),
        ("indexer.topk=-1", ["indexer.topk", "-1"]),
        ("indexer.compress_ratio=[0,4]", ["indexer.compress_ratio", "2 entries", "expected 4"]),
        ("indexer.compress_ratio=[0]*2+[4]*2", ["[0]*2+[4]*2"]),
        ("indexer.compress_ratio='[0]*2+[4]*2'", ["indexer.compress_ratio", "not expanded"]),
        ("indexer.loss.coeff=-1", ["indexer.loss.coeff"]),
        ("indexer.layers.9.topk=8", ["indexer.layers", "9"]),
        ("model.attention.n_heads=3", ["model.attention.o_groups", "n_heads"]),
        ("nonsense", ["nonsense", "key=value"]),
        ("output_dir=''", ["output_dir"]),
        ("model.ffn_hidden_size=null", ["model.ffn_hidden_size", "an integer", "None"]),
        ("+model.heads=4", ["model.heads", "hidden_size"]),
    ],
)
def test_mistakes_end_in_one_sentence(override, said, capsys):
    assert run(["--cfg", "job", override]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and not captured.out
    for part in said:
        assert part in lines[0]


def test_unknown_config_name_lists_the_known(capsys):
    assert run(["--config-name", "nope"]) == 2
    assert "pretrain_tiny" in capsys.readouterr().err


def test_cfg_job_prints_yaml_that_builds_the_same_configuration(capsys):
    assert run(["train.steps=9", "--cfg", "job", "indexer.topk=3"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert PretrainConfig.from_dict(printed) == configured("train.steps=9", "indexer.topk=3")


def test_own_config_folder(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [pretrain_tiny, _self_]\ntrain: {steps: 3}\noutput_dir: mine\n")
    assert run(["--config-dir", str(tmp_path), "--config-name", "mine", "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["train"]["steps"] == 3 and printed["output_dir"] == "mine" and printed["train"]["batch_size"] > 0
    assert run(["--config-dir", str(tmp_path / "absent"), "--cfg", "job"]) == 2


def test_batch_that_does_not_divide():
    config = configured("train.batch_size=6", "train.micro_batch_size=2")
    assert config.micro_batches(1) == (2, 3)
    with pytest.raises(UsageError, match=r"train\.batch_size=6 .* 4 data-parallel"):
        config.micro_batches(4)
    with pytest.raises(UsageError, match=r"train\.micro_batch_size=2 .* 3 sequences"):
        config.micro_batches(2)


def test_learning_rate_warms_up_then_decays():
    train = TrainConfig(steps=100, lr=1.0, min_lr=0.1, lr_warmup_steps=10)
    rates = [learning_rate(train, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0 and rates[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0.1)
    assert learning_rate(train, 1000) == pytest.approx(0.1)


def test_help_and_configuration_need_no_megatron():
    code = (
        "import sys\nfrom nemo_v4_indexer.training.cli import run\nassert run(['--cfg', 'job']) == 0\n"
        "assert not {'torch', 'megatron', 'tilelang'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
