"""What a calibration is worth on a model that it never saw: SmolLM2-135M-Instruct's tables in a fine-tuned sibling.

    python -m tests.smollm2.foreign_calibration [--calibration FILE] [--own FILE] [--texts prose,code] [--tokens N] [--out DIR]

The sibling has RoPE base 10 000 instead of 100 000 and weights fine-tuned for it. Each codec runs in it with SmolLM2's calibration and with
one of its own, both over TurboQuant, on the held-out texts by the frontier's protocol: streaming, first 4 and newest 32 tokens exact,
positions 128 and on of the first 1024 tokens. Calibrations are made, ten minutes each, where none is given or kept; finished arms are kept.
"""

import argparse
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from kvtool import calibrations
from kvtool.arms import OWN, Arm
from kvtool.bootstrap import paired_ratio
from kvtool.calibrations import Calibration
from kvtool.model import LoadedModel, load_model
from kvtool.probe import probe_model
from kvtool.roundtrip import parse_roundtrip
from kvtool.sweeping import ALL, TOKENS, layer_shapes
from tests.smollm2.frontier import CACHE, INTERVAL, LONG_CHUNK, OUT, PROTOCOL, REFERENCE, ROOT, Say, calibration_of, measured
from tests.smollm2.make import models_at
from tests.smollm2.off_domain import write
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


def rows(
    model: LoadedModel, texts: Mapping[str, str], foreign: Calibration, own: Calibration, cache: Path, say: Say, tokens: int
) -> Iterator[Row]:
    """The table, codec by codec, within each text by text and then all of them together.

    Args:
        foreign, own: calibrations of the other model and of this one.
        cache: folder of finished arms.
        tokens: positions to score at most, a text.
    """
    theirs, ours = (arms_of(model, texts, calibration, cache, say, tokens) for calibration in (foreign, own))
    turbo = theirs[parse_roundtrip(REFERENCE, SINK, RECENT).spec]
    for codec in CODECS:
        spec = parse_roundtrip(codec, SINK, RECENT).spec
        triples = list(zip(theirs[spec], ours[spec], turbo, strict=True))
        for name, triple in zip(texts, triples, strict=True):
            yield row_of(name, codec, [triple])
        if len(triples) > 1:
            yield row_of(ALL, codec, triples)


def arms_of(
    model: LoadedModel, texts: Mapping[str, str], calibration: Calibration, cache: Path, say: Say, tokens: int
) -> dict[str, list[Arm]]:
    """spec -> an arm a text, of the codecs with these tables and of TurboQuant; from the cache folder where they are there."""
    found: dict[str, list[Arm]] = {}
    specs = [parse_roundtrip(codec, SINK, RECENT).spec for codec in (REFERENCE, *CODECS)]
    for spec, arm in measured(model, texts, dict.fromkeys((OWN, *specs), LONG_CHUNK), tokens, cache, say, calibration):
        found.setdefault(spec, []).append(arm)
    return found


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
    parser.add_argument("--tokens", type=int, default=TOKENS[PROTOCOL], help="positions to score at most, a text (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of finished arms (default: {CACHE.relative_to(ROOT)})")
    parser.add_argument("--out", type=Path, help=f"folder for the results (default of a full run: {OUT.relative_to(ROOT)})")
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
    table = list(rows(model, {name: text(name) for name in args.texts}, foreign, own, args.cache, say, args.tokens))
    full = args.texts == list(ALL_TEXTS) and args.tokens == TOKENS[PROTOCOL]
    words = f"python -m tests.smollm2.foreign_calibration --texts {','.join(args.texts)} --tokens {args.tokens}"
    command = "make foreign-calibration" if full else words
    page = markdown(table, foreign, own, command)
    print(page)
    out = args.out or (OUT if full else None)
    if out is not None:
        write(NAME, page, {"calibration": foreign.digest, "own": own.digest, "rows": [asdict(row) for row in table]}, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
