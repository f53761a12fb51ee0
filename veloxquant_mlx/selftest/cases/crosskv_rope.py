"""Keys moved from one theta to another."""

from typing import Any

import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided, Tolerance
from veloxquant_mlx.selftest.oracles.crosskv_rope import recode

FUNCTION = "crosskv_rope_recode"


def call(shape: tuple[int, int, int], dtype: str = "float32", start: int = 0, source: float = 1e4, target: float = 5e5) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        keys = rng.normal(size=shape).astype(np.float32)
        return {
            "keys": Bf16(keys) if dtype == "bfloat16" else keys.astype(dtype),
            "positions": np.arange(start, start + shape[1], dtype=np.int32),
            "source_base": source,
            "target_base": target,
        }

    return make


def scattered(dtype: str, *positions: int) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        return {**call((2, len(positions), 32))(rng), "positions": np.array(positions, dtype=dtype)}

    return make


def hostile(rng: np.random.Generator) -> dict[str, Any]:
    arguments = call((2, 5, 32), start=3)(rng)
    keys = arguments["keys"]
    keys[0, 1, 4], keys[0, 2, 20], keys[1, 3] = np.nan, np.inf, 0
    keys[1, 0, 9] *= 1000
    return arguments


def strided(make: Any) -> Any:
    return lambda rng: {k: Strided(v) if isinstance(v, np.ndarray | Bf16) else v for k, v in make(rng).items()}


def changed(**changes: Any) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        arguments = call((2, 5, 32))(rng)
        return {**arguments, **{k: v(arguments[k]) if callable(v) else v for k, v in changes.items()}}

    return make


FLOAT32 = Tolerance("two products, a sum and a table in float32, 2^-24 each of entries of up to 5, at any position", 1.2e-6)
FLOAT16 = Tolerance("as in float32, and one rounding to float16: 2^-11", 1.2e-6, 2.0**-11)
BFLOAT16 = Tolerance("as in float32, and one rounding to bfloat16: 2^-8", 1.2e-6, 2.0**-8)
LOUD = Tolerance("as in float32, with one entry of up to 3000", 1e-3)

CASES = tuple(
    Case(FUNCTION, name, make, recode, (dtype,), tolerance)
    for name, make, dtype, tolerance in (
        ("head of 32", call((3, 7, 32)), "float32", FLOAT32),
        ("head of 64, fp16", call((2, 5, 64), "float16"), "float16", FLOAT16),
        ("head of 80, bf16", call((2, 3, 80), "bfloat16"), "bfloat16", BFLOAT16),
        ("head of 96", call((1, 3, 96)), "float32", FLOAT32),
        ("head of 128, more than a block", call((2, 9, 128)), "float32", FLOAT32),
        ("head of 256", call((1, 3, 256)), "float32", FLOAT32),
        ("one pair, one row", call((1, 1, 2), start=1), "float32", FLOAT32),
        ("theta downwards", call((2, 3, 32), source=1e6, target=1e4, start=77), "float32", FLOAT32),
        ("equal thetas", call((2, 3, 32), target=1e4), "float32", None),
        ("position 131072", call((2, 5, 32), start=131_072), "float32", FLOAT32),
        ("position 1000000, fp16", call((2, 5, 64), "float16", start=1_000_000), "float16", FLOAT16),
        ("position 2^31 - 2", call((1, 1, 32), start=2**31 - 2), "float32", FLOAT32),
        ("positions scattered, of 64 bits", scattered("int64", 5, 0, 2**31, 131_071, 7), "float32", FLOAT32),
        ("positions negative", scattered("int32", -1, -4096, 9), "float32", FLOAT32),
        ("positions of 8 bits", scattered("uint8", 255, 3), "float32", FLOAT32),
        ("NaN, infinity, zeros, outlier", hostile, "float32", LOUD),
        ("not contiguous", strided(call((2, 5, 32))), "float32", FLOAT32),
        ("no rows", call((2, 0, 32)), "float32", FLOAT32),
        ("no heads", call((0, 3, 32)), "float32", FLOAT32),
    )
)

ERRORS = tuple(
    ErrorCase(FUNCTION, name, make, error, message)
    for name, make, error, message in (
        ("two axes", changed(keys=lambda k: k[0]), ValueError, "keys must be (BH, N, D) with D even, but got (5, 32)"),
        ("four axes", changed(keys=lambda k: k[None]), ValueError, "keys must be (BH, N, D) with D even"),
        ("D odd", changed(keys=lambda k: k[..., :31]), ValueError, "D even, but got (2, 5, 31)"),
        ("D 0", changed(keys=lambda k: k[..., :0]), ValueError, "D even, but got (2, 5, 0)"),
        ("BH 65536", changed(keys=np.zeros((65536, 5, 2), np.float16)), ValueError, "BH must be below 65536"),
        ("keys of integers", changed(keys=lambda k: k.astype(np.int32)), TypeError, "keys must be float16, bfloat16 or float32"),
        ("keys no array", changed(keys=None), TypeError, "keys must be an mx.array, but got NoneType"),
        ("positions of another length", changed(positions=lambda p: p[:4]), ValueError, "positions must be (5,), but got (4,)"),
        ("positions of two axes", changed(positions=lambda p: p[None]), ValueError, "positions must be (5,), but got (1, 5)"),
        ("positions of floats", changed(positions=lambda p: p.astype(np.float32)), TypeError, "positions must be integers"),
        ("positions no array", changed(positions=[0, 1, 2, 3, 4]), TypeError, "positions must be integers, but got list"),
        ("source_base 0", changed(source_base=0.0), ValueError, "source_base must be positive and finite, but got 0.0"),
        ("target_base infinite", changed(target_base=float("inf")), ValueError, "target_base must be positive and finite"),
        ("target_base NaN", changed(target_base=float("nan")), ValueError, "target_base must be positive and finite"),
        ("target_base not a number", changed(target_base="1e4"), TypeError, "target_base must be a number, but got str"),
    )
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: call((2, n, 32))(rng), (1, 7, 40)),)

MUTATIONS = (
    Mutation(FUNCTION, "turned the other way", "return kept - crossed;", "return kept + crossed;", ("head of 32",)),
    Mutation(
        FUNCTION, "pairs of neighbours", "const float b = float(keys[at + HALF]);", "const float b = float(keys[at + 1]);", ("head of 32",)
    ),
    Mutation(FUNCTION, "every head reads the first", "(size_t(head) * size_t(dims[0])", "(size_t(0) * size_t(dims[0])", ("head of 32",)),
    Mutation(FUNCTION, "table of one row", "{cosines[i], sines[i]}", "{cosines[i % HALF], sines[i % HALF]}", ("head of 32",)),
    Mutation(FUNCTION, "no bounds check", "if (i >= uint(dims[0]) * HALF", "if (i > uint(dims[0]) * HALF", ("head of 32",)),
)
