"""Cases of qfilters_score and qfilters_fused_evict. Rows kept are exact: ties are made of integers, whose sums have no rounding."""

from functools import partial

import numpy as np

from veloxquant_mlx.selftest.case import Case, LengthCase, Mutation, Strided, Tolerance
from veloxquant_mlx.selftest.cases.h2o_evict import MLX_NAMES, floats, refused
from veloxquant_mlx.selftest.oracles import evict

SCORE, EVICT = "qfilters_score", "qfilters_fused_evict"

# |sum error| <= D 2^-24 sum |k f|; D <= 256, sum |k f| < 256 * 0.65 in these cases, ten times that with the outlier
PROJECTED = Tolerance("float32 sum of up to 256 products in any order: 256 * 2^-24 * sum |k f|, a tenth of which is met", 3e-4, 1e-6)


def scored(rng, groups=2, rows=33, dim=64, *, dtype="f16", **kwargs):
    return {"keys": floats(rng, dtype, groups, rows, dim), "filter_dir": floats(rng, "f32", groups, dim), **kwargs}


def evicted(rng, groups=2, rows=33, dim=64, *, value_dim=None, dtype="f16", **kwargs):
    arguments = scored(rng, groups, rows, dim, dtype=dtype)
    return {
        "keys_mid": arguments["keys"],
        "values_mid": floats(rng, dtype, groups, rows, value_dim or dim),
        "filter_dir": arguments["filter_dir"],
        "budget": rows // 2,
        **kwargs,
    }


def _projections(rng, wanted, **kwargs):
    """Keys whose projections are exactly `wanted`: the first entry of a filter that picks it."""
    wanted = np.array(wanted, dtype=np.float32)
    arguments = evicted(rng, *wanted.shape, 32, dtype="f32", **kwargs)
    arguments["keys_mid"][..., 0] = wanted
    arguments["filter_dir"][:] = 0
    arguments["filter_dir"][:, 0] = 1
    return arguments


def _ties(rng, **kwargs):
    rows = rng.integers(0, 4, (3, 71)).astype(np.float32)
    rows[1] = 2
    return _projections(rng, rows, **kwargs)


def _not_a_number(rng, **kwargs):
    nan, inf = np.nan, np.inf
    rows = [[1, nan, 3, inf, nan, 2, -inf], [nan, nan, nan, nan, nan, nan, nan], [inf, 0, inf, 0, nan, inf, 0]]
    return _projections(rng, rows, **kwargs)


def _values(rng):
    arguments = scored(rng, 1, 9, 32)
    keys = arguments["keys"]
    keys[0, 3, 5], keys[0, 4, 0], keys[0, 5, 20], keys[0, 6] = 100 * keys[0, 3, 5], np.inf, np.nan, 0
    return arguments


def strided(make):
    def arguments(rng):
        return {k: Strided(v) if isinstance(v, np.ndarray) else v for k, v in make(rng).items()}

    return arguments


def score_case(name, make):
    return Case(SCORE, name, make, evict.score, ("float32",), PROJECTED)


def evict_case(name, make, dtype="f16"):
    return Case(EVICT, name, make, evict.qfilters, (MLX_NAMES[dtype], MLX_NAMES[dtype], "float32"), (None, None, PROJECTED))


CASES = (
    score_case("one-row", partial(scored, rows=1)),
    score_case("no-row", partial(scored, rows=0)),
    score_case("no-group", partial(scored, groups=0)),
    *(score_case(f"d{d}", partial(scored, dim=d)) for d in (1, 31, 32, 33, 80, 96, 128, 256)),
    score_case("bf16", partial(scored, dtype="bf16")),
    score_case("f32", partial(scored, dtype="f32")),
    score_case("many-rows", partial(scored, groups=3, rows=101, dim=32)),
    score_case("protected", partial(scored, n_sink=3, recent=5)),
    score_case("all-protected", partial(scored, n_sink=20, recent=20)),
    score_case("more-protected-than-rows", partial(scored, n_sink=2**40, recent=0)),
    score_case("inverted", partial(scored, sign=-1, n_sink=1)),
    score_case("values", _values),
    score_case("strided", strided(partial(scored, rows=6))),
    evict_case("smallest", partial(evicted, rows=2, dim=2)),
    evict_case("all-but-one", partial(evicted, budget=32)),
    evict_case("one", partial(evicted, budget=1)),
    *(evict_case(f"d{d}", partial(evicted, dim=d, n_sink=2, recent=3)) for d in (1, 33, 80, 128)),
    evict_case("bf16", partial(evicted, dtype="bf16"), "bf16"),
    evict_case("f32", partial(evicted, dtype="f32"), "f32"),
    evict_case("wide-values", partial(evicted, dim=32, value_dim=129)),
    evict_case("many-rows", partial(evicted, groups=3, rows=301, dim=32, budget=170, n_sink=4, recent=32)),
    evict_case("only-protected", partial(evicted, budget=7, n_sink=4, recent=3)),
    evict_case("inverted", partial(evicted, sign=-1)),
    evict_case("no-group", partial(evicted, groups=0)),
    evict_case("ties", partial(_ties, budget=35), "f32"),
    evict_case("ties-protected", partial(_ties, budget=35, n_sink=33, recent=1), "f32"),
    evict_case("ties-inverted", partial(_ties, budget=20, sign=-1), "f32"),
    evict_case("not-a-number", partial(_not_a_number, budget=3), "f32"),
    evict_case("not-a-number-protected", partial(_not_a_number, budget=3, n_sink=1, recent=1), "f32"),
    evict_case("strided", strided(partial(evicted, rows=9))),
)

