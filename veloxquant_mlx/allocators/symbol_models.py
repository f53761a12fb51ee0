"""Bank of probability models for quantised components, the choice of one per component and chunk of tokens, and their centroids.

A class is a zero-mean density of deviation s = 2^(t / 2) in steps, Laplace or Gaussian, over the cells of rounding: v - 1/2 to v + 1/2.

    symbols      -A .. A of the class and an escape; frequencies are integers that sum to 2^16, each at least 1
    an escape    is followed by the value's 32 bits
    shift class  v = (v >> n) 2^n + low: the high part as in the widest Laplace class, n low bits as they are; so any int32 is exact

Frequencies are rounded from float64; none lies near a tie, so that every mathematics library gives the same integers (a test sees to
it, and no chunk is coded where `CHECKSUM` differs). Classes are chosen by exact code length, the length of the class's own index included.
"""

import math
import zlib
from functools import cache
from typing import NamedTuple

import numpy as np

TOTAL_BITS = 16
TOTAL = 1 << TOTAL_BITS
CHUNK = 256  # tokens that share a component's class
LAPLACE_T, GAUSS_T = range(-8, 11), range(-5, 11)  # half octaves of s
SHIFTS = 26  # deviations up to 2^31
ESCAPE_BITS = 32
RANK_RATIO = 0.4  # a class one further from the expected one is this much rarer
GAIN_FLOOR = 0.45
CHECKSUM = 0x4FE5AA0C  # of every frequency


class Bank(NamedTuple):
    """The models of all classes, Laplace first, then Gaussian; shift classes follow and have no model of their own.

    Attributes:
        family, t: of each class, shift classes included (family 0, t = 2 log2 s).
        reach: A of each class.
        frequencies: of each class, 2 A + 2 integers: symbols -A .. A, escape.
        cost: (classes, 2 W + 1) bits of a symbol clipped to -W .. W, W = widest A + 1.
        centroid: (classes, 2 W + 1) mean of y given the symbol, in steps.
        gain: E[y y^] / E[y^2] of each class.
        order: (all classes, all classes) classes by distance from the expected one: row e, column rank.
        rank: the inverse of each row.
        rank_frequencies: of a rank, sum 2^16.
    """

    family: np.ndarray
    t: np.ndarray
    reach: np.ndarray
    frequencies: list[np.ndarray]
    cost: np.ndarray
    centroid: np.ndarray
    gain: np.ndarray
    order: np.ndarray
    rank: np.ndarray
    rank_frequencies: np.ndarray


def _tail(family: int, s: float, x: float) -> float:
    """P(y > x), x >= 0."""
    return 0.5 * (math.exp(-math.sqrt(2) * x / s) if family == 0 else math.erfc(x / (math.sqrt(2) * s)))


def _moment(family: int, s: float, x: float) -> float:
    """E[y; y > x], x >= 0."""
    if family == 0:
        b = s / math.sqrt(2)
        return 0.5 * (x + b) * math.exp(-x / b)
    return s / math.sqrt(2 * math.pi) * math.exp(-0.5 * (x / s) ** 2)


def exact_frequencies(family: int, t: int) -> np.ndarray:
    """Float64 multiples of 2^-16 of the symbols 1, 2, ... A and of the escape, before rounding."""
    s, tails, x = 2.0 ** (t / 2), [], 0.5
    while not tails or tails[-1] * TOTAL >= 0.5 or len(tails) < 2:
        tails.append(_tail(family, s, x))
        x += 1
    tails = np.array([*tails, _tail(family, s, x)])
    inner = tails[:-1] - tails[1:]
    reach = max(1, int((inner * TOTAL >= 0.5).sum()))
    return np.append(inner[:reach], 2 * tails[reach]) * TOTAL


