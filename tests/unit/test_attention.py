"""The whole self-attention against loops in fp64: every kind of layer, every parameter's gradient."""

import dataclasses
import math
from types import SimpleNamespace

import naive_layer as naive
import pytest
import torch
from megatron.core import parallel_state
from mocked_parallel import (
    FakeGroup,
    assert_gradients,
    attention_config,
    gradients,
    groups,
    inputs,
    layer_config,
    randomize,
    relative_error,
    single_process,
    transformer_config,
)

from nemo_v4_indexer.attention import V4SelfAttention
from nemo_v4_indexer.layer import collecting
from nemo_v4_indexer.ops import loss as losses

EPS, ROWS, TOPK = 1e-6, 23, 2
KINDS = {"window": 0, "uncompressed": 1, "sparse of 2": 2, "sparse of 4": 4, "heavy": 16}


@pytest.fixture(scope="module", autouse=True)
def host():
    with single_process():
        yield


@pytest.fixture(autouse=True)
def unit_loss_scale():
    losses.set_loss_scale(1.0)


def build(ratio, *, attention=None, config=None, **layer):
    group = groups()
    group.tp = parallel_state.get_tensor_model_parallel_group()
    module = V4SelfAttention(
        config or transformer_config(),
        None,
        1,
        layer=layer_config(ratio, **({"topk": TOPK} | layer)),
        attention=attention or attention_config(),
        pg_collection=group,
    )
    return randomize(module)


def probe(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)


