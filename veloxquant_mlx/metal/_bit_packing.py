"""Codes of b bits packed into bytes or words, bit 0 lowest.

    lsb8    one little-endian bit stream: code i is at bits [i b, i b + b), bit 0 the lowest of byte 0; codes may straddle bytes
    lsb32   32 // b codes a uint32: code i is at bit (i % per) b of word i // per; none straddles

For b in 1, 2, 4 the bytes of both are the same. `formats/bitpack.py` packs the same bits on the host.
"""

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import check_array, check_choice, check_int, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import streams

THREADS = 256
LAYOUTS = ("lsb8", "lsb32")
STORAGE = {"lsb8": mx.uint8, "lsb32": mx.uint32}

PACK = Kernel(
    name="bit_pack",
    inputs=("codes", "dims"),
    outputs=("packed",),
    sources=("bits",),
    metal="kvtool::pack<BITS>(codes, uint(dims[0]), thread_position_in_grid.x, packed);",
    cuda="""
    const uint32_t j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j < uint32_t(dims[1])) kvtool::pack<BITS>(codes, uint32_t(dims[0]), j, packed);
    """,
)
UNPACK = Kernel(
    name="bit_unpack",
    inputs=("packed", "dims"),
    outputs=("codes",),
    sources=("bits",),
    metal="codes[thread_position_in_grid.x] = uchar(kvtool::unpack<BITS>(packed, thread_position_in_grid.x));",
    cuda="""
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < uint32_t(dims[0])) codes[i] = uint8_t(kvtool::unpack<BITS>(packed, i));
    """,
)


def turboquant_bit_pack(indices: mx.array, b: int, *, layout: str | None = None) -> mx.array:
    """Codes packed b bits each; bits above the b lowest are dropped.

    Args:
        indices: (N,) uint8; N a multiple of 8 // b unless `layout` is given.
        b: 1, 2 or 4; 1 to 8 if `layout` is given.
        layout: "lsb8" or "lsb32", for any N, zero bits behind; None is "lsb8" with the two restrictions above.

    Returns:
        (ceil(N b / 8),) uint8, or for lsb32 (ceil(N / (32 // b)),) uint32.

    Raises:
        ValueError: another b, layout, rank, or N.
        TypeError: not uint8.
    """
    name = "turboquant_bit_pack"
    bits, layout = _check_bits(name, b, layout)
    check_array(name, "indices", indices, ("N",), (mx.uint8,))
    n = indices.size
    if layout is None:
        require(n % (8 // bits) == 0, name, "N", f"divisible by {8 // bits}", n)
    layout = layout or "lsb8"
    width = packed_width(n, bits, layout)
    if width == 0:
        return mx.zeros((0,), STORAGE[layout])
    if natively():
        return streams.pack(indices, bits, width, layout == "lsb32")
    if backend() == "cpu":
        return _pack_ops(indices, bits, layout)
    return PACK(
        [indices, dims(n, width)],
        template=[("BITS", bits)],
        grid=(width, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(width,)],
        output_dtypes=[STORAGE[layout]],
    )[0]


def turboquant_bit_unpack(packed: mx.array, N: int, b: int, *, layout: str | None = None) -> mx.array:
    """The first N codes of a packed buffer.

    Args:
        packed: (M,) uint8, or uint32 for lsb32, with room for N codes.
        N: number of codes.
        b: 1, 2 or 4; 1 to 8 if `layout` is given.
        layout: "lsb8", "lsb32" or None for "lsb8".

    Returns:
        (N,) uint8.

    Raises:
        ValueError: another b or layout, a negative N, `packed` too short or of another rank.
        TypeError: `packed` of another dtype.
    """
    name = "turboquant_bit_unpack"
    bits, layout = _check_bits(name, b, layout)
    layout = layout or "lsb8"
    n = check_int(name, "N", N, 0)
    check_array(name, "packed", packed, ("M",), (STORAGE[layout],))
    width = packed_width(n, bits, layout)
    require(packed.size >= width, name, "packed", f"at least {width} long for {n} codes", packed)
    if n == 0:
        return mx.zeros((0,), mx.uint8)
    if natively():
        return streams.unpack(packed[:width], n, bits)
    if backend() == "cpu":
        return _unpack_ops(packed[:width], n, bits, layout)
    return UNPACK(
        [packed, dims(n)],
        template=[("BITS", bits)],
        grid=(n, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(n,)],
        output_dtypes=[mx.uint8],
    )[0]


def packed_width(n: int, bits: int, layout: str) -> int:
    """Bytes (lsb8) or words (lsb32) that n codes take."""
    return -(-n * bits // 8) if layout == "lsb8" else -(-n // (32 // bits))


def _check_bits(name: str, b: int, layout: str | None) -> tuple[int, str | None]:
    if layout is not None:
        check_choice(name, "layout", layout, LAYOUTS)
        return check_int(name, "b", b, 1, 8), layout
    bits = check_int(name, "b", b, 1, 4)
    check_choice(name, "b", bits, (1, 2, 4))
    return bits, None


def _pack_ops(indices: mx.array, bits: int, layout: str) -> mx.array:
    codes = indices & (2**bits - 1)
    if layout == "lsb32":
        per = 32 // bits
        words = mx.pad(codes, (0, -codes.size % per)).astype(mx.uint32).reshape(-1, per)
        return (words << (mx.arange(per, dtype=mx.uint32) * bits)).sum(axis=1)
    stream = ((codes[:, None] >> mx.arange(bits, dtype=mx.uint8)) & 1).reshape(-1)
    octets = mx.pad(stream, (0, -stream.size % 8)).reshape(-1, 8)
    return (octets << mx.arange(8, dtype=mx.uint8)).sum(axis=1).astype(mx.uint8)


def _unpack_ops(packed: mx.array, n: int, bits: int, layout: str) -> mx.array:
    if layout == "lsb32":
        per = 32 // bits
        codes = (packed[:, None] >> (mx.arange(per, dtype=mx.uint32) * bits)) & (2**bits - 1)
        return codes.reshape(-1)[:n].astype(mx.uint8)
    stream = ((packed[:, None] >> mx.arange(8, dtype=mx.uint8)) & 1).reshape(-1)[: n * bits]
    return (stream.reshape(n, bits) << mx.arange(bits, dtype=mx.uint8)).sum(axis=1).astype(mx.uint8)
