"""Cases of `component_attend`: random codes of components of unlike widths, and attention to their rows in float64 NumPy.

Nothing of the codecs is used: codes are packed here. Angles are float32, as the kernel gets them.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from tests.coded_cases import BY_TOKEN, VALUES, attended, plain, rows_of, unlike
from veloxquant_mlx.metal._component_attend import component_attend
from veloxquant_mlx.metal._component_operand import ComponentKeys, Components, ComponentValues, Quantisers

BLOCK = 32
HALVES = plain(mx.float16)
Rng = np.random.Generator


@dataclass(frozen=True)
class ComponentCase:
    """One call.

    Fields:
        name: unique.
        dim, heads, queries, rows: D, H, R and rows attended to.
        k_first, v_first: rows stored before those of the keys and of the values.
        most: bits of a component of the keys, 0 to that many.
        rope: keys are stored before RoPE.
        mask: None, "bool", "added" or "none", which lets nothing be seen.
        splits: None to choose.
        scale: of the scores.
        stages: where not 0, keys have rows of codes of a byte, about so many for each head, each of several components.
        values: form and options of values that are not predicted from the keys (`coded_cases`), or None.
    """

    name: str
    dim: int = 64
    heads: int = 2
    queries: int = 3
    rows: int = 70
    k_first: int = 0
    v_first: int = 0
    most: int = 5
    rope: bool = True
    mask: str | None = None
    splits: int | None = None
    scale: float = 1.0
    stages: int = 0
    values: tuple[str, dict[str, Any]] | None = None


CASES = (
    ComponentCase("components"),
    ComponentCase("components, 96", dim=96, queries=4, rows=40),
    ComponentCase("components, 256", dim=256, heads=1, queries=1, rows=33),
    ComponentCase("components, 16, nine queries", dim=16, queries=9, rows=45),
    ComponentCase("components, 80, as cached", dim=80, rope=False),
    ComponentCase("components, cut", k_first=37, v_first=5, rows=61),
    ComponentCase("components, one row", rows=1, queries=1),
    ComponentCase("components, wide", most=8, heads=3, dim=32),
    ComponentCase("components, three splits", rows=150, splits=3, k_first=3),
    ComponentCase("components, more splits than blocks", dim=32, rows=40, splits=5),
    ComponentCase("components, mask", dim=32, mask="bool"),
    ComponentCase("components, mask added", dim=32, mask="added"),
    ComponentCase("components, nothing seen", dim=32, mask="none", rows=8),
    ComponentCase("components, large scores", dim=32, scale=100.0),
    ComponentCase("components, a head without", dim=32, most=0),
    ComponentCase("component rows", stages=5, values=VALUES),
    ComponentCase(
        "component rows, mask, affine values, cut", dim=32, stages=3, values=BY_TOKEN, mask="bool", k_first=37, v_first=3, rows=61
    ),
    ComponentCase("component rows, as cached, halves, five queries", dim=48, stages=2, values=HALVES, rope=False, queries=5, splits=2),
    ComponentCase("component rows, nothing seen", dim=32, stages=2, values=VALUES, mask="none", rows=8),
    ComponentCase("components beside other values", dim=32, values=VALUES),
)

# What tensor cores take.
TILES = (
    ComponentCase("component tiles", dim=128, queries=4, rows=40),
    ComponentCase("component tiles, cut, as cached", dim=128, queries=3, rows=61, k_first=37, v_first=5, rope=False),
    ComponentCase("component tiles, nine queries, mask", dim=128, queries=9, rows=33, mask="bool"),
    ComponentCase("component tiles, mask added, wide", dim=128, heads=3, queries=1, rows=45, mask="added", most=8),
    ComponentCase("component tiles, three splits", dim=128, queries=2, rows=300, splits=3, k_first=3),
    ComponentCase("component tiles, more splits than blocks", dim=128, queries=1, rows=20, splits=3),
    ComponentCase("component tiles, a head without", dim=128, queries=4, rows=40, most=0),
    ComponentCase("component tiles, large scores", dim=128, queries=4, rows=40, scale=100.0),
    ComponentCase("component tiles, 40 queries of all heads", dim=128, heads=5, queries=8, rows=20),
    ComponentCase("component row tiles", dim=128, queries=4, rows=70, k_first=3, v_first=5, stages=32, values=VALUES),
    ComponentCase("component row tiles, six queries, mask", dim=128, queries=6, rows=40, stages=16, values=BY_TOKEN, mask="bool"),
    ComponentCase("component row tiles, three bits", dim=128, heads=1, queries=1, rows=45, stages=48, values=HALVES, rope=False),
)

# Where there is a GPU: what fills one.
LARGE = (
    ComponentCase("component tiles, long", dim=128, heads=8, queries=4, rows=20000, k_first=5, v_first=37),
    ComponentCase("component tiles, long, mask", dim=128, heads=4, queries=9, rows=8000, mask="bool"),
    ComponentCase("components, long", dim=64, heads=3, queries=3, rows=8000),
    ComponentCase("component row tiles, long", dim=128, heads=8, queries=4, rows=20000, k_first=5, v_first=37, stages=32, values=VALUES),
)


def widths_of(case: ComponentCase, rng: Rng) -> np.ndarray:
    """Bits of the keys' components, (H, D): the first head of none where `most` is 0."""
    widths = rng.integers(0, max(1, case.most) + 1, (case.heads, case.dim))
    widths[:, : case.most + 1] = np.arange(case.most + 1)
    if not case.most:
        widths[0] = 0
    return widths


