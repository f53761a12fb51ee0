"""One sequence out of a batch: no padding, its own positions, and the rows and logits it would have had alone.

Logits are compared with a tolerance: a row's products are summed over padded shapes, in another order than alone.
"""

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from formats.errors import IncompatibleError
from kvtool.snapshot import build_caches, leaves, take_states
from tests.tiny_random import VOCAB, WINDOW, build

model_of = functools.lru_cache(maxsize=None)(build)

# float32, 2-4 layers with logits and keys of a few units: sums in another order differ by about 1e-5.
TOLERANCE = 1e-3
LENGTHS = ([3, 9, 20], [40, 5, 17], [WINDOW, WINDOW - 1, WINDOW + 1], [1, 2 * WINDOW, 2], [12, 12, 12])


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def alone(model: Any, ids: list[int]) -> list[Any]:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    return cache


def assert_row(model: Any, batch: list[Any], row: int, ids: list[int]) -> None:
    """The row of `batch` has the rows of `ids` run alone, and continues like it."""
    states, reference = take_states(batch, row=row), alone(model, ids)
    expected = take_states(reference)
    for (where, ours), (_, theirs) in zip(leaves(states), leaves(expected), strict=True):
        assert (ours.cls, ours.offset, ours.positions, ours.window) == (theirs.cls, theirs.offset, theirs.positions, theirs.window), where
        for a, b in zip((ours.k, ours.v, *ours.arrays), (theirs.k, theirs.v, *theirs.arrays), strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.shape == b.shape and mx.allclose(a, b, rtol=0, atol=TOLERANCE).item()), where
    restored = build_caches(states)
    for chunk in ([5], [6, 7, 8], [9], list(range(WINDOW + 1)), [10], [11]):
        ours, theirs = (model(mx.array([chunk]), cache=c) for c in (restored, reference))
        assert mx.allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", ["llama", "llama-sliding", "gemma3_text", "falcon_h1", "qwen3_next", "deepseek_v3"])
def test_ragged_prompts_in_one_chunk(family: str, lengths: list[int]) -> None:
    """mlx-lm's own batch of prompts: right-padded, then rolled by finalize."""
    model, ids = model_of(family), prompts(lengths)
    batch = PromptProcessingBatch(model, [0, 1, 2], [make_prompt_cache(model) for _ in ids])
    batch.prompt([list(p) for p in ids])
    for row, prompt in enumerate(ids):
        assert_row(model, batch.prompt_cache, row, prompt)


@pytest.mark.parametrize("steps", [1, 5, WINDOW + 4])
@pytest.mark.parametrize("chunk", [6, 7])
@pytest.mark.parametrize("family", ["llama-sliding", "gemma3_text", "lfm2"])
def test_ragged_prompts_in_chunks_then_steps(family: str, chunk: int, steps: int) -> None:
    """Whole chunks of padding for the short rows, then the ring: in a full window the oldest row may be padding."""
    model, ids = model_of(family), prompts([40, 5, 17])
    batch = PromptProcessingBatch(model, [0, 1, 2], [make_prompt_cache(model) for _ in ids], prefill_step_size=chunk)
    batch.prompt([list(p) for p in ids])
    for step in range(steps):
        mx.eval(model(mx.array([[step], [step + 1], [step + 2]]), cache=batch.prompt_cache))
    for row, prompt in enumerate(ids):
        assert_row(model, batch.prompt_cache, row, [*prompt, *range(row, row + steps)])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_left_padded_batch(family: str) -> None:
    """Caches made with left padding; the layers' classes differ in gemma3."""
    model, ids = model_of(family), prompts([3, 9, 20])
    padding = [17, 11, 0]
    kinds = {KVCache: BatchKVCache, RotatingKVCache: functools.partial(BatchRotatingKVCache, WINDOW)}
    batch = [kinds[type(c)](left_padding=padding) for c in make_prompt_cache(model)]
    assert [s.offset for s in take_states(batch, row=0)] == [0] * len(batch)
    model(mx.array([[0] * p + i for p, i in zip(padding, ids, strict=True)]), cache=batch)
    for row, prompt in enumerate(ids):
        assert_row(model, batch, row, prompt)
    assert [s.rows for s in take_states(batch, row=0)] == [3] * len(batch)


def test_rows_of_a_running_generator() -> None:
    """Requests that join and leave: merge, extend and filter of both batch classes."""
    model, ids = model_of("gemma3_text"), prompts([3, 21, 40, 7])
    generator = BatchGenerator(model, max_tokens=60, prefill_step_size=16)
    seen: dict[int, list[int]] = {}

    def insert(new: list[list[int]]) -> None:
        for uid, prompt in zip(generator.insert(new), new, strict=True):
            seen[uid] = list(prompt)

    def generate(count: int) -> None:
        for _ in range(count):
            for response in generator.next_generated():
                seen[response.uid].append(response.token)

    def check() -> None:
        caches = generator._generation_batch.prompt_cache
        for row, uid in enumerate(generator._generation_batch.uids):
            offset = take_states(caches, row=row)[0].offset
            # The newest tokens may be sampled, but not run yet.
            assert 0 <= len(seen[uid]) - offset <= 2
            assert_row(model, caches, row, seen[uid][:offset])

    insert(ids[:2])
    generate(4)
    check()
    insert(ids[2:])
    generate(3)
    check()
    generate(WINDOW)
    generator.remove([0])
    check()
    generator.close()


def merged(cls: type, caches: list[Any]) -> Any:
    for i, cache in enumerate(caches):
        if i:
            cache.update_and_fetch(mx.zeros((1, 1, i, 4)), mx.zeros((1, 1, i, 4)))
    return cls.merge(caches)


