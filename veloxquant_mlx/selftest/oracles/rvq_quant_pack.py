"""Two-stage codes, value by value; packed through Python integers. Exact for every dtype: only the residual is rounded, once."""

import numpy as np


def quant_pack(rotated, centroids1, boundaries1, boundaries2, bits, residual: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """`residual`: the dtype that y - c is rounded to, the wider of the dtypes of y and c."""
    y = rotated.astype(np.float64)
    codes1 = _cells(y, boundaries1)
    with np.errstate(invalid="ignore"):
        left = _round(y - centroids1.astype(np.float64)[codes1], residual)
    return _pack(codes1, bits), _pack(_cells(left, boundaries2), bits)


def _cells(y: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    return (y[..., None] > boundaries.astype(np.float64)).sum(axis=-1)


def _round(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    mantissa, exponent = np.frexp(values)  # 8 significant bits, half to even; no subnormals in the cases
    return np.where(np.isfinite(values), np.ldexp(np.rint(mantissa * 256), exponent - 8), values)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    per = 32 // bits
    packed = np.zeros((codes.shape[0], -(-codes.shape[1] // per)), dtype=np.uint64)
    for row, line in enumerate(codes):
        for i, code in enumerate(line):
            packed[row, i // per] += int(code) << (i % per * bits)
    return packed
