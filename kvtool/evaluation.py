"""What a file is worth: held-out text scored on its cache, beside the model's own prefill, a wrong document's cache, and none at all.

KL is the mean over positions of KL(own || arm) of the next-token distribution in nats, computed in float64 from the logits.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from blake3 import blake3
from mlx_lm.models.cache import make_prompt_cache

from formats.errors import IncompatibleError, counted
from kvtool import calibration_texts
from kvtool.archive import Archive
from kvtool.archive import open as open_archive
from kvtool.bridges.alignment import OVERLAP, check_tokenizers
from kvtool.bridges.bridging import Map, load_across
from kvtool.bridges.transferring import realigned, source_of
from kvtool.calibrations import Calibration
from kvtool.capturing import check_ids, encode_prompt, prefill, token_ids
from kvtool.compat import tokenizer_difference
from kvtool.model import LoadedModel

ARMS = ("own", "transferred", "wrong", "none")
CHUNK = 128


@dataclass(frozen=True)
class ArmResult:
    """One arm's scores.

    Attributes:
        arm: "own" (the model's prefill), "transferred" (the file's cache), "wrong" (another text's prefill) or "none" (no cache).
        nll: mean negative log-likelihood of the next token, nats.
        nll_gap: what it is above that of `own`.
        kl: mean KL(own || arm), nats.
        kl_p99: its 99th percentile.
        top1: share of positions whose most likely token is that of `own`.
        seconds: to get the cache ready (prefill, or load and decode).
    """

    arm: str
    nll: float
    nll_gap: float
    kl: float
    kl_p99: float
    top1: float
    seconds: float


@dataclass(frozen=True)
class EvalReport:
    """Scores of a file on one text.

    Attributes:
        path: the file; model: who scored it; codecs: what the file's codecs are, by id.
        quality: the file's own record of its lossy steps and their measured error, oldest first.
        text: blake3 of the token ids that were fed and scored, as little-endian int64.
        prefix: tokens in the cache.
        n: positions scored.
        arms: one result an arm.
        notes: in what the file's model is another one than scored it, and what could not be compared.
    """

    path: str
    model: str
    codecs: tuple[str, ...]
    quality: tuple[dict[str, Any], ...]
    text: str
    prefix: int
    n: int
    arms: tuple[ArmResult, ...]
    notes: tuple[str, ...] = ()

    def arm(self, name: str) -> ArmResult:
        """The result of one arm."""
        return next(a for a in self.arms if a.arm == name)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    source: str | os.PathLike[str] | Archive,
    model: LoadedModel,
    text: str | Sequence[int],
    *,
    arms: Sequence[str] = ("own", "transferred", "none"),
    tokens: int = 256,
    wrong: str | Sequence[int] | None = None,
    mapping: Map | None = None,
    recompute: str | None = None,
    from_model: LoadedModel | None = None,
    overlap: float = OVERLAP,
    allow_mismatch: bool = False,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Score held-out text on a file's cache.

    Args:
        source: a kvtool file with token ids (the own prefill needs them).
        model: the model that scores.
        text: what follows the cached prefix, as text or token ids; a text that begins with the prefix itself is scored from there on.
        arms: some of "own", "transferred", "wrong", "none"; "own" is always run, since the others are measured against it.
        tokens: positions to score at most.
        wrong: the text of "wrong", as long as the cached prefix at least; None is a shipped text.
        mapping, recompute, from_model, overlap: how "transferred" gets there from another model's file, as in `load_across`; without
            mapping and recompute, as `load`.
        allow_mismatch, calibration: as in `load`.
        progress: called with (positions done, positions in all).
    Raises:
        ValueError: an unknown arm, fewer than two tokens of text, or a wrong text that is too short or the prefix itself.
        IncompatibleError: the file holds no token ids, or does not fit the model.
    """
    unknown = sorted(set(arms) - set(ARMS))
    if unknown:
        raise ValueError(f"[evaluate] arms must be some of {', '.join(ARMS)}, but got {', '.join(unknown)}.")
    archive = source if isinstance(source, Archive) else open_archive(source, calibration=calibration)
    try:
        if archive.tokens is None:
            raise IncompatibleError("the file holds no token ids, so there is no own prefill to compare with", path=archive.path)
        across = mapping is not None or recompute is not None
        if across and from_model is None:
            check_tokenizers(archive.manifest.model, model.info)
        prefix = _prefix(archive, model, from_model, overlap)
        ids = continuation(model, text, prefix)
        n = min(tokens, len(ids) - 1)
        if n < 1:
            raise ValueError(f"[evaluate] the text gives {counted(len(ids), 'token')} after the prefix; at least 2 are needed.")
        others = _wrong(model, wrong, prefix) if "wrong" in arms else []
        caches: dict[str, list[Any]] = {}
        seconds: dict[str, float] = {}
        # The first forward pays for what later ones have: no arm's time is to hold that.
        prefill(model, prefix[:2])
        for arm in [a for a in ARMS if a == "own" or a in arms]:
            start = time.perf_counter()
            if arm == "transferred" and across:
                how: dict[str, Any] = {"mapping": mapping, "recompute": recompute, "from_model": from_model, "overlap": overlap}
                caches[arm] = load_across(archive.path, model, **how, calibration=calibration).cache
            else:
                caches[arm] = _cache(arm, archive, model, others if arm == "wrong" else prefix, allow_mismatch)
            seconds[arm] = time.perf_counter() - start
        scores = score_caches(model, caches, ids, n, progress)
        codecs = tuple(dict.fromkeys(c.id for c in archive.manifest.codecs))
        results = tuple(_result(arm, scores[arm], seconds[arm], scores["own"]) for arm in caches)
        digest = blake3(np.array(ids[: n + 1], "<i8").tobytes()).hexdigest()
        quality, notes = tuple(archive.manifest.quality), archive.identity_notes(model) if "transferred" in caches and not across else ()
        return EvalReport(archive.path, model.info.name, codecs, quality, digest, len(prefix), n, results, notes)
    finally:
        if archive is not source:
            archive.close()


def _prefix(archive: Archive, model: LoadedModel, from_model: LoadedModel | None, overlap: float) -> list[int]:
    """The cached tokens, as those of `model`."""
    if from_model is None or tokenizer_difference(archive.manifest.model, model.info) is None:
        archive.check_tokens(model)
        return list((archive.tokens or ())[: archive.length])
    given = realigned(source_of(archive), from_model, model, overlap)
    return list(given.tokens[: given.length])


def continuation(model: LoadedModel, text: str | Sequence[int], prefix: Sequence[int]) -> list[int]:
    """Token ids to score: those of the text, without the cached prefix where the text begins with it."""
    ids = encode_prompt(model, text) if isinstance(text, str) else token_ids(text)
    if ids[: len(prefix)] == list(prefix):
        ids = ids[len(prefix) :]
    elif isinstance(text, str):
        # Text that goes on from the prefix has no beginning-of-text token in its middle.
        ids = list(model.tokenizer.encode(text, add_special_tokens=False))
    check_ids(model, ids)
    return ids


def _wrong(model: LoadedModel, text: str | Sequence[int] | None, prefix: Sequence[int]) -> list[int]:
    """As many tokens of another text as the prefix has."""
    if text is None:
        joined = "\n\n".join(calibration_texts.texts().values())
        text = joined[: 16 * len(prefix) + 1000]
    ids = encode_prompt(model, text) if isinstance(text, str) else token_ids(text)
    check_ids(model, ids)
    if len(ids) < len(prefix) or ids[: len(prefix)] == list(prefix):
        found = f"{counted(len(ids), 'token')}" if len(ids) < len(prefix) else "the prefix itself"
        raise ValueError(f"[evaluate] wrong must be a text of at least {len(prefix)} tokens other than the prefix, but got {found}.")
    return ids[: len(prefix)]


def _cache(arm: str, archive: Archive, model: LoadedModel, prefix: Sequence[int], allow_mismatch: bool) -> list[Any]:
    if arm in ("own", "wrong"):
        return prefill(model, prefix)
    if arm == "transferred":
        # Decoded: the error of the file is measured, not that of coding what comes after it.
        return archive.load(model, decode=True, allow_mismatch=allow_mismatch).cache
    return list(make_prompt_cache(model.model))


def score_caches(
    model: LoadedModel, caches: dict[str, list[Any]], ids: Sequence[int], n: int, progress: Callable[[int, int], None] | None
) -> dict[str, dict[str, np.ndarray]]:
    """Per position: nll, kl, hit of every arm; the arms advance together, so that only a chunk of logits is held."""
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {arm: [] for arm in caches}
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        fed = mx.array(list(ids[start:stop]))[None]
        targets = np.asarray(ids[start + 1 : stop + 1])
        own: np.ndarray | None = None
        for arm, cache in caches.items():
            logp = log_softmax(np.array(model.model(fed, cache=cache)[0].astype(mx.float32)))
            own = logp if own is None else own
            nll = -logp[np.arange(len(targets)), targets]
            kl = np.sum(np.exp(own) * (own - logp), axis=-1)
            parts[arm].append((nll, kl, logp.argmax(-1) == own.argmax(-1)))
        if progress is not None:
            progress(stop, n)
    return {arm: dict(zip(("nll", "kl", "hit"), map(np.concatenate, zip(*p, strict=True)), strict=True)) for arm, p in parts.items()}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities (float64) over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _result(arm: str, scores: dict[str, np.ndarray], seconds: float, own: dict[str, np.ndarray]) -> ArmResult:
    return ArmResult(
        arm=arm,
        nll=float(scores["nll"].mean()),
        nll_gap=float((scores["nll"] - own["nll"]).mean()),
        kl=float(scores["kl"].mean()),
        kl_p99=float(np.quantile(scores["kl"], 0.99)),
        top1=float(scores["hit"].mean()),
        seconds=seconds,
    )
