"""A process that loads a file, attends to all its layers, and says what memory that took.

Arguments: a small file, loaded first so that what any first load takes does not count; the file; 0 or 1 for copied or mapped codes.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import kvtool


@dataclass(frozen=True)
class Memory:
    """Bytes: of a file's pages, each divided by the number of processes that map it; and of memory of the process's own."""

    file: int
    anonymous: int

    @classmethod
    def parse(cls, text: str) -> "Memory":
        return cls(**json.loads(text))


def memory(path: str) -> Memory:
    """That of this process now."""
    file, of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if "-" in words[0] and not words[0].endswith(":"):
            of_file = words[-1] == path
        elif of_file and words[0] == "Pss:":
            file += int(words[1]) << 10
    rolled = Path("/proc/self/smaps_rollup").read_text().splitlines()
    anonymous = next(int(line.split()[1]) << 10 for line in rolled if line.startswith("Anonymous:"))
    return Memory(file, anonymous)


def attend(cache: list[Any]) -> None:
    """One query of each head, to every layer."""
    for own in cache:
        heads, _, dim = own.blocks[0].k.shape
        row = mx.array(np.ones((1, heads, 1, dim), np.float32))
        fetched, _ = own.update_and_fetch(row, row)
        mx.eval(fetched.attend(mx.concatenate([row, row], axis=1), dim**-0.5, None))


def main() -> None:
    small, path, mapped = sys.argv[1], sys.argv[2], sys.argv[3] == "1"
    model = kvtool.load_model("tiny-a")
    attend(kvtool.load(small, model, mapped=mapped).cache)
    before = memory(path)
    cache = kvtool.load(path, model, mapped=mapped).cache
    attend(cache)
    mx.clear_cache()
    print("ready", flush=True)
    sys.stdin.readline()
    after = memory(path)
    print(json.dumps(asdict(Memory(after.file, after.anonymous - before.anonymous))), flush=True)
    sys.stdin.readline()  # held until all were asked


if __name__ == "__main__":
    main()
