"""`kvtool store`: prompt caches in a folder or elsewhere, found by their tokens."""

from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from formats.errors import counted
from kvtool.cli._common import (
    OutputFile,
    adapter_option,
    bar,
    calibration_option,
    check_store,
    check_target,
    chunk_option,
    dtype_option,
    emit,
    error_figures,
    json_option,
    model_option,
    note,
    opened,
    printable,
    put_lines,
    quality_line,
    quota_option,
    read_text,
    read_tokens,
)

if TYPE_CHECKING:
    from kvtool.store.store import Store

new_or_old = click.argument("where", metavar="STORE")
where = click.argument("where", metavar="STORE", callback=lambda ctx, param, value: there(value))
ids = click.argument("ids", metavar="ID...", nargs=-1, required=True)


def there(where: str) -> str:
    """The address of a store that is there."""
    check_store(where)
    return where


@click.group("store")
def command() -> None:
    """Keep prompt caches in a store: a folder, where prompts that begin alike share what they have in common.

    `kvtool export --store DIR` puts a prompt, `kvtool import --store DIR` goes on from the longest beginning that is there. STORE is a
    folder, s3://BUCKET/PREFIX (gs://, az://), or redis://HOST:PORT (rediss://, valkey://); credentials come from the environment. With
    KVTOOL_STORE_KEY=FILE objects are encrypted.

    \b
    Example:
      kvtool store ls prompts
    """


@command.command("keygen")
@click.argument("path", metavar="FILE", type=OutputFile())
def keygen(path: str) -> None:
    """Make a key for an encrypted store, in a new file that its owner alone can read.

    $KVTOOL_STORE_KEY names the file to every command that takes a store; what is put is then encrypted with it. Without the key nothing
    comes back: keep a copy elsewhere. Whoever reads the store sees sizes, times, the digests of models, and which prompts begin alike.

    \b
    Example:
      kvtool store keygen prompts.key
    """
    from kvtool.store.key_files import make_key

    make_key(path)
    click.echo(f"{path}: a new key; set KVTOOL_STORE_KEY={path}")


@command.command("ls")
@where
@click.option("--chunks", is_flag=True, help="List every chunk, not only the ends of prompts.")
@json_option
def ls(where: str, chunks: bool, as_json: bool) -> None:
    """List what a store holds, the last used first, with the error that each file records (squared, over the energy).

    \b
    Example:
      kvtool store ls prompts --chunks
    """
    from concurrent.futures import ThreadPoolExecutor

    from kvtool.store.measured import measured

    with opened(where) as store, ThreadPoolExecutor(16) as pool:
        entries = sorted(store.entries(), key=lambda entry: -entry.used)
        shown = [entry for entry in entries if chunks or entry.kind == "tail"]
        quality = list(pool.map(lambda entry: measured(store.objects, entry.name), shown))
    ends, chunked = (sum(entry.kind == kind for entry in entries) for kind in ("tail", "chunk"))
    lines = [f"{where}: {counted(ends, 'prompt')}, {counted(chunked, 'chunk')}"]
    for entry, steps in zip(shown, quality, strict=True):
        used = datetime.fromtimestamp(entry.used, UTC).isoformat(sep=" ", timespec="seconds")[:19]
        rows = f"tokens {entry.start} to {entry.start + entry.tokens}"
        pinned = "  pinned" if entry.pinned else ""
        about = f"{entry.kind:5}  {rows:22}  {entry.bytes:>13,} bytes  {used}  {entry.model}  {entry.codec}"
        about += "".join(f"  error {', '.join(figures)}" for step in (steps or ())[-1:] if (figures := error_figures(step)))
        lines.append(f"  {entry.id[:12]}  {printable(about)}{pinned}")
    emit(
        as_json,
        {"store": where, "entries": [asdict(entry) | {"quality": steps} for entry, steps in zip(shown, quality, strict=True)]},
        "\n".join(lines),
    )


@command.command("stats")
@where
@json_option
def stats(where: str, as_json: bool) -> None:
    """Count objects and bytes.

    \b
    Example:
      kvtool store stats prompts
    """
    with opened(where) as store:
        found = store.stats()
    data = {"store": where, **{name: found[name] for name in ("kinds", "unfinished_bytes", "bytes")}}
    lines = [f"{where}: {found['bytes']:,} bytes"]
    lines += [f"  {kind:12}  {about['objects']:>8}  {about['bytes']:>15,} bytes" for kind, about in sorted(found["kinds"].items())]
    lines += [f"  on their way, or left: {found['unfinished_bytes']:,} bytes"] if found["unfinished_bytes"] else []
    emit(as_json, data, "\n".join(lines))


