"""Scalar quantization: cases, refusals, and faults that the cases must notice."""

import math

import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.oracles import scalar_quant as oracle

QUANTIZE, DEQUANTIZE, HADAMARD = "turboquant_scalar_quantize", "turboquant_scalar_dequantize", "turboquant_hadamard_quantize"
# Lloyd-Max levels of N(0, 1) (Max 1960), the positive half.
LEVELS = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3880, 0.6567, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}
ODD_VALUES = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, 1e-30)


def table(b: int, scale: float = 1.0) -> np.ndarray:
    half = np.array(LEVELS[b])
    return (np.concatenate([-half[::-1], half]) * scale).astype(np.float32)


def as_dtype(values: np.ndarray, dtype: str):
    values = np.asarray(values)
    return Bf16(values.astype(np.float32)) if dtype == "bfloat16" else values.astype(dtype)


def quantize(name: str, shape, b: int, dtype: str = "float32", centroids=None, wrap=lambda x: x, values=None) -> Case:
    def make(rng: np.random.Generator) -> dict:
        x = rng.standard_normal(shape) * 1.2 if values is None else np.asarray(values).reshape(shape)
        return {"x": wrap(as_dtype(x, dtype)), "centroids": table(b) if centroids is None else centroids, "b": b}

    return Case(QUANTIZE, name, make, oracle.quantize, ("uint8",))


def dequantize(name: str, shape, count: int, centroids=None, wrap=lambda x: x) -> Case:
    def make(rng: np.random.Generator) -> dict:
        return {
            "indices": wrap(rng.integers(0, 256, shape).astype(np.uint8)),  # most beyond the last centroid
            "centroids": rng.standard_normal(count).astype(np.float32) if centroids is None else centroids,
        }

    return Case(DEQUANTIZE, name, make, oracle.dequantize, ("float16",))


def rotated(name: str, rows: int, dim: int, b: int, dtype: str = "float16", wrap=lambda x: x, change=lambda x: x) -> Case:
    def make(rng: np.random.Generator) -> dict:
        x = change(rng.standard_normal((rows, dim)))
        return {"x": wrap(as_dtype(x, dtype)), "diag": signs(rng, dim), "centroids": table(b), "b": b}

    return Case(HADAMARD, name, make, oracle.hadamard_quantize, ("uint8",))


def signs(rng: np.random.Generator, dim: int) -> np.ndarray:
    return rng.choice(np.array([-1, 1], dtype=np.float32), dim)


def outlier(x: np.ndarray) -> np.ndarray:
    x[0, 3] = 1000.0
    return x


def odd_rows(x: np.ndarray) -> np.ndarray:
    """NaN, an infinity, two infinities, zeros, the largest float16; one per row."""
    x[0, 5], x[1, 0], x[2, [1, 2]], x[3], x[4] = math.nan, math.inf, [math.inf, -math.inf], 0, 65504
    return x


def integers(x: np.ndarray) -> np.ndarray:
    """Small integers: with D = 4^k the rotation is exact in float32, and ties are real."""
    return np.rint(x * 2)


def exact(name: str, dim: int) -> Case:
    def make(rng: np.random.Generator) -> dict:
        x = integers(rng.standard_normal((7, dim))).astype(np.float16)
        return {"x": x, "diag": signs(rng, dim), "centroids": np.array([-1.5, -0.5, 0.5, 1.5], dtype=np.float32), "b": 2}

    return Case(HADAMARD, name, make, oracle.hadamard_quantize, ("uint8",))


