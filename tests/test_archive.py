"""Save and load: a raw file continues bit for bit like the run it was captured from, and a lossy one says exactly what it did."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    BatchKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import kvtool
from formats.container import open_container
from formats.errors import IncompatibleError
from formats.manifest import CacheInfo, Role
from kvtool.archive import Restored, SaveReport
from kvtool.capturing import Snapshot, vocabulary
from kvtool.encoding import split_rows
from kvtool.foreign import caches_from_prompt_cache
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, RoleProbe
from kvtool.snapshot import take_states
from kvtool.states import CacheState, leaves
from tests.library import digests, equal, f64, fill, ids, loaded, run, saved, tiny, twin
from tests.tiny_random import FAMILIES, VOCAB, WINDOW, build
from veloxquant_mlx.codecs import BLOCK_VALUES, parse_codec
from veloxquant_mlx.transfer.rope_spec import RopeSpec

# Single tokens and chunks, the second chunk longer than what is left of the window.
GO_ON = (1, 1, 3, 1, WINDOW + 1, 1, 2)
CODES = "rvq-2+2"
LOSSY = f"{CODES},sink=0,recent=0"
# A whole, stored and read again; the codec's own error is bounded by its tests. 4 bits, Gaussian: 0.0115 of the energy, 2 % at these sizes.
FOUR_BITS = 0.03


def prefilled(model: LoadedModel, tokens: list[int], usable: int) -> list[Any]:
    """The caches of an uninterrupted run with mlx-lm's own chunks: all but the last token, then that."""
    return fill(model, tokens[:usable], [usable - 1, 1] if usable > 1 else [usable] if usable else [])


def assert_goes_on(model: LoadedModel, restored: Restored, tokens: list[int], prompt: int) -> None:
    """The restored cache, its pending token and what follows give the logits of the run that never stopped, bit for bit."""
    reference = prefilled(model, tokens, restored.usable)
    if restored.usable == prompt:
        trim_prompt_cache(reference, 1)
    pending = restored.pending()
    assert pending == tokens[restored.usable : prompt] and len(pending) == 1
    plan = [1, *GO_ON]
    expected = run(model, reference, tokens[restored.usable :], plan)
    assert equal(run(model, restored.cache, [*pending, *tokens[prompt:]], plan), expected)


def offsets(cache: list[Any]) -> set[int]:
    """Tokens seen by every cache that counts them, members of lists too."""
    return {n for c in cache for n in (offsets(c.caches) if hasattr(c, "caches") else {c.offset} if hasattr(c, "offset") else ())}


def roles(layers: tuple[CacheInfo, ...]) -> list[Role]:
    return [r for c in layers for r in (c.k, c.v, *roles(c.caches)) if r is not None]


# --- raw -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, WINDOW, 2 * WINDOW + 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_raw_continues_bit_for_bit(family: str, count: int, tmp_path: Path) -> None:
    model, tokens = tiny(family), ids(count + sum(GO_ON))
    report = kvtool.save(kvtool.capture(model, tokens[:count]), tmp_path / "a.kv")
    assert report.quality is None and report.kept_raw == ()
    restored = kvtool.load(tmp_path / "a.kv", model)
    assert restored.tokens == tuple(tokens[:count]) and restored.notes == ()
    assert offsets(restored.cache) <= {restored.usable}
    assert_goes_on(model, restored, tokens, count)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama-sliding", "lfm2"])