_score = partial(refused, scored, SCORE)
_evict = partial(refused, evicted, EVICT)
ERRORS = (
    _score(keys=lambda r: floats(r, "f16", 33, 64))("keys-2d", ValueError, "keys must be (BH, n_total, D)"),
    _score(keys=lambda r: floats(r, "f16", 2, 33, 0))("keys-empty", ValueError, "D at least 1"),
    _score(keys=lambda r: r.integers(0, 9, (2, 33, 64)))("keys-integer", TypeError, "keys must be float16"),
    _score(filter_dir=lambda r: floats(r, "f32", 1, 64))("filter-broadcast", ValueError, "filter_dir must be (2, 64)"),
    _score(filter_dir=lambda r: floats(r, "f32", 64))("filter-1d", ValueError, "filter_dir must be (2, 64)"),
    _score(filter_dir=lambda r: floats(r, "f16", 2, 64))("filter-f16", TypeError, "filter_dir must be float32"),
    _score(sign=0)("sign-zero", ValueError, "sign must be 1 or -1"),
    _score(sign=2)("sign-two", ValueError, "sign must be"),
    _score(sign=1.0)("sign-float", TypeError, "sign must be an integer"),
    _score(n_sink=-1)("negative-sinks", ValueError, "n_sink must be at least 0"),
    _score(recent=-1)("negative-recent", ValueError, "recent must be at least 0"),
    _evict(keys_mid=lambda r: floats(r, "f16", 33, 64))("keys-2d", ValueError, "keys_mid must be (BH, n_total, D)"),
    _evict(values_mid=lambda r: floats(r, "f16", 2, 34, 64))("values-rows", ValueError, "values_mid must be (2, 33, Dv)"),
    _evict(values_mid=lambda r: r.integers(0, 9, (2, 33, 64)))("values-integer", TypeError, "values_mid must be float16"),
    _evict(filter_dir=lambda r: floats(r, "f32", 2, 63))("filter-size", ValueError, "filter_dir must be (2, 64)"),
    _evict(budget=0)("budget-zero", ValueError, "budget must be between 1 and 4096"),
    _evict(budget=4097)("budget-large", ValueError, "budget must be between 1 and 4096"),
    _evict(budget=33)("budget-all", ValueError, "budget must be less than n_total = 33"),
    _evict(budget=8.0)("budget-float", TypeError, "budget must be an integer"),
    _evict(budget=8, n_sink=5, recent=4)("protected-above-budget", ValueError, "n_sink + recent must be at most budget = 8"),
    _evict(sign=0)("sign-zero", ValueError, "sign must be 1 or -1"),
)

LENGTHS = (
    LengthCase(SCORE, lambda rng, n: scored(rng, 1 + n % 3, n, 32), (1, 6, 40)),
    LengthCase(EVICT, lambda rng, n: evicted(rng, 1 + n % 3, n, 32), (2, 6, 40)),
)

MUTATIONS = (
    Mutation(SCORE, "sinks-off-by-one", "int(row) < dims[2]", "int(row) <= dims[2]", ("d32",)),
    Mutation(SCORE, "lanes-skip", "d += 32", "d += 64", ("d33", "d80")),
    Mutation(EVICT, "ties-first", "ordinal >= skip", "ordinal < skip", ("ties",)),
    Mutation(EVICT, "ties-of-one-block", "skip -= simd_sum(int(c == 1));", "", ("ties",)),
    Mutation(EVICT, "sinks-dropped", "row < dims[1] ||", "", ("ties-protected", "not-a-number-protected")),
    Mutation(EVICT, "divergent-scan", "c == 1 && ordinal >= skip", "c == 1 && simd_prefix_exclusive_sum(int(c == 1)) >= skip", ("ties",)),
)
