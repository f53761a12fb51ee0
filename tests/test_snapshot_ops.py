"""Random histories of one cache: the rows taken are those a list of tokens says are live, and the rebuilt cache fetches the same arrays.

Keys and values number their tokens, so that a stale, padding or misplaced row shows by its number.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from kvtool.snapshot import CacheState, Quantized, build_caches, take_states

HEADS, K_DIM, V_DIM = 2, 64, 32
GROUP, BITS = 32, 8

# Updates of 1 token, of up to a few windows, and across mlx-lm's allocation step of 256 rows.
UPDATE = st.one_of(st.just(1), st.integers(2, 40), st.integers(250, 270))
OPERATIONS = st.lists(
    st.one_of(st.tuples(st.just("update"), UPDATE), st.tuples(st.just("trim"), st.integers(1, 30))), min_size=1, max_size=8
)
MORE = st.lists(st.one_of(st.just(1), st.integers(2, 20)), min_size=1, max_size=6)


def rows(ids: list[int], dim: int) -> np.ndarray:
    """(1, H, S, dim): token number plus a quarter of the head's; the columns are equal, so that 8-bit groups are exact."""
    values = np.array(ids, np.float32)[None, None, :, None] + np.arange(HEADS, dtype=np.float32)[None, :, None, None] / 4
    return np.broadcast_to(values, (1, HEADS, len(ids), dim)).copy()


class History:
    """A live cache and, independently, the tokens it has seen: (position, token number)."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.ids: list[int] = []
        self.start = 0  # ChunkedKVCache: positions before it are gone
        self.next_id = 1

    def update(self, count: int) -> tuple[Any, Any]:
        if isinstance(self.cache, ChunkedKVCache):
            self.start = max(self.start, len(self.ids) - self.cache.chunk_size)
        new = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        self.ids += new
        return update(self.cache, new)

    def trim(self, count: int) -> None:
        if not self.cache.is_trimmable():
            return
        trimmed = self.cache.trim(count)
        assert trimmed == min(count, len(self.ids) - self.start)
        del self.ids[len(self.ids) - trimmed :]

    def live(self) -> list[int]:
        """Positions of the rows that a continuation can see."""
        seen = len(self.ids)
        if isinstance(self.cache, RotatingKVCache) and seen >= self.cache.max_size:
            keep = self.cache.keep
            return [*range(keep), *range(seen - (self.cache.max_size - 1 - keep), seen)]
        if isinstance(self.cache, ChunkedKVCache):
            return list(range(max(self.start, seen - self.cache.chunk_size), seen))
        return list(range(seen))


def update(cache: Any, ids: list[int]) -> tuple[Any, Any]:
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()  # as llama4 does before every forward
    return cache.update_and_fetch(mx.array(rows(ids, K_DIM)), mx.array(rows(ids, V_DIM)))


def values(array: mx.array | Quantized) -> np.ndarray:
    return np.array(array.dequantize() if isinstance(array, Quantized) else array)


def check_rows(state: CacheState, history: History) -> None:
    positions = history.live()
    assert [p for start, stop in state.positions for p in range(start, stop)] == positions
    assert state.offset == len(history.ids)
    if not positions:
        assert state.k is None and state.v is None
        return
    ids = [history.ids[p] for p in positions]
    # float32 values of one group are equal: affine quantisation gives them back up to one rounding of scale * level + bias.
    assert np.allclose(values(state.k), rows(ids, K_DIM)[0], rtol=1e-6, atol=0)
    assert np.allclose(values(state.v), rows(ids, V_DIM)[0], rtol=1e-6, atol=0)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, mx.array):
        return mx.array_equal(a, b).item()
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


MAKERS: dict[str, Any] = {
    "full": KVCache,
    "concatenate": ConcatenateKVCache,
    "quantized": lambda: QuantizedKVCache(GROUP, BITS),
    "chunked": lambda: ChunkedKVCache(16),
    "rotating": lambda: RotatingKVCache(16),
    "rotating-keep": lambda: RotatingKVCache(16, keep=4),
    "rotating-keep-all": lambda: RotatingKVCache(5, keep=4),
    "rotating-of-2": lambda: RotatingKVCache(2),
    "rotating-over-step": lambda: RotatingKVCache(300, keep=4),
}


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS, more=MORE, quantise=st.booleans())
def test_history(kind: str, operations: list[tuple[str, int]], more: list[int], quantise: bool) -> None:
    history = History(MAKERS[kind]())
    stale = False  # ConcatenateKVCache appends behind trimmed rows: then it is the one that is wrong
    for name, count in operations:
        if name == "trim":
            history.trim(count)
            stale = kind == "concatenate" and history.cache.keys is not None and history.cache.offset < history.cache.keys.shape[2]
        elif stale:
            break
        else:
            history.update(count)
    if quantise and kind == "full":
        history.cache = history.cache.to_quantized(group_size=GROUP, bits=BITS)
    (state,) = take_states([history.cache])
    check_rows(state, history)
    (restored,) = build_caches([state])
    assert type(restored) is type(history.cache)
    (again,) = take_states([restored])
    check_rows(again, history)
    assert again.params == state.params
    if stale:
        history.cache = restored
        history.update(1)
        check_rows(take_states([restored])[0], history)
        return
    for count in more:
        if hasattr(restored, "make_mask"):
            assert str(restored.make_mask(count, return_array=False, window_size=None)) == str(
                history.cache.make_mask(count, return_array=False, window_size=None)
            )
        ids = list(range(history.next_id, history.next_id + count))
        assert same(history.update(count), update(restored, ids))
        check_rows(take_states([history.cache])[0], history)
        check_rows(take_states([restored])[0], history)


def test_the_oracle_sees_a_stale_row() -> None:
    """Trim without regard to the offset would show: the checks above can fail."""
    history = History(KVCache())
    history.update(20)
    history.trim(5)
    history.cache.offset += 1
    with pytest.raises(AssertionError):
        check_rows(take_states([history.cache])[0], history)
