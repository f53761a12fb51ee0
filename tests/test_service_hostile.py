"""What a tenant with bad intentions may put under its own names: none of it ends the service, its housekeeping, or what others have."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

pytest.importorskip("fastapi", reason="the extra serve is not installed")
from fastapi.testclient import TestClient

import kvtool
from kvtool.service.app import make_app
from kvtool.service.keeping import Keeping
from kvtool.service.settings import Limits
from kvtool.service.state import State
from kvtool.service.tenants import Tenants, made
from kvtool.store.catalogue import Catalogue
from kvtool.store.folder import Folder
from kvtool.store.store import Store
from tests.library import ids, tiny

EVE, EVES = made("eve")
BOB, BOBS = made("bob")
CHUNK = 64
SALT = bytes.fromhex(EVE.salt)
SOUND = {
    "schema": 1,
    "algorithm": "blake3",
    "model": {"architecture": "x", "weights": "1" * 64, "tokenizer": "2" * 64, "dtype": "float32"},
    "layers": "3" * 64,
    "codec": {"k": "rvq-4", "v": "rvq-4", "sink": 0, "frame": {"k": "pre", "v": "post"}},
    "calibration": None,
    "chunk": 64,
}


@pytest.fixture
def state(tmp_path: Path) -> State:
    limits = Limits(object_bytes=10 << 20, json_bytes=100_000, idle_seconds=5.0, spaces=20)
    return State(Folder(tmp_path / "store"), Tenants([EVE, BOB]), limits, quota=20_000_000)


@pytest.fixture
def client(state: State) -> Iterator[TestClient]:
    with TestClient(make_app(state), raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {EVES}"
        yield client


def everything(client: TestClient, state: State) -> None:
    """All that is asked about a tenant's objects; nothing is the service's fault, and bob's prompt is there afterwards."""
    bob, model = Store(state.partition(BOB), chunk=CHUNK), tiny("qwen3")
    bob.put(kvtool.capture(model, ids(CHUNK + 3)), codec="raw")
    start = time.monotonic()
    asked = [
        client.get("/v1/entries", params={"chunks": True}),
        client.get("/v1/entries"),
        client.get("/v1/stats"),
        client.post("/v1/lookup", json={"tokens": list(range(200))}),
        client.post("/v1/explain", json={"weights": "1" * 64}),
        client.get("/v1/objects"),
    ]
    assert [answer.status_code for answer in asked] == [200] * len(asked), [answer.text[:300] for answer in asked]
    keeping = Keeping(state)
    keeping.round()
    for tenant in (EVE, BOB):
        keeping._keep(tenant)
    # One that needs room for much of the quota goes through all of it.
    assert client.put("/v1/objects/fill", content=bytes(9 << 20)).status_code in (201, 507)
    assert client.put("/v1/objects/fill-2", content=bytes(9 << 20)).status_code in (201, 507)
    assert time.monotonic() - start < 60
    assert bob.lookup([*ids(CHUNK + 3), 1], model) is not None and not bob.check().problems


def put_space(client: TestClient, about: Any) -> str:
    data = about if isinstance(about, bytes) else json.dumps(about).encode()
    key = blake3(data, key=SALT).hexdigest()
    assert client.put(f"/v1/objects/spaces/{key}.json", content=data).status_code == 201
    return key


