"""Laws of every codec, each tested once for all, against the float64 oracles of codec_oracles."""

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from formats.errors import ManifestError
from tests import codec_oracles as oracle
from tests.golden import make_codecs as golden
from veloxquant_mlx.codecs import CODECS, Codec, CodecPlan, _base, parse_codec
from veloxquant_mlx.codecs._bits import lookup, pack, unpack
from veloxquant_mlx.codecs._rotated import RotatedCodec
from veloxquant_mlx.codecs._rotation import rotate, signs, splitmix64, unrotate
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.codecs.rvq import Rvq

DIMS = (2, 6, 36, 62, 64, 80, 96, 128, 144, 256, 576)
ROTATED = (
    "rvq-2+2:ls:center",
    "rvq-2+2:unbiased:center",
    "rvq-1:norm:nocenter",
    "rvq-3:ls:nocenter:seed=9223372036854775807",
    "rvq-4:unbiased:nocenter",
    "rvq-7:ls:center",
    "rvq-8:ls:nocenter",
    "rvq-1+4:norm:center",
    "rvq-3+1:unbiased:nocenter",
    "rvq-4+4:ls:center",
    "rabitq:ls:center",
    "rabitq:unbiased:nocenter:seed=7",
)
AFFINE = ("affine-2:channel", "affine-4:token", "affine-3:channel:group=7", "affine-8:token:group=64", "affine-1:token:group=5")
GRIDS = ("rabitq-2:ls:center", "rabitq-3:norm:nocenter", "rabitq-4:unbiased:center", "rabitq-8:ls:nocenter:seed=7")
VECINFER = ("vecinfer-2", "vecinfer-1.5:nosmooth", "vecinfer-1")
QJL = ("qjl", "qjl-3:nocenter:seed=9223372036854775807")
LOSSY = (*ROTATED, *GRIDS, *AFFINE, *VECINFER, *QJL)
COMMVQ = ("commvq-1", "commvq-2.25", "commvq-2:first=8:dims=12")
PRODUCT = ("commvq-2:product", "commvq-1:product:first=8:dims=12")
LEARNT = (*COMMVQ, *PRODUCT, *VECINFER, "qjl")  # with tables or a mean of the rows
ALL = ("raw", *LOSSY, *COMMVQ, *PRODUCT)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
# A float32 sum over a rotated row (|y| up to about 5 where it matters) is off by a few 2**-22: this close, either cell is right.
TIE = 1e-5


def codec(spec: str) -> Codec:
    return parse_codec(f"k={spec},v=raw").k


def fitting(subject: Codec, dim: int) -> int:
    """The head_dim, or the next power of two for a codec that does not take it."""
    return dim if subject.takes(dim) else 1 << (dim - 1).bit_length()


