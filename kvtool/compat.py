"""Does a file fit a model: who computed it, what its layers are, how its keys are rotated. Every difference is named."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

from formats.container import Reader
from formats.errors import IncompatibleError, ManifestError, counted
from formats.manifest import CACHE_DTYPES, CacheInfo, Manifest, ModelInfo
from kvtool.decoding import check_class, rope_of
from kvtool.encoding import DTYPE_NAMES
from kvtool.identity_config import config_digest, differences
from kvtool.probe import CacheProbe
from veloxquant_mlx.transfer.rope_spec import RopeSpec

StoredRope = Callable[[int | None], RopeSpec | None]  # of a file, by its index
OTHER_MODEL = "the file is of another model; kvtool explain says whether a map carries it over"


@dataclass(frozen=True)
class Layer:
    """One layer of an identity, the file's beside the model's.

    Attributes:
        name: architecture, weights, adapter, quantisation, tokenizer, chat template or config.
        same: whether they are alike; None where one of the two does not say.
        blocks: whether import refuses a file over it.
        differences: what differs, with both values; where `same` is None, why it cannot be told.
    """

    name: str
    same: bool | None
    blocks: bool = True
    differences: tuple[str, ...] = ()


def check_identity(path: str, manifest: Manifest, model: ModelInfo, arguments: Sequence[str]) -> None:
    """Raise IncompatibleError unless the file was computed by this model, naming each layer of the identity that differs.

    `arguments` are what `--to-model` would take for it, and options that go with it, for the hint.
    """
    differ = identity_problems(manifest, model)
    if differ:
        recode = f"kvtool recode {shlex.quote(path)} -o OUT.kv --to-model {shlex.join(arguments)}"
        explain = f"kvtool explain {shlex.quote(path)} --model {shlex.join(arguments)}"  # recode alone refuses another tokenizer
        raise IncompatibleError(
            f"computed by {', not by '.join(told_apart(manifest.model, model))} ({'; '.join(differ)})",
            path=path,
            hint=recode if tokenizer_difference(manifest.model, model) is None else explain,
        )


def told_apart(file: ModelInfo, model: ModelInfo) -> tuple[str, str]:
    """What to call two models in one sentence: by their names, and where those are the same by their adapters, or as that one and this."""
    if file.name != model.name:
        return file.name, model.name
    if file.adapter != model.adapter:
        named = [f"with the adapter {short(own.adapter)}" if own.adapter else "without an adapter" for own in (file, model)]
        return f"{file.name} {named[0]}", f"{model.name} {named[1]}"
    return f"another {file.name}", f"this {model.name}"


def identity_key(model: ModelInfo, probes: Iterable[CacheProbe]) -> dict[str, str | None]:
    """Digests of all over which import refuses a file, for the names under which caches are kept; RoPE's fields only where needed."""
    rope = any(rotation_unknown(probe) for probe in probes)
    return {
        "architecture": model.architecture,
        "weights": model.weights,
        "adapter": model.adapter,
        "quantisation": None if model.quantisation is None else model.quantisation["blake3"],
        "tokenizer": model.tokenizer,
        "tokenizer_state": model.tokenizer_state,
        "config": None if model.config is None else config_digest(model.config, rope=rope),
    }


def rotation_unknown(probe: CacheProbe) -> bool:
    """Whether a layer's rotation could not be described, so that only its model's config says what it is."""
    own = any(role is not None and role.rope_problem is not None for role in (probe.k, probe.v))
    return own or any(rotation_unknown(inner) for inner in probe.caches)


def identity_problems(manifest: Manifest, model: ModelInfo) -> list[str]:
    """The layers of the identity over which import refuses a file, with both values."""
    layers = identity_layers(manifest.model, model, rope=bool(manifest.extra.get("rope_problems")))
    return [f"{layer.name}: {'; '.join(layer.differences)}" for layer in layers if layer.blocks and layer.same is False]


def computing_problems(a: ModelInfo, b: ModelInfo) -> list[str]:
    """Why two models do not compute the same rows of the same tokens, RoPE aside: weights, adapter, quantisation, config."""
    names = ("weights", "adapter", "quantisation", "config")
    return [
        f"{layer.name}: {'; '.join(layer.differences)}" for layer in identity_layers(a, b) if layer.name in names and layer.same is False
    ]