def test_raw_is_exact_in_16_bits(family: str, dtype: str, tmp_path: Path) -> None:
    model, tokens = tiny(family, dtype), ids(20 + sum(GO_ON))
    kvtool.save(kvtool.capture(model, tokens[:20]), tmp_path / "a.kv")
    assert_goes_on(model, kvtool.load(tmp_path / "a.kv", model), tokens, 20)
    with open_container(tmp_path / "a.kv") as reader:
        assert {info.dtype for info in reader.tensors.values()} == {"F16" if dtype == "float16" else "BF16"}


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "falcon_h1", "gpt_oss"])
def test_usable_is_what_the_cache_holds(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    restored = kvtool.load(saved(model, tmp_path / "a.kv", 30), model)
    # Ring buffers of 16 and recurrent layers cannot give the last token back.
    assert restored.usable == (30 if family == "llama" else 29)
    assert offsets(restored.cache) == {restored.usable}
    first = restored.pending()
    # Asking again must not take another token back.
    assert restored.pending() == first == [ids(30)[-1]]
    assert restored.usable == 29 and offsets(restored.cache) == {29}


def test_pending_cuts_a_cache_that_only_moves_its_offset(tmp_path: Path) -> None:
    model, tokens = tiny("llama"), ids(12 + sum(GO_ON))
    cache = [ConcatenateKVCache() for _ in make_prompt_cache(model.model)]
    run(model, cache, tokens, [12])
    kvtool.save(kvtool.capture(model, cache=cache, tokens=tokens[:12]), tmp_path / "a.kv")
    restored = kvtool.load(tmp_path / "a.kv", model)
    pending = restored.pending()
    expected = run(model, fill(model, tokens[:11], [11]), tokens[11:], [1, *GO_ON])
    got = run(model, restored.cache, [*pending, *tokens[12:]], [1, *GO_ON])
    # Another prefill chunk and another buffer length: the same sums in another order, float32.
    assert all(mx.allclose(a, b, rtol=0, atol=2e-5).item() for a, b in zip(got, expected, strict=True))


def test_pending_needs_tokens_or_a_cache_that_gives_back(tmp_path: Path) -> None:
    model, tokens = tiny("llama-sliding"), ids(40)
    full = fill(model, tokens)
    kvtool.save(kvtool.capture(model, cache=full, tokens=tokens), tmp_path / "a.kv")
    with pytest.raises(IncompatibleError, match="cannot give its last token back"):
        kvtool.load(tmp_path / "a.kv", model).pending()
    kvtool.save(kvtool.capture(model, cache=full), tmp_path / "b.kv")
    restored = kvtool.load(tmp_path / "b.kv", model)
    assert restored.tokens is None and restored.usable == 40
    with pytest.raises(IncompatibleError, match="no token ids"):
        restored.pending()
    with pytest.raises(IncompatibleError, match="no token ids"):
        kvtool.evaluate(tmp_path / "b.kv", model, ids(9))


def test_sliding_window_that_has_moved_on(tmp_path: Path) -> None:
    model, tokens = tiny("llama-sliding"), ids(3 * WINDOW + 5 + sum(GO_ON))
    count = 3 * WINDOW + 5
    path = saved(model, tmp_path / "a.kv", 1)
    kvtool.save(kvtool.capture(model, tokens[:count]), path, codec=f"{CODES},sink=4,recent=4")
    with kvtool.open(path) as archive:
        sliding, full = archive.manifest.layers[:2]
        # 52 tokens seen, 15 rows kept; position 0 to 3 are gone, so that nothing of this layer is a sink.
        assert sliding.positions == ((37, 52),) and [s.rows for s in sliding.k.segments] == [(0, 11), (11, 15)]
        assert full.positions == ((0, 52),) and [s.rows for s in full.k.segments] == [(0, 4), (4, 48), (48, 52)]
        state = archive.state(0)
        exact = kvtool.capture(model, tokens[:count]).states[0]
        assert relative(exact.k, state.k) < FOUR_BITS and relative(exact.v, state.v) < FOUR_BITS


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("count", [WINDOW - 1, WINDOW, 2 * WINDOW + 5])
def test_rotating_cache_with_kept_first_rows(keep: int, count: int, tmp_path: Path) -> None:
    live = build("llama")
    live.make_cache = lambda: [RotatingKVCache(WINDOW, keep) for _ in range(2)]
    model, tokens = loaded(live, "rings"), ids(count + sum(GO_ON))
    cache = fill(model, tokens, [count - 3, 1, 1, 1])
    kvtool.save(kvtool.capture(model, cache=cache, tokens=tokens[:count]), tmp_path / "a.kv")
    with kvtool.open(tmp_path / "a.kv") as archive:
        full = count >= WINDOW
        assert archive.manifest.layers[0].positions == (((0, 4), (count - 11, count)) if full and keep else ((max(0, count - 15), count),))
    back = kvtool.load(tmp_path / "a.kv", model)
    assert equal(run(model, back.cache, tokens[count:], GO_ON), run(model, cache, tokens[count:], GO_ON))


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW])
@pytest.mark.parametrize("steps", [0, 3])
def test_max_kv_size_that_dropped_nothing_is_the_models_own_cache(count: int, steps: int, tmp_path: Path) -> None:
    """The file is the one that the model's own KVCache gives, from live caches, from their states and from a prompt-cache file."""
    model, tokens = tiny("qwen3"), ids(count + sum(GO_ON))
    plan = [count - steps] + [1] * steps if count > steps else [count]
    own, limited = fill(model, tokens[:count], plan), make_prompt_cache(model.model, max_kv_size=WINDOW)
    run(model, limited, tokens[:count], plan)
    assert type(limited[0]) is RotatingKVCache
    kvtool.save(kvtool.capture(model, cache=own, tokens=tokens[:count]), tmp_path / "own.kv")
    save_prompt_cache(str(tmp_path / "c.safetensors"), limited)
    sources = [limited, caches_from_prompt_cache(tmp_path / "c.safetensors")[0]]
    if count < WINDOW:
        sources.append(list(take_states(limited)))
    for source in sources:
        kvtool.save(kvtool.capture(model, cache=source, tokens=tokens[:count]), tmp_path / "a.kv")
        assert (tmp_path / "a.kv").read_bytes() == (tmp_path / "own.kv").read_bytes()
    restored = kvtool.load(tmp_path / "a.kv", model)
    assert equal(run(model, restored.cache, tokens[count:], GO_ON), run(model, own, tokens[count:], GO_ON))


