"""Decode attention on a CUDA machine: `python tests/h200_attend.py check|rows|sums|time|one [FUNCTION]`.

check: the rows of tests/cuda_attend_cases.py (rows: these alone), memory that is not aligned, and long sequences, against float64.
sums: what scalar_fused_decode_attend's kernel sums in float32, before results are rounded, against float64.
time: medians at 32 query heads, 8 KV heads, 128 channels, beside MLX's float16 attention; % of the bandwidth of a copy.
one: a single call, for a profiler.
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
import numpy as np

from tests.cuda_attend_cases import DECODE_CASES
from veloxquant_mlx import metal
from veloxquant_mlx.metal._kernel import Kernel, compiled
from veloxquant_mlx.selftest.run import attempt

HEADS, KV_HEADS, DIM = 32, 8, 128
SHAPES = ((1, 131072), (8, 32768))
SETS = 3  # of inputs in turn: no call finds its own in the cache
# Lloyd-Max, Gaussian, 16 and 4 levels; rounding them does not matter here.
LEVELS16 = [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326]
LEVELS4 = [0.4528, 1.5104]
SEED = 1
# Relative errors. Rounding the output to float16 makes 2e-4; entries of a table as halves, as much again, and those of keys change scores:
# of 96 draws of rvq's inputs the median was 5.9e-4 and the largest 8.6e-4.
LIMITS = {"rabitq_fused_attend": 5e-4, "turboquant_fused_rvq_decode_attend": 1e-3, "scalar_fused_decode_attend": 3e-4}
SUMS = 8e-6  # of `sums`: 24 bits of scores up to 30; with codes in the lowest bits of halves 2e-5 to 5e-5
Arguments = dict[str, Any]


def table(levels: list[float]) -> mx.array:
    return mx.array([-x for x in reversed(levels)] + levels)


def codes(*shape: int) -> mx.array:
    return mx.random.randint(0, 256, shape, mx.uint8)


def sizes(batch: int, length: int) -> tuple[int, int, int]:
    return (batch, KV_HEADS, length)


def queries(batch: int) -> mx.array:
    return mx.random.normal((batch, HEADS, 1, DIM)).astype(mx.float16)


def factors(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.uniform(0.5, 1.5, shape).astype(dtype)


def rabitq(batch: int, length: int) -> Arguments:
    kv = sizes(batch, length)
    return {
        "q": queries(batch),
        "q_scale": factors((batch, HEADS, 1), mx.float32) / math.sqrt(DIM),
        "k_bits": codes(*kv, DIM // 8),
        "k_mag": factors(kv, mx.float16),
        "k_const": mx.random.normal(kv).astype(mx.float16),
        "v_idx": codes(*kv, DIM // 2),
        "v_cents": table(LEVELS16),
    }


def rvq(batch: int, length: int) -> Arguments:
    kv = sizes(batch, length)
    return {
        "q": queries(batch),
        "k_indices1": codes(*kv, DIM // 4),
        "k_indices2": codes(*kv, DIM // 4),
        "centroids1": table(LEVELS4),
        "centroids2": table([0.3 * x for x in LEVELS4]),
        "v_indices": codes(*kv, DIM // 2),
        "v_codebook": table(LEVELS16)[:, None],
        "b1": 2,
        "b2": 2,
        "bv": 4,
        "packed": "lsb8",
        "k_norm": factors(kv, mx.bfloat16),
        "v_scale": factors(kv, mx.bfloat16),
    }


def scalar(batch: int, length: int) -> Arguments:
    kv = sizes(batch, length)
    k_side, v_side = (*kv[:2], -(-length // 32), DIM), (*kv, DIM // 32)
    return {
        "q": queries(batch),
        "k_codes": codes(*kv, DIM // 2),
        "k_scale": factors(k_side, mx.float16) / 4,
        "k_zero": factors(k_side, mx.float16) - 2.5,
        "v_codes": codes(*kv, DIM // 2),
        "v_scale": factors(v_side, mx.float16) / 4,
        "v_zero": factors(v_side, mx.float16) - 2.5,
        "group_size": 32,
        "scale": 1 / math.sqrt(DIM),
        "packed": "lsb8",
        "k_bits": 4,
        "v_bits": 4,
    }


MAKERS: dict[str, Callable[[int, int], Arguments]] = {
    "rabitq_fused_attend": rabitq,
    "turboquant_fused_rvq_decode_attend": rvq,
    "scalar_fused_decode_attend": scalar,
}


def arrays(given: Arguments) -> list[mx.array]:
    return [value for value in given.values() if isinstance(value, mx.array)]


def unpack(packed: mx.array, bits: int) -> np.ndarray:
    """Codes of rows of whole bytes, from the lowest bits on, float64."""
    each = np.array(packed)
    return np.stack([each >> shift & (2**bits - 1) for shift in range(0, 8, bits)], -1).reshape(*each.shape[:-1], -1).astype(np.float64)


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def reference(function: str, given: Arguments, b: int, h: int) -> tuple[np.ndarray, np.ndarray]:
    """(heads of the group, D) of one batch entry and KV head, and the log-sum-exp of its scores, in float64."""
    group = HEADS // KV_HEADS
    q = exact(given["q"][b, h * group : (h + 1) * group, 0])
    at = {key: value[b, h] for key, value in given.items() if isinstance(value, mx.array) and value.ndim >= 3}
    if function == "rabitq_fused_attend":
        signs = 2 * unpack(at["k_bits"], 1) - 1
        scale = exact(given["q_scale"][b, h * group : (h + 1) * group])
        s = np.where(q >= 0, 1.0, -1.0) @ signs.T * scale * exact(at["k_mag"]) + exact(at["k_const"])
        v = exact(given["v_cents"])[unpack(at["v_idx"], 4).astype(int)]
    elif function == "turboquant_fused_rvq_decode_attend":
        stages = [exact(given[f"centroids{i}"])[unpack(at[f"k_indices{i}"], 2).astype(int)] for i in (1, 2)]
        s = q @ sum(stages).T / math.sqrt(DIM) * exact(at["k_norm"])
        v = exact(given["v_codebook"])[unpack(at["v_indices"], 4).astype(int), 0] * exact(at["v_scale"])[:, None]
    else:
        length = at["k_codes"].shape[0]
        side = {key: exact(at[key]) for key in ("k_scale", "k_zero", "v_scale", "v_zero")}
        rows = {key: np.repeat(side[key], 32, axis=0)[:length] for key in ("k_scale", "k_zero")}
        columns = {key: np.repeat(side[key], 32, axis=1) for key in ("v_scale", "v_zero")}
        s = q @ (unpack(at["k_codes"], 4) * rows["k_scale"] + rows["k_zero"]).T * given["scale"]
        v = unpack(at["v_codes"], 4) * columns["v_scale"] + columns["v_zero"]
    most = s.max(-1)
    p = np.exp(s - most[:, None])
    return p @ v / p.sum(-1, keepdims=True), most + np.log(p.sum(-1))


def sums(length: int = 5003) -> tuple[float, float]:
    """Largest errors of scalar_fused_decode_attend's float32 parts, merged in float64: of outputs, relative, and of log-sum-exps."""
    given = scalar(1, length)
    given["q"] = given["q"] * 4  # weights that differ
    seen = []
    launched = Kernel.__call__

    def recording(kernel: Kernel, *arrays: Any, **settings: Any) -> list[mx.array]:
        found = launched(kernel, *arrays, **settings)
        seen.append((kernel.name, found))
        return found

    with patch.object(Kernel, "__call__", recording):
        mx.eval(metal.scalar_fused_decode_attend(**given, splits=2, lse=True))
    (parts, lses) = next(found for name, found in seen if name == "scalar_fused_decode_attend_decode")
    parts, lses = exact(parts), exact(lses)
    top = lses.max(-1)
    weights = np.exp(lses - top[:, None])
    outs = (parts * weights[..., None]).sum(1) / weights.sum(-1)[:, None]
    wants = [reference("scalar_fused_decode_attend", given, 0, h) for h in range(KV_HEADS)]
    want, want_lse = (np.concatenate(each) for each in zip(*wants, strict=True))
    return float(np.abs(outs - want).max() / np.abs(want).max()), float(np.abs(top + np.log(weights.sum(-1)) - want_lse).max())


