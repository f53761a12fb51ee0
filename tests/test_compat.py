"""A file is only ever loaded into the model it is of: each field that differs is refused by name, before a tensor is read."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

import kvtool
from formats.container import Reader, open_container
from formats.errors import IncompatibleError, KVError, ManifestError
from kvtool.compat import joined
from kvtool.identity import weights_digest
from kvtool.identity_tokenizer import TOKENIZER_PROBES, digest_of_tokenizer, tokenizer_digest
from kvtool.model import LoadedModel
from tests.library import ByteTokenizer, equal, fill, ids, loaded, renamed, rewrite, run, saved, tiny, twin
from tests.tiny_random import WINDOW, build

GO_ON = (1, 3, 1)


@pytest.fixture(autouse=True)
def _reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were read, in order."""
    seen: list[str] = []
    plain = Reader.array

    def array(self: Reader, name: str, *, verify: bool = True) -> np.ndarray:
        seen.append(name)
        return plain(self, name, verify=verify)

    monkeypatch.setattr(Reader, "array", array)
    return seen


def refused(
    path: Path, model: LoadedModel, reads: list[str], match: str, kind: type[KVError] = IncompatibleError, **options: Any
) -> KVError:
    """Loading is refused with this text, and nothing was decoded for it."""
    reads.clear()
    with pytest.raises(kind, match=match) as caught:
        kvtool.load(path, model, **options)
    assert reads == [] and str(path) in str(caught.value)
    if kind is IncompatibleError:
        assert caught.value.exit_code == 5 and caught.value.hint
    return caught.value


# --- geometry ----------------------------------------------------------------------------------------------------------------------


def of_role(role: str, **fields: Any) -> Callable[[dict], None]:
    return lambda m: m["layers"][1][role].update(fields)


def of_rope(**fields: Any) -> Callable[[dict], None]:
    def edit(manifest: dict) -> None:
        for rope in manifest["ropes"]:
            rope.update(fields)

    return edit


def of_layer(index: int, **fields: Any) -> Callable[[dict], None]:
    return lambda m: m["layers"][index].update(fields)


def of_params(index: int, **fields: Any) -> Callable[[dict], None]:
    return lambda m: m["layers"][index]["params"].update(fields)


