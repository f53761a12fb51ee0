"""Rows for the CUDA kernels of prefill on tensor cores (src/prefill_tiles.cu): heads of 64 and 128, 16-bit queries and results.

Made as the tables' own rows are, oracle and tolerance included, with what 16-bit operands add: a weight is rounded by 2^-11 of itself at
most (2^-8 in bfloat16), which moves a result by half as much of the largest value, unless all roundings agree; entries of a table of
values, to halves: 2^-11 of the largest. Every row must reach the tile kernel of its function.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx.selftest.case import Case, Strided, to_oracle
from veloxquant_mlx.selftest.cases import flash_prefill, rabitq_prefill
from veloxquant_mlx.selftest.cases._attend import at, floats, orthogonal, positive, signs
from veloxquant_mlx.selftest.cases.flash_prefill import Change, start


def of_halves(row: Case, key: str, step: float) -> Case:
    """Room for `step` of the largest finite entry, times the largest factor of a value."""
    given = {name: to_oracle(value) for name, value in row.arguments().items()}
    sizes = [np.abs(given[name].astype(np.float64)) for name in (key, "v_scale") if name in given]
    extra = step * float(np.prod([size[np.isfinite(size)].max() for size in sizes if size.size]))
    first, *rest = row.tolerance
    return replace(row, tolerance=(replace(first, atol=first.atol + extra), *rest))


def plain(name: str, change: Change | None = None, **sizes: Any) -> Case:
    sizes = {"D": 128, "group": 4, "H": 2, "Q": 45, "S": 150} | sizes
    row = flash_prefill.case(flash_prefill.FUNCTION, f"tiles: {name}", change, **sizes)
    return of_halves(row, "v", 2.0**-9 if sizes.get("dtype") == "bfloat16" else 2.0**-12)


def rabitq(name: str, change: Change | None = None, **sizes: Any) -> Case:
    row = rabitq_prefill.case(f"tiles: {name}", change, **({"D": 128, "group": 4, "H": 2, "Q": 45, "S": 150, "side": "float16"} | sizes))
    return of_halves(row, "v_cents", 2.0**-11)


def not_visible(given: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """NaN and inf before each row's start and in its future; one value that later rows do see."""
    k, v = given["k"].copy(), given["v"].copy()
    k[:, 0, :3], v[:, 0, :3] = np.nan, np.inf
    k[:, 0, -1], v[:, 0, -2, 5], v[:, 0, -1, 7] = np.inf, np.nan, -np.inf
    v[:, 0, 130, 9] = np.nan
    return {"k": k, "v": v, "start": np.array([3], np.int32), "lse": True}


