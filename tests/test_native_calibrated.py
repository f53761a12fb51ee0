"""Native coding of `tc` at every SIMD level: the specification in float64, the same bytes everywhere, sums in order in float32."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from tests import test_tc
from tests.tc_cases import bound, exact
from tests.test_tc import coded, f64, rows, same
from veloxquant_mlx import native
from veloxquant_mlx.allocators import shapes
from veloxquant_mlx.codecs.tc import Tc

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")

SIZES = ((2, 64), (3, 6), (1, 36), (2, 80))
EPS = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.set_level(request.param)
    yield request.param
    native.set_level(before)


def in_order(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """x times a matrix in float32, each product and each sum rounded, in the order of the terms."""
    total = np.zeros((len(x), matrix.shape[1]), np.float32)
    for i, row in enumerate(matrix.astype(np.float32)):
        total = total + x[:, i, None] * row
    return total


@pytest.mark.parametrize("spec", ["tc-2", "tc-2:carry"])
def test_codes_and_scales_are_the_specifications(level: str, spec: str) -> None:
    before = native.calls()
    test_tc.test_codes_are_the_nearest_points_and_scales_unbiased(spec)
    assert native.calls() > before


@pytest.mark.parametrize("spec", ["tc-1.25", "tc-6", "tc-2:carry"])
def test_rows_are_those_of_float64(level: str, spec: str) -> None:
    for (heads, dim), tokens in zip(SIZES, (70, 33, 1, 64), strict=True):
        k, v = bound(spec, heads, dim)
        x, w = rows(tokens, heads, dim)
        key_parts, keys, value_parts, _ = coded(k, v, x, w)
        wanted = exact(k, key_parts, v, value_parts, x.shape)
        for dtype, eps in EPS.items():
            found = k.decode(key_parts, x.shape, dtype), v.decode(value_parts, x.shape, dtype, {"k": keys})
            for got, rebuilt in zip(found, wanted, strict=True):
                assert got.dtype == dtype and got.shape == x.shape
                close = rebuilt.clip(-65504, 65504) if dtype == mx.float16 else rebuilt
                error = 1.01 * eps * np.abs(rebuilt) + 4e-6 * np.abs(rebuilt).max(initial=1)
                assert (np.abs(f64(got) - close) <= error).all()


@pytest.mark.parametrize("spec", ["tc-1.25", "tc-3.7", "tc-6", "tc-2:carry"])
def test_the_same_bytes_at_every_level_and_number_of_threads(spec: str) -> None:
    before, threads = native.level(), native.threads()
    for heads, dim in SIZES:
        k, v = bound(spec, heads, dim)
        x, w = rows(150, heads, dim)
        found = []
        for name in native.levels():
            for count in (1, 3):
                native.set_level(name)
                native.set_threads(count)
                found.append(coded(k, v, x, w))
        native.set_level(before)
        native.set_threads(threads)
        for other in found[1:]:
            assert same(found[0][0], other[0]) and same(found[0][2], other[2])
            assert all(np.array_equal(np.array(found[0][i]), np.array(other[i])) for i in (1, 3))


def test_codes_of_keys_are_those_of_sums_in_order(level: str) -> None:
    """Bit for bit, values on boundaries in the lower cell."""
    k, _ = bound("tc-3.7")
    x, reader, tables = rows(70)[0], k._key_reader, k._key_tables
    codes = test_tc.bit_codes(np.array(k.encode(x)["codes"])[0], k.key_widths.reshape(-1).tolist())
    first, *_ = reader.components.stored(2)
    for h in range(2):
        y = in_order((np.array(x[h]) - tables.mean[h]).clip(-1e18, 1e18), tables.forward[first[h] : first[h + 1]].T)
        for j, i in enumerate(np.flatnonzero(k.key_widths[h])):
            kind = int(reader.components.shapes.reshape(2, -1)[h, i]), int(k.key_widths[h, i])
            assert np.array_equal(codes[h * 64 + i, :70], np.searchsorted(shapes.boundaries(*kind), y[:, j]))


def test_a_value_on_a_boundary_and_no_number(level: str) -> None:
    """Of every number of bits: each boundary, its neighbours, and what a search must survive."""
    for bits in range(1, 9):
        edges = shapes.boundaries(2, bits)
        y = np.concatenate([edges, np.nextafter(edges, np.float32(9)), np.nextafter(edges, np.float32(-9)), [-1e30, 1e30, 0, -0.0]])
        y = y.astype(np.float32)
        found = test_tc.bit_codes(_codes(_coder(edges), y, bits), [bits])[0, : len(y)]
        assert np.array_equal(found, np.searchsorted(edges, y))


def _coder(edges: np.ndarray) -> object:
    """Of one head of one entry, coded as it is."""
    one = np.ones((1, 1), np.float32)
    return native._native.KeyCoder(np.array([0, 1], np.int32), 0 * one, one, np.zeros(1, np.int32), [edges.tolist()])


def _codes(coder: object, y: np.ndarray, bits: int) -> np.ndarray:
    stored, out = native.stored((1, len(y), 1)), np.zeros((1, -(-len(y) // 32), 4 * bits), np.uint8)
    stored.floats(y.reshape(1, -1, 1), False)
    assert coder.encode(stored, out)
    return out[0]


def test_the_number_of_tokens_at_once_changes_nothing(level: str) -> None:
    k, v = bound("tc-2")
    x, w = rows(150)
    key_parts, keys, value_parts, values = coded(k, v, x, w)
    for start, stop in ((0, 32), (32, 150), (64, 65), (96, 128)):
        own, blocks = slice(start, stop), slice(start // 32, -(-stop // 32))
        some = coded(k, v, x[:, own], w[:, own])
        whole = slice(0, (stop - start) // 32)
        assert np.array_equal(np.array(some[0]["codes"][:, whole]), np.array(key_parts["codes"][:, blocks][:, whole]))
        assert np.array_equal(np.array(some[2]["codes"][:, whole]), np.array(value_parts["codes"][:, blocks][:, whole]))
        assert np.array_equal(np.array(some[1]), np.array(keys[:, own]))
        cut = {n: part[:, blocks] if n != "range" else part for n, part in value_parts.items()}
        found = v.decode(cut, (2, stop - start, 64), mx.float32, {"k": keys[:, own]})
        assert np.array_equal(np.array(found), np.array(values[:, own]))


@pytest.mark.parametrize("spec", ["tc-2", "tc-2:carry"])
def test_what_either_back_end_writes_both_read(spec: str) -> None:
    """Rows to float32 rounding; of the codes all but those of values that close to a boundary are equal."""
    k, v = bound(spec)
    x, w = rows(200)
    ours = coded(k, v, x, w)
    with native.without():
        theirs = coded(k, v, x, w)
        crossed = k.decode(ours[0], x.shape, mx.float32), v.decode(ours[2], x.shape, mx.float32, {"k": ours[1]})
    back = k.decode(theirs[0], x.shape, mx.float32), v.decode(theirs[2], x.shape, mx.float32, {"k": theirs[1]})
    for got, wanted in ((crossed[0], ours[1]), (crossed[1], ours[3]), (back[0], theirs[1]), (back[1], theirs[3])):
        assert np.abs(f64(got) - f64(wanted)).max() <= 4e-6 * np.abs(f64(wanted)).max()
    for role, widths in ((0, k.key_widths.reshape(-1)), (2, np.repeat(v.value_widths, 64))):
        own, other = (test_tc.bit_codes(np.array(parts[role]["codes"])[0], widths.tolist()) for parts in (ours, theirs))
        assert np.abs(own.astype(int) - other).max() <= 1 and (own != other).mean() < 1e-3


@pytest.mark.parametrize("fault", ["another mean", "another map", "a code's bit"])
def test_faults_are_caught(fault: str) -> None:
    k, v = bound("tc-2:carry")
    x, w = rows(70)
    key_parts, keys, value_parts, _ = coded(k, v, x, w)
    wrong, name = dict(value_parts), {"another mean": "v_mean", "another map": "mix_step", "a code's bit": "codes"}[fault]
    part = np.array(value_parts[name])
    part.reshape(-1)[3] = part.reshape(-1)[3] ^ 16 if name == "codes" else 1.1 * part.reshape(-1)[3]
    wrong[name] = mx.array(part)
    wanted = exact(k, key_parts, v, value_parts, x.shape)[1]
    found = f64(v.decode(wrong, x.shape, mx.float32, {"k": keys}))
    assert np.abs(found - wanted).max() > 4e-6 * np.abs(wanted).max()


def test_refuses_what_does_not_fit() -> None:
    first, one, kinds, edges = np.array([0, 1], np.int32), np.ones((1, 2), np.float32), np.zeros(1, np.int32), [0.0]
    coder, value = native._native.KeyCoder, native._native.ValueCoder
    stored, signs, hartley = native.stored((1, 3, 2)), np.ones(2, np.float32), np.ones((1, 1), np.float32)
    codes, two, points = np.zeros((1, 1, 4), np.uint8), np.zeros((1, 1, 8), np.uint8), [[-1.0, 1.0]]
    good = coder(first, one, one, kinds, [edges])
    both = value(first, one, one, one, one, kinds, [edges], points, signs, hartley)
    floats = native.stored((1, 3, 2))
    floats.floats(np.zeros((1, 3, 2), np.float32), False)
    other = native.stored((2, 3, 2))
    other.floats(np.zeros((2, 3, 2), np.float32), False)
    out = np.zeros((1, 3, 2), np.float32)
    for call, message in (
        (lambda: coder(first, one, one[:, :1].copy(), kinds, [edges]), r"forward must be \(1, 2\), but got \(1, 1\)"),
        (lambda: coder(first + 1, one, one, kinds, [edges]), "first must be of 1 heads, from 0"),
        (lambda: coder(3 * first, one, np.ones((3, 2), np.float32), kinds, [edges]), "first must be ascending by at most D, but got 3"),
        (lambda: coder(first, one, one, kinds + 1, [edges]), "kinds must be below 1, but got 1"),
        (lambda: coder(first, one, one, np.zeros(2, np.int32), [edges]), "kinds must be one for each component, but got 2"),
        (lambda: coder(first, one, one, kinds, [[0.0, 1.0]]), "boundaries must be 3, but got 2"),
        (lambda: coder(first, one, one, kinds, [[0.0, 1.0, 1.0]]), "boundaries must be finite and ascending"),
        (lambda: coder(first, one, one, kinds, [[float("nan")]]), "boundaries must be finite and ascending"),
        (lambda: good.encode(stored, codes), "rows must be given their codes or floats"),
        (lambda: good.encode(other, codes), r"x must be \(1, S, 2\), but got \(2, S, 2\)"),
        (lambda: good.encode(floats, codes[:, :, :3].copy()), r"codes must be \(1, 1, 4\), but got \(1, 1, 3\)"),
        (lambda: value(first, one, one, one, one, kinds, [edges], [[1.0]], signs, hartley), "points must be one more than boundaries"),
        (lambda: value(first, one, one, one, one[:, :1].copy(), kinds, [edges], points, signs, hartley), r"mix must be \(1, 2\)"),
        (lambda: value(first, one, one, one, one, kinds, [edges], points, signs, np.ones((3, 3), np.float32)), r"hartley must be \(m, m\)"),
        (lambda: both.encode(floats, floats, two, np.zeros((1, 2), np.float32)), r"sizes must be \(1, 3\), but got \(1, 2\)"),
        (lambda: both.decode(floats, floats, out, False), "values must be components and sizes of as many rows as the keys"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not good.encode(_of(np.array([[[0, np.nan], [0, 0], [0, 0]]], np.float32)), codes)


def _of(x: np.ndarray) -> object:
    stored = native.stored(x.shape)
    stored.floats(x, False)
    return stored


def test_heads_without_components_and_rows_that_cannot_be_coded(level: str) -> None:
    """A head whose keys have no bits is predicted from the others alone; a row that is not finite is refused by place."""
    k, v = bound("tc-2")
    k, v = (Tc.from_params(codec.to_params() | {"keys": ["0" * 64, codec.keys[1]]}).with_tables(k.tables) for codec in (k, v))
    x, w = rows(40)
    key_parts, _, value_parts, values = coded(k, v, x, w)
    wanted = exact(k, key_parts, v, value_parts, x.shape)[1]
    assert np.abs(f64(values) - wanted).max() <= 4e-6 * np.abs(wanted).max()
    bad = np.array(w)
    bad[1, 39, 5] = np.inf
    with pytest.raises(ValueError, match=r"1 of 5120 values are NaN, infinite or beyond 1e\+36: \(head 1, token 39, dim 5\)"):
        v.encode(mx.array(bad), {"k": x})
