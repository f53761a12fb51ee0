"""A part of a prefill: some tokens, in some layers, on rows that are there already.

Neighbouring tokens run through the model as ever. Tokens from here and there run as a batch of one token each, every one at its own
position, over one array of rows a layer that they write their own into: at each layer all of them have written before any attends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from formats.errors import IncompatibleError
from kvtool.capturing import PREFILL_STEP, prefill
from kvtool.hidden import Run, check_stream, layers_replaced
from kvtool.model import LoadedModel
from kvtool.probe import PROBE_IDS
from kvtool.snapshot import build_caches, take_states
from kvtool.states import CacheState
from veloxquant_mlx.caches import families
from veloxquant_mlx.caches.hook import hold

BATCH = 256  # tokens from here and there that run at once; their scores take heads x BATCH x S values a layer
TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}


def full_state(k: mx.array, v: mx.array) -> CacheState:
    """A plain cache of full attention with these rows, from position 0."""
    length = k.shape[1]
    if not length:
        return CacheState(cls="KVCache", attention="full", window=None, offset=0, positions=(), params={})
    return CacheState(cls="KVCache", attention="full", window=None, offset=length, positions=((0, length),), params={}, k=k, v=v)


def run_span(
    model: LoadedModel,
    tokens: Sequence[int],
    states: Sequence[CacheState],
    start: int,
    stop: int,
    layers: tuple[int, int] | None = None,
    given: mx.array | None = None,
    leaves: bool = True,
) -> tuple[list[CacheState], mx.array | None]:
    """The states with rows of tokens start to stop, in a block of layers, as the model computes them on the rows before them.

    Args:
        model: of full-attention layers.
        tokens: ids of all tokens of the states.
        states: of every layer.
        layers: first layer and the one after the last; None is all.
        given: (stop - start, E), what enters the first of them; needed unless that is layer 0.
        leaves: whether to compute what leaves the last of them; without, its keys and values are all that is computed of it.

    Returns:
        The states, and what leaves the last layer, (stop - start, E); None where all layers ran, or it is not asked for.

    Raises:
        IncompatibleError: blocks of layers of this model cannot be run alone.
    """
    first, last = layers or (0, len(states))
    caches: list[Any] = build_caches([_cut(state, start) for state in states])
    left: list[mx.array] = []
    whole = (first, last) == (0, len(states))
    if not whole:
        check_stream(model)
    for at in range(start, stop, PREFILL_STEP):
        end = min(at + PREFILL_STEP, stop)
        ids = mx.array(list(tokens[at:end]))[None]
        if whole:
            model.model(ids, cache=caches)
        else:

            def block(layer: int, run: Run, x: mx.array, at: int = at, end: int = end) -> mx.array:
                if not first <= layer < last:
                    # Its rows join all the same: masks and positions go by what the first cache holds.
                    k, v = rows_of(states[layer])
                    caches[layer].update_and_fetch(k[None, :, at:end], v[None, :, at:end])
                    return x
                if layer == first and given is not None:
                    if given.shape[-1] != x.shape[-1]:
                        raise IncompatibleError(
                            f"what entered layer {first} has {given.shape[-1]} values a token, not {x.shape[-1]} as in {model.info.name}",
                            hint="blocks of layers go from one model to another of the same shapes",
                        )
                    x = given[None, at - start : end - start].astype(x.dtype)
                y = run(x)
                if layer == last - 1 and leaves:
                    left.append(y[0])
                return y

            with layers_replaced(model.model, block):
                model.model(ids, cache=caches)
        mx.eval([cache.state for cache in caches], left)
    ran = take_states(caches, length=stop)
    found = [_with(old, new) if first <= i < last else old for i, (old, new) in enumerate(zip(states, ran, strict=True))]
    return found, mx.concatenate(left) if left else None


def continued(states: Sequence[CacheState], model: LoadedModel, tokens: Sequence[int]) -> list[CacheState]:
    """The states after the model has run tokens on them."""
    if not tokens:
        return list(states)
    caches: list[Any] = build_caches(states)
    for start in range(0, len(tokens), PREFILL_STEP):
        model.model(mx.array(list(tokens[start : start + PREFILL_STEP]))[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    return list(take_states(caches, length=states[0].offset + len(tokens)))


def run_chosen(
    model: LoadedModel,
    tokens: Sequence[int],
    states: Sequence[CacheState],
    chosen: Sequence[int],
    first: int = 0,
    given: mx.array | None = None,
) -> list[CacheState]:
    """The states with the rows of chosen tokens, in the layers from `first` on, as the model computes them.

    Args:
        chosen: positions; each token sees the rows before it, those of chosen ones as computed here.
        first: the first layer that runs.
        given: (len(chosen), E), what enters it, in ascending order of positions; needed unless it is layer 0.
        model, tokens, states: as in `run_span`.

    Raises:
        IncompatibleError: tokens of this model cannot be run apart from their neighbours.
    """
    check_scattered(model)
    if first:
        check_stream(model)
    return _run_chosen(model, tokens, states, sorted(chosen), first, given)


def _run_chosen(
    model: LoadedModel, tokens: Sequence[int], states: Sequence[CacheState], at: list[int], first: int, given: mx.array | None
) -> list[CacheState]:
    caches = [ScatteredCache(*rows_of(state)) for state in states]
    for start in range(0, len(at), BATCH):
        part = at[start : start + BATCH]
        for cache in caches:
            cache.stand_at(part)
        ids = mx.array([tokens[i] for i in part])[:, None]
        if not first:
            model.model(ids, cache=caches)
        else:

            def upper(layer: int, run: Run, x: mx.array, start: int = start) -> mx.array:
                if layer < first:
                    return x
                return run(given[start : start + x.shape[0], None].astype(x.dtype) if layer == first and given is not None else x)

            with layers_replaced(model.model, upper):
                model.model(ids, cache=caches)
        mx.eval([(cache.k, cache.v) for cache in caches])
    return [state if i < first else full_state(caches[i].k, caches[i].v) for i, state in enumerate(states)]


class ScatteredCache:
    """A layer's rows while tokens from here and there run as a batch of one token each.

    Args:
        k, v: (H, S, D), all rows.
    """

    # As of a coded cache: mlx-lm hands what it fetched to the one function that the hook replaces.
    bits = group_size = 0

    def __init__(self, k: mx.array, v: mx.array) -> None:
        self.k, self.v = k, v
        self.offset = mx.array([], mx.int32)
        self.stop = 0
        hold(self)

    def stand_at(self, positions: Sequence[int]) -> None:
        """The positions of the next forward's tokens."""
        self.offset, self.stop = mx.array(list(positions), mx.int32), max(positions) + 1

    def make_mask(self, N: int, **_: Any) -> None:
        """None: attention goes by positions."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple["_Scattered", "_Scattered"]:
        """Put rows (N, H, 1, D) in their places."""
        at = self.offset[None, :, None]
        self.k, self.v = (
            mx.put_along_axis(rows, mx.broadcast_to(at, (rows.shape[0], len(new), rows.shape[2])), _joined(new), axis=1)
            for rows, new in ((self.k, keys.astype(self.k.dtype)), (self.v, values.astype(self.v.dtype)))
        )
        fetched = _Scattered(self.k[:, : self.stop], self.v[:, : self.stop], self.offset)
        return fetched, fetched


@dataclass(frozen=True, eq=False)
class _Scattered:
    """What attention gets in place of keys and values."""

    keys: mx.array
    values: mx.array
    positions: mx.array

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None = None) -> mx.array:
        """Softmax attention of queries (N, H_q, 1, D), each to the rows up to its own position; (N, H_q, 1, D_v)."""
        seen = mx.arange(self.keys.shape[1])[None] <= self.positions[:, None]
        out = mx.fast.scaled_dot_product_attention(
            _joined(queries)[None], self.keys[None], self.values[None], scale=scale, mask=seen, sinks=sinks
        )
        return mx.swapaxes(out[0], 0, 1)[:, :, None]


def _joined(rows: mx.array) -> mx.array:
    """(N, H, 1, D) as (H, N, D)."""
    return mx.swapaxes(rows[:, :, 0], 0, 1)


def check_scattered(model: LoadedModel) -> None:
    """Refuse a model that does not compute tokens the same apart from their neighbours: by its family, and by trying four tokens."""
    for i, layer in enumerate(families.layers(model.model)):
        if layer.attention != "codes":
            raise IncompatibleError(
                f"{model.info.name}, layer {i}: {layer.reason}", hint="recompute first=N,newest=P% instead of deviating"
            )
    ids = [*PROBE_IDS, *PROBE_IDS]
    states = take_states(prefill(model, ids), length=len(ids))
    blank = [full_state(*(_blank(rows) for rows in rows_of(state))) for state in states]
    for i, (own, other) in enumerate(zip(states, _run_chosen(model, ids, blank, [1, 3], 0, None), strict=True)):
        for a, b in zip(rows_of(own), rows_of(other), strict=True):
            wrong, size = (float(np.abs(np.array(x.astype(mx.float32))).max()) for x in (a - b, a))
            if not wrong <= TOLERANCE[a.dtype] * size:
                raise IncompatibleError(
                    f"{model.info.name}, layer {i}: tokens run apart from their neighbours differ by {wrong:.2g} of {size:.2g}",
                    hint="recompute first=N,newest=P% instead of deviating",
                )


def _blank(rows: mx.array) -> mx.array:
    """Rows 1 and 3 of four set to zero."""
    return rows * (mx.arange(4) % 2 == 0)[None, :, None].astype(rows.dtype)


def rows_of(state: CacheState) -> tuple[mx.array, mx.array]:
    """Keys and values, (H, S, D) each, of a plain cache that holds rows."""
    assert isinstance(state.k, mx.array) and isinstance(state.v, mx.array)
    return state.k, state.v


def _cut(state: CacheState, length: int) -> CacheState:
    k, v = rows_of(state)
    return full_state(k[:, :length], v[:, :length])


def _with(state: CacheState, own: CacheState) -> CacheState:
    """The state with its first rows taken from another, as many as that has."""
    k, v = (
        a if a.shape[1] == b.shape[1] else mx.concatenate([a, b[:, a.shape[1] :]], axis=1)
        for a, b in zip(rows_of(own), rows_of(state), strict=True)
    )
    mx.eval(k, v)
    return full_state(k, v)
