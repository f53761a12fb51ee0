"""Room in a store: what its objects and those on their way take together, a quota over it, and what goes to keep within."""

import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from kvtool.store.catalogue import GRACE, Catalogue
from kvtool.store.described import Descriptions
from kvtool.store.keys import node_of
from kvtool.store.objects import Objects, StoreFullError

logger = logging.getLogger(__name__)

FRESH = 1.0  # seconds that a listing counts as what is there, with what this process wrote since
LIKELY = 0.9  # of what is expected to be written that surely will be: chunks of one prompt differ by a few percent
AGAIN = 3  # counts before an object is refused: another process may be quicker to remove what was to go
FULL = (errno.ENOSPC, errno.EDQUOT)


class Room:
    """Writes objects within a quota.

    Args:
        objects: where they go.
        quota: bytes that all of them, and files on their way, may take together; None for no end.
        known: says what a prefill costs, and which descriptions are needed.
    """

    def __init__(self, objects: Objects, quota: int | None, known: Descriptions) -> None:
        self.objects, self.quota, self._known = objects, quota, known
        self.evicted = 0
        self._listed, self._bytes = -FRESH, 0

    def write(self, name: str, produce: Callable[[Path], None] | bytes, keep: frozenset[str] = frozenset()) -> int:
        """Make an object unless there is one of that name; the bytes written, 0 if none were.

        Args:
            name: of the object.
            produce: its bytes, or what writes them into a file.
            keep: names of objects that do not go for it.
        Raises:
            StoreFullError: it does not fit into the quota.
            OSError: ENOSPC where the disk is full and nothing that could go makes room; any other as the system gives it.
        """
        try:
            return self._write(name, produce, keep)
        except OSError as error:
            if error.errno not in FULL:
                raise
        freed = self.free_some(keep)
        logger.info("no space left: %d bytes of other objects freed, trying again", freed)
        try:
            return self._write(name, produce, keep)
        except OSError as error:
            if error.errno not in FULL:
                raise
            what = f"no space left for {name}, although {freed} bytes of other objects were freed"
            raise OSError(error.errno, f"{os.strerror(error.errno)}: {what}", str(getattr(self.objects, "root", self.objects))) from None

    def _write(self, name: str, produce: Callable[[Path], None] | bytes, keep: frozenset[str]) -> int:
        path = self.objects.scratch / f"{secrets.token_hex(8)}.part"
        try:
            if isinstance(produce, bytes):
                path.write_bytes(produce)
            else:
                produce(path)
            size = path.stat().st_size
            self._admit(name, size, keep)
            if not self.objects.write(name, path):
                return 0
            self._bytes += size
            return size
        finally:
            path.unlink(missing_ok=True)

    def _admit(self, name: str, size: int, keep: frozenset[str]) -> None:
        """Make room for an object whose file is in scratch already."""
        if self.quota is None:
            return
        if size > self.quota:
            raise StoreFullError(f"{name} takes {size} bytes, more than the quota of {self.quota} alone", hint="give a larger quota")
        if time.monotonic() - self._listed > FRESH or self._bytes + size > self.quota:
            for _ in range(AGAIN):
                over = self.count() + self.objects.unfinished() - self.quota
                if over <= 0 or self.free(over, name, keep) >= over:
                    return
            raise StoreFullError(
                f"no room for {size} bytes in a quota of {self.quota}: what is left is pinned, or belongs to this prompt",
                hint="unpin or remove something, or give a larger quota",
            )

    def expect(self, written: int, more: int) -> None:
        """Refuse a prompt that will not fit.

        Args:
            written: bytes of its objects that are there.
            more: bytes of those that follow, as far as these tell.
        Raises:
            StoreFullError: together they take more than the quota.
        """
        if self.quota is not None and written + LIKELY * more > self.quota:
            raise StoreFullError(
                f"this prompt takes about {written + more} bytes, more than the quota of {self.quota} alone",
                hint="give a larger quota, or a codec of fewer bits",
            )

    def count(self) -> int:
        """Bytes of all objects, as a new listing gives them."""
        catalogue = Catalogue(self.objects.names())
        self._listed, self._bytes = time.monotonic(), catalogue.bytes
        return catalogue.bytes

    def fit(self) -> int:
        """Bring all within the quota, as far as pins allow; the bytes freed."""
        over = 0 if self.quota is None else self.count() + self.objects.unfinished() - self.quota
        if over <= 0:
            return 0
        freed = self.objects.sweep()
        return freed + self._evict(Catalogue(self.objects.names()), over - freed)

    def free(self, need: int, name: str, keep: frozenset[str] = frozenset(), spare: int = 0) -> int:
        """Free `need` bytes for an object, the least worth first; where all that may go is not enough, nothing goes. The bytes freed.

        Args:
            need: bytes.
            name: of the object that is coming; what it follows stays.
            keep: names of objects that stay.
            spare: bytes that may go beyond these.
        """
        freed = self.objects.sweep()
        if freed >= need:
            return freed
        catalogue, node = Catalogue(self.objects.names()), node_of(name)
        before = None if node is None else catalogue.before(node)
        keep = keep if before is None else keep | {before.node.name}
        return freed + self._evict(catalogue, need + spare - freed, keep, enough=need - freed)

    def free_some(self, keep: frozenset[str] = frozenset()) -> int:
        """Free what writers that died left, or else a sixteenth of all objects; the bytes freed."""
        freed = self.objects.sweep()
        catalogue = Catalogue(self.objects.names())
        return freed + self._evict(catalogue, max(catalogue.bytes // 16, 1) - freed, keep)

    def _evict(self, catalogue: Catalogue, need: int, keep: frozenset[str] = frozenset(), *, enough: int = 0) -> int:
        """Remove objects, the least worth first, until `need` bytes are free; none where all of them are less than `enough`."""
        going = self._going(catalogue, keep) if need > 0 else iter(())
        chosen: list[tuple[str, int]] = []
        total = freed = 0
        while total < need and (one := next(going, None)) is not None:
            chosen.append(one)
            total += one[1]
        if total < enough:
            return 0
        self._listed = -FRESH
        # What another process was quicker to remove is its own gain: more goes for it.
        for name, size in chain(chosen, going):
            if freed >= need:
                break
            gone = self._remove(name, size)
            self.evicted, freed = self.evicted + (gone > 0), freed + gone
        return freed

    def _going(self, catalogue: Catalogue, keep: frozenset[str]) -> Iterator[tuple[str, int]]:
        """Names and bytes: first what no prompt needs, then rows."""
        spaces, now = self._known.spaces(), self.objects.now()
        for entry in [*catalogue.strangers(), *catalogue.unneeded(spaces, now)]:
            if entry.name not in keep:
                yield entry.name, entry.size
        for held in catalogue.going(now, self._known.cost, keep):
            yield held.node.name, held.size

    def _remove(self, name: str, size: int) -> int:
        """Remove an object; the bytes freed."""
        if not self.objects.remove(name):
            return 0
        logger.info("removed %s, %d bytes", name, size)
        return size

    def collect(self) -> int:
        """Remove what no prompt can reach, and what nothing needs any more, once it is GRACE seconds old; the bytes freed."""
        spaces = self._known.spaces()
        catalogue, now = Catalogue(self.objects.names()), self.objects.now()
        roots = catalogue.roots()
        lost = [held for held in catalogue.held.values() if now - held.used > GRACE and roots[held.node.name] is None]
        freed = sum(self._remove(held.node.name, held.size) for held in sorted(lost, key=lambda held: -held.node.start))
        for held in lost:
            catalogue.drop(held)
        return freed + sum(self._remove(entry.name, entry.size) for entry in catalogue.unneeded(spaces, now))
