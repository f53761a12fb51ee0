"""Which back end runs a kernel here. Asked of MLX, never found out by failing."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import mlx.core as mx

from veloxquant_mlx import native

Backend = Literal["metal", "cuda", "cpu"]

_forced: ContextVar[Backend | None] = ContextVar("forced_backend", default=None)


def metal_available() -> bool:
    """Whether Metal kernels can be dispatched: this build of MLX has the back end and the machine has the GPU."""
    return mx.metal.is_available()


def cuda_available() -> bool:
    """Whether CUDA kernels can be dispatched: this build of MLX has the back end and the machine has the GPU."""
    return mx.cuda.is_available()


def backend() -> Backend:
    """The back end that kernels run on now; "cpu" where there is no GPU, or where the default device is the CPU."""
    forced = _forced.get()
    if forced is not None:
        return forced
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    if metal_available():
        return "metal"
    return "cuda" if cuda_available() else "cpu"


def natively() -> bool:
    """Whether functions of `metal.NATIVE` run in C++ now: on a CPU where the extension is built, not switched off, and "cpu" not forced.

    Their arguments are then evaluated when they are called: within a transformation of MLX (`mx.compile`), use `native.without()`.
    """
    return _forced.get() is None and backend() == "cpu" and native.available()


@contextmanager
def forced(name: Backend) -> Iterator[None]:
    """Within the block, `backend()` is `name`, whatever the machine has; "cpu" is MLX's operations, the definition of every function."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
