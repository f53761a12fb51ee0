"""Caches for mlx-lm that hold at most `budget` rows a head: H2O, Keyformer and Q-Filters choose which row leaves.

    caches = [H2OCache(512) for _ in model.layers]
    mlx_lm.generate(model, tokenizer, prompt, prompt_cache=caches)

Every KV head keeps rows of its own. The queries of a forward of S tokens see the rows held before it and its own, as without eviction;
then the cache evicts down to its budget. At no other time does it hold more.

Scores. A cache sees keys, not queries, so H2O and Keyformer take each new key as its own query, as `allocators.eviction` does: row i
receives softmax(K k_new / sqrt(D))_i, the new row starts at 0, and a row ends where score + tau * noise is lowest. The S tokens of one
forward are scored, and evict, one after another: which rows stay does not depend on how a prompt is cut into forwards (up to the
rounding of a float32 sum), but for `renumber`, where the distances of one forward's keys are those that the model gave them. Q-Filters'
score is a projection of the key, taken anew at each eviction.

Positions. mlx-lm rotates queries and new keys by `offset`, hence it decides which positions survivors can have:

    renumber=False   offset counts all tokens; survivors keep their keys and distances, gaps stay.
    renumber=True    offset is the number of rows; survivors stand at 0, 1, 2 ..., the next token right behind them. Keys are held before
                     RoPE from the first eviction on and rotated when read: turned in place, a 16-bit key would be rounded once an eviction.
"""

import json
import math
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from veloxquant_mlx.metal._checks import FLOATS, check_array, check_choice, check_int, message, require
from veloxquant_mlx.metal._evict import check_flag, check_number
from veloxquant_mlx.metal._h2o_evict import h2o_fused_evict
from veloxquant_mlx.metal._keyformer_evict import keyformer_fused_evict
from veloxquant_mlx.metal._qfilters_evict import QFILTERS_MAX_BUDGET, qfilters_fused_evict, qfilters_score
from veloxquant_mlx.transfer.rope import RopeSpec, mlx_rope

BLOCK = 256  # tokens whose proxy queries are multiplied with the keys at once
NOISE_ROWS = 256  # positions whose noise comes from one random key
SINK = 4
_UNUSED_BASE = 10000.0  # the kernels turn no key here


