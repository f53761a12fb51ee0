"""Objects as files of a folder.

    FOLDER/objects/<name>            the objects
    FOLDER/writing/<id>.lock         held (flock) while the process that writes in <id>/ lives
    FOLDER/writing/<id>/             its scratch: files on their way

A write: file in scratch -> bytes -> fsync -> link to its name -> fsync of that folder -> unlink in scratch. The commit point is the link:
it fails where the name is taken, so that no object is ever overwritten. A crash before it leaves scratch alone, and `sweep` removes that
once the lock is free, whatever became of the process's id. A file that is unlinked lives on for whoever has it open or mapped.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from kvtool.store.objects import Entry, Missing, check_name

_BLOCK = 1 << 20
_AGAIN = 100


class Folder:
    """See `Objects`. The folder is made when something is first written.

    Args:
        path: the folder.
        durable: whether objects have to survive a power cut; not of copies, which are checked whenever they are used.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.root, self._durable = Path(path), durable
        self.name_key: bytes | None = None
        self._objects = self.root / "objects"
        self._writing = self.root / "writing"
        self._scratch: Path | None = None
        self._lock = -1
        self._owner = os.getpid()
        self._opening = threading.Lock()
        if self.root.exists() and not self.root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.root))

    def __repr__(self) -> str:
        return f"Folder({str(self.root)!r})"

    def __str__(self) -> str:
        return str(self.root)

    @property
    def scratch(self) -> Path:
        with self._opening:
            # After a fork the parent's is not the child's: either may end first.
            if self._scratch is None or self._owner != os.getpid() or not self._scratch.is_dir():
                self._close()
                self._owner = os.getpid()
                self._scratch, self._lock = self._claim()
            return self._scratch

    def _claim(self) -> tuple[Path, int]:
        """A scratch folder and the lock that says its process lives."""
        self._writing.mkdir(parents=True, exist_ok=True)
        while True:
            name = secrets.token_hex(8)
            path = self._writing / f"{name}.lock"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A sweep between the two calls above takes it for a dead one's, and its name with it.
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    folder = self._writing / name
                    folder.mkdir()
                    return folder, fd
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._scratch, self._lock = None, -1

    def close(self) -> None:
        """Give the scratch folder back; it is made anew where it is asked for again."""
        with self._opening:
            folder = self._scratch
            if folder is not None and self._owner == os.getpid():
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{folder}.lock")
            self._close()

    def _file(self, name: str, folders: set[str] | None = None) -> Path:
        """Where an object is; no folder on the way there is a symbolic link, which could lead anywhere.

        Args:
            folders: those that this very request has found to be none; it grows.
        Raises:
            OSError: ELOOP.
        """
        path = f"{self._objects}/{check_name(name)}"
        at = len(path) - len(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            while (at := path.find("/", at)) >= 0:
                folder = path[:at]
                if folders is None or folder not in folders:
                    if stat.S_ISLNK(os.lstat(folder).st_mode):
                        raise OSError(errno.ELOOP, "a store's folder has no symbolic links in it", folder)
                    if folders is not None:
                        folders.add(folder)
                at += 1
        return Path(path)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            fd = os.open(self._file(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                file.seek(start)
                return file.read() if length is None else file.read(length)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise Missing(name) from None

    def path(self, name: str) -> Path | None:
        file = self._file(name)
        return file if _regular(file) is not None else None

    def write(self, name: str, source: Path | bytes) -> bool:
        target = self._file(name)
        own = isinstance(source, Path) and source.parent == self._scratch
        if target.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link, which no object is", str(target))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        temp = source if isinstance(source, Path) and own else self.scratch / f"{secrets.token_hex(8)}.part"
        try:
            made = not target.exists()
            if not made and not target.is_file():
                raise OSError(errno.EINVAL, "a pipe or device, which no object is", str(target))
            if made:
                self._fill(temp, None if own else source)
                made = self._link(temp, target)
        except BaseException:
            # The caller's own file stays, to be tried again.
            if not own:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        return made

    def _link(self, temp: Path, target: Path) -> bool:
        try:
            for last in (False,) * _AGAIN + (True,):
                try:
                    _make_folder(target.parent)
                    os.link(temp, target)
                    break
                except FileNotFoundError:
                    # The last object in that folder was removed meanwhile, and the folder with it.
                    if last or not temp.exists():
                        raise
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            raise OSError(error.errno, "this file system has no hard links, which a store's folder needs", str(self.root)) from None
        if self._durable:
            with contextlib.suppress(FileNotFoundError):  # removed again already
                _sync_folder(target.parent)
        return True

    def _fill(self, temp: Path, source: Path | bytes | None) -> None:
        """The bytes of `source` (None: those that are there) in a file that has reached the disk."""
        if source is None and not self._durable:
            return
        fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC | (0 if source is None else os.O_CREAT | os.O_EXCL), 0o666)
        try:
            if isinstance(source, bytes):
                _write_all(fd, source)
            elif source is not None:
                with open(source, "rb", buffering=0) as file:
                    while block := file.read(_BLOCK):
                        _write_all(fd, block)
            if self._durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def size(self, name: str) -> int | None:
        status = _regular(self._file(name))
        return None if status is None else status.st_size

    def sizes(self, names: Sequence[str], lookup: bool = False) -> list[int | None]:
        folders: set[str] = set()
        statuses = (_regular(self._file(name, folders)) for name in names)
        return [None if status is None else status.st_size for status in statuses]

    def names(self, prefix: str = "") -> Iterator[Entry]:
        # The folder part of a prefix spares the listing of all others.
        folder = self._objects.joinpath(*prefix.split("/")[:-1])
        base = len(str(self._objects)) + 1
        for path, status in _files(folder):
            if path.startswith(prefix, base):
                yield Entry(path[base:], status.st_size, status.st_mtime)

    def page(self, prefix: str, after: str, count: int) -> list[Entry]:
        folder = "".join(f"{part}/" for part in prefix.split("/")[:-1])
        found = _in_order(self._objects / folder, folder, prefix, after)
        return [Entry(name, status.st_size, status.st_mtime) for name, status in islice(found, count)]

    def remove(self, name: str) -> bool:
        file = self._file(name)
        if file.is_dir() and not file.is_symlink():
            return False
        try:
            os.unlink(file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        # Who makes objects and removes them again leaves no folders behind; one that is in use is not empty.
        with contextlib.suppress(OSError):
            for _ in name.split("/")[:-1]:
                file = file.parent
                os.rmdir(file)
        return True

    def touch(self, *names: str) -> None:
        for name in names:
            file = self._file(name)
            try:
                os.utime(file, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(file)) from None  # the system's own names no file

    def now(self) -> float:
        return time.time()

    def unfinished(self) -> int:
        # A file between link and unlink has two names: it counts as the object that it is.
        return sum(status.st_size for _, status in _files(self._writing) if status.st_nlink == 1)

    def sweep(self) -> int:
        freed = 0
        for lock in sorted(self._writing.glob("*.lock")):
            try:
                fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder = lock.with_suffix("")
                freed += sum(status.st_size for _, status in _files(folder) if status.st_nlink == 1)
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(lock)
            except BlockingIOError:
                continue
            finally:
                os.close(fd)
        return freed


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


def _make_folder(path: Path) -> None:
    """The folder and its parents, each durable before something is put into it."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _regular(file: Path) -> os.stat_result | None:
    """The status of a regular file, None where there is none."""
    try:
        status = os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _files(folder: str | Path) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files below a folder; none where it is missing, without those that go meanwhile."""
    try:
        listing = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with listing:
        for item in listing:
            if item.is_dir(follow_symlinks=False):
                yield from _files(item.path)
            elif item.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield item.path, item.stat(follow_symlinks=False)


def _in_order(folder: str | Path, base: str, prefix: str, after: str) -> Iterator[tuple[str, os.stat_result]]:
    """(name, status) of the regular files below a folder whose names begin with `prefix` and come after `after`, in order of their names.

    Args:
        base: what names in this folder begin with. Folders that end before `after` are not read.
    """
    try:
        with os.scandir(folder) as listing:
            items = sorted((base + item.name + "/" * item.is_dir(follow_symlinks=False), item) for item in listing)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, item in items:
        if name.endswith("/"):
            if (name.startswith(prefix) or prefix.startswith(name)) and (name > after or after.startswith(name)):
                yield from _in_order(item.path, name, prefix, after)
        elif name > after and name.startswith(prefix) and item.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                yield name, item.stat(follow_symlinks=False)
