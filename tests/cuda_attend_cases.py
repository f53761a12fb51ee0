"""Rows for the CUDA kernels of one query a head (src/decode.cu and what it names): 128 channels, 4-bit codes, up to 4 query heads a block.

Made as the tables' own rows are, oracle and tolerance included; where values come from a table, its entries are rounded to halves, which
adds at most 2^-11 of the largest to a result that has no factors. Every row must reach the decode kernel of its function, in which what its
tensor-core path refuses (a table or a query that is not finite, memory that is not aligned, less than 32 tokens) takes the general path.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case
from veloxquant_mlx.selftest.cases import rabitq_attend, rvq_attend, scalar_attend
from veloxquant_mlx.selftest.cases._attend import Rng, at, floats, orthogonal, positive, signs

DIM = 128


def of_halves(row: Case, key: str) -> Case:
    entries = np.abs(row.arguments()[key].astype(np.float64))
    extra = 2.0**-11 * float(entries[np.isfinite(entries)].max())
    first = row.tolerance[0]
    return replace(row, tolerance=(replace(first, atol=first.atol + extra), *row.tolerance[1:]))


def rabitq(name: str, change: Any = None, **sizes: Any) -> Case:
    nibbles = rabitq_attend.packed("nibble", 4)

    def make(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        changed = given | (change(given, rng) if change else {})
        return changed | nibbles(changed, rng)

    row = rabitq_attend.case(f"decode: {name}", make, **({"D": DIM, "group": 4, "S": 67, "side": "float16"} | sizes))
    return of_halves(row, "v_cents")


def rvq(name: str, change: Any = None, layout: str = "lsb8", **sizes: Any) -> Case:
    pack = rvq_attend.packed(layout)

    def make(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        changed = given | (change(given, rng) if change else {})
        return changed | pack(changed, rng)

    row = rvq_attend.case(f"decode: {name}", make, **({"D": DIM, "group": 4, "S": 67, "bits": (2, 2, 4), "sub": 1} | sizes))
    return of_halves(row, "v_codebook")


def scalar(name: str, change: Any = None, layout: str = "lsb8", **sizes: Any) -> Case:
    pack = scalar_attend.packed(layout, 4, 4)

    def make(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        changed = given | (change(given, rng) if change else {})
        return changed | pack(changed, rng)

    return scalar_attend.case(f"decode: {name}", make, **({"D": DIM, "group": 4, "S": 67, "levels": 16, "g": 32} | sizes))


def start(*first: int) -> Any:
    return lambda given, rng: {"start": np.array(first, np.int32)}


def sides(dtype: str, factor: float = 1.0) -> Any:
    """k_norm and v_scale, of values that differ by orders of magnitude."""

    def change(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
        shape = next(given[key] for key in ("k_indices1", "k_bits") if key in given).shape[:3]
        spread = factor * 2.0 ** rng.integers(-6, 7, shape)
        return {"k_norm": positive(rng, shape, dtype), "v_scale": floats(rng, shape, dtype) * spread.astype(dtype)}

    return change


def with_bf16_sides(given: dict[str, Any], rng: Rng) -> dict[str, Any]:
    shape = given["k_indices1"].shape[:3]
    return {"k_norm": positive(rng, shape, "bfloat16"), "v_scale": positive(rng, shape, "bfloat16")}


def large(role: str, factor: float) -> Any:
    keys = (f"{role}_scale", f"{role}_zero")
    return lambda given, rng: {key: Bf16(given[key].values * np.float32(factor)) for key in keys}


DECODE_CASES = (
    rabitq("one step"),
    rabitq("one key", S=1),
    rabitq("long", S=2500, H=1, lse=True),
    rabitq("three splits", S=300, H=1, splits=3),
    rabitq("a head, bfloat16", group=1, dtype="bfloat16", side="bfloat16", S=45),
    rabitq("3 heads, float32", group=3, dtype="float32", side="float32", S=33),
    rabitq("7 heads", group=7, S=70, B=2),
    rabitq("starts", lambda g, rng: {**start(0, 40, 67)(g, rng), "lse": True}, B=3, H=1),
    rabitq("window", window=33, causal=True, lse=True, S=100),
    rabitq("factors", sides("float16")),
    rabitq("factors of values beyond a half", sides("float32", 1e6), S=140, out_dtype=mx.bfloat16, dtype="bfloat16"),
    rabitq("rotation", lambda g, rng: {"out_rotation": orthogonal(rng, DIM), "lse": True}),
    rabitq("rotation, 70 splits", lambda g, rng: {"out_rotation": orthogonal(rng, DIM), "lse": True}, S=2300, H=1, splits=70),
    rabitq("13 entries", lambda g, rng: {"v_cents": g["v_cents"][:13]}),
    rabitq("infinite entry", lambda g, rng: {"v_cents": at(g["v_cents"], 15, np.inf)}),
    rabitq("tiny entries", lambda g, rng: {"v_cents": g["v_cents"] * np.float32(1e-9)}, out_dtype=mx.bfloat16, dtype="bfloat16"),
    rabitq("nan bias", lambda g, rng: {"k_const": at(g["k_const"], np.s_[:, 1, 4], np.nan), "lse": True}),
    rabitq("biases of minus infinity", lambda g, rng: {"k_const": at(g["k_const"], np.s_[:, 0, 4:50], -np.inf), "lse": True}),
    rabitq("infinite bias", lambda g, rng: {"k_const": at(g["k_const"], np.s_[:, 1, 4], np.inf), "lse": True}),
    rabitq("every bias minus infinity", lambda g, rng: {"k_const": np.full_like(g["k_const"], -np.inf), "lse": True}),
    rabitq("scores that grow", lambda g, rng: {"k_const": np.linspace(-60, 60, 300, dtype=np.float16)[None, None].repeat(2, 1)}, S=300),
    rabitq("nan in a value", lambda g, rng: {"v_scale": at(np.ones((1, 2, 67), np.float32), np.s_[:, 0, 66], np.nan)}),
    rabitq(
        "nan not seen",
        lambda g, rng: {
            "start": np.array([40], np.int32),
            "k_const": at(g["k_const"], np.s_[..., :40], np.nan),
            "v_scale": at(np.ones((1, 2, 67), np.float32), np.s_[..., :40], np.nan),
        },
    ),
    rabitq("gigantic factor", lambda g, rng: {"v_scale": at(np.ones((1, 2, 67), np.float32), np.s_[:, 0, 5], np.inf)}, entries=16),
    rvq("one step"),
    rvq("one key", S=1),
    rvq("a whole step", S=32),
    rvq("long", S=2500, H=1),
    rvq("lsb32", layout="lsb32", S=130),
    rvq("codec", lambda g, rng: {**with_bf16_sides(g, rng), "out_rotation": signs(rng, DIM)}, S=100),
    rvq("three splits", S=300, H=1, splits=3),
    rvq("bfloat16", dtype="bfloat16", tables="bfloat16", group=1, S=40),
    rvq("float32, 7 heads", dtype="float32", group=7, S=40),
    rvq("large queries", lambda g, rng: {"q": g["q"] * np.float32(1e6)}, dtype="float32", S=40),
    rvq("starts", start(0, 40, 67), B=3, H=1),
    rvq("window", window=33, causal=True, S=100),
    rvq("factors", sides("float16")),
    rvq("nan centroid", lambda g, rng: {"centroids2": at(g["centroids2"], 3, np.nan)}, S=5),
    rvq("infinite centroid", lambda g, rng: {"centroids1": at(g["centroids1"], 3, -np.inf)}, S=5),
    rvq("nan in q", lambda g, rng: {"q": at(g["q"], np.s_[:, 0, 0, 3], np.nan)}),
    rvq("zeros", lambda g, rng: {key: np.zeros_like(g[key]) for key in ("q", "centroids1", "centroids2", "v_codebook")}),
    scalar("one step", side="float16"),
    scalar("one key", side="float16", S=1),
    scalar("39 keys", side="float16", S=39),
    scalar("long", side="float16", S=2500, H=1, lse=True),
    scalar("lsb32", layout="lsb32", side="float16", S=130),
    scalar("bfloat16 queries, float16 sides", side="float16", dtype="bfloat16", S=100, lse=True),
    scalar("bfloat16", side="bfloat16", dtype="bfloat16", S=100),
    scalar("groups of 64", side="float16", g=64, S=200, lse=True),
    scalar("bfloat16 sides, groups of 64", side="bfloat16", g=64, S=1300, H=1, lse=True),
    scalar("bfloat16 sides, starts", lambda g, rng: {**start(0, 40, 67)(g, rng), "lse": True}, side="bfloat16", B=3, H=1),
    scalar("groups of 128", side="float16", g=128, S=200),
    scalar("three splits", side="float16", S=300, H=1, splits=3),
    scalar("7 heads", side="float16", group=7, S=70, B=2),
    scalar("starts", lambda g, rng: {**start(0, 40, 67)(g, rng), "lse": True}, side="float16", B=3, H=1),
    scalar("window", side="float16", window=33, causal=True, S=100),
    scalar("rotation", lambda g, rng: {"out_rotation": orthogonal(rng, DIM)}, side="float16"),
    scalar("large scales", large("v", 1e5), S=70, dtype="bfloat16", side="bfloat16"),
    scalar("large key scales", large("k", 1e2), S=70, side="bfloat16"),
    scalar("tiny key scales", large("k", 1e-9), S=70, side="bfloat16"),
    scalar("nan in q", lambda g, rng: {"q": at(g["q"], np.s_[:, 0, 0, 3], np.nan)}, side="float16"),
    scalar(
        "nan not seen",
        lambda g, rng: {
            "start": np.array([40], np.int32),
            "v_zero": at(g["v_zero"], np.s_[:, :, :40], np.nan),
            "v_scale": at(g["v_scale"], np.s_[:, :, :40], np.nan),
        },
        side="float16",
    ),
    scalar("nan in a value", lambda g, rng: {"v_scale": at(g["v_scale"], np.s_[:, 0, 66, 2], np.nan)}, side="float16"),
)
# The ones compiled where there is no GPU.
COMPILED = tuple(
    case for case in DECODE_CASES if case.name == "decode: one step" or case.id == "scalar_fused_decode_attend-decode: bfloat16"
)
