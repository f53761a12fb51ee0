"""`kvtool check`: is every byte of a file what was written? Reads only; needs no MLX."""

import click

from formats.check import check
from kvtool.cli._common import emit, json_option


@click.command("check")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@json_option
@click.pass_context
def command(ctx: click.Context, paths: tuple[str, ...], as_json: bool) -> None:
    """Check files: header, layout, every digest, padding, token ids. Reads only; needs no MLX.

    The exit code is 0 for sound files, else that of the worst problem's kind (3 format, 4 integrity), or 1 for several kinds.

    \b
    Example:
      kvtool check report.kv other.kv
    """
    found = {path: check(path) for path in paths}
    problems = [problem for listed in found.values() for problem in listed]
    lines = []
    for path, listed in found.items():
        lines += [f"{path}: sound"] if not listed else [f"{path}: {p.error}: {p.text}" for p in listed]
    data = {
        "sound": not problems,
        "files": [
            {"path": path, "problems": [{"error": p.error, "exit_code": p.exit_code, "text": p.text} for p in listed]}
            for path, listed in found.items()
        ],
    }
    emit(as_json, data, "\n".join(lines))
    codes = {p.exit_code for p in problems}
    ctx.exit(0 if not codes else codes.pop() if len(codes) == 1 else 1)