@pytest.mark.parametrize("plan", [[WINDOW + 1], [WINDOW, 1], [1] * (2 * WINDOW)])
def test_max_kv_size_that_dropped_rows_is_refused_with_the_reason(plan: list[int]) -> None:
    model, count = tiny("qwen3"), sum(plan)
    cache = make_prompt_cache(model.model, max_kv_size=WINDOW)
    run(model, cache, ids(count), plan)
    with pytest.raises(IncompatibleError, match="sliding") as caught:
        kvtool.capture(model, cache=cache, tokens=ids(count))
    # mlx-lm keeps the first 4 rows and the newest.
    gap = f"rows 4 to {count - (WINDOW - 4)} were dropped"
    assert caught.value.hint == f"made with max_kv_size={WINDOW}, so {gap}; make it again without max_kv_size"


def test_rows_of_a_batch(tmp_path: Path) -> None:
    model = tiny("llama")
    prompts = [ids(9, 1), ids(5, 2), ids(12, 3)]
    longest = max(map(len, prompts))
    padding = [longest - len(p) for p in prompts]
    cache = [BatchKVCache(padding) for _ in make_prompt_cache(model.model)]
    model.model(mx.array([[0] * n + p for n, p in zip(padding, prompts, strict=True)]), cache=cache)
    more = ids(sum(GO_ON), 7)
    with pytest.raises(ValueError, match="row"):
        kvtool.capture(model, cache=cache)
    for row, prompt in enumerate(prompts):
        report = kvtool.save(kvtool.capture(model, cache=cache, tokens=prompt, row=row), tmp_path / "a.kv")
        assert report.tokens == len(prompt)
        restored = kvtool.load(tmp_path / "a.kv", model)
        expected = run(model, fill(model, prompt), more, GO_ON)
        # The batch ran padded, hence other shapes: the same sums in another order, float32.
        assert all(
            mx.allclose(a, b, rtol=0, atol=2e-5).item() for a, b in zip(run(model, restored.cache, more, GO_ON), expected, strict=True)
        )


def test_a_trimmed_cache_leaves_no_stale_rows(tmp_path: Path) -> None:
    model, tokens = tiny("llama"), ids(30 + sum(GO_ON))
    cache = fill(model, tokens[:30])
    trim_prompt_cache(cache, 7)
    report = kvtool.save(kvtool.capture(model, cache=cache, tokens=tokens[:23]), tmp_path / "a.kv", compress=False)
    assert report.cache_bytes == 2 * 2 * 23 * 2 * 8 * 4
    restored = kvtool.load(tmp_path / "a.kv", model)
    assert equal(run(model, restored.cache, tokens[23:], GO_ON), run(model, cache, tokens[23:], GO_ON))


# --- mlx-lm's quantised caches ---------------------------------------------------------------------------------------------------


def quantized(model: LoadedModel, tokens: list[int], bits: int = 8) -> list[Any]:
    return [c.to_quantized(group_size=64, bits=bits) for c in fill(model, tokens)]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_cache_is_kept_verbatim(bits: int, tmp_path: Path) -> None:
    model, tokens = tiny("qwen3"), ids(20 + sum(GO_ON))
    cache = quantized(model, tokens[:20], bits)
    report = kvtool.save(kvtool.capture(model, cache=cache, tokens=tokens[:20]), tmp_path / "a.kv")
    assert report.quality is None and report.requantised == ()
    restored = kvtool.load(tmp_path / "a.kv", model)
    assert {type(c).__name__ for c in restored.cache} == {"QuantizedKVCache"}
    assert equal(run(model, restored.cache, tokens[20:], GO_ON), run(model, cache, tokens[20:], GO_ON))


@pytest.mark.parametrize("codec", [LOSSY, f"{CODES},sink=2,recent=3", f"k={CODES},v=raw,sink=0,recent=0", f"k=raw,v={LOSSY}"])
def test_quantized_cache_under_a_lossy_codec_is_said(codec: str, tmp_path: Path) -> None:
    model, tokens = tiny("qwen3"), ids(20 + sum(GO_ON))
    cache = quantized(model, tokens[:20])
    report = kvtool.save(kvtool.capture(model, cache=cache, tokens=tokens[:20]), tmp_path / "a.kv", codec=codec)
    lossy = [r for r in "kv" if not codec.startswith(f"k={CODES}") or r == "k"] if "k=raw" not in codec else ["v"]
    assert report.requantised == tuple(f"{i}.{r}" for i in range(2) for r in lossy)
    assert report.quality["requantised"] == list(report.requantised)
    restored = kvtool.load(tmp_path / "a.kv", model)
    # What comes back is no triplet any more, so it lives as codes where both roles have them, and the model can go on with it.
    assert {type(c).__name__ for c in restored.cache} == {"KVCache" if "raw" in codec else "CodedKVCache"}
    plain = mx.dequantize(*(part[0, :, :20] for part in cache[1].keys), group_size=64, bits=8)
    assert relative(plain, restored.cache[1].keys[0, :, :20]) < FOUR_BITS
    run(model, restored.cache, tokens[20:], GO_ON)


