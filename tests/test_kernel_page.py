"""The kernel page, typed out: every function it names, under its module path, with its arguments in order and their defaults."""

import importlib
import inspect

import mlx.core as mx
import pytest

from veloxquant_mlx import metal
from veloxquant_mlx.metal import _qfilters_evict, fused_sdpa

# (module of veloxquant_mlx.metal, function, arguments as the page has them); what stands behind a * is keyword-only.
PAGE = (
    ("_vecinfer", "vecinfer_quantize_metal", "x, codebook, sub_dim"),
    ("_vecinfer", "vecinfer_dequant_metal", "indices, codebook, out_dtype=None"),
    ("_vecinfer", "vecinfer_encode_decode_metal", "keys, k_codebook, sub_dim, H_mat, smooth=None"),
    ("_vecinfer", "vecinfer_encode_decode_simple_metal", "values, v_codebook, sub_dim"),
    ("_rabitq", "rabitq_hamming_score", "qbits, bits, Cx, scale"),
    ("_rabitq_attend", "rabitq_fused_attend", "q, q_scale, k_bits, k_mag, k_const, v_idx, v_cents"),
    ("_rabitq_values", "rabitq_pack_values", "v_idx"),
    ("_rabitq_encode", "rabitq_encode", "keys, diag"),
    ("_rabitq_prefill", "rabitq_prefill_attend", "q, scale, k_bits, k_mag, k_const, v_idx, v_cents, *, causal=False"),
    (
        "_scalar_attend",
        "scalar_fused_decode_attend",
        "q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, group_size, scale, nsg=None",
    ),
    ("_kivi_quant", "kivi_group_quant_dequant", "x, axis, group_size, levels, eps=1e-08"),
    ("_comm_vq", "comm_vq_decode_metal", "indices, codebook, positions, inv_freq, n_cb, sub_dim, cb_size"),
    ("_crosskv_rope", "crosskv_rope_recode", "keys, positions, source_base, target_base"),
    ("_scalar_quant", "turboquant_scalar_quantize", "x, centroids, b"),
    ("_scalar_quant", "turboquant_scalar_dequantize", "indices, centroids"),
    ("_scalar_quant", "turboquant_hadamard_quantize", "x, diag, centroids, b"),
    (
        "_rvq_attend",
        "turboquant_fused_rvq_decode_attend",
        "q, k_indices1, k_indices2, centroids1, centroids2, v_indices, v_codebook, b1, b2, bv",
    ),
    ("_rvq_quant_pack", "rvq_quant_pack", "rotated, centroids1, boundaries1, boundaries2, bits"),
    ("_flash_prefill", "flash_prefill_attend", "q, k, v, scale"),
    ("_experimental_streaming_prefill", "streaming_prefill_attend", "q, k, v, scale, implementation='streaming'"),
    ("_h2o_evict", "h2o_fused_evict", "keys_mid, values_mid, scores_mid, positions_mid, n_sink, rope_base, grace=0, nsg=4"),
    (
        "_keyformer_evict",
        "keyformer_fused_evict",
        "keys_mid, values_mid, scores_mid, gumbel_mid, positions_mid, n_sink, rope_base, tau=0.0, recent=0, nsg=4",
    ),
    ("_qfilters_evict", "qfilters_score", "keys, filter_dir, n_sink=0, recent=0, sign=1"),
    ("_qfilters_evict", "qfilters_fused_evict", "keys_mid, values_mid, filter_dir, budget, n_sink=0, recent=0, sign=1"),
    (
        "fused_sdpa",
        "metal_fused_sdpa",
        "q_tilde, k_indices, k_codebook, v_indices, v_codebook, scale, *, causal=True, sliding_window=0, out_dtype=None",
    ),
    ("_bit_packing", "turboquant_bit_pack", "indices, b"),
    ("_bit_packing", "turboquant_bit_unpack", "packed, N, b"),
    ("_qjl", "qjl_encode", "x, S"),
    ("_qjl", "qjl_inner_product", "q_proj, packed_signs, norms"),
)

