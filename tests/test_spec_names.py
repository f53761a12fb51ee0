"""SPEC.md names every codec, codec parameter, part and `extra` member that kvtool can write, and what it says of mlx-affine decodes."""

import ast
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import formats.header
import kvtool
from formats.bitpack import unpack
from kvtool.encoding import MLX_AFFINE
from veloxquant_mlx.codecs import CODECS, parse_codec

SPEC = (Path(formats.header.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
SOURCES = sorted(Path(kvtool.__file__).parent.rglob("*.py"))
SPECS = ("raw", "rvq-4", "rvq-2+2", "k=rabitq,v=rvq-4", "affine-4")


def rows(text: str) -> set[str]:
    """First cells of the tables in a text."""
    return set(re.findall(r"^\| `([^`]+)`(?:, `[^`]+`)* \|", text, re.M))


def section(title: str) -> str:
    """A section of SPEC.md with its subsections' titles left in."""
    _, _, rest = SPEC.partition(f"\n{title}\n")
    assert rest, title
    marks = title.split(" ")[0]
    return re.split(rf"\n#{{1,{len(marks)}}} ", rest)[0]


def test_every_codec_with_its_parts_and_params() -> None:
    codecs = section("## Codecs")
    table = {line.split("`")[1]: line for line in codecs.splitlines() if line.startswith("| `")}
    assert {*CODECS, MLX_AFFINE} <= set(table)
    for plan in map(parse_codec, SPECS):
        for codec in (plan.k, plan.v):
            for part in codec.layout((2, 3, 64), mx.float32):
                assert f"`{part}`" in table[codec.id], (codec.id, part)
            assert set(codec.to_params()) <= rows(codecs), codec.id
    assert {codec.id for plan in map(parse_codec, SPECS) for codec in (plan.k, plan.v)} == set(CODECS)
    for name in ("weight", "scales", "biases"):
        assert f"`{name}`" in table[MLX_AFFINE]
    assert {"bits", "group_size"} <= rows(section("### mlx-affine"))


def test_codec_ids_come_from_the_registry_or_mlx_affine() -> None:
    """A third source of ids would be one that the test above does not see."""
    made = [ast.unparse(call.args[0]) for call in calls("CodecInfo")]
    assert made and {text for text in made if text != "MLX_AFFINE" and not text.endswith("codec.id")} == set()


def test_every_member_of_extra() -> None:
    used: set[str] = set()
    for tree in trees():
        for node in ast.walk(tree):
            # Written: a dict in an argument `extra=`, or in the function that makes one; read: `.extra.get("name")`.
            if (isinstance(node, ast.keyword) and node.arg == "extra") or (isinstance(node, ast.FunctionDef) and node.name == "origin"):
                body: ast.AST = node.value if isinstance(node, ast.keyword) else node.body[-1]
                dicts = [inner for inner in ast.walk(body) if isinstance(inner, ast.Dict)]
                used |= {key.value for inner in dicts for key in inner.keys if isinstance(key, ast.Constant)}
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("extra.get"):
                used.add(ast.literal_eval(node.args[0]))
    assert {"origin", "rope_problems"} <= used
    assert used <= rows(section("## Manifest")), used


def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]


def calls(name: str) -> list[ast.Call]:
    found = (node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [node for node in found if ast.unparse(node.func) == name]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_affine_decodes_as_specified(bits: int, dtype: mx.Dtype) -> None:
    """SPEC.md's formula in NumPy gives MLX's values bit for bit."""
    x = mx.random.normal((2, 5, 128), key=mx.random.key(bits)).astype(dtype)
    weight, scales, biases = mx.quantize(x, group_size=32, bits=bits)
    codes = unpack(np.array(weight).view(np.uint8), bits, 128, "lsb8")
    kind = np.array(scales).dtype
    product = np.repeat(np.array(scales), 32, axis=-1) * codes.astype(kind)
    assert product.dtype == kind
    want = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
    assert np.array_equal(product + np.repeat(np.array(biases), 32, axis=-1), np.array(want))
