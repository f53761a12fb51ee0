"""Every kernel case on every back end: the MLX definition, Metal, CUDA; and every refusal.

Without an Apple GPU the Metal column runs in the emulation of tests/metal_emulation, from the text that MLX generates for the call.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.kernel_mutants import caught
from tests.metal_emulation.emulator import EmulatedMetal, compile_all, generated, unavailable
from veloxquant_mlx import metal, native
from veloxquant_mlx.metal._backend import backend, cuda_available, forced, metal_available
from veloxquant_mlx.metal._kernel import Kernel, compiled, dims, using
from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.cases import CASES, ERRORS, LENGTHS, MUTATIONS
from veloxquant_mlx.selftest.run import call, check, check_error, dispatches

ROOT = Path(__file__).parents[1]
TABLE = ROOT / ".cache" / "kernel-table.txt"
COUNTS = ROOT / "veloxquant_mlx" / "selftest" / "counts.json"
COLUMNS = ("definition", "native", "metal", "cuda", "errors")

ran: Counter[tuple[str, str]] = Counter()
emulated = [case for case in CASES if case.emulate or metal_available()]


@pytest.fixture(scope="module")
def emulation(request: pytest.FixtureRequest) -> EmulatedMetal:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    selected = {item.name for item in request.session.items}
    cases = [case for case in emulated if f"test_metal[{case.id}]" in selected]
    compile_all([generated(d.kernel, d.inputs, d.template, d.outputs) for d in dispatches(cases)])
    return EmulatedMetal()


def absent() -> dict[str, str]:
    """Columns that this machine cannot run, and why."""
    metal_reason = None if metal_available() else unavailable()
    cuda_reason = None if cuda_available() else "MLX sees no CUDA GPU"
    return {column: reason for column, reason in (("metal", metal_reason), ("cuda", cuda_reason)) if reason}


@pytest.fixture(scope="module", autouse=True)
def result_table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write what ran, per function and column, and which cells a planted fault has turned red."""
    yield
    head = f"{'function':38}" + "".join(f"{c:>12} " for c in COLUMNS)
    rows = {f: f"{f:38}" + "".join(f"{ran[f, c]:12}{'*' if (f, c) in caught else ' '}" for c in COLUMNS) for f in metal.FUNCTIONS}
    notes = ["* a fault planted by the same process turned the cell red (test_kernel_faults, test_kernel_mutations; JOBS=0: all)"]
    notes += [f"{column} did not run: {reason}" for column, reason in absent().items()]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([head, *rows.values(), *notes]) + "\n", encoding="utf-8")
    shown = [row for f, row in rows.items() if any(ran[f, c] for c in COLUMNS)] + notes
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join([head, *shown]))


def test_there_are_29_functions() -> None:
    assert len(metal.FUNCTIONS) == 29


@pytest.mark.parametrize("function", metal.FUNCTIONS)
def test_function_is_exported(function: str) -> None:
    assert getattr(metal, function).__module__ == f"veloxquant_mlx.metal.{metal.FUNCTIONS[function]}"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_kernel"):
        metal.no_such_kernel  # noqa: B018


def test_rows_are_unique() -> None:
    repeated = [key for key, n in Counter(row.id for row in (*CASES, *ERRORS, *LENGTHS)).items() if n > 1]
    assert not repeated
    assert not {row.function for row in (*CASES, *ERRORS, *LENGTHS)} - set(metal.FUNCTIONS)


@pytest.mark.parametrize("rows", (CASES, ERRORS, LENGTHS, MUTATIONS), ids=("cases", "errors", "lengths", "mutations"))
def test_every_function_has_rows_of_every_kind(rows: Sequence[Case | ErrorCase | LengthCase | Mutation]) -> None:
    assert not set(metal.FUNCTIONS) - {row.function for row in rows}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_definition(case: Case) -> None:
    with forced("cpu"):
        assert check(case) is None
    ran[case.function, "definition"] += 1


COPIES = ("crosskv_rope_recode-one pair, one row", "crosskv_rope_recode-equal thetas")


