"""`kvtool eval`: score held-out text on a file's cache, codecs on texts (a sweep), or codecs on hostile rows (robustness)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import counted
from kvtool.cli._common import (
    OutputFile,
    adapter_option,
    alignment,
    bar,
    check_target,
    dtype_option,
    emit,
    from_model_option,
    json_option,
    map_option,
    note,
    overlap_option,
    quality_line,
    read_text,
    recompute_option,
)

if TYPE_CHECKING:
    from kvtool.sweeping import SweepReport

FILE_ONLY = ("arms", "wrong_file", "mapping", "recompute", "from_model", "overlap", "do_seal", "allow_mismatch")
SWEEP_ONLY = ("protocol", "prefix", "sink", "recent", "window", "relative_to", "passkeys", "plot_file", "chunk", "foreign_calibration")


@click.command("eval")
@click.argument("source", metavar="[IN.kv]", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--model", "model_name", metavar="M", help="Model directory, repository id, or tiny-a / tiny-b (shipped with kvtool).")
@adapter_option
@click.option(
    "--text",
    "text_files",
    multiple=True,
    metavar="F",
    help="Text that follows the cached prompt (or begins with it); - is stdin. A sweep takes several, each read from its beginning.",
)
@click.option(
    "--arms",
    default="own,transferred,none",
    show_default=True,
    metavar="LIST",
    help="Some of own, transferred, wrong, none; own is always run.",
)
@click.option("--wrong-text", "wrong_file", metavar="F", help="Text of the arm wrong, another document's cache; a shipped one by default.")
@map_option
@recompute_option
@from_model_option
@overlap_option
@click.option("--seal", "do_seal", is_flag=True, help="Write the result into IN.kv, for import --require.")
@click.option(
    "--n", "tokens", type=click.IntRange(1), metavar="N", help="Positions to score at most, a text; 256, or 896 of a streaming sweep."
)
@click.option(
    "--allow-mismatch",
    is_flag=True,
    help="Accept a file of another model (weights, adapter, config, tokenizer); shapes and RoPE must fit all the same.",
)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    metavar="SPEC,...",
    help="Sweep: codecs, mlx-N (mlx-lm's own) or fp8.",
)
@click.option("--robustness", is_flag=True, help="Codecs on synthetic and hostile rows instead of texts; no model is needed.")
@click.option(
    "--protocol",
    type=click.Choice(["prefix", "streaming"]),
    default="prefix",
    show_default=True,
    help="Sweep: code the prefix once, or every row as it leaves the exact window, inside the forward.",
)
@click.option(
    "--prefix", type=click.IntRange(1), metavar="N", help="Sweep: tokens before the first scored one; 1024 (prefix) or 128 (streaming)."
)
@click.option(
    "--sink", type=click.IntRange(0), metavar="N", help="Sweep: first tokens kept exact by lossy codecs that do not say; 4 by default."
)
@click.option(
    "--recent", type=click.IntRange(0), metavar="N", help="Sweep: newest tokens kept exact by lossy codecs that do not say; 32 by default."
)
@click.option(
    "--window",
    type=click.Choice(["on", "off", "both"]),
    default="on",
    show_default=True,
    help="Sweep: with these exact tokens, without any, or each codec both ways.",
)
@click.option("--relative-to", metavar="SPEC", help="Sweep: the codec whose KL the ratios are relative to, one of --codec.")
@click.option(
    "--passkeys",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Sweep: also ask N passkeys of each codec's cache (tiny-a, tiny-b).",
)
@click.option(
    "--chunk",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Sweep: tokens a forward; codes of tcz come in chunks of 256, so 512 with --protocol streaming.",
)
@click.option(
    "--calibration",
    metavar="FILE|DIGEST|auto|self",
    help="Tables of a calibration; self: learnt from each text's own cache and counted. With IN.kv: the file that it needs.",
)
@click.option("--foreign-calibration", is_flag=True, help="Sweep: accept a calibration of other weights, if its shapes are the model's.")
@click.option("--csv", "csv_file", type=OutputFile(), metavar="F", help="Sweep, robustness: write the table as CSV as well.")
@click.option(
    "--plot", "plot_file", type=OutputFile(), metavar="F", help="Sweep: plot KL against bits; .svg, or .png where matplotlib is installed."
)
@dtype_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    source: str | None,
    model_name: str | None,
    adapter: str | None,
    text_files: tuple[str, ...],
    arms: str,
    wrong_file: str | None,
    mapping: str | None,
    recompute: str | None,
    from_model: str | None,
    overlap: float | None,
    do_seal: bool,
    tokens: int | None,
    allow_mismatch: bool,
    codecs: tuple[str, ...],
    robustness: bool,
    calibration: str | None,
    csv_file: str | None,
    dtype: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Score held-out text on a file's cache, beside the model's own prefill and beside no cache.

    Without a file: a sweep, which scores codecs on texts in one table of quality against bits a value; or what codecs make of hostile rows.

    \b
    Example:
      kvtool eval report.kv --model tiny-a --text rest.txt
      kvtool eval report-b.kv --model tiny-b --text rest.txt --arms own,transferred,wrong,none --seal
      kvtool eval --model tiny-a --text rest.txt --codec rvq-4,mlx-4 --protocol streaming --window both --relative-to mlx-4
      kvtool eval --robustness --codec rvq-4,rabitq,fp8
    """
    given = {p for p in context.params if context.get_parameter_source(p) is not click.core.ParameterSource.DEFAULT}
    if (source is None) == (not codecs):
        raise click.UsageError(
            "give IN.kv or --codec (--robustness wants --codec too)" if source is None else "give IN.kv or --codec, not both"
        )
    if source is not None:
        _only(given, (*SWEEP_ONLY, "csv_file", "robustness"), "--codec")
    else:
        _only(given, FILE_ONLY, "IN.kv")
    specs = [spec for text in codecs for spec in split_specs(text)]
    if csv_file is not None:
        check_target(csv_file)
    if robustness:
        _only(
            given, (*SWEEP_ONLY, "model_name", "adapter", "text_files", "tokens", "dtype", "calibration"), "a sweep, not with --robustness"
        )
        _robustness(specs, csv_file, as_json)
        return
    if model_name is None or not text_files:
        raise click.UsageError("give --model" if model_name is None else "give --text")
    if source is None:
        _sweep(model_name, adapter, text_files, specs, dtype, as_json, csv_file=csv_file, tokens=tokens, calibration=calibration, **options)
        return
    if len(text_files) > 1:
        raise click.UsageError("IN.kv is scored on one --text")
    if do_seal and (mapping is not None or recompute is not None):
        raise click.UsageError(
            "--seal says what a file is worth as it is: write one with kvtool recode --map or --recompute, and seal that"
        )
    least = alignment(mapping, from_model, overlap)
    from kvtool.evaluation import evaluate
    from kvtool.model import load_model
    from kvtool.sealing import seal

    text = read_text(text_files[0])
    model = load_model(model_name, dtype=dtype, adapter=adapter)
    chosen = [a for a in arms.split(",") if a]
    with bar("scoring", quiet=as_json) as progress:
        report = evaluate(
            source,
            model,
            text,
            arms=chosen,
            tokens=tokens or 256,
            wrong=None if wrong_file is None else read_text(wrong_file),
            mapping=mapping,
            recompute=recompute,
            from_model=None if from_model is None else load_model(from_model, dtype=dtype),
            **least,
            allow_mismatch=allow_mismatch,
            calibration=calibration,
            progress=progress,
        )
    for remark in report.notes:
        note(remark)
    lines = [
        f"{report.path} in {report.model}: {counted(report.prefix, 'token')} cached ({', '.join(report.codecs)}), {report.n} scored",
        *(f"quality    {quality_line(step)}" for step in report.quality),
        *([f"sealed     {seal(report, model.info)['note']}"] if do_seal else []),
        f"{'arm':<12} {'NLL':>8} {'KL(own||arm)':>13} {'KL p99':>9} {'top-1':>7} {'ready in':>9}",
    ]
    lines += [f"{a.arm:<12} {a.nll:8.4f} {a.kl:13.5f} {a.kl_p99:9.4f} {a.top1:7.4f} {a.seconds:7.2f} s" for a in report.arms]
    emit(as_json, report.to_json(), "\n".join(lines))


