"""RaBitQ with 2 to 8 bits: the fit of the grid, the estimator and its error bound, and scores straight from codes."""

import math

import mlx.core as mx
import numpy as np
import pytest

from tests import codec_oracles as oracle
from tests.test_codecs import codec, numpy64, sample
from veloxquant_mlx.codecs import parse_codec, rabitq_scores
from veloxquant_mlx.codecs.rabitq import Rabitq, grid

# E |y - q|^2 on N(0, 1) of the best uniform grid with points at half-integers (Max 1960).
UNIFORM_MSE = {1: 0.3634, 2: 0.1188, 3: 0.0374, 4: 0.01154}


def grid_codec(bits: int, scale: str, seed: int = 1) -> Rabitq:
    return Rabitq((grid(bits),), scale, False, seed)


def points(y: np.ndarray, t: np.ndarray, bits: int) -> np.ndarray:
    half = 1 << bits - 1
    return 2 * np.clip(np.floor(y * t / 2 + half), 0, 2 * half - 1) - (2 * half - 1)


def best_cosine(y: np.ndarray, bits: int) -> float:
    """Largest cosine of y with its codes, over every t at which a code changes."""
    magnitude = np.abs(y)
    breaks = np.unique([2 * k / a for k in range(1, 1 << bits - 1) for a in magnitude])
    best = 0.0
    for t in np.array_split(np.concatenate([breaks * (1 + 1e-12), breaks[:1] / 2]), 1 + len(breaks) // 512):
        q = points(y[None], t[:, None], bits)
        best = max(best, float((q @ y / np.sqrt((q * q).sum(-1) * (y @ y))).max()))
    return best


@pytest.mark.parametrize(("bits", "excess"), ((2, 1.01), (3, 1.01), (4, 1.01), (6, 1.04), (8, 1.2)))
def test_grids_are_fitted_almost_as_well_as_by_exhaustive_search(bits: int, excess: float) -> None:
    x = np.random.default_rng(bits).standard_normal((1, 24, 64)).astype(np.float32)
    subject = grid_codec(bits, "ls")
    codes = oracle.unpack(np.array(subject.encode(mx.array(x))["codes"]), bits, 64)
    y, q = x[0].astype(np.float64) @ oracle.rotation(64, 1).T, 2.0 * codes[0] - ((1 << bits) - 1)
    lost = 1 - (y * q).sum(-1) ** 2 / ((y * y).sum(-1) * (q * q).sum(-1))
    least = np.array([1 - best_cosine(row, bits) ** 2 for row in y])
    assert np.all(lost >= least * (1 - 1e-6))
    assert lost.mean() <= excess * least.mean()


@pytest.mark.parametrize("dim", (2, 6, 36, 64, 80))
@pytest.mark.parametrize("kind", ("ls", "unbiased", "norm"))
@pytest.mark.parametrize("bits", (2, 3, 4, 5, 6, 7, 8))
def test_codes_are_one_grids_and_scales_and_values_the_oracles(bits: int, kind: str, dim: int) -> None:
    x, subject = sample((2, 13, dim), seed=dim), grid_codec(bits, kind, seed=5)
    parts = subject.encode(x)
    codes, scale = oracle.unpack(np.array(parts["codes"]), bits, dim), numpy64(parts["scale"])
    y, q = numpy64(x) @ oracle.rotation(dim, 5).T, 2.0 * codes - ((1 << bits) - 1)
    # One t must put every value of a row into its cell: cells [q - 1, q + 1) / t, the outer ones open.
    rows = scale > 0
    assert rows.mean() > 0.9
    last = (1 << bits) - 1
    # float32: y is off by a few 2**-22 of the row, so that the sign of a value close to 0 is open, and an edge is off by 1e-3 at most.
    sure = 1e-5 * np.abs(y).max(-1, keepdims=True)
    lower, upper = np.where(codes == 0, -np.inf, q - 1), np.where(codes == last, np.inf, q + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        at_least = np.where(y > sure, lower / y, np.where(y < -sure, upper / y, -np.inf)).max(-1)
        at_most = np.where(y > sure, upper / y, np.where(y < -sure, lower / y, np.inf)).min(-1)
    assert np.all((at_least <= at_most * (1 + 1e-3))[rows])
    yy, yq, qq = (y * y).sum(-1), (y * q).sum(-1), (q * q).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = {"ls": yq / qq, "unbiased": yy / yq, "norm": np.sqrt(yy / qq)}[kind]
    np.testing.assert_allclose(scale[rows], wanted[rows], rtol=2**-8 + 1e-5)  # one rounding to bfloat16
    decoded = numpy64(subject.decode(parts, x.shape, mx.float32))
    expected = scale[..., None] * (q @ oracle.rotation(dim, 5))
    np.testing.assert_allclose(decoded, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("bits", UNIFORM_MSE)
def test_error_on_gaussian_rows_is_the_uniform_grids(bits: int) -> None:
    x = mx.random.normal((1, 64, 4096), key=mx.random.key(bits))
    subject = grid_codec(bits, "ls")
    error = mx.mean(mx.square(x - subject.decode(subject.encode(x), x.shape, x.dtype))) / mx.mean(mx.square(x))
    # 262144 values: 1 % of sampling; fitting t to each row gains up to 1 % more at this length.
    assert float(error.item()) == pytest.approx(UNIFORM_MSE[bits], rel=0.025)


@pytest.mark.parametrize("bits", (2, 4))
def test_unbiased_scores_average_to_the_true_ones(bits: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 1, 128)).astype(np.float32)
    w = x[0] + 2 * rng.standard_normal((1, 128)).astype(np.float32)
    estimates = []
    for seed in range(300):
        subject = grid_codec(bits, "unbiased", seed)
        estimates.append(float(rabitq_scores.exact(subject, subject.encode(mx.array(x)), mx.array(w[None])).item()))
    true = float(x[0, 0] @ w[0])
    # One rounding of the scale to bfloat16 per estimate, averaged over unlike scales.
    assert np.mean(estimates) == pytest.approx(true, abs=4 * np.std(estimates) / math.sqrt(len(estimates)) + 2**-10 * abs(true))


@pytest.mark.parametrize("bits", (1, 2, 3, 4))
@pytest.mark.parametrize("towards", (0.0, 1.0))
def test_the_papers_error_bound_holds_as_often_as_it_says(bits: int, towards: float) -> None:
    """|<o, w> estimated - true| <= sqrt((1 - c^2) / c^2) eps0 / sqrt(D - 1) for unit o, w with c the cosine of o and its code.

    The error is that times a coordinate of a random unit vector of D - 1 dimensions, times |w orthogonal to o|: at eps0 = 1.9 a
    Gaussian leaves it in 5.7 % of cases if w is orthogonal to o, in fewer else.
    """
    eps0, dim, rows = 1.9, 128, 400
    rng, outside, total = np.random.default_rng(bits), 0, 0
    for seed in range(12):
        o = rng.standard_normal((rows, dim))
        o /= np.linalg.norm(o, axis=-1, keepdims=True)
        w = rng.standard_normal((rows, dim)) + towards * math.sqrt(dim) * o
        if not towards:
            w -= (w * o).sum(-1, keepdims=True) * o
        w /= np.linalg.norm(w, axis=-1, keepdims=True)
        subject = grid_codec(bits, "unbiased", seed)
        parts = subject.encode(mx.array(o[:, None].astype(np.float32)))
        estimate = numpy64(rabitq_scores.exact(subject, parts, mx.array(w[:, None].astype(np.float32))))[:, 0, 0]
        q = 2.0 * oracle.unpack(np.array(parts["codes"]), bits, dim)[:, 0] - ((1 << bits) - 1)
        cosine = (q * (o @ oracle.rotation(dim, seed).T)).sum(-1) / np.linalg.norm(q, axis=-1)
        bound = np.sqrt((1 - cosine**2) / cosine**2) * eps0 / math.sqrt(dim - 1)
        outside += int((np.abs(estimate - (o * w).sum(-1)) > bound).sum())
        total += rows
    gaussian = math.erfc(eps0 / math.sqrt(2))
    deviation = math.sqrt(gaussian * (1 - gaussian) / total)
    assert outside / total < gaussian + 4 * deviation
    if not towards:
        assert outside / total > gaussian - 5 * deviation  # the bound is tight, and a scale twice too large would show


@pytest.mark.parametrize(
    "spec", ("rabitq:ls:center", "rabitq:unbiased:nocenter", "rabitq-2:ls:center", "rabitq-5:unbiased:nocenter", "rabitq-8")
)
@pytest.mark.parametrize("dim", (6, 62, 64, 80))
def test_scores_from_codes_are_those_of_the_decoded_keys(spec: str, dim: int) -> None:
    subject, x = codec(spec), sample((2, 50, dim))
    assert isinstance(subject, Rabitq)
    parts = subject.encode(x)
    w = np.random.default_rng(3).standard_normal((2, 3, dim)).astype(np.float32)
    decoded = numpy64(subject.decode(parts, x.shape, mx.float32))
    wanted = w.astype(np.float64) @ decoded.transpose(0, 2, 1)
    # float32: a few roundings of the largest products.
    tolerance = 1e-5 * (np.linalg.norm(w, axis=-1)[..., None] * np.linalg.norm(decoded, axis=-1)[:, None]).max()
    np.testing.assert_allclose(numpy64(rabitq_scores.exact(subject, parts, mx.array(w))), wanted, rtol=0, atol=tolerance)

    for query_bits in (1, 4, 8):
        got = numpy64(rabitq_scores.popcount(subject, parts, mx.array(w), query_bits))
        z = w.astype(np.float64) @ oracle.rotation(dim, subject.seed).T
        low, step = z.min(-1, keepdims=True), (z.max(-1, keepdims=True) - z.min(-1, keepdims=True)) / ((1 << query_bits) - 1)
        q = 2.0 * oracle.unpack(np.array(parts["codes"]), subject.bits[0], dim) - ((1 << subject.bits[0]) - 1)
        bound = np.abs(numpy64(parts["scale"]) * np.abs(q).sum(-1))[:, None] * step / 2
        assert np.all(np.abs(got - wanted) <= bound + tolerance)
        # The same numbers as the quantised query gives when it is used as it is, where no value lies on a boundary of its cells.
        v = np.rint((z - low) / step)
        clear = np.all(np.abs((z - low) / step - np.floor((z - low) / step) - 0.5) > 1e-4, axis=-1)
        assert clear.any()
        quantised = ((low + step * v) @ oracle.rotation(dim, subject.seed)) @ (decoded - _means(parts, decoded)).transpose(0, 2, 1)
        quantised += w.astype(np.float64) @ _means(parts, decoded).transpose(0, 2, 1)
        np.testing.assert_allclose(got[clear], quantised[clear], rtol=0, atol=4 * tolerance)


def _means(parts: dict[str, mx.array], decoded: np.ndarray) -> np.ndarray:
    """The mean where a row has it, else 0."""
    if "mean" not in parts:
        return np.zeros_like(decoded)
    return np.where(np.signbit(numpy64(parts["scale"]))[..., None], 0.0, numpy64(parts["mean"])[:, None])


def test_scores_refuse_what_does_not_fit() -> None:
    subject = codec("rabitq-2")
    assert isinstance(subject, Rabitq)
    parts = subject.encode(sample((2, 5, 64)))
    with pytest.raises(ValueError, match=r"\(2, Q, D\)"):
        rabitq_scores.exact(subject, parts, mx.zeros((1, 3, 64)))
    with pytest.raises(ValueError, match="codes"):
        rabitq_scores.exact(subject, parts, mx.zeros((2, 3, 128)))
    with pytest.raises(ValueError, match="query_bits"):
        rabitq_scores.popcount(subject, parts, mx.zeros((2, 3, 64)), 9)
    empty = subject.encode(mx.zeros((2, 0, 64)))
    assert rabitq_scores.exact(subject, empty, mx.zeros((2, 3, 64))).shape == (2, 3, 0)
    assert rabitq_scores.popcount(subject, empty, mx.zeros((2, 3, 64))).shape == (2, 3, 0)


@pytest.mark.parametrize(
    "spec", ("rabitq-4", "k=rabitq-3:unbiased,v=rabitq-2", "k=rabitq,v=rabitq-4", "k=raw,v=rabitq-8:ls:nocenter:seed=3")
)
def test_specs_round_trip(spec: str) -> None:
    plan = parse_codec(spec)
    assert plan.spec() == spec
    assert parse_codec(f"k={plan.k.spec()},v={plan.v.spec()}") == plan


def test_default_scales() -> None:
    assert [codec(spec).scale for spec in ("rabitq", "rabitq-2", "rabitq-8")] == ["ls", "norm", "norm"]
    assert parse_codec("rabitq-2").v.scale == "unbiased"


@pytest.mark.parametrize("spec", ("rabitq-1", "rabitq-9", "rabitq4", "rabitq-2+2"))
def test_wrong_specs_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"rabitq-N with N in 2\.\.8"):
        parse_codec(spec)
