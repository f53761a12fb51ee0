"""`kvtool eval`: score held-out text on a file's cache, or codecs on texts (a sweep)."""

from pathlib import Path
from typing import Any

import click

from kvtool.cli._common import (
    bar,
    check_target,
    dtype_option,
    emit,
    json_option,
    model_option,
    note,
    quality_line,
    read_text,
    recent_option,
    sink_option,
)

FILE_ONLY = ("arms", "allow_mismatch")
SWEEP_ONLY = ("protocol", "prefix", "sink", "recent", "csv_file", "plot_file")


@click.command("eval")
@click.argument("source", metavar="[IN.kv]", required=False, type=click.Path(exists=True, dir_okay=False))
@model_option
@click.option(
    "--text",
    "text_files",
    required=True,
    multiple=True,
    metavar="F",
    help="Text that follows the cached prompt (or begins with it); - is stdin. A sweep takes several, each read from its beginning.",
)
@click.option("--arms", default="own,transferred,none", show_default=True, metavar="LIST", help="Which arms to run; own is always run.")
@click.option("--n", "tokens", type=click.IntRange(1), default=256, show_default=True, metavar="N", help="Positions to score at most.")
@click.option("--allow-mismatch", is_flag=True, help="Accept a file computed by other weights; shapes and RoPE must fit all the same.")
@click.option(
    "--codec", "codecs", multiple=True, metavar="SPEC", help="Sweep: a codec, mlx-N (mlx-lm's own) or fp8; give it several times."
)
@click.option(
    "--protocol",
    type=click.Choice(["prefix", "streaming"]),
    default="prefix",
    show_default=True,
    help="Sweep: code the prefix once, or every row as it leaves the exact window, inside the forward.",
)
@click.option(
    "--prefix", type=click.IntRange(1), metavar="N", help="Sweep: tokens before the first scored one; 512 (prefix) or 128 (streaming)."
)
@sink_option
@recent_option
@click.option("--csv", "csv_file", metavar="F", help="Sweep: write the table as CSV as well.")
@click.option("--plot", "plot_file", metavar="F", help="Sweep: plot KL against bits; .svg, or .png where matplotlib is installed.")
@dtype_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    source: str | None,
    model_name: str,
    text_files: tuple[str, ...],
    arms: str,
    tokens: int,
    allow_mismatch: bool,
    codecs: tuple[str, ...],
    dtype: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Score held-out text on a file's cache, beside the model's own prefill and beside no cache.

    Without a file: a sweep, which scores codecs on texts in one table of quality against bits a value.

    \b
    Example:
      kvtool eval report.kv --model tiny-a --text rest.txt
      kvtool eval --model tiny-a --text rest.txt --codec rvq-4 --codec mlx-4 --protocol streaming --sink 4 --recent 32
    """
    given = {p for p in context.params if context.get_parameter_source(p) is not click.core.ParameterSource.DEFAULT}
    if (source is None) == (not codecs):
        raise click.UsageError("give IN.kv or --codec" if source is None else "give IN.kv or --codec, not both")
    wrong = sorted(given & set(FILE_ONLY if source is None else SWEEP_ONLY))
    if wrong:
        option = "--" + wrong[0].removesuffix("_file").replace("_", "-")
        raise click.UsageError(f"{option} goes with {'IN.kv' if source is None else '--codec'}")
    if source is None:
        _sweep(model_name, text_files, codecs, tokens, dtype, as_json, **options)
        return
    if len(text_files) > 1:
        raise click.UsageError("IN.kv is scored on one --text")
    from kvtool.evaluation import evaluate
    from kvtool.model import load_model

    text = read_text(text_files[0])
    model = load_model(model_name, dtype=dtype)
    with bar("scoring", quiet=as_json) as progress:
        report = evaluate(
            source, model, text, arms=[a for a in arms.split(",") if a], tokens=tokens, allow_mismatch=allow_mismatch, progress=progress
        )
    lines = [
        f"{report.path} in {report.model}: {report.prefix} tokens cached ({', '.join(report.codecs)}), {report.n} scored",
        *(f"quality    {quality_line(step)}" for step in report.quality),
        f"{'arm':<12} {'NLL':>8} {'KL(own||arm)':>13} {'KL p99':>9} {'top-1':>7} {'ready in':>9}",
    ]
    lines += [f"{a.arm:<12} {a.nll:8.4f} {a.kl:13.5f} {a.kl_p99:9.4f} {a.top1:7.4f} {a.seconds:7.2f} s" for a in report.arms]
    emit(as_json, report.to_json(), "\n".join(lines))


def _sweep(
    model_name: str,
    text_files: tuple[str, ...],
    codecs: tuple[str, ...],
    tokens: int,
    dtype: str,
    as_json: bool,
    *,
    protocol: Any,
    prefix: int | None,
    sink: int | None,
    recent: int | None,
    csv_file: str | None,
    plot_file: str | None,
) -> None:
    from kvtool.frontier import check_plot, write_csv, write_plot
    from kvtool.model import load_model
    from kvtool.sweeping import sweep

    if csv_file is not None:
        check_target(csv_file)
    if plot_file is not None:
        check_plot(plot_file)
    names = [Path(f).name for f in text_files]
    if len(set(names)) < len(names):
        names = list(text_files)
    if len(set(names)) < len(names):
        raise click.UsageError("a --text is given twice")
    texts = {name: read_text(f) for name, f in zip(names, text_files, strict=True)}
    model = load_model(model_name, dtype=dtype)
    with bar("scoring", quiet=as_json) as progress:
        report = sweep(
            model,
            texts,
            codecs,
            protocol=protocol,
            prefix=prefix,
            tokens=tokens,
            sink=sink or 0,
            recent=recent or 0,
            progress=progress,
        )
    data = report.to_json()
    if csv_file is not None:
        write_csv(csv_file, data["rows"])
    if plot_file is not None:
        last = report.rows[-1].text
        points = [(r.codec, r.bits, r.kl) for r in report.rows if r.text == last and r.bits is not None and r.kl is not None]
        write_plot(plot_file, points, f"{report.model}, {protocol}, {report.rows[-1].n} positions ({last})")
    for row in report.rows:
        if row.note and row.text == report.rows[0].text:
            note(f"{row.codec}: {row.note}")
    width = max(len(r.codec) for r in report.rows)
    label = max(4, *(len(r.text) for r in report.rows))
    lines = [
        f"{report.model}, {protocol}: {report.prefix} tokens before the first scored one",
        f"{'codec':<{width}} {'text':<{label}} {'n':>5} {'KL':>9} {'KL p99':>8} {'dPPL %':>8} {'top-1':>7} {'attn err':>9} "
        f"{'bits':>6} {'all':>6} {'code s':>7}",
    ]
    for r in report.rows:
        figures = [
            _figure(r.kl, "9.5f"),
            _figure(r.kl_p99, "8.4f"),
            _figure(r.ppl_delta, "+8.3f"),
            _figure(r.top1, "7.4f"),
            _figure(r.attention_error, "9.2e"),
            _figure(r.bits, "6.3f"),
            _figure(r.bits_all, "6.3f"),
        ]
        lines.append(f"{r.codec:<{width}} {r.text:<{label}} {r.n:5} {' '.join(figures)} {r.seconds:7.2f}")
    emit(as_json, data, "\n".join(lines))


def _figure(value: float | None, form: str) -> str:
    """A number, or a dash in its width where there is none."""
    return "-".rjust(int(form.lstrip("+").split(".")[0])) if value is None else format(value, form)
