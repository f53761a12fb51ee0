"""Lloyd-Max points of unit-variance generalised Gaussians, for components whose tails are heavier than a Gaussian's.

    p(x) ~ exp(-|x / a|^beta),    a^2 = Gamma(1 / beta) / Gamma(3 / beta)        beta 2: Gaussian, 1: Laplace

Optimal points are the means of their cells, whose boundaries are midpoints (Lloyd 1982, Max 1960); Newton's method from a companded start
(point density p^(1/3), Panter and Dite 1951), with Lloyd's own iteration where a Newton step would not help. The tail integrals of p and
x p come from one table per shape: four-point Gauss-Legendre on cells of w, x = a w^4 (smooth at 0 for every beta), summed from the tail
inwards and read between its nodes by cubic Hermite interpolation, whose slopes are the integrands themselves. Float64, nothing sampled.
"""

import math
from functools import cache

import numpy as np

SHAPES = (2.0, 1.4, 1.0, 0.75, 0.6)
MAX_BITS = 8
_CELLS = 4096
_POWER = 4  # x = a w^4
_DEEPEST = 45.0  # -log p at the end of the table: what is beyond weighs 1e-17
_STEPS = 2000
_TOLERANCE = 1e-12


@cache
def points(shape: int, bits: int) -> np.ndarray:
    """Lloyd-Max points of unit variance, exactly symmetric.

    Args:
        shape: index into SHAPES.
        bits: 1..8.

    Returns:
        (2**bits,) float32, ascending, read-only.

    Raises:
        ValueError: no such shape or bits.
    """
    half = _half(shape, bits).astype(np.float32)
    return _frozen(np.concatenate([-half[::-1], half]))


@cache
def distortion(shape: int, bits: int) -> float:
    """Mean squared error of those points on their own density; 1 for 0 bits."""
    if bits == 0:
        return 1.0
    c = _half(shape, bits)
    return 1.0 - 2.0 * float(np.sum(_cells(shape, c)[0] * c * c))


@cache
def boundaries(shape: int, bits: int) -> np.ndarray:
    """Midpoints of neighbouring points: (2**bits - 1,) float32, read-only."""
    c = points(shape, bits).astype(np.float64)
    return _frozen(((c[1:] + c[:-1]) / 2).astype(np.float32))


def _frozen(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


@cache
def _half(shape: int, bits: int) -> np.ndarray:
    """The positive points."""
    if not 0 <= shape < len(SHAPES):
        raise ValueError(f"[shapes] shape must be 0..{len(SHAPES) - 1}, but got {shape}.")
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"[shapes] bits must be 1..{MAX_BITS}, but got {bits}.")
    beta, scale = SHAPES[shape], _scale(shape)
    levels = 1 << bits - 1
    w = _table(shape)[0]
    x = scale * w**_POWER
    density = np.exp(-((w**_POWER) ** beta) / 3)
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))])
    c = np.interp((np.arange(levels) + 0.5) / levels, cumulative / cumulative[-1], x)
    for _ in range(8):
        c = c - _gap(shape, c)[0]
    gap, jacobian = _gap(shape, c)
    for _ in range(_STEPS):
        if np.abs(gap).max() < _TOLERANCE * c[-1]:
            return c
        newton = c - np.linalg.solve(jacobian, gap)
        if newton[0] > 0 and np.all(np.diff(newton) > 0):
            newton_gap, newton_jacobian = _gap(shape, newton)
            if np.abs(newton_gap).max() < np.abs(gap).max() / 2:
                c, gap, jacobian = newton, newton_gap, newton_jacobian
                continue
        c = c - gap
        gap, jacobian = _gap(shape, c)
    raise ArithmeticError(f"Lloyd-Max of beta {beta} with {bits} bits has not converged: |c - mean| is {np.abs(gap).max():.2e}.")


def _scale(shape: int) -> float:
    return math.sqrt(math.gamma(1 / SHAPES[shape]) / math.gamma(3 / SHAPES[shape]))


@cache
def _table(shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes w, and at each the integrals of p and of x p beyond it."""
    w = np.linspace(0, _DEEPEST ** (1 / (_POWER * SHAPES[shape])), _CELLS + 1)
    at, weight = np.polynomial.legendre.leggauss(4)
    inner = (w[:-1, None] + w[1:, None]) / 2 + np.diff(w)[:, None] / 2 * at
    sums = [(f(shape, inner) @ weight) * np.diff(w) / 2 for f in (_mass_slope, _moment_slope)]
    beyond = [np.concatenate([np.cumsum(s[::-1])[::-1], [0.0]]) for s in sums]
    return w, beyond[0], beyond[1]


def _density(shape: int, x: np.ndarray) -> np.ndarray:
    beta, scale = SHAPES[shape], _scale(shape)
    return np.exp(-((x / scale) ** beta)) * (beta / (2 * scale * math.gamma(1 / beta)))


def _mass_slope(shape: int, w: np.ndarray) -> np.ndarray:
    """p(x) dx / dw."""
    scale = _scale(shape)
    return _density(shape, scale * w**_POWER) * scale * _POWER * w ** (_POWER - 1)


def _moment_slope(shape: int, w: np.ndarray) -> np.ndarray:
    return _mass_slope(shape, w) * _scale(shape) * w**_POWER


def _tails(shape: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integrals of p and of u p(u) over (x, inf), x >= 0."""
    nodes, *beyond = _table(shape)
    w = np.minimum((x / _scale(shape)) ** (1 / _POWER), nodes[-1])
    step = nodes[1]
    cell = np.minimum((w / step).astype(np.int64), _CELLS - 1)
    u = (w - nodes[cell]) / step
    out = []
    for values, slope in zip(beyond, (_mass_slope, _moment_slope), strict=True):
        a, b = values[cell], values[cell + 1]
        da, db = -slope(shape, nodes[cell]) * step, -slope(shape, nodes[cell + 1]) * step
        out.append(a + u * (da + u * (3 * (b - a) - 2 * da - db + u * (2 * (a - b) + da + db))))
    return out[0], out[1]


def _cells(shape: int, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mass and mean of the cell of each positive point, and the cells' lower edges."""
    edges = np.concatenate([[0.0], (c[1:] + c[:-1]) / 2])
    mass, moment = (above - np.append(above[1:], 0.0) for above in _tails(shape, edges))
    return mass, moment / mass, edges


def _gap(shape: int, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """c - mean of its cell, and the tridiagonal Jacobian of that."""
    mass, mean, edges = _cells(shape, c)
    density = _density(shape, edges)
    by_lower = density * (mean - edges) / mass
    by_upper = np.append(density[1:] * (edges[1:] - mean[:-1]) / mass[:-1], 0.0)
    by_lower[0] = 0.0  # the edge at 0 is fixed
    jacobian = np.diag(1 - (by_lower + by_upper) / 2) - np.diag(by_lower[1:] / 2, -1) - np.diag(by_upper[:-1] / 2, 1)
    return c - mean, jacobian
