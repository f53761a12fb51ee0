"""Hidden states between a model's layers: taken while it runs, or put in so that a block of layers runs alone.

A layer is stood in for by giving that one object another class for a while, so that every family's own code prepares masks and arguments
and calls the layers as ever. That needs a plain stream: each layer called once, in order, with the hidden states first, and each one's
output handed to the next as it is. Whether a model is so is seen by building its graph on two tokens, none of which is evaluated.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from formats.errors import IncompatibleError, counted
from kvtool.model import LoadedModel
from kvtool.probe import PROBE_IDS

Run = Callable[[mx.array], mx.array]
Call = Callable[[int, Run, mx.array], mx.array]
_HINT = "recompute tokens (first=N,newest=P%) instead of layers"


@contextmanager
def layers_replaced(model: nn.Module, call: Call) -> Iterator[None]:
    """While it lasts, layer i called with hidden states x gives `call(i, run, x)`; `run` is the layer itself with its other arguments."""
    kept = [(layer, type(layer)) for layer in model.layers]
    try:
        for i, (layer, cls) in enumerate(kept):
            object.__setattr__(layer, "__class__", _stand_in(cls, i, call))
        yield
    finally:
        for layer, cls in kept:
            object.__setattr__(layer, "__class__", cls)


def _stand_in(cls: type, index: int, call: Call) -> type:
    def stand_in(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        if not args or not isinstance(args[0], mx.array) or args[0].ndim != 3:
            raise IncompatibleError(f"layer {index} is not called with its hidden states first", hint=_HINT)
        return call(index, lambda x: cls.__call__(self, x, *args[1:], **kwargs), args[0])

    return type(cls.__name__, (cls,), {"__call__": stand_in, "__module__": cls.__module__})


def check_stream(model: LoadedModel) -> None:
    """Refuse a model whose blocks of layers cannot be run alone.

    Raises:
        IncompatibleError: what its layers do that is not a plain stream.
    """
    seen: list[tuple[int, mx.array, Any]] = []

    def look(layer: int, run: Run, x: mx.array) -> mx.array:
        y = run(x)
        seen.append((layer, x, y))
        return y

    caches = make_prompt_cache(model.model)
    layers = getattr(model.model, "layers", ())
    if len({id(layer) for layer in layers}) != len(caches) or len(layers) != len(caches):
        raise IncompatibleError(f"{model.info.name}: {counted(len(layers), 'layer')} for {counted(len(caches), 'cache')}", hint=_HINT)
    with layers_replaced(model.model, look):
        model.model(mx.array([PROBE_IDS]), cache=caches)
    if [layer for layer, _, _ in seen] != list(range(len(caches))):
        raise IncompatibleError(f"{model.info.name}: its layers are not each called once, in order", hint=_HINT)
    for i, (_, x, y) in enumerate(seen):
        if not isinstance(y, mx.array) or y.shape != x.shape:
            raise IncompatibleError(f"{model.info.name}: layer {i} does not give hidden states in the shape of its input", hint=_HINT)
        if i + 1 < len(seen) and seen[i + 1][1] is not y:
            raise IncompatibleError(f"{model.info.name}: the input of layer {i + 1} is not the output of layer {i}", hint=_HINT)


def entered(layers: Iterable[int]) -> str:
    """Layer inputs in words."""
    names = [str(layer) for layer in layers]
    return f"what entered layer{'' if len(names) == 1 else 's'} {', '.join(names)}"


def inputs_left_out(layers: Iterable[int], name: str, why: str) -> str:
    """The remark that layer inputs of a model are not kept, and why."""
    return f"{entered(layers)} of {name} is left out: {why}"


@contextmanager
def inputs_taken(model: LoadedModel, layers: Collection[int]) -> Iterator[dict[int, list[mx.array]]]:
    """While it lasts, the inputs (N, E) of these layers, forward by forward.

    Raises:
        ValueError: no such layer.
        IncompatibleError: as `check_stream`.
    """
    if not layers:
        yield {}
        return
    count = len(make_prompt_cache(model.model))
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ValueError(f"[layer input] layers must be 0 to {count - 1} of {model.info.name}, but got {wrong[0]}.")
    taken: dict[int, list[mx.array]] = {layer: [] for layer in sorted(layers)}
    check_stream(model)
    with layers_replaced(model.model, partial(_take, taken)):
        yield taken


def _take(taken: dict[int, list[mx.array]], layer: int, run: Run, x: mx.array) -> mx.array:
    if layer in taken:
        taken[layer].append(x[0])
    return run(x)
