"""Float64 NumPy versions of everything a codec does, written from formats/SPEC.md. Imports nothing of ours."""

import math
from dataclasses import dataclass

import numpy as np

MASK64 = (1 << 64) - 1


def splitmix64(seed: int, count: int) -> list[int]:
    state, words = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        words.append(z ^ (z >> 31))
    return words


def rotation(dim: int, seed: int) -> np.ndarray:
    """The D x D matrix R = (Hartley kron Sylvester) diag(signs) / sqrt(D)."""
    sylvester = np.ones((1, 1))
    odd = dim
    while odd % 2 == 0:
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
        odd //= 2
    angles = [[2 * math.pi * i * j / odd for j in range(odd)] for i in range(odd)]
    hartley = np.array([[math.cos(angle) + math.sin(angle) for angle in row] for row in angles])
    signs = np.array([-1.0 if word >= 1 << 63 else 1.0 for word in splitmix64(seed, dim)])
    return np.kron(hartley, sylvester) / math.sqrt(dim) * signs


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    stream = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


def unpack(packed: np.ndarray, bits: int, dim: int) -> np.ndarray:
    stream = np.unpackbits(packed, axis=-1, count=dim * bits, bitorder="little").reshape(*packed.shape[:-1], dim, bits)
    return (stream.astype(np.int64) << np.arange(bits)).sum(axis=-1)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


@dataclass
class Encoded:
    codes: list[np.ndarray]  # one (H, S, D) per stage
    margins: list[np.ndarray]  # distance of each coded value to the nearest boundary
    scale: np.ndarray  # (H, S), not rounded, not negative
    centred: np.ndarray  # (H, S) bool
    doubt: np.ndarray  # (H, S): | |x - mean|^2 - |x|^2 | / |x|^2


def encode(x: np.ndarray, codebooks: list[list[float]], kind: str, mean: np.ndarray | None, seed: int) -> Encoded:
    x = x.astype(np.float64)
    heads, tokens, dim = x.shape
    centred, doubt = np.zeros((heads, tokens), bool), np.ones((heads, tokens))
    if mean is not None:
        moved = x - mean[:, None]
        far, near = (x**2).sum(-1), (moved**2).sum(-1)
        centred, doubt = near < far, np.abs(near - far) / np.maximum(far, 1e-300)
        x = np.where(centred[..., None], moved, x)
    deviation = np.sqrt((x**2).sum(-1) / dim)
    y = x / np.maximum(deviation, 1e-300)[..., None] @ rotation(dim, seed).T
    codes, margins, q = [], [], np.zeros_like(y)
    for codebook in codebooks:
        c = np.asarray(codebook)
        code = np.abs((y - q)[..., None] - c).argmin(-1)
        margins.append(np.abs((y - q)[..., None] - (c[1:] + c[:-1]) / 2).min(-1))
        codes.append(code)
        q = q + c[code]
    yy, yq, qq = (y * y).sum(-1), (y * q).sum(-1), (q * q).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = {"norm": np.ones_like(yy), "ls": yq / qq, "unbiased": yy / yq}[kind]
    return Encoded(codes, margins, deviation * np.where(deviation > 0, ratio, 0.0), centred, doubt)


def decode(
    codes: list[np.ndarray], codebooks: list[list[float]], scale: np.ndarray, centred: np.ndarray, mean: np.ndarray | None, seed: int
) -> np.ndarray:
    q = sum(np.asarray(codebook)[code] for code, codebook in zip(codes, codebooks, strict=True))
    x = np.abs(scale)[..., None] * (q @ rotation(q.shape[-1], seed))
    return x if mean is None else x + centred[..., None] * mean[:, None]


def gaussian_pieces(codebooks: list[list[float]], points: int = 400_001, reach: float = 9.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A fine grid on N(0, 1): weights, what the last stage sees there, and its cell index."""
    y = np.linspace(-reach, reach, points)
    weight = np.exp(-y * y / 2) / math.sqrt(2 * math.pi) * (y[1] - y[0])
    for stage, codebook in enumerate(codebooks):
        c = np.asarray(codebook)
        index = np.searchsorted((c[1:] + c[:-1]) / 2, y)
        if stage < len(codebooks) - 1:
            y = y - c[index]
    return weight, y, index


def gaussian_mse(codebooks: list[list[float]]) -> float:
    """Mean squared error on N(0, 1) of nearest-codeword stages, by integration."""
    weight, y, index = gaussian_pieces(codebooks)
    return float((weight * (y - np.asarray(codebooks[-1])[index]) ** 2).sum())
