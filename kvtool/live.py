"""Live caches that attend to a file's codes, layer by layer, where the model's attention allows it.

A layer is on codes where the model file passes what its cache returns straight to mlx-lm's attention (`veloxquant_mlx.caches.families`),
its rows are those of one KVCache or of a sliding window, and its file holds codes that can be read tile by tile. All others get mlx-lm's
own cache of decoded rows, with the reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from formats.errors import ManifestError
from formats.manifest import CacheInfo, Role, Segment
from kvtool.calibrations import is_calibrated
from kvtool.decoding import Decoder
from kvtool.encoding import MLX_AFFINE, codec_plan, takes_dim
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, probe_model
from veloxquant_mlx import native
from veloxquant_mlx.caches import families
from veloxquant_mlx.caches.blocks import Block, CodedRows, unfused
from veloxquant_mlx.caches.coded import CodedKVCache, Growth
from veloxquant_mlx.codecs import Codec, CodecPlan, parse_codec
from veloxquant_mlx.codecs._base import RoleName
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.metal._backend import backend

FULL = ("KVCache", "ConcatenateKVCache")


@dataclass(frozen=True)
class Placement:
    """How one layer lives.

    Attributes:
        codes: whether attention reads codes.
        reason: why not, empty where it does.
        grows: spec of the codecs that encode rows which join later, such as "k=tc-2,v=tc-2"; None keeps them exact.
        lossy: whether the file holds codes of the layer.
        sharable: whether its attention could read exact rows in blocks, which forks share.
        unfused: why MLX's operations read the codes, and neither this GPU's kernel nor the native back end; empty where one does.
    """

    codes: bool
    reason: str = ""
    grows: str | None = None
    lossy: bool = True
    sharable: bool = False
    unfused: str = ""


def placements(decoder: Decoder, model: Any, probes: Sequence[CacheProbe]) -> list[Placement]:
    """Where each layer of a file would live in a model. No tensor is read."""
    treated = families.layers(model)
    infos = decoder.reader.manifest.layers
    found = [_placement(decoder, info, probe, layer) for info, probe, layer in zip(infos, probes, treated, strict=True)]
    # A mask is made once for all sliding layers, over the rows of the first; a ring and codes hold different ones.
    sliding = [i for i, info in enumerate(infos) if info.attention == "sliding"]
    reasons = [found[i].reason for i in sliding if not found[i].codes]
    if reasons and len(reasons) < len(sliding):
        for i in sliding:
            found[i] = found[i] if not found[i].codes else Placement(False, f"another sliding layer is decoded: {reasons[0]}")
    return found


def _placement(decoder: Decoder, info: CacheInfo, probe: CacheProbe, layer: families.Layer) -> Placement:
    if layer.attention != "codes":
        return Placement(False, layer.reason, lossy=_lossy(decoder, info))
    if info.cls not in FULL and not (info.cls == "RotatingKVCache" and info.params.get("keep") == 0):
        return Placement(False, f"a {info.cls} is not read from codes", lossy=_lossy(decoder, info))
    if info.k is None or info.v is None:
        return Placement(False, "it has no rows", lossy=False)
    manifest = decoder.reader.manifest
    codecs = {}
    for role, about in (("k", info.k), ("v", info.v)):
        if any(manifest.codecs[segment.codec].id == MLX_AFFINE for segment in about.segments):
            return Placement(False, "mlx-lm quantised it itself")
        used = [decoder.codec(segment.codec) for segment in about.segments]
        if any(codec.eager for codec in used):
            return Placement(False, f"{next(codec for codec in used if codec.eager).spec()} is decoded when it is loaded")
        codecs[role] = _main(decoder, about)
    if probe.v is None or probe.v.rope is not None:
        return Placement(False, "its values are rotated")
    if all(isinstance(codec, Raw) for codec in codecs.values()):
        return Placement(False, "it is stored exactly", lossy=False, sharable=info.cls in FULL)
    growing = growth(decoder, info, probe)
    grows = None if growing is None else f"k={growing.k.spec('k')},v={growing.v.spec('v')}"
    return Placement(True, grows=grows, unfused=_unfused(decoder, info))


def _unfused(decoder: Decoder, info: CacheInfo) -> str:
    """Why neither a GPU's kernel nor the native back end reads some of a layer's codes, or an empty text."""
    k, v = info.k, info.v
    assert k is not None and v is not None
    if backend() == "cpu":
        return native.without_because(max(k.dim, v.dim))
    reasons = (
        unfused(decoder.codec(keys.codec), decoder.codec(values.codec), (k.dim, v.dim), decoder.rope(k, keys))
        for keys, values in product(k.segments, v.segments)
        if keys.rows[0] < values.rows[1] and values.rows[0] < keys.rows[1]
    )
    return next((reason for reason in reasons if reason), "")


def make_cache(model: LoadedModel, codec: str | CodecPlan, *, sink: int | None = None, recent: int | None = None) -> list[Any]:
    """An empty prompt cache whose rows become codes as they leave the newest ones; a layer that cannot be on codes gets mlx-lm's own cache.

    Args:
        model: whose cache it is.
        codec: a spec such as "rvq-4", of codecs that need no calibration and learn no tables from the rows.
        sink, recent: rows that stay exact, whatever the spec says.

    Raises:
        ValueError: a codec that cannot encode rows as they come, or one that no layer can use.
    """
    if not isinstance(model, LoadedModel):
        raise TypeError(f"[make_cache] model must come from kvtool.load_model, but got {type(model).__name__}.")
    plan = codec_plan(codec, sink, recent)
    if plan.lossless:
        raise ValueError(f"[make_cache] codec must be one that compresses, but got {plan.spec()!r}.")
    for one in (plan.k, plan.v):
        if not one.grows or is_calibrated(one):
            raise ValueError(f"[make_cache] {one.spec()} cannot encode rows as they come; rvq-N, rabitq-N, affine-N and qjl-N can.")
    plain = make_prompt_cache(model.model)
    layers = families.layers(model.model, plain)
    caches = [_growing_cache(plan, *one) for one in zip(plain, probe_model(model.model), layers, strict=True)]
    if not any(isinstance(cache, CodedKVCache) for cache in caches):
        reasons = "; ".join(sorted({layer.reason for layer in layers} - {""})) or "its head_dim"
        raise ValueError(f"[make_cache] no layer of {model.info.name} can attend to {plan.spec()}: {reasons}.")
    return caches


def _growing_cache(plan: CodecPlan, plain: Any, probe: CacheProbe, layer: families.Layer) -> Any:
    k, v = probe.k, probe.v
    if layer.attention != "codes" or k is None or v is None or v.rope is not None or k.rope_problem is not None:
        return plain
    if getattr(plain, "keep", 0) or not takes_dim(plan.k, k.dim) or not takes_dim(plan.v, v.dim):
        return plain
    rope = k.rope if (plan.frame or plan.k.default_frame("k")) == "pre" else None
    window = plain.max_size if type(plain) is RotatingKVCache else 0
    return CodedKVCache((), Growth(plan.k, plan.v, rope, plan.sink, plan.recent), window)


def _lossy(decoder: Decoder, info: CacheInfo) -> bool:
    roles = [about for about in (info.k, info.v) if about is not None]
    coded = any(decoder.reader.manifest.codecs[segment.codec].id != Raw.id for about in roles for segment in about.segments)
    return coded or any(_lossy(decoder, inner) for inner in info.caches)


def shareable(cache: Any, placement: Placement) -> Any:
    """A cache whose copies share its rows, where there is one: a KVCache whose attention can read blocks becomes one of exact blocks."""
    if not placement.sharable or type(cache) is not KVCache:
        return cache
    keys, values = cache.keys_and_values()
    keys, values = mx.contiguous(keys[0]), mx.contiguous(values[0])
    return CodedKVCache([Block.exact(keys, values, 0)])


def coded_cache(decoder: Decoder, name: str, probe: CacheProbe, mapped: bool = True) -> CodedKVCache:
    """The cache of a layer that is placed on codes.

    Args:
        mapped: leave codes in the mapped file where attention can read them there.
    """
    info = decoder.reader.manifest.layers[int(name)]
    assert info.k is not None and info.v is not None
    for segment in info.v.segments:
        if decoder.codec(segment.codec).needs:
            keys = next((other for other in info.k.segments if other.rows == segment.rows), None)
            if keys is None or (keys.frame == "post" and info.k.rope is not None):
                why = "are not one coded segment" if keys is None else "are stored after RoPE"
                what = f"rows {segment.rows[0]} to {segment.rows[1]} of {name}.k, that values are predicted from, {why}"
                raise ManifestError(what, path=decoder.reader.path)
    # Both roles or neither: where the native back end cannot read one, MLX has to read both, and would copy them each time.
    mapped = mapped and all(_mappable(decoder.codec(segment.codec), about.dim) for about in (info.k, info.v) for segment in about.segments)
    pieces = {
        role: [(segment.rows, decoder.coded(name, role, segment, mapped)) for segment in about.segments]
        for role, about in (("k", info.k), ("v", info.v))
    }
    first = info.positions[0][0]
    window = info.window or 0 if info.attention == "sliding" else 0
    return CodedKVCache(list(_blocks(pieces["k"], pieces["v"], first)), growth(decoder, info, probe), window)


def _mappable(codec: Codec, dim: int) -> bool:
    """Whether codes may stay where the file is mapped: the native back end reads them there; MLX has no arrays over memory of others."""
    return codec.maps and native.available() and backend() == "cpu" and dim <= native.max_dim()


def _blocks(keys: list[tuple[tuple[int, int], CodedRows]], values: list[tuple[tuple[int, int], CodedRows]], first: int) -> Iterator[Block]:
    """Keys and values of the same rows beside each other, cut where either is."""
    cuts = sorted({edge for (start, stop), _ in (*keys, *values) for edge in (start, stop)})
    for start, stop in pairwise(cuts):
        (k_span, k), (v_span, v) = (next(piece for piece in role if piece[0][0] <= start < piece[0][1]) for role in (keys, values))
        yield Block(k, v, stop - start, first + start, start - k_span[0], start - v_span[0])


def growth(decoder: Decoder, info: CacheInfo, probe: CacheProbe) -> Growth | None:
    """How rows that join later are encoded: as the file's are, or by `rvq` of as many bits where its codec learns tables from the rows."""
    assert info.k is not None and info.v is not None and probe.k is not None
    k, v = _growing(decoder, info.k, "k"), _growing(decoder, info.v, "v")
    if isinstance(k, Raw) and isinstance(v, Raw):
        return None
    rope = probe.k.rope if _longest(info.k).frame == "pre" else None
    return Growth(k, v, rope, recent=_recent(decoder, info.k))


