"""RoPE: descriptions of live modules, and rotations against the float64 oracle."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.deepseek_v2 import DeepseekV2YarnRotaryEmbedding
from mlx_lm.models.hunyuan_v1_dense import DynamicNTKAlphaRoPE
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.models.smollm3 import NoPE

import veloxquant_mlx.transfer.rope as rope
from tests import oracles, tiny_random
from veloxquant_mlx.metal import metal_available
from veloxquant_mlx.metal._crosskv_rope import crosskv_rope_recode, is_available
from veloxquant_mlx.transfer.rope import METHODS, rotate
from veloxquant_mlx.transfer.rope_angles import cos_sin
from veloxquant_mlx.transfer.rope_spec import RopeSpec, UnknownRope, describe_rope

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
POSITIONS = (10, 5_000, 50_000, 131_072, 1_000_000)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = [1.0 + 0.5 * i for i in range(32)]
LONGROPE = {"type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0] * 32, "long_factor": LONG}


def random_keys(*shape: int, dtype: str = "float32", seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(DTYPES[dtype])


def float64(x: mx.array) -> np.ndarray:
    name = str(x.dtype).removeprefix("mlx.core.")
    return oracles.as_float64(np.array(x.view(mx.uint16) if name == "bfloat16" else x), name)


def relative(a: mx.array | np.ndarray, b: mx.array | np.ndarray) -> float:
    a, b = (float64(x) if isinstance(x, mx.array) else x for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# Every kind: (live module, oracle's frequencies, oracle's magnitude, interleaved).
KINDS = {
    "default": (nn.RoPE(64, base=5e5), oracles.default_frequencies(64, 5e5), 1.0, False),
    "default-interleaved": (nn.RoPE(64, traditional=True, base=1e4), oracles.default_frequencies(64, 1e4), 1.0, True),
    "linear": (
        initialize_rope(64, 1e4, False, {"rope_type": "linear", "factor": 4.0}),
        oracles.linear_frequencies(64, 1e4, 4.0),
        1.0,
        False,
    ),
    "mrope": (
        initialize_rope(64, 1e6, False, {"type": "mrope", "mrope_section": [8, 12, 12]}),
        oracles.default_frequencies(64, 1e6),
        1.0,
        False,
    ),
    "llama3": (initialize_rope(64, 5e5, False, LLAMA3), oracles.llama3_frequencies(64, 5e5, 8.0, 1.0, 4.0, 8192), 1.0, False),
    "yarn": (
        initialize_rope(128, 1e6, False, YARN),
        oracles.yarn_frequencies(128, 1e6, 4.0, 32768),
        oracles.yarn_magnitude(4.0),
        False,
    ),
    "yarn-betas": (
        initialize_rope(64, 1e4, True, {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.2}),
        oracles.yarn_frequencies(64, 1e4, 4.0, 32768, 16, 2),
        oracles.yarn_magnitude(4.0, 0.7, 0.2),
        True,
    ),
    "yarn-deepseek_v2": (
        DeepseekV2YarnRotaryEmbedding(64, base=1e4, scaling_factor=40.0, mscale=1.0, mscale_all_dim=0.5),
        oracles.yarn_frequencies(64, 1e4, 40.0, 4096),
        oracles.yarn_magnitude(40.0, 1.0, 0.5),
        True,
    ),
    "longrope": (
        initialize_rope(64, 1e4, False, LONGROPE, max_position_embeddings=131072),
        oracles.longrope_frequencies(64, 1e4, LONG),
        oracles.longrope_magnitude(131072, 4096),
        False,
    ),
    "proportional": (
        initialize_rope(64, 1e6, False, {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}),
        oracles.proportional_frequencies(64, 16, 1e6, 2.0),
        1.0,
        False,
    ),
    "ntk-alpha": (
        DynamicNTKAlphaRoPE(64, base=1e4, scaling_alpha=1000.0),
        oracles.default_frequencies(64, 1e4 * 1000.0 ** (64 / 62)),
        1.0,
        False,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_live_module_is_described_as_published(kind: str) -> None:
    module, frequencies, magnitude, interleaved = KINDS[kind]
    spec = describe_rope(module)
    assert spec.pairing == ("interleaved" if interleaved else "half")
    # The module's periods are float32 powers: a few units in the last place of the exponent's logarithm.
    np.testing.assert_allclose(spec.frequencies, frequencies, rtol=3e-6)
    assert math.isclose(spec.magnitude, magnitude, rel_tol=1e-12)
    assert RopeSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 7, 131_000])
def test_applied_as_the_module_applies_it(kind: str, position: int) -> None:
    """The mlx method uses the module's own float32 angles; only the order of the magnitude differs, one rounding."""
    module = KINDS[kind][0]
    spec = describe_rope(module)
    dim = spec.dims if kind == "yarn-deepseek_v2" else spec.dims + 8  # deepseek_v2's class rotates all it is given
    x = random_keys(1, 2, 5, dim)
    expected = module(x, offset=position)
    got = rotate(x, np.arange(position, position + 5), None, spec, method="mlx")
    assert relative(got, expected) < 2e-7


