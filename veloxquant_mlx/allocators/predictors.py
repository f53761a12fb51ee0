"""Tables of `tcz`: predictors of a layer's keys and values from rows that are already decoded, and the bases that residuals are coded in.

    keys     p = [k^, v^ of the layer before] P + b          (the first layer: p = b)
    values   p = [k^ of this layer, k^, v^ of the layer before] P + b
    residual y = (x - p) F,  x^ = p + y^ F^-1,  F = A U,  A = metric^(1/2),  U = eigenvectors of A Cov(x - p) A

The metric is the Fisher information of coded rows over all heads of a layer, so a unit of y costs the same anywhere in the model, and one
step for all components is the best there is (reverse water-filling). Predictors are fitted on rows quantised at the design step, layer by
layer: fitted on exact rows they would trust details that quantisation removes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from veloxquant_mlx.allocators.symbol_models import CHUNK, bank, centroids, choose, shifted
from veloxquant_mlx.allocators.transforms import LayerRows, metric_floor

RIDGE = 3e-3  # of the mean variance of the inputs
FLOORS = {"k": 1e-3, "v": 0.02}  # of the metric's mean eigenvalue, from many gradients
CHUNK_BITS = 64  # of a chunk besides its symbols: its length and the end of the coder's state
ROLES = ("k", "v")
RATES = (1e-3, 64.0)  # of a design
STEPS = (1e-12, 1e12)
LARGEST_SYMBOL = 2.0**30
_STORED = {
    "predictor": ("f2", "i1"),
    "predictor_scale": ("f4",),
    "bias": ("f4",),
    "basis": ("f2", "i1"),
    "basis_scale": ("f4",),
    "classes": ("u1",),
}
SEARCH_ROWS = 4096  # of the calibration, that a design's step is found on
SEARCH_CHUNKS = 8  # of a cache, that its step is found on
_MOST_TRIALS = 16
_SLOPE = 0.6  # bits a value that half the step costs, about


@dataclass(frozen=True)
class RoleTables:
    """How one role of one layer is predicted and coded; W = H D.

    Attributes:
        predictor: (inputs, W), float16 or int8, in units of predictor_scale; no inputs: (0, W).
        predictor_scale: float32 (W,).
        bias: float32 (W,).
        basis: F, (W, W), float16 or int8, in units of basis_scale.
        basis_scale: float32 (W,).
        classes: uint8 (W,), the class expected of each component at the design step.
    """

    predictor: np.ndarray
    predictor_scale: np.ndarray
    bias: np.ndarray
    basis: np.ndarray
    basis_scale: np.ndarray
    classes: np.ndarray

    @cached_property
    def weights(self) -> np.ndarray:
        """P, float32."""
        return self.predictor.astype(np.float32) * self.predictor_scale

    @cached_property
    def forward(self) -> np.ndarray:
        """F, float32."""
        return self.basis.astype(np.float32) * self.basis_scale

    @cached_property
    def backward(self) -> np.ndarray:
        """F^-1 of the stored F, float32.

        Raises:
            ValueError: F has none.
        """
        basis = self.basis.astype(np.float64) * self.basis_scale
        try:
            inverse = np.linalg.inv(basis).astype(np.float32)
        except np.linalg.LinAlgError:
            inverse = np.full_like(basis, np.inf)
        if not np.isfinite(inverse).all():
            raise ValueError(f"[TczTables] basis must be invertible in float32, but its singular values are {_extremes(basis)}.")
        return inverse

    def predict(self, inputs: np.ndarray | None) -> np.ndarray:
        """p, float32 (N, W) or, without inputs, (1, W)."""
        return self.bias[None] if inputs is None else inputs @ self.weights + self.bias


def _extremes(matrix: np.ndarray) -> str:
    values = np.linalg.svd(matrix, compute_uv=False)
    return f"from {values[-1]:.3g} to {values[0]:.3g}"


@dataclass(frozen=True)
class TczTables:
    """Tables of one layer for one design.

    Attributes:
        heads, dim: H, D.
        rate: bits a value that the design aims at.
        step: design step, in square roots of nats.
        chained: whether predictors take the rows of the layer before.
        k, v: of the roles.
    """

    heads: int
    dim: int
    rate: float
    step: float
    chained: bool
    k: RoleTables
    v: RoleTables

    def inputs(self, role: str, before: tuple[np.ndarray, np.ndarray] | None, keys: np.ndarray | None) -> np.ndarray | None:
        """The predictor's inputs of a role from decoded rows (N, W): of the layer before, and this layer's keys."""
        own = [] if role == "k" else [keys]
        past = list(before) if self.chained else []
        return np.concatenate([*own, *past], axis=1) if own or past else None

    def expected(self, role: str, step: float) -> np.ndarray:
        """Classes (W,) expected at a step."""
        return shifted(getattr(self, role).classes.astype(int), 2 * math.log2(self.step / step))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything as named arrays, which `from_arrays` reads back."""
        arrays = {"shape": np.array([self.heads, self.dim, self.chained], np.int32), "design": np.array([self.rate, self.step], np.float64)}
        return arrays | {f"{role}.{name}": getattr(getattr(self, role), name) for role in ROLES for name in _STORED}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "TczTables":
        """The tables that `to_arrays` gave.

        Raises:
            ValueError: an array is missing, has another dtype or shape, or holds what cannot be.
        """

        def take(name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
            if name not in arrays:
                raise ValueError(f"[TczTables] array {name!r} is missing; got {sorted(arrays)}.")
            a = arrays[name]
            if a.dtype.str[1:] not in dtypes or a.shape != shape:
                raise ValueError(f"[TczTables] array {name!r} must be {' or '.join(dtypes)} {shape}, but got {a.dtype.str[1:]} {a.shape}.")
            if a.dtype.kind == "f" and not np.isfinite(a).all():
                raise ValueError(
                    f"[TczTables] array {name!r} must be finite, but {int((~np.isfinite(a)).sum())} of {a.size} values are not."
                )
            return a

        heads, dim, chained = take("shape", ("i4",), (3,)).tolist()
        rate, step = take("design", ("f8",), (2,)).tolist()
        if heads < 1 or dim < 1 or chained not in (0, 1) or not (RATES[0] <= rate <= RATES[1] and STEPS[0] <= step <= STEPS[1]):
            raise ValueError(
                f"[TczTables] shape must be positive, rate in {RATES} and step in {STEPS}, but got {[heads, dim, chained]}, {rate}, {step}."
            )
        width, roles = heads * dim, {}
        for role in ROLES:
            count = width * ((role == "v") + 2 * chained)
            shapes = {"predictor": (count, width), "basis": (width, width)}
            found = {name: take(f"{role}.{name}", dtypes, shapes.get(name, (width,))) for name, dtypes in _STORED.items()}
            if found["classes"].max() >= len(bank().t):
                raise ValueError(f"[TczTables] array '{role}.classes' must be below {len(bank().t)}, but got {found['classes'].max()}.")
            roles[role] = RoleTables(**found)
            for name in ("predictor", "basis"):
                largest = np.abs(found[name].astype(np.float64) * found[f"{name}_scale"]).max(initial=0)
                if largest > np.finfo(np.float32).max:
                    raise ValueError(f"[TczTables] {role}.{name} must be within float32, but got {largest:.3g}.")
            _ = roles[role].backward  # refused where there is none
        return cls(heads, dim, rate, step, bool(chained), roles["k"], roles["v"])


def stored(matrix: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as float16 (bits 16) or int8 (bits 8) in units of a float32 scale per column."""
    top = np.abs(matrix).max(axis=0, initial=0.0)
    scale = np.where(top > 1e-30, top / (127 if bits == 8 else 1), 1.0).astype(np.float32)
    units = matrix / scale
    return (np.rint(units).astype(np.int8) if bits == 8 else units.astype(np.float16)), scale


def _root(metric: np.ndarray, floor: float, spread: float) -> np.ndarray:
    """metric^(1/2), eigenvalues at least `floor` of their mean. A metric of zero: rows do not matter, and little is spent on them."""
    metric = np.asarray(metric, np.float64)
    values, vectors = np.linalg.eigh((metric + metric.T) / 2)
    mean = max(values.mean(), 1e-12 / max(spread, 1e-30))
    return (vectors * np.sqrt(np.maximum(values, floor * mean))) @ vectors.T


def _fit(inputs: np.ndarray, rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ridge regression: predictor, its scale, bias; the bias for the predictor as stored."""
    mean_in, mean = inputs.mean(axis=0, dtype=np.float64), rows.mean(axis=0, dtype=np.float64)
    centred = inputs - mean_in.astype(np.float32)
    gram = (centred.T @ centred).astype(np.float64)
    ridge = RIDGE * np.trace(gram) / len(gram) + 1e-12
    gram[np.diag_indices_from(gram)] += ridge
    weights = np.linalg.solve(gram, (centred.T @ (rows - mean.astype(np.float32))).astype(np.float64))
    predictor, scale = stored(weights, bits)
    return predictor, scale, (mean - mean_in @ (predictor.astype(np.float64) * scale)).astype(np.float32)


def _role_tables(role: str, layer: LayerRows, inputs: np.ndarray | None, step: float, bits: int) -> RoleTables:
    rows, metric = _wide(getattr(layer, role)), getattr(layer, f"fisher_{role}")
    width = rows.shape[1]
    floor = metric_floor(FLOORS[role], width, layer.gradients)
    if inputs is None:
        predictor, scale, bias = np.zeros((0, width), np.float16), np.ones(width, np.float32), rows.mean(axis=0).astype(np.float32)
        residual = rows - bias
    else:
        predictor, scale, bias = _fit(inputs, rows, bits)
        residual = rows - (inputs @ (predictor.astype(np.float32) * scale) + bias)
    root = _root(metric, floor, float(residual.var(axis=0).mean()))
    weighted = residual @ root.astype(np.float32)
    _, turn = np.linalg.eigh((weighted.T @ weighted).astype(np.float64))
    basis, basis_scale = stored(root @ turn, 16)
    classes, _ = choose(_symbols(residual @ (basis.astype(np.float32) * basis_scale), step))
    return RoleTables(predictor, scale, bias, basis, basis_scale, classes.astype(np.uint8))


def _symbols(y: np.ndarray, step: float) -> np.ndarray:
    """y in steps; what is further out than the codec takes, or beyond float32, counts as just there."""
    q = y / np.float32(step)
    return np.clip(np.rint(np.where(np.isnan(q), LARGEST_SYMBOL, q)), -LARGEST_SYMBOL, LARGEST_SYMBOL).astype(np.int32)


def simulate(tables: TczTables, role: str, rows: np.ndarray, inputs: np.ndarray | None, step: float) -> tuple[np.ndarray, float]:
    """Decoded rows (N, W) of a role, and the bits they take, as the codec would code them."""
    role_tables = getattr(tables, role)
    with np.errstate(over="ignore", invalid="ignore"):  # see _symbols
        p = role_tables.predict(inputs)
        q, expected = _symbols((rows - p) @ role_tables.forward, step), tables.expected(role, step)
    decoded, bits = np.empty(q.shape, np.float32), 0.0
    for start in range(0, len(q), CHUNK):
        chunk = q[start : start + CHUNK]
        classes, length = choose(chunk, expected)
        decoded[start : start + CHUNK] = centroids(chunk, classes, role == "v")
        bits += length + CHUNK_BITS
    return p + decoded * np.float32(step) @ role_tables.backward, bits


def _wide(rows: np.ndarray) -> np.ndarray:
    """(N, H, D) as (N, H D) float32."""
    return np.ascontiguousarray(rows, np.float32).reshape(len(rows), -1)


def chain(layers: Sequence[LayerRows]) -> list[bool]:
    """Whether each layer is predicted from the one before: rows of the same tokens, heads and size."""
    return [i > 0 and layer.k.shape == layers[i - 1].k.shape for i, layer in enumerate(layers)]


def build_at(layers: Sequence[LayerRows], step: float, rate: float, bits: int = 8) -> tuple[list[TczTables], float]:
    """Tables fitted on rows quantised at `step`, and the bits a value that the rows took."""
    built: list[TczTables] = []
    total, values, before = 0.0, 0, None
    for layer, chained in zip(layers, chain(layers), strict=True):
        k, v, (_, heads, dim) = _wide(layer.k), _wide(layer.v), layer.k.shape
        frame = TczTables(heads, dim, rate, step, chained, None, None)
        inputs = frame.inputs("k", before, None)
        key_tables = _role_tables("k", layer, inputs, step, bits)
        frame = TczTables(heads, dim, rate, step, chained, key_tables, None)
        keys, spent = simulate(frame, "k", k, inputs, step)
        inputs = frame.inputs("v", before, keys)
        tables = TczTables(heads, dim, rate, step, chained, key_tables, _role_tables("v", layer, inputs, step, bits))
        decoded, more = simulate(tables, "v", v, inputs, step)
        before, total, values = (keys, decoded), total + spent + more, values + 2 * k.size
        built.append(tables)
    return built, total / values


def build_tcz(layers: Sequence[LayerRows], rate: float) -> list[TczTables]:
    """Tables of every layer for a design.

    Args:
        layers: rows of the same tokens, in the model's order; without the positions that are stored exactly.
        rate: bits a value that the calibration rows should take, within 5 %; other rows take more.
    Raises:
        ValueError: rows or metrics of impossible shapes or values.
    """
    if not rate > 0:
        raise ValueError(f"[build_tcz] rate must be positive, but got {rate}.")
    for i, layer in enumerate(layers):
        width = math.prod(layer.k.shape[1:])
        if layer.k.ndim != 3 or layer.v.shape != layer.k.shape or not layer.k.size:
            raise ValueError(f"[build_tcz] k and v of layer {i} must be (N, H, D), but got {layer.k.shape} and {layer.v.shape}.")
        for name in ("k", "v", "fisher_k", "fisher_v"):
            a = getattr(layer, name)
            if name.startswith("fisher") and a.shape != (width, width):
                raise ValueError(f"[build_tcz] {name} of layer {i} must be {(width, width)}, but got {a.shape}.")
            if not np.isfinite(a).all():
                raise ValueError(f"[build_tcz] {name} of layer {i} must be finite, but {int((~np.isfinite(a)).sum())} values are not.")
        if layer.gradients is not None and layer.gradients < 1:
            raise ValueError(f"[build_tcz] gradients of layer {i} must be at least 1, but got {layer.gradients}.")
    some = [replace(x, k=x.k[:: -(-len(x.k) // SEARCH_ROWS)], v=x.v[:: -(-len(x.k) // SEARCH_ROWS)]) for x in layers]
    # A step of .5 / sqrt(components) costs about a hundredth of a nat a token, whatever the model.
    start = 0.5 / math.sqrt(sum(2 * math.prod(x.k.shape[1:]) for x in layers))
    step = _solve(rate, start, lambda step: build_at(some, step, rate)[1], 0.05)
    return build_at(layers, step, rate)[0]


def measure(tables: Sequence[TczTables], rows: Sequence[tuple[np.ndarray, np.ndarray]], step: float) -> float:
    """Bits a value, as the codec would code keys (before RoPE) and values (N, H, D) of each layer."""
    total, count, before = 0.0, 0, None
    for layer, (k, v) in zip(tables, rows, strict=True):
        keys, more = simulate(layer, "k", _wide(k), layer.inputs("k", before, None), step)
        values, spent = simulate(layer, "v", _wide(v), layer.inputs("v", before, keys), step)
        before, total, count = (keys, values), total + more + spent, count + 2 * k.size
    return total / count


def step_for(rate: float, tables: Sequence[TczTables], rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The step at which a cache takes `rate` bits a value, within 0.5 %, by code lengths of up to SEARCH_CHUNKS chunks of its rows.

    Args:
        rate: bits a value over the keys and values of all layers.
        tables: of each layer, of the design nearest to the rate.
        rows: keys before RoPE and values of each layer, (N, H, D) each, of the same tokens.
    """
    starts = range(0, max(1, len(rows[0][0])), CHUNK)
    picked = np.unique(np.linspace(0, len(starts) - 1, min(len(starts), SEARCH_CHUNKS)).round().astype(int)).tolist()
    some = [tuple(np.concatenate([x[starts[i] : starts[i] + CHUNK] for i in picked]) for x in pair) for pair in rows]
    return _solve(rate, tables[0].step, lambda step: measure(tables, some, step), 0.005)


def _solve(rate: float, start: float, bits_at: Callable[[float], float], tolerance: float) -> float:
    """The step whose bits are the rate, by interpolation in its logarithm; the nearest of STEPS found where none is."""
    first, last = (math.log2(step) for step in STEPS)
    at, low, high = min(last, max(first, math.log2(start))), None, None
    for _ in range(_MOST_TRIALS):
        bits = bits_at(2.0**at)
        if abs(bits - rate) <= tolerance * rate:
            break
        low, high = ((at, bits), high) if bits > rate else (low, (at, bits))
        if low is None or high is None:
            at, before = min(last, max(first, at + min(4.0, max(-4.0, (bits - rate) / _SLOPE)))), at
            if at == before:
                break
        else:
            share = (low[1] - rate) / (low[1] - high[1])
            at = low[0] + (high[0] - low[0]) * min(0.95, max(0.05, share))
    return min(STEPS[1], max(STEPS[0], 2.0**at))
