"""`kvtool bench`: how fast attention to codes, coding, RoPE recodes and files are here, checked before they are timed."""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtool.cli._common import OutputFile, bar, check_target, emit, json_option
from kvtool.cli.eval import split_specs

if TYPE_CHECKING:
    from kvtool.bench.measuring import Case, Report, Row
    from kvtool.bench.targets import Setting

FAMILIES = ("attend", "encode", "decode", "recode", "files", "first-token")
ON_ROWS = ("attend", "encode", "decode", "recode")
ON_MODEL = ("files", "first-token")
# A layer of a model of 8 billion parameters; codecs go through fewer tokens, as some take seconds for them.
SHAPES = {"attend": "1,32,8,128,32768", "encode": "1,32,8,128,4096", "decode": "1,32,8,128,4096", "recode": "1,32,8,128,4096"}
QUICK_SHAPE = "1,8,2,128,2048"
SECONDS, QUICK_SECONDS = 1.0, 0.1
MEGABYTES, QUICK_MEGABYTES = 64.0, 4.0
TOKENS, QUICK_TOKENS = 1024, 128
# Option -> families that it is of.
OPTIONS = {
    "shape": ON_ROWS,
    "queries": ("attend",),
    "codecs": ("attend", "encode", "decode", *ON_MODEL),
    "model_name": ON_MODEL,
    "megabytes": ("files",),
    "processes": ("files",),
    "tokens": ("first-token",),
    "folder": ON_MODEL,
}


