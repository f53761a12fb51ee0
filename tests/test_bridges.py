"""A cache of one model in another: maps, recomputed tokens, and both together, on the shipped pair."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.errors import IncompatibleError
from formats.transfer_map import MapFile, write_map
from kvtool import tiny
from kvtool.bridges.fitting import fit
from kvtool.bridges.recompute import Recompute
from kvtool.bridges.transferring import source_of, source_of_snapshot, transfer
from kvtool.bridges.work import Work
from kvtool.capturing import Snapshot, capture
from kvtool.cli import run
from kvtool.evaluation import score_caches
from kvtool.model import LoadedModel, load_model
from kvtool.recoding import recode
from kvtool.snapshot import build_caches
from tests.library import tiny as random_model

PREFIX, SCORED = 256, 128


@pytest.fixture(scope="module")
def tiny_b() -> LoadedModel:
    return load_model("tiny-b")


@cache
def mapping() -> MapFile:
    return fit(load_model("tiny-a"), load_model("tiny-b"), pieces=40)


@cache
def prompt() -> tuple[int, ...]:
    return tuple(load_model("tiny-b").tokenizer.encode(tiny.filler_text())[: PREFIX + SCORED + 1])


@cache
def computed(name: str) -> Snapshot:
    return capture(load_model(name), prompt()[:PREFIX])


def arrays(snapshot: Snapshot) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for state in snapshot.states:
        assert isinstance(state.k, mx.array) and isinstance(state.v, mx.array)
        yield np.array(state.k), np.array(state.v)


def assert_close(a: Snapshot, b: Snapshot, rows: slice = slice(None)) -> None:
    """Rows are the same but for float32's rounding through a few layers."""
    for ours, theirs in zip(arrays(a), arrays(b), strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert np.allclose(x[:, rows], y[:, rows], atol=2e-5 * np.abs(y).max())


def divergences(model: LoadedModel, **caches: Snapshot) -> dict[str, float]:
    live = {name: build_caches(snapshot.states) for name, snapshot in {"own": computed("tiny-b"), **caches}.items()}
    scores = score_caches(model, live, prompt()[PREFIX:], SCORED, None)
    return {name: float(score["kl"].mean()) for name, score in scores.items()}


def test_without_a_map_it_is_the_plain_recode(tiny_a: LoadedModel, tiny_b: LoadedModel, tmp_path: Path) -> None:
    kvtool.save(computed("tiny-a"), tmp_path / "a.kv")
    recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=tiny_b)
    with kvtool.open(tmp_path / "b.kv") as archive:
        plain = replace(computed("tiny-b"), states=tuple(archive.state(i) for i in range(len(archive.manifest.layers))))
    assert_close(transfer(source_of_snapshot(computed("tiny-a")), tiny_b), plain)


