"""nemo-toolkit 3.0.0: a NeMo model that pretrains with the indexer, run through Lightning and exp_manager.

Only this integration imports NeMo. `examples/nemo_pretrain.py` is the application: `@hydra_runner` around `pretrain`.
"""

import contextlib
import dataclasses
import time
import warnings

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from megatron.core import parallel_state
from nemo.core.classes import ModelPT
from nemo.utils import logging
from nemo.utils.exp_manager import exp_manager
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, IterableDataset

from nemo_v4_indexer.integrations import megatron as host
from nemo_v4_indexer.integrations.nemo_config import NemoModelConfig, check_sections
from nemo_v4_indexer.integrations.nemo_metrics import MetricsJsonl
from nemo_v4_indexer.training import step
from nemo_v4_indexer.training.cpu_host import megatron_on
from nemo_v4_indexer.training.data import VOCAB_SIZE, load_corpus, train_batch, validation_batch
from nemo_v4_indexer.training.errors import UsageError
from nemo_v4_indexer.training.world import mean_over_ranks

# In every record, null when not measured.
_ALWAYS = ("lm_loss", "indexer_loss", "recall", "recall_random")


class _Batches(IterableDataset):
    """Batches by number from the trainer's place on, so that a resumed run goes on where the other ended."""

    def __init__(self, first, count, batch):
        self.first, self.count, self.batch = first, count, batch

    def __iter__(self):
        index = self.first()
        while self.count is None or index < self.count:
            yield self.batch(index)
            index += 1


