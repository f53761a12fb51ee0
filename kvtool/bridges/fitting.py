"""Fit a map from one model's cache to another's, layer by layer, on texts that both have read."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from formats.errors import IncompatibleError
from formats.transfer_map import LayerMap, MapFile
from kvtool.archive import producer
from kvtool.bridges.pairs import LENGTH, PIECES, Pairs, check_layers_of, collect_pairs
from kvtool.bridges.ridge import fit_ridge, held_out, moments_of
from kvtool.compat import computing_problems
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe

NEAR = 3  # source layers on either side, by relative depth, that are tried
# As of `fit_ridge`, by whether shapes are alike: between unlike ones a map leaves little, and what a lower rank loses adds to that.
RANK_LOSS = {True: 0.01, False: 0.001}
# Share of the rows' energy that codecs are expected to have put in as error. Siblings' maps are small corrections, which multiply little.
NOISE = {True: 0.0, False: 0.001}
SOURCES = 4  # source layers of a head's keys or values, at most, between models of other shapes


def fit(
    source: LoadedModel,
    target: LoadedModel,
    texts: Mapping[str, str | Sequence[int]] | None = None,
    *,
    sources: int | None = None,
    noise: float | None = None,
    overlap: float | None = None,
    pieces: int = PIECES,
    length: int = LENGTH,
    progress: Callable[[int, int], None] | None = None,
) -> MapFile:
    """The map from `source`'s keys and values to `target`'s.

    Between models of one shape it corrects the rows of the same layer; else it builds each head's keys, and its values, from the
    rows of the source layers that explain them best.

    Args:
        source, target: models of full-attention layers, of one tokenizer or, with `overlap`, of two.
        texts: name -> text or token ids, at least two; None for the shipped ones.
        sources: source layers of a head's keys or values, at most; None is 1 between models of the same shapes, else SOURCES.
        noise: error that the rows will have where the map is used, as a share of their energy; None is 0 between models of the same
            shapes, else 0.001: enough for rows in 3 bits, and little lost on exact ones.
        overlap: of two tokenizers, the share of the target's tokens that must end where one of the source's does; None: one tokenizer.
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
    if overlap is not None and not 0 <= overlap <= 1:
        raise ValueError(f"[fit] overlap must be between 0 and 1, but got {overlap}.")
    if noise is not None and not 0 <= noise < 1:
        raise ValueError(f"[fit] noise must be at least 0 and below 1, but got {noise}.")
    tables = (check_layers_of(source), check_layers_of(target))
    pairs = collect_pairs(source, target, texts, pieces=pieces, length=length, overlap=overlap, progress=progress)
    with pairs.folder:
        layers = fit_layers(pairs, *tables, sources, noise)
        return MapFile(source.info, target.info, pairs.texts, len(pairs.documents), layers, producer())


def fit_layers(
    pairs: Pairs, source: Sequence[CacheProbe], target: Sequence[CacheProbe], sources: int | None = None, noise: float | None = None
) -> dict[str, LayerMap]:
    """Maps of all target layers; arguments as of `fit`."""
    alike = len(source) == len(target) and all(_shape(a) == _shape(b) for a, b in zip(source, target, strict=True))
    most = sources or (1 if alike else SOURCES)
    held, found = held_out(pairs.documents), {}
    for i, probe in enumerate(target):
        assert probe.k is not None and probe.v is not None
        tried = [i] if alike else _tried(i, len(target), len(source))
        rows = np.asarray(pairs.target[i])
        # What a layer of the same shape lacks is small and simple; shrunk to zero, the map is no map.
        y = rows - pairs.source[i] if alike else rows
        moments = moments_of([pairs.source[layer] for layer in tried], y, held, NOISE[alike] if noise is None else noise)
        ridge = fit_ridge(moments, _groups(*_shape(probe)), most=most, rank_loss=RANK_LOSS[alike])
        left, right = (None if a is None else _halves(a) for a in (ridge.left, ridge.right))
        assert left is not None
        found[str(i)] = LayerMap(
            sources=tuple(str(tried[block]) for block in ridge.used),
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


def _tried(layer: int, layers: int, of: int) -> list[int]:
    """Source layers near a target layer by relative depth."""
    near = round(layer * (of - 1) / max(1, layers - 1))
    return [i for i in range(near - NEAR, near + NEAR + 1) if 0 <= i < of]


def _groups(heads: int, k_dim: int, v_dim: int) -> list[np.ndarray]:
    """Columns of each head's keys, then of each head's values."""
    return [
        np.arange(start + head * dim, start + (head + 1) * dim)
        for start, dim in ((0, k_dim), (heads * k_dim, v_dim))
        for head in range(heads)
    ]


def _halves(weights: np.ndarray) -> np.ndarray:
    """float16 where no value is lost to its range; its rounding is far below what a map leaves."""
    largest = float(np.max(np.abs(weights), initial=0.0))
    return weights.astype(np.float16) if largest < 3e4 else weights


def _shape(probe: CacheProbe) -> tuple[int, int, int]:
    assert probe.k is not None and probe.v is not None
    return probe.k.heads, probe.k.dim, probe.v.dim
