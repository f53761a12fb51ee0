"""Encoding on a CUDA machine: `python tests/h200_encode.py check|time|codecs|one [FUNCTION]`.

check: rows that are not aligned, odd sizes and the timed sizes, bit for bit against the definition in MLX's own operations.
time: medians over (8, 131072, 128) float16 beside a copy of the same size; TB/s of input read, and % of the copy's bandwidth, both ways.
codecs: `encode` of whole codecs by their kernel and by MLX's operations: seconds, codes that differ, and the errors of both.
one: a single small call of each, for a sanitizer.
"""

import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
import numpy as np

from tests.h200_attend import median
from veloxquant_mlx import metal
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.metal import _encode_rows
from veloxquant_mlx.metal._backend import forced

HEADS, TOKENS, DIM = 8, 131072, 128
SHAPES = ((2, 33, DIM), (1, 257, 1024), (1, 1, DIM), (1, 1027, 256), (3, 70, 64), (2, 129, 32), (1, 16387, DIM))  # checked
SETS = 3  # of inputs in turn: no call finds its own in the cache
Results = tuple[mx.array, ...]
Encode = Callable[[mx.array], Results]


def levels(bits: int) -> tuple[mx.array, mx.array]:
    """Centroids and boundaries."""
    table = mx.linspace(-2, 2, 2**bits)
    return table, (table[1:] + table[:-1]) / 2


@cache
def signs(dim: int) -> mx.array:
    return mx.array([-1.0 if i % 3 == 1 else 1.0 for i in range(dim)])


def rvq(bits: int) -> Encode:
    table, edges = levels(bits)
    return lambda x: metal.rvq_quant_pack(x.reshape(-1, x.shape[-1]), table, edges, edges / 4, bits)


def rabitq(x: mx.array) -> Results:
    return metal.rabitq_encode(x.reshape(-1, x.shape[-1]), signs(x.shape[-1]))


def turned(bits: int, table: mx.array | None = None, size: float = 1) -> Encode:
    """`size` times the input: where it is large, distances to different centroids round to the same."""
    table = levels(bits)[0] if table is None else table

    def run(x: mx.array) -> Results:
        rows = x.reshape(-1, x.shape[-1])
        return (metal.turboquant_hadamard_quantize(rows if size == 1 else rows.astype(mx.float32) * size, signs(x.shape[-1]), table, bits),)

    return run


def kivi(axis: int, group: int) -> Encode:
    return lambda x: (metal.kivi_group_quant_dequant(x, axis, group, 15),)


FUNCTIONS: dict[str, Encode] = {
    "rabitq_encode": rabitq,
    **{f"rvq_quant_pack, {bits} bits": rvq(bits) for bits in (1, 2, 3, 4)},
    "kivi keys, 32 tokens": kivi(-2, 32),
    "kivi keys, 128 tokens": kivi(-2, 128),
    "kivi values, 32 channels": kivi(-1, 32),
    "kivi values, 128 channels": kivi(-1, 128),
    "turboquant_hadamard_quantize, 4 bits": turned(4),
}
# Checked, not timed.
OTHERS: dict[str, Encode] = {
    **{f"kivi keys, {group} tokens": kivi(-2, group) for group in (12, 48, 64, 100)},
    **{f"turboquant_hadamard_quantize, {bits} bits": turned(bits) for bits in (1, 2, 3)},
    "turboquant_hadamard_quantize, centroids in any order": turned(2, mx.array([0.5, -1.0, 2.0, -0.25])),
    "turboquant_hadamard_quantize, two equal centroids": turned(2, mx.array([-1.0, 0.25, 0.25, 2.0])),
    "turboquant_hadamard_quantize, uneven centroids": turned(3, mx.array([-3, -1, -1e-3, -1e-6, 1e-6, 0.3, 0.300001, 4])),
    "turboquant_hadamard_quantize, large values": turned(4, size=2.0**18),
}


