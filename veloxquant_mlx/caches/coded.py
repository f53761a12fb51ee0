"""One mlx-lm cache around any codec: codes stay in memory, and attention reads them as they are.

    [ blocks: what a file held, then what this cache encoded itself ][ tail: the newest rows in the model's dtype ]

Blocks are immutable and shared between forks. New rows join the tail; once `recent` + BLOCK rows are there, the older ones leave it, BLOCK
or a multiple at a time, encoded by the cache's `Growth` (without one the tail keeps them). The first `sink` rows become an exact block.
Attention to each block and to the tail merges by log-sum-exp.

`update_and_fetch` returns no arrays but a `Fetched`, which attention recognises (`caches.hook`). Models that do anything else with what a
cache returns cannot use it (`caches.families` says which).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from veloxquant_mlx.caches.batch import BatchCodedKVCache
from veloxquant_mlx.caches.blocks import Block, CodedRows, attend, merged, native_in_use, native_parts, tile_tokens
from veloxquant_mlx.caches.hook import hold
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.codecs import CODECS
from veloxquant_mlx.codecs._base import FLOAT16_MAX, FLOATS, Codec
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.native import attending
from veloxquant_mlx.native.attending import Shared, Tail
from veloxquant_mlx.transfer.rope_spec import RopeSpec

BLOCK = 256  # rows that leave the tail together: a codec that stores a mean of its rows stores one for them
STEP = 64  # rows that the tail's buffers grow by
_DTYPES = {name: dtype for dtype, name in FLOATS.items()}


@dataclass(frozen=True)
class Growth:
    """How a cache encodes the rows that leave its tail.

    Attributes:
        k, v: codecs, bound; each encodes any rows of its layer by itself.
        rope: the model's rotation of the keys where they are stored before it; None: they are stored as cached.
        sink: rows at positions below it stay exact.
        recent: newest rows that stay exact.
    """

    k: Codec
    v: Codec
    rope: RopeSpec | None = None
    sink: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        for name in ("sink", "recent"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"[Growth] {name} must be an integer of at least 0, but got {getattr(self, name)!r}.")
        for codec in (self.k, self.v):
            if codec.eager or codec.calibration is not None or codec.after is not None:
                raise ValueError(f"[Growth] {codec.id} cannot encode rows as they come: give tc-N, or a codec without calibration.")

    def leaving(self, first: int, count: int) -> list[tuple[int, bool]]:
        """What leaves a tail of `count` rows from position `first` on, oldest first: how many rows, and whether as they are."""
        leaving = []
        if first < self.sink and count >= self.sink - first + self.recent + BLOCK:
            leaving.append((self.sink - first, True))
            first, count = self.sink, count - (self.sink - first)
        older = (count - self.recent) // BLOCK * BLOCK
        return [*leaving, (older, False)] if older > 0 and first >= self.sink else leaving

    def encoded(self, keys: mx.array, values: mx.array, first: int) -> Block:
        """Rows as cached, (H, S, D), at positions from `first` on."""
        k = CodedRows.encoded(self.k, keys, first, self.rope)
        given = {"k": self.k.decode(k.parts, k.shape, mx.float32)} if self.v.needs else None
        return Block(k, CodedRows.encoded(self.v, values, first, None, given), keys.shape[1], first)


@dataclass(frozen=True, eq=False)
class Fetched:
    """What attention gets in place of keys or values: the rows of a cache as they stand, frozen.

    Attributes:
        blocks: codes, oldest first.
        keys, values: (H, T, D) of the tail.
        window: a query sees at most this many rows, 0 for all.
    """

    blocks: tuple[Block, ...]
    keys: mx.array
    values: mx.array
    window: int

    def attend(self, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None = None) -> mx.array:
        """Softmax attention.

        Args:
            queries: (1, H_q, Q, D), the newest Q rows' own.
            scale: of the scores.
            mask: None, "causal", or an array that broadcasts to (1, H_q, Q, S), bool or added.
            sinks: (H_q,) scores of learned sinks, or None.

        Returns:
            (1, H_q, Q, D_v) in the dtype of the queries. A query that sees nothing gets 0.

        Raises:
            ValueError: shapes that do not fit.
        """
        if not self.blocks and not self.window:
            k, v = self.keys[None], self.values[None]
            return mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask, sinks=sinks)
        batch, heads, count, dim = queries.shape
        kv_heads, _, size = self.keys.shape
        if batch != 1 or heads % kv_heads or dim != size:
            raise ValueError(
                f"[attention] queries must be (1, H_q, Q, {size}) with H_q a multiple of {kv_heads}, but got {tuple(queries.shape)}."
            )
        first, exact = sum(block.count for block in self.blocks), self.keys.shape[1]
        columns = first + exact
        if isinstance(mask, mx.array) and self.window and mask.shape[-1] > columns:
            mask = mask[..., -columns:]  # rows that left the window since the mask was made
        seen = Visibility.of(mask, heads, kv_heads, count, columns, self.window)
        q = queries.astype(mx.float32) * scale
        parts, rest = native_parts(self.blocks)
        tail = Tail(self.keys[None], self.values[None], (0,)) if exact and native_in_use(dim, self.values.shape[2]) else None
        found = []
        if parts or tail is not None:
            shared = [Shared((0,), (-self.blocks[0].first,), parts)] if parts else []
            found.append(attending.attend(q, kv_heads, shared, tail, seen.sight, sinks))
        by_tile = [(block, block.first - self.blocks[0].first) for block in rest]
        by_tile += [(Block.exact(self.keys, self.values, 0), first)] if exact and tail is None else []
        if by_tile:
            out, lse = attend(by_tile, q.reshape(kv_heads, -1, dim), seen, tile_tokens(kv_heads, dim))
            found.append((out.reshape(1, heads, count, -1), lse.reshape(1, heads, count)))
        if sinks is not None and not (parts or tail is not None):
            lse = mx.broadcast_to(sinks.astype(mx.float32)[:, None], (1, heads, count))
            found.append((mx.zeros((1, heads, count, self.values.shape[2])), lse))
        return merged(found)[0].astype(queries.dtype)


class CodedKVCache(_BaseCache):
    """An mlx-lm cache of one sequence.

    Args:
        blocks: rows that are there already, oldest first, at neighbouring positions.
        growth: how older rows of the tail are encoded; None keeps them as they are.
        window: if > 0, of a sliding layer: blocks that no later query sees are dropped.

    Raises:
        ValueError: blocks that do not follow one another, or a negative window.
    """

    # mlx-lm passes a cache that has `bits` on to the one function that the hook replaces, and never asks what they are.
    bits = 0
    group_size = 0

    def __init__(self, blocks: tuple[Block, ...] | list[Block] = (), growth: Growth | None = None, window: int = 0) -> None:
        blocks = tuple(blocks)
        for before, after in pairwise(blocks):
            if before.stop != after.first:
                raise ValueError(
                    f"[CodedKVCache] blocks must follow one another, but one ends at {before.stop} and the next starts at {after.first}."
                )
            if _sizes(before) != _sizes(after):
                raise ValueError(f"[CodedKVCache] blocks must have the same (H, D, D_v), but got {_sizes(before)} and {_sizes(after)}.")
        if type(window) is not int or window < 0:
            raise ValueError(f"[CodedKVCache] window must be an integer of at least 0, but got {window!r}.")
        self.blocks, self.growth, self.window = blocks, growth, window
        self._tail: tuple[mx.array, mx.array] | None = None
        self._rows = 0  # of the tail
        self._tail_first = blocks[-1].stop if blocks else 0
        hold(self)

    # --- mlx-lm's protocol

    @property
    def offset(self) -> int:
        """Tokens seen: the position of the next one."""
        return self._tail_first + self._rows

    @property
    def columns(self) -> int:
        """Rows held, which masks count."""
        return self.offset - (self.blocks[0].first if self.blocks else self._tail_first)

    @property
    def tail_first(self) -> int:
        """Position of the first row in the tail."""
        return self._tail_first

    @property
    def tail(self) -> tuple[mx.array, mx.array] | None:
        """Keys and values of the tail, (H, T, D), or None without any yet."""
        return None if self._tail is None else (self._tail[0][:, : self._rows], self._tail[1][:, : self._rows])

    def set_tail(self, keys: mx.array, values: mx.array, first: int) -> None:
        """Replace the tail by rows (H, T, D) from position `first` on, where the blocks end."""
        self._tail, self._rows, self._tail_first = (keys, values), keys.shape[1], first

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchCodedKVCache:
        """A batch of these caches and KVCaches (or, of sliding layers, RotatingKVCaches)."""
        return BatchCodedKVCache.merge(caches)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Fetched, Fetched]:
        """Add rows (1, H, N, D); returns all of them for attention alone."""
        self._check_rows(keys, values)
        self.encode_older()
        self._append(keys[0], values[0])
        tail = [x[:, : self._rows] for x in self._tail or ()]
        fetched = Fetched(self.blocks, tail[0], tail[1], self.window)
        return fetched, fetched

    def encode_older(self) -> None:
        """Encode what the tail holds beyond its window, and drop blocks that no later query sees."""
        if self.growth is not None:
            for count, exact in self.growth.leaving(self._tail_first, self._rows):
                self._leave(count, exact)
        if self.window:
            self.blocks = tuple(block for block in self.blocks if block.stop > self.offset - self.window + 1)

    def _leave(self, count: int, exact: bool) -> None:
        assert self._tail is not None and self.growth is not None
        keys, values = (mx.contiguous(x[:, :count]) for x in self._tail)
        mx.eval(keys, values)
        block = Block.exact(keys, values, self._tail_first) if exact else self.growth.encoded(keys, values, self._tail_first)
        rest = self._rows - count
        self._tail = _grown([x[:, count : self._rows] for x in self._tail], rest)
        mx.eval(self._tail)
        self._rows, self._tail_first = rest, self._tail_first + count
        self.blocks = (*self.blocks, block)

    def _append(self, keys: mx.array, values: mx.array) -> None:
        count = keys.shape[1]
        if self._tail is None:
            self._tail = tuple(mx.zeros((x.shape[0], 0, x.shape[2]), x.dtype) for x in (keys, values))
        if self._rows + count > self._tail[0].shape[1]:
            self._tail = _grown([x[:, : self._rows] for x in self._tail], self._rows + count)
        at = mx.array([self._rows])
        # Not by assignment to a slice, which would change the array under a fork that holds it too.
        self._tail = tuple(mx.slice_update(x, new.astype(x.dtype), at, (1,)) for x, new in zip(self._tail, (keys, values), strict=True))
        self._rows += count

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        held = [_sizes(block) for block in self.blocks[:1]]
        held += [(self._tail[0].shape[0], self._tail[0].shape[2], self._tail[1].shape[2])] if self._tail is not None else []
        if (keys.ndim, values.ndim) != (4, 4) or keys.shape[0] != 1 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"[CodedKVCache] rows must be (1, H, N, D), but got {tuple(keys.shape)} and {tuple(values.shape)}; merge for a batch."
            )
        got = (keys.shape[1], keys.shape[3], values.shape[3])
        if held and got != held[0]:
            raise ValueError(f"[CodedKVCache] rows must have (H, D, D_v) = {held[0]}, but got {got}.")

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """All rows decoded, (1, H, S, D) each in the model's dtype, or None without rows: full arrays, for whoever needs them."""
        pieces = [block.rows() for block in self.blocks]
        if self._tail is not None and self._rows:
            pieces.append((self._tail[0][:, : self._rows], self._tail[1][:, : self._rows]))
        if not pieces:
            return None, None
        dtypes = [x.dtype for x in self._tail] if self._tail is not None else [self.blocks[-1].k.dtype, self.blocks[-1].v.dtype]
        joined = (mx.concatenate([_cast(piece[i], dtypes[i]) for piece in pieces], axis=1)[None] for i in (0, 1))
        keys, values = joined
        return keys, values

    @property
    def keys(self) -> mx.array | None:
        """Decoded keys; mlx-lm's own merge of a batch reads them where the first cache of the batch is a KVCache."""
        return self.keys_and_values()[0]

    @property
    def values(self) -> mx.array | None:
        """Decoded values, see `keys`."""
        return self.keys_and_values()[1]

    def make_mask(self, N: int, *, return_array: bool = False, window_size: int | None = None, **_: Any) -> mx.array | str | None:
        """As a KVCache's over the rows held; the layer's own window is applied by attention."""
        window = None if self.window else window_size
        return create_attention_mask(N, offset=self.columns, return_array=return_array, window_size=window)

    def size(self) -> int:
        return self.columns

    def empty(self) -> bool:
        return self.columns == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: codes with side information, and the tail as allocated. Forks count shared blocks each."""
        unique = {id(part): part.nbytes for block in self.blocks for coded in (block.k, block.v) for part in coded.parts.values()}
        return sum(unique.values()) + sum(x.nbytes for x in self._tail or ())

    def specs(self) -> set[str]:
        """Specs of the lossy codecs that hold rows now, such as "k=rvq-4,v=rvq-4"."""
        lossy = [block for block in self.blocks if not (isinstance(block.k.codec, Raw) and isinstance(block.v.codec, Raw))]
        return {f"k={block.k.codec.spec('k')},v={block.v.codec.spec('v')}" for block in lossy}

    def is_trimmable(self) -> bool:
        """False once a window has dropped rows that a shorter sequence would see."""
        return not self.window or self.offset == self.columns

    def trim(self, n: int) -> int:
        """Forget the newest n rows; returns how many there were to forget. Codes of a block that is cut stay in memory.

        Raises:
            ValueError: n is negative, or rows that a shorter sequence would see have left the window.
        """
        if type(n) is not int or n < 0:
            raise ValueError(f"[CodedKVCache] n must be an integer of at least 0, but got {n!r}.")
        if n and not self.is_trimmable():
            held = f"{self.columns} of {self.offset} rows are here"
            raise ValueError(f"[CodedKVCache] n must be 0 once rows have left the window of {self.window} ({held}), but got {n}.")
        n = min(self.columns, n)
        kept = self.offset - n
        self._rows = max(0, self._rows - n)
        if kept < self._tail_first:
            self.blocks = tuple(
                block if block.stop <= kept else block.kept(block.first, kept) for block in self.blocks if block.first < kept
            )
            self._tail_first = kept
        return n

    # --- copies

    def fork(self) -> "CodedKVCache":
        """A cache that goes on by itself from here. Blocks are shared; nothing is copied until it is written."""
        other = CodedKVCache(self.blocks, self.growth, self.window)
        if self._tail is not None:
            mx.eval(self._tail)  # another thread may go on with it
        other._tail, other._rows, other._tail_first = self._tail, self._rows, self._tail_first
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "CodedKVCache":
        return self.fork()

    __copy__ = fork

    # RotatingKVCache.merge asks these of the caches beside it.

    @property
    def max_size(self) -> int:
        return self.window

    def _temporal_order(self, rows: mx.array) -> mx.array:
        return rows

    @property
    def state(self) -> tuple[str, list[mx.array]]:
        """JSON of all that is not an array, and the arrays: what mlx-lm evaluates, saves and hands to `from_state`."""
        arrays: list[mx.array] = []
        blocks = [_block_json(block, arrays) for block in self.blocks]
        tail = None if self._tail is None else [_put(arrays, x[:, : self._rows]) for x in self._tail]
        about = {
            "blocks": blocks,
            "growth": _growth_json(self.growth),
            "window": self.window,
            "tail": tail,
            "first": self._tail_first,
        }
        return json.dumps(about), arrays

    @state.setter
    def state(self, value: tuple[str, list[mx.array]]) -> None:
        text, arrays = value
        about = json.loads(text)
        arrays = list(arrays)
        self.__init__([_block_of(block, arrays) for block in about["blocks"]], _growth_of(about["growth"]), about["window"])  # type: ignore[misc]
        self._tail_first = about["first"]
        if about["tail"] is not None:
            self._tail = tuple(arrays[i] for i in about["tail"])
            self._rows = self._tail[0].shape[1]


BatchCodedKVCache.single = CodedKVCache
# mlx-lm looks the classes of a prompt-cache file up in its own module.
mlx_lm.models.cache.CodedKVCache = CodedKVCache


def _sizes(block: Block) -> tuple[int, int, int]:
    """(H, D, D_v)."""
    return block.k.shape[0], block.k.shape[2], block.v.shape[2]


def _grown(arrays: list[mx.array], rows: int) -> tuple[mx.array, mx.array]:
    """(H, T, D) arrays in buffers of at least `rows` rows, a multiple of STEP."""
    room = -(-rows // STEP) * STEP
    keys, values = (mx.pad(x, [(0, 0), (0, room - x.shape[1]), (0, 0)]) for x in arrays)
    return keys, values


def _cast(rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Rows in a model's dtype. A value close to float16's end must not become Inf by the codec's error."""
    clipped = dtype == mx.float16 and rows.dtype != dtype
    return (mx.clip(rows, -FLOAT16_MAX, FLOAT16_MAX) if clipped else rows).astype(dtype)


