"""What several commands share: options, progress on stderr, JSON on stdout."""

import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.atomic import target_of
from formats.errors import KVError, counted

if TYPE_CHECKING:
    from kvtool.model import LoadedModel
    from kvtool.store.store import PutReport, Store

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
model_option = click.option(
    "--model", "model_name", required=True, metavar="M", help="Model directory, repository id, or tiny-a / tiny-b (shipped with kvtool)."
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "stored", "float32", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Dtype the model runs in; auto is float32 on a Linux CPU, as stored elsewhere.",
)
sink_option = click.option(
    "--sink", type=click.IntRange(0), metavar="N", help="Keep the first N tokens exact; 4 of a lossy codec that does not say."
)
recent_option = click.option(
    "--recent", type=click.IntRange(0), metavar="N", help="Keep the newest N tokens exact; 32 of a lossy codec that does not say."
)
frame_option = click.option("--frame", type=click.Choice(["pre", "post"]), help="Store keys before RoPE (pre) or as cached (post).")

calibration_option = click.option(
    "--calibration", metavar="FILE", help="Calibration that the file's codecs need, where the store does not have it."
)

adapter_option = click.option(
    "--adapter",
    type=click.Path(exists=True, file_okay=False),
    metavar="PATH",
    help="Folder of mlx_lm.lora: an adapter on top of the model.",
)


def two_models(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments A and B, and the options --adapter-a, --adapter-b, --dtype and --json; what `load_two` takes."""
    sides = (
        click.option(
            f"--adapter-{side}",
            type=click.Path(exists=True, file_okay=False),
            metavar="PATH",
            help=f"Folder of mlx_lm.lora: an adapter on top of {side.upper()}.",
        )
        for side in "ab"
    )
    names = (click.argument("source_name", metavar="A"), click.argument("target_name", metavar="B"))
    for one in reversed((*names, *sides, dtype_option, json_option)):
        command = one(command)
    return command


def load_two(names: tuple[str, str], adapters: tuple[str | None, str | None], dtype: str) -> tuple["LoadedModel", "LoadedModel"]:
    """The models A and B."""
    from kvtool.model import load_model

    source, target = (load_model(name, dtype=dtype, adapter=adapter) for name, adapter in zip(names, adapters, strict=True))
    return source, target


map_option = click.option(
    "--map", "mapping", type=click.Path(exists=True, dir_okay=False), metavar="MAP", help="Map rows by this file of `kvtool fit`."
)
from_model_option = click.option(
    "--from-model", metavar="A", help="With --map, where M has another tokenizer: the model that computed IN.kv, for its own."
)
overlap_option = click.option(
    "--overlap",
    type=click.FloatRange(0, 1),
    metavar="X",
    help="With --from-model: the share of M's tokens that must end where one of A's does; 0.5 by default.",
)
recompute_option = click.option(
    "--recompute",
    metavar="PLAN",
    help="What the model computes itself, such as first=4,newest=15%: tokens, or per cent of them; deviating=10%: those whose rows differ "
    "most; layers=9-15: layers 9 to 14 on what entered layer 9 (export --layer-input 9).",
)

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Size(click.ParamType):
    """A number of bytes, such as 500MB, 10GiB or 1000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *([kmgt]?i?)b?", str(value).strip().lower())
        if found is None or found[2] not in _UNITS or float(found[1]) * _UNITS[found[2]] < 1:
            self.fail(f"{value!r} is no size such as 500MB or 10GiB.", param, ctx)
        return int(float(found[1]) * _UNITS[found[2]])


class OutputFile(click.Path):
    """A file to be written, which - is no name of: files are written whole and renamed, never to stdout."""

    def __init__(self, path_type: type | None = None) -> None:
        super().__init__(dir_okay=False, path_type=path_type)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if os.fspath(value) == "-":
            self.fail("nothing is written to stdout: give the name of a file (./- is one).", param, ctx)
        return super().convert(value, param, ctx)


quota_option = click.option(
    "--quota", type=Size(), metavar="SIZE", help="Bytes that the store may take, such as 10GB; the least worth goes. By default no end."
)
chunk_option = click.option(
    "--chunk",
    type=click.IntRange(1, 1 << 20),
    metavar="N",
    help="Tokens of a chunk of what is put into the store, by default 256. Prompts share whole chunks: smaller ones more, in more objects. "
    "What was put with another size is found too, but for an import with --codec.",
)
snapshot_option = click.option(
    "--snapshot-every",
    "every",
    type=click.IntRange(1),
    metavar="N",
    help="With --store, of a model whose cache is kept in one piece (sliding windows, recurrent layers): keep it after each N tokens too.",
)


def emit(as_json: bool, data: dict[str, Any], text: str) -> None:
    """Print a result on stdout, as one JSON object or as text."""
    # What the terminal's encoding lacks stays valid JSON as an escape.
    unicode = getattr(sys.stdout, "encoding", "utf-8").lower().replace("-", "") == "utf8"
    click.echo(json.dumps(_finite(data), indent=2, ensure_ascii=not unicode, allow_nan=False) if as_json else text)


def _finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON does not have, as null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """Text of a file from strangers for a terminal: control characters, line ends too, as escapes."""
    return "".join(char if char >= " " and not "\x7f" <= char <= "\x9f" else f"\\x{ord(char):02x}" for char in text)


_noted: set[str] = set()


def forget_notes() -> None:
    """A new command begins: nothing has been said."""
    _noted.clear()


def first_note(text: str) -> bool:
    """Whether this command says that for the first time."""
    known = text in _noted
    _noted.add(text)
    return not known


def note(text: str) -> None:
    """Print a remark on stderr, once."""
    if first_note(text):
        click.echo(f"note: {printable(text)}", err=True)


@contextmanager
def bar(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress callback that draws on stderr when that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr) as drawn:

        def advance(done: int, total: int) -> None:
            drawn.length = max(total, 1)
            drawn.update(done - drawn.pos)

        yield advance


def read_text(path: str) -> str:
    """Text of a file, or of stdin for "-".

    Raises:
        click.UsageError: not UTF-8.
    """
    if path == "-" and sys.stdin is None:
        raise click.UsageError("there is no stdin to read")
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error


def named_texts(files: Sequence[str]) -> dict[str, str] | None:
    """Texts by the names of their files, later ones of the same name numbered; None for the shipped ones."""
    texts: dict[str, str] = {}
    for file in files:
        name = "stdin" if file == "-" else Path(file).name
        again = 1
        while name in texts:
            again += 1
            name = f"{Path(file).name} ({again})"
        texts[name] = read_text(file)
    return texts or None


def read_tokens(path: str) -> list[int]:
    """Token ids of a file (stdin for "-"): a JSON list, or integers separated by spaces or lines.

    Raises:
        click.UsageError: anything else.
    """
    text = read_text(path)
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{path}: token ids must be a JSON list or integers ({error})") from error
    wrong = next((t for t in ids if not isinstance(t, int) or isinstance(t, bool)), None)
    if wrong is not None:
        raise click.UsageError(f"{path}: token ids must be integers, but one is {wrong!r}")
    return list(ids)


def alignment(mapping: str | None, from_model: str | None, overlap: float | None) -> dict[str, Any]:
    """What of --overlap goes on to the library, after a look at the options that it goes with.

    Raises:
        click.UsageError: one without the other.
    """
    if from_model is not None and mapping is None:
        raise click.UsageError("--from-model goes with --map")
    if overlap is not None and from_model is None:
        raise click.UsageError("--overlap goes with --from-model")
    return {} if overlap is None else {"overlap": overlap}


def check_target(path: str) -> None:
    """Find out before the work, not after it, that a file cannot be written there.

    Raises:
        OSError: its folder is missing or not to be written in, its name is too long, or it is a folder or a device.
    """
    target = target_of(path)
    folder = os.path.dirname(target)
    if not os.access(folder, os.W_OK | os.X_OK):
        code = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), target)


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def save_lines(report: Any) -> str:
    """A SaveReport as text."""
    lines = [
        f"{report.path}: {counted(report.tokens, 'token')}, codec {report.codec}",
        f"  {report.file_bytes:,} bytes, {percent(report.file_bytes, report.fp16_bytes)} of {report.fp16_bytes:,} (16 bits a value)",
    ]
    if report.quality:
        for role, label in (("k", "keys"), ("v", "values")):
            if f"{role}_relative_error" in report.quality:
                lines.append(f"  {label}: squared error / energy {report.quality[f'{role}_relative_error']:.3g}")
    if report.requantised:
        lines.append(f"  quantised by mlx-lm before, coded once more: {', '.join(report.requantised)}")
    if report.calibration is not None:
        lines.append(f"  needs calibration {report.calibration} to be read")
    lines += [f"  fallback: {text}" for text in report.fallbacks]
    lines += [f"  kept as it is: {text}" for text in report.kept_raw] + [f"  stored after RoPE: {text}" for text in report.kept_post]
    return "\n".join(lines)


