"""Servers that are killed with -9 while an object comes or goes, and slow ones: an error or the whole object, never other bytes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtool.store.folder import Folder
from kvtool.store.objects import Objects
from tests import store_servers
from tests.service_running import HAVE_SERVICE
from tests.store_servers import BUCKET, Proxy, free_port, listens, wait_for
from tests.test_store_objects import content

SIZE = 16 << 20  # more than sockets hold
HAVE = {"redis": store_servers.HAVE_REDIS, "s3": store_servers.HAVE_S3, "service": HAVE_SERVICE}
KINDS = [pytest.param(kind, marks=pytest.mark.skipif(not have, reason=f"no {kind} server here")) for kind, have in HAVE.items()]


class Server:
    """A server of one kind on one port, started again with what it keeps on its disk."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.port = kind, folder, free_port()
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        port = str(self.port)
        if self.kind == "redis":
            assert store_servers.REDIS is not None
            kept = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
            command = [store_servers.REDIS, "--port", port, "--bind", "127.0.0.1", "--dir", str(self.folder), *kept]
        elif self.kind == "s3":
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
        else:
            command = [sys.executable, "-m", "kvtool", "serve", "--store", str(self.folder / "store"), "--no-tokens", "--port", port]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
        wait_for(lambda: listens(self.port), self.kind, 60)
        if self.kind == "s3":
            with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")):
                pass
        elif self.kind == "redis":  # it listens before it has read its file
            wait_for(lambda: "PONG" in store_servers.command(self.port, "PING"), "redis", 60)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def client(self, port: int, timeout: float, monkeypatch: pytest.MonkeyPatch) -> Objects:
        if self.kind == "redis":
            valkey = pytest.importorskip("kvtool.store.valkey")
            return valkey.Valkey(f"redis://127.0.0.1:{port}/0", timeout=timeout)
        if self.kind == "service":
            served = pytest.importorskip("kvtool.store.served")
            monkeypatch.setattr(served, "IDLE_SECONDS", timeout)
            return served.Served(f"http://127.0.0.1:{port}", "")
        buckets = pytest.importorskip("kvtool.store.buckets")
        for name, value in (*store_servers.S3_ENVIRONMENT.items(), ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")):
            monkeypatch.setenv(name, value)
        return buckets.Buckets(f"s3://{BUCKET}/killed", timeout=timeout)


def outcome(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A call in a thread, and where its result or error will be."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_killed_while_an_object_comes_and_goes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, data = Server(kind, tmp_path), content(SIZE)
    server.start()
    client = server.client(server.port, 20.0, monkeypatch)
    try:
        assert client.write("before", data)
        # It stands still with a part of the object, and is killed so.
        server.signal(signal.SIGSTOP)
        thread, found = outcome(lambda: client.write("put", data))
        time.sleep(0.5)
        assert thread.is_alive() and not found
        server.kill()
        thread.join(120)
        assert not thread.is_alive() and isinstance(found[0], OSError)
        server.start()
        if kind != "s3":  # whose server has no disk
            assert client.read("before") == data
        assert client.size("put") is None and client.write("put", data) and client.read("put") == data
        with Proxy(server.port) as proxy:
            proxy.rate = 4e6
            far = server.client(proxy.port, 20.0, monkeypatch)
            thread, found = outcome(lambda: far.read("put"))
            time.sleep(0.7)
            assert thread.is_alive() and not found
            server.kill()
            thread.join(120)
            assert not thread.is_alive() and isinstance(found[0], OSError)
            far.close()
    finally:
        server.kill()
        client.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_server_is_waited_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole object takes longer than a client waits for a byte; of S3 the time of a whole request is bounded, and said to be."""
    server, data = Server(kind, tmp_path), content(3_000_000)
    server.start()
    try:
        with Proxy(server.port) as proxy:
            slow = server.client(proxy.port, 20.0 if kind == "s3" else 1.5, monkeypatch)
            assert slow.write("slow", data)
            proxy.rate = 1e6
            start = time.monotonic()
            assert slow.read("slow") == data and time.monotonic() - start > 2.0
            slow.close()
            if kind == "s3":
                hasty = server.client(proxy.port, 0.5, monkeypatch)
                with pytest.raises(OSError, match="slow"):
                    hasty.read("slow")
                hasty.close()
    finally:
        server.kill()


def test_a_service_that_was_killed_holds_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the upload left is counted as unfinished, and the next service's round takes it away."""
    if not HAVE_SERVICE:
        pytest.skip("the extra serve is not installed")
    server = Server("service", tmp_path)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"PUT /v1/objects/half HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n" + content(6_000_000))
        folder = Folder(tmp_path / "store")
        wait_for(lambda: folder.unfinished() > 0, "the upload", 20)
        server.kill()
    assert not list(folder.names()) and folder.unfinished() > 0
    assert folder.sweep() > 0 and folder.unfinished() == 0
