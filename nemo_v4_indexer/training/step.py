"""What one training step computes, whichever engine drives it: inputs, loss, schedule.

Letters: B sequences, S tokens per sequence.
"""

import math

import torch

from nemo_v4_indexer.training.config import TrainConfig


def forward_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss. windows: int64 [B, S+1]; returns fp32 scalar, nats."""
    tokens, labels = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels).float().mean()


def learning_rate(train: TrainConfig, step: int) -> float:
    """Rate of the 0-based `step`: linear warm-up, then half a cosine down to `min_lr`."""
    if step < train.lr_warmup_steps:
        return train.lr * (step + 1) / train.lr_warmup_steps
    span = max(1, (train.lr_decay_steps or train.steps) - train.lr_warmup_steps)
    progress = min(1.0, (step - train.lr_warmup_steps) / span)
    return train.min_lr + 0.5 * (train.lr - train.min_lr) * (1 + math.cos(math.pi * progress))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """AdamW groups: matrices decay; gains, biases, sinks and other vectors do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
