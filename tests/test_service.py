"""The service: who may do what, bodies that lie, stall or are too large, nothing half-written, and prompts that are found."""

import asyncio
import errno
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

pytest.importorskip("fastapi", reason="the extra serve is not installed")
from fastapi.testclient import TestClient

import kvtool
from kvtool.cli import run
from kvtool.service import tenants as tenants_file
from kvtool.service.app import make_app
from kvtool.service.keeping import Keeping
from kvtool.service.settings import Limits
from kvtool.service.state import State
from kvtool.service.tenants import Tenant, Tenants, made
from kvtool.store.folder import Folder
from kvtool.store.store import Store
from tests.library import ids, renamed, tiny

ANA, ANAS = made("ana")
BOB, BOBS = made("bob", ["read", "operate"])
CHUNK = 64


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(
        Folder(tmp_path / "store"), Tenants([ANA, BOB]), Limits(object_bytes=100_000, json_bytes=10_000, tokens=5000, idle_seconds=0.5)
    )


@pytest.fixture
def client(state: State) -> Iterator[TestClient]:
    with TestClient(make_app(state), raise_server_exceptions=False) as client:
        client.headers.update(bearer(ANAS))
        yield client


def files(tmp_path: Path) -> list[Path]:
    """What is kept or on its way; grants are names alone."""
    found = (path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.suffix != ".lock")
    return [path for path in found if "grants" not in path.parts]


# --- who


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/tenant"),
        ("GET", "/v1/now"),
        ("GET", "/v1/objects"),
        ("GET", "/v1/objects/a"),
        ("HEAD", "/v1/objects/a"),
        ("PUT", "/v1/objects/a"),
        ("DELETE", "/v1/objects/a"),
        ("POST", "/v1/objects/sizes"),
        ("POST", "/v1/objects/used"),
        ("POST", "/v1/lookup"),
        ("POST", "/v1/explain"),
        ("GET", "/v1/entries"),
        ("GET", "/v1/stats"),
        ("GET", "/metrics"),
    ],
)
def test_nothing_without_a_token(client: TestClient, tmp_path: Path, method: str, path: str) -> None:
    for headers in ({}, bearer("kvt_wrong"), bearer(ANAS[:-1]), bearer(""), {"Authorization": f"Basic {ANAS}"}, {"Authorization": ANAS}):
        client.headers.pop("Authorization", None)
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", headers
    assert not files(tmp_path)


def test_rights(client: TestClient) -> None:
    assert client.put("/v1/objects/a", content=b"x").status_code == 201
    for method, path in (("PUT", "/v1/objects/b"), ("DELETE", "/v1/objects/a")):
        answer = client.request(method, path, headers=bearer(BOBS))
        assert answer.status_code == 403 and "may not write" in answer.json()["error"]["what"]
    refused = client.get("/metrics")
    assert refused.status_code == 403 and "kvtool tenants add NAME --file FILE --may operate" in refused.json()["error"]["hint"]
    assert client.get("/metrics", headers=bearer(BOBS)).status_code == 200


def test_one_tenant_sees_nothing_of_another(client: TestClient, state: State) -> None:
    cat, cats = made("cat")
    state.tenants = Tenants([ANA, cat])
    client.put("/v1/objects/chunks/a", content=b"mine")
    theirs = bearer(cats)
    for method in ("GET", "HEAD", "DELETE"):
        assert client.request(method, "/v1/objects/chunks/a", headers=theirs).status_code == 404
    assert client.get("/v1/objects", headers=theirs).json() == {"objects": [], "next": None}
    assert client.post("/v1/objects/sizes", json={"names": ["chunks/a"]}, headers=theirs).json() == {"sizes": [None]}
    assert client.put("/v1/objects/chunks/a", content=b"theirs", headers=theirs).status_code == 201
    assert client.get("/v1/objects/chunks/a").content == b"mine"
    # Not by way of the folder that a tenant's objects lie in either.
    for name in (f"{ANA.folder}/chunks/a", f"../{ANA.folder.split('/')[1]}/chunks/a"):
        assert client.get(f"/v1/objects/{name}", headers=theirs).status_code in (404, 422)
    assert client.get("/v1/tenant").json()["salt"] != client.get("/v1/tenant", headers=theirs).json()["salt"]


