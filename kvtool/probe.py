"""What the layers of a live model cache, found by running it: head counts, sizes, dtypes, windows, and the RoPE of each slot.

A single token attends to itself alone, so its hidden states do not depend on its position, and the keys that a layer caches at
position p and at position 0 differ by that layer's rotation only:

    K_p = Rot(p * w) K_0

Two one-token forwards with recording caches give K_0 and K_p; the rope modules of the layer are read from the live objects and the one
that predicts K_p from K_0 is the layer's. Nothing is taken from a config, so a config that disagrees with the module has no effect.

Resolution: the far position is 100003. A candidate's error is taken pair by pair, and a pair's error is |p (w - w')|, so two thetas
near 10000 are told apart from a relative difference of about 3e-8 in float32 keys (tolerance 1e-4) and 5e-6 in 16-bit keys (2e-2).
"""

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, make_prompt_cache

from formats.errors import IncompatibleError
from veloxquant_mlx.caches.families import named_modules
from veloxquant_mlx.transfer.rope_angles import mlx_rope
from veloxquant_mlx.transfer.rope_spec import RopeSpec, UnknownRope, describe_rope, is_rope

PROBE_IDS = (1, 2)  # two batch rows: twice the energy in every pair, and no reliance on one token
FAR = 100_003
NEAR = 1  # for models without a rope module: their position table may end early, and an index past it reads foreign memory
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 2e-2}
STATE_PROBLEM = "a sum over keys that each token's position has turned, which cannot be turned again"
LARGEST_NOISE = 0.1  # relative change of an unrotated slot; above it the hidden states themselves depend on the position

_ATTENTION = {
    "KVCache": "full",
    "ConcatenateKVCache": "full",
    "QuantizedKVCache": "full",
    "RotatingKVCache": "sliding",
    "ChunkedKVCache": "chunked",
}


@dataclass(frozen=True)
class RoleProbe:
    """One slot (K or V) of a layer's cache: head count, head size, dtype and the rotation its rows carry.

    `rope_problem` says why the rotation could not be described; such a slot can be stored and restored, but not recoded.
    """

    heads: int
    dim: int
    dtype: mx.Dtype
    rope: RopeSpec | None
    rope_problem: str | None = None


@dataclass(frozen=True)
class ArrayProbe:
    """One recurrent state array, without its batch axis."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True)
class CacheProbe:
    """One entry of a model's prompt cache.

    Args:
        cls: class name of the live cache.
        attention: "full", "sliding", "chunked", "state" or "list".
        window: rows that a sliding or chunked cache keeps; None otherwise.
        params: parameters of the class (max_size, keep, chunk_size, bits, group_size).
        k, v: the two slots; None if the layer never fills them.
        caches: members of a CacheList.
        arrays: arrays of a recurrent state; None where the model leaves one empty.
        state_problem: why a recurrent state cannot be moved to other positions or to another rotation, or None.
    """

    cls: str
    attention: str
    window: int | None = None
    params: dict[str, Any] = field(default_factory=dict)
    k: RoleProbe | None = None
    v: RoleProbe | None = None
    caches: "tuple[CacheProbe, ...]" = ()
    arrays: tuple[ArrayProbe | None, ...] = ()
    state_problem: str | None = None


def probe_model(model: nn.Module) -> tuple[CacheProbe, ...]:
    """The live layer table of a model, one entry per entry of `make_prompt_cache(model)`.

    Args:
        model: an mlx-lm model, `model(ids, cache=...)`. It is run twice on one token and left as it was.

    Returns:
        The table. It is kept per model object for as long as that lives, and made anew when a module, a module's plain attribute, a
        rope's values, a parameter's shape or dtype, or the caches that the model asks for have changed.

    Raises:
        IncompatibleError: the model cannot run on recording caches, or a cache class is unknown; names the layer and the class.
    """
    state = _fingerprint(model)
    kept = _MEMO.get(id(model))
    if kept is not None and kept[0]() is model and kept[1] == state:
        return kept[2]
    table = _probe(model)
    _MEMO[id(model)] = (weakref.ref(model, functools.partial(_forget, id(model))), state, table)
    return table


_PLAIN = (bool, int, float, str, type(None))
# By identity: nn.Module is a dict and has no hash of its own.
_MEMO: dict[int, tuple[weakref.ref, tuple, tuple[CacheProbe, ...]]] = {}


def _forget(key: int, _: weakref.ref) -> None:
    _MEMO.pop(key, None)


def _fingerprint(model: nn.Module) -> tuple:
    """Everything that the table depends on, but for weights' values."""
    modules = []
    for path, module in named_modules(model):
        plain = tuple((k, v) for k, v in vars(module).items() if isinstance(v, _PLAIN))
        arrays = tuple((k, v.dtype, v.shape) for k, v in module.items() if isinstance(v, mx.array))
        modules.append((path, type(module), plain, arrays, _description(module) if is_rope(module) else None))
    return tuple(modules), tuple(_live_kind(cache) for cache in make_prompt_cache(model))


