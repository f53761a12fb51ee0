"""A private folder of this process for files on their way to a store that is not a folder itself."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

PREFIX = "kvtool-copies-"
# Of file systems that lock no folders: what is there is never taken for a dead one's.
UNLOCKED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)


class Scratch:
    """Made in $TMPDIR (mode 0700) when it is first asked for, gone with this object or the process; a forked child gets one of its own.

    Its lock (flock) is held while its process lives: what one that was killed has left, copies of encrypted objects in clear among it, the
    next one removes.
    """

    def __init__(self) -> None:
        self._made: Path | None = None
        self._owner = 0
        self._end: weakref.finalize[..., Scratch] | None = None
        self._making = threading.Lock()

    def folder(self) -> Path:
        """The folder."""
        with self._making:
            if self._made is None or self._owner != os.getpid():
                _sweep(Path(tempfile.gettempdir()))
                (self._made, lock), self._owner = _claim(), os.getpid()
                self._end = weakref.finalize(self, _remove, self._made, lock, self._owner)
            return self._made

    def bytes(self) -> int:
        """Of the files in it."""
        with self._making:
            made = self._made if self._owner == os.getpid() else None
        found = 0
        for path in [] if made is None else made.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_size
        return found

    def close(self) -> None:
        """Remove the folder; it is made anew where it is asked for again."""
        with self._making:
            if self._end is not None:
                self._end()
            self._made = self._end = None


def _claim() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # A sweep between the two calls may take it for a dead one's.
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _locked(fd) is not False and folder.exists():
                return folder, fd
            os.close(fd)


def _sweep(place: Path) -> None:
    """Remove this user's folders whose processes are gone."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, no folder, or gone
        try:
            if os.fstat(fd).st_uid == os.geteuid() and _locked(fd):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def _locked(fd: int) -> bool | None:
    """Whether the lock is this process's now; None where the file system has none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNLOCKED:
            raise
        return None
    return True


def _remove(folder: Path, lock: int, owner: int) -> None:
    # A forked child ends with what its parent made.
    if owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