def run(module, x, dense=False):
    """Output and gradients, the input's as "x"."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    if module.layer.has_indexer:
        module.indexer.dense_stage = dense
    out, bias = module(x)
    assert bias is None
    (out * probe(out)).sum().backward()
    return out, gradients(module) | {"x": x.grad}


def expected(module, x, coeff=1.0, **options):
    parameters, x = naive.doubled(module), x.double().requires_grad_()
    out, loss, indices = naive.attention(x, parameters, module.layer, module.attention, EPS, **options)
    ((out * probe(out)).sum() + (0 if loss is None else coeff * loss)).backward()
    return out, {name: p.grad for name, p in parameters.items()} | {"x": x.grad}, loss, indices


@pytest.mark.parametrize("rows", [ROWS, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_gradient(kind, rows):
    module, x = build(KINDS[kind]), inputs(rows)
    out, actual = run(module, x)
    reference, wanted, loss, _ = expected(module, x)
    assert out.shape == x.shape and relative_error(out, reference) < 1e-5
    assert_gradients(actual, wanted, limit=1e-4)
    if module.layer.has_indexer:
        means = module.indexer.statistics.means(module.indexer.statistics.take())
        assert means["indexer_loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_dense_stage(ratio):
    module, x = build(ratio, warmup_steps=1, coeff=0.5), inputs(ROWS)
    out, actual = run(module, x, dense=True)
    reference, wanted, loss, _ = expected(module, x, coeff=0.5, dense=True)
    assert relative_error(out, reference) < 1e-5
    assert_gradients(actual, wanted, limit=1e-4)
    means = module.indexer.statistics.means(module.indexer.statistics.take())
    assert means["indexer_loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_selecting_everything_is_the_dense_stage(ratio):
    """In loss and gradients too: both supports hold every visible entry."""
    module, x = build(ratio, topk=ROWS // ratio, warmup_steps=1), inputs(ROWS)
    sparse, dense = run(module, x), run(module, x, dense=True)
    assert relative_error(sparse[0], dense[0]) < 1e-6
    assert_gradients(sparse[1], dense[1], limit=1e-5)


def test_topk_restricts():
    x, outputs = inputs(ROWS), {}
    for topk in (1, 2, ROWS // 4):
        module = build(4, topk=topk)
        outputs[topk] = module(x)[0].detach()
    # A row that sees no more groups than it selects is not restricted; t sees (t + 1) // 4.
    assert relative_error(outputs[1][:7], outputs[5][:7]) < 1e-6
    assert relative_error(outputs[2][:11], outputs[5][:11]) < 1e-6
    assert relative_error(outputs[1][7:], outputs[2][7:]) > 1e-2
    assert relative_error(outputs[2][11:], outputs[5][11:]) > 1e-2


def test_selection_that_the_oracle_did_not_make_is_told_apart():
    module, x = build(4), inputs(ROWS)
    _, _, _, indices = expected(module, x)
    shifted = torch.where(indices > 0, indices - 1, indices)
    out, _, _ = naive.attention(x.double(), naive.doubled(module), module.layer, module.attention, EPS, indices=shifted)
    assert relative_error(module(x)[0], out) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_no_look_ahead(kind):
    ratio, rows = KINDS[kind], 37
    module, x = build(ratio).eval(), inputs(rows)
    before = module(x)[0]
    for changed in (0, 3, 11, 20, 31, rows - 1):
        moved = x.clone()
        moved[changed] = -moved[changed] + 1
        after = module(moved)[0]
        assert relative_error(after[:changed], before[:changed]) < 1e-6 if changed else True
        assert relative_error(after[changed], before[changed]) > 1e-3


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stage", ["sparse", "dense"])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_short_sequences(ratio, rows, stage):
    """Down to one token: finite outputs, a gradient (zero where nothing is visible) for every parameter."""
    module, x = build(ratio, warmup_steps=1), inputs(rows)
    out, actual = run(module, x, dense=stage == "dense")
    reference, wanted, _, _ = expected(module, x, dense=stage == "dense")
    assert relative_error(out, reference) < 1e-5
    for name, gradient in actual.items():
        assert gradient is not None and gradient.isfinite().all(), name
        reference = torch.zeros_like(gradient) if wanted[name] is None else wanted[name]
        assert (gradient.double() - reference).norm() < 1e-4 * max(reference.norm().item(), 1e-2), name


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind, monkeypatch):
    """The memory bound splits rows: outputs, losses and gradients are those of one chunk."""
    from nemo_v4_indexer import reference

    whole_chunk = lambda rows, *_: [(0, rows)]  # noqa: E731
    monkeypatch.setattr(reference, "chunk_rows", whole_chunk)
    module, x = build(KINDS[kind], warmup_steps=1), inputs(ROWS)
    stages = (False, True) if module.layer.has_indexer else (False,)
    whole = [run(module, x, dense) for dense in stages]
    step = 5
    split = lambda rows, *_: [(lo, min(lo + step, rows)) for lo in range(0, rows, step)]  # noqa: E731
    monkeypatch.setattr(reference, "chunk_rows", split)
    for dense, (out, wanted) in zip(stages, whole, strict=True):
        parts, actual = run(module, x, dense)
        assert relative_error(parts, out) < 1e-6
        assert_gradients(actual, wanted, limit=1e-5)


def test_sink_takes_weight():
    module, x = build(4), inputs(ROWS)
    out = module(x)[0].detach()
    with torch.no_grad():
        module.sink.weight.fill_(-math.inf)
    none = module(x)[0].detach()
    with torch.no_grad():
        module.sink.weight.fill_(40.0)
    assert relative_error(none, out) > 0.05
    assert module(x)[0].norm() < 1e-6 * out.norm()


@pytest.mark.parametrize("coeff", [0, None, "frozen"])
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_indexer_without_a_loss(coeff, warmup_steps):
    """Two iterations: the attention trains, the indexer gets nothing, and an optimizer goes on."""
    module = build(4, coeff=1.0 if coeff == "frozen" else coeff, warmup_steps=warmup_steps)
    if coeff == "frozen":
        module.indexer.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        module.indexer.set_step(step)
        out = module(inputs(ROWS, seed=step))[0]
        (out * probe(out)).sum().backward()
        for name, parameter in module.named_parameters():
            assert (parameter.grad is None) == name.startswith("indexer."), name
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("indexer."), name
    means = module.indexer.statistics.means(module.indexer.statistics.take())
    assert "indexer_loss" not in means and 0 < means["recall"] <= 1


def test_evaluation_computes_no_loss(monkeypatch):
    module, x = build(4), inputs(ROWS)
    trained = module(x)[0].detach()
    assert module.indexer.statistics.take() is not None

    def refuse(*_):
        raise AssertionError("the loss was computed")

    monkeypatch.setattr(module.indexer, "loss", refuse)
    with torch.no_grad():
        unrecorded = module(x)[0]
    evaluated = module.eval()(x)[0].detach()
    assert torch.equal(evaluated, trained) and torch.equal(unrecorded, trained)
    assert module.indexer.statistics.take() is None
    with collecting(), torch.no_grad():
        assert torch.equal(module(x)[0], trained)
    assert set(module.indexer.statistics.means(module.indexer.statistics.take())) == {
        "recall",
        "recall_random",
        "tie_rate",
    }


def microbatched(module, x, pieces, scale, per_token):
    """Unscaled gradients after `pieces` micro-batches, as Megatron's schedule and optimizer make them."""
    tokens = x.shape[0] * x.shape[1]
    for part in x.chunk(pieces, dim=1):
        # calculate_per_token_loss: the loss is a sum over tokens, and gradients are divided by all tokens at the end.
        losses.set_loss_scale(torch.tensor(scale if per_token else scale / pieces))
        out = module(part)[0].square()
        (scale * (out.sum() if per_token else out.mean() / pieces)).backward()
    return {name: p.grad / (scale * (tokens if per_token else 1)) for name, p in module.named_parameters()}