def _put(arrays: list[mx.array], array: mx.array) -> int:
    arrays.append(array)
    return len(arrays) - 1


def _codec_json(codec: Codec) -> dict[str, Any]:
    return {"id": codec.id, "params": codec.to_params()}


def _codec_of(about: dict[str, Any]) -> Codec:
    codec = CODECS[about["id"]].from_params(about["params"])
    if codec.calibration is not None:
        raise ValueError(
            f"[CodedKVCache] the tables of {codec.id} are in calibration {codec.calibration}, not in this state: save with kvtool."
        )
    return codec


def _coded_json(coded: CodedRows, arrays: list[mx.array]) -> dict[str, Any]:
    return {
        "codec": _codec_json(coded.codec),
        "parts": {name: _put(arrays, part) for name, part in coded.parts.items()},
        "shape": coded.shape,
        "dtype": FLOATS[coded.dtype],
        "rope": None if coded.rope is None else coded.rope.to_json(),
    }


def _coded_of(about: dict[str, Any], arrays: list[mx.array]) -> CodedRows:
    heads, rows, dim = about["shape"]
    return CodedRows(
        Raw() if about["codec"]["id"] == Raw.id else _codec_of(about["codec"]),
        {name: arrays[i] for name, i in about["parts"].items()},
        (heads, rows, dim),
        _DTYPES[about["dtype"]],
        None if about["rope"] is None else RopeSpec.from_json(about["rope"]),
    )


def _block_json(block: Block, arrays: list[mx.array]) -> dict[str, Any]:
    numbers = {name: getattr(block, name) for name in ("count", "first", "k_from", "v_from")}
    return {"k": _coded_json(block.k, arrays), "v": _coded_json(block.v, arrays), **numbers}


def _block_of(about: dict[str, Any], arrays: list[mx.array]) -> Block:
    k, v = _coded_of(about["k"], arrays), _coded_of(about["v"], arrays)
    return Block(k, v, about["count"], about["first"], about["k_from"], about["v_from"])


def _growth_json(growth: Growth | None) -> dict[str, Any] | None:
    if growth is None:
        return None
    rope = None if growth.rope is None else growth.rope.to_json()
    return {"k": _codec_json(growth.k), "v": _codec_json(growth.v), "rope": rope, "sink": growth.sink, "recent": growth.recent}


def _growth_of(about: dict[str, Any] | None) -> Growth | None:
    if about is None:
        return None
    rope = None if about["rope"] is None else RopeSpec.from_json(about["rope"])
    return Growth(_codec_of(about["k"]), _codec_of(about["v"]), rope, about["sink"], about["recent"])
