"""The manifest: what a file holds, as frozen dataclasses, with strict parsing that names the JSON path of each defect.

`parse(to_json(m)) == m`. Unknown keys are ignored wherever they stand (a later minor version may add some); a feature that an
old reader must not ignore is named in `requires`, and an unknown entry there is refused. Field by field: SPEC.md.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import blake3
import numpy as np

from formats.errors import DigestError, ManifestError, VersionError
from formats.model_info import ModelInfo, model_json, model_of
from formats.token_ids import TokenIds

JSON = Any
SCHEMA = 1
# "adapter": the model had one, which readers of the first version of the identity would overlook.
KNOWN_REQUIRES: frozenset[str] = frozenset({"adapter"})
MAX_NESTING = 8
FRAMES = ("post", "pre")
ATTENTION = ("full", "sliding", "chunked", "state", "list")
PAIRINGS = ("half", "interleaved")
# dtype name -> bytes per element; F64 and the 8-bit floats are not part of the format.
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8}
CACHE_DTYPES = ("F32", "F16", "BF16")
_HEX = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


@dataclass(frozen=True)
class CodecInfo:
    """A codec with everything its decoder needs besides the tensors; opaque here."""

    id: str
    params: dict[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [rows[0], rows[1]) of one role, coded by codecs[codec]. `frame`: keys as cached ("post" RoPE) or before RoPE ("pre").

    tensors: part name of the codec -> tensor name in the file.
    """

    rows: tuple[int, int]
    codec: int
    frame: str
    tensors: dict[str, str]


@dataclass(frozen=True, slots=True)
class Role:
    """Keys or values of one cache: (heads, S, dim) of `dtype` when decoded; `rope` indexes Manifest.ropes; segments tile [0, S)."""

    heads: int
    dim: int
    dtype: str
    rope: int | None
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True)
class StateArray:
    """A recurrent state, stored verbatim in the tensor named `tensor`."""

    dtype: str
    shape: tuple[int, ...]
    tensor: str


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """One cache of one layer.

    cls: the mlx-lm class name. offset: tokens seen, which is the position of the next one. positions: [start, stop) ranges
    of the stored rows, in row order; together S rows. params: what else the class needs (max_size, keep, chunk_size ...).
    """

    cls: str
    attention: str
    window: int | None
    offset: int
    positions: tuple[tuple[int, int], ...]
    k: Role | None = None
    v: Role | None = None
    arrays: tuple[StateArray | None, ...] = ()
    params: dict[str, JSON] = field(default_factory=dict)
    caches: tuple["CacheInfo", ...] = ()

    @property
    def rows(self) -> int:
        """S: the number of stored rows."""
        return sum(stop - start for start, stop in self.positions)


@dataclass(frozen=True)
class LayerInput:
    """What entered a layer, a vector a token, cut into equal parts as the heads of a role without rotation."""

    layer: int
    rows: Role


@dataclass(frozen=True)
class Tokens:
    """Token ids and the blake3 of them as little-endian int32."""

    ids: Sequence[int]
    blake3: str

    @classmethod
    def of(cls, ids: "Sequence[int] | np.ndarray") -> "Tokens":
        """Token ids (integers in 0 .. 2**31 - 1) with their digest computed.

        Raises:
            ValueError: an id is out of range.
        """
        held = TokenIds.of(ids)
        return cls(held, tokens_digest(held))


