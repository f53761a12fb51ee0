"""What it costs tc to learn its tables from the cache itself and carry them in the file, on SmolLM2-135M-Instruct.

    python -m tests.smollm2.self_calibration [--calibration FILE] [--lengths 2048,8192] [--out DIR]

A prompt is in the cache, its first 4 and newest 32 tokens exact, and 256 tokens are teacher-forced on it (protocol prefix of
`kvtool.sweep`): KL(own || codec) of the next-token distribution. tc runs with the model's calibration, which is in no file, and with tables
learnt from the prompt's own rows and gradients, whose bytes are in the bits. How many bits more the latter takes for the same KL is
interpolated, log KL over bits. Exits with 1 where a target is missed. Prompts: texts of tests/texts, several joined where one is too short.
"""

import argparse
import itertools
import math
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from kvtool import calibrations
from kvtool.arms import CHUNK, TextArms
from kvtool.calibrations import Calibration
from kvtool.capturing import encode_prompt
from kvtool.model import LoadedModel, load_model
from kvtool.roundtrip import parse_roundtrip
from kvtool.sweeping import TOKENS
from tests.smollm2.frontier import OUT, ROOT, Say, calibration_of
from tests.smollm2.make import models_at
from tests.smollm2.off_domain import write
from tests.texts import ALL_TEXTS, text
from veloxquant_mlx.codecs import RECENT, SINK

NAME, SCORED = "self-calibration-smollm2", TOKENS["prefix"]


@dataclass(frozen=True)
class Plan:
    """What is measured at one length of prompt.

    Attributes:
        prompts: each the names of the texts that are joined.
        calibrated, learnt: bits of tc with the model's calibration, and with its own tables.
        limit: most bits that own tables may take more.
    """

    prompts: tuple[tuple[str, ...], ...]
    calibrated: tuple[float, ...]
    learnt: tuple[float, ...]
    limit: float


PLANS = {
    2048: Plan((("code",), ("prose", "technical")), (2.05, 2.55), (1.55, 2.05, 2.55, 3.05), 0.5),
    8192: Plan((ALL_TEXTS,), (2.05,), (1.8, 2.15, 2.5), 0.2),
}


@dataclass(frozen=True)
class Point:
    """tc at one rate, over the prompts of a length.

    Attributes:
        learnt: whether tables are the prompt's own.
        rate: asked for, without tables.
        bits: a value of the coded rows, tables included where they are in the file.
        kl, p99: mean of the prompts, and 99th percentile of all positions, nats.
        fallbacks: roles of layers that another codec took.
    """

    length: int
    learnt: bool
    rate: float
    bits: float
    kl: float
    p99: float
    fallbacks: int


@dataclass(frozen=True)
class Verdict:
    """How many bits more own tables take for the KL that the calibration has at `rate`.

    Attributes:
        bound: "" where `more` was interpolated, "<" or ">" where it is a bound: the KL is not within what was measured.
    """

    length: int
    rate: float
    kl: float
    more: float
    bound: str
    limit: float

    @property
    def reached(self) -> bool:
        return self.bound != ">" and self.more <= self.limit


def bits_at(points: Sequence[tuple[float, float]], kl: float) -> tuple[float, str]:
    """The least bits at which a curve of (bits, KL) comes down to a KL, and "<" or ">" where that is the nearest end of the curve."""
    points = sorted(points)
    if points[0][1] <= kl:
        return points[0][0], "" if points[0][1] == kl else "<"
    for (bits, above), (more, below) in itertools.pairwise(points):
        if below <= kl:
            return bits + (more - bits) * math.log(above / kl) / math.log(above / below), ""
    return points[-1][0], ">"


def measure(
    model: LoadedModel,
    prompts: Mapping[str, Sequence[int]],
    length: int,
    plan: Plan,
    calibration: Calibration,
    say: Say,
) -> list[Point]:
    """Every point of a length.

    Args:
        prompts: name -> token ids, the `length` of the prompt and those that are scored.
    """
    arms: dict[tuple[bool, float], list] = {(False, rate): [] for rate in plan.calibrated} | {(True, rate): [] for rate in plan.learnt}
    for name, ids in prompts.items():
        start = time.perf_counter()
        base = TextArms(model, name, ids, "prefix", length, CHUNK, calibration)
        say(f"{length}, {name}: own cache, {time.perf_counter() - start:.0f} s")
        for (learnt, rate), found in arms.items():
            start = time.perf_counter()
            base.calibration = None if learnt else calibration
            arm = base.arm(parse_roundtrip(f"tc-{rate:g}", SINK, RECENT))
            if arm.failed:
                raise ValueError(f"{name}, tc-{rate:g}: {arm.problems[0]}")
            found.append(arm)
            what = f"tc-{rate:g}, {'own' if learnt else 'calibrated'}"
            bits = 8 * arm.coded_bytes / arm.coded_values
            say(f"{length}, {name}, {what}: {bits:.3f} bits, KL {np.mean(arm.kl):.5f}, {time.perf_counter() - start:.0f} s")
    return [
        Point(
            length,
            learnt,
            rate,
            8 * sum(arm.coded_bytes for arm in found) / sum(arm.coded_values for arm in found),
            float(np.mean([np.mean(arm.kl) for arm in found])),
            float(np.quantile(np.concatenate([arm.kl for arm in found]), 0.99)),
            sum(len(arm.problems) for arm in found),
        )
        for (learnt, rate), found in arms.items()
    ]


