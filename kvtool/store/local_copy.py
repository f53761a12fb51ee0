"""A bounded folder of copies in front of a back end without files, so that its objects can be mapped.

The other back end has the say: what this folder holds can be thrown away at any time. Any number of processes on any number of machines may
share the back end, each machine with a folder of its own, which its processes may share too. A copy is checked with every digest of the
file before it is kept. Copies are plain files, also of encrypted objects: where that must not be, put the folder on an encrypted or memory
disk."""

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from formats.container import open_container
from formats.errors import IntegrityError, KVError
from kvtool.store.arriving import Fetching
from kvtool.store.folder import Folder
from kvtool.store.objects import Entry, Missing, Objects
from kvtool.store.scratch import Scratch

logger = logging.getLogger(__name__)

QUOTA = 16 << 30
# One read of the back end: bounded, so that a timeout is about a stalled connection and not about a big object.
_BLOCK = 16 << 20
_COUNT_EVERY = 5.0  # seconds


def check_container(path: Path) -> None:
    """Read a kvtool file with every check that it has.

    Raises:
        KVError: what is wrong with it.
    """
    with open_container(path) as reader:
        defects = reader.verify()
    if defects:
        raise defects[0].error


class LocalCopy:
    """See `Objects`.

    Args:
        remote: the back end.
        folder: where the copies are; None for a private folder that is gone with this object.
        quota: bytes that the copies may take; the least recently used go first. A file that is mapped lives on until it is unmapped.
        check: raises KVError where a fetched file is not what was written.
    """

    def __init__(
        self,
        remote: Objects,
        folder: str | os.PathLike[str] | None,
        *,
        quota: int = QUOTA,
        check: Callable[[Path], None] = check_container,
    ) -> None:
        self.remote = remote
        self._private = Scratch()
        self._given = None if folder is None else Path(folder)
        self._local: Folder | None = None
        self.quota = quota
        self._check = check
        # Bytes left as this process knows it: others that share the folder are seen when it is counted anew.
        self._doubtful: set[str] = set()  # not to be used before they are here whole
        self._keeping: list[threading.Thread] = []
        self._room, self._counted = 0, -_COUNT_EVERY
        self._making_room = threading.Lock()

    def __repr__(self) -> str:
        return f"LocalCopy({self.remote!r})"

    def __str__(self) -> str:
        return str(self.remote)

    @property
    def local(self) -> Folder:
        """The folder of copies."""
        root = self._given or self._private.folder()
        if self._local is None or self._local.root != root:
            # A private one is made anew in a forked child, and after `close`.
            self._local = Folder(root, durable=False)
        return self._local

    @property
    def name_key(self) -> bytes | None:
        return self.remote.name_key

    @property
    def scratch(self) -> Path:
        return self.local.scratch

    def path(self, name: str) -> Path | None:
        """The copy, fetched where there is none yet.

        Raises:
            KVError: the object is not what was written, also when fetched a second time.
            OSError: the back end failed, or the object is larger than the quota.
        """
        found = self.local.path(name)
        if found is None:
            if not self._fetch(name):
                return None
            found = self.local.path(name)
        self.local.touch(name)
        return found

    def fetching(self, names: Sequence[str]) -> Fetching | None:
        """Begin to fetch several at once, those of them that are not here yet; `keep` makes copies of what has come. None where there is
        nothing to fetch, or no room for all at once: then `path` fetches one after the other, and each is mapped before the next."""
        missing = [name for name in names if self.local.path(name) is None and name not in self._doubtful]
        sizes = {name: size for name, size in zip(missing, self.remote.sizes(missing), strict=True) if size}
        if not sizes or 2 * sum(sizes.values()) > self.quota:
            return None
        self._make_room(sum(sizes.values()))
        return Fetching(self.remote.read, sizes, lambda name: self.scratch / f"{secrets.token_hex(8)}.coming")

    def keep(self, fetched: Fetching) -> None:
        """Make copies of what has been fetched whole, once it is checked, in a thread of their own, which `settle` waits for."""
        thread = threading.Thread(target=self._keep, args=(fetched,), name="kvtool-copies")
        with self._making_room:
            self._keeping = [one for one in self._keeping if one.is_alive()] + [thread]
        thread.start()

    def _keep(self, fetched: Fetching) -> None:
        fetched.wait()
        for name, file in fetched.files.items():
            try:
                if file.error is None:
                    self._check(file.path)
                    self.local.write(name, file.path)
            except (KVError, OSError) as error:
                logger.warning("no copy is kept of %s: %s", name, error)
        self.discard(fetched)

    def discard(self, fetched: Fetching) -> None:
        """Give up what has been fetched, and what has not."""
        fetched.stop()
        for file in fetched.files.values():
            file.path.unlink(missing_ok=True)

    def forget(self, name: str) -> bool:
        """Take note that an object was found damaged; whether that may be this machine's affair. A copy that its disk has changed since it
        was checked is removed. One that was used while it came is fetched once more, whole, before it is used."""
        if name not in self._doubtful and self.local.path(name) is None:
            self._doubtful.add(name)
            return True
        found = self.local.path(name)
        if found is None:
            return False
        try:
            self._check(found)
        except KVError:
            return self.local.remove(name)
        return False

    def _fetch(self, name: str) -> bool:
        """Whether there is such an object; then there is a copy of it too, unless another process was quick to evict it."""
        size = self.remote.size(name)
        if size is None:
            return False
        if size > self.quota:
            raise OSError(errno.EFBIG, f"{name} has {size} bytes, the local copies may take {self.quota}", str(self.local.root))
        self._make_room(size)
        target = self.scratch / f"{secrets.token_hex(8)}.fetched"
        try:
            try:
                self._download(name, size, target)
            except KVError:
                # Removed and written anew while it was read in blocks, perhaps.
                size = self.remote.size(name)
                if size is None:
                    return False
                self._download(name, size, target)
            self.local.write(name, target)
        except Missing:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
        return True

    def _download(self, name: str, size: int, target: Path) -> None:
        with open(target, "wb") as file:
            for start in range(0, size, _BLOCK):
                file.write(self.remote.read(name, start, min(_BLOCK, size - start)))
            if file.tell() != size:
                raise IntegrityError(f"{file.tell()} bytes came, {size} were promised", path=f"{self.remote}: {name}")
        self._check(target)

    def _make_room(self, size: int) -> None:
        with self._making_room:
            self._room -= size
            if self._room >= 0 and time.monotonic() - self._counted < _COUNT_EVERY:
                return
            entries = sorted(self.local.names(), key=lambda entry: entry.used)
            taken = sum(entry.size for entry in entries) + self.local.unfinished() + size
            for entry in entries:
                if taken <= self.quota:
                    break
                self.local.remove(entry.name)
                taken -= entry.size
            self._room, self._counted = self.quota - taken, time.monotonic()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return self.local.read(name, start, length)
        except Missing:
            return self.remote.read(name, start, length)

    def write(self, name: str, source: Path | bytes) -> bool:
        try:
            return self.remote.write(name, source)
        finally:
            if isinstance(source, Path) and source.parent == self.scratch:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(source)

    def size(self, name: str) -> int | None:
        return self.remote.size(name)

    def sizes(self, names: Sequence[str], lookup: bool = False) -> list[int | None]:
        return self.remote.sizes(names, lookup)

    def names(self, prefix: str = "") -> Iterator[Entry]:
        return self.remote.names(prefix)

    def page(self, prefix: str, after: str, count: int) -> list[Entry]:
        return self.remote.page(prefix, after, count)

    def remove(self, name: str) -> bool:
        self.local.remove(name)
        return self.remote.remove(name)

    def touch(self, *names: str) -> None:
        self.local.touch(*names)
        self.remote.touch(*names)

    def now(self) -> float:
        return self.remote.now()

    def unfinished(self) -> int:
        return self.remote.unfinished() + self.local.unfinished()

    def sweep(self) -> int:
        self.local.sweep()
        return self.remote.sweep()

    def settle(self) -> None:
        """Until all copies that `keep` was to make are there."""
        for thread in self._keeping:
            thread.join()

    def close(self) -> None:
        self.settle()
        if self._local is not None:
            self._local.close()
        self._private.close()
        self.remote.close()
