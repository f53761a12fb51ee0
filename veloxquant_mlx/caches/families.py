"""Which layers of a model can attend over codes: what each model file of mlx-lm does with the keys and values that its cache returns.

A cache of codes has `bits`, and its `update_and_fetch` returns handles in place of arrays. `scaled_dot_product_attention` of
mlx_lm/models/base.py hands those of a cache with `bits` to `base.quantized_scaled_dot_product_attention`, whose replacement attends over
codes. That reaches every file that passes on what its cache returned, to that function and with that cache. Other files read or change
keys and values in between; their layers keep mlx-lm's own caches, of decoded arrays. So do layers whose cache is neither a KVCache nor a
RotatingKVCache, and every file that no row of here names: a newer one, or one that comes with a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

Attention = Literal["codes", "decoded", "refused"]

# <rows>
# Written by `python -m tests.families --write` from tiny models of 125 files.
# A comment is the line that failed.
# fmt: off
MLX_LM = "0.32.2"
CODES = frozenset([
    "Klear", "afmoe", "apertus", "bailing_moe", "bailing_moe_linear", "bitnet", "cohere", "cohere2", "dbrx", "deepseek",
    "deepseek_v2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "gemma", "gemma3", "gemma3_text", "glm",
    "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium",
    "hunyuan", "hunyuan_v1_dense", "internlm2", "internlm3", "iquestloopcoder", "jamba", "laguna", "lfm2", "lfm2-vl", "lfm2_moe",
    "lille-130m", "llama", "llama4", "llama4_text", "mellum", "mimo", "mimo_v2_flash", "minicpm", "minicpm3", "minimax",
    "ministral3", "mistral3", "mixtral", "muse_glimmer", "nanbeige", "nanochat", "nemotron", "nemotron-nas", "nemotron_h", "olmo2",
    "olmo3", "olmo_hybrid", "olmoe", "openelm", "phi3", "phimoe", "pixtral", "prism_hadamard_qwen35", "qwen", "qwen2", "qwen2_moe",
    "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "recurrent_gemma",
    "seed_oss", "smollm3", "solar_open", "spark2_5", "starcoder2", "step3p5", "talkie", "telechat3", "youtu_llm"
])
SINKS = frozenset([
    "gpt_oss", "mimo_v2_flash"
])
DECODED = {
    # afm7.py:361 keys, values = cache[-1].keys_and_values() -> AttributeError
    "afm7": "later layers attend to keys and values read from another layer's cache",
    "baichuan_m1": "caches in CacheList",
    # bailing_hybrid.py:295 pe_scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2) -> AttributeError
    "bailing_hybrid": "latent attention: multiplies the cached latent rows and rotated keys itself",
    # bailing_moe_v3.py:247 pe_scores = (q_rope * self.scale) @ k_rope.swapaxes(-1, -2) -> AttributeError
    "bailing_moe_v3": "latent attention: multiplies the cached latent rows and rotated keys itself",
    # deepseek_v3.py:146 pe_scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2) -> AttributeError
    "deepseek_v3": "latent attention: multiplies the cached latent rows and rotated keys itself",
    "deepseek_v32": "caches in CacheList",
    "deepseek_v41": "caches in LayerCache",
    "falcon_h1": "caches in CacheList",
    # gear.py:96 repeats = queries.shape[1] // keys.shape[1] -> AttributeError
    "gear": "its own softmax, over capped scores",
    # gemma2.py:89 keys = mx.expand_dims(keys, 2) -> TypeError
    "gemma2": "its own softmax, over capped scores",
    # gemma3n.py:133 keys, values = cache.keys_and_values() -> AttributeError
    "gemma3n": "later layers attend to keys and values read from another layer's cache",
    # gemma4_text.py:273 output = scaled_dot_product_attention( -> TypeError
    "gemma4": "later layers attend to another layer's keys and values without its cache",
    # gemma4_text.py:273 output = scaled_dot_product_attention( -> TypeError
    "gemma4_text": "later layers attend to another layer's keys and values without its cache",
    # glm4_moe_lite.py:152 pe_scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2) -> AttributeError
    "glm4_moe_lite": "latent attention: multiplies the cached latent rows and rotated keys itself",
    "glm_moe_dsa": "caches in CacheList",
    # deepseek_v3.py:146 pe_scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2) -> AttributeError
    "kimi_k25": "latent attention: multiplies the cached latent rows and rotated keys itself",
    # kimi_k3.py:553 pe_scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2) -> AttributeError
    "kimi_k3": "latent attention: multiplies the cached latent rows and rotated keys itself",
    # kimi_linear.py:210 pe_scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2) -> AttributeError
    "kimi_linear": "latent attention: multiplies the cached latent rows and rotated keys itself",
    # deepseek_v3.py:146 pe_scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2) -> AttributeError
    "kimi_vl": "latent attention: multiplies the cached latent rows and rotated keys itself",
    "longcat_flash": "caches in CacheList",
    "longcat_flash_ngram": "caches in ArraysCache and CacheList",
    "mamba": "caches in ArraysCache",
    "mamba2": "caches in ArraysCache",
    "minimax_m3_vl": "caches in CacheList",
    # mistral4.py:180 k_nope = self.embed_q(kv_latent, transpose=False) -> TypeError
    "mistral4": "latent attention: multiplies the cached latent rows and rotated keys itself",
    "muse_spark": "not measured: mlx_lm/kernels/qk_norm_rope.py and five more are kernels for Metal alone",
    # phi.py:102 ).astype(values.dtype) -> AttributeError
    "phi": "gives its output the dtype of the cached values",
    # phi3small.py:131 keys = mx.expand_dims(keys, 2) -> TypeError
    "phi3small": "its own block-sparse attention",
    # phixtral.py:80 ).astype(values.dtype) -> AttributeError
    "phixtral": "gives its output the dtype of the cached values",
    # plamo.py:93 keys = mx.tile(keys, [1, self.config.n_shared_head, 1, 1]) -> TypeError
    "plamo": "repeats keys and values for the heads that share them",
    # plamo2.py:280 output = mx.fast.scaled_dot_product_attention( -> TypeError
    "plamo2": "calls mx.fast.scaled_dot_product_attention itself",
    # plamo3.py:233 sliding_window_mask = create_attention_mask( -> ValueError
    "plamo3": "prefills with masks that see one row more than its sliding layers keep",
    "rwkv7": "caches in ArraysCache",
    # stablelm.py:120 keys = keys.astype(mx.float32) -> AttributeError
    "stablelm": "turns keys into float32",
}
REFUSED = {
    # olmo.py:93 scores += mask -> ValueError
    "olmo": "adds the mask, the word causal, to its scores: it cannot take two tokens",
}
# fmt: on
# </rows>

# Files of mlx_lm/models that hold parts of layers (projections, experts, rotations, recurrences) and no attention.
PARTS = frozenset(
    ["activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm", "switch_layers"]
)
# Rows of DECODED that do not hold where every module with the attribute has this value: no score is capped, every layer has its own KV.
PLAIN_IF: dict[str, tuple[str, Any]] = {"gear": ("attn_logit_softcapping", None), "gemma4_text": ("has_kv", True)}
_MODELS = "mlx_lm.models."
_LEAVES = ("mlx.nn", "mlx_lm.tuner")  # plain layers, and adapters around them


@dataclass(frozen=True)
class Layer:
    """What one entry of a prompt cache gets.

    Args:
        attention: "codes"; "decoded": mlx-lm's own cache; "refused": mlx-lm itself cannot run the model.
        reason: why not codes; empty for codes.
        files: the model files that the layer's modules come from.
    """

    attention: Attention
    reason: str
    files: frozenset[str]


def family(name: str) -> tuple[Attention, str]:
    """The row of a file of mlx_lm/models: what its attention gets, and why that is not codes."""
    if name in CODES:
        return "codes", ""
    if name in REFUSED:
        return "refused", REFUSED[name]
    return "decoded", DECODED.get(name, f"not known: {name}")


def layers(model: nn.Module, caches: Sequence[Any] | None = None) -> list[Layer]:
    """What each entry of a model's prompt cache gets.

    Args:
        model: a live mlx-lm model.
        caches: its prompt cache; None makes one.

    Returns:
        One `Layer` an entry. Where entries and layers differ in number (some layers have several, or none), every entry gets what all
        layers together get.
    """
    caches = make_prompt_cache(model) if caches is None else caches
    files = [_files(layer) for layer in model.layers]
    plain = _plain(model) if any(names & PLAIN_IF.keys() for names in files) else frozenset()
    if len(files) != len(caches):
        files = [frozenset().union(*files)] * len(caches)
    return [_layer(names, plain, type(cache)) for names, cache in zip(files, caches, strict=True)]


def sink_files(model: nn.Module) -> frozenset[str]:
    """Files of a model's layers that give attention sinks; base's function refuses those, so the file's own name for it is replaced too."""
    return SINKS & frozenset().union(*(_files(layer) for layer in model.layers))


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `module.named_modules()` gives, in any order, in a third of its time: every load asks for the modules of all layers."""
    found: list[tuple[str, nn.Module]] = []
    open_: list[tuple[str, Any]] = [("", module)]
    while open_:
        path, value = open_.pop()
        if isinstance(value, nn.Module):
            found.append((path, value))
        path = f"{path}." if path else ""
        items = value.items() if isinstance(value, dict) else enumerate(value)
        open_ += [(f"{path}{name}", inner) for name, inner in items if isinstance(inner, dict | list)]
    return found


def _layer(files: frozenset[str], plain: frozenset[str], cache: type) -> Layer:
    """The worst row of its files, as one that reads keys or values is enough."""
    rows = [family(name) for name in sorted(files - plain)]
    for kind in ("refused", "decoded"):
        if reasons := [reason for attention, reason in rows if attention == kind]:
            return Layer(kind, "; ".join(dict.fromkeys(reasons)), files)
    if not files:
        return Layer("decoded", "not known: no module of mlx_lm.models", files)
    if cache not in (KVCache, RotatingKVCache):
        return Layer("decoded", f"caches in {cache.__name__}", files)
    return Layer("codes", "", files)


def _files(layer: nn.Module) -> frozenset[str]:
    """The model files of a layer's modules: names under mlx_lm.models, whole module names for others."""
    homes = {type(module).__module__ for _, module in named_modules(layer)}
    return frozenset(home.removeprefix(_MODELS) for home in homes if not home.startswith(_LEAVES)) - PARTS


def _plain(model: nn.Module) -> frozenset[str]:
    """The files of PLAIN_IF whose modules all say that this model does without what its row is for."""
    said: dict[str, list[bool]] = {}
    for _, module in named_modules(model):
        name = type(module).__module__.removeprefix(_MODELS)
        attribute, value = PLAIN_IF.get(name, ("", None))
        if attribute and hasattr(module, attribute):
            said.setdefault(name, []).append(getattr(module, attribute) == value)
    return frozenset(name for name, answers in said.items() if all(answers))
