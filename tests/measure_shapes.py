"""What a cache of one model is worth in another of other shapes, or of another tokenizer, for tests/results/transfer-shapes.md.

    python -m tests.measure_shapes          # about three minutes on one core

tiny-a, tiny-c (three layers instead of four, four KV heads of 32 instead of two of 64) and tiny-d (tiny-c's shapes, a tokenizer of half as
many tokens). The first 256 tokens of eight held-out texts are cached by one and handed to the other, which scores the 96 that follow.
Closed: (NLL without a cache - NLL on it) / (NLL without - NLL on the receiver's own prefill).
"""

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from formats.transfer_map import MapFile, to_bytes
from kvtool import tiny
from kvtool.bootstrap import paired_ratio
from kvtool.bridges.alignment import OVERLAP, align
from kvtool.bridges.fitting import fit
from kvtool.bridges.recompute import Recompute
from kvtool.bridges.transferring import Source, realigned, source_of_snapshot, transfer
from kvtool.bridges.work import Work
from kvtool.capturing import capture
from kvtool.compat import tokenizer_difference
from kvtool.evaluation import score_caches
from kvtool.model import LoadedModel, load_model
from kvtool.snapshot import build_caches
from tests.shapes import path

RESULT = Path(__file__).parent / "results" / "transfer-shapes.md"
PREFIX, SCORED, TEXTS = 256, 96, 8
PLANS = ("first=4,newest=14%", "layers=0-1", "layers=0-1,first=4,newest=14%")
MOST_LEFT = 0.5  # of the NLL gap, between models of one tokenizer


@dataclass
class Arm:
    """One way to hand a cache over, text by text: the NLL and the divergence of every scored position."""

    nll: list[np.ndarray] = field(default_factory=list)
    kl: list[np.ndarray] = field(default_factory=list)
    share: float = 0.0


