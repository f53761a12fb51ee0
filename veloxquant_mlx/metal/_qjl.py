"""Quantised Johnson-Lindenstrauss codes of keys: signs of random projections and the norm (QJL, arXiv:2406.03482).

    signs = [S x >= 0],    <q, x> ~ sqrt(pi / 2) / m * ||x|| * <S q, 2 signs - 1>

Unbiased over Gaussian S (lemma 3.2 there).
"""

import math

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_choice, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import kernels

ROWS = 4  # rows of a SIMD-group, as in src/qjl
GROUPS = 8  # SIMD-groups of a threadgroup
THREADS = 32 * GROUPS


def qjl_encode(x: mx.array, S: mx.array, *, norm_dtype: mx.Dtype = mx.float16) -> tuple[mx.array, mx.array]:
    """Packed signs of S x, and ||x||.

    Args:
        x: (B, d) float16, bfloat16 or float32.
        S: (m, d) float16, bfloat16 or float32; m a multiple of 8, at least 8.
        norm_dtype: of the norms; float16 is infinite above 65504, float32 and bfloat16 are not.

    Returns:
        (packed_signs (B, m / 8) uint8, norms (B,)): projection 8 j + t at bit t of byte j, 1 where it is >= 0 (so also -0; 0 for NaN).

    Raises:
        ValueError: a shape does not fit, or another norm_dtype.
        TypeError: another dtype.

    Error: projections and sums of squares are accumulated in float32; a projection within its rounding of 0 may have either sign.
    """
    name = "qjl_encode"
    check_array(name, "x", x, ("B", "d"), FLOATS)
    check_array(name, "S", S, ("m", x.shape[1]), FLOATS)
    check_choice(name, "norm_dtype", norm_dtype, FLOATS)
    rows, dim = x.shape
    projections = S.shape[0]
    require(projections > 0 and projections % 8 == 0, name, "S", "(m, d) with m a multiple of 8", S)
    require(dim > 0, name, "x", "(B, d) with d at least 1", x)
    if backend() == "cpu" or rows == 0:
        return _encode_ops(x, S, norm_dtype)
    packed, norms = _encode(
        (x, S.T, dims(rows, dim, projections)),
        template=(("T", x.dtype), ("P", S.dtype), ("O", norm_dtype)),
        grid=(-(-rows // (ROWS * GROUPS)) * THREADS, -(-projections // 32), 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((rows, projections // 8), (rows,)),
        output_dtypes=(mx.uint8, norm_dtype),
    )
    return packed, norms


def qjl_inner_product(q_proj: mx.array, packed_signs: mx.array, norms: mx.array, *, out_dtype: mx.Dtype = mx.float16) -> mx.array:
    """Estimates of <q, key> for every head and slot.

    Args:
        q_proj: (H, m) float16, bfloat16 or float32: S q; m a multiple of 8, at least 8.
        packed_signs: (S_kv, H, m / 8) uint8, of `qjl_encode`.
        norms: (S_kv, H) float16, bfloat16 or float32.
        out_dtype: of the scores.

    Returns:
        (H, S_kv) in out_dtype.

    Raises:
        ValueError: a shape does not fit, or another out_dtype.
        TypeError: another dtype.

    Error: float32 accumulation in any order, one rounding to out_dtype.
    """
    name = "qjl_inner_product"
    check_array(name, "q_proj", q_proj, ("H", "m"), FLOATS)
    heads, projections = q_proj.shape
    require(projections > 0 and projections % 8 == 0, name, "q_proj", "(H, m) with m a multiple of 8", q_proj)
    check_array(name, "packed_signs", packed_signs, ("S_kv", heads, projections // 8), (mx.uint8,))
    slots = packed_signs.shape[0]
    check_array(name, "norms", norms, (slots, heads), FLOATS)
    check_choice(name, "out_dtype", out_dtype, FLOATS)
    if natively() and heads * slots > 0:
        factor = math.sqrt(math.pi / 2) / projections
        return kernels.sign_scores(q_proj.astype(mx.float32), packed_signs, norms.astype(mx.float32), factor).astype(out_dtype)
    if backend() == "cpu" or heads * slots == 0:
        return _inner_product_ops(q_proj, packed_signs, norms, out_dtype)
    return _inner_product(
        (q_proj, packed_signs, norms, dims(slots, heads, projections)),
        template=(("T", q_proj.dtype), ("N", norms.dtype), ("O", out_dtype)),
        grid=(-(-slots // THREADS) * THREADS, heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((heads, slots),),
        output_dtypes=(out_dtype,),
    )[0]


def _encode_ops(x: mx.array, S: mx.array, norm_dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    x = x.astype(mx.float32)
    norms = mx.sqrt(mx.square(x).sum(axis=-1)).astype(norm_dtype)
    projected = x @ S.astype(mx.float32).T
    if natively() and x.shape[0] > 0:
        return kernels.pack_signs(projected), norms
    bits = (projected >= 0).reshape(x.shape[0], S.shape[0] // 8, 8)
    weights = mx.array([1, 2, 4, 8, 16, 32, 64, 128], dtype=mx.uint8)
    return (bits * weights).sum(axis=-1).astype(mx.uint8), norms


def _inner_product_ops(q_proj: mx.array, packed_signs: mx.array, norms: mx.array, out_dtype: mx.Dtype) -> mx.array:
    heads, projections = q_proj.shape
    bits = packed_signs[..., None] >> mx.arange(8, dtype=mx.uint8) & 1
    signs = bits.reshape(norms.shape[0], heads, projections).astype(mx.float32) * 2 - 1
    sums = mx.einsum("hm,shm->hs", q_proj.astype(mx.float32), signs)
    return (math.sqrt(math.pi / 2) / projections * sums * norms.astype(mx.float32).T).astype(out_dtype)


_encode = Kernel(
    name="qjl_encode",
    inputs=("x", "transposed", "dims"),
    outputs=("packed", "norms"),
    sources=("qjl",),
    metal="""
    const uint row_block = thread_position_in_grid.x / 32, block = thread_position_in_grid.y;
    kvtool::qjl_encode(x, transposed, packed, norms, dims[0], dims[1], dims[2], block, row_block, thread_index_in_simdgroup);
    """,
    cuda="""
    const unsigned row_block = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    kvtool::qjl_encode(x, transposed, packed, norms, dims[0], dims[1], dims[2], blockIdx.y, row_block, threadIdx.x % 32);
    """,
)

_inner_product = Kernel(
    name="qjl_inner_product",
    inputs=("query", "packed", "norms", "dims"),
    outputs=("scores",),
    sources=("qjl",),
    metal="""
    const uint2 at = thread_position_in_grid.xy;
    kvtool::qjl_inner_product(query, packed, norms, scores, dims[0], dims[1], dims[2], at.x, at.y);
    """,
    cuda="""
    const unsigned slot = blockIdx.x * blockDim.x + threadIdx.x;
    kvtool::qjl_inner_product(query, packed, norms, scores, dims[0], dims[1], dims[2], slot, blockIdx.y);
    """,
)
