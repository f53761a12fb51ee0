"""What a row of the kernel table is, and how its arguments and results cross between NumPy and MLX."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Bf16:
    """A bfloat16 array for MLX; `values` are float32, already rounded to bfloat16, as the oracle sees them."""

    values: np.ndarray

    def __post_init__(self) -> None:
        bits = np.ascontiguousarray(self.values, dtype=np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        object.__setattr__(self, "values", np.where(np.isnan(self.values), np.float32(np.nan), rounded))


@dataclass(frozen=True)
class Strided:
    """An array that reaches MLX with gaps between its elements: the same values, not row-contiguous."""

    array: "np.ndarray | Bf16"


@dataclass(frozen=True)
class Tolerance:
    """|got - want| <= atol + rtol * |want|, and why that much."""

    reason: str
    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True)
class Case:
    """One call of one function, with its right result.

    Fields:
        function: public name, in veloxquant_mlx.metal.FUNCTIONS.
        name: unique within the function.
        make: arguments by name: NumPy arrays, Bf16, Strided, scalars, mx.Dtype.
        oracle: results from the same arguments (Bf16 and Strided unwrapped to NumPy), in float64 or integers;
            one array or a tuple. A masked array's masked elements are not compared.
        dtypes: of the results, as MLX names them ("uint8", "bfloat16").
        tolerance: None for exact (equal after rounding the oracle once to the result's dtype); one for all results, or one per result.
        emulate: False only where too large for the emulator; another case then covers the same code path.
    """

    function: str
    name: str
    make: Callable[[np.random.Generator], Arguments]
    oracle: Callable[..., Any]
    dtypes: tuple[str, ...]
    tolerance: Tolerance | tuple[Tolerance | None, ...] | None = None
    emulate: bool = True

    @property
    def id(self) -> str:
        return f"{self.function}-{self.name}"

    def arguments(self) -> Arguments:
        return self.make(np.random.default_rng(zlib.crc32(self.id.encode())))


@dataclass(frozen=True)
class ErrorCase:
    """A call that must be refused: the type, and text the message must contain besides starting with `[function] `."""

    function: str
    name: str
    make: Callable[[np.random.Generator], Arguments]
    error: type[Exception]
    message: str

    @property
    def id(self) -> str:
        return f"{self.function}-{self.name}"

    def arguments(self) -> Arguments:
        return self.make(np.random.default_rng(zlib.crc32(self.id.encode())))


@dataclass(frozen=True)
class LengthCase:
    """Calls that differ only in a run-time size (tokens, rows, batch): together they must compile what the first one compiles."""

    function: str
    make: Callable[[np.random.Generator, int], Arguments]
    lengths: tuple[int, ...]
    name: str = "lengths"

    @property
    def id(self) -> str:
        return f"{self.function}-{self.name}"

    def arguments(self, length: int) -> Arguments:
        return self.make(np.random.default_rng(length), length)


@dataclass(frozen=True)
class Mutation:
    """A fault planted in the Metal text of a function's kernels: `old` becomes `new`, and at least one case must then fail.

    Fields:
        old, new: literal text; `old` must occur in the generated source of a kernel that the named cases run.
        cases: names of cases to try, in order (the small ones that reach the place).
        fault: None where a wrong result is as good as a reported fault; else text that the emulator's report must contain.
    """

    function: str
    name: str
    old: str
    new: str
    cases: tuple[str, ...]
    fault: str | None = field(default=None)

    @property
    def id(self) -> str:
        return f"{self.function}-{self.name}"


def to_mlx(value: Any) -> Any:
    """An argument as MLX takes it."""
    if isinstance(value, Bf16):
        return mx.array(value.values).astype(mx.bfloat16)
    if isinstance(value, Strided):
        dense = to_mlx(value.array)
        gaps = mx.stack([dense, mx.zeros_like(dense)], axis=-1).reshape(*dense.shape[:-1], 2 * dense.shape[-1])
        return gaps[..., ::2]
    if isinstance(value, np.ndarray):
        if value.dtype in (np.float64, np.longdouble):
            raise TypeError("MLX has no float64: make the argument float32, float16 or Bf16")
        return mx.array(value)
    return value


def to_oracle(value: Any) -> Any:
    """An argument as the oracle takes it."""
    if isinstance(value, Strided):
        return to_oracle(value.array)
    return value.values if isinstance(value, Bf16) else value


def to_numpy(array: mx.array) -> np.ndarray:
    """A result in NumPy; bfloat16 as float32, exactly."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded once to a result's dtype, to nearest even."""
    if dtype == "bfloat16":
        return _bf16_of_float64(values)
    with np.errstate(over="ignore"):
        return values.astype(np.dtype("bool" if dtype == "bool_" else dtype))


def _bf16_of_float64(values: np.ndarray) -> np.ndarray:
    """Round to odd in float32 first, so that the second rounding is the only one."""
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    toward_zero = np.where(np.abs(near.astype(np.float64)) > np.abs(values), np.nextafter(near, np.float32(0)), near)
    inexact = (toward_zero.astype(np.float64) != values) & np.isfinite(values)
    odd = np.ascontiguousarray(toward_zero).view(np.uint32) | inexact.astype(np.uint32)
    return Bf16(odd.view(np.float32)).values


def difference(case: Case, results: tuple[mx.array, ...]) -> str | None:
    """What is wrong with the results, or None."""
    arguments = {key: to_oracle(value) for key, value in case.arguments().items()}
    wants = as_tuple(case.oracle(**arguments))
    if len(results) != len(wants) or len(case.dtypes) != len(wants):
        return f"{len(results)} results, {len(wants)} of the oracle, {len(case.dtypes)} dtypes"
    tolerances = case.tolerance if isinstance(case.tolerance, tuple) else (case.tolerance,) * len(wants)
    for i, (result, want, dtype, tolerance) in enumerate(zip(results, wants, case.dtypes, tolerances, strict=True)):
        if str(result.dtype) != f"mlx.core.{dtype}":
            return f"result {i} is {result.dtype}, not {dtype}"
        if tuple(result.shape) != want.shape:
            return f"result {i} has shape {tuple(result.shape)}, not {want.shape}"
        problem = _compare(to_numpy(result), want, dtype, tolerance)
        if problem:
            return f"result {i}: {problem}"
    return None


def _compare(got: np.ndarray, want: np.ndarray, dtype: str, tolerance: Tolerance | None) -> str | None:
    values = np.ma.getdata(want)
    if tolerance is None:
        expected = round_to(values, dtype)
        wrong = (got != expected) & ~(_nan(got) & _nan(expected))
        limit = "exactly"
    else:
        expected = values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            close = np.abs(got.astype(np.float64) - expected) <= tolerance.atol + tolerance.rtol * np.abs(expected)
        wrong = ~(close | (got == expected) | (_nan(got) & _nan(expected)))
        limit = f"within {tolerance.atol:g} + {tolerance.rtol:g} |x|"
    wrong &= ~np.ma.getmaskarray(want)
    if not wrong.any():
        return None
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} not {limit}; first at {where}: got {got[where]!r}, want {expected[where]!r}"


def _nan(array: np.ndarray) -> np.ndarray:
    return np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, dtype=bool)
