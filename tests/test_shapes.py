"""Lloyd-Max points of generalised Gaussians against closed forms and textbook figures."""

import math

import numpy as np
import pytest

from veloxquant_mlx.allocators.codebooks import gaussian_codebook
from veloxquant_mlx.allocators.shapes import MAX_BITS, SHAPES, boundaries, distortion, points

GAUSS, LAPLACE = SHAPES.index(2.0), SHAPES.index(1.0)


def density(beta: float, x: np.ndarray) -> np.ndarray:
    scale = math.sqrt(math.gamma(1 / beta) / math.gamma(3 / beta))
    return beta / (2 * scale * math.gamma(1 / beta)) * np.exp(-((np.abs(x) / scale) ** beta))


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_beta_2_is_the_gaussian_table(bits: int) -> None:
    np.testing.assert_allclose(points(GAUSS, bits), gaussian_codebook(bits), atol=4e-7)  # two float32 roundings of up to 4.2


def test_published_distortions() -> None:
    """Max 1960 (Gaussian); Adams and Giesler 1978 and Noll and Zelinski 1979 (Laplace)."""
    np.testing.assert_allclose([distortion(GAUSS, b) for b in range(1, 6)], (0.3634, 0.1175, 0.03454, 0.009497, 0.002499), rtol=3e-3)
    np.testing.assert_allclose([distortion(LAPLACE, b) for b in range(1, 5)], (0.5, 0.1762, 0.0545, 0.0154), rtol=3e-3)
    assert distortion(LAPLACE, 1) == pytest.approx(0.5, abs=1e-11)
    assert points(LAPLACE, 1)[1] == pytest.approx(math.sqrt(0.5), abs=1e-7)
    assert [distortion(shape, 0) for shape in range(len(SHAPES))] == [1.0] * len(SHAPES)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("bits", (1, 2, 3, 5, 8))
def test_points_are_the_means_of_their_cells_and_the_distortion_is_theirs(shape: int, bits: int) -> None:
    """Both by a sum over a fine grid, x = t^3, of the density."""
    t = (np.arange(2_000_000) + 0.5) * (8.0 / 2_000_000)
    x = t**3
    weight = density(SHAPES[shape], x) * 3 * t**2 * (t[1] - t[0])
    c = points(shape, bits).astype(np.float64)
    assert np.array_equal(c, -c[::-1]) and np.all(np.diff(c) > 0) and not points(shape, bits).flags.writeable
    half = c[len(c) // 2 :]
    cell = np.searchsorted(boundaries(shape, bits)[len(half) :], x)
    mass, moment = (np.bincount(cell, values, len(half)) for values in (weight, weight * x))
    np.testing.assert_allclose(half, moment / mass, rtol=1e-4)  # an edge falls within a step of the grid
    assert 2 * float(np.sum(weight * x**2)) == pytest.approx(1, abs=1e-6)
    assert distortion(shape, bits) == pytest.approx(2 * float(np.sum(weight * (x - half[cell]) ** 2)), rel=1e-4)


@pytest.mark.parametrize(("shape", "bits", "message"), ((5, 1, "shape must be 0..4, but got 5"), (0, 9, "bits must be 1..8, but got 9")))
def test_what_there_is_not(shape: int, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        points(shape, bits)
