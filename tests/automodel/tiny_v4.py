"""AutoModel's DeepSeek-V4, tiny, with signed random weights in every parameter of its indexers."""

import contextlib

import torch

CONFIG = dict(
    vocab_size=64,
    hidden_size=40,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_nextn_predict_layers=1,
    num_attention_heads=4,
    head_dim=24,
    qk_rope_head_dim=8,
    q_lora_rank=20,
    o_lora_rank=8,
    o_groups=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    num_hash_layers=1,
    hc_mult=2,
    hc_sinkhorn_iters=3,
    compress_ratios=[0, 4, 4, 0],
    sliding_window=6,
    index_head_dim=16,
    index_n_heads=4,
    index_topk=5,
    rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1},
    initializer_range=0.2,
)
TOPK = 5
S = 70  # not a multiple of the ratio


def build(v4_indexer=None, *, dtype="float32", seed=0, **changes):
    """The model, in train mode; sinks, indexers and their norms are signed and random: none is without effect."""
    from nemo_v4_indexer.integrations.automodel import build_model

    torch.manual_seed(seed)
    settings = {"backend": "reference", "loss": {"coeff": 1.0}} | (v4_indexer or {})
    model = build_model(CONFIG | changes, settings, dtype=dtype, device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "indexer" in name and "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "ape" in name or "sinks" in name:
                parameter.copy_(0.5 * noise)
            elif "indexer" in name:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.train()


def tokens(batch=2, length=S, seed=1):
    return torch.randint(0, CONFIG["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def compressors(model):
    """{layer number: compressor} of the layers with an indexer."""
    layers = model.model.layers
    return {int(n) + 1: layers[n].self_attn.compressor for n in layers if layers[n].self_attn.compress_ratio == 4}


@contextlib.contextmanager
def selections(model):
    """Within it, {layer number: indices [B, S, K]} that the attention of each layer uses."""
    seen, hooks = {}, []
    for number, compressor in compressors(model).items():
        hook = lambda module, args, output, number=number: seen.update({number: output[1].clone()})  # noqa: E731
        hooks.append(compressor.register_forward_hook(hook))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def taps(model):
    """Within it, {layer number: (selection, probabilities, kwargs, entries)} that each attention hook is given."""
    seen, hooks = {}, []
    for number, compressor in compressors(model).items():
        attention = model.model.layers[str(number - 1)].self_attn

        def look(module, args, kwargs, output, number=number, compressor=compressor):
            indexer = compressor.indexer
            seen[number] = (indexer.selection, output[1], kwargs, indexer.entries)

        hooks.append(attention.register_forward_hook(look, with_kwargs=True, prepend=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
