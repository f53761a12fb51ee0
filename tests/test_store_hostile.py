"""Case 41 of the field reports against stores: what strangers may put into a folder, a bucket or a server, and what they may ask of it."""

import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3

import kvtool
from formats.container import open_container
from formats.errors import FormatError
from kvtool.store.described import read_short
from kvtool.store.folder import Folder
from kvtool.store.local_copy import LocalCopy
from kvtool.store.objects import Objects
from kvtool.store.store import Store
from tests import store_servers
from tests.container_cases import forge, split
from tests.library import ids, rewrite, tiny
from tests.test_store_objects import make

CHUNK = 8
TOKENS = ids(29)
LOSSY = "rvq-4,sink=2,recent=3"


class Evil:
    """Unpickling this makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(params=["folder", "s3", "redis"])
def objects(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    return make(request.param, request.getfixturevalue, tmp_path, monkeypatch)


def opened(objects: Objects, tmp_path: Path) -> Store:
    return Store(objects if isinstance(objects, Folder) else LocalCopy(objects, tmp_path / "copies", quota=1 << 20), chunk=CHUNK)


def huge_header(data: bytes, _: Path) -> bytes:
    return struct.pack("<Q", 1 << 60) + data[8:]


def pickled(_: bytes, marker: Path) -> bytes:
    return pickle.dumps(Evil(marker))


def bomb(data: bytes, _: Path) -> bytes:
    """The last tensor as a frame, under right digests, that expands to a gigabyte; the manifest says so or not."""
    outer, manifest, tail = split(data)
    name = list(outer)[-1]
    engine = zstandard.ZstdCompressor(level=3).compressobj(size=1 << 30)
    frame = b"".join(engine.compress(bytes(1 << 20)) for _ in range(1 << 10)) + engine.flush()
    stored = frame + bytes(-len(frame) % 64)
    begin = outer[name]["data_offsets"][0]
    outer[name] = {"dtype": "U8", "shape": [len(stored)], "data_offsets": [begin, begin + len(stored)]}
    manifest["tensors"][name] |= {"encoding": "zstd", "stored": len(frame), "blake3": blake3(stored).hexdigest()}
    return forge(data, outer, manifest, tail[:begin] + stored)


def random(_: bytes, __: Path) -> bytes:
    return blake3(b"x").digest(length=5000)


def cut(data: bytes, _: Path) -> bytes:
    return data[: len(data) // 2]


def of_other_tokens(data: bytes, _: Path) -> bytes:
    """A sound file under a name that is not its own."""
    manifest = split(data)[1]
    changed = [5] * len(manifest["tokens"]["ids"])
    manifest["tokens"] = {"ids": changed, "blake3": blake3(np.array(changed, "<i4").tobytes()).hexdigest()}
    return forge(data, manifest=manifest)


@pytest.mark.parametrize("attack", [huge_header, pickled, bomb, random, cut, of_other_tokens])
def test_case_41_a_hostile_object_is_as_good_as_absent(objects: Objects, tmp_path: Path, attack: Callable[[bytes, Path], bytes]) -> None:
    model, store, marker = tiny("qwen3"), opened(objects, tmp_path), tmp_path / "unpickled"
    store.put(kvtool.capture(model, TOKENS), codec=LOSSY)
    second = next(entry.name for entry in objects.names("chunks/") if "-8-8.kv" in entry.name)
    sound = objects.read(second)
    hostile = attack(sound, marker)
    objects.remove(second)
    objects.write(second, hostile)
    tracemalloc.start()
    restored = store.load(TOKENS, model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert restored is not None and restored.usable == CHUNK and "damaged" in " ".join(restored.notes)
    assert store.counts["broken"] == 1 and peak < 20_000_000 and not marker.exists()
    # It is gone, so that the next put makes the store whole.
    assert objects.size(second) is None
    store.put(kvtool.capture(model, TOKENS), codec=LOSSY)
    assert objects.read(second) == sound and not store.check().problems


@pytest.mark.parametrize("attack", [huge_header, pickled, bomb, random, cut, of_other_tokens])
def test_case_41_check_names_a_hostile_object(objects: Objects, tmp_path: Path, attack: Callable[[bytes, Path], bytes]) -> None:
    store, marker = opened(objects, tmp_path), tmp_path / "unpickled"
    store.put(kvtool.capture(tiny("qwen3"), TOKENS), codec=LOSSY)
    names = {entry.name for entry in objects.names()}
    second = next(name for name in names if "-8-8.kv" in name)
    data = attack(objects.read(second), marker)
    objects.remove(second)
    objects.write(second, data)
    assert [problem.name for problem in store.check().problems] == [second]
    assert {entry.name for entry in objects.names()} == names and not marker.exists()


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b'{"schema":', pickle.dumps([1]), bytes(3 << 20), b"null", b"\xff" * 50])
@pytest.mark.parametrize("kind", ["spaces/{}.json", "models/{}.json", "calibrations/{}.safetensors", "pins/{}", "else/{}"])
def test_case_41_hostile_descriptions(tmp_path: Path, kind: str, data: bytes) -> None:
    """Under any name, its right digest among them, next to a sound prompt that is found all the same."""
    model, objects = tiny("qwen3"), Folder(tmp_path / "store")
    store = opened(objects, tmp_path)
    store.put(kvtool.capture(model, TOKENS), codec=LOSSY)
    weights = next(entry.name for entry in objects.names("models/"))
    for name in (kind.format(blake3(data).hexdigest()), kind.format("0" * 64), weights if kind.startswith("models/") else kind.format("x")):
        objects.remove(name)
        objects.write(name, data)
    fresh = opened(objects, tmp_path)
    restored = fresh.load(TOKENS, model)
    assert restored is not None and restored.usable == len(TOKENS) - 1
    assert len(fresh.check().problems) >= 2 and fresh.entries() and fresh.stats()["bytes"] > 0
    fresh.gc()
    assert fresh.lookup(TOKENS, model) is not None


@pytest.mark.parametrize("data", [b"{", b"", b"x" * ((1 << 20) + 1)])
def test_a_damaged_space_is_written_anew_by_the_next_put(objects: Objects, tmp_path: Path, data: bytes) -> None:
    """It was there, so no put wrote it, and nothing under it was ever found again."""
    model = tiny("qwen3")
    snapshot = kvtool.capture(model, TOKENS)
    opened(objects, tmp_path / "one").put(snapshot, codec=LOSSY)
    (name,) = [entry.name for entry in objects.names("spaces/")]
    objects.remove(name)
    assert objects.write(name, data)
    store = opened(objects, tmp_path / "two")
    assert store.load(TOKENS, model) is None and [problem.name for problem in store.check().problems] == [name]
    store.put(snapshot, codec=LOSSY)
    found = opened(objects, tmp_path / "three").load(TOKENS, model)
    assert found is not None and found.usable == len(TOKENS) - 1 and not store.check().problems


def test_case_41_names_from_elsewhere(objects: Objects, tmp_path: Path) -> None:
    """What a listing gives is never a path: `../` and worse are passed over, and nothing outside the store is touched."""
    if isinstance(objects, Folder):
        pytest.skip("a folder's listing has no such names")
    model, store = tiny("qwen3"), opened(objects, tmp_path)
    store.put(kvtool.capture(model, TOKENS), codec=LOSSY)
    names = {entry.name for entry in objects.names()}
    for name in ("spaces/../../escape", "spaces/A b.json", "chunks/\N{SNOWMAN}", "tails/{x}", "pins/.hidden"):
        if hasattr(objects, "_client"):
            objects._client.hset(f"{{{objects._prefix}/{name}}}", mapping={"upload": "x", "size": 1, "part": 1, "used": "1"})
        else:
            obstore = pytest.importorskip("obstore")
            # The client would change what is not canonical.
            if ".." not in name:
                obstore.put(objects._store, f"objects/{name}", b"x")
    assert {entry.name for entry in objects.names()} == names
    assert store.load(TOKENS, model) is not None and not store.check().problems
    store.gc()
    assert {entry.name for entry in objects.names()} == names
    for act in (objects.read, objects.remove, objects.size, objects.touch, objects.path):
        with pytest.raises(ValueError, match="an object's name must be"):
            act("../escape")


@pytest.mark.parametrize(
    "fields",
    [
        {"size": "-1"},
        {"size": "1e9"},
        {"size": str(10**18), "part": "1"},
        {"part": "0"},
        {"part": "x"},
        {"used": "never"},
        {"used": "nan"},
        {"upload": "\xff}:x"},
    ],
)
def test_case_41_hostile_hashes_on_redis(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict
) -> None:
    objects = make("redis", request.getfixturevalue, tmp_path, monkeypatch)
    objects.write("a", b"sound")
    objects._client.hset(objects._key("a"), mapping=fields)
    listed = list(objects.names())
    assert len(listed) == (1 if "part" in fields or "upload" in fields or fields.get("size", "").isdigit() else 0)
    if "used" not in fields:
        with pytest.raises((OSError, KeyError)):
            objects.read("a")
    objects.close()


def test_case_41_nobody_clears_a_server_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader without the right to write gets prompts; what it may not do is refused by the server, and changes nothing."""
    if not store_servers.HAVE_REDIS:
        pytest.skip("redis-server or the package redis is not installed")
    module = pytest.importorskip("kvtool.store.valkey")
    model = tiny("qwen3")
    with store_servers.redis_server(tmp_path / "server", "--requirepass", "owner") as port:
        owner = module.Valkey(f"redis://:owner@127.0.0.1:{port}")
        opened(owner, tmp_path).put(kvtool.capture(model, TOKENS), codec=LOSSY)
        before = {entry.name for entry in owner.names()}
        owner._client.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["-@all", "+@read"])
        reader = module.Valkey(f"redis://reader:pw@127.0.0.1:{port}")
        store = opened(reader, tmp_path)
        restored = store.load(TOKENS, model)
        assert restored is not None and restored.usable == len(TOKENS) - 1
        for act in (
            lambda: store.remove(store.entries()[-1].id),
            lambda: store.put(kvtool.capture(model, ids(12)), codec=LOSSY),
            lambda: reader.remove(next(iter(before))),
        ):
            with pytest.raises(PermissionError, match="access refused"):
                act()
        stranger = module.Valkey(f"redis://127.0.0.1:{port}")
        with pytest.raises(PermissionError):
            opened(stranger, tmp_path).load(TOKENS, model)
        assert {entry.name for entry in owner.names()} == before
        for each in (owner, reader, stranger):
            each.close()


