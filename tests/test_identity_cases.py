"""Situations in which a cache was taken for another model's, one test a case; and every file of a model folder edited, one at a time."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.container import open_container
from formats.errors import IncompatibleError
from kvtool import tiny as shipped
from kvtool.cli import run as cli
from kvtool.explaining import explain
from kvtool.identity_tokenizer import TOKENIZER_PROBES
from kvtool.model import LoadedModel, load_model
from tests.library import loaded, renamed, saved, tiny, twin
from tests.model_folders import adapter, cast, copied, edited, quantised
from tests.tiny_random import build

PROMPT = "A long shared prompt. " * 8


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(tmp_path / "model")


def exported(model: LoadedModel, path: Path) -> Path:
    kvtool.save(kvtool.capture(model, PROMPT), path)
    return path


def refused(path: Path, model: LoadedModel, *names: str) -> None:
    """Loading is refused, with each of these in the message and exit code 5."""
    with pytest.raises(IncompatibleError) as caught:
        kvtool.load(path, model)
    assert caught.value.exit_code == 5 and caught.value.hint
    for name in names:
        assert name in str(caught.value), f"{name} is not in: {caught.value}"


def test_case_9_a_fine_tune_of_the_same_shapes(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache of the instruct model was accepted by the base model of the same shapes. Here the weights are named, with what carries the
    cache over; importing it nonetheless takes an option and says what was accepted."""
    path = exported(load_model(folder), tmp_path / "a.kv")
    other = load_model("tiny-b")
    refused(path, other, "weights: file ", "model ")
    assert cli(["import", str(path), "--model", "tiny-b", "--prompt", "In"]) == 5
    assert "weights" in capsys.readouterr().err
    assert explain(path, other).verdict == "fine-tune"
    rotated = tmp_path / "b.kv"
    kvtool.recode(path, rotated, to_model=other)
    notes = kvtool.load(rotated, other).notes
    with kvtool.open(rotated) as archive:
        (step,) = archive.manifest.quality
    assert step["same_weights"] is False and "not measured" in step["note"] and "weights" in step["note"]
    assert cli(["inspect", str(rotated)]) == 0 and "rows of another model" in capsys.readouterr().out
    # As computed by another model, where its rotation fits.
    tuned = cast(folder, tmp_path / "tuned", mx.float16, 0.05)
    allowed = kvtool.load(path, load_model(tuned), allow_mismatch=True)
    assert any(note.startswith("accepted from another model: weights: ") for note in allowed.notes) and "accepted" not in "".join(notes)
    rest = tmp_path / "rest.txt"
    rest.write_text("And so it went on from there, one sentence after the other. " * 3)
    scored = ["eval", str(path), "--model", str(tuned), "--text", str(rest), "--n", "8"]
    assert cli(scored) == 5 and "weights: file" in capsys.readouterr().err
    assert cli([*scored, "--allow-mismatch"]) == 0 and "accepted from another model: weights" in capsys.readouterr().err
    # What the rows have behind them is shown by all that take the file.
    for command in (
        ["eval", str(rotated), "--model", "tiny-b", "--text", str(rest), "--n", "8"],
        ["explain", str(rotated), "--model", "tiny-b"],
    ):
        assert cli(command) == 0 and "rows of another model as they were" in capsys.readouterr().out


def test_case_10_requantised_in_place(tmp_path: Path, folder: Path) -> None:
    """Weights were quantised to 4 bits, and later to 8 under the same path; the old cache was served. So were caches after an edit of
    config or tokenizer in place."""
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    before = load_model(quantised(whole, folder, 4))
    path = exported(before, tmp_path / "a.kv")
    after = load_model(quantised(whole, folder, 8))
    refused(path, after, "weights: file ", "quantisation: file affine 4 bits in groups of 64: ", "model affine 8 bits in groups of 64: ")
    found = explain(path, after)
    assert found.verdict == "precision" and "--to-model" in found.commands[0] and "--seal" in found.commands[1]
    assert any("sampled weights" in note for note in found.notes)
    # And from a file of the unquantised weights; but not from those of a fine-tune.
    assert explain(exported(load_model(whole), tmp_path / "b.kv"), after).verdict == "precision"
    tuned = cast(whole, tmp_path / "tuned", mx.float32, 0.02)
    assert explain(exported(load_model(tuned), tmp_path / "c.kv"), after).verdict == "fine-tune"


