"""Writing a file so that every moment shows the old whole file or the new whole file.

    temp (O_EXCL, same folder) -> bytes -> fsync -> os.replace -> fsync of the folder

Of a large file a thread syncs what was written while more is made, so that the last fsync finds little left to do.

The commit point is os.replace. Before it a crash leaves the old file and perhaps a temp, whose name `is_leftover` recognises;
after it the new file. If only the last fsync fails, the new file is visible and whole but may not survive a power cut.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

NOT_REGULAR = "not a regular file"
SYNC_EACH = 1 << 23  # bytes; the system by itself would begin to write them some seconds later
_LEFTOVER = re.compile(r"\.kvtool-[0-9]+-[0-9a-f]{16}\.tmp")


def is_leftover(name: str) -> bool:
    """Whether a file name is that of a temporary file which an interrupted write may have left."""
    return _LEFTOVER.fullmatch(name) is not None


class AtomicFile:
    """A new file on its way to another name: unbuffered, so that nothing is copied twice. Its errors name `target`, the file asked for."""

    def __init__(self, fd: int, target: str) -> None:
        self.fd = fd
        self._target = target
        self._unsynced = 0
        self._thread: ThreadPoolExecutor | None = None
        self._syncing: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data` at the current position. An error of a sync under way is raised here or by `settle`, once."""
        view = memoryview(data).cast("B")
        self._unsynced += len(view)
        with _blaming(self._target):
            while len(view):
                view = view[os.write(self.fd, view) :]
        if self._unsynced >= SYNC_EACH and (self._syncing is None or self._syncing.done()):
            self.settle()
            self._thread = self._thread or ThreadPoolExecutor(1, "kvtool-sync")
            self._unsynced, self._syncing = 0, self._thread.submit(os.fsync, self.fd)

    def settle(self) -> None:
        """Wait for the sync under way. The system tells an error of the disk once: it must not be lost."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            with _blaming(self._target):
                syncing.result()

    def release(self) -> None:
        """End the thread, before its descriptor is closed and perhaps another file's."""
        if self._thread is not None:
            self._thread.shutdown()

    def seek(self, offset: int) -> None:
        """Move the position; a hole that is left reads as zeros."""
        os.lseek(self.fd, offset, os.SEEK_SET)

    def truncate(self, size: int) -> None:
        """Cut the file at `size` bytes."""
        with _blaming(self._target):
            os.ftruncate(self.fd, size)

    def move(self, begin: int, end: int, to: int) -> None:
        """Copy bytes [begin, end) to a later offset `to`, from the back, in blocks of a megabyte."""
        while end > begin:
            start = max(begin, end - (1 << 20))
            block = os.pread(self.fd, end - start, start)
            self.seek(to + start - begin)
            self.write(block)
            end = start


def target_of(path: str | os.PathLike[str]) -> str:
    """The file that a write to `path` makes or replaces, symbolic links followed.

    Raises:
        OSError: its folder is missing, its name is too long, or it is a folder or a device.
    """
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder) from None
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, target)
    return target


def _mode(target: str) -> int | None:
    """Permission bits of a file, or None where there is none."""
    try:
        return os.stat(target).st_mode & 0o777
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _blaming(target: str) -> Iterator[None]:
    """Context manager: an OSError names the file that was asked for, not the temporary one."""
    try:
        yield
    except OSError as error:
        error.filename = target
        # Of a rename: else the text reads "target -> target".
        del error.filename2
        raise


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[AtomicFile]:
    """Context manager: write to a temporary file that takes the place of `path` when the block ends without an exception.

    A symbolic link is followed. The new file has the mode of the one it replaces; where there is none, what the umask leaves of 0666.
    On any exception, KeyboardInterrupt included, the temporary file is removed.

    Raises:
        OSError: as the system gives it (disk full, no permission ...); `path` is a folder or a device.
    """
    target = target_of(path)
    folder = os.path.dirname(target)
    temp = os.path.join(folder, f".kvtool-{os.getpid()}-{secrets.token_hex(8)}.tmp")
    fd = -1
    try:
        try:
            with _blaming(target):
                mode = _mode(target)
                # Never wider than the file replaced, not even for a moment.
                fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode & 0o600)
                if mode is not None:
                    os.fchmod(fd, mode)
            out = AtomicFile(fd, target)
            try:
                yield out
                out.settle()
            finally:
                out.release()
            with _blaming(target):
                os.fsync(fd)
        finally:
            if fd >= 0:
                os.close(fd)
        with _blaming(target):
            os.replace(temp, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        raise
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
