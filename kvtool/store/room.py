"""Room in a store: what its objects and those on their way take together, a quota over it, and what goes to keep within."""

import errno
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from formats.errors import KVError
from kvtool.store.catalogue import GRACE, Catalogue, Cost, Held
from kvtool.store.objects import Objects

logger = logging.getLogger(__name__)

FRESH = 1.0  # seconds that a listing counts as what is there, with what this process wrote since
FULL = (errno.ENOSPC, errno.EDQUOT)


class StoreFullError(KVError):
    """An object does not fit, whatever else may go."""


class Room:
    """Writes objects within a quota.

    Args:
        objects: where they go.
        quota: bytes that all of them, and files on their way, may take together; None for no end.
        cost: what a prefill costs.
    """

    def __init__(self, objects: Objects, quota: int | None, cost: Cost) -> None:
        self.objects, self.quota, self.cost = objects, quota, cost
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
        freed = self._free(None, keep)
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
            over = self._count() - self.quota
            if over > 0 and self._free(over, keep) < over:
                raise StoreFullError(
                    f"no room for {size} bytes in a quota of {self.quota}: what is left is pinned, or belongs to this prompt",
                    hint="unpin or remove something, or give a larger quota",
                )

    def _count(self) -> int:
        """Bytes of all objects, and of files on their way."""
        catalogue = Catalogue(self.objects.names())
        self._listed, self._bytes = time.monotonic(), catalogue.bytes
        return catalogue.bytes + self.objects.unfinished()

    def fit(self) -> int:
        """Bring all within the quota, as far as pins allow; the bytes freed."""
        over = 0 if self.quota is None else self._count() - self.quota
        return self._free(over, frozenset()) if over > 0 else 0

    def _free(self, need: int | None, keep: frozenset[str]) -> int:
        """Remove what writers that died left, then the objects least worth, until `need` bytes (None: a sixteenth of all) are free."""
        freed = self.objects.sweep()
        catalogue = Catalogue(self.objects.names())
        need = max(catalogue.bytes // 16, 1) if need is None else need
        if freed < need:
            for held in catalogue.going(time.time(), self.cost, keep):
                freed += self.remove(held)
                if freed >= need:
                    break
        self._listed = -FRESH
        return freed

    def remove(self, held: Held) -> int:
        """Remove an object; the bytes freed."""
        if not self.objects.remove(held.node.name):
            return 0
        self.evicted += 1
        logger.info("evicted %s, %d bytes", held.node.name, held.size)
        return held.size

    def orphans(self) -> int:
        """Remove what no prompt can reach, and what nothing needs any more, once it is GRACE seconds old; the bytes freed."""
        catalogue, now, freed = Catalogue(self.objects.names()), time.time(), 0
        lost = [held for held in catalogue.held.values() if now - held.used > GRACE and catalogue.space(held.node) is None]
        for held in sorted(lost, key=lambda held: -held.node.start):
            catalogue.drop(held)
            freed += self.remove(held)
        ids = {held.node.id for held in catalogue.held.values()}
        for pin in catalogue.pinned - ids:
            name = f"pins/{pin}"
            freed += catalogue.others[name].size if now - catalogue.others[name].used > GRACE and self.objects.remove(name) else 0
        return freed
