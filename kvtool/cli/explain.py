"""`kvtool explain`: why a file fits a model or not, and which command bridges the difference."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from formats.errors import IncompatibleError
from kvtool.cli._common import (
    adapter_option,
    bar,
    calibration_option,
    dtype_option,
    emit,
    json_option,
    model_option,
    printable,
    quality_line,
)

if TYPE_CHECKING:
    from kvtool.explaining import Explanation

MOST = 4  # differences of one field in the text; --json has all


@click.command("explain")
@click.argument("source", metavar="IN.kv", type=click.Path(exists=True, dir_okay=False))
@model_option
@adapter_option
@click.option("--check", is_flag=True, help="Read the whole file and compare every array with its digest first.")
@calibration_option
@dtype_option
@json_option
def command(source: str, model_name: str, adapter: str | None, check: bool, calibration: str | None, dtype: str, as_json: bool) -> None:
    """Say whether import takes a file into a model, what differs field by field, and what to run to carry the cache over.

    Exits with 0 where import takes the file as it is, else with 5. Reads the file's header alone: without --check, keys and values may be
    damaged. A damaged file exits with 3 or 4.

    \b
    Example:
      kvtool explain report.kv --model tiny-b
    """
    from kvtool.explaining import explain
    from kvtool.model import load_model

    model = load_model(model_name, dtype=dtype, adapter=adapter)
    with bar("reading", quiet=as_json) as progress:
        found = explain(source, model, calibration=calibration, check=check, progress=progress)
    emit(as_json, asdict(found), as_text(found))
    if not found.accepted:
        raise click.exceptions.Exit(IncompatibleError.exit_code)


def as_text(found: "Explanation") -> str:
    """An explanation as text."""
    lines = [f"{found.path}: computed by {found.computed_by}, for {found.model}", f"  {found.verdict}: {found.summary}"]
    for field in found.fields:
        state = {True: "same", False: "differs", None: "unknown"}[field.same]
        shown = "; ".join(field.differences[:MOST])
        more = f" and {len(field.differences) - MOST} more" if len(field.differences) > MOST else ""
        lines.append(f"  {field.name:13} {state:8} {shown}{more}".rstrip())
    lines += [f"  history: {quality_line(step)}" for step in found.history]
    lines += [f"  not open to {text}" for text in found.reasons]
    lines += [f"  run:     {text}" for text in found.commands]
    lines += [f"  instead: {text}" for text in found.instead]
    lines += [f"  note: {text}" for text in found.notes]
    read = "not read; --check compares them with their digests"
    lines += [f"  arrays: {read if found.arrays is None else f'{found.arrays}, each as it was written'}"]
    return "\n".join(map(printable, lines))
