"""What people do to single objects of a store, by the beginnings of their ids: pin, let go, remove."""

import re

from formats.errors import FormatError, IncompatibleError, IntegrityError
from kvtool.store.catalogue import Catalogue, Held
from kvtool.store.described import Descriptions
from kvtool.store.keys import SHORT, Node, chain, chunk_name
from kvtool.store.objects import Missing, Objects
from kvtool.store.opening import opened
from kvtool.store.room import Room


def pin(objects: Objects, room: Room, id: str) -> str:
    """See `Store.pin`."""
    held = _one(Catalogue(objects.names()), id)
    room.write(f"pins/{held.node.id}", held.node.name.encode())
    return held.node.id


def unpin(objects: Objects, id: str) -> str:
    """See `Store.unpin`."""
    pins = [entry.name.removeprefix("pins/") for entry in objects.names("pins/")]
    found = [pin for pin in pins if id and pin.startswith(id)]
    if len(found) != 1:
        raise IncompatibleError(f"{len(found)} pins begin with {id!r}", hint="kvtool store ls shows them")
    objects.remove(f"pins/{found[0]}")
    return found[0]


def remove(objects: Objects, known: Descriptions, id: str) -> int:
    """See `Store.remove`."""
    catalogue = Catalogue(objects.names())
    held = _one(catalogue, id)
    if catalogue.stays(held.node):
        raise IncompatibleError(f"{held.node.id[:12]} is pinned, or what follows it is", hint="unpin it first")
    beside, line, freed = _beside(objects, known, catalogue, held.node), catalogue.line(held.node), 0
    for one in [*catalogue.below(held.node), held]:
        catalogue.drop(one)
        freed += one.size if objects.remove(one.node.name) else 0
    for one in [*beside, *line]:
        if catalogue.after(one.node) or one.node.id in catalogue.pinned:
            break
        catalogue.drop(one)
        freed += one.size if objects.remove(one.node.name) else 0
    return freed


def _beside(objects: Objects, known: Descriptions, catalogue: Catalogue, node: Node) -> list[Held]:
    """The chunks, last first, that hold the first rows of an end as well, as other prompts would share them."""
    if not node.tail:
        return []
    try:
        with opened(objects, node.name) as reader:
            tokens, about = reader.manifest.tokens, reader.manifest.extra.get("store")
    except (Missing, FileNotFoundError):
        raise IncompatibleError(f"{node.id[:12]} was removed meanwhile") from None
    except (IntegrityError, FormatError):
        return []  # what is damaged does not say what lies beside it, and goes all the same
    parent = about.get("parent") if isinstance(about, dict) else None
    if not (isinstance(parent, str) and re.fullmatch("[0-9a-f]{64}", parent)):
        return []
    root, found = catalogue.space(node), []
    chunk = next((space.chunk for space in known.spaces() if space.key[:SHORT] == root), node.tokens + 1)
    for i, key in enumerate(chain(parent, () if tokens is None else tokens.ids, chunk, objects.name_key)):
        held = catalogue.held.get(chunk_name(key, parent, node.start + i * chunk, chunk))
        if held is None:
            break
        found.append(held)
        parent = key
    return found[::-1]


def _one(catalogue: Catalogue, id: str) -> Held:
    found = catalogue.find(id)
    if len(found) != 1:
        raise IncompatibleError(f"{len(found)} objects have an id that begins with {id!r}", hint="kvtool store ls shows them")
    return found[0]
