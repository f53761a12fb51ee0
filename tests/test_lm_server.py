"""`kvtool lm-server`: mlx-lm's server whose prompt cache holds files, and keeps codes."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtool
from kvtool.capturing import prefill
from kvtool.serving import serve
from kvtool.store.behind import WAITING, Behind
from kvtool.store.store import Store

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
    with pytest.raises(ValueError, match="cannot encode rows as they come"):
        serve(kvtool.load_model("tiny-a"), [], [], codec="commvq-2")


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


def test_many_caches_at_once_are_passed_over_not_waited_for(tmp_path: Path) -> None:
    model = kvtool.load_model("tiny-a")
    behind = Behind(Store(tmp_path / "store"), model)
    ids = model.tokenizer.encode(PROMPT)
    cache = prefill(model, ids)
    for _ in range(WAITING + 3):
        behind.later(ids, cache)
    assert behind.passed_over == 3
    with behind:
        pass
    assert behind.store.lookup([*ids, 1], model) is not None


def test_a_store_that_fails_does_not_end_a_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    model = kvtool.load_model("tiny-a")
    with pytest.raises(OSError):
        Store(tmp_path / "file")
    store = Store(tmp_path / "store", quota=1000)
    ids = model.tokenizer.encode(PROMPT)
    with Behind(store, model) as behind:
        behind.later(ids, prefill(model, ids))
    assert "is not put into the store" in caplog.text and behind.found(ids, 0) is None


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
