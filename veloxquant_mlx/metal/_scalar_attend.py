"""Attention over group-affine ("KIVI") keys and values, rebuilt inside the softmax loop.

    k^[s, d] = k_codes[s, d] k_scale[s // g, d] + k_zero[s // g, d]          groups of g tokens per channel
    v^[s, d] = v_codes[s, d] v_scale[s, d // g] + v_zero[s, d // g]          groups of g channels per token
    out[i]   = sum_s softmax_s(scale q[i] . k^[s]) v^[s]

KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (Liu et al. 2024).
"""

from typing import Unpack

import mlx.core as mx

from veloxquant_mlx.metal import _attend, _native_attend
from veloxquant_mlx.metal._attend import INT32_MAX, Extras, Options
from veloxquant_mlx.metal._attend_launch import DECODE_WARPS, Decode, Many, attend_kernel, decode_kernel, launch, layout, many_kernel
from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_int, message, require

MAX_NSG = 32
THREADGROUP_BYTES = 32 * 1024
MAX_BITS = 8

_INPUTS = ("k_codes", "k_scale", "k_zero", "v_codes", "v_token_scale", "v_zero")
_READERS = """kvtool::DenseKeys<kvtool::ChannelAffineReader<D, E, GROUP, LAYOUT, BITSK, T, AK>, D, E> keys{
    {k_codes, k_scale, k_zero, dims[3]}};
kvtool::TokenAffineReader<D, E, GROUP, LAYOUT, BITSV, T, AV> values{v_codes, v_token_scale, v_zero, dims[3]};
(void)tables;"""
_KERNEL = attend_kernel("scalar_fused_decode_attend", _INPUTS, _READERS)
MANY = Many(many_kernel(_KERNEL.name, _INPUTS, _READERS))
_DECODE_KERNEL = decode_kernel(
    _KERNEL,
    """using FastKeys = kvtool::DecodeAffineKeys<GROUP, AK>;
FastKeys fast_keys{k_codes, k_scale, k_zero};
kvtool::DecodeAffineValues<GROUP, AV> fast_values{v_codes, v_token_scale, v_zero};""",
    zeros=True,
    warps="kvtool::DECODE_WARPS * FastKeys::BYTES",
)
# Of 32 tokens, a warp has the codes, their keys' scales and zeros, padded, and the scales and zeros of values, 16 bytes each; and queries.
DECODE = Decode(_DECODE_KERNEL, DECODE_WARPS * (32 * (64 + 64) + 8 * (64 + 16) + 32 * (16 + 16) + 32 * 64))
DECODE_BITS = 4
DECODE_GROUPS = (32, 64, 128)