CASES = (
    quantize("empty", (0,), 2),
    quantize("no-columns", (3, 0), 2),
    quantize("one", (1,), 2),
    quantize("seven", (7,), 4),
    quantize("scalar", (), 2),
    quantize("prime", (1031,), 4),
    quantize("blocks", (3, 1024), 2),
    quantize("4d", (2, 3, 5, 80), 2),
    quantize("b1-f16", (3, 67), 1, "float16"),
    quantize("b3-f16", (2, 96), 3, "float16"),
    quantize("b4-bf16", (5, 32), 4, "bfloat16"),
    quantize("strided", (3, 33), 2, wrap=Strided),
    quantize("strided-bf16", (3, 33), 4, "bfloat16", wrap=Strided),
    quantize("odd-values", (8,), 2, values=ODD_VALUES),
    quantize("odd-values-f16", (8,), 3, "float16", values=(*ODD_VALUES[:5], 65504, -65504, 6e-8)),
    quantize("ties", (5,), 2, values=(-1.0, 0.0, 1.0, 0.5, -0.5), centroids=np.array([-1.5, -0.5, 0.5, 1.5], dtype=np.float32)),
    quantize("unsorted", (500,), 2, centroids=np.array([1.5, -0.5, 0.5, -1.5], dtype=np.float32)),
    quantize("equal", (100,), 2, centroids=np.array([0.5, 0.5, -0.5, -0.5], dtype=np.float32)),
    quantize("nan-centroid", (100,), 2, centroids=np.array([math.nan, -0.5, 0.5, math.inf], dtype=np.float32)),
    quantize("tiny", (300,), 4, values=np.linspace(-3e-30, 3e-30, 300), centroids=table(4, 1e-30)),  # squares would all be 0
    quantize("huge", (300,), 4, values=np.linspace(-3e30, 3e30, 300), centroids=table(4, 1e30)),  # squares would all be infinite
    quantize("centroids-f16", (300,), 3, centroids=table(3).astype(np.float16)),
    quantize("outlier", (4, 64), 2, values=np.where(np.arange(256) == 77, 1000.0, np.linspace(-2, 2, 256))),
    dequantize("empty", (0,), 4),
    dequantize("one", (1,), 2),
    dequantize("seven", (7,), 8),
    dequantize("prime", (2053,), 16),
    dequantize("b8", (3, 96), 256),
    dequantize("4d", (2, 3, 5, 64), 16),
    dequantize("strided", (3, 33), 16, wrap=Strided),
    dequantize("halves", (64,), 4, centroids=np.array([1.00048828125, 1.00146484375, 70000, 2e-8], dtype=np.float32)),
    dequantize("odd-values", (64,), 4, centroids=np.array([math.nan, math.inf, -0.0, -math.inf], dtype=np.float32)),
    dequantize("centroids-bf16", (64,), 4, centroids=Bf16(np.array([-1.5, -0.4, 0.4, 1.5]))),
    rotated("empty", 0, 64, 2),
    rotated("d1", 3, 1, 2),
    rotated("d2", 5, 2, 2),
    rotated("d16", 9, 16, 4),
    rotated("d32", 1, 32, 1),
    rotated("d64", 13, 64, 2),
    rotated("d128", 3, 128, 4),
    rotated("d256", 3, 256, 3),
    rotated("d1024", 2, 1024, 4),
    rotated("d128-many", 37, 128, 4),
    rotated("d64-f32", 5, 64, 2, "float32"),
    rotated("d64-bf16", 5, 64, 2, "bfloat16"),
    rotated("strided", 5, 64, 2, wrap=Strided),
    rotated("outlier", 2, 128, 4, change=outlier),
    rotated("odd-rows", 6, 64, 2, change=odd_rows),
    exact("ties-d64", 64),
    exact("ties-d256", 256),
    exact("ties-d16", 16),
)


def _quantize_error(name: str, error: type[Exception], message: str, **change) -> ErrorCase:
    good = {"x": np.zeros((2, 8), np.float32), "centroids": table(2), "b": 2}
    return ErrorCase(QUANTIZE, name, lambda _: good | change, error, message)


def _dequantize_error(name: str, error: type[Exception], message: str, **change) -> ErrorCase:
    good = {"indices": np.zeros((2, 8), np.uint8), "centroids": table(2)}
    return ErrorCase(DEQUANTIZE, name, lambda _: good | change, error, message)


def _hadamard_error(name: str, error: type[Exception], message: str, **change) -> ErrorCase:
    good = {"x": np.zeros((2, 8), np.float16), "diag": np.ones(8, np.float32), "centroids": table(2), "b": 2}
    return ErrorCase(HADAMARD, name, lambda _: good | change, error, message)


def _common_errors(make) -> tuple[ErrorCase, ...]:
    return (
        make("b0", ValueError, "b must be between 1 and 4", b=0),
        make("b5", ValueError, "b must be between 1 and 4", b=5, centroids=np.zeros(32, np.float32)),
        make("b-float", TypeError, "b must be an integer", b=2.0),
        make("b-bool", TypeError, "b must be an integer", b=True),
        make("few-centroids", ValueError, "centroids must be (4,)", centroids=np.zeros(3, np.float32)),
        make("many-centroids", ValueError, "centroids must be (4,)", centroids=np.zeros(8, np.float32)),
        make("centroids-2d", ValueError, "centroids must be (4,)", centroids=np.zeros((1, 4), np.float32)),
        make("centroids-int", TypeError, "centroids must be float16", centroids=np.zeros(4, np.int32)),
        make("centroids-list", TypeError, "centroids must be an mx.array", centroids=[0.0, 1.0, 2.0, 3.0]),
        make("x-int", TypeError, "x must be float16", x=np.zeros((2, 8), np.int32)),
        make("x-complex", TypeError, "x must be float16", x=np.zeros((2, 8), np.complex64)),
        make("x-list", TypeError, "x must be an mx.array", x=[[0.0] * 8]),
    )


