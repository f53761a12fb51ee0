"""Attention over two-stage residual-quantized keys and codebook values, decoded inside the softmax loop.

    k^[j]   = centroids1[i1[j]] + centroids2[i2[j]]                  per element
    s[i, j] = q[i] . k^[j] / sqrt(D)  (k_norm[j])
    out[i]  = sum_j softmax_j(s[i, j]) v_codebook[v_idx[j]]          per sub-vector, (v_scale[j])

The codes a codec in the manner of TurboQuant (arXiv 2504.19874) stores lack the norm and the rotation: `k_norm`, `v_scale` and
`out_rotation` supply them.
"""

import math
from typing import Unpack

import mlx.core as mx

from veloxquant_mlx.metal import _attend, _native_attend
from veloxquant_mlx.metal._attend import Extras, Options
from veloxquant_mlx.metal._attend_launch import (
    DECODE_CODE_BYTES,
    DECODE_TABLE_BYTES,
    DECODE_WARPS,
    Decode,
    Many,
    attend_kernel,
    decode_kernel,
    launch,
    layout,
    many_kernel,
    spare_floats,
)
from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_int, require

MAX_BITS = 8
MAX_PAIR_BITS = 8  # as in attend_readers.metal

_INPUTS = ("k_indices1", "k_indices2", "centroids1", "centroids2", "v_indices", "v_codebook")
_KERNEL = attend_kernel(
    "turboquant_fused_rvq_decode_attend",
    _INPUTS,
    """kvtool::stage(centroids1, tables, 1 << BITS1, thread_index_in_threadgroup, NSG * 32);
kvtool::stage(centroids2, tables + (1 << BITS1), 1 << BITS2, thread_index_in_threadgroup, NSG * 32);
kvtool::DenseKeys<kvtool::TwoStageReader<D, E, LAYOUT, BITS1, BITS2, T>, D, E> keys{
    {{k_indices1, tables, 1 << BITS1, dims[3]}, {k_indices2, tables + (1 << BITS1), 1 << BITS2, dims[3]}}};
kvtool::VectorReader<D, E, SUB, LAYOUT, BITSV, T> values{v_indices, v_codebook, 1 << BITSV, dims[3]};""",
)
_METAL_KEYS = """kvtool::stage_stages<BITS1, BITS2>(centroids1, centroids2, tables, thread_index_in_threadgroup, NSG * 32);
kvtool::DenseKeys<kvtool::TwoStageReader<D, E, LAYOUT, BITS1, BITS2, T>, D, E> keys{{k_indices1, k_indices2, tables, dims[3]}};
"""
# The values' table goes behind the keys', where it fits.
_METAL_VALUES = {
    "table": """threadgroup float* entries = tables + TABLES - (1 << BITSV);
kvtool::stage(v_codebook, entries, 1 << BITSV, thread_index_in_threadgroup, NSG * 32);
kvtool::TableReader<D, E, LAYOUT, BITSV, T> values{v_indices, entries, 1 << BITSV, dims[3]};""",
    "vectors": """threadgroup float* entries = tables + TABLES - (SUB << BITSV);
kvtool::stage(v_codebook, entries, SUB << BITSV, thread_index_in_threadgroup, NSG * 32);
kvtool::VectorReader<D, E, SUB, LAYOUT, BITSV, T, true> values{v_indices, entries, 1 << BITSV, dims[3]};""",
    "far": """kvtool::VectorReader<D, E, SUB, LAYOUT, BITSV, T, false> values{v_indices, v_codebook, 1 << BITSV, dims[3]};""",
}
_METAL = {
    name: (
        attend_kernel(f"{_KERNEL.name}_{name}", _INPUTS, "", _METAL_KEYS + values),
        Many(many_kernel(f"{_KERNEL.name}_{name}", _INPUTS, _METAL_KEYS + values)),
    )
    for name, values in _METAL_VALUES.items()
}
_DECODE_KERNEL = decode_kernel(
    _KERNEL,
    """kvtool::DecodeTwoStageKeys fast_keys{k_indices1, k_indices2, centroids1, centroids2};
auto fast_values = kvtool::decode_table_values<128, VSCALE>(v_indices, v_codebook, 16, v_scale);""",
    zeros=False,
    warps="kvtool::DECODE_TABLE + kvtool::DECODE_WARPS * kvtool::DECODE_CODES",
)
DECODE = Decode(_DECODE_KERNEL, DECODE_TABLE_BYTES + 2 * DECODE_WARPS * DECODE_CODE_BYTES)
DECODE_BITS = (2, 2, 4)


