"""Which cached rows a query sees: mlx-lm's masks, cut into tiles of columns.

A column is a cached row; the newest query stands at the last one. mlx-lm passes None (a query sees every column), "causal", or an array
over all columns, bool or added to the scores. A window of a layer is applied besides.
"""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant_mlx.native.attending import Sight


@dataclass(frozen=True, eq=False)
class Visibility:
    """For R rows of queries a KV head: G queries of a group x Q positions, in that order.

    Attributes:
        queries: Q.
        groups: G, query heads of a KV head.
        columns: S, with the queries' own.
        causal: a query sees no later column.
        window: if > 0, a query sees at most this many columns up to and with its own.
        mask: (1, H_q or 1, Q or 1, S), bool or float, or None.
    """

    queries: int
    groups: int
    columns: int
    causal: bool = False
    window: int = 0
    mask: mx.array | None = None

    @classmethod
    def of(cls, mask: mx.array | str | None, heads: int, kv_heads: int, queries: int, columns: int, window: int = 0) -> "Visibility":
        """From what a model passes to attention, for one sequence.

        Args:
            mask: None, "causal", or an array that broadcasts to (1, heads, queries, columns).

        Raises:
            ValueError: another string, or an array that does not fit.
        """
        groups = heads // kv_heads
        if mask is None:
            return cls(queries, groups, columns, False, window)
        if isinstance(mask, str):
            if mask != "causal":
                raise ValueError(f"[attention] mask must be None, 'causal' or an array, but got {mask!r}.")
            return cls(queries, groups, columns, queries > 1, window)
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        wanted = (1, heads, queries, columns)
        if mask.ndim > 4 or any(size not in (1, want) for size, want in zip(shape, wanted, strict=True)):
            raise ValueError(f"[attention] mask must broadcast to (1, H, Q, S) = {wanted}, but got {tuple(mask.shape)}.")
        mask = mask.reshape(shape)
        if shape[3] != columns:
            mask = mx.broadcast_to(mask, (*shape[:3], columns))
        return cls(queries, groups, columns, False, window, mask)

    @property
    def sight(self) -> Sight:
        """The same, for the native back end."""
        return Sight(self.columns, self.causal, self.window, self.mask)

    def tile(self, start: int, stop: int) -> mx.array | bool:
        """What queries see of columns start to stop: True for all, False for none, else (H or 1, R, n), bool or to be added."""
        newest, oldest = self.columns - 1, self.columns - self.queries
        if self.causal and start > newest:
            return False
        if self.window and stop <= oldest - self.window + 1:
            return False
        seen: mx.array | None = None
        at = mx.arange(oldest, self.columns)[:, None]
        column = mx.arange(start, stop)[None]
        if self.causal and stop - 1 > oldest:
            seen = column <= at
        if self.window and start <= newest - self.window:
            inside = column > at - self.window
            seen = inside if seen is None else seen & inside
        if seen is not None:
            seen = mx.broadcast_to(seen[None], (self.groups, *seen.shape)).reshape(1, -1, stop - start)
        if self.mask is None:
            return True if seen is None else seen
        # One mask for all heads, or one for each: those of a KV head's group are rows below each other.
        heads = self.groups if self.mask.shape[1] == 1 else self.mask.shape[1]
        mask = mx.broadcast_to(self.mask[..., start:stop], (1, heads, self.queries, stop - start))
        mask = mask.reshape(-1, self.groups * self.queries, stop - start)
        if seen is None:
            return mask
        return mask & seen if mask.dtype == mx.bool_ else mx.where(seen, mask, mx.array(-float("inf"), mask.dtype))


@dataclass(frozen=True, eq=False)
class BatchVisibility:
    """For sequences of a batch: their columns are padding first, then rows, and the newest query of each stands at the last column.

    Attributes:
        mask: (B, H_q or 1, Q, S), bool or to be added.
        starts: the column of each sequence's row 0, as `tile` counts rows.
        kv_heads: H.
        groups: G, query heads of a KV head.
        window: if > 0, a query sees at most this many columns up to and with its own.
        stacked: queries of all sequences are rows beside each other, B x G x Q a KV head; else sequences are heads, B x H of G x Q rows.
    """

    mask: mx.array
    starts: tuple[int, ...]
    kv_heads: int
    groups: int
    window: int = 0
    stacked: bool = True

    def tile(self, start: int, stop: int) -> mx.array | bool:
        """What queries see of rows start to stop: False for none, else (H or 1, B G Q, n) or (B H, G Q, n), bool or to be added."""
        heads, queries, columns = self.mask.shape[1:]
        firsts = [first + start for first in self.starts]
        count, oldest, newest = stop - start, columns - queries, columns - 1
        if self.window and max(firsts) + count <= oldest - self.window + 1:
            return False
        if len(set(firsts)) == 1:
            seen = self.mask[..., firsts[0] : firsts[0] + count]
        else:
            seen = mx.stack([own[..., first : first + count] for own, first in zip(self.mask, firsts, strict=True)])
        if self.window and min(firsts) <= newest - self.window:
            column = mx.array(firsts)[:, None, None, None] + mx.arange(count)
            inside = column > mx.arange(oldest, columns)[:, None] - self.window
            seen = seen & inside if seen.dtype == mx.bool_ else mx.where(inside, seen, mx.array(-float("inf"), seen.dtype))
        batch = len(firsts)
        seen = seen.reshape(batch, *((1, 1) if heads == 1 else (self.kv_heads, self.groups)), queries, count)
        if self.stacked:
            seen = mx.broadcast_to(seen, (batch, seen.shape[1], self.groups, queries, count))
            return seen.swapaxes(0, 1).reshape(seen.shape[1], -1, count)
        seen = mx.broadcast_to(seen, (batch, self.kv_heads, self.groups, queries, count))
        return seen.reshape(batch * self.kv_heads, -1, count)
