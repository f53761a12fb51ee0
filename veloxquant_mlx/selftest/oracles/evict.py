"""Eviction in NumPy, row by row. A turned key follows its contract: float32 products and sums from a float64 angle."""

import numpy as np


def h2o(keys_mid, values_mid, scores_mid, positions_mid, n_sink, rope_base, grace=0, nsg=4, *, renumber=True):
    groups = [_evict(g, keys_mid, positions_mid, scores_mid[g], n_sink, grace, rope_base, renumber) for g in range(keys_mid.shape[0])]
    kept = [g[0] for g in groups]
    return (
        _stack([g[1] for g in groups], keys_mid),
        _rows(values_mid, kept),
        _rows(scores_mid, kept),
        _stack([g[2] for g in groups], positions_mid),
    )


def keyformer(keys_mid, values_mid, scores_mid, gumbel_mid, positions_mid, n_sink, rope_base, tau=0.0, recent=0, nsg=4, *, renumber=True):
    with np.errstate(invalid="ignore"):
        ranked = scores_mid if tau == 0 else (scores_mid + (np.float32(tau) * gumbel_mid).astype(np.float32)).astype(np.float32)
    keys, values, _, positions = h2o(keys_mid, values_mid, ranked, positions_mid, n_sink, rope_base, recent, renumber=renumber)
    kept = [_kept(ranked[g], n_sink, recent) for g in range(ranked.shape[0])]
    return keys, values, _rows(scores_mid, kept), _rows(gumbel_mid, kept), positions


def _kept(ranked, n_sink, recent):
    best = None
    for row in range(n_sink, len(ranked) - recent):
        value = np.inf if np.isnan(ranked[row]) else ranked[row]
        if best is None or value < best[0]:
            best = (value, row)
    return [row for row in range(len(ranked)) if row != best[1]]


def _evict(group, keys, positions, ranked, n_sink, recent, base, renumber):
    kept = _kept(ranked, n_sink, recent)
    (gone,) = set(range(len(ranked))) - set(kept)
    new_keys, new_positions = [], []
    for row in kept:
        moved = renumber and positions[group, row] > positions[group, gone]
        new_positions.append(positions[group, row] - int(moved))
        new_keys.append(_turn_back(keys[group, row], base) if moved else keys[group, row])
    return kept, new_keys, new_positions


def _turn_back(key, base):
    half = len(key) // 2
    angle = np.float64(base) ** (-np.arange(half) / half)
    c, s = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    x1, x2 = key[:half].astype(np.float32), key[half:].astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        turned = np.concatenate([x1 * c + x2 * s, x2 * c - x1 * s])
        return turned.astype(key.dtype)


def _rows(array, kept):
    return np.stack([array[g][rows] for g, rows in enumerate(kept)]) if kept else _stack([], array)


def _stack(rows, like):
    return np.array(rows, dtype=like.dtype) if rows else np.zeros((0, like.shape[1] - 1, *like.shape[2:]), dtype=like.dtype)


def score(keys, filter_dir, n_sink=0, recent=0, sign=1):
    with np.errstate(invalid="ignore"):
        scores = sign * np.einsum("gnd,gd->gn", keys.astype(np.float64), filter_dir.astype(np.float64))
    n = keys.shape[1]
    scores[:, : min(n_sink, n)] = np.inf
    scores[:, max(0, n - recent) :] = np.inf
    return scores


def qfilters(keys_mid, values_mid, filter_dir, budget, n_sink=0, recent=0, sign=1):
    scores = score(keys_mid, filter_dir, sign=sign)
    n = keys_mid.shape[1]
    kept = []
    for group in scores:
        ranks = np.where(np.isnan(group), np.inf, group)
        order = sorted(range(n), key=lambda row: (row < n_sink or row >= n - recent, ranks[row], row), reverse=True)
        kept.append(sorted(order[:budget]))
    if not kept:
        return tuple(np.zeros((0, budget, *a.shape[2:]), dtype=a.dtype) for a in (keys_mid, values_mid, scores))
    return _rows(keys_mid, kept), _rows(values_mid, kept), _rows(scores, kept)
