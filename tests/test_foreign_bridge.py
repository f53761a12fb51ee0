"""mlx-lm prompt-cache files: what mlx-lm wrote continues bit for bit here, and what is written here continues in mlx-lm."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import main as mlx_lm_generate
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from formats.errors import IncompatibleError, NotKvtoolError
from formats.foreign.mlx_lm import read_prompt_cache
from kvtool import tiny
from kvtool.foreign import states_from_prompt_cache, write_mlx_lm
from kvtool.model import LoadedModel
from kvtool.snapshot import Quantized, build_caches, leaves, length_of, take_states
from tests.tiny_random import FAMILIES, WINDOW, build, tokens

model_of = functools.lru_cache(maxsize=None)(build)
TOTAL = 2 * WINDOW + 3


def filled(model: Any, steps: int = 3) -> list[Any]:
    """A cache of TOTAL tokens whose last `steps` went in one by one, so that a ring stands somewhere inside."""
    cache = make_prompt_cache(model)
    ids = tokens(TOTAL)
    for start, stop in [(0, TOTAL - steps), *((TOTAL - steps + i, TOTAL - steps + i + 1) for i in range(steps))]:
        mx.eval(model(ids[:, start:stop], cache=cache))
    return cache


def logits(model: Any, cache: list[Any]) -> mx.array:
    ids = tokens(30, seed=3)
    chunks = [(0, 1), (1, 2), (2, 6), (6, 7), (7, 28), (28, 29), (29, 30)]
    out = mx.concatenate([model(ids[:, a:b], cache=cache) for a, b in chunks], axis=1)
    mx.eval(out)
    return out


def arrays_of(states: Any) -> list[mx.array]:
    out: list[mx.array] = []
    for _, leaf in leaves(states):
        for a in (leaf.k, leaf.v, *leaf.arrays):
            out += [] if a is None else list(a.parts) if isinstance(a, Quantized) else [a]
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_file_of_mlx_lm_continues_here(tmp_path: Path, family: str) -> None:
    model, path = model_of(family), str(tmp_path / "cache.safetensors")
    cache = filled(model)
    save_prompt_cache(path, cache, {"model": "m", "note": "ü"})
    states, metadata = states_from_prompt_cache(path, length=TOTAL)
    assert metadata == {"model": "m", "note": "ü"}
    assert length_of(states) == TOTAL
    for ours, theirs in zip(arrays_of(states), arrays_of(take_states(cache, length=TOTAL)), strict=True):
        assert ours.dtype == theirs.dtype
        assert mx.array_equal(ours, theirs)
    assert mx.array_equal(logits(model, build_caches(states)), logits(model, cache))


@pytest.mark.parametrize("family", FAMILIES)
def test_file_written_here_continues_in_mlx_lm(tmp_path: Path, family: str) -> None:
    model, path = model_of(family), str(tmp_path / "cache.safetensors")
    cache = filled(model)
    write_mlx_lm(path, take_states(cache, length=TOTAL), {"model": "m", "note": "ü"})
    loaded, metadata = load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": "m", "note": "ü"}
    assert [type(c) for c in loaded] == [type(c) for c in cache]
    assert mx.array_equal(logits(model, loaded), logits(model, cache))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "falcon_h1", "mamba"])
def test_version_1_round_trip(tmp_path: Path, family: str) -> None:
    model, path = model_of(family), str(tmp_path / "cache.safetensors")
    cache = filled(model)
    write_mlx_lm(path, take_states(cache, length=TOTAL), {"model": "m"}, version=1)
    assert read_prompt_cache(path).version == 1
    states, metadata = states_from_prompt_cache(path, length=TOTAL)
    assert metadata == {"model": "m"}
    assert mx.array_equal(logits(model, build_caches(states)), logits(model, cache))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("bits", [None, 4])
def test_bits_are_kept(tmp_path: Path, dtype: mx.Dtype, bits: int | None) -> None:
    """Every 16-bit pattern that is a number, infinities and signed zero too; MLA's slots differ in width."""
    patterns = mx.arange(1 << 16, dtype=mx.uint32).astype(mx.uint16).view(mx.float16 if dtype == mx.float16 else mx.bfloat16)
    patterns = mx.where(mx.isnan(patterns), mx.zeros_like(patterns), patterns).astype(dtype)
    if bits is None:
        cache: Any = KVCache()
    else:
        cache = QuantizedKVCache(group_size=32, bits=bits)
        patterns = mx.where(mx.isfinite(patterns), patterns, mx.zeros_like(patterns))
    keys = patterns.reshape(1, 2, -1, 64)
    cache.update_and_fetch(keys, keys[..., :32])
    cache.trim(5)
    states = take_states([cache])
    path = str(tmp_path / "cache.safetensors")
    for version in (1, 2):
        write_mlx_lm(path, states, {}, version=version)
        again, _ = states_from_prompt_cache(path)
        for ours, theirs in zip(arrays_of(again), arrays_of(states), strict=True):
            assert ours.dtype == theirs.dtype
            unsigned = {2: mx.uint16, 4: mx.uint32}[ours.dtype.size]
            assert mx.array_equal(mx.contiguous(ours).view(unsigned), mx.contiguous(theirs).view(unsigned))


