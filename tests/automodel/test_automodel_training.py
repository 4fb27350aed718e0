"""Training AutoModel's DeepSeek-V4 with the indexer's loss: teacher, gradients, stages, AutoModel's own freezing."""

import logging

import pytest

pytest.importorskip(
    "nemo_automodel", reason="nemo-automodel 0.7.0 is not installed: pip install 'nemo-v4-indexer[automodel]'"
)

import torch
from nemo_automodel._transformers.infrastructure import apply_model_infrastructure
from nemo_automodel.components.moe.megatron.moe_utils import MoEAuxLossAutoScaler
from tiny_v4 import CONFIG, TOPK, S, build, compressors, taps, tokens

from nemo_v4_indexer import reference, visibility
from nemo_v4_indexer.integrations.automodel import (
    AdamW,
    indexer_metrics,
    install_indexers,
    restore_indexers,
    unfreeze_indexers,
)
from nemo_v4_indexer.integrations.automodel_indexer import recomputed_mass


@pytest.fixture(autouse=True)
def unit_scale():
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    yield
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def indexer_parameters(model):
    return {name: p for name, p in model.named_parameters() if ".compressor.indexer." in name}


def language_loss(out, ids):
    return torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model, ids, loss_weight=0.0, **batch):
    """Gradients of the indexers' loss, plus `loss_weight` times the language model's; and the metrics."""
    model.zero_grad()
    indexer_metrics(model)
    (loss_weight * language_loss(model(input_ids=ids, **batch), ids)).backward()
    return {n: p.grad for n, p in model.named_parameters()}, indexer_metrics(model)


def naive_loss(model, seen, number, live=None):
    """The KL of the specification, fp64, with its graph to the indexer's parameters; dense or over the selection.

    seen: what `taps` recorded. live: bool [B, S], rows that count.
    """
    selection, probabilities, _, entries = seen[number]
    groups = entries.shape[2]
    mass = probabilities[..., -groups:].detach().double().sum(1)
    scores = reference.scores(selection.q.double(), selection.k.double(), selection.weights.double())
    support = torch.zeros_like(scores, dtype=torch.bool)
    for b, sample in enumerate(selection.indices):
        for t, row in enumerate(sample):
            support[b, t, row[row >= 0].long()] = True
    total = rows = 0
    for b in range(scores.shape[0]):
        for t in range(scores.shape[1]):
            if support[b, t].any() and (live is None or live[b, t]):
                p = mass[b, t, support[b, t]]
                p = p / p.sum()
                log_q = scores[b, t, support[b, t]].log_softmax(-1)
                total, rows = total + (torch.xlogy(p, p) - p * log_q).sum(), rows + 1
    return total / rows


def assert_same_gradients(actual, expected):
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-6, name
        assert ((actual[name].double() - gradient).norm() / gradient.norm()) < 1e-4, name


@pytest.mark.parametrize("warmup", [0, 1], ids=["sparse", "dense"])
def test_gradients_are_those_of_the_specification(warmup):
    model, ids = build({"loss": {"coeff": 0.5, "warmup_steps": warmup}}), tokens()
    own = indexer_parameters(model)
    actual, metrics = gradients(model, ids)
    with taps(model) as seen:
        model(input_ids=ids)
    losses = {number: naive_loss(model, seen, number) for number in compressors(model)}
    expected = torch.autograd.grad(0.5 * sum(losses.values()), own.values())
    assert_same_gradients(actual, dict(zip(own, expected, strict=True)))
    for number, loss in losses.items():
        assert metrics[f"layer_{number}/indexer_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["kl_uniform"] > 0


@pytest.mark.parametrize("warmup", [0, 1], ids=["sparse", "dense"])
def test_teacher_has_window_and_sink_in_its_denominator(warmup):
    """The recomputed teacher (for kernels that keep no probabilities) equals AutoModel's own attention."""
    model, ids = build({"loss": {"coeff": 1.0, "warmup_steps": warmup}}), tokens()
    with taps(model) as seen:
        model(input_ids=ids)
    for number, (selection, probabilities, kwargs, entries) in seen.items():
        attention = model.model.layers[str(number - 1)].self_attn
        mass = probabilities[..., -entries.shape[2] :].sum(1)
        if not warmup:
            mass = mass.gather(-1, selection.indices.clamp(min=0).long()).masked_fill(selection.indices < 0, 0)
        again = recomputed_mass(attention, kwargs, entries[:, 0], selection)
        torch.testing.assert_close(again, mass, rtol=1e-4, atol=1e-5)
        totals = mass.sum(-1)[:, 40:]
        assert totals.min() > 0.05 and totals.max() < CONFIG["num_attention_heads"] - 0.05
        with torch.no_grad():
            attention.sinks_param.weight.add_(3.0)
            assert (recomputed_mass(attention, kwargs, entries[:, 0], selection) < 0.9 * again)[again > 0.01].any()


def test_teacher_without_probabilities_trains_the_same():
    model, ids = build(), tokens()
    expected, _ = gradients(model, ids)
    for number in compressors(model):
        attention = model.model.layers[str(number - 1)].self_attn
        attention.register_forward_hook(lambda module, args, output: (output[0], None), prepend=True)
    actual, _ = gradients(model, ids)
    for name in indexer_parameters(model):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-3, atol=1e-6)


