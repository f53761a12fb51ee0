"""Bind the calibrated codecs of a plan to one cache: tables and widths for each layer and role, or the codec that it falls back to.

Bits go to where they save most over all layers, so that all layers are bound before the first is encoded. Then each role is coded on a
sample of its rows, and where the best training-free codec at no more bytes costs less, that one is taken: a calibration that does not fit
what the cache holds can make it no worse than those. At rates below any of them, rows that would be lost take more bytes; rows that the
codec refuses go to the smallest of them. What an error costs is the tables' metric, e -> |e M|^2 in nats (twice over); where
that is zero, it is the squared error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from formats.errors import IncompatibleError
from kvtool.calibrations import Calibration, is_calibrated, kind_of
from kvtool.encoding import Positions, RoleSource, source_of, sources_of, split_rows, takes_dim
from kvtool.model import LoadedModel
from kvtool.moments import LEAST_TOKENS, Moments, collect
from kvtool.probe import CacheProbe
from kvtool.segment_work import stripped
from kvtool.states import CacheState
from veloxquant_mlx.allocators.additive import AdditiveTables, build_shared
from veloxquant_mlx.allocators.predictors import TczTables, step_for
from veloxquant_mlx.allocators.transforms import LEAST_RATE, LayerRows, TcTables, build_tc, inverse, widths_for
from veloxquant_mlx.codecs import Codec, CodecPlan
from veloxquant_mlx.codecs._base import RoleName
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.codecs.tc import MAX_WIDTH, Tc
from veloxquant_mlx.codecs.tcz import Tcz

SAMPLE = 512  # rows of a role that codecs are compared on
OWN_ROWS = 1 << 13  # rows of a cache that its own tables are learnt from, at most
OWN_TOKENS = 1024  # of them that metrics are taken from
ROLES: tuple[RoleName, ...] = ("k", "v")
STEP_ROWS = 1024  # that the step of a rate is found on
FREE_BITS = range(1, 7)  # of the rvq-N that are compared with
LOST = 2.0  # times the cost of their mean alone: rows that cost more than that are lost, and worth more bytes


@dataclass(frozen=True)
class LayerSource:
    """One cache to be encoded: its name and where its rows come from."""

    name: str
    k: RoleSource | None
    v: RoleSource | None
    positions: Sequence[tuple[int, int]]

    def role(self, role: str) -> RoleSource | None:
        return self.k if role == "k" else self.v


@dataclass
class Binding:
    """What each layer and role is coded with.

    Attributes:
        plan: what is coded with, where it is not what was asked for; else None.
        codecs: (layer, role) -> codec.
        calibration: digest of the calibration, or None where the tables are carried, or no role has them.
        fallbacks: "layer.role: codec, reason" of roles that are not coded as the plan says.
        notes: what a caller should know.
    """

    plan: CodecPlan | None = None
    codecs: dict[tuple[str, str], Codec] = field(default_factory=dict)
    calibration: str | None = None
    fallbacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def calibrated(self) -> bool:
        """Whether any role is coded with tables."""
        return any(is_calibrated(codec) for codec in self.codecs.values())


def bind(
    plan: CodecPlan,
    layers: Sequence[LayerSource],
    calibration: Calibration | None,
    moments: Callable[[], Moments] | None,
    *,
    compare: bool = True,
) -> Binding | None:
    """Codecs for every role of a cache, or None where the plan has no calibrated codec.

    Args:
        plan: what to code with.
        layers: the caches, in order; rows are fetched twice or three times.
        calibration: of the model, or None: the tables are then learnt from these rows and carried in the file.
        moments: gives the metrics of a piece of these tokens, for that.
        compare: whether a role goes to a training-free codec that does better, or that holds what the plan's refuses.
    Raises:
        ValueError: tc or tcz for one role alone, exact rows of another frame, or there is nothing to learn tables from.
        IncompatibleError: the calibration has no tables for the codec.
    """
    if not is_calibrated(plan.k) and not is_calibrated(plan.v):
        return None
    keys_alone = isinstance(plan.k, CommVqAdditive) and not is_calibrated(plan.v)
    if not keys_alone and (type(plan.k) is not type(plan.v) or plan.k.spec() != plan.v.spec()):
        raise ValueError(f"[save] {plan.spec()}: tc and tcz share their bits among keys and values, so that each is one for both.")
    if plan.frame == "post":
        raise ValueError(f"[save] {plan.spec()}: a calibrated codec takes keys before RoPE; leave frame out.")
    binding = Binding()
    if calibration is None and isinstance(plan.k, Tcz):
        bits = max(LEAST_RATE, plan.k.rate)
        binding.notes.append(f"no calibration of this model: {plan.k.spec()} becomes tc-{bits:g} with tables learnt from this cache")
        plan = binding.plan = replace(plan, k=Tc(bits, "k"), v=Tc(bits, "v"))
    found = _Binder(plan, layers, binding, compare)
    found.bind(found.learnt(moments) if calibration is None else calibration)
    return binding


class _Binder:
    def __init__(self, plan: CodecPlan, layers: Sequence[LayerSource], binding: Binding, compare: bool) -> None:
        self.plan, self.binding, self.compare = plan, binding, compare
        self.roles: tuple[RoleName, ...] = ROLES if is_calibrated(plan.v) else ("k",)
        self.layers = {layer.name: layer for layer in layers}
        self.reasons: dict[str, str] = {}
        for layer in layers:
            reason = _unfit(layer)
            if reason is not None:
                self.reasons[layer.name] = reason

    def span(self, layer: LayerSource) -> tuple[int, int]:
        """Rows of a layer that are coded; [0, 0) where none are."""
        source = layer.k or layer.v
        assert source is not None
        raw, coded = Raw(), Raw()
        cuts = split_rows(layer.positions, source.shape[1], self.plan.sink, self.plan.recent, coded, raw)
        return next(((start, stop) for start, stop, chosen in cuts if chosen is coded), (0, 0))

    def _at(self, name: str) -> tuple[Any, ...]:
        """Positions of a cache's rows, and which of them are coded."""
        return tuple(self.layers[name].positions), self.span(self.layers[name])

    def rows(self, layer: LayerSource, role: str, most: int) -> mx.array:
        """Coded rows of a role before RoPE, float32, evenly spaced where there are more than `most`."""
        source, (start, stop) = layer.role(role), self.span(layer)
        assert source is not None
        picked = np.unique(np.linspace(start, stop - 1, min(stop - start, most)).round().astype(np.int64)) if stop > start else np.arange(0)
        rows = source.fetch()[:, mx.array(picked.astype(np.uint32))]
        at = Positions(layer.positions).of(0, source.shape[1])[picked]
        return stripped(rows, at, source.rope)

    def learnt(self, moments: Callable[[], Moments] | None) -> Mapping[str, TcTables] | Mapping[str, AdditiveTables]:
        """Tables from the rows themselves, and the metrics of a piece of their tokens."""
        if moments is None:
            raise ValueError(
                f"[save] {self.plan.spec()} needs tables: give a calibration of the model (calibration=, --calibration), "
                "or the model itself to learn them from this cache (model=; to recode: to_model=, --to-model)."
            )
        if any(name not in self.reasons and self.span(layer)[1] for name, layer in self.layers.items()):
            metrics = moments()
            self.reasons |= {name: why for name, why in metrics.skipped.items() if name in self.layers and name not in self.reasons}
        tables, rows = {}, {}
        for name, layer in self.layers.items():
            if name in self.reasons or not self.span(layer)[1]:
                continue
            about = metrics.layers[name]
            k, v = (_tokens_first(self.rows(layer, role, OWN_ROWS)) for role in ROLES)
            rows[name] = LayerRows(k, v, about.fisher_k, about.fisher_v, about.gradients)
            if isinstance(self.plan.k, CommVqAdditive):
                continue
            try:
                start, stop = self.span(layer)
                tables[name] = replace(build_tc(rows.pop(name)), own=stop - start <= OWN_ROWS)
            except ValueError as error:
                self.reasons[name] = str(error)
        if not isinstance(self.plan.k, CommVqAdditive):
            return tables
        words = build_shared(rows, self.plan.k.bits)
        self.reasons |= {name: f"heads of {own.k.shape[2]} at this rate" for name, own in rows.items() if name not in words}
        return words

    def bind(self, tables: "Calibration | Mapping[str, TcTables] | Mapping[str, AdditiveTables]") -> None:
        if isinstance(tables, Calibration):
            kind = self._kind(tables)
            self.binding.calibration = None if getattr(self.plan.k, "carry", False) else tables.digest
            known = tables.layers(kind)
            missing = {name: "no tables in the calibration" for name in self.layers if name not in known}
            self.reasons = missing | {name: tables.file.skipped[name] for name in missing if name in tables.file.skipped} | self.reasons
            wanted = {name: tables.tables(kind, name) for name in known if name in self.layers}
        else:
            wanted = dict(tables)
        for name, own in wanted.items():
            source = self.layers[name].k
            if name not in self.reasons and source is not None and (own.heads, own.dim) != (source.shape[0], source.shape[2]):
                self.reasons[name] = f"{source.shape[0]} heads of {source.shape[2]}, in the calibration {own.heads} of {own.dim}"
        wanted = {name: own for name, own in wanted.items() if name not in self.reasons and self.span(self.layers[name])[1]}
        if isinstance(self.plan.k, Tcz):
            assert isinstance(tables, Calibration)
            candidates = self._tcz(tables.digest, wanted, tables.layers(kind))
        elif isinstance(self.plan.k, CommVqAdditive):
            words = self.plan.k
            candidates = {(name, "k"): words.bind(own, name, self.binding.calibration) for name, own in wanted.items()}
        else:
            candidates = self._tc(self.binding.calibration, wanted)
        done: dict[tuple[str, str], mx.array] = {}
        for name, layer in self.layers.items():
            source = layer.k or layer.v
            if source is None or not self.span(layer)[1]:
                continue
            for role in self.roles:
                if layer.role(role) is not None:
                    self._choose(layer, role, candidates.get((name, role)), wanted.get(name), done)
        if not self.binding.calibrated:
            self.binding.calibration = None

    def _kind(self, calibration: Calibration) -> str:
        """The kind of tables that the plan takes: those of its rate, or of `tcz` the nearest design's."""
        kinds = calibration.kinds(self.plan.k.id)
        if not kinds:
            there = ", ".join(calibration.file.tables)
            what = f"calibration {calibration.digest[:12]} has no tables for {self.plan.k.spec()}, but for {there}"
            raise IncompatibleError(what, hint="calibrate the model again, or learn tables from this cache (--calibration self)")
        if isinstance(self.plan.k, CommVqAdditive):
            kind = kind_of(self.plan.k)
            if kind not in kinds:
                rates = ", ".join(one.partition("-")[2] for one in kinds)
                what = f"calibration {calibration.digest[:12]} has no tables for {self.plan.k.spec()}, but for N of {rates}"
                raise IncompatibleError(what, hint="take one of these, or calibrate the model again")
            return kind
        if not isinstance(self.plan.k, Tcz):
            return kinds[0]
        rate = self.plan.k.rate
        return min(kinds, key=lambda kind: (abs(math.log(float(kind.partition("-")[2]) / rate)), kind))

    def _tc(self, digest: str | None, tables: Mapping[str, TcTables]) -> dict[tuple[str, str], Codec]:
        assert isinstance(self.plan.k, Tc)
        widths = widths_for(tables, self.plan.k.bits) if tables else {}
        found: dict[tuple[str, str], Codec] = {}
        for name, own in tables.items():
            start, stop = self.span(self.layers[name])
            found |= {(name, role): self.plan.k.bind(role, own, widths[name], name, digest, stop - start) for role in ROLES}
        return found

    def _tcz(self, digest: str, tables: Mapping[str, TczTables], order: Sequence[str]) -> dict[tuple[str, str], Codec]:
        """Layers whose predecessor is not coded here have nothing to be predicted from."""
        assert isinstance(self.plan.k, Tcz)
        before = dict(zip(order[1:], order, strict=False))
        place = {name: i for i, name in enumerate(self.layers)}
        linked: dict[str, TczTables] = {}
        for name, own in tables.items():
            past = before.get(name)
            if own.chained and past not in linked:
                self.reasons[name] = f"layer {past}, which it is predicted from, is not coded with the calibration"
            elif own.chained and past is not None and place[past] > place[name]:
                self.reasons[name] = f"layer {past}, which it is predicted from, comes after it"
            elif own.chained and past is not None and self._at(past) != self._at(name):
                self.reasons[name] = f"its rows are not at the positions of those of layer {past}, which it is predicted from"
            else:
                linked[name] = own
        if not linked:
            return {}
        rows = [tuple(_tokens_first(self.rows(self.layers[name], role, STEP_ROWS)) for role in ROLES) for name in linked]
        step = step_for(self.plan.k.rate, list(linked.values()), [(k, v) for k, v in rows])
        # All the digits of a small step are more than a manifest takes in a row.
        step = float(f"{step:.6g}")
        return {
            (name, role): self.plan.k.bind(role, own, step, name, before[name] if own.chained else None, digest)
            for name, own in linked.items()
            for role in ROLES
        }

    def _choose(self, layer: LayerSource, role: RoleName, codec: Codec | None, tables: Any, done: dict[tuple[str, str], mx.array]) -> None:
        """Take the calibrated codec of a role, or the one that does better; the decoded sample joins `done`."""
        source, (start, stop) = layer.role(role), self.span(layer)
        assert source is not None
        if codec is None:
            reason = self.reasons.get(layer.name, "no tables in the calibration")
            assert isinstance(self.plan.k, Tc | Tcz | CommVqAdditive)
            bits = self.plan.k.rate if isinstance(self.plan.k, Tcz) else self.plan.k.bits
            free = Rvq.parse(f"rvq-{max(2, math.floor(bits + 0.5))}", role)
            chosen: Codec = free if free is not None and takes_dim(free, source.shape[2]) else Raw()
            self._fall_back(layer, role, chosen, reason)
            return
        shape, sample = (source.shape[0], stop - start, source.shape[2]), self.rows(layer, role, SAMPLE)
        given = {need: done[at] for need, at in sources_of(layer.name, codec).items()} or None
        small = (shape[0], sample.shape[1], shape[2])
        try:
            parts = codec.encode(sample) if given is None else codec.encode(sample, given)
        except ValueError as error:
            if not self.compare:
                raise
            # Rows that its steps do not reach: another codec holds them, or refuses them for a reason of its own.
            least = _free(role, shape, None) or Raw()
            self._fall_back(layer, role, least, str(error))
            done[layer.name, role] = least.decode(least.encode(sample), small, mx.float32)
            return
        decoded = codec.decode(parts, small, mx.float32) if given is None else codec.decode(parts, small, mx.float32, given)
        size = codec.nbytes(shape, mx.float32) if not codec.eager else sum(p.nbytes for p in parts.values()) * shape[1] / sample.shape[1]
        self.binding.codecs[layer.name, role], done[layer.name, role] = codec, decoded
        if not self.compare:
            return
        metric = metric_of(tables, role)
        cost, best, where = _cost(sample - decoded, metric), _free(role, shape, size), "at no more bytes"
        if best is None and cost > LOST * _cost(sample - mx.mean(sample, axis=1, keepdims=True), metric):
            best, where = _free(role, shape, None), "at more bytes"
        if best is not None:
            other = best.decode(best.encode(sample), small, mx.float32)
            theirs = _cost(sample - other, metric)
            if theirs < cost:
                ratio = f"{cost / theirs:.3g} times less costly" if theirs else "without error"
                self._fall_back(layer, role, best, f"{ratio} on {sample.shape[1]} rows {where}")
                done[layer.name, role] = other

    def _fall_back(self, layer: LayerSource, role: RoleName, codec: Codec, reason: str) -> None:
        self.binding.codecs[layer.name, role] = codec
        self.binding.fallbacks.append(f"{layer.name}.{role}: {codec.spec(role)}, {reason}")


