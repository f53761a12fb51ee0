"""Affine maps between rows in closed form: ridge regression from Gram matrices, what it depends on chosen on documents left out.

    W = (G + p g I)^-1 C,    G = X^T X, C = X^T Y of centred rows, g = tr G / D_x      y = (x - mean x) W + mean y

The moments of all inputs that may be used are summed once; a subset of them is a block of G. Each group of outputs (a head's keys, a head's
values) has the inputs and the penalty p that leave the least of it on the documents left out; weights are then fitted on all documents.
Rows that a codec has been over have an error of their own, which large weights would multiply: expected of them, it is n g I more in G.
Rank r: the predictions' r leading directions, W V V^T with V the leading eigenvectors of W^T G W (reduced-rank regression, Izenman 1975).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
HELD = 5  # every fifth document is left out to choose by
ROWS_EACH = 2  # training rows that an input must have at least
GAIN = 0.01  # a further block of inputs must explain so much more of the energy that was left
RANK_LOSS = 0.01  # of what the full map explains, at most so much may be lost by a lower rank
RANKS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)  # tried, as shares of the one at which two factors take as much as one matrix
BLOCK = 4096  # rows at a time


@dataclass(frozen=True, eq=False)
class Ridge:
    """An affine map.

    Attributes:
        used: blocks of inputs that it takes, ascending.
        source_mean: (D_x,), of these blocks. target_mean: (D_y,). left, right: (D_x, r), (r, D_y), or left (D_x, D_y) alone. float32.
        unexplained: energy left on the held-out documents, before they were fitted on too, over that of y around the training mean.
        penalties: p of each group.
        inputs: blocks of inputs of each group.
    """

    used: tuple[int, ...]
    source_mean: np.ndarray
    target_mean: np.ndarray
    left: np.ndarray
    right: np.ndarray | None
    unexplained: float
    penalties: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]


def held_out(documents: Sequence[int] | np.ndarray) -> np.ndarray:
    """(N,) bool: rows of the documents that a fit leaves out to choose by.

    Args:
        documents: (N,) which document each row is of.

    Raises:
        ValueError: fewer than two documents.
    """
    each = np.unique(np.asarray(documents))
    if len(each) < 2:
        raise ValueError(f"[fit] texts must be at least 2 documents, of which some are left out to choose by, but got {len(each)}.")
    return np.isin(documents, each[HELD // 2 :: HELD] if len(each) >= HELD else each[-1:])


@dataclass(frozen=True, eq=False)
class Sums:
    """X^T X, X^T Y, y^2, X and Y, summed over some rows around given means, float64."""

    rows: int
    gram: np.ndarray
    cross: np.ndarray
    energy: np.ndarray
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True, eq=False)
class Moments:
    """What ridge regression needs of rows x and y, once for all subsets of the inputs.

    Attributes:
        spans: first and last column (excluded) of each block of inputs.
        mean_x, mean_y: of the rows that are fitted on. kept, held: sums around them over these rows and over those left out.
    """

    spans: tuple[tuple[int, int], ...]
    mean_x: np.ndarray
    mean_y: np.ndarray
    kept: Sums
    held: Sums

    def columns(self, blocks: Sequence[int]) -> np.ndarray:
        """Columns of some blocks."""
        return np.concatenate([np.arange(*self.spans[b]) for b in blocks])

    def enough_for(self, blocks: Sequence[int]) -> bool:
        """Whether there are rows for so many inputs."""
        return self.kept.rows >= ROWS_EACH * len(self.columns(blocks))

    @cached_property
    def whole(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Mean of x and of y, X^T X and X^T Y of all rows, around these means."""
        rows = self.kept.rows + self.held.rows
        dx, dy = self.held.x / rows, self.held.y / rows
        gram = self.kept.gram + self.held.gram - rows * np.outer(dx, dx)
        return self.mean_x + dx, self.mean_y + dy, gram, self.kept.cross + self.held.cross - rows * np.outer(dx, dy)


