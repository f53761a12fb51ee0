"""Tables of tc: the basis, the prediction and the widths against float64 formulas; rows that break; files that lie."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tc_cases import layer
from veloxquant_mlx.allocators.shapes import SHAPES, distortion
from veloxquant_mlx.allocators.transforms import LayerRows, TcTables, average_bits, build_tc, widths_for

HEADS, DIM = 2, 8


def test_components_are_uncorrelated_of_unit_variance_and_their_errors_cost_what_the_metric_says() -> None:
    rows = layer()
    tables = build_tc(rows)
    back, forward = tables.back.astype(np.float64), tables.forward()
    for h in range(HEADS):
        at = slice(h * DIM, (h + 1) * DIM)
        np.testing.assert_allclose(back[h] @ forward[h], np.eye(DIM), atol=1e-9)
        y = (rows.k[:, h] - tables.k_mean[h]) @ forward[h]
        # Rounding of back to float16 mixes a little of the large components into the small ones.
        np.testing.assert_allclose(np.cov(y.T, bias=True), np.eye(DIM), atol=0.02)
        cost = back[h] @ rows.fisher_k[at, at] @ back[h].T
        np.testing.assert_allclose(np.diagonal(cost), tables.k_cost[h], rtol=5e-3)
        scale = np.sqrt(np.outer(tables.k_cost[h], tables.k_cost[h]))
        assert np.abs(cost - np.diag(np.diagonal(cost))).max() < 0.02 * scale.max()
    assert np.all(np.diff(tables.k_cost, axis=1) <= 0)


def test_a_metric_of_few_gradients_has_its_small_eigenvalues_raised() -> None:
    """White keys: components are the metric's eigenvectors, costs its eigenvalues, of mean 100."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((4000, 4))
    k = ((k - k.mean(axis=0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(k.T, bias=True))).T)[:, None]
    metric = np.diag([300.0, 99.9, 0.09, 0.01])
    for gradients, floor in ((None, 0.1), (12_000, 0.1), (1200, 1.0), (60, 20.0), (1, 100.0)):
        cost = build_tc(LayerRows(k, k, metric, np.eye(4), gradients)).k_cost[0]
        np.testing.assert_allclose(cost, np.maximum([300.0, 99.9, 0.09, 0.01], floor), rtol=1e-3)
    with pytest.raises(ValueError, match="gradients must be at least 1, but got 0"):
        build_tc(LayerRows(k, k, metric, np.eye(4), 0))


def test_the_prediction_is_least_squares_from_noisy_components() -> None:
    """Against regression on simulated decoded components, whose noise is uncorrelated with them."""
    rows = layer(20_000)
    tables = build_tc(rows)
    widths = np.random.default_rng(0).integers(0, 4, (HEADS, DIM))
    used = np.flatnonzero(widths.reshape(-1))
    y = np.einsum("nhd,hdi->nhi", rows.k - tables.k_mean, tables.forward()).reshape(len(rows.k), -1)
    noisy = y + np.sqrt(tables.noise(widths).reshape(-1)) * np.random.default_rng(1).standard_normal(y.shape)
    v = (rows.v - tables.v_mean).reshape(len(y), -1)
    best = np.linalg.lstsq(noisy[:, used], v, rcond=None)[0]
    w = tables.predictor(widths)
    power = ((v - noisy[:, used] @ w) ** 2).mean(axis=0)
    assert np.all(power < 1.02 * ((v - noisy[:, used] @ best) ** 2).mean(axis=0))
    np.testing.assert_allclose(tables.residual_power(widths), power.reshape(HEADS, DIM).sum(axis=1), rtol=0.03)
    d = np.array([distortion(int(tables.shapes[b - 1, h, i]), b) if (b := widths[h, i]) else 0.0 for h in range(HEADS) for i in range(DIM)])
    np.testing.assert_allclose(tables.noise(widths).reshape(-1), d / (1 - d), rtol=1e-12)


def test_heavy_tails_get_their_shape() -> None:
    rng = np.random.default_rng(3)
    k = np.stack([rng.standard_normal(8000), rng.laplace(size=8000), rng.uniform(-1, 1, 8000)], axis=1)[:, None]
    tables = build_tc(LayerRows(k, rng.standard_normal(k.shape), np.diag([4.0, 2.0, 0.01]), np.eye(3)))
    order = np.abs(tables.back[0]).argmax(axis=1)
    found = {int(component): [SHAPES[s] for s in tables.shapes[:, 0, i]] for i, component in enumerate(order)}
    assert found[0][1:6] == [2.0] * 5 and found[1][1:6] == [1.0] * 5 and found[2][:2] == [2.0] * 2


@pytest.mark.parametrize("bits", (1.25, 1.9, 2.0, 3.35, 6.0))
def test_widths_meet_the_budget_and_no_exchange_of_bits_saves(bits: float) -> None:
    tables = {str(i): build_tc(layer(600, seed=i)) for i in range(3)}
    widths = widths_for(tables, bits)
    assert widths_for(tables, bits) == widths and list(widths) == list(tables)
    most = 2 * 3 * HEADS * DIM
    assert bits - 1 / most - 1e-9 < average_bits(widths) <= bits or all(set("".join(w.k)) == {"8"} for w in widths.values())
    lowest, highest = np.inf, 0.0
    for name, table in tables.items():
        own = widths[name].keys()
        loss = np.array(
            [[[distortion(int(table.shapes[b - 1, h, i]), b) if b else 1.0 for i in range(DIM)] for h in range(HEADS)] for b in range(9)]
        )
        gain = np.minimum.accumulate((loss[:-1] - loss[1:]) * table.k_cost, axis=0)
        for h, i in np.ndindex(own.shape):
            lowest = min(lowest, gain[own[h, i] - 1, h, i]) if own[h, i] else lowest
            highest = max(highest, gain[own[h, i], h, i]) if own[h, i] < 8 else highest
    assert lowest >= highest * (1 - 1e-9)
    assert average_bits(widths) > 1 and all(1 <= b <= 6 for w in widths.values() for b in w.values())