def check(functions: list[str], rows_only: bool) -> int:
    failures = 0
    rows = [case for case in DECODE_CASES if case.function in functions]

    def report(name: str, problem: str | None) -> None:
        nonlocal failures
        if problem:
            failures += 1
            print(f"FAILED {name}: {problem}", flush=True)

    for case in rows:
        report(case.id, attempt(case))
    missing = {f"{function}_decode" for function in functions} - {name for name, _ in compiled()}
    report("kernels", f"not reached: {missing}" if missing else None)
    print(f"{len(rows)} rows, {failures} failed")
    for function in [] if rows_only else functions:
        mx.random.seed(SEED)
        make = MAKERS[function]
        given = make(1, 70)
        want = getattr(metal, function)(**given)
        for key in [key for key, value in given.items() if isinstance(value, mx.array) and value.dtype == mx.uint8]:
            flat = mx.concatenate([mx.zeros((3,), mx.uint8), given[key].reshape(-1)])
            mx.eval(flat)
            got = getattr(metal, function)(**given | {key: flat[3:].reshape(given[key].shape)})
            gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max().item()
            report(f"{function} with {key} not aligned", None if gap < 2e-3 else f"differs by {gap}")
        for batch, length in ((1, 131072), (2, 5003)):
            given = make(batch, length)
            got = getattr(metal, function)(**given)
            for b, h in {(0, 0), (batch - 1, KV_HEADS - 1)}:
                want64, _ = reference(function, given, b, h)
                part = exact(got[b, 4 * h : 4 * h + 4, 0])
                error = np.linalg.norm(part - want64) / np.linalg.norm(want64)
                report(f"{function} {batch} x {length}", None if error < LIMITS[function] else f"relative error {error:.1e}")
                print(f"{function} batch {batch} of {batch}, head {h}, {length} tokens: relative error {error:.2e}", flush=True)
    print("check:", "failed" if failures else "passed", flush=True)
    return failures


