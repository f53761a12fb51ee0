"""The store: prompt caches in a folder (or elsewhere), found by the tokens they begin with."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from formats.manifest import ModelInfo
from kvtool.archive import Restored
from kvtool.calibrations import Calibration, is_calibrated, resolve
from kvtool.capturing import Snapshot, token_ids
from kvtool.encoding import codec_plan
from kvtool.hidden import inputs_left_out
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe
from kvtool.store import tending
from kvtool.store.addresses import open_objects
from kvtool.store.checking import CheckReport, check
from kvtool.store.described import Descriptions
from kvtool.store.finding import Match, matches
from kvtool.store.joined import quality_of
from kvtool.store.keys import CHUNK, Space, chunk_name, node_of, tail_name
from kvtool.store.listing import Listed, kinds, listed
from kvtool.store.local_copy import LocalCopy
from kvtool.store.measured import measured
from kvtool.store.objects import Objects
from kvtool.store.opening import Lost, alive, write
from kvtool.store.room import Room
from kvtool.store.writing import Piece, first_row, whole_reason, write_piece
from veloxquant_mlx.codecs import CodecPlan

logger = logging.getLogger(__name__)

ATTEMPTS = 8  # lookups of one load: objects may go between a lookup and their opening


@dataclass(frozen=True)
class PutReport:
    """What a put wrote.

    Attributes:
        id: of the prompt, for `pin` and `remove`.
        codec: in full.
        tokens: of the prompt.
        chunks: whole chunks that it consists of.
        new: objects written now; the others were there.
        bytes: written, what describes them included.
        whole: why the prompt is kept in one piece, None where it is cut.
        notes: what of the snapshot is not kept.
        quality: the lossy steps, with their measured errors, behind what was written now; where nothing was, behind the prompt's end. A
            mean over objects. Empty of what is exact, or cannot be read.
    """

    id: str
    codec: str
    tokens: int
    chunks: int
    new: int
    bytes: int
    whole: str | None = None
    notes: tuple[str, ...] = ()
    quality: tuple[dict[str, Any], ...] = ()


class Store:
    """Prompt caches by their tokens. Any number of processes may use one at once.

    Args:
        where: a folder or another address that `open_objects` takes, or a back end.
        quota: bytes that it may take, files on their way included; None for no end.
        chunk: tokens of a chunk of what is put.
    """

    def __init__(self, where: str | os.PathLike[str] | Objects, *, quota: int | None = None, chunk: int = CHUNK) -> None:
        if quota is not None and (type(quota) is not int or quota < 1):
            raise ValueError(f"[Store] quota must be a number of bytes, at least 1, but got {quota!r}.")
        self.objects: Objects = open_objects(where) if isinstance(where, str | os.PathLike) else where
        self.chunk = chunk
        self.counts = {"hits": 0, "misses": 0, "tokens": 0, "broken": 0}
        self.known = Descriptions(self.objects)
        self.room = Room(self.objects, quota, self.known)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the back end holds for this process."""
        self.objects.close()

    def space(
        self, model: ModelInfo, probes: Sequence[CacheProbe], plan: CodecPlan, tables: Calibration | None, chunk: int | None = None
    ) -> Space:
        """The space of what a model computes and `plan` codes with these tables; `chunk` is that of what is put where it is not given."""
        return Space.of(model, probes, plan, None if tables is None else tables.digest, chunk or self.chunk, self.objects.name_key)

    def put(
        self,
        snapshot: Snapshot,
        *,
        codec: str | CodecPlan = "rvq-4",
        sink: int | None = None,
        recent: int | None = None,
        frame: str | None = None,
        calibration: str | os.PathLike[str] | Calibration | None = None,
        model: LoadedModel | None = None,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> PutReport:
        """Keep a prompt's cache: its whole chunks, which other prompts that begin alike share, and its end.

        Args:
            snapshot: from `kvtool.capture`. Its first rows may be missing where the store has their chunks.
            codec, sink, recent, frame, calibration, model: as in `kvtool.save`; `recent` is at most a chunk.
            chunk: tokens of a chunk, where they are not the store's.
            progress: called with (objects done, objects in all).
        Raises:
            ValueError: tokens that are not known, or rows missing that the store does not have.
            IncompatibleError: a model without an identity, or a store that is encrypted with another key.
            StoreFullError: it does not fit into the quota.
            OSError: as the system gives it; what was written before is whole.
        """
        if snapshot.tokens is None or not snapshot.length:
            raise ValueError("[put] a prompt is found by its tokens: they must be known, and at least one.")
        plan = codec_plan(codec, sink, recent, frame)
        chunk = self.chunk if chunk is None else chunk
        if plan.recent > chunk:
            raise ValueError(f"[put] recent must be at most a chunk of {chunk} tokens, but got {plan.recent}.")
        calibrated = is_calibrated(plan.k) or is_calibrated(plan.v)
        tables = resolve(calibration, snapshot.model.effective_weights) if calibrated else None
        if calibration is not None and not calibrated:
            raise ValueError(f"[put] {plan.spec()} takes no calibration: leave it out.")
        # Refuses to mix what is encrypted, and how.
        self.known.spaces()
        whole = whole_reason(snapshot, plan, tables)
        space = self.space(snapshot.model, snapshot.probes, plan, tables, chunk)
        pieces = _pieces(space, snapshot, plan.recent, whole is not None)
        keep, held = frozenset(piece.name for piece in pieces), first_row(snapshot)
        new = size = 0
        steps: dict[str, tuple[int, tuple[dict[str, Any], ...]]] = {}  # of what was written
        # Again where another process evicts a chunk while later ones are written.
        for _ in range(ATTEMPTS):
            size += self.known.write(self.room.write, space, snapshot, tables, model)
            sizes = self.objects.sizes([piece.name for piece in pieces])
            missing, there = [piece for piece, size in zip(pieces, sizes, strict=True) if size is None], sum(filter(None, sizes))
            for done, piece in enumerate(missing, len(pieces) - len(missing) + 1):
                if piece.start < held:
                    lacking = f"the store lacks tokens {piece.start} to {piece.stop}"
                    raise ValueError(f"[put] the snapshot must begin at or before what is missing, but it begins at {held} and {lacking}.")
                extra = {"store": {"space": space.key, "parent": piece.parent, "start": piece.start, "recent": piece.recent}}
                produce = partial(
                    _written,
                    steps,
                    snapshot=snapshot,
                    piece=piece,
                    plan=plan,
                    calibration=tables,
                    model=model,
                    extra=extra,
                    whole=whole is not None,
                )
                written = self.room.write(piece.name, produce, keep)
                new, size, there = new + (written > 0), size + written, there + written
                # All others would go for it before the last chunk fails. What holds a sink, exact, tells nothing of what follows.
                if not piece.tail and piece.start >= plan.sink:
                    left = sum(not later.tail for later in missing[done - len(pieces) + len(missing) :])
                    self.room.expect(there, left * written)
                if progress is not None:
                    progress(done, len(pieces))
            if not missing:
                break
        self.objects.touch(*(piece.name for piece in pieces))
        last = node_of(pieces[-1].name)
        assert last is not None
        why = "a store keeps keys and values alone"
        notes = () if not snapshot.inputs else (inputs_left_out(snapshot.inputs, snapshot.model.name, why),)
        chunks = sum(not piece.tail for piece in pieces)
        quality = quality_of(steps.values() or [(1, measured(self.objects, pieces[-1].name) or ())])
        return PutReport(last.id, plan.full_spec(), snapshot.length, chunks, new, size, whole, notes, quality)

    def lookup(self, tokens: Sequence[int], model: LoadedModel, *, ends: bool = True, space: str | None = None) -> Match | None:
        """The longest beginning of these tokens that is here for a model, of any codec; None where there is none.

        Args:
            tokens: of a prompt; the last one is never part of what is found.
            model: that would go on.
            ends: also look for prompts that end within these tokens; without, whole chunks alone count.
            space: key of the one space to look in.
        """
        return next(iter(self.matches(tokens, model, ends=ends, space=space)), None)

    def matches(self, tokens: Sequence[int], model: LoadedModel, *, ends: bool = True, space: str | None = None) -> list[Match]:
        """All that `lookup` chooses from, the longest first."""
        return self._matches(_checked(tokens), model, ends, only=space)

    def _matches(self, ids: Sequence[int], model: LoadedModel, ends: bool, *more: Any, **only: Any) -> list[Match]:
        """What fits; nothing, with a logged warning, where the back end does not answer: a prefill takes longer than it, but works."""
        try:
            return matches(self.objects, self.known, ids, model, ends, *more, **only)
        except PermissionError:
            raise
        except OSError as error:
            logger.warning("nothing is found: %s", error)
            return []

    def load(
        self,
        tokens: Sequence[int],
        model: LoadedModel,
        *,
        decode: bool = False,
        mapped: bool = True,
        ends: bool = True,
        space: str | None = None,
        beyond: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Restored | None:
        """The cache of the longest beginning of these tokens that is here, as `kvtool.load` gives one; None where there is none.

        `usable` tokens are in it, and `pending()` gives the others, which the model has still to run: at least the last one. An object that
        is damaged or cannot be read is as good as absent, which a note says; a damaged one is removed, so that the next put writes it anew.

        Args:
            tokens: of the prompt.
            model: that will go on.
            decode, mapped, progress: as in `Archive.load`.
            ends, space: as in `lookup`.
            beyond: tokens that the caller has already: what is no longer is left where it is, and counts as neither hit nor miss.
        Raises:
            ValueError: ids that no model has.
        """
        how: dict[str, Any] = {"decode": decode, "mapped": mapped, "progress": progress}
        return self.restored(tokens, model, ends=ends, space=space, beyond=beyond, **how)[0]

    def restored(
        self,
        tokens: Sequence[int],
        model: LoadedModel,
        *,
        found: Sequence[Match] | None = None,
        ends: bool = True,
        space: str | None = None,
        beyond: int = 0,
        decode: bool = False,
        mapped: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Restored | None, tuple[str, ...]]:
        """What `load` gives, and what it met of objects that are damaged or cannot be read, also where nothing else is there.

        Args:
            found: what `matches` gave for these tokens, where it was asked already; what has gone since is looked up again.
            tokens, model, ends, space, beyond, decode, mapped, progress: as in `load`.
        """
        ids = _checked(tokens)
        avoid: frozenset[str] = frozenset()
        notes: list[str] = []
        gone = 0
        found = self._matches(ids, model, ends, avoid, space) if found is None else found
        while found:
            if found[0].usable <= beyond:
                return None, tuple(notes)
            try:
                restored = alive(self.objects, self.known, found[0], ids, model, decode=decode, mapped=mapped, progress=progress)
            except Lost as lost:
                # What went since the lookup is looked up again; what keeps going is given up, as is what cannot be used.
                again = lost.note is None or (lost.damaged and isinstance(self.objects, LocalCopy) and self.objects.forget(lost.name))
                gone += again
                if not again or gone >= ATTEMPTS:
                    avoid |= {lost.name}
                if lost.note is not None:
                    logger.warning("%s", lost.note)
                    notes.append(lost.note)
                if lost.damaged and not again:
                    self.counts["broken"] += 1
                    self.objects.remove(lost.name)
                found = self._matches(ids, model, ends, avoid, space)
                continue
            self.counts["hits"] += 1
            self.counts["tokens"] += restored.usable
            restored.notes = (*notes, *restored.notes)
            try:
                self.objects.touch(*(node.name for node in found[0].nodes))
            except OSError as error:
                logger.warning("not marked as used: %s", error)
            return restored, tuple(notes)
        self.counts["misses"] += 1
        return None, tuple(notes)

    def get(self, tokens: Sequence[int], model: LoadedModel, path: str | os.PathLike[str], *, ends: bool = True) -> Match | None:
        """Write the longest beginning of these tokens that is here as one file, its codes as they are; None where there is none.

        Args:
            tokens, model, ends: as in `lookup`; all of the tokens may be part of it.
            path: of the file, for `kvtool.load` and `kvtool import`.
        Raises:
            Lost: an object is gone, damaged or cannot be read.
        """
        ids = _checked(tokens)
        # One token more, so that the last one counts.
        match = next(iter(self._matches([*ids, 0], model, ends)), None)
        if match is None:
            return None
        write(self.objects, self.known, match, ids, model, path)
        return match

    def pin(self, id: str) -> str:
        """Keep an object, and all that it follows, whatever the quota says; its whole id.

        Raises:
            IncompatibleError: no such object, or several.
        """
        return tending.pin(self.objects, self.room, id)

    def unpin(self, id: str) -> str:
        """Let an object go again when room is needed; its whole id.

        Raises:
            IncompatibleError: no such pin, or several.
        """
        return tending.unpin(self.objects, id)

    def remove(self, id: str) -> int:
        """Remove an object, what follows it, and the chunks before it that nothing else needs; the bytes freed.

        Raises:
            IncompatibleError: no such object, several, or a pinned one among them.
        """
        return tending.remove(self.objects, self.known, id)

    def gc(self) -> int:
        """Remove what writers that died left, what no prompt can reach or needs, and what the quota has no room for; the bytes freed."""
        return self.objects.sweep() + self.room.collect() + self.room.fit()

    def check(self, progress: Callable[[int, int], None] | None = None) -> CheckReport:
        """Read every object and compare it with its name; nothing is changed."""
        # Of what is shared, not of this machine's copies.
        return check(self.objects.remote if isinstance(self.objects, LocalCopy) else self.objects, progress)

    def entries(self) -> list[Listed]:
        """All objects with rows, those of one model and codec together, in the order of their tokens."""
        return listed(self.objects.names(), self.known)

    def stats(self) -> dict[str, Any]:
        """Objects and bytes by kind, what is on its way, the quota, and what this process found."""
        by_kind, unfinished = kinds(self.objects.names()), self.objects.unfinished()
        total = sum(kind["bytes"] for kind in by_kind.values()) + unfinished
        counts = {**self.counts, "evicted": self.room.evicted}
        return {"kinds": by_kind, "unfinished_bytes": unfinished, "bytes": total, "quota": self.room.quota, **counts}


def _written(steps: dict[str, tuple[int, tuple[dict[str, Any], ...]]], path: Path, snapshot: Snapshot, piece: Piece, **how: Any) -> None:
    """Write a piece, and take down what its file records."""
    steps[piece.name] = (piece.stop - piece.start, write_piece(path, snapshot, piece, **how))


def _checked(tokens: Sequence[int]) -> list[int]:
    """Token ids that a key can be made of. Which of them the model has is not asked: the store holds no others."""
    ids = token_ids(tokens)
    if ids and not (min(ids) >= 0 and max(ids) < 1 << 31):
        raise ValueError(f"[Store] token ids must be in 0 .. 2**31 - 1, but got {min(ids)} .. {max(ids)}.")
    return ids


def _pieces(space: Space, snapshot: Snapshot, recent: int, whole: bool) -> list[Piece]:
    """The objects of a prompt: its whole chunks, and its end with the newest rows, which begins where a chunk does."""
    assert snapshot.tokens is not None
    length, chunk = snapshot.length, space.chunk
    ids = snapshot.tokens[:length]
    if whole:
        return [Piece(tail_name(space.key, ids, 0, recent, space.secret), 0, length, recent, space.key, tail=True)]
    keys = [space.key, *space.keys(ids)]
    pieces = [Piece(chunk_name(key, keys[i], i * chunk, chunk), i * chunk, (i + 1) * chunk, 0, keys[i]) for i, key in enumerate(keys[1:])]
    begin = (length - recent) // chunk * chunk if length > recent else 0
    if begin < length:
        parent = keys[begin // chunk]
        pieces.append(Piece(tail_name(parent, ids[begin:], begin, recent, space.secret), begin, length, recent, parent, tail=True))
    return pieces