def test_only_live_rows_are_written(tmp_path: Path) -> None:
    """mlx-lm writes its whole buffer, trimmed rows included; nothing of them is in our file."""
    model = model_of("llama")
    cache = make_prompt_cache(model)
    mx.eval(model(tokens(300), cache=cache))
    trim_prompt_cache(cache, 290)
    theirs, ours = (str(tmp_path / f"{name}.safetensors") for name in ("theirs", "ours"))
    save_prompt_cache(theirs, cache)
    write_mlx_lm(ours, take_states(cache), {})
    assert read_prompt_cache(theirs).layers[0].arrays[0].shape == (1, 2, 512, 8)
    assert read_prompt_cache(ours).layers[0].arrays[0].shape == (1, 2, 10, 8)
    trimmed = mx.contiguous(cache[0].keys[0, :, 10:300])
    assert any(bytes(memoryview(trimmed[0, i])) in Path(theirs).read_bytes() for i in range(3))
    assert not any(bytes(memoryview(trimmed[h, i])) in Path(ours).read_bytes() for h in range(2) for i in range(290))
    assert mx.array_equal(logits(model, load_prompt_cache(ours)), logits(model, cache))


def test_empty_caches(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.safetensors")
    caches = [KVCache(), QuantizedKVCache(32, 4), RotatingKVCache(8, keep=2), ArraysCache(2), CacheList(ArraysCache(1), KVCache())]
    save_prompt_cache(path, [*caches, ConcatenateKVCache()])
    states, _ = states_from_prompt_cache(path)
    assert length_of(states) == 0
    assert [type(c).__name__ for c in build_caches(states)] == [type(c).__name__ for c in caches] + ["ConcatenateKVCache"]
    write_mlx_lm(path, states, {})
    loaded = load_prompt_cache(path)
    # An empty ConcatenateKVCache makes mlx-lm's loader fail.
    assert [type(c).__name__ for c in loaded] == [type(c).__name__ for c in caches] + ["KVCache"]
    assert (loaded[2].max_size, loaded[2].keep, loaded[1].bits) == (8, 2, 4)


def test_row_of_a_batch_file(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.safetensors")
    batch = BatchKVCache(left_padding=[2, 0])
    keys = mx.random.normal((2, 1, 5, 4), key=mx.random.key(0))
    batch.update_and_fetch(keys, keys)
    save_prompt_cache(path, [batch])
    states, _ = states_from_prompt_cache(path, row=0)
    assert mx.array_equal(states[0].k, keys[0, :, 2:])
    with pytest.raises(ValueError, match="holds 2 sequences"):
        states_from_prompt_cache(path)


def test_refusals_name_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.safetensors")
    keys = mx.zeros((1, 1, 5, 4))
    cache = [KVCache(), KVCache()]
    for c, count in zip(cache, (5, 4), strict=True):
        c.update_and_fetch(keys[:, :, :count], keys[:, :, :count])
    save_prompt_cache(path, cache)
    with pytest.raises(IncompatibleError, match=r"cache\.safetensors: the layers disagree on the tokens seen: 4 in layer 1; 5 in layer 0"):
        states_from_prompt_cache(path)
    mx.save_safetensors(path, {"a": keys})
    with pytest.raises(NotKvtoolError):
        states_from_prompt_cache(path)
    with pytest.raises(ValueError, match="must end in"):
        write_mlx_lm(tmp_path / "cache.kv", [], {})


def test_mlx_lm_generate_takes_the_file(
    tmp_path: Path, tiny_a: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mlx_lm.generate --prompt-cache-file` gives the same text from our file as from mlx-lm's own."""
    model_path = str(tiny.path("tiny-a"))
    cache = make_prompt_cache(tiny_a.model)
    mx.eval(tiny_a.model(mx.array([tiny_a.tokenizer.encode("The code of the red door is 4711. The garden is old. ")]), cache=cache))
    metadata = {"model": model_path, "tokenizer_config": json.dumps({})}
    files = [str(tmp_path / name) for name in ("theirs.safetensors", "ours.safetensors")]
    save_prompt_cache(files[0], cache, metadata)
    write_mlx_lm(files[1], take_states(cache), metadata)
    texts = []
    for file in files:
        command = ["mlx_lm.generate", "--prompt-cache-file", file, "--prompt", "The code", "--max-tokens", "12", "--verbose", "False"]
        monkeypatch.setattr(sys, "argv", command)
        mlx_lm_generate()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].strip()
