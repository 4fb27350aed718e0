"""Train a two-layer model for a moment and read what its indexers report. Runs on a CPU in one process."""

import inspect

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_v4_indexer import AttentionConfig, IndexerConfig
from nemo_v4_indexer.integrations.megatron import build_gpt_model, collecting, indexer_metrics, set_indexer_step

STEPS, SEQUENCE, BATCH = 20, 128, 2
MEANING = {
    "indexer_loss": "KL of the attention's choice to the indexer's, nats",
    "kl_uniform": "the same for an indexer that finds all keys equal",
    "recall": "share of the attention's mass that the selection holds",
    "recall_random": "the same for a random selection of this size",
    "tie_rate": "rows whose last selected score is also that of a key left out",
}


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    shape = {"n_heads": 8, "head_dim": 32, "rope": {"dim": 16}, "window": 16}
    indexer = IndexerConfig(num_layers=2, compress_ratio=4, topk=4, loss={"coeff": 0.1, "warmup_steps": 10}, **shape)
    attention = AttentionConfig(n_heads=4, head_dim=32, q_lora_rank=32, o_groups=2, o_lora_rank=32, rope_dim=16)
    sizes = {"hidden_size": 64, "num_layers": 2, "ffn_hidden_size": 128}
    options = {"vocab_size": 256, "sequence_length": SEQUENCE, "tensor_parallel": 1, "sequence_parallel": False}
    model = build_gpt_model(sizes, attention, indexer, seed=0, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)

    for step in range(STEPS):
        set_indexer_step(model, step)  # which loss: over all visible keys first, over the selected ones later
        starts = torch.randint(len(text) - SEQUENCE, (BATCH, 1))
        rows = text[starts + torch.arange(SEQUENCE + 1)]
        model(rows[:, :-1], positions, None, labels=rows[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"training, mean of the {STEPS} steps")  # reading the means starts the count anew
    for name, value in indexer_metrics(model).items():
        print(f"  {name:<24}{value:8.4f}  {MEANING.get(name, '')}")

    model.eval()
    with torch.no_grad(), collecting():  # outside training nothing is gathered unless asked for
        model(rows[:, :-1], positions, None, labels=rows[:, 1:])
    print(f"evaluation: recall {indexer_metrics(model)['recall']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
