"""The embedded engine: a small fp32 training loop for one CPU, a few gloo processes, or a GPU each.

Megatron's own schedules, optimizer and clipping insist on CUDA; this loop keeps their semantics (loss scaled by
1/micro-batches, gradients of replicated weights finalized over the tensor group, one global norm) without them.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_v4_indexer.ops.dispatch import resolve_backend
from nemo_v4_indexer.training import checkpoint, curves, step
from nemo_v4_indexer.training.config import PretrainConfig
from nemo_v4_indexer.training.cpu_host import megatron_on
from nemo_v4_indexer.training.data import VOCAB_SIZE, load_corpus, train_batch, unigram_entropy, validation_batch
from nemo_v4_indexer.training.errors import RunError, UsageError
from nemo_v4_indexer.training.files import write_text
from nemo_v4_indexer.training.folder import RunFolder
from nemo_v4_indexer.training.interrupt import StopRequest
from nemo_v4_indexer.training.metrics import ALWAYS, MetricsFile
from nemo_v4_indexer.training.report import Progress, summary
from nemo_v4_indexer.training.world import World, from_rank_0, joined


def run(config: PretrainConfig, resolved: Mapping[str, Any], resolved_yaml: str) -> int:
    """Train as configured; returns the process's exit code (0, or 128 + the signal that asked to stop).

    resolved: the plain configuration that checkpoints remember; resolved_yaml: its text for the output folder.
    Raises UsageError for what the user can fix.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        world = stack.enter_context(joined(config))
        stack.enter_context(megatron_on(world.device))
        folder = RunFolder(config.output_dir)
        from_rank_0(lambda: stack.enter_context(folder.locked()))
        return _Run(config, resolved, folder, world).train(stop, resolved_yaml)


