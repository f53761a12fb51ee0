"""Angles of rotary position embeddings as MLX makes them, float32: by `mx.fast.rope`, and as kept pages of cosines and sines."""

from dataclasses import replace
from functools import lru_cache

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.native import converting, encoding
from veloxquant_mlx.transfer.rope_spec import RopeSpec

PAGE = 4096  # positions of a kept table of cosines and sines: 1 MiB for 64 entries


def angle_tables(spec: RopeSpec, positions: np.ndarray) -> converting.Tables:
    """Cosines and sines of each pair's angle at non-empty positions, those of `mx.fast.rope`, without the magnitude.

    Returns:
        Pages (n, dims) float32 of as many rows each, and the row of the first that belongs to the first position.
    """
    spec, start, stop = replace(spec, pairing="half", first=0, magnitude=1.0), int(positions[0]), int(positions[0]) + len(positions)
    if _neighbours(positions):
        # Pages are kept; the whole, which may be long, is not.
        return native_pages(spec, start, stop)
    ones, zeros = (mx.full((len(positions), spec.dims // 2), value) for value in (1.0, 0.0))
    return [mlx_rope(mx.concatenate([ones, zeros], axis=-1), positions, spec)], 0


def _neighbours(positions: np.ndarray) -> bool:
    """Whether non-empty positions follow one another."""
    first = int(positions[0])
    parts = ((at, positions[at : at + PAGE]) for at in range(0, len(positions), PAGE))  # small arrays cost no new memory
    return all(np.array_equal(part, np.arange(first + at, first + at + len(part))) for at, part in parts)


def undoing(spec: RopeSpec | None, positions: np.ndarray) -> encoding.Undo | None:
    """What takes rows cached at non-empty positions to rows before RoPE, in half-split order, as `rotate` to `unrotated` does."""
    if spec is None or (spec.magnitude == 1.0 and spec.pairing == "half" and not (np.any(positions) and np.any(spec.frequencies))):
        return None
    return encoding.Undo(angle_tables(spec, positions), spec.first, spec.pairing == "interleaved", 1.0 / spec.magnitude)


def mlx_rope(x: mx.array, positions: np.ndarray, spec: RopeSpec, *, inverse: bool = False) -> mx.array:
    """`mx.fast.rope` with the frequencies of `spec` at given positions, without its magnitude.

    Args:
        x: (..., S, D) float.
        positions: (S,) integers.
        inverse: turn back instead.
    """
    below = positions < 0
    if below.any():  # MLX's GPU kernels count positions without a sign; -p is p turned back
        turned = (mlx_rope(x, abs(positions), spec, inverse=inverse ^ back) for back in (True, False))
        return mx.where(mx.array(below)[:, None], *turned)
    sign = -1.0 if inverse else 1.0
    periods = None if spec.periods is None else mx.array([sign * p for p in spec.periods], dtype=mx.float32)
    scale = spec.scale if spec.periods is not None else sign * spec.scale
    how = {"traditional": spec.pairing == "interleaved", "base": spec.base, "scale": scale, "freqs": periods}
    length, size = x.shape[-2:]
    rows = x[..., spec.first :].reshape(1, -1, length, size - spec.first)
    if _neighbours(positions):
        rows = mx.fast.rope(rows, spec.dims, offset=int(positions[0]), **how)
    else:  # scattered positions: every row is a batch entry of its own
        offsets = mx.array(positions.astype(np.int32))
        rows = mx.fast.rope(rows.transpose(2, 1, 0, 3), spec.dims, offset=offsets, **how).transpose(2, 1, 0, 3)
    rows = rows.reshape(*x.shape[:-1], size - spec.first)
    return rows if spec.first == 0 else mx.concatenate([x[..., : spec.first], rows], axis=-1)


@lru_cache(maxsize=512)
def cos_sin(spec: RopeSpec, start: int, stop: int) -> mx.array:
    """(stop - start, dims) float32: m cos, m sin of each pair's angle at neighbouring positions, with the angles of `mx.fast.rope`.

    Evaluated, for threads share it. A span within a page of PAGE positions is a view of it and takes no memory of its own.
    """
    pages, first = pages_of(spec, start, stop)
    table = (pages[0] if len(pages) == 1 else mx.concatenate(pages))[first : first + stop - start]
    mx.eval(table)
    return table


def pages_of(spec: RopeSpec, start: int, stop: int) -> tuple[list[mx.array], int]:
    """`cos_sin` of the pages that positions start to stop lie in, and the row of the first page that belongs to the first position."""
    first = start // PAGE
    return [_page(spec, number) for number in range(first, max(first + 1, -(-stop // PAGE)))], start % PAGE


@lru_cache(maxsize=256)
def _page(spec: RopeSpec, number: int) -> mx.array:
    """`cos_sin` of PAGE positions."""
    ones, zeros = (mx.full((PAGE, spec.dims // 2), value) for value in (1.0, 0.0))
    half = replace(spec, pairing="half", first=0, magnitude=1.0)
    table = mlx_rope(mx.concatenate([ones, zeros], axis=-1), np.arange(number * PAGE, (number + 1) * PAGE), half) * spec.magnitude
    mx.eval(table)
    return table


def native_pages(spec: RopeSpec, start: int, stop: int) -> tuple[list[np.ndarray], int]:
    """`pages_of` for the native back end."""
    first = start // PAGE
    return [_native_page(spec, number) for number in range(first, max(first + 1, -(-stop // PAGE)))], start % PAGE


@lru_cache(maxsize=256)
def _native_page(spec: RopeSpec, number: int) -> np.ndarray:
    return native.packed(_page(spec, number))
