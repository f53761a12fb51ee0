"""Attention over VecInfer's vector-quantized keys and values, and the patch that routes mlx-lm's attention to a cache's own.

    k~[j]   = concat_n k_codebook[k_indices[j, n]],    v^[j] = concat_n v_codebook[v_indices[j, n]]
    out[i]  = sum_j softmax_j(scale q~[i] . k~[j]) v^[j]

q~ = (q * smooth) H and k~ = (k / smooth) H give q~ . k~ = q . k, since H H^T = I (VecInfer, Yao et al. 2025, arXiv 2510.06175). Every
module of mlx-lm binds `scaled_dot_product_attention` by value, hence the patch of each module rather than of one.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any, Unpack

import mlx.core as mx
from mlx_lm.models import base

from veloxquant_mlx.metal import _attend, _native_attend
from veloxquant_mlx.metal._attend import Extras, Options
from veloxquant_mlx.metal._attend_launch import Many, attend_kernel, launch, layout, many_kernel, spare_floats
from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, require

MAX_N_CENTROIDS = 256
MAX_N_SUB = 16
MAX_HEAD_DIM = 256
INDICES = (mx.uint8, mx.uint16, mx.int32, mx.uint32)

_INPUTS = ("k_indices", "k_codebook", "v_indices", "v_codebook")
_KERNEL = attend_kernel(
    "metal_fused_sdpa",
    _INPUTS,
    """kvtool::DenseKeys<kvtool::VectorReader<D, E, SUBK, LAYOUT, BITS, TK>, D, E> keys{{k_indices, k_codebook, dims[9], dims[3]}};