@pytest.mark.parametrize(
    ("file", "edit", "named"),
    [
        ("config.json", lambda c: c.update(rms_norm_eps=1e-6), "config: rms_norm_eps: file 1e-05, model 1e-06"),
        ("config.json", lambda c: c.update(rope_theta=10001.0), "keys are rotated otherwise"),
        ("config.json", lambda c: c.update(rope_traditional=True), "pairing: file half, model interleaved"),
        ("tokenizer.json", lambda c: c["model"]["merges"].insert(0, c["model"]["merges"].pop(1)), "tokenizer: "),
        ("tokenizer.json", lambda c: c.update(normalizer={"type": "Lowercase"}), "tokenizer: "),
    ],
)
def test_case_10_a_file_edited_in_place(file: str, edit: Callable, named: str, tmp_path: Path, folder: Path) -> None:
    path = exported(load_model(folder), tmp_path / "a.kv")
    edited(folder / file, edit)
    refused(path, load_model(folder), named)


def test_case_11_one_weight_of_attention(tmp_path: Path, folder: Path) -> None:
    """A model served under the same name with one perturbed attention matrix took 1984 tokens of the other's cache."""
    path = exported(load_model(folder), tmp_path / "a.kv")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = next(n for n in header if n.endswith("q_proj.weight"))
    data[start + header[name]["data_offsets"][0]] ^= 1
    weights.write_bytes(data)
    assert load_model(folder).info.name == "model"
    refused(path, load_model(folder), "weights: file ")


