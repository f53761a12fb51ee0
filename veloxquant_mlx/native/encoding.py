"""Encoding on a CPU, in C++: a row is read once, in whatever float type it has, and its codes are the same at every SIMD level."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native

KINDS = ("norm", "ls", "unbiased")


def takes(x: mx.array) -> bool:
    """Whether rows (H, S, D) are encoded here now: MLX uses the CPU, the extension is built, and D is not too large for it."""
    return native.available() and mx.default_device() == mx.cpu and x.size > 0 and x.shape[2] <= native.max_dim()


def mean_over_tokens(x: mx.array) -> mx.array:
    """(H, D) bfloat16 of rows (H, S, D); sums in float64."""
    total = native.extension().sum_over_tokens(*_rows(x))
    return mx.array((total / x.shape[1]).astype(np.float32)).astype(mx.bfloat16)


def rotated(
    x: mx.array,
    stages: Sequence[tuple[Sequence[float], Sequence[float]]],
    ties_up: bool,
    kind: str,
    mean: mx.array | None,
    factors: tuple[mx.array, mx.array],
    steps: Sequence[float] = (),
) -> tuple[list[mx.array], mx.array] | None:
    """Codes and scales of rows that are rotated and coded by tables, as `codecs._rotated` has it.

    Args:
        x: (H, S, D) float16, bfloat16 or float32; the last axis contiguous, or it is copied.
        stages: boundaries and codewords of each.
        ties_up: whether a value on a boundary belongs to the cell above it.
        kind: of the scale.
        mean: (H, D) bfloat16, or None.
        factors: of the rotation.
        steps: of candidate grids, for a table that is a grid scaled to each row.

    Returns:
        Codes (H, S, bytes) of each stage, and scales (H, S) bfloat16; None where a value is not finite, or too large.
    """
    signs, hartley = (native.shared(factor) for factor in factors)
    tables = [(list(boundaries), list(codewords)) for boundaries, codewords in stages]
    told = None if mean is None else native.packed(mean)
    found = native.extension().encode_rotated(*_rows(x), tables, ties_up, KINDS.index(kind), told, signs, hartley, list(steps))
    return None if found is None else ([mx.array(codes) for codes in found[0]], mx.array(found[1]).view(mx.bfloat16))


def affine(x: mx.array, bits: int, group: int, by_token: bool) -> tuple[mx.array, mx.array, mx.array] | None:
    """Codes (H, S, bytes), steps and zeros (bfloat16) of rows, as `codecs.affine` has it; None as of `rotated`."""
    found = native.extension().encode_affine(*_rows(x), bits, group, by_token)
    return None if found is None else (mx.array(found[0]), *(mx.array(side).view(mx.bfloat16) for side in found[1:]))


def _rows(x: mx.array) -> tuple[np.ndarray, bool]:
    """The memory of an array, and whether it is bfloat16."""
    rows = native.shared(x)
    return (rows if rows.strides[2] == rows.itemsize or rows.shape[2] == 1 else native.packed(x)), x.dtype == mx.bfloat16
