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

from typing import TYPE_CHECKING

import mlx.core as mx

from veloxquant_mlx.codecs._base import Given, Shape
from veloxquant_mlx.codecs._components import BLOCK
from veloxquant_mlx.codecs._reading import RowReader, Tile

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


class TcValueRows(RowReader):
    """Points are the values' own codes, in the rotated domain; `shared` are the components that they are predicted from."""

    codec: "Tc"

    def __init__(self, codec: "Tc", parts: dict[str, mx.array], shape: Shape) -> None:
        super().__init__(codec, parts, shape)
        self.values = codec.value_reader(parts)
        self.seed = codec.seed
        self.mean = self.values.v_mean[:, 0, 0]
        heads, _, dim = shape
        self.mix = self.values.mix.reshape(heads * dim, heads, dim).transpose(1, 0, 2)  # (H, H D, D): components to the values of each head
        mx.eval(self.mean, self.mix)

    def tile(self, start: int, stop: int, given: Given | None = None, after: mx.array | None = None) -> Tile:
        first, last = _whole(start, stop, self.shape[1])
        parts, heads, dim = self.sliced(first, last, after), self.shape[0], self.shape[2]
        own = slice(start - first, stop - first)
        points = self.values.points(parts["codes"][0]).reshape(heads, -1, dim)[:, own]
        scale = self.values.scales(parts["scales"][0]).reshape(heads, -1)[:, own]
        keys = self.codec.checked_keys(given, (heads, stop - start, dim))
        return Tile(points, scale, shared=self.values.inputs(keys[:, None])[:, 0].transpose(1, 0, 2).reshape(-1, heads * dim))

    def of_shared(self, sums: mx.array) -> mx.array:
        return mx.matmul(sums, self.mix)


def _whole(start: int, stop: int, rows: int) -> tuple[int, int]:
    """The blocks of 32 tokens that rows start to stop lie in."""
    return start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, rows)
