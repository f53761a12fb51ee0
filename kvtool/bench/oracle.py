"""Right results in float64 NumPy, and how far a result may be from them.

Codes of raw, rvq, rabitq, affine and of mlx's own quantisation are decoded here from their formulas. Codes of other codecs are decoded by
the codec itself, whole; attention, which reads them tile by tile, is then checked against those rows.

    error of attention = max over queries of |out - want| / |want|
    limit              = eps (16 + 4 max |score|) + eps_float32 S / LANES + eps_w / 2 (1 + max spread) + eps_out

eps is of the dtype that scores are computed in, eps_out of the result's: a score s is off by a few eps |s|, and so is its weight. Sums over
S tokens are of float32, one term after another in a few lanes. eps_w is of what weights are rounded to, where that is not float32: it moves
sum w v by at most eps_w / 2 sum w |v|, and sum w by as much of itself; spread = sum w |v| / |sum w v|, where sum w = 1. Tables and queries that a
function rounds to 16 bits are rounded here, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvtool.bench.measuring import Checked
from veloxquant_mlx.codecs import Codec
from veloxquant_mlx.codecs._base import Given, Parts, Shape
from veloxquant_mlx.codecs._rotated import RotatedCodec
from veloxquant_mlx.codecs._rotation import signs
from veloxquant_mlx.codecs.affine import Affine
from veloxquant_mlx.codecs.raw import Raw

EPS = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
LANES = 16
OWN, INDEPENDENT = "float64 attention to the rows that the codec itself decodes", "float64 attention to rows decoded in NumPy"

HeadRows = Callable[[int, int], np.ndarray]  # (sequence, KV head) -> (S, D) float64


def to_numpy(array: mx.array) -> np.ndarray:
    """float64, exactly."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def rounded(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """To the numbers of a dtype, float64."""
    return to_numpy(mx.array(x.astype(np.float32)).astype(dtype))


# --- codes


def independent(codec: Codec) -> bool:
    """Whether `decoded` knows the codec's formula."""
    return isinstance(codec, Raw | Affine | RotatedCodec)


def unpacked(codes: mx.array, bits: int, count: int) -> np.ndarray:
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


def decoded(codec: Codec, parts: Parts, shape: Shape, head: int, given: Given | None = None, halves: bool = False) -> np.ndarray:
    """Rows of one head, (S, D) float64; with `halves` from a table, or sums of two tables, whose entries are rounded to halves."""
    _, tokens, dim = shape
    if isinstance(codec, Raw):
        return to_numpy(parts["data"][head])
    if isinstance(codec, Affine):
        u = unpacked(parts["codes"][head], codec.bits, dim)
        axis = 0 if codec.per == "channel" else 1
        step, zero = (np.repeat(to_numpy(parts[name][head]), codec.group, axis)[:tokens, :dim] for name in ("scale", "zero"))
        return zero + step * u
    if isinstance(codec, RotatedCodec):
        q = sum(
            np.array(table)[unpacked(parts[part][head], bits, dim)]
            for part, table, bits in zip(codec.code_parts, codec.codebooks, codec.bits, strict=True)
        )
        q = rounded(q, mx.float16) if halves else q
        scale = to_numpy(parts["scale"][head])[:, None]
        x = np.abs(scale) * (q @ rotation(dim, codec.seed))
        return x + np.where(np.signbit(scale), 0.0, 1.0) * to_numpy(parts["mean"][head]) if codec.center else x
    near = () if given is None else (given,)
    return to_numpy(codec.decode(dict(parts), shape, mx.float32, *near)[head])


def mlx_decoded(triplet: tuple[mx.array, mx.array, mx.array], bits: int, group: int, at: tuple[int, ...]) -> np.ndarray:
    """Rows of mlx's affine quantisation at an index of the leading axes: codes from the lowest bits of 32-bit words on."""
    words, scales, biases = triplet
    count = words.shape[-1] * 32 // bits
    codes = unpacked(words[at].view(mx.uint8), bits, count)
    step, zero = (np.repeat(to_numpy(side[at]), group, axis=-1) for side in (scales, biases))
    return codes * step + zero


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


def attention(q: np.ndarray, keys: HeadRows, values: HeadRows, kv_heads: int) -> Attended:
    """Softmax attention; query i of Q stands at position S - Q + i and sees no later key.

    Args:
        q: (B, H_q, Q, D) times the scale.
        keys, values: rows of a head.
    """
    batch, heads, count, _ = q.shape
    groups, out, largest, spread = heads // kv_heads, [], 0.0, 0.0
    for b in range(batch):
        for h in range(kv_heads):
            k, v = keys(b, h), values(b, h)
            hidden = np.arange(len(k)) > np.arange(len(k) - count, len(k))[:, None]
            sizes = np.linalg.norm(v, axis=-1)
            for own in q[b, h * groups : (h + 1) * groups]:
                scores = own @ k.T
                largest = max(largest, float(np.abs(scores).max()))
                scores[hidden] = -np.inf
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                out.append(weights @ v)
                spread = max(spread, float((weights @ sizes / np.linalg.norm(out[-1], axis=-1)).max()))
    return Attended(np.stack(out).reshape(batch, heads, count, -1), largest, spread)


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
