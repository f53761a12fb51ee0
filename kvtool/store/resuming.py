"""Go on from a store: what it holds of a prompt is loaded, the rest is run, and what was run joins the store."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvtool.archive import Restored
from kvtool.calibrations import Calibration, is_calibrated, resolve
from kvtool.capturing import PREFILL_STEP, Snapshot, cached_part, capture, check_ids, prefill, token_ids
from kvtool.encoding import codec_plan
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from kvtool.snapshot import take_states
from kvtool.states import CacheState
from kvtool.store.finding import Match
from kvtool.store.keys import Space
from kvtool.store.objects import StoreFullError
from kvtool.store.store import PutReport, Store
from kvtool.store.writing import uncut_reason
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.codecs import CodecPlan

DEFAULT = "rvq-4"


@dataclass
class Resumed:
    """A prompt's cache, but for its last token.

    Attributes:
        cache: live caches that hold all tokens but the last.
        last: that token, to be run for the first logits.
        usable: tokens that came out of the store.
        ran: tokens that the model ran.
        put: what joined the store, None where nothing did.
        notes: what a caller should know, why nothing did among it.
        codec: of what came out of the store, None where nothing did.
        quality: its lossy steps, with the errors that its files record.
    """

    cache: list[Any]
    last: int
    usable: int
    ran: int
    put: PutReport | None
    notes: tuple[str, ...]
    codec: str | None = None
    quality: tuple[dict[str, Any], ...] = ()


def resume(
    store: Store,
    tokens: Sequence[int],
    model: LoadedModel,
    *,
    codec: str | CodecPlan | None = None,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    put: bool = True,
    every: int | None = None,
    decode: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Resumed:
    """The cache of a prompt, from the store as far as it goes.

    What joins the store begins at a chunk, so that up to a chunk and the newest exact rows of what the store has are run again for it; a
    prompt that is there whole is not. Rows computed over codes are as good as these: files of such rows say so among their lossy steps.

    Args:
        store: where to look, and to put.
        tokens: of the prompt.
        model: that goes on.
        codec: of what is put, and then of what is looked for; None goes on with what is found, else puts `rvq-4`.
        calibration: tables for `codec`.
        put: whether what was run joins the store; where the store has no room or fails, a note says so, and the cache is as good.
        every: of a cache that is kept in one piece (a sliding window's, a recurrent layer's), also keep how it stood after each so many
            tokens, for prompts that begin alike: each time a whole cache.
        decode: as in `Archive.load`.
        progress: called with (tokens done, tokens in all).
    Raises:
        ValueError: no token, or ids outside the vocabulary.
        PermissionError: the store lets this token or user do nothing. One that is out of reach costs a prefill, and a note says so.
    """
    ids = token_ids(tokens)
    check_ids(model, ids)
    if not ids:
        raise ValueError("[resume] the prompt has no tokens.")
    if every is not None and (type(every) is not int or every < 1):
        raise ValueError(f"[resume] every must be a number of tokens, at least 1, but got {every!r}.")
    begin, last = ids[:-1], ids[-1]
    plan, tables = (None, None) if codec is None else (codec_plan(codec), resolve(calibration, model.info.weights))
    notes: tuple[str, ...] = ()
    found: list[Match] = []
    target, held, looked_at = None, None, False
    try:
        chosen = None if plan is None else _Target.of(store, model, plan, tables)
        found = store.matches(ids, model, space=None if chosen is None else chosen.space.key)
        match = next(iter(found), None)
        found = [one for one in found if match is not None and one.space.key == match.space.key]
        if looked_at := bool(begin) and match is not None and match.usable == len(begin):
            assert match is not None
            # Only reading tells whether it is all sound: where it is not, the rest is run and put as if it had not been found.
            held, notes = store.restored(ids, model, found=found, decode=decode, space=match.space.key)
        if not begin or (held is not None and held.usable == len(begin)):
            put = False
        target = _continuing(store, match, model, chosen) if put else None
        if target is None and put and looked_at and held is None:
            target = _continuing(store, None, model, chosen)
        if put and target is None:
            why = "it would go on from what is turned for this model, or from codes in one piece"
            notes = (f"what was run is not put into the store: {why}", *notes)
    except PermissionError:
        raise
    except OSError as error:
        # A service makes the names of what it holds: where it does not answer there is nothing to look for, and no name to put under.
        notes = (f"the store is out of reach, and what was run is not in it: {error}", *notes)
    restored: Restored | None = held
    met: tuple[str, ...] = ()
    if target is not None and not target.whole:
        # Whole chunks up to where the end of the prompt will begin: from there on all rows are exact ones.
        first = max(len(begin) - target.plan.recent, 0) // target.space.chunk * target.space.chunk
        restored = None
        if first:
            # What was loaded and not sound is another now.
            chunks = None if looked_at else [cut for one in found if (cut := _chunks(one, first)) is not None]
            key = target.space.key
            restored, met = store.restored(ids[: first + 1], model, found=chunks, ends=False, space=key, decode=decode)
    elif found and not looked_at:
        restored, met = store.restored(ids, model, found=found, decode=decode, space=found[0].space.key)
    usable = 0 if restored is None else restored.usable
    said = (note for loaded in (held, restored) if loaded is not None for note in loaded.notes)
    notes = tuple(dict.fromkeys((*notes, *met, *said)))
    how: dict[str, Any] = (
        {} if target is None else {"codec": target.plan, "calibration": target.calibration, "model": model, "chunk": target.space.chunk}
    )
    report: PutReport | None = None

    def keep(snapshot: Snapshot) -> PutReport | None:
        nonlocal notes
        try:
            return store.put(snapshot, **how)
        except (StoreFullError, OSError) as error:
            notes = (*notes, f"what was run is not in the store: {error}")
            return None

    if restored is None and (every is None or target is None or not target.whole):
        cache = prefill(model, begin, progress=progress)
        report = None if target is None else keep(capture(model, cache=cache, tokens=begin))
        return Resumed(cache, last, 0, len(begin), report, notes)
    cache = make_prompt_cache(model.model) if restored is None else restored.cache
    if target is None:
        _run(model, cache, begin[usable:], progress)
    elif target.whole:
        for at in range(usable, len(begin), every or len(begin)):
            stop = min(at + (every or len(begin)), len(begin))
            _run(model, cache, begin[at:stop], progress)
            report = keep(capture(model, cache=cache, tokens=begin[:stop]))
    else:
        growing = [one for one in cache if isinstance(one, CodedKVCache)]
        growths = [one.growth for one in growing]
        for one in growing:
            # Until they are in the store, the rows to come stay as the model computes them.
            one.growth = None
        _run(model, cache, begin[usable:], progress)
        report = keep(_since(model, cache, begin, usable, target.space))
        for one, growth in zip(growing, growths, strict=True):
            one.growth = growth
    codec, quality = (None, ()) if restored is None else (found[0].space.codec, restored.quality)
    return Resumed(cache, last, usable, len(begin) - usable, report, notes, codec, quality)


def put_prompt(
    store: Store,
    tokens: Sequence[int],
    model: LoadedModel,
    *,
    codec: str | CodecPlan = DEFAULT,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    every: int,
    progress: Callable[[int, int], None] | None = None,
) -> PutReport:
    """Run a prompt and put its cache; one that is kept in one piece also as it stood after each `every` tokens.

    Args:
        store, tokens, model, codec, calibration, progress: as `resume` takes them. Nothing is looked up.
        every: tokens between two such states. A cache that is cut into chunks needs none.
    Returns:
        What the whole prompt's put wrote; `new` and `bytes` count the earlier states too.
    Raises:
        ValueError: no token, ids outside the vocabulary, or `every` below 1.
        StoreFullError, OSError: as `Store.put`.
    """
    ids = token_ids(tokens)
    if type(every) is not int or every < 1:
        raise ValueError(f"[put_prompt] every must be a number of tokens, at least 1, but got {every!r}.")
    plan = codec_plan(codec)
    tables = resolve(calibration, model.info.weights)
    if not _Target.of(store, model, plan, tables).whole:
        return store.put(capture(model, ids, progress=progress), codec=plan, calibration=calibration, model=model)
    check_ids(model, ids)
    length = cached_part(model, len(ids))
    if length < 1:
        raise ValueError(f"[put_prompt] tokens must be more than the one that is run last, but got {len(ids)}.")
    cache = make_prompt_cache(model.model)
    reports = []
    for at in range(0, length, every):
        stop = min(at + every, length)
        _run(model, cache, ids[at:stop], None)
        reports.append(store.put(capture(model, cache=cache, tokens=ids[:stop]), codec=plan, calibration=calibration, model=model))
        if progress is not None:
            progress(stop, length)
    return replace(reports[-1], new=sum(one.new for one in reports), bytes=sum(one.bytes for one in reports))


@dataclass(frozen=True)
class _Target:
    """What new rows are put as."""

    space: Space
    plan: CodecPlan
    calibration: Calibration | None
    whole: bool  # in one piece

    @classmethod
    def of(cls, store: Store, model: LoadedModel, plan: CodecPlan, calibration: Calibration | None, chunk: int | None = None) -> "_Target":
        tables = calibration if is_calibrated(plan.k) or is_calibrated(plan.v) else None
        probes = probe_model(model.model)
        return cls(store.space(model.info, probes, plan, tables, chunk), plan, tables, uncut_reason(probes, plan, tables) is not None)

    def goes_on(self) -> bool:
        """Whether new rows can join what is there: chunks, or a piece that is exact, for codes would be coded once more."""
        return not self.whole or self.plan.lossless


def _continuing(store: Store, match: Match | None, model: LoadedModel, chosen: _Target | None) -> _Target | None:
    """What goes on as a match began; where there is none, what was chosen, else `rvq-4`. None where nothing can go on."""
    if match is None:
        return chosen or _Target.of(store, model, codec_plan(DEFAULT), None)
    if chosen is not None:
        return chosen if chosen.goes_on() else None
    about = match.space.about["codec"]
    tables = next(iter(store.known.calibrations(match.space.calibration)), None)
    for frame in ("", f",frame={about['frame']['k']}"):
        plan = codec_plan(f"k={about['k']},v={about['v']},sink={about['sink']}{frame}")
        target = _Target.of(store, model, plan, tables, match.space.chunk)
        if target.space.key == match.space.key and target.goes_on():
            return target
    return None


def _chunks(match: Match, most: int) -> Match | None:
    """A match's whole chunks within the first `most` tokens; None where it has none, or is one to the end of a prompt."""
    nodes = () if match.nodes[-1].tail else tuple(node for node in match.nodes if node.stop <= most)
    return replace(match, nodes=nodes, usable=nodes[-1].stop) if nodes else None


