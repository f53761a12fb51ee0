"""Caches for mlx-lm that hold at most `budget` rows a head: H2O, Keyformer and Q-Filters choose which row leaves.

    caches = [H2OCache(512) for _ in model.layers]
    mlx_lm.generate(model, tokenizer, prompt, prompt_cache=caches)

Every KV head keeps rows of its own. The queries of a forward of S tokens see the rows held before it and its own, as without eviction;
then the cache evicts down to its budget. At no other time does it hold more.

Scores. A cache sees keys, not queries, so H2O and Keyformer take each new key as its own query, as `allocators.eviction` does: row i
receives softmax(K k_new / sqrt(D))_i, the new row starts at 0, and a row ends where score + tau * noise is lowest. The S tokens of one
forward are scored, and evict, one after another: which rows stay does not depend on how a prompt is cut into forwards (up to the
rounding of a float32 sum), but for `renumber`, where the distances of one forward's keys are those that the model gave them, and for
`codec`, as rows are coded between forwards. Q-Filters' score is a projection of the key, taken anew at each eviction.

Positions. mlx-lm rotates queries and new keys by `offset`, hence it decides which positions survivors can have:

    renumber=False   offset counts all tokens; survivors keep their keys and distances, gaps stay.
    renumber=True    offset is the number of rows; survivors stand at 0, 1, 2 ..., the next token right behind them. Keys are held before
                     RoPE from the first eviction on and rotated when read: turned in place, a 16-bit key would be rounded once an eviction.

Codes. With `codec`, rows older than the codec's exact ones are held as codes (before RoPE where survivors move, else as cached), and one
that is evicted leaves them. Attention and scores read them a tile at a time (`caches.blocks`). Rows come one by one, so the codec must
code each by itself; a codec that centres rows takes the mean of the rows that were exact when the first left, for good. Every update
waits for its rows to be coded.
"""

import json
import math
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from veloxquant_mlx.caches.evicting_rows import HeldCodes, HeldRows, Tiles, taken
from veloxquant_mlx.caches.hook import hold
from veloxquant_mlx.codecs import CodecPlan, parse_codec
from veloxquant_mlx.metal._checks import FLOATS, check_array, check_choice, check_int, message, require
from veloxquant_mlx.metal._evict import check_flag, check_number
from veloxquant_mlx.metal._h2o_evict import h2o_fused_evict
from veloxquant_mlx.metal._keyformer_evict import keyformer_fused_evict
from veloxquant_mlx.metal._qfilters_evict import QFILTERS_MAX_BUDGET, qfilters_fused_evict, qfilters_score
from veloxquant_mlx.transfer.rope_spec import RopeSpec

BLOCK = 256  # tokens whose proxy queries are multiplied with the keys at once
NOISE_ROWS = 256  # positions whose noise comes from one random key
SINK = 4
_UNUSED_BASE = 10000.0  # the kernels turn no key here
_OF_POLICY = ("scores", "gumbel", "positions")  # what a policy knows of a row


