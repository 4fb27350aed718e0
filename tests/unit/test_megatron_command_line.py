"""What Megatron's own options make of the layer spec: settings from a file, options that it refuses, the loss stage."""

import copy
from types import SimpleNamespace

import pytest
import torch
import yaml
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import global_vars
from megatron.training.models.gpt import GPTModelConfig
from mocked_parallel import ROPE, attention_config, single_process

from nemo_v4_indexer.config import IndexerConfig
from nemo_v4_indexer.integrations import megatron as host
from nemo_v4_indexer.integrations.megatron_cli import VARIABLE, FollowingIndexer
from nemo_v4_indexer.integrations.megatron_config import settings_of
from nemo_v4_indexer.layer import V4Indexer
from nemo_v4_indexer.ops.loss import set_loss_scale
from nemo_v4_indexer.training import cli

INDEXER = IndexerConfig.from_dict(
    dict(num_layers=4, compress_ratio=[0, 4, 16, 1], topk=3, n_heads=4, head_dim=16, heavy_ratio=16, window=5)
    | dict(rope=ROPE, backend="reference", loss={"coeff": 1.0, "warmup_steps": 2})
)
FILE = {"indexer": INDEXER.to_dict(), "model": {"hidden_size": 40, "attention": attention_config().to_dict()}}


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with single_process():
        yield


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a settings file and names it in the environment."""

    def write(content):
        path = tmp_path / "settings.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        monkeypatch.setenv(VARIABLE, str(path))
        return path

    return write


@pytest.fixture
def arguments(monkeypatch):
    """Megatron's global arguments."""
    args = SimpleNamespace()
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    return args


def plain(kind=TransformerConfig, **changes):
    """What Megatron makes of its own options."""
    sizes = dict(num_layers=4, hidden_size=40, num_attention_heads=4, ffn_hidden_size=48, add_bias_linear=False)
    fitting = dict(normalization="RMSNorm", attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True)
    return kind(**(sizes | fitting | changes))


def edited(path, value):
    """The settings file with one entry changed, or left out (None)."""
    content = copy.deepcopy(FILE)
    *above, last = path.split(".")
    inner = content
    for name in above:
        inner = inner[name]
    inner[last] = value
    if value is None:
        del inner[last]
    return content


def indexer_kinds(spec):
    return {layer.submodules.self_attention.submodules.indexer for layer in spec.layer_specs}


def test_settings_come_from_the_file_and_stay_in_the_config(write):
    path, config = write(FILE), plain()
    spec = host.v4_layer_spec(config)
    layers = [layer.submodules.self_attention.params["layer"] for layer in spec.layer_specs]
    assert layers == list(INDEXER.plan()) and indexer_kinds(spec) == {FollowingIndexer}
    assert settings_of(config) == (INDEXER, attention_config())
    assert config.hetereogenous_dist_checkpoint
    assert config.experimental_attention_variant_loss_scale_func is set_loss_scale
    path.unlink()  # the next pipeline stage of this process asks the config
    assert indexer_kinds(host.v4_layer_spec(config, vp_stage=None)) == {FollowingIndexer}


def test_a_model_config_of_megatrons_builder(write):
    write({"indexer": FILE["indexer"], "attention": FILE["model"]["attention"]})
    given = GPTModelConfig(transformer=plain(), vocab_size=32, position_embedding_type="none")
    assert len(host.v4_layer_spec(given, vp_stage=None).layer_specs) == 4
    assert given.transformer.v4_indexer == INDEXER
    own = lambda scale: None  # noqa: E731
    config = plain(experimental_attention_variant_loss_scale_func=own)
    host.v4_layer_spec(config)
    assert config.experimental_attention_variant_loss_scale_func is own


def test_the_file_that_the_pretraining_command_prints(write, capsys):
    assert cli.run(["--cfg", "job", "train.eps=1e-05"]) == 0
    write(capsys.readouterr().out)
    config = plain(hidden_size=128)
    host.v4_layer_spec(config)
    assert config.v4_indexer.compress_ratio == (0, 4, 32, 4) and config.v4_attention.head_dim == 64