@cache
def bank() -> Bank:
    """The one bank, computed once."""
    family = np.array([0] * len(LAPLACE_T) + [1] * len(GAUSS_T))
    t = np.array([*LAPLACE_T, *GAUSS_T])
    frequencies = []
    for f, half in zip(family.tolist(), t.tolist(), strict=True):
        counts = np.maximum(1, np.floor(exact_frequencies(f, half) + 0.5)).astype(np.int64)
        side = counts[:-1]
        frequencies.append(np.concatenate([side[::-1], [TOTAL - 2 * side.sum() - counts[-1]], side, counts[-1:]]))
    reach = np.array([(len(c) - 2) // 2 for c in frequencies])
    width = int(reach.max()) + 1
    cost, centroid, gain = np.empty((len(t), 2 * width + 1)), np.tile(np.arange(-width, width + 1.0), (len(t), 1)), np.empty(len(t))
    for c, counts in enumerate(frequencies):
        a, s = int(reach[c]), 2.0 ** (t[c] / 2)
        cost[c] = TOTAL_BITS - math.log2(counts[-1]) + ESCAPE_BITS
        cost[c, width - a : width + a + 1] = TOTAL_BITS - np.log2(counts[:-1])
        edges = np.arange(a + 1) + 0.5
        mass, first = (-np.diff([g(int(family[c]), s, x) for x in edges]) for g in (_tail, _moment))
        side = np.where(mass > 1e-30, first / np.maximum(mass, 1e-300), edges[:-1])
        side = np.clip(side, edges[:-1], edges[1:])
        centroid[c, width + 1 : width + 1 + a], centroid[c, width - a : width] = side, -side[::-1]
        gain[c] = 2 * (mass * side**2).sum() / s**2
    all_t = np.concatenate([t, max(LAPLACE_T) + 2 * np.arange(1, SHIFTS + 1)])
    all_family = np.concatenate([family, np.zeros(SHIFTS, int)])
    apart = 4 * np.abs(all_t[:, None] - all_t) + 2 * (all_family[:, None] != all_family) + (all_t[:, None] < all_t)
    order = np.argsort(apart, axis=1, kind="stable")
    ranks = len(all_t)
    scaled = RANK_RATIO ** np.arange(ranks) * (1 - RANK_RATIO) * (TOTAL - ranks)
    rank_frequencies = 1 + np.floor(scaled).astype(np.int64)
    rank_frequencies[0] += TOTAL - rank_frequencies.sum()
    return Bank(
        all_family, all_t, reach, frequencies, cost, centroid, gain, order, np.argsort(order, axis=1, kind="stable"), rank_frequencies
    )


def checksum() -> int:
    """CRC-32 of all frequencies: what decoding depends on."""
    b = bank()
    return zlib.crc32(np.concatenate([*b.frequencies, b.rank_frequencies]).astype("<u4").tobytes())


def shifted(expected: np.ndarray, steps: float) -> np.ndarray:
    """The expected classes when the step is `2^-(steps / 2)` of what it was: the same family, t + steps as near as there is."""
    b = bank()
    wanted = b.t[expected] + round(steps)
    return np.where(b.family[None] == b.family[expected][:, None], np.abs(b.t[None] - wanted[:, None]), np.inf).argmin(axis=1)


def choose(q: np.ndarray, expected: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """The class of each component with the least code length.

    Args:
        q: (n, M) integers, a chunk or any other number of rows.
        expected: (M,) classes whose indices are cheap; None: indices cost nothing.
    Returns:
        classes (M,), and the code length in bits, class indices included.
    """
    b = bank()
    width, comps = b.cost.shape[1] // 2, q.shape[1]
    inside = np.clip(q, -width, width).astype(np.int32) + width
    counts = np.bincount((inside + np.arange(comps, dtype=np.int32) * (2 * width + 1)).ravel(), minlength=comps * (2 * width + 1))
    bits = np.full((comps, len(b.t)), np.inf)
    plain = len(b.frequencies)
    bits[:, :plain] = counts.reshape(comps, -1).astype(np.float32) @ b.cost.T.astype(np.float32)
    widest = len(LAPLACE_T) - 1
    size = np.abs(q.astype(np.float64))
    for i in np.flatnonzero(size.max(axis=0, initial=0) >= width):
        # The best deviation, 2^n 32, lies between those that suit the median and the mean.
        first, last = (math.log2(1 + f(size[:, i])) for f in (np.median, np.mean))
        for n in range(max(1, int(first) - 6), min(SHIFTS, max(1, int(last) - 2)) + 1):
            high = np.clip(q[:, i].astype(np.int64) >> n, -width, width) + width
            bits[i, plain + n - 1] = b.cost[widest, high].sum() + n * len(q)
    if expected is not None:
        bits += np.take_along_axis((TOTAL_BITS - np.log2(b.rank_frequencies))[None], b.rank[expected], axis=1)
    classes = bits.argmin(axis=1)
    return classes, float(np.take_along_axis(bits, classes[:, None], axis=1).sum())


def centroids(q: np.ndarray, classes: np.ndarray, unbiased: bool) -> np.ndarray:
    """Decoded components in steps, float32, of a chunk (n, M) in classes (M,).

    Args:
        unbiased: divided by the class's gain, so that the error is uncorrelated with y.
    """
    b = bank()
    width, plain = b.cost.shape[1] // 2, len(b.frequencies)
    model = np.minimum(classes, plain - 1)
    table = b.centroid / (np.maximum(b.gain, GAIN_FLOOR)[:, None] if unbiased else 1.0)
    inside = table.astype(np.float32)[model, np.clip(q, -width, width).astype(np.int64) + width]
    return np.where((classes < plain) & (np.abs(q) <= b.reach[model]), inside, q.astype(np.float32))
