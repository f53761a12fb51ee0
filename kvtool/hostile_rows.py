"""Robustness: what codecs make of rows that models rarely have and caches must survive. Synthetic rows, no model; deterministic.

Each codec stores keys and values of two heads in every case of CASES at 1, 16 and 300 tokens of head_dim 64, and ordinary rows at the
other head_dims. Keys are as cached, rotated by RoPE (base 10 000); a codec that stores keys before RoPE undoes that. Errors are
sum |x - x'|^2 / sum |x|^2 over the finite values, in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvtool.probe import RoleProbe
from kvtool.roundtrip import Roundtrip, parse_roundtrip, without_exact_rows
from veloxquant_mlx.transfer.rope import RopeSpec

HEADS, DIM, TOKENS, DIMS, BASE = 2, 64, (1, 16, 300), (80, 96, 128, 256), 10000.0
ORDINARY = "ordinary"

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


# name -> rows and their dtype
CASES: dict[str, tuple[Rows, mx.Dtype]] = {
    ORDINARY: (_normal, mx.float32),
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
        note: what it said, what was kept exact, or that a NaN was lost without a word.
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
    shapes = [(case, tokens, DIM) for case in CASES for tokens in TOKENS] + [(ORDINARY, TOKENS[-1], dim) for dim in DIMS]
    rows = []
    for spec in specs:
        for case, tokens, dim in shapes:
            rows.append(_row(spec, case, tokens, dim))
            if progress is not None:
                progress(len(rows), len(specs) * len(shapes))
    return RobustnessReport(tuple(rows))


def _row(spec: str, case: str, tokens: int, dim: int) -> RobustnessRow:
    make, dtype = CASES[case]
    draw = np.random.default_rng([tokens, dim])
    probe = RoleProbe(HEADS, dim, dtype, RopeSpec("default", dim, base=BASE))
    trip: Roundtrip = parse_roundtrip(spec)
    errors: dict[str, float | None] = {}
    finite, lost = True, []
    for role in ("k", "v"):
        x = mx.array(make(draw, tokens, dim).astype(np.float32)).astype(dtype)
        out = trip.rows("rows", role, x, np.arange(tokens), probe if role == "k" else RoleProbe(HEADS, dim, dtype, None))
        before, after = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, out))
        finite &= bool(np.isfinite(after).all())
        errors[role] = relative_error(before, after)
        if not np.isfinite(before).all() and np.isfinite(after).all() and not trip.failed:
            lost.append(f"{role}: finite values for NaN")
    failed = trip.failed
    more = f" (and {len(trip.problems) - 1} more)" if len(trip.problems) > 1 else ""
    notes = [f"{problem}{more}" for problem in trip.problems[:1]] + lost
    return RobustnessRow(
        codec=spec,
        case=case,
        tokens=tokens,
        head_dim=dim,
        k_error=None if failed else errors["k"],
        v_error=None if failed else errors["v"],
        finite=None if failed else finite,
        bits=None if failed else trip.bits(exact=False),
        refused=failed,
        note="; ".join(notes),
    )


def relative_error(before: np.ndarray, after: np.ndarray) -> float | None:
    """sum |x - x'|^2 / sum |x|^2 over the finite values of `before`, float64; 0 of zeros kept; None where it is not finite."""
    known = np.isfinite(before)
    peak = np.abs(before[known]).max(initial=0.0)
    error = np.square((before - after)[known] / (peak or 1.0)).sum()
    energy = np.square(before[known] / (peak or 1.0)).sum()
    ratio = float(error / energy) if energy else (0.0 if error == 0 else np.inf)
    return ratio if np.isfinite(ratio) else None
