"""Which backend runs, and its three operations; inside torch.compile they are single nodes of the graph.

S query rows, B batch, H index heads, D index dim, G compressed keys, K top-k.
"""

import functools
import logging

import torch
from torch import Tensor

from nemo_v4_indexer import reference

logger = logging.getLogger(__name__)


@functools.cache
def _log_once(level, message):
    logger.log(level, message)


def resolve_backend(backend, q, topk):
    """The backend that will run: "tilelang" or "reference".

    Raises:
        RuntimeError: "tilelang" was asked for by name where it cannot run; the message says why.
    """
    if backend == "reference":
        return "reference"
    from nemo_v4_indexer.kernels import runtime  # only here: the reference needs nothing of the kernels

    reason = runtime.support(q.device, q.dtype, q.shape[2], q.shape[3], topk)
    if reason is None:
        return "tilelang"
    if backend == "tilelang":
        raise RuntimeError(f"backend 'tilelang' cannot run: {reason}; backend 'reference' runs anywhere")
    level = logging.WARNING if q.device.type == "cuda" else logging.INFO
    _log_once(level, f"lightning indexer: backend 'reference', because {reason}")
    return "reference"


def _implementation(backend, q, topk):
    """forward, gather and backward of the backend."""
    if resolve_backend(backend, q, topk) == "reference":
        return reference.forward, reference.gather, reference.backward
    from nemo_v4_indexer.kernels.backward import backward
    from nemo_v4_indexer.kernels.forward import forward, gather

    return forward, gather, backward


def select(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, end: Tensor, topk: int, backend: str, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Scores [B, S, K] and int32 indices [B, S, K] of the K best visible keys."""
    forward, _, _ = _implementation(backend, q, topk)
    with torch.autocast(q.device.type, enabled=False):
        return forward(q, k, w, start, end, topk, workspace_bytes=workspace_bytes)


def gather(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, end: Tensor, indices: Tensor, backend: str, workspace_bytes: int
) -> Tensor:
    """Scores [B, S, K] at given indices."""
    _, gather, _ = _implementation(backend, q, indices.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        return gather(q, k, w, start, end, indices, workspace_bytes=workspace_bytes)


def backward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    grad: Tensor,
    ordered: bool,
    deterministic: bool | None,
    precise: bool,
    backend: str,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and w. ordered: indices ascend without duplicates, -1 last, as `select` gives them."""
    *_, backward = _implementation(backend, q, indices.shape[-1])
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = dict(ordered=ordered, deterministic=deterministic, precise=precise, workspace_bytes=workspace_bytes)
    with torch.autocast(q.device.type, enabled=False):
        return backward(q, k, w, indices, grad, **options)


_compiled_select = torch.library.custom_op("nemo_v4_indexer::select", select, mutates_args=())
_compiled_gather = torch.library.custom_op("nemo_v4_indexer::gather", gather, mutates_args=())
_compiled_backward = torch.library.custom_op("nemo_v4_indexer::backward", backward, mutates_args=())


@_compiled_select.register_fake
def _(q, k, w, start, end, topk, backend, workspace_bytes):
    shape = (q.shape[1], q.shape[0], topk)
    scores = q.new_empty(shape, dtype=reference.accumulation_dtype(q))
    return scores, q.new_empty(shape, dtype=torch.int32)


@_compiled_gather.register_fake
def _(q, k, w, start, end, indices, backend, workspace_bytes):
    return q.new_empty(indices.shape, dtype=reference.accumulation_dtype(q))


@_compiled_backward.register_fake
def _(q, k, w, indices, grad, ordered, deterministic, precise, backend, workspace_bytes):
    return q.new_empty(q.shape), k.new_empty(k.shape), w.new_empty(w.shape)


def operations():
    """select, gather and backward: plain calls, or graph nodes while torch.compile traces."""
    if torch.compiler.is_compiling():
        return _compiled_select, _compiled_gather, _compiled_backward
    return select, gather, backward
