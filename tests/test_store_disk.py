"""A store on a file system that is really full, out of inodes, or read-only: a small tmpfs, where this process may mount one."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtool
from kvtool.cli import run
from kvtool.store.resuming import resume
from kvtool.store.store import Store
from tests.library import ids, tiny

CHUNK = 64
Mount = Callable[[str], Path]


def put(store: Store, seed: int) -> None:
    store.put(kvtool.capture(tiny("qwen3"), ids(3 * CHUNK, seed)), codec="raw")


def usable(store: Store, seed: int) -> int:
    found = store.lookup([*ids(3 * CHUNK, seed), 1], tiny("qwen3"))
    return 0 if found is None else found.usable


def size_of_one(tmp_path: Path) -> int:
    store = Store(tmp_path / "one", chunk=CHUNK)
    put(store, 0)
    return int(store.stats()["bytes"])


@pytest.mark.parametrize("limit", ["size", "nr_inodes"])
def test_a_full_disk_lets_the_least_worth_go(mount: Mount, tmp_path: Path, limit: str) -> None:
    place = mount(f"size={4 * size_of_one(tmp_path)}" if limit == "size" else "size=64m,nr_inodes=50")
    store = Store(place / "store", chunk=CHUNK)
    for seed in range(12):
        put(store, seed)
        assert usable(store, seed) == 3 * CHUNK, seed
    assert store.room.evicted > 0 and store.objects.unfinished() == 0
    report = store.check()
    assert not report.problems and not report.lost


def test_a_disk_that_something_else_has_filled(mount: Mount, tmp_path: Path) -> None:
    place, model = mount(f"size={2 * size_of_one(tmp_path)}"), tiny("qwen3")
    store = Store(place / "store", chunk=CHUNK)
    put(store, 0)
    with pytest.raises(OSError, match="No space left"), open(place / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    store.remove(store.entries()[-1].id)
    with open(place / "filler", "ab", buffering=0) as file:
        try:
            file.write(bytes(10 << 20))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"no space left for .* although") as caught:
        put(store, 1)
    assert caught.value.errno == errno.ENOSPC and store.objects.unfinished() == 0 and not store.check().problems
    # A prompt is run all the same, and says why it was not put.
    resumed = resume(store, ids(3 * CHUNK, 2), model)
    assert resumed.put is None and any("is not in the store" in note for note in resumed.notes)
    os.unlink(place / "filler")
    put(store, 1)
    assert usable(store, 1) == 3 * CHUNK


def test_a_read_only_folder_is_read(mount: Mount, capsys: pytest.CaptureFixture[str]) -> None:
    place = mount("size=64m")
    where, words = str(place / "store"), ["--model", "tiny-a", "--prompt", "The committee met and heard its treasurer. " * 30]
    assert run(["export", *words, "--store", where]) == 0
    mount("remount,ro")
    for command in (["ls", where], ["stats", where], ["check", where], ["ls", where, "--chunks"]):
        assert run(["store", *command]) == 0
    capsys.readouterr()
    assert run(["import", *words, "--store", where, "--max-tokens", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usable_tokens"] > 256 and found["prefilled_tokens"] == 0
    # What cannot be put is said, and is no reason not to answer.
    assert run(["import", *words[:-1], words[-1] + "And more of it. " * 30, "--store", where, "--max-tokens", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["put"] is None and "Read-only" in " ".join(found["notes"])
    for command in (["export", *words[:-1], "Another prompt. " * 40, "--store", where], ["store", "gc", where, "--quota", "1"]):
        assert run(command) == 1
        said = capsys.readouterr().err
        assert "Read-only" in said and where in said and "Traceback" not in said
