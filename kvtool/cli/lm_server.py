"""`kvtool lm-server`: mlx-lm's own OpenAI-compatible server over coded caches."""

import os
import sys

import click

from formats.errors import counted
from kvtool.cli._common import adapter_option, calibration_option, chunk_option, dtype_option, model_option, note, opened, quota_option


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
@click.option(
    "--store",
    metavar="STORE",
    help="Put all prompts into this store, and go on from what it holds. What waits is written when the server is stopped, for a minute at "
    "most; killed, it forgets what waited.",
)
@quota_option
@chunk_option
@click.option("--store-codec", default="rvq-4", show_default=True, metavar="SPEC", help="Of what is put into the store.")
@calibration_option
@dtype_option
@click.argument("options", metavar="[SERVER_OPTION]...", nargs=-1, type=click.UNPROCESSED)
def command(
    model_name: str,
    adapter: str | None,
    files: tuple[str, ...],
    codec: str | None,
    store: str | None,
    quota: int | None,
    chunk: int | None,
    store_codec: str,
    calibration: str | None,
    dtype: str,
    options: tuple[str, ...],
) -> None:
    """Serve a model with mlx_lm.server, whose prompt cache holds these files from the start, or is kept in a store. SERVER_OPTION is any of
    mlx_lm.server's own.

    A cache that cannot be cut (sliding windows, recurrent layers) is kept where mlx-lm hands it out: at the ends of a conversation's
    messages and of the answer. Its prefill stops nowhere else, so that there is no --snapshot-every here.

    \b
    Example:
      kvtool export --model M --chat --prompt-file manual.txt --codec rvq-4 -o manual.kv
      kvtool lm-server --model M --cache manual.kv --codec rvq-4 --port 8081
      kvtool lm-server --model M --store prompts --quota 20GB --port 8081
    """
    from kvtool.live import make_cache
    from kvtool.loading import load
    from kvtool.model import load_model
    from kvtool.serving import serve
    from kvtool.store.behind import Behind

    model = load_model(model_name, dtype=dtype, adapter=adapter)
    prompts = [load(path, model, calibration=calibration) for path in files]
    for path, restored in zip(files, prompts, strict=True):
        note(f"{path}: {counted(restored.usable, 'token')}, {sum(c.nbytes for c in restored.cache):,} bytes")
        for remark in restored.notes:
            note(remark)
    empty = None if codec is None else make_cache(model, codec)
    if store is None:
        serve(model, prompts, options, empty=empty)
    else:
        with opened(store, quota, chunk) as place:
            try:
                place.known.spaces()  # another key than the store's or none, or a token that it does not know, is no reason to begin
            except PermissionError:
                raise
            except OSError as error:
                note(f"nothing comes from the store for now: {error}")
            with Behind(place, model, store_codec, calibration, empty=empty) as behind:
                serve(model, prompts, options, empty=empty, behind=behind)
    # A joined thread that ran the model still frees what MLX compiled in it, and asks the interpreter for its lock: where that is ending
    # by then, the process aborts. All is written and closed here, so the interpreter need not end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
