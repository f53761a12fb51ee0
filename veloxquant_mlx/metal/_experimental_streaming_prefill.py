"""Causal attention with a SIMD-group per query row: keys and values stream from memory, no threadgroup memory and no barrier.

The same function as `flash_prefill_attend`, built to be measured against its tiles; online softmax as Milakov and Gimelshein
2018 (arXiv 1805.02867). What an implementation has in flight:

    name               keys at a time   query rows of a SIMD-group
    streaming                1                 1
    streaming_block2         2                 1                     one rescaling of the sum per block of keys
    streaming_block4         4                 1
    streaming_block8         8                 1
    streaming_multirow       1                 4                     each key and value is loaded once for four rows
"""

from typing import Unpack

import mlx.core as mx

from veloxquant_mlx.metal import _attend
from veloxquant_mlx.metal._attend import Extras
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._checks import check_choice
from veloxquant_mlx.metal._kernel import Kernel
from veloxquant_mlx.metal._prefill import COMMON, THREADS, check_causal, check_plain, launch, plain_ops

# Name -> (keys at a time, query rows of a SIMD-group).
IMPLEMENTATIONS = {
    "streaming": (1, 1),
    "streaming_block2": (2, 1),
    "streaming_block4": (4, 1),
    "streaming_block8": (8, 1),
    "streaming_multirow": (1, 4),
}

_SIMDS = THREADS // 32

_KERNEL = Kernel(
    name="streaming_prefill_attend",
    inputs=(*COMMON, "k", "v"),
    outputs=("out", "lse"),
    sources=("prefill",),
    metal="""
  kvtool::prefill_stream<D, KEYS, ROWS, NORM, VSCALE>(
      q, k, v, scale, dims, start, k_norm, v_scale, out, lse, thread_position_in_grid.x / 32, thread_position_in_grid.y,
      thread_index_in_simdgroup);
""",
    cuda="""
  kvtool::prefill_stream<D, KEYS, ROWS, NORM, VSCALE>(q, k, v, scale, dims, start, k_norm, v_scale, out, lse);
""",
)


def streaming_prefill_attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: mx.array,
    implementation: str = "streaming",
    **extras: Unpack[Extras],
) -> mx.array | tuple[mx.array, mx.array]:
    """Causal softmax attention; query i stands at position S_kv - S_q + i.

    Args:
        q: (B, H_q, S_q, D) float16, bfloat16 or float32; D a multiple of 32, at most 128; S_q at most S_kv.
        k: (B, H_kv, S_kv, D), one of the same dtypes; H_q a multiple of H_kv.
        v: (B, H_kv, S_kv, D), one of the same dtypes.
        scale: (1,) float32, usually 1 / sqrt(D).
        implementation: one of IMPLEMENTATIONS; on a CPU all of them are the definition.
        extras: as `flash_prefill_attend`.

    Returns:
        (B, H_q, S_q, D) float16 (bfloat16 if q is); with `lse=True` also (B, H_q, S_q) float32. A row that sees nothing is 0.

    Raises:
        ValueError: a shape or a size does not fit, or an unknown implementation.
        TypeError: another dtype, or an option that this function does not have.

    Error: products, softmax and sums in float32, one rounding of the output.
    """
    name = "streaming_prefill_attend"
    check_choice(name, "implementation", implementation, tuple(IMPLEMENTATIONS))
    check_plain(name, q, k, v, scale, multiple=32)
    options = check_causal(name, q, k.shape[1], k.shape[2], extras)
    if options.empty:
        return _attend.nothing(options)
    if backend() == "cpu":
        return plain_ops(q, k, v, scale, options)
    keys, rows = IMPLEMENTATIONS[implementation]
    groups = -(-options.queries // (rows * _SIMDS))
    return launch(_KERNEL, q, scale, (k, v), options, template=[("KEYS", keys), ("ROWS", rows)], groups=groups)
