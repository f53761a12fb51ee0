"""Attend functions on a CPU by the C++ extension, where it has a reader for their operands; elsewhere they are MLX's operations.

It reads codes of one stream a row ("lsb8", "lsb32", codes of a byte each) and rows as they are,
and of queries, scales, zeros, tables and rows only finite numbers: what others do to a result is left to MLX's operations.
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
from veloxquant_mlx.native.gradients import refusing

MAX_SUB = 8  # entries of a run of codewords
_BFLOAT_INF = 0x7F80


@dataclass(frozen=True, eq=False)
class Rows:
    """Keys or values of a call.

    Fields:
        codes: a stage each: codes as the API takes them, bits of one, and table (2**bits,) or (2**bits, sub), or None for the codes alone.
        packed: layout of the codes.
        scale: (B, H, S) factors of the rows, or None.
        affine: (step, zero, group size, whether groups are of channels), or None.
        plain: (B, H, S, D) float, rows as they are, in place of codes.
    """

    codes: tuple[tuple[mx.array, int, mx.array | None], ...]
    packed: str | None
    scale: mx.array | None = None
    affine: tuple[mx.array, mx.array, int, bool] | None = None
    plain: mx.array | None = None

    def floats(self) -> list[mx.array | None]:
        """What a result could be differentiated by."""
        return [self.scale, self.plain, *(self.affine or ())[:2], *(table for *_, table in self.codes)]


def attend(
    q: mx.array, keys: Rows, values: Rows, options: Options, bias: mx.array | None = None
) -> mx.array | tuple[mx.array, mx.array] | None:
    """The function's result, or None where the extension has no reader for the operands.

    Args:
        q: (B, H_q, S_q, D) float32, times the scale.
        bias: (B, H_kv, S_kv), added to the scores of every query, or None.
    """
    # A bias of -inf hides a key; NaN and +inf compare as false.
    if not _finite(q) or (bias is not None and not mx.all(bias < np.inf).item()):
        return None
    stored = [_stored(rows, options) for rows in (keys, values)]
    if stored[0] is None or stored[1] is None:
        return None
    every = (0, 0, options.length)
    parts = [Shared([b], [0], [attending.part(k, v, every, 0)]) for b, (k, v) in enumerate(zip(*stored, strict=True))]
    sight = Sight(options.length, options.causal, options.window, _mask(options, bias))
    out, lse = attending.attend(q, options.kv_heads, parts, None, sight)
    return _attend.finish(*refusing("attend", [bias, *keys.floats(), *values.floats()], (out, lse)), options)


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
        scale = _sides(rows.scale, signed=False)
        if scale is None:
            return None
    if rows.affine is not None:
        step, zero = (_sides(side, signed=True) for side in rows.affine[:2])
        if step is None or zero is None:
            return None
        affine = (step, zero)
    for stage, bits, table in rows.codes:
        found = _stage(stage, rows.packed, bits, table, options.dim)
        if found is None:
            return None
        codes.append(found)
    if any(size > 1 for *_, size in codes) and len(codes) > 1:
        return None
    if rows.plain is not None and not _finite(rows.plain):
        return None
    plain = None if rows.plain is None else native.packed(rows.plain)
    made = []
    for b in range(options.batch):
        one = native.stored((options.kv_heads, options.length, options.dim))
        if plain is not None and rows.plain is not None:
            one.floats(plain[b], rows.plain.dtype == mx.bfloat16)
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
    elif packed == "lsb32" and 32 % bits:
        codes, bits = _attend.unpack_codes(codes, count, packed, bits).astype(mx.uint8), 8
    elif packed == "lsb32":
        codes = mx.view(codes, mx.uint8)[..., : -(-count * bits // 8)]
    values = None
    if table is not None:
        values = np.array(table.astype(mx.float32))
        if len(values) > 2**bits or not np.isfinite(values).all():
            return None
        values = np.concatenate([values, np.repeat(values[-1:], 2**bits - len(values), axis=0)])  # an index beyond is the last
        values = values.reshape(-1) if size == 1 else values
    return native.packed(codes), bits, values, size


def _vectors(one: Any, codes: np.ndarray, bits: int, values: np.ndarray, size: int, options: Options) -> None:
    """Codewords of more than MAX_SUB entries are several runs, which read one code and tables of their own."""
    run = max(n for n in range(1, MAX_SUB + 1) if size % n == 0)
    runs, number = size // run, np.arange(options.dim // run)
    place, table = number // runs * bits, number % runs * (len(values) * run)
    parts = np.ascontiguousarray(values.reshape(-1, runs, run).swapaxes(0, 1)).reshape(-1)
    heads = [np.ascontiguousarray(np.broadcast_to(x, (options.kv_heads, len(number)))) for x in (place.astype(np.int32), table)]
    one.codewords(0, codes, run, heads[0], np.full(heads[0].shape, bits, np.int32), heads[1], parts, None, None)


def _finite(x: mx.array) -> bool:
    native.evaluate(x)
    return bool(mx.all(mx.isfinite(x)).item())


def _sides(x: mx.array, signed: bool) -> np.ndarray | None:
    """Scales as bits of bfloat16 or as float32, or None where one is not finite. A negative scale of bfloat16 would be that of no mean."""
    if x.dtype == mx.bfloat16:
        words = native.packed(x)
        if int((words & 0x7FFF).max(initial=0)) >= _BFLOAT_INF:
            return None
        if signed or not (words & 0x8000).any():
            return words
    # NumPy widens float16 ten times as fast as MLX does on a CPU.
    wide = native.packed(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x).astype(np.float32, copy=False)
    return wide if np.isfinite(wide).all() else None
