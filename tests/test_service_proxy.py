"""A service behind nginx: TLS ends there, a prefix of the path is taken away, and the log names who asked."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import urllib3

from kvtool.service import tenants as tenants_file
from kvtool.service.tenants import made
from kvtool.store.served import Served
from tests import store_servers
from tests.service_running import Running, service
from tests.test_service_process import make_certificate

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
ANA, ANAS = made("ana")
CONFIGURATION = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/log; {user}
events {{}}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    server {{
        listen 127.0.0.1:{port} ssl; ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
        location /kv/ {{
            proxy_pass http://127.0.0.1:{target}/; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_set_header X-Forwarded-For 203.0.113.7; client_max_body_size 0; proxy_request_buffering off; proxy_buffering off;
        }}
    }}
}}
"""


@pytest.fixture
def proxied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[tuple[str, Running]]:
    """An address, and the service behind it."""
    certificate, _ = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tenants_file.write(tmp_path / "tenants.json", [ANA])
    how = getattr(request, "param", ("--tenants", str(tmp_path / "tenants.json")))
    port = store_servers.free_port()
    with service(tmp_path / "store", *how) as running:
        user = "user root;" if Path("/root").exists() and tmp_path.owner() == "root" else ""
        (tmp_path / "conf").write_text(CONFIGURATION.format(folder=tmp_path, port=port, target=running.port, user=user))
        assert NGINX is not None
        with store_servers.ended(subprocess.Popen([NGINX, "-c", str(tmp_path / "conf"), "-e", str(tmp_path / "log")])) as nginx:
            store_servers.wait_for(lambda: store_servers.listens(port), "nginx")
            yield f"https://127.0.0.1:{port}/kv", running
            nginx.terminate()
            nginx.wait(10)


def test_a_store_behind_a_proxy(proxied: tuple[str, Running]) -> None:
    address, running = proxied
    served, data = Served(address, ANAS), bytes(range(256)) * 20_000
    assert served.name_key == bytes.fromhex(ANA.salt)
    assert served.write("a/b", data) and not served.write("a/b", data)
    assert served.read("a/b") == data and served.read("a/b", 1000, 77) == data[1000:1077] and served.size("a/b") == len(data)
    assert [entry.name for entry in served.names("a/")] == ["a/b"] and served.sizes(["a/b", "c"]) == [len(data), None]
    with pytest.raises(PermissionError):
        Served(address, "kvt_wrong").size("a/b")
    # The page asks for what is beside it, wherever that is.
    page = urllib3.PoolManager(ca_certs=os.environ["SSL_CERT_FILE"]).request("GET", f"{address}/")
    assert page.status == 200 and b'ask("v1/stats")' in page.data and b'fetch("/' not in page.data
    assert served.remove("a/b")
    deadline = time.monotonic() + 10
    while not (lines := [json.loads(line) for line in running.said if line.startswith("{") and "DELETE" in line]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert lines[0]["client"] == "203.0.113.7" and lines[0]["path"] == "/v1/objects/a/b"


@pytest.mark.parametrize("proxied", [("--no-tokens",)], indirect=True)
def test_a_service_without_tokens_is_not_opened_by_a_proxy(proxied: tuple[str, Running]) -> None:
    address, running = proxied
    with pytest.raises(PermissionError, match="a proxy stands before"):
        Served(address).write("a", b"x")
    assert Served(running.address).write("a", b"x")
