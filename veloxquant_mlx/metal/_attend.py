"""What every attend function shares: the options beyond the kernel page, and softmax attention in plain MLX.

    visible(i, j) = start[i] <= j,  j <= p(i) if causal,  j > p(i) - window if window,      p(i) = S_kv - S_q + i
    s[i, j]       = scale (q[i] . k^[j]) k_norm[j] (+ bias[j])
    out[i]        = R^T sum_j softmax_j(s[i, j]) v_scale[j] v^[j]    over the visible j
    lse[i]        = log sum_j exp(s[i, j])

A row that sees nothing (or S_kv = 0) has out = 0 and lse = -inf, so that parts of a sequence attended apart merge exactly
(`merge_parts`; log-sum-exp merging, Milakov and Gimelshein 2018, Dao et al. 2023). A row with a NaN among its visible scores is NaN,
and so is a channel with a NaN among its visible values; what a row does not see has no influence on it, NaN or not. A value that is
not finite under a visible weight of exactly zero (a score of -inf, or one so low that its weight underflows) leaves its channel
undefined: some back ends add 0 NaN, some nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, TypedDict

import mlx.core as mx
import numpy as np

from veloxquant_mlx.metal._checks import FLOATS, check_array, check_choice, check_int, message, power_of_two, require

PACKED = (None, "lsb8", "lsb32")
MAX_HEAD_DIM = 256
MAX_SPLITS = 256
INT32_MAX = 2**31 - 1


class Extras(TypedDict, total=False):
    """Keyword-only arguments beyond the kernel page, the same for every attend function; the defaults are the page's behaviour.

    Fields:
        causal: query i stands at position S_kv - S_q + i and sees no later key; False by default, unless the page says otherwise.
        window: if > 0, a query sees at most this many keys up to and with its own position (with `causal` False later keys stay visible).
        start: (B,) or (B, S_q) int32, first visible key of each row: the left padding of a batch.
        lse: also return the (B, H_q, S_q) float32 log-sum-exp of the scores, for `merge_parts`.
        k_norm: (B, H_kv, S_kv) float, per-token factor of the keys.
        v_scale: (B, H_kv, S_kv) float, per-token factor of the values.
        out_rotation: R that the values were rotated by, v = R x; the output gets R^T. (D, D) float; or (D,) float, D a power of two,
            for R = H diag(out_rotation) / sqrt(D) with H the Sylvester-Hadamard matrix.
        out_dtype: of the output; None for float16 (bfloat16 if q is), as on the page.
        splits: groups of threads that share one sequence; None to choose. Has no effect on a CPU.
    """

    causal: bool
    window: int
    start: mx.array | None
    lse: bool
    k_norm: mx.array | None
    v_scale: mx.array | None
    out_rotation: mx.array | None
    out_dtype: mx.Dtype | None
    splits: int | None


@dataclass(frozen=True, eq=False)
class Options:
    """Checked `Extras`, with the sizes they were checked against. `rotation` is R as (D, D) float32."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    length: int
    dim: int
    causal: bool
    window: int
    start: mx.array | None
    lse: bool
    k_norm: mx.array | None
    v_scale: mx.array | None
    rotation: mx.array | None
    out_dtype: mx.Dtype
    splits: int | None

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads, self.queries, self.dim)

    @property
    def empty(self) -> bool:
        """No output at all, or nothing to attend to."""
        return self.length == 0 or 0 in self.out_shape


def check_queries(function: str, name: str, q: mx.array, dtypes: tuple[mx.Dtype, ...] = FLOATS, max_dim: int = MAX_HEAD_DIM) -> None:
    """q must be (B, H_q, S_q, D) with 1 <= D <= max_dim."""
    check_array(function, name, q, ("B", "H_q", "S_q", "D"), dtypes)
    require(1 <= q.shape[3] <= max_dim, function, name, f"(B, H_q, S_q, D) with D at most {max_dim}", q)


