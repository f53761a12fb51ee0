"""Calibration files: tables that calibrated codecs learnt for one model. SPEC.md, "Calibrations", has every field.

The file's name is its digest, which is what a kvtool file that needs it records.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from formats.errors import ManifestError
from formats.manifest import ModelInfo, Node, model_of
from formats.model_info import model_json
from formats.tables import Arrays, Kind

VERSION = 1


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


def _described(calibration: CalibrationFile) -> tuple[Mapping[str, Any], Arrays]:
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
    return body, arrays


def _made(root: Node, arrays: Arrays) -> CalibrationFile:
    kinds = list(root.key("kinds").items())
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
        skipped=root.key("skipped").texts(),
        producer=root.key("producer").texts(),
    )


KIND = Kind("calibration", VERSION, "kvtool calibrate", described=_described, made=_made)
to_bytes, from_bytes, read_calibration, write_calibration = KIND.to_bytes, KIND.from_bytes, KIND.read, KIND.write
read_model = KIND.described_model
