"""Turn manifest entries and their tensors back into cache states, one (layer, role) at a time."""

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
import numpy as np

from formats.container import Reader
from formats.errors import IncompatibleError, KVError, ManifestError, counted
from formats.manifest import CacheInfo, CodecInfo, Role, Segment, StateArray
from kvtool.calibrations import KINDS, Shelf
from kvtool.encoding import DTYPE_NAMES, MLX_AFFINE, Positions, takes_dim
from kvtool.rope_limits import MAX_ROPE_DIMS, beyond_limits
from kvtool.segment_work import decode_blocks
from kvtool.states import CacheState, Quantized
from veloxquant_mlx.caches.blocks import CodedRows
from veloxquant_mlx.codecs import CODECS, Codec, token_blocks
from veloxquant_mlx.codecs._base import DTYPES, FLOAT16_MAX, fits
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.native.mapped import Mapped
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec, unrotated

FLOATS = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# mlx-lm class -> (kind of attention, parameters it cannot be built without).
CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "KVCache": ("full", ()),
    "ConcatenateKVCache": ("full", ()),
    "QuantizedKVCache": ("full", ("bits", "group_size")),
    "RotatingKVCache": ("sliding", ("max_size", "keep", "ring")),
    "ChunkedKVCache": ("chunked", ("chunk_size",)),
    "ArraysCache": ("state", ()),
    "CacheList": ("list", ()),
}
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
LEAST_MAPPED = 1 << 14  # bytes of a table below which sharing its pages is of no account


Span = tuple[int, int]


