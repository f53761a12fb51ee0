"""h2o_update: scores against float64, and its eviction branch against the kernel's function, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx.allocators.eviction import H2OState, h2o_update, turn_back
from veloxquant_mlx.metal import h2o_fused_evict
from veloxquant_mlx.transfer.rope import apply_rope, strip_rope

G, D, DV, BASE = 2, 32, 24, 10000.0


def tokens(rng: np.random.Generator, count: int) -> tuple[mx.array, mx.array]:
    keys = mx.array(rng.standard_normal((G, count, D)).astype(np.float16))
    return keys, mx.array(rng.standard_normal((G, count, DV)).astype(np.float16))


def filled(rng: np.random.Generator, count: int) -> H2OState:
    return h2o_update(H2OState.empty(G, D, DV, mx.float16), *tokens(rng, count), budget=count)


def test_scores_are_attention_of_each_new_key() -> None:
    rng = np.random.default_rng(0)
    keys, values = tokens(rng, 5)
    state = h2o_update(H2OState.empty(G, D, DV, mx.float16), keys, values, budget=8, decay=0.5)
    want = np.ones((G, 1))
    held = np.array(keys, dtype=np.float64)
    for s in range(1, 5):
        logits = np.einsum("gnd,gd->gn", held[:, :s], held[:, s]) / np.sqrt(D)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        want = np.concatenate([want * 0.5 + weights / weights.sum(axis=1, keepdims=True), np.zeros((G, 1))], axis=1)
    # float32 softmax of logits up to 20: 20 * 2^-24 relative
    np.testing.assert_allclose(np.array(state.scores), want, rtol=0, atol=3e-6)
    assert np.array_equal(np.array(state.positions), np.tile(np.arange(5), (G, 1)))
    assert state.next_position == 5
    assert np.array_equal(np.array(state.keys), np.array(keys))


@pytest.mark.parametrize("renumber", [True, False])
def test_eviction_is_the_kernel_s_bit_for_bit(renumber: bool) -> None:
    rng = np.random.default_rng(1)
    full = filled(rng, 9)
    key, value = tokens(rng, 1)
    grown = h2o_update(full, key, value, budget=10)
    evicted = h2o_update(full, key, value, budget=9, n_sink=2, rope_base=BASE, grace=1, renumber=renumber)
    want = h2o_fused_evict(grown.keys, grown.values, grown.scores, grown.positions, 2, BASE, 1, renumber=renumber)
    for got, expected in zip((evicted.keys, evicted.values, evicted.scores, evicted.positions), want, strict=True):
        assert mx.array_equal(got, expected)
    assert evicted.next_position == (9 if renumber else 10)


def test_a_survivor_is_the_key_of_its_new_position() -> None:
    """However often it moved: its position turned off gives the raw key, to a float16 rounding per move."""
    rng = np.random.default_rng(2)
    raw = mx.array(rng.standard_normal((1, 30, D)).astype(np.float16))
    mark = mx.arange(30, dtype=mx.float32).reshape(1, 30, 1)
    state = H2OState.empty(1, D, 1, mx.float16)
    state = H2OState(state.keys, mx.zeros((1, 0, 1)), state.scores, state.positions)
    for s in range(30):
        here = mx.array([state.next_position])
        state = h2o_update(
            state, apply_rope(raw[:, s : s + 1], here, BASE), mark[:, s : s + 1], budget=8, n_sink=2, rope_base=BASE, grace=2
        )
    assert np.array_equal(np.array(state.positions)[0], np.arange(8))
    kept = np.array(state.values)[0, :, 0].astype(int)
    plain = strip_rope(state.keys, state.positions[0], BASE)
    # 22 moves of one float16 rounding, 2^-11 of |x| < 4 each
    assert np.abs(np.array(plain, dtype=np.float64) - np.array(raw)[:, kept]).max() < 22 * 4 * 2.0**-11
    assert kept[-2:].tolist() == [28, 29]


def test_turn_back_is_one_position() -> None:
    rng = np.random.default_rng(3)
    raw = mx.array(rng.standard_normal((1, 4, D)).astype(np.float32))
    positions = mx.array([1, 2, 5, 9])
    turned = turn_back(apply_rope(raw, positions, BASE), BASE)
    assert mx.abs(turned - apply_rope(raw, positions - 1, BASE)).max().item() < 1e-6


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"keys": mx.zeros((G, 1, D + 2), mx.float16)}, ValueError),
        ({"values": mx.zeros((G, 2, DV), mx.float16)}, ValueError),
        ({"values": mx.zeros((1, 1, DV), mx.float16)}, ValueError),
        ({"keys": mx.zeros((G, 1, D), mx.float32)}, TypeError),
        ({"n_sink": 5, "grace": 5}, ValueError),
        ({"n_sink": -1}, ValueError),
        ({"budget": 0}, ValueError),
    ],
)
def test_refusals(change: dict, error: type[Exception]) -> None:
    rng = np.random.default_rng(4)
    key, value = tokens(rng, 1)
    with pytest.raises(error, match=r"^\[h2o_update\] "):
        h2o_update(filled(rng, 9), **{"keys": key, "values": value, "budget": 9, "n_sink": 1, **change})
