"""`kvtool diff`: how two files differ, field by field and tensor by tensor."""

from typing import Any

import click

from formats.container import Reader, open_container
from formats.manifest import to_json
from kvtool.cli._common import emit, json_option

IGNORED = ("producer", "layers")
WIDEST = 120  # characters of a value on a line of text


@click.command("diff")
@click.argument("first", metavar="A.kv", type=click.Path(exists=True, dir_okay=False))
@click.argument("second", metavar="B.kv", type=click.Path(exists=True, dir_okay=False))
@click.option("--values", is_flag=True, help="Decode both and give the difference of keys and values by layer (needs MLX).")
@json_option
@click.pass_context
def command(ctx: click.Context, first: str, second: str, values: bool, as_json: bool) -> None:
    """Say how two files differ: identity, tokens, layers, codecs, and with --values the decoded numbers. Exits with 1 where they differ.

    \b
    Example:
      kvtool diff raw.kv rvq.kv --values
    """
    with open_container(first) as a, open_container(second) as b:
        fields = _fields(to_json(a.manifest), to_json(b.manifest)) + _tensors(a, b)
        layers = _values(a, b) if values else []
    same = not fields and not any(layer["relative_error"] for layer in layers)
    lines = ["no difference"] if same else [f"{f['path']}: {_cut(f['a'])} | {_cut(f['b'])}" for f in fields]
    lines += [f"{entry['name']}: squared difference / energy {entry['relative_error']:.4g}" for entry in layers]
    emit(as_json, {"same": same, "fields": fields, "values": layers}, "\n".join(lines))
    ctx.exit(0 if same else 1)


def _fields(a: Any, b: Any, path: str = "") -> list[dict[str, Any]]:
    """Leaves of two JSON objects that differ, with their path."""
    if a == b:
        return []
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [k for k in sorted({*a, *b}) if path or k not in IGNORED]
        return [entry for key in keys for entry in _fields(a.get(key), b.get(key), f"{path}.{key}" if path else key)]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and len(a) <= 4096 and any(isinstance(x, dict) for x in a):
        return [entry for i, (x, y) in enumerate(zip(a, b, strict=True)) for entry in _fields(x, y, f"{path}[{i}]")]
    return [{"path": path, "a": _brief(a, b), "b": _brief(b, a)}]


def _cut(value: Any) -> str:
    """A value on a line of text; --json has it whole."""
    text = str(value)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}... ({len(text)} characters)"


def _brief(value: Any, other: Any) -> Any:
    if not isinstance(value, list) or not isinstance(other, list):
        return value
    at = next((i for i, (x, y) in enumerate(zip(value, other, strict=False)) if x != y), min(len(value), len(other)))
    return f"{len(value)} entries, first difference at {at}: {value[at] if at < len(value) else 'none'}"


def _tensors(a: Reader, b: Reader) -> list[dict[str, Any]]:
    """What differs in layers and tensors, by name."""
    found = _fields(_layer_table(a), _layer_table(b), "layers")
    for name in sorted({*a.tensors, *b.tensors}):
        x, y = a.tensors.get(name), b.tensors.get(name)
        if x is None or y is None:
            found.append({"path": f"tensors.{name}", "a": "absent" if x is None else "present", "b": "absent" if y is None else "present"})
        elif (x.dtype, x.shape) != (y.dtype, y.shape):
            found.append({"path": f"tensors.{name}", "a": f"{x.dtype} {list(x.shape)}", "b": f"{y.dtype} {list(y.shape)}"})
        elif x.blake3 != y.blake3:
            found.append({"path": f"tensors.{name}", "a": x.blake3[:12], "b": y.blake3[:12]})
    return found


def _layer_table(reader: Reader) -> list[Any]:
    layers: list[Any] = to_json(reader.manifest)["layers"]
    return layers


def _values(a: Reader, b: Reader) -> list[dict[str, Any]]:
    from kvtool.compare import layer_differences

    return layer_differences(a, b)
