"""Files of neighbouring rows as one: what a prompt's chunks hold, seen as a single file, without copying it."""

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from formats.container import AHEAD, Defect, Reader, TensorPlan, WriteReport, verifying_threads, write_container
from formats.errors import ManifestError, counted
from formats.manifest import CacheInfo, Manifest, ModelInfo, Role, Segment, Tokens
from formats.tensor_info import TensorInfo

_LATER = re.compile(r"c([1-9][0-9]*)\.(.+)")  # name of a tensor of the whole that is not of the first part
_MADE = 4  # roles of which all segments are in memory at a time: keys and values of a layer, and of the one before


class Joined(Reader):
    """Readers of files that follow one another, as the reader of one file.

    Many parts have many segments and tensors: what the whole says of them is made from what the parts say when it is asked for.

    Args:
        parts: the files, in order; each holds the rows of its own tokens, at the positions where the one before ends.
        model: who computed them, as the whole is to say.
        path: what errors of the whole name.
    Raises:
        ManifestError: a part does not follow the one before it, or has other layers.
    """

    def __init__(self, parts: Sequence[Reader], model: ModelInfo, path: str) -> None:
        self.path, self._parts = path, list(parts)
        self._threads: ThreadPoolExecutor | None = None
        self.failed: int | None = None  # the part whose bytes were wrong or could not be read
        self._codecs, self._ropes = _Table(), _Table()
        self._made: deque[_Segments] = deque()
        # By part: the comparison of its small tensors' digests, and their names, which most parts have alike.
        self._checks: dict[int, tuple[Future[None], dict[str, None]]] = {}
        self._small: dict[str, None] = {}
        first = parts[0].manifest
        taken = next((name for name in parts[0].tensors if _LATER.fullmatch(name)), None)
        if taken is not None:
            raise ManifestError(f"tensor {taken!r} has a name that is another part's", path=parts[0].path)
        layers = [_Layer(self._first(info)) for info in first.layers]
        for number, part in enumerate(parts[1:], 1):
            if len(part.manifest.layers) != len(layers):
                raise ManifestError(f"has {counted(len(part.manifest.layers), 'layer')}, those before it {len(layers)}", path=part.path)
            codecs, ropes = self._tables(part)
            for i, (layer, info) in enumerate(zip(layers, part.manifest.layers, strict=True)):
                self._follow(number, codecs, ropes, i, layer, info)
        self.manifest = Manifest(
            model=model,
            length=sum(part.manifest.length for part in parts),
            layers=tuple(layer.whole() for layer in layers),
            codecs=tuple(self._codecs.entries),
            ropes=tuple(self._ropes.entries),
            tokens=Tokens.of([i for part in parts for i in (part.manifest.tokens.ids if part.manifest.tokens else ())]),
            quality=quality_of([(part.manifest.length, part.manifest.quality) for part in parts]),
            producer=dict(first.producer),
            extra={key: value for key, value in first.extra.items() if key != "store"},
        )
        self.tensors = _Tensors(parts)
        self.file_bytes = sum(part.file_bytes for part in parts)
        self.header_bytes = sum(part.header_bytes for part in parts)

    def __enter__(self) -> "Joined":
        return self

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for part in self._parts:
            part.close()

    def verify_ahead(self, names: Sequence[str], threads: ThreadPoolExecutor | None = None) -> None:
        if threads is None:
            threads = self._threads = self._threads or verifying_threads()
        for name in names:
            at, own = _place(name)
            part = self._parts[at]
            if at in self._checks and own in self._checks[at][1]:
                continue
            if part.tensors[own].padded >= AHEAD:
                part.verify_ahead([own], threads)
            elif part.there:
                # Chunks have many small tensors: those of one are one job.
                small = {n: None for n, info in part.tensors.items() if info.padded < AHEAD}
                self._small = self._small if self._small == small else small
                self._checks[at] = threads.submit(part.check, self._small), self._small

    def array(self, name: str, *, verify: bool = True) -> np.ndarray:
        at, own = _place(name)
        self.failed = at
        held = self._checks.get(at) if verify else None
        if held is not None and own in held[1]:
            held[0].result()
            verify = False
        array = self._parts[at].array(own, verify=verify)
        self.failed = None
        return array

    def verify(self, progress: Any = None) -> list[Defect]:
        return [defect for part in self._parts for defect in part.verify(progress)]

    def write(self, path: str | os.PathLike[str]) -> WriteReport:
        """The whole as one file, its tensors as they are stored."""

        def plan(name: str) -> TensorPlan:
            info = self.tensors[name]
            # What maps as it is stays so: only exact rows were ever compressed.
            return TensorPlan(name, info.dtype, info.shape, lambda: self.array(name), info.encoding == "zstd")

        return write_container(path, self.manifest, [plan(name) for name in self.tensors])

    def _first(self, info: CacheInfo) -> CacheInfo:
        """A layer of the first part, or a cache within it, as the whole has it."""
        codecs, ropes = self._tables(self._parts[0])
        roles: dict[str, Any] = {}
        for name in ("k", "v"):
            about: Role | None = getattr(info, name)
            if about is not None:
                segments = _Segments(self._made)
                segments.add(0, about, codecs)
                about = replace(about, rope=None if about.rope is None else ropes[about.rope], segments=segments)
            roles[name] = about
        return replace(info, caches=tuple(map(self._first, info.caches)), **roles)

    def _follow(self, number: int, codecs: tuple[int, ...], ropes: tuple[int, ...], i: int, layer: "_Layer", info: CacheInfo) -> None:
        """Add a part's layer to those before it."""
        path, first = self._parts[number].path, layer.first
        if info.caches or info.arrays or (info.cls, info.attention) != (first.cls, first.attention):
            raise ManifestError(f"layer {i}: a {info.cls} cannot be joined to {first.cls}", path=path)
        if len(info.positions) != 1 or info.positions[0][0] != layer.stop:
            raise ManifestError(f"layer {i}: has the positions {list(info.positions)}, not one range from {layer.stop} on", path=path)
        for before, about in ((first.k, info.k), (first.v, info.v)):
            if before is None and about is None:
                continue
            rope = None if about is None or about.rope is None else ropes[about.rope]
            here = None if about is None else (about.heads, about.dim, about.dtype, rope)
            if before is None or about is None or (before.heads, before.dim, before.dtype, before.rope) != here:
                raise ManifestError("has keys or values of other sizes or another rotation than those before it", path=path)
            assert isinstance(before.segments, _Segments)
            before.segments.add(number, about, codecs)
        layer.offset, layer.stop = info.offset, info.positions[0][1]

    def _tables(self, part: Reader) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the codecs and rotations of a part are in the whole's tables."""
        return tuple(map(self._codecs.index, part.manifest.codecs)), tuple(map(self._ropes.index, part.manifest.ropes))


