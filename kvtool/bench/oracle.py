"""Right results in float64 NumPy, and how far a result may be from them.

Codes of raw, rvq, rabitq, affine and of mlx's own quantisation are decoded here from their formulas. Codes of other codecs are decoded by
the codec itself, whole; attention, which reads them tile by tile, is then checked against those rows.

    error of attention = max over queries of |out - want| / |want|
    limit              = eps (16 + 4 max |score|) + eps_float32 S / LANES + eps_w / 2 (1 + max spread) + eps_out

eps is of the dtype that scores are computed in, eps_out of the result's: a score s is off by a few eps |s|, and so is its weight. Sums over
S tokens are of float32, one term after another in a few lanes. eps_w is of what weights are rounded to, where that is not float32: it moves
sum w v by at most eps_w / 2 sum w |v|, and sum w by as much of itself; spread = sum w |v| / |sum w v|, where sum w = 1. Tables and queries
that a function rounds to 16 bits are rounded here, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from kvtool.bench.measuring import Checked
from kvtool.bench.threads import in_threads
from veloxquant_mlx.codecs import Codec
from veloxquant_mlx.codecs._base import Parts, Shape
from veloxquant_mlx.codecs._rotated import RotatedCodec
from veloxquant_mlx.codecs._rotation import signs
from veloxquant_mlx.codecs.affine import Affine
from veloxquant_mlx.codecs.raw import Raw

EPS = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
LANES = 16
OWN, INDEPENDENT = "float64 attention to the rows that the codec itself decodes", "float64 attention to rows decoded in NumPy"

# (sequence, KV head) -> what makes their rows, (S, D) float64, in any thread
HeadRows = Callable[[int, int], Callable[[], np.ndarray]]


def to_numpy(array: mx.array | np.ndarray) -> np.ndarray:
    """float64, exactly."""
    return (array if isinstance(array, np.ndarray) else np.array(array.astype(mx.float32))).astype(np.float64)


def held(array: mx.array) -> np.ndarray:
    """The same numbers in NumPy, which any thread may read; float32 where they are floats."""
    return np.array(array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)


def rounded(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """To the numbers of a dtype, float64."""
    if dtype == mx.float16:
        return x.astype(np.float32).astype(np.float16).astype(np.float64)
    return to_numpy(mx.array(x.astype(np.float32)).astype(dtype))


# --- codes


def independent(codec: Codec) -> bool:
    """Whether `decoder` knows the codec's formula."""
    return isinstance(codec, Raw | Affine | RotatedCodec)


