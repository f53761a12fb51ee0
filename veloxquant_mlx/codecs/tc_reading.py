"""What attention reads of keys and values coded by `tc`: tile by tile of tokens, no whole row array is made.

Of a tile, the components y^ of all heads are unpacked once, and shared by the G query heads of a KV head:

    s    = scale q . R_p (y^ back + mean)                  keys of the tile alone, rotated to their positions p; the mean is the query's
    z    = sum over tokens of e^(s - m) u q_v              the value codes' points q_v times their scales u, in the rotated domain
    c    = sum over tokens of e^(s - m) y~                 y~ = (y^ back) forward, the components that values are predicted from, all heads'
    out  = v_mean + (W^T c + R^T z) / l                    once, outside the sum

Multiply-adds per token and query head: D for the score, D for z, H D for c (H KV heads; m of them have bits), and its share of building the
key and of y~, 2 D^2 / G. Keys anchored to blocks of B tokens, whose queries are turned into the basis once per block, would take D^2 / B in
the place of one of the two, but rotate within the block what the basis decorrelates, and the prediction of values needs unrotated
components: one sum c for every offset in the block, B H D numbers a query head. SmolLM2 (D 64, H 3, G 3) at 2.04 bits, KL on four texts and
multiply-adds with y^ in the place of y~:

    before RoPE, tile by tile   .0085   64 + 64 + 192 + 1365      chosen: a tile's keys are one small matrix product for all its queries
    anchored, B = 32            .0099   64 + 64 + 192 + 128
    anchored, B = 64            .0120   64 + 64 + 192 + 64
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.codecs._base import Given, Shape
from veloxquant_mlx.codecs._components import BLOCK
from veloxquant_mlx.codecs._reading import RowReader, Tile
from veloxquant_mlx.codecs._rotation import matrix, native_factors
from veloxquant_mlx.codecs.tc_tables import FAR, WILD, KeyReader, Predictor
from veloxquant_mlx.metal._component_operand import ComponentKeys, Components, ComponentValues, in_words

if TYPE_CHECKING:
    from veloxquant_mlx.codecs.tc import Tc


class TcKeyRows(RowReader):
    """Points are keys less their mean."""

    codec: "Tc"

    def __init__(self, codec: "Tc", parts: dict[str, mx.array], shape: Shape) -> None:
        super().__init__(codec, parts, shape)
        self.keys = codec.key_reader(parts)
        self.mean = self.keys.mean[:, 0, 0]
        mx.eval(self.mean)

    def tile(self, start: int, stop: int, given: Given | None = None, after: mx.array | None = None) -> Tile:
        first, last = _whole(start, stop, self.shape[1])
        points = self.keys.components.unpack(self.sliced(first, last, after)["codes"][0])
        rows = mx.matmul(self.keys.by_head(points), self.keys.back)
        return Tile(rows.reshape(self.shape[0], -1, self.shape[2])[:, start - first : stop - first])

    @cached_property
    def stored(self) -> Any:
        if self.shape[2] > native.max_dim():
            return None
        rows = native.stored(self.shape)
        rows.components(native.packed(self.parts["codes"]), self.keys.quantisers)
        rows.basis(self.keys.basis)
        return rows

    @cached_property
    def operand(self) -> ComponentKeys:
        quantisers, basis = self.keys.for_kernel
        return ComponentKeys(Components.of(self.shape, self.parts["codes"], quantisers), basis)


class TcValueRows(RowReader):
    """Points are the values' own codes, in the rotated domain; `shared` are the components that they are predicted from."""

    codec: "Tc"

    def __init__(self, codec: "Tc", parts: dict[str, mx.array], shape: Shape) -> None:
        super().__init__(codec, parts, shape)
        self.values = codec.value_reader(parts)
        self.seed = codec.seed
        self._beside: tuple[RowReader, Any] | None = None
        self._operand: tuple[RowReader, ComponentValues | None] | None = None
        self.predictor = self.values.predictor
        self.mean = self.predictor.v_mean[:, 0, 0]
        heads, _, dim = shape
        # (H, H D, D): components to the values of each head
        self.mix = self.predictor.mix.reshape(heads * dim, heads, dim).transpose(1, 0, 2)
        mx.eval(self.mean, self.mix)

    def tile(self, start: int, stop: int, given: Given | None = None, after: mx.array | None = None) -> Tile:
        first, last = _whole(start, stop, self.shape[1])
        parts, heads, dim = self.sliced(first, last, after), self.shape[0], self.shape[2]
        own = slice(start - first, stop - first)
        points = self.values.points(parts["codes"][0]).reshape(heads, -1, dim)[:, own]
        scale = self.values.scales(parts["scales"][0]).reshape(heads, -1)[:, own]
        keys = self.codec.checked_keys(given, (heads, stop - start, dim))
        return Tile(points, scale, shared=self.predictor.inputs(keys[:, None])[:, 0].transpose(1, 0, 2).reshape(-1, heads * dim))

    def of_shared(self, sums: mx.array) -> mx.array:
        return mx.matmul(sums, self.mix)

    def stored_beside(self, keys: RowReader) -> Any:
        """Of keys that are `tc` too, whose components the predictions are a linear function of; see `linear`."""
        if self._beside is None or self._beside[0] is not keys:
            self._beside = keys, self._stored(keys) if isinstance(keys, TcKeyRows) and keys.stored is not None else None
        return self._beside[1]

    def _stored(self, keys: TcKeyRows) -> Any:
        mix, mean = linear(self.predictor, keys.keys)
        if mix is None:
            return None
        rows, dim = native.stored(self.shape), self.shape[2]
        rows.components(native.packed(self.parts["codes"]), self.predictor.quantisers)
        rows.sizes(native.packed(self.parts["scales"]), self.values.quantisers)
        rows.mix(mix)
        rows.mean(mean)
        rows.rotation(*native_factors(dim, self.seed))
        return rows

    def operand_beside(self, keys: RowReader) -> ComponentValues | None:
        """As `stored_beside`."""
        if self._operand is None or self._operand[0] is not keys:
            self._operand = keys, self._for_kernel(keys) if isinstance(keys, TcKeyRows) else None
        return self._operand[1]

    def _for_kernel(self, keys: TcKeyRows) -> ComponentValues | None:
        held = self.predictor.mixed
        if held is None or held[0] is not keys.keys:
            mix, constant = linear(self.predictor, keys.keys)
            found = None if mix is None or not len(mix) else tuple(map(mx.array, (np.ascontiguousarray(mix.swapaxes(0, 1)), constant)))
            mx.eval(found)
            held = self.predictor.mixed = keys.keys, found
        if held[1] is None:
            return None
        components = Components.of(self.shape, self.parts["codes"], self.predictor.for_kernel)
        sizes = self.values.sizes.reshape(self.shape[0], -1)
        turn = matrix(self.shape[2], self.seed)
        mx.eval(sizes, turn)
        return ComponentValues(components, in_words(self.parts["scales"]), sizes, turn, *held[1])