def test_case_41_a_description_is_not_read_further_than_one_can_be_long(tmp_path: Path) -> None:
    objects = Folder(tmp_path / "store")
    objects.write("a", bytes(2000))
    assert read_short(objects, "a", 2000) == bytes(2000)
    asked = []
    objects.read = lambda name, start=0, length=None: asked.append(length) or bytes(length)  # type: ignore[method-assign]
    with pytest.raises(FormatError, match="a: has more than 1048576 bytes"):
        read_short(objects, "a")
    assert asked == [(1 << 20) + 1]


def test_case_41_odd_files_in_a_folder(tmp_path: Path) -> None:
    """What is no object's name is left alone."""
    model, objects = tiny("qwen3"), Folder(tmp_path / "store")
    store = opened(objects, tmp_path)
    store.put(kvtool.capture(model, TOKENS), codec=LOSSY)
    odd = [tmp_path / "store" / "objects" / kind / "A b.json" for kind in ("spaces", "models", "calibrations", "pins", "else")]
    for path in odd:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}")
        os.utime(path, (1, 1))
    fresh = opened(objects, tmp_path)
    assert fresh.load(TOKENS, model) is not None and fresh.entries()
    fresh.gc()
    assert fresh.lookup(TOKENS, model) is not None and all(path.exists() for path in odd)
    assert len(fresh.check().problems) == len(odd)


def test_case_41_a_tensor_named_as_one_of_another_chunk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the whole, "c1.X" is the second chunk's X: no chunk's own may be called so, else it would stand for the other's."""
    model, objects = tiny("qwen3"), Folder(tmp_path / "store")
    store = opened(objects, tmp_path)
    store.put(kvtool.capture(model, TOKENS), codec=LOSSY)
    match = store.lookup(TOKENS, model)
    assert match is not None and len(match.nodes) > 1
    path = objects.path(match.nodes[0].name)
    assert path is not None
    with open_container(objects.path(match.nodes[1].name) or "") as second:
        name, info = next(iter(second.tensors.items()))
        planted = {f"c1.{name}": (info.dtype, np.zeros_like(second.array(name)))}
    os.replace(rewrite(path, tmp_path / "planted.kv", lambda manifest: None, planted), path)
    with caplog.at_level("WARNING"):
        assert opened(objects, tmp_path).load(TOKENS, model) is None
    assert f"tensor 'c1.{name}' has a name that is another part's" in caplog.text
