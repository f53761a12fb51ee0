"""`kvtool demo`: the whole job on a model that ships with kvtool, or on any other, with measured figures."""

import random
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import counted
from kvtool.cli._common import bar, dtype_option, emit, json_option, percent
from kvtool.tiny import filler_text

if TYPE_CHECKING:
    from kvtool.capturing import Snapshot
    from kvtool.model import LoadedModel

CODECS = ("raw", "rvq-4", "rvq-2+2", "rvq-2+2,sink=0,recent=0", "rabitq")
QUESTION = " What is the passkey? The passkey is "


@dataclass(frozen=True)
class Prompt:
    """A long text that hides a passkey halfway and asks for it, and what follows in the same source, to be scored."""

    ids: list[int]
    answer: str
    rest: list[int]


@click.command("demo")
@click.option("--model", "model_name", default="tiny-a", show_default=True, metavar="DIR_OR_REPO", help="The model to run.")
@click.option("--to-model", metavar="M", help="Carry the cache into this model as well (tiny-b where the model is tiny-a).")
@click.option("--tokens", type=click.IntRange(64), default=1500, show_default=True, metavar="N", help="Length of the prompt.")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the passkey and the text around it.")
@dtype_option
@json_option
def command(model_name: str, to_model: str | None, tokens: int, seed: int, dtype: str, as_json: bool) -> None:
    """Prefill a prompt that hides a passkey, keep its cache with several codecs, and answer from each file, here and in another model.

    \b
    Example:
      kvtool demo
      kvtool demo --model mlx-community/SmolLM2-135M-Instruct
    """
    from kvtool.model import load_model

    model = load_model(model_name, dtype=dtype)
    other = "tiny-b" if to_model is None and model_name == "tiny-a" else to_model
    prompt = make_prompt(model, tokens, seed)
    click.echo(f"{model.info.name}: a prompt of {counted(len(prompt.ids), 'token')} hides the passkey {prompt.answer}", err=True)
    with tempfile.TemporaryDirectory() as tmp:
        with bar("codecs", quiet=as_json) as progress:
            data = _codecs(model, prompt, Path(tmp), progress)
        data["transfer"] = _transfer(model, load_model(other, dtype=dtype), prompt, Path(tmp)) if other else []
    emit(as_json, data, _text(data))


def make_prompt(model: "LoadedModel", tokens: int, seed: int) -> Prompt:
    """About `tokens` tokens of held-out prose around a passkey, ending in the question for it."""
    rng = random.Random(seed)
    answer = "".join(rng.choices("0123456789", k=5))
    sentences = re.split(r"(?<=[.!?])(?=\s)", filler_text())
    ids = [list(model.tokenizer.encode(s, add_special_tokens=False)) for s in sentences]
    needle = list(model.tokenizer.encode(f" The passkey is {answer}. Remember it.", add_special_tokens=False))
    question = list(model.tokenizer.encode(QUESTION, add_special_tokens=False))
    room = tokens - len(needle) - len(question)
    flat = [t for sentence in ids[rng.randrange(len(ids) // 4) :] for t in sentence]
    half = room // 2
    return Prompt(flat[:half] + needle + flat[half:room] + question, answer, flat[room : room + 65])


def _codecs(model: "LoadedModel", prompt: Prompt, folder: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    from kvtool.archive import save
    from kvtool.capturing import capture, prefill
    from kvtool.evaluation import score_caches
    from kvtool.loading import load

    steps = len(CODECS) + 3
    start = time.perf_counter()
    own = _answer(model, None, prompt.ids)
    rows: list[dict[str, Any]] = [
        {"codec": "own prefill", "file_bytes": None, "share_of_fp16": None, "seconds": time.perf_counter() - start, "answer": own}
    ]
    progress(1, steps)
    snapshot: Snapshot = capture(model, prompt.ids)
    progress(2, steps)
    caches = {"own prefill": prefill(model, prompt.ids[: snapshot.length])}
    progress(3, steps)
    for done, codec in enumerate(CODECS, 4):
        path = folder / "demo.kv"
        report = save(snapshot, path, codec=codec)
        start = time.perf_counter()
        restored = load(path, model)
        text = _answer(model, restored.cache, restored.pending())
        seconds = time.perf_counter() - start
        caches[codec] = load(path, model).cache
        share = report.file_bytes / report.fp16_bytes
        rows.append({"codec": codec, "file_bytes": report.file_bytes, "share_of_fp16": share, "seconds": seconds, "answer": text})
        progress(done, steps)
    # All on one prefill: `evaluate` would run the prompt again for every file.
    scores = score_caches(model, caches, prompt.rest, len(prompt.rest) - 1, None)
    for row in rows:
        row["kl"] = float(scores[row["codec"]]["kl"].mean())
    save(snapshot, folder / "transfer.kv", codec="rvq-2+2")
    return {
        "model": model.info.name,
        "tokens": len(prompt.ids),
        "passkey": prompt.answer,
        "cache_bytes": report.cache_bytes,
        "fp16_bytes": report.fp16_bytes,
        "codecs": rows,
    }


def _transfer(model: "LoadedModel", other: "LoadedModel", prompt: Prompt, folder: Path) -> list[dict[str, Any]]:
    from formats.errors import IncompatibleError
    from kvtool.loading import load
    from kvtool.recoding import recode

    rows = [{"what": "own prefill", "answer": _answer(other, None, prompt.ids)}]
    try:
        load(folder / "transfer.kv", other)
    except IncompatibleError as error:
        rows.append({"what": "the file as it is", "answer": f"refused: {error.what}"})
    start = time.perf_counter()
    recode(folder / "transfer.kv", folder / "transfer.kv", to_model=other)
    restored = load(folder / "transfer.kv", other)
    text = _answer(other, restored.cache, restored.pending())
    rows.append({"what": f"recoded, {time.perf_counter() - start:.2f} s to the answer", "answer": text})
    return [{"from": model.info.name, "to": other.info.name, **row} for row in rows]


def _answer(model: "LoadedModel", cache: list[Any] | None, ids: list[int]) -> str:
    from mlx_lm.generate import stream_generate

    return "".join(r.text for r in stream_generate(model.model, model.tokenizer, ids, max_tokens=5, prompt_cache=cache)).strip()


def _text(data: dict[str, Any]) -> str:
    lines = [
        f"passkey {data['passkey']}, {data['tokens']} tokens, model {data['model']}",
        f"{'':<26} {'file bytes':>11} {'share':>8} {'to answer':>10} {'KL':>9}  answer",
    ]
    for row in data["codecs"]:
        size = "" if row["file_bytes"] is None else f"{row['file_bytes']:,}"
        share = "" if row["share_of_fp16"] is None else percent(row["share_of_fp16"], 1)
        lines.append(f"{row['codec']:<26} {size:>11} {share:>8} {row['seconds']:>8.2f} s {row['kl']:>9.5f}  {row['answer']}")
    wide = data["cache_bytes"] == 2 * data["fp16_bytes"]
    lines.append("share: of the cache at 16 bits a value" + ("; the cache itself is float32 here, twice that" if wide else ""))
    if data["transfer"]:
        lines += ["", f"the rvq-2+2 file in {data['transfer'][0]['to']}:"]
        lines += [f"{row['what']:<34} {row['answer']}" for row in data["transfer"]]
    return "\n".join(lines)
