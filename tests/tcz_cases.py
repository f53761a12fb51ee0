"""Calibration rows of a chain of layers, and tcz codecs bound to their tables."""

import math
from functools import cache

import mlx.core as mx
import numpy as np

from veloxquant_mlx.allocators.predictors import TczTables, build_tcz
from veloxquant_mlx.allocators.transforms import LayerRows
from veloxquant_mlx.codecs.tcz import Tcz

HEADS, DIM = 2, 8
WIDTH = HEADS * DIM
DIGEST = "5e" * 32
ROLES = ("k", "v")


def layers(tokens: int = 3000, count: int = 3, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> list[LayerRows]:
    """Layers whose rows follow from those before, with noise, means and metrics of uneven spectra; the seed is that of the rows alone."""
    laws, rng, width, out, past = np.random.default_rng(1), np.random.default_rng(seed), heads * dim, [], None
    for _ in range(count):
        made = []
        for _ in ROLES:
            rows = rng.laplace(size=(tokens, width)) * np.exp(laws.standard_normal(width))
            turn, mean = laws.standard_normal((width, width)) / math.sqrt(width), 3 * laws.standard_normal(width)
            if past is not None:
                rows = 0.5 * rows + past @ turn
            past = rows
            made.append((rows + mean).reshape(tokens, heads, dim))
        metrics = [a @ a.T * 0.1 for a in laws.standard_normal((2, width, width)) * np.exp(laws.standard_normal(width))]
        out.append(LayerRows(*made, *metrics))
    return out


@cache
def built(rate: float = 1.5) -> tuple[TczTables, ...]:
    return tuple(build_tcz(layers(), rate))


def array(rows: np.ndarray) -> mx.array:
    """(N, H, D) as (H, N, D)."""
    return mx.array(np.ascontiguousarray(rows.swapaxes(0, 1)).astype(np.float32))


def codecs(step: float | None = None) -> list[dict[str, Tcz]]:
    """Of every layer."""
    rate, out = Tcz(1.5, "k"), []
    for i, t in enumerate(built()):
        before = str(i - 1) if i else None
        out.append({role: rate.bind(role, t, step or t.step, str(i), before, DIGEST) for role in ROLES})
    return out
