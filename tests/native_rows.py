"""Single calls of the native functions that code by calibrations, decode and turn rows, as `native_functions.py` has the others."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from tests.codec_oracles import pack, rotation, unpack
from tests.native_coders import EPS, SEED, factors
from tests.native_functions import F32, TYPES, Call, Result, exactly, narrowed, rows, widened
from tests.native_problems import components, sides_of
from tests.test_native import made, takes
from veloxquant_mlx import native

# --- calibrated codecs

# Components of each head, D and tokens.
SIZES = (([3, 0, 6], 6, 33), ([20, 36], 36, 64), ([9], 64, 5), ([0, 80], 80, 70))


def panels(matrix: np.ndarray) -> np.ndarray:
    """Eight rows together, column by column, filled up with zeros."""
    filled = np.pad(matrix, [(0, -len(matrix) % 8), (0, 0)])
    return filled.reshape(len(filled) // 8, 8, matrix.shape[1]).swapaxes(1, 2).astype(F32).reshape(-1)


def search_table(edges: np.ndarray) -> np.ndarray:
    """Boundaries in the order that a search by halves asks for them, each step's repeated to at least 16."""
    bits, found = len(edges).bit_length(), []
    for step in range(bits):
        half = 1 << (bits - 1 - step)
        found.append(np.resize(edges[half - 1 :: 2 * half], max(1 << step, 16)))
    return np.concatenate(found)


def cells(bits: np.ndarray) -> tuple[list[Any], dict[int, np.ndarray]]:
    """Cells of components of so many bits, and the boundaries of each number."""
    edges = {b: np.sort(np.random.default_rng(b).standard_normal((1 << b) - 1)).astype(F32) for b in sorted(set(bits.tolist()))}
    tables = [search_table(own) for own in edges.values()]
    start = dict(zip(edges, np.cumsum([0, *map(len, tables)]), strict=False))
    place = np.cumsum([0, *(4 * bits)])
    return [
        np.concatenate(tables),
        np.array([start[b] for b in bits.tolist()], np.int32),
        bits.astype(np.uint8),
        place[:-1].astype(np.int32),
        int(place[-1]),
    ], edges


def blocks(codes: list[np.ndarray], bits: np.ndarray) -> np.ndarray:
    """Codes of each component in blocks of 32 tokens, one component after another; codes behind the last token are 0."""
    parts = [pack(np.pad(code, (0, -len(code) % 32)).reshape(-1, 32), int(b)) for code, b in zip(codes, bits, strict=True)]
    return np.concatenate(parts, axis=1)


