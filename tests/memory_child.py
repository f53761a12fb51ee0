"""Library calls on a large synthetic cache, each measured in this process, which prints the figures as JSON; see test_memory.py.

python -m tests.memory_child FOLDER
"""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

import kvtool
from formats.manifest import ModelInfo
from kvtool.capturing import Snapshot
from kvtool.probe import CacheProbe, RoleProbe
from kvtool.snapshot import build_caches
from kvtool.states import CacheState
from veloxquant_mlx.transfer.rope_spec import RopeSpec

LAYERS, HEADS, ROWS, DIM = 28, 4, 7000, 64
ROPE = RopeSpec("default", DIM, base=10000.0)
LOSSY = "rvq-2+2"  # with its first and newest tokens exact: three segments a role
# K and V of float16 in all layers take 201 MB.
CACHE_BYTES = LAYERS * 2 * HEADS * ROWS * DIM * 2


def probes() -> tuple[CacheProbe, ...]:
    k, v = RoleProbe(HEADS, DIM, mx.float16, ROPE), RoleProbe(HEADS, DIM, mx.float16, None)
    return tuple(CacheProbe("KVCache", "full", k=k, v=v) for _ in range(LAYERS))


def snapshot(rows: int) -> Snapshot:
    key, states = mx.random.key(1), []
    for layer in range(LAYERS):
        k, v = (mx.random.normal((HEADS, rows, DIM), mx.float16, key=mx.random.split(key, 2 * LAYERS)[2 * layer + i]) for i in range(2))
        mx.eval(k, v)
        states.append(CacheState("KVCache", "full", offset=rows, positions=((0, rows),), k=k, v=v))
    return Snapshot(ModelInfo("synthetic", "none", "ab" * 32, "cd" * 32), tuple(range(rows)), rows, tuple(states), probes())


def resident(name: str) -> int | None:
    """A field of /proc/self/status in bytes, or None where there is no /proc."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)


def measured(action: Callable[[], Any]) -> dict[str, int | None]:
    """What an action adds at its peak: bytes that MLX holds, and resident bytes of the process (mapped file pages included)."""
    gc.collect()
    mx.clear_cache()
    before = None
    if resident("VmRSS") is not None:
        # Freed heap goes back to the system, so that an earlier call's garbage hides nothing of this one.
        ctypes.CDLL(None).malloc_trim(0)
        # 5 sets VmHWM back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    result = action()
    peak = resident("VmHWM")
    # What MLX keeps of freed buffers is resident, though nobody uses it.
    kept = mx.get_cache_memory()
    figures = {"kept": kept, "mlx": max(0, mx.get_peak_memory() - active), "rss": None if before is None or peak is None else peak - before}
    del result
    return figures


def loaded(path: Path) -> list[Any]:
    """What `Archive.load` does once the model has been checked."""
    cache: list[Any] = []
    with kvtool.open(path) as archive:
        for state in archive.states(probes(), []):
            cache += build_caches([state])
            mx.eval(cache[-1].state)
    return cache


def saves(options: dict[Path, dict[str, str]]) -> dict[str, dict[str, int | None]]:
    """Each file saved once from one snapshot."""
    whole = snapshot(ROWS)
    return {f"save {path.stem}": measured(partial(kvtool.save, whole, path, compress=False, **how)) for path, how in options.items()}


def main(folder: Path) -> None:
    raw, pre, out = (folder / f"{name}.kv" for name in ("raw", "pre", "out"))
    options = {raw: {"codec": "raw"}, pre: {"codec": LOSSY, "frame": "pre"}}
    # Code, tables and the BLAS are loaded before anything is measured.
    small = snapshot(8)
    for path, how in options.items():
        kvtool.save(small, path, **how)
        kvtool.recode(path, out, shift=1)
        loaded(path)
    figures = saves(options)
    for path in options:
        figures[f"load {path.stem}"] = measured(partial(loaded, path))
        figures[f"shift {path.stem}"] = measured(partial(kvtool.recode, path, out, shift=5))
        figures[f"shift {path.stem}"]["out"] = out.stat().st_size
    figures["transcode raw"] = measured(partial(kvtool.recode, raw, out, codec=LOSSY))
    figures["transcode raw"]["out"] = out.stat().st_size
    print(json.dumps({"figures": figures, "files": {path.stem: path.stat().st_size for path in options}, "cache": CACHE_BYTES}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
