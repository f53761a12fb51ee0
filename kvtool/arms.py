"""Arms: what one codec gives on one text, against the model's own forward on it, by both protocols of `kvtool.sweep`.

The own forward runs once a text and is held (logits and attention outputs of the scored tokens); arms then run one after the other, so
that one arm's caches are in memory at a time and an arm is whole as soon as it is done.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvtool.binding import bind, layer_sources, own_moments
from kvtool.calibrations import Calibration
from kvtool.capturing import prefill
from kvtool.encoding import split_rows
from kvtool.model import LoadedModel
from kvtool.moments import Moments
from kvtool.probe import CacheProbe, probe_model
from kvtool.roundtrip import Roundtrip, parse_roundtrip
from kvtool.segment_work import scalar
from kvtool.snapshot import build_caches, take_states
from kvtool.states import CacheState
from kvtool.streaming_cache import streaming_caches
from veloxquant_mlx.codecs import CodecPlan
from veloxquant_mlx.codecs.raw import Raw

OWN = "own"
CHUNK = 128  # tokens a forward
COUNTS = ("coded_bytes", "coded_values", "exact_bytes", "exact_values", "seconds")
Scores = tuple[np.ndarray, np.ndarray, np.ndarray]
_ROWS = 8  # positions whose float64 distributions are held at a time: they stay in the processor's cache


@dataclass(frozen=True)
class Arm:
    """What one codec gave on one text. Tuples hold one entry a scored position.

    Attributes:
        codec, text: whose results these are.
        nll: negative log-likelihood of the next token, nats.
        kl: KL(own || codec) of its distribution, nats.
        hit: whether its most likely token is own's.
        error, energy: sums of |o - o'|^2 and of |o|^2 over the attention outputs; 0 where no attention module was found.
        coded_bytes, coded_values, exact_bytes, exact_values, seconds, failed, problems: as in `Roundtrip`.
    """

    codec: str
    text: str
    nll: tuple[float, ...]
    kl: tuple[float, ...]
    hit: tuple[bool, ...]
    error: float
    energy: float
    coded_bytes: int
    coded_values: int
    exact_bytes: int
    exact_values: int
    seconds: float
    failed: bool
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """What `to_json` gave."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**fields)


class TextArms:
    """One text with the model's own forward on it; `arm` scores a codec against that.

    Args:
        model: the model that scores.
        text: name of the text.
        ids: its tokens; all but the last are run.
        protocol: "prefix" or "streaming".
        before: tokens before the first scored one.
        chunk: tokens a forward. A streaming codec with side information a block (a mean, a table) has one a chunk.
        calibration: tables for calibrated codecs; None learns them from the text's own cache.
    """

    def __init__(
        self,
        model: LoadedModel,
        text: str,
        ids: Sequence[int],
        protocol: str,
        before: int,
        chunk: int = CHUNK,
        calibration: Calibration | None = None,
    ) -> None:
        self.model, self.text, self.protocol, self.before, self.chunk = model, text, protocol, before, chunk
        self.calibration, self.told = calibration, tuple(ids[:before] if protocol == "prefix" else ids[:-1])
        self.moments: dict[tuple[int, int], Moments] = {}
        self.probes = probe_model(model.model)
        trip = parse_roundtrip("raw")
        caches: list[Any]
        if protocol == "prefix":
            self.states = take_states(prefill(model, ids[:before]), length=before)
            self.ids, self.skip = list(ids[before:]), 0
            caches = build_caches(coded_states(self.states, self.probes, trip))
        else:
            self.ids, self.skip = list(ids), before
            caches = list(make_prompt_cache(model.model))
        self.logits: list[mx.array] = []
        self.outputs: dict[int, list[mx.array]] = {}
        with watching(model.model, caches, lambda layer, rows: self.outputs.setdefault(layer, []).append(rows), self.skip):
            for logits in self._forwards(caches):
                mx.eval(logits, [rows[-1] for rows in self.outputs.values()])
                self.logits.append(logits)
        if protocol == "streaming":
            self.states = take_states(caches)
            arrays = [x for state in self.states for x in (state.k, state.v) if isinstance(x, mx.array)]
            trip.coded_bytes, trip.coded_values = sum(x.nbytes for x in arrays), sum(x.size for x in arrays)
        energy = sum(scalar(_energy(rows)) for layer in self.outputs.values() for rows in layer if rows.size)
        self.own = self._arm(OWN, trip, [self._scores(i, logits) for i, logits in enumerate(self.logits)], 0.0, energy)

    @property
    def positions(self) -> int:
        """Tokens that each arm's forward runs."""
        return len(self.ids) - 1

    def arm(self, trip: Roundtrip) -> Arm:
        """Score one codec.

        Args:
            trip: a fresh round trip of it.
        Raises:
            IncompatibleError: streaming, and a layer without full attention.
        """
        trip = bound_trip(trip, self.states, self.probes, self.calibration, partial(self._own_moments, trip.plan))
        streams = list(streaming_caches(self.probes, trip)) if self.protocol == "streaming" else []
        caches: list[Any] = streams or build_caches(coded_states(self.states, self.probes, trip))
        errors: list[mx.array] = []
        seen: dict[int, int] = {}

        def look(layer: int, rows: mx.array) -> None:
            own = self.outputs[layer][seen.get(layer, 0)]
            seen[layer] = seen.get(layer, 0) + 1
            if rows.size:
                errors.append(_energy(rows.astype(mx.float32) - own.astype(mx.float32)))

        parts, done = [], 0
        with watching(self.model.model, caches, look, self.skip):
            for i, logits in enumerate(self._forwards(caches)):
                mx.eval(logits, errors[done:])
                parts.append(self._scores(i, logits))
                done = len(errors)
        for cache in streams:
            cache.count_exact()
        return self._arm(trip.spec, trip, parts, sum(scalar(e) for e in errors), self.own.energy)

    def _own_moments(self, plan: CodecPlan) -> Moments:
        if (plan.sink, plan.recent) not in self.moments:
            self.moments[plan.sink, plan.recent] = own_moments(self.model, self.told, plan)
        return self.moments[plan.sink, plan.recent]

    def _forwards(self, caches: list[Any]) -> Iterator[mx.array]:
        """Logits (N, V) of the scored positions, forward by forward; N may be 0."""
        for start in range(0, self.positions, self.chunk):
            stop = min(start + self.chunk, self.positions)
            yield self.model.model(mx.array(self.ids[start:stop])[None], cache=caches)[0, max(0, self.skip - start) :]

    def _scores(self, i: int, logits: mx.array) -> Scores:
        """By position of forward i: nll, KL and whether the most likely token is own's."""
        at = self.skip + 1 + sum(own.shape[0] for own in self.logits[:i])
        targets = np.array(self.ids[at : at + logits.shape[0]], dtype=np.int64)
        own, other = (np.array(x.astype(mx.float32)) for x in (self.logits[i], logits))
        return divergence(own, other, targets)

    def _arm(self, codec: str, trip: Roundtrip, parts: Sequence[Scores], error: float, energy: float) -> Arm:
        nll, kl, hit = (np.concatenate(column).tolist() for column in zip(*parts, strict=True))
        counts = {name: getattr(trip, name) for name in COUNTS}
        return Arm(
            codec, self.text, tuple(nll), tuple(kl), tuple(hit), error, energy, **counts, failed=trip.failed, problems=tuple(trip.problems)
        )


