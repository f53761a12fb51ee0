"""A private folder of this process for files on their way to a store that is not a folder itself."""

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path


class Scratch:
    """Made in $TMPDIR (mode 0700) when it is first asked for, gone with this object or the process; a forked child gets one of its own."""

    def __init__(self) -> None:
        self._made: Path | None = None
        self._owner = 0
        self._end: weakref.finalize[..., Scratch] | None = None
        self._making = threading.Lock()

    def folder(self) -> Path:
        """The folder."""
        with self._making:
            if self._made is None or self._owner != os.getpid():
                self._made, self._owner = Path(tempfile.mkdtemp(prefix="kvtool-store-")), os.getpid()
                self._end = weakref.finalize(self, _remove, self._made, self._owner)
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


def _remove(folder: Path, owner: int) -> None:
    # A forked child ends with what its parent made.
    if owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
