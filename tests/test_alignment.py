"""Two tokenizers over one text: which row stands for which token, what is refused, and a cache handed over between them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtool
from formats.errors import IncompatibleError
from formats.transfer_map import MapFile, write_map
from kvtool.bridges.alignment import align, align_text, token_bytes
from kvtool.bridges.fitting import fit
from kvtool.bridges.transferring import realigned, source_of_snapshot
from kvtool.capturing import capture
from kvtool.cli import run
from kvtool.explaining import explain
from kvtool.model import LoadedModel, load_model
from tests.library import tiny as random_model
from tests.measure_shapes import arms_of, closed, held_out_texts
from tests.shapes import path

TINY_D = str(path("tiny-d"))
TEXT = "The naïve café — 日本語, 100 µm \U0001f600 — was\n\n  not\tthere; it's 12345."


@pytest.fixture(scope="module")
def tiny_d() -> LoadedModel:
    return load_model(TINY_D)


@cache
def mapping() -> MapFile:
    return fit(load_model("tiny-a"), load_model(TINY_D), pieces=40, sources=2, overlap=0.5)


def oracle(source: list[bytes], target: list[bytes]) -> tuple[list[int], float]:
    """Byte by byte: the token of each byte."""
    owner = [i for i, piece in enumerate(source) for _ in piece]
    last = [i for i, piece in enumerate(source) for _ in piece[:-1]]
    ends, at, rows, same = set(), 0, [], 0
    for piece in source:
        at += len(piece)
        ends.add(at)
    assert len(last) == len(owner) - len(source)
    at = 0
    for piece in target:
        at += len(piece)
        rows.append(owner[at - 1])
        same += at in ends
    return rows, same / len(target)


@pytest.mark.parametrize("text", [TEXT, held_out_texts()[3]])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_token_has_the_row_that_covers_its_last_byte(text: str, backwards: bool, tiny_a: LoadedModel, tiny_d: LoadedModel) -> None:
    source, target = (tiny_d, tiny_a) if backwards else (tiny_a, tiny_d)
    found = align_text(source, target, text)
    pieces = [token_bytes(model, ids) for model, ids in ((source, found.source), (target, found.target))]
    assert [b"".join(piece).decode() for piece in pieces] == [text, text]
    assert list(found.target) == list(target.tokenizer.encode(text, add_special_tokens=False))
    rows, overlap = oracle(*pieces)
    assert found.rows.tolist() == rows and found.overlap == overlap
    assert source.info.tokenizer != target.info.tokenizer and overlap > 0.5 and len(found.source) != len(found.target)
    assert source.tokenizer.decode(list(found.source)) == text


def test_one_tokenizer_with_itself(tiny_a: LoadedModel) -> None:
    found = align_text(tiny_a, tiny_a, TEXT)
    assert found.source == found.target and found.overlap == 1 and found.rows.tolist() == list(range(len(found.source)))


def test_what_cannot_be_aligned_is_refused(tiny_a: LoadedModel, tiny_d: LoadedModel) -> None:
    ids = tiny_a.tokenizer.encode("日本")
    with pytest.raises(IncompatibleError, match=r"are no whole text: byte 3 of \d does not decode") as refused:
        align(tiny_a, tiny_d, ids[:-1])
    assert "--tokens :N" in str(refused.value.hint)
    with pytest.raises(IncompatibleError, match="is not byte-level"):
        align(random_model("llama"), tiny_d, [5, 6])
    with pytest.raises(IncompatibleError, match="the tokens are not those of tiny-d"):
        realigned(source_of_snapshot(capture(tiny_a, ids)), tiny_d, tiny_d)


def test_a_special_token_that_one_lacks_is_refused(tiny_a: LoadedModel, tiny_d: LoadedModel) -> None:
    class Plain:
        """tiny-d's tokenizer without special tokens."""

        all_special_tokens: tuple[str, ...] = ()

        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_d.tokenizer, name)

    ids = [2, *tiny_a.tokenizer.encode("Hello")]
    assert align(tiny_a, tiny_d, ids).target[0] == 2
    with pytest.raises(IncompatibleError, match=r"special token '<\|user\|>', which tiny-d does not have"):
        align(tiny_a, replace(tiny_d, tokenizer=Plain()), ids)


