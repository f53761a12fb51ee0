"""Calibration files: tables that calibrated codecs learnt for one model, as a safetensors file. SPEC.md, "Calibrations", has every field.

    u64 LE N | N bytes of JSON, space padded so that (8 + N) % 64 == 0 | arrays, those of wide items first, without gaps

Its name is the blake3 of all its bytes, which is what a kvtool file that needs it records. The writer is deterministic: equal content
gives equal bytes. Reading checks everything and copies nothing: arrays are views of the mapped file.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import blake3
import numpy as np

from formats.atomic import atomic_write
from formats.errors import KVError, LayoutError, ManifestError, NotKvtoolError, VersionError
from formats.files import naming, opened
from formats.header import MAX_HEADER, Entry, Header, check_extents, is_tensor_name, parse_entries, parse_json, read_raw
from formats.manifest import ModelInfo, Node, model_of
from formats.strict_json import dumps, loads

FORMAT = "kvtool-calibration"
VERSION = 1
MAX_BYTES = 1 << 34
# safetensors dtype -> numpy's; no others occur.
DTYPES = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2", "I16": "<i2", "U16": "<u2",
    "I8": "|i1", "U8": "|u1",
}  # fmt: skip
_NAMES = {np.dtype(numpy): name for name, numpy in DTYPES.items()}
_ALIGNMENT = 64

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class CalibrationFile:
    """What a calibration file holds.

    Attributes:
        model: the model that was calibrated.
        texts: name of each text -> blake3 (hex) of its token ids as little-endian int64.
        tokens: tokens that were run.
        tables: kind ("tc", "tcz-0.75" ...) -> layer name -> array name -> array.
        options: kind -> what its tables have in common, as JSON (a step, the layer before each).
        skipped: layer name -> why it has no tables.
        producer: versions of what wrote it.
    """

    model: ModelInfo
    texts: Mapping[str, str]
    tokens: int
    tables: Mapping[str, Mapping[str, Arrays]]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    producer: Mapping[str, str] = field(default_factory=dict)


def to_bytes(calibration: CalibrationFile) -> bytes:
    """The file as bytes.

    Raises:
        ValueError: a name, dtype or value that a reader would refuse.
    """
    arrays: dict[str, np.ndarray] = {}
    for kind, layers in calibration.tables.items():
        for layer, named in layers.items():
            for name, array in named.items():
                arrays[_tensor_name(kind, layer, name)] = _storable(f"{kind} {layer} {name}", np.asarray(array))
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    body = {
        "version": VERSION,
        "model": dict(vars(calibration.model)),
        "texts": dict(calibration.texts),
        "tokens": calibration.tokens,
        "kinds": {
            kind: {"layers": list(layers), "options": calibration.options.get(kind, {})} for kind, layers in calibration.tables.items()
        },
        "skipped": dict(calibration.skipped),
        "producer": dict(calibration.producer),
    }
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "calibration": dumps(body)}}
    end = 0
    for name in order:
        array = arrays[name]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    # Not sorted: the metadata comes first, then the arrays as they lie.
    text = "{" + ",".join(f"{dumps(key)}:{dumps(value)}" for key, value in header.items()) + "}"
    raw = text.encode().ljust(-(-(8 + len(text.encode())) // _ALIGNMENT) * _ALIGNMENT - 8, b" ")
    if len(raw) > MAX_HEADER or 8 + len(raw) + end > MAX_BYTES:
        raise ValueError(f"[calibration] header and arrays must have at most {MAX_HEADER} and {MAX_BYTES} bytes, got {len(raw)}, {end}.")
    data = b"".join([len(raw).to_bytes(8, "little"), raw, *(arrays[name].tobytes() for name in order)])
    try:
        from_bytes(data)
    except KVError as error:
        raise ValueError(f"[calibration] it could not be read again: {error}") from error
    return data


def from_bytes(data: bytes | memoryview) -> CalibrationFile:
    """What bytes of a file hold; arrays are views of them. Errors as `read_calibration`."""
    view = memoryview(data)
    if len(view) >= 8 and 2 <= int.from_bytes(view[:8], "little") <= min(MAX_HEADER, len(view) - 8):
        return _parse(bytes(view[: 8 + int.from_bytes(view[:8], "little")]), view)
    raise NotKvtoolError(f"not a calibration: {len(view)} bytes do not begin as a safetensors file")


def read_calibration(path: str | os.PathLike[str]) -> tuple[CalibrationFile, str]:
    """A calibration file and its digest (hex).

    Raises:
        FormatError: what is wrong with it.
        OSError: it cannot be read.
    """
    path = os.fspath(path)
    with naming(path), opened(path) as (fd, size):
        if size > MAX_BYTES:
            raise LayoutError(f"{size} bytes, more than {MAX_BYTES}")
        raw = read_raw(fd, size)
        data = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
        return _parse(raw, data), digest_of(data)


def read_model(path: str | os.PathLike[str]) -> ModelInfo:
    """The model that a calibration file is of, from its header; its arrays and its digest are not looked at.

    Raises:
        FormatError: what is wrong with the header.
        OSError: it cannot be read.
    """
    path = os.fspath(path)
    with naming(path), opened(path) as (fd, size):
        return model_of(_header(read_raw(fd, size), size)[1].key("model"))


def write_calibration(path: str | os.PathLike[str], calibration: CalibrationFile) -> str:
    """Write a calibration file, atomically; returns its digest.

    Raises:
        ValueError: content that a reader would refuse.
        OSError: as the system gives it.
    """
    data = to_bytes(calibration)
    with atomic_write(path) as out:
        out.write(data)
    return digest_of(data)


def digest_of(data: bytes | memoryview) -> str:
    """blake3, in hex, of a calibration file's bytes: its name."""
    return blake3.blake3(data, max_threads=blake3.blake3.AUTO).hexdigest()


