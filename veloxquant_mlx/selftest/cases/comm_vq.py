"""Product codes decoded and rotated."""

from typing import Any

import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided, Tolerance
from veloxquant_mlx.selftest.oracles.comm_vq import decode

FUNCTION = "comm_vq_decode_metal"


def call(
    rows: int, n_cb: int, sub_dim: int, cb_size: int, dtype: str = "float16", codes: str = "uint8", start: int = 0, base: float = 1e4
) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        book = rng.normal(size=(n_cb, cb_size, sub_dim))
        half = n_cb * sub_dim // 2
        return {
            "indices": rng.integers(0, cb_size, (rows, n_cb)).astype(codes),
            "codebook": Bf16(book.astype(np.float32)) if dtype == "bfloat16" else book.astype(dtype),
            "positions": np.arange(start, start + rows, dtype=np.int32),
            "inv_freq": (base ** (-np.arange(half) / half)).astype(np.float32),
            "n_cb": n_cb,
            "sub_dim": sub_dim,
            "cb_size": cb_size,
        }

    return make


def scattered(rng: np.random.Generator) -> dict[str, Any]:
    arguments = call(9, 4, 8, 16)(rng)
    return {**arguments, "positions": np.array([0, 1, -1, 5000, -70_000, 131_072, 1_000_000, 16_777_215, -16_777_215], dtype=np.int32)}


def out_of_range(rng: np.random.Generator) -> dict[str, Any]:
    arguments = call(5, 4, 8, 10)(rng)
    arguments["indices"][:, 1] = [9, 10, 11, 127, 255]
    arguments["indices"][4, 3] = 255
    return arguments


def hostile(rng: np.random.Generator) -> dict[str, Any]:
    """NaN in one codeword and 60000 in another stay in their entries; what exceeds float16 becomes infinite."""
    arguments = call(12, 4, 8, 3, "float32")(rng)
    arguments["codebook"][0, 0, 3], arguments["codebook"][1, 1, 2], arguments["codebook"][2, 2, 0] = np.nan, 6e4, 1e6
    arguments["codebook"][3, 1] = 0
    return arguments


def strided(make: Any) -> Any:
    return lambda rng: {k: Strided(v) if isinstance(v, np.ndarray | Bf16) else v for k, v in make(rng).items()}


def changed(**changes: Any) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        arguments = call(5, 4, 8, 16)(rng)
        return {**arguments, **{k: v(arguments[k]) if callable(v) else v for k, v in changes.items()}}

    return make


ROUNDING = Tolerance(
    "one rounding to float16 is 2^-11 of the value; an angle good to 3e-7 moves entries of up to 5 by 2e-6", 4e-6, 2.0**-11
)
LOUD = Tolerance("the same, with entries of 1e6 beside the small ones", 0.6, 2.0**-11)

CASES = tuple(
    Case(FUNCTION, name, make, decode, ("float16",), tolerance)
    for name, make, tolerance in (
        ("head of 32", call(7, 4, 8, 16), ROUNDING),
        ("head of 64, bf16", call(5, 8, 8, 256, "bfloat16"), ROUNDING),
        ("head of 80", call(3, 5, 16, 11), ROUNDING),
        ("head of 96, fp32", call(3, 3, 32, 16, "float32"), ROUNDING),
        ("head of 128, more than a block", call(9, 4, 32, 16), ROUNDING),
        ("head of 256", call(3, 8, 32, 16), ROUNDING),
        ("one codebook", call(3, 1, 6, 5), ROUNDING),
        ("a codebook per entry", call(3, 6, 1, 5), ROUNDING),
        ("codes of 16 bits", call(5, 4, 8, 300, codes="uint16"), ROUNDING),
        ("one row, one codeword", call(1, 1, 2, 1), ROUNDING),
        ("no rows", call(0, 4, 8, 16), ROUNDING),
        ("position 131072", call(5, 4, 8, 16, start=131_072, base=5e5), ROUNDING),
        ("scattered and negative positions", scattered, ROUNDING),
        ("indices out of range", out_of_range, ROUNDING),
        ("NaN, zeros, outliers, beyond float16", hostile, LOUD),
        ("not contiguous", strided(call(5, 4, 8, 16)), ROUNDING),
    )
)

ERRORS = tuple(
    ErrorCase(FUNCTION, name, make, error, message)
    for name, make, error, message in (
        ("D odd", changed(n_cb=3, sub_dim=3), ValueError, "n_cb * sub_dim must be even, but got 9"),
        ("indices of one axis", changed(indices=lambda i: i[:, 0]), ValueError, "indices must be (N, 4), but got (5,)"),
        ("indices of another width", changed(indices=lambda i: i[:, :3]), ValueError, "indices must be (N, 4), but got (5, 3)"),
        ("indices signed", changed(indices=lambda i: i.astype(np.int32)), TypeError, "indices must be uint8 or uint16, but got int32"),
        ("codebook of two axes", changed(codebook=lambda c: c[0]), ValueError, "codebook must be (4, 16, 8), but got (16, 8)"),
        ("codebook of another size", changed(cb_size=17), ValueError, "codebook must be (4, 17, 8), but got (4, 16, 8)"),
        ("codebook of integers", changed(codebook=lambda c: c.astype(np.int8)), TypeError, "codebook must be float16"),
        ("positions of another length", changed(positions=lambda p: p[:4]), ValueError, "positions must be (5,), but got (4,)"),
        ("positions of floats", changed(positions=lambda p: p.astype(np.float32)), TypeError, "positions must be int32, but got float32"),
        ("inv_freq of another length", changed(inv_freq=lambda f: f[:8]), ValueError, "inv_freq must be (16,), but got (8,)"),
        ("inv_freq of fp16", changed(inv_freq=lambda f: f.astype(np.float16)), TypeError, "inv_freq must be float32, but got float16"),
        ("n_cb 0", changed(n_cb=0), ValueError, "n_cb must be at least 1, but got 0"),
        ("sub_dim 0", changed(sub_dim=0), ValueError, "sub_dim must be at least 1, but got 0"),
        ("cb_size 0", changed(cb_size=0), ValueError, "cb_size must be between 1 and 65536, but got 0"),
        ("cb_size not an integer", changed(cb_size=16.0), TypeError, "cb_size must be an integer, but got float"),
        ("indices no array", changed(indices=None), TypeError, "indices must be an mx.array, but got NoneType"),
    )
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: call(n, 4, 8, 16)(rng), (1, 7, 40)),)

MUTATIONS = (
    Mutation(
        FUNCTION, "index is not clamped", "metal::min(uint(indices[part]), count - 1u)", "uint(indices[part])", ("indices out of range",)
    ),
    Mutation(
        FUNCTION, "angle rounded to one float", "metal::fma(position, frequency, -angle)", "0.0f", ("scattered and negative positions",)
    ),
    Mutation(FUNCTION, "turned the other way", "return kept - crossed;", "return kept + crossed;", ("head of 32",)),
    Mutation(FUNCTION, "pairs of neighbours", "uint(dims[1]), d + HALF);", "uint(dims[1]), d + 1);", ("head of 32",)),
    Mutation(FUNCTION, "positions unsigned", "float(positions[row])", "float(uint(positions[row]))", ("scattered and negative positions",)),
)