def not_compared(file: ModelInfo, model: ModelInfo) -> tuple[str, ...]:
    """What an older file does not say of who computed it, as a remark."""
    if file.identity > 1 or model.identity < 2:
        return ()
    names = [layer.name for layer in identity_layers(file, model) if layer.same is None]
    return (f"the file is older than what else is compared of a model now: {', '.join(names)}, merges and rules of the tokenizer",)


def identity_layers(file: ModelInfo, model: ModelInfo, *, rope: bool = False) -> tuple[Layer, ...]:
    """Who computed a file beside a model, layer by layer.

    Unknown weights (None) vouch for nothing, not even for other ones. A chat template decides which tokens a message becomes; the rows are
    those of the tokens that the file lists, so that it keeps nothing out. `rope`: compare the config's fields of RoPE as well.
    """
    same_weights = file.weights is not None and file.weights == model.weights
    found = [
        _pair("architecture", file.architecture, model.architecture),
        _pair("weights", short(file.weights), short(model.weights), same_weights),
        # Files older than adapters were computed without any.
        _pair("adapter", _named(file.adapter), _named(model.adapter), file.adapter == model.adapter),
        _quantisation(file, model),
        Layer("tokenizer", (problem := tokenizer_difference(file, model)) is None, True, () if problem is None else (problem,)),
        _pair("chat template", _named(file.chat_template), _named(model.chat_template), file.chat_template == model.chat_template, False),
        _config(file, model, rope),
    ]
    if min(file.identity, model.identity) < 2:
        unknown = ("not known of the file" if file.identity < 2 else "not known of the model",)
        late = ("quantisation", "chat template", "config")
        found = [Layer(layer.name, None, layer.blocks, unknown) if layer.name in late else layer for layer in found]
    return tuple(found)


def _pair(name: str, file: str, model: str, same: bool | None = None, blocks: bool = True) -> Layer:
    same = file == model if same is None else same
    return Layer(name, same, blocks, () if same else (f"file {file}, model {model}",))


def _named(digest: str | None) -> str:
    return "none" if digest is None else short(digest)


def _quantisation(file: ModelInfo, model: ModelInfo) -> Layer:
    a, b = file.quantisation or {}, model.quantisation or {}
    ours, theirs = (side.get("summary", "none") for side in (a, b))
    if ours == theirs and a != b:
        return _pair("quantisation", f"{ours}, of modules {short(a['blake3'])}", f"of modules {short(b['blake3'])}")
    return _pair("quantisation", ours, theirs, a == b)


def tokenizer_difference(file: ModelInfo, model: ModelInfo) -> str | None:
    """What two models' tokenizers differ in, None where they give the same ids as far as both are known."""
    if file.tokenizer is None or file.tokenizer != model.tokenizer:
        return f"file {short(file.tokenizer)}, model {short(model.tokenizer)}"
    if min(file.identity, model.identity) > 1 and file.tokenizer_state != model.tokenizer_state:
        return f"the same vocabulary, other merges or rules: file {short(file.tokenizer_state)}, model {short(model.tokenizer_state)}"
    return None


def _config(file: ModelInfo, model: ModelInfo, rope: bool) -> Layer:
    found = differences(file.config or {}, model.config or {}, rope=rope)
    return Layer("config", not found, True, tuple(found))


def check_layers(path: str, layers: Sequence[CacheInfo], probes: Sequence[CacheProbe]) -> None:
    """Raise IncompatibleError where the file's layer table does not fit the model's, naming the layer and each field that differs."""
    problems = layer_problems(layers, probes)
    if len(layers) != len(probes):
        raise IncompatibleError(problems[0], path=path, hint=OTHER_MODEL)
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise IncompatibleError(f"does not fit the model: {'; '.join(problems[:6])}{more}", path=path, hint=OTHER_MODEL)


def layer_problems(layers: Sequence[CacheInfo], probes: Sequence[CacheProbe]) -> list[str]:
    """What does not fit between a file's layer table and a model's: the number of layers, or each field of each layer that differs."""
    if len(layers) != len(probes):
        return [f"{counted(len(layers), 'layer')}, but the model has {len(probes)}"]
    return [text for i, (a, b) in enumerate(zip(layers, probes, strict=True)) for text in _differences(f"layer {i}", a, b)]


