"""`kvtool inspect`: what a file holds. Reads the header alone; needs no MLX."""

from typing import Any

import click

from formats.container import Reader, open_container
from formats.manifest import ITEM_BYTES, CacheInfo, Manifest, ModelInfo, Role
from kvtool import calibration_store as store
from kvtool.cli._common import emit, json_option, percent, printable, quality_line

# Codecs whose param `tables` is the digest of a calibration, or says that the tables are in the file.
CALIBRATED, CARRIED = ("tc", "tcz", "additive"), "carried"


@click.command("inspect")
@click.argument("source", metavar="IN.kv", type=click.Path(exists=True, dir_okay=False))
@json_option
def command(source: str, as_json: bool) -> None:
    """Say what a file holds: model, tokens, layers, codecs with their measured error, RoPE, sizes. Reads the header alone; needs no MLX.

    \b
    Example:
      kvtool inspect report.kv
    """
    with open_container(source) as reader:
        data = describe(reader)
    emit(as_json, data, as_text(data))


def describe(reader: Reader) -> dict[str, Any]:
    """What `kvtool inspect` reports, as one object; sizes are bytes."""
    manifest = reader.manifest
    layers = [_layer(reader, str(i), layer) for i, layer in enumerate(manifest.layers)]
    values = sum(layer["values"] for layer in layers)
    return {
        "path": reader.path,
        "schema": manifest.schema,
        "producer": manifest.producer,
        "model": _model(manifest.model),
        "origin": manifest.extra.get("origin"),
        "tokens": None if manifest.tokens is None else len(manifest.tokens.ids),
        "usable_tokens": manifest.length,
        "file_bytes": reader.file_bytes,
        "header_bytes": reader.header_bytes,
        "values": values,
        "bits_per_value": 8 * reader.file_bytes / values if values else None,
        "fp16_bytes": 2 * values,
        "calibrations": [{"digest": digest, "here": store.path_of(digest) is not None} for digest in calibrations_of(manifest)],
        "codecs": [{"id": codec.id, "params": codec.params} for codec in manifest.codecs],
        "ropes": list(manifest.ropes),
        "rope_problems": manifest.extra.get("rope_problems", {}),
        "quality": list(manifest.quality),
        "layers": layers,
        "layer_inputs": [{"layer": given.layer, **_role(reader, given.rows)} for given in manifest.layer_inputs],
    }


def _model(model: ModelInfo) -> dict[str, Any]:
    """A model's identity, without the weights of its sketch."""
    return {**vars(model), "sketch": None if model.sketch is None else {name: model.sketch[name] for name in ("of", "dtype")}}


def _layers_of(model: dict[str, Any]) -> str:
    """The layers of an identity beside weights and tokenizer, as text."""
    if model["identity"] < 2:
        return "adapter none; quantisation, tokenizer rules and config are not recorded (an older file)"
    quantisation = "none" if model["quantisation"] is None else model["quantisation"]["summary"]
    rules = f"tokenizer rules {_short(model['tokenizer_state'])}, config of {len(model['config'] or {})} fields"
    return f"adapter {'none' if model['adapter'] is None else _short(model['adapter'])}, quantisation {quantisation}, {rules}"


def calibrations_of(manifest: Manifest) -> list[str]:
    """Digests of the calibrations that a file's codecs need."""
    named = [codec.params.get("tables") for codec in manifest.codecs if codec.id in CALIBRATED]
    return [digest for digest in dict.fromkeys(named) if isinstance(digest, str) and digest != CARRIED]