class V4PretrainModel(ModelPT):
    """A GPT model with V4 attention in every layer, and the indexer where `model.v4_indexer` puts one.

    The model, the data and the loss are those of `python -m nemo_v4_indexer.pretrain`; optimizer, schedule, loop,
    logging and checkpoints are NeMo's.

    Args:
        cfg: the `model` section.
        trainer: Lightning's; one device, or data parallel ones.

    Raises:
        UsageError: a key or value that the section may not have.
    """

    def __init__(self, cfg, trainer=None):
        self.settings = NemoModelConfig.from_dict(OmegaConf.to_container(cfg, resolve=True))
        self.corpus = load_corpus(self.settings.data)
        self.record, self.started, self.lm_losses, self.gathered = {}, 0.0, [], []
        self.collecting = None
        super().__init__(cfg=cfg, trainer=trainer)

    @classmethod
    def list_available_models(cls):
        return []

    def configure_model(self):
        """Build the model once Lightning has set up the ranks."""
        if hasattr(self, "model"):
            return
        settings = self.settings
        if settings.freeze_main and self.trainer.world_size > 1:
            raise UsageError("model.freeze_main=true needs a single device: data parallel ranks wait for all gradients")
        parallel_state.initialize_model_parallel()
        self.model = host.build_gpt_model(
            dataclasses.asdict(settings.sizes),
            settings.attention,
            settings.indexer,
            vocab_size=VOCAB_SIZE,
            sequence_length=settings.data.sequence_length,
            seed=settings.seed,
        )

    def setup_training_data(self, train_data_config):
        settings, size = self.settings, self.settings.train_ds.batch_size

        def batch(index):
            ranks, parts = self.trainer.world_size, self.trainer.accumulate_grad_batches
            whole = size * parts * ranks
            windows = train_batch(
                self.corpus.train, settings.seed, index // parts, whole, settings.data.sequence_length
            )
            return windows.chunk(ranks)[self.trainer.global_rank].split(size)[index % parts]

        def first():
            return self.trainer.global_step * self.trainer.accumulate_grad_batches

        self._train_dl = DataLoader(_Batches(first, None, batch), batch_size=None)

    def setup_validation_data(self, val_data_config):
        loader, length = self.settings.validation_ds, self.settings.data.sequence_length

        def batch(index):
            ranks = self.trainer.world_size
            windows = validation_batch(self.corpus.validation, index, loader.batches, loader.batch_size * ranks, length)
            return windows.chunk(ranks)[self.trainer.global_rank]

        self._validation_dl = DataLoader(_Batches(lambda: 0, loader.batches, batch), batch_size=None)

    def setup_optimizer_param_groups(self):
        decay = float(self.cfg.optim.get("weight_decay", 0.0))
        self._optimizer_param_groups = step.parameter_groups(self.model, decay)

    def on_train_batch_start(self, batch, batch_idx, unused=0):
        if not self.lm_losses:
            self.started = time.perf_counter()
        index = self.trainer.global_step
        host.set_indexer_step(self.model, index)
        if self.settings.freeze_main:
            host.freeze_main(self.model, index < self.settings.indexer.loss.warmup_steps)
        share = torch.tensor(1.0 / self.trainer.accumulate_grad_batches, device=self.device)
        self.model.config.experimental_attention_variant_loss_scale_func(share)
        return super().on_train_batch_start(batch, batch_idx, unused)

    def training_step(self, batch, batch_idx):
        loss = step.forward_loss(self.model, batch)
        self.lm_losses.append(loss.detach())
        return loss

    def on_after_backward(self):
        # Every micro-batch, because validation may come between two of a step and gathers its own.
        self.gathered.append(host.indexer_metrics(self.model))

    def on_before_optimizer_step(self, optimizer):
        """Lightning's last hook before it clips and steps: the numbers of this step are all there."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        tokens = len(self.lm_losses) * self.settings.train_ds.batch_size * self.settings.data.sequence_length
        values = self._measured(self.lm_losses, self.gathered)
        self.lm_losses, self.gathered = [], []
        seconds = time.perf_counter() - self.started
        self.record = {
            "step": self.trainer.global_step + 1,
            **dict.fromkeys(_ALWAYS),
            **values,
            "lr": optimizer.param_groups[0]["lr"],
            "grad_norm": torch.nn.utils.get_total_norm(gradients).item(),
            "tokens_per_s": round(tokens * self.trainer.world_size / seconds, 1),
        }

    def on_train_batch_end(self, outputs, batch, batch_idx, unused=0):
        super().on_train_batch_end(outputs, batch, batch_idx, unused)
        if self.record:
            self.log_dict({f"train/{name}": value for name, value in self.record.items() if value is not None})
            self._write(self.record)
            self.record = {}

    def on_validation_epoch_start(self):
        self.val_losses = []
        self.collecting = contextlib.ExitStack()
        self.collecting.enter_context(host.collecting())

    def validation_step(self, batch, batch_idx):
        self.val_losses.append(step.forward_loss(self.model, batch))

    def on_validation_epoch_end(self, sync_metrics=False):
        self.collecting.close()
        values = {
            f"val_{name}": value
            for name, value in self._measured(self.val_losses, [host.indexer_metrics(self.model)]).items()
        }
        # val_loss: what exp_manager's checkpoints watch unless told otherwise.
        shown = {
            "val_loss": values["val_lm_loss"],
            **{f"validation/{name[4:]}": value for name, value in values.items()},
        }
        self.log_dict(shown, sync_dist=True)
        if not self.trainer.sanity_checking:
            self._write({"step": self.trainer.global_step, **values})

    def _measured(self, losses, gathered):
        """The mean loss and the means of what the indexers gathered, averaged over the data parallel ranks."""
        values = {name: sum(part[name] for part in gathered) / len(gathered) for name in gathered[0]}
        values["lm_loss"] = torch.stack(losses).mean().item()
        return mean_over_ranks(values, dist.group.WORLD, self.device)

    def _write(self, record):
        for callback in self.trainer.callbacks:
            if isinstance(callback, MetricsJsonl):
                callback.write(record)


def pretrain(cfg):
    """Check the configuration, then train it to `trainer.max_steps`, resuming if exp_manager finds a checkpoint.

    Args:
        cfg: DictConfig with `name`, `trainer`, `exp_manager` and `model`.

    Returns:
        Path of exp_manager's log folder.

    Raises:
        UsageError: a key or value of the `model` section, before anything is built.
    """
    check_sections(OmegaConf.to_container(cfg, resolve=True))
    NemoModelConfig.from_dict(OmegaConf.to_container(cfg.model, resolve=True))
    trainer = Trainer(**cfg.trainer)
    folder = exp_manager(trainer, cfg.exp_manager)
    trainer.callbacks.append(MetricsJsonl(folder, cfg))
    model = V4PretrainModel(cfg.model, trainer)
    for layer in model.settings.indexer.plan():
        logging.info(f"layer {layer.layer_number}: {layer.kind}, ratio {layer.compress_ratio}, topk {layer.topk}")
    for warning in model.settings.indexer.warnings_for(model.settings.data.sequence_length):
        logging.warning(warning)
    with _megatron(trainer):
        trainer.fit(model)
    return folder


@contextlib.contextmanager
def _megatron(trainer):
    """Megatron's own state for a run: a process group for a lone device, and its CPU host where there is no GPU."""
    lone = trainer.world_size == 1
    device = trainer.strategy.root_device
    if lone:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with megatron_on(device), warnings.catch_warnings():
            if lone:  # Lightning asks for a synchronisation that it then leaves out for one device
                warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
            yield
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
