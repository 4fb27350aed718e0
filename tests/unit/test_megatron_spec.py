"""The layer spec, the config and the model inside Megatron: settings by global number, hooks, full recompute."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from mocked_parallel import ROPE, FakeGroup, assert_gradients, attention_config, gradients, groups, single_process

from nemo_v4_indexer.config import IndexerConfig
from nemo_v4_indexer.integrations import megatron as host
from nemo_v4_indexer.layer import V4Indexer
from nemo_v4_indexer.ops import loss as losses

RATIOS, TOPKS = [0, 4, 16, 1, 2, 4, 0, 3], [1, 2, 1, 3, 4, 5, 1, 6]


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with single_process():
        yield


def indexer_config(ratios=RATIOS, topks=TOPKS, **changes):
    settings = dict(num_layers=len(ratios), compress_ratio=ratios, topk=topks, n_heads=4, head_dim=16, heavy_ratio=16)
    settings |= dict(window=5, rope=ROPE, backend="reference", loss={"coeff": 1.0})
    return IndexerConfig.from_dict(settings | changes)


def config(**changes):
    settings = dict(num_layers=len(RATIOS), hidden_size=40, num_attention_heads=4, use_cpu_initialization=True)
    settings |= dict(v4_indexer=indexer_config(), v4_attention=attention_config(), normalization="RMSNorm")
    return host.V4TransformerConfig(**(settings | changes))


def settings_of(spec):
    return [layer.submodules.self_attention.params["layer"] for layer in spec.layer_specs]


def test_layers_carry_their_own_settings():
    layers = settings_of(host.v4_layer_spec(config()))
    assert [layer.layer_number for layer in layers] == list(range(1, 9))
    assert [layer.compress_ratio for layer in layers] == RATIOS
    assert [layer.topk for layer in layers] == [0, 2, 0, 3, 4, 5, 0, 6]
    wrapped = type("ModelConfig", (), {"transformer": config()})()
    assert settings_of(host.v4_layer_spec(wrapped, vp_stage=None)) == layers


STAGES = {
    "even": ({}, [4, 4]),
    "short first stage": ({"num_layers_in_first_pipeline_stage": 2}, [2, 6]),
    "short last stage": ({"num_layers_in_last_pipeline_stage": 3}, [5, 3]),
    "both given": ({"num_layers_in_first_pipeline_stage": 7, "num_layers_in_last_pipeline_stage": 1}, [7, 1]),
}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("stage", [0, 1])
def test_pipeline_stages(monkeypatch, stages, stage):
    """Each stage gets the entries of its global numbers, and Megatron builds layers of those numbers from them."""
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: stage)
    uneven, counts = STAGES[stages]
    parts = config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, **uneven)
    first = sum(counts[:stage])
    expected = list(range(first + 1, first + counts[stage] + 1))
    spec = host.v4_layer_spec(parts)
    assert [layer.layer_number for layer in settings_of(spec)] == expected
    collection = groups()
    collection.tp, collection.pp = parallel_state.get_tensor_model_parallel_group(), FakeGroup(2, stage)
    block = TransformerBlock(parts, spec, post_process=False, pg_collection=collection)
    assert [layer.layer_number for layer in block.layers] == expected
    assert [layer.self_attention.layer.compress_ratio for layer in block.layers] == [RATIOS[n - 1] for n in expected]
    indexers = [m.layer_number for m in block.modules() if isinstance(m, V4Indexer)]
    assert indexers == [n for n in expected if RATIOS[n - 1] in (1, 2, 3, 4)]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("vp_stage", [0, 1])
def test_virtual_pipeline_stages(monkeypatch, stage, vp_stage):
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: stage)
    parts = config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    layers = settings_of(host.v4_layer_spec(parts, vp_stage=vp_stage))
    first = 4 * vp_stage + 2 * stage + 1
    assert [layer.layer_number for layer in layers] == [first, first + 1]


@pytest.mark.parametrize(("every", "expected"), [(1, [1] * 8), (3, [1, 0, 0, 1, 0, 0, 1, 0]), ([0, 1] * 4, [0, 1] * 4)])
def test_experts_where_megatron_s_options_ask_for_them(every, expected):
    layers = host.v4_layer_spec(config(num_moe_experts=4, moe_layer_freq=every, add_bias_linear=False)).layer_specs
    assert [int(layer.submodules.mlp.func is MoELayer) for layer in layers] == expected


def test_experts_train(small):
    """Router, routed and shared experts beside attention and indexer; Megatron's other dispatchers need CUDA."""
    plain = small().config
    experts = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_shared_expert_intermediate_size=24)
    names = ("num_layers", "hidden_size", "num_attention_heads", "v4_indexer", "v4_attention", "gated_linear_unit")
    kept = {name: getattr(plain, name) for name in (*names, "activation_func", "add_bias_linear", "hidden_dropout")}
    mixed = host.V4TransformerConfig(
        **kept, **experts, moe_layer_freq=[0, 1, 1, 1], moe_token_dispatcher_type="allgather",
        attention_dropout=0.0, use_cpu_initialization=True, gradient_accumulation_fusion=False,
    )  # fmt: skip
    model = GPTModel(mixed, host.v4_layer_spec(mixed), 32, 24, position_embedding_type="none")
    step(model).mean().backward()
    assert sum(".experts." in name for name, _ in model.named_parameters()) == 3 * 4 * 2
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_spec_of_another_config_is_refused(monkeypatch):
    monkeypatch.delenv("NEMO_V4_INDEXER_CONFIG", raising=False)
    with pytest.raises(TypeError, match="V4TransformerConfig, got TransformerConfig"):
        host.v4_layer_spec(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v4_indexer": None}, "needs v4_indexer.*IndexerConfig.*None"),
        ({"v4_attention": None}, "needs v4_attention.*AttentionConfig.*None"),
        ({"num_layers": 7}, "v4_indexer.num_layers is 8, but num_layers is 7"),
        ({"num_attention_heads": 8}, "v4_attention.n_heads is 4, but num_attention_heads is 8"),
    ],
)
def test_mismatches_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_config_from_plain_mappings():
    plain = config(v4_indexer=indexer_config().to_dict(), v4_attention=attention_config().to_dict())
    assert plain.v4_indexer == indexer_config() and plain.v4_attention == attention_config()


