"""The states of mlx-lm's cache classes as plain values, and what each must look like.

Source: the `state` properties in mlx_lm/models/cache.py of 0.32.2.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from formats.errors import ManifestError
from formats.header import NUMPY

# The state tuple of each class: array, triplet (mlx's quantized weight, scales, biases), int, bool, arrays (a list); ? allows None.
STATES: dict[str, tuple[tuple[str, str], ...]] = {
    "KVCache": (("keys", "array?"), ("values", "array?"), ("offset", "int")),
    "ConcatenateKVCache": (("keys", "array?"), ("values", "array?")),
    "QuantizedKVCache": (("keys", "triplet?"), ("values", "triplet?"), ("offset", "int"), ("group_size", "int"), ("bits", "int")),
    "RotatingKVCache": (
        ("keys", "array?"), ("values", "array?"), ("offset", "int"), ("keep", "int"), ("max_size", "int"), ("idx", "int"),
    ),
    "ChunkedKVCache": (
        ("keys", "array?"), ("values", "array?"), ("offset", "int"), ("chunk_size", "int"), ("start_position", "int"),
    ),
    "ArraysCache": (("cache", "arrays"), ("left_padding", "array?"), ("lengths", "array?")),
    "BatchKVCache": (("keys", "array?"), ("values", "array?"), ("offset", "array"), ("left_padding", "array"), ("idx", "int")),
    "BatchRotatingKVCache": (
        ("keys", "array?"), ("values", "array?"), ("offset", "array"), ("left_padding", "array"), ("max_size", "int"),
        ("total", "int"), ("idx", "int"), ("rotated", "bool"),
    ),
}  # fmt: skip
State = Any  # nested tuples of ForeignArray | int | bool | float | str | None


@dataclass(frozen=True, eq=False)
class ForeignArray:
    """An array with its safetensors dtype; `data` has this shape (BF16 as uint16). Read from a file it is a view of the mapping."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class ForeignCache:
    """One cache: its mlx-lm class name and version 2's state tuple (see STATES; CacheList: pairs of state and class name)."""

    cls: str
    arrays: State


def validate(cls: str, state: State, where: str) -> None:
    """Raise a ManifestError unless the state is one of this class."""
    if cls == "CacheList":
        if not isinstance(state, tuple | list) or not state:
            raise ManifestError(f"{where}: CacheList state must be a list of caches")
        for j, pair in enumerate(state):
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], str):
                raise ManifestError(f"{where}.{j}: must be a state and a class name")
            validate(pair[1], pair[0], f"{where}.{j}")
        return
    if cls not in STATES:
        raise ManifestError(f"{where}: unknown cache class {cls[:80]!r}; known are {', '.join([*STATES, 'CacheList'])}")
    slots = STATES[cls]
    if not isinstance(state, tuple | list) or len(state) != len(slots):
        got = f"{len(state)} parts" if isinstance(state, tuple | list) else "one value"
        raise ManifestError(f"{where}: {cls} state must have {len(slots)} parts ({', '.join(name for name, _ in slots)}), but has {got}")
    named = {}
    for (name, kind), value in zip(slots, state, strict=True):
        named[name] = value
        if not _fits(kind, value):
            raise ManifestError(f"{where}: {cls} {name} must be {kind.removesuffix('?')}, but is {_kind(value)}")
    if "keys" in named:
        _validate_rows(cls, named, where)


def _fits(kind: str, value: Any) -> bool:
    if kind.endswith("?"):
        return value is None or _fits(kind[:-1], value)
    if kind == "array":
        return isinstance(value, ForeignArray) and value.shape == value.data.shape and value.data.dtype == NUMPY.get(value.dtype)
    if kind == "triplet":
        return isinstance(value, tuple | list) and len(value) == 3 and all(_fits("array", part) for part in value)
    if kind == "arrays":
        return isinstance(value, tuple | list) and all(_fits("array?", part) for part in value)
    return type(value) is (bool if kind == "bool" else int)


def _kind(value: Any) -> str:
    if isinstance(value, ForeignArray):
        return f"{value.dtype} {value.shape}"
    return f"a list of {len(value)}" if isinstance(value, tuple | list) else repr(value)[:40]


def _validate_rows(cls: str, named: dict[str, Any], where: str) -> None:
    """Keys and values come together, have 4 axes and the same (B, H, rows); counts are not negative and within the rows."""
    keys, values = named["keys"], named["values"]
    if (keys is None) != (values is None):
        raise ManifestError(f"{where}: {cls} has {'values' if keys is None else 'keys'} only")
    rows = 0
    if keys is not None:
        parts = [part for side in (keys, values) for part in (side if isinstance(side, tuple | list) else (side,))]
        heads = {part.shape[:3] for part in parts}
        if len(heads) != 1 or any(len(part.shape) != 4 for part in parts):
            raise ManifestError(f"{where}: {cls} arrays must agree in (B, H, rows), but are {[part.shape for part in parts]}")
        rows = parts[0].shape[2]
        for weight, scales, biases in (keys, values) if cls == "QuantizedKVCache" else ():
            same = scales.shape == biases.shape and scales.dtype == biases.dtype and weight.dtype == "U32"
            if not same or weight.shape[3] * 32 != scales.shape[3] * named["group_size"] * named["bits"]:
                raise ManifestError(f"{where}: {cls} shapes {weight.shape}, {scales.shape} do not fit its bits and group size")
    for name, value in named.items():
        if type(value) is int and value < 0:
            raise ManifestError(f"{where}: {cls} {name} is {value}")
    live = {
        "KVCache": "offset",
        "QuantizedKVCache": "offset",
        "RotatingKVCache": "idx",
        "BatchKVCache": "idx",
        "BatchRotatingKVCache": "idx",
    }
    if cls in live and named[live[cls]] > rows:
        raise ManifestError(f"{where}: {cls} {live[cls]} is {named[live[cls]]}, but there are {rows} rows")
    if cls == "ChunkedKVCache" and not 0 <= named["offset"] - named["start_position"] <= rows:
        raise ManifestError(f"{where}: {cls} offset {named['offset']}, start {named['start_position']} do not fit {rows} rows")
