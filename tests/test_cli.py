"""The command line: results on stdout, remarks on stderr, exit codes by kind of error, JSON as an interface."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from formats.container import open_container
from kvtool.cli import run
from kvtool.model import load_model
from kvtool.tiny import path
from veloxquant_mlx.selftest import run as selftest_run

MODULE = [sys.executable, "-m", "kvtool"]
PROMPT = "The committee met on the second day of the month and heard the report of its treasurer. " * 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A raw and a lossy file of one prompt."""
    folder = tmp_path_factory.mktemp("files")
    found = {}
    for name, codec in (("raw", "raw"), ("rvq", "rvq-2+2,sink=4,recent=16")):
        found[name] = folder / f"{name}.kv"
        assert run(["export", "--model", "tiny-a", "--prompt", PROMPT, "--codec", codec, "-o", str(found[name])]) == 0
    return found


def out_json(capsys: pytest.CaptureFixture[str], code: int, expected: int = 0) -> dict:
    captured = capsys.readouterr()
    assert code == expected, captured.err
    return json.loads(captured.out)


def test_export_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "a.kv"
    code = run(["export", "--model", "tiny-a", "--prompt", PROMPT, "--codec", "rvq-4", "--json", "-o", str(target)])
    data = out_json(capsys, code)
    assert data["path"] == str(target) and data["codec"].startswith("rvq-4")
    assert data["file_bytes"] == target.stat().st_size
    assert 0 < data["quality"]["k_relative_error"] < 0.05 and 0 < data["quality"]["v_relative_error"] < 0.05
    assert data["tokens"] == data["prompt_tokens"]


def test_export_reads_stdin_and_files(tmp_path: Path, files: dict[str, Path]) -> None:
    """The same prompt gives the same bytes however it comes in."""
    source = tmp_path / "prompt.txt"
    source.write_text(PROMPT)
    assert run(["export", "--model", "tiny-a", "--prompt-file", str(source), "-o", str(tmp_path / "file.kv")]) == 0
    command = [sys.executable, "-c", "from kvtool.cli import main; main()"]
    piped = [*command, "export", "--model", "tiny-a", "--prompt-file", "-", "-o", str(tmp_path / "stdin.kv")]
    subprocess.run(piped, input=PROMPT.encode(), check=True, capture_output=True)
    want = files["raw"].read_bytes()
    assert (tmp_path / "file.kv").read_bytes() == want
    assert (tmp_path / "stdin.kv").read_bytes() == want


def test_export_takes_token_ids(tmp_path: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with_ids = tmp_path / "ids.json"
    ids = inspect_ids(files["raw"])
    with_ids.write_text(json.dumps(ids))
    assert run(["export", "--model", "tiny-a", "--tokens", str(with_ids), "-o", str(tmp_path / "ids.kv")]) == 0
    assert (tmp_path / "ids.kv").read_bytes() == files["raw"].read_bytes()
    with_ids.write_text(" ".join(map(str, [*ids, 10**6])))
    capsys.readouterr()
    assert run(["export", "--model", "tiny-a", "--tokens", str(with_ids), "-o", str(tmp_path / "bad.kv")]) == 2
    assert "1000000" in capsys.readouterr().err and not (tmp_path / "bad.kv").exists()


def inspect_ids(path: Path) -> list[int]:
    with open_container(path) as reader:
        assert reader.manifest.tokens is not None
        return list(reader.manifest.tokens.ids)


def test_import_streams_text(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(files["raw"]), "--model", "tiny-a", "--max-tokens", "12"]) == 0
    streamed = capsys.readouterr()
    assert streamed.out.strip() and "tokens from" in streamed.err
    code = run(["import", str(files["raw"]), "--model", "tiny-a", "--max-tokens", "12", "--json"])
    data = out_json(capsys, code)
    assert data["text"].strip() == streamed.out.strip()
    assert data["usable_tokens"] == len(inspect_ids(files["raw"])) and data["generated_tokens"] <= 12