YARN = {"kind": "yarn", "base": None}
GEOMETRY: list[tuple[str, str, Callable[[dict], None], str]] = [
    ("layers removed", "llama", lambda m: m["layers"].pop(), "1 layer, but the model has 2"),
    (
        "layers added",
        "llama",
        lambda m: m["layers"].append({**m["layers"][0], "k": None, "v": None, "positions": []}),
        "3 layers, but the model has 2",
    ),
    ("K heads", "llama", of_role("k", heads=4), "layer 1: k KV heads: file 4, model 2"),
    ("V heads", "llama", of_role("v", heads=1), "layer 1: v KV heads: file 1, model 2"),
    ("K head_dim", "llama", of_role("k", dim=16), "layer 1: k head_dim: file 16, model 8"),
    ("V head_dim", "llama", of_role("v", dim=4), "layer 1: v head_dim: file 4, model 8"),
    ("MLA K and V swapped", "deepseek_v3", lambda m: m["layers"][0].update(k=m["layers"][0]["v"], v=m["layers"][0]["k"]), "k head_dim"),
    ("no K", "llama", of_layer(1, k=None), "layer 1: k: file has none, model has one"),
    ("no V", "llama", of_layer(1, v=None), "layer 1: v: file has none, model has one"),
    ("theta", "llama", of_rope(base=500000.0), "base: file 500000.0, model 10000.0"),
    ("theta by one part in a million", "llama", of_rope(base=10000.01), "base: file 10000.01, model 10000.0"),
    ("scale", "llama", of_rope(scale=0.25), "scale: file 0.25, model 1.0"),
    ("pairing", "llama", of_rope(pairing="interleaved"), "pairing: file interleaved, model half"),
    ("pairing back", "llama-traditional", of_rope(pairing="half"), "pairing: file half, model interleaved"),
    ("rotary dims", "glm4", of_rope(dims=16), "dims: file 16, model 8"),
    ("first rotary dim", "glm4", of_rope(first=8), "layer 0: keys are rotated otherwise"),
    ("magnitude", "deepseek_v2", of_rope(magnitude=1.25), "magnitude: file 1.25"),
    ("one frequency", "llama-llama3", lambda m: m["ropes"][0]["periods"].__setitem__(1, 77.0), "1 of 4 frequencies differ"),
    ("frozen pair", "llama-llama3", lambda m: m["ropes"][0]["periods"].__setitem__(1, None), "1 of 4 frequencies differ"),
    ("no RoPE", "llama", of_role("k", rope=None), "layer 1: .* file has no RoPE, model default"),
    ("RoPE on values", "llama", of_role("v", rope=0), "layer 1: .* file default, model has no RoPE"),
    ("RoPE on a NoPE layer", "cohere2", lambda m: m["layers"][3]["k"].update(rope=0), "layer 3: .* model has no RoPE"),
    ("the other layer's theta", "gemma3_text", lambda m: m["layers"][1]["k"].update(rope=0), "layer 1: .* base: file"),
    ("window", "llama-sliding", of_layer(0, window=32), "layer 0: window: file 32, model 16"),
    ("keep", "llama-sliding", of_params(0, keep=4), "layer 0: keep: file 4, model 0"),
    ("chunk", "llama4", of_layer(0, window=8), "layer 0: window: file 8, model 16"),
    ("attention", "llama-sliding", of_layer(0, attention="full"), "layer 0: attention: file full, model sliding"),
    ("attention back", "llama-sliding", of_layer(1, attention="sliding", window=16), "layer 1: attention: file sliding, model full"),
    ("state arrays", "lfm2", lambda m: m["layers"][0]["arrays"].append(None), "layer 0: state arrays: file 2, model 1"),
    ("state shape", "lfm2", lambda m: m["layers"][0]["arrays"][0]["shape"].reverse(), "layer 0: state array 0 shape"),
    ("list", "falcon_h1", lambda m: m["layers"][0]["caches"].pop(), "layer 0: caches: file 1, model 2"),
    ("inside a list", "falcon_h1", lambda m: m["layers"][0]["caches"][1]["k"].update(heads=7), "layer 0.1: k KV heads: file 7, model 2"),
]


@pytest.mark.parametrize(("family", "edit", "match"), [g[1:] for g in GEOMETRY], ids=[g[0] for g in GEOMETRY])
def test_a_changed_field_is_refused_by_name(family: str, edit: Callable, match: str, tmp_path: Path, _reads: list[str]) -> None:
    model = tiny(family)
    saved(model, tmp_path / "a.kv", 24)
    assert kvtool.load(tmp_path / "a.kv", model).usable >= 23
    rewrite(tmp_path / "a.kv", tmp_path / "b.kv", edit)
    refused(tmp_path / "b.kv", model, _reads, match)
    # Nor does accepting other weights let another shape or rotation pass.
    refused(tmp_path / "b.kv", model, _reads, match, allow_mismatch=True)


@pytest.mark.parametrize(
    ("field", "config", "match"),
    [
        ("layers", {"num_hidden_layers": 3}, "2 layers, but the model has 3"),
        ("KV heads", {"num_key_value_heads": 4}, "k KV heads: file 2, model 4"),
        ("head_dim", {"head_dim": 16}, "k head_dim: file 8, model 16"),
        ("theta", {"rope_theta": 10001.0}, "base: file 10000.0, model 10001.0"),
        ("scaling", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scale: file 1.0, model 0.5"),
        ("pairing", {"rope_traditional": True}, "pairing: file half, model interleaved"),
        ("window", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}, "attention: file full, model sliding"),
    ],
)
def test_a_model_whose_config_was_edited(field: str, config: dict, match: str, tmp_path: Path, _reads: list[str]) -> None:
    saved(tiny("llama"), tmp_path / "a.kv", 12)
    other = renamed(twin("llama", **config), weights=tiny("llama").info.weights)
    # As the live layers show it, and where RoPE does not tell all of it, as the config says it.
    refused(tmp_path / "a.kv", other, _reads, match, allow_mismatch=True)
    name = next(iter(config))
    refused(tmp_path / "a.kv", other, _reads, match if name.startswith("rope") else f"config: .*{name}: file .*, model ")


