"""Files that pass the container's checks but lie to the decoder: a KVError every time, never a crash, a hang or a wrong cache."""

import contextlib
import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtool
from formats.container import open_container
from formats.errors import KVError
from formats.manifest import to_json
from kvtool.compare import layer_differences
from kvtool.states import CacheState, Quantized
from tests.library import fill as filled
from tests.library import ids, rewrite, saved, tiny, twin
from veloxquant_mlx.caches.coded import CodedKVCache

COUNT = 24
LOSSY = "rvq-2+2,frame=pre,sink=2,recent=0"
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """Kind -> (family of its model, file): every kind of layer and codec."""
    root = tmp_path_factory.mktemp("sources")
    kinds = {
        "raw": ("llama", "raw"),
        "rvq": ("llama", LOSSY),
        "rabitq": ("llama", "rabitq,sink=0,recent=0"),
        "plain": ("llama", "rvq-4:nocenter,sink=0,recent=0"),
        "sliding": ("gemma3_text", LOSSY),
        "chunked": ("llama4", "raw"),
        "state": ("lfm2", "rvq-4,sink=0,recent=0"),
        "list": ("falcon_h1", "raw"),
    }
    found = {kind: (family, saved(tiny(family), root / f"{kind}.kv", COUNT, codec=codec)) for kind, (family, codec) in kinds.items()}
    model = tiny("qwen3")
    cache = [c.to_quantized(group_size=32, bits=4) for c in filled(model, ids(COUNT))]
    kvtool.save(kvtool.capture(model, cache=cache, tokens=ids(COUNT)), root / "affine.kv")
    return found | {"affine": ("qwen3", root / "affine.kv")}


def arrays_of(state: CacheState) -> Iterator[mx.array]:
    for inner in state.caches:
        yield from arrays_of(inner)
    for value in (state.k, state.v, *state.arrays):
        if isinstance(value, Quantized):
            yield from value.parts
        elif value is not None:
            yield value


def use(path: Path, family: str, out: Path) -> list[str]:
    """Everything that reads a file; the names of the uses that went through."""
    done = []
    uses: dict[str, Callable[[], Any]] = {
        "load": lambda: kvtool.load(path, tiny(family)),
        "load anyway": lambda: kvtool.load(path, tiny(family), allow_mismatch=True),
        "decode": lambda: decode(path),
        "shift": lambda: kvtool.recode(path, out, shift=3),
        "theta": lambda: kvtool.recode(path, out, rope_theta=5e5),
        "transcode": lambda: kvtool.recode(path, out, codec="rvq-4,sink=0,recent=0"),
        "to model": lambda: kvtool.recode(path, out, to_model=tiny(family)),
        "compare": lambda: compare(path),
    }
    for name, action in uses.items():
        try:
            action()
        except KVError as error:
            assert str(error)
        except ValueError as error:
            # The codec's own words for values that it cannot take; nothing else may come as a ValueError.
            assert name == "transcode" and "NaN, infinite" in str(error)
        else:
            done.append(name)
    assert all(entry in ("out.kv", "hostile.kv") for entry in os.listdir(out.parent))
    return done


def decode(path: Path) -> None:
    with kvtool.open(path) as archive:
        for i in range(len(archive.manifest.layers)):
            mx.eval(list(arrays_of(archive.state(i))))


def compare(path: Path) -> None:
    with open_container(path) as reader:
        layer_differences(reader, reader)


def role(index: int, name: str = "k", **fields: Any) -> Edit:
    return lambda m: m["layers"][index][name].update(fields)


def segment(index: int, name: str = "k", at: int = 0, **fields: Any) -> Edit:
    return lambda m: m["layers"][index][name]["segments"][at].update(fields)


def codec(at: int, **fields: Any) -> Edit:
    return lambda m: m["codecs"][at].update(fields)


def params(at: int, **fields: Any) -> Edit:
    return lambda m: m["codecs"][at]["params"].update(fields)


def rope(**fields: Any) -> Edit:
    return lambda m: m["ropes"][0].update(fields)


def chained(*edits: Edit) -> Edit:
    def edit(manifest: dict[str, Any]) -> None:
        for one in edits:
            one(manifest)

    return edit


