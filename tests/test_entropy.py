"""The entropy coder: every integer comes back, at the length its models say, and no bytes do worse than an error."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from veloxquant_mlx.allocators import symbol_models as models
from veloxquant_mlx.allocators.symbol_models import CHUNK, TOTAL, bank, centroids, choose, shifted
from veloxquant_mlx.codecs import _entropy

INT32 = np.iinfo(np.int32)
CLASSES = len(bank().t)


def residuals(tokens: int, width: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Laplace components whose deviations differ by e from one to the next."""
    rng = np.random.default_rng(seed)
    return np.rint(rng.laplace(size=(tokens, width)) * np.exp(rng.standard_normal(width)) * scale / math.sqrt(2)).astype(np.int32)


def round_trip(q: np.ndarray, expected: np.ndarray) -> int:
    """Words taken; asserts that q comes back."""
    words, sizes = _entropy.encode(q, expected)
    assert sizes.sum() == len(words) and len(sizes) == -(-len(q) // CHUNK)
    at = 0
    for i, size in enumerate(sizes.tolist()):
        chunk = q[i * CHUNK : (i + 1) * CHUNK]
        got, classes = _entropy.decode_chunk(words[at : at + size], expected, len(chunk))
        assert np.array_equal(got, chunk) and got.dtype == np.int32
        assert np.array_equal(classes, choose(chunk, expected)[0])
        at += size
    return len(words)


@settings(max_examples=80, deadline=None)
@given(
    q=hnp.arrays(
        np.int32,
        st.tuples(st.integers(0, 40), st.integers(1, 6)),
        elements=st.one_of(st.integers(-2, 2), st.integers(-300, 300), st.integers(INT32.min, INT32.max)),
    ),
    data=st.data(),
)
def test_every_integer_comes_back(q: np.ndarray, data: st.DataObject) -> None:
    expected = data.draw(hnp.arrays(np.int64, q.shape[1], elements=st.integers(0, CLASSES - 1)))
    round_trip(q, expected)


@pytest.mark.parametrize("value", (0, 1, -1, 180, 181, -182, 1 << 16, INT32.max, INT32.min))
def test_constant_columns_and_the_extremes(value: int) -> None:
    q = np.zeros((300, 3), np.int32)
    q[:, 1], q[7, 2] = value, value
    round_trip(q, np.zeros(3, int))


@pytest.mark.parametrize("scale", (0.2, 1.0, 5.0, 100.0))
def test_length_is_the_ideal_one(scale: float) -> None:
    """1024 tokens of 192 components: within 0.5 % of -log2 of the models, and of the entropy within what a class's index and shape cost."""
    q = residuals(1024, 192, scale=scale)
    expected, _ = choose(q)
    ideal = sum(choose(q[start : start + CHUNK], expected)[1] for start in range(0, 1024, CHUNK))
    words = round_trip(q, expected)
    assert ideal < 32 * words < 1.005 * ideal
    entropy = 0.0
    for column in q.T:
        counts = np.unique(column, return_counts=True)[1]
        entropy -= float((counts * np.log2(counts / 1024)).sum())
    # Few counts among many values make the empirical entropy too small at the largest scale.
    assert 32 * words < entropy * (1.03 if scale < 10 else 1.3)


def test_chosen_classes_are_the_shortest() -> None:
    """Against code lengths symbol by symbol, from the frequencies alone."""
    b, q = bank(), residuals(60, 20, scale=3.0)
    q[5, 3], q[:, 4] = 100_000, q[:, 4] * 5000
    expected = np.arange(20) * 3 % CLASSES
    plain = len(b.frequencies)

    def length(column: np.ndarray, c: int) -> float:
        low, model = (0, c) if c < plain else (c - plain + 1, len(models.LAPLACE_T) - 1)
        high, reach = column.astype(np.int64) >> low, b.reach[model]
        escaped = np.abs(high) > reach
        counts = b.frequencies[model][np.where(escaped, 2 * reach + 1, np.clip(high, -reach, reach) + reach)]
        return float((16 - np.log2(counts)).sum()) + low * len(column) + 32 * int(escaped.sum())

    lengths = np.array([[length(column, c) for c in range(CLASSES)] for column in q.T])
    lengths += (16 - np.log2(b.rank_frequencies))[b.rank[expected]]
    classes, total = choose(q, expected)
    # float32 sums of 60 lengths
    assert total == pytest.approx(lengths.min(axis=1).sum(), rel=1e-5)
    np.testing.assert_allclose(lengths[np.arange(20), classes], lengths.min(axis=1), rtol=1e-5)
    assert len(set(classes.tolist())) > 5 and classes[4] >= plain > classes[3]


# --- models


def test_frequencies_are_whole_and_far_from_a_tie() -> None:
    """Another mathematics library, right to 1e-12, rounds to the same integers."""
    b = bank()
    for family, t, counts in zip(b.family, b.t, b.frequencies, strict=False):
        exact = models.exact_frequencies(int(family), int(t))
        assert counts.sum() == TOTAL and counts.min() >= 1 and len(counts) == 2 * len(exact)
        assert np.array_equal(counts[:-1], counts[-2::-1])
        distance = np.abs(exact - np.floor(exact) - 0.5)
        assert distance.min() > 1e-9 * TOTAL, (family, t, distance.min())
        # the cut: the first symbol without a place of its own would have had less than half a unit
        assert exact[-1] < TOTAL and (len(exact) < 3 or exact[:-1].min() >= 0.5)
    assert b.rank_frequencies.sum() == TOTAL and b.rank_frequencies.min() >= 1
    assert models.checksum() == models.CHECKSUM
    assert all(np.array_equal(np.sort(row), np.arange(CLASSES)) and row[0] == i for i, row in enumerate(b.order))


def test_frequencies_and_centroids_are_those_of_the_densities() -> None:
    """Against sums over a fine grid of the densities."""
    b, fine = bank(), 2.0**-10
    x = np.arange(fine / 2, 60, fine)
    for c in (4, 8, 12, len(models.LAPLACE_T) + 2, len(models.LAPLACE_T) + 8):
        s = 2.0 ** (b.t[c] / 2)
        density = np.exp(-np.sqrt(2) * x / s) if b.family[c] == 0 else np.exp(-0.5 * (x / s) ** 2)
        density /= 2 * density.sum()
        symbols, reach, middle = np.rint(x).astype(int), int(b.reach[c]), b.centroid.shape[1] // 2
        for v in range(min(4, reach + 1)):
            mass = density[symbols == v].sum()
            assert b.frequencies[c][reach + v] == pytest.approx(TOTAL * mass * (2 if v == 0 else 1), abs=3, rel=1e-3)
            if v:
                assert b.centroid[c, middle + v] == pytest.approx((density * x)[symbols == v].sum() / mass, abs=1e-3)
                assert b.centroid[c, middle - v] == -b.centroid[c, middle + v]


@pytest.mark.parametrize("unbiased", (False, True))
def test_decoded_components_are_means_or_unbiased(unbiased: bool) -> None:
    rng = np.random.default_rng(0)
    y = rng.laplace(size=(100_000, 1)) / math.sqrt(2)
    q = np.rint(y).astype(np.int32)
    decoded = centroids(q, choose(q)[0], unbiased).astype(np.float64)
    # 1e5 samples: 3 standard errors of a ratio of second moments
    if unbiased:
        assert (decoded * y).sum() == pytest.approx((y * y).sum(), rel=0.02)
    else:
        assert (decoded * y).sum() == pytest.approx((decoded * decoded).sum(), rel=0.02)
        assert ((decoded - y) ** 2).mean() <= min(((q * g - y) ** 2).mean() for g in (0.8, 0.9, 1.0, 1.1))


def test_expected_classes_follow_the_step() -> None:
    b, same = bank(), np.arange(CLASSES)
    assert np.array_equal(shifted(same, 0), same)
    for steps in (4, -3, 1000):
        moved, wanted = shifted(same, steps), b.t + steps
        assert np.array_equal(b.family[moved], b.family)
        # Shift classes are an octave apart, two half octaves.
        for family in (0, 1):
            ladder = b.t[b.family == family]
            nearest = np.abs(ladder[None] - wanted[:, None]).min(axis=1)
            assert np.array_equal(np.abs(b.t[moved] - wanted)[b.family == family], nearest[b.family == family])


# --- hostile streams


def test_a_truncated_or_longer_stream_is_refused() -> None:
    q = residuals(CHUNK, 24)
    expected, _ = choose(q)
    words = _entropy.encode_chunk(q, expected)
    for bad in (words[:-1], words[1:], words[:0], words[: len(words) // 2], np.append(words, np.uint32(1)), np.append(words, np.uint32(0))):
        with pytest.raises(ValueError, match=r"words|compressed"):
            _entropy.decode_chunk(bad, expected, CHUNK)
    with pytest.raises(ValueError, match="must be fewer"):
        _entropy.decode_chunk(np.ones(10**6, np.uint32), expected, CHUNK)


@settings(max_examples=60, deadline=None)
@given(words=hnp.arrays(np.uint32, st.integers(0, 300)), seed=st.integers(0, 99), tokens=st.integers(1, CHUNK))
def test_any_words_decode_or_are_refused(words: np.ndarray, seed: int, tokens: int) -> None:
    expected = np.random.default_rng(seed).integers(0, CLASSES, 5)
    try:
        q, classes = _entropy.decode_chunk(words, expected, tokens)
    except ValueError:
        return
    assert q.shape == (tokens, 5) and classes.min() >= 0 and classes.max() < CLASSES
    assert np.isfinite(centroids(q, classes, True)).all()


def test_a_flipped_bit_is_nearly_always_refused() -> None:
    q = residuals(CHUNK, 24)
    expected, _ = choose(q)
    words = _entropy.encode_chunk(q, expected)
    rng, passed = np.random.default_rng(0), 0
    for _ in range(200):
        bad = words.copy()
        bad[rng.integers(len(bad))] ^= np.uint32(1 << rng.integers(32))
        try:
            got, _ = _entropy.decode_chunk(bad, expected, CHUNK)
            passed += 1
            assert not np.array_equal(got, q)
        except ValueError:
            pass
    # One in 65536 would pass; digests guard the file besides.
    assert passed == 0
