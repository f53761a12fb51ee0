"""A captured and rebuilt cache continues bit for bit like one that was never touched, for every cache class of mlx-lm."""

import functools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from formats.errors import IncompatibleError
from kvtool.probe import probe_model
from kvtool.snapshot import CacheState, Quantized, build_caches, check_against, leaves, length_of, take_states
from tests.tiny_random import FAMILIES, WINDOW, build, tokens

WINDOWED = [f for f, (_, _, classes) in FAMILIES.items() if {"RotatingKVCache", "ChunkedKVCache"} & set(classes)]
AROUND = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW)
# Single tokens go through the ring, chunks through concatenation; WINDOW + 1 passes the window in one update.
PLAN = (1, 1, 3, 1, WINDOW + 1, 1, 2)

model_of = functools.lru_cache(maxsize=None)(build)


def run(model: nn.Module, cache: list[Any], ids: mx.array, plan: Iterable[int]) -> list[mx.array]:
    """Logits of each chunk of `plan`, taken one after the other from the start of `ids`."""
    logits, start = [], 0
    for count in plan:
        logits.append(model(ids[:, start : start + count], cache=cache))
        mx.eval(logits[-1])
        start += count
    return logits


def equal(a: Sequence[mx.array], b: Sequence[mx.array]) -> bool:
    return len(a) == len(b) > 0 and all(mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


def filled(model: nn.Module, count: int, cache: list[Any] | None = None) -> list[Any]:
    cache = make_prompt_cache(model) if cache is None else cache
    run(model, cache, tokens(count), [count])
    return cache


def splits(total: int) -> dict[str, list[int]]:
    return {"one": [total], "several": [total // 3, total - total // 3 - 2, 2], "steps": [total - 5] + [1] * 5}


def assert_continues(model: nn.Module, prefill: list[int], make: Any = make_prompt_cache) -> tuple[CacheState, ...]:
    """Uninterrupted, captured-and-going-on, and restored (twice from the same states) give the same logits."""
    total = sum(prefill)
    ids = tokens(total + sum(PLAN))
    uninterrupted = run(model, make(model), ids, [*prefill, *PLAN])[len(prefill) :]
    source = make(model)
    run(model, source, ids, prefill)
    states = take_states(source, length=total)
    assert length_of(states) == total
    for cache in (source, build_caches(states), build_caches(states)):
        assert equal(run(model, cache, ids[:, total:], PLAN), uninterrupted)
    return states


@pytest.mark.parametrize("split", ["one", "several", "steps"])
@pytest.mark.parametrize("total", AROUND)
@pytest.mark.parametrize("family", WINDOWED)
def test_continues_around_the_window(family: str, total: int, split: str) -> None:
    states = assert_continues(model_of(family), splits(total)[split])
    for state in states:
        start = 0 if state.attention == "full" else max(0, total - (WINDOW - 1 if state.attention == "sliding" else WINDOW))
        assert state.positions == ((start, total),)
        assert state.rows == state.k.shape[1] == state.v.shape[1] == total - start


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WINDOWED)))
def test_continues(family: str) -> None:
    assert_continues(model_of(family), [12, 1, 7])


@pytest.mark.parametrize("split", ["one", "several", "steps"])
@pytest.mark.parametrize("total", AROUND)
def test_continues_with_max_kv_size(total: int, split: str) -> None:
    states = assert_continues(model_of("qwen3"), splits(total)[split], lambda model: make_prompt_cache(model, max_kv_size=WINDOW))
    ranges = ((0, total),) if total < WINDOW else ((0, 4), (total - (WINDOW - 5), total))
    assert all(s.positions == ranges and s.params["keep"] == 4 and s.window == WINDOW for s in states)


