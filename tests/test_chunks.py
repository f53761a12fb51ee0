"""Caches one after another and cut out: positions are exact, and what was not seen is run anew where it is asked for."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.errors import IncompatibleError
from kvtool import tiny
from kvtool.bridges.chunks import cut, join
from kvtool.bridges.transferring import Source, source_of_snapshot
from kvtool.capturing import Snapshot, capture
from kvtool.cli import run
from kvtool.evaluation import score_caches
from kvtool.model import LoadedModel, load_model
from kvtool.snapshot import build_caches
from tests.library import f64


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return list(load_model("tiny-a").tokenizer.encode(tiny.filler_text()[:4000]))


def source(model: LoadedModel, ids: list[int]) -> Source:
    return source_of_snapshot(capture(model, ids))


def assert_rows(a: Snapshot, b: Snapshot, rows: slice = slice(None)) -> None:
    for ours, theirs in zip(a.states, b.states, strict=True):
        for role in ("k", "v"):
            x, y = f64(getattr(ours, role)), f64(getattr(theirs, role))
            assert np.allclose(x[:, rows], y[:, rows], atol=3e-5 * np.abs(y).max())


def test_the_first_layer_of_a_join_is_that_of_the_joined_text(tiny_a: LoadedModel, ids: list[int]) -> None:
    """Keys and values of layer 0 depend on their token and position alone: each chunk's must be those of a fresh prefill."""
    whole = capture(tiny_a, ids[:300])
    joined = join([source(tiny_a, ids[a:b]) for a, b in ((0, 100), (100, 101), (101, 300))], tiny_a)
    assert joined.tokens == whole.tokens and joined.length == 300
    for role in ("k", "v"):
        x, y = f64(getattr(joined.states[0], role)), f64(getattr(whole.states[0], role))
        assert np.allclose(x, y, atol=1e-4 * np.abs(y).max())
    assert_rows(joined, whole, slice(0, 100))


def test_all_run_anew_is_the_prefill(tiny_a: LoadedModel, ids: list[int]) -> None:
    whole = capture(tiny_a, ids[:300])
    assert_rows(join([source(tiny_a, ids[:120]), source(tiny_a, ids[120:300])], tiny_a, recompute=500), whole)


def test_tokens_run_anew_see_what_stands_before(tiny_a: LoadedModel, ids: list[int]) -> None:
    whole = capture(tiny_a, ids[:300])
    joined = join([source(tiny_a, ids[:120]), source(tiny_a, ids[120:300])], tiny_a, recompute=16)
    assert_rows(joined, whole, slice(0, 136))
    plain = join([source(tiny_a, ids[:120]), source(tiny_a, ids[120:300])], tiny_a)
    assert_rows(joined, plain, slice(136, None))
    assert joined.history[-1]["recomputed"] == 16 and joined.history[-1]["chunks"] == [120, 180]


def test_recomputing_helps(tiny_a: LoadedModel, ids: list[int]) -> None:
    chunks = [source(tiny_a, ids[:150]), source(tiny_a, ids[150:300])]
    caches = {"own": build_caches(capture(tiny_a, ids[:300]).states)}
    caches |= {str(n): build_caches(join(chunks, tiny_a, n).states) for n in (0, 75)}
    scores = score_caches(tiny_a, caches, ids[300:], 100, None)
    assert 0 < scores["75"]["kl"].mean() < scores["0"]["kl"].mean()


def test_a_beginning_is_exact_and_a_cut_is_moved(tiny_a: LoadedModel, ids: list[int]) -> None:
    given = source(tiny_a, ids[:200])
    beginning = cut(given, tiny_a, 0, 90)
    assert_rows(beginning, capture(tiny_a, ids[:90]))
    assert beginning.history == ()
    middle = cut(given, tiny_a, 50, 120)
    fresh = capture(tiny_a, ids[50:120])
    assert middle.tokens == fresh.tokens and middle.history[-1]["tokens"] == [50, 120]
    x, y = f64(middle.states[0].k), f64(fresh.states[0].k)
    assert np.allclose(x, y, atol=1e-4 * np.abs(y).max())


def test_a_join_goes_on(tiny_a: LoadedModel, ids: list[int]) -> None:
    joined = join([source(tiny_a, ids[:60]), source(tiny_a, ids[60:100])], tiny_a, recompute=8)
    caches = build_caches(joined.states)
    out = tiny_a.model(mx.array(ids[100:110])[None], cache=caches)
    assert out.shape[1] == 10 and caches[0].offset == 110


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 5), (7, 3), (0, 41)])
def test_cuts_that_are_not_there(tiny_a: LoadedModel, ids: list[int], start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="tokens must be within 0 to 40"):
        cut(source(tiny_a, ids[:40]), tiny_a, start, stop)


def test_another_models_chunk_is_refused(tiny_a: LoadedModel, ids: list[int]) -> None:
    given = source(tiny_a, ids[:40])
    for change in ({"weights": "f" * 64}, {"weights": None}, {"tokenizer": "f" * 64}):
        other = replace(given, model=replace(given.model, **change))
        for attempt in (lambda other=other: join([given, other], tiny_a), lambda other=other: cut(other, tiny_a, 0, 3)):
            with pytest.raises(IncompatibleError, match="computed by another tiny-a, not by this tiny-a"):
                attempt()
    with pytest.raises(ValueError, match="got 0 files"):
        join([], tiny_a)


