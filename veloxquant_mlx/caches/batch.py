"""Coded caches of several sequences as one: each keeps its own blocks, and their tails are one array.

    columns   0 ............................ start ........ length       as if every sequence were padded on the left to the longest
    row 0     [ blocks                       ][ tail                ]
    row 1     padding [ blocks                  ][ tail             ]    token t of row b is in column left[b] + t
    row 2     padding ......... [ blocks shared with row 0 ][ tail  ]

Rows forked from one prefix hold the same blocks: their queries go over its codes together, so that n agents read each code once. Masks are
mlx-lm's own, over columns. While prompts of different lengths are processed, what follows a row's last token is padding too: the row moves
to the right past it.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache, _BaseCache, dynamic_roll

from veloxquant_mlx.caches.batch_fetched import BatchFetched, Row
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.hook import hold

STEP = 64  # columns that the tails' buffers grow by
EXACT = 1024  # rows that leave the tail together, as they are, where nothing says how to encode them: one long row pads all others


class BatchCodedKVCache(_BaseCache):
    """An mlx-lm cache of several sequences, merged from caches of one each: what BatchKVCache is to KVCache.

    Args:
        caches: coded ones, or KVCache and RotatingKVCache, whose rows stay exact.

    Raises:
        ValueError: caches that do not go together.
    """

    bits = 0  # as CodedKVCache's
    group_size = 0
    rotated = False  # columns are in order, which mlx-lm's own batches of sliding layers ask for when they take in this one
    single: ClassVar[type]  # CodedKVCache, which its own module puts here

    def __init__(self, caches: Sequence[Any]) -> None:
        windows = {cache.window for cache in caches if isinstance(cache, self.single)}
        if len(windows) != 1:
            raise ValueError(f"[BatchCodedKVCache] coded caches must be there and have one window, but got {sorted(windows)}.")
        self.window: int = windows.pop()
        caches = [self._coded(cache) for cache in caches]
        self._place(caches, [cache.offset for cache in caches], max(cache.columns for cache in caches))
        hold(self)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> "BatchCodedKVCache":
        return cls(caches)

    def _coded(self, cache: Any) -> Any:
        """A cache of one sequence as a coded one: rows of mlx-lm's caches become an exact block."""
        if isinstance(cache, self.single):
            return cache
        window = cache.max_size if isinstance(cache, RotatingKVCache) else 0
        if not isinstance(cache, KVCache | RotatingKVCache) or window != self.window:
            wanted = f"RotatingKVCache of max_size {self.window}" if self.window else "KVCache"
            raise ValueError(
                f"[BatchCodedKVCache] caches must be CodedKVCache or {wanted}, but got {type(cache).__name__}"
                + (f" of max_size {window}." if window else ".")
            )
        if cache.empty():
            return self.single(window=self.window)
        if window and cache.keep:
            raise ValueError(f"[BatchCodedKVCache] a RotatingKVCache must keep no first rows, but got keep={cache.keep}.")
        count = cache.size()
        ordered = [cache._temporal_order(x)[..., -count:, :] if window else x[..., :count, :] for x in (cache.keys, cache.values)]
        keys, values = (mx.contiguous(x[0]) for x in ordered)
        mx.eval(keys, values)
        return self.single((Block.exact(keys, values, cache.offset - count),), None, self.window)

    def _place(self, caches: Sequence[Any], offsets: Sequence[int], length: int, ends: Sequence[int | None] | None = None) -> None:
        """Take over coded caches of one sequence, so that the positions of the next column are the offsets."""
        self.length = length
        ends = [None] * len(caches) if ends is None else ends
        self._rows = [
            Row(cache.blocks, cache.growth, cache.tail_first, length - offset, end)
            for cache, offset, end in zip(caches, offsets, ends, strict=True)
        ]
        self._start = self._first_column()
        self._tail: tuple[mx.array, mx.array] | None = None  # (B, H, T, D), from column `_start` on
        tails = [cache.tail for cache in caches]
        likes = [*filter(None, tails), *([mx.zeros((c.shape[0], 0, c.shape[2]), c.dtype) for c in (b.k, b.v)] for b in self._blocks())]
        if not likes:
            return
        joined = []
        for i, like in enumerate(likes[0]):
            padded = []
            for row, tail in zip(self._rows, tails, strict=True):
                x = like[:, :0] if tail is None else tail[i].astype(like.dtype)
                before = 0 if tail is None else row.left + row.first - self._start
                padded.append(mx.pad(x, [(0, 0), (before, length - self._start - before - x.shape[1]), (0, 0)]))
            joined.append(mx.stack(padded))
        self._tail = _grown(joined, length - self._start)

    def _blocks(self) -> list[Block]:
        return [block for row in self._rows for block in row.blocks]

    def _first_column(self) -> int:
        """The first column of a row that is in a tail."""
        return min(self.length, *(row.left + row.first for row in self._rows))

    # --- mlx-lm's protocol

    @property
    def offset(self) -> mx.array:
        """(B,): each row's position of the next column; less than 0 in padding."""
        return mx.array([self.length - row.left for row in self._rows])

    @property
    def left_padding(self) -> mx.array:
        """(B,): the column of each row's position 0."""
        return mx.array([row.left for row in self._rows])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[BatchFetched, BatchFetched]:
        """Add columns (B, H, N, D); returns all of them for attention alone."""
        self._check_rows(keys, values)
        self._settle()
        self._encode_older()
        self._append(keys, values)
        live = [x[:, :, : self.length - self._start] for x in self._tail or ()]
        fetched = BatchFetched(tuple(self._rows), live[0], live[1], self.length, self.window)
        return fetched, fetched

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        if keys.ndim != 4 or keys.shape[0] != len(self._rows) or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"[BatchCodedKVCache] rows must be ({len(self._rows)}, H, N, D), but got {tuple(keys.shape)} and {tuple(values.shape)}."
            )
        held = [] if self._tail is None else [(x.shape[1], x.shape[3]) for x in self._tail]
        got = [(x.shape[1], x.shape[3]) for x in (keys, values)]
        if held and got != held:
            raise ValueError(f"[BatchCodedKVCache] keys and values must have (H, D) {held[0]} and {held[1]}, but got {got[0]}, {got[1]}.")

    def _settle(self) -> None:
        """Move rows whose last token is behind them to the right, past their padding."""
        shifts = [0 if row.end is None else max(0, self.length - row.end) for row in self._rows]
        if self._tail is None or not any(shifts):
            return
        count = self.length - self._start
        by = mx.array(shifts)[:, None]
        self._tail = tuple(dynamic_roll(x[:, :, :count], by, axis=2) for x in self._tail)
        self._rows = [
            replace(row, left=row.left + shift, end=self.length) if shift else row for row, shift in zip(self._rows, shifts, strict=True)
        ]

    def _encode_older(self) -> None:
        """Encode what each row's tail holds beyond its window, and drop blocks that no later query sees."""
        for i, row in enumerate(self._rows):
            first, tokens = row.first, row.tokens(self.length)
            if row.growth is None:
                leaving = [((tokens - first) // EXACT * EXACT, True)]
            else:
                leaving = row.growth.leaving(first, tokens - first)
            for count, exact in leaving:
                if count:
                    self._leave(i, count, exact)
            if self.window:
                row = self._rows[i]
                self._rows[i] = replace(row, blocks=tuple(b for b in row.blocks if b.stop > tokens - self.window + 1))
        if self.window:
            self._shift()
        self._cut()

    def _leave(self, i: int, count: int, exact: bool) -> None:
        row = self._rows[i]
        start = row.left + row.first - self._start
        keys, values = (mx.contiguous(x[i, :, start : start + count]) for x in self._tail or ())
        mx.eval(keys, values)
        block = Block.exact(keys, values, row.first) if exact else row.growth.encoded(keys, values, row.first)
        self._rows[i] = replace(row, blocks=(*row.blocks, block), first=row.first + count)

    def _shift(self) -> None:
        """Leave out columns that no row has anything in."""
        empty = min(self.length, *(row.left + row.oldest for row in self._rows))
        if empty > 0:
            self._rows = [replace(row, left=row.left - empty, end=None if row.end is None else row.end - empty) for row in self._rows]
            self.length, self._start = self.length - empty, self._start - empty

    def _cut(self) -> None:
        """Leave out columns of the tails that no row's tail reaches back to."""
        start = self._first_column()
        if self._tail is not None and start > self._start:
            self._tail = _grown([x[:, :, start - self._start : self.length - self._start] for x in self._tail], self.length - start)
            mx.eval(self._tail)
        self._start = start

    def _append(self, keys: mx.array, values: mx.array) -> None:
        held, count = self.length - self._start, keys.shape[2]
        if self._tail is None:
            self._tail = tuple(mx.zeros((*x.shape[:2], held, x.shape[3]), x.dtype) for x in (keys, values))
        if held + count > self._tail[0].shape[2]:
            self._tail = _grown([x[:, :, :held] for x in self._tail], held + count)
        at = mx.array([held])
        # Not by assignment to a slice, which would change the array under a copy that holds it too.
        self._tail = tuple(mx.slice_update(x, new.astype(x.dtype), at, (2,)) for x, new in zip(self._tail, (keys, values), strict=True))
        self.length += count

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any) -> mx.array:
        """(B, 1, N, columns) bool, as a BatchKVCache's; the layer's own window is applied by attention."""
        return create_causal_mask(N, self.length, window_size=None if self.window else window_size, left_padding=self.left_padding)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding of the columns that come: on the left of an empty cache, or behind `lengths` tokens of each row."""
        if left_padding is not None:
            if not self.empty():
                raise ValueError("[BatchCodedKVCache] left_padding must be given to an empty cache; pad on the right instead.")
            self._rows = [replace(row, left=row.left + int(pad)) for row, pad in zip(self._rows, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("[BatchCodedKVCache] lengths must be given beside right_padding, but got None.")
            self._rows = [replace(row, end=self.length + int(count)) for row, count in zip(self._rows, lengths, strict=True)]

    def finalize(self) -> None:
        """Forget the padding on the right: every row ends at the last column."""
        self._settle()
        self._rows = [replace(row, end=None) for row in self._rows]

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these rows alone, in this order."""
        kept = [int(i) for i in batch_indices]
        if not kept:
            raise ValueError("[BatchCodedKVCache] batch_indices must name at least one row, but got none.")
        self._rows = [self._rows[i] for i in kept]
        if self._tail is not None:
            self._tail = tuple(x[mx.array(kept)] for x in self._tail)
        self._shift()
        self._cut()

    def extend(self, other: Any) -> None:
        """Take in the rows of another batch, of codes or of mlx-lm's own: its rows stay exact."""
        if any(row.end is not None for row in self._rows + getattr(other, "_rows", [])):
            raise ValueError("[BatchCodedKVCache] a batch must not be extended while prompts are padded on the right: finalize it first.")
        caches, offsets = self._singles(), self.offset.tolist()
        if isinstance(other, BatchCodedKVCache):
            if other.window != self.window:
                raise ValueError(f"[BatchCodedKVCache] other must have window {self.window}, but got {other.window}.")
            more = other._singles()
        elif isinstance(other, BatchKVCache | BatchRotatingKVCache):
            new = RotatingKVCache(other.max_size) if isinstance(other, BatchRotatingKVCache) else KVCache()
            more = [self._coded(new if other.empty() else other.extract(i)) for i in range(other.left_padding.size)]
        else:
            raise ValueError(f"[BatchCodedKVCache] other must be a batch of caches with keys and values, but got {type(other).__name__}.")
        length = max(self.length, *(cache.columns for cache in more))
        self._place(caches + more, offsets + other.offset.tolist(), length)

    def extract(self, idx: int) -> Any:
        """A CodedKVCache of one row: its blocks are shared, its tail is its own."""
        cache = self._single(idx)
        if cache.tail is not None:
            tail = tuple(mx.contiguous(x) for x in cache.tail)
            mx.eval(tail)  # another thread may go on with it
            cache.set_tail(*tail, cache.tail_first)
        return cache

    def _single(self, i: int) -> Any:
        row = self._rows[i]
        cache = self.single(row.blocks, row.growth, self.window)
        if self._tail is not None:
            start, stop = (row.left + position - self._start for position in (row.first, row.tokens(self.length)))
            keys, values = (x[i, :, start:stop] for x in self._tail)
            cache.set_tail(keys, values, row.first)
        return cache

    def _singles(self) -> list[Any]:
        return [self._single(i) for i in range(len(self._rows))]

    def size(self) -> int:
        return self.length

    def empty(self) -> bool:
        return self._tail is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: codes with side information, once where rows share them, and the tails as allocated."""
        parts = chain.from_iterable(coded.parts.values() for block in self._blocks() for coded in (block.k, block.v))
        return sum({id(part): part.nbytes for part in parts}.values()) + sum(x.nbytes for x in self._tail or ())

    def is_trimmable(self) -> bool:
        """False once a window has dropped rows that a shorter sequence would see."""
        return not self.window or not any(row.oldest for row in self._rows)

    def trim(self, n: int) -> int:
        """Forget the newest n columns; returns how many there were to forget. Codes of a block that is cut stay in memory."""
        n = min(self.length, n)
        self.length -= n
        for i, row in enumerate(self._rows):
            kept = max(0, self.length - row.left)
            if kept < row.first:
                blocks = tuple(block if block.stop <= kept else block.kept(block.first, kept) for block in row.blocks if block.first < kept)
                self._rows[i] = replace(row, blocks=blocks, first=kept)
        self._start = min(self._start, self.length)  # less than before where no row has a tail left
        return n

    # --- copies, and what mlx-lm's own batches read when they take in this one

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchCodedKVCache":
        """A batch that goes on by itself from here; nothing is copied until it is written."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _rows=list(self._rows))
        if self._tail is not None:
            mx.eval(self._tail)
        hold(other)
        return other

    def __copy__(self) -> "BatchCodedKVCache":
        return self.__deepcopy__({})

    @property
    def state(self) -> tuple[str, list[Any]]:
        """JSON of where the rows are, and the state of each as a cache of one sequence."""
        about = {
            "length": self.length,
            "offsets": [self.length - row.left for row in self._rows],
            "ends": [row.end for row in self._rows],
        }
        return json.dumps(about), [cache.state for cache in self._singles()]

    @state.setter
    def state(self, value: tuple[str, list[Any]]) -> None:
        about = json.loads(value[0])
        caches = [self.single.from_state(state) for state in value[1]]
        self.__init__(caches)  # type: ignore[misc]
        self._place(caches, about["offsets"], about["length"], about["ends"])

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """All columns decoded, (B, H, columns, D) each, zeros for padding, or None without any: full arrays, for whoever needs them."""
        pairs = [cache.keys_and_values() for cache in self._singles()]
        likes = [pair for pair in pairs if pair[0] is not None]
        if not likes:
            return None, None
        joined = []
        for i, like in enumerate(likes[0]):
            rows = []
            for row, pair in zip(self._rows, pairs, strict=True):
                x = like[:, :, :0] if pair[i] is None else pair[i]
                before = 0 if pair[i] is None else row.left + row.oldest
                rows.append(mx.pad(x, [(0, 0), (0, 0), (before, self.length - before - x.shape[2]), (0, 0)]))
            joined.append(mx.concatenate(rows))
        return joined[0], joined[1]

    @property
    def keys(self) -> mx.array | None:
        """Decoded keys, see `keys_and_values`."""
        return self.keys_and_values()[0]

    @property
    def values(self) -> mx.array | None:
        """Decoded values, see `keys_and_values`."""
        return self.keys_and_values()[1]

    @property
    def _idx(self) -> int:
        return self.length

    _offset = _idx

    def _temporal_order(self) -> None:
        """Columns are in order."""


def _grown(arrays: Sequence[mx.array], columns: int) -> tuple[mx.array, mx.array]:
    """(B, H, T, D) arrays in buffers of at least so many columns, a multiple of STEP."""
    room = -(-columns // STEP) * STEP
    keys, values = (mx.pad(x, [(0, 0), (0, 0), (0, room - x.shape[2]), (0, 0)]) for x in arrays)
    return keys, values
