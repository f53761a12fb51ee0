"""Functions of the kernel API on a CPU, in C++: rows scored, projected, rounded and gathered; the same at every SIMD level."""

import math

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native.buffers import empty
from veloxquant_mlx.native.gradients import inference_only

WORDS = {mx.float16: mx.float16, mx.bfloat16: mx.uint16, mx.float32: mx.float32}  # dtypes of values, and of their memory


@inference_only
def hamming(query: mx.array, bits: mx.array, offsets: mx.array, scale: float) -> mx.array:
    """(N,) float32: bits in which rows (N, bytes) uint8 differ from a query, times scale, plus offsets (N,)."""
    out = empty((bits.shape[0],), mx.float32)
    native.extension().hamming(native.packed(query), native.packed(bits), native.packed(offsets), scale, native.shared(out))
    return out


@inference_only
def sign_scores(q: mx.array, packed: mx.array, norms: mx.array, factor: float) -> mx.array:
    """(H, S) float32: factor norms[s, h] sum of +-q[h, :], the signs those of packed[s, h].

    Args:
        q: (H, m) float32.
        packed: (S, H, m / 8) uint8, bit 0 lowest.
        norms: (S, H) float32.
    """
    out = empty((q.shape[0], packed.shape[0]), mx.float32)
    native.extension().sign_scores(native.packed(q), native.packed(packed), native.packed(norms), factor, native.shared(out))
    return out


@inference_only
def project(rows: mx.array, filters: mx.array, sign: int) -> mx.array:
    """(G, N) float32: sign times the product of rows (G, N, D) of any float with filters (G, D) float32."""
    out = empty(tuple(rows.shape[:2]), mx.float32)
    native.extension().project(_flat(rows), rows.dtype == mx.bfloat16, native.packed(filters), sign, native.shared(out))
    return out


@inference_only
def round_trip(x: mx.array, axis: int, group: int, levels: int, eps: float) -> mx.array:
    """Values to the nearest of levels + 1 steps between the lowest and highest of a group along axis -1 or -2; shape and dtype of x."""
    out = empty(tuple(x.shape), WORDS[x.dtype])
    sizes = (x.shape[-2], x.shape[-1]) if axis == -2 else (x.shape[-1], 1)
    written = native.shared(out).reshape(-1)
    native.extension().round_trip(_flat(x), x.dtype == mx.bfloat16, *sizes, group, levels, eps, written)
    return out.view(x.dtype)


@inference_only
def gather(indices: mx.array, table: mx.array) -> mx.array:
    """Entries (C, n) of a table of any float in place of indices uint8, uint16 or uint32: (..., k n); an index beyond C is the last."""
    count, width = indices.size, table.shape[1] * table.itemsize
    out = empty((*indices.shape[:-1], indices.shape[-1] * table.shape[1]), WORDS[table.dtype])
    entries = native.packed(table).view(np.uint8).reshape(-1, width)
    native.extension().gather(native.packed(indices).reshape(-1), entries, native.shared(out).view(np.uint8).reshape(count, width))
    return out.view(table.dtype)


@inference_only
def without_row(x: mx.array, gone: mx.array) -> mx.array:
    """`allocators.eviction.without_row` of (G, N, ...) of 32 bits or any float: (G, N - 1, ...)."""
    memory = WORDS.get(x.dtype, mx.float32)
    out = empty((x.shape[0], x.shape[1] - 1, *x.shape[2:]), memory)
    given = native.packed(x).reshape(*x.shape[:2], -1).view(np.uint8)
    native.extension().drop_row(given, native.packed(gone), _bytes(out))
    return out.view(x.dtype)


@inference_only
def turned_back(keys: mx.array, positions: mx.array, gone: mx.array, turn: mx.array) -> mx.array:
    """`without_row` of keys (G, N, D), those of a later position than row `gone` turned back by `turn`, (2, D / 2) cosines and sines."""
    out = empty((keys.shape[0], keys.shape[1] - 1, keys.shape[2]), WORDS[keys.dtype])
    places = native.packed(gone), native.packed(positions), native.packed(turn)
    native.extension().turn_back(_flat(keys), keys.dtype == mx.bfloat16, *places, _bytes(out))
    return out.view(keys.dtype)


@inference_only
def encode_signs(rows: mx.array, signs: mx.array) -> tuple[mx.array, mx.array]:
    """Signs of y = H (signs x) / sqrt(D) of rows (N, D), packed as (N, D / 8) uint8, 1 where >= 0, and the mean of |y|, (N,) float32."""
    packed, size = empty((rows.shape[0], rows.shape[1] // 8), mx.uint8), empty((rows.shape[0],), mx.float32)
    written = native.shared(packed).reshape(-1), native.shared(size)
    native.extension().encode_signs(_flat(rows), rows.dtype == mx.bfloat16, native.packed(signs), *written)
    return packed, size


@inference_only
def encode_two_stages(
    rows: mx.array, centroids: mx.array, first: mx.array, second: mx.array, bits: int, left: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Codes of rows (N, D) by the boundaries `first`, and by `second` of what their centroids leave, rounded to the dtype `left`.

    Args:
        centroids, first, second: (2**bits,), (2**bits - 1,) twice, float32.

    Returns:
        (N, ceil(D / (32 // bits))) uint32 of each.
    """
    words = math.ceil(rows.shape[1] / (32 // bits))
    packed = [empty((rows.shape[0], 4 * words), mx.uint8) for _ in range(2)]
    tables, written = (native.packed(x) for x in (centroids, first, second)), (native.shared(x).reshape(-1) for x in packed)
    kinds = rows.dtype == mx.bfloat16, (mx.float32, mx.float16, mx.bfloat16).index(left)
    native.extension().encode_two_stages(_flat(rows), *kinds, rows.shape[1], bits, *tables, *written)
    return packed[0].view(mx.uint32), packed[1].view(mx.uint32)


def pack_signs(x: mx.array) -> mx.array:
    """(..., n) float32, n a multiple of 8, as (..., n / 8) uint8: bit t of byte b is 1 where value 8 b + t is >= 0."""
    out = empty((*x.shape[:-1], x.shape[-1] // 8), mx.uint8)
    native.extension().pack_signs(_flat(x), native.shared(out).reshape(-1))
    return out


def _bytes(out: mx.array) -> np.ndarray:
    written = native.shared(out)
    return written.reshape(*written.shape[:2], -1).view(np.uint8)


def _flat(x: mx.array) -> np.ndarray:
    return native.packed(x).reshape(-1)
