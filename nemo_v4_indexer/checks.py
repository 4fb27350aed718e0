"""Argument checks of the public operations: shapes, dtypes and devices, never tensor values (no device sync).

S query rows, B batch, H heads, D dim, G keys, K top-k.
"""

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _described(tensor):
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def check_tensor(name, value, shape, dtypes):
    """Raise unless value is a tensor of that shape (None: any size) and one of the dtypes.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    expected = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    if value.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, value.shape, strict=True)):
        raise ValueError(f"{name} must be {expected}, got {_described(value)}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be one of {', '.join(map(str, dtypes))}, got {value.dtype}")


def check_int(name, value, least):
    """Raise unless value is an int (no bool) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_indexer_inputs(index_q, index_k, weights):
    """Raise unless q [S, B, H, D], k [G, B, D] and weights [S, B, H] belong together."""
    check_tensor("index_q", index_q, (None,) * 4, FLOATS)
    s, b, h, d = index_q.shape
    check_tensor("index_k", index_k, (None, b, d), FLOATS)
    check_tensor("weights", weights, (s, b, h), FLOATS)
    if index_q.dtype != index_k.dtype:
        raise TypeError(f"index_q and index_k must share a dtype, got {index_q.dtype} and {index_k.dtype}")
    devices = {index_q.device, index_k.device, weights.device}
    if len(devices) > 1:
        raise ValueError(f"index_q, index_k and weights must be on one device, got {sorted(map(str, devices))}")


def check_indices(name, indices, batch, rows, device):
    """Raise unless indices is an int32 or int64 tensor [B, S, any] on the device."""
    check_tensor(name, indices, (batch, rows, None), (torch.int32, torch.int64))
    _check_device(name, indices, device)


def _check_device(name, tensor, device):
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of index_q, {device}, got {tensor.device}")


def check_limits(cu_seqlen_ks, cu_seqlen_ke, batch, rows, device):
    """Raise unless both row limits are given, as int32 or int64 [S] or [B, S] on the device."""
    if cu_seqlen_ks is None or cu_seqlen_ke is None:
        raise ValueError("cu_seqlen_ks and cu_seqlen_ke must be given together")
    for name, value in (("cu_seqlen_ks", cu_seqlen_ks), ("cu_seqlen_ke", cu_seqlen_ke)):
        shape = (rows,) if isinstance(value, torch.Tensor) and value.dim() == 1 else (batch, rows)
        check_tensor(name, value, shape, (torch.int32, torch.int64))
        _check_device(name, value, device)
