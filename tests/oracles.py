"""Rotary position embedding in float64 NumPy, from the published definitions. Imports nothing of ours.

Frequencies in radians per token: Su et al. 2021 (arXiv 2104.09864); linear: Chen et al. 2023 (2306.15595, position interpolation);
llama3: Llama 3.1's reference `apply_scaling`; yarn: Peng et al. 2023 (2309.00071, section 3); longrope: Ding et al. 2024 (2402.13753);
proportional: Gemma 4's partial rotation whose exponents run over the whole head.
"""

import math
from collections.abc import Sequence

import numpy as np


def default_frequencies(dims: int, base: float) -> np.ndarray:
    return np.array([base ** (-2.0 * i / dims) for i in range(dims // 2)])


def linear_frequencies(dims: int, base: float, factor: float) -> np.ndarray:
    return default_frequencies(dims, base) / factor


def llama3_frequencies(dims: int, base: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    out = []
    for w in default_frequencies(dims, base):
        wavelength = 2 * math.pi / w
        if wavelength < original / high:
            out.append(w)
        elif wavelength > original / low:
            out.append(w / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * w / factor + smooth * w)
    return np.array(out)


def yarn_frequencies(dims: int, base: float, factor: float, original: int, beta_fast: float = 32, beta_slow: float = 1) -> np.ndarray:
    def pair_that_turns(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), dims - 1)
    w = default_frequencies(dims, base)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    return ramp * w / factor + (1 - ramp) * w


def yarn_magnitude(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)


def longrope_frequencies(dims: int, base: float, long_factor: Sequence[float]) -> np.ndarray:
    return default_frequencies(dims, base) / np.array(long_factor, dtype=np.float64)


def longrope_magnitude(length: int, original: int) -> float:
    return math.sqrt(1 + math.log(length / original) / math.log(original))


def proportional_frequencies(dims: int, rotated: int, base: float, factor: float = 1.0) -> np.ndarray:
    w = default_frequencies(dims, base) / factor
    w[rotated // 2 :] = 0.0
    return w


def rotated(
    x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, *, magnitude: float = 1.0, interleaved: bool = False, first: int = 0
) -> np.ndarray:
    """m * exp(i p w) z on the pairs z of x (..., S, D), in complex128; the other entries unchanged."""
    half = len(frequencies)
    even = first + (2 * np.arange(half) if interleaved else np.arange(half))
    odd = even + (1 if interleaved else half)
    out = np.array(x, dtype=np.float64)
    z = out[..., even] + 1j * out[..., odd]
    z = z * (magnitude * np.exp(1j * np.multiply.outer(np.asarray(positions, dtype=np.float64), frequencies)))
    out[..., even], out[..., odd] = z.real, z.imag
    return out


def interleaved_from_half(x: np.ndarray, dims: int) -> np.ndarray:
    """Entries (i, i + dims/2) moved to (2i, 2i + 1)."""
    out = np.array(x)
    out[..., 0:dims:2], out[..., 1:dims:2] = x[..., : dims // 2], x[..., dims // 2 : dims]
    return out


def as_float64(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Float64 values of an array that MLX handed over: float32, float16, or bfloat16 as its uint16 bits."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.float64)


def ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """Distance between neighbouring numbers of `dtype` at each value."""
    bits, smallest = {"float32": (23, -126), "float16": (10, -14), "bfloat16": (7, -126)}[dtype]
    exponent = np.floor(np.log2(np.maximum(np.abs(values), 2.0**smallest)))
    return 2.0 ** (exponent - bits)