# (module of veloxquant_mlx, name, arguments) of what the page names besides kernels; the page gives the arguments of the first four.
HELPERS = (
    ("metal", "metal_available", ""),
    ("metal._crosskv_rope", "is_available", ""),
    ("metal.fused_sdpa", "supports_shape", "n_centroids, n_sub, head_dim"),
    ("metal.fused_sdpa", "patch_mlx_lm_for_fused_sdpa", ""),
    ("metal.fused_sdpa", "unpatch_mlx_lm", ""),
    ("metal.fused_sdpa", "is_patched", ""),
    ("allocators.vecinfer", "quantize_vq", "x, codebook, sub_dim"),
    ("allocators.vecinfer", "dequantize_vq", "indices, codebook"),
    ("allocators.vecinfer", "compute_query_lut", "q_tilde, codebook, sub_dim"),
    ("allocators.vecinfer", "apply_dual_transform_queries", "queries, smooth, hadamard"),
    ("transfer.rope", "recode_rope", "keys, positions, source_base, target_base"),
    ("allocators.eviction", "h2o_update", "state, keys, values"),
    ("allocators.scalar_codebook", "_pack_indices", "indices, bits"),
    ("allocators.scalar_codebook", "_unpack_indices", "packed, bits, dim"),
)


def arguments(function: object) -> tuple[list[str], dict[str, str]]:
    """Positional arguments in order, and keyword-only ones by name, each with its default as `name=default`."""
    positional, keyword = [], {}
    for p in inspect.signature(function).parameters.values():
        text = p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            positional.append(text)
        elif p.kind is p.KEYWORD_ONLY:
            keyword[p.name] = text
    return positional, keyword


def on_page(text: str) -> tuple[list[str], list[str]]:
    head, _, tail = text.partition("*, ")
    return [a for a in head.split(", ") if a], [a for a in tail.split(", ") if a]


def test_the_page_names_29_functions() -> None:
    assert len(PAGE) == 29
    assert {name: module for module, name, _ in PAGE} == metal.FUNCTIONS


@pytest.mark.parametrize(("module", "name", "text"), PAGE, ids=[row[1] for row in PAGE])
def test_signature_is_the_pages(module: str, name: str, text: str) -> None:
    function = getattr(importlib.import_module(f"veloxquant_mlx.metal.{module}"), name)
    assert function is getattr(metal, name)
    assert name in dir(metal) and name in metal.__all__
    positional, keyword = on_page(text)
    have_positional, have_keyword = arguments(function)
    assert have_positional == positional
    extras = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD}
    for argument in keyword:
        # An attend function takes the shared options as **extras; `causal` is False there unless it says otherwise.
        key = argument.partition("=")[0]
        assert have_keyword.get(key, argument if extras else None) == argument


@pytest.mark.parametrize(("module", "name", "text"), HELPERS, ids=[row[1] for row in HELPERS])
def test_helper_is_there(module: str, name: str, text: str) -> None:
    assert arguments(getattr(importlib.import_module(f"veloxquant_mlx.{module}"), name))[0] == on_page(text)[0]


@pytest.mark.parametrize(("module", "name", "_"), (*PAGE,), ids=[row[1] for row in PAGE])
def test_docstring_says_what_comes_back_and_what_is_refused(module: str, name: str, _: str) -> None:
    text = inspect.getdoc(getattr(metal, name)) or ""
    for part in ("Args:", "Returns:", "Raises:"):
        assert part in text


def test_caps_of_the_page() -> None:
    assert _qfilters_evict.QFILTERS_MAX_BUDGET == 4096
    caps = (fused_sdpa.MAX_N_CENTROIDS, fused_sdpa.MAX_N_SUB, fused_sdpa.MAX_HEAD_DIM)
    assert fused_sdpa.supports_shape(*caps)
    for i in range(3):
        assert not fused_sdpa.supports_shape(*(cap + (i == j) for j, cap in enumerate(caps)))
        assert not fused_sdpa.supports_shape(*(0 if i == j else cap for j, cap in enumerate(caps)))
    assert isinstance(metal.metal_available(), bool) and metal.metal_available() == mx.metal.is_available()


def test_configuration_of_the_patch_is_off_by_default() -> None:
    config = fused_sdpa.KVCacheConfig()
    assert not config.fused_sdpa and not config.fused_sdpa_memory_bound
