"""Cases of metal_fused_sdpa."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from formats.bitpack import pack
from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.cases._attend import Rng, at, attend_case, floats, many_query_extras, orthogonal, positive, run_time_extras
from veloxquant_mlx.selftest.oracles import attend as oracle

FUNCTION = "metal_fused_sdpa"
Change = Callable[[dict[str, Any], Rng], dict[str, Any]]


def arguments(
    rng: Rng,
    B: int = 1,
    H: int = 2,
    group: int = 1,
    Q: int = 1,
    S: int = 17,
    D: int = 64,
    dtype: str = "float32",
    index: str = "int32",
    entries: int = 32,
    n_sub: int = 16,
    n_sub_v: int = 8,
    codebook: str = "float32",
    **extras: Any,
) -> dict[str, Any]:
    return {
        "q_tilde": floats(rng, (B, H * group, Q, D), dtype),
        "k_indices": rng.integers(0, entries, (B, H, S, n_sub)).astype(index),
        "k_codebook": floats(rng, (entries, D // n_sub), codebook),
        "v_indices": rng.integers(0, entries, (B, H, S, n_sub_v)).astype(index),
        "v_codebook": floats(rng, (entries, D // n_sub_v), codebook),
        "scale": 1 / np.sqrt(D),
        **extras,
    }


def case(name: str, change: Change | None = None, **sizes: Any) -> Case:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, **sizes)
        return given | change(given, rng) if change else given

    return attend_case(FUNCTION, name, make, oracle.vecinfer)


def packed(layout: str, bits: int) -> Change:
    def change(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        return {key: pack(given[key].astype(np.uint8), bits, layout) for key in ("k_indices", "v_indices")} | {"packed": layout}

    return change


def with_extras(make: Callable[[Rng, dict[str, int]], dict[str, Any]], sizes: dict[str, int]) -> Change:
    return lambda given, rng: make(rng, {"B": 1, **sizes})


CASES = (
    *(case(name, with_extras(make, sizes), **sizes) for name, (sizes, make) in run_time_extras("sliding_window").items()),
    *(case(name, with_extras(make, sizes), **sizes) for name, (sizes, make) in many_query_extras("sliding_window").items()),
    # Many queries.
    case("many-D128", D=128, group=4, H=1, Q=9, S=37, dtype="float16", codebook="float16", index="uint16", entries=256, lse=True),
    case("many-lsb8", packed("lsb8", 5), S=37, Q=33, k_norm=None),
    case("many-nan-value-centroid", lambda g, rng: {"v_codebook": at(g["v_codebook"], (3, 1), np.nan)}, S=37, Q=37),
    # Four indices of a lane at once.
    *(case(f"{index}-indices", index=index, S=21) for index in ("uint16", "uint32")),
    # Codebooks beyond threadgroup memory: of values, of keys.
    case("v-codebook-far", S=19, entries=256, n_sub_v=2, n_sub=16),
    case("k-codebook-far", S=19, entries=256, n_sub_v=16, n_sub=2),
    # Compile-time constants.
    case("D32-uint8", D=32, S=70, index="uint8", lse=True),
    case("D96-bf16", D=96, S=33, dtype="bfloat16", codebook="bfloat16", index="uint32"),
    case("D96-group-3", D=96, group=3, H=2, Q=2, S=37, n_sub=4, n_sub_v=6),
    case("D128-group-4-fp16", D=128, group=4, H=1, S=67, dtype="float16", codebook="float16", index="uint16", entries=256),
    case("D256-group-8", D=256, group=8, H=1, S=20, Q=2, n_sub=1, n_sub_v=2),
    case("lsb8-5-bits", packed("lsb8", 5), S=21),
    case("lsb32-5-bits", packed("lsb32", 5), S=21),
    case("lsb8-8-bits", packed("lsb8", 8), S=21, entries=200),
    case("one-centroid", S=9, entries=1),
    case("bf16-output", S=9, out_dtype=mx.bfloat16),
    case("k-norm-v-scale", lambda g, rng: {"k_norm": positive(rng, (1, 2, 25), "float16"), "v_scale": positive(rng, (1, 2, 25))}, S=25),
    case("rotation", lambda g, rng: {"out_rotation": orthogonal(rng, 64), "lse": True}, S=25),
    # Values.
    case(
        "gaps-in-memory",
        lambda g, rng: {key: Strided(g[key]) for key in ("q_tilde", "k_indices", "k_codebook", "v_indices", "v_codebook")},
        S=13,
    ),
    case("zeros", lambda g, rng: {key: np.zeros_like(g[key]) for key in ("q_tilde", "v_codebook")}, S=19),
    case("equal-keys", lambda g, rng: {"k_indices": np.full_like(g["k_indices"], 3)}, S=33, causal=False),
    case("one-centroid-1000-times", lambda g, rng: {"k_codebook": at(g["k_codebook"], 5, 1000)}, S=33),
    case("index-beyond-the-codebook", lambda g, rng: {key: at(g[key], np.s_[:, :, 3], 2**31 - 1) for key in ("k_indices", "v_indices")}),
    case("negative-index", lambda g, rng: {key: at(g[key], np.s_[:, :, 3], -7) for key in ("k_indices", "v_indices")}),
    case("nan-in-q", lambda g, rng: {"q_tilde": at(g["q_tilde"], np.s_[:, 0, 0, 3], np.nan), "lse": True}),
    case("nan-centroid", lambda g, rng: {"k_codebook": at(g["k_codebook"], 3, np.nan), "lse": True}, S=3),
    case("infinite-q", lambda g, rng: {"q_tilde": at(g["q_tilde"], np.s_[:, 0, 0, 3], np.inf), "lse": True}),
    case("infinite-value-centroid", lambda g, rng: {"v_codebook": at(g["v_codebook"], (3, 1), -np.inf)}, S=9, Q=3),
    case("nan-value-centroid", lambda g, rng: {"v_codebook": at(g["v_codebook"], (3, 1), np.nan)}, S=9, Q=3),
    case(
        "nan-in-the-future",
        lambda g, rng: {
            "k_norm": at(np.ones((1, 2, 9), np.float32), np.s_[..., 8], np.nan),
            "v_scale": at(np.ones((1, 2, 9), np.float32), np.s_[..., 7:], np.nan),
        },
        S=9,
        Q=3,
    ),
    case(
        "nan-before-the-window",
        lambda g, rng: {"k_norm": at(np.ones((1, 2, 9), np.float32), np.s_[..., :4], np.nan), "sliding_window": 5, "lse": True},
        S=9,
    ),
)


def error(name: str, message: str, kind: type[Exception] = ValueError, **changes: Any) -> ErrorCase:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, B=2, H=2, group=2, S=5, D=32)
        return given | {key: value(given) if callable(value) else value for key, value in changes.items()}

    return ErrorCase(FUNCTION, name, make, kind, message)


def of_96_channels(rng: Rng) -> dict[str, Any]:
    return arguments(rng, D=96) | {"out_rotation": np.ones(96, np.float32)}


ERRORS = (
    ErrorCase(FUNCTION, "hadamard-of-96", of_96_channels, ValueError, "(D,) with D = 96 a power of two"),
    error("q-rank", "q_tilde must be (B, H_q, S_q, D)", q_tilde=lambda g: g["q_tilde"][0]),
    error("q-dtype", "q_tilde must be float16", TypeError, q_tilde=lambda g: g["q_tilde"].astype(np.int32)),
    error("q-D", "D a multiple of 32", q_tilde=lambda g: g["q_tilde"][..., :16]),
    error("q-large", "D at most 256", q_tilde=np.zeros((2, 4, 1, 288), np.float32)),
    error("q-heads", "a multiple of H_kv = 2", q_tilde=lambda g: g["q_tilde"][:, :3]),
    error("k-codebook-rank", "k_codebook must be (n_centroids, sub_dim)", k_codebook=np.zeros(32, np.float32)),
    error("k-codebook-sub", "n_sub * sub_dim = D = 32", k_codebook=np.zeros((32, 3), np.float32)),
    error("k-codebook-dtype", "k_codebook must be float16", TypeError, k_codebook=np.zeros((32, 2), np.int32)),
    error("k-width", "k_indices must be (2, 2, 5, 16)", k_indices=lambda g: g["k_indices"][..., :8]),
    error("k-sub", "k_indices must be (2, 2, 5, 8)", k_codebook=np.zeros((32, 4), np.float32)),
    error("k-dtype", "k_indices must be uint8", TypeError, k_indices=lambda g: g["k_indices"].astype(np.int64)),
    error("k-batch", "k_indices must be (2, H_kv, S_kv, n_sub)", k_indices=lambda g: g["k_indices"][:1]),
    error("centroids-differ", "v_codebook must be (32, sub_dim_v)", v_codebook=np.zeros((16, 4), np.float32)),
    error("v-width", "v_indices must be (2, 2, 5, 8)", v_indices=lambda g: g["v_indices"][..., :4]),
    error("v-length", "v_indices must be (2, 2, 5, 8)", v_indices=lambda g: g["v_indices"][:, :, :4]),
    error("v-codebook-sub", "n_sub * sub_dim = D = 32", v_codebook=np.zeros((32, 0), np.float32)),
    error("many-centroids", "at most 256 centroids", k_codebook=np.zeros((257, 2), np.float32), v_codebook=np.zeros((257, 4), np.float32)),
    error("no-centroids", "at most 256 centroids", k_codebook=np.zeros((0, 2), np.float32), v_codebook=np.zeros((0, 4), np.float32)),
    error("many-sub-vectors", "D / sub_dim at most 16", k_codebook=np.zeros((32, 1), np.float32)),
    error("many-sub-vectors-of-values", "D / sub_dim at most 16", v_codebook=np.zeros((32, 1), np.float32)),
    error("scale-type", "scale must be a float", TypeError, scale="0.1"),
    error("scale-infinite", "scale must be finite", scale=float("inf")),
    error("causal-type", "causal must be a bool", TypeError, causal=0),
    error("window-negative", "sliding_window must be between 0 and", sliding_window=-1),
    error("window-name", "got an unexpected keyword argument 'window'", TypeError, window=4),
    error("out-dtype", "out_dtype must be float16", TypeError, out_dtype=mx.int32),
    error("packed-name", "packed must be None, lsb8 or lsb32", packed="nibble"),
    error("packed-dtype", "k_indices must be uint8", TypeError, packed="lsb8"),
    error("start-dtype", "start must be int32", TypeError, start=np.zeros(2, np.float32)),
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: arguments(rng, S=n, B=1 + n % 2), (5, 64, 131)),)

MUTATIONS = (
    Mutation(FUNCTION, "negative-index-not-clamped", "uint(metal::max(code, 0))", "uint(code)", ("negative-index",)),
    Mutation(FUNCTION, "window-off-by-one", "at - dims[ATTEND_WINDOW] + 1", "at - dims[ATTEND_WINDOW]", ("window",)),
    Mutation(
        FUNCTION, "heads-of-the-next-group", "size_t(head) * heads * queries + (real", "size_t(head) * queries + (real", ("D96-group-3",)
    ),
    Mutation(FUNCTION, "head-order", "(row % heads) * queries + row / heads : 0", "row : 0", ("D96-group-3",)),
    Mutation(FUNCTION, "entry-not-advanced", "WHOLE ? e % SUB == 0 : e == 0 || d % SUB == 0", "e == 0", ("prime",)),
    Mutation(FUNCTION, "values-from-keys", "v_words = k_words + dims[9] * SUBK", "v_words = k_words", ("prime",)),
    Mutation(FUNCTION, "negative-index-of-four-not-clamped", "code_of(int32_t(four.y))", "four.y", ("negative-index",)),
    Mutation(FUNCTION, "one-index-of-four", "code[e + c] = four[c]", "code[e + c] = four[0]", ("prime",)),
    Mutation(FUNCTION, "many-first-row-only", "int(sg) * 8 + matrix_row(lane)", "matrix_row(lane)", ("many-causal",)),
)
