"""What `mx.grad` and its like find where the extension computed: an error, for to MLX what C++ wrote is a constant.

The error is that of a gradient that is asked for, not of a call: what is under `mx.stop_gradient` stays usable, as a GPU kernel is.
"""

import io
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

P = ParamSpec("P")
T = TypeVar("T")


def inference_only(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the extension whose arrays of floats must not be differentiated by its arguments, or by what they hold."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        found = function(*args, **kwargs)
        given: list[Any] = []
        for x in (*args, *kwargs.values()):
            _add(x, given)
        return refusing(function.__name__, given, found)

    return call


def refusing(name: str, given: Iterable[Any], found: T) -> T:
    """`found` as it is, or where MLX traces an array of `given`, with an error in place of gradients.

    Args:
        name: what computed it.
        given: what it was computed from.
        found: an array, or tuples and lists of arrays and other things.
    """
    arrays = [x for x in given if isinstance(x, mx.array)]
    return _marked(name, arrays, found) if arrays and _traced(arrays) else found


def _add(x: Any, given: list[Any]) -> None:
    if isinstance(x, tuple | list):
        given.extend(x)
    elif isinstance(x, Mapping):
        given.extend(x.values())
    else:
        given.append(x)


def _traced(arrays: list[mx.array]) -> bool:
    """Whether one of the arrays, all evaluated, keeps what it was computed from: MLX does so for what it may differentiate alone."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return "->" in graph.getvalue()


def _marked(name: str, given: list[mx.array], found: Any) -> Any:
    if isinstance(found, tuple | list) and not hasattr(found, "_fields"):
        return type(found)(_marked(name, given, part) for part in found)
    if not isinstance(found, mx.array) or not mx.issubdtype(found.dtype, mx.inexact):
        return found

    @mx.custom_function
    def kept(given: list[mx.array], found: mx.array) -> mx.array:
        return found

    @kept.vjp
    def refuse_vjp(*_: Any) -> Any:
        raise _error(name)

    @kept.jvp
    def refuse_jvp(*_: Any) -> Any:
        raise _error(name)

    marked = kept(given, found)
    mx.eval(marked)
    return marked


def _error(name: str) -> ValueError:
    return ValueError(
        f"[native] results must not be differentiated, but got a gradient through `{name}`, which C++ computes for inference: call it "
        "under `with veloxquant_mlx.native.without():`, where most functions are MLX's operations alone, or stop the gradient "
        "(mx.stop_gradient)."
    )
