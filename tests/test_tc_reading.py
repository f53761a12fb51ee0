"""Attention from tc codes against float64 attention to the rows that the same codes decode to."""

import math

import mlx.core as mx
import numpy as np
import pytest

from tests.tc_cases import bound, layer
from veloxquant_mlx.caches.blocks import Block, CodedRows, merged
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs.tc import Tc
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec

HEADS, GROUP, DIM = 2, 3, 64
ROPE = RopeSpec("default", DIM, base=10_000.0)


def coded(spec: str, tokens: int) -> tuple:
    """Codecs and parts of some rows, and those rows decoded."""
    k, v = bound(spec, HEADS, DIM)
    rows = layer(max(tokens, 1), 7, HEADS, DIM)
    x, w = (mx.array(np.ascontiguousarray(a[:tokens].swapaxes(0, 1)).astype(np.float32)) for a in (rows.k, rows.v))
    key_parts = k.encode(x)
    keys = k.decode(key_parts, x.shape, mx.float32)
    value_parts = v.encode(w, {"k": keys})
    return k, key_parts, v, value_parts, keys, v.decode(value_parts, w.shape, mx.float32, {"k": keys})


def queries(count: int, size: float = 1.0) -> mx.array:
    return mx.array(np.random.default_rng(1).standard_normal((HEADS * GROUP, count, DIM)).astype(np.float32) * size)


