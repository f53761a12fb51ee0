"""Calibration statistics of a model's KV rows: means, covariances, and metrics that say what an error of a row costs.

Per attention layer, H KV heads of size D, over the rows of all texts past the first `sink` positions of each piece. Keys are taken before
RoPE and in half-split order, as files of frame `pre` store them; a row is z = [K_1..K_H, V_1..V_H], head by head.

    cov = E[(z - m)(z - m)^T],    cross = E[(z_l - m_l)(z_k - m_k)^T],  k the calibrated layer before l
    fisher_k = E_j[g_j g_j^T],    g_j = d/dK_j sum_t log p(y_t | context),  likewise fisher_v          (kvtool.fisher)
    query = E[(R_{i-j} q_i)(R_{i-j} q_i)^T],  over pairs of a query i and a coded row j that it sees

Noise of covariance S on the coded rows of a layer, independent from row to row, costs 1/2 tr(fisher S) nats a row, summed over all later
tokens: no constant between layers, heads, K and V. A row of the last `recent` tokens of a piece counts, though no query sees it coded.

`query` needs no backward pass, but has no such scale: it ranks the directions within one head's keys, and says nothing about one head,
layer or role against another, nor anything of V.

Means are merged from piece to piece by the shift between them (Chan, Golub and LeVeque 1979), each piece's own sums being taken about its
own mean in float64; matrices wider than 1024 are kept in float32. Memory, beside the model's own forward (or forward and backward) of
`length` tokens: a layer's `cov` and `cross`, each (2HD)^2 values, and its metrics, 2 (HD)^2; 20 MiB in all at HD = 512 and 48 MiB at
HD = 1024. Shorter pieces take less for the passes, and see less of the long range.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from blake3 import blake3

from formats.errors import IncompatibleError
from formats.manifest import ModelInfo
from kvtool import calibration_texts
from kvtool.capturing import check_ids, encode_prompt, token_ids
from kvtool.encoding import unrotated
from kvtool.fisher import LayerRows, run_backward, run_forward, visible
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, probe_model
from veloxquant_mlx.transfer.rope import RopeSpec, rotate

CORPUS_TOKENS = 1024  # of each shipped text
LEAST_TOKENS = 64  # of a piece
PAIRS = 512  # pairs of query and row drawn for `query`, per layer and piece
WIDEST_FLOAT64 = 1024  # matrices up to this width are kept in float64


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Statistics of one attention layer; see the module's docstring.

    Attributes:
        heads, dim: H and D, the same for K and V.
        count: rows.
        k_mean, v_mean: (H, D).
        cov: (2HD, 2HD), divided by `count`.
        cross: (2HD, 2HD of the calibrated layer before), or None for the first.
        fisher_k, fisher_v: (HD, HD), or None where they were not asked for. Nats per squared unit of the rows, twice over.
        query: (H, D, D), mean over the query heads of a KV head and the drawn pairs; zeros where no query sees a coded row.
    """

    heads: int
    dim: int
    count: int
    k_mean: np.ndarray
    v_mean: np.ndarray
    cov: np.ndarray
    cross: np.ndarray | None
    fisher_k: np.ndarray | None
    fisher_v: np.ndarray | None
    query: np.ndarray


@dataclass(frozen=True, eq=False)
class Moments:
    """Calibration statistics of a model.

    Attributes:
        model: the model's identity.
        layers: name of the layer ("0", or "0.1" for a member of a cache list) -> its statistics, in the model's order.
        skipped: name -> why the layer has none.
        tokens: tokens run, sinks included.
        texts: name of each text -> blake3 (hex) of the ids that were run, as little-endian int64.
        length, sink, recent: as given to `collect`.
    """

    model: ModelInfo
    layers: dict[str, LayerMoments]
    skipped: dict[str, str]
    tokens: int
    texts: dict[str, str]
    length: int
    sink: int
    recent: int


