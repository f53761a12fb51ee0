"""Two-stage codes in 32-bit words: cases, refusals, and faults that the cases must notice."""

from functools import partial

import numpy as np

from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.cases.scalar_quant import ODD_VALUES, as_dtype, outlier, table
from veloxquant_mlx.selftest.oracles import rvq_quant_pack as oracle

FUNCTION = "rvq_quant_pack"
# Cell width of the first stage's inner cells: the second stage divides it evenly.
STEP = {1: 1.6, 2: 0.9, 3: 0.5, 4: 0.26}


def tables(bits: int, dtype: str = "float16") -> dict:
    first = table(bits).astype(np.float64)
    count = 2**bits
    second = (np.arange(count) - (count - 1) / 2) * STEP[bits] / count
    middles = [(c[1:] + c[:-1]) / 2 for c in (first, second)]
    return dict(zip(("centroids1", "boundaries1", "boundaries2"), (as_dtype(t, dtype) for t in (first, *middles)), strict=True))


def case(name: str, shape, bits: int, dtype="float16", tables_dtype="float16", wrap=lambda x: x, values=None, change=lambda x: x) -> Case:
    residual = dtype if dtype == tables_dtype else "float32"

    def make(rng: np.random.Generator) -> dict:
        y = rng.standard_normal(shape) if values is None else np.asarray(values)
        return {"rotated": wrap(as_dtype(change(y), dtype)), "bits": bits} | tables(bits, tables_dtype)

    return Case(FUNCTION, name, make, partial(oracle.quant_pack, residual=residual), ("uint32", "uint32"))


