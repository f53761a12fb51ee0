"""`kvtool join`: caches of one model one after another, or a part of one."""

import os
import shlex
from dataclasses import asdict
from pathlib import Path

import click

from kvtool.cli._common import (
    OutputFile,
    adapter_option,
    bar,
    calibration_option,
    check_target,
    dtype_option,
    emit,
    json_option,
    model_option,
    note,
    quality_line,
    save_lines,
)


def _span(text: str | None) -> tuple[int, int | None] | None:
    """First and one past the last token of "A:B"; None past the end."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon or not (first.isdecimal() or not first) or not (last.isdecimal() or not last):
        raise click.BadParameter(f"{text!r} is not such as 0:512, :512 or 128:.", param_hint="--tokens")
    return int(first or 0), int(last) if last else None


@click.command("join")
@click.argument("sources", metavar="IN.kv ...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@model_option
@adapter_option
@click.option("-o", "--output", required=True, type=OutputFile(), metavar="OUT.kv", help="May be one of them.")
@click.option(
    "--recompute",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Run the first N tokens of each later chunk anew.",
)
@click.option("--tokens", metavar="A:B", help="Of one file: these tokens alone, moved to position 0. A beginning is exact.")
@click.option("--codec", metavar="SPEC", show_default="raw", help="Encode with this codec.")
@calibration_option
@dtype_option
@json_option
def command(
    sources: tuple[str, ...],
    model_name: str,
    adapter: str | None,
    output: str,
    recompute: int,
    tokens: str | None,
    codec: str | None,
    calibration: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Put caches of one model one after another, or cut tokens out of one.

    Keys are turned to their new positions. Rows of a later chunk have not seen the earlier ones: --recompute N runs its first tokens over
    them, and kvtool eval says what the result is worth.

    \b
    Example:
      kvtool join system.kv report.kv --model tiny-a --recompute 16 -o both.kv
      kvtool join report.kv --model tiny-a --tokens :512 -o beginning.kv
    """
    span = _span(tokens)
    if span is not None and (len(sources) > 1 or recompute):
        raise click.UsageError("--tokens takes one file, and no --recompute")
    check_target(output)
    before = sum(os.path.getsize(source) for source in sources)

    from kvtool.archive import open as open_archive
    from kvtool.archive import save
    from kvtool.bridges.bridging import coded_by
    from kvtool.bridges.chunks import cut, join
    from kvtool.bridges.transferring import Source, source_of
    from kvtool.encoding import codec_plan
    from kvtool.model import load_model

    model = load_model(model_name, dtype=dtype, adapter=adapter)
    archives = [open_archive(source, calibration=calibration) for source in sources]
    try:
        plans = [codec_plan(spec) for spec in map(coded_by, archives) if spec is not None]
        chunks: list[Source] = [source_of(archive) for archive in archives]
        if span is None:
            snapshot = join(chunks, model, recompute)
        else:
            snapshot = cut(chunks[0], model, span[0], chunks[0].length if span[1] is None else span[1])
    finally:
        for archive in archives:
            archive.close()
    with bar("writing", quiet=as_json) as progress:
        report = save(snapshot, output, codec=codec or "raw", model=model, progress=progress)
    if codec is None and report.file_bytes > before and (lossy := [plan.spec() for plan in plans if not plan.lossless]):
        again = shlex.join(["kvtool", "recode", output, "-o", output, "--codec", lossy[0]])
        note(f"written as raw: {report.file_bytes:,} bytes, from {before:,} coded by {lossy[0]}; join with --codec {lossy[0]}, or {again}")
    lines = [save_lines(report), *(f"  {quality_line(step)}" for step in snapshot.history if step["step"] in ("join", "cut"))]
    emit(as_json, {**asdict(report), "sources": [str(Path(source)) for source in sources]}, "\n".join(lines))
