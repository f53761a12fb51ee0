"""Which sources the extension was built from: beside other ones it may lack functions that Python calls, or take other arguments.

CMakeLists.txt computes the same digest when it builds.
"""

import hashlib
from pathlib import Path
from typing import Any

REBUILD = "build it again: pip install -e . in the checkout (or KVTOOL_SIMD=none, to do without it)"


def digest(folder: Path) -> str | None:
    """SHA-256 of the digests of all C++ sources in the folder, in the order of their names; None where there are none, as in a wheel."""
    sources = sorted((*folder.glob("*.cpp"), *folder.glob("*.hpp")), key=lambda path: path.name)
    digests = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    return hashlib.sha256(digests.encode()).hexdigest() if sources else None


def stale(extension: Any, folder: Path) -> str:
    """What is wrong with an extension that was built from other sources than those in the folder, or an empty text."""
    wanted, found = digest(folder), getattr(extension, "SOURCES", None)
    if wanted is None or wanted == found:
        return ""
    built = f"sources {found[:12]}" if found else "sources before it was stamped"
    return f"the native extension {extension.__file__} was built from {built}, but beside this Python are sources {wanted[:12]}"
