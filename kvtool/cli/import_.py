"""`kvtool import`: go on from a file's cache, or write it as mlx-lm's own prompt-cache file."""

import math
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from formats.errors import counted
from kvtool import tiny
from kvtool.cli._common import (
    OutputFile,
    adapter_option,
    alignment,
    bar,
    calibration_option,
    check_target,
    chunk_option,
    dtype_option,
    emit,
    from_model_option,
    json_option,
    map_option,
    model_option,
    note,
    opened,
    overlap_option,
    quality_line,
    quota_option,
    read_text,
    recompute_option,
    snapshot_option,
)

if TYPE_CHECKING:
    from kvtool.model import LoadedModel


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


@click.command("import")
@click.argument("source", metavar="[IN.kv]", required=False, type=click.Path(exists=True, dir_okay=False))
@model_option
@adapter_option
@click.option("--store", "where", metavar="STORE", help="Go on from the longest beginning of the prompt in a store; see kvtool store.")
@click.option("--prompt", metavar="TEXT", help="Text that follows the cached prompt; with --store the whole prompt.")
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
    type=(click.Choice(["mlx-lm"]), OutputFile()),
    metavar="mlx-lm OUT.safetensors",
    help="Write a file that mlx_lm.generate --prompt-cache-file takes.",
)
@click.option("--decode", is_flag=True, help="Expand the codes to mlx-lm's own caches; by default attention reads codes.")
@click.option("--live", metavar="SPEC", help="Keep the rows in this codec while they live, such as tc-3 for a file of tcz.")
@click.option(
    "--allow-mismatch",
    is_flag=True,
    help="Accept a file of another model (weights, adapter, config, tokenizer); shapes and RoPE must fit all the same.",
)
@map_option
@recompute_option
@from_model_option
@overlap_option
@click.option("--require", "limits", metavar="LIMITS", help="Refuse (exit 7) unless sealed to be as good, such as kl=0.05,top1=0.9.")
@click.option("--chat", is_flag=True, help="With --store: wrap the prompt as a user's message in the model's chat template.")
@click.option("--codec", metavar="SPEC", help="With --store: code what was run like this; by default like its beginning, else rvq-4.")
@snapshot_option
@click.option("--no-put", is_flag=True, help="With --store: leave the store as it is.")
@quota_option
@chunk_option
@calibration_option
@dtype_option
@json_option
def command(
    source: str | None,
    model_name: str,
    adapter: str | None,
    where: str | None,
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
    from_model: str | None,
    overlap: float | None,
    limits: str | None,
    chat: bool,
    codec: str | None,
    every: int | None,
    no_put: bool,
    quota: int | None,
    chunk: int | None,
    calibration: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Go on from a file's cache: the text streams to stdout. With --to, write mlx-lm's own file instead.

    With --store, the longest beginning of the prompt that the store holds is loaded, the rest is run and put there for the next time.

    \b
    Example:
      kvtool import report.kv --model tiny-a --prompt "In short:" --max-tokens 40
      kvtool import --store prompts --model tiny-a --prompt-file report.txt
      kvtool import report.kv --model tiny-a --to mlx-lm report.safetensors
      kvtool import report.kv --model C --map a-to-c.safetensors --from-model tiny-a --prompt "In short:"
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give one of --prompt and --prompt-file")
    if (source is None) == (where is None):
        raise click.UsageError("give one of IN.kv and --store")
    if where is None and (chat or no_put or (codec, every, quota, chunk) != (None,) * 4):
        raise click.UsageError("--chat, --codec, --snapshot-every, --no-put, --quota and --chunk go with --store")
    if where is not None and (target, live, mapping, recompute, from_model, limits, allow_mismatch) != (*(None,) * 6, False):
        raise click.UsageError(
            "--to, --live, --map, --recompute, --from-model, --require, --allow-mismatch go with a file (kvtool store get)"
        )
    if where is not None and prompt is None and prompt_file is None:
        raise click.UsageError("--store goes with --prompt or --prompt-file: a cache is found by its prompt")
    if target is not None and (prompt is not None or prompt_file is not None):
        raise click.UsageError("--to writes the cache alone; give the prompt to mlx_lm.generate")
    if decode and live is not None:
        raise click.UsageError("give one of --decode and --live")
    across = mapping is not None or recompute is not None
    least = alignment(mapping, from_model, overlap)
    if across and (target is not None or decode):
        raise click.UsageError("--map and --recompute go without --to and --decode; use kvtool recode first")
    if across and limits is not None:
        raise click.UsageError("--require goes by what is sealed in a file: write one with kvtool recode --map or --recompute, and seal it")
    if target is not None:
        check_target(target[1])

    from kvtool.archive import cast_note
    from kvtool.archive import open as open_archive
    from kvtool.bridges.bridging import load_across
    from kvtool.capturing import check_ids, encode_prompt
    from kvtool.foreign import write_mlx_lm
    from kvtool.loading import load
    from kvtool.model import load_model
    from kvtool.sealing import parse_limits, require
    from kvtool.store.resuming import resume

    text = read_text(prompt_file) if prompt_file is not None else prompt
    model = load_model(model_name, dtype=dtype, adapter=adapter)
    if where is not None:
        assert text is not None
        tokens = encode_prompt(model, text, chat=chat)
        start = time.perf_counter()
        with opened(where, quota, chunk) as store, bar("prefill", quiet=as_json) as progress:
            resumed = resume(
                store, tokens, model, codec=codec, calibration=calibration, put=not no_put, every=every, decode=decode, progress=progress
            )
        for remark in (*map(quality_line, resumed.quality), *resumed.notes):
            note(remark)
        about: dict[str, Any] = {
            "usable_tokens": resumed.usable,
            "prefilled_tokens": resumed.ran,
            "codec": resumed.codec,
            "quality": list(resumed.quality),
            "put": None if resumed.put is None else asdict(resumed.put),
            "load_seconds": round(time.perf_counter() - start, 4),
            "notes": list(resumed.notes),
        }
        joined = "nothing put" if resumed.put is None else f"{counted(resumed.put.new, 'object')} put as {resumed.put.codec}"
        coded = "" if resumed.codec is None else f" ({resumed.codec})"
        line = f"{resumed.usable} of {counted(len(tokens), 'token')} from {where}{coded}, {resumed.ran} run, {joined}"
        _generate(model, resumed.cache, [resumed.last], max_tokens, temperature, about, line, as_json)
        return
    assert source is not None
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
            remarks = [*archive.identity_notes(model), *cast_note(casts)]
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
                f"{target[1]}: {counted(archive.length, 'token')}, {size:,} bytes\n"
                f"{shlex.join(['mlx_lm.generate', '--model', name, '--prompt-cache-file', target[1], '--prompt', 'TEXT'])}",
            )
            return
        quality = list(archive.manifest.quality)
    start = time.perf_counter()
    with bar("loading", quiet=as_json) as progress:
        more: dict[str, Any] = {"live": live, "calibration": calibration, "progress": progress}
        if across:
            by = None if from_model is None else load_model(from_model, dtype=dtype)
            restored = load_across(source, model, mapping=mapping, recompute=recompute, from_model=by, **least, **more)
        else:
            restored = load(source, model, decode=decode, allow_mismatch=allow_mismatch, **more)
    loaded = time.perf_counter() - start
    for remark in (*map(quality_line, quality), *restored.notes):
        note(remark)
    usable = restored.usable
    ids = [*(restored.tokens or ())[restored.usable :], *suffix] if suffix else restored.pending()
    about = {"usable_tokens": usable, "load_seconds": round(loaded, 4), "quality": quality, "notes": list(restored.notes)}
    line = f"{counted(usable, 'token')} from {source} in {loaded:.2f} s"
    _generate(model, restored.cache, ids, max_tokens, temperature, about, line, as_json)