class EvictingCache(_BaseCache):
    """What the three policies share: the rows, the positions and mlx-lm's protocol. Batch 1.

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
    ) -> None:
        name = type(self).__name__
        self.budget = check_int(name, "budget", budget, 1)
        self.n_sink = check_int(name, "n_sink", n_sink, 0)
        self.recent = check_int(name, "recent", budget // 2 if recent is None else recent, self.least_recent)
        fits = f"less than budget = {budget}, so that a row can leave"
        require(self.n_sink + self.recent < self.budget, name, "n_sink + recent", fits, f"{self.n_sink} + {self.recent}")
        check_flag(name, "renumber", renumber)
        if rope is not None and not isinstance(rope, RopeSpec):
            raise TypeError(message(name, "rope", "a RopeSpec (transfer.rope.describe_rope gives a module's)", type(rope).__name__))
        both = "given with renumber=True, which moves keys, and only then"
        require(renumber == (rope is not None), name, "rope", both, f"{rope} with renumber={renumber}")
        self.renumber, self.rope = renumber, rope
        self.seen = 0
        self.stripped = False  # whether keys are held before RoPE
        self.rows: dict[str, mx.array] = {}

    def _settings(self) -> dict[str, Any]:
        """Arguments that make this cache anew, as JSON values."""
        rope = None if self.rope is None else self.rope.to_json()
        return {"budget": self.budget, "n_sink": self.n_sink, "recent": self.recent, "renumber": self.renumber, "rope": rope}

    # --- mlx-lm's protocol

    @property
    def offset(self) -> int:
        """Position that mlx-lm rotates the next token for."""
        return self.size() if self.renumber else self.seen

    def size(self) -> int:
        """Rows held, of each head."""
        return self.rows["keys"].shape[1] if self.rows else 0

    def empty(self) -> bool:
        return not self.rows

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows.values())

    def make_mask(self, N: int, *, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of a forward of N tokens: its queries see all rows held, and their own causally."""
        no_window = "None: rows have left, so that columns do not count positions; leave layers with a window to their own cache"
        require(window_size is None, type(self).__name__, "window_size", no_window, window_size)
        return create_attention_mask(N, offset=self.size(), return_array=return_array, window_size=None)

    @property
    def state(self) -> tuple[str, int, bool, dict[str, mx.array]]:
        return json.dumps(self._settings()), self.seen, self.stripped, self.rows

    @state.setter
    def state(self, state: Any) -> None:
        # A file of mlx-lm has no place for an empty dict: that of a cache before its first update is not there.
        settings, seen, stripped, *rows = state
        arguments = json.loads(settings)
        rope = arguments.pop("rope")
        self.__init__(**arguments, rope=None if rope is None else RopeSpec.from_json(rope))  # type: ignore[misc]
        self.seen, self.stripped, self.rows = int(seen), bool(stripped), dict(*rows)

    def trim(self, n: int) -> int:
        """ValueError: what trimming would have to bring back has left."""
        raise ValueError(f"[{type(self).__name__}] cannot be trimmed by {n} tokens: rows that left for them are gone; prefill again.")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take new rows and evict.

        Args:
            keys: (1, H, S, D), rotated for positions `offset` and after; float16, bfloat16 or float32.
            values: (1, H, S, Dv).

        Returns:
            What the queries of this forward see: the rows held before and the new ones, (1, H, N + S, D) and (1, H, N + S, Dv).

        Raises:
            ValueError: a batch, or a shape that does not fit the rows held.
            TypeError: another dtype than theirs.
        """
        self._check_rows(keys, values)
        new_keys, new_values = keys[0], values[0]
        held = self.size()
        if not self.rows:
            seen_keys, seen_values = new_keys, new_values
        else:
            stored = self._turned(self.rows["keys"]) if self.stripped else self.rows["keys"]
            seen_keys = mx.concatenate([stored, new_keys], axis=1)
            seen_values = mx.concatenate([self.rows["values"], new_values], axis=1)
        if self.stripped:
            self.rows["keys"] = mx.concatenate([self.rows["keys"], self._turned(new_keys, held, inverse=True)], axis=1)
        else:
            self.rows["keys"] = seen_keys
        self.rows["values"] = seen_values
        self._admit(seen_keys, new_keys.shape[1])
        self.seen += new_keys.shape[1]
        # Nothing else may ever read scores and positions: without this, their graph would hold the keys of every step.
        others = [array for name, array in self.rows.items() if name not in ("keys", "values")]
        fetched = mx.depends([seen_keys, seen_values], others) if others else [seen_keys, seen_values]
        return fetched[0][None], fetched[1][None]

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        name = type(self).__name__
        check_array(name, "keys", keys, ("B", "H", "S", "D"), FLOATS)
        require(keys.shape[0] == 1, name, "keys", "(1, H, S, D): one sequence, as each keeps rows of its own", keys)
        heads, tokens, dim = keys.shape[1:]
        check_array(name, "values", values, (1, heads, tokens, "Dv"), FLOATS)
        if self.rope is not None:
            fits = f"(1, H, S, D) with D at least {self.rope.first + self.rope.dims}, the entries up to which rope rotates"
            require(self.rope.first + self.rope.dims <= dim, name, "keys", fits, keys)
        for label, array in (("keys", keys), ("values", values)):
            if self.rows:
                held = self.rows[label]
                check_array(name, label, array, (1, held.shape[0], tokens, held.shape[2]), (held.dtype,))

    def _admit(self, seen_keys: mx.array, new: int) -> None:
        """Score rows and evict down to the budget; `seen_keys` (H, N, D) are all rows' keys as rotated, the last `new` of them new."""
        raise NotImplementedError

    def _turned(self, keys: mx.array, first: int = 0, *, inverse: bool = False) -> mx.array:
        """Keys (H, n, D) rotated for positions from `first` on, or back. The magnitude of a rope stays in the keys all the time."""
        assert self.rope is not None
        at = np.arange(first, first + keys.shape[1])
        return mlx_rope(keys.astype(mx.float32), at, self.rope, inverse=inverse).astype(keys.dtype)

    def _strip(self) -> None:
        """From the first eviction on, keys of a cache that renumbers are held before RoPE."""
        if self.renumber and not self.stripped:
            self.rows["keys"] = self._turned(self.rows["keys"], inverse=True)
            self.stripped = True

    def _keep(self, kept: mx.array) -> None:
        """Let all rows but `kept` (H, n) go, ascending indices."""
        self._strip()
        for name, array in self.rows.items():
            index = kept if array.ndim == 2 else kept[..., None]
            self.rows[name] = mx.take_along_axis(array, index, axis=1)


