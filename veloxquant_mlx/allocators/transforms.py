"""Tables of the codec `tc` for one layer, learnt from calibration rows, and the widths that a budget of bits buys.

Keys before RoPE, head by head, in the basis where errors cost independently and rows are uncorrelated:

    A = F_K^(1/2) (eigenvalues floored),   A Cov(k) A = U diag(lam) U^T
    y = (k - mean) A U lam^(-1/2)          components of unit variance
    k = y back + mean,   back = lam^(1/2) U^T A^-1,   an error e of component i costs lam_i e^2 / 2 nats

F_K is the Fisher metric: noise of covariance S on a row costs 1/2 tr(F_K S) nats. Values are predicted from the decoded components of all
heads; what is left is coded after a rotation. Decoded points are unbiased, y^ = y + e with e uncorrelated with y and of variance
d / (1 - d), d the distortion of the component's points. Hence, with moments of exact rows alone, the best prediction at any widths:

    v ~ v_mean + W^T y^,   W = (C_yy + diag(d / (1 - d)) + ridge)^-1 C_yv

Float64 on the host, no random numbers: the same rows, the same tables. What is stored is rounded at once, so that tables that come back
from a file are those that were built.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from veloxquant_mlx.allocators.shapes import MAX_BITS, SHAPES, boundaries, distortion, points

GAUSSIAN = SHAPES.index(2.0)
VALUE_BITS = 6  # most bits of a rotated value component
SCALE_BITS = 6  # of the scale of a value row
LEAST_RATE, MOST_RATE = 1.25, 6.0
METRIC_FLOOR = 1e-3  # of a metric's eigenvalues, relative to their mean
GRADIENTS = 3  # a direction at least, over the relative size of an eigenvalue that is believed
RIDGE = 3e-3
CAUTION = 6
LEAST_SINGULAR = 1e-6  # of `back` with rows of unit size
_MOST_ROWS = 1 << 13  # that shapes are chosen by


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Calibration rows of one layer.

    Attributes:
        k, v: (N, H, D) float, keys before RoPE, half-split; values as cached.
        fisher_k, fisher_v: (H D, H D), nats per squared unit, twice over.
        gradients: that the metrics are the mean square of, or None where they are exact.
    """

    k: np.ndarray
    v: np.ndarray
    fisher_k: np.ndarray
    fisher_v: np.ndarray
    gradients: int | None = None


