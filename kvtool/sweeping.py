"""Sweep: several codecs on the same texts, as one table of quality against bits.

Protocols:
    prefix     the first tokens of a text are in the cache, encoded and decoded once; the ones that follow are teacher-forced on it, and
               what they add stays exact.
    streaming  the whole text is teacher-forced; every row older than the exact window that is no sink is coded inside the forward, so
               that errors propagate from layer to layer and from token to token (`kvtool.streaming_cache`).
KL is KL(own || codec) of the next-token distribution in nats, against the model's own uncompressed cache. The attention-output error is
sum |o - o'|^2 / sum |o|^2 over the outputs of the attention modules (after their output projection) on the scored tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvtool.capturing import check_ids, encode_prompt, prefill, token_ids
from kvtool.encoding import scalar, split_rows
from kvtool.evaluation import score_caches
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, probe_model
from kvtool.roundtrip import Roundtrip, parse_roundtrip
from kvtool.snapshot import build_caches, take_states
from kvtool.states import CacheState
from kvtool.streaming_cache import streaming_caches
from veloxquant_mlx.codecs.raw import Raw

PROTOCOLS = ("prefix", "streaming")
PREFIX = {"prefix": 512, "streaming": 128}
OWN, ALL = "own", "all"


@dataclass(frozen=True)
class SweepRow:
    """One codec on one text, or on all of them together (text "all").

    Attributes:
        codec: spec, or "own": the model's own cache, which the others are measured against.
        text: its name.
        n: positions scored.
        kl, kl_p99: mean and 99th percentile of KL(own || codec), nats; None where the codec refused its input.
        ppl_delta: change of the perplexity, percent.
        top1: share of positions with own's most likely token.
        attention_error: of the attention outputs, relative squared; None where no attention module was found.
        bits: a value of the coded rows, from the encoded bytes with side information; None without coded rows.
        bits_all: the same with the exact rows at the end (sinks, window), at most 16 bits a value.
        seconds: spent encoding and decoding.
        note: what was kept exact, or what the codec refused.
    """

    codec: str
    text: str
    n: int
    kl: float | None
    kl_p99: float | None
    ppl_delta: float | None
    top1: float | None
    attention_error: float | None
    bits: float | None
    bits_all: float | None
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class SweepReport:
    """The table.

    Attributes:
        model: who scored; protocol: "prefix" or "streaming"; prefix: tokens before the first scored one.
        rows: by codec, and within it by text; with several texts "all" comes last.
    """

    model: str
    protocol: str
    prefix: int
    rows: tuple[SweepRow, ...]

    def row(self, codec: str, text: str | None = None) -> SweepRow:
        """The row of a codec; of the last text, which is "all" where there are several, if none is named.

        Raises:
            KeyError: there is none.
        """
        found = [r for r in self.rows if r.codec == codec and text in (None, r.text)]
        if not found:
            raise KeyError(f"{codec}, text {text}: the sweep has {', '.join(dict.fromkeys(r.codec for r in self.rows))}")
        return found[-1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sweep(
    model: LoadedModel,
    texts: Mapping[str, str | Sequence[int]],
    codecs: Sequence[str],
    *,
    protocol: Literal["prefix", "streaming"] = "prefix",
    prefix: int | None = None,
    tokens: int = 256,
    sink: int = 0,
    recent: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SweepReport:
    """Score codecs on texts. Deterministic, but for the seconds.

    Args:
        model: the model that scores.
        texts: name -> text or token ids; each is a sequence of its own.
        codecs: specs of `parse_codec`, `mlx-N` (N = 2, 3, 4, 6, 8) or `fp8`.
        protocol: "prefix" or "streaming", see the module docstring.
        prefix: tokens before the first scored one; 512 (prefix) or 128 (streaming) when None.
        tokens: positions to score at most, a text.
        sink, recent: exact rows of every codec whose spec does not say.
        progress: called with (positions done, positions in all).
    Returns:
        SweepReport, the own cache's row first.
    Raises:
        ValueError: an unknown protocol or codec, a codec or nothing twice, a text that is too short.
        IncompatibleError: streaming, and a layer without full attention.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"[sweep] protocol must be one of {', '.join(PROTOCOLS)}, but got {protocol!r}.")
    before = PREFIX[protocol] if prefix is None else prefix
    if before < 1 or tokens < 1:
        raise ValueError(f"[sweep] prefix and tokens must be at least 1, but got {before} and {tokens}.")
    specs = [parse_roundtrip(codec, sink, recent).spec for codec in codecs]
    twice = next((s for i, s in enumerate(specs) if s in specs[:i]), None)
    if twice is not None or not specs or not texts:
        raise ValueError(f"[sweep] codec {twice} is given twice." if twice else "[sweep] give at least one codec and one text.")
    if ALL in texts and len(texts) > 1:
        raise ValueError(f"[sweep] a text cannot be named {ALL!r} beside others.")
    ids = {name: _ids(model, name, text, before, tokens) for name, text in texts.items()}
    arms: dict[str, list[_Arm]] = {spec: [] for spec in (OWN, *specs)}
    total, done = sum(len(t) - 1 for t in ids.values()), 0
    for name, text in ids.items():
        step = None if progress is None else partial(_advance, progress, done, total)
        for spec, arm in _text(model, name, text, specs, protocol, before, step).items():
            arms[spec].append(arm)
        done += len(text) - 1
    rows = []
    for spec, found in arms.items():
        own = arms[OWN]
        rows += [_row(spec, arm.text, [arm], [base]) for arm, base in zip(found, own, strict=True)]
        rows += [_row(spec, ALL, found, own)] if len(found) > 1 else []
    return SweepReport(model.info.name, protocol, before, tuple(rows))


