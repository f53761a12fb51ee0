"""Batches of coded caches: attention against float64, models against runs of one sequence, and mlx-lm's batch protocol."""

import copy
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from tests import tiny_random
from veloxquant_mlx import native
from veloxquant_mlx.caches.batch import BatchCodedKVCache
from veloxquant_mlx.caches.batch_fetched import BatchFetched, Row
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.coded import BLOCK, CodedKVCache, Growth
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs._reading import RowReader

SINK, RECENT = 4, 32
FULL = SINK + BLOCK + RECENT  # with so many rows the first block leaves the tail
# Sums of float32 in another order; logits of up to 20. Were a code on the boundary of its cell to fall to the other side, it would be more.
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
HEADS, GROUPS, DIM, VALUES = 2, 3, 16, 8


def growth(spec: str = "rvq-4", rope: Any = None) -> Growth:
    plan = parse_codec(spec)
    return Growth(plan.k, plan.v, rope, SINK, RECENT)


def coded_caches(model: nn.Module, spec: str | None = "rvq-4", pre: bool = False) -> list[CodedKVCache]:
    """Empty ones for every layer, of keys before RoPE or as cached."""
    ropes = [probe.k.rope for probe in probe_model(model)] if pre else [None] * len(model.layers)
    windows = [getattr(like, "max_size", 0) for like in make_prompt_cache(model)]
    return [CodedKVCache((), growth(spec, rope) if spec else None, window) for rope, window in zip(ropes, windows, strict=True)]


def feed(model: nn.Module, caches: Sequence[Any], tokens: list[list[int]]) -> np.ndarray:
    """Logits (B, N, V) of further tokens."""
    logits = model(mx.array(tokens), cache=caches)
    mx.eval(logits, [c.state for c in caches])
    return np.array(logits)


def merge(*sequences: Sequence[Any]) -> list[Any]:
    """A batch; the caches of its sequences go on by themselves."""
    sequences = tuple(copy.deepcopy(list(caches)) for caches in sequences)
    return [caches[0].merge(list(caches)) for caches in zip(*sequences, strict=True)]


def prefilled(model: nn.Module, prompts: Sequence[list[int]], **how: Any) -> list[list[CodedKVCache]]:
    found = []
    for prompt in prompts:
        caches = coded_caches(model, **how)
        feed(model, caches, [prompt])
        found.append(caches)
    return found


def ids(model: nn.Module, count: int, seed: int = 0) -> list[int]:
    vocabulary = model.args.vocab_size
    return np.random.default_rng(seed).integers(2, vocabulary, count).tolist()


@cache
def tiny(family: str) -> nn.Module:
    return tiny_random.build(family)


def assert_steps_equal(model: nn.Module, batch: Sequence[Any], singles: Sequence[Sequence[Any]], seed: int, steps: Sequence[int]) -> None:
    """The same further tokens through a batch and through each sequence by itself."""
    for i, count in enumerate(steps):
        tokens = [ids(model, count, 1000 * seed + 10 * i + b) for b in range(len(singles))]
        single = np.concatenate([feed(model, caches, [new]) for caches, new in zip(singles, tokens, strict=True)])
        np.testing.assert_allclose(feed(model, batch, tokens), single, **CLOSE, err_msg=f"step {i}")


def blocks(cache: BatchCodedKVCache) -> list[int]:
    return [len(cache.extract(i).blocks) for i in range(len(cache.offset))]


# --- attention in float64 ---------------------------------------------------------------------------------------------------------


def rows_of(count: int, seed: int) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    keys, values = (mx.array(rng.standard_normal((HEADS, count, dim)).astype(np.float32)) for dim in (DIM, VALUES))
    return keys, values


