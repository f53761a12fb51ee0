"""Attention to codes and the cache around them, against float64 attention over the decoded rows and against mlx-lm's own caches."""

import copy
import gc
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import combinations, pairwise, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base, gpt_oss, llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

from tests import oracles, tc_cases
from veloxquant_mlx import native
from veloxquant_mlx.allocators.additive import build_additive
from veloxquant_mlx.caches import blocks as blocks_module
from veloxquant_mlx.caches import coded as coded_module
from veloxquant_mlx.caches import hook
from veloxquant_mlx.caches.batch import BatchCodedKVCache
from veloxquant_mlx.caches.blocks import MERGED, Block, CodedRows, merged, tile_tokens
from veloxquant_mlx.caches.coded import BLOCK, STEP, CodedKVCache, Growth
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.codecs import Codec, parse_codec
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.codecs.tc import Tc
from veloxquant_mlx.metal.fused_sdpa import is_patched, patch_mlx_lm_for_fused_sdpa, unpatch_mlx_lm
from veloxquant_mlx.transfer.rope_angles import _native_page, _page, cos_sin
from veloxquant_mlx.transfer.rope_spec import RopeSpec

HEADS, GROUPS, DIM = 2, 3, 16
ROPES = {
    "none": None,
    "half": RopeSpec("default", DIM, base=1e4),
    "partial": RopeSpec("yarn", 8, "interleaved", base=1e4, first=4, magnitude=1.3),
}
# Every codec of the registry that can be read tile by tile; each coordinate that a reader may have: scale, mean, rotation, decoded rows.
SPECS = (
    *("raw", "rvq-4", "rvq-2+2", "rvq-8:norm:nocenter", "rabitq", "rabitq-4", "affine-4", "affine-2:token", "affine-3:channel:group=7"),
    *("commvq-2", "commvq-2:product", "commvq-2:additive", "tc-2", "vecinfer-2", "qjl", "k=raw,v=rvq-3", "k=qjl-3:nocenter,v=affine-4"),
)


# --- the oracle ------------------------------------------------------------------------------------------------------------------


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, sinks: np.ndarray | None = None) -> tuple[Any, Any]:
    """Softmax attention in the dtype of q: q (H_q, Q, D) times the scale, k and v (H, S, D), bias (H_q, Q, S) -> out and lse."""
    groups = q.shape[0] // k.shape[0]
    k, v = (np.repeat(x.astype(q.dtype), groups, axis=0) for x in (k, v))
    scores = q @ k.swapaxes(1, 2) + bias.astype(q.dtype)
    extra = (
        np.full((*q.shape[:2], 0), 0, q.dtype)
        if sinks is None
        else np.broadcast_to(sinks.astype(q.dtype)[:, None, None], (*q.shape[:2], 1))
    )
    every = np.concatenate([scores, extra], axis=2)
    most = every.max(axis=2, keepdims=True, initial=-np.inf)
    most = np.where(np.isinf(most), 0, most).astype(q.dtype)
    weights = np.exp(scores - most)
    total = np.exp(every - most).sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(total > 0, total, 1), (most + np.log(total))[..., 0]


