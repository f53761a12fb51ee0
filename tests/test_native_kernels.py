"""The kernel API in C++ where the rows of its table are too small: many threads' parts, every SIMD level, and what the bindings refuse."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx import metal, native
from veloxquant_mlx.metal._backend import forced
from veloxquant_mlx.native import kernels

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")
CENTROIDS = mx.array([-1.5, -0.45, 0.45, 1.5])
BOUNDARIES = mx.array([-1.0, 0.0, 1.0])


@pytest.fixture(params=[(level, threads) for level in native.levels() for threads in (1, 3)], ids=lambda p: f"{p[0]}-{p[1]}")
def setting(request: pytest.FixtureRequest) -> Iterator[None]:
    before = native.level(), native.threads()
    native.set_level(request.param[0])
    native.set_threads(request.param[1])
    yield
    native.set_level(before[0])
    native.set_threads(before[1])


def codes(*shape: int) -> mx.array:
    return mx.random.randint(0, 256, shape, mx.uint8)


def halves(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.float16)


def eviction() -> dict[str, Any]:
    places = mx.broadcast_to(mx.arange(331, dtype=mx.int32), (9, 331))
    scores = mx.random.uniform(0, 1, (9, 331))
    return {"keys_mid": halves(9, 331, 64), "values_mid": halves(9, 331, 40), "scores_mid": scores, "positions_mid": places}


# More than a thread takes at a time, in numbers that no part's size divides; and how far sums in another order may differ.
LARGE: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "rabitq_hamming_score": (
        lambda: {"qbits": codes(17), "bits": codes(9001, 17), "Cx": mx.random.normal((9001,)), "scale": mx.array([0.37])},
        0,
    ),
    "rabitq_encode": (lambda: {"keys": halves(1031, 128), "diag": mx.where(mx.random.normal((128,)) > 0, 1.0, -1.0)}, 2e-6),
    "rvq_quant_pack": (
        lambda: {
            "rotated": halves(1031, 128),
            "centroids1": CENTROIDS.astype(mx.float16),
            "boundaries1": BOUNDARIES,
            "boundaries2": 0.3 * BOUNDARIES,
            "bits": 2,
        },
        0,
    ),
    "kivi_group_quant_dequant": (lambda: {"x": halves(3, 517, 100), "axis": -2, "group_size": 32, "levels": 3}, 0),
    "qjl_inner_product": (
        lambda: {"q_proj": halves(3, 1048), "packed_signs": codes(701, 3, 131), "norms": halves(701, 3), "out_dtype": mx.float32},
        1e-3,
    ),
    "qfilters_score": (lambda: {"keys": halves(3, 700, 300), "filter_dir": mx.random.normal((3, 300)), "n_sink": 2, "recent": 3}, 1e-4),
    "vecinfer_dequant_metal": (
        lambda: {"indices": mx.random.randint(-3, 300, (5000, 8)), "codebook": mx.random.normal((256, 5))},
        0,
    ),
    "comm_vq_decode_metal": (
        lambda: {
            "indices": codes(2003, 16),
            "codebook": halves(16, 200, 4),
            "positions": mx.arange(2003, dtype=mx.int32) * 13,
            "inv_freq": 1e4 ** (-mx.arange(32) / 32),
            "n_cb": 16,
            "sub_dim": 4,
            "cb_size": 200,
        },
        2e-3,
    ),
    "h2o_fused_evict": (lambda: {**eviction(), "n_sink": 2, "rope_base": 1e4}, 0),
}


@pytest.mark.parametrize("function", LARGE)
def test_large_inputs_are_the_definitions(function: str, setting: None) -> None:
    make, atol = LARGE[function]
    mx.random.seed(5)
    given, calls = make(), native.calls()
    with mx.stream(mx.cpu):
        found = getattr(metal, function)(**given)
        assert native.calls() > calls
        with forced("cpu"):
            wanted = getattr(metal, function)(**given)
    for got, want in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=0, atol=atol)


def test_prefill_of_many_queries(setting: None) -> None:
    mx.random.seed(6)
    q, k, v = (halves(1, heads, 300, 64) for heads in (4, 2, 2))
    s = np.array(q, np.float64) @ np.repeat(np.array(k, np.float64), 2, axis=1).swapaxes(-1, -2) / 8
    s = np.where(np.tri(300, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = p @ np.repeat(np.array(v, np.float64), 2, axis=1) / p.sum(-1, keepdims=True)
    calls = native.calls()
    with mx.stream(mx.cpu):
        got = metal.flash_prefill_attend(q, k, v, mx.array([1 / 8]), out_dtype=mx.float32)
    assert native.calls() > calls
    np.testing.assert_allclose(np.array(got), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("by_token", (False, True))
@pytest.mark.parametrize("bits", (3, 8))
def test_float32_sides_are_read_as_they_are(by_token: bool, bits: int, setting: None) -> None:
    """Both kinds of sides, in decoding and in attention, whose values no bfloat16 holds."""
    rng, (heads, count, dim, group) = np.random.default_rng(3), (2, 77, 48, 16)
    held = rng.integers(0, 2**bits, (heads, count, dim), dtype=np.uint8)
    stream = np.packbits(
        np.unpackbits(held[..., None], axis=-1, count=bits, bitorder="little").reshape(heads, count, -1), -1, bitorder="little"
    )
    sides = (heads, count, dim // group) if by_token else (heads, -(-count // group), dim)
    step, zero = (rng.normal(size=sides).astype(np.float32) for _ in range(2))
    stored = native.stored((heads, count, dim))
    stored.codes(stream, bits, None)
    stored.affine(step, zero, group, by_token)
    wide = (np.repeat(x, group, axis=2 if by_token else 1)[:, :count].astype(np.float64) for x in (step, zero))
    factor, constant = wide
    np.testing.assert_allclose(native.decoded(stored, 0, count), held * factor + constant, rtol=1e-6, atol=2**bits * 1e-6)


def refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith("[native] ")
    assert text in str(caught.value)


def test_refusals() -> None:
    zeros = lambda shape, dtype=np.float32: np.zeros(shape, dtype)  # noqa: E731
    extension = native.extension()
    rows = native.stored((1, 40, 64))
    rows.codes(zeros((1, 40, 64), np.uint8), 8, None)
    step = zeros((1, 1, 64))
    for group in (0, 2**31 - 40):
        refused(lambda group=group: rows.affine(step, step, group, False), f"group must be 1 to {2**31 - 1 - 64}, but got {group}.")
    refused(lambda: rows.affine(step, step.astype(np.uint16), 64, False), "zero must be float32 as step is")
    rows.affine(step, step, 2**31 - 1 - 64, False)
    refused(lambda: rows.affine(step[:, :, :5], step, 64, False), "step must be (1, 1, 64)")
    with_mean = native.stored((1, 40, 64))
    with_mean.codes(zeros((1, 40, 64), np.uint8), 8, [0.0] * 256)
    with_mean.scale(zeros((1, 40)))
    with_mean.mean(zeros((1, 64)))
    refused(lambda: extension.decode(with_mean, 0, 40), "scale must be bfloat16 of rows with a rotation or a mean, but got float32.")
    refused(lambda: extension.hamming(zeros(2, np.uint8), zeros((3, 4), np.uint8), zeros(3), 1.0, zeros(3)), "bits must be (3, 2)")
    refused(
        lambda: extension.drop_row(zeros((2, 1, 4), np.uint8), zeros(2, np.int32), zeros((2, 0, 4), np.uint8)), "rows must be 2 or more"
    )
    refused(
        lambda: extension.drop_row(zeros((1, 3, 4), np.uint8), np.array([3], np.int32), zeros((1, 2, 4), np.uint8)),
        "gone must be rows within 3, but got 3.",
    )
    refused(lambda: extension.gather(zeros(5, np.int32), zeros((2, 4), np.uint8), zeros((5, 4), np.uint8)), "indices must be uint8, uint16")
    refused(lambda: extension.gather(zeros(5, np.uint8), zeros((2, 4), np.uint8), zeros((4, 4), np.uint8)), "out must be (5, 4)")
    refused(lambda: extension.round_trip(zeros(6), False, 3, 2, 4, 3.0, 1e-8, zeros(6)), "group must be 1 to the axis 3, but got 4.")
    refused(lambda: extension.encode_signs(zeros(24), False, zeros(12), zeros(3, np.uint8), zeros(2)), "rows must be of 2^k entries")
    refused(lambda: extension.pack_signs(zeros(9), zeros(1, np.uint8)), "x must be (8)")


def test_an_index_beyond_a_table_is_its_last() -> None:
    table = mx.arange(6, dtype=mx.float32).reshape(3, 2)
    for dtype in (mx.uint8, mx.uint16, mx.uint32):
        assert kernels.gather(mx.array([0, 2, 200], dtype), table).tolist() == [0, 1, 4, 5, 4, 5]


def test_half_words_of_runs_are_their_float32(setting: None) -> None:
    """Every float16, subnormal, infinite or NaN too, in runs of 4, 8 and 3 entries; planes and parts refuse them."""
    rng = np.random.default_rng(4)
    for run in (4, 8, 3):
        words, count = rng.permutation(1 << 16).astype(np.uint16).view(np.float16), 48 // run
        table = np.arange(2 * count, dtype=np.int64).reshape(2, count) * (256 * run) % (len(words) - 256 * run)
        held, place = rng.integers(0, 256, (2, 99, count), np.uint8), np.broadcast_to(8 * np.arange(count), (2, count))
        found = []
        for values in (words, words.astype(np.float32)):
            stored = native.stored((2, 99, 48))
            stored.codewords(0, held, run, place.astype(np.int32), np.full((2, count), 8, np.int32), table, values, None, None)
            found.append(native.decoded(stored, 0, 99))
        assert np.array_equal(*found, equal_nan=True)
        again = table[:, None, :, None] + held.astype(np.int64)[..., None] * run + np.arange(run)
        assert np.array_equal(found[0], words.astype(np.float32)[again].reshape(2, 99, 48), equal_nan=True)
    planes = native.stored((1, 4, 8))
    some = np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match="values must be float32 of planes and parts, but got float16"):
        planes.codewords(1, np.zeros((1, 4, 4), np.uint8), 2, some, some, some.astype(np.int64), np.zeros(32, np.float16), None, None)
