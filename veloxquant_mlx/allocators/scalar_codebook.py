"""Scalar codebooks for coordinates of rotated unit vectors, and the 32-bit words that their codes are packed in.

    code(y) = number of boundaries below y,    boundary i = (centroid i + centroid i+1) / 2

A random rotation makes the D coordinates of a unit vector nearly N(0, 1/D). Stage 1 is the Lloyd-Max table of that Gaussian; stage 2
the Lloyd-Max table of what stage 1 leaves of it, not of a Laplace distribution that resembles it (see `codebooks`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from veloxquant_mlx.allocators.codebooks import gaussian_codebook, residual_codebook

_FLOATS = (mx.float16, mx.bfloat16, mx.float32)


@dataclass(frozen=True, eq=False)
class ScalarCodebook:
    """Sorted centroids and the boundaries of their cells.

    Fields:
        centroids: (2**bits,) float16, bfloat16 or float32, ascending.
        boundaries: (2**bits - 1,) of the same dtype: midpoints of the centroids as stored.
    """

    centroids: mx.array
    boundaries: mx.array

    @classmethod
    def of(cls, centroids: Sequence[float], dtype: mx.Dtype = mx.float16) -> "ScalarCodebook":
        """The codebook of given centroids, rounded to `dtype`.

        Raises:
            ValueError: not 2, 4, ... 256 finite ascending values, or another dtype.
        """
        if dtype not in _FLOATS:
            raise ValueError(f"[ScalarCodebook] dtype must be float16, bfloat16 or float32, but got {dtype}.")
        values = np.asarray(centroids, dtype=np.float64)
        if values.ndim != 1 or len(values) not in {2**b for b in range(1, 9)}:
            raise ValueError(f"[ScalarCodebook] centroids must be 2**bits values with bits 1..8, but got shape {values.shape}.")
        rounded = mx.array(values.astype(np.float32)).astype(dtype)
        exact = np.array(rounded.astype(mx.float32), dtype=np.float64)
        if not np.isfinite(exact).all() or (np.diff(exact) < 0).any():
            raise ValueError("[ScalarCodebook] centroids must be finite in the dtype and ascending.")
        # Rounded once: float32 holds the midpoint of 16-bit neighbours exactly, unless they differ by more than a factor of 2**12.
        boundaries = mx.array(((exact[1:] + exact[:-1]) / 2).astype(np.float32)).astype(dtype)
        mx.eval(rounded, boundaries)  # a lazy array belongs to the thread that made it
        return cls(rounded, boundaries)

    @classmethod
    def gaussian(cls, bits: int, dim: int, dtype: mx.Dtype = mx.float16) -> "ScalarCodebook":
        """Stage 1: Lloyd-Max for N(0, 1/dim), bits 1..8."""
        return cls.of(_scaled(gaussian_codebook(bits), dim), dtype)

    @classmethod
    def residual(cls, bits: int, dim: int, first_bits: int | None = None, dtype: mx.Dtype = mx.float16) -> "ScalarCodebook":
        """Stage 2: Lloyd-Max for what a Gaussian stage of `first_bits` (by default as many) leaves of N(0, 1/dim)."""
        return cls.of(_scaled(residual_codebook(bits, gaussian_codebook(bits if first_bits is None else first_bits)), dim), dtype)

    @property
    def bits(self) -> int:
        return self.centroids.size.bit_length() - 1

    def quantize(self, y: mx.array) -> mx.array:
        """Codes of values: the cell each lies in.

        Args:
            y: any shape, float16, bfloat16 or float32; compared exactly, never rounded to the codebook's dtype.

        Returns:
            uint8 of the same shape. A value on a boundary has the lower code, NaN has code 0.

        Raises:
            TypeError: another dtype.
        """
        if y.dtype not in _FLOATS:
            raise TypeError(f"[ScalarCodebook] y must be float16, bfloat16 or float32, but got {y.dtype}.")
        return count_below(self.boundaries, y)

    def dequantize(self, codes: mx.array) -> mx.array:
        """Centroids of codes; a code beyond the last one is taken as the last.

        Args:
            codes: any shape, unsigned integers.

        Returns:
            The codebook's dtype, the shape of `codes`.

        Raises:
            TypeError: another dtype.
        """
        if codes.dtype not in (mx.uint8, mx.uint16, mx.uint32):
            raise TypeError(f"[ScalarCodebook] codes must be uint8, uint16 or uint32, but got {codes.dtype}.")
        return self.centroids[mx.minimum(codes.astype(mx.uint32), self.centroids.size - 1)]


def count_below(boundaries: mx.array, y: mx.array) -> mx.array:
    """Number of boundaries below each value, uint8: (K - 1,) and any shape -> that shape."""
    y, boundaries = y.astype(mx.float32), boundaries.astype(mx.float32)
    count = mx.zeros(y.shape, dtype=mx.uint8)
    for i in range(boundaries.size):
        count = count + (y > boundaries[i])
    return count


def words_per_row(dim: int, bits: int) -> int:
    """32-bit words that `dim` codes take: ceil(dim / (32 // bits))."""
    return -(-dim // (32 // bits))


def _pack_indices(indices: mx.array, bits: int) -> mx.array:
    """Pack codes along the last axis into words: code i at bits (i % per) * bits of word i // per, per = 32 // bits; spare bits 0.

    Args:
        indices: (..., D) unsigned integers; bits above the lowest `bits` are dropped.
        bits: 1..8.

    Returns:
        (..., ceil(D / per)) uint32.

    Raises:
        ValueError: bits out of range, or no last axis.
    """
    _check("_pack_indices", indices, bits)
    per, dim = 32 // bits, indices.shape[-1]
    words = words_per_row(dim, bits)
    codes = indices.astype(mx.uint32) & (2**bits - 1)
    codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, words * per - dim)]).reshape(*codes.shape[:-1], words, per)
    packed = mx.zeros(codes.shape[:-1], dtype=mx.uint32)
    for k in range(per):
        packed = packed | codes[..., k] << (k * bits)
    return packed


def _unpack_indices(packed: mx.array, bits: int, dim: int) -> mx.array:
    """Inverse of `_pack_indices`: (..., ceil(dim / (32 // bits))) uint32 -> (..., dim) uint8.

    Raises:
        ValueError: bits or dim out of range, or another number of words.
    """
    _check("_unpack_indices", packed, bits)
    if dim < 0:
        raise ValueError(f"[_unpack_indices] dim must be at least 0, but got {dim}.")
    if packed.shape[-1] != words_per_row(dim, bits):
        raise ValueError(f"[_unpack_indices] packed must have {words_per_row(dim, bits)} words a row, but got {tuple(packed.shape)}.")
    shifts = mx.arange(32 // bits, dtype=mx.uint32) * bits
    codes = packed[..., None] >> shifts & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * (32 // bits))[..., :dim].astype(mx.uint8)


def _check(name: str, array: mx.array, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"[{name}] bits must be between 1 and 8, but got {bits}.")
    if array.ndim < 1:
        raise ValueError(f"[{name}] codes must have a last axis, but got {tuple(array.shape)}.")
    if array.dtype not in (mx.uint8, mx.uint16, mx.uint32):
        raise TypeError(f"[{name}] codes must be uint8, uint16 or uint32, but got {array.dtype}.")


def _scaled(codebook: Sequence[float], dim: int) -> list[float]:
    if dim < 1:
        raise ValueError(f"[ScalarCodebook] dim must be at least 1, but got {dim}.")
    return [c / math.sqrt(dim) for c in codebook]