def test_settings_in_the_config_beat_the_file(write):
    write(edited("indexer.topk", 1))
    config = plain(host.V4TransformerConfig, v4_indexer=INDEXER, v4_attention=attention_config())
    spec = host.v4_layer_spec(config)
    assert config.v4_indexer.topk == 3 and indexer_kinds(spec) == {V4Indexer}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (edited("indexer", None), r"must hold the maps indexer and model.attention .* but indexer is None"),
        (edited("model.attention", [1]), r"but model.attention is \[1\]"),
        (edited("model", None), r"but model.attention is None"),
        ("just text", r"but indexer is None"),
        ("indexer: [", r"settings.yaml, which is not YAML: while parsing"),
        (edited("indexer.topkk", 3), r"settings.yaml, whose map indexer is refused: .*unknown key 'topkk'"),
        (edited("model.attention.o_groups", "2"), r"whose map model.attention is refused: attention.o_groups must be"),
        (
            FILE | {"indexer": FILE["indexer"] | {"num_layers": 5, "compress_ratio": 4}},
            r"settings.yaml, where v4_indexer.num_layers is 5, but num_layers is 4",
        ),
        (
            edited("model.attention.n_heads", 8),
            r"settings.yaml, where v4_attention.n_heads is 8, but num_attention_heads is 4",
        ),
        (
            FILE | {"indexer": FILE["indexer"] | {"num_mtp_layers": 1, "compress_ratio": 4}},
            r"indexer.num_mtp_layers must be 0: .* got 1",
        ),
    ],
)
def test_files_are_refused_in_one_sentence(write, content, message):
    write(content)
    config = plain()
    with pytest.raises(ValueError, match=f"{VARIABLE} names .*{message}") as caught:
        host.v4_layer_spec(config)
    assert "\n" not in str(caught.value) and not hasattr(config, "v4_indexer")


def test_a_file_must_be_named_and_exist(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(TypeError, match=f"V4TransformerConfig, got TransformerConfig; .* set .* {VARIABLE} to a"):
        host.v4_layer_spec(plain())
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent.yaml"))
    with pytest.raises(ValueError, match=r"absent.yaml, which cannot be read: No such file"):
        host.v4_layer_spec(plain())


REFUSED = {
    "normalization": ({"normalization": "LayerNorm"}, "normalization must be 'RMSNorm', got 'LayerNorm'"),
    "attention_dropout": ({"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
    "zero_centered": ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma must be False, got True"),
    "mtp": ({"mtp_num_layers": 1}, "mtp_num_layers must be None, got 1"),
    "groups": ({"num_query_groups": 2}, "num_query_groups must be 4, got 2"),
    "window": ({"window_size": (8, 0)}, r"window_size must be None, got \(8, 0\)"),
    "variant": ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant must be None, got 'dsa'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_the_layers_would_ignore_are_refused(write, name):
    write(FILE)
    changes, message = REFUSED[name]
    config = plain()
    for option, value in changes.items():  # past Megatron's own rules about them
        setattr(config, option, value)
    with pytest.raises(ValueError, match=f"do not follow these options of Megatron: {message}$"):
        host.v4_layer_spec(config)


def test_all_refused_options_are_named_at_once(write):
    write(FILE)
    latent = plain(MLATransformerConfig, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout must .*; multi_latent_attention must be False, got True"):
        host.v4_layer_spec(latent)
    given = GPTModelConfig(transformer=plain())
    with pytest.raises(ValueError, match=r"position_embedding_type must be 'none', got 'learned_absolute'$"):
        host.v4_layer_spec(given)


def test_options_that_a_transformer_config_does_not_know_are_asked_of_the_command_line(write, arguments):
    write(FILE)
    arguments.position_embedding_type, arguments.reset_attention_mask = "rope", True
    with pytest.raises(ValueError, match="type must be 'none', got 'rope'; reset_attention_mask must be False, got T"):
        host.v4_layer_spec(plain())
    given = GPTModelConfig(transformer=plain(), position_embedding_type="none")
    arguments.reset_attention_mask = False
    host.v4_layer_spec(given)


def test_experts_are_built_as_megatrons_options_say(write):
    write(FILE)
    layers = host.v4_layer_spec(plain(num_moe_experts=2, moe_router_load_balancing_type="none")).layer_specs
    assert all(layer.submodules.mlp.func is MoELayer for layer in layers)


def test_the_loss_stage_follows_megatrons_iteration(write, monkeypatch, arguments):
    write(FILE)
    set_loss_scale(1.0)
    config = plain()
    model = GPTModel(config, host.v4_layer_spec(config), 32, 24, position_embedding_type="none")
    stages = lambda: {m.dense_stage for m in model.modules() if isinstance(m, V4Indexer)}  # noqa: E731
    tokens = torch.randint(0, 32, (2, 25), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).expand(2, -1)

    def step():
        model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
        return "recall" in host.indexer_metrics(model)

    assert step() is False and stages() == {True}  # before Megatron counts: as built
    for iteration, sparse in ((0, False), (1, False), (2, True), (1, False)):
        arguments.curr_iteration = iteration
        assert step() is sparse and stages() == {not sparse}
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)  # a loop of the caller's own
    host.set_indexer_step(model, 2)
    assert step() is True
