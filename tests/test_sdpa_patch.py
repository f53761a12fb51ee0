"""The patch of mlx-lm's attention: what it reaches, what it leaves alone, that it can be undone."""

import importlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base, gemma3_text, gpt_oss, llama, qwen3
from mlx_lm.models.cache import KVCache

from tests.tiny_random import build
from veloxquant_mlx.metal.fused_sdpa import (
    MAX_HEAD_DIM,
    MAX_N_CENTROIDS,
    MAX_N_SUB,
    KVCacheConfig,
    is_patched,
    metal_fused_sdpa,
    patch_mlx_lm_for_fused_sdpa,
    supports_shape,
    unpatch_mlx_lm,
)

MODULES = (base, llama, qwen3, gemma3_text, gpt_oss)
MEMORY_BOUND = KVCacheConfig(fused_sdpa=True, fused_sdpa_memory_bound=True)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = [m.scaled_dot_product_attention for m in MODULES]
    yield
    unpatch_mlx_lm()
    assert [m.scaled_dot_product_attention for m in MODULES] == before


class Recorder:
    """A cache whose attention returns what it was called with."""

    def __init__(self, config: Any = MEMORY_BOUND) -> None:
        self.config = config
        self.calls: list[tuple[float, bool]] = []

    def fused_sdpa(self, queries: mx.array, *, scale: float, causal: bool) -> mx.array:
        self.calls.append((scale, causal))
        return queries + 1


def qkv(length: int = 3) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(length)
    return tuple(mx.random.normal((1, 2, length, 8)) for _ in range(3))  # type: ignore[return-value]


def test_patch_reaches_every_module_and_is_undone() -> None:
    originals = [m.scaled_dot_product_attention for m in MODULES]
    assert not is_patched()
    patch_mlx_lm_for_fused_sdpa()
    assert is_patched()
    assert all(m.scaled_dot_product_attention is not o for m, o in zip(MODULES, originals, strict=True))
    unpatch_mlx_lm()
    assert not is_patched()
    assert all(m.scaled_dot_product_attention is o for m, o in zip(MODULES, originals, strict=True))


def test_patch_is_idempotent() -> None:
    original = llama.scaled_dot_product_attention
    patch_mlx_lm_for_fused_sdpa()
    once = llama.scaled_dot_product_attention
    patch_mlx_lm_for_fused_sdpa()
    assert llama.scaled_dot_product_attention is once
    unpatch_mlx_lm()
    assert llama.scaled_dot_product_attention is original
    unpatch_mlx_lm()
    assert llama.scaled_dot_product_attention is original


def test_a_module_imported_while_patched_is_restored() -> None:
    original = base.scaled_dot_product_attention
    patch_mlx_lm_for_fused_sdpa()
    late = importlib.reload(importlib.import_module("mlx_lm.models.olmo2"))
    assert late.scaled_dot_product_attention is base.scaled_dot_product_attention
    unpatch_mlx_lm()
    assert late.scaled_dot_product_attention is original


@pytest.mark.parametrize(("mask", "causal"), [(None, False), ("causal", True)])
def test_a_memory_bound_cache_attends_itself(mask: str | None, causal: bool) -> None:
    patch_mlx_lm_for_fused_sdpa()
    cache = Recorder()
    q, k, v = qkv()
    out = llama.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.5, mask=mask)
    assert cache.calls == [(0.5, causal)]
    assert mx.array_equal(out, q + 1)
    llama.scaled_dot_product_attention(q, k, v, cache, 0.25, mask)  # by position
    assert cache.calls[1:] == [(0.25, causal)]


@pytest.mark.parametrize(
    "config",
    [
        KVCacheConfig(),
        KVCacheConfig(fused_sdpa=True),
        KVCacheConfig(fused_sdpa_memory_bound=True),
        {"fused_sdpa": True, "fused_sdpa_memory_bound": True},
        None,
    ],
)
def test_other_configurations_take_the_original(config: Any) -> None:
    q, k, v = qkv()
    cache = Recorder(config)
    want = llama.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.5, mask="causal")
    patch_mlx_lm_for_fused_sdpa()
    got = llama.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.5, mask="causal")
    assert not cache.calls
    assert mx.array_equal(got, want)


