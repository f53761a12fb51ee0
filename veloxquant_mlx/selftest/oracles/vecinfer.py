"""Vector quantization in float64. An index is masked where float32 could not tell the two nearest codewords apart."""

import numpy as np

FLOAT32 = 2.0**-24


def nearest(parts: np.ndarray, codebook: np.ndarray, error: np.ndarray | float = 0.0) -> np.ma.MaskedArray:
    """Indices of the nearest codewords of parts (..., sub_dim), each known up to `error`; exact ties go to the lowest, and are kept."""
    with np.errstate(over="ignore", invalid="ignore"):
        gaps = parts[..., None, :].astype(np.float64) - codebook.astype(np.float64)
        distances = (gaps**2).sum(axis=-1)
    distances = np.where(distances <= np.finfo(np.float32).max, distances, np.inf)  # NaN too
    best = distances.argmin(axis=-1)
    if codebook.shape[0] == 1:
        return np.ma.array(best, mask=False)
    least, second = np.moveaxis(np.sort(distances, axis=-1)[..., :2], -1, 0)
    finite = np.isfinite(second)
    room = np.subtract(second, least, where=finite, out=np.zeros_like(second))
    root = np.sqrt(second, where=finite, out=np.zeros_like(second))
    unsure = 4 * (codebook.shape[1] + 2) * FLOAT32 * np.where(finite, second, 0) + 4 * error * root
    mask = finite & (room > 0) & (room <= unsure)
    assert mask.sum() <= 0.05 * mask.size, "too many indices are left out of the comparison"
    return np.ma.array(best, mask=mask)


def quantize(x: np.ndarray, codebook: np.ndarray, sub_dim: int) -> np.ma.MaskedArray:
    return nearest(x.reshape(*x.shape[:-1], x.shape[-1] // sub_dim, sub_dim), codebook)


def dequantize(indices: np.ndarray, codebook: np.ndarray, out_dtype: object = None) -> np.ndarray:
    """Any index outside [0, C) reads the last codeword; the caller names the dtype of the result."""
    last = len(codebook) - 1
    wide = indices.astype(object)  # no integer type holds both int64 and uint64
    inside = np.array([i if 0 <= i <= last else last for i in wide.reshape(-1)], dtype=np.int64).reshape(indices.shape)
    return codebook.astype(np.float64)[inside].reshape(*indices.shape[:-1], indices.shape[-1] * codebook.shape[1])


def encode_decode(
    keys: np.ndarray, k_codebook: np.ndarray, sub_dim: int, H_mat: np.ndarray, smooth: np.ndarray | None = None
) -> tuple[np.ma.MaskedArray, np.ma.MaskedArray]:
    size = keys.shape[-1]
    factors = np.ones((1, size)) if smooth is None else smooth.astype(np.float64).reshape(-1, size)
    factors = np.where(factors > 1e-8, factors, 1.0)[:, None, :]
    scaled = keys.astype(np.float64) / factors
    matrix = H_mat.astype(np.float64)
    with np.errstate(invalid="ignore"):
        turned = scaled @ matrix
        error = 4 * FLOAT32 * np.sqrt(size) * np.linalg.norm(scaled, axis=-1)
    parts = turned.reshape(*turned.shape[:-1], size // sub_dim, sub_dim)
    indices = nearest(parts, k_codebook, np.where(np.isfinite(error), error, 0)[..., None])
    decoded = k_codebook.astype(np.float64)[np.ma.getdata(indices)].reshape(keys.shape) @ matrix.T * factors
    unsure = np.broadcast_to(np.ma.getmaskarray(indices).any(axis=-1, keepdims=True), keys.shape)
    return np.ma.array(decoded, mask=unsure), indices


def encode_decode_simple(values: np.ndarray, v_codebook: np.ndarray, sub_dim: int) -> tuple[np.ma.MaskedArray, np.ma.MaskedArray]:
    indices = quantize(values, v_codebook, sub_dim)
    decoded = v_codebook.astype(np.float64)[np.ma.getdata(indices)].reshape(values.shape)
    return np.ma.array(decoded, mask=np.repeat(np.ma.getmaskarray(indices), sub_dim, axis=-1)), indices


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix by its definition, orthonormal."""
    index = np.arange(size)
    ones = np.array([[bin(i & j).count("1") for j in index] for i in index])
    return (1 - 2 * (ones % 2)) / np.sqrt(size)
