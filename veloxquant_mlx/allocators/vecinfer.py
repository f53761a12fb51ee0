"""VecInfer's vector quantization of keys and values, in MLX's own operations: the definition that the kernels are measured by.

    k~ = (k / lambda) H,    q~ = (q * lambda) H,    q~ . k~ = q . k  since H H^T = I      (Yao et al. 2025, arXiv 2510.06175, sec. 3)

lambda (the smooth factors) takes outlier channels out of the keys, H (an orthonormal Walsh-Hadamard matrix) spreads what is left.
A transformed vector is cut into D / sub_dim consecutive parts, and each is replaced by the index of its nearest codeword.
"""

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native import searching

FLOATS = (mx.float16, mx.bfloat16, mx.float32)
SMALLEST_SMOOTH = 1e-8  # a channel whose factor is not above this (or is NaN) is neither divided nor multiplied
BLOCK_DISTANCES = 1 << 20  # distances held at a time
SEED = 42
MAX_ITERATIONS = 30


def calibrate_smooth_factors(keys: mx.array, eps: float = 1e-4) -> mx.array:
    """lambda = sqrt(max(max_t |K_t|, eps)) per channel.

    Args:
        keys: (T, D), or (T, H, D) for factors per head; float16, bfloat16 or float32, T at least 1.
        eps: floor of the maximum, positive.

    Returns:
        (D,) or (H, D) float32.

    Raises:
        ValueError: another rank, no rows, or eps not positive.
        TypeError: another dtype.
    """
    _check_float("calibrate_smooth_factors", "keys", keys)
    if keys.ndim not in (2, 3) or keys.shape[0] < 1:
        raise ValueError(f"[calibrate_smooth_factors] keys must be (T, D) or (T, H, D) with T at least 1, but got {tuple(keys.shape)}.")
    if not 0 < eps < float("inf"):
        raise ValueError(f"[calibrate_smooth_factors] eps must be positive and finite, but got {eps}.")
    return mx.sqrt(mx.maximum(mx.abs(keys.astype(mx.float32)).max(axis=0), eps))


