"""Quality against bits of every codec on SmolLM2-135M-Instruct, in one table: markdown, CSV, JSON and SVG.

    python -m tests.smollm2.frontier [--codecs A,B,...] [--texts prose,code] [--tokens N] [--calibration FILE] [--out DIR] [--cache DIR]

Protocol: streaming (`kvtool.sweep`), first 4 and newest 32 tokens exact, positions 128 and on of the first 1024 tokens of each text of
tests/texts, ratios to TurboQuant's 4 bits. Each codec on each text is kept in the cache folder as soon as it is done, under a digest of the
sources that computed it, so that an interrupted run goes on and a changed codec is measured anew. A run of some codecs or texts writes
only where --out says. Calibrated codecs have tables from the shipped corpus, made once and kept beside the model, or from --calibration.

A second table says which of the targets the measured rows reach; exits with 1 where one is missed.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

import mlx.core as mx
from blake3 import blake3

from formats.atomic import atomic_write
from formats.calibration import to_bytes
from kvtool import calibrations
from kvtool.arms import CHUNK, OWN, Arm, TextArms
from kvtool.bootstrap import BLOCK
from kvtool.calibrating import calibrate
from kvtool.calibrations import Calibration
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
    **{f"rvq-{n}": "rotated, Lloyd-Max" for n in (2, 3, 4)},
    "rvq-2+2": "rotated, two stages",
    "k=rvq-3,v=rvq-2:nocenter": "rotated, keys centred before RoPE",
    **{f"rvq-{n}:norm:nocenter": "TurboQuant" for n in (2, 3, 4)},
    "k=rvq-2:norm:nocenter,v=raw": "TurboQuant, exact values",
    "rabitq": "RaBitQ, 1-bit keys",
    **{f"rabitq-{n}": "extended RaBitQ" for n in (2, 4)},
    **{f"affine-{n}": "KIVI" for n in (2, 4)},
    "commvq-2": "words of planes",
    "commvq-2:additive": "CommVQ, calibrated, 4-bit values",
    "k=commvq-2:additive,v=raw": "CommVQ, calibrated, exact values",
    **{f"vecinfer-{n}": "VecInfer" for n in (1, 2)},
    "qjl-2": "QJL, 2-bit values",
    **{f"mlx-{n}": "mlx-lm's QuantizedKVCache" for n in (2, 3, 4, 8)},
    "fp8": "MLX's e4m3",
    **{f"tc-{n}": "transform code, calibrated" for n in ("1.55", "2.05", "2.3", "3.05", "4.05")},
    **{f"tcz-{n}": "the same, entropy-coded" for n in ("0.75", "1.1", "1.45", "1.9")},
}
# What is coded in blocks of more than 128 tokens, or has a mean a block, runs with as many tokens a forward.
LONG_CHUNK = 512
LONG = {"k=rvq-3,v=rvq-2:nocenter", *(spec for spec in CODECS if spec.startswith("tcz-"))}
# Modules that make tables of finished arms: what they say is computed anew each time; a calibration is known by its own digest.
TABLES = {"kvtool.bootstrap", "kvtool.calibrating", "kvtool.frontier", "kvtool.passkeys", "kvtool.sweeping"}
# What a calibration of given weights depends on, packages with all that is in them.
CALIBRATING = (
    "formats.calibration",
    "kvtool.calibrating",
    "kvtool.calibration_texts",
    "kvtool.fisher",
    "kvtool.moments",
    "kvtool.probe",
    "veloxquant_mlx.allocators",
    "veloxquant_mlx.codecs.commvq_additive",
    "veloxquant_mlx.transfer",
)
INTERVAL = f"a 95 % interval (bootstrap over blocks of {BLOCK} positions)"
PACKAGES = ("formats", "kvtool", "veloxquant_mlx")
STATE_BITS = 0.02  # that a row may take beyond its nominal bits: means, padding, ends of the coder's state


@dataclass(frozen=True)
class Target:
    """A KL to reach.

    Attributes:
        codec: as in CODECS.
        limit: most that the ratio may be, or None: nothing is required.
        aim: what is hoped for, or None.
        below: codec whose KL is below the line.
        bits: nominal, or None where the row's bits are of no account.
    """

    codec: str
    limit: float | None
    aim: float | None = None
    below: str = REFERENCE
    bits: float | None = None

    def reached(self, ratio: float | None, bits: float | None) -> bool:
        """Whether a row with this ratio and these bits does; a refused row does not."""
        if ratio is None or (self.bits is not None and (bits is None or bits > self.bits + STATE_BITS)):
            return False
        return self.limit is None or ratio <= self.limit


TARGETS = (
    Target("tc-1.55", 4.0, bits=1.55),
    Target("tc-2.05", 1.9, 1.5, bits=2.05),
    Target("tc-2.3", 1.3, 1.05, bits=2.3),
    Target("tc-3.05", 0.65, 0.5, bits=3.05),
    Target("tc-4.05", None, 0.25, bits=4.05),
    Target("tcz-0.75", 2.9, bits=0.75),
    Target("tcz-1.1", 1.3, bits=1.1),
    Target("tcz-1.45", 0.75, bits=1.45),
    Target("tcz-1.9", 0.35, bits=1.9),
    Target("k=rvq-3,v=rvq-2:nocenter", None, 4.0, bits=2.75),
    Target("k=commvq-2:additive,v=raw", 0.5, below="k=rvq-2:norm:nocenter,v=raw"),
)

Say = Callable[[str], None]


def sources_digest(only: Sequence[str] = PACKAGES, but: frozenset[str] = frozenset(TABLES)) -> str:
    """A digest of modules of this project that are loaded, and of the data files beside them.

    Args:
        only: packages or modules that count.
        but: modules that do not; those of commands never do.
    """
    total = blake3(f"{mx.__version__} {mx.default_device()}".encode())
    named = {name: m for name, m in sys.modules.items() if any(name == top or name.startswith(f"{top}.") for top in only)}
    modules = {name: m for name, m in named.items() if name not in but and not name.startswith("kvtool.cli")}
    files = {Path(str(m.__file__)) for m in modules.values() if getattr(m, "__file__", None)}
    folders = [folder for top in only if (folder := ROOT / top.replace(".", "/")).is_dir()]
    data = {p for folder in folders for p in folder.rglob("*") if p.suffix not in (".py", ".pyc", ".md") and "tiny" not in p.parts}
    for path in sorted(files | {p for p in data if p.is_file()}):
        total.update(str(path.relative_to(ROOT)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def calibration_of(model: LoadedModel, folder: Path, say: Say) -> Calibration:
    """The model's calibration with the shipped corpus: from the folder, or made and kept there."""
    key = blake3(f"{sources_digest(CALIBRATING, frozenset())} {model.info.weights} {model.info.tokenizer} {model.info.dtype}".encode())
    path = folder / f"{key.hexdigest()[:16]}.cal"
    if not path.exists():
        say(f"calibrating {model.info.name} into {path}: this takes about ten minutes, once")
        start, told = time.perf_counter(), 0

        def progress(done: int, total: int) -> None:
            nonlocal told
            if 10 * done // total > told:
                told = 10 * done // total
                say(f"calibrating: {10 * told} %, {time.perf_counter() - start:.0f} s")

        data = to_bytes(calibrate(model, progress=progress).file)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(str(path)) as file:
            file.write(data)
    return calibrations.load(path)