def median(call: Callable[[int], mx.array], n: int = 96, repeats: int = 11) -> tuple[float, float]:
    """Seconds of call(i), of n evaluated at once, and how many of them the CPU takes to hand it over; building the graph is not timed."""
    seconds, handing = [], []
    for _ in range(repeats + 2):
        built = [call(i) for i in range(n)]
        start = time.perf_counter()
        mx.async_eval(built)
        handing.append((time.perf_counter() - start) / n)
        mx.synchronize()
        seconds.append((time.perf_counter() - start) / n)
    return sorted(seconds[2:])[repeats // 2], sorted(handing[2:])[repeats // 2]


def measure(functions: list[str]) -> None:
    x = mx.random.normal((1 << 29,)).astype(mx.float16)
    mx.eval(x)
    copy = 2 * x.nbytes / median(lambda i, x=x: x + 1, 4, 7)[0]
    print(f"copy of {x.nbytes >> 20} MiB: {copy / 1e12:.2f} TB/s")
    del x
    for batch, length in SHAPES:
        kv = (*sizes(batch, length), DIM)
        sets = [(queries(batch), *(mx.random.normal(kv).astype(mx.float16) for _ in "kv")) for _ in range(2)]
        mx.eval(sets)
        base, handing = median(lambda i, sets=sets: mx.fast.scaled_dot_product_attention(*sets[i % 2], scale=DIM**-0.5))
        size = sets[0][1].nbytes * 2
        print(f"batch {batch}, {length} tokens")
        print(
            f"  {'float16 attention':36}{base * 1e6:8.1f} us {size / 1e6:7.1f} MB {size / base / copy:5.0%}  (CPU {handing * 1e6:.1f} us)"
        )
        del sets
        for function in functions:
            given = [MAKERS[function](batch, length) for _ in range(SETS)]
            mx.eval([arrays(one) for one in given])
            run = getattr(metal, function)
            seconds, handing = median(lambda i, given=given, run=run: run(**given[i % SETS]))
            size = sum(a.nbytes for a in arrays(given[0]))
            print(
                f"  {function:36}{seconds * 1e6:8.1f} us {size / 1e6:7.1f} MB {size / seconds / copy:5.0%}  (CPU {handing * 1e6:.1f} us)"
                f" {base / seconds:5.2f} x float16",
                flush=True,
            )
            del given


def main(words: list[str]) -> int:
    functions = words[1:] or list(MAKERS)
    if words[:1] not in (["check"], ["rows"], ["sums"], ["time"], ["one"]) or not set(functions) <= set(MAKERS):
        print(__doc__, file=sys.stderr)
        return 2
    if words[0] in ("check", "rows"):
        return 1 if check(functions, words[0] == "rows") else 0
    if words[0] == "sums":
        errors = sums()
        print(f"float32 sums of scalar_fused_decode_attend: outputs {errors[0]:.1e} of the largest, log-sum-exp {errors[1]:.1e}")
        return 1 if max(errors) > SUMS else 0
    if words[0] == "time":
        measure(functions)
        return 0
    for function in functions:
        given = MAKERS[function](1, 131072)
        mx.eval(arrays(given))
        mx.eval(getattr(metal, function)(**given))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