class EvictingCache(_BaseCache):
    """What the three policies share: the rows, the positions and mlx-lm's protocol. One sequence.

    A cache of this kind cannot be trimmed (rows that trimming would have to bring back are gone), merged into a batch, re-quantised by
    `--kv-bits`, or used in a layer with a sliding window.
    """

    least_recent: ClassVar[int] = 0  # of `recent`

    def __init__(
        self,
        budget: int,
        *,
        n_sink: int = SINK,
        recent: int | None = None,
        renumber: bool = False,
        rope: RopeSpec | None = None,
        codec: str | None = None,
    ) -> None:
        name = type(self).__name__
        self.budget = check_int(name, "budget", budget, 1)
        self.n_sink = check_int(name, "n_sink", n_sink, 0)
        self.recent = check_int(name, "recent", self.budget // 2 if recent is None else recent, self.least_recent)
        fits = f"less than budget = {budget}, so that a row can leave"
        require(self.n_sink + self.recent < self.budget, name, "n_sink + recent", fits, f"{self.n_sink} + {self.recent}")
        check_flag(name, "renumber", renumber)
        if rope is not None and not isinstance(rope, RopeSpec):
            raise TypeError(message(name, "rope", "a RopeSpec (transfer.rope.describe_rope gives a module's)", type(rope).__name__))
        both = "given with renumber=True, which moves keys, and only then"
        require(renumber == (rope is not None), name, "rope", both, f"{rope} with renumber={renumber}")
        self.renumber, self.rope = renumber, rope
        self.plan = None if codec is None else self._checked_plan(codec)
        self.store: HeldRows | HeldCodes = HeldRows(rope) if self.plan is None else HeldCodes(self.plan, rope)
        self.seen = 0
        self.rows: dict[str, mx.array] = {}  # (H, N) each: what a policy knows of a row
        if self.plan is not None:
            # mlx-lm passes a cache that has `bits` on to the one function that the hook replaces, and never asks what they are.
            self.bits = self.group_size = 0
            hold(self)

    def _checked_plan(self, spec: str) -> CodecPlan:
        name = type(self).__name__
        if not isinstance(spec, str):
            raise TypeError(message(name, "codec", "a spec string or None", type(spec).__name__))
        plan = parse_codec(spec)
        for role, codec in (("k", plan.k), ("v", plan.v)):
            shown = f"{codec.spec(role)} for {'keys' if role == 'k' else 'values'}"
            alone = "a codec that codes each row by itself (rvq-4, rabitq-4, affine-4:token)"
            require(codec.tokens_together == 1 and not codec.eager and not codec.needs, name, "codec", alone, shown)
            layouts = [codec.layout((1, rows, 64), mx.float32) for rows in (2, 3)]
            tables = sorted(part for part in layouts[0] if layouts[0][part] == layouts[1][part] and part != "mean")
            require(not tables, name, "codec", alone, f"{shown}, which learns {', '.join(tables)} from the rows that it is given at once")
        for field, exact, rows in (("sink", plan.sink, self.n_sink), ("recent", plan.recent, self.recent)):
            kept = f"at most {rows}, the cache's {'n_sink' if field == 'sink' else 'recent'}, as exact rows do not leave"
            require(exact <= rows, name, f"{field} of codec {spec!r}", kept, exact)
        frame = "pre" if self.renumber else "post"
        held = f"{frame}, as keys are held with renumber={self.renumber}"
        require(plan.frame in (None, frame), name, f"frame of codec {spec!r}", held, plan.frame)
        return plan

    def _settings(self) -> dict[str, Any]:
        """Arguments that make this cache anew, as JSON values."""
        rope = None if self.rope is None else self.rope.to_json()
        codec = None if self.plan is None else self.plan.full_spec()
        shared = {"budget": self.budget, "n_sink": self.n_sink, "recent": self.recent, "renumber": self.renumber}
        return {**shared, "rope": rope, "codec": codec}

    # --- mlx-lm's protocol

    @property
    def offset(self) -> int:
        """Position that mlx-lm rotates the next token for."""
        return self.size() if self.renumber else self.seen

    def size(self) -> int:
        """Rows held, of each head."""
        return self.store.size()

    def empty(self) -> bool:
        return not self.store.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held: rows or codes with side information, scores, noise and positions."""
        return sum(array.nbytes for array in (self.store.arrays | self.rows).values())

    def make_mask(self, N: int, *, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of a forward of N tokens: its queries see all rows held, and their own causally."""
        no_window = "None: rows have left, so that columns do not count positions; leave layers with a window to their own cache"
        require(window_size is None, type(self).__name__, "window_size", no_window, window_size)
        return create_attention_mask(N, offset=self.size(), return_array=return_array, window_size=None)

    @property
    def state(self) -> tuple[str, int, bool, dict[str, mx.array]]:
        return json.dumps(self._settings()), self.seen, self.store.stripped, self.store.arrays | self.rows

    @state.setter
    def state(self, state: Any) -> None:
        # A file of mlx-lm has no place for an empty dict: that of a cache before its first update is not there.
        settings, seen, stripped, *arrays = state
        arguments = json.loads(settings)
        rope = arguments.pop("rope")
        self.__init__(**arguments, rope=None if rope is None else RopeSpec.from_json(rope))  # type: ignore[misc]
        self.seen, self.store.stripped = int(seen), bool(stripped)
        for name, array in dict(*arrays).items():
            (self.rows if name in _OF_POLICY else self.store.arrays)[name] = array

    def __deepcopy__(self, _: dict[int, Any]) -> "EvictingCache":
        # No array is ever written to, so that copies share them.
        return type(self).from_state(self.state)

    def trim(self, n: int) -> int:
        """ValueError: what trimming would have to bring back has left."""
        raise ValueError(f"[{type(self).__name__}] cannot be trimmed by {n} tokens: rows that left for them are gone; prefill again.")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take new rows and evict.

        Args:
            keys: (1, H, S, D), rotated for positions `offset` and after; float16, bfloat16 or float32.
            values: (1, H, S, Dv), in a dtype of these.

        Returns:
            What the queries of this forward see, the rows held before and the new ones: (1, H, N + S, D) and (1, H, N + S, Dv), or
            with a codec what the hook of mlx-lm's attention takes for them.

        Raises:
            ValueError: a batch, a shape that does not fit the rows held, or values that the codec cannot hold.
            TypeError: another dtype than theirs.
        """
        self._check_rows(keys, values)
        held, new_keys = self.size(), keys[0]
        all_keys, all_values, tiles = self.store.add(new_keys, values[0])
        self._admit(tiles, new_keys, held)
        self.seen += new_keys.shape[1]
        if self.plan is not None:
            mx.eval(self.store.arrays, self.rows)
        elif self.rows:
            # Nothing else may ever read scores and positions: without this, their graph would hold the keys of every step.
            all_keys, all_values = mx.depends([all_keys, all_values], list(self.rows.values()))
        return all_keys, all_values

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        name = type(self).__name__
        check_array(name, "keys", keys, ("B", "H", "S", "D"), FLOATS)
        require(keys.shape[0] == 1, name, "keys", "(1, H, S, D): one sequence, as each keeps rows of its own", keys)
        heads, tokens, dim = keys.shape[1:]
        check_array(name, "values", values, (1, heads, tokens, "Dv"), FLOATS)
        if self.rope is not None:
            fits = f"(1, H, S, D) with D at least {self.rope.first + self.rope.dims}, the entries up to which rope rotates"
            require(self.rope.first + self.rope.dims <= dim, name, "keys", fits, keys)
        for role, label, array in (("k", "keys", keys), ("v", "values", values)):
            if self.plan is not None:
                codec = self.plan.k if role == "k" else self.plan.v
                require(codec.takes(array.shape[3]), name, label, f"of a D that {codec.spec(role)} takes", array)
            if self.store.arrays:
                held = self.store.arrays[label if self.plan is None else f"{role}_tail"]
                check_array(name, label, array, (1, held.shape[0], tokens, held.shape[2]), (held.dtype,))

    def _admit(self, tiles: Tiles, new_keys: mx.array, held: int) -> None:
        """Score rows and evict down to the budget: keys of the `held` rows in tiles, and new ones (H, S, D), all as rotated."""
        raise NotImplementedError

    def _keep(self, kept: mx.array) -> None:
        """Let all rows but `kept` (H, n) go, ascending numbers."""
        self.store.keep(kept)
        self.rows = {name: taken(array, kept) for name, array in self.rows.items()}


class H2OCache(EvictingCache):
    """Keeps the rows that received most attention (Zhang et al. 2023, arXiv 2306.14048), each new key being its own query.

    Args:
        budget: rows kept of each KV head.
        n_sink: first rows, which never leave.
        recent: newest rows, which do not leave; at least 1, half the budget where it is not given.
        decay: factor on old scores per token, in (0, 1].
        renumber: whether survivors move up; see the module.
        rope: the layer's rotation; with `renumber` alone, which needs it.
        codec: spec string (`veloxquant_mlx.codecs`) to hold rows by, its exact first and newest rows at most `n_sink` and `recent`; None
            holds them as they are.

    Raises:
        ValueError: a size is out of range, n_sink + recent is not less than the budget, or the codec cannot code rows one by one.
        TypeError: an argument of another type.
    """

    # A row starts at score 0, below all others: were it not protected, it would leave at once.
    least_recent: ClassVar[int] = 1
    tau: float = 0.0

    def __init__(self, budget: int, *, decay: float = 1.0, **shared: Any) -> None:
        super().__init__(budget, **shared)
        self.decay = check_number(type(self).__name__, "decay", decay, positive=True)
        require(self.decay <= 1, type(self).__name__, "decay", "at most 1", decay)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "decay": self.decay}

    @property
    def positions(self) -> mx.array | None:
        """(H, N) int32: which token of the text each row is, counted from 0, in both modes; None before the first update."""
        return self.rows.get("positions")

    def _admit(self, tiles: Tiles, new_keys: mx.array, held: int) -> None:
        heads, new, _ = new_keys.shape
        at = mx.broadcast_to(mx.arange(self.seen, self.seen + new, dtype=mx.int32), (heads, new))
        self._append("positions", at)
        self._add_noise(heads, new)
        if new == 1:
            self._receive(tiles, new_keys, held)
            if held + 1 > self.budget:
                self._evict_one()
            return
        scores = np.zeros((heads, held + new), np.float32)
        if held:
            scores[:, :held] = np.array(self.rows["scores"])
        else:
            scores[:, 0] = 1
        kept = self._replay(tiles, new_keys.astype(mx.float32), scores)
        self.rows["scores"] = mx.array(scores)
        if held + new > self.budget:
            self._keep(mx.array(kept))

    def _receive(self, tiles: Tiles, key: mx.array, held: int) -> None:
        """What one new key gives the rows before it."""
        if not held:
            self.rows["scores"] = mx.ones((key.shape[0], 1))
            return
        query = key.astype(mx.float32)
        dots = mx.concatenate([(tile.astype(mx.float32) * query).sum(axis=-1) for tile in tiles()], axis=1)
        received = mx.softmax(dots / math.sqrt(key.shape[2]), axis=-1, precise=True)
        scores = self.rows["scores"] * self.decay + received
        self.rows["scores"] = mx.concatenate([scores, mx.zeros((key.shape[0], 1))], axis=1)

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        super()._check_rows(keys, values)
        require(keys.shape[3] % 2 == 0, type(self).__name__, "keys", "(1, H, S, D) with D even", keys)

    def _append(self, name: str, new: mx.array) -> None:
        self.rows[name] = mx.concatenate([self.rows[name], new], axis=1) if name in self.rows else new

    def _add_noise(self, heads: int, new: int) -> None:
        """H2O has none."""

    def _evict_one(self) -> None:
        rows = (*self.store.movable(), self.rows["scores"], self.rows["positions"])
        keys, values, scores, positions = h2o_fused_evict(*rows, self.n_sink, _UNUSED_BASE, self.recent, renumber=False)
        self.store.moved(keys, values)
        self.rows = {"scores": scores, "positions": positions}

    def _replay(self, tiles: Tiles, new_keys: mx.array, scores: np.ndarray) -> np.ndarray:
        """What new tokens do one after another: (H, n) numbers of the rows that stay, ascending; `scores` (H, N) are changed in place."""
        (heads, total), (_, new, dim) = scores.shape, new_keys.shape
        held = total - new
        noise = np.array(self.tau * self.rows["gumbel"]) if self.tau else np.zeros((), np.float32)
        kept = np.broadcast_to(np.arange(held, dtype=np.int32), (heads, held))
        for start in range(held, total, BLOCK):
            stop = min(start + BLOCK, total)
            queries = new_keys[:, start - held : stop - held] / math.sqrt(dim)
            keys = (*tiles(), new_keys[:, : stop - held])
            logits = np.concatenate([np.array(mx.matmul(queries, tile.astype(mx.float32).swapaxes(1, 2))) for tile in keys], axis=2)
            added = np.broadcast_to(np.arange(start, stop, dtype=np.int32), (heads, stop - start))
            columns = np.concatenate([kept, added], axis=1)
            block = np.take_along_axis(scores, columns, axis=1)
            logits = np.ascontiguousarray(np.take_along_axis(logits, columns[:, None], axis=2).swapaxes(0, 1))
            bias = np.take_along_axis(noise, columns, axis=1) if self.tau else noise
            gone = self._replay_block(block, logits, bias, kept.shape[1])
            np.put_along_axis(scores, columns, block, axis=1)
            kept = columns[~gone].reshape(heads, -1)
        return kept

    def _replay_block(self, scores: np.ndarray, logits: np.ndarray, bias: np.ndarray, held: int) -> np.ndarray:
        """One block of it: tokens T whose logits are (T, H, C), the columns C being the rows alive and then the tokens. -> (H, C) gone."""
        heads, columns = scores.shape
        gone, head = np.zeros((heads, columns), bool), np.arange(heads)
        count = held
        for t in range(len(logits)):
            at = held + t  # the token's own column
            if at:
                weights = logits[t, :, :at]
                weights = np.exp(weights - weights.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                scores[:, :at] *= np.float32(self.decay)
                scores[:, :at] += weights
            count += 1
            if count > self.budget:
                first, stop = self.n_sink, at + 1 - self.recent
                ranked = (scores + bias)[:, first:stop]
                # NaN ranks last of the rows alive, which +inf, the score of a row gone, is not.
                lowest = first + np.argmin(np.where(np.isnan(ranked), np.finfo(np.float32).max, ranked), axis=1)
                gone[head, lowest] = True
                scores[head, lowest], logits[t + 1 :, head, lowest] = np.inf, -np.inf
                count -= 1
        return gone


class KeyformerCache(H2OCache):
    """H2O with noise on the scores: the row of lowest score + tau * gumbel leaves (Adnan et al. 2024, arXiv 2403.09054, eq. 7).

    Args:
        tau: weight of the noise, at least 0; 0 chooses as H2O does.
        seed: of the noise, which a row keeps for as long as it is held; give each layer another.
        budget, n_sink, recent, decay, renumber, rope, codec: as in `H2OCache`.

    Raises:
        ValueError, TypeError: as `H2OCache`.
    """

    def __init__(self, budget: int, *, tau: float = 1.0, seed: int = 0, **shared: Any) -> None:
        super().__init__(budget, **shared)
        self.tau = check_number(type(self).__name__, "tau", tau, positive=False)
        self.seed = check_int(type(self).__name__, "seed", seed, 0, (1 << 31) - 1)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "tau": self.tau, "seed": self.seed}

    def _add_noise(self, heads: int, new: int) -> None:
        self._append("gumbel", gumbel(self.seed, heads, self.seen, self.seen + new))

    def _evict_one(self) -> None:
        rows = (*self.store.movable(), self.rows["scores"], self.rows["gumbel"], self.rows["positions"])
        keys, values, *known = keyformer_fused_evict(*rows, self.n_sink, _UNUSED_BASE, self.tau, self.recent, renumber=False)
        self.store.moved(keys, values)
        self.rows = dict(zip(("scores", "gumbel", "positions"), known, strict=True))


def gumbel(seed: int, heads: int, start: int, stop: int) -> mx.array:
    """(heads, stop - start) float32: the noise of tokens start to stop, whatever the chunks that they come in."""
    first = start // NOISE_ROWS
    blocks = [mx.random.gumbel((heads, NOISE_ROWS), key=mx.random.key(seed << 32 | b)) for b in range(first, -(-stop // NOISE_ROWS))]
    noise = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=1)
    return noise[:, start - first * NOISE_ROWS : stop - first * NOISE_ROWS]


class QFiltersCache(EvictingCache):
    """Keeps the rows whose keys project furthest on their head's filter (Godey et al. 2025, arXiv 2503.02812, theorem 3.3).

    Args:
        budget: rows kept of each KV head, at most QFILTERS_MAX_BUDGET.
        filters: (H, D) numbers, one direction a KV head; `query_filters` makes them.
        sign: 1 keeps the highest projections, -1 the lowest.
        n_sink, recent, renumber, rope, codec: as in `H2OCache`; `recent` may be 0.

    Raises:
        ValueError: a size is out of range, or a filter is zero or not finite.
        TypeError: an argument of another type.
    """

    def __init__(self, budget: int, filters: Any, *, sign: int = 1, **shared: Any) -> None:
        super().__init__(budget, **shared)
        name = type(self).__name__
        check_int(name, "budget", budget, 1, QFILTERS_MAX_BUDGET)
        self.sign = check_int(name, "sign", sign, -1, 1)
        check_choice(name, "sign", self.sign, (1, -1))
        rows = np.array(filters, dtype=np.float32)
        require(rows.ndim == 2 and rows.size > 0, name, "filters", "(H, D)", rows.shape)
        bad = np.flatnonzero(~(np.isfinite(rows).all(axis=1) & rows.any(axis=1))).tolist()
        require(not bad, name, "filters", "finite and not zero", f"heads {bad} that are")
        self.filters = mx.array(rows)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "sign": self.sign, "filters": np.array(self.filters).tolist()}

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        super()._check_rows(keys, values)
        expected = f"(1, H, S, D) with (H, D) = {tuple(self.filters.shape)}, as the filters"
        require((keys.shape[1], keys.shape[3]) == tuple(self.filters.shape), type(self).__name__, "keys", expected, keys)

    def _admit(self, tiles: Tiles, new_keys: mx.array, held: int) -> None:
        heads, total = new_keys.shape[0], held + new_keys.shape[1]
        if total > self.budget:
            # The kernel chooses by projections that are already made, and moves row numbers: it returns none.
            tiles_scores = [qfilters_score(tile, self.filters, sign=self.sign) for tile in (*tiles(), new_keys)]
            scores = mx.concatenate(tiles_scores, axis=1)[..., None]
            numbers = mx.broadcast_to(mx.arange(total, dtype=mx.float32)[None, :, None], (heads, total, 1))
            _, kept, _ = qfilters_fused_evict(scores, numbers, mx.ones((heads, 1)), self.budget, self.n_sink, self.recent)
            self._keep(kept[..., 0].astype(mx.int32))


def query_filters(queries: Any, kv_heads: int) -> np.ndarray:
    """The direction along which each KV head's queries lie, from a calibration text.

    Of each query head: the first right singular vector of its queries, oriented so that they project on it positively; of a KV head:
    the mean over its query heads (Godey et al. 2025, section 3), normalised.

    Args:
        queries: (H_q, T, D) numbers, as the model's attention gets them (after RoPE); `kvtool.fisher.run_forward` collects them.
        kv_heads: H, a divisor of H_q.

    Returns:
        (H, D) float32 of norm 1.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, or query heads of one group that cancel out.
    """
    name = "query_filters"
    rows = np.array(queries, dtype=np.float64)
    require(rows.ndim == 3 and rows.size > 0, name, "queries", "(H_q, T, D)", rows.shape)
    require(bool(np.isfinite(rows).all()), name, "queries", "finite", "NaN or infinite values")
    heads = check_int(name, "kv_heads", kv_heads, 1)
    require(rows.shape[0] % heads == 0, name, "kv_heads", f"a divisor of H_q = {rows.shape[0]}", heads)
    filters = np.empty((rows.shape[0], rows.shape[2]))
    for h, of_head in enumerate(rows):
        # The eigenvectors of Q^T Q are the right singular vectors of Q.
        direction = np.linalg.eigh(of_head.T @ of_head)[1][:, -1]
        filters[h] = direction * (1 if (of_head @ direction).mean() >= 0 else -1)
    grouped = filters.reshape(heads, -1, rows.shape[2]).mean(axis=1)
    norms = np.linalg.norm(grouped, axis=1, keepdims=True)
    require(bool((norms > 1e-6).all()), name, "queries", "such that the query heads of a group do not cancel out", f"norms {norms[:, 0]}")
    return (grouped / norms).astype(np.float32)
