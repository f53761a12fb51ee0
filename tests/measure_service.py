"""What the service takes: `python -m tests.measure_service [transfer|restart|coming|timing|listing]`, all by default. Medians,
on this machine.

transfer  an object of 100 MB over loopback, read by one plain socket: from the service and from nginx, the same file; and put, beside a
          bare write with fsync. Bytes a second.
restart   the first token of a prompt of 2048 tokens that a `kvtool lm-server --store` knew before it was restarted, and without the store;
          the model is loaded in both. SmolLM2 (`tests/smollm2/make.py`).
coming    until a prompt of about 100 MB in rvq-4 (SmolLM2's shapes, random rows) is ready to go on from, over loopback at 200 MB/s: fetched
          whole and then loaded, and built while it comes; from chunks of 256 and of 4096 tokens.
timing    whether the time of a tenant's look-up of a prompt that it does not have tells that another tenant has it: pairs of look-ups in
          random order, a sign test and a test of ranks over the pairs; the same of two prompts that nobody has, and, to see that the test
          finds what there is, of one whose first chunk the tenant has itself.
listing   processor time of the service, the least of several requests: /v1/stats, pages of /v1/entries and look-ups of 32 000 tokens over
          HTTP, all found and none, among 10 000 objects in a folder.
"""

import contextlib
import http.client
import json
import math
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

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import kvtool
from kvtool.bench.machine import machine
from kvtool.capturing import Snapshot
from kvtool.model import LoadedModel, load_model
from kvtool.probe import probe_model
from kvtool.service.partition import Partition
from kvtool.service.tenants import ANYONE, made, write
from kvtool.store.folder import Folder
from kvtool.store.keys import chunk_name, tail_name
from kvtool.store.local_copy import LocalCopy
from kvtool.store.served import Served
from kvtool.store.store import Store
from tests import store_servers
from tests.service_running import service
from tests.smollm2.make import models_at
from tests.texts import text

SIZE, RUNS, TOKENS = 100_000_000, 9, 2048
COMING, RATE, PAIRS = 15_872, 200e6, 1500
OBJECTS, LOOKED_UP = 10_000, 32_000
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


def turn_about(calls: dict[str, Callable[[], object]], runs: int = RUNS, before: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Median seconds of each; one after another, so that what disturbs the machine is there for all."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        before()
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def transfer(folder: Path) -> None:
    data = np.random.default_rng(1).bytes(SIZE)
    (folder / "object").write_bytes(data)
    port = store_servers.free_port()
    nginx = shutil.which("nginx")
    rates = {}

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
        gets = {"get, service": lambda: fetched(running_service.port, "/v1/objects/object")}
        with contextlib.ExitStack() as stack:
            if nginx is not None:
                (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port))
                running = stack.enter_context(store_servers.ended(subprocess.Popen([nginx, "-c", str(folder / "nginx.conf")])))
                stack.callback(running.wait)
                stack.callback(running.terminate)  # its worker would outlive it if it were killed
                store_servers.wait_for(lambda: store_servers.listens(port), "nginx")
                gets["get, nginx"] = lambda: fetched(port, "/object")
            for name, taken in turn_about(gets, 10 * RUNS).items():
                rates[name] = SIZE / taken
        head = f"PUT /v1/objects/put HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SIZE}\r\nConnection: close\r\n\r\n".encode()

        def put() -> None:
            with socket.create_connection(("127.0.0.1", running_service.port)) as sock:
                sock.sendall(head)
                sock.sendall(data)
                assert sock.recv(100).startswith(b"HTTP/1.1 201")

        for name, taken in turn_about({"put, service": put, "bare write and fsync": bare}, before=lambda: served.remove("put")).items():
            rates[name] = SIZE / taken
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


def rows(model: LoadedModel, count: int) -> Snapshot:
    """A prompt's cache without a prefill: random rows of a model's shapes."""
    rng, cache = np.random.default_rng(1), make_prompt_cache(model.model)
    for one, probe in zip(cache, probe_model(model.model), strict=True):
        assert probe.k is not None
        shape = (1, probe.k.heads, count, probe.k.dim)
        one.update_and_fetch(*(mx.array(rng.standard_normal(shape, np.float32)) for _ in "kv"))
    return kvtool.capture(model, cache=cache, tokens=[int(i) for i in rng.integers(0, 40_000, count)])


