"""Bodies that are received past the parser, on a connection that goes on, that fails midway, and that ends; and sent from a file."""

import contextlib
import errno
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

import uvicorn
from blake3 import blake3

from formats import atomic
from kvtool.service import connections, transfer
from kvtool.service.app import make_app
from kvtool.service.connections import Rest, guarded
from kvtool.service.settings import Limits
from kvtool.service.state import State
from kvtool.store.folder import Folder

SIZE = 3 * transfer.GATHERED + 12_345
IDLE = 5.0


@pytest.fixture(params=["uvloop", "asyncio"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Of a service in a thread of this process."""
    state = State(Folder(tmp_path / "store"), None, limits=Limits(idle_seconds=IDLE))
    config = uvicorn.Config(make_app(state), http=guarded(state.limits), ws="none", loop=request.param, log_level="critical")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that came past the parser."""
    counts: list[int] = []
    into = Rest.into

    async def counted(self: Rest, view: memoryview) -> int:
        counts.append(await into(self, view))
        return counts[-1]

    monkeypatch.setattr(Rest, "into", counted)
    return counts


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.suffix != ".lock"]


def emptied(tmp_path: Path) -> bool:
    deadline = time.monotonic() + 10
    while files(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not files(tmp_path)


@contextlib.contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.connect()
        yield connection


def answer(connection: http.client.HTTPConnection, method: str, path: str, **more: Any) -> tuple[int, bytes]:
    connection.request(method, path, **more)
    got = connection.getresponse()
    return got.status, got.read()


def head(method: str, name: str, more: str = "") -> bytes:
    return f"{method} /v1/objects/{name} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()


def test_one_after_another_on_one_connection(port: int, taken: list[int]) -> None:
    with connected(port) as connection:
        sock = connection.sock
        for i, size in enumerate((SIZE, 1, transfer.GATHERED, 2 * transfer.GATHERED)):
            data = os.urandom(size)
            assert (
                answer(connection, "PUT", f"/v1/objects/{i}", body=data, headers={"X-Content-BLAKE3": blake3(data).hexdigest()})[0] == 201
            )
            assert answer(connection, "GET", f"/v1/objects/{i}") == (200, data)
            assert answer(connection, "PUT", f"/v1/objects/{i}", body=data)[0] == 200
        assert answer(connection, "PUT", "/v1/objects/other", body=bytes(SIZE), headers={"X-Content-BLAKE3": "0" * 64})[0] == 400
        assert answer(connection, "GET", "/v1/objects/other")[0] == 404
        assert connection.sock is sock
    # The first piece alone has to go through the parser, and here it comes with the head or right after it.
    assert sum(taken) > SIZE


def test_what_follows_a_body(port: int, taken: list[int]) -> None:
    """The next request comes with the end of the body: answered on a connection that goes on, dropped on one that ends."""
    data = os.urandom(SIZE)
    for ends in (False, True):
        close = "Connection: close\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(head("PUT", "a", f"Content-Length: {SIZE}\r\n" + close * ends))
            time.sleep(0.1)
            sock.sendall(data + head("DELETE", "a") * 2 + head("GET", "b", close))
            got = b""
            while part := _some(sock):
                got += part
        statuses = [int(line.split()[0]) for line in got.split(b"HTTP/1.1 ")[1:]]
        assert statuses == ([201] if ends else [201, 204, 404, 404])
    assert sum(taken) > SIZE


def _some(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""  # the service did not read all that was sent


def test_a_disk_that_fills_up_midway(port: int, taken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the body is dropped, and the connection goes on."""
    write, calls = atomic.AtomicFile.write, []

    def failing(self: atomic.AtomicFile, data: memoryview) -> None:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(transfer.AtomicFile, "write", failing)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(head("PUT", "a", f"Content-Length: {SIZE}\r\n"))
        sock.sendall(bytes(SIZE) + head("GET", "a", "Connection: close\r\n"))
        got = b""
        while part := _some(sock):
            got += part
    assert got.startswith(b"HTTP/1.1 507 ") and got.count(b"HTTP/1.1 404 ") == 1
    assert calls == [transfer.GATHERED] * 2 and sum(taken) > transfer.GATHERED
    assert emptied(tmp_path)


def test_an_error_of_the_disk_that_comes_late_is_not_lost(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells it once, to the sync on the way."""
    fsync, told = os.fsync, []

    def failing(fd: int) -> None:
        if threading.current_thread().name.startswith("kvtool-sync"):
            told.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr(atomic, "SYNC_EACH", SIZE)
    with connected(port) as connection:
        assert answer(connection, "PUT", "/v1/objects/a", body=bytes(SIZE))[0] == 503
    assert len(told) == 1
    assert emptied(tmp_path)


def test_who_goes_away_midway(port: int, taken: list[int], tmp_path: Path) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(head("PUT", "a", f"Content-Length: {SIZE}\r\n") + bytes(SIZE - 1))
        deadline = time.monotonic() + 10
        while sum(taken) < transfer.GATHERED and time.monotonic() < deadline:
            time.sleep(0.02)
    assert sum(taken) >= transfer.GATHERED and emptied(tmp_path)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that went from a file to a connection, a thread's turn each."""
    counts: list[int] = []
    now = connections.sent_now

    def counted(*args: int) -> tuple[int, bool]:
        found = now(*args)
        counts.append(found[0])
        return found

    monkeypatch.setattr(connections, "sent_now", counted)
    return counts


def stored(port: int, data: bytes) -> None:
    with connected(port) as connection:
        assert answer(connection, "PUT", "/v1/objects/a", body=data)[0] == 201


def begun(port: int) -> socket.socket:
    """A connection whose reader takes little and has asked for an object."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", port))
    sock.sendall(head("GET", "a"))
    return sock


def rest(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_objects_come_from_their_files(port: int, direct: list[int]) -> None:
    data = os.urandom(SIZE)
    stored(port, data)
    with connected(port) as connection:
        assert answer(connection, "GET", "/v1/objects/a") == (200, data)
        for begin, end in ((0, 1), (12_345, SIZE - 1), (SIZE - 1, SIZE)):
            got = answer(connection, "GET", "/v1/objects/a", headers={"Range": f"bytes={begin}-{end - 1}"})
            assert got == (206, data[begin:end])
        assert answer(connection, "GET", "/v1/objects/b")[0] == 404
    assert sum(direct) == SIZE + 1 + (SIZE - 1 - 12_345) + 1


def test_a_slow_reader_gets_all_and_holds_no_thread(port: int, direct: list[int]) -> None:
    data = os.urandom(40_000_000)
    stored(port, data)
    with contextlib.closing(begun(port)) as sock:
        got = bytearray(sock.recv(100))
        for _ in range(5):
            time.sleep(0.2)
            got += sock.recv(1 << 20)
        turns = len(direct)
        sock.sendall(head("GET", "none", "Connection: close\r\n"))
        got += rest(sock)
    assert turns < 12  # it waited in the loop
    body = bytes(got).split(b"\r\n\r\n", 1)[1]
    assert body[: len(data)] == data and body[len(data) :].startswith(b"HTTP/1.1 404")


def test_a_file_comes_after_what_waits_to_be_sent(port: int) -> None:
    data = os.urandom(1_000_000)
    stored(port, data)
    with contextlib.closing(begun(port)) as sock:
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 150 + head("GET", "a", "Connection: close\r\n"))
        time.sleep(1)  # the answers fill what the connection holds
        got = rest(sock)
    assert got.startswith(b"HTTP/1.1 200") and got.count(b"HTTP/1.1 200") == 152
    assert got.split(b"\r\n\r\n", 1)[1][: len(data)] == got[-len(data) :] == data


def test_a_reader_that_takes_nothing_is_left(port: int) -> None:
    stored(port, os.urandom(40_000_000))
    before = open_files()
    with contextlib.closing(begun(port)) as sock:
        time.sleep(IDLE + 1)
        assert len(rest(sock)) < 40_000_000
    deadline = time.monotonic() + 5
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_files() <= before
    with connected(port) as connection:
        assert answer(connection, "GET", "/v1/objects/a", headers={"Range": "bytes=0-0"})[0] == 206


def test_a_file_that_ends_early_breaks_the_answer_off(port: int, tmp_path: Path) -> None:
    data = os.urandom(40_000_000)
    stored(port, data)
    with contextlib.closing(begun(port)) as sock:
        got = sock.recv(100)
        (path,) = (path for path in files(tmp_path) if path.stat().st_size == len(data))
        os.truncate(path, 30_000_000)
        sock.sendall(head("GET", "none"))  # which would be taken for the rest
        body = (got + rest(sock)).split(b"\r\n\r\n", 1)[1]
    assert body == data[: len(body)] and len(body) <= 30_000_000
