"""The lightning indexer as a Megatron layer, sharded over the sequence.

S tokens of the sequence, L tokens of this rank, B batch, H index heads, D index dim, G compressed keys, K top-k.

Every rank projects, scores and selects its own L rows; only the compressed keys and the selected indices are gathered.
Parameters are replicated, and a rank's gradients are partial sums over its rows.
"""

import contextlib
import contextvars
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from nemo_v4_indexer import parallel, rotary, sharding, visibility
from nemo_v4_indexer.compressor import V4Compressor
from nemo_v4_indexer.diagnostics import Statistics
from nemo_v4_indexer.modules import Float32Linear, Float32Module, ReplicatedLinear, mark_replicated
from nemo_v4_indexer.ops.dispatch import resolve_backend
from nemo_v4_indexer.ops.indexer import Options, V4IndexerFunction
from nemo_v4_indexer.ops.loss import indexer_dense_kl_loss, indexer_kl_loss
from nemo_v4_indexer.ops.rotation import rotate_queries

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

    def forward(self, x, layout=None, group=None, documents=None):
        """[L, B, hidden] -> [S, B, D], dtype of x, on every rank; arguments as in `V4Compressor.forward`."""
        layout = layout or visibility.contiguous(x.shape[0], 1, 0)
        positions = layout.positions(x.device)
        if documents is not None:
            positions = documents.positions()[positions]
        keys = rotary.rotate_half_split(self.norm(self.wk(x)), rotary.rotary_table(positions, self.rope))
        keys = rotary.hadamard_rotation(keys) if self.rotate else keys
        return sharding.gather_in_order(keys.to(x.dtype), layout, group)


@dataclass
class V4IndexerSubmodules:
    """Builders of the indexer's parts: classes or ModuleSpecs that take the arguments of the defaults."""

    wq_b: ModuleSpec | type = ReplicatedLinear
    weights_proj: ModuleSpec | type = Float32Linear
    compressor: ModuleSpec | type = V4Compressor
    uncompressed_keys: ModuleSpec | type = UncompressedKeys


