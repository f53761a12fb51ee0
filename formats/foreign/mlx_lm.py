"""mlx-lm prompt-cache files (`mlx_lm.models.cache.save_prompt_cache`), both versions, without MLX.

A file is the flattened list of the caches' states: tensor names are paths like "3.0.1" (layer 3, slot 0, part 1).

    version 2 (mlx-lm >= 0.32)   metadata = [user, classes, scalars]; the state holds everything, Python scalars as tensors
                                 whose paths `scalars` lists with their kind: scalar, string (code points) or none
    version 1 (before)           metadata = [meta states, user, classes]; the state holds arrays cut to the live rows, the
                                 numbers are strings in the meta state

Both are read into version 2's state tuple of each class. Versions are told apart by their metadata, never by trying.
Source: mlx_lm/models/cache.py of 0.32.2, 0.31.3 and 0.22.0.
"""

import mmap
import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from formats.atomic import atomic_write
from formats.errors import ManifestError, NotKvtoolError, Problems
from formats.files import naming, opened
from formats.foreign.mlx_lm_state import ForeignArray, ForeignCache, State, validate
from formats.header import NUMPY, Header, check_extents, header_text, parse_entries, parse_json, read_raw
from formats.strict_json import Room, dumps

_PATH = re.compile(r"(0|[1-9][0-9]{0,8})(\.(0|[1-9][0-9]{0,8})){0,19}")
_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class PromptCacheFile:
    """A prompt-cache file; `metadata` is the user's, its keys as they were flattened."""

    version: int
    metadata: dict[str, str]
    layers: tuple[ForeignCache, ...]


def version_of(metadata: dict[str, str]) -> int | None:
    """The version of a prompt-cache file from its safetensors metadata: 2, 1, or None (not one).

    Version 2's scalars begin with an empty string, so "2.0" is empty; in version 1 it is the first layer's class name.
    """
    first = metadata.get("2.0")
    if first is None:
        return None
    if first == "":
        return 2 if "1.0" in metadata else None
    return 1 if any(key == "0.0" or key.startswith("0.0.") for key in metadata) else None


def read_prompt_cache(path: str | os.PathLike[str]) -> PromptCacheFile:
    """Read a prompt-cache file of either version.

    Raises:
        FormatError: not a safetensors file, not a prompt cache, or a state that does not fit its class.
        OSError: the file cannot be read.
    """
    path = os.fspath(path)
    with naming(path), opened(path) as (fd, size):
        raw = read_raw(fd, size)
        problems = Problems()
        room = Room(size)
        header = parse_entries(parse_json(header_text(raw, room), room), len(raw), problems)
        if not problems:
            check_extents(header, size, problems, in_order=False)
        if problems:
            raise problems[0]
        version = version_of(header.metadata)
        if version is None:
            kind = "a kvtool file" if header.metadata.get("format") == "kvtool" else "safetensors without its metadata"
            raise NotKvtoolError(f"not an mlx-lm prompt cache: {kind}")
        leaves = _leaves(header, mmap.mmap(fd, size, access=mmap.ACCESS_READ))
        return _read_2(header.metadata, leaves) if version == 2 else _read_1(header.metadata, leaves)


def write_prompt_cache(
    path: str | os.PathLike[str], layers: "tuple[ForeignCache, ...] | list[ForeignCache]", metadata: dict[str, str], version: int = 2
) -> None:
    """Write a prompt-cache file that `mlx_lm.models.cache.load_prompt_cache` of that version reads, atomically.

    Args:
        path: must end in .safetensors, since mlx goes by that.
        layers: caches with version 2's state tuples.
        metadata: the user's; strings.
        version: 2, or 1 for mlx-lm before 0.32, which cannot hold empty caches, None or batch caches.
    Raises:
        ValueError: a state does not fit its class, or the version cannot hold it.
        OSError: as the system gives it.
    """
    path = os.fspath(path)
    if not path.endswith(".safetensors"):
        raise ValueError(f"[write_prompt_cache] the name must end in .safetensors, but got {path!r}.")
    if version not in (1, 2) or not layers:
        raise ValueError(f"[write_prompt_cache] needs version 1 or 2 and at least one layer, but got {version} and {len(layers)}.")
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
        raise ValueError("[write_prompt_cache] metadata must map strings to strings.")
    try:
        for i, layer in enumerate(layers):
            validate(layer.cls, layer.arrays, f"layer {i}")
    except ManifestError as error:
        raise ValueError(f"[write_prompt_cache] {error}") from None
    texts: dict[str, str] = {}
    leaves: dict[str, ForeignArray] = {}
    user, classes = ("0", "1") if version == 2 else ("1", "2")
    if version == 2:
        scalars = [""]
        for i, layer in enumerate(layers):
            _flatten(layer.arrays, str(i), leaves, scalars)
        texts["2.0"] = ""
        for n, entry in enumerate(scalars[1:], 1):
            texts[f"2.{n}.0"], texts[f"2.{n}.1"] = entry.split("=")
    else:
        for i, layer in enumerate(layers):
            state, meta = _to_1(layer.cls, layer.arrays, f"layer {i}")
            _flatten(state, str(i), leaves, None)
            texts |= _flatten_texts(meta, f"0.{i}")
    texts |= {f"{user}.{key}": value for key, value in metadata.items()}
    texts |= {f"{classes}.{i}": layer.cls for i, layer in enumerate(layers)}
    _write(path, texts, leaves)


