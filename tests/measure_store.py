"""What a store costs beside a plain file: SmolLM2 in float32, a prompt of 2060 tokens in rvq-4, processor time of this process.

    python -m tests.measure_store
    python -m tests.measure_store chunks

And a lookup of 32 000 tokens (125 chunks of 256) in a folder of 10 000 chunks, of a small model. `chunks`: a made-up cache of 4000
tokens, 28 layers and 4 heads, from 125 chunks of 32 tokens and from one file.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

import kvtool
from formats.container import open_container
from kvtool.encoding import codec_plan
from kvtool.model import LoadedModel, load_model
from kvtool.probe import probe_model
from kvtool.store.keys import Space, chunk_name
from kvtool.store.store import Store
from tests import store_memory_child
from tests.smollm2.make import models_at
from tests.texts import text

TOKENS, ENTRIES = 2060, 10_000


def least(call: Callable[[], Any], times: int = 5) -> float:
    """Milliseconds of processor time, the least of some runs."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return 1000 * min(taken)


def step(model: LoadedModel, cache: list[Any]) -> float:
    return least(lambda: mx.eval(model.model(mx.array([[5]]), cache=cache)), 8)


def beside_a_file(folder: Path) -> None:
    model = load_model(models_at()["smollm2"])
    ids = (model.tokenizer.encode(text("technical")) * 5)[: TOKENS + 40]
    snapshot = kvtool.capture(model, ids[:TOKENS])
    plain = folder / "plain.kv"
    saving = least(lambda: kvtool.save(snapshot, plain, codec="rvq-4"), 2)
    loading = least(lambda: kvtool.load(plain, model))
    print(f"file: {plain.stat().st_size:,} bytes, save {saving:.0f} ms, load {loading:.0f} ms, ", end="")
    print(f"a decode step {step(model, kvtool.load(plain, model).cache):.0f} ms")
    for chunk in (256, 1024):
        store = Store(folder / str(chunk), chunk=chunk)
        start = time.process_time()
        report = store.put(snapshot, codec="rvq-4", model=model)
        putting = 1000 * (time.process_time() - start)
        loading = least(lambda store=store: store.load(ids, model))
        restored = store.load(ids, model)
        assert restored is not None and restored.usable == TOKENS
        with open_container(next((folder / str(chunk) / "objects" / "chunks").glob("*/*.kv"))) as reader:
            header = reader.header_bytes
        print(f"chunks of {chunk}: {report.new} objects, {report.bytes:,} bytes, {header:,} of a chunk's are its header, ", end="")
        print(f"put {putting:.0f} ms, load {loading:.0f} ms, a decode step {step(model, restored.cache):.0f} ms")


def many_entries(folder: Path) -> None:
    model, rng, written = load_model("tiny-a"), random.Random(1), 0
    store = Store(folder)
    space = Space.of(model.info, probe_model(model.model), codec_plan("rvq-4"), None)
    store.objects.write(space.name, space.data)
    while written < ENTRIES:
        ids = [rng.randrange(500) for _ in range(32_000)]
        parent = space.key
        for i, key in enumerate(space.keys(ids)):
            # Only the names matter to a lookup; the folder is filled without the fsync of a put.
            path = folder / "objects" / chunk_name(key, parent, i * 256, 256)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
            parent, written = key, written + 1
    match = store.lookup(ids, model)
    assert match is not None and len(match.nodes) == 125
    print(f"lookup of 32000 tokens among {written:,} chunks: {least(lambda: store.lookup(ids, model), 20):.1f} ms")
    print(f"a listing of all of them: {least(lambda: list(store.objects.names()), 3):.0f} ms")


def many_chunks(folder: Path) -> None:
    """Of a cache without a model behind it: what 125 chunks cost beside one file of the same rows."""
    model = store_memory_child.model()
    snapshot, plain, store = store_memory_child.snapshot(model, store_memory_child.ROWS), folder / "plain.kv", Store(folder / "s", chunk=32)
    report = store.put(snapshot, codec="rvq-4")
    kvtool.save(snapshot, plain, codec="rvq-4")
    ids = [*(snapshot.tokens or ()), 1]

    def from_store() -> list[Any]:
        found = store.load(ids, model)
        assert found is not None
        return found.cache

    for name, load in ((f"{report.chunks} chunks", from_store), ("one file", lambda: kvtool.load(plain, model).cache)):
        cache = load()
        first = least(lambda cache=cache: mx.eval(model.model(mx.array([[5]]), cache=cache)), 1)
        print(f"{name}: load {least(load):.0f} ms, a first step {first:.0f} ms, a decode step {step(model, cache):.1f} ms")


def main() -> None:
    kvtool.use_openblas()
    if sys.argv[1:] == ["chunks"]:
        with tempfile.TemporaryDirectory(prefix="kvtool-") as name:
            many_chunks(Path(name))
    else:
        with tempfile.TemporaryDirectory(prefix="kvtool-") as name:
            many_entries(Path(name) / "many")
            beside_a_file(Path(name))
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
