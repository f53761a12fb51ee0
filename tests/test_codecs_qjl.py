"""qjl: codes, rows and scores against float64 versions written from formats/SPEC.md, and the estimator against its theory."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtool
from formats.errors import ManifestError
from tests import codec_oracles
from tests.library import ids, tiny
from veloxquant_mlx.codecs import CODECS, parse_codec
from veloxquant_mlx.codecs.qjl import Qjl
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.metal._qjl import qjl_encode, qjl_inner_product

CASES = (Qjl(1), Qjl(2, center=False), Qjl(3, seed=7), Qjl(4, center=False, seed=(1 << 63) - 1))
DIMS = (2, 8, 36, 64, 80)
TIE = 1e-5  # of a projection of a row of unit size: float32 sums are off by less


def keys(shape: tuple[int, int, int], seed: int = 0) -> mx.array:
    """Rows around a mean, the first near zero as a sink's is, one of zeros, one with a single large entry."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) + 2 * rng.standard_normal((shape[0], 1, shape[2]))
    x[:, :1] *= 0.01
    x[0, 3] = 0
    x[-1, 4, shape[2] // 2] *= 1000
    return mx.array(x.astype(np.float32))


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def projections(codec: Qjl, dim: int) -> np.ndarray:
    """S, (N D, D)."""
    turned = [
        codec_oracles.rotation(dim, codec.seed + 2 * i + 1) @ codec_oracles.rotation(dim, codec.seed + 2 * i) for i in range(codec.blocks)
    ]
    return math.sqrt(dim) * np.concatenate(turned)


def split(parts: dict[str, mx.array], shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """What is taken off each row, (H, S, D), and its norm, (H, S)."""
    stored = np.array(parts["norm"].view(mx.uint16))
    mean = f64(parts["mean"])[:, None] if "mean" in parts else np.zeros((shape[0], 1, shape[2]))
    return np.where(stored[..., None] < 0x8000, mean, 0), np.abs(f64(parts["norm"]))


def oracle(codec: Qjl, parts: dict[str, mx.array], shape: tuple[int, int, int]) -> np.ndarray:
    """Decoded rows."""
    off, norm = split(parts, shape)
    count = codec.blocks * shape[2]
    signs = 2.0 * np.unpackbits(np.array(parts["codes"]), axis=-1, bitorder="little", count=count) - 1
    return math.sqrt(math.pi / 2) / count * norm[..., None] * (signs @ projections(codec, shape[2])) + off


@pytest.mark.parametrize("codec", CASES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_signs_and_norms_are_the_specifications(codec: Qjl, dim: int) -> None:
    x = keys((2, 30, dim))
    parts = codec.encode(x)
    off, norm = split(parts, x.shape)
    if codec.center:
        np.testing.assert_allclose(f64(parts["mean"]), f64(x).mean(axis=1), rtol=2**-8 + 1e-5, atol=1e-5)  # one rounding to bfloat16
        mean = f64(parts["mean"])[:, None]
        nearer = np.linalg.norm(f64(x) - mean, axis=-1) < np.linalg.norm(f64(x), axis=-1)
        assert np.array_equal(np.any(off != 0, axis=-1), nearer)
        assert not nearer[:, 0].any() and nearer[0, 5:].any()
    rows = f64(x) - off
    np.testing.assert_allclose(norm, np.linalg.norm(rows, axis=-1), rtol=2**-8)
    bits = np.unpackbits(np.array(parts["codes"]), axis=-1, bitorder="little")
    projected = rows @ projections(codec, dim).T
    sure = np.abs(projected) > TIE * np.linalg.norm(rows, axis=-1, keepdims=True)
    assert np.array_equal(bits[..., : codec.blocks * dim][sure], (projected > 0)[sure]) and sure.mean() > 0.9
    assert not bits[..., codec.blocks * dim :].any()


@pytest.mark.parametrize("codec", CASES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_decoded_rows_are_the_specifications(codec: Qjl, dim: int) -> None:
    x = keys((2, 30, dim), seed=1)
    parts = codec.encode(x)
    wanted = oracle(codec, parts, x.shape)
    # float32: a few roundings per stage of two transforms, relative to the row.
    error = np.abs(f64(codec.decode(parts, x.shape, mx.float32)) - wanted).max(axis=-1)
    assert (error <= 4e-6 * np.abs(wanted).max(axis=-1)).all()


@pytest.mark.parametrize("codec", CASES, ids=str)
def test_scores_from_bits_are_those_of_decoded_keys(codec: Qjl) -> None:
    x, queries = keys((3, 50, 64)), mx.random.normal((3, 2, 64), key=mx.random.key(1))
    parts = codec.encode(x)
    wanted = f64(queries) @ oracle(codec, parts, x.shape).swapaxes(1, 2)
    got = f64(codec.scores(parts, x.shape, queries))
    size = np.linalg.norm(f64(queries), axis=-1)[..., None] * np.linalg.norm(f64(x), axis=-1)[:, None]
    assert (np.abs(got - wanted) <= 1e-5 * size).all()  # float32 sums of up to 256 terms
    assert codec.scores(parts, x.shape, queries[:, :0]).shape == (3, 0, 50)
    with pytest.raises(ValueError, match=r"queries must be \(3, G, 64\)"):
        codec.scores(parts, x.shape, queries[:2])


@pytest.mark.parametrize("codec", (Qjl(1, center=False), Qjl(3, center=False)), ids=str)
def test_parts_are_operands_of_the_kernels(codec: Qjl) -> None:
    """With S as a matrix: the kernel's bits and norms are the codec's, and its inner products those of the decoded rows."""
    x, q = keys((2, 40, 64)), mx.random.normal((2, 64), key=mx.random.key(2))
    parts = codec.encode(x)
    matrix = projections(codec, 64)
    signs, norms = qjl_encode(x.reshape(80, 64), mx.array(matrix.astype(np.float32)), norm_dtype=mx.bfloat16)
    projected = f64(x) @ matrix.T
    sure = np.abs(projected) > TIE * np.linalg.norm(f64(x), axis=-1, keepdims=True)
    bits, own = (np.unpackbits(np.array(codes).reshape(2, 40, -1), axis=-1, bitorder="little") for codes in (signs, parts["codes"]))
    assert np.array_equal(bits[sure], own[sure]) and sure.mean() > 0.95
    np.testing.assert_allclose(f64(norms).reshape(2, 40), np.abs(f64(parts["norm"])), rtol=2**-7)  # one bfloat16 step
    got = qjl_inner_product(codec.project(q), parts["codes"].swapaxes(0, 1), mx.abs(parts["norm"]).T, out_dtype=mx.float32)
    wanted = np.einsum("hd,hsd->hs", f64(q), f64(codec.decode(parts, x.shape, mx.float32)))
    np.testing.assert_allclose(f64(got), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ("gaussian", "one entry", "two entries"))
def test_inner_products_average_to_the_true_one(kind: str) -> None:
    """Over seeds, whatever the row; with a single rotation a row of one entry would come out sqrt(pi / 2) times too large."""
    dim = 128
    x = np.random.default_rng(0).standard_normal(dim) if kind == "gaussian" else np.eye(dim)[5] + (kind == "two entries") * np.eye(dim)[70]
    w = x + np.random.default_rng(1).standard_normal(dim) * np.linalg.norm(x) / math.sqrt(dim)
    rows, estimates = mx.array(x.astype(np.float32)).reshape(1, 1, dim), []
    for seed in range(0, 600, 2):
        codec = Qjl(1, center=False, seed=seed)
        estimates.append(f64(codec.decode(codec.encode(rows), rows.shape, mx.float32))[0, 0] @ w)
    error = np.std(estimates) / math.sqrt(len(estimates))
    # Orthogonal projections add 1 / (4 D) of itself, bfloat16 norms up to 1 / 256.
    assert np.mean(estimates) == pytest.approx(x @ w, abs=4 * error + 0.006 * (x @ w))
    assert error < 0.02 * (x @ w)


@pytest.mark.parametrize("blocks", range(1, 5))
def test_variance_is_that_of_orthogonal_projections(blocks: int) -> None:
    """(pi / 2 - 1) |q|^2 |x|^2 / (N D); the paper's bound for independent ones is pi / 2 in its place."""
    x, q = (np.random.default_rng(seed).standard_normal((1, 4000, 64)) for seed in (0, 1))
    codec, rows = Qjl(blocks, center=False), mx.array(x.astype(np.float32))
    decoded = f64(codec.decode(codec.encode(rows), rows.shape, mx.float32))
    error = ((decoded - x) * q).sum(axis=-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(q, axis=-1)
    assert (error**2).mean() * 64 * blocks == pytest.approx(math.pi / 2 - 1, rel=0.12)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    exponent=st.integers(-90, 90),
    blocks=st.integers(1, 4),
    dim=st.integers(1, 40),
    tokens=st.integers(1, 5),
)
def test_a_row_times_a_power_of_two_has_the_same_signs(seed: int, exponent: int, blocks: int, dim: int, tokens: int) -> None:
    x = np.random.default_rng(seed).standard_normal((1, tokens, dim)).astype(np.float32)
    codec = Qjl(blocks, center=False, seed=seed)
    parts, scaled = codec.encode(mx.array(x)), codec.encode(mx.array(x * 2.0**exponent).astype(mx.float32))
    assert np.array_equal(np.array(parts["codes"]), np.array(scaled["codes"]))
    assert np.array_equal(f64(parts["norm"]) * 2.0**exponent, f64(scaled["norm"]))


def test_few_equal_and_large_rows() -> None:
    codec = Qjl(2)
    for x in (
        mx.zeros((2, 7, 64)),
        mx.zeros((1, 1, 64)),
        mx.full((2, 16, 64), 0.75),
        mx.full((1, 1, 64), -1e36),
        mx.full((1, 2, 64), 1e-30),
    ):
        decoded = codec.decode(codec.encode(x), x.shape, mx.float32)
        # The mean, less what bfloat16 left of it: at most 2^-9 of the row, decoded with sqrt(pi / 2) times its norm.
        assert np.linalg.norm(f64(decoded) - f64(x)) <= 2**-7 * np.linalg.norm(f64(x))


def test_values_that_are_not_finite_are_refused() -> None:
    x = np.zeros((1, 5, 64), np.float32)
    x[0, 3, 17] = math.nan
    with pytest.raises(ValueError, match=r"1 of 320 values.*token 3, dim 17"):
        Qjl().encode(mx.array(x))


def test_files_hold_exactly_what_the_codec_gives(tmp_path: Path) -> None:
    model, plan, count = tiny("llama"), parse_codec("qjl-2"), 40
    snapshot = kvtool.capture(model, ids(count))
    kvtool.save(snapshot, tmp_path / "a.kv", codec="qjl-2,sink=4,recent=5,frame=post")
    restored = kvtool.load(tmp_path / "a.kv", model)
    for was, got in zip(snapshot.states, restored.cache, strict=True):
        for codec, rows, array in ((plan.k, was.k, got.keys), (plan.v, was.v, got.values)):
            middle = rows[:, 4 : count - 5]
            assert np.array_equal(f64(array[0, :, 4 : count - 5]), f64(codec.decode(codec.encode(middle), middle.shape, middle.dtype)))


def test_specs_round_trip_and_values_are_rvq() -> None:
    for spec in ("qjl", "qjl-4", "k=qjl-2:nocenter:seed=9,v=raw,sink=0"):
        assert parse_codec(spec).spec() == spec
    assert parse_codec("qjl-1") == parse_codec("qjl")
    assert parse_codec("qjl:nocenter").v == Rvq.parse("rvq-2", "v")
    for codec in CASES:
        assert Qjl.parse(codec.spec(), "k") == codec


def test_bits_are_those_said() -> None:
    # N bits a value, 16 a token for the norm, 16 a dimension for the mean.
    assert Qjl(3).nbytes((2, 100, 64), mx.float16) == 2 * (100 * (3 * 8 + 2) + 2 * 64)


@pytest.mark.parametrize("spec", ("qjl-0", "qjl-5", "qjl-1.5", "qjlx", "qjl:ls", "qjl:seed=-1", "qjl:seed=9223372036854775808"))
def test_wrong_specs(spec: str) -> None:
    with pytest.raises(ValueError, match=r"write qjl|unknown option"):
        parse_codec(f"k={spec},v=raw")


@pytest.mark.parametrize(
    "change",
    (
        {"blocks": 0},
        {"blocks": 5},
        {"blocks": True},
        {"blocks": 1.0},
        {"seed": -1},
        {"seed": 1 << 63},
        {"seed": None},
        {"center": 1},
        {"rotation": "qr"},
    ),
    ids=str,
)
def test_impossible_params_are_refused(change: dict) -> None:
    with pytest.raises(ManifestError, match=next(iter(change))):
        CODECS["qjl"].from_params(Qjl().to_params() | change)
