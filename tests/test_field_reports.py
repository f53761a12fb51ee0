"""Situations that people who save and move KV caches have met, one test a case; README.md lists the tests of the other cases."""

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, save_prompt_cache

import kvtool
from formats.container import open_container
from formats.errors import FormatError, IncompatibleError, IntegrityError
from formats.manifest import CacheInfo, Role
from kvtool.bridges.chunks import join
from kvtool.bridges.transferring import source_of
from kvtool.cli import run as cli
from kvtool.model import LoadedModel, load_model
from tests import oracles, rope_families
from tests.library import f64, fill, ids, loaded, run, saved, tiny, twin
from tests.tiny_random import FAMILIES, VOCAB, WINDOW
from veloxquant_mlx.caches.coded import CodedKVCache

LOSSY = "rvq-2+2,sink=2,recent=3"


def roles(path: Path) -> dict[str, Role]:
    """Every K and V of a file, those inside lists too, by name."""

    def walk(layers: tuple[CacheInfo, ...], prefix: str) -> Iterator[tuple[str, Role]]:
        for i, info in enumerate(layers):
            yield from walk(info.caches, f"{prefix}{i}.")
            yield from ((f"{prefix}{i}.{name}", role) for name, role in (("k", info.k), ("v", info.v)) if role is not None)

    with kvtool.open(path) as archive:
        return dict(walk(archive.manifest.layers, ""))


def relative(got: mx.array, want: mx.array) -> float:
    """Squared error over energy."""
    a, b = f64(got), f64(want)
    return float(((a - b) ** 2).sum() / (b**2).sum())


