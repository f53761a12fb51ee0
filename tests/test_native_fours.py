"""Scores of codes of one or two bits as cached, of tokens enough that sums of four bits are looked up, against float64 attention."""

import mlx.core as mx
import numpy as np
import pytest

from tests.test_coded import assert_close, rows_of_block
from tests.test_native import level, made, takes  # noqa: F401
from veloxquant_mlx import native
from veloxquant_mlx.caches.blocks import Block, CodedRows
from veloxquant_mlx.caches.visibility import Visibility

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")

# Tables of both widths; codes that stand for themselves, in groups that end within 32 tokens.
SPECS = ("rabitq", "rvq-1", "rvq-2", "k=affine-1:channel:group=100,v=rvq-4", "k=affine-2:channel:group=70,v=rvq-4")


def check(block: Block, q: np.ndarray) -> None:
    """q (H, R, D)."""
    heads, rows, dim = q.shape
    out, lse = block.attend(mx.array(q), Visibility(1, rows, block.count), 0, 64)
    plain = [np.array(x) for x in block.rows()]
    flat, bias = mx.array(q.reshape(heads * rows, 1, dim)), np.zeros((heads * rows, 1, block.count))
    assert_close(out.reshape(heads * rows, 1, -1), lse.reshape(-1, 1), flat, rows_of_block(block), plain, bias)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dim", [16, 40, 64, 72, 128, 256, 512])
def test_every_head_size(level: str, spec: str, dim: int) -> None:  # noqa: F811
    """As many tokens as make the sums worth it, one fewer, and some beyond whole blocks; blocks of 1, 2 and 4 queries."""
    if not takes(spec, dim):
        pytest.skip("the codec does not take this head size")
    rng = np.random.default_rng(dim)
    for count, rows in ((63, 1), (64, 1), (70, 2), (150, 3), (230, 6)):
        check(made(spec, dim, "none", count), rng.standard_normal((2, rows, dim)).astype(np.float32) / dim**0.5)


@pytest.mark.parametrize("spec", ["rabitq", "rvq-2"])
@pytest.mark.parametrize("kind", ["zero", "one", "outlier", "tiny"])
def test_queries_of_any_size(level: str, spec: str, kind: str) -> None:  # noqa: F811
    q = np.random.default_rng(0).standard_normal((2, 4, 128)).astype(np.float32) / 11
    if kind == "zero":
        q[:, 1] = 0
    if kind == "one":
        q[:, :, 1:] = 0
    if kind == "outlier":
        q[:, :, 5] *= 1000
        q /= 100
    if kind == "tiny":
        q *= np.float32(1e-36)
    check(made(spec, 128, "none", 150), q)


def test_largest_sums(level: str) -> None:  # noqa: F811
    """Rows of as many entries as there may be, whose fours all have the largest sum, or the least."""
    dim = native.max_dim()
    block = made("k=affine-2:channel:group=70,v=rvq-4", dim, "none", 150)
    codes = np.array(block.k.parts["codes"])
    codes[:, ::3], codes[:, 1::3] = 0xFF, 0
    k = CodedRows(block.k.codec, block.k.parts | {"codes": mx.array(codes)}, block.k.shape, block.k.dtype)
    step = np.repeat(np.array(block.k.parts["scale"].astype(mx.float32)), 70, axis=1)[:, 0]
    q = np.stack([1 / step, -1 / step, 1 / step], axis=1) / (100 * dim**0.5)
    check(Block(k, block.v, block.count, block.first), q.astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_queries_that_are_not_numbers(level: str, bad: float) -> None:  # noqa: F811
    """They come to nothing, and change no other."""
    block = made("rabitq", 64, "none", 150)
    q = np.random.default_rng(0).standard_normal((2, 4, 64)).astype(np.float32) / 8
    seen = Visibility(1, 4, 150)
    wanted = np.array(block.attend(mx.array(q), seen, 0, 64)[0])
    q[1, 2, 7] = bad
    found = np.array(block.attend(mx.array(q), seen, 0, 64)[0])
    assert np.isnan(found[1, 2]).all()
    assert np.array_equal(np.delete(found.reshape(8, -1), 6, axis=0), np.delete(wanted.reshape(8, -1), 6, axis=0))
