"""The lightning indexer as a Megatron layer, sharded over the sequence.

S tokens of the sequence, L tokens of this rank, B batch, H index heads, D index dim, G compressed keys, K top-k.

Every rank projects, scores and selects its own L rows; only the compressed keys and the selected indices are gathered.
Parameters are replicated, and a rank's gradients are partial sums over its rows.
"""

import contextlib
import contextvars
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from nemo_v4_indexer import parallel, rotary, visibility
from nemo_v4_indexer.compressor import V4Compressor
from nemo_v4_indexer.diagnostics import Statistics
from nemo_v4_indexer.modules import Float32Linear, Float32Module, ReplicatedLinear, mark_replicated
from nemo_v4_indexer.ops.indexer import Options, V4IndexerFunction
from nemo_v4_indexer.ops.loss import indexer_dense_kl_loss, indexer_kl_loss

_collecting = contextvars.ContextVar("collecting", default=False)


@contextlib.contextmanager
def collecting():
    """Within it, indexers gather diagnostics in eval mode and under no_grad too."""
    token = _collecting.set(True)
    try:
        yield
    finally:
        _collecting.reset(token)


class UncompressedKeys(Float32Module):
    """Keys of a layer with ratio 1 (DeepSeek-V3.2): LayerNorm(wk x), RoPE on the first dims, half-split."""

    def __init__(self, config, head_dim, rope, rotate):
        super().__init__(config)
        self.rope, self.rotate = rope, rotate
        self.wk = Float32Linear(config, config.hidden_size, head_dim)
        self.norm = torch.nn.LayerNorm(head_dim, eps=config.layernorm_epsilon)

    def forward(self, x, group=None):
        """[L, B, hidden] -> [S, B, D], dtype of x, on every rank of the group that shares the sequence."""
        first = parallel.group_rank(group) * x.shape[0]
        positions = torch.arange(first, first + x.shape[0], device=x.device)
        keys = rotary.rotate_half_split(self.norm(self.wk(x)), rotary.rotary_table(positions, self.rope))
        keys = rotary.hadamard_rotation(keys) if self.rotate else keys
        return parallel.gather_rows(keys.to(x.dtype), group)


@dataclass
class V4IndexerSubmodules:
    """Builders of the indexer's parts: classes or ModuleSpecs that take the arguments of the defaults."""

    wq_b: ModuleSpec | type = ReplicatedLinear
    weights_proj: ModuleSpec | type = Float32Linear
    compressor: ModuleSpec | type = V4Compressor
    uncompressed_keys: ModuleSpec | type = UncompressedKeys