def test_too_little_overlap_is_refused(tiny_a: LoadedModel, tiny_d: LoadedModel) -> None:
    source = source_of_snapshot(capture(tiny_a, tiny_a.tokenizer.encode(held_out_texts()[0])[:64]))
    assert realigned(source, tiny_a, tiny_d, 0.5).length > source.length
    with pytest.raises(IncompatibleError, match=r"\d\d% of the tokens of tiny-d end where one of tiny-a does, of which 99% are asked for"):
        realigned(source, tiny_a, tiny_d, 0.99)
    with pytest.raises(IncompatibleError, match="of which 99% are asked for"):
        fit(tiny_a, tiny_d, pieces=20, overlap=0.99)
    with pytest.raises(IncompatibleError, match="unlike tokenizers"):
        fit(tiny_a, tiny_d, pieces=20)
    with pytest.raises(ValueError, match=r"\[fit\] overlap must be between 0 and 1, but got 2"):
        fit(tiny_a, tiny_d, overlap=2)


def test_a_cache_in_the_tokens_of_another_model(tiny_a: LoadedModel, tiny_d: LoadedModel) -> None:
    """Half of what a cache is worth is asked for."""
    found = arms_of(tiny_a, tiny_d, {"map": mapping()}, held_out_texts()[:5])
    assert np.mean(np.concatenate(found["no cache"].nll)) > np.mean(np.concatenate(found["own"].nll)) + 0.02
    assert closed(found, "map")[0] > 0.5
    assert np.mean(np.concatenate(found["map"].kl)) < 0.5 * np.mean(np.concatenate(found["no cache"].kl))