@pytest.mark.parametrize(
    "change",
    [
        {"model": 5},
        {"model": []},
        {"model": {}},
        {"model": {"weights": 7}},
        {"model": {**SOUND["model"], "weights": "../../x"}},
        {"model": {**SOUND["model"], "dtype": {}}},
        {"model": {**SOUND["model"], "more": [1]}},
        {"layers": 7},
        {"layers": None},
        {"codec": []},
        {"codec": {}},
        {"codec": {**SOUND["codec"], "k": 3}},
        {"codec": {**SOUND["codec"], "k": "no-such-codec-9"}},
        {"codec": {**SOUND["codec"], "k": "rvq-4,v=raw"}},
        {"codec": {**SOUND["codec"], "sink": -1}},
        {"codec": {**SOUND["codec"], "sink": "x"}},
        {"codec": {**SOUND["codec"], "frame": 3}},
        {"calibration": {}},
        {"calibration": "../x"},
        {"chunk": 0},
        {"chunk": -64},
        {"chunk": "64"},
        {"chunk": 1e9},
        {"chunk": 10**30},
        {"chunk": True},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_spaces_that_lie(client: TestClient, state: State, change: dict[str, Any]) -> None:
    key = put_space(client, {**SOUND, **change})
    chunk = blake3(b"x").hexdigest()
    name = f"chunks/{chunk[:2]}/{chunk}-{key[:16]}-0-64.kv"
    assert client.put(f"/v1/objects/{name}", content=b"x" * 100).status_code == 201
    everything(client, state)


@pytest.mark.parametrize(
    "data", [b"[" * 90_000, b'{"a":' * 50_000, b"{}", b"\xff", b"", b'{"schema": 1e999}', b'{"a": 1, "a": 2}'], ids=range(7)
)
def test_spaces_that_are_no_json_of_ours(client: TestClient, state: State, data: bytes) -> None:
    put_space(client, data)
    everything(client, state)


@pytest.mark.parametrize(
    "data",
    [
        b'{"name": "x", "parameters": Infinity, "row": 1}',
        b'{"name": "x", "parameters": NaN, "row": 1}',
        b'{"name": "x", "parameters": 1' + b"0" * 4000 + b', "row": 1}',
        b'{"name": "x", "parameters": 1e308, "row": 1e308}',
        b'{"name": "x", "parameters": -5, "row": -5}',
        b'{"name": "\\ud800", "parameters": 1, "row": 1}',
        b'{"name": "' + b"n" * 900_000 + b'", "parameters": 1, "row": 1}',
        b'{"name": ["x"], "parameters": 1, "row": 1}',
        b"[" * 500_000,
    ],
    ids=range(9),
)
def test_models_that_lie(client: TestClient, state: State, data: bytes) -> None:
    key = put_space(client, SOUND)
    assert client.put(f"/v1/objects/models/{'1' * 64}.json", content=data).status_code == 201
    for i in range(3):
        chunk = blake3(bytes([i])).hexdigest()
        assert client.put(f"/v1/objects/chunks/{chunk[:2]}/{chunk}-{key[:16]}-0-64.kv", content=b"x" * 100).status_code == 201
    everything(client, state)
    listed = client.get("/v1/entries", params={"chunks": True})
    assert len(listed.content) < 100_000


def chunk_of(key: str, parent: str, start: int, tokens: int) -> str:
    return f"chunks/{key[:2]}/{key:0<64}-{parent:0<16.16}-{start}-{tokens}.kv"


def test_names_that_follow_one_another_in_a_circle(client: TestClient, state: State) -> None:
    a, b = "a" * 16, "b" * 16
    names = [
        chunk_of(a, b, 64, 64),
        chunk_of(b, a, 64, 64),
        chunk_of("c" * 16, "c" * 16, 64, 0),
        chunk_of("d" * 16, "e" * 16, 5, 0),
        chunk_of("e" * 16, "d" * 16, 5, 0),
        chunk_of("f" * 16, "f" * 16, 0, 0),
        f"tails/aa/{a:0<64}/128-5-2-{'1' * 32}.kv",
    ]
    for name in names:
        assert client.put(f"/v1/objects/{name}", content=b"x" * 100).status_code == 201
    everything(client, state)


def test_a_thousand_names_of_two_ids(client: TestClient, state: State) -> None:
    """Levels of chunks whose ids begin alike: each would follow all of the level before."""
    partition = state.partition(EVE)
    for level in range(12):
        for i in range(40):
            key = f"{level:016x}{i:048x}"
            partition.write(f"chunks/{i:02x}/{key}-{max(level - 1, 0):016x}-{64 * level}-64.kv", b"x")
    everything(client, state)
    catalogue = Catalogue(partition.names())
    assert sum(1 for _ in catalogue.going(time.time(), lambda *_: 1.0)) + len(catalogue.strangers()) <= 12 * 40 + 2


@pytest.mark.parametrize(
    "data",
    [
        (1 << 40).to_bytes(8, "little") + b"{}",
        (9 << 20).to_bytes(8, "little") + b"[" * (9 << 20),
        b'\x40\0\0\0\0\0\0\0{"__metadata__": {"kvtool": "{\\"quality\\": [{\\"k\\": NaN}]}"}}  ',
        b'\x40\0\0\0\0\0\0\0{"__metadata__": {"kvtool": "{\\"quality\\": [{\\"k\\":1e999}]}"}} ',
        b'\x42\0\0\0\0\0\0\0{"__metadata__":{"kvtool":"{\\"quality\\":[{\\"k\\":\\"\\\\ud800\\"}]}"}}  ',
        b"\x02\0\0\0\0\0\0\0[]",
        b"",
    ],
    ids=range(7),
)
def test_files_whose_headers_lie(client: TestClient, state: State, data: bytes) -> None:
    key = put_space(client, SOUND)
    for i in range(2):
        name = f"tails/{key[:2]}/{key}/0-{i + 1}-0-{i:032x}.kv"
        assert client.put(f"/v1/objects/{name}", content=data).status_code == 201
    everything(client, state)


def test_spaces_are_bounded(client: TestClient, state: State) -> None:
    answers = []
    for i in range(30):
        data = json.dumps({**SOUND, "layers": f"{i:064x}"}).encode()
        answers.append(client.put(f"/v1/objects/spaces/{blake3(data, key=SALT).hexdigest()}.json", content=data).status_code)
    assert answers == [201] * 20 + [507] * 10
    everything(client, state)


def test_a_pin_of_everything_is_ones_own_affair(client: TestClient, state: State) -> None:
    store = Store(state.partition(EVE), chunk=CHUNK)
    report = store.put(kvtool.capture(tiny("qwen3"), ids(CHUNK)), codec="raw")
    store.pin(report.id)
    client.put("/v1/objects/pins/" + "0" * 64, content=os.urandom(5000))
    everything(client, state)
    assert store.lookup([*ids(CHUNK), 1], tiny("qwen3")) is not None
