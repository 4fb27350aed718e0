"""The trainable indexer that takes the place of NeMo AutoModel's in its DeepSeek-V4 attention.

S tokens, B batch, H index heads, D index dim, r compress ratio, P compressed entries (S // r), K top-k, N attention
heads, C latent dim. AutoModel's tensors are batch first.

AutoModel calls the indexer inside its compressor, and the compressor inside its attention. The indexer leaves its
selection behind; a forward hook of the attention reads the teacher off the attention's own probabilities and attaches
the loss to its output, through the same scaler as AutoModel's router loss.
"""

import logging
from dataclasses import dataclass

import torch

from nemo_v4_indexer import rotary, visibility
from nemo_v4_indexer.diagnostics import Statistics
from nemo_v4_indexer.integrations.automodel_host import MoEAuxLossAutoScaler
from nemo_v4_indexer.ops.indexer import Options, V4IndexerFunction
from nemo_v4_indexer.ops.loss import indexer_dense_kl_loss, indexer_kl_loss
from nemo_v4_indexer.ops.sparse_attention import Entries, sparse_attention

logger = logging.getLogger(__name__)
MODULES = ("wkv", "wgate", "ape_param", "kv_norm", "wq_b", "weights_proj")
"""The parts of AutoModel's indexer, kept under their names: checkpoints, sharding plans and dtype lists stay valid."""


