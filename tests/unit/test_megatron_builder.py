"""V4GPTModelConfig and V4GPTModelBuilder with megatron.training's own instantiate, as_dict / from_dict and YAML."""

import dataclasses

import pytest
import torch
import yaml
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.container import ConfigContainerBase
from megatron.training.config.instantiate_utils import InstantiationException, instantiate, target_allowlist
from megatron.training.models.base import ModelConfig, Serializable
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from mocked_parallel import ROPE, attention_config, single_process

from nemo_v4_indexer.config import IndexerConfig
from nemo_v4_indexer.integrations.megatron import V4TransformerConfig, v4_layer_spec
from nemo_v4_indexer.integrations.megatron_builder import V4GPTModelBuilder, V4GPTModelConfig, require_v4_layers
from nemo_v4_indexer.layer import V4Indexer

RATIOS, TOPKS = [0, 4, 16, 1], [1, 2, 1, 3]


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with single_process():
        yield


def indexer_config(**changes):
    settings = dict(num_layers=4, compress_ratio=RATIOS, topk=TOPKS, layers={4: {"topk": 5}}, n_heads=4, head_dim=16)
    settings |= dict(heavy_ratio=16, window=5, rope=ROPE, backend="reference", loss={"coeff": 0.5, "warmup_steps": 7})
    return IndexerConfig.from_dict(settings | changes)


def transformer(**changes):
    settings = dict(num_layers=4, hidden_size=40, num_attention_heads=4, use_cpu_initialization=True)
    settings |= dict(v4_indexer=indexer_config(), v4_attention=attention_config(), normalization="RMSNorm")
    settings |= dict(
        hidden_dropout=0.0, gated_linear_unit=True, activation_func=torch.nn.functional.silu, params_dtype=torch.float32
    )
    return V4TransformerConfig(**(settings | changes))


def config(**changes):
    return V4GPTModelConfig(transformer=transformer(), vocab_size=96, seq_length=32, **changes)


def assert_same(restored, original):
    assert type(restored) is type(original) and type(restored.transformer) is V4TransformerConfig
    assert restored.transformer.v4_indexer == original.transformer.v4_indexer
    assert restored.transformer.v4_attention == original.transformer.v4_attention
    assert restored.transformer.activation_func is original.transformer.activation_func
    assert restored.transformer_layer_spec is v4_layer_spec
    assert restored.get_builder_cls() is V4GPTModelBuilder
    assert restored.as_dict() == original.as_dict()


@dataclasses.dataclass(kw_only=True)
class Container(ConfigContainerBase):
    """What Megatron and its users keep their configs in."""

    model: ModelConfig


def test_as_dict_and_back():
    original = config()
    assert isinstance(original, Serializable)
    values = original.as_dict()
    assert values["transformer"]["v4_indexer"] == original.transformer.v4_indexer.to_dict()
    assert_same(ModelConfig.from_dict(values), original)
    assert_same(V4GPTModelConfig.from_dict(values), original)


def test_yaml_and_back(tmp_path):
    original = config()
    original.to_yaml(tmp_path / "model.yaml")
    assert_same(V4GPTModelConfig.from_yaml(tmp_path / "model.yaml"), original)


def test_in_a_container_through_megatrons_own_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr(target_allowlist, "_allowed_prefixes", [*target_allowlist.allowed_prefixes, f"{__name__}."])
    original = Container(model=config())
    original.to_yaml(str(tmp_path / "all.yaml"))
    assert_same(Container.from_yaml(str(tmp_path / "all.yaml")).model, original.model)


def test_instantiate_from_a_file_written_by_hand(tmp_path):
    text = f"""
    _target_: {V4GPTModelConfig.__module__}.V4GPTModelConfig
    vocab_size: 96
    transformer:
      _target_: {V4TransformerConfig.__module__}.V4TransformerConfig
      num_layers: 4
      hidden_size: 40
      num_attention_heads: 4
      mlp_activation: silu
      v4_attention: {attention_config().to_dict()}
      v4_indexer:
        num_layers: 4
        compress_ratio: {{prefix: [0], pattern: [4], suffix: [128]}}
        layers: {{2: {{topk: 7}}}}
        n_heads: 4
        head_dim: 16
        rope: {{dim: 8}}
    """
    (tmp_path / "model.yaml").write_text(text)
    made = instantiate(yaml.safe_load(text))
    assert made.transformer.v4_indexer.layer(2).topk == 7
    assert made.transformer.activation_func is torch.nn.functional.silu
    assert_same(V4GPTModelConfig.from_yaml(tmp_path / "model.yaml"), made)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("transformer", "v4_indexer", "topkk"), 4, "unknown key 'topkk'.*did you mean 'topk'"),
        (("transformer", "v4_indexer", "topk"), [1, 2], "topk has 2 entries, expected 4"),
        (("transformer", "v4_indexer", "rotate"), "false", "rotate must be true or false"),
        (("transformer", "v4_indexer", "loss"), {"coef": 1}, "loss has an unknown key 'coef'"),
        (("transformer", "v4_attention", "n_heads"), 2.5, "attention.n_heads must be a whole number"),
        (("transformer", "v4_atention"), {}, "v4_atention"),
        (("transformer", "mlp_activation"), "sillu", "mlp_activation.*'sillu'"),
        (("transformer", "cp_layout"), "zig", "cp_layout must be one of zigzag"),
        (("vocab_sizes",), 4, "vocab_sizes"),
        (("position_embedding_type",), "rope", "position_embedding_type must be 'none'"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, path, value, said):
    config().to_yaml(tmp_path / "model.yaml")
    values = yaml.safe_load((tmp_path / "model.yaml").read_text())
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(InstantiationException, match=said):
        V4GPTModelConfig.from_yaml(tmp_path / "model.yaml")