def collect(
    model: LoadedModel,
    texts: Mapping[str, str | Sequence[int]] | None = None,
    *,
    length: int = 1024,
    sink: int = 4,
    recent: int = 32,
    fisher: bool = True,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Moments:
    """Run texts through a model and take the statistics of its KV rows.

    Args:
        model: the model; left as it was.
        texts: name -> text or token ids; None for the first 1024 tokens of each shipped text. Longer ones are run in pieces, each from
            position 0; a last piece that is too short is left out.
        length: tokens of a piece.
        sink: positions kept exact at the start, and left out of the statistics.
        recent: newest rows that a query sees exact.
        fisher: take the Fisher metrics, which need a backward pass.
        seed: of the drawn tokens and pairs.
        progress: called with (tokens done, tokens in all).
    Returns:
        Moments
    Raises:
        ValueError: no text, one shorter than a piece may be, or arguments out of range.
        IncompatibleError: the model cannot be probed, or has no backward pass.
    """
    least = max(LEAST_TOKENS, sink + recent + 1)
    for name, value, low in (("sink", sink, 0), ("recent", recent, 1), ("length", length, least)):
        if value < low:
            raise ValueError(f"[collect] {name} must be at least {low}, but got {value}.")
    pieces, digests = _pieces(model, texts, length, least)
    probes, skipped = _candidates(probe_model(model.model), recent)
    if probes:
        # A first look at a few tokens, so that no backward pass is spent on layers that cannot be followed.
        skipped.update(run_forward(model.model, pieces[0][:LEAST_TOKENS], probes).lost)
    followed = {name: _Layer(probe) for name, probe in probes.items() if name not in skipped}
    total = sum(map(len, pieces))
    keys = mx.random.split(mx.random.key(seed), len(pieces))
    done = 0
    for n, ids in enumerate(pieces if followed else []):
        if fisher:
            shapes = {name: (layer.heads, layer.dim) for name, layer in followed.items()}
            result = run_backward(model.model, ids, shapes, sink=sink, recent=recent, key=keys[n])
        else:
            result = run_forward(model.model, ids, followed)
        if result.lost:
            raise IncompatibleError("; ".join(f"layer {name}: {why}" for name, why in result.lost.items()))
        before: _Centred | None = None
        for i, (name, layer) in enumerate(followed.items()):
            rows = result.layers.pop(name)
            before = layer.add(rows, before, sink, recent, np.random.default_rng([seed, n, i]))
        mx.clear_cache()
        done += len(ids)
        if progress is not None:
            progress(done, total)
    layers = {name: layer.finish() for name, layer in followed.items()}
    order = {name: skipped[name] for name in sorted(skipped, key=lambda name: tuple(map(int, name.split("."))))}
    return Moments(model.info, layers, order, total if followed else 0, digests, length, sink, recent)


def _pieces(
    model: LoadedModel, texts: Mapping[str, str | Sequence[int]] | None, length: int, least: int
) -> tuple[list[list[int]], dict[str, str]]:
    """Token ids to run one after another, and the digest of each text's."""
    limit = CORPUS_TOKENS if texts is None else None
    given: Mapping[str, str | Sequence[int]] = calibration_texts.texts() if texts is None else texts
    if not given:
        raise ValueError("[collect] texts must hold at least one text, but got none.")
    pieces, digests = [], {}
    for name, text in given.items():
        ids = (encode_prompt(model, text) if isinstance(text, str) else token_ids(text))[:limit]
        check_ids(model, ids)
        own = [ids[a : a + length] for a in range(0, len(ids), length) if len(ids) - a >= least]
        if not own:
            raise ValueError(f"[collect] texts[{name!r}] must have at least {least} tokens, but got {len(ids)}.")
        pieces += own
        digests[name] = blake3(np.array([i for piece in own for i in piece], dtype="<i8").tobytes()).hexdigest()
    return pieces, digests


def _candidates(table: Sequence[CacheProbe], recent: int, prefix: str = "") -> tuple[dict[str, CacheProbe], dict[str, str]]:
    """Layers whose cache can be calibrated, and why the others cannot."""
    chosen: dict[str, CacheProbe] = {}
    skipped: dict[str, str] = {}
    for i, probe in enumerate(table):
        name = f"{prefix}{i}"
        k, v = probe.k, probe.v
        if probe.caches:
            below = _candidates(probe.caches, recent, f"{name}.")
            chosen.update(below[0])
            skipped.update(below[1])
        elif probe.attention == "state":
            skipped[name] = "recurrent state, which has no rows"
        elif k is None or v is None:
            skipped[name] = "the model keeps no keys and values here"
        elif (k.heads, k.dim) != (v.heads, v.dim):
            skipped[name] = f"keys of {k.heads} x {k.dim} and values of {v.heads} x {v.dim} differ, as in latent attention"
        elif k.rope_problem is not None or v.rope_problem is not None:
            skipped[name] = f"its rows cannot be taken before RoPE: {k.rope_problem or v.rope_problem}"
        elif probe.window is not None and probe.window <= recent:
            skipped[name] = f"its window of {probe.window} tokens holds none but the {recent} newest rows, which are exact"
        else:
            chosen[name] = probe
    return chosen, skipped


@dataclass
class _Centred:
    """One piece's rows of a layer about their own mean, and how far that lies from the mean of the pieces before."""

    rows: np.ndarray
    shift: np.ndarray


class _Layer:
    """Running sums of one layer."""

    def __init__(self, probe: CacheProbe) -> None:
        assert probe.k is not None and probe.v is not None
        self.heads, self.dim = probe.k.heads, probe.k.dim
        self.ropes = (probe.k.rope, probe.v.rope)
        width = self.heads * self.dim
        self.count = self.pairs = 0
        self.mean = np.zeros(2 * width)
        self.cov = np.zeros((2 * width, 2 * width), _kept(2 * width))
        self.cross: np.ndarray | None = None
        self.fisher: tuple[np.ndarray, np.ndarray] | None = None
        self.query = np.zeros((self.heads, self.dim, self.dim))

    def add(self, rows: LayerRows, before: _Centred | None, sink: int, recent: int, random: np.random.Generator) -> _Centred:
        """Count one piece; `before` is the same piece in the calibrated layer before."""
        z = np.concatenate([self._flat(r, rope, sink) for r, rope in zip((rows.keys, rows.values), self.ropes, strict=True)], axis=1)
        mean = z.mean(axis=0)
        own = _Centred(z - mean, mean - self.mean)
        share = self.count * len(z) / (self.count + len(z))
        self.count += len(z)
        self.mean += own.shift * (len(z) / self.count)
        self.cov += own.rows.T @ own.rows + share * np.outer(own.shift, own.shift)
        if before is not None:
            product = own.rows.T @ before.rows + share * np.outer(own.shift, before.shift)
            if self.cross is None:
                self.cross = np.zeros(product.shape, _kept(max(product.shape)))
            self.cross += product
        if rows.key_gradient is not None and rows.value_gradient is not None:
            if self.fisher is None:
                width = self.heads * self.dim
                self.fisher = (np.zeros((width, width), _kept(width)), np.zeros((width, width), _kept(width)))
            for metric, gradient, rope in zip(self.fisher, (rows.key_gradient, rows.value_gradient), self.ropes, strict=True):
                g = self._flat(gradient, _transposed(rope), sink)
                metric += g.T @ g
        self._add_queries(rows, sink, recent, random)
        return own

    def _flat(self, rows: mx.array, rope: RopeSpec | None, sink: int) -> np.ndarray:
        """Rows (H, N, D) after RoPE as float64 (N - sink, HD) before it, in half-split order."""
        bare = rotate(rows.astype(mx.float32), np.arange(rows.shape[1]), rope, unrotated(rope))
        return np.array(bare).transpose(1, 0, 2)[sink:].reshape(-1, self.heads * self.dim).astype(np.float64)

    def _add_queries(self, rows: LayerRows, sink: int, recent: int, random: np.random.Generator) -> None:
        """What a key before RoPE meets: q . K_j = (R_j^T q) . K_j before RoPE, the query turned back by the row's position."""
        tokens = rows.keys.shape[1]
        at = np.arange(tokens)
        is_coded = (at[:, None] - at[None] >= recent) & (at[None] >= sink)
        for queries, mask in zip(rows.queries, rows.masks, strict=True):
            seen = np.array(visible(mask, tokens)).reshape(-1, tokens, tokens)[0]
            pairs = np.flatnonzero(is_coded & seen)
            if not pairs.size:
                continue
            i, j = np.divmod(random.choice(pairs, PAIRS), tokens)
            rope = _transposed(self.ropes[0])
            met = np.array(rotate(queries[:, mx.array(i)].astype(mx.float32), j, rope, unrotated(rope))).astype(np.float64)
            met = met.reshape(self.heads, -1, self.dim)
            self.query += met.swapaxes(1, 2) @ met
            self.pairs += met.shape[1]

    def finish(self) -> LayerMoments:
        """The means of what was summed; in place, as the sums are most of the memory."""
        k_mean, v_mean = self.mean.reshape(2, self.heads, self.dim)
        for total in (self.cov, self.cross, *(self.fisher or ())):
            if total is not None:
                total /= self.count
        self.query /= max(1, self.pairs)
        k, v = self.fisher or (None, None)
        return LayerMoments(self.heads, self.dim, self.count, k_mean, v_mean, self.cov, self.cross, k, v, self.query)


def _transposed(rope: RopeSpec | None) -> RopeSpec | None:
    """The rotation whose undoing is the transpose of `rope`: a cached row is m R K, so a gradient goes back by m R^T, not by R^T / m."""
    return None if rope is None else replace(rope, magnitude=1.0 / rope.magnitude)


def _kept(width: int) -> type[np.floating]:
    return np.float64 if width <= WIDEST_FLOAT64 else np.float32
