"""The layer table found by running live models of every family, against what each family's source says."""

import gc
import importlib
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

import kvtool.probe
from formats.errors import IncompatibleError
from kvtool.probe import ArrayProbe, CacheProbe, RoleProbe, probe_model
from tests import tiny_random
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec, UnknownRope, describe_rope

_DENSE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
_LONGROPE = {"type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
_GPT2 = {"n_ctx": 16, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "layer_norm_epsilon": 1e-5, "vocab_size": 97}
_EXAONE4 = {
    **_DENSE,
    "rope_theta": 1e6,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "rope_scaling": None,
    "sliding_window": 16,
    "sliding_window_pattern": "LLLG",
}
_MINICPM3 = {
    **_DENSE,
    "num_key_value_heads": 4,
    "dim_model_base": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "kv_lora_rank": 16,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
    "rope_scaling": _LONGROPE,
}
_GEMMA4 = {
    **_DENSE,
    "num_hidden_layers": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
}
_DEEPSEEK_V32 = {
    **_DENSE,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
_AFM7 = {"vocab_size": 97, "hidden_dim": 32, "num_layers": 3, "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2}


def build(module: str, config: dict[str, Any]) -> nn.Module:
    mx.random.seed(0)
    source = importlib.import_module(f"mlx_lm.models.{module}")
    model = source.Model(source.ModelArgs.from_dict({"model_type": module, **config}))
    mx.eval(model.parameters())
    return model


def ropes(table: tuple[CacheProbe, ...], role: str = "k") -> list[tuple | str | None]:
    """Per layer what matters of its rotation: (kind, dims, pairing, base, first), a problem's text, or None."""
    out: list[tuple | str | None] = []
    for entry in table:
        slot = getattr(entry, role)
        spec = slot.rope if slot else None
        found = (spec.kind, spec.dims, spec.pairing, spec.base, spec.first) if spec else None
        out.append(slot.rope_problem if slot and slot.rope_problem else found)
    return out


def plain(dims: int, base: float, pairing: str = "half") -> tuple:
    return ("default", dims, pairing, base, 0)


# What each family's source says its layers rotate keys by.
KEYS: dict[str, list[tuple | None]] = {
    "llama": [plain(8, 1e4)] * 2,
    "llama-traditional": [plain(8, 1e4, "interleaved")] * 2,
    "llama-llama3": [("llama3", 8, "half", None, 0)] * 2,
    "llama-sliding": [plain(8, 1e4)] * 3,
    "qwen3": [plain(64, 1e6)] * 2,
    "gemma2": [plain(12, 1e4)] * 2,
    "gemma3_text": [plain(16, 1e4), plain(16, 1e6)] * 2,
    "gpt_oss": [("yarn", 8, "half", None, 0)] * 2,
    "cohere2": [plain(8, 5e4, "interleaved")] * 3 + [None],
    "glm4": [plain(8, 1e4, "interleaved")] * 2,
    "llama4": [plain(8, 5e5, "interleaved")] * 3 + [None],
    "phi3": [plain(4, 1e4)] * 2,
    "deepseek_v2": [("yarn", 8, "interleaved", None, 12)] * 2,
    "deepseek_v3": [None] * 2,
    "mamba": [None] * 2,
    "qwen3_next": [None] * 3 + [plain(4, 1e4)],
    "lfm2": [None, plain(8, 1e6), None],
    "falcon_h1": [None] * 2,
}


@pytest.mark.parametrize("family", tiny_random.FAMILIES)
def test_every_family(family: str) -> None:
    model = tiny_random.build(family)
    table = probe_model(model)
    classes = [tuple(m.cls for m in entry.caches) if entry.cls == "CacheList" else entry.cls for entry in table]
    assert classes == tiny_random.FAMILIES[family][2]
    assert ropes(table) == KEYS[family]
    if family != "deepseek_v3":
        assert ropes(table, "v") == [None] * len(table)
    kinds = {"KVCache": "full", "RotatingKVCache": "sliding", "ChunkedKVCache": "chunked", "ArraysCache": "state", "CacheList": "list"}
    for entry in table:
        assert entry.attention == kinds[entry.cls]
        assert entry.window == (tiny_random.WINDOW if entry.attention in ("sliding", "chunked") else None)


def test_shapes_and_parameters() -> None:
    table = probe_model(tiny_random.build("gpt_oss"))
    assert table[0].params == {"max_size": 16, "keep": 0}
    assert table[0].k == RoleProbe(2, 8, mx.float32, table[0].k.rope)
    assert np.isclose(table[0].k.rope.magnitude, 0.1 * np.log(4) + 1)
    assert probe_model(tiny_random.build("llama4"))[0].params == {"chunk_size": 16}
    members = probe_model(tiny_random.build("falcon_h1"))[0].caches
    assert members[0].arrays == (ArrayProbe((3, 48), mx.float32), ArrayProbe((4, 8, 8), mx.float32))
    assert members[1].k.rope == RopeSpec("default", 8, base=1e4)


def test_mla_rotates_the_value_slot() -> None:
    """deepseek_v3 caches (latent, rotated part): K is unrotated, V carries the RoPE; deepseek_v2 rotates the tail of its full keys."""
    table = probe_model(tiny_random.build("deepseek_v3"))
    assert (table[0].k.heads, table[0].k.dim, table[0].v.heads, table[0].v.dim) == (1, 16, 1, 8)
    assert ropes(table, "v") == [("yarn", 8, "interleaved", None, 0)] * 2
    members = probe_model(build("deepseek_v32", _DEEPSEEK_V32))[0].caches
    assert ropes(members) == [None, plain(8, 1e4)]  # latent; the indexer's keys
    assert ropes(members, "v")[0] == plain(8, 1e4, "interleaved")


NEGATED = ("negated", 8, "half", None, 0)
MORE = {
    "smollm3": (_DENSE, [plain(8, 1e4)] * 3 + [None]),
    "exaone4": (_EXAONE4, [plain(8, 1e6)] * 3 + [None]),
    "nanochat": ({**_DENSE, "num_hidden_layers": 2}, [NEGATED] * 2),
    "talkie": ({**_DENSE, "num_hidden_layers": 2, "head_dim": 8}, [NEGATED] * 2),
    "minicpm3": (_MINICPM3, [("longrope", 8, "half", None, 4)] * 4),
    "gemma4_text": (_GEMMA4, [plain(8, 1e4), ("proportional", 16, "half", None, 0)] * 2),
    "hunyuan_v1_dense": (
        {**_DENSE, "num_hidden_layers": 1, "rope_scaling": {"alpha": 10.0, "factor": 1.0, "type": "dynamic"}},
        [("ntk-alpha", 8, "half", None, 0)],
    ),
    "phi3": (
        {**_DENSE, "num_hidden_layers": 1, "original_max_position_embeddings": 64, "rope_scaling": _LONGROPE},
        [("longrope", 8, "half", None, 0)],
    ),
}


@pytest.mark.parametrize("family", MORE)
def test_more_families(family: str) -> None:
    config, expected = MORE[family]
    assert ropes(probe_model(build(family, config))) == expected


def test_scaled_llamas() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    table = probe_model(tiny_random.build("llama", rope_scaling=yarn))
    assert ropes(table) == [("yarn", 8, "half", None, 0)] * 2
    assert np.isclose(table[0].k.rope.magnitude, 0.1 * np.log(4) + 1)
    linear = probe_model(tiny_random.build("llama", rope_scaling={"rope_type": "linear", "factor": 4.0}))
    assert linear[0].k.rope == RopeSpec("linear", 8, base=1e4, scale=0.25)


def test_rows_of_a_prefill_are_what_the_table_says() -> None:
    """The rotation found with one token turns a whole prefill's keys to another offset."""
    for family in ("gemma3_text", "glm4", "cohere2", "deepseek_v2"):
        model, ids = tiny_random.build(family), tiny_random.tokens(12)
        spec = probe_model(model)[0].k.rope
        at = {}
        for offset in (0, 700):
            caches = make_prompt_cache(model)
            for cache in caches:
                kvtool.probe._arm(cache, offset, "layer")
            model(ids, cache=caches)
            at[offset] = caches[0].rows[0][0]
        moved = rotate(at[0], np.arange(12), spec, spec, target_positions=np.arange(700, 712), method="mlx")
        assert mx.allclose(moved, at[700], atol=1e-5).item(), family
        assert not mx.allclose(at[0], at[700], atol=0.1).item(), family


# --- what cannot be described ------------------------------------------------------------------------------------------------------


def test_dynamic_ntk_is_a_problem_by_name() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    for model in (
        tiny_random.build("llama", rope_scaling=scaling, max_position_embeddings=64),
        build("internlm3", {**_DENSE, "rope_scaling": scaling}),
    ):
        for entry in probe_model(model):
            assert entry.k.rope is None
            assert entry.k.rope_problem.startswith("DynamicNTKScalingRoPE: its base depends on the length")
            assert entry.v.rope_problem is None


def test_learned_positions_are_a_problem() -> None:
    """And their table of 16 positions is never read beyond its end."""
    for entry in probe_model(build("gpt2", _GPT2)):
        assert "learned position embeddings" in entry.k.rope_problem
        assert "learned position embeddings" in entry.v.rope_problem


def test_rounding_after_the_rotation_is_a_problem() -> None:
    """afm7 rounds its keys to 8 bits (here to whole numbers) after RoPE: another rotation would not give what the model caches."""
    table = probe_model(build("afm7", _AFM7))
    assert len(table) == 2  # the third layer reuses the second's rows
    assert "no rope module of the model predicts the rows; the closest, RopeSpec(" in table[0].k.rope_problem


def test_rotation_without_a_module_is_a_problem() -> None:
    class Inline(nn.Module):
        def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
            return mx.fast.rope(x, 8, traditional=False, base=123.0, scale=1.0, offset=offset)

    model = tiny_random.build("llama")
    for layer in model.layers:
        layer.self_attn.rope = Inline()
    assert probe_model(model)[0].k.rope_problem == "the rows turn with the position, but the model has no rope module"


def test_zero_keys_are_a_problem() -> None:
    model = tiny_random.build("llama")
    model.layers[1].self_attn.k_proj.weight *= 0
    table = probe_model(model)
    assert table[0].k.rope is not None
    assert "zeros" in table[1].k.rope_problem


def test_unprobable_models_are_refused_with_layer_and_class() -> None:
    class Odd:
        offset = 0

    class OddModel(nn.Module):
        layers = ()

        def make_cache(self) -> list[Any]:
            return [KVCache(), Odd()]

    with pytest.raises(IncompatibleError, match="layer 1: cache class Odd is not known"):
        probe_model(OddModel())

    class Broken(nn.Module):
        layers = (1, 2)

        def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
            raise ValueError("no such luck")

    with pytest.raises(
        IncompatibleError, match=r"Broken cannot be probed: one token at position 0 with caches of KVCache raised ValueError"
    ):
        probe_model(Broken())

    class Twice(nn.Module):
        layers = (1,)

        def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
            for _ in range(2):
                cache[0].update_and_fetch(mx.zeros((2, 1, 1, 4)), mx.zeros((2, 1, 1, 4)))
            return ids

    with pytest.raises(IncompatibleError, match="layer 0: one token updates this KVCache 2 and 2 times"):
        probe_model(Twice())


# --- sharpness -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_close_thetas_are_told_apart(dtype: mx.Dtype) -> None:
    """A rope that reports 10000 while it turns by 10001 is found out; so is one pair of eight that turns differently."""

    class RoPE(nn.Module):
        dims, traditional, base, scale = 8, False, 1e4, 1.0

        def __init__(self, base: float) -> None:
            super().__init__()
            self.true_base = base

        def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
            return mx.fast.rope(x, 8, traditional=False, base=self.true_base, scale=1.0, offset=offset)

    model = tiny_random.build("llama")
    model.set_dtype(dtype)
    for base, honest in ((1e4, True), (10001.0, False), (9999.0, False)):
        for layer in model.layers:
            layer.self_attn.rope = RoPE(base)
        for entry in probe_model(model):
            assert (entry.k.rope is not None) == honest
            assert entry.k.dtype == dtype


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("family", ["gemma3_text", "glm4", "cohere2", "llama-llama3"])
def test_sixteen_bit_models(family: str, dtype: mx.Dtype) -> None:
    model = tiny_random.build(family)
    expected = ropes(probe_model(model)), ropes(probe_model(model), "v")
    model.set_dtype(dtype)
    assert (ropes(probe_model(model)), ropes(probe_model(model), "v")) == expected


def test_noise_of_the_hidden_states_is_allowed_for() -> None:
    """Attention sinks make the hidden states differ by rounding (gpt_oss); the unrotated slot says by how much."""
    spec, other = RopeSpec("default", 8, base=1e4), RopeSpec("default", 8, base=10001.0)
    mx.random.seed(1)
    near = mx.random.normal((2, 2, 1, 8))
    noise = 0.01 * mx.random.normal(near.shape)
    far = kvtool.probe._turned(near + noise, kvtool.probe.FAR, spec)
    both = kvtool.probe._Candidates((other, spec), ())
    measured = kvtool.probe._difference(near, near + noise)
    assert kvtool.probe._role_probe(near, far, kvtool.probe.FAR, measured, (both,)).rope == spec
    assert kvtool.probe._role_probe(near, near + noise, kvtool.probe.FAR, measured, (both,)).rope is None
    assert kvtool.probe._role_probe(near, far, kvtool.probe.FAR, 0.0, (both,)).rope_problem is not None


# --- the model is left alone, and the memory of it is right ------------------------------------------------------------------------


def test_model_is_left_as_it_was() -> None:
    model, ids = tiny_random.build("gemma3_text"), tiny_random.tokens(20)
    before, modules = model(ids), [(path, type(m), dict(vars(m))) for path, m in model.named_modules()]
    weights = dict(tree_flatten(model.parameters()))
    probe_model(model)
    assert mx.array_equal(model(ids), before)
    assert [(path, type(m), dict(vars(m))) for path, m in model.named_modules()] == modules
    assert all(weights[name] is array for name, array in tree_flatten(model.parameters()))
    assert {type(cache) for cache in make_prompt_cache(model)} == {KVCache, RotatingKVCache}
    assert KVCache.update_and_fetch.__qualname__ == "KVCache.update_and_fetch"


def test_table_is_kept_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_random.build("llama4")
    table = probe_model(model)
    calls = []
    forward = kvtool.probe._forward
    monkeypatch.setattr(kvtool.probe, "_forward", lambda *args: calls.append(args) or forward(*args))
    assert probe_model(model) is table
    assert not calls

    attention = model.layers[0].self_attn
    attention.rope = nn.RoPE(8, traditional=True, base=1e6)
    assert ropes(probe_model(model))[0] == plain(8, 1e6, "interleaved")
    attention.rope.base = 2e6  # the same module with another value
    assert ropes(probe_model(model))[0] == plain(8, 2e6, "interleaved")
    attention.use_rope = False
    assert ropes(probe_model(model))[0] is None
    make_cache = model.make_cache
    model.make_cache = lambda: [ChunkedKVCache(32), *make_cache()[1:]]
    assert [entry.window for entry in probe_model(model)] == [32, 16, 16, None]
    assert len(calls) == 2 * 4


def test_other_period_values_in_the_same_module_are_seen() -> None:
    model = tiny_random.build("llama-llama3")
    first = probe_model(model)[0].k.rope
    rope = model.layers[0].self_attn.rope
    rope._freqs = rope._freqs * 2
    assert probe_model(model)[0].k.rope.periods == tuple(2 * p for p in first.periods)


def test_the_models_config_does_not_count() -> None:
    model = tiny_random.build("llama", rope_theta=1e4)
    model.args.rope_theta = 5e5
    assert ropes(probe_model(model)) == [plain(8, 1e4)] * 2


def test_memory_does_not_keep_the_model_alive() -> None:
    model = tiny_random.build("llama")
    probe_model(model)
    key, ref = id(model), weakref.ref(model)
    assert key in kvtool.probe._MEMO
    del model
    gc.collect()
    assert ref() is None
    assert key not in kvtool.probe._MEMO


def test_unknown_rope_beside_a_known_one_does_not_hide_it() -> None:
    class VisionRotaryEmbedding(nn.Module):
        pass

    model = tiny_random.build("llama")
    model.vision = VisionRotaryEmbedding()
    with pytest.raises(UnknownRope):
        describe_rope(model.vision)
    assert ropes(probe_model(model)) == [plain(8, 1e4)] * 2
