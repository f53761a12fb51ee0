"""Cases of `coded_attend`, the kernel by which live caches attend to codes on a GPU: random codes, and their rows in float64 NumPy.

Nothing of the codecs is used: codes are packed, rotated and turned here. Angles are float32, as the kernel gets them.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx.metal._coded_attend import coded_attend
from veloxquant_mlx.metal._coded_operand import CodedOperand

# Of sums of at most some hundred float32 products; a score of 2^-20 of its terms moves a weight by as much.
TOLERANCE = 4e-6
Rng = np.random.Generator


@dataclass(frozen=True)
class CodedCase:
    """One call.

    Fields:
        name: unique.
        k, v: form, its sizes and options.
        dim, heads, queries, rows: D, H, R and rows attended to.
        first: rows stored before those of the keys; values have 3 more.
        rope: keys are stored before RoPE.
        mask: None, "bool" or "added".
        splits: None to choose.
    """

    name: str
    k: tuple[str, dict[str, Any]]
    v: tuple[str, dict[str, Any]]
    dim: int = 64
    heads: int = 2
    queries: int = 3
    rows: int = 70
    first: int = 0
    rope: bool = False
    mask: str | None = None
    splits: int | None = None
    scale: float = field(default=1.0)


def table(bits: int, second: int = 0, *, mean: bool = False, turned: bool = False) -> tuple[str, dict[str, Any]]:
    return "table", {"bits": bits, "second": second, "mean": mean, "turned": turned}


def affine(bits: int, group: int = 32, *, per_token: bool = False) -> tuple[str, dict[str, Any]]:
    return "affine", {"bits": bits, "group": group, "per_token": per_token}


def plain(dtype: mx.Dtype) -> tuple[str, dict[str, Any]]:
    return "plain", {"dtype": dtype}


def words(sub: int, bits: int, *, smooth: bool = False) -> tuple[str, dict[str, Any]]:
    return "words", {"sub": sub, "bits": bits, "smooth": smooth}


def places(sub: int) -> tuple[str, dict[str, Any]]:
    return "places", {"sub": sub}


RVQ4, VALUES = table(4, mean=True, turned=True), table(4, mean=True, turned=True)
CASES = (
    CodedCase("rvq-4", RVQ4, VALUES),
    CodedCase("rvq-4 before RoPE", RVQ4, VALUES, rope=True),
    CodedCase("rvq-4 before RoPE, 128", RVQ4, VALUES, dim=128, queries=4, rope=True),
    CodedCase("rvq-4 before RoPE, 256", RVQ4, VALUES, dim=256, queries=2, rows=40, rope=True),
    CodedCase("rvq-4 before RoPE, 16", RVQ4, VALUES, dim=16, queries=5, rope=True),
    CodedCase("rvq-4 before RoPE, 32, one query", RVQ4, VALUES, dim=32, queries=1, rows=33, rope=True),
    CodedCase("rvq-2+2 before RoPE", table(2, 2, mean=True, turned=True), VALUES, rope=True, dim=128, queries=2, rows=40),
    CodedCase("signs", table(1, mean=True, turned=True), table(4, turned=True), rope=True, dim=128, queries=1, rows=40),
    CodedCase("odd widths", table(3, 5), table(7, mean=True), rows=45),
    CodedCase("bytes and six bits", table(8), table(6), rows=45),
    CodedCase("affine", affine(4), affine(4, per_token=True), rows=100),
    CodedCase("affine before RoPE, 80 channels", affine(4), affine(3, per_token=True), dim=80, rows=70, rope=True),
    CodedCase("affine before RoPE, 128 channels", affine(5), affine(4, per_token=True), dim=128, queries=4, rows=90, first=7, rope=True),
    CodedCase("affine, odd groups", affine(2, 7), affine(8, 5, per_token=True), dim=48),
    CodedCase("affine, keys by token", affine(5, 16, per_token=True), affine(1), rope=True),
    CodedCase("float32", plain(mx.float32), plain(mx.float32)),
    CodedCase("halves", plain(mx.float16), plain(mx.bfloat16), dim=128, queries=9),
    CodedCase("vecinfer-2", words(4, 8, smooth=True), words(4, 8)),
    CodedCase("vecinfer-1.25", words(4, 5), words(4, 5, smooth=True), rows=40),
    CodedCase("vecinfer-1", words(8, 8, smooth=True), words(8, 8), dim=128, rows=40),
    CodedCase("commvq-2:product before RoPE", places(4), VALUES, rope=True),
    CodedCase("commvq-1:product", places(8), plain(mx.float16), rows=40),
    CodedCase("cut", RVQ4, affine(4, per_token=True), first=37, rows=30, rope=True),
    CodedCase("cut affine", affine(4), VALUES, first=5, rows=61),
    CodedCase("splits", RVQ4, VALUES, rows=200, first=3, splits=3),
    CodedCase("more splits than chunks", table(4), table(4), rows=40, splits=7),
    CodedCase("mask", RVQ4, VALUES, mask="bool", rope=True),
    CodedCase("mask added", affine(4), affine(4, per_token=True), mask="added"),
    CodedCase("nothing seen", plain(mx.float32), table(4, turned=True), mask="none", rows=8),
    CodedCase("one row", plain(mx.float16), plain(mx.float16), rows=1, queries=1),
    CodedCase("large scores", plain(mx.float32), plain(mx.float32), scale=300.0),
)
# What tensor cores take.
TWO, AFFINE, BY_TOKEN = table(2, 2, mean=True, turned=True), affine(4), affine(4, per_token=True)
TILES = (
    CodedCase("tiles, rvq-4 before RoPE", RVQ4, VALUES, dim=128, queries=4, rows=40, first=3, rope=True),
    CodedCase("tiles, rvq-4", RVQ4, VALUES, dim=128, queries=4, rows=40),
    CodedCase(
        "tiles, 2 bits, 3 splits", table(2, mean=True, turned=True), table(2), dim=128, heads=1, rows=70, first=5, rope=True, splits=8
    ),
    CodedCase(
        "tiles, two stages, no mean", table(2, 2, turned=True), table(2, 2, turned=True), dim=128, queries=5, heads=4, rows=33, rope=True
    ),
    CodedCase("tiles, two stages", TWO, TWO, dim=128, queries=2, rows=33, first=1),
    CodedCase("tiles, signs", table(1, mean=True, turned=True), VALUES, dim=128, queries=4, rows=40, first=1, rope=True),
    CodedCase("tiles, affine", AFFINE, BY_TOKEN, dim=128, queries=4, rows=90, first=5),
    CodedCase("tiles, halves", plain(mx.float16), plain(mx.float16), dim=128, queries=4, rows=50, first=1),
    CodedCase("tiles, words of 4", words(4, 8, smooth=True), words(4, 8), dim=128, queries=1, rows=40, first=1),
    CodedCase("tiles, words of 8", words(8, 8, smooth=True), words(8, 8, smooth=True), dim=128, queries=4, rows=40),
    CodedCase("tiles, commvq product before RoPE", places(4), VALUES, dim=128, queries=4, rows=40, first=3, rope=True),
    CodedCase("tiles, commvq product", places(4), BY_TOKEN, dim=128, queries=4, rows=40, first=3),
    # Weights that differ by more than 2^4, and a second product to a sum.
    CodedCase("tiles, rvq-4 before RoPE, affine values", RVQ4, BY_TOKEN, dim=128, queries=4, rows=90, first=7, rope=True),
    CodedCase("tiles, commvq product before RoPE, affine values", places(4), BY_TOKEN, dim=128, queries=4, rows=90, first=7, rope=True),
    CodedCase("tiles, affine before RoPE", AFFINE, BY_TOKEN, dim=128, queries=4, rows=90, first=7, rope=True),
    CodedCase("tiles, affine before RoPE, groups of 16", affine(4, 16), VALUES, dim=128, queries=2, rows=70, first=3, rope=True, splits=2),
    CodedCase("tiles, eight heads before RoPE", RVQ4, VALUES, dim=128, heads=8, queries=1, rows=70, first=3, rope=True),
    CodedCase("tiles, one row", plain(mx.float16), table(4), dim=128, heads=3, rows=1),
)
# Where there is a GPU: what fills one.
LARGE = (
    CodedCase("rvq-4 before RoPE, long", RVQ4, VALUES, dim=128, heads=2, queries=4, rows=40000, first=5, rope=True),
    CodedCase("affine before RoPE, long", affine(4), affine(4, per_token=True), dim=128, heads=2, queries=4, rows=40000, rope=True),
    CodedCase("rvq-4, long", RVQ4, VALUES, dim=128, heads=8, queries=4, rows=40000, first=5),
    CodedCase("rvq-2+2 before RoPE, long", TWO, TWO, dim=128, heads=8, queries=4, rows=40000, rope=True),
    CodedCase("affine, long", AFFINE, BY_TOKEN, dim=128, heads=8, queries=4, rows=40000),
    CodedCase("vecinfer, long", words(4, 8, smooth=True), words(4, 8), dim=128, heads=8, queries=4, rows=40000),
    CodedCase("halves, long", plain(mx.float16), plain(mx.float16), dim=128, heads=3, queries=12, rows=40000, first=1),
    CodedCase("commvq before RoPE, long", places(4), VALUES, dim=128, heads=8, queries=4, rows=40000, rope=True),
    CodedCase("16 agents", table(4), VALUES, dim=64, heads=3, queries=32, rows=5000, mask="bool"),
)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis as a little-endian bit stream."""
    planes = (codes[..., None] >> np.arange(bits)) & 1
    flat = planes.reshape(*codes.shape[:-1], -1)
    return np.packbits(flat.astype(np.uint8), axis=-1, bitorder="little")


