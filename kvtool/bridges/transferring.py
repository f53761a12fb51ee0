"""A cache of one model for another: rows mapped where there is a map, keys rotated as the target rotates them, some rows recomputed.

    rows of the source, before RoPE  ->  map  ->  RoPE of the target  ->  some layers run  ->  some tokens run

What the target runs itself is exact but for what it sees of the mapped rows: the first tokens see none of them, the newest all.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from formats.errors import IncompatibleError
from formats.manifest import ModelInfo
from formats.transfer_map import LayerMap, MapFile
from kvtool.archive import Archive
from kvtool.bridges.alignment import OVERLAP, align, check_overlap, check_tokenizers
from kvtool.bridges.pairs import before_rope, check_layers_of
from kvtool.bridges.recompute import Recompute, recomputed
from kvtool.bridges.running import full_state
from kvtool.bridges.work import Work
from kvtool.capturing import Snapshot
from kvtool.compat import computing_problems, tokenizer_difference, told_apart
from kvtool.decoding import rope_of
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe
from kvtool.states import CacheState
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import unrotated

Rows = Callable[[int], np.ndarray]
AGAIN = "kvtool check looks at the file, kvtool fit makes another map; else run the prompt again"
NO_MAP = "the map is not of these two models: kvtool fit makes one"


@dataclass(frozen=True)
class Source:
    """Where a transfer starts.

    Attributes:
        model: who computed the rows.
        tokens: their ids. length: how many of them are in the cache.
        rows: layer -> (length, heads (D_k + D_v)) float32: keys before RoPE in half-split order, then values, all heads.
        shapes: (heads, D_k, D_v) of each layer.
        history: lossy steps so far.
        inputs: layer -> gives what entered it, (length, E), where that was kept.
    """

    model: ModelInfo
    tokens: tuple[int, ...]
    length: int
    rows: Rows
    shapes: tuple[tuple[int, int, int], ...]
    history: tuple[dict[str, Any], ...] = ()
    inputs: Mapping[int, Callable[[], mx.array]] = field(default_factory=dict)

    def layer_input(self, layer: int) -> mx.array:
        """What entered a layer of the source.

        Raises:
            IncompatibleError: it was not kept.
        """
        if layer not in self.inputs:
            kept = ", ".join(map(str, sorted(self.inputs))) or "none"
            raise IncompatibleError(
                f"what entered layer {layer} of {self.model.name} was not kept (kept: {kept})", hint=f"kvtool export --layer-input {layer}"
            )
        return self.inputs[layer]()


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

    inputs = {given.layer: partial(archive.decoder.layer_input, given.layer) for given in archive.manifest.layer_inputs}
    return Source(archive.manifest.model, archive.tokens, archive.length, rows, tuple(shapes), tuple(archive.manifest.quality), inputs)


def realigned(source: Source, computed_by: LoadedModel, target: LoadedModel, least: float = OVERLAP) -> Source:
    """The rows in the tokens of a model of another tokenizer: of each of its tokens that of the source's token at the same place.

    Args:
        source: rows of `computed_by`.
        computed_by: gives the tokenizer that made the source's ids.
        target: gives the tokenizer of the result.
        least: share of the target's tokens that must end where one of the source's does.

    Raises:
        IncompatibleError: another tokenizer than the rows', a smaller overlap, or as `align`.
    """
    problem = tokenizer_difference(source.model, computed_by.info)
    if problem is not None:
        raise IncompatibleError(
            f"the tokens are not those of {computed_by.info.name}: {problem}", hint=f"give {source.model.name}, which computed the rows"
        )
    own = align(computed_by, target, source.tokens)
    check_overlap(own.overlap, least, source.model, target.info)
    # Tokens that the source had not run yet are still to be run: those of the target that end among them have no row.
    length = int(np.searchsorted(own.rows, source.length))
    note = f"{source.length} tokens taken for {length} of another tokenizer, {own.overlap:.0%} of which end where they do"
    step = {"step": "align", "from": source.model.name, "to": target.info.name, "overlap": round(own.overlap, 4), "note": note}
    info = replace(source.model, tokenizer=target.info.tokenizer, tokenizer_state=target.info.tokenizer_state)
    at = own.rows[:length]
    inputs = {layer: partial(_taken, given, at) for layer, given in source.inputs.items()}
    return Source(info, own.target, length, lambda layer: source.rows(layer)[at], source.shapes, (*source.history, step), inputs)


def _taken(given: Callable[[], mx.array], at: np.ndarray) -> mx.array:
    return given()[mx.array(at)]


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

    inputs = {layer: partial(snapshot.inputs.__getitem__, layer) for layer in snapshot.inputs}
    return Source(snapshot.model, snapshot.tokens, snapshot.length, rows, tuple(shapes), snapshot.history, inputs)


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
    recompute.check(source.length)
    probes = check_layers_of(target)
    recompute.check(source.length, len(probes))
    _check_models(source, target, mapping)
    maps = _maps(source, probes, mapping)
    begun = time.perf_counter()
    kept: dict[int, np.ndarray] = {}
    states: list[CacheState] = []
    for i, (probe, own) in enumerate(zip(probes, maps, strict=True)):
        wanted = [int(name) for name in own.sources]
        kept = {layer: kept[layer] if layer in kept else source.rows(layer) for layer in wanted}
        rows = _mapped([kept[layer] for layer in wanted], own, mapping is not None)
        k, v = cached(rows, probe)
        if not (mx.isfinite(k).all() & mx.isfinite(v).all()).item():
            how = "the rows hold" if mapping is None else "rows and map give"
            raise IncompatibleError(
                f"layer {i}: {how} values that {target.info.name} cannot keep as {k.dtype}: NaN or infinity", hint=AGAIN
            )
        states.append(full_state(k, v))
        if progress is not None:
            progress(i + 1, len(probes))
    mapped = time.perf_counter()
    states, chosen = recomputed(states, source.tokens[: source.length], target, recompute, source.layer_input)
    done = time.perf_counter()
    work = Work(target)
    step: dict[str, Any] = {
        "step": "transfer",
        "from": source.model.name,
        "to": target.info.name,
        "mapped": mapping is not None,
        "first": recompute.first,
        "newest": recompute.newest,
        "deviating": recompute.deviating,
        "layers": None if recompute.block is None else list(recompute.block),
        "recomputed_share": round(recompute.share(work, source.length, chosen), 4),
        "seconds": {"map": round(mapped - begun, 4), "recompute": round(done - mapped, 4)},
    }
    if mapping is not None:
        step["map_unexplained"] = round(float(np.mean([own.unexplained for own in mapping.layers.values()])), 4)
        step["map_share"] = round(work.share(work.of_map(mapping, source.length), source.length), 4)
    step["note"] = _note(step, recompute)
    return Snapshot(target.info, source.tokens, source.length, tuple(states), probes, (*source.history, step))


def _note(step: dict[str, Any], plan: Recompute) -> str:
    """One line on what was done; that it was not measured here is part of it."""
    how = [f"rows mapped, {step['map_unexplained']:.0%} left unexplained on other texts" if step["mapped"] else "rows as they were"]
    how += [f"{what} recomputed" for what in plan.words()]
    return f"{', '.join(how)} ({step['recomputed_share'] + step.get('map_share', 0.0):.1%} of a prefill)"


def _check_models(source: Source, target: LoadedModel, mapping: MapFile | None) -> None:
    check_tokenizers(source.model, target.info)
    for side, own, model in () if mapping is None else (("source", mapping.source, source.model), ("target", mapping.target, target.info)):
        differ = computing_problems(own, model)
        if differ:
            raise IncompatibleError(
                f"the map's {side} is {', not '.join(told_apart(own, model))}: {'; '.join(differ)}",
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
        raise IncompatibleError(f"the map has layers {', '.join(mapping.layers)[:60]}, the model 0 to {len(wanted) - 1}", hint=NO_MAP)
    widths = {str(i): heads * (k + v) for i, (heads, k, v) in enumerate(source.shapes)}
    for name, own in mapping.layers.items():
        where, shape = f"the map's layer {name}", (own.heads, own.k_dim, own.v_dim)
        if shape != wanted[int(name)]:
            raise IncompatibleError(
                f"{where} gives (KV heads, key size, value size) {shape}, the model has {wanted[int(name)]}", hint=NO_MAP
            )
        absent = [layer for layer in own.sources if layer not in widths]
        if absent:
            raise IncompatibleError(f"{where} is from layer {absent[0]!r:.40}, the rows have 0 to {len(widths) - 1}", hint=NO_MAP)
        given = sum(widths[layer] for layer in own.sources)
        if given != len(own.source_mean):
            raise IncompatibleError(f"{where} takes {len(own.source_mean)} entries, but the rows have {given}", hint=NO_MAP)
        if own.residual and widths[own.sources[0]] != own.out:
            what = f"{where} adds to the {widths[own.sources[0]]} entries of layer {own.sources[0]}, but the model has {own.out}"
            raise IncompatibleError(what, hint=NO_MAP)
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
