"""DeepSeek-V4's self-attention: sliding window, selected compressed entries and a sink in one softmax.

S tokens of the sequence, L tokens this rank holds, Q query rows of its heads, P query rows its indexer scores, B batch,
N attention heads of this rank, C latent dim, G compressed entries, K top-k.

One latent per token is key and value of every head. Heads (and the groups of the output projection) are divided over
the tensor parallel ranks; token latents, compressed entries and the indexer's selection are the same on each.
"""

import dataclasses
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from nemo_v4_indexer import parallel, rotary, sharding
from nemo_v4_indexer.compressor import V4Compressor
from nemo_v4_indexer.config import RopeConfig
from nemo_v4_indexer.diagnostics import SAMPLED_ROWS
from nemo_v4_indexer.layer import V4Indexer
from nemo_v4_indexer.modules import Float32Module, ReplicatedLinear, RMSNorm
from nemo_v4_indexer.ops.loss import attach_loss
from nemo_v4_indexer.ops.sparse_attention import Entries, joined, sparse_attention
from nemo_v4_indexer.teacher import Teacher


@dataclass
class V4SelfAttentionSubmodules:
    """Builders of the attention's parts: classes or ModuleSpecs that take the arguments of the defaults."""

    wq_a: ModuleSpec | type = ReplicatedLinear
    q_norm: ModuleSpec | type = RMSNorm
    wq_b: ModuleSpec | type = ColumnParallelLinear
    wkv: ModuleSpec | type = ReplicatedLinear
    kv_norm: ModuleSpec | type = RMSNorm
    wo_b: ModuleSpec | type = RowParallelLinear
    compressor: ModuleSpec | type = V4Compressor
    indexer: ModuleSpec | type = V4Indexer


class Sink(Float32Module):
    """One logit per head, kept fp32: weight that the softmax gives to nothing."""

    def __init__(self, config, heads):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(heads))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)


