"""Neighbouring rows of keys and values as codes, and attention to them a tile of tokens at a time: no whole row array is ever made.

    m, l = running maximum of the scores s and sum of e^(s - m)      (online softmax, Milakov and Gimelshein 2018)
    out  = sum over tiles of e^(s - m) v / l,    lse = m + log l

On a CPU one call of the native back end attends to all blocks that it can read (`Block.part`); the tiles here are MLX's, for the others.

Keys stored before RoPE are rotated in their tile, with the angles that the model's own `mx.fast.rope` has. What a rotation or a mean costs
a row in another codec's decoder falls on the query, and on the sum (`codecs._reading`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.caches.visibility import BatchVisibility, Visibility
from veloxquant_mlx.codecs._base import Codec
from veloxquant_mlx.codecs._reading import RowReader, Tile
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.codecs.tc import Tc
from veloxquant_mlx.metal._attend import merge_parts
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._coded_attend import MAX_DIM, MULTIPLE, coded_attend, takes_dim
from veloxquant_mlx.metal._component_attend import component_attend
from veloxquant_mlx.metal._component_operand import ComponentKeys
from veloxquant_mlx.native import attending, converting
from veloxquant_mlx.native.mapped import Mapped
from veloxquant_mlx.transfer.rope import half_split, rotate
from veloxquant_mlx.transfer.rope_angles import PAGE, cos_sin, native_pages, undoing
from veloxquant_mlx.transfer.rope_spec import RopeSpec, unrotated

TILE_VALUES = {"cpu": 1 << 17, "gpu": 1 << 22}  # of keys in a tile: a core's cache, or enough to fill a GPU
TILE_STEP = 64  # tokens of a tile are a multiple of it
FUSED_ROWS = 32  # queries of a KV head that a GPU's kernel takes: it decodes a row for every four of them
MERGED = 8  # blocks whose results are held beside each other


@dataclass(frozen=True, eq=False)
class CodedRows:
    """Keys or values of one layer as a codec stored them. Immutable; arrays are evaluated.

    Attributes:
        codec: bound, with its tables.
        parts: what it encoded; large ones may be views of a mapped file.
        shape: (H, S, D).
        dtype: of the live rows that were encoded.
        rope: rotation to apply to the decoded rows, None where they were encoded as cached.
    """

    codec: Codec
    parts: dict[str, mx.array | Mapped]
    shape: tuple[int, int, int]
    dtype: mx.Dtype
    rope: RopeSpec | None = None

    @cached_property
    def reader(self) -> RowReader:
        reader = self.codec.row_reader(self.parts, self.shape)
        # Forks in other threads read it too: no lazy array may be left in it. The parts as given are the tail's at times, still lazy.
        mx.eval([part for name, part in reader.parts.items() if part is not self.parts[name]])
        return reader

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @classmethod
    def encoded(
        cls, codec: Codec, rows: mx.array, first: int, rope: RopeSpec | None = None, given: dict[str, mx.array] | None = None
    ) -> "CodedRows":
        """Encode rows as cached, (H, S, D), at positions from `first` on; given a rope, before it."""
        heads, count, dim = rows.shape
        at = np.arange(first, first + count)
        measured = given is None and rows.size > 0 and converting.in_use(dim)
        found = codec.encode_measured(rows, None if rope is None else undoing(rope, at)) if measured else None
        if found is not None:
            parts, _ = found
        else:
            x = rows if rope is None else rotate(rows.astype(mx.float32), at, rope, unrotated(rope))
            parts = codec.encode(x) if given is None else codec.encode(x, given)
        mx.eval(parts)
        return cls(codec, parts, (heads, count, dim), rows.dtype, rope)


@dataclass(frozen=True, eq=False)
class Block:
    """Neighbouring rows of one layer: keys and values of the same tokens.

    Attributes:
        k, v: the codes.
        k_from, v_from: where these rows start in them.
        count: rows.
        first: position of the first.
    """

    k: CodedRows
    v: CodedRows
    count: int
    first: int
    k_from: int = 0
    v_from: int = 0

    @classmethod
    def exact(cls, keys: mx.array, values: mx.array, first: int) -> "Block":
        """Rows as they are, (H, S, D) each."""
        k, v = (CodedRows(Raw(), {"data": x}, tuple(x.shape), x.dtype) for x in (keys, values))
        return cls(k, v, keys.shape[1], first)

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.first + self.count

    def kept(self, start: int, stop: int) -> "Block":
        """The rows at positions start to stop alone; the codes stay as they are."""
        start, stop = max(start, self.first), min(stop, self.stop)
        skip = start - self.first
        return replace(self, count=stop - start, first=start, k_from=self.k_from + skip, v_from=self.v_from + skip)

    def rows(self, start: int = 0, stop: int | None = None) -> tuple[mx.array, mx.array]:
        """Decoded keys, as cached, and values, (H, n, D) float32, of rows start to stop."""
        stop = self.count if stop is None else stop
        k, v, rope = self.k.reader, self.v.reader, self.k.rope
        keys = k.decoded(*self._span("k", start, stop))
        values = v.decoded(*self._span("v", start, stop), {"k": keys} if v.codec.needs else None)
        if rope is not None:
            keys = rotate(keys, np.arange(self.first + start, self.first + stop), unrotated(rope), rope)
        return keys, values

    @cached_property
    def part(self) -> Any:
        """These rows as the native back end attends to them, or None where it has no way to."""
        k, v = self.k.reader.stored, self.v.reader.stored_beside(self.k.reader)
        if k is None or v is None:
            return None
        at, rope = (self.k_from, self.v_from, self.count), self.k.rope
        if rope is None:
            return attending.part(k, v, at, self.first)
        return attending.part(k, v, at, self.first, native_pages(rope, self.first, self.stop), rope.first, rope.pairing == "interleaved")

    def attend(self, q: mx.array, seen: Visibility, column: int, tile: int) -> tuple[mx.array, mx.array]:
        """Attention of queries to these rows.

        Args:
            q: (H, R, D) float32, times the scale; R rows of queries for each KV head, in the order of `seen`.
            seen: which rows each query sees.
            column: of the first row.
            tile: tokens at a time.

        Returns:
            (out, lse): (H, R, D_v) and (H, R) float32; 0 and -inf for a query that sees none.
        """
        if not native_in_use() or self.part is None:
            return self.attend_tiles(q, seen, column, tile)
        heads, rows, dim = q.shape
        by_sequence = q.reshape(1, heads * seen.groups, seen.queries, dim)
        shared = attending.Shared((0,), (column - self.first,), (self.part,))
        out, lse = attending.attend(by_sequence, heads, [shared], None, seen.sight)
        return out.reshape(heads, rows, -1), lse.reshape(heads, rows)

    def attend_tiles(
        self, q: mx.array, seen: Visibility | BatchVisibility, column: int, tile: int, after: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """`attend` by MLX: for few queries on a GPU by its kernel, where that reads the rows, else tile by tile.

        Args:
            after: computed before the first tile is read.
        """
        found = self._fused(q, seen, column)
        if found is not None:
            return found
        keys, values = _Keys(self.k, q), self.v.reader
        heads, rows, _ = q.shape
        most, total = mx.full((heads, rows, 1), -math.inf), mx.zeros((heads, rows, 1))
        out, centred = mx.zeros((heads, rows, self.v.shape[2])), mx.zeros((heads, rows, 1))
        shared: mx.array | None = None
        if after is not None:
            (total,) = mx.depends([total], [after])
        tiles = [(start, min(start + tile, self.count)) for start in range(0, self.count, tile)]
        tiles = [(start, stop) for start, stop in tiles if seen.tile(column + start, column + stop) is not False]
        # The scores of few queries are few: several tiles share one array of them, at most of a tile's size, and all that is done to it.
        together = 1 if values.codec.needs else max(1, q.shape[2] // rows)
        for group in (tiles[i : i + together] for i in range(0, len(tiles), together)):
            begin, end = group[0][0], group[-1][1]
            mask = seen.tile(column + begin, column + end)
            spans = [self._span("k", start, stop) for start, stop in group]
            scores, given = keys.scores(spans, self.first + begin, after=total, rows=bool(values.codec.needs))
            if mask is not True:
                scores = scores + mask if mask.dtype != mx.bool_ else mx.where(mask, scores, -math.inf)
            largest = mx.maximum(most, mx.max(scores, axis=-1, keepdims=True))
            base = mx.where(largest == -math.inf, 0.0, largest)
            weights, fade = mx.exp(scores - base), mx.exp(most - base)
            most, total = largest, total * fade + mx.sum(weights, axis=-1, keepdims=True)
            span = self._span("v", begin, end)
            whole = values.tile(*span, given, after=total) if len(group) == 1 else values.sides(*span)
            if values.mean is not None:
                every = whole.centred is None
                with_mean = mx.sum(weights, axis=-1, keepdims=True) if every else mx.matmul(weights, whole.centred[..., None])
                centred = centred * fade + with_mean
            if whole.shared is not None:
                sums = mx.matmul(weights, whole.shared)
                shared = sums if shared is None else shared * fade + sums
            weights = weights if whole.scale is None else weights * whole.scale[:, None]
            out = out * fade
            for start, stop in group:
                part = whole if len(group) == 1 else values.tile(*self._span("v", start, stop), after=total if start == begin else out)
                out = out + mx.matmul(weights[..., start - begin : stop - begin], part.points)
            # The next tile comes after all sums of these: what they are taken of would else wait in memory, tile upon tile.
            (total,) = mx.depends([total], [out, centred, *([] if shared is None else [shared])])
        norm = mx.where(total > 0, total, 1.0)
        out = values.unturned(out / norm)
        if values.mean is not None:
            out = out + centred / norm * values.mean[:, None]
        if shared is not None:
            out = out + values.of_shared(shared / norm)
        return out, (most + mx.log(total))[..., 0]

    def _fused(self, q: mx.array, seen: Visibility | BatchVisibility, column: int) -> tuple[mx.array, mx.array] | None:
        """`attend` by the kernel of a GPU, or None where it is not the one to ask: a CPU, many queries, or codes that it does not read."""
        if backend() == "cpu" or q.shape[1] > FUSED_ROWS or not self.count or self.unfused is not None:
            return None
        mask = seen.tile(column, column + self.count)
        if mask is False:
            return mx.zeros(q.shape), mx.full(q.shape[:2], -math.inf)
        rope = self.k.rope
        angles = None if rope is None else _angles(rope, self.first, self.stop)
        q = q if rope is None else half_split(q, rope)
        rows = (self.k_from, self.v_from, self.count)
        mask = None if mask is True else mask if mask.dtype == mx.bool_ else mask.astype(mx.float32)
        k, v = self.k.reader.operand, self.v.reader.operand_beside(self.k.reader)
        if isinstance(k, ComponentKeys):
            return component_attend(q, k, v, rows, angles, mask)
        return coded_attend(q, k, v, rows, angles, mask)

    @cached_property
    def unfused(self) -> str | None:
        """Why MLX's operations attend to these rows on a GPU, or None where its kernel does."""
        if any(isinstance(part, Mapped) for coded in (self.k, self.v) for part in coded.parts.values()):
            return "its parts are in a mapped file"
        found = unfused(self.k.codec, self.v.codec, (self.k.shape[2], self.v.shape[2]), self.k.rope)
        if found is None and self.v.reader.operand_beside(self.k.reader) is None:
            return "its values are no linear function of the keys' components within their limits"
        return found

    def _span(self, role: str, start: int, stop: int) -> tuple[int, int]:
        shift = self.k_from if role == "k" else self.v_from
        return start + shift, stop + shift


