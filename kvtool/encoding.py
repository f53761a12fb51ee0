"""Turn cache layers into manifest entries and the tensors to write, one (layer, role) in memory at a time.

Rows of a role are split into segments: the first `sink` positions and the newest `recent` rows are kept exact, the rest goes through
the codec, before RoPE (frame `pre`) or as cached (frame `post`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from formats.container import TensorPlan
from formats.manifest import CacheInfo, CodecInfo, LayerInput, Role, Segment, StateArray
from kvtool.probe import CacheProbe, RoleProbe
from kvtool.rope_limits import beyond_limits
from kvtool.segment_work import SegmentWork, Tally, to_numpy
from kvtool.states import CacheState, Quantized
from veloxquant_mlx.codecs import Codec, CodecPlan, parse_codec
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.transfer.rope_spec import RopeSpec

# mlx-lm's own quantised caches are kept verbatim under this id: parts weight, scales, biases.
MLX_AFFINE = "mlx-affine"
DTYPE_NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}
ARRAY_NAMES = {
    **DTYPE_NAMES,
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}
# Of what entered a layer. SmolLM2, layers 3, 9, 15: six layers run on it give logits at most 1e-4 nats from those of the exact vectors.
INPUT_CODEC = parse_codec("rvq-8").v
# Largest head_dim that goes through a lossy codec: its rotation takes (odd part of head_dim)^2 values.
MAX_CODED_DIM = 4096


class Positions:
    """Positions of a cache's rows, from its [start, stop) ranges in row order. A row is looked up in the logarithm of their number."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = ranges
        self._starts = np.array([a for a, _ in ranges], np.int64)
        # Row at which each range begins, and the number of rows.
        self._rows = np.array([0, *accumulate(b - a for a, b in ranges)], np.int64)

    def of(self, start: int, stop: int) -> np.ndarray:
        """Positions (int64) of rows start to stop."""
        rows = np.arange(start, min(stop, self._rows[-1]), dtype=np.int64)
        at = np.searchsorted(self._rows, rows, side="right") - 1
        return self._starts[at] + rows - self._rows[at]


@dataclass(frozen=True)
class RoleSource:
    """Where one role's rows come from.

    Attributes:
        shape: (H, S, D).
        dtype: of the live cache.
        rope: rotation of the cached rows, or None.
        problem: why the rotation is not known, or None.
        fetch: gives the (H, S, D) array; called once per lossy or raw encoding of the role.
        verbatim: an mlx affine triplet to keep as it is, or None.
    """

    shape: tuple[int, int, int]
    dtype: mx.Dtype
    rope: RopeSpec | None
    problem: str | None
    fetch: Callable[[], mx.array]
    verbatim: Quantized | None = None


