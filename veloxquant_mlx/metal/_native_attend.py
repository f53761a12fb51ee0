"""Attend functions on a CPU by the C++ extension, where it has a reader for their operands; elsewhere they are MLX's operations.

It reads codes of one stream a row ("lsb8"; "lsb32" of 1, 2, 4 or 8 bits; codes of a byte each), scales and zeros that bfloat16 holds
exactly, tables and queries of finite numbers, and codebooks of vectors of up to 8 entries.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.metal import _attend
from veloxquant_mlx.metal._attend import Options
from veloxquant_mlx.native import attending
from veloxquant_mlx.native.attending import Shared, Sight

MAX_SUB = 8  # entries of a vector of a codebook
_BFLOAT_MAX = 0x7F7F0000  # as bits of float32


@dataclass(frozen=True, eq=False)
class Rows:
    """Keys or values of a call.

    Fields:
        codes: a stage each: codes as the API takes them, bits of one, and table (2**bits,) or (2**bits, sub), or None for the codes alone.
        packed: layout of the codes.
        scale: (B, H, S) factors of the rows, or None.
        affine: (step, zero, group size, whether groups are of channels), or None.
    """

    codes: tuple[tuple[mx.array, int, mx.array | None], ...]
    packed: str | None
    scale: mx.array | None = None
    affine: tuple[mx.array, mx.array, int, bool] | None = None


def attend(
    q: mx.array, keys: Rows, values: Rows, options: Options, bias: mx.array | None = None
) -> mx.array | tuple[mx.array, mx.array] | None:
    """The function's result, or None where the extension has no reader for the operands.

    Args:
        q: (B, H_q, S_q, D) float32, times the scale.
        bias: (B, H_kv, S_kv), added to the scores of every query, or None.
    """
    if not mx.all(mx.isfinite(q)).item() or (bias is not None and not mx.all(mx.isfinite(bias)).item()):
        return None
    stored = [_stored(rows, options) for rows in (keys, values)]
    if stored[0] is None or stored[1] is None:
        return None
    every = (0, 0, options.length)
    parts = [Shared([b], [0], [attending.part(k, v, every, 0)]) for b, (k, v) in enumerate(zip(*stored, strict=True))]
    sight = Sight(options.length, options.causal, options.window, _mask(options, bias))
    out, lse = attending.attend(q, options.kv_heads, parts, None, sight)
    return _attend.finish(out, lse, options)


def _mask(options: Options, bias: mx.array | None) -> mx.array | None:
    seen = None if options.start is None else mx.arange(options.length) >= options.start[:, None, :, None]
    if bias is None or not mx.any(bias != 0).item():
        return seen
    added = mx.repeat(bias.astype(mx.float32), options.heads_per_kv, axis=1)[:, :, None]
    return added if seen is None else mx.where(seen, added, -np.inf)


def _stored(rows: Rows, options: Options) -> list[Any] | None:
    """The extension's rows of each sequence."""
    scale, affine, codes = None, None, []
    if rows.scale is not None:
        scale = _bfloats(rows.scale, signed=False)
        if scale is None:
            return None
    if rows.affine is not None:
        step, zero = (_bfloats(side, signed=True) for side in rows.affine[:2])
        if step is None or zero is None:
            return None
        affine = (step, zero)
    for stage, bits, table in rows.codes:
        found = _stage(stage, rows.packed, bits, table, options.dim)
        if found is None:
            return None
        codes.append(found)
    if any(size > 1 for *_, size in codes) and (scale is not None or len(codes) > 1):
        return None
    made = []
    for b in range(options.batch):
        one = native.stored((options.kv_heads, options.length, options.dim))
        for stage, bits, values, size in codes:
            if size == 1:
                one.codes(stage[b], bits, None if values is None else values.tolist())
            else:
                _vectors(one, stage[b], bits, values, size, options)
        if scale is not None:
            one.scale(scale[b])
        if affine is not None and rows.affine is not None:
            group, by_token = rows.affine[2:]
            one.affine(affine[0][b], affine[1][b], min(group, options.dim if by_token else options.length), by_token)
        made.append(one)
    return made


def _stage(
    codes: mx.array, packed: str | None, bits: int, table: mx.array | None, dim: int
) -> tuple[np.ndarray, int, np.ndarray | None, int] | None:
    """Codes as (B, H, S, bytes), bits of one, its values and entries to a value."""
    size = 1 if table is None or table.ndim == 1 else table.shape[1]
    count = dim // size
    if packed is None:
        if codes.dtype != mx.uint8:
            if table is None or bits > 8:
                return None
            codes = mx.clip(codes, 0, min(len(table) - 1, mx.iinfo(codes.dtype).max)).astype(mx.uint8)
        bits = 8
    elif packed == "lsb32":
        if 32 % bits:
            return None
        codes = mx.view(codes, mx.uint8)[..., : -(-count * bits // 8)]
    values = None
    if table is not None:
        values = np.array(table.astype(mx.float32))
        if size > MAX_SUB or len(values) > 2**bits or not np.isfinite(values).all():
            return None
        values = np.concatenate([values, np.repeat(values[-1:], 2**bits - len(values), axis=0)])  # an index beyond is the last
        values = values.reshape(-1) if size == 1 else values
    return native.packed(codes), bits, values, size


def _vectors(one: Any, codes: np.ndarray, bits: int, values: np.ndarray, size: int, options: Options) -> None:
    count = options.dim // size
    place = np.ascontiguousarray(np.broadcast_to(np.arange(count, dtype=np.int32) * bits, (options.kv_heads, count)))
    table = np.zeros((options.kv_heads, count), np.int64)
    one.codewords(0, codes, size, place, np.full(place.shape, bits, np.int32), table, np.ascontiguousarray(values.reshape(-1)), None, None)


def _bfloats(x: mx.array, signed: bool) -> np.ndarray | None:
    """The same numbers as bits of bfloat16, or None where it does not hold them, or one is not finite, or negative and `signed` false."""
    if x.dtype == mx.bfloat16:
        words = native.packed(x)
        most = int((words & 0x7FFF if signed else words).max(initial=0)) << 16
        return words if most <= _BFLOAT_MAX else None
    bits = native.packed(x.astype(mx.float32)).view(np.uint32)
    if (bits & 0xFFFF).any() or int((bits & 0x7FFFFFFF if signed else bits).max(initial=0)) > _BFLOAT_MAX:
        return None
    return (bits >> 16).astype(np.uint16)
