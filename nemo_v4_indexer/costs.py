"""What an indexer costs, before it runs: operations, bytes moved, memory. Plain arithmetic, no tensors.

S tokens of a sequence, B sequences, H index heads, D index dim, r compress ratio, G = S // r keys, K top-k,
N attention heads, C latent dim. Operations count a multiply-add as two; bytes are of bf16 activations and fp32 scores.
"""

from dataclasses import dataclass, fields

from nemo_v4_indexer import visibility

MIB = 2**20


def visible_pairs(sequence, compress_ratio):
    """Pairs of a query and a key it may see, of one causal sequence."""
    return visibility.causal_work(visibility.contiguous(sequence, 1, 0), compress_ratio)[0]


def selected_pairs(sequence, compress_ratio, topk):
    """Pairs that a selection of topk keys keeps."""
    full = min(sequence, compress_ratio * topk)  # rows before see at most topk keys
    return visible_pairs(full, compress_ratio) + (sequence - full) * topk


@dataclass(frozen=True, kw_only=True)
class IndexerMemory:
    """Bytes beyond the inputs and the gradients of one call, on one rank."""

    workspace: int
    """Scores of one chunk of query rows; freed when the call returns."""
    selection: int
    """Scores and indices of the selection, and row limits; kept until the backward pass."""
    accumulators: int
    """fp32 gradient of the keys, in the backward pass."""

    @property
    def forward(self):
        return self.workspace + self.selection

    @property
    def backward(self):
        return self.selection + self.accumulators + self.workspace

    @property
    def peak(self):
        return max(self.forward, self.backward)


def indexer_memory(sequence, compress_ratio, topk, *, batch=1, heads=64, head_dim=128, workspace_mib=256, rows=None):
    """Estimate of the memory of `v4_lighting_indexer`, forward and backward.

    Args:
        sequence: S, tokens. compress_ratio: r. topk: K. batch: B. heads: H. head_dim: D.
        workspace_mib: the call's workspace, MiB.
        rows: query rows of this rank, if not all S.

    Returns:
        `IndexerMemory`. Without chunks the scores alone would be 4 * B * rows * G bytes.
    """
    rows = rows or sequence
    groups = visibility.num_groups(sequence, compress_ratio)
    return IndexerMemory(
        workspace=min(workspace_mib * MIB, 4 * batch * rows * groups),
        selection=batch * rows * (8 * topk + 8),
        accumulators=4 * batch * groups * head_dim,
    )


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer, one micro-batch, one rank; operations of forward and backward together."""

    scored_pairs: int
    """Of the busiest rank."""
    imbalance: float
    """Pairs of the busiest rank over the mean."""
    indexer: int
    """Operations of the indexer: projections, scores, their gradients, the teacher's mass."""
    layer: int
    """Operations of the whole layer, indexer included."""
    gathered: int
    """Bytes the busiest rank receives for the indexer, forward and backward."""
    memory: IndexerMemory | None


