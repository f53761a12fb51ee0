"""What the service takes: `python -m tests.measure_service [transfer|restart]`, both by default. Medians, on this machine.

transfer  an object of 100 MB over loopback, read by one plain socket: from the service and from nginx, the same file; and put, beside a
          bare write with fsync. Bytes a second.
restart   the first token of a prompt of 2048 tokens that a `kvtool lm-server --store` knew before it was restarted, and without the store;
          the model is loaded in both. SmolLM2 (`tests/smollm2/make.py`).
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtool.bench.machine import machine
from kvtool.store.served import Served
from tests import store_servers
from tests.service_running import service
from tests.smollm2.make import models_at
from tests.texts import text

SIZE, RUNS, TOKENS = 100_000_000, 9, 2048
NGINX = """
worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log; daemon off; user root;
events {{}}
http {{ sendfile on; tcp_nopush on; access_log off; server {{ listen 127.0.0.1:{port}; root {folder}; }} }}
"""


def fetched(port: int, path: str, token: str = "") -> int:
    """Bytes of an answer, read and dropped."""
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n".encode())
        total = 0
        while count := sock.recv_into(buffer):
            total += count
    return total


def median(call: Callable[[], object]) -> float:
    """Seconds of a call, the middle of RUNS after one that does not count."""
    call()
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def transfer(folder: Path) -> None:
    data = np.random.default_rng(1).bytes(SIZE)
    (folder / "object").write_bytes(data)
    port = store_servers.free_port()
    nginx = shutil.which("nginx")
    rates = {}
    if nginx is not None:
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port))
        with store_servers.ended(subprocess.Popen([nginx, "-c", str(folder / "nginx.conf")])) as running:
            store_servers.wait_for(lambda: store_servers.listens(port), "nginx")
            assert fetched(port, "/object") > SIZE
            rates["get, nginx"] = SIZE / median(lambda: fetched(port, "/object"))
            running.terminate()
            running.wait()

    def bare() -> None:
        path = folder / "bare"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)
        path.unlink()

    with service(folder / "store", "--no-tokens") as running_service:
        served = Served(running_service.address)
        served.write("object", data)
        assert served.read("object") == data
        rates["get, service"] = SIZE / median(lambda: fetched(running_service.port, "/v1/objects/object"))
        head = f"PUT /v1/objects/put HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SIZE}\r\nConnection: close\r\n\r\n".encode()

        def put() -> None:
            with socket.create_connection(("127.0.0.1", running_service.port)) as sock:
                sock.sendall(head)
                sock.sendall(data)
                assert sock.recv(100).startswith(b"HTTP/1.1 201")

        # Turn about, so that a busy disk is busy for both.
        puts, bares = [], []
        for _ in range(RUNS):
            served.remove("put")
            for call, taken in ((put, puts), (bare, bares)):
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
        rates["put, service"] = SIZE / statistics.median(puts)
        rates["bare write and fsync"] = SIZE / statistics.median(bares)
    for name, rate in rates.items():
        print(f"{name:24} {rate / 1e9:.2f} GB/s")
    if "get, nginx" in rates:
        print(f"get / nginx              {rates['get, service'] / rates['get, nginx']:.2f}   at least 0.5 is asked for")
    print(f"put / bare write         {rates['put, service'] / rates['bare write and fsync']:.2f}   at least 0.6 is asked for")


def restart(folder: Path) -> None:
    model = str(models_at()["smollm2"])
    words = (text("technical") * 10)[:20_000]

    def lm_server(*more: str) -> tuple[subprocess.Popen, int]:
        port = store_servers.free_port()
        command = [sys.executable, "-m", "kvtool", "lm-server", "--model", model, *more, "--port", str(port)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        store_servers.wait_for(lambda: store_servers.listens(port), "lm-server", 120)
        return process, port

    def first_token(port: int, prompt: str) -> tuple[float, dict]:
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        start = time.perf_counter()
        with urllib.request.urlopen(request) as answer:
            usage = json.load(answer)["usage"]
        return time.perf_counter() - start, usage

    def measured(prompt: str, *more: str) -> tuple[float, dict]:
        """Of a server that has just started, and has answered another prompt, so that the model is in memory."""
        process, port = lm_server(*more)
        with store_servers.ended(process):
            first_token(port, "Hello")
            found = first_token(port, prompt)
            process.terminate()
            process.wait(120)
        return found

    store = ("--store", str(folder / "store"))
    prompt = words
    process, port = lm_server()
    with store_servers.ended(process):
        # As many characters as give about TOKENS tokens.
        _, usage = first_token(port, words[:2000])
        prompt = words[: round(2000 * TOKENS / usage["prompt_tokens"])]
    measured(prompt, *store)
    known, usage = measured(prompt, *store)
    unknown, without = measured(prompt)
    print(f"prompt of {usage['prompt_tokens']} tokens, {usage['prompt_tokens_details']['cached_tokens']} from the store")
    assert without["prompt_tokens_details"]["cached_tokens"] == 0
    print(f"first token after a restart: {known:.2f} s with the store, {unknown:.2f} s without, ratio {known / unknown:.3f} (must be 0.1)")


def main(wanted: list[str]) -> None:
    about = machine()
    print(f"{about['date']} {about['processor']}, {about['cores']} cores, load {about['load'][0]}")
    for name, run in {"transfer": transfer, "restart": restart}.items():
        if not wanted or name in wanted:
            print(f"-- {name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="kvtool-measure-") as folder:
                run(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
