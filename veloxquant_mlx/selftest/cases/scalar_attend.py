"""Cases of scalar_fused_decode_attend."""

from collections.abc import Callable
from typing import Any

import numpy as np

from formats.bitpack import pack
from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.cases._attend import Rng, at, attend_case, floats, many_query_extras, orthogonal, positive, run_time_extras
from veloxquant_mlx.selftest.oracles import attend as oracle

FUNCTION = "scalar_fused_decode_attend"
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
    side: str = "float32",
    g: int = 32,
    levels: int = 256,
    **extras: Any,
) -> dict[str, Any]:
    step = np.float32(4 / levels)
    scale_of = {"k": (B, H, -(-S // g), D), "v": (B, H, S, -(-D // g))}
    sides = {}
    for role, shape in scale_of.items():
        scale, zero = rng.uniform(0.5, 1.5, shape).astype(np.float32) * step, rng.uniform(-3, -1, shape).astype(np.float32)
        for name, values in (("scale", scale), ("zero", zero)):
            sides[f"{role}_{name}"] = Bf16(values) if side == "bfloat16" else values.astype(side)
    return {
        "q": floats(rng, (B, H * group, Q, D), dtype),
        "k_codes": rng.integers(0, levels, (B, H, S, D), dtype=np.uint8),
        "v_codes": rng.integers(0, levels, (B, H, S, D), dtype=np.uint8),
        **sides,
        "group_size": g,
        "scale": 1 / np.sqrt(D),
        **extras,
    }


def case(name: str, change: Change | None = None, **sizes: Any) -> Case:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, **sizes)
        return given | change(given, rng) if change else given

    return attend_case(FUNCTION, name, make, oracle.scalar)


def packed(layout: str, k_bits: int, v_bits: int) -> Change:
    def change(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        codes = {"k_codes": (given["k_codes"], k_bits), "v_codes": (given["v_codes"], v_bits)}
        return {key: pack(c & (2**b - 1), b, layout) for key, (c, b) in codes.items()} | {
            "packed": layout,
            "k_bits": k_bits,
            "v_bits": v_bits,
        }

    return change


def with_extras(make: Callable[[Rng, dict[str, int]], dict[str, Any]], sizes: dict[str, int]) -> Change:
    return lambda given, rng: make(rng, {"B": 1, **sizes})


CASES = (
    *(case(name, with_extras(make, sizes), **sizes) for name, (sizes, make) in run_time_extras().items()),
    *(case(name, with_extras(make, sizes), **sizes) for name, (sizes, make) in many_query_extras().items()),
    # Many queries.
    case("many-4-bits", packed("lsb8", 4, 4), D=128, group=4, H=1, Q=9, S=67, side="float16", levels=16, causal=True),
    case("many-3-and-5-bits", packed("lsb32", 3, 5), S=37, levels=32, Q=33, dtype="float32", side="bfloat16", g=64),
    case("many-ragged-groups", D=40, g=7, S=31, Q=33),
    case("many-D256", D=256, S=21, Q=33),
    case("many-nan-in-a-value", lambda g, rng: {"v_zero": at(g["v_zero"], np.s_[:, 0, 9, 1], np.nan), "causal": True}, S=40, Q=40),
    case("many-nsg", S=40, Q=40, nsg=4, causal=True),
    # Compile-time constants.
    case("D1", D=1, S=5),
    case("D32-fp32", D=32, S=70, dtype="float32", lse=True),
    case("D80-group-3", D=80, group=3, H=1, Q=2, S=67, causal=True),
    case("D96-bf16", D=96, S=33, dtype="bfloat16", side="bfloat16", g=64),
    case("D128-group-4-2-bits", packed("lsb8", 2, 2), D=128, group=4, H=1, S=67, side="float16", levels=4),
    case("D256-group-8", D=256, group=8, H=1, S=20, side="float16"),
    case("ragged-groups", D=50, g=7, S=31),
    case("groups-of-one", D=20, g=1, S=11),
    case("one-group", g=1000, S=37),
    case("largest-group", g=2**31 - 1, S=9),
    case("lsb32-3-and-5-bits", packed("lsb32", 3, 5), S=21, levels=32),
    case("lsb8-3-and-5-bits", packed("lsb8", 3, 5), S=21, levels=32),
    case("D96-lsb32-8-bits", packed("lsb32", 8, 8), D=96, S=19, levels=256),
    case("k-norm", lambda g, rng: {"k_norm": positive(rng, (1, 2, 25), "float16")}, S=25),
    case("rotation", lambda g, rng: {"out_rotation": orthogonal(rng, 64), "lse": True}, S=25),
    *(case(f"nsg-{nsg}", S=75, nsg=nsg, lse=True) for nsg in (1, 3, 32)),
    case("nsg-16-group-4", D=96, group=4, H=1, S=75, nsg=16, lse=True),
    # Values.
    case(
        "gaps-in-memory",
        lambda g, rng: {key: Strided(g[key]) for key in ("q", "k_codes", "k_scale", "k_zero", "v_codes", "v_scale", "v_zero")},
        S=13,
    ),
    case("zeros", lambda g, rng: {key: np.zeros_like(g[key]) for key in ("q", "k_scale", "v_zero")}, S=19),
    case("equal-keys", lambda g, rng: {"k_codes": np.full_like(g["k_codes"], 255)}, S=33),
    case("one-channel-1000-times", lambda g, rng: {"k_scale": at(g["k_scale"], np.s_[..., 5], 1000 / 256)}, S=33),
    case("one-query-1000-times", lambda g, rng: {"q": at(g["q"], np.s_[..., 5], 1000)}, S=33),
    case("negative-scale", lambda g, rng: {"scale": -0.5}),
    case("nan-in-q", lambda g, rng: {"q": at(g["q"], np.s_[:, 0, 0, 3], np.nan), "lse": True}),
    case("infinite-q", lambda g, rng: {"q": at(g["q"], np.s_[:, 0, 0, 3], np.inf), "lse": True}),
    case(
        "nan-in-a-key-group",
        lambda g, rng: {"k_zero": at(g["k_zero"], np.s_[:, 0, 1], np.nan), "causal": True, "lse": True},
        g=8,
        S=16,
        Q=10,
    ),
    case("nan-in-a-value", lambda g, rng: {"v_zero": at(g["v_zero"], np.s_[:, 0, 9, 1], np.nan), "causal": True}, S=12, Q=4),
    case("infinite-value", lambda g, rng: {"v_zero": at(g["v_zero"], np.s_[:, 0, 9, 1], np.inf), "causal": True}, S=12, Q=4),
    case(
        "nan-not-seen",
        lambda g, rng: {
            "start": np.array([8], np.int32),
            "k_scale": at(g["k_scale"], np.s_[:, :, 0], np.nan),
            "v_scale": at(g["v_scale"], np.s_[:, :, :8], np.nan),
            "lse": True,
        },
        g=8,
    ),
)


def error(name: str, message: str, kind: type[Exception] = ValueError, **changes: Any) -> ErrorCase:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, B=2, H=2, group=2, S=9, D=16, g=8)
        return given | {key: value(given) if callable(value) else value for key, value in changes.items()}

    return ErrorCase(FUNCTION, name, make, kind, message)


ERRORS = (
    error("q-rank", "q must be (B, H_q, S_q, D)", q=lambda g: g["q"][0]),
    error("q-dtype", "q must be float16", TypeError, q=lambda g: g["q"].astype(np.int32)),
    error("q-large", "D at most 256", q=lambda g: np.zeros((2, 4, 1, 257), np.float16)),
    error("q-heads", "a multiple of H_kv = 2", q=lambda g: g["q"][:, :3]),
    error("k-codes-rank", "k_codes must be (2, H_kv, S_kv, 16)", k_codes=lambda g: g["k_codes"][0]),
    error("k-codes-D", "k_codes must be (2, H_kv, S_kv, 16)", k_codes=lambda g: g["k_codes"][..., :15]),
    error("k-codes-dtype", "k_codes must be uint8", TypeError, k_codes=lambda g: g["k_codes"].astype(np.int32)),
    error("batch", "k_codes must be (2, H_kv, S_kv, 16)", k_codes=lambda g: g["k_codes"][:1]),
    error("k-scale-groups", "k_scale must be (2, 2, 2, 16)", k_scale=lambda g: g["k_scale"][:, :, :1]),
    error("k-zero-groups", "k_zero must be (2, 2, 2, 16)", k_zero=lambda g: g["k_zero"][:, :, :1]),
    error("k-zero-dtype", "k_zero must be float32", TypeError, k_zero=lambda g: g["k_zero"].astype(np.float16)),
    error("v-codes-length", "v_codes must be (2, 2, 9, 16)", v_codes=lambda g: g["v_codes"][:, :, :8]),
    error("v-scale-groups", "v_scale must be (2, 2, 9, 2)", v_scale=lambda g: g["v_scale"][..., :1]),
    error("v-zero-shape", "v_zero must be (2, 2, 9, 2)", v_zero=lambda g: g["v_zero"][:, :, :8]),
    error("v-scale-dtype", "v_scale must be float16", TypeError, v_scale=lambda g: g["v_scale"].astype(np.int32)),
    error("group-zero", "group_size must be between 1 and", group_size=0),
    error("group-float", "group_size must be an integer", TypeError, group_size=8.0),
    error("group-other", "k_scale must be (2, 2, 3, 16)", group_size=4),
    error("scale-nan", "scale must be finite", scale=float("nan")),
    error("scale-array", "scale must be a float", TypeError, scale=np.ones(1, np.float32)),
    error("nsg-zero", "nsg must be between 1 and 32", nsg=0),
    error("nsg-33", "nsg must be between 1 and 32", nsg=33),
    error("nsg-float", "nsg must be an integer", TypeError, nsg=4.0),
    ErrorCase(
        FUNCTION,
        "nsg-budget",
        lambda rng: arguments(rng, H=1, group=8, D=128, S=3, nsg=16),
        ValueError,
        "nsg must be so small that it takes",
    ),
    ErrorCase(FUNCTION, "nsg-budget-D256", lambda rng: arguments(rng, H=1, group=2, D=256, S=3, nsg=32), ValueError, "33280 bytes"),
    error("packed-name", "packed must be None, lsb8 or lsb32", packed="nibble"),
    error("packed-without-bits", "k_bits must be given for packed = 'lsb8'", TypeError, packed="lsb8"),
    error("bits-without-packed", "v_bits must be None", v_bits=4),
    error("bits-9", "k_bits must be between 1 and 8", packed="lsb8", k_bits=9, v_bits=4),
    error("packed-width", "k_codes must be (2, H_kv, S_kv, 8)", packed="lsb8", k_bits=4, v_bits=4),
    error("packed-dtype", "k_codes must be uint32", TypeError, packed="lsb32", k_bits=4, v_bits=4),
    error("start-shape", "start must be (2,) or (2, 1)", start=np.zeros(3, np.int32)),
    error("k-norm-shape", "k_norm must be (2, 2, 9)", k_norm=np.ones((2, 4, 9), np.float32)),
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: arguments(rng, S=n, B=1 + n % 2), (5, 64, 131)),)

MUTATIONS = (
    Mutation(FUNCTION, "stale-group", "if (j / GROUP != group) {", "if (group < 0) {", ("larger-than-a-block",)),
    Mutation(FUNCTION, "group-of-token-floor", "((tokens - 1) / GROUP + 1)", "(tokens / GROUP)", ("prime",)),
    Mutation(FUNCTION, "beyond-D", "d0 + e < D ? float(scales[base + e]) : 0.0f", "float(scales[base + e])", ("ragged-groups",)),
    Mutation(FUNCTION, "tile-not-rescaled", "scale(attend_factor(m, top));\n      m = top;", "m = top;", ("nsg-1",)),
    Mutation(FUNCTION, "key-of-a-tile-beyond-the-run", "at < last && low[x] <= j", "low[x] <= j", ("nsg-1",)),
    Mutation(FUNCTION, "value-of-another-key", "base + t * TOGETHER + slot, last - 1", "base + slot, last - 1", ("nsg-1",)),
    Mutation(FUNCTION, "odd-simd-group-lost", "(active + 1) / 2;\n    if", "active / 2;\n    if", ("nsg-3",)),
    Mutation(FUNCTION, "third-word-lost", "words[w] = from[w];", "words[w] = 0;", ("D96-lsb32-8-bits",)),
    Mutation(FUNCTION, "code-straddles-words", "shift + BITS > 32", "shift + BITS > 36", ("lsb8-3-and-5-bits",)),
    Mutation(
        FUNCTION,
        "address-space",
        "const threadgroup float* place = pool",
        "const device float* place = pool",
        ("prime",),
        "does not compile",
    ),
    Mutation(FUNCTION, "many-split-from-the-start", "int t = each * int(split)", "int t = 0", ("many-splits",)),
    Mutation(FUNCTION, "many-split-to-the-end", "metal::min(each * (int(split) + 1), tiles)", "tiles", ("many-splits",)),
    Mutation(FUNCTION, "many-zero-of-another-row", "j / GROUP != group", "group < 0", ("many-causal",)),
)
