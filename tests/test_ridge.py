"""Ridge maps against least squares written out in float64, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.bridges.ridge import PENALTIES, fit_ridge, held_out

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


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), inputs=st.integers(1, 24), outputs=st.integers(1, 20))
def test_is_ridge_regression(seed: int, inputs: int, outputs: int) -> None:
    x, y, _ = rows(seed, inputs, outputs, 0.3)
    held = held_out(DOCUMENTS)
    ridge = fit_ridge(x, y, held, low_rank=False)
    # The same penalty, as a least-squares problem with rows added: another way to the same numbers.
    a, b = x[~held].astype(np.float64), y[~held].astype(np.float64)
    a, b = a - a.mean(0), b - b.mean(0)
    added = np.sqrt(ridge.penalty * np.sum(a * a) / inputs)
    wanted = np.linalg.lstsq(np.vstack([a, added * np.eye(inputs)]), np.vstack([b, np.zeros((inputs, outputs))]), rcond=None)[0]
    # float32 rows of size 1: 6e-8 each, times the condition of the Gram matrix, at most 1e2 here.
    assert np.allclose(ridge.left, wanted, atol=2e-5 * max(1.0, np.abs(wanted).max()))
    residual = np.sum((applied(ridge, x[held]) - y[held]) ** 2) / np.sum((y[held] - y[~held].mean(0)) ** 2)
    assert ridge.unexplained == pytest.approx(residual, rel=1e-3, abs=1e-5)


def test_the_penalty_is_the_best_on_documents_left_out() -> None:
    x, y, _ = rows(1, 24, 4, 5.0)
    held = held_out(DOCUMENTS)
    chosen = fit_ridge(x, y, held, low_rank=False)
    a, b = x[~held] - x[~held].mean(0), y[~held] - y[~held].mean(0)
    losses = []
    for penalty in PENALTIES:
        w = np.linalg.solve(a.T @ a + penalty * np.sum(a * a) / 24 * np.eye(24), a.T @ b)
        losses.append(np.sum(((x[held] - x[~held].mean(0)) @ w + y[~held].mean(0) - y[held]) ** 2))
    assert chosen.penalty == PENALTIES[int(np.argmin(losses))]
    assert chosen.penalty > PENALTIES[0]


def test_a_low_rank_is_found_and_costs_little() -> None:
    x, y, _ = rows(2, 32, 32, 0.01, rank=2)
    held = held_out(DOCUMENTS)
    full, low = fit_ridge(x, y, held, low_rank=False), fit_ridge(x, y, held)
    assert full.right is None and low.right is not None
    assert low.left.shape == (32, 2) and low.right.shape == (2, 32)
    assert low.unexplained <= full.unexplained + 0.0101 * (1 - full.unexplained)


def test_full_rank_maps_stay_whole() -> None:
    x, y, _ = rows(3, 16, 16, 0.01)
    assert fit_ridge(x, y, held_out(DOCUMENTS)).right is None


def test_noise_is_not_explained() -> None:
    x, _, _ = rows(4, 16, 8, 0.0)
    y = np.random.default_rng(0).standard_normal((len(x), 8)).astype(np.float32)
    assert fit_ridge(x, y, held_out(DOCUMENTS)).unexplained > 0.95


def test_constant_targets_are_their_mean() -> None:
    x, _, _ = rows(5, 4, 3, 0.0)
    ridge = fit_ridge(x, np.full((len(x), 3), 7, np.float32), held_out(DOCUMENTS))
    assert np.allclose(applied(ridge, x), 7, atol=1e-4) and ridge.unexplained == 0


def test_too_few_rows_are_refused() -> None:
    x, y, _ = rows(6, 300, 2, 0.1)
    with pytest.raises(ValueError, match=r"from 300 entries needs at least 600 tokens to learn from, but got 480: give more text"):
        fit_ridge(x, y, held_out(DOCUMENTS))


def test_documents_are_left_out_whole() -> None:
    held = held_out(DOCUMENTS)
    assert [held[d == DOCUMENTS].mean() for d in range(10)] == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert held_out([0, 0, 1, 1]).tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match="at least 2 documents, of which some are left out to choose by, but got 1"):
        held_out([3, 3])