class Decoder:
    """Decodes the caches of one file, in any order; in the file's order each is decoded once.

    A codec may be predicted from other decoded rows: from this layer's keys, or from the layer before. Those are decoded first, and
    kept, before RoPE and in float32, until the layer that follows has been decoded: one layer's rows at a time.

    Args:
        reader: the file.
        shelf: where calibrations are found.
    """

    def __init__(self, reader: Reader, shelf: Shelf | None = None) -> None:
        self.reader = reader
        self.shelf = Shelf() if shelf is None else shelf
        self._leaves = dict(_named(reader.manifest.layers))
        self._order = {name: i for i, name in enumerate(self._leaves)}
        for given in reader.manifest.layer_inputs:
            rows = reader.manifest.length
            self._leaves[f"input.{given.layer}"] = CacheInfo("KVCache", "full", None, rows, ((0, rows),) if rows else (), v=given.rows)
        self._codecs: dict[int, Codec] = {}
        self._bare: dict[int, Codec] = {}
        self._kept: dict[tuple[str, str, Span], mx.array] = {}
        self._followed: set[str] | None = None
        self._ropes: dict[int, RopeSpec | None] = {}

    def cache(self, name: str) -> CacheState:
        """State of the cache "3", or "3.1" in a list, with K and V decoded (mlx-lm's own quantised triplets stay as they are).

        Raises:
            IntegrityError: a tensor's bytes do not match their digest.
            ManifestError: tensors that do not fit their codec, or a class without what it needs.
            IncompatibleError: a codec or cache class this version does not know, or a calibration that is not here.
        """
        info, path = self._leaves[name], self.reader.path
        check_class(path, info)
        k, v = self.role(name, "k"), self.role(name, "v")
        if isinstance(k, Quantized) != isinstance(v, Quantized):
            k, v = (x.dequantize() if isinstance(x, Quantized) else x for x in (k, v))
        for value in (k, v):
            stated = (info.params.get("bits"), info.params.get("group_size"))
            if isinstance(value, Quantized) and info.cls == "QuantizedKVCache" and (value.bits, value.group_size) != stated:
                raise ManifestError(f"{info.cls} of {stated} bits and group size holds {(value.bits, value.group_size)}", path=path)
        return CacheState(
            cls=info.cls,
            attention=info.attention,
            window=info.window,
            offset=info.offset,
            positions=info.positions,
            params=dict(info.params),
            k=k,
            v=v,
            arrays=tuple(None if a is None else decode_array(self.reader, a) for a in info.arrays),
            caches=tuple(self.cache(f"{name}.{i}") for i in range(len(info.caches))),
        )

    def role(self, name: str, role: str) -> mx.array | Quantized | None:
        """K or V of one cache: (H, S, D) as it stood in the live cache."""
        info = self._leaves[name]
        about = self._about(name, role)
        if about is None:
            return None
        check_role(self.reader.path, about)
        if len(about.segments) == 1 and self.reader.manifest.codecs[about.segments[0].codec].id == MLX_AFFINE:
            return _triplet(self.reader, about, about.segments[0])
        whole = self._joined(name, role, about.segments, Positions(info.positions))
        mx.clear_cache()
        return whole

    def layer_input(self, layer: int) -> mx.array:
        """What entered a layer, (S, E), where the file holds it. Errors as `role`."""
        rows = self.role(f"input.{layer}", "v")
        assert isinstance(rows, mx.array)
        return mx.swapaxes(rows, 0, 1).reshape(rows.shape[1], -1)

    def segment(self, name: str, role: str, segment: Segment, positions: Positions) -> mx.array:
        """Rows of one segment, (H, rows, D) in the role's dtype, as cached (RoPE applied where they were stored before it)."""
        return self._joined(name, role, (segment,), positions)

    def _joined(self, name: str, role: str, segments: Sequence[Segment], positions: Positions) -> mx.array:
        """Rows of adjacent segments, decoded into place block by block: joining decoded segments would hold the rows twice."""
        about = self._about(name, role)
        assert about is not None
        begin, end = segments[0].rows[0], segments[-1].rows[1]
        for segment in segments:
            self._check(about, segment)
        whole = None
        # The largest first: memory for all rows is taken only once a piece of it was read, whose bytes the file does have.
        for segment in sorted(segments, key=lambda s: s.rows[0] - s.rows[1]):
            for first, rows in self._pieces(name, role, segment, positions):
                if rows.shape[1] == end - begin:
                    return rows
                if whole is None:
                    whole = mx.zeros((about.heads, end - begin, about.dim), FLOATS[about.dtype])
                whole[:, first - begin : first - begin + rows.shape[1]] = rows
                mx.eval(whole)
        assert whole is not None
        return whole

    def _check(self, about: Role, segment: Segment) -> None:
        """Raise ManifestError unless a segment's tensors have the dtypes and shapes that its rows ask for; reads none of them."""
        if self.reader.manifest.codecs[segment.codec].id == MLX_AFFINE:
            _check_triplet(self.reader, about, segment)
        else:
            self._dtypes(about, segment)

    def _dtypes(self, about: Role, segment: Segment) -> dict[str, str]:
        """The stored dtype of each part of a segment, not of mlx-lm's own codes; else as `_check`."""
        codec = self.codec(segment.codec)
        if not takes_dim(codec, about.dim):
            raise ManifestError(f"codec {codec.id} does not take head_dim {about.dim}", path=self.reader.path)
        dtypes = part_dtypes(self.reader, segment, codec, (about.heads, segment.rows[1] - segment.rows[0], about.dim))
        # Exact rows of a float32 cache may take 16 bits; nothing else is narrower or wider than the cache.
        if isinstance(codec, Raw) and dtypes["data"] != about.dtype and (dtypes["data"], about.dtype) != ("F16", "F32"):
            raise ManifestError(f"rows of a {about.dtype} cache are stored as {dtypes['data']}", path=self.reader.path)
        self.rope(about, segment)
        return dtypes

    def _pieces(self, name: str, role: str, segment: Segment, positions: Positions) -> Iterator[tuple[int, mx.array]]:
        """(row they begin at, rows) of one segment, in order and evaluated."""
        about = self._about(name, role)
        assert about is not None
        dtype, (start, stop) = FLOATS[about.dtype], segment.rows
        if self.reader.manifest.codecs[segment.codec].id == MLX_AFFINE:
            yield start, _triplet(self.reader, about, segment).dequantize().astype(dtype)
            return
        codec, rope = self.codec(segment.codec), self.rope(about, segment)
        if isinstance(codec, Raw) and rope is None:
            shape = (about.heads, stop - start, about.dim)
            rows = codec.decode(read_parts(self.reader, segment, codec, shape), shape, dtype)
            mx.eval(rows)
            yield start, rows
            return
        at = positions.of(start, stop)
        for first, last, block in self._blocks(name, role, segment):
            if rope is not None:
                block = rotate(block, at[first:last], unrotated(rope), rope)
            # A value close to float16's end must not become Inf by the codec's error.
            rows = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(rows)
            yield start + first, rows

    def coded(self, name: str, role: str, segment: Segment, mapped: bool) -> CodedRows:
        """Rows of one segment as they are stored, for attention to read; not of an eager codec, nor of mlx-lm's own.

        Args:
            mapped: leave the parts in the mapped file; only of codecs that `maps`.

        Raises:
            IntegrityError, ManifestError, IncompatibleError: as `role`.
        """
        about = self._about(name, role)
        assert about is not None
        dtypes = self._dtypes(about, segment)
        codec, shape = self.codec(segment.codec), (about.heads, segment.rows[1] - segment.rows[0], about.dim)
        parts: dict[str, mx.array | Mapped] = {}
        for part, dtype in dtypes.items():
            array = self.reader.array(segment.tensors[part])
            # Of a codec that learns tables from its rows, these are arrays: they are few, and more than rows are made of them.
            stays = mapped and (codec.grows or array.nbytes >= LEAST_MAPPED)
            parts[part] = Mapped(array, DTYPES[dtype], self.reader.path) if stays else to_mlx(array, dtype)
        rows = CodedRows(codec, parts, shape, FLOATS[about.dtype], self.rope(about, segment))
        if mapped and codec.grows:
            return rows
        # Tables that no rows can be read with are found here, not in the middle of a generation.
        try:
            if shape[1] and not codec.needs and not codec.maps:
                mx.eval(rows.reader.tile(0, 1).points)
            else:
                rows.reader  # noqa: B018
        except ManifestError as error:
            error.path = error.path or self.reader.path
            raise
        # After the reader, whose arrays come from the same ones: MLX's thread is waited for once.
        mx.eval([part for part in parts.values() if isinstance(part, mx.array)])
        return rows

    def coded_tensors(self, name: str) -> list[str]:
        """Tensors that `coded` reads for a cache, in the order in which a load asks for them."""
        roles = (self._about(name, role) for role in "kv")
        return [tensor for about in roles if about is not None for segment in about.segments for tensor in segment.tensors.values()]

    def codec(self, index: int) -> Codec:
        """The codec at an index of the file's table, with its tables.

        Raises:
            IncompatibleError: not known, or its calibration is not here.
            ManifestError: parameters that are not valid, or do not fit the calibration.
        """
        if index not in self._codecs:
            codec, path = self._without_tables(index), self.reader.path
            if codec.calibration is not None:
                try:
                    codec = self.shelf.complete(codec, self.reader.manifest.model.name)
                except ValueError as error:
                    raise ManifestError(f"codec {codec.id!r} does not fit calibration {codec.calibration}: {error}", path=path) from error
                except KVError as error:
                    error.path = error.path or path
                    raise
            self._codecs[index] = codec
        return self._codecs[index]

    def _without_tables(self, index: int) -> Codec:
        if index not in self._bare:
            self._bare[index] = codec_of(self.reader.path, self.reader.manifest.codecs[index])
        return self._bare[index]

    def _calibrated(self, name: str, roles: str = "kv") -> Iterator[tuple[Segment, Codec]]:
        """The segments of a cache's calibrated codecs, which alone are predicted from others, with these codecs but for their tables."""
        for about in (self._about(name, role) for role in roles):
            for segment in () if about is None else about.segments:
                if self.reader.manifest.codecs[segment.codec].id in KINDS:
                    yield segment, self._without_tables(segment.codec)

    def _about(self, name: str, role: str) -> Role | None:
        return self._leaves[name].k if role == "k" else self._leaves[name].v

    def rope(self, about: Role, segment: Segment) -> RopeSpec | None:
        """The rotation to apply to a segment's decoded rows, or None.

        Raises:
            ManifestError: rows are stored before a RoPE that the file does not have.
        """
        if segment.frame != "pre":
            return None
        if about.rope is not None and about.rope not in self._ropes:
            self._ropes[about.rope] = rope_of(self.reader, about.rope)
        rope = None if about.rope is None else self._ropes[about.rope]
        if rope is None or rope.first + rope.dims > about.dim:
            what = "no RoPE" if rope is None else f"RoPE on entries {rope.first} to {rope.first + rope.dims}"
            raise ManifestError(f"rows are stored before RoPE, but the file has {what} for head_dim {about.dim}", path=self.reader.path)
        return rope

    def _blocks(self, name: str, role: str, segment: Segment) -> Iterator[tuple[int, int, mx.array]]:
        """(start, stop, float32 rows as they were coded) of a segment, kept where others are predicted from them."""
        about = self._about(name, role)
        assert about is not None
        key, shape = (name, role, segment.rows), (about.heads, segment.rows[1] - segment.rows[0], about.dim)
        if key in self._kept:
            rows = self._kept[key]
            yield from ((tokens.start, tokens.stop, rows[:, tokens]) for tokens in token_blocks(shape))
            return
        self._check(about, segment)
        codec = self.codec(segment.codec)
        given = self._given(name, role, codec, segment.rows)
        parts = read_parts(self.reader, segment, codec, shape)
        keep = mx.zeros(shape, mx.float32) if self._is_needed(name, role, segment.rows) else None
        if keep is not None and segment.frame == "post" and about.rope is not None:
            raise ManifestError(f"rows of {name}.{role}, that others are predicted from, are stored after RoPE", path=self.reader.path)
        try:
            for first, last, block in decode_blocks(codec, parts, shape, given):
                if keep is not None:
                    keep[:, first:last] = block
                    mx.eval(keep)
                yield first, last, block
        except ValueError as error:
            if not codec.needs:
                raise
            raise ManifestError(f"{name}.{role} cannot be predicted: {error}", path=self.reader.path) from error
        if keep is not None:
            self._keep(key, keep)

    def _keep(self, key: tuple[str, str, Span], rows: mx.array) -> None:
        """Hold decoded rows, and let go of those of layers that neither these nor the next layer's are predicted from."""
        before = self._after(key[0])
        self._kept = {k: kept for k, kept in self._kept.items() if k[0] in (key[0], before)}
        self._kept[key] = rows

    def _is_needed(self, name: str, role: str, span: Span) -> bool:
        """Whether other rows are predicted from a segment's. No tables are looked for: that one is missing is no matter of other layers."""
        if self._followed is None:
            self._followed = {after for leaf in self._order if (after := self._after(leaf)) is not None}
        own = role == "k" and any("k" in codec.needs for segment, codec in self._calibrated(name, "v") if segment.rows == span)
        return own or name in self._followed

    def _after(self, name: str) -> str | None:
        """The layer that a layer's rows are predicted from, or None.

        Raises:
            ManifestError: not one layer, or none that comes before.
        """
        after = {codec.after for _, codec in self._calibrated(name) if codec.after is not None}
        if len(after) > 1 or any(self._order.get(a, len(self._order)) >= self._order.get(name, 0) for a in after):
            what = f"layer {name} is predicted from {', '.join(map(repr, sorted(after)))}, not from one layer before it"
            raise ManifestError(what[:200], path=self.reader.path)
        return next(iter(after), None)

    def _given(self, name: str, role: str, codec: Codec, span: Span) -> dict[str, mx.array] | None:
        """What the rows of a segment are predicted from, decoding what is not there, from the first layer that is missing on."""
        if not codec.needs:
            return None
        before, wanted = self._after(name), {"k": (name, "k")}
        if before is not None:
            wanted |= {"k-": (before, "k"), "v-": (before, "v")}
        chain: list[str] = []
        while before is not None and any((before, r, span) not in self._kept for r in "kv"):
            chain.append(before)
            before = self._after(before)
        for layer in reversed(chain):
            for r in "kv":
                self._decode_whole(layer, r, span)
        if "k" in codec.needs and (name, "k", span) not in self._kept:
            self._decode_whole(name, "k", span)
        missing = [need for need in codec.needs if need not in wanted]
        if missing:
            raise ManifestError(f"{name}.{role} is predicted from {missing[0]!r}, but names no layer before it", path=self.reader.path)
        return {need: self._kept[(*wanted[need], span)] for need in codec.needs}

    def _decode_whole(self, name: str, role: str, span: Span) -> None:
        """Bring a segment's rows into `_kept`."""
        about = self._about(name, role)
        segment = None if about is None else next((s for s in about.segments if s.rows == span), None)
        if about is None or segment is None or self.reader.manifest.codecs[segment.codec].id == MLX_AFFINE:
            what = f"rows {span[0]} to {span[1]} of {name}.{role}, that others are predicted from, are not one coded segment"
            raise ManifestError(what, path=self.reader.path)
        for _ in self._blocks(name, role, segment):
            pass