def held_out_texts(count: int = TEXTS, size: int = 3000) -> list[str]:
    """Beginnings of paragraphs spread over the held-out text."""
    whole = tiny.filler_text()
    starts = [whole.index("\n", len(whole) * i // count) + 1 for i in range(count)]
    return [whole[start : start + size] for start in starts]


def arms_of(
    source: LoadedModel, target: LoadedModel, maps: dict[str, MapFile], texts: Sequence[str], parts: Sequence[str] = ()
) -> dict[str, Arm]:
    """No cache, the receiver's own, each map's, and that of `map` with parts recomputed."""
    work, found = Work(target), dict[str, Arm]()
    plans = [(name, own, "") for name, own in maps.items()] + [(f"map + {part}", maps["map"], part) for part in parts]
    for text in texts:
        ids = list(target.tokenizer.encode(text))[: PREFIX + SCORED + 1]
        given = _given(source, target, ids[:PREFIX])
        makes: dict[str, tuple[float, Callable[[], list[Any]]]] = {
            "own": (1.0, lambda ids=ids: build_caches(capture(target, ids[:PREFIX]).states)),
            "no cache": (0.0, partial(make_prompt_cache, target.model)),
        }
        for name, own, plan in plans:
            part = Recompute.parse(plan, PREFIX) if plan else Recompute()
            share = work.share(work.of_map(own, PREFIX), PREFIX) + part.share(work, PREFIX)
            makes[name] = (share, partial(_moved, given, target, own, part))
        scores = score_caches(target, {name: make() for name, (_, make) in makes.items()}, ids[PREFIX:], SCORED, None)
        for name, score in scores.items():
            arm = found.setdefault(name, Arm(share=makes[name][0]))
            arm.nll.append(score["nll"])
            arm.kl.append(score["kl"])
    return found


def _given(source: LoadedModel, target: LoadedModel, ids: Sequence[int]) -> Source:
    """The source's rows of the text of these ids, in the target's tokens."""
    if tokenizer_difference(source.info, target.info) is None:
        return source_of_snapshot(capture(source, ids))
    found = realigned(source_of_snapshot(capture(source, align(target, source, ids).target)), source, target)
    assert found.tokens == tuple(ids)
    return found


def _moved(given: Any, target: LoadedModel, mapping: MapFile, part: Recompute) -> list[Any]:
    return build_caches(transfer(given, target, mapping=mapping, recompute=part).states)


def closed(found: dict[str, Arm], name: str) -> tuple[float, float | None, float | None]:
    """Share of the NLL gap that an arm closes, with a 95 % interval; None where draws have no gap."""
    gap, left = ([a - b for a, b in zip(found[arm].nll, found["own"].nll, strict=True)] for arm in ("no cache", name))
    ratio, low, high = paired_ratio(left, gap)
    if ratio is None:
        raise ValueError("[closed] the receiver must gain by its cache, but its NLL is no lower with it.")
    return 1 - ratio, None if high is None else 1 - high, None if low is None else 1 - low


def table(found: dict[str, Arm]) -> list[str]:
    """The arms of a pair."""
    lines = ["| arm | share of a prefill | NLL | KL | of the gap closed |", "|---|---|---|---|---|"]
    for name, arm in found.items():
        nll, kl = (float(np.mean([x.mean() for x in rows])) for rows in (arm.nll, arm.kl))
        share, low, high = closed(found, name)
        ends = "" if low is None or high is None else f" [{low:.0%}, {high:.0%}]"
        lines.append(f"| {name} | {arm.share:.1%} | {nll:.4f} | {kl:.4f} | {share:.0%}{ends} |")
    return lines


def section(source: LoadedModel, target: LoadedModel, missed: list[str]) -> list[str]:
    """What stands of a pair in the result file."""
    mapping = fit(source, target, overlap=OVERLAP)
    maps = {"map": mapping, "map of one layer a head": fit(source, target, sources=1, overlap=OVERLAP)}
    found = arms_of(source, target, maps, held_out_texts(), PLANS)
    name = f"{source.info.name} to {target.info.name}"
    if source.info.tokenizer == target.info.tokenizer and closed(found, "map")[0] < MOST_LEFT:
        missed.append(f"{name}: the map closes {closed(found, 'map')[0]:.0%} of the gap, {MOST_LEFT:.0%} asked for")
    left = [own.unexplained for own in mapping.layers.values()]
    sources = "; ".join(f"{layer} from {', '.join(own.sources)}" for layer, own in mapping.layers.items())
    return [
        f"## {name}",
        "",
        f"Map: {mapping.tokens:,} tokens of {len(mapping.texts)} shipped texts, {len(to_bytes(mapping)):,} bytes, layers {sources}; it",
        f"leaves {min(left):.1%} to {max(left):.1%} of the rows' energy unexplained on texts left out.",
        "",
        *table(found),
        "",
    ]


def main() -> int:
    missed: list[str] = []
    models = {"tiny-a": load_model("tiny-a"), **{name: load_model(str(path(name))) for name in ("tiny-c", "tiny-d")}}
    lines = [
        "# A cache in a model of other shapes, or of another tokenizer",
        "",
        f"`python -m tests.measure_shapes`, 2026-11-30; mlx {mx.__version__} on {platform.system()} {platform.machine()}, float32.",
        "",
        f"{PREFIX} tokens cached, {SCORED} scored, {TEXTS} held-out texts. NLL and KL(own || arm) in nats a token. Closed: how much of the",
        "NLL between no cache and the own prefill, with a 95 % interval. Share: of the arithmetic of a prefill, the map's products",
        "included; of models this small a map is a large part.",
        "",
    ]
    for a, b in (("tiny-a", "tiny-c"), ("tiny-c", "tiny-a"), ("tiny-a", "tiny-d"), ("tiny-d", "tiny-a")):
        lines += section(models[a], models[b], missed)
    lines += [f"Asked for: half of the gap, by the map, between models of one tokenizer. Missed: {'; '.join(missed) or 'none'}."]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