@dataclass(frozen=True, eq=False)
class TcTables:
    """What is known of a layer before its rows are coded.

    Attributes:
        k_mean, v_mean: (H, D).
        back: (H, D, D), a component's contribution to the row of its head.
        k_cost: (H, D), nats (twice over) of a unit of distortion of a component.
        shapes: (8, H, D) uint8, index into SHAPES at each width.
        c_yy, c_yv: (H D, H D), covariance of the components, and theirs with v.
        v_power: (H,), mean of |v - v_mean|^2.
        v_cost: (H,), nats (twice over) of a unit of squared error of a value row's component.
        rows: calibration rows, which say how far to trust c_yy.
        own: whether those are the very rows that are coded, so that there is nothing to be cautious about.
    """

    k_mean: np.ndarray
    v_mean: np.ndarray
    back: np.ndarray
    k_cost: np.ndarray
    shapes: np.ndarray
    c_yy: np.ndarray
    c_yv: np.ndarray
    v_power: np.ndarray
    v_cost: np.ndarray
    rows: int
    own: bool = False

    @property
    def heads(self) -> int:
        return self.k_mean.shape[0]

    @property
    def dim(self) -> int:
        return self.k_mean.shape[1]

    def forward(self) -> np.ndarray:
        """(H, D, D) float64, y = (k - mean) forward."""
        return inverse(self.back)

    def noise(self, widths: np.ndarray) -> np.ndarray:
        """Variance of the error of unbiased points, (H, D) float64, at widths (H, D) of at least 1; 0 where 0."""
        d = component_distortions(self.shapes)[widths, *np.indices(widths.shape)]
        return np.where(widths > 0, d / np.where(widths > 0, 1 - d, 1), 0.0)

    def ridge(self, inputs: int) -> float:
        """What is added to the variance of every input of the prediction: the more inputs there are for each calibration row, the more."""
        return RIDGE if self.own else max(RIDGE, CAUTION * inputs / max(self.rows, 1))

    def predictor(self, widths: np.ndarray) -> np.ndarray:
        """W for keys of these widths (H, D): (components of width > 0, H D) float64, in order of head and component."""
        used = np.flatnonzero(widths.reshape(-1))
        gram = self.c_yy.astype(np.float64)[np.ix_(used, used)]
        gram = gram + np.diag(self.noise(widths).reshape(-1)[used] + self.ridge(len(used)))
        return solved(gram, self.c_yv.astype(np.float64)[used])

    def residual_power(self, widths: np.ndarray) -> np.ndarray:
        """(H,), mean of |v - prediction|^2 at these widths of the keys."""
        used = np.flatnonzero(widths.reshape(-1))
        w, cross = self.predictor(widths), self.c_yv.astype(np.float64)[used]
        gram = self.c_yy.astype(np.float64)[np.ix_(used, used)] + np.diag(self.noise(widths).reshape(-1)[used])
        explained = (2 * w * cross - w * (gram @ w)).sum(axis=0).reshape(self.heads, self.dim).sum(axis=1)
        return np.maximum(self.v_power - explained, 0.0)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a file: float32, and float16 for what has unit size (rows of `back` over their largest entry, correlations)."""
        size = divisors(np.abs(self.back).max(axis=2))
        spread = divisors(np.sqrt(np.diagonal(self.c_yy)))
        v_spread = divisors(np.abs(self.c_yv).max(axis=0))
        return {
            "k_mean": self.k_mean.astype(np.float32),
            "v_mean": self.v_mean.astype(np.float32),
            "back": (self.back / size[..., None]).astype(np.float16),
            "back_size": size.astype(np.float32),
            "k_cost": self.k_cost.astype(np.float32),
            "shapes": self.shapes.astype(np.uint8),
            "c_yy": (self.c_yy / spread[:, None] / spread).astype(np.float16),
            "c_yy_size": spread.astype(np.float32),
            "c_yv": (self.c_yv / v_spread).astype(np.float16),
            "c_yv_size": v_spread.astype(np.float32),
            "v_power": self.v_power.astype(np.float32),
            "v_cost": self.v_cost.astype(np.float32),
            "rows": np.array([self.rows], np.uint32),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The tables that `to_arrays` gave.

        Raises:
            ValueError: an array is missing, of another dtype or shape, or holds what tables cannot.
        """
        if "k_mean" not in arrays or arrays["k_mean"].ndim != 2 or 0 in arrays["k_mean"].shape:
            raise ValueError(f"[TcTables] k_mean must be (H, D), but got {arrays['k_mean'].shape if 'k_mean' in arrays else 'none'}.")
        h, d = arrays["k_mean"].shape
        for name, (dtype, shape) in table_layout(h, d).items():
            array = arrays.get(name)
            if array is None or array.dtype != dtype or array.shape != shape:
                got = "none" if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(f"[TcTables] {name} must be {np.dtype(dtype)} {shape}, but got {got}.")
            if not np.isfinite(array).all():
                raise ValueError(f"[TcTables] {name} must be finite, but {np.count_nonzero(~np.isfinite(array))} values are not.")
        if arrays["shapes"].max() >= len(SHAPES):
            raise ValueError(f"[TcTables] shapes must be below {len(SHAPES)}, but got {arrays['shapes'].max()}.")
        for name in ("k_cost", "v_power", "v_cost"):
            if arrays[name].min() < 0:
                raise ValueError(f"[TcTables] {name} must not be negative, but got {arrays[name].min()}.")
        for name in ("back_size", "c_yy_size", "c_yv_size"):
            if arrays[name].min() <= 0:
                raise ValueError(f"[TcTables] {name} must be positive, but got {arrays[name].min()}.")
        if np.linalg.svd(arrays["back"].astype(np.float64), compute_uv=False).min() < LEAST_SINGULAR:
            raise ValueError("[TcTables] back must be invertible for every head, but is not.")
        wide = {name: arrays[name].astype(np.float64) for name in ("back", "c_yy", "c_yv")}
        spread = arrays["c_yy_size"].astype(np.float64)
        c_yy = wide["c_yy"] * spread[:, None] * spread
        largest = max(np.abs(c_yy).max(), (np.abs(wide["c_yv"]).max(axis=0) * arrays["c_yv_size"]).max())
        if largest > np.finfo(np.float32).max:
            raise ValueError(f"[TcTables] c_yy and c_yv must be within float32, but got {largest:.3g}.")
        return cls(
            arrays["k_mean"],
            arrays["v_mean"],
            (wide["back"] * arrays["back_size"].astype(np.float64)[..., None]).astype(np.float32),
            arrays["k_cost"],
            arrays["shapes"],
            ((c_yy + c_yy.T) / 2).astype(np.float32),
            (wide["c_yv"] * arrays["c_yv_size"].astype(np.float64)).astype(np.float32),
            arrays["v_power"],
            arrays["v_cost"],
            int(arrays["rows"][0]),
        )


