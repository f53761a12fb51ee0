"""Cases of flash_prefill_attend, and the arguments that streaming_prefill_attend shares with it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.cases._attend import Rng, at, attend_case, floats, orthogonal, positive, signs
from veloxquant_mlx.selftest.oracles import prefill as oracle

FUNCTION = "flash_prefill_attend"
Change = Callable[[dict[str, Any], Rng], dict[str, Any]]


def arguments(
    rng: Rng, B: int = 1, H: int = 1, group: int = 1, Q: int = 19, S: int = 19, D: int = 32, dtype: str = "float16", **extras: Any
) -> dict[str, Any]:
    return {
        "q": floats(rng, (B, H * group, Q, D), dtype),
        "k": floats(rng, (B, H, S, D), dtype),
        "v": floats(rng, (B, H, S, D), dtype),
        "scale": np.array([max(D, 1) ** -0.5], np.float32),
        **extras,
    }


def case(function: str, name: str, change: Change | None = None, **sizes: Any) -> Case:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, **sizes)
        return given | change(given, rng) if change else given

    return attend_case(function, name, make, oracle.plain)


def start(*values: int, per_query: bool = False) -> dict[str, Any]:
    first = np.array(values, np.int32)
    return {"start": first.reshape(2, -1) if per_query else first, "lse": True}


def not_visible(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
    """NaN and inf where a row must not be touched by them: before its start, in its future."""
    k, v = given["k"].copy(), given["v"].copy()
    k[:, 0, :3], v[:, 0, :3] = np.nan, np.inf
    k[:, 0, -1], v[:, 0, -2, 5], v[:, 0, -1, 7] = np.inf, np.nan, -np.inf
    v[:, 0, 20, 9] = np.nan
    return {"k": k, "v": v, "start": np.array([3], np.int32), "lse": True}


def chosen_scores(value: float) -> Change:
    """Key 2 scores `value` with every query."""

    def change(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        return {"q": np.ones_like(given["q"]), "k": at(at(given["k"], np.s_[:, :, 2], 0), np.s_[:, :, 2, 0], value), "lse": True}

    return change


def run_time_cases(function: str, **constants: Any) -> tuple[Case, ...]:
    """What changes no compile-time constant."""
    row = partial(case, function, **constants)
    return (
        row("one", Q=1, S=1),
        row("one-query", Q=1, S=33, lse=True),
        row("two-tiles", Q=45, S=45, lse=True),
        row("tail", B=2, Q=7, S=71, lse=True),
        row("whole-tiles", Q=32, S=64),
        row("no-keys", Q=0, S=0, lse=True),
        row("no-queries", Q=0, S=9),
        row("no-batch", B=0, lse=True),
        row("no-heads", H=0),
        row("group-3", H=2, group=3, Q=5, S=37, lse=True),
        row("group-8", group=8, Q=3, S=11),
        row("window", Q=40, S=70, window=9, lse=True),
        row("window-of-one", Q=9, S=12, window=1, lse=True),
        row("largest-window", Q=9, S=12, window=2**31 - 1),
        row("start", B=2, Q=37, S=43, **start(30, 7)),
        row("start-per-query", B=2, H=2, Q=3, S=9, **start(0, 9, -5, 8, 2**31 - 1, 7, per_query=True)),
        row("start-and-window", B=2, Q=35, S=50, window=6, **start(20, 60)),
        row("nothing-visible", B=2, Q=5, S=5, **start(5, 9)),
        row("not-visible", not_visible, Q=37, S=41),
        row("nan-in-a-key", lambda g, r: {"k": at(g["k"], np.s_[0, 0, 4, 3], np.nan), "lse": True}),
        row("nan-in-a-value", lambda g, r: {"v": at(g["v"], np.s_[0, 0, 4, 3], np.nan), "lse": True}),
        row("infinite-value", lambda g, r: {"v": at(g["v"], np.s_[0, 0, 4, 3], -np.inf), "lse": True}),
        row("nan-in-a-query", lambda g, r: {"q": at(g["q"], np.s_[0, 0, 4, 3], np.nan), "lse": True}),
        row("score-infinite", chosen_scores(np.inf), Q=5, S=6),
        row("score-minus-infinite", chosen_scores(-np.inf), Q=5, S=6),
        row("every-score-minus-infinite", lambda g, r: {"q": np.ones_like(g["q"]), "k": np.full_like(g["k"], -np.inf), "lse": True}),
        row("zeros", lambda g, r: {name: np.zeros_like(g[name]) for name in "qkv"}),
        row("equal-scores", lambda g, r: {"k": np.ones_like(g["k"])}, Q=33, S=35),
        row("outlier", lambda g, r: {"k": at(g["k"], np.s_[0, 0, 3, 0], 1000), "v": at(g["v"], np.s_[0, 0, 5, 1], 1000)}),
        row("gaps-in-memory", lambda g, r: {name: Strided(g[name]) for name in "qkv"}, Q=6, S=8),
    )


def compile_time_cases(function: str, dims: tuple[int, ...], **constants: Any) -> tuple[Case, ...]:
    row = partial(case, function, **constants)
    per_token = {"k_norm": "float16", "v_scale": "float32"}
    return (
        *(row(f"D{d}", D=d, Q=9, S=45, lse=True) for d in dims),
        row("bf16", D=64, Q=9, S=37, dtype="bfloat16"),
        row("fp32", Q=35, S=37, dtype="float32", out_dtype=mx.float32, lse=True),
        row("fp32-D128", D=128, Q=5, S=35, dtype="float32"),
        row("mixed", lambda g, r: {"v": floats(r, (1, 1, 19, 32), "bfloat16"), "q": g["q"].astype(np.float32)}),
        row("k-norm-v-scale", lambda g, r: {n: positive(r, (2, 1, 19), t) for n, t in per_token.items()}, B=2, group=4, lse=True),
        row("rotation", lambda g, r: {"out_rotation": orthogonal(r, 32), "lse": True}, Q=3),
        row("hadamard", lambda g, r: {"out_rotation": signs(r, 32)}, Q=3),
    )


CASES = (
    *run_time_cases(FUNCTION),
    *compile_time_cases(FUNCTION, (8, 64, 80, 96, 128)),
)


def refused(function: str, name: str, error: type[Exception], message: str, change: Change | None = None, **extras: Any) -> ErrorCase:
    def make(rng: Rng) -> dict[str, Any]:
        given = arguments(rng, B=2, H=2, group=2, Q=5, S=9)
        return given | (change(given, rng) if change else {}) | extras

    return ErrorCase(function, name, make, error, message)


def common_errors(function: str, multiple: int) -> tuple[ErrorCase, ...]:
    row = partial(refused, function)

    def replaced(name: str, shape: tuple[int, ...], dtype: str = "float16") -> Change:
        return lambda g, r: {name: floats(r, shape, dtype)}

    def with_dim(dim: int) -> Change:
        return lambda g, r: arguments(r, D=dim)

    return (
        row("q-3d", ValueError, "q must be (B, H_q, S_q, D)", replaced("q", (4, 5, 32))),
        row("q-integer", TypeError, "q must be float16, bfloat16 or float32", lambda g, r: {"q": np.zeros((2, 4, 5, 32), np.int32)}),
        row("q-number", TypeError, "q must be an mx.array", q=1.0),
        row("D-odd", ValueError, f"D a multiple of {multiple}", with_dim(multiple + 4)),
        row("D-zero", ValueError, "with D at most 128", with_dim(0)),
        row("D-large", ValueError, "with D at most 128", with_dim(160)),
        row("k-D", ValueError, "k must be (2, H_kv, S_kv, 32)", replaced("k", (2, 2, 9, 64))),
        row("k-batch", ValueError, "k must be (2, H_kv, S_kv, 32)", replaced("k", (1, 2, 9, 32))),
        row("k-integer", TypeError, "k must be float16", lambda g, r: {"k": np.zeros((2, 2, 9, 32), np.int8)}),
        row("v-rows", ValueError, "v must be (2, 2, 9, 32)", replaced("v", (2, 2, 8, 32))),
        row("v-heads", ValueError, "v must be (2, 2, 9, 32)", replaced("v", (2, 1, 9, 32))),
        row("v-integer", TypeError, "v must be float16", lambda g, r: {"v": np.zeros((2, 2, 9, 32), np.int8)}),
        row("heads", ValueError, "H_q a multiple of H_kv = 2", replaced("q", (2, 3, 5, 32))),
        row("scale-0d", ValueError, "scale must be (1,)", scale=np.array(1.0, np.float32)),
        row("scale-f16", TypeError, "scale must be float32", scale=np.ones(1, np.float16)),
        row("scale-float", TypeError, "scale must be an mx.array", scale=0.125),
        row("more-queries-than-keys", ValueError, "S_q at most S_kv = 9", replaced("q", (2, 4, 10, 32))),
        row("window-negative", ValueError, "window must be", window=-1),
        row("window-float", TypeError, "window must be an integer", window=3.0),
        row("start-shape", ValueError, "start must be (2,) or (2, 5)", start=np.zeros(3, np.int32)),
        row("start-int64", TypeError, "start must be int32", start=np.zeros(2, np.int64)),
        row("lse-integer", TypeError, "lse must be a bool", lse=1),
        row("k-norm-shape", ValueError, "k_norm must be (2, 2, 9)", k_norm=np.ones((2, 4, 9), np.float32)),
        row("v-scale-integer", TypeError, "v_scale must be float16", v_scale=np.ones((2, 2, 9), np.int32)),
        row("rotation-shape", ValueError, "out_rotation must be", out_rotation=np.eye(16, dtype=np.float32)),
        row("out-dtype", TypeError, "out_dtype must be", out_dtype=mx.int32),
        row("causal", TypeError, "unexpected keyword argument 'causal'", causal=True),
        row("splits", TypeError, "unexpected keyword argument 'splits'", splits=2),
        row("unknown", TypeError, "unexpected keyword argument 'mask'", mask=None),
    )


ERRORS = common_errors(FUNCTION, 8)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: arguments(rng, B=1 + n % 2, Q=n // 2, S=n), (2, 5, 40, 67)),)

_mutation = partial(Mutation, FUNCTION)
MUTATIONS = (
    _mutation("future-visible", "dims[ATTEND_CAUSAL] ? at + 1", "dims[ATTEND_CAUSAL] ? at + 2", ("two-tiles",)),
    _mutation("window-off-by-one", "at - dims[ATTEND_WINDOW] + 1", "at - dims[ATTEND_WINDOW]", ("window-of-one", "window")),
    _mutation("wrong-position-in-a-group", "int i = row / dims[ATTEND_GROUP]", "int i = row % dims[ATTEND_QUERIES]", ("group-3",)),
    _mutation("head-by-head", "(real % group) * queries + real / group", "real", ("group-3",)),
    _mutation(
        "no-barrier-before-loads",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n    prefill_load",
        "prefill_load",
        ("two-tiles",),
        "race",
    ),
    _mutation("no-barrier-after-loads", "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n    Sums s", "Sums s", ("one-query", "tail")),
    _mutation("zero-weight-of-nan", "if (!anywhere)", "if (true)", ("not-visible",)),
    _mutation("whole-too-soon", "base + BK <= full_to", "base <= full_to", ("two-tiles",)),
    _mutation("never-rescaled", "sum[f].thread_elements()[e] *= keep", "sum[f].thread_elements()[e] *= 1", ("two-tiles", "tail")),
    _mutation("keys-not-transposed", "LD, ulong2(0, 0), true", "LD, ulong2(0, 0), false", ("two-tiles",)),
    _mutation("values-transposed", "LD, ulong2(0, 0), false", "LD, ulong2(0, 0), true", ("two-tiles",)),
    _mutation("second-four-lost", "x[e + 4] = T(high[e])", "x[e + 4] = T(low[e])", ("two-tiles",)),
    _mutation("half-a-row-maximum", "metal::max(x, simd_shuffle_xor(x, ushort(8)))", "x", ("two-tiles", "outlier")),
    _mutation("nothing-minus-nothing", "top == -INFINITY ? 0.0f : top", "top", ("start-and-window", "start")),
)
