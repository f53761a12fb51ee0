"""`kvtool export`: run a prompt once and keep its KV cache in a file."""

import math
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import IncompatibleError, counted
from formats.files import naming
from kvtool.cli._common import (
    OutputFile,
    adapter_option,
    bar,
    check_target,
    chunk_option,
    dtype_option,
    emit,
    frame_option,
    json_option,
    model_option,
    note,
    opened,
    put_lines,
    quota_option,
    read_text,
    read_tokens,
    recent_option,
    save_lines,
    sink_option,
    snapshot_option,
)

if TYPE_CHECKING:
    from kvtool.model import LoadedModel


@click.command("export")
@model_option
@adapter_option
@click.option("--prompt", metavar="TEXT", help="The prompt.")
@click.option("--prompt-file", metavar="F", help="File with the prompt; - is stdin.")
@click.option(
    "--tokens", "tokens_file", metavar="F", help="File with token ids (JSON list or integers): the prompt, or what --from-cache stands for."
)
@click.option("--from-cache", metavar="F", help="Take over an mlx-lm prompt cache file (version 1 or 2) instead of running a prompt.")
@click.option("--chat", is_flag=True, help="Wrap the prompt as a user's message in the model's chat template.")
@click.option(
    "--codec",
    default="raw",
    show_default=True,
    metavar="SPEC",
    help="raw, rvq-4, rvq-2+2, rabitq-3, affine-4, commvq-2, vecinfer-2, qjl-2, tc-2, tcz-1, k=commvq-2,v=rvq-4, ...; see the README. "
    "All but raw keep the first 4 and the newest 32 tokens exact; with ,sink=0,recent=0 none.",
)
@click.option(
    "--calibration",
    metavar="FILE|DIGEST|auto|self",
    help="Tables of a calibration: a file, one of the store, its newest for the model (auto), or learnt from this cache (self). "
    "By default auto where there is one, else self.",
)
@click.option(
    "--carry", is_flag=True, help="Put the tables of tc or commvq-N:additive into the file, so that it needs no calibration to be read."
)
@click.option(
    "--quality",
    metavar="kl=X",
    help="Take the smallest rate of tcz, or of the --codec tc-N given, whose KL measured on the prompt is at most X nats a token; "
    "exit code 7 where none is.",
)
@click.option(
    "--layer-input",
    "layer_inputs",
    metavar="A[,B...]",
    help="Keep what enters these layers too: a model of the same shapes can run its own from there on (import --recompute layers=A-B).",
)
@sink_option
@recent_option
@frame_option
@click.option("--no-zstd", is_flag=True, help="Store every tensor uncompressed.")
@dtype_option
@click.option("-o", "--output", type=OutputFile(), metavar="OUT.kv", help="The file to write.")
@click.option("--store", "where", metavar="STORE", help="Put it into a store instead; see kvtool store.")
@quota_option
@chunk_option
@snapshot_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    model_name: str,
    adapter: str | None,
    prompt: str | None,
    prompt_file: str | None,
    tokens_file: str | None,
    from_cache: str | None,
    chat: bool,
    codec: str,
    calibration: str | None,
    carry: bool,
    quality: str | None,
    layer_inputs: str | None,
    sink: int | None,
    recent: int | None,
    frame: str | None,
    no_zstd: bool,
    dtype: str,
    output: str | None,
    where: str | None,
    quota: int | None,
    chunk: int | None,
    every: int | None,
    as_json: bool,
) -> None:
    """Run a prompt once and keep its KV cache in a file, or in a store.

    \b
    Example:
      kvtool export --model tiny-a --prompt-file report.txt --codec rvq-2+2 -o report.kv
      kvtool export --model tiny-a --prompt-file report.txt --codec tc-2 --quality kl=0.01 -o report.kv
      kvtool export --model tiny-a --prompt-file report.txt --codec rvq-4 --store prompts
      kvtool export --model tiny-a --from-cache old.safetensors --tokens ids.json -o old.kv
    """
    given = [
        name for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--from-cache", from_cache)) if value is not None
    ]
    if len(given) > 1 or (not given and tokens_file is None) or (tokens_file is not None and given not in ([], ["--from-cache"])):
        raise click.UsageError("give one of --prompt, --prompt-file, --tokens, or --from-cache (with --tokens where the ids are known)")
    if chat and not (prompt or prompt_file):
        raise click.UsageError("--chat goes with --prompt or --prompt-file")
    if layer_inputs is not None and from_cache is not None:
        raise click.UsageError("--layer-input needs a prompt to run: a cache does not hold what entered its layers")
    inputs = [] if layer_inputs is None else _layers(layer_inputs)
    limit = None if quality is None else _limit(quality)
    if quality is not None and from_cache is not None:
        raise click.UsageError("--quality measures on the prompt, so it does not go with --from-cache")
    if (output is None) == (where is None) or (where is None and (quota, chunk, every) != (None,) * 3) or (where is not None and no_zstd):
        raise click.UsageError(
            "give one of --output and --store; --quota, --chunk and --snapshot-every go with the latter, --no-zstd with the former"
        )
    if every is not None and (from_cache is not None or limit is not None):
        raise click.UsageError(
            "--snapshot-every keeps a prompt's cache while it is run, with a given codec: not with --from-cache or --quality"
        )
    if where is not None and layer_inputs is not None:
        raise click.UsageError("--layer-input goes with --output: a store keeps keys and values alone")
    if output is not None:
        check_target(output)
    ids = None if tokens_file is None else read_tokens(tokens_file)
    text = read_text(prompt_file) if prompt_file is not None else prompt

    from kvtool.archive import save
    from kvtool.capturing import capture, encode_prompt
    from kvtool.encoding import codec_plan
    from kvtool.foreign import caches_from_prompt_cache
    from kvtool.model import load_model
    from kvtool.store.resuming import put_prompt
    from veloxquant_mlx.codecs import CodecPlan
    from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
    from veloxquant_mlx.codecs.tc import Tc

    # A quality asked for without a codec means tcz, whose rate is then found.
    chosen = context.get_parameter_source("codec") is not click.core.ParameterSource.DEFAULT
    plan = codec_plan("tcz-1" if limit is not None and not chosen else codec, sink, recent, frame)

    def carried(plan: CodecPlan) -> CodecPlan:
        if not carry:
            return plan
        if isinstance(plan.k, CommVqAdditive):
            return replace(plan, k=replace(plan.k, carry=True))
        if not isinstance(plan.k, Tc) or not isinstance(plan.v, Tc):
            raise click.UsageError(f"--carry goes with tc and commvq-N:additive, not with {plan.spec()}")
        return replace(plan, k=replace(plan.k, carry=True), v=replace(plan.v, carry=True))

    plan = plan if limit is not None else carried(plan)
    model = load_model(model_name, dtype=dtype, adapter=adapter)
    if from_cache is not None:
        caches, metadata = caches_from_prompt_cache(from_cache)
        _check_origin(from_cache, metadata.get("model"), model_name, model)
        if adapter is not None:
            note(f"{from_cache} does not say which adapter computed it: that it is {adapter} is taken on trust")
        with naming(from_cache):
            snapshot = capture(model, cache=caches, tokens=ids)
    elif every is not None:
        assert where is not None
        prompt_ids = ids if ids is not None else encode_prompt(model, text or "", chat=chat)
        with opened(where, quota, chunk) as store, bar("prefill", quiet=as_json) as progress:
            put = put_prompt(store, prompt_ids, model, codec=plan, calibration=calibration, every=every, progress=progress)
        emit(as_json, {"store": where, **asdict(put), "prompt_tokens": len(prompt_ids)}, put_lines(put))
        return
    else:
        with bar("prefill", quiet=as_json) as progress:
            snapshot = capture(model, text if text is not None else ids, chat=chat, layer_inputs=inputs, progress=progress)
    details: dict[str, Any] | None = None
    if limit is not None:
        from kvtool.calibrations import resolve
        from kvtool.quality import smallest_rate

        tables = resolve(calibration, model.info.effective_weights)
        family = plan.k.id
        if family not in ("tc", "tcz"):
            raise click.UsageError(
                f"--quality finds the rate of tc-N or tcz-R, not of {plan.spec()}: leave --codec out, or give one of these"
            )
        if family == "tcz" and tables is None:
            family = "tc"
            note("no calibration of this model: tc, with tables learnt from the prompt, instead of tcz")
        with bar("measuring", quiet=as_json) as progress:
            found = smallest_rate(model, snapshot, limit, family=family, plan=plan, calibration=tables, progress=progress)
        plan, details = carried(found.plan), found.record()
        measured = f"KL {found.kl:.3g} nats a token on the prompt ({counted(found.positions, 'token')})"
        note(f"{plan.spec()}: {measured}, at most {limit:g} asked for")
    prompt_tokens = None if snapshot.tokens is None else len(snapshot.tokens)
    if output is None:
        assert where is not None
        with opened(where, quota, chunk) as store, bar("writing", quiet=as_json) as progress:
            put = store.put(snapshot, codec=plan, calibration=calibration, model=model, progress=progress)
        emit(as_json, {"store": where, **asdict(put), "prompt_tokens": prompt_tokens}, put_lines(put))
        return
    with bar("writing", quiet=as_json) as progress:
        report = save(
            snapshot,
            output,
            codec=plan,
            calibration=calibration,
            model=model,
            details=details,
            compress=not no_zstd,
            progress=progress,
        )
    for remark in report.notes:
        note(remark)
    emit(as_json, {**asdict(report), "prompt_tokens": prompt_tokens}, save_lines(report))


def _layers(text: str) -> list[int]:
    """A,B as layers."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise click.UsageError(f"--layer-input must be layers such as 9 or 9,12, but is {text!r}")
    return sorted({int(word) for word in words})


def _limit(quality: str) -> float:
    """X of kl=X."""
    name, _, value = quality.partition("=")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if name != "kl" or not 0 < limit < math.inf:
        raise click.UsageError(f"--quality must be kl=X with X positive, but is {quality!r}")
    return limit


def _check_origin(path: str, said: str | None, model_name: str, model: "LoadedModel") -> None:
    """mlx-lm's file names the model that computed it: refuse another one where that can be told, say so where it cannot.

    Raises:
        IncompatibleError: the file names a model directory with other weights.
    """
    if said is None or said in (model_name, str(model.folder)):
        return
    if not Path(said).is_dir():
        note(f"{path} was computed by {said}; that this is {model_name} is taken on trust")
        return
    from kvtool.identity import weights_digest

    if weights_digest(Path(said)) != model.info.weights:
        raise IncompatibleError(
            f"computed by {said}, whose weights are not those of {model.info.name}", path=path, hint=f"give --model {shlex.quote(said)}"
        )