class V4SelfAttention(MegatronModule):
    """Self-attention of one layer: "window", "sparse" (with an indexer) or "heavy" (all compressed entries).

    Args:
        config: TransformerConfig.
        submodules: `V4SelfAttentionSubmodules`, or None for the defaults.
        layer_number: global, 1-based (Megatron's own numbering for MTP layers).
        layer: `LayerConfig`; its layer_number must agree, but for MTP layers.
        attention: `AttentionConfig`.
        pg_collection: process groups, of which `tp` is read.

    Raises:
        ValueError: heads or output groups do not divide over the tensor parallel ranks, or layer numbers differ.
        NotImplementedError: hybrid context parallelism.
    """

    def __init__(self, config, submodules=None, layer_number=1, *, layer, attention, pg_collection, **_):
        super().__init__(config)
        submodules = submodules or V4SelfAttentionSubmodules()
        tp = pg_collection.tp
        _check(config, layer_number, layer, attention, tp.size())
        self.layer, self.attention, self.layer_number = layer, attention, layer.layer_number
        self.pg, self.tp_group = pg_collection, tp
        self.heads, self.groups = attention.n_heads // tp.size(), attention.o_groups // tp.size()
        # A raw token is its own entry where the ratio is 1; a window would count it twice.
        self.window = 0 if layer.compress_ratio == 1 else layer.window
        rope = RopeConfig(dim=attention.rope_dim, theta=attention.rope_theta)
        self.rope = rope if layer.kind == "window" else dataclasses.replace(layer.rope, dim=attention.rope_dim)
        self.scale = attention.head_dim**-0.5
        self.recompute = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        h, c = config.hidden_size, attention.head_dim
        width, rank = attention.n_heads * c, attention.q_lora_rank
        linear = dict(config=config, bias=False, skip_bias_add=False, tp_group=tp)
        self.wq_a = build_module(submodules.wq_a, config, h, rank)
        self.q_norm = build_module(submodules.q_norm, config, rank, config.layernorm_epsilon)
        self.wq_b = build_module(
            submodules.wq_b, rank, width, init_method=config.init_method, gather_output=False, **linear
        )
        self.wkv = build_module(submodules.wkv, config, h, c)
        self.kv_norm = build_module(submodules.kv_norm, config, c, config.layernorm_epsilon)
        self.sink = Sink(config, self.heads)
        self.wo_a = torch.nn.Parameter(self._grouped_weight())
        set_tensor_model_parallel_attributes(self.wo_a, True, 0, 1)
        self.wo_b = build_module(
            submodules.wo_b,
            attention.o_groups * attention.o_lora_rank,
            h,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **linear,
        )
        if layer.compress_ratio > 1:
            build = submodules.compressor
            self.compressor = build_module(build, config, c, layer.compress_ratio, layer.overlap, self.rope)
        if layer.has_indexer:
            self.indexer = build_module(
                submodules.indexer,
                config,
                None,
                layer.layer_number,
                layer=layer,
                q_lora_rank=rank,
                pg_collection=pg_collection,
            )

    def _grouped_weight(self):
        """This rank's share of the grouped projection [groups, o_lora_rank, heads per group * C]."""
        attention = self.attention
        per_group = attention.n_heads // attention.o_groups * attention.head_dim
        weight = torch.empty(attention.o_groups, attention.o_lora_rank, per_group)
        if self.config.perform_initialization:
            self.config.init_method(weight)  # whole, so that every division over ranks starts from the same weights
        return parallel.own_rows(weight, self.tp_group).to(self.wkv.weight.device).clone()

    def forward(self, hidden_states, attention_mask=None, *, inference_context=None, packed_seq_params=None, **_):
        """Causal attention over the sequence.

        Args:
            hidden_states: [L, B, hidden], this rank's rows under sequence parallelism, else all.
            attention_mask: must be None or causal; visibility is causal by construction.

        Returns:
            output: as hidden_states; bias: None.

        Raises:
            NotImplementedError: inference_context is given, or packed sequences under context parallelism.
            ValueError: packed sequences with a batch.
        """
        if inference_context is not None:
            raise NotImplementedError(
                f"V4SelfAttention (layer {self.layer_number}) trains; inference_context must be None"
            )
        shards = sharding.shard(
            self.config, self.pg, hidden_states.shape[0], self._share, _cu_seqlens(packed_seq_params)
        )
        if packed_seq_params is not None:
            self._check_packed(hidden_states)
        table = rotary.rotary_table(shards.positions(shards.queries, hidden_states.device), self.rope)
        qr = self.q_norm(self.wq_a(hidden_states))
        q = self._queries(qr, table)
        latent = self._latent(hidden_states, shards)
        entries, selection = self._entries(hidden_states, qr, latent, shards)
        # The sparse stage's teacher is what the attention gives the selected entries.
        teaches = selection is not None and selection.indices is not None and self.indexer.trains
        out, denominator, mass = self._attend(q, latent, entries, shards, teaches)
        out = self._project_out(out, table)
        if selection is not None and (self.indexer.trains or self.indexer.collects):
            ratio = self.layer.compress_ratio
            teacher = Teacher(q, denominator, mass, entries, self.scale, shards, self.tp_group, ratio)
            if self.indexer.trains:
                out = attach_loss(out, self.indexer.loss(selection, teacher))
            if self.indexer.collects:
                self._diagnose(selection, teacher)
        return out, None

    def _share(self, even, queries):
        return self.indexer.share(even, queries) if self.layer.has_indexer else even

    def _check_packed(self, hidden_states):
        if hidden_states.shape[1] != 1:
            raise ValueError(f"packed sequences have batch 1, got hidden_states {tuple(hidden_states.shape)}")
        if self.config.context_parallel_size > 1:
            raise NotImplementedError("V4SelfAttention does not support packed sequences under context parallelism")

    def _sequence(self, rows, shards):
        """All tokens' rows from this rank's, each rank's heads using them on their own."""
        rows = sharding.gather_in_order(rows, shards.held, shards.held_group)
        return rows if self.config.sequence_parallel else parallel.sum_gradient(rows, self.tp_group)

    def _queries(self, qr, table):
        q, _ = self.wq_b(qr)  # gathers the sequence under sequence parallelism
        q = q.view(*q.shape[:2], self.heads, self.attention.head_dim)
        q = torch.nn.functional.rms_norm(q.float(), q.shape[-1:], eps=self.config.layernorm_epsilon).to(q.dtype)
        return rotary.rotate_interleaved(q, table)

    def _latent(self, x, shards):
        """Token latents [S, B, C], from this rank's tokens."""
        table = rotary.rotary_table(shards.positions(shards.held, x.device), self.rope)
        return self._sequence(rotary.rotate_interleaved(self.kv_norm(self.wkv(x)), table), shards)

    def _entries(self, x, qr, latent, shards):
        """`Entries` to attend to, and the indexer's `Selection`; None where the layer has none."""
        ratio = self.layer.compress_ratio
        if ratio == 0:
            return None, None
        compressed = latent
        if ratio > 1:
            compressed = self.compressor(x, shards.held, shards.held_group, shards.documents)
            if not self.config.sequence_parallel:
                compressed = parallel.sum_gradient(compressed, self.tp_group)
        limits = shards.limits(shards.queries, ratio, compressed.shape[0], x.shape[1], x.device)
        selection = self.indexer(x, qr, shards) if self.layer.has_indexer else None
        indices = None if selection is None else selection.indices
        return Entries(compressed, indices, *limits), selection

    def _attend(self, q, latent, entries, shards, with_mass):
        """`Attended` of this rank's query rows; selective recompute keeps only its inputs."""

        def attend(q, latent, compressed=None):
            given = None if entries is None else entries._replace(latent=compressed)
            return self._attend_runs(q, latent, given, shards, with_mass)

        inputs = (q, latent) if entries is None else (q, latent, entries.latent)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(attend, False, *inputs)
        return attend(*inputs)

    def _attend_runs(self, q, latent, entries, shards, with_mass):
        """One run of consecutive query rows at a time."""
        first_keys = None if shards.documents is None else shards.documents.starts()
        parts, place = [], 0
        for start, stop in shards.queries.own:
            rows = slice(place, place + stop - start)
            parts.append(
                sparse_attention(
                    q[rows],
                    latent,
                    None if entries is None else entries.rows(rows.start, rows.stop),
                    self.sink.weight,
                    window=self.window,
                    scale=self.scale,
                    first_position=start,
                    first_keys=first_keys,
                    with_mass=with_mass,
                    workspace_bytes=self.layer.workspace_mib * 2**20,
                )
            )
            place = rows.stop
        return joined(parts)

    def _project_out(self, out, table):
        """[Q, B, N, C] -> [L, B, hidden]: inverse RoPE, each head group to o_lora_rank, then all groups to hidden."""
        cos, sin = table
        out = rotary.rotate_interleaved(out, (cos, -sin))
        out = out.reshape(*out.shape[:2], self.groups, -1)
        out = torch.einsum("sbgc,gfc->sbgf", out, self.wo_a.to(out.dtype)).flatten(2)
        return self.wo_b(out)[0]

    @torch.no_grad()
    def _diagnose(self, selection, teacher):
        """Add the recall and tie rate of sampled rows to the indexer's statistics."""
        layer, statistics, shards = self.layer, self.indexer.statistics, teacher.shards
        sees_more = (layer.topk + 1) * layer.compress_ratio - 1  # first position with more visible keys than topk
        sampled = shards.sampled_queries(SAMPLED_ROWS, sees_more)
        if selection.indices is None or not sampled or shards.documents is not None:
            return
        rows = torch.tensor(sampled, device=selection.q.device)
        visible_keys = (teacher.entries.end - teacher.entries.start)[0, rows]
        statistics.add_recall(teacher.sampled_mass(rows), selection.indices[:, rows], visible_keys)
        own = [place for row in sampled if (place := shards.share.place(row)) is not None]
        if own:
            own = torch.tensor(own, device=rows.device)
            start, end = (limit[:, own] for limit in selection.limits)
            statistics.add_ties(selection.q[own], selection.k, selection.weights[own], start, end, layer.topk)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Megatron's distributed checkpoint entries; the grouped projection and the sink are divided over heads."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {"wo_a": self.wo_a, "sink.weight": self.sink.weight}
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        state.update(make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups))
        return state


def _cu_seqlens(packed_seq_params):
    """Document borders, int [N + 1], of Megatron's PackedSeqParams (thd), or None."""
    if packed_seq_params is None:
        return None
    padded = packed_seq_params.cu_seqlens_q_padded
    return packed_seq_params.cu_seqlens_q if padded is None else padded


def _check(config, layer_number, layer, attention, tensor_parallel):
    if config.hybrid_context_parallel:  # sequences of one batch over different ranks
        raise NotImplementedError(
            f"V4SelfAttention (layer {layer_number}) needs hybrid_context_parallel=False: context parallel ranks hold "
            "zigzag or contiguous rows of every sequence (cp_layout)"
        )
    if layer.layer_number != layer_number and not layer.is_mtp:  # Megatron numbers MTP layers from 1 again
        raise ValueError(f"layer {layer_number} was given the settings of layer {layer.layer_number}")
    for name in ("n_heads", "o_groups"):
        value = getattr(attention, name)
        if value % tensor_parallel:
            raise ValueError(f"attention.{name} {value} does not divide over {tensor_parallel} tensor parallel ranks")
