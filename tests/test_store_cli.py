"""`kvtool store`, `export --store` and `import --store`: exit codes, JSON, and that a prompt is run once."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from formats.container import open_container
from kvtool.cli import run
from kvtool.cli._common import Size

WORDS = "The committee met on the second day of the month and heard the report of its treasurer. "
PROMPT = WORDS * 20
MODEL = ["--model", "tiny-a"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one prompt, coded by rvq-4."""
    where = tmp_path_factory.mktemp("cli") / "prompts"
    assert run(["export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", str(where)]) == 0
    return where


def out(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    got = run([*arguments, "--json"])
    captured = capsys.readouterr()
    assert got == code, captured.err
    return json.loads(captured.out) if captured.out else {"error": captured.err}


def listed(capsys: pytest.CaptureFixture[str], where: Path) -> list[dict[str, Any]]:
    return out(capsys, "store", "ls", str(where), "--chunks")["entries"]


def test_export_twice_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "s"
    first = out(capsys, "export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", str(where))
    again = out(capsys, "export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", str(where))
    assert first["new"] == first["chunks"] + 1 == len(listed(capsys, where)) and (again["new"], again["bytes"]) == (0, 0)
    assert again["id"] == first["id"] and first["tokens"] == first["prompt_tokens"] and first["whole"] is None
    stats = out(capsys, "store", "stats", str(where))
    assert stats["bytes"] == sum(file.stat().st_size for file in where.rglob("*") if file.is_file())


def test_import_runs_what_is_not_there_and_puts_it(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = PROMPT + WORDS * 15
    arguments = ["import", "--store", str(prompts), *MODEL, "--max-tokens", "4", "--prompt"]
    kept = out(capsys, *arguments, longer, "--no-put")
    assert kept["put"] is None and kept["usable_tokens"] > 256
    first = out(capsys, *arguments, longer)
    assert first["usable_tokens"] % 256 == 0 and first["put"]["new"] > 0 and first["prefilled_tokens"] > 0
    second = out(capsys, *arguments, longer)
    assert second["prefilled_tokens"] == 0 and second["put"] is None and second["generated_tokens"] == 4
    assert first["usable_tokens"] + first["prefilled_tokens"] == second["usable_tokens"]
    # The text is the one of a plain file's cache of these very codes.
    output = tmp_path / "a.kv"
    found = out(capsys, "store", "get", str(prompts), *MODEL, "--prompt", longer, "-o", str(output))
    assert found["tokens"] == second["usable_tokens"] and found["codec"].startswith("rvq-4")
    assert run(["check", str(output)]) == 0


def test_codec_and_error_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command that puts, loads or lists, in text and in JSON: the errors that the files record."""
    where, single = str(tmp_path / "s"), tmp_path / "a.kv"
    assert run(["export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "-o", str(single)]) == 0
    with open_container(single) as reader:
        want = reader.manifest.quality[0]
    put = ["export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", where]
    new = out(capsys, *put)
    again = out(capsys, *put)  # of which nothing is written: what its end's file says
    got = out(capsys, "store", "get", where, *MODEL, "--prompt", PROMPT, "-o", str(tmp_path / "b.kv"))
    back = out(capsys, "import", "--store", where, *MODEL, "--prompt", PROMPT + WORDS, "--max-tokens", "1", "--no-put")
    entries = listed(capsys, Path(where))
    assert len(entries) == new["chunks"] + 1
    for found in (new, again, got, back, *entries):
        assert found["codec"].startswith("rvq-4") and [step["step"] for step in found["quality"]] == ["encode"]
        for role in ("k", "v"):
            assert found["quality"][0][f"{role}_relative_error"] == pytest.approx(want[f"{role}_relative_error"], rel=0.1)
    (end,) = (entry["quality"][0] for entry in entries if entry["kind"] == "tail")
    assert new["quality"] == got["quality"] and again["quality"][0]["k_relative_error"] == end["k_relative_error"]
    for command in (put, ["store", "get", where, *MODEL, "--prompt", PROMPT, "-o", str(tmp_path / "b.kv")], ["store", "ls", where]):
        capsys.readouterr()
        assert run(command) == 0
        assert re.search(r"rvq-4.*keys 0\.00[0-9]+, values 0\.0", capsys.readouterr().out, re.DOTALL)
    capsys.readouterr()
    assert run(["import", "--store", where, *MODEL, "--prompt", PROMPT + WORDS, "--max-tokens", "1", "--no-put"]) == 0
    said = capsys.readouterr().err
    assert "error / energy: keys 0.00" in said and f"from {where} (rvq-4)" in said


def test_chunks_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path / "s")
    put = out(capsys, "export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", where, "--chunk", "64")
    assert put["chunks"] == put["tokens"] // 64
    back = ["import", "--store", where, *MODEL, "--prompt", PROMPT + WORDS, "--max-tokens", "1", "--no-put"]
    assert out(capsys, *back)["usable_tokens"] >= put["chunks"] * 64 > 512  # of chunks of 256 tokens it would be 512
    assert out(capsys, *back, "--codec", "rvq-4", "--chunk", "64")["usable_tokens"] >= put["chunks"] * 64
    assert out(capsys, *back, "--codec", "rvq-4")["usable_tokens"] == 0
    assert "recent must be at most a chunk of 16" in out(capsys, *put_of(where), "--chunk", "16", code=2)["error"]
    single = str(tmp_path / "a.kv")
    assert run(["export", *MODEL, "--prompt", PROMPT, "-o", single]) == 0
    assert out(capsys, "store", "put", where, single, *MODEL, "--chunk", "128")["chunks"] == put["tokens"] // 128
    assert run(["export", *MODEL, "--prompt", PROMPT, "-o", single, "--chunk", "64"]) == 2


def put_of(where: str) -> list[str]:
    return ["export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", where]


def test_import_exact_gives_the_text_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "s"
    texts = []
    for _ in range(2):
        got = out(capsys, "import", "--store", str(where), *MODEL, "--prompt", PROMPT, "--codec", "raw", "--max-tokens", "8")
        texts.append(got["text"])
    assert got["prefilled_tokens"] == 0
    assert run(["export", *MODEL, "--prompt", PROMPT, "-o", str(tmp_path / "a.kv")]) == 0
    assert [out(capsys, "import", str(tmp_path / "a.kv"), *MODEL, "--max-tokens", "8")["text"]] * 2 == texts


def test_put_takes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", *MODEL, "--prompt", PROMPT, "-o", str(tmp_path / "a.kv")]) == 0
    put = out(capsys, "store", "put", str(tmp_path / "s"), str(tmp_path / "a.kv"), *MODEL, "--codec", "raw")
    exported = out(capsys, "export", *MODEL, "--prompt", PROMPT, "--store", str(tmp_path / "s"))
    assert put["id"] == exported["id"] and exported["new"] == 0
    found = out(capsys, "store", "get", str(tmp_path / "s"), *MODEL, "--prompt", PROMPT, "-o", str(tmp_path / "b.kv"))
    assert found["tokens"] == put["tokens"]
    assert run(["diff", str(tmp_path / "a.kv"), str(tmp_path / "b.kv"), "--values"]) in (0, 1)
    assert out(capsys, "import", str(tmp_path / "a.kv"), *MODEL)["text"] == out(capsys, "import", str(tmp_path / "b.kv"), *MODEL)["text"]


def test_pin_rm_and_gc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "s"
    made = out(capsys, "export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", str(where))["id"]
    assert out(capsys, "store", "pin", str(where), made[:8])["pinned"] == [made]
    assert [entry["pinned"] for entry in listed(capsys, where) if entry["id"] == made] == [True]
    assert "pinned" in out(capsys, "store", "rm", str(where), made[:8], code=5)["error"]
    out(capsys, "export", *MODEL, "--prompt", "Another. " * 90, "--codec", "rvq-4", "--store", str(where))
    before = out(capsys, "store", "stats", str(where))["bytes"]
    assert out(capsys, "store", "gc", str(where), "--quota", "1")["bytes"] < before
    left = listed(capsys, where)
    assert [entry["id"] for entry in left if entry["kind"] == "tail"] == [made] and len(left) == 3
    assert out(capsys, "store", "unpin", str(where), made[:8])["unpinned"] == [made]
    assert out(capsys, "store", "rm", str(where), made[:8])["freed_bytes"] > 0
    assert listed(capsys, where) == []
    assert "0 objects" in out(capsys, "store", "rm", str(where), made[:8], code=5)["error"]


def test_check_exits_with_1_where_a_byte_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "s"
    assert run(["export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", str(where)]) == 0
    sound = out(capsys, "store", "check", str(where))
    assert sound["sound"] and sound["problems"] == []
    path = next(where.glob("objects/chunks/*/*.kv"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    found = out(capsys, "store", "check", str(where), code=1)
    assert not found["sound"] and [problem["name"] for problem in found["problems"]] == [str(path.relative_to(where / "objects"))]
    # The next import works all the same, and puts the store right.
    got = out(capsys, "import", "--store", str(where), *MODEL, "--prompt", PROMPT, "--max-tokens", "1")
    assert got["prefilled_tokens"] > 0 and "damaged" in " ".join(got["notes"])
    out(capsys, "export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", str(where))
    assert out(capsys, "store", "check", str(where))["sound"]


def test_text_output_says_the_same(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for command in (["ls"], ["ls", "--chunks"], ["stats"], ["check"], ["gc"]):
        assert run(["store", command[0], str(prompts), *command[1:]]) == 0
        assert capsys.readouterr().out.startswith(f"{prompts}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", *MODEL, "--prompt", "x"],
        ["export", *MODEL, "--prompt", "x", "--store", "s", "-o", "a.kv"],
        ["export", *MODEL, "--prompt", "x", "-o", "a.kv", "--quota", "1GB"],
        ["export", *MODEL, "--prompt", "x", "--store", "s", "--quota", "much"],
        ["import", *MODEL, "--prompt", "x"],
        ["import", *MODEL, "--store", "s"],
        ["import", *MODEL, "--store", "s", "--prompt", "x", "--live", "rvq-4"],
        ["store", "get", "s", *MODEL, "-o", "a.kv"],
        ["store", "rm", "s"],
        ["store", "nothing"],
    ],
)
def test_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert list(tmp_path.iterdir()) == []


def test_nothing_found_is_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s").mkdir()
    got = out(capsys, "store", "get", str(tmp_path / "s"), *MODEL, "--prompt", "x", "-o", str(tmp_path / "a.kv"), code=5)
    assert "holds no beginning of these" in got["error"] and not (tmp_path / "a.kv").exists()


@pytest.mark.parametrize("command", ["ls", "stats", "check", "gc", "rm x", "pin x", "unpin x", "get --model tiny-a --prompt x -o a.kv"])
def test_a_folder_that_is_not_there_is_no_empty_store(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *more = command.split()
    (tmp_path / "file").touch()
    for where, said in ((tmp_path / "nowhere", "there is none"), (tmp_path / "file", "it is a file")):
        assert run(["store", name, str(where), *more]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("10GB", 10**10), ("1.5 kib", 1536), ("2g", 2 * 10**9), ("3TiB", 3 * 2**40), ("0", None), ("-1", None), ("1xb", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(Exception, match="is no size such as"):
            Size().convert(text, None, None)
    else:
        assert Size().convert(text, None, None) == size


def test_a_damaged_space_is_one_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "s"
    assert run(["export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", str(where)]) == 0
    assert run(["store", "ls", str(where)]) == 0 and "1 prompt, " in capsys.readouterr().out
    space = next(where.glob("objects/spaces/*.json"))
    space.write_bytes(space.read_bytes()[:-9])
    for arguments in (
        ["store", "ls", str(where)],
        ["import", "--store", str(where), *MODEL, "--prompt", PROMPT, "--max-tokens", "1", "--no-put"],
    ):
        assert run(arguments) == 0
        said = capsys.readouterr().err
        assert [line for line in said.splitlines() if space.name in line and line.startswith("note: ")] and said.count(space.name) <= 2
        assert "kvtool.store" not in said
        lines = [line for line in said.splitlines() if line.startswith("note: ")]
        assert len(set(lines)) == len(lines)
    assert run(["store", "check", str(where)]) == 1 and f"{where}: 1 problem, " in capsys.readouterr().out


def test_what_is_logged_and_noted_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "s"
    assert run(["export", *MODEL, "--prompt", PROMPT, "--codec", "rvq-4", "--store", str(where)]) == 0
    path = next(where.glob("objects/chunks/*/*.kv"))
    path.write_bytes(path.read_bytes()[:-9])
    capsys.readouterr()
    assert run(["import", "--store", str(where), *MODEL, "--prompt", PROMPT, "--max-tokens", "1"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if "damaged" in line]) == 1 and all(line.startswith("note: ") for line in said[:-1])


def test_an_encrypted_store_is_named_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    where, key = tmp_path / "s", tmp_path / "key"
    assert run(["store", "keygen", str(key)]) == 0
    monkeypatch.setenv("KVTOOL_STORE_KEY", str(key))
    assert run(["export", *MODEL, "--prompt", "one two", "--store", str(where)]) == 0
    monkeypatch.delenv("KVTOOL_STORE_KEY")
    capsys.readouterr()
    assert run(["store", "ls", str(where)]) == 5
    assert f"error: {where}: the store is encrypted" in capsys.readouterr().err
