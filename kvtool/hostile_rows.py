"""Robustness: what codecs make of rows that models rarely have and caches must survive. Synthetic rows, no model; deterministic.

Each codec stores keys and values of two heads in every case of CASES at 1, 16 and 300 tokens of head_dim 64, and ordinary rows at the
other head_dims. Keys are as cached, rotated by RoPE (base 10 000); a codec that stores keys before RoPE undoes that. Errors are
sum |x - x'|^2 / sum |x|^2 over the finite values, in float64.

Calibrated codecs have tables learnt from seeded rows of one law: correlated components, means, values that follow from the keys, and
metrics with uneven spectra. CORRELATED has other rows of that law; all other cases are rows that the calibration does not fit. They are
coded with those tables whatever that costs; what a file would hold in their place (`kvtool.binding`) stands beside it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from formats.calibration import CalibrationFile
from formats.manifest import ModelInfo
from kvtool.binding import LayerSource, bind
from kvtool.calibrations import Calibration, kind_of
from kvtool.encoding import RoleSource
from kvtool.probe import RoleProbe
from kvtool.roundtrip import Roundtrip, parse_roundtrip, without_exact_rows
from veloxquant_mlx.allocators.additive import build_shared
from veloxquant_mlx.allocators.predictors import build_tcz
from veloxquant_mlx.allocators.transforms import LayerRows, build_tc
from veloxquant_mlx.codecs import Codec
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
from veloxquant_mlx.codecs.tcz import Tcz
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec, unrotated

HEADS, DIM, TOKENS, DIMS, BASE = 2, 64, (1, 16, 300), (80, 96, 128, 256), 10000.0
ORDINARY, CORRELATED = "ordinary", "correlated"
CALIBRATED = 1024  # rows that tables are learnt from
NAME = "rows"

Rows = Callable[[np.random.Generator, int, int], np.ndarray]


def _normal(draw: np.random.Generator, tokens: int, dim: int) -> np.ndarray:
    return draw.standard_normal((HEADS, tokens, dim))


def _one_channel(draw: np.random.Generator, tokens: int, dim: int) -> np.ndarray:
    return _normal(draw, tokens, dim) * np.where(np.arange(dim) == 5, 1000.0, 1.0)


def _one_row(draw: np.random.Generator, tokens: int, dim: int) -> np.ndarray:
    return _normal(draw, tokens, dim) * np.where(np.arange(tokens) == 0, 1000.0, 1.0)[:, None]


def _one_nan(draw: np.random.Generator, tokens: int, dim: int) -> np.ndarray:
    x = _normal(draw, tokens, dim)
    x[-1, -1, -1] = np.nan
    return x


@functools.cache
def _law(dim: int) -> tuple[np.ndarray, ...]:
    """Mixtures and means of keys and values, and square roots of their metrics."""
    draw, width = np.random.default_rng(dim), HEADS * dim
    spectrum = 2 * np.exp(-np.arange(width) / width * 4)[:, None]
    mixtures = draw.standard_normal((2, width, width)) * spectrum / np.sqrt(width)
    roots = 0.1 * draw.standard_normal((2, width, width)) * np.exp(draw.standard_normal((2, width, 1))) / np.sqrt(width)
    return (*mixtures, *draw.standard_normal((2, width)), *roots)


def _correlated(draw: np.random.Generator, tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys before RoPE and values, (H, S, D), of the law that calibrations are learnt from."""
    k_mix, v_mix, k_mean, v_mean, _, _ = _law(dim)
    k = draw.standard_normal((tokens, HEADS * dim)) @ k_mix
    v = k @ v_mix + 0.3 * draw.standard_normal(k.shape)
    k, v = ((x + mean).reshape(tokens, HEADS, dim).swapaxes(0, 1) for x, mean in ((k, k_mean), (v, v_mean)))
    return k, v


@functools.cache
def _calibration(codec: Codec, dim: int) -> Calibration:
    """A calibration of that law for a codec as parsed."""
    k, v = (x.swapaxes(0, 1) for x in _correlated(np.random.default_rng([0, dim]), CALIBRATED, dim))
    k_metric, v_metric = (root.T @ root for root in _law(dim)[-2:])
    rows = LayerRows(k, v, k_metric, v_metric)
    if isinstance(codec, Tcz):
        kind, arrays = f"tcz-{codec.rate:g}", build_tcz([rows], codec.rate)[0].to_arrays()
    elif isinstance(codec, CommVqAdditive):
        kind, arrays = kind_of(codec), build_shared({NAME: rows}, codec.bits)[NAME].to_arrays()
    else:
        kind, arrays = "tc", build_tc(rows).to_arrays()
    tables = {kind: {NAME: arrays}}
    return Calibration(CalibrationFile(ModelInfo(NAME, NAME, None, None, None), {}, CALIBRATED, tables), "0" * 64)


