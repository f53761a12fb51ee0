"""Problems of attention for `native/run_problems.cpp`: blocks of rows as that program reads them, and the program built for a machine.

Nothing here needs the extension: a `Recorder` stands where its `Stored` would.
"""

import itertools
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.test_coded import assert_close, bias_of, queries, rows_of_block, stacked
from veloxquant_mlx import native
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.codecs.tc_tables import KeyReader, Predictor, ValueReader
from veloxquant_mlx.transfer.rope_angles import cos_sin

ROOT = Path(__file__).parent.parent
SRC = ROOT / "veloxquant_mlx" / "native" / "src"
SIMD = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
    "neon": ["-DKVTOOL_USE_NEON"],
}
# Of these CMakeLists.txt has it that no product is contracted with a sum.
EXACT = ("calibrated", "convert", "encode", "kernels", "search", "streams")
# GCC notes a change of its vectors' calling convention in a build that calls none, and doubts its own headers.
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]


def build(
    folder: Path,
    compiler: str,
    machine: str,
    levels: Sequence[str],
    *options: str,
    others: Sequence[str] = (),
    name: str = "run_problems",
) -> Path:
    """A program of `tests/native` for a machine ("X86" or "ARM64"), every warning an error; what is compiled in the folder stays so.

    Args:
        folder: of the objects of one compiler, machine and set of options.
        levels: those that will run, compiled with the options.
        others: levels that the machine cannot run. They are compiled without: under a sanitizer that takes ten times as long.
        name: `run_problems`, of all sources, or `run_calls`, of those alone whose functions are called one by one.
    """
    folder.mkdir(exist_ok=True)
    gcc = [] if "clang" in compiler else ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
    common = [compiler, "-std=c++17", "-O1", "-fno-math-errno", *WARNINGS, *gcc, f"-DKVTOOL_{machine}", f"-I{SRC}"]
    sources = [x.stem for x in SRC.glob("*.cpp") if x.stem != "pool" and not x.stem.startswith("bind")]
    sources.sort(key=lambda stem: (stem != "level", stem))  # it takes longest
    objects, commands = {}, []
    for source, level in itertools.product(sources if name == "run_problems" else EXACT, [*levels, *others]):
        objects[source, level] = path = folder / f"{source}-{level}.o"
        if not path.exists():
            contract = "-ffp-contract=off" if source in EXACT else "-ffp-contract=fast"
            where = [f"-DKVTOOL_LEVEL={level}", "-c", str(SRC / f"{source}.cpp"), "-o", str(path)]
            commands.append([*common, *(options if level in levels else ()), contract, *SIMD[level], *where])
    with ThreadPoolExecutor(os.cpu_count()) as compiling:
        list(compiling.map(partial(subprocess.run, check=True), commands))
    program = folder / name
    # Of an inline function in several objects the first one's is taken: one that was compiled with the options.
    ordered = sorted(objects, key=lambda key: key[1] in others)
    parts = [ROOT / "tests" / "native" / f"{name}.cpp", SRC / "pool.cpp", *(objects[key] for key in ordered)]
    subprocess.run([*common, *options, *map(str, parts), "-pthread", "-o", str(program)], check=True)
    return program


