"""Two services on one folder at once: what one keeps the other gives, and collections and quotas of either break no reader's bytes."""

import contextlib
import hashlib
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
from fastapi.testclient import TestClient

import kvtool
from kvtool.service import tenants as tenants_file
from kvtool.service.app import make_app
from kvtool.service.state import State
from kvtool.service.tenants import Tenants, made
from kvtool.store.folder import Folder
from kvtool.store.objects import Missing
from kvtool.store.served import Served
from kvtool.store.store import Store
from tests.library import ids, tiny
from tests.service_running import service

ANA, ANAS = made("ana")
BOB, BOBS = made("bob")
CHUNK = 64
SECONDS = 4.0


def content(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(30_000)


def test_readers_under_writers_and_collectors(tmp_path: Path) -> None:
    """Objects' bytes follow from their names: every answer is these bytes, or that there is no such object."""
    tenants_file.write(tmp_path / "tenants.json", [ANA, BOB])
    quota, stop = 600_000, threading.Event()
    wrong: list[str] = []
    counts = {"put": 0, "read": 0, "gone": 0, "collected": 0}
    with (
        service(tmp_path / "store", "--tenants", str(tmp_path / "tenants.json"), "--quota", str(quota)) as one,
        service(tmp_path / "store", "--tenants", str(tmp_path / "tenants.json"), "--quota", str(quota)) as two,
    ):

        def write(address: str, mine: int) -> None:
            served, i = Served(address, ANAS), 0
            while not stop.is_set():
                name = f"x/{mine}-{i}"
                i += 1
                counts["put"] += served.write(name, content(name))
            served.close()

        def read(address: str) -> None:
            served = Served(address, ANAS)
            while not stop.is_set():
                for entry in served.names("x/"):
                    try:
                        if served.read(entry.name) != content(entry.name):
                            wrong.append(entry.name)
                        counts["read"] += 1
                    except Missing:
                        counts["gone"] += 1
            served.close()

        def collect(address: str) -> None:
            with Store(Served(address, ANAS), chunk=CHUNK) as store:
                while not stop.is_set():
                    store.gc()
                    counts["collected"] += 1

        def guarded(call, *arguments) -> None:  # type: ignore[no-untyped-def]
            try:
                call(*arguments)
            except (OSError, AssertionError) as error:
                wrong.append(repr(error))

        jobs = [(write, one.address, 1), (write, two.address, 2), (read, one.address), (read, two.address), (collect, two.address)]
        threads = [threading.Thread(target=guarded, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not wrong and all(counts[what] for what in ("put", "read", "collected")), (wrong[:3], counts)
        # A prompt that one took in the other finds, and what is removed at one is gone at the other.
        model = tiny("qwen3")
        with Store(Served(one.address, BOBS), chunk=CHUNK) as first, Store(Served(two.address, BOBS), chunk=CHUNK) as second:
            put = first.put(kvtool.capture(model, ids(2 * CHUNK)), codec="raw")
            assert second.lookup([*ids(2 * CHUNK), 1], model) is not None
            second.remove(put.id)
            assert first.lookup([*ids(2 * CHUNK), 1], model) is None
        held = sum(entry.size for entry in Served(two.address, ANAS).names())
    assert held <= quota
    objects = Folder(tmp_path / "store")
    objects.sweep()
    assert objects.unfinished() == 0 and not any("Traceback" in line for line in [*one.said, *two.said])


@pytest.mark.parametrize("services", [2, 3])
def test_services_on_one_store_never_pass_a_quota_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, services: int) -> None:
    """Each takes in what it can; the sum is taken at every object that is made, with nothing else under way."""
    quota, folder = 200_000, tmp_path / "store" / "objects" / ANA.folder
    one_by_one, seen = threading.Lock(), [0]
    write, remove = Folder.write, Folder.remove

    def written(self: Folder, name: str, source: Path | bytes) -> bool:
        with one_by_one:
            made = write(self, name, source)
            if name.startswith(ANA.folder):
                seen.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
            return made

    def removed(self: Folder, name: str) -> bool:
        with one_by_one:
            return remove(self, name)

    monkeypatch.setattr(Folder, "write", written)
    monkeypatch.setattr(Folder, "remove", removed)
    answers: Counter[int] = Counter()
    end = time.monotonic() + SECONDS

    def put(client: TestClient, mine: int) -> None:
        i = 0
        while time.monotonic() < end:
            # Sizes around a grant's hundredth of the quota, and far above it.
            data = content(f"{mine}-{i}")[: (700, 2500, 30_000)[i % 3]]
            answers[client.put(f"/v1/objects/x/{mine}-{i}", content=data, headers={"Authorization": f"Bearer {ANAS}"}).status_code] += 1
            i += 1

    states = [State(Folder(tmp_path / "store"), Tenants([ANA]), quota=quota) for _ in range(services)]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(TestClient(make_app(state))) for state in states]
        threads = [threading.Thread(target=put, args=(client, 10 * n + m)) for n, client in enumerate(clients) for m in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers[201] > 30 and set(answers) <= {201, 507} and answers[507] < answers[201] / 10, answers
    assert quota / 2 < max(seen) <= quota