class H2OCache(EvictingCache):
    """Keeps the rows that received most attention (Zhang et al. 2023, arXiv 2306.14048), each new key being its own query.

    Args:
        budget: rows kept of each KV head.
        n_sink: first rows, which never leave.
        recent: newest rows, which do not leave; at least 1, half the budget where it is not given.
        decay: factor on old scores per token, in (0, 1].
        renumber: whether survivors move up; see the module.
        rope: the layer's rotation; with `renumber` alone, which needs it.

    Raises:
        ValueError: a size is out of range, or n_sink + recent is not less than the budget.
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

    def _admit(self, seen_keys: mx.array, new: int) -> None:
        heads, total, dim = seen_keys.shape
        require(dim % 2 == 0, type(self).__name__, "keys", "(1, H, S, D) with D even", seen_keys[None])
        at = mx.broadcast_to(mx.arange(self.seen, self.seen + new, dtype=mx.int32), (heads, new))
        self._append("positions", at)
        self._add_noise(heads, new)
        if new == 1:
            self._append("scores", mx.full((heads, 1), float(total == 1)))
            if total > 1:
                keys, query = seen_keys[:, :-1].astype(mx.float32), seen_keys[:, -1:].astype(mx.float32)
                received = mx.softmax((keys * query).sum(axis=-1) / math.sqrt(dim), axis=-1, precise=True)
                old = self.rows["scores"][:, :-1] * self.decay + received
                self.rows["scores"] = mx.concatenate([old, self.rows["scores"][:, -1:]], axis=1)
            if total > self.budget:
                self._strip()
                self._evict_one()
            return
        scores = np.zeros((heads, total), np.float32)
        if total > new:
            scores[:, :-new] = np.array(self.rows["scores"])
        else:
            scores[:, 0] = 1
        kept = self._replay(seen_keys.astype(mx.float32), scores, total - new)
        self.rows["scores"] = mx.array(scores)
        if total > self.budget:
            self._keep(mx.array(kept))

    def _append(self, name: str, new: mx.array) -> None:
        self.rows[name] = mx.concatenate([self.rows[name], new], axis=1) if name in self.rows else new

    def _add_noise(self, heads: int, new: int) -> None:
        """H2O has none."""

    def _evict_one(self) -> None:
        names = ("keys", "values", "scores", "positions")
        rows = h2o_fused_evict(*(self.rows[name] for name in names), self.n_sink, _UNUSED_BASE, self.recent, renumber=False)
        self.rows.update(zip(names, rows, strict=True))

    def _replay(self, keys: mx.array, scores: np.ndarray, held: int) -> np.ndarray:
        """What the tokens after the first `held` rows do one after another: (H, n) rows that stay, ascending; `scores` (H, N) in place."""
        heads, total, dim = keys.shape
        noise = np.array(self.tau * self.rows["gumbel"]) if self.tau else np.zeros((), np.float32)
        kept = np.broadcast_to(np.arange(held, dtype=np.int32), (heads, held))
        for start in range(held, total, BLOCK):
            stop = min(start + BLOCK, total)
            logits = np.array(mx.matmul(keys[:, start:stop], keys[:, :stop].swapaxes(1, 2)) / math.sqrt(dim))
            new = np.broadcast_to(np.arange(start, stop, dtype=np.int32), (heads, stop - start))
            columns = np.concatenate([kept, new], axis=1)
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
        budget, n_sink, recent, decay, renumber, rope: as in `H2OCache`.

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
        names = ("keys", "values", "scores", "gumbel", "positions")
        rows = keyformer_fused_evict(*(self.rows[n] for n in names), self.n_sink, _UNUSED_BASE, self.tau, self.recent, renumber=False)
        self.rows.update(zip(names, rows, strict=True))


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
        n_sink, recent, renumber, rope: as in `H2OCache`; `recent` may be 0.

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

    def _admit(self, seen_keys: mx.array, new: int) -> None:
        heads, total, dim = seen_keys.shape
        expected = "(1, H, S, D) with (H, D) as the filters', " + str(tuple(self.filters.shape))
        require((heads, dim) == tuple(self.filters.shape), type(self).__name__, "keys", expected, (1, heads, new, dim))
        if total > self.budget:
            # The kernel chooses by projections that are already made, and moves row numbers: it returns none.
            scores = qfilters_score(seen_keys, self.filters, sign=self.sign)
            numbers = mx.broadcast_to(mx.arange(total, dtype=mx.float32)[None, :, None], (heads, total, 1))
            one = mx.ones((heads, 1), dtype=mx.float32)
            _, kept, _ = qfilters_fused_evict(scores[..., None], numbers, one, self.budget, self.n_sink, self.recent)
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
