"""What a store keeps its objects in: whole, named, never changed once they are there."""

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from formats.errors import KVError

_NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]*(/[a-z0-9_-][a-z0-9._-]*)*")
MAX_NAME = 240


class Missing(KeyError):
    """No object of that name (any more)."""

    def __str__(self) -> str:
        return f"no object {self.args[0]!r}"


class StoreFullError(KVError):
    """An object does not fit, whatever else may go."""


@dataclass(frozen=True)
class Entry:
    """One object: its name, its bytes, and when it was last written or touched (seconds since 1970)."""

    name: str
    size: int
    used: float


class Objects(Protocol):
    """A back end. Every call may come from many threads and processes at once; OSError where the medium fails.

    An object is visible whole or not at all, and its bytes never change while it has its name: what was read may be kept.
    """

    @property
    def name_key(self) -> bytes | None:
        """32 bytes that names of objects are made with where they are encrypted, else None."""

    @property
    def scratch(self) -> Path:
        """A local folder of this process, for files that are about to be written; it is made when it is first asked for."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes from `start` on, all or `length` of them (fewer where the object ends).

        Raises:
            Missing: no such object.
        """

    def path(self, name: str) -> Path | None:
        """A local file with the object's bytes, to map; None where there is none (objects elsewhere, encrypted objects, no such object)."""

    def write(self, name: str, source: Path | bytes) -> bool:
        """Make an object, atomically and durably: after a crash at any moment it is there whole or not at all.

        Args:
            name: what `check_name` accepts.
            source: its bytes, or a file with them. A file in `scratch` is taken over (it is gone afterwards), any other is copied.
        Returns:
            False where an object of that name was there already; that one stays.
        """

    def size(self, name: str) -> int | None:
        """Bytes of an object, None where there is none."""

    def sizes(self, names: Sequence[str], lookup: bool = False) -> list[int | None]:
        """The same of several, in the time that one takes where that can be.

        Args:
            lookup: whether a prompt is looked for, to be read: a service counts those.
        """

    def names(self, prefix: str = "") -> Iterator[Entry]:
        """All objects whose names begin with `prefix`, in any order; one that comes or goes meanwhile may or may not be among them."""

    def page(self, prefix: str, after: str, count: int) -> list[Entry]:
        """The first `count` objects in order of their names, of those that begin with `prefix` and come after `after`."""

    def remove(self, name: str) -> bool:
        """Remove an object; False where there was none. Who has it open or mapped keeps it."""

    def touch(self, *names: str) -> None:
        """Record that objects were used now; nothing happens where one is gone."""

    def now(self) -> float:
        """Seconds since 1970 by the clock that `Entry.used` is of, a server's where objects are on one: this machine's may be another."""

    def unfinished(self) -> int:
        """Bytes that writers hold beyond the objects: files being written, and what writers that died left."""

    def sweep(self) -> int:
        """Remove what writers that died left; the bytes freed."""

    def close(self) -> None:
        """Give back what it holds for this process, `scratch` among it; it may be used again afterwards."""


def first(entries: Iterable[Entry], after: str, count: int) -> list[Entry]:
    """The first `count` of these in order of their names that come after `after`: a page of what cannot be listed in order."""
    return heapq.nsmallest(count, (entry for entry in entries if entry.name > after), key=lambda entry: entry.name)


def is_name(name: str) -> bool:
    """Whether objects may have the name; a listing from elsewhere may have others."""
    return isinstance(name, str) and len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """The name, if objects may have it: parts of a-z 0-9 . _ - that do not begin with a dot, joined by slashes.

    Raises:
        ValueError: it is none.
    """
    if not is_name(name):
        raise ValueError(
            f"[store] an object's name must be parts of a-z 0-9 . _ - (none begins with a dot) joined by /, at most {MAX_NAME} characters, "
            f"but got {name!r}."
        )
    return name
