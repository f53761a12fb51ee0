"""Map files: what turns one model's keys and values into another's. SPEC.md, "Maps", has every field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from formats.errors import ManifestError
from formats.manifest import ModelInfo, Node, model_of
from formats.model_info import model_json
from formats.tables import Arrays, Kind

VERSION = 1
FLOATS = ("<f2", "<f4")


@dataclass(frozen=True, eq=False)
class LayerMap:
    """How one layer's rows come about: y = (x - source_mean) left right + target_mean, and with `residual` the first source's rows more.

    x: keys, then values of each source layer, side by side, all heads; y: keys, then values. Keys before RoPE, in half-split order.

    Attributes:
        sources: names of the source model's layers.
        residual: whether the map gives what is to be added to the rows of the first source.
        heads, k_dim, v_dim: of the target's layer.
        unexplained: share of the energy of y (around its mean) that the map left on documents it was not fitted on.
        source_mean: (in,) float32. target_mean: (out,) float32.
        left: (in, r). right: (r, out). float16 or float32 each; no `right`: left is (in, out).
    """

    sources: tuple[str, ...]
    residual: bool
    heads: int
    k_dim: int
    v_dim: int
    unexplained: float
    source_mean: np.ndarray
    target_mean: np.ndarray
    left: np.ndarray
    right: np.ndarray | None = None

    @property
    def out(self) -> int:
        """Entries of a row of keys and values."""
        return self.heads * (self.k_dim + self.v_dim)

    def problem(self) -> str | None:
        """What does not fit together, or None."""
        arrays = {"source_mean": self.source_mean, "target_mean": self.target_mean, "left": self.left, "right": self.right}
        for name, array in arrays.items():
            if array is not None and array.dtype.str not in (FLOATS if name in ("left", "right") else FLOATS[1:]):
                return f"{name} must be float32, or float16 where it is left or right, but got {array.dtype}"
        rank = self.out if self.right is None else self.right.shape[0] if self.right.ndim == 2 else -1
        wanted = {"source_mean": (len(self.source_mean),), "target_mean": (self.out,), "left": (len(self.source_mean), rank)}
        wanted["right"] = (rank, self.out)
        for name, shape in wanted.items():
            array = arrays[name]
            if array is not None and array.shape != shape:
                return f"{name} must be {shape}, but got {array.shape}"
        if self.unexplained < 0:
            return f"unexplained must be at least 0, but got {self.unexplained:g}"
        return None if self.sources else "sources must name at least one layer, but got none"


@dataclass(frozen=True, eq=False)
class MapFile:
    """What a map file holds.

    Attributes:
        source, target: the models.
        texts: name of each text -> blake3 (hex) of its token ids as little-endian int64.
        tokens: tokens that were run through both.
        layers: target layer -> its map, in the order of the target's layers.
        producer: versions of what wrote it.
    """

    source: ModelInfo
    target: ModelInfo
    texts: Mapping[str, str]
    tokens: int
    layers: Mapping[str, LayerMap]
    producer: Mapping[str, str] = field(default_factory=dict)


def _described(mapping: MapFile) -> tuple[Mapping[str, Any], Arrays]:
    arrays = {
        KIND.tensor_name(layer, name): array
        for layer, own in mapping.layers.items()
        for name in ("source_mean", "target_mean", "left", "right")
        if (array := getattr(own, name)) is not None
    }
    body = {
        "source": model_json(mapping.source),
        "target": model_json(mapping.target),
        "texts": dict(mapping.texts),
        "tokens": mapping.tokens,
        "layers": [
            {
                "name": name,
                "sources": list(own.sources),
                "residual": own.residual,
                "heads": own.heads,
                "k_dim": own.k_dim,
                "v_dim": own.v_dim,
                "unexplained": own.unexplained,
            }
            for name, own in mapping.layers.items()
        ],
        "producer": dict(mapping.producer),
    }
    return body, arrays


def _made(root: Node, arrays: Arrays) -> MapFile:
    by_layer: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        layer, _, part = name.partition(":")
        by_layer.setdefault(layer, {})[part] = array
    layers: dict[str, LayerMap] = {}
    for node in root.key("layers").elements():
        name = node.key("name").text()
        parts = by_layer.pop(name, {})
        missing = [part for part in ("source_mean", "target_mean", "left") if part not in parts]
        unknown = sorted(set(parts) - {"source_mean", "target_mean", "left", "right"})
        if missing or unknown or name in layers:
            raise ManifestError(f"$.layers: layer {name!r:.40} occurs twice, lacks {missing} or has {unknown} besides")
        layers[name] = LayerMap(
            sources=tuple(source.text() for source in node.key("sources").elements()),
            residual=node.key("residual").boolean(),
            heads=node.key("heads").integer(1),
            k_dim=node.key("k_dim").integer(1),
            v_dim=node.key("v_dim").integer(1),
            unexplained=node.key("unexplained").number(),
            source_mean=parts["source_mean"],
            target_mean=parts["target_mean"],
            left=parts["left"],
            right=parts.get("right"),
        )
        problem = layers[name].problem()
        if problem is not None:
            raise ManifestError(f"$.layers: layer {name!r:.40}: {problem}")
    if by_layer:
        raise ManifestError(f"tensors of layer {next(iter(by_layer))!r:.40}, which the metadata does not list")
    return MapFile(
        source=model_of(root.key("source")),
        target=model_of(root.key("target")),
        texts={name: node.digest() for name, node in root.key("texts").items()},
        tokens=root.key("tokens").integer(),
        layers=layers,
        producer=root.key("producer").texts(),
    )


KIND = Kind("map", VERSION, "kvtool fit", described=_described, made=_made, sealed=True)
to_bytes, from_bytes, read_map, write_map = KIND.to_bytes, KIND.from_bytes, KIND.read, KIND.write
