"""Native decoding and RoPE at every SIMD level of this machine, against float64 and against MLX's path; the memory that results go to."""

import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from formats.container import open_container
from kvtool.archive import save
from kvtool.capturing import capture
from kvtool.model import LoadedModel
from kvtool.segment_work import stripped
from tests import codec_oracles as oracle
from tests.texts import text
from veloxquant_mlx import native
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs._base import DTYPES
from veloxquant_mlx.native import converting
from veloxquant_mlx.native.buffers import LEAST_BYTES, empty
from veloxquant_mlx.native.mapped import Mapped
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_angles import PAGE
from veloxquant_mlx.transfer.rope_spec import RopeSpec

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")

EPS = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.set_level(request.param)
    yield request.param
    native.set_level(before)


def floats(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


SPECS = ("rvq-4", "rvq-3:nocenter", "rvq-2+2", "rvq-8:ls", "rabitq", "rabitq-4", "affine-4", "affine-3:token:group=7")
# Float32 through a rotation of 512 entries: 9 sums, a scale and a mean, of rows of size 1.
CLOSE = 2e-6


def rows(dim: int, count: int) -> mx.array:
    return mx.array((np.random.default_rng(dim).standard_normal((2, count, dim)) + 1).astype(np.float32))


def rebuilt(codec: Any, parts: dict[str, mx.array], shape: tuple[int, int, int]) -> np.ndarray:
    """Rows of codes in float64, from the parts alone."""
    words = {name: np.array(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part) for name, part in parts.items()}
    real = {name: floats(part) for name, part in parts.items() if part.dtype == mx.bfloat16}
    if codec.id == "affine":
        code = oracle.unpack(words["codes"], codec.bits, shape[2])
        axis, size = (1, shape[1]) if codec.per == "channel" else (2, shape[2])
        step, zero = (np.take(real[side], np.arange(size) // codec.group, axis=axis) for side in ("scale", "zero"))
        return code * step + zero
    codes = [oracle.unpack(words[part], bits, shape[2]) for part, bits in zip(codec.code_parts, codec.bits, strict=True)]
    return oracle.decode(codes, codec.codebooks, np.abs(real["scale"]), words["scale"] < 0x8000, real.get("mean"), codec.seed)


def assert_decodes(codec: Any, parts: dict[str, mx.array], shape: tuple[int, int, int], dtype: mx.Dtype, given: Any = None) -> None:
    before = native.calls()
    found = codec.decode(given or parts, shape, dtype)
    assert native.calls() > before and found.dtype == dtype and found.shape == shape
    wanted = rebuilt(codec, parts, shape)
    error = EPS[dtype] * np.abs(wanted) + CLOSE * np.abs(wanted).max(initial=1.0)
    assert (np.abs(floats(found) - wanted) <= error).all()


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_those_of_float64(level: str, spec: str, dtype: mx.Dtype) -> None:
    codec = parse_codec(spec).k
    for dim, count in ((1, 3), (7, 1), (64, 40), (72, 33), (128, 300), (256, 9), (512, 5), (64, 0)):
        x = rows(dim, count)
        assert_decodes(codec, codec.encode(x), x.shape, dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_the_same_bits_at_every_level_and_close_to_mlx(spec: str) -> None:
    codec, before = parse_codec(spec).k, native.level()
    for dim in (64, 96, 128):
        x = rows(dim, 70)
        parts = codec.encode(x)
        with native.without():
            wanted = floats(codec.decode(parts, x.shape, mx.float32))
        found = []
        for name in native.levels():
            native.set_level(name)
            found.append(np.array(codec.decode(parts, x.shape, mx.float32)))
        native.set_level(before)
        assert all(np.array_equal(found[0].view(np.uint32), one.view(np.uint32)) for one in found)
        np.testing.assert_allclose(found[0], wanted, rtol=0, atol=CLOSE * np.abs(wanted).max())


@pytest.mark.parametrize("fault", ["a row late", "another mean", "a code's bit"])
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = parse_codec("rvq-4").k, rows(64, 40)
    parts = codec.encode(x)
    wrong = dict(parts)
    if fault == "a row late":
        real = converting.decoded
        monkeypatch.setattr(converting, "decoded", lambda *given, **more: mx.roll(real(*given, **more), 1, axis=1))
    elif fault == "another mean":
        wrong["mean"] = parts["mean"] * 1.01
    else:
        codes = np.array(parts["codes"])
        codes[1, 39, 31] ^= 0x10
        wrong["codes"] = mx.array(codes)
    with pytest.raises(AssertionError):
        assert_decodes(codec, parts, x.shape, mx.float32, wrong)


@pytest.mark.parametrize("spec", SPECS)
def test_parts_in_a_mapped_file(spec: str, tmp_path: Path) -> None:
    codec, x = parse_codec(spec).k, rows(64, 70)
    parts, mapped = codec.encode(x), {}
    for name, (dtype, shape) in codec.layout(x.shape, mx.float32).items():
        words = np.array(parts[name].view(mx.uint16) if dtype == "BF16" else parts[name])
        words.tofile(tmp_path / name)
        mapped[name] = Mapped(np.memmap(tmp_path / name, words.dtype, "r", shape=shape), DTYPES[dtype], "a.kv")
    assert_decodes(codec, parts, x.shape, mx.float16, mapped)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x0001])
def test_scales_that_no_encoder_writes(level: str, bits: int) -> None:
    """An infinite, a NaN, a huge and a tiny scale touch their own row alone, and give what MLX makes of them."""
    codec, x = parse_codec("rvq-4").k, rows(64, 9)
    parts = codec.encode(x)
    scale = np.array(parts["scale"].view(mx.uint16))
    scale[1, 4] = bits
    hostile = parts | {"scale": mx.array(scale).view(mx.bfloat16)}
    for dtype in EPS:
        found, other = (floats(codec.decode(p, x.shape, dtype)) for p in (hostile, parts))
        with native.without():
            wanted = floats(codec.decode(hostile, x.shape, dtype))
        assert np.array_equal(np.delete(found[1], 4, 0), np.delete(other[1], 4, 0)) and np.array_equal(found[0], other[0])
        np.testing.assert_allclose(found, wanted, rtol=2 * EPS[dtype], atol=1e-5 if bits != 0x7F7F else 1e33)


def test_float16_does_not_overflow(level: str) -> None:
    codec = parse_codec("rvq-1").k
    x = mx.full((1, 9, 64), 65504.0)
    found = floats(codec.decode(codec.encode(x * mx.array([1.0, 3.0] * 32)), (1, 9, 64), mx.float16))
    assert np.isfinite(found).all() and found.max() == 65504


# --- RoPE


def turned(x: np.ndarray, at: np.ndarray, spec: RopeSpec, sign: int) -> np.ndarray:
    """Rotation of one `spec` in float64, its pairing kept."""
    out, half = x.copy(), spec.dims // 2
    i = np.arange(half)
    pair = (2 * i, 2 * i + 1) if spec.pairing == "interleaved" else (i, i + half)
    a, b = (spec.first + p for p in pair)
    angle = np.multiply.outer(at.astype(np.float64), np.array(spec.frequencies)) * sign
    m = spec.magnitude**sign
    out[..., a] = m * (x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle))
    out[..., b] = m * (x[..., a] * np.sin(angle) + x[..., b] * np.cos(angle))
    return out


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("method", ["exact", "mlx"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotates_as_float64_does(level: str, dtype: mx.Dtype, method: str, pairing: str) -> None:
    rng = np.random.default_rng(5)
    for dim, dims, first, count in ((128, 128, 0, 70), (80, 20, 6, 33), (2, 2, 0, 1), (512, 512, 0, 3), (64, 48, 0, 5)):
        source = RopeSpec("a", dims, pairing, base=1e4, first=first)
        target = RopeSpec("b", dims, pairing, base=1e6, magnitude=1.3, first=first)
        wide = mx.array(rng.standard_normal((2, 2 * count, dim)).astype(np.float32)).astype(dtype)
        at, to = np.arange(count) + 9, rng.integers(0, 500, count)
        for keys in (wide[:, count:], wide[:, ::2], wide[:, :count]):
            x = floats(keys)
            for here, there, positions, wanted in (
                (source, target, to, turned(turned(x, at, source, -1), to, target, 1)),
                (source, target, at, turned(turned(x, at, source, -1), at, target, 1)),
                (source, None, at, turned(x, at, source, -1)),
                (None, target, at, turned(x, at, target, 1)),
            ):
                got = rotate(keys, at, here, there, target_positions=positions, method=method)
                assert got.dtype == dtype
                angle = 4e-7 + (4e-8 * 1000 if method == "mlx" else 0)  # float32 angles of the models
                assert (np.abs(floats(got) - wanted) <= EPS[dtype] * np.abs(wanted) + angle * np.abs(x).max() * 2 + 2.0**-25).all()


def test_other_entries_are_copied_bit_for_bit(level: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(1, -1, 64)
    for dtype in (mx.float16, mx.bfloat16):
        spec = RopeSpec("a", 16, base=1e4, first=8)
        out = np.array(rotate(mx.array(bits).view(dtype), np.arange(bits.shape[1]) + 1, None, spec).view(mx.uint16))
        assert np.array_equal(out[..., :8], bits[..., :8]) and np.array_equal(out[..., 24:], bits[..., 24:])


@pytest.mark.parametrize("first", [0, PAGE - 1, PAGE, 3 * PAGE - 20, -7, -PAGE, -3 * PAGE + 5])
@pytest.mark.parametrize("method", ["exact", "mlx"])
def test_positions_across_pages_of_the_tables(first: int, method: str) -> None:
    """PAGE positions share a table of cosines and sines: the joins are where they would go wrong."""
    count = 40 if first % PAGE else PAGE + 33
    source, target = RopeSpec("a", 64, base=1e4), RopeSpec("b", 64, base=1e6)
    keys, at = rows(64, count), np.arange(count) + first
    wanted = turned(turned(floats(keys), at, source, -1), at, target, 1)
    found = floats(rotate(keys, at, source, target, method=method))
    # Float32 angles of the models: 4e-8 a token.
    assert np.abs(found - wanted).max() <= (1e-6 if method == "exact" else 1e-6 + 4e-8 * np.abs(at).max()) * np.abs(wanted).max()


def test_what_is_not_finite_stays_in_its_row(level: str) -> None:
    spec = RopeSpec("a", 64, base=1e4)
    for dtype in EPS:
        x = np.array(rows(64, 9))
        clean = np.array(rotate(mx.array(x).astype(dtype), np.arange(9), None, spec).astype(mx.float32))
        x[0, 3, 5], x[1, 6, 40], x[1, 2, 0] = np.nan, np.inf, -np.inf
        found = np.array(rotate(mx.array(x).astype(dtype), np.arange(9), None, spec).astype(mx.float32))
        bad = ~np.isfinite(found)
        assert np.array_equal(np.argwhere(bad), [[0, 3, 5], [0, 3, 37], [1, 2, 0], [1, 2, 32], [1, 6, 8], [1, 6, 40]])
        assert np.array_equal(found[~bad], clean[~bad])


X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.skipif(not X86, reason="elsewhere MLX may contract products with sums")
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rows_before_rope_are_those_of_mlx_bit_for_bit(level: str, pairing: str) -> None:
    """What codecs see is the same with the native back end and without it, and so are their codes."""
    for dim, dims, first, magnitude in ((64, 64, 0, 1.0), (80, 20, 6, 1.0), (128, 128, 0, 1.25), (64, 48, 8, 1.3)):
        spec = RopeSpec("a", dims, pairing, base=1e4, first=first, magnitude=magnitude)
        for dtype in EPS:
            keys, at = rows(dim, 70).astype(dtype), np.arange(70) + PAGE - 9
            found = np.array(stripped(keys, at, spec))
            with native.without():
                assert np.array_equal(found, np.array(stripped(keys, at, spec)))


@pytest.mark.skipif(not X86, reason="elsewhere MLX may contract products with sums")
@pytest.mark.parametrize("codec", ["tc-2", "tcz-1.1", "commvq-2"])
def test_files_are_those_of_mlx_bit_for_bit(codec: str, tiny_a: LoadedModel, calibration_a: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.cal").write_bytes(calibration_a)
    # Rows of the model: of others the calibrated codecs would think nothing, and store them as rvq.
    snapshot = capture(tiny_a, tiny_a.tokenizer.encode(text("technical"))[-200:])
    calibration = tmp_path / "a.cal" if codec.startswith("tc") else None
    save(snapshot, tmp_path / "a.kv", codec=codec, calibration=calibration)
    with native.without():
        save(snapshot, tmp_path / "b.kv", codec=codec, calibration=calibration)
    with open_container(tmp_path / "a.kv") as a, open_container(tmp_path / "b.kv") as b:
        assert {name: info.blake3 for name, info in a.tensors.items()} == {name: info.blake3 for name, info in b.tensors.items()}


def test_refuses_what_does_not_fit() -> None:
    rows = parse_codec("rvq-4").k
    stored = rows.row_reader(rows.encode(mx.ones((2, 5, 16))), (2, 5, 16)).stored
    for shape, message in (((2, 6, 16), "rows must be rows within 5, but got 0 to 6"), ((2, 5, 8), r"out must be \(2, 5, 16\)")):
        with pytest.raises(ValueError, match=message):
            native._native.decode_as(stored, 0, np.zeros(shape, np.uint16), False, None, 0, False)
    out, page = np.zeros((2, 5, 16), np.uint16), np.zeros((4, 16), np.float32)
    for tables, first, message in (
        (([page], 0), 0, "angles must be rows within 4, but got 0 to 5"),
        (([page, page], 4), 0, "angles must be rows within 8, but got 4 to 9"),
        (([page, page], -1), 0, "angles must be rows within 8, but got -1 to 4"),
        (([page, page[:3]], 0), 0, r"angles must be \(4, 16\), but got \(3, 16\)"),
        (([], 0), 0, "angles must be of at least one page"),
        (([page, page], 0), 2, "angles must be of entries within D = 16, but got 2 to 18"),
    ):
        with pytest.raises(ValueError, match=message):
            native._native.decode_as(stored, 0, out, False, tables, first, False)
        with pytest.raises(ValueError, match=message):
            native._native.turn(out, out, False, first, 7 if first else 8, False, False, tables, None, [], 1.0)
    with pytest.raises(ValueError, match="undo must be given, or redo, or phases, but got none"):
        native._native.turn(out, out, False, 0, 8, False, False, None, None, [], 1.0)


# --- memory


@pytest.mark.parametrize("dtype", [mx.uint8, mx.uint16, mx.float16, mx.float32])
def test_memory_that_nothing_has_written(dtype: mx.Dtype) -> None:
    for shape in ((3, 0, 5), (2, 7), (1, 4096, 256), (1 << 20,)):
        out = empty(shape, dtype)
        assert out.shape == shape and out.dtype == dtype
        written = native.shared(out)
        written[...] = np.arange(written.size).reshape(shape) % 100
        assert mx.array_equal(out, mx.array(written)).item()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    out = empty((64 * LEAST_BYTES,), mx.uint8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 64 * LEAST_BYTES // resource.getpagesize() // 8 and out.nbytes == 64 * LEAST_BYTES
