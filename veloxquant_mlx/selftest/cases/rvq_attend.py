"""Cases of turboquant_fused_rvq_decode_attend."""

from collections.abc import Callable
from typing import Any

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

FUNCTION = "turboquant_fused_rvq_decode_attend"
Change = Callable[[dict[str, Any], Rng], dict[str, Any]]


def arguments(
    rng: Rng,
    B: int = 1,
    H: int = 2,
    group: int = 1,
    Q: int = 1,
    S: int = 17,
    D: int = 64,
    dtype: str = "float16",
    bits: tuple[int, int, int] = (2, 2, 4),
    sub: int = 4,
    tables: str = "float32",
    **extras: Any,
) -> dict[str, Any]:
    b1, b2, bv = bits
    return {
        "q": floats(rng, (B, H * group, Q, D), dtype),
        "k_indices1": rng.integers(0, 2**b1, (B, H, S, D), dtype=np.uint8),
        "k_indices2": rng.integers(0, 2**b2, (B, H, S, D), dtype=np.uint8),
        "centroids1": floats(rng, (2**b1,), tables),
        "centroids2": floats(rng, (2**b2,), tables, 0.3),
        "v_indices": rng.integers(0, 2**bv, (B, H, S, D // sub), dtype=np.uint8),
        "v_codebook": floats(rng, (2**bv, sub), "float16"),
        "b1": b1,
        "b2": b2,
        "bv": bv,
        **extras,
    }


def case(name: str, change: Change | None = None, **sizes: Any) -> Case:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, **sizes)
        return given | change(given, rng) if change else given

    return attend_case(FUNCTION, name, make, oracle.rvq)


def packed(layout: str) -> Change:
    def change(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        bits = {"k_indices1": given["b1"], "k_indices2": given["b2"], "v_indices": given["bv"]}
        return {key: pack(given[key], b, layout) for key, b in bits.items()} | {"packed": layout}

    return change


def with_extras(make: Callable[[Rng, dict[str, int]], dict[str, Any]], sizes: dict[str, int]) -> Change:
    return lambda given, rng: make(rng, {"B": 1, **sizes})


def codec_sides(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
    """What a codec stores beside the codes."""
    shape = given["k_indices1"].shape[:3]
    return {
        "k_norm": positive(rng, shape, "bfloat16"),
        "v_scale": positive(rng, shape, "bfloat16"),
        "out_rotation": signs(rng, given["q"].shape[3]),
        "lse": True,
    }


CASES = (
    *(case(name, with_extras(make, sizes), **sizes) for name, (sizes, make) in run_time_extras().items()),
    *(case(name, with_extras(make, sizes), **sizes) for name, (sizes, make) in many_query_extras().items()),
    # Many queries.
    case("many-codec", lambda g, rng: packed("lsb8")(g, rng) | codec_sides(g, rng), D=128, group=4, H=1, Q=9, S=37, sub=1),
    case("many-largest-tables", bits=(8, 8, 8), sub=1, S=37, Q=33, dtype="bfloat16"),
    case("many-far", bits=(2, 2, 8), sub=32, S=37, Q=33),
    case("many-odd-D", D=21, S=37, sub=7, bits=(1, 3, 2), Q=33),
    case("many-not-finite", lambda g, rng: {"v_codebook": at(g["v_codebook"], (3, 1), np.nan), "causal": True}, S=37, Q=37),
    # The values' codebook beyond threadgroup memory.
    case("far", bits=(2, 2, 8), sub=32, S=19),
    # Compile-time constants.
    case("D32-fp32", D=32, S=70, dtype="float32", lse=True),
    case("D80-group-3", D=80, group=3, H=1, Q=2, S=37, causal=True, sub=5),
    case("D96-bf16", D=96, S=33, dtype="bfloat16", tables="bfloat16", sub=3),
    case("D128-group-4-codec", lambda g, rng: packed("lsb8")(g, rng) | codec_sides(g, rng), D=128, group=4, H=1, S=67, sub=1),
    case("D256-group-8", D=256, group=8, H=1, S=20),
    case("odd-D", D=21, S=20, sub=7, bits=(1, 3, 2)),
    case("one-sub-vector", sub=64, S=11, bits=(4, 4, 8)),
    case("largest-tables", bits=(8, 8, 8), sub=1, S=11),
    case("lsb32", packed("lsb32"), S=21, bits=(3, 1, 5)),
    case("D128-lsb32", packed("lsb32"), D=128, S=19, bits=(4, 2, 4), sub=1),
    case("lsb8-odd-bits", packed("lsb8"), S=21, bits=(3, 1, 5)),
    case("rotation", lambda g, rng: {"out_rotation": orthogonal(rng, 64)}, S=25),
    # Values.
    case(
        "gaps-in-memory",
        lambda g, rng: {
            key: Strided(g[key]) for key in ("q", "k_indices1", "k_indices2", "centroids1", "centroids2", "v_indices", "v_codebook")
        },
        S=13,
    ),
    case("zeros", lambda g, rng: {key: np.zeros_like(g[key]) for key in ("q", "centroids1")}, S=19),
    case("equal-keys", lambda g, rng: {key: np.zeros_like(g[key]) for key in ("k_indices1", "k_indices2")}, S=33),
    case("one-centroid-1000", lambda g, rng: {"centroids1": at(g["centroids1"], 1, 1000)}, S=33),
    case(
        "index-beyond-the-table", lambda g, rng: {key: at(g[key], np.s_[:, :, 3], 255) for key in ("k_indices1", "k_indices2", "v_indices")}
    ),
    case("nan-in-q", lambda g, rng: {"q": at(g["q"], np.s_[:, 0, 0, 3], np.nan), "lse": True}),
    case("nan-centroid", lambda g, rng: {"centroids2": at(g["centroids2"], 3, np.nan), "lse": True}, S=5),
    case("infinite-code-vector", lambda g, rng: {"v_codebook": at(g["v_codebook"], (3, 1), np.inf), "causal": True}, S=5, Q=3),
    case("nan-in-a-code-vector", lambda g, rng: {"v_codebook": at(g["v_codebook"], (3, 1), np.nan)}, S=5),
    case(
        "nan-not-seen",
        lambda g, rng: {
            "start": np.array([8], np.int32),
            "k_norm": at(np.ones((1, 2, 17), np.float32), np.s_[:, :, :8], np.nan),
            "v_scale": at(np.ones((1, 2, 17), np.float32), np.s_[:, :, :8], np.nan),
            "lse": True,
        },
    ),
    case("infinite-norm", lambda g, rng: {"k_norm": at(np.ones((1, 2, 17), np.float32), np.s_[:, 0, 3], np.inf), "lse": True}),
)


def error(name: str, message: str, kind: type[Exception] = ValueError, **changes: Any) -> ErrorCase:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, B=2, H=2, group=2, S=5, D=16)
        return given | {key: value(given) if callable(value) else value for key, value in changes.items()}

    return ErrorCase(FUNCTION, name, make, kind, message)


ERRORS = (
    error("q-rank", "q must be (B, H_q, S_q, D)", q=lambda g: g["q"][0]),
    error("q-dtype", "q must be float16", TypeError, q=lambda g: g["q"].astype(np.int32)),
    error("q-large", "D at most 256", q=lambda g: np.zeros((2, 4, 1, 257), np.float16)),
    error("q-no-D", "D at most 256", q=lambda g: g["q"][..., :0]),
    error("q-heads", "a multiple of H_kv = 2", q=lambda g: g["q"][:, :3]),
    error("k1-D", "k_indices1 must be (2, H_kv, S_kv, 16)", k_indices1=lambda g: g["k_indices1"][..., :8]),
    error("k1-dtype", "k_indices1 must be uint8", TypeError, k_indices1=lambda g: g["k_indices1"].astype(np.int32)),
    error("k2-length", "k_indices2 must be (2, 2, 5, 16)", k_indices2=lambda g: g["k_indices2"][:, :, :4]),
    error("k2-rank", "k_indices2 must be (2, 2, 5, 16)", k_indices2=lambda g: g["k_indices2"][0]),
    error("centroids1-size", "centroids1 must be (4,)", centroids1=np.zeros(3, np.float32)),
    error("centroids2-rank", "centroids2 must be (4,)", centroids2=np.zeros((4, 1), np.float32)),
    error("centroids2-dtype", "centroids2 must be float16", TypeError, centroids2=np.zeros(4, np.int32)),
    error("b1-zero", "b1 must be between 1 and 8", b1=0),
    error("b2-nine", "b2 must be between 1 and 8", b2=9),
    error("bv-float", "bv must be an integer", TypeError, bv=4.0),
    error("v-codebook-size", "v_codebook must be (16, sub)", v_codebook=np.zeros((8, 4), np.float16)),
    error("v-codebook-sub", "sub a divisor of D = 16", v_codebook=np.zeros((16, 3), np.float16)),
    error("v-codebook-empty", "sub a divisor of D = 16", v_codebook=np.zeros((16, 0), np.float16)),
    error("v-codebook-rank", "v_codebook must be (16, sub)", v_codebook=np.zeros(16, np.float16)),
    error("v-width", "v_indices must be (2, 2, 5, 4)", v_indices=lambda g: g["v_indices"][..., :3]),
    error("packed-name", "packed must be None, lsb8 or lsb32", packed="lsb16"),
    error("packed-width", "k_indices1 must be (2, H_kv, S_kv, 4)", packed="lsb8"),
    error("packed-dtype", "k_indices1 must be uint32", TypeError, packed="lsb32"),
    error("v-scale-shape", "v_scale must be (2, 2, 5)", v_scale=np.ones((2, 4, 5), np.float32)),
    error("splits-many", "splits must be between 1 and 256", splits=257),
    ErrorCase(
        FUNCTION,
        "rotation-not-a-power-of-two",
        lambda rng: arguments(rng, D=24, out_rotation=np.ones(24, np.float32)),
        ValueError,
        "D = 24 a power of two",
    ),
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: arguments(rng, S=n, B=1 + n % 2), (5, 64, 131)),)

MUTATIONS = (
    Mutation(FUNCTION, "second-stage-lost", "+ centroids2[i >> BITS1]", "+ 0 * centroids2[i >> BITS1]", ("prime",)),
    Mutation(FUNCTION, "pairs-swapped", "table[a + (b << BITS1)]", "table[b + (a << BITS1)]", ("prime",)),
    Mutation(FUNCTION, "second-table-at-the-first", "table[b + (1 << BITS1)]", "table[b]", ("largest-tables",)),
    Mutation(FUNCTION, "values-from-keys", "entries = tables + TABLES - (1 << BITSV)", "entries = tables", ("D128-group-4-codec",)),
    Mutation(
        FUNCTION, "stage-without-barrier", "  threadgroup_barrier(mem_flags::mem_threadgroup);\n}", "}", ("prime", "larger-than-a-block")
    ),
    Mutation(FUNCTION, "bit-order-of-words", "first + e % PER * BITS", "first + (PER - 1 - e % PER) * BITS", ("lsb32",)),
    Mutation(FUNCTION, "second-word-lost", "words[w + 1] = pair.y", "words[w + 1] = pair.x", ("D128-lsb32",)),
    Mutation(FUNCTION, "shuffle-off-by-one", "offset = LANES / 2; offset > 0", "offset = LANES / 2; offset > 1", ("prime",)),
    Mutation(FUNCTION, "rotation-transposed", "rotation[size_t(i) * D + d]", "rotation[size_t(d) * D + i]", ("rotation",)),
    Mutation(FUNCTION, "vectors-from-keys", "entries = tables + TABLES - (SUB << BITSV)", "entries = tables", ("prime",)),
    Mutation(FUNCTION, "one-of-four", "x[e + i] = four[i]", "x[e + i] = four[0]", ("prime",)),
    Mutation(FUNCTION, "many-factor-lost", "VSCALE && (whole || (low <= j && j < high)) ?", "false ?", ("many-codec",)),
)
