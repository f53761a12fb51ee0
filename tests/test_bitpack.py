"""Bit packing against an oracle that writes one bit at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from formats.bitpack import LAYOUTS, pack, packed_width, unpack


def oracle_pack(row: list[int], bits: int, layout: str) -> bytes:
    per = {"lsb8": None, "lsb32": 32 // bits, "nibble": 2}[layout]
    if layout == "lsb32":
        total = -(-len(row) // per) * 32
        place = [(i // per) * 32 + (i % per) * bits for i in range(len(row))]
    else:
        total = -(-len(row) * bits // 8) * 8
        place = [i * bits for i in range(len(row))]
    out = [0] * total
    for code, start in zip(row, place, strict=True):
        for j in range(bits):
            out[start + j] = code >> j & 1
    return bytes(sum(out[8 * k + j] << j for j in range(8)) for k in range(total // 8))


CASES = [(bits, layout) for layout in LAYOUTS for bits in range(1, 9) if layout != "nibble" or bits == 4]


@pytest.mark.parametrize(("bits", "layout"), CASES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pack_matches_oracle_and_unpacks(bits, layout, data):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=40))
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    packed = pack(codes, bits, layout)
    assert packed.shape == (*shape[:-1], packed_width(shape[-1], bits, layout))
    assert packed.dtype == (np.dtype("<u4") if layout == "lsb32" else np.uint8)
    rows = codes.reshape(int(np.prod(shape[:-1])), shape[-1]).tolist()
    assert packed.tobytes() == b"".join(oracle_pack(row, bits, layout) for row in rows)
    np.testing.assert_array_equal(unpack(packed, bits, shape[-1], layout), codes)


@pytest.mark.parametrize(("bits", "layout"), CASES)
def test_blocks_and_strides(bits, layout):
    # More values than one block, and rows that are not contiguous.
    codes = np.random.default_rng(bits).integers(0, 2**bits, (1500, 3, 2 * 67), dtype=np.uint8)[:, ::2, ::2]
    packed = pack(codes, bits, layout)
    np.testing.assert_array_equal(unpack(packed, bits, 67, layout), codes)
    assert packed[1499, 1].tobytes() == oracle_pack(codes[1499, 1].tolist(), bits, layout)
    wide = np.concatenate([packed, packed], axis=-1)[..., : packed.shape[-1]]
    np.testing.assert_array_equal(unpack(wide, bits, 67, layout), codes)


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 63])
def test_nibble_is_lsb8_of_four_bits(n):
    codes = np.random.default_rng(n).integers(0, 16, (5, n), dtype=np.uint8)
    np.testing.assert_array_equal(pack(codes, 4, "nibble"), pack(codes, 4, "lsb8"))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_full_words_are_the_byte_stream(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 5 * 32 // bits), dtype=np.uint8)
    assert pack(codes, bits, "lsb32").tobytes() == pack(codes, bits, "lsb8").tobytes()


@pytest.mark.parametrize(("bits", "layout"), CASES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (0, 0)])
def test_empty(bits, layout, shape):
    packed = pack(np.zeros(shape, np.uint8), bits, layout)
    assert packed.shape == (*shape[:-1], packed_width(shape[-1], bits, layout))
    assert unpack(packed, bits, shape[-1], layout).shape == shape


@pytest.mark.parametrize(
    ("codes", "bits", "layout", "text"),
    [
        (np.array([8], np.uint8), 3, "lsb8", "below 8"),
        (np.array([16], np.uint8), 4, "nibble", "below 16"),
        (np.array([1], np.int8), 3, "lsb8", "uint8"),
        (np.array([1], np.uint16), 3, "lsb8", "uint8"),
        (np.array([1.0]), 3, "lsb8", "uint8"),
        (np.array(1, np.uint8), 3, "lsb8", "one axis"),
        ([1], 3, "lsb8", "list"),
        (np.array([1], np.uint8), 0, "lsb8", "1 to 8"),
        (np.array([1], np.uint8), 9, "lsb32", "1 to 8"),
        (np.array([1], np.uint8), True, "lsb32", "1 to 8"),
        (np.array([1], np.uint8), 3, "nibble", "must be 4"),
        (np.array([1], np.uint8), 3, "msb8", "layout"),
    ],
)
def test_pack_refuses(codes, bits, layout, text):
    with pytest.raises(ValueError, match=text):
        pack(codes, bits, layout)


@pytest.mark.parametrize(
    ("packed", "bits", "count", "layout", "text"),
    [
        (np.zeros(1, np.uint8), 3, 3, "lsb8", r"\(\.\.\., 2\)"),
        (np.zeros(2, np.uint8), 3, 10, "lsb32", "uint32"),
        (np.zeros(1, np.uint32), 3, 3, "lsb8", "uint8"),
        (np.zeros((), np.uint8), 8, 1, "lsb8", "but got"),
        (b"\0", 8, 1, "lsb8", "bytes"),
        (np.zeros(1, np.uint8), 8, -1, "lsb8", "negative"),
        (np.array([0, 2], np.uint8), 3, 3, "lsb8", "not zero"),
        (np.array([16], np.uint8), 4, 1, "nibble", "not zero"),
        (np.array([1 << 3], np.uint32), 3, 1, "lsb32", "not zero"),
        (np.array([1 << 30, 0], np.uint32), 3, 11, "lsb32", "not zero"),
        (np.array([0, 1 << 31], np.uint32), 3, 20, "lsb32", "not zero"),
    ],
)
def test_unpack_refuses(packed, bits, count, layout, text):
    with pytest.raises(ValueError, match=text):
        unpack(packed, bits, count, layout)