def is_calibrated(spec: str) -> bool:
    return spec != OWN and parse_roundtrip(spec).calibrated


def measured(
    model: LoadedModel,
    texts: Mapping[str, str],
    specs: Mapping[str, int],
    tokens: int,
    cache: Path,
    say: Say,
    calibration: Calibration | None = None,
) -> Iterator[tuple[str, Arm]]:
    """(spec, arm) of the own cache and of every codec on every text, from the cache folder where it is there.

    Args:
        specs: spec -> tokens a forward.
        calibration: of calibrated codecs.
    """
    done, total, sources = 0, len(texts) * (1 + len(specs)), sources_digest()
    for name, words in texts.items():
        ids = ids_of(model, name, words, PREFIX[PROTOCOL], tokens)
        bases: dict[int, TextArms] = {}
        for spec, chunk in {OWN: CHUNK, **specs}.items():
            key = blake3(json.dumps([sources, model.info.weights, model.info.dtype, PROTOCOL, PREFIX[PROTOCOL], chunk, ids]).encode())
            tables = f" {calibration.digest[:16]}" if calibration is not None and is_calibrated(spec) else ""
            path = cache / key.hexdigest()[:16] / f"{quote(spec + tables, safe=',=+:')}.json"
            start = time.perf_counter()
            if path.exists():
                arm = Arm.from_json(json.loads(path.read_text(encoding="utf-8")))
            else:
                if chunk not in bases:
                    bases[chunk] = TextArms(model, name, ids, PROTOCOL, PREFIX[PROTOCOL], chunk, calibration)
                arm = bases[chunk].own if spec == OWN else bases[chunk].arm(parse_roundtrip(spec))
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(str(path)) as file:
                    file.write(json.dumps(arm.to_json()).encode())
            done += 1
            say(f"[{done}/{total}] {name}, {spec}: KL {sum(arm.kl) / len(arm.kl):.5f}, {time.perf_counter() - start:.1f} s")
            yield spec, arm


