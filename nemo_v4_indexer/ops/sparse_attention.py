"""Window + selected compressed entries + sink in one softmax, with a single latent as key and value.

S tokens, B batch, N attention heads (of this rank), C latent dim, G compressed entries, K selected entries per row.

    out[s, n] = sum_{j in window, selection} softmax_j( scale * q[s, n] . e_j ,  with sink[n] in the denominator ) e_j

(DeepSeek-V4 report: compressed sparse attention.) Chunked over query rows: gathered entries and probabilities exist for
one chunk at a time, in backward too.
"""

import math
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
    """Logits [B, N, s, K or G], fp32, -inf where there is no entry; and the gathered rows [B, s, K, C] or None."""
    latent = entries.latent
    if entries.indices is None:
        rows, valid = None, visibility.visible(entries.start, entries.end, latent.shape[0])
        logits = torch.einsum("sbnc,gbc->bnsg", q, latent)
    else:
        valid = entries.indices >= 0
        if latent.shape[0] == 0:  # a sequence shorter than the ratio: empty slots still read a row
            latent = F.pad(latent, (0, 0, 0, 0, 0, 1))
        rows = _GatherEntries.apply(latent, entries.indices.clamp(min=0).long())
        logits = torch.einsum("sbnc,bskc->bnsk", q, rows)
    return (logits.float() * scale).masked_fill(~valid[:, None], float("-inf")), rows


def _attend(q, kv, first_query, first_key, entries, sink, window, scale, first_keys):
    """One chunk of rows: out [s, B, N, C] and log of the softmax denominator [B, N, s]."""
    s, b, n, _ = q.shape
    parts, widths = [], []
    if window:
        query = torch.arange(first_query, first_query + s, device=q.device)
        key = torch.arange(first_key, first_key + kv.shape[0], device=q.device)
        seen = visibility.window_mask(query, key, window, None if first_keys is None else first_keys[query])
        parts.append((torch.einsum("sbnc,tbc->bnst", q, kv).float() * scale).masked_fill(~seen, float("-inf")))
        widths.append(kv.shape[0])
    rows = None
    if entries is not None:
        logits, rows = _entry_logits(q, entries, scale)
        parts.append(logits)
        widths.append(entries.width)
    logits = torch.cat([*parts, sink.float().view(1, n, 1, 1).expand(b, n, s, 1)], dim=-1)
    denominator = logits.logsumexp(-1)
    p = (logits[..., :-1] - denominator[..., None]).exp().to(q.dtype).split(widths, dim=-1)
    out = torch.einsum("bnst,tbc->sbnc", p[0], kv) if window else 0
    if entries is not None:
        if rows is None:
            out = out + torch.einsum("bnsg,gbc->sbnc", p[-1], entries.latent)
        else:
            out = out + torch.einsum("bnsk,bskc->sbnc", p[-1], rows)
    return out, denominator.detach()


def _bytes_per_row(q, entries, window, workspace_bytes):
    """Intermediates per row of the longest chunk of rows that fits the workspace.

    A chunk of m rows reads m + window - 1 window keys, so its bytes are m * (row + key * m): the m that fills the
    workspace solves a quadratic equation.
    """
    _, b, n, c = q.shape
    key = 12 * b * n
    row = key * window
    if entries is not None:
        # Entries and, in backward, their gradient in fp32 or better.
        gathered = 0 if entries.indices is None else b * c * (q.element_size() + max(4, q.element_size()))
        row += (key + gathered) * entries.width
    return (row + math.isqrt(row**2 + 4 * key * workspace_bytes)) // 2 if window else row


def sparse_attention(
    q, kv, entries, sink, *, window, scale, first_position=0, first_keys=None, workspace_bytes=256 * 2**20
):
    """Attention of every row to its window, its compressed entries and the sink.

    Args:
        q: [S, B, N, C], of consecutive tokens from first_position on. kv: [T, B, C], latents of all tokens.
        entries: `Entries` of q's rows, or None for a layer with the window alone.
        sink: [N]. Logit of each head's sink, which takes weight and gives nothing.
        window: tokens seen, t - window + 1 .. t; 0 for none.
        scale: of the logits.
        first_keys: int [T], first token each token may see in its window (its document's); None: all.
        workspace_bytes: bound on the intermediates of one chunk of rows.

    Returns:
        out: [S, B, N, C], dtype of q. denominator: fp32 [B, N, S], log of the softmax denominator, without gradient.
    """
    outs, denominators = [], []
    chunks = reference.chunk_rows(q.shape[0], _bytes_per_row(q, entries, window, workspace_bytes), workspace_bytes)
    for lo, hi in chunks:
        first_query, last_query = first_position + lo, first_position + hi
        first_key = max(0, first_query - window + 1)
        part = None if entries is None else entries.rows(lo, hi)
        args = (q[lo:hi], kv[first_key:last_query], first_query, first_key, part, sink, window, scale, first_keys)
        if len(chunks) > 1 and torch.is_grad_enabled():
            out, denominator = checkpoint(_attend, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            out, denominator = _attend(*args)
        outs.append(out)
        denominators.append(denominator)
    return torch.cat(outs), torch.cat(denominators, dim=-1)


@torch.no_grad()
def attention_mass(q, denominator, entries, scale):
    """M of the distillation loss: probability each entry gets, with the full denominator, summed over these heads.

    Args:
        q: [s, B, N, C]. denominator: [B, N, s], from `sparse_attention`. entries: `Entries` of the same rows.

    Returns:
        fp32 [B, s, K], or [B, s, G] where entries.indices is None; 0 where there is no entry.
    """
    logits, _ = _entry_logits(q, entries, scale)
    return (logits - denominator[..., None]).exp().sum(1)
