"""Inner products of queries with RaBitQ-coded keys, straight from the codes: no key is rotated back or rebuilt.

    <w, x^> = |s| (2 <z, u> - (2^B - 1) sum(z)) + [sign bit of s is 0] <w, mean>,    z = R w

z and <w, mean> are computed once per query, so that a mean costs nothing per key. `exact` sums z over the codes u. `popcount` quantises z
to Bq bits, z ~ low + step v with v in 0 .. 2^Bq - 1, and counts bits of the B planes u_b of the codes and the Bq planes v_j of the query
(Gao and Long 2024, section 3.3.2, with rounding to nearest):

    <z, u> ~ sum_b 2^b ( step sum_j 2^j popcount(u_b AND v_j) + low popcount(u_b) )

Error of `popcount`: step / 2 per coordinate, so at most |s| (step / 2) |q|_1, where q = 2 u - (2^B - 1), for `sum(z)` is taken of the
quantised query too: the score is then exactly that of the query `low + step v`.
"""

import mlx.core as mx

from veloxquant_mlx.codecs._base import token_blocks
from veloxquant_mlx.codecs._bits import pack, unpack
from veloxquant_mlx.codecs._rotation import rotate
from veloxquant_mlx.codecs.rabitq import Rabitq

MAX_QUERY_BITS = 8


def exact(codec: Rabitq, parts: dict[str, mx.array], queries: mx.array) -> mx.array:
    """Scores of queries against coded keys.

    Args:
        codec: one that encoded the keys.
        parts: what its `encode` returned.
        queries: (H, Q, D) float, in the keys' frame.

    Returns:
        (H, Q, S) float32: queries times the decoded keys, to float32 rounding.

    Raises:
        ValueError: queries do not fit the parts.
    """
    z = _rotated(codec, parts, queries)
    heads, _, dim = z.shape
    blocks = []
    for tokens in token_blocks((heads, parts["scale"].shape[1], dim)):
        u = unpack(parts["codes"][:, tokens], codec.bits[0], dim).astype(mx.float32)
        blocks.append(mx.matmul(z, u.swapaxes(1, 2)))
        mx.eval(blocks[-1])
    return _finish(codec, parts, queries, blocks, mx.sum(z, axis=-1, keepdims=True))


def popcount(codec: Rabitq, parts: dict[str, mx.array], queries: mx.array, query_bits: int = 4) -> mx.array:
    """Scores by counting bits, with every query quantised between its own extremes.

    Args:
        codec: one that encoded the keys.
        parts: what its `encode` returned.
        queries: (H, Q, D) float, in the keys' frame.
        query_bits: Bq, 1 to 8.

    Returns:
        (H, Q, S) float32.

    Raises:
        ValueError: queries do not fit the parts, or query_bits is out of range.
    """
    if type(query_bits) is not int or not 1 <= query_bits <= MAX_QUERY_BITS:
        raise ValueError(f"[rabitq_scores] query_bits must be an integer in 1..{MAX_QUERY_BITS}, but got {query_bits!r}.")
    v, low, step = quantise_query(_rotated(codec, parts, queries), query_bits)
    heads, count, dim = v.shape
    query_planes = _planes(v, query_bits)
    blocks = []
    for tokens in token_blocks((heads, parts["scale"].shape[1], dim * (count + 1))):
        total = mx.zeros((heads, count, tokens.stop - tokens.start), mx.float32)
        for b, plane in enumerate(_planes(unpack(parts["codes"][:, tokens], codec.bits[0], dim), codec.bits[0])):
            ones = low * _ones(plane)[:, None]
            for j, query_plane in enumerate(query_planes):
                ones = ones + step * float(1 << j) * _ones(query_plane[:, :, None] & plane[:, None])
            total = total + float(1 << b) * ones
        blocks.append(total)
        mx.eval(total)
    return _finish(codec, parts, queries, blocks, dim * low + step * mx.sum(v.astype(mx.float32), axis=-1, keepdims=True))


def quantise_query(z: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """v (H, Q, D) uint8, low and step (H, Q, 1) float32, with z ~ low + step v within step / 2."""
    low, high = mx.min(z, axis=-1, keepdims=True), mx.max(z, axis=-1, keepdims=True)
    step = (high - low) / ((1 << bits) - 1)
    v = mx.clip(mx.round((z - low) / mx.where(step > 0, step, 1.0)), 0, (1 << bits) - 1)
    return v.astype(mx.uint8), low, step


def _rotated(codec: Rabitq, parts: dict[str, mx.array], queries: mx.array) -> mx.array:
    heads, tokens = parts["scale"].shape
    if queries.ndim != 3 or queries.shape[0] != heads:
        raise ValueError(f"[rabitq_scores] queries must be ({heads}, Q, D), but got {tuple(queries.shape)}.")
    wanted = codec.layout((heads, tokens, queries.shape[2]), mx.float32)["codes"][1]
    if tuple(parts["codes"].shape) != wanted:
        raise ValueError(
            f"[rabitq_scores] codes must be {wanted} for queries of {queries.shape[2]}, but got {tuple(parts['codes'].shape)}."
        )
    return rotate(queries.astype(mx.float32), codec.seed)


def _finish(codec: Rabitq, parts: dict[str, mx.array], queries: mx.array, blocks: list[mx.array], total: mx.array) -> mx.array:
    """|s| (2 <z, u> - (2^B - 1) sum(z)), and the mean's part where the row has it."""
    if not blocks:
        return mx.zeros((*queries.shape[:2], 0), mx.float32)
    scale = parts["scale"][:, None]
    inner = 2 * mx.concatenate(blocks, axis=-1) - ((1 << codec.bits[0]) - 1) * total
    scores = mx.abs(scale).astype(mx.float32) * inner
    if codec.center:
        centred = (scale.view(mx.uint16) < 0x8000).astype(mx.float32)
        scores = scores + centred * mx.matmul(queries.astype(mx.float32), parts["mean"].astype(mx.float32)[:, :, None])
    return scores


def _planes(codes: mx.array, bits: int) -> list[mx.array]:
    """Bit b of every code, (..., ceil(D / 8)) uint8 each."""
    return [pack(codes >> b & 1, 1) for b in range(bits)]


def _ones(x: mx.array) -> mx.array:
    """Bits set along the last axis, float32: sums of neighbouring 1, 2 and 4-bit fields, then of the bytes."""
    x = x - (x >> 1 & 0x55)
    x = (x & 0x33) + (x >> 2 & 0x33)
    return mx.sum((x + (x >> 4) & 0x0F).astype(mx.float32), axis=-1)
