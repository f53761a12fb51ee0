"""The file that holds a store's key: 32 random bytes, as they are or in base64, readable by its owner alone."""

import base64
import binascii
import os
import secrets
import stat
from pathlib import Path

KEY_BYTES = 32
MAGIC = b"kvtool sealed 1\n"  # that encrypted objects begin with
_LONGEST = 256


def make_key(path: str | os.PathLike[str]) -> None:
    """Write a new random key; the file is readable by its owner alone from its first moment on.

    Raises:
        FileExistsError: there is a file already; a lost key is a lost store, so it is never replaced.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # Half a key would only be in the way of the next attempt.
        os.unlink(path)
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The 32 bytes of a key file.

    Raises:
        ValueError: others can read it, or it holds no key.
    """
    shown = Path(path)
    # Not to wait for somebody to write into a pipe.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"[store] a key must be in a regular file, but {shown} is none.")
        data = file.read(_LONGEST)
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"[store] a key file must be readable by its owner alone, but {shown} has mode {mode:04o}; run: chmod 600 {shown}")
    key = data if len(data) == KEY_BYTES else _decoded(data)
    if key is None:
        # What it holds is not repeated.
        raise ValueError(
            f"[store] a key must be {KEY_BYTES} bytes, as they are or in base64, but {shown} has {status.st_size} of another form."
        )
    return key


def _decoded(data: bytes) -> bytes | None:
    try:
        key = base64.b64decode(data.strip(), validate=True)
    except binascii.Error:
        return None
    return key if len(key) == KEY_BYTES else None
