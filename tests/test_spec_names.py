"""SPEC.md names every codec, codec parameter, part and `extra` member that kvtool can write, and what it says of mlx-affine decodes."""

import ast
import math
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import formats.header
import kvtool
from formats.bitpack import unpack
from formats.container import Reader
from formats.errors import IncompatibleError, ManifestError
from formats.examine import MAX_EXPANSION
from kvtool.encoding import MLX_AFFINE
from tests import tcz_cases
from tests.golden import make_additive as additive
from tests.library import rewrite, saved, tiny
from tests.tc_cases import bound
from veloxquant_mlx.codecs import CODECS, parse_codec

SPEC = (Path(formats.header.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
SOURCES = sorted(Path(kvtool.__file__).parent.rglob("*.py"))
SPECS = ("raw", "rvq-4", "rvq-2+2", "k=rabitq,v=rvq-4", "rabitq-4", "affine-4", "commvq-2", "commvq-2:product", "vecinfer-2", "qjl")


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
    written = [codec for plan in map(parse_codec, SPECS) for codec in (plan.k, plan.v)] + [*bound("tc-2"), *bound("tc-2:carry")]
    written += tcz_cases.codecs()[0].values()
    written += [CODECS["additive"].from_params(additive.read(additive.HERE / f"{name}.npz")[0]) for name in additive.CASES]
    for codec in written:
        for part in codec.layout((2, 3, getattr(codec, "dim", None) or 64), mx.float32):
            assert f"`{part}`" in table[codec.id], (codec.id, part)
        assert set(codec.to_params()) <= rows(codecs), codec.id
    assert {codec.id for codec in written} == set(CODECS)
    for name in ("weight", "scales", "biases"):
        assert f"`{name}`" in table[MLX_AFFINE]
    assert {"bits", "group_size"} <= rows(section("### mlx-affine"))


def test_no_codec_decodes_beyond_the_stated_limit() -> None:
    """float32 values over the bytes of their parts: the limits in SPEC.md hold for the fewest bits each codec takes."""
    shape = (2, 5000, 1024)
    values = 4 * math.prod(shape)
    specs = ("rabitq", "rvq-1", "k=affine-1:group=1024,v=affine-1:token:group=1024", "raw", "vecinfer-1", "qjl")
    plans = [parse_codec(spec) for spec in specs]
    largest = max(values / codec.nbytes(shape, mx.float32) for plan in plans for codec in (plan.k, plan.v))
    assert 30 < largest < 32
    limits = section("## Limits")
    assert "32-fold" in limits and f"{32 * MAX_EXPANSION:,}".replace(",", " ") in limits


def test_a_model_refuses_rows_beyond_its_tokens_before_a_byte_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds the memory of a load: the header's H, D and S against the model and the number of token ids."""
    model = tiny("llama")
    path = saved(model, tmp_path / "a.kv", 12, codec="rvq-4,sink=0,recent=0")

    def longer(manifest: dict) -> None:
        for layer in manifest["layers"]:
            layer["positions"], layer["offset"] = [[0, 1 << 20]], 1 << 20
            for role in ("k", "v"):
                layer[role]["segments"][0]["rows"] = [0, 1 << 20]

    def wider(manifest: dict) -> None:
        for layer in manifest["layers"]:
            layer["k"]["heads"] = layer["v"]["heads"] = 1 << 20

    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tensor was read")

    files = [
        (rewrite(path, tmp_path / f"{edit.__name__}.kv", edit), error)
        for edit, error in ((longer, ManifestError), (wider, IncompatibleError))
    ]
    monkeypatch.setattr(Reader, "array", read)
    for file, error in files:
        with pytest.raises(error):
            kvtool.load(file, model)


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
