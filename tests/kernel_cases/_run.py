"""Run rows of the table: shared by the pytest columns and by the script for CUDA machines."""

from typing import Any

import mlx.core as mx

from tests.kernel_cases._case import Case, ErrorCase, as_tuple, difference, to_mlx
from veloxquant_mlx import metal


def call(case: Case | ErrorCase, arguments: dict[str, Any]) -> tuple[mx.array, ...]:
    results = as_tuple(getattr(metal, case.function)(**{key: to_mlx(value) for key, value in arguments.items()}))
    mx.eval(*results)
    return results


def check(case: Case) -> str | None:
    """What is wrong with the function's results on the back end in force, or None."""
    return difference(case, call(case, case.arguments()))


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
