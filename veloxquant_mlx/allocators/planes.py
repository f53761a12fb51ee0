"""Tables of complex codewords learnt from points, and the bits of a row shared among its planes.

Tables by splitting (Linde, Buzo and Gray 1980): every word becomes two along the direction in which its points spread, then hard EM.
Bits one by one, each to the plane whose error it lowers most. Float64 on the host, no random numbers: the same points, the same tables.
"""

import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native import searching

ROUNDS = 6
MAX_POINTS = 1 << 13
_BLOCK = 1 << 19  # distances held at a time


def split(points: np.ndarray, bits: int) -> list[np.ndarray]:
    """Tables of 2, 4 ... 2**bits words.

    Args:
        points: (n,) complex; n may be 0.
        bits: 1 or more.
    """
    points, words, tables = _thinned(points), np.zeros(1, np.complex128), []
    for _ in range(bits):
        index = _nearest(points, words)
        moved = points - words[index]
        power = np.bincount(index, np.abs(moved) ** 2, len(words)) / np.maximum(np.bincount(index, minlength=len(words)), 1)
        spread = _sums(index, moved**2, len(words))
        step = 0.5 * np.sqrt(power) * np.exp(0.5j * np.angle(spread))
        words = np.stack([words - step, words + step], axis=1).reshape(-1)
        words = _lloyd(points, words)
        tables.append(words)
    return tables


def refine(points: np.ndarray, kept: np.ndarray, widths: np.ndarray, tables: list[np.ndarray]) -> list[np.ndarray]:
    """The tables after hard EM on the planes that use them.

    Args:
        points, kept: (H, n, P), complex and bool.
        widths: (H, P) bits of each plane.
        tables: of 2, 4 ... words.
    """
    chosen = [points.swapaxes(1, 2)[widths == width][kept.swapaxes(1, 2)[widths == width]] for width in range(1, len(tables) + 1)]
    return [_lloyd(_thinned(own), words) if own.size >= 8 * len(words) else words for own, words in zip(chosen, tables, strict=True)]


def distortions(points: np.ndarray, tables: list[np.ndarray]) -> np.ndarray:
    """Mean squared error of each plane at 0, 1 ... bits: points (H, n, P) complex -> (bits + 1, H, P)."""
    points = points[:, :: max(1, points.shape[1] // 256)]
    errors = [(np.abs(points) ** 2).mean(axis=1)]
    for words in tables:
        nearest = words[_nearest(points.reshape(-1), words)].reshape(points.shape)
        # Points of 0 are rows that do not count.
        errors.append((np.abs(points - nearest) ** 2 * (points != 0)).mean(axis=1))
    return np.stack(errors)


def allocate(cost: np.ndarray, total: int) -> np.ndarray:
    """Bits per plane, at most `total` a head: cost (bits + 1, H, P) -> (H, P) int."""
    cost = _hull(cost)
    steps = cost[:-1] - cost[1:]
    top, heads, planes = steps.shape
    widths = np.zeros((heads, planes), np.int64)
    steps = np.concatenate([steps, np.full((1, heads, planes), -np.inf)])
    every = np.arange(heads)
    gains = steps[0].copy()
    for _ in range(min(total, top * planes)):
        best = gains.argmax(axis=1)
        widths[every, best] += 1
        gains[every, best] = steps[widths[every, best], every, best]
    return widths


def _hull(cost: np.ndarray) -> np.ndarray:
    """The largest convex function of the bits below the cost: a bit that does not pay counts with the ones after it that do."""
    hull = cost.copy()
    for a in range(len(cost)):
        for c in range(a + 2, len(cost)):
            for b in range(a + 1, c):
                hull[b] = np.minimum(hull[b], cost[a] + (cost[c] - cost[a]) * ((b - a) / (c - a)))
    return hull


def _lloyd(points: np.ndarray, words: np.ndarray) -> np.ndarray:
    for _ in range(ROUNDS):
        index = _nearest(points, words)
        counts = np.bincount(index, minlength=len(words))
        words = np.where(counts > 0, _sums(index, points, len(words)) / np.maximum(counts, 1), words)
    return words


def _sums(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(index, values.real, size) + 1j * np.bincount(index, values.imag, size)


def _nearest(points: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Index of the nearest word, the lowest of equals."""
    if native.available():
        return searching.nearest(_pairs(points), _pairs(words))
    index = np.zeros(len(points), np.int64)
    step = max(1, _BLOCK // len(words))
    for start in range(0, len(points), step):
        block = points[start : start + step, None]
        # |p - w|^2 less |p|^2.
        index[start : start + step] = (np.abs(words) ** 2 - 2 * (block.real * words.real + block.imag * words.imag)).argmin(axis=1)
    return index


def _pairs(z: np.ndarray) -> np.ndarray:
    """Complex numbers as rows of two."""
    return np.stack([z.real, z.imag], axis=-1)


def _thinned(points: np.ndarray) -> np.ndarray:
    return points[:: -(-len(points) // MAX_POINTS)] if len(points) > MAX_POINTS else points
