"""Single calls of the native functions for `native/run_calls.cpp`: what each is given, and what it must write by NumPy.

Where the sources promise an order of operations, NumPy does them in that order in float32 and the bytes must be equal; elsewhere it is
float64 and a bound on rounding. Nothing here needs the extension.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from tests.codec_oracles import pack
from tests.native_problems import Recorder, array, numbers

TYPES = ("float32", "float16", "bfloat16")
F32 = np.float32


@dataclass
class Result:
    """What a call writes: the type and shape, and what is asked of it."""

    dtype: Any
    shape: tuple[int, ...]
    check: Callable[[np.ndarray], None] = field(default=lambda found: None)


@dataclass
class Call:
    """A function's name, what it is given in the order that `run_calls` reads it, and a check of several results together."""

    name: str
    given: Sequence[Any]
    check: Callable[..., None] = field(default=lambda *found: None)

    def results(self) -> list[Result]:
        return [one for one in self.given if isinstance(one, Result)]

    def written(self) -> bytes:
        return array(np.frombuffer(self.name.encode(), np.uint8)) + b"".join(map(_bytes, self.given))

    def compare(self, found: list[np.ndarray]) -> None:
        for result, one in zip(self.results(), found, strict=True):
            result.check(one)
        self.check(*found)


def _bytes(given: Any) -> bytes:
    if isinstance(given, Result):
        return numbers(int(np.dtype(given.dtype).itemsize * np.prod(given.shape, dtype=np.int64)))
    if isinstance(given, float):
        return np.float64(given).tobytes()
    if isinstance(given, bytes):
        return given
    return array(given) if given is None or isinstance(given, np.ndarray) else numbers(int(given))


def exactly(wanted: np.ndarray) -> Result:
    """Those bytes; of numbers a zero of either sign, and any NaN."""
    return Result(wanted.dtype, wanted.shape, lambda found: np.testing.assert_array_equal(found, wanted))


def nearly(wanted: np.ndarray, error: float | np.ndarray, dtype: Any = F32) -> Result:
    """Float64 values within an absolute error."""
    return Result(dtype, wanted.shape, lambda found: _assert_near(found, wanted, error))


def _assert_near(found: np.ndarray, wanted: np.ndarray, error: float | np.ndarray) -> None:
    apart = np.abs(found.astype(np.float64) - wanted)
    assert (apart <= error).all(), f"{np.max(apart / error)} times the error allowed"


def narrowed(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 in the memory of a type, rounded to nearest even."""
    if kind != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(kind)
    bits = x.view(np.uint32)
    return np.where(np.isnan(x), bits >> 16 | 0x40, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(x: np.ndarray, kind: str) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(F32) if kind == "bfloat16" else x.astype(F32)


def reals(x: np.ndarray, kind: str) -> list[Any]:
    return [TYPES.index(kind), x]


def rows(x: np.ndarray, kind: str) -> bytes:
    """Rows of floats as `rows_of` reads them."""
    given = Recorder(x.shape)
    given.floats(x, kind == "bfloat16")
    return given.written()


def sylvester(x: np.ndarray) -> np.ndarray:
    """Sylvester's matrix times the last axis, by sums and differences of neighbours, then of pairs of them, and so on."""
    step = 1
    while step < x.shape[-1]:
        y = x.reshape(*x.shape[:-1], -1, 2, step)
        x = np.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], axis=-2).reshape(x.shape)
        step *= 2
    return x


