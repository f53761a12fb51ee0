"""Entropy coding of quantised components: chunks of CHUNK tokens, each an independent ANS stream (Duda 2013) over the bank's models.

A chunk's stream holds, in the order of decoding:

    ranks    the class of each component, as its rank by distance from the expected class
    symbols  class by class in ascending order, in a class token by token, components in ascending order
    low      of shift classes, after the class's symbols: n low bits, at most 16 at a time, the lowest first
    escapes  after each class's symbols: the low, then the high 16 bits of each escaped value
    END      16 bits that are always the same: whatever goes wrong before shows here, but for one time in 65536

ANS is `constriction`'s with 32-bit words, a 64-bit state and 24-bit probabilities made from the bank's integers: float64 sums of integers
are exact, and so are the divisions by 2^16, so a model is the same everywhere.
"""

from collections.abc import Iterator
from functools import cache

import constriction
import numpy as np

from veloxquant_mlx.allocators.symbol_models import CHECKSUM, CHUNK, LAPLACE_T, TOTAL, bank, checksum, choose

MAX_WORDS = 4  # per symbol and class index; a longer stream is refused before it is decoded
_WORD = 16
_END = 0xA5C3
_STREAM = constriction.stream
AnsCoder, Categorical, Uniform = _STREAM.stack.AnsCoder, _STREAM.model.Categorical, _STREAM.model.Uniform


@cache
def _models() -> tuple[list[Categorical], Categorical]:
    def model(frequencies: np.ndarray) -> Categorical:
        return Categorical(frequencies.astype(np.float64) / TOTAL, perfect=False)

    if checksum() != CHECKSUM:
        raise RuntimeError(
            f"the models' frequencies have CRC-32 {checksum():#x} here and {CHECKSUM:#x} in the format; math.exp or erfc is off."
        )
    return [model(f) for f in bank().frequencies], model(bank().rank_frequencies)


@cache
def _uniform(bits: int) -> Uniform:
    return Uniform(1 << bits)


def _groups(classes: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
    """(components, class of the symbols, low bits) of each class there is, ascending."""
    plain = len(bank().frequencies)
    for c in np.unique(classes).tolist():
        yield np.flatnonzero(classes == c), c if c < plain else len(LAPLACE_T) - 1, max(0, c - plain + 1)


def _pieces(bits: int) -> list[tuple[int, int]]:
    """(first bit, number of bits) of each uniform piece of a `bits`-bit number."""
    return [(at, min(_WORD, bits - at)) for at in range(0, bits, _WORD)]


def encode_chunk(q: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The words of one chunk.

    Args:
        q: (n, M) integers of 32 bits, n from 1 to CHUNK.
        expected: (M,) classes known to the decoder.
    Returns:
        uint32 (words,)
    """
    q = q.astype(np.int32)
    classes, _ = choose(q, expected)
    models, rank_model = _models()
    runs: list[tuple[np.ndarray, Categorical | Uniform]] = [(bank().rank[expected, classes], rank_model)]
    for components, model, low in _groups(classes):
        values = q[:, components].ravel()
        high, reach = values >> low, int(bank().reach[model])
        escaped = np.abs(high.astype(np.int64)) > reach
        runs.append((np.where(escaped, 2 * reach + 1, high + reach), models[model]))
        runs += [((values >> at) & ((1 << bits) - 1), _uniform(bits)) for at, bits in _pieces(low)]
        if escaped.any():
            runs += [((high[escaped] >> at) & ((1 << bits) - 1), _uniform(bits)) for at, bits in _pieces(32)]
    coder = AnsCoder()
    runs.append((np.array([_END]), _uniform(_WORD)))
    for symbols, m in reversed(runs):
        coder.encode_reverse(np.ascontiguousarray(symbols, np.int32), m)
    return coder.get_compressed()


def decode_chunk(words: np.ndarray, expected: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """What `encode_chunk` was given: q int32 (tokens, M), and the classes (M,).

    Raises:
        ValueError: these are not the words of such a chunk.
    """
    if len(words) > MAX_WORDS * (tokens + 1) * len(expected) + 4:
        raise ValueError(f"[decode_chunk] words must be fewer for {tokens} x {len(expected)} symbols, but got {len(words)}.")
    coder = AnsCoder(np.ascontiguousarray(words, np.uint32))
    models, rank_model = _models()
    # Models have no other symbols than these, whatever the words are, so nothing below indexes out of its table.
    classes = bank().order[expected, coder.decode(rank_model, len(expected))]
    q = np.empty((tokens, len(expected)), np.int32)
    for components, model, low in _groups(classes):
        reach, count = int(bank().reach[model]), tokens * len(components)
        symbols = coder.decode(models[model], count)
        high, escaped = symbols - reach, np.flatnonzero(symbols > 2 * reach)
        values = np.zeros(count, np.int32)
        for at, bits in _pieces(low):
            values |= coder.decode(_uniform(bits), count) << at
        if len(escaped):
            pieces = [coder.decode(_uniform(bits), len(escaped)).astype(np.uint32) << np.uint32(at) for at, bits in _pieces(32)]
            high[escaped] = (pieces[0] | pieces[1]).view(np.int32)
        q[:, components] = (values | (high << low)).reshape(tokens, -1)
    end = coder.decode(_uniform(_WORD), 1)[0]
    if end != _END or not coder.is_empty():
        raise ValueError(f"[decode_chunk] words must end in {_END:#x}, but got {end:#x} and {coder.num_bits()} bits more.")
    return q, classes


def encode(q: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All chunks of (S, M) symbols.

    Returns:
        words uint32, and the number of words of each chunk, uint32 (ceil(S / CHUNK),)
    """
    chunks = [encode_chunk(q[start : start + CHUNK], expected) for start in range(0, len(q), CHUNK)]
    return np.concatenate([np.empty(0, np.uint32), *chunks]), np.array([len(c) for c in chunks], np.uint32)