def _live_kind(cache: Any) -> tuple:
    members = tuple(_live_kind(member) for member in cache.caches) if isinstance(cache, CacheList) else ()
    return type(cache), tuple(_params(cache).items()), members


def _description(module: nn.Module) -> RopeSpec | str | None:
    """What `describe_rope` says of a module, a refusal as its text."""
    try:
        return describe_rope(module)
    except UnknownRope as refusal:
        return str(refusal)


# --- recording -------------------------------------------------------------------------------------------------------------------


class _Recording:
    """Cache methods that keep the one row they are given and return it alone, at whatever offset the cache claims to stand."""

    rows: "list[tuple[mx.array, mx.array]]"
    offset: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.rows.append((keys, values))
        self.keys, self.values = keys, values
        self.offset += keys.shape[2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.rows[-1]

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """No mask: the one query sees the one key, whatever the window."""
        return


def _recording_class(cls: type) -> type:
    return type(cls.__name__, (_Recording, cls), {})


def _arm(cache: Any, offset: int, where: str) -> None:
    """Turns a fresh live cache into a recording one that stands at `offset`."""
    if isinstance(cache, CacheList):
        for n, member in enumerate(cache.caches):
            _arm(member, offset, f"{where}.{n}")
    elif type(cache).__name__ in _ATTENTION:
        cache.__class__ = _recording_class(type(cache))
        cache.rows = []
        cache.offset = offset
        if isinstance(cache, ChunkedKVCache):
            cache.start_position = offset
    elif not isinstance(cache, ArraysCache):
        known = ", ".join([*_ATTENTION, "ArraysCache", "CacheList"])
        raise IncompatibleError(f"{where}: cache class {type(cache).__name__} is not known; known are {known}")


def _forward(model: nn.Module, offset: int) -> list[Any]:
    caches = make_prompt_cache(model)
    for i, cache in enumerate(caches):
        _arm(cache, offset, f"layer {i}")
    ids = mx.array(PROBE_IDS)[:, None]
    try:
        model(ids, cache=caches)
        # Only what the caches hold: the last layer's output and the logits are never computed.
        mx.eval([list(_recorded(cache)) for cache in caches])
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError) as error:
        names = ", ".join(sorted({type(cache).__name__ for cache in caches}))
        what = f"{type(model).__module__}.{type(model).__name__} cannot be probed: one token at position {offset} with caches of "
        raise IncompatibleError(f"{what}{names} raised {type(error).__name__}: {error}") from error
    return caches


# --- reading the recordings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidates:
    specs: tuple[RopeSpec, ...]
    refusals: tuple[str, ...]


def _candidates(module: nn.Module) -> _Candidates:
    found = [_description(m) for _, m in module.named_modules() if is_rope(m)]
    specs = dict.fromkeys(d for d in found if isinstance(d, RopeSpec))
    return _Candidates(tuple(specs), tuple(dict.fromkeys(d for d in found if isinstance(d, str))))


def _probe(model: nn.Module) -> tuple[CacheProbe, ...]:
    everywhere = _candidates(model)
    far = FAR if any(is_rope(m) for _, m in model.named_modules()) else NEAR
    at_zero, at_far = _forward(model, 0), _forward(model, far)
    layers = list(getattr(model, "layers", ()))
    table = []
    for i, (near, distant) in enumerate(zip(at_zero, at_far, strict=True)):
        own = _candidates(layers[i]) if len(layers) == len(at_zero) and isinstance(layers[i], nn.Module) else everywhere
        table.append(_cache_probe(near, distant, far, (own, everywhere), f"layer {i}"))
    return tuple(table)


def _recorded(cache: Any) -> Iterator[mx.array]:
    if isinstance(cache, CacheList):
        for member in cache.caches:
            yield from _recorded(member)
    elif isinstance(cache, ArraysCache):
        for array in cache.cache:
            if array is not None:
                yield array
    else:
        for keys, values in cache.rows:
            yield keys
            yield values


def _params(cache: Any) -> dict[str, Any]:
    return {name: getattr(cache, name) for name in ("max_size", "keep", "chunk_size", "bits", "group_size") if hasattr(cache, name)}


