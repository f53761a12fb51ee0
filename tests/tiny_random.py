"""Tiny random mlx-lm models, seeded, float32, 2-4 layers: FAMILIES whose cache or RoPE differs, and every model file of mlx-lm."""

import dataclasses
import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 97
WINDOW = 16

_DENSE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}
_MLA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 12,
    "first_k_dense_replace": 1,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
}
_LLAMA4 = {
    **_DENSE,
    "attention_bias": False,
    "attention_chunk_size": WINDOW,
    "head_dim": 8,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
    "max_position_embeddings": 4096,
    "model_type": "llama4_text",
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_local_experts": 2,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "use_qk_norm": True,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

# family: (mlx_lm.models module, config, cache class of every layer; a tuple is a CacheList and its members)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str | tuple[str, ...]]]] = {
    "llama": ("llama", {**_DENSE, "rope_theta": 10000.0}, ["KVCache"] * 2),
    "llama-traditional": ("llama", {**_DENSE, "rope_theta": 10000.0, "rope_traditional": True}, ["KVCache"] * 2),
    "llama-llama3": (
        "llama",
        {
            **_DENSE,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        ["KVCache"] * 2,
    ),
    "llama-sliding": (
        "llama",
        {
            **_DENSE,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": WINDOW,
        },
        ["RotatingKVCache", "KVCache", "RotatingKVCache"],
    ),
    "qwen3": (
        "qwen3",
        {
            **_DENSE,
            "num_attention_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
        },
        ["KVCache"] * 2,
    ),
    "gemma2": ("gemma2", {**_DENSE, "head_dim": 12, "query_pre_attn_scalar": 12.0}, ["KVCache"] * 2),
    "gemma3_text": (
        "gemma3_text",
        {
            **_DENSE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
        ["RotatingKVCache", "KVCache"] * 2,
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_DENSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "rope_scaling": {**_YARN, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.0},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        ["RotatingKVCache", "KVCache"],
    ),
    "cohere2": (
        "cohere2",
        {**_DENSE, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 4},
        ["RotatingKVCache"] * 3 + ["KVCache"],
    ),
    "glm4": (
        "glm4",
        {**_DENSE, "attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
        ["KVCache"] * 2,
    ),
    "llama4": ("llama4", {"model_type": "llama4", "text_config": _LLAMA4}, ["ChunkedKVCache"] * 3 + ["KVCache"]),
    "phi3": ("phi3", {**_DENSE, "partial_rotary_factor": 0.5}, ["KVCache"] * 2),
    "deepseek_v2": ("deepseek_v2", {**_MLA, "topk_method": "greedy", "rope_scaling": _YARN}, ["KVCache"] * 2),
    "deepseek_v3": ("deepseek_v3", {**_MLA, "rope_scaling": _YARN}, ["KVCache"] * 2),
    "mamba": (
        "mamba",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "state_size": 8,
            "num_hidden_layers": 2,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
        },
        ["ArraysCache"] * 2,
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DENSE,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [],
            "moe_intermediate_size": 16,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "max_position_embeddings": 4096,
            "head_dim": 16,
        },
        ["ArraysCache"] * 3 + ["KVCache"],
    ),
    "lfm2": (
        "lfm2",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 32,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "intermediate_size": 48,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        ["ArraysCache", "KVCache", "ArraysCache"],
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "attention_bias": False,
            "head_dim": 8,
            "hidden_size": 32,
            "intermediate_size": 48,
            "mamba_d_head": 8,
            "mamba_d_ssm": 32,
            "mamba_d_state": 8,
            "mamba_n_heads": 4,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rope_theta": 10000.0,
            "vocab_size": VOCAB,
        },
        [("ArraysCache", "KVCache")] * 2,
    ),
}


