"""mlx-lm prompt caches: files that mlx-lm wrote are read exactly, and mlx-lm reads ours, bit for bit.

Version 1 goldens were written by mlx-lm 0.31.3 and 0.22.0 themselves; version 2 is written by the installed mlx-lm.
"""

import contextlib
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_cache
from safetensors.numpy import save_file

from formats import errors
from formats.container import write_container
from formats.foreign.mlx_lm import read_prompt_cache, version_of, write_prompt_cache
from formats.foreign.mlx_lm_state import ForeignArray, ForeignCache
from tests.container_cases import tiny_manifest, tiny_plans

GOLDEN = Path(__file__).parent / "golden" / "container" / "mlx_lm"
GOLDENS = [f"0.31.3-{name}" for name in ("plain", "quantized", "rotating", "chunked", "arrays", "list")]
GOLDENS += [f"0.22.0-{name}" for name in ("plain", "quantized", "rotating", "mamba")]
DTYPES = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.uint32: "U32", mx.int32: "I32", mx.bool_: "BOOL"}
META = {"model": "m", "a.b": "nested key", "7": "numeric key", "ü": "ß"}


def same(mine, theirs) -> bool:
    """Whether our plain state equals a live mlx state, with dtypes, shapes and bits."""
    if isinstance(theirs, mx.array):
        if not isinstance(mine, ForeignArray) or mine.dtype != DTYPES[theirs.dtype] or mine.shape != theirs.shape:
            return False
        bits = theirs.view(mx.uint16) if theirs.dtype == mx.bfloat16 else theirs
        return mine.data.shape == mine.shape and mine.data.tobytes() == np.array(bits).tobytes()
    if isinstance(theirs, list | tuple):
        return isinstance(mine, tuple) and len(mine) == len(theirs) and all(map(same, mine, theirs))
    return type(mine) is type(theirs) and mine == theirs


