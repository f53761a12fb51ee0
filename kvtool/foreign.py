"""mlx-lm prompt-cache files to cache states and back: the file's bytes are `formats.foreign.mlx_lm`'s, its arrays become MLX's here."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import numpy as np

from formats.files import naming
from formats.foreign.mlx_lm import ForeignArray, ForeignCache, read_prompt_cache, write_prompt_cache
from kvtool.snapshot import CacheState, build_caches, take_states

# safetensors name of each MLX dtype that a cache can have; numpy has no bfloat16, so that its bits travel as uint16.
_DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def caches_from_prompt_cache(path: str | os.PathLike[str]) -> tuple[list[Any], dict[str, str]]:
    """The live caches of an mlx-lm prompt-cache file (version 1 or 2), one a layer, and the user's metadata.

    Args:
        path: written by `mlx_lm.models.cache.save_prompt_cache` or `mlx_lm.cache_prompt`.

    Raises:
        FormatError: not such a file.
    """
    file = read_prompt_cache(path)
    with naming(os.fspath(path)):
        return [_live(layer.cls, layer.arrays) for layer in file.layers], dict(file.metadata)


def states_from_prompt_cache(
    path: str | os.PathLike[str], *, row: int | None = None, length: int | None = None
) -> tuple[tuple[CacheState, ...], dict[str, str]]:
    """The states of one sequence in an mlx-lm prompt-cache file, and the user's metadata.

    Args:
        path: as for `caches_from_prompt_cache`.
        row, length: as for `take_states`.

    Raises:
        FormatError: not such a file.
        IncompatibleError, ValueError: as `take_states`.
    """
    caches, metadata = caches_from_prompt_cache(path)
    with naming(os.fspath(path)):
        return take_states(caches, row=row, length=length), metadata


def write_mlx_lm(path: str | os.PathLike[str], states: Sequence[CacheState], metadata: Mapping[str, str], version: int = 2) -> None:
    """Write states as a prompt-cache file that `mlx_lm.models.cache.load_prompt_cache` reads: live rows only, atomically.

    Args:
        path: must end in .safetensors.
        states: one per layer.
        metadata: the user's. `mlx_lm.generate --prompt-cache-file` needs "model" and "tokenizer_config" (JSON).
        version: 2 for mlx-lm 0.32 and later, 1 for before.

    Raises:
        ValueError: the version cannot hold a state, or the name has another ending.
        IncompatibleError: a state fits no cache.
    """
    write_prompt_cache(path, [_foreign(cache) for cache in build_caches(states)], dict(metadata), version=version)


def _live(cls: str, state: Any) -> Any:
    """A live cache out of version 2's state tuple."""
    if cls == "CacheList":
        return mlx_cache.CacheList(*(_live(name, part) for part, name in state))
    if cls == "ConcatenateKVCache" and state[0] is None:
        # mlx-lm writes this state, but cannot read it.
        return mlx_cache.ConcatenateKVCache()
    return getattr(mlx_cache, cls).from_state(_arrays(state))


def _arrays(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_arrays(part) for part in value]
    if not isinstance(value, ForeignArray):
        return value
    return mx.array(value.data).view(_DTYPES[value.dtype])


def _foreign(cache: Any) -> ForeignCache:
    if isinstance(cache, mlx_cache.CacheList):
        parts = [_foreign(c) for c in cache.caches]
        return ForeignCache("CacheList", tuple((part.arrays, part.cls) for part in parts))
    if isinstance(cache, mlx_cache.ConcatenateKVCache) and cache.keys is None:
        # mlx-lm cannot read an empty ConcatenateKVCache; an empty KVCache continues alike.
        cache = mlx_cache.KVCache()
    return ForeignCache(type(cache).__name__, _plain(cache.state))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_plain(part) for part in value)
    if not isinstance(value, mx.array):
        return value
    bits = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value
    # A strided view without a copy: the writer makes one tensor contiguous at a time.
    return ForeignArray(_NAMES[value.dtype], tuple(value.shape), np.array(bits, copy=False))
