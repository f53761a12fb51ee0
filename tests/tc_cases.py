"""Calibration rows, and tc codecs bound to their tables."""

from functools import cache
from typing import Any

import numpy as np

from tests import codec_oracles
from veloxquant_mlx.allocators.transforms import LayerRows, TcTables, build_tc, widths_for
from veloxquant_mlx.codecs.tc import Tc

DIGEST = "5e" * 32


def layer(count: int = 2000, seed: int = 0, heads: int = 2, dim: int = 8) -> LayerRows:
    """Rows of one layer for each seed, whatever their count: correlated keys around a mean, one hidden source with heavy tails, and
    values that are mostly a linear function of the keys."""
    rng, size = np.random.default_rng(seed), heads * dim
    sizes, k_mix, k_mean, v_mix, v_mean = np.exp(rng.standard_normal(size)), *(rng.standard_normal(n) for n in ((size, size), size) * 2)
    f = [a @ a.T / size for a in rng.standard_normal((2, size, size)) * np.exp(rng.standard_normal((2, 1, size)))]
    hidden = rng.standard_normal((count, size)) * sizes
    hidden[:, 0] = rng.laplace(size=count) * 5
    k = hidden @ k_mix / 4 + 3 * k_mean
    v = k @ v_mix / 4 + 0.3 * rng.standard_normal((count, size)) + v_mean
    return LayerRows(k.reshape(count, heads, dim), v.reshape(count, heads, dim), *f)


@cache
def tables(heads: int, dim: int) -> TcTables:
    return build_tc(layer(600, 7, heads, dim))


def bound(spec: str, heads: int = 2, dim: int = 64, tokens: int | None = None) -> tuple[Tc, Tc]:
    """The codecs of keys and of values, of one layer calibrated alone; carried tables are sized for that many tokens."""
    codec, own = Tc.parse(spec, "k"), tables(heads, dim)
    assert codec is not None
    widths = widths_for({"0": own}, codec.bits)["0"]
    k, v = (codec.bind(role, own, widths, "0", DIGEST, tokens) for role in ("k", "v"))
    return k, v


def exact(k: Any, k_parts: dict, v: Any, v_parts: dict, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray | None]:
    """Keys and values (H, S, D) in float64, of the tables and points as they are; no values where their codec is another."""
    heads, count, dim = shape
    reader = k.key_reader(k_parts)
    points = np.array(reader.by_head(reader.components.unpack(k_parts["codes"][0]))).astype(np.float64).reshape(heads, -1, dim)[:, :count]
    keys = points @ f64(reader.back[:, 0]) + f64(reader.mean[:, 0])
    if not isinstance(v, Tc):
        return keys, None
    reader = v.value_reader(v_parts)
    y = np.clip((keys - f64(reader.predictor.k_mean[:, 0])) @ f64(reader.predictor.forward[:, 0]), -64, 64)
    predicted = y.swapaxes(0, 1).reshape(count, heads * dim) @ f64(reader.predictor.mix[0])
    points = f64(reader.points(v_parts["codes"][0])).reshape(heads, -1, dim)[:, :count]
    sizes = f64(reader.scales(v_parts["scales"][0])).reshape(heads, -1)[:, :count, None]
    own = points * sizes @ codec_oracles.rotation(dim, v.seed)
    return keys, predicted.reshape(count, heads, dim).swapaxes(0, 1) + f64(reader.predictor.v_mean[:, 0]) + own


def f64(x: Any) -> np.ndarray:
    return np.array(x).astype(np.float64)