def _generate(
    model: "LoadedModel",
    cache: list[Any],
    ids: list[int],
    max_tokens: int,
    temperature: float,
    about: dict[str, Any],
    line: str,
    as_json: bool,
) -> None:
    """Stream what follows `ids` to stdout, then say where the cache came from: `line` on stderr, or all as one object."""
    held = sum(c.nbytes for c in cache)
    pieces: list[str] = []
    last: Any = None
    for last in _stream(model, cache, ids, max_tokens, temperature):
        pieces.append(last.text)
        if not as_json:
            click.echo(last.text, nl=False)
    generated = 0 if last is None else last.generation_tokens
    if as_json:
        result = {"text": "".join(pieces), **about, "prompt_tokens": len(ids), "generated_tokens": generated, "cache_bytes": held}
        emit(True, result | {"finish_reason": None if last is None else last.finish_reason}, "")
    else:
        click.echo()
        click.echo(f"{line}, {held:,} bytes in memory, {generated} generated", err=True)


def _stream(model: "LoadedModel", cache: list[Any], ids: list[int], max_tokens: int, temperature: float) -> Iterator[Any]:
    from mlx_lm.generate import stream_generate
    from mlx_lm.sample_utils import make_sampler

    yield from stream_generate(
        model.model, model.tokenizer, ids, max_tokens=max_tokens, prompt_cache=cache, sampler=make_sampler(temp=temperature)
    )
