"""A cache in a model of other layers, KV heads and head size: fitted, recoded and worth most of a prefill."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import kvtool
from formats.transfer_map import MapFile, write_map
from kvtool.bridges.fitting import fit
from kvtool.bridges.transferring import source_of, source_of_snapshot, transfer
from kvtool.bridges.work import Work
from kvtool.capturing import capture
from kvtool.cli import run
from kvtool.explaining import explain
from kvtool.model import LoadedModel, load_model
from kvtool.probe import probe_model
from tests.measure_shapes import arms_of, closed, held_out_texts
from tests.shapes import path

TINY_C = str(path("tiny-c"))


@pytest.fixture(scope="module")
def tiny_c() -> LoadedModel:
    return load_model(TINY_C)


@cache
def mapping() -> MapFile:
    return fit(load_model("tiny-a"), load_model(TINY_C), pieces=30, sources=2)


def test_the_shapes_are_unlike(tiny_a: LoadedModel, tiny_c: LoadedModel) -> None:
    shapes = [[(p.k.heads, p.k.dim) for p in probe_model(model.model) if p.k is not None] for model in (tiny_a, tiny_c)]
    assert shapes == [[(2, 64)] * 4, [(4, 32)] * 3]
    assert tiny_a.info.tokenizer == tiny_c.info.tokenizer


def test_quantised_weights_count_as_what_they_stand_for(tiny_c: LoadedModel) -> None:
    hidden, heads, dim, inner, layers = 256, 4, 32, 256, 3
    weights = 4 * hidden * heads * dim + 3 * hidden * inner
    assert Work(tiny_c).span(0, 10) == layers * (2 * weights * 10 + 4 * heads * dim * 55)


def test_a_map_closes_most_of_the_gap(tiny_a: LoadedModel, tiny_c: LoadedModel) -> None:
    """Half of what a cache is worth is asked for; with twice the text and sources it is more (tests/results/transfer-shapes.md)."""
    found = arms_of(tiny_a, tiny_c, {"map": mapping()}, held_out_texts()[1:5])
    assert np.mean(np.concatenate(found["no cache"].nll)) > np.mean(np.concatenate(found["own"].nll)) + 0.02
    assert closed(found, "map")[0] > 0.5
    assert np.mean(np.concatenate(found["map"].kl)) < 0.3 * np.mean(np.concatenate(found["no cache"].kl))


def test_a_map_of_shuffled_layers_does_not(tiny_a: LoadedModel, tiny_c: LoadedModel) -> None:
    """The measure sees a wrong map: layers in the wrong places."""
    layers = dict(zip(mapping().layers, [*mapping().layers.values()][::-1], strict=True))
    wrong = MapFile(**{**vars(mapping()), "layers": layers})
    found = arms_of(tiny_a, tiny_c, {"map": wrong}, held_out_texts()[1:5])
    assert closed(found, "map")[0] < 0.5


def test_a_map_does_not_multiply_the_error_of_a_codec(tmp_path: Path, tiny_a: LoadedModel, tiny_c: LoadedModel) -> None:
    """3 bits put 3 % of the energy of the rows in as error. A map that expects none multiplies it."""
    snapshot = capture(tiny_a, tiny_a.tokenizer.encode(held_out_texts()[0])[:128])
    kvtool.save(snapshot, tmp_path / "a.kv", codec="rvq-3,sink=0,recent=0")
    blind = fit(tiny_a, tiny_c, pieces=30, sources=2, noise=0.0)
    error = {}
    for name, own in (("used", mapping()), ("blind", blind)):
        with kvtool.open(tmp_path / "a.kv") as archive:
            rows = [
                np.array(transfer(source, tiny_c, mapping=own).states[1].v) for source in (source_of(archive), source_of_snapshot(snapshot))
            ]
        error[name] = np.sum((rows[0] - rows[1]) ** 2) / np.sum(rows[1] ** 2)
    assert error["used"] < 0.2 < error["blind"]


def test_each_head_has_its_own_sources() -> None:
    """Where heads choose alike a block of zeros never occurs, and a map takes no more layers than its heads do."""
    assert all(1 <= len(own.sources) <= 4 and not own.residual for own in mapping().layers.values())
    assert all(own.unexplained < 0.3 for own in mapping().layers.values())


def test_by_command(tmp_path: Path, tiny_a: LoadedModel, tiny_c: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tiny_a.tokenizer.encode(held_out_texts()[0])[:64]
    snapshot = capture(tiny_a, ids)
    kvtool.save(snapshot, tmp_path / "a.kv", codec="rvq-4")
    write_map(tmp_path / "map", mapping())
    assert run(["explain", str(tmp_path / "a.kv"), "--model", TINY_C, "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["verdict"] == "map"
    command = ["recode", str(tmp_path / "a.kv"), "-o", str(tmp_path / "c.kv"), "--to-model", TINY_C, "--map", str(tmp_path / "map")]
    assert run([*command, "--codec", "raw", "--json"]) == 0
    assert explain(tmp_path / "c.kv", tiny_c).verdict == "identical"
    with kvtool.open(tmp_path / "c.kv") as archive:
        got = np.array(archive.state(2).v)
    with kvtool.open(tmp_path / "a.kv") as archive:
        wanted = np.array(transfer(source_of(archive), tiny_c, mapping=mapping()).states[2].v)
    assert np.array_equal(got, wanted)


def test_too_little_text_is_refused(tiny_a: LoadedModel, tiny_c: LoadedModel) -> None:
    texts = {str(i): tiny_a.tokenizer.encode(text)[:200] for i, text in enumerate(held_out_texts()[:2])}
    with pytest.raises(ValueError, match="a map from 256 entries needs at least 512 tokens to learn from, but got 200: give more text"):
        fit(tiny_a, tiny_c, texts)
