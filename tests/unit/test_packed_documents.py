"""Packed documents through the whole attention: each gives what it gives alone."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from mocked_parallel import (
    attention_config,
    groups,
    inputs,
    layer_config,
    randomize,
    relative_error,
    single_process,
    transformer_config,
)

from nemo_v4_indexer.attention import V4SelfAttention
from nemo_v4_indexer.ops import loss as losses

LENGTHS = [9, 3, 17, 1, 8]
KINDS = {"window": 0, "uncompressed": 1, "sparse": 4, "heavy": 16}


@pytest.fixture(scope="module", autouse=True)
def host():
    with single_process():
        yield


def build(ratio, **layer):
    group = groups()
    group.tp = parallel_state.get_tensor_model_parallel_group()
    layer = layer_config(ratio, **({"topk": 2} | layer))
    attention = attention_config()
    return randomize(
        V4SelfAttention(transformer_config(), None, 1, layer=layer, attention=attention, pg_collection=group)
    )


def packed(*lengths):
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    return SimpleNamespace(cu_seqlens_q=borders, cu_seqlens_q_padded=None)


@pytest.mark.parametrize("ratio", KINDS.values(), ids=KINDS)
def test_documents_are_alone(ratio):
    module = build(ratio, coeff=None)
    x = inputs(sum(LENGTHS), batch=1).requires_grad_()
    probe = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    together, _ = module(x, packed_seq_params=packed(*LENGTHS))
    (together * probe).sum().backward()
    gradient, weights = x.grad, {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    assert weights
    x.grad = None
    module.zero_grad()
    alone = torch.cat([module(document)[0] for document in x.split(LENGTHS)])
    (alone * probe).sum().backward()
    assert relative_error(together, alone) < 1e-5
    assert relative_error(gradient, x.grad) < 1e-5
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 0:
            assert relative_error(weights[name], parameter.grad) < 2e-5, name


@pytest.mark.parametrize("warmup_steps", [0, 1], ids=["sparse", "dense"])
def test_documents_teach_alone(warmup_steps):
    """The indexer's gradients are those of the documents alone, each weighted by its rows that see a key."""
    losses.set_loss_scale(1.0)
    module = build(4, warmup_steps=warmup_steps)
    x = inputs(sum(LENGTHS), batch=1)

    def gradients(run):
        module.zero_grad()
        run()
        return {n: p.grad.clone() for n, p in module.indexer.named_parameters()}

    together = gradients(lambda: (module(x, packed_seq_params=packed(*LENGTHS))[0] * 0).sum().backward())
    rows = [max(0, length - 3) for length in LENGTHS]
    alone = dict.fromkeys(together, 0)
    for document, seen in zip(x.split(LENGTHS), rows, strict=True):
        if seen:
            part = gradients(lambda document=document: (module(document)[0] * 0).sum().backward())
            alone = {name: alone[name] + part[name] * seen / sum(rows) for name in alone}
    for name, gradient in together.items():
        assert alone[name].norm() > 1e-8, name
        assert relative_error(gradient, alone[name]) < 5e-5, name


def test_padding_after_the_documents_is_a_document():
    module = build(4, coeff=None)
    x = inputs(14, batch=1)
    padded, _ = module(x, packed_seq_params=packed(6, 5))
    exact, _ = module(x, packed_seq_params=packed(6, 5, 3))
    assert torch.equal(padded, exact)
    assert not torch.allclose(padded, module(x)[0])


def test_a_batch_of_packed_rows_is_refused():
    with pytest.raises(ValueError, match="batch 1"):
        build(4)(inputs(8, batch=2), packed_seq_params=packed(8))
