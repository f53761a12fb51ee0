"""One teacher-forced pass of any mlx-lm model that also gives the rows of every attention layer, and the gradient with respect to them.

The gradient is of sum_t log p(y_t | context), y_t drawn from the model's own next-token distribution, with respect to a row as a CODED
row: one that stands at a position of at least `sink` and acts only on queries at least `recent` later. To the other queries, and as a
sink, it is exact and carries no gradient. The outer product g g^T of such gradients is, in the mean over y, the Fisher information of the
distribution, so that noise of covariance S on coded rows, independent from row to row, costs

    sum_t KL_t = 1/2 sum_j tr(E[g_j g_j^T] S) + O(S^2)                                                                        nats

(second order of KL, Amari 1998). A choice of experts has no derivative: where a model routes tokens, what an error costs by switching one
is left out. One backward pass gives all layers: `scaled_dot_product_attention` is replaced in every module of mlx-lm
while it runs, by the model's own attention with a derivative for the coded pairs C = {(i, j): i - j >= recent, j >= sink} beside that for
all. With P the weights (they sum to less than 1 beside attention sinks), o = P v, and G = dL/do of a head:

    A = P * (G v^T - rowsum(G * o)),    dL/dv = P^T G,    dL/dk = scale A^T q,    dL/dq = scale A k
    coded rows:                         (P * C)^T G,      scale (A * C)^T q
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList, make_prompt_cache

from formats.errors import IncompatibleError
from veloxquant_mlx.metal.fused_sdpa import ATTENTION

Mask = str | mx.array | None
Gradients = dict[str, tuple[mx.array, ...]]

# A score that is this much lower has a weight of exp(-100), which is 0 in float32: additive masks hide a key by less than -1e4.
HIDDEN = -100.0


@dataclass
class PassRows:
    """What one attention layer had in its cache and asked of it in one pass over N tokens, as the model computed it (after RoPE).

    Attributes:
        keys, values: (H, N, D).
        queries: (H_q, N, D) of each attention to these rows: one, or more where layers share a cache.
        masks: the mask given to each.
        key_gradient, value_gradient: float32 (H, N, D), with respect to the rows as coded rows; None without a backward pass.
    """

    keys: mx.array
    values: mx.array
    queries: list[mx.array]
    masks: list[Mask]
    key_gradient: mx.array | None = None
    value_gradient: mx.array | None = None


@dataclass
class Pass:
    """One pass: the rows of every layer that could be followed, by its name, and why the others could not.

    Attributes:
        layers: name ("3", or "3.1" for a member of a CacheList) -> rows.
        lost: name -> reason.
        targets: (N,) the drawn next tokens; None without a backward pass.
        log_prob: of the targets, summed, nats.
    """

    layers: dict[str, PassRows]
    lost: dict[str, str]
    targets: np.ndarray | None = None
    log_prob: float | None = None


def run_forward(model: nn.Module, ids: Sequence[int], names: Collection[str]) -> Pass:
    """The rows of the layers `names`, without gradients.

    Args:
        model: an mlx-lm model, left as it was.
        ids: token ids, from position 0.
        names: layers to follow, "3" or "3.1".
    """
    watch = _Watch(model, names)
    with _attention_replaced(watch.attention):
        logits = model(mx.array(list(ids))[None], cache=watch.caches)
        mx.eval(logits, watch.arrays())
    return watch.finish(len(ids))


def run_backward(
    model: nn.Module, ids: Sequence[int], shapes: Mapping[str, tuple[int, int]], *, sink: int, recent: int, key: mx.array
) -> Pass:
    """The rows of the layers in `shapes` and their gradients.

    Args:
        model: an mlx-lm model, left as it was.
        ids: token ids, from position 0.
        shapes: name of each layer to follow -> (H, D) of its rows.
        sink, recent: which pairs of query and row are coded.
        key: random key of the drawn next tokens.
    Returns:
        Pass
    Raises:
        IncompatibleError: an operation of the model has no derivative.

    Error: attention weights and their derivatives in float32, whatever the model runs in.
    """
    watch = _Watch(model, shapes, sink, recent)
    zeros = {name: tuple(mx.zeros((1, heads, len(ids), dim)) for _ in "kv") for name, (heads, dim) in shapes.items()}

    def log_prob(coded: Gradients) -> tuple[mx.array, mx.array, list[mx.array]]:
        watch.coded = coded
        logits = model(mx.array(list(ids))[None], cache=watch.caches)[0].astype(mx.float32)
        targets = mx.random.categorical(mx.stop_gradient(logits), key=key)
        chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return mx.sum(chosen - mx.logsumexp(logits, axis=-1)), targets, watch.arrays()

    with _attention_replaced(watch.attention), _training(model):
        try:
            (total, targets, arrays), gradients = mx.value_and_grad(log_prob)(zeros)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            what = f"{type(model).__module__}.{type(model).__name__} has no backward pass: {type(error).__name__}: {error}"
            raise IncompatibleError(what, hint="use a codec that needs no calibration, such as rvq-4") from error
        mx.eval(total, targets, arrays, gradients)
    result = watch.finish(len(ids))
    for name, layer in result.layers.items():
        layer.key_gradient, layer.value_gradient = (g[0] for g in gradients[name])
    result.targets, result.log_prob = np.array(targets), float(np.array(total))
    return result


# --- following rows from the cache to the attention ------------------------------------------------------------------------------


class _Watched:
    """Cache methods that remember which keys and values they last handed to the attention."""

    handed: tuple[Any, Any] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        fetched: tuple[Any, Any] = super().update_and_fetch(keys, values)  # type: ignore[misc]
        self.handed = fetched
        return fetched


@dataclass
class _Seen:
    cache: Any
    queries: list[mx.array] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    altered: bool = False


class _Watch:
    """Fresh caches of a model whose layers `names` are followed, and the attention that takes part in it."""

    def __init__(self, model: nn.Module, names: Collection[str], sink: int = 0, recent: int = 0) -> None:
        self.caches = make_prompt_cache(model)
        self.sink, self.recent = sink, recent
        self.coded: Gradients = {}
        self.seen: dict[str, _Seen] = {}
        for name, cache in named_caches(self.caches):
            if name in names:
                cls = type(cache)
                cache.__class__ = type(cls.__name__, (_Watched, cls), {})
                self.seen[name] = _Seen(cache)

    def arrays(self) -> list[mx.array]:
        """Everything that `finish` reads."""
        return [a for seen in self.seen.values() if seen.queries for a in (*seen.queries, *seen.cache.handed)]

    def attention(self, original: Callable[..., mx.array], call: dict[str, Any]) -> mx.array:
        keys, values = call["keys"], call["values"]
        for name, seen in self.seen.items():
            # By identity: rows that a model changes on their way to the attention are not those of the cache.
            if seen.cache.handed is not None and keys is seen.cache.handed[0] and values is seen.cache.handed[1]:
                seen.queries.append(call["queries"])
                seen.masks.append(call.get("mask"))
                if name not in self.coded:
                    return original(**call)
                return _attend(original, call, self.coded[name], self.sink, self.recent)
            seen.altered |= seen.cache is call.get("cache")
        return original(**call)

    def finish(self, tokens: int) -> Pass:
        result = Pass({}, {})
        for name, seen in self.seen.items():
            if not seen.queries:
                result.lost[name] = (
                    "its keys or values change between the cache and the attention"
                    if seen.altered
                    else f"its attention does not go through mlx-lm's {ATTENTION}"
                )
            elif any(rows.ndim != 4 or rows.shape[2] != tokens for rows in seen.cache.handed):
                shapes = " and ".join(str(tuple(rows.shape)) for rows in seen.cache.handed)
                result.lost[name] = f"its attention sees {shapes} rows, not one for each of {tokens} tokens"
            else:
                keys, values = seen.cache.handed
                result.layers[name] = PassRows(keys[0], values[0], [q[0] for q in seen.queries], seen.masks)
        return result


def named_caches(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every cache that is not a list of caches, by its name: "3", or "3.1" for a member of the fourth."""
    for i, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            yield from named_caches(cache.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", cache


@contextmanager
def _attention_replaced(attention: Callable[[Callable[..., mx.array], dict[str, Any]], mx.array]) -> Iterator[None]:
    """Every module of mlx-lm binds the symbol by value, so it is replaced in each of them, and put back whatever happens."""

    def stand_in(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        parameters = signature(original)
        return lambda *args, **kwargs: attention(original, dict(parameters.bind(*args, **kwargs).arguments))

    modules = [m for name, m in sorted(sys.modules.items()) if name.startswith(("mlx_lm.models.", "mlx_vlm.models."))]
    kept = [(m, getattr(m, ATTENTION)) for m in modules if callable(getattr(m, ATTENTION, None))]
    try:
        for module, original in kept:
            setattr(module, ATTENTION, stand_in(original))
        yield
    finally:
        for module, original in kept:
            setattr(module, ATTENTION, original)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Models choose operations that have a derivative while they train; the flags are put back whatever happens."""
    kept = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        yield
    finally:
        for module, flag in kept:
            module._set_training_mode(flag)


# --- attention with a derivative for coded rows ----------------------------------------------------------------------------------


def visible(mask: Mask, tokens: int) -> mx.array:
    """Which keys each query sees: bool, (N, N) or with a batch of 1 and heads in front."""
    causal = mx.arange(tokens)[:, None] >= mx.arange(tokens)[None]
    if mask is None:
        return mx.ones_like(causal)
    if isinstance(mask, str):
        if mask != "causal":
            raise IncompatibleError(f"the attention mask {mask!r} is not known; known are 'causal', arrays and None")
        return causal
    return mask if mask.dtype == mx.bool_ else mx.greater(mask, HIDDEN)


def _attend(original: Callable[..., mx.array], call: dict[str, Any], coded: tuple[mx.array, ...], sink: int, recent: int) -> mx.array:
    """The model's own attention; `coded` (zeros) stands for a change of the coded rows and takes no part but in the derivative."""

    @mx.custom_function
    def attend(q: mx.array, k: mx.array, v: mx.array, dk: mx.array, dv: mx.array) -> mx.array:
        return original(**{**call, "queries": q, "keys": k, "values": v})

    @attend.vjp
    def attend_vjp(primals: Sequence[mx.array], cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        q, k, v = (x.astype(mx.float32) for x in primals[:3])
        query_heads, tokens, heads, scale = q.shape[1], q.shape[2], k.shape[1], call["scale"]
        group = query_heads // heads

        def grouped(x: mx.array) -> mx.array:
            return x.reshape(1, heads, group * tokens, x.shape[-1])

        def by_query(x: mx.array) -> mx.array:
            return x.reshape(1, query_heads, tokens, x.shape[-1])

        def by_key(pairs: mx.array, rows: mx.array) -> mx.array:
            return grouped(pairs).swapaxes(-1, -2) @ rows

        queries, slope = grouped(q), grouped(cotangent.astype(mx.float32))
        weights = _weights(by_query(queries @ k.swapaxes(-1, -2)) * scale, call.get("mask"), call.get("sinks"))
        at = mx.arange(tokens)
        is_coded = ((at[:, None] - at[None] >= recent) & (at[None] >= sink)).astype(mx.float32)
        through = by_query(slope @ v.swapaxes(-1, -2))
        through = weights * (through - (cotangent.astype(mx.float32) * output.astype(mx.float32)).sum(axis=-1, keepdims=True)) * scale
        gradients = (
            by_query(grouped(through) @ k),
            by_key(through, queries),
            by_key(weights, slope),
            by_key(through * is_coded, queries),
            by_key(weights * is_coded, slope),
        )
        return tuple(g.astype(p.dtype) for g, p in zip(gradients, primals, strict=True))

    output: mx.array = attend(call["queries"], call["keys"], call["values"], *coded)  # type: ignore[assignment]
    return output


def _weights(scores: mx.array, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Softmax of float32 scores (1, H_q, N, N) under a mask; attention sinks join the normaliser."""
    seen = visible(mask, scores.shape[-1])
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        scores = scores + mask.astype(mx.float32)
    scores = mx.where(seen, scores, -mx.inf)
    if sinks is None:
        return mx.softmax(scores, axis=-1)
    column = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, -1, 1, 1), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