def table_layout(heads: int, dim: int) -> dict[str, tuple[type, tuple[int, ...]]]:
    """dtype and shape of each array of `TcTables.to_arrays`."""
    row, full = (heads, dim), (heads * dim, heads * dim)
    return {
        "k_mean": (np.float32, row),
        "v_mean": (np.float32, row),
        "back": (np.float16, (heads, dim, dim)),
        "back_size": (np.float32, row),
        "k_cost": (np.float32, row),
        "shapes": (np.uint8, (MAX_BITS, *row)),
        "c_yy": (np.float16, full),
        "c_yy_size": (np.float32, (heads * dim,)),
        "c_yv": (np.float16, full),
        "c_yv_size": (np.float32, (heads * dim,)),
        "v_power": (np.float32, (heads,)),
        "v_cost": (np.float32, (heads,)),
        "rows": (np.uint32, (1,)),
    }


@dataclass(frozen=True)
class TcWidths:
    """Bits of a layer's components.

    Attributes:
        k: a string for each head, a digit 0..8 for each component.
        v: a digit 1..6 for each head.
    """

    k: tuple[str, ...]
    v: tuple[str, ...]

    def keys(self) -> np.ndarray:
        """(H, D) int."""
        return np.array([[int(digit) for digit in head] for head in self.k])

    def values(self) -> np.ndarray:
        """(H,) int."""
        return np.array([int(digit) for digit in self.v])


@dataclass(frozen=True, eq=False)
class KeyTables:
    """What coding the keys of a layer takes, for components of width > 0 alone, head by head.

    Attributes:
        mean: (H, D) float32.
        back: (n, D) float32.
        forward: (n, D) float64, column by column, or None where only decoding is possible.
        shapes: (n,) uint8, at the width in use.
    """

    mean: np.ndarray
    back: np.ndarray
    forward: np.ndarray | None
    shapes: np.ndarray


@dataclass(frozen=True, eq=False)
class ValueTables:
    """What coding the values of a layer takes.

    Attributes:
        k_mean, v_mean: (H, D) float32.
        forward: (n, D) float32, components of the keys that predict.
        mix: (n, H D) float32, W.
    """

    k_mean: np.ndarray
    v_mean: np.ndarray
    forward: np.ndarray
    mix: np.ndarray


def key_tables(tables: TcTables, widths: np.ndarray) -> KeyTables:
    """Of the calibration's precision, for widths (H, D)."""
    used = widths > 0
    forward = tables.forward().swapaxes(1, 2)
    shapes = np.take_along_axis(tables.shapes, np.maximum(widths - 1, 0)[None], axis=0)[0]
    return KeyTables(tables.k_mean, tables.back[used], forward[used], shapes[used])


def value_tables(tables: TcTables, widths: np.ndarray) -> ValueTables:
    """Of the calibration's precision, for keys of widths (H, D)."""
    forward = tables.forward().swapaxes(1, 2)[widths > 0]
    return ValueTables(tables.k_mean, tables.v_mean, forward.astype(np.float32), tables.predictor(widths).astype(np.float32))


