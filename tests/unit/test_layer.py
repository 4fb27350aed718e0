"""The indexer layer: what it computes, what it keeps in fp32, what it saves, how it divides over ranks."""

import copy
import pickle

import naive_layer as naive
import pytest
import torch
from megatron.core.transformer.module import Float16Module
from mocked_parallel import (
    Q_LORA,
    FakeGroup,
    assert_gradients,
    gradients,
    groups,
    inputs,
    layer_config,
    randomize,
    relative_error,
    run_ranks,
    transformer_config,
)

from nemo_v4_indexer.layer import V4Indexer, collecting

EPS, ROWS, TOPK = 1e-6, 41, 3
RATIOS = [1, 2, 4]


def build(ratio=4, *, tensor_parallel=1, group=None, config=None, **layer):
    collection = groups(tensor_parallel)
    if group is not None:
        collection.tp = group
    settings = layer_config(ratio, topk=TOPK, **layer)
    config = config or transformer_config()
    module = V4Indexer(config, None, 1, layer=settings, q_lora_rank=Q_LORA, pg_collection=collection)
    return randomize(module)


def activations(rows=ROWS):
    return inputs(rows), inputs(rows, Q_LORA, seed=7)


def reference_scores(module, x, qr, parameters=None, **changes):
    parameters = parameters or naive.doubled(module)
    vectors = naive.index_vectors(x.double(), qr.double(), parameters, module.layer, EPS, **changes)
    return naive.index_scores(*vectors, module.layer.compress_ratio)


def same_selection(a, b):
    return torch.equal(a.long(), b.long())


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("rotate", [True, False])
def test_scores_and_selection(ratio, rotate):
    module, (x, qr) = build(ratio, rotate=rotate), activations()
    selection = module(x, qr)
    scores = reference_scores(module, x, qr)
    indices = naive.select(scores, TOPK)
    assert selection.indices.dtype == torch.int32 and selection.weights.dtype == torch.float32
    assert same_selection(selection.indices, indices) and same_selection(selection.own_indices, indices)
    used = indices >= 0
    picked = scores.gather(-1, indices.clamp(min=0))
    assert relative_error(selection.scores[used], picked[used]) < 1e-5
    assert (selection.scores[~used] == float("-inf")).all() and (~used).any()
    # Far more keys than slots, and weights of both signs: the selection means something.
    assert scores.shape[-1] >= 3 * TOPK and (selection.weights < 0).any() and (selection.weights > 0).any()


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradients_of_scores(ratio):
    module, (x, qr) = build(ratio), activations(23)
    scores = module(x, qr).scores
    probe = torch.randn(scores.shape, generator=torch.Generator().manual_seed(3))
    used = scores > float("-inf")
    (scores[used] * probe[used]).sum().backward()
    parameters = naive.doubled(module)
    expected = reference_scores(module, x, qr, parameters)
    indices = naive.select(expected, TOPK)
    (expected.gather(-1, indices.clamp(min=0))[used] * probe[used]).sum().backward()
    assert_gradients(gradients(module), {name: p.grad for name, p in parameters.items()}, limit=1e-4)


FLIPS = {
    "rope pairing": {"turn": lambda x, t, **rope: naive.rope_half_split(x.flip(-1), t, **rope).flip(-1)},
    "rope end": {"turn": naive.rope_half_split},
    "no rope": {"turn": lambda x, t, **rope: x},
    "no norm": {"norm": False},
    "rotated queries": {"rotate_k": False},
    "rotated keys": {"rotate_q": False},
}


@pytest.mark.parametrize("flip", FLIPS)
def test_another_rule_selects_otherwise(flip):
    module, (x, qr) = build(4), activations()
    selected = module(x, qr).indices
    other = naive.select(reference_scores(module, x, qr, **FLIPS[flip]), TOPK)
    restricted = slice((TOPK + 1) * 4 - 1, None)
    assert (selected != other)[:, restricted].any(-1).float().mean() > 0.2