@pytest.mark.parametrize("kind", KINDS)
def test_exact_application_equals_oracle(kind: str) -> None:
    module, _, magnitude, interleaved = KINDS[kind]
    spec = describe_rope(module)
    x, positions = random_keys(2, 4, spec.dims + 8), np.array([0, 3, 5_000, 131_072])
    # The module's own frequencies: whether they are the published ones is the first test.
    expected = oracles.rotated(float64(x), positions, np.array(spec.frequencies), magnitude=magnitude, interleaved=interleaved)
    got = rotate(x, positions, None, spec, method="exact")
    assert relative(got, expected) < 2e-7
    assert relative(rotate(got, positions, spec, None, method="exact"), x) < 3e-7


def test_yarn_original_length_survives() -> None:
    """A reader that falls back to the default original length gets 26 of these 64 frequencies wrong."""
    described = np.array(describe_rope(KINDS["yarn"][0]).frequencies)
    by_default_length = oracles.yarn_frequencies(128, 1e6, 4.0, 4096)
    assert np.sum(~np.isclose(described, by_default_length, rtol=1e-4)) == 26


def test_nope_rotates_nothing() -> None:
    assert describe_rope(NoPE()) is None


def test_dynamic_ntk_is_refused_by_name() -> None:
    module = initialize_rope(64, 1e4, False, {"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=2048)
    with pytest.raises(UnknownRope, match="DynamicNTKScalingRoPE: its base depends on the length"):
        describe_rope(module)


def test_unknown_class_and_impostor_are_refused() -> None:
    class FancyRotaryEmbedding(nn.Module):
        pass

    class YarnRoPE(nn.Module):
        dims, traditional, mscale = 64, False, 1.0

    with pytest.raises(UnknownRope, match="FancyRotaryEmbedding: this rope class is not known"):
        describe_rope(FancyRotaryEmbedding())
    with pytest.raises(UnknownRope, match="YarnRoPE: has no attribute _freqs"):
        describe_rope(YarnRoPE())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", POSITIONS)
def test_recode_against_float64(position: int, dtype: str) -> None:
    """float32: 2e-7, the tables' and the products' rounding. 16 bit: half an ulp, plus that same 2e-7 of the pair's length."""
    keys, positions = random_keys(2, 8, 128, dtype=dtype), np.arange(position, position + 8)
    before, after = (oracles.default_frequencies(128, base) for base in (1e4, 1e6))
    expected = oracles.rotated(float64(keys), positions, after - before)
    got = float64(rope.recode_rope(keys, positions, 1e4, 1e6))
    if dtype == "float32":
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 2e-7
        return
    pair = np.sqrt(expected[..., :64] ** 2 + expected[..., 64:] ** 2)
    # Half an ulp at the power of two above: a value just below it may round up to it.
    allowed = 0.5 * oracles.ulp(expected * (1 + 1e-6), dtype) + 2e-7 * np.concatenate([pair, pair], axis=-1)
    assert np.all(np.abs(got - expected) <= allowed)


@pytest.mark.parametrize("pairings", [("half", "half"), ("half", "interleaved"), ("interleaved", "half"), ("interleaved", "interleaved")])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", [0, 3])
def test_general_case_against_float64(pairings: tuple[str, str], method: str, first: int) -> None:
    """Theta, scale, position, magnitude and pairing all change at once, on a part of the head."""
    source = RopeSpec("linear", 16, pairings[0], base=1e4, scale=0.5, magnitude=1.2, first=first)
    target = RopeSpec("default", 16, pairings[1], base=1e6, magnitude=0.7, first=first)
    pre = np.random.default_rng(0).normal(size=(2, 6, 21))
    at, to = np.arange(40, 46), np.array([3, 4, 5, 100, 7, 8])

    def cached(spec: RopeSpec, positions: np.ndarray) -> np.ndarray:
        x = np.array(pre)
        if spec.pairing == "interleaved":
            x[..., first : first + 16] = oracles.interleaved_from_half(pre[..., first : first + 16], 16)
        interleaved = spec.pairing == "interleaved"
        w = oracles.default_frequencies(16, spec.base) * spec.scale
        return oracles.rotated(x, positions, w, magnitude=spec.magnitude, interleaved=interleaved, first=first)

    got = rotate(mx.array(cached(source, at)), at, source, target, target_positions=to, method=method)
    # mlx: its float32 angles are off by 1e-7 of up to 100 rad.
    assert relative(got, cached(target, to)) < (3e-7 if method == "exact" else 2e-5)
    rest = [*range(first), *range(first + 16, 21)]
    assert np.array_equal(np.array(got)[..., rest], cached(source, at).astype(np.float32)[..., rest])


def test_pairing_conversion_is_an_exact_permutation_and_an_involution() -> None:
    keys = random_keys(3, 5, 20, dtype="bfloat16").at[0, 0, 0].multiply(-0.0)
    half, interleaved = (RopeSpec("default", 16, pairing, base=1e4) for pairing in ("half", "interleaved"))
    there = rotate(keys, np.arange(5), half, interleaved)
    assert np.array_equal(np.array(there.view(mx.uint16)), oracles.interleaved_from_half(np.array(keys.view(mx.uint16)), 16))
    back = rotate(there, np.arange(5), interleaved, half)
    assert np.array_equal(np.array(back.view(mx.uint16)), np.array(keys.view(mx.uint16)))


@pytest.mark.parametrize("method", METHODS)
def test_magnitude_alone_scales_the_rotated_entries(method: str) -> None:
    keys, spec = random_keys(2, 3, 12), {"kind": "yarn", "dims": 8, "base": 1e4}
    got = rotate(keys, [5, 6, 7], RopeSpec(**spec), RopeSpec(**spec, magnitude=1.5), method=method)
    assert relative(got[..., :8], 1.5 * float64(keys)[..., :8]) < 3e-7
    assert mx.array_equal(got[..., 8:], keys[..., 8:])


thetas = st.floats(1e3, 1e7)
positions_ = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(positions=positions_, theta=thetas, method=st.sampled_from(METHODS), seed=st.integers(0, 1000))
def test_strip_undoes_apply_and_norms_stay(positions: list[int], theta: float, method: str, seed: int) -> None:
    """Two float32 rotations by the same angle, whatever its own error is: 4e-7."""
    spec = RopeSpec("default", 32, base=theta)
    x = random_keys(2, len(positions), 32, seed=seed)
    turned = rotate(x, positions, None, spec, method=method)
    assert relative(rotate(turned, positions, spec, None, method=method), x) < 4e-7
    norms = [np.hypot(a[..., :16], a[..., 16:]) for a in (float64(turned), float64(x))]
    np.testing.assert_allclose(*norms, rtol=4e-7)


@settings(max_examples=60, deadline=None)
@given(positions=positions_, thetas=st.tuples(thetas, thetas), shift=st.integers(-1000, 100_000), method=st.sampled_from(METHODS))
def test_there_and_back_and_one_pass_equals_two(positions: list[int], thetas: tuple[float, float], shift: int, method: str) -> None:
    a, b = (RopeSpec("default", 32, base=theta) for theta in thetas)
    moved = [p + shift for p in positions]
    x = random_keys(2, len(positions), 32)
    there = rotate(x, positions, a, b, target_positions=moved, method=method)
    assert relative(rotate(there, moved, b, a, target_positions=positions, method=method), x) < 6e-7
    two = rotate(rotate(x, positions, a, None, method=method), moved, None, b, method=method)
    assert relative(there, two) < 4e-7
    # And a middle stop anywhere makes no difference: each pass rounds once in float32.
    middle = rotate(rotate(x, positions, a, a, target_positions=moved, method=method), moved, a, b, method=method)
    assert relative(there, middle) < 8e-7


@pytest.mark.parametrize("method", METHODS)
def test_blocks_make_no_difference(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, positions = random_keys(2, 33, 8, dtype="float16"), np.arange(1000, 1033)
    a, b = RopeSpec("default", 8, base=1e4), RopeSpec("default", 8, base=1e6)
    whole = rotate(keys, positions, a, b, method=method)
    monkeypatch.setattr(rope, "BLOCK_VALUES", 2 * 8 * 10)
    assert mx.array_equal(rotate(keys, positions, a, b, method=method), whole)


@pytest.mark.parametrize("method", METHODS)
def test_scattered_positions_equal_one_row_at_a_time(method: str) -> None:
    keys, positions = random_keys(2, 4, 8), [9, 100_000, 3, 3]
    a, b = RopeSpec("default", 8, base=1e4), RopeSpec("default", 8, base=1e6)
    rows = [rotate(keys[:, i : i + 1], [p], a, b, method=method) for i, p in enumerate(positions)]
    assert mx.array_equal(rotate(keys, positions, a, b, method=method), mx.concatenate(rows, axis=1))


@pytest.mark.parametrize("method", METHODS)
def test_small_shapes(method: str) -> None:
    a, b = RopeSpec("default", 4, base=1e4), RopeSpec("default", 4, base=1e6)
    assert rotate(mx.zeros((2, 0, 8)), [], a, b, method=method).shape == (2, 0, 8)
    assert rotate(mx.zeros((0, 3, 8)), [1, 2, 3], a, b, method=method).shape == (0, 3, 8)
    flat, stacked = random_keys(3, 8), random_keys(3, 8)[None, None]
    assert mx.array_equal(rotate(flat, [5, 6, 7], a, b, method=method), rotate(stacked, [5, 6, 7], a, b, method=method)[0, 0])
    unturned = RopeSpec("proportional", 4, periods=(math.inf, math.inf))
    assert mx.array_equal(rotate(flat, [5, 6, 7], None, unturned, method=method), flat)
    negative = rotate(flat, [-3, -2, -1], None, a, method=method)
    assert relative(negative, oracles.rotated(float64(flat), np.array([-3, -2, -1]), oracles.default_frequencies(4, 1e4))) < 1e-6


BAD_ROTATE = {
    "positions too short": ((2, 3, 8), [1], ValueError, r"positions must be \(3,\)"),
    "one position for all": ((2, 3, 8), np.array(1), ValueError, r"positions must be \(3,\)"),
    "positions per head": ((2, 3, 8), np.zeros((2, 3), np.int32), ValueError, r"positions must be \(3,\)"),
    "float positions": ((2, 3, 8), [1.0, 2.0, 3.0], TypeError, "must be integers"),
    "boolean positions": ((2, 3, 8), np.ones(3, bool), TypeError, "must be integers"),
    "dims beyond D": ((2, 3, 6), [1, 2, 3], ValueError, "entries 0 to 8, but keys have D = 6"),
    "one axis": ((8,), [1], ValueError, r"\(\.\.\., S, D\)"),
}


@pytest.mark.parametrize("case", BAD_ROTATE)
def test_bad_arguments(case: str) -> None:
    shape, positions, error, text = BAD_ROTATE[case]
    with pytest.raises(error, match=text):
        rotate(mx.zeros(shape), positions, RopeSpec("default", 8, base=1e4), None)


def test_more_bad_arguments() -> None:
    a = RopeSpec("default", 8, base=1e4)
    with pytest.raises(TypeError, match="float16, bfloat16 or float32"):
        rotate(mx.zeros((1, 2, 8), dtype=mx.int32), [0, 1], a, None)
    with pytest.raises(ValueError, match="pre-RoPE keys cannot agree"):
        rotate(mx.zeros((1, 2, 8)), [0, 1], a, RopeSpec("default", 4, base=1e4))
    with pytest.raises(ValueError, match="method must be one of"):
        rotate(mx.zeros((1, 2, 8)), [0, 1], a, None, method="fast")
    with pytest.raises(ValueError, match=r"\[strip_rope\] keys must be \(\.\.\., S, D\) with D even, but got \(1, 2, 7\)"):
        rope.strip_rope(mx.zeros((1, 2, 7)), [0, 1], 1e4)
    for bad in ({"dims": 7}, {"dims": 0}, {"pairing": "neox"}, {"base": -1.0}, {"base": None}, {"magnitude": 0.0}, {"periods": (1.0,) * 4}):
        with pytest.raises(ValueError, match=r"\[RopeSpec\]"):
            RopeSpec(**{"kind": "default", "dims": 8, "base": 1e4, **bad})


# --- layer-0 keys of a live model --------------------------------------------------------------------------------------------------


def prefill_tolerance(method: str | None, position: int) -> float:
    """mlx: float32 rounding. exact: mlx's own float32 angles, which the prefill has, are off by up to 2e-8 rad a token."""
    return 1e-6 + 2e-8 * position if method == "exact" else 1e-6


class Standing(KVCache):
    """Stands at an offset without rows before it: what layer 0 caches depends on none."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, *args: Any, **kwargs: Any) -> str:
        return "causal"


def layer0_keys(model: nn.Module, ids: mx.array, offset: int = 0) -> mx.array:
    """Keys that a prefill of ids (1, S) from `offset` on caches in layer 0."""
    caches = [Standing() for _ in model.layers]
    for cache in caches:
        cache.offset = offset
    model(ids, cache=caches)
    return caches[0].keys


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("position", [10, 5_000, 50_000, 131_072])
def test_recoded_layer0_equals_a_prefill_with_the_other_theta(position: int, method: str) -> None:
    ids = tiny_random.tokens(24)
    models = [tiny_random.build("llama", rope_theta=theta, hidden_size=256) for theta in (1e4, 1e6)]
    a, b = (layer0_keys(model, ids, position) for model in models)
    source, target = (describe_rope(model.layers[0].self_attn.rope) for model in models)
    got = rotate(a, np.arange(position, position + 24), source, target, method=method)
    assert relative(a, b) > 0.1
    assert relative(got, b) < prefill_tolerance(method, position + 24)
    # The default reproduces this back end's prefill, which exact angles do not at a long position.
    if position == 131_072:
        default = rotate(a, np.arange(position, position + 24), source, target)
        assert relative(default, b) < prefill_tolerance(None, position)
        assert method == "mlx" or relative(got, b) > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_shifted_chunks_equal_a_prefill_of_their_concatenation(method: str) -> None:
    """Fragments stored from position 0 must be turned to where they stand; unturned they would be the same at every offset."""
    model = tiny_random.build("llama-llama3")
    ids = tiny_random.tokens(48)
    caches = make_prompt_cache(model)
    model(ids, cache=caches)
    whole = caches[0].keys_and_values()[0]
    spec, parts = describe_rope(model.layers[0].self_attn.rope), []
    for start in (0, 16, 32):
        caches = make_prompt_cache(model)
        model(ids[:, start : start + 16], cache=caches)
        chunk = caches[0].keys_and_values()[0]
        parts.append(rotate(chunk, np.arange(16), spec, spec, target_positions=np.arange(start, start + 16), method=method))
        assert start == 0 or relative(chunk, whole[:, :, start : start + 16]) > 0.1
    assert relative(mx.concatenate(parts, axis=2), whole) < prefill_tolerance(method, 48)


def test_the_live_module_counts_not_the_config() -> None:
    model = tiny_random.build("llama", rope_theta=1e4)
    model.layers[1].self_attn.rope = nn.RoPE(8, base=7e5)
    assert model.args.rope_theta == 1e4
    assert describe_rope(model.layers[1].self_attn.rope).base == 7e5


# --- the kernel page's function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", POSITIONS)
def test_crosskv_equals_recode_rope_and_oracle(position: int, dtype: str) -> None:
    keys, positions = random_keys(6, 5, 64, dtype=dtype), mx.arange(position, position + 5)
    got = crosskv_rope_recode(keys, positions, 1e4, 5e5)
    assert got.dtype == keys.dtype
    assert mx.array_equal(got, rope.recode_rope(keys, positions, 1e4, 5e5))
    delta = oracles.default_frequencies(64, 5e5) - oracles.default_frequencies(64, 1e4)
    # One rounding to the dtype: at most half its epsilon; float32 has the arithmetic's own 2e-7.
    tolerance = {"float32": 2e-7, "float16": 5e-4, "bfloat16": 4e-3}[dtype]
    assert relative(got, oracles.rotated(float64(keys), np.array(positions), delta)) < tolerance


def test_crosskv_edges_and_errors() -> None:
    keys = random_keys(3, 4, 8)
    assert mx.array_equal(crosskv_rope_recode(keys, mx.arange(4), 1e4, 1e4), keys)
    assert crosskv_rope_recode(keys[:, :0], mx.arange(0), 1e4, 1e6).shape == (3, 0, 8)
    assert is_available() == metal_available() == mx.metal.is_available()
    with pytest.raises(ValueError, match=r"\[crosskv_rope_recode\] keys must be \(BH, N, D\) with D even, but got \(3, 7\)\."):
        crosskv_rope_recode(mx.zeros((3, 7)), mx.arange(3), 1e4, 1e6)
    with pytest.raises(ValueError, match=r"D even, but got \(3, 4, 7\)"):
        crosskv_rope_recode(mx.zeros((3, 4, 7)), mx.arange(4), 1e4, 1e6)
    with pytest.raises(ValueError, match=r"positions must be \(4,\), but got \(1,\)"):
        crosskv_rope_recode(keys, mx.arange(1), 1e4, 1e6)
    with pytest.raises(TypeError, match="positions must be integers"):
        crosskv_rope_recode(keys, mx.arange(4).astype(mx.float32), 1e4, 1e6)
    with pytest.raises(TypeError, match="keys must be float16, bfloat16 or float32"):
        crosskv_rope_recode(keys.astype(mx.int32), mx.arange(4), 1e4, 1e6)
    with pytest.raises(ValueError, match="target_base must be positive"):
        crosskv_rope_recode(keys, mx.arange(4), 1e4, 0.0)


def test_cos_sin_across_pages_is_what_rope_turns_by() -> None:
    """Spans within a page of kept angles, over its edge and over several."""
    for spec in (RopeSpec("default", 16, base=1e4), RopeSpec("yarn", 8, base=500.0, magnitude=1.25)):
        for start, stop in ((0, 1), (5, 4096), (4095, 4097), (4096, 4100), (4000, 12500), (70_000, 70_003)):
            table = cos_sin(spec, start, stop)
            half = spec.dims // 2
            x = mx.concatenate([mx.ones((stop - start, half)), mx.zeros((stop - start, half))], axis=-1)
            wanted = rotate(x[None], np.arange(start, stop), RopeSpec("none", spec.dims, base=1.0, scale=0.0), spec)[0]
            assert table.shape == (stop - start, spec.dims)
            assert mx.array_equal(table, wanted)
