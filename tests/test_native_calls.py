"""One native call for all that caches hold: sequences cut at random into blocks of random codecs and tails, against float64 attention."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import tc_cases
from tests.test_coded import assert_close, rows_of_block
from tests.test_native import level  # noqa: F401
from veloxquant_mlx import native
from veloxquant_mlx.caches.batch_fetched import BatchFetched, Row
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.coded import Fetched, Growth
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.native import attending
from veloxquant_mlx.transfer.rope_angles import PAGE
from veloxquant_mlx.transfer.rope_spec import RopeSpec

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")

SCALE = 0.2
SPECS = ("raw", "rvq-4", "rvq-2+2", "rvq-3:nocenter", "rabitq", "affine-4", "affine-2:token", "k=rvq-4,v=raw", "tc-2", "tc-3.5:carry")
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
KINDS = ("none", "causal", "bool", *DTYPES)


@dataclass
class Case:
    """Sequences of a batch and a step's queries.

    Attributes:
        q: (B, H_q, Q, D).
        held: of each sequence, its blocks, oldest first, and its tail.
        mask, seen: what attention gets, and in float64 (B, H_q, Q, S), what is added to the scores.
    """

    q: mx.array
    held: list[tuple[list[Block], tuple[mx.array, mx.array]]]
    length: int
    window: int
    mask: Any
    seen: np.ndarray
    sinks: np.ndarray | None

    def attend(self) -> mx.array:
        """(B, H_q, Q, D_v), by the caches' own way."""
        sinks = None if self.sinks is None else mx.array(self.sinks.astype(np.float32))
        rows = [Row(tuple(blocks), None, stop_of(blocks), self.length - tokens(blocks, tail)) for blocks, tail in self.held]
        longest = max(tail[0].shape[1] for _, tail in self.held)
        tails = [mx.stack([mx.pad(tail[i], [(0, 0), (longest - tail[i].shape[1], 0), (0, 0)]) for _, tail in self.held]) for i in (0, 1)]
        return BatchFetched(tuple(rows), *tails, self.length, self.window).attend(self.q, SCALE, self.mask, sinks)

    def check(self, out: mx.array) -> None:
        for b, (blocks, tail) in enumerate(self.held):
            exact = tuple(np.array(x.astype(mx.float32)) for x in tail)
            with native.without():
                plain = [*([np.array(x) for x in block.rows()] for block in blocks), exact]
            rows = [*map(rows_of_block, blocks), exact]
            joined, float32 = ([np.concatenate([pair[i] for pair in of], axis=1) for i in (0, 1)] for of in (rows, plain))
            bias = self.seen[b, ..., self.length - joined[0].shape[1] :]
            assert_close(out[b], None, self.q[b] * SCALE, [x.astype(np.float64) for x in joined], float32, bias, sinks=self.sinks)


def stop_of(blocks: list[Block]) -> int:
    return blocks[-1].stop if blocks else 0


def tokens(blocks: list[Block], tail: tuple[mx.array, mx.array]) -> int:
    return stop_of(blocks) + tail[0].shape[1]


def made(rng: np.random.Generator, spec: str, count: int, heads: int, dim: int, dim_v: int, rope: RopeSpec | None, first: int) -> Block:
    """Encoded rows, some of them left out at either end."""
    before, after = rng.integers(0, 40, 2) if first else (0, int(rng.integers(0, 40)))
    before = min(int(before), first)
    keys, values = (mx.array(rng.standard_normal((heads, before + count + after, size)).astype(np.float32)) for size in (dim, dim_v))
    plan = parse_codec(spec)
    k, v = tc_cases.bound(spec, heads, dim) if spec.startswith("tc") else (plan.k, plan.v)
    return Growth(k, v, rope).encoded(keys, values, first - before).kept(first, first + count)