def split_specs(text: str) -> list[str]:
    """The specs of a list with commas, which stand inside a spec too: `rvq-4,sink=4,mlx-4` is `rvq-4,sink=4` and `mlx-4`.

    A part goes with those before it as long as they make one spec: no second codec of a role, no field twice.
    """
    specs: list[list[str]] = []
    taken: set[str] = set()
    for part in text.split(","):
        key, equals, _ = part.strip().partition("=")
        name = key if equals and ":" not in key else "both"
        if not specs or name in taken or (name == "both" and {"k", "v"} <= taken):
            specs.append([])
            taken = set()
        specs[-1].append(part)
        taken.add(name)
    return [",".join(parts) for parts in specs]


def _only(given: set[str], names: Sequence[str], where: str) -> None:
    """Refuse options that mean nothing here."""
    wrong = sorted(given & set(names))
    if wrong:
        option = "--" + {"tokens": "n", "mapping": "map", "do_seal": "seal", "wrong_file": "wrong-text"}.get(
            wrong[0], wrong[0].removesuffix("_file").removesuffix("_files").removesuffix("_name")
        )
        raise click.UsageError(f"{option.replace('_', '-')} goes with {where}")


def _sweep(
    model_name: str,
    adapter: str | None,
    text_files: tuple[str, ...],
    specs: list[str],
    dtype: str,
    as_json: bool,
    *,
    csv_file: str | None,
    plot_file: str | None,
    **options: Any,
) -> None:
    from kvtool.frontier import check_plot, without_window, write_csv, write_plot
    from kvtool.model import load_model
    from kvtool.sweeping import sweep

    if plot_file is not None:
        check_plot(plot_file)
    names = [Path(f).name for f in text_files]
    if len(set(names)) < len(names):
        names = list(text_files)
    if len(set(names)) < len(names):
        raise click.UsageError("a --text is given twice")
    texts = {name: read_text(f) for name, f in zip(names, text_files, strict=True)}
    model = load_model(model_name, dtype=dtype, adapter=adapter)
    with bar("scoring", quiet=as_json) as progress:
        report = sweep(model, texts, specs, progress=progress, **options)
    data = report.to_json()
    if csv_file is not None:
        write_csv(csv_file, data["rows"])
    if plot_file is not None:
        last = report.rows[-1]
        lossy = [r for r in report.rows if r.text == last.text and r.bits is not None and r.kl]
        labels, window = without_window([r.codec for r in lossy])
        title = f"{report.model}, {report.protocol}, {counted(last.n, 'position')} ({last.text}){', ' + window if window else ''}"
        write_plot(plot_file, [(name, r.bits or 0.0, r.kl or 0.0) for name, r in zip(labels, lossy, strict=True)], title)
    for row in report.rows:
        if row.note and row.text == report.rows[0].text:
            note(f"{row.codec}: {row.note}")
    if report.calibration_of is not None:
        note(f"tables of calibration {(report.calibration or '')[:12]}, which is of {report.calibration_of}, not of {report.model}")
    emit(as_json, data, sweep_table(report))


