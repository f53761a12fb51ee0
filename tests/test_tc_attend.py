"""Attention from tc codes against float64 attention to the rows that the same codes decode to."""

import math

import mlx.core as mx
import numpy as np
import pytest

from tests.tc_cases import bound, layer
from veloxquant_mlx.codecs.tc_attend import attend
from veloxquant_mlx.metal._attend import merge_parts
from veloxquant_mlx.transfer.rope import RopeSpec, rotate

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


@pytest.mark.parametrize("spec", ("tc-2", "tc-3.5", "tc-2:carry"))
@pytest.mark.parametrize(("tokens", "tile"), ((1, 32), (31, 64), (200, 32), (200, 96), (321, 256)))
def test_is_attention_to_the_decoded_rows(spec: str, tokens: int, tile: int) -> None:
    k, key_parts, v, value_parts, keys, values = coded(spec, tokens)
    q, positions = queries(5, 0.5), np.arange(tokens) + 17
    got = attend(q, k, key_parts, v, value_parts, positions, ROPE, scale=1 / math.sqrt(DIM), tile=tile)
    check(got, oracle(q, keys, values, positions, ROPE, None), values)


def test_causal_by_positions_and_queries_that_see_nothing() -> None:
    k, key_parts, v, value_parts, keys, values = coded("tc-2", 150)
    positions, at = np.arange(150) * 2, np.array([-1, 0, 63, 64, 170, 999])
    q = queries(6)
    for tile in (32, 64, 160):
        got = attend(q, k, key_parts, v, value_parts, positions, ROPE, scale=1 / math.sqrt(DIM), query_positions=at, tile=tile)
        check(got, oracle(q, keys, values, positions, ROPE, at), values)
    assert np.all(np.array(got[0])[:, 0] == 0) and np.all(np.isneginf(np.array(got[1])[:, 0]))


@pytest.mark.parametrize("rope", (None, RopeSpec("default", DIM, pairing="interleaved", base=500.0)))
def test_other_rotations(rope: RopeSpec | None) -> None:
    k, key_parts, v, value_parts, keys, values = coded("tc-2", 70)
    got = attend(queries(2), k, key_parts, v, value_parts, np.arange(70), rope, scale=1 / math.sqrt(DIM), tile=64)
    check(got, oracle(queries(2), keys, values, np.arange(70), rope, None), values)


def test_merges_with_attention_to_exact_rows() -> None:
    """Coded rows and a window kept exact, attended apart."""
    k, key_parts, v, value_parts, keys, values = coded("tc-2", 96)
    rng, q, scale = np.random.default_rng(5), queries(3), 1 / math.sqrt(DIM)
    new_k, new_v = (mx.array(rng.standard_normal((HEADS, 20, DIM)).astype(np.float32)) for _ in range(2))
    out, lse = attend(q, k, key_parts, v, value_parts, np.arange(96), ROPE, scale=scale)
    turned = rotate(new_k, np.arange(96, 116), None, ROPE)
    scores = mx.matmul(q.reshape(HEADS, -1, DIM), turned.swapaxes(1, 2)) * scale
    window = mx.matmul(mx.softmax(scores, axis=-1), new_v).reshape(q.shape), mx.logsumexp(scores, axis=-1).reshape(q.shape[:2])
    merged = merge_parts([out, window[0]], [lse, window[1]])
    whole = [mx.concatenate(pair, axis=1) for pair in ((keys, new_k), (values, new_v))]
    check(merged, oracle(q, *whole, np.arange(116), ROPE, None), whole[1])


def test_no_row_of_all_tokens_is_made() -> None:
    tokens = 1 << 16
    k, key_parts, v, value_parts, *_ = coded("tc-2", 320)
    again = tokens // 320 + 1
    key_parts, value_parts = (
        {name: mx.tile(part, (1, again, 1))[:, : tokens // 32] if part.ndim == 3 else part for name, part in parts.items()}
        for parts in (key_parts, value_parts)
    )
    mx.eval(key_parts, value_parts)
    q, positions = queries(1), np.arange(tokens)
    mx.eval(q)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attend(q, k, key_parts, v, value_parts, positions, ROPE, scale=0.125))
    # The keys alone would be 32 MiB; a tile's are 128 KiB, and some ten arrays of a tile live at once.
    assert mx.get_peak_memory() - before < tokens * DIM * 4 / 4


def test_wrong_arguments_are_refused() -> None:
    k, key_parts, v, value_parts, *_ = coded("tc-2", 40)
    at = np.arange(40)
    for change, message in (
        ({"q": queries(1)[:5]}, "H_q a multiple of 2"),
        ({"positions": at * 0.5}, "positions must be"),
        ({"positions": np.arange(80)}, "part 'codes' must be"),
        ({"tile": 40}, "multiple of 32, but got 40"),
        ({"query_positions": at}, r"query_positions must be \(1,\)"),
        ({"keys": v}, "roles 'v' and 'v'"),
        ({"value_parts": {}}, "part 'codes' is missing"),
    ):
        given = {"q": queries(1), "keys": k, "key_parts": key_parts, "values": v, "value_parts": value_parts, "positions": at} | change
        with pytest.raises(ValueError, match=message):
            attend(rope=ROPE, scale=1.0, **given)
