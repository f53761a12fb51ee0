"""`kvtool profile`: measure what recomputing which part of another model's cache is worth."""

import os
import shlex
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from formats.errors import counted
from kvtool.cli._common import (
    OutputFile,
    bar,
    check_target,
    emit,
    load_two,
    map_option,
    named_texts,
    note,
    two_models,
)

if TYPE_CHECKING:
    from formats.profile import Profile


@click.command("profile")
@click.option(
    "--text", "files", multiple=True, required=True, metavar="F", help="File with a text that the map was not fitted on; several times."
)
@map_option
@click.option("--prefix", type=click.IntRange(1), default=512, show_default=True, metavar="N", help="Tokens cached.")
@click.option("--n", "scored", type=click.IntRange(1), default=256, show_default=True, metavar="N", help="Tokens scored after them.")
@click.option("--step", type=click.IntRange(1), metavar="N", help="Layers of the coarse grid's step; a sixth of them by default.")
@click.option("-o", "--output", required=True, type=OutputFile(), metavar="PROFILE", help="The file to write.")
@two_models
def command(
    source_name: str,
    target_name: str,
    files: tuple[str, ...],
    mapping: str | None,
    prefix: int,
    scored: int,
    step: int | None,
    output: str,
    adapter_a: str | None,
    adapter_b: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure what a cache of A is worth in B, of the same shapes, by what B recomputes: blocks of layers, chosen tokens, both.

    Each row: the share of a prefill's arithmetic that map and recomputation take, KL to B's own prefill, that over the plain recode's
    with its 95 % interval, and top-1. A * marks those that no other row beats. kvtool recode --profile chooses among them.

    \b
    Example:
      kvtool profile tiny-a tiny-b --text report.txt --prefix 256 -o a-to-b-profile.safetensors
      kvtool recode report.kv -o report-b.kv --to-model tiny-b --profile a-to-b-profile.safetensors --share 20%
    """
    check_target(output)
    texts = named_texts(files)
    assert texts is not None

    from formats.profile import write_profile
    from formats.transfer_map import read_map
    from kvtool.bridges.profiling import profile

    start = time.monotonic()
    source, target = load_two((source_name, target_name), (adapter_a, adapter_b), dtype)
    used, map_digest = (None, None) if mapping is None else read_map(mapping)
    with bar("measuring", quiet=as_json) as progress:
        found = profile(source, target, texts, mapping=used, digest=map_digest, prefix=prefix, scored=scored, step=step, progress=progress)
    digest = write_profile(output, found)
    for remark in found.left_out:
        note(f"not measured: {remark}")
    data: dict[str, Any] = {
        "path": output,
        "digest": digest,
        "source": found.source.name,
        "target": found.target.name,
        "map": found.mapping,
        "texts": dict(found.texts),
        "prefix": found.prefix,
        "scored": found.scored,
        "rows": [{**asdict(row), "front": front} for row, front in zip(found.rows, found.front(), strict=True)],
        "left_out": list(found.left_out),
        "file_bytes": os.path.getsize(output),
        "seconds": round(time.monotonic() - start, 1),
    }
    use = ["kvtool", "recode", "IN.kv", "-o", "OUT.kv", "--to-model", *target.arguments, *(["--map", mapping] if mapping else [])]
    number = counted(len(found.texts), "text")
    head = f"{output}: {found.source.name} to {found.target.name}, {number}, {counted(prefix, 'token')} cached, {scored} scored"
    emit(as_json, data, "\n".join([head, *table(found), f"  use: {shlex.join([*use, '--profile', output, '--share', '20%'])}"]))


def table(found: "Profile") -> list[str]:
    """Rows as text, ascending by share."""
    labels = [", ".join([*(["map"] if row.mapped else []), *([row.plan] if row.plan else [])]) or "plain recode" for row in found.rows]
    width = max(map(len, labels))
    lines = [f"  {'':<{width}}  {'share':>6} {'KL':>8} {'of plain [95 %]':>22} {'top-1':>6}"]
    for row, label, front in zip(found.rows, labels, found.front(), strict=True):
        ends = "" if row.low is None or row.high is None else f" [{row.low:.3f}, {row.high:.3f}]"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}{ends}"
        lines.append(f"{'*' if front else ' '} {label:<{width}}  {row.share:6.1%} {row.kl:8.4f} {ratio:>22} {row.top1:6.3f}")
    return lines
