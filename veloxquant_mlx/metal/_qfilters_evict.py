"""Q-Filters: keep the keys that project furthest along their head's query direction (Godey et al. 2025, arXiv 2503.02812, thm. 3.3).

    score_i = sign * <k_i, f>
    kept    = sinks, recent rows and, of the others, the (budget - protected) highest; in temporal order

Ties go to the latest rows. NaN ranks as +inf, so that it never goes first. Positions are not renumbered and keys not turned.
Axes: G groups (batch x KV heads), N rows, D key size, Dv value size.
"""

import math
from typing import Any

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_choice, check_int, require
from veloxquant_mlx.metal._evict import THREADS
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import kernels

QFILTERS_MAX_BUDGET = 4096

SCORE = Kernel(
    name="qfilters_score",
    inputs=("keys", "filters", "dims"),
    outputs=("scores",),
    sources=("evict",),
    metal="""
  kvtool::evict_project(keys, filters, dims, scores, thread_position_in_grid.y, thread_position_in_grid.x / 32, thread_index_in_simdgroup);
""",
    cuda="""
  kvtool::evict_project(keys, filters, dims, scores);
""",
)

KEEP = Kernel(
    name="qfilters_keep",
    inputs=("scores", "thresholds", "dims"),
    outputs=("kept",),
    sources=("evict",),
    metal="""
  kvtool::evict_keep(scores, thresholds, dims, kept, threadgroup_position_in_grid.y, thread_index_in_simdgroup);
""",
    cuda="""
  kvtool::evict_keep(scores, thresholds, dims, kept);
""",
)

GATHER = Kernel(
    name="qfilters_gather",
    inputs=("keys", "values", "scores", "kept", "dims"),
    outputs=("keys_out", "values_out", "scores_out"),
    sources=("evict",),
    metal="""
  const kvtool::EvictPlace at = kvtool::evict_gather_place(kept, dims, thread_position_in_grid);
  kvtool::evict_copy(keys, keys_out, at.from, at.to, dims[1], at.pair);
  kvtool::evict_copy(values, values_out, at.from, at.to, dims[2], at.pair);
  kvtool::evict_scalar(scores, scores_out, at);
""",
    cuda="""
  const kvtool::EvictPlace at = kvtool::evict_gather_place(kept, dims);
  if (!at.inside) return;
  kvtool::evict_copy(keys, keys_out, at.from, at.to, dims[1], at.pair);
  kvtool::evict_copy(values, values_out, at.from, at.to, dims[2], at.pair);
  kvtool::evict_scalar(scores, scores_out, at);
""",
)


def qfilters_score(keys: mx.array, filter_dir: mx.array, n_sink: int = 0, recent: int = 0, sign: int = 1) -> mx.array:
    """Projection of every key on its group's filter, +inf for protected rows.

    Args:
        keys: (BH, n_total, D) float16, bfloat16 or float32.
        filter_dir: (BH, D) float32, one direction per group.
        n_sink, recent: first and last rows that are protected; more than there are protects all.
        sign: 1 or -1, factor on the projection.

    Returns:
        (BH, n_total) float32.

    Raises:
        ValueError: a shape does not fit, n_sink or recent negative, sign neither 1 nor -1.
        TypeError: another dtype, or a number that is not an integer.

    Error: a float32 sum of D products in any order, at most D * 2^-24 * sum |k_d f_d|.
    """
    n_sink, recent, sign = _check_score("qfilters_score", "keys", keys, filter_dir, n_sink, recent, sign)
    n_sink, recent = min(n_sink, keys.shape[1]), min(recent, keys.shape[1])
    if backend() == "cpu" or keys.size == 0:
        return _score_ops(keys, filter_dir, n_sink, recent, sign)
    return _score_kernel(keys, filter_dir, n_sink, recent, sign)


def qfilters_fused_evict(
    keys_mid: mx.array,
    values_mid: mx.array,
    filter_dir: mx.array,
    budget: int,
    n_sink: int = 0,
    recent: int = 0,
    sign: int = 1,
) -> tuple[mx.array, mx.array, mx.array]:
    """Each group's `budget` rows of highest projection, sinks and recent rows first, in temporal order.

    Args:
        keys_mid: (BH, n_total, D) float16, bfloat16 or float32.
        values_mid: (BH, n_total, Dv), one of the same dtypes.
        filter_dir: (BH, D) float32, one direction per group.
        budget: rows that stay, 1 to QFILTERS_MAX_BUDGET and less than n_total.
        n_sink, recent: first and last rows that stay; together at most `budget`.
        sign: 1 keeps the highest projections, -1 the lowest.

    Returns:
        (keys_out (BH, budget, D), values_out (BH, budget, Dv), scores_out (BH, budget) float32); the scores are projections,
        of protected rows too.

    Raises:
        ValueError: a shape does not fit, a size is out of range, sign neither 1 nor -1.
        TypeError: another dtype, or a number that is not an integer.

    Error: keys and values are copies; scores as `qfilters_score`; the choice is exact on those scores (ties: latest rows).
    """
    name = "qfilters_fused_evict"
    n_sink, recent, sign = _check_score(name, "keys_mid", keys_mid, filter_dir, n_sink, recent, sign)
    groups, rows, _ = keys_mid.shape
    check_array(name, "values_mid", values_mid, (groups, rows, "Dv"), FLOATS)
    budget = check_int(name, "budget", budget, 1, QFILTERS_MAX_BUDGET)
    require(budget < rows, name, "budget", f"less than n_total = {rows}", budget)
    require(n_sink + recent <= budget, name, "n_sink + recent", f"at most budget = {budget}", f"{n_sink} + {recent}")
    if backend() == "cpu" or groups == 0:
        return _evict_ops(keys_mid, values_mid, filter_dir, budget, n_sink, recent, sign)
    scores = _score_kernel(keys_mid, filter_dir, 0, 0, sign)
    return _evict_kernel(keys_mid, values_mid, scores, budget, n_sink, recent)


