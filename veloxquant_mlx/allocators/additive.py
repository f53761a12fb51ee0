"""Additive codebooks of keys before RoPE, learnt from calibration rows: a row is the sum of words, each a complex number for every plane.

    k^ = mean + sum over the stages r of W_r[code_r],   256 words a stage, 8 bits

Words act plane by plane, [[x, -y], [y, x]], so that a rotation of the sum is the sum of the rotated words. They are learnt in the basis
where errors cost independently and rows are uncorrelated (as in `allocators.transforms`):

    A = F^(1/2),   A Cov(k) A = U diag(cost) U^T,   y = (k - mean) A U cost^(-1/2),   k = mean + y back

F is the Fisher metric of the head. Every component belongs to one stage; stages are filled so that each has components worth 8 bits by
reverse water-filling. Hence W_r[c] = sum of words[i, c] back[i] over its own components i, and the best code of a stage does not depend on
the others: encoding searches 256 words of a few dimensions, without beams, and hard EM of a stage is EM of the sum. Stages are handed to
heads, and to layers where all are known, by the same water-filling (`share_stages`).

Float64 on the host but for the search, no random numbers: the same rows, the same tables, rounded as they are stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.allocators.transforms import LEAST_SINGULAR, METRIC_FLOOR, LayerRows, inverse, metric_floor
from veloxquant_mlx.native import searching

WORDS = 256
STAGE_BITS = 8
_MOST_ROWS = 1 << 14  # that words are learnt from
_ROUNDS = 12
_BLOCK = 512  # rows whose distances are held at a time


@dataclass(frozen=True, eq=False)
class AdditiveTables:
    """What is known of a layer's keys before they are coded.

    Attributes:
        mean: (H, D) float32.
        back: (H, D, D) float32, a component's contribution to the row of its head.
        cost: (H, D) float32, nats (twice over) of a unit of squared error of a component.
        stage: (H, D) uint8, the stage of its head that a component belongs to.
        words: (H, D, 256) float16, of component i its value in each word of its stage.
    """

    mean: np.ndarray
    back: np.ndarray
    cost: np.ndarray
    stage: np.ndarray
    words: np.ndarray

    @property
    def heads(self) -> int:
        return self.mean.shape[0]

    @property
    def dim(self) -> int:
        return self.mean.shape[1]

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages, and so bytes a row, of each head."""
        return tuple((self.stage.max(axis=1).astype(int) + 1).tolist())

    def weights(self) -> np.ndarray:
        """What components are multiplied by before the nearest word is searched, (H, D) float64."""
        return weights_of(self.cost)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a file; `back` as float16 over the largest entry of each row."""
        size = np.abs(self.back).max(axis=2)
        return {
            "mean": self.mean.astype(np.float32),
            "back": (self.back / size[..., None]).astype(np.float16),
            "back_size": size.astype(np.float32),
            "cost": self.cost.astype(np.float32),
            "stage": self.stage.astype(np.uint8),
            "words": self.words.astype(np.float16),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The tables that `to_arrays` gave.

        Raises:
            ValueError: an array is missing, of another dtype or shape, or holds what tables cannot.
        """
        if "mean" not in arrays or arrays["mean"].ndim != 2 or 0 in arrays["mean"].shape:
            raise ValueError(f"[AdditiveTables] mean must be (H, D), but got {arrays['mean'].shape if 'mean' in arrays else 'none'}.")
        h, d = arrays["mean"].shape
        layout = {
            "mean": (np.float32, (h, d)),
            "back": (np.float16, (h, d, d)),
            "back_size": (np.float32, (h, d)),
            "cost": (np.float32, (h, d)),
            "stage": (np.uint8, (h, d)),
            "words": (np.float16, (h, d, WORDS)),
        }
        for name, (dtype, shape) in layout.items():
            array = arrays.get(name)
            if array is None or array.dtype != dtype or array.shape != shape:
                got = "none" if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(f"[AdditiveTables] {name} must be {np.dtype(dtype)} {shape}, but got {got}.")
            if not np.isfinite(array).all():
                raise ValueError(f"[AdditiveTables] {name} must be finite, but {np.count_nonzero(~np.isfinite(array))} values are not.")
        if arrays["cost"].min() < 0 or arrays["back_size"].min() <= 0:
            lowest = arrays["cost"].min(), arrays["back_size"].min()
            raise ValueError(
                f"[AdditiveTables] cost must not be negative and back_size must be positive, but got {lowest[0]}, {lowest[1]}."
            )
        for head, stage in enumerate(arrays["stage"]):
            if set(stage.tolist()) != set(range(int(stage.max()) + 1)):
                raise ValueError(f"[AdditiveTables] stage must have a component for every stage, but head {head} has {sorted(set(stage))}.")
        if np.linalg.svd(arrays["back"].astype(np.float64), compute_uv=False).min() < LEAST_SINGULAR:
            raise ValueError("[AdditiveTables] back must be invertible for every head, but is not.")
        back = arrays["back"].astype(np.float64) * arrays["back_size"].astype(np.float64)[..., None]
        return cls(arrays["mean"], back.astype(np.float32), arrays["cost"], arrays["stage"], arrays["words"])


