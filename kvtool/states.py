"""One cache of one sequence as a plain value, whatever class of mlx-lm held it.

Axis letters: H KV heads, S rows (cached tokens), D head size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from formats.errors import IncompatibleError


@dataclass(frozen=True, eq=False)
class Quantized:
    """mlx's affine triplet of one role: weight (H, S, D * bits / 32) uint32, scales and biases (H, S, D / group_size)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, S, D) of the values."""
        heads, rows, groups = self.scales.shape
        return heads, rows, groups * self.group_size

    @property
    def dtype(self) -> mx.Dtype:
        """dtype of the values before they were quantised."""
        return self.scales.dtype

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.weight, self.scales, self.biases

    def dequantize(self) -> mx.array:
        """The values, (H, S, D), as mlx computes them."""
        return mx.dequantize(*self.parts, group_size=self.group_size, bits=self.bits)


@dataclass(frozen=True, eq=False)
class CacheState:
    """One cache of one sequence. Arrays are evaluated, may be views, and are not changed by later updates of the cache.

    cls: mlx-lm's class for one sequence (a row of BatchKVCache is a KVCache).
    attention: "full", "sliding", "chunked", "state" (ArraysCache) or "list" (CacheList).
    window: tokens a sliding layer attends to, or the chunk size.
    offset: tokens seen, the position of the next one.
    positions: [start, stop) ranges of the rows, in row order; sliding with `keep`: ((0, keep), (a, offset)).
    params: what the class needs beside that: max_size, keep, ring (physical slot of the next write); chunk_size; bits, group_size.
    k, v: (H, S, D), None without rows.
    arrays: recurrent state without the batch axis.
    """

    cls: str
    attention: str
    window: int | None = None
    offset: int = 0
    positions: tuple[tuple[int, int], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    k: mx.array | Quantized | None = None
    v: mx.array | Quantized | None = None
    arrays: tuple[mx.array | None, ...] = ()
    caches: tuple["CacheState", ...] = ()

    @property
    def rows(self) -> int:
        """S, the number of cached rows."""
        return sum(stop - start for start, stop in self.positions)


def length_of(states: Sequence[CacheState]) -> int:
    """Tokens seen by every layer: the length of the prefix that the states can replace.

    Raises:
        IncompatibleError: the layers disagree.
    """
    by_offset: dict[int, list[str]] = {}
    for where, leaf in leaves(states):
        # Recurrent state has no counter of its own: take_states writes its offset.
        if leaf.attention != "state" or (leaf.offset and any(a is not None for a in leaf.arrays)):
            by_offset.setdefault(leaf.offset, []).append(where.removeprefix("layer "))
    if len(by_offset) > 1:
        counts = "; ".join(f"{offset} in layer {', '.join(names)}" for offset, names in sorted(by_offset.items()))
        raise IncompatibleError(f"cache: the layers disagree on the tokens seen: {counts}")
    return next(iter(by_offset), 0)


def leaves(states: Sequence[CacheState], where: str = "layer ") -> Iterator[tuple[str, CacheState]]:
    """("layer 3" or "layer 3.1", state) of every cache that is not itself a list."""
    for i, state in enumerate(states):
        if state.attention == "list":
            yield from leaves(state.caches, f"{where}{i}.")
        else:
            yield f"{where}{i}", state
