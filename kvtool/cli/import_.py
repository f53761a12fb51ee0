"""`kvtool import`: go on from a file's cache, or write it as mlx-lm's own prompt-cache file."""

import math
import os
import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvtool import tiny
from kvtool.cli._common import (
    bar,
    calibration_option,
    check_target,
    dtype_option,
    emit,
    json_option,
    map_option,
    model_option,
    note,
    quality_line,
    read_text,
    recompute_option,
)

if TYPE_CHECKING:
    from kvtool.model import LoadedModel


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


@click.command("import")
@click.argument("source", metavar="IN.kv", type=click.Path(exists=True, dir_okay=False))
@model_option
@click.option("--prompt", metavar="TEXT", help="Text that follows the cached prompt.")
@click.option("--prompt-file", metavar="F", help="The same from a file; - is stdin.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, metavar="N")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    callback=lambda ctx, option, value: _finite(value),
    default=0.0,
    show_default=True,
    metavar="T",
    help="At least 0; 0 is greedy.",
)
@click.option(
    "--to",
    "target",
    nargs=2,
    type=(click.Choice(["mlx-lm"]), click.Path(dir_okay=False)),
    metavar="mlx-lm OUT.safetensors",
    help="Write a file that mlx_lm.generate --prompt-cache-file takes.",
)
@click.option("--decode", is_flag=True, help="Expand the codes to mlx-lm's own caches; by default attention reads codes.")
@click.option("--live", metavar="SPEC", help="Keep the rows in this codec while they live, such as tc-3 for a file of tcz.")
@click.option("--allow-mismatch", is_flag=True, help="Accept a file computed by other weights; shapes and RoPE must fit all the same.")
@map_option
@recompute_option
@click.option("--require", "limits", metavar="LIMITS", help="Refuse (exit 7) unless sealed to be as good, such as kl=0.05,top1=0.9.")
@calibration_option
@dtype_option
@json_option
def command(
    source: str,
    model_name: str,
    prompt: str | None,
    prompt_file: str | None,
    max_tokens: int,
    temperature: float,
    target: tuple[str, str] | None,
    decode: bool,
    live: str | None,
    allow_mismatch: bool,
    mapping: str | None,
    recompute: str | None,
    limits: str | None,
    calibration: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Go on from a file's cache: the text streams to stdout. With --to, write mlx-lm's own file instead.

    \b
    Example:
      kvtool import report.kv --model tiny-a --prompt "In short:" --max-tokens 40
      kvtool import report.kv --model tiny-a --to mlx-lm report.safetensors
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give one of --prompt and --prompt-file")
    if target is not None and (prompt is not None or prompt_file is not None):
        raise click.UsageError("--to writes the cache alone; give the prompt to mlx_lm.generate")
    if decode and live is not None:
        raise click.UsageError("give one of --decode and --live")
    across = mapping is not None or recompute is not None
    if across and (target is not None or decode):
        raise click.UsageError("--map and --recompute go without --to and --decode; use kvtool recode first")
    if across and limits is not None:
        raise click.UsageError("--require goes by what is sealed in a file: write one with kvtool recode --map or --recompute, and seal it")
    if target is not None:
        check_target(target[1])

    from kvtool.archive import cast_note
    from kvtool.archive import open as open_archive
    from kvtool.bridges.bridging import load_across
    from kvtool.capturing import check_ids
    from kvtool.foreign import write_mlx_lm
    from kvtool.loading import load
    from kvtool.model import load_model
    from kvtool.sealing import parse_limits, require

    text = read_text(prompt_file) if prompt_file is not None else prompt
    model = load_model(model_name, dtype=dtype)
    suffix = [] if text is None else list(model.tokenizer.encode(text, add_special_tokens=False))
    check_ids(model, suffix)
    demands = None if limits is None else parse_limits(limits)
    with open_archive(source, calibration=calibration) as archive:
        if demands is not None:
            require(source, archive.manifest, model.info, demands)
        if target is not None:
            probes = archive.check(model, allow_mismatch=allow_mismatch)
            casts: list[str] = []
            states = tuple(archive.states(probes, casts))
            # mlx_lm.generate loads this name, and knows no model that ships with kvtool.
            name = str(model.folder) if model_name in tiny.NAMES else model_name
            write_mlx_lm(target[1], states, {"model": name, "tokenizer_config": "{}"})
            remarks = list(cast_note(casts))
            if archive.tokens is not None and len(archive.tokens) > archive.length:
                remarks.append("the last token is not in the cache (it could not be taken back there); begin the prompt with it")
            for remark in (*map(quality_line, archive.manifest.quality), *remarks):
                note(remark)
            size = os.path.getsize(target[1])
            emit(
                as_json,
                {
                    "path": target[1],
                    "usable_tokens": archive.length,
                    "file_bytes": size,
                    "quality": list(archive.manifest.quality),
                    "notes": remarks,
                },
                f"{target[1]}: {archive.length} tokens, {size:,} bytes\n"
                f"{shlex.join(['mlx_lm.generate', '--model', name, '--prompt-cache-file', target[1], '--prompt', 'TEXT'])}",
            )
            return
        quality = list(archive.manifest.quality)
    start = time.perf_counter()
    with bar("loading", quiet=as_json) as progress:
        more: dict[str, Any] = {"live": live, "calibration": calibration, "progress": progress}
        if across:
            restored = load_across(source, model, mapping=mapping, recompute=recompute, **more)
        else:
            restored = load(source, model, decode=decode, allow_mismatch=allow_mismatch, **more)
    loaded = time.perf_counter() - start
    for remark in (*map(quality_line, quality), *restored.notes):
        note(remark)
    usable, held = restored.usable, sum(c.nbytes for c in restored.cache)
    ids = [*(restored.tokens or ())[restored.usable :], *suffix] if suffix else restored.pending()
    pieces: list[str] = []
    last: Any = None
    for last in _stream(model, restored.cache, ids, max_tokens, temperature):
        pieces.append(last.text)
        if not as_json:
            click.echo(last.text, nl=False)
    result = {
        "text": "".join(pieces),
        "usable_tokens": usable,
        "prompt_tokens": len(ids),
        "generated_tokens": 0 if last is None else last.generation_tokens,
        "load_seconds": round(loaded, 4),
        "cache_bytes": held,
        "finish_reason": None if last is None else last.finish_reason,
        "quality": quality,
        "notes": list(restored.notes),
    }
    if as_json:
        emit(True, result, "")
    else:
        click.echo()
        memory = f"{held:,} bytes in memory"
        click.echo(f"{usable} tokens from {source} in {loaded:.2f} s, {memory}, {result['generated_tokens']} generated", err=True)


def _stream(model: "LoadedModel", cache: list[Any], ids: list[int], max_tokens: int, temperature: float) -> Iterator[Any]:
    from mlx_lm.generate import stream_generate
    from mlx_lm.sample_utils import make_sampler

    yield from stream_generate(
        model.model, model.tokenizer, ids, max_tokens=max_tokens, prompt_cache=cache, sampler=make_sampler(temp=temperature)
    )
