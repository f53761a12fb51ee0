"""README and help texts say what is true: commands parse, options exist, code runs, tables match the code."""

import re
import shlex
from pathlib import Path

import click
import pytest

from formats import errors
from kvtool.cli import COMMANDS, group
from veloxquant_mlx.codecs import CODECS, parse_codec

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> dict[str, click.Command]:
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in COMMANDS}
    whole = {name: command for name, command in found.items() if command is not None}
    # Of a group, such as store, each of its own.
    groups = {name: command for name, command in whole.items() if isinstance(command, click.Group)}
    return whole | {f"{name} {inner}": command for name, outer in groups.items() for inner, command in outer.commands.items()}


def examples() -> list[str]:
    """Every `kvtool ...` line of the README's code blocks and of the help texts."""
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", README, re.S)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    helps = [line.strip() for command in [group, *commands().values()] for line in (command.help or "").splitlines()]
    return [line for line in [*lines, *helps] if line.startswith("kvtool ")]


@pytest.mark.parametrize("line", sorted(set(examples())))
def test_example_parses(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each documented command line is one the parser takes, with files in place of those it names."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    for word in words:
        if re.fullmatch(r"[\w./-]+\.(kv|txt|json|safetensors)", word):
            (tmp_path / word).touch()
    name = words[0]
    command = commands()[name]
    command.make_context(name, words[1:])


def test_there_are_examples_of_every_command() -> None:
    lines = [line + " " for line in examples()]
    assert {line.split()[1] for line in lines} == set(COMMANDS)
    assert all(any(line.startswith(f"kvtool {name} ") for line in lines) for name in commands())


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_has_an_example(name: str) -> None:
    command = commands()[name]
    assert command.help is not None and "Example:" in command.help and f"kvtool {name}" in command.help
    # Servers and a key that is made report nothing, and of a group each command by itself.
    reports = name not in ("lm-server", "serve", "store keygen") and not isinstance(command, click.Group)
    assert not reports or any("--json" in p.opts for p in command.params), f"{name} has no --json"
    undocumented = [p.name for p in command.params if isinstance(p, click.Option) and not p.help and p.metavar is None]
    assert not undocumented


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library examples of the README run as they stand, one after the other, and leave a cache and a store behind."""
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(compile(code, "README.md", "exec"), scope)
    assert scope["found"].usable >= 256 and scope["rest"]
    assert (tmp_path / "prompt.kv").stat().st_size > 0
    assert scope["restored"].usable == len(scope["restored"].tokens) and scope["restored"].cache[0].offset == scope["restored"].usable


def test_readme_exit_codes_are_the_errors() -> None:
    table = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.*?) \|$", README, re.M)}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.KVError) and c is not errors.KVError]
    assert {c.exit_code for c in classes} <= set(table)
    assert {3, 4, 5, 6, 7} <= {c.exit_code for c in classes}
    assert {0, 1, 2, 130} <= set(table)


def test_readme_codecs_exist() -> None:
    section = README.split("## Codecs", 1)[1].split("\n## ", 1)[0]
    for spec in ("raw", "rvq-2+2", "rvq-4", "rabitq", "k=rabitq,v=rvq-2+2,sink=4,recent=32,frame=pre"):
        parse_codec(spec)
    assert all(f"`{codec}" in section for codec in CODECS)


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_nothing_speaks_of_one_machine() -> None:
    """No absolute path of somebody's machine, and no tool outside this project, is named in what is committed."""
    pattern = re.compile(r"/(?:work|farm|root|home)/[\w.]|(?<!\w)\.library\b")
    found = []
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT)
        if path.suffix in {".py", ".md", ".toml", ".sh", ".txt"} and not any(
            (part.startswith(".") and part != ".ci") or part in ("build", "dist") for part in inside.parts
        ):
            found += [f"{inside}: {m.group()}" for m in pattern.finditer(path.read_text(encoding="utf-8")) if inside.name != "test_docs.py"]
    assert not found
