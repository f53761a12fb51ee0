"""QJL: cases, refusals, and faults that the cases must notice."""

import math

import mlx.core as mx
import numpy as np

from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided, Tolerance
from veloxquant_mlx.selftest.cases.scalar_quant import as_dtype
from veloxquant_mlx.selftest.oracles import qjl as oracle

ENCODE, INNER = "qjl_encode", "qjl_inner_product"

HALF = Tolerance(
    "one rounding to float16 (2^-11, or half a subnormal step) of a float32 value good to 1e-5", atol=3.1e-8, rtol=2**-11 + 1e-5
)
SINGLE = Tolerance("a sum of d squares, none negative, in float32: d 2^-24 at worst, d = 256", rtol=256 * 2**-24)
BRAIN = Tolerance("one rounding to bfloat16 of a float32 value good to 1e-5", rtol=2**-8 + 1e-5)
NORMS = {"float16": HALF, "float32": SINGLE, "bfloat16": BRAIN}


def encode(
    name: str, rows: int, dim: int, m: int, x_dtype="float16", s_dtype="float16", norm=None, change=lambda x: x, wrap=lambda x: x
) -> Case:
    norm_dtype = norm or "float16"

    def make(rng: np.random.Generator) -> dict:
        x, S = change(rng.standard_normal((rows, dim))), rng.standard_normal((m, dim))
        extra = {"norm_dtype": getattr(mx, norm)} if norm else {}
        return {"x": wrap(as_dtype(x, x_dtype)), "S": wrap(as_dtype(S, s_dtype))} | extra

    def want(x, S, norm_dtype=None):
        return oracle.encode(x, S, norm_max=65519.99 if norm in (None, "float16") else math.inf)

    return Case(ENCODE, name, make, want, ("uint8", norm_dtype), (None, NORMS[norm_dtype]))


def integers(name: str, dim: int, m: int) -> Case:
    """Small integers: projections are exact, many of them 0."""

    def make(rng: np.random.Generator) -> dict:
        return {"x": rng.integers(-1, 2, (9, dim)).astype(np.float16), "S": rng.integers(-1, 2, (m, dim)).astype(np.float16)}

    return Case(ENCODE, name, make, oracle.encode, ("uint8", "float16"), (None, HALF))


def outlier(x: np.ndarray) -> np.ndarray:
    x[0, 3] *= 1000
    return x


def odd_rows(x: np.ndarray) -> np.ndarray:
    """NaN, an infinity, two infinities, zeros, the largest float16, the smallest; one per row."""
    x[0, 5], x[1, 0], x[2, [1, 2]], x[3], x[4], x[5] = math.nan, math.inf, [math.inf, -math.inf], 0, 65504, 6e-8
    return x


