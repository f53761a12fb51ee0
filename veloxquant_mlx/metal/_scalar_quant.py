"""Scalar quantization to the nearest of 2**b centroids, plain and after a randomised Hadamard rotation (TurboQuant, arXiv:2504.19874).

    code(x) = argmin_i |x - c_i|          y = H (diag * x) / sqrt(D)

H is the Sylvester Hadamard matrix; the signs are applied first, so that the rotation spreads every coordinate over all of them.
"""

import math

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_int, power_of_two, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import streams

TILE, THREADS = 1024, 256  # values and threads of a group, as in src/scalar
MAX_DIM = 1024
MAX_OCTET_BLOCKS = 1056  # eight on each multiprocessor of an H100 or H200, which share the search for thresholds among more rows


def turboquant_scalar_quantize(x: mx.array, centroids: mx.array, b: int) -> mx.array:
    """Index of the nearest centroid of each value.

    Args:
        x: any shape, float16, bfloat16 or float32.
        centroids: (2**b,) float16, bfloat16 or float32, in any order.
        b: bits of an index, 1..4.

    Returns:
        uint8, the shape of `x`.

    Raises:
        ValueError: b out of range, or another number of centroids.
        TypeError: another dtype.

    Error: the distance |x - c| is one float32 subtraction. The lowest index wins a tie; NaN, and an infinity that is as far
    from every centroid, have index 0.
    """
    name = "turboquant_scalar_quantize"
    b = check_int(name, "b", b, 1, 4)
    check_array(name, "x", x, None, FLOATS)
    check_array(name, "centroids", centroids, (2**b,), FLOATS)
    centroids = centroids.astype(mx.float32)
    if natively() and x.size:
        return streams.nearest(x, centroids)
    if backend() == "cpu" or x.size == 0:
        return _quantize_ops(x, centroids)
    return _quantize(
        (x, centroids, dims(x.size)),
        template=(("T", x.dtype), ("COUNT", 2**b)),
        grid=(-(-x.size // TILE) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=(x.shape,),
        output_dtypes=(mx.uint8,),
    )[0]


def turboquant_scalar_dequantize(indices: mx.array, centroids: mx.array) -> mx.array:
    """The centroid of each index, in float16.

    Args:
        indices: any shape, uint8.
        centroids: (2**b,) float16, bfloat16 or float32, b 1..8.

    Returns:
        float16, the shape of `indices`.

    Raises:
        ValueError: another number of centroids.
        TypeError: another dtype.

    Error: one rounding to float16, to nearest even. An index beyond the last centroid is taken as the last.
    """
    name = "turboquant_scalar_dequantize"
    check_array(name, "indices", indices, None, (mx.uint8,))
    check_array(name, "centroids", centroids, ("2**b",), FLOATS)
    require(power_of_two(centroids.size) and 2 <= centroids.size <= 256, name, "centroids", "(2**b,) with b between 1 and 8", centroids)
    centroids = centroids.astype(mx.float32)
    if natively() and indices.size:
        return streams.look_up(indices, centroids.astype(mx.float16))
    if backend() == "cpu" or indices.size == 0:
        return _dequantize_ops(indices, centroids)
    return _dequantize(
        (indices, centroids, dims(indices.size, centroids.size)),
        grid=(-(-indices.size // TILE) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=(indices.shape,),
        output_dtypes=(mx.float16,),
    )[0]


def turboquant_hadamard_quantize(x: mx.array, diag: mx.array, centroids: mx.array, b: int) -> mx.array:
    """Index of the nearest centroid of each coordinate of y = H (diag * x) / sqrt(D).

    Args:
        x: (B, D) float16, bfloat16 or float32, D a power of two, at most 1024.
        diag: (D,) float16, bfloat16 or float32: +-1, applied before the rotation.
        centroids: (2**b,) float16, bfloat16 or float32, in any order.
        b: bits of an index, 1..4.

    Returns:
        (B, D) uint8.

    Raises:
        ValueError: a shape does not fit, or b out of range.
        TypeError: another dtype.

    Error: y in float32 by butterflies of strides 1, 2, 4, ..., then one product with 1 / sqrt(D), the same on every back end; ties
    and NaN as in `turboquant_scalar_quantize`. A row with a NaN or an infinity has index 0 throughout.
    """
    name = "turboquant_hadamard_quantize"
    b = check_int(name, "b", b, 1, 4)
    check_array(name, "x", x, ("B", "D"), FLOATS)
    rows, dim = x.shape
    require(power_of_two(dim) and dim <= MAX_DIM, name, "x", f"(B, D) with D a power of two, at most {MAX_DIM}", x)
    check_array(name, "diag", diag, (dim,), FLOATS)
    check_array(name, "centroids", centroids, (2**b,), FLOATS)
    diag, centroids = diag.astype(mx.float32), centroids.astype(mx.float32)
    if natively() and rows:
        return streams.nearest(x, centroids, diag)
    if backend() == "cpu" or rows == 0:
        return _hadamard_ops(x, diag, centroids)
    arrays = (x, diag, centroids, mx.array([1 / math.sqrt(dim)]))
    if backend() == "cuda" and dim >= 8:
        return _hadamard_octets(
            (*arrays, dims(rows, 2**b)),
            template=(("T", x.dtype), ("DIM", dim), ("BITS", b)),
            grid=(min(-(-rows * dim // (8 * 4 * THREADS)), MAX_OCTET_BLOCKS) * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=(x.shape,),
            output_dtypes=(mx.uint8,),
        )[0]
    return _hadamard(
        (*arrays, dims(rows)),
        template=(("T", x.dtype), ("DIM", dim), ("COUNT", 2**b)),
        grid=(-(-rows * 32 // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=(x.shape,),
        output_dtypes=(mx.uint8,),
    )[0]


def _quantize_ops(x: mx.array, centroids: mx.array) -> mx.array:
    x = x.astype(mx.float32)
    code = mx.zeros(x.shape, dtype=mx.uint8)
    least = mx.full(x.shape, float("inf"))
    for i in range(centroids.size):
        distance = mx.abs(x - centroids[i])
        nearer = distance < least
        code, least = mx.where(nearer, mx.array(i, dtype=mx.uint8), code), mx.where(nearer, distance, least)
    return code


def _hadamard_ops(x: mx.array, diag: mx.array, centroids: mx.array) -> mx.array:
    if x.size == 0:
        return mx.zeros(x.shape, dtype=mx.uint8)
    y = mx.hadamard_transform(x.astype(mx.float32) * diag, scale=1 / math.sqrt(x.shape[1]))
    return _quantize_ops(y, centroids)


def _dequantize_ops(indices: mx.array, centroids: mx.array) -> mx.array:
    return centroids[mx.minimum(indices.astype(mx.uint32), centroids.size - 1)].astype(mx.float16)


_quantize = Kernel(
    name="turboquant_scalar_quantize",
    inputs=("x", "centroids", "dims"),
    outputs=("codes",),
    sources=("nearest", "rotate", "scalar"),
    metal="""
    const uint group = threadgroup_position_in_grid.x, lane = thread_position_in_threadgroup.x;
    kvtool::scalar_quantize<COUNT>(x, centroids, codes, uint(dims[0]), group, lane);
    """,
    cuda="kvtool::scalar_quantize<COUNT>(x, centroids, codes, unsigned(dims[0]), blockIdx.x, threadIdx.x);",
)

_dequantize = Kernel(
    name="turboquant_scalar_dequantize",
    inputs=("codes", "centroids", "dims"),
    outputs=("values",),
    sources=("nearest", "rotate", "scalar"),
    metal="""
    const uint group = threadgroup_position_in_grid.x, lane = thread_position_in_threadgroup.x;
    kvtool::scalar_dequantize(codes, centroids, values, uint(dims[0]), uint(dims[1]), group, lane);
    """,
    cuda="kvtool::scalar_dequantize(codes, centroids, values, unsigned(dims[0]), unsigned(dims[1]), blockIdx.x, threadIdx.x);",
)

_hadamard = Kernel(
    name="turboquant_hadamard_quantize",
    inputs=("x", "signs", "centroids", "scale", "dims"),
    outputs=("codes",),
    sources=("nearest", "rotate", "scalar"),
    metal="""
    const uint row = thread_position_in_grid.x / 32;
    kvtool::scalar_hadamard_quantize<DIM, COUNT>(x, signs, centroids, scale, codes, uint(dims[0]), row, thread_index_in_simdgroup);
    """,
    cuda="""
    const unsigned row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    kvtool::scalar_hadamard_quantize<DIM, COUNT>(x, signs, centroids, scale, codes, unsigned(dims[0]), row, threadIdx.x % 32);
    """,
)

_hadamard_octets = Kernel(
    name="turboquant_hadamard_quantize_octets",
    inputs=("x", "signs", "centroids", "scale", "dims"),
    outputs=("codes",),
    sources=("nearest", "rotate", "scalar"),
    metal="",
    cuda="""
    __shared__ float table[33];
    kvtool::scalar_hadamard_octets<DIM, BITS>(x, signs, centroids, scale, codes, dims[0], dims[1], table);
    """,
)
