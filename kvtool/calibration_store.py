"""Where calibrations are kept: a folder of files named by their digests. Needs no MLX.

$KVTOOL_CALIBRATIONS, else ~/.cache/kvtool/calibrations ($XDG_CACHE_HOME/kvtool/calibrations where that is set).
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from formats.atomic import atomic_write
from formats.calibration import CalibrationFile, digest_of, from_bytes, read_calibration
from formats.errors import DigestError, FormatError

SUFFIX = ".safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def folder() -> Path:
    """The store's folder; it may not exist yet."""
    given = os.environ.get("KVTOOL_CALIBRATIONS")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvtool" / "calibrations"


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
    """(digest, file) of everything in the store, newest first."""
    if not folder().is_dir():
        return
    files = [p for p in folder().iterdir() if p.suffix == SUFFIX and _DIGEST.fullmatch(p.stem) and p.is_file()]
    yield from ((p.stem, p) for p in sorted(files, key=lambda p: (-p.stat().st_mtime_ns, p.name)))


def newest_for(weights: str | None) -> str | None:
    """Digest of the newest sound calibration of a model with these weights, or None."""
    for digest, path in kept() if weights is not None else ():
        try:
            found, own = read_calibration(path)
        except FormatError:
            # Damaged: as good as absent to a search. By its digest it is refused with what is wrong.
            continue
        if own == digest and found.model.weights == weights:
            return digest
    return None
