"""KIVI's group quantization, there and back."""

from typing import Any

import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.oracles.kivi_quant import kivi

FUNCTION = "kivi_group_quant_dequant"


def call(shape: tuple[int, ...], axis: int, group_size: int, bits: int, dtype: str = "float32", **more: Any) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.normal(size=shape)
        values = Bf16(x.astype(np.float32)) if dtype == "bfloat16" else x.astype(dtype)
        return {"x": values, "axis": axis, "group_size": group_size, "levels": 2**bits - 1, **more}

    return make


def hostile(axis: int, group_size: int = 4) -> Any:
    """NaN, infinities, groups of only those, zeros, one value, an outlier, minus zero, a range beyond float32 (for groups of 4)."""

    def make(rng: np.random.Generator) -> dict[str, Any]:
        lines = rng.normal(size=(3, 40)).astype(np.float32)
        lines[0, 1], lines[0, 5], lines[0, 10] = np.nan, np.inf, -np.inf
        lines[0, 12:16], lines[0, 16:20] = np.nan, np.inf
        lines[1, :4], lines[1, 4:8], lines[1, 8:12] = 0, 3.7, -0.0
        lines[1, 13] *= 1000
        lines[2, 0], lines[2, 2] = 3e38, -3e38
        lines[2, 4:8] = [1e-30, 2e-30, 0, 1e-30]  # the floor of the scale decides
        lines[2, 38:] = np.nan
        return {"x": lines if axis == -1 else np.ascontiguousarray(lines.T), "axis": axis, "group_size": group_size, "levels": 3}

    return make


def halves(axis: int) -> Any:
    """Values in the middle between two codes: rounded to the even one."""

    def make(rng: np.random.Generator) -> dict[str, Any]:
        line = np.array([0, 15, 0.5, 1.5, 2.5, 3.5, 4.5, 13.5], dtype=np.float32)
        x = np.stack([line, line + 16, -line])
        return {"x": x if axis == -1 else np.ascontiguousarray(x.T), "axis": axis, "group_size": 8, "levels": 15}

    return make


def overflowing(rng: np.random.Generator) -> dict[str, Any]:
    """float16 at its limits: the range is 131008, which float16 could not hold."""
    x = rng.choice(np.array([65504, -65504, 1, 6e-8], dtype=np.float16), size=(4, 33))
    return {"x": x, "axis": -1, "group_size": 32, "levels": 15}


def strided(make: Any) -> Any:
    return lambda rng: {k: Strided(v) if isinstance(v, np.ndarray | Bf16) else v for k, v in make(rng).items()}


def changed(**changes: Any) -> Any:
    return lambda rng: {**call((4, 8), -1, 4, 2)(rng), **changes}


ROWS = (
    ("keys, 2 bits", call((2, 3, 64, 32), -2, 32, 2), "float32"),
    ("keys, 1 bit, ragged", call((1, 2, 37, 16), -2, 32, 1), "float32"),
    ("keys, 4 bits, prime sizes, fp16", call((1, 3, 13, 7), -2, 5, 4, "float16"), "float16"),
    ("keys, 8 bits, bf16", call((1, 2, 33, 16), -2, 4, 8, "bfloat16"), "bfloat16"),
    ("keys, group beyond the axis", call((5, 3), -2, 1000, 2), "float32"),
    ("keys, group of one", call((5, 3), -2, 1, 2), "float32"),
    ("keys, one value", call((1, 1), -2, 4, 2), "float32"),
    ("keys, more than a block", call((2, 9, 128), -2, 4, 2, "float16"), "float16"),
    ("keys, hostile", hostile(-2), "float32"),
    ("keys, halves to even", halves(-2), "float32"),
    ("keys, not contiguous", strided(call((3, 8, 6), -2, 4, 4)), "float32"),
    ("keys, no tokens", call((2, 0, 8), -2, 4, 2), "float32"),
    ("values, 2 bits", call((2, 2, 3, 64), -1, 32, 2), "float32"),
    ("values, 1 bit, ragged", call((1, 2, 3, 80), -1, 32, 1), "float32"),
    ("values, 4 bits, prime sizes, fp16", call((1, 3, 5, 37), -1, 7, 4, "float16"), "float16"),
    ("values, 8 bits, group of 128, bf16", call((1, 2, 3, 256), -1, 128, 8, "bfloat16"), "bfloat16"),
    ("values, group beyond the axis", call((3, 96), -1, 1000, 2), "float32"),
    ("values, group of one", call((3, 5), -1, 1, 2), "float32"),
    ("values, one value", call((1, 1), -1, 4, 2), "float32"),
    ("values, more than a block", call((9, 4), -1, 4, 2, "float16"), "float16"),
    ("values, hostile", hostile(-1), "float32"),
    ("values, hostile, long groups", hostile(-1, 20), "float32"),
    ("keys, hostile, long groups", hostile(-2, 20), "float32"),
    ("values, halves to even", halves(-1), "float32"),
    ("values, ends of float16", overflowing, "float16"),
    ("values, not contiguous", strided(call((3, 40), -1, 32, 4)), "float32"),
    ("values, more groups than SIMD-groups", call((8195, 16), -1, 16, 2, "float16"), "float16"),
    ("values, no rows", call((0, 8), -1, 4, 2), "float32"),
    ("values, 3 levels and a floor above the scale", call((3, 40), -1, 8, 2, eps=2.0), "float32"),
    ("values, 65535 levels", call((3, 40), -1, 40, 16), "float32"),
)

