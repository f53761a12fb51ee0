"""What a file is worth: four arms, their seal in the file, and imports that demand one."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.container import open_container
from formats.errors import QualityError
from kvtool import tiny
from kvtool.bridges.bridging import recode_across
from kvtool.cli import run
from kvtool.evaluation import EvalReport, evaluate
from kvtool.model import LoadedModel, load_model
from kvtool.recoding import recode
from kvtool.sealing import parse_limits, require, seal, seconds_of
from tests.library import f64


@pytest.fixture
def file(tiny_a: LoadedModel, tmp_path: Path) -> Path:
    kvtool.save(kvtool.capture(tiny_a, tiny.filler_text()[:900]), tmp_path / "a.kv", codec="rvq-2")
    return tmp_path / "a.kv"


def scored(file: Path, model: LoadedModel, n: int = 64) -> EvalReport:
    return evaluate(file, model, tiny.filler_text()[900:1600], arms=("own", "transferred", "wrong", "none"), tokens=n)


def test_four_arms_in_order_of_worth(file: Path, tiny_a: LoadedModel) -> None:
    report = scored(file, tiny_a)
    assert [arm.arm for arm in report.arms] == ["own", "transferred", "wrong", "none"]
    own, transferred, wrong, none = report.arms
    assert own.kl == own.nll_gap == 0 and own.top1 == 1
    assert transferred.kl < none.kl and transferred.kl < wrong.kl
    for arm in report.arms:
        assert arm.nll_gap == pytest.approx(arm.nll - own.nll, abs=1e-9)


def test_the_wrong_text_is_another_one(file: Path, tiny_a: LoadedModel) -> None:
    with pytest.raises(ValueError, match="tokens other than the prefix, but got the prefix itself"):
        evaluate(file, tiny_a, "and so on and on", arms=("wrong",), wrong=tiny.filler_text()[:900])
    with pytest.raises(ValueError, match="but got 2 tokens"):
        evaluate(file, tiny_a, "and so on and on", arms=("wrong",), wrong=[3, 4])


def test_a_seal_leaves_every_tensor_as_it_was(file: Path, tiny_a: LoadedModel) -> None:
    with open_container(file) as reader:
        before = {name: np.array(reader.array(name)) for name in reader.tensors}
        stored = {name: tensor.blake3 for name, tensor in reader.tensors.items()}
        told = reader.manifest
    entry = seal(scored(file, tiny_a), tiny_a.info)
    with open_container(file) as reader:
        assert reader.verify() == []
        assert reader.manifest == replace(told, quality=(*told.quality, entry))
        assert before.keys() == reader.tensors.keys()
        assert all(np.array_equal(x, reader.array(name)) for name, x in before.items())
        assert stored == {name: tensor.blake3 for name, tensor in reader.tensors.items()}


def test_sealing_again_replaces_the_same_measurement(file: Path, tiny_a: LoadedModel) -> None:
    for n in (64, 64, 32):
        seal(scored(file, tiny_a, n), tiny_a.info)
    with open_container(file) as reader:
        assert [step.get("n") for step in reader.manifest.quality] == [None, 64, 32]


def test_a_seal_needs_the_arm_it_is_about(file: Path, tiny_a: LoadedModel) -> None:
    report = evaluate(file, tiny_a, "and so on and on", arms=("none",))
    with pytest.raises(ValueError, match="must hold 'transferred'"):
        seal(report, tiny_a.info)


def test_demands(file: Path, tiny_a: LoadedModel) -> None:
    def ask(text: str) -> None:
        with open_container(file) as reader:
            require(file, reader.manifest, tiny_a.info, parse_limits(text))

    with pytest.raises(QualityError, match="nothing measured in it for tiny-a"):
        ask("kl=10")
    report = scored(file, tiny_a)
    seal(report, tiny_a.info)
    kl, top1 = report.arm("transferred").kl, report.arm("transferred").top1
    ask(f"kl={kl * 1.01:.6f},top1={top1 * 0.99:.6f},n=64,nll_gap=5")
    for text, words in (
        (f"kl={kl * 0.99:.6f}", "kl .* asked for at most"),
        ("top1=1.01", "top1 .* asked for at least 1.01"),
        ("n=65", "n 64, asked for at least 65"),
    ):
        with pytest.raises(QualityError, match=words):
            ask(text)


def test_a_later_change_voids_the_seal(file: Path, tiny_a: LoadedModel, tmp_path: Path) -> None:
    seal(scored(file, tiny_a), tiny_a.info)
    recode(file, tmp_path / "b.kv", codec="rvq-4")
    with open_container(tmp_path / "b.kv") as reader, pytest.raises(QualityError, match="nothing measured"):
        require(tmp_path / "b.kv", reader.manifest, tiny_a.info, {"kl": 10.0})


def test_a_seal_is_of_one_model(file: Path, tiny_a: LoadedModel) -> None:
    seal(scored(file, tiny_a), tiny_a.info)
    for weights in ("f" * 64, None):
        with open_container(file) as reader, pytest.raises(QualityError, match="nothing measured"):
            require(file, reader.manifest, replace(tiny_a.info, weights=weights), {"kl": 10.0})


@pytest.mark.parametrize("text", ["", "kl", "kl=", "kl=x", "speed=1", "kl=1,kl=2", "kl=-1", "kl=nan", "kl=1,,top1=1"])
def test_demands_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"\[require\] must be some of kl=X"):
        parse_limits(text)


def test_damaged_seals_are_no_seals(file: Path, tiny_a: LoadedModel) -> None:
    """A record of another shape is not taken for a good one."""
    seal(scored(file, tiny_a), tiny_a.info)
    with open_container(file) as reader:
        manifest = reader.manifest
    last = dict(manifest.quality[-1])
    for arms in (None, 3, {}, {"transferred": 0.0}, {"transferred": {"kl": "0"}}, {"transferred": {"kl": None}}):
        bad = replace(manifest, quality=(*manifest.quality[:-1], {**last, "arms": arms}))
        with pytest.raises(QualityError, match="kl is not among what was measured"):
            require(file, bad, tiny_a.info, {"kl": 10.0})


def test_by_command(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rest.txt").write_text(tiny.filler_text()[900:1600])
    again = ["import", str(file), "--model", "tiny-a", "--prompt", " and", "--max-tokens", "2"]
    assert run([*again, "--require", "kl=9"]) == 7
    assert "kvtool eval" in capsys.readouterr().err
    asked = ["eval", str(file), "--model", "tiny-a", "--text", str(tmp_path / "rest.txt"), "--n", "32"]
    assert run([*asked, "--arms", "own,transferred,wrong,none", "--seal"]) == 0
    assert "sealed" in capsys.readouterr().out
    assert run([*again, "--require", "kl=9,n=32"]) == 0
    assert run([*again, "--require", "kl=0.0000001"]) == 7
    assert run([*again, "--require", "sharpness=1"]) == 2
    assert run([*asked, "--recompute", "newest=3", "--seal"]) == 2
    assert run([*again, "--recompute", "newest=3", "--require", "kl=9"]) == 2
    capsys.readouterr()
    assert run([*asked, "--json", "--arms", "own,transferred,wrong"]) == 0
    assert {arm["arm"] for arm in json.loads(capsys.readouterr().out)["arms"]} == {"own", "transferred", "wrong"}


def test_figures_against_float64(file: Path, tiny_a: LoadedModel) -> None:
    """One arm's numbers from logits, without the scoring code."""
    report = scored(file, tiny_a, 16)
    ids = tiny_a.tokenizer.encode(tiny.filler_text()[900:1600])
    with kvtool.open(file) as archive:
        prefix = list(archive.tokens or ())
        cache = archive.load(tiny_a, decode=True).cache
    given = f64(tiny_a.model(mx.array(ids[:16])[None], cache=cache))[0]
    own = f64(tiny_a.model(mx.array(prefix + ids[:16])[None]))[0][-16:]
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (own, given))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    arm = report.arm("transferred")
    assert arm.kl == pytest.approx(np.mean(np.sum(p * np.log(p / q), -1)), rel=1e-3, abs=1e-7)
    assert arm.nll == pytest.approx(-np.mean(np.log(q[np.arange(16), ids[1:17]])), rel=1e-4)


