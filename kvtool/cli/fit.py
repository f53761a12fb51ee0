"""`kvtool fit`: learn a map from one model's keys and values to another's."""

import os
import shlex
import time
from typing import Any

import click

from formats.errors import counted
from kvtool.cli._common import (
    OutputFile,
    bar,
    check_target,
    emit,
    load_two,
    named_texts,
    two_models,
)


@click.command("fit")
@click.option("--text", "files", multiple=True, metavar="F", help="File with a text, twice or more; without any, the shipped texts.")
@click.option("--sources", type=click.IntRange(1), metavar="N", help="Layers of A that a layer of B is built from, at most.")
@click.option(
    "--noise",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="X",
    help="Error that rows of A will have, as of a codec: a share of their energy.",
)
@click.option(
    "--overlap",
    type=click.FloatRange(0, 1),
    metavar="X",
    help="For two tokenizers: the share of B's tokens that must end where one of A's does, such as 0.5.",
)
@click.option("--pieces", type=click.IntRange(2), default=64, show_default=True, metavar="N", help="Pieces of 256 tokens to learn from.")
@click.option("-o", "--output", required=True, type=OutputFile(), metavar="MAP", help="The file to write.")
@two_models
def command(
    source_name: str,
    target_name: str,
    files: tuple[str, ...],
    sources: int | None,
    noise: float | None,
    overlap: float | None,
    pieces: int,
    output: str,
    adapter_a: str | None,
    adapter_b: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Learn a map from A's keys and values to B's, once for all prompts: in closed form, from texts that both models read.

    Between models of the same shapes (a fine-tune) the map corrects each layer's rows; else it builds each
    head's rows from the best layers of A.

    \b
    Example:
      kvtool fit tiny-a tiny-b -o a-to-b.safetensors
      kvtool recode report.kv -o report-b.kv --to-model tiny-b --map a-to-b.safetensors
    """
    check_target(output)
    texts = named_texts(files)

    from formats.transfer_map import write_map
    from kvtool.bridges.fitting import fit
    from kvtool.compat import tokenizer_difference

    start = time.monotonic()
    source, target = load_two((source_name, target_name), (adapter_a, adapter_b), dtype)
    with bar("running texts", quiet=as_json) as progress:
        mapping = fit(source, target, texts, sources=sources, noise=noise, overlap=overlap, pieces=pieces, progress=progress)
    digest = write_map(output, mapping)
    layers = {
        name: {"sources": list(own.sources), "rank": min(own.left.shape), "unexplained": round(own.unexplained, 4)}
        for name, own in mapping.layers.items()
    }
    data: dict[str, Any] = {
        "path": output,
        "digest": digest,
        "source": mapping.source.name,
        "target": mapping.target.name,
        "tokens": mapping.tokens,
        "texts": dict(mapping.texts),
        "layers": layers,
        "file_bytes": os.path.getsize(output),
        "seconds": round(time.monotonic() - start, 1),
    }
    left = [own.unexplained for own in mapping.layers.values()]
    by = [] if tokenizer_difference(mapping.source, mapping.target) is None else ["--from-model", source.argument]
    use = shlex.join(["kvtool", "recode", "IN.kv", "-o", "OUT.kv", "--to-model", *target.arguments, "--map", output, *by])
    emit(
        as_json,
        data,
        f"{output}: {mapping.source.name} to {mapping.target.name}, {data['file_bytes']:,} bytes, made in {data['seconds']:.0f} s\n"
        f"  digest {digest}\n"
        f"  {counted(len(layers), 'layer')}, {mapping.tokens:,} tokens of {counted(len(mapping.texts), 'text')}\n"
        f"  energy left unexplained on texts not fitted on: {min(left):.1%} to {max(left):.1%}\n"
        f"  use: {use}",
    )
