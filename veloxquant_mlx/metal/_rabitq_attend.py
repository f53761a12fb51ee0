"""Attention over 1-bit keys and codebook values, scored from Hamming distances.

    s[i, j] = (D - 2 ham(sign q[i], bits[j])) q_scale[i] k_mag[j] + k_const[j],    sign(x) = x >= 0
    out[i]  = sum_j softmax_j(s[i, j]) v_cents[v_idx[j]]

D - 2 ham is the product of the two sign vectors, so that with key k^ = k_mag sign(k) and query q^ = q_scale D^(1/2) sign(q) the score is
<q^, k^> / sqrt(D). RaBitQ (Gao and Long 2024) without its correction of the inner product: the caller folds that into the scales.
"""

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
)
from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, require

MAX_CENTROIDS = 256
NIBBLE_CENTROIDS = 16

_KERNEL = attend_kernel(
    "rabitq_fused_attend",
    ("k_bits", "v_idx", "v_cents"),
    """kvtool::stage(v_cents, tables, dims[9], thread_index_in_threadgroup, NSG * 32);
kvtool::SignKeys<D, E> keys{k_bits, dims[3]};
kvtool::TableReader<D, E, LAYOUT, BITS, T> values{v_idx, tables, dims[9], dims[3]};""",
)
_DECODE_KERNEL = decode_kernel(
    _KERNEL,
    """kvtool::DecodeSignKeys fast_keys{k_bits};
auto fast_values = kvtool::decode_table_values<0, VSCALE>(v_idx, v_cents, dims[9], v_scale);""",
    zeros=False,
    warps="kvtool::DECODE_TABLE",
)
DECODE = Decode(_DECODE_KERNEL, DECODE_TABLE_BYTES + DECODE_WARPS * DECODE_CODE_BYTES)
DECODE_BITS = 4
# Signs are exact in halves.
MANY = Many(
    many_kernel(
        _KERNEL.name,
        ("k_bits", "v_idx", "v_cents"),
        """kvtool::stage(v_cents, tables, dims[9], thread_index_in_threadgroup, NSG * 32);
kvtool::SignRows<KT, D> key_rows{k_bits, dims[3]};
kvtool::TableReader<D, E, LAYOUT, BITS, T> values{v_idx, tables, dims[9], dims[3]};
kvtool::CodedRows<decltype(values)> value_rows{values};""",
    ),
    key_type=mx.float16,
    signs=True,
)


