"""Nibble packing: cases, refusals, and faults that the cases must notice."""

import numpy as np

from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.oracles import rabitq_values as oracle

FUNCTION = "rabitq_pack_values"


def case(name: str, shape, dtype: str = "uint8", low: int = 0, high: int = 256, wrap=lambda x: x) -> Case:
    return Case(FUNCTION, name, lambda rng: {"v_idx": wrap(rng.integers(low, high, shape).astype(dtype))}, oracle.pack_values, ("uint8",))


CASES = (
    case("empty", (0,)),
    case("no-rows", (0, 3, 64)),
    case("no-columns", (3, 0)),
    case("two", (2,)),
    case("six", (3, 2)),
    case("in-range", (2, 2, 5, 64), high=16),
    case("masked", (2, 2, 5, 64)),
    case("d32", (7, 32)),
    case("d80", (3, 80)),
    case("d96", (3, 96)),
    case("d128", (3, 128)),
    case("d256", (3, 256)),
    case("d6", (11, 6)),
    case("blocks", (1031, 4)),
    case("strided", (5, 34), wrap=Strided),
    case("int8", (5, 34), "int8", -128, 128),
    case("uint16", (5, 34), "uint16", 0, 65536),
    case("int32", (5, 34), "int32", -(2**31), 2**31),
    case("uint32", (5, 34), "uint32", 0, 2**32),
    case("int64", (5, 34), "int64", -(2**62), 2**62),
)


def _error(name: str, error: type[Exception], message: str, v_idx) -> ErrorCase:
    return ErrorCase(FUNCTION, name, lambda _: {"v_idx": v_idx}, error, message)


ERRORS = (
    _error("odd", ValueError, "v_idx must be (..., D) with D even", np.zeros((4, 7), np.uint8)),
    _error("one", ValueError, "v_idx must be (..., D) with D even", np.zeros(1, np.uint8)),
    _error("scalar", ValueError, "v_idx must be (..., D) with D even", np.array(3, np.uint8)),
    _error("float", TypeError, "v_idx must be uint8", np.zeros((4, 8), np.float16)),
    _error("bool", TypeError, "v_idx must be uint8", np.zeros((4, 8), np.bool_)),
    _error("list", TypeError, "v_idx must be an mx.array", [1, 2]),
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: {"v_idx": rng.integers(0, 16, (n, 64)).astype(np.uint8)}, (1, 2, 300)),)

MUTATIONS = (
    Mutation(FUNCTION, "nibbles-swapped", "code << (bit - start)", "code << (4 - (bit - start))", ("two", "in-range")),
    Mutation(FUNCTION, "unmasked", "codes[block + k] & ((1u << BITS) - 1)", "codes[block + k]", ("masked",)),
    Mutation(FUNCTION, "next-byte", "start = j % BITS * 8;", "start = (j + 1) % BITS * 8;", ("in-range",)),
)
