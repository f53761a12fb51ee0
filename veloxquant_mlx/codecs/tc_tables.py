"""A layer's tables of `tc` at work: components to keys, keys to predictions, and codes to what is added to them, in tiles of 32 tokens."""

from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.allocators.transforms import GAUSSIAN, SCALE_BITS, KeyTables, ValueTables
from veloxquant_mlx.codecs._bits import unpack
from veloxquant_mlx.codecs._components import BLOCK, Components
from veloxquant_mlx.codecs._rotation import native_factors, unrotate
from veloxquant_mlx.metal._component_operand import Quantisers
from veloxquant_mlx.native import calibrated

FAR = 1e18  # a row is that far from the mean at most
WILD = 64.0  # standard deviations that a predicting component moves at most
ZERO = (1 << SCALE_BITS) - 1  # the scale's code of a row of zeros


class KeyReader:
    """Keys from their components, in tiles of 32 tokens."""

    def __init__(self, widths: np.ndarray, tables: KeyTables) -> None:
        shapes = np.zeros(widths.shape, np.int64)
        shapes[widths > 0] = tables.shapes
        self.heads, self.dim = widths.shape
        self.components = Components(widths.reshape(-1), shapes.reshape(-1), unbiased=True)
        self.mean = mx.array(tables.mean)[:, None, None]
        self.back = mx.array(per_head(widths, tables.back))[:, None]
        mx.eval(self.mean, self.back)

    @cached_property
    def basis(self) -> np.ndarray:
        """(n + H, D) float32: the row of each component that has bits, then the mean of each head."""
        rows = np.array(self.back[:, 0]).reshape(-1, self.dim)[self.components.widths > 0]
        return np.concatenate([rows, np.array(self.mean[:, 0, 0])])

    @cached_property
    def quantisers(self) -> Any:
        """Of the components, for the native back end."""
        return native.quantisers(*self.components.stored(self.heads))

    @cached_property
    def for_kernel(self) -> tuple[Quantisers, mx.array]:
        """What a GPU's kernel has of all rows of these tables: quantisers, and the basis."""
        basis = mx.array(self.basis)
        mx.eval(basis)
        return self.components.for_kernel(self.heads), basis

    def by_head(self, points: mx.array) -> mx.array:
        """(blocks, H D, 32) -> (H, blocks, 32, D)."""
        return points.reshape(-1, self.heads, self.dim, BLOCK).transpose(1, 0, 3, 2)

    def rows(self, points: mx.array) -> mx.array:
        """Components (blocks, H D, 32) -> keys (H, blocks, 32, D), float32."""
        return mx.matmul(self.by_head(points), self.back) + self.mean


