"""The nearest codeword of each vector on a CPU, in C++: squared differences in order, the lowest of equals, at every SIMD level alike.

Rows that codecs make vectors of (`coded_runs`, `coded_planes`) are read as they are, and what is searched for is never stored.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native.buffers import empty

MAX_SIZE = 512  # entries of a vector


def takes(x: mx.array) -> bool:
    """Whether codes of an MLX array are searched for here now: MLX uses the CPU, and the extension is built."""
    return native.available() and mx.default_device() == mx.cpu and x.size > 0 and x.shape[-1] <= MAX_SIZE


def nearest(points: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Index of the nearest of `words`, (n, size), of every row of `points`, (N, size), in float64: (N,) int32."""
    out = np.empty((1, len(points), 1), np.int32)
    given = np.ascontiguousarray(points, np.float64)[None, :, None]
    _search(native.extension().nearest_double, given, np.ascontiguousarray(words, np.float64), out)
    return out[0, :, 0]


def nearest_single(points: np.ndarray, words: np.ndarray) -> np.ndarray:
    """`nearest` in float32, of up to 256 words: (N,) int64."""
    out = np.empty((1, len(points), 1), np.uint8)
    given = np.ascontiguousarray(points, np.float32)[None, :, None]
    _search(native.extension().nearest, given, np.ascontiguousarray(words, np.float32), out)
    return out[0, :, 0].astype(np.int64)


def coded_runs(
    x: mx.array,
    bits: int,
    words: np.ndarray,
    first: np.ndarray,
    unit: float = 1,
    divisor: mx.array | None = None,
    order: np.ndarray | None = None,
) -> mx.array:
    """Codes (H, S, bytes) of rows: each run of neighbouring entries by its nearest word.

    Args:
        x: (H, S, D) float16, bfloat16 or float32.
        bits: of a code; a table has 2^bits words.
        words: (n, size) float32 of all tables.
        first: (H, D / size), where each run's table begins.
        unit: a power of two that rows are multiplied by.
        divisor: (H, D) float32 that they are divided by then, before a Hadamard transform; or None for neither.
        order: (D,), which entry of a row each of the runs is; or None for as they are.

    Error: as `allocators.vecinfer.quantize_vq` of rows transformed by MLX operations, bit for bit.
    """
    out = empty((x.shape[0], x.shape[1], -(-first.shape[1] * bits // 8)), mx.uint8)
    by = None if divisor is None else native.packed(divisor)
    tables = np.ascontiguousarray(words, np.float32), np.ascontiguousarray(first, np.int32), 1 << bits
    where = None if order is None else np.ascontiguousarray(order, np.int32)
    native.extension().code_runs(native.floats(x), unit, by, where, bits, *tables, native.shared(out))
    return out


def coded_planes(
    x: mx.array, mean: np.ndarray, planes: np.ndarray, turn: np.ndarray, words: np.ndarray, bits: np.ndarray, kept: np.ndarray, size: int
) -> mx.array:
    """Codes (H, S, size) of rows: whether it is the row that is kept, then each plane's nearest word of its 2^b.

    Args:
        x: (H, S, D) float16, bfloat16 or float32.
        mean: (H, D) float32.
        planes: (2, D / 2), the entries of each.
        turn: (H, D / 2, 3) float32, a complex factor and a real one on a row less its mean.
        words: (n, 2) float32; those of b bits begin at 2^b - 1.
        bits: (H, D / 2).
        kept: (H,), which row.
    """
    out = empty((*x.shape[:2], size), mx.uint8)
    lists = [np.ascontiguousarray(a, np.float32) for a in (mean, turn, words)]
    numbers = [np.ascontiguousarray(a, np.int32) for a in (planes, bits, kept)]
    arrays = lists[0], numbers[0], lists[1], lists[2], numbers[1], numbers[2]
    native.extension().code_planes(native.floats(x), *arrays, native.shared(out))
    return out


def farness(x: mx.array, middle: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """far^2 / near of every row, (H, S) float32: means of |x - middle| inverse and |x| inverse, for (H, D) of both."""
    out = np.empty(x.shape[:2], np.float32)
    given = (np.ascontiguousarray(a, np.float32) for a in (middle, inverse))
    native.extension().farness(native.floats(x), *given, out)
    return out


def moments(points: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A round of k-means in float64: points (G, N, size) to the nearest of their group's words (G, K, size).

    Returns:
        Sums (G, K, size) and numbers (G, K) of the points of each word, and each point's squared difference (G, N).
    """
    sums, counts, distances = np.empty(words.shape), np.empty(words.shape[:2], np.int64), np.empty(points.shape[:2])
    native.extension().moments(points, words, sums, counts, distances)
    return sums, counts, distances


def _search(call: Any, points: np.ndarray, words: np.ndarray, out: np.ndarray) -> None:
    call(points, words, np.zeros((1, 1), np.int32), np.full((1, 1), len(words), np.int32), out)
