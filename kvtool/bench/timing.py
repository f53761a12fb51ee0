"""How long a call takes.

One by one (`timed`): its graph is built and evaluated within the time; calls shorter than SAMPLE, several together.

Together (`timed_together`), on a GPU: calls are built first, then handed over and evaluated at once, as all layers of a model are. That is
the time of the kernels: Python takes longer to build a call than a GPU to run it. Each of SETS sets of inputs comes in turn, so that no
call finds its own in the cache.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from kvtool.bench.machine import device_memory
from veloxquant_mlx.metal._backend import backend

SAMPLE = 0.002  # seconds that one sample takes at least: a clock and a launch are then of little account
TOGETHER = 0.01  # seconds that calls evaluated at once take at least: filling MLX's queue takes a tenth of a millisecond
MOST_TOGETHER = 512
HELD = 16  # results of such calls take at most this part of the device's memory
SETS = 3
COPIED = 1 << 20  # bytes of an array from which on each set has its own: smaller ones, tables, stay in the cache in a model too
LEAST_RUNS = 3
MOST_RUNS = 1000
COPY_BYTES = 1 << 28  # beyond any cache of a processor


@dataclass(frozen=True)
class Times:
    """Seconds a call: median and quartiles of `runs` samples of `calls` calls.

    Attributes:
        sets: of inputs in turn, where calls were evaluated together; else 1.
        alone: median of calls timed one by one, where they were evaluated together; else None.
    """

    median: float
    low: float
    high: float
    runs: int
    calls: int
    sets: int = 1
    alone: float | None = None


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
    return _times(samples, calls), last


def timed_together(run: Callable[..., Any], given: tuple[Any, ...], seconds: float) -> tuple[Times, Any]:
    """Times of run(*given) on a GPU, and what the last call returned.

    Args:
        run: evaluates nothing itself: what it did before the calls are handed over would not be in the time.
        given: arrays that it reads, or lists, tuples and dicts of them.
        seconds: to spend on samples, graphs included; at least LEAST_RUNS are taken.
    """
    alone, _ = timed(lambda: run(*given), seconds / 4)
    sets = [given, *(_copied(given) for _ in range(SETS - 1))]
    mx.eval([arrays(own) for own in sets])
    _, last = _sample_together(run, sets, SETS)  # warm-up
    held = sum(array.nbytes for array in arrays(last))
    first, _ = _sample_together(run, sets, SETS)
    most = min(MOST_TOGETHER, max(SETS, device_memory() // HELD // max(1, held)))
    calls = SETS
    while calls < most and first * calls < TOGETHER:  # the more of them, the less of a call's time is the queue's
        calls = min(most, max(2 * calls, math.ceil(TOGETHER / first)))
        first, _ = _sample_together(run, sets, calls)
    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < LEAST_RUNS or (time.perf_counter() - start < seconds and len(samples) < MOST_RUNS):
        taken, last = _sample_together(run, sets, calls)
        samples.append(taken)
    return replace(_times(samples, calls), sets=SETS, alone=alone.median), last


def _times(samples: list[float], calls: int) -> Times:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Times(statistics.median(samples), low, high, len(samples), calls)


def _sample(call: Callable[[], Any], calls: int, before: Callable[[], None] | None) -> tuple[float, Any]:
    if before is not None:
        before()
    start = time.perf_counter()
    results = [call() for _ in range(calls)]
    mx.eval([arrays(result) for result in results])
    return time.perf_counter() - start, results[-1]


def _sample_together(run: Callable[..., Any], sets: list[tuple[Any, ...]], calls: int) -> tuple[float, Any]:
    """Seconds a call, of graphs that are there already, and the last result."""
    results = [run(*sets[i % len(sets)]) for i in range(calls)]
    graphs = [arrays(result) for result in results]
    mx.synchronize()
    start = time.perf_counter()
    mx.async_eval(graphs)
    mx.synchronize()
    return (time.perf_counter() - start) / calls, results[-1]


def arrays(result: Any) -> list[mx.array]:
    """The MLX arrays of a result: those to evaluate."""
    if isinstance(result, mx.array):
        return [result]
    inner = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else ()
    return [array for one in inner for array in arrays(one)]


def _copied(given: Any) -> Any:
    """The same, with large arrays in memory of their own."""
    if isinstance(given, mx.array):
        if given.nbytes < COPIED:
            return given
        flat = given.reshape(-1)
        return mx.concatenate([flat[: flat.size // 2], flat[flat.size // 2 :]]).reshape(given.shape)
    if isinstance(given, dict):
        return {name: _copied(one) for name, one in given.items()}
    return type(given)(_copied(one) for one in given) if isinstance(given, list | tuple) else given


def copy_bandwidth(seconds: float) -> float:
    """GB/s, read and written, of copying COPY_BYTES: on a CPU NumPy's copy into an array that is there, else MLX's joining of halves."""
    if backend() == "cpu":
        source = np.arange(COPY_BYTES // 8, dtype=np.float64)
        target = np.zeros_like(source)
        times, _ = timed(lambda: np.copyto(target, source), seconds)
        same = bool((target == source).all())
    else:
        whole = mx.arange(COPY_BYTES // 4, dtype=mx.uint32)
        mx.eval(whole)
        times, out = timed_together(lambda x: mx.concatenate([x[: x.size // 2], x[x.size // 2 :]]), (whole,), seconds)
        same = bool(mx.array_equal(out, whole).item())
    if not same:
        raise RuntimeError("[bench] a copy of a large array is not equal to its source: this machine's memory cannot be trusted.")
    return 2 * COPY_BYTES / times.median / 1e9
