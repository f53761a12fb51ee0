"""Codebooks against published values, against their own defining equations, and against their frozen float32 values."""

import json

import numpy as np
import pytest

from tests import codec_oracles as oracle
from tests.golden import make_codecs as golden
from veloxquant_mlx.allocators.codebooks import boundaries, gaussian_codebook, residual_codebook

STAGES = golden.STAGES

# Max (1960), table I: the positive codewords, to the digits printed there or in later corrections of it.
PUBLISHED = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3880, 0.6567, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}
# Mean squared errors on N(0, 1): Max (1960) for one stage, Monte Carlo figures (4 digits at best) for the residual stages.
PUBLISHED_MSE = {(1,): 0.3634, (2,): 0.1175, (3,): 0.03455, (4,): 0.00950, (1, 1): 0.1307, (2, 2): 0.0197, (3, 3): 0.00195, (4, 4): 0.00018}


def tables(bits: tuple[int, ...]) -> list[tuple[float, ...]]:
    first = gaussian_codebook(bits[0])
    return [first, residual_codebook(bits[1], first)] if len(bits) == 2 else [first]


@pytest.mark.parametrize("bits", PUBLISHED)
def test_published_codewords(bits: int) -> None:
    assert gaussian_codebook(bits)[2 ** (bits - 1) :] == pytest.approx(PUBLISHED[bits], abs=6e-5)  # half a unit of the last digit


@pytest.mark.parametrize("bits", PUBLISHED_MSE)
def test_published_errors(bits: tuple[int, ...]) -> None:
    assert oracle.gaussian_mse(tables(bits)) == pytest.approx(PUBLISHED_MSE[bits], rel=0.02 if len(bits) == 2 else 1e-3)


@pytest.mark.parametrize("bits", STAGES)
def test_each_codeword_is_the_mean_of_its_cell(bits: tuple[int, ...]) -> None:
    books = tables(bits)
    weight, y, index = oracle.gaussian_pieces(books)
    size = len(books[-1])
    mass = np.bincount(index, weight, size)
    mean = np.bincount(index, weight * y, size) / mass
    # The grid has 22 000 points per unit: a cell's edge is off by at most one of them, which moves its mean by some 1e-5.
    assert np.abs(mean - np.asarray(books[-1])).max() < 3e-5
    assert mass.min() > 1e-8


@pytest.mark.parametrize("bits", [pair for pair in STAGES if len(pair) == 2])
def test_a_second_stage_is_close_to_the_best_there_is(bits: tuple[int, ...]) -> None:
    """Lloyd's conditions hold at poor solutions too; dynamic programming over a fine histogram finds the best one."""
    books = tables(bits)
    weight, residual, index = oracle.gaussian_pieces(books)
    error = float((weight * (residual - np.asarray(books[-1])[index]) ** 2).sum())
    cells = 512
    edges = np.quantile(np.abs(residual), np.linspace(0, 1, cells + 1), method="inverted_cdf", weights=weight)
    cell = np.clip(np.searchsorted(edges, np.abs(residual), side="right") - 1, 0, cells - 1)
    moments = [np.bincount(cell, weight * np.abs(residual) ** power, cells) for power in range(3)]
    best = best_error(*moments, len(books[-1]) // 2)
    # The histogram costs the optimum up to some per cent where a table has almost as many cells.
    assert error < 1.1 * best + 1e-9


def best_error(mass: np.ndarray, first: np.ndarray, second: np.ndarray, levels: int) -> float:
    """Least squared error of `levels` codewords for histogram cells kept whole."""
    m, f, s = (np.concatenate([[0.0], np.cumsum(moment)]) for moment in (mass, first, second))
    with np.errstate(invalid="ignore", divide="ignore"):
        cost = (s[None] - s[:, None]) - (f[None] - f[:, None]) ** 2 / (m[None] - m[:, None])
    cost[np.tril_indices(len(m))] = np.inf
    np.fill_diagonal(cost, 0.0)
    best = cost[0]
    for _ in range(levels - 1):
        best = (best[:, None] + cost).min(axis=0)
    return float(best[-1])


@pytest.mark.parametrize("bits", STAGES)
def test_tables_are_symmetric_ascending_float32(bits: tuple[int, ...]) -> None:
    book = np.asarray(tables(bits)[-1])
    assert np.array_equal(book, -book[::-1])
    assert np.all(np.diff(book) > 0)
    assert all(value == float(str(np.float32(value))) for value in book)
    middle = np.asarray(boundaries(tuple(book)))
    assert middle[len(middle) // 2] == 0
    assert np.all((book[:-1] < middle) & (middle < book[1:]))


def test_tables_are_the_frozen_ones() -> None:
    """Files carry their tables, so a change breaks no file; but the same spec must give the same bytes on every machine."""
    frozen = json.loads(golden.CODEBOOKS.read_text())
    assert frozen == golden.codebooks()


@pytest.mark.parametrize("bits", (0, 9, -1))
def test_impossible_sizes_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.8"):
        gaussian_codebook(bits)
    with pytest.raises(ValueError, match=r"1\.\.8"):
        residual_codebook(bits, gaussian_codebook(1))
