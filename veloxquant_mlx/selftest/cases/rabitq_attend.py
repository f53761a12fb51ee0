"""Cases of rabitq_fused_attend."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from formats.bitpack import pack
from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.cases._attend import (
    Rng,
    at,
    attend_case,
    floats,
    many_query_extras,
    orthogonal,
    positive,
    run_time_extras,
    signs,
)
from veloxquant_mlx.selftest.oracles import attend as oracle

FUNCTION = "rabitq_fused_attend"


def arguments(
    rng: Rng,
    B: int = 1,
    H: int = 2,
    group: int = 1,
    Q: int = 1,
    S: int = 17,
    D: int = 64,
    dtype: str = "float16",
    side: str = "float32",
    entries: int = 16,
    **extras: Any,
) -> dict[str, Any]:
    return {
        "q": floats(rng, (B, H * group, Q, D), dtype),
        "q_scale": positive(rng, (B, H * group, Q)) / np.float32(np.sqrt(D)),
        "k_bits": rng.integers(0, 256, (B, H, S, D // 8), dtype=np.uint8),
        "k_mag": positive(rng, (B, H, S), side),
        "k_const": floats(rng, (B, H, S), side),
        "v_idx": rng.integers(0, entries, (B, H, S, D), dtype=np.uint8),
        "v_cents": np.sort(rng.standard_normal(entries)).astype(np.float32),
        **extras,
    }


def case(name: str, change: Callable[[dict[str, Any], Rng], dict[str, Any]] | None = None, **sizes: Any) -> Case:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, **sizes)
        return given | change(given, rng) if change else given

    return attend_case(FUNCTION, name, make, oracle.rabitq)


def packed(layout: str, bits: int) -> Callable[[dict[str, Any], Rng], dict[str, Any]]:
    def change(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        extras = {} if layout == "nibble" else {"packed": layout}
        return {"v_idx": pack(given["v_idx"], bits, layout), **extras}

    return change


def with_extras(make: Callable[[Rng, dict[str, int]], dict[str, Any]], sizes: dict[str, int]) -> Callable[[dict, Rng], dict[str, Any]]:
    return lambda given, rng: make(rng, {"B": 1, **sizes})


CASES = (
    *(case(name, with_extras(make, sizes), **sizes) for name, (sizes, make) in run_time_extras().items()),
    *(case(name, with_extras(make, sizes), **sizes) for name, (sizes, make) in many_query_extras().items()),
    # Many queries.
    case("many-nibble-fp32", packed("nibble", 4), D=128, group=4, H=1, Q=9, S=37, dtype="float32", lse=True),
    case("many-nan-in-the-future", lambda g, rng: {"k_const": at(g["k_const"], np.s_[..., -1], np.nan), "causal": True, "lse": True}, Q=33),
    case("many-infinite-entry", lambda g, rng: {"v_cents": at(g["v_cents"], 3, -np.inf), "causal": True}, Q=33),
    case("many-rotation", lambda g, rng: {"out_rotation": orthogonal(rng, 64), "splits": 2}, Q=33, S=25),
    # Compile-time constants.
    case("D8", D=8, S=9),
    case("D32-fp32", D=32, S=29, dtype="float32"),
    case("D80-group-3", D=80, group=3, H=1, Q=2, S=35),
    case("D96-bf16", D=96, S=31, dtype="bfloat16", side="bfloat16"),
    case("D128-group-4-nibble", packed("nibble", 4), D=128, group=4, H=1, S=67, side="float16"),
    case("D256-group-8", D=256, group=8, H=1, Q=2, S=40, causal=True, lse=True),
    case("group-12", group=12, H=1, S=11),
    case("nibble", packed("nibble", 4), S=37),
    case("lsb8-3-bits", packed("lsb8", 3), S=21, entries=8),
    case("lsb32-3-bits", packed("lsb32", 3), S=21, entries=8),
    case("256-entries", S=21, entries=256),
    case("1-entry", S=9, entries=1),
    case(
        "k-norm-v-scale",
        lambda g, rng: {"k_norm": positive(rng, (1, 2, 25), "bfloat16"), "v_scale": positive(rng, (1, 2, 25), "float16")},
        S=25,
    ),
    case("rotation", lambda g, rng: {"out_rotation": orthogonal(rng, 64), "lse": True}, S=25),
    case("hadamard", lambda g, rng: {"out_rotation": signs(rng, 64), "splits": 2}, S=25),
    # Values.
    case(
        "gaps-in-memory",
        lambda g, rng: {key: Strided(g[key]) for key in ("q", "q_scale", "k_bits", "k_mag", "k_const", "v_idx", "v_cents")},
        S=13,
    ),
    case("zeros", lambda g, rng: {key: np.zeros_like(g[key]) for key in ("q", "k_mag", "k_const")}, S=19),
    case(
        "signed-zeros-and-nan-in-q",
        lambda g, rng: {"q": at(at(at(g["q"], np.s_[..., 3], np.nan), np.s_[..., 4], -0.0), np.s_[..., 5], 0.0)},
    ),
    case(
        "equal-scores",
        lambda g, rng: {"k_bits": np.zeros_like(g["k_bits"]), "k_mag": np.ones_like(g["k_mag"]), "k_const": np.zeros_like(g["k_const"])},
        S=33,
    ),
    case("one-key-1000-times", lambda g, rng: {"k_mag": at(g["k_mag"], np.s_[..., 7], 1000)}, S=33),
    case("index-beyond-the-table", lambda g, rng: {"v_idx": at(g["v_idx"], np.s_[..., 2:5, :], 255)}, entries=5),
    case("nan-in-a-bias", lambda g, rng: {"k_const": at(g["k_const"], np.s_[:, 1, 4], np.nan), "lse": True}),
    case(
        "infinite-biases", lambda g, rng: {"k_const": at(at(g["k_const"], np.s_[:, 0, 4:8], -np.inf), np.s_[:, 1, 4], np.inf), "lse": True}
    ),
    case("every-bias-minus-infinity", lambda g, rng: {"k_const": np.full_like(g["k_const"], -np.inf), "lse": True}, S=11),
    case(
        "nan-not-seen",
        lambda g, rng: {
            "start": np.array([4], np.int32),
            "k_const": at(g["k_const"], np.s_[..., :4], np.nan),
            "v_scale": at(np.ones((1, 2, 17), np.float32), np.s_[..., :4], np.nan),
            "lse": True,
        },
    ),
    case("nan-in-the-future", lambda g, rng: {"k_const": at(g["k_const"], np.s_[..., -1], np.nan), "causal": True, "lse": True}, Q=3),
    case("infinite-entry", lambda g, rng: {"v_cents": at(g["v_cents"], 3, -np.inf), "causal": True}, Q=3),
    case("nan-in-a-value", lambda g, rng: {"v_scale": at(np.ones((1, 2, 17), np.float32), np.s_[:, 0, 16], np.nan), "causal": True}, Q=3),
)


def error(name: str, message: str, kind: type[Exception] = ValueError, **changes: Any) -> ErrorCase:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, B=2, H=2, group=2, S=5, D=16)
        return given | {key: value(given) if callable(value) else value for key, value in changes.items()}

    return ErrorCase(FUNCTION, name, make, kind, message)


def of_80_channels(rng: Rng) -> dict[str, Any]:
    return arguments(rng, D=80) | {"out_rotation": np.ones(80, np.float32)}


ERRORS = (
    ErrorCase(FUNCTION, "hadamard-of-80", of_80_channels, ValueError, "(D,) with D = 80 a power of two"),
    error("q-rank", "q must be (B, H_q, S_q, D)", q=lambda g: g["q"][0]),
    error("q-integers", "q must be float16", TypeError, q=lambda g: g["q"].astype(np.int32)),
    error("q-not-an-array", "q must be an mx.array", TypeError, q=3.0),
    error("q-D", "D a multiple of 8", q=lambda g: g["q"][..., :12]),
    error("q-large", "D at most 256", q=lambda g: np.zeros((2, 4, 1, 264), np.float16)),
    error("q-heads", "a multiple of H_kv = 2", q=lambda g: g["q"][:, :3], q_scale=lambda g: g["q_scale"][:, :3]),
    error("q-scale-shape", "q_scale must be (2, 4, 1)", q_scale=lambda g: g["q_scale"][:, :2]),
    error("k-bits-width", "k_bits must be (2, H_kv, S_kv, 2)", k_bits=lambda g: g["k_bits"][..., :1]),
    error("k-bits-dtype", "k_bits must be uint8", TypeError, k_bits=lambda g: g["k_bits"].astype(np.uint32)),
    error("k-mag-length", "k_mag must be (2, 2, 5)", k_mag=lambda g: g["k_mag"][..., :4]),
    error("k-const-batch", "k_const must be (2, 2, 5)", k_const=lambda g: g["k_const"][:1]),
    error("k-const-dtype", "k_const must be float16", TypeError, k_const=lambda g: g["k_const"].astype(np.int32)),
    error("v-idx-width", "v_idx must be (2, 2, 5, 16)", v_idx=lambda g: g["v_idx"][..., :7]),
    error("v-idx-length", "v_idx must be (2, 2, 5, 16)", v_idx=lambda g: g["v_idx"][:, :, :4]),
    error("v-idx-dtype", "v_idx must be uint8", TypeError, v_idx=lambda g: g["v_idx"].astype(np.int32)),
    error("nibbles-of-17", "at most 16", v_idx=lambda g: g["v_idx"][..., :8], v_cents=np.zeros(17, np.float32)),
    error("no-entries", "n from 1 to 256", v_cents=np.zeros(0, np.float32)),
    error("257-entries", "n from 1 to 256", v_cents=np.zeros(257, np.float32)),
    error("v-cents-rank", "v_cents must be (n,)", v_cents=np.zeros((4, 4), np.float32)),
    error("packed-name", "packed must be None, lsb8 or lsb32", packed="nibble"),
    error("packed-width", "v_idx must be (2, 2, 5, 8)", packed="lsb8"),
    error("packed-dtype", "v_idx must be uint32", TypeError, packed="lsb32"),
    error("causal-type", "causal must be a bool", TypeError, causal=1),
    error("lse-type", "lse must be a bool", TypeError, lse=None),
    error("window-negative", "window must be between 0 and", window=-1),
    error("window-float", "window must be an integer", TypeError, window=2.0),
    error("start-dtype", "start must be int32", TypeError, start=np.zeros(2, np.uint32)),
    error("start-shape", "start must be (2,) or (2, 1)", start=np.zeros(1, np.int32)),
    error("start-per-head", "start must be (2,) or (2, 1)", start=np.zeros((2, 4, 1), np.int32)),
    error("k-norm-shape", "k_norm must be (2, 2, 5)", k_norm=np.ones((2, 2, 1), np.float32)),
    error("v-scale-dtype", "v_scale must be float16", TypeError, v_scale=np.ones((2, 2, 5), np.int32)),
    error("rotation-shape", "out_rotation must be (16, 16)", out_rotation=np.ones((16, 8), np.float32)),
    error("rotation-length", "out_rotation must be (16, 16)", out_rotation=np.ones(8, np.float32)),
    error("rotation-dtype", "out_rotation must be float16", TypeError, out_rotation=np.ones(16, np.int32)),
    error("out-dtype", "out_dtype must be float16", TypeError, out_dtype=mx.int32),
    error("no-splits", "splits must be between 1 and", splits=0),
    error("unknown-extra", "got an unexpected keyword argument 'windows'", TypeError, windows=3),
)

LENGTHS = (
    LengthCase(FUNCTION, lambda rng, n: arguments(rng, S=n, B=1 + n % 2), (5, 64, 131)),
    LengthCase(FUNCTION, lambda rng, n: arguments(rng, S=n, splits=2, causal=True, Q=2), (6, 63, 140), "lengths-of-splits"),
)

MUTATIONS = (
    Mutation(FUNCTION, "hamming-without-xor", "x[w] ^ key.x[w]", "x[w] & key.x[w]", ("prime",)),
    Mutation(FUNCTION, "sign-of-zero", "float(row[d0 + e]) >= 0", "float(row[d0 + e]) > 0", ("signed-zeros-and-nan-in-q",)),
    Mutation(FUNCTION, "clamp-one-too-far", "uint(entries - 1))] : 0.0f", "uint(entries))] : 0.0f", ("index-beyond-the-table",)),
    Mutation(
        FUNCTION,
        "merge-without-barrier",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (int(sg) < active",
        "if (int(sg) < active",
        ("larger-than-a-block",),
    ),
    Mutation(FUNCTION, "causal-off-by-one", "dims[ATTEND_CAUSAL] ? at + 1", "dims[ATTEND_CAUSAL] ? at", ("causal-tail",)),
    Mutation(FUNCTION, "split-overlap", "metal::min(per_split, seen - before)", "metal::min(per_split + 1, seen - before)", ("splits",)),
    Mutation(FUNCTION, "masked-minus-infinity", "if (s == -INFINITY) {", "if (false) {", ("every-bias-minus-infinity",)),
    Mutation(FUNCTION, "codes-of-the-first-lane", "row + i * BITS / 8", "row", ("nibble",)),
    Mutation(FUNCTION, "many-query-without-its-sign", "SIGNS ? (x >= 0 ? 1.0f : -1.0f) : x", "x", ("many-causal",)),
    Mutation(FUNCTION, "many-scale-of-another", "q_scale[dims[ATTEND_PER_ROW] ? q_row : 0]", "q_scale[0]", ("many-causal",)),
)
