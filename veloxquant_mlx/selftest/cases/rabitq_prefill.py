"""Cases of rabitq_prefill_attend."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from formats.bitpack import pack
from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.cases._attend import Rng, at, attend_case, floats, orthogonal, positive, signs
from veloxquant_mlx.selftest.cases.flash_prefill import Change, start
from veloxquant_mlx.selftest.oracles import prefill as oracle

FUNCTION = "rabitq_prefill_attend"


def arguments(
    rng: Rng,
    B: int = 1,
    H: int = 1,
    group: int = 1,
    Q: int = 11,
    S: int = 19,
    D: int = 32,
    dtype: str = "float16",
    side: str = "float32",
    entries: int = 16,
    **extras: Any,
) -> dict[str, Any]:
    return {
        "q": floats(rng, (B, H * group, Q, D), dtype),
        "scale": np.array([D**-0.5], np.float32),
        "k_bits": rng.integers(0, 256, (B, H, S, D // 8), dtype=np.uint8),
        "k_mag": positive(rng, (B, H, S), side),
        "k_const": floats(rng, (B, H, S), side),
        "v_idx": rng.integers(0, 256, (B, H, S, D // 2), dtype=np.uint8),
        "v_cents": np.sort(rng.standard_normal(entries)).astype(np.float32),
        **extras,
    }


def case(name: str, change: Change | None = None, **sizes: Any) -> Case:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, **sizes)
        return given | change(given, rng) if change else given

    return attend_case(FUNCTION, name, make, oracle.rabitq)


def words(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
    """The same codes in 32-bit words; a row of D = 40 signs ends within a word."""
    dim = given["q"].shape[3]
    bits = np.unpackbits(given["k_bits"], axis=-1, bitorder="little")[..., :dim]
    nibbles = np.stack([given["v_idx"] & 15, given["v_idx"] >> 4], axis=-1).reshape(*given["v_idx"].shape[:3], dim)
    return {"k_bits": pack(bits, 1, "lsb32"), "v_idx": pack(nibbles, 4, "lsb32"), "packed": "lsb32"}


def not_visible(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
    """NaN and inf of tokens before the start and in the future, in scores and in values."""
    mag, const = at(given["k_mag"], np.s_[..., :3], np.nan), at(given["k_const"], np.s_[..., :3], np.inf)
    scale = at(np.ones_like(mag), np.s_[..., :3], np.nan)
    return {
        "k_mag": mag,
        "k_const": at(const, np.s_[..., -1], np.nan),
        "v_scale": at(scale, np.s_[..., -1], np.nan),
        "start": np.array([3], np.int32),
        "causal": True,
        "lse": True,
    }


CASES = (
    case("one", Q=1, S=1),
    case("one-query", Q=1, S=33, lse=True),
    case("several-tiles", Q=45, S=71, lse=True),
    case("whole-tiles", Q=32, S=32),
    case("causal", Q=37, S=45, causal=True, lse=True),
    case("causal-more-queries-than-keys", Q=37, S=5, causal=True, lse=True),
    case("more-queries-than-keys", Q=9, S=2),
    case("no-keys", S=0, lse=True),
    case("no-queries", Q=0),
    case("no-batch", B=0, lse=True),
    case("no-heads", H=0),
    case("group-3", H=2, group=3, Q=5, lse=True),
    case("group-8", B=2, group=8, Q=3, S=9),
    case("window", Q=35, S=50, window=7, causal=True, lse=True),
    case("window-not-causal", Q=35, S=50, window=7, lse=True),
    case("start", B=2, S=43, **start(30, 7)),
    case("start-per-query", B=2, H=2, Q=3, S=9, **start(0, 9, -5, 8, 2**31 - 1, 7, per_query=True)),
    case("nothing-visible", B=2, Q=5, S=5, **start(5, 9)),
    case("index-beyond-the-table", entries=5),
    case("one-entry", entries=1),
    case("zeros", lambda g, r: {name: np.zeros_like(g[name]) for name in ("q", "k_mag", "k_const")}),
    case("equal-scores", lambda g, r: {"k_mag": np.zeros_like(g["k_mag"]), "k_const": np.ones_like(g["k_const"])}, S=35),
    case("outlier", lambda g, r: {"k_mag": at(g["k_mag"], np.s_[..., 7], 1000), "lse": True}),
    case("nan-in-a-magnitude", lambda g, r: {"k_mag": at(g["k_mag"], np.s_[..., 7], np.nan), "causal": True, "lse": True}, Q=15),
    case("nan-in-a-query", lambda g, r: {"q": at(g["q"], np.s_[..., 4, 3], np.nan), "lse": True}),
    case("infinite-entry", lambda g, r: {"v_cents": at(g["v_cents"], 3, np.inf), "causal": True, "lse": True}),
    case("largest-window-more-queries-than-keys", Q=9, S=2, window=2**31 - 1, lse=True),
    case("infinite-bias", lambda g, r: {"k_const": at(g["k_const"], np.s_[..., 7], np.inf), "lse": True}),
    case("every-bias-minus-infinity", lambda g, r: {"k_const": np.full_like(g["k_const"], -np.inf), "lse": True}),
    case("gaps-in-memory", lambda g, r: {name: Strided(g[name]) for name in g if name != "scale"}, Q=5, S=9),
    # Compile-time constants.
    *(case(f"D{d}", D=d, S=37, lse=True) for d in (8, 64, 80, 96, 128)),
    case("bf16", dtype="bfloat16", side="bfloat16"),
    case("fp32", dtype="float32", out_dtype=mx.float32, causal=True, lse=True),
    case("16-bit-sides", side="float16", out_dtype=mx.float32),
    case("k-norm-v-scale", lambda g, r: {"k_norm": positive(r, (2, 1, 19), "bfloat16"), "v_scale": positive(r, (2, 1, 19))}, B=2, group=4),
    case("not-visible", not_visible, Q=37, S=41),
    case("16-bit-table", lambda g, r: {"v_cents": g["v_cents"].astype(np.float16)}),
    case("words", words),
    case("words-D40", words, D=40),
    case("rotation", lambda g, r: {"out_rotation": orthogonal(r, 32), "lse": True}),
    case("hadamard", lambda g, r: {"out_rotation": signs(r, 32)}),
)


def refused(name: str, error: type[Exception], message: str, change: Change | None = None, **extras: Any) -> ErrorCase:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, B=2, H=2, group=2, Q=5, S=9)
        return given | (change(given, rng) if change else {}) | extras

    return ErrorCase(FUNCTION, name, make, error, message)


def _byte(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


def _ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


ERRORS = (
    refused("q-3d", ValueError, "q must be (B, H_q, S_q, D)", q=np.ones((4, 5, 32), np.float16)),
    refused("q-integer", TypeError, "q must be float16, bfloat16 or float32", q=np.ones((2, 4, 5, 32), np.int32)),
    refused("D-odd", ValueError, "D a multiple of 8", q=np.ones((2, 4, 5, 36), np.float16)),
    refused("D-large", ValueError, "D at most 128", q=np.ones((2, 4, 5, 136), np.float16)),
    refused("heads", ValueError, "H_q a multiple of H_kv = 2", q=np.ones((2, 3, 5, 32), np.float16)),
    refused("scale-0d", ValueError, "scale must be (1,)", scale=np.array(1.0, np.float32)),
    refused("scale-f16", TypeError, "scale must be float32", scale=np.ones(1, np.float16)),
    refused("bits-width", ValueError, "k_bits must be (2, H_kv, S_kv, 4)", k_bits=_byte(2, 2, 9, 8)),
    refused("bits-3d", ValueError, "k_bits must be (2, H_kv, S_kv, 4)", k_bits=_byte(2, 9, 4)),
    refused("bits-int8", TypeError, "k_bits must be uint8", k_bits=np.zeros((2, 2, 9, 4), np.int8)),
    refused("mag-rows", ValueError, "k_mag must be (2, 2, 9)", k_mag=_ones(2, 2, 8)),
    refused("mag-query-heads", ValueError, "k_mag must be (2, 2, 9)", k_mag=_ones(2, 4, 9)),
    refused("mag-integer", TypeError, "k_mag must be float16", k_mag=np.ones((2, 2, 9), np.int32)),
    refused("const-rows", ValueError, "k_const must be (2, 2, 9)", k_const=_ones(2, 2, 10)),
    refused("const-integer", TypeError, "k_const must be float16", k_const=np.ones((2, 2, 9), np.int32)),
    refused("values-one-a-byte", ValueError, "v_idx must be (2, 2, 9, 16)", v_idx=_byte(2, 2, 9, 32)),
    refused("values-rows", ValueError, "v_idx must be (2, 2, 9, 16)", v_idx=_byte(2, 2, 8, 16)),
    refused("values-int32", TypeError, "v_idx must be uint8", v_idx=np.zeros((2, 2, 9, 16), np.int32)),
    refused("table-large", ValueError, "n from 1 to 16", v_cents=_ones(17)),
    refused("table-empty", ValueError, "n from 1 to 16", v_cents=_ones(0)),
    refused("table-2d", ValueError, "v_cents must be (n,)", v_cents=_ones(4, 4)),
    refused("table-integer", TypeError, "v_cents must be float16", v_cents=np.ones(16, np.int32)),
    refused("packed-none", ValueError, "packed must be lsb8 or lsb32", packed=None),
    refused("packed-unknown", ValueError, "packed must be", packed="msb8"),
    refused("packed-bytes-as-words", TypeError, "k_bits must be uint32", packed="lsb32"),
    refused("causal-integer", TypeError, "causal must be a bool", causal=1),
    refused("window-negative", ValueError, "window must be", window=-1),
    refused("start-shape", ValueError, "start must be (2,) or (2, 5)", start=np.zeros(3, np.int32)),
    refused("start-int64", TypeError, "start must be int32", start=np.zeros(2, np.int64)),
    refused("lse-integer", TypeError, "lse must be a bool", lse=1),
    refused("k-norm-shape", ValueError, "k_norm must be (2, 2, 9)", k_norm=_ones(2, 4, 9)),
    refused("v-scale-shape", ValueError, "v_scale must be (2, 2, 9)", v_scale=_ones(2, 2)),
    refused("rotation-shape", ValueError, "out_rotation must be", out_rotation=np.eye(16, dtype=np.float32)),
    refused("out-dtype", TypeError, "out_dtype must be", out_dtype=mx.int32),
    refused("splits", TypeError, "unexpected keyword argument 'splits'", splits=2),
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: arguments(rng, B=1 + n % 2, Q=n // 2, S=n), (2, 5, 40, 67)),)

_mutation = partial(Mutation, FUNCTION)
MUTATIONS = (
    _mutation("highest-bit-first", "byte >> e & 1", "byte >> (7 - e) & 1", ("one-query",)),
    _mutation("nibbles-swapped", "int shift = e * BITS % 32", "int shift = (e ^ 1) * BITS % 32", ("one-query",)),
    _mutation(
        *("index-not-clamped", "table[metal::min(code[e], uint(entries - 1))]", "table[code[e]]"),
        *(("index-beyond-the-table", "one-entry"), "uninitialised"),
    ),
    _mutation("bias-in-base-e", "= float(k_bias[token]) * ATTEND_LOG2E", "= float(k_bias[token])", ("one-query",)),
    _mutation("bias-forgotten", "BIAS ? x + sides[BK + at] : x", "false ? x + sides[BK + at] : x", ("one-query",)),
    _mutation("magnitude-of-another-key", "x * sides[at]", "x * sides[at / 2]", ("one-query",)),
    _mutation("rows-beyond-the-last", "base + j < keys", "true", ("one-query", "one"), "out of bounds"),
    _mutation("queries-beyond-the-last", "if (row >= rows) {\n    return;\n  }\n  const size_t index", "const size_t index", ("one",)),
)
