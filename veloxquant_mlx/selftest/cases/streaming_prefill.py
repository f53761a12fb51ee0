"""Cases of streaming_prefill_attend: each implementation on the cases that it could get wrong in its own way."""

from functools import partial

from veloxquant_mlx.metal._experimental_streaming_prefill import IMPLEMENTATIONS
from veloxquant_mlx.selftest.case import LengthCase, Mutation
from veloxquant_mlx.selftest.cases.flash_prefill import (
    arguments,
    case,
    common_errors,
    compile_time_cases,
    not_visible,
    refused,
    run_time_cases,
    start,
)

FUNCTION = "streaming_prefill_attend"
OTHERS = tuple(name for name in IMPLEMENTATIONS if name != "streaming")


def _own(implementation):
    row = partial(case, FUNCTION, implementation=implementation)
    return (
        row(f"{implementation}-one", Q=1, S=1, lse=True),
        row(f"{implementation}-prime", B=2, Q=17, S=31, lse=True),
        row(f"{implementation}-not-visible", not_visible, Q=37, S=41),
        row(f"{implementation}-window-start", B=2, group=2, Q=9, S=19, window=5, **start(12, 3)),
        row(f"{implementation}-nothing-visible", B=2, Q=5, S=5, **start(5, 9)),
        row(f"{implementation}-D128", D=128, Q=6, S=15, lse=True),
    )


CASES = (
    *run_time_cases(FUNCTION),
    *compile_time_cases(FUNCTION, (64, 96, 128)),
    *(row for name in OTHERS for row in _own(name)),
)

ERRORS = (
    *common_errors(FUNCTION, 32),
    refused(FUNCTION, "implementation-unknown", ValueError, "implementation must be streaming, streaming_block2", implementation="block2"),
    refused(FUNCTION, "implementation-none", ValueError, "implementation must be streaming", implementation=None),
)

LENGTHS = tuple(
    LengthCase(
        FUNCTION,
        lambda rng, n, name=name: arguments(rng, B=1 + n % 2, Q=n // 2, S=n, implementation=name),
        (2, 5, 40),
        f"lengths-{name}",
    )
    for name in IMPLEMENTATIONS
)

_mutation = partial(Mutation, FUNCTION)
MUTATIONS = (
    _mutation("one-step-per-block", "base += KEYS", "base += 1", ("streaming_block2-prime",)),
    _mutation("last-key-dropped", "base < end; base += KEYS", "base + KEYS <= end; base += KEYS", ("streaming_block4-prime",)),
    _mutation(
        "beyond-the-last-key",
        "head_row + metal::min(base + c, length - 1)",
        "head_row + base + c",
        ("streaming_block8-one",),
        "out of bounds",
    ),
    _mutation("first-row-only", "int(block) * ROWS + r", "int(block) * ROWS", ("streaming_multirow-prime",)),
    _mutation("not-rescaled", "sum[r][e] *= keep", "sum[r][e] *= 1", ("one-query",)),
    _mutation("zero-weight-of-nan", "range[r].low <= j && j < range[r].high && e < E", "e < E", ("streaming_multirow-not-visible",)),
    _mutation("lanes-overlap", "int(lane) * E;", "int(lane);", ("D64",)),
)
