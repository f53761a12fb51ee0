"""vecinfer: parts and rows against float64 versions written from formats/SPEC.md, attention straight from the parts, hard inputs."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtool
from formats.errors import ManifestError
from tests.library import ids, tiny
from veloxquant_mlx.allocators.vecinfer import (
    apply_dual_transform_keys,
    apply_dual_transform_queries,
    compute_query_lut,
    quantize_vq,
    walsh_hadamard_matrix,
)
from veloxquant_mlx.codecs import CODECS, parse_codec
from veloxquant_mlx.codecs._base import BLOCK_VALUES
from veloxquant_mlx.codecs.vecinfer import VecInfer
from veloxquant_mlx.metal.fused_sdpa import metal_fused_sdpa

CASES = (
    VecInfer(4, 8, True),
    VecInfer(4, 6, True),
    VecInfer(8, 8, True),
    VecInfer(4, 5, False),
    VecInfer(8, 8, False),
    VecInfer(4, 7, False),
)


def keys(shape: tuple[int, int, int], seed: int = 0) -> mx.array:
    """Channels of very different spread around a mean, the first row near zero as a sink's is."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1, shape[2]))) + 2 * rng.standard_normal((shape[0], 1, shape[2]))
    x[:, :1] *= 0.01
    return mx.array(x.astype(np.float32))


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def hadamard(dim: int) -> np.ndarray:
    return np.array([[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]) / math.sqrt(dim)


def codes(codec: VecInfer, parts: dict[str, mx.array]) -> np.ndarray:
    """(H, S, D / sub), bit by bit; what is left of a row's bytes is 0."""
    stream = np.unpackbits(np.array(parts["codes"]), axis=-1, bitorder="little").astype(int)
    count = stream.shape[-1] // codec.bits
    assert not stream[..., count * codec.bits :].any()
    return stream[..., : count * codec.bits].reshape(*stream.shape[:-1], count, codec.bits) @ (1 << np.arange(codec.bits))


def oracle(codec: VecInfer, parts: dict[str, mx.array], dim: int) -> np.ndarray:
    """Decoded rows."""
    index = codes(codec, parts)[..., : dim // codec.sub]
    y = f64(parts["words"])[index].reshape(*index.shape[:-1], dim)
    return (y @ hadamard(dim)) * f64(parts["smooth"])[:, None] if codec.smooth else y


def transformed(codec: VecInfer, parts: dict[str, mx.array], x: mx.array) -> np.ndarray:
    return (f64(x) / f64(parts["smooth"])[:, None]) @ hadamard(x.shape[2]) if codec.smooth else f64(x)


def relative_error(codec: VecInfer, x: mx.array) -> float:
    decoded = codec.decode(codec.encode(x), x.shape, mx.float32)
    return float(np.linalg.norm(f64(decoded) - f64(x)) / max(np.linalg.norm(f64(x)), 1e-300))


@pytest.mark.parametrize("codec", CASES, ids=str)
@pytest.mark.parametrize("dim", (16, 64, 256))
def test_decoded_rows_are_the_specifications(codec: VecInfer, dim: int) -> None:
    x = keys((2, 40, dim))
    parts = codec.encode(x)
    wanted = oracle(codec, parts, dim)
    np.testing.assert_allclose(f64(codec.decode(parts, x.shape, mx.float32)), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("codec", CASES, ids=str)
def test_every_code_is_the_nearest(codec: VecInfer) -> None:
    x = keys((2, 150, 64), seed=1)
    parts = codec.encode(x)
    y = transformed(codec, parts, x).reshape(2, 150, -1, 1, codec.sub)
    distances = ((y - f64(parts["words"])) ** 2).sum(axis=-1)
    got = np.take_along_axis(distances, codes(codec, parts)[..., None], axis=-1)[..., 0]
    # float32 rows and distances; words in units of u are a power of two apart from those stored.
    np.testing.assert_allclose(got, distances.min(axis=-1), rtol=1e-5, atol=1e-5 * np.abs(y).max() ** 2)


def test_smooth_factors_are_square_roots_of_the_largest() -> None:
    x = np.array(keys((2, 50, 32)))
    x[..., 7], x[0, :, 9] = 0.0, 1e-30
    stored = f64(VecInfer(4, 8, True).encode(mx.array(x))["smooth"])
    unit = 2.0 ** math.ceil(math.log2(np.abs(x).max()))
    wanted = np.sqrt(np.maximum(np.abs(x.astype(np.float64)).max(axis=1) / unit, 2.0**-40))
    np.testing.assert_allclose(stored, wanted, rtol=2**-8)  # one rounding to bfloat16
    assert stored[0, 9] == stored[1, 7] == 2.0**-20


@pytest.mark.parametrize(("codec", "published"), ((VecInfer(4, 8, False), 0.0989), (VecInfer(8, 8, False), 0.3262)), ids=str)
def test_error_on_gaussian_rows_is_k_means(codec: VecInfer, published: float) -> None:
    """k-means words of 4 and 8 entries come to 0.0989 and 0.3262 on many samples; a third of these were learnt from."""
    x = mx.random.normal((1, 1500, 128), key=mx.random.key(0))
    error = relative_error(codec, x) ** 2
    assert published * 0.9 < error < published * 1.12
    assert error < {4: 0.1175, 8: 0.3634}[codec.sub]  # a Lloyd-Max table per entry


# --- the parts are operands of the kernels


@pytest.mark.parametrize(
    ("k", "v", "dim"),
    (
        (VecInfer(4, 8, True), VecInfer(4, 8, False), 64),
        (VecInfer(4, 6, True), VecInfer(4, 6, False), 64),
        (VecInfer(8, 8, True), VecInfer(8, 8, False), 128),
        (VecInfer(8, 8, True), VecInfer(4, 8, False), 64),
    ),
    ids=str,
)
@pytest.mark.parametrize("causal", (False, True))
def test_attention_from_codes_is_attention_over_decoded_rows(k: VecInfer, v: VecInfer, dim: int, causal: bool) -> None:
    heads, group, tokens, steps = 2, 3, 70, 5
    x, z = keys((heads, tokens, dim)), keys((heads, tokens, dim), seed=1)
    q = 0.5 * mx.random.normal((1, heads * group, steps, dim), key=mx.random.key(1))
    k_parts, v_parts = k.encode(x), v.encode(z)
    got = metal_fused_sdpa(
        apply_dual_transform_queries(q, k_parts["smooth"], walsh_hadamard_matrix(dim)),
        k_parts["codes"][None],
        k_parts["words"],
        v_parts["codes"][None],
        v_parts["words"],
        1 / math.sqrt(dim),
        causal=causal,
        packed="lsb8",
    )
    rows, values = (np.repeat(oracle(codec, parts, dim), group, axis=0) for codec, parts in ((k, k_parts), (v, v_parts)))
    scores = f64(q)[0] @ rows.swapaxes(1, 2) / math.sqrt(dim)
    if causal:
        scores[:, np.arange(tokens) > np.arange(tokens - steps, tokens)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = weights / weights.sum(axis=-1, keepdims=True) @ values
    # float32; a score's rounding, relative to the largest term, is that of the weight.
    np.testing.assert_allclose(f64(got)[0], wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())
    assert np.abs(weights).max(axis=-1).min() < 0.9 * weights.sum(axis=-1).max()  # not all on one token


@pytest.mark.parametrize("codec", CASES[:3], ids=str)
def test_scores_are_sums_of_a_table_of_the_query(codec: VecInfer) -> None:
    x, q = keys((2, 60, 64)), mx.random.normal((2, 1, 64), key=mx.random.key(1))
    parts = codec.encode(x)
    table = compute_query_lut(apply_dual_transform_queries(q, parts["smooth"], walsh_hadamard_matrix(64)), parts["words"], codec.sub)
    got = np.take_along_axis(np.repeat(f64(table), 60, axis=1), codes(codec, parts)[..., None], axis=-1).sum(axis=(-1, -2))
    wanted = np.einsum("hqd,hsd->hs", f64(q), oracle(codec, parts, 64))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max() * math.sqrt(64))


def test_codes_are_those_of_the_allocators() -> None:
    codec, x = VecInfer(4, 8, True), keys((3, 90, 64))
    parts = codec.encode(x)
    own = quantize_vq(apply_dual_transform_keys(x, parts["smooth"], walsh_hadamard_matrix(64)), parts["words"], 4)
    # The codec rotates by a fast transform, the allocators by a product: a few of thousands may lie between two words.
    assert (codes(codec, parts) == np.array(own)).mean() > 0.999


# --- inputs that break others


@pytest.mark.parametrize("codec", CASES, ids=str)
@pytest.mark.parametrize("tokens", (1, 2, 16))
def test_few_rows_are_kept(codec: VecInfer, tokens: int) -> None:
    """No more sub-vectors than words: each is a word, rounded to bfloat16."""
    x = keys((1, tokens, 64 if tokens == 1 else 16))
    fit = x.size // codec.sub <= 1 << codec.bits
    assert fit or codec.bits == 5
    assert relative_error(codec, x) < (2**-8 if fit else 0.7)


@pytest.mark.parametrize("codec", CASES, ids=str)
def test_equal_rows_are_kept(codec: VecInfer) -> None:
    """300 of one row, 300 of another: 64 sub-vectors of 9600 differ, and every one is a word."""
    two = np.repeat(np.random.default_rng(0).standard_normal((1, 2, 64)), [300, 3], axis=1)
    assert relative_error(codec, mx.array(two.astype(np.float32))) < 2**-8
    assert relative_error(codec, mx.full((2, 16, 64), 0.75)) < 2**-8


def test_as_many_words_as_distinct_sub_vectors_are_enough() -> None:
    """Rounds of k-means from 256 of 8000 points would leave some of the 250 without a word."""
    rng = np.random.default_rng(0)
    points = rng.standard_normal((250, 4)).astype(np.float32)
    assert relative_error(VecInfer(4, 8, False), mx.array(points[rng.integers(0, 250, 8000)].reshape(1, 500, 64))) < 2**-8


@pytest.mark.parametrize("codec", CASES, ids=str)
def test_zeros_are_exact(codec: VecInfer) -> None:
    for x in (mx.zeros((2, 7, 64)), mx.full((1, 5, 64), 1e-38)):
        assert not np.array(codec.decode(codec.encode(x), x.shape, x.dtype)).any()
    x = mx.array(np.where(np.arange(16)[:, None] % 2, np.random.default_rng(0).standard_normal((1, 16, 16)), 0).astype(np.float32))
    decoded = np.array(codec.decode(codec.encode(x), x.shape, x.dtype))
    assert codec.bits < 6 or np.abs(decoded[:, ::2]).max() < 1e-6


def test_an_outlier_channel_costs_the_others_little() -> None:
    x = np.random.default_rng(0).standard_normal((2, 400, 64)).astype(np.float32)
    x[..., 17] *= 1000
    others = np.arange(64) != 17

    def error(codec: VecInfer) -> float:
        decoded = codec.decode(codec.encode(mx.array(x)), x.shape, mx.float32)
        return float(np.mean((f64(decoded) - x)[..., others] ** 2))

    # Smoothed by sqrt(1000), the channel is 30 times the others' size instead of 1000.
    assert error(VecInfer(4, 8, True)) < 100 * 0.1
    unsmoothed = x @ hadamard(64)
    rotated_only = VecInfer(4, 8, False)
    decoded = f64(rotated_only.decode(rotated_only.encode(mx.array(unsmoothed.astype(np.float32))), x.shape, mx.float32)) @ hadamard(64)
    assert error(VecInfer(4, 8, True)) < 0.3 * float(np.mean((decoded - x)[..., others] ** 2))


@pytest.mark.parametrize("codec", (CASES[0], CASES[4]), ids=str)
@pytest.mark.parametrize("dim", (64, 512))
def test_the_largest_values_stay_finite(codec: VecInfer, dim: int) -> None:
    rng = np.random.default_rng(0)
    for x in (np.full((1, 3, dim), 1.0), np.where(rng.random((1, 40, dim)) < 0.5, 1.0, -1.0), np.eye(dim)[None, :20]):
        large = mx.array((x * 1e36).astype(np.float32))
        decoded = codec.decode(codec.encode(large), x.shape, mx.float32)
        assert np.isfinite(np.array(decoded)).all()
        error = np.linalg.norm(f64(decoded) / 1e36 - x) / np.linalg.norm(x)
        assert error == pytest.approx(relative_error(codec, mx.array(x.astype(np.float32))), rel=0.05, abs=2**-8)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    distinct=st.integers(1, 16),
    tokens=st.integers(1, 300),
    exponent=st.integers(-90, 90),
    codec=st.sampled_from([case for case in CASES if case.bits >= 6]),
)
def test_no_more_distinct_sub_vectors_than_words_are_all_kept(
    seed: int, distinct: int, tokens: int, exponent: int, codec: VecInfer
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((1, distinct, 16)) * 2.0**exponent
    x = mx.array(rows[:, rng.integers(0, distinct, tokens)].astype(np.float32))
    decoded = f64(codec.decode(codec.encode(x), x.shape, mx.float32))
    # bfloat16 words; in the smoothed space an error is spread over channels of other sizes.
    assert np.abs(decoded - f64(x)).max() <= 2**-6 * np.abs(f64(x)).max()


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    x = np.zeros((1, 5, 64), np.float32)
    x[0, 3, 17] = value
    with pytest.raises(ValueError, match=r"1 of 320 values.*token 3, dim 17"):
        VecInfer(4, 8, True).encode(mx.array(x))


def test_head_dims() -> None:
    smooth, plain, wide = VecInfer(4, 8, True), VecInfer(4, 8, False), VecInfer(8, 8, False)
    assert [dim for dim in range(70) if smooth.takes(dim)] == [4, 8, 16, 32, 64]
    assert plain.takes(36) and not plain.takes(38) and wide.takes(80) and not wide.takes(36) and not plain.takes(0)
    for codec, dim, message in ((smooth, 80, "a power of two, at least 4, but got 80"), (wide, 36, "a multiple of 8, but got 36")):
        with pytest.raises(ValueError, match=f"head_dim must be {message}"):
            codec.encode(mx.zeros((1, 2, dim)))
        with pytest.raises(ValueError, match=f"head_dim must be {message}"):
            codec.decode({}, (1, 2, dim), mx.float32)


def test_temporaries_stay_small() -> None:
    codec, shape = VecInfer(4, 6, True), (4, 6_000, 128)
    x = mx.random.normal(shape, key=mx.random.key(0))
    mx.eval(x)
    size = codec.nbytes(shape, x.dtype)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    codec.encode(x)
    # Codes twice (blocks, then joined), and some forty float32 temporaries of a block: of its distances to every word.
    assert mx.get_peak_memory() - before < 2 * size + 48 * 4 * BLOCK_VALUES


# --- files, specs, params


def test_files_hold_exactly_what_the_codec_gives(tmp_path: Path) -> None:
    model, plan, count = tiny("llama"), parse_codec("vecinfer-2"), 40
    snapshot = kvtool.capture(model, ids(count))
    kvtool.save(snapshot, tmp_path / "a.kv", codec="vecinfer-2,sink=4,recent=5")
    restored = kvtool.load(tmp_path / "a.kv", model)
    for was, got in zip(snapshot.states, restored.cache, strict=True):
        for codec, rows, array in ((plan.k, was.k, got.keys), (plan.v, was.v, got.values)):
            middle = rows[:, 4 : count - 5]
            assert codec.takes(middle.shape[2])
            assert np.array_equal(f64(array[0, :, 4 : count - 5]), f64(codec.decode(codec.encode(middle), middle.shape, middle.dtype)))


def test_specs_round_trip() -> None:
    for spec in ("vecinfer-2", "vecinfer-1,sink=0", "k=vecinfer-1.25,v=vecinfer-1.5:smooth", "k=vecinfer-2:nosmooth,v=raw"):
        assert parse_codec(spec).spec() == spec
    plan = parse_codec("vecinfer-1.5")
    assert (plan.k, plan.v) == (VecInfer(4, 6, True), VecInfer(4, 6, False))
    assert parse_codec("vecinfer-1").k == VecInfer(8, 8, True)
    for codec in CASES:
        assert VecInfer.parse(codec.spec(), "k") == VecInfer.parse(codec.spec(), "v") == codec


def test_bits_are_those_said() -> None:
    # N bits a value, 2^b words, 16 a channel for lambda.
    assert VecInfer(4, 6, True).nbytes((2, 100, 64), mx.float16) == 2 * 100 * 64 * 1.5 / 8 + 64 * 4 * 2 + 2 * 64 * 2
    assert VecInfer(8, 8, False).nbytes((2, 100, 64), mx.float16) == 2 * 100 * 64 / 8 + 256 * 8 * 2


@pytest.mark.parametrize("spec", ("vecinfer", "vecinfer-3", "vecinfer-1.6", "vecinfer-2:sub=8", "vecinfer-2:ls"))
def test_wrong_specs(spec: str) -> None:
    with pytest.raises(ValueError, match=r"write vecinfer-N|unknown option"):
        parse_codec(f"k={spec},v=raw")


@pytest.mark.parametrize(
    "change",
    ({"sub": 2}, {"sub": True}, {"sub": None}, {"bits": 4}, {"bits": 9}, {"bits": 8.0}, {"sub": 8, "bits": 7}, {"smooth": 1}),
    ids=str,
)
def test_impossible_params_are_refused(change: dict) -> None:
    with pytest.raises(ManifestError, match=list(change)[-1]):
        CODECS["vecinfer"].from_params(VecInfer(4, 8, True).to_params() | change)
