"""Coding by tables of a calibration on a CPU, in C++: keys as codes of components, values as codes of what the keys do not predict.

Sums are taken in the order of their terms, token by token: the same bytes at every SIMD level, with any number of threads, and however many
tokens are coded at once. MLX's products round otherwise: a value within float32 rounding of a boundary may get its neighbour's code.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native.buffers import empty
from veloxquant_mlx.native.converting import WORDS
from veloxquant_mlx.native.gradients import inference_only

BLOCK = 32  # tokens


def key_coder(first: np.ndarray, mean: np.ndarray, forward: np.ndarray, kinds: np.ndarray, boundaries: Sequence[np.ndarray]) -> Any:
    """What codes keys.

    Args:
        first: (H + 1,) where the components of each head begin.
        mean: (H, D) float32.
        forward: (n, D) float32, what rows less their mean are multiplied by for each component.
        kinds: (n,) which of `boundaries` each component has.
        boundaries: 2^b - 1 ascending numbers of b bits.
    """
    return native.extension().KeyCoder(_i32(first), _f32(mean), _f32(forward), _i32(kinds), [b.tolist() for b in boundaries])


def value_coder(
    first: np.ndarray,
    k_mean: np.ndarray,
    forward: np.ndarray,
    v_mean: np.ndarray,
    mix: np.ndarray,
    quantisers: tuple[np.ndarray, Sequence[np.ndarray], Sequence[np.ndarray]],
    factors: tuple[np.ndarray, np.ndarray],
) -> Any:
    """What codes and decodes values.

    Args:
        first, k_mean, forward: of the components that predict, as of `key_coder`.
        v_mean: (H, D) float32.
        mix: (n, H D) float32, components to values.
        quantisers: which of each head, and the boundaries and points of each.
        factors: of the rotation.
    """
    kinds, *tables = quantisers
    lists = ([t.tolist() for t in table] for table in tables)
    return native.extension().ValueCoder(_i32(first), _f32(k_mean), _f32(forward), _f32(v_mean), _f32(mix), _i32(kinds), *lists, *factors)


def key_codes(coder: Any, x: mx.array, size: int) -> mx.array | None:
    """Codes (1, blocks, size) of keys; None where a value is not finite, or too large."""
    out = empty((1, -(-x.shape[1] // BLOCK), size), mx.uint8)
    return out if coder.encode(native.floats(x), native.shared(out)) else None


def value_codes(coder: Any, x: mx.array, keys: mx.array, size: int) -> tuple[mx.array, np.ndarray] | None:
    """Codes (1, blocks, size) of values beside their decoded keys, and scales (H, S) float32; None as of `key_codes`."""
    out, sizes = empty((1, -(-x.shape[1] // BLOCK), size), mx.uint8), np.empty(x.shape[:2], np.float32)
    return (out, sizes) if coder.encode(native.floats(x), native.floats(keys), native.shared(out), sizes) else None


@inference_only
def values(coder: Any, stored: Any, keys: mx.array, dtype: mx.Dtype) -> mx.array:
    """Values (H, S, D) of codes and scales, beside their decoded keys; float16 is clipped to its finite numbers."""
    out = empty(tuple(keys.shape), WORDS[dtype])
    coder.decode(stored, native.floats(keys), native.shared(out), dtype == mx.bfloat16)
    return out.view(dtype)


def _f32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)


def _i32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.int32)