@pytest.mark.parametrize(("bits", "group_size"), [(2, 64), (4, 32), (8, 64)])
@pytest.mark.parametrize("late", [False, True])
def test_continues_quantized(bits: int, group_size: int, late: bool) -> None:
    model = model_of("qwen3")

    def make(model: nn.Module) -> list[Any]:
        caches = [QuantizedKVCache(group_size, bits) for _ in model.layers]
        if not late:
            return caches
        # to_quantized converts the whole buffer of 256 rows, 9 of them live.
        head = filled(model, 9)
        return [c.to_quantized(group_size, bits) for c in head]

    prefill = [5, 20]
    ids = tokens(sum(prefill + list(PLAN)))
    uninterrupted = run(model, make(model), ids, [*prefill, *PLAN])[len(prefill) :]
    source = make(model)
    run(model, source, ids, prefill)
    states = take_states(source)
    assert all(isinstance(s.k, Quantized) and s.k.shape == (2, s.offset, 64) and s.k.dtype == mx.float32 for s in states)
    assert all(s.cls == "QuantizedKVCache" and s.offset == 25 + 9 * late for s in states)
    assert equal(run(model, build_caches(states), ids[:, 25:], PLAN), uninterrupted)
    assert equal(run(model, source, ids[:, 25:], PLAN), uninterrupted)


def test_quantized_rows_dequantize_to_what_was_cached() -> None:
    cache = QuantizedKVCache(group_size=32, bits=8)
    keys = mx.random.normal((1, 2, 300, 64), key=mx.random.key(0))
    cache.update_and_fetch(keys, keys)
    (state,) = take_states([cache])
    step = (keys.reshape(-1, 32).max(axis=1) - keys.reshape(-1, 32).min(axis=1)).max().item() / 255
    # Rounding to the nearest of 256 levels, and mlx moves the scale so that zero is a level: one step at most.
    assert mx.abs(state.k.dequantize() - keys[0]).max().item() <= step


def test_only_live_rows() -> None:
    """300 tokens lie in 512 rows; trimmed rows stay in mlx-lm's buffer, and must not appear."""
    model = model_of("llama")
    cache = filled(model, 300)
    assert cache[0].keys.shape[2] == 512
    (state, _) = take_states(cache)
    assert state.k.shape == (2, 300, 8)
    assert state.positions == ((0, 300),)
    assert mx.array_equal(state.k, cache[0].keys[0, :, :300])
    assert trim_prompt_cache(cache, 290) == 290
    assert [s.k.shape[1] for s in take_states(cache)] == [10, 10]
    trim_prompt_cache(cache, 10)
    empty = take_states(cache)
    assert all(s.k is None and s.v is None and s.offset == 0 and s.positions == () for s in empty)
    ids = tokens(9)
    assert equal(run(model, build_caches(empty), ids, [9]), run(model, make_prompt_cache(model), ids, [9]))