@dataclass
class Selection:
    """What an indexer chose, and what its loss needs. "Own rows" are the L rows this rank scored.

    q: [L, B, H, D]; k: [G, B, D]; weights: fp32 [L, B, H]. Of own rows.
    limits: (start, end), int32 [B, L]. Of own rows.
    group: ranks the rows are divided over; None when every rank scored them all.
    scores: fp32 [B, L, K]; own_indices: int32 [B, L, K]. None in the dense stage.
    indices: int32 [B, S, K], all rows. None in the dense stage: attend to everything visible.
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    limits: tuple[torch.Tensor, torch.Tensor]
    group: Any
    scores: torch.Tensor | None = None
    own_indices: torch.Tensor | None = None
    indices: torch.Tensor | None = None


class V4Indexer(MegatronModule):
    """Scores compressed keys and selects the top-k for every query row.

    Args:
        config: TransformerConfig.
        submodules: `V4IndexerSubmodules`, or None for the defaults.
        layer_number: global, 1-based.
        layer: `LayerConfig` of this layer; its kind must be "sparse".
        q_lora_rank: width of qr.
        pg_collection: process groups, of which `tp` is read.

    Raises:
        ValueError: the layer has no indexer.
    """

    def __init__(self, config, submodules, layer_number, *, layer, q_lora_rank, pg_collection, **_):
        super().__init__(config)
        if not layer.has_indexer:
            raise ValueError(
                f"layer {layer_number} is {layer.kind!r} (ratio {layer.compress_ratio}), an indexer needs 'sparse'"
            )
        submodules = submodules or V4IndexerSubmodules()
        self.layer, self.layer_number, self.tp_group = layer, layer_number, pg_collection.tp
        h, d, ratio = layer.n_heads, layer.head_dim, layer.compress_ratio
        self.wq_b = build_module(submodules.wq_b, config, q_lora_rank, h * d)
        self.weights_proj = build_module(submodules.weights_proj, config, config.hidden_size, h)
        if ratio == 1:
            self.keys = build_module(submodules.uncompressed_keys, config, d, layer.rope, layer.rotate)
        else:
            build = submodules.compressor
            self.compressor = build_module(build, config, d, ratio, layer.overlap, layer.rope, layer.rotate)
        self.options = Options(layer.backend, layer.workspace_mib, layer.deterministic, layer.precise)
        self.dense_stage = layer.loss.enabled and layer.loss.warmup_steps > 0
        self.statistics = Statistics()
        sharded = config.sequence_parallel
        mark_replicated(self, sequence_parallel=sharded, average=not sharded and self.tp_group.size() > 1)
        if not layer.loss.enabled:
            # No other gradient reaches these parameters, and optimizers that wait for one would hang.
            self.requires_grad_(False)

    def set_step(self, step):
        """Choose the loss stage of the optimizer step `step` (0-based): dense for the first warmup_steps."""
        self.dense_stage = self.layer.loss.enabled and step < self.layer.loss.warmup_steps

    @property
    def trainable(self):
        """Whether the loss may run in training: it is enabled and the indexer is not frozen."""
        return self.training and self.layer.loss.enabled and any(p.requires_grad for p in self.parameters())

    @property
    def trains(self):
        """Whether a forward now computes the loss."""
        return torch.is_grad_enabled() and self.trainable

    @property
    def collects(self):
        """Whether a forward now gathers diagnostics."""
        return _collecting.get() or (self.training and torch.is_grad_enabled())

    def forward_before_topk(self, x, qr, packed_seq_params=None):
        """Queries, keys and head weights; the entry that Megatron's DSAttention calls (ratio 1).

        Args:
            x: [L, B, hidden]; qr: [L, B, q_lora_rank]. This rank's rows under sequence parallelism, else all.

        Returns:
            q [L, B, H, D], k [G, B, D], weights fp32 [L, B, H].
        """
        if packed_seq_params is not None:
            raise NotImplementedError("V4Indexer: packed sequences (packed_seq_params) are not supported yet")
        return self._project(x, qr, self.tp_group if self.config.sequence_parallel else None)

    def _project(self, x, qr, group):
        layer = self.layer
        rows = x.shape[0]
        first = parallel.group_rank(group) * rows
        table = rotary.rotary_table(torch.arange(first, first + rows, device=x.device), layer.rope)
        q = self.wq_b(qr).view(rows, x.shape[1], layer.n_heads, layer.head_dim)
        q = (rotary.rotate_half_split if layer.compress_ratio == 1 else rotary.rotate_interleaved)(q, table)
        q = rotary.hadamard_rotation(q) if layer.rotate else q
        k = (self.keys if layer.compress_ratio == 1 else self.compressor)(x, group)
        weights = self.weights_proj(x) * (layer.n_heads * layer.head_dim) ** -0.5
        return q, k, weights

    def forward(self, x, qr):
        """Select keys for every row of the sequence.

        Args:
            x: [L, B, hidden], qr: [L, B, q_lora_rank]: this rank's rows under sequence parallelism, else all S rows,
                which are then divided over the tensor parallel ranks here. Detached: the indexer learns from its loss.

        Returns:
            `Selection`.
        """
        # Nothing differentiates the scores of an evaluated model, whose caller may still have gradients on.
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            return self._select(x.detach(), qr.detach())

    def _select(self, x, qr):
        group = self.tp_group
        if not self.config.sequence_parallel:
            # Rows that do not divide evenly are scored on every rank.
            group = group if x.shape[0] % group.size() == 0 else None
            x, qr = parallel.own_rows(x, group), parallel.own_rows(qr, group)
        rows, batch = x.shape[:2]
        q, k, weights = self._project(x, qr, group)
        first = parallel.group_rank(group) * rows
        positions = torch.arange(first, first + rows, device=x.device)
        limits = visibility.row_limits(positions, self.layer.compress_ratio, k.shape[0])
        limits = visibility.batched_limits(*limits, batch, rows, k.shape[0])
        selection = Selection(q, k, weights, limits, group)
        # Gradients on or off must not matter here: recomputation runs the same forward both ways.
        if not (self.dense_stage and self.trainable):
            ratio, topk = self.layer.compress_ratio, self.layer.topk
            scores, own = V4IndexerFunction.apply(q, k, weights, ratio, topk, None, limits, self.options)
            selection.scores, selection.own_indices = scores, own
            selection.indices = parallel.gather_indices(own, group)
        return selection

    def loss(self, selection, teacher):
        """The distillation loss of this rank's rows, ready for `ops.loss.attach_loss`.

        Args:
            selection: from `forward`.
            teacher: `attention.Teacher` of the same rows.

        Returns:
            fp32 scalar. Over all ranks its gradients make those of coeff times the mean over the rows that see a key.
        """
        # Without sequence parallelism Megatron averages the ranks' gradients, which here are to be summed.
        ranks = parallel.group_size(selection.group) if not self.config.sequence_parallel else 1
        # A per-token loss is divided by the number of tokens later on.
        tokens = teacher.tokens if self.config.calculate_per_token_loss else 1
        coeff = self.layer.loss.coeff * ranks * tokens
        if selection.indices is None:
            loss, sums = indexer_dense_kl_loss(
                selection.q,
                selection.k,
                selection.weights,
                selection.limits,
                teacher.visible_mass,
                coeff=coeff,
                rows=teacher.rows,
                workspace_mib=self.layer.workspace_mib,
            )
        else:
            mass = teacher.selected_mass()
            loss, sums = indexer_kl_loss(selection.scores, selection.own_indices, mass, coeff=coeff, rows=teacher.rows)
        start, end = selection.limits
        self.statistics.add_loss(sums, (end > start).sum())
        return loss

    def extra_repr(self):
        layer = self.layer
        return f"layer {self.layer_number}, ratio {layer.compress_ratio}, topk {layer.topk}, backend {layer.backend}"