ERRORS = (
    *_common_errors(_quantize_error),
    _dequantize_error("indices-int32", TypeError, "indices must be uint8", indices=np.zeros((2, 8), np.int32)),
    _dequantize_error("indices-float", TypeError, "indices must be uint8", indices=np.zeros((2, 8), np.float32)),
    _dequantize_error("indices-list", TypeError, "indices must be an mx.array", indices=[0]),
    _dequantize_error("centroids-2d", ValueError, "centroids must be (2**b,)", centroids=np.zeros((2, 2), np.float32)),
    _dequantize_error("centroids-3", ValueError, "centroids must be (2**b,)", centroids=np.zeros(3, np.float32)),
    _dequantize_error("centroids-0", ValueError, "centroids must be (2**b,)", centroids=np.zeros(0, np.float32)),
    _dequantize_error("centroids-512", ValueError, "centroids must be (2**b,)", centroids=np.zeros(512, np.float32)),
    _dequantize_error("centroids-int", TypeError, "centroids must be float16", centroids=np.zeros(4, np.int32)),
    *_common_errors(_hadamard_error),
    _hadamard_error("x-1d", ValueError, "x must be (B, D)", x=np.zeros(8, np.float16)),
    _hadamard_error("x-3d", ValueError, "x must be (B, D)", x=np.zeros((1, 2, 8), np.float16)),
    *(
        _hadamard_error(f"d{d}", ValueError, "D a power of two", x=np.zeros((2, d), np.float16), diag=np.ones(d, np.float32))
        for d in (36, 80, 96, 144, 576)
    ),
    _hadamard_error("d0", ValueError, "D a power of two", x=np.zeros((2, 0), np.float16), diag=np.ones(0, np.float32)),
    _hadamard_error("d2048", ValueError, "at most 1024", x=np.zeros((2, 2048), np.float16), diag=np.ones(2048, np.float32)),
    _hadamard_error("diag-short", ValueError, "diag must be (8,)", diag=np.ones(4, np.float32)),
    _hadamard_error("diag-2d", ValueError, "diag must be (8,)", diag=np.ones((1, 8), np.float32)),
    _hadamard_error("diag-scalar", ValueError, "diag must be (8,)", diag=np.array(1.0, np.float32)),
    _hadamard_error("diag-int", TypeError, "diag must be float16", diag=np.ones(8, np.int32)),
)

LENGTHS = (
    LengthCase(QUANTIZE, lambda rng, n: {"x": rng.standard_normal((n, 64)).astype(np.float32), "centroids": table(2), "b": 2}, (1, 2, 33)),
    LengthCase(DEQUANTIZE, lambda rng, n: {"indices": np.zeros((n, 64), np.uint8), "centroids": table(2)}, (1, 2, 33)),
    LengthCase(
        HADAMARD,
        lambda rng, n: {"x": rng.standard_normal((n, 64)).astype(np.float16), "diag": signs(rng, 64), "centroids": table(2), "b": 2},
        (1, 2, 33),
    ),
)

MUTATIONS = (
    Mutation(QUANTIZE, "last-wins-ties", "distance < least", "distance <= least", ("ties", "equal")),
    Mutation(QUANTIZE, "signed-gap", "metal::abs(x - float(centroids[i]))", "(x - float(centroids[i]))", ("seven",)),
    Mutation(QUANTIZE, "first-quarter", "k < 1024; k += 256", "k < 256; k += 256", ("prime",)),
    Mutation(QUANTIZE, "no-bound", "if (i < size)", "if (i <= size)", ("prime", "one")),
    Mutation(DEQUANTIZE, "no-clamp", "metal::min(uint(codes[i]), count - 1)", "uint(codes[i])", ("prime", "seven")),
    Mutation(DEQUANTIZE, "clamp-to-count", "count - 1)", "count)", ("prime", "seven")),
    Mutation(HADAMARD, "lane-off-by-one", "(lane & stride) ?", "((lane + 1) & stride) ?", ("d64",)),
    Mutation(HADAMARD, "signs-dropped", "* signs[i]", "* 1.0f", ("d64",)),
    Mutation(HADAMARD, "last-stride-dropped", "step < R; step *= 2", "2 * step < R; step *= 2", ("d64", "ties-d64")),
    Mutation(HADAMARD, "half-a-simd-group", "stride < (D < 32 ? D : 32)", "stride < (D < 16 ? D : 16)", ("d64",)),
    Mutation(HADAMARD, "row-not-checked", "row >= rows", "row > rows", ("d64",)),
)
