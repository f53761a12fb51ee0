"""Tiny random mlx-lm models: one builder for every family whose cache or RoPE differs. Seeded, float32, 2-4 layers."""

import importlib
from typing import Any

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


def build(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random float32 model of `family` (a key of FAMILIES), the same one for the same seed; `overrides` replace config entries."""
    module, config, _ = FAMILIES[family]
    config = {"model_type": module, **config, **overrides}
    source = importlib.import_module(f"mlx_lm.models.{module}")
    model = source.Model(source.ModelArgs.from_dict(config))
    model.update(tree_unflatten([(name, _random_like(name, weight, seed)) for name, weight in tree_flatten(model.parameters())]))
    mx.eval(model.parameters())
    model.eval()
    return model


def _random_like(name: str, weight: mx.array, seed: int) -> mx.array:
    """Drawn from the name, so that no weight stays zero (gates, experts) and the global random state does not matter."""
    key = mx.random.key(seed * 1_000_003 + sum(ord(c) * 131**i % 999_983 for i, c in enumerate(name)))
    if weight.ndim >= 2:
        return mx.random.normal(weight.shape, key=key) * weight.shape[-1] ** -0.5
    noise = 0.1 * mx.random.normal(weight.shape, key=key)
    # Linear biases and qwen3_next's A_log are the only vectors that MLX draws; the others start constant.
    return noise if name.endswith(("bias", "A_log")) else weight.astype(mx.float32) + noise


def tokens(count: int, seed: int = 0) -> mx.array:
    """(1, count) random token ids."""
    return mx.random.randint(0, VOCAB, (1, count), key=mx.random.key(seed))