def sample(shape: tuple[int, int, int], dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Rows around a mean per head, of very different sizes; one outlier dimension, one row of zeros, one of equal values, one tiny."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:2], 1)))
    x += 1.5 * rng.standard_normal((shape[0], 1, shape[2]))
    if shape[1] > 5:
        x[0, 1, shape[2] // 2] *= 1000
        x[:, 2] = 0.0
        x[:, 3] = 0.75
        x[:, 4] *= 1e-3
    return mx.array(x.astype(np.float32)).astype(dtype)


def numpy64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def bits_of(x: mx.array) -> np.ndarray:
    return np.array(x.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[x.dtype.size]))


def same_parts(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(bits_of(a[part]), bits_of(b[part])) for part in a)


def scale_and_centred(parts: dict[str, mx.array]) -> tuple[np.ndarray, np.ndarray]:
    return np.abs(numpy64(parts["scale"])), bits_of(parts["scale"]) < 0x8000


def mean_of(parts: dict[str, mx.array]) -> np.ndarray | None:
    return numpy64(parts["mean"]) if "mean" in parts else None


# --- laws of all codecs


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("tokens", (0, 1, 13, 300))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_returns_the_layout_and_decode_the_shape(spec: str, tokens: int, dtype: mx.Dtype) -> None:
    subject = codec(spec)
    shape = (2, tokens, fitting(subject, 80))
    parts = subject.encode(sample(shape, dtype))
    layout = subject.layout(shape, dtype)
    assert {part: (_base.DTYPES[name], size) for part, (name, size) in layout.items()} == {
        part: (array.dtype, array.shape) for part, array in parts.items()
    }
    assert subject.nbytes(shape, dtype) == sum(array.nbytes for array in parts.values())
    decoded = subject.decode(parts, shape, dtype)
    assert (decoded.shape, decoded.dtype) == (shape, dtype)
    assert tokens == 0 or bool(mx.all(mx.isfinite(decoded)).item())


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_codes_are_all_of_the_memory_that_they_take(bits: int) -> None:
    """No view of words eight times their size: a cache keeps the codes of 256 rows as they were encoded."""
    packed = pack(mx.zeros((2, 256, 64), mx.uint8), bits)
    mx.eval(packed)
    assert memoryview(packed).c_contiguous


@pytest.mark.parametrize("spec", ALL)
def test_params_survive_json_and_decode_alike(spec: str) -> None:
    subject = codec(spec)
    x = sample((2, 13, fitting(subject, 36)))
    params = json.loads(json.dumps(subject.to_params()))
    again = CODECS[subject.id].from_params(params)
    assert again == subject
    assert hash(again) == hash(subject)
    parts = subject.encode(x)
    assert same_parts({"x": again.decode(parts, x.shape, x.dtype)}, {"x": subject.decode(parts, x.shape, x.dtype)})


@pytest.mark.parametrize("spec", ALL)
def test_encode_is_deterministic_and_blind_to_blocks_and_strides(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = codec(spec)
    x = sample((3, 100, fitting(subject, 96)))
    parts = subject.encode(x)
    decoded = subject.decode(parts, x.shape, x.dtype)
    strided = mx.array(np.ascontiguousarray(np.array(x).transpose(1, 2, 0))).transpose(2, 0, 1)
    assert same_parts(parts, subject.encode(strided))
    monkeypatch.setattr(_base, "BLOCK_VALUES", 3 * 96 * 7)
    assert same_parts(parts, subject.encode(x))
    assert same_parts({"x": decoded}, {"x": subject.decode(parts, x.shape, x.dtype)})


@pytest.mark.parametrize("spec", [spec for spec in ALL if ":center" not in spec and ":channel" not in spec and spec not in LEARNT])
def test_rows_are_coded_one_by_one(spec: str) -> None:
    subject, x = codec(spec), sample((2, 60, 144))
    parts, head = subject.encode(x), subject.encode(x[:, :17])
    assert same_parts(head, {part: array[:, :17] for part, array in parts.items()})


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec not in PRODUCT])
def test_bfloat16_parts_may_come_as_their_bits(spec: str) -> None:
    subject, x = codec(spec), sample((2, 13, 64), mx.bfloat16)
    parts = subject.encode(x)
    assert any(array.dtype == mx.bfloat16 for array in parts.values())
    read = {part: array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for part, array in parts.items()}
    assert same_parts({"x": subject.decode(parts, x.shape, x.dtype)}, {"x": subject.decode(read, x.shape, x.dtype)})


@pytest.mark.parametrize("spec", ALL)
def test_wrong_parts_are_refused_by_name(spec: str) -> None:
    subject, shape = codec(spec), (2, 13, 64)
    parts = subject.encode(sample(shape))
    for part in parts:
        with pytest.raises(ValueError, match=f"part '{part}' is missing"):
            subject.decode({other: array for other, array in parts.items() if other != part}, shape, mx.float32)
        with pytest.raises(ValueError, match=f"part '{part}' must be"):
            subject.decode(parts | {part: parts[part][..., :-1]}, shape, mx.float32)
        with pytest.raises(ValueError, match=f"part '{part}' must be"):
            subject.decode(parts | {part: parts[part].astype(mx.int32)}, shape, mx.float32)


@pytest.mark.parametrize("spec", ALL)
def test_wrong_inputs_are_refused(spec: str) -> None:
    with pytest.raises(TypeError, match="int32"):
        codec(spec).encode(mx.zeros((2, 3, 64), mx.int32))
    with pytest.raises(ValueError, match=r"\(1, 2, 3, 64\)"):
        codec(spec).encode(mx.zeros((1, 2, 3, 64)))