def test_same_rotation_computed_elsewhere_is_the_same(tmp_path: Path) -> None:
    # llama3's periods differ in the last bit of float32 between back ends; that is no other rotation.
    model = tiny("llama-llama3")
    saved(model, tmp_path / "a.kv", 12)

    def last_bit(manifest: dict) -> None:
        periods = manifest["ropes"][0]["periods"]
        periods[2] = float(np.nextafter(np.float32(periods[2]), np.float32(np.inf)))

    rewrite(tmp_path / "a.kv", tmp_path / "b.kv", last_bit)
    assert kvtool.load(tmp_path / "b.kv", model).usable == 12


# --- rows and positions --------------------------------------------------------------------------------------------------------------


def test_a_shifted_file_is_refused_with_the_way_back(tmp_path: Path, _reads: list[str]) -> None:
    for family in ("llama", "gemma3_text", "llama4", "qwen3_next"):
        model = tiny(family)
        saved(model, tmp_path / "a.kv", 40)
        kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=7)
        assert "--shift -7" in refused(tmp_path / "b.kv", model, _reads, "begins at position").hint


def test_a_sliding_layer_alone_cannot_hide_a_shift(tmp_path: Path, _reads: list[str]) -> None:
    # Without a full layer, a full ring at position 7 more would load, and attend as if 7 more tokens had been seen.
    live = build("llama")
    live.make_cache = lambda: [RotatingKVCache(WINDOW) for _ in range(2)]
    model = loaded(live, "all sliding")
    saved(model, tmp_path / "a.kv", 40)
    assert kvtool.load(tmp_path / "a.kv", model).usable == 39
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=7)
    assert "--shift -7" in refused(tmp_path / "b.kv", model, _reads, "position").hint


CONTRADICTIONS: list[tuple[str, str, Callable[[dict], None], str]] = [
    ("other positions", "llama", of_layer(0, positions=[[3, 27]]), "holds the positions"),
    ("positions with a hole", "llama", of_layer(0, positions=[[0, 5], [6, 25]]), "holds the positions"),
    ("positions backwards", "llama", of_layer(0, positions=[[12, 24], [0, 12]]), "holds the positions"),
    ("ring at other positions", "llama-sliding", of_layer(0, positions=[[0, 15]]), "holds the positions"),
    ("chunk at other positions", "llama4", of_layer(0, positions=[[0, 16]]), "holds the positions"),
    ("fewer usable tokens", "llama", lambda m: m.update(length=20), r"holds the positions \[\(4, 24\)\]"),
    ("max_size beside window", "llama-sliding", of_params(0, max_size=20), "window 16, but the parameters"),
    ("chunk_size beside window", "llama4", of_params(0, chunk_size=20), "window 16, but the parameters"),
    ("no ring", "llama-sliding", lambda m: m["layers"][0]["params"].pop("ring"), "needs ring as an integer"),
    ("ring a string", "llama-sliding", of_params(0, ring="3"), "needs ring as an integer"),
    ("ring true", "llama-sliding", of_params(0, ring=True), "needs ring as an integer"),
    ("ring huge", "llama-sliding", of_params(0, ring=1 << 40), "needs ring as an integer"),
    ("no chunk_size", "llama4", lambda m: m["layers"][0]["params"].clear(), "needs chunk_size as an integer"),
    ("no parameters", "llama-sliding", of_layer(0, params={}), "needs max_size as an integer"),
    (
        "ring class on full layers",
        "llama",
        of_layer(0, cls="RotatingKVCache", params={"max_size": 99, "keep": 0, "ring": 9}),
        "holds sliding",
    ),
    ("unknown class", "llama", of_layer(0, cls="PagedKVCache"), "PagedKVCache is not known"),
    ("class of object", "llama", of_layer(0, cls="__class__"), "__class__ is not known"),
    ("list class on a layer", "llama", of_layer(0, cls="CacheList"), "holds list"),
    ("empty layer", "llama", of_layer(1, k=None, v=None, positions=[], offset=0), "no rows of 24 tokens"),
    ("no state", "lfm2", lambda m: m["layers"][0].update(arrays=[None], offset=0), "no complete state"),
    ("state of fewer tokens", "lfm2", of_layer(0, offset=7), "no complete state after 7"),
    (
        "quantised class of plain rows",
        "llama",
        of_layer(0, cls="QuantizedKVCache", params={"bits": 4, "group_size": 64}),
        "QuantizedKVCache needs",
    ),
    ("ring slot outside", "llama-sliding", of_params(0, ring=17), "ring 17"),
]


