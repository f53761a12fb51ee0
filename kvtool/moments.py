"""Calibration rows of a model's KV cache, and metrics that say what an error of a row costs.

Per attention layer, H KV heads of size D, over the rows of all texts past the first `sink` positions of each piece. Keys are taken before
RoPE and in half-split order, as files of frame `pre` store them, values as cached.

    fisher_k = E_j[g_j g_j^T],    g_j = d/dK_j sum_t log p(y_t | context),  likewise fisher_v          (kvtool.fisher)

Noise of covariance S on the coded rows of a layer, independent from row to row, costs 1/2 tr(fisher S) nats a row, summed over all later
tokens: no constant between layers, heads, K and V. A row of the last `recent` tokens of a piece counts, though no query sees it coded.

Rows are kept as float16, of the same tokens in all layers: all of them, or as many evenly spaced ones as a budget of bytes holds. Memory,
beside those and the model's own forward and backward pass of `length` tokens: two metrics a layer, each (HD)^2 values of 8 bytes, or of 4
where HD > 1024. Shorter pieces take less for the passes, and see less of the long range.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from blake3 import blake3

from formats.errors import IncompatibleError, counted
from formats.manifest import ModelInfo
from kvtool import calibration_texts
from kvtool.capturing import check_ids, encode_prompt, token_ids
from kvtool.fisher import PassRows, run_backward, run_forward
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, probe_model
from veloxquant_mlx.allocators.transforms import LayerRows
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec, unrotated

CORPUS_TOKENS = 1024  # of each shipped text
LEAST_TOKENS = 64  # of a piece
WIDEST_FLOAT64 = 1024  # metrics up to this width are kept in float64
ROW_BYTES = 1 << 30  # of the rows of all layers together


@dataclass(frozen=True, eq=False)
class Moments:
    """Calibration statistics of a model.

    Attributes:
        model: the model's identity.
        layers: name of the layer ("0", or "0.1" for a member of a cache list) -> its rows, float16, and metrics, in the model's order.
        skipped: name -> why the layer has none.
        tokens: tokens run, sinks included.
        texts: name of each text -> blake3 (hex) of the ids that were run, as little-endian int64.
        length, sink, recent: as given to `collect`.
    """

    model: ModelInfo
    layers: dict[str, LayerRows]
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
    seed: int = 0,
    row_bytes: int = ROW_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Moments:
    """Run texts through a model, keep its KV rows and take their metrics.

    Args:
        model: the model; left as it was.
        texts: name -> text or token ids; None for the first 1024 tokens of each shipped text. Longer ones are run in pieces, each from
            position 0; a last piece that is too short is left out.
        length: tokens of a piece.
        sink: positions kept exact at the start, and left out.
        recent: newest rows that a query sees exact.
        seed: of the drawn tokens.
        row_bytes: most that the kept rows of all layers take together; one row of each layer is kept in any case.
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
    chosen = {name: probe for name, probe in probes.items() if name not in skipped}
    picked = _picked([len(ids) - sink for ids in pieces], chosen.values(), row_bytes)
    followed = {name: _Layer(probe, sum(map(len, picked))) for name, probe in chosen.items()}
    total = sum(map(len, pieces))
    keys = mx.random.split(mx.random.key(seed), len(pieces))
    done = 0
    for n, ids in enumerate(pieces if followed else []):
        shapes = {name: (layer.heads, layer.dim) for name, layer in followed.items()}
        result = run_backward(model.model, ids, shapes, sink=sink, recent=recent, key=keys[n])
        if result.lost:
            raise IncompatibleError("; ".join(f"layer {name}: {why}" for name, why in result.lost.items()))
        for name, layer in followed.items():
            layer.add(result.layers.pop(name), picked[n], sink, recent)
        mx.clear_cache()
        done += len(ids)
        if progress is not None:
            progress(done, total)
    for name in list(followed):
        problem = followed[name].problem()
        if problem is not None:
            skipped[name] = problem
            del followed[name]
    layers = {name: layer.finish() for name, layer in followed.items()}
    order = {name: skipped[name] for name in sorted(skipped, key=lambda name: tuple(map(int, name.split("."))))}
    return Moments(model.info, layers, order, done, digests, length, sink, recent)


def joined(parts: Sequence[Moments]) -> Moments:
    """Statistics of several runs as if of one: rows one after another, metrics averaged over all rows that were counted.

    Args:
        parts: of one model and the same `sink`, `recent` and `length`, with texts of different names; `skipped` is the first's.
    Raises:
        ValueError: none, or parts that differ.
    """
    if not parts:
        raise ValueError("[joined] parts must hold at least one, but got none.")
    first = parts[0]
    for n, part in enumerate(parts[1:], 1):
        for name, own, theirs in (
            ("model.weights", first.model.effective_weights, part.model.effective_weights),
            ("sink, recent and length", (first.sink, first.recent, first.length), (part.sink, part.recent, part.length)),
            ("layers", list(first.layers), list(part.layers)),
        ):
            if own != theirs:
                raise ValueError(f"[joined] {name} must be the same in all parts, but got {own} and, in part {n}, {theirs}.")
    names = [name for part in parts for name in part.texts]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"[joined] texts of the parts must have different names, but {twice!r} stands twice.")
    texts = {name: digest for part in parts for name, digest in part.texts.items()}
    layers = {name: _joined_rows([part.layers[name] for part in parts], [_counted(part) for part in parts]) for name in first.layers}
    return replace(first, layers=layers, tokens=sum(part.tokens for part in parts), texts=texts)


