"""The search for codewords and what codecs make of it at every SIMD level, against float64 NumPy and MLX operations."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from tests import codec_oracles
from veloxquant_mlx import native
from veloxquant_mlx.allocators.vecinfer import _moments, quantize_vq, train_codebook
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs._base import peaks_of
from veloxquant_mlx.codecs.commvq import _mean, _medians
from veloxquant_mlx.native import searching

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.set_level(request.param)
    yield request.param
    native.set_level(before)


def distances(points: np.ndarray, words: np.ndarray) -> np.ndarray:
    return np.square(points.astype(np.float64)[:, None] - words.astype(np.float64)).sum(axis=-1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("count", [1, 37, 256])
def test_nearest_of_every_size(level: str, size: int, count: int) -> None:
    """No other codeword is nearer, in float32 but for its rounding, and the index is that of MLX operations, bit for bit."""
    rng = np.random.default_rng(size)
    points, words = (rng.standard_normal((n, size)).astype(np.float32) for n in (203, count))
    found = searching.nearest_single(points, words)
    every = distances(points, words)
    assert (every[np.arange(203), found] <= every.min(axis=1) * (1 + 1e-6) + 1e-12).all()
    assert np.array_equal(found, np.array(quantize_vq(mx.array(points), mx.array(words), size)).reshape(-1))
    assert np.array_equal(searching.nearest(points, words), every.argmin(axis=1))


def test_a_table_for_each_column(level: str) -> None:
    rng = np.random.default_rng(0)
    points, words = rng.standard_normal((2, 150, 3, 4)).astype(np.float32), rng.standard_normal((64, 4)).astype(np.float32)
    first, number = np.array([[0, 5, 17], [1, 40, 63]]), np.array([[5, 12, 47], [39, 24, 1]])
    found = np.zeros((2, 150, 3), np.uint8)
    native._native.nearest(points, words, first.astype(np.int32), number.astype(np.int32), found)
    for h, c in np.ndindex(2, 3):
        own = words[first[h, c] : first[h, c] + number[h, c]]
        assert np.array_equal(found[h, :, c], distances(points[h, :, c], own).argmin(axis=1))


def test_equals_and_what_is_no_number(level: str) -> None:
    """The lowest of equals; a distance that is NaN or infinite is never the nearest."""
    words = np.array([[np.nan, 0], [3, 0], [1, 1], [1, 1], [-3, 0], [np.inf, 0]], np.float32)
    points = np.array([[0, 0], [0.9, 1], [np.nan, 0], [np.inf, 0], [-2, 0]], np.float32)
    assert searching.nearest_single(points, words).tolist() == [2, 2, 0, 0, 4]
    assert searching.nearest(points, words).tolist() == [2, 2, 0, 0, 4]


@pytest.mark.parametrize("spec", ["commvq-2", "commvq-3.5", "commvq-2:product", "vecinfer-1.75", "vecinfer-1"])
def test_codes_are_those_of_mlx_operations(level: str, spec: str) -> None:
    """With the same tables; each way of encoding learns its own, which differ where a sum in the learning rounds differently."""
    codec, x = parse_codec(spec).k, mx.array(np.random.default_rng(3).standard_normal((2, 300, 32)).astype(np.float32))
    parts = {name: np.array(part.astype(mx.float32)) for name, part in codec.encode(x).items()}
    with native.without():
        others = {name: np.array(part.astype(mx.float32)) for name, part in codec.encode(x).items()}
    for name, part in parts.items():
        assert np.array_equal(part, others[name]), name


def test_words_are_those_of_numpy(level: str) -> None:
    points = mx.array(np.random.default_rng(4).standard_normal((700, 4)).astype(np.float32))
    found = train_codebook(points, 64, 4)
    with native.without():
        assert np.array_equal(np.array(found), np.array(train_codebook(points, 64, 4)))


@pytest.mark.parametrize("size", [1, 3, 4, 8])
@pytest.mark.parametrize("case", ["normal", "between", "equal", "tiny", "huge", "infinite"])
def test_runs_of_rows_are_searched_for_exactly(level: str, size: int, case: str) -> None:
    """Bit for bit by direct differences, also where the second nearest word is as near but for rounding."""
    rng = np.random.default_rng(size)
    words = rng.standard_normal((64, size)).astype(np.float32)
    if case == "equal":
        words[32:] = words[:32]
    x = rng.standard_normal((2, 150, 6 * size)).astype(np.float32)
    if case == "between":
        pairs = rng.integers(0, 64, (2, 150, 6, 2))
        x = ((words[pairs[..., 0]] + words[pairs[..., 1]]) / 2 + rng.choice([0, 1e-7], (2, 150, 6, 1))).reshape(x.shape).astype(np.float32)
    scale = {"tiny": 1e-22, "huge": 3e18}.get(case, 1)
    x, words = x * np.float32(scale), words * np.float32(scale)
    if case == "infinite":
        words[5, 0], words[9, 0] = np.inf, np.nan
    found = codec_oracles.unpack(np.array(searching.coded_runs(mx.array(x), 6, words, np.zeros((2, 6)))), 6, 6)
    wanted = np.array(quantize_vq(mx.array(x), mx.array(words), size))
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_tables_and_order_of_runs(level: str, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((2, 70, 12)).astype(np.float32)).astype(dtype)
    words, order = rng.standard_normal((100, 4)).astype(np.float32), rng.permutation(12)
    first = rng.integers(0, 100 - 32, (2, 3))
    found = codec_oracles.unpack(np.array(searching.coded_runs(x, 5, words, first, order=order)), 5, 3)
    rows = np.array(x.astype(mx.float32))[..., order].reshape(2, 70, 3, 4)
    for h, r in np.ndindex(2, 3):
        own = words[first[h, r] : first[h, r] + 32]
        assert np.array_equal(found[h, :, r], distances(rows[h, :, r], own).argmin(axis=1))


def test_a_round_of_k_means_is_numpys(level: str) -> None:
    rng = np.random.default_rng(1)
    for size, count in ((1, 3), (4, 40), (8, 256)):
        points, words = rng.standard_normal((3, 600, size)), rng.standard_normal((3, count, size))
        words[1, -1] = 50  # nearest to none
        found = searching.moments(points, words)
        with native.without():
            wanted = _moments(points, words)
        assert np.array_equal(found[1], wanted[1]) and found[1][1, -1] == 0
        assert np.array_equal(found[0], wanted[0])
        np.testing.assert_allclose(found[2], wanted[2], rtol=1e-12, atol=1e-12)


def test_farness_and_means_without_the_farthest(level: str) -> None:
    """A row 10^9 times as large as the others is found, and leaves their mean alone."""
    x = np.random.default_rng(2).standard_normal((2, 200, 10)).astype(np.float32)
    middle, inverse = x[:, 3], np.abs(x[:, 4])
    far, near = ((np.abs(part.astype(np.float64)) * inverse[:, None]).mean(axis=2) for part in (x - middle[:, None], x))
    np.testing.assert_allclose(searching.farness(mx.array(x), middle, inverse), far**2 / np.maximum(near, 1e-6), rtol=2e-6)
    x[0, 77] *= 1e9
    others = np.stack([np.delete(x[0], 77, 0), np.delete(x[1], 5, 0)]).astype(np.float64).mean(axis=1)
    found = np.array(_mean(mx.array(x), mx.array([[77], [5]], mx.uint32)).astype(mx.float32))
    np.testing.assert_allclose(found, others, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2, 7, 200])
def test_medians_and_peaks(count: int) -> None:
    x = np.random.default_rng(count).standard_normal((2, count, 5))
    assert np.array_equal(_medians(x), np.median(x, axis=1, keepdims=True))
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        rows = mx.array(x.astype(np.float32)).astype(dtype)
        assert np.array_equal(peaks_of(rows), np.abs(np.array(rows.astype(mx.float32))).max(axis=1))
        assert np.isnan(peaks_of(mx.where(rows == rows[0, 0, 0], mx.nan, rows))[0, 0])


@pytest.mark.parametrize("spec", ["vecinfer-2", "commvq-2", "commvq-2:product"])
def test_the_number_of_threads_changes_nothing(spec: str) -> None:
    codec, x, threads = (
        parse_codec(spec).k,
        mx.array(np.random.default_rng(3).standard_normal((2, 1100, 32)).astype(np.float16)),
        native.threads(),
    )
    found = []
    for count in (1, 3):
        native.set_threads(count)
        found.append({name: np.array(part.astype(mx.float32)) for name, part in codec.encode(x).items()})
    native.set_threads(threads)
    assert all(np.array_equal(part, found[1][name]) for name, part in found[0].items())


def test_refuses_what_does_not_fit() -> None:
    points, words, one = np.zeros((1, 3, 2, 4), np.float32), np.zeros((5, 4), np.float32), np.ones((1, 2), np.int32)
    out = np.zeros((1, 3, 2), np.uint8)
    nearest = native._native.nearest
    runs, planes, moments = native._native.code_runs, native._native.code_planes, native._native.moments
    rows, twice = native.floats(mx.zeros((1, 3, 8))), np.zeros((1, 2), np.int32)
    given = (np.zeros((1, 8), np.float32), np.zeros((2, 4), np.int32), np.zeros((1, 4, 3), np.float32), np.zeros((7, 2), np.float32))
    bits, kept = np.full((1, 4), 2, np.int32), np.zeros(1, np.int32)
    for call, message in (
        (lambda: nearest(points, words[:, :3].copy(), one, one, out), r"words must be \(5, 4\), but got \(5, 3\)"),
        (lambda: nearest(points, words, one + 4, one, out), "words must be 1 to 256 within 5, but got 5 to 6"),
        (lambda: nearest(points, words, one, 0 * one, out), "words must be 1 to 256 within 5, but got 1 to 1"),
        (lambda: nearest(points, words, one, one, out[:, :2].copy()), r"out must be \(1, 3, 2\), but got \(1, 2, 2\)"),
        (lambda: runs(rows, 1, None, None, 3, words, twice, 6, out[:, :, :1].copy()), "first must be of tables within 5, but got 0"),
        (lambda: runs(rows, 1, None, None, 3, words, twice, 9, out), "number must be 1 to 2\\^bits, of 1 to 8 bits, but got 9"),
        (lambda: runs(rows, 1, None, None, 8, words, twice, 5, out[:, :2].copy()), r"codes must be \(1, 3, 2\), but got \(1, 2, 2\)"),
        (lambda: runs(rows, 1, None, np.full(8, 8, np.int32), 8, words, twice, 5, out), "order must be of entries below 8, but got 8"),
        (
            lambda: runs(
                native.floats(mx.zeros((1, 3, 12))),
                1,
                np.ones((1, 12), np.float32),
                None,
                8,
                words,
                np.zeros((1, 3), np.int32),
                5,
                np.zeros((1, 3, 3), np.uint8),
            ),
            r"divisor must be that of rows of 2\^k entries, but got 12",
        ),
        (lambda: planes(rows, *given, bits + 1, kept, out), "bits must be 0 to 8, of words within 7, but got 3"),
        (lambda: planes(rows, *given, bits, kept, out[:, :, :1].copy()), "codes must be of rows of 9 bits, but got 8"),
        (lambda: planes(rows, given[0], given[1] + 8, *given[2:], bits, kept, out), "planes must be of entries below 8, but got 8"),
        (
            lambda: moments(np.zeros((1, 3, 4)), np.zeros((1, 0, 4)), np.zeros((1, 0, 4)), np.zeros((1, 0), np.int64), np.zeros((1, 3))),
            r"words must be 1 to 2\^31 of all groups, but got 0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
