"""How many passkeys the caches of every codec still answer, on the two shipped models: one table in markdown.

    python -m tests.passkeys [--prompts N] [--codecs A,B,...] [--out FILE] [--cache DIR]

A prompt of 1500 tokens with a passkey in it is in the cache, encoded and decoded once, with the exact tokens and without; the question is
asked on that, and counts where all five digits of the answer are right (`kvtool.passkeys`). Prompts are the first N of 400, the same for
each codec; a codec that learns its words anew from each cache is asked the first few of them. One process a model. What is done is kept in
the cache folder, 10 prompts at a time, under a digest of the sources that computed it, so that an interrupted run goes on.
"""

import argparse
import json
import math
import multiprocessing
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from urllib.parse import quote

import mlx.core as mx
from blake3 import blake3

from formats.atomic import atomic_write
from kvtool import tiny
from kvtool.calibrations import Calibration
from kvtool.cli.eval import split_specs
from kvtool.model import LoadedModel, load_model
from kvtool.passkeys import PROMPT, Answers, ask, passkey_trials
from kvtool.roundtrip import parse_roundtrip, without_exact_rows
from kvtool.sweeping import specs_of
from tests.smollm2.frontier import OUT, ROOT, TABLES, calibration_of, is_calibrated, shown, sources_digest
from veloxquant_mlx.codecs import RECENT, SINK

NAME, CACHE, ALL, BLOCK = "passkeys-tiny.md", ROOT / ".cache" / "passkeys", 400, 10
CODECS = (
    *("raw", "tc-2.05", "tc-3.05", "tcz-1.1", "rvq-2", "rvq-3", "rvq-4", "rvq-2+2", "rabitq", "rabitq-4", "affine-2", "affine-4"),
    *("commvq-2", "commvq-2:additive", "vecinfer-2", "qjl", "mlx-4", "fp8"),
)
SLOW = {"commvq-2": 40, "vecinfer-2": 20}  # codec -> most prompts: half a second and two to four a cache
NORMAL = 1.959964  # 97.5 % of a normal distribution lie below