def test_a_seal_says_the_seconds_of_prefill_and_transfer(file: Path, tiny_a: LoadedModel, tmp_path: Path) -> None:
    """Of a file handed over from another model the transfer is what writing it took, by its record, and loading it."""
    tiny_b = load_model("tiny-b")
    entry = seal(scored(file, tiny_a), tiny_a.info)
    assert entry["seconds"]["recode"] == 0 and entry["seconds"]["transfer"] == entry["seconds"]["load"] > 0
    recode_across(file, tmp_path / "b.kv", tiny_b, recompute="first=4,newest=10%")
    report = scored(tmp_path / "b.kv", tiny_b)
    entry = seal(report, tiny_b.info)
    with open_container(tmp_path / "b.kv") as reader:
        took = next(step for step in reader.manifest.quality if step["step"] == "transfer")["seconds"]
        assert reader.manifest.quality[-1] == entry
    assert set(took) == {"load", "map", "recompute"} and min(took.values()) > 0
    seconds = entry["seconds"]
    assert seconds["prefill"] > 0 and seconds["prefill"] == pytest.approx(report.arm("own").seconds, rel=1e-4)
    assert seconds["recode"] == pytest.approx(sum(took.values()), rel=1e-4)
    assert seconds["transfer"] == pytest.approx(seconds["load"] + seconds["recode"], rel=1e-4)
    assert f"own prefill {seconds['prefill']:.3g} s, transfer {seconds['transfer']:.3g} s" in entry["note"]


def test_a_record_of_seconds_that_lies_is_not_summed(file: Path, tiny_a: LoadedModel) -> None:
    report = scored(file, tiny_a)
    for seconds in (None, 3, {"load": "x", "map": True}):
        step = {"step": "transfer", "seconds": seconds}
        assert seconds_of(replace(report, quality=(step,)))["recode"] == 0
