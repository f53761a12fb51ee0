"""`kvtool lm-server`: mlx-lm's server whose prompt cache holds files, and keeps codes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import server

import kvtool
from kvtool.capturing import prefill
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from kvtool.serving import serve, stoppable
from kvtool.store.behind import Behind
from kvtool.store.store import Store
from veloxquant_mlx.caches.coded import CodedKVCache

PROMPT = "Once upon a time there was a cache. " + "The agents read it again. " * 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "a.kv"
    kvtool.save(kvtool.capture(kvtool.load_model("tiny-a"), PROMPT), path, codec="rvq-4")
    return path


@contextlib.contextmanager
def serving(*more: str, stop: signal.Signals = signal.SIGTERM) -> Iterator[str]:
    """Context manager: the address of a server of tiny-a, stopped as a service manager or a terminal stops it, which ends it cleanly."""
    port = free_port()
    options = ["--model", "tiny-a", *more, "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-m", "kvtool", "lm-server", *options], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(240):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
            except OSError:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                time.sleep(0.25)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(stop)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said


@pytest.fixture(scope="module")
def url(file: Path) -> Iterator[str]:
    with serving("--cache", str(file), "--codec", "rvq-4") as address:
        yield address


def complete(url: str, prompt: str) -> dict:
    body = json.dumps({"prompt": prompt, "max_tokens": 6}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)


def test_a_request_goes_on_from_the_file(url: str, file: Path) -> None:
    model = kvtool.load_model("tiny-a")
    with kvtool.open(file) as archive:
        held = archive.length
    answer = complete(url, PROMPT + "And then")
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= held - 1 > 300
    assert answer["choices"][0]["text"] != ""
    # The same again: what the server cached itself, as codes, begins with the file's.
    again = complete(url, PROMPT + "And then")
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    assert len(model.tokenizer.encode(PROMPT)) >= held


def test_the_files_own_prompt_and_none_at_all_do_not_end_the_server(url: str, file: Path) -> None:
    """mlx-lm's thread dies of a request that leaves nothing to run."""
    with kvtool.open(file) as archive:
        held = archive.length
    exact = complete(url, PROMPT)
    assert exact["usage"]["prompt_tokens_details"]["cached_tokens"] == exact["usage"]["prompt_tokens"] - 1 >= held - 1
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(url, "")
    assert "no tokens" in refused.value.read().decode()
    assert complete(url, PROMPT[: len(PROMPT) // 2])["usage"]["prompt_tokens_details"]["cached_tokens"] > held // 3


def test_the_file_stays_however_many_prompts_come(url: str, file: Path) -> None:
    with kvtool.open(file) as archive:
        held = archive.length
    for i in range(12):
        complete(url, f"{i} is a number, and {i + 1} is another")
    assert complete(url, PROMPT + "And now")["usage"]["prompt_tokens_details"]["cached_tokens"] >= held - 1


def test_another_prompt_is_not_the_files(url: str) -> None:
    assert complete(url, "Hello there, this is")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "other",
    [
        {"model": "tiny-b"},
        {"model": str(Path(kvtool.__file__).parent / "tiny" / "tiny-a"), "adapters": "x"},
        {"adapters": "x"},
        {"draft_model": "tiny-b"},
    ],
)
def test_a_request_for_another_model_is_not_answered_by_this_one(url: str, other: dict[str, str]) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 2, **other}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=30):
        pass
    assert b"is served here" in caught.value.read()


def test_the_model_that_is_served_is_the_one_listed(url: str) -> None:
    """Without a hub's cache the answer had no body."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        listed = json.load(answer)["data"]
    assert [one["id"] for one in listed] == [str(kvtool.load_model("tiny-a").folder.resolve())]


def test_a_port_in_use_ends_the_server_with_an_error(file: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        options = ["--model", "tiny-a", "--cache", str(file), "--port", str(s.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-m", "kvtool", "lm-server", *options], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 1 and "error:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--model", "--kv-bits", "--adapter-path=x", "--draft-model"])
def test_options_that_do_not_go_with_it_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option.partition("=")[0]):
        serve(kvtool.load_model("tiny-a"), [], [option, "8"])


def test_a_codec_that_cannot_grow_is_refused_before_anything_starts() -> None:
    options = ["--model", "tiny-a", "--codec", "commvq-2"]
    done = subprocess.run([sys.executable, "-m", "kvtool", "lm-server", *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "cannot encode rows as they come" in done.stderr


def test_the_model_is_left_as_it_is() -> None:
    """A probe of it finds the model's own caches while the server makes coded ones: stores and files are compared with those."""
    model = kvtool.load_model("tiny-a")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "main", lambda: found.extend((server.make_prompt_cache(model.model), probe_model(model.model))))
        serve(model, [], [], empty=kvtool.make_cache(model, "rvq-4"))
    assert {type(one) for one in found[0]} == {CodedKVCache} and {probe.cls for probe in found[1]} == {"KVCache"}