def oracle(q: mx.array, keys: mx.array, values: mx.array, positions: np.ndarray, rope: RopeSpec | None, at: np.ndarray | None) -> tuple:
    """Float64 attention, RoPE by its definition."""
    keys, values, q = (np.array(a).astype(np.float64) for a in (keys, values, q))
    if rope is not None:
        angle = positions[:, None] * np.array(rope.frequencies)
        pairs = slice(0, DIM // 2), slice(DIM // 2, DIM)
        a, b = keys[..., pairs[0]], keys[..., pairs[1]]
        keys = np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)
        if rope.pairing == "interleaved":
            keys = keys.reshape(*keys.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(keys.shape)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for head in range(len(q)):
        scores = q[head] @ keys[head // GROUP].T / math.sqrt(DIM)
        if at is not None:
            scores[at[:, None] < positions] = -np.inf
        sees = np.isfinite(scores).any(axis=1)
        top = scores[sees].max(axis=1, keepdims=True)
        weight = np.exp(scores[sees] - top)
        lse[head, sees] = top[:, 0] + np.log(weight.sum(axis=1))
        out[head, sees] = weight / weight.sum(axis=1, keepdims=True) @ values[head // GROUP]
    return out, lse


def check(got: tuple[mx.array, mx.array], wanted: tuple[np.ndarray, np.ndarray], values: mx.array) -> None:
    # float32: sums over rows of the size of the values (some 50 roundings of 2^-24 on the way), scores of up to some 30, whose
    # rounding (D products, angles of float32) turns into as large a relative error of the weights.
    np.testing.assert_allclose(np.array(got[0]), wanted[0], atol=2e-5 * float(mx.max(mx.abs(values)).item()))
    np.testing.assert_allclose(np.array(got[1]), wanted[1], atol=1e-4)


def attend(
    q: mx.array,
    k: Tc,
    key_parts: dict,
    v: Tc,
    value_parts: dict,
    first: int,
    tokens: int,
    rope: RopeSpec | None,
    seen: Visibility | None = None,
    tile: int = 256,
) -> tuple[mx.array, mx.array]:
    """Block.attend, in the shapes of the oracle."""
    shape = (HEADS, tokens, DIM)
    keys, values = CodedRows(k, key_parts, shape, mx.float32, rope), CodedRows(v, value_parts, shape, mx.float32)
    seen = Visibility(q.shape[1], GROUP, tokens) if seen is None else seen
    out, lse = Block(keys, values, tokens, first).attend(q.reshape(HEADS, -1, DIM) / math.sqrt(DIM), seen, 0, tile)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


@pytest.mark.parametrize("spec", ("tc-2", "tc-3.5", "tc-2:carry"))
@pytest.mark.parametrize(("tokens", "tile"), ((1, 32), (31, 64), (200, 32), (200, 96), (321, 256), (321, 50)))
def test_is_attention_to_the_decoded_rows(spec: str, tokens: int, tile: int) -> None:
    k, key_parts, v, value_parts, keys, values = coded(spec, tokens)
    q = queries(5, 0.5)
    got = attend(q, k, key_parts, v, value_parts, 17, tokens, ROPE, tile=tile)
    check(got, oracle(q, keys, values, np.arange(tokens) + 17, ROPE, None), values)


def test_queries_that_see_a_part_or_nothing() -> None:
    k, key_parts, v, value_parts, keys, values = coded("tc-2", 150)
    positions, at = np.arange(150), np.array([-1, 0, 63, 64, 120, 149])
    q = queries(6)
    mask = mx.array((at[:, None] >= positions)[None, None])
    for tile in (32, 64, 160):
        got = attend(q, k, key_parts, v, value_parts, 0, 150, ROPE, Visibility(6, GROUP, 150, mask=mask), tile)
        check(got, oracle(q, keys, values, positions, ROPE, at), values)
    assert np.all(np.array(got[0])[:, 0] == 0) and np.all(np.isneginf(np.array(got[1])[:, 0]))


@pytest.mark.parametrize("rope", (None, RopeSpec("default", DIM, pairing="interleaved", base=500.0)))
def test_other_rotations(rope: RopeSpec | None) -> None:
    k, key_parts, v, value_parts, keys, values = coded("tc-2", 70)
    got = attend(queries(2), k, key_parts, v, value_parts, 0, 70, rope, tile=64)
    check(got, oracle(queries(2), keys, values, np.arange(70), rope, None), values)


def test_merges_with_attention_to_exact_rows() -> None:
    """Coded rows and a window kept exact, attended apart."""
    k, key_parts, v, value_parts, keys, values = coded("tc-2", 96)
    rng, q = np.random.default_rng(5), queries(3)
    new_k, new_v = (mx.array(rng.standard_normal((HEADS, 20, DIM)).astype(np.float32)) for _ in range(2))
    turned = rotate(new_k, np.arange(96, 116), None, ROPE)
    grouped, seen = q.reshape(HEADS, -1, DIM) / math.sqrt(DIM), Visibility(3, GROUP, 116)
    shape = (HEADS, 96, DIM)
    coded_rows = CodedRows(k, key_parts, shape, mx.float32, ROPE), CodedRows(v, value_parts, shape, mx.float32)
    parts = [Block(*coded_rows, 96, 0).attend(grouped, seen, 0, 64), Block.exact(turned, new_v, 96).attend(grouped, seen, 96, 64)]
    out, lse = merged(parts)
    whole = [mx.concatenate(pair, axis=1) for pair in ((keys, new_k), (values, new_v))]
    check((out.reshape(q.shape), lse.reshape(q.shape[:2])), oracle(q, *whole, np.arange(116), ROPE, None), whole[1])


def test_values_predicted_from_keys_of_another_codec() -> None:
    """Keys that fell back to another codec, and components beyond what values may be predicted from."""
    _, v = bound("tc-2", HEADS, DIM)
    rows = layer(64, 7, HEADS, DIM)
    x, w = (mx.array(np.ascontiguousarray(a.swapaxes(0, 1)).astype(np.float32)) for a in (rows.k, rows.v))
    x = mx.where(mx.arange(64)[:, None] == 9, 1e4 * x, x)
    exact = CodedRows.encoded(parse_codec("raw").k, x, 0)
    parts = v.encode(w, {"k": x})
    values = v.decode(parts, w.shape, mx.float32, {"k": x})
    q = queries(4, 1e-4)
    block = Block(exact, CodedRows(v, parts, w.shape, mx.float32), 64, 0)
    out, lse = block.attend(q.reshape(HEADS, -1, DIM) / math.sqrt(DIM), Visibility(4, GROUP, 64), 0, 32)
    check((out.reshape(q.shape), lse.reshape(q.shape[:2])), oracle(q, x, values, np.arange(64), None, None), values)


def test_parts_that_do_not_fit_are_refused() -> None:
    k, key_parts, v, value_parts, *_ = coded("tc-2", 40)
    with pytest.raises(ValueError, match="part 'codes' must be"):
        attend(queries(1), k, key_parts, v, value_parts, 0, 80, ROPE)
    with pytest.raises(ValueError, match="part 'codes' is missing"):
        attend(queries(1), k, key_parts, v, {}, 0, 40, ROPE)
