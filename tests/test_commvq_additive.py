"""commvq-N:additive: rows against a float64 version written from formats/SPEC.md, scores from codes, recodes, tables, hostile input."""

import itertools
import json
import math
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from formats.errors import ManifestError
from tests.golden import make_additive as golden
from tests.tc_cases import DIGEST, layer
from veloxquant_mlx.allocators.additive import AdditiveTables, build_additive, share_stages, spectrum
from veloxquant_mlx.allocators.transforms import inverse
from veloxquant_mlx.codecs import CODECS, _base, parse_codec
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec

SPECS = ("commvq-1:additive", "commvq-1.5:additive", "commvq-2:additive", "commvq-3:additive", "commvq-2:additive:carry")
SIZES = ((2, 32), (3, 16), (1, 36))
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


@cache
def tables(bits: float, heads: int, dim: int) -> AdditiveTables:
    own = layer(600, 7, heads, dim)
    return build_additive(own.k, own.fisher_k, bits)


def bound(spec: str, heads: int = 2, dim: int = 32) -> CommVqAdditive:
    codec = parse_codec(f"k={spec},v=raw").k
    assert isinstance(codec, CommVqAdditive)
    return codec.bind(tables(codec.bits, heads, dim), "0", DIGEST)


def keys(tokens: int, heads: int = 2, dim: int = 32, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Rows of other tokens than those the tables are from; where there are enough, an outlier and zeros."""
    x = np.ascontiguousarray(layer(600 + tokens, 7, heads, dim).k[600:].swapaxes(0, 1)).astype(np.float32)
    if tokens > 5:
        x[0, 1], x[:, 4] = 1000 * x[0, 1], 0.0
    return mx.array(x).astype(dtype)


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and np.array_equal(np.array(a[n]), np.array(b[n])) for n in a)


def read(codec: CommVqAdditive, parts: dict[str, mx.array]) -> tuple[np.ndarray, ...]:
    """mean, back, stage, words, as the specification says where they are."""
    if "mean" not in parts:
        arrays = codec.tables.to_arrays()
        back = arrays["back"].astype(np.float64) * arrays["back_size"][..., None]
        return arrays["mean"].astype(np.float64), back, arrays["stage"], arrays["words"].astype(np.float64)
    back, words = (np.array(parts[n]).astype(np.float64) * f64(parts[f"{n}_step"])[..., None] for n in ("back", "words"))
    return f64(parts["mean"]), back, np.array(parts["stage"]), words


def oracle(codec: CommVqAdditive, parts: dict[str, mx.array], shape: tuple[int, int, int]) -> np.ndarray:
    """Decoded rows, component by component."""
    mean, back, stage, words = read(codec, parts)
    x = np.repeat(mean[:, None], shape[1], axis=1)
    column = 0
    for h, count in enumerate(codec.to_params()["stages"]):
        for i in range(shape[2]):
            code = np.array(parts["codes"])[0, :, column + stage[h, i]]
            x[h] += words[h, i, code][:, None] * back[h, i]
        column += count
    assert column == parts["codes"].shape[2]
    return x


# --- codes and rows


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("heads", "dim"), SIZES)
def test_decoded_rows_are_the_specifications(spec: str, heads: int, dim: int) -> None:
    codec, x = bound(spec, heads, dim), keys(70, heads, dim)
    parts = codec.encode(x)
    wanted = oracle(codec, parts, x.shape)
    # float32 sums of D products.
    np.testing.assert_allclose(f64(codec.decode(parts, x.shape, mx.float32)), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


def test_heads_of_different_sizes_have_their_own_codes() -> None:
    own, x = layer(300, 7, 3, 16), keys(20, 3, 16)
    codec = CommVqAdditive(2.0).bind(build_additive(own.k, own.fisher_k, 2.0, stages=(1, 5, 2)), "0", DIGEST)
    parts = codec.encode(x)
    wanted = oracle(codec, parts, x.shape)
    assert parts["codes"].shape == (1, 20, 8)
    np.testing.assert_allclose(f64(codec.decode(parts, x.shape, mx.float32)), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("spec", SPECS)
def test_every_code_costs_least(spec: str) -> None:
    """In the metric of the head: no other word of any one stage, and for two stages at once no pair of other words, is nearer."""
    codec, x = bound(spec), keys(40)
    parts = codec.encode(x)
    mean, back, stage, words = read(codec, parts)
    codes, column = np.array(parts["codes"])[0].astype(int), 0
    for h, count in enumerate(codec.stages or ()):
        left = (f64(x)[h] - mean[h]) @ np.linalg.inv(back[h])
        weight = codec.tables.weights()[h]
        for r in range(count):
            own = stage[h] == r
            errors = (((left[:, own, None] - words[h, own]) * weight[own, None]) ** 2).sum(axis=1)
            got = errors[np.arange(40), codes[:, column + r]]
            # The codec's differences are of float32 products as large as the row.
            slack = 1e-5 * ((left[:, own] * weight[own]) ** 2).sum(axis=1) + 1e-5 * ((words[h, own] * weight[own, None]) ** 2).sum(0).max()
            assert (got <= errors.min(axis=1) + slack).all()
        column += count


def test_codes_cost_less_than_without_the_metric_and_than_planes() -> None:
    """Held-out rows, cost tr(F S): the metric pays, and so do components against the planes of commvq."""
    own = layer(1200, 7, 2, 32)
    x = keys(300)[:, 5:]
    metrics = [own.fisher_k[h * 32 : h * 32 + 32, h * 32 : h * 32 + 32] for h in range(2)]

    def cost(codec: object) -> float:
        error = f64(codec.decode(codec.encode(x), x.shape, mx.float32)) - f64(x)
        return sum(float(np.einsum("ni,ij,nj->", error[h], metrics[h], error[h])) for h in range(2))

    plain = CommVqAdditive(2.0).bind(build_additive(own.k, None, 2.0), "0", DIGEST)
    with_metric, without, planes = cost(bound("commvq-2:additive")), cost(plain), cost(CODECS["commvq"](2.0))
    assert with_metric < 0.8 * without and with_metric < 0.5 * planes
    assert cost(bound("commvq-1:additive")) > 1.5 * with_metric > 1.5 * 1.5 * cost(bound("commvq-3:additive"))


def test_carried_tables_cost_little_more() -> None:
    x = keys(300)[:, 5:]
    errors = [
        f64(c.decode(c.encode(x), x.shape, mx.float32)) - f64(x) for c in map(bound, ("commvq-2:additive", "commvq-2:additive:carry"))
    ]
    assert np.square(errors[1]).sum() < 1.1 * np.square(errors[0]).sum()


# --- laws


@pytest.mark.parametrize("spec", ("commvq-2:additive", "commvq-2:additive:carry"))
@pytest.mark.parametrize("tokens", (0, 1, 13))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_returns_the_layout_and_decode_the_shape(spec: str, tokens: int, dtype: mx.Dtype) -> None:
    codec, x = bound(spec), keys(tokens, dtype=dtype)
    parts, layout = codec.encode(x), codec.layout(x.shape, dtype)
    assert {n: (_base.DTYPES[kind], size) for n, (kind, size) in layout.items()} == {n: (a.dtype, a.shape) for n, a in parts.items()}
    assert codec.nbytes(x.shape, dtype) == sum(a.nbytes for a in parts.values())
    decoded = codec.decode(parts, x.shape, dtype)
    assert (decoded.shape, decoded.dtype) == (x.shape, dtype) and bool(mx.all(mx.isfinite(decoded)).item())


@pytest.mark.parametrize("spec", SPECS)
def test_a_row_takes_the_bits_of_the_spec(spec: str) -> None:
    codec = bound(spec)
    assert 8 * codec.layout((2, 1, 32), mx.float32)["codes"][1][2] == codec.bits * 2 * 32


@pytest.mark.parametrize("spec", SPECS)
def test_params_survive_json_and_decode_alike(spec: str) -> None:
    codec, x = bound(spec), keys(13)
    again = CODECS[codec.id].from_params(json.loads(json.dumps(codec.to_params())))
    assert again == codec and hash(again) == hash(codec)
    assert again.calibration == (None if codec.carry else DIGEST) and codec.calibration is None
    parts = codec.encode(x)
    if not codec.carry:
        with pytest.raises(ValueError, match=f"needs the calibration {DIGEST}"):
            again.decode(parts, x.shape, x.dtype)
        again = again.with_tables(AdditiveTables.from_arrays(codec.tables.to_arrays()))
    assert np.array_equal(np.array(again.decode(parts, x.shape, x.dtype)), np.array(codec.decode(parts, x.shape, x.dtype)))


@pytest.mark.parametrize("spec", ("commvq-2:additive", "commvq-3:additive:carry"))
def test_rows_are_coded_one_by_one_whatever_the_block(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = bound(spec), keys(100)
    parts = codec.encode(x)
    decoded = np.array(codec.decode(parts, x.shape, x.dtype))
    strided = mx.array(np.ascontiguousarray(np.array(x).transpose(1, 2, 0))).transpose(2, 0, 1)
    assert same(parts, codec.encode(strided))
    head = codec.encode(x[:, :17])
    assert same(head, parts | {"codes": parts["codes"][:, :17]})
    monkeypatch.setattr(_base, "BLOCK_VALUES", 2 * 32 * 7)
    assert same(parts, codec.encode(x))
    # A product of fewer rows may add in another order.
    np.testing.assert_allclose(np.array(codec.decode(parts, x.shape, x.dtype)), decoded, rtol=0, atol=1e-6 * np.abs(decoded).max())


def test_wild_rows_give_finite_rows() -> None:
    x = np.zeros((2, 9, 32), np.float32)
    x[0, 3, 17], x[1, 4] = 1e36, -1e36
    codec = bound("commvq-2:additive")
    assert np.isfinite(f64(codec.decode(codec.encode(mx.array(x)), x.shape, mx.float32))).all()
    for value in (math.nan, math.inf):
        x[0, 3, 17] = value
        with pytest.raises(ValueError, match=r"576 values.*token 3, dim 17"):
            codec.encode(mx.array(x))


def test_temporaries_stay_small() -> None:
    codec, shape = bound("commvq-2:additive"), (2, 20_000, 32)
    x = mx.random.normal(shape, key=mx.random.key(0))
    mx.eval(x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    parts = codec.encode(x)
    assert mx.get_peak_memory() - before < 2 * codec.nbytes(shape, x.dtype) + 4 * 4 * _base.BLOCK_VALUES
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decoded = codec.decode(parts, shape, mx.float32)
    # The rows and some eight float32 temporaries of a block.
    assert mx.get_peak_memory() - before < decoded.nbytes + 8 * 4 * _base.BLOCK_VALUES


# --- words commute with rotations


ROPES = (
    RopeSpec("default", 32, base=10000.0),
    RopeSpec("default", 32, base=500000.0, scale=0.25),
    RopeSpec("yarn", 32, base=10000.0, magnitude=1.25),
    RopeSpec("default", 16, base=10000.0),
    None,
)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("start", (0, 100_000))
@pytest.mark.parametrize("spec", ("commvq-2:additive", "commvq-1:additive:carry"))
def test_scores_from_codes_are_those_of_rotated_rows(spec: str, rope: RopeSpec | None, start: int) -> None:
    """The same codes under every theta, scale and shift."""
    codec, x = bound(spec), keys(90)
    parts = codec.encode(x)
    queries = mx.array(np.random.default_rng(3).standard_normal((2, 3, 32)).astype(np.float32))
    positions = start + np.arange(90)
    got = codec.scores(parts, x.shape, queries, positions, rope)
    rows = oracle(codec, parts, x.shape)
    if rope is not None:
        first, half = rope.first, rope.dims // 2
        z = rows[..., first : first + half] + 1j * rows[..., first + half : first + 2 * half]
        z = rope.magnitude * z * np.exp(1j * positions[:, None] * rope.frequencies)
        rows[..., first : first + half], rows[..., first + half : first + 2 * half] = z.real, z.imag
    wanted = f64(queries) @ rows.swapaxes(1, 2)
    # float32 sums of 2 D products; angles are float64 on both sides.
    np.testing.assert_allclose(f64(got), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_another_theta_and_a_shift_rotate_the_decoded_rows() -> None:
    """What a recode does: from RoPE at the file's positions to another at shifted ones, no code touched."""
    codec, x, positions = bound("commvq-2:additive"), keys(60), np.arange(60)
    old, new = RopeSpec("default", 32, base=10000.0), RopeSpec("default", 32, base=300000.0)
    cached = rotate(x, positions, None, old, method="exact")
    parts = codec.encode(rotate(cached, positions, old, None, method="exact"))
    # Undoing the rotation rounds rows in float32: codes differ at ties alone.
    assert np.mean(np.array(parts["codes"]) != np.array(codec.encode(x)["codes"])) < 1e-3
    live = rotate(codec.decode(parts, x.shape, mx.float32), positions + 1000, None, new, method="exact")
    rows = oracle(codec, parts, x.shape)
    z = (rows[..., :16] + 1j * rows[..., 16:]) * np.exp(1j * (positions + 1000)[:, None] * new.frequencies)
    wanted = np.concatenate([z.real, z.imag], axis=-1)
    np.testing.assert_allclose(f64(live), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


def test_scores_refuse_shapes_that_do_not_fit() -> None:
    codec, x = bound("commvq-2:additive"), keys(9)
    parts = codec.encode(x)
    with pytest.raises(ValueError, match=r"positions \(9,\)"):
        codec.scores(parts, x.shape, mx.zeros((2, 1, 32)), np.arange(8), None)
    with pytest.raises(ValueError, match=r"queries must be \(2, G, 32\)"):
        codec.scores(parts, x.shape, mx.zeros((4, 1, 32)), np.arange(9), None)
    with pytest.raises(ValueError, match="below 32, but turns 0 to 64"):
        codec.scores(parts, x.shape, mx.zeros((2, 1, 32)), np.arange(9), RopeSpec("default", 64, base=1e4))


# --- tables


def test_the_basis_makes_errors_independent_and_rows_uncorrelated() -> None:
    own = layer(1200, 7, 2, 16)
    made = build_additive(own.k, own.fisher_k, 2.0)
    forward = inverse(made.back)
    for h in range(2):
        # Float16 entries of `back`.
        metric = own.fisher_k[h * 16 : h * 16 + 16, h * 16 : h * 16 + 16]
        b = made.back[h].astype(np.float64)
        np.testing.assert_allclose(np.diag(b @ metric @ b.T), made.cost[h], rtol=0.05, atol=1e-2 * made.cost[h].max())
        y = (own.k[:, h] - made.mean[h]) @ forward[h]
        strong = made.cost[h] > 1e-3 * made.cost[h].max()
        np.testing.assert_allclose(np.cov(y.T, bias=True)[np.ix_(strong, strong)], np.eye(strong.sum()), atol=0.02)
    assert all((np.diff(head) <= 1e-6 * head[0]).all() for head in made.cost)


def test_stages_go_where_they_save_most() -> None:
    cost = np.array([[64.0, 64.0, 1.0, 1.0], [4.0, 4.0, 1e-9, 1e-9]])
    # Two bits more for each of two components, of 16 bits: 10 and 6, so 1 and 1; of 32: 18.7 and 13.3, so 2 and 2.
    assert share_stages({"a": cost}, 2.0) == {"a": (1, 1)}
    heavy = np.concatenate([cost * 1e6, cost])
    shared = share_stages({"a": heavy, "b": heavy * 1e6}, 4.0)
    flat = [count for name in ("a", "b") for count in shared[name]]
    assert sum(flat) == 16 and min(flat) >= 1 and shared["b"][0] >= shared["a"][0] > shared["a"][3]
    assert share_stages({"a": np.zeros((2, 8))}, 2.0) == {"a": (2, 2)}
    with pytest.raises(ValueError, match="2 to 16 stages, but 9 give 18"):
        share_stages({"a": np.ones((2, 8))}, 9)


def test_words_of_clusters_are_their_means() -> None:
    """256 distinct rows in one component are their own words, so are fewer."""
    rng = np.random.default_rng(0)
    for count in (256, 40):
        points = np.sort(rng.standard_normal((count, 2, 1)), axis=0)
        made = build_additive(np.repeat(points, 3, axis=0), None, 8.0)
        codec = CommVqAdditive(2.0).bind(made, "0", DIGEST)
        x = mx.array(points.swapaxes(0, 1).astype(np.float32))
        error = f64(codec.decode(codec.encode(x), x.shape, mx.float32)) - points.swapaxes(0, 1)
        assert np.sqrt(np.mean(error**2)) < (0.003 if count == 40 else 0.02)


def test_words_that_no_row_is_nearest_to_move() -> None:
    """Most rows are the same one; the words go to the few others."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([np.zeros((4000, 1, 4)), rng.standard_normal((120, 1, 4))])
    made = build_additive(rows, None, 2.0, stages=(1,))
    codec = CommVqAdditive(2.0).bind(made, "0", DIGEST)
    x = mx.array(rows[4000:].swapaxes(0, 1).astype(np.float32))
    error = f64(codec.decode(codec.encode(x), x.shape, mx.float32)) - f64(x)
    assert np.square(error).sum() < 0.02 * np.square(f64(x)).sum()


@pytest.mark.parametrize("count", (1, 16))
def test_few_constant_and_weightless_rows_make_tables(count: int) -> None:
    rows = layer(count, 7, 2, 8)
    for k, fisher in ((rows.k, rows.fisher_k), (rows.k * 0 + 3, None), (rows.k, np.zeros((16, 16))), (rows.k * [1000] + [0] * 8, None)):
        codec = CommVqAdditive(2.0).bind(build_additive(k, fisher, 2.0), "0", DIGEST)
        x = mx.array(np.ascontiguousarray(k.swapaxes(0, 1)).astype(np.float32))
        decoded = f64(codec.decode(codec.encode(x), x.shape, mx.float32))
        # Fewer rows than words: each is learnt, to the float16 of the tables.
        np.testing.assert_allclose(decoded, f64(x), rtol=0, atol=4e-3 * np.abs(f64(x)).max())


def test_tables_refuse_what_they_cannot_be() -> None:
    own, made = layer(100, 7), build_additive(layer(100, 7).k, None, 2.0).to_arrays()
    again = AdditiveTables.from_arrays(made).to_arrays()
    assert all(np.array_equal(again[n], made[n]) and again[n].dtype == made[n].dtype for n in made)
    with pytest.raises(ValueError, match=r"rows must be \(N, H, D\) and not empty"):
        build_additive(own.k[:0], None, 2.0)
    with pytest.raises(ValueError, match=r"fisher_k must be \(16, 16\)"):
        build_additive(own.k, np.eye(8), 2.0)
    with pytest.raises(ValueError, match=r"rows must be finite, but 1 values are not, the first at \[5, 1, 2\]"):
        build_additive(np.where(np.arange(1600).reshape(100, 2, 8) == 90, np.nan, own.k), None, 2.0)
    with pytest.raises(ValueError, match=r"stages must be 2 numbers in 1\.\.8"):
        build_additive(own.k, None, 2.0, stages=(2, 9))
    bad = {
        "mean": made["mean"][0],
        "back": made["back"] * np.float16(0),
        "back_size": made["back_size"] * np.float32(-1),
        "cost": made["cost"] - np.float32(1e9),
        "stage": made["stage"] + np.uint8(1),
        "words": made["words"] * np.float16(np.nan),
    }
    for name, array in bad.items():
        with pytest.raises(ValueError, match=name):
            AdditiveTables.from_arrays(made | {name: array})
        with pytest.raises(ValueError, match=name):
            AdditiveTables.from_arrays({other: array for other, array in made.items() if other != name})
        with pytest.raises(ValueError, match=name):
            AdditiveTables.from_arrays(made | {name: made[name].astype(np.float64)})


def test_layers_share_stages() -> None:
    """Costs that `spectrum` gives, and tables of the stages that come of them."""
    layers = {name: layer(400, seed) for name, seed in (("0", 1), ("1", 2))}
    shared = share_stages({n: spectrum(rows.k, rows.fisher_k) for n, rows in layers.items()}, 2.0)
    assert sum(itertools.chain(*shared.values())) == 8
    for name, rows in layers.items():
        assert build_additive(rows.k, rows.fisher_k, 2.0, shared[name]).stages == shared[name]


# --- refusals


def test_specs_round_trip_and_values_are_rvq() -> None:
    for spec in ("commvq-2:additive", "k=commvq-1.5:additive:carry,v=raw,sink=0"):
        assert parse_codec(spec).spec() == spec
    assert parse_codec("commvq-1:additive").v == parse_codec("rvq-4").v
    assert parse_codec("commvq-1").k.id == "commvq"


@pytest.mark.parametrize("spec", ("commvq:additive", "commvq-2.5:additive", "commvq-2:additive:dims=4", "commvq-2:additive:additive"))
def test_wrong_specs(spec: str) -> None:
    with pytest.raises(ValueError, match=r"commvq-N:additive|unknown options"):
        parse_codec(f"k={spec},v=raw")


def test_an_unbound_codec_and_other_tables_are_refused() -> None:
    codec = parse_codec("k=commvq-2:additive,v=raw").k
    for call in (lambda: codec.layout((2, 3, 32), mx.float32), lambda: codec.encode(keys(3)), lambda: codec.to_params()):
        with pytest.raises(ValueError, match="commvq-2:additive needs a calibration"):
            call()
    own = bound("commvq-2:additive")
    for other in (tables(2.0, 3, 16), tables(1.0, 2, 32), None):
        with pytest.raises(ValueError, match=r"must be AdditiveTables of \(H, D\) = \(2, 32\)"):
            own.with_tables(other)
    with pytest.raises(ValueError, match=r"rows must have \(H, D\) = \(2, 32\)"):
        own.encode(keys(3, 3, 16))
    assert own.takes(32) and not own.takes(16)


@pytest.mark.parametrize(
    "change",
    (
        {"bits": 2.5},
        {"bits": True},
        {"bits": math.nan},
        {"dim": 0},
        {"dim": 1 << 30},
        {"dim": 32.0},
        {"stages": []},
        {"stages": [0, 3]},
        {"stages": [33, 3]},
        {"stages": "88"},
        {"stages": [True, 3]},
        {"stages": [1] * 2000},
        {"tables": "5e"},
        {"tables": None},
        {"layer": ""},
        {"layer": 3},
    ),
    ids=str,
)
def test_impossible_params_are_refused(change: dict) -> None:
    with pytest.raises(ManifestError, match=next(iter(change))):
        CODECS["additive"].from_params(bound("commvq-2:additive").to_params() | change)


def test_hostile_parts_never_read_beyond_the_tables() -> None:
    codec, x = bound("commvq-2:additive:carry"), keys(13)
    parts = codec.encode(x)
    for name in parts:
        with pytest.raises(ValueError, match=f"part '{name}' is missing"):
            codec.decode({other: array for other, array in parts.items() if other != name}, x.shape, mx.float32)
        with pytest.raises(ValueError, match=f"part '{name}' must be"):
            codec.decode(parts | {name: parts[name][..., :-1]}, x.shape, mx.float32)
    for stage in (200, max(codec.stages)):
        with pytest.raises(ManifestError, match="part 'stage' must be below"):
            codec.decode(parts | {"stage": mx.full((2, 32), stage, mx.uint8)}, x.shape, mx.float32)
    for name in ("mean", "back_step", "words_step"):
        for value in (math.inf, math.nan, 3e38):
            if (name, value) != ("mean", 3e38):
                with pytest.raises(ManifestError, match=f"part '{name}' must be finite"):
                    codec.decode(parts | {name: mx.full((2, 32), value)}, x.shape, mx.float32)
    noise = np.random.default_rng(0).integers(0, 256, parts["codes"].shape).astype(np.uint8)
    decoded = codec.decode(parts | {"codes": mx.array(noise)}, x.shape, mx.float32)
    np.testing.assert_allclose(f64(decoded), oracle(codec, parts | {"codes": mx.array(noise)}, x.shape), rtol=0, atol=1e-4)


# --- frozen


@pytest.mark.parametrize("name", golden.CASES)
def test_frozen_files_decode_as_they_did(name: str) -> None:
    params, made, parts, decoded = golden.read(golden.HERE / f"{name}.npz")
    codec = CommVqAdditive.from_params(params)
    if codec.calibration:
        codec = codec.with_tables(made)
    np.testing.assert_allclose(f64(codec.decode(parts, golden.SHAPE, mx.float32)), decoded, rtol=0, atol=1e-6 * np.abs(decoded).max())
    assert same(golden.encoded(name, made)[1], parts)
