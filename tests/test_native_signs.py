"""Signs of projections, encoded natively: the same bytes at every SIMD level, and MLX's but for what rounding decides."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx import native
from veloxquant_mlx.codecs.qjl import Qjl

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")


def stored(part: mx.array) -> np.ndarray:
    return np.array(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part)


@pytest.mark.parametrize("dim", [7, 64, 72, 128, 160])
@pytest.mark.parametrize("codec", [Qjl(1), Qjl(3), Qjl(2, center=False)], ids=["1", "3", "2-nocenter"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["float16", "bfloat16", "float32"])
def test_signs_and_norms(dim: int, codec: Qjl, dtype: mx.Dtype) -> None:
    rng, before, found = np.random.default_rng(dim), native.level(), []
    x = mx.array((rng.standard_normal((2, 70, dim)) + 2 * rng.standard_normal((2, 1, dim))).astype(np.float32)).astype(dtype)
    x[0, 3] = 0
    try:
        for level in native.levels():
            native.set_level(level)
            found.append({name: stored(part) for name, part in codec.encode(x).items()})
    finally:
        native.set_level(before)
    with native.without():
        wanted = {name: stored(part) for name, part in codec.encode(x).items()}
    for parts in found:
        assert all(np.array_equal(parts[name], found[0][name]) for name in wanted)
    apart = np.unpackbits(found[0]["codes"] ^ wanted["codes"]).sum()
    assert apart <= 1e-4 * 140 * codec.blocks * dim + 2  # projections within rounding of 0
    assert np.abs(found[0]["norm"].astype(int) - wanted["norm"].astype(int)).max() <= 1  # bfloat16, sign included


def test_refuses_what_does_not_fit() -> None:
    x, turns, hartley = np.zeros((1, 3, 8), np.float32), np.ones((1, 2, 8), np.float32), np.ones((1, 1), np.float32)
    codes, norm, encode = np.zeros((1, 3, 1), np.uint8), np.zeros((1, 3), np.uint16), native._native.encode_signs
    for call, message in (
        (lambda: encode(x, False, np.ones((5, 2, 8), np.float32), hartley, None, codes, norm), "turns must be of 1 to 4 blocks, but got 5"),
        (lambda: encode(x, False, turns[..., :7].copy(), hartley, None, codes, norm), r"turns must be \(1, 2, 8\), but got \(1, 2, 7\)"),
        (lambda: encode(x, False, turns, np.ones((3, 3), np.float32), None, codes, norm), r"hartley must be \(m, m\) with D = m 2\^k"),
        (lambda: encode(x, False, turns, hartley, None, codes[:, :2].copy(), norm), r"codes must be \(1, 3, 1\), but got \(1, 2, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