def packed(codes: np.ndarray, bits: np.ndarray) -> mx.array:
    """Codes (n, blocks 32) as (1, blocks, bytes): `bits` words of little-endian bits a component and block."""
    blocks = codes.shape[1] // BLOCK
    out = np.zeros((blocks, int(bits.sum()), 4), np.uint8)
    place = 0
    for own, width in zip(codes.reshape(len(codes), blocks, BLOCK), bits.tolist(), strict=True):
        planes = (own[..., None] >> np.arange(width)) & 1
        out[:, place : place + width] = np.packbits(planes.reshape(blocks, -1).astype(np.uint8), axis=1, bitorder="little").reshape(
            blocks, width, 4
        )
        place += width
    return mx.array(out.reshape(1, blocks, -1))


def components_of(widths: np.ndarray, rows: int, rng: Rng) -> tuple[Components, np.ndarray]:
    """Random codes of components (H, D), none of width 0 among them: as the kernel gets them, and y (n, rows) in float64."""
    heads, dim = widths.shape
    bits = widths[widths > 0]
    first = np.concatenate([[0], np.cumsum((widths > 0).sum(axis=1))])
    held = {width: [np.sort(rng.normal(size=1 << width)).astype(np.float32) for _ in range(2)] for width in range(1, 9)}
    tables = [held[width][int(rng.integers(2))] for width in bits.tolist()]
    whole = -(-rows // BLOCK) * BLOCK
    codes = np.stack([np.zeros(whole, np.int64), *(rng.integers(0, 1 << width, whole) for width in bits.tolist())])[1:]
    y = np.stack([np.zeros(rows), *(table[code[:rows]].astype(np.float64) for table, code in zip(tables, codes, strict=True))])[1:]
    return Components.of((heads, rows, dim), packed(codes, bits), Quantisers.of(first, bits, tables)), y


def rows_of_codes(case: ComponentCase, rows: int, rng: Rng) -> tuple[Components, np.ndarray]:
    """As `components_of`, of rows of codes: the heads have `stages` or one more."""
    stages = case.stages + np.arange(case.heads) % 2
    stage = np.stack([rng.permutation(np.arange(case.dim) % n) for n in stages.tolist()])
    place = stage + (np.cumsum(stages) - stages)[:, None]
    points = rng.normal(size=(case.heads, case.dim, 256)).astype(np.float32)
    codes = rng.integers(0, 256, (1, rows, int(stages.sum())), np.uint8)
    y = points.reshape(-1, 256)[np.arange(place.size)[:, None], codes[0][:, place.reshape(-1)].T].astype(np.float64)
    return Components((case.heads, rows, case.dim), mx.array(codes[0]), Quantisers.of_bytes(place, points)), y


@dataclass(frozen=True, eq=False)
class Made:
    """Arguments of a call, and its result in float64."""

    arguments: tuple
    out: np.ndarray
    lse: np.ndarray


def make(case: ComponentCase) -> Made:
    rng = np.random.default_rng(list(case.name.encode()))
    heads, dim, count = case.heads, case.dim, case.rows
    stored = case.k_first + count + 2
    of_k, y = rows_of_codes(case, stored, rng) if case.stages else components_of(widths_of(case, rng), stored, rng)
    of_v, z = components_of(np.repeat(rng.integers(1, 7, (heads, 1)), dim, axis=1), case.v_first + count + 1, rng)
    first, n = np.array(of_k.quantisers.first), len(y)
    basis = (rng.normal(size=(n + heads, dim)) * rng.uniform(0.2, 1, (n + heads, 1)) / math.sqrt(dim / 8)).astype(np.float32)
    matrix = np.linalg.qr(rng.normal(size=(dim, dim)))[0].astype(np.float32)
    mix = (rng.normal(size=(heads, n, dim)) / math.sqrt(max(n, 1))).astype(np.float32)
    constant = rng.normal(size=(heads, dim)).astype(np.float32)
    sizes = (2.0 ** rng.uniform(-3, 1, (heads, 64))).astype(np.float32)
    sizes[:, 63] = 0
    sizes[:, 0] = 2
    blocks = -(-of_v.shape[1] // BLOCK)
    scales = rng.integers(0, 64, (heads, blocks * BLOCK))
    held = mx.contiguous(packed(scales, np.full(heads, 6))[0]).view(mx.uint32)

    y, z = y[:, case.k_first : case.k_first + count], z[:, case.v_first : case.v_first + count]
    keys = np.stack([y[a:b].T @ basis[a:b].astype(np.float64) + basis[n + h] for h, (a, b) in enumerate(pairwise(first))])
    size = np.take_along_axis(sizes.astype(np.float64), scales, axis=1)[:, case.v_first : case.v_first + count]
    own = (z.reshape(heads, dim, count).swapaxes(1, 2) * size[..., None]) @ matrix.astype(np.float64)
    values = own + np.einsum("nt,hnd->htd", y, mix.astype(np.float64)) + constant[:, None]
    v: Any = ComponentValues(of_v, held, *(mx.array(x) for x in (sizes, matrix, mix, constant)))
    if case.values is not None:
        v, values = rows_of(case.values[0], heads, case.v_first + count + 1, dim, case.values[1], rng)
        values = values[:, case.v_first : case.v_first + count]
    q = (rng.normal(size=(heads, case.queries, dim)) * case.scale / math.sqrt(dim)).astype(np.float32)
    angles = None
    if case.rope:
        turn = rng.uniform(0, 2 * np.pi, (count, dim // 2))
        angles = np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)
        cos, sin = (part.astype(np.float64) for part in np.split(angles, 2, axis=1))
        a, b = np.split(keys, 2, axis=2)
        keys = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
    s = q.astype(np.float64) @ keys.swapaxes(1, 2)
    mask = None
    if case.mask == "added":
        mask = rng.normal(size=(1, case.queries, count)).astype(np.float32)
        mask[0, 0, ::3] = -np.inf
        s = s + mask
    elif case.mask is not None:
        shape = (heads, case.queries, count)
        mask = rng.random(shape) < 0.5 if case.mask == "bool" else np.zeros(shape, bool)
        s = np.where(mask, s, -np.inf)
    out, lse = attended(s, values)
    k = ComponentKeys(of_k, mx.array(basis))
    given = [None if x is None else mx.array(x) for x in (angles, mask)]
    return Made((mx.array(q), k, v, (case.k_first, case.v_first, count), *given, case.splits), out, lse)


def problem(case: ComponentCase) -> str | None:
    """What is wrong with the kernels' result on the back end in force, or None."""
    made = make(case)
    return unlike(*component_attend(*made.arguments), made.out, made.lse)
