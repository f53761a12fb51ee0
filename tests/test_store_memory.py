"""Case 37: the peak of putting into a store, writing a file out of it and loading from it, on a cache of 115 MB.

put   what a put adds to the snapshot that it is given: at most a tenth of it, and blocks of constant size
get   a file written from chunks: the pages of the chunks, and at most a tenth
tc    segments of one calibrated layer share its tables
load  codes stay in the mapped chunks, and a tenth of them at most comes to it; exact rows are the caller's own afterwards
many  what 125 chunks say of themselves is small beside them
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from kvtool.store.keys import CHUNK
from tests.store_memory_child import CODECS, MANY, ROWS, SEGMENTS
from tests.test_memory import ENCODER, ROOT

MANIFEST = 1 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("store-memory")
    child = subprocess.run(
        [sys.executable, "-m", "tests.store_memory_child", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    return dict(json.loads(child.stdout))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("call", ["put", "get", "load"])
def test_case_37_peaks(found: dict[str, Any], call: str, codec: str) -> None:
    headers = MANIFEST * (ROWS // CHUNK + 1)
    cache, file, stored, figures = found["cache"], found["files"][codec], found["stored"][codec], found["figures"][f"{call} {codec}"]
    out = cache if codec == "raw" else 0
    mlx, rss = {
        "put": (cache / 10 + ENCODER, cache / 10 + ENCODER),
        "get": (file / 10, 1.1 * file + headers),
        # Parts of less than 16 KiB, such as the scales of a chunk, are copied.
        "load": (1.1 * out + file / 5, 1.1 * (out + stored)),
    }[call]
    assert figures["mlx"] <= mlx
    if figures["rss"] is not None:
        assert figures["rss"] <= rss


def test_case_37_many_chunks(found: dict[str, Any]) -> None:
    # Of chunks of 256 tokens the same number would have CHUNK * MANY / ROWS times the rows, and say as much of themselves.
    figures, rows = found["figures"]["load many"], found["files"]["rvq"] * CHUNK * MANY / ROWS
    assert figures["mlx"] <= rows / 100
    if figures["rss"] is not None:
        assert figures["rss"] - found["stored"]["many"] <= rows / 20


def test_segments_share_the_tables_of_their_calibration(found: dict[str, Any]) -> None:
    # Tables of 4 heads of 64 take some 600 KB; what each pair of segments has of its own some 15.
    figures = found["figures"]["segments"]
    assert figures["mlx"] <= SEGMENTS << 12
    if figures["rss"] is not None:
        assert figures["rss"] <= 40 * SEGMENTS << 10
