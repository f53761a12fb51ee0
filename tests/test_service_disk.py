"""The service on a disk that is full, and on one that has become read-only: answers say so, and nothing is left."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
from fastapi.testclient import TestClient

from kvtool.service.app import make_app
from kvtool.service.state import State
from kvtool.store.folder import Folder


def test_the_service_on_a_full_disk(mount: Callable[[str], Path]) -> None:
    place = mount("size=2m")
    state = State(Folder(place / "store"), None)
    with TestClient(make_app(state), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        assert client.put("/v1/objects/a", content=bytes(1_500_000)).status_code == 201
        for body in (bytes(1_000_000), iter([bytes(500_000)] * 2)):
            answer = client.put("/v1/objects/b", content=body)
            assert answer.status_code == 507 and "cause" not in answer.json()["error"] and str(place) not in answer.text
        assert state.objects.unfinished() == 0 and client.get("/v1/objects/a").content == bytes(1_500_000)
        assert client.delete("/v1/objects/a").status_code == 204
        assert client.put("/v1/objects/b", content=bytes(1_000_000)).status_code == 201
        state.objects.close()  # its lock is open for writing, which no read-only file system takes
        mount("remount,ro")
        answer = client.put("/v1/objects/c", content=b"x")
        assert answer.status_code == 503 and str(place) not in answer.text
        assert client.delete("/v1/objects/b").status_code == 503 and client.get("/v1/objects/b").status_code == 200
        assert client.post("/v1/objects/used", json={"names": ["b"]}).status_code == 503
