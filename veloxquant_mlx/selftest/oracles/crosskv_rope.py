"""Keys taken from one theta to another: pairs as complex numbers, un-rotated and rotated, in float64."""

import numpy as np


def recode(keys: np.ndarray, positions: np.ndarray, source_base: float, target_base: float) -> np.ndarray:
    half = keys.shape[-1] // 2
    if source_base == target_base:
        return keys.astype(np.float64)
    steps = -np.arange(half) / half
    turn = [np.exp(1j * positions.astype(np.float64)[:, None] * float(base) ** steps) for base in (source_base, target_base)]
    # Products of components, so that an infinite key times a zero sine is what the formula gives: NaN.
    turn = turn[1] * turn[0].conj()
    wide = keys.astype(np.float64)
    first, second = wide[..., :half], wide[..., half:]
    with np.errstate(invalid="ignore"):
        return np.concatenate([first * turn.real - second * turn.imag, first * turn.imag + second * turn.real], axis=-1)
