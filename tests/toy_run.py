"""What the tests of the pretraining command share: the sizes of a small real model, and how ranks are started."""

import sys

SIZES = (
    "model.hidden_size=32", "model.ffn_hidden_size=64", "model.attention.n_heads=4", "model.attention.head_dim=16",
    "model.attention.q_lora_rank=16", "model.attention.o_lora_rank=16", "model.attention.rope_dim=8", "indexer.topk=3",
    "indexer.n_heads=4", "indexer.head_dim=16", "indexer.rope.dim=8", "indexer.window=8", "indexer.loss.coeff=1.0",
    "data.sequence_length=64", "train.batch_size=4", "train.eval_batches=1", "train.threads=1",
)  # fmt: skip


def python(processes=1):
    """The beginning of a command: Python, or torchrun for several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(torchrun if processes > 1 else [])]