def array(x: np.ndarray | None) -> bytes:
    return struct.pack("<q", 0) if x is None else struct.pack("<q", x.nbytes) + np.ascontiguousarray(x).tobytes()


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def padded(x: np.ndarray) -> np.ndarray:
    """The last axis, to a multiple of 16."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)]).astype(np.float32)


def components(codes: np.ndarray, first: np.ndarray, bits: np.ndarray, points: np.ndarray) -> bytes:
    """As the extension lays them out: each table repeated to at least 16 points."""
    ends = np.cumsum(1 << bits.astype(np.int64))
    tables = [np.resize(x, max(16, len(x))) for x in np.split(points, ends)[: len(bits)]]
    table, place = (np.cumsum([0, *sizes])[: len(bits)] for sizes in (map(len, tables), 4 * bits.astype(np.int64)))
    every = np.concatenate([np.zeros(0, np.float32), *tables])
    lists = first.astype(np.int32), place.astype(np.int32), bits.astype(np.uint8), table.astype(np.int32), every.astype(np.float32)
    return numbers(codes.shape[2]) + array(codes) + b"".join(map(array, lists))


@dataclass
class Recorder:
    """What `_native.Stored` is told."""

    shape: tuple[int, int, int]
    type: int = 3
    data: np.ndarray | None = None
    stages: list[bytes] = field(default_factory=list)
    sides: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    grid: tuple[Any, ...] = (None, None, 1, False)
    turn: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    component: bytes = b""
    size: bytes = b""
    rows: np.ndarray | None = None
    mixed: np.ndarray | None = None
    smoothed: np.ndarray | None = None
    words: bytes = b""
    turns: np.ndarray | None = None

    def floats(self, data: np.ndarray, bfloat: bool) -> None:
        self.data, self.type = data, 2 if bfloat else {"float32": 0, "float16": 1}[str(data.dtype)]

    def codes(self, codes: np.ndarray, bits: int, table: list[float] | None) -> None:
        values = None if table is None else np.resize(np.array(table, np.float32), max(16, len(table)))
        self.stages.append(numbers(bits) + array(codes) + array(values))

    def scale(self, scale: np.ndarray) -> None:
        self.sides = scale, self.sides[1]

    def mean(self, mean: np.ndarray) -> None:
        self.sides = self.sides[0], mean

    def affine(self, *grid: Any) -> None:
        self.grid = grid

    def rotation(self, signs: np.ndarray, hartley: np.ndarray) -> None:
        self.turn = signs, hartley

    def components(self, codes: np.ndarray, quantisers: tuple[np.ndarray, ...]) -> None:
        self.component, self.type = components(codes, *quantisers), 4

    def sizes(self, codes: np.ndarray, quantisers: tuple[np.ndarray, ...]) -> None:
        self.size = components(codes, *quantisers)

    def basis(self, basis: np.ndarray) -> None:
        self.rows = padded(basis)

    def mix(self, mix: np.ndarray) -> None:
        self.mixed = padded(mix)

    def smooth(self, factors: np.ndarray) -> None:
        self.smoothed = factors

    def codewords(
        self, form: int, codes: np.ndarray, size: int, place: np.ndarray, bits: np.ndarray, table: np.ndarray, *more: Any
    ) -> None:
        values, order, exact = more
        halves, values = (values, None) if values.dtype == np.float16 else (None, values)
        alike = (bits == bits[0, 0]).all() and bits[0, 0] and (place[:, 0] % 8 == 0).all()
        whole = alike and (place == place[:, :1] + bits[0, 0] * np.arange(place.shape[1])).all()
        first = np.zeros(len(place), int) if exact is not None else place.min(axis=1, initial=1 << 20) // 8
        last = np.maximum((place + bits).max(axis=1, initial=0), 0 if exact is None else 1)
        spans = np.stack([first, -(-last // 8) - first], axis=1).astype(np.int32)
        shared = codes.shape[0] == 1 and self.shape[0] != 1
        self.words = numbers(form, shared, codes.shape[2], size, place.shape[1], bool(whole)) + array(codes)
        self.words += b"".join(map(array, (place, bits.astype(np.uint8), table, values, halves, spans, order, exact)))
        if form == 2:  # how many of each head stand before the means in the basis
            counts = np.arange(len(place) + 1, dtype=np.int32) * place.shape[1]
            self.component = components(np.zeros((0, 0, 0), np.uint8), counts, np.zeros(0, np.uint16), np.zeros(0, np.float32))
        self.type = 5

    def signs(self, codes: np.ndarray, turns: np.ndarray, hartley: np.ndarray) -> None:
        self.codes(codes, 1, [-1.0, 1.0])
        self.turns, self.turn, self.type = turns, (None, hartley), 6

    def written(self) -> bytes:
        step, zero, group, by_token = self.grid
        odd = 1 if self.turn[1] is None else len(self.turn[1])
        start = numbers(self.type, *self.shape, len(self.stages)) + array(self.data) + b"".join(self.stages)
        grid = numbers(group, by_token) + array(step) + array(zero)
        none = components(np.zeros((0, 0, 0), np.uint8), np.zeros(0, np.int32), np.zeros(0, np.uint16), np.zeros(0, np.float32))
        coded = (self.component or none) + (self.size or none) + array(self.rows) + array(self.mixed)
        turned = numbers(odd) + b"".join(map(array, (*self.turn, self.smoothed, self.turns)))
        words = self.words or numbers(0, 0, 0, 0, 0, 0) + 9 * array(None)
        return start + b"".join(map(array, self.sides)) + grid + turned + coded + words


def sides_of(block: Block) -> list[bytes]:
    """Rows of keys and of values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "stored", Recorder)
        patch.setattr(native, "max_dim", lambda: 512)
        patch.setattr(native, "quantisers", lambda *given: given)
        # Not what a codec keeps: that is the extension's own.
        patch.setattr(KeyReader, "quantisers", property(lambda own: own.components.stored(own.heads)))
        patch.setattr(Predictor, "quantisers", property(lambda own: own.components.stored(own.heads)))
        patch.setattr(ValueReader, "quantisers", property(lambda own: own.stored()))
        return [block.k.reader.stored.written(), block.v.reader.stored_beside(block.k.reader).written()]


