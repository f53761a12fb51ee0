"""What a calibration is worth on a model that it never saw: SmolLM2-135M-Instruct's tables in a fine-tuned sibling.

    python -m tests.smollm2.foreign_calibration [--calibration FILE] [--own FILE] [--texts prose,code] [--out DIR]

The sibling has RoPE base 10 000 instead of 100 000 and weights fine-tuned for it. Each codec runs in it with SmolLM2's calibration and with
one of its own, both over TurboQuant, on the held-out texts by the frontier's protocol: streaming, first 4 and newest 32 tokens exact,
positions 128 and on of the first 1024 tokens. Calibrations are made, ten minutes each, where they are neither given nor in the cache.
"""

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from kvtool import calibrations
from kvtool.arms import Arm, TextArms
from kvtool.bootstrap import paired_ratio
from kvtool.calibrations import Calibration
from kvtool.model import LoadedModel, load_model
from kvtool.probe import probe_model
from kvtool.roundtrip import parse_roundtrip
from kvtool.sweeping import ALL, PREFIX, TOKENS, ids_of, layer_shapes
from tests.smollm2.frontier import INTERVAL, LONG_CHUNK, OUT, PROTOCOL, REFERENCE, ROOT, Say, calibration_of
from tests.smollm2.make import models_at
from tests.smollm2.off_domain import arm_with, write
from tests.texts import ALL_TEXTS, text
from veloxquant_mlx.codecs import RECENT, SINK

NAME, CODECS = "foreign-calibration-smollm2", ("tc-2.05", "tc-3.05", "tcz-1.1")
Interval = tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class Row:
    """One codec on one text, or on all.

    Attributes:
        bits, own_bits: a value of the coded rows, with the other model's tables and with its own.
        kl, own_kl: mean KL(own cache || codec) of the texts, nats.
        ratio, own_ratio: KL over TurboQuant's, with a 95 % interval.
        cost: kl over own_kl, with a 95 % interval.
        fallbacks, own_fallbacks: roles of layers that another codec took, most of a text.
    """

    text: str
    codec: str
    positions: int
    bits: float
    own_bits: float
    kl: float
    own_kl: float
    ratio: Interval
    own_ratio: Interval
    cost: Interval
    fallbacks: int
    own_fallbacks: int


def rows(model: LoadedModel, texts: Mapping[str, str], foreign: Calibration, own: Calibration, say: Say, tokens: int) -> Iterator[Row]:
    """The table, text by text, then all of them together.

    Args:
        foreign, own: calibrations of the other model and of this one.
        tokens: positions to score at most, a text.
    """
    found: dict[str, list[tuple[Arm, Arm, Arm]]] = {codec: [] for codec in CODECS}
    for name, words in texts.items():
        base = TextArms(model, name, ids_of(model, name, words, PREFIX[PROTOCOL], tokens), PROTOCOL, PREFIX[PROTOCOL], LONG_CHUNK)
        turbo = base.arm(parse_roundtrip(REFERENCE, SINK, RECENT))
        for codec in CODECS:
            start = time.perf_counter()
            found[codec].append((arm_with(base, codec, foreign), arm_with(base, codec, own), turbo))
            row = row_of(name, codec, found[codec][-1:])
            say(f"{name}, {codec}: KL {row.kl:.5f}, own tables {row.own_kl:.5f}, {time.perf_counter() - start:.0f} s")
            yield row
    for codec, arms in found.items():
        if len(arms) > 1:
            yield row_of(ALL, codec, arms)


