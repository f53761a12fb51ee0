"""Value indices of 4 bits, two to a byte: the operand of the RaBitQ attention kernels.

byte j = (v[2 j] & 15) | (v[2 j + 1] & 15) << 4
"""

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._checks import INTEGERS, check_array, require
from veloxquant_mlx.metal._kernel import Kernel, dims

TILE, THREADS = 1024, 256  # bytes and threads of a group, as in src/scalar


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
    if backend() == "cpu" or codes.size == 0:
        return _ops(codes)
    size = codes.size // 2
    return _kernel(
        (codes, dims(size)),
        grid=(-(-size // TILE) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((*codes.shape[:-1], codes.shape[-1] // 2),),
        output_dtypes=(mx.uint8,),
    )[0]


def _ops(codes: mx.array) -> mx.array:
    return codes[..., 0::2] & 15 | (codes[..., 1::2] & 15) << 4


_kernel = Kernel(
    name="rabitq_pack_values",
    inputs=("codes", "dims"),
    outputs=("packed",),
    sources=("nearest", "scalar"),
    metal="scalar_pack_nibbles(codes, packed, uint(dims[0]), threadgroup_position_in_grid.x, thread_position_in_threadgroup.x);",
    cuda="scalar_pack_nibbles(codes, packed, unsigned(dims[0]), blockIdx.x, threadIdx.x);",
)
