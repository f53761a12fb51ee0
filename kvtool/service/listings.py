"""What pages of entries are cut from: a tenant's objects, listed once for all pages and searches of the next seconds.

A listing serves until this service writes or removes an object of the tenant. What others do shows KEPT seconds later at most: other
services on the store, programs in its folder, and when an object was last used.
"""

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from formats.strict_json import dumps
from kvtool.service.partition import Partition
from kvtool.store.described import Descriptions
from kvtool.store.listing import Listed, listed
from kvtool.store.measured import measured

KEPT = 3.0
MOST = 100_000  # objects that listings are kept of, all tenants together: half a kilobyte each
MOST_STEPS = 2000  # objects whose lossy steps are kept, as text of ten kilobytes each at most: as objects they could take twenty times that


@dataclass(frozen=True)
class Listing:
    """Objects with rows, the newest used first, each beside the text that a search looks in."""

    made: float
    changes: int
    found: list[tuple[Listed, str]]


class Listings:
    """One of each tenant who has asked, the last ones asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: Counter[str] = Counter()
        self._kept: dict[str, Listing] = {}
        self._steps: dict[tuple[str, str, int], bytes] = {}

    def changed(self, folder: str) -> None:
        """Take note that an object of a tenant came or went."""
        with self._lock:
            self._changes[folder] += 1

    def page(self, folder: str, objects: Partition, q: str, chunks: bool, skip: int, limit: int) -> tuple[list[Listed], int]:
        """Some of the objects that have `q` in their id, model or codec, and how many have it."""
        needle = q.lower()
        fit = [one for one, text in self._of(folder, objects) if (chunks or one.kind == "tail") and needle in text]
        return fit[skip : skip + limit], len(fit)

    def quality(self, folder: str, objects: Partition, one: Listed) -> list[dict[str, Any]] | None:
        """What an object's file says of its lossy steps: read once, for objects never change."""
        key = (folder, one.name, one.bytes)
        with self._lock:
            kept = self._steps.get(key)
        if kept is not None:
            steps: list[dict[str, Any]] = json.loads(kept)
            return steps
        found = measured(objects, one.name)
        if found is not None:  # one that cannot be read now may be another time
            with self._lock:
                self._steps[key] = dumps(found).encode()
                if len(self._steps) > MOST_STEPS:
                    del self._steps[next(iter(self._steps))]
        return found

    def _of(self, folder: str, objects: Partition) -> list[tuple[Listed, str]]:
        with self._lock:
            changes, kept = self._changes[folder], self._kept.pop(folder, None)
            if kept is not None and kept.changes == changes and time.monotonic() - kept.made < KEPT:
                self._kept[folder] = kept  # asked for last
                return kept.found
        made = time.monotonic()  # what comes while it is listed may not be in it
        found = [(one, f"{one.id} {one.model} {one.codec}".lower()) for one in listed(objects.names(), Descriptions(objects))]
        found.sort(key=lambda pair: -pair[0].used)
        with self._lock:
            self._kept[folder] = Listing(made, changes, found)
            while self._kept and sum(len(one.found) for one in self._kept.values()) > MOST:
                del self._kept[next(iter(self._kept))]
        return found