def walsh_hadamard_matrix(d: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The orthonormal, symmetric (d, d) Walsh-Hadamard matrix in Sylvester's order: entry (i, j) is (-1)^popcount(i & j) / sqrt(d).

    Raises:
        ValueError: d is not a power of two.
        TypeError: dtype is not float16, bfloat16 or float32.
    """
    if isinstance(d, bool) or not isinstance(d, int) or d < 1 or d & (d - 1):
        raise ValueError(f"[walsh_hadamard_matrix] d must be a power of two, but got {d}.")
    if dtype not in FLOATS:
        raise TypeError(f"[walsh_hadamard_matrix] dtype must be float16, bfloat16 or float32, but got {dtype}.")
    signs = np.ones((1, 1))
    while len(signs) < d:
        signs = np.block([[signs, signs], [signs, -signs]])
    return mx.array((signs / np.sqrt(d)).astype(np.float32)).astype(dtype)


def effective_smooth(smooth: mx.array) -> mx.array:
    """Smooth factors in float32 with 1 in place of those not above 1e-8, so that dividing and multiplying always undo each other."""
    factors = smooth.astype(mx.float32)
    return mx.where(factors > SMALLEST_SMOOTH, factors, 1.0)


def apply_dual_transform_keys(keys: mx.array, smooth: mx.array, hadamard: mx.array) -> mx.array:
    """k~ = (k / lambda) H.

    Args:
        keys: (..., D), or (..., H, S, D) with factors per head; float16, bfloat16 or float32.
        smooth: (D,), or (H, D) for keys with H heads on axis -3; rows never broadcast and are never averaged.
        hadamard: (D, D) orthonormal.

    Returns:
        The shape and dtype of `keys`.

    Raises:
        ValueError: shapes do not fit.
        TypeError: another dtype.

    Error: float32 arithmetic, one rounding to the dtype of `keys`.
    """
    factors = _factors("apply_dual_transform_keys", "keys", keys, smooth, hadamard, grouped=False)
    return ((keys.astype(mx.float32) / factors) @ hadamard.astype(mx.float32)).astype(keys.dtype)


def apply_dual_transform_queries(queries: mx.array, smooth: mx.array, hadamard: mx.array) -> mx.array:
    """q~ = (q * lambda) H, so that q~ . k~ = q . k.

    Args:
        queries: (..., D), or (..., H_q, S, D) with factors per head.
        smooth: (D,), or (H, D) with H_q a multiple of H: query head h takes row h // (H_q / H).
        hadamard: (D, D) orthonormal.

    Returns, Raises, Error: as `apply_dual_transform_keys`.
    """
    factors = _factors("apply_dual_transform_queries", "queries", queries, smooth, hadamard, grouped=True)
    return ((queries.astype(mx.float32) * factors) @ hadamard.astype(mx.float32)).astype(queries.dtype)


def train_codebook(x: mx.array, n_centroids: int, sub_dim: int) -> mx.array:
    """Lloyd's k-means over the sub-vectors of `x`, on the host; the same input gives the same codebook.

    Args:
        x: (..., D) float16, bfloat16 or float32, D a multiple of sub_dim; finite, at least one sub-vector.
        n_centroids: at least 1. With fewer sub-vectors than centroids, they are repeated.
        sub_dim: at least 1.

    Returns:
        (n_centroids, sub_dim) float32.

    Raises:
        ValueError: sizes do not fit, nothing to learn from, or NaN or infinity in `x`.
        TypeError: another dtype.

    Starts from distinct random rows (seed 42), moves an emptied centroid to the sub-vector farthest from its own, and stops after
    30 rounds or when the sum of squared distances changes by less than 1e-6 of itself.
    """
    _check_sub_vectors("train_codebook", x, sub_dim)
    if isinstance(n_centroids, bool) or not isinstance(n_centroids, int) or n_centroids < 1:
        raise ValueError(f"[train_codebook] n_centroids must be a positive integer, but got {n_centroids}.")
    if x.size == 0:
        raise ValueError(f"[train_codebook] x must have at least one sub-vector, but got {tuple(x.shape)}.")
    points = np.array(x.astype(mx.float32)).reshape(-1, sub_dim)
    if not np.isfinite(points).all():
        raise ValueError("[train_codebook] x must be finite, but got NaN or infinity.")
    return mx.array(trained(points[None], n_centroids)[0])


def trained(points: np.ndarray, count: int) -> np.ndarray:
    """`train_codebook` of each of some groups of finite sub-vectors: (G, N, sub_dim) float32 -> (G, count, sub_dim) float32."""
    groups, number, size = points.shape
    if number <= count:
        return np.stack([np.resize(own, (count, size)) for own in points])
    start = np.random.default_rng(SEED).choice(number, count, replace=False)
    words, own = points[:, start].astype(np.float64), points.astype(np.float64)
    active, previous = np.arange(groups), np.full(groups, np.inf)
    for _ in range(MAX_ITERATIONS):
        sums, counts, distances = _moments(own, words[active])
        moved = sums / np.maximum(counts, 1)[..., None]
        for g in np.flatnonzero((counts == 0).any(axis=1)):
            empty = np.flatnonzero(counts[g] == 0)
            moved[g, empty] = own[g, np.argsort(-distances[g], kind="stable")[: len(empty)]]
        words[active] = moved
        inertia = distances.sum(axis=1)
        left = ~(np.abs(previous - inertia) < 1e-6 * np.maximum(inertia, np.finfo(np.float64).tiny))
        if not left.all():
            active, own, inertia = active[left], own[left], inertia[left]
        previous = inertia
        if not active.size:
            break
    return words.astype(np.float32)


def worth_learning(points: np.ndarray, count: int) -> np.ndarray:
    """Points (N, size); the distinct ones where there are no more than `count`: k-means would start from copies and miss others."""
    some = np.ascontiguousarray(points[: 2 * count] + 0)  # not -0, whose bytes are others
    if len(set(some.view(np.dtype((np.void, some.shape[1] * some.itemsize))).reshape(-1).tolist())) > count:
        return points
    distinct = np.unique(points, axis=0)
    return distinct if len(distinct) <= count else points


def _moments(points: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `searching.moments`."""
    groups, count, size = words.shape
    if native.available() and size <= searching.MAX_SIZE:
        return searching.moments(points, words)
    sums, counts, distances = np.empty(words.shape), np.empty((groups, count), np.int64), np.empty(points.shape[:2])
    for g, own in enumerate(points):
        nearest, distances[g] = _assign(own, words[g])
        counts[g] = np.bincount(nearest, minlength=count)
        sums[g] = np.stack([np.bincount(nearest, weights=own[:, t], minlength=count) for t in range(size)], axis=1)
    return sums, counts, distances


def _assign(points: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    nearest, distances = np.empty(len(points), dtype=np.int64), np.empty(len(points))
    rows = max(1, BLOCK_DISTANCES // len(centroids))
    for a in range(0, len(points), rows):
        block = points[a : a + rows]
        squares = (block**2).sum(axis=1)[:, None] - 2 * block @ centroids.T + (centroids**2).sum(axis=1)
        nearest[a : a + rows] = squares.argmin(axis=1)
        distances[a : a + rows] = np.maximum(squares.min(axis=1), 0)
    return nearest, distances


def quantize_vq(x: mx.array, codebook: mx.array, sub_dim: int) -> mx.array:
    """Index of the nearest codeword of each sub-vector.

    Args:
        x: (..., D) float16, bfloat16 or float32, D a multiple of sub_dim.
        codebook: (C, sub_dim) float16, bfloat16 or float32, C at least 1; neither operand is narrowed to the other's dtype.
        sub_dim: at least 1.

    Returns:
        (..., D / sub_dim) int32.

    Raises:
        ValueError: shapes do not fit.
        TypeError: another dtype.

    Error: squared Euclidean distance by direct differences, summed in order in float32, each operation rounded by itself; of equally
    near codewords the lowest index. A distance that is NaN or beyond float32 is never the nearest; if all are, the index is 0.
    """
    _check_sub_vectors("quantize_vq", x, sub_dim)
    _check_float("quantize_vq", "codebook", codebook)
    if codebook.ndim != 2 or codebook.shape[0] < 1 or codebook.shape[1] != sub_dim:
        got = tuple(codebook.shape)
        raise ValueError(f"[quantize_vq] codebook must be (C, {sub_dim}) with C at least 1 for sub_dim {sub_dim}, but got {got}.")
    shape = (*x.shape[:-1], x.shape[-1] // sub_dim)
    if x.size == 0:
        return mx.zeros(shape, dtype=mx.int32)
    vectors, words = x.reshape(-1, sub_dim).astype(mx.float32), codebook.astype(mx.float32)
    rows = max(1, BLOCK_DISTANCES // words.shape[0])
    blocks = [_nearest(vectors[a : a + rows], words) for a in range(0, vectors.shape[0], rows)]
    return (blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)).reshape(shape)


def _nearest(vectors: mx.array, words: mx.array) -> mx.array:
    total = mx.zeros((vectors.shape[0], words.shape[0]))
    for t in range(words.shape[1]):
        difference = vectors[:, t, None] - words[:, t]
        total = total + difference * difference
    return mx.argmin(mx.where(mx.isnan(total), mx.inf, total), axis=-1).astype(mx.int32)


def dequantize_vq(indices: mx.array, codebook: mx.array) -> mx.array:
    """Codewords in place of their indices.

    Args:
        indices: (..., n_sub) integers; one that is negative or at least C reads the last codeword.
        codebook: (C, sub_dim) float16, bfloat16 or float32, C at least 1.

    Returns:
        (..., n_sub * sub_dim) in the dtype of `codebook`.

    Raises:
        ValueError: shapes do not fit.
        TypeError: another dtype.
    """
    _check_float("dequantize_vq", "codebook", codebook)
    if codebook.ndim != 2 or codebook.shape[0] < 1:
        raise ValueError(f"[dequantize_vq] codebook must be (C, sub_dim) with C at least 1, but got {tuple(codebook.shape)}.")
    if not isinstance(indices, mx.array) or not mx.issubdtype(indices.dtype, mx.integer):
        raise TypeError(f"[dequantize_vq] indices must be integers, but got {getattr(indices, 'dtype', type(indices).__name__)}.")
    if indices.ndim < 1:
        raise ValueError(f"[dequantize_vq] indices must be (..., n_sub), but got {tuple(indices.shape)}.")
    shape = (*indices.shape[:-1], indices.shape[-1] * codebook.shape[1])
    if 0 in shape:
        return mx.zeros(shape, dtype=codebook.dtype)
    return codebook[clamped_indices(indices, codebook.shape[0])].reshape(shape)


def clamped_indices(indices: mx.array, count: int) -> mx.array:
    """`indices` as uint32 with every one outside [0, count) replaced by count - 1."""
    if indices.dtype in (mx.int64, mx.uint64):  # before the high words are dropped
        indices = mx.where((indices < 0) | (indices >= count), count - 1, indices)
    return mx.minimum(indices.astype(mx.uint32), mx.array(count - 1, dtype=mx.uint32))


def compute_query_lut(q_tilde: mx.array, codebook: mx.array, sub_dim: int) -> mx.array:
    """LUT[..., j, c] = q~_j . codeword_c; the score of a key is the sum over j of LUT[j, index_j].

    Args:
        q_tilde: (..., D) transformed queries, float16, bfloat16 or float32.
        codebook: (C, sub_dim) float16, bfloat16 or float32.
        sub_dim: at least 1, divides D.

    Returns:
        (..., D / sub_dim, C) in the dtype of `q_tilde`.

    Raises:
        ValueError: shapes do not fit.
        TypeError: another dtype.

    Error: float32 arithmetic, one rounding to the dtype of `q_tilde`.
    """
    _check_sub_vectors("compute_query_lut", q_tilde, sub_dim, "q_tilde")
    _check_float("compute_query_lut", "codebook", codebook)
    if codebook.ndim != 2 or codebook.shape[0] < 1 or codebook.shape[1] != sub_dim:
        got = tuple(codebook.shape)
        raise ValueError(f"[compute_query_lut] codebook must be (C, {sub_dim}) with C at least 1 for sub_dim {sub_dim}, but got {got}.")
    parts = q_tilde.astype(mx.float32).reshape(*q_tilde.shape[:-1], q_tilde.shape[-1] // sub_dim, sub_dim)
    return (parts @ codebook.astype(mx.float32).T).astype(q_tilde.dtype)


def _check_float(function: str, name: str, array: mx.array) -> None:
    if not isinstance(array, mx.array):
        raise TypeError(f"[{function}] {name} must be an mx.array, but got {type(array).__name__}.")
    if array.dtype not in FLOATS:
        raise TypeError(f"[{function}] {name} must be float16, bfloat16 or float32, but got {array.dtype}.")


def _check_sub_vectors(function: str, x: mx.array, sub_dim: int, name: str = "x") -> None:
    _check_float(function, name, x)
    if isinstance(sub_dim, bool) or not isinstance(sub_dim, int) or sub_dim < 1:
        raise ValueError(f"[{function}] sub_dim must be a positive integer, but got {sub_dim}.")
    if x.ndim < 1 or x.shape[-1] % sub_dim:
        raise ValueError(f"[{function}] {name} must be (..., D) with D a multiple of sub_dim {sub_dim}, but got {tuple(x.shape)}.")


def _factors(function: str, name: str, x: mx.array, smooth: mx.array, hadamard: mx.array, grouped: bool) -> mx.array:
    """Effective smooth factors, shaped to broadcast against `x`."""
    for what, array in ((name, x), ("smooth", smooth), ("hadamard", hadamard)):
        _check_float(function, what, array)
    if x.ndim < 1:
        raise ValueError(f"[{function}] {name} must be (..., D), but got {tuple(x.shape)}.")
    size = x.shape[-1]
    if tuple(hadamard.shape) != (size, size):
        raise ValueError(f"[{function}] hadamard must be ({size}, {size}), but got {tuple(hadamard.shape)}.")
    if tuple(smooth.shape) == (size,):
        return effective_smooth(smooth)
    heads = x.shape[-3] if x.ndim >= 3 else 0
    rows = smooth.shape[0] if smooth.ndim == 2 else 0
    fits = rows > 0 and smooth.shape[1] == size and heads > 0 and (heads % rows == 0 if grouped else heads == rows)
    if not fits:
        allowed = f"({size},) or (H, {size}) with {'H a divisor of the' if grouped else 'H the'} number of heads"
        raise ValueError(f"[{function}] smooth must be {allowed} of {name} {tuple(x.shape)}, but got {tuple(smooth.shape)}.")
    return mx.repeat(effective_smooth(smooth), heads // rows, axis=0)[:, None, :]
