"""A cache that codes rows as they leave the exact window, so that their error is in every later forward. It measures quality, not memory.

A query at position p attends to sinks and to the newest `recent` positions (p's own included) as they are, and to older ones decoded:
decoded j <= p - recent, exact j < sink or j > p - recent. Both copies of a row that some queries of one forward see exactly and others
decoded are in the returned keys, and the mask picks for each query, so the forward's length changes nothing but the blocks: those rows
that leave the window in one forward are encoded together (a codec that stores a mean of its rows stores one a block).
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from formats.errors import IncompatibleError
from kvtool.probe import CacheProbe
from kvtool.roundtrip import Roundtrip


class StreamingCache(KVCache):
    """An mlx-lm cache for one sequence, of a layer with full attention.

    It measures quality, not memory: exact and decoded rows are both held in full.
    """

    def __init__(self, name: str, probe: CacheProbe, trip: Roundtrip) -> None:
        super().__init__()
        self.name, self.probe, self.trip = name, probe, trip
        self.decoded: dict[str, mx.array] = {}

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The rows that this forward's queries see, in the order of `make_mask`; keys and values (1, H, N, D)."""
        begin = self.offset
        whole = super().update_and_fetch(keys, values)
        sink, recent = self.trip.plan.sink, self.trip.plan.recent
        coded, after = max(sink, begin - recent), max(sink, self.offset - recent)
        _, exact = self._columns(begin, self.offset)
        index = mx.array(exact)
        fetched = []
        for role, rows in zip("kv", whole, strict=True):
            probe = self.probe.k if role == "k" else self.probe.v
            assert probe is not None
            pieces = [self.decoded[role]] if role in self.decoded else []
            if after > coded:
                at = np.arange(coded, after)
                pieces.append(self.trip.rows(self.name, role, rows[0, :, coded:after], at, probe)[None])
                self.decoded[role] = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)
                mx.eval(self.decoded[role])
                pieces = [self.decoded[role]]
            fetched.append(mx.concatenate([*pieces, rows[:, :, index]], axis=2))
        return fetched[0], fetched[1]

    def make_mask(self, N: int, *, window_size: int | None = None, **_: Any) -> mx.array:
        """(N, decoded + exact rows), true where a query of the next N tokens sees a row."""
        decoded, exact = self._columns(self.offset, self.offset + N)
        query = np.arange(self.offset, self.offset + N)[:, None]
        left = query - self.trip.plan.recent
        mask = np.concatenate([decoded <= left, (exact <= query) & ((exact < self.trip.plan.sink) | (exact > left))], axis=1)
        if window_size is not None:
            mask &= np.concatenate([decoded, exact]) > query - window_size
        return mx.array(mask)

    def count_exact(self) -> None:
        """Add the rows that stay exact now, at the end, to the round trip's count."""
        if self.keys is None:
            return
        rows = self.offset - sum(x.shape[2] for x in [self.decoded.get("k")] if x is not None)
        for array in (self.keys, self.values):
            self.trip.exact((array.shape[1], rows, array.shape[3]), array.dtype)

    def _columns(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the decoded and of the exact rows that a forward of positions begin to end sees."""
        sink, recent = self.trip.plan.sink, self.trip.plan.recent
        decoded = np.arange(sink, max(sink, end - recent))
        first = max(min(sink, end), begin - recent + 1)
        return decoded, np.concatenate([np.arange(min(sink, end)), np.arange(first, max(first, end))])


def streaming_caches(probes: tuple[CacheProbe, ...], trip: Roundtrip) -> list[StreamingCache]:
    """One empty streaming cache a layer.

    Raises:
        IncompatibleError: a layer is not full attention with keys and values.
    """
    for i, probe in enumerate(probes):
        if probe.cls != "KVCache" or probe.k is None or probe.v is None:
            raise IncompatibleError(
                f"layer {i} has a {probe.cls} ({probe.attention}); the streaming protocol needs full attention in every layer",
                hint="use --protocol prefix",
            )
    return [StreamingCache(f"{i}", probe, trip) for i, probe in enumerate(probes)]
