"""`kvtool eval`: score held-out text on a file's cache."""

import click

from kvtool.cli._common import bar, dtype_option, emit, json_option, model_option, quality_line, read_text


@click.command("eval")
@click.argument("source", metavar="IN.kv", type=click.Path(exists=True, dir_okay=False))
@model_option
@click.option(
    "--text", "text_file", required=True, metavar="F", help="Text that follows the cached prompt (or begins with it); - is stdin."
)
@click.option("--arms", default="own,transferred,none", show_default=True, metavar="LIST", help="Which arms to run; own is always run.")
@click.option("--n", "tokens", type=click.IntRange(1), default=256, show_default=True, metavar="N", help="Positions to score at most.")
@click.option("--allow-mismatch", is_flag=True, help="Accept a file computed by other weights; shapes and RoPE must fit all the same.")
@dtype_option
@json_option
def command(source: str, model_name: str, text_file: str, arms: str, tokens: int, allow_mismatch: bool, dtype: str, as_json: bool) -> None:
    """Score held-out text on a file's cache, beside the model's own prefill and beside no cache.

    \b
    Example:
      kvtool eval report.kv --model tiny-a --text rest.txt
    """
    from kvtool.evaluation import evaluate
    from kvtool.model import load_model

    text = read_text(text_file)
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
