"""What living on codes costs and saves, on SmolLM2-135M-Instruct and on the shipped models: float32, CPU.

    python -m tests.smollm2.live [--only step,bytes,fork,passkeys,smollm2-passkeys] [--calibration FILE] [--out DIR] [--cache DIR]

    step              a decode step over 8192 cached tokens, codes beside the model's own cache
    bytes             what live caches hold against what the file holds
    fork              resident memory of 16 agents that go on from one cache
    passkeys          passkeys of the shipped models, asked on caches that a file brought to life
    smollm2-passkeys  the same task on SmolLM2, which was not trained on it

Each piece runs in a process of its own with one BLAS thread. The prefill of 8192 tokens, encoded files, blocks of prompts and the figures
of finished pieces are kept, so that an interrupted run goes on; --only measures some pieces anew beside the kept figures of the others.
The page goes to tests/results/live-smollm2.md. Exits with 1 where a target is missed.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlx.core as mx

from formats.atomic import atomic_write
from formats.container import open_container
from kvtool import calibrations, tiny
from kvtool.archive import Restored, save
from kvtool.archive import open as open_archive
from kvtool.calibrations import Calibration
from kvtool.capturing import Snapshot, capture, encode_prompt
from kvtool.loading import load
from kvtool.model import LoadedModel, load_model
from kvtool.passkeys import PROMPT, Answers, _answers, passkey_trials, question_of
from kvtool.snapshot import build_caches
from kvtool.tiny.passkey import Trial, make_trials
from tests.memory_child import resident
from tests.passkeys import ALL, interval, total
from tests.smollm2.frontier import OUT, ROOT, calibration_of, is_calibrated, sources_digest
from tests.smollm2.make import models_at
from tests.smollm2.reach import Row, at_most
from tests.texts import ALL_TEXTS, text
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.codecs import RECENT, SINK
from veloxquant_mlx.codecs.raw import Raw

NAME, CACHE = "live-smollm2", ROOT / ".cache" / "live"
LONG, SHORT, STEPS = 8192, 2048, 9
EXACT = "exact rows in blocks"
# codec -> most that a step may take of the own cache's.
STEP_LIMITS = {"affine-4": 3.0, "rvq-4": 3.0}
STEP_CODECS = (
    *("affine-4", "rvq-4", "rvq-2", "rvq-2+2", "rabitq", "rabitq-4", "affine-2"),
    *("commvq-2", "commvq-2:product", "commvq-2:additive", "tc-2.05", "vecinfer-2", "qjl-2", EXACT),
)
BYTES_CODECS = ("rvq-4", "affine-4", "rvq-2+2", "rabitq", "qjl-2", "tc-2.05")
BYTES_OFF = 0.03
# codec -> tokens, and most that resident memory may grow by over codes and tails, if anything is required.
FORK_CODECS: dict[str, tuple[int, float | None]] = {"rvq-4": (LONG, 1.15), "tc-2.05": (SHORT, None)}
AGENTS, JOINING, DECODED = 16, 20, 8
OWN = "own cache"
# arm -> percentage points that it may lie below the own cache, if anything is required.
# `tc` has no target: its tables are of a corpus without passkeys, which two models of four layers made for them do not resemble.
PASSKEY_ARMS: dict[str, float | None] = {OWN: None, "rvq-4": 2.0, "affine-4": 2.0, "rvq-2": 5.0, "tc-2.5": None}
OTHER_ARMS: dict[str, float | None] = {OWN: None, "rvq-4": None, "tc-2.5": None}
OTHER_PROMPTS, OTHER_TOKENS, OTHER_SEED, BLOCK = 50, 500, 1, 10
# What files and answers are kept under: digests of the sources that they depend on.
ENCODERS = ("kvtool.encoding", "kvtool.segment_work", "kvtool.binding")
ENCODED_BY = sources_digest(
    ("formats", "veloxquant_mlx.codecs", "veloxquant_mlx.allocators", "veloxquant_mlx.transfer", *ENCODERS), frozenset()
)[:16]
ANSWERED_BY = sources_digest()[:16]


@dataclass
class Section:
    """One piece as the page has it: a table, and the targets in it."""

    about: list[str]
    head: list[str]
    cells: list[list[str]]
    targets: list[Row] = field(default_factory=list)
    date: str = ""
    machine: str = ""


@dataclass(frozen=True)
class Options:
    """Of a run."""

    cache: Path
    calibration: Path | None = None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def machine() -> str:
    """What this runs on, as the page says it."""
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    return f"mlx {mx.__version__} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {model}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


# --- what the pieces share: the long prompt and its files


def smollm2() -> LoadedModel:
    return load_model(models_at()["smollm2"])


def tables_for(model: LoadedModel, options: Options) -> Calibration:
    if options.calibration is not None:
        return calibrations.resolve(options.calibration, model.info.weights)
    return calibration_of(model, models_at()["smollm2"].parent, say)


def prompt_ids(model: LoadedModel) -> list[int]:
    """All held-out texts joined, a little over LONG tokens."""
    ids = encode_prompt(model, "\n\n".join(map(text, ALL_TEXTS)))
    assert len(ids) > LONG + AGENTS * JOINING, f"{len(ids)} tokens, {LONG + AGENTS * JOINING + 1} are needed"
    return ids


def raw_file(model: LoadedModel, ids: Sequence[int], length: int) -> Path:
    """The exact cache of the first tokens, prefilled once and kept beside the model."""
    path = models_at()["smollm2"].parent / f"long-{length}.kv"
    if path.exists():
        with open_archive(path) as archive:
            if archive.tokens == tuple(ids[:length]):
                return path
    say(f"prefill of {length} tokens into {path}: minutes, once")
    save(capture(model, ids[:length]), path, compress=False)
    return path


def snapshot_of(model: LoadedModel, path: Path) -> Snapshot:
    with open_archive(path) as archive:
        probes = archive.check(model)
        return Snapshot(model.info, archive.tokens, archive.length, tuple(archive.states(probes, [])), probes)


def coded_file(model: LoadedModel, ids: Sequence[int], length: int, codec: str, options: Options) -> Path:
    """The cache of the first tokens as a codec has it, encoded once by these sources."""
    tables = tables_for(model, options) if is_calibrated(codec) else None
    name = f"{codec} {tables.digest[:16]}" if tables is not None else codec
    path = options.cache / ENCODED_BY / f"{quote(name, safe=',=+:')}-{length}.kv"
    if not path.exists():
        start = time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        report = save(snapshot_of(model, raw_file(model, ids, length)), path, codec=codec, calibration=tables)
        say(f"{codec}, {length} tokens: encoded in {time.perf_counter() - start:.0f} s, {report.fallbacks or 'no'} fallbacks")
    return path


def live(model: LoadedModel, path: Path, codec: str, options: Options) -> Restored:
    """A file's cache on codes, all of it."""
    restored = load(path, model, calibration=tables_for(model, options) if is_calibrated(codec) else None)
    assert all(placement.codes for placement in restored.layers), restored.notes
    return restored


