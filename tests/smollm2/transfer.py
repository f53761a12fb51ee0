"""What a cache of one model is worth in its sibling: plain, mapped, and with a part recomputed; uncompressed and compressed.

    python -m tests.smollm2.transfer [--texts prose,code] [--calibration FILE --calibration FILE] [--out DIR]

SmolLM2-135M-Instruct and its fine-tuned sibling of RoPE base 10 000, both directions: 512 tokens of a text that neither map nor tables
were made from are cached by one model and handed to the other, which scores the 256 that follow. KL(own prefill || arm), nats. The share is
what the receiver computes, map included, over a prefill of its own (`kvtool.bridges.work`). Intervals: bootstrap, blocks of 32 positions.
Then the profile of each direction with its map, as `kvtool profile` makes it: what recomputing which layers and tokens gives. Maps,
profiles and calibrations (ten minutes each) are made once. Exits 1 where a target is missed.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from blake3 import blake3
from mlx_lm.models.cache import make_prompt_cache

import kvtool
from formats.profile import Profile, read_profile, write_profile
from formats.tables import digest_of
from formats.transfer_map import MapFile, read_map, to_bytes, write_map
from kvtool.bootstrap import paired_ratio
from kvtool.bridges.fitting import fit
from kvtool.bridges.profiling import profile
from kvtool.bridges.recompute import Recompute
from kvtool.bridges.transferring import source_of, source_of_snapshot, transfer
from kvtool.bridges.work import Work
from kvtool.calibrations import Calibration, load
from kvtool.capturing import Snapshot, capture
from kvtool.evaluation import score_caches
from kvtool.model import LoadedModel, load_model
from kvtool.snapshot import build_caches
from tests.smollm2.frontier import CACHE, OUT, calibration_of, sources_digest
from tests.smollm2.make import models_at
from tests.texts import ALL_TEXTS, text

NAME, PREFIX, SCORED = "transfer-smollm2", 512, 256
PLANS = ("", "first=4", "first=4,newest=5%", "first=4,newest=10%", "first=4,newest=14%", "newest=19%")
BEST = "first=4,newest=14%"
BLOCK = (9, 15)  # layers that run on what entered the first of them in the source: exact, and as a file keeps it
MOST_SHARE, MOST_RATIO = 0.20, 0.55
# What a map of given weights depends on.
FITTING = ("kvtool.bridges.fitting", "kvtool.bridges.pairs", "kvtool.bridges.ridge", "kvtool.calibration_texts")
ADDED = {"rvq-4": 0.01, "tc-4.05": 0.005}  # KL that a codec may add to the uncompressed transfer's
Say = Callable[[str], None]


@dataclass
class Arm:
    """One way to hand a cache over: its share of a prefill, and what every scored position says, text by text."""

    share: float
    kl: list[np.ndarray] = field(default_factory=list)
    hit: list[np.ndarray] = field(default_factory=list)
    gap: list[np.ndarray] = field(default_factory=list)


def arms_of(
    source: LoadedModel, target: LoadedModel, mapping: MapFile, texts: Sequence[str], tables: Sequence[Calibration], say: Say
) -> dict[str, Arm]:
    """All arms of one direction."""
    work, found = Work(target), dict[str, Arm]()
    by_map = work.share(work.of_map(mapping, PREFIX), PREFIX)
    for name in texts:
        ids = list(target.tokenizer.encode(text(name)))[: PREFIX + SCORED + 1]
        snapshot = capture(source, ids[:PREFIX], layer_inputs=BLOCK[:1])
        given = source_of_snapshot(snapshot)
        own = capture(target, ids[:PREFIX])
        caches: dict[str, tuple[float, Callable[[], list[Any]]]] = {"no cache": (0.0, partial(make_prompt_cache, target.model))}
        for use in (None, mapping):
            for plan in PLANS:
                part = Recompute.parse(plan, PREFIX) if plan else Recompute()
                share = part.share(work, PREFIX) + (0.0 if use is None else by_map)
                caches[label(use is not None, plan)] = (share, partial(moved, given, target, use, part))
        block = Recompute(layers=BLOCK)
        name_of = label(True, "layers={}-{}".format(*BLOCK))
        caches[name_of] = (block.share(work, PREFIX) + by_map, partial(moved, given, target, mapping, block))
        caches[f"{name_of}, input in the file"] = (caches[name_of][0], partial(from_file, snapshot, target, mapping, block))
        for codec in ADDED:
            calibrations = tables if codec.startswith("tc") else (None, None)
            best = caches[label(True, BEST)][0]
            caches[f"{label(True, BEST)}, {codec}"] = (best, partial(compressed, snapshot, target, mapping, codec, calibrations))
        made = {"own": build_caches(own.states)} | {arm: make() for arm, (_, make) in caches.items()}
        scores = score_caches(target, made, ids[PREFIX:], SCORED, None)
        for arm, (share, _) in caches.items():
            row = found.setdefault(arm, Arm(share))
            row.kl.append(scores[arm]["kl"])
            row.hit.append(scores[arm]["hit"])
            row.gap.append(scores[arm]["nll"] - scores["own"]["nll"])
            say(f"{source.info.name} to {target.info.name}, {name}: {arm}: KL {row.kl[-1].mean():.4f}")
    return found


def label(mapped: bool, plan: str) -> str:
    words = ["map" if mapped else "plain recode", *([plan] if plan else [])]
    return " + ".join(words)


def moved(given: Any, target: LoadedModel, mapping: MapFile | None, part: Recompute) -> list[Any]:
    return build_caches(transfer(given, target, mapping=mapping, recompute=part).states)


def from_file(snapshot: Snapshot, target: LoadedModel, mapping: MapFile, part: Recompute) -> list[Any]:
    """As `moved`, of an uncompressed file, in which layer inputs are coded all the same."""
    with tempfile.TemporaryDirectory() as folder:
        kvtool.save(snapshot, Path(folder) / "one.kv")
        with kvtool.open(Path(folder) / "one.kv") as archive:
            return moved(source_of(archive), target, mapping, part)


def compressed(snapshot: Snapshot, target: LoadedModel, mapping: MapFile, codec: str, tables: Sequence[Calibration | None]) -> list[Any]:
    """The source's file in a codec, handed over and written in that codec again: two encodings."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder) / "one.kv", Path(folder) / "two.kv"
        kvtool.save(snapshot, one, codec=codec, calibration=tables[0])
        with kvtool.open(one, calibration=tables[0]) as archive:
            given = source_of(archive)
            mid = transfer(given, target, mapping=mapping, recompute=Recompute.parse(BEST, PREFIX))
        kvtool.save(mid, two, codec=codec, calibration=tables[1])
        with kvtool.open(two, calibration=tables[1]) as archive:
            return archive.load(target, decode=True).cache


