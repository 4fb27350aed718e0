"""The configuration as Megatron's options: one source for each, strictly checked."""

import copy

import pytest
from omegaconf import OmegaConf

from nemo_v4_indexer.training.cli import compose
from nemo_v4_indexer.training.config import PretrainConfig
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.options import DEFAULTS, options_of, parse, vocabulary
from nemo_v4_indexer.training.world import Launch

ALONE = Launch(0, 1, 0, 1, True)
COMPOSED = OmegaConf.to_container(compose("pretrain_tiny", ["data=mock", "data.sequence_length=256"]), resolve=True)


def configured(megatron=None, **changes):
    values = copy.deepcopy(COMPOSED)
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return PretrainConfig.from_dict(values | {"megatron": megatron or {}})


def options(config, tmp_path, place=ALONE, resume=False):
    return options_of(config, place, tmp_path / "checkpoints", resume)


def test_our_keys_become_megatrons_arguments(tmp_path):
    config = configured(train__lr=2e-3, train__micro_batch_size=2, data__vocab_size=1000, train__eval_interval=0)
    args = parse(options(config, tmp_path), ALONE)
    assert (args.num_layers, args.hidden_size, args.kv_channels, args.num_attention_heads) == (4, 128, 64, 4)
    assert (args.lr, args.micro_batch_size, args.global_batch_size, args.seq_length) == (2e-3, 2, 4, 256)
    assert (args.vocab_size, args.padded_vocab_size) == (1000, 1024)
    assert args.eval_interval > args.train_iters and args.load is None and args.mock_data
    assert args.bf16 and args.use_distributed_optimizer and args.swiglu and not args.add_bias_linear
    assert parse(options(config, tmp_path, resume=True), ALONE).load == args.save


def test_the_map_reaches_megatron_and_beats_the_defaults(tmp_path):
    config = configured(
        {"bf16": False, "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"], "split": None}
        | {"num_experts": 4, "moe_layer_freq": [0, 1, 1]}
    )
    assert DEFAULTS["bf16"]
    args = parse(options(config, tmp_path), ALONE)
    assert args.moe_layer_freq == [0, 1, 1]
    assert not args.bf16 and args.recompute_granularity == "selective"
    assert args.recompute_modules == ["core_attn", "mlp"]


@pytest.mark.parametrize(
    ("megatron", "message"),
    [
        ({"hidden_size": 64}, "megatron.hidden_size is set by model.hidden_size"),
        ({"kv_channels": 64}, "megatron.kv_channels is set by model.attention.head_dim"),
        ({"save": "elsewhere"}, "megatron.save is set by output_dir"),
        ({"save_retain_interval": 100}, "megatron.save_retain_interval is set by train.keep"),
        ({"tensor_model_parallel_size": 2}, "megatron.tensor_model_parallel_size is set by parallel.tensor"),
        ({"normalization": "LayerNorm"}, "megatron.normalization is RMSNorm for this model"),
        ({"recompute_granularit": "full"}, "no option recompute_granularit .*did you mean megatron.recompute_granul"),
        ({"recompute_granularity": "some"}, "megatron: argument --recompute-granularity: invalid choice: 'some'"),
        ({"sequence_parallel": True}, "megatron.sequence_parallel is set by parallel.sequence"),
        ({"overlap_grad_reduce": "yes"}, "megatron.overlap_grad_reduce must be true or false, got 'yes'"),
        ({"num_workers": "many"}, "argument --num-workers: invalid int value: 'many'"),
        ({"fp16": True}, "Megatron refuses these options"),
    ],
)
def test_refused(megatron, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        parse(options(configured(megatron), tmp_path), ALONE)


def test_a_launch_of_the_wrong_size_is_refused(tmp_path):
    config = configured(parallel__tensor=2, parallel__pipeline=2)
    with pytest.raises(UsageError, match="needs a multiple of 4 processes, got 2"):
        options(config, tmp_path, Launch(0, 2, 0, 2, False))
    assert options(config, tmp_path, Launch(0, 8, 0, 8, False))["pipeline_model_parallel_size"] == 2


def test_vocabulary_does_not_depend_on_the_division():
    assert vocabulary(configured(data__vocab_size=8193)) == (8193, 8320)
    assert vocabulary(configured(data__vocab_size=8193, parallel__tensor=2)) == (8193, 8320)
    text = copy.deepcopy(COMPOSED)
    text["data"] |= {"source": "stdlib", "vocab_size": None}
    assert vocabulary(PretrainConfig.from_dict(text)) == (256, 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__vocab_size": None}, "data.vocab_size must be a number when data=mock"),
        ({"data__source": "stdlib"}, "data.vocab_size must be nothing"),
        ({"data__source": "indexed"}, "data.path must name what to read when data=indexed"),
        (
            {"indexer__num_mtp_layers": 1, "indexer__compress_ratio": 4},
            "indexer.num_mtp_layers must be model.num_mtp_l",
        ),
        ({"model__num_layers": 5}, r"indexer.num_layers must be model.num_layers .5., got 4"),
        ({"parallel__pipeline": 0}, "parallel.pipeline must be at least 1"),
    ],
)
def test_bad_configuration(changes, message):
    with pytest.raises(UsageError, match=message):
        configured(**changes)


def test_a_cpu_takes_the_embedded_engine_or_says_what_needs_the_other(monkeypatch):
    from nemo_v4_indexer.training import engines

    values = copy.deepcopy(COMPOSED) | {"device": "cpu"}
    for change, message in (
        ({}, "data=mock needs the Megatron engine"),
        ({"engine": "megatron"}, "engine=megatron needs a GPU per rank"),
    ):
        with pytest.raises(UsageError, match=message):
            engines.choose(PretrainConfig.from_dict(values | change))
    values["data"] |= {"source": "stdlib", "vocab_size": None}
    assert engines.choose(PretrainConfig.from_dict(values)).__module__.endswith("embedded")
    values["parallel"] = {"pipeline": 2}
    with pytest.raises(UsageError, match=r"parallel.pipeline=2 needs the Megatron engine"):
        engines.choose(PretrainConfig.from_dict(values))