@dataclass
class Held:
    """Bytes of a file's codes and of its exact rows, before zstd, and the values that they stand for."""

    coded_bytes: int = 0
    coded_values: int = 0
    exact_bytes: int = 0
    exact_values: int = 0

    @property
    def bits(self) -> float:
        return 8 * self.coded_bytes / self.coded_values


def held(path: Path) -> Held:
    """What the layers of a file hold; a tensor that several segments share counts once."""
    found, seen = Held(), set()
    with open_container(path) as reader:
        for layer in reader.manifest.layers:
            for role in (layer.k, layer.v):
                for segment in () if role is None else role.segments:
                    kind = "exact" if reader.manifest.codecs[segment.codec].id == Raw.id else "coded"
                    names = set(segment.tensors.values()) - seen
                    seen |= names
                    size = sum(reader.tensors[name].bytes for name in names)
                    setattr(found, f"{kind}_bytes", getattr(found, f"{kind}_bytes") + size)
                    values = role.heads * (segment.rows[1] - segment.rows[0]) * role.dim
                    setattr(found, f"{kind}_values", getattr(found, f"{kind}_values") + values)
    return found


# --- step


def step(model: LoadedModel, cache: list[Any], token: int) -> tuple[float, float]:
    """Wall and processor seconds of one token, whose rows are taken back."""
    wall, cpu = time.perf_counter(), time.process_time()
    mx.eval(model.model(mx.array([[token]]), cache=cache))
    taken = time.perf_counter() - wall, time.process_time() - cpu
    for one in cache:
        one.trim(1)
    return taken


