"""Stores that are not a plain folder: shared by machines, encrypted, out of reach; and files from strangers in them."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.errors import IncompatibleError
from kvtool.store.folder import Folder
from kvtool.store.key_files import make_key
from kvtool.store.local_copy import LocalCopy
from kvtool.store.objects import Objects
from kvtool.store.store import Store
from tests import store_servers
from tests.library import f64, ids, tiny
from tests.store_servers import Proxy
from tests.test_store_objects import KEY, make

CHUNK = 8
KINDS = ("s3", "redis", "redis-cluster", "encrypted-folder", "encrypted-s3")
LOSSY = "rvq-4,sink=2,recent=3"


@pytest.fixture(params=KINDS)
def shared(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    return make(request.param, request.getfixturevalue, tmp_path, monkeypatch)


def machine(shared: Objects, tmp_path: Path, name: str, **options) -> Store:
    """A store on a machine with local copies of its own."""
    return Store(LocalCopy(shared, tmp_path / name), chunk=CHUNK, **options)


def logits(store: Store, tokens: list[int]) -> tuple[int, np.ndarray]:
    model = tiny("qwen3")
    restored = store.load(tokens, model)
    assert restored is not None
    return restored.usable, f64(model.model(mx.array([restored.pending()]), cache=restored.cache)[:, -1])


def test_what_one_machine_puts_another_gets(shared: Objects, tmp_path: Path) -> None:
    """The same tokens are found, and the same logits come out, as from a folder."""
    model, tokens = tiny("qwen3"), ids(29)
    plain = Store(tmp_path / "plain", chunk=CHUNK)
    first, second = (machine(shared, tmp_path, name) for name in ("first", "second"))
    for store in (plain, first):
        store.put(kvtool.capture(model, tokens[:-2]), codec=LOSSY)
    for asked, usable in ((tokens, 27), ([*tokens[:20], 1, 2], 16), (tokens[:9], 8)):
        want = logits(plain, asked)
        assert want[0] == usable
        for store in (second, first):
            got = logits(store, asked)
            assert got[0] == usable and np.array_equal(got[1], want[1])
    # What is there is not written again, by nobody.
    assert second.put(kvtool.capture(model, tokens[:-2]), codec=LOSSY).new == 0
    report = second.check()
    assert not report.problems and not report.lost and report.unfinished == 0
    assert {entry.bytes for entry in second.entries()} == {entry.bytes for entry in first.entries()}
    for entry in first.entries():
        if entry.leaf:
            second.remove(entry.id)
    assert first.lookup(tokens, model) is None and first.load(tokens, model) is None


def test_a_quota_holds_over_what_machines_share(shared: Objects, tmp_path: Path) -> None:
    model = tiny("qwen3")
    first = machine(shared, tmp_path, "first")
    first.put(kvtool.capture(model, ids(40)), codec=LOSSY)
    taken = first.stats()["bytes"]
    second = machine(shared, tmp_path, "second", quota=int(1.3 * taken))
    second.put(kvtool.capture(model, [3, *ids(40)]), codec=LOSSY)
    # What encryption adds to the objects of the last second is counted a second later.
    assert second.stats()["bytes"] <= 1.3 * taken + 1000 and second.room.evicted > 0
    match = second.lookup([3, *ids(40)], model)
    assert match is not None and match.usable == 40


def hexes(objects: Objects) -> set[str]:
    """Hashes in the names of chunks, ends and spaces."""
    return {found for entry in objects.names() if not entry.name.startswith("models/") for found in re.findall("[0-9a-f]{16,}", entry.name)}


def test_names_of_encrypted_objects_need_the_key(tmp_path: Path) -> None:
    sealed = pytest.importorskip("kvtool.store.sealed", reason="cryptography is not installed")
    model, tokens = tiny("qwen3"), ids(29)
    found = []
    for key in (None, KEY, KEY, bytes(32)):
        folder = Folder(tmp_path / str(len(found)))
        store = Store(folder if key is None else LocalCopy(sealed.Sealed(folder, key), None), chunk=CHUNK)
        store.put(kvtool.capture(model, tokens), codec=LOSSY)
        found.append(hexes(folder))
        store.close()
    assert found[1] == found[2] and len({len(one) for one in found}) == 1
    assert not found[0] & found[1] and not found[1] & found[3] and not found[0] & found[3]


def test_another_key_or_none_is_an_error_and_not_a_miss(tmp_path: Path) -> None:
    sealed = pytest.importorskip("kvtool.store.sealed", reason="cryptography is not installed")
    model, folder = tiny("qwen3"), Folder(tmp_path / "store")
    snapshot = kvtool.capture(model, ids(20))
    Store(LocalCopy(sealed.Sealed(folder, KEY), None), chunk=CHUNK).put(snapshot, codec=LOSSY)
    before = {entry.name for entry in folder.names()}
    for store, what in ((Store(LocalCopy(sealed.Sealed(folder, bytes(32)), None)), "with key"), (Store(folder), "the store is encrypted")):
        for act in (lambda store=store: store.load(ids(20), model), lambda store=store: store.put(snapshot, codec=LOSSY), store.check):
            with pytest.raises(IncompatibleError, match=what):
                act()
    assert {entry.name for entry in folder.names()} == before


@pytest.mark.parametrize("kind", ["s3", "redis"])
def test_a_store_out_of_reach_finds_nothing_and_takes_nothing(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("qwen3")
    with Proxy(request.getfixturevalue(f"{kind}_port")) as proxy:
        store = machine(make(kind, lambda _: proxy.port, tmp_path, monkeypatch), tmp_path, "here")
        store.put(kvtool.capture(model, ids(20)), codec=LOSSY)
        assert store.lookup(ids(20), model) is not None
    with caplog.at_level(logging.WARNING):
        assert store.lookup(ids(20), model) is None and store.load(ids(20), model) is None
    assert "nothing is found" in caplog.text
    with pytest.raises(OSError, match=f"127.0.0.1:{proxy.port}"):
        store.put(kvtool.capture(model, ids(30)), codec=LOSSY)


@pytest.mark.parametrize("kind", ["s3", "encrypted-redis"])
def test_the_command_line_on_two_machines(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Two processes that share nothing but a server: the second runs only what the first did not."""
    if kind == "s3":
        where = f"s3://{store_servers.BUCKET}/two-machines"
        shared = {**store_servers.S3_ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{request.getfixturevalue('s3_port')}"}
    else:
        pytest.importorskip("cryptography")
        where = f"valkey://127.0.0.1:{request.getfixturevalue('redis_port')}?prefix=two-machines"
        shared = {"KVTOOL_STORE_KEY": str(tmp_path / "key")}
        make_key(shared["KVTOOL_STORE_KEY"])
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The committee met on the second day of the month and heard the report of its treasurer. " * 8)
    words = ("--store", where, "--model", "tiny-a", "--prompt-file", str(prompt), "--json")
    put = run(tmp_path, "one", shared, "export", *words)
    assert put["new"] > 0
    got = run(tmp_path, "two", shared, "import", *words, "--max-tokens", "4", "--no-put")
    assert got["usable_tokens"] == put["tokens"] - 1
    assert [*(tmp_path / "two" / "copies").glob("*/objects/tails/**/*.kv")] if kind == "s3" else not (tmp_path / "two" / "copies").exists()


def run(tmp_path: Path, name: str, environment: dict[str, str], *words: str) -> dict:
    """One command on a machine with a cache folder of its own."""
    own = {**os.environ, **environment, "KVTOOL_CACHE": str(tmp_path / name)}
    done = subprocess.run([sys.executable, "-m", "kvtool", *words], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_copy_that_the_disk_has_changed_is_fetched_anew(tmp_path: Path, redis_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged here alone costs nobody else anything."""
    shared = make("redis", lambda _: redis_port, tmp_path, monkeypatch)
    model, tokens, store = tiny("qwen3"), ids(29), machine(shared, tmp_path, "here")
    store.put(kvtool.capture(model, tokens), codec=LOSSY)
    want = logits(store, tokens)
    store.objects.settle()
    copies = sorted((tmp_path / "here").rglob("*.kv"))
    assert len(copies) == 4
    for path in copies[:2]:
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    got = logits(store, tokens)
    assert got[0] == want[0] and np.array_equal(got[1], want[1])
    assert store.counts["broken"] == 0 and len(list(shared.names("chunks/"))) == 3
    # A check is of what is shared, not of the copies.
    copies[0].write_bytes(b"x")
    assert not store.check().problems


def test_copies_of_a_prompt_come_together(tmp_path: Path, redis_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = make("redis", lambda _: redis_port, tmp_path, monkeypatch)
    model, tokens = tiny("qwen3"), ids(60)
    machine(shared, tmp_path, "one").put(kvtool.capture(model, tokens), codec=LOSSY)
    names = [entry.name for entry in shared.names() if entry.name.endswith(".kv")]
    copied = LocalCopy(shared, tmp_path / "two")
    fetched = copied.fetching([*names, "chunks/gone"])
    assert fetched is not None
    copied.keep(fetched)
    copied.settle()
    monkeypatch.setattr(shared, "read", lambda *_: pytest.fail("it is here"))
    assert all(copied.path(name) is not None for name in names) and copied.local.unfinished() == 0
    monkeypatch.undo()
    # Where they would push one another out, none is fetched before it is used.
    small = LocalCopy(shared, tmp_path / "three", quota=sum(shared.sizes(names)))
    assert small.fetching(names) is None
    assert not list(small.local.names())
    assert logits(Store(small, chunk=CHUNK), tokens)[0] == 59