def test_temporaries_stay_small() -> None:
    subject, shape = codec("rvq-2+2:ls:center"), (4, 24_000, 128)
    x = mx.random.normal(shape)
    mx.eval(x)
    size = subject.nbytes(shape, x.dtype)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    parts = subject.encode(x)
    # Codes twice (blocks, then joined) and some ten float32 temporaries of a block.
    assert mx.get_peak_memory() - before < 2 * size + 12 * 4 * _base.BLOCK_VALUES
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decoded = subject.decode(parts, shape, mx.float32)
    assert mx.get_peak_memory() - before < decoded.nbytes + 12 * 4 * _base.BLOCK_VALUES


# --- raw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_keeps_every_bit_pattern(dtype: mx.Dtype) -> None:
    words = np.arange(1 << 16, dtype=np.uint32)
    pattern = mx.array(words.astype(np.uint16)) if dtype.size == 2 else mx.array(words * 65537 + 11)
    x = pattern.view(dtype).reshape(4, -1, 64)
    decoded = Raw().decode(Raw().encode(x), x.shape, dtype)
    assert np.array_equal(bits_of(decoded), bits_of(x))


# --- rvq and rabitq against the oracle


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("spec", ROTATED)
def test_codes_scales_and_values_agree_with_the_oracle(spec: str, dim: int) -> None:
    subject, x = codec(spec), sample((2, 13, dim), seed=dim)
    assert isinstance(subject, RotatedCodec)
    parts = subject.encode(x)
    mean = mean_of(parts)
    if mean is not None:
        # One rounding to bfloat16 (2**-8) of a float32 sum.
        np.testing.assert_allclose(mean, numpy64(x).mean(axis=1), rtol=2**-8 + 1e-5, atol=1e-6)
    expected = oracle.encode(numpy64(x), subject.codebooks, subject.scale, mean, subject.seed)
    codes = [oracle.unpack(np.array(parts[part]), bits, dim) for part, bits in zip(subject.code_parts, subject.bits, strict=True)]
    scale, centred = scale_and_centred(parts)
    sure = (scale > 0) & (expected.doubt > TIE)
    assert np.array_equal(centred[expected.doubt > TIE], expected.centred[expected.doubt > TIE] | (mean is None))
    sure_values = np.broadcast_to(sure[..., None], x.shape)
    for got, wanted, margin in zip(codes, expected.codes, expected.margins, strict=True):
        sure_values = sure_values & (margin > TIE)
        assert np.array_equal(got[sure_values], wanted[sure_values])
    assert sure_values.mean() > 0.8  # the rest are the rows of zeros
    rows = np.all(sure_values, axis=-1)
    np.testing.assert_allclose(scale[rows], expected.scale[rows], rtol=2**-8 + 1e-5)  # one rounding to bfloat16

    decoded = numpy64(subject.decode(parts, x.shape, mx.float32))
    wanted = oracle.decode(codes, subject.codebooks, scale, centred, mean, subject.seed)
    # float32: a few roundings per stage of the transform, relative to the row.
    np.testing.assert_allclose(decoded, wanted, rtol=0, atol=4e-6 * np.abs(wanted).max())
    assert np.abs(decoded - wanted).max() <= 4e-6 * max(1.0, np.abs(wanted).max())


def test_the_mean_is_over_all_tokens() -> None:
    x = np.random.default_rng(0).standard_normal((2, 10_000, 4)).astype(np.float32) + np.linspace(0, 3, 10_000, dtype=np.float32)[:, None]
    mean = mean_of(codec("rvq-1:ls:center").encode(mx.array(x)))
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(axis=1), rtol=2**-8 + 1e-5)  # one rounding to bfloat16


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16), ids=str)
def test_half_precision_inputs_code_as_their_float32_values(spec: str, dtype: mx.Dtype) -> None:
    subject, x = codec(spec), sample((2, 40, 64), dtype)
    parts = subject.encode(x)
    assert same_parts(parts, subject.encode(x.astype(mx.float32)))
    wide = subject.decode(parts, x.shape, mx.float32)
    assert same_parts({"x": subject.decode(parts, x.shape, dtype)}, {"x": wide.astype(dtype)})