def test_functions_without_a_name_are_not_lost_silently():
    lost = V4GPTModelConfig(transformer=transformer(activation_func=lambda x: x.relu().square()), vocab_size=96)
    with pytest.raises(ValueError, match="would be lost"):
        lost.as_dict()
    with pytest.raises(ValueError, match=r"'relu' and silu"):
        transformer(mlp_activation="relu")


def test_other_specs_and_configs_are_refused():
    with pytest.raises(ValueError, match="transformer_layer_spec must be absent"):
        config(transformer_layer_spec=get_gpt_layer_local_spec())
    plain = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    with pytest.raises(TypeError, match="V4TransformerConfig, got TransformerConfig"):
        V4GPTModelConfig(transformer=plain)
    with pytest.raises(TypeError, match="V4GPTModelConfig, got GPTModelConfig"):
        V4GPTModelBuilder(GPTModelConfig(transformer=plain))


def build(model_config, **changes):
    builder = model_config.get_builder_cls()(model_config)
    return builder.build_model(ProcessGroupCollection.use_mpu_process_groups(), **changes)


def loss_of(model, tokens):
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()


def assert_indexers_have_gradients(model):
    trained = [parameter for name, parameter in model.named_parameters() if ".indexer." in name]
    assert trained and all(parameter.grad.abs().sum() > 0 for parameter in trained)


def test_restored_config_builds_the_same_trainable_model(tmp_path):
    config().to_yaml(tmp_path / "model.yaml")
    torch.manual_seed(0)
    first = build(config())
    torch.manual_seed(0)
    second = build(V4GPTModelConfig.from_yaml(tmp_path / "model.yaml"))
    plan = indexer_config().plan()
    assert [layer.self_attention.layer for layer in second.decoder.layers] == list(plan)
    assert sum(isinstance(module, V4Indexer) for module in second.modules()) == 2
    tokens = torch.randint(96, (2, 33))
    losses = [loss_of(model, tokens) for model in (first, second)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert_indexers_have_gradients(second)


def test_megatrons_own_builder_applies_the_spec_too():
    require_v4_layers(GPTModelBuilder(config()).build_model(ProcessGroupCollection.use_mpu_process_groups()))


def test_prediction_layers_have_their_own_settings():
    changes = dict(num_mtp_layers=1, compress_ratio=[*RATIOS, 2], topk=[*TOPKS, 6])
    mtp = transformer(v4_indexer=indexer_config(**changes), mtp_num_layers=1)
    model = build(V4GPTModelConfig(transformer=mtp, vocab_size=96))
    indexers = {module.layer_number: module.layer.topk for module in model.modules() if isinstance(module, V4Indexer)}
    assert indexers == {2: 2, 4: 5, 5: 6}
    loss_of(model, torch.randint(96, (2, 33))).backward()
    assert_indexers_have_gradients(model)


def test_vocabulary_is_padded_and_demanded():
    padded = V4GPTModelConfig(transformer=transformer(), vocab_size=90, should_pad_vocab=True)
    assert build(padded).vocab_size == 128
    with pytest.raises(ValueError, match="vocab_size"):
        build(V4GPTModelConfig(transformer=transformer()))


def test_model_whose_spec_was_not_applied_is_refused():
    options = dict(vocab_size=96, max_sequence_length=32, position_embedding_type="none")
    ordinary = GPTModel(transformer(), get_gpt_layer_local_spec(normalization="RMSNorm"), **options)
    with pytest.raises(RuntimeError, match="layer 1 has SelfAttention instead of V4SelfAttention"):
        require_v4_layers(ordinary)
    others = transformer(v4_indexer=indexer_config(topk=[1, 3, 1, 3]))
    model = GPTModel(transformer(), v4_layer_spec(others), **options)
    with pytest.raises(RuntimeError, match="layer 2 does not have the settings"):
        require_v4_layers([model])