def test_an_unreadable_file_of_tenants_lets_nobody_in_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tenants.json"
    tenants_file.write(file, [ANA])
    state = State(Folder(tmp_path / "store"), Tenants(file=file), Limits())
    keeping, kept = Keeping(state), []
    monkeypatch.setattr(keeping, "_keep", kept.append)
    with TestClient(make_app(state), raise_server_exceptions=False) as client:
        for body in ("{", None):
            file.unlink() if body is None else file.write_text(body)
            answer = client.get("/v1/tenant", headers=bearer(ANAS))
            assert answer.status_code == 503 and str(tmp_path) not in answer.text and "hint" in answer.text
            keeping.round()
        assert kept == []
        tenants_file.write(file, [ANA])
        assert client.get("/v1/tenant", headers=bearer(ANAS)).status_code == 200
    keeping.round()
    assert kept == [ANA]


def test_one_tenants_uploads_are_not_seen_or_paid_by_another(state: State, client: TestClient) -> None:
    assert client.put("/v1/objects/chunks/a", content=b"x" * 1000).status_code == 201
    before = client.get("/v1/stats").json()["bytes"]
    (state.partition(BOB).scratch / "upload.part").write_bytes(b"y" * 50_000)
    assert client.get("/v1/stats").json()["bytes"] == before == 1000
    model = tiny("qwen3")
    store = Store(state.partition(ANA), chunk=CHUNK)
    store.put(kvtool.capture(model, ids(2 * CHUNK, 1)), codec="raw")
    names = {entry.name for entry in store.objects.names()}
    state.quota = store.stats()["bytes"] + 1000
    Keeping(state).round()
    assert {entry.name for entry in store.objects.names()} == names


def test_an_upload_of_a_tenant_that_is_removed_meanwhile_is_dropped(client: TestClient, state: State, tmp_path: Path) -> None:
    def body() -> Iterator[bytes]:
        yield b"x" * 1000
        state.tenants = Tenants([BOB])
        yield b"y" * 1000

    assert client.put("/v1/objects/late", content=body()).status_code == 401
    assert not files(tmp_path) and state.objects.unfinished() == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--host", "0.0.0.0"], "give --tenants FILE"),
        (["--host", "0.0.0.0", "--no-tokens"], "give --tenants FILE"),
        (["--host", "example.org", "--no-tokens"], "give --tenants FILE"),
        (["--tls-cert", __file__], "go together"),
    ],
)
def test_open_doors_are_refused(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *args]) == 2
    assert said in capsys.readouterr().err


# --- objects


def test_objects(client: TestClient) -> None:
    data = bytes(range(256)) * 300
    assert client.put("/v1/objects/a/b", content=data, headers={"X-Content-Blake3": blake3(data).hexdigest()}).status_code == 201
    assert client.put("/v1/objects/a/b", content=b"other").json() == {"made": False}
    head, whole = client.head("/v1/objects/a/b"), client.get("/v1/objects/a/b")
    assert whole.content == data and head.headers["content-length"] == whole.headers["content-length"] == str(len(data))
    assert client.get("/v1/objects/a/b", headers={"If-None-Match": whole.headers["etag"]}).status_code == 304
    listed = client.get("/v1/objects", params={"prefix": "a/"}).json()["objects"]
    assert [(one["name"], one["size"]) for one in listed] == [("a/b", len(data))]
    assert client.delete("/v1/objects/a/b").status_code == 204 and client.get("/v1/objects/a/b").status_code == 404


