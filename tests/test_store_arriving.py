"""Prompts that are elsewhere are built while they come: what is there is used, the rest is waited for, what goes wrong leaves nothing."""

import os
import resource
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.container import Reader
from formats.errors import DigestError, FormatError
from kvtool.store import arriving
from kvtool.store.arriving import Arriving, Coming, Fetching
from kvtool.store.folder import Folder
from kvtool.store.local_copy import LocalCopy
from kvtool.store.objects import Missing
from kvtool.store.store import Store
from tests.library import ids, tiny

CHUNK = 64
TOKENS = ids(3 * CHUNK + 5)


class Elsewhere(Folder):
    """A folder that has no files to map, and does with reads what a test wants."""

    before: Callable[[str, int], None] | None = None
    change: Callable[[str, int, bytes], bytes] | None = None

    def path(self, name: str) -> Path | None:
        return None

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        ours = name.endswith(".kv")
        if ours and self.before is not None:
            self.before(name, start)
        data = super().read(name, start, length)
        return self.change(name, start, data) if ours and self.change is not None else data


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    monkeypatch.setattr(arriving, "LEAST", 2048)
    made = Elsewhere(tmp_path / "remote")
    Store(made, chunk=CHUNK).put(kvtool.capture(tiny("qwen3"), TOKENS), codec="rvq-4")
    return made


def answer(store: Store) -> np.ndarray:
    model = tiny("qwen3")
    restored = store.load([*TOKENS, 1, 2], model)
    assert restored is not None and restored.usable == len(TOKENS), restored
    return np.array(model.model(mx.array([[1, 2]]), cache=restored.cache))


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".coming", ".fetched", ".part")]


def test_what_comes_gives_what_is_there(remote: Elsewhere, tmp_path: Path) -> None:
    want = answer(Store(Folder(tmp_path / "remote"), chunk=CHUNK))
    copies = LocalCopy(remote, tmp_path / "local")
    store = Store(copies, chunk=CHUNK)
    assert np.array_equal(answer(store), want)
    copies.settle()
    names = {entry.name for entry in remote.names() if entry.name.endswith(".kv")}
    used = {entry.name for entry in copies.local.names()}
    assert used <= names and len(used) == 3 and not left(tmp_path / "local")
    assert all(copies.local.read(name) == remote.read(name) for name in used)
    remote.before = lambda name, start: pytest.fail("it is here")
    assert np.array_equal(answer(store), want)