CASES = tuple(Case(FUNCTION, name, make, kivi, (dtype,)) for name, make, dtype in ROWS)

ERRORS = tuple(
    ErrorCase(FUNCTION, name, make, error, message)
    for name, make, error, message in (
        ("one axis", changed(x=np.ones(8, np.float32)), ValueError, "x must be (..., S, D), but got (8,)"),
        ("integers", changed(x=np.ones((4, 8), np.int32)), TypeError, "x must be float16, bfloat16 or float32, but got int32"),
        ("no array", changed(x=1.0), TypeError, "x must be an mx.array, but got float"),
        ("axis 0", changed(axis=0), ValueError, "axis must be between -2 and -1, but got 0"),
        ("axis 1", changed(axis=1), ValueError, "axis must be between -2 and -1, but got 1"),
        ("axis -3", changed(axis=-3), ValueError, "axis must be between -2 and -1, but got -3"),
        ("axis not an integer", changed(axis=-1.0), TypeError, "axis must be an integer, but got float"),
        ("group 0", changed(group_size=0), ValueError, "group_size must be at least 1, but got 0"),
        ("group not an integer", changed(group_size=32.0), TypeError, "group_size must be an integer"),
        ("levels 0", changed(levels=0), ValueError, "levels must be between 1 and 16777215, but got 0"),
        ("levels beyond float32's integers", changed(levels=1 << 24), ValueError, "levels must be between"),
        ("levels not an integer", changed(levels=3.0), TypeError, "levels must be an integer"),
        ("eps 0", changed(eps=0.0), ValueError, "eps must be between 2^-126 and 3e38, but got 0.0"),
        ("eps NaN", changed(eps=float("nan")), ValueError, "but got nan"),
        ("eps not a number", changed(eps="1"), TypeError, "eps must be a number, but got str"),
    )
)

LENGTHS = (
    LengthCase(FUNCTION, lambda rng, n: call((1, 2, n, 32), -2, 32, 2)(rng), (1, 31, 70), "keys"),
    LengthCase(FUNCTION, lambda rng, n: call((1, 2, n, 32), -1, 32, 2)(rng), (1, 31, 70), "values"),
)

MUTATIONS = (
    Mutation(FUNCTION, "halves away from zero", "metal::rint(", "metal::round(", ("keys, halves to even",)),
    Mutation(
        FUNCTION,
        "one rounding instead of two",
        "#pragma clang fp contract(off)  // two roundings, as a decoder that stores the code has them\n  const float step = code * scale;\n"
        "  return step + low;",
        "  return metal::fma(code, scale, low);",
        ("keys, 8 bits, bf16", "keys, 2 bits"),
    ),
    Mutation(FUNCTION, "lanes 16 apart do not meet", "ushort step = 16;", "ushort step = 8;", ("values, 2 bits",)),
    Mutation(FUNCTION, "NaN counts", "metal::abs(v) <= AFFINE_LARGEST;", "!(metal::abs(v) < 0.0f);", ("values, hostile",)),
    Mutation(FUNCTION, "ragged tail runs over", "metal::min(group, length - first)", "group", ("keys, 1 bit, ragged",)),
    Mutation(FUNCTION, "no bounds check", "if (i >= uint(dims[0])", "if (i > uint(dims[0])", ("keys, one value",)),
    Mutation(FUNCTION, "SIMD-groups take the next one's group", "i += uint(dims[3])", "i += 1u", ("values, 2 bits",)),
)