def test_import_with_prompt_equals_one_prompt(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cached prompt and its continuation give what the two give in one piece."""
    suffix = inspect_ids(files["raw"])[:7]
    whole = [*inspect_ids(files["raw"]), *suffix]
    joined = tmp_path / "whole.json"
    joined.write_text(json.dumps(whole))
    assert run(["export", "--model", "tiny-a", "--tokens", str(joined), "-o", str(tmp_path / "whole.kv")]) == 0
    text = load_model("tiny-a").tokenizer.decode(suffix)
    capsys.readouterr()
    one = out_json(capsys, run(["import", str(tmp_path / "whole.kv"), "--model", "tiny-a", "--max-tokens", "8", "--json"]))
    two = out_json(capsys, run(["import", str(files["raw"]), "--model", "tiny-a", "--prompt", text, "--max-tokens", "8", "--json"]))
    assert one["text"] == two["text"]


def test_import_to_mlx_lm(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The written file is taken by mlx_lm.generate's own loader, and back by export --from-cache, byte for byte."""
    target, ids = tmp_path / "out.safetensors", tmp_path / "ids.json"
    data = out_json(capsys, run(["import", str(files["raw"]), "--model", "tiny-a", "--to", "mlx-lm", str(target), "--json"]))
    assert data["file_bytes"] == target.stat().st_size
    ids.write_text(json.dumps(inspect_ids(files["raw"])))
    assert run(["export", "--model", "tiny-a", "--from-cache", str(target), "--tokens", str(ids), "-o", str(tmp_path / "back.kv")]) == 0
    assert (tmp_path / "back.kv").read_bytes() == files["raw"].read_bytes()


def test_mlx_lm_generate_takes_the_file(files: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    model = str(path("tiny-a"))
    assert run(["import", str(files["raw"]), "--model", model, "--to", "mlx-lm", str(target)]) == 0
    command = [
        sys.executable,
        "-m",
        "mlx_lm",
        "generate",
        "--model",
        model,
        "--prompt-cache-file",
        str(target),
        "--prompt",
        "and",
        "--max-tokens",
        "4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr


def test_the_file_for_mlx_lm_names_a_model_that_mlx_lm_finds(files: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    assert run(["import", str(files["raw"]), "--model", "tiny-a", "--to", "mlx-lm", str(target)]) == 0
    assert load_prompt_cache(str(target), return_metadata=True)[1]["model"] == str(path("tiny-a"))
    assert run(["import", str(files["raw"]), "--model", "tiny-a", "--to", "mlx-lm", str(tmp_path / "b.safetensors"), "--prompt", "a"]) == 2
    assert not (tmp_path / "b.safetensors").exists()


def test_a_prompt_cache_of_another_model_is_refused(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tiny-a's cache fits tiny-b's shapes, and mlx-lm's file names the model that computed it."""
    target, export = str(tmp_path / "out.safetensors"), ["export", "-o", str(tmp_path / "x.kv"), "--from-cache"]
    assert run(["import", str(files["raw"]), "--model", "tiny-a", "--to", "mlx-lm", target]) == 0
    assert run([*export, target, "--model", "tiny-b"]) == 5
    assert "weights are not those of tiny-b" in capsys.readouterr().err and not (tmp_path / "x.kv").exists()
    named = str(tmp_path / "named.safetensors")
    save_prompt_cache(named, load_prompt_cache(target), {"model": "org/elsewhere"})
    assert run([*export, named, "--model", "tiny-a"]) == 0
    assert "org/elsewhere" in capsys.readouterr().err


def test_the_hint_names_a_model_by_what_loads_it(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models" / "mine"
    shutil.copytree(path("tiny-b"), folder)
    assert run(["import", str(files["raw"]), "--model", str(folder)]) == 5
    assert f"--to-model {folder}" in capsys.readouterr().err


def test_ids_may_hold_the_token_that_a_cache_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ids of a prompt whose last token is still to be run go with its cache file; other counts are refused as of another cache."""
    cached = list(load_model("tiny-a").tokenizer.encode(PROMPT))
    target, listed = tmp_path / "c.safetensors", tmp_path / "ids.json"
    assert run(["export", "--model", "tiny-a", "--prompt", PROMPT, "-o", str(tmp_path / "a.kv")]) == 0
    assert run(["import", str(tmp_path / "a.kv"), "--model", "tiny-a", "--to", "mlx-lm", str(target)]) == 0
    back = ["export", "--model", "tiny-a", "--from-cache", str(target), "--tokens", str(listed), "-o", str(tmp_path / "b.kv")]
    for ids, code in (([*cached, 5], 0), (cached[:-1], 5), ([*cached, 5, 5], 5)):
        listed.write_text(json.dumps(ids))
        assert run(back) == code
    assert "hint: give the ids of exactly the tokens in the cache" in capsys.readouterr().err


def test_inspect_check_diff(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    data = out_json(capsys, run(["inspect", str(files["rvq"]), "--json"]))
    assert data["file_bytes"] == files["rvq"].stat().st_size and data["usable_tokens"] == data["tokens"]
    assert data["quality"][0]["step"] == "encode" and "rvq-2+2" in data["quality"][0]["codec"]
    assert data["layers"][0]["k"]["segments"][0]["rows"] == [0, 4]
    assert run(["inspect", str(files["rvq"])]) == 0
    text = capsys.readouterr().out
    assert "rvq" in text and "tiny-a" in text
    assert out_json(capsys, run(["check", str(files["rvq"]), str(files["raw"]), "--json"]))["sound"]
    assert out_json(capsys, run(["diff", str(files["raw"]), str(files["raw"]), "--values", "--json"]))["same"]
    differ = out_json(capsys, run(["diff", str(files["raw"]), str(files["rvq"]), "--values", "--json"]), expected=1)
    assert not differ["same"] and all(0 < v["relative_error"] < 0.1 for v in differ["values"])
    assert run(["diff", str(files["rvq"]), str(files["raw"])]) == 1
    text = capsys.readouterr().out
    assert "characters)" in text and max(map(len, text.splitlines())) < 400


def test_check_names_the_defect(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(files["rvq"].read_bytes())
    data[-70] ^= 1
    broken, cut, other = tmp_path / "flip.kv", tmp_path / "cut.kv", tmp_path / "other.kv"
    broken.write_bytes(data)
    cut.write_bytes(files["rvq"].read_bytes()[:-64])
    other.write_text("not a container")
    report = out_json(capsys, run(["check", str(broken), "--json"]), expected=4)
    assert report["files"][0]["problems"][0]["error"] == "DigestError"
    assert out_json(capsys, run(["check", str(cut), "--json"]), expected=3)["files"][0]["problems"][0]["error"] == "TruncatedError"
    assert run(["check", str(files["raw"]), str(other)]) == 3
    assert run(["check", str(broken), str(other)]) == 1
    for command in (["inspect", str(other)], ["import", str(other), "--model", "tiny-a"]):
        assert run(command) == 3
    assert run(["import", str(broken), "--model", "tiny-a"]) == 4
    assert "Traceback" not in capsys.readouterr().err


def test_check_and_inspect_need_no_mlx(files: dict[str, Path]) -> None:
    script = "import sys; sys.modules['mlx'] = None; sys.modules['mlx.core'] = None; from kvtool.cli import main; main()"
    for command in ("check", "inspect"):
        done = subprocess.run([sys.executable, "-c", script, command, str(files["rvq"])], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_without_mlx_the_back_end_is_said_to_be_absent(tmp_path: Path) -> None:
    """An installation without the extra that brings MLX: exit code 6 and where to look, no traceback."""
    script = "import sys; sys.modules['mlx'] = None; from kvtool.cli import main; main()"
    command = [sys.executable, "-c", script, "export", "--model", "tiny-a", "--prompt", "a", "-o", str(tmp_path / "a.kv")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 6 and "kvtool doctor" in done.stderr and "Traceback" not in done.stderr


def test_doctor_where_mlx_lacks_its_back_end(tmp_path: Path) -> None:
    """The front end alone (`pip install mlx` on Linux) cannot be imported: back end none, what to install, and no hint to ask doctor."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*MODULE, "doctor"], capture_output=True, text=True, env=environment)
    assert done.returncode == 6 and not done.stderr
    assert re.search(r"^back end +none$", done.stdout, re.M)
    assert "libmlx.so" in done.stdout and "pip install" in done.stdout and "kvtool doctor" not in done.stdout
    done = subprocess.run(
        [*MODULE, "export", "--model", "tiny-a", "--prompt", "a", "-o", "x.kv"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 6 and "kvtool doctor" in done.stderr


@pytest.mark.parametrize("command", [["--help"], ["inspect", "FILE"], ["check", "FILE"], ["import", "FILE", "--model", "tiny-a"]])
def test_a_reader_that_goes_away(command: list[str], files: dict[str, Path]) -> None:
    """128 + SIGPIPE, as of any other program in a pipe: not 0, for `check` had more to say, and not 1, which means problems."""
    read, write = os.pipe()
    os.close(read)
    args = [str(files["raw"]) if word == "FILE" else word for word in command]
    done = subprocess.run([*MODULE, *args], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141 and not done.stderr
    # Where errors have no reader either.
    read, write = os.pipe()
    os.close(read)
    assert subprocess.run([*MODULE, "inspect", "missing.kv"], stderr=write).returncode == 141
    os.close(write)


def test_a_prompt_cache_file_is_named_with_what_takes_it(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint is a command of the parser, and it works once its placeholders are filled in."""
    cache, ids, out = tmp_path / "c.safetensors", tmp_path / "ids.json", tmp_path / "back.kv"
    assert run(["import", str(files["raw"]), "--model", "tiny-a", "--to", "mlx-lm", str(cache)]) == 0
    capsys.readouterr()
    for command in (["inspect", str(cache)], ["import", str(cache), "--model", "tiny-a"]):
        assert run(command) == 3
        (hint,) = re.findall(r"^hint: kvtool (.*)$", capsys.readouterr().err, re.M)
    assert hint == "export --from-cache FILE --tokens IDS --model M -o OUT.kv"
    ids.write_text(json.dumps(inspect_ids(files["raw"])))
    filled = {"FILE": str(cache), "IDS": str(ids), "M": "tiny-a", "OUT.kv": str(out)}
    assert run([filled.get(word, word) for word in shlex.split(hint)]) == 0
    assert out.read_bytes() == files["raw"].read_bytes()


def test_hints_quote_what_a_shell_would_split(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hints, pasted into a shell, name the same file and model, whatever is in their names."""
    source, model = tmp_path / "my $HOME; 'file'.kv", tmp_path / "the model"
    shutil.copy(files["raw"], source)
    shutil.copytree(path("tiny-b"), model)
    assert run(["import", str(source), "--model", str(model)]) == 5
    (hint,) = re.findall(r"^hint: (.*)$", capsys.readouterr().err, re.M)
    assert shlex.split(hint) == ["kvtool", "recode", str(source), "-o", "OUT.kv", "--to-model", str(model)]
    assert run(["recode", str(source), "-o", str(source), "--shift", "3"]) == 0
    capsys.readouterr()
    assert run(["import", str(source), "--model", "tiny-a"]) == 5
    (hint,) = re.findall(r"^hint: (.*)$", capsys.readouterr().err, re.M)
    assert shlex.split(hint) == ["kvtool", "recode", str(source), "-o", "OUT.kv", "--shift", "-3"]


@pytest.mark.parametrize("target", ["/dev/null", "pipe"])
def test_a_target_that_is_no_file_gets_the_true_reason(
    target: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for command in (
        ["recode", str(files["raw"]), "--shift", "1", "-o"],
        ["import", str(files["raw"]), "--model", "tiny-a", "--to", "mlx-lm"],
    ):
        assert run([*command, target]) == 2
        error = capsys.readouterr().err
        assert "not a regular file" in error and "hint: a file is written whole and then renamed" in error and "space" not in error


def test_a_folder_that_takes_no_file_is_found_out_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after a fit or a calibration of many minutes. Root may write anywhere, so the system's answer is set."""
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    monkeypatch.setattr("kvtool.model.load_model", lambda *args, **more: pytest.fail("the work was begun"))
    out = str(tmp_path / "out")
    for args in (["fit", "tiny-a", "tiny-b"], ["calibrate", "--model", "tiny-a"], ["export", "--model", "tiny-a", "--prompt", "x"]):
        assert run([*args, "-o", out]) == 2
        assert capsys.readouterr().err.startswith(f"error: {out}: Permission denied")


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "warm"])
def test_temperatures_that_are_none(value: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(files["raw"]), "--model", "tiny-a", "--temperature", value]) == 2
    assert "--temperature" in capsys.readouterr().err
    assert run(["import", "--help"]) == 0
    assert "--temperature T " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "--model", "tiny-a", "--prompt", "a", "-o", "-"],
        ["import", "FILE", "--model", "tiny-a", "--to", "mlx-lm", "-"],
        ["recode", "FILE", "--codec", "rvq-2", "-o", "-"],
        ["join", "FILE", "FILE", "--model", "tiny-a", "-o", "-"],
        ["fit", "tiny-a", "tiny-b", "-o", "-"],
        ["profile", "tiny-a", "tiny-b", "-o", "-"],
        ["calibrate", "--model", "tiny-a", "-o", "-"],
        ["store", "get", "s", "--model", "tiny-a", "--prompt", "a", "-o", "-"],
        ["store", "keygen", "-"],
        ["tenants", "add", "ana", "--file", "-"],
        ["bench", "--csv", "-"],
        ["bench", "--plot", "-"],
        ["eval", "sweep", "--csv", "-"],
        ["eval", "sweep", "--plot", "-"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]) + " " + arguments[-2],
)
def test_no_command_writes_a_file_called_minus(
    arguments: list[str], files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([str(files["raw"]) if argument == "FILE" else argument for argument in arguments]) == 2
    assert "nothing is written to stdout" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_demo_says_what_its_shares_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, wide in (("float32", True), ("bfloat16", False)):
        assert run(["demo", "--tokens", "64", "--dtype", dtype]) == 0
        text = capsys.readouterr().out
        assert "share: of the cache at 16 bits a value" in text and ("float32 here" in text) == wide


def test_wrong_model_is_refused_with_the_remedy(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(files["rvq"]), "--model", "tiny-b"]) == 5
    error = capsys.readouterr().err
    assert "weights" in error and "hint: kvtool recode" in error
    moved = tmp_path / "b.kv"
    assert run(["recode", str(files["rvq"]), "-o", str(moved), "--to-model", "tiny-b", "--json"]) == 0
    capsys.readouterr()
    assert out_json(capsys, run(["import", str(moved), "--model", "tiny-b", "--max-tokens", "4", "--json"]))["generated_tokens"] == 4


def test_eval_json(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = tmp_path / "rest.txt"
    rest.write_text("It was resolved that the report be printed and laid before the members at their next meeting. " * 3)
    data = out_json(capsys, run(["eval", str(files["rvq"]), "--model", "tiny-a", "--text", str(rest), "--n", "40", "--json"]))
    arms = {arm["arm"]: arm for arm in data["arms"]}
    assert set(arms) == {"own", "transferred", "none"} and data["n"] == 40
    assert arms["own"]["kl"] == 0 and arms["own"]["top1"] == 1
    assert 0 < arms["transferred"]["kl"] < arms["none"]["kl"]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    data = out_json(capsys, run(["doctor", "--json"]))
    assert data["backend"] != "none" and data["packages"]["mlx"] and data["packages"]["kvtool"]


@pytest.mark.parametrize(
    "args",
    [
        ["export", "--model", "tiny-a", "-o", "x.kv"],
        ["export", "--model", "tiny-a", "--prompt", "a", "--prompt-file", "b", "-o", "x.kv"],
        ["export", "--model", "tiny-a", "--prompt", "a", "--codec", "nonsense", "-o", "x.kv"],
        ["export", "--model", "tiny-a", "--prompt", "", "-o", "x.kv"],
        ["export", "--model", "tiny-a", "--prompt", "a", "--sink", "-1", "-o", "x.kv"],
        ["export", "--model", "tiny-a", "--prompt-file", "missing.txt", "-o", "x.kv"],
        ["import", "missing.kv", "--model", "tiny-a"],
        ["export", "--model", "", "--prompt", "a", "-o", "x.kv"],
        ["demo", "--model", ""],
        ["inspect", "missing.kv"],
        ["check", "missing.kv"],
        ["check"],
        ["nonsense"],
        ["recode", "missing.kv", "-o", "x.kv", "--shift", "1"],
    ],
)
def test_usage_errors(args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(args) == 2
    captured = capsys.readouterr()
    assert captured.err and not captured.out and "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


def test_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "--model", str(tmp_path / "nowhere"), "--prompt", "a", "-o", str(tmp_path / "x.kv")]) == 5
    assert "no such directory" in capsys.readouterr().err
    assert run(["export", "--model", "./nowhere", "--prompt", "a", "-o", str(tmp_path / "x.kv")]) == 5
    assert "no such directory" in capsys.readouterr().err
    assert run(["export", "--model", str(tmp_path), "--prompt", "a", "-o", str(tmp_path / "x.kv")]) == 5
    assert "config.json" in capsys.readouterr().err
    # What is wrong in a folder of one's own is said by its place, and needs no download.
    for text, place in (
        ('{"a": 1,\n "b" 2}', "line 2, column 6"),
        ("[1]", "holds a list"),
        ("\ufeff{}", "line 1, column 1"),
        ("", "line 1, column 1"),
    ):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        assert run(["export", "--model", str(tmp_path), "--prompt", "a", "-o", str(tmp_path / "x.kv")]) == 5
        told = capsys.readouterr().err
        assert str(tmp_path / "config.json") in told and place in told and "hint: correct it, or copy it again" in told


def test_traceback_only_with_vv(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-vv", "import", str(files["rvq"]), "--model", "tiny-b"]) == 5
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_leaves_the_old_file(tmp_path: Path) -> None:
    """Ctrl-C during an export: exit code 130, the old file whole, no temporary left."""
    target, prompt = tmp_path / "out.kv", tmp_path / "prompt.txt"
    target.write_bytes(b"old")
    # Long enough that no machine is done with it when the signal comes.
    prompt.write_text(PROMPT * 400)
    command = [
        sys.executable,
        "-c",
        # A shell that starts jobs in the background hands SIGINT down ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from kvtool.cli import main; main()",
        "-v",
        "export",
        "--model",
        "tiny-a",
        "--prompt-file",
        str(prompt),
        "-o",
        str(target),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    # The log line after the model is loaded: prefill has begun or is about to.
    try:
        while "runs in" not in (line := process.stderr.readline()):
            assert line, "the command ended before its model was loaded"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert target.read_bytes() == b"old" and sorted(p.name for p in tmp_path.iterdir()) == ["out.kv", "prompt.txt"]


def test_selftest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case passes here, as many as must; a kernel that gives wrong numbers is named and makes the command fail."""
    data = out_json(capsys, run(["selftest", "--json"]))
    assert data["passed"] == data["expected"] > 800 and not data["failures"] and len(data["functions"]) == 29
    natively = {row["function"] for row in data["functions"] if row["native"]}
    assert natively >= {row["function"] for row in data["functions"] if row["runs_on"].startswith("native")}
    wrong = attempt_wrongly
    monkeypatch.setattr(selftest_run, "attempt", wrong)
    data = out_json(capsys, run(["selftest", "--function", "qjl_encode", "--json"]), expected=1)
    assert len(data["failures"]) == data["expected"] and data["failures"][0]["problem"] == "planted"
    assert run(["selftest", "--function", "nonsense"]) == 2


def attempt_wrongly(case: object) -> str:
    return "planted"