def turboquant_fused_rvq_decode_attend(
    q: mx.array,
    k_indices1: mx.array,
    k_indices2: mx.array,
    centroids1: mx.array,
    centroids2: mx.array,
    v_indices: mx.array,
    v_codebook: mx.array,
    b1: int,
    b2: int,
    bv: int,
    *,
    packed: str | None = None,
    **extras: Unpack[Extras],
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention over two-stage keys and codebook values; the scale is 1 / sqrt(D).

    Args:
        q: (B, H_q, S_q, D) float16, bfloat16 or float32, already rotated. D at most 256; H_q a multiple of H_kv.
        k_indices1: (B, H_kv, S_kv, D) uint8, first stage; an index beyond its table is clamped, here and below.
        k_indices2: (B, H_kv, S_kv, D) uint8, second stage.
        centroids1: (2**b1,) float.
        centroids2: (2**b2,) float.
        v_indices: (B, H_kv, S_kv, D / sub) uint8.
        v_codebook: (2**bv, sub) float, sub a divisor of D.
        b1, b2, bv: bits of an index, 1 to 8.
        packed: "lsb8" or "lsb32": all three index arrays packed along their last axis, see `_attend.unpack_codes`.
        extras: see `_attend.Extras`.

    Returns:
        (B, H_q, S_q, D) float16 (bfloat16 if q is); with `lse=True` also (B, H_q, S_q) float32.

    Raises:
        ValueError: a shape or a size does not fit.
        TypeError: another dtype.

    Error: float32 arithmetic, rounded once. On CUDA, S_q = 1 with D = 128, sub = 1, packed codes of 2 + 2 and 4 bits, an output of 16
        bits and no `lse`: the sums of two centroids and `v_codebook` are rounded to halves (2^-11 of an entry).
    """
    name = "turboquant_fused_rvq_decode_attend"
    _attend.check_queries(name, "q", q)
    batch, _, _, dim = q.shape
    b1, b2, bv = (check_int(name, key, value, 1, MAX_BITS) for key, value in (("b1", b1), ("b2", b2), ("bv", bv)))
    check_array(name, "centroids1", centroids1, (2**b1,), FLOATS)
    check_array(name, "centroids2", centroids2, (2**b2,), FLOATS)
    check_array(name, "v_codebook", v_codebook, (2**bv, "sub"), FLOATS)
    sub = v_codebook.shape[1]
    require(sub > 0 and dim % sub == 0, name, "v_codebook", f"({2**bv}, sub) with sub a divisor of D = {dim}", v_codebook)
    _attend.check_packed(name, packed)
    width = _attend.packed_width(dim, packed, b1)
    check_array(name, "k_indices1", k_indices1, (batch, "H_kv", "S_kv", width), (mx.uint32,) if packed == "lsb32" else (mx.uint8,))
    kv = k_indices1.shape[:3]
    _attend.check_codes(name, "k_indices2", k_indices2, kv, dim, packed, b2)
    _attend.check_codes(name, "v_indices", v_indices, kv, dim // sub, packed, bv)
    options = _attend.check_options(name, q, kv[1], kv[2], extras)
    if options.empty:
        return _attend.nothing(options)
    if natively():
        keys = _native_attend.Rows(((k_indices1, b1, centroids1), (k_indices2, b2, centroids2)), packed, options.k_norm)
        words = v_codebook.reshape(-1) if sub == 1 else v_codebook
        values = _native_attend.Rows(((v_indices, bv, words),), packed, options.v_scale)
        found = _native_attend.attend(q.astype(mx.float32) * (1 / math.sqrt(dim)), keys, values, options)
        if found is not None:
            return found
    if backend() == "cpu":
        return _ops(q, (k_indices1, k_indices2, v_indices), (centroids1, centroids2, v_codebook), (b1, b2, bv), packed, options)
    halves = options.out_dtype != mx.float32 and not options.lse
    tables = [table.astype(mx.float32) for table in (centroids1, centroids2, v_codebook)]
    stages = 2 ** (b1 + b2) if backend() == "metal" and b1 + b2 <= MAX_PAIR_BITS else 2**b1 + 2**b2
    words = sub * 2**bv
    kernel, many = _KERNEL, None
    if backend() == "metal":
        near = stages + words <= spare_floats(options)
        kernel, many = _METAL["table" if sub == 1 else "vectors" if near else "far"]
        stages += words if near else 0
    return launch(
        kernel,
        q,
        1 / math.sqrt(dim),
        (k_indices1, k_indices2, *tables[:2], v_indices, tables[2]),
        options,
        template=[("LAYOUT", layout(packed)), ("BITS1", b1), ("BITS2", b2), ("BITSV", bv), ("SUB", sub), ("T", k_indices1.dtype)],
        tables=stages,
        decode=DECODE if halves and sub == 1 and packed and (b1, b2, bv) == DECODE_BITS else None,
        many=many,
    )


def _ops(
    q: mx.array,
    indices: tuple[mx.array, mx.array, mx.array],
    tables: tuple[mx.array, mx.array, mx.array],
    bits: tuple[int, int, int],
    packed: str | None,
    options: Options,
) -> mx.array | tuple[mx.array, mx.array]:
    counts = (options.dim, options.dim, options.dim // tables[2].shape[1])
    first, second, values = (
        _attend.look_up(table, _attend.unpack_codes(codes, count, packed, b))
        for table, codes, count, b in zip(tables, indices, counts, bits, strict=True)
    )
    return _attend.dense_attention(q, first + second, values, 1 / math.sqrt(options.dim), options)