# Index of the lossy codec in each file's table; segment 0 of "rvq" and "sliding" holds the exact rows.
LIES: list[tuple[str, str, Edit]] = [
    ("unknown codec", "raw", codec(0, id="zip")),
    ("codec id of an attribute", "raw", codec(0, id="__init__")),
    ("codec id empty", "raw", codec(0, id="")),
    ("raw rows as rvq", "raw", codec(0, id="rvq")),
    ("raw rows as affine", "raw", codec(0, id="mlx-affine")),
    ("raw rows as affine with parameters", "raw", codec(0, id="mlx-affine", params={"bits": 4, "group_size": 32})),
    ("rvq rows as raw", "rvq", codec(1, id="raw")),
    ("rvq rows as rabitq", "rvq", codec(1, id="rabitq")),
    ("no parameters", "rvq", codec(1, params={})),
    ("rotation unknown", "rvq", params(1, rotation="identity")),
    ("rotation a list", "rvq", params(1, rotation=["hartley-sylvester"])),
    ("seed a float", "rvq", params(1, seed=1.0)),
    ("seed negative", "rvq", params(1, seed=-1)),
    ("seed true", "rvq", params(1, seed=True)),
    ("scale unknown", "rvq", params(1, scale="both")),
    ("scale a list", "rvq", params(1, scale=["ls"])),
    ("center a string", "rvq", params(1, center="yes")),
    ("center without mean", "plain", params(0, center=True)),
    ("mean without center", "rvq", params(1, center=False)),
    ("codebooks a number", "rvq", params(1, codebooks=3)),
    ("codebooks empty", "rvq", params(1, codebooks=[], bits=[])),
    ("codebooks three", "rvq", params(1, codebooks=[[0.0, 1.0]] * 3, bits=[1, 1, 1])),
    ("codebook too short", "rvq", params(1, codebooks=[[0.0, 1.0, 2.0], [0.0, 1.0]], bits=[2, 1])),
    ("codebook of 2**16", "rvq", params(1, codebooks=[[float(i) for i in range(1 << 16)]], bits=[16])),
    ("codebook of other bits", "rvq", params(1, codebooks=[[0.0, 1.0], [0.0, 1.0]], bits=[1, 1])),
    ("codebook descending", "rvq", params(1, codebooks=[[3.0, 2.0, 1.0, 0.0]] * 2)),
    ("codebook of strings", "rvq", params(1, codebooks=[["a", "b", "c", "d"]] * 2)),
    ("codebook with null", "rvq", params(1, codebooks=[[None, 0.0, 1.0, 2.0]] * 2)),
    ("codebook beyond float32", "rvq", params(1, codebooks=[[0.0, 1.0, 2.0, 1e300]] * 2)),
    ("codebook of huge integers", "rvq", params(1, codebooks=[[0, 1, 2, 10**18]] * 2, bits=[2, 10**18])),
    ("bits a string", "rvq", params(1, bits="2+2")),
    ("part missing", "rvq", lambda m: m["layers"][0]["k"]["segments"][1]["tensors"].pop("scale")),
    ("part too many", "rvq", lambda m: m["layers"][0]["k"]["segments"][1]["tensors"].update(more="0.v.0.data")),
    ("parts exchanged", "rvq", lambda m: swap(m["layers"][0]["k"]["segments"][1]["tensors"], "codes1", "scale")),
    ("no parts", "raw", segment(0, tensors={})),
    ("part of another name", "raw", segment(0, tensors={"datum": "0.k.0.data"})),
    ("rows of another segment", "rvq", lambda m: m["layers"][0]["k"]["segments"][0]["tensors"].update(data="1.k.1.scale")),
    ("codec of another segment", "rvq", segment(0, at=0, codec=1)),
    ("frame pre without RoPE", "rvq", role(0, rope=None)),
    ("frame pre of values", "rvq", segment(0, "v", 1, frame="pre")),
    ("frame pre of a state model's values", "state", lambda m: m["layers"][1]["v"]["segments"][0].update(frame="pre")),
    ("one tensor for K and V", "raw", lambda m: m["layers"][0]["v"]["segments"][0]["tensors"].update(data="0.k.0.data")),
    ("one tensor for two layers", "raw", lambda m: m["layers"].__setitem__(1, m["layers"][0])),
    ("dims beyond the head", "rvq", rope(dims=16)),
    ("dims of 2**40", "rvq", rope(dims=1 << 40)),
    ("dims of 2**40, unused RoPE", "raw", lambda m: m["ropes"].append({**m["ropes"][0], "dims": 1 << 40})),
    ("first beyond the head", "rvq", rope(first=4)),
    ("first negative", "rvq", rope(first=-2)),
    ("first a string", "rvq", rope(first="x")),
    ("first null", "rvq", rope(first=None)),
    ("first a list", "rvq", rope(first=[1])),
    ("first huge", "rvq", rope(first=10**18)),
    ("base zero", "rvq", rope(base=0)),
    ("base negative", "rvq", rope(base=-10000.0)),
    ("base tiny", "rvq", rope(base=1e-300)),
    ("base huge", "rvq", rope(base=1e308)),
    ("base below one", "rvq", rope(base=1e-30)),
    ("scale huge", "rvq", rope(scale=1e308)),
    ("scale zero", "rvq", rope(scale=0)),
    ("magnitude zero", "rvq", rope(magnitude=0)),
    ("magnitude negative", "rvq", rope(magnitude=-1)),
    ("magnitude tiny", "rvq", rope(magnitude=1e-320)),
    ("magnitude huge", "rvq", rope(magnitude=1e308)),
    ("periods zero", "rvq", rope(base=None, periods=[0.0] * 4)),
    ("periods tiny", "rvq", rope(base=None, periods=[1e-320] * 4)),
    ("periods never", "rvq", rope(base=None, periods=[None] * 4)),
    ("kind empty", "rvq", rope(kind="")),
    ("heads zero", "raw", role(0, heads=0)),
    ("heads 2**31", "raw", role(0, heads=1 << 31)),
    ("dim zero", "raw", role(0, dim=0)),
    ("dim odd", "rvq", role(0, dim=7)),
    ("dim 2**31", "rvq", role(0, dim=1 << 31)),
    ("dtype narrower", "raw", role(0, dtype="F16")),
    ("dtype of the other kind", "rvq", role(0, dtype="BF16")),
    ("no segments", "raw", lambda m: m["layers"][0].update(positions=[]) or [m["layers"][0][r].update(segments=[]) for r in "kv"]),
    ("K without V", "raw", lambda m: m["layers"][0].update(v=None)),
    ("V without K", "raw", lambda m: m["layers"][0].update(k=None)),
    ("list in a list", "raw", lambda m: m["layers"][0].update(caches=[copy.deepcopy(m["layers"][1])])),
    ("list of rows", "list", lambda m: m["layers"][0].update(positions=[[0, 3]])),
    ("list empty", "list", lambda m: m["layers"][0].update(caches=[])),
    ("state dtype", "state", lambda m: m["layers"][0]["arrays"][0].update(dtype="BF16")),
    ("state shape", "state", lambda m: m["layers"][0]["arrays"][0].update(shape=[64])),
    ("state of another tensor", "state", lambda m: m["layers"][0]["arrays"][0].update(tensor="1.k.0.scale")),
    ("state beside rows", "raw", lambda m: m["layers"][0].update(arrays=[{"dtype": "F32", "shape": [2, 24, 8], "tensor": "0.k.0.data"}])),
    ("bits of affine", "affine", params(0, bits=8)),
    ("bits 7 of affine", "affine", params(0, bits=7)),
    ("bits 1 of affine", "affine", params(0, bits=1)),
    ("bits a float", "affine", params(0, bits=4.0)),
    ("bits a list", "affine", params(0, bits=[4])),
    ("group size of affine", "affine", params(0, group_size=64)),
    ("group size zero", "affine", params(0, group_size=0)),
    ("group size negative", "affine", params(0, group_size=-32)),
    ("group size a string", "affine", params(0, group_size="32")),
    ("no parameters of affine", "affine", codec(0, params={})),
    ("class bits", "affine", lambda m: m["layers"][0]["params"].update(bits=8)),
    ("class group size", "affine", lambda m: m["layers"][0]["params"].update(group_size=64)),
    ("class group size missing", "affine", lambda m: m["layers"][0]["params"].pop("group_size")),
    ("affine in a plain class", "affine", lambda m: m["layers"][0].update(cls="KVCache", params={})),
    ("affine weights exchanged", "affine", lambda m: swap(m["layers"][0]["k"]["segments"][0]["tensors"], "weight", "scales")),
    ("affine biases missing", "affine", lambda m: m["layers"][0]["k"]["segments"][0]["tensors"].pop("biases")),
    ("affine before RoPE", "affine", segment(0, frame="pre")),
    ("positions far away", "rvq", lambda m: m["layers"][0].update(positions=[[(1 << 62), (1 << 62) + COUNT]])),
    ("positions overlapping", "rvq", lambda m: m["layers"][0].update(positions=[[0, 12], [0, 12]])),
    ("offset far away", "rvq", lambda m: m["layers"][0].update(offset=(1 << 63) - 1)),
    ("offset zero", "rvq", lambda m: m["layers"][0].update(offset=0)),
    ("length zero", "rvq", lambda m: m.update(length=0)),
    ("length one more", "rvq", lambda m: m.update(tokens=None, length=COUNT + 1)),
    ("ring at the end", "sliding", lambda m: m["layers"][0]["params"].update(ring=0)),
    ("keep beyond the window", "sliding", lambda m: m["layers"][0]["params"].update(keep=99)),
    ("max_size zero", "sliding", lambda m: m["layers"][0]["params"].update(max_size=0)),
    ("window one", "sliding", lambda m: m["layers"][0].update(window=1) or m["layers"][0]["params"].update(max_size=1)),
    ("chunk of one", "chunked", lambda m: m["layers"][0].update(window=1) or m["layers"][0]["params"].update(chunk_size=1)),
    ("chunk offset", "chunked", lambda m: m["layers"][0].update(offset=COUNT + 7)),
]
EXTRAS: list[tuple[str, dict[str, Any]]] = [
    ("rope_problems a list", {"rope_problems": ["0.k"]}),
    ("rope_problems a string", {"rope_problems": "0.k"}),
    ("rope_problems null", {"rope_problems": None}),
    ("rope_problems of numbers", {"rope_problems": {"0.k": 3}}),
    ("rope_problems of null", {"rope_problems": {"0.k": None}}),
    ("origin a number", {"origin": 3}),
]


