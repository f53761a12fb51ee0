"""Run rows of the table: shared by the pytest columns and by the script for CUDA machines."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from veloxquant_mlx import metal
from veloxquant_mlx.metal._kernel import Kernel, Shapes, Size, Template, using
from veloxquant_mlx.selftest.case import Case, ErrorCase, as_tuple, difference, to_mlx


@dataclass(frozen=True)
class Dispatch:
    """What determines the text that MLX generates for a kernel call."""

    kernel: Kernel
    inputs: tuple[mx.Dtype, ...]
    template: tuple[tuple[str, bool | int | mx.Dtype], ...]
    outputs: tuple[mx.Dtype, ...]


def dispatches(cases: Iterable[Case]) -> list[Dispatch]:
    """The distinct dispatches of the cases, which run with every kernel returning zeros."""
    found: dict[Dispatch, None] = {}

    def record(
        kernel: Kernel,
        arrays: Sequence[mx.array],
        template: Template,
        grid: Size,
        threadgroup: Size,
        output_shapes: Shapes,
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        found[Dispatch(kernel, tuple(a.dtype for a in arrays), tuple(template), tuple(output_dtypes))] = None
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    with using(record):
        for case in cases:
            # A call that fails here is only not compiled ahead; its own test reports it.
            with contextlib.suppress(RuntimeError, ValueError, TypeError):
                call(case, case.arguments())
    return list(found)


def call(case: Case | ErrorCase, arguments: dict[str, Any]) -> tuple[mx.array, ...]:
    results = as_tuple(getattr(metal, case.function)(**{key: to_mlx(value) for key, value in arguments.items()}))
    mx.eval(*results)
    return results


def check(case: Case) -> str | None:
    """What is wrong with the function's results on the back end in force, or None."""
    return difference(case, call(case, case.arguments()))


def attempt(case: Case) -> str | None:
    """`check`, with an error of the call as what is wrong."""
    try:
        return check(case)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def check_error(case: ErrorCase) -> str | None:
    """What is wrong with the function's refusal, or None."""
    try:
        call(case, case.arguments())
    except case.error as error:
        text = str(error)
        if type(error) is not case.error:
            return f"{type(error).__name__} instead of {case.error.__name__}: {text}"
        if not text.startswith(f"[{case.function}] ") or case.message not in text:
            return f"the message is {text!r}"
        return None
    return "not refused"