def check_options(function: str, q: mx.array, kv_heads: int, length: int, extras: Extras, *, refused: tuple[str, ...] = ()) -> Options:
    """Check the extras of a call whose q is already checked.

    Args:
        kv_heads: H_kv, which must divide H_q.
        length: S_kv.
        refused: extras that this function does not have.
    """
    unknown = set(extras) - (set(Extras.__annotations__) - set(refused))
    if unknown:
        raise TypeError(f"[{function}] got an unexpected keyword argument {min(unknown)!r}.")
    batch, heads, queries, dim = q.shape
    fits = heads % kv_heads == 0 if kv_heads else heads == 0
    require(fits, function, "q", f"(B, H_q, S_q, D) with H_q a multiple of H_kv = {kv_heads}", q)
    for name in ("causal", "lse"):
        if not isinstance(extras.get(name, False), bool):
            raise TypeError(message(function, name, "a bool", type(extras[name]).__name__))  # type: ignore[literal-required]
    window = min(check_window(function, "window", extras.get("window", 0)), length)  # a wider one hides nothing, and could overflow
    start = extras.get("start")
    if start is not None:
        check_array(function, "start", start, None, (mx.int32,))
        require(start.shape in ((batch,), (batch, queries)), function, "start", f"({batch},) or ({batch}, {queries})", start)
        start = mx.broadcast_to(start.reshape(batch, -1), (batch, queries))
    for name in ("k_norm", "v_scale"):
        if extras.get(name) is not None:
            check_array(function, name, extras[name], (batch, kv_heads, length), FLOATS)  # type: ignore[literal-required]
    out_dtype = extras.get("out_dtype")
    if out_dtype is None:
        out_dtype = mx.bfloat16 if q.dtype == mx.bfloat16 else mx.float16
    elif not isinstance(out_dtype, mx.Dtype) or out_dtype not in FLOATS:
        raise TypeError(message(function, "out_dtype", "float16, bfloat16 or float32", out_dtype))
    splits = extras.get("splits")
    return Options(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        length=length,
        dim=dim,
        causal=extras.get("causal", False),
        window=window,
        start=start,
        lse=extras.get("lse", False),
        k_norm=extras.get("k_norm"),
        v_scale=extras.get("v_scale"),
        rotation=_rotation(function, extras.get("out_rotation"), dim),
        out_dtype=out_dtype,
        splits=None if splits is None else check_int(function, "splits", splits, 1, MAX_SPLITS),
    )


def check_window(function: str, name: str, window: int) -> int:
    return check_int(function, name, window, 0, INT32_MAX)


def check_scale(function: str, scale: Any) -> float:
    """`scale` as a finite Python float."""
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(message(function, "scale", "a float", type(scale).__name__))
    require(math.isfinite(scale), function, "scale", "finite", scale)
    return float(scale)


def check_codes(
    function: str,
    name: str,
    codes: Any,
    lead: tuple[int, int, int],
    count: int,
    packed: str | None,
    bits: int,
    dtypes: tuple[mx.Dtype, ...] = (mx.uint8,),
) -> None:
    """Codes of `count` values a row must be lead + (count,), or the packed width: "lsb8" uint8, "lsb32" uint32."""
    if packed is not None:
        dtypes = (mx.uint8,) if packed == "lsb8" else (mx.uint32,)
    check_array(function, name, codes, (*lead, packed_width(count, packed, bits)), dtypes)


def check_packed(function: str, packed: str | None) -> None:
    check_choice(function, "packed", packed, PACKED)