def swap(table: dict[str, Any], a: str, b: str) -> None:
    table[a], table[b] = table[b], table[a]


@pytest.mark.parametrize(("kind", "edit"), [x[1:] for x in LIES], ids=[x[0] for x in LIES])
def test_a_lie_never_becomes_a_cache(kind: str, edit: Edit, sources: dict, tmp_path: Path) -> None:
    family, source = sources[kind]
    with open_container(source) as reader:
        before = to_json(reader.manifest)
    try:
        path = rewrite(source, tmp_path / "hostile.kv", edit)
    except (KVError, ValueError):
        # The container refuses to write it, as it would refuse to read it.
        return
    with open_container(path) as reader:
        # As text: 1, 1.0 and true are equal to Python alone.
        assert json.dumps(to_json(reader.manifest)) != json.dumps(before)
    done = use(path, family, tmp_path / "out.kv")
    if not harmless(path, source, before, family):
        assert "load" not in done and "load anyway" not in done


def harmless(path: Path, source: Path, before: dict, family: str) -> bool:
    """Whether the file still decodes to exactly the caches of the source (an unused table entry, a name, a wider dtype)."""
    try:
        left, right = (kvtool.load(p, tiny(family), allow_mismatch=True).cache for p in (path, source))
    except KVError:
        return False
    a, b = ([x for c in cache for x in leaves(c)] for cache in (left, right))
    return len(a) == len(b) and all(mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


def leaves(cache: Any) -> list[mx.array]:
    if hasattr(cache, "caches"):
        return [x for c in cache.caches for x in leaves(c)]
    if isinstance(cache, CodedKVCache):
        # Decoded: two files may say the same rows in different words.
        return [x for x in cache.keys_and_values() if x is not None]
    flat: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, list | tuple):
            for v in value:
                walk(v)
        elif value is not None:
            flat.append(value if isinstance(value, mx.array) else mx.array(value))

    walk(cache.state)
    return flat