def coming(folder: Path) -> None:
    model = load_model(str(models_at()["smollm2"]))
    snapshot = rows(model, COMING)
    assert snapshot.tokens is not None
    asked = [*snapshot.tokens, 1]
    for chunk in (256, 4096):
        put = Store(Partition(Folder(folder / str(chunk)), ANYONE.folder, bytes.fromhex(ANYONE.salt)), chunk=chunk)
        size = put.put(snapshot, codec="rvq-4", model=model).bytes
        local = least_of(lambda put=put: put.load(asked, model), 3)
        with service(folder / str(chunk), "--no-tokens") as running, store_servers.Proxy(running.port) as proxy:
            proxy.rate = RATE
            taken: dict[str, list[float]] = {"fetched": [], "loaded": [], "built while it came": []}
            for run in range(RUNS):
                for way in ("whole", "coming"):
                    copies = LocalCopy(Served(f"http://127.0.0.1:{proxy.port}"), folder / f"copies-{chunk}-{run}-{way}")
                    store = Store(copies, chunk=chunk)
                    match = store.lookup(asked, model)
                    assert match is not None and match.usable == COMING
                    start = time.perf_counter()
                    if way == "whole":
                        fetched = copies.fetching([node.name for node in match.nodes])
                        assert fetched is not None
                        copies.keep(fetched)
                        copies.settle()
                        taken["fetched"].append(time.perf_counter() - start)
                    begun = time.perf_counter()
                    restored = store.load(asked, model)
                    taken["loaded" if way == "whole" else "built while it came"].append(time.perf_counter() - begun)
                    assert restored is not None and restored.usable == COMING
                    del restored
                    store.close()
                    shutil.rmtree(folder / f"copies-{chunk}-{run}-{way}")
        least = {name: min(times) for name, times in taken.items()}
        together = min(a + b for a, b in zip(taken["fetched"], taken["loaded"], strict=True))
        print(f"chunks of {chunk}: {size / 1e6:.0f} MB, {size / RATE:.2f} s on the line, {local:.2f} s to load from a folder here")
        print(f"  fetched {least['fetched']:.2f} s, then loaded {least['loaded']:.2f} s: {together:.2f} s")
        print(f"  built while it came: {least['built while it came']:.2f} s, {least['built while it came'] / together:.2f} of that")


def least_of(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def timing(folder: Path) -> None:
    (ana, _), (bob, token) = made("ana"), made("bob")
    write(folder / "tenants.json", [ana, bob])
    model, rng = load_model("tiny-a"), np.random.default_rng(2)
    prompts = [[int(i) for i in rng.integers(0, 500, 256 * 8 + 1)] for _ in range(3)]
    snapshot = kvtool.capture(model, prompts[0])
    own = [int(i) for i in rng.integers(0, 500, 256 * 8)]
    prompts.append([*own[:256], *prompts[1][256:]])
    for tenant, tokens in ((ana, prompts[0]), (bob, own)):
        store = Store(Partition(Folder(folder / "store"), tenant.folder, bytes.fromhex(tenant.salt)))
        store.put(snapshot if tenant is ana else kvtool.capture(model, tokens), codec="rvq-4", model=model)
    bodies = [json.dumps({"tokens": tokens}).encode() for tokens in prompts]
    with service(folder / "store", "--tenants", str(folder / "tenants.json")) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port)

        def asked(body: bytes) -> float:
            start = time.perf_counter()
            connection.request("POST", "/v1/lookup", body, {"Authorization": f"Bearer {token}", "Content-Type": "application/json"})
            connection.getresponse().read()
            return time.perf_counter() - start

        compared = {"another tenant has one of the two": (0, 1), "nobody has either": (2, 1), "the tenant has some of one": (3, 1)}
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}
        for i in range(PAIRS):
            for name, (a, b) in compared.items():
                first = asked(bodies[a]) if rng.random() < 0.5 else None
                second = asked(bodies[b])
                pairs[name].append((asked(bodies[a]) if first is None else first, second))
            if i == 20:
                pairs = {name: [] for name in pairs}  # warm
    for name, both in pairs.items():
        a, b = np.array(both).T
        longer = int((a > b).sum())
        sign = 2 * (1 - normal(abs(longer - len(a) / 2) / (len(a) / 4) ** 0.5))
        order = np.argsort(np.argsort(np.concatenate([a, b]))) + 1.0
        n = len(a)
        ranks = (order[:n].sum() - n * (2 * n + 1) / 2) / (n * n * (2 * n + 1) / 12) ** 0.5
        print(f"{name}: medians {1e3 * np.median(a):.3f} and {1e3 * np.median(b):.3f} ms, the first longer in {longer} of {n} pairs")
        print(f"  sign test p = {sign:.3f}, ranks p = {2 * (1 - normal(abs(ranks))):.3f}")


