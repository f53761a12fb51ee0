"""Tables of the codec `tc` for one layer as a file carries them: rounded, and of as many bits as they save."""

from dataclasses import dataclass, replace

import numpy as np

from veloxquant_mlx.allocators.shapes import MAX_BITS, boundaries, distortion, points
from veloxquant_mlx.allocators.transforms import GAUSSIAN, KeyTables, TcTables, ValueTables, divisors, key_tables, solved

FORWARD_BITS = 4  # of the carried map from keys to what predicts values


@dataclass(frozen=True, eq=False)
class RowCodes:
    """Rows of numbers, a step and a width each: a number is its row's step times a point of the unit Gaussian.

    Attributes:
        widths: (n,) int, 0..8; a row of no bits is 0.
        codes: (n, m) uint8.
        step: (n,) float32.
    """

    widths: np.ndarray
    codes: np.ndarray
    step: np.ndarray

    def rows(self) -> np.ndarray:
        """(n, m) float32."""
        out = np.zeros(self.codes.shape, np.float32)
        for width in np.unique(self.widths[self.widths > 0]).tolist():
            own = self.widths == width
            out[own] = points(GAUSSIAN, width)[self.codes[own]]
        return out * self.step[:, None]


@dataclass(frozen=True, eq=False)
class CarriedValues:
    """Tables of the values as they are carried; `mix` is W from a component to its own head, `cross` to the others, one after another.

    Attributes:
        k_mean, v_mean: (H, D) float32.
        forward: (n, D), of FORWARD_BITS.
        mix, cross: (n, D) and (n, (H - 1) D).
        homes: (n,) int, the head of each component.
    """

    k_mean: np.ndarray
    v_mean: np.ndarray
    forward: RowCodes
    mix: RowCodes
    cross: RowCodes
    homes: np.ndarray

    def tables(self) -> ValueTables:
        """What they are decoded to."""
        mix = joined(self.mix.rows(), self.cross.rows(), self.homes)
        return ValueTables(self.k_mean, self.v_mean, self.forward.rows(), mix)


def rounded_keys(tables: TcTables, widths: np.ndarray) -> KeyTables:
    """The basis with 8-bit entries. It is oblique: rows are projected on it in the metric, and components are of unit variance again."""
    full, used, forward = tables.back.astype(np.float64), widths > 0, tables.forward()
    back, columns = [], []
    for h in range(tables.heads):
        b = dequantised(*quantised(full[h][used[h]]))
        metric = forward[h] * np.maximum(tables.k_cost[h], 1e-9 * tables.k_cost[h].max() or 1.0) @ forward[h].T
        f = metric @ b.T @ np.linalg.inv(_balanced(b @ metric @ b.T)) if len(b) else np.zeros((tables.dim, 0))
        rows = slice(h * tables.dim, (h + 1) * tables.dim)
        mixed = full[h] @ f
        spread = divisors(np.sqrt(np.einsum("ji,jk,ki->i", mixed, tables.c_yy[rows, rows].astype(np.float64), mixed).clip(0)))
        back.append(b * spread[:, None])
        columns.append((f / spread).T)
    whole = dequantised(*quantised(np.concatenate(back))).astype(np.float32)
    return KeyTables(tables.k_mean, whole, np.concatenate(columns), key_tables(tables, widths).shapes)


def carried_values(tables: TcTables, widths: np.ndarray, mix: np.ndarray, cross: np.ndarray) -> CarriedValues:
    """Tables of the values for keys of widths (H, D), with n rows of `mix` and `cross` bits (`mix_widths`)."""
    inputs = _Inputs.of(tables, widths)
    own, others = inputs.parted(inputs.predictor(tables, every=bool(cross.any())))
    codes = [row_codes(rows, bits) for rows, bits in ((own, mix), (others, cross))]
    return CarriedValues(tables.k_mean, tables.v_mean, inputs.forward, *codes, inputs.homes)


