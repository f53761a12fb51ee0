"""VecInfer's definition in MLX: transforms, codebooks, quantization and look-up tables, against float64."""

import re

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant_mlx.allocators import vecinfer
from veloxquant_mlx.allocators.vecinfer import (
    apply_dual_transform_keys,
    apply_dual_transform_queries,
    calibrate_smooth_factors,
    compute_query_lut,
    dequantize_vq,
    quantize_vq,
    train_codebook,
    walsh_hadamard_matrix,
)
from veloxquant_mlx.selftest.oracles import vecinfer as oracle

NARROW = (mx.float16, mx.bfloat16)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def refused(error: type[Exception], message: str) -> "pytest.RaisesExc":
    return pytest.raises(error, match=re.escape(message))


# --- smooth factors and transforms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 16), (7, 3, 16)])
def test_smooth_factors_are_roots_of_the_largest_magnitudes(shape: tuple[int, ...]) -> None:
    keys = normal(*shape)
    keys[..., 2] = 0
    got = np.array(calibrate_smooth_factors(mx.array(keys), eps=1e-2))
    np.testing.assert_allclose(got, np.sqrt(np.maximum(np.abs(keys.astype(np.float64)).max(axis=0), 1e-2)), rtol=2e-7)
    assert (got[..., 2] == np.float32(0.1)).all()


def test_smooth_factors_refuse() -> None:
    with refused(ValueError, "[calibrate_smooth_factors] keys must be (T, D) or (T, H, D) with T at least 1, but got (16,)."):
        calibrate_smooth_factors(mx.zeros(16))
    with refused(ValueError, "but got (0, 16)."):
        calibrate_smooth_factors(mx.zeros((0, 16)))
    with refused(ValueError, "eps must be positive and finite, but got 0"):
        calibrate_smooth_factors(mx.zeros((2, 16)), eps=0)
    with refused(TypeError, "keys must be float16, bfloat16 or float32, but got mlx.core.int32"):
        calibrate_smooth_factors(mx.zeros((2, 16), dtype=mx.int32))


@pytest.mark.parametrize("size", [1, 2, 8, 64, 256])
def test_walsh_hadamard_matrix_is_sylvesters(size: int) -> None:
    got = np.array(walsh_hadamard_matrix(size))
    np.testing.assert_array_equal(got, oracle.hadamard(size).astype(np.float32))
    assert walsh_hadamard_matrix(size, mx.float16).dtype == mx.float16


