"""What `kvtool explain` says is what import, recode and fit then do."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtool
from formats.container import Reader
from formats.errors import IncompatibleError
from kvtool.cli import run
from kvtool.explaining import Explanation, explain
from kvtool.model import LoadedModel
from tests.library import loaded, renamed, rewrite, saved, tiny, twin
from tests.tiny_random import build


def differing(found: Explanation) -> set[str]:
    return {field.name for field in found.fields if field.same is False}


def verdict(path: Path, model: LoadedModel, expected: str, fields: set[str]) -> Explanation:
    """The explanation, checked against what loading does."""
    found = explain(path, model)
    assert (found.verdict, differing(found)) == (expected, fields)
    assert found.accepted == (expected == "identical")
    if found.accepted:
        assert kvtool.load(path, model).usable > 0
    else:
        with pytest.raises(IncompatibleError):
            kvtool.load(path, model, decode=True)
    return found


def tuned(family: str = "llama", name: str = "tuned") -> LoadedModel:
    live = build(family)
    live.model.layers[-1].mlp.down_proj.weight = live.model.layers[-1].mlp.down_proj.weight + 1e-3
    return loaded(live, name)


def test_identical(tmp_path: Path) -> None:
    for family in ("llama", "llama-sliding", "falcon_h1", "deepseek_v3"):
        saved(tiny(family), tmp_path / "a.kv")
        found = verdict(tmp_path / "a.kv", tiny(family), "identical", set())
        assert all(field.same for field in found.fields) and found.commands[0].startswith("kvtool import")
    # The dtype it runs in and the name it goes by keep nothing out.
    saved(tiny("llama"), tmp_path / "a.kv")
    found = verdict(tmp_path / "a.kv", renamed(tiny("llama"), name="b", dtype="float16"), "identical", {"dtype"})
    assert "file float32, model float16" in next(f for f in found.fields if f.name == "dtype").differences[0]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rope_theta": 500000.0}, "base: file 10000.0, model 500000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scale: file 1.0, model 0.5"),
    ],
)
def test_recode(config: dict, text: str, tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv")
    other = renamed(twin("llama", **config), weights=tiny("llama").info.weights)
    found = verdict(tmp_path / "a.kv", other, "recode", {"RoPE"})
    rope = next(field for field in found.fields if field.name == "RoPE")
    assert len(rope.differences) == 2 and any(text in line for line in rope.differences)
    assert "--to-model" in found.commands[0]
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=other)
    verdict(tmp_path / "b.kv", other, "identical", set())


def test_one_set_of_weights_with_two_pairings(tmp_path: Path) -> None:
    """One of the two reads the weights wrongly, so neither a recode nor a map can help."""
    saved(tiny("llama"), tmp_path / "a.kv")
    other = renamed(twin("llama", rope_traditional=True), weights=tiny("llama").info.weights)
    found = verdict(tmp_path / "a.kv", other, "impossible", {"RoPE"})
    assert "one of the two reads them wrongly" in found.reasons[0] and not found.commands


def test_a_shifted_file(tmp_path: Path) -> None:
    model = tiny("llama")
    saved(model, tmp_path / "a.kv")
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", shift=7)
    found = verdict(tmp_path / "b.kv", model, "recode", {"positions"})
    assert "--shift -7" in found.commands[0]
    kvtool.recode(tmp_path / "b.kv", tmp_path / "c.kv", to_model=model, shift=-7)
    verdict(tmp_path / "c.kv", model, "identical", set())


def test_a_fine_tune(tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv")
    found = verdict(tmp_path / "a.kv", tuned(), "fine-tune", {"weights"})
    assert [shlex.split(c)[1] for c in found.commands] == ["fit", "recode", "eval"] and not found.reasons
    assert "--map MAP.safetensors --recompute first=4,newest=14%" in found.commands[1] and "--seal" in found.commands[2]
    assert [shlex.split(c)[1] for c in found.instead] == ["recode"] and "--map" not in found.instead[0]
    verdict(tmp_path / "a.kv", renamed(tuned(), architecture="other"), "other weights", {"weights", "architecture"})
    # Nothing says that unknown weights are the same.
    verdict(tmp_path / "a.kv", renamed(tiny("llama"), weights=None), "fine-tune", {"weights"})


def test_a_fine_tune_of_layers_that_no_map_takes(tmp_path: Path) -> None:
    saved(tiny("llama-sliding"), tmp_path / "a.kv")
    found = verdict(tmp_path / "a.kv", tuned("llama-sliding"), "fine-tune", {"weights"})
    assert [shlex.split(c)[1] for c in found.commands] == ["recode", "eval"] and not found.instead
    assert found.reasons[0].startswith("map: layer 0") and any("not known before" in note for note in found.notes)


@pytest.mark.parametrize("config", [{"num_hidden_layers": 3}, {"num_key_value_heads": 4}, {"head_dim": 16}])
def test_other_shapes(config: dict, tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv")
    found = verdict(tmp_path / "a.kv", twin("llama", **config), "map", {"weights", "layers", "config"})
    assert [shlex.split(c)[1] for c in found.commands] == ["fit", "recode", "eval"] and not found.instead
    assert found.reasons[0].startswith("recode: ")
    assert {field.name for field in found.fields if field.same is None} == {"RoPE", "positions"}


def test_impossible(tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "a.kv")
    found = verdict(tmp_path / "a.kv", renamed(tiny("llama"), tokenizer="cd" * 32), "impossible", {"tokenizer"})
    assert not found.commands and "tokenizer" in found.reasons[0]
    verdict(tmp_path / "a.kv", tiny("llama-sliding"), "impossible", {"weights", "layers", "config"})
    verdict(tmp_path / "a.kv", tiny("falcon_h1"), "impossible", {"weights", "layers", "config"})


def test_every_changed_field_is_named(tmp_path: Path) -> None:
    model = tiny("llama")
    saved(model, tmp_path / "a.kv")
    edits: list[tuple[Callable[[dict], object], str, set[str]]] = [
        (lambda m: m["model"].update(weights="cd" * 32), "fine-tune", {"weights"}),
        (lambda m: m["model"].update(tokenizer=None), "impossible", {"tokenizer"}),
        (lambda m: m["model"].update(architecture="other"), "recode", {"architecture"}),
        (lambda m: m["layers"].pop(), "map", {"layers"}),
        (lambda m: m["ropes"][0].update(base=5.0), "recode", {"RoPE"}),
        (lambda m: m["ropes"][0].update(dims=4), "impossible", {"RoPE"}),
    ]
    for edit, expected, fields in edits:
        rewrite(tmp_path / "a.kv", tmp_path / "b.kv", lambda m, edit=edit: edit(m))  # type: ignore[misc]
        verdict(tmp_path / "b.kv", model, expected, fields)


def test_an_absent_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_a: LoadedModel, calibration_a: bytes) -> None:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "store"))
    (tmp_path / "cal").write_bytes(calibration_a)
    kvtool.save(kvtool.capture(tiny_a, "A long shared prompt. " * 9), tmp_path / "a.kv", codec="tc-3", calibration=tmp_path / "cal")
    found = verdict(tmp_path / "a.kv", tiny_a, "calibration", {"calibration"})
    assert found.commands[0].endswith("--calibration FILE") and "not here" in found.notes[0]
    assert explain(tmp_path / "a.kv", tiny_a, calibration=tmp_path / "cal").accepted


def test_damaged_arrays_are_seen_where_they_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_a: LoadedModel) -> None:
    path = tmp_path / "a.kv"
    kvtool.save(kvtool.capture(tiny_a, "A long shared prompt. " * 9), path)
    command = ["explain", str(path), "--model", "tiny-a"]
    assert run([*command, "--check"]) == 0
    assert f"arrays: {len(Reader(path).tensors)}, each as it was written" in capsys.readouterr().out
    data = bytearray(path.read_bytes())
    data[-70] ^= 1
    path.write_bytes(data)
    assert run(command) == 0
    assert "arrays: not read; --check compares them with their digests" in capsys.readouterr().out
    assert run([*command, "--json"]) == 0 and json.loads(capsys.readouterr().out)["arrays"] is None
    assert run([*command, "--check"]) == 4
    told = capsys.readouterr().err
    assert "has digest" in told and f"hint: kvtool check {path} names all that is wrong" in told
    for damage, code, hint in (
        (data[:-64], 3, "kvtool check"),
        (data[:300] + b"x" + data[301:], 4, "kvtool check"),
        (b"", 3, "give a file of kvtool export"),
    ):
        path.write_bytes(damage)
        assert run(command) == code
        assert f"hint: {hint}" in capsys.readouterr().err


def test_one_name_for_two_models(tmp_path: Path, tiny_a: LoadedModel) -> None:
    saved(tiny("llama"), tmp_path / "a.kv")
    adapted = renamed(tiny("llama"), adapter="ab" * 32)
    found = explain(tmp_path / "a.kv", adapted)
    name = tiny("llama").info.name
    assert (found.computed_by, found.model) == (f"{name} without an adapter", f"{name} with the adapter abababababab")
    with pytest.raises(IncompatibleError, match=f"computed by {name} without an adapter, not by {name} with the adapter abababababab"):
        kvtool.load(tmp_path / "a.kv", adapted)
    with pytest.raises(IncompatibleError, match=f"computed by another {name}, not by this {name}"):
        kvtool.load(tmp_path / "a.kv", renamed(tiny("llama"), weights="cd" * 32))
    saved(adapted, tmp_path / "b.kv")
    with pytest.raises(IncompatibleError, match=f"by {name} with the adapter abababababab, not by {name} with the adapter cdcdcdcdcdcd"):
        kvtool.load(tmp_path / "b.kv", renamed(tiny("llama"), adapter="cd" * 32))


def test_a_shipped_model_needs_no_folder(tmp_path: Path, tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    kvtool.save(kvtool.capture(tiny_a, "A long shared prompt."), tmp_path / "a.kv")
    assert explain(tmp_path / "a.kv", tiny_b).notes[0].startswith("kvtool fit takes 'tiny-a' as the model that ships with kvtool")
    saved(tuned(), tmp_path / "a.kv")
    assert explain(tmp_path / "a.kv", tiny("llama")).notes[0].startswith("kvtool fit takes 'tuned' as the file names it: give the folder")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_a: LoadedModel) -> None:
    path = tmp_path / "a file.kv"
    kvtool.save(kvtool.capture(tiny_a, "A long shared prompt. " * 9), path)

    def no_tensor(self: Reader, name: str, *, verify: bool = True) -> None:
        raise AssertionError(f"{name} was read")

    with monkeypatch.context() as patched:
        patched.setattr(Reader, "array", no_tensor)
        assert run(["explain", str(path), "--model", "tiny-a", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["verdict"] == "identical" and data["accepted"] is True and data["fields"][1]["name"] == "weights"
        assert run(["explain", str(path), "--model", "tiny-b"]) == 5
    text = capsys.readouterr().out
    (command,) = [line.split("instead:")[1] for line in text.splitlines() if "instead:" in line]
    # The command that it gives is one that works, quotes and all.
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(command)[1:]) == 0 and run(["explain", "OUT.kv", "--model", "tiny-b"]) == 0