def _free(role: RoleName, shape: tuple[int, int, int], size: float | None) -> Codec | None:
    """The training-free codec of the most bits that takes no more than `size` bytes (None: that of the fewest bits), or None."""
    for bits in FREE_BITS if size is None else reversed(FREE_BITS):
        codec = Rvq.parse(f"rvq-{bits}", role)
        if codec is not None and takes_dim(codec, shape[2]) and (size is None or codec.nbytes(shape, mx.float32) <= size):
            return codec
    return None


def _unfit(layer: LayerSource) -> str | None:
    """Why a cache's rows cannot be coded with tables, or None."""
    if layer.k is None or layer.v is None:
        return "no keys and values"
    if layer.k.shape != layer.v.shape:
        return f"keys of {layer.k.shape[0]} x {layer.k.shape[2]} and values of {layer.v.shape[0]} x {layer.v.shape[2]}"
    problem = layer.k.problem or layer.v.problem
    if problem is not None:
        return problem
    if layer.v.rope is not None:
        return "its values are rotated"
    heads, _, dim = layer.k.shape
    return f"{heads} heads of {dim}, more than {MAX_WIDTH} values a row" if heads * dim > MAX_WIDTH else None


def metric_of(tables: Any, role: str) -> np.ndarray:
    """M of a role, (HD, HD) float64: an error e of a row, flattened head by head, costs |e M|^2."""
    if isinstance(tables, TczTables):
        root: np.ndarray = getattr(tables, role).forward.astype(np.float64)
        return root
    if isinstance(tables, AdditiveTables):
        assert role == "k"
        own = [forward * np.sqrt(cost) for forward, cost in zip(inverse(tables.back), tables.cost, strict=True)]
    else:
        assert isinstance(tables, TcTables)
        keys = zip(tables.forward(), tables.k_cost, strict=True)
        own = [f * np.sqrt(c) for f, c in keys] if role == "k" else [np.eye(tables.dim) * np.sqrt(c) for c in tables.v_cost]
    root = np.zeros((tables.heads * tables.dim,) * 2)
    for h, block in enumerate(own):
        at = slice(h * tables.dim, (h + 1) * tables.dim)
        root[at, at] = block
    return root