@pytest.mark.parametrize("stage", ["sparse", "dense"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("pieces", [1, 4])
def test_loss_scale(pieces, scale, per_token, stage):
    settings = {"warmup_steps": 1 if stage == "dense" else 0}
    x = inputs(ROWS, batch=4)
    wanted = microbatched(build(4, **settings), x, 1, 1.0, False)
    module = build(4, config=transformer_config(calculate_per_token_loss=per_token), **settings)
    actual = microbatched(module, x, pieces, scale, per_token)
    indexer = {name for name in wanted if name.startswith("indexer.")}
    assert len(indexer) == 6
    assert_gradients({n: actual[n] for n in indexer}, {n: wanted[n] for n in indexer}, limit=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind, dtype):
    """Activations of a cast model: near the fp32 result, and every gradient is there and finite."""
    module, x = build(KINDS[kind], topk=ROWS), inputs(ROWS)
    reference, wanted = run(module, x)
    out, actual = run(module.to(dtype), x.to(dtype))
    assert out.dtype == dtype
    assert relative_error(out, reference) < 8 * torch.finfo(dtype).eps
    assert module.sink.weight.dtype == torch.float32
    assert_gradients(actual, wanted, limit=0.1)


def test_errors():
    layer, config = layer_config(4), transformer_config()

    def attempt(config=config, number=1, ranks=1, **attention):
        V4SelfAttention(
            config,
            None,
            number,
            layer=layer,
            attention=attention_config(**attention),
            pg_collection=groups(ranks),
        )

    with pytest.raises(ValueError, match="layer 2 was given the settings of layer 1"):
        attempt(number=2)
    with pytest.raises(ValueError, match="n_heads 4 does not divide over 3 "):
        attempt(ranks=3)
    with pytest.raises(ValueError, match="o_groups 1 does not divide over 2 "):
        attempt(ranks=2, o_groups=1)
    with pytest.raises(NotImplementedError, match=r"layer 1.*hybrid_context_parallel=False"):
        attempt(dataclasses.replace(config, hybrid_context_parallel=True, max_seqlen_per_dp_cp_rank=8))
    module, x = build(4), inputs(8)
    with pytest.raises(NotImplementedError, match=r"layer 1.*inference_context"):
        module(x, None, inference_context=object())
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8]), cu_seqlens_q_padded=None)
    module = build(4, config=transformer_config(context_parallel_size=2))
    with pytest.raises(NotImplementedError, match=r"packed sequences.*context parallelism"):
        module(inputs(8, batch=1), packed_seq_params=packed)