def _named(layers: Sequence[CacheInfo], prefix: str = "") -> Iterator[tuple[str, CacheInfo]]:
    """Every cache by its name, "3" or "3.1", in the file's order."""
    for i, info in enumerate(layers):
        yield f"{prefix}{i}", info
        yield from _named(info.caches, f"{prefix}{i}.")


def check_class(path: str, info: CacheInfo) -> None:
    """Raise IncompatibleError for a cache class that is not known, ManifestError where its attention or parameters do not fit it."""
    if info.cls not in CLASSES:
        raise IncompatibleError(f"cache class {info.cls} is not known (known: {', '.join(CLASSES)})", path=path, hint="update kvtool")
    attention, params = CLASSES[info.cls]
    if info.attention != attention:
        raise ManifestError(f"{info.cls} holds {attention} attention, but the file says {info.attention}", path=path)
    for name in params:
        value = info.params.get(name)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ManifestError(f"{info.cls} needs {name} as an integer in 0 .. 2**31 - 1, but it is {value!r:.40}", path=path)


def decode_array(reader: Reader, array: StateArray) -> mx.array:
    """A recurrent state array, as it was."""
    tensor = reader.tensors[array.tensor]
    if (tensor.dtype, tuple(tensor.shape)) != (array.dtype, tuple(array.shape)):
        raise ManifestError(
            f"tensor {tensor.name} is {tensor.dtype} {tuple(tensor.shape)}, but the state is {array.dtype} {tuple(array.shape)}",
            path=reader.path,
        )
    return to_mlx(reader.array(tensor.name), array.dtype)