def packed_width(count: int, packed: str | None, bits: int) -> int:
    """Length of a row of `count` codes: elements, bytes ("lsb8") or words ("lsb32")."""
    if packed == "lsb8":
        return -(-count * bits // 8)
    return -(-count // (32 // bits)) if packed == "lsb32" else count


def unpack_codes(codes: mx.array, count: int, packed: str | None, bits: int) -> mx.array:
    """Codes of `count` a row, unsigned, one an element.

    Args:
        codes: (..., count), or packed: "lsb8" a little-endian bit stream, "lsb32" 32 // bits codes a word from the lowest bit on.
    """
    if packed is None or count == 0:
        return codes
    place = mx.arange(count)
    if packed == "lsb32":
        per = 32 // bits
        words = mx.take(codes, place // per, axis=-1)
        return (words >> (place % per * bits).astype(mx.uint32)) & mx.array(2**bits - 1, mx.uint32)
    byte, shift = place * bits // 8, (place * bits % 8).astype(mx.uint16)
    wide = codes.astype(mx.uint16)
    both = mx.take(wide, byte, axis=-1) | (mx.take(wide, mx.minimum(byte + 1, codes.shape[-1] - 1), axis=-1) << 8)
    return (both >> shift) & mx.array(2**bits - 1, mx.uint16)


def look_up(table: mx.array, codes: mx.array) -> mx.array:
    """table[codes] in float32, codes clamped to the table: (..., n) -> (..., n), or (..., n * width) from a (entries, width) table."""
    last = table.shape[0] - 1
    index = mx.minimum(mx.maximum(codes, 0) if mx.issubdtype(codes.dtype, mx.signedinteger) else codes, mx.array(last, codes.dtype))
    values = mx.take(table.astype(mx.float32), index.astype(mx.uint32), axis=0)
    return values if table.ndim == 1 else values.reshape(*codes.shape[:-1], codes.shape[-1] * table.shape[1])


def visible(options: Options) -> mx.array | None:
    """(B or 1, 1, 1, S_q, S_kv) bool: which keys a query sees; None for all of them."""
    at = mx.arange(options.queries)[:, None] + (options.length - options.queries)
    key = mx.arange(options.length)
    parts = []
    if options.causal and options.queries > 1:
        parts.append(key <= at)
    if options.window:
        parts.append(key > at - options.window)
    if options.start is not None:
        parts.append(key >= options.start[:, None, None, :, None])
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask.reshape(-1, 1, 1, *mask.shape[-2:])


def products(q: mx.array, keys: mx.array, options: Options) -> mx.array:
    """q . k of every query with the keys of its group.

    Args:
        q: (B, H_q, S_q, D) float.
        keys: (B, H_kv, S_kv, D) float32.

    Returns:
        (B, H_kv, H_q / H_kv, S_q, S_kv) float32.
    """
    rows = q.astype(mx.float32).reshape(options.batch, options.kv_heads, -1, options.dim)
    dots = mx.matmul(rows, keys.swapaxes(-1, -2))
    return dots.reshape(options.batch, options.kv_heads, options.heads_per_kv, options.queries, options.length)


def dense_attention(q: mx.array, keys: mx.array, values: mx.array, scale: float, options: Options) -> mx.array | tuple[mx.array, mx.array]:
    """The function's result from decoded keys and values, (B, H_kv, S_kv, D) float32; S_kv and the output not empty."""
    s = products(q, keys, options) * scale
    if options.k_norm is not None:
        s = s * options.k_norm.astype(mx.float32)[:, :, None, None]
    return attention(s, values, options)


def attention(s: mx.array, values: mx.array, options: Options) -> mx.array | tuple[mx.array, mx.array]:
    """The function's result from its scores and values; S_kv and the output not empty.

    Args:
        s: (B, H_kv, H_q / H_kv, S_q, S_kv) float32, scaled; `k_norm` already applied.
        values: (B, H_kv, S_kv, D) float32.
    """
    mask = visible(options)
    if mask is not None:
        s = mx.where(mask, s, -math.inf)
    largest = mx.max(s, axis=-1, keepdims=True)
    p = mx.exp(s - mx.where(largest == -math.inf, 0.0, largest))
    total = mx.sum(p, axis=-1, keepdims=True)
    lse = largest + mx.log(total)
    if options.v_scale is not None:
        values = values * options.v_scale.astype(mx.float32)[..., None]
    out = _weighted_sum(p, values, mask, options)
    out = mx.where(total == 0, 0.0, out / total).reshape(options.out_shape)
    return finish(out, lse.reshape(options.out_shape[:3]), options)


def finish(out: mx.array, lse: mx.array, options: Options) -> mx.array | tuple[mx.array, mx.array]:
    """Rotate back, round once, add the log-sum-exp if asked for."""
    if options.rotation is not None:
        out = mx.matmul(out.reshape(-1, options.dim), options.rotation).reshape(options.out_shape)
    out = out.astype(options.out_dtype)
    return (out, lse) if options.lse else out


def nothing(options: Options) -> mx.array | tuple[mx.array, mx.array]:
    """The result where `options.empty`."""
    out = mx.zeros(options.out_shape, options.out_dtype)
    return (out, mx.full(options.out_shape[:3], -math.inf, mx.float32)) if options.lse else out


def merge_parts(outs: Sequence[mx.array], lses: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
    """Attention over a sequence from attention over its parts.

    Args:
        outs: each (..., D) float, from attention that also gave the log-sum-exp.
        lses: each (...) float32.

    Returns:
        (out, lse): float32.
    """
    lse = mx.stack(list(lses))
    largest = mx.max(lse, axis=0)
    weights = mx.exp(lse - mx.where(largest == -math.inf, 0.0, largest))
    total = mx.sum(weights, axis=0)
    # Part by part: joined first, they would all be in memory twice.
    merged = sum(weight[..., None] * out.astype(mx.float32) for weight, out in zip(weights, outs, strict=True))
    merged = merged / mx.where(total == 0, 1.0, total)[..., None]
    return merged, largest + mx.log(total)


def _weighted_sum(p: mx.array, values: mx.array, mask: mx.array | None, options: Options) -> mx.array:
    """sum_j p[..., j] v[j], where values that a row does not see have no influence even if they are not finite (0 NaN = 0 inf = NaN)."""
    flat = (options.batch, options.kv_heads, -1, options.length)
    if mask is None:
        out = mx.matmul(p.reshape(flat), values)
    else:
        sound = mx.isfinite(values)
        seen = mx.broadcast_to(mask, p.shape).reshape(flat).astype(mx.float32)
        # What a row sees of +inf and of -inf; a NaN is both, and inf - inf = NaN.
        above, below = (mx.matmul(seen, mx.where(sound | (values == other), 0.0, 1.0)) > 0 for other in (-math.inf, math.inf))
        out = mx.matmul(p.reshape(flat), mx.where(sound, values, 0.0))
        out = out + mx.where(above, math.inf, 0.0) + mx.where(below, -math.inf, 0.0)
    return out.reshape(*p.shape[:-1], options.dim)


def _rotation(function: str, rotation: mx.array | None, dim: int) -> mx.array | None:
    if rotation is None:
        return None
    check_array(function, "out_rotation", rotation, None, FLOATS)
    if rotation.ndim == 1:
        fits = rotation.shape == (dim,) and power_of_two(dim)
        require(fits, function, "out_rotation", f"({dim}, {dim}), or (D,) with D = {dim} a power of two", rotation)
        return hadamard_matrix(dim) * rotation.astype(mx.float32)
    require(rotation.shape == (dim, dim), function, "out_rotation", f"({dim}, {dim}) or ({dim},)", rotation)
    return rotation.astype(mx.float32)


@lru_cache(maxsize=16)
def hadamard_matrix(dim: int) -> mx.array:
    """Sylvester-Hadamard matrix over sqrt(D), (D, D) float32; D a power of two."""
    index = np.arange(dim)
    parity = np.bitwise_count(index[:, None] & index[None]) & 1
    matrix = mx.array(((1 - 2 * parity.astype(np.float64)) / math.sqrt(dim)).astype(np.float32))
    mx.eval(matrix)
    return matrix