def test_case_12_adapters(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapter A's cache was served to adapter B; the same adapter under another path was refused."""
    one, two = adapter(folder, tmp_path / "one"), adapter(folder, tmp_path / "two", seed=1)
    assert cli(["export", "--model", str(folder), "--adapter", str(one), "--prompt", PROMPT, "-o", str(tmp_path / "a.kv")]) == 0
    path = tmp_path / "a.kv"
    bare, with_one, with_two = (load_model(folder, adapter=a) for a in (None, one, two))
    digests = [m.info.adapter[:12] for m in (with_one, with_two) if m.info.adapter]
    refused(path, with_two, f"adapter: file {digests[0]}, model {digests[1]}")
    refused(path, bare, f"adapter: file {digests[0]}, model none")
    refused(exported(bare, tmp_path / "b.kv"), with_one, f"adapter: file none, model {digests[0]}")
    # The same files elsewhere are the same adapter.
    moved = Path(shutil.copytree(one, tmp_path / "elsewhere" / "again"))
    shutil.rmtree(one)
    again = load_model(folder, adapter=moved)
    assert kvtool.load(path, again).usable > 0 and explain(path, again).verdict == "identical"
    capsys.readouterr()
    assert cli(["inspect", str(path)]) == 0 and f"adapter {digests[0]}, quantisation none" in capsys.readouterr().out
    for command in (["import", str(path), "--prompt", "In", "--max-tokens", "2"], ["explain", str(path)]):
        assert cli([*command, "--model", str(folder), "--adapter", str(moved)]) == 0
        assert cli([*command, "--model", str(folder), "--adapter", str(two)]) == 5
        assert cli([*command, "--model", str(folder)]) == 5
    capsys.readouterr()
    assert cli(["explain", str(path), "--model", str(folder), "--adapter", str(two), "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fine-tune" and f"--adapter {two}" in found["commands"][1] and "--adapter-a" in found["commands"][0]
    assert [f["name"] for f in found["fields"] if f["same"] is False] == ["adapter"]
    # One byte of one of its files.
    data = bytearray((moved / "adapters.safetensors").read_bytes())
    data[-1] ^= 1
    (moved / "adapters.safetensors").write_bytes(data)
    refused(path, load_model(folder, adapter=moved), "adapter: ")
    # What was measured with an adapter says nothing of the model without it.
    assert bare.info.effective_weights != with_two.info.effective_weights


GEOMETRY = {
    "layers": ("llama", {"num_hidden_layers": 3}, "2 layers, but the model has 3"),
    "KV heads": ("llama", {"num_key_value_heads": 4}, "k KV heads: file 2, model 4"),
    "head_dim": ("llama", {"head_dim": 16}, "k head_dim: file 8, model 16"),
    "theta": ("llama", {"rope_theta": 10000.5}, "base: file 10000.0, model 10000.5"),
    "scaling": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "scale: file 1.0, model 0.25"),
    "scaling's factor": ("llama-llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 9.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}, "frequencies differ"),
    "pairing": ("llama", {"rope_traditional": True}, "pairing: file half, model interleaved"),
    "rotary dims": ("glm4", {"partial_rotary_factor": 0.25}, "dims: file 8, model 4"),
    "window": ("llama-sliding", {"sliding_window": 8}, "window: file 16, model 8"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "config", "match"), GEOMETRY.values(), ids=GEOMETRY)
def test_case_13_every_field_of_geometry_flipped_alone(family: str, config: dict, match: str, tmp_path: Path) -> None:
    """Weights that vouch for the model must not let another geometry pass: of the live layers each field is named, with both values."""
    model = tiny(family)
    path = saved(model, tmp_path / "a.kv")
    other = renamed(twin(family, **config), weights=model.info.weights)
    with pytest.raises(IncompatibleError) as caught:
        kvtool.load(path, other, allow_mismatch=True)
    assert match in str(caught.value)
    refused(path, other)
    found = explain(path, other)
    assert not found.accepted and any(match in text for field in found.fields for text in field.differences)
    # Even where the config says nothing of it.
    refused(path, renamed(other, config=model.info.config), match)


def hub(root: Path, source: Path, commit: str = "0123456789abcdef0123456789abcdef01234567") -> Path:
    """A hub's cache folder with one repository, whose snapshot is links into blobs."""
    repository = root / "models--someone--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for i, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, repository / "blobs" / f"{i:040x}")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"{i:040x}")
    return snapshot


def test_case_14_a_repository_and_a_folder_are_one_model(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model as a repository id, as the snapshot folder with links into blobs, and as a plain copy."""
    snapshot = hub(tmp_path / "hub", folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    models = [load_model(source) for source in ("someone/tiny", snapshot, folder, "tiny-a")]
    assert models[0].info.name == models[0].argument == "someone/tiny"
    assert len({(m.info.weights, m.info.tokenizer, m.info.tokenizer_state, json.dumps(m.info.config)) for m in models}) == 1
    for i, model in enumerate(models):
        path = exported(model, tmp_path / f"{i}.kv")
        assert all(explain(path, other).verdict == "identical" and kvtool.load(path, other).usable > 0 for other in models)


def test_case_15_identity_does_not_depend_on_the_process(tmp_path: Path) -> None:
    """Prefix keys that depended on the process's hash seed never matched again. Here two processes with unlike seeds see one model."""
    code = "import tests, dataclasses, kvtool; print(sorted(dataclasses.asdict(kvtool.load_model('tiny-a').info).items()))"
    env = {"PYTHONHASHSEED": "7", "KVTOOL_CACHE": str(tmp_path / "other"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == str(sorted(dataclasses.asdict(load_model("tiny-a").info).items())) and "tokenizer_state" in done.stdout


# --- what a model folder holds, edited one file at a time --------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def computed(model: LoadedModel) -> list[Any]:
    """What a model makes of texts: ids, and the keys and values of a prompt."""
    states = kvtool.capture(model, PROMPT).states
    ids = [model.tokenizer.encode(text) for text in (*TOKENIZER_PROBES, "a<|user|>b<|end|>c")]
    return [ids, *(np.array(array) for state in states for array in (state.k, state.v))]


def test_a_byte_in_each_file_of_a_model_folder(tmp_path: Path, folder: Path) -> None:
    """A byte flipped is refused, or decides nothing: the edited model gives the same ids and bit for bit the same keys and values."""
    path, whole = exported(load_model(folder), tmp_path / "a.kv"), computed(load_model(folder))
    outcomes: dict[str, set[str]] = {}
    for file in sorted(p.name for p in folder.iterdir()):
        plain = (folder / file).read_bytes()
        step = max(1, len(plain) // 24)
        for at in range(step // 2, len(plain), step):
            flip(folder / file, at)
            outcome = "refused"
            try:
                model = load_model(folder)
                if kvtool.load(path, model).usable:
                    outcome = "taken"
                    again = computed(model)
                    same = again[0] == whole[0] and all(np.array_equal(x, y) for x, y in zip(again[1:], whole[1:], strict=True))
                    assert same, f"{file}, byte {at}: {plain[max(0, at - 60) : at + 20]!r}"
            except IncompatibleError:
                pass
            (folder / file).write_bytes(plain)
            outcomes.setdefault(file, set()).add(outcome)
    assert all("refused" in found for found in outcomes.values()) and len(outcomes) == 4


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "a weight file more": lambda f: shutil.copy(shipped.path("tiny-b") / "model.safetensors", f / "model-2.safetensors"),
    "the weights of a sibling": lambda f: shutil.copy(shipped.path("tiny-b") / "model.safetensors", f / "model.safetensors"),
    "two tensors swapped": lambda f: swap_tensors(f / "model.safetensors"),
    "norms of a smaller epsilon": lambda f: edited(f / "config.json", lambda c: c.update(rms_norm_eps=1.0000001e-05)),
    "an untied head": lambda f: edited(f / "config.json", lambda c: c.update(tie_word_embeddings=False)),
    "a window": lambda f: edited(f / "config.json", lambda c: c.update(sliding_window=64, layer_types=["sliding_attention"] * 4)),
    "theta moved a little": lambda f: edited(f / "config.json", lambda c: c.update(rope_theta=10000.01)),
    "a token more": lambda f: edited(f / "tokenizer.json", lambda c: c["added_tokens"].append(
        {"id": 1023, "content": "passkey", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False})),
    "two ids swapped": lambda f: edited(f / "tokenizer.json", lambda c: swap_ids(c["model"]["vocab"])),
    "text lower-cased first": lambda f: edited(f / "tokenizer.json", lambda c: c.update(normalizer={"type": "Lowercase"})),
    "another file of Python": lambda f: edited(f / "config.json", lambda c: c.update(model_file="own.py")),
    "quantised without saying so": lambda f: edited(f / "config.json", lambda c: c.update(quantization={"bits": 4, "group_size": 64})),
}  # fmt: skip


def swap_tensors(path: Path) -> None:
    arrays: Any = mx.load(str(path))
    names = [name for name in arrays if name.endswith("k_proj.weight")][:2]
    arrays[names[0]], arrays[names[1]] = arrays[names[1]], arrays[names[0]]
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays)


def swap_ids(vocab: dict[str, int]) -> None:
    a, b = list(vocab)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_edits(name: str, tmp_path: Path, folder: Path) -> None:
    path = exported(load_model(folder), tmp_path / "a.kv")
    HOSTILE[name](folder)
    try:
        model = load_model(folder)
    except IncompatibleError:
        return
    if name == "quantised without saying so":
        # mlx-lm quantises what has scales, and these weights have none: the model is what it was.
        assert kvtool.load(path, model).usable > 0 and model.info.quantisation is None
        return
    refused(path, model)


def test_a_file_keeps_who_computed_it_through_every_step(tmp_path: Path, folder: Path) -> None:
    """Recoding, cutting, sealing and live codes carry the identity on, and list what each of them lost."""
    model = load_model(folder, adapter=adapter(folder, tmp_path / "own"))
    path = exported(model, tmp_path / "a.kv")
    kvtool.recode(path, path, codec="rvq-4")
    kvtool.recode(path, path, shift=3)
    kvtool.recode(path, path, shift=-3)
    with open_container(path) as reader:
        assert reader.manifest.model == model.info
        steps = [(step["step"], step.get("shift")) for step in reader.manifest.quality]
    assert steps == [("recode", None), ("recode", 3), ("recode", -3)]
    found = explain(path, model)
    assert found.verdict == "identical" and [step["step"] for step in found.history] == ["recode"] * 3
    assert all("k_relative_error" in step for step in found.history if step.get("codec") != "as stored")
    assert kvtool.load(path, model).usable > 0
    assert loaded(build("llama")).info.adapter is None
