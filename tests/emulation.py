"""What the emulations of Metal and CUDA share: libraries compiled by clang 19, remembered by what they depend on, and arrays as bytes."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

CACHE = Path(__file__).parents[1] / ".cache"
SWITCH = Path(__file__).with_name("emulation_switch.hpp")  # how both change fibers


@cache
def compiler() -> str | None:
    return shutil.which("clang-19")


@cache
def unavailable(what: str) -> str | None:
    """Why the emulation of `what` cannot run here, or None."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return f"the {what} emulation runs on Linux on x86-64, not on {sys.platform} on {platform.machine()}"
    return None if compiler() else f"the {what} emulation needs clang 19 (Debian: apt-get install clang-19)"


@cache
def version() -> bytes:
    return subprocess.run([str(compiler()), "--version"], capture_output=True, check=True).stdout


def clang(arguments: Sequence[str], source: str, libraries: Sequence[str] = ()) -> str | None:
    """What clang says against the source, or None."""
    done = subprocess.run([str(compiler()), *arguments, "-", *libraries], input=source, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else None


def library(folder: str, depends: bytes, compile_to: Callable[[Path], None], kind: str = "so") -> Path:
    """A library of the cache (or a precompiled header), compiled unless one that depends on the same is there."""
    path = CACHE / folder / f"{hashlib.sha256(depends).hexdigest()[:24]}.{kind}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.{id(compile_to)}.tmp")
        try:
            compile_to(partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def to_bytes(array: mx.array) -> np.ndarray:
    """Row-contiguous bytes of an array of any dtype."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat.view(mx.uint8) if array.dtype != mx.bool_ else flat.astype(mx.uint8))


def from_bytes(data: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    flat = mx.array(data)
    return (flat.astype(mx.bool_) if dtype == mx.bool_ else flat.view(dtype)).reshape(shape)
