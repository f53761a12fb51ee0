"""VecInfer: quantize, dequantize, and both fused encode-decode paths."""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided, Tolerance
from veloxquant_mlx.selftest.oracles import vecinfer as oracle

QUANTIZE, DEQUANT = "vecinfer_quantize_metal", "vecinfer_dequant_metal"
KEYS, VALUES = "vecinfer_encode_decode_metal", "vecinfer_encode_decode_simple_metal"


def cast(x: np.ndarray, dtype: str) -> "np.ndarray | Bf16":
    return Bf16(x.astype(np.float32)) if dtype == "bfloat16" else x.astype(dtype)


def grid(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/8 in [-2, 2]: distances are exact in float32, and ties are common."""
    return (rng.integers(-16, 17, shape) / 8).astype(np.float32)


def vectors(shape: tuple[int, ...], count: int, sub_dim: int, dtype: str = "float32", book: str = "float32") -> Any:
    name = {"x": (dtype, shape)}

    def make(rng: np.random.Generator) -> dict[str, Any]:
        (key, (kind, size)) = next(iter(name.items()))
        codebook = cast(rng.normal(size=(count, sub_dim)), book)
        return {key: cast(rng.normal(size=size), kind), "codebook": codebook, "sub_dim": sub_dim}

    return make


def ties(rng: np.random.Generator) -> dict[str, Any]:
    codebook = np.concatenate([grid(rng, 8, 4), grid(rng, 8, 4)])
    codebook[8:] = codebook[:8][::-1]  # every codeword twice
    return {"x": grid(rng, 6, 16), "codebook": codebook, "sub_dim": 4}


def hostile(rng: np.random.Generator) -> dict[str, Any]:
    x = grid(rng, 8, 16)
    x[0, 0], x[1, 5], x[2, 9], x[3, :] = np.nan, np.inf, -np.inf, 0
    x[4, 3] = 1e30  # squares beyond float32
    x[5, 2] = 2000
    codebook = grid(rng, 9, 4)
    codebook[0, 1], codebook[4, 2] = np.nan, np.inf
    return {"x": x, "codebook": codebook, "sub_dim": 4}


def narrow_x(rng: np.random.Generator) -> dict[str, Any]:
    """float16 values between float32 codewords that are one number in float16: the codebook must not be rounded to the dtype of x."""
    codebook = np.array([[1.0004], [1.0001]], dtype=np.float32)
    return {"x": np.ones((9, 1), dtype=np.float16), "codebook": codebook, "sub_dim": 1}


def gather(shape: tuple[int, ...], count: int, sub_dim: int, dtype: str = "int32", book: str = "float32", out: Any = None) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        indices = rng.integers(0, count, shape).astype(dtype)
        return {"indices": indices, "codebook": cast(rng.normal(size=(count, sub_dim)), book), "out_dtype": out}

    return make


def out_of_range(dtype: str) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        limits = np.iinfo(dtype)
        indices = np.array([[0, 4, 5, 6, 100, limits.max, limits.min, max(-1, limits.min)]], dtype=dtype)
        return {"indices": indices, "codebook": rng.normal(size=(5, 4)).astype(np.float32)}

    return make


def keys(
    shape: tuple[int, int, int, int], count: int, sub_dim: int, smooth: str | None = "head", dtype: str = "float32", book: str = "float32"
) -> Any:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        heads, size = shape[1], shape[3]
        matrix = oracle.hadamard(size) if size & (size - 1) == 0 else np.linalg.qr(rng.normal(size=(size, size)))[0]
        arguments = {
            "keys": cast(rng.normal(size=shape), dtype),
            "k_codebook": cast(rng.normal(size=(count, sub_dim)), book),
            "sub_dim": sub_dim,
            "H_mat": matrix.astype(np.float32),
        }
        if smooth is not None:
            rows = {"head": (heads, size), "one": (size,), "row": (1, size)}[smooth]
            arguments["smooth"] = rng.uniform(0.3, 3, rows).astype(np.float32)
        return arguments

    return make


def outlier_channel(rng: np.random.Generator) -> dict[str, Any]:
    """One channel 1000 times the others, and its smooth factor; channels whose factor is 0, 1e-9 or NaN stay as they are."""
    arguments = keys((1, 2, 5, 32), 16, 4)(rng)
    arguments["keys"][..., 7] *= 1000
    smooth = arguments["smooth"]
    smooth[:, 7] *= 1000
    smooth[0, 1], smooth[0, 2], smooth[1, 3] = 0, 1e-9, np.nan
    return arguments


def hostile_keys(rng: np.random.Generator) -> dict[str, Any]:
    arguments = keys((1, 1, 6, 32), 16, 4)(rng)
    arguments["keys"][0, 0, 1, 3], arguments["keys"][0, 0, 3, 0] = np.nan, np.inf
    arguments["keys"][0, 0, 4] = 0
    return arguments


def strided_keys(rng: np.random.Generator) -> dict[str, Any]:
    arguments = keys((2, 1, 3, 32), 16, 4)(rng)
    return {k: Strided(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


def values(make: Any) -> Any:
    """The arguments of a quantize case under the names of the value path."""

    def renamed(rng: np.random.Generator) -> dict[str, Any]:
        arguments = make(rng)
        return {"values": arguments["x"], "v_codebook": arguments["codebook"], "sub_dim": arguments["sub_dim"]}

    return renamed


def strided(make: Any) -> Any:
    return lambda rng: {k: Strided(v) if isinstance(v, np.ndarray | Bf16) else v for k, v in make(rng).items()}


RECONSTRUCTION = Tolerance("one rounding to float16 is 2^-11 of the value; float32 sums of up to 512 terms of size 1 add 1e-5", 2e-5, 5e-4)
LOUD = Tolerance("as above, with sums that contain the 1000-fold channel before it is smoothed away", 2e-3, 5e-4)

QUANTIZE_ROWS = (
    ("a block and one", vectors((257, 4), 16, 4)),
    ("prime rows and codewords", vectors((3, 5, 7, 32), 13, 4)),
    ("fp16", vectors((2, 3, 64), 16, 4, "float16", "float16")),
    ("bf16", vectors((2, 3, 80), 16, 4, "bfloat16", "bfloat16")),
    ("fp16 values, fp32 codebook", vectors((5, 96), 32, 8, "float16")),
    ("fp32 values, bf16 codebook", vectors((5, 128), 32, 8, "float32", "bfloat16")),
    ("scalar codewords", vectors((3, 256), 16, 1)),
    ("sub-vectors of three", vectors((11, 9), 10, 3)),
    ("whole head", vectors((4, 64), 9, 64)),
    ("one codeword", vectors((3, 8), 1, 4)),
    ("one sub-vector", vectors((4,), 7, 4)),
    ("no rows", vectors((0, 8), 16, 4)),
    ("no channels", vectors((3, 0), 16, 4)),
    ("ties", ties),
    ("NaN, infinity, zeros, overflow, outlier", hostile),
    ("codebook finer than the values", narrow_x),
    ("not contiguous", strided(vectors((6, 16), 16, 4))),
)

CASES = (
    *(Case(QUANTIZE, name, make, oracle.quantize, ("int32",)) for name, make in QUANTIZE_ROWS),
    *(
        Case(VALUES, name, values(make), oracle.encode_decode_simple, ("float16", "int32"))
        for name, make in (
            ("a block and one", vectors((257, 4), 16, 4)),
            ("fp16", vectors((1, 2, 3, 64), 16, 4, "float16", "float16")),
            ("bf16", vectors((1, 2, 3, 80), 16, 4, "bfloat16", "bfloat16")),
            ("scalar codewords", vectors((1, 1, 3, 128), 16, 1)),
            ("whole head", vectors((1, 1, 4, 64), 9, 64)),
            ("no tokens", vectors((1, 2, 0, 64), 16, 4)),
            ("ties", ties),
            ("NaN, infinity, zeros, overflow, outlier", hostile),
            ("not contiguous", strided(vectors((1, 2, 6, 16), 16, 4))),
        )
    ),
    Case(DEQUANT, "a block and one", gather((257, 1), 16, 1), oracle.dequantize, ("float32",)),
    Case(DEQUANT, "head of 128", gather((2, 3, 5, 32), 256, 4, "uint8"), oracle.dequantize, ("float32",)),
    Case(DEQUANT, "fp16 codebook", gather((7, 8), 300, 8, "uint16", "float16"), oracle.dequantize, ("float16",)),
    Case(DEQUANT, "bf16 codebook", gather((7, 8), 300, 8, "uint16", "bfloat16"), oracle.dequantize, ("bfloat16",)),
    Case(DEQUANT, "fp32 to fp16", gather((3, 11), 16, 4, "int32", "float32", mx.float16), oracle.dequantize, ("float16",)),
    Case(DEQUANT, "fp16 to fp32", gather((3, 11), 16, 4, "uint32", "float16", mx.float32), oracle.dequantize, ("float32",)),
    Case(DEQUANT, "fp32 to bf16", gather((3, 11), 16, 4, "int32", "float32", mx.bfloat16), oracle.dequantize, ("bfloat16",)),
    Case(DEQUANT, "one index", gather((1,), 3, 2), oracle.dequantize, ("float32",)),
    Case(DEQUANT, "no indices", gather((4, 0), 3, 2), oracle.dequantize, ("float32",)),
    Case(DEQUANT, "not contiguous", strided(gather((5, 6), 16, 4)), oracle.dequantize, ("float32",)),
    *(
        Case(DEQUANT, f"{dtype} out of range", out_of_range(dtype), oracle.dequantize, ("float32",))
        for dtype in ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "uint64")
    ),
    *(
        Case(KEYS, name, make, oracle.encode_decode, ("float16", "int32"), (tolerance, None))
        for name, make, tolerance in (
            ("head of 32, factors per head", keys((2, 3, 5, 32), 16, 4), RECONSTRUCTION),
            ("head of 64, fp16", keys((1, 2, 7, 64), 16, 4, "one", "float16", "float16"), RECONSTRUCTION),
            ("head of 80, bf16, matrix not symmetric", keys((1, 2, 3, 80), 16, 8, "row", "bfloat16", "bfloat16"), RECONSTRUCTION),
            ("head of 96, matrix not symmetric", keys((1, 1, 3, 96), 16, 4), RECONSTRUCTION),
            ("head of 128, no factors", keys((1, 1, 5, 128), 64, 8, None), RECONSTRUCTION),
            ("head of 256", keys((1, 1, 3, 256), 16, 16), RECONSTRUCTION),
            ("head of 512", keys((1, 1, 2, 512), 8, 32), RECONSTRUCTION),
            ("head not a multiple of 32", keys((1, 1, 5, 6), 8, 2), RECONSTRUCTION),
            ("scalar codewords", keys((1, 1, 3, 32), 16, 1), RECONSTRUCTION),
            ("whole head", keys((1, 1, 6, 32), 16, 32), RECONSTRUCTION),
            ("outlier channel, factors not above 1e-8", outlier_channel, LOUD),
            ("NaN, infinity, zeros", hostile_keys, RECONSTRUCTION),
            ("no tokens", keys((1, 2, 0, 32), 16, 4), RECONSTRUCTION),
            ("not contiguous", strided_keys, RECONSTRUCTION),
        )
    ),
)


def changed(make: Any, **changes: Any) -> Any:
    """The arguments of a sound case with some replaced; a callable gets the old value."""

    def altered(rng: np.random.Generator) -> dict[str, Any]:
        arguments = make(rng)
        return {**arguments, **{k: v(arguments.get(k)) if callable(v) else v for k, v in changes.items()}}

    return altered


SOUND = vectors((3, 8), 16, 4)
SOUND_KEYS = keys((1, 2, 3, 32), 16, 4)
CODEBOOK_ERRORS: tuple[tuple[str, Any, type[Exception], str], ...] = (
    ("codebook of one column", np.ones((16, 1), np.float32), ValueError, "(C, 4), but got (16, 1)"),
    ("codebook of one dimension", np.ones(16, np.float32), ValueError, "(C, 4), but got (16,)"),
    ("codebook without codewords", np.ones((0, 4), np.float32), ValueError, "C at least 1, but got (0, 4)"),
    ("codebook of integers", np.ones((16, 4), np.int32), TypeError, "float16, bfloat16 or float32, but got int32"),
    ("codebook that is no array", [[1.0]], TypeError, "an mx.array, but got list"),
)
VECTOR_ERRORS: tuple[tuple[str, str, Any, type[Exception], str], ...] = (
    ("D not a multiple", "x", np.ones((3, 10), np.float32), ValueError, "D a multiple of sub_dim 4, but got (3, 10)"),
    ("no axis", "x", np.ones((), np.float32), ValueError, "but got ()"),
    ("integers", "x", np.ones((3, 8), np.int32), TypeError, "but got int32"),
    ("no array", "x", 3.0, TypeError, "must be an mx.array, but got float"),
    ("sub_dim 0", "sub_dim", 0, ValueError, "sub_dim must be between 1 and 256, but got 0"),
    ("sub_dim 257", "sub_dim", 257, ValueError, "but got 257"),
    ("sub_dim not an integer", "sub_dim", 4.0, TypeError, "sub_dim must be an integer, but got float"),
)

ERRORS = (
    *(ErrorCase(QUANTIZE, n, changed(SOUND, codebook=v), e, "codebook must be") for n, v, e, _ in CODEBOOK_ERRORS),
    *(ErrorCase(QUANTIZE, n, changed(SOUND, **{k: v}), e, m) for n, k, v, e, m in VECTOR_ERRORS),
    *(ErrorCase(VALUES, n, values(changed(SOUND, codebook=v)), e, f"{m}") for n, v, e, m in CODEBOOK_ERRORS),
    *(ErrorCase(VALUES, n, values(changed(SOUND, **{k: v})), e, m) for n, k, v, e, m in VECTOR_ERRORS),
    *(ErrorCase(KEYS, n, changed(SOUND_KEYS, k_codebook=v), e, f"{m}") for n, v, e, m in CODEBOOK_ERRORS),
    ErrorCase(KEYS, "three axes", changed(SOUND_KEYS, keys=lambda k: k[0]), ValueError, "keys must be (B, H, S, D), but got (2, 3, 32)"),
    ErrorCase(KEYS, "D not a multiple", changed(SOUND_KEYS, keys=lambda k: k[..., :30]), ValueError, "multiple of sub_dim 4"),
    ErrorCase(KEYS, "D above 512", changed(SOUND_KEYS, keys=np.ones((1, 1, 1, 516), np.float32)), ValueError, "at most 512, but got 516"),
    ErrorCase(KEYS, "keys of integers", changed(SOUND_KEYS, keys=lambda k: k.astype(np.int32)), TypeError, "but got int32"),
    ErrorCase(KEYS, "H_mat of another size", changed(SOUND_KEYS, H_mat=lambda h: h[:16]), ValueError, "H_mat must be (32, 32)"),
    ErrorCase(KEYS, "H_mat of integers", changed(SOUND_KEYS, H_mat=lambda h: h.astype(np.int32)), TypeError, "H_mat must be float16"),
    ErrorCase(
        KEYS, "smooth rows are not heads", changed(SOUND_KEYS, smooth=np.ones((3, 32), np.float32)), ValueError, "smooth must be (32,)"
    ),
    ErrorCase(KEYS, "smooth of another size", changed(SOUND_KEYS, smooth=np.ones(16, np.float32)), ValueError, "but got (16,)"),
    ErrorCase(KEYS, "smooth of three axes", changed(SOUND_KEYS, smooth=np.ones((1, 2, 32), np.float32)), ValueError, "smooth must be"),
    ErrorCase(KEYS, "smooth of integers", changed(SOUND_KEYS, smooth=np.ones(32, np.int32)), TypeError, "smooth must be float16"),
    ErrorCase(
        DEQUANT, "codebook of one dimension", changed(gather((3,), 4, 2), codebook=np.ones(4, np.float32)), ValueError, "but got (4,)"
    ),
    ErrorCase(DEQUANT, "no codewords", changed(gather((3,), 4, 2), codebook=np.ones((0, 2), np.float32)), ValueError, "both at least 1"),
    ErrorCase(
        DEQUANT, "codebook of integers", changed(gather((3,), 4, 2), codebook=np.ones((4, 2), np.int8)), TypeError, "codebook must be"
    ),
    ErrorCase(DEQUANT, "indices of floats", changed(gather((3,), 4, 2), indices=np.ones(3, np.float32)), TypeError, "indices must be"),
    ErrorCase(DEQUANT, "no axis", changed(gather((3,), 4, 2), indices=np.ones((), np.int32)), ValueError, "indices must be (..., n_sub)"),
    ErrorCase(DEQUANT, "out_dtype of integers", gather((3,), 4, 2, out=mx.int32), TypeError, "out_dtype must be float16"),
)

LENGTHS = (
    LengthCase(QUANTIZE, lambda rng, n: vectors((n, 16), 16, 4)(rng), (1, 5, 70)),
    LengthCase(DEQUANT, lambda rng, n: gather((n, 4), 16, 4)(rng), (1, 5, 70)),
    LengthCase(KEYS, lambda rng, n: keys((1, 2, n, 32), 16, 4)(rng), (1, 5, 9)),
    LengthCase(VALUES, lambda rng, n: values(vectors((1, 2, n, 16), 16, 4))(rng), (1, 5, 70)),
)

MUTATIONS = (
    Mutation(QUANTIZE, "ties go to the highest index", "if (distance < least)", "if (distance <= least)", ("ties",)),
    Mutation(
        QUANTIZE,
        "last codeword is not searched",
        "codebook, dims[1]);\n  indices",
        "codebook, dims[1] - 1);\n  indices",
        ("prime rows and codewords",),
    ),
    Mutation(QUANTIZE, "no bounds check", "if (row >= uint(dims[0]))", "if (row > uint(dims[0]))", ("a block and one",)),
    Mutation(
        DEQUANT,
        "index is not clamped",
        "metal::min(uint(indices[i / sub_dim]), uint(dims[1]) - 1u)",
        "uint(indices[i / sub_dim])",
        ("int32 out of range",),
    ),
    Mutation(DEQUANT, "clamped one too far", "uint(dims[1]) - 1u)", "uint(dims[1]))", ("int32 out of range", "uint8 out of range")),
    Mutation(
        VALUES,
        "first value of a codeword is repeated",
        "half(float(codebook[index * SUB_DIM + j]))",
        "half(float(codebook[index * SUB_DIM]))",
        ("ties",),
    ),
    Mutation(
        KEYS,
        "barrier before the search dropped",
        "b[r * D + channel] = turned[r];\n    }\n  }\n  threadgroup_barrier(mem_flags::mem_threadgroup);",
        "b[r * D + channel] = turned[r];\n    }\n  }",
        ("head of 32, factors per head", "head of 64, fp16"),
    ),
    Mutation(KEYS, "H transposed", "matrix[j * D + column]", "matrix[column * D + j]", ("head of 96, matrix not symmetric",)),
    Mutation(KEYS, "factors of head 0 for all", "dims[4] == 1 ? 0", "dims[4] > 0 ? 0", ("head of 32, factors per head",)),
)
