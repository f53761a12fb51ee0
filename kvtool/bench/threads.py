"""NumPy on all cores. MLX's streams belong to the thread that made them, so that its arrays are read by the caller's alone."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from kvtool.bench.machine import memory

SHARE = 4  # what is under way takes at most this part of the memory


def in_threads(work: Callable[..., Any], items: Iterable[tuple[Any, ...]], size: int) -> list[Any]:
    """work(*item) of every item, in order.

    Args:
        work: of NumPy alone.
        items: made in the caller's thread, as many at a time as there are threads.
        size: bytes that one item takes while it is worked on.
    """
    threads = max(1, min(os.cpu_count() or 1, memory() // SHARE // max(1, size)))
    waiting = iter(items)
    done: list[Any] = []
    with ThreadPoolExecutor(threads) as pool:
        while chunk := list(islice(waiting, threads)):
            done += pool.map(lambda item: work(*item), chunk)
    return done
