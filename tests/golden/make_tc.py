"""Write the frozen cases of tc: tables, parameters, parts and decoded rows. Run it once per version: `python -m tests.golden.make_tc`.

A file that exists is never overwritten: what was written once must decode for ever. Version 2 has carried tables of few bits; files of
version 1 with carried tables were never released, and are no more.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.tc_cases import DIGEST, layer
from veloxquant_mlx.allocators.transforms import TcTables, build_tc, widths_for
from veloxquant_mlx.codecs.tc import Tc

HERE = Path(__file__).parent / "tc"
CASES = {"v1/2-h2-d16": "tc-2", "v1/3.3-seed7-h2-d16": "tc-3.3:seed=7", "v2/2-carry-h2-d16": "tc-2:carry"}
SHAPE = (2, 41, 16)


@dataclass
class Case:
    """A file's content."""

    shape: tuple[int, int, int]
    params: list[dict]
    tables: TcTables
    key_parts: dict[str, mx.array]
    value_parts: dict[str, mx.array]
    keys: np.ndarray
    values: np.ndarray


def encoded(name: str, tables: TcTables) -> tuple[Tc, Tc, dict[str, mx.array], dict[str, mx.array], mx.array, mx.array]:
    """The codecs of a case, the parts, the decoded rows."""
    spec, rows = CASES[name], layer(SHAPE[1], 3, SHAPE[0], SHAPE[2])
    codec = Tc.parse(spec, "k")
    assert codec is not None
    k, v = (codec.bind(role, tables, widths_for({"0": tables}, codec.bits)["0"], "0", DIGEST) for role in ("k", "v"))
    x, w = (mx.array(np.ascontiguousarray(a.swapaxes(0, 1)).astype(np.float32)) for a in (rows.k, rows.v))
    key_parts = k.encode(x)
    keys = k.decode(key_parts, SHAPE, mx.float32)
    value_parts = v.encode(w, {"k": keys})
    return k, v, key_parts, value_parts, keys, v.decode(value_parts, SHAPE, mx.float32, {"k": keys})


def read(path: Path) -> Case:
    with np.load(path) as stored:
        file = dict(stored)
    named = {own: {key.partition("_")[2]: file[key] for key in file if key.startswith(f"{own}_")} for own in ("table", "k", "v")}
    parts = [{name: mx.array(array) for name, array in named[role].items()} for role in ("k", "v")]
    return Case(SHAPE, json.loads(str(file["params"])), TcTables.from_arrays(named["table"]), *parts, file["keys"], file["values"])


def main() -> None:
    tables = build_tc(layer(500, 3, SHAPE[0], SHAPE[2]))
    for name in CASES:
        path = HERE / f"{name}.npz"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        k, v, key_parts, value_parts, keys, values = encoded(name, tables)
        arrays = {f"table_{key}": array for key, array in tables.to_arrays().items()}
        arrays |= {f"{role}_{part}": np.array(a) for role, parts in (("k", key_parts), ("v", value_parts)) for part, a in parts.items()}
        params = json.dumps([k.to_params(), v.to_params()])
        np.savez_compressed(path, params=params, keys=np.array(keys), values=np.array(values), **arrays)
        print(path)


if __name__ == "__main__":
    main()