def test_unsigned_weights_select_otherwise():
    module, (x, qr) = build(4), activations()
    q, k, weights = naive.index_vectors(x.double(), qr.double(), naive.doubled(module), module.layer, EPS)
    selected = module(x, qr).indices
    for other in (weights.abs(), weights.clamp(min=0), weights.softmax(-1)):
        assert not same_selection(selected, naive.select(naive.index_scores(q, k, other, 4), TOPK))
    # relu off: the sum of signed products ranks otherwise too
    signed = torch.einsum("sbhd,gbd,sbh->bsg", q, k, weights)
    signed = signed.masked_fill(reference_scores(module, x, qr) == float("-inf"), float("-inf"))
    assert not same_selection(selected, naive.select(signed, TOPK))


def test_rotation_of_both_sides_changes_nothing():
    (x, qr), plain = activations(), build(4, rotate=False)
    rotated = build(4, rotate=True)
    rotated.load_state_dict(plain.state_dict())
    with torch.no_grad():
        a, b = plain(x, qr), rotated(x, qr)
    assert relative_error(a.q, b.q) > 0.1
    assert same_selection(a.indices, b.indices)
    used = a.indices >= 0
    assert relative_error(a.scores[used], b.scores[used]) < 1e-5


@pytest.mark.parametrize("ratio", RATIOS)
def test_before_topk(ratio):
    """The entry that Megatron's DSAttention calls gives what the selection was made of."""
    module, (x, qr) = build(ratio), activations()
    q, k, weights = module.forward_before_topk(x, qr, None)
    selection = module(x, qr)
    expected = naive.index_vectors(x.double(), qr.double(), naive.doubled(module), module.layer, EPS)
    for ours, kept, reference in zip(
        (q, k, weights), (selection.q, selection.k, selection.weights), expected, strict=True
    ):
        assert torch.equal(ours, kept) and relative_error(ours, reference) < 1e-5
    with pytest.raises(NotImplementedError, match="packed_seq_params"):
        module.forward_before_topk(x, qr, object())


KEPT = {
    1: {"weights_proj.weight", "keys.wk.weight", "keys.norm.weight", "keys.norm.bias"},
    4: {
        "weights_proj.weight",
        *(f"compressor.{name}" for name in ("ape", "wkv.weight", "wgate.weight", "norm.weight")),
    },
}


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("lower", ["bfloat16", "half", "Float16Module"])
def test_parameters_kept_in_fp32(ratio, lower):
    config = transformer_config(bf16=True) if lower == "Float16Module" else transformer_config()
    module = build(ratio, config=config)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module = Float16Module(config, module).module if lower == "Float16Module" else getattr(module, lower)()
    dtype = torch.float16 if lower == "half" else torch.bfloat16
    assert set(before) == KEPT[ratio] | {"wq_b.weight"}
    for name, parameter in module.named_parameters():
        assert parameter.dtype == (torch.float32 if name in KEPT[ratio] else dtype), name
        if name in KEPT[ratio]:
            assert torch.equal(parameter, before[name]), name
    x, qr = (t.to(dtype) for t in activations())
    selection = module(x, qr)
    assert (selection.q.dtype, selection.k.dtype, selection.weights.dtype) == (dtype, dtype, torch.float32)
    weights = x.double() @ before["weights_proj.weight"].double().T / 8
    assert relative_error(selection.weights, weights) < 1e-6
    selection.scores[selection.indices >= 0].sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == parameter.dtype and parameter.grad.any(), name


def test_layer_survives_a_cast_and_back():
    module = build(4)
    weight = module.compressor.ape.detach().clone()
    assert torch.equal(module.bfloat16().float().compressor.ape, weight)
    assert module.double().compressor.ape.dtype == torch.float64


