"""rabitq_encode."""

from typing import Any

import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided, Tolerance
from veloxquant_mlx.selftest.oracles.rabitq_encode import rabitq_encode

NAME = "rabitq_encode"
SUM = Tolerance("float32 sums of D terms: log2 D roundings in the transform, D / 32 + 5 in the L1 norm", rtol=4e-6)


def _signs(rng: np.random.Generator, width: int) -> np.ndarray:
    return rng.choice(np.array([-1, 1], np.float32), width)


def _normal(rows: int, width: int, dtype: str = "float32", scale: float = 1.0) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        keys = (rng.standard_normal((rows, width)) * scale).astype(np.float32)
        return {"keys": Bf16(keys) if dtype == "bfloat16" else keys.astype(dtype), "diag": _signs(rng, width)}

    return make


def _integers(rows: int, width: int) -> Any:
    """Small integers: sums are exact, and many are zero."""
    return lambda rng: {"keys": rng.integers(-1, 2, (rows, width)).astype(np.float16), "diag": _signs(rng, width)}


def _with(value: float) -> Any:
    """One element of one row is special; the other rows must not notice."""

    def make(rng: np.random.Generator) -> dict[str, Any]:
        keys = rng.standard_normal((6, 64)).astype(np.float32)
        keys[2, 5] = value
        return {"keys": keys, "diag": _signs(rng, 64)}

    return make


def _case(name: str, make: Any) -> Case:
    return Case(NAME, name, make, rabitq_encode, ("uint8", "float32"), (None, SUM))


CASES = (
    *(_case(f"d{d}", _normal(5, d)) for d in (8, 16, 32, 64, 128, 256, 512, 1024)),
    *(_case(f"d{d}-{dtype}", _normal(3, d, dtype)) for d in (64, 128) for dtype in ("float16", "bfloat16")),
    *(_case(f"d{d}-integers", _integers(7, d)) for d in (8, 16, 128)),
    *(_case(f"rows-{n}", _normal(n, 64)) for n in (1, 4, 17)),
    *(_case(f"d8-rows-{n}", _normal(n, 8)) for n in (1, 3, 37)),
    _case("none", _normal(0, 64)),
    _case("zeros", _normal(2, 64, scale=0.0)),
    _case("tiny", _normal(2, 64, scale=1e-30)),
    _case("large-float16", _normal(2, 128, "float16", 12000.0)),
    _case("nan", _with(np.nan)),
    _case("infinity", _with(np.inf)),
    _case("outlier", _with(1000.0)),
    _case("strided", lambda rng: {"keys": Strided(rng.standard_normal((3, 32)).astype(np.float16)), "diag": Strided(_signs(rng, 32))}),
    _case("diag-bfloat16", lambda rng: {"keys": rng.standard_normal((3, 32)).astype(np.float32), "diag": Bf16(_signs(rng, 32))}),
)


def _error(name: str, keys: Any, diag: Any, message: str, error: type[Exception] = ValueError) -> ErrorCase:
    return ErrorCase(NAME, name, lambda rng: {"keys": keys, "diag": diag}, error, message)


ERRORS = (
    _error(
        "rank",
        np.zeros(64, np.float32),
        np.ones(64, np.float32),
        "keys must be (N, D) with D a power of two from 8 to 1024, but got (64,).",
    ),
    *(_error(f"d{d}", np.zeros((3, d), np.float32), np.ones(d, np.float32), f"but got (3, {d}).") for d in (0, 4, 36, 96, 144, 576, 2048)),
    _error("diag-length", np.zeros((3, 64), np.float32), np.ones(32, np.float32), "diag must be (64,), but got (32,)."),
    _error("diag-rank", np.zeros((3, 64), np.float32), np.ones((1, 64), np.float32), "diag must be (64,), but got (1, 64)."),
    _error("keys-dtype", np.zeros((3, 64), np.int32), np.ones(64, np.float32), "keys must be float16, bfloat16 or float32", TypeError),
    _error("diag-dtype", np.zeros((3, 64), np.float32), np.ones(64, np.int32), "diag must be float16, bfloat16 or float32", TypeError),
)

LENGTHS = (LengthCase(NAME, lambda rng, n: _normal(n, 64)(rng), (1, 5, 40)),)

MUTATIONS = (
    Mutation(NAME, "wrong-sign-half", "(lane & stride) ? other - v[r]", "(lane & stride) ? v[r] - other", ("d32",)),
    Mutation(NAME, "skips-a-stride", "ushort stride = 1; stride < (D", "ushort stride = 2; stride < (D", ("d32",)),
    Mutation(
        NAME,
        "off-by-one-lane",
        "simd_shuffle_xor(v[r], stride)",
        "simd_shuffle(v[r], ushort((lane ^ stride) + 1))",
        ("d32",),
        fault="lane above 31",
    ),
    Mutation(
        NAME,
        "bit-order",
        "uchar(mask >> (lane - within + 8 * within))",
        "uchar(reverse_bits(mask) >> (lane - within + 8 * within))",
        ("d32",),
    ),
    Mutation(NAME, "zero-is-negative", "v[r] >= 0.0f", "v[r] > 0.0f", ("d128-integers",)),
    Mutation(NAME, "row-beyond-the-end", "min(row, last)", "row", ("d8-rows-3",), fault="out of bounds: reads keys["),
    Mutation(
        NAME,
        "store-beyond-the-end",
        "row <= last && lane % W == 0",
        "lane % W == 0",
        ("d8-rows-3",),
        fault="out of bounds: writes k_mag[3]",
    ),
    Mutation(NAME, "every-lane-stores", "row <= last && lane % W == 0", "row <= last", ("d64",), fault="race: writes k_mag["),
)