@pytest.mark.parametrize("size", [0, -4, 3, 36, 96, 144, 576, True, 4.0])
def test_walsh_hadamard_matrix_needs_a_power_of_two(size: object) -> None:
    with refused(ValueError, f"[walsh_hadamard_matrix] d must be a power of two, but got {size}."):
        walsh_hadamard_matrix(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows", [None, 1, 2])
def test_transformed_products_are_the_products(rows: int | None, symmetric: bool) -> None:
    """Six query heads on two key heads; a channel of factor 0, which must stay out of both sides."""
    keys, queries = normal(1, 2, 5, 16), normal(1, 6, 3, 16, seed=1)
    matrix = oracle.hadamard(16) if symmetric else np.linalg.qr(normal(16, 16, seed=2))[0]
    smooth = np.random.default_rng(3).uniform(0.2, 5, 16 if rows is None else (rows, 16)).astype(np.float32)
    smooth[..., 4] = 0
    for_keys = mx.array(smooth if rows is None else np.broadcast_to(smooth, (2, 16)))
    hadamard = mx.array(matrix.astype(np.float32))
    k = np.array(apply_dual_transform_keys(mx.array(keys), for_keys, hadamard)).astype(np.float64)
    q = np.array(apply_dual_transform_queries(mx.array(queries), mx.array(smooth), hadamard)).astype(np.float64)
    want = queries.astype(np.float64) @ np.repeat(keys.astype(np.float64), 3, axis=1).swapaxes(-1, -2)
    np.testing.assert_allclose(q @ np.repeat(k, 3, axis=1).swapaxes(-1, -2), want, atol=2e-5)


def test_transform_is_division_then_rotation() -> None:
    keys, smooth, matrix = normal(4, 8), np.linspace(0.5, 2, 8, dtype=np.float32), np.linalg.qr(normal(8, 8, seed=1))[0]
    got = np.array(apply_dual_transform_keys(mx.array(keys), mx.array(smooth), mx.array(matrix)))
    np.testing.assert_allclose(got, (keys / smooth.astype(np.float64)) @ matrix, atol=1e-6)


@pytest.mark.parametrize("dtype", NARROW)
def test_transform_rounds_once(dtype: mx.Dtype) -> None:
    keys = mx.array(normal(4, 64)).astype(dtype)
    smooth, hadamard = mx.array(np.linspace(0.5, 2, 64, dtype=np.float32)), walsh_hadamard_matrix(64)
    for apply in (apply_dual_transform_keys, apply_dual_transform_queries):
        got = apply(keys, smooth, hadamard)
        assert got.dtype == dtype
        assert mx.array_equal(got, apply(keys.astype(mx.float32), smooth, hadamard).astype(dtype))


@pytest.mark.parametrize(
    ("apply", "heads", "smooth"),
    [
        (apply_dual_transform_keys, 4, (2, 16)),
        (apply_dual_transform_keys, 4, (1, 16)),
        (apply_dual_transform_keys, 4, (8,)),
        (apply_dual_transform_keys, 4, (4, 1, 16)),
        (apply_dual_transform_queries, 4, (3, 16)),
        (apply_dual_transform_queries, 4, (8, 16)),
        (apply_dual_transform_queries, 4, (0, 16)),
    ],
)
def test_rows_that_fit_no_heads_are_refused_not_averaged(apply: object, heads: int, smooth: tuple[int, ...]) -> None:
    with refused(ValueError, f"but got {smooth}."):
        apply(mx.zeros((1, heads, 3, 16)), mx.ones(smooth), walsh_hadamard_matrix(16))  # type: ignore[operator]


def test_transform_refuses_another_matrix() -> None:
    with refused(ValueError, "[apply_dual_transform_keys] hadamard must be (16, 16), but got (8, 8)."):
        apply_dual_transform_keys(mx.zeros((3, 16)), mx.ones(16), walsh_hadamard_matrix(8))
    with refused(TypeError, "[apply_dual_transform_queries] smooth must be float16"):
        apply_dual_transform_queries(mx.zeros((3, 16)), mx.ones(16, dtype=mx.int32), walsh_hadamard_matrix(16))


# --- codebooks ---------------------------------------------------------------------------------------------------------------------


def test_codebook_finds_planted_clusters() -> None:
    """Two, since k-means finds two far ones from any start."""
    centres = np.array([[10, 0], [0, 10]], dtype=np.float32)
    points = (centres[np.arange(300) % 2] + 0.01 * normal(300, 2)).reshape(150, 4)
    got = np.array(train_codebook(mx.array(points), 2, 2))
    np.testing.assert_allclose(sorted(map(tuple, got)), sorted(map(tuple, centres)), atol=0.01)


def test_codebook_is_reproducible_and_better_than_its_start() -> None:
    x = normal(500, 8)
    first, second = (np.array(train_codebook(mx.array(x), 16, 4)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    parts = x.reshape(-1, 4).astype(np.float64)
    start = parts[np.random.default_rng(42).choice(len(parts), 16, replace=False)]

    def loss(book: np.ndarray) -> float:
        return float(((parts[:, None] - book) ** 2).sum(axis=-1).min(axis=1).mean())

    assert loss(first) < 0.75 * loss(start)
    nearest = oracle.nearest(parts, first).data
    means = np.stack([parts[nearest == c].mean(axis=0) for c in range(16)])
    np.testing.assert_allclose(first, means, atol=0.05)  # Lloyd's fixed point, but for the last of at most 30 rounds


def test_codebook_of_repeated_points_has_no_idle_centroid_far_off() -> None:
    points = np.repeat(np.array([[1, 2], [3, 4], [5, 6], [-7, 8]], dtype=np.float32), 25, axis=0)
    got = np.array(train_codebook(mx.array(points), 6, 2))
    assert {tuple(row) for row in got} == {tuple(row) for row in points}


def test_codebook_with_fewer_points_than_centroids_repeats_them() -> None:
    got = np.array(train_codebook(mx.array([[1.0, 2.0, 3.0, 4.0]]), 5, 2))
    np.testing.assert_array_equal(got, [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]])


def test_codebook_refuses() -> None:
    x = mx.zeros((4, 8))
    with refused(ValueError, "[train_codebook] x must have at least one sub-vector, but got (0, 8)."):
        train_codebook(mx.zeros((0, 8)), 4, 2)
    with refused(ValueError, "[train_codebook] x must be finite, but got NaN or infinity."):
        train_codebook(mx.array([[1.0, float("nan")]]), 4, 2)
    with refused(ValueError, "[train_codebook] x must be (..., D) with D a multiple of sub_dim 3, but got (4, 8)."):
        train_codebook(x, 4, 3)
    with refused(ValueError, "[train_codebook] n_centroids must be a positive integer, but got 0."):
        train_codebook(x, 0, 2)
    with refused(ValueError, "[train_codebook] sub_dim must be a positive integer, but got 0."):
        train_codebook(x, 4, 0)
    with refused(TypeError, "[train_codebook] x must be float16"):
        train_codebook(x.astype(mx.int32), 4, 2)


# --- quantization ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 20), parts=st.integers(1, 5), sub_dim=st.integers(1, 6), count=st.integers(1, 20), seed=st.integers(0, 2**32 - 1)
)
def test_indices_are_of_the_nearest_codewords(rows: int, parts: int, sub_dim: int, count: int, seed: int) -> None:
    """On a grid where float32 distances are exact, ties included."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(-16, 17, (rows, parts * sub_dim)) / 8).astype(np.float32)
    book = (rng.integers(-16, 17, (count, sub_dim)) / 8).astype(np.float32)
    got = quantize_vq(mx.array(x), mx.array(book), sub_dim)
    assert got.dtype == mx.int32
    want = oracle.quantize(x, book, sub_dim)
    assert not want.mask.any()
    np.testing.assert_array_equal(np.array(got), want.data)
    decoded = dequantize_vq(got, mx.array(book))
    np.testing.assert_array_equal(np.array(decoded), oracle.dequantize(want.data, book).reshape(x.shape))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, book = mx.array(normal(50, 8)), mx.array(normal(16, 4, seed=1))
    whole = quantize_vq(x, book, 4)
    monkeypatch.setattr(vecinfer, "BLOCK_DISTANCES", 7 * 16)
    assert mx.array_equal(quantize_vq(x, book, 4), whole)
    points, trained = normal(90, 4), train_codebook(mx.array(normal(90, 4)), 8, 2)
    monkeypatch.setattr(vecinfer, "BLOCK_DISTANCES", 64)
    assert mx.array_equal(train_codebook(mx.array(points), 8, 2), trained)


def test_nan_and_overflow_are_nobodys_neighbour() -> None:
    nan, inf = float("nan"), float("inf")
    book = mx.array([[nan, 0.0], [5.0, 5.0], [inf, 0.0], [1.0, 1.0]])
    x = mx.array([[1.0, 1.0], [nan, 1.0], [inf, 0.0], [1e30, 0.0], [4.0, 4.0]])
    assert quantize_vq(x, book, 2).tolist() == [[3], [0], [0], [0], [1]]


@pytest.mark.parametrize("dtype", NARROW)
def test_no_operand_is_narrowed(dtype: mx.Dtype) -> None:
    book = mx.array([[1.0004], [1.0001]])
    assert quantize_vq(mx.ones((2, 1), dtype=dtype), book, 1).tolist() == [[1], [1]]
    assert quantize_vq(mx.array([[1.0004]]), mx.array([[1.0], [2.0]]).astype(dtype), 1).item() == 0


@pytest.mark.parametrize("shape", [(16, 1), (16,), (16, 5), (0, 4), (2, 16, 4)])
def test_another_codebook_is_refused_not_broadcast(shape: tuple[int, ...]) -> None:
    with refused(ValueError, f"codebook must be (C, 4) with C at least 1 for sub_dim 4, but got {shape}."):
        quantize_vq(mx.zeros((3, 8)), mx.zeros(shape), 4)
    with refused(ValueError, f"codebook must be (C, 4) with C at least 1 for sub_dim 4, but got {shape}."):
        compute_query_lut(mx.zeros((3, 8)), mx.zeros(shape), 4)


def test_quantize_refuses() -> None:
    with refused(ValueError, "[quantize_vq] x must be (..., D) with D a multiple of sub_dim 4, but got (3, 10)."):
        quantize_vq(mx.zeros((3, 10)), mx.zeros((16, 4)), 4)
    with refused(TypeError, "[quantize_vq] x must be float16, bfloat16 or float32, but got mlx.core.int32."):
        quantize_vq(mx.zeros((3, 8), dtype=mx.int32), mx.zeros((16, 4)), 4)
    with refused(TypeError, "[quantize_vq] codebook must be an mx.array, but got ndarray."):
        quantize_vq(mx.zeros((3, 8)), np.zeros((16, 4)), 4)  # type: ignore[arg-type]


def test_empty_input_has_an_empty_result() -> None:
    book = mx.zeros((16, 4))
    assert quantize_vq(mx.zeros((0, 8)), book, 4).shape == (0, 2)
    assert quantize_vq(mx.zeros((3, 0)), book, 4).shape == (3, 0)
    assert dequantize_vq(mx.zeros((0, 2), dtype=mx.int32), book).shape == (0, 8)
    assert compute_query_lut(mx.zeros((0, 8)), book, 4).shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64])
def test_index_out_of_range_reads_the_last_codeword(dtype: mx.Dtype) -> None:
    info = np.iinfo(str(dtype).removeprefix("mlx.core."))
    indices = np.array([0, 2, 3, info.max, info.max - 1, *([-1, info.min] if info.min else [])], dtype=info.dtype)
    got = dequantize_vq(mx.array(indices), mx.array([[1.0], [2.0], [3.0]]))
    assert got.tolist() == [1.0] + [3.0] * (len(indices) - 1)


def test_dequantize_refuses() -> None:
    book = mx.zeros((4, 2))
    with refused(TypeError, "[dequantize_vq] indices must be integers, but got mlx.core.float32."):
        dequantize_vq(mx.zeros(3), book)
    with refused(ValueError, "[dequantize_vq] codebook must be (C, sub_dim) with C at least 1, but got (4,)."):
        dequantize_vq(mx.zeros(3, dtype=mx.int32), mx.zeros(4))
    with refused(ValueError, "[dequantize_vq] indices must be (..., n_sub), but got ()."):
        dequantize_vq(mx.array(0), book)


# --- look-up tables ----------------------------------------------------------------------------------------------------------------


def test_table_entries_sum_to_the_score() -> None:
    queries, book = normal(2, 3, 16), normal(32, 4, seed=1)
    keys = quantize_vq(mx.array(normal(9, 16, seed=2)), mx.array(book), 4)
    lut = compute_query_lut(mx.array(queries), mx.array(book), 4)
    assert lut.shape == (2, 3, 4, 32)
    index = np.array(keys)
    got = sum(np.array(lut)[:, :, j, index[:, j]].astype(np.float64) for j in range(4))
    decoded = np.array(dequantize_vq(keys, mx.array(book))).astype(np.float64)
    np.testing.assert_allclose(got, queries.astype(np.float64) @ decoded.T, atol=1e-5)


@pytest.mark.parametrize("dtype", NARROW)
def test_table_is_rounded_once(dtype: mx.Dtype) -> None:
    queries, book = mx.array(normal(3, 16)).astype(dtype), mx.array(normal(32, 4, seed=1))
    got = compute_query_lut(queries, book, 4)
    assert got.dtype == dtype
    assert mx.array_equal(got, compute_query_lut(queries.astype(mx.float32), book, 4).astype(dtype))
    with refused(ValueError, "[compute_query_lut] q_tilde must be (..., D) with D a multiple of sub_dim 3"):
        compute_query_lut(queries, mx.zeros((4, 3)), 3)
