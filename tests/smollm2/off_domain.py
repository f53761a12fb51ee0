"""What a calibration without texts of a prompt's kind costs on SmolLM2-135M-Instruct.

    python -m tests.smollm2.off_domain [--out DIR] [--cache DIR]

For each kind of text in the shipped corpus (prose, code, technical, chat): tables learnt from all four kinds against tables learnt from the
other three, scored on the held-out text of that kind (tests/texts) by the frontier's protocol: streaming, first 4 and newest 32 tokens
exact, positions 128 and on of the first 1024 tokens. Exits with 1 where a target is missed.

The rows and metrics of each kind are collected once (about two minutes each) and kept in the cache folder under a digest of the sources
that collected them; the tables of each combination are built anew (a minute each).
"""

import argparse
import io
import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from blake3 import blake3

from formats.atomic import atomic_write
from formats.manifest import ModelInfo
from kvtool import calibration_texts
from kvtool.arms import Arm, TextArms
from kvtool.bootstrap import paired_ratio
from kvtool.calibrating import tables_of
from kvtool.calibrations import Calibration
from kvtool.capturing import encode_prompt
from kvtool.model import LoadedModel, load_model
from kvtool.moments import CORPUS_TOKENS, Moments, collect, joined
from kvtool.roundtrip import parse_roundtrip
from kvtool.sweeping import PREFIX, TOKENS, ids_of
from tests.smollm2.frontier import CALIBRATING, INTERVAL, LONG_CHUNK, OUT, PROTOCOL, ROOT, Say, shown, sources_digest
from tests.smollm2.make import models_at
from tests.texts import text
from veloxquant_mlx.allocators.transforms import LayerRows
from veloxquant_mlx.codecs import RECENT, SINK

NAME, CACHE = "off-domain-smollm2", ROOT / ".cache" / "off-domain"
KINDS = tuple(dict.fromkeys(calibration_texts.KINDS.values()))
CODECS: dict[str, float | None] = {"tc-2.05": 2.0, "tcz-1.1": None}  # codec -> most that its KL may grow by, if anything is required
DESIGN = 1.25  # of tcz, the nearest to its rate
METRICS = ("fisher_k", "fisher_v")


@dataclass(frozen=True)
class Row:
    """One codec on the held-out text of one kind.

    Attributes:
        bits, off_bits: a value of the coded rows, with tables of all kinds, and of the others.
        kl, off_kl, p99, off_p99: mean and 99th percentile of KL, nats.
        ratio, low, high: off_kl over kl, with a 95 % interval.
        fallbacks, off_fallbacks: roles of layers that another codec took.
        limit: most that the ratio may be, or None.
    """

    kind: str
    codec: str
    positions: int
    bits: float
    off_bits: float
    kl: float
    off_kl: float
    p99: float
    off_p99: float
    ratio: float | None
    low: float | None
    high: float | None
    fallbacks: int
    off_fallbacks: int
    limit: float | None

    @property
    def reached(self) -> bool:
        return self.limit is None or (self.ratio is not None and self.ratio <= self.limit)


