"""Ridge maps against least squares written out in float64, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.bridges.ridge import GAIN, PENALTIES, Ridge, fit_ridge, held_out, moments_of

DOCUMENTS = np.repeat(np.arange(10), 60)


def rows(seed: int, inputs: int, outputs: int, noise: float, rank: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y = (x - 1) W + 2 + noise, and W; W of a rank where one is given."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((len(DOCUMENTS), inputs)) * np.logspace(0, -1, inputs) + 1).astype(np.float32)
    weights = rng.standard_normal((inputs, outputs))
    if rank is not None:
        weights = rng.standard_normal((inputs, rank)) @ rng.standard_normal((rank, outputs))
    y = (x - 1) @ weights + 2 + noise * rng.standard_normal((len(DOCUMENTS), outputs))
    return x, y.astype(np.float32), weights


def applied(ridge: object, x: np.ndarray) -> np.ndarray:
    y = (x.astype(np.float64) - ridge.source_mean) @ ridge.left.astype(np.float64)  # type: ignore[attr-defined]
    y = y if ridge.right is None else y @ ridge.right.astype(np.float64)  # type: ignore[attr-defined]
    return y + ridge.target_mean  # type: ignore[attr-defined]


def fitted(x: np.ndarray, y: np.ndarray, **options: float | None) -> Ridge:
    return fit_ridge(moments_of([x], y, held_out(DOCUMENTS)), **options)


def least_squares(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means and weights: the penalty as rows added to a least-squares problem, another way to the same numbers."""
    a, b = x.astype(np.float64), y.astype(np.float64)
    means = a.mean(0), b.mean(0)
    a, b = a - means[0], b - means[1]
    added = np.sqrt(penalty * np.sum(a * a) / a.shape[1]) * np.eye(a.shape[1])
    return *means, np.linalg.lstsq(np.vstack([a, added]), np.vstack([b, np.zeros((a.shape[1], b.shape[1]))]), rcond=None)[0]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), inputs=st.integers(1, 24), outputs=st.integers(1, 20))
def test_is_ridge_regression(seed: int, inputs: int, outputs: int) -> None:
    """Weights and means of all rows; what is left is that of the weights of the rows that were fitted on at first."""
    x, y, _ = rows(seed, inputs, outputs, 0.3)
    held = held_out(DOCUMENTS)
    ridge = fitted(x, y, rank_loss=None)
    mean_x, mean_y, wanted = least_squares(x, y, ridge.penalties[0])
    # float32 rows of size 1: 6e-8 each, times the condition of the Gram matrix, at most 1e2 here.
    assert np.allclose(ridge.left, wanted, atol=2e-5 * max(1.0, np.abs(wanted).max()))
    assert np.allclose(ridge.source_mean, mean_x, atol=1e-5) and np.allclose(ridge.target_mean, mean_y, atol=1e-5)
    mean_x, mean_y, weights = least_squares(x[~held], y[~held], ridge.penalties[0])
    residual = np.sum(((x[held] - mean_x) @ weights + mean_y - y[held]) ** 2) / np.sum((y[held] - mean_y) ** 2)
    assert ridge.unexplained == pytest.approx(residual, rel=1e-3, abs=1e-5)


def test_each_group_has_the_inputs_and_the_penalty_that_explain_it() -> None:
    """Of three blocks one output needs the first, one the last, one both, and one is noise."""
    rng = np.random.default_rng(8)
    blocks = [rng.standard_normal((len(DOCUMENTS), 6)).astype(np.float32) for _ in range(3)]
    a, b = blocks[0] @ rng.standard_normal((6, 2)), blocks[2] @ rng.standard_normal((6, 2))
    noise = rng.standard_normal((len(DOCUMENTS), 8))
    y = (np.concatenate([a, b, a + b, np.zeros_like(a)], axis=1) + 0.1 * noise).astype(np.float32)
    groups = [np.arange(i, i + 2) for i in range(0, 8, 2)]
    ridge = fit_ridge(moments_of(blocks, y, held_out(DOCUMENTS)), groups, most=3, rank_loss=None)
    assert ridge.inputs[:3] == ((0,), (2,), (0, 2)) and len(ridge.inputs[3]) == 1
    assert ridge.penalties[3] > max(ridge.penalties[:3])
    assert set(ridge.used) >= {0, 2} and ridge.left.shape == (6 * len(ridge.used), 8)
    assert not ridge.left[:6, 2:4].any() and not ridge.left[-6:, :2].any()
    for group, used, penalty in zip(groups, ridge.inputs, ridge.penalties, strict=True):
        wanted = least_squares(np.concatenate([blocks[i] for i in used], axis=1), y[:, group], penalty)[2]
        at = np.concatenate([np.arange(6) + 6 * ridge.used.index(i) for i in used])
        assert np.allclose(ridge.left[np.ix_(at, group)], wanted, atol=1e-5)


