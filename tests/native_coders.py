"""Single calls of the native functions that code rows, decode and turn them, as `native_functions.py` has the others."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from tests.codec_oracles import Encoded, encode, pack, rotation, splitmix64, unpack
from tests.native_functions import F32, TYPES, Call, Result, exactly, narrowed, nearly, widened

SEED = 7
EPS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def factors(dim: int) -> list[Any]:
    """Signs, Hartley's matrix and its size, of the rotation that `codec_oracles.rotation` has."""
    odd = dim // (dim & -dim)
    angle = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    signs = [-1 if word >> 63 else 1 for word in splitmix64(SEED, dim)]
    return [np.array(signs, F32), (np.cos(angle) + np.sin(angle)).astype(F32), odd]


# --- encoding


class Given:
    """Rows as they may lie in memory, with a rotary embedding to undo or none: what is given of them, and their values before it."""

    def __init__(self, shape: tuple[int, int, int], kind: str, rope: tuple[int, int, bool] | None, seed: int) -> None:
        heads, count, dim = shape
        rng = np.random.default_rng(seed)
        x = (rng.standard_normal(shape) + 2 * rng.standard_normal((heads, 1, dim))).astype(F32)
        if count > 4:
            x[:, 0], x[:, 1], x[:, 2] = 0, x[:, 1] * F32(1e-6), x[:, 2] * F32(1e3)
        # Tokens before heads, with a gap behind each row; nothing behind the last.
        wide = np.zeros((count, heads, dim + 3), narrowed(x, kind).dtype)
        wide[..., :dim] = narrowed(x, kind).swapaxes(0, 1)
        size, memory = wide.itemsize, wide.reshape(-1)[: wide.size - 3]
        self.shape, self.x = shape, widened(wide[..., :dim].swapaxes(0, 1), kind)
        self.given: list[Any] = [TYPES.index(kind), *shape, (dim + 3) * size, heads * (dim + 3) * size, memory]
        if rope is None:
            self.given += [0, 0, 0, 0, 0, False, 1.0]
            return
        first, half, paired = rope
        tables = rng.standard_normal((count + 3, half))
        tables = np.concatenate([np.cos(tables), np.sin(tables)], axis=1).astype(F32)
        pages = np.array_split(np.pad(tables, [(0, -(count + 3) % 2), (0, 0)]), 2)
        self.given += [2, *pages, len(pages[0]), 2, half, first, paired, 0.5]
        cos, sin = tables[2 : 2 + count, :half], tables[2 : 2 + count, half:]
        own = self.x[..., first : first + 2 * half]
        u, v = (own[..., ::2], own[..., 1::2]) if paired else (own[..., :half], own[..., half:])
        self.x = np.concatenate(
            [self.x[..., :first], (u * cos + v * sin) * F32(0.5), (v * cos - u * sin) * F32(0.5), self.x[..., first + 2 * half :]], axis=-1
        )

    @property
    def exact(self) -> np.ndarray:
        return self.x.astype(np.float64)


def codebook(bits: int) -> np.ndarray:
    """Any ascending table."""
    return np.sort(np.random.default_rng(bits).standard_normal(1 << bits) * 1.2).astype(F32)


