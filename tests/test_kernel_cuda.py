"""The CUDA text of every kernel and template that the cases use compiles for Hopper, warnings as errors.

It is wrapped as MLX's cuda_kernel wraps it. MLX compiles with NVRTC, which has no host headers: their names are taken away here,
and only headers that NVRTC can include are allowed.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from tests.cuda_attend_cases import COMPILED
from tests.cuda_mutations import CUDA_MUTATIONS, cases_of, mutated, reaches
from tests.cuda_prefill_cases import PREFILL_COMPILED
from veloxquant_mlx.metal._backend import forced
from veloxquant_mlx.selftest.case import Case, Mutation
from veloxquant_mlx.selftest.cases import CASES
from veloxquant_mlx.selftest.run import Dispatch, dispatches

CACHE = Path(__file__).parents[1] / ".cache" / "kernel_cuda"
NVCC = shutil.which("nvcc")
# fmt: off
FLAGS = (
    "-std=c++17", "-arch=sm_90", "-cubin", "-Werror", "all-warnings", "-Xcicc", "-O1", "-Xptxas", "-O1",
    "--diag-suppress", "177,186,550",  # unused variables and unsigned < 0: where a template argument makes them so
)
GROUP_FLAGS = tuple("-arch=sm_90a" if flag == "-arch=sm_90" else flag for flag in FLAGS)
MUTANT_FLAGS = tuple({"-cubin": "-ptx", "-O1": "-O0"}.get(flag, flag) for flag in FLAGS)  # no mutant changes what only ptxas reads
TYPES = {
    mx.bool_: "bool", mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t", mx.uint64: "uint64_t", mx.int8: "int8_t",
    mx.int16: "int16_t", mx.int32: "int32_t", mx.int64: "int64_t", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float",
}
HOST_NAMES = (
    "INFINITY", "NAN", "HUGE_VALF", "FLT_MAX", "FLT_MIN", "FLT_EPSILON", "INT_MAX", "INT_MIN", "UINT_MAX", "M_PI", "M_PI_2", "M_LOG2E",
    "M_LN2", "M_SQRT2", "assert", "UINT32_MAX", "INT32_MAX",
)
# fmt: on
PREAMBLE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cooperative_groups.h>
"""
INCLUDE = re.compile(r"^\s*#\s*include\s*(?P<name>[<\"][^>\"]*[>\"]).*$", re.MULTILINE)
INCLUDABLE = re.compile(
    r"<(cuda_fp16\.h|cuda_bf16\.h|mma\.h|cuda_pipeline\.h|math_constants\.h|cooperative_groups(/\w+)?\.h|cuda/(std/)?\w+)>"
)

functions = sorted({case.function for case in CASES})


def kernel_text(dispatch: Dispatch, name: str) -> str:
    """One kernel function as MLX writes it."""
    kernel = dispatch.kernel
    inputs = [f"const {TYPES[dtype]}* {name}" for dtype, name in zip(dispatch.inputs, kernel.inputs, strict=True)]
    outputs = [f"{TYPES[dtype]}* {name}" for dtype, name in zip(dispatch.outputs, kernel.outputs, strict=True)]
    constants = []
    for key, value in dispatch.template:
        if isinstance(value, mx.Dtype):
            constants.append(f"  using {key} = {TYPES[value]};")
        elif isinstance(value, bool):
            constants.append(f"  constexpr bool {key} = {str(value).lower()};")
        else:
            constants.append(f"  constexpr int {key} = {value};")
    return "\n".join([f"__global__ void {name}({', '.join(inputs + outputs)}) {{", *constants, kernel.body("cuda"), "}", ""])


def translation_unit(found: list[Dispatch]) -> str:
    """All kernels; those that share device functions share a namespace, which keeps equal names of others apart."""
    groups: dict[str, list[Dispatch]] = defaultdict(list)
    for dispatch in found:
        groups[dispatch.kernel.header("cuda")].append(dispatch)
    includes: dict[str, None] = {}
    parts = []
    for number, (header, members) in enumerate(groups.items()):
        sources = members[0].kernel.sources
        for include in INCLUDE.finditer(header):
            assert INCLUDABLE.fullmatch(include["name"]), f"{include['name']} in {sources} is no header that NVRTC is sure to find"
            includes[f"#include {include['name']}"] = None
        kernels = "\n".join(kernel_text(d, f"k{number}_{i}_{d.kernel.name}") for i, d in enumerate(members))
        device = INCLUDE.sub("", header).replace("#pragma once", "")
        entries = f"namespace mlx::core::cu {{\nnamespace cg = cooperative_groups;\n{kernels}\n}}"
        parts.append(f"namespace g{number} {{\n{device}\n{entries}\n}}  // {sources}\n")
    gone = "\n".join(f"#undef {name}" for name in HOST_NAMES)
    return "\n".join([PREAMBLE, *includes, gone, *parts])