def test_loss_scale_hook():
    assert config().experimental_attention_variant is None
    assert config().experimental_attention_variant_loss_scale_func is losses.set_loss_scale
    own = lambda scale: None  # noqa: E731
    assert (
        config(experimental_attention_variant_loss_scale_func=own).experimental_attention_variant_loss_scale_func is own
    )


def test_megatron_s_schedule_calls_the_hook(monkeypatch):
    """Megatron's schedule finds the hook and hands it loss scale over micro-batches."""
    from megatron.core.pipeline_parallel import schedules

    seen = []
    settings = config(grad_scale_func=lambda x: x * 1024)
    settings.experimental_attention_variant_loss_scale_func = lambda scale: seen.append(float(scale))
    finish = schedules.forward_step_calc_loss
    for per_token, expected in ((False, 256.0), (True, 1024.0)):
        settings.calculate_per_token_loss = per_token
        out = torch.ones(3, requires_grad=True)
        returned = (out.sum(), torch.tensor(3), {}) if per_token else (out.sum(), {})
        finish(None, out, lambda _, value=returned: value, settings, None, False, 4, [], 1, True)
        assert seen.pop() == expected


@pytest.fixture
def small():
    def build(**changes):
        indexer = indexer_config([0, 4, 16, 1], 2, **changes)
        sizes = dict(hidden_size=40, num_layers=4, ffn_hidden_size=48)
        return host.build_gpt_model(
            sizes,
            attention_config(),
            indexer,
            vocab_size=32,
            sequence_length=24,
            tensor_parallel=1,
            sequence_parallel=False,
            seed=3,
        )

    losses.set_loss_scale(1.0)
    return build