def check_role(path: str, role: Role) -> None:
    """Raise ManifestError for keys or values that are no MLX array: no heads, no rows (an empty cache has no role), or too many."""
    rows = role.segments[-1].rows[1] if role.segments else 0
    if role.heads < 1 or not 1 <= rows < 1 << 31:
        raise ManifestError(f"keys or values of {role.heads} heads and {counted(rows, 'row')}", path=path)


def rope_of(reader: Reader, index: int | None) -> RopeSpec | None:
    """The rotation at an index of the file's table, or None."""
    if index is None:
        return None
    dims = reader.manifest.ropes[index]["dims"]
    if dims > MAX_ROPE_DIMS:
        raise ManifestError(f"ropes[{index}] rotates {dims} entries, more than {MAX_ROPE_DIMS}", path=reader.path)
    try:
        rope = RopeSpec.from_json(reader.manifest.ropes[index])
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ManifestError(f"ropes[{index}] is not valid: {error}", path=reader.path) from error
    problem = beyond_limits(rope)
    if problem is not None:
        raise ManifestError(f"ropes[{index}] {problem}", path=reader.path)
    return rope


def codec_of(path: str, info: CodecInfo) -> Codec:
    """The codec a manifest names, with its parameters."""
    if info.id not in CODECS:
        raise IncompatibleError(
            f"codec {info.id!r} is not known to this version (it has {', '.join(sorted(CODECS))})", path=path, hint="update kvtool"
        )
    try:
        return CODECS[info.id].from_params(dict(info.params))
    except ManifestError as error:
        error.path = error.path or path
        raise
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ManifestError(f"parameters of codec {info.id!r} are not valid: {error}", path=path) from error


