"""Value indices of 4 bits, two to a byte: the operand of the RaBitQ attention kernels.

byte j = (v[2 j] & 15) | (v[2 j + 1] & 15) << 4
"""

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._bit_packing import PACK, THREADS
from veloxquant_mlx.metal._checks import INTEGERS, check_array, require
from veloxquant_mlx.metal._kernel import dims
from veloxquant_mlx.native import streams


def rabitq_pack_values(v_idx: mx.array) -> mx.array:
    """Nibble-packed indices, the even element in the low nibble.

    Args:
        v_idx: (..., D) integers, D even; the lowest 4 bits of each are taken.

    Returns:
        (..., D / 2) uint8.

    Raises:
        ValueError: D is odd, or there is no last axis.
        TypeError: not integers.
    """
    name = "rabitq_pack_values"
    check_array(name, "v_idx", v_idx, None, INTEGERS)
    require(v_idx.ndim > 0 and v_idx.shape[-1] % 2 == 0, name, "v_idx", "(..., D) with D even", v_idx)
    codes = v_idx.astype(mx.uint8)  # keeps the lowest 8 bits
    size = codes.size // 2
    if natively() and size:
        return streams.pack(codes.reshape(-1), 4, size, words=False).reshape(*codes.shape[:-1], codes.shape[-1] // 2)
    if backend() == "cpu" or size == 0:
        return _ops(codes)
    return PACK(
        (codes, dims(codes.size, size)),
        template=(("BITS", 4),),
        grid=(size, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((*codes.shape[:-1], codes.shape[-1] // 2),),
        output_dtypes=(mx.uint8,),
    )[0]


def _ops(codes: mx.array) -> mx.array:
    return codes[..., 0::2] & 15 | (codes[..., 1::2] & 15) << 4
