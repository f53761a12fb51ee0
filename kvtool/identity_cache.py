"""The digest of weight files that have not changed, remembered by what the file system says of them.

A file is the one seen before if device, inode, size, mtime and ctime are: a rewrite that puts size and mtime back still moves ctime, which
no call sets. One change can hide: a second write within the same tick of the file system's clock as the one before, after the digest was
begun. So a digest is only kept (git's rule for its index) if every file was already older, when the reading began, than a tick can be, and
the same afterwards. A tick is milliseconds on most file systems, 1 s on HFS+ and ext3, 2 s on FAT; there ctime is also no time of change,
so that mtime must be as old.

One small file per set of weight files, named by their devices and inodes and replaced atomically: any number of processes may read and
write, the last wins, and all write the same. A file that cannot be read or does not match its own check is as good as absent.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time_ns

from blake3 import blake3

from formats.atomic import atomic_write
from kvtool.cache_folder import cache_folder

logger = logging.getLogger(__name__)

VERSION = 1  # of what is digested and how: an entry of another one is a miss
TICK_NS = 2_000_000_000
Stat = tuple[int, int, int, int, int]

_said: list[str] = []  # warnings of this process


def remembered(files: Sequence[Path], compute: Callable[[], str]) -> str:
    """The digest kept for these files if they are as they were then, else `compute()`, which is kept where that is safe.

    Args:
        files: what the digest is of, in any order, by any path or link.
        compute: reads them and returns the digest, 64 hexadecimal digits.
    """
    before = stats(files)
    known = recall(before)
    if known is not None:
        return known
    begun = time_ns()
    digest = compute()
    newest = max((max(mtime, ctime) for *_, mtime, ctime in before), default=0)
    if newest < begun - TICK_NS and stats(files) == before:
        keep(before, digest)
    return digest


def stats(files: Sequence[Path]) -> list[Stat]:
    """(device, inode, size, mtime_ns, ctime_ns) of each file, links followed, sorted.

    Raises:
        OSError: as the system gives it.
    """
    found = [os.stat(path) for path in files]
    return sorted((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found)


def recall(files: Sequence[Stat]) -> str | None:
    """The digest kept for files of exactly these stats, or None."""
    try:
        text = entry_of(files).read_bytes()
    except (OSError, RuntimeError):
        return None
    body, _, check = text.partition(b"\n")
    if check != blake3(body).hexdigest().encode() + b"\n":
        return None
    fields = json.loads(body)
    return str(fields[2]) if fields[:2] == [VERSION, [list(s) for s in files]] else None


def keep(files: Sequence[Stat], digest: str) -> None:
    """Remember the digest of files of these stats; where that cannot be written, a logged warning says so, once."""
    body = json.dumps([VERSION, files, digest]).encode()
    try:
        path = entry_of(files)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as out:
            out.write(body + b"\n" + blake3(body).hexdigest().encode() + b"\n")
    except (OSError, RuntimeError) as error:
        if not _said:
            _said.append(str(error))
            logger.warning("digests of weights are not remembered, which costs a reading of the weights each time: %s", error)


def entry_of(files: Sequence[Stat]) -> Path:
    """Where the digest of these files is kept; newer versions of the same files take the older one's place."""
    return cache_folder() / "weights" / blake3(json.dumps([s[:2] for s in files]).encode()).hexdigest(length=16)