def test_no_cache_takes_the_original() -> None:
    q, k, v = qkv()
    want = llama.scaled_dot_product_attention(q, k, v, cache=None, scale=0.5, mask=None)
    patch_mlx_lm_for_fused_sdpa()
    assert mx.array_equal(llama.scaled_dot_product_attention(q, k, v, cache=None, scale=0.5, mask=None), want)


@pytest.mark.parametrize(
    "extra",
    [
        {"mask": mx.array(np.tril(np.ones((3, 3), bool)))},
        {"mask": mx.zeros((3, 3))},
        {"mask": None, "sinks": mx.zeros((2,))},
        {"mask": "causal", "sinks": mx.ones((2,))},
    ],
    ids=["bool-mask", "additive-mask", "sinks", "causal-with-sinks"],
)
def test_mask_arrays_and_sinks_take_the_original(extra: dict[str, Any]) -> None:
    q, k, v = qkv()
    cache = Recorder()
    want = base.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.5, **extra)
    patch_mlx_lm_for_fused_sdpa()
    got = gpt_oss.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.5, **extra)
    assert not cache.calls
    assert mx.array_equal(got, want)


class CodedCache(KVCache):
    """VecInfer codes of a full-size codebook per row: keeps codes, attends with the kernel, returns nothing to attend to."""

    config = MEMORY_BOUND

    def __init__(self, sub: int, entries: int) -> None:
        super().__init__()
        self.sub, self.entries = sub, entries
        mx.random.seed(sub)
        self.codebooks = [mx.random.normal((entries, sub)) for _ in range(2)]
        self.codes: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        new = [self._nearest(x, c) for x, c in zip((keys, values), self.codebooks, strict=True)]
        self.codes = [mx.concatenate(pair, axis=2) for pair in zip(self.codes, new, strict=True)] if self.codes else new
        self.offset += keys.shape[2]
        return mx.full(keys.shape, float("nan")), mx.full(values.shape, float("nan"))

    def fused_sdpa(self, queries: mx.array, *, scale: float, causal: bool) -> mx.array:
        return metal_fused_sdpa(queries, self.codes[0], self.codebooks[0], self.codes[1], self.codebooks[1], scale, causal=causal)

    def decoded(self) -> list[mx.array]:
        return [c[i.reshape(-1)].reshape(*i.shape[:3], -1) for c, i in zip(self.codebooks, self.codes, strict=True)]

    def _nearest(self, x: mx.array, codebook: mx.array) -> mx.array:
        rows = x.reshape(*x.shape[:3], -1, 1, self.sub)
        return mx.argmin(mx.square(rows - codebook).sum(axis=-1), axis=-1).astype(mx.int32)


class DecodedCache(CodedCache):
    """The same codes, decoded for mlx-lm's own attention."""

    config = KVCacheConfig()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        super().update_and_fetch(keys, values)
        keys, values = self.decoded()
        return keys, values


def test_a_patched_model_runs_on_codes_alone() -> None:
    """Prefill and decode of a real model: the same logits as attention over the decoded codes."""
    model = build("llama", head_dim=32)
    patch_mlx_lm_for_fused_sdpa()
    tokens = mx.array([[5, 3, 11, 7, 2]])
    coded = [CodedCache(4, 64) for _ in model.layers]
    decoded = [DecodedCache(4, 64) for _ in model.layers]
    for chunk in (tokens, mx.array([[9]]), mx.array([[4]])):
        got, want = model(chunk, cache=coded), model(chunk, cache=decoded)
        assert mx.isfinite(got).all()
        # float32 on both sides, in another order of sums.
        assert mx.abs(got - want).max() < 1e-5 * mx.abs(want).max()
    unpatch_mlx_lm()
    assert mx.isnan(model(mx.array([[4]]), cache=coded)).any(), "the sentinels reach the original attention once unpatched"


def test_supported_shapes() -> None:
    assert supports_shape(MAX_N_CENTROIDS, MAX_N_SUB, MAX_HEAD_DIM)
    assert supports_shape(1, 1, 1)
    assert not supports_shape(MAX_N_CENTROIDS + 1, MAX_N_SUB, MAX_HEAD_DIM)
    assert not supports_shape(MAX_N_CENTROIDS, MAX_N_SUB + 1, MAX_HEAD_DIM)
    assert not supports_shape(MAX_N_CENTROIDS, MAX_N_SUB, MAX_HEAD_DIM + 1)
    assert not supports_shape(0, 1, 32)
