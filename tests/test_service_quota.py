"""A tenant's quota is kept at every PUT: bytes that are there and bytes on their way never pass it together."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
from fastapi.testclient import TestClient

import kvtool
from kvtool.service import accounts, grants
from kvtool.service.app import make_app
from kvtool.service.errors import Refused
from kvtool.service.grants import Grants
from kvtool.service.settings import Limits
from kvtool.service.state import State
from kvtool.service.tenants import Tenants, made
from kvtool.store import catalogue, room
from kvtool.store.folder import Folder
from kvtool.store.objects import StoreFullError
from kvtool.store.served import Served
from kvtool.store.store import Store
from tests.library import ids, tiny
from tests.service_running import service

ANA, ANAS = made("ana")
CHUNK = 64


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(Folder(tmp_path / "store"), Tenants([ANA]), Limits(object_bytes=1 << 20, objects=50, idle_seconds=5.0), quota=100_000)


@pytest.fixture
def client(state: State) -> Iterator[TestClient]:
    with TestClient(make_app(state), raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {ANAS}"
        yield client


def taken(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_objects_of_no_known_kind_go_first_and_are_counted(client: TestClient, state: State, tmp_path: Path) -> None:
    store = Store(state.partition(ANA), chunk=CHUNK)
    store.put(kvtool.capture(tiny("qwen3"), ids(2 * CHUNK)), codec="raw")
    prompt = store.stats()["bytes"]
    state.quota = prompt + 25_000
    for i in range(9):
        assert client.put(f"/v1/objects/junk/{i}", content=bytes(10_000)).status_code == 201
        assert taken(tmp_path) <= state.quota
    names = {entry.name for entry in store.objects.names()}
    assert {name for name in names if name.startswith("junk/")} == {"junk/7", "junk/8"}
    assert store.stats()["bytes"] == prompt + 20_000 and state.answered(ANA)["evicted"] == 7


def test_prompts_that_are_put_over_the_service_push_the_least_worth_out(client: TestClient, state: State, tmp_path: Path) -> None:
    model, other = tiny("qwen3"), Store(Folder(tmp_path / "other"), chunk=CHUNK)
    other.put(kvtool.capture(model, ids(2 * CHUNK)), codec="raw")
    state.quota = int(2.5 * other.stats()["bytes"])
    seen: list[int] = []
    real = Folder.write

    def watched(self: Folder, name: str, source: Any) -> bool:
        made = real(self, name, source)
        seen.append(taken(tmp_path / "store" / "objects"))
        return made

    served = Store(_Through(client, state), chunk=CHUNK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "write", watched)
        for seed in range(6):
            served.put(kvtool.capture(model, ids(2 * CHUNK, seed)), codec="raw")
    assert len(seen) > 12 and max(seen) <= state.quota
    # The newest is whole, and nothing is out of reach.
    assert served.lookup([*ids(2 * CHUNK, 5), 1], model).usable == 2 * CHUNK  # type: ignore[union-attr]
    assert not served.check().problems and not served.check().lost


class _Through(Served):
    """The service's client over an application in this process."""

    def __init__(self, client: TestClient, state: State) -> None:
        super().__init__("http://127.0.0.1:1", ANAS)
        self._client, self._name_key = client, bytes.fromhex(ANA.salt)

    def _ask(self, method: str, path: str, *, ok: tuple[int, ...], headers: Any = None, **more: Any) -> Any:
        body = more.get("body")
        body = body if body is None or isinstance(body, bytes) else body.read()
        answer = self._client.request(method, "/v1" + path, headers=headers, content=body, json=more.get("json"))
        assert answer.status_code in ok, answer.text
        return _Answer(answer)


class _Answer:
    def __init__(self, answer: Any) -> None:
        self.status, self.data, self.headers, self.json = answer.status_code, answer.content, answer.headers, answer.json


