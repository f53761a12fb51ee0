"""KIVI's group-wise asymmetric quantization, there and back.

    scale = max((max - min) / levels, eps),   code = clip(round((x - min) / scale), 0, levels),   x^ = code * scale + min

over groups of consecutive elements of one axis; a last, shorter group stands by itself (Liu et al. 2024, arXiv 2402.02750, sec. 3.1:
keys per channel, axis -2; values per token, axis -1).
"""

import math

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_int, message, require
from veloxquant_mlx.metal._kernel import Kernel, Template, dims
from veloxquant_mlx.native import kernels

MAX_LEVELS = (1 << 24) - 1  # codes are float32 integers while they are in flight
SMALLEST_EPS = 2.0**-126  # the smallest normal float32: a smaller floor may be flushed to zero
MAX_VALUES = (1 << 31) - 1024  # a grid and the sizes in `dims` are int32
THREADS = 256
SIMD = 32
GROUPS_PER_BLOCK = THREADS // SIMD
MAX_SIMDGROUPS = 1 << 13  # beyond, a SIMD-group takes several groups in turn
MAX_OCTET_WARPS = 1 << 15

_COLUMNS = Kernel(
    name="kivi_group_columns",
    inputs=("x", "params", "dims"),
    outputs=("out",),
    sources=("affine",),
    metal="affine_columns(x, params, dims, out, thread_position_in_grid.x);",
    cuda="affine_columns(x, params, dims, out, blockIdx.x * blockDim.x + threadIdx.x);",
)
_ROWS = Kernel(
    name="kivi_group_rows",
    inputs=("x", "params", "dims"),
    outputs=("out",),
    sources=("affine",),
    metal="affine_rows(x, params, dims, out, thread_position_in_grid.x / 32, thread_index_in_simdgroup);",
    cuda="""
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    affine_rows(x, params, dims, out, thread / 32, thread % 32);
    """,
)
# 16-bit elements on CUDA, 16 bytes at a time, a group once through registers; memory that is not aligned takes the general text, in turns.
_COLUMN_OCTETS = Kernel(
    name="kivi_group_column_octets",
    inputs=("x", "params", "dims"),
    outputs=("out",),
    sources=("affine",),
    metal="",
    cuda="""
    __shared__ AffineRange shared[256];
    const unsigned thread_ = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    if (!affine_column_octets<ROWS, PARTS>(x, params, dims, out, thread_ / 32, thread_ % 32, shared)) {
      const unsigned columns = unsigned(dims[0]) * unsigned((dims[1] + dims[3] - 1) / dims[3]) * unsigned(dims[2]);
      for (unsigned i = thread_; i < columns; i += threads) affine_columns(x, params, dims, out, i);
    }
    """,
)
_ROW_OCTETS = Kernel(
    name="kivi_group_row_octets",
    inputs=("x", "params", "dims"),
    outputs=("out",),
    sources=("affine",),
    metal="",
    cuda="""
    const unsigned thread_ = blockIdx.x * blockDim.x + threadIdx.x;
    if (!affine_row_octets<LANES>(x, params, dims, out, thread_, gridDim.x * blockDim.x)) {
      affine_rows(x, params, dims, out, thread_ / 32, thread_ % 32);
    }
    """,
)
OCTET_ROWS = ((2, 1), (4, 1), (4, 2), (4, 4))  # of a lane, and warps of a group: of up to 8 times the product in tokens
OCTET_GROUPS = (16, 32, 64, 128, 256)  # channels


