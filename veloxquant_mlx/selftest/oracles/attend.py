"""Attention over coded keys and values, row by row, in float64 (or in float32 as the baseline that tolerances are taken from)."""

import numpy as np


def unpack(codes: np.ndarray, count: int, packed: str | None, bits: int) -> np.ndarray:
    """(..., count) integers from codes packed along the last axis, bit by bit."""
    if packed is None:
        return codes.astype(np.int64)
    if packed == "lsb32":
        per = 32 // bits
        shifted = codes[..., None].astype(np.int64) >> (np.arange(per) * bits)
        return (shifted & (2**bits - 1)).reshape(*codes.shape[:-1], codes.shape[-1] * per)[..., :count]
    stream = np.unpackbits(np.ascontiguousarray(codes), axis=-1, bitorder="little")[..., : count * bits]
    return (stream.reshape(*codes.shape[:-1], count, bits).astype(np.int64) << np.arange(bits)).sum(axis=-1)


def look_up(table: np.ndarray, codes: np.ndarray, dtype: type) -> np.ndarray:
    """table[codes], codes clamped; rows of a 2-D table are laid side by side."""
    values = table.astype(dtype)[np.clip(codes, 0, len(table) - 1)]
    return values if table.ndim == 1 else values.reshape(*codes.shape[:-1], codes.shape[-1] * table.shape[1])


def sees(i: int, j: np.ndarray, queries: int, keys: int, causal: bool, window: int, first: int) -> np.ndarray:
    at = keys - queries + i
    seen = j >= first
    if causal:
        seen &= j <= at
    if window:
        seen &= j > at - window
    return seen


def softmax_attention(
    score,  # (b, h, kv head, i) -> (S_kv,) scores without k_norm and bias
    values: np.ndarray,  # (B, H_kv, S_kv, D)
    shape: tuple[int, int, int, int],
    *,
    bias: np.ndarray | None = None,
    causal: bool = False,
    window: int = 0,
    start: np.ndarray | None = None,
    lse: bool = False,
    k_norm: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    out_rotation: np.ndarray | None = None,
    out_dtype=None,
    splits: int | None = None,
    dtype: type = np.float64,
):
    del out_dtype, splits  # rounding is the comparison's, splitting must not show
    batch, heads, queries, _ = shape
    kv_heads, keys = values.shape[1:3]
    out, log_sum = np.zeros(shape, dtype), np.full(shape[:3], -np.inf, dtype)
    j = np.arange(keys)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for i in range(queries):
                first = 0 if start is None else int(np.broadcast_to(start.reshape(batch, -1), (batch, queries))[b, i])
                seen = sees(i, j, queries, keys, causal, window, first)
                if not seen.any():
                    continue
                s = score(b, h, g, i)[seen]
                if k_norm is not None:
                    s = s * k_norm[b, g][seen].astype(dtype)
                if bias is not None:
                    s = s + bias[b, g][seen].astype(dtype)
                v = values[b, g][seen]
                if v_scale is not None:
                    v = v * v_scale[b, g][seen].astype(dtype)[:, None]
                if (s == -np.inf).all():
                    continue
                with np.errstate(invalid="ignore"):
                    p = np.exp(s - s.max())
                    out[b, h, i] = (p[:, None] * v).sum(axis=0) / p.sum()
                    log_sum[b, h, i] = s.max() + np.log(p.sum())
    if out_rotation is not None:
        out = out @ rotation(out_rotation, dtype)
    return (out, log_sum) if lse else out


def rotation(given: np.ndarray, dtype: type) -> np.ndarray:
    """R as a matrix; the output, a row vector of R x, times R is x."""
    if given.ndim == 2:
        return given.astype(dtype)
    sylvester = np.ones((1, 1))
    while len(sylvester) < len(given):
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    return (sylvester / np.sqrt(len(given)) * given).astype(dtype)


def _dense(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, extras: dict):
    dtype = extras.get("dtype", np.float64)
    q = q.astype(dtype)

    def score(b: int, h: int, g: int, i: int) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return (keys[b, g] @ q[b, h, i]) * dtype(scale)

    return softmax_attention(score, values, q.shape, **extras)


def rabitq(q, q_scale, k_bits, k_mag, k_const, v_idx, v_cents, *, packed=None, **extras):
    dtype = extras.get("dtype", np.float64)
    dim = q.shape[3]
    bits = max(1, int(np.ceil(np.log2(len(v_cents)))))
    if packed is None and v_idx.shape[-1] == dim // 2:
        packed, bits = "lsb8", 4
    values = look_up(v_cents, unpack(v_idx, dim, packed, bits), dtype)
    signs = unpack(k_bits, dim, "lsb8", 1)
    q_signs = q >= 0

    def score(b: int, h: int, g: int, i: int) -> np.ndarray:
        hamming = (signs[b, g] != q_signs[b, h, i]).sum(axis=-1)
        return (dim - 2 * hamming).astype(dtype) * q_scale[b, h, i].astype(dtype) * k_mag[b, g].astype(dtype)

    return softmax_attention(score, values, q.shape, bias=k_const, **extras)


def scalar(
    q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, group_size, scale, nsg=None, *, packed=None, k_bits=None, v_bits=None, **extras
):
    del nsg
    dtype = extras.get("dtype", np.float64)
    dim, length = q.shape[3], v_codes.shape[2]
    token, channel = np.arange(length) // group_size, np.arange(dim) // group_size
    keys = unpack(k_codes, dim, packed, k_bits) * k_scale.astype(dtype)[:, :, token] + k_zero.astype(dtype)[:, :, token]
    values = unpack(v_codes, dim, packed, v_bits) * v_scale.astype(dtype)[..., channel] + v_zero.astype(dtype)[..., channel]
    return _dense(q, keys.astype(dtype), values.astype(dtype), scale, extras)


def rvq(q, k_indices1, k_indices2, centroids1, centroids2, v_indices, v_codebook, b1, b2, bv, *, packed=None, **extras):
    dtype = extras.get("dtype", np.float64)
    dim = q.shape[3]
    keys = look_up(centroids1, unpack(k_indices1, dim, packed, b1), dtype) + look_up(centroids2, unpack(k_indices2, dim, packed, b2), dtype)
    values = look_up(v_codebook, unpack(v_indices, dim // v_codebook.shape[1], packed, bv), dtype)
    return _dense(q, keys, values, 1 / np.sqrt(dim), extras)


def vecinfer(q_tilde, k_indices, k_codebook, v_indices, v_codebook, scale, *, causal=True, sliding_window=0, packed=None, **extras):
    dtype = extras.get("dtype", np.float64)
    dim = q_tilde.shape[3]
    bits = max(1, int(np.ceil(np.log2(len(k_codebook)))))
    keys, values = (
        look_up(codebook, unpack(codes, dim // codebook.shape[1], packed, bits), dtype)
        for codes, codebook in ((k_indices, k_codebook), (v_indices, v_codebook))
    )
    return _dense(q_tilde, keys, values, scale, {"causal": causal, "window": sliding_window, **extras})
