"""Eviction caches: rows, positions and attention against a float64 simulation of a layer, and mlx-lm's protocol."""

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.base import scaled_dot_product_attention

import kvtool
from kvtool.fisher import run_forward
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from tests.texts import text
from veloxquant_mlx.allocators.eviction import H2OState, h2o_update
from veloxquant_mlx.caches import evicting_rows, hook
from veloxquant_mlx.caches.evicting import EvictingCache, H2OCache, KeyformerCache, QFiltersCache, gumbel, query_filters
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs._base import RoleName
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec

HEADS, GROUPS, DIM, VALUES = 2, 3, 16, 8
BASE = 500.0
ROPE = RopeSpec("default", DIM, base=BASE)
FILTERS = np.random.default_rng(5).standard_normal((HEADS, DIM))
POLICIES: dict[str, tuple[type[EvictingCache], dict[str, Any]]] = {
    "h2o": (H2OCache, {"decay": 0.98}),
    "keyformer": (KeyformerCache, {"tau": 0.5, "seed": 3}),
    "qfilters": (QFiltersCache, {"filters": FILTERS}),
}
CHUNKS = (70, 1, 1, 1, 5, 1, 33, 1, 1, 1)  # the first is longer than the budget
BUDGET, SINK, RECENT = 24, 3, 6


def make(policy: str, budget: int = BUDGET, *, renumber: bool = False, **more: Any) -> EvictingCache:
    cls, arguments = POLICIES[policy]
    shared = {"n_sink": SINK, "recent": RECENT, "renumber": renumber, "rope": ROPE if renumber else None}
    return cls(budget, **{**shared, **arguments, **more})


# --- the layer in float64 --------------------------------------------------------------------------------------------------------


def turn(x: np.ndarray, position: float) -> np.ndarray:
    """One vector (..., D) rotated for a position, pairs (i, i + D/2)."""
    half = x.shape[-1] // 2
    angle = position * BASE ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


@dataclass
class Row:
    token: int
    position: int
    score: float = 0.0
    coded: bool = False


@dataclass
class Oracle:
    """One layer of a model with an evicting cache, a token and a head at a time; nothing but the definition."""

    policy: str
    renumber: bool
    keys: np.ndarray  # (H, T, D) before RoPE
    values: np.ndarray
    queries: np.ndarray  # (H, G, T, D) before RoPE
    noise: np.ndarray  # (H, T)
    codec: str = ""
    rows: list[list[Row]] = field(default_factory=lambda: [[] for _ in range(HEADS)])
    seen: int = 0
    margin: float = np.inf  # by which the closest choice was made

    def key(self, h: int, row: Row) -> np.ndarray:
        if not row.coded:
            return turn(self.keys[h, row.token], row.position)
        kept = decoded(self.codec, "k", self.renumber)[h, row.token]
        return turn(kept, row.position) if self.renumber else kept

    def value(self, h: int, row: Row) -> np.ndarray:
        return decoded(self.codec, "v", True)[h, row.token] if row.coded else self.values[h, row.token]

    def forward(self, count: int) -> np.ndarray:
        """Attention of the next tokens' queries, (H * G, count, Dv), then eviction."""
        out = np.empty((HEADS, GROUPS, count, VALUES))
        for h in range(HEADS):
            before = self.rows[h]
            offset = len(before) if self.renumber else self.seen
            new = [Row(self.seen + s, offset + s) for s in range(count)]
            for s in range(count):
                visible = before + new[: s + 1]
                keys = np.stack([self.key(h, row) for row in visible])
                values = np.stack([self.value(h, row) for row in visible])
                for g in range(GROUPS):
                    query = turn(self.queries[h, g, self.seen + s], offset + s)
                    out[h, g, s] = softmax(keys @ query / np.sqrt(DIM)) @ values
            live = list(before)
            for row in new:
                self.admit(h, live, row)
            plan = parse_codec(self.codec) if self.codec else None
            for i, row in enumerate(live):
                row.position = i if self.renumber else row.token
                row.coded |= plan is not None and plan.sink <= i < len(live) - plan.recent
            self.rows[h] = live
        self.seen += count
        return out.reshape(HEADS * GROUPS, count, VALUES)

    def admit(self, h: int, live: list[Row], row: Row) -> None:
        if live:
            received = softmax(np.array([self.key(h, other) @ self.key(h, row) for other in live]) / np.sqrt(DIM))
            for other, share in zip(live, received, strict=True):
                other.score = other.score * (0.98 if self.policy == "h2o" else 1.0) + share
        else:
            row.score = 1.0
        live.append(row)
        if len(live) > BUDGET:
            eligible = live[SINK:-RECENT]
            ranks = [self.rank(h, other) for other in eligible]
            order = np.argsort(ranks)
            self.margin = min(self.margin, ranks[order[1]] - ranks[order[0]])
            live.remove(eligible[order[0]])

    def rank(self, h: int, row: Row) -> float:
        if self.policy == "qfilters":
            return float(self.key(h, row) @ FILTERS[h])
        return row.score + (0.5 * float(self.noise[h, row.token]) if self.policy == "keyformer" else 0.0)


