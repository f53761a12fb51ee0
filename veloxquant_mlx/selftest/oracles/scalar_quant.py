"""Nearest centroids in float64. Values that float32 cannot tell apart are masked; exact ties are not: the lowest index wins them."""

import math

import numpy as np


def quantize(x: np.ndarray, centroids: np.ndarray, b: int) -> np.ndarray:
    assert centroids.shape == (2**b,)
    # One float32 subtraction: half an ulp of the larger operand.
    return _nearest(x, centroids, lambda x, c: 2.0**-24 * (np.abs(x) + np.abs(c)))


def dequantize(indices: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return centroids.astype(np.float64)[np.minimum(indices, len(centroids) - 1)]


def hadamard_quantize(x: np.ndarray, diag: np.ndarray, centroids: np.ndarray, b: int) -> np.ndarray:
    assert centroids.shape == (2**b,)
    dim = x.shape[1]
    with np.errstate(invalid="ignore"):
        y = sylvester(x.astype(np.float64) * diag) / math.sqrt(dim)
    # log2(D) additions and a multiplication in float32, each off by 2^-24 of at most ||x||_1 / sqrt(D).
    error = (math.log2(dim) + 2) * 2.0**-24 * np.abs(x.astype(np.float64)).sum(axis=1, keepdims=True) / math.sqrt(dim)
    return _nearest(y, centroids, lambda y, c: error[..., None] + 2.0**-24 * (np.abs(y) + np.abs(c)))


def sylvester(x: np.ndarray) -> np.ndarray:
    """H x along the last axis, H[i, j] = (-1)^popcount(i & j)."""
    n = np.arange(x.shape[-1])
    ones = np.bitwise_count(n[:, None] & n)
    return x @ (1.0 - 2.0 * (ones % 2))


def _nearest(x, centroids, error) -> np.ndarray:
    x, c = x.astype(np.float64)[..., None], centroids.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gaps = np.abs(x - c)
        gaps[np.isnan(gaps)] = np.inf
        best = gaps.argmin(axis=-1)
        least = np.take_along_axis(gaps, best[..., None], axis=-1)
        behind = gaps - least
        unsure = ((behind > 0) & np.isfinite(behind) & (behind <= 2 * error(x, c))).any(axis=-1)
    assert unsure.mean() <= 0.01 if unsure.size else True  # what is masked is not tested
    return np.ma.masked_array(best.astype(np.int64), mask=unsure)