def test_quantized_cache_of_another_dtype_goes_on(tmp_path: Path) -> None:
    half, single = tiny("qwen3", "bfloat16"), tiny("qwen3")
    tokens = ids(20 + sum(GO_ON))
    kvtool.save(kvtool.capture(half, cache=quantized(half, tokens[:20]), tokens=tokens[:20]), tmp_path / "a.kv")
    restored = kvtool.load(tmp_path / "a.kv", single, allow_mismatch=True)
    logits = run(single, restored.cache, tokens[20:], GO_ON)
    expected = run(single, fill(single, tokens[:20]), tokens[20:], GO_ON)
    # 8 bits and bfloat16 weights behind the keys: 1 % of logits of size about 1.
    assert all(mx.allclose(a, b, rtol=0, atol=0.1).item() for a, b in zip(logits, expected, strict=True))


# --- exact rows ------------------------------------------------------------------------------------------------------------------


def relative(exact: mx.array, other: mx.array) -> float:
    """Squared error over energy, float64."""
    a, b = f64(exact), f64(other)
    return float(((a - b) ** 2).sum() / (a**2).sum())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exact_rows_are_exact_in_16_bits(dtype: str, tmp_path: Path) -> None:
    model = tiny("llama", dtype)
    snapshot = kvtool.capture(model, ids(40))
    kvtool.save(snapshot, tmp_path / "a.kv", codec=LOSSY, sink=4, recent=6)
    with kvtool.open(tmp_path / "a.kv") as archive:
        for layer, state in enumerate(snapshot.states):
            back = archive.state(layer)
            for name in ("k", "v"):
                value, got = getattr(state, name), getattr(back, name)
                assert got.dtype == value.dtype
                # float32 caches keep exact rows in float16: one rounding.
                kept = value.astype(mx.float16).astype(mx.float32) if dtype == "float32" else value
                for rows in (slice(0, 4), slice(34, 40)):
                    assert mx.array_equal(got[:, rows], kept[:, rows]).item()
                assert 1e-5 < relative(value[:, 4:34], got[:, 4:34]) < FOUR_BITS
                stored = archive.reader.tensors[f"{layer}.{name}.0.data"]
                assert stored.dtype == ("BF16" if dtype == "bfloat16" else "F16")


def test_a_lossy_codec_keeps_the_first_4_and_the_newest_32_rows_exact(tmp_path: Path) -> None:
    model = tiny("llama", "float16")
    snapshot = kvtool.capture(model, ids(50))
    plain = kvtool.save(snapshot, tmp_path / "raw.kv")
    for codec, coded in ((CODES, range(4, 18)), (f"{CODES},sink=0", range(18)), (f"{CODES},recent=0", range(4, 50)), (LOSSY, range(50))):
        report = kvtool.save(snapshot, tmp_path / "a.kv", codec=codec)
        assert report.codec == parse_codec(codec).full_spec() and report.notes == ()
        with kvtool.open(tmp_path / "a.kv") as archive:
            for layer, state in enumerate(snapshot.states):
                for was, got in ((state.k, archive.state(layer).k), (state.v, archive.state(layer).v)):
                    assert [i for i in range(50) if not mx.array_equal(was[:, i], got[:, i]).item()] == list(coded)
    few = kvtool.capture(model, ids(36))
    report = kvtool.save(few, tmp_path / "a.kv", codec=CODES)
    assert report.quality is None and report.notes == (f"{CODES},sink=4,recent=32 keeps all 36 tokens exact: none is coded",)
    assert plain.notes == () and plain.codec == "raw" and kvtool.save(few, tmp_path / "a.kv", codec=CODES, recent=31).notes == ()


@pytest.mark.parametrize(("sink", "recent"), [(4, 4), (10, 0), (0, 10), (9, 1), (3, 0), (100, 100)])
def test_fewer_rows_than_sink_and_recent(sink: int, recent: int, tmp_path: Path) -> None:
    model, count = tiny("llama", "float16"), 7
    snapshot = kvtool.capture(model, ids(count))
    report = kvtool.save(snapshot, tmp_path / "a.kv", codec=LOSSY, sink=sink, recent=recent)
    coded = max(0, count - sink - recent)
    with kvtool.open(tmp_path / "a.kv") as archive:
        back = archive.state(1)
    exact = [mx.array_equal(back.k[:, i], snapshot.states[1].k[:, i]).item() for i in range(count)]
    assert sum(exact) == count - coded and (report.quality is None) == (coded == 0)