def test_layer_inputs_are_those_of_the_rows(tiny_a: LoadedModel, ids: list[int]) -> None:
    """Kept with the rows that they entered with: of a whole text where all tokens are run anew, of each chunk where none are."""
    one, two = (capture(tiny_a, part, layer_inputs=[1, 2]) for part in (ids[:60], ids[60:100]))
    whole = capture(tiny_a, ids[:100], layer_inputs=[1, 2])
    for recompute, wanted in ((40, whole.inputs), (0, {i: mx.concatenate([one.inputs[i], two.inputs[i]]) for i in (1, 2)})):
        joined = join([source_of_snapshot(one), source_of_snapshot(two)], tiny_a, recompute)
        assert sorted(joined.inputs) == [1, 2] and "left out" not in joined.history[-1]["note"]
        for layer, rows in joined.inputs.items():
            assert np.allclose(f64(rows), f64(wanted[layer]), atol=1e-4 * np.abs(f64(wanted[layer])).max())
    part = join([source_of_snapshot(one), source_of_snapshot(two)], tiny_a, 8).inputs[1]
    assert np.allclose(f64(part[:68]), f64(whole.inputs[1][:68]), atol=1e-4) and np.array_equal(f64(part[68:]), f64(two.inputs[1][8:]))
    assert np.array_equal(f64(cut(source_of_snapshot(whole), tiny_a, 10, 30).inputs[2]), f64(whole.inputs[2][10:30]))
    lacking = join([source_of_snapshot(one), source_of_snapshot(capture(tiny_a, ids[60:100], layer_inputs=[2]))], tiny_a)
    assert sorted(lacking.inputs) == [2] and "what entered layer 1 is left out, which not all chunks have" in lacking.history[-1]["note"]


def test_layer_inputs_through_files(tiny_a: LoadedModel, ids: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, out, store = (str(tmp_path / name) for name in ("one.kv", "out.kv", "store"))
    kvtool.save(capture(tiny_a, ids[:40], layer_inputs=[1]), one)
    assert run(["join", one, one, "--model", "tiny-a", "-o", out]) == 0
    with kvtool.open(one) as a, kvtool.open(out) as b:
        twice = mx.concatenate([a.decoder.layer_input(1)] * 2)
        assert np.allclose(f64(b.decoder.layer_input(1)), f64(twice), atol=0.02 * float(mx.abs(twice).max()))
    assert run(["store", "put", store, one, "--model", "tiny-a"]) == 0
    remark = "what entered layer 1 of tiny-a is left out: "
    assert remark + "a store keeps keys and values alone" in capsys.readouterr().err
    assert run(["recode", one, "-o", out, "--to-model", "tiny-b", "--recompute", "layers=1-2"]) == 0
    assert remark + "it is not tiny-b's" in capsys.readouterr().err
    assert run(["export", "--model", "tiny-a", "--prompt", "a", "--layer-input", "1", "--store", store]) == 2
    assert "--layer-input goes with --output" in capsys.readouterr().err


def test_by_command(tiny_a: LoadedModel, ids: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, out = (str(tmp_path / name) for name in ("one.kv", "two.kv", "out.kv"))
    kvtool.save(capture(tiny_a, ids[:80]), one, codec="rvq-4")
    kvtool.save(capture(tiny_a, ids[80:160]), two)
    assert run(["join", one, two, "--model", "tiny-a", "--recompute", "8", "--codec", "rvq-4", "-o", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 160
    with kvtool.open(out) as archive:
        assert [step["step"] for step in archive.manifest.quality] == ["encode", "join", "encode"]
    assert run(["import", out, "--model", "tiny-a", "--prompt", " and", "--max-tokens", "2"]) == 0
    assert "written as raw" not in capsys.readouterr().err
    again = f"kvtool recode {out} -o {out} --codec rvq-4"
    assert run(["join", one, one, "--model", "tiny-a", "-o", out]) == 0
    assert f"written as raw: {Path(out).stat().st_size:,} bytes, from {2 * Path(one).stat().st_size:,} coded by rvq-4" in (
        said := capsys.readouterr().err
    )
    assert said.strip().endswith(again) and run(again.split()[1:]) == 0
    assert Path(out).stat().st_size < 2 * Path(one).stat().st_size
    assert run(["join", one, "--model", "tiny-a", "--tokens", ":50", "-o", out]) == 0
    with kvtool.open(out) as archive:
        assert archive.length == 50
    capsys.readouterr()
    for arguments, words in (
        ([one, two, "--tokens", "1:2"], "takes one file"),
        ([one, "--tokens", "5"], "not such as 0:512"),
        ([one, "--tokens", "9:3"], "within 0 to 80"),
    ):
        assert run(["join", *arguments, "--model", "tiny-a", "-o", out]) == 2
        assert words in capsys.readouterr().err
    assert run(["join", one, "--model", "tiny-b", "-o", out]) == 5
