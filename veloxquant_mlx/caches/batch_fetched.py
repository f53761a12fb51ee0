"""What attention is given of a batch of coded caches: rows of blocks and one array of tails, as keys or values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from veloxquant_mlx.caches.blocks import Block, attend, merged, native_in_use, native_parts, tile_tokens
from veloxquant_mlx.caches.visibility import BatchVisibility
from veloxquant_mlx.native import attending
from veloxquant_mlx.native.attending import Shared, Sight, Tail


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence of a batch.

    Attributes:
        blocks: codes, oldest first.
        growth: how rows that leave its tail are encoded (`coded.Growth`), or None: they stay exact.
        first: position of the first row in the tail.
        left: column of position 0; less than 0 where a window has dropped that many rows.
        end: column after its last token while padding follows that, else None.
    """

    blocks: tuple[Block, ...]
    growth: Any
    first: int
    left: int
    end: int | None = None

    def tokens(self, length: int) -> int:
        """Position after its newest token in a batch of that many columns."""
        return max(self.first, (length if self.end is None else min(length, self.end)) - self.left)

    @property
    def oldest(self) -> int:
        """Position of its oldest row."""
        return self.blocks[0].first if self.blocks else self.first


@dataclass(frozen=True, eq=False)
class BatchFetched:
    """What attention gets in place of keys or values: the rows of a batch as they stand, frozen.

    Attributes:
        rows: the sequences.
        keys, values: (B, H, T, D) of the tails, which end at the last column.
        length: columns.
        window: a query sees at most this many columns, 0 for all.
    """

    rows: tuple[Row, ...]
    keys: mx.array
    values: mx.array
    length: int
    window: int

    def attend(self, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None = None) -> mx.array:
        """Softmax attention.

        Args:
            queries: (B, H_q, Q, D), of the newest Q columns.
            scale: of the scores.
            mask: an array that broadcasts to (B, H_q, Q, columns), bool or added; None: all columns but padding; "causal".
            sinks: (H_q,) scores of learned sinks, or None.

        Returns:
            (B, H_q, Q, D_v) in the dtype of the queries.

        Raises:
            ValueError: shapes that do not fit.
        """
        batch, heads, count, dim = queries.shape
        kv_heads, columns = self.keys.shape[1:3]
        if batch != len(self.rows) or heads % kv_heads:
            raise ValueError(
                f"[attention] queries must be ({len(self.rows)}, H_q, Q, D) with H_q a multiple of {kv_heads}, "
                f"but got {tuple(queries.shape)}."
            )
        start = self.length - columns
        given = self._given(mask, heads, count)
        if not self.window and not any(row.blocks for row in self.rows):
            near = self._whole(given, isinstance(mask, str), count)[..., start:]
            return mx.fast.scaled_dot_product_attention(queries, self.keys, self.values, scale=scale, mask=near, sinks=sinks)
        q = queries.astype(mx.float32) * scale
        shared, rest, tail = [], {}, None
        for owners, blocks in self._shared().items():
            parts, others = native_parts(blocks)
            shared += [Shared(owners, [self.rows[owner].left for owner in owners], parts)] if parts else []
            rest |= {owners: others} if others else {}
        if native_in_use(dim, self.values.shape[3]):
            tail = Tail(self.keys, self.values, [row.left + row.first - start for row in self.rows])
        found = []
        if shared or tail is not None:
            sight = Sight(self.length, isinstance(mask, str), self.window, given)
            found.append(attending.attend(q, kv_heads, shared, tail, sight, sinks))
        if rest or tail is None:
            whole = self._whole(given, isinstance(mask, str), count)
            found.append(self._by_tiles(q, whole, rest, tail is None, None if found else sinks))
        return merged(found)[0].astype(queries.dtype)

    def _by_tiles(
        self, q: mx.array, mask: mx.array, shared: dict[tuple[int, ...], list[Block]], tails: bool, sinks: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Attention by MLX to blocks, and to the tails where asked for: (B, H_q, Q, D_v) and (B, H_q, Q)."""
        batch, heads, count, dim = q.shape
        kv_heads, columns = self.keys.shape[1:3]
        groups, tile = heads // kv_heads, tile_tokens(kv_heads, dim)
        q = q.reshape(batch, kv_heads, groups * count, dim)
        found: list[tuple[mx.array, mx.array]] = []  # (n, H, G Q, D_v) and (n, H, G Q): attention of rows to some of what they hold
        places: list[list[int]] = [[] for _ in self.rows]  # of each row in these
        for owners, blocks in shared.items():
            of = mx.array(owners)
            lefts = tuple(self.rows[owner].left for owner in owners)
            seen = BatchVisibility(mask[of], lefts, kv_heads, groups, self.window)
            own = q[of].swapaxes(0, 1).reshape(kv_heads, -1, dim)
            out, lse = attend(((block, block.first) for block in blocks), own, seen, tile)
            rows = (kv_heads, len(owners), groups * count)
            self._put(found, places, owners, out.reshape(*rows, -1).swapaxes(0, 1), lse.reshape(rows).swapaxes(0, 1))
        if tails:
            self._put(found, places, range(batch), *self._tails(q, mask[..., self.length - columns :], groups))
        outs, lses = (mx.concatenate(x) for x in zip(*found, strict=True))
        # The last place is of attention to nothing: rows have unlike numbers of parts.
        none = outs.shape[0]
        outs = mx.concatenate([outs, mx.zeros((1, *outs.shape[1:]))])
        lses = mx.concatenate([lses, mx.full((1, *lses.shape[1:]), -float("inf"))])
        most = max(map(len, places))
        at = mx.array([[*place, *[none] * (most - len(place))] for place in places])
        parts = [(outs[at[:, i]], lses[at[:, i]]) for i in range(most)]
        if sinks is not None:
            score = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, kv_heads, groups, 1), (batch, kv_heads, groups, count))
            parts.append((mx.zeros_like(parts[0][0]), score.reshape(batch, kv_heads, -1)))
        out, lse = merged(parts)
        return out.reshape(batch, heads, count, -1), lse.reshape(batch, heads, count)

    def _given(self, mask: mx.array | str | None, heads: int, queries: int) -> mx.array | None:
        """An array's mask as (B or 1, H_q or 1, Q or 1, columns or 1), else None."""
        if not isinstance(mask, mx.array):
            if mask not in (None, "causal"):
                raise ValueError(f"[attention] mask must be None, 'causal' or an array, but got {mask!r}.")
            return None
        if self.window and mask.shape[-1] > self.length:
            mask = mask[..., -self.length :]  # columns that left the window since the mask was made
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        wanted = (len(self.rows), heads, queries, self.length)
        if mask.ndim > 4 or any(size not in (1, want) for size, want in zip(shape, wanted, strict=True)):
            raise ValueError(f"[attention] mask must broadcast to (B, H_q, Q, S) = {wanted}, but got {tuple(mask.shape)}.")
        return mask.reshape(shape)

    def _whole(self, given: mx.array | None, causal: bool, queries: int) -> mx.array:
        """The mask as (B, H_q or 1, Q, columns)."""
        batch = len(self.rows)
        if given is not None:
            return mx.broadcast_to(given, (batch, given.shape[1], queries, self.length))
        column = mx.arange(self.length)
        seen = column >= mx.array([row.left for row in self.rows])[:, None, None, None]
        if causal:
            seen = seen & (column <= mx.arange(self.length - queries, self.length)[:, None])
        return mx.broadcast_to(seen, (batch, 1, queries, self.length))

    def _shared(self) -> dict[tuple[int, ...], list[Block]]:
        """Blocks by the rows that hold them."""
        owners: dict[int, tuple[Block, list[int]]] = {}
        for i, row in enumerate(self.rows):
            for block in row.blocks:
                owners.setdefault(id(block), (block, []))[1].append(i)
        blocks: dict[tuple[int, ...], list[Block]] = {}
        for block, rows in owners.values():
            blocks.setdefault(tuple(rows), []).append(block)
        return blocks

    def _tails(self, q: mx.array, mask: mx.array, groups: int) -> tuple[mx.array, mx.array]:
        """Attention to the tails: sequences beside each other as heads. A row's tail starts where its blocks end."""
        batch, kv_heads, columns, _ = self.keys.shape
        column = mx.arange(self.length - columns, self.length)
        held = column >= mx.array([row.left + row.first for row in self.rows])[:, None, None, None]
        mask = mask & held if mask.dtype == mx.bool_ else mx.where(held, mask, mx.array(-float("inf"), mask.dtype))
        seen = BatchVisibility(mask, (0,) * batch, kv_heads, groups, self.window, stacked=False)
        keys, values = (x.reshape(-1, columns, x.shape[-1]) for x in (self.keys, self.values))
        tile = tile_tokens(batch * kv_heads, keys.shape[-1])
        out, lse = Block.exact(keys, values, 0).attend_tiles(q.reshape(batch * kv_heads, -1, q.shape[-1]), seen, 0, tile)
        return out.reshape(batch, kv_heads, *out.shape[1:]), lse.reshape(batch, kv_heads, -1)

    @staticmethod
    def _put(found: list, places: list[list[int]], owners: Sequence[int], out: mx.array, lse: mx.array) -> None:
        first = sum(part.shape[0] for part, _ in found)
        found.append((out, lse))
        for i, owner in enumerate(owners):
            places[owner].append(first + i)
