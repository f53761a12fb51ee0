"""A cache of one model for another: rows mapped where there is a map, keys rotated as the target rotates them, some rows recomputed.

    rows of the source, before RoPE  ->  map  ->  RoPE of the target  ->  the first tokens run  ->  the newest tokens run

What the target runs itself is exact but for what it sees of the mapped rows: the first tokens see none of them, the newest all.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from formats.errors import IncompatibleError
from formats.manifest import ModelInfo
from formats.transfer_map import LayerMap, MapFile
from kvtool.archive import Archive
from kvtool.bridges.pairs import before_rope, check_layers_of
from kvtool.bridges.work import Work
from kvtool.capturing import PREFILL_STEP, Snapshot, prefill
from kvtool.compat import short
from kvtool.decoding import rope_of
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe
from kvtool.snapshot import build_caches, take_states
from kvtool.states import CacheState
from veloxquant_mlx.transfer.rope import rotate, unrotated

Rows = Callable[[int], np.ndarray]
_PART = re.compile(r"(first|newest)=(\d+(?:\.\d+)?)(%?)")


@dataclass(frozen=True)
class Recompute:
    """What the target computes itself.

    Attributes:
        first: tokens at the start.
        newest: tokens at the end.
    """

    first: int = 0
    newest: int = 0

    @classmethod
    def parse(cls, text: str, length: int) -> "Recompute":
        """From "first=4,newest=20%": tokens, or per cent of `length`.

        Raises:
            ValueError: anything else, or more than there is.
        """
        found: dict[str, int] = {}
        for word in text.split(","):
            match = _PART.fullmatch(word.strip())
            if match is None or match[1] in found:
                raise ValueError(f"[recompute] must be such as first=4,newest=20% or newest=128, but got {text!r}.")
            amount = float(match[2]) * length / 100 if match[3] else float(match[2])
            if not match[3] and amount != int(amount):
                raise ValueError(f"[recompute] {match[1]} must be a whole number of tokens, or per cent, but got {match[2]}.")
            found[match[1]] = int(amount)
        plan = cls(**found)
        if plan.first + plan.newest > length:
            raise ValueError(f"[recompute] first and newest must be at most the {length} tokens of the cache, but got {text!r}.")
        return plan

    def share(self, work: Work, length: int) -> float:
        """Of the prefill's arithmetic."""
        return work.share(work.span(0, self.first) + work.span(length - self.newest, length), length)


@dataclass(frozen=True)
class Source:
    """Where a transfer starts.

    Attributes:
        model: who computed the rows.
        tokens: their ids. length: how many of them are in the cache.
        rows: layer -> (length, heads (D_k + D_v)) float32: keys before RoPE in half-split order, then values, all heads.
        shapes: (heads, D_k, D_v) of each layer.
        history: lossy steps so far.
    """

    model: ModelInfo
    tokens: tuple[int, ...]
    length: int
    rows: Rows
    shapes: tuple[tuple[int, int, int], ...]
    history: tuple[dict[str, Any], ...] = ()


def source_of(archive: Archive) -> Source:
    """A file's rows.

    Raises:
        IncompatibleError: no token ids, or a layer without full attention from position 0 or of unknown rotation.
    """
    path, shapes, ropes = archive.path, [], []
    if archive.tokens is None:
        raise IncompatibleError("the file holds no token ids, which recomputing needs", path=path, hint="export it with its prompt")
    problems = archive.manifest.extra.get("rope_problems", {})
    for i, info in enumerate(archive.manifest.layers):
        if info.k is None or info.v is None or info.attention != "full" or tuple(info.positions) != ((0, archive.length),):
            raise IncompatibleError(
                f"layer {i}: {info.cls} ({info.attention}) with positions {list(info.positions)}, not all of full attention from 0",
                path=path,
                hint="maps and recomputation are for models of full-attention layers",
            )
        if isinstance(problems, dict) and any(f"{i}.{role}" in problems for role in "kv"):
            raise IncompatibleError(f"layer {i}: its rotation is not known", path=path, hint="recompute the prompt")
        shapes.append((info.k.heads, info.k.dim, info.v.dim))
        ropes.append(rope_of(archive.reader, info.k.rope))

    def rows(layer: int) -> np.ndarray:
        state = archive.state(layer)
        k, v = (x if isinstance(x, mx.array) else x.dequantize() for x in (state.k, state.v) if x is not None)
        return before_rope(k, v, ropes[layer])

    return Source(archive.manifest.model, archive.tokens, archive.length, rows, tuple(shapes), tuple(archive.manifest.quality))


