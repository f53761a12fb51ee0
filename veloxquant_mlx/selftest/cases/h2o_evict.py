"""Cases of h2o_fused_evict: everything is exact, a turned key included (float32 products and sums in a stated order)."""

from functools import partial

import numpy as np

from veloxquant_mlx.selftest.case import Bf16, Case, ErrorCase, LengthCase, Mutation, Strided
from veloxquant_mlx.selftest.oracles import evict

FUNCTION = "h2o_fused_evict"
MLX_NAMES = {"f16": "float16", "f32": "float32", "bf16": "bfloat16"}


def floats(rng, dtype, *shape):
    values = rng.standard_normal(shape).astype(np.float32)
    return Bf16(values) if dtype == "bf16" else values.astype(np.float16 if dtype == "f16" else np.float32)


def cache(rng, groups, rows, dim, value_dim=None, dtype="f16", first=0):
    return {
        "keys_mid": floats(rng, dtype, groups, rows, dim),
        "values_mid": floats(rng, dtype, groups, rows, value_dim or dim),
        "scores_mid": rng.random((groups, rows), dtype=np.float32),
        "positions_mid": np.tile(np.arange(first, first + rows, dtype=np.int32), (groups, 1)),
    }


def plain(rng, groups=2, rows=33, dim=64, *, value_dim=None, dtype="f16", first=0, **kwargs):
    return {**cache(rng, groups, rows, dim, value_dim, dtype, first), "n_sink": 2, "rope_base": 10000.0, **kwargs}


def _scores(rng, values, **kwargs):
    scores = np.array(values, dtype=np.float32)
    return {**cache(rng, *scores.shape, 32), "scores_mid": scores, "n_sink": 1, "rope_base": 10000.0, **kwargs}


def _ties(rng):
    return _scores(rng, [[0, 3, 1, 2, 1, 1, 4], [0, 5, 5, 5, 5, 5, 0], [0, 0.0, -0.0, 0.0, -0.0, 0.0, 1]], grace=1)


def _not_a_number(rng):
    nan, inf = np.nan, np.inf
    rows = [[nan, nan, 1, nan, 2], [0, nan, nan, nan, 0], [0, inf, nan, inf, 0], [0, nan, inf, 3, -inf], [nan, -inf, -inf, nan, nan]]
    return _scores(rng, rows, grace=1)