def kv(rows: int, dim: int = 8, dtype=mx.bfloat16, batch: int = 1) -> tuple[mx.array, mx.array]:
    # Values of another head size, as MLA has them.
    return tuple(mx.random.normal((batch, 2, rows, d)).astype(dtype) for d in (dim, dim // 2 if dim < 64 else dim))


def fed(cache, *rows: int, **kwargs):
    for n in rows:
        cache.update_and_fetch(*kv(n, **kwargs))
    return cache


def arrays_cache(*parts, padding=None):
    cache = mlx_cache.ArraysCache(len(parts), left_padding=padding)
    for i, part in enumerate(parts):
        cache[i] = part
    return cache


def trimmed(cache, n: int):
    cache.trim(n)
    return cache


def chunked(cache):
    cache.maybe_trim_front()
    return cache


def live_caches() -> dict[str, list]:
    mx.random.seed(3)
    m = mlx_cache
    mixed = mx.random.normal((1, 2, 3)).astype(mx.bfloat16)
    return {
        "kv": [fed(m.KVCache(), 5), fed(m.KVCache(), 300, dtype=mx.float16), trimmed(fed(m.KVCache(), 5, dtype=mx.float32), 2)],
        "empty": [m.KVCache(), m.RotatingKVCache(8, 2), m.QuantizedKVCache(), m.ChunkedKVCache(9), m.ArraysCache(2)],
        "quantized": [fed(m.QuantizedKVCache(32, b), 3, 1, dim=64, dtype=t) for b in (2, 3, 4, 6, 8) for t in (mx.float16, mx.bfloat16)],
        "rotating": [
            fed(m.RotatingKVCache(4, 1), *[1] * n) for n in (1, 3, 4, 5, 9)
        ] + [fed(m.RotatingKVCache(4, 1), 7), fed(m.RotatingKVCache(4), 7, 1, 1), trimmed(fed(m.RotatingKVCache(8), 5), 2)],
        "chunked": [fed(m.ChunkedKVCache(16), 4), fed(chunked(fed(m.ChunkedKVCache(4), 9)), 2)],
        "concatenate": [fed(m.ConcatenateKVCache(), 3, 2)],
        "arrays": [arrays_cache(mixed, None, mixed.astype(mx.float32)), arrays_cache(mixed, padding=[2])],
        "list": [
            m.CacheList(arrays_cache(mixed), fed(m.KVCache(), 3), m.CacheList(m.KVCache(), fed(m.RotatingKVCache(4), 6))),
            fed(m.KVCache(), 3),
        ],
        "batch": [
            fed(m.BatchKVCache([1, 0]), 4, batch=2), m.BatchKVCache([0, 0]),
            fed(m.BatchRotatingKVCache(4, [2, 0]), 3, *[1] * 4, batch=2),
        ],
        "one": [fed(m.KVCache(), 1)],
    }  # fmt: skip


@pytest.mark.parametrize("name", live_caches())
@pytest.mark.parametrize("meta", [{}, META], ids=["bare", "meta"])
def test_reads_what_mlx_lm_writes_and_mlx_lm_reads_ours(tmp_path, name, meta):
    caches = live_caches()[name]
    theirs, ours = str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.safetensors")
    mlx_cache.save_prompt_cache(theirs, caches, meta)
    file = read_prompt_cache(theirs)
    assert file.version == 2 and file.metadata == meta
    assert [layer.cls for layer in file.layers] == [type(cache).__name__ for cache in caches]
    for layer, cache in zip(file.layers, caches, strict=True):
        assert same(layer.arrays, cache.state)
    write_prompt_cache(ours, file.layers, file.metadata)
    # Tensor for tensor and string for string what mlx-lm itself wrote.
    (a, a_meta), (b, b_meta) = (mx.load(path, return_metadata=True) for path in (theirs, ours))
    assert a_meta == b_meta and set(a) == set(b)
    assert all(a[key].dtype == b[key].dtype and a[key].shape == b[key].shape for key in a)
    loaded, loaded_meta = mlx_cache.load_prompt_cache(ours, return_metadata=True)
    assert loaded_meta == mlx_cache.load_prompt_cache(theirs, return_metadata=True)[1]
    again = read_prompt_cache(ours)
    for layer, mine, cache in zip(again.layers, loaded, caches, strict=True):
        assert same(layer.arrays, cache.state) and type(mine) is type(cache) and same(layer.arrays, mine.state)


def test_a_loaded_cache_continues(tmp_path):
    caches = [fed(mlx_cache.KVCache(), 5), fed(mlx_cache.RotatingKVCache(4, 1), *[1] * 6)]
    mlx_cache.save_prompt_cache(str(tmp_path / "a.safetensors"), caches)
    file = read_prompt_cache(tmp_path / "a.safetensors")
    write_prompt_cache(tmp_path / "b.safetensors", file.layers, {})
    step = kv(1)
    for live, restored in zip(caches, mlx_cache.load_prompt_cache(str(tmp_path / "b.safetensors")), strict=True):
        for x, y in zip(live.update_and_fetch(*step), restored.update_and_fetch(*step), strict=True):
            assert mx.array_equal(x, y)


@pytest.mark.parametrize("name", GOLDENS)
def test_version_1_files(tmp_path, name):
    path = GOLDEN / f"{name}.safetensors"
    tensors, texts = mx.load(str(path), return_metadata=True)
    file = read_prompt_cache(path)
    assert file.version == 1 and file.metadata == {"model": "m", "a.b": "c"}
    parts = name.split("-")[1]
    flat = [layer.arrays for layer in file.layers]
    expect = {
        "plain": [("KVCache", ("0.0", "0.1", 5)), ("KVCache", ("1.0", "1.1", 5))],
        "quantized": [("QuantizedKVCache", (("0.0.0", "0.0.1", "0.0.2"), ("0.1.0", "0.1.1", "0.1.2"), 3, 32, 4))],
        "rotating": [("RotatingKVCache", ("0.0", "0.1", 6, 1, 4, 3)), ("RotatingKVCache", ("1.0", "1.1", 3, 0, 8, 3))],
        "chunked": [("ChunkedKVCache", ("0.0", "0.1", 4, 16, 0))],
        "arrays": [("ArraysCache", (("0.0", "0.1"), None, None))],
        "mamba": [("ArraysCache", (("0.0", "0.1"), None, None))],
        "list": [
            ("CacheList", (((("0.0.0",), None, None), "ArraysCache"), (("0.1.0", "0.1.1", 3), "KVCache"))),
            ("KVCache", ("1.0", "1.1", 3)),
        ],
    }[parts]

    def resolve(value):
        if isinstance(value, tuple):
            return tuple(resolve(part) for part in value)
        return tensors.get(value, value) if isinstance(value, str) else value

    assert [layer.cls for layer in file.layers] == [cls for cls, _ in expect]
    assert all(same(mine, resolve(state)) for mine, (_, state) in zip(flat, expect, strict=True))
    # Writing it as version 1 gives the same tensors and strings (today's form of the meta state).
    write_prompt_cache(tmp_path / "again.safetensors", file.layers, file.metadata, version=1)
    again, again_texts = mx.load(str(tmp_path / "again.safetensors"), return_metadata=True)
    assert set(again) == set(tensors) and all(mx.array_equal(again[key], tensors[key]) for key in tensors)
    if name.startswith("0.31.3") or parts == "plain":
        assert again_texts == texts
    # Writing it as version 2 makes it loadable today.
    write_prompt_cache(tmp_path / "two.safetensors", file.layers, file.metadata)
    loaded = mlx_cache.load_prompt_cache(str(tmp_path / "two.safetensors"))
    assert all(same(layer.arrays, cache.state) for layer, cache in zip(file.layers, loaded, strict=True))


def test_version_1_saves_live_rows_only(tmp_path):
    cache = trimmed(fed(mlx_cache.KVCache(), 300), 100)
    mlx_cache.save_prompt_cache(str(tmp_path / "a.safetensors"), [cache])
    file = read_prompt_cache(tmp_path / "a.safetensors")
    assert file.layers[0].arrays[0].shape[2] == 512
    write_prompt_cache(tmp_path / "b.safetensors", file.layers, {}, version=1)
    keys, values, offset = read_prompt_cache(tmp_path / "b.safetensors").layers[0].arrays
    assert (keys.shape[2], values.shape[2], offset) == (200, 200, 200)
    assert keys.data.tobytes() == np.array(cache.keys[:, :, :200].view(mx.uint16)).tobytes()


def test_versions_are_told_apart_by_metadata():
    assert version_of({}) is None
    assert version_of({"format": "pt"}) is None
    assert version_of({"2.0": "", "1.0": "KVCache"}) == 2
    assert version_of({"2.0": ""}) is None
    assert version_of({"2.0": "KVCache", "0.0": ""}) == 1
    assert version_of({"2.0": "QuantizedKVCache", "0.0.0": "3"}) == 1
    assert version_of({"2.0": "KVCache"}) is None


# -- malformed files


def arr(*shape: int, dtype: str = "F16") -> np.ndarray:
    return np.zeros(shape, {"F16": np.float16, "F32": np.float32, "I32": np.int32, "U32": np.uint32, "BOOL": bool}[dtype])


K, V = arr(1, 2, 4, 8), arr(1, 2, 4, 8)
OK_1 = ({"0.0": K, "0.1": V}, {"0.0": "", "2.0": "KVCache"})
OK_2 = ({"0.0": K, "0.1": V, "0.2": np.int32(4)}, {"1.0": "KVCache", "2.0": "", "2.1.0": "0.2", "2.1.1": "scalar"})
ROTATING = {"0.0": "", "2.0": "RotatingKVCache"}
BAD = [
    (OK_1, {}, {"2.0": "WeirdCache"}, "cannot read 'WeirdCache'"),
    (OK_1, {}, {"2.0": "BatchKVCache"}, "cannot read"),
    (OK_1, {}, {"0.0": "x"}, "empty meta state"),
    (OK_1, {}, {"2.1": "KVCache"}, "2 classes"),
    (OK_1, {"0.2": V}, {}, "3 parts"),
    (OK_1, {"0.1": None}, {}, "1 parts"),
    (OK_1, {"0.1": arr(1, 2, 5, 8)}, {}, r"agree in \(B, H, rows\)"),
    (OK_1, {"0.0": arr(2, 4, 8)}, {}, "4 axes"),
    (OK_1, {"0.0.0": K}, {}, "below another|both a value"),
    (OK_1, {"0.5": K}, {}, "without a hole"),
    (OK_1, {"keys": K}, {}, "not a path"),
    (OK_1, {"0.01": K}, {}, "not a path"),
    (OK_1, {".".join("0" * 40): K}, {}, "not a path"),
    (OK_1, {}, ROTATING | {"0.0": None, "0.0.0": "1"}, "keep, max_size, offset, idx"),
    (OK_1, {}, ROTATING | {"0.0": None} | {f"0.0.{i}": "x" for i in range(4)}, "keep, max_size, offset, idx"),
    (OK_1, {}, ROTATING | {"0.0": None} | {f"0.0.{i}": n for i, n in enumerate(["0", "4", "9", "5"])}, "idx is 5, but there are 4"),
    (OK_1, {}, ROTATING | {"0.0": None} | {f"0.0.{i}": n for i, n in enumerate(["0", "-4", "9", "4"])}, "max_size is -4"),
    (OK_1, {}, {"2.0": "ChunkedKVCache", "0.0": None, "0.0.0": "8", "0.0.1": "3"}, "after a trim"),
    (OK_1, {}, {"2.0": "QuantizedKVCache", "0.0": None, "0.0.0": "4", "0.0.1": "64", "0.0.2": "4"}, "keys must be triplet"),
    (OK_1, {}, {"2.0": "CacheList"}, "classes and meta states"),
    (OK_1, {}, {"2.0": "CacheList", "0.0": None, "0.0.0.0": "KVCache", "0.0.1.0": ""}, "2 states for 1"),
    (OK_2, {}, {"1.0": "WeirdCache"}, "unknown cache class 'WeirdCache'; known are KVCache"),
    (OK_2, {}, {"1.1": "KVCache"}, "2 classes, but 1 states"),
    (OK_2, {}, {"1.0": "QuantizedKVCache"}, "must have 5 parts"),
    (OK_2, {"0.2": np.int32(5)}, {}, "offset is 5, but there are 4 rows"),
    (OK_2, {"0.2": np.int32(-1)}, {}, "offset is -1"),
    (OK_2, {"0.2": np.float32(4)}, {}, "offset must be int"),
    (OK_2, {"0.2": arr(2, dtype="I32")}, {}, "stands for a number"),
    (OK_2, {}, {"2.1.1": "none"}, "stands for None"),
    (OK_2, {}, {"2.1.1": "string"}, "offset must be int"),
    (OK_2, {"0.2": np.array([0xD800], np.int32)}, {"2.1.1": "string"}, "code points"),
    (OK_2, {"0.2": np.array([1 << 30], np.int32)}, {"2.1.1": "string"}, "code points"),
    (OK_2, {}, {"2.1.1": "pickle"}, "unknown kind 'pickle'"),
    (OK_2, {}, {"2.1.0": "0.9"}, "no tensor '0.9'"),
    (OK_2, {}, {"2.1.1": None}, "pair of path and kind"),
    (OK_2, {}, {"2.1.0": None, "2.1.1": None}, "offset must be int"),
    (OK_2, {"0.1": arr(0, dtype="F32")}, {"2.2.0": "0.1", "2.2.1": "none"}, "has keys only"),
    (OK_2, {}, {"1.0": "CacheList"}, "must be a state and a class name"),
    (OK_2, {"0.0": np.zeros((1, 2, 4, 8), np.float64)}, {}, "dtype F64"),
]


@pytest.mark.parametrize(("base", "tensors", "texts", "match"), BAD)
def test_malformed_states(tmp_path, base, tensors, texts, match):
    path = tmp_path / "a.safetensors"
    arrays = {key: np.asarray(value) for key, value in (base[0] | tensors).items() if value is not None}
    save_file(arrays, path, {key: value for key, value in (base[1] | texts).items() if value is not None})
    with pytest.raises(errors.FormatError, match=match) as caught:
        read_prompt_cache(path)
    assert str(caught.value).startswith(str(path))


def test_well_formed_bases_are_read(tmp_path):
    for i, (tensors, texts) in enumerate((OK_1, OK_2)):
        save_file({key: np.asarray(value) for key, value in tensors.items()}, tmp_path / f"{i}", texts)
        file = read_prompt_cache(tmp_path / f"{i}")
        assert file.version == i + 1 and file.layers[0].arrays[2] == 4


def test_every_truncation_and_foreign_files(tmp_path):
    data = (GOLDEN / "0.31.3-list.safetensors").read_bytes()
    path = tmp_path / "a.safetensors"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(errors.FormatError):
            read_prompt_cache(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(errors.TrailingBytesError):
        read_prompt_cache(path)
    save_file({"x": K}, path)
    with pytest.raises(errors.NotKvtoolError, match="not an mlx-lm prompt cache"):
        read_prompt_cache(path)
    write_container(path, tiny_manifest(), tiny_plans())
    with pytest.raises(errors.NotKvtoolError, match="a kvtool file"):
        read_prompt_cache(path)
    with pytest.raises(errors.NotKvtoolError, match="a folder"):
        read_prompt_cache(tmp_path)


def test_mutations_raise_format_errors_only(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "a.safetensors"
    for name in GOLDENS:
        data = (GOLDEN / f"{name}.safetensors").read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        for _ in range(150):
            mutated = bytearray(data)
            for _ in range(int(rng.integers(1, 4))):
                letter = b'0123456789."{}[],'[int(rng.integers(17))]
                mutated[int(rng.integers(header))] = int(rng.integers(256)) if rng.random() < 0.5 else letter
            path.write_bytes(mutated)
            with contextlib.suppress(errors.FormatError):
                read_prompt_cache(path)


def foreign(data: np.ndarray, dtype: str = "F16") -> ForeignArray:
    return ForeignArray(dtype, data.shape, data)


# One group of 64 values in 4 bits: 8 words, one scale.
TRIPLET = (foreign(arr(1, 2, 4, 8, dtype="U32"), "U32"), foreign(arr(1, 2, 4, 1)), foreign(arr(1, 2, 4, 1)))


def test_the_triplet_is_sound_otherwise(tmp_path):
    write_prompt_cache(tmp_path / "a.safetensors", [ForeignCache("QuantizedKVCache", (TRIPLET, TRIPLET, 4, 64, 4))], {})
    assert read_prompt_cache(tmp_path / "a.safetensors").layers[0].arrays[2:] == (4, 64, 4)


@pytest.mark.parametrize(
    ("layers", "version", "match"),
    [
        ([ForeignCache("KVCache", (foreign(K), foreign(V), 5))], 2, "offset is 5"),
        ([ForeignCache("KVCache", (foreign(K), foreign(V)))], 2, "3 parts"),
        ([ForeignCache("KVCache", (K, V, 4))], 2, "keys must be array"),
        ([ForeignCache("KVCache", (foreign(K, "BF16"), foreign(V), 4))], 2, "keys must be array"),
        ([ForeignCache("KVCache", (foreign(K), foreign(V), True))], 2, "offset must be int"),
        ([ForeignCache("QuantizedKVCache", (TRIPLET, TRIPLET, 4, 32, 4))], 2, "bits and group size"),
        ([ForeignCache("QuantizedKVCache", (TRIPLET, TRIPLET, 4, 64, 8))], 2, "bits and group size"),
        ([ForeignCache("QuantizedKVCache", (TRIPLET[:2], TRIPLET, 4, 64, 4))], 2, "keys must be triplet"),
        ([ForeignCache("QuantizedKVCache", ((TRIPLET[0], TRIPLET[1], foreign(arr(1, 2, 4, 2))), TRIPLET, 4, 64, 4))], 2, "bits and"),
        ([ForeignCache("Weird", ())], 2, "unknown cache class"),
        ([], 2, "at least one layer"),
        ([ForeignCache("KVCache", (None, None, 0))], 3, "version"),
        ([ForeignCache("KVCache", (None, None, 0))], 1, "an empty KVCache"),
        ([ForeignCache("ArraysCache", ((foreign(K), None), None, None))], 1, "neither None"),
        ([ForeignCache("ArraysCache", ((foreign(K),), foreign(arr(1, dtype="I32"), "I32"), None))], 1, "neither None"),
        ([ForeignCache("ChunkedKVCache", (foreign(K), foreign(V), 5, 8, 3))], 1, "after a trim"),
        ([ForeignCache("BatchKVCache", (foreign(K), foreign(V), *[foreign(arr(1, dtype="I32"), "I32")] * 2, 4))], 1, "cannot hold Batch"),
    ],
)  # fmt: skip
def test_refuses_to_write(tmp_path, layers, version, match):
    with pytest.raises(ValueError, match=match):
        write_prompt_cache(tmp_path / "a.safetensors", layers, {}, version=version)
    with pytest.raises(ValueError, match="safetensors"):
        write_prompt_cache(tmp_path / "a.bin", layers, {})
    with pytest.raises(ValueError, match="strings"):
        write_prompt_cache(tmp_path / "a.safetensors", [ForeignCache("KVCache", (None, None, 0))], {"a": 1})
    assert os.listdir(tmp_path) == []
