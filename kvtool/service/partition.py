"""One tenant's objects among those of all: the same names for everybody, under a folder that is the tenant's own."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtool.store.objects import Entry, Missing, Objects, check_name


class Partition:
    """See `Objects`.

    Args:
        objects: what holds the objects of all.
        folder: the part that is this one's, such as "tenants/4f0a".
        name_key: 32 bytes that the names of its objects are made with.
        changed: called when one of its objects has come or gone.
    """

    def __init__(self, objects: Objects, folder: str, name_key: bytes, changed: Callable[[], None] = lambda: None) -> None:
        self._objects = objects
        self._prefix = check_name(folder) + "/"
        self._name_key = name_key
        self._changed = changed

    def __repr__(self) -> str:
        return f"Partition({self._objects!r}, {self._prefix!r})"

    @property
    def name_key(self) -> bytes | None:
        return self._name_key

    @property
    def scratch(self) -> Path:
        return self._objects.scratch

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return self._objects.read(self._full(name), start, length)
        except Missing:
            raise Missing(name) from None

    def path(self, name: str) -> Path | None:
        return self._objects.path(self._full(name))

    def write(self, name: str, source: Path | bytes) -> bool:
        try:
            return self._objects.write(self._full(name), source)
        finally:
            self._changed()

    def size(self, name: str) -> int | None:
        return self._objects.size(self._full(name))

    def sizes(self, names: Sequence[str], lookup: bool = False) -> list[int | None]:
        return self._objects.sizes([self._full(name) for name in names], lookup)

    def names(self, prefix: str = "") -> Iterator[Entry]:
        for entry in self._objects.names(self._prefix + prefix):
            yield Entry(entry.name[len(self._prefix) :], entry.size, entry.used)

    def page(self, prefix: str, after: str, count: int) -> list[Entry]:
        found = self._objects.page(self._prefix + prefix, self._prefix + after, count)
        return [Entry(entry.name[len(self._prefix) :], entry.size, entry.used) for entry in found]

    def remove(self, name: str) -> bool:
        try:
            return self._objects.remove(self._full(name))
        finally:
            self._changed()

    def touch(self, *names: str) -> None:
        self._objects.touch(*(self._full(name) for name in names))

    def now(self) -> float:
        return self._objects.now()

    def unfinished(self) -> int:
        return 0  # files on their way are everybody's: a tenant neither sees nor pays for another's

    def sweep(self) -> int:
        return 0  # as above; `Keeping` sweeps for all

    def close(self) -> None:
        pass  # what holds the objects of all goes on

    def _full(self, name: str) -> str:
        # Checked before the folder is put in front: "../x" is no name of a part.
        return self._prefix + check_name(name)