kvtool::VectorReader<D, E, SUBV, LAYOUT, BITS, TV> values{v_indices, v_codebook, dims[9], dims[3]};
(void)tables;""",
)


def _metal_readers(near: tuple[bool, bool]) -> str:
    """Readers for Metal, with the codebooks of keys and of values in threadgroup memory or not."""
    lines, place = [], "tables"
    for role, fits in zip("kv", near, strict=True):
        if fits:
            size = f"dims[9] * SUB{role.upper()}"
            lines.append(f"threadgroup float* {role}_words = {place};")
            lines.append(f"kvtool::stage({role}_codebook, {role}_words, {size}, thread_index_in_threadgroup, NSG * 32);")
            place = f"{role}_words + {size}"
        else:
            lines.append(f"const device float* {role}_words = {role}_codebook;")
    of_keys, of_values = (str(fits).lower() for fits in near)
    lines.append(
        f"kvtool::DenseKeys<kvtool::VectorReader<D, E, SUBK, LAYOUT, BITS, TK, {of_keys}>, D, E> "
        "keys{{k_indices, k_words, dims[9], dims[3]}};"
    )
    lines.append(f"kvtool::VectorReader<D, E, SUBV, LAYOUT, BITS, TV, {of_values}> values{{v_indices, v_words, dims[9], dims[3]}};")
    return "\n".join([*lines, "(void)tables;"])


_METAL = {
    near: attend_kernel(f"{_KERNEL.name}{'_k' * near[0]}{'_v' * near[1]}", _INPUTS, "", _metal_readers(near))
    for near in itertools.product((False, True), repeat=2)
}
# A codebook that 64 rows share stays where it is: tiles take the memory.
MANY = Many(many_kernel(_KERNEL.name, _INPUTS, _metal_readers((False, False))), tables=1)


def metal_fused_sdpa(
    q_tilde: mx.array,
    k_indices: mx.array,
    k_codebook: mx.array,
    v_indices: mx.array,
    v_codebook: mx.array,
    scale: float,
    *,
    causal: bool = True,
    sliding_window: int = 0,
    out_dtype: mx.Dtype | None = None,
    packed: str | None = None,
    **extras: Unpack[Extras],
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention over vector-quantized keys and values.

    Args:
        q_tilde: (B, H_q, S_q, D) float, smoothed and rotated; D a multiple of 32, at most 256; H_q a multiple of H_kv.
        k_indices: (B, H_kv, S_kv, n_sub) uint8, uint16, int32 or uint32; an index beyond the codebook is clamped.
        k_codebook: (n_centroids, sub_dim) float, n_sub * sub_dim = D.
        v_indices: (B, H_kv, S_kv, n_sub_v), as `k_indices`.
        v_codebook: (n_centroids, sub_dim_v) float.
        scale: of the scores, usually 1 / sqrt(D).
        causal: query i stands at S_kv - S_q + i and sees no later key.
        sliding_window: if > 0, a query sees at most this many keys up to and with its own position; without `causal`, later keys too.
        out_dtype: None for the dtype of `q_tilde`.
        packed: "lsb8" or "lsb32": both index arrays packed along their last axis at the bits n_centroids needs.
        extras: see `_attend.Extras`; the window is `sliding_window`.

    Returns:
        (B, H_q, S_q, D) in `out_dtype`; with `lse=True` also (B, H_q, S_q) float32.

    Raises:
        ValueError: a shape does not fit, n_sub * sub_dim is not D, the codebooks differ in n_centroids, H_q is not a multiple of H_kv,
            or a size is over the caps of `supports_shape`.
        TypeError: another dtype.

    Error: float32 arithmetic, rounded once.
    """
    name = "metal_fused_sdpa"
    _attend.check_queries(name, "q_tilde", q_tilde, max_dim=MAX_HEAD_DIM)
    batch, _, _, dim = q_tilde.shape
    require(dim % 32 == 0, name, "q_tilde", "(B, H_q, S_q, D) with D a multiple of 32", q_tilde)
    check_array(name, "k_codebook", k_codebook, ("n_centroids", "sub_dim"), FLOATS)
    entries = k_codebook.shape[0]
    check_array(name, "v_codebook", v_codebook, (entries, "sub_dim_v"), FLOATS)
    counts = []
    for key, codebook in (("k_codebook", k_codebook), ("v_codebook", v_codebook)):
        sub = codebook.shape[1]
        require(sub > 0 and dim % sub == 0, name, key, f"({entries}, sub_dim) with n_sub * sub_dim = D = {dim}", codebook)
        caps = f"({entries}, sub_dim) with at most {MAX_N_CENTROIDS} centroids and D / sub_dim at most {MAX_N_SUB}"
        require(supports_shape(entries, dim // sub, dim), name, key, caps, codebook)
        counts.append(dim // sub)
    _attend.check_packed(name, packed)
    bits = max(1, (entries - 1).bit_length())
    check_array(name, "k_indices", k_indices, (batch, "H_kv", "S_kv", "n_sub"), INDICES if packed is None else (mx.uint8, mx.uint32))
    kv = k_indices.shape[:3]
    _attend.check_codes(name, "k_indices", k_indices, kv, counts[0], packed, bits, INDICES)
    _attend.check_codes(name, "v_indices", v_indices, kv, counts[1], packed, bits, INDICES)
    scale = _attend.check_scale(name, scale)
    window = _attend.check_window(name, "sliding_window", sliding_window)
    shared: Extras = {"causal": causal, "window": window, "out_dtype": q_tilde.dtype if out_dtype is None else out_dtype}
    options = _attend.check_options(name, q_tilde, kv[1], kv[2], {**shared, **extras}, refused=("window",) if "window" in extras else ())
    if options.empty:
        return _attend.nothing(options)
    if natively():
        tables = (book.reshape(-1) if book.shape[1] == 1 else book for book in (k_codebook, v_codebook))
        stages = (((codes, bits, table),) for codes, table in zip((k_indices, v_indices), tables, strict=True))
        keys, values = (_native_attend.Rows(stage, packed, by) for stage, by in zip(stages, (options.k_norm, options.v_scale), strict=True))
        found = _native_attend.attend(q_tilde.astype(mx.float32) * scale, keys, values, options)
        if found is not None:
            return found
    if backend() == "cpu":
        return _ops(q_tilde, (k_indices, v_indices), (k_codebook, v_codebook), scale, packed, bits, options)
    kernel, words = _KERNEL, 1  # no table of nothing
    if backend() == "metal":
        spare, near = spare_floats(options), []
        for codebook in (k_codebook, v_codebook):
            near.append(codebook.size <= spare)
            words, spare = (words + codebook.size, spare - codebook.size) if near[-1] else (words, spare)
        kernel = _METAL[near[0], near[1]]
    return launch(
        kernel,
        q_tilde,
        scale,
        (k_indices, k_codebook.astype(mx.float32), v_indices, v_codebook.astype(mx.float32)),
        options,
        template=[
            *(("SUBK", dim // counts[0]), ("SUBV", dim // counts[1]), ("LAYOUT", layout(packed)), ("BITS", bits)),
            *(("TK", k_indices.dtype), ("TV", v_indices.dtype)),
        ],
        sizes=(entries,),
        tables=words,
        many=MANY,
    )


def supports_shape(n_centroids: int, n_sub: int, head_dim: int) -> bool:
    """Whether a configuration fits the kernel's caps; head_dim must also be a multiple of 32."""
    return 1 <= n_centroids <= MAX_N_CENTROIDS and 1 <= n_sub <= MAX_N_SUB and 1 <= head_dim <= MAX_HEAD_DIM


def _ops(
    q: mx.array,
    indices: tuple[mx.array, mx.array],
    codebooks: tuple[mx.array, mx.array],
    scale: float,
    packed: str | None,
    bits: int,
    options: Options,
) -> mx.array | tuple[mx.array, mx.array]:
    keys, values = (
        _attend.look_up(codebook, _attend.unpack_codes(codes, options.dim // codebook.shape[1], packed, bits))
        for codes, codebook in zip(indices, codebooks, strict=True)
    )
    return _attend.dense_attention(q, keys, values, scale, options)


# ---- The patch of mlx-lm

ATTENTION = "scaled_dot_product_attention"
_ORIGINAL = "_unpatched_attention"  # attribute of a routed function: what it stands in for


@dataclass(frozen=True)
class KVCacheConfig:
    """What the patched attention asks of a cache's `config`.

    Fields:
        fused_sdpa: attention is the cache's own method `fused_sdpa(queries, *, scale, causal)`.
        fused_sdpa_memory_bound: `update_and_fetch` returns nothing that can be attended to, so that the method is the only way.
    """

    fused_sdpa: bool = False
    fused_sdpa_memory_bound: bool = False


def patch_mlx_lm_for_fused_sdpa() -> None:
    """Route attention to a cache's own where it asks for that; call it after loading a model.

    Replaces `scaled_dot_product_attention` in every module of mlx_lm.models and mlx_vlm.models that is imported by now. A call goes to
    `cache.fused_sdpa` if `cache.config` is a `KVCacheConfig` with both fields true, the mask is None or "causal" and there are no
    sinks; else to the original. Calling it again adds modules imported since. `unpatch_mlx_lm` reverses it.
    """
    routed: dict[Callable, Callable] = {}
    for module in _model_modules():
        original = getattr(module, ATTENTION, None)
        if callable(original) and not hasattr(original, _ORIGINAL):
            if original not in routed:
                routed[original] = _route(original)
            setattr(module, ATTENTION, routed[original])


def unpatch_mlx_lm() -> None:
    """Put the original functions back, also into modules that bound the patched one since."""
    for module in _model_modules():
        original = getattr(getattr(module, ATTENTION, None), _ORIGINAL, None)
        if original is not None:
            setattr(module, ATTENTION, original)


def is_patched() -> bool:
    """Whether mlx-lm's attention is routed."""
    return hasattr(getattr(base, ATTENTION), _ORIGINAL)


def _model_modules() -> list[ModuleType]:
    return [m for name, m in sorted(sys.modules.items()) if name.startswith(("mlx_lm.models.", "mlx_vlm.models."))]


def _route(original: Callable) -> Callable:
    parameters = signature(original)

    @wraps(original)
    def attention(queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any) -> mx.array:
        if _wants_own_attention(args[0] if args else kwargs.get("cache")):
            call = parameters.bind(queries, keys, values, *args, **kwargs).arguments
            mask = call.get("mask")
            if call.get("sinks") is None and (mask is None or (isinstance(mask, str) and mask == "causal")):
                return call["cache"].fused_sdpa(queries, scale=call["scale"], causal=mask is not None)
        return original(queries, keys, values, *args, **kwargs)

    setattr(attention, _ORIGINAL, original)
    return attention


def _wants_own_attention(cache: Any) -> bool:
    config = getattr(cache, "config", None)
    return isinstance(config, KVCacheConfig) and config.fused_sdpa and config.fused_sdpa_memory_bound