def moments_of(blocks: Sequence[np.ndarray], y: np.ndarray, held: np.ndarray, noise: float = 0.0) -> Moments:
    """The moments of rows, some of them left out.

    Args:
        blocks: (N, D_b) float32 each, the blocks of inputs.
        y: (N, D_y) float32.
        held: (N,) bool, rows left out.
        noise: energy of an error of the inputs, a share of theirs, alike in all directions, that is expected where the map is used.
    """
    widths = np.cumsum([0, *(block.shape[1] for block in blocks)])
    kept = np.flatnonzero(~held)
    means = np.concatenate([block[kept].mean(0, dtype=np.float64) for block in blocks]), y[kept].mean(0, dtype=np.float64)
    sums = [_sums(blocks, y, rows, *means, noise) for rows in (kept, np.flatnonzero(held))]
    return Moments(tuple((int(a), int(b)) for a, b in pairwise(widths)), *means, *sums)


def _sums(blocks: Sequence[np.ndarray], y: np.ndarray, rows: np.ndarray, mean_x: np.ndarray, mean_y: np.ndarray, noise: float) -> Sums:
    inputs, outputs = len(mean_x), len(mean_y)
    gram, cross = np.zeros((inputs, inputs)), np.zeros((inputs, outputs))
    energy, sum_x, sum_y = np.zeros(outputs), np.zeros(inputs), np.zeros(outputs)
    for start in range(0, len(rows), BLOCK):
        some = rows[start : start + BLOCK]
        a, b = np.concatenate([block[some] for block in blocks], axis=1) - mean_x, y[some] - mean_y
        gram += a.T @ a
        cross += a.T @ b
        energy += np.sum(b * b, axis=0)
        sum_x += a.sum(0)
        sum_y += b.sum(0)
    gram += noise * _scale(gram) * np.eye(inputs)
    return Sums(len(rows), gram, cross, energy, sum_x, sum_y)


class _Subset:
    """Ridge regression from some of the inputs, for every penalty."""

    def __init__(self, moments: Moments, blocks: tuple[int, ...]) -> None:
        self.columns = moments.columns(blocks)
        gram, self.held = _block(moments.kept.gram, self.columns), moments.held
        self.values, self.vectors = np.linalg.eigh(gram)
        self.turned = self.vectors.T @ moments.kept.cross[self.columns]
        self.scale = _scale(gram)
        inner = self.vectors.T @ _block(self.held.gram, self.columns) @ self.vectors
        cross = self.vectors.T @ self.held.cross[self.columns]
        self.losses = np.array([_left_over(self.shrunk(p), inner, cross, self.held.energy) for p in PENALTIES])  # (P, D_y)

    def shrunk(self, penalty: float) -> np.ndarray:
        return self.turned / (np.maximum(self.values, 0) + penalty * self.scale)[:, None]

    def weights(self, penalty: float) -> np.ndarray:
        return self.vectors @ self.shrunk(penalty)