# name -> rows and their dtype
CASES: dict[str, tuple[Rows, mx.Dtype]] = {
    ORDINARY: (_normal, mx.float32),
    CORRELATED: (_normal, mx.float32),  # mixed by _law
    "identical": (lambda draw, tokens, dim: np.repeat(_normal(draw, 1, dim), tokens, axis=1), mx.float32),
    "zeros": (lambda draw, tokens, dim: np.zeros((HEADS, tokens, dim)), mx.float32),
    "one channel x 1000": (_one_channel, mx.float32),
    "x 1e30, bfloat16": (lambda draw, tokens, dim: 1e30 * _normal(draw, tokens, dim), mx.bfloat16),
    "x 1e-30, bfloat16": (lambda draw, tokens, dim: 1e-30 * _normal(draw, tokens, dim), mx.bfloat16),
    "heavy tails": (lambda draw, tokens, dim: draw.standard_t(2, (HEADS, tokens, dim)), mx.float32),
    "one row x 1000": (_one_row, mx.float32),
    "one NaN": (_one_nan, mx.float32),
}


@dataclass(frozen=True)
class RobustnessRow:
    """One codec on the rows of one case.

    Attributes:
        codec: spec, without exact rows; case: of CASES.
        tokens, head_dim: of the rows; there are two heads of keys and of values.
        k_error, v_error: relative squared; None where there is none (refused, or the result is not finite), 0 of zeros kept as zeros.
        finite: whether all decoded values are; None where refused.
        bits: a value of the coded rows, side information included; None where nothing was coded.
        refused: whether the codec said that it cannot hold the rows.
        note: what it said, what was kept exact, that a NaN was lost without a word, or what a file falls back to.
        file: of a calibrated codec, the codecs that a file of these rows holds, "k=...,v=..."; None of others, or where it is refused.
        file_k_error, file_v_error: relative squared errors of that file.
    """

    codec: str
    case: str
    tokens: int
    head_dim: int
    k_error: float | None
    v_error: float | None
    finite: bool | None
    bits: float | None
    refused: bool
    note: str
    file: str | None = None
    file_k_error: float | None = None
    file_v_error: float | None = None


