"""One driver for every row: prepare, check, warm up, time, check again.

A row whose result is not within its limit of the oracle's is reported with both numbers and never timed. Times are of calls that end with
`mx.eval`; calls shorter than SAMPLE are timed several together. Bytes are those of the arrays (or files) that a call must read and write
once, side information included; GB/s are 1e9 bytes.
"""

import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from kvtool.bench.machine import environment, machine
from veloxquant_mlx import native
from veloxquant_mlx.metal._backend import backend

SAMPLE = 0.002  # seconds that one sample takes at least: a clock and a launch are then of little account
LEAST_RUNS = 3
MOST_RUNS = 1000
COPY_BYTES = 1 << 28  # beyond any cache of a processor

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Checked:
    """A result against its oracle.

    Attributes:
        against: what the oracle is.
        error: what is measured of the difference.
        limit: most that it may be.
    """

    against: str
    error: float
    limit: float

    @property
    def problem(self) -> str | None:
        # A NaN fails any comparison.
        return None if self.error <= self.limit else f"error {self.error:.3g} against {self.against}, at most {self.limit:.3g} expected"


@dataclass(frozen=True)
class Prepared:
    """A row ready to run.

    Attributes:
        run: one call; arrays that it returns are evaluated by the driver.
        check: its result against the oracle.
        moved: bytes that a call reads and writes, or None where that is not known.
        values: numbers of keys and values (or tokens of a prompt) that a call goes through.
        bits: a value of what is stored, or None where nothing is coded.
        before: run before each call, outside the time.
    """

    run: Callable[[], Any]
    check: Callable[[Any], Checked]
    moved: int | None
    values: int
    bits: float | None = None
    before: Callable[[], None] | None = None


@dataclass(frozen=True)
class Case:
    """A row to be.

    Attributes:
        family: of FAMILIES.
        name: unique in its family.
        prepare: makes arrays, and keeps none between rows.
        reference: name of the row whose time it is compared with, or None.
        spec: the codec, or None.
        backend, device: where it runs; None: where MLX does.
        needs: why it cannot run here, or None.
    """

    family: str
    name: str
    prepare: Callable[[], Prepared]
    reference: str | None = None
    spec: str | None = None
    backend: str | None = None
    device: str | None = None
    needs: str | None = None


@dataclass(frozen=True)
class Row:
    """What is known of a case.

    Attributes:
        family, name, device: of the case; backend: too, or "native LEVEL" where the native back end took part in a call.
        checked: what its result was compared with; error and limit: of that.
        problem: what is wrong, or None; skipped: why it did not run, or None. Nothing is timed with either.
        runs: timed samples; calls: a sample.
        median, low, high: seconds a call, with the quartiles.
        moved: bytes a call; rate: GB/s; of_copy: share of the copy bandwidth of this run; None for files.
        to_copy: times as fast as copying these keys and values once in float16 at the copy bandwidth; of attend alone.
        values: a call; values_rate: a second.
        bits: a value.
        reference: the row compared with; speedup: its median over this one's.
        command: makes this row alone (and its reference), after the variables of the environment that its time depends on.
    """

    family: str
    name: str
    backend: str
    device: str
    command: str
    checked: str | None = None
    error: float | None = None
    limit: float | None = None
    problem: str | None = None
    skipped: str | None = None
    runs: int = 0
    calls: int = 0
    median: float | None = None
    low: float | None = None
    high: float | None = None
    moved: int | None = None
    rate: float | None = None
    of_copy: float | None = None
    to_copy: float | None = None
    values: int | None = None
    values_rate: float | None = None
    bits: float | None = None
    reference: str | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
        machine: back end, device, versions, cores, load, BLAS.
        settings: options in force.
        copy: GB/s, read and written, of a copy of COPY_BYTES (`copy_bandwidth`).
        rows: in order.
        load_after: load average once all rows were done.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    copy: float
    rows: tuple[Row, ...]
    load_after: tuple[float, ...] = field(default=())

    @property
    def failed(self) -> int:
        return sum(row.problem is not None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"failed": self.failed}


@dataclass(frozen=True)
class Times:
    """Seconds a call: median and quartiles of `runs` samples of `calls` calls."""

    median: float
    low: float
    high: float
    runs: int
    calls: int


def timed(call: Callable[[], Any], seconds: float, before: Callable[[], None] | None = None) -> tuple[Times, Any]:
    """Times of a call, and what the last one returned.

    Args:
        seconds: to spend on samples, what goes before them included; at least LEAST_RUNS are taken whatever they cost.
        before: run before each call, outside the time; every sample is then one call.
    """
    first, last = _sample(call, 1, before)  # warm-up
    calls = 1 if before is not None else max(1, math.ceil(SAMPLE / max(first, 1e-7)))
    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < LEAST_RUNS or (time.perf_counter() - start < seconds and len(samples) < MOST_RUNS):
        last = None  # a result may hold the file that `before` drops from memory
        taken, last = _sample(call, calls, before)
        samples.append(taken / calls)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Times(statistics.median(samples), low, high, len(samples), calls), last


