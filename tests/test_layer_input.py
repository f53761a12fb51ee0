"""What entered a layer, kept in a file: coded, covered by digests, carried along, and run from by another model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.check import check
from formats.container import open_container
from formats.errors import DigestError, IncompatibleError, KVError, ManifestError
from kvtool import encoding
from kvtool.bridges.recompute import Recompute
from kvtool.bridges.running import run_span
from kvtool.bridges.transferring import source_of, transfer
from kvtool.capturing import capture
from kvtool.cli import run
from kvtool.model import LoadedModel, load_model
from kvtool.recoding import recode
from tests.library import digests, ids, rewrite, tiny
from veloxquant_mlx.codecs import CODECS

TEXT = "what enters a layer of the model, and what leaves it, is a vector a token. " * 5


@pytest.fixture(scope="module")
def tiny_b() -> LoadedModel:
    return load_model("tiny-b")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "a.kv"
    kvtool.save(capture(load_model("tiny-a"), TEXT, layer_inputs=[1, 2]), path, codec="rvq-4")
    return path


def inputs_of(path: Path) -> dict[int, np.ndarray]:
    with kvtool.open(path) as archive:
        return {given.layer: np.array(archive.decoder.layer_input(given.layer)) for given in archive.manifest.layer_inputs}


def test_it_comes_back_as_the_record_says(file: Path, tiny_a: LoadedModel) -> None:
    exact = capture(tiny_a, TEXT, layer_inputs=[1, 2]).inputs
    found = inputs_of(file)
    assert sorted(found) == [1, 2]
    with open_container(file) as reader:
        (step,) = reader.manifest.quality
        for given in reader.manifest.layer_inputs:
            x = np.array(exact[given.layer]).astype(np.float64)
            error = ((found[given.layer] - x) ** 2).sum() / (x**2).sum()
            assert error < 1e-4 and error == pytest.approx(step["layer_inputs"][str(given.layer)], rel=0.01)
            stored = sum(reader.tensors[name].bytes for s in given.rows.segments for name in s.tensors.values())
            assert 8 * stored == (8 + 16 / x.shape[1] + 16 / x.shape[0]) * x.size
    assert set(step) >= {"k_relative_error", "v_relative_error"} and "x_relative_error" not in step


def test_nothing_else_in_the_file_changes(file: Path, tiny_a: LoadedModel, tmp_path: Path) -> None:
    plain = tmp_path / "plain.kv"
    kvtool.save(capture(tiny_a, TEXT), plain, codec="rvq-4")
    assert digests(file).items() > digests(plain).items()
    with open_container(plain) as reader:
        assert reader.manifest.layer_inputs == ()
    for path in (file, plain):
        assert kvtool.load(path, tiny_a).usable == len(tiny_a.tokenizer.encode(TEXT))


def test_a_model_runs_on_from_it(file: Path, tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    """Of the model's own file the block gives the model's own rows, and of a sibling's what the exact vectors give."""
    own = capture(tiny_a, TEXT, layer_inputs=[1])
    with kvtool.open(file) as archive:
        found = transfer(source_of(archive), tiny_a, recompute=Recompute(layers=(1, 4)))
        across = transfer(source_of(archive), tiny_b, recompute=Recompute(layers=(2, 4)))
    for i in range(1, 4):
        for role in "kv":
            a, b = (np.array(getattr(states[i], role)) for states in (found.states, own.states))
            assert ((a - b) ** 2).sum() / (b**2).sum() < 1e-3, (i, role)
    assert across.history[-1]["layers"] == [2, 4]


def test_wide_vectors_are_cut_into_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encoding, "MAX_CODED_DIM", 20)  # of 32: two heads of 16
    model = tiny("llama")
    snapshot = capture(model, ids(24), layer_inputs=[1])
    kvtool.save(snapshot, tmp_path / "a.kv")
    with open_container(tmp_path / "a.kv") as reader:
        (given,) = reader.manifest.layer_inputs
        assert (given.rows.heads, given.rows.dim) == (2, 16) and reader.manifest.codecs[given.rows.segments[0].codec].id == "rvq"
    x = np.array(snapshot.inputs[1])
    assert np.allclose(inputs_of(tmp_path / "a.kv")[1], x, atol=0.03 * np.abs(x).max())


def test_every_byte_of_it_is_covered(file: Path, tmp_path: Path) -> None:
    with open_container(file) as reader:
        tensor = reader.tensors["input.2.x.0.codes"]
    data = bytearray(file.read_bytes())
    data[tensor.offset + 5] ^= 1
    (tmp_path / "bad.kv").write_bytes(data)
    assert [problem.exit_code for problem in check(tmp_path / "bad.kv")] == [4]
    with kvtool.open(tmp_path / "bad.kv") as archive, pytest.raises(DigestError):
        archive.decoder.layer_input(2)


