"""`kvtool serve` as a process: connections that break, TLS, where it cannot listen, and its end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

import kvtool
from kvtool.cli import run
from kvtool.service import tenants as tenants_file
from kvtool.service.tenants import made
from kvtool.store.key_files import make_key
from kvtool.store.served import Served
from kvtool.store.store import Store
from tests import store_servers
from tests.library import ids, tiny
from tests.service_running import service

ANA, ANAS = made("ana")
BOB, BOBS = made("bob", ["read", "operate"])


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("service")
    tenants_file.write(folder / "tenants.json", [ANA, BOB])
    with service(folder / "store", "--tenants", str(folder / "tenants.json")) as found:
        yield found, folder


def raw(port: int, head: str, body: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
    return sock


def test_a_client_that_goes_away_leaves_nothing(running: tuple[Any, Path]) -> None:
    found, folder = running
    sock = raw(
        found.port,
        f"PUT /v1/objects/gone HTTP/1.1\nHost: localhost\nAuthorization: Bearer {ANAS}\nContent-Length: 1000000\n",
        b"x" * 500_000,
    )
    deadline = time.monotonic() + 10
    while not files(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert files(folder), "the body was never received"
    sock.close()
    while files(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not files(folder)
    while not any("/v1/objects/gone" in line for line in found.said) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    assert not any("Traceback" in line for line in found.said), "".join(found.said)


def test_a_body_longer_than_its_length_is_no_second_request(running: tuple[Any, Path]) -> None:
    found, _ = running
    head = f"PUT /v1/objects/short HTTP/1.1\nHost: localhost\nAuthorization: Bearer {ANAS}\nContent-Length: 3\nConnection: close\n"
    with raw(found.port, head, b"abcdef") as sock:
        answer = b""
        while data := sock.recv(1 << 16):
            answer += data
    assert answer.startswith(b"HTTP/1.1 201") and answer.count(b"HTTP/1.1") == 1
    assert Served(found.address, ANAS).read("short") == b"abc"
    Served(found.address, ANAS).remove("short")


def test_the_next_run_without_tenants_has_the_objects_of_the_one_before(tmp_path: Path) -> None:
    for _ in range(2):
        with service(tmp_path / "store") as run:
            (token,) = [line.split()[-1] for line in run.said if "the token of this run" in line]
            served = Served(run.address, token)
            held = served.size("a")
            served.write("a", b"1")
            served.close()
    assert held == 1


def test_where_it_cannot_listen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = ["serve", "--store", str(tmp_path / "s"), "--no-tokens", "--port", str(taken.getsockname()[1])]
        assert run(arguments) == 1
    assert "cannot listen at 127.0.0.1" in capsys.readouterr().err
    (tmp_path / "x.pem").touch()
    assert run([*arguments, "--tls-cert", str(tmp_path / "x.pem"), "--tls-key", str(tmp_path / "x.pem")]) == 2
    assert "x.pem" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_lets_requests_end(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM or ^C while an object is sent: it is sent to its end, and the process ends by itself."""
    data = os.urandom(30_000_000)
    with service(tmp_path / "store", "--no-tokens") as found:
        Served(found.address).write("big", data)
        with raw(found.port, "GET /v1/objects/big HTTP/1.1\nHost: localhost\n") as sock:
            got = sock.recv(1000)
            found.process.send_signal(number)
            time.sleep(0.3)
            while len(got) < len(data) and (more := sock.recv(1 << 20)):
                got += more
        assert got.endswith(data[-1000:])
        assert found.process.wait(20) == 0


@pytest.mark.parametrize("where", ["encrypted", "redis"])
def test_objects_that_are_no_files_of_its_own(where: str, tmp_path: Path) -> None:
    """Copies of them were asked for, which are of kvtool files alone: no prompt was found. Another key is refused when it starts."""
    tenants_file.write(tmp_path / "tenants.json", [ANA])
    with contextlib.ExitStack() as stack:
        store, environment = str(tmp_path / "store"), {"KVTOOL_CACHE": str(tmp_path / "cache")}
        if where == "redis":
            if not store_servers.HAVE_REDIS:
                pytest.skip("no redis-server, or redis is not installed")
            store = f"redis://127.0.0.1:{stack.enter_context(store_servers.redis_server(tmp_path / 'redis'))}"
        else:
            pytest.importorskip("cryptography", reason="cryptography is not installed")
            for name in ("key", "another"):
                make_key(tmp_path / name)
            environment["KVTOOL_STORE_KEY"] = str(tmp_path / "key")
        arguments = ["--tenants", str(tmp_path / "tenants.json")]
        with service(store, *arguments, environment=environment) as found:
            objects = Served(found.address, ANAS)
            with Store(objects, chunk=64) as kept:
                kept.put(kvtool.capture(tiny("qwen3"), ids(200)), codec="raw")
                assert (loaded := kept.load([*ids(200), 1], tiny("qwen3"))) is not None and loaded.usable == 200
                assert not kept.check().problems
            data = os.urandom(3_000_000)
            objects.write("else/a", data)
            assert objects.read("else/a") == data and objects.read("else/a", 2_000_000, 7) == data[2_000_000:2_000_007]
    if where == "encrypted":
        command = [sys.executable, "-m", "kvtool", "serve", "--store", store, "--port", "0", *arguments]
        for key, said in (("another", "encrypted with key"), ("", "the store is encrypted")):
            whole = {**os.environ, "KVTOOL_STORE_KEY": str(tmp_path / key) if key else ""}
            done = subprocess.run(command, capture_output=True, text=True, env=whole, timeout=60, check=False)
            assert done.returncode == 5 and said in done.stderr, done.stderr


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path)
    with service(tmp_path / "store", "--no-tokens", "--tls-cert", str(certificate), "--tls-key", str(key)) as found:
        assert found.address.startswith("https://")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert Served(found.address).write("a", b"x") and Served(found.address).read("a") == b"x"
        served, large = Served(found.address), os.urandom(9_000_000)
        assert served.write("b", large) and served.write("c", large) and served.read("b") == large == served.read("c")
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ConnectionError, match="certificate"):
            Served(found.address).size("a")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    x509 = pytest.importorskip("cryptography.x509", reason="the extra encryption is not installed")
    hashes, serialization, ec = (
        import_module(f"cryptography.hazmat.primitives.{name}") for name in ("hashes", "serialization", "asymmetric.ec")
    )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - timedelta(1), now + timedelta(1))
    alternatives = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = builder.add_extension(alternatives, False).sign(key, hashes.SHA256())
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return folder / "cert.pem", folder / "key.pem"