def case_of(seed: int, specs: tuple[str, ...] = SPECS) -> Case:
    rng = np.random.default_rng(seed)
    heads, groups, batch, queries = (int(rng.integers(a, b)) for a, b in ((1, 4), (1, 9), (1, 4), (1, 5)))
    heads, dim = (2, 64) if any(spec.startswith("tc") for spec in specs) and seed % 2 else (heads, int(rng.choice((16, 72, 80))))
    dim_v = dim if seed % 2 else int(rng.choice((dim, 24)))
    usable = [spec for spec in specs if seed % 2 or not spec.startswith("tc")]
    part, dtype = dim // 4 * 2, DTYPES[int(rng.integers(3))]
    rope = RopeSpec("yarn", part, "interleaved", base=1e4, first=4, magnitude=1.3) if seed % 3 else RopeSpec("default", dim, base=1e4)

    def more(blocks: list[Block], count: int) -> list[Block]:
        for _ in range(count):
            coded = rope if rng.random() < 0.6 else None  # keys before RoPE, or as cached
            blocks = [*blocks, made(rng, str(rng.choice(usable)), int(rng.integers(1, 70)), heads, dim, dim_v, coded, stop_of(blocks))]
        return blocks

    prefix, held = more([], 3), []
    for _ in range(batch):
        blocks = more(prefix[: int(rng.integers(0, 4))], int(rng.integers(0, 3)))
        count = queries + int(rng.integers(0, 50))
        tail = (mx.array(rng.standard_normal((heads, count, size)).astype(np.float32)).astype(dtype) for size in (dim, dim_v))
        held.append((blocks, tuple(tail)))
    length = max(tokens(*one) for one in held) + int(rng.integers(0, 3))
    window, kind = int(rng.choice((0, 0, 30))), KINDS[int(rng.integers(len(KINDS)))]
    at, column = np.arange(length - queries, length)[:, None], np.arange(length)
    seen, mask = np.zeros((batch, heads * groups, queries, length)), None
    if kind == "causal":
        mask, seen = "causal", np.where(column <= at, seen, -np.inf)
    elif kind != "none":
        shape = [n if rng.random() < 0.5 else 1 for n in seen.shape[:3]] + [length]
        shown = rng.random(shape) < 0.5
        shown[..., 0, :] &= rng.random() < 0.7  # at times a query sees nothing
        added = mx.array(np.where(shown, 3 * rng.standard_normal(shape), -np.inf)).astype(mx.float32 if kind == "bool" else kind)
        mask = mx.array(shown) if kind == "bool" else added
        seen = seen + (np.where(shown, 0, -np.inf) if kind == "bool" else np.array(added.astype(mx.float32)))
    seen = np.where((column > at - window) | (window == 0), seen, -np.inf)
    q = mx.array(rng.standard_normal((batch, heads * groups, queries, dim)).astype(np.float32))
    return Case(q, held, length, window, mask, seen, rng.standard_normal(heads * groups) if rng.random() < 0.3 else None)


@pytest.mark.parametrize("seed", range(24))
def test_any_sequences_under_any_mask(level: str, seed: int) -> None:  # noqa: F811
    case = case_of(seed)
    assert all(block.part is not None for blocks, _ in case.held for block in blocks)
    before = native.calls()
    out = case.attend()
    # One call, whatever there is; without codes and a window it is MLX's own attention.
    assert native.calls() == before + bool(case.window or any(blocks for blocks, _ in case.held))
    case.check(out)


@pytest.mark.parametrize("seed", range(100, 108))
def test_blocks_that_mlx_reads_beside_them(seed: int) -> None:
    case = case_of(seed)
    for blocks, _ in case.held:
        for block in blocks[seed % 2 :: 2]:
            block.__dict__["part"] = None  # as of a codec without a native reader
    case.check(case.attend())


