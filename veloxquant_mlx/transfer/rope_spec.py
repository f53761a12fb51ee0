"""Rotary position embedding as one plain value, and reading it from a live module.

A cached key is K = m * Rot(p * w) K_pre on the first `dims` of its D entries: position p, angular frequency w_i of pair i, magnitude m
(YaRN and longrope scale the key before it is cached). "half" pairs entries (i, i + dims/2) (mlx: traditional=False), "interleaved" pairs
(2i, 2i + 1) (traditional=True).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import mlx.core as mx
import numpy as np

PAIRINGS = ("half", "interleaved")


class UnknownRope(ValueError):
    """A module whose effect on a cached key is not one fixed rotation per position, or is not known to be."""


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding: which entries it pairs, and by which angle per token.

    Args:
        kind: name of the scaling, for people ("default", "linear", "llama3", "yarn", "longrope", "proportional", ...).
        dims: number of rotated entries; even.
        pairing: "half" (i, i + dims/2) or "interleaved" (2i, 2i + 1).
        base: theta, or None when `periods` is given.
        scale: factor on every angular frequency (linear scaling by f: 1/f).
        periods: tokens per radian of each pair, dims/2 of them; inf leaves a pair unrotated, negative turns the other way.
        magnitude: factor on the rotated entries of a cached key.
        first: index of the first rotated entry, 0 but for models that rotate the tail of the head (deepseek_v2, minicpm3).
    """

    kind: str
    dims: int
    pairing: str = "half"
    base: float | None = None
    scale: float = 1.0
    periods: tuple[float, ...] | None = None
    magnitude: float = 1.0
    first: int = 0

    def __post_init__(self) -> None:
        if self.dims < 2 or self.dims % 2:
            raise ValueError(f"[RopeSpec] dims must be even and at least 2, but got {self.dims}.")
        if self.pairing not in PAIRINGS:
            raise ValueError(f"[RopeSpec] pairing must be one of {PAIRINGS}, but got {self.pairing!r}.")
        if (self.base is None) == (self.periods is None):
            raise ValueError("[RopeSpec] exactly one of base and periods must be given.")
        if self.base is not None and not (math.isfinite(self.base) and self.base > 0):
            raise ValueError(f"[RopeSpec] base must be positive and finite, but got {self.base}.")
        if self.periods is not None:
            if len(self.periods) != self.dims // 2:
                raise ValueError(f"[RopeSpec] periods must hold dims/2 = {self.dims // 2} values, but got {len(self.periods)}.")
            if any(math.isnan(p) or p == 0 for p in self.periods):
                raise ValueError("[RopeSpec] periods must be neither zero nor NaN.")
        if not math.isfinite(self.scale):
            raise ValueError(f"[RopeSpec] scale must be finite, but got {self.scale}.")
        if not (math.isfinite(self.magnitude) and self.magnitude > 0):
            raise ValueError(f"[RopeSpec] magnitude must be positive and finite, but got {self.magnitude}.")
        if self.first < 0:
            raise ValueError(f"[RopeSpec] first must not be negative, but got {self.first}.")

    @cached_property
    def frequencies(self) -> tuple[float, ...]:
        """Angular frequency of each pair, radians per token, dims/2 of them in float64."""
        if self.periods is not None:
            return tuple(0.0 if math.isinf(p) else self.scale / p for p in self.periods)
        assert self.base is not None
        return tuple(self.scale * self.base ** (-2.0 * i / self.dims) for i in range(self.dims // 2))

    def same_rotation(self, other: "RopeSpec") -> bool:
        """Whether both rotate alike up to float32 rounding of the frequencies (two back ends compute the same scaling 1 ulp apart)."""
        ours, theirs = np.array(self.frequencies), np.array(other.frequencies)
        return (
            (self.first, self.dims, self.pairing) == (other.first, other.dims, other.pairing)
            and math.isclose(self.magnitude, other.magnitude, rel_tol=1e-6)
            and bool(np.allclose(ours, theirs, rtol=3e-7, atol=0.0))
        )

    def to_json(self) -> dict[str, Any]:
        """The specification as JSON values; an infinite period becomes null."""
        periods = None if self.periods is None else [None if math.isinf(p) else p for p in self.periods]
        return {
            "kind": self.kind,
            "dims": self.dims,
            "pairing": self.pairing,
            "base": self.base,
            "scale": self.scale,
            "periods": periods,
            "magnitude": self.magnitude,
            "first": self.first,
        }

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> "RopeSpec":
        """The specification that `to_json` wrote.

        Raises:
            ValueError: a key is missing, unknown to RoPE or out of range.
        """
        keys = ("kind", "dims", "pairing", "base", "scale", "periods", "magnitude")
        if missing := [k for k in keys if k not in obj]:
            raise ValueError(f"[RopeSpec] missing {', '.join(missing)}.")
        periods = obj["periods"]
        return cls(
            kind=str(obj["kind"]),
            dims=int(obj["dims"]),
            pairing=str(obj["pairing"]),
            base=None if obj["base"] is None else float(obj["base"]),
            scale=float(obj["scale"]),
            periods=None if periods is None else tuple(math.inf if p is None else float(p) for p in periods),
            magnitude=float(obj["magnitude"]),
            first=int(obj.get("first", 0)),
        )


def _pairing(module: Any) -> str:
    return "interleaved" if module.traditional else "half"


def _periods(array: mx.array) -> tuple[float, ...]:
    return tuple(array.astype(mx.float32).tolist())


def _plain(module: Any) -> RopeSpec:
    kind = "default" if module.scale == 1 else "linear"
    return RopeSpec(kind, int(module.dims), _pairing(module), base=float(module.base), scale=float(module.scale))


def _llama3(module: Any) -> RopeSpec:
    return RopeSpec("llama3", int(module.dims), _pairing(module), periods=_periods(module._freqs))


def _yarn(module: Any) -> RopeSpec:
    return RopeSpec("yarn", int(module.dims), _pairing(module), periods=_periods(module._freqs), magnitude=float(module.mscale))


def _deepseek_yarn(module: Any) -> RopeSpec:
    periods = _periods(module._freqs)
    return RopeSpec("yarn", 2 * len(periods), "interleaved", periods=periods, magnitude=float(module.mscale))


def _longrope(module: Any) -> RopeSpec:
    return RopeSpec("longrope", int(module.dim), "half", periods=_periods(module._freqs), magnitude=float(module._scale))


def _proportional(module: Any) -> RopeSpec:
    return RopeSpec("proportional", int(module.dims), _pairing(module), periods=_periods(module._freqs))


def _ntk_alpha(module: Any) -> RopeSpec:
    # Hunyuan's "dynamic NTK alpha" fixes its base when it is built, whatever its name says.
    return RopeSpec("ntk-alpha", int(module.dims), "half", periods=_periods(module._freqs))


def _attention_periods(module: Any) -> RopeSpec:
    # nanochat and talkie keep negated periods on the attention module and have no rope module.
    periods = _periods(module._rope_freqs)
    return RopeSpec("negated", 2 * len(periods), "half", periods=periods)


# Class name -> (reader, attributes the class must have). By name, so that this layer need not import mlx_lm.
_READERS: dict[str, tuple[Callable[[Any], RopeSpec], tuple[str, ...]]] = {
    "RoPE": (_plain, ("dims", "traditional", "base", "scale")),
    "Llama3RoPE": (_llama3, ("dims", "traditional", "_freqs")),
    "YarnRoPE": (_yarn, ("dims", "traditional", "_freqs", "mscale")),
    "DeepseekV2YarnRotaryEmbedding": (_deepseek_yarn, ("_freqs", "mscale")),
    "SuScaledRoPE": (_longrope, ("dim", "_freqs", "_scale")),
    "ProportionalRoPE": (_proportional, ("dims", "traditional", "_freqs")),
    "DynamicNTKAlphaRoPE": (_ntk_alpha, ("dims", "_freqs")),
    "Attention": (_attention_periods, ("_rope_freqs",)),
}


_REFUSED = {
    "DynamicNTKScalingRoPE": "its base depends on the length at the time of each call, so a cached key has no one rotation",
}


def is_rope(module: Any) -> bool:
    """Whether a module looks like one that rotates keys, known or not: `describe_rope` has something to say about it."""
    name = type(module).__name__
    if name == "Attention":
        return hasattr(module, "_rope_freqs")
    return _named_like_one(name)


@cache  # a model has hundreds of modules of a few classes
def _named_like_one(name: str) -> bool:
    return name in _READERS or name in _REFUSED or any(part in name.lower() for part in ("rope", "rotary", "nope"))


def describe_rope(module: Any) -> RopeSpec | None:
    """The rotation that a live rope module applies, read from its attributes, never from a config.

    Args:
        module: `mlx.nn.RoPE`, a rope class of mlx-lm, or an attention module that holds its own periods (`_rope_freqs`).

    Returns:
        The specification; None for mlx-lm's `NoPE`, which rotates nothing.

    Raises:
        UnknownRope: the class is unknown, lacks the attributes it is known by, or does not rotate by a fixed angle per position.
    """
    name = type(module).__name__
    if name == "NoPE":
        return None
    if name in _REFUSED:
        raise UnknownRope(f"{name}: {_REFUSED[name]}.")
    if name not in _READERS:
        raise UnknownRope(f"{name}: this rope class is not known; known are {', '.join(sorted([*_READERS, 'NoPE']))}.")
    read, attributes = _READERS[name]
    if missing := [a for a in attributes if not hasattr(module, a)]:
        raise UnknownRope(f"{name}: has no attribute {', '.join(missing)}, so it is not the class of that name that is known.")
    try:
        return read(module)
    except (ValueError, TypeError) as error:
        raise UnknownRope(f"{name}: {error}") from error


def unrotated(spec: RopeSpec | None) -> RopeSpec | None:
    """What rows stored before RoPE carry: no rotation, and the rotary entries in half-split order whatever the model's pairing.

    With one order for all, the rows of an interleaved model and of its half-split twin are the same.
    """
    return None if spec is None else RopeSpec("none", spec.dims, base=1.0, scale=0.0, first=spec.first)
