"""Fit a map from one model's cache to another's, layer by layer, on texts that both have read."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from formats.errors import IncompatibleError
from formats.transfer_map import LayerMap, MapFile
from kvtool.archive import producer
from kvtool.bridges.pairs import LENGTH, PIECES, Pairs, check_layers_of, collect_pairs
from kvtool.bridges.ridge import Ridge, fit_ridge, held_out
from kvtool.compat import computing_problems
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe

NEAR = 3  # source layers on either side, by relative depth, that are tried
SOURCES = 4  # source layers of a map, at most, between models of other shapes
GAIN = 0.01  # a further source layer must explain so much more of the energy that was left


def fit(
    source: LoadedModel,
    target: LoadedModel,
    texts: Mapping[str, str | Sequence[int]] | None = None,
    *,
    sources: int | None = None,
    pieces: int = PIECES,
    length: int = LENGTH,
    progress: Callable[[int, int], None] | None = None,
) -> MapFile:
    """The map from `source`'s keys and values to `target`'s.

    Between layers of one shape it corrects the rows of the same layer; else it builds rows from those of the best source layers.

    Args:
        source, target: models of one tokenizer and of full-attention layers.
        texts: name -> text or token ids, at least two; None for the shipped ones.
        sources: source layers of a map, at most; None is 1 between models of the same shapes, else SOURCES.
        pieces, length: about how many pieces, of how many tokens, are run.
        progress: called with (tokens done, tokens in all) while texts run.

    Raises:
        ValueError: too little text for so many source layers.
        IncompatibleError: other tokenizers, the same weights, or layers that no map can be made for.
    """
    if not computing_problems(source.info, target.info):
        raise IncompatibleError(f"{source.info.name} and {target.info.name} have the same weights", hint="recode --to-model is exact")
    if sources is not None and sources < 1:
        raise ValueError(f"[fit] sources must be at least 1, but got {sources}.")
    tables = (check_layers_of(source), check_layers_of(target))
    pairs = collect_pairs(source, target, texts, pieces=pieces, length=length, progress=progress)
    with pairs.folder:
        layers = fit_layers(pairs, *tables, sources)
        return MapFile(source.info, target.info, pairs.texts, len(pairs.documents), layers, producer())


def fit_layers(pairs: Pairs, source: Sequence[CacheProbe], target: Sequence[CacheProbe], sources: int | None = None) -> dict[str, LayerMap]:
    """Maps of all target layers; arguments as of `fit`."""
    alike = len(source) == len(target) and all(_shape(a) == _shape(b) for a, b in zip(source, target, strict=True))
    most = sources or (1 if alike else SOURCES)
    held, found = held_out(pairs.documents), {}
    for i, probe in enumerate(target):
        assert probe.k is not None and probe.v is not None
        chosen, ridge = _best(pairs, i, len(target), held, most, alike)
        left, right = (None if a is None else _halves(a) for a in (ridge.left, ridge.right))
        assert left is not None
        found[str(i)] = LayerMap(
            sources=tuple(map(str, chosen)),
            residual=alike,
            heads=probe.k.heads,
            k_dim=probe.k.dim,
            v_dim=probe.v.dim,
            unexplained=ridge.unexplained,
            source_mean=ridge.source_mean,
            target_mean=ridge.target_mean,
            left=left,
            right=right,
        )
    return found


def _best(pairs: Pairs, layer: int, layers: int, held: np.ndarray, most: int, alike: bool) -> tuple[list[int], Ridge]:
    """Source layers of a target layer, taken one by one by what they explain, and the map from them."""
    near = round(layer * (len(pairs.source) - 1) / max(1, layers - 1))
    tried = [i for i in range(near - NEAR, near + NEAR + 1) if 0 <= i < len(pairs.source)]
    target = np.asarray(pairs.target[layer])
    # What a layer of the same shape lacks is small and simple; shrunk to zero, the map is no map.
    y = target - pairs.source[layer] if alike else target
    if alike:
        chosen = [layer]
    else:
        singles = {i: fit_ridge(np.asarray(pairs.source[i]), y, held, low_rank=False).unexplained for i in tried}
        chosen = [min(singles, key=lambda i: singles[i])]
    best = _from(pairs, chosen, y, held)
    while len(chosen) < most:
        more = {i: _from(pairs, [*chosen, i], y, held) for i in tried if i not in chosen}
        if not more:
            break
        one = min(more, key=lambda i: more[i].unexplained)
        if more[one].unexplained > (1 - GAIN) * best.unexplained:
            break
        chosen, best = [*chosen, one], more[one]
    return chosen, best


def _from(pairs: Pairs, sources: Sequence[int], y: np.ndarray, held: np.ndarray) -> Ridge:
    return fit_ridge(np.concatenate([pairs.source[i] for i in sources], axis=1), y, held)


def _halves(weights: np.ndarray) -> np.ndarray:
    """float16 where no value is lost to its range; its rounding is far below what a map leaves."""
    largest = float(np.max(np.abs(weights), initial=0.0))
    return weights.astype(np.float16) if largest < 3e4 else weights


def _shape(probe: CacheProbe) -> tuple[int, int, int]:
    assert probe.k is not None and probe.v is not None
    return probe.k.heads, probe.k.dim, probe.v.dim
