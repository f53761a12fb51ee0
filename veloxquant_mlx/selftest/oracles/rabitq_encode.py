"""rabitq_encode by the definition: a matrix product with the Hadamard matrix in float64."""

import numpy as np


def sylvester(width: int) -> np.ndarray:
    """(width, width) of +1 and -1: H_1 = 1, H_2n = [[H, H], [H, -H]]."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rabitq_encode(keys: np.ndarray, diag: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, width = keys.shape
    y = (keys.astype(np.float64) * diag.astype(np.float64)) @ sylvester(width).T / np.sqrt(width)
    with np.errstate(invalid="ignore"):
        octets = (y >= 0).reshape(rows, width // 8, 8)
    return (octets * (1 << np.arange(8))).sum(axis=2).astype(np.uint8), np.abs(y).sum(axis=1) / width