@dataclass
class Encoder:
    """Collects what a file will hold: codec and RoPE tables, tensors, and the error of each lossy role.

    Attributes:
        plan: codec of each role, exact rows, frame.
        measure: decode each segment again and record its error.
        bound: (layer, role) -> the codec to use instead, where those of the plan are calibrated (`kvtool.binding`). Caches come in order.
    """

    plan: CodecPlan
    measure: bool = True
    bound: Mapping[tuple[str, str], Codec] = field(default_factory=dict)
    predictors: "Predictors" = field(init=False)
    codecs: list[CodecInfo] = field(default_factory=list)
    ropes: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[TensorPlan] = field(default_factory=list)
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    kept_raw: list[str] = field(default_factory=list)
    kept_post: list[str] = field(default_factory=list)
    requantised: list[str] = field(default_factory=list)
    rope_problems: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.predictors = Predictors(self.bound)

    def layer(self, name: str, state: CacheState, probe: CacheProbe) -> CacheInfo:
        """Manifest entry of one cache; its tensors join `self.tensors`."""
        caches = tuple(self.layer(f"{name}.{i}", s, p) for i, (s, p) in enumerate(zip(state.caches, probe.caches, strict=True)))
        k = self.role(f"{name}.k", "k", source_of(state.k, probe.k), state.positions)
        v = self.role(f"{name}.v", "v", source_of(state.v, probe.v), state.positions)
        arrays = tuple(None if a is None else self.array(f"{name}.state.{i}", a) for i, a in enumerate(state.arrays))
        if state.arrays and not self.lossless:
            self.kept_raw.append(f"{name}: recurrent state")
        if probe.state_problem is not None:
            self.rope_problems[f"{name}.state"] = probe.state_problem
        info = CacheInfo(
            cls=state.cls,
            attention=state.attention,
            window=state.window,
            offset=state.offset,
            positions=state.positions,
            k=k,
            v=v,
            arrays=arrays,
            params=dict(state.params),
            caches=caches,
        )
        return self.live_class(info)

    def layer_input(self, layer: int, rows: mx.array) -> LayerInput:
        """Manifest entry of what entered a layer, (S, E); its tensors join `self.tensors`."""
        count, width = rows.shape
        heads = next(n for n in range(1, width + 1) if width % n == 0 and width // n <= MAX_CODED_DIM)
        dim = width // heads
        work = SegmentWork(
            fetch=lambda: mx.swapaxes(rows.reshape(count, heads, dim), 0, 1),
            shape=(heads, count, dim),
            positions=lambda: np.arange(count),
            rope=None,
            codec=INPUT_CODEC if takes_dim(INPUT_CODEC, dim) else Raw(),
            frame="post",
            dtype=rows.dtype,
        )
        segment = self.segment(f"input.{layer}.x.0", (0, count), work)
        return LayerInput(layer, Role(heads=heads, dim=dim, dtype=DTYPE_NAMES[rows.dtype], rope=None, segments=(segment,)))

    def live_class(self, info: CacheInfo) -> CacheInfo:
        """The entry with the class that can hold what is decoded: no QuantizedKVCache unless K and V are still mlx's triplets."""
        if info.cls != "QuantizedKVCache" or all(role is None or self._is_verbatim(role) for role in (info.k, info.v)):
            return info
        return replace(info, cls="KVCache", params={k: v for k, v in info.params.items() if k not in ("bits", "group_size")})

    def _is_verbatim(self, role: Role) -> bool:
        return len(role.segments) == 1 and self.codecs[role.segments[0].codec].id == MLX_AFFINE

    @property
    def lossless(self) -> bool:
        return self.plan.lossless

    def array(self, name: str, value: mx.array) -> StateArray:
        self.tensors.append(TensorPlan(name, ARRAY_NAMES[value.dtype], tuple(value.shape), lambda: to_numpy(value)))
        return StateArray(dtype=ARRAY_NAMES[value.dtype], shape=tuple(value.shape), tensor=name)

    def role(self, name: str, role: str, source: RoleSource | None, positions: Sequence[tuple[int, int]]) -> Role | None:
        """Manifest entry of K or V of one cache."""
        if source is None:
            return None
        heads, rows, dim = source.shape
        rope = None if source.rope is None else self.rope(source.rope)
        if source.problem is not None:
            self.rope_problems[name] = source.problem
        codec = self.bound.get((name.rpartition(".")[0], role), self.plan.k if role == "k" else self.plan.v)
        if not takes_dim(codec, dim):
            self.kept_raw.append(f"{name}: head_dim {dim}")
            codec = Raw()
        if source.rope is not None:
            codec = codec.for_rotary(source.rope.first, source.rope.dims, dim)
        if source.verbatim is not None and not isinstance(codec, Raw):
            self.requantised.append(name)
        if source.verbatim is not None and isinstance(codec, Raw):
            segments: tuple[Segment, ...] = (self._verbatim(name, source.verbatim, rows),) if rows else ()
        else:
            segments = tuple(self._segments(name, role, source, codec, positions))
        return Role(heads=heads, dim=dim, dtype=DTYPE_NAMES[source.dtype], rope=rope, segments=segments)

    def rope(self, spec: RopeSpec) -> int:
        problem = beyond_limits(spec)
        if problem is not None:
            raise ValueError(f"[save] the file could not be read again: its RoPE {problem}.")
        entry = spec.to_json()
        if entry not in self.ropes:
            self.ropes.append(entry)
        return self.ropes.index(entry)

    def codec(self, info: CodecInfo) -> int:
        if info not in self.codecs:
            self.codecs.append(info)
        return self.codecs.index(info)

    def _verbatim(self, name: str, value: Quantized, rows: int) -> Segment:
        parts = {"weight": value.weight, "scales": value.scales, "biases": value.biases}
        for part, array in parts.items():
            self.array(f"{name}.0.{part}", array)
        index = self.codec(CodecInfo(MLX_AFFINE, {"bits": value.bits, "group_size": value.group_size}))
        return Segment(rows=(0, rows), codec=index, frame="post", tensors={p: f"{name}.0.{p}" for p in parts})

    def _segments(self, name: str, role: str, source: RoleSource, codec: Codec, positions: Sequence[tuple[int, int]]) -> Iterator[Segment]:
        heads, rows, dim = source.shape
        raw = Raw()
        cuts = [(0, rows, codec)] if isinstance(codec, Raw) else split_rows(positions, rows, self.plan.sink, self.plan.recent, codec, raw)
        shared, at = _RoleRows(source, len(cuts)), Positions(positions)
        for index, (start, stop, chosen) in enumerate(cuts):
            # Exact rows of a lossy file of a float32 cache take 16 bits.
            narrow = chosen is raw and source.dtype == mx.float32
            work = SegmentWork(
                fetch=shared.rows(start, stop),
                shape=(heads, stop - start, dim),
                positions=partial(at.of, start, stop),
                rope=source.rope,
                codec=chosen,
                frame=self._frame(name, role, source, chosen),
                dtype=mx.float16 if narrow else source.dtype,
            )
            yield self.segment(f"{name}.{index}", (start, stop), work)

    def segment(self, name: str, rows: tuple[int, int], work: "SegmentWork") -> Segment:
        """Manifest entry of one segment; its tensors join `self.tensors`, encoded when they are written."""
        layer, role, _ = name.rsplit(".", 2)
        if self.measure and not isinstance(work.codec, Raw):
            work.tally = self.tallies.setdefault((layer, role), Tally())
        self.predictors.join(layer, role, rows, work)
        layout = work.codec.layout(work.shape, work.dtype)
        if work.codec.eager:
            # Its sizes are known only now; all layers' codes are in memory until they are written.
            layout = {part: (dtype, work.encoded()[part].shape) for part, (dtype, _) in layout.items()}
        tensors = {}
        for part, (dtype, shape) in layout.items():
            tensors[part] = f"{name}.{part}"
            # Codes that attention can read where the file is mapped are not compressed, which would save a few per cent of them.
            compress = isinstance(work.codec, Raw) or not work.codec.maps
            self.tensors.append(TensorPlan(tensors[part], dtype, shape, partial(work.give, part), compress))
        return Segment(rows=rows, codec=self.codec(CodecInfo(work.codec.id, work.codec.to_params())), frame=work.frame, tensors=tensors)

    def _frame(self, name: str, role: str, source: RoleSource, codec: Codec) -> str:
        if isinstance(codec, Raw) or (source.rope is None and source.problem is None):
            return "post"
        bound = (name.rpartition(".")[0], role) in self.bound
        frame = "pre" if bound and role == "k" else self.plan.frame or codec.default_frame("k" if role == "k" else "v")
        if frame == "pre" and source.rope is None:
            self.kept_post.append(f"{name}: {source.problem}")
            return "post"
        return frame


class Predictors:
    """Decoded rows that later codecs are predicted from: before RoPE, kept from their encoding until the last codec that takes them.

    Args:
        bound: (layer, role) -> codec.
    """

    def __init__(self, bound: Mapping[tuple[str, str], Codec]) -> None:
        self.users = Counter(source for (layer, _), codec in bound.items() for source in sources_of(layer, codec).values())
        self.kept: dict[tuple[str, str], tuple[int, mx.array]] = {}
        self.works: dict[tuple[str, str], SegmentWork] = {}

    def join(self, layer: str, role: str, rows: tuple[int, int], work: "SegmentWork") -> None:
        """Let a coded segment take what it is predicted from, and keep its own decoded rows where others need them."""
        if work.codec.needs:
            work.given = partial(self._take, layer, work.codec)
        if self.users[layer, role] and not isinstance(work.codec, Raw):
            work.keep = partial(self.put, layer, role)
            self.works[layer, role] = work

    def put(self, layer: str, role: str, decoded: mx.array) -> None:
        self.kept[layer, role] = (self.users[layer, role], decoded)

    def _take(self, layer: str, codec: Codec) -> dict[str, mx.array]:
        given = {}
        for need, source in sources_of(layer, codec).items():
            # An eager codec may be predicted from rows that are not yet written.
            self.works[source].encoded()
            users, given[need] = self.kept.pop(source)
            if users > 1:
                self.kept[source] = (users - 1, given[need])
            else:
                del self.works[source]
        return given


def sources_of(layer: str, codec: Codec) -> dict[str, tuple[str, str]]:
    """Each of a bound codec's `needs` -> the (layer, role) that it means."""
    return {need: (layer if need == "k" else str(codec.after), need[0]) for need in codec.needs}


class _RoleRows:
    """A role's array, fetched when its first segment is encoded and dropped after its last."""

    def __init__(self, source: RoleSource, users: int) -> None:
        self.source = source
        self.users = users
        self.array: mx.array | None = None

    def rows(self, start: int, stop: int) -> Callable[[], mx.array]:
        return lambda: self._take()[:, start:stop]

    def _take(self) -> mx.array:
        array = self.source.fetch() if self.array is None else self.array
        self.users -= 1
        self.array = array if self.users else None
        return array


def codec_plan(codec: str | CodecPlan, sink: int | None = None, recent: int | None = None, frame: str | None = None) -> CodecPlan:
    """The codec plan of a spec string, with exact rows and frame overridden where given.

    Raises:
        ValueError: unknown codec, negative counts, unknown frame.
    """
    if not isinstance(codec, str | CodecPlan):
        raise TypeError(f"[codec_plan] codec must be a spec string or a CodecPlan, but got {type(codec).__name__}.")
    plan = parse_codec(codec) if isinstance(codec, str) else codec
    changes: dict[str, Any] = {k: v for k, v in (("sink", sink), ("recent", recent), ("frame", frame)) if v is not None}
    for key in ("sink", "recent"):
        if changes.get(key, 0) < 0:
            raise ValueError(f"[save] {key} must be at least 0, but got {changes[key]}.")
    if frame not in (None, "pre", "post"):
        raise ValueError(f"[save] frame must be 'pre' or 'post', but got {frame!r}.")
    return replace(plan, **changes)


def split_rows(
    positions: Sequence[tuple[int, int]], rows: int, sink: int, recent: int, codec: Codec, exact: Codec
) -> list[tuple[int, int, Codec]]:
    """Cut [0, rows) into exact sinks (rows of position < sink), coded rows and exact newest rows; empty pieces are left out."""
    first = min(rows, sum(max(0, min(b, sink) - a) for a, b in positions))
    last = max(first, rows - recent)
    cuts = [(0, first, exact), (first, last, codec), (last, rows, exact)]
    return [cut for cut in cuts if cut[1] > cut[0]]


def takes_dim(codec: Codec, dim: int) -> bool:
    """Whether a codec can store this head_dim; what it cannot take is kept raw."""
    return isinstance(codec, Raw) or (dim % 2 == 0 and 0 < dim <= MAX_CODED_DIM and codec.takes(dim))


def source_of(value: mx.array | Quantized | None, probe: RoleProbe | None) -> RoleSource | None:
    """A role of a live cache as something to encode."""
    if value is None or probe is None:
        return None
    if isinstance(value, Quantized):
        quantized = value
        return RoleSource(value.shape, value.dtype, probe.rope, probe.rope_problem, quantized.dequantize, quantized)
    array = value
    heads, rows, dim = value.shape
    return RoleSource((heads, rows, dim), value.dtype, probe.rope, probe.rope_problem, lambda: array)
