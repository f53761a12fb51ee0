"""The service at the level of bytes on a connection: slow, endless and ill-formed requests, and such as two parsers would read unlike.

Each of the shapes below is answered with an error, or closed, and nothing of it is taken for a second request; what is sound is answered
as often as it was asked. `KVTOOL_FUZZ=N` sends N random mutations (60 by default).
"""

import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import uvicorn

from kvtool.service.app import make_app
from kvtool.service.connections import guarded
from kvtool.service.settings import Limits
from kvtool.service.state import State
from kvtool.service.tenants import Tenants, made
from kvtool.store.folder import Folder

ANA, ANAS = made("ana")
MUTATIONS = int(os.environ.get("KVTOOL_FUZZ", "60"))
HEAD = f"Host: localhost\r\nAuthorization: Bearer {ANAS}\r\n"
LIMITS = Limits(json_bytes=100_000, idle_seconds=1.0, rate=20_000.0, head_seconds=1.0, head_bytes=20_000, connections=12)


class Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    state = State(Folder(tmp_path_factory.mktemp("sockets") / "store"), Tenants([ANA]), LIMITS)
    config = uvicorn.Config(
        make_app(state), http=guarded(LIMITS), ws="none", port=0, log_level="critical", limit_concurrency=LIMITS.connections, lifespan="off"
    )
    server = Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


def talk(port: int, *parts: bytes, pause: float = 0.0, wait: float = 8.0) -> tuple[bytes, float]:
    """What a connection answers until it is closed or has been silent for a while, and the seconds until then."""
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as sock:
        said = b""
        with suppress(ConnectionError, TimeoutError):
            for part in parts:
                sock.sendall(part)
                time.sleep(pause)
        with suppress(ConnectionError, TimeoutError):
            while data := sock.recv(1 << 16):
                said += data
    return said, time.monotonic() - start


def statuses(said: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]


def alive(port: int) -> bool:
    return statuses(talk(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0]) == [200]


# --- before a token is known


@pytest.mark.parametrize("path", ["lookup", "explain", "objects/sizes", "objects/used", "nothing"])
def test_no_body_is_read_before_the_token(port: int, path: str) -> None:
    """16 MB of JSON are announced, none is sent: the answer is there at once."""
    for header in ("", "Authorization: Bearer kvt_wrong\r\n", f"Authorization: Bearer {ANAS}\r\nAuthorization: Bearer x\r\n"):
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{header}Content-Length: 90000\r\n\r\n"
        said, taken = talk(port, head.encode())
        assert statuses(said) == [401] and b"connection: close" in said.lower()
        assert taken < LIMITS.idle_seconds


def test_open_routes_read_no_body(port: int) -> None:
    said, taken = talk(port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 90000\r\n\r\n")
    assert statuses(said) == [200] and taken < LIMITS.idle_seconds + LIMITS.head_seconds


# --- slow


def test_a_silent_connection_is_closed(port: int) -> None:
    said, taken = talk(port)
    assert said == b"" and 0.5 < taken < 5


def test_headers_byte_by_byte_are_cut_off(port: int) -> None:
    """Each byte comes well within any pause that is allowed."""
    head = f"GET /v1/tenant HTTP/1.1\r\n{HEAD}X: ".encode() + b"y" * 200
    said, taken = talk(port, *(head[i : i + 1] for i in range(len(head))), pause=0.05)
    assert statuses(said) == [408] and taken < 0.05 * len(head)


def test_a_second_request_may_not_dawdle_either(port: int) -> None:
    said, taken = talk(port, f"GET /v1/tenant HTTP/1.1\r\n{HEAD}\r\n".encode(), b"GET /v1/ten", pause=0.2)
    assert statuses(said) == [200, 408] and taken < 5


@pytest.mark.parametrize(("method", "path"), [("POST", "lookup"), ("PUT", "objects/slow")])
def test_a_body_that_drips_is_cut_off(port: int, method: str, path: str) -> None:
    """A kilobyte every 0.15 s keeps within every pause, and is a third of the rate that is asked for."""
    head = f"{method} /v1/{path} HTTP/1.1\r\n{HEAD}Content-Type: application/json\r\nContent-Length: 90000\r\n\r\n"
    said, taken = talk(port, head.encode(), *[b" " * 1000] * 60, pause=0.15)
    assert statuses(said) == [408] and b"less than 20000 a second" in said and taken < 9.5
    said, taken = talk(port, head.encode(), b" " * 1000)
    assert statuses(said) == [408] and b"nothing was received for 1 s" in said and taken < 5


def test_many_idle_connections_hold_the_service_for_a_moment_only(port: int) -> None:
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(LIMITS.connections)]
    time.sleep(0.2)
    busy = statuses(talk(port, f"GET /v1/tenant HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n".encode())[0])
    assert busy == [503]
    time.sleep(LIMITS.head_seconds + 0.5)
    assert alive(port)
    for sock in socks:
        sock.close()


def test_a_body_that_is_answered_early_ends_no_connection(port: int) -> None:
    """Two objects of a name: the second is answered before its body has come, and the connection goes on."""
    put = f"PUT /v1/objects/early HTTP/1.1\r\n{HEAD}Content-Length: 50000\r\n\r\n".encode()
    last = f"DELETE /v1/objects/early HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n".encode()
    body = bytes(50_000)
    assert statuses(talk(port, put + body, put, body, put + body, last, pause=0.3)[0]) == [201, 200, 200, 204]


# --- endless and ill-formed