def _sample(call: Callable[[], Any], calls: int, before: Callable[[], None] | None) -> tuple[float, Any]:
    if before is not None:
        before()
    start = time.perf_counter()
    results = [call() for _ in range(calls)]
    mx.eval([arrays(result) for result in results])
    return time.perf_counter() - start, results[-1]


def arrays(result: Any) -> list[mx.array]:
    """The MLX arrays of a result: those to evaluate."""
    if isinstance(result, mx.array):
        return [result]
    inner = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else ()
    return [array for one in inner for array in arrays(one)]


def copy_bandwidth(seconds: float) -> float:
    """GB/s, read and written, of copying COPY_BYTES: on a CPU NumPy's copy into an array that is there, else MLX's joining of halves."""
    if backend() == "cpu":
        source = np.arange(COPY_BYTES // 8, dtype=np.float64)
        target = np.zeros_like(source)
        times, _ = timed(lambda: np.copyto(target, source), seconds)
        same = bool((target == source).all())
    else:
        whole = mx.arange(COPY_BYTES // 4, dtype=mx.uint32)
        halves = [whole[: whole.size // 2], whole[whole.size // 2 :]]
        mx.eval(whole, halves)
        times, out = timed(lambda: mx.concatenate(halves), seconds)
        same = bool(mx.array_equal(out, whole).item())
    if not same:
        raise RuntimeError("[bench] a copy of a large array is not equal to its source: this machine's memory cannot be trusted.")
    return 2 * COPY_BYTES / times.median / 1e9


def copy_time(values: int, copy: float) -> float:
    """Seconds to copy so many float16 keys and values at a bandwidth in GB/s, read and written."""
    return 2 * 2 * values / (copy * 1e9)


def measure(case: Case, command: str, seconds: float, copy: float) -> Row:
    """One row."""
    known = machine()
    row = Row(case.family, case.name, case.backend or known["backend"], case.device or known["device"], command, reference=case.reference)
    if case.needs is not None:
        return replace(row, skipped=case.needs)
    try:
        prepared = case.prepare()
        if prepared.before is not None:
            prepared.before()
        before = native.calls()
        result = prepared.run()
        mx.eval(arrays(result))
        if case.backend is None and native.calls() != before:
            row = replace(row, backend=f"native {native.level()}")
        checked = prepared.check(result)
        row = replace(row, checked=checked.against, error=checked.error, limit=checked.limit, problem=checked.problem)
        if row.problem is not None:
            return row
        del result
        times, last = timed(prepared.run, seconds, prepared.before)
        again = prepared.check(last)
    except (RuntimeError, ValueError, TypeError) as error:  # a refusal of the function, or memory that MLX could not get
        return replace(row, problem=f"{type(error).__name__}: {error}")
    if again.problem is not None:
        return replace(row, error=again.error, problem=f"after {times.runs} timed runs: {again.problem}")
    rate = None if prepared.moved is None else prepared.moved / times.median / 1e9
    return replace(
        row,
        error=max(checked.error, again.error),
        runs=times.runs,
        calls=times.calls,
        median=times.median,
        low=times.low,
        high=times.high,
        moved=prepared.moved,
        rate=rate,
        of_copy=None if rate is None or case.family in ("files", "first-token") else rate / copy,
        to_copy=copy_time(prepared.values, copy) / times.median if case.family == "attend" else None,
        values=prepared.values,
        values_rate=prepared.values / times.median,
        bits=prepared.bits,
    )


def run(
    cases: Sequence[tuple[Case, Sequence[str]]],
    settings: dict[str, Any],
    seconds: float,
    *,
    only: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Measure rows, with their references.

    Args:
        cases: each with the command line's words that make it, without `--only`.
        seconds: a row.
        only: names of rows; () for all.

    Raises:
        ValueError: a name that no row has.
    """
    names = [case.name for case, _ in cases]
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise ValueError(f"[bench] only must name rows of this run, but got {unknown[0]!r}; there are {', '.join(map(repr, names))}.")
    wanted = {(case.family, case.name) for case, _ in cases if not only or case.name in only}
    wanted |= {(case.family, case.reference) for case, _ in cases if (case.family, case.name) in wanted and case.reference is not None}
    chosen = [(case, words) for case, words in cases if (case.family, case.name) in wanted]
    known = dict(machine())
    copy = copy_bandwidth(seconds)
    rows: list[Row] = []
    for case, words in chosen:
        command = " ".join([*environment(), shlex.join([*words, "--only", case.name])])
        rows.append(measure(case, command, seconds, copy))
        mx.clear_cache()
        if progress is not None:
            progress(len(rows), len(chosen))
    return Report(known, settings, copy, tuple(_compared(rows)), machine()["load"])


def _compared(rows: Sequence[Row]) -> Iterator[Row]:
    medians = {(row.family, row.name): row.median for row in rows}
    for row in rows:
        other = None if row.reference is None else medians.get((row.family, row.reference))
        yield row if other is None or row.median is None else replace(row, speedup=other / row.median)