@dataclass
class Case:
    """A causal problem of `count` queries of 3 heads to each of 2 KV heads.

    Attributes:
        seen: a mask besides: its type (0 bool, 1 to 3 added, in float32, float16 and bfloat16), or None.
    """

    block: Block
    count: int
    seen: int | None = None

    def written(self) -> bytes:
        block, rope, sides = self.block, self.block.k.rope, sides_of(self.block)
        q, angles = self.q(), None if rope is None else np.array(cos_sin(rope, block.first, block.stop))
        at = np.tile(np.arange(block.count - self.count, block.count), 3)
        half = 0 if angles is None else angles.shape[1] // 2
        seen = b"".join(array(x.astype(np.int32)) for x in (np.zeros_like(at), np.clip(at + 1, 0, block.count)))
        turn = (0, 0, 0) if rope is None else (rope.first, half, rope.pairing == "interleaved")
        return b"".join(sides) + numbers(q.shape[1]) + array(np.array(q)) + seen + numbers(*turn) + array(angles) + self.mask()

    def hidden(self) -> mx.array:
        """The mask, (6, Q, S)."""
        kind = ("bool a head", "added a head", "added a head", "added a head")[self.seen or 0]
        mask = bias_of(kind, self.count, self.block.count)[0]
        return mask[0].astype((mx.bool_, mx.float32, mx.float16, mx.bfloat16)[self.seen or 0])

    def mask(self) -> bytes:
        if self.seen is None:
            return numbers(0) + array(None)
        mask = self.hidden()
        return numbers(self.seen) + array(np.array(mask.view(mx.uint16) if mask.dtype == mx.bfloat16 else mask))

    def q(self) -> mx.array:
        return stacked(queries(self.count, dim=self.block.k.shape[2]), 2)

    def check(self, take: Callable[[int], np.ndarray]) -> None:
        """Compare results with float64 attention, and decoded rows with the codecs' own."""
        block, count, dim = self.block, self.count, self.block.v.shape[2]
        out, lse = take(6 * count * dim).reshape(6, count, dim), take(6 * count).reshape(6, count)
        with native.without():
            plain = [np.array(x) for x in block.rows()]
        _, bias = bias_of("causal", count, block.count, 0)
        if self.seen is not None:
            mask = self.hidden()
            bias = bias + (np.where(np.array(mask), 0, -np.inf) if mask.dtype == mx.bool_ else np.array(mask.astype(mx.float32)))
        assert_close(mx.array(out), mx.array(lse), queries(count, dim=block.k.shape[2]), rows_of_block(block), plain, bias)
        for coded in (block.k, *([] if block.v.codec.needs else [block.v])):
            wanted = np.array(coded.codec.decode(coded.parts, coded.shape, mx.float32))
            found = take(wanted.size).reshape(wanted.shape)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def run_alone(command: Sequence[str]) -> None:
    """Run a program to its end."""
    # A sanitizer's runtime must be the first library of a process.
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=alone)
    assert done.returncode == 0, done.stderr


def run(folder: Path, cases: Sequence[Case], level: str, command: Sequence[str]) -> np.ndarray:
    """Results of all cases, checked."""
    given, result = folder / "in", folder / f"out-{level}"
    given.write_bytes(b"".join(case.written() for case in cases))
    run_alone([*command, level, str(given), str(result)])
    found, at = np.fromfile(result, np.float32), 0

    def take(size: int) -> np.ndarray:
        nonlocal at
        at += size
        return found[at - size : at]

    for case in cases:
        case.check(take)
    assert at == len(found)
    return found