def check_ropes(reader: Reader, probes: Sequence[CacheProbe], model: ModelInfo, arguments: Sequence[str]) -> None:
    """Raise IncompatibleError where keys are rotated otherwise than the model rotates them, naming the first layer and each field."""
    for text in rope_problems(reader, probes, model):
        layer, _, problem = text.partition(": ")
        raise IncompatibleError(
            f"{layer}: keys are rotated otherwise than in {model.name}: {problem}",
            path=reader.path,
            hint=f"kvtool recode {shlex.quote(reader.path)} -o OUT.kv --to-model {shlex.join(arguments)}",
        )


def rope_problems(reader: Reader, probes: Sequence[CacheProbe], model: ModelInfo) -> Iterator[str]:
    """The layers, of tables that fit, whose keys are rotated otherwise than the model rotates them, with the fields that differ."""
    same_weights = model.weights is not None and reader.manifest.model.effective_weights == model.effective_weights
    stored = cache(partial(rope_of, reader))  # all layers share one, most often
    for i, (layer, probe) in enumerate(zip(reader.manifest.layers, probes, strict=True)):
        problem = _rope_difference(stored, layer, probe, same_weights)
        if problem is not None:
            yield f"layer {i}: {problem}"


def _rope_difference(stored_at: StoredRope, layer: CacheInfo, probe: CacheProbe, same_weights: bool) -> str | None:
    for role, live in ((layer.k, probe.k), (layer.v, probe.v)):
        if role is None or live is None or not role.segments:
            continue
        stored = stored_at(role.rope)
        if live.rope_problem is not None:
            # Nothing to compare: the file has no description either, and only the very model that computed the keys can go on.
            if stored is not None:
                return f"file {stored.kind}, model unknown ({live.rope_problem})"
            if not same_weights:
                return f"the model's rotation is not known ({live.rope_problem}), and the file is of other weights"
            continue
        if not _alike(stored, live.rope):
            return rope_fields(stored, live.rope)
    pairs = zip(layer.caches, probe.caches, strict=True)
    return next((text for text in (_rope_difference(stored_at, a, b, same_weights) for a, b in pairs) if text is not None), None)


@lru_cache(maxsize=64)  # of the layers of a model, most have the same
def _alike(a: RopeSpec | None, b: RopeSpec | None) -> bool:
    return a == b if a is None or b is None else a.same_rotation(b)


def check_rows(path: str, layers: Sequence[CacheInfo], probes: Sequence[CacheProbe], length: int) -> None:
    """Raise where a layer does not hold what its class keeps of `length` tokens.

    Raises:
        ManifestError: the layer contradicts itself or the length.
        IncompatibleError: sound rows at other positions (a shifted file): mlx-lm's caches count from 0.
    """
    for i, (layer, probe) in enumerate(zip(layers, probes, strict=True)):
        _check_rows(path, f"layer {i}", layer, probe, length)


def _check_rows(path: str, where: str, info: CacheInfo, probe: CacheProbe, length: int) -> None:
    check_class(path, info)
    for i, (inner, live) in enumerate(zip(info.caches, probe.caches, strict=True)):
        _check_rows(path, f"{where}.{i}", inner, live, length)
    if info.attention == "list":
        return
    if info.attention == "state":
        missing = any(a is None and live is not None for a, live in zip(info.arrays, probe.arrays, strict=False))
        if (missing and length) or (info.offset != length and any(a is not None for a in info.arrays)):
            raise ManifestError(f"{where}: no complete state after {info.offset} of {counted(length, 'token')}", path=path)
        return
    if not info.positions:
        if length and probe.k is not None:
            raise ManifestError(f"{where}: no rows of {counted(length, 'token')}", path=path)
        return
    shift = info.offset - length
    wanted = _kept(info, shift)
    if info.window != info.params.get("max_size", info.params.get("chunk_size")):
        raise ManifestError(f"{where}: window {info.window}, but the parameters are {dict(info.params)}"[:200], path=path)
    if list(joined(info.positions)) != list(joined(wanted)):
        found = f"{list(info.positions)}"[:100]
        raise ManifestError(
            f"{where}: {info.cls} after {counted(info.offset, 'token')} holds the positions {list(wanted)}, not {found}", path=path
        )
    if shift:
        start = info.positions[0][0]
        raise IncompatibleError(
            f"{where} begins at position {start}, and a live cache of {counted(length, 'token')} at {start - shift}",
            path=path,
            hint=f"kvtool recode {shlex.quote(path)} -o OUT.kv --shift {-shift}",
        )


