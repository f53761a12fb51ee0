"""Two-stage scalar codes of rotated vectors (TurboQuant, arXiv 2504.19874), packed into 32-bit words, in one pass.

    i1 = number of boundaries1 below y,    r = y - centroids1[i1],    i2 = number of boundaries2 below r

Code i of a row stands at bits (i % per) * bits of word i // per, per = 32 // bits; spare bits are 0.
"""

import mlx.core as mx

from veloxquant_mlx.allocators.scalar_codebook import _pack_indices, count_below, words_per_row
from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_int, power_of_two, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import kernels

THREADS = 256
CUDA_WORDS = {1: 1, 2: 2, 3: 2, 4: 4}  # of each stage in a thread, by bits: 64 bytes of float16, or nearly
MAX_DIM = 1024


def rvq_quant_pack(
    rotated: mx.array, centroids1: mx.array, boundaries1: mx.array, boundaries2: mx.array, bits: int
) -> tuple[mx.array, mx.array]:
    """Packed codes of both stages.

    Args:
        rotated: (N, D) float16, bfloat16 or float32, D a power of two, at most 1024.
        centroids1: (2**bits,) ascending; float16, bfloat16 or float32, like the two below.
        boundaries1: (2**bits - 1,) ascending, of the cells of stage 1.
        boundaries2: (2**bits - 1,) ascending, of the cells of stage 2.
        bits: of one code, 1..4.

    Returns:
        (packed1, packed2), each (N, ceil(D / (32 // bits))) uint32.

    Raises:
        ValueError: a shape does not fit, or bits out of range.
        TypeError: another dtype.

    Error: bit for bit `ScalarCodebook.quantize` of y, then of y - dequantize(i1), each through `_pack_indices`, for every dtype:
    comparisons are exact, the residual is rounded once to the wider of the dtypes of `rotated` and `centroids1` (float16 with
    float16 gives float16; float16 with bfloat16 gives float32). A value on a boundary has the lower code, NaN has code 0.
    """
    name = "rvq_quant_pack"
    bits = check_int(name, "bits", bits, 1, 4)
    check_array(name, "rotated", rotated, ("N", "D"), FLOATS)
    rows, dim = rotated.shape
    require(power_of_two(dim) and dim <= MAX_DIM, name, "rotated", f"(N, D) with D a power of two, at most {MAX_DIM}", rotated)
    check_array(name, "centroids1", centroids1, (2**bits,), FLOATS)
    check_array(name, "boundaries1", boundaries1, (2**bits - 1,), FLOATS)
    check_array(name, "boundaries2", boundaries2, (2**bits - 1,), FLOATS)
    tables = tuple(table.astype(mx.float32) for table in (centroids1, boundaries1, boundaries2))
    if natively() and rows > 0:
        return kernels.encode_two_stages(rotated, *tables, bits, mx.result_type(rotated, centroids1))
    if backend() == "cpu" or rows == 0:
        return _ops(rotated, centroids1, boundaries1, boundaries2, bits)
    words = words_per_row(dim, bits)
    per_thread = CUDA_WORDS[bits] if backend() == "cuda" else 1
    packed1, packed2 = _kernel(
        (rotated, *tables, dims(rows, dim)),
        template=(("T", rotated.dtype), ("R", mx.result_type(rotated, centroids1)), ("BITS", bits)),
        grid=(-(-rows * words // (THREADS * per_thread)) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((rows, words), (rows, words)),
        output_dtypes=(mx.uint32, mx.uint32),
    )
    return packed1, packed2


def _ops(rotated: mx.array, centroids1: mx.array, boundaries1: mx.array, boundaries2: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    codes1 = count_below(boundaries1, rotated)
    codes2 = count_below(boundaries2, rotated - centroids1[codes1])
    return _pack_indices(codes1, bits), _pack_indices(codes2, bits)


_ARGUMENTS = "rotated, centroids1, boundaries1, boundaries2, packed1, packed2, dims[0], dims[1]"
_WORDS = ", ".join(str(CUDA_WORDS[bits]) for bits in sorted(CUDA_WORDS))

_kernel = Kernel(
    name="rvq_quant_pack",
    inputs=("rotated", "centroids1", "boundaries1", "boundaries2", "dims"),
    outputs=("packed1", "packed2"),
    sources=("nearest", "rotate", "scalar"),
    metal=f"kvtool::rvq_pack_word<BITS, R>({_ARGUMENTS}, thread_position_in_grid.x);",
    cuda=f"""
    __shared__ float table[48];
    constexpr int WORDS[] = {{{_WORDS}}};
    kvtool::rvq_pack_words<BITS, WORDS[BITS - 1], R>({_ARGUMENTS}, table);
    """,
)
