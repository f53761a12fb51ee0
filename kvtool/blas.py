"""OpenBLAS in front of the reference BLAS that MLX's Linux CPU wheel carries (float32 matrix products: about 7 -> 120 GFLOP/s on 2 cores).

Symbols of a library opened with RTLD_GLOBAL before libmlx are found first, so no LD_PRELOAD is needed when this runs before `import mlx`.
"""

import ctypes
import glob
import os
import sys

PATTERNS = ("/usr/lib/*/openblas-pthread/libopenblas.so.0", "/usr/lib64/libopenblasp.so.0", "/usr/lib64/libopenblas.so.0")


def find_openblas() -> str | None:
    """Path of the system's threaded OpenBLAS, or None (always None off Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    return next((path for pattern in PATTERNS for path in sorted(glob.glob(pattern))), None)


def loaded_openblas() -> str | None:
    """Path of the OpenBLAS already mapped into this process, or None."""
    if not os.path.exists("/proc/self/maps"):
        return None
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        # NumPy's wheel carries an OpenBLAS of its own under prefixed names; it does not serve MLX.
        return next((line.split()[-1] for line in maps if "/libopenblas" in line and "numpy" not in line), None)


def use_openblas() -> str | None:
    """Put the system's OpenBLAS in front of MLX's BLAS; a no-op once MLX is imported or with KVTOOL_OPENBLAS=0.

    Returns:
        The path in use, or None where there is none, it is switched off, or MLX was imported first.
    """
    active = loaded_openblas()
    if active is not None:
        return active
    path = find_openblas()
    if path is None or "mlx.core" in sys.modules or os.environ.get("KVTOOL_OPENBLAS") == "0":
        return None
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return path