def _layer(reader: Reader, name: str, info: CacheInfo) -> dict[str, Any]:
    inner = [_layer(reader, f"{name}.{i}", cache) for i, cache in enumerate(info.caches)]
    roles = {label: _role(reader, role) for label, role in (("k", info.k), ("v", info.v)) if role is not None}
    arrays = [a for a in info.arrays if a is not None]
    values = sum(r.heads * info.rows * r.dim for r in (info.k, info.v) if r is not None)
    stored = sum(r["bytes"] for r in roles.values()) + sum(reader.tensors[a.tensor].padded for a in arrays)
    sizes = [reader.tensors[a.tensor].bytes // ITEM_BYTES[a.dtype] for a in arrays]
    return {
        "layer": name,
        "class": info.cls,
        "attention": info.attention,
        "window": info.window,
        "rows": info.rows,
        "positions": [list(p) for p in info.positions],
        "values": values + sum(sizes) + sum(i["values"] for i in inner),
        "bytes": stored + sum(i["bytes"] for i in inner),
        **roles,
        "state_arrays": len(arrays),
        "caches": inner,
    }


def _role(reader: Reader, role: Role) -> dict[str, Any]:
    codecs = reader.manifest.codecs
    return {
        "heads": role.heads,
        "dim": role.dim,
        "dtype": role.dtype,
        "rope": role.rope,
        "segments": [{"rows": list(s.rows), "codec": codecs[s.codec].id, "frame": s.frame} for s in role.segments],
        "bytes": sum(reader.tensors[name].padded for s in role.segments for name in s.tensors.values()),
    }


def as_text(data: dict[str, Any]) -> str:
    """The report as text, equal layers on one line."""
    model = data["model"]
    tokens = "unknown token ids" if data["tokens"] is None else f"{data['tokens']} token ids"
    share = percent(data["file_bytes"], data["fp16_bytes"])
    lines = [
        f"{data['path']}: {data['file_bytes']:,} bytes ({data['header_bytes']:,} header), schema {data['schema']}",
        f"model      {model['name']} ({model['architecture']}), weights {_short(model['weights'])}, tokenizer {_short(model['tokenizer'])}",
        f"           {_layers_of(model)}",
        f"tokens     {data['usable_tokens']} usable, {tokens}",
        f"size       {data['bits_per_value'] or 0:.3f} bits a value, header included: {share} of 16 bits",
    ]
    if isinstance(data["origin"], dict):
        adapter = f", adapter {_short(data['origin']['adapter'])}" if "adapter" in data["origin"] else ""
        lines.append(f"origin     computed by {data['origin'].get('name')}, weights {_short(data['origin'].get('weights'))}{adapter}")
    for calibration in data["calibrations"]:
        where = "in the store" if calibration["here"] else "not in the store: import takes --calibration FILE"
        lines.append(f"tables     calibration {calibration['digest']}, {where}")
    for rope in data["ropes"]:
        what = f"base {rope['base']:g}" if rope["base"] is not None else f"{len(rope['periods'])} periods"
        factors = f"scale {rope['scale']:g}, magnitude {rope['magnitude']:g}"
        lines.append(f"rope       {rope['kind']}, {rope['dims']} dims, {rope['pairing']}, {what}, {factors}")
    problems = data["rope_problems"]
    for name, problem in problems.items() if isinstance(problems, dict) else ():
        lines.append(f"rope       {name}: {problem}")
    lines += _grouped(data["layers"])
    for given in data["layer_inputs"]:
        codecs = "+".join(segment["codec"] for segment in given["segments"])
        width = given["heads"] * given["dim"]
        lines.append(f"input      of layer {given['layer']}, {width} values a token, {codecs}, {given['bytes']:,} bytes")
    lines += [f"quality    {quality_line(step)}" for step in data["quality"]]
    return "\n".join(map(printable, lines))


def _short(digest: Any) -> str:
    return "unknown" if digest is None else str(digest)[:12]


def _grouped(layers: list[dict[str, Any]]) -> list[str]:
    texts = [(layer["layer"], _layer_text(layer)) for layer in layers]
    lines, start = [], 0
    for i in range(1, len(texts) + 1):
        if i == len(texts) or texts[i][1] != texts[start][1]:
            first, last = texts[start][0], texts[i - 1][0]
            lines.append(f"layer {first if first == last else f'{first}-{last}':<5}{texts[start][1]}")
            start = i
    return lines


def _layer_text(layer: dict[str, Any]) -> str:
    if layer["caches"]:
        return "; ".join(_layer_text(inner).strip() for inner in layer["caches"])
    window = f" window {layer['window']}" if layer["window"] else ""
    parts = [f"{layer['class']} ({layer['attention']}{window}), {layer['rows']} rows"]
    for role in ("k", "v"):
        if role in layer:
            r = layer[role]
            codes = (
                "+".join(f"{s['codec']}[{s['rows'][1] - s['rows'][0]}]{'' if s['frame'] == 'post' else ' pre'}" for s in r["segments"])
                or "empty"
            )
            parts.append(f"{role.upper()} {r['heads']}x{r['dim']} {r['dtype']} {codes}")
    if layer["state_arrays"]:
        parts.append(f"{layer['state_arrays']} state arrays")
    return ", ".join(parts)