def kivi_group_quant_dequant(x: mx.array, axis: int, group_size: int, levels: int, eps: float = 1e-8) -> mx.array:
    """`x` quantized in groups along an axis, and reconstructed.

    Args:
        x: (..., S, D) float16, bfloat16 or float32.
        axis: -2 (keys: per channel, groups of tokens) or -1 (values: per token, groups of channels).
        group_size: elements of a group, at least 1; the last group of the axis may be shorter.
        levels: steps between a group's minimum and maximum, 2^bits - 1; 1 to 2^24 - 1.
        eps: floor of the scale, at least 2^-126: what a constant group gets.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: a rank, size or range that does not fit, or x has more than 2^31 - 1024 values.
        TypeError: another dtype, or a size that is not an integer.

    Error: bit for bit the same on every back end: float32, each operation rounded by itself, halves to even, one rounding to the
    dtype of `x`. NaN and infinities come back as they are and do not count among their group's elements. A group of float32 or
    bfloat16 that spans more than 3.4e38 has no float32 scale and comes back as NaN.
    """
    name = "kivi_group_quant_dequant"
    check_array(name, "x", x, None, FLOATS)
    require(x.ndim >= 2, name, "x", "(..., S, D)", x)
    axis = check_int(name, "axis", axis, -2, -1)
    group_size = check_int(name, "group_size", group_size, 1)
    levels = check_int(name, "levels", levels, 1, MAX_LEVELS)
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(message(name, "eps", "a number", type(eps).__name__))
    require(SMALLEST_EPS <= eps <= 3e38, name, "eps", "between 2^-126 and 3e38", eps)
    require(x.size <= MAX_VALUES, name, "x", f"at most {MAX_VALUES} values", x.size)
    if x.size == 0:
        return x
    group_size = min(group_size, x.shape[axis])
    if natively():
        return kernels.round_trip(x, axis, group_size, levels, eps)
    if backend() == "cpu":
        return _ops(x, axis, group_size, levels, eps)
    params = mx.array([levels, eps], dtype=mx.float32)
    groups = -(-x.shape[axis] // group_size)
    outer, length, inner = x.size // (x.shape[-2] * x.shape[-1]), x.shape[-2], x.shape[-1]
    octets = backend() == "cuda" and x.itemsize == 2 and inner % 8 == 0
    template: Template = ()
    if octets and axis == -2 and 8 < group_size <= 8 * math.prod(OCTET_ROWS[-1]):
        rows, parts = next(one for one in OCTET_ROWS if group_size <= 8 * math.prod(one))
        warps = outer * groups * -(-inner // SIMD) * parts
        kernel, sizes, threads = _COLUMN_OCTETS, dims(outer, length, inner, group_size), warps * SIMD
        template = (("ROWS", rows), ("PARTS", parts))
    elif octets and axis == -1 and group_size in OCTET_GROUPS and inner % group_size == 0:
        simdgroups = min(-(-x.size // (8 * THREADS)) * GROUPS_PER_BLOCK, MAX_OCTET_WARPS)
        kernel, sizes, threads = _ROW_OCTETS, dims(outer * length, inner, group_size, simdgroups), simdgroups * SIMD
        template = (("LANES", group_size // 8),)
    elif axis == -2:
        kernel, sizes, threads = _COLUMNS, dims(outer, length, inner, group_size), outer * groups * inner
    elif group_size < SIMD // 2:  # most lanes would idle
        kernel, sizes, threads = _COLUMNS, dims(outer * length, inner, 1, group_size), outer * length * groups
    else:
        simdgroups = min(-(-outer * length * groups // GROUPS_PER_BLOCK) * GROUPS_PER_BLOCK, MAX_SIMDGROUPS)
        kernel, sizes, threads = _ROWS, dims(outer * length, inner, group_size, simdgroups), simdgroups * SIMD
    (out,) = kernel(
        [x, params, sizes],
        template=template,
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return out


def _ops(x: mx.array, axis: int, group_size: int, levels: int, eps: float) -> mx.array:
    lines = mx.moveaxis(x, axis, -1)
    length = lines.shape[-1]
    tail = -length % group_size
    if tail:  # the last element again leaves a group's minimum and maximum as they are
        lines = mx.concatenate([lines, mx.repeat(lines[..., -1:], tail, axis=-1)], axis=-1)
    values = lines.astype(mx.float32).reshape(*lines.shape[:-1], -1, group_size)
    finite = mx.isfinite(values)
    low = mx.where(finite, values, mx.inf).min(axis=-1, keepdims=True)
    high = mx.where(finite, values, -mx.inf).max(axis=-1, keepdims=True)
    scale = mx.maximum((high - low) / levels, eps)
    codes = mx.clip(mx.round((values - low) / scale), 0, levels)
    rebuilt = mx.where(finite, codes * scale + low, values)
    lines = rebuilt.reshape(*lines.shape[:-1], -1)[..., :length].astype(x.dtype)
    return mx.moveaxis(lines, -1, axis)
