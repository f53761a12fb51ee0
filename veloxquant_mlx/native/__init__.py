"""Attention to coded rows on a CPU, in C++: the same numbers as `caches.blocks`, without a decoded tile in memory.

The extension is built where a C++17 compiler is at hand when the package is installed. It has one kernel for each SIMD level; the best one
that the machine has is used, KVTOOL_SIMD names a lower one (or "none", for MLX in its place), KVTOOL_THREADS a number of threads other
than that of physical cores.
"""

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from formats.errors import BackendError
from veloxquant_mlx.native import stamp
from veloxquant_mlx.native.mapped import Mapped

_BUILT = importlib.util.find_spec("veloxquant_mlx.native._native") is not None
if _BUILT:
    from veloxquant_mlx.native import _native

_stale = stamp.stale(_native, Path(__file__).parent / "src") if _BUILT else ""
_calls = 0
_off: ContextVar[bool] = ContextVar("native_off", default=os.environ.get("KVTOOL_SIMD") == "none")


def built() -> bool:
    """Whether the extension was built when this package was installed."""
    return _BUILT


def available() -> bool:
    """Whether attention on a CPU is the extension's now.

    Raises:
        formats.errors.BackendError: the extension was built from other sources, and is not switched off.
    """
    if _off.get() or not _BUILT:
        return False
    if _stale:
        raise BackendError(_stale, hint=stamp.REBUILD)
    return True


def stale() -> str:
    """Why the extension that was built may not be used, or an empty text."""
    return _stale


def without_because(dim: int) -> str:
    """Why rows of D = dim are MLX's to read on a CPU, or an empty text where they are the extension's."""
    if not available():
        return "the native back end is switched off" if _BUILT else "the native back end was not built"
    return "" if dim <= max_dim() else f"the native back end takes a head_dim of up to {max_dim()}"


@contextmanager
def without() -> Iterator[None]:
    """Within the block, attention is MLX's."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def extension() -> Any:
    """The compiled module, to call: counted in `calls`."""
    global _calls
    _calls += 1
    return _native


def calls() -> int:
    """How often this process has turned to the extension for work: whether a call made between two counts did."""
    return _calls


def levels() -> list[str]:
    """SIMD levels that this machine has, best first; none without the extension."""
    return _native.levels() if _BUILT and not _stale else []


def level() -> str:
    """The level in use."""
    return _native.level()


def set_level(name: str) -> None:
    """Use that level in this process.

    Raises:
        ValueError: the machine does not have it.
    """
    _native.set_level(name)


def set_threads(count: int) -> None:
    """Use so many threads in this process, the caller's among them."""
    _native.set_threads(count)


def threads() -> int:
    return _native.threads()


def physical_cores() -> int:
    """Cores that this process may run on, counted once where they run several threads; no more than its cgroup's quota lets run at once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    own = os.sched_getaffinity(0)
    siblings = set()
    for cpu in own:
        listed = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(listed.read_text() if listed.exists() else str(cpu))
    return int(min(len(siblings), quota()))


def quota(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> float:
    """CPUs' worth of time that the control groups of this process (version 2, then 1) allow, inf where none limits it; at least 1.

    Args:
        root: where control groups are mounted.
        groups: the list of this process's own.
    """
    lowest = math.inf
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        # In a container the listed name may be the host's, and its own limits lie at the top.
        for folder in (top, *(top / part for part in _prefixes(name))):
            if controllers:
                limits = [folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"]
                words = [x.read_text().strip() for x in limits] if all(x.exists() for x in limits) else []
            else:
                words = (folder / "cpu.max").read_text().split() if (folder / "cpu.max").exists() else []
            if len(words) == 2 and words[0] not in ("max", "-1"):
                lowest = min(lowest, int(words[0]) / int(words[1]))
    return max(1.0, lowest)


def _prefixes(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", "..")]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def evaluate(x: mx.array) -> None:
    """`mx.eval` of what the extension is to read.

    Raises:
        ValueError: there is nothing to read, within `mx.compile`.
    """
    try:
        mx.eval(x)
    except ValueError as error:
        if "function transformations" not in str(error):
            raise
        raise ValueError(
            "[native] arrays must be computed when a function on the CPU is called, but got one within mx.compile: call the function "
            "outside of it, or under `with veloxquant_mlx.native.without():`, where most are MLX's operations alone."
        ) from error


def shared(x: mx.array | Mapped) -> np.ndarray:
    """The memory of an array, evaluated; bfloat16 as uint16. Nothing is copied."""
    if isinstance(x, Mapped):
        return x.view
    evaluate(x)
    x = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
    return np.array(x, copy=False)


def packed(x: mx.array | Mapped) -> np.ndarray:
    """`shared` of an array that is made row-contiguous where it is not."""
    return shared(x if isinstance(x, Mapped) else mx.contiguous(x))


def decoded(stored: "_native.Stored", start: int, stop: int) -> np.ndarray:
    """Rows start to stop, (H, n, D) float32: `codecs._reading.RowReader.decoded` to float32 rounding."""
    return extension().decode(stored, start, stop - start)


def stored(shape: tuple[int, int, int]) -> "_native.Stored":
    """Rows (H, S, D), still without their codes."""
    return _native.Stored(*shape)


def floats(x: mx.array) -> "_native.Stored":
    """Rows (H, S, D) of float16, bfloat16 or float32 where they are, if D is contiguous."""
    memory = shared(x)
    if memory.shape[2] > 1 and memory.strides[2] != memory.itemsize:
        memory = packed(x)
    rows = stored(tuple(x.shape))
    rows.floats(memory, x.dtype == mx.bfloat16)
    return rows


def quantisers(first: np.ndarray, bits: np.ndarray, points: np.ndarray) -> "_native.Quantisers":
    """Those of components, as `codecs._components.Components.stored` gives them: checked once, for any number of `stored`."""
    return _native.Quantisers(first, bits, points)


def max_dim() -> int:
    return _native.MAX_DIM


def _from_environment() -> None:
    """Use what KVTOOL_THREADS and KVTOOL_SIMD name."""
    wanted, simd = os.environ.get("KVTOOL_THREADS", ""), os.environ.get("KVTOOL_SIMD", "")
    if wanted and not (wanted.isascii() and wanted.isdigit() and len(wanted) <= 4):
        raise ValueError(f"[native] KVTOOL_THREADS must be 1 to 1024, but got {wanted}.")
    if _BUILT and not _stale:
        _native.set_threads(int(wanted) if wanted else physical_cores())
        if simd not in ("", "none"):
            _native.set_level(simd)


_from_environment()