class _Run:
    """One rank's model, optimizer, data and output."""

    def __init__(self, config: PretrainConfig, resolved: Mapping[str, Any], folder: RunFolder, world: World) -> None:
        self.config, self.resolved, self.folder, self.world = config, resolved, folder, world
        self.micro_batch, self.micro_batches = config.micro_batches(world.data_size)
        self.corpus = load_corpus(config.data)
        self.entropy = {"training": unigram_entropy(self.corpus.train)}
        self.entropy["validation"] = unigram_entropy(self.corpus.validation)
        self.model = self._build_model()
        self.optimizer = torch.optim.AdamW(
            step.parameter_groups(self.model, config.train.weight_decay),
            lr=config.train.lr,
            betas=(config.train.beta1, config.train.beta2),
            eps=config.train.eps,
            fused=True,
        )
        checkpoint.initialize_moments(self.optimizer)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def _build_model(self) -> torch.nn.Module:
        from nemo_v4_indexer.integrations import megatron as host

        config = self.config
        if config.model.num_mtp_layers:
            raise UsageError(
                "model.num_mtp_layers must be 0: the embedded engine trains no multi-token-prediction layers, "
                f"got {config.model.num_mtp_layers}"
            )
        torch.manual_seed(config.train.seed)
        try:
            for layer in (layer for layer in config.indexer.plan() if layer.has_indexer):
                # A backend that cannot run is refused before the first step.
                rows = torch.empty(0, 1, layer.n_heads, layer.head_dim, device=self.world.device)
                resolve_backend(layer.backend, rows, layer.topk)
            model = host.build_gpt_model(
                dataclasses.asdict(config.model),
                config.attention,
                config.indexer,
                vocab_size=VOCAB_SIZE,
                sequence_length=config.data.sequence_length,
                tensor_parallel=config.parallel.tensor,
                sequence_parallel=config.parallel.sequence,
                seed=config.train.seed,
            )
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise UsageError(f"the model cannot be built from this configuration: {error}") from error
        self.host = host
        return model.to(self.world.device)

    def train(self, stop: StopRequest, resolved_yaml: str) -> int:
        """Run from the folder's state to the last step, a stop request, or a failure."""
        config, world, folder = self.config, self.world, self.folder
        found, notes = from_rank_0(lambda: folder.start("embedded", config, self.resolved, self.corpus.fingerprint))
        done, before = 0, 0.0
        if found:
            meta = checkpoint.read_meta(found)
            checkpoint.load(found, self.model, self.optimizer, world)
            done, before = meta["step"], meta["seconds"]
        elif config.train.init_from:
            source, fresh = checkpoint.load_weights(Path(config.train.init_from), self.model)
            notes.append(f"weights of {source}" + (f"; {len(fresh)} indexer weights are new" if fresh else ""))
        began = time.monotonic() - before
        metrics = MetricsFile(folder.metrics, done) if world.is_main else None
        progress = Progress(done, config.train.steps, config.train.log_interval, enabled=world.is_main)
        if world.is_main:
            write_text(folder.config, resolved_yaml)
            self._greet(progress, notes)
        asked = 0
        try:
            while done < config.train.steps and not asked:
                record = self._step(done)
                done += 1
                last = done == config.train.steps
                if config.train.eval_batches and (last or self._due(done, config.train.eval_interval)):
                    record |= self._validate()
                if metrics:
                    metrics.append(record)
                    progress.step(record)
                asked = world.largest(stop.signal)
                if self._due(done, config.train.checkpoint_interval) or last or asked:
                    self._save(done, time.monotonic() - began, metrics)
        finally:
            progress.close()
            if metrics:
                metrics.close()
        if metrics:
            self._conclude(metrics, done, time.monotonic() - began, asked)
        return 128 + asked if asked else 0

    @staticmethod
    def _due(done: int, interval: int) -> bool:
        return interval > 0 and done % interval == 0

    def _step(self, index: int) -> dict[str, Any]:
        """Optimizer step `index` (0-based); returns its metrics record."""
        train, started = self.config.train, time.perf_counter()
        self.host.set_indexer_step(self.model, index)
        if train.freeze_main:
            self.host.freeze_main(self.model, index < self.config.indexer.loss.warmup_steps)
        self._scale_auxiliary_loss(1.0 / self.micro_batches)
        windows = train_batch(self.corpus.train, train.seed, index, train.batch_size, self.config.data.sequence_length)
        total = 0.0
        for micro in self._mine(windows):
            loss = step.forward_loss(self.model, micro)
            (loss / self.micro_batches).backward()
            total += loss.item() / self.micro_batches
        self.host.finalize_gradients(self.model)
        self.world.average_gradients(self.parameters)
        norm = self._clip(train.grad_clip)
        rate = step.learning_rate(train, index)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        values = self._measured(total)
        if not (abs(values["lm_loss"]) < float("inf") and norm < float("inf")):
            raise RunError(
                f"step {index + 1} gave loss {values['lm_loss']} and gradient norm {norm}: training diverged "
                "(a lower train.lr may help); the last checkpoint is untouched"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        speed = windows[:, 1:].numel() / (time.perf_counter() - started)
        return {
            "step": index + 1,
            **dict.fromkeys(ALWAYS),
            **values,
            "lr": rate,
            "grad_norm": norm,
            "tokens_per_s": round(speed, 1),
        }

    def _measured(self, lm_loss: float) -> dict[str, float]:
        return self.world.average({"lm_loss": lm_loss, **self.host.indexer_metrics(self.model)})

    def _scale_auxiliary_loss(self, scale: float) -> None:
        """What Megatron's schedule does before each backward pass: the indexer loss is one micro-batch's share."""
        hook = self.model.config.experimental_attention_variant_loss_scale_func
        if hook is not None:
            hook(torch.tensor(scale, device=self.world.device))

    def _mine(self, windows: torch.Tensor) -> Iterator[torch.Tensor]:
        """This data-parallel rank's rows of a batch, one micro-batch after the other."""
        share = windows.chunk(self.world.data_size)[self.world.data_rank]
        return (micro.to(self.world.device) for micro in share.split(self.micro_batch))

    def _clip(self, limit: float) -> float:
        """Clip by the norm of the whole model's gradient, counting a replicated weight once; returns the norm."""
        from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

        gradients = [p.grad for p in self.parameters if p.grad is not None]
        counted = [
            p.grad.square().sum(dtype=torch.float64)
            for p in self.parameters
            if p.grad is not None and param_is_not_tensor_parallel_duplicate(p)
        ]
        square = torch.stack(counted).sum() if counted else torch.zeros((), dtype=torch.float64)
        square = square.to(self.world.device)
        if self.config.parallel.tensor > 1:
            dist.all_reduce(square, group=self.world.tensor_group)
        norm = square.sqrt().item()
        if limit and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        train, total = self.config.train, 0.0
        self.model.eval()
        with self.host.collecting():
            for index in range(train.eval_batches):
                windows = validation_batch(
                    self.corpus.validation,
                    index,
                    train.eval_batches,
                    train.batch_size,
                    self.config.data.sequence_length,
                )
                for micro in self._mine(windows):
                    total += step.forward_loss(self.model, micro).item() / (train.eval_batches * self.micro_batches)
        self.model.train()
        values = self._measured(total)
        return {f"val_{name}": value for name, value in values.items()}

    def _save(self, done: int, seconds: float, metrics: MetricsFile | None) -> None:
        if metrics:
            metrics.sync()  # a checkpoint never runs ahead of the metrics
            curves.write_curves(self.folder.curves, metrics.records, self.entropy["validation"])
        meta = {"step": done, "seconds": seconds, "config": self.resolved, "data": self.corpus.fingerprint}
        where, keep = self.folder.checkpoints, self.config.train.keep
        try:
            checkpoint.save(where, self.model, self.optimizer, meta, self.world, keep)
        except OSError as error:
            raise RunError(f"cannot write the checkpoint of step {done}: {error}; earlier ones are intact") from error

    def _greet(self, progress: Progress, notes: list[str]) -> None:
        config, world = self.config, self.world
        count = sum(p.numel() for p in self.parameters)
        progress.note(f"data      {self.corpus.description}")
        progress.note(f"model     {count / 1e6:.2f}M parameters per rank, {config.indexer.num_layers} layers")
        progress.note(
            f"run       {config.train.steps} steps of {config.train.batch_size} x {config.data.sequence_length} tokens "
            f"on {world.size} x {world.device.type}, output in {self.folder.root}"
        )
        for note in [*config.indexer.warnings_for(config.data.sequence_length), *notes]:
            progress.note(f"note      {note}")

    def _conclude(self, metrics: MetricsFile, done: int, seconds: float, asked: int) -> None:
        facts = {f"unigram entropy, {name}": f"{value:.4f} nats/byte" for name, value in self.entropy.items()}
        facts |= {
            "time": f"{seconds:.0f} s",
            "files": f"{self.folder.root}/{{config.yaml, metrics.jsonl, curves.png, checkpoints/}}",
        }
        print(summary(metrics.records, facts), flush=True)
        if asked:
            print(f"stopped by signal {asked} after step {done}; continue with train.resume=true", flush=True)
