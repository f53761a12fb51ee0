"""Chunks of caches of one model: put one after another, or cut out.

Keys are turned to their new positions, exactly. What a chunk's rows had attended to is another matter: rows behind others in a join never
saw those, and rows of a cut saw what was cut off. The beginning of a cache is exact, for its rows saw nothing else.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from formats.errors import IncompatibleError, counted
from kvtool.bridges.pairs import check_layers_of
from kvtool.bridges.running import continued, full_state
from kvtool.bridges.transferring import Source, cached
from kvtool.capturing import Snapshot
from kvtool.compat import computing_problems, tokenizer_difference, told_apart
from kvtool.hidden import entered, inputs_taken
from kvtool.model import LoadedModel
from kvtool.states import CacheState


def join(sources: Sequence[Source], model: LoadedModel, recompute: int = 0) -> Snapshot:
    """Caches one after another, as of the texts one after another.

    Args:
        sources: of this very model, at least one.
        model: that computed them.
        recompute: first tokens of each later chunk that the model runs anew, over all that stands before them.

    Returns:
        Snapshot; rows of later chunks, but for those run anew, have not seen the chunks before theirs. It has the layer inputs that all
        chunks have.

    Raises:
        ValueError: no source, or a negative number.
        IncompatibleError: another model's, or layers without full attention.
    """
    if not sources or recompute < 0:
        raise ValueError(f"[join] there must be a file, and recompute at least 0, but got {counted(len(sources), 'file')} and {recompute}.")
    probes = check_layers_of(model)
    for source in sources:
        _check(source, model)
    tokens = list(sources[0].tokens[: sources[0].length])
    states = [full_state(*cached(mx.array(sources[0].rows(i)), probe)) for i, probe in enumerate(probes)]
    kept = sorted(set.intersection(*(set(source.inputs) for source in sources)))
    inputs = {layer: [sources[0].layer_input(layer)] for layer in kept}
    ran = 0
    for source in sources[1:]:
        chunk = list(source.tokens[: source.length])
        anew = min(recompute, len(chunk))
        with inputs_taken(model, kept if anew else ()) as taken:
            states = continued(states, model, chunk[:anew])
        for layer in kept:
            inputs[layer] += [*taken.get(layer, []), source.layer_input(layer)[anew:]]
        ran += anew
        first = len(tokens) + anew
        for i, probe in enumerate(probes):
            k, v = cached(mx.array(source.rows(i)[anew:]), probe, first)
            states[i] = _appended(states[i], k, v)
        tokens += chunk
    step: dict[str, Any] = {"step": "join", "chunks": [source.length for source in sources], "recomputed": ran}
    ones = f"{counted(len(sources), 'chunk')}, of which later ones have not seen earlier ones"
    step["note"] = f"{ones}; {counted(ran, 'token')} at their beginnings recomputed"
    left_out = sorted(set.union(*(set(source.inputs) for source in sources)) - set(kept))
    if left_out:
        step["note"] += f"; {entered(left_out)} is left out, which not all chunks have"
    history = (*(entry for source in sources for entry in source.history), *([step] if len(sources) > 1 else []))
    rows = {layer: mx.concatenate(parts) for layer, parts in inputs.items()}
    mx.eval(rows)
    return Snapshot(model.info, tuple(tokens), len(tokens), tuple(states), probes, history, rows)


def cut(source: Source, model: LoadedModel, start: int, stop: int) -> Snapshot:
    """Tokens start to stop of a cache, moved to position 0.

    Args:
        source: of this very model.
        start, stop: which tokens; a beginning (start 0) is exact.

    Raises:
        ValueError: no such tokens.
        IncompatibleError: another model's, or layers without full attention.
    """
    if not 0 <= start < stop <= source.length:
        raise ValueError(f"[cut] tokens must be within 0 to {source.length} and at least one, but got {start} to {stop}.")
    probes = check_layers_of(model)
    _check(source, model)
    states = tuple(full_state(*cached(mx.array(source.rows(i)[start:stop]), probe)) for i, probe in enumerate(probes))
    inputs = {layer: source.layer_input(layer)[start:stop] for layer in source.inputs}
    mx.eval(inputs)
    history = source.history
    if start:
        note = f"rows of tokens {start} to {stop} have seen the {start} before them, which are gone"
        history = (*history, {"step": "cut", "tokens": [start, stop], "note": note})
    return Snapshot(model.info, tuple(source.tokens[start:stop]), stop - start, states, probes, history, inputs)


def _check(source: Source, model: LoadedModel) -> None:
    differ = [*computing_problems(source.model, model.info)]
    tokenizer = tokenizer_difference(source.model, model.info)
    differ += [] if tokenizer is None else [f"tokenizer: {tokenizer}"]
    if differ:
        raise IncompatibleError(
            f"computed by {', not by '.join(told_apart(source.model, model.info))}: {'; '.join(differ)}",
            hint="chunks go together in the model that computed them; kvtool recode --to-model, with a map, brings one over",
        )


def _appended(state: CacheState, k: mx.array, v: mx.array) -> CacheState:
    if state.k is None or state.v is None:
        return full_state(k, v)
    assert isinstance(state.k, mx.array) and isinstance(state.v, mx.array)
    whole = full_state(mx.concatenate([state.k, k], axis=1), mx.concatenate([state.v, v], axis=1))
    mx.eval(whole.k, whole.v)
    return whole