def _name(number: int, own: str) -> str:
    """What the whole calls a tensor of a part."""
    return f"c{number}.{own}" if number else own


def _place(name: str) -> tuple[int, str]:
    """The part that a tensor of the whole is in, and its name there."""
    later = _LATER.fullmatch(name)
    return (0, name) if later is None else (int(later[1]), later[2])


class _Tensors(Mapping[str, TensorInfo]):
    """The tensors of all parts by their names in the whole, part after part."""

    def __init__(self, parts: Sequence[Reader]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> TensorInfo:
        at, own = _place(name)
        if at >= len(self._parts):
            raise KeyError(name)
        return self._parts[at].tensors[own]

    def __iter__(self) -> Iterator[str]:
        return (_name(number, own) for number, part in enumerate(self._parts) for own in part.tensors)

    def __len__(self) -> int:
        return sum(len(part.tensors) for part in self._parts)


class _Segments(Sequence[Segment]):
    """A role's segments in all parts, with the rows, codecs and tensors of the whole.

    Args:
        made: roles whose segments are in memory, which are few at a time.
    """

    def __init__(self, made: "deque[_Segments]") -> None:
        self._made = made
        self._all: tuple[Segment, ...] | None = None
        self._held: list[tuple[int, Sequence[Segment], tuple[int, ...]]] = []  # number of a part, its own segments, its codecs

    def add(self, number: int, about: Role, codecs: tuple[int, ...]) -> None:
        """Go on with a part's."""
        self._held.append((number, about.segments, codecs))

    def __len__(self) -> int:
        return sum(len(own) for _, own, _ in self._held)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments())

    def __getitem__(self, at: Any) -> Any:
        return self._segments()[at]

    def _segments(self) -> tuple[Segment, ...]:
        if (found := self._all) is None:
            found = self._all = tuple(self._whole())
            self._made.append(self)
            if len(self._made) > _MADE:
                self._made.popleft()._all = None
        return found

    def _whole(self) -> Iterator[Segment]:
        first = 0
        for number, own, codecs in self._held:
            for segment in own:
                tensors = {part: _name(number, name) for part, name in segment.tensors.items()}
                yield Segment((segment.rows[0] + first, segment.rows[1] + first), codecs[segment.codec], segment.frame, tensors)
            first += own[-1].rows[1] if own else 0


class _Table:
    """Different entries in the order they came."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def index(self, entry: Any) -> int:
        if entry not in self.entries:
            self.entries.append(entry)
        return self.entries.index(entry)


class _Layer:
    """A layer of all parts, as far as they have been seen."""

    def __init__(self, first: CacheInfo) -> None:
        self.first, self.offset = first, first.offset
        self.stop = first.positions[-1][1] if first.positions else 0

    def whole(self) -> CacheInfo:
        if self.offset == self.first.offset:
            return self.first
        return replace(self.first, offset=self.offset, positions=((self.first.positions[0][0], self.stop),))


def quality_of(parts: Iterable[tuple[int, Iterable[dict[str, Any]]]]) -> tuple[dict[str, Any], ...]:
    """The lossy steps of parts, given with their tokens: each once, but for the coding itself, whose error is the mean over tokens."""
    steps: dict[str, dict[str, Any]] = {}
    coded: list[tuple[int, dict[str, Any]]] = []
    for length, quality in parts:
        for entry in quality:
            if entry.get("step") == "encode":
                coded.append((length, entry))
            else:
                steps.setdefault(json.dumps(entry, sort_keys=True), entry)
    if not coded:
        return tuple(steps.values())
    record: dict[str, Any] = {"step": "encode", "codec": coded[-1][1].get("codec"), "chunks": len(coded)}
    for field in ("k_relative_error", "v_relative_error"):
        held = [(count, entry[field]) for count, entry in coded if isinstance(entry.get(field), int | float)]
        if held:
            record[field] = float(f"{sum(count * value for count, value in held) / sum(count for count, _ in held):.4g}")
    return (*steps.values(), record)
