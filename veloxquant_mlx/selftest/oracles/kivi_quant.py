"""KIVI's round trip group by group, in float32 with every operation rounded by itself: the contract is bit for bit."""

import numpy as np


def group_round_trip(group: np.ndarray, levels: int, eps: float) -> np.ndarray:
    """One group (n,) float32."""
    finite = np.isfinite(group)
    if not finite.any():
        return group
    live = group[finite]
    low, high = live.min(), live.max()
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.maximum(np.float32(high - low) / np.float32(levels), np.float32(eps))
        codes = np.clip(np.rint(np.float32(live - low) / scale), np.float32(0), np.float32(levels))
        rebuilt = np.float32(codes * scale) + low
    result = group.copy()
    result[finite] = rebuilt
    return result


def kivi(x: np.ndarray, axis: int, group_size: int, levels: int, eps: float = 1e-8) -> np.ndarray:
    lines = np.moveaxis(x.astype(np.float32), axis, -1)
    result = np.empty_like(lines)
    for at in np.ndindex(lines.shape[:-1]):
        for first in range(0, lines.shape[-1], group_size):
            part = slice(first, first + group_size)
            result[at][part] = group_round_trip(lines[at][part], levels, eps)
    return np.moveaxis(result, -1, axis)