def test_the_loss_reaches_the_indexers_alone():
    model, ids = build(), tokens()
    for name, gradient in gradients(model, ids)[0].items():
        moved = gradient is not None and gradient.norm() > 0
        assert moved == (".compressor.indexer." in name), name
    with_loss, _ = gradients(model, ids, loss_weight=1.0)
    restore_indexers(model)
    install_indexers(model, {"backend": "reference", "loss": {"coeff": None}})
    without, metrics = gradients(model, ids, loss_weight=1.0)
    assert metrics == {}
    for name in with_loss.keys() - indexer_parameters(model).keys():
        if without[name] is not None:
            torch.testing.assert_close(with_loss[name], without[name], rtol=1e-4, atol=1e-6)


def test_follows_automodels_scale_of_auxiliary_losses():
    model, ids = build(), tokens()
    whole, _ = gradients(model, ids)
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(0.25)  # as AutoModel sets for four micro-batches
    part, _ = gradients(model, ids)
    for name in indexer_parameters(model):
        torch.testing.assert_close(part[name], 0.25 * whole[name])


@pytest.mark.parametrize("warmup", [0, 1], ids=["sparse", "dense"])
def test_padding_does_not_count(warmup):
    model, ids = build({"loss": {"coeff": 1.0, "warmup_steps": warmup}}), tokens()
    mask = torch.ones_like(ids)
    mask[0, 41:] = 0
    actual, metrics = gradients(model, ids, attention_mask=mask)
    with taps(model) as seen:
        model(input_ids=ids, attention_mask=mask)
    losses = {number: naive_loss(model, seen, number, live=mask.bool()) for number in compressors(model)}
    own = indexer_parameters(model)
    expected = torch.autograd.grad(sum(losses.values()), own.values())
    assert_same_gradients(actual, dict(zip(own, expected, strict=True)))
    other = ids.clone()
    other[0, 41:] = (other[0, 41:] + 7) % CONFIG["vocab_size"]
    assert gradients(model, other, attention_mask=mask)[1] == pytest.approx(metrics, rel=1e-5)


def test_nothing_is_computed_in_evaluation():
    model, ids = build(), tokens()
    model.eval()
    model(input_ids=ids)
    assert indexer_metrics(model) == {}
    model.train()
    with torch.no_grad():
        model(input_ids=ids)
    assert indexer_metrics(model) == {}
    assert all(c.indexer.selection is None for c in compressors(model).values())


