"""Attention of many queries, row by row, in float64 (or in float32 as the baseline that tolerances are taken from)."""

import numpy as np

from veloxquant_mlx.selftest.oracles.attend import look_up, softmax_attention, unpack


def plain(q, k, v, scale, implementation="", **extras):
    """Causal, over keys and values as they are; every implementation is the same function."""
    del implementation
    dtype = extras.get("dtype", np.float64)
    keys, queries = k.astype(dtype), q.astype(dtype)

    def score(b: int, h: int, g: int, i: int) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return (keys[b, g] @ queries[b, h, i]) * dtype(scale[0])

    return softmax_attention(score, v.astype(dtype), q.shape, **{**extras, "causal": True})


def rabitq(q, scale, k_bits, k_mag, k_const, v_idx, v_cents, *, packed="lsb8", **extras):
    dtype = extras.get("dtype", np.float64)
    dim = q.shape[3]
    signs = 2 * unpack(k_bits, dim, packed, 1).astype(dtype) - 1
    values = look_up(v_cents, unpack(v_idx, dim, packed, 4), dtype)
    queries = q.astype(dtype)

    def score(b: int, h: int, g: int, i: int) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return (signs[b, g] @ queries[b, h, i]) * dtype(scale[0]) * k_mag[b, g].astype(dtype)

    return softmax_attention(score, values, q.shape, bias=k_const, **extras)
