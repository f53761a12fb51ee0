"""`kvtool calibrations`: what the store holds; needs no MLX."""

from datetime import UTC, datetime
from typing import Any

import click

from formats.calibration import read_calibration
from formats.errors import FormatError
from kvtool import calibration_store as store
from kvtool.cli._common import emit, json_option, printable, show_problem


@click.command("calibrations")
@json_option
def command(as_json: bool) -> None:
    """List the calibrations in the store, newest first. Reads only; needs no MLX.

    \b
    Example:
      kvtool calibrations
    """
    found: list[dict[str, Any]] = []
    for digest, path in store.kept():
        about: dict[str, Any] = {"digest": digest, "model": None, "weights": None, "problem": None}
        try:
            file, own = read_calibration(path)
        except FormatError as error:
            about["problem"] = show_problem(error)
        else:
            about |= {"model": file.model.name, "weights": file.model.effective_weights}
            about["problem"] = None if own == digest else f"DigestError: has digest {own}"
        status = path.stat()
        found.append(about | {"bytes": status.st_size, "written": datetime.fromtimestamp(int(status.st_mtime), UTC).isoformat()})
    lines = [f"{store.folder()}: {len(found)} calibration{'' if len(found) == 1 else 's'}"]
    lines += [f"  {a['digest'][:12]}  {a['written'][:10]}  {a['bytes']:>12,} bytes  {printable(a['problem'] or a['model'])}" for a in found]
    emit(as_json, {"folder": str(store.folder()), "calibrations": found}, "\n".join(lines))
