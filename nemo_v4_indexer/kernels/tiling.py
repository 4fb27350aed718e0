"""Launch choices of the kernels: plain values, no torch, no TileLang.

H index heads, D index head dim, K top-k, G keys.
"""

HEADS = (8, 16, 32, 64, 128)
"""Index head counts that the kernels accept; 16 and above run at full speed."""

DIMS = (32, 64, 128)
"""Index head dims that the kernels accept."""

TOPK_MAX = 4096
"""Largest top-k; the survivor list of the selection has to fit in shared memory."""

KEYS_MAX = 1 << 30
"""Most keys of one row: positions in a row are int32."""
