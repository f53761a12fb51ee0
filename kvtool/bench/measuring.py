"""One driver for every row: prepare, check, warm up, time, check again.

A row whose result is not within its limit of the oracle's is reported with both numbers and never timed. Times are those of `timing`. Bytes
are those of the arrays (or files) that a call must read and write once, side information included; GB/s are 1e9 bytes.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx

from kvtool.bench.machine import environment, machine
from kvtool.bench.timing import arrays, copy_bandwidth, timed, timed_together
from veloxquant_mlx import native

Progress = Callable[[int, int, "Row"], None]  # rows done, of how many, and the last


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
        run: one call, of `given`; arrays that it returns are evaluated by the driver.
        check: its result against the oracle.
        moved: bytes that a call reads and writes, or None where that is not known.
        values: numbers of keys and values (or tokens of a prompt) that a call goes through.
        bits: a value of what is stored, or None where nothing is coded.
        before: run before each call, outside the time.
        given: the arrays that a call reads, where it evaluates nothing itself: a GPU then gets many calls at once.
    """

    run: Callable[..., Any]
    check: Callable[[Any], Checked]
    moved: int | None
    values: int
    bits: float | None = None
    before: Callable[[], None] | None = None
    given: tuple[Any, ...] = ()


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
        runs: timed samples; calls: a sample; sets: of inputs in turn.
        median, low, high: seconds a call, with the quartiles.
        alone: seconds of a call timed one by one, the building of its graph included, where the others are of calls evaluated together.
        moved: bytes a call; rate: GB/s; of_copy: share of the copy bandwidth of this run; None for files.
        to_copy: times as fast as copying these keys and values once in float16 at the copy bandwidth; of attend alone.
        values: a call; values_rate: a second.
        bits: a value.
        reference: the row compared with; speedup: its median over this one's, or where this one has no `alone` its `alone`.
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
    sets: int = 1
    median: float | None = None
    low: float | None = None
    high: float | None = None
    alone: float | None = None
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
        copy: GB/s, read and written, of a copy of a large array (`timing.copy_bandwidth`).
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
        result = prepared.run(*prepared.given)
        mx.eval(arrays(result))
        if case.backend is None and native.calls() != before:
            row = replace(row, backend=f"native {native.level()}")
        checked = prepared.check(result)
        row = replace(row, checked=checked.against, error=checked.error, limit=checked.limit, problem=checked.problem)
        if row.problem is not None:
            return row
        del result
        if prepared.given and known["backend"] != "cpu":
            times, last = timed_together(prepared.run, prepared.given, seconds)
        else:
            times, last = timed(partial(prepared.run, *prepared.given), seconds, prepared.before)
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
        sets=times.sets,
        median=times.median,
        low=times.low,
        high=times.high,
        alone=times.alone,
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
            progress(len(rows), len(chosen), rows[-1])
    return Report(known, settings, copy, tuple(_compared(rows)), machine()["load"])


def _compared(rows: Sequence[Row]) -> Iterator[Row]:
    known = {(row.family, row.name): row for row in rows}
    for row in rows:
        other = None if row.reference is None else known.get((row.family, row.reference))
        if other is None or other.median is None or row.median is None:
            yield row
            continue
        # One by one beside one by one.
        yield replace(row, speedup=(other.median if row.alone is not None or other.alone is None else other.alone) / row.median)