@pytest.mark.parametrize(
    ("header", "status", "part"),
    [
        ("bytes=0-0", 206, slice(0, 1)),
        ("bytes=5-", 206, slice(5, None)),
        ("bytes=-7", 206, slice(-7, None)),
        ("bytes=990-5000", 206, slice(990, None)),
        ("bytes=-5000", 206, slice(0, None)),
        ("bytes=1000-", 416, slice(0)),
        ("bytes=-0", 416, slice(0)),
        # Of a form that is not known the whole is the right answer.
        ("bytes=7-5", 200, slice(0, None)),
        ("bytes=1-2,4-5", 200, slice(0, None)),
        ("lines=1-2", 200, slice(0, None)),
        ("bytes=-", 200, slice(0, None)),
        ("bytes=5-" + "9" * 1000, 206, slice(5, None)),
        ("bytes=5-" + "9" * 5000, 200, slice(0, None)),
    ],
)
def test_ranges(client: TestClient, header: str, status: int, part: slice) -> None:
    data = os.urandom(1000)
    client.put("/v1/objects/a", content=data)
    answer = client.get("/v1/objects/a", headers={"Range": header})
    assert answer.status_code == status
    if status == 416:
        assert answer.headers["content-range"] == "bytes */1000"
        return
    assert answer.content == data[part] and answer.headers["content-length"] == str(len(data[part]))
    if status == 206:
        start = range(1000)[part].start
        assert answer.headers["content-range"] == f"bytes {start}-{start + len(data[part]) - 1}/1000"


@pytest.mark.parametrize("name", ["%2e%2e/x", "a/%2e%2e/b", "A", "a%20b", "a%00", "a//b", "a/", ".a", "a" * 200, "%2Fetc%2Fpasswd", "a\\b"])
def test_odd_names(client: TestClient, tmp_path: Path, name: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = client.request(method, f"/v1/objects/{name}", content=b"x")
        assert answer.status_code in (404, 405, 422) and "error" in answer.json(), (method, answer.status_code)
    assert client.post("/v1/objects/sizes", json={"names": ["../x"]}).status_code == 422
    assert not files(tmp_path)


def test_a_name_is_not_both_an_object_and_a_folder(client: TestClient, tmp_path: Path) -> None:
    assert client.put("/v1/objects/chunks/a", content=b"1").status_code == 201
    for method in ("HEAD", "GET", "DELETE"):
        assert client.request(method, "/v1/objects/chunks").status_code == 404
    assert client.post("/v1/objects/sizes", json={"names": ["chunks"]}).json() == {"sizes": [None]}
    for name in ("chunks", "chunks/a/b"):
        answer = client.put(f"/v1/objects/{name}", content=b"2")
        assert answer.status_code == 409 and "cannot both be objects" in answer.text
    assert client.get("/v1/objects/chunks/a").content == b"1" and len(files(tmp_path)) == 1


def test_listing_in_pages(client: TestClient, state: State) -> None:
    for i in range(7):
        state.partition(ANA).write(f"p/{i}", b"x" * i)
    names, after = [], ""
    while after is not None:
        page = client.get("/v1/objects", params={"limit": 3, "after": after, "prefix": "p"}).json()
        names += [one["name"] for one in page["objects"]]
        after = page["next"]
    assert names == [f"p/{i}" for i in range(7)]


# --- bodies


def test_bodies_that_are_not_what_they_say(client: TestClient, tmp_path: Path) -> None:
    answer = client.put("/v1/objects/a", content=b"x", headers={"X-Content-Blake3": "0" * 64})
    assert answer.status_code == 400 and "announced" in answer.json()["error"]["what"]
    assert client.put("/v1/objects/a", content=b"x", headers={"X-Content-Blake3": "no"}).status_code == 422
    assert client.put("/v1/objects/a", content=b"x" * 100_001).status_code == 413
    assert client.put("/v1/objects/a", content=iter([b"x" * 60_000] * 2)).status_code == 413
    assert not files(tmp_path)
    assert client.put("/v1/objects/a", content=iter([b"x" * 50_000] * 2)).status_code == 201


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/lookup", b'{"tokens": [' + b"1," * 10_000 + b"1]}", 413),
        ("/v1/lookup", b'{"tokens": [' + b"1," * 4000, 422),
        ("/v1/lookup", json.dumps({"tokens": [1] * 3000}).encode()[:-1] + b"}", 200),
        ("/v1/lookup", b'{"tokens": [-1]}', 422),
        ("/v1/lookup", b'{"tokens": [4294967296]}', 422),
        ("/v1/lookup", b'{"tokens": [1.5]}', 422),
        ("/v1/lookup", b'{"tokens": "12"}', 422),
        ("/v1/lookup", b'{"tokens": ["1"]}', 422),
        ("/v1/lookup", b'{"tokens": [true]}', 422),
        ("/v1/lookup", b'{"tokens": [1], "models": {}}', 422),
        ("/v1/lookup", b'{"tokens": [1], "model": {"weight": "x"}}', 422),
        ("/v1/lookup", b"\xff\xfe", 422),
        ("/v1/lookup", b"", 422),
        ("/v1/explain", b'{"weights": "../x"}', 422),
        ("/v1/objects/sizes", b'{"names": [[[[[[[[]]]]]]]]}', 422),
        ("/v1/objects/used", b'{"names": ["a"]}', 204),
    ],
)
def test_json_bodies(client: TestClient, path: str, body: bytes, status: int) -> None:
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert status in (200, 204) or answer.json()["error"]["what"]