def test_by_command(tmp_path: Path, tiny_a: LoadedModel, tiny_d: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tiny_a.tokenizer.encode(held_out_texts()[0])[:64]
    kvtool.save(capture(tiny_a, ids), tmp_path / "a.kv")
    write_map(tmp_path / "map", mapping())
    command = ["recode", str(tmp_path / "a.kv"), "-o", str(tmp_path / "d.kv"), "--to-model", TINY_D, "--map", str(tmp_path / "map")]
    assert run(["explain", str(tmp_path / "a.kv"), "--model", TINY_D, "--json"]) == 5
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "alignment" and "--overlap 0.5" in told["commands"][0] and "--from-model tiny-a" in told["commands"][1]
    assert run(command) == 5
    assert "the tokenizer of tiny-a is not that of tiny-d" in capsys.readouterr().err
    assert run([*command, "--from-model", "tiny-a", "--recompute", "first=4", "--json"]) == 0
    capsys.readouterr()
    with kvtool.open(tmp_path / "d.kv") as archive:
        assert archive.tokens == align(tiny_a, tiny_d, ids).target and archive.length == len(archive.tokens)
        assert tiny_d.tokenizer.decode(list(archive.tokens)) == tiny_a.tokenizer.decode(ids)
        steps = {step["step"]: step for step in archive.manifest.quality}
    assert 0.5 < steps["align"]["overlap"] < 1 and steps["transfer"]["first"] == 4
    assert explain(tmp_path / "d.kv", tiny_d).verdict == "identical"
    assert run(["import", str(tmp_path / "d.kv"), "--model", TINY_D, "--prompt", " and", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"]
    assert run([*command[:-2], "--from-model", "tiny-a"]) == 2
    assert "--from-model goes with --map" in capsys.readouterr().err
    assert run(command[:-2]) == 5
    told = capsys.readouterr().err
    assert run(["eval", str(tmp_path / "a.kv"), "--model", TINY_D, "--text", __file__]) == 5
    assert "kvtool explain says whether a map carries it over" in capsys.readouterr().err
    assert "keys alone move only between models that share a tokenizer" in told and "--map MAP --from-model A" in told


def test_import_and_eval_align_as_recode_does(
    tmp_path: Path, tiny_a: LoadedModel, tiny_d: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tiny_a.tokenizer.encode(held_out_texts()[0])[:96]
    kvtool.save(capture(tiny_a, ids), tmp_path / "a.kv")
    write_map(tmp_path / "map", mapping())
    (tmp_path / "rest").write_text(tiny_a.tokenizer.decode(tiny_a.tokenizer.encode(held_out_texts()[0])[96:300]))
    across = ["--map", str(tmp_path / "map"), "--recompute", "first=4"]
    by = [*across, "--from-model", "tiny-a"]
    assert run(["recode", str(tmp_path / "a.kv"), "-o", str(tmp_path / "d.kv"), "--to-model", TINY_D, *by, "--codec", "raw"]) == 0
    capsys.readouterr()
    verbs = (["import", "--prompt", " and", "--max-tokens", "6"], ["eval", "--text", str(tmp_path / "rest"), "--n", "40"])
    for verb, *rest in verbs:
        results = []
        for file, more in (("d.kv", []), ("a.kv", by)):
            assert run([verb, str(tmp_path / file), "--model", TINY_D, *rest, *more, "--json"]) == 0
            results.append(json.loads(capsys.readouterr().out))
        if verb == "import":
            assert results[0]["text"] == results[1]["text"] and results[0]["usable_tokens"] == results[1]["usable_tokens"]
        else:
            assert results[0]["text"] == results[1]["text"] and results[0]["prefix"] == results[1]["prefix"] == len(
                align(tiny_a, tiny_d, ids).target
            )
            ours, theirs = ([arm["kl"] for arm in result["arms"]] for result in results)
            assert np.allclose(ours, theirs, rtol=1e-3, atol=1e-6) and 0 < ours[1] < ours[2]
        assert run([verb, str(tmp_path / "a.kv"), "--model", TINY_D, *rest, *across]) == 5
        assert "--from-model A" in capsys.readouterr().err
        assert run([verb, str(tmp_path / "a.kv"), "--model", TINY_D, *rest, *by, "--overlap", "0.99"]) == 5
        assert "of which 99% are asked for" in capsys.readouterr().err
        assert run([verb, str(tmp_path / "a.kv"), "--model", TINY_D, *rest, "--from-model", "tiny-a"]) == 2
        assert "--from-model goes with --map" in capsys.readouterr().err
        assert run([verb, str(tmp_path / "a.kv"), "--model", TINY_D, *rest, *across, "--overlap", "0.9"]) == 2
        assert "--overlap goes with --from-model" in capsys.readouterr().err
    live = [*by, "--live", "rvq-4", "--prompt", " and", "--max-tokens", "6", "--json"]
    assert run(["import", str(tmp_path / "a.kv"), "--model", TINY_D, *live]) == 0
    assert any("kept as rvq-4" in remark for remark in json.loads(capsys.readouterr().out)["notes"])


def test_tokens_that_were_not_run_yet_are_still_to_be_run(tiny_a: LoadedModel, tiny_d: LoadedModel) -> None:
    """A file may hold tokens beyond its rows: aligned, they are tokens without a row, and none is lost."""
    ids = tuple(tiny_a.tokenizer.encode(held_out_texts()[0])[:40])
    source = replace(source_of_snapshot(capture(tiny_a, ids, layer_inputs=[1])), length=35)
    found = realigned(source, tiny_a, tiny_d)
    pieces = [token_bytes(model, own) for model, own in ((tiny_a, ids), (tiny_d, found.tokens))]
    assert b"".join(pieces[0]) == b"".join(pieces[1])
    seen = len(b"".join(pieces[0][:35]))
    ends = np.cumsum([len(piece) for piece in pieces[1]])
    assert found.length == np.sum(ends <= seen) < len(found.tokens)
    rows, _ = oracle(*pieces)
    assert np.array_equal(found.rows(2), source.rows(2)[rows[: found.length]])
    assert np.array_equal(np.array(found.layer_input(1)), np.array(source.layer_input(1))[rows[: found.length]])
