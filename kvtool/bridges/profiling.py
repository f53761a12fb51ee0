"""What recomputing which part is worth for a pair of models: blocks of layers, chosen tokens and both, measured on texts.

Blocks of layers are tried on a coarse grid, and then around the one that takes most divergence away for its share of the arithmetic, with
half the step each time. Own logits, handed rows and layer inputs of every text are held meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from blake3 import blake3

from formats.errors import IncompatibleError, ManifestError, QualityError, counted
from formats.profile import Profile, Row
from formats.transfer_map import MapFile
from kvtool.archive import producer
from kvtool.arms import divergence
from kvtool.bootstrap import paired_ratio
from kvtool.bridges.pairs import check_layers_of
from kvtool.bridges.recompute import Recompute, recomputed
from kvtool.bridges.running import check_scattered
from kvtool.bridges.transferring import Source, source_of_snapshot, transfer
from kvtool.bridges.work import Work
from kvtool.capturing import capture, check_ids, encode_prompt, token_ids
from kvtool.compat import computing_problems, short, told_apart
from kvtool.hidden import check_stream
from kvtool.model import LoadedModel
from kvtool.snapshot import build_caches
from kvtool.states import CacheState

PREFIX, SCORED, CHUNK = 512, 256, 128
FIRST, NEWEST, DEVIATING = 4, (5, 10, 14, 20, 30), (10, 20)
STEPS = 6  # coarse steps that the layers are cut into
Texts = Mapping[str, str | Sequence[int]]


def profile(
    source: LoadedModel,
    target: LoadedModel,
    texts: Texts,
    *,
    mapping: MapFile | None = None,
    digest: str | None = None,
    prefix: int = PREFIX,
    scored: int = SCORED,
    step: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure a pair.

    Args:
        source, target: models of one tokenizer and the same shapes.
        texts: name -> text or token ids, of prefix + scored + 1 tokens at least; none that the map was fitted on.
        mapping, digest: the map from source to target, and its file's digest.
        prefix, scored: tokens cached, and tokens scored after them.
        step: layers of a coarse step; None is a sixth of them.
        progress: called with (plans done, plans in all, about).

    Raises:
        ValueError: no text, one that is too short, or a step that is not positive.
        IncompatibleError: as `transfer`, or models of unlike shapes.
    """
    if (mapping is None) != (digest is None) or not texts or min(prefix, scored) < 1 or (step is not None and step < 1):
        raise ValueError(
            f"[profile] there must be a text, prefix, scored and step of at least 1, and a map's digest with the map, but got "
            f"{counted(len(texts), 'text')}, {prefix}, {scored}, {step}."
        )
    shapes = [[(p.k.heads, p.k.dim, p.v.dim) for p in check_layers_of(model) if p.k and p.v] for model in (source, target)]
    if shapes[0] != shapes[1]:
        raise IncompatibleError(
            f"{source.info.name} has {len(shapes[0])} layers of {shapes[0][0]} (KV heads, key size, value size), {target.info.name} "
            f"{len(shapes[1])} of {shapes[1][0]}",
            hint="profiles are of models of the same shapes; kvtool fit makes a map between others",
        )
    left_out, layers = [], len(shapes[1])
    try:
        for model in (source, target):
            check_stream(model)
        blocks = True
    except IncompatibleError as refusal:
        blocks = False
        left_out.append(f"blocks of layers: {refusal}")
    try:
        check_scattered(target)
        scattered = True
    except IncompatibleError as refusal:
        scattered = False
        left_out.append(f"deviating tokens: {refusal}")
    bench = _Bench(source, target, texts, mapping, prefix, scored, range(1, layers) if blocks else ())
    plans = [*_token_plans(scattered and blocks)]
    step = step or max(1, round(layers / STEPS))
    coarse = [*_grid(layers, step)] if blocks else []
    total = 2 + len(plans) + len(coarse) + (4 * max(1, step.bit_length() - 1) + 2 if blocks else 0)

    def measure(plan: str, mapped: bool = mapping is not None) -> _Arm:
        arm = bench.arm(plan, mapped)
        if progress is not None:
            progress(min(len(bench.arms), total), total)
        return arm

    plain = measure("", False)
    nothing = measure("")
    for plan in plans:
        measure(plan)
    best: tuple[int, int] | None = None
    if coarse:

        def gain(block: tuple[int, int]) -> float:
            arm = measure(_block(block))
            return (nothing.mean - arm.mean) / (arm.share - nothing.share)

        best = max(coarse, key=gain)
        while step > 1:
            step //= 2
            a, b = best
            near = [(a - step, b), (a + step, b), (a, b - step), (a, b + step)]
            best = max([best, *((x, y) for x, y in near if 0 <= x < y <= layers)], key=gain)
        for percent in NEWEST[:2]:
            measure(f"{_block(best)},first={FIRST},newest={percent}%")
    rows = [_row(plan, mapped, arm, plain) for (plan, mapped), arm in bench.arms.items()]
    return Profile(
        source=source.info,
        target=target.info,
        mapping=digest,
        texts=bench.digests,
        prefix=prefix,
        scored=scored,
        rows=tuple(sorted(rows, key=lambda row: row.share)),
        left_out=tuple(left_out),
        producer=producer(),
    )