def rabitq_fused_attend(
    q: mx.array,
    q_scale: mx.array,
    k_bits: mx.array,
    k_mag: mx.array,
    k_const: mx.array,
    v_idx: mx.array,
    v_cents: mx.array,
    *,
    packed: str | None = None,
    **extras: Unpack[Extras],
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention over sign-coded keys and codebook values.

    Args:
        q: (B, H_q, S_q, D) float16, bfloat16 or float32; only the signs count. D a multiple of 8, at most 256; H_q a multiple of H_kv.
        q_scale: (B, H_q, S_q) float, scale of the scores of each query, 1 / sqrt(D) folded in.
        k_bits: (B, H_kv, S_kv, D / 8) uint8, bit t of byte b is 1 where element 8 b + t >= 0.
        k_mag: (B, H_kv, S_kv) float, magnitude of each key.
        k_const: (B, H_kv, S_kv) float, added to the scores.
        v_idx: (B, H_kv, S_kv, D) uint8, or (..., D / 2) nibbles, low one first, if `v_cents` has at most 16 entries.
        v_cents: (n,) float, 1 <= n <= 256; an index beyond is clamped.
        packed: "lsb8" or "lsb32": `v_idx` packed at the bits that n needs, see `_attend.unpack_codes`. None: as the shape says.
        extras: see `_attend.Extras`; `k_norm` multiplies `k_mag`.

    Returns:
        (B, H_q, S_q, D) float16 (bfloat16 if q is); with `lse=True` also (B, H_q, S_q) float32.

    Raises:
        ValueError: a shape or a size does not fit.
        TypeError: another dtype.

    Error: D - 2 ham is exact; the rest is float32, rounded once. Packed and unpacked values give the same bits. On CUDA, S_q = 1 with
        D = 128, packed 4-bit values and an output of 16 bits: `v_cents` is rounded to halves (2^-11 of an entry).
    """
    name = "rabitq_fused_attend"
    _attend.check_queries(name, "q", q)
    batch, heads, queries, dim = q.shape
    require(dim % 8 == 0, name, "q", "(B, H_q, S_q, D) with D a multiple of 8", q)
    check_array(name, "q_scale", q_scale, (batch, heads, queries), FLOATS)
    check_array(name, "k_bits", k_bits, (batch, "H_kv", "S_kv", dim // 8), (mx.uint8,))
    kv = k_bits.shape[:3]
    check_array(name, "k_mag", k_mag, kv, FLOATS)
    check_array(name, "k_const", k_const, kv, FLOATS)
    check_array(name, "v_cents", v_cents, ("n",), FLOATS)
    entries = v_cents.shape[0]
    require(1 <= entries <= MAX_CENTROIDS, name, "v_cents", f"(n,) with n from 1 to {MAX_CENTROIDS}", v_cents)
    _attend.check_packed(name, packed)
    bits = max(1, (entries - 1).bit_length())
    if packed is None and isinstance(v_idx, mx.array) and v_idx.shape == (*kv, dim // 2):
        require(entries <= NIBBLE_CENTROIDS, name, "v_cents", f"(n,) with n at most {NIBBLE_CENTROIDS} for nibble-packed v_idx", v_cents)
        packed, bits = "lsb8", 4
    _attend.check_codes(name, "v_idx", v_idx, kv, dim, packed, bits)
    options = _attend.check_options(name, q, kv[1], kv[2], extras)
    if options.empty:
        return _attend.nothing(options)
    if options.k_norm is not None:
        k_mag = k_mag.astype(mx.float32) * options.k_norm.astype(mx.float32)
    if natively():
        keys = _native_attend.Rows(((k_bits, 1, mx.array([-1.0, 1.0])),), "lsb8", k_mag)
        values = _native_attend.Rows(((v_idx, bits, v_cents),), packed, options.v_scale)
        signs = mx.where(q >= 0, 1.0, -1.0) * q_scale.astype(mx.float32)[..., None]
        found = _native_attend.attend(signs, keys, values, options, k_const)
        if found is not None:
            return found
    if backend() == "cpu":
        return _ops(q, q_scale, k_bits, k_mag, k_const, v_idx, v_cents, packed, bits, options)
    halves = options.out_dtype != mx.float32
    return launch(
        _KERNEL,
        q,
        q_scale,
        (k_bits, v_idx, v_cents.astype(mx.float32)),
        options,
        template=[("LAYOUT", layout(packed)), ("BITS", bits), ("T", v_idx.dtype)],
        sizes=(entries,),
        tables=entries,
        k_norm=k_mag,
        k_bias=k_const,
        multiple=8,
        decode=DECODE if halves and packed and bits == DECODE_BITS else None,
        many=MANY,
    )


def _ops(
    q: mx.array,
    q_scale: mx.array,
    k_bits: mx.array,
    k_mag: mx.array,
    k_const: mx.array,
    v_idx: mx.array,
    v_cents: mx.array,
    packed: str | None,
    bits: int,
    options: Options,
) -> mx.array | tuple[mx.array, mx.array]:
    signs = 2 * _attend.unpack_codes(k_bits, options.dim, "lsb8", 1).astype(mx.float32) - 1
    s = _attend.products(mx.where(q >= 0, 1.0, -1.0), signs, options)  # D - 2 ham, exact in float32
    rows = (options.batch, options.kv_heads, options.heads_per_kv, options.queries, 1)
    s = s * q_scale.astype(mx.float32).reshape(rows) * k_mag.astype(mx.float32)[:, :, None, None]
    s = s + k_const.astype(mx.float32)[:, :, None, None]
    return _attend.attention(s, _attend.look_up(v_cents, _attend.unpack_codes(v_idx, options.dim, packed, bits)), options)