def test_recodes_carry_it_or_drop_it(file: Path, tiny_b: LoadedModel, tmp_path: Path) -> None:
    recode(file, tmp_path / "b.kv", codec="rvq-2+2")
    recode(file, tmp_path / "c.kv", shift=7)
    for name in ("b.kv", "c.kv"):
        assert all(np.array_equal(a, inputs_of(file)[layer]) for layer, a in inputs_of(tmp_path / name).items())
        assert len(inputs_of(tmp_path / name)) == 2
    report = recode(file, tmp_path / "d.kv", to_model=tiny_b)
    assert report.notes == ("what entered layers 1, 2 of tiny-a is left out: it is not tiny-b's",)
    assert not inputs_of(tmp_path / "d.kv")


def test_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.kv")
    assert run(["export", "--model", "tiny-a", "--prompt", TEXT, "--codec", "rvq-4", "--layer-input", "2,1", "-o", path]) == 0
    assert run(["inspect", path]) == 0
    assert "input      of layer 2, 256 values a token, rvq, " in capsys.readouterr().out
    assert run(["inspect", path, "--json"]) == 0
    assert [given["layer"] for given in json.loads(capsys.readouterr().out)["layer_inputs"]] == [1, 2]
    run_it = ["--model", "tiny-b", "--prompt", " and", "--max-tokens", "4", "--json"]
    assert run(["import", path, *run_it, "--recompute", "layers=2-4,first=4"]) == 0
    assert any("layers 2 to 3 recomputed" in note for note in json.loads(capsys.readouterr().out)["notes"])
    assert run(["import", path, *run_it, "--recompute", "layers=3-4"]) == 5
    assert "layer 3 of tiny-a was not kept (kept: 1, 2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompt", "a b", "--layer-input", "x"], "layers such as 9 or 9,12"),
        (["--prompt", "a b", "--layer-input", "4"], "must be 0 to 3 of tiny-a, but got 4"),
        (["--from-cache", "{here}", "--layer-input", "1"], "needs a prompt to run"),
    ],
)
def test_wrong_usage(more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.kv"
    assert run(["export", "--model", "tiny-a", "-o", str(out), *(word.format(here=__file__) for word in more)]) == 2
    assert words in capsys.readouterr().err and not out.exists()


def edit(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: change(manifest["layer_inputs"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: given[0].update(layer=2), r"layer_inputs\[1\].layer: must be in 3 .. 3"),
        (lambda given: given[1].update(layer=4), "must be in 2 .. 3, but is 4"),
        (lambda given: given[0]["rows"].update(rope=0), "there is no rope 0"),
        (lambda given: given[0]["rows"]["segments"][0].update(rows=[0, 3]), "segments end at row 3"),
        (lambda given: given[0]["rows"]["segments"][0]["tensors"].update(codes="nothing"), "there is no tensor 'nothing'"),
        (lambda given: given.append(given[0]), "must be in 3 .. 3"),
        (lambda given: given[0].pop("rows"), "field 'rows' is missing"),
    ],
)
def test_manifests_that_lie_are_refused(file: Path, tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], words: str) -> None:
    with pytest.raises((ManifestError, ValueError), match=words):
        rewrite(file, tmp_path / "bad.kv", edit(change))


def test_tensors_that_do_not_fit_the_codec_are_refused(file: Path, tmp_path: Path) -> None:
    with open_container(file) as reader:
        codes = reader.array("input.1.x.0.codes")
    rewrite(file, tmp_path / "bad.kv", lambda manifest: None, {"input.1.x.0.codes": ("U8", codes[:, :-1])})
    with kvtool.open(tmp_path / "bad.kv") as archive, pytest.raises(ManifestError, match=r"needs U8 \(1,"):
        archive.decoder.layer_input(1)


@pytest.mark.parametrize("codec", [*CODECS, "nothing"])
def test_a_codec_that_lies_is_refused_and_no_matter_of_the_rows(codec: str, file: Path, tmp_path: Path, tiny_a: LoadedModel) -> None:
    params = {"tcz": {"role": "v", "rate": 1, "step": 1.0, "design": 1, "layer": "1", "after": "0", "tables": "a" * 64}}.get(codec, {})

    def change(manifest: dict[str, Any]) -> None:
        manifest["codecs"].append({"id": codec, "params": params})
        manifest["layer_inputs"][0]["rows"]["segments"][0]["codec"] = len(manifest["codecs"]) - 1

    rewrite(file, tmp_path / "bad.kv", change)
    with kvtool.open(tmp_path / "bad.kv") as archive:
        with pytest.raises(KVError):
            archive.decoder.layer_input(1)
        assert archive.load(tiny_a, decode=True).usable == archive.length


def test_a_cache_does_not_hold_it(tiny_a: LoadedModel) -> None:
    with pytest.raises(ValueError, match="layer_inputs go with a prompt"):
        capture(tiny_a, cache=[], layer_inputs=[1])


def test_vectors_of_another_size_are_refused(tiny_b: LoadedModel) -> None:
    own = capture(tiny_b, TEXT)
    assert own.tokens is not None
    with pytest.raises(IncompatibleError, match="has 7 values a token, not 256 as in tiny-b"):
        run_span(tiny_b, own.tokens, own.states, 0, own.length, (1, 2), mx.zeros((own.length, 7)))