def choose(
    found: Profile,
    source: Source,
    target: LoadedModel,
    *,
    mapping: MapFile | None = None,
    digest: str | None = None,
    share: float | None = None,
    kl: float | None = None,
) -> tuple[Row, float]:
    """The row of a profile to hand a cache over by, and its share for a cache of this length.

    Args:
        found: the profile.
        source: the cache; plans for more tokens than it has, or for layer inputs that it does not hold, are passed over.
        target: who goes on.
        mapping, digest: the map that there is, and its file's digest.
        share: the most that may be recomputed: the row of least divergence within it.
        kl: the most divergence: the row of the least share within it.

    Raises:
        ValueError: not one of share and kl.
        IncompatibleError: a profile of other models, or another map.
        ManifestError: the profile has a plan that its models and its prefix do not have.
        QualityError: no row is within the limit.
    """
    if (share is None) == (kl is None):
        raise ValueError("[profile] give a share or a kl, one of them.")
    for side, own, model in (("source", found.source, source.model), ("target", found.target, target.info)):
        differ = computing_problems(own, model)
        if differ:
            raise IncompatibleError(
                f"the profile's {side} is {', not '.join(told_apart(own, model))}: {'; '.join(differ)}",
                hint="kvtool profile makes one for these two",
            )
    if found.mapping != digest:
        raise IncompatibleError(
            f"the profile was measured with {_named(found.mapping)}, not with {_named(digest)}", hint="give that map, or profile anew"
        )
    work, open_rows = Work(target), []
    by_map = 0.0 if mapping is None else work.share(work.of_map(mapping, source.length), source.length)
    for row in found.rows:
        _planned(row, found.prefix, len(work.layers))
        plan = _fitting(row, source.length)
        if row.mapped == (mapping is not None) and plan is not None and (plan.needs_input is None or plan.needs_input in source.inputs):
            open_rows.append((row, plan.share(work, source.length) + by_map))
    if not open_rows:
        held = ", ".join(map(str, sorted(source.inputs))) or "none"
        what = f"none of the profile's {len(found.rows)} plans is for {source.length} tokens with the inputs of these layers: {held}"
        raise QualityError(what, hint="recompute the whole prompt")
    within = [(row, part) for row, part in open_rows if (part <= share if share is not None else row.kl <= (kl or 0.0))]
    if not within:
        least = min(part for _, part in open_rows) if share is not None else min(row.kl for row, _ in open_rows)
        what = (
            f"a share of at most {share:.1%}: the least is {least:.1%}"
            if share is not None
            else f"KL of at most {kl:g}: the least is {least:.4g}"
        )
        raise QualityError(f"the profile has no plan with {what}", hint="ask for less, or recompute the whole prompt")
    return min(within, key=lambda pair: (pair[0].kl, pair[1]) if share is not None else (pair[1], pair[0].kl))


def _planned(row: Row, length: int, layers: int) -> Recompute:
    """A row's plan for the tokens that it was measured on."""
    try:
        plan = Recompute.parse(row.plan, length) if row.plan else Recompute()
        plan.check(length, layers)
    except ValueError as error:
        raise ManifestError(
            f"$.rows: no plan of {counted(length, 'token')} and {counted(layers, 'layer')}: {error}", hint="profile the two models anew"
        ) from error
    return plan


def _fitting(row: Row, length: int) -> Recompute | None:
    """A row's plan for so many tokens, None where it asks for more."""
    try:
        return Recompute.parse(row.plan, length) if row.plan else Recompute()
    except ValueError:
        return None


