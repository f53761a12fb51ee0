"""Several processes that load one file and attend to it: how much memory that takes, and whether all of them compute the same.

    python -m kvtool.bench.sharing MODEL FILE 1        one of them; 0: with copied codes

Each says what it computed when it is ready, waits, says what memory it then has, and waits for the end. Memory is the file's pages, each
divided by the number of processes that map it (Pss of /proc/self/smaps), and what the load and the attention added of the process's own.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvtool.bench.shaped import model_of
from kvtool.loading import load
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.coded import CodedKVCache

SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True)
class Memory:
    """Bytes: this process's part of the file's pages, and memory of its own (Anonymous)."""

    file: int
    own: int

    @classmethod
    def of(cls, path: str) -> "Memory":
        """That of this process now."""
        file, own, in_file = 0, 0, False
        for line in SMAPS.read_text().splitlines():
            words = line.split(maxsplit=5)
            if not words[0].endswith(":"):
                in_file = words[-1] == path
            elif words[0] == "Pss:" and in_file:
                file += int(words[1]) << 10
            elif words[0] == "Anonymous:":
                own += int(words[1]) << 10
        return cls(file, own)


def attended(cache: Sequence[Any]) -> str:
    """Digest of the attention of one seeded query a head to every layer."""
    hasher = hashlib.sha256()
    for i, own in enumerate(cache):
        coded = isinstance(own, CodedKVCache)
        heads, _, dim = own.blocks[0].k.shape if coded else own.keys.shape[1:]
        row = mx.array(np.random.default_rng(i).standard_normal((1, heads, 1, dim), np.float32))
        keys, values = own.update_and_fetch(row, row)
        # Few rows are all exact, and live in mlx-lm's own cache.
        out = keys.attend(row, dim**-0.5, None) if coded else mx.fast.scaled_dot_product_attention(row, keys, values, scale=dim**-0.5)
        hasher.update(np.array(out.astype(mx.float32)).tobytes())
    return hasher.hexdigest()


def in_processes(model: str, path: Path, count: int, mapped: bool = True) -> tuple[list[str], list[Memory]]:
    """What `count` processes computed, and their memory while all of them hold the file."""
    command = [sys.executable, "-m", "kvtool.bench.sharing", model, str(path), str(int(mapped))]
    # One thread each: their pools are not what is measured.
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "KVTOOL_THREADS": "1"}
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone) for _ in range(count)]
    try:
        digests = [_line(child) for child in children]
        found = []
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            found.append(Memory(**json.loads(_line(child))))
    finally:
        for child in children:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.close()
            child.wait()
            child.stdout.close()
    return digests, found


def _line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"[bench] a process that was to load the file ended with {child.wait()}.")
    return line.strip()


def main(name: str, path: str, mapped: bool) -> None:
    model = model_of(name)
    row = mx.zeros((1, 256, 64))
    attended([CodedKVCache([Block.exact(row, row, 0)])])  # what any first attention takes is not of the file
    before = Memory.of(path)
    cache = load(path, model, mapped=mapped).cache
    digest = attended(cache)
    mx.clear_cache()
    print(digest, flush=True)
    sys.stdin.readline()
    after = Memory.of(path)
    print(json.dumps(asdict(Memory(after.file, after.own - before.own))), flush=True)
    sys.stdin.readline()  # held until all were asked


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "1")