@dataclass
class _Arm:
    """What one codec gave on one text: scores by position, bytes, and the attention outputs' squared error and energy."""

    text: str
    trip: Roundtrip
    caches: list[Any]
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    error: float = 0.0
    energy: float = 0.0


def _advance(progress: Callable[[int, int], None], done: int, total: int, here: int, _: int) -> None:
    progress(done + here, total)


def _ids(model: LoadedModel, name: str, text: str | Sequence[int], before: int, tokens: int) -> list[int]:
    ids = encode_prompt(model, text) if isinstance(text, str) else token_ids(text)
    check_ids(model, ids)
    if len(ids) < before + 2:
        raise ValueError(f"[sweep] {name} has {len(ids)} tokens; with {before} before the first scored one, {before + 2} are needed.")
    return ids[: before + tokens + 1]


def _text(
    model: LoadedModel, name: str, ids: list[int], specs: list[str], protocol: str, before: int, progress: Callable[[int, int], None] | None
) -> dict[str, _Arm]:
    """Every arm's results on one text."""
    probes = probe_model(model.model)
    trips = {OWN: parse_roundtrip("raw"), **{spec: parse_roundtrip(spec) for spec in specs}}
    if protocol == "prefix":
        states = take_states(prefill(model, ids[:before]), length=before)
        arms = {spec: _Arm(name, trip, build_caches(_coded(states, probes, trip))) for spec, trip in trips.items()}
        fed, skip = ids[before:], 0
    else:
        arms = {spec: _Arm(name, trip, list(streaming_caches(probes, trip))) for spec, trip in trips.items() if spec != OWN}
        arms = {OWN: _Arm(name, trips[OWN], list(make_prompt_cache(model.model))), **arms}
        fed, skip = ids, before
    with _comparing(model.model, arms, skip):
        scores = score_caches(model, {spec: arm.caches for spec, arm in arms.items()}, fed, len(fed) - 1, progress)
    for spec, arm in arms.items():
        arm.scores = {key: values[skip:] for key, values in scores[spec].items()}
        if protocol == "streaming" and spec != OWN:
            for cache in arm.caches:
                cache.count_exact()
    if protocol == "streaming":
        for state in take_states(arms[OWN].caches):
            for x in (state.k, state.v):
                if isinstance(x, mx.array):
                    trips[OWN].coded_bytes += x.nbytes
                    trips[OWN].coded_values += x.size
    return arms


