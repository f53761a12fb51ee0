"""The search for codewords and the packing of codes at every SIMD level, against float64 NumPy and bit streams written out."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from tests import codec_oracles
from veloxquant_mlx import native
from veloxquant_mlx.allocators.vecinfer import quantize_vq, train_codebook
from veloxquant_mlx.codecs import parse_codec
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
    found = np.array(searching.codes(mx.array(points)[None, :, None], words)).reshape(-1)
    every = distances(points, words)
    assert (every[np.arange(203), found] <= every.min(axis=1) * (1 + 1e-6) + 1e-12).all()
    assert np.array_equal(found, np.array(quantize_vq(mx.array(points), mx.array(words), size)).reshape(-1))
    assert np.array_equal(searching.nearest(points, words), every.argmin(axis=1))


def test_a_table_for_each_column(level: str) -> None:
    rng = np.random.default_rng(0)
    points, words = rng.standard_normal((2, 150, 3, 4)).astype(np.float32), rng.standard_normal((64, 4)).astype(np.float32)
    first, number = np.array([[0, 5, 17], [1, 40, 63]]), np.array([[5, 12, 47], [39, 24, 1]])
    found = np.array(searching.codes(mx.array(points), words, first, number))
    for h, c in np.ndindex(2, 3):
        own = words[first[h, c] : first[h, c] + number[h, c]]
        assert np.array_equal(found[h, :, c], distances(points[h, :, c], own).argmin(axis=1))


def test_equals_and_what_is_no_number(level: str) -> None:
    """The lowest of equals; a distance that is NaN or infinite is never the nearest."""
    words = np.array([[np.nan, 0], [3, 0], [1, 1], [1, 1], [-3, 0], [np.inf, 0]], np.float32)
    points = np.array([[0, 0], [0.9, 1], [np.nan, 0], [np.inf, 0], [-2, 0]], np.float32)
    assert np.array(searching.codes(mx.array(points)[None, :, None], words)).reshape(-1).tolist() == [2, 2, 0, 0, 4]
    assert searching.nearest(points, words).tolist() == [2, 2, 0, 0, 4]


def test_packed_codes_are_a_bit_stream(level: str) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 9, (2, 21))
    place = 3 + np.cumsum(bits, axis=1) - bits
    size = int(-(-(place + bits).max() // 8))
    codes = rng.integers(0, 256, (2, 40, 21)).astype(np.uint8)
    found = np.array(searching.packed(mx.array(codes), place, bits, size))
    stream = codec_oracles.unpack(found, 1, size * 8)
    for h, i in np.ndindex(2, 21):
        own = stream[h, :, place[h, i] : place[h, i] + bits[h, i]]
        assert np.array_equal((own << np.arange(bits[h, i])).sum(axis=1), codes[h, :, i] & (1 << bits[h, i]) - 1)
    assert stream.sum() == sum(bin(c & (1 << bits[h, i]) - 1).count("1") for (h, _, i), c in np.ndenumerate(codes))


@pytest.mark.parametrize("spec", ["commvq-2", "commvq-3.5", "commvq-2:product", "vecinfer-1.75", "vecinfer-1"])
def test_codes_are_those_of_mlx_operations(spec: str) -> None:
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


def test_refuses_what_does_not_fit() -> None:
    points, words, one = np.zeros((1, 3, 2, 4), np.float32), np.zeros((5, 4), np.float32), np.ones((1, 2), np.int32)
    out = np.zeros((1, 3, 2), np.uint8)
    nearest, pack = native._native.nearest, native._native.pack
    for call, message in (
        (lambda: nearest(points, words[:, :3].copy(), one, one, out), r"words must be \(5, 4\), but got \(5, 3\)"),
        (lambda: nearest(points, words, one + 4, one, out), "words must be 1 to 256 within 5, but got 5 to 6"),
        (lambda: nearest(points, words, one, 0 * one, out), "words must be 1 to 256 within 5, but got 1 to 1"),
        (lambda: nearest(points, words, one, one, out[:, :2].copy()), r"out must be \(1, 3, 2\), but got \(1, 2, 2\)"),
        (lambda: pack(out, one, 9 * one, out), "bits must be 0 to 8, but got 9"),
        (lambda: pack(out, 9 * one, 8 * one, out), "place must be within 2 bytes, but got 9"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