def test_a_block_that_adds_little_is_left_out() -> None:
    rng = np.random.default_rng(9)
    blocks = [rng.standard_normal((len(DOCUMENTS), 3)).astype(np.float32) for _ in range(2)]
    y = (blocks[0] @ np.ones((3, 2)) + GAIN * blocks[1] @ np.ones((3, 2)) + rng.standard_normal((len(DOCUMENTS), 2))).astype(np.float32)
    assert fit_ridge(moments_of(blocks, y, held_out(DOCUMENTS)), most=2).used == (0,)


def test_the_penalty_is_the_best_on_documents_left_out() -> None:
    x, y, _ = rows(1, 24, 4, 5.0)
    held = held_out(DOCUMENTS)
    chosen = fitted(x, y, rank_loss=None)
    a, b = x[~held] - x[~held].mean(0), y[~held] - y[~held].mean(0)
    losses = []
    for penalty in PENALTIES:
        w = np.linalg.solve(a.T @ a + penalty * np.sum(a * a) / 24 * np.eye(24), a.T @ b)
        losses.append(np.sum(((x[held] - x[~held].mean(0)) @ w + y[~held].mean(0) - y[held]) ** 2))
    assert chosen.penalties == (PENALTIES[int(np.argmin(losses))],)
    assert chosen.penalties[0] > PENALTIES[0]


def test_a_low_rank_is_found_and_costs_little() -> None:
    x, y, _ = rows(2, 32, 32, 0.01, rank=2)
    full, low = fitted(x, y, rank_loss=None), fitted(x, y)
    assert full.right is None and low.right is not None
    assert low.left.shape == (32, 2) and low.right.shape == (2, 32)
    assert low.unexplained <= full.unexplained + 0.0101 * (1 - full.unexplained)


def test_a_stricter_bound_keeps_a_higher_rank() -> None:
    """Directions of falling weight: each further one is worth less."""
    rng = np.random.default_rng(10)
    x = rng.standard_normal((len(DOCUMENTS), 32)).astype(np.float32)
    y = (x @ (rng.standard_normal((32, 32)) * np.logspace(0, -2, 32)) @ np.linalg.qr(rng.standard_normal((32, 32)))[0]).astype(np.float32)
    loose, strict = fitted(x, y, rank_loss=0.2), fitted(x, y, rank_loss=0.02)
    assert loose.left.shape[1] < strict.left.shape[1] < 32
    assert strict.unexplained < 0.021 and 0.021 < loose.unexplained < 0.2


def test_full_rank_maps_stay_whole() -> None:
    x, y, _ = rows(3, 16, 16, 0.01)
    assert fitted(x, y).right is None


def test_noise_is_not_explained() -> None:
    x, _, _ = rows(4, 16, 8, 0.0)
    y = np.random.default_rng(0).standard_normal((len(x), 8)).astype(np.float32)
    assert fitted(x, y).unexplained > 0.95


def test_constant_targets_are_their_mean() -> None:
    x, _, _ = rows(5, 4, 3, 0.0)
    ridge = fitted(x, np.full((len(x), 3), 7, np.float32))
    assert np.allclose(applied(ridge, x), 7, atol=1e-4) and ridge.unexplained == 0


def test_too_few_rows_are_refused() -> None:
    x, y, _ = rows(6, 300, 2, 0.1)
    with pytest.raises(ValueError, match=r"from 300 entries needs at least 600 tokens to learn from, but got 480: give more text"):
        fitted(x, y)


def test_documents_are_left_out_whole() -> None:
    held = held_out(DOCUMENTS)
    assert [held[d == DOCUMENTS].mean() for d in range(10)] == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert held_out([0, 0, 1, 1]).tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match="at least 2 documents, of which some are left out to choose by, but got 1"):
        held_out([3, 3])
