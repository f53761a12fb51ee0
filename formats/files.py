"""Opening files for reading, and naming them in errors."""

import contextlib
import os
import stat
from collections.abc import Iterator

from formats.errors import FormatError, IntegrityError, KVError, NotKvtoolError


@contextlib.contextmanager
def naming(path: str, *, damaged: str | None = None, foreign: str | None = None) -> Iterator[None]:
    """Context manager: a KVError that passes through learns which file it is about, and what helps where it does not say.

    `damaged` is the hint of a file that is not as it was written, `foreign` of one that was never of this kind.
    """
    try:
        yield
    except KVError as error:
        error.path = error.path or path
        if isinstance(error, FormatError | IntegrityError):
            error.hint = error.hint or (foreign if isinstance(error, NotKvtoolError) else damaged)
        raise


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[int, int]]:
    """Context manager: descriptor and size of a regular file.

    Raises:
        NotKvtoolError: a folder, device or pipe.
        OSError: it cannot be opened.
    """
    # Non-blocking, or opening a pipe would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotKvtoolError("a folder, not a file" if stat.S_ISDIR(status.st_mode) else "not a regular file")
        yield fd, status.st_size
    finally:
        os.close(fd)
