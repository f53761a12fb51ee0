"""The nearest codeword of each vector on a CPU, in C++: squared differences in order, the lowest of equals, at every SIMD level alike.

A table for each column of vectors, or one for all of them. Codes of any number of bits each are packed as the codecs say.
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


def codes(points: mx.array, words: np.ndarray, first: np.ndarray | None = None, number: np.ndarray | None = None) -> mx.array:
    """Index of the nearest codeword of every vector, uint8.

    Args:
        points: (G, N, C, size) float32.
        words: (n, size) float32, up to 256 to a table.
        first, number: (G, C), where in `words` the table of a column begins and how many it has; None: all of them for every column.

    Error: as `allocators.vecinfer.quantize_vq`, bit for bit.
    """
    out = empty(tuple(points.shape[:3]), mx.uint8)
    _search(native.extension().nearest, native.packed(points), np.ascontiguousarray(words, np.float32), first, number, native.shared(out))
    return out


def nearest(points: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Index of the nearest of `words`, (n, size), of every row of `points`, (N, size), in float64: (N,) int32."""
    out = np.empty((1, len(points), 1), np.int32)
    given = np.ascontiguousarray(points, np.float64)[None, :, None]
    _search(native.extension().nearest_double, given, np.ascontiguousarray(words, np.float64), None, None, out)
    return out[0, :, 0]


def nearest_single(points: np.ndarray, words: np.ndarray) -> np.ndarray:
    """`nearest` in float32, of up to 256 words: (N,) int64."""
    out = np.empty((1, len(points), 1), np.uint8)
    given = np.ascontiguousarray(points, np.float32)[None, :, None]
    _search(native.extension().nearest, given, np.ascontiguousarray(words, np.float32), None, None, out)
    return out[0, :, 0].astype(np.int64)


def packed(values: mx.array, place: np.ndarray, bits: np.ndarray, size: int) -> mx.array:
    """Codes (H, S, n) uint8 as rows of `size` bytes: code i of head h is bits[h, i] bits from bit place[h, i] on; other bits are 0."""
    out = empty((values.shape[0], values.shape[1], size), mx.uint8)
    where = (np.ascontiguousarray(x, np.int32) for x in (place, bits))
    native.extension().pack(native.packed(values), *where, native.shared(out))
    return out


def _search(call: Any, points: np.ndarray, words: np.ndarray, first: np.ndarray | None, number: np.ndarray | None, out: np.ndarray) -> None:
    tables = (points.shape[0], points.shape[2])
    begin = np.zeros(tables, np.int32) if first is None else np.ascontiguousarray(first, np.int32)
    count = np.full(tables, len(words), np.int32) if number is None else np.ascontiguousarray(number, np.int32)
    call(points, words, begin, count, out)
