"""Bit packing as integers of unlimited size, one code after the other."""

import numpy as np


def pack(indices: np.ndarray, b: int, layout: str | None = None) -> np.ndarray:
    codes = [int(c) % 2**b for c in indices]
    if layout == "lsb32":
        per = 32 // b
        words = [codes[i : i + per] for i in range(0, len(codes), per)]
        return np.array([sum(c << (k * b) for k, c in enumerate(word)) for word in words], dtype=np.uint32)
    stream = sum(c << (i * b) for i, c in enumerate(codes))
    return np.frombuffer(stream.to_bytes(-(-len(codes) * b // 8), "little"), dtype=np.uint8)


def unpack(packed: np.ndarray, N: int, b: int, layout: str | None = None) -> np.ndarray:
    if layout == "lsb32":
        per = 32 // b
        return np.array([int(packed[i // per]) >> (i % per * b) & (2**b - 1) for i in range(N)], dtype=np.uint8)
    stream = int.from_bytes(packed.tobytes(), "little")
    return np.array([stream >> (i * b) & (2**b - 1) for i in range(N)], dtype=np.uint8)