def stage(bits: int, shape: tuple[int, int, int], table: np.ndarray) -> list[Any]:
    """Tables as the extension lays them out: as many boundaries as a vector has, words for any byte."""
    middles = ((table[1:].astype(np.float64) + table[:-1]) / 2).astype(F32)
    room = np.zeros(max(16, 1 << bits), F32)
    room[: len(middles)] = middles
    return [bits, room, np.resize(table, 256), Result(np.uint8, (*shape[:2], (shape[2] * bits + 7) // 8))]


def losses() -> list[Result]:
    return [Result(np.float64, (2,)), Result(np.int64, (1,))]


def encoders() -> Iterator[Call]:
    shapes = ((1, 3, 5), (2, 9, 24), (2, 35, 64), (2, 9, 80), (1, 5, 128), (1, 2, 512))
    ropes = (None, (2, 1, True), (0, 12, False), (0, 32, True), (8, 30, False), None)
    kinds = ((1,), (4,), (2, 2), (3,), (8,), (4, 5))
    for i, (kind, (shape, rope)) in enumerate(product(TYPES, zip(shapes, ropes, strict=True))):
        for centred in (False, True):
            yield rotated(Given(shape, kind, rope, i), kinds[(i + centred) % 6], ("norm", "ls", "unbiased")[i % 3], centred, bool(i % 2))
        yield grid(Given(shape, kind, rope, i), (1, 2, 4, 8)[i % 4], ("norm", "unbiased")[i % 2])
        for by_token, bits, group in ((True, 1 + i % 8, 7), (False, 8 - i % 8, 32 if shape[1] > 9 else 4)):
            yield affine(Given(shape, kind, rope, i), bits, group, by_token)
        yield signs(Given(shape, kind, rope, i), 1 + i % 4, bool(i % 2))
        given = Given(shape, kind, rope, i)
        total = given.exact.sum(axis=1)
        yield Call(
            "sum_over_tokens", [*given.given, nearly(total, 1e-6 * np.abs(given.exact).sum(axis=1) + 1e-30, np.float64), shape[1] // 2]
        )


def means(given: Given, centred: bool) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Of the rows, as it is stored, and its values."""
    if not centred:
        return None, None
    mean = narrowed(given.exact.mean(axis=1).astype(F32), "bfloat16")
    return mean, widened(mean, "bfloat16").astype(np.float64)


def assert_scales(found: np.ndarray, wanted: np.ndarray, without: np.ndarray, sure: np.ndarray) -> None:
    """bfloat16 to its rounding, with a sign where the mean was not taken off."""
    assert np.array_equal((found >= 0x8000)[sure], without[sure])
    size = widened(found & 0x7FFF, "bfloat16")
    np.testing.assert_allclose(size[sure], wanted[sure], rtol=2**-8 + 1e-4, atol=1e-30)


def rotated(given: Given, bits: tuple[int, ...], kind: str, centred: bool, ties_up: bool) -> Call:
    stored, mean = means(given, centred)
    tables, dim = [codebook(b) for b in bits], given.shape[2]
    wanted = encode(given.exact, [table.tolist() for table in tables], kind, mean, SEED)

    def check(*found: np.ndarray) -> None:
        *parts, scale, lost, fine = found
        assert fine[0] == 1
        sure = wanted.doubt > 1e-5
        codes = [unpack(part, b, dim) for part, b in zip(parts, bits, strict=True)]
        for code, own, margin in zip(codes, wanted.codes, wanted.margins, strict=True):
            clear = sure[..., None] & (margin > 2e-5)
            assert np.array_equal(code[clear], own[clear])
            sure = sure & (code == own).all(-1)
        assert sure.mean() > 0.6
        assert_scales(scale, wanted.scale, ~wanted.centred if centred else np.zeros_like(sure), sure & (wanted.scale > 1e-30))
        assert_losses(given, codes, tables, scale, wanted, mean, lost)

    listed = [part for b, table in zip(bits, tables, strict=True) for part in stage(b, given.shape, table)]
    how = [ties_up, ("norm", "ls", "unbiased").index(kind), stored, *factors(dim), 0, None, Result(np.uint16, given.shape[:2])]
    return Call("encode_rotated", [*given.given, len(bits), *listed, *how, *losses(), given.shape[1] // 2], check)


def assert_losses(
    given: Given,
    codes: list[np.ndarray],
    tables: list[np.ndarray],
    scale: np.ndarray,
    wanted: Encoded,
    mean: np.ndarray | None,
    lost: np.ndarray,
) -> None:
    """Of the rows less what their codes decode to, and of the rows."""
    q = sum(table.astype(np.float64)[code] for table, code in zip(tables, codes, strict=True))
    back = widened(scale & 0x7FFF, "bfloat16")[..., None] * (q @ rotation(given.shape[2], SEED))
    if mean is not None:
        back = back + (scale < 0x8000)[..., None] * mean[:, None]
    x = given.exact
    np.testing.assert_allclose(lost, [np.square(x - back).sum(), np.square(x).sum()], rtol=1e-4, atol=1e-30)


def grid(given: Given, bits: int, kind: str) -> Call:
    """A grid scaled to each row: no candidate's codes are closer to the row's direction, and the scale is that of the codes."""
    dim, levels, steps = given.shape[2], 1 << bits, np.array([1.0, 1.3, 1.7, 2.2], F32)
    table = 2.0 * np.arange(levels) - (levels - 1)
    y = given.exact @ rotation(dim, SEED).T
    size = np.sqrt(np.square(y).mean(axis=-1, keepdims=True))
    y = np.divide(y, size, out=np.zeros_like(y), where=size > 0)

    def cosine(code: np.ndarray) -> np.ndarray:
        q = table[code]
        return (y * q).sum(-1) ** 2 / (q * q).sum(-1)

    largest = np.maximum(np.abs(y).max(axis=-1, keepdims=True), 1e-9)
    tried = [np.clip(np.floor(y * (levels - 1) / largest / step / 2 + levels / 2), 0, levels - 1).astype(int) for step in steps]
    best = np.max([cosine(code) for code in tried], axis=0)

    def check(part: np.ndarray, scale: np.ndarray, lost: np.ndarray, fine: np.ndarray) -> None:
        code = unpack(part, bits, dim)
        real = size[..., 0] > 1e-30
        assert fine[0] == 1 and (cosine(code) >= best * (1 - 1e-4) - 1e-6)[real].all()
        q = table[code]
        ratio = np.sqrt((y * y).sum(-1) / (q * q).sum(-1)) if kind == "norm" else (y * y).sum(-1) / np.maximum((y * q).sum(-1), 1e-9)
        assert_scales(scale, size[..., 0] * ratio, np.zeros_like(real), real)

    how = [True, ("norm", "ls", "unbiased").index(kind), None, *factors(dim), len(steps), steps, Result(np.uint16, given.shape[:2])]
    return Call(
        "encode_rotated", [*given.given, 1, *stage(bits, given.shape, table.astype(F32)), *how, *losses(), given.shape[1] // 2], check
    )


def outward(x: np.ndarray, up: bool) -> np.ndarray:
    """The nearest bfloat16 not above x, or not below it."""
    bits = x.view(np.uint32)
    return ((bits >> 16) + (((bits & 0xFFFF) != 0) & ((bits >> 31) == (0 if up else 1)))).astype(np.uint16)


def affine(given: Given, bits: int, group: int, by_token: bool) -> Call:
    count = given.shape[1]
    x, axis, levels = given.x, 2 if by_token else 1, F32((1 << bits) - 1)
    starts = np.arange(0, x.shape[axis], group)
    low, high = (np.array(f.reduceat(x, starts, axis=axis)) for f in (np.minimum, np.maximum))
    zero = outward(low, False)
    step = outward((high - widened(zero, "bfloat16")) / levels, True)
    step[~(widened(step, "bfloat16") >= F32(2.0**-120))] = 0
    by, origin = (np.take(widened(side, "bfloat16"), np.arange(x.shape[axis]) // group, axis=axis) for side in (step, zero))
    code = np.where(by > 0, np.rint(np.clip((x - origin) / np.where(by > 0, by, F32(1)), 0, levels)), 0)
    lost = [np.square(given.exact - (code * by.astype(np.float64) + origin)).sum(), np.square(given.exact).sum()]
    packed = pack(code.astype(int), bits)
    # Whole groups in each part.
    cut = count // 2 if by_token else count // 2 // group * group
    # Of zeros of both signs either is the least.
    zeros = Result(
        np.uint16, zero.shape, lambda found: np.testing.assert_array_equal(*(np.where(z == 0x8000, 0, z) for z in (found, zero)))
    )
    results = [exactly(packed), exactly(step), zeros, Result(np.float64, (2,)), exactly(np.ones(1, np.int64))]

    def check(*found: np.ndarray) -> None:
        np.testing.assert_allclose(found[3], lost, rtol=1e-4, atol=1e-30)

    return Call("encode_affine", [*given.given, bits, group, by_token, *results, cut], check)


def signs(given: Given, blocks: int, centred: bool) -> Call:
    heads, count, dim = given.shape
    turns = np.random.default_rng(dim).choice([-1, 1], (blocks, 2, dim)).astype(F32)
    stored, mean = means(given, centred)
    own, hartley, odd = factors(dim)
    plain = rotation(dim, SEED) * own  # without its signs
    x, doubt, without = given.exact, np.ones(given.shape[:2]), np.zeros(given.shape[:2], bool)
    if mean is not None:
        apart = x - mean[:, None]
        far, near = np.square(x).sum(-1), np.square(apart).sum(-1)
        without, doubt = near >= far, np.abs(near - far) / np.maximum(far, 1e-300)
        x = np.where(without[..., None], x, apart)
    length = np.sqrt(np.square(x).sum(-1))
    y = np.concatenate([x * first @ plain.T * second @ plain.T for first, second in turns], axis=-1)
    sure = (np.abs(y) > 1e-5 * length[..., None] / dim**0.5) & (doubt > 1e-5)[..., None] & (length > 1e-30)[..., None]

    def check(codes: np.ndarray, norm: np.ndarray, lost: np.ndarray, fine: np.ndarray) -> None:
        assert fine[0] == 1 and np.array_equal(unpack(codes, 1, blocks * dim)[sure], (y >= 0)[sure])
        assert not np.unpackbits(codes, axis=-1, bitorder="little")[..., blocks * dim :].any()
        assert_scales(norm, length, without, (doubt > 1e-5) & (length > 1e-30))

    results = [Result(np.uint8, (heads, count, (blocks * dim + 7) // 8)), Result(np.uint16, (heads, count)), *losses()]
    return Call("encode_signs", [*given.given, blocks, turns, hartley, odd, stored, *results, count // 2], check)


def calls() -> list[Call]:
    return list(encoders())