def table(
    model: LoadedModel,
    texts: Mapping[str, str],
    codecs: Sequence[str],
    tokens: int,
    cache: Path,
    say: Say,
    calibration: Calibration | None = None,
) -> tuple[SweepReport, dict[str, str]]:
    """The report of a sweep, from cached arms, and spec -> codec as it was asked for."""
    relative = REFERENCE if REFERENCE in codecs else None
    references = specs_of(codecs, SINK, RECENT, "on", relative)
    asked = dict(zip(references, codecs, strict=True))
    chunks = {spec: LONG_CHUNK if codec in LONG else CHUNK for spec, codec in asked.items()}
    arms: dict[str, list[Arm]] = {spec: [] for spec in (OWN, *references)}
    for spec, arm in measured(model, texts, chunks, tokens, cache, say, calibration):
        arms[spec].append(arm)
    digest = None if calibration is None else calibration.digest
    report = SweepReport(model.info.name, PROTOCOL, PREFIX[PROTOCOL], relative, 0, rows_of(arms, references, {}), digest)
    return report, asked


@dataclass(frozen=True)
class Verdict:
    """A target beside what was measured, over all texts."""

    target: Target
    bits: float | None
    ratio: float | None
    reached: bool


def verdicts(report: SweepReport, asked: Mapping[str, str]) -> list[Verdict]:
    """The targets whose rows, and those below the line, were measured."""
    rows = {codec: report.row(spec) for spec, codec in asked.items()}
    found = []
    for target in TARGETS:
        if target.codec in rows and target.below in rows:
            row, below = rows[target.codec], rows[target.below]
            ratio = None if row.kl is None or not below.kl else row.kl / below.kl
            found.append(Verdict(target, row.bits, ratio, target.reached(ratio, row.bits)))
    return found


