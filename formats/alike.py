"""Headers that say the same but for a few values: chunks of one prompt, of which the first is read as `examine` reads, and others by it.

Between two chunks differ digests, token ids, positions, errors and the place in the store. What is left of the header, byte for byte the
same, has been read and checked before; the values themselves are read here. Wherever anything else differs, nothing is read: the header
is then for `examine`, which also says what is wrong with one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from formats.errors import KVError
from formats.manifest import CacheInfo, Manifest, Node, Tokens, parse_quality, tokens_digest
from formats.strict_json import Room, loads
from formats.tensor_info import TensorInfo
from formats.token_ids import TokenIds

_DIGEST, _NUMBER = rb'\\":\\"[0-9a-f]{64}\\"', rb'\\":(?:0|[1-9][0-9]{0,14})(?=[,}])'
_SPAN = rb"\[\[(?:0|[1-9][0-9]{0,14}),(?:0|[1-9][0-9]{0,14})\]\]"
# Of the manifest's JSON within the header's JSON, where quotes are escaped once: text within a string of it has its own escaped twice.
_VALUES = re.compile(
    rb'(\\"(?:blake3%b|parent%b|start%b|offset%b|positions\\":%b|ids\\":\[[0-9,]*\]|quality\\":\[.*?\](?=,\\"requires\\":)))'
    % (_DIGEST, _DIGEST, _NUMBER, _NUMBER, _SPAN)
)


@dataclass(frozen=True)
class Outline:
    """A header that was read, and where it has values that another may have others of.

    Attributes:
        fixed: the pieces between these values.
        manifest, tensors: what it says; tensors in the order of the file.
        table: of each tensor its fields before the offset, that, its encoding, and where its digest is among all, in the header's order.
        size: bytes of the header.
        data: bytes that follow it.
    """

    fixed: list[bytes]
    manifest: Manifest
    tensors: Mapping[str, TensorInfo]
    table: dict[str, tuple[tuple[Any, ...], int, str, int]]
    size: int
    data: int

    @classmethod
    def of(cls, raw: bytes, start: int, manifest: Manifest, tensors: Mapping[str, TensorInfo]) -> "Outline | None":
        """The outline of a header without problems; None where its values do not stand where those of a chunk do.

        Args:
            raw: all of it.
            start: where it goes on after its own digest.
            manifest, tensors: what it says.
        """
        fixed, values = _cut(raw, start)
        data = sum(info.padded for info in tensors.values())
        table = {name: (tensors[name][:6], tensors[name].offset, tensors[name].encoding, 64 * i) for i, name in enumerate(sorted(tensors))}
        found = cls(fixed, manifest, tensors, table, len(raw), data)
        read = found._read(values, 0)
        # The values found must be those that were read, one by one.
        return found if read is not None and (read.manifest, read.tensors) == (manifest, tensors) else None

    def read(self, raw: bytes, start: int, size: int) -> "Alike | None":
        """What another header says, whose own digest is right; None where it differs in more than values.

        Args:
            raw, start: as `of`.
            size: of the file.
        """
        fixed, values = _cut(raw, start)
        if fixed != self.fixed or len(raw) + self.data != size or len(raw) % 64:
            return None
        return self._read(values, len(raw) - self.size)

    def _read(self, values: list[bytes], moved: int) -> "Alike | None":
        layers, count = self.manifest.layers, len(self.table)
        if len(values) != 5 + 2 * len(layers) + count:
            return None
        parent, first, *rest = values
        placed, (quality, *digests, digest, ids) = rest[: 2 * len(layers)], rest[2 * len(layers) :]
        tokens = self.manifest.tokens
        if tokens is None or not all(value.startswith(b'\\"blake3') for value in (*digests, digest)):
            return None
        if [value.split(b"\\")[1] for value in (parent, first, quality, ids)] != [b'"parent', b'"start', b'"quality', b'"ids']:
            return None
        held = _tokens(ids, digest)
        pairs = list(zip(placed[::2], placed[1::2], strict=True))
        # The layers of a chunk stand at the same place, most often: it is read and kept once.
        places = {pair: _place(*pair) for pair in set(pairs)}
        caches = [found for info, pair in zip(layers, pairs, strict=True) if (found := _cache(info, places[pair])) is not None]
        steps = _quality(quality)
        store = self.manifest.extra.get("store")
        if held is None or steps is None or len(caches) != len(layers) or not isinstance(store, dict) or len(held.ids) != len(tokens.ids):
            return None
        extra = {**self.manifest.extra, "store": {**store, "parent": _digest(parent), "start": _number(first)}}
        manifest = replace(self.manifest, layers=tuple(caches), tokens=held, quality=steps, extra=extra)
        return Alike(manifest, Moved(self, moved, "".join(map(_digest, digests))))


@dataclass
class Alike:
    """What a header says, read by the outline of another."""

    manifest: Manifest
    tensors: "Moved"


class Moved(Mapping[str, TensorInfo]):
    """The tensors of an outline, elsewhere and with other digests; each is made when it is asked for, for chunks have many.

    Args:
        like: the outline.
        moved: bytes by which they lie further back.
        digests: one after the other in the order of the header.
    """

    __slots__ = ("_digests", "_like", "_moved")

    def __init__(self, like: Outline, moved: int, digests: str) -> None:
        self._like, self._moved, self._digests = like, moved, digests

    def __getitem__(self, name: str) -> TensorInfo:
        fields, offset, encoding, at = self._like.table[name]
        return TensorInfo._make((*fields, offset + self._moved, encoding, self._digests[at : at + 64]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._like.tensors)

    def __len__(self) -> int:
        return len(self._like.tensors)


def _cut(raw: bytes, start: int) -> tuple[list[bytes], list[bytes]]:
    """A header's fixed pieces, without its length, its digest and what fills it up, and the values between them."""
    pieces = _VALUES.split(raw[start:].rstrip(b" "))
    return [raw[8 : start - 64], *pieces[::2]], pieces[1::2]


def _digest(value: bytes) -> str:
    return value[-66:-2].decode()


def _number(value: bytes) -> int:
    return int(value.partition(b":")[2])


def _place(offset: bytes, positions: bytes) -> tuple[int, tuple[tuple[int, int]]] | None:
    """Where a layer stands: its offset, and the positions of its rows, which are in one piece."""
    if not (offset.startswith(b'\\"offset') and positions.startswith(b'\\"positions')):
        return None
    start, stop = map(int, positions[positions.index(b"[[") + 2 : -2].split(b","))
    return (_number(offset), ((start, stop),)) if stop > start else None


def _cache(info: CacheInfo, place: tuple[int, tuple[tuple[int, int]]] | None) -> CacheInfo | None:
    """A layer elsewhere, of as many rows in one piece."""
    if place is None or info.caches:
        return None
    offset, positions = place
    if positions[0][1] - positions[0][0] != info.rows:
        return None
    return CacheInfo(info.cls, info.attention, info.window, offset, positions, info.k, info.v, info.arrays, info.params)


def _tokens(value: bytes, digest: bytes) -> Tokens | None:
    ids = TokenIds.parse(value[value.index(b"[") + 1 : -1])
    return None if ids is None or tokens_digest(ids) != _digest(digest) else Tokens(ids, _digest(digest))


def _quality(value: bytes) -> tuple[dict[str, Any], ...] | None:
    text = value.partition(b":")[2].replace(b'\\"', b'"')
    if b"\\" in text:
        return None
    try:
        return parse_quality(Node(loads(text.decode(), "quality", Room(len(value)))))
    except (KVError, UnicodeDecodeError):
        return None