FLOODS = {
    "one header": b"GET /health HTTP/1.1\r\nX: " + b"y" * 400_000,
    "many headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(40_000)),
    "a line": b"GET /" + b"a" * 400_000,
    "empty lines": b"\r\n" * 200_000,
}


@pytest.mark.parametrize("name", FLOODS)
def test_headers_without_end_are_refused(port: int, name: str) -> None:
    data = FLOODS[name]
    said, _ = talk(port, *(data[i : i + 4096] for i in range(0, len(data), 4096)), pause=0.0002)
    # The refusal itself may be lost where the client has not read it before it sends on.
    assert statuses(said) in ([431], [400], [408], [])
    assert alive(port)


CHUNKED = f"PUT /v1/objects/c HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n".encode()
LENGTH = f"PUT /v1/objects/c HTTP/1.1\r\n{HEAD}".encode()
HIDDEN = f"GET /v1/tenant HTTP/1.1\r\n{HEAD}\r\n".encode()
SHAPES = {
    "both lengths": LENGTH + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "both, the other way": LENGTH + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": LENGTH + b"Content-Length: 0\r\nContent-Length: 200\r\n\r\n" + HIDDEN,
    "a signed length": LENGTH + b"Content-Length: +3\r\n\r\nabc" + HIDDEN,
    "a negative length": LENGTH + b"Content-Length: -1\r\n\r\n" + HIDDEN,
    "a length with a space": LENGTH + b"Content-Length : 0\r\n\r\n" + HIDDEN,
    "a length in hex": LENGTH + b"Content-Length: 0x3\r\n\r\nabc" + HIDDEN,
    "a huge length": LENGTH + b"Content-Length: 99999999999999999999999\r\n\r\n" + HIDDEN,
    "a list of lengths": LENGTH + b"Content-Length: 3, 3\r\n\r\nabc" + HIDDEN,
    "another coding": LENGTH + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked twice": LENGTH + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a folded header": LENGTH + b"Transfer-Encoding:\r\n chunked, x\r\n\r\n0\r\n\r\n" + HIDDEN,
    "no size": CHUNKED + b"\r\n\r\nabc\r\n0\r\n\r\n",
    "a size in words": CHUNKED + b"\r\nthree\r\nabc\r\n0\r\n\r\n",
    "a negative size": CHUNKED + b"\r\n-3\r\nabc\r\n0\r\n\r\n",
    "a size beyond 64 bits": CHUNKED + b"\r\n" + b"f" * 17 + b"\r\nabc\r\n0\r\n\r\n",
    "a size too small": CHUNKED + b"\r\n2\r\nabc\r\n0\r\n\r\n",
    "a chunk ended by LF": CHUNKED + b"\r\n3\nabc\n0\n\n",
    "a bare CR in a header": LENGTH + b"X: a\rContent-Length: 3\r\n\r\n" + HIDDEN,
    "a NUL in a header": LENGTH + b"X: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "a header without a name": LENGTH + b": x\r\nContent-Length: 0\r\n\r\n",
    "a space in a name": LENGTH + b"X Y: x\r\nContent-Length: 0\r\n\r\n",
    "HTTP/0.9": b"GET /v1/tenant\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "no ASCII in the path": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_parsers_read_unlike(port: int, name: str) -> None:
    said, _ = talk(port, SHAPES[name])
    found = statuses(said)
    # Refused or closed; never a success, and never an answer to what hides behind it.
    assert all(400 <= status < 500 for status in found) and len(found) <= 1, (name, said[:400])
    assert ANA.salt.encode() not in said and alive(port)


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    asked = [f"HEAD /v1/objects/none-{i} HTTP/1.1\r\n{HEAD}\r\n".encode() for i in range(40)]
    last = f"GET /v1/tenant HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n".encode()
    assert statuses(talk(port, b"".join(asked) + last)[0]) == [404] * 40 + [200]


def test_an_upgrade_is_not_taken(port: int) -> None:
    asked = f"GET /v1/tenant HTTP/1.1\r\n{HEAD}Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
    assert statuses(talk(port, asked.encode())[0]) in ([200], [400])


def test_random_mutations(port: int) -> None:
    """Bytes of sound requests changed, doubled, cut out: no answer of the kind 5xx, and the service lives."""
    rng = random.Random(8)
    seeds = [
        HIDDEN,
        LENGTH + b"Content-Length: 3\r\n\r\nabc",
        CHUNKED + b"\r\n3\r\nabc\r\n0\r\n\r\n",
        f"POST /v1/lookup HTTP/1.1\r\n{HEAD}Content-Type: application/json\r\nContent-Length: 16\r\n\r\n".encode() + b'{"tokens": [1,2]}',
    ]
    for _ in range(MUTATIONS):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randint(1, 20)]
            elif kind == 2:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            else:
                data[at:at] = rng.choice([b"\r\n", b"\n", b"\x00", b" ", b"0", b"chunked", b"\xff"])
            data = data or bytearray(b"G")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            with suppress(ConnectionError):
                sock.sendall(bytes(data))
                sock.shutdown(socket.SHUT_WR)
            said = b""
            with suppress(ConnectionError, TimeoutError):
                while more := sock.recv(1 << 16):
                    said += more
        assert all(status < 500 for status in statuses(said)), (bytes(data), said)
    assert alive(port)


def test_nothing_is_left_of_all_this(port: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = next(path for path in tmp_path_factory.getbasetemp().iterdir() if path.name.startswith("sockets"))
    left = [path.name for path in folder.rglob("*.part")]
    assert left == []