def _counted(part: Moments) -> int:
    """Rows that the metrics are means over: all but the sinks of each piece. A gradient is missing for each sink and newest row."""
    gradients = next((layer.gradients for layer in part.layers.values()), None)
    assert gradients is not None or not part.layers
    return part.tokens - part.sink * (part.tokens - (gradients or 0)) // (part.sink + part.recent)


def _joined_rows(layers: Sequence[LayerRows], counts: Sequence[int]) -> LayerRows:
    def mean(metrics: Sequence[np.ndarray]) -> np.ndarray:
        total: np.ndarray = sum((n * metric for n, metric in zip(counts[1:], metrics[1:], strict=True)), counts[0] * metrics[0])
        return total / sum(counts)

    return LayerRows(
        np.concatenate([layer.k for layer in layers]),
        np.concatenate([layer.v for layer in layers]),
        mean([layer.fisher_k for layer in layers]),
        mean([layer.fisher_v for layer in layers]),
        sum(layer.gradients or 0 for layer in layers),
    )


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


def _picked(counts: Sequence[int], probes: Iterable[CacheProbe], row_bytes: int) -> list[np.ndarray]:
    """Which rows of each piece are kept, of `counts` past the sinks."""
    total = sum(counts)
    each = sum(2 * np.float16().itemsize * probe.k.heads * probe.k.dim for probe in probes if probe.k is not None)
    kept = min(total, max(1, row_bytes // max(each, 1)))
    at = np.linspace(0, total - 1, kept).round().astype(np.int64)
    ends = np.cumsum(counts)
    return [at[(at >= end - count) & (at < end)] - (end - count) for count, end in zip(counts, ends, strict=True)]


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
        elif v.rope is not None:
            skipped[name] = "its values are rotated"
        elif probe.window is not None and probe.window <= recent:
            skipped[name] = f"its window of {counted(probe.window, 'token')} holds none but the {recent} newest rows, which are exact"
        else:
            chosen[name] = probe
    return chosen, skipped


class _Layer:
    """Kept rows of one layer, and running sums of its metrics."""

    def __init__(self, probe: CacheProbe, kept: int) -> None:
        assert probe.k is not None
        self.heads, self.dim, self.rope = probe.k.heads, probe.k.dim, probe.k.rope
        width = self.heads * self.dim
        shape, dtype = (kept, self.heads, self.dim), np.float64 if width <= WIDEST_FLOAT64 else np.float32
        self.rows = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
        self.fisher = np.zeros((width, width), dtype), np.zeros((width, width), dtype)
        self.filled = self.count = self.gradients = 0

    def add(self, rows: PassRows, picked: np.ndarray, sink: int, recent: int) -> None:
        """Count one piece and keep the picked of its rows past the sinks."""
        assert rows.key_gradient is not None and rows.value_gradient is not None
        gradient_rope = None if self.rope is None else replace(self.rope, magnitude=1.0 / self.rope.magnitude)
        for kept, fisher, cached, gradient, ropes in (
            # The transpose of RoPE, not its inverse, takes a gradient back: a cached row is m R K, so it is m R^T g, not R^T g / m.
            (self.rows[0], self.fisher[0], rows.keys, rows.key_gradient, (self.rope, gradient_rope)),
            (self.rows[1], self.fisher[1], rows.values, rows.value_gradient, (None, None)),
        ):
            # Rows too large for float16 are found when all is done.
            with np.errstate(over="ignore"):
                kept[self.filled : self.filled + len(picked)] = _before(cached, ropes[0])[sink:][picked]
            g = _before(gradient, ropes[1])[sink:].reshape(-1, self.heads * self.dim).astype(np.float64)
            fisher += g.T @ g
        self.filled += len(picked)
        self.count += rows.keys.shape[1] - sink
        self.gradients += rows.keys.shape[1] - sink - recent

    def problem(self) -> str | None:
        """Why the layer cannot be calibrated after all, or None."""
        if not all(np.isfinite(rows).all() for rows in self.rows):
            return "its rows are not all finite in float16"
        return None if all(np.isfinite(metric).all() for metric in self.fisher) else "its gradients are not all finite"

    def finish(self) -> LayerRows:
        for metric in self.fisher:
            metric /= self.count
        return LayerRows(*self.rows, *self.fisher, self.gradients)


def _before(rows: mx.array, rope: RopeSpec | None) -> np.ndarray:
    """Rows (H, N, D) after RoPE as float32 (N, H, D) before it, in half-split order."""
    return np.array(rotate(rows.astype(mx.float32), np.arange(rows.shape[1]), rope, unrotated(rope))).transpose(1, 0, 2)
