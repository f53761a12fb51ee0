"""What the attend families' tables share: extras to try, and the tolerance.

Tolerance: twice the error that a same-precision baseline makes on the very arguments of the case. The baseline decodes keys and values to
float32, does softmax attention in float32 and rounds once to the output's dtype (flash-attention's tests compare in the same way). Two of
its errors because the kernel makes the same rounding, and sums in another order. The floor is for the cases whose baseline is right by
luck: 2^-19 of the largest result, as 32 float32 roundings do, times score / 8 where the scores that count are larger than 8: the weight
exp(s) has the relative error of s times |s|.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case, Tolerance, as_tuple, round_to, to_oracle

FLOOR = 2.0**-19
SCORE = 8.0
REASON = "twice the error of decoding to float32 and attending in float32, plus the order of sums"
Rng = np.random.Generator


def attend_case(function: str, name: str, make: Callable[[Rng], dict[str, Any]], oracle: Callable[..., Any], emulate: bool = True) -> Case:
    """A case whose result dtypes follow from the arguments and whose tolerance is measured."""
    case = Case(function, name, make, oracle, (), emulate=emulate)
    given = case.arguments()
    q = given["q_tilde" if "q_tilde" in given else "q"]
    bf16 = isinstance(getattr(q, "array", q), Bf16)
    if given.get("out_dtype") is not None:
        dtype = str(given["out_dtype"]).removeprefix("mlx.core.")
    elif function == "metal_fused_sdpa":
        dtype = "bfloat16" if bf16 else str(getattr(q, "array", q).dtype)
    else:
        dtype = "bfloat16" if bf16 else "float16"
    arguments = {key: to_oracle(value) for key, value in given.items()}
    wants, baselines = as_tuple(oracle(**arguments)), as_tuple(oracle(**arguments, dtype=np.float32))
    dtypes = (dtype, "float32")[: len(wants)]
    lse = oracle(**arguments | {"lse": True})[1]
    score = max(1.0, float(np.abs(lse[np.isfinite(lse)]).max(initial=0)) / SCORE)
    tolerances = tuple(_tolerance(want, round_to(base, d), score) for want, base, d in zip(wants, baselines, dtypes, strict=True))
    return replace(case, dtypes=dtypes, tolerance=tolerances)


def _tolerance(want: np.ndarray, baseline: np.ndarray, score: float) -> Tolerance:
    finite = np.isfinite(want) & np.isfinite(baseline)
    if not finite.any():
        return Tolerance(REASON)
    error = np.abs(baseline[finite].astype(np.float64) - want[finite]).max()
    return Tolerance(REASON, atol=2 * float(error) + FLOOR * score * max(float(np.abs(want[finite]).max()), 2.0**-14))


def floats(rng: Rng, shape: tuple[int, ...], dtype: str = "float16", scale: float = 1.0) -> Any:
    values = rng.standard_normal(shape).astype(np.float32) * np.float32(scale)
    return Bf16(values) if dtype == "bfloat16" else values.astype(dtype)


def positive(rng: Rng, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    values = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return Bf16(values) if dtype == "bfloat16" else values.astype(dtype)


def orthogonal(rng: Rng, dim: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((dim, dim)))[0].astype(np.float32)


def signs(rng: Rng, dim: int) -> np.ndarray:
    return rng.choice(np.array([-1, 1], np.float32), dim)


def at(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    """A copy with `value` at `index`."""
    changed = array.copy()
    changed[index] = value
    return changed


def run_time_extras(window: str = "window") -> dict[str, tuple[dict[str, int], Callable[[Rng, dict[str, int]], dict[str, Any]]]]:
    """name -> (sizes, extras(rng, sizes)): what changes no compile-time constant."""

    def fixed(**extras: Any) -> Callable[[Rng, dict[str, int]], dict[str, Any]]:
        return lambda rng, sizes: extras

    def start(per_query: bool, *values: int) -> Callable[[Rng, dict[str, int]], dict[str, Any]]:
        def make(rng: Rng, sizes: dict[str, int]) -> dict[str, Any]:
            first = np.array(values, np.int32)
            return {"lse": True, "start": first.reshape(sizes["B"], -1) if per_query else first}

        return make

    return {
        "one-key": ({"S": 1}, fixed()),
        "no-keys": ({"S": 0}, fixed(lse=True)),
        "no-queries": ({"Q": 0, "S": 9}, fixed()),
        "no-batch": ({"B": 0, "S": 9}, fixed()),
        "prime": ({"B": 2, "S": 37}, fixed()),
        "larger-than-a-block": ({"S": 139}, fixed(lse=True)),
        "more-splits-than-keys": ({"S": 3}, fixed(splits=5, lse=True)),
        "splits": ({"B": 2, "S": 70, "Q": 2}, fixed(splits=3, causal=True, lse=True)),
        "causal-tail": ({"S": 41, "Q": 5}, fixed(causal=True, lse=True)),
        "not-causal": ({"S": 19, "Q": 3}, fixed(causal=False)),
        "more-queries-than-keys": ({"S": 2, "Q": 5}, fixed(causal=True, lse=True)),
        "window": ({"S": 45, "Q": 4}, fixed(**{window: 7}, causal=True, lse=True)),
        "window-of-one": ({"S": 9, "Q": 2}, fixed(**{window: 1}, causal=True)),
        "window-not-causal": ({"S": 23, "Q": 4}, fixed(**{window: 5}, causal=False)),
        "largest-window": ({"S": 23, "Q": 2}, fixed(**{window: 2**31 - 1}, causal=True)),
        "largest-window-more-queries-than-keys": ({"S": 2, "Q": 5}, fixed(**{window: 2**31 - 1}, causal=False, lse=True)),
        "start": ({"B": 3, "S": 21, "Q": 2}, start(False, 0, 20, 5)),
        "start-per-query": ({"B": 2, "S": 21, "Q": 2}, start(True, 3, 21, -4, 2**31 - 1)),
        "start-in-a-split": ({"B": 2, "S": 50}, lambda rng, sizes: {**start(False, 49, 10)(rng, sizes), "splits": 4}),
        "fp32-output": ({"S": 33}, fixed(out_dtype=mx.float32, lse=True)),
    }


def many_query_extras(window: str = "window") -> dict[str, tuple[dict[str, int], Callable[[Rng, dict[str, int]], dict[str, Any]]]]:
    """As `run_time_extras`, with enough queries for the kernels of many."""

    def fixed(**extras: Any) -> Callable[[Rng, dict[str, int]], dict[str, Any]]:
        return lambda rng, sizes: extras

    return {
        "many-causal": ({"S": 41, "Q": 41}, fixed(causal=True, lse=True)),
        "many-group-3": ({"H": 1, "group": 3, "S": 51, "Q": 23}, fixed(**{window: 9}, causal=True, lse=True)),
        "many-splits": ({"S": 83, "Q": 35}, fixed(splits=3, causal=True, lse=True)),
        "many-start": ({"B": 2, "S": 40, "Q": 35}, lambda rng, sizes: {"start": np.array([38, 7], np.int32), "causal": True, "lse": True}),
        "many-not-causal": ({"H": 1, "S": 64, "Q": 33}, fixed(causal=False)),
    }
