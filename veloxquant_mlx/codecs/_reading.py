"""Rows of codes as attention reads them: a tile of tokens at a time, in coordinates that spare the work that a query can do once.

    x^[s] = scale[s] R^T points[s] + centred[s] mean + M shared[s]

R is the codec's rotation, or none; scale and centred may be 1; shared entries, of values alone, come from other rows of the tile.
Dot products and weighted sums of rows need no more than `points`:

    <w, x^[s]>      = scale[s] <R w, points[s]> + centred[s] <w, mean>
    sum_s p_s x^[s] = R^T sum_s (p_s scale[s]) points[s] + (sum_s p_s centred[s]) mean + M sum_s p_s shared[s]

A codec that has such coordinates says so with a reader of its own (`Codec.row_reader`); of any other the points are its decoded rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from veloxquant_mlx.codecs._rotation import matrix
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.metal._component_operand import ComponentKeys, ComponentValues
from veloxquant_mlx.native.mapped import Mapped


@dataclass(frozen=True)
class Tile:
    """Some neighbouring rows. Lazy arrays.

    Attributes:
        points: (H, n, D) float32.
        scale: (H, n) float32, or None for 1.
        centred: (H, n) float32, 1 where the row has the mean and 0 where not, or None: all rows where there is a mean.
        shared: (n, C) float32, what rows of all heads have a linear share of besides (`RowReader.of_shared`), or None.
    """

    points: mx.array
    scale: mx.array | None = None
    centred: mx.array | None = None
    shared: mx.array | None = None


class RowReader:
    """Reads the rows of one array from its parts. This one decodes them.

    Args:
        codec: that encoded the parts; not eager.
        parts: what it returned, or views of a file where the codec `maps`.
        shape: (H, S, D).

    Attributes:
        seed: of the rotation R that points are turned by, or None.
        mean: (H, D) float32, evaluated, or None; it goes with every tile.
    """

    seed: int | None = None
    mean: mx.array | None = None

    def __init__(self, codec: Any, parts: Mapping[str, mx.array | Mapped], shape: tuple[int, int, int]) -> None:
        self.codec, self.parts, self.shape = codec, parts, shape

    @cached_property
    def _by_token(self) -> dict[str, bool]:
        """Parts that have tokens on axis 1, for their layout depends on how many there are, and whether one by one, or else in groups."""
        heads, rows, dim = self.shape
        more = self.codec.layout((heads, rows + self.codec.tokens_together, dim), mx.float32)
        return {part: entry[1][1] == rows for part, entry in self.codec.layout(self.shape, mx.float32).items() if entry != more[part]}

    def tile(self, start: int, stop: int, given: dict[str, mx.array] | None = None, after: mx.array | None = None) -> Tile:
        """Rows start to stop.

        Args:
            given: what `codec.needs` names, of the same rows.
            after: computed before the codes are read. Lazily built, all tiles would be decoded at once.
        """
        return Tile(self.decoded(start, stop, given, after))

    def sides(self, start: int, stop: int) -> Tile:
        """What goes with the points of rows start to stop, however many: a tile whose points are of no account."""
        return Tile(mx.zeros((self.shape[0], stop - start, 0)))

    def decoded(self, start: int, stop: int, given: dict[str, mx.array] | None = None, after: mx.array | None = None) -> mx.array:
        """Rows start to stop as `codec.decode` gives them, (H, n, D) float32; arguments as of `tile`."""
        group = self.codec.tokens_together
        first = start // group * group
        last = min(-(-stop // group) * group, self.shape[1])
        if given is not None and (first, last) != (start, stop):
            given = {name: mx.pad(x, [(0, 0), (start - first, last - stop), (0, 0)]) for name, x in given.items()}
        near = () if given is None else (given,)
        rows = self.codec.decode(self.sliced(first, last, after), (self.shape[0], last - first, self.shape[2]), mx.float32, *near)
        return rows[:, start - first : stop - first]

    def sliced(self, first: int, last: int, after: mx.array | None) -> dict[str, mx.array]:
        """The parts of rows first to last, multiples of the tokens that the codec codes together (or the end)."""
        group = self.codec.tokens_together
        by_group = slice(first // group, -(-last // group))
        spans = {part: slice(first, last) if one_by_one else by_group for part, one_by_one in self._by_token.items()}
        sliced = {part: x[:, spans[part]] if part in spans else x[...] for part, x in self.parts.items()}
        return sliced if after is None else dict(zip(sliced, mx.depends(list(sliced.values()), [after]), strict=True))

    @property
    def stored(self) -> Any:
        """The rows as the native back end reads them, or None where it has no way to."""
        return None

    def stored_beside(self, keys: "RowReader") -> Any:
        """`stored` of values, whose codes may mean something only beside the keys of the same rows."""
        return self.stored

    @property
    def operand(self) -> CodedOperand | ComponentKeys | None:
        """The rows as the kernel of a GPU reads them, or None where it has no way to (`Codec.unfused` says why)."""
        return None

    def operand_beside(self, keys: "RowReader") -> CodedOperand | ComponentValues | None:
        """`operand` of values, whose codes may mean something only beside the keys of the same rows."""
        operand = self.operand
        assert not isinstance(operand, ComponentKeys)
        return operand

    def of_shared(self, sums: mx.array) -> mx.array:
        """What weighted sums of `shared` add to weighted sums of rows: (H, R, C) -> (H, R, D)."""
        raise NotImplementedError(f"{type(self).__name__} has tiles without shared entries")

    def turned(self, x: mx.array) -> mx.array:
        """R x along the last axis."""
        return x if self.seed is None else mx.matmul(x, matrix(x.shape[-1], self.seed).swapaxes(0, 1))

    def unturned(self, x: mx.array) -> mx.array:
        """R^T x along the last axis."""
        return x if self.seed is None else mx.matmul(x, matrix(x.shape[-1], self.seed))