@cache
def layer() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values (H, T, D), queries (H, G, T, D), before RoPE, of more tokens than any test takes."""
    rng = np.random.default_rng(11)
    tokens = sum(CHUNKS)
    return tuple(
        rng.standard_normal((HEADS, *shape)).astype(np.float32) for shape in ((tokens, DIM), (tokens, VALUES), (GROUPS, tokens, DIM))
    )


@cache
def decoded(spec: str, role: RoleName, before_rope: bool) -> np.ndarray:
    """(H, T, D) rows as a codec, which takes no mean, gives each back when it codes that row alone; keys before RoPE or at its token."""
    codec, rows = getattr(parse_codec(spec), role), layer()["kv".index(role)]
    rows = mx.array(rows) if before_rope else rotated(rows, 0)[0]
    alone = [codec.decode(codec.encode(rows[:, t : t + 1]), (HEADS, 1, rows.shape[2]), mx.float32) for t in range(rows.shape[1])]
    return np.array(mx.concatenate(alone, axis=1), np.float64)


def rotated(x: np.ndarray, offset: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """(..., S, D) rotated from `offset` on by mlx's own RoPE, as a model does it."""
    rows = mx.array(x).reshape(1, -1, *x.shape[-2:])
    return mx.fast.rope(rows, DIM, traditional=False, base=BASE, scale=1.0, offset=offset).astype(dtype)


def run(subject: Any, chunks: Sequence[int], dtype: mx.Dtype = mx.float32, start: int = 0) -> list[mx.array]:
    """The attention outputs (H * G, S, Dv) of a model's layer on such a cache, one a forward."""
    keys, values, queries = layer()
    outputs, at = [], start
    for count in chunks:
        span = slice(at, at + count)
        mask = subject.make_mask(count)
        q = rotated(queries[:, :, span], subject.offset, dtype)
        k = rotated(keys[:, span], subject.offset, dtype)
        fetched = subject.update_and_fetch(k, mx.array(values[None, :, span]).astype(dtype))
        outputs.append(scaled_dot_product_attention(q, *fetched, cache=subject, scale=DIM**-0.5, mask=mask)[0])
        mx.eval(outputs[-1], subject.state)
        at += count
    return outputs


@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_attention_is_over_exactly_the_rows_kept(policy: str, renumber: bool) -> None:
    """Every forward's output, prefill longer than the budget included, and the rows that each head keeps."""
    noise = np.array(gumbel(3, HEADS, 0, sum(CHUNKS)))
    oracle = Oracle(policy, renumber, *layer(), noise)
    subject = make(policy, renumber=renumber)
    differ = False
    for at, count in zip(np.cumsum((0, *CHUNKS)), CHUNKS, strict=False):
        (out,) = run(subject, [count], start=int(at))
        np.testing.assert_allclose(np.array(out), oracle.forward(count), rtol=0, atol=2e-6)
        kept = [[row.token for row in rows] for rows in oracle.rows]
        assert subject.size() == len(kept[0]) <= BUDGET
        assert subject.offset == (subject.size() if renumber else at + count)
        values = np.array(subject.store.arrays["values"])
        for h in range(HEADS):  # values tell the tokens apart, in each policy
            np.testing.assert_array_equal(values[h], layer()[1][h, kept[h]])
        if isinstance(subject, H2OCache):
            np.testing.assert_array_equal(np.array(subject.positions), kept)
            scores = [[row.score for row in rows] for rows in oracle.rows]
            np.testing.assert_allclose(np.array(subject.rows["scores"]), scores, rtol=2e-5)
        differ |= kept[0] != kept[1]
    assert differ and oracle.margin > 1e-5  # heads keep different rows, and float32 decides as float64
    assert all(row.token < SINK for rows in oracle.rows for row in rows[:SINK])