@dataclass(frozen=True)
class Manifest:
    """What the file holds. `length`: tokens that a reader may reuse; `quality`: one entry per lossy step, each with "step".

    layer_inputs: what entered some layers, ascending; another model of the same shapes may run its layers from there on.
    """

    model: ModelInfo
    length: int
    layers: tuple[CacheInfo, ...]
    codecs: tuple[CodecInfo, ...] = ()
    ropes: tuple[dict[str, JSON], ...] = ()
    tokens: Tokens | None = None
    quality: tuple[dict[str, JSON], ...] = ()
    producer: dict[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    extra: dict[str, JSON] = field(default_factory=dict)
    schema: int = SCHEMA
    layer_inputs: tuple[LayerInput, ...] = ()


def tokens_digest(ids: Sequence[int]) -> str:
    """Blake3, in hex, over token ids as little-endian int32.

    Raises:
        ValueError: an id is outside 0 .. 2**31 - 1.
    """
    return blake3.blake3(TokenIds.of(ids).array.tobytes()).hexdigest()


def to_json(manifest: Manifest) -> dict[str, JSON]:
    """The manifest as plain JSON values (without "tensors", which the container adds)."""
    inputs = [{"layer": given.layer, "rows": _role_json(given.rows)} for given in manifest.layer_inputs]
    return {
        "schema": manifest.schema,
        "requires": list(manifest.requires),
        "producer": dict(manifest.producer),
        "model": model_json(manifest.model),
        "tokens": None if manifest.tokens is None else {"ids": list(manifest.tokens.ids), "blake3": manifest.tokens.blake3},
        "length": manifest.length,
        "codecs": [{"id": codec.id, "params": codec.params} for codec in manifest.codecs],
        "ropes": [dict(rope) for rope in manifest.ropes],
        "layers": [_cache_json(cache) for cache in manifest.layers],
        "quality": [dict(entry) for entry in manifest.quality],
        "extra": manifest.extra,
        **({"layer_inputs": inputs} if inputs else {}),
    }


def _cache_json(cache: CacheInfo) -> dict[str, JSON]:
    return {
        "cls": cache.cls,
        "attention": cache.attention,
        "window": cache.window,
        "offset": cache.offset,
        "positions": [list(span) for span in cache.positions],
        "k": None if cache.k is None else _role_json(cache.k),
        "v": None if cache.v is None else _role_json(cache.v),
        "arrays": [None if a is None else {"dtype": a.dtype, "shape": list(a.shape), "tensor": a.tensor} for a in cache.arrays],
        "params": cache.params,
        "caches": [_cache_json(sub) for sub in cache.caches],
    }


def _role_json(role: Role) -> dict[str, JSON]:
    segments = [{"rows": list(s.rows), "codec": s.codec, "frame": s.frame, "tensors": dict(s.tensors)} for s in role.segments]
    return {"heads": role.heads, "dim": role.dim, "dtype": role.dtype, "rope": role.rope, "segments": segments}


class Node:
    """A JSON value with the path it stands at; the accessors raise ManifestError naming that path."""

    __slots__ = ("_above", "_step", "value")

    def __init__(self, value: JSON, above: "Node | None" = None, step: str | int = "$") -> None:
        self.value = value
        self._above = above
        self._step = step

    @property
    def path(self) -> str:
        """Made when it is asked for: a sound file has thousands of values, and none to be named."""
        if self._above is None:
            return str(self._step)
        return f"{self._above.path}[{self._step}]" if isinstance(self._step, int) else f"{self._above.path}.{self._step}"

    def fail(self, what: str) -> ManifestError:
        return ManifestError(f"{self.path}: {what}")

    def _is(self, kind: type[T], name: str) -> T:
        if type(self.value) is not kind:
            raise self.fail(f"must be {name}, but is {_show(self.value)}")
        return self.value

    def key(self, name: str) -> "Node":
        members = self.value if type(self.value) is dict else self.members()
        if name not in members:
            raise self.fail(f"field {name!r} is missing")
        return Node(members[name], self, name)

    def members(self) -> dict[str, JSON]:
        return self._is(dict, "an object")

    def items(self) -> Iterator[tuple[str, "Node"]]:
        return ((name, Node(value, self, name)) for name, value in self.members().items())

    def texts(self) -> dict[str, str]:
        """An object of strings, as it is."""
        for _, node in self.items():
            node.text()
        return self.members()

    def raw_elements(self) -> list[JSON]:
        return self._is(list, "a list")

    def elements(self) -> Iterator["Node"]:
        return (Node(value, self, i) for i, value in enumerate(self.raw_elements()))

    def text(self, pattern: re.Pattern[str] | None = None) -> str:
        text = self._is(str, "a string")
        if pattern is not None and not pattern.fullmatch(text):
            raise self.fail(f"malformed: {_show(text)}")
        return text

    def digest(self) -> str:
        return self.text(_HEX)

    def choice(self, choices: tuple[str, ...]) -> str:
        text = self.value if type(self.value) is str else self._is(str, "a string")
        if text not in choices:
            raise self.fail(f"must be one of {', '.join(choices)}, but is {_show(text)}")
        return text

    def integer(self, low: int = 0, high: int = (1 << 63) - 1) -> int:
        number = self.value if type(self.value) is int else self._is(int, "an integer")
        if not low <= number <= high:
            raise self.fail(f"must be in {low} .. {high}, but is {number}")
        return number

    def integers(self, low: int = 0, high: int = (1 << 63) - 1, most: int | None = None) -> list[int]:
        """A list of integers, or the first of it: each as `integer`."""
        numbers: list[int] = self.raw_elements()[:most]
        for i, number in enumerate(numbers):
            if type(number) is not int or not low <= number <= high:
                Node(number, self, i).integer(low, high)
        return numbers

    def number(self) -> float:
        if type(self.value) not in (int, float):
            raise self.fail(f"must be a number, but is {_show(self.value)}")
        return float(self.value)

    def boolean(self) -> bool:
        return self._is(bool, "true or false")

    def optional(self, read: Callable[["Node"], T]) -> T | None:
        return None if self.value is None else read(self)

    def span(self) -> tuple[int, int]:
        ends = self.raw_elements()
        if len(ends) != 2:
            raise self.fail(f"must have 2 numbers, but has {len(ends)}")
        start, stop = self.integers()
        if start >= stop:
            raise self.fail(f"range [{start}, {stop}) is empty or reversed")
        return start, stop


def _show(value: JSON) -> str:
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse(obj: JSON) -> Manifest:
    """A manifest from plain JSON values, strictly.

    Raises:
        VersionError: a newer schema, or a required feature this version does not know.
        ManifestError: a field is missing, of the wrong type, out of range, or at odds with another.
        DigestError: the token ids do not match their digest.
    """
    root = Node(obj)
    schema = root.key("schema").integer(1)
    if schema > SCHEMA:
        raise VersionError(f"$.schema: {schema} is newer than {SCHEMA}, the newest this version reads", hint="upgrade kvtool")
    requires = tuple(entry.text() for entry in root.key("requires").elements())
    unknown = sorted(set(requires) - KNOWN_REQUIRES)
    if unknown:
        raise VersionError(f"$.requires: needs {', '.join(unknown)[:200]}, which this version does not have", hint="upgrade kvtool")
    tokens = root.key("tokens").optional(_tokens)
    length_node = root.key("length")
    length = length_node.integer()
    if tokens is not None and length > len(tokens.ids):
        raise length_node.fail(f"{length} usable tokens, but only {len(tokens.ids)} token ids")
    codecs = tuple(CodecInfo(c.key("id").text(), c.key("params").members()) for c in root.key("codecs").elements())
    ropes = tuple(_rope(node) for node in root.key("ropes").elements())
    layers = tuple(_cache(node, len(codecs), len(ropes), 0) for node in root.key("layers").elements())
    return Manifest(
        schema=schema,
        requires=requires,
        producer=root.key("producer").texts(),
        model=model_of(root.key("model")),
        tokens=tokens,
        length=length,
        codecs=codecs,
        ropes=ropes,
        layers=layers,
        quality=parse_quality(root.key("quality")),
        extra=root.key("extra").members(),
        layer_inputs=_layer_inputs(root, length, len(codecs), len(layers)) if "layer_inputs" in root.members() else (),
    )


def _tokens(node: Node) -> Tokens:
    ids_node = node.key("ids")
    ids = ids_node.value
    if not isinstance(ids, TokenIds):
        if not set(map(type, ids_node.raw_elements())) <= {int}:
            raise ids_node.fail("holds something other than integers")
        try:
            ids = TokenIds.of(ids)
        except ValueError:
            raise ids_node.fail(f"token ids must be in 0 .. 2**31 - 1, but are {min(ids)} .. {max(ids)}") from None
    recorded, digest = node.key("blake3").digest(), tokens_digest(ids)
    if digest != recorded:
        raise DigestError(f"{node.path}: the {len(ids)} token ids have digest {digest}, recorded is {recorded}")
    return Tokens(ids, recorded)


def _rope(node: Node) -> dict[str, JSON]:
    node.key("kind").text()
    dims_node = node.key("dims")
    dims = dims_node.integer(2)
    if dims % 2:
        raise dims_node.fail(f"must be even, but is {dims}")
    node.key("pairing").choice(PAIRINGS)
    base = node.key("base").optional(lambda n: n.number())
    node.key("scale").number()
    periods = node.key("periods").optional(lambda n: [p.optional(lambda q: q.number()) for p in n.elements()])
    node.key("magnitude").number()
    node.key("first").integer()
    if (base is None) == (periods is None):
        raise node.fail("needs exactly one of base and periods")
    if periods is not None and len(periods) != dims // 2:
        raise node.fail(f"has {len(periods)} periods for {dims} dims, must be {dims // 2}")
    return node.members()


def _layer_inputs(root: Node, length: int, codecs: int, layers: int) -> tuple[LayerInput, ...]:
    found: list[LayerInput] = []
    for node in root.key("layer_inputs").elements():
        at = node.key("layer")
        layer = at.integer(found[-1].layer + 1 if found else 0, max(layers - 1, 0))
        rows = _role(node.key("rows"), length, codecs, 0)
        found.append(LayerInput(layer, rows))
    return tuple(found)


def parse_quality(node: Node) -> tuple[dict[str, JSON], ...]:
    """The lossy steps of a manifest. Errors as `parse`."""
    for step in node.elements():
        step.key("step").text()
    return tuple(step.members() for step in node.elements())


def _cache(node: Node, codecs: int, ropes: int, depth: int) -> CacheInfo:
    if depth >= MAX_NESTING:
        raise node.fail(f"caches nested more than {MAX_NESTING} deep")
    positions = tuple(span.span() for span in node.key("positions").elements())
    rows = sum(stop - start for start, stop in positions)
    return CacheInfo(
        cls=node.key("cls").text(),
        attention=node.key("attention").choice(ATTENTION),
        window=node.key("window").optional(lambda n: n.integer(1)),
        offset=node.key("offset").integer(),
        positions=positions,
        k=node.key("k").optional(lambda n: _role(n, rows, codecs, ropes)),
        v=node.key("v").optional(lambda n: _role(n, rows, codecs, ropes)),
        arrays=tuple(child.optional(_state_array) for child in node.key("arrays").elements()),
        params=node.key("params").members(),
        caches=tuple(_cache(child, codecs, ropes, depth + 1) for child in node.key("caches").elements()),
    )


def _role(node: Node, rows: int, codecs: int, ropes: int) -> Role:
    segments = tuple(_segment(child, codecs) for child in node.key("segments").elements())
    expected = 0
    for i, segment in enumerate(segments):
        if segment.rows[0] != expected:
            raise node.fail(f"segments[{i}] starts at row {segment.rows[0]}, must start at {expected}")
        expected = segment.rows[1]
    if expected != rows:
        raise node.fail(f"segments end at row {expected}, but positions give {rows} rows")
    return Role(
        heads=node.key("heads").integer(0, 1 << 31),
        dim=node.key("dim").integer(0, 1 << 31),
        dtype=node.key("dtype").choice(CACHE_DTYPES),
        rope=node.key("rope").optional(lambda n: n.integer(0, ropes - 1) if ropes else _no_such(n, "rope")),
        segments=segments,
    )


def _no_such(node: Node, what: str) -> int:
    raise node.fail(f"there is no {what} {_show(node.value)}")


def _segment(node: Node, codecs: int) -> Segment:
    codec = node.key("codec")
    return Segment(
        rows=node.key("rows").span(),
        codec=codec.integer(0, codecs - 1) if codecs else _no_such(codec, "codec"),
        frame=node.key("frame").choice(FRAMES),
        tensors=node.key("tensors").texts(),
    )


def _state_array(node: Node) -> StateArray:
    return StateArray(
        dtype=node.key("dtype").choice(tuple(ITEM_BYTES)),
        shape=tuple(node.key("shape").integers()),
        tensor=node.key("tensor").text(),
    )
