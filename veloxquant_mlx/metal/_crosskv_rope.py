"""Cached keys moved from one rope theta to another in a single rotation.

    K_t = Rot(p * (w_t - w_s)) K_s,    w = base^(-2i/D),    pairs (i, i + D/2)

The angle is taken in float64 on the host: float32 is off by 2e-2 rad at position 131072 and by 0.2 rad at a million.
"""

import mlx.core as mx

from veloxquant_mlx.metal._backend import metal_available
from veloxquant_mlx.transfer.rope import DTYPES, recode_rope


def is_available() -> bool:
    """Whether a Metal GPU is present to dispatch to; without one the function below runs on MLX's own operations."""
    return metal_available()


def crosskv_rope_recode(keys: mx.array, positions: mx.array, source_base: float, target_base: float) -> mx.array:
    """Keys rotated under theta `source_base` as theta `target_base` would have rotated them.

    Args:
        keys: (BH, N, D) float16, bfloat16 or float32, D even.
        positions: (N,) integers, absolute positions in tokens, shared by all BH groups.
        source_base: theta that the keys were rotated with.
        target_base: theta to rotate them with.

    Returns:
        (BH, N, D) in the dtype of `keys`.

    Raises:
        ValueError: a shape does not fit, or a base is not positive.
        TypeError: another dtype, or positions that are not integers.

    Error: equal to `veloxquant_mlx.transfer.rope.recode_rope`; float32 arithmetic, one rounding to the dtype of `keys`.
    """
    _check(keys, positions, source_base, target_base)
    return _ops(keys, positions, source_base, target_base)


def _check(keys: mx.array, positions: mx.array, source_base: float, target_base: float) -> None:
    if keys.ndim != 3 or keys.shape[-1] < 2 or keys.shape[-1] % 2:
        raise ValueError(f"[crosskv_rope_recode] keys must be (BH, N, D) with D even, but got {tuple(keys.shape)}.")
    if keys.dtype not in DTYPES:
        raise TypeError(f"[crosskv_rope_recode] keys must be float16, bfloat16 or float32, but got {keys.dtype}.")
    if positions.shape != (keys.shape[1],):
        raise ValueError(f"[crosskv_rope_recode] positions must be ({keys.shape[1]},), but got {tuple(positions.shape)}.")
    if not mx.issubdtype(positions.dtype, mx.integer):
        raise TypeError(f"[crosskv_rope_recode] positions must be integers, but got {positions.dtype}.")
    for name, base in (("source_base", source_base), ("target_base", target_base)):
        if not 0 < base < float("inf"):
            raise ValueError(f"[crosskv_rope_recode] {name} must be positive and finite, but got {base}.")


def _ops(keys: mx.array, positions: mx.array, source_base: float, target_base: float) -> mx.array:
    return recode_rope(keys, positions, source_base, target_base)