def test_a_tensor_is_had_before_the_rest_has_come(remote: Elsewhere, tmp_path: Path) -> None:
    name = next(entry.name for entry in remote.names("chunks/"))
    size, gate, asked = remote.size(name), threading.Event(), []
    assert size is not None

    def read(name: str, start: int, length: int) -> bytes:
        asked.append(start)
        if start >= size // 2:
            assert gate.wait(20)
        return remote.read(name, start, length)

    fetched = Fetching(read, {name: size}, lambda _: tmp_path / "a")
    part, whole = Arriving(fetched.files[name]), Reader(tmp_path / "remote" / "objects" / name)
    tensors = sorted(whole.tensors.values(), key=lambda info: info.offset)
    early = [info.name for info in tensors if info.offset + info.padded <= size // 2 - 2048]
    assert early
    for one in early:
        assert np.array_equal(part.array(one), whole.array(one))
    waiting = threading.Thread(target=part.array, args=(tensors[-1].name,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.set()
    waiting.join(20)
    assert not waiting.is_alive() and not part.verify() and asked == sorted(asked)
    fetched.stop()


def test_the_beginnings_of_all_come_before_the_ends_of_any() -> None:
    parts = arriving._in_turn({"a": 4 << 20, "b": 4 << 20, "c": 100, "d": 40 << 20})
    assert [name for name, _, _ in parts[:4]] == ["a", "b", "c", "d"]
    at = [start / {"a": 4 << 20, "b": 4 << 20, "c": 100, "d": 40 << 20}[name] for name, start, _ in parts]
    assert at == sorted(at)
    for name, size in {"a": 4 << 20, "b": 4 << 20, "c": 100, "d": 40 << 20}.items():
        own = sorted((start, length) for one, start, length in parts if one == name)
        assert own[0][0] == 0 and sum(length for _, length in own) == size
        assert all(a + b == c for (a, b), (c, _) in pairwise(own))


def test_bytes_that_were_changed_on_their_way_are_fetched_anew(remote: Elsewhere, tmp_path: Path) -> None:
    """And cost nobody else the object."""
    want = answer(Store(Folder(tmp_path / "remote"), chunk=CHUNK))
    times = [0]

    def change(name: str, start: int, data: bytes) -> bytes:
        if name.startswith("chunks/") and len(data) < 10_000 and start and not times[0]:
            times[0] += 1
            return data[:-1] + bytes([data[-1] ^ 1]) if data[-1] else data[:-70] + bytes([data[-70] ^ 1]) + data[-69:]
        return data

    remote.change = change
    names = {entry.name for entry in remote.names()}
    store = Store(LocalCopy(remote, tmp_path / "local"), chunk=CHUNK)
    assert np.array_equal(answer(store), want)
    assert times == [1] and {entry.name for entry in remote.names()} == names
    store.close()
    assert not left(tmp_path / "local")


def test_what_is_damaged_there_is_a_miss_and_goes(remote: Elsewhere, tmp_path: Path) -> None:
    path = next((tmp_path / "remote" / "objects").glob("chunks/*/*-64-64.kv"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    store = Store(LocalCopy(remote, tmp_path / "local"), chunk=CHUNK)
    restored = store.load([*TOKENS, 1], tiny("qwen3"))
    assert restored is not None and restored.usable < len(TOKENS) and store.counts["broken"] == 1 and not path.exists()
    store.close()
    assert not left(tmp_path / "local")


@pytest.mark.parametrize("error", [OSError(5, "the line is dead"), Missing("chunks/x")])
def test_a_source_that_ends_in_the_middle(remote: Elsewhere, tmp_path: Path, error: Exception) -> None:
    def before(name: str, start: int) -> None:
        if start:
            raise error

    remote.before = before
    store = Store(LocalCopy(remote, tmp_path / "local"), chunk=CHUNK)
    names = {entry.name for entry in remote.names()}
    assert store.load([*TOKENS, 1], tiny("qwen3")) is None
    assert {entry.name for entry in remote.names()} == names
    assert store.get(TOKENS[:1], tiny("qwen3"), tmp_path / "out.kv") is None
    store.close()
    assert not left(tmp_path / "local")


def test_headers_that_lie_are_refused_without_waiting(tmp_path: Path) -> None:
    for first, error in ((b"\xff" * 8, FormatError), ((1 << 30).to_bytes(8, "little"), FormatError), (bytes(8), FormatError)):
        coming = Coming(tmp_path / f"{first.hex()}", 1 << 20)
        coming.put(0, first)
        with pytest.raises(error):
            Arriving(coming)


def test_digests_are_compared_as_bytes_come(remote: Elsewhere, tmp_path: Path) -> None:
    name = next(entry.name for entry in remote.names("chunks/"))
    data = bytearray(remote.read(name))
    data[-200] ^= 1
    coming = Coming(tmp_path / "a", len(data))
    coming.put(0, bytes(data))
    last = max(Arriving(coming).tensors.values(), key=lambda info: info.offset)
    with pytest.raises(DigestError):
        Arriving(coming).array(last.name)


def test_more_files_than_a_process_may_have_open(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, before[1]))
    try:
        fetched = Fetching(lambda name, start, length: bytes(length), {f"{i}": 5000 for i in range(200)}, lambda name: tmp_path / name)
        fetched.wait()
        assert all(file.error is None for file in fetched.files.values())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
