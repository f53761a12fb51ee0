"""Checks of arguments; messages in MLX's form: `[function] name must be ..., but got ....`"""

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

FLOATS = (mx.float16, mx.bfloat16, mx.float32)
INTEGERS = (mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64)


def message(function: str, name: str, must: str, got: object) -> str:
    return f"[{function}] {name} must be {must}, but got {_plain(got)}."


def require(condition: bool, function: str, name: str, must: str, got: object) -> None:
    """ValueError unless `condition`; `got` may be an array (its shape is named), a shape, a dtype or any value."""
    if not condition:
        raise ValueError(message(function, name, must, got))


def check_array(function: str, name: str, array: Any, shape: Sequence[int | str] | None, dtypes: Sequence[mx.Dtype]) -> None:
    """TypeError unless `array` is an mx.array of one of `dtypes`; ValueError unless its shape fits.

    Args:
        shape: per axis a size that must match, or a letter for any size; None for any shape at all.
    """
    if not isinstance(array, mx.array):
        raise TypeError(message(function, name, "an mx.array", type(array).__name__))
    if array.dtype not in dtypes:
        raise TypeError(message(function, name, one_of([_plain(d) for d in dtypes]), array.dtype))
    if shape is None:
        return
    have = array.shape
    if len(have) != len(shape) or any(want != got and not isinstance(want, str) for want, got in zip(shape, have, strict=True)):
        raise ValueError(message(function, name, shape_text(shape), array))


def check_int(function: str, name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as a Python int; TypeError unless integral, ValueError unless low <= value <= high."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(message(function, name, "an integer", type(value).__name__))
    number = operator.index(value)
    span = f"at least {low}" if high is None else f"between {low} and {high}"
    require(low <= number and (high is None or number <= high), function, name, span, number)
    return number


def check_choice(function: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    require(value in choices, function, name, one_of([str(c) for c in choices]), repr(value) if isinstance(value, str) else value)


def power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def shape_text(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def one_of(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _plain(got: object) -> str:
    if isinstance(got, mx.array):
        return str(tuple(got.shape))
    if isinstance(got, mx.Dtype):
        return str(got).removeprefix("mlx.core.")
    return str(got)
