"""Writes the golden files in tests/golden/container/v1. Run it once per schema: `python -m tests.golden.make_container`.

The inputs are those of tests/container_cases.py, producer versions included, so the same bytes come out on every machine
(zstd.kv: with the same zstd; it is compared by content). A golden that no longer reads exactly is a broken promise, not a
file to make again.
"""

from pathlib import Path

from formats.container import write_container
from tests.container_cases import (
    identity_manifest,
    inputs_manifest,
    inputs_plans,
    plans,
    small_arrays,
    small_manifest,
    tiny_manifest,
    tiny_plans,
)

FOLDER = Path(__file__).parent / "container" / "v1"


def make(folder: Path) -> None:
    """Write every golden file into `folder`."""
    write_container(folder / "tiny.kv", tiny_manifest(), tiny_plans(), compress=False)
    write_container(folder / "inputs.kv", inputs_manifest(), inputs_plans(), compress=False)
    write_container(folder / "identity.kv", identity_manifest(), tiny_plans(), compress=False)
    write_container(folder / "raw.kv", small_manifest(), plans(small_arrays()), compress=False)
    write_container(folder / "zstd.kv", small_manifest(), plans(small_arrays()))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    make(FOLDER)