def mix_widths(tables: TcTables, widths: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits of each component's row of `mix` and of `cross` that pay for so many tokens, (n,) int each.

    A row of W with error e adds |e|^2 to what is left of a head's values: tokens D / 2 log2 of its growth, in bits. Components of other
    heads predict a good part of the values, but W of all heads grows with their square: it is taken where it saves more than it costs.
    """
    inputs = _Inputs.of(tables, widths)
    gaussian = np.array([1.0] + [distortion(GAUSSIAN, bits) for bits in range(1, MAX_BITS + 1)])
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    for every in (False, True):
        w = inputs.predictor(tables, every=every)
        lost = tokens * tables.dim / 2 / np.log(2) / inputs.left(tables, w)  # bits, of a unit of squared error of each head
        energy = (w * w).reshape(len(w), tables.heads, tables.dim).sum(axis=2) * np.diagonal(inputs.gram)[:, None] * lost
        own = np.arange(tables.heads) == inputs.homes[:, None]
        bits = [
            (part.sum(axis=1)[:, None] * gaussian + np.arange(MAX_BITS + 1) * size).argmin(axis=1) if size else np.zeros(len(w), np.int64)
            for part, size in ((energy * own, tables.dim), (energy * ~own, (tables.heads - 1) * tables.dim * every))
        ]
        coded = joined(*(row_codes(rows, b).rows() for rows, b in zip(inputs.parted(w), bits, strict=True)), inputs.homes)
        size = (bits[0].sum() + bits[1].sum() * (tables.heads - 1)) * tables.dim
        total = tokens * tables.dim / 2 * np.log2(inputs.left(tables, coded)).sum() + size
        if best is None or total < best[0]:
            best = total, *bits
    assert best is not None
    return best[1:]


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What values are predicted from where tables are carried: c = (k^ - mean) forward, of decoded keys.

    Decoded keys are in the span of `back`, so that whatever `forward` is, c is an invertible map of their components as long as
    back forward is invertible, and W undoes it: few bits do. Its rows are scaled so that c has unit variance.

    Attributes:
        forward: (n, D) codes.
        homes: (n,) int, the head of each.
        gram, covariance: (n, n) and (n, H D), of c, and of c with v.
    """

    forward: RowCodes
    homes: np.ndarray
    gram: np.ndarray
    covariance: np.ndarray

    @classmethod
    def of(cls, tables: TcTables, widths: np.ndarray) -> "_Inputs":
        keys, full, homes = rounded_keys(tables, widths), tables.back.astype(np.float64), np.nonzero(widths)[0]
        assert keys.forward is not None
        codes = row_codes(keys.forward, np.full(len(homes), FORWARD_BITS))
        turn, exact = np.zeros((len(homes),) * 2), np.zeros((tables.heads * tables.dim, len(homes)))
        for h in range(tables.heads):
            own = homes == h
            turn[np.ix_(own, own)] = keys.back[own].astype(np.float64) @ codes.rows()[own].T
            exact[h * tables.dim : (h + 1) * tables.dim, own] = full[h] @ keys.forward[own].T
        noise = tables.noise(widths)[widths > 0]
        gram = exact.T @ tables.c_yy @ exact
        gram = turn.T @ (gram + np.diag(noise)) @ turn
        step = (codes.step / divisors(np.sqrt(np.diagonal(gram).clip(0)))).astype(np.float32)
        scale = np.where(codes.step > 0, step.astype(np.float64) / divisors(codes.step), 0.0)
        covariance = (turn * scale).T @ (exact.T @ tables.c_yv)
        return cls(replace(codes, step=step), homes, gram * scale[:, None] * scale, covariance)

    def predictor(self, tables: TcTables, every: bool) -> np.ndarray:
        """W, (n, H D); where not `every`, from a head's components to its own values alone."""
        if every:
            return solved(self.gram + np.eye(len(self.homes)) * tables.ridge(len(self.homes)), self.covariance)
        w = np.zeros(self.covariance.shape)
        for h in range(tables.heads):
            own, columns = np.flatnonzero(self.homes == h), np.arange(h * tables.dim, (h + 1) * tables.dim)
            gram = self.gram[np.ix_(own, own)] + np.eye(len(own)) * tables.ridge(len(own))
            w[np.ix_(own, columns)] = solved(gram, self.covariance[np.ix_(own, columns)])
        return w

    def left(self, tables: TcTables, w: np.ndarray) -> np.ndarray:
        """(H,), mean of |v - prediction|^2, and a little."""
        explained = (2 * w * self.covariance - w * (self.gram @ w)).sum(axis=0).reshape(tables.heads, tables.dim).sum(axis=1)
        return np.maximum(tables.v_power - explained, 1e-6 * divisors(tables.v_power))

    def parted(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """W to each component's own head and to the others, (n, D) and (n, (H - 1) D)."""
        own = _to_own(self.homes, w.shape[1], self.forward.codes.shape[1])
        return w[own].reshape(len(w), self.forward.codes.shape[1]), w[~own].reshape(len(w), w.shape[1] - self.forward.codes.shape[1])


def joined(own: np.ndarray, cross: np.ndarray, homes: np.ndarray) -> np.ndarray:
    """W (n, H D) of what it does to a component's own head (n, D) and to the others (n, (H - 1) D)."""
    mix = np.zeros((len(own), own.shape[1] + cross.shape[1]), own.dtype)
    mask = _to_own(homes, mix.shape[1], own.shape[1])
    mix[mask], mix[~mask] = own.reshape(-1), cross.reshape(-1)
    return mix


def row_codes(rows: np.ndarray, widths: np.ndarray) -> RowCodes:
    """Rows (n, m) coded with widths (n,): the step is a row's root mean square."""
    step = np.sqrt((rows * rows).mean(axis=1)).astype(np.float32) if rows.shape[1] else np.zeros(len(rows), np.float32)
    unit, codes = rows / divisors(step)[:, None], np.zeros(rows.shape, np.uint8)
    for width in np.unique(widths[widths > 0]).tolist():
        own = widths == width
        codes[own] = np.searchsorted(boundaries(GAUSSIAN, width), unit[own])
    return RowCodes(widths, codes, np.where(widths > 0, step, np.float32(0)))


def quantised(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, m) -> int8 codes and (n,) float32 steps: the largest entry of a row is 127."""
    step = divisors((np.abs(rows).max(axis=1, initial=0) / 127).astype(np.float32))
    return np.rint(rows / step[:, None]).clip(-127, 127).astype(np.int8), step


def dequantised(codes: np.ndarray, step: np.ndarray) -> np.ndarray:
    """(n, m) float64."""
    return codes.astype(np.float64) * step.astype(np.float64)[:, None]


def _to_own(homes: np.ndarray, width: int, dim: int) -> np.ndarray:
    """(n, H D), which entries of W are of a component's own head."""
    return np.arange(width) // dim == homes[:, None]


def _balanced(gram: np.ndarray) -> np.ndarray:
    """A symmetric matrix that is safe to invert: its diagonal raised by a little."""
    return gram + np.diag(1e-9 * np.diagonal(gram))