class _Keys:
    """Scores of queries with coded keys; what depends on the query alone is computed once."""

    def __init__(self, coded: CodedRows, q: mx.array) -> None:
        self.reader, self.rope = coded.reader, coded.rope
        mean = self.reader.mean
        if self.rope is None:
            self.q = self.reader.turned(q)
            self.by_mean = None if mean is None else mx.matmul(q, mean[..., None])
            return
        self.q = half_split(q, self.rope)
        self.by_mean = None
        if mean is not None:
            # q . R_p mean = sum over pairs of cos_p (a a' + b b') + sin_p (b a' - a b'), and the entries that do not turn.
            first, half = self.rope.first, self.rope.dims // 2
            a, b = (self.q[..., at : at + half] for at in (first, first + half))
            c, d = (mean[:, None, at : at + half] for at in (first, first + half))
            self.by_mean = mx.concatenate([a * c + b * d, b * c - a * d], axis=-1)
            stays = [slice(0, first), slice(first + 2 * half, None)]
            self.by_rest = sum(mx.sum(self.q[..., at] * mean[:, None, at], axis=-1, keepdims=True) for at in stays)

    def scores(
        self, tiles: Sequence[tuple[int, int]], position: int, after: mx.array, rows: bool
    ) -> tuple[mx.array, dict[str, mx.array] | None]:
        """(H, R, n) float32 of neighbouring tiles, the first at a position, and their decoded rows before RoPE where asked for."""
        reader, begin, end = self.reader, tiles[0][0], tiles[-1][1]
        # Of all tiles together only what goes with the points is read; their points, tile by tile.
        whole = reader.tile(begin, end, after=after) if len(tiles) == 1 else reader.sides(begin, end)
        given = {"k": _decoded(reader, whole)} if rows else None
        dots: list[mx.array] = []
        means: list[mx.array] = []
        for start, stop in tiles:
            part = whole if len(tiles) == 1 else reader.tile(start, stop, after=dots[-1] if dots else after)
            if self.rope is None:
                dots.append(mx.matmul(self.q, part.points.swapaxes(1, 2)))
                continue
            table = cos_sin(self.rope, position + start - begin, position + stop - begin)
            dots.append(self._turned_dots(reader.unturned(part.points), table))
            if self.by_mean is not None:
                means.append(mx.matmul(self.by_mean, table.swapaxes(0, 1)) + self.by_rest)
        scores = _joined(dots)
        scores = scores if whole.scale is None else scores * whole.scale[:, None]
        if self.by_mean is None:
            return scores, given
        by_mean = _joined(means) if means else self.by_mean
        return scores + (by_mean if whole.centred is None else whole.centred[:, None] * by_mean), given

    def _turned_dots(self, x: mx.array, table: mx.array) -> mx.array:
        """Queries times rows (H, n, D) in half-split order, rotated by the angles of `table`."""
        assert self.rope is not None
        first, half = self.rope.first, self.rope.dims // 2
        cos, sin = table[:, :half], table[:, half:]
        spans = [slice(at, at + half) for at in (first, first + half)]
        a, b = (x[..., at] for at in spans)
        # One product for each half: joining them first costs as much as the rotation.
        dots = mx.matmul(self.q[..., spans[0]], (a * cos - b * sin).swapaxes(1, 2))
        dots = dots + mx.matmul(self.q[..., spans[1]], (a * sin + b * cos).swapaxes(1, 2))
        stays = [at for at in (slice(0, first), slice(first + 2 * half, None)) if x[..., at].shape[-1]]
        return sum((mx.matmul(self.q[..., at], x[..., at].swapaxes(1, 2)) for at in stays), dots)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _decoded(reader: RowReader, tile: Tile) -> mx.array:
    """Rows of a tile, (H, n, D) float32."""
    x = reader.unturned(tile.points)
    if tile.scale is not None:
        x = x * tile.scale[..., None]
    if reader.mean is None:
        return x
    return x + (reader.mean[:, None] if tile.centred is None else tile.centred[..., None] * reader.mean[:, None])