def fetched(window: int, count: int) -> tuple[BatchFetched, list[tuple[np.ndarray, np.ndarray, int]]]:
    """A batch of four, two of them forked, after `count` new columns; and the decoded rows of each with the column of the first."""
    prefix, own = growth().encoded(*rows_of(90, 1), 0), growth("affine-4").encoded(*rows_of(64, 2), 0)
    more = growth().encoded(*rows_of(BLOCK, 3), 90)
    caches = [CodedKVCache((prefix,), None, window), CodedKVCache((own,), None, window), CodedKVCache((prefix, more), None, window)]
    caches.append(CodedKVCache((), None, window))
    for i, tail in enumerate((33, 0, 5, 12)):
        if tail:
            caches[i].update_and_fetch(*(x[None] for x in rows_of(tail, 10 + i)))
    batch = BatchCodedKVCache.merge(caches)
    new = [mx.stack(x) for x in zip(*(rows_of(count, 20 + i) for i in range(4)), strict=True)]
    result, _ = batch.update_and_fetch(*new)
    rows = []
    for i, row in enumerate(result.rows):
        keys, values = (np.array(x[0], np.float64) for x in batch.extract(i).keys_and_values())
        rows.append((keys, values, row.left + row.oldest))
    return result, rows


def attention(q: np.ndarray, rows: list, scale: float, mask: np.ndarray, window: int, sinks: np.ndarray | None, columns: int) -> np.ndarray:
    """Softmax attention; mask (B, H_q, Q, columns), added."""
    batch, heads, queries, _ = q.shape
    out = np.zeros((batch, heads, queries, VALUES))
    for b, h in np.ndindex(batch, heads):
        keys, values, left = rows[b]
        for i in range(queries):
            column = left + np.arange(keys.shape[1])
            scores = scale * keys[h // GROUPS] @ q[b, h, i] + mask[b, h, i, column]
            if window:
                scores[column <= columns - queries + i - window] = -np.inf
            extra = [] if sinks is None else [sinks[h]]
            most = max(scores.max(), *extra, -1e30)
            weights = np.exp(scores - most)
            total = weights.sum() + sum(np.exp(x - most) for x in extra)
            out[b, h, i] = weights @ values[h // GROUPS] / total if total else 0
    return out


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("kind", ["own", "none", "causal", "bool", "bool a head", "added", "added a head"])
@pytest.mark.parametrize("count", [1, 3])
def test_attention_is_that_of_the_decoded_rows_under_any_mask(kind: str, count: int, window: int) -> None:
    rng = np.random.default_rng(7)
    result, rows = fetched(window, count)
    columns, heads = result.length, HEADS * GROUPS
    q = rng.standard_normal((4, heads, count, DIM)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32) if kind in ("own", "added") else None
    causal = np.arange(columns) <= np.arange(columns - count, columns)[:, None]
    shape = (4, heads if "head" in kind else 1, count, columns)
    mask: Any
    if kind.startswith("bool"):
        seen = rng.random(shape) < 0.3
        seen[1, :, 0] = False  # sees nothing: 0
        mask, added = mx.array(seen), np.where(seen, 0.0, -np.inf)
    elif kind.startswith("added"):
        added = rng.standard_normal(shape).astype(np.float32)
        mask = mx.array(added)
    else:
        mask = {"none": None, "causal": "causal"}.get(kind)
        if kind == "own":
            mask = create_causal_mask(count, columns - count, left_padding=mx.array([row.left for row in result.rows]))
        added = np.where(causal, 0.0, -np.inf)[None, None] if kind != "none" else np.zeros((1, 1, count, columns))
    out = result.attend(mx.array(q), 0.3, mask, None if sinks is None else mx.array(sinks))
    wanted = attention(q.astype(np.float64), rows, 0.3, np.broadcast_to(added, (4, heads, count, columns)), window, sinks, columns)
    np.testing.assert_allclose(np.array(out), wanted, rtol=0, atol=5e-6)


def test_attention_refuses_what_does_not_fit() -> None:
    result, _ = fetched(0, 1)
    q = mx.zeros((4, HEADS * GROUPS, 1, DIM))
    for queries, mask, message in (
        (q[:2], None, r"queries must be \(4, H_q, Q, D\)"),
        (q[:, :3], None, "multiple of 2"),
        (q, "full", "None, 'causal' or an array"),
        (q, mx.zeros((4, 1, 1, result.length - 1), mx.bool_), "must broadcast to"),
        (q, mx.zeros((3, 1, 1, result.length), mx.bool_), "must broadcast to"),
    ):
        with pytest.raises(ValueError, match=message):
            result.attend(queries, 1.0, mask)


# --- models ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", [False, True])
def test_a_ragged_batch_is_its_sequences(tiny_a: LoadedModel, pre: bool) -> None:
    prompts = [ids(tiny_a.model, count) for count in (FULL - 8, 40, 700)]
    singles = prefilled(tiny_a.model, prompts, pre=pre)
    batch = merge(*singles)
    assert_steps_equal(tiny_a.model, batch, singles, 1, [5, *[1] * 6])
    assert blocks(batch[0]) == [len(caches[0].blocks) for caches in singles] == [2, 0, 2]  # a block more than at first
    assert batch[0].offset.tolist() == [caches[0].offset for caches in singles]
    assert batch[0].left_padding.tolist() == [700 - len(prompt) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama-sliding", "gemma3_text", "gpt_oss", "cohere2", "qwen3", "glm4"])
def test_model_files(family: str) -> None:
    model = tiny(family)
    singles = prefilled(model, [ids(model, count) for count in (FULL - 6, 3, FULL + BLOCK)])
    batch = merge(*singles)
    assert_steps_equal(model, batch, singles, 2, [4, *[1] * 5, 20, 1])
    for layer, like in zip(batch, make_prompt_cache(model), strict=True):
        if window := getattr(like, "max_size", 0):
            assert (
                layer.length < window + FULL + 24 < max(other.length for other in batch)
            )  # columns that every row has left behind are gone
            assert min(layer.left_padding.tolist()) < 0


def forks(model: nn.Module, count: int) -> list[list[CodedKVCache]]:
    [prefix] = prefilled(model, [ids(model, FULL + BLOCK + 20)])
    feed(model, prefix, [[5]])
    found = [copy.deepcopy(prefix) for _ in range(count)]
    for i, caches in enumerate(found):  # unlike lengths since the fork
        feed(model, caches, [ids(model, 1 + 2 * i, i)])
    return found


def test_forks_of_one_prefix_are_read_once(tiny_a: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_a.model
    singles = forks(model, 4)
    batch = merge(*singles)
    assert_steps_equal(model, batch, singles, 3, [3, 1])

    reads: Counter = Counter()

    def counted(method: Any) -> Any:
        def tile(self: RowReader, start: int, stop: int, *args: Any, **more: Any) -> Any:
            if self.codec.id != "raw":
                reads[id(self), start, stop] += 1
            return method(self, start, stop, *args, **more)

        return tile

    for kind in {type(coded.reader) for block in singles[0][0].blocks for coded in (block.k, block.v)}:
        monkeypatch.setattr(kind, "tile", counted(kind.tile))
    with native.without():  # MLX's tiles are what is counted
        feed(model, singles[0], [[7]])
        once = dict(reads)
        reads.clear()
        feed(model, batch, [[7]] * 4)
    assert once and dict(reads) == once and set(once.values()) == {1}


def test_forks_share_blocks_in_memory(tiny_a: LoadedModel) -> None:
    singles = forks(tiny_a.model, 4)
    batch = merge(*singles)[0]
    shared = sum(block.k.nbytes + block.v.nbytes for block in singles[0][0].blocks)
    assert batch.nbytes == shared + sum(x.nbytes for x in batch._tail)
    assert all(batch.extract(i).blocks == singles[0][0].blocks for i in range(4))


@pytest.mark.parametrize("family", ["tiny-a", "llama-sliding"])
def test_right_padded_prompts_of_unlike_lengths(tiny_a: LoadedModel, family: str) -> None:
    """As mlx-lm's PromptProcessingBatch does: chunks of all prompts beside each other, what is too short padded on the right."""
    model = tiny_a.model if family == "tiny-a" else tiny(family)
    singles = prefilled(model, [ids(model, count) for count in (300, 70, 12)])
    prompts = [ids(model, count, 1) for count in (9, 350, 120)]
    batch = merge(*singles)
    lengths, most = [len(p) for p in prompts], max(len(p) for p in prompts)
    padded = np.array([p + [0] * (most - len(p)) for p in prompts])
    for layer in batch:
        layer.prepare(lengths=lengths, right_padding=[most - n for n in lengths])
    for start in range(0, most, 100):
        logits = feed(model, batch, padded[:, start : start + 100].tolist())
        for i, prompt in enumerate(prompts):
            if chunk := prompt[start : start + 100]:
                alone = feed(model, singles[i], [chunk])[0]
                np.testing.assert_allclose(logits[i, : len(chunk)], alone, **CLOSE, err_msg=f"row {i} at {start}")
    for layer in batch:
        layer.finalize()
    assert batch[0].offset.tolist() == [caches[0].offset for caches in singles] == [309, 420, 132]
    assert batch[0]._tail[0].shape[2] < 350  # no row that ended early keeps the columns of the others
    assert_steps_equal(model, batch, singles, 4, [1, 3, 1])


def test_left_padded_prompts_of_unlike_lengths(tiny_a: LoadedModel) -> None:
    model = tiny_a.model
    singles = [coded_caches(model), coded_caches(model)]
    batch = merge(*singles)
    prompts = [ids(model, 30), ids(model, FULL + 2, 1)]
    padding = [len(prompts[1]) - 30, 0]
    for layer in batch:
        layer.prepare(left_padding=padding)
    assert batch[0].offset.tolist() == [-padding[0], 0]
    logits = feed(model, batch, [[0] * padding[0] + prompts[0], prompts[1]])
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(logits[i, padding[i] :], feed(model, singles[i], [prompt])[0], **CLOSE)
    assert_steps_equal(model, batch, singles, 5, [1, 2, 1])
    with pytest.raises(ValueError, match="left_padding must be given to an empty cache"):
        batch[0].prepare(left_padding=[1, 0])
    with pytest.raises(ValueError, match="lengths must be given"):
        batch[0].prepare(right_padding=[1, 0])


# --- the protocol ----------------------------------------------------------------------------------------------------------------


def test_filter_extend_and_extract(tiny_a: LoadedModel) -> None:
    model = tiny_a.model
    singles = prefilled(model, [ids(model, count, count) for count in (FULL + 3, 60, 21, FULL + 40)])
    batch, other = merge(*singles[:3]), merge(singles[3])
    assert_steps_equal(model, batch, singles[:3], 6, [1])
    feed(model, other, [[9]])
    feed(model, singles[3], [[9]])
    for layer in batch:
        layer.filter([2, 1])  # the longest goes: padding, and columns of the tail, with it
    assert batch[0].length == 61 and batch[0].left_padding.tolist() == [39, 0]
    kept = [singles[2], singles[1]]
    assert_steps_equal(model, batch, kept, 7, [2, 1])
    for layer, more in zip(batch, other, strict=True):
        layer.extend(more)
    kept.append(singles[3])
    assert_steps_equal(model, batch, kept, 8, [1, 2])
    for i, caches in enumerate(kept):
        alone = [layer.extract(i) for layer in batch]
        assert all(isinstance(c, CodedKVCache) and c.growth is like.growth for c, like in zip(alone, caches, strict=True))
        assert [c.offset for c in alone] == [c.offset for c in caches]
        tokens = ids(model, 3, 99)
        np.testing.assert_allclose(feed(model, alone, [tokens]), feed(model, copy.deepcopy(caches), [tokens]), **CLOSE)
    # What went on by itself changed nothing here.
    assert_steps_equal(model, batch, kept, 9, [1])


@pytest.mark.parametrize("n", [3, 60, 500])
def test_trim(tiny_a: LoadedModel, n: int) -> None:
    """Within the tail; into the coded rows of one row; and all of a row."""
    model = tiny_a.model
    singles = prefilled(model, [ids(model, count, count) for count in (FULL + 3, FULL + BLOCK + 9)])
    batch = merge(*singles)
    assert_steps_equal(model, batch, singles, 10, [1])
    if n > FULL:  # the first row is empty then, with padding that nothing was fed to yet
        assert all(layer.trim(n) == n for layer in batch)
        assert batch[0].offset.tolist() == [FULL + 4 - n, FULL + BLOCK + 10 - n]
        batch = [layer.extract(1) for layer in batch]
        singles = singles[1:]
    else:
        assert all(layer.is_trimmable() and layer.trim(n) == n for layer in batch)
    for caches in singles:
        for layer in caches:
            layer.trim(n)
    assert_steps_equal(model, batch, singles, 11, [1, 4, 1])


def test_state_and_copies(tiny_a: LoadedModel) -> None:
    model = tiny_a.model
    singles = prefilled(model, [ids(model, count, count) for count in (FULL + 3, 31)])
    before, batch = copy.deepcopy(singles), merge(*singles)
    copied = copy.deepcopy(batch)
    assert copied[0]._tail is batch[0]._tail  # nothing copied until it is written
    assert_steps_equal(model, batch, singles, 12, [1])  # here rows leave the tail, which the copy does not see
    assert blocks(batch[0]) == [2, 0] and blocks(copied[0]) == [0, 0]
    assert_steps_equal(model, copied, before, 12, [2, 1])
    restored = [BatchCodedKVCache.from_state(layer.state) for layer in batch]
    np.testing.assert_allclose(feed(model, restored, [[3, 4]] * 2), feed(model, batch, [[3, 4]] * 2), **CLOSE)
    assert batch[0].nbytes == sum(x.nbytes for x in batch[0]._tail) + sum(b.k.nbytes + b.v.nbytes for b in singles[0][0].blocks)
    assert not batch[0].empty() and batch[0].size() == FULL + 6
    assert BatchCodedKVCache.merge([CodedKVCache(), CodedKVCache()]).empty()


def test_a_state_within_padding_on_the_right(tiny_a: LoadedModel) -> None:
    model = tiny_a.model
    batch = merge(*prefilled(model, [ids(model, count, count) for count in (50, 31)]))
    for layer in batch:
        layer.prepare(lengths=[2, 8], right_padding=[6, 0])
    feed(model, batch, [[3, 4, 0, 0]] * 2)
    assert [batch[0].extract(i).offset for i in range(2)] == [52, 35]  # without the padding
    restored = [BatchCodedKVCache.from_state(layer.state) for layer in batch]
    results = []
    for other in (batch, restored):
        feed(model, other, [[5, 6, 7, 8]] * 2)
        for layer in other:
            layer.finalize()
        assert other[0].offset.tolist() == [52, 39]
        results.append(feed(model, other, [[9]] * 2))
    np.testing.assert_allclose(results[1], results[0], **CLOSE)


@pytest.mark.parametrize("family", ["tiny-a", "llama-sliding"])
@pytest.mark.parametrize("first", ["coded", "plain"])
@pytest.mark.parametrize("filled", [False, True])
def test_beside_caches_of_mlx_lm(tiny_a: LoadedModel, family: str, first: str, filled: bool) -> None:
    """Prompts without a coded prefix in the same batch: their own class decides, so that the first of a batch does."""
    model = tiny_a.model if family == "tiny-a" else tiny(family)
    [coded] = prefilled(model, [ids(model, FULL + 20, 1)])
    feed(model, coded, [[3]])
    plain = make_prompt_cache(model)
    if filled:
        feed(model, plain, [ids(model, 57, 2)])
    singles = [coded, plain] if first == "coded" else [plain, coded]
    batch = merge(*singles)
    assert all(isinstance(layer, BatchCodedKVCache) == (first == "coded") for layer in batch)
    assert_steps_equal(model, batch, singles, 13, [30, 1, 1])
    if first == "coded":
        assert batch[0].extract(1).growth is None  # its rows stay exact


@pytest.mark.parametrize("family", ["tiny-a", "llama-sliding"])
def test_a_batch_takes_in_the_other_kind(tiny_a: LoadedModel, family: str) -> None:
    """Requests that join while others are answered."""
    model = tiny_a.model if family == "tiny-a" else tiny(family)
    coded = prefilled(model, [ids(model, FULL + count, count) for count in (20, 5)])
    for order in (1, -1):
        plain = make_prompt_cache(model)
        feed(model, plain, [ids(model, 57, 2)])
        sides = [copy.deepcopy(coded), [plain]][::order]
        batches = [merge(*caches) for caches in sides]
        for i, (batch, caches) in enumerate(zip(batches, sides, strict=True)):
            assert_steps_equal(model, batch, caches, 14 + i, [1])
        for layer, more in zip(*batches, strict=True):
            layer.extend(more)
        assert_steps_equal(model, batches[0], sides[0] + sides[1], 16, [1, 1, 5, 1])


def test_refusals() -> None:
    cache = CodedKVCache()
    for others, message in (
        ([QuantizedKVCache()], "must be CodedKVCache or KVCache, but got QuantizedKVCache"),
        ([RotatingKVCache(16)], "got RotatingKVCache of max_size 16"),
        ([CodedKVCache(window=8)], r"one window, but got \[0, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.merge([cache, *others])
    keeping = RotatingKVCache(16, keep=4)
    keeping.update_and_fetch(mx.zeros((1, 1, 3, 8)), mx.zeros((1, 1, 3, 8)))
    with pytest.raises(ValueError, match="keep=4"):
        cache.merge([CodedKVCache(window=16), keeping])
    batch = cache.merge([cache, cache])
    batch.update_and_fetch(mx.zeros((2, 1, 3, 8)), mx.zeros((2, 1, 3, 4)))
    for keys, values, message in (
        (mx.zeros((1, 1, 3, 8)), mx.zeros((1, 1, 3, 4)), r"must be \(2, H, N, D\)"),
        (mx.zeros((2, 1, 3, 8)), mx.zeros((2, 1, 3, 8)), r"must have \(H, D\)"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.update_and_fetch(keys, values)
    with pytest.raises(ValueError, match="at least one row"):
        batch.filter([])
    with pytest.raises(ValueError, match="window 0, but got 8"):
        batch.extend(CodedKVCache.merge([CodedKVCache(window=8)]))
    with pytest.raises(ValueError, match="but got KVCache"):
        batch.extend(KVCache())
    batch.prepare(lengths=[1, 2], right_padding=[1, 0])
    with pytest.raises(ValueError, match="finalize it first"):
        batch.extend(cache.merge([cache]))


def test_rows_without_growth_leave_the_tail_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veloxquant_mlx.caches.batch.EXACT", 40)
    batch = CodedKVCache.merge([CodedKVCache(), CodedKVCache((Block.exact(*rows_of(50, 1), 0),))])
    for i in range(2):
        keys, values = (mx.stack([x, x + 1]) for x in rows_of(45, i))
        batch.update_and_fetch(keys, values)
    rows: list[Row] = batch._rows
    assert [[b.count for b in row.blocks] for row in rows] == [[40], [50, 40]] and [row.first for row in rows] == [40, 90]
    assert batch._start == 90 and batch.length == 140
    wanted = np.concatenate([np.array(rows_of(45, i)[0]) for i in range(2)], axis=1)
    np.testing.assert_array_equal(np.array(batch.extract(0).keys[0]), wanted)


# --- mlx-lm's batch generator ------------------------------------------------------------------------------------------------------


def alone(model: nn.Module, caches: Sequence[Any], prompt: list[int], count: int) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=copy.deepcopy(list(caches)))
    return [int(token) for token, _ in steps]


def test_batch_generate_gives_the_tokens_of_single_runs(tiny_a: LoadedModel) -> None:
    model = tiny_a.model
    [prefix] = prefilled(model, [ids(model, FULL + BLOCK + 20)])
    feed(model, prefix, [[5]])
    [other] = prefilled(model, [ids(model, 35, 4)])
    sequences = [prefix, copy.deepcopy(prefix), other, make_prompt_cache(model)]
    prompts = [ids(model, count, count) for count in (7, 40, 1, 19)]
    answer = batch_generate(
        model, tiny_a.tokenizer, prompts, prompt_caches=copy.deepcopy(sequences), max_tokens=12, return_prompt_caches=True,
        return_token_ids=True, prefill_step_size=16,
    )  # fmt: skip
    for i, (caches, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        wanted = alone(model, caches, prompt, 12)
        ends = [at for at, token in enumerate(wanted) if token in tiny_a.tokenizer.eos_token_ids]
        assert answer.token_ids[i] == wanted[: ends[0] if ends else None], i
        used = len(prompt) + (ends[0] + 1 if ends else 12)
        assert answer.caches[i][0].offset == caches[0].offset + used
        assert isinstance(answer.caches[i][0], CodedKVCache)


def test_one_request_and_one_that_joins_later(tiny_a: LoadedModel) -> None:
    model = tiny_a.model
    singles = forks(model, 2)
    prompts = [ids(model, 5, 1), ids(model, 9, 2)]
    generator = BatchGenerator(model, max_tokens=8)
    uids = generator.insert([prompts[0]], caches=[copy.deepcopy(singles[0])])
    found: dict[int, list[int]] = {uids[0]: []}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
        if len(found) == 1 and len(found[uids[0]]) == 3:
            uids += generator.insert([prompts[1]], caches=[copy.deepcopy(singles[1])])
            found[uids[1]] = []
    generator.close()
    assert [found[uid] for uid in uids] == [alone(model, caches, prompt, 8) for caches, prompt in zip(singles, prompts, strict=True)]
