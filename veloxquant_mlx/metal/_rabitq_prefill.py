"""Attention of many queries over 1-bit keys (RaBitQ, arXiv 2405.12497) and 4-bit codebook values, with exact dot products.

    s[i, j] = scale (q[i] . signs[j]) k_mag[j] + k_const[j]
    out[i]  = sum_j softmax_j(s[i, j]) v_cents[v_idx[j]]

Keys and values are decoded inside a tile, never as a whole. Unlike `rabitq_fused_attend` the query keeps its values.
"""

from typing import Unpack

import mlx.core as mx

from veloxquant_mlx.metal import _attend, _native_attend
from veloxquant_mlx.metal._attend import Extras, Options
from veloxquant_mlx.metal._attend_launch import FIRST_OWN_SIZE, Many, launch_many, many_kernel
from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, require
from veloxquant_mlx.metal._prefill import check_heads, launch, tile_kernel, tiles
from veloxquant_mlx.metal._prefill_tiles import HALVES, tiled

MAX_CENTROIDS = 16

_KERNEL = tile_kernel(
    "rabitq_prefill_attend",
    ("k_bits", "v_idx", "v_cents"),
    """const kvtool::PrefillSigns<D> keys{k_bits};
  const kvtool::PrefillNibbles<D> values{v_idx, v_cents, dims[7] - 1};""",
)
_MANY = many_kernel(
    _KERNEL.name,
    ("k_bits", "v_idx", "v_cents"),
    f"""kvtool::stage(v_cents, tables, dims[{FIRST_OWN_SIZE}], thread_index_in_threadgroup, NSG * 32);
kvtool::SignRows<KT, D> key_rows{{k_bits, dims[3]}};
typedef kvtool::TableReader<D, 8, 1, 4, uint8_t> Nibbles;
kvtool::CodedRows<Nibbles> value_rows{{Nibbles{{v_idx, tables, dims[{FIRST_OWN_SIZE}], dims[3]}}}};""",
)
_TILED = tiled(
    _KERNEL,
    """const auto keys = kvtool::tile_signs<D>(q, k_bits);
  const kvtool::TileNibbles<D> values{v_idx, v_cents, dims[7] - 1};""",
    (1, 4),
    table=256 * 32 * 4,
)