def _cost(error: mx.array, metric: np.ndarray) -> float:
    """Mean cost of errors (H, N, D) of rows; infinite where an error is not finite."""
    flat = np.array(error).astype(np.float64).swapaxes(0, 1).reshape(error.shape[1], -1)
    if not np.isfinite(flat).all():
        return math.inf
    weighted = flat @ metric if metric.any() else flat
    return float(np.square(weighted).sum(axis=1).mean())


def _tokens_first(rows: mx.array) -> np.ndarray:
    """(H, N, D) as (N, H, D) float32."""
    return np.ascontiguousarray(np.array(rows).swapaxes(0, 1))


def layer_sources(states: Sequence[CacheState], probes: Sequence[CacheProbe], prefix: str = "") -> list[LayerSource]:
    """Every cache of a snapshot as something to bind, those in lists too."""
    sources = []
    for i, (state, probe) in enumerate(zip(states, probes, strict=True)):
        name = f"{prefix}{i}"
        sources.append(LayerSource(name, source_of(state.k, probe.k), source_of(state.v, probe.v), state.positions))
        sources += layer_sources(state.caches, probe.caches, f"{name}.")
    return sources


def own_moments(model: LoadedModel, tokens: Sequence[int] | None, plan: CodecPlan) -> Moments:
    """Metrics from a piece of the tokens that a cache stands for.

    Raises:
        ValueError: the tokens are not known, or too few.
        IncompatibleError: the model has no backward pass.
    """
    if tokens is None:
        raise ValueError(f"[save] {plan.spec()} learns its tables from the tokens of the cache, which are not known; give a calibration.")
    least = max(LEAST_TOKENS, plan.sink + max(1, plan.recent) + 1)
    if len(tokens) < least:
        raise ValueError(f"[save] {plan.spec()} learns its tables from {least} tokens at least, but got {len(tokens)}; give a calibration.")
    return collect(model, {"prompt": list(tokens[:OWN_TOKENS])}, length=max(least, OWN_TOKENS), sink=plan.sink, recent=max(1, plan.recent))