@dataclass
class Selection:
    """What an indexer chose, and what its loss needs. "Own rows" are the P query rows this rank scored.

    q: [P, B, H, D]; k: [G, B, D]; weights: fp32 [P, B, H]. Of own rows.
    limits: (start, end), int32 [B, P]. Of own rows.
    scores: fp32 [B, P, K]; own_indices: int32 [B, P, K]. None in the dense stage.
    indices: int32 [B, Q, K], of all query rows of this rank's heads. None in the dense stage: attend to all visible.
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    limits: tuple[torch.Tensor, torch.Tensor]
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
        self.layer, self.layer_number, self.q_lora_rank = layer, layer_number, q_lora_rank
        self.groups, self.tp_group = pg_collection, pg_collection.tp
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

    @property
    def sequence_ranks(self):
        """Group of the ranks that divide a sequence: tensor and context parallel."""
        split = parallel.group_size(getattr(self.groups, "cp", None)) > 1
        return self.groups.tp_cp if split else self.tp_group

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

    def shard(self, rows, cu_seqlens=None):
        """The `Sharding` of hidden states with `rows` rows on this rank; cu_seqlens as in `forward`."""
        return sharding.shard(self.config, self.groups, rows, self.share, cu_seqlens)

    def share(self, even, queries):
        """Division of the query rows over the tensor parallel ranks: even in rows, or in work where that pays."""
        layer, (size, rank) = self.layer, (even.size, even.rank)
        rows = even.runs[-1][-1][1]
        if layer.balance_rows is False or rows % (2 * size):
            return even
        zigzag = visibility.zigzag(rows, size, rank)
        if layer.balance_rows is None:
            moved = rows // 2 // size if self.config.sequence_parallel else 0
            row_bytes = 2 * self.q_lora_rank + 8 * layer.n_heads  # qr there, head weights there and their gradient back
            work = [
                max(visibility.causal_work(queries.compose(share, 0), layer.compress_ratio)) for share in (even, zigzag)
            ]
            if not sharding.balancing_pays(work, 2 * layer.n_heads * layer.head_dim, moved * row_bytes):
                return even
        return zigzag

    def forward_before_topk(self, x, qr, packed_seq_params=None):
        """Queries, keys and head weights; the entry that Megatron's DSAttention calls (ratio 1).

        Args:
            x: [L, B, hidden]; qr: [L, B, q_lora_rank]. Rows this rank holds.

        Returns:
            q [L, B, H, D], k [G, B, D], weights fp32 [L, B, H].
        """
        if packed_seq_params is not None:
            raise NotImplementedError("V4Indexer: packed_seq_params are not supported in forward_before_topk")
        shards = self.shard(x.shape[0])
        q = self._queries(qr, shards.positions(shards.held, x.device))
        return q, self._keys(x, shards.held, shards.held_group, None), self._head_weights(x)

    def _queries(self, qr, positions):
        layer = self.layer
        q = self.wq_b(qr).view(*qr.shape[:2], layer.n_heads, layer.head_dim)
        table, how = rotary.rotary_table(positions, layer.rope), dict(backend=layer.backend, topk=layer.topk)
        return rotate_queries(q, table, half_split=layer.compress_ratio == 1, hadamard=layer.rotate, **how)

    def _keys(self, x, layout, group, documents):
        make = self.keys if self.layer.compress_ratio == 1 else self.compressor
        return make(x, layout, group, documents)

    def _head_weights(self, x):
        return self.weights_proj(x) * (self.layer.n_heads * self.layer.head_dim) ** -0.5

    def forward(self, x, qr, shards=None):
        """Select keys for every query row of this rank's heads.

        Args:
            x: [L, B, hidden], qr: [L, B, q_lora_rank]: rows this rank holds. Detached: only its loss trains it.
            shards: `Sharding` of x; default that of a sequence without documents.

        Returns:
            `Selection`.
        """
        shards = shards or self.shard(x.shape[0])
        # Nothing differentiates the scores of an evaluated model, whose caller may still have gradients on.
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            return self._select(x.detach(), qr.detach(), shards)

    def _select(self, x, qr, shards):
        if self.config.sequence_parallel or shards.share_group is None:
            k = self._keys(x, shards.held, shards.held_group, shards.documents)
            weights = self._head_weights(x)
            qr, weights = (
                sharding.redistribute(t, shards.held, shards.scored, shards.held_group) for t in (qr, weights)
            )
        else:  # every tensor parallel rank holds all rows: each takes its share
            own = shards.share.positions(x.device)
            x, qr = x[own], qr[own]
            k = self._keys(x, shards.scored, shards.scored_group, shards.documents)
            weights = self._head_weights(x)
        q = self._queries(qr, shards.positions(shards.scored, x.device))
        ratio, topk = self.layer.compress_ratio, self.layer.topk
        limits = shards.limits(shards.scored, ratio, k.shape[0], x.shape[1], x.device)
        selection = Selection(q, k, weights, limits)
        # Gradients on or off must not matter here: recomputation runs the same forward both ways.
        if not (self.dense_stage and self.trainable):
            scores, own = V4IndexerFunction.apply(q, k, weights, ratio, topk, None, limits, self.options)
            selection.scores, selection.own_indices = scores, own
            rows = sharding.gather_in_order(own.transpose(0, 1), shards.share, shards.share_group)
            selection.indices = rows.transpose(0, 1)
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
        ranks = parallel.group_size(teacher.shards.share_group) if not self.config.sequence_parallel else 1
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
            backend = resolve_backend(self.layer.backend, selection.q, self.layer.topk)
            loss, sums = indexer_kl_loss(
                selection.scores, selection.own_indices, mass, coeff=coeff, rows=teacher.rows, backend=backend
            )
        start, end = selection.limits
        self.statistics.add_loss(sums, (end > start).sum())
        return loss

    def extra_repr(self):
        layer = self.layer
        return f"layer {self.layer_number}, ratio {layer.compress_ratio}, topk {layer.topk}, backend {layer.backend}"
