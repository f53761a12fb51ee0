"""Scores of keys before RoPE in registers: every transform and width that has a loop of its own, against float64 attention."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from tests.test_coded import GROUPS, assert_close, bias_of, queries, rows_of_block, stacked
from tests.test_native import made
from veloxquant_mlx import native
from veloxquant_mlx.caches.blocks import Block, CodedRows
from veloxquant_mlx.caches.visibility import Visibility

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")

# Signs as bytes (rabitq, rvq-1), points of one and two stages, channels looked up and multiplied. The pairs are the halves of a row.
SPECS = ("rabitq", "k=rvq-1,v=rvq-4", "rvq-3", "rvq-2+2", "rvq-4:nocenter", "affine-2", "affine-3", "affine-4", "affine-6", "affine-8")


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.set_level(request.param)
    yield request.param
    native.set_level(before)


def check(block: Block, reference: Block, count: int) -> None:
    """`count` causal queries of each query head, to a part of the rows of `reference`."""
    q = queries(count, dim=block.k.shape[-1])
    mask, bias = bias_of("causal", count, block.count)
    seen = Visibility.of(mask, 6, 2, count, block.count)
    assert block.part is not None
    out, lse = block.attend(stacked(q, 2), seen, 0, 64)
    rows = [x[:, block.first - reference.first : block.stop - reference.first] for x in rows_of_block(reference)]
    with native.without():
        plain = [np.array(x) for x in block.rows()]
    assert_close(out.reshape(6, count, -1), lse.reshape(6, count), q, rows, plain, bias)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_every_head_size(level: str, spec: str, dim: int) -> None:
    """One query a head makes 3 of a KV head, taken as 4; rows start and end within a group, in one of its halves, and at its edge."""
    whole = made(spec, dim, "half", 150)
    for first, stop in ((0, 150), (32, 131), (48, 64), (41, 150)):
        check(whole.kept(7 + first, 7 + stop), whole, 1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_every_number_of_queries(level: str, spec: str, rows: int) -> None:
    block = made(spec, 64, "half", 70)
    q = mx.array(np.random.default_rng(rows).standard_normal((2, rows, 64)).astype(np.float32) / 8)
    out, lse = block.attend(q, Visibility(1, rows, 70), 0, 64)
    plain = [np.array(x) for x in block.rows()]
    flat = q.reshape(2 * rows, 1, 64)
    assert_close(out.reshape(2 * rows, 1, -1), lse.reshape(-1, 1), flat, rows_of_block(block), plain, np.zeros((2 * rows, 1, 70)))


@pytest.mark.parametrize("spec", ["rabitq", "rvq-4"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1e4])
def test_rows_of_any_size_beside_their_mean(level: str, spec: str, size: float) -> None:
    """A scale of nothing, for rows that are the mean; scales far below it and far above; some rows without it."""
    block = made(spec, 64, "half", 60)
    scale = block.k.parts["scale"] * size if size else mx.zeros_like(block.k.parts["scale"])
    assert size == 0 or (scale < 0).any()
    k = CodedRows(block.k.codec, block.k.parts | {"scale": scale}, block.k.shape, block.k.dtype, block.k.rope)
    block = Block(k, block.v, block.count, block.first)
    q = queries(1, dim=64) / max(size, 1)
    seen = Visibility(1, GROUPS, 60)
    out, lse = block.attend(stacked(q, 2), seen, 0, 64)
    with native.without():
        plain = [np.array(x) for x in block.rows()]
    assert_close(out.reshape(6, 1, -1), lse.reshape(6, 1), q, rows_of_block(block), plain, np.zeros((6, 1, 60)))
