"""Objects that are still on their way: each tensor can be had as soon as its bytes are there.

Layers lie one after the other in a file. Files that one cache consists of are fetched side by side, the beginnings of all before the next
parts of any, so that a cache is built layer by layer while the rest comes.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from formats.alike import Outline
from formats.container import Reader
from formats.errors import KVError
from formats.header import MAX_HEADER
from kvtool.store.objects import Missing

LEAST, MOST = 1 << 19, 8 << 20  # bytes of a request
PARTS = 4  # of a file, where that gives requests of such a size
AT_ONCE = 8  # requests

Read = Callable[[str, int, int], bytes]


class Coming:
    """One file that is filled while others read from it.

    Args:
        path: a new file.
        size: its bytes in the end.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.error: Exception | None = None
        self._ends: dict[int, int] = {}  # of the parts that are there, by where they begin
        self._there = 0  # bytes from the beginning on
        self._changed = threading.Condition()
        with open(path, "xb") as file:
            file.truncate(size)

    def put(self, start: int, data: bytes) -> None:
        """A part has come."""
        # Opened for each part: a long prompt has more files than a process may have open.
        with open(self.path, "r+b", buffering=0) as file:
            view, at = memoryview(data), start
            while len(view):
                written = os.pwrite(file.fileno(), view, at)
                view, at = view[written:], at + written
        with self._changed:
            self._ends[start] = at
            while (end := self._ends.pop(self._there, None)) is not None:
                self._there = end
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def wait(self, end: int) -> None:
        """Until the first `end` bytes are there.

        Raises:
            OSError, Missing, KVError: what ended the fetching of this file.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._there >= end or self.error is not None)
            if self._there < end and self.error is not None:
                raise self.error


class Arriving(Reader):
    """A file of which a part is there. What its header says is known at once, tensors when they have come."""

    there = False

    def __init__(self, coming: Coming, like: Outline | None = None) -> None:
        self._coming = coming
        coming.wait(min(8, coming.size))
        with open(coming.path, "rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
        # One that says to be longer is refused for it, without waiting for the rest.
        coming.wait(min(header, coming.size) if header <= MAX_HEADER else 8)
        super().__init__(coming.path, like)

    def _digest(self, start: int, stop: int) -> str:
        self._coming.wait(stop)
        return super()._digest(start, stop)

    def array(self, name: str, *, verify: bool = True) -> np.ndarray:
        info = self.tensors[name]
        self._coming.wait(info.offset + info.padded)
        return super().array(name, verify=verify)


class Fetching:
    """Fetches files side by side, until all is there or `stop`.

    Args:
        read: bytes of an object: name, first byte, how many.
        sizes: of the objects, by name.
        path: where each is to be.
    """

    def __init__(self, read: Read, sizes: dict[str, int], path: Callable[[str], Path]) -> None:
        self._read = read
        self.files = {name: Coming(path(name), size) for name, size in sizes.items()}
        self._stopped = False
        self._pool = ThreadPoolExecutor(AT_ONCE, "kvtool-fetch")
        for name, start, length in _in_turn(sizes):
            self._pool.submit(self._part, name, start, length)

    def _part(self, name: str, start: int, length: int) -> None:
        file = self.files[name]
        if self._stopped or file.error is not None:
            file.fail(InterruptedError("fetching was given up"))
            return
        try:
            data = self._read(name, start, length)
            if len(data) != length:
                raise Missing(name)
            file.put(start, data)
        except (OSError, Missing, KVError) as error:
            file.fail(error)

    def wait(self) -> None:
        """Until all has come, or failed."""
        self._pool.shutdown()

    def stop(self) -> None:
        """Fetch nothing more; a request that is under way ends by itself, and finds no file."""
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for file in self.files.values():
            file.fail(InterruptedError("fetching was given up"))


def _in_turn(sizes: dict[str, int]) -> Sequence[tuple[str, int, int]]:
    """(name, start, length) of all parts, those that begin at the smaller share of their file first."""
    parts = []
    for order, (name, size) in enumerate(sizes.items()):
        length = min(max(-(-size // PARTS), LEAST), MOST)
        parts += [(start / size, order, name, start, min(length, size - start)) for start in range(0, size, length)]
    return [part[2:] for part in sorted(parts)]
