"""Case 37: the peak of putting into a store, writing a file out of it and loading from it, on a cache of 115 MB.

put   what a put adds to the snapshot that it is given: at most a tenth of it, and blocks of constant size
get   a file written from chunks: the pages of the chunks, and at most a tenth
tc    segments of one calibrated layer share its tables
load  codes stay in the mapped chunks; exact rows are the caller's own afterwards, and the pages of the chunks come to it
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from kvtool.store.keys import CHUNK
from tests.store_memory_child import CODECS, ROWS, SEGMENTS
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
    cache, stored, figures = found["cache"], found["files"][codec], found["figures"][f"{call} {codec}"]
    out = cache if codec == "raw" else 0
    mlx, rss = {
        "put": (cache / 10 + ENCODER, cache / 10 + ENCODER),
        "get": (stored / 10, 1.1 * stored + headers),
        # Parts of less than 16 KiB, such as the scales of a chunk, are copied.
        "load": (1.1 * out + stored / 5, 1.1 * out + 1.1 * stored + headers),
    }[call]
    assert figures["mlx"] <= mlx
    if figures["rss"] is not None:
        assert figures["rss"] <= rss


def test_segments_share_the_tables_of_their_calibration(found: dict[str, Any]) -> None:
    # Tables of 4 heads of 64 take some 600 KB; what each pair of segments has of its own some 15.
    figures = found["figures"]["segments"]
    assert figures["mlx"] <= SEGMENTS << 12
    if figures["rss"] is not None:
        assert figures["rss"] <= 40 * SEGMENTS << 10