def _named(mapping: str | None) -> str:
    return "no map" if mapping is None else f"map {short(mapping)}"


def _token_plans(deviating: bool) -> Iterator[str]:
    yield f"first={FIRST}"
    yield from (f"first={FIRST},newest={percent}%" for percent in NEWEST)
    if deviating:
        yield from (f"deviating={percent}%" for percent in DEVIATING)
        yield f"first={FIRST},newest={NEWEST[0]}%,deviating={NEWEST[0]}%"


def _grid(layers: int, step: int) -> Iterator[tuple[int, int]]:
    """Blocks of at most half of the layers; the last one may be short."""
    ends = [*range(0, layers, step), layers]
    yield from ((a, b) for i, a in enumerate(ends) for b in ends[i + 1 :] if 2 * (b - a) <= max(layers, 2))


def _block(block: tuple[int, int]) -> str:
    return f"layers={block[0]}-{block[1]}"


@dataclass
class _Arm:
    """One way to hand over: its share, and what every scored position says, text by text."""

    share: float
    kl: list[np.ndarray]
    hit: list[np.ndarray]

    @property
    def mean(self) -> float:
        return float(np.mean([x.mean() for x in self.kl]))


class _Bench:
    """The texts of a profile, and what was measured so far."""

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        texts: Texts,
        mapping: MapFile | None,
        prefix: int,
        scored: int,
        inputs: Sequence[int],
    ) -> None:
        self.target, self.prefix, self.work = target, prefix, Work(target)
        self.by_map = 0.0 if mapping is None else self.work.share(self.work.of_map(mapping, prefix), prefix)
        self.digests: dict[str, str] = {}
        self.arms: dict[tuple[str, bool], _Arm] = {}
        self.texts: list[tuple[list[int], Source, dict[bool, list[CacheState]], np.ndarray]] = []
        for name, text in texts.items():
            ids = (encode_prompt(target, text) if isinstance(text, str) else token_ids(text))[: prefix + scored + 1]
            check_ids(target, ids)
            if len(ids) < prefix + scored + 1:
                raise ValueError(f"[profile] texts[{name!r}] must have at least {prefix + scored + 1} tokens, but got {len(ids)}.")
            self.digests[name] = blake3(np.array(ids, "<i8").tobytes()).hexdigest()
            given = source_of_snapshot(capture(source, ids[:prefix], layer_inputs=inputs))
            handed = {False: list(transfer(given, target).states)}
            if mapping is not None:
                handed[True] = list(transfer(given, target, mapping=mapping).states)
            own = self._logits(capture(target, ids[:prefix]).states, ids)
            self.texts.append((ids, given, handed, own))

    def arm(self, plan: str, mapped: bool) -> _Arm:
        """What a plan gives, measured once."""
        if (plan, mapped) not in self.arms:
            part = Recompute.parse(plan, self.prefix) if plan else Recompute()
            shares, kl, hit = [], [], []
            for ids, given, handed, own in self.texts:
                states, chosen = recomputed(handed[mapped], ids[: self.prefix], self.target, part, given.layer_input)
                _, divergences, hits = divergence(own, self._logits(states, ids), np.array(ids[self.prefix + 1 :]))
                shares.append(part.share(self.work, self.prefix, chosen) + (self.by_map if mapped else 0.0))
                kl.append(divergences)
                hit.append(hits)
            self.arms[plan, mapped] = _Arm(float(np.mean(shares)), kl, hit)
        return self.arms[plan, mapped]

    def _logits(self, states: Sequence[CacheState], ids: Sequence[int]) -> np.ndarray:
        """(scored, V) float32 of the positions after the prefix."""
        caches, parts = build_caches(states), []
        fed = list(ids[self.prefix : -1])
        for start in range(0, len(fed), CHUNK):
            parts.append(np.array(self.target.model(mx.array(fed[start : start + CHUNK])[None], cache=caches)[0].astype(mx.float32)))
        return np.concatenate(parts)


def _row(plan: str, mapped: bool, arm: _Arm, plain: _Arm) -> Row:
    ratio, low, high = (None, None, None) if arm is plain else paired_ratio(arm.kl, plain.kl)
    # Rounding may leave less than nothing of a divergence.
    return Row(plan, mapped, arm.share, max(0.0, arm.mean), ratio, low, high, float(np.mean(np.concatenate(arm.hit))))