@pytest.mark.parametrize(("family", "edit", "match"), [c[1:] for c in CONTRADICTIONS], ids=[c[0] for c in CONTRADICTIONS])
def test_a_file_that_contradicts_itself_is_refused(family: str, edit: Callable, match: str, tmp_path: Path) -> None:
    model = tiny(family)
    saved(model, tmp_path / "a.kv", 24)
    rewrite(tmp_path / "a.kv", tmp_path / "b.kv", edit)
    with pytest.raises((ManifestError, IncompatibleError), match=match):
        kvtool.load(tmp_path / "b.kv", model)


def test_a_layer_of_an_unknown_class_is_not_decoded_either(tmp_path: Path, _reads: list[str]) -> None:
    saved(tiny("llama"), tmp_path / "a.kv", 24)
    rewrite(tmp_path / "a.kv", tmp_path / "b.kv", of_layer(0, cls="PagedKVCache"))
    _reads.clear()
    with kvtool.open(tmp_path / "b.kv") as archive, pytest.raises(IncompatibleError, match="PagedKVCache is not known"):
        archive.state(0)
    assert _reads == []


def test_joined_ranges() -> None:
    assert list(joined([])) == []
    assert list(joined([(0, 3), (3, 5), (7, 9), (9, 10)])) == [(0, 5), (7, 10)]


# --- identity ------------------------------------------------------------------------------------------------------------------------


def test_another_identity_is_refused_by_field(tmp_path: Path, _reads: list[str]) -> None:
    model = tiny("llama")
    saved(model, tmp_path / "a.kv", 12)
    for field, value in (
        ("weights", "cd" * 32),
        ("tokenizer", "ef" * 32),
        ("architecture", "other"),
        ("weights", None),
        ("tokenizer", None),
    ):
        error = refused(tmp_path / "a.kv", renamed(model, **{field: value}), _reads, f"{field}: file .*, model")
        # A plain recode refuses another tokenizer: explain says what bridges it, or that nothing does.
        assert f"kvtool {'explain' if field == 'tokenizer' else 'recode'} " in error.hint
    for name in ("weights", "tokenizer"):
        rewrite(tmp_path / "a.kv", tmp_path / "b.kv", lambda m, name=name: m["model"].update({name: None}))
        refused(tmp_path / "b.kv", model, _reads, f"{name}: file unknown, model")
    # The dtype it runs in and the name it goes by are no identity.
    assert kvtool.load(tmp_path / "a.kv", renamed(model, name="elsewhere", dtype="float16")).usable == 12


def test_unknown_weights_vouch_for_nothing(tmp_path: Path, _reads: list[str]) -> None:
    nobody = renamed(tiny("llama"), weights=None)
    saved(nobody, tmp_path / "a.kv", 12)
    refused(tmp_path / "a.kv", nobody, _reads, "weights: file unknown, model unknown")
    assert kvtool.load(tmp_path / "a.kv", nobody, allow_mismatch=True).usable == 12