def _ends(rng):
    return _scores(rng, [[1, 0, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])


def _shuffled(rng):
    """Positions in any order, with gaps and repeats: what moves is decided by position, not by row."""
    arguments = plain(rng, 3, 21, 32)
    arguments["positions_mid"] = rng.integers(0, 30, (3, 21), dtype=np.int32)
    return arguments


def _values(rng):
    arguments = plain(rng, 1, 9, 32, n_sink=0)
    keys = arguments["keys_mid"]
    keys[0, 3, 5], keys[0, 4, :4], keys[0, 5, 20] = 1000 * keys[0, 3, 5], np.inf, np.nan
    keys[0, 6], keys[0, 7, ::2] = 0, -0.0
    arguments["values_mid"][0, 2, 3] = np.nan
    arguments["scores_mid"][0, 0] = -1
    return arguments


def _strided(rng):
    arguments = plain(rng, 2, 8, 32)
    return {k: Strided(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


def case(name, make, dtype="f16"):
    kinds = (MLX_NAMES[dtype], MLX_NAMES[dtype], "float32", "int32")
    return Case(FUNCTION, name, make, evict.h2o, kinds)


CASES = (
    case("two-rows", partial(plain, rows=2, n_sink=0)),
    case("two-rows-a-sink", partial(plain, rows=2, n_sink=1)),
    case("three-rows", partial(plain, rows=3, n_sink=1, grace=1)),
    *(case(f"d{d}", partial(plain, dim=d)) for d in (2, 32, 80, 96, 128, 256)),
    case("bf16", partial(plain, dtype="bf16"), "bf16"),
    case("f32", partial(plain, dtype="f32"), "f32"),
    case("wide-values", partial(plain, dim=32, value_dim=129)),
    case("narrow-values", partial(plain, dim=80, value_dim=3)),
    case("prime-rows", partial(plain, groups=3, rows=131, dim=32, grace=5)),
    case("more-rows-than-threads", partial(plain, groups=2, rows=301, dim=32, grace=40)),
    case("one-simd-group", partial(plain, rows=67, dim=32, nsg=1)),
    case("all-simd-groups", partial(plain, rows=1100, dim=2, groups=1, nsg=32)),
    case("late-positions", partial(plain, first=131072, rope_base=500000.0)),
    case("base-below-one", partial(plain, rope_base=0.5, rows=5)),
    case("last-free-row", partial(plain, rows=9, n_sink=4, grace=4)),
    case("no-group", partial(plain, groups=0)),
    case("ties", _ties),
    case("ties-within-a-thread", lambda rng: _scores(rng, [np.where(np.arange(150) % 32 == 7, 0.5, 2.0)], nsg=1)),
    case("not-a-number", _not_a_number),
    case("ends", _ends),
    case("shuffled-positions", _shuffled),
    case("values", _values),
    case("strided", _strided),
    case("plain-compaction", partial(plain, renumber=False)),
    case("plain-compaction-shuffled", lambda rng: {**_shuffled(rng), "renumber": False}),
)


def refused(make=plain, function=FUNCTION, **changes):
    def arguments(rng):
        made = {**make(rng), **changes}
        return {k: v(rng) if callable(v) else v for k, v in made.items()}

    return lambda name, error, message: ErrorCase(function, name, arguments, error, message)


def common_errors(make, function, recent):
    """Rows that both eviction functions share."""
    row = partial(refused, make, function)
    return (
        row(keys_mid=lambda r: floats(r, "f16", 33, 64))("keys-2d", ValueError, "keys_mid must be (BH, n_total, D)"),
        row(keys_mid=lambda r: floats(r, "f16", 2, 33, 63))("odd-d", ValueError, "D even"),
        row(keys_mid=lambda r: floats(r, "f16", 2, 1, 64))("one-row", ValueError, "n_total at least 2"),
        row(keys_mid=lambda r: r.integers(0, 9, (2, 33, 64)))("keys-integer", TypeError, "keys_mid must be float16, bfloat16 or float32"),
        row(keys_mid=3)("keys-number", TypeError, "keys_mid must be an mx.array"),
        row(values_mid=lambda r: floats(r, "f16", 2, 32, 64))("values-rows", ValueError, "values_mid must be (2, 33, Dv)"),
        row(values_mid=lambda r: floats(r, "f16", 1, 33, 64))("values-broadcast", ValueError, "values_mid must be (2, 33, Dv)"),
        row(values_mid=lambda r: r.integers(0, 9, (2, 33, 64)))("values-integer", TypeError, "values_mid must be float16"),
        row(scores_mid=lambda r: floats(r, "f32", 2, 32))("scores-rows", ValueError, "scores_mid must be (2, 33)"),
        row(scores_mid=lambda r: floats(r, "f16", 2, 33))("scores-f16", TypeError, "scores_mid must be float32"),
        row(positions_mid=lambda r: r.integers(0, 9, (33,), dtype=np.int32))("positions-1d", ValueError, "positions_mid must be (2, 33)"),
        row(positions_mid=lambda r: r.integers(0, 9, (2, 33)))("positions-int64", TypeError, "positions_mid must be int32"),
        row(n_sink=33)("all-sinks", ValueError, f"n_sink + {recent} must be less than n_total = 33"),
        row(n_sink=20, **{recent: 13})("all-protected", ValueError, "but got 20 + 13"),
        row(n_sink=-1)("negative-sinks", ValueError, "n_sink must be at least 0"),
        row(n_sink=1.0)("float-sinks", TypeError, "n_sink must be an integer"),
        row(**{recent: -1})("negative-recent", ValueError, f"{recent} must be at least 0"),
        row(nsg=0)("no-simd-group", ValueError, "nsg must be between 1 and 32"),
        row(nsg=33)("too-many-simd-groups", ValueError, "nsg must be between 1 and 32"),
        row(rope_base=0.0)("base-zero", ValueError, "rope_base must be finite and positive"),
        row(rope_base=float("inf"))("base-infinite", ValueError, "rope_base must be finite and positive"),
        row(rope_base="1e4")("base-text", TypeError, "rope_base must be a number"),
        row(renumber=1)("renumber-integer", TypeError, "renumber must be True or False"),
    )


ERRORS = common_errors(plain, FUNCTION, "grace")

LENGTHS = (LengthCase(FUNCTION, lambda rng, n: plain(rng, 1 + n % 3, n, 32), (3, 5, 40)),)

MUTATIONS = (
    Mutation(FUNCTION, "nan-first", "isnan(x) ? INFINITY : x", "isnan(x) ? -INFINITY : x", ("not-a-number",)),
    Mutation(FUNCTION, "ties-last", "value < best.value", "value <= best.value", ("ties-within-a-thread",)),
    Mutation(FUNCTION, "ties-of-lanes", "mine.value == value ? mine.row", "mine.value <= value ? -mine.row", ("ties",)),
    Mutation(FUNCTION, "gap-off-by-one", "row >= out ? 1 : 0", "row > out ? 1 : 0", ("three-rows", "d32")),
    Mutation(
        FUNCTION,
        "moves-its-equal",
        "positions[from] > positions[base + out]",
        "positions[from] >= positions[base + out]",
        ("shuffled-positions",),
    ),
    Mutation(FUNCTION, "turns-forward", "a + b", "a - b", ("d32",)),
    Mutation(FUNCTION, "sinks-forgotten", "row = first + int(thread_index)", "row = int(thread_index)", ("two-rows-a-sink", "ties")),
    Mutation(FUNCTION, "no-barrier", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", ("prime-rows", "more-rows-than-threads")),
)
