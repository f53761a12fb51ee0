"""Cached keys moved from one rope theta to another in a single rotation.

    K_t = Rot(p * (w_t - w_s)) K_s,    w = base^(-2i/D),    pairs (i, i + D/2)    (RoPE: Su et al. 2021, arXiv 2104.09864)

The angle is taken in float64 on the host: float32 is off by 2e-2 rad at position 131072 and by 0.2 rad at a million.
"""

import mlx.core as mx
import numpy as np

from veloxquant_mlx.metal._backend import backend, metal_available
from veloxquant_mlx.metal._checks import FLOATS, INTEGERS, check_array, message, require, shape_text
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.transfer.rope import recode_rope
from veloxquant_mlx.transfer.rope_spec import RopeSpec

MAX_VALUES = (1 << 31) - 1024  # a grid and the sizes in `dims` are int32
TABLE_ROWS = 1 << 14  # positions whose float64 angles are held at a time
THREADS = 256

_ROTATE = Kernel(
    name="crosskv_rope_recode",
    inputs=("keys", "cosines", "sines", "dims"),
    outputs=("out",),
    sources=("rope",),
    metal="rope_by_table<D>(keys, cosines, sines, dims, out, thread_position_in_grid.x, thread_position_in_grid.y);",
    cuda="rope_by_table<D>(keys, cosines, sines, dims, out, blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y);",
)


def is_available() -> bool:
    """Whether a Metal GPU is present to dispatch to; without one the function below runs on MLX's own operations."""
    return metal_available()


def crosskv_rope_recode(keys: mx.array, positions: mx.array, source_base: float, target_base: float) -> mx.array:
    """Keys rotated under theta `source_base` as theta `target_base` would have rotated them.

    Args:
        keys: (BH, N, D) float16, bfloat16 or float32, D even.
        positions: (N,) integers of any width, absolute positions in tokens, shared by all BH groups.
        source_base: theta that the keys were rotated with.
        target_base: theta to rotate them with.

    Returns:
        (BH, N, D) in the dtype of `keys`.

    Raises:
        ValueError: a shape does not fit, a base is not positive, BH is 65536 or more, or keys have more than 2^31 - 1024 values.
        TypeError: another dtype, or positions that are not integers.

    Positions are read on the host, which waits for them if they are still being computed.

    Error: bit for bit equal to `veloxquant_mlx.transfer.rope.recode_rope` on every back end; float32 arithmetic, one rounding to
    the dtype of `keys`.
    """
    _check(keys, positions, source_base, target_base)
    if backend() == "cpu" or keys.size == 0 or source_base == target_base:
        return _ops(keys, positions, source_base, target_base)
    groups, rows, size = keys.shape
    (out,) = _ROTATE(
        [keys, *_tables(np.array(positions), size, source_base, target_base), dims(rows, groups)],
        template=[("D", size)],
        grid=(-(-rows * size // 2 // THREADS) * THREADS, groups, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[keys.shape],
        output_dtypes=[keys.dtype],
    )
    return out


def _check(keys: mx.array, positions: mx.array, source_base: float, target_base: float) -> None:
    name = "crosskv_rope_recode"
    check_array(name, "keys", keys, None, FLOATS)
    fits = keys.ndim == 3 and keys.shape[-1] >= 2 and keys.shape[-1] % 2 == 0
    require(fits, name, "keys", "(BH, N, D) with D even", keys)
    require(keys.size <= MAX_VALUES, name, "keys", f"at most {MAX_VALUES} values", keys.size)
    require(keys.shape[0] < 1 << 16, name, "BH", "below 65536", keys.shape[0])
    if not isinstance(positions, mx.array) or positions.dtype not in INTEGERS:
        raise TypeError(message(name, "positions", "integers", getattr(positions, "dtype", type(positions).__name__)))
    require(positions.shape == (keys.shape[1],), name, "positions", shape_text((keys.shape[1],)), positions)
    for label, base in (("source_base", source_base), ("target_base", target_base)):
        if isinstance(base, bool) or not isinstance(base, int | float):
            raise TypeError(message(name, label, "a number", type(base).__name__))
        require(0 < base < float("inf"), name, label, "positive and finite", base)


def _ops(keys: mx.array, positions: mx.array, source_base: float, target_base: float) -> mx.array:
    return recode_rope(keys, positions, source_base, target_base)


def _tables(positions: np.ndarray, size: int, source_base: float, target_base: float) -> tuple[mx.array, mx.array]:
    """cos and sin of position * (w_t - w_s), (N, D/2) float32, from float64 angles."""
    target, source = (np.array(RopeSpec("default", size, base=float(base)).frequencies) for base in (target_base, source_base))
    cosines, sines = (np.empty((len(positions), size // 2), dtype=np.float32) for _ in range(2))
    for a in range(0, len(positions), TABLE_ROWS):
        at = positions[a : a + TABLE_ROWS].astype(np.float64)
        angles = np.multiply.outer(at, target) - np.multiply.outer(at, source)
        cosines[a : a + TABLE_ROWS], sines[a : a + TABLE_ROWS] = np.cos(angles), np.sin(angles)
    return mx.array(cosines), mx.array(sines)