def verdicts(points: Sequence[Point], limits: Mapping[int, float]) -> list[Verdict]:
    """One for each point with the model's calibration."""
    out = []
    for point in points:
        if not point.learnt:
            curve = [(p.bits, p.kl) for p in points if p.learnt and p.length == point.length]
            bits, bound = bits_at(curve, point.kl)
            out.append(Verdict(point.length, point.rate, point.kl, bits - point.bits, bound, limits[point.length]))
    return out


def markdown(points: Sequence[Point], found: Sequence[Verdict], prompts: Mapping[int, str], command: str) -> str:
    lines = [
        "# tc with tables learnt from the cache itself, on SmolLM2-135M-Instruct",
        "",
        f"`{command}`; mlx {mx.__version__} on {platform.system()} {platform.machine()}, float32.",
        "",
        f"The first {SINK} and newest {RECENT} tokens exact, then {SCORED} teacher-forced on the prompt: KL(own || codec) in nats, mean",
        "of the prompts. `calibration`: tables of the shipped corpus, in no file. `own`: learnt from the prompt, counted in the bits.",
        "Fallbacks: roles of layers that a training-free codec took, over all prompts. Prompts:",
        "",
        *(f"- {length} tokens: {which}" for length, which in prompts.items()),
        "",
        "| tokens | tables | rate | bits | KL | KL p99 | fallbacks |",
        "|" + "---|" * 7,
    ]
    for p in points:
        tables = "own" if p.learnt else "calibration"
        lines.append(f"| {p.length} | {tables} | {p.rate:g} | {p.bits:.3f} | {p.kl:.5f} | {p.p99:.4f} | {p.fallbacks} |")
    lines += ["", "Bits that own tables take more for the same KL:", "", "| tokens | rate | KL | more | at most | |", "|" + "---|" * 6]
    for v in found:
        more = f"{v.bound} {v.more:+.3f}".strip()
        lines.append(f"| {v.length} | {v.rate:g} | {v.kl:.5f} | {more} | {v.limit:g} | {'reached' if v.reached else 'MISSED'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = ",".join(map(str, PLANS))
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="tables (default: of the shipped corpus, made where there are none)"
    )
    parser.add_argument("--lengths", default=lengths, metavar="A,B", help="tokens of the prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, help=f"folder for the results (default of a full run: {OUT.relative_to(ROOT)})")
    args = parser.parse_args()
    asked = args.lengths.split(",")
    if not set(asked) <= set(map(str, PLANS)):
        parser.error(f"--lengths must be some of {lengths}, but got {args.lengths}")
    full = args.lengths == lengths and args.calibration is None
    path = models_at()["smollm2"]
    model = load_model(path)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    given = args.calibration
    calibration = calibration_of(model, path.parent, say) if given is None else calibrations.resolve(given, model.info.weights)
    points: list[Point] = []
    for length in map(int, asked):
        prompts = {"+".join(names): encode_prompt(model, "\n\n".join(map(text, names))) for names in PLANS[length].prompts}
        for name, ids in prompts.items():
            assert len(ids) > length + SCORED, f"{name} has {len(ids)} tokens, {length + SCORED + 1} are needed"
        points += measure(
            model, {name: ids[: length + SCORED + 1] for name, ids in prompts.items()}, length, PLANS[length], calibration, say
        )
    found = verdicts(points, {length: plan.limit for length, plan in PLANS.items()})
    words = "make self-calibration" if full else f"python -m tests.smollm2.self_calibration --lengths {args.lengths}"
    about = {int(length): ", ".join("+".join(names) for names in PLANS[int(length)].prompts) for length in asked}
    page = markdown(points, found, about, words)
    print(page)
    out = args.out or (OUT if full else None)
    if out is not None:
        write(NAME, page, {"points": [asdict(p) for p in points], "verdicts": [asdict(v) for v in found]}, out)
    return 0 if all(v.reached for v in found) else 1


if __name__ == "__main__":
    sys.exit(main())
