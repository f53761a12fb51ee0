"""The kernel cases on a CUDA machine, as a plain script: `python tests/run_cuda.py [--mutations] [function ...]`.

Needs mlx with its CUDA back end and NumPy. Prints what failed and a table, and exits with 1 if anything failed. With `--mutations` it
runs the faults of tests/cuda_mutations.py instead, and exits with 1 if one of them survives.
"""

import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx

from tests.cuda_mutations import CUDA_MUTATIONS, cases_of, planted
from veloxquant_mlx.metal import FUNCTIONS
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._kernel import compiled
from veloxquant_mlx.selftest.case import Case, Mutation
from veloxquant_mlx.selftest.cases import CASES, ERRORS, LENGTHS
from veloxquant_mlx.selftest.run import attempt as tried
from veloxquant_mlx.selftest.run import call, check, check_error


def main(words: list[str]) -> int:
    chosen = [word for word in words if word != "--mutations"]
    unknown = set(chosen) - set(FUNCTIONS)
    if unknown or backend() != "cuda":
        print(f"unknown: {', '.join(sorted(unknown))}" if unknown else f"the back end is {backend()}, not cuda", file=sys.stderr)
        return 2
    functions = chosen or list(FUNCTIONS)
    if "--mutations" in words:
        return _mutations([mutation for mutation in CUDA_MUTATIONS if mutation.function in functions])
    passed: Counter[tuple[str, str]] = Counter()
    failures = []
    seconds: Counter[str] = Counter()

    def attempt(row: str, function: str, column: str, run) -> None:
        start = time.perf_counter()
        try:
            problem = run()
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            problem = f"{type(error).__name__}: {error}"
        seconds[function] += time.perf_counter() - start
        if problem is None:
            passed[function, column] += 1
        else:
            failures.append(f"{row} [{column}]: {problem}")
            print(f"FAILED {failures[-1]}", flush=True)

    for case in CASES:
        if case.function in functions:
            attempt(case.id, case.function, "cuda", lambda case=case: check(case))
    for error in ERRORS:
        if error.function in functions:
            attempt(error.id, error.function, "errors", lambda error=error: check_error(error))
    for lengths in LENGTHS:
        if lengths.function in functions:
            attempt(lengths.id, lengths.function, "lengths", lambda lengths=lengths: _compiles_once(lengths))

    print(f"\n{mx.device_info().get('device_name', 'GPU')}, mlx {mx.__version__}")
    print(f"{'function':38}{'cuda':>8}{'errors':>8}{'lengths':>8}{'seconds':>9}")
    for function in functions:
        counts = "".join(f"{passed[function, column]:8}" for column in ("cuda", "errors", "lengths"))
        print(f"{function:38}{counts}{seconds[function]:9.2f}")
    print(f"{sum(passed.values())} passed, {len(failures)} failed")
    return 1 if failures or not passed else 0


def _mutations(chosen: list[Mutation]) -> int:
    """Plant each; a wrong result of a named case, right without the fault, catches it, and an error does not."""
    survivors = 0
    for mutation in chosen:
        start = time.perf_counter()
        found = _fault_found(mutation)
        survivors += not found.startswith("caught")
        print(f"{mutation.function:38}{mutation.name:42}{time.perf_counter() - start:6.1f} s  {found}", flush=True)
    print(f"{len(chosen) - survivors} caught, {survivors} survived")
    return 1 if survivors or not chosen else 0


def _fault_found(mutation: Mutation) -> str:
    for case in cases_of(mutation):
        problem = tried(case)
        if problem is not None:
            return f"survived: {case.name} fails without it: {problem}"
        with planted(mutation):
            try:
                problem = check(case)
            except (RuntimeError, ValueError, TypeError) as error:
                return f"survived: {case.name} does not run: {type(error).__name__}: {error}"
        if problem is not None:
            return f"caught by {case.name}: {problem}"
    return "survived"


def _compiles_once(lengths) -> str | None:
    case = Case(lengths.function, lengths.name, dict, dict, ())
    call(case, lengths.arguments(lengths.lengths[0]))
    first = compiled()
    for n in lengths.lengths[1:]:
        call(case, lengths.arguments(n))
    return None if compiled() == first else f"compiled anew: {sorted(map(str, compiled() - first))}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
