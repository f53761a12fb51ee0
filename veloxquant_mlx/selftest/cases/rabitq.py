"""Hamming scores: cases, refusals, and faults that the cases must notice."""

import math

import numpy as np

from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.oracles import rabitq as oracle

FUNCTION = "rabitq_hamming_score"


def arguments(rng: np.random.Generator, rows: int, width: int) -> dict:
    return {
        "qbits": rng.integers(0, 256, width).astype(np.uint8),
        "bits": rng.integers(0, 256, (rows, width)).astype(np.uint8),
        "Cx": rng.standard_normal(rows).astype(np.float32),
        "scale": rng.standard_normal(1).astype(np.float32),
    }


def case(name: str, rows: int, width: int, change=lambda a: a) -> Case:
    return Case(FUNCTION, name, lambda rng: change(arguments(rng, rows, width)), oracle.hamming_score, ("float32",))


def strided(a: dict) -> dict:
    return a | {key: Strided(a[key]) for key in ("qbits", "bits", "Cx")}


def all_differ(a: dict) -> dict:
    return a | {"bits": np.broadcast_to(~a["qbits"], a["bits"].shape).copy()}


def none_differs(a: dict) -> dict:
    return a | {"bits": np.broadcast_to(a["qbits"], a["bits"].shape).copy()}


def odd_values(a: dict) -> dict:
    a["Cx"][:5] = math.nan, math.inf, -math.inf, 3e38, 1e-30
    return a


def cancelling(a: dict) -> dict:
    """Cx is the negated product up to its rounding: a fused multiply-add would show."""
    distance = np.unpackbits(a["qbits"][None] ^ a["bits"], axis=-1).sum(axis=-1)
    return a | {"Cx": -(distance * a["scale"].astype(np.float64)).astype(np.float32)}


CASES = (
    case("empty", 0, 16),
    case("one", 1, 1),
    case("seven", 7, 4),
    case("d32", 33, 4),
    case("d64", 61, 8),
    case("d80", 61, 10),
    case("d96", 61, 12),
    case("d128", 257, 16),
    case("d256", 100, 32),
    case("d24", 13, 3),
    case("d1032", 5, 129),
    case("blocks", 1031, 5),
    case("strided", 19, 12, strided),
    case("all-differ", 11, 16, all_differ),
    case("none-differs", 11, 16, none_differs),
    case("odd-values", 11, 8, odd_values),
    case("nan-scale", 3, 8, lambda a: a | {"scale": np.array([math.nan], np.float32)}),
    case("infinite-scale", 9, 8, lambda a: a | {"scale": np.array([math.inf], np.float32)}),
    case("outlier-scale", 9, 16, lambda a: a | {"scale": np.array([1234.567], np.float32)}),
    case("cancelling", 300, 16, cancelling),
)


def _error(name: str, error: type[Exception], message: str, **change) -> ErrorCase:
    return ErrorCase(FUNCTION, name, lambda rng: arguments(rng, 5, 8) | change, error, message)


ERRORS = (
    _error("qbits-2d", ValueError, "qbits must be (D / 8,)", qbits=np.zeros((1, 8), np.uint8)),
    _error("qbits-empty", ValueError, "D at least 8", qbits=np.zeros(0, np.uint8), bits=np.zeros((5, 0), np.uint8)),
    _error("qbits-int8", TypeError, "qbits must be uint8", qbits=np.zeros(8, np.int8)),
    _error("qbits-list", TypeError, "qbits must be an mx.array", qbits=[0] * 8),
    _error("bits-1d", ValueError, "bits must be (N, 8)", bits=np.zeros(8, np.uint8)),
    _error("bits-wide", ValueError, "bits must be (N, 8)", bits=np.zeros((5, 16), np.uint8)),
    _error("bits-one-byte", ValueError, "bits must be (N, 8)", bits=np.zeros((5, 1), np.uint8)),
    _error("bits-uint32", TypeError, "bits must be uint8", bits=np.zeros((5, 8), np.uint32)),
    _error("cx-short", ValueError, "Cx must be (5,)", Cx=np.zeros(4, np.float32)),
    _error("cx-one", ValueError, "Cx must be (5,)", Cx=np.zeros(1, np.float32)),
    _error("cx-2d", ValueError, "Cx must be (5,)", Cx=np.zeros((5, 1), np.float32)),
    _error("cx-f16", TypeError, "Cx must be float32", Cx=np.zeros(5, np.float16)),
    _error("scale-scalar", ValueError, "scale must be (1,)", scale=np.array(1, np.float32)),
    _error("scale-per-row", ValueError, "scale must be (1,)", scale=np.zeros(5, np.float32)),
    _error("scale-int", TypeError, "scale must be float32", scale=np.zeros(1, np.int32)),
    _error("scale-float", TypeError, "scale must be an mx.array", scale=1.0),
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: arguments(rng, n, 16), (1, 2, 300)),)

MUTATIONS = (
    Mutation(
        FUNCTION, "and-for-xor", "hamming_load4(a + i) ^ hamming_load4(b + i)", "hamming_load4(a + i) & hamming_load4(b + i)", ("d64",)
    ),
    Mutation(FUNCTION, "tail-dropped", "for (; i < bytes; ++i)", "for (; i + 1 < bytes; ++i)", ("d24",)),
    Mutation(FUNCTION, "row-stride", "size_t(row) * size_t(bytes), bytes)", "size_t(row) * size_t(bytes + 1), bytes)", ("seven",)),
    Mutation(FUNCTION, "fused", "#pragma METAL fp contract(off)", "", ("cancelling",)),
    Mutation(FUNCTION, "no-bound", "row >= uint(rows)", "row > uint(rows)", ("one", "seven")),
)
