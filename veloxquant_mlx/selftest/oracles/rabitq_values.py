"""Nibbles in Python's integer arithmetic."""

import numpy as np


def pack_values(v_idx: np.ndarray) -> np.ndarray:
    return np.mod(v_idx[..., 0::2].astype(object), 16).astype(np.int64) + 16 * np.mod(v_idx[..., 1::2].astype(object), 16).astype(np.int64)
