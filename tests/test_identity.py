"""The layers of a model's identity, each alone: what changes it, what does not, and what a file says of it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load, load_adapters

import kvtool
from formats.calibration import from_bytes
from formats.container import open_container
from formats.errors import IncompatibleError, ManifestError
from formats.manifest import Manifest, parse, to_json
from formats.model_info import ModelInfo, model_json
from kvtool import identifying, identity_cache
from kvtool.calibrations import Calibration, resolve
from kvtool.compat import computing_problems, identity_layers, not_compared
from kvtool.identity_config import config_of, differences, quantisation_of
from kvtool.identity_sketch import SAMPLES, likeness, sketch_of
from kvtool.identity_tokenizer import digest_of_tokenizer, state_digest, template_digest
from kvtool.model import LoadedModel, load_model
from tests.library import ByteTokenizer, loaded, saved, tiny
from tests.model_folders import adapter, cast, copied, edited, quantised
from tests.tiny_random import FAMILIES, build

PROMPT = "A long shared prompt. " * 8


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(tmp_path / "model")


def state_of(folder: Path) -> str:
    return state_digest(load(str(folder))[1], folder)


# --- tokenizer ---------------------------------------------------------------------------------------------------------------------


def test_an_edited_merge_that_no_probe_shows(folder: Path) -> None:
    tokenizer = load(str(folder))[1]
    whole = (digest_of_tokenizer(tokenizer), state_of(folder))
    merges = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]

    def swap(content: dict[str, Any]) -> None:
        # Two merges that no other text among the probes needs: their order decides ids of texts that are.
        content["model"]["merges"][-2:] = content["model"]["merges"][-2:][::-1]

    edited(folder / "tokenizer.json", swap)
    assert merges[-1] != merges[-2]
    assert digest_of_tokenizer(load(str(folder))[1]) == whole[0], "the vocabulary and the probes do show this one"
    assert state_of(folder) != whole[1]


@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("tokenizer.json", lambda c: c["model"]["merges"].pop()),
        ("tokenizer.json", lambda c: c["model"].update(byte_fallback=True)),
        ("tokenizer.json", lambda c: c["added_tokens"][0].update(lstrip=True)),
        ("tokenizer.json", lambda c: c.update(normalizer={"type": "NFKC"})),
        ("tokenizer.json", lambda c: c.update(pre_tokenizer={"type": "Whitespace"})),
        ("tokenizer_config.json", lambda c: c.update(bos_token="<another>")),
        ("tokenizer_config.json", lambda c: c.update(split_special_tokens=True)),
    ],
)
def test_what_decides_ids_counts(file: str, edit: Any, folder: Path) -> None:
    whole = state_of(folder)
    edited(folder / file, edit)
    assert state_of(folder) != whole


@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("tokenizer.json", lambda c: c.update(truncation={"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0})),
        ("tokenizer.json", lambda c: None),  # the same JSON, written without its spaces and line ends
        ("tokenizer_config.json", lambda c: c.update(model_max_length=77)),
        ("tokenizer_config.json", lambda c: c.update(chat_template="{{ messages[0].content }}")),
    ],
)
def test_what_decides_no_ids_does_not(file: str, edit: Any, folder: Path) -> None:
    whole = state_of(folder)
    edited(folder / file, edit)
    tokenizer = load(str(folder))[1]
    assert state_digest(tokenizer, folder) == whole
    # A tokenizer that was used with truncation or padding is the same one.
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.backend_tokenizer.enable_truncation(500)
    assert state_digest(tokenizer, folder) == whole


def test_a_tokenizer_without_a_serialised_state(tmp_path: Path) -> None:
    class Own(ByteTokenizer):
        vocab_files_names: dict[str, str] = {"vocab_file": "spiece.model"}  # noqa: RUF012

        def __init__(self, late: int = 0) -> None:
            super().__init__()
            self.late = late

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            # Wrong for one entry of the vocabulary alone.
            return [self.late] if self.late and text == "<60>" else super().encode(text, add_special_tokens)

    (tmp_path / "spiece.model").write_bytes(b"pieces")
    whole = state_digest(Own(), tmp_path)
    assert state_digest(Own(), tmp_path) == whole != state_digest(Own(5), tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"piecet")
    assert state_digest(Own(), tmp_path) != whole


def test_the_chat_template_is_named_and_keeps_nothing_out(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder)
    kvtool.save(kvtool.capture(model, PROMPT), tmp_path / "a.kv")
    edited(folder / "tokenizer_config.json", lambda c: c.update(chat_template="{{ messages[0].content }}"))
    other = load_model(folder)
    layer = next(x for x in identity_layers(model.info, other.info) if x.name == "chat template")
    assert (layer.same, layer.blocks) == (False, False) and template_digest(other.tokenizer) == other.info.chat_template
    assert kvtool.load(tmp_path / "a.kv", other).usable > 0


# --- config and quantisation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_its_arguments(family: str) -> None:
    config = config_of(build(family))
    assert len(config) > 5 and json.loads(json.dumps(config, allow_nan=False)) == config
    assert not {"model_type", "quantization"} & {name.rpartition(".")[2] for name in config}


def test_fields_that_change_the_arithmetic_alone() -> None:
    """Norms, scales, soft caps, activation and ties change no tensor, shape or rotation: each is named with both values."""
    for family, field, value in (
        ("llama", "rms_norm_eps", 1e-6),
        ("llama", "tie_word_embeddings", False),
        ("gemma2", "query_pre_attn_scalar", 24.0),
        ("gemma2", "attn_logit_softcapping", 30.0),
        ("gemma2", "final_logit_softcapping", 20.0),
        ("cohere2", "logit_scale", 0.5),
        ("gemma3_text", "sliding_window_pattern", 4),
        ("deepseek_v3", "routed_scaling_factor", 3.0),
    ):
        before, after = config_of(build(family)), config_of(build(family, **{field: value}))
        assert differences(before, before, rope=True) == []
        found = differences(before, after, rope=False)
        assert [text for text in found if text.startswith(f"{field}: file ")] and f"model {value}" in found[0]


def test_fields_of_rope_count_where_the_rotation_is_unknown() -> None:
    before, after = (config_of(build("llama", rope_theta=theta)) for theta in (1e4, 2e4))
    assert differences(before, after, rope=False) == [] and differences(before, after, rope=True) == [
        "rope_theta: file 10000.0, model 20000.0"
    ]
    # YaRN's mscale scales the attention as well, which the rotation of keys does not show.
    before, after = ({"rope_scaling.mscale": x, "rope_scaling.factor": 2} for x in (0.7, 1.0))
    assert differences(before, after, rope=False) == ["rope_scaling.mscale: file 0.7, model 1.0"]


def test_odd_values_are_plain() -> None:
    @dataclass
    class Inner:
        limit: float = float("inf")

    @dataclass
    class Arguments:
        inner: Inner
        pair: tuple[float, float] = (0.0, float("inf"))
        types: tuple[str, ...] = ("full_attention",) * 99
        table: Any = None
        pad_token_id: int = 7

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.args = Arguments(Inner(), table={3: {"a": None, "b": {1, 2}}})

    config = config_of(Model())
    assert config == {"inner.limit": "inf", "pair": [0.0, "inf"], "types": config["types"], "table.3.b": [1, 2]}
    assert config["types"].startswith("blake3 ") and config_of(nn.Linear(2, 2)) == {}


def test_quantisation_of_each_module() -> None:
    model = build("llama")
    assert quantisation_of(model) is None
    seen = set()
    for bits, mode, size in ((4, "affine", 32), (8, "affine", 32), (4, "mxfp4", 32)):
        own = build("llama")
        nn.quantize(own, size, bits, mode=mode, class_predicate=lambda path, m: isinstance(m, nn.Linear) and m.weight.shape[1] % 32 == 0)
        found = quantisation_of(own)
        assert found is not None and found["summary"].startswith(f"{mode} {bits} bits in groups of {size}: ")
        seen.add(found["blake3"])
    # One module otherwise than the rest.
    nn.quantize(own, 32, 8, class_predicate=lambda path, m: isinstance(m, nn.Embedding))
    mixed = quantisation_of(own)
    assert mixed is not None and "affine 8 bits in groups of 32: 1 modules" in mixed["summary"]
    assert len(seen | {mixed["blake3"]}) == 4


# --- adapters ----------------------------------------------------------------------------------------------------------------------


def test_adapters(folder: Path, tmp_path: Path) -> None:
    one, two = adapter(folder, tmp_path / "one"), adapter(folder, tmp_path / "two", seed=1)
    bare, with_one, with_two = (load_model(folder, adapter=path) for path in (None, one, two))
    assert len({bare.info.adapter, with_one.info.adapter, with_two.info.adapter}) == 3 and bare.info.adapter is None
    assert len({m.info.effective_weights for m in (bare, with_one, with_two)}) == 3
    assert bare.info.weights == with_one.info.weights and bare.info.effective_weights == bare.info.weights
    assert with_one.arguments == [str(folder), "--adapter", str(one)]
    # The names of quantised modules do not depend on an adapter around them.
    small = quantised(folder, tmp_path / "small", 4)
    assert load_model(small).info.quantisation == load_model(small, adapter=adapter(small, tmp_path / "three")).info.quantisation
    # What training says of itself is not part of it, what it does is.
    edited(one / "adapter_config.json", lambda c: c.update(iters=7, data="elsewhere"))
    edited(one / "adapter_config.json", lambda c: c["lora_parameters"].update(dropout=0.5))
    assert load_model(folder, adapter=one).info == with_one.info
    edited(one / "adapter_config.json", lambda c: c["lora_parameters"].update(scale=10.5))
    assert load_model(folder, adapter=one).info.adapter != with_one.info.adapter


def test_no_adapter_there(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(IncompatibleError, match=r"no adapter_config\.json and no adapters\.safetensors"):
        load_model(folder, adapter=tmp_path / "empty")
    own = adapter(folder, tmp_path / "own")
    (own / "adapter_config.json").write_text("{")
    with pytest.raises(IncompatibleError) as caught:
        load_model(folder, adapter=own)
    assert caught.value.hint == "give the folder that mlx_lm.lora wrote for this model"


def test_a_live_model_changed_after_it_was_loaded(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    kvtool.save(kvtool.capture(load_model(folder), PROMPT), path)
    small = load_model(folder)
    nn.quantize(small.model, 64, 4)
    adapted = load_model(folder)
    load_adapters(adapted.model, str(adapter(folder, tmp_path / "own")))
    for model, what in ((small, "quantisation none, and has affine 4 bits"), (adapted, "without an adapter, and has one")):
        for attempt in (lambda m=model: kvtool.load(path, m, allow_mismatch=True), lambda m=model: kvtool.capture(m, PROMPT)):
            with pytest.raises(IncompatibleError, match=what):
                attempt()


def test_calibrations_are_of_an_adapter_too(tiny_a: LoadedModel, calibration_a: bytes) -> None:
    file = from_bytes(calibration_a)
    with_adapter = replace(tiny_a.info, adapter="ab" * 32)
    for own, model, fits in (
        (tiny_a.info, tiny_a.info, True),
        (with_adapter, with_adapter, True),
        (with_adapter, tiny_a.info, False),
        (tiny_a.info, with_adapter, False),
    ):
        given = Calibration(replace(file, model=own), "0" * 64)
        if fits:
            assert resolve(given, model.effective_weights) is given
        else:
            with pytest.raises(IncompatibleError, match="is of tiny-a"):
                resolve(given, model.effective_weights)


# --- remembering -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain = identity_cache.time_ns
    monkeypatch.setattr(identity_cache, "time_ns", lambda: plain() + 10_000_000_000)
    yield


def test_nothing_is_digested_twice(folder: Path, tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = adapter(folder, tmp_path / "own")
    first, bare = load_model(folder, adapter=own), load_model(folder)
    for name in ("digest_of_tokenizer", "state_digest", "digest_of_weights", "digest_of_adapter", "sketch_of"):
        monkeypatch.setattr(identifying, name, lambda *a, name=name: pytest.fail(f"{name} was called"))
    assert load_model(folder, adapter=own).info == first.info and load_model(folder).info == bare.info
    # Other libraries may make other tokenizers of the same files.
    monkeypatch.setattr(identifying, "_libraries", lambda: "tokenizers 99")
    with pytest.raises(pytest.fail.Exception, match="digest_of_tokenizer was called"):
        load_model(folder)


def test_files_changed_while_the_model_was_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kvtool.model.load

    def slow(path: str, **options: Any) -> Any:
        found = plain(path, **options)
        edited(folder / "tokenizer_config.json", lambda c: c.update(model_max_length=8))
        return found

    monkeypatch.setattr(kvtool.model, "load", slow)
    with pytest.raises(IncompatibleError, match="changed while"):
        load_model(folder)


# --- older files -------------------------------------------------------------------------------------------------------------------


def test_a_file_older_than_these_layers(tmp_path: Path, folder: Path, tiny_a: LoadedModel) -> None:
    info = tiny_a.info
    old = replace(tiny_a, info=ModelInfo(info.name, info.architecture, info.weights, info.tokenizer, info.dtype))
    kvtool.save(kvtool.capture(old, PROMPT), tmp_path / "old.kv")
    with open_container(tmp_path / "old.kv") as reader:
        assert set(json.loads(json.dumps(to_json(reader.manifest)))["model"]) == {"name", "architecture", "weights", "tokenizer", "dtype"}
        found = identity_layers(reader.manifest.model, info)
    assert [layer.name for layer in found if layer.same is None] == ["quantisation", "chat template", "config"]
    for options in ({}, {"decode": True}, {"live": "rvq-4"}):
        restored = kvtool.load(tmp_path / "old.kv", tiny_a, **options)
        assert any("older than" in note and "quantisation" in note for note in restored.notes)
    # What it has is compared; and it cannot be an adapter's.
    assert not_compared(info, info) == ()
    with pytest.raises(IncompatibleError, match="adapter: file none, model "):
        kvtool.load(tmp_path / "old.kv", load_model("tiny-a", adapter=adapter(folder, tmp_path / "own")))


def test_the_manifest_keeps_it(tiny_a: LoadedModel) -> None:
    info = replace(tiny_a.info, adapter="ab" * 32, quantisation={"summary": "s", "blake3": "cd" * 32})
    plain = json.loads(json.dumps(to_json(Manifest(info, 0, ()))))
    assert parse(plain).model == info
    assert len(json.dumps(plain["model"]["sketch"])) < 8192
    for name, value in (
        ("adapter", "short"),
        ("quantisation", {"summary": "s"}),
        ("tokenizer_state", 3),
        ("config", []),
        ("sketch", {"of": "ab" * 32, "dtype": "float16"}),
        ("identity", 0),
    ):
        with pytest.raises(ManifestError, match=name):
            parse({**plain, "model": {**plain["model"], name: value}})
        if name != "identity":
            with pytest.raises(ManifestError, match=name):
                parse({**plain, "model": {k: v for k, v in plain["model"].items() if k != name}})
    assert model_json(ModelInfo("m", "a")) == {"name": "m", "architecture": "a", "weights": None, "tokenizer": None, "dtype": None}


def test_an_adapter_is_a_feature_that_readers_must_know(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, adapter=adapter(folder, tmp_path / "own"))
    for name, own, requires in (("a.kv", model, ("adapter",)), ("b.kv", load_model(folder), ())):
        kvtool.save(kvtool.capture(own, PROMPT), tmp_path / name)
        kvtool.recode(tmp_path / name, tmp_path / name, codec="rvq-4")
        with open_container(tmp_path / name) as reader:
            assert reader.manifest.requires == requires


def test_unknown_computes_nothing_alike() -> None:
    known = ModelInfo("m", "a", "ab" * 32, "cd" * 32)
    assert computing_problems(known, known) == [] and computing_problems(replace(known, weights=None), replace(known, weights=None))


# --- the sketch --------------------------------------------------------------------------------------------------------------------


def test_the_same_weights_in_another_precision(folder: Path, tmp_path: Path) -> None:
    base = sketch_of(load(str(folder))[0])
    assert len(json.dumps(base)) < 8192 and likeness(base, base).same  # type: ignore[union-attr]
    for i, (bits, mode, size) in enumerate(((8, "affine", 64), (4, "affine", 64), (4, "nvfp4", 16))):
        found = likeness(base, sketch_of(load(str(quantised(folder, tmp_path / f"q{i}", bits, mode, size)))[0]))
        assert found is not None and found.same and found.correlation > 0.99
    found = likeness(base, sketch_of(load(str(cast(folder, tmp_path / "bf16", mx.bfloat16)))[0]))
    assert found is not None and found.same and found.within == 1
    other = quantised(cast(folder, tmp_path / "tuned", mx.float16, 0.01), tmp_path / "tuned4", 4)
    found = likeness(base, sketch_of(load(str(other))[0]))
    assert found is not None and not found.same and found.within < 0.9 and found.correlation > 0.99
    found = likeness(base, sketch_of(kvtool.load_model("tiny-b").model))
    assert found is not None and not found.same


def test_sketches_that_cannot_be_compared(tiny_a: LoadedModel) -> None:
    own = tiny_a.info.sketch
    assert own is not None and likeness(None, own) is None and likeness(own, sketch_of(build("llama"))) is None
    for text in ("!", "", own["values"][:-8], own["values"][4:] + "////"):
        assert likeness(own, {**own, "values": text}) is None or text.endswith("////")
    assert len(own["values"]) * 3 // 4 == SAMPLES * 4


def test_files_carry_their_models_identity(tmp_path: Path, tiny_a: LoadedModel) -> None:
    kvtool.save(kvtool.capture(tiny_a, PROMPT), tmp_path / "a.kv", codec="rvq-4")
    with open_container(tmp_path / "a.kv") as reader:
        assert reader.manifest.model == tiny_a.info and tiny_a.info.identity == 2
    assert saved(tiny("llama"), tmp_path / "b.kv").stat().st_size > 0 and loaded(build("llama")).info.identity == 2