def source_of_snapshot(snapshot: Snapshot) -> Source:
    """Rows in memory; errors as `source_of`."""
    if snapshot.tokens is None:
        raise IncompatibleError("the snapshot has no token ids, which recomputing needs")
    shapes = []
    for i, (state, probe) in enumerate(zip(snapshot.states, snapshot.probes, strict=True)):
        if not isinstance(state.k, mx.array) or not isinstance(state.v, mx.array) or probe.k is None or state.attention != "full":
            raise IncompatibleError(f"layer {i}: {state.cls} ({state.attention}), not a plain cache of full attention")
        shapes.append((state.k.shape[0], state.k.shape[2], state.v.shape[2]))

    def rows(layer: int) -> np.ndarray:
        state, probe = snapshot.states[layer], snapshot.probes[layer]
        assert isinstance(state.k, mx.array) and isinstance(state.v, mx.array) and probe.k is not None
        return before_rope(state.k, state.v, probe.k.rope)

    return Source(snapshot.model, snapshot.tokens, snapshot.length, rows, tuple(shapes), snapshot.history)


def transfer(
    source: Source,
    target: LoadedModel,
    *,
    mapping: MapFile | None = None,
    recompute: Recompute | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Snapshot:
    """The source's cache as `target`'s.

    Args:
        source: rows of another model of the same tokenizer.
        target: the model that will go on.
        mapping: the map from that model to this one; None takes rows over as they are, between layers of the same shapes.
        recompute: what the target computes itself; None is nothing.
        progress: called with (layers done, layers in all).

    Returns:
        Snapshot of `target`, decoded; its history tells what was mapped and recomputed.

    Raises:
        IncompatibleError: another tokenizer, a map of other models, shapes that do not fit, or layers without full attention.
        ValueError: more to recompute than there are tokens.
    """
    recompute = recompute or Recompute()
    if recompute.first + recompute.newest > source.length:
        raise ValueError(f"[transfer] recompute must be at most the {source.length} tokens of the cache, but got {recompute}.")
    probes = check_layers_of(target)
    _check_models(source, target, mapping)
    maps = _maps(source, probes, mapping)
    kept: dict[int, np.ndarray] = {}
    states: list[CacheState] = []
    for i, (probe, own) in enumerate(zip(probes, maps, strict=True)):
        wanted = [int(name) for name in own.sources]
        kept = {layer: kept[layer] if layer in kept else source.rows(layer) for layer in wanted}
        rows = _mapped([kept[layer] for layer in wanted], own, mapping is not None)
        states.append(full_state(*cached(rows, probe)))
        if progress is not None:
            progress(i + 1, len(probes))
    states = _recomputed(states, source, target, recompute)
    work = Work(target)
    step: dict[str, Any] = {
        "step": "transfer",
        "from": source.model.name,
        "to": target.info.name,
        "mapped": mapping is not None,
        "first": recompute.first,
        "newest": recompute.newest,
        "recomputed_share": round(recompute.share(work, source.length), 4),
    }
    if mapping is not None:
        step["map_unexplained"] = round(float(np.mean([own.unexplained for own in mapping.layers.values()])), 4)
        step["map_share"] = round(work.share(work.of_map(mapping, source.length), source.length), 4)
    step["note"] = _note(step)
    return Snapshot(target.info, source.tokens, source.length, tuple(states), probes, (*source.history, step))


def _note(step: dict[str, Any]) -> str:
    """One line on what was done; that it was not measured here is part of it."""
    how = [f"rows mapped, {step['map_unexplained']:.0%} left unexplained on other texts" if step["mapped"] else "rows as they were"]
    how += [f"{step[name]} {name} tokens recomputed" for name in ("first", "newest") if step[name]]
    return f"{', '.join(how)} ({step['recomputed_share'] + step.get('map_share', 0.0):.1%} of a prefill)"


def _check_models(source: Source, target: LoadedModel, mapping: MapFile | None) -> None:
    if source.model.tokenizer is None or source.model.tokenizer != target.info.tokenizer:
        raise IncompatibleError(
            f"tokenizer {short(source.model.tokenizer)} of {source.model.name} is not {short(target.info.tokenizer)} of {target.info.name}",
            hint="caches move only between models that share a tokenizer",
        )
    for side, own, model in () if mapping is None else (("source", mapping.source, source.model), ("target", mapping.target, target.info)):
        if own.weights is None or own.weights != model.weights:
            raise IncompatibleError(
                f"the map's {side} is {own.name} with weights {short(own.weights)}, not {model.name} with {short(model.weights)}",
                hint="kvtool fit makes one for these two",
            )


def _maps(source: Source, probes: Sequence[CacheProbe], mapping: MapFile | None) -> list[LayerMap]:
    """The map of each target layer; without a map file one that takes rows as they are."""
    wanted = [(probe.k.heads, probe.k.dim, probe.v.dim) for probe in probes if probe.k is not None and probe.v is not None]
    if mapping is None:
        if list(source.shapes) != wanted:
            raise IncompatibleError(
                f"{source.model.name} has {len(source.shapes)} layers of {source.shapes[0]} (KV heads, key size, value size), the model "
                f"{len(wanted)} of {wanted[0]}",
                hint="kvtool fit makes a map between models of unlike shapes",
            )
        nothing = np.empty((0, 0), np.float32)
        return [LayerMap((str(i),), True, *shape, 1.0, nothing, nothing, nothing) for i, shape in enumerate(wanted)]
    if list(mapping.layers) != [str(i) for i in range(len(wanted))]:
        raise IncompatibleError(f"the map has layers {', '.join(mapping.layers)[:60]}, the model 0 to {len(wanted) - 1}")
    for name, own in mapping.layers.items():
        inputs = [int(layer) if layer.isdigit() else len(source.shapes) for layer in own.sources]
        if max(inputs) >= len(source.shapes) or (own.heads, own.k_dim, own.v_dim) != wanted[int(name)]:
            raise IncompatibleError(f"the map's layer {name} is from {own.sources} to {own.heads} heads of {own.k_dim}, which do not fit")
        given = sum(h * (k + v) for h, k, v in (source.shapes[layer] for layer in inputs))
        if given != len(own.source_mean):
            raise IncompatibleError(f"the map's layer {name} takes {len(own.source_mean)} entries, but the rows have {given}")
    return list(mapping.layers.values())


def _mapped(rows: Sequence[np.ndarray], own: LayerMap, by_map: bool) -> mx.array:
    """(S, heads (D_k + D_v)) float32."""
    if not by_map:
        return mx.array(rows[0])
    x = mx.array(np.concatenate(rows, axis=1) if len(rows) > 1 else rows[0])
    y = x - mx.array(own.source_mean)
    for factor in (own.left, own.right):
        if factor is not None:
            y = y @ mx.array(factor).astype(mx.float32)
    y = y + mx.array(own.target_mean)
    return y + mx.array(rows[0]) if own.residual else y


def cached(rows: mx.array, probe: CacheProbe, first: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values (H, S, D) of one layer as the model caches them at positions from `first`, of rows as `Source.rows` gives them."""
    assert probe.k is not None and probe.v is not None
    heads, k_dim, v_dim, length = probe.k.heads, probe.k.dim, probe.v.dim, rows.shape[0]
    k = mx.swapaxes(rows[:, : heads * k_dim].reshape(length, heads, k_dim), 0, 1)
    v = mx.swapaxes(rows[:, heads * k_dim :].reshape(length, heads, v_dim), 0, 1)
    k = rotate(k, np.arange(first, first + length), unrotated(probe.k.rope), probe.k.rope)
    k, v = k.astype(probe.k.dtype), v.astype(probe.v.dtype)
    mx.eval(k, v)
    return k, v


def full_state(k: mx.array, v: mx.array) -> CacheState:
    """A plain cache of full attention with these rows, from position 0."""
    length = k.shape[1]
    if not length:
        return CacheState(cls="KVCache", attention="full", window=None, offset=0, positions=(), params={})
    return CacheState(cls="KVCache", attention="full", window=None, offset=length, positions=((0, length),), params={}, k=k, v=v)


def _recomputed(states: Sequence[CacheState], source: Source, target: LoadedModel, plan: Recompute) -> list[CacheState]:
    """The states with the first and the newest tokens as the target computes them."""
    tokens, length = list(source.tokens[: source.length]), source.length
    states = list(states)
    if plan.first:
        exact = take_states(prefill(target, tokens[: plan.first]), length=plan.first)
        states = [_with(state, own, 0) for state, own in zip(states, exact, strict=True)]
    if plan.newest:
        begin = length - plan.newest
        states = continued([_cut(state, begin) for state in states], target, tokens[begin:])
    return states


def continued(states: Sequence[CacheState], model: LoadedModel, tokens: Sequence[int]) -> list[CacheState]:
    """The states after the model has run tokens on them."""
    if not tokens:
        return list(states)
    caches: list[Any] = build_caches(states)
    for start in range(0, len(tokens), PREFILL_STEP):
        model.model(mx.array(list(tokens[start : start + PREFILL_STEP]))[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    return list(take_states(caches, length=states[0].offset + len(tokens)))


def _cut(state: CacheState, length: int) -> CacheState:
    assert isinstance(state.k, mx.array) and isinstance(state.v, mx.array)
    return full_state(state.k[:, :length], state.v[:, :length])


def _with(state: CacheState, own: CacheState, start: int) -> CacheState:
    """The state with rows from `start` on taken from another."""
    whole = [getattr(state, role) for role in "kv"]
    rows = [getattr(own, role) for role in "kv"]
    k, v = (mx.concatenate([a[:, :start], b, a[:, start + b.shape[1] :]], axis=1) for a, b in zip(whole, rows, strict=True))
    mx.eval(k, v)
    return replace(state, k=k, v=v)
