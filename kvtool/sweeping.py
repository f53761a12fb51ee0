"""Sweep: several codecs on the same texts, as one table of quality against bits.

Protocols:
    prefix     the first tokens of a text are in the cache, encoded and decoded once; the ones that follow are teacher-forced on it, and
               what they add stays exact.
    streaming  the whole text is teacher-forced; every row older than the exact window that is no sink is coded inside the forward, so
               that errors propagate from layer to layer and from token to token (`kvtool.streaming_cache`).
KL is KL(own || codec) of the next-token distribution in nats, against the model's own uncompressed cache. The attention-output error is
sum |o - o'|^2 / sum |o|^2 over the outputs of the attention modules (after their output projection) on the scored tokens.

Text "all" is the mean of the texts: each weighs the same, whatever its length. Only its 99th percentile is of all positions together, and
its bits are of all bytes over all values.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from formats.errors import counted
from kvtool.arms import CHUNK, OWN, Arm, TextArms
from kvtool.bootstrap import paired_ratio
from kvtool.calibrations import Calibration, resolve, resolve_foreign
from kvtool.capturing import check_ids, encode_prompt, token_ids
from kvtool.model import LoadedModel
from kvtool.passkeys import ask, check_passkeys, passkey_trials
from kvtool.probe import CacheProbe, probe_model
from kvtool.roundtrip import parse_roundtrip, without_exact_rows

PROTOCOLS = ("prefix", "streaming")
WINDOWS = {"on": ("on",), "off": ("off",), "both": ("on", "off")}
PREFIX = {"prefix": 1024, "streaming": 128}
TOKENS = {"prefix": 256, "streaming": 896}
ALL = "all"


@dataclass(frozen=True)
class SweepRow:
    """One codec on one text, or the mean over the texts (text "all").

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
        ratio: kl over that of the reference's row, on the same text; None without a reference, or where its KL is not positive.
        ratio_low, ratio_high: 95 % confidence interval of the ratio (`kvtool.bootstrap`); None where n is too small for one.
        passkey: share of the passkey trials answered; the same for every text; None where none were asked for.
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
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    passkey: float | None
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class SweepReport:
    """The table.

    Attributes:
        model: who scored; protocol: "prefix" or "streaming"; prefix: tokens before the first scored one.
        relative_to: the reference codec's spec, or None; with windows on and off, each row's reference is the one with its own window.
        passkeys: trials behind the column.
        rows: by codec, and within it by text; with several texts "all" comes last.
        calibration: digest of the one that calibrated codecs had, or None.
        calibration_of: name of the model that it is of, where that has other weights than the one that scored; else None.
    """

    model: str
    protocol: str
    prefix: int
    relative_to: str | None
    passkeys: int
    rows: tuple[SweepRow, ...]
    calibration: str | None = None
    calibration_of: str | None = None

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
    tokens: int | None = None,
    sink: int | None = None,
    recent: int | None = None,
    window: Literal["on", "off", "both"] = "on",
    relative_to: str | None = None,
    passkeys: int = 0,
    chunk: int = CHUNK,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    foreign_calibration: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SweepReport:
    """Score codecs on texts. Deterministic, but for the seconds.

    Args:
        model: the model that scores.
        texts: name -> text or token ids; each is a sequence of its own.
        codecs: specs of `parse_codec`, `mlx-N` (N = 2, 3, 4, 6, 8) or `fp8`.
        protocol: "prefix" or "streaming", see the module docstring.
        prefix: tokens before the first scored one; 1024 (prefix) or 128 (streaming) when None.
        tokens: positions to score at most, a text; 256 (prefix) or 896 (streaming) when None.
        sink, recent: exact rows of every lossy codec whose spec does not say; 4 and 32 when None, as in `parse_codec`.
        window: "on": exact rows as above; "off": none, whatever the spec says; "both": each codec twice.
        relative_to: the codec (one of `codecs`) whose KL the ratios have below the line.
        passkeys: trials a codec, of the shipped models' passkey task, each with its prompt coded once; 0 leaves the column empty.
        chunk: tokens a forward; a streaming codec with side information a block (a mean, a table) has one a chunk.
        calibration: tables for calibrated codecs, as in `save`; "self" learns them from each text's own cache, and counts them in the bits.
        foreign_calibration: take a calibration of other weights, a file or a digest, as long as its shapes are the model's.
        progress: called with (positions done, positions in all).
    Returns:
        SweepReport, the own cache's row first.
    Raises:
        ValueError: an unknown protocol or codec, a codec or nothing twice, a text that is too short, a model without a passkey task, or a
            foreign calibration that is not named.
        IncompatibleError: streaming, and a layer without full attention; a calibration of other weights or shapes.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"[sweep] protocol must be one of {', '.join(PROTOCOLS)}, but got {protocol!r}.")
    before = PREFIX[protocol] if prefix is None else prefix
    count = TOKENS[protocol] if tokens is None else tokens
    if min(before, count, chunk) < 1 or passkeys < 0:
        shown = f"{before}, {count}, {chunk} and {passkeys}"
        raise ValueError(f"[sweep] prefix, tokens and chunk must be at least 1 and passkeys at least 0, but got {shown}.")
    if passkeys:
        check_passkeys(model)
    if not codecs or not texts:
        raise ValueError("[sweep] give at least one codec and one text.")
    references = specs_of(codecs, sink, recent, window, relative_to)
    tables = None
    if any(parse_roundtrip(spec).calibrated for spec in references):
        shapes = layer_shapes(probe_model(model.model)) if foreign_calibration else {}
        tables = resolve_foreign(calibration, shapes) if foreign_calibration else resolve(calibration, model.info.effective_weights)
    if ALL in texts and len(texts) > 1:
        raise ValueError(f"[sweep] a text cannot be named {ALL!r} beside others.")
    ids = {name: ids_of(model, name, text, before, count) for name, text in texts.items()}
    arms: dict[str, list[Arm]] = {spec: [] for spec in (OWN, *references)}
    one = {name: len(t) - 1 - (before if protocol == "prefix" else 0) for name, t in ids.items()}
    # A passkey trial counts as many positions as its answer has tokens.
    total, done = len(arms) * (sum(one.values()) + 5 * passkeys), 0

    def advance(positions: int) -> None:
        nonlocal done
        done += positions
        if progress is not None:
            progress(done, total)

    for name, text in ids.items():
        base = TextArms(model, name, text, protocol, before, chunk, tables)
        arms[OWN].append(base.own)
        advance(one[name])
        for spec in references:
            arms[spec].append(base.arm(parse_roundtrip(spec)))
            advance(one[name])
    shares: dict[str, float | None] = {}
    if passkeys:
        trips = [partial(parse_roundtrip, "raw" if spec == OWN else spec) for spec in arms]
        found = ask(model, trips, passkey_trials(model, passkeys), calibration=tables, progress=lambda: advance(5 * len(arms)))
        shares = {spec: answers.share for spec, answers in zip(arms, found, strict=True)}
    digest = None if tables is None else tables.digest
    other = None if tables is None or tables.model.effective_weights == model.info.effective_weights else tables.model.name
    return SweepReport(model.info.name, protocol, before, relative_to, passkeys, rows_of(arms, references, shares), digest, other)


def layer_shapes(probes: Sequence[CacheProbe], prefix: str = "") -> dict[str, tuple[int, int]]:
    """Layer name -> (heads, head_dim) of every cache with keys, those in lists too."""
    found: dict[str, tuple[int, int]] = {}
    for i, probe in enumerate(probes):
        found |= {f"{prefix}{i}": (probe.k.heads, probe.k.dim)} if probe.k is not None else {}
        found |= layer_shapes(probe.caches, f"{prefix}{i}.")
    return found


def specs_of(codecs: Sequence[str], sink: int | None, recent: int | None, window: str, relative_to: str | None) -> dict[str, str | None]:
    """The specs to run, exact rows spelled out, and for each the spec that its ratio is relative to.

    Raises:
        ValueError: an unknown codec or window, a codec twice, a reference that is no codec of the sweep, or a lossless one.
    """
    if window not in WINDOWS:
        raise ValueError(f"[sweep] window must be one of {', '.join(WINDOWS)}, but got {window!r}.")

    def settled(codec: str, which: str) -> str:
        if which == "off":
            return parse_roundtrip(without_exact_rows(codec), 0, 0).spec
        return parse_roundtrip(codec, sink, recent).spec

    for which in WINDOWS[window]:
        specs = [settled(codec, which) for codec in codecs]
        twice = next((s for i, s in enumerate(specs) if s in specs[:i]), None)
        if twice is not None:
            raise ValueError(f"[sweep] codec {twice} is given twice.")
        if relative_to is not None and settled(relative_to, which) not in specs:
            raise ValueError(f"[sweep] relative_to must be one of the codecs ({', '.join(codecs)}), but got {relative_to!r}.")
    if relative_to is not None and parse_roundtrip(relative_to).lossless:
        raise ValueError(f"[sweep] relative_to must be a lossy codec, but got {relative_to!r}, whose KL is 0.")
    pairs = ((settled(codec, w), None if relative_to is None else settled(relative_to, w)) for codec in codecs for w in WINDOWS[window])
    # What is the same with the window on and off (raw, or no exact rows asked for) runs once.
    found: dict[str, str | None] = {}
    for spec, reference in pairs:
        found.setdefault(spec, reference)
    return found


def ids_of(model: LoadedModel, name: str, text: str | Sequence[int], before: int, tokens: int) -> list[int]:
    """The tokens of a text that a sweep runs, and the one after them.

    Raises:
        ValueError: too few.
    """
    ids = encode_prompt(model, text) if isinstance(text, str) else token_ids(text)
    check_ids(model, ids)
    if len(ids) < before + 2:
        raise ValueError(
            f"[sweep] {name} has {counted(len(ids), 'token')}; with {before} before the first scored one, {before + 2} are needed: "
            "give a longer text, or a smaller prefix."
        )
    return ids[: before + tokens + 1]


def rows_of(
    arms: Mapping[str, Sequence[Arm]], references: Mapping[str, str | None], passkeys: Mapping[str, float | None]
) -> tuple[SweepRow, ...]:
    """The table of finished arms.

    Args:
        arms: spec -> one arm a text, the same texts in all; "own" among them.
        references: spec -> the spec that its ratio is relative to; what is not named has that of the first that is.
        passkeys: spec -> share of the trials; empty where there were none.
    """
    first = next(iter(references.values()), None)
    rows = []
    for spec, found in arms.items():
        reference = references.get(spec, first)
        below = None if reference is None else arms[reference]
        share = passkeys.get(spec)
        for i, arm in enumerate(found):
            rows.append(_row(arm.text, [arm], [arms[OWN][i]], None if below is None else [below[i]], share))
        if len(found) > 1:
            rows.append(_row(ALL, found, arms[OWN], below, share))
    return tuple(rows)


def _row(text: str, arms: Sequence[Arm], own: Sequence[Arm], below: Sequence[Arm] | None, passkey: float | None) -> SweepRow:
    """One row from one text's arm, or from several together."""
    failed = any(arm.failed for arm in arms)
    problems = list(dict.fromkeys(p for arm in arms for p in arm.problems))
    note = problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "") if problems else ""
    scored: dict[str, float | None] = dict.fromkeys(
        ("kl", "kl_p99", "ppl_delta", "top1", "attention_error", "bits", "bits_all", "ratio", "ratio_low", "ratio_high")
    )
    if not failed:
        kl = [np.array(arm.kl) for arm in arms]
        energy = sum(arm.energy / len(arm.kl) for arm in arms)
        scored |= {
            "kl": _mean(x.mean() for x in kl),
            "kl_p99": float(np.quantile(np.concatenate(kl), 0.99)),
            "ppl_delta": float(100 * np.expm1(_mean(np.mean(a.nll) - np.mean(b.nll) for a, b in zip(arms, own, strict=True)))),
            "top1": _mean(np.mean(arm.hit) for arm in arms),
            "attention_error": sum(arm.error / len(arm.kl) for arm in arms) / energy if energy else None,
            "bits": _bits(arms, exact=False),
            "bits_all": _bits(arms, exact=True),
        }
        if below is not None and not any(arm.failed for arm in below):
            scored |= zip(("ratio", "ratio_low", "ratio_high"), paired_ratio(kl, [np.array(arm.kl) for arm in below]), strict=True)
    count, seconds = sum(len(arm.kl) for arm in arms), sum(arm.seconds for arm in arms)
    return SweepRow(codec=arms[0].codec, text=text, n=count, **scored, passkey=passkey, seconds=seconds, note=note)


def _mean(values: Iterable[Any]) -> float:
    return float(np.mean(list(values)))


def _bits(arms: Sequence[Arm], *, exact: bool) -> float | None:
    total = sum(arm.coded_bytes + exact * arm.exact_bytes for arm in arms)
    values = sum(arm.coded_values + exact * arm.exact_values for arm in arms)
    return 8 * total / values if values else None