def _check_score(function: str, name: str, keys: Any, filter_dir: Any, n_sink: Any, recent: Any, sign: Any) -> tuple[int, int, int]:
    check_array(function, name, keys, ("BH", "n_total", "D"), FLOATS)
    require(keys.shape[2] >= 1, function, name, "(BH, n_total, D) with D at least 1", keys)
    check_array(function, "filter_dir", filter_dir, (keys.shape[0], keys.shape[2]), (mx.float32,))
    sign = check_int(function, "sign", sign, -1, 1)
    check_choice(function, "sign", sign, (1, -1))
    return check_int(function, "n_sink", n_sink, 0), check_int(function, "recent", recent, 0), sign


def _score_ops(keys: mx.array, filter_dir: mx.array, n_sink: int, recent: int, sign: int) -> mx.array:
    if natively() and keys.size > 0:
        scores = kernels.project(keys, filter_dir, sign)
    else:
        scores = sign * (keys.astype(mx.float32) * filter_dir[:, None]).sum(axis=-1)
    rows = mx.arange(keys.shape[1])
    return mx.where((rows < n_sink) | (rows >= keys.shape[1] - recent), math.inf, scores)


def _thresholds(scores: mx.array, budget: int, n_sink: int, recent: int) -> mx.array:
    """(G,) float32: of each group's unprotected rows, the rank of the last one that the budget has room for."""
    free = budget - n_sink - recent
    if free == 0:
        return mx.full((scores.shape[0],), math.inf, dtype=mx.float32)
    ranks = mx.sort(_ranks(scores[:, n_sink : scores.shape[1] - recent]), axis=-1)
    return ranks[:, ranks.shape[1] - free]


def _ranks(scores: mx.array) -> mx.array:
    return mx.where(mx.isnan(scores), math.inf, scores)


def _evict_ops(
    keys: mx.array, values: mx.array, filter_dir: mx.array, budget: int, n_sink: int, recent: int, sign: int
) -> tuple[mx.array, mx.array, mx.array]:
    scores = _score_ops(keys, filter_dir, 0, 0, sign)
    n = keys.shape[1]
    rows = mx.arange(n)
    protected = (rows < n_sink) | (rows >= n - recent)
    ranks, threshold = _ranks(scores), _thresholds(scores, budget, n_sink, recent)[:, None]
    above = protected | (ranks > threshold)
    equal = (ranks == threshold) & ~above
    room = budget - above.sum(axis=-1, keepdims=True)
    kept = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1, reverse=True) <= room))
    order = mx.sort(mx.where(kept, rows, n), axis=-1)[:, :budget]
    gather = order[..., None]
    return (
        mx.take_along_axis(keys, gather, axis=1),
        mx.take_along_axis(values, gather, axis=1),
        mx.take_along_axis(scores, order, axis=1),
    )


def _score_kernel(keys: mx.array, filter_dir: mx.array, n_sink: int, recent: int, sign: int) -> mx.array:
    groups, rows, dim = keys.shape
    (scores,) = SCORE(
        [keys, filter_dir, dims(rows, dim, n_sink, recent, sign)],
        grid=(32 * rows, groups, 1),
        threadgroup=(min(THREADS, 32 * rows), 1, 1),
        output_shapes=[(groups, rows)],
        output_dtypes=[mx.float32],
    )
    return scores


def _evict_kernel(
    keys: mx.array, values: mx.array, scores: mx.array, budget: int, n_sink: int, recent: int
) -> tuple[mx.array, mx.array, mx.array]:
    groups, rows, dim = keys.shape
    (kept,) = KEEP(
        [scores, _thresholds(scores, budget, n_sink, recent), dims(rows, n_sink, recent, budget)],
        grid=(32, groups, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(groups, budget)],
        output_dtypes=[mx.int32],
    )
    pairs = max((dim + 1) // 2, (values.shape[2] + 1) // 2)
    keys_out, values_out, scores_out = GATHER(
        [keys, values, scores, kept, dims(rows, dim, values.shape[2], pairs, budget)],
        grid=(pairs * budget, groups, 1),
        threadgroup=(min(THREADS, pairs * budget), 1, 1),
        output_shapes=[(groups, budget, dim), (groups, budget, values.shape[2]), (groups, budget)],
        output_dtypes=[keys.dtype, values.dtype, mx.float32],
    )
    return keys_out, values_out, scores_out
