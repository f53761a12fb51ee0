"""Keys coded by a product codebook, decoded and rotated.

    x[d] = codebook[j, index[n, j], d - j * sub_dim],   j = d // sub_dim
    (x[d], x[d + D/2]) turned by position * inv_freq[d]

The function bears CommVQ's name (Li et al. 2025, arXiv 2506.18879), but what it decodes is a product code of keys before RoPE: part j
of the vector comes from codebook j. CommVQ's own codebook is additive and commutes with RoPE; such a one must be decoded elsewhere.
"""

import math

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.allocators.vecinfer import clamped_indices
from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_int, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import converting, kernels

MAX_VALUES = (1 << 31) - 1024  # a grid and the sizes in `dims` are int32
MAX_CODES = 1 << 16
THREADS = 256
# 2 pi as a float32, and what that lacks of it.
TURN = 6.2831854820251465
TURN_REST = math.tau - TURN

_DECODE = Kernel(
    name="comm_vq_decode",
    inputs=("indices", "codebook", "positions", "inv_freq", "dims"),
    outputs=("out",),
    sources=("rope",),
    metal="rope_decode<D, SUB_DIM>(indices, codebook, positions, inv_freq, dims, out, thread_position_in_grid.x);",
    cuda="rope_decode<D, SUB_DIM>(indices, codebook, positions, inv_freq, dims, out, blockIdx.x * blockDim.x + threadIdx.x);",
)


def comm_vq_decode_metal(
    indices: mx.array, codebook: mx.array, positions: mx.array, inv_freq: mx.array, n_cb: int, sub_dim: int, cb_size: int
) -> mx.array:
    """Keys gathered from `n_cb` codebooks and rotated to their positions, pairs (d, d + D/2).

    Args:
        indices: (N, n_cb) uint8 or uint16; one that is cb_size or more reads the last codeword.
        codebook: (n_cb, cb_size, sub_dim) float16, bfloat16 or float32.
        positions: (N,) int32, tokens; negative ones turn the other way.
        inv_freq: (D/2,) float32, radians per token.
        n_cb, sub_dim: number of codebooks and entries of each part; D = n_cb * sub_dim must be even.
        cb_size: codewords of each codebook, 1 to 65536.

    Returns:
        (N, D) float16.

    Raises:
        ValueError: a shape or size does not fit, or the result has more than 2^31 - 1024 values.
        TypeError: another dtype.

    Error: for |position| < 2^24 the angle position * inv_freq is exact to 3e-7 radians (the product is held in two floats, not one,
    whose rounding alone would be 4e-3 radians at position 131072); float32 arithmetic, one rounding to float16.
    """
    name = "comm_vq_decode_metal"
    n_cb = check_int(name, "n_cb", n_cb, 1)
    sub_dim = check_int(name, "sub_dim", sub_dim, 1)
    cb_size = check_int(name, "cb_size", cb_size, 1, MAX_CODES)
    size = n_cb * sub_dim
    require(size % 2 == 0, name, "n_cb * sub_dim", "even", size)
    check_array(name, "indices", indices, ("N", n_cb), (mx.uint8, mx.uint16))
    rows = indices.shape[0]
    check_array(name, "codebook", codebook, (n_cb, cb_size, sub_dim), FLOATS)
    check_array(name, "positions", positions, (rows,), (mx.int32,))
    check_array(name, "inv_freq", inv_freq, (size // 2,), (mx.float32,))
    require(max(rows * size, codebook.size) <= MAX_VALUES, name, "the result", f"at most {MAX_VALUES} values", rows * size)
    if rows == 0:
        return mx.zeros((0, size), dtype=mx.float16)
    if natively() and size <= native.max_dim():
        return _turned(indices, codebook, positions, inv_freq)
    if backend() == "cpu":
        return _ops(indices, codebook, positions, inv_freq)
    (out,) = _DECODE(
        [indices, codebook, positions, inv_freq, dims(rows, cb_size)],
        template=[("D", size), ("SUB_DIM", sub_dim)],
        grid=(-(-rows * size // 2 // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, size)],
        output_dtypes=[mx.float16],
    )
    return out


def _turned(indices: mx.array, codebook: mx.array, positions: mx.array, inv_freq: mx.array) -> mx.array:
    n_cb, count, sub_dim = codebook.shape
    # One table after another: each part's indices begin where its own does.
    places = clamped_indices(indices, count) + mx.arange(n_cb, dtype=mx.uint32) * count
    rows = kernels.gather(places, codebook.astype(mx.float32).reshape(-1, sub_dim))
    phases = converting.phases(np.array(positions, np.int64), np.array(inv_freq, np.float64))
    return converting.turned(rows[None], 0, rows.shape[1], (False, False), phases=(phases,))[0].astype(mx.float16)


def _ops(indices: mx.array, codebook: mx.array, positions: mx.array, inv_freq: mx.array) -> mx.array:
    n_cb, count, _ = codebook.shape
    parts = codebook[mx.arange(n_cb), clamped_indices(indices, count)]
    first, second = mx.split(parts.reshape(indices.shape[0], -1).astype(mx.float32), 2, axis=-1)
    cosine, sine = _turns(positions.astype(mx.float32)[:, None], inv_freq)
    pairs = [first * cosine - second * sine, first * sine + second * cosine]
    return mx.concatenate(pairs, axis=-1).astype(mx.float16)


def _turns(positions: mx.array, frequencies: mx.array) -> tuple[mx.array, mx.array]:
    """cos and sin of the exact product, reduced to [-pi, pi] before it is rounded."""
    angle, angle_rest = _exact_product(positions, frequencies)
    turns = mx.round(angle / TURN)
    whole, whole_rest = _exact_product(turns, mx.array(TURN))
    small = ((angle - whole) + (angle_rest - whole_rest)) - turns * TURN_REST
    return mx.cos(small), mx.sin(small)


def _exact_product(a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """The product in float32, and its rounding error (Dekker 1971); what fused multiply-add gives in the kernels."""
    product = a * b
    a_high, b_high = _upper_half(a), _upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _upper_half(a: mx.array) -> mx.array:
    """The upper 12 bits of the significand."""
    spread = a * 4097.0
    return spread - (spread - a)
