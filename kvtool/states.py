"""One cache of one sequence as a plain value, whatever class of mlx-lm held it.

Axis letters: H KV heads, S rows (cached tokens), D head size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from formats.errors import IncompatibleError, counted
from kvtool.probe import CacheProbe


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
        raise IncompatibleError(f"the layers disagree on the tokens seen: {counts}")
    return next(iter(by_offset), 0)


def leaves(states: Sequence[CacheState], where: str = "layer ") -> Iterator[tuple[str, CacheState]]:
    """("layer 3" or "layer 3.1", state) of every cache that is not itself a list."""
    for i, state in enumerate(states):
        if state.attention == "list":
            yield from leaves(state.caches, f"{where}{i}.")
        else:
            yield f"{where}{i}", state


def check_against(states: Sequence[CacheState], probes: Sequence[CacheProbe]) -> None:
    """Do these states fit the model that was probed: the same layers, and in each the same kind of attention, window and sizes?

    KVCache, ConcatenateKVCache and QuantizedKVCache hold the same rows, so the class itself may differ; the kind of attention may not:
    a RotatingKVCache (`max_kv_size`) where the model keeps every token has lost rows. Layers without rows pass.

    Raises:
        IncompatibleError: names each differing field (the cache's value, not the model's) and the layers where it differs.
    """
    if len(states) != len(probes):
        raise IncompatibleError(f"the cache has {counted(len(states), 'layer')}, the model {len(probes)}")
    problems: dict[str, list[str]] = {}
    for i, pair in enumerate(zip(states, probes, strict=True)):
        for where, text in _differences(str(i), *pair):
            problems.setdefault(text, []).append(where)
    if problems:
        texts = "; ".join(f"{text} in layer {', '.join(names)}" for text, names in problems.items())
        raise IncompatibleError(f"the cache does not fit the model: {texts}", hint=_limit_hint(states, probes))


def _limit_hint(states: Sequence[CacheState], probes: Sequence[CacheProbe]) -> str | None:
    """What to do about a cache that mlx-lm's `max_kv_size` has cut, or None where that is not what is wrong."""
    for state, probe in zip(states, probes, strict=True):
        if state.attention == "sliding" and probe.attention == "full" and state.positions:
            first = state.positions[0][1] if len(state.positions) > 1 else 0
            last = state.positions[-1][0] - 1
            return f"made with max_kv_size={state.window}, so rows {first} to {last} were dropped; make it again without max_kv_size"
    return None


def _differences(where: str, state: CacheState, probe: CacheProbe) -> Iterator[tuple[str, str]]:
    if state.attention != probe.attention:
        yield where, f"{_kind(state)}, not {_kind(probe)}"
        return
    if len(state.caches) != len(probe.caches):
        yield where, f"{counted(len(state.caches), 'cache')}, not {len(probe.caches)}"
        return
    for i, pair in enumerate(zip(state.caches, probe.caches, strict=True)):
        yield from _differences(f"{where}.{i}", *pair)
    fields: list[tuple[str, Any, Any]] = [
        ("window", state.window, probe.window),
        ("keep", state.params.get("keep", 0), probe.params.get("keep", 0)),
        ("state arrays", len(state.arrays), len(probe.arrays)),
    ]
    for name, array, role in (("K", state.k, probe.k), ("V", state.v, probe.v)):
        if array is not None:
            if not mx.issubdtype(array.dtype, mx.floating):
                fields.append((f"{name} dtype", array.dtype, getattr(role, "dtype", None)))
            heads, _, dim = array.shape
            fields += [(f"{name} heads", heads, getattr(role, "heads", None)), (f"{name} dim", dim, getattr(role, "dim", None))]
    for i, (a, p) in enumerate(zip(state.arrays, probe.arrays, strict=False)):
        # Integer state is a window of token ids, whose length varies.
        if a is None or p is None:
            continue
        if mx.issubdtype(a.dtype, mx.floating) != mx.issubdtype(p.dtype, mx.floating):
            fields.append((f"state array {i} dtype", a.dtype, p.dtype))
        elif mx.issubdtype(a.dtype, mx.floating):
            fields.append((f"state array {i} shape", tuple(a.shape), p.shape))
    yield from ((where, f"{name} {ours}, not {theirs}") for name, ours, theirs in fields if ours != theirs)


def _kind(cache: CacheState | CacheProbe) -> str:
    return f"{cache.attention} ({cache.cls}{'' if cache.window is None else f', {cache.window}'})"
