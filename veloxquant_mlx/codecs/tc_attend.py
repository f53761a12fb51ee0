"""Attention to keys and values that stay coded by `tc`: tile by tile of tokens, no key or value row is kept.

Of a tile, the components y^ of all heads are read once, and shared by the G query heads of a KV head:

    s    = scale q . R_p (y^ back + mean)                  keys of the tile alone, rotated to their positions p
    m, l = running maximum of s and sum of e^(s - m)       (online softmax, Milakov and Gimelshein 2018)
    z    = sum over tokens of e^(s - m) u q_v              the value codes' points q_v times their scales u, in the rotated domain
    c    = sum over tokens of e^(s - m) y^                 the components of every head
    out  = v_mean + (W^T turn^T c + R^T z) / l,   turn = back forward      once, outside the sum; turn is I but for carried tables

Multiply-adds per token and query head: D for the score, D for z, H D for c (H KV heads; m of them have bits), and its share of building the
key, D^2 / G. Keys anchored to blocks of B tokens, whose queries are turned into the basis once per block, would take D^2 / B in its place,
but rotate within the block what the basis decorrelates, and the prediction of values needs unrotated components: one sum c for every offset
in the block, B H D numbers a query head. SmolLM2 (D 64, H 3, G 3) at 2.04 bits, KL on four texts and multiply-adds:

    before RoPE, tile by tile   .0085   64 + 64 + 192 + 1365      chosen: a tile's keys are one small matrix product for all its queries
    anchored, B = 32            .0099   64 + 64 + 192 + 128
    anchored, B = 64            .0120   64 + 64 + 192 + 64

Results merge with attention to other rows, such as a window kept exact, by their log-sum-exp (`metal._attend.merge_parts`).
"""

import math

import mlx.core as mx
import numpy as np

from veloxquant_mlx.codecs._components import BLOCK
from veloxquant_mlx.codecs._rotation import unrotate
from veloxquant_mlx.codecs.tc import KeyReader, Tc, ValueReader
from veloxquant_mlx.transfer.rope import RopeSpec, rotate

TILE = 256  # tokens