@given(
    ranges=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=3),
    sink=st.integers(0, 40),
    recent=st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_cuts_tile_the_rows(ranges: list[tuple[int, int]], sink: int, recent: int) -> None:
    positions, at = [], 0
    for gap, rows in ranges:
        positions.append((at + gap, at + gap + rows))
        at += gap + rows
    rows = sum(b - a for a, b in positions)
    cuts = split_rows(positions, rows, sink, recent, "coded", "exact")
    assert [a for a, _, _ in cuts] == [0, *(b for _, b, _ in cuts[:-1])] and cuts[-1][1] == rows and all(a < b for a, b, _ in cuts)
    where = [p for a, b in positions for p in range(a, b)]
    exact = {i for a, b, kind in cuts if kind == "exact" for i in range(a, b)}
    assert exact == {i for i, p in enumerate(where) if p < sink or i >= rows - recent}


# --- synthetic layers: head sizes, values, frames --------------------------------------------------------------------------------


def synthetic(k: mx.array, v: mx.array, rope: RopeSpec | None = None, problem: str | None = None, start: int = 0) -> Snapshot:
    """A snapshot of one full layer with these keys and values, (H, S, D) each."""
    rows = k.shape[1]
    probes = (
        CacheProbe(
            "KVCache",
            "full",
            k=RoleProbe(k.shape[0], k.shape[2], k.dtype, rope, problem),
            v=RoleProbe(v.shape[0], v.shape[2], v.dtype, None),
        ),
    )
    states = (CacheState("KVCache", "full", offset=start + rows, positions=((start, start + rows),), k=k, v=v),)
    return Snapshot(tiny("llama").info, None, rows, states, probes)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize(("dim", "kept"), [(7, True), (0, True), (1, True), (2, False), (12, False), (80, False), (96, False)])
def test_head_sizes_a_codec_does_not_take_stay_raw(dim: int, kept: bool, tmp_path: Path) -> None:
    snapshot = synthetic(normal(2, 20, 16), normal(2, 20, dim, seed=1) if dim else mx.zeros((2, 20, 0)))
    report = kvtool.save(snapshot, tmp_path / "a.kv", codec=LOSSY)
    assert report.kept_raw == ((f"0.v: head_dim {dim}",) if kept else ())
    with kvtool.open(tmp_path / "a.kv") as archive:
        back = archive.state(0)
    assert mx.array_equal(back.v, snapshot.states[0].v).item() == kept
    assert 0 < relative(snapshot.states[0].k, back.k) < FOUR_BITS


def test_recurrent_state_is_kept_and_reported(tmp_path: Path) -> None:
    model = tiny("lfm2")
    report = kvtool.save(kvtool.capture(model, ids(20)), tmp_path / "a.kv", codec=LOSSY)
    assert report.kept_raw == ("0: recurrent state", "2: recurrent state")
    back = kvtool.load(tmp_path / "a.kv", model)
    live = kvtool.capture(model, ids(20)).states
    assert mx.array_equal(back.cache[0].cache[0][0], live[0].arrays[0]).item()