def rabitq_prefill_attend(
    q: mx.array,
    scale: mx.array,
    k_bits: mx.array,
    k_mag: mx.array,
    k_const: mx.array,
    v_idx: mx.array,
    v_cents: mx.array,
    *,
    packed: str | None = "lsb8",
    **extras: Unpack[Extras],
) -> mx.array | tuple[mx.array, mx.array]:
    """Softmax attention over sign-coded keys and nibble-coded values; without a mask unless `causal=True`.

    Args:
        q: (B, H_q, S_q, D) float16, bfloat16 or float32; D a multiple of 8, at most 128; H_q a multiple of H_kv.
        scale: (1,) float32, usually 1 / sqrt(D).
        k_bits: (B, H_kv, S_kv, D / 8) uint8, bit t of byte b is 1 where element 8 b + t is positive.
        k_mag: (B, H_kv, S_kv) float, magnitude of each key.
        k_const: (B, H_kv, S_kv) float, added to the scores.
        v_idx: (B, H_kv, S_kv, D / 2) uint8, two indices a byte, low nibble first; an index beyond the table is clamped.
        v_cents: (n,) float, 1 <= n <= 16.
        packed: "lsb8" as above; "lsb32": k_bits (..., ceil(D / 32)) and v_idx (..., D / 8) uint32 words, lowest bits first.
        extras: `causal`, `window`, `start`, `lse`, `k_norm` (multiplies `k_mag`), `v_scale`, `out_rotation`, `out_dtype` of
            `_attend.Extras`.

    Returns:
        (B, H_q, S_q, D) float16 (bfloat16 if q is); with `lse=True` also (B, H_q, S_q) float32. A row that sees nothing is 0.

    Raises:
        ValueError: a shape or a size does not fit.
        TypeError: another dtype, or an option that this function does not have.

    Error: q . signs is a float32 sum of exact terms; softmax and sums in float32; one rounding of the output. On CUDA, where D is 64
        or 128 and q and the output have 16 bits, weights, entries of `v_cents`, `v_scale` and the products of these two are rounded to
        halves, by 2^-11 of themselves at most; `out_rotation` is applied to about 16 bits of either factor.
    """
    name = "rabitq_prefill_attend"
    check_heads(name, q, multiple=8)
    batch, dim = q.shape[0], q.shape[3]
    check_array(name, "scale", scale, (1,), (mx.float32,))
    _attend.check_packed(name, packed)
    require(packed is not None, name, "packed", "lsb8 or lsb32", packed)
    code = mx.uint8 if packed == "lsb8" else mx.uint32
    check_array(name, "k_bits", k_bits, (batch, "H_kv", "S_kv", _attend.packed_width(dim, packed, 1)), (code,))
    kv = k_bits.shape[:3]
    check_array(name, "k_mag", k_mag, kv, FLOATS)
    check_array(name, "k_const", k_const, kv, FLOATS)
    _attend.check_codes(name, "v_idx", v_idx, kv, dim, packed, 4)
    check_array(name, "v_cents", v_cents, ("n",), FLOATS)
    require(1 <= v_cents.shape[0] <= MAX_CENTROIDS, name, "v_cents", f"(n,) with n from 1 to {MAX_CENTROIDS}", v_cents)
    options = _attend.check_options(name, q, kv[1], kv[2], extras, refused=("splits",))
    if options.empty:
        return _attend.nothing(options)
    if options.k_norm is not None:
        k_mag = k_mag.astype(mx.float32) * options.k_norm.astype(mx.float32)
    if packed == "lsb32":
        k_bits, v_idx = mx.view(k_bits, mx.uint8)[..., : dim // 8], mx.view(v_idx, mx.uint8)
    if natively():
        keys = _native_attend.Rows(((k_bits, 1, mx.array([-1.0, 1.0])),), "lsb8", k_mag)
        values = _native_attend.Rows(((v_idx, 4, v_cents),), "lsb8", options.v_scale)
        found = _native_attend.attend(q.astype(mx.float32) * scale, keys, values, options, k_const)
        if found is not None:
            return found
    if backend() == "cpu":
        return _ops(q, scale, k_bits, k_mag, k_const, v_idx, v_cents, options)
    arrays = (k_bits, v_idx, v_cents.astype(mx.float32))
    sizes = (v_cents.shape[0],)
    if backend() == "metal":
        many = Many(_MANY, q.dtype if q.dtype in HALVES else mx.float32)
        return launch_many(many, q, scale, arrays, options, sizes=sizes, tables=MAX_CENTROIDS, k_norm=k_mag, k_bias=k_const)
    return launch(
        *(_KERNEL, q, scale, arrays, options),
        template=(),
        groups=tiles(options),
        k_norm=k_mag,
        k_bias=k_const,
        sizes=sizes,
        tiled=_TILED,
    )


def _ops(
    q: mx.array,
    scale: mx.array,
    k_bits: mx.array,
    k_mag: mx.array,
    k_const: mx.array,
    v_idx: mx.array,
    v_cents: mx.array,
    options: Options,
) -> mx.array | tuple[mx.array, mx.array]:
    signs = 2 * _attend.unpack_codes(k_bits, options.dim, "lsb8", 1).astype(mx.float32) - 1
    s = _attend.products(q, signs, options) * scale * k_mag.astype(mx.float32)[:, :, None, None]
    s = s + k_const.astype(mx.float32)[:, :, None, None]
    return _attend.attention(s, _attend.look_up(v_cents, _attend.unpack_codes(v_idx, options.dim, "lsb8", 4)), options)
