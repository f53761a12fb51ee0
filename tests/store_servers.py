"""Servers that tests of the store start themselves, and a proxy that misbehaves between a client and one of them.

Redis comes from Debian (redis-server, or valkey-server), S3 is moto's server in a process of its own, Azure's blobs are azurite's
(`npm install -g azurite`). The emulators of Google Cloud Storage know its JSON interface alone, and the client speaks the XML one: the
server for that is ours, `gcs_server.py`.
"""

import base64
import contextlib
import hmac
import importlib.util
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

REDIS = shutil.which("valkey-server") or shutil.which("redis-server")
HAVE_REDIS = REDIS is not None and importlib.util.find_spec("redis") is not None
HAVE_S3 = importlib.util.find_spec("obstore") is not None and importlib.util.find_spec("moto") is not None
AZURITE = shutil.which("azurite-blob")
HAVE_AZURE = AZURITE is not None and importlib.util.find_spec("obstore") is not None
HAVE_ENCRYPTION = importlib.util.find_spec("cryptography") is not None

S3_ENVIRONMENT = {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_ALLOW_HTTP": "true"}
BUCKET = "bucket"
# The account that azurite has, whose key it publishes.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURE_ENVIRONMENT = {
    "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
    "AZURE_ALLOW_HTTP": "true",
}
_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(done: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"{what} did not happen in {seconds} s"
        time.sleep(0.02)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Context manager: the process is gone afterwards."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Context manager: port of an S3 server with one empty bucket."""
    command = [sys.executable, "-c", _MOTO]
    with ended(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)) as server:
        assert server.stdin is not None and server.stdout is not None
        with server.stdin, server.stdout:
            port = int(server.stdout.readline())
            with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")):
                pass
            yield port


@contextlib.contextmanager
def azure_server(folder: Path) -> Iterator[int]:
    """Context manager: port of a server of Azure's blobs with one empty container, all in memory."""
    assert AZURITE is not None
    port = free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    command = [AZURITE, "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    with ended(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)):
        wait_for(lambda: listens(port), "azurite", 60)
        date, version = formatdate(usegmt=True), "2021-08-06"
        asked = f"x-ms-date:{date}\nx-ms-version:{version}\n/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
        signed = hmac.digest(base64.b64decode(AZURE_KEY), ("PUT" + "\n" * 12 + asked).encode(), "sha256")
        authorization = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signed).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": authorization, "Content-Type": ""}
        url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}/{BUCKET}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, b"", headers, method="PUT")):
            pass
        yield port


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[int]:
    """Context manager: port of a Redis server that keeps everything in memory."""
    assert REDIS is not None
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    with ended(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)):
        wait_for(lambda: listens(port), "redis-server")
        yield port


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[int]:
    """Context manager: port of one node of a cluster of three."""
    with contextlib.ExitStack() as stack:
        ports = []
        for i in range(3):
            bus = free_port()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "2000")
            ports.append((stack.enter_context(redis_server(folder / str(i), *options)), bus))
        share = 16384 // 3
        for i, (port, _) in enumerate(ports):
            last = 16383 if i == 2 else (i + 1) * share - 1
            assert command(port, "CLUSTER", "ADDSLOTSRANGE", str(i * share), str(last)) == "+OK"
            assert command(port, "CLUSTER", "SET-CONFIG-EPOCH", str(i + 1)) == "+OK"
        for port, bus in ports[1:]:
            assert command(ports[0][0], "CLUSTER", "MEET", "127.0.0.1", str(port), str(bus)) == "+OK"

        def whole(port: int) -> bool:
            info = command(port, "CLUSTER", "INFO")
            return "cluster_state:ok" in info and "cluster_known_nodes:3" in info

        for port, _ in ports:
            wait_for(lambda port=port: whole(port), "the cluster")
        yield ports[0][0]


def command(port: int, *words: str) -> str:
    """The raw answer of a Redis server to one command."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
        return sock.recv(1 << 16).decode().strip()


class Proxy:
    """A TCP proxy whose faults are set while it runs; a context manager.

    Attributes:
        port: where it listens.
        answer_bytes: bytes of each connection's answers that pass before it is cut; None for all.
        request_bytes: the same of requests.
        silent: accept, and answer nothing.
        rate: bytes a second of all answers together; None for no limit.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.answer_bytes: int | None = None
        self.request_bytes: int | None = None
        self.silent = False
        self.rate: float | None = None
        self._due, self._paying = 0.0, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> "Proxy":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        # Wakes accept, which a close alone does not on Linux.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def cut(self) -> None:
        """Reset every connection there is."""
        while self._open:
            self._end(self._open.pop())

    @staticmethod
    def _end(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.silent:
                self._open.append(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            for source, sink, limit in ((client, server, self.request_bytes), (server, client, self.answer_bytes)):
                thread = threading.Thread(target=self._pump, args=(source, sink, limit, server), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pay(self, count: int) -> None:
        """Wait until `count` bytes more are within the rate."""
        assert self.rate is not None
        with self._paying:
            self._due = max(self._due, time.monotonic()) + count / self.rate
            left = self._due - time.monotonic()
        # What a tenth of a second allows may go at once: the clock of sleep is no finer than that of the line.
        time.sleep(max(left - 0.1, 0.0))

    def _pump(self, source: socket.socket, sink: socket.socket, limit: int | None, server: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                if limit is not None and passed + len(data) >= limit:
                    sink.sendall(data[: limit - passed])
                    break
                if self.rate is not None and sink is not server:
                    self._pay(len(data))
                sink.sendall(data)
                passed += len(data)
        self._end(source)
        self._end(sink)
