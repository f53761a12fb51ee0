"""Packing small unsigned codes into bits, row by row over the last axis. NumPy; the same bits as the packing kernels.

    lsb8    one little-endian bit stream a row: code i is at bits [i b, i b + b) of the stream, bit 0 the lowest of byte 0;
            codes may straddle bytes; ceil(n b / 8) bytes, the rest of the last byte zero
    lsb32   32 // b codes a little-endian uint32 word: code i is at bit (i % per) b of word i // per; the rest zero
    nibble  4 bits: byte j = v[2 j] | v[2 j + 1] << 4; an odd count leaves the last high nibble zero

lsb8 packs 8 codes at once: they are one uint64, whose 8-, 16- and 32-bit lanes are folded together in three shifts.
"""

import numpy as np

LAYOUTS = ("lsb8", "lsb32", "nibble")
# (kept half, moved half) of each fold, and the width of a lane's half in bits.
_FOLDS = (
    (0x00FF00FF00FF00FF, 0xFF00FF00FF00FF00, 8),
    (0x0000FFFF0000FFFF, 0xFFFF0000FFFF0000, 16),
    (0x00000000FFFFFFFF, 0xFFFFFFFF00000000, 32),
)
# Values per block, so that the temporaries of a block stay in the cache.
_BLOCK = 1 << 18


