"""Cases of keyformer_fused_evict: exact; the selection score + tau * gumbel is float32 in two roundings."""

from functools import partial

import numpy as np

from veloxquant_mlx.selftest.case import Case, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.cases import h2o_evict
from veloxquant_mlx.selftest.cases.h2o_evict import MLX_NAMES, common_errors, refused
from veloxquant_mlx.selftest.oracles import evict

FUNCTION = "keyformer_fused_evict"


def plain(rng, groups=2, rows=33, dim=64, **kwargs):
    arguments = h2o_evict.plain(rng, groups, rows, dim, **kwargs)
    return {**arguments, "gumbel_mid": rng.gumbel(size=(groups, rows)).astype(np.float32)}


def _chosen(rng, scores, gumbel, **kwargs):
    scores, gumbel = np.array(scores, dtype=np.float32), np.array(gumbel, dtype=np.float32)
    return {**plain(rng, *scores.shape, 32), "scores_mid": scores, "gumbel_mid": gumbel, "n_sink": 0, **kwargs}


def _near_ties(rng):
    """Two roundings decide: with a fused multiply-add the second row would be lower, as it is exactly."""
    tau, noise = np.float32(0.1), np.float32(0.3)
    product = tau * noise
    exact = np.float64(tau) * np.float64(noise)
    below = exact < np.float64(product)
    gap = np.float32(abs(exact - np.float64(product)))
    score = -product
    other = np.float32(0.0) if below else gap / 2
    return _chosen(rng, [[other, score, 1.0]], [[0.0, noise, 0.0]], tau=float(tau))


def _infinite_noise(rng, tau):
    inf = np.inf
    return _chosen(rng, [[1, 0.5, 2, 0.25], [1, -inf, 2, 3]], [[0, -inf, 0, inf], [0, inf, np.nan, -1]], tau=tau)


def _strided(rng):
    arguments = plain(rng, 2, 8, 32, tau=0.5)
    return {k: Strided(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


def case(name, make, dtype="f16"):
    kinds = (MLX_NAMES[dtype], MLX_NAMES[dtype], "float32", "float32", "int32")
    return Case(FUNCTION, name, make, evict.keyformer, kinds)


CASES = (
    case("two-rows", partial(plain, rows=2, n_sink=0, tau=1.0)),
    case("three-rows", partial(plain, rows=3, n_sink=1, recent=1, tau=1.0)),
    *(case(f"d{d}", partial(plain, dim=d, tau=0.7)) for d in (32, 80, 128)),
    case("bf16", partial(plain, dtype="bf16", tau=2.0), "bf16"),
    case("f32", partial(plain, dtype="f32", tau=2.0), "f32"),
    case("wide-values", partial(plain, dim=32, value_dim=65, tau=1.0)),
    case("more-rows-than-threads", partial(plain, groups=3, rows=301, dim=32, recent=40, tau=0.3)),
    case("one-simd-group", partial(plain, rows=67, dim=32, nsg=1, tau=0.3)),
    case("no-noise", partial(plain, rows=20, dim=32)),
    case("no-group", partial(plain, groups=0, tau=1.0)),
    case("near-ties", _near_ties),
    case("infinite-noise-at-no-temperature", partial(_infinite_noise, tau=0.0)),
    case("infinite-noise", partial(_infinite_noise, tau=1.0)),
    case("noise-outweighs", lambda rng: _chosen(rng, [[1, 2, 3, 4]], [[4, 3, 2, -9]], tau=1.0)),
    case("strided", _strided),
    case("plain-compaction", partial(plain, tau=1.0, renumber=False)),
)

_row = partial(refused, plain, FUNCTION)
ERRORS = (
    *common_errors(plain, FUNCTION, "recent"),
    _row(gumbel_mid=lambda r: h2o_evict.floats(r, "f32", 2, 34))("gumbel-rows", ValueError, "gumbel_mid must be (2, 33)"),
    _row(gumbel_mid=lambda r: h2o_evict.floats(r, "f16", 2, 33))("gumbel-f16", TypeError, "gumbel_mid must be float32"),
    _row(tau=-0.1)("tau-negative", ValueError, "tau must be finite and at least 0"),
    _row(tau=float("nan"))("tau-nan", ValueError, "tau must be finite and at least 0"),
    _row(tau=None)("tau-none", TypeError, "tau must be a number"),
)

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: plain(rng, 1 + n % 3, n, 32, tau=0.5), (3, 6, 40)),)

MUTATIONS = (
    Mutation(FUNCTION, "noise-subtracted", "scores[i] + noise", "scores[i] - noise", ("noise-outweighs",)),
    Mutation(FUNCTION, "noise-always-there", "if (!NOISE)", "if (false)", ("infinite-noise-at-no-temperature",)),
    Mutation(FUNCTION, "one-rounding", "scores[i] + noise", "fma(tau, gumbel[i], scores[i])", ("near-ties",)),
)
