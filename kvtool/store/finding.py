"""The longest beginning of some tokens that a store holds for a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtool.capturing import cached_part
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from kvtool.store.described import Descriptions
from kvtool.store.keys import SHORT, Node, Space, chunk_name, layers_digest, node_of, tail_hashes, tails_of
from kvtool.store.objects import Objects

_FIRST = 4  # chunks asked for at first


@dataclass(frozen=True)
class Match:
    """A beginning of some tokens that a store holds.

    Attributes:
        space: where.
        nodes: the objects, in order.
        usable: tokens that need no prefill: at least one less than were looked up, for a model gives the logits of tokens that it runs.
        recode: whether the keys have to be turned for the model first.
    """

    space: Space
    nodes: tuple[Node, ...]
    usable: int
    recode: bool = False

    @property
    def id(self) -> str:
        """What `pin`, `unpin` and `remove` call it."""
        return self.nodes[-1].id


def matches(
    objects: Objects,
    known: Descriptions,
    ids: Sequence[int],
    model: LoadedModel,
    ends: bool,
    avoid: frozenset[str] = frozenset(),
    only: str | None = None,
) -> list[Match]:
    """What fits, one for each space and way, the longest first; of equal ones rather what needs no recode, is of the model's dtype, has
    more bytes a token.

    Args:
        ids: of a prompt.
        ends: also look for prompts that end within these tokens; without, whole chunks alone count.
        avoid: names of objects that are as good as absent.
        only: key of the one space to look in.
    """
    probes = probe_model(model.model)
    here = layers_digest(probes)
    # A cache that cannot give its last token back is of no use where no token is left to run.
    longest = len(ids) if cached_part(model, len(ids)) == len(ids) else len(ids) - 1
    found = []
    for space in known.spaces():
        if space.name in avoid or (only is not None and space.key != only) or not space.same_model(model.info, probes):
            continue
        same, dtype = space.about["layers"] == here, space.about["model"]["dtype"] == model.info.dtype
        for line in lines(objects, space, ids[:longest], ends, avoid):
            usable = min(line[-1].stop, len(ids) - 1)
            if usable > 0:
                weight = (objects.size(line[0].name) or 0) / line[0].tokens
                found.append(((usable, same, dtype, weight), Match(space, tuple(line), usable, not same)))
    return [match for _, match in sorted(found, key=lambda pair: pair[0], reverse=True)]


def lines(objects: Objects, space: Space, ids: Sequence[int], ends: bool = True, avoid: frozenset[str] = frozenset()) -> list[list[Node]]:
    """Objects of a space that hold a beginning of these tokens, in order: its chunks, and with `ends` each line that goes on to an end."""
    nodes = _chain(objects, space, ids, avoid)
    found = [nodes] if nodes else []
    return [*found, *_ends(objects, space, nodes, ids, avoid)] if ends else found


def _chain(objects: Objects, space: Space, ids: Sequence[int], avoid: frozenset[str]) -> list[Node]:
    """The chunks of a space that these tokens begin with."""
    nodes: list[Node] = []
    parent, keys, batch = space.key, space.keys(ids), _FIRST
    # More at once the further it goes: an answer from far away takes its time.
    while asked := list(islice(keys, batch)):
        for key in asked:
            start = len(nodes) * space.chunk
            nodes.append(Node(chunk_name(key, parent, start, space.chunk), key, parent[:SHORT], start, space.chunk))
            parent = key
        new = nodes[-len(asked) :]
        for i, size in enumerate(objects.sizes([node.name for node in new], lookup=True)):
            if size is None or new[i].name in avoid:
                return nodes[: len(nodes) - len(new) + i]
        batch *= 2
    return nodes


def _ends(objects: Objects, space: Space, nodes: Sequence[Node], ids: Sequence[int], avoid: frozenset[str]) -> Iterator[list[Node]]:
    """Lines to the ends of prompts that these tokens go on from: ends after the last chunks, or of prompts kept whole."""
    # An end has a chunk's tokens at most before its exact rows, so that it follows the last chunk or the one before.
    for count in sorted({0, max(len(nodes) - 1, 0), len(nodes)}):
        parent = nodes[count - 1].id if count else space.key
        first = count * space.chunk
        listed = [node for entry in objects.names(tails_of(parent)) if (node := node_of(entry.name)) is not None]
        fit = [node for node in listed if node.name not in avoid and node.start == first and node.stop <= len(ids)]
        hashes = tail_hashes(parent, ids[first:], {(node.recent or 0, node.tokens) for node in fit}, space.secret)
        yield from ([*nodes[:count], node] for node in fit if hashes[node.recent or 0, node.tokens] == node.id)
