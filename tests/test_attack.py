"""Hostile files, model folders, outputs and arguments that once crashed, lied or came too late."""

import contextlib
import copy
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import blake3
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, save_prompt_cache

import kvtool
from formats.check import check
from formats.errors import IncompatibleError, LayoutError
from kvtool.cli import run
from kvtool.compare import layer_differences
from kvtool.model import LoadedModel
from kvtool.tiny import path as tiny_path
from tests.container_cases import forge, split
from tests.library import ids, saved, tiny

PROMPT = "The committee met on the second day of the month and heard the report of its treasurer."
MAIN = [sys.executable, "-c", "from kvtool.cli import main; main()"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "a.kv"
    assert run(["export", "--model", "tiny-a", "--prompt", PROMPT, "--codec", "rvq-2+2,frame=pre,sink=0,recent=0", "-o", str(path)]) == 0
    return path


def edited(source: Path, target: Path, **fields: Any) -> Path:
    """The file with manifest fields replaced and sealed again."""
    data = source.read_bytes()
    _, manifest, _ = split(data)
    manifest.update(copy.deepcopy(fields))
    target.write_bytes(forge(data, manifest=manifest))
    return target


def token_field(ids: list[int]) -> dict[str, Any]:
    return {"ids": ids, "blake3": blake3.blake3(np.array(ids, "<i4").tobytes()).hexdigest()}


# -- files


@pytest.mark.parametrize("where", ["all", "last"])
def test_token_ids_beyond_the_vocabulary_are_refused(source: Path, tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedding of such an id lies in foreign memory: it ended the process by a signal."""
    with kvtool.open(source) as archive:
        tokens = list(archive.tokens or ())
    tokens = [2**31 - 1] * len(tokens) if where == "all" else [*tokens[:-1], 5_000_000]
    path, text = edited(source, tmp_path / "h.kv", tokens=token_field(tokens)), tmp_path / "rest.txt"
    text.write_text("It was resolved that the report be printed.")
    for command in (
        ["import"],
        ["import", "--allow-mismatch"],
        ["import", "--prompt", " and"],
        ["eval", "--text", str(text), "--arms", "none"],
    ):
        assert run([command[0], str(path), "--model", "tiny-a", *command[1:]]) == 5
        assert f"holds token id {max(tokens)}, but tiny-a has ids 0 to 1023" in capsys.readouterr().err


def test_vocabulary_ends_where_the_embedding_does(tiny_a: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that was given more tokens than the model has rows."""
    monkeypatch.setattr(tiny_a.model.args, "vocab_size", 1000)
    with pytest.raises(ValueError, match="token 0 is 1001, but tiny-a has ids 0 to 999"):
        kvtool.capture(tiny_a, [1001])


def test_no_token_at_all_needs_a_prompt(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, manifest, _ = split(source.read_bytes())
    layers = [{**layer, "offset": 0, "positions": [], "k": None, "v": None} for layer in manifest["layers"]]
    path = edited(source, tmp_path / "h.kv", length=0, tokens=token_field([]), layers=layers)
    assert run(["import", str(path), "--model", "tiny-a"]) == 5
    assert "no token at all" in capsys.readouterr().err
    assert run(["import", str(path), "--model", "tiny-a", "--prompt", "The", "--max-tokens", "1"]) == 0


@pytest.mark.parametrize("shape", [[0, 2**48, 2**48], [0, *[2**48] * 31], [2**48, 0, 2**13]])
def test_empty_tensors_of_impossible_shape_are_refused(source: Path, tmp_path: Path, shape: list[int]) -> None:
    data = source.read_bytes()
    outer, manifest, tail = split(data)
    outer["z"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(tail), len(tail)]}
    digest = blake3.blake3(b"").hexdigest()
    manifest["tensors"]["z"] = {"dtype": "F32", "shape": shape, "bytes": 0, "stored": 0, "encoding": "none", "blake3": digest}
    path = tmp_path / "h.kv"
    path.write_bytes(forge(data, outer, manifest))
    problems = check(path)
    assert [p.error for p in problems] == ["LayoutError"] and "no array has the shape" in problems[0].text
    with pytest.raises(LayoutError):
        kvtool.open(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"extra": {"rope_problems": ["x"]}},
        {"extra": {"rope_problems": 3, "origin": 3}},
        {"extra": {"origin": {}}},
        {"extra": {"origin": {"name": [], "weights": 3}}},
        {"quality": [{"step": "encode", "k_relative_error": "x", "v_relative_error": [], "codec": {}}]},
    ],
    ids=str,
)
def test_records_of_any_type_are_shown(source: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    path = edited(source, tmp_path / "h.kv", **fields)
    assert run(["inspect", str(path)]) == 0 and run(["inspect", str(path), "--json"]) == 0
    assert run(["import", str(path), "--model", "tiny-a", "--max-tokens", "1"]) == 0


def test_control_characters_reach_no_terminal(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, manifest, _ = split(source.read_bytes())
    path = edited(source, tmp_path / "h.kv", model={**manifest["model"], "name": "\x1b[2J\nlayer 9\x9b", "weights": None})
    assert run(["inspect", str(path)]) == 0 and run(["import", str(path), "--model", "tiny-a"]) == 5
    captured = capsys.readouterr()
    assert not set(captured.out + captured.err) & {"\x1b", "\x9b"}
    assert "\\x1b[2J\\x0alayer 9\\x9b" in captured.out


def test_integer_state_in_place_of_a_recurrent_one(tmp_path: Path) -> None:
    """Only a window of token ids may vary in length; a tensor of integers took that way round the check of its shape."""
    data = saved(tiny("lfm2"), tmp_path / "a.kv", 24, codec="raw").read_bytes()
    outer, manifest, tail = split(data)
    layer = next(entry for entry in manifest["layers"] if entry["attention"] == "state")
    begin = len(tail)
    tail += bytes(64)
    outer["z"] = {"dtype": "I32", "shape": [16], "data_offsets": [begin, begin + 64]}
    digest = blake3.blake3(bytes(64)).hexdigest()
    manifest["tensors"]["z"] = {"dtype": "I32", "shape": [16], "bytes": 64, "stored": 64, "encoding": "none", "blake3": digest}
    layer["arrays"] = [{"dtype": "I32", "shape": [16], "tensor": "z"}]
    path = tmp_path / "h.kv"
    path.write_bytes(forge(data, outer, manifest, tail))
    with pytest.raises(IncompatibleError, match="state array 0: file I32, model"):
        kvtool.load(path, tiny("lfm2"))


@pytest.mark.parametrize("dtype", [mx.int32, mx.bool_, mx.uint8, mx.uint16])
def test_prompt_caches_of_integers_are_refused(tmp_path: Path, dtype: mx.Dtype, capsys: pytest.CaptureFixture[str]) -> None:
    caches = [KVCache() for _ in range(4)]
    for cache in caches:
        cache.keys, cache.values, cache.offset = mx.zeros((1, 2, 5, 64), dtype), mx.zeros((1, 2, 5, 64), dtype), 5
    path = tmp_path / "old.safetensors"
    save_prompt_cache(str(path), caches)
    assert run(["export", "--model", "tiny-a", "--from-cache", str(path), "-o", str(tmp_path / "x.kv")]) == 5
    assert "K dtype" in capsys.readouterr().err


def test_values_that_are_not_finite_equal_themselves(tiny_a: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = kvtool.capture(tiny_a, ids(8))
    rows = snapshot.states[0].k
    assert isinstance(rows, mx.array)
    paths = []
    for name, values in (("a", [math.nan, math.inf, 3e30]), ("b", [math.nan, math.inf, 1.0]), ("c", [0.0, math.inf, 3e30])):
        rows[0, 3, :3] = mx.array(values)
        kvtool.save(snapshot, tmp_path / f"{name}.kv")
        paths.append(str(tmp_path / f"{name}.kv"))
    a, b, c = paths
    assert run(["diff", a, a, "--values", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"]
    assert run(["diff", a, c, "--values", "--json"]) == 1
    strict = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert strict["values"][0]["relative_error"] is None and strict["values"][1]["relative_error"] == 0
    with kvtool.open(a) as x, kvtool.open(b) as y:
        assert layer_differences(x.reader, y.reader)[0]["relative_error"] == pytest.approx(1)


@pytest.mark.parametrize("theta", ["1e-300", "5e-324", "1e-3"])
def test_no_recode_writes_what_no_load_reads(source: Path, tmp_path: Path, theta: str) -> None:
    """In place it would have cost the only copy."""
    path = shutil.copy(source, tmp_path / "a.kv")
    code = run(["recode", str(path), "-o", str(path), "--rope-theta", theta])
    assert code == (2 if float(theta) < 1e-3 else 0)
    with kvtool.open(path) as archive:
        archive.state(0)


# -- model folders


def broken(folder: Path, **files: Any) -> Path:
    shutil.copytree(tiny_path("tiny-a"), folder)
    for name, content in files.items():
        target = folder / name.replace("__", ".")
        target.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


CONFIG = json.loads((tiny_path("tiny-a") / "config.json").read_text())
WEIGHTS = (tiny_path("tiny-a") / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "files",
    [
        {"model__safetensors": WEIGHTS[: len(WEIGHTS) // 2]},
        {"model__safetensors": WEIGHTS[:10]},
        {"model__safetensors": b""},
        {"config__json": [1]},
        {"config__json": [["model_type", "llama"]]},
        {"config__json": None},
        {"config__json": b"[" * 100_000},
        {"config__json": {"model_type": "llama"}},
        {"config__json": {**CONFIG, "model_type": [1]}},
        {"config__json": {**CONFIG, "num_hidden_layers": "4"}},
        {"config__json": {**CONFIG, "num_attention_heads": 0}},
        {"tokenizer_config__json": b"[]"},
    ],
    ids=lambda files: f"{next(iter(files))} {str(next(iter(files.values())))[:20]}",
)
def test_a_broken_model_folder_is_named(tmp_path: Path, files: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder = broken(tmp_path / "m", **files)
    assert run(["export", "--model", str(folder), "--prompt", "a", "-o", str(tmp_path / "x.kv")]) == 5
    assert str(folder) in capsys.readouterr().err and not (tmp_path / "x.kv").exists()


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "a/-b", "x/" + "y" * 200])
def test_a_folder_that_is_not_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "--model", name, "--prompt", "a", "-o", "x.kv"]) == 5
    assert "no such directory" in capsys.readouterr().err


def test_a_chat_template_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = broken(tmp_path / "m", chat_template__jinja=b"{{ raise_exception('no user here') }}")
    assert run(["export", "--model", str(folder), "--chat", "--prompt", "a", "-o", str(tmp_path / "x.kv")]) == 2
    assert "no user here" in capsys.readouterr().err


# -- arguments


@pytest.mark.parametrize("prompt", [[3.7], [True], ["1"], [None], [float("inf")], b"abc", mx.array([[3]]), np.array([2.5]), [[1]]], ids=str)
def test_token_ids_are_not_cast(tiny_a: LoadedModel, prompt: Any) -> None:
    with pytest.raises(TypeError, match="token ids must be"):
        kvtool.capture(tiny_a, prompt)


@pytest.mark.parametrize("prompt", [(3, 4), np.array([3, 4]), mx.array([3, 4]), [np.int64(3), mx.array(4)]], ids=str)
def test_token_ids_of_every_kind(tiny_a: LoadedModel, prompt: Any) -> None:
    assert kvtool.capture(tiny_a, prompt).tokens == (3, 4)


def test_deep_token_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("[" * 200_000)
    assert run(["export", "--model", "tiny-a", "--tokens", str(tmp_path / "t"), "-o", str(tmp_path / "x.kv")]) == 2


@pytest.mark.parametrize(
    ("target", "says"), [("nodir/x.kv", "nodir: No such"), ("y" * 300, "too long"), ("/dev/null", "not a regular file")]
)
def test_outputs_that_cannot_be_fail_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # A model that is not there would be the error if its turn came first.
    commands = [["export", "--model", "nowhere", "--prompt", "a"], ["recode", str(source), "--to-model", "nowhere"]]
    for command in commands:
        assert run([*command, "-o", target]) == 2
        assert says in capsys.readouterr().err
    assert run(["import", str(source), "--model", "nowhere", "--to", "mlx-lm", target]) == 2
    assert says in capsys.readouterr().err


# -- surroundings


def test_closed_standard_streams(source: Path, tmp_path: Path) -> None:
    """A closed stdin gives its number to the next file, which MLX could not read then."""

    def close(*numbers: int) -> Any:
        def act() -> None:
            for number in numbers:
                with contextlib.suppress(OSError):
                    os.close(number)

        return act

    codec = ["--codec", "rvq-2+2,frame=pre,sink=0,recent=0"]
    export = [*MAIN, "export", "--model", "tiny-a", "--prompt", PROMPT, *codec, "-o", str(tmp_path / "x.kv")]
    subprocess.run(export, preexec_fn=close(0, 1, 2), check=True)
    assert (tmp_path / "x.kv").read_bytes() == source.read_bytes()
    piped = [*MAIN, "export", "--model", "tiny-a", "--prompt-file", "-", "-o", str(tmp_path / "y.kv")]
    done = subprocess.run(piped, preexec_fn=close(0), stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "no stdin" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_that_the_terminal_lacks(source: Path, tmp_path: Path, encoding: str) -> None:
    path = shutil.copy(source, tmp_path / "é🙂.kv")
    for command in (["check"], ["inspect"], ["check", "--json"], ["inspect", "--json"]):
        environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict", "LC_ALL": "C.UTF-8"}
        done = subprocess.run([*MAIN, *command, str(path)], env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        if "--json" in command:
            data = json.loads(done.stdout.decode(encoding))
            assert str(path) in (data.get("path"), data.get("files", [{}])[0].get("path"))