# Values by the names that model files give their arguments; what is not here keeps the file's own default.
_LAYER_TYPES = ["sliding_attention", "full_attention"]
_BY_NAME: dict[str, Any] = {
    name: value
    for names, value in (
        ("hidden_size d_model n_embd model_dim hidden_dim block_dim", 32),
        ("num_hidden_layers n_layers n_layer num_layers num_transformer_layers", 2),
        ("num_attention_heads n_heads n_head num_heads swa_num_attention_heads", 4),
        ("num_key_value_heads n_kv_heads num_kv_heads num_attention_groups swa_num_key_value_heads", 2),
        ("head_dim kv_channels hidden_size_per_head swa_head_dim", 8),
        (
            "intermediate_size ffn_hidden_size n_inner mlp_hidden_size ff_intermediate_size intermediate_size_mlp dense_intermediate_size",
            48,
        ),
        ("moe_intermediate_size expert_ffn_hidden_size moe_hidden_size share_expert_dim shared_intermediate_size", 16),
        ("shared_expert_intermediate_size moe_shared_expert_intermediate_size", 16),
        ("num_experts n_routed_experts num_local_experts moe_num_experts", 4),
        ("num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts", 2),
        ("n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts num_dense_layers first_k_dense_replace", 1),
        ("n_group topk_group num_expert_group moe_layer_freq decoder_sparse_step", 1),
        ("vocab_size num_vocab embedding_size vocab_size_per_layer_input", VOCAB),
        ("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon layernorm_epsilon post_norm_eps", 1e-5),
        ("rope_theta rope_local_base_freq rotary_emb_base swa_rope_theta rope_local_theta", 10000.0),
        ("max_position_embeddings n_positions n_ctx model_max_length block_size", 4096),
        ("sliding_window sliding_window_size window_size attention_window_size attention_chunk_size loop_window_size", WINDOW),
        ("sliding_window_pattern layer_group_size full_attention_interval", 2),
        ("layer_types", _LAYER_TYPES),
        ("kv_lora_rank query_pre_attn_scalar dim_model_base", 16),
        ("q_lora_rank", 24),
        ("qk_rope_head_dim", 8),
        ("qk_nope_head_dim v_head_dim swa_v_head_dim", 12),
        ("rotary_dim", 4),
        ("partial_rotary_factor rotary_pct", 0.5),
        ("attention_bias mlp_bias use_bias bias use_conv_bias conv_bias norm_topk_prob use_expert_bias mamba_proj_bias", False),
        ("tie_word_embeddings use_qk_norm qk_norm post_norm", True),
        ("routed_scaling_factor logits_scaling attention_multiplier embedding_multiplier residual_multiplier", 1.0),
        ("logit_scale output_multiplier scale_depth scale_emb", 1.0),
        ("logits_soft_cap final_logit_softcapping", 30.0),
        ("mlp_only_layers", []),
        ("conv_kernel mamba_d_conv linear_conv_kernel_dim group_norm_size", 4),
        ("conv_L_cache", 3),
        ("mamba_d_head mamba_d_state mamba_head_dim ssm_state_size state_size index_head_dim index_topk", 8),
        ("mamba_n_heads mamba_num_heads time_step_rank", 4),
        ("n_groups mamba_n_groups", 1),
        ("linear_num_value_heads linear_num_key_heads index_n_heads", 2),
        ("linear_key_head_dim", 32),
        ("linear_value_head_dim", 16),
    )
    for name in names.split()
}