def markdown(report: SweepReport, asked: Mapping[str, str], command: str) -> str:
    """The table over all texts, the targets, the KL by text, and what codecs said."""
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
        f"{CHUNK} tokens a forward; {LONG_CHUNK} where `*` stands, which is what fills blocks of a mean or of an entropy coder.",
        *([f"Tables of calibrated codecs: `{report.calibration[:16]}`, of other texts."] if report.calibration is not None else []),
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
        mark = " *" if asked.get(r.codec) in LONG else ""
        lines.append(f"| `{asked.get(r.codec, r.codec)}`{mark} | {what} | {' | '.join(figures)} |")
    lines += target_lines(verdicts(report, asked))
    if len(named) > 1:
        lines += ["", "KL by text:", "", f"| codec | {' | '.join(named)} |", "|---" * (1 + len(named)) + "|"]
        for r in rows:
            by_text = (shown(report.row(r.codec, name).kl, ".5f") for name in named)
            lines.append(f"| `{asked.get(r.codec, r.codec)}` | {' | '.join(by_text)} |")
    notes = [f"- `{asked.get(r.codec, r.codec)}`: {r.note}" for r in rows if r.note]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def target_lines(found: Sequence[Verdict]) -> list[str]:
    """The table of targets."""
    if not found:
        return []
    lines = ["", f"Targets; a row may take {STATE_BITS:g} bits beyond its nominal ones:", ""]
    lines += ["| codec | KL over that of | nominal bits | bits | ratio | at most | aim | |", "|---|---|---|---|---|---|---|---|"]
    for v in found:
        t = v.target
        nominal, bits = (shown(t.bits, "g"), shown(v.bits, ".3f")) if t.bits is not None else ("", "")
        aimed = "" if t.aim is None or v.ratio is None else ", aim reached" if v.reached and v.ratio <= t.aim else ", aim missed"
        must = "" if t.limit is None and v.reached else "reached" if v.reached else "MISSED"
        figures = [nominal, bits, shown(v.ratio, ".3f"), shown(t.limit, "g"), shown(t.aim, "g"), (must + aimed).removeprefix(", ")]
        lines.append(f"| `{t.codec}` | `{t.below}` | {' | '.join(figures)} |")
    return lines


def shown(value: float | None, form: str, unit: str = "") -> str:
    """A number with its unit; nothing where there is none."""
    return "" if value is None else format(value, form) + unit


def write(report: SweepReport, asked: Mapping[str, str], page: str, out: Path) -> None:
    """The table as frontier-smollm2.md, .csv, .json and .svg. Seconds are left out: the rest is the same in every run."""
    out.mkdir(parents=True, exist_ok=True)
    data = report.to_json()
    for row in data["rows"]:
        del row["seconds"]
    data["targets"] = [asdict(v) for v in verdicts(report, asked)]
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
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="tables (default: of the shipped corpus, made where there are none)"
    )
    parser.add_argument("--out", type=Path, help=f"folder for the results (default of a full run: {OUT.relative_to(ROOT)})")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of finished arms (default: {CACHE.relative_to(ROOT)})")
    args = parser.parse_args()
    unknown = sorted(set(args.texts) - set(ALL_TEXTS))
    if unknown:
        parser.error(f"--texts must be some of {', '.join(ALL_TEXTS)}, but got {', '.join(unknown)}")
    full = args.codecs == list(CODECS) and args.texts == list(ALL_TEXTS) and args.tokens == TOKENS[PROTOCOL] and args.calibration is None
    path = models_at()["smollm2"]
    model = load_model(path)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    calibration, given = None, args.calibration
    if any(is_calibrated(codec) for codec in args.codecs):
        calibration = calibration_of(model, path.parent, say) if given is None else calibrations.resolve(given, model.info.weights)
    texts = {name: text(name) for name in args.texts}
    report, asked = table(model, texts, args.codecs, args.tokens, args.cache, say, calibration)
    ordered = sorted(args.codecs, key=lambda codec: not codec.startswith("k="))  # after another codec k= would be a part of it
    words = [] if full else [f"--codecs {','.join(ordered)}", f"--texts {','.join(args.texts)}", f"--tokens {args.tokens}"]
    words += [] if args.calibration is None else [f"--calibration {args.calibration}"]
    page = markdown(report, asked, "make frontier" if full else " ".join(["python -m tests.smollm2.frontier", *words]))
    print(page)
    out = args.out or (OUT if full else None)
    if out is not None:
        write(report, asked, page, out)
    return 0 if all(v.reached for v in verdicts(report, asked)) else 1


if __name__ == "__main__":
    sys.exit(main())