def _coded(states: Sequence[CacheState], probes: Sequence[CacheProbe], trip: Roundtrip, prefix: str = "") -> list[CacheState]:
    """The states with K and V through a codec, exact rows as they are."""
    out = []
    for i, (state, probe) in enumerate(zip(states, probes, strict=True)):
        changes: dict[str, Any] = {"caches": tuple(_coded(state.caches, probe.caches, trip, f"{prefix}{i}."))}
        for role in ("k", "v"):
            x, about = getattr(state, role), getattr(probe, role)
            if not isinstance(x, mx.array) or about is None:
                continue
            at = np.concatenate([np.arange(a, b) for a, b in state.positions])
            pieces, raw, coded = [], Raw(), Raw()
            for start, stop, chosen in split_rows(state.positions, x.shape[1], trip.plan.sink, trip.plan.recent, coded, raw):
                rows = x[:, start:stop]
                if chosen is raw:
                    trip.exact(rows.shape, rows.dtype)
                else:
                    rows = trip.rows(f"{prefix}{i}", role, rows, at[start:stop], about)
                pieces.append(rows)
            changes[role] = mx.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]
            mx.eval(changes[role])
        out.append(replace(state, **changes))
    return out


@contextmanager
def _comparing(model: nn.Module, arms: dict[str, _Arm], skip: int) -> Iterator[None]:
    """Add up the error of every arm's attention outputs while the arms run in turn, own first, past the first `skip` tokens.

    The attention modules get a subclass that looks at what they return; the model is left as it was.
    """
    homes = {id(leaf): (spec, i) for spec, arm in arms.items() for i, leaf in enumerate(_leaves(arm.caches))}
    seen: dict[tuple[str, int], int] = {}
    own: dict[int, mx.array] = {}

    def look(output: Any, given: Sequence[Any]) -> None:
        home = next((homes[id(g)] for g in given if id(g) in homes), None)
        if home is None or not isinstance(output, mx.array):
            return
        spec, layer = home
        start = seen.get(home, 0)
        seen[home] = start + output.shape[1]
        rows = output[:, max(0, skip - start) :].astype(mx.float32)
        if spec == OWN:
            own[layer] = rows
        if rows.size:
            arms[spec].error += scalar(mx.sum(mx.square(rows - own[layer])))
            arms[spec].energy += scalar(mx.sum(mx.square(own[layer])))

    def watched(cls: type) -> type:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            output = cls.__call__(self, *args, **options)
            look(output, [*args, *options.values()])
            return output

        return type(cls.__name__, (cls,), {"__call__": call})

    layers = getattr(model, "layers", [])
    modules = [m for layer in layers for name, m in layer.children().items() if "attn" in name or "attention" in name]
    kept = [(m, type(m)) for m in modules if isinstance(m, nn.Module) and "norm" not in type(m).__name__.lower()]
    try:
        for module, cls in kept:
            module.__class__ = watched(cls)
        yield
    finally:
        for module, cls in kept:
            module.__class__ = cls


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        yield cache
        yield from _leaves(getattr(cache, "caches", ()))


def _row(spec: str, text: str, arms: Sequence[_Arm], own: Sequence[_Arm]) -> SweepRow:
    """One row from one text's arm, or from several together."""
    joined = {key: np.concatenate([arm.scores[key] for arm in arms]) for key in ("nll", "kl", "hit")}
    base = np.concatenate([arm.scores["nll"] for arm in own])
    whole = replace(
        arms[0].trip,
        **{
            key: sum(getattr(arm.trip, key) for arm in arms)
            for key in ("coded_bytes", "coded_values", "exact_bytes", "exact_values", "seconds")
        },
    )
    energy = sum(arm.energy for arm in arms)
    failed = any(arm.trip.failed for arm in arms)
    problems = list(dict.fromkeys(p for arm in arms for p in arm.trip.problems))
    note = problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "") if problems else ""
    scored: dict[str, float | None] = dict.fromkeys(("kl", "kl_p99", "ppl_delta", "top1", "attention_error"))
    if not failed:
        scored = {
            "kl": float(joined["kl"].mean()),
            "kl_p99": float(np.quantile(joined["kl"], 0.99)),
            "ppl_delta": float(100 * np.expm1(joined["nll"].mean() - base.mean())),
            "top1": float(joined["hit"].mean()),
            "attention_error": sum(arm.error for arm in arms) / energy if energy else None,
        }
    return SweepRow(
        codec=spec,
        text=text,
        n=len(base),
        **scored,
        bits=None if failed else whole.bits(exact=False),
        bits_all=None if failed else whole.bits(exact=True),
        seconds=whole.seconds,
        note=note,
    )