@pytest.mark.parametrize("seed", range(6))
def test_results_do_not_depend_on_threads_or_on_the_rest_of_a_batch(seed: int) -> None:
    case, before = case_of(seed), native.threads()
    try:
        results = []
        for count in (1, 2, 5):
            native.set_threads(count)
            results.append(np.array(case.attend()))
    finally:
        native.set_threads(before)
    assert np.array_equal(results[0], results[1], equal_nan=True) and np.array_equal(results[0], results[2], equal_nan=True)
    for b, (blocks, tail) in enumerate(case.held):
        if not blocks and not case.window:
            continue
        mask = case.mask
        if not isinstance(mask, mx.array):
            alone = mask
        else:
            whole = mx.broadcast_to(mask, (len(case.held), *mask.shape[1:]))
            alone = whole[b : b + 1, ..., case.length - tokens(blocks, tail) :]
        sinks = None if case.sinks is None else mx.array(case.sinks.astype(np.float32))
        one = Fetched(tuple(blocks), *tail, case.window).attend(case.q[b : b + 1], SCALE, alone, sinks)
        # Queries of several sequences go over a shared block together, a block of four at a time: sums in another order.
        np.testing.assert_allclose(np.array(one[0]), results[0][b], rtol=0, atol=3e-6)


def test_blocks_across_pages_of_angles_and_longer_than_a_problem() -> None:
    """Rows at positions around a page's end, and more rows than one problem takes."""
    rng, rope = np.random.default_rng(3), RopeSpec("default", 16, base=1e4)
    keys, values = (mx.array(rng.standard_normal((1, 2 * PAGE + 50, 16)).astype(np.float32)) for _ in range(2))
    plan = parse_codec("rvq-4")
    long = Block.exact(keys, values, 0)
    coded = Growth(plan.k, plan.v, rope).encoded(keys[:, :60], values[:, :60], long.stop).kept(long.stop + 1, long.stop + 60)
    far = Growth(plan.k, plan.v, rope).encoded(keys[:, :PAGE], values[:, :PAGE], PAGE - 30).kept(PAGE - 20, 2 * PAGE + 5)
    for block in (long, far, coded):
        q = mx.array(rng.standard_normal((1, 3, 16)).astype(np.float32))
        out = Fetched((block,), keys[:, :0], values[:, :0], 0).attend(q[:, :, None], SCALE, None)
        # The angles of far positions are those of `mx.fast.rope`, in float32.
        with native.without():
            plain = [np.array(x) for x in block.rows()]
        assert_close(out[0], None, q[0, :, None] * SCALE, [x.astype(np.float64) for x in plain], plain, np.zeros((3, 1, block.count)))


def test_more_blocks_than_are_solved_together(level: str) -> None:  # noqa: F811
    """Results of many blocks for many queries are merged as they come: they would take too much memory beside each other."""
    rng, heads, groups, queries = np.random.default_rng(4), 2, 2, 3 * attending.most_rows() // 4
    rows = [tuple(mx.array(rng.standard_normal((heads, 2, 16)).astype(np.float32)) for _ in "kv") for _ in range(300)]
    blocks = [Block.exact(*pair, 2 * i) for i, pair in enumerate(rows)]
    tail = rows[0]
    q = mx.array(rng.standard_normal((1, heads * groups, queries, 16)).astype(np.float32))
    out = Fetched(tuple(blocks), *tail, 0).attend(q, SCALE, None)
    joined = [np.concatenate([np.array(pair[i]) for pair in (*rows, tail)], axis=1) for i in (0, 1)]
    assert_close(out[0], None, q[0] * SCALE, [x.astype(np.float64) for x in joined], joined, np.zeros((heads * groups, queries, 602)))


def test_many_blocks_are_one_call() -> None:
    rng, plan = np.random.default_rng(5), parse_codec("rvq-4")
    growth = Growth(plan.k, plan.v, RopeSpec("default", 64, base=1e4))
    blocks = []
    for first in range(0, 40 * 8, 8):
        blocks.append(growth.encoded(*(mx.array(rng.standard_normal((2, 8, 64)).astype(np.float32)) for _ in "kv"), first))
    fetched = Fetched(tuple(blocks), *(mx.array(rng.standard_normal((2, 5, 64)).astype(np.float32)) for _ in "kv"), 0)
    q = mx.array(rng.standard_normal((1, 4, 1, 64)).astype(np.float32))
    fetched.attend(q, SCALE, None)
    before = native.calls()
    fetched.attend(q, SCALE, None)
    assert native.calls() == before + 1
