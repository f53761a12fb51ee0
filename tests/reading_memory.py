"""What reading an input takes at its peak, of a process that has just begun; see test_reading_memory.py. Linux.

python -m tests.reading_memory WAY SMALL FILE ...

WAY: container (its header), check, tables, space or mlx-lm. SMALL: read before each is measured
"""

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from formats import strict_json
from formats.calibration import from_bytes
from formats.check import check
from formats.container import open_container
from formats.errors import KVError
from formats.foreign.mlx_lm import read_prompt_cache
from kvtool.store.keys import Space

# The C library keeps what is freed, in blocks that it chooses by what was freed before; with this the peak is of what is held.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}


TIGHT = 1 << 21  # in place of strict_json.ALLOWANCE, beside which small inputs would not count


def in_small_pages() -> None:
    """What this process touches from now on comes in pages of 4 KiB; a large one counts whole as soon as a byte of it is touched."""
    PR_SET_THP_DISABLE = 41
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def peak(call: Callable[[], object]) -> int:
    """Bytes by which the process is larger, at the most, while a call runs."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def header(path: Path) -> None:
    with open_container(path):
        pass


WAYS: dict[str, Callable[[Path], object]] = {
    "container": header,
    "check": lambda path: check(path),
    "tables": lambda path: from_bytes(path.read_bytes()),
    "space": lambda path: Space.parse(data := path.read_bytes(), blake3(data).hexdigest()),
    "mlx-lm": lambda path: read_prompt_cache(path),
}


def main(way: str, paths: list[str]) -> None:
    strict_json.ALLOWANCE = TIGHT
    in_small_pages()
    for path in paths[1:]:
        if os.fork() == 0:
            said = "sound"

            def read(path: str = path) -> None:
                nonlocal said
                try:
                    found = WAYS[way](Path(path))
                    said = "sound" if not isinstance(found, list) or not found else found[0].text
                except KVError as error:
                    said = str(error)

            blake3(bytes(1 << 21), max_threads=blake3.AUTO)  # its threads stay
            with contextlib.suppress(KVError):
                WAYS[way](Path(paths[0]))
            print(json.dumps({"path": path, "peak": peak(read), "said": said}), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