def read_parts(reader: Reader, segment: Segment, codec: Codec, shape: tuple[int, int, int]) -> dict[str, mx.array]:
    """The tensors of a segment as MLX arrays, checked against what the codec lays out."""
    return {part: to_mlx(reader.array(segment.tensors[part]), dtype) for part, dtype in part_dtypes(reader, segment, codec, shape).items()}


def part_dtypes(reader: Reader, segment: Segment, codec: Codec, shape: tuple[int, int, int]) -> dict[str, str]:
    """The stored dtype of each part of a segment, after checking names, dtypes and shapes against what the codec lays out."""
    exact = reader.tensors[segment.tensors["data"]].dtype if "data" in segment.tensors else None
    wanted: Mapping[str, tuple[str, tuple[int, ...]]] = codec.layout(shape, FLOATS.get(exact or "F32", mx.float32))
    if set(wanted) != set(segment.tensors):
        raise ManifestError(
            f"codec {codec.id} needs parts {sorted(wanted)}, but the segment names {sorted(segment.tensors)}"[:200], path=reader.path
        )
    for part, (dtype, part_shape) in wanted.items():
        tensor = reader.tensors[segment.tensors[part]]
        if tensor.dtype != dtype or not fits(tuple(tensor.shape), tuple(part_shape)):
            raise ManifestError(
                f"tensor {tensor.name} is {tensor.dtype} {tuple(tensor.shape)}, but codec {codec.id} needs {dtype} {tuple(part_shape)}",
                path=reader.path,
            )
    return {part: dtype for part, (dtype, _) in wanted.items()}