def growing(given: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Factors of values, each tile's beyond what fitted the one before."""
    shape = given["k" if "k" in given else "k_bits"].shape[:3]
    return {"v_scale": np.broadcast_to(2.0 ** np.linspace(-6, 6, shape[2], dtype=np.float32), shape).copy(), "lse": True}


def per_token(dtype: str, spread: bool = False) -> Change:
    """k_norm and v_scale; with `spread`, factors of values that differ by orders of magnitude and have both signs."""

    def change(given: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        shape = given["k" if "k" in given else "k_bits"].shape[:3]
        scale = floats(rng, shape, dtype) * (2.0 ** rng.integers(-6, 7, shape)).astype(dtype) if spread else positive(rng, shape, dtype)
        return {"k_norm": positive(rng, shape, dtype), "v_scale": scale, "lse": True}

    return change


def scaled(*values: float) -> Change:
    return lambda given, rng: {"scale": np.array(values, np.float32), "lse": True}


PREFILL_CASES = (
    plain("two tiles"),
    plain("one query", Q=1, S=65, lse=True),
    plain("one key", Q=1, S=1, group=1, H=1, lse=True),
    plain("whole tiles", Q=64, S=128, group=2, lse=True),
    plain("a head of its own", Q=130, S=200, group=1, H=1, lse=True),
    plain("3 heads", Q=50, S=70, group=3, H=1, B=2, lse=True),
    plain("8 heads", Q=17, S=300, group=8, H=1),
    plain("head of 64", D=64, lse=True),
    plain("bfloat16", dtype="bfloat16"),
    plain("bfloat16, head of 64", dtype="bfloat16", D=64, group=1),
    plain("bfloat16 keys, float16 values", lambda g, r: {"v": floats(r, g["v"].values.shape)}, dtype="bfloat16", H=1),
    plain("window", window=70, lse=True, H=1, S=260),
    plain("window of one", window=1, H=1),
    plain("start", B=2, H=1, **start(30, 149)),
    plain("starts", B=2, H=1, Q=3, S=90, **start(0, 70, -5, 89, 2**31 - 1, 7, per_query=True)),
    plain("nothing visible", B=2, H=1, Q=5, S=70, **start(70, 90)),
    plain("not visible", not_visible),
    plain("nan in a key", lambda g, r: {"k": at(g["k"], np.s_[0, 0, 4, 3], np.nan), "lse": True}, H=1),
    plain("nan in a value", lambda g, r: {"v": at(g["v"], np.s_[0, 0, 140, 3], np.nan)}, H=1),
    plain("infinite value", lambda g, r: {"v": at(g["v"], np.s_[0, 0, 140, 3], -np.inf)}, H=1),
    plain("nan in a query", lambda g, r: {"q": at(g["q"], np.s_[0, 0, 4, 3], np.nan), "lse": True}, H=1),
    plain("score infinite", flash_prefill.chosen_scores(np.inf), H=1, Q=5, S=6),
    plain("score minus infinite", flash_prefill.chosen_scores(-np.inf), H=1, Q=5, S=6),
    plain("every score minus infinite", lambda g, r: {"q": np.ones_like(g["q"]), "k": np.full_like(g["k"], -np.inf), "lse": True}, H=1),
    plain("zeros", lambda g, r: {key: np.zeros_like(g[key]) for key in "qkv"}, H=1),
    plain("outlier", lambda g, r: {"k": at(g["k"], np.s_[0, 0, 3, 0], 1000), "v": at(g["v"], np.s_[0, 0, 5, 1], 1000)}, H=1),
    plain("scores that grow", lambda g, r: {"k": g["k"] * np.linspace(0, 3, 300, dtype=np.float16)[:, None]}, Q=20, S=300, H=1),
    plain("gaps in memory", lambda g, r: {key: Strided(g[key]) for key in "qkv"}, H=1),
    plain("negative scale", scaled(-0.1), H=1),
    plain("no scale", scaled(0.0), H=1),
    plain("factors", per_token("float16"), H=1),
    plain("factors of both signs", per_token("float32", spread=True), H=1),
    plain("factors that grow", growing, H=1, S=300),
    plain("negative scale, factors", lambda g, r: {**per_token("float32")(g, r), **scaled(-0.1)(g, r)}, H=1),
    plain("factor not visible", lambda g, r: {"v_scale": at(np.ones((1, 1, 150), np.float32), np.s_[..., -1], np.nan)}, H=1),
    plain("rotation", lambda g, r: {"out_rotation": orthogonal(r, 128), "lse": True}, H=1),
    plain("rotation, 3 heads of 64", lambda g, r: {"out_rotation": orthogonal(r, 64), "lse": True}, D=64, group=3, Q=50, H=1, B=2),
    plain("rotation, bfloat16", lambda g, r: {"out_rotation": orthogonal(r, 128)}, H=1, dtype="bfloat16"),
    plain("rotation, large", lambda g, r: {"out_rotation": orthogonal(r, 128) * np.float32(1e6), "out_dtype": mx.bfloat16}, H=1),
    plain(
        "rotation, infinite value",
        lambda g, r: {"v": at(g["v"], np.s_[0, 0, 140, 3], -np.inf), "out_rotation": orthogonal(r, 128)},
        H=1,
    ),
    plain("rotation, nothing visible", lambda g, r: {**start(70, 90), "out_rotation": orthogonal(r, 128)}, B=2, H=1, Q=5, S=70),
    rabitq("two tiles"),
    rabitq("one query", Q=1, S=65, lse=True),
    rabitq("causal", causal=True, lse=True),
    rabitq("more queries than keys", Q=37, S=5, causal=True, lse=True),
    rabitq("head of 64", D=64, causal=True, lse=True),
    rabitq("head of 64, odd first row", D=64, H=3, S=71),
    rabitq("bfloat16", dtype="bfloat16", side="bfloat16", H=1),
    rabitq("3 heads", group=3, H=1, B=2, Q=50, S=70, side="float32"),
    rabitq("window", window=70, causal=True, lse=True, H=1, S=260),
    rabitq("window, not causal", window=7, lse=True, H=1),
    rabitq("start", B=2, H=1, **start(30, 149)),
    rabitq("nothing visible", B=2, H=1, Q=5, S=5, **start(5, 9)),
    rabitq("5 entries", entries=5, H=1),
    rabitq("one entry", entries=1, H=1),
    rabitq("tiny entries", lambda g, r: {"v_cents": g["v_cents"] * np.float32(1e-9)}, H=1, dtype="bfloat16"),
    rabitq("infinite entry", lambda g, r: {"v_cents": at(g["v_cents"], 3, np.inf), "causal": True}, H=1, Q=9, S=9),
    rabitq("outlier", lambda g, r: {"k_mag": at(g["k_mag"], np.s_[..., 7], 1000), "lse": True}, H=1),
    rabitq("scores that grow", lambda g, r: {"k_const": np.linspace(-60, 60, 300, dtype=np.float16)[None, None]}, H=1, S=300),
    rabitq("infinite bias", lambda g, r: {"k_const": at(g["k_const"], np.s_[..., 7], np.inf), "lse": True}, H=1),
    rabitq("every bias minus infinity", lambda g, r: {"k_const": np.full_like(g["k_const"], -np.inf), "lse": True}, H=1),
    rabitq("nan in a query", lambda g, r: {"q": at(g["q"], np.s_[..., 4, 3], np.nan), "lse": True}, H=1),
    rabitq("factors", per_token("float16"), H=1),
    rabitq("factors beyond a half", lambda g, r: {"v_scale": floats(r, (1, 1, 150), "float32", 1e6), "out_dtype": mx.bfloat16}, H=1),
    rabitq("factors that grow", growing, H=1, S=300),
    rabitq("factor not visible", lambda g, r: {"v_scale": at(np.ones((1, 1, 150), np.float32), np.s_[..., -1], np.nan)}, H=1),
    rabitq("not visible", rabitq_prefill.not_visible, H=1),
    rabitq("words", rabitq_prefill.words, H=1),
    rabitq("hadamard", lambda g, r: {"out_rotation": signs(r, 128)}, H=1),
)
# The ones compiled where there is no GPU: both head sizes, both types, with factors and without.
_NAMES = ("two tiles", "bfloat16, head of 64", "head of 64", "factors")
PREFILL_COMPILED = tuple(case for case in PREFILL_CASES if case.name in {f"tiles: {name}" for name in _NAMES})