def step_section(options: Options) -> Section:
    model = smollm2()
    ids = prompt_ids(model)
    own = load(raw_file(model, ids, LONG), model, decode=True).cache
    section = Section(
        [
            f"One token on top of {LONG} cached ones: the codec's cache and the model's own in turn, {STEPS} steps of each after one to",
            "warm up. Milliseconds, median [fastest, slowest]: passed, and of processor time. MB of codes include exact rows.",
        ],
        ["codec", "bits", "MB", "passed", "own cache", "ratio", "processor", "own cache", "ratio"],
        [],
    )
    for codec in STEP_CODECS:
        bits, cache = "32", []
        if codec == EXACT:
            for one in own:
                keys, values = (mx.contiguous(x[0]) for x in one.keys_and_values())
                cache.append(CodedKVCache([Block.exact(keys, values, 0)]))
        else:
            path = coded_file(model, ids, LONG, codec, options)
            bits, cache = f"{held(path).bits:.2f}", live(model, path, codec, options).cache
        size = sum(one.nbytes for one in cache)
        taken = [(step(model, own, ids[LONG + i]), step(model, cache, ids[LONG + i])) for i in range(STEPS + 1)][1:]
        cells, ratios = [codec if codec == EXACT else f"`{codec}`", bits, f"{size / 1e6:.1f}"], []
        for clock in (0, 1):
            mine, theirs = [pair[1][clock] for pair in taken], [pair[0][clock] for pair in taken]
            ratios.append(statistics.median(mine) / statistics.median(theirs))
            cells += [_spread(mine), _spread(theirs), f"{ratios[-1]:.2f}"]
        section.cells.append(cells)
        if codec in STEP_LIMITS:
            section.targets += [
                at_most(f"`{codec}`: a step over the own cache's", what, ratio, STEP_LIMITS[codec])
                for what, ratio in zip(("passed", "processor"), ratios, strict=True)
            ]
        say(" | ".join(cells))
        del cache
        mx.clear_cache()
    return section


def _spread(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} [{1e3 * min(seconds):.0f}, {1e3 * max(seconds):.0f}]"


# --- bytes


def bytes_section(options: Options) -> Section:
    model = smollm2()
    ids = prompt_ids(model)
    section = Section(
        ["Bytes that live caches report right after a load, against the tensors of the file's layers before zstd, exact rows included."],
        ["codec", "tokens", "file's tensors", "live", "live / file", "file on disk"],
        [],
    )
    for length in (SHORT, LONG):
        for codec in BYTES_CODECS:
            path = coded_file(model, ids, length, codec, options)
            found = held(path)
            in_file = found.coded_bytes + found.exact_bytes
            in_memory = sum(one.nbytes for one in live(model, path, codec, options).cache)
            section.cells.append(
                [f"`{codec}`", str(length), f"{in_file:,}", f"{in_memory:,}", f"{in_memory / in_file:.4f}", f"{path.stat().st_size:,}"]
            )
            section.targets.append(
                at_most(f"`{codec}`: live bytes off the file's, share", f"{length} tokens", abs(in_memory / in_file - 1), BYTES_OFF)
            )
            say(" | ".join(section.cells[-1]))
            mx.clear_cache()
    return section