@command.command("check")
@where
@json_option
@click.pass_context
def check(ctx: click.Context, where: str, as_json: bool) -> None:
    """Read every object: is each what its name says, byte for byte? Changes nothing.

    The exit code is 0 for a sound store, else 1. What is damaged counts as absent, and is written anew by the next put.

    \b
    Example:
      kvtool store check prompts
    """
    with opened(where) as store, bar("checking", quiet=as_json) as progress:
        found = store.check(progress)
    lines = [f"{where}: {'sound' if not found.problems else counted(len(found.problems), 'problem')}, {counted(found.objects, 'object')}"]
    lines += [f"  {problem.name}: {problem.kind}: {printable(problem.what)}" for problem in found.problems]
    lost = f"  {counted(len(found.lost), 'object')} after what is gone; kvtool store gc removes them once they are a minute old"
    lines += [lost] if found.lost else []
    lines += [f"  {found.unfinished:,} bytes are on their way, or of writers that died"] if found.unfinished else []
    emit(as_json, {"store": where, "sound": not found.problems, **asdict(found)}, "\n".join(lines))
    ctx.exit(1 if found.problems else 0)


@command.command("gc")
@where
@quota_option
@click.option(
    "--tenants",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also remove the objects of tenants of a service that this file does not have (any more).",
)
@json_option
def gc(where: str, quota: int | None, tenants: Path | None, as_json: bool) -> None:
    """Remove what writers that died left, what no prompt needs any more, and what a quota has no room for.

    What the tenants of a service have is theirs, and their quotas' affair; --tenants names who they are.

    \b
    Example:
      kvtool store gc prompts --quota 10GB
      kvtool store gc prompts --tenants tenants.json
    """
    from kvtool.service.leaving import clear, orphans

    with opened(where, quota) as store:
        gone = [] if tenants is None else list(orphans(store.objects, tenants))
        freed = store.gc() + sum(clear(store.objects, folder)[1] for folder in gone)
        left = store.stats()["bytes"]
    lines = [f"{where}: {freed:,} bytes freed, {left:,} left", *(f"  {folder}: of no tenant" for folder in gone)]
    emit(as_json, {"store": where, "freed_bytes": freed, "bytes": left, "orphans": gone}, "\n".join(lines))