def decoded(coded: CodedRows, first: int, given: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """float64 rows by the codec's own `decode` of all of them, before RoPE and, rotated by the oracle, as cached."""
    near = () if given is None else ({"k": mx.array(given.astype(np.float32))},)
    rows = np.array(coded.codec.decode(coded.parts, coded.shape, mx.float32, *near)).astype(np.float64)
    return rows, as_cached(coded, rows, first)


def as_cached(coded: CodedRows, rows: np.ndarray, first: int) -> np.ndarray:
    """Decoded float64 rows, the first at a position, rotated as they are in a cache."""
    rope = coded.rope
    if rope is None:
        return rows
    live, own = rows.copy(), slice(rope.first, rope.first + rope.dims)
    if rope.pairing == "interleaved":
        live[..., own] = oracles.interleaved_from_half(rows[..., own], rope.dims)
    at, frequencies = np.arange(first, first + rows.shape[1]), np.array(rope.frequencies)
    how = {"magnitude": rope.magnitude, "interleaved": rope.pairing == "interleaved", "first": rope.first}
    return oracles.rotated(live, at, frequencies, **how)


def rows_of_block(block: Block) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(block.v.codec, Tc):  # a float32 decoder's own rounding is amplified by what predicts from small components
        before, values = tc_cases.exact(block.k.codec, block.k.parts, block.v.codec, block.v.parts, block.k.shape)
        keys = as_cached(block.k, before, block.first - block.k_from)
        return keys[:, block.k_from :][:, : block.count], values[:, block.v_from :][:, : block.count]
    before, keys = decoded(block.k, block.first - block.k_from)
    _, values = decoded(block.v, 0, before if block.v.codec.needs else None)
    return keys[:, block.k_from :][:, : block.count], values[:, block.v_from :][:, : block.count]


def assert_close(
    out: mx.array, lse: mx.array | None, q: mx.array, block_rows: Any, float32_rows: Any, bias: np.ndarray, **more: Any
) -> None:
    """Within twice the error that attention in float32 to the decoded rows has, and the rounding of the result itself."""
    for rows, exact in zip(float32_rows, block_rows, strict=True):  # what the limit is taken from; angles of hundreds are float32's
        np.testing.assert_allclose(rows, exact, rtol=0, atol=5e-5 * np.abs(exact).max(initial=0))
    q64 = np.array(q.astype(mx.float32)).astype(np.float64)
    wanted, wanted_lse = attention(q64, *block_rows, bias, **more)
    plain, plain_lse = attention(q64.astype(np.float32), *float32_rows, bias, **more)
    size = np.abs(block_rows[1]).max(initial=0)
    np.testing.assert_allclose(
        np.array(out.astype(mx.float32)), wanted, rtol=0, atol=2 * np.abs(plain - wanted).max(initial=0) + 2e-6 * size
    )
    if lse is not None:
        seen = np.isfinite(wanted_lse)
        assert np.array_equal(np.isfinite(np.array(lse)), seen)
        limit = 2 * np.abs(plain_lse[seen] - wanted_lse[seen]).max(initial=0) + 2e-6 * np.abs(wanted_lse[seen]).max(initial=1)
        np.testing.assert_allclose(np.array(lse)[seen], wanted_lse[seen], rtol=0, atol=limit)


# --- codes -----------------------------------------------------------------------------------------------------------------------


@cache
def codecs(spec: str, heads: int = HEADS, dim: int = DIM, rope: str = "none") -> tuple[Codec, Codec]:
    """The codecs of keys and values, bound where they are calibrated."""
    if spec.startswith("tc-"):
        return tc_cases.bound(spec, heads, dim)
    plan = parse_codec(spec)
    k = plan.k
    if isinstance(k, CommVqAdditive):
        own = tc_cases.layer(600, 7, heads, dim)
        k = k.bind(build_additive(own.k, own.fisher_k, k.bits), "0", tc_cases.DIGEST)
    rotary = ROPES[rope]
    return (k if rotary is None else k.for_rotary(rotary.first, rotary.dims, dim)), plan.v


def sample(count: int, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> tuple[mx.array, mx.array]:
    """Keys around a mean per head and plain values, (H, S, D) float32."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((heads, count, dim)) + 2 * np.random.default_rng(99).standard_normal((heads, 1, dim))
    v = rng.standard_normal((heads, count, dim))
    return mx.array(k.astype(np.float32)), mx.array(v.astype(np.float32))


def block_of(spec: str, rows: tuple[mx.array, mx.array], first: int = 0, rope: str = "none") -> Block:
    """Rows (H, S, D) as a file's segment holds them."""
    heads, _, dim = rows[0].shape
    return Growth(*codecs(spec, heads, dim, rope), ROPES[rope]).encoded(*rows, first)


def queries(count: int, seed: int = 1, heads: int = HEADS, dim: int = DIM) -> mx.array:
    x = np.random.default_rng(seed).standard_normal((heads * GROUPS, count, dim)) * dim**-0.5
    return mx.array(x.astype(np.float32))


def stacked(q: mx.array, heads: int) -> mx.array:
    return q.reshape(heads, -1, q.shape[-1])


def bias_of(kind: str, count: int, columns: int, window: int = 0, seed: int = 5) -> tuple[Any, np.ndarray]:
    """A mask as a model gives it, for columns whose newest are the queries' own, and the same in float64 (H_q, Q, columns)."""
    rng, heads = np.random.default_rng(seed), HEADS * GROUPS
    at, column = np.arange(columns - count, columns)[:, None], np.arange(columns)
    mask: Any = None
    seen = np.ones((heads, count, columns), bool)
    added = np.zeros((heads, count, columns))
    if kind == "causal":
        mask, seen = "causal", np.broadcast_to(column <= at, seen.shape)
    elif kind.startswith("bool"):
        seen = rng.random((heads if "head" in kind else 1, count, columns)) < 0.4
        seen[:, 0] = False  # sees nothing: 0
        mask = mx.array(seen[None])
    elif kind.startswith("added"):
        added = rng.standard_normal((heads if "head" in kind else 1, count, columns)).astype(np.float32)
        added[..., ::7] = -np.inf
        mask = mx.array(added[None])
    if window:
        seen = seen & (column > at - window)
    return mask, np.where(seen, np.broadcast_to(added, (heads, count, columns)), -np.inf)


@pytest.fixture(params=["mlx", "native"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Attention by plain MLX, and by the native back end where it has a way to read the codes."""
    if request.param == "native":
        if not native.available():
            pytest.skip("the native back end was not built")
        yield
    else:
        with native.without():
            yield


# --- blocks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("spec", SPECS)
def test_attention_to_a_block_is_that_to_its_decoded_rows(spec: str, rope: str, way: None) -> None:
    """Whole and cut at odd places (the keys elsewhere than the values), under every kind of mask, tiles that end within it."""
    whole = block_of(spec, sample(150), 7, rope)
    cut = Block(whole.k, whole.v, 97, 7 + 33, 33, 33).kept(7 + 34, 7 + 33 + 91)
    for block, count, tile in ((whole, 1, 64), (cut, 5, 64), (whole, 2, 1024)):
        span = slice(block.first - 7, block.stop - 7)
        reference, plain = [x[:, span] for x in rows_of_block(whole)], [np.array(x) for x in block.rows()]
        q = queries(count)
        for kind, window in (
            ("none", 0),
            ("causal", 0),
            ("none", 50),
            ("causal", 40),
            ("bool", 0),
            ("bool a head", 70),
            ("added a head", 0),
        ):
            columns, column = block.count + 3, 3
            mask, bias = bias_of(kind, count, columns, window)
            seen = Visibility.of(mask, HEADS * GROUPS, HEADS, count, columns, window)
            out, lse = block.attend(stacked(q, HEADS), seen, column, tile)
            own = bias[..., column : column + block.count]
            shape = (HEADS * GROUPS, count)
            assert_close(out.reshape(*shape, -1), lse.reshape(shape), q, reference, plain, own)


@pytest.mark.parametrize("spec", SPECS)
def test_hostile_rows(spec: str, way: None) -> None:
    """Zeros, one channel a thousand times the others, values of 1e30; keys of 1e30, whose scores float32 cannot tell apart, stay finite."""
    k, v = (np.array(x) for x in sample(70, 3))
    zeros = np.zeros_like(k)
    wild, huge, one = k.copy(), v.copy(), k.copy()
    wild[..., 5] *= 1e3
    huge[:, 9] *= 1e30
    one[:, 11] *= 1e30
    for name, keys, values in (("zeros", zeros, zeros), ("channel", wild, wild), ("1e30", k, huge), ("a key of 1e30", one, v)):
        if spec == "commvq-2:product" and "a key" in name:
            continue  # its words are float16, so that it refuses them
        block = block_of(spec, (mx.array(keys), mx.array(values)), 2, "half")
        q, seen = queries(2), Visibility(2, GROUPS, 72)
        out, lse = block.attend(stacked(q, HEADS), seen, 0, 64)
        assert np.isfinite(np.array(out)).all() and np.isfinite(np.array(lse)).all(), name
        if name != "a key of 1e30":
            bias = np.zeros((HEADS * GROUPS, 2, 70))
            shape = (HEADS * GROUPS, 2)
            plain = [np.array(x) for x in block.rows()]
            assert_close(out.reshape(*shape, -1), lse.reshape(shape), q, rows_of_block(block), plain, bias)


@pytest.mark.parametrize("spec", SPECS)
def test_lengths_around_a_tile_and_a_single_head(spec: str, way: None) -> None:
    for count in (1, 31, 33, 64, 65, 128):
        block = block_of(spec, sample(count, count, heads=1), 0, "partial")
        q = queries(1, heads=1)
        out, lse = block.attend(q[None, :, 0], Visibility(1, GROUPS, count), 0, 64)
        plain = [np.array(x) for x in block.rows()]
        assert_close(out.reshape(GROUPS, 1, -1), lse.reshape(GROUPS, 1), q, rows_of_block(block), plain, np.zeros((GROUPS, 1, count)))


def test_positions_far_from_the_start_have_the_angles_that_the_model_has() -> None:
    """Angles are `mx.fast.rope`'s, in float32: at 100 000 tokens they are off by far more than a product is."""
    rows = sample(40)
    block = block_of("rvq-8", rows, 100_000, "half")
    keys = np.array(
        mx.fast.rope(
            block.k.codec.decode(block.k.parts, block.k.shape, mx.float32)[None],
            DIM,
            traditional=False,
            base=1e4,
            scale=1.0,
            offset=100_000,
        )
    )[0]
    np.testing.assert_allclose(np.array(block.rows()[0]), keys, rtol=0, atol=1e-6)
    q = queries(1)
    out, lse = block.attend(stacked(q, HEADS), Visibility(1, GROUPS, 40), 0, 64)
    values = np.array(block.rows()[1])
    assert_close(out.reshape(6, 1, -1), lse.reshape(6, 1), q, (keys.astype(np.float64), values), (keys, values), np.zeros((6, 1, 40)))


def test_parts_merge_to_the_whole() -> None:
    rows, q = sample(130), queries(3)
    whole = block_of("rvq-4", rows)
    seen = Visibility(3, GROUPS, 130)
    wanted, wanted_lse = whole.attend(stacked(q, HEADS), seen, 0, 64)
    nothing = (mx.zeros_like(wanted), mx.full(wanted_lse.shape, -np.inf))
    parts = [whole.kept(a, b).attend(stacked(q, HEADS), seen, a, 64) for a, b in pairwise((0, 1, 60, 129, 130))]
    out, lse = merged([nothing, *parts, nothing])
    np.testing.assert_allclose(np.array(out), np.array(wanted), rtol=0, atol=2e-6)
    np.testing.assert_allclose(np.array(lse), np.array(wanted_lse), rtol=0, atol=2e-6)
    out, lse = merged([nothing, nothing])
    assert not np.array(out).any() and np.isneginf(np.array(lse)).all()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("window", [0, 1, 2, 4, 9])
def test_what_is_seen_of_every_tile(window: int, count: int) -> None:
    columns, at, column = 7, np.arange(7 - count, 7)[:, None], np.arange(7)
    for causal, (start, stop) in product((False, True), combinations(range(columns + 1), 2)):
        seen = ((column <= at) | (not causal)) & ((column > at - window) | (window == 0))
        tile = Visibility(count, GROUPS, columns, causal, window).tile(start, stop)
        wanted = np.broadcast_to(seen[:, start:stop], (count, stop - start))
        if tile is True or tile is False:
            assert (wanted == tile).all(), (causal, start, stop)
        else:
            assert np.array_equal(np.array(tile), np.tile(wanted, (GROUPS, 1))[None]) and not wanted.all(), (causal, start, stop)


# --- what a cache gives to attention ---------------------------------------------------------------------------------------------


def cache_of(spec: str, tail: int, window: int = 0, dtype: mx.Dtype = mx.float32, growth: Growth | None = None) -> CodedKVCache:
    """Three blocks, the first of exact rows, and a tail."""
    rows = [tuple(x.astype(dtype) for x in sample(count, 20 + i)) for i, count in enumerate((4, 90, 33, tail))]
    blocks = [Block.exact(*rows[0], 0), block_of(spec, rows[1], 4, "half"), block_of("affine-4", rows[2], 94, "half")]
    made = CodedKVCache(blocks, growth, window)
    if tail:
        made.update_and_fetch(*(x[None] for x in rows[3]))
    return made


@pytest.mark.parametrize("window", [0, 60])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "bool a head", "added", "added a head"])
@pytest.mark.parametrize(("spec", "dtype"), [("rvq-4", mx.float32), ("rvq-4", mx.float16), ("rvq-4", mx.bfloat16), ("tc-2", mx.float32)])
def test_attention_over_blocks_and_tail(spec: str, kind: str, window: int, dtype: mx.Dtype) -> None:
    for tail, count in ((0, 1), (21, 1), (2, 4)):
        subject = cache_of(spec, tail, window, dtype)
        new = [x[None].astype(dtype) for x in sample(count, 31)]
        fetched, same = subject.update_and_fetch(*new)
        assert fetched is same
        held = [rows_of_block(block) for block in fetched.blocks] + [tuple(np.array(x.astype(mx.float32)) for x in subject.tail)]
        rows = [np.concatenate([pair[i] for pair in held], axis=1).astype(np.float64) for i in (0, 1)]
        plain = [np.concatenate([np.array(b.rows()[i]) for b in fetched.blocks] + [held[-1][i]], axis=1) for i in (0, 1)]
        q = queries(count).astype(dtype)
        mask, bias = bias_of(kind, count, rows[0].shape[1], window)
        sinks = np.random.default_rng(8).standard_normal(HEADS * GROUPS) if kind in ("none", "bool") else None
        out = fetched.attend(q[None], 1.0, mask, None if sinks is None else mx.array(sinks.astype(np.float32)))
        assert out.dtype == dtype and out.shape == (1, HEADS * GROUPS, count, DIM)
        if dtype == mx.float32:
            assert_close(out[0], None, q, rows, plain, bias, sinks=sinks)
        else:  # one rounding of the result
            wanted, _ = attention(np.array(q.astype(mx.float32)).astype(np.float64), *rows, bias, sinks)
            step = 2.0**-11 if dtype == mx.float16 else 2.0**-8
            np.testing.assert_allclose(np.array(out[0].astype(mx.float32)), wanted, rtol=1.01 * step, atol=2e-5)


def test_attention_refuses_what_does_not_fit() -> None:
    fetched, _ = cache_of("rvq-4", 3).update_and_fetch(*(x[None] for x in sample(2)))
    q = mx.zeros((1, HEADS * GROUPS, 2, DIM))
    columns = 4 + 90 + 33 + 5
    for bad, mask, message in (
        (mx.zeros((2, 6, 2, DIM)), None, r"queries must be \(1, H_q, Q, 16\) with H_q a multiple of 2"),
        (q[..., :8], None, r"queries must be \(1, H_q, Q, 16\)"),
        (q[:, :5], None, "multiple of 2"),
        (q, "full", "None, 'causal' or an array, but got 'full'"),
        (q, mx.zeros((2, columns - 1), mx.bool_), r"must broadcast to \(1, H, Q, S\) = \(1, 6, 2, 132\), but got \(2, 131\)"),
        (q, mx.zeros((2, 6, 2, columns)), "must broadcast to"),
        (q, mx.zeros((1, 1, 6, 2, columns)), "must broadcast to"),
    ):
        with pytest.raises(ValueError, match=message):
            fetched.attend(bad, 1.0, mask)


# --- the cache -------------------------------------------------------------------------------------------------------------------


def bits(arrays: Any) -> list[bytes]:
    return [np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).tobytes() for x in arrays]


def growing(spec: str = "rvq-4", rope: str = "half", sink: int = 4, recent: int = 32) -> Growth:
    return Growth(*codecs(spec, rope=rope), ROPES[rope], sink, recent)


def fed(subject: Any, counts: Any, seed: int = 0, dtype: mx.Dtype = mx.float32) -> tuple[np.ndarray, np.ndarray]:
    """Updates of so many rows each; returns all of them."""
    rows = tuple(x.astype(dtype) for x in sample(sum(counts), seed))
    start = 0
    for count in counts:
        subject.update_and_fetch(*(x[None, :, start : start + count] for x in rows))
        start += count
    return rows


def test_an_empty_cache() -> None:
    subject = CodedKVCache((), growing())
    text, arrays = subject.state
    mx.eval([subject.state])
    assert arrays == [] and subject.empty() and subject.offset == subject.size() == subject.columns == subject.nbytes == 0
    assert subject.keys_and_values() == (None, None) and subject.tail is None and subject.is_trimmable() and subject.trim(5) == 0
    again = CodedKVCache.from_state((text, arrays))
    assert again.empty() and again.growth.k == subject.growth.k and json.loads(text)["tail"] is None
    fed(again, [3])
    assert again.offset == 3 and not again.empty() and subject.empty()
    assert copy.deepcopy(subject).empty()
    # mlx-lm's own attention, as nothing is coded
    fetched, _ = subject.update_and_fetch(*(x[None] for x in sample(2)))
    q = queries(2)[None]
    plain = mx.fast.scaled_dot_product_attention(q, *(x[None] for x in sample(2)), scale=1.0, mask="causal")
    assert mx.array_equal(fetched.attend(q, 1.0, "causal"), plain)


@pytest.mark.parametrize("spec", ["rvq-4", "affine-4", "raw", "k=rabitq-4,v=affine-2:token"])
@pytest.mark.parametrize("rope", ["none", "partial"])
def test_rows_leave_the_tail_as_encoding_them_by_hand_gives_them(spec: str, rope: str) -> None:
    """Steps of one and of many rows over several boundaries: the first 4 exact, then 256 at a time (or a multiple), the newest 32 kept."""
    growth, counts = growing(spec, rope), [3, 280, *[1] * 9, 250, 1, 600, 1]
    subject = CodedKVCache((), growth)
    keys, values = fed(subject, counts)
    spans, held, first = [], 0, 0
    for count in counts:
        if first < 4 and held - first >= 4 + BLOCK + 32:
            spans.append((0, 4))
            first = 4
        older = (held - first - 32) // BLOCK * BLOCK
        if older > 0 and first >= 4:
            spans.append((first, first + older))
            first += older
        held += count
    assert [(b.first, b.stop) for b in subject.blocks] == spans == [(0, 4), (4, 260), (260, 1028)]
    assert (subject.offset, subject.tail_first, subject.columns) == (1144, 1028, 1144)
    assert bits(subject.tail) == bits([mx.contiguous(x[:, 1028:]) for x in (keys, values)])
    assert bits(subject.blocks[0].rows()) == bits([mx.contiguous(x[:, :4]) for x in (keys, values)])
    for block in subject.blocks[1:]:
        own = [mx.contiguous(x[:, block.first : block.stop]) for x in (keys, values)]
        by_hand = CodedRows.encoded(growth.k, own[0], block.first, ROPES[rope]), CodedRows.encoded(growth.v, own[1], block.first)
        for got, want in zip((block.k, block.v), by_hand, strict=True):
            assert got.parts.keys() == want.parts.keys() and bits(got.parts.values()) == bits(want.parts.values())


def test_a_spec_without_growth_keeps_the_tail_exact() -> None:
    subject = CodedKVCache((block_of("rvq-4", sample(40)),))
    keys, values = fed(subject, [700, 1, 1])
    assert len(subject.blocks) == 1 and bits(subject.tail) == bits((keys, values)) and subject.offset == 742


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_tail_has_the_dtype_of_the_model_and_decoded_rows_too(dtype: mx.Dtype) -> None:
    subject = CodedKVCache((), growing())
    keys, values = fed(subject, [400, 1], dtype=dtype)
    assert {x.dtype for x in (*subject.tail, *subject.keys_and_values(), *subject.blocks[0].k.parts.values())} == {dtype}
    assert subject.blocks[1].k.dtype == dtype
    for got, want in zip(subject.keys_and_values(), (keys, values), strict=True):
        assert bits([mx.contiguous(got[0, :, :4])]) == bits([mx.contiguous(want[:, :4])])
        np.testing.assert_allclose(np.array(got[0].astype(mx.float32)), np.array(want.astype(mx.float32)), atol=1.0)


def test_decoded_float16_rows_do_not_overflow() -> None:
    keys, values = (mx.clip(x * 3e4, -65504, 65504).astype(mx.float16) for x in sample(300))
    subject = CodedKVCache((), growing("rvq-2"))
    for part in ((keys, values), (keys[:, :1], values[:, :1])):
        subject.update_and_fetch(*(x[None] for x in part))
    assert len(subject.blocks) == 2
    assert all(mx.all(mx.isfinite(x)).item() for x in subject.keys_and_values())


@pytest.mark.parametrize(("forget", "left"), [(0, 421), (20, 401), (161, 260), (162, 259), (300, 121), (418, 3), (421, 0), (1000, 0)])
def test_trim_and_go_on(forget: int, left: int) -> None:
    """In the tail, at the boundary, into codes, into the sink, everything, more than there is."""
    subject, counts = CodedKVCache((), growing()), [420, 1]
    fed(subject, counts)
    assert [b.stop for b in subject.blocks] == [4, 260]
    before = [np.array(x) for x in subject.keys_and_values()]
    assert trim_prompt_cache([subject], forget) == 421 - left == (min(forget, 421))
    assert subject.offset == subject.columns == subject.size() == left and subject.empty() == (left == 0)
    more = fed(subject, [7], seed=5)
    after = [np.array(x) for x in subject.keys_and_values()]
    for old, now, new in zip(before, after, more, strict=True):
        assert np.array_equal(now[0, :, :left], old[0, :, :left]) and np.array_equal(now[0, :, left:], np.array(new))
    fed(subject, [600, 1], seed=6)
    stops = [b.stop for b in subject.blocks]
    assert subject.offset == left + 608 and stops == sorted(stops) and subject.keys_and_values()[0].shape[2] == left + 608
    assert all(a.stop == b.first for a, b in pairwise(subject.blocks)) and subject.tail_first == stops[-1]
    assert 32 <= subject.offset - 1 - subject.tail_first < 32 + BLOCK + 4


def test_what_is_asked_wrongly_is_refused() -> None:
    subject = cache_of("rvq-4", 5)
    rows = [x[None] for x in sample(2)]
    with pytest.raises(ValueError, match=r"\[CodedKVCache\] n must be an integer of at least 0, but got -3"):
        subject.trim(-3)
    assert subject.offset == 132
    for bad, message in (
        ([mx.zeros((2, 2, 1, DIM))] * 2, r"rows must be \(1, H, N, D\), but got \(2, 2, 1, 16\) and \(2, 2, 1, 16\); merge for a batch"),
        ([mx.zeros((1, 3, 1, DIM))] * 2, r"rows must have \(H, D, D_v\) = \(2, 16, 16\), but got \(3, 16, 16\)"),
        ([mx.zeros((1, 2, 1, 8))] * 2, r"but got \(2, 8, 8\)"),
        ([rows[0], rows[1][:, :1]], "rows must be"),
        ([rows[0], rows[1][0]], "rows must be"),
        ([rows[0], rows[1][..., 0]], "rows must be"),
        ([rows[0][:, :, :1], rows[1]], "rows must be"),
    ):
        with pytest.raises(ValueError, match=message):
            subject.update_and_fetch(*bad)
    assert subject.offset == 132
    first, second = Block.exact(*sample(3), 0), Block.exact(*sample(3), 4)
    with pytest.raises(ValueError, match="one ends at 3 and the next starts at 4"):
        CodedKVCache((first, second))
    with pytest.raises(ValueError, match=r"blocks must have the same \(H, D, D_v\), but got \(2, 16, 16\) and \(1, 16, 16\)"):
        CodedKVCache((first, Block.exact(*sample(3, heads=1), 3)))
    for window in (-1, 2.5, None, True):
        with pytest.raises(ValueError, match="window must be an integer of at least 0"):
            CodedKVCache((), None, window)
    for name, value in (("sink", -1), ("recent", 1.5), ("recent", None)):
        with pytest.raises(ValueError, match=rf"\[Growth\] {name} must be an integer of at least 0, but got {value}"):
            Growth(Raw(), Raw(), **{name: value})
    with pytest.raises(ValueError, match="cannot encode rows as they come"):
        Growth(parse_codec("tcz-1").k, Raw())


@pytest.mark.parametrize("columns", [0, 5, 300])
@pytest.mark.parametrize("count", [1, 4])
def test_masks_are_those_of_a_kv_cache(count: int, columns: int) -> None:
    plain, subject = KVCache(), CodedKVCache((), growing())
    if columns:
        fed(plain, [columns])
        fed(subject, [columns])
    hidden = mx.zeros((1, count, 8))
    for options in ({}, {"window_size": 3}, {"window_size": 1000}, {"return_array": True}, {"return_array": True, "window_size": 3}):
        want, got = base.create_attention_mask(hidden, plain, **options), base.create_attention_mask(hidden, subject, **options)
        assert mx.array_equal(got, want).item() if isinstance(want, mx.array) else got == want, options
        if not isinstance(want, mx.array):
            assert subject.make_mask(count, **options) == plain.make_mask(count, **{"window_size": None, "return_array": False, **options})


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("count", [0, 5, 400, 1200])
def test_state_round_trip(count: int, window: int) -> None:
    subject = CodedKVCache((), growing("k=rvq-2+2,v=affine-4", "partial"), window)
    if count:
        fed(subject, [count, 1])
    mx.eval([subject.state])
    again = CodedKVCache.from_state(subject.state)
    assert (again.offset, again.columns, again.window, again.tail_first) == (subject.offset, subject.columns, window, subject.tail_first)
    assert again.nbytes <= subject.nbytes  # the tail's spare rows are not in the state
    for other in (subject, again):
        fed(other, [300, 1, 1], seed=3)
    assert bits(again.keys_and_values()) == bits(subject.keys_and_values())
    assert again.growth.rope == ROPES["partial"] and [b.first for b in again.blocks] == [b.first for b in subject.blocks]


def test_a_state_of_calibrated_codes_says_that_its_tables_are_elsewhere() -> None:
    subject = CodedKVCache((block_of("tc-2", sample(40)),))
    mx.eval([subject.state])
    with pytest.raises(ValueError, match=r"the tables of tc are in calibration 5e5e.* save with kvtool"):
        CodedKVCache.from_state(subject.state)


def test_nbytes_are_those_of_all_arrays() -> None:
    subject = CodedKVCache((), growing())
    fed(subject, [700, 1])
    parts = [x for b in subject.blocks for c in (b.k, b.v) for x in c.parts.values()]
    tail = 2 * HEADS * DIM * 4 * -(-(701 - subject.tail_first) // STEP) * STEP
    assert subject.nbytes == sum(x.nbytes for x in parts) + tail
    # Cut at two edges, the same codes stand in two blocks, and are held once.
    block = subject.blocks[1]
    twice = CodedKVCache((block.kept(4, 100), block.kept(100, 260)))
    assert twice.nbytes == CodedKVCache((block,)).nbytes == block.k.nbytes + block.v.nbytes


def test_forks_never_change_one_another() -> None:
    """The parent goes on, forks of forks too, over several boundaries; each equals a cache that was never forked."""
    plan = {"parent": [5, 1, 700, 1], "a": [1, 1, 300, 1, 3], "b": [290, 290], "c": [1] * 70, "trimmed": [9]}
    parent = CodedKVCache((), growing())
    fed(parent, [500, 1])
    frozen = bits(parent.keys_and_values())
    a = copy.deepcopy([parent])[0]
    b, c, trimmed = parent.fork(), copy.copy(parent), parent.fork()
    trimmed.trim(30)
    caches = {"parent": parent, "a": a, "b": b, "c": c, "trimmed": trimmed}
    still = parent.fork()
    for round_ in range(2):
        for seed, (name, subject) in enumerate(caches.items()):
            fed(subject, plan[name], seed=10 * round_ + seed)
    assert bits(still.keys_and_values()) == frozen
    for seed, (name, subject) in enumerate(caches.items()):
        alone = CodedKVCache((), growing())
        fed(alone, [500, 1])
        if name == "trimmed":
            alone.trim(30)
        for round_ in range(2):
            fed(alone, plan[name], seed=10 * round_ + seed)
        assert bits(alone.keys_and_values()) == bits(subject.keys_and_values()), name
    assert all(x is y for x, y in zip(still.blocks[:2], a.blocks[:2], strict=True))


def test_mlx_lm_saves_the_state_and_reads_it_back(tmp_path: Any) -> None:
    """`load_prompt_cache` knows the classes of its own module alone, so that this one is put there."""
    subject = CodedKVCache((), growing())
    fed(subject, [420, 1])
    save_prompt_cache(str(tmp_path / "c.safetensors"), [subject], {})
    (again,) = load_prompt_cache(str(tmp_path / "c.safetensors"))
    assert bits(again.keys_and_values()) == bits(subject.keys_and_values()) and again.offset == 421


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_operations_is_that_of_a_kv_cache(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that leave the tail go to exact blocks, so that every bit must agree; small blocks, so that there are many."""
    monkeypatch.setattr(coded_module, "BLOCK", 8)
    monkeypatch.setattr(coded_module, "STEP", 4)
    rng = np.random.default_rng(seed)
    sink, recent = (int(n) for n in rng.integers(0, 7, 2))
    mine = [CodedKVCache((), Growth(Raw(), Raw(), None, sink, recent))]
    theirs: list[Any] = [KVCache()]
    for step in range(60):
        i = int(rng.integers(len(mine)))
        operation = rng.choice(["update", "one", "trim", "fork", "state", "read"], p=[0.2, 0.35, 0.15, 0.1, 0.1, 0.1])
        if operation in ("update", "one"):
            count = 1 if operation == "one" else int(rng.integers(1, 30))
            new = [x[None] for x in sample(count, int(rng.integers(1 << 30)))]
            keys, values = theirs[i].update_and_fetch(*new)
            fetched, _ = mine[i].update_and_fetch(*new)
            q = queries(count, step)[None]
            wanted = mx.fast.scaled_dot_product_attention(q, keys, values, scale=1.0, mask="causal")
            np.testing.assert_allclose(np.array(fetched.attend(q, 1.0, "causal")), np.array(wanted), rtol=0, atol=3e-6)
        elif operation == "trim":
            n = int(rng.integers(0, 2 + theirs[i].offset))
            assert mine[i].trim(n) == theirs[i].trim(n)
        elif operation == "fork" and len(mine) < 5:
            mine.append(mine[i].fork())
            theirs.append(copy.deepcopy(theirs[i]))
        elif operation == "state":
            mine[i] = CodedKVCache.from_state(mine[i].state)
        assert mine[i].offset == theirs[i].offset
        if theirs[i].offset:
            got, want = mine[i].keys_and_values(), theirs[i].keys_and_values()
            assert bits([mx.contiguous(x) for x in got]) == bits([mx.contiguous(x) for x in want]), (step, operation)


# --- memory ----------------------------------------------------------------------------------------------------------------------


def step_peak(subject: Any, heads: int, dim: int, count: int = 1, batch: int = 1) -> int:
    """Bytes that attention of new queries takes at its peak, beyond what was there."""
    fetched, _ = subject.update_and_fetch(*(mx.repeat(x[None], batch, axis=0) for x in sample(count, 7, heads, dim)))
    q = mx.repeat(queries(count, 3, heads, dim)[None], batch, axis=0)
    mx.eval(fetched.attend(q, 1.0, None))  # tables of angles and codes are made once
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(fetched.attend(q, 1.0, None))
    return mx.get_peak_memory() - before


TILED = ("rvq-4", "rabitq", "affine-4", "commvq-2", "commvq-2:product", "commvq-2:additive", "tc-2", "vecinfer-2", "qjl")


@pytest.mark.parametrize("spec", TILED)
def test_no_array_of_all_rows_is_made(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to 64 tiles takes the memory of a few, also where each is a block; with all rows in one tile it takes that of all.

    On a CPU, MLX hands out memory up to ten operations ahead of the one that runs, so that a peak is known up to as many arrays.
    """
    heads, dim, tile, tiles = 2, 16, 256, 64
    one = 4 * heads * dim * tile
    monkeypatch.setattr(blocks_module, "TILE_VALUES", {"cpu": tile * heads * dim, "gpu": tile * heads * dim})
    assert tile_tokens(heads, dim) == tile
    whole = block_of(spec, sample(tiles * tile, 1, heads, dim), 0, "half")
    single = [whole.kept(first, first + tile) for first in range(0, tiles * tile, tile)]
    for count in (1, 32):  # a step, and a chunk of a prompt
        scores, results = 4 * heads * GROUPS * count * tile, 4 * heads * GROUPS * count * dim
        limit = tiles // 2 * one + 12 * scores
        assert step_peak(CodedKVCache((whole,)), heads, dim, count) < limit
        assert step_peak(CodedKVCache(single), heads, dim, count) < limit + 2 * MERGED * results
        assert count == 1 or limit < tiles // 3 * scores
        forks = BatchCodedKVCache.merge([CodedKVCache(single)] * 2)
        assert step_peak(forks, heads, dim, count, 2) < limit + 12 * scores + 4 * MERGED * results
    monkeypatch.setattr(blocks_module, "TILE_VALUES", {"cpu": tiles * one, "gpu": tiles * one})
    with native.without():
        assert step_peak(CodedKVCache((whole,)), heads, dim) > tiles * one


def test_a_layer_of_32_thousand_rows_is_read_in_tiles() -> None:
    """The shape of SmolLM2's layers: keys and values are 50 MB as float32; a step over their codes takes under 7."""
    heads, dim, count = 3, 64, 1 << 15
    plan = parse_codec("rvq-4")
    rng = np.random.default_rng(0)
    coded = []
    for codec, rope in ((plan.k, RopeSpec("default", dim, base=1e5)), (plan.v, None)):
        shapes = {name: shape for name, (_, shape) in codec.layout((heads, count, dim), mx.float32).items()}
        parts = {name: mx.array(rng.integers(0, 256, shape).astype(np.uint8)) for name, shape in shapes.items() if name.startswith("codes")}
        parts |= {name: mx.ones(shapes[name], mx.bfloat16) for name in ("scale", "mean") if name in shapes}
        mx.eval(parts)
        coded.append(CodedRows(codec, parts, (heads, count, dim), mx.float32, rope))
    mx.eval(cos_sin(coded[0].rope, 0, count))  # angles are kept for all layers, 1 MiB for 4096 positions
    peak = step_peak(CodedKVCache((Block(*coded, count, 0),)), heads, dim)
    assert peak < 7 << 20 < 4 * heads * dim * count / 3, peak


def test_memory_stays_flat_over_many_steps() -> None:
    """2000 single rows: what is held grows by the codes alone, and what a step takes does not grow."""
    subject = CodedKVCache((), growing("rvq-4"))
    keys, values = sample(2400, 4)
    q, held = queries(1)[None], {}
    _native_page.cache_clear()
    _page.cache_clear()
    for i in range(2400):
        fetched, _ = subject.update_and_fetch(keys[None, :, i : i + 1], values[None, :, i : i + 1])
        mx.eval(subject.tail if i % 4 else fetched.attend(q, 1.0, None))
        if i in (399, 2399):
            del fetched
            mx.synchronize()
            held[i] = (mx.get_active_memory(), subject.nbytes, len(subject.blocks), sum(b.k.nbytes + b.v.nbytes for b in subject.blocks))
    (active, size, count, codes), (active_end, size_end, count_end, codes_end) = held[399], held[2399]
    assert (count, count_end) == (2, 10)
    assert _page.cache_info().misses == 1  # one for 4096 positions, none for each step
    spare = 2 * 4 * HEADS * DIM * (32 + BLOCK + STEP)  # how far the tail may be filled
    assert abs((size_end - size) - (codes_end - codes)) <= spare
    # Besides: a table of angles and a mean of each block, and a reader's copies of small parts.
    assert active_end - active <= size_end - size + 8 * (4 * DIM * BLOCK + 4096) + spare


# --- threads ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*TILED, "raw"])
def test_forks_run_in_threads_at_once(spec: str) -> None:
    """Four threads read blocks that nothing has read before, and rows leave the tails meanwhile."""
    growth = growing("rvq-4", "partial")

    def parent() -> CodedKVCache:
        subject = CodedKVCache((block_of(spec, sample(300, 2), 0, "partial"),), growth)
        fed(subject, [200])
        return subject

    def go_on(subject: CodedKVCache, seed: int) -> list[bytes]:
        outputs = []
        for i, count in enumerate([1, 3, 150, 1, 1]):
            fetched, _ = subject.update_and_fetch(*(x[None] for x in sample(count, 100 * seed + i)))
            outputs.append(np.array(fetched.attend(queries(count, i)[None], 1.0, "causal")).tobytes())
        return outputs

    serial = [go_on(fork, i) for i, fork in enumerate(parent().fork() for _ in range(4))]
    forks = [copy.deepcopy(subject) for subject in [parent()] for _ in range(4)]
    together = threading.Barrier(4)

    def work(i: int) -> list[bytes]:
        together.wait()
        return go_on(forks[i], i)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == serial


# --- the hook --------------------------------------------------------------------------------------------------------------------


def with_sinks(module: Any, subject: CodedKVCache) -> mx.array:
    """A model file's call, with learned sinks; a copy of the cache would put the hook in again."""
    fetched, again = subject.update_and_fetch(*(x[None] for x in sample(1)))
    subject.trim(1)
    q, sinks = queries(1)[None], mx.ones((HEADS * GROUPS,))
    return module.scaled_dot_product_attention(q, fetched, again, cache=subject, scale=1.0, mask=None, sinks=sinks)


def test_the_hook_lives_as_long_as_the_caches() -> None:
    gc.collect()
    originals = (base.quantized_scaled_dot_product_attention, gpt_oss.scaled_dot_product_attention)
    assert not hook.is_installed()
    first, second = CodedKVCache(), cache_of("rvq-4", 3)
    assert hook.is_installed() and gpt_oss.scaled_dot_product_attention is not originals[1]
    first.state = second.state  # a cache that is filled anew holds no less, and no longer
    fork = second.fork()
    del first, second
    gc.collect()
    assert hook.is_installed()
    with_sinks(gpt_oss, fork)
    del fork
    gc.collect()
    assert not hook.is_installed()
    assert (base.quantized_scaled_dot_product_attention, gpt_oss.scaled_dot_product_attention) == originals


def test_caches_that_mlx_lm_quantised_are_still_its_own() -> None:
    quantised = QuantizedKVCache(group_size=32, bits=4)
    k, v = quantised.update_and_fetch(*(x[None] for x in sample(40, dim=32)))
    call = {"scale": 0.2, "mask": "causal"}
    gc.collect()
    assert not hook.is_installed()
    # A new array of queries each time: mlx-lm scales them in place.
    want = base.scaled_dot_product_attention(queries(3, dim=32)[None], k, v, cache=quantised, **call)
    subject = cache_of("rvq-4", 3)
    got = base.scaled_dot_product_attention(queries(3, dim=32)[None], k, v, cache=quantised, **call)
    assert hook.is_installed() and mx.array_equal(got, want)
    plain = [x[None] for x in sample(40)]
    assert mx.array_equal(
        gpt_oss.scaled_dot_product_attention(queries(2)[None], *plain, cache=KVCache(), scale=1.0, mask=None, sinks=mx.ones(6)),
        mx.fast.scaled_dot_product_attention(queries(2)[None], *plain, scale=1.0, mask=None, sinks=mx.ones(6)),
    )
    del subject


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("unpatch_first", [True, False])
def test_the_other_patch_goes_in_and_out_in_any_order(patch_first: bool, unpatch_first: bool) -> None:
    gc.collect()
    originals = [m.scaled_dot_product_attention for m in (base, llama, gpt_oss)]
    if patch_first:
        patch_mlx_lm_for_fused_sdpa()
    subject = cache_of("rvq-4", 3)
    want = with_sinks(gpt_oss, subject)
    if not patch_first:
        patch_mlx_lm_for_fused_sdpa()
    assert is_patched() and mx.array_equal(with_sinks(gpt_oss, subject), want)
    another = CodedKVCache()  # puts nothing in twice
    assert mx.array_equal(with_sinks(gpt_oss, another), with_sinks(gpt_oss, another))
    if unpatch_first:
        unpatch_mlx_lm()
        assert not is_patched() and mx.array_equal(with_sinks(gpt_oss, subject), want)
    del subject, another
    gc.collect()
    assert not hook.is_installed()
    assert is_patched() != unpatch_first and hasattr(gpt_oss.scaled_dot_product_attention, "_unpatched_attention") != unpatch_first
    unpatch_mlx_lm()
    subject = CodedKVCache()  # what lay beneath the other patch when the caches went goes with the next
    del subject
    gc.collect()
    assert [m.scaled_dot_product_attention for m in (base, llama, gpt_oss)] == originals


def test_a_model_file_with_sinks_that_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mlx_lm.models.mimo_v2_flash"
    monkeypatch.delitem(sys.modules, name, raising=False)
    subject = cache_of("rvq-4", 3)
    late = importlib.import_module(name)
    caches = [subject, CodedKVCache()]  # those of the model's layers
    assert mx.array_equal(with_sinks(late, caches[0]), with_sinks(gpt_oss, caches[0]))