def linear(predictor: Predictor, keys: KeyReader) -> tuple[np.ndarray | None, np.ndarray]:
    """M (n, H, D) and c (H, D), float32, of predictions M^T y^ + c; no M where a key's limits could bind, for they are not linear.

        y~ = limited(limited(y^ back + mean - k_mean) forward),   v = v_mean + W^T y~

    Made once for all rows of the same tables.
    """
    held = predictor.linear
    if held is None or held[0] is not keys:
        held = predictor.linear = keys, *_linear(predictor, keys)
    return held[1:]


def _linear(predictor: Predictor, keys: KeyReader) -> tuple[np.ndarray | None, np.ndarray]:
    heads, dim, components = predictor.heads, predictor.dim, keys.components
    first = components.stored(heads)[0]
    reaches = np.array([np.abs(components.table(i)).max() for i in np.flatnonzero(components.widths)])
    forward, mix = (np.array(x).astype(np.float64) for x in (predictor.forward[:, 0], predictor.mix[0]))
    basis, means = np.split(keys.basis.astype(np.float64), [first[-1]])
    apart = means - np.array(predictor.k_mean[:, 0, 0])
    made, rest, within = np.zeros((first[-1], heads * dim), np.float32), np.array(predictor.v_mean).astype(np.float64).reshape(-1), True
    for h in range(heads):
        own = slice(first[h], first[h + 1])
        back, reach = basis[own], reaches[own]
        turned, by_mean = back @ forward[h], apart[h] @ forward[h]
        within &= bool((reach @ np.abs(back) + np.abs(apart[h]) <= FAR).all() and (reach @ np.abs(turned) + np.abs(by_mean) <= WILD).all())
        made[own] = turned @ mix[h * dim : (h + 1) * dim]
        rest += by_mean @ mix[h * dim : (h + 1) * dim]
    return made.reshape(-1, heads, dim) if within else None, rest.reshape(heads, dim).astype(np.float32)


def _whole(start: int, stop: int, rows: int) -> tuple[int, int]:
    """The blocks of 32 tokens that rows start to stop lie in."""
    return start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, rows)
