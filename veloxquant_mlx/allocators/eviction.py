"""Heavy-hitter eviction: which row of a full cache goes, and what the survivors look like.

    selection_i = score_i + tau * gumbel_i            H2O: tau = 0 (Zhang et al. 2023, arXiv 2306.14048, alg. 1);
                                                      Keyformer: frozen Gumbel noise (Adnan et al. 2024, arXiv 2403.09054, eq. 7)
    gone = argmin of selection over the rows that are neither sink nor recent
    survivor with position p > p_gone:  p - 1, and its key turned back by one position,
        (x1, x2) -> (x1 cos w + x2 sin w, x2 cos w - x1 sin w),   pairs (i, i + D/2),   w_i = base^(-2i/D)

NaN ranks last, ties go to the lowest row. `renumber=False` leaves keys and positions as they are: for a model that goes on counting
true positions, renumbered survivors would stand at wrong distances.

This is the reference in MLX operations; `veloxquant_mlx.metal._h2o_evict` and `_keyformer_evict` are its kernels.
Axes: G groups (batch x KV heads), N rows, D key size, Dv value size.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx


def selection(scores: mx.array, gumbel: mx.array | None, tau: float) -> mx.array:
    """score + tau * gumbel in float32, two roundings; the scores themselves where tau is 0, whatever the noise is."""
    return scores if gumbel is None or tau == 0 else scores + mx.array(tau, dtype=mx.float32) * gumbel


def lowest_row(values: mx.array, first: int, stop: int) -> mx.array:
    """(G,) int32: per row of `values` (G, N), the lowest index of the smallest of values[first:stop]; NaN counts as +inf."""
    eligible = values[:, first:stop]
    eligible = mx.where(mx.isnan(eligible), mx.array(math.inf, dtype=eligible.dtype), eligible)
    smallest = mx.min(eligible, axis=-1, keepdims=True)
    rows = mx.arange(first, stop, dtype=mx.int32)
    return mx.min(mx.where(eligible == smallest, rows, stop), axis=-1).astype(mx.int32)


@cache
def shift_table(dims: int, base: float) -> mx.array:
    """(2, dims/2) float32: cos w and sin w of each pair's angle per token, taken in float64."""
    angles = [base ** (-2.0 * i / dims) for i in range(dims // 2)]
    return mx.array([[math.cos(w) for w in angles], [math.sin(w) for w in angles]], dtype=mx.float32)


def turn_back(keys: mx.array, base: float) -> mx.array:
    """Keys (..., D) one position earlier: float32 arithmetic, one rounding to their dtype."""
    half = keys.shape[-1] // 2
    cos, sin = shift_table(keys.shape[-1], float(base))
    x1, x2 = keys[..., :half].astype(mx.float32), keys[..., half:].astype(mx.float32)
    return mx.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], axis=-1).astype(keys.dtype)


def without_row(array: mx.array, gone: mx.array) -> mx.array:
    """(G, N, ...) without row gone[g] of each group g, as (G, N - 1, ...)."""
    rows = mx.arange(array.shape[1] - 1, dtype=mx.int32)[None]
    rows = rows + (rows >= gone[:, None])
    return mx.take_along_axis(array, rows.reshape(*rows.shape, *[1] * (array.ndim - 2)), axis=1)


def renumbered(keys: mx.array, positions: mx.array, gone: mx.array, base: float) -> tuple[mx.array, mx.array]:
    """Survivors' keys and positions once row gone[g] has left and those behind it have moved up by one position."""
    moved = without_row(positions, gone) > mx.take_along_axis(positions, gone[:, None], axis=1)
    keys = without_row(keys, gone)
    return mx.where(moved[..., None], turn_back(keys, base), keys), without_row(positions, gone) - moved.astype(mx.int32)


@dataclass(frozen=True)
class H2OState:
    """What an H2O cache holds between updates.

    Fields:
        keys: (G, N, D), rotated for `positions`; values: (G, N, Dv).
        scores: (G, N) float32, attention received so far.
        positions: (G, N) int32.
        next_position: position that the next token is rotated for.
    """

    keys: mx.array
    values: mx.array
    scores: mx.array
    positions: mx.array
    next_position: int = 0

    @classmethod
    def empty(cls, groups: int, dim: int, value_dim: int, dtype: mx.Dtype) -> "H2OState":
        return cls(
            mx.zeros((groups, 0, dim), dtype=dtype),
            mx.zeros((groups, 0, value_dim), dtype=dtype),
            mx.zeros((groups, 0), dtype=mx.float32),
            mx.zeros((groups, 0), dtype=mx.int32),
        )


