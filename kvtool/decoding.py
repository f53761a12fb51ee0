"""Turn manifest entries and their tensors back into cache states, one (layer, role) at a time."""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from formats.container import Reader
from formats.errors import IncompatibleError, ManifestError
from formats.manifest import CacheInfo, CodecInfo, Role, Segment, StateArray
from kvtool.encoding import DTYPE_NAMES, FLOAT16_MAX, MLX_AFFINE, Positions, decode_blocks, takes_dim, unrotated
from kvtool.rope_limits import MAX_ROPE_DIMS, beyond_limits
from kvtool.states import CacheState, Quantized
from veloxquant_mlx.codecs import CODECS, Codec
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.transfer.rope import RopeSpec, rotate

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


def decode_cache(reader: Reader, info: CacheInfo) -> CacheState:
    """A cache's state with K and V decoded (mlx-lm's own quantised triplets stay as they are).

    Raises:
        IntegrityError: a tensor's bytes do not match their digest.
        ManifestError: tensors that do not fit their codec, or a class without what it needs.
        IncompatibleError: a codec or cache class this version does not know.
    """
    check_class(reader.path, info)
    k = decode_role(reader, info.k, info.positions)
    v = decode_role(reader, info.v, info.positions)
    if isinstance(k, Quantized) != isinstance(v, Quantized):
        k, v = (x.dequantize() if isinstance(x, Quantized) else x for x in (k, v))
    for value in (k, v):
        stated = (info.params.get("bits"), info.params.get("group_size"))
        if isinstance(value, Quantized) and info.cls == "QuantizedKVCache" and (value.bits, value.group_size) != stated:
            raise ManifestError(f"{info.cls} of {stated} bits and group size holds {(value.bits, value.group_size)}", path=reader.path)
    return CacheState(
        cls=info.cls,
        attention=info.attention,
        window=info.window,
        offset=info.offset,
        positions=info.positions,
        params=dict(info.params),
        k=k,
        v=v,
        arrays=tuple(None if a is None else decode_array(reader, a) for a in info.arrays),
        caches=tuple(decode_cache(reader, c) for c in info.caches),
    )


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


def decode_role(reader: Reader, role: Role | None, positions: Sequence[tuple[int, int]]) -> mx.array | Quantized | None:
    """K or V of one cache: (H, S, D) as it stood in the live cache."""
    if role is None:
        return None
    check_role(reader.path, role)
    if len(role.segments) == 1 and reader.manifest.codecs[role.segments[0].codec].id == MLX_AFFINE:
        return _triplet(reader, role, role.segments[0])
    at = Positions(positions)
    pieces = [decode_segment(reader, role, segment, at) for segment in role.segments]
    whole = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
    mx.eval(whole)
    del pieces
    mx.clear_cache()
    return whole


def check_role(path: str, role: Role) -> None:
    """Raise ManifestError for keys or values that are no MLX array: no heads, no rows (an empty cache has no role), or too many."""
    rows = role.segments[-1].rows[1] if role.segments else 0
    if role.heads < 1 or not 1 <= rows < 1 << 31:
        raise ManifestError(f"keys or values of {role.heads} heads and {rows} rows", path=path)


def decode_segment(reader: Reader, role: Role, segment: Segment, positions: Positions) -> mx.array:
    """Rows of one segment, (H, rows, D) in the role's dtype, as cached (RoPE applied where they were stored before it)."""
    dtype = FLOATS[role.dtype]
    start, stop = segment.rows
    shape = (role.heads, stop - start, role.dim)
    info = reader.manifest.codecs[segment.codec]
    if info.id == MLX_AFFINE:
        return _triplet(reader, role, segment).dequantize().astype(dtype)
    codec = codec_of(reader.path, info)
    if not takes_dim(codec, role.dim):
        raise ManifestError(f"codec {codec.id} does not take head_dim {role.dim}", path=reader.path)
    if isinstance(codec, Raw):
        stored = part_dtypes(reader, segment, codec, shape)["data"]
        # Exact rows of a float32 cache may take 16 bits; nothing else is narrower or wider than the cache.
        if stored != role.dtype and (stored, role.dtype) != ("F16", "F32"):
            raise ManifestError(f"rows of a {role.dtype} cache are stored as {stored}", path=reader.path)
    rope = None
    if segment.frame == "pre":
        rope = rope_of(reader, role.rope)
        if rope is None or rope.first + rope.dims > role.dim:
            what = "no RoPE" if rope is None else f"RoPE on entries {rope.first} to {rope.first + rope.dims}"
            raise ManifestError(f"rows are stored before RoPE, but the file has {what} for head_dim {role.dim}", path=reader.path)
    parts = read_parts(reader, segment, codec, shape)
    if isinstance(codec, Raw) and rope is None:
        rows = codec.decode(parts, shape, dtype)
        mx.eval(rows)
        return rows
    at = positions.of(start, stop)
    rows = mx.zeros(shape, dtype)
    for first, last, block in decode_blocks(codec, parts, shape):
        if rope is not None:
            block = rotate(block, at[first:last], unrotated(rope), rope)
        # A value close to float16's end must not become Inf by the codec's error.
        rows[:, first:last] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
        mx.eval(rows)
    return rows


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
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(part_shape)):
            raise ManifestError(
                f"tensor {tensor.name} is {tensor.dtype} {tuple(tensor.shape)}, but codec {codec.id} needs {dtype} {tuple(part_shape)}",
                path=reader.path,
            )
    return {part: dtype for part, (dtype, _) in wanted.items()}


def _triplet(reader: Reader, role: Role, segment: Segment) -> Quantized:
    params = reader.manifest.codecs[segment.codec].params
    rows = segment.rows[1] - segment.rows[0]
    bits, group = params.get("bits"), params.get("group_size")
    if type(bits) is not int or type(group) is not int or bits not in AFFINE_BITS or group not in (32, 64, 128) or role.dim % group:
        raise ManifestError(
            f"{MLX_AFFINE} with bits {bits!r:.40}, group_size {group!r:.40} does not fit head_dim {role.dim}", path=reader.path
        )
    shapes = {
        "weight": (role.heads, rows, role.dim * bits // 32),
        "scales": (role.heads, rows, role.dim // group),
        "biases": (role.heads, rows, role.dim // group),
    }
    arrays = {}
    for part, shape in shapes.items():
        name = segment.tensors.get(part)
        dtype = "U32" if part == "weight" else role.dtype
        if name is None or (reader.tensors[name].dtype, tuple(reader.tensors[name].shape)) != (dtype, shape):
            raise ManifestError(f"{MLX_AFFINE} needs {part} as {dtype} {shape}, found {name and reader.tensors[name]}", path=reader.path)
        arrays[part] = to_mlx(reader.array(name), dtype)
    return Quantized(bits=bits, group_size=group, **arrays)


def to_mlx(array: np.ndarray, dtype: str) -> mx.array:
    """An MLX array (a copy) of a container tensor; bfloat16 arrives as uint16."""
    value = mx.array(array)
    if dtype == "BF16":
        value = value.view(mx.bfloat16)
    return value