def step(model, seed=0, rows=24):
    tokens = torch.randint(0, 32, (2, rows + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(rows)[None].expand(2, -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])


def test_model_trains_every_parameter(small):
    model = small()
    loss = step(model)
    assert loss.shape == (2, 24) and loss.dtype == torch.float32
    loss.mean().backward()
    host.finalize_gradients(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_same_seed_same_weights(small):
    torch.manual_seed(0)
    first = small().state_dict()
    torch.manual_seed(1)
    second = small().state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first if torch.is_tensor(first[n]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 31}, "vocab_size 31 does not divide"),
        ({"sequence_length": 23, "sequence_parallel": True}, "sequence length 23 does not divide"),
        ({"model": dict(hidden_size=40, num_layers=4, ffn_hidden_size=47)}, "ffn_hidden_size 47 does not divide"),
    ],
)
def test_sizes_that_do_not_divide(changes, message):
    settings = dict(vocab_size=32, sequence_length=24, tensor_parallel=2, sequence_parallel=False, seed=3)
    settings |= dict(model=dict(hidden_size=40, num_layers=4, ffn_hidden_size=48))
    settings |= dict(attention=attention_config(), indexer=indexer_config([0, 4, 16, 1], 2))
    with pytest.raises(ValueError, match=message):
        host.build_gpt_model(**(settings | changes))


def test_metrics_name_layers_and_average_those_with_an_indexer(small):
    model = small()
    step(model).mean().backward()
    step(model, seed=1).mean().backward()
    metrics = host.indexer_metrics(model)
    names = {"indexer_loss", "kl_uniform", "recall", "recall_random", "tie_rate"}
    assert set(metrics) == names | {f"layer_{number}/{name}" for number in (2, 4) for name in names}
    for name in names:
        assert metrics[name] == pytest.approx((metrics[f"layer_2/{name}"] + metrics[f"layer_4/{name}"]) / 2)
    assert host.indexer_metrics(model) == {}
    with torch.no_grad():
        step(model.eval())
    assert host.indexer_metrics(model) == {}
    with torch.no_grad(), host.collecting():
        step(model)
    assert {name for name in host.indexer_metrics(model) if "/" not in name} == names - {"indexer_loss", "kl_uniform"}


def test_metrics_of_a_model_without_indexers():
    indexer = indexer_config([0, 16], 1)
    sizes = dict(hidden_size=40, num_layers=2, ffn_hidden_size=48)
    options = dict(vocab_size=32, sequence_length=24, tensor_parallel=1, sequence_parallel=False, seed=3)
    model = host.build_gpt_model(sizes, attention_config(), indexer, **options)
    step(model).mean().backward()
    assert host.indexer_metrics(model) == {}


def test_stages_reach_every_indexer(small):
    model = small(loss={"coeff": 1.0, "warmup_steps": 2})
    found = [m for m in model.modules() if isinstance(m, V4Indexer)]
    for number, dense in ((0, True), (1, True), (2, False), (1, True)):
        host.set_indexer_step(model, number)
        assert [m.dense_stage for m in found] == [dense] * 2


@pytest.mark.parametrize("warmup_steps", [0, 1])
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute(small, monkeypatch, warmup_steps, granularity):
    """Megatron's recompute of whole layers, or of its selected modules: gradients and metrics of a plain run."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda **_: None)
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
    plain, model = (small(loss={"coeff": 1.0, "warmup_steps": warmup_steps}) for _ in range(2))
    for settings in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        settings.recompute_granularity = granularity
        if granularity == "full":
            settings.recompute_method, settings.recompute_num_layers = "uniform", 1
    passes = []
    attention = model.decoder.layers[1].self_attention
    attention.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    results = []
    for each in (plain, model):
        step(each).mean().backward()
        results.append((gradients(each), host.indexer_metrics(each)))
    assert passes == ([False, True] if granularity == "full" else [True])
    assert_gradients(results[1][0], results[0][0], limit=1e-6)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)