@pytest.mark.parametrize("codec", ["raw", "rvq-4:nocenter,sink=2,recent=5", "k=rabitq-4:nocenter,v=affine-4,sink=0,recent=0"])
@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_attention_is_over_exactly_the_codes_kept(policy: str, renumber: bool, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with rows as they are; a row that leaves takes its codes along."""
    monkeypatch.setattr(evicting_rows, "tile_tokens", lambda heads, dim: 7)
    oracle = Oracle(policy, renumber, *layer(), np.array(gumbel(3, HEADS, 0, sum(CHUNKS))), codec)
    subject, plan = make(policy, renumber=renumber, codec=codec), parse_codec(codec)
    for at, count in zip(np.cumsum((0, *CHUNKS)), CHUNKS, strict=False):
        (out,) = run(subject, [count], start=int(at))
        np.testing.assert_allclose(np.array(out), oracle.forward(count), rtol=0, atol=3e-6)
        if isinstance(subject, H2OCache):
            np.testing.assert_array_equal(np.array(subject.positions), [[row.token for row in rows] for rows in oracle.rows])
        assert subject.size() == len(oracle.rows[0]) and subject.offset == (subject.size() if renumber else at + count)
    assert oracle.margin > 1e-5
    exact, known = plan.sink + plan.recent, sum(array.nbytes for array in subject.rows.values())
    coded = sum(c.nbytes((HEADS, BUDGET - exact, d), mx.float32) for c, d in ((plan.k, DIM), (plan.v, VALUES)))
    assert subject.nbytes == coded + exact * HEADS * (DIM + VALUES) * 4 + known


@pytest.mark.parametrize(("codec", "error"), [("rvq-4", 0.012), ("rvq-4:nocenter", 1.2), ("rabitq-4", 0.012), ("qjl-4", 0.06)])
def test_a_mean_is_that_of_the_rows_at_hand_when_the_first_is_coded(codec: str, error: float) -> None:
    """Rows far from 0 and near each other: with the mean, codes are as good after a hundred steps as in the first chunk."""
    rng = np.random.default_rng(4)
    rows = (10 * rng.standard_normal((HEADS, 1, DIM)) + 0.1 * rng.standard_normal((HEADS, 140, DIM))).astype(np.float32)
    subject, at = make("h2o", renumber=True, codec=f"{codec},sink=0,recent=4"), 0
    for count in (40, *[1] * 100):
        new = rows[:, at : at + count]
        subject.update_and_fetch(rotated(new, subject.offset), mx.array(new[None]))
        at += count
    codes, _ = subject.store.blocks()
    assert codes.count == BUDGET - 4
    for h, tokens in enumerate(np.array(subject.positions)[:, :-4]):
        assert tokens.max() > 100
        keys = np.stack([turn(rows[h, token], i) for i, token in enumerate(tokens)])
        for got, wanted in zip(codes.rows(), (keys, rows[h, tokens]), strict=True):
            assert error / 8 < np.sqrt(np.square(np.array(got)[h] - wanted).mean()) < error


def test_one_at_a_time_is_h2o_update() -> None:
    """Bit for bit in decode steps, up to rounding when tokens come together."""
    keys, values, _ = layer()
    state = H2OState.empty(HEADS, DIM, VALUES, mx.float32)
    single, together = make("h2o", decay=1.0), make("h2o", decay=1.0)
    for t in range(100):
        key, value = rotated(keys[:, t : t + 1], t), mx.array(values[None, :, t : t + 1])
        state = h2o_update(state, key[0], value[0], budget=BUDGET, n_sink=SINK, grace=RECENT, renumber=False)
        single.update_and_fetch(key, value)
    for name in ("keys", "values", "scores", "positions"):
        assert mx.array_equal(getattr(state, name), (single.store.arrays | single.rows)[name]), name
    run(together, [60, 40])
    assert mx.array_equal(together.positions, state.positions)
    assert mx.allclose(together.rows["scores"], state.scores, rtol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_do_not_change_the_choice(policy: str) -> None:
    kept = []
    for chunks in ([100], [1] * 100, [3, 50, 1, 46]):
        subject = make(policy)
        run(subject, chunks)
        kept.append(np.array(subject.store.arrays["values"]))
    np.testing.assert_array_equal(kept[0], kept[1])
    np.testing.assert_array_equal(kept[0], kept[2])


def test_sign_turns_the_filter_round() -> None:
    positive, negative = make("qfilters", filters=-FILTERS), make("qfilters", sign=-1)
    for subject in (positive, negative, other := make("qfilters")):
        run(subject, [60, 1])
    assert mx.array_equal(positive.store.arrays["values"], negative.store.arrays["values"])
    assert not mx.array_equal(positive.store.arrays["values"], other.store.arrays["values"])


def test_nan_leaves_last_and_ties_go_to_the_oldest() -> None:
    """In a chunk as in the kernel: keys of zeros give every row the same share; a NaN score outlives all others."""
    zeros, values = mx.zeros((1, HEADS, 40, DIM)), mx.arange(40.0)[None, None, :, None] * mx.ones((1, HEADS, 40, VALUES))
    single, together = make("h2o", decay=1.0), make("h2o", decay=1.0)
    for t in range(40):
        single.update_and_fetch(zeros[:, :, t : t + 1], values[:, :, t : t + 1])
    together.update_and_fetch(zeros, values)
    assert mx.array_equal(single.positions, together.positions)
    for chunks in ([(24, 30)], [(t, t + 1) for t in range(24, 30)]):
        subject = make("h2o")
        subject.update_and_fetch(zeros[:, :, :24], values[:, :, :24])
        subject.rows["scores"][:, 5] = float("nan")
        for a, b in chunks:
            subject.update_and_fetch(zeros[:, :, a:b], values[:, :, a:b])
        assert (np.array(subject.positions)[:, SINK:] == 5).any(axis=1).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_renumbering_does_not_wear_keys_out(dtype: mx.Dtype) -> None:
    """After a hundred moves a 16-bit key is two roundings away from the key of its position, as after one."""
    keys = mx.array(np.random.default_rng(0).standard_normal((HEADS, 140, DIM)).astype(np.float32))
    subject = make("qfilters", renumber=True, sign=1)
    for t in range(140):
        key = rotated(np.array(keys[:, t : t + 1]), subject.offset, dtype)
        fetched = subject.update_and_fetch(key, mx.full((1, HEADS, 1, VALUES), t).astype(dtype))
    tokens = np.array(fetched[1][0, :, :, 0].astype(mx.float32)).astype(int)
    assert tokens[:, SINK].min() < 60  # rows that moved often
    for h in range(HEADS):
        exact = np.stack([turn(np.array(keys, np.float64)[h, t], p) for p, t in enumerate(tokens[h])])
        error = np.abs(np.array(fetched[0][0, h].astype(mx.float32)) - exact)
        assert error.max() < 3 * 4 * float(mx.finfo(dtype).eps)  # |k| < 4: three roundings of half an ulp, with room


@pytest.mark.parametrize("codec", [None, "raw"])
@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec("yarn", DIM, periods=tuple(2.0 + 3 * i for i in range(DIM // 2)), magnitude=1.3),
        RopeSpec("default", DIM // 2, pairing="interleaved", base=100.0, first=DIM // 2),
        RopeSpec("linear", DIM - 4, base=100.0, scale=0.25),
    ],
    ids=["magnitude", "interleaved tail", "partial"],
)
def test_every_rope_is_renumbered(rope: RopeSpec, codec: str | None) -> None:
    """After many moves, keys are those of their positions by the operator in float64."""
    rows = layer()[0]
    subject = make("qfilters", renumber=True, rope=rope, codec=codec)
    for t in range(60):
        key = rotate(mx.array(rows[:, t : t + 1]), [subject.offset], None, rope, method="exact")
        fetched = subject.update_and_fetch(key[None], mx.full((1, HEADS, 1, VALUES), float(t)))
    keys, values = fetched[0], fetched[1]
    if codec is not None:
        pieces = [*(block.rows() for block in keys.blocks), (keys.keys, keys.values)]
        keys, values = (mx.concatenate(list(role), axis=1)[None] for role in zip(*pieces, strict=True))
    for h, tokens in enumerate(np.array(values[0, :, :, 0]).astype(int)):
        assert len(tokens) == BUDGET + 1 and tokens[12] > 20
        wanted = rotate(mx.array(rows[h, tokens])[None], np.arange(len(tokens)), None, rope, method="exact")
        np.testing.assert_allclose(np.array(keys[0, h]), np.array(wanted[0]), atol=3e-6)


def test_noise_is_a_row_s_own() -> None:
    """Whatever the chunks; other heads, tokens and seeds have other noise."""
    whole = gumbel(7, 3, 0, 700)
    for a, b in ((0, 1), (255, 257), (256, 512), (300, 700)):
        assert mx.array_equal(gumbel(7, 3, a, b), whole[:, a:b])
    flat = np.array(whole).ravel()
    assert len(np.unique(flat)) > 0.999 * flat.size and not mx.array_equal(whole, gumbel(8, 3, 0, 700))
    assert abs(flat.mean() - 0.5772) < 0.1 and abs(flat.std() - 1.2825) < 0.1  # Euler's constant, pi / sqrt(6)


# --- arguments -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (H2OCache, {"budget": 0}, r"\[H2OCache\] budget must be at least 1, but got 0"),
        (H2OCache, {"budget": 16, "n_sink": 8, "recent": 8}, r"n_sink \+ recent must be less than budget = 16.*got 8 \+ 8"),
        (H2OCache, {"budget": 16, "recent": 0}, r"recent must be at least 1, but got 0"),
        (H2OCache, {"budget": 16, "n_sink": -1}, r"n_sink must be at least 0"),
        (H2OCache, {"budget": 16, "decay": 1.5}, r"decay must be at most 1, but got 1.5"),
        (H2OCache, {"budget": 16, "renumber": True}, r"rope must be given with renumber=True"),
        (H2OCache, {"budget": 16, "rope": ROPE}, r"rope must be given with renumber=True.*only then"),
        (KeyformerCache, {"budget": 16, "tau": -1.0}, r"\[KeyformerCache\] tau must be finite and at least 0"),
        (KeyformerCache, {"budget": 16, "seed": -1}, r"seed must be between 0 and"),
        (QFiltersCache, {"budget": 4097, "filters": FILTERS}, r"\[QFiltersCache\] budget must be between 1 and 4096, but got 4097"),
        (QFiltersCache, {"budget": 16, "filters": FILTERS[0]}, r"filters must be \(H, D\), but got \(16,\)"),
        (QFiltersCache, {"budget": 16, "filters": FILTERS * [[1], [0]]}, r"filters must be finite and not zero, but got heads \[1\]"),
        (QFiltersCache, {"budget": 16, "filters": FILTERS, "sign": 0}, r"sign must be 1 or -1, but got 0"),
    ],
)
def test_arguments_out_of_range(cls: type[EvictingCache], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**arguments)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("affine-4", r"\[H2OCache\] codec must be a codec that codes each row by itself .*, but got affine-4 for keys"),
        ("k=rvq-4,v=affine-4:channel", r"but got affine-4:channel for values"),
        ("vecinfer-2", r"vecinfer-2 for keys, which learns smooth, words from the rows"),
        ("commvq-2", r"commvq-2 for keys, which learns exact, gain, table, widths from the rows"),
        ("commvq-2:additive", r"\[additive\] commvq-2:additive needs a calibration"),
        ("tc-2", r"but got tc-2 for keys"),
        ("tcz-1.1", r"but got tcz-1.1 for keys"),
        ("rvq-9", r"rvq-9"),
        ("rvq-4,sink=5,recent=0", r"sink of codec 'rvq-4,sink=5,recent=0' must be at most 4, the cache's n_sink, .* but got 5"),
        ("rvq-4,recent=9", r"recent of codec 'rvq-4,recent=9' must be at most 8, the cache's recent, .* but got 9"),
        ("raw,frame=pre", r"frame of codec 'raw,frame=pre' must be post, as keys are held with renumber=False, but got pre"),
    ],
)
def test_codecs_that_cannot_follow(codec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        H2OCache(16, codec=codec)


@pytest.mark.parametrize(
    "arguments",
    [{"budget": 1.5}, {"budget": 16, "codec": 4}, {"budget": 16, "renumber": 1}, {"budget": 16, "renumber": True, "rope": "half"}],
)
def test_arguments_of_another_type(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"\[H2OCache\]"):
        H2OCache(**arguments)


def test_rows_that_do_not_fit() -> None:
    rows = mx.zeros((1, HEADS, 2, DIM))
    with pytest.raises(ValueError, match=r"keys must be \(1, H, S, D\): one sequence.*got \(2, 2, 2, 16\)"):
        make("h2o").update_and_fetch(mx.zeros((2, HEADS, 2, DIM)), mx.zeros((2, HEADS, 2, DIM)))
    with pytest.raises(ValueError, match=r"values must be \(1, 2, 2, Dv\)"):
        make("h2o").update_and_fetch(rows, rows[:, :, :1])
    with pytest.raises(ValueError, match=r"D even"):
        make("h2o").update_and_fetch(rows[..., :15], rows)
    with pytest.raises(ValueError, match=r"D at least 16, the entries up to which rope rotates"):
        make("h2o", renumber=True).update_and_fetch(rows[..., :8], rows)
    with pytest.raises(ValueError, match=r"keys must be .* \(H, D\) = \(2, 16\), as the filters, but got \(1, 3, 2, 16\)"):
        make("qfilters").update_and_fetch(mx.zeros((1, 3, 2, DIM)), mx.zeros((1, 3, 2, DIM)))
    for codec in (None, "rvq-4,sink=0,recent=0"):
        subject = make("h2o", codec=codec)
        subject.update_and_fetch(rows, rows)
        with pytest.raises(ValueError, match=r"keys must be \(1, 2, 2, 16\)"):
            subject.update_and_fetch(mx.zeros((1, 3, 2, DIM)), mx.zeros((1, 3, 2, DIM)))
        with pytest.raises(TypeError, match="float32"):
            subject.update_and_fetch(rows.astype(mx.float16), rows.astype(mx.float16))
        assert subject.size() == subject.offset == 2
    nan = mx.full((1, HEADS, 2, DIM), float("nan"))
    with pytest.raises(ValueError, match=r"\[rvq\] 64 of 64 values are NaN"):
        subject.update_and_fetch(rows, nan)
    assert subject.size() == subject.offset == subject.positions.shape[1] == 2


# --- filters ---------------------------------------------------------------------------------------------------------------------


def test_filters_are_the_direction_of_the_queries() -> None:
    """The right singular vector of NumPy's SVD, turned towards the queries, averaged over a group."""
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((4, 200, DIM)) + 3 * rng.standard_normal((4, 1, DIM))
    found = query_filters(queries, 2)
    for h in range(2):
        total = np.zeros(DIM)
        for rows in queries[2 * h : 2 * h + 2]:
            direction = np.linalg.svd(rows)[2][0]
            total += direction * np.sign((rows @ direction).mean())
        np.testing.assert_allclose(found[h], total / np.linalg.norm(total), atol=1e-6)
    assert (np.einsum("htd,hd->ht", queries, np.repeat(found, 2, axis=0)).mean(axis=1) > 0).all()


@pytest.mark.parametrize(
    ("queries", "heads", "message"),
    [
        (np.ones((3, 4, 2)), 2, r"kv_heads must be a divisor of H_q = 3, but got 2"),
        (np.ones((4, 2)), 2, r"queries must be \(H_q, T, D\)"),
        (np.full((2, 4, 2), np.nan), 1, "queries must be finite"),
        (np.stack([np.ones((4, 2)), -np.ones((4, 2))]), 1, "do not cancel out"),
    ],
)
def test_filters_of_what_is_no_query(queries: np.ndarray, heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        query_filters(queries, heads)


# --- mlx-lm's protocol -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, "rvq-4,sink=1,recent=5"])
@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_state_round_trips(policy: str, renumber: bool, codec: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty, below the budget and above it: copies and files go on bit for bit as the original."""
    for chunks in ([], [4], [10], [60, 1]):
        subject = make(policy, renumber=renumber, codec=codec)
        run(subject, chunks)
        mx.eval(subject.state)
        monkeypatch.setattr(mlx_cache, type(subject).__name__, type(subject), raising=False)
        mlx_cache.save_prompt_cache(str(tmp_path / "c.safetensors"), [subject, subject])
        copies = [
            type(subject).from_state(copy.deepcopy(subject.state)),
            copy.deepcopy(subject),
            mlx_cache.load_prompt_cache(str(tmp_path / "c.safetensors"))[1],
        ]
        more = (1, 30, 1, 1)
        before = subject.nbytes, subject.offset, subject.size(), subject.empty()
        wanted = run(subject, more, start=sum(chunks))
        for other in copies:
            assert (other.nbytes, other.offset, other.size(), other.empty()) == before
            assert all(mx.array_equal(a, b) for a, b in zip(run(other, more, start=sum(chunks)), wanted, strict=True))
            theirs, ours = ({n: (a.dtype, a.shape) for n, a in c.state[3].items()} for c in (other, subject))
            assert theirs == ours


def test_what_it_cannot_do_is_said() -> None:
    subject = make("h2o")
    run(subject, [30])
    assert not subject.is_trimmable() and not hasattr(subject, "to_quantized") and not hasattr(subject, "merge")
    assert mlx_cache.trim_prompt_cache([subject], 3) == 0 and subject.size() == BUDGET
    with pytest.raises(ValueError, match=r"\[H2OCache\] cannot be trimmed by 3 tokens"):
        subject.trim(3)
    with pytest.raises(ValueError, match=r"\[H2OCache\] window_size must be None"):
        subject.make_mask(4, window_size=8)


def test_nbytes_are_those_of_the_rows() -> None:
    subject = make("keyformer")
    assert subject.nbytes == 0 and subject.empty() and subject.make_mask(1) is None
    run(subject, [100])
    assert subject.nbytes == BUDGET * HEADS * 4 * (DIM + VALUES + 3)  # and score, noise, position
    assert subject.make_mask(5) == "causal" and subject.make_mask(5, return_array=True).shape == (5, BUDGET + 5)


@pytest.mark.parametrize("codec", [None, "rvq-4:nocenter,sink=3,recent=6"])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_but_the_rows_stays_in_memory(policy: str, codec: str | None) -> None:
    """Neither the prompt that a slice is from, nor the graph of steps whose attention alone is evaluated, below the budget and above."""
    subject = make(policy, 300, codec=codec)
    rows, row = (mx.random.normal((1, HEADS, n, DIM)) for n in (1500, 1))
    mx.eval(rows, row, gumbel(3, HEADS, 0, 1))
    make(policy, 300, codec=codec).update_and_fetch(rows, rows)  # tables that are made once
    gc.collect()
    before, steps = mx.get_active_memory(), 100 if codec is None else 20
    for count in (*[1] * steps, 1500, *[1] * steps):
        fetched = subject.update_and_fetch(*[rows if count > 1 else row] * 2)
        mx.eval([x if codec is None else (x.keys, x.values) for x in fetched])
        if count > 1:
            mx.eval(subject.state)
        if subject.seen in (steps, steps + 1500, steps + 1500 + steps):
            del fetched
            gc.collect()
            assert mx.get_active_memory() - before < 3 * subject.nbytes  # one step may still be pending
    assert subject.size() == 300


# --- generation ------------------------------------------------------------------------------------------------------------------


@cache
def model() -> LoadedModel:
    return kvtool.load_model("tiny-a")


@cache
def prompt(tokens: int) -> list[int]:
    return model().tokenizer.encode(text("prose"), add_special_tokens=False)[:tokens]


@cache
def filters() -> list[np.ndarray]:
    passed = run_forward(model().model, prompt(200), [str(i) for i in range(len(model().model.layers))])
    assert not passed.lost
    return [query_filters(rows.queries[0], rows.keys.shape[0]) for _, rows in sorted(passed.layers.items(), key=lambda item: int(item[0]))]


def caches(policy: str, budget: int, renumber: bool, codec: str | None = None) -> list[EvictingCache]:
    made: list[EvictingCache] = []
    for i, probe in enumerate(probe_model(model().model)):
        assert probe.k is not None
        shared: dict[str, Any] = {"renumber": renumber, "rope": probe.k.rope if renumber else None, "codec": codec}
        if policy == "h2o":
            made.append(H2OCache(budget, **shared))
        elif policy == "keyformer":
            made.append(KeyformerCache(budget, seed=i, **shared))
        else:
            made.append(QFiltersCache(budget, filters()[i], **shared))
    return made


def generated(prompt_cache: list[Any], tokens: int, **options: Any) -> tuple[list[int], np.ndarray]:
    steps = generate_step(mx.array(prompt(tokens)), model().model, prompt_cache=prompt_cache, max_tokens=12, **options)
    ids, logprobs = zip(*steps, strict=True)
    return [int(i) for i in ids], np.stack([np.array(p) for p in logprobs])


@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_that_holds_all_changes_nothing(policy: str, renumber: bool) -> None:
    """Bit for bit, from a prefill in two chunks to the last step, though --kv-bits is on: the caches are not re-quantised."""
    options = {"prefill_step_size": 100}
    ids, logprobs = generated(mlx_cache.make_prompt_cache(model().model), 160, **options)
    own = caches(policy, 172, renumber)
    got, their = generated(own, 160, kv_bits=4, quantized_kv_start=0, **options)
    assert got == ids and np.array_equal(their, logprobs)
    assert {(type(c), c.size(), c.offset) for c in own} == {(type(own[0]), 172, 172)}


@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_smaller_budget_generates(policy: str, renumber: bool) -> None:
    """A prefill in chunks longer than the budget, then steps."""
    own = caches(policy, 48, renumber)
    ids, logprobs = generated(own, 300, prefill_step_size=128)
    assert len(ids) == 12 and np.isfinite(logprobs).all()
    assert {(c.size(), c.offset) for c in own} == {(48, 48 if renumber else 312)}
    assert max(c.nbytes for c in own) < 48 * 2 * (64 * 2 + 3) * 4 + 1


@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_codes_generate(policy: str, renumber: bool) -> None:
    """With a budget that holds all, near the model's own logits; with a smaller one, in a fraction of the bytes; the hook goes too."""
    ids, logprobs = generated(mlx_cache.make_prompt_cache(model().model), 160, prefill_step_size=100)
    own = caches(policy, 172, renumber, "rvq-6,sink=4,recent=16")
    _, their = generated(own, 160, prefill_step_size=100, kv_bits=4, quantized_kv_start=0)
    assert np.sum(np.exp(logprobs[0]) * (logprobs[0] - their[0])) < 0.02
    own = caches(policy, 80, renumber, "rvq-4,sink=4,recent=16")
    ids, logprobs = generated(own, 300, prefill_step_size=128)
    assert len(ids) == 12 and np.isfinite(logprobs).all() and {c.size() for c in own} == {80}
    plain = caches(policy, 80, renumber)
    generated(plain, 300, prefill_step_size=128)
    assert all(a.nbytes < 0.45 * b.nbytes for a, b in zip(own, plain, strict=True))
    assert hook.is_installed()
    del own
    gc.collect()
    assert not hook.is_installed()


def test_batches_are_refused_by_name() -> None:
    generator = BatchGenerator(model().model, max_tokens=2)
    with pytest.raises(ValueError, match="H2OCache"):
        generator.insert([prompt(10)], caches=[caches("h2o", 16, False)])
        generator.next()