@pytest.mark.parametrize("dim", (*DIMS, 7, 134, 512))
def test_rotation_is_the_oracles_and_orthogonal(dim: int) -> None:
    x = np.random.default_rng(dim).standard_normal((5, dim)).astype(np.float32)
    y = rotate(mx.array(x), seed=3)
    matrix = oracle.rotation(dim, 3)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-12)
    np.testing.assert_allclose(np.array(y), x @ matrix.T, atol=3e-6)
    np.testing.assert_allclose(np.array(unrotate(y, seed=3)), x, atol=3e-6)
    assert np.abs(matrix).max() <= math.sqrt(2 / dim) + 1e-12


def test_signs_come_from_splitmix64() -> None:
    # Vectors of the generator's reference implementation (seeds 1234567 and 0).
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert splitmix64((1 << 64) - 1, 70) == oracle.splitmix64((1 << 64) - 1, 70)
    assert "".join("-+"[s > 0] for s in signs(32, seed=1)) == "---++---+-+-+-++----++++++--+---"


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim", (1, 2, 7, 8, 36, 62, 80, 576))
def test_packing(bits: int, dim: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (3, 5, dim)).astype(np.uint8)
    packed = pack(mx.array(codes), bits)
    assert np.array_equal(np.array(packed), oracle.pack(codes, bits))
    assert np.array_equal(np.array(unpack(packed, bits, dim)), codes)
    assert np.array_equal(oracle.unpack(np.array(packed), bits, dim), codes)
    codebook = tuple(float(v) for v in np.sort(rng.standard_normal(1 << bits).astype(np.float32)))
    assert np.array_equal(np.array(lookup(packed, codebook, dim)), np.asarray(codebook, np.float32)[codes])


# --- numbers that break others


@pytest.mark.parametrize("spec", (*ROTATED, *GRIDS, *QJL))
def test_zero_rows_decode_to_zero(spec: str) -> None:
    x = sample((2, 13, 64))
    decoded = codec(spec).decode(codec(spec).encode(x), x.shape, x.dtype)
    assert bool(mx.all(decoded[:, 2] == 0).item())
    zeros = mx.zeros((1, 3, 64))
    assert bool(mx.all(codec(spec).decode(codec(spec).encode(zeros), zeros.shape, zeros.dtype) == 0).item())


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("size", (1e-30, 1e-6, 65504.0, 1e6, 1e30))
def test_error_is_relative_at_any_size(spec: str, size: float) -> None:
    subject, x = codec(spec), mx.random.normal((2, 50, 64), key=mx.random.key(4))
    decoded, base = (subject.decode(subject.encode(scaled), x.shape, mx.float32) for scaled in (x * size, x))
    error, usual = (numpy64(d) / factor - numpy64(x) for d, factor in ((decoded, size), (base, 1.0)))
    # bfloat16 scales and means round by up to 2**-8 of a value, elsewhere for each size.
    assert np.linalg.norm(error) == pytest.approx(np.linalg.norm(usual), rel=0.05, abs=2**-8 * np.linalg.norm(numpy64(x)))


@pytest.mark.parametrize("spec", LOSSY)
def test_float16_results_stay_finite(spec: str) -> None:
    x = mx.where(mx.random.bernoulli(0.5, (2, 30, 64), key=mx.random.key(1)), 65504.0, -65504.0).astype(mx.float16)
    assert bool(mx.all(mx.isfinite(codec(spec).decode(codec(spec).encode(x), x.shape, x.dtype))).item())


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_values_that_are_not_finite_are_refused_with_their_places(spec: str, dtype: mx.Dtype, value: float) -> None:
    x = np.zeros((2, 5, 64), np.float32)
    x[1, 3, 17] = x[0, 4, 63] = value
    with pytest.raises(ValueError, match=r"2 of 640 values .*\(head 0, token 4, dim 63\).*\(head 1, token 3, dim 17\).*--codec raw"):
        codec(spec).encode(mx.array(x).astype(dtype))


