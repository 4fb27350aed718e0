"""Repairs of megatron-core 0.19's training stack, in force while a run lasts. Each names the fact it answers."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy
import torch

_SERIES = "0.19."


@contextlib.contextmanager
def repaired_megatron() -> Iterator[None]:
    """Let `megatron.training.pretrain` run from the wheel, with torch's AdamW and fp32 parameters beside bf16 ones.

    Raises:
        RuntimeError: another series of megatron-core, whose faults are unknown.
    """
    import megatron.core
    from megatron.core.datasets import utils
    from megatron.training import training

    if not megatron.core.__version__.startswith(_SERIES):
        raise RuntimeError(f"the Megatron engine needs megatron-core {_SERIES}x, found {megatron.core.__version__}")
    with contextlib.ExitStack() as stack:
        # Start-up rebuilds the index helpers with a Makefile that the wheel lacks, and exits; they come compiled.
        from megatron.core.datasets import helpers_cpp  # noqa: F401

        stack.enter_context(mock.patch.object(utils, "compile_helpers", lambda: None))
        build = training.get_megatron_optimizer
        stack.enter_context(
            mock.patch.object(training, "get_megatron_optimizer", lambda *a, **k: _repaired(build(*a, **k)))
        )
        yield


def _repaired(optimizer: Any) -> Any:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            _keep_fp32_shards_loadable(part)
            _start_from_zero_moments(part.optimizer)
            _keep_steps_apart(part.optimizer)
    return optimizer


def _keep_fp32_shards_loadable(part: Any) -> None:
    """fp32 parameters beside bf16 ones cannot be saved or loaded: Megatron-LM issue 2777.

    Their shards are views that need a gradient, which refuse to be written to, and the map from parameters to places
    in the groups counts them out of order.
    """
    for number, group in enumerate(part.optimizer.param_groups):
        for place, shard in enumerate(part.shard_fp32_groups[number]):
            plain = shard.detach()
            plain.__dict__.update(shard.__dict__)
            part.shard_fp32_groups[number][place] = group["params"][place] = plain
        for place, parameter in enumerate([*part.model_fp32_groups[number], *part.model_float16_groups[number]]):
            part.model_param_group_index_map[parameter] = (number, place)
        group["fused"] = True  # stands in for Apex's kernel


def _start_from_zero_moments(adam: torch.optim.Optimizer) -> None:
    """Loading asserts on an optimizer that has taken no step and so has no state."""
    for group in adam.param_groups:
        for p in group["params"]:
            adam.state[p] = dict(step=0.0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))


def _keep_steps_apart(adam: torch.optim.Optimizer) -> None:
    """Loading makes one tensor the step of all parameters and then overwrites it, which undoes the bias correction.

    Steps are plain numbers between loading and the next update.
    """

    def to_numbers(adam: torch.optim.Optimizer) -> None:
        for state in adam.state.values():
            state["step"] = numpy.float32(float(state["step"]))

    def to_tensors(adam: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in adam.state.items():
            state["step"] = torch.as_tensor(state["step"], device=parameter.device)

    to_numbers(adam)
    adam.register_load_state_dict_post_hook(to_numbers)
    adam.register_step_pre_hook(to_tensors)
