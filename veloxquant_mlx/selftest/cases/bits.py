"""turboquant_bit_pack and turboquant_bit_unpack."""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.oracles.bits import pack, unpack

# N: one byte, one word, more than a threadgroup, and not a multiple of a threadgroup.
SIZES = {"one": 8, "word": 32, "odd-groups": 1000, "groups": 2048}
DENSE = [(layout, b, n) for layout in ("lsb8", "lsb32") for b in (1, 3, 4, 5, 7, 8) for n in (1, 37)]


def _packing(n: int, b: int, high: int | None = None, **extra: Any) -> Any:
    return lambda rng: {"indices": rng.integers(0, high or 2**b, n, dtype=np.uint8), "b": b, **extra}


def _unpacking(n: int, b: int, spare: int = 0, layout: str | None = None) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        packed = pack(rng.integers(0, 2**b, n, dtype=np.uint8), b, layout)
        extra = {} if layout is None else {"layout": layout}
        return {"packed": np.concatenate([packed, np.full(spare, 0xA5, packed.dtype)]), "N": n, "b": b, **extra}

    return make


PACK, UNPACK = "turboquant_bit_pack", "turboquant_bit_unpack"
CASES = (
    *(Case(PACK, f"b{b}-{name}", _packing(n, b), pack, ("uint8",)) for b in (1, 2, 4) for name, n in SIZES.items()),
    *(
        Case(PACK, f"{layout}-b{b}-{n}", _packing(n, b, layout=layout), pack, ("uint8" if layout == "lsb8" else "uint32",))
        for layout, b, n in DENSE
    ),
    *(Case(PACK, f"b{b}-high-bits-dropped", _packing(64, b, high=256), pack, ("uint8",)) for b in (1, 2, 4)),
    Case(PACK, "empty", _packing(0, 2), pack, ("uint8",)),
    Case(PACK, "strided", lambda rng: {"indices": Strided(rng.integers(0, 4, 64, dtype=np.uint8)), "b": 2}, pack, ("uint8",)),
    *(Case(UNPACK, f"b{b}-{name}", _unpacking(n, b), unpack, ("uint8",)) for b in (1, 2, 4) for name, n in SIZES.items()),
    *(Case(UNPACK, f"{layout}-b{b}-{n}", _unpacking(n, b, layout=layout), unpack, ("uint8",)) for layout, b, n in DENSE),
    *(Case(UNPACK, f"b{b}-longer-buffer", _unpacking(40, b, spare=3), unpack, ("uint8",)) for b in (1, 2, 4)),
    Case(UNPACK, "b2-count-within-a-byte", _unpacking(13, 2, layout="lsb8"), unpack, ("uint8",)),
    Case(UNPACK, "empty", lambda rng: {"packed": np.zeros(0, np.uint8), "N": 0, "b": 2}, unpack, ("uint8",)),
    Case(UNPACK, "strided", lambda rng: {"packed": Strided(rng.integers(0, 256, 16, dtype=np.uint8)), "N": 64, "b": 2}, unpack, ("uint8",)),
)

ERRORS = (
    *(
        ErrorCase(PACK, f"b{b}", lambda rng, b=b: {"indices": np.zeros(8, np.uint8), "b": b}, ValueError, "b must be")
        for b in (0, 3, 5, 8, -1)
    ),
    ErrorCase(PACK, "b-float", lambda rng: {"indices": np.zeros(8, np.uint8), "b": 2.0}, TypeError, "b must be an integer, but got float."),
    ErrorCase(PACK, "count", lambda rng: {"indices": np.zeros(7, np.uint8), "b": 2}, ValueError, "N must be divisible by 4, but got 7."),
    ErrorCase(
        PACK, "rank", lambda rng: {"indices": np.zeros((2, 8), np.uint8), "b": 2}, ValueError, "indices must be (N,), but got (2, 8)."
    ),
    ErrorCase(PACK, "dtype", lambda rng: {"indices": np.zeros(8, np.int32), "b": 2}, TypeError, "indices must be uint8, but got int32."),
    ErrorCase(PACK, "no-array", lambda rng: {"indices": [1, 2], "b": 2}, TypeError, "indices must be an mx.array, but got list."),
    ErrorCase(
        PACK, "layout", lambda rng: {"indices": np.zeros(8, np.uint8), "b": 2, "layout": "msb"}, ValueError, "lsb8 or lsb32, but got 'msb'."
    ),
    *(
        ErrorCase(UNPACK, f"b{b}", lambda rng, b=b: {"packed": np.zeros(8, np.uint8), "N": 4, "b": b}, ValueError, "b must be")
        for b in (0, 3, 8)
    ),
    ErrorCase(UNPACK, "short", lambda rng: {"packed": np.zeros(2, np.uint8), "N": 17, "b": 1}, ValueError, "at least 3 long for 17 codes"),
    ErrorCase(
        UNPACK, "negative", lambda rng: {"packed": np.zeros(2, np.uint8), "N": -1, "b": 1}, ValueError, "N must be at least 0, but got -1."
    ),
    ErrorCase(UNPACK, "rank", lambda rng: {"packed": np.zeros((2, 2), np.uint8), "N": 4, "b": 2}, ValueError, "packed must be (M,)"),
    ErrorCase(
        UNPACK, "dtype", lambda rng: {"packed": np.zeros(8, np.uint32), "N": 4, "b": 2}, TypeError, "packed must be uint8, but got uint32."
    ),
    ErrorCase(
        UNPACK, "out-dtype", lambda rng: {"packed": mx.float32, "N": 4, "b": 2}, TypeError, "packed must be an mx.array, but got Dtype."
    ),
)

LENGTHS = (
    LengthCase(PACK, lambda rng, n: {"indices": rng.integers(0, 4, n, dtype=np.uint8), "b": 2}, (8, 64, 5000)),
    LengthCase(UNPACK, lambda rng, n: {"packed": rng.integers(0, 256, n, dtype=np.uint8), "N": 4 * n, "b": 2}, (2, 64, 1000)),
)

MUTATIONS = (
    Mutation(PACK, "bit-order", "code << (bit - start)", "code << (8 - BITS - (bit - start))", ("b2-one",)),
    Mutation(PACK, "no-mask", "codes[block + k] & ((1u << BITS) - 1)", "codes[block + k]", ("b2-high-bits-dropped",)),
    Mutation(PACK, "reads-past-the-end", "if (block + k >= n) break;", "", ("lsb8-b3-37",), fault="out of bounds: reads codes[37]"),
    Mutation(PACK, "writes-past-the-end", "stream[j] =", "stream[j + 1] =", ("b4-groups",), fault="out of bounds: writes packed[1024]"),
    Mutation(PACK, "leaves-a-byte", "stream[j] =", "if (j) stream[j] =", ("b4-word",), fault="unwritten: no thread writes packed[0]"),
    Mutation(UNPACK, "no-straddle", "shift + BITS > 8", "shift + BITS > 9", ("lsb8-b3-37",)),
    Mutation(UNPACK, "words-msb-first", "i % per * BITS)", "(per - 1 - i % per) * BITS)", ("lsb32-b4-37",)),
    Mutation(
        UNPACK, "wrong-space", "const device uint* words", "const threadgroup uint* words", ("lsb32-b4-37",), fault="does not compile"
    ),
)
