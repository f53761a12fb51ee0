"""Calibration files: tables that calibrated codecs learnt for one model. SPEC.md, "Calibrations", has every field.

The file's name is its digest, which is what a kvtool file that needs it records.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from formats.atomic import atomic_write
from formats.errors import KVError, ManifestError
from formats.files import naming
from formats.manifest import ModelInfo, Node, model_of
from formats.model_info import model_json
from formats.tables import Arrays, Kind, digest_of

VERSION = 1
KIND = Kind("calibration", VERSION)
FORMAT = KIND.format


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
    arrays = {
        KIND.tensor_name(kind, layer, name): array
        for kind, layers in calibration.tables.items()
        for layer, named in layers.items()
        for name, array in named.items()
    }
    body = {
        "model": model_json(calibration.model),
        "texts": dict(calibration.texts),
        "tokens": calibration.tokens,
        "kinds": {
            kind: {"layers": list(layers), "options": calibration.options.get(kind, {})} for kind, layers in calibration.tables.items()
        },
        "skipped": dict(calibration.skipped),
        "producer": dict(calibration.producer),
    }
    data = KIND.to_bytes(body, arrays)
    try:
        from_bytes(data)
    except KVError as error:
        raise ValueError(f"[calibration] it could not be read again: {error}") from error
    return data


def from_bytes(data: bytes | memoryview) -> CalibrationFile:
    """What bytes of a file hold; arrays are views of them. Errors as `read_calibration`."""
    return _made(*KIND.parse(data))


def read_calibration(path: str | os.PathLike[str]) -> tuple[CalibrationFile, str]:
    """A calibration file and its digest (hex).

    Raises:
        FormatError: what is wrong with it.
        OSError: it cannot be read.
    """
    with naming(os.fspath(path)):
        root, arrays, digest = KIND.read(path)
        return _made(root, arrays), digest


def read_model(path: str | os.PathLike[str]) -> ModelInfo:
    """The model that a calibration file is of, from its header; its arrays and its digest are not looked at.

    Raises:
        FormatError: what is wrong with the header.
        OSError: it cannot be read.
    """
    with naming(os.fspath(path)):
        return model_of(KIND.read_description(path).key("model"))


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


def _made(root: Node, arrays: Mapping[str, np.ndarray]) -> CalibrationFile:
    kinds = root.key("kinds").items()
    tables: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for kind, node in kinds:
        tables[kind] = {layer.text(): {} for layer in node.key("layers").elements()}
    for name, array in arrays.items():
        kind, layer, part = (*name.split(":"), "", "")[:3]
        if name.count(":") != 2 or layer not in tables.get(kind, {}):
            raise ManifestError(f"tensor {name[:80]!r}: of no layer and kind that the metadata lists")
        tables[kind][layer][part] = array
    for kind, layers in tables.items():
        empty = next((layer for layer, held in layers.items() if not held), None)
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
