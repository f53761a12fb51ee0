"""Packed codes: `lsb8` bit streams along the last axis, in pure MLX.

Code i of a row occupies bits [i b, (i + 1) b) of the row's bytes, least significant bit first; a row takes ceil(D b / 8) bytes and its
spare bits are 0. Eight codes are exactly b bytes, so both directions work on the eight as one little-endian 64-bit word: neighbouring
lanes are merged (or split) three times, 8 -> 16 -> 32 -> 64 bits wide.
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

_MASKS = (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF)  # the lower lane of each pair, by step
# Codes looked up at once: a table row gives that many values, and the table stays within a core's cache (1 MiB at most).
_TOGETHER = {1: 8, 2: 4, 3: 4, 4: 4, 5: 2, 6: 2, 7: 2, 8: 1}


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
    return packed.reshape(*codes.shape[:-1], -1)[..., : packed_bytes(dim, bits)]


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
    together = _TOGETHER[bits]
    if together * bits == 8:
        index = packed
    elif together * bits == 16:
        index = _pad_last(packed, packed.shape[-1] % 2).view(mx.uint16)
    else:
        steps = {4: 1, 2: 2}[together]  # leave lanes of four or of two codes unsplit
        index = _split(packed, bits, dim, steps).view(mx.uint32 if together == 4 else mx.uint16)
    values = mx.take(_table(codebook, together), index, axis=0)
    return values.reshape(*packed.shape[:-1], index.shape[-1] * together)[..., :dim]


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
def _table(codebook: tuple[float, ...], together: int) -> mx.array:
    """(2**(bits * together), together) float32: the codewords of that many neighbouring codes, by their joint bits."""
    bits = len(codebook).bit_length() - 1
    index = np.arange(1 << bits * together)[:, None] >> (bits * np.arange(together)) & (1 << bits) - 1
    table = mx.array(np.asarray(codebook, dtype=np.float32)[index])
    mx.eval(table)
    return table
