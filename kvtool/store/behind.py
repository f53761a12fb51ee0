"""A server's prompts in a store: written behind it, by a thread of their own, and read before it prefills."""

import copy
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, trim_prompt_cache

from formats.errors import KVError
from kvtool.calibrations import Calibration
from kvtool.capturing import capture
from kvtool.encoding import codec_plan
from kvtool.model import LoadedModel
from kvtool.store.store import Store
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.codecs import CodecPlan

logger = logging.getLogger(__name__)

WAITING = 2 << 30  # bytes of caches that may wait to be written, unless a single one has more
PATIENCE = 10.0  # seconds that a finished request waits for such room; a store that stands still for as long is not waited for again
LAST = 60.0  # seconds that the end waits for what is still to be written
ASKED = 64  # prompts whose end is remembered until their answer comes


@dataclass
class _Entry:
    """A cache that waits: of which tokens, at which lengths it ends a prompt that is to be found (ascending), and its bytes."""

    tokens: list[int]
    cache: list[Any]
    ends: list[int]
    bytes: int


class Behind:
    """Prompts of a model in a store; a context manager, which at its end writes what waits.

    What waits is bounded in bytes: beyond that a finished request waits for the disk, and those behind it with it. A cache that goes on
    from one that waits takes its place.

    Args:
        store: where they are kept.
        model: the model that is served.
        codec, calibration: of what is put, as in `Store.put`.
        empty: from `kvtool.make_cache`, as the server keeps its caches: rows that join what comes from the store become codes as in these.
            None: they stay as the model computes them, and are coded once, when they are put.
        waiting: bytes of caches that may wait.
        patience, last: seconds that a request waits for room, and that the end waits for the rest.
    """

    def __init__(
        self,
        store: Store,
        model: LoadedModel,
        codec: str | CodecPlan = "rvq-4",
        calibration: str | os.PathLike[str] | Calibration | None = None,
        *,
        empty: Sequence[Any] | None = None,
        waiting: int = WAITING,
        patience: float = PATIENCE,
        last: float = LAST,
    ) -> None:
        self.store, self.model, self.plan, self.calibration = store, model, codec_plan(codec), calibration
        self.waiting, self.patience, self.last = waiting, patience, last
        self.lost = 0  # prompts that are not in the store, whatever the cause
        self._empty = empty
        self._asked: deque[list[int]] = deque(maxlen=ASKED)
        self._entries: deque[_Entry] = deque()
        self._writing: _Entry | None = None
        self._changed = threading.Condition()
        self._ending = self._still = False
        self._said: set[str] = set()  # kinds of trouble that were warned of since the last success
        self._thread = threading.Thread(target=self._write, name="kvtool-store", daemon=True)

    def __enter__(self) -> "Behind":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(self.last)
        with self._changed:
            left = [*([self._writing] if self._writing else []), *self._entries]
            self._entries.clear()
            self.lost += sum(len(entry.ends) for entry in left)
        if self.lost:
            late = f", {sum(len(entry.ends) for entry in left)} of them not written {self.last:g} seconds after the end" if left else ""
            logger.warning("%d prompts of this run are not in the store%s", self.lost, late)

    def found(self, tokens: Sequence[int], held: int) -> tuple[list[Any], int] | None:
        """A cache of more than `held` of these tokens, and of how many, where the store has one; the last token is never among them."""
        ids = list(tokens)
        self._asked.append(ids)
        try:
            restored = self.store.load(ids, self.model, beyond=held)
        except (KVError, OSError, ValueError) as error:
            self._warn("load", "nothing is taken from the store: %s", error)
            return None
        self._said.discard("load")
        if restored is None:
            return None
        logger.info("%d of %d tokens come from the store", restored.usable, len(ids))
        like = [None] * len(restored.cache) if self._empty is None else self._empty
        return [_growing_as(cache, one) for cache, one in zip(restored.cache, like, strict=True)], restored.usable

    def later(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Put a cache that nobody changes any more, and the prompt that it began with: not now, but before the end."""
        # The thread reads what is there: evaluating is this thread's.
        mx.eval([one.state for one in cache])
        ids, ends = list(tokens), {len(tokens)}
        trimmable = can_trim_prompt_cache(cache)
        for prompt in [asked for asked in self._asked if len(asked) < len(ids) and ids[: len(asked)] == asked]:
            self._asked.remove(prompt)
            if trimmable:
                ends.add(len(prompt))
        with self._changed:
            if trimmable:
                for entry in [one for one in self._entries if one.tokens == ids[: len(one.tokens)]]:
                    self._entries.remove(entry)
                    ends.update(entry.ends)
            new = _Entry(ids, cache, sorted(ends), sum(one.nbytes for one in cache))
            if not self._still:
                self._still = not self._changed.wait_for(lambda: self._room(new), self.patience)
            if self._room(new):
                self._entries.append(new)
                self._changed.notify_all()
                return
            self.lost += len(new.ends)
        self._warn("room", "the store is too slow: %d bytes may wait for it; a cache of %d tokens is passed over", self.waiting, len(ids))

    def _room(self, new: _Entry) -> bool:
        held = [*self._entries, *([self._writing] if self._writing else [])]
        return not held or sum(entry.bytes for entry in held) + new.bytes <= self.waiting

    def _warn(self, kind: str, what: str, *about: Any) -> None:
        """Once, until it went well again: a store that is away fails every request."""
        logger.log(logging.DEBUG if kind in self._said else logging.WARNING, what, *about)
        self._said.add(kind)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._entries or self._ending)
                if not self._entries:
                    return
                entry = self._writing = self._entries.popleft()
            failed = sum(not self._put(entry, end) for end in entry.ends)
            with self._changed:
                self.lost += failed
                self._writing, self._still = None, False
                self._changed.notify_all()

    def _put(self, entry: _Entry, end: int) -> bool:
        cache = entry.cache
        if end < len(entry.tokens):
            cache = copy.deepcopy(cache)
            trim_prompt_cache(cache, len(entry.tokens) - end)
        try:
            snapshot = capture(self.model, cache=cache, tokens=entry.tokens[:end])
            report = self.store.put(snapshot, codec=self.plan, calibration=self.calibration, model=self.model)
        except (KVError, OSError, ValueError) as error:
            self._warn("put", "a cache of %d tokens is not put into the store: %s", end, error)
            return False
        logger.info("%d tokens are in the store: %d new objects, %d bytes", report.tokens, report.new, report.bytes)
        self._said -= {"put", "room"}
        return True


def _growing_as(cache: Any, like: Any) -> Any:
    """A layer from the store whose rows to come are kept as those of `like` are; what was stored exactly becomes such codes too."""
    growth = like.growth if isinstance(like, CodedKVCache) else None
    if isinstance(cache, CodedKVCache):
        cache.growth = growth
    elif growth is not None and type(cache) is KVCache and not cache.empty():
        coded = CodedKVCache((), growth)
        coded.update_and_fetch(*cache.keys_and_values())
        coded.encode_older()
        return coded
    return cache
