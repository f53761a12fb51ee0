"""Codecs on another device: files written there must decode alike here, and the frontier there is set beside this one.

    python -m tests.smollm2.h200 write DIR [--model M] [--calibration CAL] [--tokens N]    # one file a codec and its decoded rows
    python -m tests.smollm2.h200 decode DIR [--model M] [--calibration CAL]                # decode them here, and compare
    python -m tests.smollm2.h200 table THERE.csv [HERE.csv]                                # two frontiers as one markdown table

`decode` exits with 1 where a file's rows differ from those decoded where it was written by more than float32 rounding.
`--cpu` before the command runs it on MLX's CPU back end, whatever the machine has.
"""

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import kvtool
from kvtool import calibrations
from kvtool.arms import OWN
from kvtool.calibrations import Calibration
from kvtool.model import load_model
from kvtool.snapshot import take_states
from kvtool.sweeping import ALL, specs_of
from tests.smollm2.frontier import CODECS, NAME, OUT, REFERENCE, is_calibrated
from tests.texts import text
from veloxquant_mlx.codecs import RECENT, SINK

# mlx-N and fp8 have no files.
FILES = ("raw", *(codec for codec in CODECS if not codec.startswith(("mlx-", "fp8"))))
FIELDS = ("bits", "kl", "ratio", "ratio_low", "ratio_high", "top1")
# Of the largest value of a layer: float32 sums of a few hundred terms in another order, and for each position that RoPE turns a row by
# one step of float32, since every back end has angles of its own and rows stored before RoPE are turned by those of the one that reads.
SUMS, ANGLE = 4e-6, 2.0**-23


def rows_of(cache: list[Any]) -> dict[str, np.ndarray]:
    """Layer and role -> rows (H, S, D), float32."""
    pairs = ((f"{i}.{role}", getattr(state, role)) for i, state in enumerate(take_states(cache)) for role in "kv")
    return {name: np.array(x.astype(mx.float32)) for name, x in pairs}


def write(folder: Path, model: str, calibration: Calibration | None, tokens: int) -> int:
    """Write FILES into the folder, and beside each file what it decodes to on this device."""
    loaded = load_model(model, dtype="float32")
    folder.mkdir(parents=True, exist_ok=True)
    ids = loaded.tokenizer.encode(text("technical"))[:tokens]
    snapshot = kvtool.capture(loaded, ids)
    for i, codec in enumerate(FILES):
        path = folder / f"{i:02}.kv"
        given = calibration if is_calibrated(codec) else None
        report = kvtool.save(snapshot, path, codec=codec, calibration=given, model=loaded)
        np.savez_compressed(path.with_suffix(".npz"), **rows_of(kvtool.load(path, loaded, calibration=given).cache))
        print(f"{path.name} {codec}: {report.file_bytes} bytes", flush=True)
    return 0


def decode(folder: Path, model: str, calibration: Calibration | None) -> int:
    """Decode what `write` wrote, on this device."""
    loaded, bad = load_model(model, dtype="float32"), 0
    print(f"on {mx.default_device()}\n\n| codec | largest difference, of the layer's largest value |\n|---|---|")
    for i, codec in enumerate(FILES):
        path = folder / f"{i:02}.kv"
        here = rows_of(kvtool.load(path, loaded, calibration=calibration if is_calibrated(codec) else None).cache)
        with np.load(path.with_suffix(".npz")) as there:
            if set(there.files) != set(here):
                raise ValueError(f"[decode] {path} must have the layers {sorted(there.files)}, but got {sorted(here)}.")
            rows = dict(there)
        worst = max(float(np.abs(here[name] - x).max() / np.abs(x).max()) for name, x in rows.items())
        close = worst <= SUMS + ANGLE * rows["0.k"].shape[1]
        bad += not close
        print(f"| `{codec}` | {worst:.1e}{'' if close else ' **beyond rounding**'} |", flush=True)
    return 1 if bad else 0


def table(there: Path, here: Path) -> str:
    """Two CSV files of the frontier as markdown: the means of the texts, the largest differences of those, and those of single texts."""
    asked = dict(zip(specs_of(list(CODECS), SINK, RECENT, "on", REFERENCE), CODECS, strict=True))
    a, b = (by_codec(path, asked) for path in (there, here))
    lines = ["| codec | bits | CPU | KL | CPU | difference | ratio | CPU | CPU, 95 % | top-1 | CPU |", "|---" * 11 + "|"]
    shared = [codec for codec in CODECS if (codec, ALL) in a and (codec, ALL) in b]
    for codec in shared:
        x, y = a[codec, ALL], b[codec, ALL]
        pairs = [f"{row[field]:{form}}" for field, form in (("bits", ".3f"), ("kl", ".5f")) for row in (x, y)]
        pairs.append(f"{100 * (x['kl'] / y['kl'] - 1):+.1f} %")
        pairs += [f"{x['ratio']:.3f}", f"{y['ratio']:.3f}", f"{y['ratio_low']:.3f} to {y['ratio_high']:.3f}"]
        pairs += [f"{100 * row['top1']:.2f} %" for row in (x, y)]
        lines.append(f"| `{codec}` | {' | '.join(pairs)} |")
    lines += ["", "Largest differences:", "", "| of | over all texts | of one text |", "|---|---|---|"]
    for field, name in (("bits", "bits"), ("kl", "KL"), ("ratio", "ratio")):
        cells = []
        for names in ({ALL}, {name for _, name in a} - {ALL}):
            sizes = [(abs(a[key][field] / b[key][field] - 1), key) for key in a if key[0] in shared and key[1] in names]
            size, (codec, words) = max(sizes)
            cells.append(f"{100 * size:.2f} % (`{codec}`{'' if words == ALL else f', {words}'})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    outside = [c for c in shared if not b[c, ALL]["ratio_low"] <= a[c, ALL]["ratio"] <= b[c, ALL]["ratio_high"]]
    lines += ["", f"Ratios outside the CPU's interval: {', '.join(f'`{c}`' for c in outside) or 'none'}, of {len(shared)}."]
    return "\n".join(lines)


def by_codec(path: Path, asked: Mapping[str, str]) -> dict[tuple[str, str], dict[str, float]]:
    """(codec as it was asked for, text) -> figures, of a frontier's CSV; the own cache left out."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["codec"] != OWN]
    return {(asked[row["codec"]], row["text"]): {field: float(row[field]) for field in FIELDS} for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU back end")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (("write", "write files and what they decode to"), ("decode", "decode those here and compare")):
        one = commands.add_parser(name, help=does)
        one.add_argument("folder", type=Path, metavar="DIR")
        one.add_argument("--model", default="tiny-a", help="default: %(default)s")
        one.add_argument("--calibration", type=Path, metavar="CAL", help="without it tables are learnt, and carried in the file")
        if name == "write":
            one.add_argument("--tokens", type=int, default=400, help="of tests/texts/technical.txt (default: %(default)s)")
    one = commands.add_parser("table", help="set two frontiers side by side")
    one.add_argument("there", type=Path, metavar="THERE.csv")
    one.add_argument("here", type=Path, nargs="?", default=OUT / f"{NAME}.csv", metavar="HERE.csv", help="default: tests/results")
    args = parser.parse_args()
    if args.cpu:
        mx.set_default_device(mx.Device(mx.cpu))
    if args.command == "table":
        print(table(args.there, args.here))
        return 0
    calibration = None if args.calibration is None else calibrations.load(args.calibration)
    if args.command == "write":
        return write(args.folder, args.model, calibration, args.tokens)
    return decode(args.folder, args.model, calibration)


if __name__ == "__main__":
    sys.exit(main())
