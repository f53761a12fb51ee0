"""Peak memory of saving, loading and recoding: what goes in, what comes out, and a tenth of the larger.

Measured in a child process on a 201 MB cache of 28 layers, for each call:
  mlx  growth of what MLX's allocator holds (its peak is exact, whatever the system does)
  rss  growth of the process's resident memory, the pages of the mapped input file included (Linux's VmHWM)

The input of a save is alive before it and the output of a save or recode goes to disk, so these two cost memory only where something
holds on to them; a bound that counts them is what a caller who has both must have free. Inside it everything but one role of one layer
(1/56 of the cache) and blocks of constant size must stream.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import kvtool
from formats.container import open_container
from tests import memory_child
from tests.library import ids, saved, tiny
from veloxquant_mlx.codecs import _base

ROOT = Path(__file__).resolve().parents[1]
# float32 temporaries of one block of a codec's encoder, about ten alive at once: constant, whatever the size of the cache.
ENCODER = 10 * 4 * _base.BLOCK_VALUES
CALLS = ["save raw", "save pre", "load raw", "load pre", "shift raw", "shift pre", "transcode raw"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("memory")
    child = subprocess.run([sys.executable, "-m", "tests.memory_child", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return dict(json.loads(child.stdout))


def sizes(measured: dict[str, Any], call: str) -> tuple[int, int]:
    """(bytes in, bytes out) of a call."""
    kind, name = call.split()
    cache, stored = measured["cache"], measured["files"][name]
    out = measured["figures"][call].get("out")
    return {"save": (cache, stored), "load": (stored, cache)}.get(kind, (stored, out))


@pytest.mark.parametrize("call", CALLS)
def test_peak_is_input_output_and_a_tenth(call: str, measured: dict[str, Any]) -> None:
    figures = measured["figures"][call]
    taken, given = sizes(measured, call)
    encodes = call in ("save pre", "transcode raw")
    bound = taken + given + max(taken, given) / 10 + (ENCODER if encodes else 0)
    if call.startswith("save"):
        # The input was alive before the call, so the growth may be the output and a tenth.
        bound -= taken
    assert figures["mlx"] <= bound
    if figures["rss"] is not None:
        assert figures["rss"] <= bound


@pytest.mark.parametrize("call", CALLS)
def test_mlx_holds_one_role_and_a_few_blocks(call: str, measured: dict[str, Any]) -> None:
    # Far below the bound above: eight times one role in float16 (two float32 copies, one part set, one result) and the encoder's blocks.
    role = measured["cache"] / 56
    out = measured["cache"] if call.startswith("load") else 0
    assert measured["figures"][call]["mlx"] <= out + 8 * role + (ENCODER if call in ("save pre", "transcode raw") else 0)


@pytest.mark.parametrize("call", CALLS)
def test_freed_buffers_are_given_back(call: str, measured: dict[str, Any]) -> None:
    # MLX would keep blocks' temporaries (34 MB here); one role's worth may be left from the last one.
    assert measured["figures"][call]["kept"] <= 2 * measured["cache"] / 56


def test_the_file_is_not_smaller_than_it_should_be(measured: dict[str, Any]) -> None:
    # The measurements mean something only if the files hold the cache: 2 bytes a value raw, 4 bits and a scale a row coded.
    assert measured["files"]["raw"] > measured["cache"]
    assert 0.25 < measured["files"]["pre"] / measured["cache"] < 0.3


def test_rows_of_several_segments_are_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows, their codes, and a few blocks; a decoded segment beside the joined rows would be as much as the rows again."""
    monkeypatch.setattr(memory_child, "LAYERS", 1)
    kvtool.save(memory_child.snapshot(40_000), tmp_path / "a.kv", codec="rvq-1", compress=False)
    with kvtool.open(tmp_path / "a.kv") as archive:
        archive.decoder.role("0", "k")  # the tables of angles, which all layers share, are made and kept
        for role in "kv":
            about = getattr(archive.manifest.layers[0], role)
            codes = sum(archive.reader.tensors[name].bytes for segment in about.segments for name in segment.tensors.values())
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            rows = archive.decoder.role("0", role)
            assert isinstance(rows, mx.array) and len(about.segments) == 3
            assert mx.get_peak_memory() - before <= rows.nbytes + codes + ENCODER < 1.8 * rows.nbytes
            del rows


# --- opening ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny("qwen3"), tmp_path_factory.mktemp("large") / "a.kv", 2000, compress=False)


def test_opening_reads_the_header_alone(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, count: int, offset: int) -> bytes:
        data = pread(fd, count, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    with kvtool.open(large) as archive:
        header = archive.reader.header_bytes
        assert sum(read) == 8 + header < large.stat().st_size / 50
        assert archive.length == 2000 and len(archive.manifest.layers) == 2
        assert mapped_bytes(large) in (None, 0)
        archive.state(0)
        touched = mapped_bytes(large)
        # One layer of two, and what the kernel maps around a fault (64 KiB).
        assert touched is None or large.stat().st_size / 3 < touched < large.stat().st_size / 2 + (1 << 18)
    assert sum(read) == 8 + header


def mapped_bytes(path: Path) -> int | None:
    """Resident bytes of the mapping of a file, or None where there is no /proc."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    inside, total = False, 0
    for line in smaps.read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and word == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def test_a_file_of_many_tokens_opens_in_one_piece(large: Path) -> None:
    with open_container(large) as reader:
        # 2000 token ids and the layer table; nothing that grows with the rows.
        assert reader.header_bytes < 20_000


def test_loading_leaves_nothing_behind(large: Path) -> None:
    model = tiny("qwen3")
    kvtool.load(large, model)
    before = mx.get_active_memory()
    for _ in range(3):
        restored = kvtool.load(large, model)
        # The keys and values themselves, and nothing of the copies on the way.
        assert mx.get_active_memory() - before <= 1.05 * sum(c.nbytes for c in restored.cache)
        del restored
    assert mx.get_active_memory() <= before
    assert kvtool.capture(model, ids(3)).length == 3
