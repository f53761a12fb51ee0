"""`kvtool recode`: rotate a file's keys for another model, RoPE base or position, or change its codec."""

from dataclasses import asdict

import click

from kvtool.cli._common import (
    bar,
    check_target,
    dtype_option,
    emit,
    frame_option,
    json_option,
    note,
    recent_option,
    save_lines,
    sink_option,
)


@click.command("recode")
@click.argument("source", metavar="IN.kv", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), metavar="OUT.kv", help="May be IN.kv itself.")
@click.option("--to-model", metavar="M", help="Rotate for this model's live RoPE and make the file its own.")
@click.option("--rope-theta", type=click.FloatRange(0, min_open=True), metavar="X", help="Rotate to this RoPE base instead.")
@click.option("--shift", type=int, default=0, metavar="N", help="Move every position by N.")
@click.option("--codec", metavar="SPEC", help="Encode again with this codec; without it each tensor keeps its own.")
@sink_option
@recent_option
@frame_option
@click.option(
    "--calibration",
    metavar="FILE|DIGEST|auto|self",
    help="Tables for tc, tcz and commvq-N:additive, of --codec or of IN.kv, as in export (self: with --to-model).",
)
@dtype_option
@json_option
def command(
    source: str,
    output: str,
    to_model: str | None,
    rope_theta: float | None,
    shift: int,
    codec: str | None,
    sink: int | None,
    recent: int | None,
    frame: str | None,
    calibration: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Rotate a file's keys for another model, RoPE base or position, or change its codec.

    Keys stored before RoPE are re-rotated by editing the header alone, without added error.

    \b
    Example:
      kvtool recode report.kv -o report-b.kv --to-model tiny-b
      kvtool recode report.kv -o report.kv --codec rvq-2+2
      kvtool recode report.kv -o later.kv --rope-theta 500000 --shift 128
    """
    check_target(output)

    from kvtool.model import load_model
    from kvtool.recoding import recode

    target = None if to_model is None else load_model(to_model, dtype=dtype)
    with bar("writing", quiet=as_json) as progress:
        report = recode(
            source,
            output,
            to_model=target,
            rope_theta=rope_theta,
            shift=shift,
            codec=codec,
            sink=sink,
            recent=recent,
            frame=frame,
            calibration=calibration,
            progress=progress,
        )
    for remark in report.notes:
        note(remark)
    quality = report.quality or {}
    partly = set(quality.get("partly", ()))
    kept, again = set(quality.get("header_only", ())), set(quality.get("reencoded", ())) - partly
    lines = f"  keys and values of a layer: {len(kept)} copied as they are, {len(again)} encoded again"
    if partly:
        lines += f", {len(partly)} copied but for their exact rows, which were rotated"
    emit(as_json, asdict(report), f"{save_lines(report)}\n{lines}")
