"""Where calibrations are kept: a folder of files named by their digests. Needs no MLX.

$KVTOOL_CALIBRATIONS, else `calibrations` in the folder of `kvtool.cache_folder`.
"""

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from formats.atomic import atomic_write
from formats.calibration import CalibrationFile, from_bytes, read_calibration, read_model
from formats.errors import DigestError, KVError
from formats.tables import digest_of
from kvtool.cache_folder import cache_folder

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def folder() -> Path:
    """The store's folder; it may not exist yet."""
    given = os.environ.get("KVTOOL_CALIBRATIONS")
    return Path(given) if given else cache_folder() / "calibrations"


def put(data: bytes) -> Path:
    """Keep a calibration's bytes, atomically, under their digest; returns the file.

    Raises:
        FormatError: not a calibration.
        OSError: as the system gives it.
    """
    from_bytes(data)
    path = folder() / f"{digest_of(data)}{SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as out:
        out.write(data)
    return path


def check_writable() -> None:
    """Find out before the work, not after it, that nothing can be kept here.

    Raises:
        OSError: as the system gives it.
    """
    at = folder()
    at.mkdir(parents=True, exist_ok=True)
    if not os.access(at, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(at))


def path_of(digest: str) -> Path | None:
    """The file of a calibration, or None where the store has none."""
    path = folder() / f"{digest}{SUFFIX}"
    return path if _DIGEST.fullmatch(digest) and path.is_file() else None


def get(digest: str) -> tuple[CalibrationFile, Path] | None:
    """A calibration by its digest, or None where the store has none.

    Raises:
        DigestError: the file's bytes are not those that its name says.
        FormatError: not a calibration.
    """
    path = path_of(digest)
    if path is None:
        return None
    calibration, found = read_calibration(path)
    if found != digest:
        raise DigestError(f"has digest {found}, its name says {digest}", path=str(path), hint="delete it and calibrate again")
    return calibration, path


def kept() -> Iterator[tuple[str, Path]]:
    """(digest, path) of everything in the store under a digest's name, newest first; what it is worth shows when it is read."""
    found = []
    if folder().is_dir():
        for path in folder().iterdir():
            if path.suffix == SUFFIX and _DIGEST.fullmatch(path.stem):
                # Another process may have removed it since.
                with contextlib.suppress(FileNotFoundError):
                    found.append((-path.stat().st_mtime_ns, path.name, path))
    yield from ((path.stem, path) for _, _, path in sorted(found))


def newest_for(weights: str | None) -> tuple[CalibrationFile, Path] | None:
    """The newest sound calibration of a model with these weights, or None. Of others only the headers are read.

    One that cannot be read is as good as absent to a search, which a logged warning says; by its digest it is refused.
    """
    for digest, path in kept() if weights is not None else ():
        try:
            found = get(digest) if read_model(path).effective_weights == weights else None
        except FileNotFoundError:
            continue
        except (KVError, OSError) as error:
            logger.warning("%s is passed over: %s", path, error)
            continue
        if found is not None:
            return found
    return None
