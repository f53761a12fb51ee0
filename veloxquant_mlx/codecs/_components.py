"""Codes of components of different widths, in blocks of 32 tokens: a component's 32 codes of w bits are w 32-bit words.

A block holds the components one after another, `lsb8` each (4 w bytes; little-endian words hold the same bits). The lane that has a token
of a block reads its code from one or two of a component's w words, whatever the widths of the others.
"""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from veloxquant_mlx.allocators.shapes import boundaries, distortion, points
from veloxquant_mlx.codecs._bits import pack, unpack
from veloxquant_mlx.metal._component_operand import Quantisers

BLOCK = 32  # tokens


@dataclass(frozen=True, eq=False)
class Components:
    """Scalar quantisers side by side.

    Attributes:
        widths: (n,) int, bits of each, 0..8; a component of no bits is 0.
        shapes: (n,) int, index into SHAPES.
        unbiased: whether points are divided by 1 - distortion, so that E[y^ | cell] averages to y.
    """

    widths: np.ndarray
    shapes: np.ndarray
    unbiased: bool

    @property
    def block_bytes(self) -> int:
        return 4 * int(self.widths.sum())

    def table(self, i: int) -> np.ndarray:
        """Points of component i, (2^w,) float32."""
        shape, width = int(self.shapes[i]), int(self.widths[i])
        return (points(shape, width) / np.float32(1 - distortion(shape, width) if self.unbiased else 1)).astype(np.float32)

    def stored(self, heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For the native back end, of the components that have bits: where each head's begin, their bits and their points."""
        used = self.widths > 0
        first = np.concatenate([[0], np.cumsum(used.reshape(heads, -1).sum(axis=1))])
        points = [self.table(i) for i in np.flatnonzero(used)]
        return first.astype(np.int32), self.widths[used].astype(np.uint16), np.concatenate([np.zeros(0, np.float32), *points])

    def cells(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """For native encoding, of the components that have bits: which boundaries each has (n,), and all that there are."""
        used = self.widths > 0
        kinds, index = np.unique(self.widths[used] * 16 + self.shapes[used], return_inverse=True)
        return index, [boundaries(kind % 16, kind // 16) for kind in kinds.tolist()]

    def for_kernel(self, heads: int) -> Quantisers:
        """The same for the kernel of a GPU."""
        first, bits, _ = self.stored(heads)
        return Quantisers.of(first, bits, [self.table(i) for i in np.flatnonzero(self.widths)])

    @cached_property
    def _by_width(self) -> list[tuple[int, np.ndarray, mx.array, mx.array, mx.array]]:
        """Per width in use: the width, its components, their words in a block, their points one after another, and where each begins."""
        start = 4 * (np.cumsum(self.widths) - self.widths)
        groups = []
        for width in np.unique(self.widths[self.widths > 0]).tolist():
            own = np.flatnonzero(self.widths == width)
            at = mx.array(((start[own] // 4)[:, None] + np.arange(width)).reshape(-1).astype(np.uint32))
            table = mx.array(np.concatenate([self.table(i) for i in own]))
            first = mx.array((np.arange(len(own)) << width).astype(np.uint32))
            mx.eval(at, table, first)
            groups.append((width, own, at, table, first))
        return groups

    @cached_property
    def _order(self) -> mx.array:
        """Where each component is among those of `_by_width`, one after another and then those of no bits."""
        order = np.concatenate([*(group[1] for group in self._by_width), np.flatnonzero(self.widths == 0)])
        place = mx.array(np.argsort(order).astype(np.uint32))
        mx.eval(place)
        return place

    def codes(self, y: np.ndarray) -> np.ndarray:
        """Code of each value, (n, T) float32 -> uint8; a value on a boundary goes to the lower cell."""
        codes = np.zeros(y.shape, np.uint8)
        kinds = self.widths * 16 + self.shapes
        for kind in np.unique(kinds[self.widths > 0]).tolist():
            own = np.flatnonzero(kinds == kind)
            codes[own] = np.searchsorted(boundaries(kind % 16, kind // 16), y[own])
        return codes

    def values(self, codes: np.ndarray) -> np.ndarray:
        """Points of codes, (n, T) uint8 -> float32."""
        out = np.zeros(codes.shape, np.float32)
        for _, own, _, table, first in self._by_width:
            out[own] = np.array(table)[codes[own] + np.array(first)[:, None]]
        return out

    def pack(self, codes: np.ndarray) -> mx.array:
        """Codes (n, T), T a multiple of 32 -> (1, T / 32, bytes) uint8."""
        blocks = codes.shape[1] // BLOCK
        out = np.zeros((blocks, self.block_bytes // 4, 4), np.uint8)
        if blocks:
            for width, own, at, _, _ in self._by_width:
                rows = np.ascontiguousarray(codes[own].reshape(len(own), blocks, BLOCK).swapaxes(0, 1))
                out[:, np.array(at)] = np.array(pack(mx.array(rows), width)).reshape(blocks, -1, 4)
        return mx.array(out.reshape(1, blocks, self.block_bytes))

    def unpack(self, packed: mx.array) -> mx.array:
        """Points of packed codes, (blocks, bytes) uint8 -> (blocks, n, 32) float32."""
        blocks, groups = packed.shape[0], []
        words = packed.reshape(blocks, self.block_bytes // 4, 4)
        for width, own, at, table, first in self._by_width:
            # By words of four bytes, and along the axis of a flat table: on a CPU, MLX's gather costs by the piece.
            taken = mx.take(words, at, axis=1).reshape(blocks, len(own), 4 * width)
            place = unpack(taken, width, BLOCK).astype(mx.uint32) + first[:, None]
            groups.append(mx.take_along_axis(table, place.reshape(place.size), axis=0).reshape(place.shape))
        if none := int((self.widths == 0).sum()):
            groups.append(mx.zeros((blocks, none, BLOCK)))
        return groups[0] if len(groups) == 1 else mx.take(mx.concatenate(groups, axis=1), self._order, axis=1)
