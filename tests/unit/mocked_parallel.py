"""Parallel state without processes: fake groups, ranks that are threads of this process, a host of one rank."""

import contextlib
import threading
from types import SimpleNamespace

import torch
import torch.distributed as dist

from nemo_v4_indexer import parallel
from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
from nemo_v4_indexer.ops.loss import set_loss_scale
from nemo_v4_indexer.training.cpu_host import megatron_on

HIDDEN, Q_LORA = 40, 24
"""Unlike every other width of the small layers below, so that a shape tells what a tensor is."""
ROPE = {"dim": 8, "theta": 1000.0}


class FakeGroup:
    """A process group that knows its size and rank, and can do nothing."""

    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def groups(tensor_parallel=1, rank=0):
    """A pg_collection of fake groups."""
    return SimpleNamespace(tp=FakeGroup(tensor_parallel, rank), cp=FakeGroup(), pp=FakeGroup())


class ThreadGroup(FakeGroup):
    """A rank of a group whose ranks are threads."""

    def __init__(self, size, rank, board, barrier, calls):
        super().__init__(size, rank)
        self.board, self.barrier, self.calls = board, barrier, calls

    def exchange(self, name, x):
        """Every rank's x, in rank order."""
        self.calls.append((name, tuple(x.shape)))
        self.board[self._rank] = x.detach().clone()
        self.barrier.wait()
        everyone = list(self.board)
        self.barrier.wait()
        if len({tuple(other.shape) for other in everyone}) > 1:
            raise RuntimeError(f"{name} of different shapes: {[tuple(other.shape) for other in everyone]}")
        return everyone


class _ThreadedCollectives:
    """The part of torch.distributed that `nemo_v4_indexer.parallel` uses, for `ThreadGroup`."""

    @staticmethod
    def all_gather_into_tensor(out, x, group):
        out.copy_(torch.cat(group.exchange("all_gather", x)))

    @staticmethod
    def reduce_scatter_tensor(out, x, group):
        total = torch.stack(group.exchange("reduce_scatter", x)).sum(0)
        out.copy_(total[group.rank() * len(out) :][: len(out)])

    @staticmethod
    def all_reduce(x, group):
        x.copy_(torch.stack(group.exchange("all_reduce", x)).sum(0))


def run_ranks(monkeypatch, size, function, timeout=20):
    """Call function(group) once per rank, in threads.

    Returns:
        results in rank order, and the collectives [(name, shape of the rank's tensor), ...] of every rank.

    Raises:
        whatever a rank raised; BrokenBarrierError when the ranks did not meet within `timeout` seconds (a hang).
    """
    monkeypatch.setattr(parallel, "dist", _ThreadedCollectives)
    board, barrier = [None] * size, threading.Barrier(size, timeout=timeout)
    results, errors, calls = [None] * size, [], [[] for _ in range(size)]

    def work(rank):
        try:
            results[rank] = function(ThreadGroup(size, rank, board, barrier, calls[rank]))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    assert all(other == calls[0] for other in calls), "ranks called different collectives"
    return results, calls


@contextlib.contextmanager
def single_process():
    """Megatron's parallel state over this process alone, able to build and run on the CPU."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with megatron_on(torch.device("cpu")):
            yield
    finally:
        set_loss_scale(1.0)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def transformer_config(**changes):
    """A TransformerConfig for one small layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = dict(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        layernorm_epsilon=1e-6,
        init_method_std=0.2,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
    )
    return TransformerConfig(**(settings | changes))


def layer_config(ratio, *, topk=3, coeff=1.0, warmup_steps=0, **changes):
    """`LayerConfig` of layer 1."""
    settings = dict(
        num_layers=1,
        compress_ratio=ratio,
        topk=topk,
        n_heads=4,
        head_dim=16,
        heavy_ratio=16,
        window=5,
        rope=ROPE,
        loss={"coeff": coeff, "warmup_steps": warmup_steps},
        backend="reference",
    )
    return IndexerConfig.from_dict(settings | changes).layer(1)


def attention_config(**changes):
    """`AttentionConfig` of the small layers; its head dim differs from the indexer's."""
    settings = dict(n_heads=4, head_dim=32, q_lora_rank=Q_LORA, o_groups=2, o_lora_rank=12, rope_dim=8)
    return AttentionConfig(**(settings | {"rope_theta": 500.0} | changes))


def randomize(module, seed=0):
    """Signed random values in every parameter, norms and attention bias included, so that none is without effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1 or name.endswith("ape"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return module


def inputs(rows, width=HIDDEN, batch=2, seed=1):
    """Signed activations [rows, batch, width], fp32."""
    return torch.randn(rows, batch, width, generator=torch.Generator().manual_seed(seed))


def relative_error(actual, expected):
    """Norm of the difference over the norm of `expected`, in fp64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def assert_gradients(actual, expected, limit=2e-5):
    """Every named gradient agrees; expected ones are not zero, so that a missing gradient fails.

    Args:
        actual, expected: {name: tensor or None}.
    """
    assert actual.keys() == expected.keys()
    errors = {}
    for name, reference in expected.items():
        assert reference is not None and reference.norm() > 1e-7, f"the reference gradient of {name} is zero"
        gradient = actual[name]
        errors[name] = 1.0 if gradient is None else relative_error(gradient, reference)
    bad = {name: error for name, error in errors.items() if not error <= limit}
    assert not bad, bad


def gradients(module):
    """{name: gradient or None} of the module's parameters."""
    return {name: parameter.grad for name, parameter in module.named_parameters()}
