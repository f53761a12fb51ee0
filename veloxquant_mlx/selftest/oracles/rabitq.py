"""Hamming scores bit by bit; product and sum rounded to float32 once each, as the contract has it."""

import numpy as np


def hamming_score(qbits: np.ndarray, bits: np.ndarray, Cx: np.ndarray, scale: np.ndarray) -> np.ndarray:
    distance = (np.unpackbits(qbits)[None] != np.unpackbits(bits, axis=-1)).sum(axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        product = (distance * scale.astype(np.float64)).astype(np.float32)
        return (product.astype(np.float64) + Cx).astype(np.float32)