def build_additive(
    rows: np.ndarray, fisher_k: np.ndarray | None, bits: float, stages: Sequence[int] | None = None, gradients: int | None = None
) -> AdditiveTables:
    """Tables of a layer.

    Args:
        rows: (N, H, D) keys before RoPE.
        fisher_k: (H D, H D), nats per squared unit, twice over; None: all entries cost alike.
        bits: average per value over the layer's heads.
        stages: of each head, as `share_stages` gives them over several layers; None: shared within the layer.
        gradients: that the metric is the mean square of, or None where it is exact.

    Raises:
        ValueError: shapes that do not fit, no rows, or values that are not finite.
    """
    mean, back, cost = _bases(rows, fisher_k, gradients)
    heads, dim = mean.shape
    stages = share_stages({"": cost}, bits)[""] if stages is None else stages
    if len(stages) != heads or not all(1 <= count <= most_stages(dim) for count in stages):
        raise ValueError(f"[build_additive] stages must be {heads} numbers in 1..{most_stages(dim)}, but got {list(stages)}.")
    sample = rows[:: -(-len(rows) // _MOST_ROWS)].astype(np.float64) - mean
    stage, words = np.zeros((heads, dim), np.uint8), np.zeros((heads, dim, WORDS))
    for h in range(heads):
        y = sample[:, h] @ inverse(back[h])
        scale = weights_of(cost)[h]
        for r, own in enumerate(_filled(cost[h], stages[h])):
            part = np.ascontiguousarray(y[:, own])
            index = _clustered((part * scale[own]).astype(np.float32))
            stage[h, own] = r
            words[h, own] = _cell_means(index, part, np.zeros((WORDS, len(own)))).T
    return AdditiveTables.from_arrays(AdditiveTables(mean, back, cost, stage, words).to_arrays())


def build_shared(layers: Mapping[str, LayerRows], bits: float, costs: Mapping[str, np.ndarray] | None = None) -> dict[str, AdditiveTables]:
    """Tables of the keys of several layers that share their stages.

    Args:
        layers: by name. Those whose heads are too small for a stage at this rate, or too large for so many, get none.
        bits: average per value over the others.
        costs: of each layer, as `spectrum` gives them; None: taken from the rows.

    Raises:
        ValueError: as `build_additive`.
    """
    fitting = {name: own for name, own in layers.items() if STAGE_BITS <= bits * own.k.shape[2] <= STAGE_BITS * most_stages(own.k.shape[2])}
    if not fitting:
        return {}
    known = spectra(fitting) if costs is None else {name: costs[name] for name in fitting}
    stages = share_stages(known, bits)
    return {name: build_additive(own.k, own.fisher_k, bits, stages[name], own.gradients) for name, own in fitting.items()}


def spectra(layers: Mapping[str, LayerRows]) -> dict[str, np.ndarray]:
    """`spectrum` of each layer."""
    return {name: spectrum(own.k, own.fisher_k, own.gradients) for name, own in layers.items()}


def spectrum(rows: np.ndarray, fisher_k: np.ndarray | None, gradients: int | None = None) -> np.ndarray:
    """Costs of a layer's components, (H, D), which `share_stages` takes; arguments as in `build_additive`."""
    return _bases(rows, fisher_k, gradients)[2]


def most_stages(dim: int) -> int:
    """A stage has a component at least, and no more than 256 are numbered."""
    return min(dim, 256)


def share_stages(costs: Mapping[str, np.ndarray], bits: float) -> dict[str, tuple[int, ...]]:
    """Stages of every head of every layer that make the expected cost least: all components that have bits are left with one error.

    Args:
        costs: name -> (H, D) of each layer, as `spectrum` gives them.
        bits: average per value over all of them.

    Raises:
        ValueError: bits that no number of stages gives.
    """
    heads = [(head, len(head)) for layer in costs.values() for head in np.asarray(layer, np.float64)]
    least, most = np.ones(len(heads), int), np.array([most_stages(dim) for _, dim in heads])
    total = int(np.floor(bits * sum(dim for _, dim in heads) / STAGE_BITS + 0.5))
    if not least.sum() <= total <= most.sum():
        raise ValueError(f"[share_stages] bits must give {least.sum()} to {most.sum()} stages, but {bits:g} give {total}.")
    wanted = np.array([b.sum() for b in _split(_water(np.concatenate([c for c, _ in heads]), STAGE_BITS * total), heads)]) / STAGE_BITS
    count = np.clip(np.floor(wanted).astype(int), least, most)
    while count.sum() != total:  # by one, where that is nearest to what is wanted
        sign = 1 if count.sum() < total else -1
        room = count < most if sign > 0 else count > least
        count[np.where(room, sign * (wanted - count), -np.inf).argmax()] += sign
    out, at = {}, 0
    for name, layer in costs.items():
        out[name] = tuple(count[at : at + len(layer)].tolist())
        at += len(layer)
    return out


def weights_of(cost: np.ndarray) -> np.ndarray:
    """Square roots of costs (H, D) relative to the largest of the head, float64; 1 where a head costs nothing."""
    top = cost.astype(np.float64).max(axis=1, keepdims=True)
    return np.where(top > 0, np.sqrt(cost / np.where(top > 0, top, 1.0)), 1.0)


def _bases(rows: np.ndarray, fisher_k: np.ndarray | None, gradients: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean (H, D), `back` (H, D, D) and costs (H, D), descending."""
    if rows.ndim != 3 or 0 in rows.shape:
        raise ValueError(f"[build_additive] rows must be (N, H, D) and not empty, but got {rows.shape}.")
    count, heads, dim = rows.shape
    fisher_k = np.eye(heads * dim) if fisher_k is None else fisher_k
    if fisher_k.shape != (heads * dim, heads * dim):
        raise ValueError(f"[build_additive] fisher_k must be ({heads * dim}, {heads * dim}), but got {fisher_k.shape}.")
    if gradients is not None and gradients < 1:
        raise ValueError(f"[build_additive] gradients must be at least 1, but got {gradients}.")
    for name, array in (("rows", rows), ("fisher_k", fisher_k)):
        if not np.isfinite(array).all():
            bad = np.argwhere(~np.isfinite(array))
            raise ValueError(f"[build_additive] {name} must be finite, but {len(bad)} values are not, the first at {bad[0].tolist()}.")
    mean, floor = rows.mean(axis=0, dtype=np.float64), metric_floor(METRIC_FLOOR, dim, gradients)
    back, cost = np.empty((heads, dim, dim)), np.empty((heads, dim))
    for h in range(heads):
        at = slice(h * dim, (h + 1) * dim)
        metric = fisher_k[at, at].astype(np.float64)
        values, vectors = np.linalg.eigh((metric + metric.T) / 2)
        unit = values.clip(0).mean()
        values = np.maximum(values / unit, floor) if unit > 0 else np.ones(dim)
        root = vectors * np.sqrt(values) @ vectors.T
        x = rows[:, h].astype(np.float64) - mean[h]
        lam, u = np.linalg.eigh(root @ (x.T @ x / count) @ root)
        lam, u = lam[::-1].clip(0), u[:, ::-1]
        # A component that never moves still needs a size.
        still = max(1e-10 * lam[0], 1e-24)
        back[h] = np.sqrt(np.maximum(lam, still))[:, None] * (u.T @ (vectors / np.sqrt(values) @ vectors.T))
        cost[h] = lam * max(unit, 0.0)
    return mean, back, cost


def _water(cost: np.ndarray, total: float) -> np.ndarray:
    """Bits of each component, `total` in sum, that leave those that have any with one error: max(0, log2(cost / level) / 2)."""
    top = cost.max(initial=0.0)
    log = np.log2(np.maximum(cost, 1e-12 * top)) if top > 0 else np.zeros(len(cost))
    low, high = log.min() - 2 * total - 1, log.max()
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(log - level, 0).sum() / 2 > total else (low, level)
    return np.maximum(log - high, 0) / 2


def _split(values: np.ndarray, heads: list[tuple[np.ndarray, int]]) -> list[np.ndarray]:
    return np.split(values, np.cumsum([dim for _, dim in heads])[:-1])


def _filled(cost: np.ndarray, stages: int) -> list[np.ndarray]:
    """The components of each stage: those of most bits first, each to the stage with fewest bits, then fewest components."""
    bits = _water(cost, STAGE_BITS * stages)
    load, members = np.zeros(stages), [[] for _ in range(stages)]
    for component in np.argsort(-bits, kind="stable"):
        size = np.array([len(own) for own in members])
        chosen = int(np.lexsort((size, np.where(size == 0, -1.0, load)))[0] if bits[component] > 0 else np.argmin(size))
        members[chosen].append(int(component))
        load[chosen] += bits[component]
    return [np.array(sorted(own)) for own in members]


def _clustered(y: np.ndarray) -> np.ndarray:
    """The cell of each row, (N,), after hard EM of 256 words in squared distance: y (N, d) float32."""
    words = y[np.arange(WORDS) * len(y) // WORDS].copy()
    for _ in range(_ROUNDS):
        index = nearest(y, words)
        count = np.bincount(index, minlength=WORDS)
        words = _cell_means(index, y, words)
        # Words without rows go beside those with most.
        empty = np.flatnonzero(count == 0)
        busy = np.argsort(-count, kind="stable")[: len(empty)]
        words[empty] = words[busy] * np.float32(1.01)
    return nearest(y, words)


def _cell_means(index: np.ndarray, y: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Mean row of each cell, (256, d), and `otherwise` where it is empty."""
    count = np.bincount(index, minlength=WORDS)[:, None]
    total = np.stack([np.bincount(index, column, WORDS) for column in y.T], axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), otherwise).astype(otherwise.dtype)


def nearest(y: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Index of the nearest word of each row, the lowest of equals: y (N, d), words (256, d), float32."""
    if native.available() and y.size and y.shape[1] <= searching.MAX_SIZE:
        return searching.nearest_single(y, words)
    # <y, w> - |w|^2 / 2 as one product.
    y = np.concatenate([y, np.ones((len(y), 1), np.float32)], axis=1)
    words = np.concatenate([words, -(words * words).sum(axis=1, keepdims=True) / 2], axis=1).astype(np.float32).T
    index = np.zeros(len(y), np.int64)
    for at in range(0, len(y), _BLOCK):
        index[at : at + _BLOCK] = (y[at : at + _BLOCK] @ words).argmax(axis=1)
    return index
