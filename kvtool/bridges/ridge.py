"""Affine maps between rows in closed form: ridge regression from Gram matrices, its penalty and its rank chosen on documents left out.

    W = (G + p g I)^-1 C,    G = X^T X, C = X^T Y of centred rows, g = tr G / D_x      y = (x - mean x) W + mean y

Rank r: the predictions' r leading directions, W V V^T with V the leading eigenvectors of W^T G W (reduced-rank regression, Izenman 1975).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
HELD = 5  # every fifth document is left out to choose by
ROWS_EACH = 2  # training rows that an input must have at least
RANK_LOSS = 0.01  # of what the full map explains, at most so much may be lost by a lower rank


@dataclass(frozen=True, eq=False)
class Ridge:
    """An affine map.

    Attributes:
        source_mean: (D_x,). target_mean: (D_y,). left, right: (D_x, r), (r, D_y), or left (D_x, D_y) alone. float32.
        unexplained: energy left on the held-out documents over that of y around the training mean.
        penalty: p.
    """

    source_mean: np.ndarray
    target_mean: np.ndarray
    left: np.ndarray
    right: np.ndarray | None
    unexplained: float
    penalty: float


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


def fit_ridge(x: np.ndarray, y: np.ndarray, held: np.ndarray, *, low_rank: bool = True) -> Ridge:
    """The affine map from x to y.

    Args:
        x: (N, D_x) float32; y: (N, D_y) float32.
        held: (N,) bool, rows left out.
        low_rank: take the lowest rank that loses little, where that makes the map smaller.

    Raises:
        ValueError: too few rows for so many inputs.
    """
    kept = ~held
    rows, inputs = int(kept.sum()), x.shape[1]
    if rows < ROWS_EACH * inputs:
        raise ValueError(
            f"[fit] a map from {inputs} entries needs at least {ROWS_EACH * inputs} tokens to learn from, but got {rows}: "
            "give more text, or fewer source layers."
        )
    mean_x, mean_y = x[kept].mean(0, dtype=np.float64), y[kept].mean(0, dtype=np.float64)
    gram, cross, _ = _moments(x[kept], y[kept], mean_x, mean_y)
    gram_held, cross_held, energy = _moments(x[held], y[held], mean_x, mean_y)
    values, vectors = np.linalg.eigh(gram)
    turned, scale = vectors.T @ cross, max(float(np.trace(gram)) / inputs, np.finfo(np.float64).tiny)

    def weights(penalty: float) -> np.ndarray:
        return vectors @ (turned / (np.maximum(values, 0) + penalty * scale)[:, None])

    def left_over(w: np.ndarray) -> float:
        return float(energy - 2 * np.sum(w * cross_held) + np.sum(w * (gram_held @ w)))

    losses = [left_over(weights(p)) for p in PENALTIES]
    best = int(np.argmin(losses))
    w, loss, right = weights(PENALTIES[best]), losses[best], None
    left = w
    if low_rank and energy > loss:
        directions = np.linalg.eigh(w.T @ gram @ w)[1][:, ::-1]
        # What rank r leaves, for all r: the cross terms vanish on average only, so each is counted with the rest.
        seen = w @ directions
        bound = loss + RANK_LOSS * (energy - loss)
        smallest = w.shape[0] * w.shape[1] // (w.shape[0] + w.shape[1])
        for rank in sorted({max(1, int(share * smallest)) for share in (0.125, 0.25, 0.5, 0.75, 1.0)}):
            lower = left_over(seen[:, :rank] @ directions[:, :rank].T)
            if lower <= bound:
                left, right, loss = seen[:, :rank], directions[:, :rank].T, lower
                break
    unexplained = loss / energy if energy > 0 else 0.0
    as_float = [None if a is None else np.ascontiguousarray(a, np.float32) for a in (mean_x, mean_y, left, right)]
    assert as_float[0] is not None and as_float[1] is not None and as_float[2] is not None
    return Ridge(as_float[0], as_float[1], as_float[2], as_float[3], unexplained, PENALTIES[best])


def _moments(x: np.ndarray, y: np.ndarray, mean_x: np.ndarray, mean_y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """X^T X, X^T Y and |Y|^2 of centred rows, float64, some rows at a time."""
    gram, cross, energy = np.zeros((x.shape[1], x.shape[1])), np.zeros((x.shape[1], y.shape[1])), 0.0
    for start in range(0, len(x), 4096):
        a, b = x[start : start + 4096] - mean_x, y[start : start + 4096] - mean_y
        gram += a.T @ a
        cross += a.T @ b
        energy += float(np.sum(b * b))
    return gram, cross, energy