def interval(right: int, asked: int) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson, 1927): good for shares near 0 and 1 too."""
    square, share = NORMAL**2, right / asked
    middle = (right + square / 2) / (asked + square)
    half = NORMAL / (asked + square) * math.sqrt(asked * share * (1 - share) + square / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def total(parts: Sequence[Answers]) -> Answers:
    """The answers to several blocks of prompts together."""
    sums = {f.name: sum(getattr(part, f.name) for part in parts) for f in fields(Answers) if f.name != "refused"}
    return Answers(**sums, refused=next((part.refused for part in parts if part.refused is not None), None))


def measured(
    model: LoadedModel, specs: Mapping[str, int], prompts: int, calibration: Calibration | None, cache: Path, block: int = BLOCK
) -> dict[str, Answers]:
    """spec -> answers, those to finished blocks of prompts from the cache folder.

    Args:
        specs: spec -> prompts at most.
        prompts: the first so many of all.
        block: prompts that are kept together.
    """
    trials = passkey_trials(model, ALL)
    key = json.dumps([sources_digest(but=frozenset(TABLES - {"kvtool.passkeys"})), model.info.weights, model.info.dtype, PROMPT, ALL])
    folder = cache / blake3(key.encode()).hexdigest()[:16]
    found: dict[str, list[Answers]] = {spec: [] for spec in specs}
    for first in range(0, prompts, block):
        start, missing = time.perf_counter(), []
        for spec, most in specs.items():
            last = min(first + block, prompts, most)
            path = _path(folder, spec, calibration, first, last)
            if first < last and path.exists():
                found[spec].append(Answers(**json.loads(path.read_text(encoding="utf-8"))))
            elif first < last:
                missing.append((last, spec, path))
        # Codecs that are asked as many prompts go together, on one prefill.
        for last in sorted({end for end, _, _ in missing}):
            group = [(spec, path) for end, spec, path in missing if end == last]
            answers = ask(model, [partial(parse_roundtrip, spec) for spec, _ in group], trials[first:last], calibration=calibration)
            for (spec, path), own in zip(group, answers, strict=True):
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as file:
                    file.write(json.dumps(asdict(own)).encode())
                found[spec].append(own)
        print(f"{model.info.name}: {min(first + block, prompts)} prompts, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return {spec: total(parts) for spec, parts in found.items()}


def _path(folder: Path, spec: str, calibration: Calibration | None, first: int, last: int) -> Path:
    tables = f" {calibration.digest[:16]}" if calibration is not None and is_calibrated(spec) else ""
    return folder / f"{quote(spec + tables, safe=',=+:')} {first}-{last}.json"


def of_model(name: str, specs: Mapping[str, int], prompts: int, cache: Path) -> dict[str, Answers]:
    """The answers of one shipped model, with a calibration of the shipped corpus for codecs that take one."""
    model = load_model(name)
    calibration = None
    if any(is_calibrated(spec) for spec in specs):
        calibration = calibration_of(model, cache, lambda line: print(line, file=sys.stderr, flush=True))
    return measured(model, specs, prompts, calibration, cache)


def specs_for(codecs: Sequence[str]) -> dict[str, int]:
    """Codecs, each with its exact tokens and without, and the most prompts that each is asked."""
    return {spec: SLOW.get(without_exact_rows(spec), ALL) for spec in specs_of(codecs, SINK, RECENT, "both", None)}


def markdown(by_model: Mapping[str, Mapping[str, Answers]], command: str) -> str:
    """The table."""
    names = list(by_model)
    asked = [answers.asked for found in by_model.values() for answers in found.values()]
    lines = [
        "# Passkeys that caches of each codec answer, on the shipped models",
        "",
        f"`{command}`; mlx {mx.__version__} on {platform.system()} {platform.machine()}, float32.",
        "",
        f"Prompts of {PROMPT} tokens, all but the question in the cache, coded once. Share of {max(asked)} prompts whose five digits the",
        "model answers, with a 95 % interval (Wilson); the number of prompts where fewer were asked. The same prompts for every codec.",
        f"Exact: the first {SINK} and newest {RECENT} tokens, or none. Bits are a value of the coded rows, side information included;",
        "`all` has the exact rows too, at 16. Tables of calibrated codecs come from other texts and are not counted.",
        "",
        f"| codec | exact | bits | all | {' | '.join(names)} |",
        "|---" * (4 + len(names)) + "|",
    ]
    for spec in by_model[names[0]]:
        found = [by_model[name][spec] for name in names]
        whole, trip = total(found), parse_roundtrip(spec)
        window = "all" if trip.lossless else f"{trip.plan.sink} + {trip.plan.recent}" if trip.plan.sink + trip.plan.recent else "none"
        bits = 8 * whole.coded_bytes / whole.coded_values if whole.coded_values else None
        more = 8 * (whole.coded_bytes + whole.exact_bytes) / (whole.coded_values + whole.exact_values)
        cells = [_cell(answers, max(asked)) for answers in found]
        lines.append(f"| `{without_exact_rows(spec)}` | {window} | {shown(bits, '.2f')} | {more:.2f} | {' | '.join(cells)} |")
    notes = dict.fromkeys(f"- `{spec}`: {one.refused}" for found in by_model.values() for spec, one in found.items() if one.refused)
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def _cell(answers: Answers, most: int) -> str:
    if answers.share is None:
        return "refused"
    low, high = interval(answers.right, answers.asked)
    few = "" if answers.asked == most else f", {answers.asked} prompts"
    return f"{100 * answers.share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]{few}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=ALL, choices=range(1, ALL + 1), metavar="N", help=f"1 to {ALL} (default)")
    parser.add_argument("--codecs", type=split_specs, default=list(CODECS), metavar="A,B,...", help="default: all of them")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default of a full run: {(OUT / NAME).relative_to(ROOT)}")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of what is done (default: {CACHE.relative_to(ROOT)})")
    args = parser.parse_args()
    full = args.codecs == list(CODECS) and args.prompts == ALL
    specs = specs_for(args.codecs)
    with ProcessPoolExecutor(len(tiny.NAMES), multiprocessing.get_context("spawn")) as pool:
        work = partial(of_model, specs=specs, prompts=args.prompts, cache=args.cache)
        by_model = dict(zip(tiny.NAMES, pool.map(work, tiny.NAMES), strict=True))
    words = "make passkeys" if full else f"python -m tests.passkeys --prompts {args.prompts} --codecs {','.join(args.codecs)}"
    page = markdown(by_model, words)
    print(page)
    out = args.out or (OUT / NAME if full else None)
    if out is not None:
        with atomic_write(out) as file:
            file.write(page.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