@click.command("bench")
@click.argument("families", metavar="[FAMILY]...", nargs=-1, type=click.Choice(FAMILIES))
@click.option("--codec", "codecs", metavar="A,B,...", help="Codecs to measure; a few of each kind where it is not given.")
@click.option(
    "--shape",
    metavar="B,Hq,Hkv,D,S",
    help=f"Sequences, heads, KV heads, head size, tokens: {SHAPES['attend']} of attend, 4096 tokens of others.",
)
@click.option(
    "--queries", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Queries a head; more than one: prefill, causal."
)
@click.option(
    "--model",
    "model_name",
    default="tiny-a",
    show_default=True,
    metavar="M",
    help="Model of files and first-token; 32x8x128: a random one of so many layers, KV heads and entries a head, in float16.",
)
@click.option(
    "--mb",
    "megabytes",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help=f"Cache in files: {MEGABYTES:g}; with --quick {QUICK_MEGABYTES:g}.",
)
@click.option("--processes", type=click.IntRange(1), metavar="N", help="Also have N processes share each lossy file of files.")
@click.option("--tokens", type=click.IntRange(2), metavar="N", help=f"Prompt of first-token: {TOKENS}; with --quick {QUICK_TOKENS}.")
@click.option(
    "--folder", type=click.Path(exists=True, file_okay=False), help="Where files are written and removed; the system's temporary folder."
)
@click.option(
    "--targets", "held", is_flag=True, help="Measure the rows that this back end is held to, and exit with 1 where one is missed."
)
@click.option("--quick", is_flag=True, help="Small sizes and short times: whether it works, not how fast it is.")
@click.option("--seconds", type=click.FloatRange(0), metavar="S", help=f"Spent on each row: {SECONDS:g}, with --quick {QUICK_SECONDS:g}.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, metavar="N", help="Of the synthetic rows.")
@click.option("--only", multiple=True, metavar="ROW", help="This row (and the one it is compared with) alone; may be given several times.")
@click.option("--repro", is_flag=True, help="Print the command that makes each row alone.")
@click.option("--csv", "csv_file", type=OutputFile(), metavar="FILE", help="Write the rows as CSV.")
@click.option("--plot", "plot_file", type=OutputFile(), metavar="FILE", help="Write the times as bars, .svg or .png.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    families: tuple[str, ...],
    only: tuple[str, ...],
    held: bool,
    repro: bool,
    csv_file: str | None,
    plot_file: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure this machine; all families where none is named. Exits with 1 where a result is wrong: that row is not timed.

    attend: decode attention over codes. encode, decode: codecs and bit packing. recode: keys to another RoPE. files: save and load of a
    cache. first-token: prefill against load.

    \b
    Example:
      kvtool bench --quick
      kvtool bench attend --codec rvq-4,affine-4 --shape 1,32,8,128,32768 --plot attend.svg
      kvtool bench files first-token --model tiny-a --mb 64 --repro
      kvtool bench --targets
    """
    runs = [(families, options, only)]
    settings: tuple[Setting, ...] = ()
    if held:
        from kvtool.bench import targets as held_to
        from veloxquant_mlx.metal._backend import backend

        _check_alone(ctx)
        settings = held_to.settings(backend())
        runs = [
            (tuple(target.family for target in one.targets), options | dict(one.options), tuple(target.row for target in one.targets))
            for one in settings
        ]
    runs = [(tuple(dict.fromkeys(own)) or FAMILIES, given, tuple(dict.fromkeys(names))) for own, given, names in runs]
    _check_options(ctx, tuple(family for families, *_ in runs for family in families))
    if csv_file is not None:
        check_target(csv_file)
    if plot_file is not None:
        from kvtool.frontier import check_plot

        check_plot(plot_file)
    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="kvtool-bench-", dir=options["folder"]) as folder:
        for run in runs:
            reports.append(_measured(*run, Path(folder), as_json))
            if not as_json:  # what was measured so far stands there whatever becomes of the rest
                click.echo("\n" * (len(reports) > 1) + as_text(reports[-1], repro))
    # Settings, copy and machine of the first; every row's command has its own.
    data, rows = reports[0].to_json(), [row for report in reports for row in report.rows]
    failed = sum(report.failed for report in reports)
    data |= {"rows": [row for report in reports for row in report.to_json()["rows"]], "failed": failed}
    missed = 0
    if held:
        pairs = zip(settings, reports, strict=True)
        data["targets"] = [one for setting, report in pairs for one in held_to.judge(setting, report.rows, report.copy)]
        missed = sum(not target["reached"] for target in data["targets"])
        if not as_json:
            click.echo("\n".join(held_to.as_text(data["targets"])))
    if csv_file is not None:
        from kvtool.frontier import write_csv

        write_csv(csv_file, data["rows"])
    if plot_file is not None:
        from kvtool.bench.plot import write_plot

        about = reports[0].machine
        write_plot(plot_file, rows, f"{about['device']}, {about['backend']}, {about['date'][:10]}")
    if as_json:
        emit(True, data, "")
    ctx.exit(1 if failed or missed else 0)


def _check_alone(ctx: click.Context) -> None:
    """Refuse what would change the rows of --targets."""
    for name in ("families", "only", "quick", *(name for name in OPTIONS if name != "folder")):
        if ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE and ctx.params[name]:
            raise click.UsageError(f"--targets measures rows of its own, and goes without {name.replace('_name', '').replace('_', ' ')}")


def _check_options(ctx: click.Context, families: tuple[str, ...]) -> None:
    """Refuse an option that none of the families has."""
    for name, own in OPTIONS.items():
        if ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE and not set(own) & set(families):
            option = next(p.opts[0] for p in ctx.command.params if p.name == name)
            raise click.UsageError(f"{option} goes with {', '.join(own)}")


def _measured(families: tuple[str, ...], options: dict[str, Any], only: tuple[str, ...], folder: Path, quiet: bool) -> "Report":
    from kvtool.bench.measuring import Row, run
    from kvtool.bench.plot import duration

    quick = options["quick"]
    settings = {
        "families": list(families),
        "shapes": {f: options["shape"] or (QUICK_SHAPE if quick else SHAPES[f]) for f in families if f in ON_ROWS},
        "queries": options["queries"],
        "codecs": None if options["codecs"] is None else split_specs(options["codecs"]),
        "model": options["model_name"],
        "processes": options["processes"] or 0,
        "megabytes": options["megabytes"] or (QUICK_MEGABYTES if quick else MEGABYTES),
        "tokens": options["tokens"] or (QUICK_TOKENS if quick else TOKENS),
        "seconds": (QUICK_SECONDS if quick else SECONDS) if options["seconds"] is None else options["seconds"],
        "seed": options["seed"],
    }
    cases = [(case, _words(case, settings, options["folder"])) for family in families for case in _cases(family, settings, folder)]
    with bar("measuring", quiet=quiet) as drawn:

        def progress(done: int, total: int, row: Row) -> None:
            drawn(done, total)
            if not quiet and not sys.stderr.isatty():
                said = row.problem or row.skipped or duration(row.median)
                click.echo(f"{time.strftime('%H:%M:%S')}  {done} of {total}  {row.family} {row.name}: {said}", err=True)

        return run(cases, settings, settings["seconds"], only=only, progress=progress)


def _cases(family: str, settings: dict[str, Any], folder: Path) -> Iterator["Case"]:
    import mlx.core as mx

    from kvtool.bench import attending, coding, filing
    from kvtool.bench.rows import Size
    from kvtool.bench.shaped import model_of
    from kvtool.model import default_dtype

    codecs, seed = settings["codecs"], settings["seed"]
    if family in ON_MODEL:
        model = model_of(settings["model"])
        if family == "files":
            sizes = (settings["megabytes"], tuple(codecs or filing.CODECS), folder, seed)
            return filing.files(model, *sizes, settings["model"], settings["processes"])
        return filing.first_token(model, settings["tokens"], tuple(codecs or filing.CODECS), folder, seed)
    size = Size.parse(settings["shapes"][family], settings["queries"] if family == "attend" else 1)
    dtype = mx.float32 if default_dtype() == "float32" else mx.float16
    if family == "attend":
        return attending.cases(size, tuple(codecs or attending.default_codecs()), dtype, seed)
    if family == "recode":
        return coding.recoding(size, dtype, seed)
    return (coding.encoding if family == "encode" else coding.decoding)(size, tuple(codecs or coding.CODECS), dtype, seed)


def _words(case: "Case", settings: dict[str, Any], folder: str | None) -> list[str]:
    """The command line that makes a row, without `--only`."""
    values = {
        "--codec": case.spec,
        "--shape": settings["shapes"].get(case.family),
        "--queries": settings["queries"] if case.family == "attend" else None,
        "--model": settings["model"] if case.family in ON_MODEL else None,
        "--mb": settings["megabytes"] if case.family == "files" else None,
        "--processes": (settings["processes"] or None) if case.family == "files" else None,
        "--tokens": settings["tokens"] if case.family == "first-token" else None,
        "--folder": folder if case.family in ON_MODEL else None,
        "--seconds": settings["seconds"],
        "--seed": settings["seed"],
    }
    given = [[option, f"{value:g}" if isinstance(value, float) else str(value)] for option, value in values.items() if value is not None]
    return ["kvtool", "bench", case.family, *(word for pair in given for word in pair)]


def as_text(report: "Report", repro: bool = False) -> str:
    """The report as text: what to send."""
    about = report.machine
    load = ", ".join(f"{x:g}" for x in about["load"])
    lines = [
        f"{about['date']}  {about['system']} {about['architecture']}, {about['processor'] or about['device']}",
        f"back end {about['backend']}, device {about['device']} ({about['device_architecture']}), "
        f"{about['cores']} cores, {about['memory'] / 2**30:.3g} GiB, load average {load}, "
        f"after it {', '.join(f'{x:g}' for x in report.load_after)}",
        f"native back end: {about['native']}",
        f"BLAS {about['blas']} ({about['blas_threads']} threads); "
        + ", ".join(f"{name} {found}" for name, found in about["versions"].items()),
        f"copy of a large array: {report.copy:.4g} GB/s, read and written; `of it` is a row's share of that",
    ]
    if about["cores"] and about["load"][0] > about["cores"] / 2:
        lines.append("this machine is busy with other work: times are not its own")
    settings = report.settings
    for family in dict.fromkeys(row.family for row in report.rows):
        rows = [row for row in report.rows if row.family == family]
        what = f"shape B,Hq,Hkv,D,S {settings['shapes'][family]}" if family in ON_ROWS else f"model {settings['model']}"
        what += {"attend": f", {settings['queries']} queries", "files": f", {settings['megabytes']:g} MB"}.get(family, "")
        what += f", {settings['tokens']} tokens" if family == "first-token" else ""
        lines += ["", f"{family}: {what}", *_table(rows)]
    for row in report.rows:
        if row.problem is not None:
            lines.append(f"FAILED {row.family} {row.name}: {row.problem}")
        if row.skipped is not None:
            lines.append(f"not run: {row.family} {row.name}: {row.skipped}")
    if repro:
        lines += ["", *(row.command for row in report.rows)]
    return "\n".join(lines)


def _table(rows: list["Row"]) -> list[str]:
    from kvtool.bench.plot import duration

    elsewhere = {row.backend for row in rows}
    name, against = max(3, *(len(row.name) for row in rows)), next((row.reference for row in rows if row.reference), None)
    width = max(8, *map(len, elsewhere))
    together = any(row.alone is not None for row in rows)
    own = f" {'calls':>5} {'alone':>8}" if together else ""
    head = f"{'row':<{name}} {'on':<{width}} {'median':>8} {'quartiles':>19} {'runs':>5}{own} {'bytes':>13} {'GB/s':>7} {'of it':>6} "
    lines = [head + f"{'values/s':>9} {'bits':>6} {'speed':>6} {'copy':>6} {'error':>8} {'limit':>8}"]
    for row in (row for row in rows if row.skipped is None):
        spread = "-" if row.low is None else f"{duration(row.low)} - {duration(row.high)}"
        own = f" {row.calls or '-':>5} {duration(row.alone):>8}" if together else ""
        figures = [
            f"{duration(row.median):>8} {spread:>19} {row.runs or '-':>5}{own} {'-' if row.moved is None else f'{row.moved:,}':>13}",
            f"{_figure(row.rate, '7.3g')} {_figure(row.of_copy, '6.2f')} {_figure(row.values_rate, '9.2e')} {_figure(row.bits, '6.2f')}",
            f"{_figure(row.speedup, '6.2f')} {_figure(row.to_copy, '6.2f')} {_figure(row.error, '8.1e')} {_figure(row.limit, '8.1e')}",
        ]
        lines.append(f"{row.name:<{name}} {row.backend:<{width}} {' '.join(figures)}")
    if together:
        sets = max(row.sets for row in rows)
        lines.append(
            f"median: of `calls` built first and evaluated together, {sets} sets of inputs in turn; alone: one by one, graph included"
        )
        lines.append("rows without `alone` are timed one by one, their speed beside that of a call alone")
    if against is not None:
        lines.append(f"speed: times as fast as {', '.join(dict.fromkeys(row.reference for row in rows if row.reference))}")
    if any(row.to_copy is not None for row in rows):
        lines.append("copy: times as fast as copying these keys and values once in float16 at the copy bandwidth")
    return lines


def _figure(value: float | None, form: str) -> str:
    """A number, or a dash in its width where there is none."""
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)