def test_a_body_that_is_not_said_to_be_json(client: TestClient) -> None:
    """As curl sends it unless told otherwise: the answer says what to send."""
    form = client.post("/v1/lookup", content=b'{"tokens": [1]}', headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert form.status_code == 422 and "Content-Type: application/json" in form.json()["error"]["hint"]
    assert client.post("/v1/lookup", content=b"[]", headers={"Content-Type": "application/json"}).json()["error"]["hint"] is None


def test_bodies_without_announced_length_are_bounded(client: TestClient) -> None:
    answer = client.post("/v1/lookup", content=iter([b"[" * 5000] * 3), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_full_and_a_failing_disk(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, status in ((errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 503)):

        def fail(fd: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code), "/secret/place")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            answer = client.put("/v1/objects/a", content=b"x")
        assert answer.status_code == status and "secret" not in answer.text
        assert not files(tmp_path)
    assert client.put("/v1/objects/a", content=b"x").status_code == 201


# --- sides that stop


def test_who_takes_nothing_is_let_go(tmp_path: Path) -> None:
    """A reader that stops, and a body that stops: neither holds the service for ever."""
    app = make_app(state := State(Folder(tmp_path / "store"), None, Limits(idle_seconds=0.2)))
    state.partition(state.anyone).write("a", bytes(4 << 20))

    async def talk(method: str, path: str, body: bytes, deaf: bool) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        parts = iter([{"type": "http.request", "body": body, "more_body": method == "POST"}])

        async def receive() -> dict[str, Any]:
            return next(parts, None) or await asyncio.sleep(60)  # type: ignore[return-value]

        async def send(message: dict[str, Any]) -> None:
            said.append(message)
            if deaf and message["type"] == "http.response.body":
                await asyncio.sleep(60)

        scope = {"type": "http", "method": method, "path": path, "raw_path": b"", "query_string": b"", "headers": [(b"host", b"localhost")]}
        whole = {**scope, "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("x", 1), "root_path": ""}
        async with asyncio.timeout(20):
            await app(whole, receive, send)
        return said

    said = asyncio.run(talk("GET", "/v1/objects/a", b"", True))
    assert said[0]["status"] == 200 and len(said) == 2
    assert asyncio.run(talk("POST", "/v1/lookup", b"{", False))[0]["status"] == 408


def test_an_object_that_goes_while_it_is_read_breaks_the_answer_off(
    client: TestClient, state: State, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.put("/v1/objects/a", content=bytes(50))
    monkeypatch.setattr(type(state.objects), "size", lambda self, name: 100)
    with caplog.at_level(logging.ERROR, "kvtool.service"):
        assert client.get("/v1/objects/a").content == bytes(50)
    assert "broke off" in caplog.text and "Traceback" not in caplog.text


# --- prompts


def test_an_object_that_goes_before_it_is_read_is_absent(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.put("/v1/objects/a", content=b"x" * 1000)
    path = Folder.path
    monkeypatch.setattr(Folder, "path", lambda self, name: path(self, name) if not self.remove(name) else None)
    assert client.get("/v1/objects/a").status_code == 404


def test_prompts_by_their_tokens(client: TestClient, state: State) -> None:
    model, tokens = tiny("qwen3"), ids(3 * CHUNK)
    store = Store(state.partition(ANA), chunk=CHUNK)
    put = store.put(kvtool.capture(model, tokens), codec="rvq-4,sink=2,recent=8")
    found = client.post("/v1/lookup", json={"tokens": tokens}).json()["found"]
    assert [one["tokens"] for one in found] == [len(tokens)] and found[0]["codec"] == "rvq-4,sink=2"
    data = b"".join(client.get(f"/v1/objects/{one['name']}").content for one in found[0]["objects"])
    assert len(data) == sum(one["size"] for one in found[0]["objects"])
    shorter = client.post("/v1/lookup", json={"tokens": [*tokens[: 2 * CHUNK], 1, 2]}).json()["found"]
    assert [one["tokens"] for one in shorter] == [2 * CHUNK]
    assert client.post("/v1/lookup", json={"tokens": tokens[::-1]}).json() == {"found": []}
    (space,) = store.known.spaces()
    assert found[0]["recode"] is None
    for layers, recode in ((space.about["layers"], False), ("0" * 64, True)):
        asked = {"tokens": tokens, "model": {"weights": space.about["model"]["weights"], "layers": layers}}
        assert [one["recode"] for one in client.post("/v1/lookup", json=asked).json()["found"]] == [recode]
    other = {"tokens": tokens, "model": {"weights": "0" * 64}}
    assert client.post("/v1/lookup", json=other).json() == {"found": []}
    assert client.post("/v1/lookup", json={"tokens": tokens}, headers=bearer(BOBS)).json() == {"found": []}

    entries = client.get("/v1/entries", params={"chunks": True}).json()
    assert entries["total"] == put.chunks + 1 and entries["entries"][0]["quality"][-1]["k_relative_error"] > 0
    assert client.get("/v1/entries", params={"q": "no such"}).json() == {"entries": [], "total": 0}
    about = client.get("/v1/stats").json()
    assert about["bytes"] == sum(e.size for e in state.partition(ANA).names()) and (about["hits"], about["misses"]) == (4, 2)
    assert sum(about["models"].values()) == sum(one["bytes"] for one in entries["entries"])


def test_explain_names_what_differs(client: TestClient, state: State) -> None:
    model = tiny("qwen3")
    Store(state.partition(ANA), chunk=CHUNK).put(kvtool.capture(model, ids(CHUNK)), codec="raw")
    (space,) = Store(state.partition(ANA)).known.spaces()
    mine = {**space.about["model"], "layers": space.about["layers"]}
    for change, verdict in (
        ({}, "identical"),
        ({"dtype": "float16"}, "dtype"),
        ({"layers": "1" * 64}, "recode"),
        ({"weights": "1" * 64}, "other"),
        ({"tokenizer": "1" * 64, "layers": "1" * 64}, "other"),
        ({"adapter": "1" * 64}, "other"),
        ({"config": "1" * 64}, "other"),
    ):
        (fit,) = client.post("/v1/explain", json={**mine, **change}).json()["spaces"]
        assert fit["verdict"] == verdict and {one["field"] for one in fit["differences"]} == set(change)
    # Weights alone are those of a model without an adapter.
    adapted = renamed(model, adapter="2" * 64)
    snapshot = replace(kvtool.capture(model, ids(CHUNK)), model=adapted.info)
    Store(state.partition(ANA), chunk=CHUNK).put(snapshot, codec="raw")
    asked = {"tokens": ids(CHUNK), "model": {"weights": mine["weights"]}}
    assert len(client.post("/v1/lookup", json=asked).json()["found"]) == 1
    asked["model"]["adapter"] = "2" * 64
    assert len(client.post("/v1/lookup", json=asked).json()["found"]) == 1
    assert len(client.post("/v1/lookup", json={"tokens": ids(CHUNK)}).json()["found"]) == 2


# --- figures and logs


def test_figures_and_logs(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtool.service"):
        client.put("/v1/objects/a", content=b"xyz")
        client.get("/v1/objects/a")
        client.get("/nowhere/at/all")
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "kvtool.service"]
    assert [(line["method"], line["status"], line["tenant"]) for line in lines] == [
        ("PUT", 201, "ana"),
        ("GET", 200, "ana"),
        ("GET", 404, None),
    ]
    assert lines[1]["bytes"] == 3 and ANAS not in caplog.text and ANA.salt not in caplog.text
    text = client.get("/metrics", headers=bearer(BOBS)).text
    for figure in (
        'kvtool_requests_total{method="PUT",route="/v1/objects/{name:path}",status="201"} 1.0',
        'kvtool_requests_total{method="other",route="none",status="404"} 1.0',
        "kvtool_received_bytes_total 3.0",
        "kvtool_sent_bytes_total 3.0",
    ):
        assert figure in text, figure


def test_keeping_house_within_a_quota(state: State) -> None:
    model = tiny("qwen3")
    store = Store(state.partition(ANA), chunk=CHUNK)
    for seed in range(4):
        store.put(kvtool.capture(model, ids(2 * CHUNK, seed)), codec="raw")
    held = store.stats()["bytes"]
    state.quota = held // 2
    Keeping(state).round()
    assert 0 < store.stats()["bytes"] <= state.quota and state.answered(ANA)["evicted"] > 0
    assert not store.check().problems


def test_what_tenants_have_is_not_the_folders_own(state: State) -> None:
    """A check, a quota and a collection of the folder itself leave out what is checked and kept in bounds for each tenant."""
    model, own = tiny("qwen3"), Store(state.objects, chunk=CHUNK)
    own.put(kvtool.capture(model, ids(CHUNK, 9)), codec="raw")
    theirs = Store(state.partition(ANA), chunk=CHUNK)
    for seed in range(4):
        theirs.put(kvtool.capture(model, ids(2 * CHUNK, seed)), codec="raw")
    names = {entry.name for entry in state.objects.names()}
    report = own.check()
    assert not report.problems and not report.lost and report.objects < len(names)
    own.room.quota = theirs.stats()["bytes"]
    assert own.gc() == 0 and {entry.name for entry in state.objects.names()} == names


def test_nothing_larger_than_the_quota_is_taken(client: TestClient, state: State, tmp_path: Path) -> None:
    state.quota = 1000
    for body in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
        assert client.put("/v1/objects/a", content=body).status_code == 413
    assert not files(tmp_path) and client.put("/v1/objects/a", content=b"x" * 1000).status_code == 201


def test_the_document_has_every_route(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    served = {getattr(route, "path", "").replace(":path", "") for route in make_app(State(Folder("x"), None)).routes}
    assert served - set(document["paths"]) <= {"/", "/openapi.json", ""}
    assert "bearer" in json.dumps(document["components"]["securitySchemes"]).lower()


def test_a_stalled_body(state: State) -> None:
    """Half a body, then nothing: 408 after the limit, and nothing is left."""
    app, said = make_app(state), []

    async def receive() -> dict[str, Any]:
        if not said_body:
            said_body.append(1)
            return {"type": "http.request", "body": b"half", "more_body": True}
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    said_body: list[int] = []
    headers = [(b"authorization", f"Bearer {ANAS}".encode())]
    scope = {"type": "http", "method": "PUT", "path": "/v1/objects/a", "raw_path": b"", "query_string": b"", "headers": headers}
    asyncio.run(
        app({**scope, "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("x", 1), "root_path": ""}, receive, send)
    )
    assert said[0]["status"] == 408
    assert not list(state.partition(ANA).names()) and state.objects.unfinished() == 0


def test_a_tenants_folder_does_not_tell_its_salt() -> None:
    assert ANA.salt[:8] not in ANA.folder and Tenant("x", ANA.token, ANA.salt).folder == ANA.folder


def test_without_tokens_only_names_of_this_machine_are_answered(tmp_path: Path) -> None:
    app = make_app(State(Folder(tmp_path / "store"), None))
    with TestClient(app, base_url="http://127.0.0.1:8700") as client:
        assert client.get("/v1/tenant").status_code == 200
        assert client.get("/v1/tenant", headers={"Host": "localhost:9"}).status_code == 200
        assert client.get("/v1/tenant", headers={"Host": "rebound.example"}).status_code == 400