# A wrapper's text_config has the arguments of another file, or of another class of its own file.
_TEXT_CONFIG = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n:TextConfig",
    "gemma4": "gemma4_text",
    "kimi_k25": "kimi_k25:TextConfig",
    "kimi_k3": "kimi_k3:TextArgs",
    "kimi_vl": "kimi_vl:TextArgs",
    "lfm2-vl": "lfm2",
    "llama4": "llama4:TextArgs",
    "minimax_m3_vl": "minimax_m3_vl:TextArgs",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5:TextModelArgs",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5:TextModelArgs",
    "qwen3_5_moe": "qwen3_5:TextModelArgs",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_KDA = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 1,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_MISTRAL = {**_YARN, "rope_type": "yarn", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
_THETAS = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(_LAYER_TYPES, (1e4, 1e6), strict=True)}
_ALTUP = {"altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0}
_SHARED_KV = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _LAYER_TYPES * 2, "hidden_size_per_layer_input": 8}
_PACK = {"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}

# What a file needs besides; where it has several attentions, the one that differs most from plain softmax attention.
_BY_MODULE: dict[str, dict[str, Any]] = {
    "afm7": {"num_layers": 3, "num_kv_reuse_layers": 1},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2, "tie_word_embeddings": False},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "greedy"},
    "deepseek_v3": {"rope_scaling": _YARN},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gear": {"attn_logit_softcapping": 50.0},
    "gemma3n:TextConfig": {
        **_SHARED_KV,
        **_ALTUP,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "intermediate_size": [48] * 4,
    },
    "gemma4_text": {**_SHARED_KV, "global_head_dim": 16},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_conv_bias": True},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_expand": 2},
    "kimi_k3:TextArgs": {
        "linear_attn_config": {**_KDA, "gate_lower_bound": -5.0},
        "activation_situ_beta": 4.0,
        "attn_res_block_size": 2,
        "mla_use_output_gate": True,
    },
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2": {
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "layer_types": ["conv", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lille-130m": {"n_embd": 128},
    "llama4:TextArgs": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "num_hidden_layers": 4, "rope_scaling": None},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba2": {"time_step_limit": [0.001, 0.1], "num_heads": 8},
    "mellum": {"rope_parameters": _THETAS},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "minicpm3": {
        "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [1.5] * 4},
    },
    "minimax_m3_vl:TextArgs": {
        "moe_layer_freq": [0, 1],
        "layer_types": ["full_attention", "sparse"],
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "ministral3": {"rope_parameters": _MISTRAL},
    "mistral4": {"rope_parameters": _MISTRAL},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        ],
    },
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": ["M", "*", "-", "E"]},
    "olmo_hybrid": {**_HYBRID, "linear_allow_neg_eigval": True},
    "openelm": {"num_query_heads": [4, 4], "num_kv_heads": [2, 1], "ffn_multipliers": [1.0, 1.5], "ffn_dim_divisor": 8},
    # It writes -inf over the logits of tokens up to 100351, without asking whether there are so many.
    "phi3small": {"vocab_size": 100352, "dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "blocksparse_block_size": 32},
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [_PACK],
        "text_config": {"intermediate_size": 128},
    },
    "qwen3_5:TextModelArgs": {**_HYBRID, "num_experts": 0},
    "qwen3_5_moe": {"text_config": {"num_experts": 4}},
    "recurrent_gemma": {"conv1d_width": 4, "block_types": ["recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "spark2_5": {"rope_parameters": _THETAS},
    "stablelm": {"use_qkv_bias": True},
}

# Files that no tiny model of here runs, and why.
NOT_BUILT = {"muse_spark": "mlx_lm/kernels/qk_norm_rope.py and five more are kernels for Metal alone"}


def model_files() -> list[str]:
    """Names of the files of mlx_lm/models that have a `Model`, as configs name them in model_type."""
    folder = Path(str(importlib.import_module("mlx_lm.models").__path__[0]))
    has_model = re.compile(r"^class Model\(|^from \.\w+ import (.*\W)?Model\b", re.MULTILINE)
    return sorted(path.stem for path in folder.glob("*.py") if has_model.search(path.read_text(encoding="utf-8")))


def build(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random float32 model of `family` (a key of FAMILIES), the same one for the same seed; `overrides` replace config entries."""
    module, config, _ = FAMILIES[family]
    return _build(module, {"model_type": module, **config, **overrides}, seed)


def build_file(module: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random float32 model of a file of mlx_lm/models (one of `model_files`, not of NOT_BUILT); as `build` otherwise."""
    return _build(module, {**file_config(module), **overrides}, seed)


def file_config(name: str) -> dict[str, Any]:
    """The config of `module` or `module:Class`: every argument that _BY_NAME knows, what _BY_MODULE adds, and its text_config."""
    module, _, cls = name.partition(":")
    fields = dataclasses.fields(getattr(_source(module), cls or "ModelArgs"))
    special = _BY_MODULE.get(name, {})
    config = {"model_type": module, **{f.name: _BY_NAME[f.name] for f in fields if f.name in _BY_NAME}, **special}
    if name in _TEXT_CONFIG:
        config["text_config"] = {**file_config(_TEXT_CONFIG[name]), **special.get("text_config", {})}
    return config


def _source(module: str) -> Any:
    """The imported file of mlx_lm/models."""
    if module == "olmo" and importlib.util.find_spec("hf_olmo") is None:
        # It ends the process unless a package can be imported, which it then does not use.
        sys.modules["hf_olmo"] = types.ModuleType("hf_olmo")
        source = importlib.import_module("mlx_lm.models.olmo")
        del sys.modules["hf_olmo"]
        return source
    return importlib.import_module(f"mlx_lm.models.{module}")


def _build(module: str, config: dict[str, Any], seed: int) -> nn.Module:
    source = _source(module)
    if module == "bitnet":
        # Its ternary product is a kernel for Metal alone; what surrounds it is the file's own.
        with patch.object(source, "BitLinear", _plain_linear):
            model = source.Model(source.ModelArgs.from_dict(config))
    else:
        model = source.Model(source.ModelArgs.from_dict(config))
    model.update(tree_unflatten([(name, _random_like(name, weight, seed)) for name, weight in tree_flatten(model.parameters())]))
    mx.eval(model.parameters())
    model.eval()
    return model


def _plain_linear(inputs: int, outputs: int, bias: bool = True, **_: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def _random_like(name: str, weight: mx.array, seed: int) -> mx.array:
    """Drawn from the name, so that no weight stays zero (gates, experts) and the global random state does not matter."""
    key = mx.random.key(seed * 1_000_003 + sum(ord(c) * 131**i % 999_983 for i, c in enumerate(name)))
    if not mx.issubdtype(weight.dtype, mx.floating):  # packed codes
        return mx.random.randint(0, 2**31 - 1, weight.shape, key=key).astype(weight.dtype)
    if weight.ndim >= 2:
        return mx.random.normal(weight.shape, key=key) * weight.shape[-1] ** -0.5
    noise = 0.1 * mx.random.normal(weight.shape, key=key)
    # Linear biases and qwen3_next's A_log are the only vectors that MLX draws; the others start constant.
    return noise if name.endswith(("bias", "A_log")) else weight.astype(mx.float32) + noise


def tokens(count: int, seed: int = 0) -> mx.array:
    """(1, count) random token ids."""
    return mx.random.randint(0, VOCAB, (1, count), key=mx.random.key(seed))