def _check_triplet(reader: Reader, role: Role, segment: Segment) -> None:
    """Raise ManifestError unless a segment's tensors are an mlx affine triplet of its rows."""
    bits, group = _affine_params(reader, role, segment)
    rows = segment.rows[1] - segment.rows[0]
    groups = (role.heads, rows, role.dim // group)
    for part, shape in (("weight", (role.heads, rows, role.dim * bits // 32)), ("scales", groups), ("biases", groups)):
        name = segment.tensors.get(part)
        dtype = "U32" if part == "weight" else role.dtype
        if name is None or (reader.tensors[name].dtype, tuple(reader.tensors[name].shape)) != (dtype, shape):
            raise ManifestError(f"{MLX_AFFINE} needs {part} as {dtype} {shape}, found {name and reader.tensors[name]}", path=reader.path)


def _affine_params(reader: Reader, role: Role, segment: Segment) -> tuple[int, int]:
    """Bits and group size of an mlx affine triplet."""
    params = reader.manifest.codecs[segment.codec].params
    bits, group = params.get("bits"), params.get("group_size")
    if type(bits) is not int or type(group) is not int or bits not in AFFINE_BITS or group not in (32, 64, 128) or role.dim % group:
        raise ManifestError(
            f"{MLX_AFFINE} with bits {bits!r:.40}, group_size {group!r:.40} does not fit head_dim {role.dim}", path=reader.path
        )
    return bits, group


def _triplet(reader: Reader, role: Role, segment: Segment) -> Quantized:
    _check_triplet(reader, role, segment)
    bits, group = _affine_params(reader, role, segment)
    arrays = {part: to_mlx(reader.array(segment.tensors[part]), role.dtype) for part in ("scales", "biases")}
    return Quantized(bits=bits, group_size=group, weight=to_mlx(reader.array(segment.tensors["weight"]), "U32"), **arrays)


def to_mlx(array: np.ndarray, dtype: str) -> mx.array:
    """An MLX array (a copy) of a container tensor; bfloat16 arrives as uint16."""
    value = mx.array(array)
    if dtype == "BF16":
        value = value.view(mx.bfloat16)
    return value