def listing(folder: Path) -> None:
    model, rng = load_model("tiny-a"), np.random.default_rng(3)
    objects = Partition(Folder(folder / "store", durable=False), ANYONE.folder, bytes.fromhex(ANYONE.salt))
    store = Store(objects)
    store.put(kvtool.capture(model, [int(i) for i in rng.integers(0, 500, 40)]), codec="rvq-4", model=model)
    (space,), (made,) = store.known.spaces(), store.entries()
    data = objects.read(made.name)
    known = [int(i) for i in rng.integers(0, 500, LOOKED_UP)]
    chain = [space.key, *space.keys(known)]
    for i, key in enumerate(chain[1:]):
        objects.write(chunk_name(key, chain[i], i * space.chunk, space.chunk), b"rows")
    for i in range((OBJECTS - len(chain)) // 10):  # other prompts, of nine chunks and an end
        ids = [i, *known[: 9 * space.chunk + 9]]
        chain = [space.key, *space.keys(ids)]
        for j, key in enumerate(chain[1:]):
            objects.write(chunk_name(key, chain[j], j * space.chunk, space.chunk), data)
        objects.write(tail_name(chain[-1], ids[9 * space.chunk :], 9 * space.chunk, 9, space.secret), data)
    with service(folder / "store", "--no-tokens") as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port)

        def asked(method: str, path: str, body: bytes | None = None) -> dict:
            connection.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200
            return json.loads(answer.read())

        stats = asked("GET", "/v1/stats")
        print(f"{sum(kind['objects'] for kind in stats['kinds'].values())} objects, {stats['bytes'] / 1e6:.0f} MB")
        none = [known[1], known[0], *known[2:]]
        assert asked("POST", "/v1/lookup", json.dumps({"tokens": known}).encode())["found"][0]["tokens"] == LOOKED_UP
        requests: dict[str, tuple[str, str, bytes | None]] = {
            "stats": ("GET", "/v1/stats", None),
            "entries, the first 50": ("GET", "/v1/entries?limit=50", None),
            "entries, 50 further on": ("GET", "/v1/entries?limit=50&skip=5000", None),
            f"look-up of {LOOKED_UP}, all found": ("POST", "/v1/lookup", json.dumps({"tokens": known}).encode()),
            f"look-up of {LOOKED_UP}, none": ("POST", "/v1/lookup", json.dumps({"tokens": none}).encode()),
        }
        for name, request in requests.items():
            taken, walls = [], []
            for _ in range(12):
                before, start = processor_time(running.process.pid), time.perf_counter()
                asked(*request)
                walls.append(time.perf_counter() - start)
                taken.append(processor_time(running.process.pid) - before)
            times = f"{1e3 * min(walls):.1f} ms at the clock, {1e3 * min(taken):.1f} ms of processor time"
            print(f"{name:30} {times}")


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process has taken, all threads, to the scheduler's nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def normal(x: float) -> float:
    """The normal distribution's share below x."""
    return 0.5 * (1 + math.erf(x / 2**0.5))


def main(wanted: list[str]) -> None:
    about = machine()
    print(f"{about['date']} {about['processor']}, {about['cores']} cores, load {about['load'][0]}")
    kvtool.use_openblas()
    for name, run in {"transfer": transfer, "restart": restart, "coming": coming, "timing": timing, "listing": listing}.items():
        if not wanted or name in wanted:
            print(f"-- {name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="kvtool-measure-") as folder:
                run(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
