"""What an object's own header says of it, read without the rest of the object."""

from typing import Any

from formats.errors import KVError
from formats.header import header_text, parse_json
from formats.strict_json import Room, dumps, loads
from kvtool.store.objects import Missing, Objects

FIRST, LONGEST = 1 << 16, 4 << 20  # bytes of a header: read at first, read at all
MOST = 10_000  # bytes, as JSON, of what is shown of an object


def measured(objects: Objects, name: str) -> list[dict[str, Any]] | None:
    """The lossy steps of a file with the errors that it records of each; None where its header cannot be read."""
    try:
        raw = objects.read(name, 0, FIRST)
        length = 8 + int.from_bytes(raw[:8], "little")
        if len(raw) < 8 or length > LONGEST:
            return None
        room = Room(FIRST)
        if length > FIRST:
            raw, room = objects.read(name, 0, length), Room(objects.sizes([name])[0] or 0)
        raw = raw[:length]
        quality = loads(parse_json(header_text(raw, room), room)["__metadata__"]["kvtool"], "manifest", room)["quality"]
    except (Missing, KVError, OSError, ValueError, KeyError, TypeError):
        return None
    steps = [step for step in quality if isinstance(step, dict)] if isinstance(quality, list) else None
    return None if steps is None or len(dumps(steps).encode()) > MOST else steps