def test_instruct_and_base_of_one_shape(tmp_path: Path, _reads: list[str]) -> None:
    base = tiny("llama")
    tuned = build("llama")
    tuned.model.layers[-1].mlp.down_proj.weight = tuned.model.layers[-1].mlp.down_proj.weight + 1e-3
    instruct = loaded(tuned, "instruct")
    saved(instruct, tmp_path / "a.kv", 12)
    refused(tmp_path / "a.kv", base, _reads, "computed by instruct, not by llama")
    restored = kvtool.load(tmp_path / "a.kv", base, allow_mismatch=True)
    assert restored.usable == 12 and equal(
        run(base, restored.cache, ids(9), GO_ON), run(base, fill(instruct, ids(12), [11, 1]), ids(9), GO_ON)
    )


def test_weights_of_another_dtype_load_with_a_cast_that_is_said(tmp_path: Path) -> None:
    half, single = tiny("llama", "bfloat16"), tiny("llama")
    saved(half, tmp_path / "a.kv", 12)
    restored = kvtool.load(tmp_path / "a.kv", renamed(single, weights=half.info.weights))
    assert restored.notes == ("converted from bfloat16 to float32, the dtype that the model runs in: 4 arrays of keys or values",)
    assert {c.keys.dtype for c in restored.cache} == {mx.float32}


def test_a_rotation_nobody_knows_needs_the_same_weights(tmp_path: Path, _reads: list[str]) -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.rope.__class__ = type("DynamicNTKScalingRoPE", (type(layer.self_attn.rope),), {})
    unknown = loaded(model, "dynamic")
    saved(unknown, tmp_path / "a.kv", 12)
    assert kvtool.load(tmp_path / "a.kv", unknown).usable == 12
    refused(tmp_path / "a.kv", renamed(unknown, weights="cd" * 32), _reads, "DynamicNTKScalingRoPE", allow_mismatch=True)
    # A file of a known rotation says more than this model can confirm.
    saved(renamed(tiny("llama"), weights=unknown.info.weights, architecture="tiny"), tmp_path / "b.kv", 12)
    refused(tmp_path / "b.kv", unknown, _reads, "model unknown")


# --- digests of model folders ----------------------------------------------------------------------------------------------------------


def folder(root: Path, shards: list[dict[str, mx.array]]) -> Path:
    root.mkdir(parents=True)
    for i, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        mx.save_safetensors(str(root / name), shard, metadata={"format": "mlx"})
    return root


@pytest.fixture
def weights() -> dict[str, mx.array]:
    keys = [f"model.layers.{i}.w{j}" for i in range(3) for j in range(3)]
    found = {k: mx.random.normal((16, 8), key=mx.random.key(i)) for i, k in enumerate(keys)}
    found["norm"] = mx.ones((8,), mx.bfloat16)
    return found


def test_one_model_however_it_lies_on_disk(weights: dict[str, mx.array], tmp_path: Path) -> None:
    whole = weights_digest(folder(tmp_path / "a", [weights]))
    names = list(weights)
    halves = [{n: weights[n] for n in names[:4]}, {n: weights[n] for n in names[4:]}]
    backwards = [{n: weights[n] for n in reversed(names[5:])}, {n: weights[n] for n in names[:5]}]
    for i, shards in enumerate((halves, halves[::-1], backwards, [{n: weights[n]} for n in names])):
        assert weights_digest(folder(tmp_path / f"b{i}" / "deeper", shards)) == whole
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "tokenizer.json").write_text("{}")
    assert weights_digest(tmp_path / "elsewhere") == whole


