"""Two files' keys and values, decoded and compared layer by layer."""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from formats.container import Reader
from formats.errors import IncompatibleError, counted
from formats.manifest import CacheInfo
from kvtool.decoding import Decoder
from kvtool.segment_work import energy
from kvtool.states import Quantized


def layer_differences(a: Reader, b: Reader) -> list[dict[str, Any]]:
    """For each role of each layer, sum (a - b)^2 / sum a^2 over its values; NaN where one is finite and the other not.

    Raises:
        IncompatibleError: the files do not have the same layers, heads, dims or rows.
    """
    if len(a.manifest.layers) != len(b.manifest.layers):
        raise IncompatibleError(f"{counted(len(a.manifest.layers), 'layer')}, but {b.path} has {len(b.manifest.layers)}", path=a.path)
    sides = Decoder(a), Decoder(b)
    return [
        entry
        for i, (x, y) in enumerate(zip(a.manifest.layers, b.manifest.layers, strict=True))
        for entry in _differences(str(i), sides[0], x, sides[1], y)
    ]


def _differences(name: str, a: Decoder, x: CacheInfo, b: Decoder, y: CacheInfo) -> Iterator[dict[str, Any]]:
    paths = a.reader.path, b.reader.path
    if len(x.caches) != len(y.caches):
        raise IncompatibleError(f"layer {name} has {counted(len(x.caches), 'cache')}, but in {paths[1]} {len(y.caches)}", path=paths[0])
    for i, (p, q) in enumerate(zip(x.caches, y.caches, strict=True)):
        yield from _differences(f"{name}.{i}", a, p, b, q)
    for role in ("k", "v"):
        left, right = a.role(name, role), b.role(name, role)
        if left is None and right is None:
            continue
        if left is None or right is None or left.shape != right.shape:
            shapes = [None if v is None else tuple(v.shape) for v in (left, right)]
            raise IncompatibleError(f"layer {name} {role} is {shapes[0]}, but in {paths[1]} {shapes[1]}", path=paths[0])
        p32, q32 = (_plain(v).astype(mx.float32) for v in (left, right))
        # Equal is equal, infinities and NaN too; where only one side is finite the error is NaN.
        same = (p32 == q32) | (mx.isnan(p32) & mx.isnan(q32))
        error = energy(mx.where(same, 0.0, p32 - q32))
        whole = energy(mx.where(mx.isfinite(p32), p32, 0.0))
        yield {"name": f"{name}.{role}", "relative_error": error / whole if whole else math.nan if math.isnan(error) else float(error > 0)}


def _plain(value: mx.array | Quantized) -> mx.array:
    return value.dequantize() if isinstance(value, Quantized) else value