def test_trimmed_rows_of_concatenate_do_not_come_back() -> None:
    """mlx-lm appends after the trimmed rows; the restored cache goes on like a trimmed KVCache."""
    model = model_of("llama")
    concatenating = filled(model, 20, [ConcatenateKVCache() for _ in model.layers])
    reference = filled(model, 20)
    trim_prompt_cache(concatenating, 8)
    trim_prompt_cache(reference, 8)
    states = take_states(concatenating)
    assert [(s.cls, s.offset, s.k.shape[1]) for s in states] == [("ConcatenateKVCache", 12, 12)] * 2
    ids = tokens(sum(PLAN))
    expected = run(model, reference, ids, PLAN)
    assert equal(run(model, build_caches(states), ids, PLAN), expected)
    assert not equal(run(model, concatenating, ids, PLAN), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_empty(family: str) -> None:
    model = model_of(family)
    states = take_states(make_prompt_cache(model))
    assert length_of(states) == 0
    assert all(leaf.k is None and leaf.offset == 0 and all(a is None for a in leaf.arrays) for _, leaf in leaves(states))
    check_against(states, probe_model(model))
    ids = tokens(sum(PLAN))
    assert equal(run(model, build_caches(states), ids, PLAN), run(model, make_prompt_cache(model), ids, PLAN))


def test_every_class_empty() -> None:
    caches = [KVCache(), QuantizedKVCache(32, 4), RotatingKVCache(8, keep=2), ChunkedKVCache(8), ConcatenateKVCache(), ArraysCache(2)]
    caches.append(CacheList(KVCache(), CacheList(ArraysCache(1), KVCache())))
    states = take_states(caches)
    assert [type(c) for c in build_caches(states)] == [type(c) for c in caches]
    assert states[2].params == {"max_size": 8, "keep": 2, "ring": 0}
    assert build_caches(states)[6].caches[1].caches[1].offset == 0


def test_nested_list() -> None:
    keys = mx.random.normal((1, 2, 5, 8), key=mx.random.key(0))
    inner, outer = KVCache(), KVCache()
    for cache in (inner, outer):
        cache.update_and_fetch(keys, keys[..., :4])
    arrays = ArraysCache(2)
    arrays[1] = keys
    states = take_states([CacheList(outer, CacheList(arrays, inner))])
    assert [(where, leaf.cls, leaf.offset) for where, leaf in leaves(states)] == [
        ("layer 0.0", "KVCache", 5),
        ("layer 0.1.0", "ArraysCache", 5),
        ("layer 0.1.1", "KVCache", 5),
    ]
    (restored,) = build_caches(states)
    assert restored.caches[1].caches[0][0] is None
    assert mx.array_equal(restored.caches[1].caches[0][1], keys)
    assert mx.array_equal(restored.caches[1].caches[1].keys_and_values()[1], keys[..., :4])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4", "falcon_h1"])
def test_snapshot_and_cache_are_independent(family: str) -> None:
    """In-place updates of the source, of a restored cache, and of a second one do not reach the snapshot or each other."""
    model = model_of(family)
    source = filled(model, 2 * WINDOW + 3)
    states = take_states(source)
    held = [a for _, leaf in leaves(states) for a in (leaf.k, leaf.v, *leaf.arrays) if a is not None]
    copies = [mx.array(memoryview(mx.contiguous(a))) for a in held]
    before = [mx.array(memoryview(mx.contiguous(c.keys))) for c in source] if family != "falcon_h1" else []
    ids = tokens(30, seed=1)
    restored = build_caches(states)
    run(model, restored, ids, [1] * 20 + [3, 7])
    assert all(mx.array_equal(c.keys, b) for c, b in zip(source, before, strict=False))
    run(model, source, ids, [1] * 20 + [3, 7])
    assert equal(held, copies)


def test_taking_a_plain_cache_copies_nothing() -> None:
    """The states are views: capturing a 16 MiB cache must not need another 16 MiB."""
    cache = KVCache()
    keys = mx.zeros((1, 4, 4096, 128))
    cache.update_and_fetch(keys, keys)
    mx.eval(cache.state[:2])
    del keys
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    states = take_states([cache])
    assert states[0].k.nbytes == 4 * 4096 * 128 * 4
    assert mx.get_peak_memory() - before < 1 << 20


def test_states_cross_threads() -> None:
    """Lazy arrays belong to their thread's stream; states and rebuilt caches are evaluated."""
    model = model_of("gemma3_text")
    box: dict[str, Any] = {}

    def capture() -> None:
        cache = make_prompt_cache(model)
        model(tokens(20), cache=cache)
        box["caches"] = build_caches(take_states(cache))
        box["states"] = take_states(cache)

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    ids = tokens(8, seed=2)
    assert equal(run(model, build_caches(box["states"]), ids, [1, 7]), run(model, box["caches"], ids, [1, 7]))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_dtype_and_sizes_are_kept(dtype: mx.Dtype) -> None:
    """MLA: the K slot has 16 columns, the V slot 8; layers may differ in head size."""
    cache = [KVCache(), RotatingKVCache(8)]
    for c, dims in zip(cache, ((16, 8), (256, 512)), strict=True):
        k, v = (mx.random.normal((1, 1, 11, d), key=mx.random.key(d)).astype(dtype) for d in dims)
        c.update_and_fetch(k, v)
    states = take_states(cache)
    assert [(s.k.shape, s.v.shape) for s in states] == [((1, 11, 16), (1, 11, 8)), ((1, 7, 256), (1, 7, 512))]
    assert all(a.dtype == dtype for s in states for a in (s.k, s.v))
    assert all(a.dtype == dtype for c in build_caches(states) for a in (c.keys, c.values))


def test_values_without_columns() -> None:
    """The indexer of minimax_m3 caches keys only: values of width 0."""
    cache = KVCache()
    keys = mx.random.normal((1, 1, 5, 4), key=mx.random.key(0))
    cache.update_and_fetch(keys, keys[..., :0])
    (state,) = take_states([cache])
    assert (state.k.shape, state.v.shape) == ((1, 5, 4), (1, 5, 0))
    (restored,) = build_caches([state])
    fetched, empty = restored.update_and_fetch(keys, keys[..., :0])
    assert empty.shape == (1, 1, 10, 0)
    assert mx.array_equal(fetched, mx.concatenate([keys, keys], axis=2))


def test_rows_of_equal_length_in_plain_caches() -> None:
    model = model_of("gemma3_text")
    both = mx.concatenate([tokens(20), tokens(20, seed=1)])
    cache = make_prompt_cache(model)
    model(both, cache=cache)
    with pytest.raises(ValueError, match=r"layer 0 holds 2 sequences; pass row=0\.\.1"):
        take_states(cache)
    for row in (-1, 2):
        with pytest.raises(ValueError, match=rf"row must be in 0\.\.1 \(layer 0 holds 2\), but got {row}"):
            take_states(cache, row=row)
    alone = filled(model, 20)
    for ours, theirs in zip(take_states(cache, row=0), take_states(alone), strict=True):
        assert ours.positions == theirs.positions
        # A product over two sequences may sum in another order than over one; four float32 layers carry that on.
        assert mx.allclose(ours.k, theirs.k, atol=1e-4, rtol=1e-4)


class LayerCache:
    """A class of a user, or of a model file of mlx-lm."""


class Subclass(KVCache):
    """May keep its rows anywhere."""


@pytest.mark.parametrize("cache", [LayerCache(), Subclass(), None])
def test_unknown_class_is_named(cache: Any) -> None:
    with pytest.raises(IncompatibleError, match=rf"layer 1: cache class \S*{type(cache).__name__} is not known"):
        take_states([KVCache(), cache])
    with pytest.raises(IncompatibleError, match=rf"layer 0\.1: cache class \S*{type(cache).__name__} is not known"):
        take_states([CacheList(KVCache(), cache)])


def test_unknown_state_is_named() -> None:
    with pytest.raises(IncompatibleError, match=r"layer 0: cache class LayerCache is not known"):
        build_caches([CacheState("LayerCache", "full")])


def test_layers_that_disagree_are_named() -> None:
    cache = filled(model_of("qwen3"), 20)
    cache[1].trim(1)
    with pytest.raises(IncompatibleError, match="disagree on the tokens seen: 19 in layer 1; 20 in layer 0"):
        take_states(cache)
    cache = filled(model_of("falcon_h1"), 20)
    cache[0].caches[1].trim(3)
    with pytest.raises(IncompatibleError, match=r"17 in layer 0\.1; 20 in layer 1\.1"):
        take_states(cache)
    with pytest.raises(IncompatibleError, match="0 in layer 0; 20 in layer 1"):
        take_states([KVCache(), filled(model_of("qwen3"), 20)[1]])


def test_recurrent_state_needs_its_length() -> None:
    model = model_of("mamba")
    cache = filled(model, 20)
    with pytest.raises(ValueError, match="pass length"):
        take_states(cache)
    assert length_of(take_states(cache, length=20)) == 20
    mixed = filled(model_of("qwen3_next"), 20)
    assert [s.offset for s in take_states(mixed)] == [20] * 4
    with pytest.raises(ValueError, match="have seen 20 tokens, but length is 19"):
        take_states(mixed, length=19)


def test_window_trimmed_too_far_is_refused() -> None:
    """`trim` on a full window (mlx-lm says it is not trimmable) leaves an index that means nothing."""
    model = model_of("llama-sliding")
    cache = filled(model, 2 * WINDOW)
    for c in cache:
        c.trim(3)
    with pytest.raises(IncompatibleError, match=r"layer 0: RotatingKVCache .* 32 rows, index 29, offset 29"):
        take_states(cache)


@pytest.mark.parametrize("broken", [{"offset": 21}, {"offset": 300}, {"offset": -1}])
def test_offset_beyond_the_rows_is_refused(broken: dict[str, int]) -> None:
    cache = ConcatenateKVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 20, 4)), mx.zeros((1, 1, 20, 4)))
    cache.offset = broken["offset"]
    with pytest.raises(IncompatibleError, match=f"{broken['offset']} rows are live"):
        take_states([cache])


