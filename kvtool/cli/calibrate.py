"""`kvtool calibrate`: learn a model's tables for the codecs tc, tcz and commvq-N:additive."""

import shlex
import time
from pathlib import Path
from typing import Any

import click

from formats.calibration import to_bytes, write_calibration
from formats.errors import counted
from kvtool import calibration_store as store
from kvtool.cli._common import (
    OutputFile,
    adapter_option,
    bar,
    check_target,
    dtype_option,
    emit,
    json_option,
    model_option,
    named_texts,
)


@click.command("calibrate")
@model_option
@adapter_option
@click.option("--text", "files", multiple=True, metavar="F", help="File with a text, once or more; the shipped corpus where none is given.")
@dtype_option
@click.option("-o", "--output", type=OutputFile(), metavar="CAL", help="Write the calibration there, not to the store.")
@json_option
def command(model_name: str, adapter: str | None, files: tuple[str, ...], dtype: str, output: str | None, as_json: bool) -> None:
    """Learn a model's tables for the codecs tc, tcz and commvq-N:additive, once for all prompts.

    Runs texts through the model, forwards and backwards. Without -o the calibration goes to the store, where kvtool finds it by itself
    when it writes and reads this model's files.

    \b
    Example:
      kvtool calibrate --model tiny-a
      kvtool calibrate --model tiny-a --text notes.txt --text report.txt -o tiny-a.cal
    """
    if output is not None:
        check_target(output)
    else:
        store.check_writable()
    texts = named_texts(files)

    from kvtool.calibrating import calibrate
    from kvtool.model import load_model

    start = time.monotonic()
    model = load_model(model_name, dtype=dtype, adapter=adapter)
    with bar("calibrating", quiet=as_json) as progress:
        calibration = calibrate(model, texts, progress=progress)
    file = calibration.file
    if output is None:
        path = store.put(to_bytes(file))
    else:
        path = Path(output)
        write_calibration(path, file)
    data: dict[str, Any] = {
        "path": str(path),
        "digest": calibration.digest,
        "model": file.model.name,
        "layers": list(calibration.layers("tc")),
        "skipped": dict(file.skipped),
        "kinds": list(file.tables),
        "texts": dict(file.texts),
        "tokens": file.tokens,
        **{name: file.options["tc"][name] for name in ("metric", "rows", "gradients")},
        "seconds": round(time.monotonic() - start, 1),
        "file_bytes": path.stat().st_size,
    }
    use = ["kvtool", "export", "--model", *model.arguments, "--prompt-file", "F", "--codec", "tc-2"]
    use += [] if output is None else ["--calibration", output]
    emit(as_json, data, _text(data, shlex.join([*use, "-o", "OUT.kv"])))


def _text(data: dict[str, Any], use: str) -> str:
    count = len(data["layers"])
    lines = [
        f"{data['path']}: calibration of {data['model']}, {data['file_bytes']:,} bytes, made in {data['seconds']:.0f} s",
        f"  digest {data['digest']}",
        f"  {count} of {count + len(data['skipped'])} layers, tables for {', '.join(data['kinds'])}",
        f"  {data['tokens']:,} tokens of {counted(len(data['texts']), 'text')}",
        f"  {data['rows']:,} rows kept; Fisher metric of {data['gradients']:,} gradients",
    ]
    lines += [f"  layer {name} skipped: {why}" for name, why in data["skipped"].items()]
    return "\n".join([*lines, f"  use: {use}"])