@pytest.mark.parametrize("extra", [e[1] for e in EXTRAS], ids=[e[0] for e in EXTRAS])
def test_odd_extras_raise_nothing_else(extra: dict, sources: dict, tmp_path: Path) -> None:
    path = rewrite(sources["raw"][1], tmp_path / "hostile.kv", lambda m: m["extra"].update(extra))
    use(path, "llama", tmp_path / "out.kv")


def test_scales_that_are_not_numbers(sources: dict, tmp_path: Path) -> None:
    family, source = sources["rvq"]
    with open_container(source) as reader:
        scale = reader.array("0.k.1.scale").copy()
    scale[0, 3] = 0x7FC0
    path = rewrite(source, tmp_path / "hostile.kv", lambda m: None, {"0.k.1.scale": ("BF16", scale)})
    done = use(path, family, tmp_path / "out.kv")
    # Whoever can seal a file can write any values; what matters is that coding them again says so.
    assert "transcode" not in done


def test_a_large_odd_head_does_not_make_a_large_matrix(tmp_path: Path) -> None:
    # An odd head_dim D asks for a D x D rotation: 30001 would take 7 GB for a file of a few kilobytes.
    def widen(m: dict[str, Any]) -> None:
        m["layers"][0]["k"].update(dim=30001)

    source = saved(tiny("llama"), tmp_path / "hostile.kv", 8, codec="rvq-1,frame=post,sink=0,recent=0")
    tensors = {
        "0.k.0.codes": ("U8", np.zeros((2, 8, 3751), np.uint8)),
        "0.k.0.mean": ("BF16", np.zeros((2, 30001), np.uint16)),
    }
    path = rewrite(source, source, widen, tensors)
    assert use(path, "llama", tmp_path / "out.kv") == []


