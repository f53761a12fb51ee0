"""Keys or values whose components have codes of unlike widths, for the kernels that attend to them on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, eq=False)
class Quantisers:
    """What codes of components stand for; one for all rows of the same tables.

    Fields:
        first: where the components of each head begin, (H + 1,) int32.
        places: (n, 4) int32: first word in a block, or byte in a row; bits; first of the points; 0.
        points: float32.
    """

    first: mx.array
    places: mx.array
    points: mx.array

    @classmethod
    def of(cls, first: np.ndarray, bits: np.ndarray, tables: Sequence[np.ndarray]) -> "Quantisers":
        """Of components in blocks of 32 tokens.

        Args:
            first: where the components of each head begin, (H + 1,).
            bits: of each, (n,), none 0.
            tables: the 2^bits points of each; equal ones are held once.
        """
        begins: dict[bytes, int] = {}
        kept = [np.zeros(0, np.float32)]
        places = np.zeros((len(bits), 4), np.int32)
        places[:, 0], places[:, 1] = np.cumsum(bits) - bits, bits
        for i, table in enumerate(tables):
            if table.tobytes() not in begins:
                begins[table.tobytes()] = sum(len(other) for other in kept)
                kept.append(table)
            places[i, 2] = begins[table.tobytes()]
        return cls._held(first, places, np.concatenate(kept))

    @classmethod
    def of_bytes(cls, place: np.ndarray, points: np.ndarray) -> "Quantisers":
        """Of components of codes of a byte, as many of each head as it has channels.

        Args:
            place: in a row, the byte of each component, (H, D).
            points: (H, D, 256).
        """
        places = np.zeros((place.size, 4), np.int32)
        places[:, 0], places[:, 1], places[:, 2] = place.reshape(-1), 8, np.arange(place.size) * 256
        return cls._held(np.arange(len(place) + 1) * place.shape[1], places, points.reshape(-1))

    @classmethod
    def _held(cls, first: np.ndarray, places: np.ndarray, points: np.ndarray) -> "Quantisers":
        made = mx.array(first.astype(np.int32)), mx.array(places), mx.array(points.astype(np.float32))
        mx.eval(made)
        return cls(*made)


@dataclass(frozen=True, eq=False)
class Components:
    """Keys or values of one layer whose components have codes of their own widths.

    Fields:
        shape: (H, S, D).
        codes: (blocks, words) uint32: in a block of 32 tokens the components one after another, each as many words as a code has bits;
            or (S, bytes) uint8, of keys: a row's codes of 8 bits, which several components may share.
        quantisers: what they stand for.
    """

    shape: tuple[int, int, int]
    codes: mx.array
    quantisers: Quantisers

    @classmethod
    def of(cls, shape: tuple[int, int, int], codes: mx.array, quantisers: Quantisers) -> "Components":
        """From codes (1, blocks, bytes) uint8."""
        return cls(shape, in_words(codes), quantisers)

    @property
    def by_row(self) -> bool:
        return self.codes.dtype == mx.uint8

    @property
    def count(self) -> int:
        """Of all heads."""
        return self.quantisers.places.shape[0]


def in_words(part: mx.array) -> mx.array:
    """(1, blocks, bytes) uint8 as (blocks, words) uint32, evaluated."""
    words = mx.contiguous(part[0]).view(mx.uint32)
    mx.eval(words)
    return words


@dataclass(frozen=True, eq=False)
class ComponentKeys:
    """Keys.

    Fields:
        basis: (n + H, D) float32: the row of each component, then the mean of each head.
    """

    components: Components
    basis: mx.array

    @cached_property
    def padded(self) -> mx.array:
        """The basis and 8 rows of zeros, for kernels that read 8 at a time."""
        made = mx.pad(self.basis, ((0, 8), (0, 0)))
        mx.eval(made)
        return made


@dataclass(frozen=True, eq=False)
class ComponentValues:
    """Values beside keys of the same tokens; all components have bits.

    Fields:
        scales: (blocks, 6 H) uint32: codes of 6 bits of 32 tokens of each head.
        sizes: (H, 64) float32, what those stand for.
        matrix: (D, D) float32.
        mix: (H, n, D) float32, of the keys' components of all heads.
        constant: (H, D) float32.
    """

    components: Components
    scales: mx.array
    sizes: mx.array
    matrix: mx.array
    mix: mx.array
    constant: mx.array