def operands(rng: np.random.Generator, slots: int, heads: int, m: int, q_dtype="float16", n_dtype="float16") -> dict:
    return {
        "q_proj": as_dtype(rng.standard_normal((heads, m)), q_dtype),
        "packed_signs": rng.integers(0, 256, (slots, heads, m // 8)).astype(np.uint8),
        "norms": as_dtype(rng.uniform(0.5, 2, (slots, heads)), n_dtype),
    }


def inner(name, slots, heads, m, q_dtype="float16", n_dtype="float16", out=None, change=lambda a: a, scale=1.0) -> Case:
    out_dtype = out or "float16"
    # |score| <= 1.26 * 2 * mean |q|; the float32 sum is off by m 2^-24 of mean |q| < 1.3 at worst.
    slack = scale * 1.26 * 2 * 1.3 * (m + 8) * 2.0**-24
    rounding = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 0.0}[out_dtype]
    tolerance = Tolerance(
        "a float32 sum of m terms, in any order, and one rounding to the result's dtype", atol=slack + 3.1e-8, rtol=rounding + 1e-6
    )

    def make(rng: np.random.Generator) -> dict:
        return change(operands(rng, slots, heads, m, q_dtype, n_dtype)) | ({"out_dtype": getattr(mx, out)} if out else {})

    def want(q_proj, packed_signs, norms, out_dtype=None):
        return oracle.inner_product(q_proj, packed_signs, norms)

    return Case(INNER, name, make, want, (out_dtype,), tolerance)


def strided(a: dict) -> dict:
    return {key: Strided(value) for key, value in a.items()}


def odd_heads(a: dict) -> dict:
    """A NaN, an infinity, zeros; one per head; and odd norms."""
    a["q_proj"][0, 5], a["q_proj"][1, 0], a["q_proj"][2] = math.nan, math.inf, 0
    a["norms"][0], a["norms"][1], a["norms"][2] = math.nan, math.inf, 0
    return a


def outlier_head(a: dict) -> dict:
    a["q_proj"][0, 7] = 1000
    return a


CASES = (
    encode("empty", 0, 64, 64),
    encode("one", 1, 1, 8),
    encode("seven", 7, 7, 8),
    encode("d32", 5, 32, 32),
    encode("d64", 5, 64, 128),
    encode("d80", 3, 80, 40),
    encode("d96", 3, 96, 96),
    encode("d128", 3, 128, 64),
    encode("d256", 2, 256, 72),
    encode("blocks", 133, 16, 40),
    encode("f32", 5, 64, 64, "float32", "float32"),
    encode("f32-norm", 5, 64, 64, "float32", "float32", "float32"),
    encode("f16-s-f32", 5, 64, 64, "float16", "float32"),
    encode("bf16", 5, 64, 64, "bfloat16", "bfloat16", "bfloat16"),
    encode("strided", 5, 33, 24, wrap=Strided),
    encode("outlier", 5, 128, 64, change=outlier),
    encode("odd-rows", 9, 64, 64, change=odd_rows),
    encode("overflowing-norm", 5, 64, 64, change=lambda x: x * 1e4),
    encode("wide-norm", 5, 64, 64, "float32", "float32", "float32", change=lambda x: x * 1e6),
    encode("tiny-norm", 5, 64, 64, change=lambda x: x * 1e-6),
    integers("zero-projections", 16, 64),
    integers("zero-projections-odd", 17, 40),
    inner("no-slots", 0, 3, 64),
    inner("no-heads", 3, 0, 64),
    inner("one", 1, 1, 8),
    inner("m32", 7, 3, 32),
    inner("m64", 61, 2, 64),
    inner("m80", 5, 3, 80),
    inner("m96", 5, 3, 96),
    inner("m128", 13, 4, 128),
    inner("m256", 5, 1, 256),
    inner("blocks", 261, 2, 16),
    inner("f32", 5, 3, 64, "float32", "float32", "float32"),
    inner("bf16", 5, 3, 64, "bfloat16", "bfloat16", "bfloat16"),
    inner("f32-norms", 5, 3, 64, "float16", "float32"),
    inner("strided", 5, 3, 16, change=strided),
    inner("odd-heads", 5, 4, 64, change=odd_heads),
    inner("outlier", 5, 2, 64, change=outlier_head, scale=17.0),
)


def _encode_error(name: str, error: type[Exception], message: str, **change) -> ErrorCase:
    good = {"x": np.zeros((2, 16), np.float16), "S": np.zeros((24, 16), np.float16)}
    return ErrorCase(ENCODE, name, lambda _: good | change, error, message)


def _inner_error(name: str, error: type[Exception], message: str, **change) -> ErrorCase:
    return ErrorCase(INNER, name, lambda rng: operands(rng, 5, 3, 16) | change, error, message)


ERRORS = (
    _encode_error("x-1d", ValueError, "x must be (B, d)", x=np.zeros(16, np.float16)),
    _encode_error("x-3d", ValueError, "x must be (B, d)", x=np.zeros((1, 2, 16), np.float16)),
    _encode_error("x-int", TypeError, "x must be float16", x=np.zeros((2, 16), np.int8)),
    _encode_error("x-list", TypeError, "x must be an mx.array", x=[[0.0] * 16]),
    _encode_error("no-columns", ValueError, "d at least 1", x=np.zeros((2, 0), np.float16), S=np.zeros((24, 0), np.float16)),
    _encode_error("s-1d", ValueError, "S must be (m, 16)", S=np.zeros(16, np.float16)),
    _encode_error("s-transposed", ValueError, "S must be (m, 16)", S=np.zeros((16, 24), np.float16)),
    _encode_error("s-int", TypeError, "S must be float16", S=np.zeros((24, 16), np.int8)),
    _encode_error("m20", ValueError, "m a multiple of 8", S=np.zeros((20, 16), np.float16)),
    _encode_error("m0", ValueError, "m a multiple of 8", S=np.zeros((0, 16), np.float16)),
    _encode_error("norm-dtype-int", ValueError, "norm_dtype must be", norm_dtype=mx.int8),
    _inner_error("q-1d", ValueError, "q_proj must be (H, m)", q_proj=np.zeros(16, np.float16)),
    _inner_error("q-3d", ValueError, "q_proj must be (H, m)", q_proj=np.zeros((1, 3, 16), np.float16)),
    _inner_error("q-int", TypeError, "q_proj must be float16", q_proj=np.zeros((3, 16), np.int8)),
    _inner_error("m12", ValueError, "m a multiple of 8", q_proj=np.zeros((3, 12), np.float16)),
    _inner_error("m0", ValueError, "m a multiple of 8", q_proj=np.zeros((3, 0), np.float16)),
    _inner_error("signs-2d", ValueError, "packed_signs must be (S_kv, 3, 2)", packed_signs=np.zeros((5, 6), np.uint8)),
    _inner_error("signs-one-head", ValueError, "packed_signs must be (S_kv, 3, 2)", packed_signs=np.zeros((5, 1, 2), np.uint8)),
    _inner_error("signs-wide", ValueError, "packed_signs must be (S_kv, 3, 2)", packed_signs=np.zeros((5, 3, 16), np.uint8)),
    _inner_error("signs-int8", TypeError, "packed_signs must be uint8", packed_signs=np.zeros((5, 3, 2), np.int8)),
    _inner_error("norms-transposed", ValueError, "norms must be (5, 3)", norms=np.zeros((3, 5), np.float16)),
    _inner_error("norms-1d", ValueError, "norms must be (5, 3)", norms=np.zeros(5, np.float16)),
    _inner_error("norms-int", TypeError, "norms must be float16", norms=np.zeros((5, 3), np.int32)),
    _inner_error("out-dtype-int", ValueError, "out_dtype must be", out_dtype=mx.uint8),
)

LENGTHS = (
    LengthCase(
        ENCODE,
        lambda rng, n: {"x": rng.standard_normal((n, 16)).astype(np.float16), "S": rng.standard_normal((24, 16)).astype(np.float16)},
        (1, 2, 65),
    ),
    LengthCase(INNER, lambda rng, n: operands(rng, n, 2, 16), (1, 2, 300)),
)

MUTATIONS = (
    Mutation(ENCODE, "strictly-positive", "sums[r] >= 0.0f", "sums[r] > 0.0f", ("zero-projections",)),
    Mutation(ENCODE, "lane-off-by-one", "word >> lane & 0xFF", "word >> (lane + 1) & 0xFF", ("d32",)),
    Mutation(ENCODE, "first-lanes-only", "norms[first + r] = O(metal::precise::sqrt(sum));", "norms[first] = O(sum);", ("d32",)),
    Mutation(ENCODE, "no-reduction", "sum = simd_sum(sum);", "", ("d64",)),
    Mutation(ENCODE, "row-not-clamped", "metal::min(first + r, rows - 1)", "(first + r)", ("one", "seven", "d80")),
    Mutation(INNER, "most-significant-first", "byte >> t & 1", "byte >> (7 - t) & 1", ("m32",)),
    Mutation(
        INNER, "heads-swapped", "size_t(slot) * size_t(heads) + size_t(head)", "size_t(head) * size_t(slots) + size_t(slot)", ("m32",)
    ),
    Mutation(INNER, "sign-lost", ": -value", ": 0.0f", ("m32",)),
)