def _kept(info: CacheInfo, shift: int) -> tuple[tuple[int, int], ...]:
    """The positions a cache class keeps once it has seen `offset` tokens of which the first stood at `shift`."""
    stop, window = info.offset, info.window or 0
    if info.attention == "chunked":
        return ((stop - min(info.rows, window, stop - shift), stop),)
    if info.attention == "full" or stop - shift < window:
        return ((shift, stop),)
    # A full window: what the next update drops is not stored.
    keep = info.params["keep"]
    return tuple((a, b) for a, b in ((shift, shift + keep), (stop - (window - 1 - keep), stop)) if a < b)


def joined(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges with neighbours that touch joined."""
    start: int | None = None
    stop = 0
    for a, b in ranges:
        if start is not None and a == stop:
            stop = b
            continue
        if start is not None:
            yield start, stop
        start, stop = a, b
    if start is not None:
        yield start, stop


def rope_fields(a: RopeSpec | None, b: RopeSpec | None) -> str:
    """The fields in which two rotations differ, as text."""
    if a is None or b is None:
        return f"file {'has no RoPE' if a is None else a.kind}, model {'has no RoPE' if b is None else b.kind}"
    fields = [f for f in ("kind", "first", "dims", "pairing", "base", "scale", "magnitude") if getattr(a, f) != getattr(b, f)]
    text = [f"{f}: file {getattr(a, f)}, model {getattr(b, f)}" for f in fields]
    if a.periods != b.periods:
        count = sum(x != y for x, y in zip(a.frequencies, b.frequencies, strict=False))
        text.append(f"{count} of {len(a.frequencies)} frequencies differ")
    return "; ".join(text)


def _differences(where: str, info: CacheInfo, probe: CacheProbe) -> list[str]:
    found = []
    if info.attention != probe.attention:
        found.append(f"{where}: attention: file {info.attention}, model {probe.attention}")
    for label, x, y in (
        ("window", info.window, probe.window),
        ("keep", info.params.get("keep", 0), probe.params.get("keep", 0)),
        ("state arrays", len(info.arrays), len(probe.arrays)),
    ):
        if x != y:
            found.append(f"{where}: {label}: file {x}, model {y}")
    for i, (array, live) in enumerate(zip(info.arrays, probe.arrays, strict=False)):
        # Integer state is a window of token ids, whose length varies.
        if array is None or live is None:
            continue
        if (array.dtype in CACHE_DTYPES) != (live.dtype in DTYPE_NAMES):
            found.append(f"{where}: state array {i}: file {array.dtype}, model {live.dtype}")
        elif array.dtype in CACHE_DTYPES and array.shape != live.shape:
            found.append(f"{where}: state array {i} shape: file {array.shape}, model {live.shape}")
    for role in ("k", "v"):
        a, b = getattr(info, role), getattr(probe, role)
        if (a is None) != (b is None):
            # An empty cache has no arrays yet; only a file that has rows where the model has none, or none where it must, is wrong.
            if info.offset > 0:
                found.append(
                    f"{where}: {role}: file {'has none' if a is None else 'has one'}, model {'has none' if b is None else 'has one'}"
                )
            continue
        if a is None or b is None:
            continue
        for label, x, y in (("KV heads", a.heads, b.heads), ("head_dim", a.dim, b.dim)):
            if x != y:
                found.append(f"{where}: {role} {label}: file {x}, model {y}")
    if len(info.caches) != len(probe.caches):
        return [*found, f"{where}: caches: file {len(info.caches)}, model {len(probe.caches)}"]
    for i, (x, y) in enumerate(zip(info.caches, probe.caches, strict=True)):
        found += _differences(f"{where}.{i}", x, y)
    return found


def short(digest: str | None) -> str:
    """The first 12 digits of a digest, for messages."""
    return "unknown" if digest is None else digest[:12]
