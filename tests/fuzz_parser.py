"""Coverage-guided fuzzing of all that reads bytes of strangers: `python -m tests.fuzz_parser [--seconds 600]`, with atheris.

Each input is read as a kvtool file (header, manifest, every tensor and its digest), as tables and as a space of a store; one in EVERY also
with many elements more in one of its lists. Errors of `formats.errors` alone are allowed, each within SLOWEST seconds.
Reading takes at most twice the entry, its largest decompressed tensor counted, and an allowance, here a tight one; pages of the mapped file
come to that.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris
from blake3 import blake3

with atheris.instrument_imports(include=["formats"]):
    from formats import strict_json
    from formats.calibration import from_bytes
    from formats.container import open_container
    from formats.errors import KVError
    from formats.examine import PREFIX
    from kvtool.store.keys import Space, node_of

from tests.container_cases import seal
from tests.reading_memory import GIVES_BACK, TIGHT, peak

# Of a list of the manifest, whose quotes are escaped in the header.
strict_json.ALLOWANCE = TIGHT
ELEMENTS = (b"[],", b"{},", b"0,", b"[0,1],", b'{\\"step\\":\\"x\\"},', b'\\"ab\\",')
SEEDS = sorted((Path(__file__).parent / "golden").rglob("*.kv"))
LONGEST, SLOWEST, EVERY, ENLARGED = 1 << 16, 10, 16, 1 << 19


def one(data: bytes) -> None:
    """Read one input in every way, and once more with a header whose digest is right, so that what is behind that check is reached."""
    _bounded(_container, data)
    length = int.from_bytes(data[:8], "little")
    if data[8:].startswith(PREFIX) and len(PREFIX) + 64 <= length <= len(data):
        text, rest = data[8 : 8 + length], data[8 + length :]
        _bounded(_container, seal(text, rest))
        chosen = blake3(data).digest()
        if chosen[0] < 256 // EVERY:
            begins = len(PREFIX) + 64
            start = text.find(b"[", begins + int.from_bytes(chosen[1:5], "little") % (len(text) - begins + 1)) + 1 or len(text)
            part = ELEMENTS[chosen[5] % len(ELEMENTS)]
            _bounded(_container, seal(text[:start] + part * (ENLARGED // len(part)) + text[start:], rest))
    _bounded(_tables, data)
    _bounded(_space, data)
    node_of(data[:300].decode("latin-1"))


def _bounded(read: Callable[[bytes], int], data: bytes) -> None:
    """Read, within the memory that the input may take."""
    most = 0

    def measured() -> None:
        nonlocal most
        most = read(data)

    taken = peak(measured)
    assert taken <= 3 * (len(data) + most) + TIGHT, f"{taken} bytes of memory for an input of {len(data)}, {most} decompressed"


def _tables(data: bytes) -> int:
    with contextlib.suppress(KVError):
        from_bytes(data)
    return 0


def _space(data: bytes) -> int:
    with contextlib.suppress(KVError):
        Space.parse(data, blake3(data).hexdigest())
    return 0


def _container(data: bytes) -> int:
    """Read a file and all its tensors. Returns the bytes of the largest that is compressed."""
    path, most = _file(), 0
    path.write_bytes(data)
    with contextlib.suppress(KVError), open_container(path) as reader:
        most = max((info.bytes for info in reader.tensors.values() if info.encoding == "zstd"), default=0)
        defects = {defect.tensor for defect in reader.verify()}
        for name, info in reader.tensors.items():
            with contextlib.suppress(KVError):
                array = reader.array(name)
                # What reads as sound is as long as it says.
                assert name not in defects and array.nbytes == info.bytes, name
    return most


def _file() -> Path:
    return Path(tempfile.gettempdir()) / f"kvtool-fuzz-{os.getpid()}.kv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    given = parser.parse_args()
    if not GIVES_BACK.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", "tests.fuzz_parser", *sys.argv[1:]], {**os.environ, **GIVES_BACK})
    with tempfile.TemporaryDirectory(prefix="kvtool-fuzz-") as corpus:
        for i, seed in enumerate(SEEDS):
            data = seed.read_bytes()
            if len(data) <= LONGEST:
                (Path(corpus) / f"{i}.kv").write_bytes(data)
        options = [
            f"-max_total_time={given.seconds}",
            f"-max_len={LONGEST}",
            f"-timeout={SLOWEST}",
            "-rss_limit_mb=0",
            f"-seed={given.seed}",
        ]
        atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={tempfile.gettempdir()}/", corpus], one)
        try:
            atheris.Fuzz()
        finally:
            _file().unlink(missing_ok=True)


if __name__ == "__main__":
    main()
