"""The client of a service: addresses and tokens that are none, servers of another kind, and a store over the network."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

import urllib3

import kvtool
from kvtool.cli import run
from kvtool.service import tenants as tenants_file
from kvtool.service.tenants import made
from kvtool.store.resuming import resume
from kvtool.store.served import Served
from kvtool.store.store import Store
from tests.library import ids, tiny
from tests.service_running import service

ANA, ANAS = made("ana")
BOB, BOBS = made("bob", ["read", "operate"])
CHUNK = 64


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("service")
    tenants_file.write(folder / "tenants.json", [ANA, BOB])
    with service(folder / "store", "--tenants", str(folder / "tenants.json")) as found:
        yield found, folder


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://127.0.0.1:0", "http://u:secret@h"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"HOST\[:PORT\]") as caught:
        Served(address, "t")
    assert "secret" not in str(caught.value)


def test_a_service_out_of_reach_is_named_by_its_address() -> None:
    with pytest.raises(ConnectionError, match=r"^http://127\.0\.0\.1:1 cannot be reached"):
        list(Served("http://127.0.0.1:1", "t").names())


@pytest.mark.parametrize("token", ["kvt_secret\nx", "kvt_secr\u20ac", "kvt secret"])
def test_a_token_that_is_none_is_not_shown(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_text(token, encoding="utf-8")
    for name, value in (("KVTOOL_TOKEN", token), ("KVTOOL_TOKEN_FILE", str(tmp_path / "t"))):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match="visible ASCII") as caught:
            Served("http://127.0.0.1:1")
        assert "secr" not in str(caught.value)


def test_a_server_of_another_kind_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        data, status = b"<html>", 200

        def json(self) -> object:
            return json.loads(self.data)

    served, answer = Served("http://127.0.0.1:1", "t"), Answer()
    monkeypatch.setattr(served, "_ask", lambda *args, **more: answer)
    for data in (b"<html>", b"[]", b"{}", b'{"salt": 3}', b'{"salt": "00"}'):
        answer.data = data
        for ask in (lambda: served.name_key, lambda: list(served.names()), lambda: served.sizes(["a"])):
            with pytest.raises(OSError, match="is it a kvtool serve"):
                ask()
    for data in (
        b'{"objects": [{"name": "a"}], "next": null}',
        b'{"objects": [{"name": "a", "size": "x", "used": 1}], "next": null}',
        b'{"objects": [{"name": "a", "size": 1e999, "used": 1}], "next": null}',
        b'{"objects": 7, "next": null}',
        b'{"objects": [], "next": ""}',
        b'{"objects": [], "next": 3}',
        b'{"sizes": 3}',
        b'{"sizes": []}',
        b'{"sizes": ["1"]}',
        b'{"sizes": [true]}',
    ):
        answer.data = data
        for ask in (lambda: list(served.names()), lambda: served.sizes(["a"]), lambda: served.page("", "", 5)):
            with pytest.raises(OSError, match="is it a kvtool serve"):
                ask()
    answer.data = b"0123456789"  # a proxy that gives all where a range was asked for
    assert served.read("a", 2, 3) == b"234"


def test_a_client_of_the_store(running: tuple[Any, Path]) -> None:
    found, _ = running
    served = Served(found.address, ANAS)
    assert served.name_key == bytes.fromhex(ANA.salt)
    with pytest.raises(PermissionError, match="bearer token"):
        Served(found.address, "kvt_wrong").size("a")
    with pytest.raises(PermissionError, match="may not write"):
        Served(found.address, BOBS).write("a", b"x")
    for address in ("http://u:p@127.0.0.1:1", "http://127.0.0.1:1/?x=1", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="must be http"):
            Served(address)


def test_a_store_over_the_service(running: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients with folders of their own share one service; what one put the other goes on from."""
    found, _ = running
    model, tokens = tiny("qwen3"), ids(2 * CHUNK + 5)
    monkeypatch.setenv("KVTOOL_TOKEN", ANAS)
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "one"))
    with Store(found.address, chunk=CHUNK) as store:
        store.put(kvtool.capture(model, tokens), codec="raw")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "two"))
    with Store(found.address, chunk=CHUNK) as store:
        restored = store.load([*tokens, 1, 2], model)
        assert restored is not None and restored.usable == len(tokens)
        assert not store.check().problems
        store.remove(store.entries()[-1].id)


def test_look_ups_alone_are_counted(running: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Putting a prompt, and again, asks what is there too, but looks for nothing to read; nor do the copies that a load makes."""
    address = running[0].address
    monkeypatch.setenv("KVTOOL_TOKEN", ANAS)
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path))
    model, tokens = tiny("qwen3"), ids(3 * CHUNK + 5)

    def counted() -> tuple[int, int]:
        asked = urllib3.request("GET", f"{address}/v1/stats", headers={"Authorization": f"Bearer {ANAS}"}).json()
        return asked["hits"], asked["misses"]

    hits, misses = counted()
    with Store(address, chunk=CHUNK) as store:
        for _ in range(2):
            store.put(kvtool.capture(model, tokens), codec="affine-4")
        assert counted() == (hits, misses)
        (space,) = (space for space in store.known.spaces() if "affine-4" in space.codec)
        assert store.load([7, *tokens], model, space=space.key) is None
        assert counted() == (hits, misses + 1)
        assert store.load([*tokens, 1], model, space=space.key) is not None
        assert counted() == (hits + 1, misses + 1)
    figures = urllib3.request("GET", f"{address}/metrics", headers={"Authorization": f"Bearer {BOBS}"}).data.decode()
    assert f'kvtool_lookups_total{{found="yes"}} {hits + 1}.0' in figures


@pytest.mark.parametrize("codec", [None, "rvq-4"])
def test_a_service_out_of_reach_costs_a_prefill(codec: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its salt makes the names: without an answer the whole prompt failed."""
    monkeypatch.setenv("KVTOOL_TOKEN", "t")
    model = tiny("qwen3")
    with Store("http://127.0.0.1:1", chunk=CHUNK) as store:
        resumed = resume(store, ids(CHUNK + 9), model, codec=codec)
        assert (resumed.usable, resumed.ran, resumed.put) == (0, CHUNK + 8, None)
        assert all(cache.offset == CHUNK + 8 for cache in resumed.cache)
        assert any("out of reach" in note and "127.0.0.1:1" in note for note in resumed.notes)
        with pytest.raises(FileNotFoundError, match="none"):
            resume(store, ids(9), model, codec="tc-2", calibration="none.safetensors")


def test_a_token_that_is_refused_is_no_reason_to_go_on(running: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_TOKEN", "kvt_nobodys")
    with Store(running[0].address, chunk=CHUNK) as store, pytest.raises(PermissionError):
        resume(store, ids(9), tiny("qwen3"))


def test_a_token_that_is_refused_is_no_reason_to_begin(
    running: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lm-server` served without its store."""
    monkeypatch.setenv("KVTOOL_TOKEN", "kvt_nobodys")
    monkeypatch.setattr("kvtool.serving.serve", lambda *_, **__: pytest.fail("it began"))
    assert run(["lm-server", "--model", "tiny-a", "--store", running[0].address]) == 2
    assert "a known bearer token is needed" in capsys.readouterr().err


def test_a_file_that_is_no_object_breaks_no_listing(running: tuple[Any, Path]) -> None:
    found, folder = running
    place = folder / "store" / "objects" / ANA.folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "Not A Name").write_bytes(b"1")
    with Store(Served(found.address, ANAS)) as store:
        assert isinstance(store.entries(), list)
    (place / "Not A Name").unlink()