def scalar_fused_decode_attend(
    q: mx.array,
    k_codes: mx.array,
    k_scale: mx.array,
    k_zero: mx.array,
    v_codes: mx.array,
    v_scale: mx.array,
    v_zero: mx.array,
    group_size: int,
    scale: float,
    nsg: int | None = None,
    *,
    packed: str | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    **extras: Unpack[Extras],
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention over an asymmetrically quantized cache.

    Args:
        q: (B, H_q, S_q, D) float16, bfloat16 or float32. D at most 256; H_q a multiple of H_kv.
        k_codes: (B, H_kv, S_kv, D) uint8.
        k_scale, k_zero: (B, H_kv, ceil(S_kv / group_size), D) float, both of one dtype.
        v_codes: (B, H_kv, S_kv, D) uint8.
        v_scale, v_zero: (B, H_kv, S_kv, ceil(D / group_size)) float, both of one dtype.
        group_size: tokens of a key group, channels of a value group.
        scale: of the scores, usually 1 / sqrt(D).
        nsg: SIMD-groups that split the keys of a threadgroup, 1 to 32, with
            nsg * (H_q / H_kv) * (64 * ceil(D / 32) + 8) <= 32768 bytes (a CUDA block takes at most 16 of them). None to choose; a call
            too small to fill the GPU is then spread over several threadgroups. The result depends on it by float32 rounding only.
        packed: "lsb8" or "lsb32": both code arrays packed along their last axis, see `_attend.unpack_codes`.
        k_bits, v_bits: bits of a packed code, 1 to 8.
        extras: see `_attend.Extras`; without `v_scale`, which is an argument of its own here.

    Returns:
        (B, H_q, S_q, D) float16 (bfloat16 if q is); with `lse=True` also (B, H_q, S_q) float32.

    Raises:
        ValueError: a shape or a size does not fit, or nsg is over the budget.
        TypeError: another dtype, or no bits for packed codes.

    Error: float32 arithmetic, rounded once. On CUDA, S_q = 1 with D = 128, packed 4-bit codes, groups of 32, 64 or 128 and nothing of
        float32: products of 22 bits and sums in float32 on tensor cores.
    """
    name = "scalar_fused_decode_attend"
    _attend.check_queries(name, "q", q)
    batch, dim = q.shape[0], q.shape[3]
    group_size = check_int(name, "group_size", group_size, 1, INT32_MAX)
    scale = _attend.check_scale(name, scale)
    _attend.check_packed(name, packed)
    bits = (_bits(name, "k_bits", k_bits, packed), _bits(name, "v_bits", v_bits, packed))
    width = _attend.packed_width(dim, packed, bits[0])
    check_array(name, "k_codes", k_codes, (batch, "H_kv", "S_kv", width), (mx.uint32,) if packed == "lsb32" else (mx.uint8,))
    kv = k_codes.shape[:3]
    groups = (-(-kv[2] // group_size), -(-dim // group_size))
    _attend.check_codes(name, "v_codes", v_codes, kv, dim, packed, bits[1])
    check_array(name, "k_scale", k_scale, (*kv[:2], groups[0], dim), FLOATS)
    check_array(name, "k_zero", k_zero, k_scale.shape, (k_scale.dtype,))
    check_array(name, "v_scale", v_scale, (*kv, groups[1]), FLOATS)
    check_array(name, "v_zero", v_zero, v_scale.shape, (v_scale.dtype,))
    options = _attend.check_options(name, q, kv[1], kv[2], extras, refused=("v_scale",))
    if nsg is not None:
        nsg = check_int(name, "nsg", nsg, 1, MAX_NSG)
        needed = nsg * options.heads_per_kv * (64 * -(-dim // 32) + 8)
        require(needed <= THREADGROUP_BYTES, name, "nsg", f"so small that it takes {THREADGROUP_BYTES} bytes", f"{nsg}, {needed} bytes")
    if options.empty:
        return _attend.nothing(options)
    if natively():
        keys = _native_attend.Rows(((k_codes, bits[0], None),), packed, options.k_norm, (k_scale, k_zero, group_size, False))
        values = _native_attend.Rows(((v_codes, bits[1], None),), packed, options.v_scale, (v_scale, v_zero, group_size, True))
        # A factor beside steps and zeros has no reader.
        if options.k_norm is None and options.v_scale is None:
            found = _native_attend.attend(q.astype(mx.float32) * scale, keys, values, options)
            if found is not None:
                return found
    if backend() == "cpu":
        return _ops(q, (k_codes, k_scale, k_zero), (v_codes, v_scale, v_zero), group_size, scale, packed, bits, options)
    halves = mx.float32 not in (options.out_dtype, q.dtype, k_scale.dtype, v_scale.dtype)
    fast = halves and bits == (DECODE_BITS, DECODE_BITS) and group_size in DECODE_GROUPS
    return launch(
        _KERNEL,
        q,
        scale,
        (k_codes, k_scale, k_zero, v_codes, v_scale, v_zero),
        options,
        template=[
            *(("GROUP", group_size), ("LAYOUT", layout(packed)), ("BITSK", bits[0]), ("BITSV", bits[1])),
            *(("T", k_codes.dtype), ("AK", k_scale.dtype), ("AV", v_scale.dtype)),
        ],
        nsg=nsg,
        decode=DECODE if fast else None,
        many=MANY,
    )


def _bits(function: str, name: str, bits: int | None, packed: str | None) -> int:
    if packed is None:
        require(bits is None, function, name, "None for codes that are not packed", bits)
        return MAX_BITS
    if bits is None:
        raise TypeError(message(function, name, f"given for packed = {packed!r}", None))
    return check_int(function, name, bits, 1, MAX_BITS)


def _ops(
    q: mx.array,
    keys: tuple[mx.array, mx.array, mx.array],
    values: tuple[mx.array, mx.array, mx.array],
    group_size: int,
    scale: float,
    packed: str | None,
    bits: tuple[int, int],
    options: Options,
) -> mx.array | tuple[mx.array, mx.array]:
    token_group, channel_group = mx.arange(options.length) // group_size, mx.arange(options.dim) // group_size
    k_codes, v_codes = (
        _attend.unpack_codes(codes, options.dim, packed, b).astype(mx.float32) for codes, b in zip((keys[0], values[0]), bits, strict=True)
    )
    k_scale, k_zero = (mx.take(side.astype(mx.float32), token_group, axis=2) for side in keys[1:])
    v_scale, v_zero = (mx.take(side.astype(mx.float32), channel_group, axis=3) for side in values[1:])
    return _attend.dense_attention(q, k_codes * k_scale + k_zero, v_codes * v_scale + v_zero, scale, options)
