"""Where kvtool keeps what can be made again: $KVTOOL_CACHE, else ~/.cache/kvtool ($XDG_CACHE_HOME/kvtool where that is set)."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder; it may not exist yet.

    Raises:
        RuntimeError: nothing says where, and there is no home directory.
    """
    given = os.environ.get("KVTOOL_CACHE")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvtool"
