"""Causal attention of many queries over plain keys and values, in tiles (FlashAttention, Dao et al. 2022, arXiv 2205.14135).

    out[i] = sum_j softmax_j(scale q[i] . k[j]) v[j]    over j <= S_kv - S_q + i

Tiles of keys that no query of a tile sees are not read.
"""

from typing import Unpack

import mlx.core as mx

from veloxquant_mlx.metal import _attend
from veloxquant_mlx.metal._attend import Extras
from veloxquant_mlx.metal._attend_launch import Many, launch_many, many_kernel
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._prefill import check_causal, check_plain, launch, plain_ops, tile_kernel, tiles
from veloxquant_mlx.metal._prefill_tiles import HALVES, tiled

_KERNEL = tile_kernel(
    "flash_prefill_attend",
    ("k", "v"),
    """const kvtool::PrefillPlain<KT, D> keys{k};
  const kvtool::PrefillPlain<VT, D> values{v};""",
)
_MANY = many_kernel(
    _KERNEL.name,
    ("k", "v"),
    """kvtool::PlainRows<KS, KT, D> key_rows{k, dims[3]};
kvtool::PlainRows<VT, VT, D> value_rows{v, dims[3]};""",
)
_TILED = tiled(_KERNEL, "const kvtool::TilePlain<KT, D> keys{k};\n  const kvtool::TilePlain<VT, D> values{v};", (16, 16))


def flash_prefill_attend(
    q: mx.array, k: mx.array, v: mx.array, scale: mx.array, **extras: Unpack[Extras]
) -> mx.array | tuple[mx.array, mx.array]:
    """Causal softmax attention; query i stands at position S_kv - S_q + i.

    Args:
        q: (B, H_q, S_q, D) float16, bfloat16 or float32; D a multiple of 8, at most 128; S_q at most S_kv.
        k: (B, H_kv, S_kv, D), one of the same dtypes; H_q a multiple of H_kv.
        v: (B, H_kv, S_kv, D), one of the same dtypes.
        scale: (1,) float32, usually 1 / sqrt(D).
        extras: `window`, `start`, `lse`, `k_norm`, `v_scale`, `out_rotation`, `out_dtype` of `_attend.Extras`.

    Returns:
        (B, H_q, S_q, D) float16 (bfloat16 if q is); with `lse=True` also (B, H_q, S_q) float32. A row that sees nothing is 0.

    Raises:
        ValueError: a shape or a size does not fit.
        TypeError: another dtype, or an option that this function does not have.

    Error: products, softmax and sums in float32; one rounding of the output. On CUDA, where D is 64 or 128, q and k have one 16-bit
        dtype, and v and the output 16 bits, weights are rounded to v's dtype: by 2^-11 of themselves at most, 2^-8 in bfloat16;
        `out_rotation` is applied to about 16 bits of either factor.
    """
    name = "flash_prefill_attend"
    check_plain(name, q, k, v, scale, multiple=8)
    options = check_causal(name, q, k.shape[1], k.shape[2], extras)
    if options.empty:
        return _attend.nothing(options)
    if backend() == "cpu":
        return plain_ops(q, k, v, scale, options)
    if backend() == "metal":
        # Halves multiply halves; what differs meets in float32.
        many = Many(_MANY, k.dtype if k.dtype == q.dtype else mx.float32, v.dtype)
        return launch_many(many, q, scale, (k, v), options, template=[("KS", k.dtype)])
    fast = _TILED if k.dtype == q.dtype and v.dtype in HALVES else None
    template = [("KT", k.dtype), ("VT", v.dtype)]
    return launch(_KERNEL, q, scale, (k, v), options, template=template, groups=tiles(options), tiled=fast)
