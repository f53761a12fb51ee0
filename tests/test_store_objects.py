"""The laws of `Objects`, of every back end: folder, S3, Google Cloud Storage, Azure, Redis, its cluster, a service, encryption, copies."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtool.store.folder import Folder
from kvtool.store.local_copy import LocalCopy
from kvtool.store.objects import Missing, Objects
from kvtool.store.served import Served
from tests import store_servers

KEY = bytes(range(32))
BACK_ENDS = (
    "folder",
    "s3",
    "google",
    "azure",
    "redis",
    "redis-cluster",
    "encrypted-folder",
    "encrypted-s3",
    "copied-redis",
    "served",
    "encrypted-served",
)
# Around the sizes at which parts and segments end.
SIZES = (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (8 << 20) + 1, 20_000_000)
BAD_NAMES = (
    "",
    "../up",
    "a/../b",
    "/etc/passwd",
    "a//b",
    "a/",
    ".hidden",
    "a/.hidden",
    "UPPER",
    "a b",
    "a\n",
    "é",
    "a\0",
    "x" * 241,
    "a?b",
    "{a}",
)


@pytest.fixture(params=BACK_ENDS)
def objects(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """An empty back end."""
    made = make(request.param, request.getfixturevalue, tmp_path, monkeypatch)
    yield made
    made.close()


def make(kind: str, fixture: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    if kind.startswith("encrypted-"):
        sealed = pytest.importorskip("kvtool.store.sealed")
        return sealed.Sealed(make(kind.removeprefix("encrypted-"), fixture, tmp_path, monkeypatch), KEY)
    if kind.startswith("copied-"):
        inner = make(kind.removeprefix("copied-"), fixture, tmp_path, monkeypatch)
        return LocalCopy(inner, tmp_path / "copies", check=lambda path: None)
    if kind == "folder":
        return Folder(tmp_path / "store")
    if kind == "served":
        return Served(*fixture("served")())
    # What one test writes another does not see.
    own = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
    if kind == "s3":
        port = fixture("s3_port")
        for name, value in (*store_servers.S3_ENVIRONMENT.items(), ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")):
            monkeypatch.setenv(name, value)
        buckets = pytest.importorskip("kvtool.store.buckets")
        return buckets.Buckets(f"s3://{store_servers.BUCKET}/{own}")
    if kind == "google":
        for name, value in fixture("google").environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        return pytest.importorskip("kvtool.store.buckets").Buckets(f"gs://{store_servers.BUCKET}/{own}")
    if kind == "azure":
        port = fixture("azure_port")
        endpoint = ("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{port}/{store_servers.AZURE_ACCOUNT}")
        for name, value in (*store_servers.AZURE_ENVIRONMENT.items(), endpoint):
            monkeypatch.setenv(name, value)
        return pytest.importorskip("kvtool.store.buckets").Buckets(f"az://{store_servers.BUCKET}/{own}")
    valkey = pytest.importorskip("kvtool.store.valkey")
    port = fixture("cluster_port" if kind == "redis-cluster" else "redis_port")
    return valkey.Valkey(f"redis://127.0.0.1:{port}/0?prefix={own}&cluster={int(kind == 'redis-cluster')}")


def content(size: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(seed.to_bytes(8, "big")).digest(size)


@pytest.mark.parametrize("size", SIZES)
def test_read_after_write(objects: Objects, size: int, tmp_path: Path) -> None:
    data = content(size)
    assert objects.write("a/whole", data)
    source = tmp_path / "source"
    source.write_bytes(data)
    assert objects.write("a/from-file", source)
    assert source.read_bytes() == data
    own = objects.scratch / "own"
    own.write_bytes(data)
    assert objects.write("a/from-scratch", own) and not own.exists()
    for name in ("a/whole", "a/from-file", "a/from-scratch"):
        assert objects.size(name) == size and objects.read(name) == data, name
        path = objects.path(name)
        assert path is None or path.read_bytes() == data


def test_ranges(objects: Objects) -> None:
    data = content(9 << 20)
    objects.write("ranges", data)
    edges = (0, 1, 100, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (8 << 20) - 1, 8 << 20, (9 << 20) - 1, 9 << 20, (9 << 20) + 5)
    for start in edges:
        for length in (None, 0, 1, 17, (1 << 20) + 3, 20 << 20):
            want = data[start:] if length is None else data[start : start + length]
            assert objects.read("ranges", start, length) == want, (start, length)
    objects.write("empty", b"")
    assert [objects.read("empty", s, n) for s in (0, 1) for n in (None, 0, 1)] == [b""] * 6


def test_a_name_is_never_overwritten(objects: Objects, tmp_path: Path) -> None:
    assert objects.write("once", b"first")
    assert not objects.write("once", b"second, and longer")
    own = objects.scratch / "own"
    own.write_bytes(b"third")
    assert not objects.write("once", own) and not own.exists()
    assert objects.read("once") == b"first" and objects.size("once") == 5


def test_missing(objects: Objects) -> None:
    objects.write("there", b"x")
    for name in ("not-there", "there/below", "ther"):
        assert objects.size(name) is None and objects.path(name) is None and objects.remove(name) is False
        for start, length in ((0, None), (0, 0), (5, 3)):
            with pytest.raises(Missing) as caught:
                objects.read(name, start, length)
            assert name in str(caught.value)
        objects.touch(name)
    assert [entry.name for entry in objects.names()] == ["there"]
    assert objects.sizes(["not-there", "there", "there/below"]) == [None, 1, None] and objects.sizes([]) == []


def test_names_remove_and_write_again(objects: Objects) -> None:
    before = time.time()
    wanted = {f"{kind}/{i:02x}/{i:04d}": i + 1 for kind in ("chunks", "chunk", "prompts") for i in range(12)}
    for name, size in wanted.items():
        objects.write(name, content(size))
    entries = list(objects.names())
    overhead = 80 if hasattr(objects, "inner") else 0
    assert {entry.name: entry.size - overhead for entry in entries} == wanted and len(entries) == len(wanted)
    # Servers know whole seconds.
    assert all(before - 2 < entry.used < time.time() + 2 for entry in entries)
    for prefix in ("chunk", "chunk/", "chunks/0", "chunks/03/", "prompts/0b/0011", "none"):
        assert {entry.name for entry in objects.names(prefix)} == {name for name in wanted if name.startswith(prefix)}, prefix
    assert objects.remove("chunk/00/0000") is True and objects.remove("chunk/00/0000") is False
    assert "chunk/00/0000" not in {entry.name for entry in objects.names()}
    assert objects.write("chunk/00/0000", b"anew") and objects.read("chunk/00/0000") == b"anew"


def test_touch_is_seen(objects: Objects) -> None:
    for name in ("old", "used", "also"):
        objects.write(name, b"x")
    time.sleep(1.1)
    objects.touch()
    objects.touch("used", "gone", "also")
    used = {entry.name: entry.used for entry in objects.names()}
    assert used["used"] >= used["old"] + 1 and used["also"] >= used["old"] + 1 and len(used) == 3


def test_now_is_by_the_clock_of_dates(objects: Objects, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.write("a", b"x")
    (entry,) = objects.names()
    if request.node.callspec.params["objects"] not in ("folder", "encrypted-folder", "google"):
        real = time.time  # of this process; the server's is another's
        monkeypatch.setattr("time.time", lambda: real() + 86400)
    # Servers know whole seconds.
    assert -1.5 < objects.now() - entry.used < 30
    assert [entry.name for entry in objects.names()] == ["a"] and objects.unfinished() == 0


@pytest.mark.parametrize("name", BAD_NAMES)
def test_odd_names(objects: Objects, name: str) -> None:
    for act in (
        lambda: objects.read(name),
        lambda: objects.write(name, b"x"),
        lambda: objects.size(name),
        lambda: objects.path(name),
        lambda: objects.remove(name),
        lambda: objects.touch(name),
    ):
        with pytest.raises(ValueError, match=r"\[store\] an object's name must be"):
            act()
    assert list(objects.names()) == []


def test_one_of_eight_threads_creates(objects: Objects) -> None:
    written: list[tuple[int, bool]] = []
    start = threading.Barrier(8)

    def write(i: int) -> None:
        start.wait()
        written.append((i, objects.write("raced", content(300_000, i))))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [i for i, won in written if won]
    assert len(written) == 8 and len(winners) == 1
    assert objects.read("raced") == content(300_000, winners[0])
    assert objects.unfinished() == 0


RACER = """
import hashlib, sys
from kvtool.store.addresses import open_objects
objects = open_objects(sys.argv[1], key_file=sys.argv[2] or None, local=sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
print([i for i in range(6) if objects.write(f"raced/{i}", hashlib.shake_128(int(sys.argv[4]).to_bytes(8, "big")).digest(100_000))])
"""


@pytest.mark.parametrize("kind", ["folder", "s3", "google", "redis", "redis-cluster", "encrypted-folder", "encrypted-s3"])
def test_one_of_four_processes_creates(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = make(kind, request.getfixturevalue, tmp_path, monkeypatch)
    inner = getattr(objects, "inner", objects)
    key = ""
    if inner is not objects:
        key = str(tmp_path / "key")
        with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(KEY)
    where = str(inner.root) if isinstance(inner, Folder) else inner.url
    if kind.startswith("redis"):
        where += f"?prefix={inner._prefix}&cluster={int(kind == 'redis-cluster')}"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, where, key, str(tmp_path / f"local{i}"), str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    found = [racer.communicate("go\n") for racer in racers]
    won = {i: [n for n, (out, _) in enumerate(found) if i in eval(out)] for i in range(6)}
    for i, winners in won.items():
        assert len(winners) == 1, won
        assert objects.read(f"raced/{i}") == content(100_000, winners[0])
    objects.close()


def test_files_on_their_way_are_counted(objects: Objects) -> None:
    assert objects.unfinished() == 0
    source = objects.scratch / "on-its-way"
    source.write_bytes(bytes(5000))
    # A service keeps to its own quota, of what it has got.
    assert objects.unfinished() == (0 if type(objects).__name__ == "Served" else 5000)
    objects.write("there", source)
    assert objects.unfinished() == 0 and objects.size("there") == 5000


def test_pages_in_order_of_names(objects: Objects) -> None:
    names = ["p/a-b", "p/a.b", "p/a/c", "p/b", "p/b0/x", "q"]
    for name in names:
        objects.write(name, name.encode())
    for prefix in ("", "p/", "p/a", "z"):
        got: list[str] = []
        while page := objects.page(prefix, got[-1] if got else "", 2):
            assert len(page) <= 2 and all(entry.size == len(entry.name) for entry in page if not objects.name_key)
            got += [entry.name for entry in page]
        assert got == [name for name in names if name.startswith(prefix)]