def _write(path: str, texts: dict[str, str], leaves: dict[str, ForeignArray]) -> None:
    entries: dict[str, Any] = {"__metadata__": texts}
    end = 0
    for name, array in leaves.items():
        size = array.data.nbytes
        entries[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [end, end + size]}
        end += size
    text = dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in leaves.values():
            if array.data.size:
                out.write(np.ascontiguousarray(array.data).reshape(-1).view(np.uint8).data)


# -- tensors and paths


def _leaves(header: Header, data: mmap.mmap) -> dict[str, ForeignArray]:
    leaves = {}
    for name, entry in header.entries.items():
        if entry.dtype not in NUMPY:
            raise ManifestError(f"tensor {name[:80]!r}: dtype {entry.dtype} does not occur in prompt caches")
        dtype = np.dtype(NUMPY[entry.dtype])
        if entry.end == entry.begin:
            array = np.zeros(entry.shape, dtype)
        else:
            flat = np.frombuffer(data, np.uint8, entry.end - entry.begin, header.size + entry.begin)
            array = flat.view(dtype).reshape(entry.shape)
        leaves[name] = ForeignArray(entry.dtype, entry.shape, array)
    return leaves


def _tree(flat: dict[str, Any], what: str) -> Any:
    """Nested tuples out of dotted paths; every level must have the indices 0, 1, 2 ... without a hole."""
    root: dict[int, Any] = {}
    for path, value in flat.items():
        if not _PATH.fullmatch(path):
            raise ManifestError(f"{what} {path[:80]!r} is not a path of at most 20 indices")
        *parents, last = [int(part) for part in path.split(".")]
        node = root
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise ManifestError(f"{what} {path!r} lies below another")
            node = child
        if last in node:
            raise ManifestError(f"{what} {path!r} is both a value and a list")
        node[last] = value
    return _dense(root, what)


def _dense(node: Any, what: str) -> Any:
    if not isinstance(node, dict):
        return node
    if sorted(node) != list(range(len(node))):
        raise ManifestError(f"{what}s have the indices {sorted(node)[:20]}, must count from 0 without a hole")
    return tuple(_dense(node[i], what) for i in range(len(node)))


