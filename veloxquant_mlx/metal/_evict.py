"""What H2O's and Keyformer's eviction kernels share: checks, the reduction that chooses a row, and the grids."""

import math
from typing import Any

import mlx.core as mx

from veloxquant_mlx.allocators.eviction import lowest_row, renumbered, selection, shift_table, without_row
from veloxquant_mlx.metal._backend import natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_int, message, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import kernels

LOWEST = Kernel(
    name="evict_lowest",
    inputs=("scores", "gumbel", "tau", "dims"),
    outputs=("gone",),
    sources=("evict",),
    metal="""
  threadgroup float values[32];
  threadgroup int rows[32];
  kvtool::evict_lowest<NOISE>(
      scores, gumbel, tau, dims, gone, values, rows, threadgroup_position_in_grid.y, thread_position_in_threadgroup.x,
      threads_per_threadgroup.x, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup);
""",
    cuda="""
  __shared__ kvtool::EvictBest partial[32];
  kvtool::evict_lowest<NOISE>(scores, gumbel, tau, dims, gone, partial);
""",
)

THREADS = 256  # of a threadgroup that copies rows


def check_rows(function: str, keys: Any, values: Any, floats: dict[str, Any], positions: Any) -> None:
    """TypeError or ValueError unless the arrays of one cache agree: keys (G, N, D), values (G, N, Dv), all else (G, N)."""
    check_array(function, "keys_mid", keys, ("BH", "n_total", "D"), FLOATS)
    groups, rows, dim = keys.shape
    require(rows >= 2, function, "keys_mid", "(BH, n_total, D) with n_total at least 2", keys)
    require(dim >= 2 and dim % 2 == 0, function, "keys_mid", "(BH, n_total, D) with D even and at least 2", keys)
    check_array(function, "values_mid", values, (groups, rows, "Dv"), FLOATS)
    for name, array in floats.items():
        check_array(function, name, array, (groups, rows), (mx.float32,))
    check_array(function, "positions_mid", positions, (groups, rows), (mx.int32,))


def check_protection(function: str, rows: int, n_sink: Any, recent_name: str, recent: Any, nsg: Any) -> tuple[int, int, int]:
    """(n_sink, recent, nsg) as integers; ValueError if no row is left to evict."""
    n_sink = check_int(function, "n_sink", n_sink, 0)
    recent = check_int(function, recent_name, recent, 0)
    nsg = check_int(function, "nsg", nsg, 1, 32)
    free = f"less than n_total = {rows}, so that a row can be evicted"
    require(n_sink + recent < rows, function, f"n_sink + {recent_name}", free, f"{n_sink} + {recent}")
    return n_sink, recent, nsg


def check_number(function: str, name: str, value: Any, *, positive: bool) -> float:
    """`value` as a float; TypeError unless a number, ValueError unless finite and positive (or not negative)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(message(function, name, "a number", type(value).__name__))
    sound = math.isfinite(value) and (value > 0 if positive else value >= 0)
    require(sound, function, name, f"finite and {'positive' if positive else 'at least 0'}", value)
    return float(value)


def check_flag(function: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(message(function, name, "True or False", type(value).__name__))


def evict_ops(
    keys: mx.array,
    values: mx.array,
    floats: tuple[mx.array, ...],
    positions: mx.array,
    tau: float,
    n_sink: int,
    recent: int,
    rope_base: float,
    renumber: bool,
) -> tuple[mx.array, ...]:
    """The definition: (keys, values, *floats, positions), each without the row whose floats[0] + tau * floats[1] is lowest."""
    ranked = selection(floats[0], floats[1] if len(floats) > 1 else None, tau)
    gone = lowest_row(ranked, n_sink, keys.shape[1] - recent)
    if natively() and 0 not in (keys.size, values.size):
        kept = [kernels.without_row(array, gone) for array in (values, *floats)]
        if not renumber:
            return kernels.without_row(keys, gone), *kept, kernels.without_row(positions, gone)
        left = kernels.without_row(positions, gone)
        moved = left > mx.take_along_axis(positions, gone[:, None], axis=1)
        return kernels.turned_back(keys, positions, gone, shift_table(keys.shape[2], rope_base)), *kept, left - moved.astype(mx.int32)
    kept = [without_row(array, gone) for array in (values, *floats)]
    if renumber:
        keys, positions = renumbered(keys, positions, gone, rope_base)
    else:
        keys, positions = without_row(keys, gone), without_row(positions, gone)
    return keys, *kept, positions


def evict_kernel(
    compact: Kernel,
    keys: mx.array,
    values: mx.array,
    floats: tuple[mx.array, ...],
    positions: mx.array,
    tau: float,
    n_sink: int,
    recent: int,
    rope_base: float,
    renumber: bool,
    nsg: int,
) -> tuple[mx.array, ...]:
    """The same in two dispatches; `compact` takes and returns the rows in the order of the definition."""
    groups, rows, dim = keys.shape
    noise = len(floats) > 1 and tau != 0
    tau_array = mx.array([tau, *[0.0] * 7], dtype=mx.float32)
    (gone,) = LOWEST(
        [floats[0], floats[-1], tau_array, dims(rows, n_sink, rows - recent)],
        template=[("NOISE", noise)],
        grid=(32 * nsg, groups, 1),
        threadgroup=(32 * nsg, 1, 1),
        output_shapes=[(groups,)],
        output_dtypes=[mx.int32],
    )
    moved = (keys, values, *floats, positions)
    pairs = max(dim // 2, (values.shape[2] + 1) // 2)
    outputs = compact(
        [*moved, gone, shift_table(dim, rope_base), dims(rows, dim, values.shape[2], pairs)],
        template=[("RENUMBER", renumber)],
        grid=(pairs * (rows - 1), groups, 1),
        threadgroup=(min(THREADS, pairs * (rows - 1)), 1, 1),
        output_shapes=[(groups, rows - 1, *array.shape[2:]) for array in moved],
        output_dtypes=[array.dtype for array in moved],
    )
    return tuple(outputs)
