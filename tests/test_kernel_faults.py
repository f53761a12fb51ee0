"""Every cell of the kernel table can turn red: each function's definition, checks and CUDA text with a fault planted in them.

Faults of the Metal text: tests/test_kernel_mutations.py. A wrong result counts, an exception of a broken definition does not.
"""

import re
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import pytest

from tests.cuda_mutations import CUDA_MUTATIONS, cases_of, planted
from tests.kernel_mutants import called, caught, check_mutants, definition_mutants
from veloxquant_mlx.metal import FUNCTIONS
from veloxquant_mlx.metal._backend import cuda_available, forced
from veloxquant_mlx.metal._kernel import _build, using
from veloxquant_mlx.selftest.case import Case, ErrorCase, Mutation
from veloxquant_mlx.selftest.cases import CASES, ERRORS, MUTATIONS
from veloxquant_mlx.selftest.run import call, check, check_error

MOST = 60  # mutants of a function
# What MLX and Python raise where a mutant makes an impossible call.
BROKEN = (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError)


class Passed(BaseException):
    """A call got past its checks, to a kernel."""


def wrong(case: Case) -> str | None:
    """What is wrong with the results, or None; also None where the call fails."""
    try:
        with forced("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(case)
    except BROKEN:
        return None


def refused(case: ErrorCase) -> bool:
    """Whether the row is green; the call ends where it would launch a kernel."""

    def stop(*_: object) -> list:
        raise Passed

    try:
        with using(stop):
            return check_error(case) is None
    except (Passed, *BROKEN):
        return False


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fault_in_the_definition_is_found(function: str) -> None:
    cases = [case for case in CASES if case.function == function]
    with forced("cpu"):
        functions = called(lambda: [call(case, case.arguments()) for case in cases])
    assert functions
    survivors = []
    for mutant in islice(definition_mutants(functions), MOST):
        with mutant.planted():
            if any(wrong(case) for case in cases):
                caught.add((function, "definition"))
                return
        survivors.append(mutant.text)
    pytest.fail("no case fails with any of these:\n" + "\n".join(survivors), pytrace=False)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_missing_check_is_found(function: str) -> None:
    rows = [row for row in ERRORS if row.function == function]
    assert all(refused(row) for row in rows)
    functions = called(lambda: [refused(row) for row in rows])
    survivors = []
    for mutant in check_mutants(functions):
        with mutant.planted():
            if not all(refused(row) for row in rows):
                caught.add((function, "errors"))
                return
        survivors.append(mutant.text)
    pytest.fail("no row fails without any of these:\n" + "\n".join(survivors), pytrace=False)


@pytest.mark.skipif(not cuda_available(), reason="MLX sees no CUDA GPU")
@pytest.mark.parametrize("mutation", CUDA_MUTATIONS, ids=lambda m: m.id)
def test_fault_in_the_cuda_text_is_found(mutation: Mutation) -> None:
    assert all(check(case) is None for case in cases_of(mutation))
    with planted(mutation):
        assert any(check(case) for case in cases_of(mutation))
    caught.add((mutation.function, "cuda"))


@pytest.mark.parametrize("mutation", CUDA_MUTATIONS, ids=lambda m: m.id)
def test_planted_fault_is_in_what_mlx_builds(mutation: Mutation) -> None:
    """What a GPU would compile, with a stand-in for MLX's CUDA kernel."""
    built: list[str] = []

    def cuda_kernel(*, source: str, header: str, name: str, **_: object) -> Callable[..., list[mx.array]]:
        files = re.sub(r'#include "(.+)"\n', lambda found: Path(found[1]).read_text(encoding="utf-8"), header)
        built.append(f"{name}\0{files}\0{source}")
        return lambda *, output_shapes, output_dtypes, **_: [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

    def texts() -> set[str]:
        built.clear()
        _build.cache_clear()
        for case in cases_of(mutation):
            call(case, case.arguments())
        return set(built)

    try:
        with forced("cuda"), patch.object(mx.fast, "cuda_kernel", cuda_kernel):
            sound = texts()
            with planted(mutation):
                faulty = texts()
    finally:
        _build.cache_clear()
    assert any(mutation.old in text for text in sound)
    assert not any(mutation.old in text for text in faulty - sound)
    assert len(faulty - sound) == sum(mutation.old in text for text in sound)
    assert not {text.split("\0")[0] for text in faulty - sound} & {text.split("\0")[0] for text in sound}


@pytest.mark.parametrize("mutations", (MUTATIONS, CUDA_MUTATIONS), ids=("metal", "cuda"))
def test_every_function_has_a_mutation(mutations: tuple[Mutation, ...]) -> None:
    """With the two tests above, which take every function, no cell of the table is left out."""
    assert {mutation.function for mutation in mutations} == set(FUNCTIONS)


def test_mutations_of_cuda_are_unique() -> None:
    names = [mutation.id for mutation in CUDA_MUTATIONS]
    assert len(names) == len(set(names))
