"""Encoding on a CPU, in C++: a row is read once, in whatever float type it has, and its codes are the same at every SIMD level.

Where keys are coded before RoPE, it is undone as they are read. What the codes lost is counted as they are made.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native.buffers import empty
from veloxquant_mlx.native.converting import Tables, pages
from veloxquant_mlx.native.gradients import inference_only

KINDS = ("norm", "ls", "unbiased")


class Undo(NamedTuple):
    """A rotary embedding to undo; the rotated entries are coded in half-split order.

    Attributes:
        angles: of the rows.
        first: index of the first rotated entry.
        paired: whether they are interleaved in the rows.
        ratio: factor on them, beside the rotation.
    """

    angles: Tables
    first: int
    paired: bool
    ratio: float


class Loss(NamedTuple):
    """Sums of squares: of the rows less the decoded rows, and of the rows."""

    error: float
    energy: float


def takes(x: mx.array) -> bool:
    """Whether rows (H, S, D) are encoded here now: MLX uses the CPU, the extension is built, and D is not too large for it."""
    return native.available() and mx.default_device() == mx.cpu and x.size > 0 and x.shape[2] <= native.max_dim()


@inference_only
def mean_over_tokens(x: mx.array, undo: Undo | None = None) -> mx.array:
    """(H, D) bfloat16 of rows (H, S, D); sums in float64."""
    return mx.array((sum_over_tokens(x, undo) / x.shape[1]).astype(np.float32)).astype(mx.bfloat16)


def sum_over_tokens(x: mx.array, undo: Undo | None = None) -> np.ndarray:
    """(H, D) float64 of rows (H, S, D)."""
    return native.extension().sum_over_tokens(*_rows(x), _undo(undo))


@inference_only
def rotated(
    x: mx.array,
    stages: Sequence[tuple[Sequence[float], Sequence[float]]],
    ties_up: bool,
    kind: str,
    mean: mx.array | None,
    factors: tuple[mx.array, mx.array],
    steps: Sequence[float] = (),
    undo: Undo | None = None,
) -> tuple[list[mx.array], mx.array, Loss] | None:
    """Codes and scales of rows that are rotated and coded by tables, as `codecs._rotated` has it.

    Args:
        x: (H, S, D) float16, bfloat16 or float32; the last axis contiguous, or it is copied.
        stages: boundaries and codewords of each.
        ties_up: whether a value on a boundary belongs to the cell above it.
        kind: of the scale.
        mean: (H, D) bfloat16, or None.
        factors: of the rotation.
        steps: of candidate grids, for a table that is a grid scaled to each row.
        undo: what is undone first, or None.

    Returns:
        Codes (H, S, bytes) of each stage, scales (H, S) bfloat16, and what they lost; None where a value is not finite, or too large.
    """
    signs, hartley = (native.shared(factor) for factor in factors)
    tables = [(list(boundaries), list(codewords)) for boundaries, codewords in stages]
    told = None if mean is None else native.packed(mean)
    how = (tables, ties_up, KINDS.index(kind), told, signs, hartley, list(steps), _undo(undo))
    heads, count, dim = x.shape
    codes = [empty((heads, count, (dim * (len(words).bit_length() - 1) + 7) // 8), mx.uint8) for _, words in stages]
    scale = empty((heads, count), mx.uint16)
    lost = native.extension().encode_rotated(*_rows(x), *how, [native.shared(part) for part in codes], native.shared(scale))
    return None if lost is None else (codes, scale.view(mx.bfloat16), Loss(*lost))


@inference_only
def affine(
    x: mx.array, bits: int, group: int, by_token: bool, undo: Undo | None = None
) -> tuple[tuple[mx.array, mx.array, mx.array], Loss] | None:
    """Codes (H, S, bytes), steps and zeros (bfloat16) of rows, as `codecs.affine` has it, and what they lost; None as of `rotated`."""
    heads, count, dim = x.shape
    side = (heads, count, -(-dim // group)) if by_token else (heads, -(-count // group), dim)
    parts = (empty((heads, count, (dim * bits + 7) // 8), mx.uint8), empty(side, mx.uint16), empty(side, mx.uint16))
    lost = native.extension().encode_affine(*_rows(x), bits, group, by_token, _undo(undo), *(native.shared(part) for part in parts))
    codes, step, zero = parts
    return None if lost is None else ((codes, step.view(mx.bfloat16), zero.view(mx.bfloat16)), Loss(*lost))


@inference_only
def signs(x: mx.array, turns: np.ndarray, hartley: mx.array, mean: mx.array | None) -> tuple[mx.array, mx.array] | None:
    """Signs of projections of rows and their norms, as `codecs.qjl` has it.

    Args:
        x: as of `rotated`.
        turns: (N, 2, D) float32, the signs of both rotations of each block.
        hartley: of the rotations.
        mean: (H, D) bfloat16, or None.

    Returns:
        Codes (H, S, bytes) and norms (H, S) bfloat16; None where a value is not finite, or too large.
    """
    heads, count, dim = x.shape
    codes, norm = empty((heads, count, (len(turns) * dim + 7) // 8), mx.uint8), empty((heads, count), mx.uint16)
    told = None if mean is None else native.packed(mean)
    parts = native.shared(codes), native.shared(norm)
    done = native.extension().encode_signs(*_rows(x), turns, native.shared(hartley), told, *parts)
    return (codes, norm.view(mx.bfloat16)) if done else None


def _undo(undo: Undo | None) -> tuple | None:
    return None if undo is None else (pages(undo.angles), *undo[1:])


def _rows(x: mx.array) -> tuple[np.ndarray, bool]:
    """The memory of an array, and whether it is bfloat16."""
    rows = native.shared(x)
    return (rows if rows.strides[2] == rows.itemsize or rows.shape[2] == 1 else native.packed(x)), x.dtype == mx.bfloat16
