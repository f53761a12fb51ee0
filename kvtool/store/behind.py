"""A server's prompts in a store: written behind it, by a thread of their own, and read before it prefills."""

import copy
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from formats.errors import KVError
from kvtool.calibrations import Calibration
from kvtool.capturing import capture
from kvtool.encoding import codec_plan
from kvtool.model import LoadedModel
from kvtool.store.store import Store
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.codecs import CodecPlan

logger = logging.getLogger(__name__)

WAITING = 8  # caches at most that wait to be written: beyond that the disk is too slow, and the newest is passed over
ASKED = 64  # prompts whose end is remembered until their answer comes

Entry = tuple[list[int], list[Any]]


class Behind:
    """Prompts of a model in a store; a context manager, which at its end writes what waits.

    Args:
        store: where they are kept.
        model: the model that is served.
        codec, calibration: of what is put, as in `Store.put`.
    """

    def __init__(
        self,
        store: Store,
        model: LoadedModel,
        codec: str | CodecPlan = "rvq-4",
        calibration: str | os.PathLike[str] | Calibration | None = None,
    ) -> None:
        self.store, self.model, self.plan, self.calibration = store, model, codec_plan(codec), calibration
        self.passed_over = 0
        self._asked: deque[list[int]] = deque(maxlen=ASKED)
        self._waiting: queue.Queue[Entry | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._write, name="kvtool-store", daemon=True)

    def __enter__(self) -> "Behind":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._waiting.put(None)
        self._thread.join()

    def found(self, tokens: Sequence[int], held: int) -> tuple[list[Any], int] | None:
        """A cache of more than `held` of these tokens, and of how many, where the store has one; the last token is never among them.

        Rows that join it stay as the model computes them: they are coded once, when they are put.
        """
        ids = list(tokens)
        self._asked.append(ids)
        try:
            restored = self.store.load(ids, self.model, beyond=held)
        except (KVError, OSError, ValueError) as error:
            logger.warning("nothing is taken from the store: %s", error)
            return None
        if restored is None:
            return None
        for cache in restored.cache:
            if isinstance(cache, CodedKVCache):
                cache.growth = None
        logger.info("%d of %d tokens come from the store", restored.usable, len(ids))
        return restored.cache, restored.usable

    def later(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Put a cache that nobody changes any more, and the prompt that it began with; not now, and not at all where too many wait."""
        # The thread reads what is there: evaluating is this thread's.
        mx.eval([one.state for one in cache])
        ids = list(tokens)
        for prompt in [asked for asked in self._asked if len(asked) < len(ids) and ids[: len(asked)] == asked]:
            self._asked.remove(prompt)
            if can_trim_prompt_cache(cache):
                begin = copy.deepcopy(cache)
                trim_prompt_cache(begin, len(ids) - len(prompt))
                self._put((prompt, begin))
        self._put((ids, cache))

    def _put(self, entry: Entry) -> None:
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self.passed_over += 1
            logger.warning("%d caches wait for the store already: one of %d tokens is passed over", WAITING, len(entry[0]))

    def _write(self) -> None:
        while (entry := self._waiting.get()) is not None:
            tokens, cache = entry
            try:
                snapshot = capture(self.model, cache=cache, tokens=tokens)
                report = self.store.put(snapshot, codec=self.plan, calibration=self.calibration, model=self.model)
                logger.info("%d tokens are in the store: %d new objects, %d bytes", report.tokens, report.new, report.bytes)
            except (KVError, OSError, ValueError) as error:
                logger.warning("a cache of %d tokens is not put into the store: %s", len(tokens), error)
