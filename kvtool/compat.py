"""Does a file fit a model: who computed it, what its layers are, how its keys are rotated. Every difference is named."""

from collections.abc import Sequence

from formats.container import Reader
from formats.errors import IncompatibleError
from formats.manifest import CacheInfo, Manifest, ModelInfo
from kvtool.decoding import rope_of
from kvtool.probe import CacheProbe
from veloxquant_mlx.transfer.rope import RopeSpec


def check_identity(path: str, manifest: Manifest, model: ModelInfo) -> None:
    """Raise IncompatibleError unless the file was computed by this model (weights and tokenizer), naming each field that differs."""
    differ = [
        f"{field}: file {short(a)}, model {short(b)}"
        for field, a, b in (
            ("architecture", manifest.model.architecture, model.architecture),
            ("weights", manifest.model.weights, model.weights),
            ("tokenizer", manifest.model.tokenizer, model.tokenizer),
        )
        if a != b
    ]
    if differ:
        raise IncompatibleError(
            f"computed by {manifest.model.name}, not by {model.name} ({'; '.join(differ)})",
            path=path,
            hint=f"kvtool recode {path} -o OUT.kv --to-model {model.name}",
        )


def check_layers(path: str, layers: Sequence[CacheInfo], probes: Sequence[CacheProbe]) -> None:
    """Raise IncompatibleError where the file's layer table does not fit the model's, naming the layer and each field that differs."""
    if len(layers) != len(probes):
        raise IncompatibleError(f"{len(layers)} layers, but the model has {len(probes)}", path=path, hint="the file is of another model")
    problems = [text for i, (a, b) in enumerate(zip(layers, probes, strict=True)) for text in _differences(f"layer {i}", a, b)]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise IncompatibleError(f"does not fit the model: {'; '.join(problems[:6])}{more}", path=path, hint="the file is of another model")


def check_ropes(reader: Reader, probes: Sequence[CacheProbe], name: str) -> None:
    """Raise IncompatibleError where keys are rotated otherwise than the model rotates them, naming the first layer and each field."""
    for i, (layer, probe) in enumerate(zip(reader.manifest.layers, probes, strict=True)):
        problem = _rope_difference(reader, layer, probe)
        if problem:
            raise IncompatibleError(
                f"layer {i}: keys are rotated otherwise than in {name}: {problem}",
                path=reader.path,
                hint=f"kvtool recode {reader.path} -o OUT.kv --to-model {name}",
            )


def _rope_difference(reader: Reader, layer: CacheInfo, probe: CacheProbe) -> str | None:
    for role, live in ((layer.k, probe.k), (layer.v, probe.v)):
        if role is None or live is None or not role.segments:
            continue
        if live.rope_problem is not None:
            # The file records no rotation for such a layer either; identity alone must vouch for it.
            continue
        stored = rope_of(reader, role.rope)
        alike = stored == live.rope if stored is None or live.rope is None else stored.same_rotation(live.rope)
        if not alike:
            return rope_fields(stored, live.rope)
    return next(filter(None, (_rope_difference(reader, a, b) for a, b in zip(layer.caches, probe.caches, strict=True))), None)


def rope_fields(a: RopeSpec | None, b: RopeSpec | None) -> str:
    """The fields in which two rotations differ, as text."""
    if a is None or b is None:
        return f"file {'has no RoPE' if a is None else a.kind}, model {'has no RoPE' if b is None else b.kind}"
    fields = [f for f in ("kind", "dims", "pairing", "base", "scale", "magnitude") if getattr(a, f) != getattr(b, f)]
    text = [f"{f}: file {getattr(a, f)}, model {getattr(b, f)}" for f in fields]
    if a.periods != b.periods:
        count = sum(x != y for x, y in zip(a.frequencies, b.frequencies, strict=False))
        text.append(f"{count} of {len(a.frequencies)} frequencies differ")
    return "; ".join(text)


def _differences(where: str, info: CacheInfo, probe: CacheProbe) -> list[str]:
    found = []
    if info.attention != probe.attention:
        found.append(f"{where}: attention: file {info.attention}, model {probe.attention}")
    if info.window != probe.window:
        found.append(f"{where}: window: file {info.window}, model {probe.window}")
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
