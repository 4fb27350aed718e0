"""Give a Megatron GPTModel of your own the V4 attention and its indexer. Runs on a CPU in one process."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from nemo_v4_indexer import AttentionConfig, IndexerConfig, v4_layer_spec
from nemo_v4_indexer.integrations.megatron import V4TransformerConfig

SEQUENCE, BATCH, VOCABULARY = 128, 2, 256


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()

    # Layer 1 sees its window only, layer 2 selects 4 of the keys that each stand for 4 tokens, layer 3 sees all
    # keys of 32 tokens each, and layer 4 selects 8.
    indexer = IndexerConfig(
        num_layers=4,
        compress_ratio=[0, 4, 32, 4],
        topk=4,
        layers={4: {"topk": 8}},
        heavy_ratio=32,
        window=16,
        n_heads=8,
        head_dim=32,
        rope={"dim": 16},
    )
    config = V4TransformerConfig(
        v4_indexer=indexer,
        v4_attention=AttentionConfig(n_heads=4, head_dim=32, q_lora_rank=32, o_groups=2, o_lora_rank=32, rope_dim=16),
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    model = GPTModel(config, v4_layer_spec(config), VOCABULARY, SEQUENCE, position_embedding_type="none")
    for layer in indexer.plan():
        print(f"layer {layer.layer_number}: {layer.kind}, ratio {layer.compress_ratio}, topk {layer.topk}")

    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1))
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    loss.backward()  # the indexer's own loss rides along: nothing needs to be added
    reached = [name for name, p in model.named_parameters() if "indexer" in name and p.grad.abs().sum() > 0]
    print(f"loss {loss.item():.3f}; {len(reached)} indexer parameters have a gradient, for instance {reached[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
