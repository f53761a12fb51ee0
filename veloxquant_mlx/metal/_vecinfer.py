"""VecInfer's vector quantization in one dispatch: nearest codewords, the gather back, and the whole key path.

    keys:   z = k / lambda,  y = z H,  index = nearest codeword of each part of y,  k^ = (y^ H^T) * lambda
    values: index = nearest codeword of each part of v,  v^ = codewords                 (Yao et al. 2025, arXiv 2510.06175)

The definition is `veloxquant_mlx.allocators.vecinfer`. H comes after z, as in `apply_dual_transform_keys` there, so that the indices
fit queries from `apply_dual_transform_queries` for a Hadamard matrix that is not symmetric too; for Sylvester's it makes no difference.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.allocators.vecinfer import clamped_indices, dequantize_vq, effective_smooth, quantize_vq
from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, INTEGERS, check_array, check_int, message, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import kernels, searching

MAX_SUB_DIM = 256  # a thread holds one sub-vector
MAX_HEAD = 512  # two times ROWS rows in threadgroup memory: 16 KiB
MAX_VALUES = (1 << 31) - 1024  # a grid and the sizes in `dims` are int32
THREADS = 256
ROWS = 4  # keys per threadgroup, which share the reads of H
MAX_SEARCHED = 256  # codewords of the extension's search
WORDS = (mx.uint8, mx.uint16, mx.uint32)  # indices that it gathers by
WIDE_INDICES = (mx.uint8, mx.uint16, mx.int32, mx.uint32)  # those that the gather kernel reads as they are

_QUANTIZE = Kernel(
    name="vecinfer_quantize",
    inputs=("x", "codebook", "dims"),
    outputs=("indices",),
    sources=("nearest", "vecinfer"),
    metal="vecinfer_encode<SUB_DIM, false>(x, codebook, dims, indices, (device half*)nullptr, thread_position_in_grid.x);",
    cuda="vecinfer_encode<SUB_DIM, false>(x, codebook, dims, indices, (__half*)nullptr, blockIdx.x * blockDim.x + threadIdx.x);",
)
_ENCODE_DECODE_VALUES = Kernel(
    name="vecinfer_encode_decode_values",
    inputs=("x", "codebook", "dims"),
    outputs=("values", "indices"),
    sources=("nearest", "vecinfer"),
    metal="vecinfer_encode<SUB_DIM, true>(x, codebook, dims, indices, values, thread_position_in_grid.x);",
    cuda="vecinfer_encode<SUB_DIM, true>(x, codebook, dims, indices, values, blockIdx.x * blockDim.x + threadIdx.x);",
)
_DEQUANTIZE = Kernel(
    name="vecinfer_dequantize",
    inputs=("indices", "codebook", "dims"),
    outputs=("out",),
    sources=("nearest", "vecinfer"),
    metal="vecinfer_gather(indices, codebook, dims, out, thread_position_in_grid.x);",
    cuda="vecinfer_gather(indices, codebook, dims, out, blockIdx.x * blockDim.x + threadIdx.x);",
)
_ENCODE_DECODE_KEYS = Kernel(
    name="vecinfer_encode_decode_keys",
    inputs=("keys", "codebook", "rotation", "inverse", "smooth", "dims"),
    outputs=("values", "indices"),
    sources=("nearest", "vecinfer"),
    metal="""
    constexpr int VALUES = D * ROWS;
    threadgroup float a[VALUES];
    threadgroup float b[VALUES];
    vecinfer_encode_decode<D, SUB_DIM, ROWS>(
        keys, codebook, rotation, inverse, smooth, dims, values, indices, a, b,
        threadgroup_position_in_grid.x, thread_position_in_threadgroup.x, threads_per_threadgroup.x);
    """,
    cuda="""
    __shared__ float a[D * ROWS];
    __shared__ float b[D * ROWS];
    vecinfer_encode_decode<D, SUB_DIM, ROWS>(
        keys, codebook, rotation, inverse, smooth, dims, values, indices, a, b, blockIdx.x, threadIdx.x, blockDim.x);
    """,
)


def vecinfer_quantize_metal(x: mx.array, codebook: mx.array, sub_dim: int) -> mx.array:
    """Index of the nearest codeword of each sub-vector; `quantize_vq` in one dispatch, without its (N, C) distances.

    Args:
        x: (..., D) float16, bfloat16 or float32, D a multiple of sub_dim.
        codebook: (C, sub_dim) float16, bfloat16 or float32, C at least 1.
        sub_dim: 1 to 256.

    Returns:
        (..., D / sub_dim) int32.

    Raises:
        ValueError: a shape does not fit, or x has more than 2^31 - 1024 values.
        TypeError: another dtype.

    Error: equal to `quantize_vq` on every back end: float32 squared differences summed in order, each operation rounded by itself;
    of equally near codewords the lowest index; index 0 if every distance is NaN or overflows. No operand is narrowed to the other.
    """
    sub_dim = _check_vectors("vecinfer_quantize_metal", "x", x, "codebook", codebook, sub_dim)
    if backend() == "cpu" or x.size == 0:
        return _quantised(x, codebook, sub_dim)
    shape = (*x.shape[:-1], x.shape[-1] // sub_dim)
    (indices,) = _QUANTIZE(
        [x, codebook, dims(x.size // sub_dim, codebook.shape[0])],
        template=[("SUB_DIM", sub_dim)],
        **_one_each(x.size // sub_dim, sub_dim),
        output_shapes=[shape],
        output_dtypes=[mx.int32],
    )
    return indices


def vecinfer_dequant_metal(indices: mx.array, codebook: mx.array, out_dtype: mx.Dtype | None = None) -> mx.array:
    """Codewords in place of their indices; `dequantize_vq` with a choice of dtype.

    Args:
        indices: (..., n_sub) integers, read as unsigned; one outside [0, C) reads the last codeword.
        codebook: (C, sub_dim) float16, bfloat16 or float32, C and sub_dim at least 1.
        out_dtype: float16, bfloat16 or float32; that of `codebook` when None.

    Returns:
        (..., n_sub * sub_dim) in out_dtype.

    Raises:
        ValueError: a shape does not fit, or the result has more than 2^31 - 1024 values.
        TypeError: another dtype.

    Error: exact, but for one rounding where out_dtype is narrower than the codebook.
    """
    name = "vecinfer_dequant_metal"
    check_array(name, "indices", indices, None, INTEGERS)
    require(indices.ndim >= 1, name, "indices", "(..., n_sub)", indices)
    check_array(name, "codebook", codebook, ("C", "sub_dim"), FLOATS)
    require(min(codebook.shape) >= 1, name, "codebook", "(C, sub_dim) with both at least 1", codebook)
    if out_dtype is None:
        out_dtype = codebook.dtype
    if out_dtype not in FLOATS:
        raise TypeError(message(name, "out_dtype", "float16, bfloat16 or float32", out_dtype))
    size = indices.size * codebook.shape[1]
    require(size <= MAX_VALUES, name, "the result", f"at most {MAX_VALUES} values", size)
    if backend() == "cpu" or size == 0:
        return _codewords(indices, codebook.astype(out_dtype))
    if indices.dtype not in WIDE_INDICES:
        indices = clamped_indices(indices, codebook.shape[0])
    (out,) = _DEQUANTIZE(
        [indices, codebook, dims(size, *codebook.shape)],
        **_one_each(size, 1),
        output_shapes=[(*indices.shape[:-1], indices.shape[-1] * codebook.shape[1])],
        output_dtypes=[out_dtype],
    )
    return out


def vecinfer_encode_decode_metal(
    keys: mx.array, k_codebook: mx.array, sub_dim: int, H_mat: mx.array, smooth: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Keys quantized in the smoothed and rotated space, with their reconstruction, in one dispatch.

    Args:
        keys: (B, H, S, D) float16, bfloat16 or float32, D at most 512 and a multiple of sub_dim.
        k_codebook: (C, sub_dim) float16, bfloat16 or float32, C at least 1.
        sub_dim: 1 to 256.
        H_mat: (D, D) float16, bfloat16 or float32, orthonormal (not checked: that would wait for the device).
        smooth: (D,), (1, D) or (H, D) float16, bfloat16 or float32, or None for no smoothing. A channel whose factor is not above
            1e-8 is neither divided nor multiplied.

    Returns:
        k_hat (B, H, S, D) float16, and the indices (B, H, S, D / sub_dim) int32.

    Raises:
        ValueError: a shape does not fit; smooth has another number of rows (rows are never averaged); more than 2^31 - 1024 values.
        TypeError: another dtype.

    Error: float32 arithmetic, one rounding to float16 (infinite beyond 65504). An index is that of the nearest codeword up to the
    float32 rounding of k / lambda times H, which back ends sum in different orders.
    """
    name = "vecinfer_encode_decode_metal"
    check_array(name, "keys", keys, ("B", "H", "S", "D"), FLOATS)
    require(keys.shape[3] <= MAX_HEAD, name, "D", f"at most {MAX_HEAD}", keys.shape[3])
    sub_dim = _check_vectors(name, "keys", keys, "k_codebook", k_codebook, sub_dim)
    heads, size = keys.shape[1], keys.shape[3]
    check_array(name, "H_mat", H_mat, (size, size), FLOATS)
    if smooth is None:
        factors = mx.ones((1, size))
    else:
        check_array(name, "smooth", smooth, None, FLOATS)
        shapes = ((size,), (1, size), (heads, size))
        require(tuple(smooth.shape) in shapes, name, "smooth", f"({size},) or ({heads}, {size})", smooth)
        factors = effective_smooth(smooth).reshape(-1, size)
    rotation = H_mat.astype(mx.float32)
    count, threads = keys.size // max(size, 1), min(THREADS, _rounded(size, 32))
    grid = -(-count // ROWS) * threads
    require(grid <= MAX_VALUES, name, "keys", f"at most {MAX_VALUES} threads' work", grid)
    if backend() == "cpu" or keys.size == 0:
        return _encode_decode_ops(keys, k_codebook, sub_dim, rotation, factors)
    k_hat, indices = _ENCODE_DECODE_KEYS(
        [keys, k_codebook, rotation, rotation.T, factors, dims(count, k_codebook.shape[0], keys.shape[2], heads, factors.shape[0])],
        template=[("D", size), ("SUB_DIM", sub_dim), ("ROWS", ROWS)],
        grid=(grid, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[keys.shape, (*keys.shape[:3], size // sub_dim)],
        output_dtypes=[mx.float16, mx.int32],
    )
    return k_hat, indices


def _quantised(x: mx.array, codebook: mx.array, sub_dim: int) -> mx.array:
    """`quantize_vq`, by the extension where it has a search: up to 256 codewords."""
    if not natively() or not searching.takes(x) or codebook.shape[0] > MAX_SEARCHED:
        return quantize_vq(x, codebook, sub_dim)
    vectors = native.packed(x.astype(mx.float32)).reshape(-1, sub_dim)
    codes = searching.nearest_single(vectors, np.array(codebook.astype(mx.float32)))
    return mx.array(codes.astype(np.int32)).reshape(*x.shape[:-1], x.shape[-1] // sub_dim)


def _codewords(indices: mx.array, codebook: mx.array) -> mx.array:
    """`dequantize_vq`, by the extension where it is in use."""
    if not natively() or indices.size == 0:
        return dequantize_vq(indices, codebook)
    if indices.dtype == mx.int32:
        indices = indices.view(mx.uint32)  # a negative one is beyond the table
    if indices.dtype not in WORDS:
        indices = clamped_indices(indices, codebook.shape[0])
    return kernels.gather(indices, codebook)


def _encode_decode_ops(
    keys: mx.array, codebook: mx.array, sub_dim: int, rotation: mx.array, factors: mx.array
) -> tuple[mx.array, mx.array]:
    """`factors` (1 or H, D), effective."""
    scale = factors[:, None, :]
    indices = _quantised((keys.astype(mx.float32) / scale) @ rotation, codebook, sub_dim)
    decoded = _codewords(indices, codebook.astype(mx.float32)) @ rotation.T
    return (decoded * scale).astype(mx.float16), indices


def vecinfer_encode_decode_simple_metal(values: mx.array, v_codebook: mx.array, sub_dim: int) -> tuple[mx.array, mx.array]:
    """Values quantized as they are, without smoothing or rotation, with their reconstruction, in one dispatch.

    Args:
        values: (..., D) float16, bfloat16 or float32, D a multiple of sub_dim; (B, H, S, D) from a cache.
        v_codebook: (C, sub_dim) float16, bfloat16 or float32, C at least 1.
        sub_dim: 1 to 256.

    Returns:
        v_hat (..., D) float16, and the indices (..., D / sub_dim) int32, as those of `vecinfer_encode_decode_metal`.

    Raises:
        ValueError: a shape does not fit, or more than 2^31 - 1024 values.
        TypeError: another dtype.

    Error: indices equal to `quantize_vq`; v_hat is the codeword rounded once to float16 (infinite beyond 65504).
    """
    sub_dim = _check_vectors("vecinfer_encode_decode_simple_metal", "values", values, "v_codebook", v_codebook, sub_dim)
    if backend() == "cpu" or values.size == 0:
        indices = _quantised(values, v_codebook, sub_dim)
        return _codewords(indices, v_codebook.astype(mx.float16)), indices
    v_hat, indices = _ENCODE_DECODE_VALUES(
        [values, v_codebook, dims(values.size // sub_dim, v_codebook.shape[0])],
        template=[("SUB_DIM", sub_dim)],
        **_one_each(values.size // sub_dim, sub_dim),
        output_shapes=[values.shape, (*values.shape[:-1], values.shape[-1] // sub_dim)],
        output_dtypes=[mx.float16, mx.int32],
    )
    return v_hat, indices


def _check_vectors(function: str, name: str, x: Any, codebook_name: str, codebook: Any, sub_dim: Any) -> int:
    check_array(function, name, x, None, FLOATS)
    sub_dim = check_int(function, "sub_dim", sub_dim, 1, MAX_SUB_DIM)
    require(x.ndim >= 1 and x.shape[-1] % sub_dim == 0, function, name, f"(..., D) with D a multiple of sub_dim {sub_dim}", x)
    check_array(function, codebook_name, codebook, ("C", sub_dim), FLOATS)
    require(codebook.shape[0] >= 1, function, codebook_name, f"(C, {sub_dim}) with C at least 1", codebook)
    require(x.size <= MAX_VALUES, function, name, f"at most {MAX_VALUES} values", x.size)
    return sub_dim


def _one_each(count: int, held: int) -> dict[str, tuple[int, int, int]]:
    """Grid and threadgroup of one thread per item; smaller groups where a thread holds so much that registers run short."""
    threads = THREADS if held <= 32 else 64
    return {"grid": (_rounded(count, threads), 1, 1), "threadgroup": (threads, 1, 1)}


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