def divergence(own: np.ndarray, other: np.ndarray, targets: np.ndarray) -> Scores:
    """Negative log-likelihood of the targets, KL(own || other), and whether the most likely tokens agree; float64, by position.

    Args:
        own, other: logits (N, V), float32.
        targets: (N,) token ids.
    """
    nll, kl = np.empty(len(targets)), np.empty(len(targets))
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        a, b = (x[rows].astype(np.float64) for x in (own, other))
        a -= a.max(-1, keepdims=True)
        b -= b.max(-1, keepdims=True)
        p = np.exp(a)
        total = p.sum(-1)
        log_other = np.log(np.exp(b).sum(-1))
        kl[rows] = np.einsum("nv,nv->n", p, a - b) / total - np.log(total) + log_other
        nll[rows] = log_other - b[np.arange(len(b)), targets[rows]]
    return nll, kl, own.argmax(-1) == other.argmax(-1)


def bound_trip(
    trip: Roundtrip,
    states: Sequence[CacheState],
    probes: Sequence[CacheProbe],
    calibration: Calibration | None,
    moments: Callable[[], Moments],
) -> Roundtrip:
    """The round trip with calibrated codecs bound to a cache's layers; other codecs' as it is.

    Args:
        trip: a fresh one.
        states, probes: the exact cache.
        calibration: tables, or None to learn them from this cache.
        moments: gives the metrics of a piece of its tokens, for that.
    """
    return trip.bound(bind(trip.plan, layer_sources(states, probes), calibration, moments)) if trip.calibrated else trip


def coded_states(states: Sequence[CacheState], probes: Sequence[CacheProbe], trip: Roundtrip, prefix: str = "") -> list[CacheState]:
    """The states with K and V through a codec, exact rows as they are."""
    out = []
    for i, (state, probe) in enumerate(zip(states, probes, strict=True)):
        changes: dict[str, Any] = {"caches": tuple(coded_states(state.caches, probe.caches, trip, f"{prefix}{i}."))}
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
def watching(model: nn.Module, caches: Sequence[Any], look: Any, skip: int) -> Iterator[None]:
    """Give `look` the layer and the output rows (past the first `skip` tokens) of every attention module that runs on these caches.

    The attention modules get a subclass that looks at what they return; the model is left as it was.
    """
    homes = {id(leaf): i for i, leaf in enumerate(_leaves(caches))}
    seen: dict[int, int] = {}

    def watched(cls: type) -> type:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            output = cls.__call__(self, *args, **options)
            layer = next((homes[id(given)] for given in [*args, *options.values()] if id(given) in homes), None)
            if layer is not None and isinstance(output, mx.array):
                start = seen.get(layer, 0)
                seen[layer] = start + output.shape[1]
                look(layer, output[:, max(0, skip - start) :])
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


def _energy(rows: mx.array) -> mx.array:
    return mx.sum(mx.square(rows.astype(mx.float32)))


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        yield cache
        yield from _leaves(getattr(cache, "caches", ()))
