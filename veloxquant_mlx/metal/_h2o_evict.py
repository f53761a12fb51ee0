"""H2O: drop the row that has received least attention (Zhang et al. 2023, arXiv 2306.14048, algorithm 1).

Formula, tie and NaN rules: `veloxquant_mlx.allocators.eviction`, whose `h2o_update` is the reference at the level of a cache.
"""

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._evict import check_flag, check_number, check_protection, check_rows, evict_kernel, evict_ops
from veloxquant_mlx.metal._kernel import Kernel

COMPACT = Kernel(
    name="h2o_compact",
    inputs=("keys", "values", "scores", "positions", "gone", "table", "dims"),
    outputs=("keys_out", "values_out", "scores_out", "positions_out"),
    sources=("evict",),
    metal="""
  const kvtool::EvictPlace at = kvtool::evict_place<RENUMBER>(gone, positions, dims, thread_position_in_grid);
  kvtool::evict_key(keys, keys_out, table, at, dims[1]);
  kvtool::evict_copy(values, values_out, at.from, at.to, dims[2], at.pair);
  kvtool::evict_scalar(scores, scores_out, at);
  kvtool::evict_position(positions, positions_out, at);
""",
    cuda="""
  const kvtool::EvictPlace at = kvtool::evict_place<RENUMBER>(gone, positions, dims);
  if (!at.inside) return;
  kvtool::evict_key(keys, keys_out, table, at, dims[1]);
  kvtool::evict_copy(values, values_out, at.from, at.to, dims[2], at.pair);
  kvtool::evict_scalar(scores, scores_out, at);
  kvtool::evict_position(positions, positions_out, at);
""",
)


def h2o_fused_evict(
    keys_mid: mx.array,
    values_mid: mx.array,
    scores_mid: mx.array,
    positions_mid: mx.array,
    n_sink: int,
    rope_base: float,
    grace: int = 0,
    nsg: int = 4,
    *,
    renumber: bool = True,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Each group's cache without the row of lowest score; rows behind it move up by one position.

    Args:
        keys_mid: (BH, n_total, D) float16, bfloat16 or float32, D even, rotated for `positions_mid` (pairs (i, i + D/2)).
        values_mid: (BH, n_total, Dv), one of the same dtypes.
        scores_mid: (BH, n_total) float32.
        positions_mid: (BH, n_total) int32.
        n_sink: first rows that stay.
        rope_base: theta that the keys are rotated with.
        grace: last rows that stay.
        nsg: SIMD-groups that search a group's scores, 1 to 32; no effect on the result.
        renumber: True: survivors of a later position than the evicted row's get position - 1 and their key is turned back by one
            position. False: keys and positions are copied as they are, for a model that counts true positions.

    Returns:
        (keys_out, values_out, scores_out, positions_out), each (BH, n_total - 1, ...) in its input's dtype.

    Raises:
        ValueError: a shape does not fit, n_total < 2, D odd, n_sink + grace leaves no row, nsg outside 1..32, rope_base not positive.
        TypeError: a dtype or the type of a number is another.

    Error: none in the choice (ties: lowest row; NaN: last), in positions, in values, scores and rows that have not moved, which are
    copies; a turned key is float32 arithmetic without contraction, rounded once: the same bits on every back end.
    """
    name = "h2o_fused_evict"
    check_rows(name, keys_mid, values_mid, {"scores_mid": scores_mid}, positions_mid)
    n_sink, grace, nsg = check_protection(name, keys_mid.shape[1], n_sink, "grace", grace, nsg)
    rope_base = check_number(name, "rope_base", rope_base, positive=True)
    check_flag(name, "renumber", renumber)
    if backend() == "cpu" or keys_mid.shape[0] == 0:
        return evict_ops(keys_mid, values_mid, (scores_mid,), positions_mid, 0.0, n_sink, grace, rope_base, renumber)
    return evict_kernel(COMPACT, keys_mid, values_mid, (scores_mid,), positions_mid, 0.0, n_sink, grace, rope_base, renumber, nsg)