def test_case_5_right_length_wrong_bytes(tmp_path: Path) -> None:
    """A file of the right length with one wrong bit, in the header, the manifest, the token ids, codes, scales, means or exact rows, was
    served as a hit. Here loading never gives a cache, and the error says where."""
    model = tiny("qwen3")
    data = saved(model, tmp_path / "a.kv", 24, codec=LOSSY).read_bytes()
    with open_container(tmp_path / "a.kv") as reader:
        places = {name: info.offset + info.stored // 2 for name, info in reader.tensors.items()}
    assert {name.rsplit(".", 1)[1] for name in places} == {"codes1", "codes2", "scale", "mean", "data"}
    places |= {"header": 3, "manifest": data.index(b'\\"length\\"') + 4, "token ids": data.index(b'\\"ids\\"') + 10}
    for name, at in places.items():
        for bit in (0, 5):
            (tmp_path / "b.kv").write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            with pytest.raises((IntegrityError, FormatError)) as caught:
                kvtool.load(tmp_path / "b.kv", model)
            assert name == "header" or caught.value.exit_code == 4
            assert name not in roles_tensors(tmp_path / "a.kv") or name in str(caught.value)


def roles_tensors(path: Path) -> set[str]:
    with open_container(path) as reader:
        return set(reader.tensors)


@pytest.mark.parametrize("codec", ["raw", LOSSY])
def test_case_8_offsets_and_a_file_replaced_under_a_lazy_array(codec: str, tmp_path: Path) -> None:
    """Tensors at odd offsets could not be mapped into memory, and a file replaced before a lazy array was evaluated gave the new bytes.
    Here every tensor is 64-byte aligned in the file, and arrays taken before the change keep what they were taken from."""
    model, path = tiny("glm4"), tmp_path / "a.kv"
    saved(model, path, 23, codec=codec)
    with open_container(path) as reader:
        assert all(info.offset % 64 == 0 and info.padded % 64 == 0 for info in reader.tensors.values())
    with kvtool.open(path) as archive:
        want = [f64(archive.state(i).k) for i in range(2)]
    with kvtool.open(path) as archive:
        unevaluated = [archive.state(i) for i in range(2)]
        kvtool.save(kvtool.capture(model, ids(23, seed=8)), path, codec=codec)
    os.truncate(path, 0)
    assert all(np.array_equal(f64(state.k), k) for state, k in zip(unevaluated, want, strict=True))


@pytest.mark.parametrize("family", ["gemma3_text", "llama4", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_case_16_mixed_layers_under_a_lossy_codec(family: str, tmp_path: Path) -> None:
    """A model of sliding, chunked and full layers could not be quantised at all, or quantised some layers without a word. Here every
    attention layer is coded, recurrent states are kept as they are and named, and each layer comes back as its own class."""
    model, tokens = tiny(family), ids(2 * WINDOW + 5)
    report = kvtool.save(kvtool.capture(model, tokens), tmp_path / "a.kv", codec="rvq-4+4,sink=0,recent=0")
    found = roles(tmp_path / "a.kv")
    with kvtool.open(tmp_path / "a.kv") as archive:
        codecs = archive.manifest.codecs
    assert found and {codecs[s.codec].id for role in found.values() for s in role.segments} == {"rvq"}
    classes = FAMILIES[family][2]
    states = [f"{i}" for i, c in enumerate(classes) if c == "ArraysCache"]
    states += [f"{i}.{j}" for i, c in enumerate(classes) if isinstance(c, tuple) for j, part in enumerate(c) if part == "ArraysCache"]
    assert report.kept_raw == tuple(f"{name}: recurrent state" for name in states)
    cache = kvtool.load(tmp_path / "a.kv", model, decode=True).cache
    assert [type(c).__name__ for c in cache] == ["CacheList" if isinstance(c, tuple) else c for c in classes]
    live = kvtool.load(tmp_path / "a.kv", model)
    on_codes = [isinstance(c, CodedKVCache) for c in live.cache]
    assert [p.codes for p in live.layers] == on_codes and any(on_codes) == (family != "falcon_h1")
    assert all(p.reason for p in live.layers if not p.codes)
    raw = kvtool.capture(model, tokens).states
    back = kvtool.capture(model, cache=cache, tokens=tokens).states
    pairs = list(zip(raw, back, strict=True)) + [p for a, b in zip(raw, back, strict=True) for p in zip(a.caches, b.caches, strict=True)]
    # 8 bits a value: 1e-4 of the energy at these sizes, with room for small heads.
    assert all(relative(b.k, a.k) < 1e-3 for a, b in pairs if a.k is not None)


def test_case_17_every_layer_of_a_composite_cache_is_stored(tmp_path: Path) -> None:
    """One layer whose cache is a list of caches stopped every later layer from being stored. Here each layer of such a model is in the
    file with all its parts, from live caches and from mlx-lm's own file."""
    model, tokens = tiny("falcon_h1"), ids(20)
    cache = fill(model, tokens)
    kvtool.save(kvtool.capture(model, cache=cache, tokens=tokens), tmp_path / "a.kv", codec=LOSSY)
    with kvtool.open(tmp_path / "a.kv") as archive:
        layers = archive.manifest.layers
    assert [[part.cls for part in layer.caches] for layer in layers] == [["ArraysCache", "KVCache"]] * 2
    assert all(layer.caches[1].rows == 20 and all(a is not None for a in layer.caches[0].arrays) for layer in layers)
    restored = kvtool.load(tmp_path / "a.kv", model)
    for live, back in zip(cache, restored.cache, strict=True):
        assert all(mx.array_equal(x, y).item() for x, y in zip(live[0].cache, back[0].cache, strict=True))
        assert back[1].offset == 20 and relative(back[1].keys[..., :20, :], live[1].keys[..., :20, :]) < 0.05


def two_head_sizes() -> LoadedModel:
    """gemma4: 8 entries a head in sliding layers and 16 in full ones, and fewer caches than layers."""
    mx.random.seed(0)
    source = importlib.import_module("mlx_lm.models.gemma4_text")
    config = {
        "model_type": "gemma4_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    }
    model = source.Model(source.ModelArgs.from_dict(config))
    mx.eval(tree_flatten(model.parameters()))
    return loaded(model, "two head sizes")


@pytest.mark.parametrize("count", [WINDOW - 1, 2 * WINDOW + 1])
def test_case_18_layers_of_different_head_size(count: int, tmp_path: Path) -> None:
    """One head size, and one cache a layer, was assumed for the whole model. Here each layer has its own size, the number of caches is the
    model's, and a raw file continues bit for bit. (Head sizes 80 and 96: see the table.)"""
    model, tokens = two_head_sizes(), ids(count + 9)
    kvtool.save(kvtool.capture(model, tokens[:count]), tmp_path / "a.kv")
    assert [roles(tmp_path / "a.kv")[f"{i}.k"].dim for i in range(4)] == [8, 16, 8, 16] and len(roles(tmp_path / "a.kv")) == 8
    restored = kvtool.load(tmp_path / "a.kv", model)
    usable = restored.usable
    reference = fill(model, tokens[:usable], [usable - 1, 1])
    got = run(model, restored.cache, tokens[usable:], [1] * (count - usable) + [1, 3, 1])
    assert all(map(mx.array_equal, got, run(model, reference, tokens[usable:], [1] * (count - usable) + [1, 3, 1])))
    kvtool.save(kvtool.capture(model, tokens[:count]), tmp_path / "b.kv", codec="rvq-2+2,sink=0,recent=0")
    assert kvtool.load(tmp_path / "b.kv", model).usable == usable


@pytest.mark.parametrize("layers", [3, 5])
def test_case_19_a_prompt_cache_of_another_depth(layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt cache with fewer or more entries than the model has layers was accepted, and that many layers were run. Here export refuses
    such a file with the numbers and writes nothing, and so does the load of one of ours."""
    caches = [KVCache() for _ in range(layers)]
    for cache in caches:
        cache.update_and_fetch(mx.ones((1, 2, 6, 64)), mx.ones((1, 2, 6, 64)))
    save_prompt_cache(str(tmp_path / "c.safetensors"), caches, {})
    code = cli(["export", "--model", "tiny-a", "--from-cache", str(tmp_path / "c.safetensors"), "-o", str(tmp_path / "c.kv")])
    assert code == 5 and not (tmp_path / "c.kv").exists()
    assert f"has {layers} layers, the model 4" in capsys.readouterr().err
    deep = twin("llama", "deep", num_hidden_layers=layers)
    saved(deep, tmp_path / "d.kv", 6)
    for options in ({}, {"allow_mismatch": True}):
        with pytest.raises(IncompatibleError, match=f"{layers} layers, but the model has 2" if options else "computed by deep"):
            kvtool.load(tmp_path / "d.kv", tiny("llama"), **options)


@pytest.mark.parametrize("codec", ["raw", "rvq-4"])
def test_case_22_a_restored_cache_is_really_used(codec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A restore reported success, and the whole prompt was run again. Here the number of usable tokens is returned, a continuation runs
    only what the cache does not hold, and its answer can come from the cache alone."""
    model, question = load_model("tiny-a"), " What is the passkey? The passkey is "
    tokens = list(model.tokenizer.encode("The treaty was signed in the spring, and the passkey is 83715. " * 12))
    path = tmp_path / "a.kv"
    kvtool.save(kvtool.capture(model, tokens), path, codec=codec)
    restored = kvtool.load(path, model)
    assert restored.usable == len(tokens) and {c.offset for c in restored.cache} == {len(tokens)}
    capsys.readouterr()
    assert cli(["import", str(path), "--model", "tiny-a", "--prompt", question, "--max-tokens", "5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["usable_tokens"] == len(tokens) and data["text"].strip() == "83715"
    assert data["prompt_tokens"] == len(model.tokenizer.encode(question, add_special_tokens=False))


def test_case_20_codes_that_were_trimmed_are_not_saved(tmp_path: Path) -> None:
    """Keys and values of tokens that were taken back stayed in the file, and so did padding. Here a cache on codes that was trimmed, within
    its tail or within its codes, is saved as one that never saw more: no row of the others, and none of the room kept for later ones."""
    model, tokens = tiny("qwen3"), ids(60)
    saved(model, tmp_path / "a.kv", 40, codec=LOSSY)
    want = kvtool.load(tmp_path / "a.kv", model, decode=True).cache
    for trimmed in (5, 20):
        cache = kvtool.load(tmp_path / "a.kv", model).cache
        run(model, cache, tokens[40:52], [12])
        assert all(c.trim(12 + trimmed) == 12 + trimmed for c in cache)
        length = 40 - trimmed
        report = kvtool.save(kvtool.capture(model, cache=cache, tokens=tokens[:length]), tmp_path / "b.kv")
        assert report.cache_bytes == 2 * 2 * length * 2 * 64 * 4  # K and V of 2 layers, 2 heads of 64
        for live, back in zip(want, kvtool.load(tmp_path / "b.kv", model).cache, strict=True):
            assert back.offset == length == back.keys.shape[2]
            assert mx.array_equal(back.keys, live.keys[..., :length, :]) and mx.array_equal(back.values, live.values[..., :length, :])


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "llama-sliding"])
def test_case_21_codes_of_a_window_go_on_as_the_run_that_was_not_interrupted(family: str, tmp_path: Path) -> None:
    """Rings were read by their logical length. Here a window on codes goes on as the run that was never saved would, up to what 8 bits a
    value change, for every length around the window."""
    model = tiny(family)
    for count in (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW):
        tokens = ids(count + WINDOW + 3)
        kvtool.save(kvtool.capture(model, tokens[:count]), tmp_path / "a.kv", codec="rvq-8,sink=1,recent=1")
        restored, plan = kvtool.load(tmp_path / "a.kv", model), [1, 1, WINDOW, 1]
        assert all(isinstance(c, CodedKVCache) for c in restored.cache)
        used, rest = tokens[: restored.usable], tokens[restored.usable :]
        for mine, own in zip(run(model, restored.cache, rest, plan), run(model, fill(model, used), rest, plan), strict=True):
            assert relative(mine, own) < 0.01, count  # a row too many or too few gives 0.1 and more


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mamba"])
def test_case_23_every_family_runs_on_codes_or_says_why_not(family: str) -> None:
    """Quantised caches ended in a TypeError, NotImplementedError, ValueError or AttributeError somewhere in the first forward. Here a layer
    is on codes or mlx-lm's own with the reason, and a model without any such layer is refused before its prompt is run."""
    model, tokens = tiny(family), ids(3 * WINDOW + 3)
    if family in ("gemma2", "deepseek_v3", "falcon_h1"):
        with pytest.raises(
            ValueError, match=r"no layer of .* can attend to rvq-8.*: (its own softmax|latent attention|caches in CacheList)"
        ):
            kvtool.make_cache(model, "rvq-8,sink=1,recent=1")
        return
    cache = kvtool.make_cache(model, "rvq-8,sink=1,recent=1")
    assert any(isinstance(c, CodedKVCache) for c in cache)
    plan = [2 * WINDOW, 1, WINDOW, 1, 1]
    for got, want in zip(run(model, cache, tokens, plan), run(model, fill(model, tokens[:0], []), tokens, plan), strict=True):
        np.testing.assert_allclose(f64(got), f64(want), rtol=1e-3, atol=1e-3)  # nothing left the exact rows yet


def test_case_25_the_state_of_a_coded_cache_before_its_first_row() -> None:
    """A loop over chunks of the prompt evaluates every cache's state after each, and one that held nothing yet ended it. Here the state of
    an empty cache is one, and a prompt of several chunks gives what it gives at once."""
    model = load_model("tiny-a")
    prompt = mx.array(list(model.tokenizer.encode("The committee met on the second day of the month. " * 12)))
    cache = kvtool.make_cache(model, "rvq-8")
    mx.eval([c.state for c in cache])
    again = [CodedKVCache.from_state(c.state) for c in cache]
    steps = [
        [int(token) for token, _ in generate_step(prompt, model.model, max_tokens=6, prompt_cache=caches, prefill_step_size=size)]
        for caches, size in ((cache, 16), (again, 2048))
    ]
    assert steps[0] == steps[1] and {c.offset for c in (*cache, *again)} == {prompt.size + 6}


def test_case_36_a_merged_batch_of_codes_keeps_each_position(tmp_path: Path) -> None:
    """Sequences that were put into one batch kept the positions of the batch, so that new keys were rotated by the wrong angle. Here the
    new keys of each of three ragged files on codes, merged, are those of the file that goes on by itself."""
    model = tiny("qwen3")
    loads = []
    for i, count in enumerate((40, 17, 33)):
        kvtool.save(kvtool.capture(model, ids(count, seed=i)), tmp_path / f"{i}.kv", codec=LOSSY)
        loads.append([kvtool.load(tmp_path / f"{i}.kv", model).cache for _ in range(2)])
    batch = [caches[0].merge(list(caches)) for caches in zip(*(cache for cache, _ in loads), strict=True)]
    assert batch[0].offset.tolist() == [40, 17, 33]
    model.model(mx.array([[5, 6]] * 3), cache=batch)
    for i, (_, alone) in enumerate(loads):
        run(model, alone, [5, 6], [2])
        mine, own = (c.keys_and_values()[0][0, :, -2:] for c in (batch[0].extract(i), alone[0]))
        assert relative(mine, own) < 1e-12, i


def test_case_31_the_codec_and_its_error_are_never_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lossy codec was chosen without a word and accuracy fell. Here the default is lossless, and codec and measured error stand in the
    file and in what export, inspect, import and eval report."""
    prompt, rest = "The committee met on the second day of the month and heard the report. " * 4, tmp_path / "rest.txt"
    rest.write_text("It was resolved that the report be printed and laid before the members.")
    names = {"raw": tmp_path / "raw.kv", "rvq-3": tmp_path / "rvq.kv"}
    reports: dict[str, Any] = {}
    for codec, path in names.items():
        chosen = [] if codec == "raw" else ["--codec", codec]
        for command in (
            ["export", "--prompt", prompt, *chosen, "-o", str(path), "--model", "tiny-a"],
            ["inspect", str(path)],
            ["import", str(path), "--model", "tiny-a", "--max-tokens", "2"],
            ["eval", str(path), "--model", "tiny-a", "--text", str(rest), "--arms", "transferred"],
        ):
            assert cli([*command, "--json"]) == 0
            reports[codec, command[0]] = json.loads(capsys.readouterr().out)
    assert reports["raw", "export"]["codec"] == "raw" and reports["raw", "export"]["quality"] is None
    assert all(not reports["raw", c]["quality"] for c in ("inspect", "import", "eval"))
    error = reports["rvq-3", "export"]["quality"]
    assert error["codec"] == "rvq-3,sink=4,recent=32" and 0.001 < error["v_relative_error"] < 0.1
    assert all(reports["rvq-3", c]["quality"] == [error] for c in ("inspect", "import", "eval"))
    assert cli(["import", str(names["rvq-3"]), "--model", "tiny-a", "--max-tokens", "2"]) == 0
    assert "rvq-3" in capsys.readouterr().err


def test_case_32_fragments_are_turned_to_where_they_stand(tmp_path: Path) -> None:
    """Fragments that were computed from position 0 were put one after another as they were: bit-identical at every offset. Here a join
    turns them, and keys of layer 0 are those of a prefill of the whole; a fragment alone is moved by a shift."""
    model, tokens, cuts = tiny("llama-llama3"), ids(60), (0, 25, 42, 60)
    for start, stop in pairwise(cuts):
        kvtool.save(kvtool.capture(model, tokens[start:stop]), tmp_path / f"{start}.kv")
    files = [tmp_path / f"{start}.kv" for start in cuts[:-1]]
    with ExitStack() as stack:
        archives = [stack.enter_context(kvtool.open(file)) for file in files]
        joined = join([source_of(archive) for archive in archives], model).states[0].k
        unturned = mx.concatenate([archive.state(0).k for archive in archives], axis=1)
    whole = kvtool.capture(model, tokens).states[0].k
    assert relative(joined, whole) < 1e-12 < 1e-2 < relative(unturned, whole)
    kvtool.recode(files[1], tmp_path / "moved.kv", shift=25)
    with kvtool.open(tmp_path / "moved.kv") as archive:
        assert relative(archive.state(0).k, whole[:, 25:42]) < 1e-12


@pytest.mark.parametrize("position", [10, 5_000, 50_000, 131_072])
def test_case_33_llama3_is_recoded_by_its_own_frequencies(position: int, tmp_path: Path) -> None:
    """A remap by the base alone on a llama3-scaled model was right for short prompts and wrong for long ones. Here plain keys recoded to
    it, at any position, are those of its own prefill there, and those that the published formula gives in float64."""
    scaling = FAMILIES["llama-llama3"][1]["rope_scaling"]
    source, target = twin("llama", rope_theta=1e4), twin("llama", rope_theta=5e5, rope_scaling=scaling)
    kvtool.save(kvtool.capture(source, rope_families.IDS), tmp_path / "a.kv")
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=target, shift=position)
    with kvtool.open(tmp_path / "b.kv") as archive:
        moved = np.array(archive.state(0).k)
    assert rope_families.difference(moved, rope_families.prefill_rows(target.model, position)[(0,), "k"]) < 1e-6
    before = oracles.default_frequencies(8, 1e4)
    after = oracles.llama3_frequencies(8, 5e5, 8.0, 1.0, 4.0, 64)
    at = np.arange(len(rope_families.IDS))
    bare = oracles.rotated(f64(kvtool.capture(source, rope_families.IDS).states[0].k), at, -before)
    # MLX's own angles are float32: 2e-8 a token of position (transfer/rope.py), and of every entry of a pair.
    limit = 1e-6 + 4e-8 * position
    assert rope_families.difference(moved, oracles.rotated(bare, at + position, after)) < limit
    by_base_alone = oracles.rotated(bare, at + position, oracles.default_frequencies(8, 5e5))
    assert rope_families.difference(by_base_alone, moved) > max(20 * limit, 1e-3)


def test_case_33_an_unknown_scaling_is_refused(tmp_path: Path) -> None:
    """A scaling that nobody knew was taken for llama3's. Here it is refused by name, in a file's model as in a target."""
    known, unknown = (
        twin("llama"),
        twin("llama", "other", max_position_embeddings=2048, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    )
    for a, b in ((known, unknown), (unknown, known)):
        saved(a, tmp_path / "a.kv", 12)
        with pytest.raises(IncompatibleError, match="keys cannot be rotated: DynamicNTKScalingRoPE: its base depends on the length"):
            kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=b)
    assert not (tmp_path / "b.kv").exists()


def test_case_34_yarn_keeps_its_original_length_and_magnitude(tmp_path: Path) -> None:
    """YaRN's original length and betas were lost between config and recode, so that many frequencies were wrong, and its magnitude was
    left out of the keys. Here both stand in the file, a model that differs in the length alone is refused by the frequencies that differ,
    and a recode gives the keys of that model's own prefill."""
    scaling = dict(FAMILIES["gpt_oss"][1]["rope_scaling"])
    source = twin("gpt_oss", "source")
    target = twin("gpt_oss", "target", rope_scaling={**scaling, "original_max_position_embeddings": 4096})
    saved(source, tmp_path / "a.kv", 12)
    with kvtool.open(tmp_path / "a.kv") as archive:
        (rope,) = archive.manifest.ropes
    assert rope["kind"] == "yarn" and rope["magnitude"] == pytest.approx(0.1 * np.log(4) + 1, rel=1e-6)
    with pytest.raises(IncompatibleError, match=r"[1-4] of 4 frequencies differ"):
        kvtool.load(tmp_path / "a.kv", target)
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=target)
    own = kvtool.capture(target, ids(12)).states[0].k
    with kvtool.open(tmp_path / "b.kv") as archive:
        moved = archive.state(0).k
    # Layer 0 of equal weights: equal keys but for the float32 angles.
    assert relative(moved, own) < 1e-10 < 1e-4 < relative(kvtool.capture(source, ids(12)).states[0].k, own)


@pytest.mark.parametrize(("family", "live"), [("qwen3", 5e5), ("llama", 1e4)])
def test_case_35_theta_is_the_live_modules(family: str, live: float, tmp_path: Path) -> None:
    """Newer configs write the base under rope_parameters alone: a tool that reads rope_theta finds none or a default, and what the model
    rotates by is up to mlx-lm (qwen3 follows the new field, llama does not). Here the file says what the live module does."""
    theta = None if family == "qwen3" else 1e4
    model = twin(family, rope_theta=theta, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert model.model.layers[0].self_attn.rope.base == live
    saved(model, tmp_path / "a.kv", 12)
    with kvtool.open(tmp_path / "a.kv") as archive:
        assert [rope["base"] for rope in archive.manifest.ropes] == [live]
