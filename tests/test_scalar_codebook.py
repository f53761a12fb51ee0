"""Scalar codebooks and their 32-bit packing: published tables, cells against float64, layouts against Python integers."""

import math
import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.metal_emulation.emulator import EmulatedMetal, unavailable
from veloxquant_mlx.allocators.scalar_codebook import ScalarCodebook, _pack_indices, _unpack_indices
from veloxquant_mlx.metal import rvq_quant_pack
from veloxquant_mlx.metal._backend import cuda_available, forced, metal_available
from veloxquant_mlx.metal._kernel import using

# Max (1960), table I, the positive half.
MAX_1960 = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3880, 0.6567, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}
# Mean squared error on N(0, 1) of two Lloyd-Max stages of equal bits: Monte Carlo figures, good to their last digit or two.
TWO_STAGE_MSE = {1: 0.1307, 2: 0.0197, 3: 0.00195, 4: 0.00018}
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
EPSILON = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), dtype=np.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", (64, 80, 128, 1024))
@pytest.mark.parametrize("bits", MAX_1960)
def test_first_stage_is_lloyd_max(bits: int, dim: int, dtype: mx.Dtype) -> None:
    book = ScalarCodebook.gaussian(bits, dim, dtype)
    assert book.bits == bits
    assert book.centroids.dtype == book.boundaries.dtype == dtype
    half = exact(book.centroids)[2 ** (bits - 1) :] * math.sqrt(dim)
    np.testing.assert_allclose(half, MAX_1960[bits], rtol=EPSILON[dtype], atol=6e-5)  # one rounding; half a unit of the last digit
    np.testing.assert_array_equal(exact(book.centroids), -exact(book.centroids)[::-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_boundaries_are_midpoints(bits: int, dtype: mx.Dtype) -> None:
    book = ScalarCodebook.residual(bits, 64, 2, dtype)
    centroids, boundaries = exact(book.centroids), exact(book.boundaries)
    assert boundaries.shape == (2**bits - 1,)
    middles = (centroids[1:] + centroids[:-1]) / 2
    np.testing.assert_allclose(boundaries, middles, rtol=EPSILON[dtype], atol=2.0**-25)  # one rounding, float16 may be subnormal
    assert (np.diff(boundaries) >= 0).all()


@pytest.mark.parametrize("bits", TWO_STAGE_MSE)
def test_two_stages_reach_their_published_error(bits: int) -> None:
    first, second = ScalarCodebook.gaussian(bits, 1, mx.float32), ScalarCodebook.residual(bits, 1, dtype=mx.float32)
    x = mx.array(np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32))
    left = x - first.dequantize(first.quantize(x))
    left = left - second.dequantize(second.quantize(left))
    # 1e6 samples: 0.2 % of sampling noise; the published figures have two to four digits.
    assert np.mean(exact(left) ** 2) == pytest.approx(TWO_STAGE_MSE[bits], rel=0.03)


@pytest.mark.parametrize("book_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_counts_boundaries_exactly(dtype: mx.Dtype, book_dtype: mx.Dtype) -> None:
    book = ScalarCodebook.gaussian(4, 64, book_dtype)
    edges = np.concatenate([exact(book.boundaries), [0.0, 9.0, -9.0, math.inf, -math.inf]]).astype(np.float32)
    values = np.concatenate([edges, np.nextafter(edges, np.float32(9)), np.nextafter(edges, np.float32(-9))])
    y = mx.array(np.resize(values, (3, 20))).astype(dtype)
    want = (exact(y)[..., None] > exact(book.boundaries)).sum(axis=-1)
    codes = book.quantize(y)
    assert codes.dtype == mx.uint8
    np.testing.assert_array_equal(np.array(codes), want)


def test_ties_nan_and_empty() -> None:
    book = ScalarCodebook.of([-3, -1, 1, 3])
    y = mx.array([-2.0, 0.0, 2.0, -0.0, math.nan, math.inf, -math.inf])
    assert book.quantize(y).tolist() == [0, 1, 2, 1, 0, 3, 0]
    assert book.quantize(mx.zeros((0, 4))).shape == (0, 4)
    assert book.dequantize(mx.zeros((3, 0), dtype=mx.uint8)).shape == (3, 0)


def test_dequantize_inverts_and_clamps() -> None:
    book = ScalarCodebook.gaussian(3, 128)
    codes = mx.arange(8, dtype=mx.uint8)
    values = book.dequantize(codes)
    assert values.dtype == mx.float16
    assert book.quantize(values).tolist() == list(range(8))
    assert book.dequantize(mx.array([7, 8, 255], dtype=mx.uint8)).tolist() == [values[7].item()] * 3
    assert book.dequantize(mx.array([2**32 - 1], dtype=mx.uint32)).item() == values[7].item()


def test_a_codebook_crosses_threads() -> None:
    book = ScalarCodebook.gaussian(2, 64)
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(book.quantize(mx.array([-1.0, 1.0])).tolist()))
    thread.start()
    thread.join()
    assert results == [[0, 3]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_packing_round_trip_and_layout(data: st.DataObject) -> None:
    bits = data.draw(st.integers(1, 8))
    shape = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 70)))
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 255)))
    packed = _pack_indices(mx.array(codes), bits)
    per = 32 // bits
    want = np.zeros((shape[0], -(-shape[1] // per)), dtype=np.uint32)
    for row, line in enumerate(codes):
        for i, code in enumerate(line):
            want[row, i // per] |= np.uint32((int(code) % 2**bits) << (i % per * bits))
    assert packed.dtype == mx.uint32
    np.testing.assert_array_equal(np.array(packed), want)
    np.testing.assert_array_equal(np.array(_unpack_indices(packed, bits, shape[1])), codes & (2**bits - 1))


@pytest.mark.parametrize("bits", (1, 2, 4, 8))
def test_words_are_the_bytes_of_an_lsb_first_stream(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 64)).astype(np.uint8)
    stream = np.packbits(np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits].reshape(3, -1), axis=-1, bitorder="little")
    np.testing.assert_array_equal(np.array(_pack_indices(mx.array(codes), bits)).view(np.uint8), stream)


@pytest.mark.parametrize("book_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", (2, 3))
def test_fused_kernel_is_two_codebooks_and_two_packings(bits: int, dtype: mx.Dtype, book_dtype: mx.Dtype) -> None:
    """`rvq_quant_pack` is bit-identical to ScalarCodebook.quantize + _pack_indices run twice, for every dtype."""
    first, second = ScalarCodebook.gaussian(bits, 128, book_dtype), ScalarCodebook.residual(bits, 128, dtype=book_dtype)
    y = (mx.array(np.random.default_rng(bits).standard_normal((65, 128)).astype(np.float32)) / math.sqrt(128)).astype(dtype)
    codes = first.quantize(y)
    want = [_pack_indices(c, bits).tolist() for c in (codes, second.quantize(y - first.dequantize(codes)))]
    arguments = (y, first.centroids, first.boundaries, second.boundaries, bits)
    with forced("cpu"):
        assert [p.tolist() for p in rvq_quant_pack(*arguments)] == want
    if metal_available() or cuda_available():
        assert [p.tolist() for p in rvq_quant_pack(*arguments)] == want
    elif unavailable():
        pytest.skip(f"the definition agrees; {unavailable()}")
    else:
        with using(EmulatedMetal()):
            assert [p.tolist() for p in rvq_quant_pack(*arguments)] == want


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    (
        (lambda: ScalarCodebook.of([1, 2, 3]), ValueError, "2\\*\\*bits values"),
        (lambda: ScalarCodebook.of([1.0]), ValueError, "2\\*\\*bits values"),
        (lambda: ScalarCodebook.of([[1, 2]]), ValueError, "2\\*\\*bits values"),
        (lambda: ScalarCodebook.of([2, 1]), ValueError, "ascending"),
        (lambda: ScalarCodebook.of([0, math.nan]), ValueError, "finite"),
        (lambda: ScalarCodebook.of([0, 70000]), ValueError, "finite"),
        (lambda: ScalarCodebook.of([0, 1], mx.int8), ValueError, "dtype"),
        (lambda: ScalarCodebook.gaussian(0, 64), ValueError, "bits"),
        (lambda: ScalarCodebook.gaussian(9, 64), ValueError, "bits"),
        (lambda: ScalarCodebook.gaussian(2, 0), ValueError, "dim"),
        (lambda: ScalarCodebook.residual(2, -1), ValueError, "dim"),
        (lambda: ScalarCodebook.of([0, 1]).quantize(mx.array([1])), TypeError, "y must be"),
        (lambda: ScalarCodebook.of([0, 1]).dequantize(mx.array([1])), TypeError, "codes must be"),
        (lambda: _pack_indices(mx.zeros((4,), dtype=mx.uint8), 0), ValueError, "bits"),
        (lambda: _pack_indices(mx.zeros((4,), dtype=mx.uint8), 9), ValueError, "bits"),
        (lambda: _pack_indices(mx.array(1, dtype=mx.uint8), 2), ValueError, "last axis"),
        (lambda: _pack_indices(mx.zeros((4,)), 2), TypeError, "codes must be"),
        (lambda: _unpack_indices(mx.zeros((2, 3), dtype=mx.uint32), 2, 64), ValueError, "4 words"),
        (lambda: _unpack_indices(mx.zeros((2, 3), dtype=mx.uint32), 2, -1), ValueError, "dim"),
    ),
)
def test_refusals(attempt, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()