def compile_text(text: str, flags: tuple[str, ...] = FLAGS) -> str | None:
    """What nvcc says against the text, or None; remembered for texts that were fine."""
    version = subprocess.run([str(NVCC), "--version"], capture_output=True, check=True).stdout
    stamp = CACHE / hashlib.sha256(version + repr(flags).encode() + text.encode()).hexdigest()[:24]
    if stamp.exists():
        return None
    CACHE.mkdir(parents=True, exist_ok=True)
    source = stamp.with_suffix(f".{os.getpid()}.cu")
    source.write_text(text, encoding="utf-8")
    try:
        command = [str(NVCC), *flags, "-o", os.devnull, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        source.unlink()
    if done.returncode:
        lines = text.splitlines()
        numbers = sorted({int(n) for n in re.findall(r"\.cu\((\d+)\)", done.stderr)})
        return done.stdout + done.stderr + "\n".join(f"line {n}: {lines[n - 1].strip()}" for n in numbers if n <= len(lines))
    stamp.touch()
    return None


def cuda_dispatches(cases: Iterable[Case]) -> list[Dispatch]:
    """`dispatches` as on CUDA: it draws the cases after it has set the back end to Metal, and here that is changed while it does."""

    def drawn() -> Iterator[Case]:
        with forced("cuda"):
            yield from cases

    return dispatches(drawn())


@pytest.fixture(scope="module")
def by_function(request: pytest.FixtureRequest) -> dict[str, list[Dispatch]]:
    selected = {item.name for item in request.session.items}
    chosen = [f for f in functions if f"test_cuda_compiles[{f}]" in selected]
    return {f: cuda_dispatches(case for case in (*CASES, *COMPILED, *PREFILL_COMPILED) if case.function == f) for f in chosen}


@pytest.fixture(scope="module")
def all_compile(by_function: dict[str, list[Dispatch]]) -> bool:
    """Whether everything compiles: one translation unit per core, since nvcc's own headers take seconds."""
    everything = list(dict.fromkeys(d for found in by_function.values() for d in found))
    stems = list(dict.fromkeys(d.kernel.sources for d in everything))
    parts = [[d for d in everything if stems.index(d.kernel.sources) % 2 == half] for half in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return not any(pool.map(lambda part: compile_text(translation_unit(part)) if part else None, parts))


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("function", functions)
def test_cuda_compiles(function: str, by_function: dict[str, list[Dispatch]], all_compile: bool) -> None:
    found = by_function[function]
    assert found, "no case reaches a kernel"
    if not all_compile:
        problem = compile_text(translation_unit(found))
        if problem is not None:
            pytest.fail(problem, pytrace=False)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
def test_products_of_a_warpgroup_compile() -> None:
    """The text of prefill_group.cu, which only sm_90a has; NVRTC gets that from MLX on Hopper."""
    there = "#if defined(__CUDA_ARCH__) && !defined(TILE_GROUP)\n#error the products of a warpgroup are not in the text\n#endif\n"
    problem = compile_text(translation_unit(cuda_dispatches(PREFILL_COMPILED)) + there, GROUP_FLAGS)
    if problem is not None:
        pytest.fail(problem, pytrace=False)


def changed(mutation: Mutation) -> list[Dispatch]:
    """What the named cases dispatch to the mutated kernels."""
    found = [d for d in cuda_dispatches(cases_of(mutation)) if reaches(mutation, d.kernel)]
    return [replace(d, kernel=mutated(d.kernel, mutation)) for d in found]


@pytest.mark.parametrize("mutation", CUDA_MUTATIONS, ids=lambda m: m.id)
def test_mutation_reaches_a_kernel(mutation: Mutation) -> None:
    assert changed(mutation), f"{mutation.old!r} is not in the text of any kernel that the cases run"


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
def test_mutations_compile() -> None:
    """All at once; a mutant that does not compile would prove nothing on a GPU."""
    halves = [[d for m in CUDA_MUTATIONS[half::2] for d in changed(m)] for half in range(2)]
    with ThreadPoolExecutor(2) as pool:
        problems = [problem for problem in pool.map(lambda part: compile_text(translation_unit(part), MUTANT_FLAGS), halves) if problem]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