def build_tc(rows: LayerRows) -> TcTables:
    """Tables of a layer from its calibration rows.

    Raises:
        ValueError: shapes that do not fit, no rows, or values that are not finite.
    """
    _check(rows)
    count, heads, dim = rows.k.shape
    k, v = rows.k.astype(np.float64), rows.v.astype(np.float64)
    k_mean, v_mean = k.mean(axis=0), v.mean(axis=0)
    k, v = k - k_mean, v - v_mean
    back, cost = np.empty((heads, dim, dim)), np.empty((heads, dim))
    for h in range(heads):
        at = slice(h * dim, (h + 1) * dim)
        back[h], cost[h] = _basis(k[:, h], rows.fisher_k[at, at].astype(np.float64), metric_floor(METRIC_FLOOR, dim, rows.gradients))
    y = np.einsum("nhd,hdi->nhi", k, inverse(back), optimize=True).reshape(count, -1)
    metric = np.diagonal(rows.fisher_v).reshape(heads, dim).astype(np.float64)
    tables = TcTables(
        k_mean=k_mean,
        v_mean=v_mean,
        back=back,
        k_cost=cost,
        shapes=_shapes(y[:: -(-count // _MOST_ROWS)]).reshape(MAX_BITS, heads, dim),
        c_yy=y.T @ y / count,
        c_yv=y.T @ v.reshape(count, -1) / count,
        v_power=(v * v).sum(axis=2).mean(axis=0),
        v_cost=np.maximum(metric.mean(axis=1), 0.0),
        rows=count,
    )
    return TcTables.from_arrays(tables.to_arrays())


def widths_for(tables: Mapping[str, TcTables], bits: float) -> dict[str, TcWidths]:
    """Bits of every component of every layer, keys and values, that make the expected cost least.

    Every next bit goes where it saves most, so that savings per bit are equal at the margin: reverse water-filling with one multiplier.

    Args:
        tables: of each layer, by name.
        bits: average over all values of K and V, scales included; see `average_bits`.

    Raises:
        ValueError: no layers, or bits out of range.
    """
    if not tables:
        raise ValueError("[widths_for] tables must hold a layer, but got none.")
    if not LEAST_RATE <= bits <= MOST_RATE:
        raise ValueError(f"[widths_for] bits must be {LEAST_RATE}..{MOST_RATE}, but got {bits}.")
    k_loss, v_loss, size = [], [], []
    value = np.array([distortion(GAUSSIAN, b) for b in range(1, VALUE_BITS + 1)])
    for table in tables.values():
        k_loss.append((table.k_cost.astype(np.float64) * component_distortions(table.shapes)).reshape(MAX_BITS + 1, -1))
        power = table.residual_power(np.full((table.heads, table.dim), 3))
        v_loss.append((table.v_cost * power)[None] * (value / (1 - value))[:, None])
        size.append(np.full(table.heads, table.dim))
    k_loss, v_loss, size = np.concatenate(k_loss, axis=1), np.concatenate(v_loss, axis=1), np.concatenate(size)
    budget = int(np.floor(bits * 2 * k_loss.shape[1] + 1e-6)) - int(size.sum()) - SCALE_BITS * len(size)
    # Savings per bit, made to fall from bit to bit, in one order: by saving, then keys before values, then by place.
    k_gain = np.minimum.accumulate(k_loss[:-1] - k_loss[1:], axis=0)
    v_gain = np.minimum.accumulate((v_loss[:-1] - v_loss[1:]) / size, axis=0)
    gain = np.concatenate([k_gain.reshape(-1), v_gain.reshape(-1)])
    price = np.concatenate([np.ones(k_gain.size, np.int64), np.tile(size, len(v_gain))])
    order = np.argsort(-gain, kind="stable")
    spent = np.cumsum(price[order])
    bought = int(np.searchsorted(spent, budget, side="right"))
    rest = order[bought:]
    left = budget - (int(spent[bought - 1]) if bought else 0)
    chosen = np.zeros(gain.size, bool)
    chosen[order[:bought]] = True
    chosen[rest[rest < k_gain.size][:left]] = True  # less than a value head's next bit is left: bits of keys
    k_widths = chosen[: k_gain.size].reshape(k_gain.shape).sum(axis=0)
    v_widths = 1 + chosen[k_gain.size :].reshape(v_gain.shape).sum(axis=0)
    out, k_at, v_at = {}, 0, 0
    for name, table in tables.items():
        own = k_widths[k_at : k_at + table.heads * table.dim].reshape(table.heads, table.dim)
        digits = tuple("".join(map(str, head)) for head in own.tolist())
        out[name] = TcWidths(digits, tuple(map(str, v_widths[v_at : v_at + table.heads].tolist())))
        k_at, v_at = k_at + own.size, v_at + table.heads
    return out


def average_bits(widths: Mapping[str, TcWidths]) -> float:
    """Bits per value over all keys and values, the scales of value rows included; tables, where they are carried, are not."""
    spent = sum(w.keys().sum() + (w.values() * len(w.k[0]) + SCALE_BITS).sum() for w in widths.values())
    return float(spent) / sum(2 * w.keys().size for w in widths.values())


def component_distortions(shapes: np.ndarray) -> np.ndarray:
    """Distortion of each component's points at 0..8 bits: shapes (8, H, D) -> (9, H, D) float64."""
    table = np.array([[distortion(shape, bits) for shape in range(len(SHAPES))] for bits in range(1, MAX_BITS + 1)])
    own = table[np.arange(MAX_BITS).reshape(-1, *[1] * (shapes.ndim - 1)), shapes]
    return np.concatenate([np.ones((1, *shapes.shape[1:])), own])


def inverse(back: np.ndarray) -> np.ndarray:
    """Inverse of (..., D, D) in float64, its rows made of one size first: y = (k - mean) inverse(back)."""
    back = back.astype(np.float64)
    size = np.sqrt((back * back).sum(axis=-1, keepdims=True))
    return np.linalg.inv(back / size) / np.swapaxes(size, -1, -2)


def _check(rows: LayerRows) -> None:
    if rows.k.ndim != 3 or rows.v.shape != rows.k.shape or 0 in rows.k.shape:
        raise ValueError(f"[build_tc] k and v must be (N, H, D), the same and not empty, but got {rows.k.shape} and {rows.v.shape}.")
    size = rows.k.shape[1] * rows.k.shape[2]
    if rows.gradients is not None and rows.gradients < 1:
        raise ValueError(f"[build_tc] gradients must be at least 1, but got {rows.gradients}.")
    for name in ("k", "v", "fisher_k", "fisher_v"):
        array = getattr(rows, name)
        if name.startswith("fisher") and array.shape != (size, size):
            raise ValueError(f"[build_tc] {name} must be ({size}, {size}), but got {array.shape}.")
        if not np.isfinite(array).all():
            bad = np.argwhere(~np.isfinite(array))
            raise ValueError(f"[build_tc] {name} must be finite, but {len(bad)} values are not, the first at {bad[0].tolist()}.")


def metric_floor(least: float, dim: int, gradients: int | None) -> float:
    """Least eigenvalue of a (D, D) metric, relative to their mean; from few gradients small ones are chance, and are not believed."""
    return least if gradients is None else max(least, min(1.0, GRADIENTS * dim / gradients))


def _basis(x: np.ndarray, metric: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """`back` (D, D) and the costs (D,) of centred rows (N, D) in a metric with eigenvalues of at least `floor`, costs descending."""
    values, vectors = np.linalg.eigh((metric + metric.T) / 2)
    unit = values.clip(0).mean()
    values = np.maximum(values / unit, floor) if unit > 0 else np.ones_like(values)
    root = vectors * np.sqrt(values) @ vectors.T
    unroot = vectors / np.sqrt(values) @ vectors.T
    lam, u = np.linalg.eigh(_shrunk(x @ root))
    lam, u = lam[::-1].clip(0), u[:, ::-1]
    # A component that never moves still needs a size; no bits go to it.
    still = max(1e-10 * lam[0], 1e-24)
    return np.sqrt(np.maximum(lam, still))[:, None] * (u.T @ unroot), lam * max(unit, 0.0)


def solved(gram: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Of `gram` x = `covariance`."""
    try:
        return np.linalg.solve(gram, covariance)
    except np.linalg.LinAlgError as error:
        raise ValueError(f"[TcTables] c_yy must be positive definite, but its {len(gram)} coded components are not.") from error


def _shrunk(x: np.ndarray) -> np.ndarray:
    """Covariance of centred rows; from fewer rows than a few D, drawn towards a multiple of I, so that no direction passes for still."""
    count, dim = x.shape
    share = (dim / (count + dim)) ** 4
    cov = x.T @ x / count
    return (1 - share) * cov + share * np.trace(cov) / dim * np.eye(dim)


def _shapes(y: np.ndarray) -> np.ndarray:
    """Index into SHAPES of the points with the least error on components of unit variance, at 1..8 bits: (N, n) -> (8, n)."""
    y = np.sort(y, axis=0)
    zero = np.zeros((1, y.shape[1]))
    first, second = (np.concatenate([zero, np.cumsum(power, axis=0)]) for power in (y, y * y))
    best = np.zeros((MAX_BITS, y.shape[1]), np.uint8)
    for bits in range(1, MAX_BITS + 1):
        errors = np.empty((len(SHAPES), y.shape[1]))
        for shape in range(len(SHAPES)):
            c, edges = points(shape, bits).astype(np.float64), boundaries(shape, bits)
            for i in range(y.shape[1]):
                at = np.concatenate([[0], np.searchsorted(y[:, i], edges), [len(y)]])
                n, sums = np.diff(at), np.diff(first[at, i])
                errors[shape, i] = second[-1, i] - 2 * (c * sums).sum() + (c * c * n).sum()
        best[bits - 1] = errors.argmin(axis=0)
    return best


def divisors(x: np.ndarray) -> np.ndarray:
    """Divisors: x, and 1 where it is zero."""
    return np.where(x > 0, x, 1.0)
