"""The kernel API: one module per family, each public function runs on every back end. Functions are imported on first use.

On a CPU those of NATIVE and NATIVE_ATTENDS evaluate their arrays when they are called: `mx.compile` fails on them, and so does a gradient
through their results. Call them under `veloxquant_mlx.native.without()` there: most are MLX's operations alone then, as where the extension
is not built (`crosskv_rope_recode` is not: it is evaluated block by block, to keep memory low).
"""

import importlib
from typing import Any

from veloxquant_mlx import native
from veloxquant_mlx.metal._backend import backend, metal_available, natively

# Public function -> the module of this package that defines it.
FUNCTIONS = {
    "vecinfer_quantize_metal": "_vecinfer",
    "vecinfer_dequant_metal": "_vecinfer",
    "vecinfer_encode_decode_metal": "_vecinfer",
    "vecinfer_encode_decode_simple_metal": "_vecinfer",
    "rabitq_hamming_score": "_rabitq",
    "rabitq_fused_attend": "_rabitq_attend",
    "rabitq_pack_values": "_rabitq_values",
    "rabitq_encode": "_rabitq_encode",
    "rabitq_prefill_attend": "_rabitq_prefill",
    "scalar_fused_decode_attend": "_scalar_attend",
    "kivi_group_quant_dequant": "_kivi_quant",
    "comm_vq_decode_metal": "_comm_vq",
    "crosskv_rope_recode": "_crosskv_rope",
    "turboquant_scalar_quantize": "_scalar_quant",
    "turboquant_scalar_dequantize": "_scalar_quant",
    "turboquant_hadamard_quantize": "_scalar_quant",
    "turboquant_fused_rvq_decode_attend": "_rvq_attend",
    "rvq_quant_pack": "_rvq_quant_pack",
    "flash_prefill_attend": "_flash_prefill",
    "streaming_prefill_attend": "_experimental_streaming_prefill",
    "h2o_fused_evict": "_h2o_evict",
    "keyformer_fused_evict": "_keyformer_evict",
    "qfilters_score": "_qfilters_evict",
    "qfilters_fused_evict": "_qfilters_evict",
    "metal_fused_sdpa": "fused_sdpa",
    "turboquant_bit_pack": "_bit_packing",
    "turboquant_bit_unpack": "_bit_packing",
    "qjl_encode": "_qjl",
    "qjl_inner_product": "_qjl",
}

# Those that the C++ extension has; on a CPU the others are MLX's operations.
NATIVE = (
    "vecinfer_quantize_metal",
    "vecinfer_dequant_metal",
    "vecinfer_encode_decode_metal",
    "vecinfer_encode_decode_simple_metal",
    "rabitq_hamming_score",
    "rabitq_pack_values",
    "rabitq_encode",
    "kivi_group_quant_dequant",
    "comm_vq_decode_metal",
    "crosskv_rope_recode",
    "turboquant_scalar_quantize",
    "turboquant_scalar_dequantize",
    "turboquant_hadamard_quantize",
    "rvq_quant_pack",
    "h2o_fused_evict",
    "keyformer_fused_evict",
    "qfilters_score",
    "qfilters_fused_evict",
    "turboquant_bit_pack",
    "turboquant_bit_unpack",
    "qjl_encode",
    "qjl_inner_product",
)
# Those that it takes but for operands that are not finite (`_native_attend`).
NATIVE_ATTENDS = (
    "rabitq_fused_attend",
    "rabitq_prefill_attend",
    "scalar_fused_decode_attend",
    "turboquant_fused_rvq_decode_attend",
    "flash_prefill_attend",
    "streaming_prefill_attend",
    "metal_fused_sdpa",
)

__all__ = ["FUNCTIONS", "NATIVE", "NATIVE_ATTENDS", "metal_available", "runs_on", *FUNCTIONS]


def runs_on(function: str) -> str:
    """What runs a function now: "metal", "cuda", "native" and its SIMD level, or "cpu", MLX's operations; both where operands decide."""
    if function not in (*NATIVE, *NATIVE_ATTENDS) or not natively():
        return backend()
    return f"native {native.level()}" if function in NATIVE else f"native {native.level()} or cpu"


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{FUNCTIONS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