@command.command("put")
@new_or_old
@click.argument("source", metavar="IN.kv", type=click.Path(exists=True, dir_okay=False))
@model_option
@adapter_option
@click.option("--codec", default="rvq-4", show_default=True, metavar="SPEC", help="Encode with this codec; see kvtool export.")
@quota_option
@chunk_option
@calibration_option
@dtype_option
@json_option
def put(
    where: str,
    source: str,
    model_name: str,
    adapter: str | None,
    codec: str,
    quota: int | None,
    chunk: int | None,
    calibration: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Put a file's cache into a store. Rows that a lossy codec has stored are coded once more; kvtool export --store codes the model's own.

    A file has the cache after all its tokens, and none before: kvtool export --store --snapshot-every runs the prompt and keeps those too.

    \b
    Example:
      kvtool store put prompts report.kv --model tiny-a --codec rvq-4
    """
    from kvtool.archive import open as open_archive
    from kvtool.capturing import Snapshot
    from kvtool.model import load_model

    model = load_model(model_name, dtype=dtype, adapter=adapter)
    with open_archive(source, calibration=calibration) as archive:
        probes = archive.check(model)
        casts: list[str] = []
        states = tuple(archive.states(probes, casts))
        info = replace(archive.manifest.model, dtype=model.info.dtype)
        inputs = {given.layer: archive.decoder.layer_input(given.layer) for given in archive.manifest.layer_inputs}
        snapshot = Snapshot(info, archive.tokens, archive.length, states, probes, archive.manifest.quality, inputs)
    with opened(where, quota, chunk) as store, bar("writing", quiet=as_json) as progress:
        report = store.put(snapshot, codec=codec, calibration=calibration, model=model, progress=progress)
    for remark in report.notes:
        note(remark)
    emit(as_json, {"store": where, **asdict(report)}, put_lines(report))


@command.command("get")
@where
@model_option
@adapter_option
@click.option("--prompt", metavar="TEXT", help="The prompt.")
@click.option("--prompt-file", metavar="F", help="File with the prompt; - is stdin.")
@click.option("--tokens", "tokens_file", metavar="F", help="File with its token ids instead (JSON list or integers).")
@click.option("--chat", is_flag=True, help="Wrap the prompt as a user's message in the model's chat template.")
@dtype_option
@click.option("-o", "--output", required=True, type=OutputFile(), metavar="OUT.kv")
@json_option
def get(
    where: str,
    model_name: str,
    adapter: str | None,
    prompt: str | None,
    prompt_file: str | None,
    tokens_file: str | None,
    chat: bool,
    dtype: str,
    output: str,
    as_json: bool,
) -> None:
    """Write the longest beginning of a prompt that a store holds as one file, its codes as they are. Exit code 5 where there is none.

    \b
    Example:
      kvtool store get prompts --model tiny-a --prompt-file report.txt -o report.kv
    """
    if sum(given is not None for given in (prompt, prompt_file, tokens_file)) != 1 or (chat and tokens_file is not None):
        raise click.UsageError("give one of --prompt, --prompt-file and --tokens, the last without --chat")
    check_target(output)
    tokens = None if tokens_file is None else read_tokens(tokens_file)
    text = read_text(prompt_file) if prompt_file is not None else prompt

    from formats.errors import IncompatibleError
    from kvtool.archive import open as open_archive
    from kvtool.capturing import encode_prompt
    from kvtool.model import load_model

    model = load_model(model_name, dtype=dtype, adapter=adapter)
    prompt_ids = encode_prompt(model, text or "", chat=chat) if tokens is None else tokens
    with opened(where) as store:
        match = store.get(prompt_ids, model, output)
    if match is None:
        raise IncompatibleError(f"holds no beginning of these {counted(len(prompt_ids), 'token')} for {model.info.name}", path=where)
    data = {"store": where, "path": output, "tokens": match.usable, "prompt_tokens": len(prompt_ids), "codec": match.space.codec}
    turned = ", keys turned to this model's rotation" if match.recode else ""
    text = f"{output}: {match.usable} of {counted(len(prompt_ids), 'token')}, codec {match.space.codec}{turned}"
    with open_archive(output) as archive:
        quality = list(archive.manifest.quality)
    lines = [text, *(f"  {quality_line(step)}" for step in quality)]
    emit(as_json, {**data, "id": match.id, "turned": match.recode, "quality": quality}, "\n".join(lines))


@command.command("rm")
@where
@ids
@json_option
def rm(where: str, ids: tuple[str, ...], as_json: bool) -> None:
    """Remove prompts, or chunks with all that follows them, by the beginnings of their ids; chunks that others need stay.

    \b
    Example:
      kvtool store rm prompts 64b5c28f228d
    """
    with opened(where) as store:
        freed = sum(store.remove(one) for one in ids)
    emit(as_json, {"store": where, "freed_bytes": freed}, f"{where}: {freed:,} bytes freed")


def _each(where: str, ids: tuple[str, ...], as_json: bool, field: str, told: str, do: Callable[["Store", str], str]) -> None:
    """Do the same to several objects, and say so."""
    with opened(where) as store:
        found = [do(store, one) for one in ids]
    emit(as_json, {"store": where, field: found}, "\n".join(f"{one}: {told}" for one in found))


@command.command("pin")
@where
@ids
@json_option
def pin(where: str, ids: tuple[str, ...], as_json: bool) -> None:
    """Keep prompts, whatever a quota says.

    \b
    Example:
      kvtool store pin prompts 64b5c28f228d
    """
    _each(where, ids, as_json, "pinned", "pinned", lambda store, one: store.pin(one))


@command.command("unpin")
@where
@ids
@json_option
def unpin(where: str, ids: tuple[str, ...], as_json: bool) -> None:
    """Let pinned prompts go again when room is needed.

    \b
    Example:
      kvtool store unpin prompts 64b5c28f228d
    """
    _each(where, ids, as_json, "unpinned", "not pinned", lambda store, one: store.unpin(one))
