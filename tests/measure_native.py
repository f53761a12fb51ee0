"""Time of attention to one layer's codes, of encoding, of decoding and RoPE, by the native back end: H_q 32, H_kv 8, D 128, a query a head.

    KVTOOL_THREADS=1 KVTOOL_SIMD=avx2 python -m tests.measure_native [S]
    python -m tests.measure_native encode [S]
    python -m tests.measure_native decode [S]

Prints the bytes of codes, and the least and the median process CPU time and wall time of 15 calls, in milliseconds. A few rows are coded
and repeated: what they say does not matter to the time. Beside them raw float16 rows, the same kernel without codes.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from kvtool.bench.rows import Size, plan_of
from kvtool.bench.rows import rows as drawn
from veloxquant_mlx import native
from veloxquant_mlx.caches.blocks import Block, CodedRows
from veloxquant_mlx.caches.coded import Growth
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.codecs import Codec, parse_codec
from veloxquant_mlx.codecs._base import DTYPES
from veloxquant_mlx.codecs.tc import Tc
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec

HEADS, GROUPS, DIM, CODED, CALLS = 8, 4, 128, 1024, 15
ROPE = RopeSpec("default", DIM, base=1e6)
CASES = (
    *(("raw", None), ("rvq-4", None), ("rvq-4", ROPE), ("rvq-2", None), ("rvq-2+2", None), ("rvq-8", None), ("rabitq", None)),
    *(("rabitq", ROPE), ("k=rabitq,v=rvq-2", None), ("affine-4", None), ("affine-4", ROPE), ("tc-2.05", None), ("tc-2.05", ROPE)),
)
LEARNT = ("vecinfer-2", "commvq-2", "commvq-2:product")  # their tables are learnt as they encode
# Components of a head's keys: 80 of 128 have bits, 262 together, as many a value as the values' own 2 and a scale.
WIDTHS = "6" * 8 + "5" * 12 + "4" * 16 + "3" * 16 + "2" * 14 + "1" * 14 + "0" * 48


def repeated(coded: CodedRows, rows: int) -> CodedRows:
    parts = {
        name: part if name == "mean" else mx.contiguous(mx.tile(part, (1, rows // CODED, *(1,) * (part.ndim - 2))))
        for name, part in coded.parts.items()
    }
    mx.eval(parts)
    return CodedRows(coded.codec, parts, (HEADS, rows, DIM), coded.dtype, coded.rope)


def calibrated(rows: int, rope: RopeSpec | None) -> Block:
    """`tc` rows of random codes and tables; tables are carried, so that none need be learnt."""
    rng, keys, used = np.random.default_rng(0), (WIDTHS,) * HEADS, "0" * (80 * HEADS)
    k = Tc(2.05, "k", True, layer="0", keys=keys)
    v = Tc(2.05, "v", True, layer="0", keys=keys, widths=("2",) * HEADS, mix=used, cross=used)
    sides = []
    for codec in (k, v):
        parts = {}
        for name, (dtype, shape) in codec.layout((HEADS, rows, DIM), mx.float16).items():
            x = rng.integers(0, 256, shape).astype(np.uint8) if dtype in ("U8", "I8") else np.full(shape, 0.001)
            x = rng.integers(0, 5, shape) if name == "shapes" else np.tile([0.0, 0.125], (HEADS, 1)) if name == "range" else x
            parts[name] = mx.array(x.astype(np.uint8) if dtype == "U8" else x).astype(DTYPES[dtype])
        mx.eval(parts)
        sides.append(CodedRows(codec, parts, (HEADS, rows, DIM), mx.float16, rope if codec is k else None))
    return Block(*sides, rows, 0)


def main(rows: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = (mx.array(rng.standard_normal((HEADS, CODED, DIM)).astype(np.float16)) for _ in range(2))
    q, seen = mx.array(rng.standard_normal((HEADS, GROUPS, DIM)).astype(np.float32) / 11), Visibility(1, GROUPS, rows)
    print(f"{rows} rows, {native.level()}, threads {native.threads()}, load {os.getloadavg()[0]:.1f}")
    for spec, rope in CASES:
        if spec.startswith("tc-"):
            block = calibrated(rows, rope)
        else:
            plan = parse_codec(spec)
            one = Growth(plan.k, plan.v, rope).encoded(keys, values, 0)
            block = Block(repeated(one.k, rows), repeated(one.v, rows), rows, 0)
        block.attend(q, seen, 0, 64)
        cpu, wall = [], []
        for _ in range(CALLS):
            starts = time.process_time(), time.perf_counter()
            mx.eval(block.attend(q, seen, 0, 64))
            cpu.append(1e3 * (time.process_time() - starts[0]))
            wall.append(1e3 * (time.perf_counter() - starts[1]))
        name = spec + (" before RoPE" if rope else "")
        times = "  ".join(f"{kind} {min(x):6.2f} {sorted(x)[CALLS // 2]:6.2f}" for kind, x in (("cpu", cpu), ("wall", wall)))
        print(f"{name:20} {(block.k.nbytes + block.v.nbytes) / 1e6:6.1f} MB  {times}", flush=True)


def encode(rows: int) -> None:
    """Values a second of `Codec.encode`, keys of one layer in float16; `tc` of both roles, by tables of a calibration."""
    x = mx.array(np.random.default_rng(0).standard_normal((HEADS, rows, DIM)).astype(np.float16))
    mx.eval(x)
    print(f"encode, {rows} rows, {native.level()}, threads {native.threads()}, load {os.getloadavg()[0]:.1f}")
    for name, codec, rows_, given in coders(x, ("rvq-4", "rvq-2+2", "rvq-2", "rabitq", "rabitq-4", "affine-4", "rvq-8", *LEARNT)):
        codec.encode(rows_, *given)
        cpu, wall = [], []
        for _ in range(CALLS):
            starts = time.process_time(), time.perf_counter()
            codec.encode(rows_, *given)
            cpu.append(time.process_time() - starts[0])
            wall.append(time.perf_counter() - starts[1])
        best, middle, core = (x.size / 1e6 / t for t in (min(wall), sorted(wall)[CALLS // 2], min(cpu)))
        print(f"{name:16} best {best:6.0f}, median {middle:6.0f} M values/s; {core:6.0f} a second of processor time", flush=True)


def coders(x: mx.array, specs: tuple[str, ...]) -> Iterator[tuple[str, Codec, mx.array, tuple[dict[str, mx.array], ...]]]:
    """Name, codec, rows and what is given beside them: `x` by the codecs that need no calibration, then keys and values of `tc`."""
    for spec in specs:
        yield spec, parse_codec(spec).k, x, ()
    size = Size(1, HEADS * GROUPS, HEADS, DIM, x.shape[1], 1)
    plan, own = plan_of("tc-2.05", size, 0), drawn(size, mx.float16, 0)
    k, v = own.k[0], own.v[0]
    mx.eval(k, v)
    yield "tc-2.05, keys", plan.k, k, ()
    decoded = plan.k.decode(plan.k.encode(k), k.shape, mx.float32)
    yield "tc-2.05, values", plan.v, v, ({"k": decoded},)


def decode(rows: int) -> None:
    """Codes to float16, and float16 keys from one RoPE to another, both to memory of their own; beside copies of as many bytes."""
    x = mx.array(np.random.default_rng(0).standard_normal((HEADS, rows, DIM)).astype(np.float16))
    mx.eval(x)
    source, copy = np.array(x, copy=False), np.zeros(x.shape, np.float16)
    print(f"decode, {rows} rows, {x.nbytes / 1e6:.1f} MB, {native.level()}, threads {native.threads()}, load {os.getloadavg()[0]:.1f}")

    def timed(name: str, run: Callable[[], object], copied: float | None = None) -> float:
        run()
        cpu, wall = [], []
        for _ in range(CALLS):
            starts = time.process_time(), time.perf_counter()
            run()
            cpu.append(time.process_time() - starts[0])
            wall.append(time.perf_counter() - starts[1])
        best, middle = (x.nbytes / 1e9 / t for t in (min(wall), sorted(wall)[CALLS // 2]))
        share = f"{best / (best if copied is None else copied):4.0%} of copying; least cpu {1e3 * min(cpu):5.1f} ms"
        print(f"{name:24} best {best:5.2f}, median {middle:5.2f} GB/s written, {share}", flush=True)
        return best

    copied = timed("copy", lambda: np.copyto(copy, source))
    for name, codec, rows_, given in coders(x, ("rvq-4", "rvq-2+2", "rvq-2", "rabitq", "rabitq-4", "affine-4", "rvq-8", *LEARNT)):
        parts = codec.encode(rows_, *given)
        run = partial(codec.decode, parts, x.shape, mx.float16, *given)
        timed(name, lambda run=run: mx.eval(run()), copied)
    at, other = np.arange(rows), RopeSpec("default", DIM, base=1e4)
    for name, target, to, method in (
        ("RoPE undone", None, at, "mlx"),
        ("RoPE to another", other, at, "mlx"),
        ("RoPE to another, exact", other, at, "exact"),
        ("RoPE moved on, exact", ROPE, at + 100, "exact"),
    ):
        timed(name, lambda target=target, to=to, how=method: mx.eval(rotate(x, at, ROPE, target, target_positions=to, method=how)), copied)


if __name__ == "__main__":
    given = sys.argv[1:]
    run = {"encode": encode, "decode": decode}.get(given[0] if given else "", main)
    run(int(given[-1]) if given and given[-1].isdigit() else 32768)