def test_every_byte_of_every_tensor_counts(weights: dict[str, mx.array], tmp_path: Path) -> None:
    whole = weights_digest(folder(tmp_path / "a", [weights]))
    path = tmp_path / "a" / "model.safetensors"
    plain = path.read_bytes()
    start = 8 + int.from_bytes(plain[:8], "little")
    header = json.loads(plain[8:start])
    header.pop("__metadata__", None)
    seen = {whole}
    for info in header.values():
        for at in (info["data_offsets"][0], info["data_offsets"][1] - 1):
            changed = bytearray(plain)
            changed[start + at] ^= 1
            path.write_bytes(changed)
            seen.add(weights_digest(tmp_path / "a"))
    assert len(seen) == 1 + 2 * len(weights)


def test_names_shapes_and_dtypes_count(weights: dict[str, mx.array], tmp_path: Path) -> None:
    first = next(iter(weights))
    variants = [
        weights,
        {("other" if n == first else n): w for n, w in weights.items()},
        # A name that stays first in the order.
        {(f"{n}0" if n == first else n): w for n, w in weights.items()},
        {n: (w.reshape(8, 16) if n == first else w) for n, w in weights.items()},
        {n: (w.view(mx.uint32) if n == first else w) for n, w in weights.items()},
        {n: w for n, w in weights.items() if n != first},
        {**weights, "extra": mx.zeros((0,))},
        {**weights, first: weights["model.layers.1.w1"], "model.layers.1.w1": weights[first]},
    ]
    assert len({weights_digest(folder(tmp_path / str(i), [w])) for i, w in enumerate(variants)}) == len(variants)


def test_folders_without_readable_weights(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IncompatibleError, match="no model"):
        weights_digest(tmp_path / "a")
    hostile = [
        b"",
        b"1234567",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (1).to_bytes(8, "little") + b"{",
        *(
            len(t).to_bytes(8, "little") + t
            for t in (b'{"a":1}', b'{"a":{}}', b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,9]}}', b"\xff\xfe")
        ),
        *(len(t).to_bytes(8, "little") + t for t in (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":"ab"}}',)),
    ]
    for data in hostile:
        (tmp_path / "a" / "model.safetensors").write_bytes(data)
        with pytest.raises(IncompatibleError):
            weights_digest(tmp_path / "a")


def test_another_tokenizer() -> None:
    plain = ByteTokenizer()
    same = digest_of_tokenizer(plain)
    assert digest_of_tokenizer(ByteTokenizer()) == same and digest_of_tokenizer(ByteTokenizer(98)) != same

    class Merged(ByteTokenizer):
        """The same vocabulary, other merges."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text.replace("  ", " "), add_special_tokens)

    class Renumbered(ByteTokenizer):
        def get_vocab(self) -> dict[str, int]:
            return {f"<{i}>": (i + 1) % self.size for i in range(self.size)}

    assert len({same, digest_of_tokenizer(Merged()), digest_of_tokenizer(Renumbered())}) == 3
    probes = [plain.encode(t) for t in TOKENIZER_PROBES]
    vocab = plain.get_vocab()
    assert tokenizer_digest(dict(reversed(vocab.items())), probes) == tokenizer_digest(vocab, probes) == same


def test_window_is_not_only_a_number(tmp_path: Path) -> None:
    # The same shapes with another window: a file of the wider window has rows that the narrower one never keeps.
    wide, narrow = tiny("llama-sliding"), twin("llama-sliding", sliding_window=8)
    saved(wide, tmp_path / "a.kv", 24)
    with pytest.raises(IncompatibleError, match=f"window: file {WINDOW}, model 8"):
        kvtool.load(tmp_path / "a.kv", renamed(narrow, weights=wide.info.weights), allow_mismatch=True)


def test_archive_check_reads_no_tensor(tmp_path: Path, _reads: list[str]) -> None:
    model = tiny("gemma3_text")
    saved(model, tmp_path / "a.kv", 24, codec="rvq-2+2,sink=0,recent=0")
    with kvtool.open(tmp_path / "a.kv") as archive:
        assert len(archive.check(model)) == 4 and _reads == []
    with open_container(tmp_path / "a.kv") as reader:
        assert replace(reader.manifest.model, name="x") != reader.manifest.model