def bfloat(values: np.ndarray) -> np.ndarray:
    """Rounded towards zero to bfloat16, as float32."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def upper_half(values: np.ndarray) -> mx.array:
    return mx.array((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


def transform(dim: int, signs: np.ndarray) -> np.ndarray:
    """(D, D): a row times it is the Walsh-Hadamard transform of the row, over sqrt(D), times signs."""
    index = np.arange(dim)
    return (1 - 2.0 * (np.bitwise_count(index[:, None] & index) & 1)) / math.sqrt(dim) * signs


def rows_of(form: str, heads: int, rows: int, dim: int, options: dict[str, Any], rng: Rng) -> tuple[CodedOperand, np.ndarray]:
    """Random rows: as the kernel gets them, and in float64."""
    shape, extra = (heads, rows, dim), {}
    if form == "plain":
        data = mx.array(rng.normal(size=shape).astype(np.float32)).astype(options["dtype"])
        return CodedOperand(form, shape, (data,), (("TYPE", options["dtype"]),)), np.array(data.astype(mx.float32)).astype(np.float64)
    if form == "table":
        bits = (options["bits"], options["second"])
        codes = [rng.integers(0, 1 << b, shape, np.uint8) for b in bits if b]
        tables = [rng.normal(size=1 << b).astype(np.float32) for b in bits if b]
        scale = bfloat(rng.uniform(0.5, 2, (heads, rows)))
        without = rng.random((heads, rows)) < 0.4 if options["mean"] else np.zeros((heads, rows), bool)
        stored = sum(t[c].astype(np.float64) for t, c in zip(tables, codes, strict=True)) * scale[..., None]
        if options["mean"]:
            mean = rng.normal(size=(heads, dim)).astype(np.float32)
            stored = stored + np.where(without, 0.0, 1.0)[..., None] * mean[:, None]
            extra["mean"] = mx.array(mean)
        if options["turned"]:
            signs = rng.choice([-1.0, 1.0], dim).astype(np.float32)
            matrix = transform(dim, signs)
            stored = stored @ matrix
            extra |= {"matrix": mx.array(matrix.astype(np.float32)), "signs": mx.array(signs)}
        packed = [mx.array(pack(c, b)) for c, b in zip(codes, [b for b in bits if b], strict=True)]
        arrays = (packed[0], packed[-1], upper_half(np.where(without, -scale, scale)))
        constants = (("BITS", bits[0]), ("BITS2", bits[1]))
        return CodedOperand(form, shape, arrays, constants, staged=mx.array(np.concatenate(tables)), **extra), stored
    if form == "affine":
        bits, group, per_token = options["bits"], options["group"], options["per_token"]
        codes = rng.integers(0, 1 << bits, shape, np.uint8)
        sides = (heads, rows, -(-dim // group)) if per_token else (heads, -(-rows // group), dim)
        step, zero = bfloat(rng.uniform(0.2, 1, sides) * 4 / (1 << bits)), bfloat(rng.normal(size=sides) - 2)
        axis, at = (2, np.arange(dim) // group) if per_token else (1, np.arange(rows) // group)
        spread = [np.take(x.astype(np.float64), at, axis=axis) for x in (step, zero)]
        constants = (("BITS", bits), ("GROUP", group), ("TOKEN", per_token))
        return CodedOperand(form, shape, (mx.array(pack(codes, bits)), *map(upper_half, (step, zero))), constants), (
            codes * spread[0] + spread[1]
        )
    sub = options["sub"]
    if form == "places":
        codes = rng.integers(0, 256, (heads, rows, dim // sub), np.uint8)
        each = rng.normal(size=(heads, dim // sub, 256, sub)).astype(np.float16)
        stored = each[np.arange(heads)[:, None, None], np.arange(dim // sub), codes].astype(np.float64).reshape(shape)
        return CodedOperand(form, shape, (mx.array(codes), mx.array(each)), (("SUB", sub), ("BITS", 8))), stored
    bits = options["bits"]
    codes = rng.integers(0, 1 << bits, (heads, rows, dim // sub), np.uint8)
    vectors = rng.normal(size=(1 << bits, sub)).astype(np.float32)
    stored = vectors[codes].astype(np.float64).reshape(shape)
    if options["smooth"]:
        smooth = rng.uniform(0.3, 1, (heads, dim)).astype(np.float32)
        matrix = transform(dim, np.ones(dim))
        stored = (stored @ matrix) * smooth[:, None]
        extra = {"matrix": mx.array(matrix.astype(np.float32)), "smooth": mx.array(smooth)}
    constants = (("SUB", sub), ("BITS", bits))
    return CodedOperand(form, shape, (mx.array(pack(codes, bits)),), constants, staged=mx.array(vectors.reshape(-1)), **extra), stored


@dataclass(frozen=True, eq=False)
class Made:
    """Arguments of a call, and its result in float64."""

    arguments: tuple[Any, ...]
    out: np.ndarray
    lse: np.ndarray


def make(case: CodedCase) -> Made:
    rng = np.random.default_rng(list(case.name.encode()))
    spans = {"k": (case.first, case.first + case.rows), "v": (case.first + 3, case.first + 3 + case.rows)}
    made = {
        role: rows_of(form, case.heads, spans[role][1] + 2, case.dim, options, rng)
        for role, (form, options) in (("k", case.k), ("v", case.v))
    }
    keys, values = (made[role][1][:, slice(*spans[role])] for role in "kv")
    q = (rng.normal(size=(case.heads, case.queries, case.dim)) * case.scale / math.sqrt(case.dim)).astype(np.float32)
    angles = None
    if case.rope:
        turn = rng.uniform(0, 2 * np.pi, (case.rows, case.dim // 2))
        angles = np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)
        cos, sin = (part.astype(np.float64) for part in np.split(angles, 2, axis=1))
        a, b = np.split(keys, 2, axis=2)
        keys = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
    s = q.astype(np.float64) @ keys.swapaxes(1, 2)
    mask = None
    if case.mask == "added":
        mask = rng.normal(size=(1, case.queries, case.rows)).astype(np.float32)
        mask[0, 0, ::3] = -np.inf
        s = s + mask
    elif case.mask is not None:
        shape = (case.heads, case.queries, case.rows)
        mask = rng.random(shape) < 0.5 if case.mask == "bool" else np.zeros(shape, bool)
        s = np.where(mask, s, -np.inf)
    out, lse = attended(s, values)
    given = [None if x is None else mx.array(x) for x in (angles, mask)]
    rows = (spans["k"][0], spans["v"][0], case.rows)
    return Made((mx.array(q), made["k"][0], made["v"][0], rows, *given, case.splits), out, lse)


def attended(s: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted values (H, R, D) and log-sum-exp (H, R) of scores (H, R, S); zeros and -inf where a row sees nothing."""
    most = s.max(axis=2, keepdims=True)
    base = np.where(np.isinf(most), 0, most)
    p = np.exp(s - base)
    total = p.sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + base)[..., 0]
    return p @ values / np.where(total > 0, total, 1), lse


