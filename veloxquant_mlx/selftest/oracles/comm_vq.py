"""A product code decoded and rotated, entry by entry in float64."""

import numpy as np


def decode(
    indices: np.ndarray, codebook: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, n_cb: int, sub_dim: int, cb_size: int
) -> np.ndarray:
    size, half = n_cb * sub_dim, n_cb * sub_dim // 2
    table = codebook.astype(np.float64)
    flat = np.zeros((len(indices), size))
    for d in range(size):
        part = d // sub_dim
        flat[:, d] = table[part, np.minimum(indices[:, part].astype(np.int64), cb_size - 1), d % sub_dim]
    angles = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)
    cosine, sine = np.cos(angles), np.sin(angles)
    first, second = flat[:, :half], flat[:, half:]
    turned = np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=1)
    return np.where(np.abs(turned) >= 65520, np.copysign(np.inf, turned), turned)  # what float16 rounds to infinity