def test_arrays_bring_the_same_tables_back() -> None:
    tables = build_tc(layer(300))
    again = TcTables.from_arrays(tables.to_arrays())
    for name, array in tables.to_arrays().items():
        assert np.array_equal(array, again.to_arrays()[name]), name
    assert np.array_equal(tables.back, again.back) and np.array_equal(tables.c_yy, again.c_yy)
    assert all(np.array_equal(a, b) for a, b in zip(build_tc(layer(300)).to_arrays().values(), tables.to_arrays().values(), strict=True))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    (
        ("k_mean", lambda a: a[0], r"k_mean must be \(H, D\)"),
        ("back", lambda a: a[:, :-1], "back must be float16"),
        ("back", lambda a: np.zeros_like(a), "invertible"),
        ("c_yy", lambda a: a.astype(np.float32), "c_yy must be float16"),
        ("c_yv", lambda a: a * np.float16("nan"), "c_yv must be finite"),
        ("shapes", lambda a: a + np.uint8(9), "shapes must be below 5"),
        ("k_cost", lambda a: -a, "k_cost must not be negative"),
        ("back_size", lambda a: a * 0, "back_size must be positive"),
        ("rows", lambda a: None, "rows must be uint32"),
    ),
)
def test_arrays_that_are_no_tables(name: str, change: object, message: str) -> None:
    arrays = build_tc(layer(100)).to_arrays()
    changed = change(arrays.pop(name))
    with pytest.raises(ValueError, match=message):
        TcTables.from_arrays(arrays if changed is None else arrays | {name: changed})


def test_a_covariance_that_is_none() -> None:
    tables = build_tc(layer(100))
    widths = np.ones((HEADS, DIM), int)
    broken = -np.diag(tables.noise(widths).reshape(-1) + tables.ridge(HEADS * DIM))
    with pytest.raises(ValueError, match="c_yy must be positive definite, but its 16 coded components are not"):
        replace(tables, c_yy=broken).predictor(widths)
    assert tables.predictor(0 * widths).shape == (0, HEADS * DIM)


def check_sane(rows: LayerRows) -> TcTables:
    tables = build_tc(rows)
    TcTables.from_arrays(tables.to_arrays())
    assert np.isfinite(tables.forward()).all()
    widths = widths_for({"0": tables}, 2)["0"]
    assert np.isfinite(tables.predictor(widths.keys())).all() and np.isfinite(tables.residual_power(widths.keys())).all()
    return tables


def test_rows_that_break_others() -> None:
    rows = layer(16, heads=1, dim=32)
    check_sane(rows)  # fewer rows than components
    check_sane(replace(rows, k=rows.k[:1], v=rows.v[:1]))
    check_sane(replace(rows, k=np.ones_like(rows.k), v=np.zeros_like(rows.v)))  # constant
    check_sane(replace(rows, fisher_k=np.zeros((32, 32)), fisher_v=np.zeros((32, 32))))
    wide = rows.k.copy()
    wide[..., 5] *= 1000
    check_sane(replace(rows, k=wide, v=wide))
    check_sane(replace(rows, k=rows.k * 1e-20, v=rows.v * 1e-20))
    check_sane(replace(rows, k=rows.k * 1e4, v=rows.v * 1e4, fisher_k=rows.fisher_k * 1e-9))
    check_sane(replace(rows, k=rows.k.astype(np.float16), v=rows.v.astype(np.float16)))


def test_few_rows_do_not_pass_for_many() -> None:
    """With 16 rows of 32 components the sample has no variance in half the directions; the tables must not believe that."""
    rng = np.random.default_rng(0)
    rows = LayerRows(rng.standard_normal((16, 1, 32)), rng.standard_normal((16, 1, 32)), np.eye(32), np.eye(32))
    tables = build_tc(rows)
    assert tables.k_cost.min() > 0.1
    fresh = rng.standard_normal((500, 1, 32))
    widths = np.full((1, 32), 3)
    y = np.einsum("nhd,hdi->nhi", fresh - tables.k_mean, tables.forward())
    left = rng.standard_normal((500, 32)) - y.reshape(500, 32) @ tables.predictor(widths)
    assert (left**2).sum(axis=1).mean() < 1.5 * 32


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"k": np.zeros((3, 2, 4))}, r"k and v must be \(N, H, D\)"),
        ({"k": np.zeros((0, 2, 8)), "v": np.zeros((0, 2, 8))}, "not empty"),
        ({"fisher_v": np.zeros((3, 3))}, r"fisher_v must be \(16, 16\)"),
        ({"v": np.full((50, 2, 8), np.nan)}, r"v must be finite, but 800 values are not, the first at \[0, 0, 0\]"),
        ({"fisher_k": np.full((16, 16), np.inf)}, "fisher_k must be finite"),
    ),
)
def test_rows_that_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tc(replace(layer(50), **change))


def test_budgets_that_are_refused() -> None:
    with pytest.raises(ValueError, match="must hold a layer"):
        widths_for({}, 2)
    for bits in (1.2, 6.1, float("nan")):
        with pytest.raises(ValueError, match=r"bits must be 1.25..6.0"):
            widths_for({"0": build_tc(layer(50))}, bits)
