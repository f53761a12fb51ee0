"""Quality against bits of every codec on SmolLM2-135M-Instruct, in one table: markdown, CSV, JSON and SVG.

    python -m tests.smollm2.frontier [--codecs A,B,...] [--texts prose,code] [--tokens N] [--out DIR] [--cache DIR]

Protocol: streaming (`kvtool.sweep`), first 4 and newest 32 tokens exact, positions 128 and on of the first 1024 tokens of each text of
tests/texts, ratios to TurboQuant's 4 bits. Each codec on each text is kept in the cache folder as soon as it is done, under a digest of the
sources that computed it, so that an interrupted run goes on and a changed codec is measured anew. A run of some codecs or texts writes
only where --out says.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import mlx.core as mx
from blake3 import blake3

from formats.atomic import atomic_write
from kvtool.arms import CHUNK, OWN, Arm, TextArms
from kvtool.bootstrap import BLOCK
from kvtool.cli.eval import split_specs
from kvtool.frontier import without_window, write_csv, write_plot
from kvtool.model import LoadedModel, load_model
from kvtool.roundtrip import parse_roundtrip
from kvtool.sweeping import PREFIX, TOKENS, SweepReport, ids_of, rows_of, specs_of
from tests.smollm2.make import models_at
from tests.texts import ALL_TEXTS, text
from veloxquant_mlx.codecs import RECENT, SINK

ROOT = Path(__file__).parents[2]
OUT, CACHE, NAME = ROOT / "tests" / "results", ROOT / ".cache" / "frontier", "frontier-smollm2"
PROTOCOL, REFERENCE = "streaming", "rvq-4:norm:nocenter"
# spec -> what it is; a new codec is a line here.
CODECS = {
    "raw": "exact",
    **{f"rvq-{n}": "rotated, Lloyd-Max" for n in (2, 3, 4)},
    **{f"rvq-{n}": "rotated, two stages" for n in ("1+1", "2+1", "2+2")},
    **{f"rvq-{n}:norm:nocenter": "TurboQuant" for n in (2, 3, 4)},
    "rabitq": "RaBitQ, 1-bit keys",
    **{f"rabitq-{n}": "extended RaBitQ" for n in (2, 3, 4)},
    **{f"affine-{n}": "KIVI" for n in (2, 4)},
    **{f"commvq-{n}": "CommVQ" for n in (1, 2)},
    **{f"qjl-{n}": "QJL, 2-bit values" for n in (1, 2)},
    **{f"mlx-{n}": "mlx-lm's QuantizedKVCache" for n in (2, 3, 4, 6, 8)},
    "fp8": "MLX's e4m3",
}
# Modules that make tables of finished arms: what they say is computed anew each time.
TABLES = {"kvtool.bootstrap", "kvtool.frontier", "kvtool.passkeys", "kvtool.sweeping"}
INTERVAL = f"a 95 % interval (bootstrap over blocks of {BLOCK} positions)"
PACKAGES = ("formats", "kvtool", "veloxquant_mlx")

Say = Callable[[str], None]


def sources_digest() -> str:
    """A digest of this project's modules that are loaded (but for those of tables and commands) and of the data files beside them."""
    total = blake3(f"{mx.__version__} {mx.default_device()}".encode())
    modules = {name: m for name, m in sys.modules.items() if name.split(".")[0] in PACKAGES and name not in TABLES}
    files = {Path(str(m.__file__)) for name, m in modules.items() if not name.startswith("kvtool.cli") and getattr(m, "__file__", None)}
    data = {p for top in PACKAGES for p in (ROOT / top).rglob("*") if p.suffix not in (".py", ".pyc", ".md") and "tiny" not in p.parts}
    for path in sorted(files | {p for p in data if p.is_file()}):
        total.update(str(path.relative_to(ROOT)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def measured(
    model: LoadedModel, texts: Mapping[str, str], specs: Sequence[str], tokens: int, cache: Path, say: Say
) -> Iterator[tuple[str, Arm]]:
    """(spec, arm) of the own cache and of every codec on every text, from the cache folder where it is there."""
    done, total, sources = 0, len(texts) * (1 + len(specs)), sources_digest()
    for name, words in texts.items():
        ids = ids_of(model, name, words, PREFIX[PROTOCOL], tokens)
        key = blake3(json.dumps([sources, model.info.weights, model.info.dtype, PROTOCOL, PREFIX[PROTOCOL], CHUNK, ids]).encode())
        folder = cache / key.hexdigest()[:16]
        base: TextArms | None = None
        for spec in (OWN, *specs):
            path = folder / f"{quote(spec, safe=',=+:')}.json"
            start = time.perf_counter()
            if path.exists():
                arm = Arm.from_json(json.loads(path.read_text(encoding="utf-8")))
            else:
                if base is None:
                    base = TextArms(model, name, ids, PROTOCOL, PREFIX[PROTOCOL])
                arm = base.own if spec == OWN else base.arm(parse_roundtrip(spec))
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_write(str(path)) as file:
                    file.write(json.dumps(arm.to_json()).encode())
            done += 1
            say(f"[{done}/{total}] {name}, {spec}: KL {sum(arm.kl) / len(arm.kl):.5f}, {time.perf_counter() - start:.1f} s")
            yield spec, arm


def table(
    model: LoadedModel, texts: Mapping[str, str], codecs: Sequence[str], tokens: int, cache: Path, say: Say
) -> tuple[SweepReport, dict[str, str]]:
    """The report of a sweep, from cached arms, and spec -> codec as it was asked for."""
    relative = REFERENCE if REFERENCE in codecs else None
    references = specs_of(codecs, SINK, RECENT, "on", relative)
    arms: dict[str, list[Arm]] = {spec: [] for spec in (OWN, *references)}
    for spec, arm in measured(model, texts, list(references), tokens, cache, say):
        arms[spec].append(arm)
    report = SweepReport(model.info.name, PROTOCOL, PREFIX[PROTOCOL], relative, 0, rows_of(arms, references, {}))
    return report, dict(zip(references, codecs, strict=True))


def markdown(report: SweepReport, asked: Mapping[str, str], command: str) -> str:
    """The table over all texts, the KL by text, and what codecs said."""
    rows = [r for r in report.rows if r.text == report.rows[-1].text]
    named = list(dict.fromkeys(r.text for r in report.rows if r.text != "all"))
    machine = f"mlx {mx.__version__} on {platform.system()} {platform.machine()}, float32"
    scored = ", ".join(f"{name} {report.row(OWN, name).n}" for name in named)
    lines = [
        "# Quality against bits on SmolLM2-135M-Instruct",
        "",
        f"`{command}`; {machine}.",
        "",
        f"Streaming: every row is coded as it leaves the newest {RECENT} tokens, inside the forward; the first {SINK} stay exact.",
        f"Positions scored, after {report.prefix} tokens: {scored}. KL is KL(own || codec) in nats, mean of the texts.",
        *([f"Ratio: KL over that of `{report.relative_to}`, with {INTERVAL}."] if report.relative_to is not None else []),
        "Bits are a value of the coded rows, side information included; `all` has the exact rows too.",
        "",
        "| codec | what | bits | all | KL | KL p99 | ratio | perplexity | top-1 | attention error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ratio = "" if r.ratio is None else f"{r.ratio:.3f}"
        interval = "" if r.ratio_low is None or r.ratio_high is None else f" [{r.ratio_low:.3f}, {r.ratio_high:.3f}]"
        what = CODECS.get(asked.get(r.codec, ""), "the model's cache" if r.codec == OWN else "")
        figures = [
            shown(r.bits, ".3f"),
            shown(r.bits_all, ".3f"),
            shown(r.kl, ".5f"),
            shown(r.kl_p99, ".4f"),
            ratio + interval,
            shown(r.ppl_delta, "+.2f", " %"),
            shown(None if r.top1 is None else 100 * r.top1, ".2f", " %"),
            shown(r.attention_error, ".2e"),
        ]
        lines.append(f"| `{asked.get(r.codec, r.codec)}` | {what} | {' | '.join(figures)} |")
    if len(named) > 1:
        lines += ["", "KL by text:", "", f"| codec | {' | '.join(named)} |", "|---" * (1 + len(named)) + "|"]
        for r in rows:
            by_text = (shown(report.row(r.codec, name).kl, ".5f") for name in named)
            lines.append(f"| `{asked.get(r.codec, r.codec)}` | {' | '.join(by_text)} |")
    notes = [f"- `{asked.get(r.codec, r.codec)}`: {r.note}" for r in rows if r.note]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def shown(value: float | None, form: str, unit: str = "") -> str:
    """A number with its unit; nothing where there is none."""
    return "" if value is None else format(value, form) + unit


def write(report: SweepReport, page: str, out: Path) -> None:
    """The table as frontier-smollm2.md, .csv, .json and .svg. Seconds are left out: the rest is the same in every run."""
    out.mkdir(parents=True, exist_ok=True)
    data = report.to_json()
    for row in data["rows"]:
        del row["seconds"]
    for suffix, content in (("md", page), ("json", json.dumps(data, indent=1) + "\n")):
        with atomic_write(str(out / f"{NAME}.{suffix}")) as file:
            file.write(content.encode())
    write_csv(str(out / f"{NAME}.csv"), data["rows"])
    last = report.rows[-1]
    lossy = [r for r in report.rows if r.text == last.text and r.codec not in (OWN, "raw") and r.bits is not None]
    labels, window = without_window([r.codec for r in lossy])
    points = [(r.bits or 0.0, r.kl or 0.0) for r in lossy]
    title = f"{report.model}, {report.protocol}, {last.n} positions, {window}"
    write_plot(str(out / f"{NAME}.svg"), [(name, *point) for name, point in zip(labels, points, strict=True)], title)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", type=split_specs, default=list(CODECS), metavar="A,B,...", help="default: all of them")
    parser.add_argument(
        "--texts", type=lambda names: names.split(","), default=list(ALL_TEXTS), metavar="A,B,...", help="default: all of them"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS[PROTOCOL], help="positions to score at most, a text (default: %(default)s)")
    parser.add_argument("--out", type=Path, help=f"folder for the results (default of a full run: {OUT.relative_to(ROOT)})")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of finished arms (default: {CACHE.relative_to(ROOT)})")
    args = parser.parse_args()
    unknown = sorted(set(args.texts) - set(ALL_TEXTS))
    if unknown:
        parser.error(f"--texts must be some of {', '.join(ALL_TEXTS)}, but got {', '.join(unknown)}")
    full = args.codecs == list(CODECS) and args.texts == list(ALL_TEXTS) and args.tokens == TOKENS[PROTOCOL]
    model = load_model(models_at()["smollm2"])

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    report, asked = table(model, {name: text(name) for name in args.texts}, args.codecs, args.tokens, args.cache, say)
    words = [] if full else [f"--codecs {','.join(args.codecs)}", f"--texts {','.join(args.texts)}", f"--tokens {args.tokens}"]
    page = markdown(report, asked, "make frontier" if full else " ".join(["python -m tests.smollm2.frontier", *words]))
    print(page)
    out = args.out or (OUT if full else None)
    if out is not None:
        write(report, page, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
