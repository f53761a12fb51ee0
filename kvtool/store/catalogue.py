"""What a store holds, as one listing tells: which object follows which, what each is worth, and what goes first.

    worth = FLOPs of the prefill that an object saves / its bytes * 2^(-age / HALF_LIFE)

An object goes only when no other follows it, for those would be out of reach without it: leaves first, then what they leave bare. So what
many prompts begin with stays longest. Pinned objects stay, and with them all that they follow.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvtool.store.keys import SHORT, Node, node_of
from kvtool.store.objects import Entry, is_name

HALF_LIFE = 24 * 3600.0
TENANTS = "tenants/"  # below it are the stores of a service's tenants, each with a catalogue and a quota of its own
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
            if entry.name.startswith(TENANTS):
                continue
            if not is_name(entry.name):
                self.foreign[entry.name] = entry.size
                continue
            node = node_of(entry.name)
            if node is None:
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
        return self._chunks.get(node.parent) if node.start else None

    def after(self, node: Node) -> list[Held]:
        """The objects that follow a chunk."""
        return [] if node.tail else [self.held[name] for name in self._after.get(node.id[:SHORT], ())]

    def space(self, node: Node) -> str | None:
        """First digits of the key of an object's space, None where one of the chunks before it, or the space, is gone."""
        while node.start:
            held = self.before(node)
            if held is None:
                return None
            node = held.node
        return node.parent if node.parent in self._spaces else None

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
        spaces: dict[str, str | None] = {}

        def space(node: Node) -> str | None:
            # Not by `space`, which walks a whole prompt for each of its chunks.
            path = []
            while node.name not in spaces:
                path.append(node.name)
                held = self.before(node)
                if held is None:
                    spaces[node.name] = None if node.start or node.parent not in self._spaces else node.parent
                    break
                node = held.node
            found = spaces[node.name]
            spaces.update(dict.fromkeys(path, found))
            return found

        def worth(held: Held) -> float:
            root = space(held.node)
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
