"""Small kvtool files for the container tests, and a second reader and sealer written from SPEC.md alone."""

import json
from dataclasses import replace

import blake3
import numpy as np
import zstandard

from formats.container import TensorPlan
from formats.manifest import CacheInfo, CodecInfo, LayerInput, Manifest, ModelInfo, Role, Segment, StateArray, Tokens

PREFIX = b'{"__metadata__":{"format":"kvtool","header_blake3":"'
HALF = {"kind": "default", "dims": 4, "pairing": "half", "base": 10000.0, "scale": 1.0, "periods": None, "magnitude": 1.0, "first": 0}
TABLE = {
    "kind": "llama3",
    "dims": 4,
    "pairing": "interleaved",
    "base": None,
    "scale": 1.0,
    "periods": [6.25, None],
    "magnitude": 1.5,
    "first": 0,
}
NUMPY = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "BOOL": "?"} | {f"{k}{8 * n}": f"<{k.lower()}{n}" for k in "UI" for n in (1, 2, 4, 8)}


def small_arrays() -> dict[str, tuple[str, np.ndarray]]:
    """name -> (dtype, array): every width, a scalar, an empty array, one that compresses and bf16 with NaN and infinity."""
    rng = np.random.default_rng(7)
    return {
        "layers.0.k.0.x": ("F16", rng.standard_normal((2, 5, 4)).astype(np.float16)),
        "layers.0.v.0.x": ("BF16", np.array([0x7FC0, 0xFF80, 0x0001, 0x8000, *range(3, 65536, 1821)], np.uint16).reshape(2, 5, 4)),
        "layers.1.k.0.codes": ("U8", rng.integers(0, 256, (2, 3, 2), dtype=np.uint8)),
        "layers.1.k.0.scales": ("F32", rng.standard_normal((2, 3, 1)).astype(np.float32)),
        "layers.1.k.1.x": ("F16", np.zeros((2, 250, 4), np.float16)),
        "layers.2.a.0": ("I32", np.array(-5, np.int32)),
        "layers.2.a.1": ("F32", np.zeros((0, 3), np.float32)),
        "layers.2.a.2": ("BOOL", np.array([True, False, True])),
        "layers.3.0.a.0": ("I8", np.array([-128, -1, 0, 1, 127], np.int8)),
        "layers.2.a.3": ("U32", rng.integers(0, 2**32, 17, dtype=np.uint32)),
    }


def small_manifest() -> Manifest:
    """A manifest that uses every field, for `small_arrays`."""
    raw, coded = CodecInfo("raw"), CodecInfo("scalar", {"bits": 8, "codebook": [[0.1, -2.5e-7], [1e300, 3]], "name": "ü"})
    full = CacheInfo(
        cls="KVCache", attention="full", window=None, offset=5, positions=((0, 5),),
        k=Role(2, 4, "F16", 0, (Segment((0, 5), 0, "post", {"x": "layers.0.k.0.x"}),)),
        v=Role(2, 4, "BF16", None, (Segment((0, 5), 0, "post", {"x": "layers.0.v.0.x"}),)),
    )  # fmt: skip
    sliding = CacheInfo(
        cls="RotatingKVCache", attention="sliding", window=256, offset=300, positions=((0, 3), (50, 300)),
        params={"max_size": 256, "keep": 3, "ring": 3},
        k=Role(2, 4, "F16", 1, (
            Segment((0, 3), 1, "pre", {"codes": "layers.1.k.0.codes", "scales": "layers.1.k.0.scales"}),
            Segment((3, 253), 0, "post", {"x": "layers.1.k.1.x"}),
        )),
    )  # fmt: skip
    arrays = (
        StateArray("I32", (), "layers.2.a.0"), None, StateArray("F32", (0, 3), "layers.2.a.1"),
        StateArray("BOOL", (3,), "layers.2.a.2"), StateArray("U32", (17,), "layers.2.a.3"),
    )  # fmt: skip
    state = CacheInfo(cls="ArraysCache", attention="state", window=None, offset=300, positions=(), arrays=arrays)
    inner = replace(state, arrays=(StateArray("I8", (5,), "layers.3.0.a.0"),))
    empty = CacheInfo(cls="KVCache", attention="full", window=None, offset=0, positions=())
    return Manifest(
        producer={"kvtool": "0.1.0", "mlx": "0.32.4"},
        model=ModelInfo("tiny", "llama", "ab" * 32, None, "F16"),
        tokens=Tokens.of([1, 2, 3, 2**31 - 1, 0, 9]),
        length=5,
        codecs=(raw, coded),
        ropes=(HALF, TABLE),
        layers=(full, sliding, state, CacheInfo("CacheList", "list", None, 300, (), caches=(inner, empty))),
        quality=({"step": "encode", "kl": 0.001},),
        extra={"note": 'quotes " and \\ and \u2028'},
    )


def plans(arrays: dict[str, tuple[str, np.ndarray]]) -> list[TensorPlan]:
    return [TensorPlan(name, dtype, array.shape, lambda a=array: a) for name, (dtype, array) in arrays.items()]


