"""Write the frozen cases of commvq-N:additive, tables and all. Run it once per version: `python -m tests.golden.make_additive`.

A file that exists is never overwritten: what was written once must decode for ever.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.tc_cases import DIGEST, layer
from veloxquant_mlx.allocators.additive import AdditiveTables, build_additive
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive

HERE = Path(__file__).parent / "additive" / "v1"
CASES = {"2-h2-d8": "commvq-2:additive", "3-carry-h2-d8": "commvq-3:additive:carry"}
SHAPE = (2, 41, 8)


def encoded(name: str, tables: AdditiveTables) -> tuple[CommVqAdditive, dict[str, mx.array], mx.array]:
    """The codec of a case, the parts, the decoded rows."""
    codec = CommVqAdditive.parse(CASES[name], "k")
    assert isinstance(codec, CommVqAdditive)
    codec = codec.bind(tables, "0", DIGEST)
    parts = codec.encode(mx.array(np.ascontiguousarray(layer(SHAPE[1], 3).k.swapaxes(0, 1)).astype(np.float32)))
    return codec, parts, codec.decode(parts, SHAPE, mx.float32)


def read(path: Path) -> tuple[dict, AdditiveTables, dict[str, mx.array], np.ndarray]:
    """Parameters, tables, parts, decoded rows."""
    with np.load(path) as stored:
        file = dict(stored)
    named = {own: {key.partition("_")[2]: file[key] for key in file if key.startswith(f"{own}_")} for own in ("table", "part")}
    parts = {name: mx.array(array) for name, array in named["part"].items()}
    return json.loads(str(file["params"])), AdditiveTables.from_arrays(named["table"]), parts, file["keys"]


def main() -> None:
    HERE.mkdir(parents=True, exist_ok=True)
    rows = layer(500, 3)
    for name, spec in CASES.items():
        path = HERE / f"{name}.npz"
        if path.exists():
            continue
        tables = build_additive(rows.k, rows.fisher_k, float(spec[7]))
        codec, parts, keys = encoded(name, tables)
        arrays = {f"table_{key}": array for key, array in tables.to_arrays().items()} | {f"part_{n}": np.array(a) for n, a in parts.items()}
        np.savez_compressed(path, params=json.dumps(codec.to_params()), keys=np.array(keys), **arrays)
        print(path)


if __name__ == "__main__":
    main()