def _cache_probe(near: Any, far: Any, position: int, candidates: tuple[_Candidates, ...], where: str) -> CacheProbe:
    name = type(near).__name__
    if isinstance(near, CacheList):
        pairs = zip(near.caches, far.caches, strict=True)
        members = tuple(_cache_probe(a, b, position, candidates, f"{where}.{n}") for n, (a, b) in enumerate(pairs))
        return CacheProbe(name, "list", caches=members)
    if isinstance(near, ArraysCache):
        arrays = tuple(None if a is None else ArrayProbe(tuple(a.shape[1:]), a.dtype) for a in near.cache)
        moves = any(_moves(a, b) for a, b in zip(near.cache, far.cache, strict=True))
        return CacheProbe(name, "state", arrays=arrays, state_problem=STATE_PROBLEM if moves else None)
    attention, params = _ATTENTION[name], _params(near)
    window = params.get("max_size", params.get("chunk_size"))
    if len(near.rows) > 1 or len(far.rows) != len(near.rows):
        raise IncompatibleError(f"{where}: one token updates this {name} {len(near.rows)} and {len(far.rows)} times, not once")
    if not near.rows:
        return CacheProbe(name, attention, window, params)
    (k0, v0), (kp, vp) = near.rows[0], far.rows[0]
    # One slot is never rotated (V, or the latent of MLA): what it changes by is how far the hidden states themselves agree.
    noise = min(_difference(k0, kp), _difference(v0, vp))
    k, v = (_role_probe(a, b, position, noise, candidates) for a, b in ((k0, kp), (v0, vp)))
    return CacheProbe(name, attention, window, params, k, v)


def _role_probe(near: mx.array, far: mx.array, position: int, noise: float, candidates: tuple[_Candidates, ...]) -> RoleProbe:
    """The slot whose rows are `near` at 0 and `far` at `position`, both (B, H, 1, D)."""
    heads, dim, dtype = near.shape[1], near.shape[3], near.dtype
    if dim == 0:
        return RoleProbe(heads, dim, dtype, None)
    tolerance = TOLERANCE.get(dtype, 2e-2) + 3 * min(noise, LARGEST_NOISE)
    if not mx.any(near != 0).item():
        return RoleProbe(heads, dim, dtype, None, f"the probe tokens {PROBE_IDS} give zeros here, so the rotation does not show")
    if _difference(near, far) <= tolerance:
        return RoleProbe(heads, dim, dtype, None)
    closest: tuple[float, RopeSpec] | None = None
    for group in candidates:
        errors = [(_difference(_turned(near, position, spec), far), spec) for spec in _placed(group.specs, dim)]
        errors.sort(key=lambda pair: pair[0])
        fits = [spec for error, spec in errors if error <= tolerance]
        if fits and all(spec.same_rotation(fits[0]) for spec in fits):
            return RoleProbe(heads, dim, dtype, fits[0])
        if fits:
            return RoleProbe(heads, dim, dtype, None, f"{len(fits)} rope modules predict these rows equally well: {fits[0]}, {fits[1]}")
        closest = min([*errors, *([closest] if closest else [])], key=lambda pair: pair[0], default=None)
    return RoleProbe(heads, dim, dtype, None, _why_none(candidates, noise, tolerance, closest))


def _why_none(candidates: tuple[_Candidates, ...], noise: float, tolerance: float, closest: tuple[float, RopeSpec] | None) -> str:
    if refusals := [text for group in candidates[:1] for text in group.refusals] or [t for g in candidates for t in g.refusals]:
        return " ".join(refusals)
    if noise > LARGEST_NOISE:
        return "keys and values both change with the position: learned position embeddings, which cannot be undone"
    if closest is None:
        return "the rows turn with the position, but the model has no rope module"
    return f"no rope module of the model predicts the rows; the closest, {closest[1]}, is off by {closest[0]:.1e} (allowed {tolerance:.1e})"


def _placed(specs: tuple[RopeSpec, ...], dim: int) -> Iterator[RopeSpec]:
    """Every rotation that fits a head of `dim` entries, at its head and, if it is partial, at its tail."""
    for spec in specs:
        if spec.dims <= dim:
            yield spec
        if spec.dims < dim:
            yield replace(spec, first=dim - spec.dims)


def _turned(near: mx.array, position: int, spec: RopeSpec) -> mx.array:
    return mlx_rope(near, np.array([position]), spec)


def _moves(near: mx.array | None, far: mx.array | None) -> bool:
    """Whether a recurrent state depends on the position."""
    if near is None or far is None or not near.size:
        return False
    ours, theirs = (np.array(x.astype(mx.float32)) for x in (near, far))
    return not float(np.max(np.abs(ours - theirs))) <= TOLERANCE.get(near.dtype, 2e-2) * float(np.max(np.abs(theirs)))


def _difference(a: mx.array, b: mx.array) -> float:
    """Largest relative error of one entry over all heads and probe tokens; an entry with little energy counts as a quarter of the mean."""
    if a.shape != b.shape or a.size == 0:
        return float("inf") if a.shape != b.shape else 0.0
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    energy = mx.sqrt((b * b).sum(axis=(0, 1, 2)))
    floor = 0.25 * mx.sqrt((energy * energy).mean())
    error = mx.sqrt(((a - b) * (a - b)).sum(axis=(0, 1, 2))) / mx.maximum(mx.maximum(energy, floor), 1e-30)
    worst = float(np.array(error.max()))
    return worst if worst == worst else float("inf")
