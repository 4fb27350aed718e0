"""The problems that the benchmark times: shapes, data, floors.

S query rows, B batch, H index heads, D index head dim, r compress ratio, G keys, K top-k.
"""

import functools
from dataclasses import dataclass

import torch

from nemo_v4_indexer import costs, reference, visibility
from nemo_v4_indexer.kernels import forward, tiling

OPERATIONS = ("forward", "scores", "top-k", "backward", "forward+backward")
DATA = ("iid", "ar1", "ties")
CORRELATION = 0.95  # of neighbouring queries in "ar1" data
DISTINCT = 64  # distinct keys in "ties" data


@dataclass(frozen=True)
class Shape:
    """One problem. data: "iid" (normal), "ar1" (neighbouring queries correlate) or "ties" (64 distinct keys)."""

    sequence: int
    ratio: int = 4
    topk: int = 512
    batch: int = 1
    data: str = "iid"
    heads: int = 64
    dim: int = 128

    def __post_init__(self):
        numbers = (self.sequence, self.ratio, self.topk, self.batch, self.heads, self.dim)
        if min(numbers) < 1 or self.data not in DATA or self.sequence < self.ratio:
            raise ValueError(f"a shape is SEQUENCE[:RATIO[:TOPK[:BATCH[:DATA]]]] with DATA one of {DATA}, got {self}")

    @classmethod
    def parse(cls, text, heads=64, dim=128):
        """The shape that "32768:4:512:1:iid" names; what is left out keeps its default."""
        parts = text.split(":")
        try:
            numbers = [int(part) for part in parts[:4]]
        except ValueError:
            raise ValueError(f"a shape is SEQUENCE[:RATIO[:TOPK[:BATCH[:DATA]]]], got {text!r}") from None
        if len(parts) > 5:
            raise ValueError(f"a shape is SEQUENCE[:RATIO[:TOPK[:BATCH[:DATA]]]], got {text!r}")
        named = dict(zip(("sequence", "ratio", "topk", "batch"), numbers, strict=False))
        return cls(**named, data=parts[4] if len(parts) == 5 else "iid", heads=heads, dim=dim)

    @property
    def groups(self):
        return visibility.num_groups(self.sequence, self.ratio)

    @property
    def kind(self):
        """Everything but the length."""
        return self.ratio, self.topk, self.batch, self.data, self.heads, self.dim

    def label(self):
        extra = f" B={self.batch}" * (self.batch > 1) + f" {self.data}" * (self.data != "iid")
        return f"S={self.sequence} r={self.ratio} K={self.topk}{extra}"

    def small(self):
        """A short problem of the same kind with more keys than K, for a comparison of whole gradients."""
        return Shape(self.ratio * self.topk * 3 // 2 + 5, *self.kind)

    def floors(self, ceilings):
        """ms per operation that no implementation goes below.

        ceilings: measured `matmul_tflops` and `copy_tbps`. Scores multiply 2 H D per visible pair, gradients 6 H D per
        selected pair; top-k reads every visible score once and writes a score and an index per slot.
        """
        visible = self.batch * costs.visible_pairs(self.sequence, self.ratio)
        selected = self.batch * costs.selected_pairs(self.sequence, self.ratio, self.topk)
        moved = 4 * visible + 8 * self.batch * self.sequence * self.topk
        scores = 2 * self.heads * self.dim * visible / ceilings["matmul_tflops"] / 1e9
        backward = 6 * self.heads * self.dim * selected / ceilings["matmul_tflops"] / 1e9
        values = (scores, scores, moved / ceilings["copy_tbps"] / 1e9, backward, scores + backward)
        return dict(zip(OPERATIONS, values, strict=True))


DEFAULT = tuple(
    Shape.parse(text)
    for text in (
        *("4096", "8191", "8192", "4096:1:2048", "8192:1:2048", "16384", "32768", "32768:4:512:1:ar1"),
        *("32768:1:2048", "65536", "131072", "131072:1:2048"),
    )
)
FULL = tuple(
    Shape.parse(text)
    for text in (
        *("4096:4:1024", "8192:4:1024", "32768:4:1024", "65536:4:1024", "8192:4:512:2", "32768:4:512:2"),
        *("65536:4:512:1:ar1", "8192:4:512:1:ties", "32768:4:512:1:ties"),
    )
)


def _normal(shape, device, generator):
    return torch.randn(*shape, device=device, generator=generator)


def _correlated(noise, factor):
    """AR(1) along dim 0, x_t = factor x_(t-1) + noise_t, of unit variance: windows of doubling length."""
    x, step = noise, 1
    while factor**step > 1e-4 and step < len(x):
        x = torch.cat([x[:step], x[step:] + factor**step * x[:-step]])
        step *= 2
    return x * (1 - factor**2) ** 0.5


class Problem:
    """Inputs of one shape on one device, and what arms share.

    q [S, B, H, D] and k [G, B, D] bf16, w [S, B, H] fp32; start, end int32 [B, S] row limits; rows: the query rows
    that the checks look at. backend: of this package.
    """

    def __init__(self, shape, device, backend, seed=0):
        self.shape, self.device, self.backend = shape, torch.device(device), backend
        s, b, g = shape.sequence, shape.batch, shape.groups
        generator = torch.Generator(self.device).manual_seed(seed)
        q = _normal((s, b, shape.heads, shape.dim), self.device, generator)
        if shape.data == "ar1":
            q = _correlated(q, CORRELATION)
        k = _normal((g, b, shape.dim), self.device, generator)
        if shape.data == "ties":
            k = k[torch.randint(min(DISTINCT, g), (g,), device=self.device, generator=generator)]
        self.q, self.k = q.bfloat16(), k.bfloat16()
        del q
        self.w = _normal((s, b, shape.heads), self.device, generator)
        limits = visibility.causal_limits(s, shape.ratio, g, self.device)
        self.start, self.end = visibility.batched_limits(*limits, b, s, g)
        self._generator = generator
        edges = [0, shape.ratio - 1, shape.ratio, shape.ratio * shape.topk - 1, shape.ratio * shape.topk, s - 1]
        drawn = torch.randint(s, (26,), device=self.device, generator=generator).tolist()
        self.rows = torch.tensor(sorted({row for row in (*edges, *drawn) if row < s}), device=self.device)
        self.keys = torch.randint(g, (8,), device=self.device, generator=generator).tolist()

    @functools.cached_property
    def truth(self):
        """fp64 scores [B, R, G] of the checked rows."""
        k = self.k.double()
        parts = [reference.scores(self.q[i].double(), k, self.w[i].double()) for i in self.rows.split(4)]
        return torch.cat(parts, dim=1)

    @functools.cached_property
    def _stored(self):
        """Scores [B, S, stride] of every key, -inf outside the limits, as this package's top-k reads them."""
        s, b, h, _ = self.q.shape
        g = self.shape.groups
        stored = torch.empty(b, s, tiling.row_stride(g), dtype=torch.float32, device=self.device)
        if self.backend == "tilelang":
            launch_scores(self, stored.view(-1), 0, s)
        for lo, hi in reference.chunk_rows(s, b * g * (4 * h if self.backend != "tilelang" else 1), 2**28):
            part = stored[:, lo:hi, :g]
            if self.backend != "tilelang":
                part.copy_(reference.scores(self.q[lo:hi], self.k, self.w[lo:hi]))
            part.masked_fill_(~visibility.visible(self.start[:, lo:hi], self.end[:, lo:hi], g), float("-inf"))
        return stored

    @functools.cached_property
    def logits(self):
        """Scores [B, S, G], fp32, -inf outside the limits; contiguous."""
        return self._stored[..., : self.shape.groups].contiguous()

    @functools.cached_property
    def padded_logits(self):
        """`logits` with the row stride of this package's workspace; nothing may be read beyond a row's limits."""
        return self._stored

    @functools.cached_property
    def indices(self):
        """int32 [B, S, K]: one selection for every arm's backward; ascending, -1 last."""
        from nemo_v4_indexer.ops import dispatch

        bytes_ = tiling.WORKSPACE_BYTES
        return dispatch.select(self.q, self.k, self.w, self.start, self.end, self.shape.topk, self.backend, bytes_)[1]

    @functools.cached_property
    def grad(self):
        """fp32 [B, S, K]: upstream gradient, zero in empty slots."""
        return _normal(self.indices.shape, self.device, self._generator).masked_fill_(self.indices < 0, 0)

    def silence_ties(self, tolerance=1e-3):
        """Zero the gradient of slots where a product of some head is near zero: there relu's mask is rounding."""
        keys = self.k.permute(1, 0, 2).double()
        for b in range(self.shape.batch):
            for lo, hi in reference.chunk_rows(self.shape.sequence, 8 * self.shape.topk * self.shape.heads * 2, 2**28):
                chosen = keys[b][self.indices[b, lo:hi].clamp(min=0).long()]
                products = torch.einsum("shd,skd->shk", self.q[lo:hi, b].double(), chosen)
                self.grad[b, lo:hi].masked_fill_((products.abs() < tolerance).any(1), 0)


def launch_scores(problem, workspace, first, rows):
    """Scores of the rows first .. first + rows - 1 into the workspace, [B, rows, stride] flat."""
    _, b, h, d = problem.q.shape
    processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    blocks = min(processors, -(-rows // (tiling.SCORE_COLUMNS // h)) * b)
    inputs = (problem.q, problem.k, problem.w, problem.start, problem.end)
    forward.score_kernel(h, d)(*inputs, workspace, first, rows, tiling.row_stride(problem.shape.groups), blocks)