class Predictor:
    """Values from keys, in tiles of 32 tokens; and the codes of what is left of them."""

    def __init__(self, key_widths: np.ndarray, widths: np.ndarray, tables: ValueTables) -> None:
        self.heads, self.dim = key_widths.shape
        every = np.repeat(widths, self.dim)
        self.components = Components(every, np.full(every.shape, GAUSSIAN), unbiased=False)
        mix = np.zeros((key_widths.size, key_widths.size), np.float32)
        mix[key_widths.reshape(-1) > 0] = tables.mix
        self.k_mean, self.v_mean = mx.array(tables.k_mean)[:, None, None], mx.array(tables.v_mean)[:, None, None]
        self.forward = mx.array(np.ascontiguousarray(per_head(key_widths, tables.forward).swapaxes(1, 2)))[:, None]
        self.mix = mx.array(mix)[None]  # with a matrix of two axes MLX would join the tiles, and sum otherwise for each number of them
        self.tables, self.first = tables, np.concatenate([[0], np.cumsum((key_widths > 0).sum(axis=1))])
        self._coder: tuple[int, Any] | None = None
        self.linear: tuple[KeyReader, np.ndarray | None, np.ndarray] | None = None  # `tc_reading.linear` of the last keys
        self.mixed: tuple[KeyReader, Any] | None = None  # the same for a GPU's kernel
        mx.eval(self.k_mean, self.v_mean, self.forward, self.mix)

    @cached_property
    def quantisers(self) -> Any:
        """Of the values' codes, for the native back end."""
        return native.quantisers(*self.components.stored(self.heads))

    def coder(self, seed: int) -> Any:
        """What codes and decodes values natively, rotated by a seed: made once for all rows of the same tables."""
        if self._coder is None or self._coder[0] != seed:
            kinds, boundaries = self.components.cells()
            points = [self.components.table(int(np.argmax(kinds == i))) for i in range(len(boundaries))]
            tables = self.tables
            given = (self.first, tables.k_mean, tables.forward, tables.v_mean, tables.mix, (kinds[:: self.dim], boundaries, points))
            self._coder = seed, calibrated.value_coder(*given, native_factors(self.dim, seed))
        return self._coder[1]

    @cached_property
    def for_kernel(self) -> Quantisers:
        """Of the values' codes, for a GPU's kernel."""
        return self.components.for_kernel(self.heads)

    def inputs(self, keys: mx.array) -> mx.array:
        """The components that values are predicted from: decoded keys (H, blocks, n, D) -> (H, blocks, n, D), float32."""
        return mx.clip(mx.matmul(mx.clip(keys - self.k_mean, -FAR, FAR), self.forward), -WILD, WILD)

    def predict(self, keys: mx.array) -> mx.array:
        """Decoded keys (H, blocks, 32, D) -> (H, blocks, 32, D), float32."""
        y = self.inputs(keys).transpose(1, 2, 0, 3).reshape(-1, BLOCK, self.heads * self.dim)
        return mx.matmul(y, self.mix).reshape(-1, BLOCK, self.heads, self.dim).transpose(2, 0, 1, 3) + self.v_mean


class ValueReader:
    """Values from their own codes, beside what is predicted, in tiles of 32 tokens."""

    def __init__(self, predictor: Predictor, seed: int, limits: np.ndarray) -> None:
        self.predictor, self.seed, self.heads, self.dim = predictor, seed, predictor.heads, predictor.dim
        top, step = limits.astype(np.float64).T
        table = np.exp2(top[:, None] - step[:, None] * np.arange(ZERO + 1)).clip(0, np.finfo(np.float32).max)
        table[:, ZERO] = 0
        self.sizes = mx.array(table.astype(np.float32).reshape(-1))
        self.first = mx.array((np.arange(self.heads) * (ZERO + 1)).astype(np.uint32))[:, None]
        mx.eval(self.sizes, self.first)

    @cached_property
    def quantisers(self) -> Any:
        """Of the scales, for the native back end."""
        return native.quantisers(*self.stored())

    def stored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `Components.stored`, of the scales."""
        one, bits = np.arange(self.heads + 1, dtype=np.int32), np.full(self.heads, SCALE_BITS, np.uint16)
        return one, bits, native.shared(self.sizes)

    def scales(self, part: mx.array) -> mx.array:
        """(blocks, bytes) uint8 -> (H, blocks, 32) float32."""
        codes = unpack(part.reshape(len(part), self.heads, -1), SCALE_BITS, BLOCK).astype(mx.uint32)
        return mx.take(self.sizes, codes + self.first).transpose(1, 0, 2)

    def points(self, part: mx.array) -> mx.array:
        """(blocks, bytes) uint8 -> (H, blocks, 32, D) float32: codewords, in the rotated domain."""
        return self.predictor.components.unpack(part).reshape(-1, self.heads, self.dim, BLOCK).transpose(1, 0, 3, 2)

    def added(self, parts: dict[str, mx.array], tiles: slice) -> mx.array:
        """What is added to the predictions, (H, blocks, 32, D) float32."""
        scaled = self.points(parts["codes"][0, tiles]) * self.scales(parts["scales"][0, tiles])[..., None]
        return unrotate(scaled, self.seed)


def per_head(widths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of the components of width > 0, (n, D) -> (H, D, D), zeros for the others."""
    full = np.zeros((*widths.shape, rows.shape[1]), rows.dtype)
    full[widths > 0] = rows
    return full
