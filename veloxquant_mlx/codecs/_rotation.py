"""The randomised rotation that makes a key's or a value's coordinates nearly Gaussian, whatever the head size.

For D = m 2^k with m odd,

    y = T diag(signs) x,    T = (Hartley_m kron Sylvester_2^k) / sqrt(D)

    Sylvester_2 = [[1, 1], [1, -1]],  Sylvester_2^k = Sylvester_2 kron Sylvester_2^(k-1)
    Hartley_m[i, j] = cos(2 pi i j / m) + sin(2 pi i j / m)

Both factors are symmetric and orthogonal up to scale for every size (Hartley 1942), so T is its own inverse and x = diag(signs) T y.
No entry of T exceeds sqrt(2 / D), which is what spreads an outlier over all coordinates. A Hadamard matrix of size 12, 20 or 28 would
serve fewer sizes, and MLX's own is wrong for them on a CPU (36, 144 and 576 give garbage), so only its powers of two are used.

The kron order lets each factor work on an axis of its own: a fast transform over the last 2^k values, then one m x m product per token.
Each token is transformed by the same operations however many stand beside it, so codes do not depend on how tokens are blocked.
"""

import math
from functools import lru_cache

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native

_U64 = (1 << 64) - 1


def rotate(x: mx.array, seed: int) -> mx.array:
    """y = T diag(signs) x along the last axis; (..., D) float32 -> (..., D) float32."""
    return _transform(x * _device_signs(x.shape[-1], seed))


def unrotate(y: mx.array, seed: int) -> mx.array:
    """x = diag(signs) T y along the last axis: the inverse of `rotate`."""
    return _transform(y) * _device_signs(y.shape[-1], seed)


@lru_cache(maxsize=64)
def matrix(dim: int, seed: int) -> mx.array:
    """R, (D, D) float32, of `rotate`: R x as a row times its transpose, x R^T; `unrotate` is y R. On a CPU a product is the faster way."""
    rows = rotate(mx.eye(dim), seed).swapaxes(0, 1)
    mx.eval(rows)
    return rows


def factors(dim: int, seed: int) -> tuple[mx.array, mx.array]:
    """The signs (D,) and Hartley_m (m, m) of D = m 2^k, float32."""
    return _device_signs(dim, seed), _hartley(dim // (dim & -dim))


@lru_cache(maxsize=64)
def native_factors(dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`factors` for the native back end: always the same memory, so that it knows equal rotations."""
    signs, hartley = (native.shared(x) for x in factors(dim, seed))
    return signs, hartley


def signs(dim: int, seed: int) -> list[int]:
    """+1 or -1 per dimension: -1 where the top bit of the SplitMix64 output is set (Steele, Lea and Flood 2014).

    Args:
        dim: how many.
        seed: the generator's 64-bit state at the start.
    """
    return [-1 if word >> 63 else 1 for word in splitmix64(seed, dim)]


def splitmix64(seed: int, count: int) -> list[int]:
    """The first `count` outputs of SplitMix64, in 64-bit wrapping arithmetic."""
    words = []
    for i in range(1, count + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & _U64
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _U64
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _U64
        words.append(z ^ z >> 31)
    return words


def _transform(x: mx.array) -> mx.array:
    dim = x.shape[-1]
    if x.size == 0:
        return x
    power = dim & -dim
    odd = dim // power
    if power > 1:
        x = mx.hadamard_transform(x.reshape(*x.shape[:-1], odd, power), scale=1 / math.sqrt(dim))
    else:
        x = x.reshape(*x.shape[:-1], odd, 1) / math.sqrt(dim)
    if odd > 1:
        x = mx.matmul(_hartley(odd), x)
    return x.reshape(*x.shape[:-2], dim)


@lru_cache(maxsize=64)
def _hartley(size: int) -> mx.array:
    # The angle is reduced exactly, in integers, before it is turned into a float.
    angles = 2 * np.pi * (np.outer(np.arange(size), np.arange(size)) % size) / size
    return _evaluated(np.cos(angles) + np.sin(angles))


@lru_cache(maxsize=64)
def _device_signs(dim: int, seed: int) -> mx.array:
    return _evaluated(np.array(signs(dim, seed)))


def _evaluated(values: np.ndarray) -> mx.array:
    # A lazy array belongs to the stream of the thread that made it; an evaluated one may be used by any.
    array = mx.array(values.astype(np.float32))
    mx.eval(array)
    return array
