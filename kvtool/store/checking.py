"""Read a store whole: is every object what its name says, byte for byte? Nothing is changed."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from formats.calibration import from_bytes
from formats.container import Reader
from formats.errors import DigestError, FormatError, KVError, ManifestError
from formats.tables import digest_of
from kvtool.store.catalogue import Catalogue
from kvtool.store.described import LONGEST, LONGEST_TABLES, Descriptions, read_short
from kvtool.store.keys import Node, Space, ids_bytes, keyed, node_of, tail_hashes
from kvtool.store.objects import Missing, Objects
from kvtool.store.opening import opened


@dataclass(frozen=True)
class Problem:
    """An object that is not what its name says.

    Attributes:
        name: of the object.
        kind: class of the error.
        what: what is wrong.
    """

    name: str
    kind: str
    what: str


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    Attributes:
        objects, bytes: read.
        problems: what is damaged, misnamed or unreadable.
        lost: names of sound objects that no prompt can reach, for what they follow is gone; `gc` removes them.
        unfinished: bytes of files on their way, or of writers that died; `gc` removes the latter.
    """

    objects: int
    bytes: int
    problems: tuple[Problem, ...]
    lost: tuple[str, ...]
    unfinished: int


def check(objects: Objects, progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Read every object. One that is removed meanwhile is no problem.

    Args:
        progress: called with (bytes done, bytes in all).
    Raises:
        IncompatibleError: they are encrypted, with another key or none given: all would look damaged.
    """
    Descriptions(objects).spaces()
    catalogue = Catalogue(objects.names())
    problems = [Problem(name, "FormatError", "is no object of a store") for name in sorted(catalogue.foreign)]
    total, done, count = catalogue.bytes, 0, 0
    sizes = {name: held.size for name, held in catalogue.held.items()} | {name: entry.size for name, entry in catalogue.others.items()}
    for name, size in sorted(sizes.items()):
        try:
            held = catalogue.held.get(name)
            if held is not None:
                _check_rows(objects, held.node)
            else:
                _check_other(objects, name)
        except (Missing, FileNotFoundError):
            size = 0
        except (KVError, OSError) as error:
            problems.append(Problem(name, type(error).__name__, getattr(error, "what", str(error))))
        count, done = count + (size > 0), done + size
        if progress is not None:
            progress(done, total)
    # What came meanwhile is in no one's way: a chunk listed before its parent was written is looked for once more.
    again = Catalogue(objects.names())
    lost = tuple(name for name, held in sorted(again.held.items()) if name in catalogue.held and again.space(held.node) is None)
    return CheckReport(count, done, tuple(problems), lost, objects.unfinished())


def _check_rows(objects: Objects, node: Node) -> None:
    with opened(objects, node.name) as reader:
        for defect in reader.verify():
            raise defect.error
        _check_place(reader, node, objects.name_key)


def _check_place(reader: Reader, node: Node, secret: bytes | None) -> None:
    """Raise unless what a file says of its place gives its name."""
    about, tokens = reader.manifest.extra.get("store"), reader.manifest.tokens
    about = about if isinstance(about, dict) else {}
    parent = about.get("parent")
    if tokens is None or not isinstance(parent, str) or len(parent) != 64 or not set(parent) <= set("0123456789abcdef"):
        raise ManifestError("$.extra.store: does not say which chunk or space it follows")
    ids = tokens.ids[: node.tokens]
    if node.recent is None:
        found = keyed(bytes.fromhex(parent) + ids_bytes(ids), secret).hexdigest()
    else:
        found = tail_hashes(parent, ids, [(node.recent, len(ids))], secret)[node.recent, len(ids)]
    if found != node.id or not parent.startswith(node.parent) or len(tokens.ids) != node.tokens or about.get("start") != node.start:
        raise DigestError(f"holds {len(tokens.ids)} tokens of id {found[:12]} from {about.get('start')} on, not what its name says")


def _check_other(objects: Objects, name: str) -> None:
    kind, _, rest = name.partition("/")
    data = read_short(objects, name, LONGEST_TABLES if kind == "calibrations" else LONGEST)
    stem = rest.rpartition(".")[0]
    if kind == "spaces":
        Space.parse(data, stem, objects.name_key)
    elif kind == "calibrations":
        from_bytes(data)
        if digest_of(data) != stem:
            raise DigestError(f"has digest {digest_of(data)}, its name says {stem}")
    elif kind == "models":
        try:
            json.loads(data)["name"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ManifestError("does not say the name of a model") from error
    elif kind == "pins":
        pinned = node_of(data.decode("utf-8", "replace"))
        if pinned is None or pinned.id != rest:
            raise ManifestError("names another object than it pins")
    else:
        raise FormatError("is no object of a store")