def table(found: dict[str, Arm]) -> list[str]:
    plain = found[label(False, "")]
    lines = ["| arm | share | KL | of plain | top-1 | NLL gap |", "|---|---|---|---|---|---|"]
    for name, arm in found.items():
        ratio = " [{1:.3f}, {2:.3f}]".format(*paired_ratio(arm.kl, plain.kl)) if arm is not plain else ""
        kl = float(np.mean([x.mean() for x in arm.kl]))
        base = float(np.mean([x.mean() for x in plain.kl]))
        hit, gap = np.mean(np.concatenate(arm.hit)), np.mean(np.concatenate(arm.gap))
        lines.append(f"| {name} | {arm.share:.1%} | {kl:.4f} | {kl / base:.3f}{ratio} | {hit:.3f} | {gap:+.4f} |")
    return lines


def missed(direction: str, found: dict[str, Arm]) -> list[str]:
    """Targets that were not reached."""
    mean = {name: float(np.mean([x.mean() for x in arm.kl])) for name, arm in found.items()}
    best, plain = label(True, BEST), label(False, "")
    problems = []
    if found[best].share > MOST_SHARE:
        problems.append(f"{direction}: {best} takes {found[best].share:.1%} of a prefill, at most {MOST_SHARE:.0%} asked for")
    if mean[best] > MOST_RATIO * mean[plain]:
        problems.append(f"{direction}: {best} has {mean[best] / mean[plain]:.3f} of the plain recode's KL, {MOST_RATIO} asked for")
    for codec, most in ADDED.items():
        name = f"{best}, {codec}"
        if mean[name] - mean[best] > most:
            problems.append(f"{direction}: {codec} adds {mean[name] - mean[best]:.4f} nats, at most {most} asked for")
    return problems


