"""Rows of codes and of floats, converted on a CPU in one pass: codes to rows of a cache, rows from one RoPE to another.

MLX takes no foreign memory as an array on a CPU without a copy, so results are written into an array that MLX made and nobody else has.
They are the same bits at every SIMD level and with any number of threads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native.buffers import empty
from veloxquant_mlx.native.gradients import inference_only

WORDS = {mx.float16: mx.uint16, mx.bfloat16: mx.uint16, mx.float32: mx.float32}  # dtypes of rows, and of their memory
LOW = 64  # positions of a table of phases: position p is LOW (p // LOW) + p % LOW

Phases = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
# Cosines and sines of rows, (n, dims) float32 pages of as many rows each, and the row to begin at.
Tables = tuple[Sequence[mx.array | np.ndarray], int]


def in_use(dim: int) -> bool:
    """Whether rows of D = dim are the extension's to convert now: it is available, and MLX computes on the CPU."""
    return native.available() and mx.default_device().type == mx.DeviceType.cpu and dim <= native.max_dim()


@inference_only
def decoded(
    stored: Any,
    start: int,
    shape: tuple[int, int, int],
    dtype: mx.Dtype,
    angles: Tables | None = None,
    first: int = 0,
    paired: bool = False,
    parts: Mapping[str, Any] | None = None,
) -> mx.array:
    """Stored rows from `start` on.

    Args:
        stored: rows as `codecs._reading.RowReader.stored` gives them.
        shape: (H, S, D) of the result.
        dtype: float16, bfloat16 or float32. Rounded to nearest even; float16 is clipped to its finite numbers.
        angles: to turn rows stored before RoPE by, or None.
        first: index of the first rotated entry.
        paired: the rotated entries, half-split, come out interleaved.
        parts: what the rows are stored in, where a gradient by them is to be refused.
    """
    out = empty(shape, WORDS[dtype])
    native.extension().decode_as(stored, start, native.shared(out), dtype == mx.bfloat16, pages(angles), first, paired)
    return out.view(dtype)


@inference_only
def turned(
    x: mx.array,
    first: int,
    dims: int,
    paired: tuple[bool, bool],
    undo: Tables | None = None,
    redo: Tables | None = None,
    phases: tuple[Phases, ...] = (),
    ratio: float = 1.0,
) -> mx.array:
    """Rows (..., S, D) with entries first to first + dims turned, in pairs; computed in float32, the others copied.

    Args:
        x: float16, bfloat16 or float32.
        paired: whether pairs are neighbours (interleaved) in x, and in the result; else half the entries apart.
        undo, redo: the angles to turn back and forward by, or None.
        phases: in place of them, what `phases` makes of the rotation, and of one that is taken off it.
        ratio: factor on the turned entries.
    """
    rows = x.reshape(-1, *x.shape[-2:])
    out = empty(rows.shape, WORDS[x.dtype])
    given, taken, tables = _words(rows), native.shared(out), (pages(undo), pages(redo))
    native.extension().turn(given, taken, x.dtype == mx.bfloat16, first, dims // 2, *paired, *tables, list(phases), ratio)
    return out.view(x.dtype).reshape(x.shape)


def phases(positions: np.ndarray, frequencies: np.ndarray) -> Phases:
    """e^(i p w) for each position p and frequency w, as a product of two tables: float64 throughout, without a cosine for each."""
    block = positions // LOW
    lowest, highest = (block.min(), block.max()) if len(block) else (0, 0)
    if highest - lowest <= len(block) // 16:  # a table of every block between takes less time than sorting them
        high, index = np.arange(lowest, highest + 1), block - lowest
    else:
        high, index = np.unique(block, return_inverse=True)
    # Cosines take long: a block's are products of two themselves, whatever other blocks there are.
    (coarse, above), (fine, within) = (np.unique(part, return_inverse=True) for part in (high // LOW, high % LOW))
    blocks = _turns(coarse * LOW * LOW, frequencies)[above] * _turns(fine * LOW, frequencies)[within]
    tables = (np.concatenate([z.real, z.imag], axis=1) for z in (blocks, _turns(np.arange(LOW), frequencies)))
    return *tables, index.astype(np.int32), (positions % LOW).astype(np.int32)


def _turns(positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """e^(i p w), complex (positions, frequencies)."""
    angles = np.multiply.outer(positions.astype(np.float64), frequencies)
    turns = np.empty(angles.shape, np.complex128)
    turns.real, turns.imag = np.cos(angles), np.sin(angles)
    return turns


def pages(tables: Tables | None) -> tuple[list[np.ndarray], int] | None:
    """Tables of angles as the extension takes them."""
    return None if tables is None else ([page if isinstance(page, np.ndarray) else native.packed(page) for page in tables[0]], tables[1])


def _words(x: mx.array) -> np.ndarray:
    """The memory of rows, 16-bit floats as uint16, with neighbouring values of a row side by side."""
    rows = native.shared(x)
    if rows.shape[-1] > 1 and rows.strides[-1] != rows.itemsize:
        rows = native.packed(x)
    return rows.view(np.uint16) if rows.dtype == np.float16 else rows
