"""Lloyd-Max codebooks of a unit Gaussian, and of what a first stage leaves of it.

A codebook is optimal when each codeword is the mean of its cell and each cell boundary the midpoint of two codewords (Lloyd 1982,
Max 1960). Both conditions are one system of equations g(c) = c - mean of cell(c) = 0. It is solved by Newton's method from a
companded start (point density f^(1/3), Panter and Dite 1951), with Lloyd's own iteration wherever a Newton step would not help, so
that 256 levels take milliseconds. All integrals are closed forms in erfc, in float64, on the host; nothing is sampled.

The residual of a first stage {c_i} with boundaries t_i has the density f(r) = sum_i phi(c_i + r) [t_i <= c_i + r < t_i+1]: a sum of
Gaussian pieces. The Gaussian itself is the case of one piece, so one solver serves both. Both densities are even: only the positive
half is solved for, and the codebooks are exactly symmetric.
"""

import math
from functools import cache

import numpy as np

Codebook = tuple[float, ...]

MAX_BITS = 8
_GRID = 4096  # points of a companded start
_REACHES = tuple(6.0 * 2 ** (-j / 2) for j in range(14))  # a start ignores |r| beyond its reach; the solution does not
_LLOYD_STEPS = 30  # from each start, before the starts are compared
_POLISH_LIMIT = 5000
_TOLERANCE = 1e-13
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@cache
def gaussian_codebook(bits: int) -> Codebook:
    """Lloyd-Max codewords for N(0, 1).

    Args:
        bits: 1..8.

    Returns:
        2**bits ascending codewords, exactly symmetric, each a float32 value.

    Raises:
        ValueError: bits out of range.
    """
    _check_bits("gaussian_codebook", bits)
    pieces = np.array([[0.0, -np.inf, np.inf]])
    return _symmetric(_lloyd_max(pieces, 2**bits // 2))


@cache
def residual_codebook(bits: int, first: Codebook) -> Codebook:
    """Lloyd-Max codewords for x - nearest(first, x) with x ~ N(0, 1).

    Args:
        bits: 1..8.
        first: ascending, symmetric codewords of the first stage.

    Returns:
        2**bits ascending codewords, exactly symmetric, each a float32 value.

    Raises:
        ValueError: bits out of range.
    """
    _check_bits("residual_codebook", bits)
    centres = np.asarray(first)
    edges = np.concatenate([[-np.inf], (centres[1:] + centres[:-1]) / 2, [np.inf]])
    pieces = np.stack([centres, edges[:-1] - centres, edges[1:] - centres], axis=1)
    return _symmetric(_lloyd_max(pieces, 2**bits // 2))


def boundaries(codebook: Codebook) -> Codebook:
    """Midpoints between neighbouring codewords, rounded to float32: the cells of the nearest codeword."""
    c = np.asarray(codebook, dtype=np.float64)
    return _float32((c[1:] + c[:-1]) / 2)


def _check_bits(name: str, bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"[{name}] bits must be 1..{MAX_BITS}, but got {bits}.")


def _float32(values: np.ndarray) -> Codebook:
    # The shortest decimal that reads back as the same float32 keeps manifests short; float(...) of it rounds to that float32 again.
    return tuple(float(str(v)) for v in values.astype(np.float32))


def _symmetric(half: np.ndarray) -> Codebook:
    return _float32(np.concatenate([-half[::-1], half]))


def _phi(z: np.ndarray) -> np.ndarray:
    return np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _density(pieces: np.ndarray, r: np.ndarray) -> np.ndarray:
    c, lo, hi = pieces.T
    inside = (r[:, None] >= lo) & (r[:, None] < hi)
    return np.where(inside, _phi(c + r[:, None]), 0.0).sum(axis=1)


def _tails(pieces: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integrals of f and of u f(u) over (r, inf), for each r."""
    c, lo, hi = pieces.T
    a = c + np.clip(r[:, None], lo, hi)
    b = np.broadcast_to(c + hi, a.shape)
    mass = (_erfc(a / math.sqrt(2)) - _erfc(b / math.sqrt(2))) / 2
    moment = _phi(a) - _phi(b) - c * mass
    return mass.sum(axis=1), moment.sum(axis=1)


def _companded(pieces: np.ndarray, levels: int, reach: float) -> np.ndarray:
    """Starting codewords: equal steps of the integral of f^(1/3) over (0, reach)."""
    r = (np.arange(_GRID) + 0.5) * (reach / _GRID)
    cumulative = np.cumsum(np.cbrt(_density(pieces, r)))
    return np.interp((np.arange(levels) + 0.5) / levels, cumulative / cumulative[-1], r)


def _lloyd_max(pieces: np.ndarray, levels: int) -> np.ndarray:
    """The `levels` positive codewords for an even density, the best of the starts at every reach.

    A Gaussian has one solution; a residual's density is not log-concave and has several, that differ in how far the tail pulls.
    """
    best, least = None, math.inf
    for reach in _REACHES if len(pieces) > 1 else _REACHES[:1]:
        c = _companded(pieces, levels, reach)
        for _ in range(_LLOYD_STEPS):
            c = c - _stationarity(pieces, c)[0]
        gap, _, mass = _stationarity(pieces, c)
        error = -float(np.sum(mass * (c - gap) ** 2))  # mean squared error less the variance, were c moved to its cells' means
        if error < least:
            best, least = c, error
    return _polish(pieces, best)


def _polish(pieces: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Newton steps to the fixed point, Lloyd steps where Newton's would not halve the gap."""
    gap, jacobian, _ = _stationarity(pieces, c)
    for _ in range(_POLISH_LIMIT):
        if np.abs(gap).max() < _TOLERANCE:
            return c
        newton = c - np.linalg.solve(jacobian, gap)
        if newton[0] > 0 and np.all(np.diff(newton) > 0):
            newton_gap, newton_jacobian, _ = _stationarity(pieces, newton)
            if np.abs(newton_gap).max() < np.abs(gap).max() / 2:
                c, gap, jacobian = newton, newton_gap, newton_jacobian
                continue
        c = c - gap  # the means of the cells
        gap, jacobian, _ = _stationarity(pieces, c)
    raise ArithmeticError(f"Lloyd-Max with {2 * len(c)} levels has not converged: |c - mean| is {np.abs(gap).max():.2e}.")


def _stationarity(pieces: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """g(c) = c - mean of its cell, its tridiagonal Jacobian, and the mass of each cell."""
    edges = np.concatenate([[0.0], (c[1:] + c[:-1]) / 2])
    mass_above, moment_above = _tails(pieces, edges)
    mass = mass_above - np.append(mass_above[1:], 0.0)
    mean = (moment_above - np.append(moment_above[1:], 0.0)) / mass
    density = _density(pieces, edges)
    by_lower = density * (mean - edges) / mass  # d mean / d lower edge
    by_upper = np.append(density[1:] * (edges[1:] - mean[:-1]) / mass[:-1], 0.0)
    by_lower[0] = 0.0  # the edge at 0 is fixed
    jacobian = np.diag(1 - (by_lower + by_upper) / 2) - np.diag(by_lower[1:] / 2, -1) - np.diag(by_upper[:-1] / 2, 1)
    return c - mean, jacobian, mass