# --- fork


def settled() -> int:
    """Resident bytes once all that nobody needs went back to the system."""
    gc.collect()
    mx.clear_cache()
    ctypes.CDLL(None).malloc_trim(0)
    size = resident("VmRSS")
    assert size is not None, "resident memory is read from /proc"
    return size


def run(model: LoadedModel, cache: list[Any], ids: Sequence[int]) -> None:
    """An agent's turn: some tokens at once, then greedy ones."""
    tokens = mx.array([list(ids)])
    for _ in range(DECODED + 1):
        tokens = mx.argmax(model.model(tokens, cache=cache)[:, -1:], axis=-1)
        mx.eval(tokens)


def fork_figures(codec: str, length: int, options: Options) -> None:
    """Bytes, kept in the cache folder: resident growth, codes, tails, and what one decoded cache has."""
    model = smollm2()
    ids = prompt_ids(model)
    path = coded_file(model, ids, length, codec, options)
    # Weights, code, tables and BLAS are there before anything is measured.
    run(model, live(model, path, codec, options).cache, ids[:JOINING])
    before = settled()
    restored = live(model, path, codec, options)
    loaded = settled()
    forks = restored.fork(AGENTS)
    for i, fork in enumerate(forks):
        run(model, fork.cache, ids[LONG + i * JOINING : LONG + (i + 1) * JOINING])
    after = settled()
    codes = sum(one.nbytes for one in restored.cache)
    tails = sum(one.nbytes for fork in forks for one in fork.cache) - AGENTS * codes
    own = sum(one.nbytes for one in load(raw_file(model, ids, length), model, decode=True).cache)
    found = {"grown": after - before, "load": loaded - before, "codes": codes, "tails": tails, "own": own}
    _keep(_forked(codec, length, options), found)


def _forked(codec: str, length: int, options: Options) -> Path:
    return options.cache / f"fork-{codec}-{length}-{ANSWERED_BY}.json"


def fork_section(options: Options) -> Section:
    section = Section(
        [
            f"A cache loaded on codes and forked: {AGENTS} agents, one after the other, each of whom reads {JOINING} of its own",
            f"and decodes {DECODED}. Growth of resident memory (weights, code and a first run are there before) against one set of",
            "codes and the tails as allocated; beside it what as many decoded caches take that mlx-lm deep-copies, computed from",
            "`nbytes`. MB. The tables of `tc`, which all its caches of a model share, are in the growth and not in the codes.",
        ],
        ["codec", "tokens", "codes", f"{AGENTS} tails", "grown by the load", "grown in all", "ratio", f"{AGENTS + 1} decoded caches"],
        [],
    )
    for codec, (length, limit) in FORK_CODECS.items():
        path = _forked(codec, length, options)
        if not path.exists():
            alone(fork_figures, codec, length, options)
        found = json.loads(path.read_text(encoding="utf-8"))
        ratio = found["grown"] / (found["codes"] + found["tails"])
        megabytes = [f"{found[name] / 1e6:.1f}" for name in ("codes", "tails", "load", "grown")]
        section.cells.append([f"`{codec}`", str(length), *megabytes, f"{ratio:.3f}", f"{(AGENTS + 1) * found['own'] / 1e6:,.0f}"])
        if limit is not None:
            section.targets.append(at_most(f"`{codec}`: growth over codes and tails", f"{AGENTS} agents", ratio, limit))
        say(" | ".join(section.cells[-1]))
    return section


# --- passkeys


