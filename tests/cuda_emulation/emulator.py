"""CUDA kernels on an x86-64 CPU: the text, compiled by clang, with warps of fibers that meet at barriers, shuffles and matrix products.

For the texts that keep PTX to the few functions of `decode_parts.cu` which warp.hpp writes in C++; no race or bound is checked.
"""

import ctypes
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import emulation
from tests.emulation import from_bytes, to_bytes
from veloxquant_mlx.metal._backend import backend, forced
from veloxquant_mlx.metal._kernel import Kernel, Shapes, Size, Template, using

HERE = Path(__file__).parent
HEADERS = (HERE / "warp.hpp", emulation.SWITCH)
OPTIONS = ("-std=c++20", "-O1", "-w", "-fPIC", "-mf16c")
TYPES = {mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t", mx.int32: "int"}
TYPES |= {mx.bool_: "bool", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float"}
FUNCTION = re.compile(
    r"(?:template <[^>]*>\n)?(?:constexpr )?__device__ __forceinline__ [\w*]+ ((?:coded|decode)_\w+)\((?:[^{};]*)\) \{\n.*?\n\}\n",
    re.DOTALL,
)
# What warp.hpp has, and what it could not compile.
REPLACED = ("decode_mma", "decode_transpose", "decode_columns", "decode_copy", "decode_commit", "decode_wait", "decode_exp2")
REPLACED += ("decode_count", "decode_prefetch", "decode_arrived", "decode_meet", "decode_address", "decode_load")
REPLACED += ("decode_product", "decode_add_product", "decode_memory", "coded_short")
BOUNDS = re.compile(r"#undef __global__\n#define __global__ [^\n]*\n")


@contextmanager
def cuda() -> Iterator[None]:
    """A GPU, or the emulation of one; a test is skipped where there is neither."""
    if backend() == "cuda":
        yield
        return
    if backend() == "metal" or unavailable():
        pytest.skip(unavailable() or "MLX has a GPU without CUDA")
    with using(EmulatedCuda()), forced("cuda"):
        yield


def unavailable() -> str | None:
    """Why kernels cannot be emulated here, or None."""
    return emulation.unavailable("CUDA")


class EmulatedCuda:
    """A launcher."""

    def __call__(
        self,
        kernel: Kernel,
        arrays: Sequence[mx.array],
        template: Template,
        grid: Size,
        threadgroup: Size,
        shapes: Shapes,
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        given = [to_bytes(a) for a in arrays]
        # All bits set: what no thread writes is NaN.
        results = [np.full(math.prod(shape) * dtype.size, 255, np.uint8) for shape, dtype in zip(shapes, dtypes, strict=True)]
        run = _compiled(text(kernel, [a.dtype for a in arrays], template, dtypes))
        blocks = [-(-threads // group) for threads, group in zip(grid, threadgroup, strict=True)]
        pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (*given, *results)]
        run(blocks[0], blocks[1], threadgroup[0], *pointers)
        return [from_bytes(data, tuple(shape), dtype) for data, shape, dtype in zip(results, shapes, dtypes, strict=True)]


def text(kernel: Kernel, inputs: Sequence[mx.Dtype], template: Template, outputs: Sequence[mx.Dtype]) -> str:
    """The translation unit of one kernel."""
    header = BOUNDS.sub("", kernel.header("cuda"))
    header = FUNCTION.sub(lambda found: "" if found[1] in REPLACED else found[0], header)
    named = [f"const {TYPES[d]}* {name}" for d, name in zip(inputs, kernel.inputs, strict=True)]
    named += [f"{TYPES[d]}* {name}" for d, name in zip(outputs, kernel.outputs, strict=True)]
    constants = [
        f"using {key} = {TYPES[value]};" if isinstance(value, mx.Dtype) else f"constexpr auto {key} = {str(value).lower()};"
        for key, value in template
    ]
    body = "\n".join(["emulated::run({blocks_x, blocks_y, 1}, threads, [&] {", *constants, kernel.cuda, "});"])
    entry = f'extern "C" void entry(unsigned blocks_x, unsigned blocks_y, int threads, {", ".join(named)}) {{\n{body}\n}}\n'
    return f'#include "{HERE / "warp.hpp"}"\n{header}\n{entry}'


def _compiled(source: str) -> Any:
    def compile_to(path: Path) -> None:
        _clang(("-x", "c++", *OPTIONS, "-include-pch", str(_header()), "-shared", "-o", str(path)), source, ("-lstdc++", "-lm"))

    depends = emulation.version() + (source + _warp()).encode()
    return ctypes.CDLL(str(emulation.library("cuda_emulation", depends, compile_to))).entry


@cache
def _warp() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in HEADERS)


@cache
def _header() -> Path:
    """warp.hpp and what it includes, compiled once: half of a kernel's time."""

    def compile_to(path: Path) -> None:
        _clang(("-x", "c++-header", *OPTIONS, "-fpch-instantiate-templates", "-o", str(path)), f'#include "{HERE / "warp.hpp"}"\n')

    # clang takes a header for another once its time has changed, as a checkout of the same text changes it.
    changed = [path.stat().st_mtime_ns for path in HEADERS]
    depends = emulation.version() + repr((HERE, OPTIONS, changed)).encode() + _warp().encode()
    return emulation.library("cuda_emulation", depends, compile_to, "pch")


def _clang(arguments: Sequence[str], source: str, libraries: Sequence[str] = ()) -> None:
    fault = emulation.clang(arguments, source, libraries)
    if fault is not None:
        raise RuntimeError(f"the CUDA text does not compile:\n{fault[:6000]}")