def words_of_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the last axis, 32 // bits in each word, as bytes."""
    per = 32 // bits
    filled = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)])
    planes = filled.reshape(*codes.shape[:-1], -1, per)[..., None] >> np.arange(bits) & 1
    planes = planes.reshape(*planes.shape[:-2], per * bits)
    planes = np.pad(planes, [(0, 0)] * (planes.ndim - 1) + [(0, 32 - per * bits)])
    return np.packbits(planes.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


def nearest(points: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Index of the nearest of words (n, size) of points (..., size), by sums in order; the lowest of equals, never one at no distance."""
    total = np.zeros((*points.shape[:-1], len(words)), points.dtype)
    with np.errstate(all="ignore"):
        for i in range(points.shape[-1]):
            apart = points[..., i, None] - words[:, i]
            total = total + apart * apart
    return np.where(np.isnan(total), np.inf, total).argmin(axis=-1)


# --- streams


def streams() -> Iterator[Call]:
    """Every number of bits, as one stream and in words, of counts around whole groups and more codes than are taken at once."""
    rng = np.random.default_rng(0)
    for bits, words, count in product(range(1, 9), (False, True), (1, 7, 8, 31, 64, 2048, 4101)):
        codes = rng.integers(0, 256, count).astype(np.uint8)
        low = (codes & (1 << bits) - 1).astype(np.uint8)
        packed = words_of_codes(low, bits) if words else pack(low, bits)
        yield Call("pack", [bits, words, codes, exactly(packed)])
        yield Call("unpack", [bits, words, count, packed, exactly(low)])
    yield Call("look_up", [low[:77], (table := rng.integers(0, 1 << 16, 256).astype(np.uint16)), exactly(table[low[:77]])])
    x = rng.standard_normal(88).astype(F32)
    x[[3, 9, 17]] = 0, -0.0, np.nan
    yield Call("pack_signs", [x, exactly(pack((x >= 0).astype(int), 1))])


def centroids() -> Iterator[Call]:
    """Values by themselves and rows rotated first, of every size up to several blocks; values that are no numbers."""
    rng = np.random.default_rng(1)
    for kind, (dim, count), many in product(TYPES, ((0, 1), (0, 67), (0, 200), (1, 3), (4, 12), (16, 48), (64, 64), (256, 512)), (1, 16)):
        x = rng.standard_normal(count).astype(F32)
        if count > 60:
            x[[0, 5, 9]] = np.nan, np.inf, -np.inf
        given, words, signs = narrowed(x, kind), rng.standard_normal(many).astype(F32), rng.choice([-1, 1], dim).astype(F32)
        y, scale = widened(given, kind), F32(0.25)
        with np.errstate(invalid="ignore"):
            if dim:
                y = (sylvester(y.reshape(-1, dim) * signs) * scale).reshape(-1)
            apart = np.abs(y[:, None] - words)
            codes = np.where(apart < np.inf, apart, np.inf).argmin(axis=1).astype(np.uint8)
        cut = count // 2 // dim * dim if dim else count // 2
        yield Call("nearest_centroids", [*reals(given, kind), count, words, many, dim, signs, 0.25, exactly(codes), cut])


def rotated_rows() -> Iterator[Call]:
    rng = np.random.default_rng(2)
    for kind, dim in product(TYPES, (8, 16, 32, 64, 512)):
        given, signs = narrowed(rng.standard_normal((5, dim)).astype(F32), kind), rng.choice([-1, 1], dim).astype(F32)
        y = sylvester(widened(given, kind) * signs) * (F32(1) / np.sqrt(F32(dim)))
        size = np.abs(y.astype(np.float64)).mean(axis=1)
        wanted = [exactly(pack((y >= 0).astype(int), 1)), nearly(size, 1e-6 * size)]
        yield Call("rotated_signs", [*reals(given, kind), 5, dim, signs, *wanted, 2])


def two_stages() -> Iterator[Call]:
    rng = np.random.default_rng(3)
    for kind, left, dim, bits in product(TYPES, TYPES, (1, 7, 33, 64), (1, 3, 4)):
        given, words = narrowed(rng.standard_normal((3, dim)).astype(F32), kind), np.sort(rng.standard_normal(1 << bits)).astype(F32)
        first, second = (np.sort(rng.standard_normal((1 << bits) - 1)).astype(F32) for _ in range(2))
        x = widened(given, kind)
        codes = (x[..., None] > first).sum(axis=-1)
        rest = widened(narrowed(x - words[codes], left), left)
        wanted = [exactly(words_of_codes(c, bits)) for c in (codes, (rest[..., None] > second).sum(axis=-1))]
        yield Call("two_stages", [*reals(given, kind), 3, TYPES.index(left), dim, bits, words, first, second, *wanted, 1])


# --- functions of the kernel API


def bit_products() -> Iterator[Call]:
    """Hamming distances, and products with signs: rows of every size beside whole words, and more nibbles than are taken at once."""
    rng = np.random.default_rng(4)
    for width in (1, 7, 8, 17, 130):
        query, bits = rng.integers(0, 256, width).astype(np.uint8), rng.integers(0, 256, (9, width)).astype(np.uint8)
        offsets = rng.standard_normal(9).astype(F32)
        count = np.unpackbits(bits ^ query, axis=1).sum(axis=1).astype(F32)
        yield Call("hamming", [9, width, query, bits, offsets, 0.375, exactly(count * F32(0.375) + offsets), 4])
    for width in (1, 2, 16, 129, 300):
        q, packed = rng.standard_normal((2, 8 * width)).astype(F32), rng.integers(0, 256, (7, 2, width)).astype(np.uint8)
        norms = rng.standard_normal((7, 2)).astype(F32)
        signs = 2.0 * np.unpackbits(packed, axis=2, bitorder="little") - 1
        wanted = 0.5 * np.einsum("hm,shm->hs", q.astype(np.float64), signs) * norms.T
        yield Call("sign_scores", [7, 2, width, q, packed, norms, 0.5, nearly(wanted, 1e-6 * width**0.5 * 8 + 1e-6), 3])


def projections() -> Iterator[Call]:
    rng = np.random.default_rng(5)
    for kind, dim, sign in product(TYPES, (1, 15, 16, 80, 256, 300, 515), (1, -1)):
        given, filters = narrowed(rng.standard_normal((2, 3, dim)).astype(F32), kind), rng.standard_normal((2, dim)).astype(F32)
        wanted = sign * np.einsum("grd,gd->gr", widened(given, kind).astype(np.float64), filters.astype(np.float64))
        yield Call("project", [*reals(given, kind), 2, 3, dim, sign, filters, nearly(wanted, 2e-6 * dim**0.5 + 1e-6), 4])


def round_trips() -> Iterator[Call]:
    """Groups along rows and along columns, a last one that is shorter, longer than a block; values that are no numbers stay."""
    rng = np.random.default_rng(6)
    for kind, (outer, length, inner, group) in product(
        TYPES, ((3, 7, 1, 3), (2, 300, 1, 300), (2, 33, 1, 32), (2, 5, 1, 1), (2, 9, 19, 4), (1, 3, 48, 3))
    ):
        x = rng.standard_normal((outer, length, inner)).astype(F32)
        x[0, 1, 0], x[-1, 2, -1] = np.nan, np.inf
        given, wanted = narrowed(x, kind), np.zeros_like(x)
        x = widened(given, kind)
        for start in range(0, length, group):
            part = x[:, start : start + group]
            fine = np.isfinite(part)
            low, high = (
                np.min(np.where(fine, part, np.inf), axis=1, keepdims=True),
                np.max(np.where(fine, part, -np.inf), axis=1, keepdims=True),
            )
            with np.errstate(invalid="ignore"):
                step = (high - low) / F32(7)
                step = np.where(step > F32(1e-6), step, F32(1e-6))
                code = np.clip(np.rint((part - low) / step), 0, 7)
                wanted[:, start : start + group] = np.where(fine, code * step + low, part)
        name = [*reals(given, kind), outer, length, inner, group, 7.0, float(F32(1e-6)), exactly(narrowed(wanted, kind)), outer]
        yield Call("round_trip", name)


def moves() -> Iterator[Call]:
    """Entries of tables, rows without one of them, and keys turned back."""
    rng = np.random.default_rng(7)
    for kind, width in product((np.uint8, np.uint16, np.uint32), (1, 2, 4, 8, 16, 32, 33)):
        table, at = rng.integers(0, 256, (11, width)).astype(np.uint8), rng.integers(0, 14, 23).astype(kind)
        yield Call("gather", [np.dtype(kind).itemsize, at, table, 11, width, exactly(table[np.minimum(at, 10)]), 9])
    for width in (1, 6, 64):
        x, gone = rng.integers(0, 256, (4, 7, width)).astype(np.uint8), np.array([0, 6, 3, 1], np.int32)
        yield Call("drop_row", [4, 7, width, x, gone, exactly(np.stack([np.delete(x[g], gone[g], 0) for g in range(4)])), 10])
    for kind, dim in product(TYPES, (2, 6, 64, 130, 600)):
        given, gone = narrowed(rng.standard_normal((3, 5, dim)).astype(F32), kind), np.array([4, 0, 2], np.int32)
        places = np.stack([rng.permutation(5) for _ in range(3)]).astype(np.int32)
        angle = rng.standard_normal(dim // 2)
        c, s = np.cos(angle).astype(F32), np.sin(angle).astype(F32)
        u, v = np.split(widened(given, kind), 2, axis=-1)
        turned = narrowed(np.concatenate([u * c + v * s, v * c - u * s], axis=-1), kind)
        later = places > places[np.arange(3), gone][:, None]
        wanted = np.where(later[..., None], turned, given)
        kept = np.stack([np.delete(wanted[g], gone[g], 0) for g in range(3)])
        yield Call("turn_back", [*reals(given, kind), 3, 5, dim, gone, places, np.stack([c, s]), exactly(kept), 5])


# --- search


def searches() -> Iterator[Call]:
    """Tables of their own for each group and column, of every size that has a function; vectors and words that are no numbers."""
    rng = np.random.default_rng(8)
    for dtype, size in product((F32, np.float64), (1, 2, 3, 4, 5, 8, 11)):
        for by_squares in (False, True):
            points, words = rng.standard_normal((2, 70, 3, size)).astype(dtype), rng.standard_normal((40, size)).astype(dtype)
            points[0, 3, 1], points[1, 66, 2, -1], points[0, 9], words[7, 0] = np.nan, np.inf, words[20], np.nan
            words[30:34] = words[25:29]
            points[1, 10:40, 0] = (words[10:40] + words[5:35]) / 2  # as near to two of them but for rounding
            first, number = np.array([[0, 3, 20], [1, 39, 10]], np.int32), np.array([[5, 30, 20], [39, 1, 17]], np.int32)
            wanted = np.stack(
                [[nearest(points[g, :, c], words[first[g, c] :][: number[g, c]]) for c in range(3)] for g in range(2)]
            ).swapaxes(1, 2)
            half = np.square(words).sum(axis=1) / 2
            largest = np.array([[2 * np.nanmax(half[first[g, c] :][: number[g, c]], initial=0) for c in range(3)] for g in range(2)])
            squares = [half.astype(dtype), largest.astype(dtype)] if by_squares else [None, None]
            name, kind = ("nearest", np.uint8) if dtype == F32 else ("nearest_double", np.int32)
            yield Call(name, [2, 70, 3, size, points, words, first, number, *squares, exactly(wanted.astype(kind)), 64])
    points, words, near = rng.standard_normal((2, 30, 3)), rng.standard_normal((2, 5, 3)), rng.integers(0, 4, (2, 30)).astype(np.int32)
    sums, counts, apart = np.zeros((2, 5, 3)), np.zeros((2, 5), np.int64), np.zeros((2, 30))
    for g, n in np.ndindex(2, 30):
        sums[g, near[g, n]] += points[g, n]
        counts[g, near[g, n]] += 1
        for i in range(3):
            apart[g, n] += (points[g, n, i] - words[g, near[g, n], i]) ** 2
    yield Call("accumulate", [2, 30, 5, 3, points, words, near, exactly(sums), exactly(counts), exactly(apart)])


def runs() -> Iterator[Call]:
    """Runs of rows of every type: as they are, in another order, and divided and transformed first."""
    rng = np.random.default_rng(9)
    for kind, (dim, size), how in product(TYPES, ((24, 1), (24, 3), (64, 4), (64, 8), (4, 4), (8, 8)), ("plain", "order", "divisor")):
        if how == "divisor" and dim & (dim - 1):
            continue
        bits = {1: 3, 3: 6, 4: 5, 8: 8}[size]
        many, each = (1 << bits) + 4, dim // size
        given, words = narrowed(rng.standard_normal((2, 70, dim)).astype(F32), kind), rng.standard_normal((many, size)).astype(F32)
        if dim == size and kind == "float32":
            given[:, :60, :] = words[np.arange(60) % many] + words[(np.arange(60) + 3) % many]  # halved: as near to both but for rounding
        first, y = rng.integers(0, 5, (2, each)).astype(np.int32), widened(given, kind) * F32(0.5)
        order, divisor = None, None
        if how == "order":
            order = rng.permutation(dim).astype(np.int32)
            y = y[..., order]
        if how == "divisor":
            divisor = np.exp(rng.standard_normal((2, dim))).astype(F32)
            y = sylvester(y / divisor[:, None]) * (F32(1) / np.sqrt(F32(dim)))
        y = y.reshape(2, 70, each, size)
        codes = np.stack([[nearest(y[h, :, r], words[first[h, r] :][: 1 << bits]) for r in range(each)] for h in range(2)]).swapaxes(1, 2)
        wanted, half = pack(codes, bits), np.square(words).sum(axis=1) / 2
        largest = np.array([[2 * half[first[h, r] :][: 1 << bits].max() for r in range(each)] for h in range(2)])
        tables = [size, each, 1 << bits, bits, words, first, half.astype(F32), largest.astype(F32)]
        yield Call("code_runs", [rows(given, kind), 0.5, divisor, order, *tables, wanted.shape[2], exactly(wanted), 64])


def planes() -> Iterator[Call]:
    """Planes of every number of bits, none among them, and a row that is kept."""
    rng = np.random.default_rng(10)
    for kind, dim in product(TYPES, (2, 18, 64)):
        half = dim // 2
        given, mean = narrowed(rng.standard_normal((2, 70, dim)).astype(F32), kind), rng.standard_normal((2, dim)).astype(F32)
        at, turn = rng.permutation(dim).astype(np.int32), rng.standard_normal((2, half, 3)).astype(F32)
        words = rng.standard_normal((511, 2)).astype(F32)
        bits = np.concatenate([np.ones((2, 1), int), (rng.permutation(half * 9) % 9)[: 2 * half].reshape(2, half)], axis=1)
        if dim == 2:
            bits[:, 1] = 7  # a row that ends with its last code
        kept, size = np.array([69, 3], np.int32), int(-(-bits.sum(axis=1).max() // 8)) + (dim == 64)
        place = np.cumsum(bits, axis=1) - bits
        x = widened(given, kind) - mean[:, None]
        stream = np.zeros((2, 70, 8 * size), np.uint8)
        for h in range(2):
            stream[h, kept[h], 0] = 1
            for p, (i, j) in enumerate(zip(at[:half], at[half:], strict=True)):
                if b := bits[h, 1 + p]:
                    a, c, factor = turn[h, p]
                    z = np.stack([(a * x[h, :, i] - c * x[h, :, j]) * factor, (a * x[h, :, j] + c * x[h, :, i]) * factor], axis=-1)
                    code = nearest(z, words[(1 << b) - 1 :][: 1 << b])
                    stream[h, :, place[h, 1 + p] : place[h, 1 + p] + b] = code[:, None] >> np.arange(b) & 1
        wanted = np.packbits(stream, axis=-1, bitorder="little")
        tables = [mean, at, turn, words, bits.astype(np.uint8), place.astype(np.int32), kept]
        yield Call("code_planes", [rows(given, kind), *tables, size, exactly(wanted), 64])


def far_rows() -> Iterator[Call]:
    rng = np.random.default_rng(11)
    for kind, dim in product(TYPES, (1, 10, 64, 72)):
        given = narrowed(rng.standard_normal((2, 70, dim)).astype(F32), kind)
        middle, inverse = rng.standard_normal((2, dim)).astype(F32), np.exp(rng.standard_normal((2, dim))).astype(F32)
        x = widened(given, kind).astype(np.float64)
        far, near = ((np.abs(part) * inverse[:, None]).mean(axis=2) for part in (x - middle[:, None], x))
        wanted = far**2 / np.maximum(near, 1e-6)
        yield Call("farness", [rows(given, kind), middle, inverse, nearly(wanted, 2e-6 * wanted), 64])


def calls() -> list[Call]:
    every = (streams, centroids, rotated_rows, two_stages, bit_products, projections, round_trips, moves, searches, runs, planes, far_rows)
    return [call for kind in every for call in kind()]
