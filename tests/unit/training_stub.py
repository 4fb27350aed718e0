"""A stand-in for the Megatron model: a three-byte model with dropout and an auxiliary loss, quick for unit tests.

Run as a script it is the pretraining command with that model: `python training_stub.py key=value ...`.
"""

import contextlib
import os
import signal
import sys
import types

import torch
import torch.nn.functional as F

SMALL = (
    "data.sequence_length=32",
    "train.batch_size=4",
    "train.eval_interval=4",
    "train.eval_batches=2",
    "train.checkpoint_interval=5",
    "train.steps=12",
    "train.lr_warmup_steps=3",
    "train.threads=1",
    "device=cpu",
)


class _Auxiliary(torch.autograd.Function):
    scale = torch.ones(())

    @staticmethod
    def forward(ctx, output, loss):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, _Auxiliary.scale


class Host(types.ModuleType):
    """Implements the interface that the engine expects of `integrations.megatron`."""

    def __init__(self):
        super().__init__("nemo_v4_indexer.integrations.megatron")
        self.before_step = lambda step: None
        self.steps, self.models = [], []
        self.collecting_now = False

    def build_gpt_model(self, model, attention, indexer, *, vocab_size, **_):
        from megatron.core.transformer.module import MegatronModule
        from megatron.core.transformer.transformer_config import TransformerConfig

        class Stub(MegatronModule):
            def __init__(self, config):
                super().__init__(config)
                self.embedding = torch.nn.Embedding(vocab_size, 16)
                self.output = torch.nn.Linear(48, vocab_size)
                self.gain = torch.nn.Parameter(torch.ones(16))

            def forward(self, tokens, position_ids, attention_mask, labels):
                x = self.embedding(tokens)
                x = torch.cat([x, x.roll(1, 1), x.roll(2, 1)], -1)
                logits = self.output(F.dropout(x, 0.1, self.training))
                if self.training:
                    logits = _Auxiliary.apply(logits, (self.gain - 2).square().mean())
                return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")

        config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
        config.experimental_attention_variant_loss_scale_func = self._set_scale
        self.models.append(Stub(config))
        return self.models[-1]

    @staticmethod
    def _set_scale(scale):
        _Auxiliary.scale = scale

    def set_indexer_step(self, model, step):
        self.steps.append(step)
        self.before_step(step)

    def indexer_metrics(self, model):
        return {"indexer_loss": 0.5, "recall": 0.4, "recall_random": float("nan")}

    def finalize_gradients(self, model):
        pass

    @contextlib.contextmanager
    def collecting(self):
        self.collecting_now = True
        yield
        self.collecting_now = False


def main():
    """The command with the stub model; `stub.hang_at` sleeps in a step so that a test can send signals."""
    import time

    import nemo_v4_indexer.integrations as integrations
    from nemo_v4_indexer.training.cli import run

    host = integrations.megatron = sys.modules["nemo_v4_indexer.integrations.megatron"] = Host()
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("hang_at=")]
    hang_at = [int(argument.split("=")[1]) for argument in sys.argv[1:] if argument.startswith("hang_at=")]

    def before_step(step):
        if step in hang_at:
            print("hanging", flush=True)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                time.sleep(0.05)
            os._exit(99)

    host.before_step = before_step
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
