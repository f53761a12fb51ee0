"""Which back end runs a kernel here. Asked of MLX, never found out by failing."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import mlx.core as mx

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


@contextmanager
def forced(name: Backend) -> Iterator[None]:
    """Within the block, `backend()` is `name`, whatever the machine has."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