def attend(
    q: mx.array,
    keys: Tc,
    key_parts: dict[str, mx.array],
    values: Tc,
    value_parts: dict[str, mx.array],
    positions: np.ndarray,
    rope: RopeSpec | None,
    *,
    scale: float,
    query_positions: np.ndarray | None = None,
    tile: int = TILE,
) -> tuple[mx.array, mx.array]:
    """Softmax attention of queries to coded rows.

    Args:
        q: (H_q, Q, D) float, as the model makes them, rotated to their own positions; H_q a multiple of the KV heads.
        keys, key_parts: the bound codec of the keys, coded before RoPE, and what it encoded.
        values, value_parts: likewise of the values of the same tokens.
        positions: (S,) int, of the keys.
        rope: rotation of the live keys, or None.
        scale: of the scores, such as 1 / sqrt(D).
        query_positions: (Q,) int; a query sees keys at positions up to its own. None: all of them.
        tile: tokens at a time, a multiple of 32.

    Returns:
        (out, lse): (H_q, Q, D) and (H_q, Q) float32; 0 and -inf for a query that sees no key.

    Raises:
        ValueError: shapes, roles or parts that do not fit.

    Error: float32 sums in another order than attention to the decoded rows.
    """
    at, tokens = np.asarray(positions), len(positions)
    shape = _checked(q, keys, values, at, query_positions, tile)
    key_parts, value_parts = keys.checked(key_parts, shape), values.checked(value_parts, shape)
    reader, added = keys.key_reader(key_parts), values.value_reader(value_parts)
    heads, _, dim = shape
    count = q.shape[1]
    grouped = q.astype(mx.float32).reshape(heads, -1, dim) * scale  # (H, G Q, D)
    rows = grouped.shape[1]
    most, total = mx.full((heads, rows, 1), -math.inf), mx.zeros((heads, rows, 1))
    z, c = mx.zeros((heads, rows, dim)), mx.zeros((heads, rows, heads * dim))
    unrotated = None if rope is None else RopeSpec("none", rope.dims, base=1.0, scale=0.0, first=rope.first)
    for start in range(0, tokens, tile):
        stop = min(start + tile, tokens)
        mask = None if query_positions is None else at[start:stop] <= np.asarray(query_positions)[:, None]
        if mask is not None and not mask.any():
            continue
        blocks, size = slice(start // BLOCK, -(-stop // BLOCK)), stop - start
        points = reader.components.unpack(key_parts["codes"][0, blocks])
        key = rotate(reader.rows(points).reshape(heads, -1, dim)[:, :size], at[start:stop], unrotated, rope)
        scores = mx.matmul(grouped, key.swapaxes(1, 2))
        if mask is not None:
            every = mx.array(np.tile(mask, (rows // count, 1)))
            scores = mx.where(every, scores, -math.inf)
        largest = mx.maximum(most, mx.max(scores, axis=-1, keepdims=True))
        base = mx.where(largest == -math.inf, 0.0, largest)
        weights, fade = mx.exp(scores - base), mx.exp(most - base)
        most, total = largest, total * fade + mx.sum(weights, axis=-1, keepdims=True)
        coded = added.scaled(value_parts, blocks).reshape(heads, -1, dim)[:, :size]
        z = z * fade + mx.matmul(weights, coded)
        y = points.transpose(0, 2, 1).reshape(-1, heads * dim)[:size]
        c = c * fade + mx.matmul(weights, y)
        mx.eval(most, total, z, c)
    return _finished(most, total, z, c, reader, added, q.shape)


def _finished(
    most: mx.array, total: mx.array, z: mx.array, c: mx.array, reader: KeyReader, added: ValueReader, shape: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """Normalised sums, the prediction and the rotation back applied to them."""
    heads, rows, dim = z.shape
    norm = mx.where(total > 0, total, 1.0)
    forward = added.forward[:, 0]
    turn = mx.matmul(reader.back[:, 0], forward)
    by_input = (c / norm).reshape(heads, rows, heads, dim).transpose(2, 0, 1, 3).reshape(heads, heads * rows, dim)
    inputs = mx.matmul(by_input, turn).reshape(heads, heads, rows, dim).transpose(1, 2, 0, 3).reshape(heads, rows, heads * dim)
    mix = added.mix[0].reshape(heads * dim, heads, dim).transpose(1, 0, 2)  # (H, H D, D): inputs to the values of each head
    out = mx.matmul(inputs, mix) + added.v_mean[:, 0] + unrotate(z / norm, added.seed)
    out = mx.where(total > 0, out, 0.0)
    return out.reshape(shape), (most + mx.log(total)).reshape(shape[:2])


def _checked(
    q: mx.array, keys: Tc, values: Tc, positions: np.ndarray, query_positions: np.ndarray | None, tile: int
) -> tuple[int, int, int]:
    """(H, S, D) of the coded rows."""
    if (keys.role, values.role) != ("k", "v") or keys.keys is None or keys.keys != values.keys:
        raise ValueError(f"[tc_attend] keys and values must be codecs bound to one layer, but got roles {keys.role!r} and {values.role!r}.")
    heads, dim = keys.key_widths.shape
    if q.ndim != 3 or q.shape[2] != dim or q.shape[0] % heads or not q.shape[0]:
        raise ValueError(f"[tc_attend] q must be (H_q, Q, {dim}) with H_q a multiple of {heads}, but got {tuple(q.shape)}.")
    if positions.ndim != 1 or not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(f"[tc_attend] positions must be (S,) integers, but got {positions.dtype} {positions.shape}.")
    if query_positions is not None and np.shape(query_positions) != (q.shape[1],):
        raise ValueError(f"[tc_attend] query_positions must be ({q.shape[1]},), but got {np.shape(query_positions)}.")
    if type(tile) is not int or tile < BLOCK or tile % BLOCK:
        raise ValueError(f"[tc_attend] tile must be a multiple of {BLOCK}, but got {tile!r}.")
    return heads, len(positions), dim