# --- with a store


def cached(answer: dict) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_restarted_server_knows_its_prompts(tmp_path: Path) -> None:
    """The prompt itself but for its last token, and whole chunks of what begins alike; then its continuation too."""
    store = ("--store", str(tmp_path / "store"))
    with serving(*store) as address:
        first = complete(address, PROMPT)
        assert cached(first) == 0
    total = first["usage"]["prompt_tokens"]
    with serving(*store) as address:
        again = complete(address, PROMPT)
        assert cached(again) == total - 1
        assert cached(complete(address, PROMPT + " The agents went home, and one said: it was")) >= total // 256 * 256
        assert cached(complete(address, "Something else altogether")) == 0
    longer = PROMPT + " The agents went home, and one said: it was"
    with serving(*store) as address:
        assert cached(complete(address, longer)) >= total + 5
    with Store(tmp_path / "store") as kept:
        assert not kept.check().problems and len(kept.entries()) > 3


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_answered_ends_cleanly(stop: signal.Signals) -> None:
    """A thread that had run the model aborted five of six; a store that is written meanwhile hides it. `serving` has the exit code."""
    for _ in range(3):
        with serving(stop=stop) as address:
            complete(address, "Hello there")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_comes_while_something_is_finalised_is_one(number: signal.Signals) -> None:
    """Python prints an exception that is raised then, and goes on."""

    class Doomed:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    class Server(ThreadingHTTPServer):
        def service_actions(self) -> None:
            Doomed()

    with stoppable(Server)(("127.0.0.1", 0), BaseHTTPRequestHandler) as httpd:
        given_up = threading.Timer(10, httpd.shutdown)
        given_up.start()
        httpd.serve_forever(0.01)
        assert given_up.is_alive()
        given_up.cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_comes_before_it_serves_leaves_no_thread(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an exception it came out of the making of the thread, which ran on, and the process with it."""
    begun: list[Any] = []

    class Early(server.ResponseGenerator):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begun.append(self)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(server, "ResponseGenerator", Early)
    try:
        with pytest.warns(UserWarning, match="not recommended for production"):
            serve(kvtool.load_model("tiny-a"), [], ["--port", str(free_port())])
        assert not begun[0]._generation_thread.is_alive()
    finally:
        begun[0]._stop = True


@pytest.mark.parametrize("stored", ["rvq-4", "raw"])
def test_live_codes_and_a_store(tmp_path: Path, stored: str) -> None:
    """Both at once, over a restart; rows from the store, and those that join them, are codes in memory."""
    both = ("--store", str(tmp_path / "store"), "--store-codec", stored, "--codec", "rvq-4")
    with serving(*both) as address:
        first = complete(address, PROMPT)
    with serving(*both) as address:
        again = complete(address, PROMPT)
    assert cached(first) == 0 and cached(again) == first["usage"]["prompt_tokens"] - 1
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    model = kvtool.load_model("tiny-a")
    ids = [*model.tokenizer.encode(PROMPT), 5]
    with Store(tmp_path / "store") as store, Behind(store, model, stored, empty=kvtool.make_cache(model, "rvq-4")) as behind:
        found = behind.found(ids, 0)
    assert found is not None and found[1] == len(ids) - 1
    exact = sum(one.nbytes for one in prefill(model, ids[:-1]))
    for cache in found[0]:
        assert isinstance(cache, CodedKVCache) and cache.specs() == {"k=rvq-4,v=rvq-4"} and cache.growth.k.spec("k") == "rvq-4"
    assert sum(one.nbytes for one in found[0]) < 0.6 * exact


class Slow(Store):
    """A store whose disk takes its time, or stands still."""

    seconds = 0.0

    def put(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.seconds)
        return super().put(*args, **kwargs)


def answers(model: LoadedModel, count: int, length: int = 60) -> Iterator[tuple[list[int], list[Any]]]:
    """Prompts of which none begins another, and their caches."""
    for i in range(count):
        ids = [10 + i, *range(5, 4 + length)]
        yield ids, prefill(model, ids)


def test_every_finished_prompt_is_in_the_store_at_the_end(tmp_path: Path) -> None:
    """More than the room that waiting caches have: a request waits for the disk, and nothing is passed over."""
    model, store = kvtool.load_model("tiny-a"), Slow(tmp_path / "store", chunk=32)
    store.seconds = 0.02
    given = list(answers(model, 12))
    most = 3 * sum(one.nbytes for one in given[0][1])
    held = []
    with Behind(store, model, waiting=most) as behind:
        for ids, cache in given:
            behind.found([*ids[:40]], 0)
            behind.later(ids, cache)
            held.append(sum(entry.bytes for entry in behind._entries))
    assert behind.lost == 0 and 0 < max(held) <= most
    for ids, _ in given:
        for end in (40, len(ids)):
            match = store.lookup([*ids[:end], 1], model)
            assert match is not None and match.usable == end


def test_a_cache_that_goes_on_takes_the_place_of_the_one_that_waits(tmp_path: Path) -> None:
    """A conversation of many turns behind a slow disk holds one cache, and all of its ends are found."""
    model, ids = kvtool.load_model("tiny-a"), list(range(5, 105))
    behind = Behind(Store(tmp_path / "store", chunk=32), model)
    for end in (50, 60, 80, 100):
        behind.later(ids[:end], prefill(model, ids[:end]))
    assert [(len(entry.tokens), entry.ends) for entry in behind._entries] == [(100, [50, 60, 80, 100])]
    with behind:
        pass
    for end in (50, 60, 80, 100):
        match = behind.store.lookup([*ids[:end], 1], model)
        assert match is not None and match.usable == end


def test_a_store_that_stands_still_is_waited_for_once_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, store = kvtool.load_model("tiny-a"), Slow(tmp_path / "store", chunk=32)
    store.seconds = 2.5
    given = list(answers(model, 6))
    start = time.monotonic()
    with Behind(store, model, waiting=1, patience=0.3, last=0.2) as behind:
        for ids, cache in given:
            behind.later(ids, cache)
        assert 0.3 <= time.monotonic() - start < 1.5
    assert time.monotonic() - start < 2.5
    assert behind.lost == 6 and caplog.text.count("is passed over") == 1
    assert "6 prompts of this run are not in the store, 1 of them" in caplog.text
    behind._thread.join()


def test_a_store_that_fails_does_not_end_a_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    model = kvtool.load_model("tiny-a")
    with pytest.raises(OSError):
        Store(tmp_path / "file")
    store = Store(tmp_path / "store", quota=1000)
    ids = model.tokenizer.encode(PROMPT)
    with Behind(store, model) as behind:
        for first in (1, 2, 3):
            behind.later([first, *ids], prefill(model, [first, *ids]))
    assert caplog.text.count("is not put into the store") == 1 and behind.lost == 3 and behind.found(ids, 0) is None


def test_a_prompt_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = kvtool.load_model("tiny-a"), list(range(5, 400))
    with Store(tmp_path / "s", chunk=64) as store:
        store.put(kvtool.capture(model, ids), codec="rvq-4")
        behind, lookups = Behind(store, model), []
        real = kvtool.store.store.matches
        monkeypatch.setattr("kvtool.store.store.matches", lambda *a, **k: lookups.append(1) or real(*a, **k))
        found = behind.found([*ids, 1], 0)
        assert found is not None and found[1] == len(ids) and len(lookups) == 1
        # What memory has as much of is left where it is.
        assert behind.found([*ids, 1], len(ids)) is None and len(lookups) == 2
        assert store.counts["hits"] == 1 and store.counts["misses"] == 0