def test_a_row_that_is_the_mean_and_a_row_far_from_it() -> None:
    """A sink: its row is not like the others. Centred on the mean it would lose more than it has."""
    x = np.full((1, 64, 64), 8.0, np.float32) + np.random.default_rng(0).standard_normal((1, 64, 64)).astype(np.float32)
    x[0, 0] = np.random.default_rng(1).standard_normal(64) * 0.01
    subject = codec("rvq-2+2:ls:center")
    parts = subject.encode(mx.array(x))
    error = np.array(subject.decode(parts, x.shape, mx.float32)) - x
    assert scale_and_centred(parts)[1].tolist() == [[False] + [True] * 63]
    assert (error[0, 0] ** 2).mean() < 0.03 * 0.01**2
    assert (error[0, 1:] ** 2).mean() < 0.03


# --- theory


@pytest.mark.parametrize("bits", ((1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (3, 3), (4, 4)))
def test_error_on_gaussian_rows_is_the_tables(bits: tuple[int, ...]) -> None:
    subject = Rvq.design(*bits, scale="norm", center=False)
    x = mx.random.normal((1, 1000, 1024), key=mx.random.key(5))
    x = x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True))
    measured = float(mx.mean(mx.square(x - subject.decode(subject.encode(x), x.shape, x.dtype))).item())
    # A million values; the tails, which carry much of a fine table's error (most of it with two stages), are few, and on a sphere
    # of 1024 dimensions a little lighter than a Gaussian's. The scale is exactly 1.
    assert measured == pytest.approx(oracle.gaussian_mse(subject.codebooks), rel=0.03 * len(bits))