def test_no_gradient_leaves_the_indexer():
    module, (x, qr) = build(4), activations()
    x.requires_grad_(), qr.requires_grad_()
    module(x, qr).scores.nan_to_num(neginf=0).sum().backward()
    assert x.grad is None and qr.grad is None
    assert all(p.grad.any() for p in module.parameters())


def saved_bytes(function):
    """Bytes that autograd saves while function() runs, and its result."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return sum(sizes), result


@pytest.mark.parametrize("ratio", RATIOS)
def test_eval_saves_nothing_and_selects_the_same(ratio):
    module, (x, qr) = build(ratio), activations()
    size, trained = saved_bytes(lambda: module(x, qr))
    assert size > 0 and module.trains and module.collects
    module.eval()
    size, evaluated = saved_bytes(lambda: module(x, qr))
    assert size == 0 and not evaluated.scores.requires_grad
    assert not module.trains and not module.collects
    module.train()
    with torch.no_grad():
        size, unrecorded = saved_bytes(lambda: module(x, qr))
        assert not module.trains and not module.collects
    assert size == 0
    for other in (evaluated, unrecorded):
        assert torch.equal(other.indices, trained.indices) and torch.equal(other.scores, trained.scores)


def test_saved_tensors_are_linear_in_the_rows():
    """Nothing of size rows x groups, let alone times heads, waits for backward."""
    module = build(4)
    sizes = {}
    for rows in (256, 512, 1024):
        sizes[rows], _ = saved_bytes(lambda rows=rows: module(*activations(rows)))
    assert sizes[1024] - sizes[512] < 2.05 * (sizes[512] - sizes[256])


@pytest.mark.parametrize("coeff", [0, None])
def test_without_a_loss_nothing_is_trainable(coeff):
    module, (x, qr) = build(4, coeff=coeff, warmup_steps=5), activations()
    assert not any(p.requires_grad for p in module.parameters())
    module.set_step(0)
    assert not module.trains and not module.dense_stage and module.collects
    size, selection = saved_bytes(lambda: module(x, qr))
    assert size == 0
    assert same_selection(selection.indices, naive.select(reference_scores(module, x, qr), TOPK))


def test_frozen_indexer_selects_and_does_not_train():
    module, (x, qr) = build(4, warmup_steps=5), activations()
    module.requires_grad_(False)
    assert module.dense_stage and not module.trains
    assert same_selection(module(x, qr).indices, naive.select(reference_scores(module, x, qr), TOPK))


def test_stages():
    module, (x, qr) = build(4, warmup_steps=2), activations()
    stages = []
    for step in range(4):
        module.set_step(step)
        stages.append(module(x, qr).indices is None)
    assert stages == [True, True, False, False]
    module.set_step(0)
    with torch.no_grad():  # the first pass of a recomputed layer
        assert module(x, qr).indices is None
    assert module.eval()(x, qr).indices is not None


def test_collecting_in_eval():
    module = build(4).eval()
    with collecting():
        assert module.collects and not module.trains
        with collecting():
            pass
        assert module.collects
    assert not module.collects


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ratio", [1, 4])
def test_marks_of_replicated_parameters(sequence_parallel, ratio):
    config = transformer_config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    module = build(ratio, tensor_parallel=2, config=config)
    named = dict(module.named_parameters())
    assert set(named) == KEPT[ratio] | {"wq_b.weight"}
    for name, parameter in named.items():
        # Megatron sums names like these even without sequence parallelism.
        assert "q_layernorm" not in name and "k_layernorm" not in name
        assert parameter.sequence_parallel is sequence_parallel, name
        assert parameter.average_gradients_across_tp_domain is not sequence_parallel, name
        assert not getattr(parameter, "tensor_model_parallel", False), name


def test_no_marks_on_one_rank():
    for parameter in build(4).parameters():
        assert not parameter.sequence_parallel and not parameter.average_gradients_across_tp_domain


def test_constructor_accepts_the_host_s_keywords():
    module = V4Indexer(
        transformer_config(),
        None,
        1,
        layer=layer_config(4),
        q_lora_rank=Q_LORA,
        pg_collection=groups(),
        attn_mask_type=None,
        attention_type="self",
        cp_comm_type="p2p",
        is_mtp_layer=False,
        name="indexer",
        pp_layer_offset=0,
    )
    assert "ratio 4, topk 3" in repr(module)
    assert pickle.loads(pickle.dumps(module.layer)) == module.layer


@pytest.mark.parametrize("ratio", [0, 16])
def test_layer_without_an_indexer_is_refused(ratio):
    with pytest.raises(ValueError, match=rf"layer 1 is .*ratio {ratio}"):
        build(ratio)


SPLITS = [(2, 16), (2, 13), (3, 5), (3, 7), (4, 3), (4, 10)]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("size", "rows"), SPLITS)
def test_sharded_rows(monkeypatch, ratio, size, rows):
    """Under sequence parallelism a rank projects, scores and selects its own rows, and only those."""
    (x, qr), whole = activations(size * rows), build(ratio)
    expected = whole(x, qr)
    probe = torch.randn(expected.scores.shape, generator=torch.Generator().manual_seed(5))
    (expected.scores * probe)[expected.indices >= 0].sum().backward()
    config = transformer_config(tensor_model_parallel_size=size, sequence_parallel=True, num_attention_heads=4 * size)
    modules = [build(ratio, config=config, group=FakeGroup(size, rank)) for rank in range(size)]

    def rank(group):
        module, own = modules[group.rank()], slice(group.rank() * rows, (group.rank() + 1) * rows)
        module.groups.tp = group
        selection = module(x[own], qr[own])
        used = selection.own_indices >= 0
        (selection.scores * probe[:, own])[used].sum().backward()
        return selection

    selections, calls = run_ranks(monkeypatch, size, rank)
    for selection in selections:
        assert torch.equal(selection.indices, expected.indices)
        assert selection.q.shape[0] == rows and selection.scores.shape[1] == rows
    assert torch.equal(torch.cat([s.own_indices for s in selections], 1), expected.indices)
    scores = torch.cat([s.scores for s in selections], 1)
    assert relative_error(scores[expected.indices >= 0], expected.scores[expected.indices >= 0]) < 1e-5
    total = {name: sum(gradients(m)[name] for m in modules) for name in gradients(whole)}
    assert_gradients(total, gradients(whole), limit=1e-5)
    # Gathered: projected rows of the halo, keys, indices; nothing as wide as x or qr, nothing as long as x and qr.
    forward = [shape for name, shape in calls[0] if name == "all_gather"]
    assert {shape[-1] for shape in forward} <= {16, 64, TOPK}
    assert forward[-1] == (rows, 2, TOPK)
    if ratio > 1:
        halo = min(2 * ratio - 1, rows)
        counts = [(i + 1) * rows // ratio - i * rows // ratio for i in range(size)]
        assert forward == [(halo, 2, 64), (max(counts), 2, 16), (rows, 2, TOPK)]


@pytest.mark.parametrize(("size", "rows", "divided"), [(2, 26, True), (2, 27, False), (3, 27, True), (4, 27, False)])
def test_rows_divide_without_sequence_parallelism(monkeypatch, size, rows, divided):
    """Every rank holds all rows; they share the work where the rows divide evenly, else each does it all."""
    (x, qr), whole = activations(rows), build(4)
    expected = whole(x, qr)
    modules = [copy.deepcopy(whole) for _ in range(size)]

    def rank(group):
        modules[group.rank()].groups.tp = group
        return modules[group.rank()](x, qr)

    selections, calls = run_ranks(monkeypatch, size, rank)
    for selection in selections:
        assert torch.equal(selection.indices, expected.indices)
        assert selection.q.shape[0] == (rows // size if divided else rows)
    assert bool(calls[0]) == divided