def _state(**changes: Any) -> CacheState:
    cache = RotatingKVCache(8, keep=2)
    cache.update_and_fetch(mx.zeros((1, 1, 20, 4)), mx.zeros((1, 1, 20, 4)))
    return replace(take_states([cache])[0], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": None}, "7 rows, but the keys are missing"),
        ({"v": mx.zeros((1, 6, 4))}, r"needs values of array \(H, 7, D\), but they are array \(1, 6, 4\)"),
        ({"v": mx.zeros((7, 4))}, r"needs values of array \(H, 7, D\)"),
        ({"offset": 21}, r"with 21 tokens seen cannot hold the positions \[\(0, 2\), \(15, 20\)\]"),
        ({"params": {"max_size": 8, "keep": 2, "ring": 2}}, "ring 2 of 8 slots cannot hold 7 rows"),
        ({"params": {"max_size": 8, "keep": 2, "ring": 9}}, "ring 9 of 8"),
        ({"params": {"max_size": 9, "keep": 2, "ring": 9}}, "ring 9 of 9 slots cannot hold 7 rows"),
        ({"cls": "QuantizedKVCache"}, "QuantizedKVCache needs keys of Quantized"),
        ({"cls": "KVCache", "attention": "full"}, "KVCache with 20 tokens seen cannot hold"),
    ],
)
def test_states_that_no_cache_can_hold_are_refused(changes: dict[str, Any], message: str) -> None:
    build_caches([_state()])
    with pytest.raises(IncompatibleError, match="layer 0: .*" + message):
        build_caches([_state(**changes)])


