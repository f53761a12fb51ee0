"""commvq: decoding against a float64 version written from formats/SPEC.md, scores from codes, recodes that leave every tensor byte."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.container import open_container
from formats.errors import ManifestError
from tests.library import saved, tiny
from veloxquant_mlx.allocators.planes import allocate, distortions, split
from veloxquant_mlx.codecs import CODECS, parse_codec
from veloxquant_mlx.codecs._base import BLOCK_VALUES
from veloxquant_mlx.codecs.commvq import CommVq
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec


def keys(shape: tuple[int, int, int], seed: int = 0) -> mx.array:
    """Rows around a mean, entries of very different spread, the first row near zero as a sink's is."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1, shape[2]))) + 4 * rng.standard_normal((shape[0], 1, shape[2]))
    x[:, :1] *= 0.01
    return mx.array(x.astype(np.float32))


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def oracle(codec: CommVq, parts: dict[str, mx.array], shape: tuple[int, int, int]) -> np.ndarray:
    """Decoded rows, bit by bit."""
    heads, tokens, dim = shape
    dims = codec.dims or dim
    rotary = list(range(codec.first, codec.first + dims))
    left = [i for i in range(dim) if i not in rotary]
    pairs = [(rotary[i], rotary[i + dims // 2]) for i in range(dims // 2)] + [
        (left[i], left[i + len(left) // 2]) for i in range(len(left) // 2)
    ]
    table, gain = (f64(parts[part]) @ np.array([1, 1j]) for part in ("table", "gain"))
    stream = np.unpackbits(np.array(parts["codes"]), axis=-1, bitorder="little")
    x = np.repeat(f64(parts["mean"])[:, None], tokens, axis=1)
    for h in range(heads):
        at = 1
        for plane, ((a, b), width) in enumerate(zip(pairs, np.array(parts["widths"])[h].astype(int), strict=True)):
            code = (stream[h, :, at : at + width].astype(int) << np.arange(width)).sum(axis=-1)
            z = gain[h, plane] * table[2**width - 2 + code] if width else np.zeros(tokens, complex)
            x[h, :, a] += z.real
            x[h, :, b] += z.imag
            at += width
        assert not stream[h, :, at:].any()
        x[h, stream[h, :, 0] == 1] = f64(parts["exact"])[h]
    return x


CASES = (CommVq(1.0), CommVq(2.0), CommVq(2.25, 4, 16), CommVq(3.5, 0, 20), CommVq(0.5))


@pytest.mark.parametrize("codec", CASES, ids=str)
def test_decoded_rows_are_the_specifications(codec: CommVq) -> None:
    x = keys((2, 150, 36))
    parts = codec.encode(x)
    wanted = oracle(codec, parts, x.shape)
    # float32: one complex product and one sum.
    np.testing.assert_allclose(f64(codec.decode(parts, x.shape, mx.float32)), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("codec", CASES, ids=str)
def test_every_code_is_the_nearest(codec: CommVq) -> None:
    x = keys((2, 150, 36), seed=1)
    parts = codec.encode(x)
    table = f64(parts["table"]) @ np.array([1, 1j])
    gain = f64(parts["gain"]) @ np.array([1, 1j])
    a, b = codec.planes(36)
    centred, decoded = (f64(y) - f64(parts["mean"])[:, None] for y in (x, codec.decode(parts, x.shape, mx.float32)))
    z, chosen = (y[..., a] + 1j * y[..., b] for y in (centred, decoded))
    coded = np.array(parts["codes"])[..., 0] & 1 == 0
    assert (~coded).sum(axis=1).tolist() == [1, 1]
    for h, plane in np.ndindex(2, 18):
        width = int(np.array(parts["widths"])[h, plane])
        words = table[2**width - 2 : 2 ** (width + 1) - 2] if width else np.zeros(1)
        best = np.abs(z[h, :, plane, None] / gain[h, plane] - words).min(axis=1)
        got = np.abs(z[h, :, plane] - chosen[h, :, plane]) / abs(gain[h, plane])
        # float32 distances, of values a few hundred gains from zero at most.
        np.testing.assert_allclose(got[coded[h]], best[coded[h]], atol=2e-5)


def test_the_row_near_zero_is_exact() -> None:
    x = keys((3, 64, 32))
    parts = CommVq(1.0).encode(x)
    decoded = CommVq(1.0).decode(parts, x.shape, mx.float32)
    assert np.array_equal(np.array(decoded[:, 0]), np.array(x[:, 0].astype(mx.bfloat16).astype(mx.float32)))


@pytest.mark.parametrize(("bits", "mse"), ((1.0, 0.3634), (2.0, 0.1175), (3.0, 0.03455)))
def test_error_on_gaussian_rows_is_below_lloyd_max(bits: float, mse: float) -> None:
    """A plane's table is no worse than two scalar ones (Max 1960), but for the bit that is the flag's."""
    x = mx.random.normal((1, 4000, 128), key=mx.random.key(0))
    error = float(mx.mean(mx.square(CommVq(bits).decode(CommVq(bits).encode(x), x.shape, x.dtype) - x)).item())
    assert 4.0**-bits < error < mse * 1.02


def test_bits_go_where_the_spread_is() -> None:
    x = np.random.default_rng(0).standard_normal((1, 500, 32)).astype(np.float32)
    x[..., 3] *= 30
    x[..., 9] = 5.0
    x[..., 25] = -1.0
    parts = CommVq(2.0).encode(mx.array(x))
    widths = np.array(parts["widths"])[0]
    assert widths[3] == widths.max() == 6 and widths[9] == 0 and widths.sum() == 63
    decoded = np.array(CommVq(2.0).decode(parts, x.shape, mx.float32))
    assert np.array_equal(decoded[..., 9], x[..., 9]) and np.array_equal(decoded[..., 25], x[..., 25])


@pytest.mark.parametrize("angle", (0.0, 0.4, math.pi / 2, 2.5))
def test_gains_point_where_a_plane_spreads(angle: float) -> None:
    rng = np.random.default_rng(0)
    z = (rng.standard_normal((1, 900, 16)) + 0.1j * rng.standard_normal((1, 900, 16))) * np.exp(1j * angle)
    gain = f64(CommVq(1.0).encode(mx.array(np.concatenate([z.real, z.imag], axis=-1).astype(np.float32)))["gain"]) @ np.array([1, 1j])
    assert np.abs(np.sin(np.angle(gain) - angle)).max() < 0.02  # 900 rows, bfloat16
    np.testing.assert_allclose(np.abs(gain), math.sqrt(1.01 / 2), rtol=0.1)


# --- the planes commute


ROPES = (
    (CommVq(2.0), RopeSpec("default", 32, base=10000.0)),
    (CommVq(1.0), RopeSpec("default", 32, base=500000.0, scale=0.25)),
    (CommVq(2.0), RopeSpec("yarn", 32, base=10000.0, magnitude=1.25)),
    (CommVq(2.0, 0, 16), RopeSpec("default", 16, base=10000.0)),
    (CommVq(2.0), None),
)


@pytest.mark.parametrize(("codec", "rope"), ROPES, ids=str)
@pytest.mark.parametrize("start", (0, 100_000))
def test_scores_from_codes_are_those_of_decoded_keys(codec: CommVq, rope: RopeSpec | None, start: int) -> None:
    x = keys((2, 90, 32))
    parts = codec.encode(x)
    queries = mx.array(np.random.default_rng(3).standard_normal((2, 3, 32)).astype(np.float32))
    positions = start + np.arange(90)
    got = codec.scores(parts, x.shape, queries, positions, rope)
    decoded = codec.decode(parts, x.shape, mx.float32)
    if rope is not None:
        decoded = rotate(decoded, positions, None, rope, method="exact")
    wanted = f64(queries) @ f64(decoded).swapaxes(1, 2)
    # float32 sums of 16 products; angles are float64 on both sides.
    np.testing.assert_allclose(f64(got), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_scores_refuse_other_planes_and_shapes() -> None:
    codec, x = CommVq(2.0, 0, 16), keys((2, 9, 32))
    parts = codec.encode(x)
    with pytest.raises(ValueError, match=r"\(0, 16\), but RoPE is on \(0, 32\)"):
        codec.scores(parts, x.shape, mx.zeros((2, 1, 32)), np.arange(9), RopeSpec("default", 32, base=1e4))
    with pytest.raises(ValueError, match=r"positions \(9,\)"):
        codec.scores(parts, x.shape, mx.zeros((2, 1, 32)), np.arange(8), None)
    with pytest.raises(ValueError, match=r"queries must be \(2, G, 32\)"):
        codec.scores(parts, x.shape, mx.zeros((4, 1, 32)), np.arange(9), None)


@pytest.mark.parametrize("change", ({"rope_theta": 300000.0}, {"shift": 1000}), ids=str)
def test_recode_leaves_every_tensor_byte(change: dict, tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv", 40, codec="commvq-2,sink=0,recent=0")
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", **change)
    assert report.quality["reencoded"] == []
    with open_container(tmp_path / "a.kv") as a, open_container(tmp_path / "b.kv") as b:
        assert a.manifest.layers[0].k.segments == b.manifest.layers[0].k.segments
        assert {n: t.blake3 for n, t in a.tensors.items()} == {n: t.blake3 for n, t in b.tensors.items()}
    with kvtool.open(tmp_path / "a.kv") as a, kvtool.open(tmp_path / "b.kv") as b:
        for layer, info in enumerate(a.manifest.layers):
            old, new = (RopeSpec.from_json(f.manifest.ropes[f.manifest.layers[layer].k.rope]) for f in (a, b))
            was, now = a.state(layer), b.state(layer)
            positions = np.concatenate([np.arange(*pair) for pair in info.positions])
            turned = rotate(was.k, positions, old, new, target_positions=positions + change.get("shift", 0))
            # The file's keys are rotated once from the codes, `turned` twice: float32 rounding of values of size 4.
            np.testing.assert_allclose(f64(now.k), f64(turned), rtol=0, atol=5e-6)
            assert not np.allclose(f64(now.k), f64(was.k), atol=0.1)


@pytest.mark.parametrize("family", ("phi3", "glm4"))
def test_partly_rotated_rows_get_the_ropes_planes(family: str, tmp_path: Path) -> None:
    saved(tiny(family), tmp_path / "a.kv", 24, codec="commvq-2,sink=0,recent=0")
    with kvtool.open(tmp_path / "a.kv") as archive:
        role = archive.manifest.layers[0].k
        rope = RopeSpec.from_json(archive.manifest.ropes[role.rope])
        params = archive.manifest.codecs[role.segments[0].codec].params
        assert rope.dims < role.dim and (params["first"], params["dims"]) == (rope.first, rope.dims)


# --- tables and widths


def test_tables_follow_the_points() -> None:
    points = np.repeat([3 + 1j, -2 + 1j, -2 - 5j, 3 - 5j], 50)
    tables = split(points, 2)
    assert sorted(np.round(tables[1], 9).tolist(), key=str) == sorted([3 + 1j, -2 + 1j, -2 - 5j, 3 - 5j], key=str)
    assert distortions(points[None, :, None], tables)[2].item() == pytest.approx(0, abs=1e-12)


def test_bits_are_handed_out_by_what_they_save() -> None:
    cost = np.array([8.0, 4, 2, 1])[:, None, None] * np.array([[4.0, 1.0, 0.1]])
    assert allocate(cost, 4).tolist() == [[3, 1, 0]]
    assert allocate(cost, 100).tolist() == [[3, 3, 3]]
    # Two bits that only pay together, against one that pays less than either does then.
    assert allocate(np.array([[8.0, 8, 0], [3, 0, 0]]).T[:, None], 2).tolist() == [[2, 0]]


# --- refusals


@pytest.mark.parametrize("spec", ("commvq", "commvq-0", "commvq-4", "commvq-2.3", "commvq-2:dims=3", "commvq-2:first=4", "commvq-2:ls"))
def test_wrong_specs(spec: str) -> None:
    with pytest.raises(ValueError, match=r"commvq-N|unknown option|dims must"):
        parse_codec(f"k={spec},v=raw")


def test_specs_round_trip_and_values_are_rvq() -> None:
    for spec in ("commvq-2", "k=commvq-2.25:first=0:dims=16,v=raw,sink=0"):
        assert parse_codec(spec).spec() == spec
    assert parse_codec("commvq-1").v == parse_codec("rvq-4").v


@pytest.mark.parametrize(
    "change",
    (
        {"bits": 2.1},
        {"bits": math.nan},
        {"bits": 100},
        {"bits": True},
        {"table_bits": 7},
        {"first": -1},
        {"first": None},
        {"dims": 3},
        {"dims": 1 << 30},
        {"dims": 0},
    ),
    ids=str,
)
def test_impossible_params_are_refused(change: dict) -> None:
    with pytest.raises(ManifestError, match=next(iter(change))):
        CODECS["commvq"].from_params(CommVq(2.0).to_params() | change)


def test_impossible_widths_are_refused() -> None:
    codec, x = CommVq(2.0), keys((2, 9, 32))
    parts = codec.encode(x)
    for widths in (mx.full((2, 16), 7, mx.uint8), mx.full((2, 16), 4, mx.uint8)):
        with pytest.raises(ManifestError, match="widths"):
            codec.decode(parts | {"widths": widths}, x.shape, mx.float32)


def test_planes_beyond_the_row_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 32 does not hold"):
        CommVq(2.0, 8, 32).encode(keys((1, 4, 32)))
    assert not CommVq(2.0).takes(7) and CommVq(2.0).takes(2) and not CommVq(2.0, 8, 32).takes(32)


@pytest.mark.parametrize("size", (1e-30, 1e-6, 1e6, 1e30))
def test_error_is_relative_at_any_size(size: float) -> None:
    x = keys((2, 50, 64))
    error, usual = (f64(CommVq(2.0).decode(CommVq(2.0).encode(x * s), x.shape, mx.float32)) / s - f64(x) for s in (size, 1.0))
    # bfloat16 rounds means and gains elsewhere for each size.
    assert np.linalg.norm(error) == pytest.approx(np.linalg.norm(usual), rel=0.1)


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    x = np.zeros((1, 5, 64), np.float32)
    x[0, 3, 17] = value
    with pytest.raises(ValueError, match=r"1 of 320 values.*token 3, dim 17"):
        CommVq(2.0).encode(mx.array(x))


def test_few_and_equal_rows_are_kept() -> None:
    for x in (mx.zeros((2, 7, 64)), mx.full((2, 7, 64), 0.75), keys((2, 1, 64)), keys((2, 2, 64))):
        decoded = CommVq(2.0).decode(CommVq(2.0).encode(x), x.shape, mx.float32)
        np.testing.assert_allclose(np.array(decoded), np.array(x), rtol=2**-7, atol=2**-7)  # bfloat16


def test_temporaries_stay_small() -> None:
    codec, shape = CommVq(2.0), (4, 24_000, 128)
    x = mx.random.normal(shape, key=mx.random.key(0))
    mx.eval(x)
    size = codec.nbytes(shape, x.dtype)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    parts = codec.encode(x)
    # Codes twice (blocks, then joined) and some sixteen float32 temporaries of a block.
    assert mx.get_peak_memory() - before < 2 * size + 16 * 4 * BLOCK_VALUES
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decoded = codec.decode(parts, shape, mx.float32)
    assert mx.get_peak_memory() - before < decoded.nbytes + 16 * 4 * BLOCK_VALUES