def test_accepts_the_host_s_arguments():
    module = V4SelfAttention(
        transformer_config(),
        None,
        1,
        attn_mask_type=None,
        cp_comm_type="p2p",
        is_mtp_layer=False,
        name="self_attention",
        pp_layer_offset=0,
        layer=layer_config(4),
        attention=attention_config(),
        pg_collection=groups(),
    )
    assert module.indexer.layer_number == 1
    out = build(4)(
        inputs(8),
        attention_mask=None,
        inference_context=None,
        rotary_pos_emb=None,
        rotary_pos_cos=None,
        rotary_pos_sin=None,
        attention_bias=None,
        packed_seq_params=None,
        sequence_len_offset=None,
    )
    assert out[1] is None and out[0].shape == inputs(8).shape


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_hold_halves(sequence_parallel):
    """Rank 1 of a mocked pair: the weights of its heads, cut from those that one rank would hold."""
    config = transformer_config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    halves = []
    for rank in range(2):
        torch.manual_seed(0)
        collection = groups(2, rank)
        halves.append(
            V4SelfAttention(
                config, None, 1, layer=layer_config(4), attention=attention_config(), pg_collection=collection
            )
        )
    torch.manual_seed(0)
    one = groups()
    one.tp = FakeGroup(1)
    whole = V4SelfAttention(
        transformer_config(), None, 1, layer=layer_config(4), attention=attention_config(), pg_collection=one
    )
    named = [dict(half.named_parameters()) for half in halves]
    divided = {"wq_b.weight": 0, "wo_a": 0, "wo_b.weight": 1, "sink.weight": 0}
    for name, parameter in whole.named_parameters():
        parts = [half[name] for half in named]
        if name in divided:
            assert parts[0].tensor_model_parallel and parts[0].partition_dim == divided[name], name
            assert torch.equal(torch.cat(parts, divided[name]), parameter), name
        else:
            assert torch.equal(parts[0], parameter) and torch.equal(parts[1], parameter), name
            assert parts[0].sequence_parallel is sequence_parallel, name
            assert "q_layernorm" not in name and "k_layernorm" not in name


@pytest.fixture
def cpu_random_state(monkeypatch):
    """Megatron's checkpoint also keeps CUDA's generator, which a CPU has not."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda **_: None)
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)


def recomputed(module, way):
    if way == "none":
        return lambda x: module(x)[0]
    if way == "megatron":
        from megatron.core import tensor_parallel

        return lambda x: tensor_parallel.checkpoint(lambda x: module(x)[0], False, x)
    reentrant = way == "reentrant"
    return lambda x: torch.utils.checkpoint.checkpoint(lambda x: module(x)[0], x, use_reentrant=reentrant)


@pytest.mark.parametrize("stage", ["sparse", "dense"])
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "megatron"])
def test_recompute(ratio, way, stage, cpu_random_state):
    results = []
    for how in ("none", way):
        module, x = build(ratio, warmup_steps=1 if stage == "dense" else 0), inputs(ROWS).requires_grad_()
        out = recomputed(module, how)(x)
        (out * probe(out)).sum().backward()
        results.append((out, gradients(module) | {"x": x.grad}, module.indexer.statistics.take()))
    (plain, wanted, counted), (out, actual, recounted) = results
    assert torch.equal(out, plain)
    assert_gradients(actual, wanted, limit=1e-6)
    means, again = (module.indexer.statistics.means(sums) for sums in (counted, recounted))
    assert means == pytest.approx(again, rel=1e-5) and means["indexer_loss"] > 0
    if way != "non-reentrant":  # its first pass is an ordinary forward: sums double there, their means do not
        assert torch.allclose(recounted, counted)
