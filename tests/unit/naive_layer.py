"""The layer once more, as slowly and plainly as the formulas read, in fp64: loops over tokens, groups and slots.

Shares no code with the product. Parameters come as a mapping from the product's names to fp64 tensors.
S tokens, B batch, H index heads, D index dim, G groups, N attention heads, C latent dim, r compress ratio.
"""

import math

import torch


def doubled(module):
    """fp64 leaves that hold the module's parameters, by name."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def below(parameters, prefix):
    """The parameters of a submodule, by their names in it."""
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _angles(position, dim, theta):
    return torch.tensor([position * theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def rope_interleaved(x, position, dim, theta, sign=1):
    """x [..., D]: pairs (2i, 2i + 1) of the last `dim` channels as complex numbers, turned."""
    pairs = torch.view_as_complex(x[..., -dim:].reshape(*x.shape[:-1], dim // 2, 2).contiguous())
    angle = sign * _angles(position, dim, theta)
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return torch.cat([x[..., :-dim], turned], -1)


def rope_half_split(x, position, dim, theta, sign=1):
    """x [..., D]: pairs (i, i + dim / 2) of the first `dim` channels."""
    angle = sign * _angles(position, dim, theta)
    a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), x[..., dim:]], -1)


def hadamard(x):
    """x [..., D] times the Hadamard matrix: entry (i, j) is (-1) to the number of common bits, over sqrt(D)."""
    d = x.shape[-1]
    matrix = [[(-1.0) ** (i & j).bit_count() for j in range(d)] for i in range(d)]
    return x @ torch.tensor(matrix, dtype=torch.float64) / math.sqrt(d)


def compress(
    x, parameters, ratio, *, overlap, rope, eps, rotate=False, position=None, turn=rope_interleaved, norm=True
):
    """Entries [G, B, D] of x [S, B, hidden]; rope: {dim, theta}; position: of a group's RoPE, default r * g."""
    wkv, wgate, ape = parameters["wkv.weight"], parameters["wgate.weight"], parameters["ape"]
    d = wkv.shape[0] // 2 if overlap else wkv.shape[0]
    entries = []
    for g in range(x.shape[0] // ratio):
        kv, gate = [], []
        if overlap and g > 0:
            for i in range(ratio):
                token = x[(g - 1) * ratio + i]
                kv.append(token @ wkv[:d].T)
                gate.append(token @ wgate[:d].T + ape[i, :d])
        for i in range(ratio):
            token, own = x[g * ratio + i], slice(d, 2 * d) if overlap else slice(0, d)
            kv.append(token @ wkv[own].T)
            gate.append(token @ wgate[own].T + ape[i, own])
        pooled = (torch.stack(gate).softmax(0) * torch.stack(kv)).sum(0)
        entry = rms(pooled, parameters["norm.weight"], eps) if norm else pooled
        entry = turn(entry, position(g) if position else ratio * g, **rope)
        entries.append(hadamard(entry) if rotate else entry)
    return torch.stack(entries) if entries else x.new_zeros(0, x.shape[1], d)


def index_vectors(x, qr, parameters, layer, eps, *, turn=None, rotate_q=None, rotate_k=None, norm=True):
    """Index queries [S, B, H, D], keys [G, B, D] and head weights [S, B, H]; the keywords change one rule each."""
    h, d, r = layer.n_heads, layer.head_dim, layer.compress_ratio
    rope = {"dim": layer.rope.dim, "theta": layer.rope.theta}
    rotate_q = layer.rotate if rotate_q is None else rotate_q
    rotate_k = layer.rotate if rotate_k is None else rotate_k
    turn = turn or (rope_half_split if r == 1 else rope_interleaved)
    q = (qr @ parameters["wq_b.weight"].T).view(*qr.shape[:2], h, d)
    q = torch.stack([turn(q[t], t, **rope) for t in range(x.shape[0])])
    if r == 1:
        own = below(parameters, "keys.")
        k = x @ own["wk.weight"].T
        if norm:
            centred = k - k.mean(-1, keepdim=True)
            scale = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
            k = centred / scale * own["norm.weight"] + own["norm.bias"]
        k = torch.stack([turn(k[t], t, **rope) for t in range(x.shape[0])])
        k = hadamard(k) if rotate_k else k
    else:
        own = below(parameters, "compressor.")
        k = compress(x, own, r, overlap=layer.overlap, rope=rope, eps=eps, rotate=rotate_k, turn=turn, norm=norm)
    weights = x @ parameters["weights_proj.weight"].T / math.sqrt(h * d)
    return (hadamard(q) if rotate_q else q), k, weights


def index_scores(q, k, weights, ratio):
    """Scores [B, S, G], -inf where invisible."""
    products = torch.einsum("sbhd,gbd->bshg", q, k)
    scores = (products * (products > 0) * weights.permute(1, 0, 2)[..., None]).sum(2)
    rows, groups = q.shape[0], k.shape[0]
    hidden = torch.tensor([[g >= (t + 1) // ratio for g in range(groups)] for t in range(rows)], dtype=torch.bool)
    return scores.masked_fill(hidden.view(rows, groups), -math.inf)


def select(scores, topk):
    """int64 [B, S, K]: the best groups in ascending order, -1 in empty slots."""
    batch, rows, groups = scores.shape
    out = torch.full((batch, rows, topk), -1)
    for b in range(batch):
        for t in range(rows):
            seen = [g for g in range(groups) if scores[b, t, g] > -math.inf]
            best = sorted(sorted(seen, key=lambda g: (-scores[b, t, g].item(), g))[:topk])
            out[b, t, : len(best)] = torch.tensor(best, dtype=torch.long)
    return out


def attention(x, parameters, layer, settings, eps, *, dense=False, indices=None):
    """The whole self-attention.

    Args:
        x: [S, B, hidden]. layer: `LayerConfig`. settings: `AttentionConfig`.
        dense: attend to every visible entry, and take the indexer's loss over all of them.
        indices: selection [B, S, K] to use in place of the indexer's own.

    Returns:
        out [S, B, hidden]; loss: the indexer's, before its coefficient, or None; indices or None.
    """
    n, c, r, ropes = settings.n_heads, settings.head_dim, layer.compress_ratio, settings.rope_dim
    theta = settings.rope_theta if layer.kind == "window" else layer.rope.theta
    rope = {"dim": ropes, "theta": theta}
    rows, batch, _ = x.shape
    qr = rms(x @ parameters["wq_a.weight"].T, parameters["q_norm.weight"], eps)
    q = (qr @ parameters["wq_b.weight"].T).view(rows, batch, n, c)
    q = rms(q, 1, eps)
    q = torch.stack([rope_interleaved(q[t], t, **rope) for t in range(rows)])
    latent = rms(x @ parameters["wkv.weight"].T, parameters["kv_norm.weight"], eps)
    latent = torch.stack([rope_interleaved(latent[t], t, **rope) for t in range(rows)])
    entries, scores = None, None
    if r == 1:
        entries = latent
    elif r > 1:
        entries = compress(x, below(parameters, "compressor."), r, overlap=layer.overlap, rope=rope, eps=eps)
    if layer.has_indexer:
        own = below(parameters, "indexer.")
        scores = index_scores(*index_vectors(x.detach(), qr.detach(), own, layer, eps), r)
        indices = select(scores, layer.topk) if indices is None and not dense else indices
    out = []
    loss, counted = 0.0, 0
    for b in range(batch):
        for t in range(rows):
            window = [] if r == 1 else list(range(max(0, t - layer.window + 1), t + 1))
            if r == 0:
                support = []
            elif layer.has_indexer and not dense:
                support = [g for g in indices[b, t].tolist() if g >= 0]
            else:
                support = list(range(min((t + 1) // r, entries.shape[0])))
            keys = [latent[j, b] for j in window] + [entries[g, b] for g in support]
            keys = torch.stack(keys) if keys else latent.new_zeros(0, c)
            logits = torch.cat([q[t, b] @ keys.T / math.sqrt(c), parameters["sink.weight"][:, None]], 1)
            p = logits.softmax(1)[:, :-1]
            out.append(rope_interleaved(p @ keys, t, sign=-1, **rope))
            if layer.has_indexer and (t + 1) // r > 0:
                counted += 1
                mass = p[:, len(window) :].sum(0).detach()
                teacher = mass / mass.sum()
                loss = loss + (teacher * (teacher.log() - scores[b, t, support].log_softmax(0))).sum()
    out = torch.stack(out).view(batch, rows, settings.o_groups, -1).transpose(0, 1)
    out = torch.einsum("sbgc,gfc->sbgf", out, parameters["wo_a"]).flatten(2) @ parameters["wo_b.weight"].T
    return out, (loss / counted if counted else None), indices