def _angles(rope: RopeSpec, first: int, stop: int) -> mx.array:
    """`cos_sin` of a whole block, which is joined from pages no more often than need be."""
    return cos_sin(rope, first, stop) if first // PAGE == (stop - 1) // PAGE else _joined_angles(rope, first, stop)


@lru_cache(maxsize=16)  # all layers have the same blocks
def _joined_angles(rope: RopeSpec, first: int, stop: int) -> mx.array:
    return cos_sin(rope, first, stop)


def native_in_use(*dims: int) -> bool:
    """Whether attention to rows of these sizes is the native back end's now, where it can read them."""
    return native.available() and backend() == "cpu" and all(dim <= native.max_dim() for dim in dims)


def native_parts(blocks: Sequence[Block]) -> tuple[list[Any], list[Block]]:
    """Blocks that the native back end attends to now, as its parts, and the others."""
    if not native_in_use():
        return [], list(blocks)
    parts = [block.part for block in blocks]
    return [part for part in parts if part is not None], [block for block, part in zip(blocks, parts, strict=True) if part is None]


def unfused(k: Codec, v: Codec, dims: tuple[int, int], rope: RopeSpec | None) -> str | None:
    """Why MLX's operations attend on a GPU, or None where its kernel does, for few queries.

    Args:
        dims: D of keys and of values.
        rope: rotation that keys are stored before, or None.
    """
    dim = dims[0]
    if dims[1] != dim or not takes_dim(dim):
        return f"a kernel reads heads of multiples of {MULTIPLE} up to {MAX_DIM}, as large for keys as values, not {dim} and {dims[1]}"
    if rope is not None and (rope.first, rope.dims) != (0, dim):
        return f"a kernel turns whole rows by RoPE, and here it is on {rope.dims} of {dim} channels from {rope.first} on"
    if (k.id == Tc.id) != (v.id == Tc.id):
        return f"the kernel for {Tc.id} attends to keys and values of {Tc.id} together, not to {k.id} and {v.id}"
    return k.unfused(dim, rope is not None) or v.unfused(dim, False)


def tile_tokens(heads: int, dim: int) -> int:
    """Tokens of a tile for keys of that many heads and entries, by the device that MLX uses."""
    values = TILE_VALUES["gpu" if mx.default_device() == mx.gpu else "cpu"]
    return min(PAGE, max(1, values // (heads * dim) // TILE_STEP) * TILE_STEP)


def attend(blocks: Iterable[tuple[Block, int]], q: mx.array, seen: Visibility | BatchVisibility, tile: int) -> tuple[mx.array, mx.array]:
    """Attention to blocks by MLX, each given with the column of its first row, one after another: at no time are tiles of two in memory."""
    parts: list[tuple[mx.array, mx.array]] = []
    for block, column in blocks:
        parts.append(block.attend_tiles(q, seen, column, tile, parts[-1][0] if parts else None))
        if len(parts) == MERGED:  # results of many queries take more room than tiles
            parts = [merged(parts)]
    return merged(parts)


def merged(parts: Sequence[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Attention to all rows from attention to some each: out (..., D) and lse (...), all float32."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return merge_parts(outs, lses)
