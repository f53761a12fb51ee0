"""What a store holds, as one listing tells: which object follows which, what each is worth, and what goes first.

    worth = FLOPs of the prefill that an object saves / its bytes * 2^(-age / HALF_LIFE)

An object goes only when no other follows it, for those would be out of reach without it: leaves first, then what they leave bare. So what
many prompts begin with stays longest. Pinned objects stay, and with them all that they follow.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvtool.store.keys import SHORT, Node, Space, node_of
from kvtool.store.objects import Entry, is_name

HALF_LIFE = 24 * 3600.0
TENANTS = "tenants/"  # below it are the stores of a service's tenants, each with a catalogue and a quota of its own
GRANTS = "grants/"  # what services have promised to tenants' writers: no objects of this store
KINDS = ("spaces", "models", "calibrations", "pins")  # of objects without rows
GRACE = 60.0  # seconds that what looks unneeded is left alone: its writer may not be done

Cost = Callable[[str | None, int, int], float]  # (first digits of a space's key, None of an unknown one; first token; tokens) -> FLOPs


@dataclass(frozen=True)
class Held:
    """An object that holds rows: what its name says, its bytes, when it was last used (seconds since 1970)."""

    node: Node
    size: int
    used: float


class Catalogue:
    """One listing of a store.

    Attributes:
        held: objects with rows, by name.
        others: all other objects, by name; without those of a service's tenants, whose names this store's key does not give.
        foreign: bytes of files in a store's folder that no object can be, by their names; they are counted, and left alone.
        pinned: ids of objects that stay.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.held: dict[str, Held] = {}
        self.others: dict[str, Entry] = {}
        self.foreign: dict[str, int] = {}
        self._chunks: dict[str, Held] = {}
        self._after: dict[str, set[str]] = defaultdict(set)
        for entry in entries:
            if entry.name.startswith((TENANTS, GRANTS)):
                continue
            if not is_name(entry.name):
                self.foreign[entry.name] = entry.size
                continue
            node = node_of(entry.name)
            # Two chunks whose ids begin alike are made up: the second is no more than a name.
            if node is None or (not node.tail and node.id[:SHORT] in self._chunks):
                self.others[entry.name] = entry
                continue
            self.held[entry.name] = Held(node, entry.size, entry.used)
            self._after[node.parent].add(entry.name)
            if not node.tail:
                self._chunks[node.id[:SHORT]] = self.held[entry.name]
        self.pinned = {name.removeprefix("pins/") for name in self.others if name.startswith("pins/")}
        self._spaces = {name[len("spaces/") :][:SHORT] for name in self.others if name.startswith("spaces/")}

    @property
    def bytes(self) -> int:
        known = sum(held.size for held in self.held.values()) + sum(entry.size for entry in self.others.values())
        return known + sum(self.foreign.values())

    def before(self, node: Node) -> Held | None:
        """The chunk that an object follows, None where it is the first of its space, or the chunk is gone."""
        held = self._chunks.get(node.parent) if node.start else None
        return held if held is not None and _follows(held.node, node) else None

    def after(self, node: Node) -> list[Held]:
        """The objects that follow a chunk."""
        found = [] if node.tail else [self.held[name] for name in self._after.get(node.id[:SHORT], ())]
        return [held for held in found if _follows(node, held.node)]

    def space(self, node: Node) -> str | None:
        """First digits of the key of an object's space, None where one of the chunks before it, or the space, is gone."""
        while node.start:
            held = self.before(node)
            if held is None:
                return None
            node = held.node
        return node.parent if node.parent in self._spaces else None

    def roots(self) -> dict[str, str | None]:
        """The same of all objects with rows, by name, in one pass."""
        found: dict[str, str | None] = {}
        for held in self.held.values():
            path, node = [], held.node
            while node.name not in found:
                path.append(node.name)
                before = self.before(node)
                if before is None:
                    found[node.name] = None if node.start or node.parent not in self._spaces else node.parent
                    break
                node = before.node
            found.update(dict.fromkeys(path, found[node.name]))
        return found

    def strangers(self) -> list[Entry]:
        """Objects of kinds that this version does not know, the longest unused first: they save no prefill, so that they go first."""
        unknown = (entry for name, entry in self.others.items() if name.partition("/")[0] not in KINDS)
        return sorted(unknown, key=lambda entry: (entry.used, entry.name))

    def unneeded(self, spaces: Iterable[Space], now: float) -> list[Entry]:
        """What describes no rows that are here, and pins of what is gone, once they are GRACE seconds old.

        Args:
            spaces: those that could be read. Where another one has rows, nothing says which models and calibrations are its own: all stay.
            now: seconds since 1970.
        """
        roots = {root for root in self.roots().values() if root is not None}
        used = [space for space in spaces if space.key[:SHORT] in roots]
        unread = len({space.key[:SHORT] for space in used}) < len(roots)
        needed = {name for space in used for name in (f"models/{space.weights}.json", f"calibrations/{space.calibration}.safetensors")}
        ids = {held.node.id for held in self.held.values()}

        def idle(name: str) -> bool:
            kind, _, rest = name.partition("/")
            if kind == "spaces":
                return rest[:SHORT] not in roots
            return (kind == "pins" and rest not in ids) or (kind in ("models", "calibrations") and not unread and name not in needed)

        return [entry for name, entry in self.others.items() if now - entry.used > GRACE and idle(name)]

    def find(self, id: str) -> list[Held]:
        """Objects whose id begins so."""
        return [held for held in self.held.values() if held.node.id.startswith(id)] if id else []

    def line(self, node: Node) -> list[Held]:
        """The chunks before an object, the nearest first."""
        found = []
        while (held := self.before(node)) is not None:
            found.append(held)
            node = held.node
        return found

    def below(self, node: Node) -> Iterator[Held]:
        """All that follows an object, leaves first."""
        found = self.after(node)
        for held in found:
            found += self.after(held.node)
        yield from reversed(found)

    def stays(self, node: Node) -> bool:
        """Whether an object is pinned, or one that is follows it."""
        return node.id in self.pinned or any(held.node.id in self.pinned for held in self.below(node))

    def drop(self, held: Held) -> None:
        """Take note that an object is gone."""
        del self.held[held.node.name]
        self._after[held.node.parent].discard(held.node.name)
        if not held.node.tail:
            self._chunks.pop(held.node.id[:SHORT], None)

    def going(self, now: float, cost: Cost, keep: frozenset[str] = frozenset()) -> Iterator[Held]:
        """What goes, the least worth first; each is taken as gone before the next is found.

        Args:
            now: seconds since 1970.
            cost: what a prefill costs.
            keep: names of objects that stay, with all that they follow.
        """
        roots = self.roots()

        def worth(held: Held) -> float:
            root = roots[held.node.name]
            # Out of reach: it saves nothing, unless its beginning is on its way.
            if root is None and now - held.used > GRACE:
                return 0.0
            return cost(root, held.node.start, held.node.tokens) / max(held.size, 1) * 2.0 ** (-max(now - held.used, 0.0) / HALF_LIFE)

        def leaf(held: Held) -> bool:
            return not self.after(held.node) and held.node.id not in self.pinned and held.node.name not in keep

        heap = [(worth(held), held.node.name) for held in self.held.values() if leaf(held)]
        heapq.heapify(heap)
        while heap:
            held = self.held[heapq.heappop(heap)[1]]
            before = self.before(held.node)
            self.drop(held)
            yield held
            if before is not None and leaf(before):
                heapq.heappush(heap, (worth(before), before.node.name))


def _follows(before: Node, node: Node) -> bool:
    """Whether the rows of one object go on where a chunk's end: so that made-up names cannot follow one another in a circle."""
    return before.start < node.start == before.stop