def h2o_update(
    state: H2OState,
    keys: mx.array,
    values: mx.array,
    *,
    budget: int,
    n_sink: int = 0,
    rope_base: float = 10000.0,
    grace: int = 0,
    decay: float = 1.0,
    renumber: bool = True,
) -> H2OState:
    """The state after new tokens, one at a time; a token that makes it exceed the budget evicts one row of each group.

    Each new key stands in for its query: every row's score (times `decay`) grows by softmax(K k_new / sqrt(D)), the new row starts
    at score 0, and the first row ever at 1.

    Args:
        state: as left by the last update, or `H2OState.empty`.
        keys: (G, S, D) new keys. With `renumber`, token s must be rotated for `state.next_position` + s while the cache fills, and
            for the constant `budget` afterwards: pass one token at a time then. Without, for its true position.
        values: (G, S, Dv) in the dtype of the state.
        budget: rows kept.
        n_sink, grace: first and last rows that are never evicted; at least one row of budget + 1 must remain.
        rope_base: theta of the rotation.
        decay: factor on old scores per token.
        renumber: whether survivors move up; see the module.

    Raises:
        ValueError: a shape does not fit, a size is out of range, or every row would be protected.
        TypeError: keys or values of another dtype than the state's.
    """
    _check_update(state, keys, values, budget, n_sink, grace)
    for s in range(keys.shape[1]):
        state = _append(state, keys[:, s : s + 1], values[:, s : s + 1], decay)
        if state.keys.shape[1] > budget:
            state = _evict(state, n_sink, rope_base, grace, renumber)
    return state


def _check_update(state: H2OState, keys: mx.array, values: mx.array, budget: int, n_sink: int, grace: int) -> None:
    groups, dim, value_dim = state.keys.shape[0], state.keys.shape[2], state.values.shape[2]
    for name, array, size, held in (("keys", keys, dim, state.keys), ("values", values, value_dim, state.values)):
        if array.ndim != 3 or array.shape[0] != groups or array.shape[2] != size or array.shape[1] != keys.shape[1]:
            raise ValueError(f"[h2o_update] {name} must be ({groups}, S, {size}), but got {tuple(array.shape)}.")
        if array.dtype != held.dtype:
            raise TypeError(f"[h2o_update] {name} must be {held.dtype}, but got {array.dtype}.")
    if dim % 2:
        raise ValueError(f"[h2o_update] keys must have an even last dimension, but got {tuple(keys.shape)}.")
    if min(n_sink, grace) < 0 or n_sink + grace > budget:
        raise ValueError(f"[h2o_update] n_sink + grace must be between 0 and the budget {budget}, but got {n_sink} + {grace}.")


def _append(state: H2OState, key: mx.array, value: mx.array, decay: float) -> H2OState:
    groups, n, dim = state.keys.shape
    if n == 0:
        scores = mx.ones((groups, 1), dtype=mx.float32)
    else:
        logits = (state.keys.astype(mx.float32) * key.astype(mx.float32)).sum(axis=-1) / math.sqrt(dim)
        received = mx.softmax(logits, axis=-1, precise=True)
        scores = mx.concatenate([state.scores * decay + received, mx.zeros((groups, 1), dtype=mx.float32)], axis=1)
    here = mx.full((groups, 1), state.next_position, dtype=mx.int32)
    return H2OState(
        mx.concatenate([state.keys, key], axis=1),
        mx.concatenate([state.values, value], axis=1),
        scores,
        mx.concatenate([state.positions, here], axis=1),
        state.next_position + 1,
    )


def _evict(state: H2OState, n_sink: int, rope_base: float, grace: int, renumber: bool) -> H2OState:
    gone = lowest_row(state.scores, n_sink, state.scores.shape[1] - grace)
    values, scores = without_row(state.values, gone), without_row(state.scores, gone)
    if not renumber:
        keys, positions = without_row(state.keys, gone), without_row(state.positions, gone)
        return replace(state, keys=keys, values=values, scores=scores, positions=positions)
    keys, positions = renumbered(state.keys, state.positions, gone, rope_base)
    return H2OState(keys, values, scores, positions, state.next_position - 1)
