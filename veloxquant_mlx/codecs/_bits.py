"""Packed codes: `lsb8` bit streams along the last axis, in pure MLX.

Code i of a row occupies bits [i b, (i + 1) b) of the row's bytes, least significant bit first; a row takes ceil(D b / 8) bytes and its
spare bits are 0. Eight codes are exactly b bytes, so both directions work on the eight as one little-endian 64-bit word: neighbouring
lanes are merged (or split) three times, 8 -> 16 -> 32 -> 64 bits wide.
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

_MASKS = (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF)  # the lower lane of each pair, by step


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes of a packed row: ceil(dim * bits / 8)."""
    return -(-dim * bits // 8)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes along the last axis.

    Args:
        codes: (..., D) uint8, each below 2**bits.
        bits: 1..8.

    Returns:
        (..., ceil(D * bits / 8)) uint8.
    """
    dim = codes.shape[-1]
    if bits == 8:
        return codes
    words = _pad_last(codes, -dim % 8).view(mx.uint64)
    for step, mask in enumerate(_MASKS):
        width, lane = bits << step, 8 << step
        lower = mx.array(mask, dtype=mx.uint64)
        words = (words & lower) | ((words >> lane & lower) << width)
    packed = words.view(mx.uint8).reshape(*codes.shape[:-1], -1, 8)[..., :bits]
    # A strided view of single bytes would keep all eight of each word in memory.
    return mx.contiguous(packed.reshape(*codes.shape[:-1], -1)[..., : packed_bytes(dim, bits)])


def unpack(packed: mx.array, bits: int, dim: int) -> mx.array:
    """Inverse of `pack`: (..., ceil(dim * bits / 8)) uint8 -> (..., dim) uint8."""
    return packed if bits == 8 else _split(packed, bits, dim, steps=3).view(mx.uint8)[..., :dim]


def lookup(packed: mx.array, codebook: tuple[float, ...], dim: int) -> mx.array:
    """The codewords of packed codes.

    Args:
        packed: (..., ceil(dim * bits / 8)) uint8.
        codebook: 2**bits values, bits 1..8.
        dim: codes per row.

    Returns:
        (..., dim) float32.
    """
    bits = len(codebook).bit_length() - 1
    # Bytes hold whole pairs of codes, or are split into lanes of one pair each.
    index = packed if 8 % bits == 0 else _split(packed, bits, dim, 2).view(mx.uint16)
    tables = _tables(codebook)
    # Numbers of 64 bits along the axis of a flat table: on a CPU, MLX's gather of rows takes four times as long.
    found = [mx.take_along_axis(table, index.reshape(index.size), axis=0) for table in tables]
    values = (found[0] if len(found) == 1 else mx.stack(found, axis=-1)).view(mx.float32)
    width = index.shape[-1] * len(tables) * (1 if bits == 8 else 2)
    return values.reshape(*packed.shape[:-1], width)[..., :dim]


def _split(packed: mx.array, bits: int, dim: int, steps: int) -> mx.array:
    """64-bit words of eight codes each; after k steps a lane of 64 >> k bits holds 8 >> k codes."""
    groups = -(-dim // 8)
    fill = groups * bits - packed.shape[-1]
    words = _pad_last(packed, fill).reshape(*packed.shape[:-1], groups, bits)
    words = _pad_last(words, 8 - bits).reshape(*packed.shape[:-1], groups * 8).view(mx.uint64)
    for step, mask in list(enumerate(_MASKS))[::-1][:steps]:
        width, lane = bits << step, 8 << step
        codes = mx.array(mask & _repeat((1 << width) - 1, 2 * lane), dtype=mx.uint64)
        words = (words & codes) | ((words >> width & codes) << lane)
    return words


def _repeat(value: int, lane: int) -> int:
    return sum(value << shift for shift in range(0, 64, lane))


def _pad_last(x: mx.array, count: int) -> mx.array:
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)]) if count else x


@lru_cache(maxsize=32)
def _tables(codebook: tuple[float, ...]) -> list[mx.array]:
    """Flat tables, one for each pair of codes that an index of `lookup` holds: both codewords as one uint64; of 8 bits, one as float32."""
    bits, values = len(codebook).bit_length() - 1, np.asarray(codebook, dtype=np.float32)
    if bits == 8:
        tables = [mx.array(values)]
    else:
        codes = 8 // bits if 8 % bits == 0 else 2
        index = np.arange(1 << bits * codes)[:, None] >> (bits * np.arange(codes)) & (1 << bits) - 1
        tables = [mx.array(values[index[:, i : i + 2]]).view(mx.uint64).reshape(len(index)) for i in range(0, codes, 2)]
    mx.eval(tables)
    return tables
