"""`kvtool lm-server`: mlx-lm's own OpenAI-compatible server over coded caches."""

import click

from kvtool.cli._common import adapter_option, calibration_option, dtype_option, model_option, note


@click.command("lm-server", context_settings={"ignore_unknown_options": True})
@model_option
@adapter_option
@click.option(
    "--cache",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="IN.kv",
    help="A prompt that requests go on from where theirs begins with it; more than once for several.",
)
@click.option(
    "--codec", metavar="SPEC", help="Keep the caches of all other prompts as codes, such as rvq-4; default: as mlx-lm keeps them."
)
@calibration_option
@dtype_option
@click.argument("options", metavar="[SERVER_OPTION]...", nargs=-1, type=click.UNPROCESSED)
def command(
    model_name: str,
    adapter: str | None,
    files: tuple[str, ...],
    codec: str | None,
    calibration: str | None,
    dtype: str,
    options: tuple[str, ...],
) -> None:
    """Serve a model with mlx_lm.server, whose prompt cache holds these files from the start. SERVER_OPTION is any of mlx_lm.server's own.

    \b
    Example:
      kvtool export --model M --chat --prompt-file manual.txt --codec rvq-4 -o manual.kv
      kvtool lm-server --model M --cache manual.kv --codec rvq-4 --port 8081
    """
    from kvtool.loading import load
    from kvtool.model import load_model
    from kvtool.serving import serve

    model = load_model(model_name, dtype=dtype, adapter=adapter)
    prompts = [load(path, model, calibration=calibration) for path in files]
    for path, restored in zip(files, prompts, strict=True):
        note(f"{path}: {restored.usable} tokens, {sum(c.nbytes for c in restored.cache):,} bytes")
        for remark in restored.notes:
            note(remark)
    serve(model, prompts, options, codec=codec)