def test_pins_and_uploads_that_fill_it_refuse_with_numbers_and_nothing_goes(client: TestClient, state: State) -> None:
    store = Store(state.partition(ANA), chunk=CHUNK)
    pinned = store.put(kvtool.capture(tiny("qwen3"), ids(2 * CHUNK)), codec="raw")
    store.pin(pinned.id)
    store.put(kvtool.capture(tiny("qwen3"), ids(10, 2)), codec="raw")
    state.quota = store.stats()["bytes"] + 100
    names = {entry.name for entry in store.objects.names()}
    answer = client.put("/v1/objects/a", content=bytes(state.quota // 2))
    assert answer.status_code == 507 and answer.json()["error"]["cause"] == "quota"
    assert f"a quota of {state.quota}" in answer.text and "0 are on their way" in answer.text
    assert {entry.name for entry in store.objects.names()} == names and state.objects.unfinished() == 0
    assert client.put("/v1/objects/a", content=bytes(state.quota + 1)).status_code == 413
    assert client.put("/v1/objects/a", content=bytes(100)).status_code == 201


def test_a_body_of_unknown_length_makes_its_room_as_it_comes(client: TestClient, state: State) -> None:
    state.quota = 20 << 20
    state.limits = Limits(idle_seconds=5.0)
    assert client.put("/v1/objects/junk", content=bytes(15 << 20)).status_code == 201
    assert client.put("/v1/objects/more", content=iter([bytes(1 << 20)] * 12)).status_code == 201
    assert [entry.name for entry in state.partition(ANA).names()] == ["more"]
    assert client.put("/v1/objects/most", content=iter([bytes(1 << 20)] * 21)).status_code == 413


@pytest.mark.parametrize("name", ["tenants/a", "grants/a", "grants/b/c-1"])
def test_names_that_no_room_is_made_of_are_refused(client: TestClient, state: State, name: str) -> None:
    answer = client.put(f"/v1/objects/{name}", content=b"x")
    assert answer.status_code == 422 and "the service's own" in answer.text and not list(state.objects.names())


def test_objects_of_no_bytes_are_bounded_too(client: TestClient) -> None:
    answers = [client.put(f"/v1/objects/e/{i}", content=b"").status_code for i in range(51)]
    assert answers == [201] * 50 + [507]


def test_uploads_at_once_never_pass_it(tmp_path: Path) -> None:
    """Twenty threads put objects of a fifth of the quota over sockets; whoever looks at the folder sees no more than the quota."""
    quota, size = 1_000_000, 200_000
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            try:
                most = max(most, taken(tmp_path / "store"))
            except FileNotFoundError:
                continue

    with service(tmp_path / "store", "--no-tokens", "--quota", str(quota)) as found:
        errors: list[Exception] = []

        def put(i: int) -> None:
            served = Served(found.address)
            for j in range(4):
                try:
                    served.write(f"x/{i}-{j}", bytes(size))
                except StoreFullError as error:
                    assert "are on their way" in str(error)
                    errors.append(error)
            served.close()

        watching = threading.Thread(target=watch)
        watching.start()
        writers = [threading.Thread(target=put, args=(i,)) for i in range(20)]
        for one in writers:
            one.start()
        for one in writers:
            one.join()
        done.set()
        watching.join()
        served = Served(found.address)
        held = sum(entry.size for entry in served.names())
        served.close()
    # A link and the name in scratch beside it are one file: a walk between the two counts it twice.
    assert size <= held <= quota and most <= quota + 20 * size
    assert len(errors) < 80


def account_of(state: State, quota: int) -> accounts.Account:
    return accounts.Account(state.partition(ANA), Grants(state.objects, ANA.folder, state.id), quota, 10, lambda count: None)


def test_what_is_kept_while_it_is_counted_is_not_lost(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted twice it would refuse what has room, counted never let in what has none."""
    account = account_of(state, 1000)

    async def talk() -> None:
        await account.reserve("a", 400)
        began, names = threading.Event(), type(account._store.objects).names

        def slow(self: Any, prefix: str = "") -> Any:
            found = list(names(self, prefix))
            began.set()
            time.sleep(0.2)
            return iter(found)

        monkeypatch.setattr(type(account._store.objects), "names", slow)
        counting = asyncio.ensure_future(account.reserve("b", 600))
        while not began.is_set():
            await asyncio.sleep(0.01)
        state.partition(ANA).write("pins/a", bytes(400))
        account.kept(400)
        account.release(400)
        await counting
        monkeypatch.undo()
        with pytest.raises(Refused, match="400 bytes are there and may not go, 600 are on their way"):
            await account.reserve("a", 1)

    asyncio.run(talk())


def granted(state: State) -> list[int]:
    return [int(entry.name.rpartition("-")[2]) for entry in state.objects.names("grants/")]


def test_a_grant_is_given_back_when_nothing_is_on_its_way(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "IDLE", 0.05)
    account = account_of(state, 100_000)

    async def talk() -> None:
        await account.reserve("a", 400)
        await account.reserve("b", 200)
        assert granted(state) == [1400]  # a hundredth more serves for what comes next
        account.release(400)
        await asyncio.sleep(0.2)
        assert granted(state) == [1400]
        account.release(200)
        await asyncio.sleep(0.2)
        assert granted(state) == []
        await account.reserve("c", 2000)
        assert granted(state) == [3000]

    asyncio.run(talk())


def test_what_another_service_has_granted_is_taken_until_it_has_died(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "PATIENCE", 0.2)
    account, theirs = account_of(state, 1000), f"grants/{ANA.folder.rpartition('/')[2]}/{'0' * 16}-{'1' * 8}-700"
    state.objects.write(theirs, b"")
    state.objects.write(theirs.replace("-700", "-many"), b"")

    async def talk() -> None:
        await account.reserve("a", 300)
        with pytest.raises(Refused, match="0 bytes are there and may not go, 1000 are on their way"):
            await account.reserve("b", 1)
        path = state.objects.path(theirs)
        assert path is not None
        os.utime(path, (time.time() - grants.LEASE - 1,) * 2)
        await account.reserve("b", 700)
        with pytest.raises(Refused):
            await account.reserve("c", 1)
        assert granted_by(state) == {"0" * 16, state.id}
        grants.sweep(state.objects)
        assert granted_by(state) == {"0" * 16, state.id} and state.objects.size(theirs) is None

    asyncio.run(talk())


def granted_by(state: State) -> set[str]:
    return {entry.name.split("/")[2][:16] for entry in state.objects.names("grants/")}


def test_what_took_longer_than_its_grant_has_room_or_is_refused(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grant of a service that was held up counts no more: others may have taken the room."""
    monkeypatch.setattr(accounts, "HOLD", 0.0)
    account = account_of(state, 1000)

    async def talk() -> None:
        await account.reserve("a", 600)
        await account.renew("a")
        state.partition(ANA).write("pins/x", bytes(500))
        with pytest.raises(Refused, match="500 bytes are there and may not go, 600 are on their way"):
            await account.renew("a")

    asyncio.run(talk())


def test_descriptions_that_nothing_needs_go_where_room_is_needed(client: TestClient, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    state.quota = 1000
    for i in range(9):
        assert client.put(f"/v1/objects/spaces/{i:064x}.json", content=bytes(100)).status_code == 201
    assert client.put("/v1/objects/junk", content=bytes(200)).status_code == 507  # their rows may be on their way
    monkeypatch.setattr(catalogue, "GRACE", -1.0)
    assert client.put("/v1/objects/junk", content=bytes(200)).status_code == 201
    assert room.GRACE > 0
