"""Files of neighbouring rows as one: what a prompt's chunks hold, seen as a single file, without copying it."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from formats.container import Defect, Reader, TensorPlan, WriteReport, verifying_threads, write_container
from formats.errors import ManifestError
from formats.manifest import CacheInfo, Manifest, ModelInfo, Role, Segment, Tokens


class Joined(Reader):
    """Readers of files that follow one another, as the reader of one file.

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
        self._places: dict[str, tuple[int, str]] = {}
        self._codecs, self._ropes = _Table(), _Table()
        first = parts[0].manifest
        layers = list(first.layers)
        merged = [[self._renamed(0, i, info, None) for i, info in enumerate(layers)]]
        for number, part in enumerate(parts[1:], 1):
            before = merged[-1]
            if len(part.manifest.layers) != len(layers):
                raise ManifestError(f"has {len(part.manifest.layers)} layers, those before it {len(layers)}", path=part.path)
            merged.append([self._renamed(number, i, info, before[i]) for i, info in enumerate(part.manifest.layers)])
        self.manifest = Manifest(
            model=model,
            length=sum(part.manifest.length for part in parts),
            layers=tuple(_joined(column) for column in zip(*merged, strict=True)),
            codecs=tuple(self._codecs.entries),
            ropes=tuple(self._ropes.entries),
            tokens=Tokens.of([i for part in parts for i in (part.manifest.tokens.ids if part.manifest.tokens else ())]),
            quality=quality_of([part.manifest for part in parts]),
            producer=dict(first.producer),
            extra={key: value for key, value in first.extra.items() if key != "store"},
        )
        self.tensors = {name: replace(parts[at].tensors[own], name=name) for name, (at, own) in self._places.items()}
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
            at, own = self._places[name]
            self._parts[at].verify_ahead([own], threads)

    def array(self, name: str, *, verify: bool = True) -> np.ndarray:
        at, own = self._places[name]
        self.failed = at
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

    def _renamed(self, number: int, layer: int, info: CacheInfo, before: CacheInfo | None) -> CacheInfo:
        """One part's layer with the codecs, ropes, rows and tensors of the whole."""
        part = self._parts[number]
        if number and (info.caches or info.arrays or before is None or (info.cls, info.attention) != (before.cls, before.attention)):
            raise ManifestError(f"layer {layer}: a {info.cls} cannot be joined to {before.cls if before else 'nothing'}", path=part.path)
        if before is not None and [before.positions[-1][1:]] != [(start,) for start, _ in info.positions]:
            raise ManifestError(
                f"layer {layer}: has the positions {list(info.positions)}, not one range from {before.positions[-1][1]} on", path=part.path
            )
        if not number:
            inner = tuple(self._renamed(0, layer, one, None) for one in info.caches)
            arrays = tuple(None if a is None else replace(a, tensor=self._place(0, a.tensor, a.tensor)) for a in info.arrays)
            info = replace(info, caches=inner, arrays=arrays)
        k, v = (self._role(number, about, getattr(before, role, None)) for role, about in (("k", info.k), ("v", info.v)))
        return replace(info, k=k, v=v)

    def _role(self, number: int, about: Role | None, before: Role | None) -> Role | None:
        part = self._parts[number]
        if about is None:
            return None
        rope = None if about.rope is None else self._ropes.index(part.manifest.ropes[about.rope])
        if before is not None and (before.heads, before.dim, before.dtype, before.rope) != (about.heads, about.dim, about.dtype, rope):
            raise ManifestError("has keys or values of other sizes or another rotation than those before it", path=part.path)
        first = before.segments[-1].rows[1] if before is not None else 0
        segments = tuple(self._segment(number, segment, first) for segment in about.segments)
        return replace(about, rope=rope, segments=segments)

    def _segment(self, number: int, segment: Segment, first: int) -> Segment:
        codec = self._codecs.index(self._parts[number].manifest.codecs[segment.codec])
        tensors = {part: self._place(number, f"c{number}.{name}" if number else name, name) for part, name in segment.tensors.items()}
        return replace(segment, rows=(segment.rows[0] + first, segment.rows[1] + first), codec=codec, tensors=tensors)

    def _place(self, number: int, name: str, own: str) -> str:
        self._places[name] = (number, own)
        return name


class _Table:
    """Different entries in the order they came, each found by what it says."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._places: dict[str, int] = {}

    def index(self, entry: Any) -> int:
        at = self._places.setdefault(repr(entry), len(self.entries))
        if at == len(self.entries):
            self.entries.append(entry)
        return at


def _joined(column: Sequence[CacheInfo]) -> CacheInfo:
    """One layer of all parts."""
    first, last = column[0], column[-1]
    if len(column) == 1:
        return first
    roles: dict[str, Role | None] = {}
    for role in ("k", "v"):
        parts = [getattr(info, role) for info in column]
        about = parts[0]
        roles[role] = None if about is None else replace(about, segments=tuple(segment for part in parts for segment in part.segments))
    return replace(first, offset=last.offset, positions=((first.positions[0][0], last.positions[-1][1]),), **roles)  # type: ignore[arg-type]


def quality_of(parts: Sequence[Manifest]) -> tuple[dict[str, Any], ...]:
    """The lossy steps of all parts: each once, but for the coding itself, whose error is the mean over the tokens that were coded."""
    steps: dict[str, dict[str, Any]] = {}
    coded: list[tuple[int, dict[str, Any]]] = []
    for part in parts:
        for entry in part.quality:
            if entry["step"] == "encode":
                coded.append((part.length, entry))
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
