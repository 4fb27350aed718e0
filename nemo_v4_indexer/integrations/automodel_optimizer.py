"""Training the indexers of an AutoModel model: unfrozen, in the loss stage of the optimizer's step, and reported."""

import logging
from dataclasses import dataclass

from nemo_v4_indexer.config_parsing import flag, whole
from nemo_v4_indexer.diagnostics import Statistics
from nemo_v4_indexer.integrations.automodel_host import AdamWConfig
from nemo_v4_indexer.weights import find_indexers

logger = logging.getLogger(__name__)


def unfreeze_indexers(model, indexer_only=False):
    """Make indexers with a loss trainable again after AutoModel froze them; before the optimizer is built.

    Args:
        model: the model, or an AutoPipeline with `parts`.
        indexer_only: freeze everything else (the dense warm-up stage of DeepSeek-V3.2).

    Returns:
        number of parameters that were frozen and now train.
    """
    count = 0
    for part in getattr(model, "parts", [model]):
        if indexer_only:
            part.requires_grad_(False)
        for indexer in find_indexers(part):
            if indexer.layer.loss.enabled:
                frozen = [p for p in indexer.parameters() if not p.requires_grad]
                count += len(frozen)
                indexer.requires_grad_(True)
    rest = "; everything else is frozen" if indexer_only else ""
    logger.info("%d indexer parameters that AutoModel had frozen now train%s", count, rest)
    return count


@dataclass
class AdamW(AdamWConfig):
    """AutoModel's AdamW for a model with these indexers: they train, and follow the optimizer's step.

    indexer_only: freeze everything else.
    log_every: optimizer steps between log lines with this rank's `indexer_metrics`; 0 for none.
    """

    indexer_only: bool = False
    log_every: int = 10

    def __post_init__(self):
        super().__post_init__()
        flag()("optimizer.indexer_only", self.indexer_only)
        whole(0)("optimizer.log_every", self.log_every)

    def build(self, model, *, device_mesh=None, is_peft=False):
        unfreeze_indexers(model, self.indexer_only)
        optimizers = super().build(model, device_mesh=device_mesh, is_peft=is_peft)
        for part, optimizer in zip(getattr(model, "parts", [model]), optimizers, strict=True):
            follow_steps(part, optimizer, self.log_every)
        return optimizers

    def _constructor_kwargs(self):
        own = ("indexer_only", "log_every")
        return {key: value for key, value in super()._constructor_kwargs().items() if key not in own}


def follow_steps(model, optimizer, log_every=0):
    """Keep the indexers in the loss stage of the optimizer's step, which a resumed optimizer remembers."""
    indexers = find_indexers(model)
    parameters = [p for indexer in indexers for p in indexer.parameters() if p.requires_grad]

    def follow(*_):
        step = max(
            (int(optimizer.state[p]["step"]) for p in parameters if "step" in optimizer.state.get(p, {})), default=0
        )
        set_indexer_step(model, step)
        return step

    def after_step(*_):
        step = follow()
        if log_every and step % log_every == 0 and (metrics := indexer_metrics(model)):
            logger.info("step %d: %s", step, ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if "/" not in k))

    if parameters:
        optimizer.register_step_post_hook(after_step)
        optimizer.register_load_state_dict_post_hook(follow)


def set_indexer_step(model, step):
    """Put every indexer in the loss stage of optimizer step `step` (0-based): dense, then sparse."""
    for indexer in find_indexers(model):
        indexer.set_step(step)


def indexer_metrics(model):
    """This rank's means since the last call: indexer_loss and kl_uniform, averaged over layers, and layer_N/name each.

    In nats per row, before the coefficient. Empty when no loss was computed.
    """
    layers = {}
    for indexer in find_indexers(model):
        sums = indexer.statistics.take()
        if sums is not None:
            layers[indexer.layer.layer_number] = Statistics.means(sums.cpu())
    result = {}
    for name in dict.fromkeys(name for means in layers.values() for name in means):
        values = {number: means[name] for number, means in layers.items() if name in means}
        result[name] = sum(values.values()) / len(values)
        result |= {f"layer_{number}/{name}": value for number, value in values.items()}
    return result
