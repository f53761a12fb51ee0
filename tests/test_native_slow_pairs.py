"""Attention to `tc` keys of so many tokens that pairs which RoPE turns slowly are interpolated, at every SIMD level of this machine."""

import mlx.core as mx
import numpy as np
import pytest

from tests import tc_cases
from tests.test_coded import assert_close, bias_of, queries, rows_of_block, sample, stacked
from tests.test_native import growth, level  # noqa: F401
from veloxquant_mlx import native
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.native import attending
from veloxquant_mlx.transfer.rope_spec import RopeSpec

COUNT, FIRST = 1100, 7
ROPES = {
    "slow": RopeSpec("default", 128, base=5e5),
    "slower": RopeSpec("default", 128, base=1e7),
    "partial": RopeSpec("default", 96, "interleaved", base=5e5, first=8),  # entries before and behind that are not rotated
    "still": RopeSpec("default", 64, base=1e30),  # all but a few pairs
}


def coded(spec: str, dim: int, rope: RopeSpec) -> Block:
    keys, values = sample(COUNT, dim, 2, dim)
    return growth(spec, dim, rope).encoded(keys, values, FIRST)


@pytest.mark.parametrize(("spec", "name"), [("tc-2.05", "slow"), ("tc-4", "slower"), ("tc-2.05", "partial"), ("tc-3", "still")])
def test_is_attention_to_the_decoded_rows(level: str, spec: str, name: str) -> None:  # noqa: F811
    """Whole, and from within a block on to within another, the last strip of a span whole or of one token; one query a head and two."""
    rope = ROPES[name]
    dim = 64 if rope.dims == 64 else 128
    whole = coded(spec, dim, rope)
    for first, stop, count in ((0, COUNT, 1), (45, 1089, 2), (3, 580, 1)):
        block = whole.kept(FIRST + first, FIRST + stop)
        q = queries(count, dim=dim)
        out, lse = block.attend(stacked(q, 2), Visibility.of("causal", 6, 2, count, block.count), 0, 64)
        with native.without():
            plain = [np.array(x) for x in block.rows()]
        _, bias = bias_of("causal", count, block.count, 0)
        reference = [x[:, block.first - FIRST : block.stop - FIRST] for x in rows_of_block(whole)]
        assert_close(out.reshape(6, count, -1), lse.reshape(6, count), q, reference, plain, bias)


@pytest.mark.parametrize("kind", ["smooth", "jump", "noise"])
def test_tables_of_other_angles(level: str, kind: str) -> None:  # noqa: F811
    """Spans of angles that no few tokens stand for are taken as they are."""
    block, half = coded("tc-3", 128, ROPES["slow"]), 64
    at = np.arange(COUNT) + 4000.0 * (np.arange(COUNT) >= 600) * (kind == "jump")
    angles = at[:, None] * 5e5 ** (-np.arange(half) / half)
    if kind == "noise":
        angles += 1e-2 * np.random.default_rng(0).standard_normal(angles.shape)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    part = attending.part(block.k.reader.stored, block.v.reader.stored_beside(block.k.reader), (0, 0, COUNT), 0, ([table], 0))
    q = np.array(stacked(queries(1, dim=128), 2))
    out, lse = attending.attend(mx.array(q.reshape(1, 6, 1, 128)), 2, [([0], [0], [part])], None, attending.Sight(COUNT))
    keys, values = tc_cases.exact(block.k.codec, block.k.parts, block.v.codec, block.v.parts, block.k.shape)
    cos, sin = np.split(table.astype(np.float64), 2, axis=1)
    a, b = np.split(keys, 2, axis=2)
    keys = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=2)
    s = q.astype(np.float64) @ keys.swapaxes(1, 2)
    top = s.max(axis=2, keepdims=True)
    weight = np.exp(s - top)
    wanted = (weight / weight.sum(axis=2, keepdims=True) @ values).reshape(6, 128)
    # As `test_tc_reading`: float32 scores of up to some 30.
    np.testing.assert_allclose(np.array(out)[0, :, 0], wanted, rtol=0, atol=2e-5 * np.abs(values).max())
    np.testing.assert_allclose(np.array(lse)[0, :, 0], (top[..., 0] + np.log(weight.sum(axis=2))).reshape(6), rtol=0, atol=1e-4)