def test_dense_stage_attends_to_everything_visible():
    model, ids = build({"loss": {"coeff": 1.0, "warmup_steps": 3}}), tokens()
    with taps(model) as seen:
        model(input_ids=ids)
    visible = visibility.visible(*visibility.causal_limits(S, 4, S // 4), S // 4)
    for _, probabilities, _, entries in seen.values():
        attended = (probabilities[..., -entries.shape[2] :] > 0).any(1)
        assert torch.equal(attended, visible.expand_as(attended))


def infrastructure(model):
    return apply_model_infrastructure(model, is_meta_device=False, device=torch.device("cpu"))


def test_automodel_freezes_and_the_optimizer_undoes_it(caplog):
    model, ids = infrastructure(build()), tokens()
    own = indexer_parameters(model)
    assert own and not any(p.requires_grad for p in own.values())
    with pytest.raises(
        RuntimeError, match=r"layer 2 has a loss, but AutoModel froze its parameters.*optimizer\._target_"
    ):
        model(input_ids=ids)
    with caplog.at_level(logging.INFO, logger="nemo_v4_indexer"):
        (optimizer,) = AdamW(lr=1e-3).build(model)
    assert [r.message for r in caplog.records] == ["12 indexer parameters that AutoModel had frozen now train"]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_trains_both_stages():
    """A few steps on one batch with everything else frozen, so that the teacher changes with the stage alone."""
    model, ids = infrastructure(build({"loss": {"coeff": 1.0, "warmup_steps": 12}})), tokens()
    (optimizer,) = AdamW(lr=2e-2, weight_decay=0.0, indexer_only=True, log_every=0).build(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for step in range(30):
        assert all(c.indexer.dense_stage == (step < 12) for c in compressors(model).values())
        _, metrics = gradients(model, ids)
        losses.append(metrics["layer_2/indexer_loss"])
        optimizer.step()
    assert losses[11] < 0.7 * losses[0], losses
    assert losses[29] < 0.8 * losses[12], losses
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == (".compressor.indexer." in name), name


def test_trains_with_the_rest_of_the_model(caplog):
    model, ids = infrastructure(build()), tokens()
    (optimizer,) = AdamW(lr=5e-3, log_every=5).build(model)
    first = None
    with caplog.at_level(logging.INFO, logger="nemo_v4_indexer"):
        for _ in range(10):
            optimizer.zero_grad()
            loss = language_loss(model(input_ids=ids), ids)
            loss.backward()
            optimizer.step()
            first = first or loss.item()
    assert loss.item() < first
    reports = [r.message for r in caplog.records if r.message.startswith("step ")]
    assert [r.split(":")[0] for r in reports] == ["step 5", "step 10"]
    assert "indexer_loss" in reports[0] and "kl_uniform" in reports[0]


def test_a_resumed_optimizer_restores_the_stage():
    def fresh():
        model = build({"loss": {"coeff": 1.0, "warmup_steps": 2}})
        return model, AdamW(lr=1e-3).build(model)[0]

    model, optimizer = fresh()
    for _ in range(2):
        gradients(model, tokens())
        optimizer.step()
    assert not any(c.indexer.dense_stage for c in compressors(model).values())
    other, resumed = fresh()
    assert all(c.indexer.dense_stage for c in compressors(other).values())
    resumed.load_state_dict(optimizer.state_dict())
    assert not any(c.indexer.dense_stage for c in compressors(other).values())


def test_activation_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    model, ids = build(), tokens()
    expected, _ = gradients(model, ids, loss_weight=1.0)
    for block in model.model.layers.values():
        plain = block.forward
        block.forward = lambda *args, plain=plain, **kwargs: checkpoint(plain, *args, use_reentrant=False, **kwargs)
    actual, _ = gradients(model, ids, loss_weight=1.0)
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_off_leaves_the_indexer_frozen():
    model = build({"loss": {"coeff": 0}})
    assert not any(p.requires_grad for p in indexer_parameters(model).values())
    assert unfreeze_indexers(model) == 0
    model(input_ids=tokens()).logits.sum().backward()
    assert indexer_metrics(model) == {}


def test_selection_width_is_the_layers(caplog):
    with caplog.at_level(logging.INFO, logger="nemo_v4_indexer"):
        build({"topk": [1, 3, TOPK, 1], "loss": {"coeff": 0.1, "warmup_steps": 7}})
    assert [r.message for r in caplog.records] == [
        "DeepSeek-V4 indexers of layers 2 (top-k 3), 3 (top-k 5) now run nemo_v4_indexer (backend reference), trained "
        "by the KL loss, coefficient 0.1, 7 dense steps"
    ]
