"""Scores of packed sign bits against one query by Hamming distance (RaBitQ, arXiv:2405.12497, in its plain sign form).

score_i = popcount(query XOR bits_i) * scale + Cx_i
"""

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import check_array, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import kernels

THREADS = 256


def rabitq_hamming_score(qbits: mx.array, bits: mx.array, Cx: mx.array, scale: mx.array) -> mx.array:
    """Approximate distances of N candidates; lower is closer.

    Args:
        qbits: (D / 8,) uint8, the query's packed signs.
        bits: (N, D / 8) uint8, the candidates'.
        Cx: (N,) float32, constant of each candidate.
        scale: (1,) float32.

    Returns:
        (N,) float32.

    Raises:
        ValueError: a shape does not fit.
        TypeError: another dtype.

    Error: the count is exact; product and sum are rounded once each, on every back end.
    """
    name = "rabitq_hamming_score"
    check_array(name, "qbits", qbits, ("D / 8",), (mx.uint8,))
    require(qbits.size > 0, name, "qbits", "(D / 8,) with D at least 8", qbits)
    check_array(name, "bits", bits, ("N", qbits.size), (mx.uint8,))
    rows, width = bits.shape
    check_array(name, "Cx", Cx, (rows,), (mx.float32,))
    check_array(name, "scale", scale, (1,), (mx.float32,))
    if natively() and rows > 0:
        return kernels.hamming(qbits, bits, Cx, scale.item())
    if backend() == "cpu" or rows == 0:
        return _ops(qbits, bits, Cx, scale)
    return _kernel(
        (qbits, bits, Cx, scale, dims(rows, width)),
        grid=(-(-rows // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((rows,),),
        output_dtypes=(mx.float32,),
    )[0]


def _ops(qbits: mx.array, bits: mx.array, offsets: mx.array, scale: mx.array) -> mx.array:
    return _popcount(qbits ^ bits).sum(axis=-1).astype(mx.float32) * scale + offsets


def _popcount(x: mx.array) -> mx.array:
    """Bits set in each byte: sums of neighbouring 1, 2 and 4-bit fields."""
    x = x - (x >> 1 & 0x55)
    x = (x & 0x33) + (x >> 2 & 0x33)
    return x + (x >> 4) & 0x0F


_kernel = Kernel(
    name="rabitq_hamming_score",
    inputs=("query", "bits", "offsets", "scale", "dims"),
    outputs=("scores",),
    sources=("hamming",),
    metal="kvtool::hamming_score(query, bits, offsets, scale, scores, dims[0], dims[1], thread_position_in_grid.x);",
    cuda="kvtool::hamming_score(query, bits, offsets, scale, scores, dims[0], dims[1], blockIdx.x * blockDim.x + threadIdx.x);",
)
