"""Window + selected compressed entries + sink in one softmax, with a single latent as key and value.

S tokens, B batch, N attention heads (of this rank), C latent dim, G compressed entries, K selected entries per row.

    out[s, n] = sum_{j in window, selection} softmax_j( scale * q[s, n] . e_j ,  with sink[n] in the denominator ) e_j

(DeepSeek-V4 report: compressed sparse attention.) Chunked over query rows: gathered entries and probabilities exist for
one chunk at a time, in backward too.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from nemo_v4_indexer import reference, visibility


class Entries(NamedTuple):
    """Compressed entries and which of them a row attends to.

    latent: [G, B, C]. indices: int32 [B, S, K], -1 empty, or None for all inside the limits.
    start, end: int32 [B, S]. Row limits, read where indices is None.
    """

    latent: torch.Tensor
    indices: torch.Tensor | None
    start: torch.Tensor
    end: torch.Tensor

    def rows(self, lo, hi):
        """The entries of the query rows lo .. hi - 1."""
        indices = None if self.indices is None else self.indices[:, lo:hi]
        return Entries(self.latent, indices, self.start[:, lo:hi], self.end[:, lo:hi])

    @property
    def width(self):
        return self.latent.shape[0] if self.indices is None else self.indices.shape[-1]


class Attended(NamedTuple):
    """What `sparse_attention` gives.

    out: [S, B, N, C], dtype of q.
    denominator: fp32 [B, N, S], log of the softmax denominator. No gradient.
    mass: fp32 [B, S, K] (or [B, S, G]), probability that each entry gets, summed over these heads; 0 where there is no
        entry. No gradient. None unless asked for.
    """

    out: torch.Tensor
    denominator: torch.Tensor
    mass: torch.Tensor | None


class _GatherEntries(torch.autograd.Function):
    """latent[index]: [G, B, C], int64 [B, s, K] -> [B, s, K, C].

    The gradient is summed in fp32 or better, by atomic adds on a GPU (hundreds of rows read each entry, and the sorted
    sum of plain indexing takes 500 of 800 ms of a layer with 8192 rows on an H200), unless PyTorch's deterministic
    algorithms are asked for.
    """

    @staticmethod
    def forward(ctx, latent, index):
        groups, batch, width = latent.shape
        flat = index * batch + torch.arange(batch, device=index.device)[:, None, None]
        ctx.save_for_backward(flat)
        ctx.groups = groups
        return latent.reshape(groups * batch, width)[flat]

    @staticmethod
    def backward(ctx, grad):
        (flat,) = ctx.saved_tensors
        batch, width = grad.shape[0], grad.shape[-1]
        total = grad.new_zeros(ctx.groups * batch, width, dtype=torch.promote_types(grad.dtype, torch.float32))
        total.index_add_(0, flat.flatten(), grad.reshape(-1, width).to(total.dtype))
        return total.view(ctx.groups, batch, width).to(grad.dtype), None


def _entry_logits(q, entries, scale):
    """Logits [B, s, N, K or G], fp32, -inf where there is no entry; and the gathered rows [B, s, K, C] or None."""
    latent = entries.latent
    if entries.indices is None:
        rows, valid = None, visibility.visible(entries.start, entries.end, latent.shape[0])
        logits = torch.einsum("sbnc,gbc->bsng", q, latent)
    else:
        valid = entries.indices >= 0
        if latent.shape[0] == 0:  # a sequence shorter than the ratio: empty slots still read a row
            latent = F.pad(latent, (0, 0, 0, 0, 0, 1))
        rows = _GatherEntries.apply(latent, entries.indices.clamp(min=0).long())
        logits = torch.einsum("sbnc,bskc->bsnk", q, rows)
    return (logits.float() * scale).masked_fill(~valid[:, :, None], float("-inf")), rows


def _block_rows(s, window):
    """Rows of a block: longer ones compute more logits outside the window, shorter ones make smaller products."""
    return min(s, max(window, 32))


def _keys_before(window):
    """Keys that a block reads before its first row: the window's, and more that keep rows of logits aligned."""
    return -(-(window - 1) // 8) * 8


def _window_logits(q, kv, first_query, window, scale, first_keys):
    """Logits [B, s, N, keys of a block], fp32, -inf outside the window; and every block's keys [blocks, B, C, keys].

    kv: [T, B, C], the latents up to the last query's, from `_keys_before` or fewer ahead of the first.
    """
    s, b, n, c = q.shape
    size, before = _block_rows(s, window), _keys_before(window)
    count = -(-s // size)
    rows = F.pad(q, (0, 0, 0, 0, 0, 0, 0, count * size - s)).view(count, size, b, n, c)
    keys = F.pad(kv, (0, 0, 0, 0, before + s - len(kv), count * size - s)).unfold(0, size + before, size)
    query = (first_query + torch.arange(count * size, device=q.device)).view(count, size)
    key = query[:, :1] - before + torch.arange(size + before, device=q.device)
    first = None if first_keys is None else first_keys[query.clamp(max=len(first_keys) - 1)]
    seen = visibility.window_mask(query, key, window, first).view(1, count * size, 1, -1)[:, :s]
    logits = torch.einsum("ipbnc,ibck->bipnk", rows, keys).reshape(b, count * size, n, -1)[:, :s]
    return (logits.float() * scale).masked_fill(~seen, float("-inf")), keys


def _window_output(p, keys, window):
    """[s, B, N, C] from probabilities [B, s, N, keys of a block] and every block's keys."""
    b, s, n, width = p.shape
    size = _block_rows(s, window)
    p = F.pad(p, (0, 0, 0, 0, 0, len(keys) * size - s)).view(b, len(keys), size, n, width)
    return torch.einsum("bipnk,ibck->ipbnc", p, keys).flatten(0, 1)[:s]


def _attend(q, kv, first_query, entries, sink, window, scale, first_keys, with_mass):
    """`Attended` of one chunk of rows."""
    s, b, n, _ = q.shape
    parts = []
    if window:
        logits, keys = _window_logits(q, kv, first_query, window, scale, first_keys)
        parts.append(logits)
    if entries is not None:
        logits, rows = _entry_logits(q, entries, scale)
        parts.append(logits)
    widths = [part.shape[-1] for part in parts]
    logits = torch.cat([*parts, sink.float().view(1, 1, n, 1).expand(b, s, n, 1)], dim=-1)
    denominator = logits.logsumexp(-1)
    p = (logits[..., :-1] - denominator[..., None]).exp()
    mass = p.detach().split(widths, dim=-1)[-1].sum(2) if with_mass else None
    p = p.to(q.dtype).split(widths, dim=-1)
    out = _window_output(p[0], keys, window) if window else 0
    if entries is not None:
        if rows is None:
            out = out + torch.einsum("bsng,gbc->sbnc", p[-1], entries.latent)
        else:
            out = out + torch.einsum("bsnk,bskc->sbnc", p[-1], rows)
    return Attended(out, denominator.detach().transpose(1, 2), mass)


def _bytes_per_row(q, entries, window):
    """Bytes of one row's intermediates: up to three fp32 numbers per logit at a time, and the entries it gathers."""
    _, b, n, c = q.shape
    keys = _block_rows(len(q), window) + _keys_before(window) if window else 0
    row = 12 * b * n * keys
    if entries is not None:
        # Entries and, in backward, their gradient in fp32 or better.
        gathered = 0 if entries.indices is None else b * c * (q.element_size() + max(4, q.element_size()))
        row += (12 * b * n + gathered) * entries.width
    return row


def sparse_attention(
    q,
    kv,
    entries,
    sink,
    *,
    window,
    scale,
    first_position=0,
    first_keys=None,
    with_mass=False,
    workspace_bytes=256 * 2**20,
):
    """Attention of every row to its window, its compressed entries and the sink.

    Args:
        q: [S, B, N, C], of consecutive tokens from first_position on. kv: [T, B, C], latents of all tokens.
        entries: `Entries` of q's rows, or None for a layer with the window alone.
        sink: [N]. Logit of each head's sink, which takes weight and gives nothing.
        window: tokens seen, t - window + 1 .. t; 0 for none.
        scale: of the logits.
        first_keys: int [T], first token each token may see in its window (its document's); None: all.
        with_mass: also give what every entry gets, which costs nothing more here (entries must not be None).
        workspace_bytes: bound on the intermediates of one chunk of rows.

    Returns:
        `Attended`.
    """
    parts = []
    chunks = reference.chunk_rows(q.shape[0], _bytes_per_row(q, entries, window), workspace_bytes)
    for lo, hi in chunks:
        first_query, last_query = first_position + lo, first_position + hi
        first_key = max(0, first_query - _keys_before(window)) if window else first_query
        part = None if entries is None else entries.rows(lo, hi)
        args = (q[lo:hi], kv[first_key:last_query], first_query, part, sink, window, scale, first_keys, with_mass)
        if len(chunks) > 1 and torch.is_grad_enabled():
            parts.append(checkpoint(_attend, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_attend(*args))
    return joined(parts)


def joined(parts):
    """`Attended` of consecutive rows as one."""
    out, denominator, mass = zip(*parts, strict=True)
    return Attended(torch.cat(out), torch.cat(denominator, dim=-1), None if mass[0] is None else torch.cat(mass, dim=1))


@torch.no_grad()
def attention_mass(q, denominator, entries, scale):
    """`Attended.mass`, afterwards and for entries of one's own choice: M of the distillation loss.

    Args:
        q: [s, B, N, C]. denominator: [B, N, s], from `sparse_attention`. entries: `Entries` of the same rows.

    Returns:
        fp32 [B, s, K], or [B, s, G] where entries.indices is None; 0 where there is no entry.
    """
    logits, _ = _entry_logits(q, entries, scale)
    return (logits - denominator.transpose(1, 2)[..., None]).exp().sum(2)