def test_all_tokens_recomputed_are_the_own_prefill(tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(computed("tiny-a"))
    for plan in (Recompute(newest=PREFIX), Recompute(first=PREFIX), Recompute(first=100, newest=PREFIX - 100)):
        assert_close(transfer(source, tiny_b, mapping=mapping(), recompute=plan), computed("tiny-b"))


def test_first_tokens_are_exact_and_the_rest_is_mapped(tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(computed("tiny-a"))
    mapped, mixed = (transfer(source, tiny_b, mapping=mapping(), recompute=Recompute(first=n)) for n in (0, 7))
    assert_close(mixed, computed("tiny-b"), slice(0, 7))
    assert_close(mixed, mapped, slice(7, None))


def test_newest_tokens_see_the_mapped_rows(tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(computed("tiny-a"))
    mapped, mixed = (transfer(source, tiny_b, mapping=mapping(), recompute=Recompute(newest=n)) for n in (0, 16))
    assert_close(mixed, mapped, slice(0, PREFIX - 16))
    source = source_of_snapshot(capture(load_model("tiny-a"), prompt()[: PREFIX - 16]))
    caches = build_caches(transfer(source, tiny_b, mapping=mapping()).states)
    tiny_b.model(mx.array(prompt()[PREFIX - 16 : PREFIX])[None], cache=caches)
    for state, cache_ in zip(mixed.states, caches, strict=True):
        assert np.allclose(np.array(state.k), np.array(cache_.state[0][0])[:, :PREFIX], atol=1e-4)


def test_a_map_is_worth_its_bytes(tiny_b: LoadedModel) -> None:
    """Held-out text: half the divergence of rotated keys is gone by the map, and more by recomputing besides."""
    source = source_of_snapshot(computed("tiny-a"))
    plan = Recompute.parse("first=4,newest=10%", PREFIX)
    found = divergences(
        tiny_b,
        plain=transfer(source, tiny_b),
        mapped=transfer(source, tiny_b, mapping=mapping()),
        both=transfer(source, tiny_b, mapping=mapping(), recompute=plan),
    )
    assert found["mapped"] < 0.5 * found["plain"] and found["both"] < 0.9 * found["mapped"]


def test_the_record_says_what_was_done(tiny_b: LoadedModel) -> None:
    step = transfer(source_of_snapshot(computed("tiny-a")), tiny_b, mapping=mapping(), recompute=Recompute(4, 20)).history[-1]
    assert (step["step"], step["from"], step["to"], step["mapped"], step["first"], step["newest"]) == (
        "transfer", "tiny-a", "tiny-b", True, 4, 20,
    )  # fmt: skip
    assert "4 first tokens recomputed" in step["note"] and 0 < step["map_unexplained"] < 1


def test_shares_are_counted(tiny_b: LoadedModel) -> None:
    work = Work(tiny_b)
    assert Recompute(newest=64).share(work, 64) == 1
    parts = [Recompute(newest=n).share(work, 64) for n in (1, 16, 63)]
    assert 1 / 64 < parts[0] < 16 / 64 < parts[1] < parts[2] < 1  # the newest tokens attend to more than others
    assert Recompute(first=16).share(work, 64) < 16 / 64
    # By hand: weights of every projection, and 4 operations a channel for each pair of tokens.
    args = tiny_b.model.args
    hidden, heads, kv, inner = args.hidden_size, args.num_attention_heads, args.num_key_value_heads, args.intermediate_size
    dim = args.head_dim or hidden // heads
    weights = 2 * hidden * heads * dim + 2 * hidden * kv * dim + 3 * hidden * inner
    assert work.span(0, 10) == args.num_hidden_layers * (2 * weights * 10 + 4 * heads * dim * 55)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("newest", "such as first=4,newest=20%"),
        ("newest=1,newest=2", "such as"),
        ("newest=1.5", "whole number of tokens"),
        ("first=200,newest=57", "at most the 256 tokens"),
        ("newest=101%", "at most the 256 tokens"),
        ("", "such as"),
    ],
)
def test_plans_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recompute.parse(text, 256)


def test_plans() -> None:
    assert Recompute.parse("first=4,newest=12.5%", 256) == Recompute(4, 32)
    assert Recompute.parse("newest=0", 256) == Recompute()


def test_a_map_of_other_models_is_refused(tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    backwards = replace(mapping(), source=mapping().target, target=mapping().source)
    with pytest.raises(IncompatibleError, match="the map's source is tiny-b"):
        transfer(source_of_snapshot(computed("tiny-a")), tiny_b, mapping=backwards)
    with pytest.raises(IncompatibleError, match="the map's target is tiny-b"):
        transfer(source_of_snapshot(computed("tiny-a")), tiny_a, mapping=mapping())


def test_a_map_whose_shapes_do_not_fit_is_refused(tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(computed("tiny-a"))
    short = replace(mapping(), layers={"0": mapping().layers["0"]})
    with pytest.raises(IncompatibleError, match="the map has layers 0, the model 0 to"):
        transfer(source, tiny_b, mapping=short)
    far = replace(mapping(), layers={name: replace(own, sources=("99",)) for name, own in mapping().layers.items()})
    with pytest.raises(IncompatibleError, match="is from layer '99', the rows have 0 to 3"):
        transfer(source, tiny_b, mapping=far)
    two = replace(mapping(), layers={name: replace(own, sources=("0", "1")) for name, own in mapping().layers.items()})
    with pytest.raises(IncompatibleError, match="takes 256 entries, but the rows have 512"):
        transfer(source, tiny_b, mapping=two)


def test_unlike_shapes_need_a_map(tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(computed("tiny-a"))
    with pytest.raises(IncompatibleError, match=r"has 3 layers of .* the model 4 of") as refused:
        transfer(replace(source, shapes=source.shapes[:-1]), tiny_b)
    assert "kvtool fit" in str(refused.value.hint)


def test_other_tokenizers_are_refused(tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(computed("tiny-a"))
    with pytest.raises(IncompatibleError, match="tokenizer of tiny-a is not that of tiny-b: file ffffffffffff"):
        transfer(replace(source, model=replace(source.model, tokenizer="f" * 64)), tiny_b)


def test_the_same_weights_need_no_map(tiny_a: LoadedModel) -> None:
    with pytest.raises(IncompatibleError, match="same weights"):
        fit(tiny_a, tiny_a)


def test_sliding_layers_are_refused_by_name(tiny_b: LoadedModel) -> None:
    sliding = random_model("llama-sliding")
    with pytest.raises(IncompatibleError, match="full attention"):
        transfer(source_of_snapshot(computed("tiny-a")), sliding)


def test_files_by_command(tmp_path: Path, tiny_b: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    write_map(tmp_path / "ab.map", mapping())
    kvtool.save(computed("tiny-a"), tmp_path / "a.kv", codec="rvq-4")
    how = ["--map", str(tmp_path / "ab.map"), "--recompute", "first=4,newest=10%"]
    assert run(["recode", str(tmp_path / "a.kv"), "-o", str(tmp_path / "b.kv"), "--to-model", "tiny-b", *how, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["codec"] == "rvq-4,sink=4,recent=32"  # that of the file
    assert "4 first tokens recomputed" in report["notes"][0] and "% of a prefill" in report["notes"][0]
    with kvtool.open(tmp_path / "b.kv") as archive:
        assert [step["step"] for step in archive.manifest.quality] == ["encode", "transfer", "encode"]
        assert archive.manifest.model.weights == tiny_b.info.weights
    results = []
    for file, more in (("b.kv", []), ("a.kv", how), ("a.kv", [*how, "--live", "rvq-4"])):
        assert run(["import", str(tmp_path / file), "--model", "tiny-b", *more, "--prompt", " and", "--max-tokens", "6", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["text"] == results[1]["text"] == results[2]["text"]
    assert any("recomputed" in remark for remark in results[1]["notes"])


def test_a_bridged_cache_forks(tmp_path: Path, tiny_b: LoadedModel) -> None:
    kvtool.save(computed("tiny-a"), tmp_path / "a.kv")
    restored = kvtool.load_across(tmp_path / "a.kv", tiny_b, recompute="newest=8")
    (fork,) = restored.fork(1)
    outs = [np.array(tiny_b.model(mx.array([[5, 6]]), cache=one.cache)) for one in (restored, fork)]
    assert np.allclose(outs[0], outs[1], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recode", "{a}", "-o", "{b}", "--recompute", "newest=8"], "need --to-model"),
        (["recode", "{a}", "-o", "{b}", "--to-model", "tiny-b", "--recompute", "newest=8", "--shift", "3"], "go without --rope-theta"),
        (["import", "{a}", "--model", "tiny-b", "--recompute", "newest=8", "--decode"], "go without --to and --decode"),
        (["recode", "{a}", "-o", "{b}", "--to-model", "tiny-b", "--recompute", "lots"], "such as first=4"),
        (["fit", "tiny-a", "tiny-b", "--text", "{t}", "-o", "{b}"], "at least 2 documents"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    kvtool.save(computed("tiny-a"), tmp_path / "a.kv")
    (tmp_path / "t").write_text("one text alone, of some words that repeat " * 40)
    names: dict[str, Any] = {"a": tmp_path / "a.kv", "b": tmp_path / "b.kv", "t": tmp_path / "t"}
    assert run([word.format(**names) for word in arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "b.kv").exists()


def test_a_file_without_tokens_is_refused(tiny_b: LoadedModel, tmp_path: Path) -> None:
    kvtool.save(replace(computed("tiny-a"), tokens=None), tmp_path / "a.kv")
    with kvtool.open(tmp_path / "a.kv") as archive, pytest.raises(IncompatibleError, match="no token ids"):
        source_of(archive)
