"""Puts into a store and loads from it, of a large synthetic cache, each measured in this process; see test_store_memory.py.

python -m tests.store_memory_child FOLDER
"""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from kvtool.capturing import Snapshot
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from kvtool.states import CacheState
from kvtool.store.store import Store
from tests import tc_cases
from tests.library import loaded
from tests.memory_child import measured
from veloxquant_mlx import native
from veloxquant_mlx.caches.blocks import Block, CodedRows

LAYERS, HEADS, ROWS, DIM, VOCAB = 28, 4, 4000, 64, 97
SEGMENTS, SEGMENT = 300, 32  # of tc: keys and values of a layer, as many chunks bring them
CODECS = {"raw": "raw", "rvq": "rvq-4", "affine": "affine-4"}
MANY = ROWS // 32  # chunks of 32 tokens


def model() -> LoadedModel:
    """A llama of float16 with random weights: wide in its cache, and small in all else."""
    llama = importlib.import_module("mlx_lm.models.llama")
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=LAYERS,
        intermediate_size=16,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    made = llama.Model(args)
    made.set_dtype(mx.float16)
    mx.eval(made.parameters())
    return loaded(made, "wide", "float16")


def snapshot(who: LoadedModel, rows: int) -> Snapshot:
    states, key = [], mx.random.key(1)
    for layer in range(LAYERS):
        k, v = (mx.random.normal((HEADS, rows, DIM), mx.float16, key=mx.random.split(key, 2 * LAYERS)[2 * layer + i]) for i in range(2))
        mx.eval(k, v)
        states.append(CacheState("KVCache", "full", offset=rows, positions=((0, rows),), k=k, v=v))
    return Snapshot(who.info, tuple(i % VOCAB for i in range(rows)), rows, tuple(states), probe_model(who.model))


def segments() -> dict[str, int | None]:
    """What readers of many segments of one calibrated layer add."""
    k, v = tc_cases.bound("tc-2", HEADS, DIM)
    rows, shape = tc_cases.layer(SEGMENT, 7, HEADS, DIM), (HEADS, SEGMENT, DIM)
    x, w = (mx.array(np.ascontiguousarray(a.swapaxes(0, 1)).astype(np.float32)) for a in (rows.k, rows.v))
    k_parts = k.encode(x)
    v_parts = v.encode(w, {"k": k.decode(k_parts, shape, mx.float32)})

    def read(count: int) -> list[Block]:
        blocks = [
            Block(CodedRows(k, k_parts, shape, mx.float32), CodedRows(v, v_parts, shape, mx.float32), SEGMENT, SEGMENT * i)
            for i in range(count)
        ]
        for block in blocks:
            assert (block.k.reader, block.v.reader) and (block.part is not None) == native.available()
        return blocks

    read(1)
    return measured(partial(read, SEGMENTS))


def node_bytes(store: Store, tokens: list[int], who: LoadedModel) -> list[int]:
    """Bytes of each object that a load reads."""
    match = store.lookup(tokens, who)
    assert match is not None and match.usable == ROWS
    return [size for size in store.objects.sizes([node.name for node in match.nodes]) if size is not None]


def main(folder: Path) -> None:
    who = model()
    small, whole = snapshot(who, 40), snapshot(who, ROWS)
    tokens = [*(whole.tokens or ()), 1]
    found: dict[str, dict[str, int | None]] = {"segments": segments()}
    for name, codec in CODECS.items():
        store = Store(folder / name)
        # Code, tables and the BLAS are loaded before anything is measured.
        store.put(small, codec=codec)
        store.load([*tokens[:40], 1], who)
        found[f"put {name}"] = measured(partial(store.put, whole, codec=codec))
        found[f"get {name}"] = measured(partial(store.get, tokens[:-1], who, folder / f"{name}.kv"))
    many = Store(folder / "many", chunk=ROWS // MANY)
    assert many.put(whole, codec="rvq-4").chunks == MANY
    del whole
    many.load([*tokens[: ROWS // MANY], 1], who)
    found["load many"] = measured(partial(many.load, tokens, who))
    for name in CODECS:
        found[f"load {name}"] = measured(partial(Store(folder / name).load, tokens, who))
    sizes = {name: (folder / f"{name}.kv").stat().st_size for name in CODECS}
    stored = {name: sum(node_bytes(Store(folder / name), tokens, who)) for name in (*CODECS, "many")}
    print(json.dumps({"figures": found, "files": sizes, "stored": stored, "cache": LAYERS * 2 * HEADS * ROWS * DIM * 2}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