def sweep_table(report: "SweepReport") -> str:
    """The table as text; ratios and passkeys where they were asked for."""
    width = max(len(r.codec) for r in report.rows)
    label = max(4, *(len(r.text) for r in report.rows))
    ratios = f" {'ratio [95 %]':>22}" if report.relative_to is not None else ""
    passkeys = f" {'passkey':>7}" if report.passkeys else ""
    lines = [
        f"{report.model}, {report.protocol}: {counted(report.prefix, 'token')} before the first scored one"
        + (f"; ratios of KL to that of {report.relative_to}" if ratios else "")
        + (f"; {report.passkeys} passkeys" if passkeys else "")
        + (f"; tables calibrated on {report.calibration_of}" if report.calibration_of is not None else ""),
        f"{'codec':<{width}} {'text':<{label}} {'n':>5} {'KL':>9} {'KL p99':>8} {'dPPL %':>8} {'top-1':>7} {'attn err':>9} "
        f"{'bits':>6} {'all':>6}{ratios}{passkeys} {'code s':>7}",
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
        if ratios:
            interval = "" if r.ratio_low is None or r.ratio_high is None else f" [{r.ratio_low:.3f}, {r.ratio_high:.3f}]"
            figures.append(f"{_figure(r.ratio, '.3f') + interval:>22}")
        if passkeys:
            figures.append(_figure(r.passkey, "7.3f"))
        lines.append(f"{r.codec:<{width}} {r.text:<{label}} {r.n:5} {' '.join(figures)} {r.seconds:7.2f}")
    return "\n".join(lines)


def _robustness(specs: list[str], csv_file: str | None, as_json: bool) -> None:
    from kvtool.frontier import write_csv
    from kvtool.hostile_rows import robustness

    with bar("coding", quiet=as_json) as progress:
        report = robustness(specs, progress=progress)
    data = report.to_json()
    if csv_file is not None:
        write_csv(csv_file, data["rows"])
    codec, case = (max(len(getattr(r, name)) for r in report.rows) for name in ("codec", "case"))
    head = f"{'codec':<{codec}} {'rows':<{case}} {'tokens':>6} {'dim':>4} {'k err':>9} {'v err':>9} {'finite':>6} {'bits':>6}  note"
    lines = [head]
    for r in report.rows:
        finite = "-" if r.finite is None else "yes" if r.finite else "NO"
        errors = f"{_figure(r.k_error, '9.2e')} {_figure(r.v_error, '9.2e')}"
        what = f"{r.codec:<{codec}} {r.case:<{case}} {r.tokens:6} {r.head_dim:4}"
        said = ("refused: " if r.refused else "") + r.note
        lines.append(f"{what} {errors} {finite:>6} {_figure(r.bits, '6.3f')}  {said}".rstrip())
    emit(as_json, data, "\n".join(lines))


def _figure(value: float | None, form: str) -> str:
    """A number, or a dash in its width where there is none."""
    return "-".rjust(int(form.lstrip("+").split(".")[0] or 1)) if value is None else format(value, form)