def of_blocks(part: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Codes (n, tokens) of `blocks`."""
    ends = np.cumsum(4 * bits)
    return np.stack([unpack(part[:, end - 4 * b : end], int(b), 32).reshape(-1) for end, b in zip(ends, bits, strict=True)])


class Projection:
    """y = (x - mean) forward of heads with so many components each."""

    def __init__(self, rng: np.random.Generator, counts: list[int], dim: int) -> None:
        self.first, self.heads, self.dim = np.cumsum([0, *counts]).astype(np.int32), len(counts), dim
        self.mean = rng.standard_normal((self.heads, dim)).astype(F32)
        self.forward = (rng.standard_normal((self.first[-1], dim)) / dim**0.5).astype(F32)
        own = [panels(self.forward[a:b]) for a, b in zip(self.first, self.first[1:], strict=False)]
        many = np.cumsum([0, *(-(-n // 8) for n in counts)]).astype(np.int32)
        self.given = [self.heads, dim, self.first, self.mean, np.concatenate(own), many]

    def of(self, x: np.ndarray) -> list[np.ndarray]:
        """Components (n, S) of each head in float32, sums in the order of their terms."""
        found = []
        for h in range(self.heads):
            apart = np.clip(x[h] - self.mean[h], F32(-1e18), F32(1e18))
            total = np.zeros((self.first[h + 1] - self.first[h], len(apart)), F32)
            for i in range(self.dim):
                total = total + self.forward[self.first[h] : self.first[h + 1], i, None] * apart[:, i]
            found.append(total)
        return found


def calibrated() -> Iterator[Call]:
    """Heads with none, some and all components, of every number of bits; tokens of whole blocks and not; head sizes with an odd factor."""
    for i, (kind, (counts, dim, count)) in enumerate(product(TYPES, SIZES)):
        rng = np.random.default_rng(i)
        to, cut = Projection(rng, counts, dim), 32 if count > 32 else 0
        keys = narrowed(rng.standard_normal((to.heads, count, dim)).astype(F32) * F32(2), kind)
        yield key_codes(to, keys, kind, cut)
        values = narrowed(
            (rng.standard_normal((to.heads, count, dim)) * np.exp(rng.standard_normal((to.heads, count, 1)))).astype(F32), kind
        )
        yield from value_codes(to, keys, values, kind, cut, rng)
    bad = keys.copy()
    bad[0, 3, 1] = narrowed(np.array([np.nan], F32), kind)[0]
    given, _ = cells(np.full(to.first[-1], 2))
    yield Call("encode_keys", [*to.given, *given, rows(bad, kind), Result(np.uint8, (3, given[-1])), exactly(np.zeros(1, np.int64)), 0])


def key_codes(to: Projection, keys: np.ndarray, kind: str, cut: int) -> Call:
    bits = 1 + np.arange(to.first[-1]) % 8
    given, edges = cells(bits)
    y = np.concatenate(to.of(widened(keys, kind)))
    codes = [np.searchsorted(edges[b], row) for b, row in zip(bits.tolist(), y, strict=True)]
    return Call("encode_keys", [*to.given, *given, rows(keys, kind), exactly(blocks(codes, bits)), exactly(np.ones(1, np.int64)), cut])


def value_codes(to: Projection, keys: np.ndarray, values: np.ndarray, kind: str, cut: int, rng: np.random.Generator) -> Iterator[Call]:
    """Of values, and values of those codes, by float64: codes but for what lies close to a boundary, and scales of the codes."""
    heads, count, dim = values.shape
    mean, n = rng.standard_normal((heads, dim)).astype(F32), int(to.first[-1])
    mix = (rng.standard_normal((n, heads, dim)) / max(n, 1) ** 0.5).astype(F32)
    own = [panels(mix[a:b, h].T) for h in range(heads) for a, b in zip(to.first, to.first[1:], strict=False)]
    signs, hartley, odd = factors(dim)
    start = [*to.given, mean, np.concatenate(own), signs, hartley, odd, rows(keys, kind)]
    bits = np.repeat(1 + np.arange(heads) * 3 % 8, dim)
    given, edges = cells(bits)
    tables = {b: np.concatenate([[e[0] - 1], (e[1:].astype(np.float64) + e[:-1]) / 2, [e[-1] + 1]]).astype(F32) for b, e in edges.items()}
    laid = [np.resize(tables[b], max(16, 1 << b)) for b in tables]
    at = dict(zip(tables, np.cumsum([0, *map(len, laid)]), strict=False))
    point = np.array([at[b] for b in bits[::dim].tolist()], np.int32)

    y = np.clip(np.concatenate(to.of(widened(keys, kind))).astype(np.float64), -64, 64)
    predicted = np.einsum("ns,nhd->hsd", y, mix.astype(np.float64)) + mean[:, None]
    turned = (widened(values, kind) - predicted) @ rotation(dim, SEED).T
    unit = np.sqrt(np.square(turned).mean(-1))
    z = turned / unit[..., None]
    wanted = np.stack([[np.searchsorted(edges[b], row) for row in z[h]] for h, b in enumerate(bits[::dim].tolist())])
    apart = np.stack([np.abs(z[h][..., None] - edges[b]).min(-1) for h, b in enumerate(bits[::dim].tolist())])

    def points(code: np.ndarray) -> np.ndarray:
        return np.stack([tables[b].astype(np.float64)[code[h]] for h, b in enumerate(bits[::dim].tolist())])

    def check(part: np.ndarray, sizes: np.ndarray, fine: np.ndarray) -> None:
        every = of_blocks(part, bits)
        code = every[:, :count].reshape(heads, dim, count).swapaxes(1, 2)
        clear = apart > 2e-5
        assert fine[0] == 1 and not every[:, count:].any() and np.array_equal(code[clear], wanted[clear]) and clear.mean() > 0.9
        np.testing.assert_allclose(sizes, unit * dim / (z * points(code)).sum(-1), rtol=2e-4)

    results = [Result(np.uint8, (-(-count // 32), given[-1])), Result(F32, (heads, count)), exactly(np.ones(1, np.int64))]
    yield Call("encode_values", [*start, *given, rows(values, kind), np.concatenate(laid), point, *results, cut], check)

    # Any codes, and scales of 8 bits of any table.
    code, scale = np.stack([rng.integers(0, 1 << int(b), count) for b in bits]), rng.integers(0, 256, (heads, count))
    steps = np.exp(rng.standard_normal((heads, 256)) / 2).astype(F32)
    coded = components(blocks(list(code), bits)[None], dim * np.arange(heads + 1), bits, np.concatenate([tables[int(b)] for b in bits]))
    eight = np.full(heads, 8)
    scales = components(blocks(list(scale), eight)[None], np.arange(heads + 1), eight, steps.reshape(-1))
    sizes = np.take_along_axis(steps, scale, axis=1).astype(np.float64)[..., None]
    rebuilt = predicted + sizes * points(code.reshape(heads, dim, count).swapaxes(1, 2)) @ rotation(dim, SEED)
    error = EPS[kind] * np.abs(rebuilt) + 2e-6 * np.abs(rebuilt).max()

    def near(found: np.ndarray) -> None:
        assert (np.abs(widened(found, kind) - rebuilt) <= 1.01 * error).all()

    yield Call("decode_values", [*start, coded, scales, TYPES.index(kind), Result(narrowed(mean, kind).dtype, values.shape, near), cut])


# --- rows of a cache


def turns() -> Iterator[Call]:
    """Every type, rows that fill vectors and tiles and that do not, pairs of both kinds, one rotation and two: the bits of NumPy."""
    rng = np.random.default_rng(0)
    shapes = ((2, 33, 128, 0, 64), (3, 5, 80, 8, 35), (1, 64, 24, 0, 12), (2, 7, 6, 2, 1))
    for kind, shape, paired, both in product(TYPES, shapes, product((False, True), repeat=2), ("pages", "two", "phases")):
        heads, count, dim, first, half = shape
        x = narrowed(rng.standard_normal((heads, count, dim)).astype(F32) * F32(3), kind)
        angles = rng.standard_normal((2, count, half))
        tables = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(F32)
        none, phases = [0, 0, 0, 0], [None] * 8
        given = [1, tables[0], count, 0, half, *([1, tables[1], count, 0, half] if both == "two" else none)]
        cos, sin = tables[0, :, :half], -tables[0, :, half:]
        if both == "two":
            c, s, back = tables[1, :, :half], tables[1, :, half:], -sin
            cos, sin = c * cos + s * back, s * cos - c * back
        if both == "phases":
            high, low, at = (
                rng.standard_normal((3, half)),
                rng.standard_normal((64, half)),
                rng.integers(0, 64, (2, count)).astype(np.int32),
            )
            at[0] %= 3
            given, phases = [*none, *none], [*(np.concatenate([np.cos(a), np.sin(a)], axis=-1) for a in (high, low)), *at, *[None] * 4]
            (a, b), (c, d) = (np.split(table[i], 2, axis=-1) for table, i in zip(phases[:2], at, strict=True))
            cos, sin = (a * c - b * d).astype(F32), (b * c + a * d).astype(F32)
        index = [[first + np.arange(half) * (2 if pairs else 1) + i * (1 if pairs else half) for i in (0, 1)] for pairs in paired]
        u, v = (widened(x[..., i], kind) for i in index[0])
        out = x.copy()
        out[..., index[1][0]], out[..., index[1][1]] = narrowed(u * cos - v * sin, kind), narrowed(u * sin + v * cos, kind)
        yield Call("turn", [TYPES.index(kind), *shape, *paired, 1.0, x, *given, *phases, exactly(out)])


def decoders() -> Iterator[Call]:
    """Rows of each kind of codes, rotated and not, to every type: those of the codec's operations to float32 rounding."""
    specs = (
        "rvq-4",
        "rvq-2+2",
        "rvq-3:nocenter",
        "rabitq",
        "affine-4:channel",
        "k=affine-3:token:group=7,v=rvq-4",
        "commvq-2",
        "vecinfer-2",
        "qjl-2",
    )
    for i, spec in enumerate(specs):
        kind, rope = TYPES[i % 3], ("half", "none", "partial")[i // 3]
        dim = next(d for d in (80, 128) if takes(spec, d))
        block = made(spec, dim, rope, 75)
        with native.without():
            x = np.array(block.k.codec.decode(block.k.parts, block.k.shape, mx.float32)).astype(np.float64)[:, 3:]
        given, first, half, paired = [0, 0, 0, 0], 0, 0, False
        if (own := block.k.rope) is not None:
            first, half, paired = own.first, own.dims // 2, own.pairing == "interleaved"
            angle = np.random.default_rng(i).standard_normal((72, half))
            given = [1, np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(F32), 72, 0, half]
            u, v = x[..., first : first + half].copy(), x[..., first + half : first + 2 * half].copy()
            a, b = u * np.cos(angle) - v * np.sin(angle), u * np.sin(angle) + v * np.cos(angle)
            pairs = np.stack([a, b], axis=-1).reshape(*a.shape[:2], -1) if paired else np.concatenate([a, b], axis=-1)
            x[..., first : first + 2 * half] = pairs
        error = 1.01 * EPS[kind] * np.abs(x) + 4e-6 * np.abs(x).max()

        def near(found: np.ndarray, x: np.ndarray = x, kind: str = kind, error: np.ndarray = error) -> None:
            assert (np.abs(widened(found, kind) - x) <= error).all()

        result = Result(narrowed(np.zeros(1, F32), kind).dtype, x.shape, near)
        yield Call("decode_as", [sides_of(block)[0], 3, 72, TYPES.index(kind), *given, first, paired, result, 40])


def calls() -> list[Call]:
    return [call for kind in (calibrated, turns, decoders) for call in kind()]