def _block(gram: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return gram if len(columns) == len(gram) else gram[np.ix_(columns, columns)]


def _scale(gram: np.ndarray) -> float:
    return max(float(np.trace(gram)) / len(gram), np.finfo(np.float64).tiny)


def _left_over(weights: np.ndarray, gram: np.ndarray, cross: np.ndarray, energy: np.ndarray) -> np.ndarray:
    """Squared error of each output."""
    return energy - 2 * np.sum(weights * cross, axis=0) + np.sum(weights * (gram @ weights), axis=0)


def fit_ridge(moments: Moments, groups: Sequence[np.ndarray] | None = None, *, most: int = 1, rank_loss: float | None = RANK_LOSS) -> Ridge:
    """The affine map from the blocks of inputs that explain the outputs best.

    Args:
        moments: of all inputs that may be used.
        groups: columns of y that share inputs and penalty; None is all in one.
        most: blocks of inputs, at most.
        rank_loss: take the lowest rank that loses at most so much of what is explained, where that makes the map smaller; None: never.

    Raises:
        ValueError: too few rows for a single block of inputs.
    """
    groups = [np.arange(len(moments.mean_y))] if groups is None else groups
    tried = dict(_tried(moments, most))
    energy = max(float(moments.held.energy.sum()), np.finfo(np.float64).tiny)
    inputs, penalties = [], []
    left_over = 0.0
    for columns in groups:
        losses = {blocks: subset.losses[:, columns].sum(axis=1) for blocks, subset in tried.items()}
        # A larger subset must earn each further block.
        best = min(losses, key=lambda blocks: losses[blocks].min() * (1 - GAIN) ** -len(blocks))
        inputs.append(best)
        penalties.append(PENALTIES[int(np.argmin(losses[best]))])
        left_over += float(losses[best].min())
    used = tuple(sorted(set().union(*inputs)))
    mean_x, mean_y, gram, cross = moments.whole
    columns_x = moments.columns(used)
    place = np.empty(len(mean_x), int)
    place[columns_x] = np.arange(len(columns_x))
    first, final = np.zeros((2, len(columns_x), len(mean_y)))  # fitted on the kept rows, and on all
    for columns, blocks, penalty in zip(groups, inputs, penalties, strict=True):
        own = moments.columns(blocks)
        square = _block(gram, own)
        regular = square + penalty * _scale(square) * np.eye(len(own))
        final[np.ix_(place[own], columns)] = np.linalg.solve(regular, cross[np.ix_(own, columns)])
        first[np.ix_(place[own], columns)] = tried[blocks].weights(penalty)[:, columns]
    left, right = final, None
    if rank_loss is not None and energy > left_over:
        bound = left_over + rank_loss * (energy - left_over)
        rank, left_over = _rank(first, moments, columns_x, left_over, bound)
        if rank is not None:
            directions = np.linalg.eigh(final.T @ _block(gram, columns_x) @ final)[1][:, ::-1][:, :rank]
            left, right = final @ directions, directions.T
    as_float = [None if a is None else np.ascontiguousarray(a, np.float32) for a in (mean_x[columns_x], mean_y, left, right)]
    assert as_float[0] is not None and as_float[1] is not None and as_float[2] is not None
    unexplained = left_over / energy if moments.held.energy.sum() > 0 else 0.0
    return Ridge(used, as_float[0], as_float[1], as_float[2], as_float[3], unexplained, tuple(penalties), tuple(inputs))


def _tried(moments: Moments, most: int) -> Iterator[tuple[tuple[int, ...], _Subset]]:
    """Subsets of the inputs: each block alone, then block by block those that explain most of all outputs together."""
    each: list[tuple[int, ...]] = [(block,) for block in range(len(moments.spans))]
    enough = [blocks for blocks in each if moments.enough_for(blocks)]
    if not enough:
        entries = min(b - a for a, b in moments.spans)
        raise ValueError(
            f"[fit] a map from {entries} entries needs at least {ROWS_EACH * entries} tokens to learn from, but got {moments.kept.rows}: "
            "give more text."
        )
    while enough:
        found = {blocks: _Subset(moments, blocks) for blocks in enough}
        yield from found.items()
        best = min(found, key=lambda blocks: found[blocks].losses.sum(axis=1).min())
        if len(best) == most:
            return
        more: list[tuple[int, ...]] = [tuple(sorted((*best, *one))) for one in each if one[0] not in best]
        enough = [blocks for blocks in more if moments.enough_for(blocks)]


def _rank(weights: np.ndarray, moments: Moments, columns: np.ndarray, left_over: float, bound: float) -> tuple[int | None, float]:
    """The lowest rank that makes a map smaller and loses little, or None, and what is left over then: at most the bound."""
    directions = np.linalg.eigh(weights.T @ _block(moments.kept.gram, columns) @ weights)[1][:, ::-1]
    gram, cross = _block(moments.held.gram, columns), moments.held.cross[columns]
    smallest = weights.shape[0] * weights.shape[1] // (weights.shape[0] + weights.shape[1])
    seen = weights @ directions
    for rank in sorted({max(1, int(share * smallest)) for share in RANKS}):
        # What rank r leaves is counted whole: the cross terms vanish on average only.
        lower = float(_left_over(seen[:, :rank] @ directions[:, :rank].T, gram, cross, moments.held.energy).sum())
        if lower <= bound:
            return rank, lower
    return None, left_over