@dataclass
class Selection:
    """q: [S, B, H, D]; k: [P, B, D]; weights: fp32 [S, B, H]; limits: int32 [B, S] twice.

    scores: fp32 [B, S, K], None in the dense stage; indices: int32 [B, S, K], -1 empty.
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    limits: tuple[torch.Tensor, torch.Tensor]
    scores: torch.Tensor | None
    indices: torch.Tensor


def _turned(x, angles):
    """Turn the last channels of x [B, S, ..., D] by angles [B, S, R / 2], interleaved pairs, fp32 inside."""
    table = tuple(t.flatten(0, 1).float() for t in (angles.cos(), angles.sin()))
    return rotary.rotate_interleaved(x.flatten(0, 1), table).view_as(x)


def pooled(kv, gate, ape, ratio):
    """Overlapping gated pooling: [B, S, 2D] -> [B, S // ratio, D] fp32.

    An entry pools the previous group's tokens through channels [0, D) and its own through [D, 2D).
    """
    batch, length, width = kv.shape
    groups = visibility.num_groups(length, ratio)
    kv, gate = (t[:, : groups * ratio].reshape(batch, groups, ratio, width) for t in (kv, gate))
    gate = gate + ape
    (kv_before, kv_own), (gate_before, gate_own) = (t.split(width // 2, dim=-1) for t in (kv, gate))
    kv_before = torch.cat([torch.zeros_like(kv_before[:, :1]), kv_before[:, :-1]], dim=1)
    gate_before = torch.cat([torch.full_like(gate_before[:, :1], float("-inf")), gate_before[:, :-1]], dim=1)
    share = torch.cat([gate_before, gate_own], dim=2).softmax(2)
    return (share * torch.cat([kv_before, kv_own], dim=2)).sum(2)


class DistilledIndexer(torch.nn.Module):
    """Called as AutoModel's DeepseekV4Indexer is; scores and selects with this package's operation.

    Args:
        original: AutoModel's indexer, whose submodules are taken over.
        layer: `LayerConfig` of the layer. config: the `IndexerConfig` it comes from.
    """

    checkpoint_names = {  # noqa: RUF012 - read by `weights`
        "wkv.weight": "compressor.wkv.weight",
        "wgate.weight": "compressor.wgate.weight",
        "ape_param.weight": "compressor.ape",
        "kv_norm.weight": "compressor.norm.weight",
    }

    def __init__(self, original, layer, config):
        super().__init__()
        for name in MODULES:
            setattr(self, name, getattr(original, name))
        self.layer, self.config = layer, config
        self.options = Options(layer.backend, layer.workspace_mib, layer.deterministic, layer.precise)
        self.statistics = Statistics()
        self.set_step(0)
        self.selection = None
        if not layer.loss.enabled:
            self.requires_grad_(False)

    def set_step(self, step):
        """Choose the loss stage of optimizer step `step` (0-based): dense for the first warmup_steps."""
        self.dense_stage = self.layer.loss.enabled and step < self.layer.loss.warmup_steps

    @property
    def trains(self):
        """Whether a forward now computes the loss.

        Raises:
            RuntimeError: it should, and AutoModel's infrastructure has frozen the indexer.
        """
        if not (self.training and torch.is_grad_enabled() and self.layer.loss.enabled):
            return False
        if not any(p.requires_grad for p in self.parameters()):
            raise RuntimeError(
                f"the indexer of layer {self.layer.layer_number} has a loss, but AutoModel froze its parameters. Use "
                "optimizer._target_: nemo_v4_indexer.integrations.automodel.AdamW, call unfreeze_indexers(model) "
                "before the optimizer is built, or set v4_indexer.loss.coeff: null"
            )
        return True

    @property
    def ape(self):
        return self.ape_param()

    def forward(
        self,
        hidden_states,
        q_residual,
        rotary_module,
        position_embeddings,
        cache,
        layer_idx,
        start_pos,
        position_ids=None,
        packed_seq_ids=None,
        cp_group=None,
    ):
        """Selected compressed entries, int64 [B, S, min(topk, P)] in ascending order, -1 in empty slots.

        Args:
            hidden_states: [B, S, hidden]. q_residual: [B, S, q_lora_rank]. Detached here.
            rotary_module: AutoModel's rotary module of compressed layers, of which `inv_freq` is read.
            position_ids: int [B, S] or [S]; default 0 .. S - 1.
            position_embeddings, cache, layer_idx: not needed.

        Raises:
            NotImplementedError: packed sequences, context parallelism, or a start other than 0.
        """
        self._refuse(packed_seq_ids, cp_group, start_pos)
        q, k, weights, limits = self._project(hidden_states.detach(), q_residual.detach(), rotary_module, position_ids)
        trains, groups = self.trains, k.shape[0]
        if trains and self.dense_stage:
            visible = visibility.visible(*limits, groups)
            everything = torch.arange(groups, device=k.device, dtype=torch.int32).expand_as(visible)
            scores, indices = None, everything.masked_fill(~visible, -1)
        else:
            topk = min(self.layer.topk, max(groups, 1))
            ratio = self.layer.compress_ratio
            scores, indices = V4IndexerFunction.apply(q, k, weights, ratio, topk, None, limits, self.options)
            indices = indices[..., : min(topk, groups)]
            scores = scores[..., : min(topk, groups)]
        self.selection = Selection(q, k, weights, limits, scores, indices) if trains else None
        return indices.long()

    def _refuse(self, packed_seq_ids, cp_group, start_pos):
        number = self.layer.layer_number
        if packed_seq_ids is not None:
            raise NotImplementedError(f"layer {number}: packed sequences (packed_sequence_size, THD) are not supported")
        if cp_group is not None and cp_group.size() > 1:
            raise NotImplementedError(f"layer {number}: cp_size must be 1, got {cp_group.size()}")
        if start_pos:
            raise NotImplementedError(f"layer {number}: start_pos must be 0, got {start_pos}")

    def _project(self, x, qr, rotary_module, position_ids):
        """q [S, B, H, D], k [P, B, D], weights fp32 [S, B, H], and the row limits int32 [B, S] of `Selection`."""
        layer = self.layer
        batch, length = x.shape[:2]
        positions = torch.arange(length, device=x.device) if position_ids is None else position_ids
        positions = positions.expand(batch, length)
        frequency = rotary_module.inv_freq.double()
        ratio = layer.compress_ratio
        entries = pooled(self.wkv(x.float()), self.wgate(x.float()), self.ape_param(x), ratio)
        first = torch.arange(0, entries.shape[1] * ratio, ratio, device=x.device).expand(batch, -1)
        k = _turned(self.kv_norm(entries), first[..., None] * frequency)
        q = self.wq_b(qr).view(batch, length, layer.n_heads, layer.head_dim)
        q = _turned(q, positions[..., None] * frequency)
        if layer.rotate:
            q, k = rotary.hadamard_rotation(q), rotary.hadamard_rotation(k)
        weights = self.weights_proj(x).float() * (layer.n_heads * layer.head_dim) ** -0.5
        limits = visibility.row_limits(positions, ratio, k.shape[1])
        limits = visibility.batched_limits(*limits, batch, length, k.shape[1])
        q, k, weights = (t.transpose(0, 1).contiguous() for t in (q, k.to(q.dtype), weights))
        return q, k, weights, limits

    def loss(self, mass, selection, padding):
        """The distillation loss, fp32 scalar, nats, mean over the rows that see an entry and are not padding.

        Args:
            mass: [B, S, P] in the dense stage, else [B, S, K]. Teacher's mass, summed over attention heads.
            padding: bool [B, S], or None.
        """
        start, end = selection.limits
        live = end > start
        if padding is not None:
            live = live & ~padding
        mass, rows = mass.masked_fill(~live[..., None], 0), live.sum()
        coeff, count = self.layer.loss.coeff, rows.clamp(min=1)
        if selection.scores is None:
            loss, sums = indexer_dense_kl_loss(
                selection.q,
                selection.k,
                selection.weights,
                selection.limits,
                lambda lo, hi: mass[:, lo:hi],
                coeff=coeff,
                rows=count,
                workspace_mib=self.layer.workspace_mib,
            )
        else:
            loss, sums = indexer_kl_loss(selection.scores, selection.indices, mass, coeff=coeff, rows=count)
        self.statistics.add_loss(sums, rows)
        return loss

    def extra_repr(self):
        layer = self.layer
        return f"layer {layer.layer_number}, ratio {layer.compress_ratio}, topk {layer.topk}, backend {layer.backend}"


def keep_entries(compressor, args, output):
    """Forward hook of the compressor: leave its entries [B, 1, P, C] for a teacher that has to be recomputed."""
    if compressor.indexer.selection is not None:
        compressor.indexer.entries = output[0].detach()


def attach_loss(attention, args, kwargs, output):
    """Forward hook of the attention: attach the loss of its indexer to its output."""
    indexer = attention.compressor.indexer
    selection, indexer.selection = indexer.selection, None
    if selection is None:
        return None
    entries, indexer.entries = indexer.entries, None
    out, probabilities = output
    with torch.no_grad():
        if probabilities is None:
            mass = recomputed_mass(attention, kwargs, entries[:, 0], selection)
        else:
            mass = probabilities[..., probabilities.shape[-1] - entries.shape[2] :].sum(1, dtype=torch.float32)
            if selection.scores is not None:
                mass = mass.gather(-1, selection.indices.clamp(min=0).long())
        mask = kwargs.get("attention_mask")
        # A token that may not attend to itself is padding.
        padding = None if mask is None else mask[:, 0].diagonal(dim1=-2, dim2=-1) < 0
    return MoEAuxLossAutoScaler.apply(out, indexer.loss(mass, selection, padding)), probabilities


@torch.no_grad()
def recomputed_mass(attention, kwargs, entries, selection):
    """The teacher of an attention kernel that keeps no probabilities: its own projections, attended to once more.

    Args:
        kwargs: of the attention's forward. entries: [B, P, C].

    Returns:
        fp32 [B, S, K] (or [B, S, P] in the dense stage), with window, entries and sink in the denominator.
    """
    x = kwargs["hidden_states"]
    cos, sin = (t[..., : attention.rope_head_dim // 2] for t in kwargs["position_embeddings_compress"])
    table = tuple(t.expand(*x.shape[:2], -1).flatten(0, 1).float() for t in (cos, sin))
    q = attention.wq_b(attention.q_norm(attention.wq_a(x))).unflatten(-1, (attention.num_heads, attention.head_dim))
    q = torch.nn.functional.rms_norm(q, q.shape[-1:], eps=attention.config.rms_norm_eps)
    kv = attention.kv_norm(attention.wkv(x))
    q, kv = (rotary.rotate_interleaved(t.flatten(0, 1), table).view_as(t).transpose(0, 1) for t in (q, kv))
    indices = selection.indices if selection.scores is not None else None
    entries = Entries(entries.transpose(0, 1), indices, *selection.limits)
    sink, scale = attention.sinks_param(q), attention.scaling
    workspace = attention.compressor.indexer.layer.workspace_mib * 2**20
    how = dict(window=attention.sliding_window, scale=scale, with_mass=True, workspace_bytes=workspace)
    return sparse_attention(q, kv, entries, sink, **how).mass
