"""Attention on a CPU, in C++: of some sequences' queries to all that their caches hold, in one call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native.gradients import inference_only


class Shared(NamedTuple):
    """Parts that some sequences of a batch hold.

    Attributes:
        owners: which, ascending.
        columns: of each, the column of its position 0; less than 0 where a window has dropped rows.
        parts: as `part` makes them.
    """

    owners: Sequence[int]
    columns: Sequence[int]
    parts: Sequence[Any]


class Tail(NamedTuple):
    """Rows as they are, up to the last column.

    Attributes:
        keys, values: (B, H, T, D) float16, bfloat16 or float32, the last axis contiguous.
        starts: which row of each sequence is its first.
    """

    keys: mx.array
    values: mx.array
    starts: Sequence[int]


class Sight(NamedTuple):
    """What queries see: the newest stands at the last column.

    Attributes:
        columns: S.
        causal: no later column than its own.
        window: if > 0, at most this many columns up to and with its own.
        mask: (B or 1, H_q or 1, Q or 1, S), bool or added to the scores, or None.
    """

    columns: int
    causal: bool = False
    window: int = 0
    mask: mx.array | None = None


Pages = tuple[list[np.ndarray], int]


def part(
    k: Any, v: Any, at: tuple[int, int, int], first: int, angles: Pages | None = None, rope_first: int = 0, paired: bool = False
) -> Any:
    """Neighbouring rows, checked once, for any number of calls.

    Args:
        k, v: rows as `codecs._reading.RowReader.stored` gives them.
        at: where the rows start in k and in v, and how many.
        first: position of the first.
        angles: of these rows, for keys before RoPE: pages of cosines and sines, (n, dims) float32 each, and the row to begin at. Those of
            neighbouring positions: slow pairs are interpolated between a few rows, and one that is unlike its neighbours may not be seen.
        rope_first: index of the first rotated entry.
        paired: rotated entries of queries are interleaved (those of the keys are half-split).

    Raises:
        ValueError: sizes that do not fit.
    """
    return native.extension().Part(k, v, *at, first, angles, rope_first, paired)


@inference_only
def attend(
    q: mx.array, kv_heads: int, parts: Sequence[Shared], tail: Tail | None, sight: Sight, sinks: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Softmax attention.

    Args:
        q: (B, H_q, Q, D) float32, times the scale.
        kv_heads: H, which H_q is a multiple of.
        parts, tail: what the sequences hold.
        sight: what queries see of it.
        sinks: (H_q,) scores of learned sinks, or None.

    Returns:
        (out, lse): (B, H_q, Q, D_v) and (B, H_q, Q) float32; 0 and -inf for a query that sees none.

    Raises:
        ValueError: sizes that do not fit.
    """
    raw = None if tail is None else (native.shared(tail.keys), native.shared(tail.values), tail.starts)
    mask = None if sight.mask is None else _mask(sight.mask, sight.columns)
    scores = None if sinks is None else native.packed(sinks.astype(mx.float32))
    rest = (sight.columns, sight.causal, sight.window, mask, scores)
    out, lse = native.extension().attend(native.packed(q), kv_heads, parts, raw, *rest)
    return mx.array(out), mx.array(lse)


def most_rows() -> int:
    """Queries of a KV head that codes are decoded for at a time."""
    return native.extension().MOST_ROWS


def _mask(mask: mx.array, columns: int) -> np.ndarray:
    """The memory of a mask, bool as uint8, with neighbouring columns side by side."""
    if mask.shape[-1] != columns:
        mask = mx.broadcast_to(mask, (*mask.shape[:-1], columns))
    seen = native.shared(mask)
    if seen.shape[-1] > 1 and seen.strides[-1] != seen.itemsize:
        seen = native.packed(mask)
    return seen.view(np.uint8) if seen.dtype == np.bool_ else seen
