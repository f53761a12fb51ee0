"""Prefill attention on a CUDA machine: `python tests/h200_prefill.py [check|time]`, both by default.

check: the rows of tests/cuda_prefill_cases.py, memory that is not aligned, and long sequences, against float64; each with the products that
MLX's compiler options give (a warpgroup's on Hopper) and with those of a warp. time: medians beside MLX's own attention of the same shape.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
import numpy as np

from tests.cuda_mutations import planted
from tests.cuda_prefill_cases import PREFILL_CASES
from tests.h200_attend import LEVELS16, codes, exact, factors, median, table, unpack
from veloxquant_mlx import metal
from veloxquant_mlx.metal._kernel import compiled
from veloxquant_mlx.selftest.case import Mutation
from veloxquant_mlx.selftest.run import attempt

HEADS, KV_HEADS = 32, 8
# batch, queries, keys, head size, dtype
SHAPES = (
    (1, 2048, 8192, 128, mx.float16),
    (1, 2048, 8192, 128, mx.bfloat16),
    (1, 2048, 2048, 128, mx.float16),
    (1, 8192, 8192, 128, mx.float16),
    (1, 512, 32768, 128, mx.float16),
    (1, 2048, 8192, 64, mx.float16),
)
FUNCTIONS = ("flash_prefill_attend", "rabitq_prefill_attend")
# Relative errors of a row's result; rounding it to 16 bits makes 2e-4 (1.6e-3), weights as much again, entries of a table twice that.
LIMITS = {mx.float16: {"flash_prefill_attend": 6e-4, "rabitq_prefill_attend": 1e-3}, mx.bfloat16: dict.fromkeys(FUNCTIONS, 5e-3)}
Arguments = dict[str, Any]
_WARP = Mutation("flash_prefill_attend", "products of a warp", "#define TILE_GROUP 1", "", ())


@contextmanager
def products_of_a_warp() -> Iterator[None]:
    with planted(_WARP):
        yield


VARIANTS: dict[str, Callable[[], Any]] = {"as compiled": nullcontext, "products of a warp": products_of_a_warp}
_PROBE = """
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
out[0] = 1;
#else
out[0] = 0;
#endif
#ifdef __CUDA_ARCH__
out[1] = __CUDA_ARCH__;
#endif
"""


def architecture() -> str:
    """What MLX compiles kernels for."""
    kernel = mx.fast.cuda_kernel(name="probe_architecture", input_names=["x"], output_names=["out"], source=_PROBE)
    x = mx.zeros((8,), mx.int32)
    out = kernel(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(2,)], output_dtypes=[mx.int32])[0]
    return f"__CUDA_ARCH__ {out[1].item()}, a warpgroup's products: {bool(out[0].item())}"


def plain(batch: int, queries: int, keys: int, dim: int, dtype: mx.Dtype) -> Arguments:
    def rows(heads: int, length: int) -> mx.array:
        return mx.random.normal((batch, heads, length, dim)).astype(dtype)

    return {"q": rows(HEADS, queries), "k": rows(KV_HEADS, keys), "v": rows(KV_HEADS, keys), "scale": mx.array([dim**-0.5])}


def rabitq(batch: int, queries: int, keys: int, dim: int, dtype: mx.Dtype) -> Arguments:
    kv = (batch, KV_HEADS, keys)
    return {
        "q": mx.random.normal((batch, HEADS, queries, dim)).astype(dtype),
        "scale": mx.array([dim**-0.5]),
        "k_bits": codes(*kv, dim // 8),
        "k_mag": factors(kv, dtype),
        "k_const": mx.random.normal(kv).astype(dtype),
        "v_idx": codes(*kv, dim // 2),
        "v_cents": table(LEVELS16),
        "causal": True,
    }


MAKERS = {"flash_prefill_attend": plain, "rabitq_prefill_attend": rabitq}


def reference(function: str, given: Arguments, b: int, h: int, i: int) -> np.ndarray:
    """One row of the result, in float64."""
    queries, kv = given["q"].shape[2], h // (HEADS // KV_HEADS)
    length = given["k" if "k" in given else "k_bits"].shape[2]
    seen = length - queries + i + 1
    q = exact(given["q"][b, h, i])
    at = {key: value[b, kv, :seen] for key, value in given.items() if isinstance(value, mx.array) and value.ndim >= 3 and key != "q"}
    if function == "flash_prefill_attend":
        s, v = exact(at["k"]) @ q * exact(given["scale"]), exact(at["v"])
    else:
        s = (2 * unpack(at["k_bits"], 1) - 1) @ q * exact(given["scale"]) * exact(at["k_mag"]) + exact(at["k_const"])
        v = exact(given["v_cents"])[unpack(at["v_idx"], 4).astype(int)]
    p = np.exp(s - s.max())
    return p @ v / p.sum()


def tried(run: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return run(), None
    except (RuntimeError, ValueError, TypeError) as error:
        return None, f"{type(error).__name__}: {error}"


def long_error(function: str, shape: tuple[int, int, int, int, mx.Dtype]) -> float:
    """Largest relative error of a few rows of a long sequence."""
    given = MAKERS[function](*shape)
    got = getattr(metal, function)(**given)
    batch, queries, worst = shape[0], shape[1], 0.0
    for b, h, i in ((0, 0, 0), (0, 5, queries // 2 + 1), (batch - 1, HEADS - 1, queries - 1)):
        want = reference(function, given, b, h, i)
        error = np.linalg.norm(exact(got[b, h, i]) - want) / np.linalg.norm(want)
        worst = max(worst, float(error) if np.isfinite(error) else math.inf)
    return worst


def unaligned_gap(function: str, key: str) -> float:
    """How far the result of the same call is from it with an operand that begins at an odd place."""
    given = MAKERS[function](1, 70, 200, 128, mx.float16)
    flat = mx.concatenate([mx.zeros((3,), given[key].dtype), given[key].reshape(-1)])
    mx.eval(flat)
    got = [getattr(metal, function)(**one).astype(mx.float32) for one in (given, given | {key: flat[3:].reshape(given[key].shape)})]
    return mx.abs(got[0] - got[1]).max().item()


def check(variant: str) -> int:
    failures = 0

    def report(name: str, problem: str | None, fine: str = "") -> None:
        nonlocal failures
        failures += problem is not None
        if problem or fine:
            print(f"{'FAILED ' if problem else ''}{name} [{variant}]: {problem or fine}", flush=True)

    for case in PREFILL_CASES:
        report(case.id, attempt(case))
    missing = {f"{function}_tiles" for function in FUNCTIONS} - {name for name, _ in compiled()}
    report("kernels", f"not reached: {missing}" if missing else None)
    print(f"{len(PREFILL_CASES)} rows [{variant}], {failures} failed", flush=True)
    for function, keys in (("flash_prefill_attend", "qkv"), ("rabitq_prefill_attend", ("q", "k_bits", "v_idx"))):
        for key in keys:
            gap, problem = tried(lambda function=function, key=key: unaligned_gap(function, key))
            report(f"{function} with {key} not aligned", problem or (f"differs by {gap}" if not gap < 1e-6 else None))
        for shape in (*SHAPES, (2, 77, 5003, 128, mx.float16)):
            error, problem = tried(lambda function=function, shape=shape: long_error(function, shape))
            limit = LIMITS[shape[4]][function]
            wrong = problem or (f"relative error {error:.1e}, over {limit:.1e}" if not error < limit else None)
            report(f"{function} {shape}", wrong, "" if wrong else f"relative error {error:.1e}")
    return failures


def measure() -> None:
    for shape in SHAPES:
        batch, queries, keys, dim, dtype = shape
        operations = 4 * batch * HEADS * dim * (queries * keys - queries * (queries - 1) // 2)
        calls = max(4, min(24, int(2e13 / operations)))
        print(f"batch {batch}, {queries} queries, {keys} keys, {dim} channels, {str(dtype).removeprefix('mlx.core.')}", flush=True)

        def line(name: str, call: Callable[[int], mx.array], base: float | None, n: int = calls, ops: int = operations) -> float | None:
            timed, problem = tried(lambda: median(call, n, 7)[0])
            ratio = f" {base / timed:5.2f} x" if base and timed else ""
            print(f"  {name:58}" + (problem or f"{timed * 1e6:9.1f} us {ops / timed / 1e12:7.1f} TFLOP/s{ratio}"), flush=True)
            return timed

        sets = [plain(*shape) for _ in range(2)]
        mx.eval(sets)

        def own(i: int, sets: list[Arguments] = sets, dim: int = dim) -> mx.array:
            one = sets[i % 2]
            return mx.fast.scaled_dot_product_attention(one["q"], one["k"], one["v"], scale=dim**-0.5, mask="causal")

        base = line("mx.fast.scaled_dot_product_attention", own, None)
        for variant, inside in VARIANTS.items():
            with inside():
                for function in FUNCTIONS:
                    given = [MAKERS[function](*shape) for _ in range(2)]
                    mx.eval(given)
                    run = getattr(metal, function)
                    line(f"{function}, {variant}", lambda i, given=given, run=run: run(**given[i % 2]), base)
        if shape == SHAPES[0]:
            given = [one | {"out_dtype": mx.float32} for one in sets]
            line("flash_prefill_attend, general", lambda i, given=given: metal.flash_prefill_attend(**given[i % 2]), base, 4)


def main(words: list[str]) -> int:
    if not set(words) <= {"check", "time"} or not mx.cuda.is_available():
        print(__doc__ if mx.cuda.is_available() else "no CUDA back end", file=sys.stderr)
        return 2
    print(f"{mx.device_info().get('device_name', 'GPU')}, mlx {mx.__version__}")
    print(tried(architecture), flush=True)
    failures = 0
    if "check" in words or not words:
        for variant, inside in VARIANTS.items():
            with inside():
                failures += check(variant)
        print("check:", f"{failures} failed" if failures else "passed", flush=True)
    if "time" in words or not words:
        measure()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
