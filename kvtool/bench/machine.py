"""What a run says of the machine: figures mean nothing without it."""

import os
import platform
import shlex
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvtool.blas import loaded_openblas
from veloxquant_mlx import native
from veloxquant_mlx.metal._backend import backend

PACKAGES = ("kvtool", "mlx", "mlx-lm", "numpy", "torch")
# What a time depends on; named one by one, for others that begin with KVTOOL_ are secrets. MLX's own all begin with MLX_.
SETTINGS = (
    *("KVTOOL_SIMD", "KVTOOL_THREADS", "KVTOOL_OPENBLAS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    *("LD_PRELOAD", "CUDA_VISIBLE_DEVICES"),
)


def machine() -> dict[str, Any]:
    """System, processor, device, memory in bytes, back end, cores, load average, BLAS, versions and date, as one object."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": processor(),
        "device": str(mx.device_info().get("device_name", "unknown")),
        "device_architecture": str(mx.device_info().get("architecture", "unknown")),
        "memory": memory(),
        "backend": backend(),
        "native": native_line(),
        "cores": os.cpu_count(),
        "load": tuple(round(x, 2) for x in os.getloadavg()),
        "blas": blas(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "all"),
        "versions": {name: found for name in PACKAGES if (found := _version(name))} | {"python": platform.python_version()},
    }


def memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory() -> int:
    """Bytes of the device's memory: a CUDA device has its own, others share the machine's."""
    return int(mx.device_info().get("total_memory", memory())) if backend() == "cuda" else memory()


def environment() -> list[str]:
    """The variables that are set and that times depend on, as assignments of a shell."""
    names = [*SETTINGS, *sorted(name for name in os.environ if name.startswith("MLX_"))]
    return [f"{name}={shlex.quote(os.environ[name])}" for name in names if name in os.environ]


def native_line() -> str:
    """The native back end's SIMD level and threads, or why it does nothing."""
    if not native.built():
        return "not built"
    if backend() != "cpu":
        return "not used"
    return f"{native.level()}, {native.threads()} threads" if native.available() else "switched off"


def blas() -> str:
    """What MLX's matrix products run on."""
    if backend() != "cpu":
        return "not used"
    return "Accelerate" if platform.system() == "Darwin" else loaded_openblas() or "MLX's reference BLAS"


def processor() -> str:
    """Name of the processor: on a Mac that of its chip."""
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
