"""Coverage-guided fuzzing of all that reads bytes of strangers: `python -m tests.fuzz_parser [--seconds 600]`, with atheris.

Each input is read as a kvtool file (header, manifest, every tensor and its digest), as tables and as a space of a store. Errors of
`formats.errors` alone are allowed, each within SLOWEST seconds and MEMORY megabytes beyond what the process begins with.
"""

import argparse
import contextlib
import os
import resource
import sys
import tempfile
from pathlib import Path

import atheris
from blake3 import blake3

with atheris.instrument_imports(include=["formats"]):
    from formats.calibration import from_bytes
    from formats.container import open_container
    from formats.errors import KVError
    from formats.examine import PREFIX
    from kvtool.store.keys import Space, node_of

from tests.container_cases import seal

SEEDS = sorted((Path(__file__).parent / "golden").rglob("*.kv"))
LONGEST, MEMORY, SLOWEST = 1 << 16, 200, 10


def one(data: bytes) -> None:
    """Read one input in every way, and once more with a header whose digest is right, so that what is behind that check is reached."""
    _container(data)
    length = int.from_bytes(data[:8], "little")
    if data[8:].startswith(PREFIX) and len(PREFIX) + 64 <= length <= len(data):
        _container(seal(data[8 : 8 + length], data[8 + length :]))
    with contextlib.suppress(KVError):
        from_bytes(data)
    with contextlib.suppress(KVError):
        Space.parse(data, blake3(data).hexdigest())
    node_of(data[:300].decode("latin-1"))


def _container(data: bytes) -> None:
    path = _file()
    path.write_bytes(data)
    with contextlib.suppress(KVError), open_container(path) as reader:
        defects = {defect.tensor for defect in reader.verify()}
        for name, info in reader.tensors.items():
            with contextlib.suppress(KVError):
                array = reader.array(name)
                # What reads as sound is as long as it says.
                assert name not in defects and array.nbytes == info.bytes, name


def _file() -> Path:
    return Path(tempfile.gettempdir()) / f"kvtool-fuzz-{os.getpid()}.kv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    given = parser.parse_args()
    # The peak is counted from before the program began: a parent's counts in it.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 + MEMORY
    with tempfile.TemporaryDirectory(prefix="kvtool-fuzz-") as corpus:
        for i, seed in enumerate(SEEDS):
            data = seed.read_bytes()
            if len(data) <= LONGEST:
                (Path(corpus) / f"{i}.kv").write_bytes(data)
        options = [
            f"-max_total_time={given.seconds}",
            f"-max_len={LONGEST}",
            f"-timeout={SLOWEST}",
            f"-rss_limit_mb={most}",
            f"-seed={given.seed}",
        ]
        atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={tempfile.gettempdir()}/", corpus], one)
        try:
            atheris.Fuzz()
        finally:
            _file().unlink(missing_ok=True)


if __name__ == "__main__":
    main()