def packed_width(count: int, bits: int, layout: str) -> int:
    """Length of the last axis of the packed array: bytes for lsb8 and nibble, words for lsb32.

    Raises:
        ValueError: unknown layout, bits not in 1 .. 8 (4 for nibble), negative count.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"[bitpack] layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}.")
    if type(bits) is not int or not 1 <= bits <= 8 or (layout == "nibble" and bits != 4):
        raise ValueError(f"[bitpack] bits must be {'4' if layout == 'nibble' else '1 to 8'} for {layout}, but got {bits!r}.")
    if count < 0:
        raise ValueError(f"[bitpack] count must not be negative, but got {count}.")
    return -(-count // (32 // bits)) if layout == "lsb32" else -(-count * bits // 8)


def pack(codes: np.ndarray, bits: int, layout: str) -> np.ndarray:
    """Pack codes along the last axis.

    Args:
        codes: (..., n) uint8, each below 2**bits.
        bits: 1 to 8.
        layout: "lsb8", "lsb32" or "nibble".
    Returns:
        (..., packed_width(n, bits, layout)) uint8, or little-endian uint32 for lsb32.
    Raises:
        ValueError: not uint8, no axis, a code out of range, unknown layout or bits.
    """
    if not isinstance(codes, np.ndarray) or codes.dtype != np.uint8 or codes.ndim == 0:
        got = f"{codes.dtype} {codes.shape}" if isinstance(codes, np.ndarray) else type(codes).__name__
        raise ValueError(f"[pack] codes must be a uint8 array of one axis or more, but got {got}.")
    n = codes.shape[-1]
    width = packed_width(n, bits, layout)
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"[pack] codes must be below {1 << bits} for {bits} bits, but got {int(codes.max())}.")
    rows = codes.reshape(-1, n) if n else np.zeros((0, 0), np.uint8)
    out = np.zeros((*codes.shape[:-1], width), np.dtype("<u4") if layout == "lsb32" else np.uint8)
    if out.size:
        kernel = _pack_words if layout == "lsb32" else _pack_nibbles if layout == "nibble" else _pack_stream
        flat = out.reshape(-1, width)
        for block in _blocks(len(rows), n):
            kernel(rows[block], flat[block], bits)
    return out


def unpack(packed: np.ndarray, bits: int, count: int, layout: str) -> np.ndarray:
    """The inverse of `pack`.

    Args:
        packed: (..., packed_width(count, bits, layout)) uint8, or uint32 for lsb32.
        bits: 1 to 8.
        count: n, the codes in a row.
        layout: "lsb8", "lsb32" or "nibble".
    Returns:
        (..., count) uint8.
    Raises:
        ValueError: wrong dtype or width, unknown layout or bits, bits set after the last code.
    """
    width = packed_width(count, bits, layout)
    dtype = np.dtype("<u4") if layout == "lsb32" else np.dtype("u1")
    if not isinstance(packed, np.ndarray) or packed.dtype != dtype or packed.ndim == 0 or packed.shape[-1] != width:
        got = f"{packed.dtype} {packed.shape}" if isinstance(packed, np.ndarray) else type(packed).__name__
        raise ValueError(f"[unpack] {count} codes of {bits} bits as {layout} are {dtype} (..., {width}), but got {got}.")
    out = np.empty((*packed.shape[:-1], count), np.uint8)
    if out.size:
        if _spare_bits(packed, bits, count, layout):
            raise ValueError("[unpack] bits after the last code are not zero.")
        kernel = _unpack_words if layout == "lsb32" else _unpack_nibbles if layout == "nibble" else _unpack_stream
        rows, flat = packed.reshape(-1, width), out.reshape(-1, count)
        for block in _blocks(len(rows), count):
            kernel(rows[block], flat[block], bits)
    return out


def _spare_bits(packed: np.ndarray, bits: int, count: int, layout: str) -> bool:
    """Whether a bit is set that belongs to no code: after the last code, or in the unused top bits of an lsb32 word."""
    size = 8 * packed.dtype.itemsize
    per = 32 // bits
    used = ((count - 1) % per + 1) * bits if layout == "lsb32" else (count * bits - 1) % 8 + 1
    if used < size and (packed[..., -1] >> packed.dtype.type(used)).any():
        return True
    return layout == "lsb32" and per * bits < 32 and bool((packed >> np.uint32(per * bits)).any())


def _blocks(rows: int, n: int) -> list[slice]:
    step = max(1, _BLOCK // n)
    return [slice(i, i + step) for i in range(0, rows, step)]


def _in_groups(rows: np.ndarray, size: int) -> np.ndarray:
    """Rows padded with zeros to a multiple of `size`, contiguous."""
    n = rows.shape[1]
    if n % size == 0:
        return np.ascontiguousarray(rows)
    out = np.zeros((len(rows), -(-n // size) * size), rows.dtype)
    out[:, :n] = rows
    return out


def _pack_stream(codes: np.ndarray, out: np.ndarray, bits: int) -> None:
    words = _in_groups(codes, 8).view("<u8")
    if bits < 8:
        for i, (kept, moved, half) in enumerate(_FOLDS):
            words = (words & np.uint64(kept)) | ((words & np.uint64(moved)) >> np.uint64(half - (bits << i)))
    stream = words.view(np.uint8).reshape(len(codes), -1, 8)[:, :, :bits].reshape(len(codes), -1)
    out[:] = stream[:, : out.shape[1]]


def _unpack_stream(packed: np.ndarray, out: np.ndarray, bits: int) -> None:
    groups = -(-out.shape[1] // 8)
    spread = np.zeros((len(packed), groups, 8), np.uint8)
    spread[:, :, :bits] = _in_groups(packed, bits).reshape(len(packed), groups, bits)
    words = spread.reshape(len(packed), -1).view("<u8")
    if bits < 8:
        for i, (_, _, half) in reversed(tuple(enumerate(_FOLDS))):
            # Lanes are 2 half bits wide and hold 2 (bits << i) bits: the upper part goes to the lane's upper half.
            width = bits << i
            mask = np.uint64(sum(((1 << width) - 1) << lane for lane in range(0, 64, 2 * half)))
            words = (words & mask) | ((words >> np.uint64(width)) & mask) << np.uint64(half)
    out[:] = words.view(np.uint8)[:, : out.shape[1]]


def _pack_words(codes: np.ndarray, out: np.ndarray, bits: int) -> None:
    if 32 % bits == 0:
        # The codes fill the words without gaps, so the words are the byte stream.
        _pack_stream(_in_groups(codes, 32 // bits), out.view(np.uint8), bits)
        return
    per = 32 // bits
    groups = _in_groups(codes, per).reshape(len(codes), -1, per)
    for i in range(per):
        out |= groups[:, :, i].astype(np.uint32) << np.uint32(i * bits)


def _unpack_words(packed: np.ndarray, out: np.ndarray, bits: int) -> None:
    per = 32 // bits
    codes = np.empty((*packed.shape, per), np.uint8)
    if 32 % bits == 0:
        _unpack_stream(np.ascontiguousarray(packed).view(np.uint8), codes.reshape(len(packed), -1), bits)
    else:
        for i in range(per):
            codes[:, :, i] = (packed >> np.uint32(i * bits)) & np.uint32((1 << bits) - 1)
    out[:] = codes.reshape(len(packed), -1)[:, : out.shape[1]]


def _pack_nibbles(codes: np.ndarray, out: np.ndarray, bits: int) -> None:
    pairs = _in_groups(codes, 2)
    out[:] = pairs[:, 0::2] | pairs[:, 1::2] << np.uint8(bits)


def _unpack_nibbles(packed: np.ndarray, out: np.ndarray, bits: int) -> None:
    out[:, 0::2] = packed & np.uint8(15)
    out[:, 1::2] = packed[:, : out.shape[1] // 2] >> np.uint8(bits)
