"""`kvtool lm-server`: mlx-lm's server whose prompt cache holds files, and keeps codes."""

import json
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
from kvtool.serving import serve

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


@pytest.fixture(scope="module")
def url(file: Path) -> Iterator[str]:
    port = free_port()
    options = ["--model", "tiny-a", "--cache", str(file), "--codec", "rvq-4", "--port", str(port)]
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
        process.terminate()
        process.communicate(timeout=30)


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
