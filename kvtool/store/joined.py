"""Files of neighbouring rows as one: what a prompt's chunks hold, seen as a single file, without copying it."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from formats.container import AHEAD, Defect, Reader, TensorPlan, WriteReport, verifying_threads, write_container
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
        self._checks: dict[int, Future[None]] = {}
        first = parts[0].manifest
        layers = [_Layer(self._first(info)) for info in first.layers]
        for number, part in enumerate(parts[1:], 1):
            if len(part.manifest.layers) != len(layers):
                raise ManifestError(f"has {len(part.manifest.layers)} layers, those before it {len(layers)}", path=part.path)
            tables = self._tables(part)
            for i, (layer, info) in enumerate(zip(layers, part.manifest.layers, strict=True)):
                self._follow(number, tables, i, layer, info)
        self.manifest = Manifest(
            model=model,
            length=sum(part.manifest.length for part in parts),
            layers=tuple(layer.whole() for layer in layers),
            codecs=tuple(self._codecs.entries),
            ropes=tuple(self._ropes.entries),
            tokens=Tokens.of([i for part in parts for i in (part.manifest.tokens.ids if part.manifest.tokens else ())]),
            quality=quality_of([part.manifest for part in parts]),
            producer=dict(first.producer),
            extra={key: value for key, value in first.extra.items() if key != "store"},
        )
        self.tensors = {name: parts[at].tensors[own] for name, (at, own) in self._places.items()}
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
            if self.tensors[name].padded >= AHEAD:
                self._parts[at].verify_ahead([own], threads)
            elif self._parts[at].there and at not in self._checks:
                # Chunks have many small tensors: those of one are one job.
                tensors = self._parts[at].tensors
                self._checks[at] = threads.submit(self._parts[at].check, [n for n, info in tensors.items() if info.padded < AHEAD])

    def array(self, name: str, *, verify: bool = True) -> np.ndarray:
        at, own = self._places[name]
        self.failed = at
        check = self._checks.get(at) if verify and self.tensors[name].padded < AHEAD else None
        if check is not None:
            check.result()
        array = self._parts[at].array(own, verify=verify and check is None)
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
        tables = self._tables(self._parts[0])
        arrays = tuple(None if a is None else replace(a, tensor=self._place(0, a.tensor, a.tensor)) for a in info.arrays)
        roles = {}
        for name in ("k", "v"):
            about: Role | None = getattr(info, name)
            if about is not None:
                rope = None if about.rope is None else tables[1][about.rope]
                about = replace(about, rope=rope, segments=tuple(self._segments(0, tables[0], about, 0)))
            roles[name] = about
        return replace(info, caches=tuple(map(self._first, info.caches)), arrays=arrays, **roles)  # type: ignore[arg-type]

    def _follow(self, number: int, tables: tuple[list[int], list[int]], i: int, layer: "_Layer", info: CacheInfo) -> None:
        """Add a part's layer to those before it."""
        path, first = self._parts[number].path, layer.first
        if info.caches or info.arrays or (info.cls, info.attention) != (first.cls, first.attention):
            raise ManifestError(f"layer {i}: a {info.cls} cannot be joined to {first.cls}", path=path)
        if len(info.positions) != 1 or info.positions[0][0] != layer.stop:
            raise ManifestError(f"layer {i}: has the positions {list(info.positions)}, not one range from {layer.stop} on", path=path)
        for role, before, about in (("k", first.k, info.k), ("v", first.v, info.v)):
            if about is None:
                continue
            rope = None if about.rope is None else tables[1][about.rope]
            if before is not None and (before.heads, before.dim, before.dtype, before.rope) != (about.heads, about.dim, about.dtype, rope):
                raise ManifestError("has keys or values of other sizes or another rotation than those before it", path=path)
            held = layer.segments[role]
            held += self._segments(number, tables[0], about, held[-1].rows[1] if held else 0)
        layer.offset, layer.stop = info.offset, info.positions[0][1]

    def _tables(self, part: Reader) -> tuple[list[int], list[int]]:
        """Where the codecs and rotations of a part are in the whole's tables."""
        return [self._codecs.index(codec) for codec in part.manifest.codecs], [self._ropes.index(rope) for rope in part.manifest.ropes]

    def _segments(self, number: int, codecs: list[int], about: Role, first: int) -> list[Segment]:
        """A role's segments with the rows, codecs and tensors of the whole."""
        found = []
        for segment in about.segments:
            tensors = {part: self._place(number, f"c{number}.{name}" if number else name, name) for part, name in segment.tensors.items()}
            rows = (segment.rows[0] + first, segment.rows[1] + first)
            found.append(Segment(rows, codecs[segment.codec], segment.frame, tensors))
        return found

    def _place(self, number: int, name: str, own: str) -> str:
        self._places[name] = (number, own)
        return name


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
        self.segments = {name: [] if about is None else list(about.segments) for name, about in (("k", first.k), ("v", first.v))}

    def whole(self) -> CacheInfo:
        if self.offset == self.first.offset:
            return self.first
        k, v = (
            None if about is None else replace(about, segments=tuple(self.segments[name]))
            for name, about in (("k", self.first.k), ("v", self.first.v))
        )
        return replace(self.first, offset=self.offset, positions=((self.first.positions[0][0], self.stop),), k=k, v=v)


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
