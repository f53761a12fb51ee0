"""A GPU kernel written twice, in Metal and in CUDA, and dispatched by back end.

Device functions live in `src/<stem>.metal` and `src/<stem>.cu`; the entry body stands beside the grid in the family's module.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, forced

Language = Literal["metal", "cuda"]
Template = Sequence[tuple[str, bool | int | mx.Dtype]]
Size = tuple[int, int, int]
Shapes = Sequence[tuple[int, ...]]
# (kernel, arrays, template, grid, threadgroup, output_shapes, output_dtypes) -> outputs
Launcher = Callable[["Kernel", Sequence[mx.array], Template, Size, Size, Shapes, Sequence[mx.Dtype]], list[mx.array]]

SOURCES = Path(__file__).parent / "src"
SUFFIX = {"metal": ".metal", "cuda": ".cu"}
MAX_THREADGROUP = 1024
INT32_MAX = 2**31 - 1
MAX_GROUPS = 65535  # along y and z: CUDA's limit

_launcher: ContextVar[Launcher | None] = ContextVar("kernel_launcher", default=None)
_compiled: set[tuple[str, tuple[tuple[str, bool | int | mx.Dtype], ...]]] = set()


@dataclass(frozen=True)
class Kernel:
    """One entry point. Every input arrives as `const device T*` (Metal) or `const T*` (CUDA), whatever its size."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    metal: str
    cuda: str

    def header(self, language: Language) -> str:
        """The device functions that the entry body calls."""
        return "".join(source(stem, language) for stem in self.sources)

    def included(self) -> str:
        """The CUDA header as lines that include its files: MLX hashes all the text it is given at each launch."""
        return "".join(f'#include "{SOURCES / stem}.cu"\n' for stem in self.sources)

    def body(self, language: Language) -> str:
        return self.metal if language == "metal" else self.cuda

    def build(self, language: Language, shared_memory: int = 0) -> Any:
        """MLX's object for this kernel; needs no GPU for Metal. Its name carries the text's hash: same-named kernels never share code."""
        return _build(self, language, shared_memory)

    def __call__(
        self,
        arrays: Sequence[mx.array],
        *,
        template: Template = (),
        grid: Size,
        threadgroup: Size,
        output_shapes: Shapes,
        output_dtypes: Sequence[mx.Dtype],
        shared_memory: int = 0,
    ) -> list[mx.array]:
        """Run over `grid` THREADS (not groups) in groups of `threadgroup`.

        Args:
            arrays: one per input, row-contiguous or not.
            template: compile-time constants that come from the model, never from a sequence length or a batch size.
            output_shapes, output_dtypes: one per output; every element must be written by the kernel.
            shared_memory: CUDA's dynamic shared memory in bytes; Metal declares its threadgroup memory in the body.
        """
        if len(arrays) != len(self.inputs):
            raise ValueError(f"[{self.name}] arrays must be {len(self.inputs)}, but got {len(arrays)}.")
        if not 0 < threadgroup[0] * threadgroup[1] * threadgroup[2] <= MAX_THREADGROUP:
            raise ValueError(f"[{self.name}] threadgroup must have 1 to {MAX_THREADGROUP} threads, but got {threadgroup}.")
        if min(grid) < 1:
            raise ValueError(f"[{self.name}] grid must have at least one thread, but got {grid}.")
        if max(grid) > INT32_MAX:
            raise ValueError(f"[{self.name}] grid must have at most {INT32_MAX} threads along an axis, but got {grid}.")
        if any(-(-threads // group) > MAX_GROUPS for threads, group in zip(grid[1:], threadgroup[1:], strict=True)):
            raise ValueError(f"[{self.name}] grid must have at most {MAX_GROUPS} groups along y and z, but got {grid} of {threadgroup}.")
        if backend() != "cuda":  # there every input is a pointer, and padding a launch or two
            arrays = [at_least_8(a) for a in arrays]
        _compiled.add((self.name, tuple(template)))
        launcher = _launcher.get()
        if launcher is not None:
            return launcher(self, arrays, template, grid, threadgroup, output_shapes, output_dtypes)
        language = backend()
        if language == "cpu":
            raise ValueError(f"[{self.name}] backend must be metal or cuda, but got cpu.")
        return self.build(language, shared_memory if language == "cuda" else 0)(
            inputs=arrays,
            template=list(template),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[tuple(shape) for shape in output_shapes],
            output_dtypes=list(output_dtypes),
        )


@cache
def source(stem: str, language: Language) -> str:
    """Text of `src/<stem>` in a language."""
    return (SOURCES / (stem + SUFFIX[language])).read_text(encoding="utf-8")


@cache
def _build(kernel: Kernel, language: Language, shared_memory: int) -> Any:
    header, body = kernel.header(language), kernel.body(language)
    digest = hashlib.sha256(f"{header}\0{body}".encode()).hexdigest()[:8]
    common = {
        "name": f"{kernel.name}_{digest}",
        "input_names": list(kernel.inputs),
        "output_names": list(kernel.outputs),
        "source": body,
    }
    if language == "metal":
        return mx.fast.metal_kernel(**common, header=header)
    return mx.fast.cuda_kernel(**common, header=kernel.included(), shared_memory=shared_memory)


def at_least_8(array: mx.array) -> mx.array:
    """`array`, or if it has fewer than 8 elements, those and zeros as (8,): MLX passes smaller ones in the constant address space."""
    if array.size >= 8:
        return array
    return mx.pad(array.reshape(-1), (0, 8 - array.size))


def dims(*sizes: int) -> mx.array:
    """Sizes known only at run time, as the int32 input of a kernel; at least 8 entries, zeros behind.

    Raises:
        ValueError: a size does not fit.
    """
    if any(abs(size) > INT32_MAX for size in sizes):
        raise ValueError(f"[dims] sizes of a kernel must be at most {INT32_MAX}, but got {max(sizes, key=abs)}.")
    return mx.array([*sizes, *[0] * (8 - len(sizes))], dtype=mx.int32)


# Small inputs stay on the GPU: a new array each call is a copy each call.
@lru_cache(maxsize=1024)
def kept_dims(*sizes: int) -> mx.array:
    """`dims`, evaluated and kept."""
    made = dims(*sizes)
    mx.eval(made)
    return made


@lru_cache(maxsize=8)
def unused(dtype: mx.Dtype = mx.float32) -> mx.array:
    """In place of an input that a kernel does not read."""
    made = mx.zeros((8,), dtype)
    mx.eval(made)
    return made


def compiled() -> frozenset[tuple[str, tuple[tuple[str, bool | int | mx.Dtype], ...]]]:
    """(name, template) of every kernel called so far in this process: what has been compiled."""
    return frozenset(_compiled)


@contextmanager
def using(launcher: Launcher) -> Iterator[None]:
    """Within the block, `backend()` is "metal" and every kernel call goes to `launcher`."""
    token = _launcher.set(launcher)
    try:
        with forced("metal"):
            yield
    finally:
        _launcher.reset(token)
