"""Two ranks with half of the batch each, under Megatron's DistributedDataParallel, against one process with it all."""

import dataclasses

import pytest
import torch
from harness import Ranks
from megatron.core import parallel_state

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig

pytestmark = pytest.mark.distributed

ROWS, VOCAB, STEPS = 40, 64, 3


@dataclasses.dataclass(frozen=True)
class Case:
    coeff: float | None
    warmup_steps: int = 0
    overlap: bool = True
    """Gradients are reduced while backward runs: a parameter whose gradient never comes makes it hang or fail."""

    def __str__(self):
        return f"coeff {self.coeff}, {self.warmup_steps} dense steps{', overlapped' if self.overlap else ''}"


CASES = [Case(1.0), Case(1.0, overlap=False), Case(1.0, warmup_steps=2), Case(0.0), Case(None)]


def train(cases, ranks):
    """{case: losses, gradients of every step and weights, by name}."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from nemo_v4_indexer.integrations import megatron as host

    facts = {}
    for case in cases:
        indexer = IndexerConfig.from_dict(
            dict(
                num_layers=3, compress_ratio=[0, 4, 1], topk=3, n_heads=4, head_dim=16, window=6, backend="reference",
                rope=dict(dim=8, theta=1000.0), loss=dict(coeff=case.coeff, warmup_steps=case.warmup_steps),
            )
        )  # fmt: skip
        bare = host.build_gpt_model(
            dict(hidden_size=48, num_layers=3, ffn_hidden_size=64),
            AttentionConfig(n_heads=4, head_dim=16, q_lora_rank=24, o_groups=2, o_lora_rank=12, rope_dim=8),
            indexer,
            vocab_size=VOCAB,
            sequence_length=ROWS,
            seed=1,
        )
        settings = DistributedDataParallelConfig(overlap_grad_reduce=case.overlap, grad_reduce_in_fp32=True)
        model = DistributedDataParallel(bare.config, settings, bare)
        optimizer = torch.optim.SGD([p for p in bare.parameters() if p.requires_grad], lr=0.05)
        generator = torch.Generator().manual_seed(3)
        own = slice(parallel_state.get_data_parallel_rank(), None, ranks)
        fact = facts[case] = {"losses": [], "gradients": []}
        for step in range(STEPS):
            host.set_indexer_step(model, step)
            tokens = torch.randint(0, VOCAB, (2, ROWS + 1), generator=generator)[own]
            model.zero_grad_buffer()
            positions = torch.arange(ROWS).expand(len(tokens), -1)
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
            loss.backward()
            finalize_model_grads([model])
            trained = {n: p for n, p in bare.named_parameters() if p.requires_grad}
            fact["losses"].append(loss.item())
            fact["gradients"].append({n: p.main_grad.clone() for n, p in trained.items()})
            for parameter in trained.values():
                parameter.grad = parameter.main_grad
            optimizer.step()
            for parameter in trained.values():
                parameter.grad = None
        fact["weights"] = {n: p.detach().clone() for n, p in bare.named_parameters()}
    return facts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (facts,) = Ranks(1, tmp_path_factory.mktemp("one"), train, CASES, 1).results()
    return facts


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return Ranks(2, tmp_path_factory.mktemp("two"), train, CASES, 2, data_parallel=2).results()


def error(actual, expected):
    return ((actual - expected).double().norm() / expected.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps(alone, two, case):
    expected = alone[case]
    assert expected["losses"][0] != pytest.approx(expected["losses"][2], abs=1e-4)
    for step in range(STEPS):
        assert sum(facts[case]["losses"][step] for facts in two) / 2 == pytest.approx(
            expected["losses"][step], rel=1e-5
        )
        for name, reference in expected["gradients"][step].items():
            for facts in two:
                assert error(facts[case]["gradients"][step][name], reference) < 1e-5, (step, name)
    for name, reference in expected["weights"].items():
        assert error(two[0][case]["weights"][name], reference) < 1e-5, name
        assert torch.equal(two[0][case]["weights"][name], two[1][case]["weights"][name]), f"{name} differs"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_indexers_train_only_with_a_loss(alone, case):
    trained = [name for name in alone[case]["gradients"][0] if ".indexer." in name]
    if case.coeff:
        assert len(trained) == 6 + 5
        assert all(alone[case]["gradients"][0][name].any() for name in trained)
    else:
        assert not trained
