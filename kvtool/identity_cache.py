"""What was digested of files that have not changed, remembered by what the file system says of them.

A file is the one seen before if device, inode, size, mtime and ctime are: a rewrite that puts size and mtime back still moves ctime, which
no call sets. One change can hide: a second write within the same tick of the file system's clock as the one before, after the reading was
begun. So a digest is only kept (git's rule for its index) if every file was already older, when the reading began, than a tick can be, and
the same afterwards. A tick is milliseconds on most file systems, 1 s on HFS+ and ext3, 2 s on FAT; there ctime is also no time of change,
so that mtime must be as old.

One small file per kind and set of files, named by their devices and inodes and replaced atomically: any number of processes may read and
write, the last wins, and all write the same. A file that cannot be read or does not match its own check is as good as absent.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time_ns
from typing import Any

from blake3 import blake3

from formats.atomic import atomic_write
from kvtool.cache_folder import cache_folder

logger = logging.getLogger(__name__)

VERSION = 2  # of what is digested and how: an entry of another one is a miss
TICK_NS = 2_000_000_000
Stat = tuple[int, int, int, int, int]

_said: list[str] = []  # warnings of this process


@dataclass(frozen=True)
class Sight:
    """Files as they were before something read them.

    Attributes:
        files: what was seen, in any order, by any path or link.
        stats: as `stats` gives them. at: when, in nanoseconds.
    """

    files: tuple[Path, ...]
    stats: tuple[Stat, ...]
    at: int

    @classmethod
    def of(cls, files: Sequence[Path]) -> "Sight":
        """The files as they are now.

        Raises:
            OSError: as the system gives it.
        """
        at = time_ns()
        return cls(tuple(files), tuple(stats(files)), at)

    @property
    def unchanged(self) -> bool:
        """Whether they still are as they were."""
        return tuple(stats(self.files)) == self.stats

    @property
    def settled(self) -> bool:
        """Whether a later change is sure to show in their stats."""
        return max((max(mtime, ctime) for *_, mtime, ctime in self.stats), default=0) < self.at - TICK_NS


def remembered(kind: str, seen: Sight, compute: Callable[[], Any], rule: str = "") -> Any:
    """What is kept of these files if they are as they were then, else `compute()`, which is kept where that is safe.

    Args:
        kind: of what is kept, a folder's name.
        seen: the files, looked at before anything read them.
        compute: gives what the files as `seen` make, in plain JSON values.
        rule: what else it depends on, such as versions of libraries: an entry of another one is a miss.
    """
    known = recall(kind, seen.stats, rule)
    if known is not None:
        return known
    value = compute()
    if seen.settled and seen.unchanged:
        keep(kind, seen.stats, value, rule)
    return value


def stats(files: Sequence[Path]) -> list[Stat]:
    """(device, inode, size, mtime_ns, ctime_ns) of each file, links followed, sorted.

    Raises:
        OSError: as the system gives it.
    """
    found = [os.stat(path) for path in files]
    return sorted((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found)


def recall(kind: str, files: Sequence[Stat], rule: str = "") -> Any:
    """What is kept of files of exactly these stats, or None."""
    try:
        text = entry_of(kind, files).read_bytes()
    except (OSError, RuntimeError):
        return None
    body, _, check = text.partition(b"\n")
    if check != blake3(body).hexdigest().encode() + b"\n":
        return None
    fields = json.loads(body)
    return fields[3] if fields[:3] == [VERSION, rule, [list(s) for s in files]] else None


def keep(kind: str, files: Sequence[Stat], value: Any, rule: str = "") -> None:
    """Remember what was made of files of these stats; where that cannot be written, a logged warning says so, once."""
    body = json.dumps([VERSION, rule, files, value]).encode()
    try:
        path = entry_of(kind, files)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as out:
            out.write(body + b"\n" + blake3(body).hexdigest().encode() + b"\n")
    except (OSError, RuntimeError) as error:
        if not _said:
            _said.append(str(error))
            logger.warning("digests of models are not remembered, which costs a reading of their files each time: %s", error)


def entry_of(kind: str, files: Sequence[Stat]) -> Path:
    """Where what is kept of these files lies; newer versions of the same files take the older one's place."""
    return cache_folder() / kind / blake3(json.dumps([s[:2] for s in files]).encode()).hexdigest(length=16)