def layer_cost(layer, attention, model, *, sequence, batch, tensor=1, context=1, share=None, held=None):
    """Cost of one layer.

    Args:
        layer: `LayerConfig`. attention: `AttentionConfig`. model: has hidden_size and ffn_hidden_size.
        sequence: S, tokens. batch: B of a micro-batch. tensor, context: ranks a sequence is divided over.
        share: `Layout` of scored rows over all these ranks; default consecutive rows.
        held: `Layout` of the rows whose keys each rank makes; default `share`.
    """
    ranks = tensor * context
    tokens = batch * sequence
    main = _main_operations(layer, attention, model, sequence) * batch // ranks
    if not layer.has_indexer:
        return LayerCost(scored_pairs=0, imbalance=1.0, indexer=0, layer=main, gathered=0, memory=None)
    divided = sequence % ranks == 0
    share = share or visibility.contiguous(sequence, ranks if divided else 1, 0)
    held = held or share
    work = visibility.causal_work(share, layer.compress_ratio)
    hd = layer.n_heads * layer.head_dim
    key_width = layer.head_dim * (1 if layer.compress_ratio == 1 else 4 if layer.overlap else 2)
    # Inputs are detached: backward of a projection is its weight's gradient alone.
    weights = attention.q_lora_rank * hd + model.hidden_size * (key_width + layer.n_heads)
    projections = 4 * tokens * weights // (ranks if divided else 1)
    selected = batch * selected_pairs(sequence, layer.compress_ratio, layer.topk)
    backward = 6 * hd * selected // (ranks if divided else 1)
    teacher = 2 * attention.n_heads * attention.head_dim * selected // ranks if layer.loss.enabled else 0
    indexer = projections + 2 * hd * batch * max(work) + backward + teacher
    indices = 4 * tokens // context * layer.topk * (tensor - 1) // tensor if divided else 0
    return LayerCost(
        scored_pairs=batch * max(work),
        imbalance=max(work) * len(work) / max(1, sum(work)),
        indexer=indexer,
        layer=main + indexer,
        gathered=2 * batch * _key_bytes(layer, held, key_width)
        + indices
        + batch * _row_bytes(layer, attention, held, share),
        memory=indexer_memory(
            sequence,
            layer.compress_ratio,
            layer.topk,
            batch=batch,
            heads=layer.n_heads,
            head_dim=layer.head_dim,
            workspace_mib=layer.workspace_mib,
            rows=sequence // len(work),
        ),
    )


def _key_bytes(layer, held, key_width):
    """Bytes of other ranks' keys, and of the projected rows at their borders (fp32), of one sequence."""
    ratio = layer.compress_ratio
    need = visibility.rows_before(ratio, layer.overlap)
    keys = [
        sum(visibility.num_groups(b, ratio) - visibility.num_groups(a, ratio) for a, b in runs) for runs in held.runs
    ]
    borders = [sum(min(need, b - a) for a, b in runs) for runs in held.runs]
    # Gathers move as much for every rank as for the one with most.
    return (held.size - 1) * (2 * layer.head_dim * max(keys) + 4 * key_width * max(borders))


def _row_bytes(layer, attention, held, share):
    """Bytes of latent queries (bf16), head weights and their gradients (fp32) of rows scored away from where they are.

    Of one sequence; the rank that receives most.
    """
    if held.runs == share.runs:
        return 0
    kept = [sum(b - a for a, b in visibility.overlaps(*runs)) for runs in zip(held.runs, share.runs, strict=True)]
    rows = [sum(b - a for a, b in runs) for runs in share.runs]
    return max(n - k for n, k in zip(rows, kept, strict=True)) * (2 * attention.q_lora_rank + 8 * layer.n_heads)


def _main_operations(layer, attention, model, sequence):
    """Operations of attention and MLP for one sequence, forward and backward, all ranks."""
    h, c, n = model.hidden_size, attention.head_dim, attention.n_heads
    weights = h * attention.q_lora_rank + attention.q_lora_rank * n * c + h * c
    weights += (
        n * c * attention.o_lora_rank + attention.o_groups * attention.o_lora_rank * h + 3 * h * model.ffn_hidden_size
    )
    pairs = 0 if layer.compress_ratio == 1 else selected_pairs(sequence, 1, layer.window)
    if layer.compress_ratio > 1:
        weights += h * c * (4 if layer.overlap else 2)
    if layer.has_indexer:
        pairs += selected_pairs(sequence, layer.compress_ratio, layer.topk)
    elif layer.compress_ratio > 1:
        pairs += visible_pairs(sequence, layer.compress_ratio)
    return 3 * (2 * sequence * weights + 4 * n * c * pairs)


def total(costs):
    """Sums over layers of a sequence of `LayerCost`: operations and bytes of one micro-batch on one rank."""
    names = [f.name for f in fields(LayerCost) if f.name in ("scored_pairs", "indexer", "layer", "gathered")]
    return {name: sum(getattr(cost, name) for cost in costs) for name in names}
