"""Metal kernels on an x86-64 CPU: the text that MLX generates for a call, compiled by clang and run thread by thread.

What it finds beyond wrong results: mixed-up address spaces, races (a missing barrier), divergent barriers and SIMD operations,
shuffles that read an inactive lane, accesses out of bounds, reads of uninitialised threadgroup memory or outputs, elements that
no thread writes, more than 32 KiB of threadgroup memory, undefined shifts and conversions. See veloxquant_mlx/selftest/cases/README.md.
"""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests import emulation
from tests.emulation import from_bytes, to_bytes
from tests.metal_emulation.translate import SourceError, Translation, translate
from veloxquant_mlx.metal._kernel import Kernel, Shapes, Size, Template

HERE = Path(__file__).parent
ACCESS_LIMIT = 400_000_000

# fmt: off
WARNINGS = (
    "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused", "-Wno-unused-parameter", "-Wno-user-defined-literals",
    "-Wno-duplicate-decl-specifier", "-Wno-sign-compare", "-Wno-missing-braces", "-Wno-missing-field-initializers",
    "-Wno-ignored-qualifiers", "-Wno-psabi", "-Wimplicit-float-conversion", "-Wfloat-conversion",
)
# Metal has no double: 0.1 would be a float there; the warnings ask for 0.1f, which CUDA needs.
LANGUAGE = (
    "-x", "c++", "-nostdinc", "-nostdinc++", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-fno-math-errno",
    "-Xclang", "-cl-single-precision-constant",
)
# half and bfloat round after every operation; products and sums may fuse unless a pragma forbids it.
ARITHMETIC = (
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none", "-ffp-contract=fast-honor-pragmas",
)
CHECKS = (
    "-fsanitize=kernel-address", "-mllvm", "-asan-stack=0", "-mllvm", "-asan-globals=0", "-mllvm", "-asan-opt-same-temp=0",
    "-mllvm", "-asan-instrumentation-with-call-threshold=0", "-mllvm", "-asan-kernel-mem-intrinsic-prefix=1",
    "-fsanitize=bounds,shift,integer-divide-by-zero,float-cast-overflow,alignment,return,unreachable",
    "-Xclang", "-fsanitize-minimal-runtime",
    "-fno-sanitize-recover=bounds,shift,integer-divide-by-zero,float-cast-overflow,alignment", "-ftrivial-auto-var-init=pattern",
)
# fmt: on


class MetalFault(RuntimeError):
    """The kernel does something that Metal forbids, or that has no defined result."""


def unavailable() -> str | None:
    """Why kernels cannot be emulated here, or None."""
    return emulation.unavailable("Metal")


@dataclass(frozen=True)
class Program:
    """A kernel ready to run: its image, its entry, and the text that line numbers refer to."""

    path: Path
    entry: Any
    translation: Translation


class EmulatedMetal:
    """A launcher for `veloxquant_mlx.metal._kernel.using`.

    Args:
        seed: of the order in which threadgroups, SIMD-groups and lanes run.
        mutate: changes the generated text before it is compiled.
    """

    def __init__(self, seed: int = 0, mutate: Callable[[str], str] | None = None) -> None:
        self.seed = seed
        self.mutate = mutate

    def __call__(
        self,
        kernel: Kernel,
        arrays: Sequence[mx.array],
        template: Template,
        grid: Size,
        threadgroup: Size,
        output_shapes: Shapes,
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        text = generated(kernel, tuple(a.dtype for a in arrays), tuple(template), tuple(output_dtypes))
        program = load(self.mutate(text) if self.mutate else text)
        return run(program, kernel, arrays, grid, threadgroup, output_shapes, output_dtypes, self.seed)


@cache
def generated(
    kernel: Kernel, inputs: tuple[mx.Dtype, ...], template: tuple[tuple[str, bool | int | mx.Dtype], ...], outputs: tuple[mx.Dtype, ...]
) -> str:
    """The Metal source that MLX writes for a call: printed while the call is traced, which needs no GPU."""

    def traced(*arrays: mx.array) -> list[mx.array]:
        return kernel.build("metal")(
            inputs=list(arrays),
            template=list(template),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(8,)] * len(outputs),
            output_dtypes=list(outputs),
            verbose=True,
        )

    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 1)
        try:
            mx.export_function(lambda _: None, traced, *(mx.zeros((8,), dtype) for dtype in inputs))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        captured.seek(0)
        printed = captured.read().decode()
    return printed.split("```\n")[1]


# ---- Compiling


@cache
def flags() -> tuple[str, ...]:
    """Conversion and fused multiply-add instructions where this CPU has them; the results are the same without."""
    known = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text(encoding="utf-8")))
    return tuple(f"-m{name}" for name in ("f16c", "fma") if name in known)


