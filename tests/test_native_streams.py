"""Streams of codes long enough for several threads, at every SIMD level, against NumPy; test_kernels.py has the short ones."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx import metal, native
from veloxquant_mlx.metal._backend import forced

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")
LONG = 3 * 65536 + 2053  # codes: more than threads take at a time, and no multiple of 8 or of any 32 // bits


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.set_level(request.param)
    yield request.param
    native.set_level(before)


def stream(codes: np.ndarray, bits: int, layout: str) -> bytes:
    """Bit for bit."""
    planes = ((codes[:, None] >> np.arange(bits)) & 1).astype(np.uint8)
    if layout == "lsb32":
        per = 32 // bits
        planes = np.pad(planes, [(0, -len(codes) % per), (0, 0)]).reshape(-1, per * bits)
        planes = np.pad(planes, [(0, 0), (0, 32 - per * bits)])
    return np.packbits(planes.reshape(-1), bitorder="little").tobytes()


@pytest.mark.parametrize("layout", ["lsb8", "lsb32"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_streams(level: str, bits: int, layout: str) -> None:
    """Bits above the lowest are dropped; what comes back is what was packed, from a buffer that is longer too."""
    codes = np.random.default_rng(bits).integers(0, 256, LONG, np.uint8)
    packed = metal.turboquant_bit_pack(mx.array(codes), bits, layout=layout)
    assert np.array(packed).tobytes() == stream(codes, bits, layout)
    longer = mx.concatenate([packed, mx.full((3,), 255, packed.dtype)])
    for given in (packed, longer):
        assert np.array_equal(np.array(metal.turboquant_bit_unpack(given, LONG, bits, layout=layout)), codes & (2**bits - 1))
    short = metal.turboquant_bit_pack(mx.array(codes)[1:4:2], bits, layout=layout)  # not contiguous
    assert np.array(short).tobytes() == stream(codes[1:4:2], bits, layout)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("dim", [1, 8, 64, 1024])
def test_codes_of_values(level: str, dim: int, dtype: mx.Dtype) -> None:
    """The codes of MLX's operations, whatever the order of the centroids, and where values are not finite."""
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((2 * 65536 // dim + 3, dim)).astype(np.float32)
    values[0, 0], values[1, -1], values[2, dim // 2] = np.nan, np.inf, -np.inf
    x, signs = mx.array(values).astype(dtype), mx.array(rng.choice([-1.0, 1.0], dim).astype(np.float32))
    centroids = mx.array(rng.permutation(np.linspace(-2, 2, 8)).astype(np.float32))

    def codes() -> list[np.ndarray]:
        return [
            np.array(metal.turboquant_scalar_quantize(x, centroids, 3)),
            np.array(metal.turboquant_hadamard_quantize(x, signs, centroids, 3)),
        ]

    with forced("cpu"):
        wanted = codes()
    assert all(np.array_equal(a, b) for a, b in zip(codes(), wanted, strict=True))


def test_values_of_codes(level: str) -> None:
    codes = mx.array(np.random.default_rng(0).integers(0, 256, (5, 40000), np.uint8))
    centroids = np.random.default_rng(1).standard_normal(16).astype(np.float32)
    found = np.array(metal.turboquant_scalar_dequantize(codes, mx.array(centroids)))
    assert np.array_equal(found, centroids.astype(np.float16)[np.minimum(np.array(codes), 15)])


def test_what_does_not_fit_is_refused() -> None:
    """By the extension itself, whoever calls it."""
    codes, out = np.zeros(9, np.uint8), np.zeros(4, np.uint8)
    call = native.extension()
    for bits, must in ((4, "packed must be 5 bytes, but got 4"), (9, "bits must be 1 to 8, but got 9")):
        with pytest.raises(ValueError, match=must):
            call.pack_bits(codes, bits, False, out)
        with pytest.raises(ValueError, match=must):
            call.unpack_bits(out, bits, False, codes)
    values = np.zeros(9, np.float32)
    with pytest.raises(ValueError, match="signs must be of rows of 2\\^k entries"):
        call.nearest_centroids(values, False, np.zeros(2, np.float32), np.ones(2, np.float32), 1.0, codes)
    with pytest.raises(ValueError, match="out must be"):
        call.nearest_centroids(values, False, np.zeros(2, np.float32), None, 1.0, out)
    with pytest.raises(ValueError, match="table must be"):
        call.look_up(codes, np.zeros(16, np.uint16), np.zeros(9, np.uint16))
