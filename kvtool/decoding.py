"""Turn manifest entries and their tensors back into cache states, one (layer, role) at a time."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from formats.container import Reader
from formats.errors import IncompatibleError, ManifestError
from formats.manifest import CacheInfo, CodecInfo, Role, Segment
from kvtool.encoding import ARRAY_NAMES, DTYPE_NAMES, MLX_AFFINE, positions_of
from kvtool.states import CacheState, Quantized
from veloxquant_mlx.codecs import CODECS, Codec
from veloxquant_mlx.transfer.rope import RopeSpec, rotate

MX_DTYPES = {name: dtype for dtype, name in ARRAY_NAMES.items()}
FLOATS = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def decode_cache(reader: Reader, info: CacheInfo) -> CacheState:
    """A cache's state with K and V decoded (mlx-lm's own quantised triplets stay as they are).

    Raises:
        IntegrityError: a tensor's bytes do not match their digest.
        ManifestError: tensors that do not fit their codec.
        IncompatibleError: a codec this version does not know.
    """
    k = decode_role(reader, info.k, info.positions)
    v = decode_role(reader, info.v, info.positions)
    if isinstance(k, Quantized) != isinstance(v, Quantized):
        k, v = (x.dequantize() if isinstance(x, Quantized) else x for x in (k, v))
    return CacheState(
        cls=info.cls,
        attention=info.attention,
        window=info.window,
        offset=info.offset,
        positions=info.positions,
        params=dict(info.params),
        k=k,
        v=v,
        arrays=tuple(None if a is None else to_mlx(reader.array(a.tensor), a.dtype) for a in info.arrays),
        caches=tuple(decode_cache(reader, c) for c in info.caches),
    )


def decode_role(reader: Reader, role: Role | None, positions: Any) -> mx.array | Quantized | None:
    """K or V of one cache: (H, S, D) as it stood in the live cache."""
    if role is None:
        return None
    if len(role.segments) == 1 and reader.manifest.codecs[role.segments[0].codec].id == MLX_AFFINE:
        return _triplet(reader, role, role.segments[0])
    pieces = [decode_segment(reader, role, segment, positions) for segment in role.segments]
    if not pieces:
        return mx.zeros((role.heads, 0, role.dim), FLOATS[role.dtype])
    whole = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
    mx.eval(whole)
    return whole


def decode_segment(reader: Reader, role: Role, segment: Segment, positions: Any) -> mx.array:
    """Rows of one segment, (H, rows, D) in the role's dtype, as cached (RoPE applied where they were stored before it)."""
    dtype = FLOATS[role.dtype]
    start, stop = segment.rows
    shape = (role.heads, stop - start, role.dim)
    info = reader.manifest.codecs[segment.codec]
    if info.id == MLX_AFFINE:
        return _triplet(reader, role, segment).dequantize().astype(dtype)
    codec = codec_of(reader.path, info)
    parts = read_parts(reader, segment, codec, shape)
    if segment.frame == "post" or role.rope is None:
        rows = codec.decode(parts, shape, dtype)
    else:
        rope = rope_of(reader, role.rope)
        rows = codec.decode(parts, shape, mx.float32)
        rows = rotate(rows, positions_of(positions, start, stop), None, rope).astype(dtype)
    mx.eval(rows)
    return rows


def rope_of(reader: Reader, index: int | None) -> RopeSpec | None:
    """The rotation at an index of the file's table, or None."""
    if index is None:
        return None
    try:
        return RopeSpec.from_json(reader.manifest.ropes[index])
    except (ValueError, TypeError) as error:
        raise ManifestError(f"ropes[{index}] is not valid: {error}", path=reader.path) from error


def codec_of(path: str, info: CodecInfo) -> Codec:
    """The codec a manifest names, with its parameters."""
    if info.id not in CODECS:
        raise IncompatibleError(
            f"codec {info.id!r} is not known to this version (it has {', '.join(sorted(CODECS))})", path=path, hint="update kvtool"
        )
    try:
        return CODECS[info.id].from_params(dict(info.params))
    except (ValueError, TypeError, KeyError) as error:
        raise ManifestError(f"parameters of codec {info.id!r} are not valid: {error}", path=path) from error


def read_parts(reader: Reader, segment: Segment, codec: Codec, shape: tuple[int, int, int]) -> dict[str, mx.array]:
    """The tensors of a segment as MLX arrays, checked against what the codec lays out."""
    exact = reader.tensors[segment.tensors["data"]].dtype if "data" in segment.tensors else None
    wanted: Mapping[str, tuple[str, tuple[int, ...]]] = codec.layout(shape, FLOATS.get(exact or "F32", mx.float32))
    if set(wanted) != set(segment.tensors):
        raise ManifestError(
            f"codec {codec.id} needs parts {sorted(wanted)}, but the segment names {sorted(segment.tensors)}", path=reader.path
        )
    parts = {}
    for part, (dtype, part_shape) in wanted.items():
        tensor = reader.tensors[segment.tensors[part]]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(part_shape)):
            raise ManifestError(
                f"tensor {tensor.name} is {tensor.dtype} {tuple(tensor.shape)}, but codec {codec.id} needs {dtype} {tuple(part_shape)}",
                path=reader.path,
            )
        parts[part] = to_mlx(reader.array(tensor.name), dtype)
    return parts


def _triplet(reader: Reader, role: Role, segment: Segment) -> Quantized:
    params = reader.manifest.codecs[segment.codec].params
    rows = segment.rows[1] - segment.rows[0]
    bits, group = params.get("bits"), params.get("group_size")
    if not (isinstance(bits, int) and isinstance(group, int) and 1 <= bits <= 8 and group in (32, 64, 128) and role.dim % group == 0):
        raise ManifestError(f"{MLX_AFFINE} with bits {bits!r}, group_size {group!r} does not fit head_dim {role.dim}", path=reader.path)
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