@dataclass(frozen=True)
class RobustnessReport:
    """The table, by codec."""

    rows: tuple[RobustnessRow, ...]

    def row(self, codec: str, case: str, tokens: int = TOKENS[-1], head_dim: int = DIM) -> RobustnessRow:
        """One row.

        Raises:
            KeyError: there is none.
        """
        for r in self.rows:
            if (r.codec, r.case, r.tokens, r.head_dim) == (codec, case, tokens, head_dim):
                return r
        raise KeyError(f"{codec}, {case}, {tokens} tokens, head_dim {head_dim}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def robustness(codecs: Sequence[str], *, progress: Callable[[int, int], None] | None = None) -> RobustnessReport:
    """Put codecs through every case.

    Args:
        codecs: specs as in `kvtool.sweep`; every row is coded, whatever sink= and recent= say.
        progress: called with (rows done, rows in all).
    Raises:
        ValueError: an unknown codec, one twice, or none.
    """
    specs = [without_exact_rows(parse_roundtrip(codec).spec) for codec in codecs]
    twice = next((s for i, s in enumerate(specs) if s in specs[:i]), None)
    if twice is not None or not specs:
        raise ValueError(f"[robustness] codec {twice} is given twice." if twice else "[robustness] give at least one codec.")
    shapes = [(case, tokens, DIM) for case in CASES for tokens in TOKENS] + [
        (case, TOKENS[-1], dim) for case in (ORDINARY, CORRELATED) for dim in DIMS
    ]
    rows = []
    for spec in specs:
        for case, tokens, dim in shapes:
            rows.append(_row(spec, case, tokens, dim))
            if progress is not None:
                progress(len(rows), len(specs) * len(shapes))
    return RobustnessReport(tuple(rows))


@dataclass(frozen=True)
class _Through:
    """What came of rows: error of each role, None where it is not finite, whether all are finite, and roles that lost a NaN."""

    errors: dict[str, float | None]
    finite: bool
    lost: list[str]


def _row(spec: str, case: str, tokens: int, dim: int) -> RobustnessRow:
    dtype, rope = CASES[case][1], RopeSpec("default", dim, base=BASE)
    rows = {role: mx.array(x.astype(np.float32)).astype(dtype) for role, x in _made(case, tokens, dim, rope).items()}
    trip = _bound(spec, rows, rope, compare=False)
    through = _through(trip, rows, rope)
    failed = trip.failed
    more = f" (and {len(trip.problems) - 1} more)" if len(trip.problems) > 1 else ""
    notes = [f"{problem}{more}" for problem in trip.problems[:1]] + through.lost
    file, file_errors = None, dict.fromkeys("kv")
    if trip.calibrated:
        kept = _bound(spec, rows, rope, compare=True)
        again = _through(kept, rows, rope)
        if not kept.failed and kept.binding is not None:
            specs = {role: kept.binding.codecs.get((NAME, role), kept.plan.v).spec(role) for role in ("k", "v")}
            file, file_errors = ",".join(f"{role}={own}" for role, own in specs.items()), again.errors
            if kept.binding.fallbacks:
                shown = ", ".join("-" if error is None else f"{error:.2e}" for error in again.errors.values())
                notes.append(f"a file falls back to {file}: {shown}")
    return RobustnessRow(
        codec=spec,
        case=case,
        tokens=tokens,
        head_dim=dim,
        k_error=None if failed else through.errors["k"],
        v_error=None if failed else through.errors["v"],
        finite=None if failed else through.finite,
        bits=None if failed else trip.bits(exact=False),
        refused=failed,
        note="; ".join(notes),
        file=file,
        file_k_error=file_errors["k"],
        file_v_error=file_errors["v"],
    )


def _made(case: str, tokens: int, dim: int, rope: RopeSpec) -> dict[str, np.ndarray]:
    """Keys as cached and values of a case, (H, S, D)."""
    draw = np.random.default_rng([tokens, dim])
    if case != CORRELATED:
        return {role: CASES[case][0](draw, tokens, dim) for role in ("k", "v")}
    k, v = _correlated(draw, tokens, dim)
    return {"k": np.array(rotate(mx.array(k.astype(np.float32)), np.arange(tokens), unrotated(rope), rope)), "v": v}


def _bound(spec: str, rows: dict[str, mx.array], rope: RopeSpec, *, compare: bool) -> Roundtrip:
    """A round trip of a spec, its codecs bound to the calibration where they are calibrated."""
    trip = parse_roundtrip(spec)
    if not trip.calibrated:
        return trip
    heads, tokens, dim = rows["k"].shape
    sources = [
        RoleSource((heads, tokens, dim), x.dtype, rope if role == "k" else None, None, functools.partial(mx.array, x))
        for role, x in rows.items()
    ]
    calibration = _calibration(trip.plan.k, dim)
    plan = replace(trip.plan, sink=0, recent=0)
    try:
        return trip.bound(bind(plan, [LayerSource(NAME, sources[0], sources[1], [(0, tokens)])], calibration, None, compare=compare))
    except ValueError as error:
        trip.failed = True
        trip.problems.append(str(error))
        return trip


def _through(trip: Roundtrip, rows: dict[str, mx.array], rope: RopeSpec) -> _Through:
    """Rows through a round trip."""
    errors: dict[str, float | None] = {}
    finite, lost = True, []
    for role, x in rows.items():
        probe = RoleProbe(HEADS, x.shape[2], x.dtype, rope if role == "k" else None)
        out = x if trip.calibrated and trip.binding is None else trip.rows(NAME, role, x, np.arange(x.shape[1]), probe)
        before, after = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, out))
        finite &= bool(np.isfinite(after).all())
        errors[role] = relative_error(before, after)
        if not np.isfinite(before).all() and np.isfinite(after).all() and not trip.failed:
            lost.append(f"{role}: finite values for NaN")
    return _Through(errors, finite, lost)


def relative_error(before: np.ndarray, after: np.ndarray) -> float | None:
    """sum |x - x'|^2 / sum |x|^2 over the finite values of `before`, float64; 0 of zeros kept; None where it is not finite."""
    known = np.isfinite(before)
    peak = np.abs(before[known]).max(initial=0.0)
    error = np.square((before - after)[known] / (peak or 1.0)).sum()
    energy = np.square(before[known] / (peak or 1.0)).sum()
    ratio = float(error / energy) if energy else (0.0 if error == 0 else np.inf)
    return ratio if np.isfinite(ratio) else None
