"""What an object's own header says of it, read without the rest of the object."""

import json
from typing import Any

from formats.errors import KVError
from formats.header import MAX_HEADER, parse_json
from kvtool.store.objects import Missing, Objects

FIRST = 1 << 16


def measured(objects: Objects, name: str) -> list[dict[str, Any]] | None:
    """The lossy steps of a file with the errors that it records of each; None where its header cannot be read."""
    try:
        raw = objects.read(name, 0, FIRST)
        length = 8 + int.from_bytes(raw[:8], "little")
        if len(raw) < 8 or length > MAX_HEADER:
            return None
        raw = raw[:length] if length <= len(raw) else objects.read(name, 0, length)
        quality = json.loads(parse_json(raw)["__metadata__"]["kvtool"])["quality"]
    except (Missing, KVError, OSError, ValueError, KeyError, TypeError):
        return None
    return [step for step in quality if isinstance(step, dict)] if isinstance(quality, list) else None