HUGE = 1 << 20  # rows: 64 MB of keys in float32


@pytest.mark.parametrize("lie", ["rows", "heads", "dim"])
@pytest.mark.parametrize("codec", ["rvq-2+2", "raw"])
def test_what_the_tensors_do_not_hold_is_not_allocated(lie: str, codec: str, tmp_path: Path) -> None:
    """Exact rows around coded ones are decoded into one array; its size is the manifest's word, which each segment has to bear out."""
    source = saved(tiny("llama"), tmp_path / "source.kv", COUNT, codec=f"k={codec},v=rvq-2+2,frame=pre,sink=2,recent=8")

    def edit(m: dict[str, Any]) -> None:
        for about in m["layers"]:
            for role in (about["k"], about["v"]):
                if lie == "rows":
                    # The coded segment is said to be longer: those after it are as they were.
                    cut = min(1, len(role["segments"]) - 1)
                    for i, segment in enumerate(role["segments"]):
                        segment["rows"] = [r + (HUGE if i > cut or (i == cut and at) else 0) for at, r in enumerate(segment["rows"])]
                else:
                    role.update({lie: HUGE})
            if lie == "rows":
                about.update(positions=[[0, COUNT + HUGE]], offset=COUNT + HUGE)

    path = rewrite(source, tmp_path / "hostile.kv", edit)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with kvtool.open(path) as archive:
        for name in ("0", "1"):
            for role in "kv":
                with pytest.raises(KVError):
                    archive.decoder.role(name, role)
        with pytest.raises(KVError):
            kvtool.recode(path, tmp_path / "out.kv", codec="rvq-4")
    assert mx.get_peak_memory() - before < 1 << 20


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([1 << 31, 1 << 32, 1 << 53, 1 << 62, (1 << 63) - 1, -(1 << 62)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["", "raw", "rvq", "mlx-affine", "pre", "post", "F16", "BF16", "KVCache", "RotatingKVCache", "full", "sliding", "0.k.0.data"]
    ),
    st.just([]),
    st.just({}),
    st.lists(st.integers(0, 40), max_size=3),
)


def paths(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Every place in a JSON value but those that the container vouches for."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            if at or key in ("length", "codecs", "ropes", "layers", "extra"):
                yield from paths(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value[:40]):
            yield from paths(inner, (*at, i))


@given(data=st.data(), kind=st.sampled_from(["raw", "rvq", "rabitq", "sliding", "chunked", "state", "list", "affine"]))
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_random_lies(data: st.DataObject, kind: str, sources: dict, tmp_path: Path) -> None:
    family, source = sources[kind]

    def edit(manifest: dict[str, Any]) -> None:
        for _ in range(data.draw(st.integers(1, 2))):
            place = data.draw(st.sampled_from(list(paths(manifest))))
            inner = manifest
            for key in place[:-1]:
                inner = inner[key]
            if data.draw(st.booleans()):
                inner[place[-1]] = data.draw(VALUES)
            elif isinstance(inner, dict):
                del inner[place[-1]]
            else:
                inner.insert(place[-1], copy.deepcopy(inner[place[-1]]))

    for name in ("hostile.kv", "out.kv"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp_path / name)
    try:
        path = rewrite(source, tmp_path / "hostile.kv", edit)
    except (KVError, ValueError):
        return
    use(path, family, tmp_path / "out.kv")


def test_twins_of_a_hostile_file_fit_no_other_model(sources: dict, tmp_path: Path) -> None:
    # A lie about the shape that matches another model: the tensors themselves still have the old shape.
    other = twin("llama", num_key_value_heads=4)
    path = rewrite(sources["raw"][1], tmp_path / "hostile.kv", lambda m: [layer[r].update(heads=4) for layer in m["layers"] for r in "kv"])
    with pytest.raises(KVError, match=r"tensor 0\.k\.0\.data is F32 \(2, 24, 8\), but codec raw needs F32 \(4, 24, 8\)"):
        kvtool.load(path, other, allow_mismatch=True)
    assert json.loads(json.dumps(LIES[0][0]))
