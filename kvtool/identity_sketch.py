"""A few hundred of a model's weights, by which the same weights in another precision are told from other weights.

Which entries: SAMPLES times a tensor and a place in it, both by a digest, among all floating-point parameters and quantised weights of the
live model, before any cast. Kept of each: its value and half the step to the next value that its own storage could have held, both as
float16. Weights that were rounded or quantised from the same ones differ by no more than the two half steps; those of a fine-tune do not
keep to that. Fine-tunes too small to leave a half step anywhere among the samples cannot be told: what is found is evidence for a bridge,
never a reason to accept a cache. Quantisers that move weights to make up for errors elsewhere (GPTQ, AWQ, DWQ) count as other weights.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from blake3 import blake3
from mlx.utils import tree_flatten

from kvtool.identity_config import quantised_modules

SAMPLES = 384
WITHIN = 0.98  # share of samples that must keep to the half steps
FARTHEST = (
    2.2  # and no sample may be farther off, in half steps: affine grids are moved onto zero, which costs their end up to a whole step
)
# Half the distance between neighbours, relative to the value, and the least one. mx.float32 stands for what is exact here.
FLOATS = {mx.float16: (2.0**-11, 2.0**-25), mx.bfloat16: (2.0**-8, 2.0**-134), mx.float32: (2.0**-24, 2.0**-150)}
OWN = FLOATS[mx.float16]  # of the sketch itself
# Codes that stand for 1, eight or four to a word: decoded, they are the scale.
ONES = {"mxfp4": 0x22222222, "nvfp4": 0x22222222, "mxfp8": 0x38383838}


@dataclass(frozen=True)
class Likeness:
    """How two models' samples stand to each other.

    Attributes:
        within: share of samples whose values are as near as their storage accounts for.
        farthest: the largest distance, in what their storage accounts for.
        correlation: of the values.
        same: whether that is what the same weights in two precisions give.
    """

    within: float
    farthest: float
    correlation: float

    @property
    def same(self) -> bool:
        return self.within >= WITHIN and self.farthest <= FARTHEST


def sketch_of(model: nn.Module) -> dict[str, str]:
    """The sketch of a live model as a manifest has it."""
    quantised = dict(quantised_modules(model))
    packed = {f"{path}.{name}" for path in quantised for name in ("weight", "scales", "biases", "global_scale")}
    parameters: Any = tree_flatten(model.parameters(), destination={})
    plain = {
        name: array for name, array in parameters.items() if name not in packed and mx.issubdtype(array.dtype, mx.floating) and array.size
    }
    shapes = {name: tuple(array.shape) for name, array in plain.items()}
    shapes |= {f"{path}.weight": (*m.weight.shape[:-1], m.weight.shape[-1] * 32 // m.bits) for path, m in quantised.items()}
    names = sorted(shapes)
    places: dict[str, list[tuple[int, int]]] = {}
    for i in range(SAMPLES):
        seed = blake3(str(i).encode()).digest(length=16)
        name = names[int.from_bytes(seed[:8], "little") % len(names)]
        at = int.from_bytes(blake3(name.encode() + seed).digest(length=8), "little") % int(np.prod(shapes[name]))
        places.setdefault(name, []).append((i, at))
    values, halves = np.zeros(SAMPLES), np.zeros(SAMPLES)
    for name, found in places.items():
        which, indices = [i for i, _ in found], np.array([a for _, a in found])
        path = name.removesuffix(".weight")
        entries = _dequantised(quantised[path], indices, shapes[name]) if path in quantised else _floats(plain[name], indices)
        values[which], halves[which] = entries
    dtypes = {str(array.dtype).removeprefix("mlx.core.") for array in plain.values()}
    of = blake3("\n".join(f"{name} {shapes[name]}" for name in names).encode()).hexdigest()
    with np.errstate(over="ignore"):
        data = np.concatenate([values, halves]).astype("<f2").tobytes()
    return {"of": of, "dtype": ", ".join(sorted(dtypes)), "values": base64.b64encode(data).decode()}


def likeness(a: Mapping[str, str] | None, b: Mapping[str, str] | None) -> Likeness | None:
    """How alike two sketches are, None where they are not of the same tensors or one is malformed."""
    if a is None or b is None or a["of"] != b["of"]:
        return None
    sides = [_parsed(side["values"]) for side in (a, b)]
    if any(side is None for side in sides):
        return None
    (x, hx), (y, hy) = (side for side in sides if side is not None)
    allowed = hx + hy + sum(np.maximum(OWN[0] * np.abs(v), OWN[1]) for v in (x, y))
    off = np.abs(x - y) / allowed
    constant = not x.std() or not y.std()
    return Likeness(float((off <= 1).mean()), float(off.max()), float("nan") if constant else float(np.corrcoef(x, y)[0, 1]))


def _parsed(text: str) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    if len(data) != 4 * SAMPLES:
        return None
    both = np.frombuffer(data, "<f2").astype(np.float64)
    return (both[:SAMPLES], both[SAMPLES:]) if np.isfinite(both).all() and (both[SAMPLES:] >= 0).all() else None


def _floats(array: mx.array, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and half steps of entries of a plain parameter."""
    values = np.array(array.reshape(-1)[mx.array(at)].astype(mx.float32)).astype(np.float64)
    relative, least = FLOATS[array.dtype]
    return values, np.maximum(relative * np.abs(values), least)


def _dequantised(module: Any, at: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Values and half steps of entries of a quantised module's weight of this shape."""
    row, column = mx.array(at // shape[-1]), at % shape[-1]
    flat = {name: array.reshape(-1, array.shape[-1])[row] for name, array in (("weight", module.weight), ("scales", module.scales))}
    biases, overall = module.get("biases"), module.get("global_scale")
    own = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    extra: dict[str, Any] = {} if biases is None else {"biases": biases.reshape(-1, biases.shape[-1])[row]}
    values = mx.dequantize(flat["weight"], flat["scales"], **extra, **own)
    if module.mode == "affine":
        scales = mx.repeat(flat["scales"], module.group_size, axis=1)
    else:
        ones = mx.full(flat["weight"].shape, ONES[module.mode], mx.uint32)
        scales = mx.dequantize(ones, flat["scales"], **own)
    value, scale = (np.array(x.astype(mx.float32)).astype(np.float64)[np.arange(len(at)), column] for x in (values, scales))
    if overall is not None:
        # One a module, or one an expert: what quantised rows were divided by.
        each = np.array(overall.astype(mx.float32)).reshape(-1)
        factor = each[(at // int(np.prod(shape[1:]))) if each.size > 1 else np.zeros(len(at), int)] / (6 * 448)
        value, scale = value * factor, scale * factor
    scale = np.abs(scale)
    if module.mode == "affine":
        return value, scale / 2
    size = np.abs(value) / np.maximum(scale, 1e-30)
    if module.bits == 8:
        return value, scale * np.maximum(size * 2.0**-4, 2.0**-10)
    return value, scale * np.where(size < 2, 0.25, np.where(size < 4, 0.5, 1.0))