def _run(model: LoadedModel, cache: list[Any], tokens: Sequence[int], progress: Callable[[int, int], None] | None) -> None:
    for at in range(0, len(tokens), PREFILL_STEP):
        model.model(mx.array(list(tokens[at : at + PREFILL_STEP]))[None], cache=cache)
        mx.eval([one.state for one in cache])
        mx.clear_cache()
        if progress is not None:
            progress(min(at + PREFILL_STEP, len(tokens)), len(tokens))


def _since(model: LoadedModel, cache: Sequence[Any], tokens: Sequence[int], start: int, space: Space) -> Snapshot:
    """The rows of caches from a token on, as the model computed them."""
    probes = probe_model(model.model)
    states = []
    for one, probe in zip(cache, probes, strict=True):
        if isinstance(one, CodedKVCache):
            assert one.tail is not None
            held, first = one.tail, one.tail_first
        else:
            (state,) = take_states([one])
            assert isinstance(state.k, mx.array) and isinstance(state.v, mx.array)
            held, first = (state.k, state.v), 0
        k, v = (mx.contiguous(x[:, start - first :]) for x in held)
        mx.eval(k, v)
        states.append(CacheState(probe.cls, "full", offset=len(tokens), positions=((start, len(tokens)),), k=k, v=v))
    over = {"step": "prefill", "codec": space.codec, "note": f"tokens from {start} on were computed over {space.codec} of those before"}
    exact = codec_plan(f"k={space.about['codec']['k']},v={space.about['codec']['v']}").lossless
    return Snapshot(model.info, tuple(tokens), len(tokens), tuple(states), probes, () if exact else (over,))
