"""commvq-N:product: rows against float64 versions of formats/SPEC.md, the parts as a kernel's operands, recodes of the header alone."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.container import open_container
from formats.errors import ManifestError
from kvtool.hostile_rows import CASES as HOSTILE
from kvtool.hostile_rows import CORRELATED, DIM, _row
from tests.library import digests, f64, ids, saved, tiny
from veloxquant_mlx.codecs import CODECS, parse_codec
from veloxquant_mlx.codecs._base import BLOCK_VALUES
from veloxquant_mlx.codecs.commvq_product import CommVqProduct
from veloxquant_mlx.metal import comm_vq_decode_metal
from veloxquant_mlx.transfer.rope_spec import RopeSpec

CASES = (CommVqProduct(4), CommVqProduct(8), CommVqProduct(4, 4, 16), CommVqProduct(8, 0, 20))


def keys(shape: tuple[int, int, int], seed: int = 0) -> mx.array:
    """Rows around a mean, entries of very different spread, the first row near zero as a sink's is."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1, shape[2]))) + 4 * rng.standard_normal((shape[0], 1, shape[2]))
    x[:, :1] *= 0.01
    return mx.array(x.astype(np.float32))


def order(codec: CommVqProduct, dim: int) -> list[int]:
    """Entries of a row in the order of its words."""
    dims = codec.dims or dim
    rotary = list(range(codec.first, codec.first + dims))
    left = [i for i in range(dim) if i not in rotary]
    return rotary[: dims // 2] + left[: len(left) // 2] + rotary[dims // 2 :] + left[len(left) // 2 :]


def oracle(codec: CommVqProduct, parts: dict[str, mx.array], shape: tuple[int, int, int]) -> np.ndarray:
    """Decoded rows, entry by entry."""
    codes, words, x = np.array(parts["codes"]), f64(parts["words"]), np.zeros(shape)
    for at, entry in enumerate(order(codec, shape[2])):
        for h in range(shape[0]):
            x[h, :, entry] = words[h, at // codec.sub, codes[h, :, at // codec.sub], at % codec.sub]
    return x


def turned(x: np.ndarray, positions: np.ndarray, rope: RopeSpec | None) -> np.ndarray:
    """Rows after RoPE, half-split; frequencies as float32 holds them."""
    if rope is None:
        return x
    half, first = rope.dims // 2, rope.first
    angle = positions[:, None] * np.float32(rope.frequencies).astype(np.float64)
    a, b = x[..., first : first + half], x[..., first + half : first + 2 * half]
    y = x.copy()
    y[..., first : first + half] = rope.magnitude * (a * np.cos(angle) - b * np.sin(angle))
    y[..., first + half : first + 2 * half] = rope.magnitude * (a * np.sin(angle) + b * np.cos(angle))
    return y


@pytest.mark.parametrize("codec", CASES, ids=str)
@pytest.mark.parametrize("tokens", (1, 40, 300))
def test_decoded_rows_are_the_specifications(codec: CommVqProduct, tokens: int) -> None:
    x = keys((2, tokens, 24))
    parts = codec.encode(x)
    assert np.array_equal(f64(codec.decode(parts, x.shape, mx.float32)), oracle(codec, parts, x.shape))  # a gather


@pytest.mark.parametrize("codec", CASES, ids=str)
def test_every_code_is_the_nearest(codec: CommVqProduct) -> None:
    x = keys((2, 300, 24), seed=1)
    parts = codec.encode(x)
    y = f64(x)[..., order(codec, 24)].reshape(2, 300, -1, 1, codec.sub)
    distances = ((y - f64(parts["words"])[:, None]) ** 2).sum(axis=-1)
    got = np.take_along_axis(distances, np.array(parts["codes"]).astype(int)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(got, distances.min(axis=-1), rtol=1e-5, atol=1e-6)  # float32 distances of values up to 20
    assert len(np.unique(np.array(parts["codes"])[0, :, 0])) > 100


@pytest.mark.parametrize(("sub", "published"), ((4, 0.0989), (8, 0.3262)))
def test_error_on_gaussian_rows_is_k_means(sub: int, published: float) -> None:
    """k-means of 256 words comes to 0.0989 and 0.3262 on many samples; half of these rows were learnt from, 8 to a word."""
    x = 5 + mx.random.normal((1, 4000, 16), key=mx.random.key(0))
    codec = CommVqProduct(sub)
    error = float(np.mean((f64(codec.decode(codec.encode(x), x.shape, mx.float32)) - f64(x)) ** 2))
    assert 0.8 * published < error < 1.15 * published


def test_each_part_of_each_head_has_its_own_words() -> None:
    """A mean is in the words: heads far apart do not meet in one table, and a part that never changes is exact."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 400, 16)).astype(np.float32) + np.array([-500.0, 500.0], np.float32)[:, None, None]
    x[..., 4:8] = 0.75
    error = f64(CommVqProduct(4).decode(CommVqProduct(4).encode(mx.array(x)), x.shape, mx.float32)) - x
    assert np.array_equal(error[..., 4:8], np.zeros((2, 400, 4)))
    # 400 points on 256 words; float16 near 500 rounds by up to 1 / 8.
    assert (np.mean(error[..., 8:] ** 2, axis=(1, 2)) < 0.06).all()


def test_no_more_distinct_rows_than_words_are_all_kept() -> None:
    rows = np.array(keys((2, 250, 16)).astype(mx.float16).astype(mx.float32))
    x = mx.array(np.repeat(rows, 8, axis=1))
    for sub in (4, 8):
        assert np.array_equal(f64(CommVqProduct(sub).decode(CommVqProduct(sub).encode(x), x.shape, mx.float32)), f64(x))


# --- the parts are the kernel's operands


@pytest.mark.parametrize("sub", (4, 8))
def test_the_kernel_reads_the_parts_as_they_are(sub: int) -> None:
    codec, x, rope = CommVqProduct(sub), keys((2, 300, 64)), RopeSpec("default", 64, base=1e4)
    parts, positions = codec.encode(x), np.arange(1000, 1300)
    wanted = turned(oracle(codec, parts, x.shape), positions, rope)
    inv_freq = mx.array(np.float32(rope.frequencies))
    for h in range(2):
        codes, words = parts["codes"][h], parts["words"][h]
        got = comm_vq_decode_metal(codes, words, mx.array(positions.astype(np.int32)), inv_freq, 64 // sub, sub, 256)
        # One rounding to float16 is 2^-11 of the value; an angle good to 3e-7 moves entries of up to 60 by 2e-5.
        np.testing.assert_allclose(f64(got), wanted[h], rtol=2**-11, atol=3e-5)


PERIODS = tuple(float(np.float32(p)) for p in (*10000 ** (np.arange(15) / 16), math.inf))
ROPES = (
    (CommVqProduct(4), RopeSpec("default", 32, base=10000.0)),
    (CommVqProduct(8), RopeSpec("linear", 32, base=500000.0, scale=0.25)),
    (CommVqProduct(8), RopeSpec("llama3", 32, periods=PERIODS)),
    (CommVqProduct(4), RopeSpec("yarn", 32, periods=PERIODS, magnitude=1.25)),
    (CommVqProduct(4), RopeSpec("default", 32, "interleaved", base=10000.0)),
    (CommVqProduct(4, 0, 16), RopeSpec("default", 16, base=10000.0)),
    (CommVqProduct(8, 20, 12), RopeSpec("yarn", 12, base=10000.0, magnitude=0.5, first=20)),
    (CommVqProduct(4), None),
)


@pytest.mark.parametrize(("codec", "rope"), ROPES, ids=str)
@pytest.mark.parametrize("start", (-3, 100_000))
def test_keys_from_the_kernel_are_decoded_keys_rotated(codec: CommVqProduct, rope: RopeSpec | None, start: int) -> None:
    x = keys((2, 280, 32))
    parts, positions = codec.encode(x), start + np.arange(280)
    got = codec.rotated_keys(parts, x.shape, positions, rope)
    assert got.dtype == mx.float16
    wanted = turned(oracle(codec, parts, x.shape), positions, rope)
    np.testing.assert_allclose(f64(got), wanted, rtol=2**-11, atol=3e-5)  # as above


def test_rotated_keys_refuse_other_entries_and_positions() -> None:
    codec, x = CommVqProduct(4, 0, 16), keys((2, 9, 32))
    parts, rope = codec.encode(x), RopeSpec("default", 16, base=1e4)
    with pytest.raises(ValueError, match=r"\(0, 16\), but RoPE is on \(0, 32\)"):
        codec.rotated_keys(parts, x.shape, np.arange(9), RopeSpec("default", 32, base=1e4))
    for positions in (np.arange(8), np.arange(9.0), np.arange(9) + (1 << 24), np.arange(9) - (1 << 24)):
        with pytest.raises(ValueError, match=r"positions must be \(9,\) integers below 16777216"):
            codec.rotated_keys(parts, x.shape, positions, rope)
    assert codec.rotated_keys(codec.encode(x[:, :0]), (2, 0, 32), np.arange(0), rope).shape == (2, 0, 32)


@pytest.mark.parametrize("family", ("llama", "phi3", "glm4"))
def test_a_files_parts_give_the_keys_that_a_load_gives(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    path = saved(model, tmp_path / "a.kv", 40, codec="commvq-2:product,sink=4,recent=5")
    restored = kvtool.load(path, model)
    with open_container(path) as reader:
        for info, cache in zip(reader.manifest.layers, restored.cache, strict=True):
            role = info.k
            rope = RopeSpec.from_json(reader.manifest.ropes[role.rope])
            (segment,) = [s for s in role.segments if reader.manifest.codecs[s.codec].id == "commvq-product"]
            codec = CODECS["commvq-product"].from_params(reader.manifest.codecs[segment.codec].params)
            assert isinstance(codec, CommVqProduct) and (codec.first, codec.dims or role.dim) == (rope.first, rope.dims)
            parts = {part: mx.array(np.array(reader.array(name))) for part, name in segment.tensors.items()}
            got = f64(codec.rotated_keys(parts, (role.heads, 31, role.dim), np.arange(4, 35), rope))
            if rope.pairing == "interleaved":
                at = np.arange(role.dim)
                at[rope.first : rope.first + rope.dims] = rope.first + np.arange(rope.dims).reshape(2, -1).T.reshape(-1)
                got = got[..., at]
            # The load's float32 angles are good to 1e-5 here.
            np.testing.assert_allclose(got, f64(cache.keys[0, :, 4:35]), rtol=2**-11, atol=2e-5 * np.abs(got).max())


@pytest.mark.parametrize("change", ({"rope_theta": 300000.0}, {"shift": 1000}), ids=str)
def test_recode_leaves_every_tensor_byte(change: dict, tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv", 40, codec="commvq-2:product,sink=0,recent=0")
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", **change)
    assert report.quality["reencoded"] == []
    assert digests(tmp_path / "a.kv") == digests(tmp_path / "b.kv")
    with kvtool.open(tmp_path / "a.kv") as a, kvtool.open(tmp_path / "b.kv") as b:
        assert a.manifest.layers[0].k.segments == b.manifest.layers[0].k.segments
        assert not np.allclose(f64(a.state(0).k), f64(b.state(0).k), atol=0.1)


def test_files_say_what_they_hold(tmp_path: Path) -> None:
    snapshot = kvtool.capture(tiny("llama"), ids(40))
    report = kvtool.save(snapshot, tmp_path / "a.kv", codec="commvq-1:product")
    with kvtool.open(tmp_path / "a.kv") as archive:
        assert {c.id for c in archive.manifest.codecs} == {"commvq-product", "rvq", "raw"}
        assert archive.manifest.layers[0].k.segments[1].frame == "pre"
    assert report.path == str(tmp_path / "a.kv")


# --- sizes, specs, params


def test_bits_are_those_said() -> None:
    # A byte a part and token; 256 words of 16 bits an entry for every head: 4096 / S bits a value.
    assert CommVqProduct(4).nbytes((2, 100, 64), mx.float16) == 2 * 100 * 16 + 2 * 64 * 256 * 2
    assert CommVqProduct(8).nbytes((2, 8192, 64), mx.float32) * 8 / (2 * 8192 * 64) == 1 + 4096 / 8192


def test_specs_round_trip_and_values_are_rvq() -> None:
    for spec in ("commvq-2:product", "commvq-1:product,sink=0", "k=commvq-2:product:first=4:dims=16,v=raw"):
        assert parse_codec(spec).spec() == spec
    assert parse_codec("commvq-2:product").k == CommVqProduct(4) and parse_codec("commvq-1:product").k == CommVqProduct(8)
    assert parse_codec("commvq-1:product").v == parse_codec("rvq-4").v
    assert CommVqProduct(4).for_rotary(0, 64, 64) == CommVqProduct(4) and CommVqProduct(4).for_rotary(8, 4, 64) == CommVqProduct(4, 8, 4)


@pytest.mark.parametrize(
    ("spec", "message"),
    (
        ("commvq:product", "N one of 1, 2"),
        ("commvq-3:product", "N one of 1, 2"),
        ("commvq-1.5:product", "N one of 1, 2"),
        ("commvq-2:product:product", "unknown option 'product'"),
        ("commvq-2:product:dims=8:dims=8", "each once"),
        ("commvq-2:product:carry", "unknown option 'carry'"),
        ("commvq-2:product:dims=3", "dims must be even"),
        ("commvq-2:product:dims=0", "dims must be even"),
        ("commvq-2:product:first=4", "first goes with it"),
        ("commvq-2:additive:product", "unknown options"),
    ),
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_codec(f"k={spec},v=raw")


@pytest.mark.parametrize(
    "change",
    (
        {"sub": 2},
        {"sub": 16},
        {"sub": True},
        {"sub": 4.0},
        {"sub": None},
        {"first": -1},
        {"first": None},
        {"first": 1 << 30},
        {"dims": 3},
        {"dims": 0},
        {"dims": 1 << 30},
        {"dims": "8"},
    ),
    ids=str,
)
def test_impossible_params_are_refused(change: dict) -> None:
    with pytest.raises(ManifestError, match=next(iter(change))):
        CODECS["commvq-product"].from_params(CommVqProduct(4).to_params() | change)


def test_head_dims() -> None:
    assert [dim for dim in range(26) if CommVqProduct(4).takes(dim)] == [4, 8, 12, 16, 20, 24]
    assert [dim for dim in range(26) if CommVqProduct(8, 4, 10).takes(dim)] == [16, 24]
    for codec, dim, message in ((CommVqProduct(8), 36, "a multiple of 8"), (CommVqProduct(4, 8, 32), 36, "at least 40, but got 36")):
        with pytest.raises(ValueError, match=message):
            codec.encode(keys((1, 4, dim)))
        with pytest.raises(ValueError, match=message):
            codec.decode({}, (1, 4, dim), mx.float32)


# --- rows that break others


def test_values_beyond_float16_and_not_finite_are_refused() -> None:
    x = np.zeros((1, 5, 64), np.float32)
    x[0, 3, 17] = -65600
    with pytest.raises(ValueError, match=r"values must be within 65504, .* but the largest is 65600; --codec rvq-4 stores them"):
        CommVqProduct(4).encode(mx.array(x))
    for value in (math.nan, math.inf):
        x[0, 3, 17] = value
        with pytest.raises(ValueError, match=r"1 of 320 values.*token 3, dim 17"):
            CommVqProduct(4).encode(mx.array(x))
    x[0, 3, 17] = 65504
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        assert bool(mx.all(mx.isfinite(CommVqProduct(4).decode(CommVqProduct(4).encode(mx.array(x)), x.shape, dtype))).item())


@pytest.mark.parametrize("case", [name for name in HOSTILE if name != CORRELATED])
def test_hostile_rows_are_held_or_refused(case: str) -> None:
    """As other codecs, but that words are float16: rows of 1e30 are refused, and of rows of 1e-30 nothing is left."""
    row = _row("commvq-2:product", case, 300, DIM)
    if case in ("one NaN", "x 1e30, bfloat16"):
        assert row.refused and ("NaN" in row.note or "within 65504" in row.note)
        return
    assert row.finite and not row.refused and row.k_error is not None
    if case == "x 1e-30, bfloat16":
        assert row.k_error == 1.0
    else:
        assert row.k_error == 0 if case == "zeros" else 0 < row.k_error < 0.1, row


@pytest.mark.parametrize("size", (1e-3, 1.0, 1e3))
def test_error_is_relative_at_usual_sizes(size: float) -> None:
    codec, x = CommVqProduct(4), keys((1, 400, 16))
    error, usual = (f64(codec.decode(codec.encode(x * s), x.shape, mx.float32)) / s - f64(x) for s in (size, 1.0))
    assert np.linalg.norm(error) == pytest.approx(np.linalg.norm(usual), rel=0.05)  # k-means may stop a round apart


def test_temporaries_stay_small() -> None:
    codec, shape = CommVqProduct(8), (4, 24_000, 16)
    x = mx.random.normal(shape, key=mx.random.key(0))
    mx.eval(x)
    size = codec.nbytes(shape, x.dtype)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    parts = codec.encode(x)
    # Codes twice (blocks, then joined), and some twenty float32 temporaries of a block: of a part's distances to every word.
    assert mx.get_peak_memory() - before < 2 * size + 24 * 4 * BLOCK_VALUES
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decoded = codec.decode(parts, shape, mx.float32)
    assert mx.get_peak_memory() - before < decoded.nbytes + 12 * 4 * BLOCK_VALUES
