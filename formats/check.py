"""Reading a file through and naming everything that is wrong with it, without MLX and without changing anything."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from formats.container import tensor_array
from formats.errors import KVError, Problems
from formats.examine import examine
from formats.files import naming, opened


@dataclass(frozen=True)
class Problem:
    """One defect: the name of its error class, that class's exit code, and the text."""

    error: str
    exit_code: int
    text: str


def check(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Everything that is wrong with a kvtool file: header, layout, manifest, every digest, zstd frame and padding byte.

    Args:
        path: the file.
        progress: called with (stored bytes done, in all) after each tensor.
    Returns:
        The problems in the order they were met; empty if the file is sound.
    Raises:
        OSError: the file cannot be read at all.
    """
    path = os.fspath(path)
    problems = Problems()
    try:
        with naming(path), opened(path) as (fd, size):
            found = examine(fd, size)
            problems.extend(found.problems)
            # Also after a problem: every tensor that lies inside the file can still be compared with its digest.
            inside = [info for info in found.tensors.values() if info.offset + info.padded <= size]
            total = sum(info.padded for info in inside)
            done = 0
            if inside:
                # Not closed here: the traceback of a problem may still show a part of it.
                data = np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), np.uint8)
                for info in inside:
                    try:
                        tensor_array(data, info)
                    except KVError as error:
                        problems.append(error)
                    done += info.padded
                    if progress is not None:
                        progress(done, total)
    except KVError as error:
        problems.append(error)
    for problem in problems:
        problem.path = problem.path or path
    return [Problem(type(problem).__name__, problem.exit_code, str(problem)) for problem in problems]
