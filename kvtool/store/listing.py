"""What a store holds, object by object, for people and for the service."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtool.store.catalogue import Catalogue
from kvtool.store.described import Descriptions
from kvtool.store.keys import SHORT
from kvtool.store.objects import Entry


@dataclass(frozen=True)
class Listed:
    """One object with rows.

    Attributes:
        name: of the object.
        id, kind: "chunk", or "tail": the end of a prompt.
        model, codec: names; "unknown" where what says them is gone.
        start, tokens: its rows.
        bytes, used: its size, and when it was last used (seconds since 1970).
        pinned: whether it stays.
        leaf: whether nothing follows it.
    """

    name: str
    id: str
    kind: str
    model: str
    codec: str
    start: int
    tokens: int
    bytes: int
    used: float
    pinned: bool
    leaf: bool


def kinds(entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """Objects and bytes of a listing, by the first part of their names."""
    found: dict[str, dict[str, int]] = {}
    for entry in entries:
        kind = found.setdefault(entry.name.partition("/")[0], {"objects": 0, "bytes": 0})
        kind["objects"] += 1
        kind["bytes"] += entry.size
    return found


def listed(entries: Iterable[Entry], known: Descriptions) -> list[Listed]:
    """Those of a listing, of one model and codec together, in the order of their tokens."""
    catalogue = Catalogue(entries)
    # Once a space: a codec's name is made by parsing it.
    spaces = {space.key[:SHORT]: (known.model_name(space.weights), space.codec) for space in known.spaces()}
    roots, found = catalogue.roots(), []
    for held in catalogue.held.values():
        node = held.node
        model, codec = spaces.get(roots[node.name] or "", ("unknown", "unknown"))
        kind, pinned, leaf = "tail" if node.tail else "chunk", node.id in catalogue.pinned, not catalogue.after(node)
        found.append(Listed(node.name, node.id, kind, model, codec, node.start, node.tokens, held.size, held.used, pinned, leaf))
    return sorted(found, key=lambda one: (one.model, one.codec, one.start, one.id))