def write_moments(path: Path, moments: Moments) -> None:
    """Rows and metrics as one .npz, which `read_moments` reads back."""
    arrays = {f"{name}.{field}": getattr(layer, field) for name, layer in moments.layers.items() for field in ("k", "v", *METRICS)}
    about = {field: getattr(moments, field) for field in ("skipped", "tokens", "texts", "length", "sink", "recent")}
    about |= {"model": asdict(moments.model), "layers": {name: layer.gradients for name, layer in moments.layers.items()}}
    data = io.BytesIO()
    np.savez(data, about=np.array(json.dumps(about)), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(str(path)) as file:
        file.write(data.getbuffer())


def read_moments(path: Path) -> Moments:
    with np.load(path) as arrays:
        about = json.loads(str(arrays["about"]))
        layers = {}
        for name, gradients in about.pop("layers").items():
            layers[name] = LayerRows(*(arrays[f"{name}.{field}"] for field in ("k", "v", *METRICS)), gradients)
    return Moments(layers=layers, **about | {"model": ModelInfo(**about["model"])})


def collected(model: LoadedModel, texts: Mapping[str, Sequence[int]], cache: Path, say: Say) -> Moments:
    """Statistics of texts, from the cache folder where they are there."""
    key = json.dumps([sources_digest(CALIBRATING, frozenset({"kvtool.calibrating"})), model.info.weights, model.info.dtype, dict(texts)])
    path = cache / f"{blake3(key.encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        start = time.perf_counter()
        write_moments(path, collect(model, texts))
        say(f"collected {', '.join(texts)}: {time.perf_counter() - start:.0f} s")
    return read_moments(path)


def rows(
    model: LoadedModel,
    corpus: Mapping[str, Mapping[str, Sequence[int]]],
    held_out: Mapping[str, str],
    codecs: Mapping[str, float | None],
    cache: Path,
    say: Say,
    tokens: int = TOKENS[PROTOCOL],
) -> Iterator[Row]:
    """The table.

    Args:
        corpus: kind -> name -> token ids, to calibrate with.
        held_out: kind -> text, to score.
        codecs: spec -> limit.
    """
    parts = {kind: collected(model, texts, cache, say) for kind, texts in corpus.items()}
    rates = (DESIGN,) if any(codec.startswith("tcz") for codec in codecs) else ()
    start = time.perf_counter()
    of_all = tables_of(joined(list(parts.values())), rates, [])
    say(f"tables of all kinds: {time.perf_counter() - start:.0f} s")
    for kind in corpus:
        start = time.perf_counter()
        of_others = tables_of(joined([part for name, part in parts.items() if name != kind]), rates, [])
        say(f"tables without {kind}: {time.perf_counter() - start:.0f} s")
        ids = ids_of(model, kind, held_out[kind], PREFIX[PROTOCOL], tokens)
        base = TextArms(model, kind, ids, PROTOCOL, PREFIX[PROTOCOL], LONG_CHUNK)
        for codec, limit in codecs.items():
            row = _row(kind, codec, limit, *(arm_with(base, codec, tables) for tables in (of_all, of_others)))
            say(f"{kind}, {codec}: KL {row.kl:.5f}, without {kind} {row.off_kl:.5f}")
            yield row


def arm_with(base: TextArms, codec: str, tables: Calibration) -> Arm:
    """The arm of a codec with these tables."""
    base.calibration = tables
    return base.arm(parse_roundtrip(codec, SINK, RECENT))


def _row(kind: str, codec: str, limit: float | None, arm: Arm, off: Arm) -> Row:
    failed = [problem for a in (arm, off) if a.failed for problem in a.problems]
    if failed:
        raise ValueError(f"{kind}, {codec}: {failed[0]}")
    kl, other = np.array(arm.kl), np.array(off.kl)
    return Row(
        kind,
        codec,
        len(kl),
        *(8 * a.coded_bytes / a.coded_values for a in (arm, off)),
        *(float(x.mean()) for x in (kl, other)),
        *(float(np.quantile(x, 0.99)) for x in (kl, other)),
        *paired_ratio([other], [kl]),
        *(len(a.problems) for a in (arm, off)),
        limit,
    )


def markdown(table: Sequence[Row], about: str) -> str:
    lines = [
        "# Calibrations without texts of the prompt's kind, on SmolLM2-135M-Instruct",
        "",
        f"`make off-domain`; mlx {mx.__version__} on {platform.system()} {platform.machine()}, float32. {about}",
        "",
        f"Streaming, the first {SINK} and newest {RECENT} tokens exact, {LONG_CHUNK} tokens a forward; KL(own || codec) in nats, on the",
        "held-out text of each kind, with tables from all kinds of the shipped corpus (`in`), and from all but its own (`off`).",
        f"Ratio: off over in, with {INTERVAL}. Fallbacks: roles of layers that a training-free codec took.",
        "",
        "| kind | codec | positions | bits in | off | KL in | off | p99 in | off | ratio | fallbacks in | off | at most | |",
        "|" + "---|" * 14,
    ]
    for r in table:
        interval = "" if r.low is None or r.high is None else f" [{r.low:.3f}, {r.high:.3f}]"
        figures = [f"{r.bits:.3f}", f"{r.off_bits:.3f}", f"{r.kl:.5f}", f"{r.off_kl:.5f}", f"{r.p99:.4f}", f"{r.off_p99:.4f}"]
        ends = [shown(r.ratio, ".3f") + interval, str(r.fallbacks), str(r.off_fallbacks), shown(r.limit, "g")]
        verdict = "" if r.limit is None else "reached" if r.reached else "MISSED"
        lines.append(f"| {r.kind} | `{r.codec}` | {r.positions} | {' | '.join([*figures, *ends, verdict])} |")
    return "\n".join(lines) + "\n"


def write(name: str, page: str, data: object, out: Path) -> None:
    """A page and its figures as name.md and name.json."""
    out.mkdir(parents=True, exist_ok=True)
    for suffix, content in (("md", page), ("json", json.dumps(data, indent=1) + "\n")):
        with atomic_write(str(out / f"{name}.{suffix}")) as file:
            file.write(content.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for the results (default: {OUT.relative_to(ROOT)})")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of collected statistics (default: {CACHE.relative_to(ROOT)})")
    args = parser.parse_args()
    model = load_model(models_at()["smollm2"])
    corpus: dict[str, dict[str, Sequence[int]]] = {kind: {} for kind in KINDS}
    for name, words in calibration_texts.texts().items():
        corpus[calibration_texts.KINDS[name]][name] = encode_prompt(model, words)[:CORPUS_TOKENS]

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    table = list(rows(model, corpus, {kind: text(kind) for kind in KINDS}, CODECS, args.cache, say))
    count = ", ".join(f"{kind} {len(own)}" for kind, own in corpus.items())
    page = markdown(table, f"Texts of {CORPUS_TOKENS} tokens: {count}.")
    print(page)
    write(NAME, page, {"rows": [asdict(row) for row in table]}, args.out)
    return 0 if all(row.reached for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