def inputs(dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def wrong(name: str, got: Results, want: Results) -> list[str]:
    """Codes and reconstructions agree bit for bit, magnitudes to 1e-6."""
    problems = []
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if name == "rabitq_encode" and i == 1:
            off = (mx.abs(a - b) > 1e-6 * mx.abs(b)).sum().item()
        else:
            off = (a != b).sum().item()
        if off or a.shape != b.shape or a.dtype != b.dtype:
            problems.append(f"result {i}: {off} of {b.size} differ")
    return problems


def check(names: list[str]) -> int:
    failures = 0
    for name in names:
        run, rows = (FUNCTIONS | OTHERS)[name], 0
        for dtype in (mx.float16, mx.bfloat16, mx.float32):
            for shape in SHAPES if name in FUNCTIONS else SHAPES[:2]:
                x = inputs(dtype, *shape)
                flat = mx.concatenate([mx.zeros((3,), dtype), x.reshape(-1)])
                mx.eval(x, flat)
                with forced("cpu"):
                    want = run(x)
                    mx.eval(want)
                for what, given in (("", x), (", not aligned", flat[3:].reshape(shape))):
                    rows += 1
                    for problem in wrong(name, run(given), want):
                        failures += 1
                        print(f"FAILED {name} {shape} {dtype}{what}: {problem}", flush=True)
        print(f"{name}: {rows} rows", flush=True)
    print("check:", f"{failures} failed" if failures else "passed", flush=True)
    return failures


def measure(names: list[str]) -> None:
    given = [inputs(mx.float16, HEADS, TOKENS, DIM) for _ in range(SETS)]
    mx.eval(given)
    size = given[0].nbytes
    base = median(lambda i: given[i % SETS] + 1, 24, 9)[0]
    print(f"{'copy':38}{base * 1e6:8.1f} us {size / base / 1e12:6.2f} TB/s read {2 * size / base / 1e12:6.2f} TB/s both ways")
    for name in names:
        run = FUNCTIONS[name]
        written = sum(a.nbytes for a in run(given[0]))
        seconds = median(lambda i, run=run: run(given[i % SETS]), 24, 9)[0]
        share = (size + written) / seconds / (2 * size / base)
        print(f"{name:38}{seconds * 1e6:8.1f} us {size / seconds / 1e12:6.2f} TB/s read {share:5.0%} of the copy", flush=True)


def codecs() -> None:
    takes = _encode_rows._takes
    for spec, role in (("rvq-4", "k"), ("rvq-4", "v"), ("rvq-2+2", "k"), ("rabitq", "k"), ("affine-4", "k"), ("affine-4", "v")):
        codec = getattr(parse_codec(spec), role)
        for shape, dtype in (((8, 32768, DIM), mx.float16), ((3, 1000, 64), mx.bfloat16)):
            x = (mx.random.normal(shape) + 2 * mx.random.normal((shape[0], 1, shape[2]))).astype(dtype)
            mx.eval(x)
            found, best, errors = [], [], []
            for by_kernel in (True, False):
                _encode_rows._takes = takes if by_kernel else lambda _: False
                found.append(codec.encode(x))
                seconds = []
                for _ in range(7):
                    start = time.perf_counter()
                    codec.encode(x)
                    seconds.append(time.perf_counter() - start)
                best.append(min(seconds))
                lost = codec.decode(found[-1], shape, mx.float32) - x
                errors.append((mx.sum(mx.square(lost)) / mx.sum(mx.square(x.astype(mx.float32)))).item())
            ours, theirs = ({n: np.array(part.view(mx.uint8)) for n, part in parts.items()} for parts in found)
            differ = ", ".join(f"{name} {(part != theirs[name]).mean():.1e}" for name, part in ours.items())
            print(
                f"{spec:8}{role} {shape!s:18} {best[0] * 1e6:8.0f} us, operations {best[1] * 1e6:8.0f} us; bytes that differ: {differ};"
                f" errors {errors[0]:.6f}, {errors[1]:.6f}",
                flush=True,
            )
    _encode_rows._takes = takes


def main(words: list[str]) -> int:
    known = FUNCTIONS | OTHERS if words[:1] == ["check"] else FUNCTIONS
    names = [name for name in known if not words[1:] or name.startswith(words[1])]
    if words[:1] == ["codecs"]:
        codecs()
        return 0
    if words[:1] not in (["check"], ["time"], ["one"]) or not names:
        print(__doc__, file=sys.stderr)
        return 2
    if words[0] == "check":
        return 1 if check(names) else 0
    if words[0] == "time":
        measure(names)
        return 0
    for name in names:
        for shape in ((2, 37, 128), (1, 5, 1024), (3, 9, 32)):
            mx.eval(FUNCTIONS[name](inputs(mx.float16, *shape)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