def fitted(source: LoadedModel, target: LoadedModel, cache: Path, say: Say) -> MapFile:
    """The map that the present code fits, made once."""
    key = blake3(f"{sources_digest(FITTING, frozenset())} {source.info.weights} {target.info.weights}".encode()).hexdigest()
    path = cache / f"{source.info.name}-to-{target.info.name}-{key[:16]}.map"
    if path.exists():
        return read_map(path)[0]
    say(f"fitting {source.info.name} to {target.info.name}")
    cache.mkdir(parents=True, exist_ok=True)
    mapping = fit(source, target)
    write_map(path, mapping)
    return mapping


def profiled(source: LoadedModel, target: LoadedModel, mapping: MapFile, texts: Sequence[str], cache: Path, say: Say) -> Profile:
    """What recomputing which part gives, measured once."""
    path, digest = cache / f"{source.info.name}-to-{target.info.name}.profile", digest_of(to_bytes(mapping))
    names = [f"{name}.txt" for name in texts]
    if path.exists():
        found = read_profile(path)[0]
        if found.mapping == digest and sorted(found.texts) == sorted(names) and (found.prefix, found.scored) == (PREFIX, SCORED):
            return found
    say(f"profiling {source.info.name} to {target.info.name}")
    cache.mkdir(parents=True, exist_ok=True)
    given = {name: text(name.removesuffix(".txt")) for name in names}
    found = profile(source, target, given, mapping=mapping, digest=digest, prefix=PREFIX, scored=SCORED)
    write_profile(path, found)
    return found


def profile_table(found: Profile) -> list[str]:
    lines = ["| recomputed, beside the map | share | KL | of plain | top-1 | not beaten |", "|---|---|---|---|---|---|"]
    for row, front in zip(found.rows, found.front(), strict=True):
        name = (row.plan or "nothing") if row.mapped else "(plain recode)"
        ratio = "1.000" if row.ratio is None else f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]"
        lines.append(f"| {name} | {row.share:.1%} | {row.kl:.4f} | {ratio} | {row.top1:.3f} | {'yes' if front else ''} |")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", default=",".join(ALL_TEXTS))
    parser.add_argument("--calibration", action="append", help="SmolLM2's, then its sibling's; made where none are given")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    folders = models_at()
    pair = [load_model(folders[name]) for name in ("smollm2", "smollm2-theta10k")]
    texts = options.texts.split(",")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if options.calibration is not None and len(options.calibration) != len(pair):
        parser.error(f"give two --calibration, or none, but got {len(options.calibration)}")
    if options.calibration is None:
        tables = [calibration_of(model, folders["smollm2"].parent, say) for model in pair]
    else:
        tables = [load(path) for path in options.calibration]
    whole = options.texts == ",".join(ALL_TEXTS)
    command = "make transfer" if whole else f"python -m tests.smollm2.transfer --texts {options.texts}"
    lines = [
        "# A cache in the sibling of its model",
        "",
        f"`{command}`, {date.today()}; mlx {mx.__version__} on {platform.system()} {platform.machine()}, float32.",
        "",
        f"{PREFIX} tokens cached, {SCORED} scored, texts: {', '.join(texts)}. KL(own prefill || arm), nats a token; share: what the",
        "receiver computes, the map's products included, of the arithmetic of a prefill of its own; of plain: paired, 95 % interval.",
        "A codec's row is the file in that codec, handed over and written in it again. `input in the file`: what enters layer "
        f"{BLOCK[0]}, as",
        f"`export --layer-input {BLOCK[0]}` keeps it, beside the exact vectors. Tables of tc: "
        + ", ".join(f"`{one.digest[:16]}`" for one in tables),
        "(`kvtool calibrate`), of other texts.",
    ]
    problems = []
    for source, target, own in ((pair[0], pair[1], tables), (pair[1], pair[0], tables[::-1])):
        mapping = fitted(source, target, CACHE / "maps", say)
        found = arms_of(source, target, mapping, texts, own, say)
        left = [own_map.unexplained for own_map in mapping.layers.values()]
        direction = f"{source.info.name} to {target.info.name}"
        lines += ["", f"## {direction}", ""]
        lines += [f"Map `{digest_of(to_bytes(mapping))[:16]}`: {mapping.tokens:,} tokens of {len(mapping.texts)} shipped texts; it leaves"]
        lines += [f"{min(left):.0%} to {max(left):.0%} of the difference of rows unexplained on texts left out.", "", *table(found)]
        problems += missed(direction, found)
        lines += ["", f"### What to recompute, {direction}", ""]
        lines += profile_table(profiled(source, target, mapping, texts, CACHE / "profiles", say))
    lines += ["", "Targets missed: " + ("; ".join(problems) if problems else "none.")]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{NAME}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
