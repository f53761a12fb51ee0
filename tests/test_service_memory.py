"""What single requests cost a service: the peak of its process (VmHWM) and its processor time stay in proportion to what was sent.

A stored or read object costs less than twice its bytes, however it is asked for; so do bodies of JSON made to be large in memory. Sound
lists of numbers and names are the costliest: less than 16 times their bytes, of which 16 MiB are taken at most.
"""

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service_running import HAVE_SERVICE, Running, service

pytestmark = pytest.mark.skipif(not HAVE_SERVICE, reason="the extra serve is not installed")

MB, SECONDS = 1 << 20, 2.0  # of processor time
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with service(tmp_path_factory.mktemp("memory") / "store", "--no-tokens") as found:
        for path in ("/v1/stats", "/v1/entries", "/openapi.json"):
            asked(found, "GET", path)
        asked(found, "POST", "/v1/lookup", b'{"tokens": [1]}')
        yield found


def asked(running: Running, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, int]:
    """Status and bytes of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    connection.request(method, path, body, {**(JSON if method == "POST" else {}), **headers})
    answer = connection.getresponse()
    size = len(answer.read())
    connection.close()
    return answer.status, size


def peak(running: Running) -> int:
    lines = Path(f"/proc/{running.process.pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def processor_time(running: Running) -> float:
    threads = Path(f"/proc/{running.process.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def test_objects(running: Running) -> None:
    size = 48 * MB
    before, start = peak(running), processor_time(running)
    assert asked(running, "PUT", "/v1/objects/a", bytes(size))[0] == 201
    for asked_for in ({}, {"Range": "bytes=5-"}, {"Range": f"bytes={size // 2}-{size}"}, {"Range": "bytes=0-1,5-6"}):
        assert asked(running, "GET", "/v1/objects/a", **asked_for)[0] in (200, 206)
    assert peak(running) - before < 2 * size and processor_time(running) - start < 5 * SECONDS


@pytest.mark.parametrize("part", [b"{},", b"[],", b'{"a":[]},', b"[", b'{"a":'])
@pytest.mark.parametrize("path", ["explain", "lookup", "objects/sizes"])
def test_bodies_made_to_be_large_in_memory(running: Running, path: str, part: bytes) -> None:
    body = b'{"x":[' + part * (8 * MB // len(part)) + b"0]}"
    before, start = peak(running), processor_time(running)
    assert asked(running, "POST", f"/v1/{path}", body)[0] == 413
    assert peak(running) - before < 2 * len(body) and processor_time(running) - start < SECONDS


@pytest.mark.parametrize(
    ("path", "field", "one"), [("lookup", "tokens", b"1,"), ("lookup", "tokens", b"12345,"), ("objects/used", "names", b'"a",')]
)
def test_long_lists(running: Running, path: str, field: str, one: bytes) -> None:
    body = b'{"%s":[' % field.encode() + one * (8 * MB // len(one)) + one[:-1] + b"]}"
    before, start = peak(running), processor_time(running)
    assert asked(running, "POST", f"/v1/{path}", body)[0] in (200, 204, 413, 422)
    assert peak(running) - before < 16 * len(body) and processor_time(running) - start < SECONDS