@pytest.mark.parametrize(("cls", "make"), [(BatchKVCache, KVCache), (BatchRotatingKVCache, lambda: RotatingKVCache(8))])
def test_row_is_required_and_checked(cls: type, make: Any) -> None:
    batch = merged(cls, [make() for _ in range(3)])
    with pytest.raises(ValueError, match=r"layer 0 holds 3 sequences; pass row=0\.\.2"):
        take_states([batch])
    for row in (-1, 3):
        with pytest.raises(ValueError, match=rf"row must be in 0\.\.2 \(layer 0 holds 3\), but got {row}"):
            take_states([batch], row=row)
    assert [take_states([batch], row=row)[0].offset for row in range(3)] == [0, 1, 2]
    assert take_states([merged(cls, [make()])])[0].offset == 0
    with pytest.raises(ValueError, match=r"row must be in 0\.\.0 \(layer 1\.0 holds 1\), but got 1"):
        take_states([batch, CacheList(ArraysCache(1))], row=1)


@pytest.mark.parametrize("cls", [BatchKVCache, functools.partial(BatchRotatingKVCache, 8)])
def test_between_prepare_and_finalize_is_refused(cls: Any) -> None:
    batch = cls(left_padding=[0, 0])
    batch.prepare(lengths=[2, 5], right_padding=[3, 0])
    batch.update_and_fetch(mx.ones((2, 1, 5, 4)), mx.ones((2, 1, 5, 4)))
    with pytest.raises(ValueError, match="layer 0 is between prepare"):
        take_states([batch], row=0)
    batch.finalize()
    assert [take_states([batch], row=row)[0].k.shape for row in (0, 1)] == [(1, 2, 4), (1, 5, 4)]


@pytest.mark.parametrize("cls", [BatchKVCache, functools.partial(BatchRotatingKVCache, 64)])
def test_batch_that_does_not_add_up_is_refused(cls: Any) -> None:
    batch = cls(left_padding=[2, 0])
    batch.update_and_fetch(mx.ones((2, 1, 5, 4)), mx.ones((2, 1, 5, 4)))
    batch.left_padding = mx.array([1, 0])
    with pytest.raises(IncompatibleError, match=r"layer 0: Batch.*KVCache is in a state that cannot be continued: row 0"):
        take_states([batch], row=0)


class Batch:
    """A batch cache of numbered tokens and, independently, the tokens of each row."""

    def __init__(self, cache: Any, count: int) -> None:
        self.cache = cache
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.next_id = 1

    def _new(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def update(self, lengths: list[int], chunk: int) -> None:
        """Right-padded prompts in chunks of at least two tokens (mlx-lm's ring takes no padding), or one step."""
        longest, new = max(lengths), [self._new(n) for n in lengths]
        for ids, more in zip(self.ids, new, strict=True):
            ids += more
        padding = [longest - n for n in lengths]
        padded = np.array([ids + [-7] * p for ids, p in zip(new, padding, strict=True)], np.float32)
        if any(padding):
            self.cache.prepare(lengths=lengths, right_padding=padding)
        if longest > 1 and longest % chunk == 1:
            chunk = longest
        for start in range(0, longest, chunk):
            keys = mx.array(padded[:, None, start : start + chunk, None])
            self.cache.update_and_fetch(mx.repeat(keys, 4, axis=-1), mx.repeat(keys, 2, axis=-1))
        if any(padding):
            self.cache.finalize()

    def check(self, window: int | None) -> None:
        for row, ids in enumerate(self.ids):
            (state,) = take_states([self.cache], row=row)
            start = 0 if window is None or len(ids) < window else len(ids) - window + 1
            assert state.offset == len(ids)
            assert state.positions == (((start, len(ids)),) if ids else ())
            for array in (state.k, state.v):
                assert (array is None and not ids) or np.array(array)[0, :, 0].tolist() == ids[start:]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("prompts"), st.tuples(st.lists(st.integers(1, 20), min_size=3, max_size=3), st.integers(2, 9))),
        st.tuples(st.just("join"), st.tuples(st.lists(st.integers(1, 20), min_size=1, max_size=2), st.integers(0, 9))),
        st.tuples(st.just("leave"), st.integers(0, 2)),
        st.tuples(st.just("trim"), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("window", [None, 8])
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_history_of_a_batch(window: int | None, operations: list[tuple[str, Any]]) -> None:
    make = BatchKVCache if window is None else functools.partial(BatchRotatingKVCache, window)
    batch = Batch(make(left_padding=[0, 0, 0]), 3)
    for name, what in operations:
        count = len(batch.ids)
        if name == "steps":
            for _ in range(what):
                batch.update([1] * count, 1)
        elif name == "prompts":
            batch.update((what[0] * count)[:count], what[1])
        elif name == "join":
            lengths, steps = what
            other = Batch(make(left_padding=[0] * len(lengths)), len(lengths))
            other.next_id = batch.next_id
            other.update(lengths, max(lengths))
            for _ in range(steps):
                other.update([1] * len(lengths), 1)
            batch.cache.extend(other.cache)
            batch.ids += other.ids
            batch.next_id = other.next_id
        elif name == "leave" and count > 1:
            keep = [i for i in range(count) if i != what % count]
            batch.cache.filter(keep)
            batch.ids = [batch.ids[i] for i in keep]
        elif name == "trim" and batch.cache.is_trimmable() and all(len(ids) >= what for ids in batch.ids):
            batch.cache.trim(what)
            batch.ids = [ids[: len(ids) - what] for ids in batch.ids]
        batch.check(window)
