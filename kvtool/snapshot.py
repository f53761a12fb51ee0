"""Live mlx-lm caches to plain values and back, without a padding, trimmed or evicted row.

`take_states` reads one sequence out of a list of caches; `build_caches` makes caches that continue where those stood, bit for bit.
Axis letters: H KV heads, S rows (cached tokens), D head size. The layouts read here are those of `mlx_lm.models.cache` 0.32.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from formats.errors import IncompatibleError
from kvtool.probe import CacheProbe
from kvtool.states import CacheState, Quantized, check_against, leaves, length_of
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.caches.evicting import EvictingCache

__all__ = ["CacheState", "Quantized", "build_caches", "check_against", "leaves", "length_of", "take_states", "unlimited"]


def take_states(cache: Sequence[Any], *, row: int | None = None, length: int | None = None) -> tuple[CacheState, ...]:
    """The live rows of every layer's cache, in temporal order.

    Args:
        cache: mlx-lm caches, one per layer; left unchanged.
        row: the sequence to take; required where a cache holds more than one.
        length: tokens seen, required where no layer counts them (recurrent models); elsewhere checked.

    Raises:
        ValueError: no or no valid `row`, `length` missing, or a batch between `prepare` and `finalize`.
        IncompatibleError: an unknown cache class, a cache in a state no model can continue, or layers that disagree on the tokens seen.
    """
    states = tuple(_take(c, f"layer {i}", row) for i, c in enumerate(cache))
    seen = length_of(states)
    counted = any(leaf.attention != "state" for _, leaf in leaves(states))
    if length is not None and counted and length != seen:
        raise ValueError(f"[take_states] the caches have seen {seen} tokens, but length is {length}.")
    if not counted and any(a is not None for _, leaf in leaves(states) for a in leaf.arrays):
        if length is None:
            raise ValueError("[take_states] recurrent state does not count the tokens it has seen; pass length.")
        seen = length
    return tuple(_count(state, seen) for state in states)


def build_caches(states: Sequence[CacheState], *, first: int = 0) -> list[Any]:
    """mlx-lm caches that continue where the captured ones stood; the states stay as they are and can be built again.

    Args:
        states: one per layer.
        first: layer number of states[0], for messages.

    Raises:
        IncompatibleError: a state whose rows do not fit its class (a KVCache's rows must start at position 0).
    """
    return [_build(state, f"layer {i}") for i, state in enumerate(states, first)]


def unlimited(caches: Sequence[Any], probes: Sequence[CacheProbe]) -> list[Any]:
    """The caches with those that `max_kv_size` limits, but that have dropped nothing yet, as the KVCache that their layer has.

    Args:
        caches: live mlx-lm caches or their states, one a layer; the rows are shared, the caches left unchanged.
        probes: what the model's layers are.
    """
    return [_unlimited(c) if p.attention == "full" else c for c, p in zip(caches, probes, strict=False)] + list(caches[len(probes) :])


def _unlimited(cache: Any) -> Any:
    if isinstance(cache, CacheState):
        # Below the limit every query has seen every row, as in a KVCache.
        whole = cache.attention == "sliding" and cache.offset < cache.params["max_size"] and cache.rows == cache.offset
        return replace(cache, cls="KVCache", attention="full", window=None, params={}) if whole else cache
    if type(cache) is not RotatingKVCache or cache.keys is None:
        return cache
    if not cache._idx == cache.offset <= min(cache.max_size, cache.keys.shape[2]):
        return cache
    full: Any = KVCache()
    full.keys, full.values, full.offset = cache.keys, cache.values, cache.offset
    return full


def _count(state: CacheState, length: int) -> CacheState:
    if state.attention == "list":
        return replace(state, offset=length, caches=tuple(_count(c, length) for c in state.caches))
    if state.attention == "state" and any(a is not None for a in state.arrays):
        return replace(state, offset=length)
    return state


# --- taking ---------------------------------------------------------------------------------------------------------


def _take(cache: Any, where: str, row: int | None) -> CacheState:
    take = _TAKE.get(type(cache))
    if take is None:
        hint = "what an evicting cache has dropped cannot be saved" if isinstance(cache, EvictingCache) else None
        raise IncompatibleError(f"{where}: cache class {type(cache).__module__}.{type(cache).__qualname__} is not known", hint=hint)
    state = take(cache, where, row)
    # Per layer, so that lazy graphs do not pile up; evaluated arrays may be used in another thread.
    mx.eval([_parts(state.k), _parts(state.v), [a for a in state.arrays if a is not None]])
    return state


def _parts(array: mx.array | Quantized | None) -> tuple[mx.array, ...]:
    if array is None:
        return ()
    return array.parts if isinstance(array, Quantized) else (array,)


def _row(batch: int, row: int | None, where: str) -> int:
    if row is None and batch != 1:
        raise ValueError(f"[take_states] {where} holds {batch} sequences; pass row=0..{batch - 1}.")
    if row is not None and not 0 <= row < batch:
        raise ValueError(f"[take_states] row must be in 0..{batch - 1} ({where} holds {batch}), but got {row}.")
    return row or 0


def _broken(cache: Any, where: str, numbers: str) -> IncompatibleError:
    return IncompatibleError(f"{where}: {type(cache).__name__} is in a state that cannot be continued: {numbers}")


def _check_rows(cache: Any, where: str, needed: int, *arrays: mx.array) -> None:
    for a in arrays:
        if a.ndim != 4 or not 0 <= needed <= a.shape[2]:
            raise _broken(cache, where, f"{needed} rows are live, the array has shape {tuple(a.shape)}")


def _take_full(cache: Any, where: str, row: int | None) -> CacheState:
    # ConcatenateKVCache.trim moves only the offset, so that rows past it are stale here too.
    state = CacheState(type(cache).__name__, "full")
    if cache.keys is None:
        return state
    _check_rows(cache, where, cache.offset, cache.keys, cache.values)
    return _linear(state, cache, _row(cache.keys.shape[0], row, where), 0, cache.offset, 0)


def _linear(state: CacheState, cache: Any, row: int, start: int, stop: int, position: int) -> CacheState:
    """`state` with the rows start..stop of the buffers, the first of them at `position`."""
    offset = position + stop - start
    if stop == start:
        return replace(state, offset=offset)
    return replace(
        state, offset=offset, positions=((position, offset),), k=cache.keys[row, :, start:stop], v=cache.values[row, :, start:stop]
    )


def _take_coded(cache: CodedKVCache, where: str, row: int | None) -> CacheState:
    """Its rows decoded: a codec that stores them again codes what was coded before."""
    window, offset = cache.window, cache.offset
    state = _sliding(window, 0) if window else CacheState("KVCache", "full")
    _row(1, row, where)
    keys, values = cache.keys_and_values()
    if keys is None or values is None:
        return state
    # Of a full window a continuation reads the newest window - 1 rows, before its own.
    live = offset if not window or offset < window else window - 1
    state = replace(state, params={**state.params, "ring": min(offset, window)}) if window else state
    return replace(state, offset=offset, positions=((offset - live, offset),), k=keys[0, :, -live:], v=values[0, :, -live:])


def _take_quantized(cache: QuantizedKVCache, where: str, row: int | None) -> CacheState:
    state = CacheState("QuantizedKVCache", "full", params={"bits": cache.bits, "group_size": cache.group_size})
    if cache.keys is None:
        return state
    _check_rows(cache, where, cache.offset, *cache.keys, *cache.values)
    chosen = _row(cache.keys[0].shape[0], row, where)
    if cache.offset == 0:
        return state
    k, v = (
        Quantized(*(part[chosen, :, : cache.offset] for part in role), bits=cache.bits, group_size=cache.group_size)
        for role in (cache.keys, cache.values)
    )
    return replace(state, offset=cache.offset, positions=((0, cache.offset),), k=k, v=v)


def _take_chunked(cache: ChunkedKVCache, where: str, row: int | None) -> CacheState:
    state = CacheState("ChunkedKVCache", "chunked", cache.chunk_size, params={"chunk_size": cache.chunk_size})
    live = cache.offset - cache.start_position
    if cache.keys is None:
        return replace(state, offset=cache.offset)
    _check_rows(cache, where, live, cache.keys, cache.values)
    # The model drops what exceeds the chunk (maybe_trim_front) before it reads the cache again.
    start = max(0, live - cache.chunk_size)
    return _linear(state, cache, _row(cache.keys.shape[0], row, where), start, live, cache.start_position + start)


def _sliding(max_size: int, keep: int) -> CacheState:
    return CacheState("RotatingKVCache", "sliding", max_size, params={"max_size": max_size, "keep": keep, "ring": 0})


def _take_rotating(cache: RotatingKVCache, where: str, row: int | None) -> CacheState:
    state = _sliding(cache.max_size, cache.keep)
    if cache.keys is None:
        return state
    size, index, offset = cache.keys.shape[2], cache._idx, cache.offset
    window, keep = cache.max_size, cache.keep
    chosen = _row(cache.keys.shape[0], row, where)
    if offset < window and 0 <= index == offset <= size:
        return _rotated(state, cache, chosen, [(0, index)], offset, index)
    # A full window: every next update drops or overwrites all but the first `keep` and the newest rows, before attending.
    newest = window - 1 - keep
    if offset >= window > max(keep, 1) and index == size >= window - 1:
        return _rotated(state, cache, chosen, [(0, keep), (size - newest, size)], offset, window)
    if offset > window == size and keep < index < size:
        return _rotated(state, cache, chosen, [(0, keep), (index + 1, size), (keep, index)], offset, index)
    raise _broken(cache, where, f"{size} rows, index {index}, offset {offset}, max_size {window}, keep {keep}")


def _rotated(state: CacheState, cache: Any, row: int, pieces: list[tuple[int, int]], offset: int, ring: int) -> CacheState:
    """`state` with the physical `pieces` in temporal order; at `offset` tokens seen, all but the first `keep` rows are the newest."""
    rows = sum(stop - start for start, stop in pieces)
    if rows == 0:
        return state

    def temporal(array: mx.array) -> mx.array:
        parts = [array[row, :, start:stop] for start, stop in pieces if start < stop]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    params = {**state.params, "ring": ring}
    positions = _positions(offset, rows, state.params["keep"])
    return replace(state, offset=offset, positions=positions, params=params, k=temporal(cache.keys), v=temporal(cache.values))


def _positions(offset: int, rows: int, keep: int) -> tuple[tuple[int, int], ...]:
    """The positions of `rows` rows when `offset` tokens were seen: the first `keep`, and the newest."""
    newest = offset - max(0, rows - keep)
    ranges = ((offset - rows, offset),) if rows == offset or keep == 0 else ((0, min(keep, rows)), (newest, offset))
    return tuple((start, stop) for start, stop in ranges if start < stop)


def _take_batch(cache: BatchKVCache, where: str, row: int | None) -> CacheState:
    state = CacheState("KVCache", "full")
    chosen = _row(cache.left_padding.size, row, where)
    if getattr(cache, "_right_padding", None) is not None:
        raise ValueError(f"[take_states] {where} is between prepare() and finalize(); its padding is not at the left yet.")
    padding, offset = cache.left_padding[chosen].item(), cache.offset[chosen].item()
    if cache.keys is None or offset <= 0:
        return state
    _check_rows(cache, where, cache._idx, cache.keys, cache.values)
    if padding < 0 or padding + offset != cache._idx:
        raise _broken(cache, where, f"row {chosen}: padding {padding} + {offset} tokens, but {cache._idx} rows")
    return _linear(state, cache, chosen, padding, cache._idx, 0)


def _take_batch_rotating(cache: BatchRotatingKVCache, where: str, row: int | None) -> CacheState:
    state = _sliding(cache.max_size, 0)
    chosen = _row(cache.left_padding.size, row, where)
    if getattr(cache, "_lengths", None) is not None:
        raise ValueError(f"[take_states] {where} is between prepare() and finalize(); its padding is not at the left yet.")
    offset = cache.offset[chosen].item()
    if cache.keys is None or offset <= 0:
        return state
    size, index, window = cache.keys.shape[2], cache._idx, cache.max_size
    held = size if cache.rotated else index
    # left_padding falls below the padding in front of a row whose tokens were evicted before it was right-padded, so that in a
    # full window only the newest window - 1 rows are sure; they are also all that a continuation reads.
    live = min(offset, window - 1)
    if (offset < window and held - cache.left_padding[chosen].item() != offset) or held < live or index > size:
        raise _broken(cache, where, f"row {chosen}: {offset} tokens, {held} rows, max_size {window}")
    # The newest row lies before `index`; in a ring the rows before it wrap around to the end.
    wrapped = max(0, live - index)
    pieces = [(size - wrapped, size), (index - (live - wrapped), index)]
    return _rotated(state, cache, chosen, pieces, offset, live if offset < window else window)


def _take_arrays(cache: ArraysCache, where: str, row: int | None) -> CacheState:
    chosen = _row(cache.batch_size, row, where)
    return CacheState("ArraysCache", "state", arrays=tuple(None if a is None else a[chosen] for a in cache.cache))


def _take_list(cache: CacheList, where: str, row: int | None) -> CacheState:
    return CacheState("CacheList", "list", caches=tuple(_take(c, f"{where}.{i}", row) for i, c in enumerate(cache.caches)))


_TAKE: dict[type, Callable[[Any, str, int | None], CacheState]] = {
    KVCache: _take_full,
    ConcatenateKVCache: _take_full,
    QuantizedKVCache: _take_quantized,
    ChunkedKVCache: _take_chunked,
    RotatingKVCache: _take_rotating,
    BatchKVCache: _take_batch,
    BatchRotatingKVCache: _take_batch_rotating,
    ArraysCache: _take_arrays,
    CacheList: _take_list,
    CodedKVCache: _take_coded,
}


# --- building -------------------------------------------------------------------------------------------------------


def _build(state: CacheState, where: str) -> Any:
    build = _BUILD.get(state.cls)
    if build is None:
        raise IncompatibleError(f"{where}: cache class {state.cls} is not known")
    if state.attention not in ("list", "state"):
        _check_state(state, where)
    return build(state, where)


def _check_state(state: CacheState, where: str) -> None:
    expected = Quantized if state.cls == "QuantizedKVCache" else mx.array
    for name, array in (("keys", state.k), ("values", state.v)):
        if (array is None) != (state.rows == 0):
            raise IncompatibleError(f"{where}: {state.rows} rows, but the {name} are {'missing' if array is None else 'present'}")
        if array is not None and (not isinstance(array, expected) or len(array.shape) != 3 or array.shape[1] != state.rows):
            raise IncompatibleError(
                f"{where}: {state.cls} needs {name} of {expected.__name__} (H, {state.rows}, D), "
                f"but they are {type(array).__name__} {tuple(array.shape)}"
            )
    fits = state.positions == _positions(state.offset, state.rows, state.params.get("keep", 0))
    if not fits or (state.attention == "full" and state.rows != state.offset):
        raise IncompatibleError(f"{where}: {state.cls} with {state.offset} tokens seen cannot hold the positions {list(state.positions)}")


def _live(array: mx.array) -> mx.array:
    # A new array object: item assignment in a cache rebinds the object that it is applied to.
    array = array[None]
    mx.eval(array)
    return array


def _fill(cache: Any, state: CacheState) -> Any:
    cache.offset = state.offset
    if isinstance(state.k, mx.array) and isinstance(state.v, mx.array):
        cache.keys, cache.values = _live(state.k), _live(state.v)
    return cache


def _build_quantized(state: CacheState, where: str) -> QuantizedKVCache:
    cache: Any = QuantizedKVCache(group_size=state.params["group_size"], bits=state.params["bits"])
    cache.offset = state.offset
    if isinstance(state.k, Quantized) and isinstance(state.v, Quantized):
        cache.keys = tuple(_live(part) for part in state.k.parts)
        cache.values = tuple(_live(part) for part in state.v.parts)
    return cache


def _build_chunked(state: CacheState, where: str) -> ChunkedKVCache:
    cache = _fill(ChunkedKVCache(state.params["chunk_size"]), state)
    cache.start_position = state.offset - state.rows
    return cache


def _build_rotating(state: CacheState, where: str) -> RotatingKVCache:
    size, keep, ring = (state.params[name] for name in ("max_size", "keep", "ring"))
    cache: Any = RotatingKVCache(max_size=size, keep=keep)
    if not isinstance(state.k, mx.array) or not isinstance(state.v, mx.array):
        return cache
    rows, full = state.rows, state.offset >= size
    if rows != min(state.offset, size - 1) or not (keep < ring <= size if full else ring == rows):
        raise IncompatibleError(f"{where}: ring {ring} of {size} slots cannot hold {rows} rows with {state.offset} tokens seen")
    cache.offset, cache._idx = state.offset, ring

    def physical(array: mx.array) -> mx.array:
        if full:
            # The slot of the next write holds the oldest row, which no update reads. A ring at its end starts again after `keep`.
            slot = keep if ring == size else ring
            cut = rows - (slot - keep)
            array = mx.concatenate([array[:, :keep], array[:, cut:], mx.zeros_like(array[:, :1]), array[:, keep:cut]], axis=1)
        return _live(array)

    cache.keys, cache.values = physical(state.k), physical(state.v)
    return cache


def _build_arrays(state: CacheState, where: str) -> ArraysCache:
    cache: Any = ArraysCache(size=len(state.arrays))
    cache.cache = [None if a is None else _live(a) for a in state.arrays]
    return cache


_BUILD: dict[str, Callable[[CacheState, str], Any]] = {
    "KVCache": lambda state, where: _fill(KVCache(), state),
    "ConcatenateKVCache": lambda state, where: _fill(ConcatenateKVCache(), state),
    "QuantizedKVCache": _build_quantized,
    "ChunkedKVCache": _build_chunked,
    "RotatingKVCache": _build_rotating,
    "ArraysCache": _build_arrays,
    "CacheList": lambda state, where: CacheList(*(_build(c, f"{where}.{i}") for i, c in enumerate(state.caches))),
}