def _texts(metadata: dict[str, str], part: str) -> dict[str, str]:
    return {key[len(part) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{part}.")}


def _flatten(value: State, path: str, leaves: dict[str, ForeignArray], scalars: list[str] | None) -> None:
    """Collect the arrays below `value` by path; other leaves become arrays as mlx-lm makes them, noted in `scalars`."""
    if isinstance(value, tuple | list):
        for i, child in enumerate(value):
            _flatten(child, f"{path}.{i}", leaves, scalars)
        return
    if not isinstance(value, ForeignArray):
        assert scalars is not None, "version 1 states hold arrays only"
        if value is None:
            kind, dtype, data = "none", "F32", np.zeros(0, np.float32)
        elif isinstance(value, str):
            kind, dtype, data = "string", "I32", np.array([ord(char) for char in value], np.int32)
        elif isinstance(value, bool):
            kind, dtype, data = "scalar", "BOOL", np.array(value)
        else:
            dtype = "I32" if -(1 << 31) <= value < 1 << 31 else "I64"
            kind, data = "scalar", np.array(value, NUMPY[dtype])
        scalars.append(f"{path}={kind}")
        value = ForeignArray(dtype, data.shape, data)
    leaves[path] = value


def _flatten_texts(value: Any, path: str) -> dict[str, str]:
    if isinstance(value, str):
        return {path: value}
    texts: dict[str, str] = {}
    for i, child in enumerate(value):
        texts |= _flatten_texts(child, f"{path}.{i}")
    return texts


# -- version 2


def _read_2(metadata: dict[str, str], leaves: dict[str, ForeignArray]) -> PromptCacheFile:
    values: dict[str, Any] = dict(leaves)
    for path, kind in _pairs(_tree(_texts(metadata, "2"), "scalar")[1:]):
        if path not in leaves:
            raise ManifestError(f"scalars: there is no tensor {path[:80]!r}")
        values[path] = _plain(leaves[path], kind, path)
    classes = _strings(_tree(_texts(metadata, "1"), "class"), "classes")
    states = _tree(values, "tensor")
    if len(states) != len(classes):
        raise ManifestError(f"{len(classes)} classes, but {len(states)} states")
    layers = []
    for i, (cls, state) in enumerate(zip(classes, states, strict=True)):
        validate(cls, state, f"layer {i}")
        layers.append(ForeignCache(cls, state))
    return PromptCacheFile(2, _texts(metadata, "0"), tuple(layers))


def _pairs(entries: tuple[Any, ...]) -> list[tuple[str, str]]:
    for entry in entries:
        if not isinstance(entry, tuple) or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
            raise ManifestError(f"scalars: {str(entry)[:80]} is not a pair of path and kind")
    return list(entries)


def _strings(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise ManifestError(f"{what} must be a list of strings")
    return value


def _plain(array: ForeignArray, kind: str, path: str) -> int | float | bool | str | None:
    if kind == "none":
        if array.data.size:
            raise ManifestError(f"tensor {path}: stands for None, but has shape {array.shape}")
        return None
    if kind == "string":
        codes = array.data.reshape(-1).tolist() if array.dtype in ("I32", "U32", "I64") or not array.data.size else [-1]
        if not all(0 <= code < 0xD800 or 0xDFFF < code < 0x110000 for code in codes):
            raise ManifestError(f"tensor {path}: stands for a string, but holds something other than code points")
        return "".join(map(chr, codes))
    if kind == "scalar":
        if array.data.size != 1 or array.dtype == "BF16":
            raise ManifestError(f"tensor {path}: stands for a number, but is {array.dtype} {array.shape}")
        number: int | float | bool = array.data.reshape(()).item()
        return number
    raise ManifestError(f"tensor {path}: unknown kind {kind[:40]!r}")


# -- version 1


def _read_1(metadata: dict[str, str], leaves: dict[str, ForeignArray]) -> PromptCacheFile:
    infos = _tree(_texts(metadata, "0"), "meta state")
    classes = _strings(_tree(_texts(metadata, "2"), "class"), "classes")
    states = _tree(dict(leaves), "tensor")
    if not len(infos) == len(classes) == len(states):
        raise ManifestError(f"{len(classes)} classes, but {len(infos)} meta states and {len(states)} states")
    layers = []
    for i, (cls, state, info) in enumerate(zip(classes, states, infos, strict=True)):
        # MambaCache was the name of ArraysCache.
        cls = "ArraysCache" if cls == "MambaCache" else cls
        state = _from_1(cls, state, info, f"layer {i}")
        validate(cls, state, f"layer {i}")
        layers.append(ForeignCache(cls, state))
    return PromptCacheFile(1, _texts(metadata, "1"), tuple(layers))


def _numbers(info: Any, names: tuple[str, ...], where: str) -> dict[str, int]:
    if not isinstance(info, tuple) or len(info) != len(names) or not all(isinstance(n, str) and _INTEGER.fullmatch(n) for n in info):
        raise ManifestError(f"{where}: meta state must be {', '.join(names)}, but is {str(info)[:80]}")
    return dict(zip(names, map(int, info), strict=True))


def _from_1(cls: str, state: Any, info: Any, where: str) -> State:
    """Version 2's state tuple out of version 1's state and meta state."""
    if not isinstance(state, tuple):
        raise ManifestError(f"{where}: {cls[:40]} state must be a list")
    if cls == "CacheList":
        if not isinstance(info, tuple) or len(info) != 2:
            raise ManifestError(f"{where}: CacheList meta state must be classes and meta states")
        names = _strings(info[0], f"{where}: classes")
        if not isinstance(info[1], tuple) or not len(names) == len(info[1]) == len(state):
            raise ManifestError(f"{where}: CacheList has {len(state)} states for {len(names)} classes")
        names = tuple("ArraysCache" if name == "MambaCache" else name for name in names)
        return tuple((_from_1(n, s, m, f"{where}.{j}"), n) for j, (n, s, m) in enumerate(zip(names, state, info[1], strict=True)))
    if cls == "ArraysCache":
        return (state, None, None)
    if cls not in ("KVCache", "ConcatenateKVCache", "QuantizedKVCache", "RotatingKVCache", "ChunkedKVCache"):
        raise ManifestError(f"{where}: cannot read {cls[:40]!r} of version 1")
    if len(state) != 2:
        raise ManifestError(f"{where}: {cls} state must be keys and values, but has {len(state)} parts")
    if cls == "QuantizedKVCache":
        names = ("step", "offset", "group_size", "bits") if isinstance(info, tuple) and len(info) == 4 else ("offset", "group_size", "bits")
        n = _numbers(info, names, where)
        return (*state, n["offset"], n["group_size"], n["bits"])
    if cls == "RotatingKVCache":
        five = isinstance(info, tuple) and len(info) == 5
        names = ("keep", "max_size", "step", "offset", "idx") if five else ("keep", "max_size", "offset", "idx")
        n = _numbers(info, names, where)
        return (*state, n["offset"], n["keep"], n["max_size"], n["idx"])
    keys = state[0]
    if not isinstance(keys, ForeignArray) or len(keys.shape) != 4:
        raise ManifestError(f"{where}: {cls} keys must be an array of 4 axes")
    if cls == "ChunkedKVCache":
        n = _numbers(info, ("chunk_size", "start_position"), where)
        if n["start_position"]:
            # Neither the offset nor the number of live rows is in the file then.
            raise ManifestError(f"{where}: version 1 does not say how many rows of a ChunkedKVCache are live after a trim")
        return (*state, keys.shape[2], n["chunk_size"], 0)
    if info != "":
        raise ManifestError(f"{where}: {cls} must have an empty meta state")
    return (*state, keys.shape[2]) if cls == "KVCache" else state


def _to_1(cls: str, state: State, where: str) -> tuple[State, Any]:
    """(state, meta state) of version 1 out of version 2's state tuple."""
    if cls == "CacheList":
        parts = [_to_1(name, sub, f"{where}.{j}") for j, (sub, name) in enumerate(state)]
        return tuple(part for part, _ in parts), ([name for _, name in state], [meta for _, meta in parts])
    if cls == "ArraysCache":
        if state[1] is not None or state[2] is not None or not state[0] or any(array is None for array in state[0]):
            raise ValueError(f"[write_prompt_cache] {where}: version 1 holds neither None, left_padding nor lengths of an ArraysCache.")
        return state[0], ""
    if cls.startswith("Batch") or state[0] is None:
        raise ValueError(f"[write_prompt_cache] {where}: version 1 cannot hold {'an empty ' if state[0] is None else ''}{cls}.")
    if cls == "ConcatenateKVCache":
        return state, ""
    keys, values, offset = state[0], state[1], state[2]
    if cls == "KVCache":
        return (_rows(keys, offset), _rows(values, offset)), ""
    if cls == "QuantizedKVCache":
        return (_rows(keys, offset), _rows(values, offset)), tuple(map(str, state[2:]))
    if cls == "RotatingKVCache":
        _, _, _, keep, max_size, idx = state
        return (_rows(keys, offset), _rows(values, offset)), tuple(map(str, (keep, max_size, offset, idx)))
    if state[4]:
        raise ValueError(f"[write_prompt_cache] {where}: version 1 cannot hold a ChunkedKVCache after a trim.")
    return (_rows(keys, offset), _rows(values, offset)), (str(state[3]), "0")


def _rows(value: Any, count: int) -> Any:
    """The first `count` rows of an array or of each array of a triplet."""
    if isinstance(value, tuple | list):
        return tuple(_rows(part, count) for part in value)
    data = value.data[:, :, :count]
    return ForeignArray(value.dtype, data.shape, data)