def problem(case: CodedCase) -> str | None:
    """What is wrong with the kernel's result on the back end in force, or None."""
    made = make(case)
    return unlike(*coded_attend(*made.arguments), made.out, made.lse)


def unlike(out: mx.array, lse: mx.array, wanted_out: np.ndarray, wanted_lse: np.ndarray) -> str | None:
    """Where results of an attention are not within TOLERANCE of float64 ones, or None."""
    if (out.dtype, lse.dtype) != (mx.float32, mx.float32):
        return f"dtypes {out.dtype} and {lse.dtype}"
    for name, got, want in (("out", np.array(out), wanted_out), ("lse", np.array(lse), wanted_lse)):
        if got.shape != want.shape:
            return f"{name} has shape {got.shape}, not {want.shape}"
        # A score's rounding is relative to its terms: weights move with the largest score.
        bound = TOLERANCE * max(1.0, float(np.abs(wanted_lse[np.isfinite(wanted_lse)]).max(initial=1.0)) / 8)
        with np.errstate(invalid="ignore"):
            near = (got == want) | (np.abs(got - want) <= bound * np.maximum(1, np.abs(want)))
        if not near.all():
            return (
                f"{name} differs by {np.abs(got - want)[~near].max():.1e} of {np.abs(want[np.isfinite(want)]).max():.1e}, over {bound:.1e}"
            )
    return None
