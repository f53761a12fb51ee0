"""`kvtool recode`: rotate a file's keys for another model, RoPE base or position, or change its codec."""

from dataclasses import asdict
from typing import Any

import click

from kvtool.cli._common import (
    OutputFile,
    adapter_option,
    alignment,
    bar,
    check_target,
    dtype_option,
    emit,
    frame_option,
    from_model_option,
    json_option,
    map_option,
    note,
    overlap_option,
    recent_option,
    recompute_option,
    save_lines,
    sink_option,
)


@click.command("recode")
@click.argument("source", metavar="IN.kv", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", required=True, type=OutputFile(), metavar="OUT.kv", help="May be IN.kv itself.")
@click.option("--to-model", metavar="M", help="Rotate for this model's live RoPE and make the file its own.")
@adapter_option
@map_option
@recompute_option
@from_model_option
@overlap_option
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False),
    metavar="PROFILE",
    help="Choose what to recompute by this file of `kvtool profile`, with --share or --kl.",
)
@click.option("--share", metavar="P%", help="With --profile: the best plan that takes at most P per cent of a prefill.")
@click.option("--kl", type=click.FloatRange(0), metavar="X", help="With --profile: the cheapest plan that measured at most X nats a token.")
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
    adapter: str | None,
    mapping: str | None,
    recompute: str | None,
    from_model: str | None,
    overlap: float | None,
    profile: str | None,
    share: str | None,
    kl: float | None,
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

    Keys stored before RoPE are re-rotated by editing the header alone, without added error. Another model's weights change more than the
    rotation: --map corrects the rows, --recompute has the model compute some of them.

    \b
    Example:
      kvtool recode report.kv -o report-b.kv --to-model tiny-b
      kvtool recode report.kv -o report.kv --codec rvq-2+2
      kvtool recode report.kv -o later.kv --rope-theta 500000 --shift 128
      kvtool recode report.kv -o report-b.kv --to-model tiny-b --map a-to-b.safetensors --recompute first=4,newest=15%
      kvtool recode report.kv -o report-c.kv --to-model C --map a-to-c.safetensors --from-model tiny-a
      kvtool recode report.kv -o report-b.kv --to-model tiny-b --profile a-to-b-profile.safetensors --share 20%
    """
    check_target(output)
    across = mapping is not None or recompute is not None or profile is not None
    if across and to_model is None:
        raise click.UsageError("--map, --recompute and --profile need --to-model")
    least = alignment(mapping, from_model, overlap)
    if adapter is not None and to_model is None:
        raise click.UsageError("--adapter goes with --to-model")
    if across and (rope_theta is not None or shift):
        raise click.UsageError("--map, --recompute and --profile go without --rope-theta and --shift")
    if (profile is not None) != (share is not None or kl is not None) or (share is not None and kl is not None):
        raise click.UsageError("--profile goes with --share or --kl, one of them")
    if profile is not None and recompute is not None:
        raise click.UsageError("give one of --profile and --recompute")
    most = None if share is None else _fraction(share)

    from kvtool.bridges.bridging import planned, recode_across
    from kvtool.model import load_model
    from kvtool.recoding import recode

    target = None if to_model is None else load_model(to_model, dtype=dtype, adapter=adapter)
    choice: dict[str, Any] = {"codec": codec, "sink": sink, "recent": recent, "frame": frame, "calibration": calibration}
    by: dict[str, Any] = {} if from_model is None else {"from_model": load_model(from_model, dtype=dtype), **least}
    if profile is not None:
        assert target is not None
        row, part, better = planned(source, target, profile, mapping=mapping, share=most, kl=kl, calibration=calibration)
        recompute = row.plan or None
        note(f"{row.plan or 'nothing recomputed'}: {part:.1%} of a prefill; the profile's texts gave KL {row.kl:.4g}, top-1 {row.top1:.3f}")
        if better is not None:
            note(better)
        across = mapping is not None or recompute is not None
    with bar("writing", quiet=as_json) as progress:
        if across:
            assert target is not None
            report = recode_across(source, output, target, mapping=mapping, recompute=recompute, progress=progress, **choice, **by)
        else:
            report = recode(source, output, to_model=target, rope_theta=rope_theta, shift=shift, progress=progress, **choice)
    for remark in report.notes:
        note(remark)
    quality = report.quality or {}
    partly = set(quality.get("partly", ()))
    kept, again = set(quality.get("header_only", ())), set(quality.get("reencoded", ())) - partly
    lines = f"  keys and values of a layer: {len(kept)} copied as they are, {len(again)} encoded again"
    if partly:
        lines += f", {len(partly)} copied but for their exact rows, which were rotated"
    emit(as_json, asdict(report), save_lines(report) if across else f"{save_lines(report)}\n{lines}")


def _fraction(text: str) -> float:
    """Of "20%"."""
    try:
        per_cent = float(text.removesuffix("%"))
    except ValueError:
        per_cent = -1.0
    if not text.endswith("%") or not 0 <= per_cent <= 100:
        raise click.UsageError(f"--share must be per cent of a prefill, such as 20%, but is {text!r}")
    return per_cent / 100
