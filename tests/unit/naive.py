"""Oracles in plain loops and whole fp64 tensors, written from the formulas alone; nothing of the package is imported.

S query rows, B batch, H index heads, D index dim, G keys, K top-k, N attention heads, C latent dim.
"""

import math

import torch


def limits(rows, ratio, groups, batch):
    """Lists [B][S] of (start, end) of causal rows, by counting the whole groups among tokens 0 .. t."""
    row = [(0, min(groups, sum(1 for last in range(ratio - 1, t + 1, ratio) if last <= t))) for t in range(rows)]
    return [row for _ in range(batch)]


def limit_tensors(pairs):
    """start, end int32 [B, S] from lists [B][S] of pairs."""
    table = torch.tensor(pairs, dtype=torch.int32).view(len(pairs), -1, 2)
    return table[..., 0].contiguous(), table[..., 1].contiguous()


def scores(q, k, w):
    """I [B, S, G] in fp64, differentiable."""
    products = torch.einsum("sbhd,gbd->bshg", q.double(), k.double())
    return (products.relu() * w.double().permute(1, 0, 2)[..., None]).sum(2)


def pick(row, start, end, topk):
    """Indices of the topk best of a list of floats within [start, end), ascending, -1 padded.

    NaN first, then larger, then lower index.
    """
    order = sorted(range(start, end), key=lambda g: (0, 0, g) if math.isnan(row[g]) else (1, -row[g], g))
    chosen = sorted(order[:topk])
    return chosen + [-1] * (topk - len(chosen))


def select(values, pairs, topk):
    """Indices int32 [B, S, K] of whole scores [B, S, G]."""
    chosen = [
        [pick(row, *pair, topk) for row, pair in zip(rows, row_pairs, strict=True)]
        for rows, row_pairs in zip(values.tolist(), pairs, strict=True)
    ]
    return torch.tensor(chosen, dtype=torch.int32).view(*values.shape[:2], topk)


def at(values, indices, pairs):
    """Scores [B, S, K] at indices, -inf where the index lies outside the row's pair; differentiable."""
    out = torch.full(indices.shape, -math.inf, dtype=values.dtype)
    slots = [
        (b, s, j)
        for b, s, j in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape)).tolist()
        if pairs[b][s][0] <= int(indices[b, s, j]) < pairs[b][s][1]
    ]
    if not slots:
        return out
    b, s, j = torch.tensor(slots).T
    return out.index_put((b, s, j), values[b, s, indices[b, s, j].long()])


def gradients(q, k, w, indices, grad):
    """dq, dk, dw in fp64 by the formulas of the operation, slot by slot."""
    q, k, w = q.double(), k.double(), w.double()
    dq, dk, dw = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(w)
    for b, s, j in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape)).tolist():
        g = int(indices[b, s, j])
        if g < 0:
            continue
        up = float(grad[b, s, j])
        product = q[s, b] @ k[g, b]
        on = (product > 0).double()
        dw[s, b] += up * product * on
        dq[s, b] += up * (w[s, b] * on)[:, None] * k[g, b]
        dk[g, b] += up * (w[s, b] * on) @ q[s, b]
    return dq, dk, dw


def kl(scores, valid, mass):
    """Per-row KL [B, S] in fp64 of the teacher to softmax over the valid slots, differentiable; 0 without mass."""
    rows = []
    for b in range(scores.shape[0]):
        for s in range(scores.shape[1]):
            support = valid[b, s].nonzero()[:, 0]
            teacher = mass[b, s, support].double()
            if not len(support) or float(teacher.sum()) == 0:
                rows.append(torch.zeros((), dtype=torch.float64))
                continue
            p = teacher / teacher.sum()
            log_q = scores[b, s, support].double()
            log_q = log_q - log_q.logsumexp(0)
            terms = [p[i] * (p[i].log() - log_q[i]) for i in range(len(p)) if float(p[i]) > 0]
            rows.append(torch.stack(terms).sum())
    return torch.stack(rows).view(scores.shape[:2])


def attention(q, kv, latent, seen, sink, window, scale):
    """Dense attention in fp64, differentiable.

    Args:
        q: [S, B, N, C]. kv: [S, B, C]. latent: [G, B, C]. seen: bool [B, S, G]. sink: [N].

    Returns:
        out [S, B, N, C]; probabilities of the compressed entries [B, N, S, G]; log denominator [B, N, S].
    """
    q, kv, latent, sink = (t.double() for t in (q, kv, latent, sink))
    s, b, n, _ = q.shape
    near = torch.tensor([[t - window < j <= t for j in range(s)] for t in range(s)], dtype=torch.bool).view(s, s)
    raw = (scale * torch.einsum("sbnc,tbc->bnst", q, kv)).masked_fill(~near, -math.inf)
    entry = (scale * torch.einsum("sbnc,gbc->bnsg", q, latent)).masked_fill(~seen[:, None], -math.inf)
    logits = torch.cat([raw, entry, sink.view(1, n, 1, 1).expand(b, n, s, 1)], -1)
    p = logits.softmax(-1)
    out = torch.einsum("bnst,tbc->sbnc", p[..., :s], kv) + torch.einsum("bnsg,gbc->sbnc", p[..., s:-1], latent)
    return out, p[..., s:-1], logits.logsumexp(-1)


def relative_error(actual, expected):
    """RMS of the difference over RMS of the expectation, in fp64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def assert_close(actual, expected, tolerance):
    """Same shape, all finite, a signed expectation that is not zero, and a relative RMS error within tolerance."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.isfinite().all(), "not finite"
    assert (expected > 0).any() and (expected < 0).any(), "the expectation is vacuous"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e} over {tolerance:.2e}"


def exact_inputs(rows, batch, heads, dim, groups, seed, dtype=torch.float32):
    """Small signed integers and eighths: every sum is exact in fp32 (and in bf16 inputs), and ties are common."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=generator).float()

    return whole(rows, batch, heads, dim).to(dtype), whole(groups, batch, dim).to(dtype), whole(rows, batch, heads) / 8


def random_inputs(rows, batch, heads, dim, groups, seed, dtype=torch.float32):
    """Signed normal q, k in dtype, and w in fp32 (fp64 with fp64)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, batch, heads, dim), (groups, batch, dim), (rows, batch, heads)
    q, k, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q.to(dtype), k.to(dtype), w.to(torch.promote_types(dtype, torch.float32))
