"""`kvtool doctor`: what this machine has for kvtool, and what would make it faster."""

import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from kvtool.blas import find_openblas, loaded_openblas
from kvtool.cli._common import emit, json_option

PACKAGES = ("kvtool", "mlx", "mlx-lm", "numpy", "safetensors", "zstandard", "blake3", "click")
NOT_BUILT = (
    "the native back end was not built: install a C++17 compiler (Debian: apt-get install g++; macOS: xcode-select --install), then kvtool "
    "again with pip install --force-reinstall --no-deps -v, which shows why a build fails; attention on the CPU is then faster"
)

SWITCHED_OFF = "KVTOOL_SIMD=none switches the native back end off: without that variable attention and coding on the CPU are faster"


@click.command("doctor")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine has: back end, BLAS, versions, and what to do about what is missing. Exits with 6 where MLX is missing.

    \b
    Example:
      kvtool doctor
    """
    report = examine()
    lines = [
        f"machine    {report['machine']}",
        f"python     {report['python']}",
        f"back end   {report['backend']}",
        f"native     {_native_line(report['native'])}",
        f"BLAS       {report['blas']}",
        f"dtype      models run in {report['dtype']} here unless --dtype says otherwise",
        "packages   " + ", ".join(f"{name} {found or 'missing'}" for name, found in report["packages"].items()),
    ]
    lines += [f"advice     {text}" for text in report["advice"]] or ["advice     none: this machine has what kvtool can use"]
    emit(as_json, report, "\n".join(lines))
    ctx.exit(0 if report["backend"] != "none" else 6)


def examine() -> dict[str, Any]:
    """What `kvtool doctor` reports, as one object."""
    packages = {name: _version(name) for name in PACKAGES}
    report: dict[str, Any] = {
        "machine": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "packages": packages,
        "backend": "none",
        "native": None,
        "blas": "not used",
        "dtype": "their stored dtype",
        "advice": [],
    }
    if importlib.util.find_spec("mlx") is None or importlib.util.find_spec("mlx.core") is None:
        report["advice"].append(
            "MLX is missing: pip install 'kvtool[cpu]' or 'kvtool[cuda]' on Linux, 'kvtool' on macOS; check and inspect work without it"
        )
        return report
    try:
        import mlx.core as mx
    except ImportError as error:
        extra = "'kvtool[cpu]', or 'kvtool[cuda]' with an NVIDIA GPU" if sys.platform == "linux" else "--force-reinstall mlx"
        report["advice"].append(f"MLX is installed without its back end ({error}): pip install {extra}; check and inspect work without it")
        return report
    from kvtool.model import default_dtype
    from veloxquant_mlx import metal, native
    from veloxquant_mlx.codecs import CODECS
    from veloxquant_mlx.native import stamp

    report["dtype"] = default_dtype() or report["dtype"]
    sound = native.built() and not native.stale()
    available = sound and native.available()
    report["native"] = {
        "built": native.built(),
        "stale": native.stale() or None,
        "in_use": available and mx.default_device() == mx.cpu,
        "level": native.level() if sound else None,
        "levels": native.levels(),
        "threads": native.threads() if sound else None,
        "codecs": [codec.id for codec in CODECS.values() if codec.read_natively] if sound else [],
        "functions": list(metal.NATIVE) if sound else [],
        "attends": list(metal.NATIVE_ATTENDS) if sound else [],
    }
    if native.stale():
        report["advice"].append(f"{native.stale()}: {stamp.REBUILD}")
    # It attends on a CPU alone: a GPU's user misses nothing without it.
    if not native.built() and mx.default_device() == mx.cpu:
        report["advice"].append(NOT_BUILT)
    if os.environ.get("KVTOOL_SIMD") == "none" and sound and mx.default_device() == mx.cpu:
        report["advice"].append(SWITCHED_OFF)
    if mx.metal.is_available():
        report["backend"] = "Metal"
    elif mx.cuda.is_available():
        report["backend"] = "CUDA"
    else:
        report["backend"] = f"CPU ({'native attention' if available else 'pure MLX'})"
        report["blas"] = loaded_openblas() or "MLX's reference BLAS"
        if loaded_openblas() is None:
            found = find_openblas()
            report["advice"].append(
                f"OpenBLAS is at {found} but not in use (KVTOOL_OPENBLAS=0?)"
                if found
                else "install OpenBLAS (Debian: apt-get install libopenblas0-pthread): float32 models then run about 15 times faster"
            )
    return report


def _native_line(native: dict[str, Any] | None) -> str:
    if native is None:
        return "unknown without MLX"
    if not native["built"]:
        return "not built"
    if native["stale"]:
        return "built from other sources, not in use"
    found = (
        f"{native['level']} of {', '.join(native['levels'])}; threads {native['threads']}; codes and reads {', '.join(native['codecs'])}; "
    )
    found += f"kernel functions {', '.join(native['functions'])}; but for operands that are not finite {', '.join(native['attends'])}"
    if native["in_use"]:
        return found
    return f"built, {'switched off by KVTOOL_SIMD=none' if os.environ.get('KVTOOL_SIMD') == 'none' else 'not in use'} ({found})"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