@pytest.mark.parametrize("family", FAMILIES)
def test_own_model_fits(family: str) -> None:
    model = model_of(family)
    check_against(take_states(filled(model, 20), length=20), probe_model(model))


def test_same_rows_in_another_class_fit() -> None:
    model = model_of("qwen3")
    for make in (KVCache, ConcatenateKVCache, lambda: QuantizedKVCache(32, 4)):
        check_against(take_states(filled(model, 20, [make() for _ in model.layers])), probe_model(model))


def test_rotating_cache_does_not_fit_a_full_layer() -> None:
    model = model_of("qwen3")
    states = take_states(filled(model, 20, make_prompt_cache(model, max_kv_size=WINDOW)))
    with pytest.raises(IncompatibleError, match=r"sliding \(RotatingKVCache, 16\), not full \(KVCache\) in layer 0, 1$"):
        check_against(states, probe_model(model))


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"num_hidden_layers": 3}, "the cache has 2 layers, the model 3"),
        ("llama", {"num_key_value_heads": 4}, "K heads 2, not 4 in layer 0, 1; V heads 2, not 4 in layer 0, 1"),
        ("llama", {"head_dim": 16}, "K dim 8, not 16 in layer 0, 1; V dim 8, not 16 in layer 0, 1"),
        ("deepseek_v3", {"kv_lora_rank": 24}, "K dim 16, not 24 in layer 0, 1$"),
        ("deepseek_v3", {"qk_rope_head_dim": 16}, "V dim 8, not 16 in layer 0, 1$"),
        ("gemma3_text", {"sliding_window": 32}, "window 16, not 32 in layer 0, 2$"),
        ("gemma3_text", {"sliding_window_pattern": 4}, r"full \(KVCache\), not sliding \(RotatingKVCache, 16\) in layer 1$"),
        ("mamba", {"conv_kernel": 5}, r"state array 0 shape \(3, 48\), not \(4, 48\) in layer 0, 1$"),
        ("falcon_h1", {"mamba_d_state": 16}, r"state array 1 shape \(4, 8, 8\), not \(4, 8, 16\) in layer 0\.0, 1\.0$"),
    ],
)
def test_differing_model_is_refused_by_field(family: str, overrides: dict[str, Any], message: str) -> None:
    states = take_states(filled(model_of(family), 20), length=20)
    with pytest.raises(IncompatibleError, match=message):
        check_against(states, probe_model(build(family, **overrides)))


def test_keep_is_compared() -> None:
    states = [
        replace(s, params={**s.params, "keep": 4}) if s.attention == "sliding" else s for s in take_states(filled(model_of("gpt_oss"), 9))
    ]
    with pytest.raises(IncompatibleError, match=r"keep 4, not 0 in layer 0$"):
        check_against(states, probe_model(model_of("gpt_oss")))