@pytest.mark.skipif(not native.built(), reason="the native back end was not built")
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("case", [case for case in CASES if case.function in metal.NATIVE], ids=lambda c: c.id)
def test_native(case: Case, level: str) -> None:
    before, arguments = native.level(), case.arguments()
    native.set_level(level)
    try:
        with mx.stream(mx.cpu):
            assert metal.runs_on(case.function) == f"native {level}"
            assert check(case) is None
            calls = native.calls()
            results = call(case, arguments)
            # What has no entry is computed by nothing, and keys that no rotation changes are a copy.
            assert native.calls() > calls or not any(x.size for x in results) or case.id in COPIES
    finally:
        native.set_level(before)
    ran[case.function, "native"] += 1


@pytest.mark.skipif(not native.built(), reason="the native back end was not built")
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("case", [case for case in CASES if case.function in metal.NATIVE_ATTENDS], ids=lambda c: c.id)
def test_native_attends(case: Case, level: str) -> None:
    """Right, whether or not the extension has a reader, of the case as it is and with scales that bfloat16 holds."""
    before = native.level()
    native.set_level(level)
    try:
        for tried in (case, replace(case, make=lambda rng: held_by_bfloat16(case.make(rng)))):
            calls = native.calls()
            with mx.stream(mx.cpu):
                assert check(tried) is None
            ran[case.function, "native"] += native.calls() > calls
    finally:
        native.set_level(before)


SCALES = ("k_mag", "k_norm", "v_scale", "k_scale", "k_zero", "v_zero")