def _tensor_name(kind: str, layer: str, name: str) -> str:
    full = f"{kind}:{layer}:{name}"
    if not is_tensor_name(full) or full.count(":") != 2 or not layer or not name:
        raise ValueError(f"[calibration] kind, layer and array must be of A-Z a-z 0-9 _ . -, none empty, but got {full!r:.80}.")
    return full


def _storable(what: str, array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
    if array.dtype not in _NAMES:
        raise ValueError(f"[calibration] {what} must be of {', '.join(DTYPES)}, but got {array.dtype}.")
    return array


def _header(raw: bytes, size: int) -> tuple[Header, Node]:
    """The header of a file of so many bytes, and the metadata in it."""
    problems: list[KVError] = []
    header = parse_entries(parse_json(raw), raw, problems)
    if not problems and header.metadata.get("format") != FORMAT:
        kind = "a kvtool file" if header.metadata.get("format") == "kvtool" else "safetensors without its metadata"
        raise NotKvtoolError(f"not a calibration: {kind}")
    if not problems:
        check_extents(header, size, problems, in_order=True)
    if problems:
        raise problems[0]
    root = Node(loads(header.metadata.get("calibration", ""), "calibration"))
    version = root.key("version").integer(1)
    if version > VERSION:
        raise VersionError(f"$.version: {version} is newer than {VERSION}, the newest this version reads", hint="upgrade kvtool")
    return header, root


def _parse(raw: bytes, data: memoryview) -> CalibrationFile:
    header, root = _header(raw, len(data))
    kinds = root.key("kinds").items()
    tables: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for kind, node in kinds:
        tables[kind] = {layer.text(): {} for layer in node.key("layers").elements()}
    for name, entry in header.entries.items():
        kind, layer, array = (*name.split(":"), "", "")[:3]
        if name.count(":") != 2 or not is_tensor_name(name) or layer not in tables.get(kind, {}):
            raise ManifestError(f"tensor {name[:80]!r}: of no layer and kind that the metadata lists")
        tables[kind][layer][array] = _array(name, entry, data[len(raw) + entry.begin : len(raw) + entry.end])
    for kind, layers in tables.items():
        empty = next((layer for layer, arrays in layers.items() if not arrays), None)
        if empty is not None:
            raise ManifestError(f"$.kinds.{kind}: layer {empty!r:.40} has no arrays")
    return CalibrationFile(
        model=model_of(root.key("model")),
        texts={name: node.digest() for name, node in root.key("texts").items()},
        tokens=root.key("tokens").integer(),
        tables=tables,
        options={kind: node.key("options").members() for kind, node in kinds},
        skipped={name: node.text() for name, node in root.key("skipped").items()},
        producer={name: node.text() for name, node in root.key("producer").items()},
    )


def _array(name: str, entry: Entry, data: memoryview) -> np.ndarray:
    if entry.dtype not in DTYPES:
        raise LayoutError(f"tensor {name[:80]!r}: dtype {entry.dtype} does not occur in a calibration")
    array = np.frombuffer(data, np.dtype(DTYPES[entry.dtype])).reshape(entry.shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ManifestError(f"tensor {name[:80]!r}: holds NaN or infinity")
    return array