def asked(
    model: LoadedModel, trials: Sequence[Trial], question: Callable[[Trial], Sequence[int]], arms: Sequence[str], calibration: Calibration
) -> dict[str, Answers]:
    """What every arm answers to the same prompts: its cache was saved and brought to life on codes, and the question is run on that."""
    found = {arm: Answers() for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.kv"
        for trial in trials:
            ids = list(question(trial))
            snapshot = capture(model, trial.prompt_ids[: len(trial.prompt_ids) - len(ids)])
            for arm, answers in found.items():
                if arm == OWN:
                    caches = build_caches(snapshot.states)
                else:
                    tables = calibration if is_calibrated(arm) else None
                    save(snapshot, path, codec=arm, calibration=tables)
                    restored = load(path, model, calibration=tables)
                    assert all(placement.codes for placement in restored.layers), restored.notes
                    caches = restored.cache
                    for name, value in asdict(held(path)).items():
                        setattr(answers, name, getattr(answers, name) + value)
                answers.asked += 1
                answers.right += _answers(model, caches, ids, trial.answer_ids)
    return found


def blocks(
    model: LoadedModel,
    trials: Sequence[Trial],
    question: Callable[[Trial], Sequence[int]],
    arms: Sequence[str],
    calibration: Calibration,
    folder: Path,
) -> Iterator[dict[str, Answers]]:
    """The answers to BLOCK prompts after BLOCK prompts, finished ones from the folder."""
    key = f"{ANSWERED_BY}-{model.info.weights[:8]}-{calibration.digest[:8]}-{'+'.join(arms)}-{len(trials)}".replace(" ", "_")
    for first in range(0, len(trials), BLOCK):
        path, start = folder / key / f"{first}.json", time.perf_counter()
        if path.exists():
            yield {arm: Answers(**answers) for arm, answers in json.loads(path.read_text(encoding="utf-8")).items()}
            continue
        found = asked(model, trials[first : first + BLOCK], question, arms, calibration)
        _keep(path, {arm: asdict(answers) for arm, answers in found.items()})
        score = ", ".join(f"{arm} {answers.right}" for arm, answers in found.items())
        say(f"{model.info.name}, prompts {first} and on: {score}, {time.perf_counter() - start:.0f} s")
        yield found


def _keep(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(str(path)) as file:
        file.write(json.dumps(value, indent=1).encode())


def of_tiny(name: str, options: Options) -> dict[str, Answers]:
    """The answers of one shipped model."""
    model = load_model(name)
    calibration = calibration_of(model, options.cache, say)

    def question(trial: Trial) -> list[int]:
        return question_of(model, trial)

    parts = list(blocks(model, passkey_trials(model, ALL), question, list(PASSKEY_ARMS), calibration, options.cache))
    return {arm: total([part[arm] for part in parts]) for arm in PASSKEY_ARMS}


def passkey_section(options: Options) -> Section:
    names = list(tiny.NAMES)
    return _answered(
        [
            f"{ALL} prompts of {PROMPT} tokens, the same in every arm; all but the question is in the cache, which was saved and brought",
            f"to life on codes (first {SINK} and newest {RECENT} tokens exact). Share with all five digits right, 95 % interval (Wilson).",
            "Tables of `tc` are of the shipped corpus. Bits are a value of the coded rows, side information included.",
        ],
        {name: of_tiny(name, options) for name in names},
        PASSKEY_ARMS,
    )


def other_section(options: Options) -> Section:
    model = smollm2()
    trials = make_trials(model.tokenizer, OTHER_PROMPTS, prompt_tokens=OTHER_TOKENS, seed=OTHER_SEED)

    def question(trial: Trial) -> list[int]:
        return question_of(model, trial)

    parts = list(blocks(model, trials, question, list(OTHER_ARMS), tables_for(model, options), options.cache))
    found = {arm: total([part[arm] for part in parts]) for arm in OTHER_ARMS}
    return _answered(
        [f"{OTHER_PROMPTS} prompts of {OTHER_TOKENS} tokens, asked as above; the model was not trained on this task."],
        {"SmolLM2-135M-Instruct": found},
        OTHER_ARMS,
    )


def _answered(about: list[str], by_model: dict[str, dict[str, Answers]], arms: dict[str, float | None]) -> Section:
    """The table of answers, and the targets in percentage points below the own cache."""
    section = Section(about, ["cache", "bits", *by_model], [])
    for arm, limit in arms.items():
        cells = []
        for name, found in by_model.items():
            one, share = found[arm], found[arm].share
            assert share is not None
            low, high = interval(one.right, one.asked)
            cells.append(f"{100 * share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
            if limit is not None:
                below = 100 * (found[OWN].right - one.right) / one.asked
                section.targets.append(at_most(f"`{arm}`: points below the own cache", name, below, limit))
        some = next(iter(by_model.values()))[arm]
        section.cells.append([f"`{arm}`", f"{8 * some.coded_bytes / some.coded_values:.2f}", *cells] if arm != OWN else [arm, "32", *cells])
    return section


# --- the page

PIECES: dict[str, tuple[str, Callable[[Options], Section]]] = {
    "step": ("A decode step", step_section),
    "bytes": ("Bytes in memory", bytes_section),
    "fork": ("Forks", fork_section),
    "passkeys": ("Passkeys on the shipped models", passkey_section),
    "smollm2-passkeys": ("Passkeys on SmolLM2", other_section),
}


def piece(name: str, options: Options) -> Section:
    """One piece measured, with its date and machine."""
    section = PIECES[name][1](options)
    section.date, section.machine = time.strftime("%Y-%m-%d"), machine()
    return section


def alone(call: Callable, *args: Any) -> Any:
    """The result of a call in a fresh process, whose memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


def markdown(sections: dict[str, Section]) -> str:
    """The page, of the pieces that were measured."""
    lines = [
        "# Living on codes, measured",
        "",
        "SmolLM2-135M-Instruct (30 layers, 3 KV heads, head_dim 64) and the two shipped models in float32 on a CPU, OpenBLAS on one core.",
        "`make live` measures all of this; `python -m tests.smollm2.live --only PIECE` one piece. A missed target makes the exit code 1.",
    ]
    for name, section in sections.items():
        lines += ["", f"## {PIECES[name][0]}", "", f"`--only {name}`, {section.date}, {section.machine}.", "", *section.about, ""]
        lines += [f"| {' | '.join(section.head)} |", "|" + "---|" * len(section.head)]
        lines += [f"| {' | '.join(cells)} |" for cells in section.cells]
        if section.targets:
            lines += ["", "| target | | measured | asked | |", "|---|---|---|---|---|"]
        for row in section.targets:
            lines.append(f"| {row.what} | {row.on} | {row.value:.4g} | {row.target} | {'reached' if row.ok else 'MISSED'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PIECES), metavar="A,B", help="pieces to measure (default: all)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="SmolLM2's tables (default: of the shipped corpus, made once)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the page (default: {OUT.relative_to(ROOT)})")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of what is done (default: {CACHE.relative_to(ROOT)})")
    args = parser.parse_args()
    names = args.only.split(",")
    if not set(names) <= set(PIECES):
        parser.error(f"--only must be some of {','.join(PIECES)}, but got {args.only}")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes that measure
    for name in names:
        _keep(args.cache / f"{name}.json", asdict(alone(piece, name, Options(args.cache, args.calibration))))
    sections = {}
    for name in PIECES:
        if (path := args.cache / f"{name}.json").exists():
            about = json.loads(path.read_text(encoding="utf-8"))
            sections[name] = Section(**about | {"targets": [Row(**row) for row in about["targets"]]})
    page = markdown(sections)
    print(page)
    args.out.mkdir(parents=True, exist_ok=True)
    with atomic_write(str(args.out / f"{NAME}.md")) as file:
        file.write(page.encode())
    return 0 if all(row.ok for section in sections.values() for row in section.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