ROPE = RopeSpec("default", 16, base=10000.0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_frames_decode_to_the_same_keys(dtype: str, tmp_path: Path) -> None:
    # Eight bits leave 1e-4 of the energy, so that a wrong rotation (error of the order of 1) cannot hide; 16 bits of the cache add 6e-6.
    k = normal(2, 50, 16).astype({"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[dtype])
    back = {}
    for frame in ("pre", "post"):
        kvtool.save(synthetic(k, k, ROPE, start=0), tmp_path / "a.kv", codec="rvq-4+4,sink=0,recent=0", frame=frame)
        with kvtool.open(tmp_path / "a.kv") as archive:
            assert [r.segments[0].frame for r in roles(archive.manifest.layers)] == [frame, "post"]
            back[frame] = archive.state(0).k
        assert relative(k, back[frame]) < 4e-4
    assert relative(back["post"], back["pre"]) < 8e-4
    assert not mx.array_equal(back["post"], back["pre"]).item()


@pytest.mark.parametrize("frame", ["pre", "post"])
def test_many_blocks_are_one_array(frame: str, tmp_path: Path) -> None:
    # 256 values a token: four blocks of tokens, whose keys grow, so that one block's error cannot stand for another's.
    k = normal(8, 3500, 32) * mx.arange(1, 3501)[None, :, None] / 1000
    assert k.size > 3 * BLOCK_VALUES
    snapshot = synthetic(k, k, RopeSpec("default", 32, base=10000.0))
    report = kvtool.save(snapshot, tmp_path / "a.kv", codec="rvq-4+4,sink=0,recent=0", frame=frame)
    with kvtool.open(tmp_path / "a.kv") as archive:
        back = archive.state(0).k
    error = ((f64(k) - f64(back)) ** 2).sum() / (f64(k) ** 2).sum()
    assert error < 4e-4 and report.quality["k_relative_error"] == pytest.approx(error, rel=1e-3)
    # Each row by itself, so that rows of one block cannot hide among the others.
    rows = ((f64(k) - f64(back)) ** 2).sum((0, 2)) / (f64(k) ** 2).sum((0, 2))
    assert rows.max() < 2e-3


def test_a_frame_that_cannot_be_is_said(tmp_path: Path) -> None:
    k = normal(2, 30, 16)
    report = kvtool.save(synthetic(k, k, None, "SomeRoPE: not known"), tmp_path / "a.kv", codec=LOSSY, frame="pre")
    assert report.kept_post == ("0.k: SomeRoPE: not known",)
    with kvtool.open(tmp_path / "a.kv") as archive:
        assert archive.manifest.layers[0].k.segments[0].frame == "post"
        assert relative(k, archive.state(0).k) < FOUR_BITS


def test_a_key_near_the_end_of_float16_does_not_become_infinite(tmp_path: Path) -> None:
    k = mx.clip(normal(1, 40, 16) * 40000, -65504, 65504).astype(mx.float16)
    for frame in ("pre", "post"):
        kvtool.save(
            synthetic(k, normal(1, 40, 16).astype(mx.float16), ROPE), tmp_path / "a.kv", codec="rabitq,sink=0,recent=0", frame=frame
        )
        with kvtool.open(tmp_path / "a.kv") as archive:
            assert mx.all(mx.isfinite(archive.state(0).k)).item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("role", ["k", "v"])
def test_values_a_codec_cannot_take(bad: float, role: str, tmp_path: Path) -> None:
    values = {"k": normal(2, 20, 16), "v": normal(2, 20, 16, seed=1)}
    values[role][1, 7, 3] = bad
    old = saved(tiny("llama"), tmp_path / "old.kv", 5).read_bytes()
    for codec in (LOSSY, "rabitq,sink=0,recent=0", f"{CODES},recent=4"):
        for target in ("new.kv", "old.kv"):
            with pytest.raises(ValueError, match="raw"):
                kvtool.save(synthetic(values["k"], values["v"], ROPE), tmp_path / target, codec=codec)
    assert os.listdir(tmp_path) == ["old.kv"] and (tmp_path / "old.kv").read_bytes() == old
    kvtool.save(synthetic(values["k"], values["v"], ROPE), tmp_path / "raw.kv", codec="raw")
    with kvtool.open(tmp_path / "raw.kv") as archive:
        back = getattr(archive.state(0), role)
    assert np.array_equal(f64(back), f64(values[role]), equal_nan=True)


@pytest.mark.parametrize("value", [65505.0, -1e30, float("nan")])
def test_exact_rows_beyond_float16(value: float, tmp_path: Path) -> None:
    k = normal(2, 20, 16)
    k[0, 1, 3] = value
    with pytest.raises(ValueError, match=r"positions 0 to 3 .*beyond float16"):
        kvtool.save(synthetic(k, normal(2, 20, 16)), tmp_path / "a.kv", codec=f"k={CODES},v=raw")
    assert os.listdir(tmp_path) == []
    if value == value:
        # The cache's own range holds it: bfloat16 rows stay bfloat16, float32 ones have the codec.
        for plain, options in ((k.astype(mx.bfloat16), {"sink": 4}), (k, {})):
            kvtool.save(synthetic(plain, normal(2, 20, 16)), tmp_path / "a.kv", codec=f"k={CODES},v=raw,sink=0,recent=0", **options)
            with kvtool.open(tmp_path / "a.kv") as archive:
                assert relative(plain[0, 1], archive.state(0).k[0, 1]) < 0.2


# --- reports ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", [LOSSY, "rvq-4,frame=pre,sink=0,recent=0", "rabitq,recent=5", "k=rabitq,v=rvq-2+2,sink=2,recent=5", "k=raw,v=rvq-2,recent=0"]
)
def test_quality_record_is_the_error_that_a_reader_finds(codec: str, tmp_path: Path) -> None:
    model = tiny("gemma3_text")
    snapshot = kvtool.capture(model, ids(60))
    report = kvtool.save(snapshot, tmp_path / "a.kv", codec=codec)
    with kvtool.open(tmp_path / "a.kv") as archive:
        assert archive.manifest.quality == (report.quality,)
        record, plan = report.quality, parse_codec(codec)
        assert record["step"] == "encode" and record["codec"] == report.codec == plan.full_spec() and parse_codec(record["codec"]) == plan
        for name in "kv":
            if codec.startswith("k=raw") and name == "k":
                assert "k_relative_error" not in record
                continue
            error = energy = 0.0
            for layer, state in enumerate(snapshot.states):
                value, back = f64(getattr(state, name)), f64(getattr(archive.state(layer), name))
                rows = slice(0, None)
                segments = [
                    s for s in getattr(archive.manifest.layers[layer], name).segments if archive.manifest.codecs[s.codec].id != "raw"
                ]
                assert len(segments) == 1
                rows = slice(*segments[0].rows)
                e, n = ((value - back)[:, rows] ** 2).sum(), (value[:, rows] ** 2).sum()
                # Four and three digits are recorded; float32 sums and the rotation back add 1e-6.
                assert record[f"{name}_by_layer"][str(layer)] == pytest.approx(e / n, rel=6e-3)
                error, energy = error + e, energy + n
            assert record[f"{name}_relative_error"] == pytest.approx(error / energy, rel=1e-3)


def test_report_and_file_agree(tmp_path: Path) -> None:
    model = tiny("gemma3_text")
    snapshot = kvtool.capture(model, ids(40))
    sizes = [leaf for _, leaf in leaves(snapshot.states)]
    values = sum(r.size for s in sizes for r in (s.k, s.v))
    for codec in ("raw", LOSSY):
        report = kvtool.save(snapshot, tmp_path / "a.kv", codec=codec)
        assert report.file_bytes == os.stat(tmp_path / "a.kv").st_size
        assert (report.cache_bytes, report.fp16_bytes) == (4 * values, 2 * values)
        assert report.tokens == snapshot.length and report.path == str(tmp_path / "a.kv")
        with open_container(tmp_path / "a.kv") as reader:
            padded = sum(info.padded for info in reader.tensors.values())
            assert report.file_bytes == reader.header_bytes + padded
            assert reader.manifest.length == report.tokens and reader.manifest.tokens.ids == snapshot.tokens
            assert reader.manifest.model == model.info
    assert report.codec == LOSSY
    json.dumps(report.quality)


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    model = tiny("qwen3_next")
    for codec in ("raw", f"{CODES},sink=2,recent=0", "rabitq,sink=0,recent=0"):
        for name in ("a.kv", "b.kv"):
            kvtool.save(kvtool.capture(model, ids(30)), tmp_path / name, codec=codec)
        assert (tmp_path / "a.kv").read_bytes() == (tmp_path / "b.kv").read_bytes()


def test_compression_changes_no_value(tmp_path: Path) -> None:
    k = mx.concatenate([normal(2, 30, 16), mx.zeros((2, 400, 16))], axis=1)
    files = {}
    for compress in (True, False):
        report = kvtool.save(synthetic(k, k, ROPE), tmp_path / f"{compress}.kv", compress=compress)
        files[compress] = report.file_bytes
        with kvtool.open(tmp_path / f"{compress}.kv") as archive:
            assert {t.encoding for t in archive.reader.tensors.values()} == {"zstd" if compress else "none"}
            assert mx.array_equal(archive.state(0).k, k).item() and mx.array_equal(archive.state(0).v, k).item()
    assert files[True] < files[False] / 2


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    model, seen = tiny("llama"), {"capture": [], "save": [], "load": []}
    snapshot = kvtool.capture(model, ids(20), progress=lambda *a: seen["capture"].append(a))
    kvtool.save(snapshot, tmp_path / "a.kv", progress=lambda *a: seen["save"].append(a))
    kvtool.load(tmp_path / "a.kv", model, progress=lambda *a: seen["load"].append(a))
    for steps in seen.values():
        assert steps[-1][0] == steps[-1][1] > 0 and [d for d, _ in steps] == sorted(d for d, _ in steps)


# --- files that change -----------------------------------------------------------------------------------------------------------


def test_source_changed_after_the_save(tmp_path: Path) -> None:
    model, tokens = tiny("llama"), ids(20 + sum(GO_ON))
    cache = fill(model, tokens[:20])
    snapshot = kvtool.capture(model, cache=cache, tokens=tokens[:20])
    # The live cache goes on, and is written over, between capture and save and after the save.
    expected = run(model, cache, tokens[20:], GO_ON)
    for c in cache:
        c.keys[:] = 7.0
    kvtool.save(snapshot, tmp_path / "a.kv")
    for c in cache:
        c.values[:] = 7.0
    assert equal(run(model, kvtool.load(tmp_path / "a.kv", model).cache, tokens[20:], GO_ON), expected)


@pytest.mark.parametrize("codec", ["raw", LOSSY])
def test_a_file_replaced_while_open_gives_the_old_bytes(codec: str, tmp_path: Path) -> None:
    model = tiny("llama")
    path = saved(model, tmp_path / "a.kv", 20, codec=codec)
    with kvtool.open(path) as archive:
        expected = [f64(archive.state(i).k) for i in range(2)]
    with kvtool.open(path) as archive:
        first = archive.load(model)
        kvtool.save(kvtool.capture(model, ids(20, seed=5)), path, codec=codec)
        assert all(np.array_equal(f64(archive.state(i).k), expected[i]) for i in range(2))
    os.unlink(path)
    assert np.array_equal(f64(first.cache[0].keys[0, :, :20]), expected[0])


def test_the_path_may_be_a_str_or_a_path(tmp_path: Path) -> None:
    model = tiny("llama")
    report: SaveReport = kvtool.save(kvtool.capture(model, "hello"), str(tmp_path / "a.kv"))
    assert kvtool.load(str(tmp_path / "a.kv"), model).usable == report.tokens == 5


# --- what capture and save refuse ------------------------------------------------------------------------------------------------


def test_token_ids_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = fill(model, ids(10))
    for wrong in ([VOCAB], [-1], [3, VOCAB + 5]):
        with pytest.raises(ValueError, match=f"ids 0 to {VOCAB - 1}"):
            kvtool.capture(model, wrong)
        with pytest.raises(ValueError, match=f"ids 0 to {VOCAB - 1}"):
            kvtool.capture(model, cache=cache, tokens=[*ids(9), wrong[-1]])
    for count in (8, 9, 12):
        with pytest.raises(IncompatibleError, match=f"holds 10 tokens, but {count} token ids"):
            kvtool.capture(model, cache=cache, tokens=ids(count))
    for prompt in ("", []):
        with pytest.raises(ValueError, match="no tokens"):
            kvtool.capture(model, prompt)
    for arguments in ({}, {"prompt": [1], "cache": cache}):
        with pytest.raises(ValueError, match="either"):
            kvtool.capture(model, **arguments)
    assert kvtool.capture(model, np.array([1, 2])).length == kvtool.capture(model, mx.array([1, 2])).length == 2
    assert kvtool.capture(model, cache=cache, tokens=ids(11)).tokens == tuple(ids(11))


def test_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    model = tiny("llama")

    class Gaps:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 90}

    assert kvtool.capture(replace(model, tokenizer=Gaps()), [90, 3]).length == 2


def test_a_vocabulary_is_read_once_until_it_grows() -> None:
    class Counted:
        def __init__(self) -> None:
            self.tokens, self.read = {"a": 0, "b": 7}, 0

        def __len__(self) -> int:
            return len(self.tokens)

        def get_vocab(self) -> dict[str, int]:
            self.read += 1
            return dict(self.tokens)

    tokenizer, other = Counted(), Counted()
    model = replace(tiny("llama"), tokenizer=tokenizer)
    assert [vocabulary(model) for _ in range(3)] == [8, 8, 8] and tokenizer.read == 1
    tokenizer.tokens["c"] = 9
    assert vocabulary(model) == vocabulary(model) == 10 and tokenizer.read == 2
    assert vocabulary(replace(model, tokenizer=other)) == 8 and other.read == 1

    class Unhashable(Counted):
        __hash__ = None  # type: ignore[assignment]

    third = Unhashable()
    assert [vocabulary(replace(model, tokenizer=third)) for _ in range(2)] == [8, 8] and third.read == 2


def test_caches_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    for other in (twin("llama", num_hidden_layers=3), twin("llama", num_key_value_heads=4), twin("llama", head_dim=16)):
        with pytest.raises(IncompatibleError, match=r"does not fit|layers"):
            kvtool.capture(model, cache=fill(other, ids(6)), tokens=ids(6))
    short = fill(model, ids(6))
    with pytest.raises(IncompatibleError, match="layer"):
        kvtool.capture(model, cache=short[:1], tokens=ids(6))
    short[1].offset = 4
    with pytest.raises(IncompatibleError, match="disagree"):
        kvtool.capture(model, cache=short)


def test_empty_caches_are_a_file_too(tmp_path: Path) -> None:
    model, tokens = tiny("gemma3_text"), ids(sum(GO_ON))
    kvtool.save(kvtool.capture(model, cache=make_prompt_cache(model.model), tokens=[]), tmp_path / "a.kv", codec=LOSSY)
    restored = kvtool.load(tmp_path / "a.kv", model)
    assert restored.usable == 0 and digests(tmp_path / "a.kv") == {}
    assert equal(run(model, restored.cache, tokens, GO_ON), run(model, make_prompt_cache(model.model), tokens, GO_ON))
    assert isinstance(restored.cache[1], KVCache)


@pytest.mark.parametrize("options", [{"codec": "zip"}, {"sink": -1}, {"recent": -3}, {"frame": "both"}, {"codec": "rvq-2+2,sink=-1"}])
def test_options_that_do_not_exist(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        kvtool.save(kvtool.capture(tiny("llama"), [1, 2]), tmp_path / "a.kv", **options)
    assert os.listdir(tmp_path) == []


@given(count=st.integers(1, 60), sink=st.integers(0, 20), recent=st.integers(0, 20), frame=st.sampled_from(["pre", "post", None]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_split_loads_and_keeps_its_exact_rows(count: int, sink: int, recent: int, frame: str | None, tmp_path: Path) -> None:
    model = tiny("gpt_oss")
    snapshot = kvtool.capture(model, ids(count))
    kvtool.save(snapshot, tmp_path / "a.kv", codec="rvq-4", sink=sink, recent=recent, frame=frame)
    restored = kvtool.load(tmp_path / "a.kv", model)
    assert restored.usable == snapshot.length
    with kvtool.open(tmp_path / "a.kv") as archive:
        for layer, state in enumerate(snapshot.states):
            if not state.rows:
                continue
            where = np.concatenate([np.arange(a, b) for a, b in state.positions])
            exact = (where < sink) | (np.arange(state.rows) >= state.rows - recent)
            for name in "kv":
                value, back = f64(getattr(state, name).astype(mx.float16)), f64(getattr(archive.state(layer), name))
                assert np.array_equal(value[:, exact], back[:, exact])