@pytest.mark.parametrize(
    ("spec", "factor"),
    (
        ("rvq-1:unbiased:nocenter", 1.0),
        ("rabitq:unbiased:nocenter", 1.0),
        ("rabitq:ls:nocenter", 2 / math.pi),
        ("rvq-2+2:unbiased:nocenter", 1.0),
    ),
)
def test_inner_products_average_to_the_true_one(spec: str, factor: float) -> None:
    """Over rotations <w, x^> = <w, x>; least squares shrinks one bit by 2 / pi."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 1, 128))
    w = x[0, 0] + 2 * rng.standard_normal(128)
    estimates = []
    for seed in range(400):
        subject = codec(spec.split(":seed")[0] + f":seed={seed}")
        array = mx.array(x.astype(np.float32))
        estimates.append(float(np.array(subject.decode(subject.encode(array), array.shape, mx.float32))[0, 0] @ w))
    standard_error = np.std(estimates) / math.sqrt(len(estimates))
    # The least-squares factor itself varies by about 1/sqrt(D) per row.
    assert np.mean(estimates) == pytest.approx(factor * float(x[0, 0] @ w), abs=4 * standard_error + 0.005 * float(x[0, 0] @ x[0, 0]))
    assert standard_error < 0.06 * float(x[0, 0] @ x[0, 0])


# --- specs


@pytest.mark.parametrize(
    "spec",
    (
        "raw",
        "rvq-2+2",
        "rvq-4",
        "rabitq",
        "rvq-2+2,sink=0,recent=0",
        "rvq-4,sink=0",
        "raw,sink=4",
        "k=rabitq,v=rvq-2+2,sink=2,recent=8,frame=pre",
        "k=raw,v=rvq-4",
        "k=rvq-2+2:unbiased:seed=9,v=rvq-2+2:ls:nocenter",
        "rabitq,frame=post",
    ),
)
def test_spec_strings_round_trip(spec: str) -> None:
    plan = parse_codec(spec)
    assert plan.spec() == spec
    assert parse_codec(plan.spec()) == plan
    full = CodecPlan(
        parse_codec(f"k={plan.k.spec()},v=raw").k, parse_codec(f"k=raw,v={plan.v.spec()}").v, plan.sink, plan.recent, plan.frame
    )
    assert full == plan


def test_a_lossy_codec_keeps_some_rows_exact_where_its_spec_does_not_say() -> None:
    for spec, exact, short, full in (
        ("raw", (0, 0), "raw", "raw"),
        ("k=raw,v=raw,recent=3", (0, 3), "raw,recent=3", "raw,recent=3"),
        ("rvq-4", (4, 32), "rvq-4", "rvq-4,sink=4,recent=32"),
        ("rvq-4,sink=4,recent=32", (4, 32), "rvq-4", "rvq-4,sink=4,recent=32"),
        ("k=raw,v=rvq-4,sink=0", (0, 32), "k=raw,v=rvq-4,sink=0", "k=raw,v=rvq-4,sink=0,recent=32"),
        ("k=rvq-4,v=raw,recent=5", (4, 5), "k=rvq-4,v=raw,recent=5", "k=rvq-4,v=raw,sink=4,recent=5"),
        ("tc-2,sink=0,recent=0", (0, 0), "tc-2,sink=0,recent=0", "tc-2,sink=0,recent=0"),
    ):
        plan = parse_codec(spec)
        assert ((plan.sink, plan.recent), plan.spec(), plan.full_spec()) == (exact, short, full)
        assert parse_codec(short) == parse_codec(full) == plan


def test_a_codec_may_be_overridden_for_one_role() -> None:
    assert parse_codec("rvq-2+2,k=raw") == parse_codec("k=raw,v=rvq-2+2")


@pytest.mark.parametrize(
    ("spec", "message"),
    (
        ("", "no codec ''"),
        ("zip", "no codec 'zip'; there are raw"),
        ("rvq", "rvq-A"),
        ("rvq-9", "1..8"),
        ("rvq-5+4", "at most 8"),
        ("rvq-2+2:fast", "unknown option 'fast'"),
        ("rvq-2+2:seed=-1", "unknown option"),
        ("rvq-2+2:seed=9223372036854775808", "unknown option"),
        ("raw:ls", "no codec 'raw:ls'"),
        ("raw,raw", "two codecs"),
        ("k=raw", "no codec for values"),
        ("v=raw", "no codec for keys"),
        ("raw,sink=4,sink=5", "sink= stands twice"),
        ("raw,sink=-4", "whole number"),
        ("raw,frame=mid", "post or pre"),
        ("raw,level=3", "unknown field 'level'"),
    ),
)
def test_wrong_specs_say_what_exists(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_codec(spec)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"codebooks": None}, "codebooks"),
        ({"codebooks": []}, "codebooks"),
        ({"codebooks": [[0.0, 1.0]] * 3}, "codebooks"),
        ({"codebooks": [[0.0, 1.0, 2.0]], "bits": [1]}, r"codebooks\[0\]"),
        ({"codebooks": [[1.0, 1.0]], "bits": [1]}, "ascending"),
        ({"codebooks": [[0.0, math.inf]], "bits": [1]}, "finite"),
        ({"codebooks": [[0.0, math.nan]], "bits": [1]}, "finite"),
        ({"codebooks": [[0.0, True]], "bits": [1]}, "finite"),
        ({"codebooks": [list(range(512))], "bits": [9]}, r"codebooks\[0\]"),
        ({"bits": [2, 3]}, "bits"),
        ({"rotation": "qr"}, "rotation"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
        ({"scale": "max"}, "scale"),
        ({"scale": ["ls"]}, "scale"),
        ({"center": 1}, "center"),
    ),
)
@pytest.mark.parametrize("name", ("rvq", "rabitq"))
def test_impossible_params_are_refused(name: str, change: dict, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        CODECS[name].from_params(codec("rvq-2+2").to_params() | change)


# --- golden files


@pytest.mark.parametrize("name", golden.CASES)
def test_golden(name: str) -> None:
    shape, dtype = golden.shape_and_dtype(name)
    with np.load(Path(golden.__file__).parent / f"{name}.npz") as stored:
        file = dict(stored)
    parts = {key.removeprefix("part_"): mx.array(array) for key, array in file.items() if key.startswith("part_")}
    subject = CODECS[name.split("/")[0]].from_params(json.loads(str(file["params"])))
    assert subject == golden.codec_of(name)
    assert subject.to_params() == json.loads(str(file["params"]))

    def live(values: np.ndarray) -> mx.array:
        return mx.array(values).view(dtype) if dtype == mx.bfloat16 else mx.array(values)

    decoded, frozen = subject.decode(parts, shape, dtype), live(file["decoded"])
    # Another BLAS or device may sum in another order: float32 rounding, then one rounding to the dtype.
    step = {mx.float32: 0.0, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
    np.testing.assert_allclose(numpy64(decoded), numpy64(frozen), rtol=step, atol=2e-6 * float(np.abs(numpy64(frozen)).max()))
    again = subject.encode(live(file["x"]))
    for part, array in parts.items():
        assert np.array_equal(golden.as_numpy(again[part]), np.array(array)), part