def tiny_manifest(tokens: bool = True) -> Manifest:
    """The smallest useful manifest: one row of keys in the tensor "k"."""
    role = Role(1, 4, "F16", None, (Segment((0, 1), 0, "post", {"x": "k"}),))
    layer = CacheInfo("KVCache", "full", None, 1, ((0, 1),), role)
    return Manifest(ModelInfo("m", "a"), 1, (layer,), (CodecInfo("raw"),), tokens=Tokens.of([7]) if tokens else None)


def tiny_plans() -> list[TensorPlan]:
    return [TensorPlan("k", "F16", (1, 1, 4), lambda: np.arange(4, dtype=np.float16).reshape(1, 1, 4))]


def identity_manifest() -> Manifest:
    """`tiny_manifest` of a model whose identity is known in all its layers."""
    model = ModelInfo(
        name="m",
        architecture="a",
        weights="01" * 32,
        tokenizer="23" * 32,
        dtype="float32",
        identity=2,
        adapter="45" * 32,
        quantisation={"summary": "affine 4 bits in groups of 64: 9 modules", "blake3": "67" * 32},
        tokenizer_state="89" * 32,
        chat_template=None,
        config={"rms_norm_eps": 1e-05, "layer_types": ["full_attention"], "rope_scaling.factor": 2, "inner.limit": "inf"},
        sketch={"of": "ab" * 32, "dtype": "float16", "values": "AAAA"},
    )
    return replace(tiny_manifest(), model=model, requires=("adapter",))


def inputs_manifest() -> Manifest:
    """The tiny manifest with what entered its layer, in the tensor "x"."""
    rows = Role(2, 3, "F32", None, (Segment((0, 1), 0, "post", {"data": "x"}),))
    return replace(tiny_manifest(), layer_inputs=(LayerInput(0, rows),))


def inputs_plans() -> list[TensorPlan]:
    return [*tiny_plans(), TensorPlan("x", "F32", (2, 1, 3), lambda: np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 1, 3))]


def split(data: bytes) -> tuple[dict, dict, bytes]:
    """(outer JSON, manifest JSON, tensor data) of a file."""
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    return outer, json.loads(outer["__metadata__"]["kvtool"]), data[8 + length :]


def seal(text: str | bytes, data: bytes, *, align: bool = True) -> bytes:
    """A file of this header JSON, which must begin as kvtool's does, with right length, padding and digest."""
    body = text.encode() if isinstance(text, str) else text
    assert body.startswith(PREFIX)
    if align:
        body += b" " * (-(8 + len(body)) % 64)
    at = len(PREFIX)
    body = body[:at] + b"0" * 64 + body[at + 64 :]
    raw = len(body).to_bytes(8, "little") + body
    digest = blake3.blake3(raw).hexdigest().encode()
    return raw[: 8 + at] + digest + raw[8 + at + 64 :] + data


def outer_text(outer: dict, manifest: dict | str) -> str:
    """Header JSON text with kvtool's beginning, from an outer object and a manifest (or its text)."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest, separators=(",", ":"))
    rest = {name: value for name, value in outer.items() if name != "__metadata__"}
    tail = json.dumps(rest, separators=(",", ":"))[1:-1]
    return PREFIX.decode() + "0" * 64 + '","kvtool":' + json.dumps(text) + "}" + ("," + tail if tail else "") + "}"


def forge(data: bytes, outer: dict | None = None, manifest: dict | str | None = None, tail: bytes | None = None) -> bytes:
    """The file with parts replaced and its header sealed again, so that only the deeper checks can object."""
    old_outer, old_manifest, old_tail = split(data)
    text = outer_text(old_outer if outer is None else outer, old_manifest if manifest is None else manifest)
    return seal(text, old_tail if tail is None else tail)


def plain_read(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Manifest and arrays by the letter of SPEC.md, asserting every rule on the way."""
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    header, tail = data[8 : 8 + length], data[8 + length :]
    assert header.startswith(PREFIX)
    at = 8 + len(PREFIX)
    assert blake3.blake3(data[:at] + b"0" * 64 + data[at + 64 : 8 + length]).hexdigest().encode() == data[at : at + 64]
    outer = json.loads(header)
    manifest = json.loads(outer.pop("__metadata__")["kvtool"])
    tensors, arrays, end = manifest["tensors"], {}, 0
    assert set(tensors) == set(outer)
    for name, entry in outer.items():
        begin, stop = entry["data_offsets"]
        assert begin == end and begin % 64 == 0 and stop % 64 == 0
        end = stop
        info, stored = tensors[name], tail[begin:stop]
        assert blake3.blake3(stored).hexdigest() == info["blake3"]
        payload = stored[: info["stored"]]
        assert stored == payload.ljust(-(-len(payload) // 64) * 64, b"\0")
        plain = zstandard.ZstdDecompressor().decompress(payload) if info["encoding"] == "zstd" else payload
        assert len(plain) == info["bytes"]
        arrays[name] = np.frombuffer(plain, NUMPY[info["dtype"]]).reshape(info["shape"])
    assert end == len(tail)
    return manifest, arrays