def on_boundaries(name: str, bits: int, dtype: str, tables_dtype: str) -> Case:
    """Values on both stages' boundaries, and their neighbours in the dtype."""
    residual = dtype if dtype == tables_dtype else "float32"

    def make(rng: np.random.Generator) -> dict:
        parts = tables(bits, tables_dtype)
        edges = np.concatenate([parts["boundaries1"], (parts["centroids1"][:, None] + parts["boundaries2"]).ravel()]).astype(dtype)
        near = np.concatenate([edges, np.nextafter(edges, np.array(9, dtype)), np.nextafter(edges, np.array(-9, dtype))])
        if dtype == "float32":  # Apple GPUs flush float32 denormals: the neighbours of 0 there are the smallest normal numbers
            tiny = np.finfo(np.float32).tiny
            near = np.where((near != 0) & (np.abs(near) < tiny), np.copysign(tiny, near), near)
        rotated = np.resize(near, (-(-len(near) // 64), 64))
        return {"rotated": rotated, "bits": bits} | parts

    return Case(FUNCTION, name, make, partial(oracle.quant_pack, residual=residual), ("uint32", "uint32"))


ODD = np.resize(np.array(ODD_VALUES), (1, 8))
CASES = (
    case("empty", (0, 64), 2),
    case("d1", (3, 1), 2),
    case("d1-b3", (3, 1), 3),
    case("d2-b3", (5, 2), 3),
    case("one-row", (1, 64), 4),
    case("b1-d32", (7, 32), 1),
    case("b1-d16", (3, 16), 1),
    case("b2-d64", (5, 64), 2),
    case("b3-d64", (5, 64), 3),
    case("b3-d128", (3, 128), 3),
    case("b4-d128", (3, 128), 4),
    case("b2-d256", (2, 256), 2),
    case("b2-d1024", (1, 1024), 2),
    case("blocks", (67, 64), 2),
    case("f32", (5, 64), 2, "float32"),
    case("f32-b4", (5, 128), 4, "float32", "float32"),
    case("bf16", (5, 64), 2, "bfloat16", "bfloat16"),
    case("bf16-f16-tables", (5, 64), 3, "bfloat16", "float16"),
    case("f16-f32-tables", (5, 64), 4, "float16", "float32"),
    case("strided", (5, 32), 2, wrap=Strided),
    case("odd-values", (1, 8), 2, "float32", values=ODD),
    case("odd-values-f16", (1, 8), 3, values=np.resize(np.array((*ODD_VALUES[:5], 65504, -65504, 6e-8)), (1, 8))),
    case("outlier", (2, 128), 4, change=outlier),
    on_boundaries("boundaries-b1", 1, "float16", "float16"),
    on_boundaries("boundaries-b2", 2, "float16", "float16"),
    on_boundaries("boundaries-b3", 3, "float16", "float16"),
    on_boundaries("boundaries-b4", 4, "float16", "float16"),
    on_boundaries("boundaries-f32", 4, "float32", "float32"),
    on_boundaries("boundaries-f32-f16", 2, "float32", "float16"),
)


def _error(name: str, error: type[Exception], message: str, **change) -> ErrorCase:
    return ErrorCase(FUNCTION, name, lambda _: {"rotated": np.zeros((2, 64), np.float16), "bits": 2} | tables(2) | change, error, message)


ERRORS = (
    _error("bits0", ValueError, "bits must be between 1 and 4", bits=0),
    _error("bits5", ValueError, "bits must be between 1 and 4", bits=5),
    _error("bits-float", TypeError, "bits must be an integer", bits=2.0),
    _error("rotated-1d", ValueError, "rotated must be (N, D)", rotated=np.zeros(64, np.float16)),
    _error("rotated-3d", ValueError, "rotated must be (N, D)", rotated=np.zeros((1, 2, 64), np.float16)),
    _error("rotated-int", TypeError, "rotated must be float16", rotated=np.zeros((2, 64), np.int8)),
    _error("rotated-list", TypeError, "rotated must be an mx.array", rotated=[[0.0]]),
    _error("d96", ValueError, "D a power of two", rotated=np.zeros((2, 96), np.float16)),
    _error("d0", ValueError, "D a power of two", rotated=np.zeros((2, 0), np.float16)),
    _error("d2048", ValueError, "at most 1024", rotated=np.zeros((2, 2048), np.float16)),
    _error("few-centroids", ValueError, "centroids1 must be (4,)", centroids1=np.zeros(3, np.float32)),
    _error("centroids-of-3-bits", ValueError, "centroids1 must be (4,)", centroids1=np.zeros(8, np.float32)),
    _error("centroids-2d", ValueError, "centroids1 must be (4,)", centroids1=np.zeros((4, 1), np.float32)),
    _error("centroids-int", TypeError, "centroids1 must be float16", centroids1=np.zeros(4, np.int32)),
    _error("boundaries1-4", ValueError, "boundaries1 must be (3,)", boundaries1=np.zeros(4, np.float32)),
    _error("boundaries1-scalar", ValueError, "boundaries1 must be (3,)", boundaries1=np.array(0, np.float32)),
    _error("boundaries1-int", TypeError, "boundaries1 must be float16", boundaries1=np.zeros(3, np.int32)),
    _error("boundaries2-2", ValueError, "boundaries2 must be (3,)", boundaries2=np.zeros(2, np.float32)),
    _error("boundaries2-list", TypeError, "boundaries2 must be an mx.array", boundaries2=[0.0, 1.0, 2.0]),
)

LENGTHS = (
    LengthCase(FUNCTION, lambda rng, n: {"rotated": rng.standard_normal((n, 64)).astype(np.float16), "bits": 2} | tables(2), (1, 2, 33)),
)

MUTATIONS = (
    Mutation(FUNCTION, "most-significant-first", "code1 << (k * BITS)", "code1 << ((PER - 1 - k) * BITS)", ("b2-d64",)),
    Mutation(FUNCTION, "at-or-below", "x > float(boundaries[i])", "x >= float(boundaries[i])", ("boundaries-b2",)),
    Mutation(
        FUNCTION, "residual-unrounded", "float(R(y - centroids1[code1]))", "(y - centroids1[code1])", ("boundaries-b3", "boundaries-b4")
    ),
    Mutation(FUNCTION, "spare-bits", "k < PER && first + k < dim", "k < PER", ("b3-d64", "d1-b3")),
    Mutation(FUNCTION, "stage-1-twice", "cell_of(residual, boundaries2", "cell_of(residual, boundaries1", ("b2-d64",)),
)