def held_by_bfloat16(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments but for factors, which are rounded and, beside no zero of theirs, made positive."""
    changed = dict(arguments)
    for name in SCALES:
        value = arguments.get(name)
        if value is None:
            continue
        value = value.array if isinstance(value, Strided) else value
        given = value.values if isinstance(value, Bf16) else np.asarray(value, np.float32)
        rounded = Bf16(given).values
        changed[name] = rounded if "k_zero" in arguments and name != "k_norm" else np.abs(rounded)
    return changed


@pytest.mark.parametrize("function", metal.NATIVE_ATTENDS)
def test_most_attends_are_native(function: str) -> None:
    """But for operands that are not finite."""
    if not native.built():
        pytest.skip("the native back end was not built")
    cases, read = [case for case in CASES if case.function == function], 0
    for case in cases:
        calls = native.calls()
        with mx.stream(mx.cpu):
            call(case, case.arguments())
        read += native.calls() > calls
    assert read >= 0.7 * len(cases), f"{read} of {len(cases)}"


def test_native_is_switched_off() -> None:
    """By `native.without`, as by KVTOOL_SIMD=none, and for a definition."""
    codes, calls = mx.zeros((64,), mx.uint8), native.calls()
    with native.without():
        assert metal.runs_on("turboquant_bit_pack") == backend()
        mx.eval(metal.turboquant_bit_pack(codes, 4))
    with forced("cpu"):
        assert metal.runs_on("turboquant_bit_pack") == "cpu"
        mx.eval(metal.turboquant_bit_pack(codes, 4))
    assert native.calls() == calls


@pytest.mark.parametrize("case", emulated, ids=lambda c: c.id)
def test_metal(case: Case, request: pytest.FixtureRequest) -> None:
    if metal_available():
        assert check(case) is None
    else:
        with using(request.getfixturevalue("emulation")):
            assert check(case) is None
    ran[case.function, "metal"] += 1


@pytest.mark.skipif(not cuda_available(), reason="MLX sees no CUDA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_cuda(case: Case) -> None:
    assert check(case) is None
    ran[case.function, "cuda"] += 1


@pytest.mark.parametrize("case", ERRORS, ids=lambda c: c.id)
def test_errors(case: ErrorCase) -> None:
    assert check_error(case) is None
    ran[case.function, "errors"] += 1


@pytest.mark.parametrize("case", LENGTHS, ids=lambda c: c.id)
def test_a_longer_sequence_compiles_nothing_new(case: LengthCase, request: pytest.FixtureRequest) -> None:
    """Kernels specialise on the model, not on the sequence."""
    launcher = None if metal_available() or cuda_available() else request.getfixturevalue("emulation")

    def run(length: int) -> None:
        call(Case(case.function, case.name, lambda _: {}, lambda: (), ()), case.arguments(length))

    def run_all() -> None:
        run(case.lengths[0])
        first = compiled()
        assert any(name for name, _ in first)
        for length in case.lengths[1:]:
            run(length)
        assert compiled() == first

    if launcher is None:
        run_all()
    else:
        with using(launcher):
            run_all()


@pytest.mark.parametrize("function", json.loads(COUNTS.read_text(encoding="utf-8")))
def test_no_fewer_cases_than_committed(function: str, request: pytest.FixtureRequest) -> None:
    """veloxquant_mlx/selftest/counts.json holds how many rows each column had; a column that ran whole must have run as many."""
    committed = json.loads(COUNTS.read_text(encoding="utf-8"))[function]
    rows = {"definition": CASES, "metal": emulated, "cuda": CASES, "errors": ERRORS}
    selected = Counter(item.name for item in request.session.items)
    for column in rows:
        own = [row for row in rows[column] if row.function == function]
        assert len(own) >= committed[column], f"{column}: {len(own)} rows, {committed[column]} committed"
        if all(selected[f"test_{column}[{row.id}]"] for row in own) and column not in absent():
            assert ran[function, column] >= committed[column], f"{column}: {ran[function, column]} ran"


def test_back_end_follows_the_default_device() -> None:
    with mx.stream(mx.cpu):
        assert backend() == "cpu"
    gpu = mx.default_device().type == mx.DeviceType.gpu
    assert gpu == (metal_available() or cuda_available())
    assert backend() == ("metal" if gpu and metal_available() else "cuda" if gpu else "cpu")


def test_back_end_can_be_forced_for_a_block() -> None:
    outside = backend()
    with forced("cpu"):
        assert backend() == "cpu"
        with using(lambda *_: []):
            assert backend() == "metal"
        assert backend() == "cpu"
    assert backend() == outside


WRITE = {"inputs": ("x",), "outputs": ("out",), "sources": (), "cuda": ""}
LAUNCH = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)], "output_dtypes": [mx.float32]}


def test_equal_names_never_share_code() -> None:
    one, two = (Kernel(name="same", metal=f"out[thread_position_in_grid.x] = {v};", **WRITE) for v in ("1.0f", "2.0f"))
    names = [re.findall(r"void (\w+)\(", generated(k, (mx.float32,), (), (mx.float32,))) for k in (one, two)]
    assert len(names[0]) == len(names[1]) == 1
    assert names[0] != names[1]


def test_inputs_reach_a_launcher_with_8_elements_or_more() -> None:
    """MLX would pass fewer in the constant address space."""
    sizes = []

    def launcher(kernel: Kernel, arrays: Sequence[mx.array], *_: object) -> list[mx.array]:
        sizes.extend((a.shape, a.tolist()) for a in arrays)
        return []

    kernel = Kernel(name="sizes", metal="", **{**WRITE, "inputs": ("x", "y", "z")})
    with using(launcher):
        kernel([mx.array(3.0), mx.ones((2, 2)), mx.ones((2, 4))], **LAUNCH)
    assert sizes == [((8,), [3.0] + [0.0] * 7), ((8,), [1.0] * 4 + [0.0] * 4), ((2, 4), [[1.0] * 4] * 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"grid": (0, 1, 1)}, "grid must have at least one thread"),
        ({"threadgroup": (1025, 1, 1)}, "threadgroup must have 1 to 1024 threads"),
        ({"threadgroup": (0, 1, 1)}, "threadgroup must have 1 to 1024 threads"),
        ({}, "backend must be metal or cuda, but got cpu"),
    ),
)
def test_impossible_launches_are_refused(change: dict, message: str) -> None:
    kernel = Kernel(name="launch", metal="", **WRITE)
    with forced("cpu"), pytest.raises(ValueError, match=message):
        kernel([mx.ones((8,))], **(LAUNCH | change))
    with pytest.raises(ValueError, match="arrays must be 1, but got 2"):
        kernel([mx.ones((8,))] * 2, **LAUNCH)


def test_dims_are_int32_and_at_least_8() -> None:
    assert dims(5, 7).tolist() == [5, 7, 0, 0, 0, 0, 0, 0]
    assert dims(*range(9)).shape == (9,)
    assert dims(1).dtype == mx.int32
