"""Streams of codes on a CPU, in C++: packed, unpacked, found for values and turned back into them; the same at every SIMD level.

Where MLX's operations make an array of every step, these read an array's memory once and write the result's.
"""

import math

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native.buffers import empty
from veloxquant_mlx.native.gradients import inference_only

CENTROIDS = 256  # entries of a table that bytes look up


def pack(codes: mx.array, bits: int, width: int, words: bool) -> mx.array:
    """Codes (N,) uint8 as `width` bytes, or with `words` uint32 of 32 // bits codes each; bits above the lowest are dropped."""
    out = empty((4 * width if words else width,), mx.uint8)
    native.extension().pack_bits(native.packed(codes), bits, words, native.shared(out))
    return out.view(mx.uint32) if words else out


def unpack(packed: mx.array, count: int, bits: int) -> mx.array:
    """`count` codes, uint8, of bytes or of uint32 words that hold just them."""
    words = packed.dtype == mx.uint32
    out = empty((count,), mx.uint8)
    native.extension().unpack_bits(native.packed(packed).view(np.uint8), bits, words, native.shared(out))
    return out


def nearest(x: mx.array, centroids: mx.array, signs: mx.array | None = None) -> mx.array:
    """Index of the nearest centroid of each value, uint8: the lowest of equals, 0 where none is near.

    Args:
        x: any shape, float16, bfloat16 or float32.
        centroids: (n,) float32, n up to 256.
        signs: (D,) float32, D a power of two, to code H (signs x) / sqrt(D) of rows (..., D) in place of x; or None.
    """
    out = empty(tuple(x.shape), mx.uint8)
    turn = (None, 1.0) if signs is None else (native.packed(signs), 1 / math.sqrt(signs.size))
    values, found = native.packed(x).reshape(-1), native.shared(out).reshape(-1)
    native.extension().nearest_centroids(values, x.dtype == mx.bfloat16, native.packed(centroids), *turn, found)
    return out


@inference_only
def look_up(codes: mx.array, values: mx.array) -> mx.array:
    """values[codes] for codes of any shape, uint8; an index beyond the (n,) float16 values is the last."""
    table = np.asarray(native.shared(values)).view(np.uint16)
    table = np.concatenate([table, np.full(CENTROIDS - table.size, table[-1], np.uint16)])
    out = empty(tuple(codes.shape), mx.float16)
    native.extension().look_up(native.packed(codes).reshape(-1), table, native.shared(out).view(np.uint16).reshape(-1))
    return out
