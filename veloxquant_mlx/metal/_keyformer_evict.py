"""Keyformer: H2O's eviction with Gumbel noise on the scores (Adnan et al. 2024, arXiv 2403.09054, eq. 7).

    selection = score + tau * gumbel

Formula, tie and NaN rules: `veloxquant_mlx.allocators.eviction`.
"""

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._evict import check_flag, check_number, check_protection, check_rows, evict_kernel, evict_ops
from veloxquant_mlx.metal._kernel import Kernel

COMPACT = Kernel(
    name="keyformer_compact",
    inputs=("keys", "values", "scores", "gumbel", "positions", "gone", "table", "dims"),
    outputs=("keys_out", "values_out", "scores_out", "gumbel_out", "positions_out"),
    sources=("evict",),
    metal="""
  const kvtool::EvictPlace at = kvtool::evict_place<RENUMBER>(gone, positions, dims, thread_position_in_grid);
  kvtool::evict_key(keys, keys_out, table, at, dims[1]);
  kvtool::evict_copy(values, values_out, at.from, at.to, dims[2], at.pair);
  kvtool::evict_scalar(scores, scores_out, at);
  kvtool::evict_scalar(gumbel, gumbel_out, at);
  kvtool::evict_position(positions, positions_out, at);
""",
    cuda="""
  const kvtool::EvictPlace at = kvtool::evict_place<RENUMBER>(gone, positions, dims);
  if (!at.inside) return;
  kvtool::evict_key(keys, keys_out, table, at, dims[1]);
  kvtool::evict_copy(values, values_out, at.from, at.to, dims[2], at.pair);
  kvtool::evict_scalar(scores, scores_out, at);
  kvtool::evict_scalar(gumbel, gumbel_out, at);
  kvtool::evict_position(positions, positions_out, at);
""",
)


def keyformer_fused_evict(
    keys_mid: mx.array,
    values_mid: mx.array,
    scores_mid: mx.array,
    gumbel_mid: mx.array,
    positions_mid: mx.array,
    n_sink: int,
    rope_base: float,
    tau: float = 0.0,
    recent: int = 0,
    nsg: int = 4,
    *,
    renumber: bool = True,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """Each group's cache without the row of lowest score + tau * gumbel; rows behind it move up by one position.

    Args:
        keys_mid: (BH, n_total, D) float16, bfloat16 or float32, D even, rotated for `positions_mid` (pairs (i, i + D/2)).
        values_mid: (BH, n_total, Dv), one of the same dtypes.
        scores_mid: (BH, n_total) float32.
        gumbel_mid: (BH, n_total) float32, noise frozen per row.
        positions_mid: (BH, n_total) int32.
        n_sink: first rows that stay.
        rope_base: theta that the keys are rotated with.
        tau: weight of the noise; 0 is `h2o_fused_evict`'s choice, whatever the noise is.
        recent: last rows that stay.
        nsg: SIMD-groups that search a group's rows, 1 to 32; no effect on the result.
        renumber: as in `h2o_fused_evict`.

    Returns:
        (keys_out, values_out, scores_out, gumbel_out, positions_out), each (BH, n_total - 1, ...) in its input's dtype.

    Raises:
        ValueError: a shape does not fit, n_total < 2, D odd, n_sink + recent leaves no row, nsg outside 1..32, rope_base not positive,
            tau negative or not finite.
        TypeError: a dtype or the type of a number is another.

    Error: as `h2o_fused_evict`; the selection is float32 in two roundings, the same bits on every back end.
    """
    name = "keyformer_fused_evict"
    check_rows(name, keys_mid, values_mid, {"scores_mid": scores_mid, "gumbel_mid": gumbel_mid}, positions_mid)
    n_sink, recent, nsg = check_protection(name, keys_mid.shape[1], n_sink, "recent", recent, nsg)
    rope_base = check_number(name, "rope_base", rope_base, positive=True)
    tau = check_number(name, "tau", tau, positive=False)
    check_flag(name, "renumber", renumber)
    floats = (scores_mid, gumbel_mid)
    if backend() == "cpu" or keys_mid.shape[0] == 0:
        return evict_ops(keys_mid, values_mid, floats, positions_mid, tau, n_sink, recent, rope_base, renumber)
    return evict_kernel(COMPACT, keys_mid, values_mid, floats, positions_mid, tau, n_sink, recent, rope_base, renumber, nsg)