@cache
def _tools() -> bytes:
    """What an image depends on besides its text."""
    headers = (HERE / "runtime.h").read_bytes() + (HERE / "thread.h").read_bytes()
    return emulation.version() + headers + repr((WARNINGS, LANGUAGE, ARITHMETIC, CHECKS, flags())).encode()


def _library(texts: Sequence[str], compile_to: Callable[[Path], None]) -> Path:
    return emulation.library("metal_emulation", _tools() + chr(0).join(texts).encode(), compile_to)


def _clang(arguments: Sequence[str], source: str, libraries: Sequence[str] = ()) -> None:
    fault = emulation.clang(arguments, source, libraries)
    if fault is not None:
        raise MetalFault(f"does not compile:\n{fault}")


def compile_kernel(text: str) -> tuple[Path, Translation]:
    """Check address spaces and compile; from the cache where the same text was compiled before."""
    try:
        translation = translate(text)
    except SourceError as error:
        raise MetalFault(str(error)) from error

    def compile_to(path: Path) -> None:
        include = ("-isystem", str(HERE))
        # Metal is C++14; runtime.h is not, and as a system header it may differ.
        _clang(["-std=c++14", "-DSTRICT", "-fsyntax-only", *WARNINGS, *LANGUAGE, *include], translation.checked)
        options = ("-std=c++17", "-O1", "-shared", "-fPIC", "-gline-tables-only", "-gdwarf-4", "-w", "-o", str(path))
        _clang([*options, *LANGUAGE, *ARITHMETIC, *CHECKS, *flags(), *include], translation.executable)

    return _library((translation.checked, translation.executable), compile_to), translation


def compile_all(texts: Sequence[str]) -> None:
    """Compile on every core; a text that fails is left for the call that needs it to report."""

    def attempt(text: str) -> None:
        with contextlib.suppress(MetalFault):
            compile_kernel(text)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, dict.fromkeys(texts)))


@cache
def runtime() -> ctypes.CDLL:
    """The scheduler and the checks; loaded globally, since kernels call into it."""
    source = (HERE / "runtime.cpp").read_text(encoding="utf-8")

    def compile_to(path: Path) -> None:
        options = ["-x", "c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-I", str(HERE), "-o", str(path)]
        _clang([*options, *flags()], source, ("-lstdc++", "-lm"))

    path = _library((source, emulation.SWITCH.read_text(encoding="utf-8")), compile_to)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.emu_run.restype = ctypes.c_int
    return library


@cache
def load(text: str) -> Program:
    path, translation = compile_kernel(text)
    runtime()
    return Program(path, ctypes.CDLL(str(path)).emu_entry, translation)


# ---- Running


class Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("element", ctypes.c_uint),
        ("output", ctypes.c_uint),
    )


def run(
    program: Program,
    kernel: Kernel,
    arrays: Sequence[mx.array],
    grid: Size,
    threadgroup: Size,
    output_shapes: Shapes,
    output_dtypes: Sequence[mx.Dtype],
    seed: int,
) -> list[mx.array]:
    inputs = [to_bytes(a) for a in arrays]
    outputs = [
        np.zeros(int(np.prod(shape)) * dtype.size, dtype=np.uint8) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
    ]
    described = [
        *((name, data, a.dtype.size, 0) for name, data, a in zip(kernel.inputs, inputs, arrays, strict=True)),
        *((name, data, dtype.size, 1) for name, data, dtype in zip(kernel.outputs, outputs, output_dtypes, strict=True)),
    ]
    buffers = (Buffer * len(described))(*(Buffer(n.encode(), d.ctypes.data, d.nbytes, size, out) for n, d, size, out in described))
    text = ctypes.create_string_buffer(2048)
    address, line = ctypes.c_uint64(), ctypes.c_int()
    three = ctypes.c_uint * 3
    failed = runtime().emu_run(
        *(program.entry, buffers, len(described), three(*grid), three(*threadgroup), seed, ctypes.c_uint64(ACCESS_LIMIT)),
        *(text, len(text), ctypes.byref(address), ctypes.byref(line)),
    )
    if failed:
        number = line.value or _line(program.path, address.value)
        lines = program.translation.lines
        place = f"\n  kernel.metal:{number}: {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""
        raise MetalFault(f"{kernel.name}: {text.value.decode()}{place}")
    return [from_bytes(data, tuple(shape), dtype) for data, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)]


def _line(path: Path, address: int) -> int:
    """The line of the Metal text that an address belongs to; 0 if it cannot be told."""
    tool = shutil.which("llvm-symbolizer-19") or shutil.which("addr2line")
    if not address or tool is None:
        return 0
    style = ["--obj", str(path), "--output-style=GNU"] if "symbolizer" in tool else ["-i", "-e", str(path)]
    done = subprocess.run([tool, *style, hex(address - 1)], capture_output=True, text=True, check=False)
    found = re.search(r"kernel\.metal:(\d+)", done.stdout)
    return int(found[1]) if found else 0
