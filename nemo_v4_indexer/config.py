"""Frozen configuration of the indexer and the per-layer plan made from it. Standard library only.

Layers are numbered globally from 1; multi-token-prediction (MTP) layers continue after the decoder's. A layer's
`compress_ratio` r decides what it is: 0 attends to its sliding window only ("window"), 1 <= r < heavy_ratio selects
top-k compressed keys with an indexer ("sparse"; 1 is uncompressed keys), r >= heavy_ratio attends to all its
compressed keys without one ("heavy").

`compress_ratio` and `topk` take one number for every layer (MTP included), a list with one entry per layer, or a
pattern `{prefix: [0, 0], pattern: [4, 128], suffix: [4], mtp: [0]}` whose middle part repeats until the decoder is
full. `layers: {3: {topk: 64}}` then changes single layers. Every mistake raises ValueError naming the key, the
layer, what was given and what was expected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, ClassVar, Self

from . import config_hf
from .config_parsing import (
    ConfigBase,
    FrozenMap,
    by,
    choice,
    expand,
    flag,
    layer_overrides,
    nested,
    real,
    rule,
    whole,
    wrong,
)

HEAVY_RATIO = 128
BACKENDS = ("auto", "tilelang", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig(ConfigBase):
    """The distillation loss that trains the indexer."""

    PREFIX: ClassVar[str] = "loss."

    coeff: float | None = field(default=0.01, metadata=by(real(0, allow_none="loss off")))
    """Weight of the loss; None or 0: no loss is computed."""
    warmup_steps: int = field(default=0, metadata=by(whole(0)))
    """Optimizer steps of the dense stage (all visible groups) before the sparse stage (selected groups)."""

    @property
    def enabled(self) -> bool:
        return bool(self.coeff)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig(ConfigBase):
    """Rotary embedding of compressed keys and of the queries that meet them."""

    PREFIX: ClassVar[str] = "rope."

    dim: int = field(default=64, metadata=by(whole(2)))
    """Rotated channels; even."""
    theta: float = field(default=160000.0, metadata=by(real(1, above=True)))
    factor: float = field(default=1.0, metadata=by(real(1)))
    """YaRN context extension; 1 is plain RoPE."""
    original_max_position: int = field(default=65536, metadata=by(whole(1)))
    """Tokens the model was trained on before YaRN extended it."""
    beta_fast: float = field(default=32.0, metadata=by(real(0, above=True)))
    beta_slow: float = field(default=1.0, metadata=by(real(0, above=True)))

    def check_together(self) -> None:
        if self.dim % 2:
            raise wrong("rope.dim", self.dim, "an even number of channels")
        if self.beta_fast <= self.beta_slow:
            raise wrong("rope.beta_fast", self.beta_fast, f"greater than rope.beta_slow ({self.beta_slow:g})")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """Everything one layer needs, resolved by `IndexerConfig.plan`; hashable and picklable."""

    layer_number: int
    """Global, 1-based; MTP layers continue after the decoder's."""
    is_mtp: bool
    kind: str
    """"window", "sparse" (has the indexer) or "heavy"."""
    compress_ratio: int
    topk: int
    """Selected groups per query; 0 when the layer has no indexer."""
    overlap: bool
    """Groups pool the previous group's tokens too: sparse layers with compress_ratio > 1."""
    n_heads: int
    head_dim: int
    rope: RopeConfig
    rotate: bool
    window: int
    backend: str
    workspace_mib: int
    deterministic: bool | None
    precise: bool
    balance_rows: bool | None
    loss: LossConfig

    @property
    def has_indexer(self) -> bool:
        return self.kind == "sparse"


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig(ConfigBase):
    """The indexer of a whole model. Immutable; lists and maps given by the caller are copied into frozen ones."""

    num_layers: int = field(metadata=by(whole(1)))
    """Decoder layers."""
    num_mtp_layers: int = field(default=0, metadata=by(whole(0)))
    compress_ratio: Any = field(default=4, metadata=by(rule(0)))
    """Tokens per compressed key: number, list or pattern. 0: sliding window only."""
    topk: Any = field(default=512, metadata=by(rule(0)))
    """Groups each query selects: number, list or pattern. At least 1 where the layer has an indexer, else unused."""
    layers: Mapping[int, Mapping[str, int]] = field(
        default_factory=FrozenMap, metadata=by(layer_overrides(compress_ratio=whole(0), topk=whole(1)))
    )
    """Single layers: `{layer number: {compress_ratio, topk}}`; the number may be written as digits in quotes. A topk
    for a layer without an indexer is refused."""
    n_heads: int = field(default=64, metadata=by(whole(1)))
    head_dim: int = field(default=128, metadata=by(whole(2)))
    rope: RopeConfig = field(default_factory=RopeConfig, metadata=by(nested(RopeConfig)))
    heavy_ratio: int = field(default=HEAVY_RATIO, metadata=by(whole(1)))
    """Ratio from which a layer attends to all its compressed keys and has no indexer."""
    window: int = field(default=128, metadata=by(whole(0)))
    """Sliding-window tokens of the main attention; 0 (none) only when every layer has ratio 1."""
    rotate: bool = field(default=True, metadata=by(flag()))
    """Hadamard rotation of indexer queries and keys; head_dim must be a power of two."""
    backend: str = field(default="auto", metadata=by(choice(*BACKENDS)))
    workspace_mib: int = field(default=256, metadata=by(whole(1)))
    """Scratch memory the operation may use per call, MiB."""
    deterministic: bool | None = field(
        default=None, metadata=by(flag(allow_none="follow torch.use_deterministic_algorithms"))
    )
    """Bitwise repeatable gradients."""
    precise: bool = field(default=False, metadata=by(flag()))
    """Gradients at fp32-like instead of bf16 accuracy, at some cost in speed."""
    balance_rows: bool | None = field(default=None, metadata=by(flag(allow_none="where a cost model says it pays")))
    """Tensor parallel ranks score query rows of even work; with consecutive rows the last does up to twice the mean."""
    loss: LossConfig = field(default_factory=LossConfig, metadata=by(nested(LossConfig)))

    def check_together(self) -> None:
        if self.rope.dim > self.head_dim:
            raise wrong("rope.dim", self.rope.dim, f"at most head_dim ({self.head_dim})")
        if self.rotate and self.head_dim & (self.head_dim - 1):
            raise wrong("head_dim", self.head_dim, "a power of two for the Hadamard rotation (or set rotate: false)")
        for layer in self.plan():
            if self.window == 0 and layer.compress_ratio != 1:
                raise wrong(
                    "window",
                    0,
                    f">= 1 for a layer with compress_ratio {layer.compress_ratio}",
                    layer=layer.layer_number,
                )

    def plan(self) -> tuple[LayerConfig, ...]:
        """One entry per layer in global order, MTP layers last."""
        ratios = expand("compress_ratio", self.compress_ratio, self.num_layers, self.num_mtp_layers)
        topks = expand("topk", self.topk, self.num_layers, self.num_mtp_layers)
        for number in self.layers:
            if number > len(ratios):
                expected = f"one of 1..{len(ratios)} ({self.num_layers} decoder + {self.num_mtp_layers} MTP layers)"
                raise wrong("layers: the layer number", number, expected)
        pairs = zip(ratios, topks, strict=True)
        return tuple(self._resolve(number, ratio, topk) for number, (ratio, topk) in enumerate(pairs, start=1))

    def _resolve(self, number: int, ratio: int, topk: int) -> LayerConfig:
        own = self.layers.get(number, {})
        ratio, topk = own.get("compress_ratio", ratio), own.get("topk", topk)
        kind = "window" if ratio == 0 else "heavy" if ratio >= self.heavy_ratio else "sparse"
        if kind != "sparse" and "topk" in own:
            expected = f"absent: compress_ratio {ratio} gives this layer no indexer"
            raise wrong(f"layers.{number}.topk", topk, expected, layer=number)
        if kind == "sparse" and topk < 1:
            raise wrong("topk", topk, f">= 1 where compress_ratio ({ratio}) calls for an indexer", layer=number)
        return LayerConfig(
            layer_number=number,
            is_mtp=number > self.num_layers,
            kind=kind,
            compress_ratio=ratio,
            topk=topk if kind == "sparse" else 0,
            overlap=kind == "sparse" and ratio > 1,
            n_heads=self.n_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            rotate=self.rotate,
            window=self.window,
            backend=self.backend,
            workspace_mib=self.workspace_mib,
            deterministic=self.deterministic,
            precise=self.precise,
            balance_rows=self.balance_rows,
            loss=self.loss,
        )

    def layer(self, layer_number: int) -> LayerConfig:
        """The plan's entry for one global, 1-based layer number; ValueError when there is no such layer."""
        plan = self.plan()
        return plan[whole(1, maximum=len(plan))("layer_number", layer_number) - 1]

    def warnings_for(self, seq_length: int) -> list[str]:
        """Readable warnings about settings that are legal but pointless at this sequence length (tokens)."""
        seq_length = whole(1)("seq_length", seq_length)
        found: dict[str, list[int]] = {}
        for layer in self.plan():
            ratio, groups = layer.compress_ratio, seq_length // max(layer.compress_ratio, 1)
            if groups == 0:
                text = f"compress_ratio {ratio} exceeds the sequence length {seq_length}: there are no compressed keys"
            elif layer.has_indexer and groups <= layer.topk:
                text = (
                    f"topk {layer.topk} selects all {groups} compressed keys of a {seq_length}-token sequence "
                    f"(compress_ratio {ratio}), so the selection restricts nothing: use a smaller topk or sequences "
                    f"of at least {(layer.topk + 1) * ratio} tokens"
                )
            else:
                continue
            found.setdefault(text, []).append(layer.layer_number)
        return [f"layer {', '.join(map(str, numbers))}: {text}" for text, numbers in found.items()]

    @classmethod
    def from_hf(cls, source: str | PathLike | Mapping, *, num_mtp_layers: int | None = None) -> Self:
        """Read a Hugging Face style config: a dict, a config.json, or a folder that holds one.

        Understands DeepSeek-V4 (per-layer ratios), V3.2 and GLM-5 (no ratios: every layer has ratio 1).
        `num_mtp_layers` overrides the checkpoint's count; 0 drops its MTP layers. Raises ValueError naming the key
        when one without a safe default is missing, FileNotFoundError when there is no such file.
        """
        return cls(**config_hf.indexer_settings(source, num_mtp_layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig(ConfigBase):
    """The V4 main attention around the indexer: one latent per token serves as key and value of every head."""

    PREFIX: ClassVar[str] = "attention."

    n_heads: int = field(metadata=by(whole(1)))
    head_dim: int = field(default=512, metadata=by(whole(2)))
    q_lora_rank: int = field(metadata=by(whole(1)))
    o_groups: int = field(metadata=by(whole(1)))
    """Head groups of the output projection; divides n_heads."""
    o_lora_rank: int = field(metadata=by(whole(1)))
    """Width each head group is projected to."""
    rope_dim: int = field(default=64, metadata=by(whole(2)))
    """Rotated channels at the end of head_dim; even."""
    rope_theta: float = field(default=10000.0, metadata=by(real(1, above=True)))
    """For window-only layers; compressed layers use the indexer's rope."""

    def check_together(self) -> None:
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise wrong("attention.rope_dim", self.rope_dim, f"even and at most attention.head_dim ({self.head_dim})")
        if self.n_heads % self.o_groups:
            raise wrong("attention.o_groups", self.o_groups, f"a divisor of attention.n_heads ({self.n_heads})")

    @classmethod
    def from_hf(cls, source: str | PathLike | Mapping) -> Self:
        """Read a DeepSeek-V4 style config; see `IndexerConfig.from_hf`. ValueError for other attention designs."""
        return cls(**config_hf.attention_settings(source))