def _growing(decoder: Decoder, about: Role, role: RoleName) -> Codec:
    codec = _main(decoder, about)
    if codec.grows:
        return codec
    start, stop = _longest(about).rows
    shape = (about.heads, stop - start, about.dim)
    bits = 8 * codec.nbytes(shape, mx.float16) / prod(shape)
    plan = parse_codec(f"rvq-{min(8, max(1, round(bits)))}")
    return plan.k if role == "k" else plan.v


def _main(decoder: Decoder, about: Role) -> Codec:
    return decoder.codec(_longest(about).codec)


def _longest(about: Role) -> Segment:
    """The segment with most rows, of those with codes where there are any."""
    return max(about.segments, key=lambda segment: ("data" not in segment.tensors, segment.rows[1] - segment.rows[0]))


def _recent(decoder: Decoder, about: Role) -> int:
    """Newest rows that the file keeps exact."""
    newest = about.segments[-1]
    exact = len(about.segments) > 1 and isinstance(decoder.codec(newest.codec), Raw)
    return newest.rows[1] - newest.rows[0] if exact else 0


def placement_notes(found: Sequence[Placement]) -> tuple[str, ...]:
    """Where the layers live, equal ones counted, as remarks for the caller."""
    notes = []
    for placement in dict.fromkeys(found):
        where = ranges([i for i, other in enumerate(found) if other == placement])
        later = "" if placement.grows is None else f"; later rows join as {placement.grows}"
        way = f" by MLX's operations ({placement.unfused})" if placement.unfused else ""
        notes.append(
            f"layers {where} attend to codes{way}{later}" if placement.codes else f"layers {where} are decoded: {placement.reason}"
        )
    return tuple(notes)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
