"""Recode: keys turned for another theta, position, pairing or model; what is stored before RoPE is copied byte for byte."""

import os
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import RotatingKVCache

import kvtool
from formats.container import TensorPlan, open_container, write_container
from formats.errors import IncompatibleError
from formats.manifest import CacheInfo, CodecInfo, Manifest, ModelInfo, Role, Segment
from kvtool.encoding import Positions
from kvtool.model import LoadedModel
from kvtool.states import CacheState
from tests.library import digests, f64, fill, ids, loaded, renamed, run, saved, tiny, twin
from tests.tiny_random import WINDOW, build
from veloxquant_mlx.transfer.rope_spec import RopeSpec

COUNT = 24
GO_ON = (1, 3, 1, 2)
CODES = "rvq-2+2"
LOSSY = f"{CODES},sink=0,recent=0"


def states_of(path: Path) -> list[CacheState]:
    with kvtool.open(path) as archive:
        return [archive.state(i) for i in range(len(archive.manifest.layers))]


def layers_of(path: Path) -> tuple[CacheInfo, ...]:
    with open_container(path) as reader:
        return reader.manifest.layers


def turned(keys: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Half-split rotation in float64: keys (H, S, D) by positions (S,) times frequencies (D/2,)."""
    angles = positions[:, None] * frequencies
    a, b = np.split(keys, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1)


def theta(base: float, dim: int = 8) -> np.ndarray:
    return base ** (-np.arange(0, dim, 2) / dim)


def close(a: Any, b: Any, atol: float) -> bool:
    a, b = (x if isinstance(x, np.ndarray) else f64(x) for x in (a, b))
    return a.shape == b.shape and bool(np.abs(a - b).max(initial=0.0) <= atol)


# --- theta -------------------------------------------------------------------------------------------------------------------------


def test_theta_turns_keys_and_leaves_values(tmp_path: Path) -> None:
    model = tiny("llama")
    saved(model, tmp_path / "a.kv", COUNT)
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", rope_theta=300000.0)
    positions = np.arange(COUNT)
    for before, after in zip(states_of(tmp_path / "a.kv"), states_of(tmp_path / "b.kv"), strict=True):
        expected = turned(f64(before.k), positions, theta(300000.0) - theta(10000.0))
        assert close(after.k, expected, 2e-6)  # float32 arithmetic on values of size 4
        assert not close(before.k, after.k, 0.1)
        assert mx.array_equal(before.v, after.v).item()
    assert report.quality["header_only"] == ["0.v", "1.v"] and report.quality["reencoded"] == ["0.k", "1.k"]
    assert report.codec == "as stored" and report.file_bytes == os.stat(tmp_path / "b.kv").st_size
    with pytest.raises(IncompatibleError, match=r"base: file 300000\.0, model 10000\.0"):
        kvtool.load(tmp_path / "b.kv", model)
    kvtool.recode(tmp_path / "b.kv", tmp_path / "c.kv", rope_theta=10000.0)
    for before, after in zip(states_of(tmp_path / "a.kv"), states_of(tmp_path / "c.kv"), strict=True):
        assert close(before.k, after.k, 2e-6)


def test_theta_alone_does_not_say_what_periods_become(tmp_path: Path) -> None:
    for family in ("llama-llama3", "gpt_oss", "deepseek_v2"):
        saved(tiny(family), tmp_path / "a.kv", COUNT)
        with pytest.raises(IncompatibleError, match=r"given by its periods") as caught:
            kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", rope_theta=5e5)
        assert caught.value.exit_code == 5 and "--to-model" in caught.value.hint
    assert os.listdir(tmp_path) == ["a.kv"]


def test_one_theta_cannot_stand_for_two(tmp_path: Path) -> None:
    saved(tiny("gemma3_text"), tmp_path / "a.kv", COUNT)
    with pytest.raises(IncompatibleError, match=r"2 RoPE bases \(10000, 1e\+06\)") as caught:
        kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", rope_theta=5e5)
    assert "--to-model" in caught.value.hint and not (tmp_path / "b.kv").exists()


# --- shift ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", f"{LOSSY},frame=pre", f"{LOSSY},frame=post", f"{CODES},frame=pre,sink=2,recent=3"])
@pytest.mark.parametrize(
    "family", ["llama", "llama-sliding", "gemma3_text", "cohere2", "glm4", "llama4", "deepseek_v2", "qwen3_next", "falcon_h1"]
)
def test_shift_there_and_back(family: str, codec: str, tmp_path: Path) -> None:
    model = tiny(family)
    saved(model, tmp_path / "a.kv", 40, codec=codec)
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=1000)
    with pytest.raises(IncompatibleError, match="begins at position") as caught:
        kvtool.load(tmp_path / "b.kv", model)
    assert "--shift -1000" in caught.value.hint
    kvtool.recode(tmp_path / "b.kv", tmp_path / "c.kv", shift=-1000)
    restored = kvtool.load(tmp_path / "c.kv", model)
    assert restored.usable == layers_of(tmp_path / "a.kv")[-1].offset or family == "falcon_h1"
    # Raw float32 rows, and rows kept exact in float16, are turned twice with one rounding each; post rows pass the codec twice more.
    tolerance = 1.5 if "post" in codec else 5e-3 if "sink=2" in codec else 5e-6
    for before, after in zip(leaf_states(tmp_path / "a.kv"), leaf_states(tmp_path / "c.kv"), strict=True):
        assert before.positions == after.positions and before.offset == after.offset and before.params == after.params
        for x, y in ((before.k, after.k), (before.v, after.v), *zip(before.arrays, after.arrays, strict=True)):
            assert (x is None) == (y is None) and (x is None or close(x, y, tolerance))


def leaf_states(path: Path) -> list[CacheState]:
    return [leaf for state in states_of(path) for leaf in (state.caches or (state,))]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "glm4"])
def test_a_shift_is_what_a_longer_prompt_would_have_cached(family: str, tmp_path: Path) -> None:
    # Layer 0 sees the embeddings alone, so its keys at positions 9.. are those of any prompt with the same tokens there.
    model, tokens = tiny(family), ids(12)
    kvtool.save(kvtool.capture(model, tokens), tmp_path / "a.kv")
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=9)
    longer = fill(model, [*ids(9, seed=8), *tokens])
    moved = states_of(tmp_path / "b.kv")[0]
    assert moved.positions == ((9, 21),) and moved.offset == 21
    if family != "gemma3_text":
        assert close(moved.k, longer[0].keys[0, :, 9:21], 5e-6)
    else:
        # 21 tokens in a ring of 16: rows 6 to 20 are left, in a ring.
        live = kvtool.capture(model, cache=longer).states[0]
        assert live.positions == ((6, 21),) and close(moved.k, live.k[:, 3:], 5e-6)


def test_no_layer_moves_below_zero(tmp_path: Path) -> None:
    model = tiny("gemma3_text")
    saved(model, tmp_path / "a.kv", 40)
    with pytest.raises(IncompatibleError, match="begins at position 0, so a shift by -1 ends below 0"):
        kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=-1)
    assert os.listdir(tmp_path) == ["a.kv"]


# --- rows of a frame ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"shift": 5}, {"rope_theta": 5e5}, {"rope_theta": 5e5, "shift": 77}])
def test_pre_rope_rows_are_copied_byte_for_byte(options: dict[str, Any], tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv", COUNT, codec=LOSSY, frame="pre")
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", **options)
    assert digests(tmp_path / "a.kv") == digests(tmp_path / "b.kv")
    assert report.quality["reencoded"] == [] and report.quality["header_only"] == ["0.k", "0.v", "1.k", "1.v"]
    assert not any("error" in key for key in report.quality)
    keep, base = options.get("shift", 0), options.get("rope_theta", 10000.0)
    for before, after in zip(states_of(tmp_path / "a.kv"), states_of(tmp_path / "b.kv"), strict=True):
        stripped = turned(f64(before.k), np.arange(COUNT), -theta(10000.0))
        assert close(after.k, turned(stripped, keep + np.arange(COUNT), theta(base)), 5e-6)


def test_rows_as_cached_are_encoded_again_with_their_error(tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv", COUNT, codec=LOSSY, frame="post")
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=5)
    old, new = digests(tmp_path / "a.kv"), digests(tmp_path / "b.kv")
    assert old.keys() == new.keys()
    assert {n for n in old if old[n] != new[n]} == {n for n in old if ".k." in n} and {n for n in old if old[n] == new[n]} == {
        n for n in old if ".v." in n
    }
    error = energy = 0.0
    for before, after in zip(states_of(tmp_path / "a.kv"), states_of(tmp_path / "b.kv"), strict=True):
        moved = turned(f64(before.k), np.full(COUNT, 5), theta(10000.0))
        error, energy = error + ((moved - f64(after.k)) ** 2).sum(), energy + (moved**2).sum()
    assert report.quality["k_relative_error"] == pytest.approx(error / energy, rel=1e-3) and report.quality["k_relative_error"] > 1e-4
    assert "v_relative_error" not in report.quality
    with open_container(tmp_path / "b.kv") as reader:
        assert [q["step"] for q in reader.manifest.quality] == ["encode", "recode"] and reader.manifest.quality[1] == report.quality


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exact_rows_are_turned_with_one_rounding(dtype: str, tmp_path: Path) -> None:
    model = tiny("llama", dtype)
    saved(model, tmp_path / "a.kv", COUNT, codec=LOSSY, frame="pre", sink=4, recent=6)
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=3)
    assert report.quality["partly"] == report.quality["reencoded"] == ["0.k", "1.k"] and report.quality["header_only"] == ["0.v", "1.v"]
    kept = "bfloat16" if dtype == "bfloat16" else "float16"
    for before, after in zip(states_of(tmp_path / "a.kv"), states_of(tmp_path / "b.kv"), strict=True):
        expected = turned(f64(before.k), np.full(COUNT, 3), theta(10000.0))
        # Half a unit in the last place of the stored dtype, and 2 % for float32 arithmetic before it.
        ulp = 2.0 ** (np.floor(np.log2(np.abs(expected))) - (7 if kept == "bfloat16" else 10))
        off = np.abs(f64(after.k) - expected)
        rows = np.r_[0:4, 18:24]
        assert (off[:, rows] <= 0.51 * ulp[:, rows] + 1e-6).all()
        assert mx.array_equal(before.v, after.v).item()


# --- to a model ----------------------------------------------------------------------------------------------------------------------


def interleaved_twin(source: nn.Module) -> LoadedModel:
    """The llama with its query and key rows reordered for interleaved pairs: the same function, keys cached in another order."""
    model = build("llama", rope_traditional=True)
    heads = {"q_proj": 4, "k_proj": 2}

    def reorder(name: str, weight: mx.array) -> mx.array:
        projection = name.split(".")[-2]
        if projection not in heads:
            return weight
        halves = weight.reshape(heads[projection], 2, 4, -1)
        return halves.transpose(0, 2, 1, 3).reshape(weight.shape)

    model.update(tree_unflatten([(n, reorder(n, w)) for n, w in tree_flatten(source.parameters())]))
    mx.eval(model.parameters())
    return loaded(model, "interleaved")


@pytest.mark.parametrize(("codec", "frame"), [("raw", None), ("rvq-4+4,sink=0,recent=0", "pre"), ("rvq-4+4,sink=0,recent=0", "post")])
def test_pairing_twins_exchange_caches(codec: str, frame: str | None, tmp_path: Path) -> None:
    half = tiny("llama")
    other = interleaved_twin(half.model)
    tokens, more = ids(COUNT), ids(sum(GO_ON), 5)
    for source, target in ((half, other), (other, half)):
        kvtool.save(kvtool.capture(source, tokens), tmp_path / "a.kv", codec=codec, frame=frame)
        with pytest.raises(IncompatibleError, match="pairing"):
            kvtool.load(tmp_path / "a.kv", target, allow_mismatch=True)
        report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=target)
        # Before RoPE the rotary entries have one order whatever the pairing, so nothing but the header changes there.
        again = [] if frame == "pre" else ["0.k", "1.k"]
        assert report.quality["reencoded"] == again and report.quality["header_only"] == sorted({"0.k", "0.v", "1.k", "1.v"} - set(again))
        assert (report.quality["from"], report.quality["to"]) == (source.info.name, target.info.name)
        got = run(target, kvtool.load(tmp_path / "b.kv", target).cache, more, GO_ON)
        expected = run(target, fill(target, tokens), more, GO_ON)
        # Raw: float32 rounding. Eight bits, twice: 1e-2 of keys of size 1.
        atol = 1e-5 if codec == "raw" else 0.1
        assert all(close(a, b, atol) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"rope_theta": 500000.0}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama-llama3", {"rope_theta": 10000.0}),
        ("qwen3", {"rope_theta": 10000.0}),
        ("deepseek_v3", {"rope_theta": 100.0}),
    ],
)
@pytest.mark.parametrize("codec", ["raw", "rvq-4+4,frame=pre,sink=0,recent=0"])
def test_theta_twins_of_one_layer_exchange_caches(family: str, overrides: dict, codec: str, tmp_path: Path) -> None:
    # With one layer every key comes from the embeddings alone, so that the recoded cache is the target's own.
    one = {"num_hidden_layers": 1}
    source, target = twin(family, "source", **one), twin(family, "target", **one, **overrides)
    tokens, more = ids(COUNT), ids(sum(GO_ON), 5)
    kvtool.save(kvtool.capture(source, tokens), tmp_path / "a.kv", codec=codec)
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=target)
    restored = kvtool.load(tmp_path / "b.kv", target)
    assert restored.usable == COUNT and report.quality["same_weights"] is True
    got, expected = run(target, restored.cache, more, GO_ON), run(target, fill(target, tokens), more, GO_ON)
    own = run(source, fill(source, tokens), more, GO_ON)
    if codec == "raw":
        assert all(close(a, b, 1e-5) for a, b in zip(got, expected, strict=True))
        assert not all(close(a, b, 1e-3) for a, b in zip(own, expected, strict=True))
    else:
        assert report.quality["reencoded"] == [] and digests(tmp_path / "a.kv") == digests(tmp_path / "b.kv")
        # States, not logits: a router may send a token elsewhere. Eight bits: 1e-2 of keys of size 1, at most 0.05.
        own_states = kvtool.capture(target, tokens).states
        for mine, theirs in zip(states_of(tmp_path / "b.kv"), own_states, strict=True):
            assert close(mine.k, theirs.k, 0.1) and close(mine.v, theirs.v, 0.1)


def test_two_thetas_go_to_their_own_layers(tmp_path: Path) -> None:
    source = tiny("gemma3_text")
    target = twin("gemma3_text", "target", rope_theta=2e6, rope_local_base_freq=777.0)
    tokens = ids(40)
    kvtool.save(kvtool.capture(source, tokens), tmp_path / "a.kv")
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=target)
    with open_container(tmp_path / "b.kv") as reader:
        bases = [reader.manifest.ropes[layer.k.rope]["base"] for layer in reader.manifest.layers]
    assert bases == [777.0, 2e6, 777.0, 2e6]
    own, moved = kvtool.capture(target, tokens).states, states_of(tmp_path / "b.kv")
    assert close(moved[0].k, own[0].k, 5e-6) and kvtool.load(tmp_path / "b.kv", target).usable == 39
    # A layer of the second theta: its rotation undone on both sides is the same, since the keys before RoPE were not touched.
    before = states_of(tmp_path / "a.kv")[1]
    expected = turned(f64(before.k), np.arange(39), theta(2e6, 16) - theta(1e6, 16))
    assert close(moved[1].k, expected, 5e-6)


def test_mla_turns_the_slot_that_is_rotated(tmp_path: Path) -> None:
    saved(tiny("deepseek_v2"), tmp_path / "a.kv", COUNT)
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=11)
    for before, after, info in zip(states_of(tmp_path / "a.kv"), states_of(tmp_path / "b.kv"), layers_of(tmp_path / "a.kv"), strict=True):
        moved = [name for name in "kv" if not mx.array_equal(getattr(before, name), getattr(after, name)).item()]
        assert moved == [name for name in "kv" if getattr(info, name).rope is not None] and len(moved) == 1
        norms = [np.linalg.norm(f64(getattr(s, moved[0]))) for s in (before, after)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_layers_without_rope_and_states_are_copied(tmp_path: Path) -> None:
    for family, still in (("cohere2", ["3.k.0.data"]), ("llama4", ["3.k.0.data"]), ("qwen3_next", ["0.state.0", "0.state.1"])):
        saved(tiny(family), tmp_path / "a.kv", 30)
        kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=4)
        old, new = digests(tmp_path / "a.kv"), digests(tmp_path / "b.kv")
        assert all(old[name] == new[name] for name in still) and old.keys() == new.keys() and old != new


def test_mlx_quantised_keys_turn_into_plain_ones(tmp_path: Path) -> None:
    model, tokens, more = tiny("qwen3"), ids(COUNT), ids(sum(GO_ON), 5)
    cache = [c.to_quantized(group_size=64, bits=8) for c in fill(model, tokens)]
    kvtool.save(kvtool.capture(model, cache=cache, tokens=tokens), tmp_path / "a.kv")
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=6)
    kvtool.recode(tmp_path / "b.kv", tmp_path / "c.kv", shift=-6)
    restored = kvtool.load(tmp_path / "c.kv", model)
    assert {type(c).__name__ for c in restored.cache} == {"KVCache"}
    got, expected = run(model, restored.cache, more, GO_ON), run(model, cache, more, GO_ON)
    # The same 8-bit values, without the quantisation of what follows.
    assert all(close(a, b, 0.05) for a, b in zip(got, expected, strict=True))
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "d.kv", codec=LOSSY)
    assert report.requantised == ("0.k", "0.v", "1.k", "1.v") and kvtool.load(tmp_path / "d.kv", model).usable == COUNT


# --- codec -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", [LOSSY, CODES, "rabitq,recent=0", f"{CODES},sink=4,recent=7", "k=raw,v=rvq-4,recent=2", f"{LOSSY},frame=post", "raw"]
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "falcon_h1"])
def test_transcoding_is_a_direct_save(family: str, codec: str, tmp_path: Path) -> None:
    model = tiny(family)
    saved(model, tmp_path / "raw.kv", 30)
    direct = kvtool.save(kvtool.capture(model, ids(30)), tmp_path / "direct.kv", codec=codec)
    report = kvtool.recode(tmp_path / "raw.kv", tmp_path / "recoded.kv", codec=codec)
    assert digests(tmp_path / "direct.kv") == digests(tmp_path / "recoded.kv")
    assert layers_of(tmp_path / "direct.kv") == layers_of(tmp_path / "recoded.kv")
    assert report.codec == direct.codec and report.kept_raw == direct.kept_raw and report.fp16_bytes == direct.fp16_bytes
    for name in ("k_relative_error", "v_relative_error", "k_by_layer", "v_by_layer"):
        assert report.quality.get(name) == (direct.quality or {}).get(name)


def test_codec_and_shift_in_one_step(tmp_path: Path) -> None:
    model = tiny("llama")
    saved(model, tmp_path / "a.kv", COUNT)
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=50)
    kvtool.recode(tmp_path / "b.kv", tmp_path / "two.kv", codec=LOSSY)
    kvtool.recode(tmp_path / "a.kv", tmp_path / "one.kv", codec=LOSSY, shift=50)
    assert digests(tmp_path / "one.kv") == digests(tmp_path / "two.kv")
    assert layers_of(tmp_path / "one.kv") == layers_of(tmp_path / "two.kv")


def test_back_to_raw_keeps_what_was_decoded(tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv", COUNT, codec=f"{CODES},sink=2,recent=0")
    report = kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", codec="raw")
    for before, after in zip(states_of(tmp_path / "a.kv"), states_of(tmp_path / "b.kv"), strict=True):
        assert mx.array_equal(before.k, after.k).item() and mx.array_equal(before.v, after.v).item()
    # A raw file of lossy values still says that they are lossy.
    with open_container(tmp_path / "b.kv") as reader:
        assert reader.manifest.quality[0]["k_relative_error"] > 0 and "k_relative_error" not in report.quality


# --- files -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"shift": 3}, {"codec": LOSSY}, {"rope_theta": 5e5}])
def test_in_place(options: dict[str, Any], tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv", COUNT)
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", **options)
    kvtool.recode(tmp_path / "a.kv", tmp_path / "a.kv", **options)
    assert (tmp_path / "a.kv").read_bytes() == (tmp_path / "b.kv").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.kv", "b.kv"]


def test_history_and_origin_accumulate(tmp_path: Path) -> None:
    first = tiny("llama")
    second, third = renamed(first, name="second", weights="cd" * 32), renamed(first, name="third", weights="ef" * 32)
    path = saved(first, tmp_path / "a.kv", COUNT, codec=LOSSY, frame="post")
    kvtool.recode(path, path, shift=2)
    with open_container(path) as reader:
        assert "origin" not in reader.manifest.extra
    kvtool.recode(path, path, to_model=second, shift=-2)
    kvtool.recode(path, path, to_model=third)
    with open_container(path) as reader:
        manifest = reader.manifest
    assert [q["step"] for q in manifest.quality] == ["encode", "recode", "recode", "recode"]
    assert [q.get("shift") for q in manifest.quality] == [None, 2, -2, None]
    assert [(q.get("from"), q.get("to")) for q in manifest.quality[2:]] == [(first.info.name, "second"), ("second", "third")]
    assert manifest.extra["origin"] == {"name": first.info.name, "weights": first.info.weights}
    assert manifest.model == third.info and manifest.tokens.ids == tuple(ids(COUNT))
    assert kvtool.load(path, third).usable == COUNT
    with pytest.raises(IncompatibleError, match="computed by third"):
        kvtool.load(path, first)


# --- many ranges and segments ----------------------------------------------------------------------------------------------------------

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8)


@given(RANGES, st.integers(0, 40), st.integers(0, 40))
def test_positions_are_those_of_the_rows(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """In row order, whatever the order of the ranges; rows beyond the last have none."""
    rows = [p for a, b in ranges for p in range(a, b)]
    found = Positions(ranges).of(start, stop)
    assert found.tolist() == rows[start:stop] and found.dtype == np.int64


def test_a_row_is_found_without_a_walk_over_all_ranges() -> None:
    """40 000 of 40 000 ranges: about a second if each walks over some; half an hour if each walks over all."""
    count = 40_000
    positions = Positions([(2 * i, 2 * i + 1) for i in range(count)])
    begin = time.process_time()
    assert [int(positions.of(i, i + 1)[0]) for i in range(count)] == list(range(0, 2 * count, 2))
    assert time.process_time() - begin < 20


def test_many_segments_of_one_row(tmp_path: Path) -> None:
    """A segment and a range a row are the same rows: a shift of both files gives the same keys."""
    count, rng = 300, np.random.default_rng(0)
    rope = RopeSpec("default", 8, base=10000.0).to_json()
    data = {role: rng.standard_normal((2, count, 8)).astype(np.float32) for role in "kv"}
    for name, step in (("one.kv", count), ("many.kv", 1)):
        cuts = [(i, i + step) for i in range(0, count, step)]
        roles = {
            role: Role(2, 8, "F32", 0 if role == "k" else None, tuple(Segment(c, 0, "post", {"data": f"{role}.{c[0]}"}) for c in cuts))
            for role in "kv"
        }
        layer = CacheInfo("KVCache", "full", None, count, tuple(cuts), **roles)
        plans = [TensorPlan(f"{r}.{a}", "F32", (2, b - a, 8), lambda r=r, a=a, b=b: data[r][:, a:b]) for r in "kv" for a, b in cuts]
        write_container(tmp_path / name, Manifest(ModelInfo("m", "a"), count, (layer,), (CodecInfo("raw"),), (rope,)), plans)
        kvtool.recode(tmp_path / name, tmp_path / name, shift=5)
    with kvtool.open(tmp_path / "one.kv") as one, kvtool.open(tmp_path / "many.kv") as many:
        a, b = one.state(0), many.state(0)
        assert mx.array_equal(a.v, b.v).item() and mx.array_equal(a.k, b.k).item()
        assert not np.array_equal(np.array(a.k), data["k"])
        assert many.manifest.layers[0].positions == tuple((i + 5, i + 6) for i in range(count))


# --- refusals --------------------------------------------------------------------------------------------------------------------------


def refuse(path: Path, match: str, kind: type[Exception] = IncompatibleError, **options: Any) -> None:
    before = sorted(os.listdir(path.parent)), path.read_bytes()
    with pytest.raises(kind, match=match):
        kvtool.recode(path, path.parent / "out.kv", **options)
    with pytest.raises(kind, match=match):
        kvtool.recode(path, path, **options)
    assert (sorted(os.listdir(path.parent)), path.read_bytes()) == before


def test_recode_refuses_by_name(tmp_path: Path) -> None:
    model = tiny("llama")
    path = saved(model, tmp_path / "a.kv", COUNT)
    refuse(path, "nothing to do", ValueError)
    refuse(path, "not both", ValueError, to_model=model, rope_theta=1e5)
    refuse(path, "go with a codec", ValueError, shift=1, sink=3)
    refuse(path, "no codec", ValueError, codec="zip")
    refuse(path, "tokenizer of .* is not that of .*: file abab.*, model efef", to_model=renamed(model, tokenizer="ef" * 32))
    refuse(path, "below 0", shift=-1)
    refuse(path, "2 layers, but the model has 3", to_model=twin("llama", num_hidden_layers=3))
    refuse(path, "KV heads: file 2, model 4", to_model=twin("llama", num_key_value_heads=4))
    refuse(path, "head_dim: file 8, model 16", to_model=twin("llama", head_dim=16))
    refuse(path, "attention: file full, model sliding", to_model=tiny_rings())
    for theta_ in (0.0, -3.0, float("nan"), float("inf")):
        refuse(path, "rope_theta", ValueError, rope_theta=theta_)


def tiny_rings() -> LoadedModel:
    live = build("llama")
    live.make_cache = lambda: [RotatingKVCache(WINDOW) for _ in range(2)]
    return loaded(live, "rings")


@pytest.mark.parametrize("frame", ["pre", "post"])
def test_other_rotary_entries_are_refused_in_either_frame(frame: str, tmp_path: Path) -> None:
    source, target = tiny("glm4"), twin("glm4", partial_rotary_factor=1.0)
    path = saved(source, tmp_path / "a.kv", COUNT, codec=LOSSY, frame=frame)
    refuse(path, "entries 0 to 8 are rotated, but the model rotates 0 to 16", to_model=target)


def test_unknown_rotations_are_refused_by_class(tmp_path: Path) -> None:
    live = build("llama")
    for layer in live.model.layers:
        layer.self_attn.rope.__class__ = type("DynamicNTKScalingRoPE", (type(layer.self_attn.rope),), {})
    dynamic = loaded(live, "dynamic")
    path = saved(dynamic, tmp_path / "a.kv", COUNT)
    for options in ({"shift": 2}, {"rope_theta": 5e5}, {"to_model": tiny("llama")}):
        refuse(path, "0.k: keys cannot be rotated: DynamicNTKScalingRoPE", **options)
    # What needs no rotation goes on, and keeps the record.
    report = kvtool.recode(path, path, codec=f"{LOSSY},frame=pre")
    assert report.kept_post[0].startswith("0.k: DynamicNTKScalingRoPE") and kvtool.load(path, dynamic).usable == COUNT
    refuse(path, "DynamicNTKScalingRoPE", shift=2)
    known = saved(tiny("llama"), tmp_path / "b.kv", COUNT)
    refuse(known, "DynamicNTKScalingRoPE", to_model=dynamic)