def check_store(where: str) -> None:
    """Find out before the work that there is a store to look at; addresses elsewhere than in a folder answer for themselves.

    Raises:
        click.UsageError: no such folder.
    """
    if "://" not in where and not Path(where).is_dir():
        raise click.UsageError(
            f"store {where!r} must be a folder that is there, but {'it is a file' if Path(where).exists() else 'there is none'}"
        )


def opened(where: str, quota: int | None = None, chunk: int | None = None) -> "Store":
    """The store at an address; `chunk` tokens are a chunk of what is put, by default as the library has it."""
    from kvtool.store.store import Store

    return Store(where, quota=quota) if chunk is None else Store(where, quota=quota, chunk=chunk)


def put_lines(report: "PutReport") -> str:
    """A PutReport as text."""
    lines = [f"{report.id}: {counted(report.tokens, 'token')}, codec {report.codec}"]
    shared = f"{report.chunks} whole chunks and its end" if report.whole is None else f"in one piece: {report.whole}"
    lines.append(f"  {shared}; {report.new} new, {report.bytes:,} bytes")
    lines += [f"  {quality_line(step)}" for step in report.quality]
    return "\n".join(lines)


def error_figures(step: dict[str, Any]) -> list[str]:
    """Squared error over energy of keys and values, as an entry of a quality record has them."""
    roles = (("keys", step.get("k_relative_error")), ("values", step.get("v_relative_error")))
    return [f"{label} {figure:.3g}" for label, figure in roles if isinstance(figure, int | float)]


def quality_line(step: dict[str, Any]) -> str:
    """One entry of a file's quality record as text."""
    figures = error_figures(step)
    before = ", of what mlx-lm had quantised" if step.get("requantised") else ""
    none = step["note"] if isinstance(step.get("note"), str) else "no added error"
    error = f"squared error / energy: {', '.join(figures)}" if figures else none
    error += f"; {step['note']}" if figures and isinstance(step.get("note"), str) else ""
    kl = step.get("kl")
    measured = f"; KL {kl:.3g} nats a token on the prompt" if isinstance(kl, int | float) else ""
    return f"{step['step']} {step.get('codec', '')}{before}: {error}{measured}"


def show_problem(error: KVError) -> str:
    return f"{type(error).__name__}: {error}"