def row_of(name: str, codec: str, arms: Sequence[tuple[Arm, Arm, Arm]]) -> Row:
    """A row from arms with the foreign tables, with the own ones, and of TurboQuant, one triple a text.

    Raises:
        ValueError: a codec refused its input.
    """
    refused = [arm for triple in arms for arm in triple if arm.failed]
    if refused:
        raise ValueError(f"{refused[0].text}, {refused[0].codec}: {refused[0].problems[-1]}")
    foreign, own, turbo = zip(*arms, strict=True)
    kl, own_kl, below = ([np.array(arm.kl) for arm in group] for group in (foreign, own, turbo))
    return Row(
        name,
        codec,
        sum(len(x) for x in kl),
        *(8 * sum(a.coded_bytes for a in group) / sum(a.coded_values for a in group) for group in (foreign, own)),
        *(float(np.mean([x.mean() for x in group])) for group in (kl, own_kl)),
        paired_ratio(kl, below),
        paired_ratio(own_kl, below),
        paired_ratio(kl, own_kl),
        *(max(len(a.problems) for a in group) for group in (foreign, own)),
    )


def markdown(table: Sequence[Row], foreign: Calibration, own: Calibration, command: str) -> str:
    lines = [
        "# A calibration on a model that it never saw",
        "",
        f"`{command}`; mlx {mx.__version__} on {platform.system()} {platform.machine()}, float32.",
        "",
        f"The model is {own.model.name}: SmolLM2-135M-Instruct fine-tuned for RoPE base 10 000 instead of 100 000. Tables: `foreign`, of",
        f"{foreign.model.name} (`{foreign.digest[:16]}`), and `own`, of the model itself (`{own.digest[:16]}`), from the same corpus.",
        f"Streaming, the first {SINK} and newest {RECENT} tokens exact, {LONG_CHUNK} tokens a forward; KL(own cache || codec) in nats.",
        f"Ratios: to TurboQuant's 4 bits (`{REFERENCE}`) in the same model, and foreign over own; with {INTERVAL}.",
        "Fallbacks: roles of layers that a training-free codec took.",
        "",
        "| text | codec | n | bits foreign | own | KL foreign | own | to TurboQuant: foreign | own | foreign / own | fallbacks | own |",
        "|" + "---|" * 12,
    ]
    for r in table:
        figures = [f"{r.bits:.3f}", f"{r.own_bits:.3f}", f"{r.kl:.5f}", f"{r.own_kl:.5f}", *map(_ratio, (r.ratio, r.own_ratio, r.cost))]
        lines.append(f"| {r.text} | `{r.codec}` | {r.positions} | {' | '.join(figures)} | {r.fallbacks} | {r.own_fallbacks} |")
    return "\n".join(lines) + "\n"


def _ratio(value: Interval) -> str:
    ratio, low, high = value
    return "" if ratio is None else f"{ratio:.3f}" + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="SmolLM2's tables (default: made where they are not there)")
    parser.add_argument("--own", type=Path, metavar="FILE", help="the sibling's own tables (default: made where they are not there)")
    parser.add_argument(
        "--texts", type=lambda names: names.split(","), default=list(ALL_TEXTS), metavar="A,B,...", help="default: all of them"
    )
    parser.add_argument("--out", type=Path, help=f"folder for the results (default of all texts: {OUT.relative_to(ROOT)})")
    args = parser.parse_args()
    unknown = sorted(set(args.texts) - set(ALL_TEXTS))
    if unknown:
        parser.error(f"--texts must be some of {', '.join(ALL_TEXTS)}, but got {', '.join(unknown)}")
    paths = models_at()
    model = load_model(paths["smollm2-theta10k"])

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    folder = paths["smollm2"].parent
    named = args.calibration or calibration_of(load_model(paths["smollm2"]), folder, say)
    foreign = calibrations.resolve_foreign(named, layer_shapes(probe_model(model.model)))
    own = calibrations.resolve(args.own or calibration_of(model, folder, say), model.info.weights)
    assert own is not None
    table = list(rows(model, {name: text(name) for name in args.texts}, foreign, own, say, TOKENS[PROTOCOL]))
    full = args.texts == list(ALL_TEXTS)
    command = "make foreign-calibration" if full else f"python -m tests.smollm2.foreign_calibration --texts {','.join(args.texts)}"
    page = markdown(table, foreign, own, command)
    print(page)
    out = args.out or (OUT if full else None)
    if out is not None:
        write(NAME, page, {"calibration": foreign.digest, "own": own.digest, "rows": [asdict(row) for row in table]}, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
