"""What a store holds, object by object, for people and for the service."""

from dataclasses import dataclass

from kvtool.store.catalogue import Catalogue
from kvtool.store.described import Descriptions
from kvtool.store.keys import SHORT
from kvtool.store.objects import Objects


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


def listed(objects: Objects, known: Descriptions) -> list[Listed]:
    """See `Store.entries`."""
    catalogue = Catalogue(objects.names())
    spaces = {space.key[:SHORT]: space for space in known.spaces()}
    roots, found = catalogue.roots(), []
    for held in catalogue.held.values():
        node, space = held.node, spaces.get(roots[held.node.name] or "")
        model, codec = ("unknown", "unknown") if space is None else (known.model_name(space.weights), space.codec)
        kind, pinned, leaf = "tail" if node.tail else "chunk", node.id in catalogue.pinned, not catalogue.after(node)
        found.append(Listed(node.name, node.id, kind, model, codec, node.start, node.tokens, held.size, held.used, pinned, leaf))
    return sorted(found, key=lambda one: (one.model, one.codec, one.start, one.id))