def unpacked(codes: mx.array | np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes of a little-endian bit stream, (..., bytes) uint8 -> (..., count)."""
    raw = np.unpackbits(np.array(codes), axis=-1, bitorder="little")[..., : count * bits]
    return np.packbits(raw.reshape(*raw.shape[:-1], count, bits), axis=-1, bitorder="little")[..., 0]


def rotation(dim: int, seed: int) -> np.ndarray:
    """R of the rotated codecs, (D, D): (Hartley of the odd part kron Sylvester) diag(signs) / sqrt(D)."""
    odd = dim // (dim & -dim)
    angles = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    sylvester = np.ones((1, 1))
    while sylvester.shape[0] < dim // odd:
        sylvester = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), sylvester)
    return np.kron(np.cos(angles) + np.sin(angles), sylvester) / math.sqrt(dim) * np.array(signs(dim, seed))


def decoder(codec: Codec, parts: Parts, shape: Shape, head: int, halves: bool = False) -> Callable[[], np.ndarray]:
    """What makes rows of one head, (S, D) float64, of a codec that is `independent`.

    Args:
        halves: the entries of a table, or the sums of two, are rounded to halves.
    """
    own = {name: held(part[head]) for name, part in parts.items()}
    return partial(_decoded, codec, own, shape, halves)


def _decoded(codec: Codec, parts: dict[str, np.ndarray], shape: Shape, halves: bool) -> np.ndarray:
    _, tokens, dim = shape
    if isinstance(codec, Raw):
        return to_numpy(parts["data"])
    if isinstance(codec, Affine):
        u = unpacked(parts["codes"], codec.bits, dim)
        axis = 0 if codec.per == "channel" else 1
        step, zero = (np.repeat(to_numpy(parts[name]), codec.group, axis)[:tokens, :dim] for name in ("scale", "zero"))
        return zero + step * u
    assert isinstance(codec, RotatedCodec)
    q = sum(
        np.array(table)[unpacked(parts[part], bits, dim)]
        for part, table, bits in zip(codec.code_parts, codec.codebooks, codec.bits, strict=True)
    )
    q = rounded(q, mx.float16) if halves else q
    scale = to_numpy(parts["scale"])[:, None]
    x = np.abs(scale) * (q @ rotation(dim, codec.seed))
    return x + np.where(np.signbit(scale), 0.0, 1.0) * to_numpy(parts["mean"]) if codec.center else x


def mlx_decoder(triplet: tuple[mx.array, mx.array, mx.array], bits: int, group: int, at: tuple[int, ...]) -> Callable[[], np.ndarray]:
    """What makes rows of mlx's affine quantisation at an index of the leading axes: codes from the lowest bits of 32-bit words on."""
    words, scales, biases = (held(part[at]) for part in triplet)

    def rows() -> np.ndarray:
        codes = unpacked(words.view(np.uint8), bits, words.shape[-1] * 32 // bits)
        step, zero = (np.repeat(to_numpy(side), group, axis=-1) for side in (scales, biases))
        return codes * step + zero

    return rows


# --- RoPE


def turned(x: np.ndarray, turn: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Rows (S, D) turned by (cos, sin), (S, D / 2) each; pairs (i, i + D / 2)."""
    half, (cos, sin) = x.shape[-1] // 2, turn
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def mlx_angles(tokens: int, dim: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, (S, D / 2), of positions 0 on with the float32 angles of `mx.fast.rope`, which models rotate by."""
    unit = mx.concatenate([mx.ones((1, 1, tokens, dim // 2)), mx.zeros((1, 1, tokens, dim // 2))], axis=-1)
    table = to_numpy(mx.fast.rope(unit, dim, traditional=False, base=base, scale=1.0, offset=0)[0, 0])
    return table[:, : dim // 2], table[:, dim // 2 :]


# --- attention


@dataclass(frozen=True)
class Attended:
    """Attention in float64: out (B, H_q, Q, D_v), the largest |score|, and the largest sum w |v| / |sum w v|."""

    out: np.ndarray
    largest: float
    spread: float


def attention(q: np.ndarray, keys: HeadRows, values: HeadRows, kv_heads: int, tokens: int) -> Attended:
    """Softmax attention; query i of Q stands at position S - Q + i and sees no later key.

    Args:
        q: (B, H_q, Q, D) times the scale.
        keys, values: rows of a head, (S, D).
        tokens: S.
    """
    batch, heads, count, _ = q.shape
    groups = heads // kv_heads

    def one(own: np.ndarray, keys_of: Callable[[], np.ndarray], values_of: Callable[[], np.ndarray]) -> tuple[np.ndarray, float, float]:
        k, v = keys_of(), values_of()
        hidden = np.arange(len(k)) > np.arange(len(k) - count, len(k))[:, None] if count > 1 else None
        sizes, outs, largest, spread = np.linalg.norm(v, axis=-1), [], 0.0, 0.0
        for query in own:
            scores = query @ k.T
            largest = max(largest, float(np.abs(scores).max()))
            if hidden is not None:
                scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            outs.append(weights @ v)
            spread = max(spread, float((weights @ sizes / np.linalg.norm(outs[-1], axis=-1)).max()))
        return np.stack(outs), largest, spread

    pairs = ((b, h) for b in range(batch) for h in range(kv_heads))
    items = ((q[b, h * groups : (h + 1) * groups], keys(b, h), values(b, h)) for b, h in pairs)
    outs, largest, spread = zip(*in_threads(one, items, 8 * tokens * (8 * q.shape[-1] + 4 * count)), strict=True)
    return Attended(np.stack(outs).reshape(batch, heads, count, -1), max(largest), max(spread))


def attention_check(
    attended: Attended, tokens: int, compute: mx.Dtype, against: str, weights: mx.Dtype = mx.float32
) -> Callable[[Any], Checked]:
    """Checks (B, H_q, Q, D) results of attention to so many tokens; scores are computed in one dtype, weights rounded to another."""
    want = attended.out

    def check(out: Any) -> Checked:
        if tuple(out.shape) != want.shape:
            return Checked(f"{against}, of shape {want.shape} and not {tuple(out.shape)}", math.inf, 0.0)
        got = to_numpy(out) if isinstance(out, mx.array) else np.asarray(out, np.float64)
        eps_out = EPS[out.dtype] if isinstance(out, mx.array) else float(np.finfo(out.dtype).eps)
        error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
        limit = EPS[compute] * (16 + 4 * attended.largest) + EPS[mx.float32] * tokens / LANES + eps_out
        if weights != mx.float32:
            limit += EPS[weights] / 2 * (1 + attended.spread)
        return Checked(against, float(error.max()), limit)

    return check


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|, Frobenius."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
