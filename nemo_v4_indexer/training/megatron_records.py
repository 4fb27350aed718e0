"""Records of a Megatron run: `metrics.jsonl` as the embedded engine writes it, and indexer values in Megatron's log."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.training import get_args, training

from nemo_v4_indexer.integrations import megatron as host
from nemo_v4_indexer.training.metrics import ALWAYS, MetricsFile
from nemo_v4_indexer.training.world import mean_over_ranks

LM_LOSS = "lm loss"


class StepRecords:
    """Follows a run's optimizer steps and validations. Every rank takes part; the one with a file writes.

    model: the list that the run's model chunks are put in. metrics: on the last rank, where the loss is; else None.
    between_steps: called before every step, when no checkpoint of an earlier one is being written.
    """

    def __init__(
        self, model: list[torch.nn.Module], metrics: MetricsFile | None, between_steps: Callable[[], None] | None = None
    ) -> None:
        self._model, self._metrics, self._between_steps = model, metrics, between_steps
        self._pending: dict[str, Any] | None = None
        self._since = time.perf_counter()
        self._rate: float | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within it, Megatron's logging and evaluation report here too."""
        with (
            mock.patch.object(training, "train_step", self._stepping(training.train_step)),
            mock.patch.object(training, "training_log", self._logging(training.training_log)),
            mock.patch.object(training, "evaluate", self._evaluating(training.evaluate)),
        ):
            try:
                yield
            finally:
                self._flush()

    def _stepping(self, step: Callable) -> Callable:
        def stepped(forward, data, model, optimizer, *rest, **named):
            if self._between_steps:
                self._between_steps()
            # Megatron logs the rate of the step to come.
            self._rate = training.get_canonical_lr_for_logging(optimizer.param_groups)
            return step(forward, data, model, optimizer, *rest, **named)

        return stepped

    def _logging(self, log: Callable) -> Callable:
        def logged(losses, totals, rate, iteration, scale, memory, skipped, norm, *rest, **named):
            values = self._indexer_values()
            self._flush()
            if losses:
                record = {"step": iteration, **dict.fromkeys(ALWAYS), "lm_loss": losses[LM_LOSS].item(), **values}
                self._pending = record | {"lr": self._rate, "grad_norm": norm, "tokens_per_s": self._speed()}
                device = losses[LM_LOSS].device
                losses |= {n: torch.tensor(v, device=device) for n, v in values.items() if "/" not in n}
            args = get_args()
            evaluates = args.do_valid and (iteration % args.eval_interval == 0 or iteration == args.train_iters)
            if not evaluates:
                self._flush()
            return log(losses, totals, rate, iteration, scale, memory, skipped, norm, *rest, **named)

        return logged

    def _evaluating(self, evaluate: Callable) -> Callable:
        def evaluated(*arguments, **named):
            with host.collecting():
                result = evaluate(*arguments, **named)
            values = self._indexer_values()
            if self._pending is not None and result[0]:
                values["lm_loss"] = result[0][LM_LOSS].item()
                self._pending |= {f"val_{name}": value for name, value in values.items()}
            self._since = time.perf_counter()
            return result

        return evaluated

    def _speed(self) -> float:
        args, now = get_args(), time.perf_counter()
        seconds, self._since = now - self._since, now
        return round(args.global_batch_size * args.seq_length / seconds, 1)

    def _indexer_values(self) -> dict[str, float]:
        """Means over layers, ranks that share a sequence, and data parallel ranks."""
        group, device = parallel_state.get_data_parallel_group(), torch.cuda.current_device()
        return mean_over_ranks(host.indexer_metrics(self._model), group, device)

    def _flush(self) -> None:
        if self._pending is not None and self._metrics:
            self._metrics.append(self._pending)
        self._pending = None
